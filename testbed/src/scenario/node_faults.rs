//! Nodes in trouble: kubelet restarted or not there, sockets deleted, a GPU that falls sick.

use anyhow::Result;
use proto::device::Device;

use super::breaking::{self, until_registered};
use super::{Scenario, World};
use kit::cluster::GpuFault;
use kit::parts::{ClusterPart, Need, NodeFile};

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "GPUs that fall sick on command", on [Faults]:
    "kubelet-restarted" needs [Need::Kill(ClusterPart::Kubelet)] => kubelet_restarted,
        "the plugin registers again, running pods keep their GPU, new ones start";
    "own-socket-deleted" needs [Need::Remove(NodeFile::PluginSockets)] => own_socket_deleted,
        "the plugin notices, and serves again";
    "kubelet-missing" needs [Need::Kill(ClusterPart::Plugin), Need::Kill(ClusterPart::Kubelet), Need::Remove(NodeFile::KubeletSocket)] => kubelet_missing,
        "a plugin that starts without kubelet's socket waits for it";
    "xid-79" => xid_79,
        "a sick GPU takes no new pods until it recovers";
};

async fn kubelet_restarted(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    world.start_units("before", "1", &node).await?;
    breaking::restart(world, ClusterPart::Kubelet, &node).await?;
    until_registered(world, &node).await?;
    world.start_units("after", "1", &node).await?;
    world.until_running(&["before", "after"]).await
}

async fn own_socket_deleted(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    breaking::replace_plugin_sockets(world, &node).await?;
    until_registered(world, &node).await?;
    world.start_units("after", "1", &node).await.map(drop)
}

async fn kubelet_missing(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    breaking::remove_kubelet_socket(world, &node).await?;
    breaking::restart(world, ClusterPart::Plugin, &node).await?;
    breaking::until_plugin_waits_for_kubelet(world, &node).await?;
    breaking::restart(world, ClusterPart::Kubelet, &node).await?;
    until_registered(world, &node).await?;
    world.start_units("after", "1", &node).await.map(drop)
}

/// Waits until the plugin reports a node's GPU 0 as healthy, or as not.
pub(super) async fn until_reported(world: &World, node: &str, is_healthy: bool) -> Result<()> {
    let is_so = |device: &Device| {
        let mut devices = device.spec.devices.iter();
        devices
            .any(|info| info.minor == Some(0) && info.health == is_healthy)
            .then_some(())
    };
    let what = format!("a GPU to be reported with health {is_healthy}");
    world.until_device(node, &what, is_so).await
}

/// XID 79: the GPU has fallen off the bus.
async fn xid_79(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    world.node(&node.name)?.set_health(0, GpuFault::Xid(79))?;
    until_reported(world, &node.name, false).await?;
    // The other GPUs are filled, so that the next pod could go to the sick one alone.
    world.fill_gpus("beside", &node, 1).await?;
    world.create_waiting_units("waits", 1, &node.name).await?;
    world.verify().await?;
    world.node(&node.name)?.set_health(0, GpuFault::Healthy)?;
    world.until_running(&["waits"]).await
}
