//! Nodes in trouble: kubelet restarted or not there, sockets deleted, a GPU that falls sick.

use anyhow::Result;

use super::breaking::{self, until_registered};
use super::{ScenarioEntry, World};
use kit::cluster::GpuFault;
use kit::observer::ClusterSnapshot;
use kit::parts::ClusterPart;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
    "kubelet-restarted" => kubelet_restarted,
        "the plugin registers again, running pods keep their GPU, new ones start";
    "own-socket-deleted" => own_socket_deleted,
        "the plugin notices, and serves again";
    "kubelet-missing" => kubelet_missing,
        "a plugin that starts without kubelet's socket waits for it";
    "xid-79" => xid_79,
        "a sick GPU takes no new pods until it recovers";
};

/// kubelet restarts: the plugin registers again, running pods go on and new ones run.
async fn kubelet_restarted(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    world.start_units("before", "1", &node).await?;
    breaking::restart(world, ClusterPart::Kubelet, &node).await?;
    until_registered(world, &node).await?;
    world.start_units("after", "1", &node).await?;
    world.until_running(&["before", "after"]).await
}

/// The plugin's own sockets are deleted: the plugin makes new ones and registers again.
async fn own_socket_deleted(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    breaking::replace_plugin_sockets(world, &node).await?;
    until_registered(world, &node).await?;
    world.start_units("after", "1", &node).await.map(|_| ())
}

/// The plugin starts while there is no kubelet: it waits, and registers once kubelet runs.
async fn kubelet_missing(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    breaking::remove_kubelet_socket(world, &node).await?;
    breaking::restart(world, ClusterPart::Plugin, &node).await?;
    breaking::until_plugin_waits_for_kubelet(world, &node).await?;
    breaking::restart(world, ClusterPart::Kubelet, &node).await?;
    until_registered(world, &node).await?;
    world.start_units("after", "1", &node).await.map(|_| ())
}

/// A GPU has XID 79 (it has fallen off the bus): no pod is placed on it until it is healthy again.
async fn xid_79(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    let sick_minor = 0;
    let is_healthy = |snapshot: &ClusterSnapshot| {
        let device = snapshot.devices.get(&node.name)?;
        device
            .spec
            .devices
            .iter()
            .find(|info| info.minor == Some(0))
            .map(|info| info.health)
    };
    world
        .node(&node.name)?
        .set_health(sick_minor, GpuFault::Xid(79))?;
    world
        .until("the GPU to be reported sick", |snapshot| {
            (is_healthy(snapshot) == Some(false)).then_some(())
        })
        .await?;
    // The other GPUs are filled, so that the next pod could go to the sick one alone.
    world.fill_gpus("beside", &node, 1).await?;
    world.create_units("waits", "1", &node.name).await?;
    world.until_refused("waits", "nodes are available").await?;
    world.verify().await?;
    world
        .node(&node.name)?
        .set_health(sick_minor, GpuFault::Healthy)?;
    world.until_running(&["waits"]).await
}
