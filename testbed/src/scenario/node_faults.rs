//! Nodes in trouble: kubelet restarted or not there, sockets deleted, a GPU that falls sick.

use anyhow::Result;
use futures::FutureExt;
use futures::future::BoxFuture;
use proto::resource::GPU_MEM;

use super::breaking::{self, until_registered};
use super::{Body, World};
use crate::cluster::GpuFault;
use crate::observer::ClusterSnapshot;
use crate::parts::ClusterPart;
use crate::pods::PodBuilder;

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] = &[
    (
        "kubelet-restarted",
        "the plugin registers again, running pods keep their GPU, new ones start",
        kubelet_restarted,
    ),
    (
        "own-socket-deleted",
        "the plugin notices, and serves again",
        own_socket_deleted,
    ),
    (
        "kubelet-missing",
        "a plugin that starts without kubelet's socket waits for it",
        kubelet_missing,
    ),
    ("xid-79", "a sick GPU takes no new pods until it recovers", xid_79),
];

fn kubelet_restarted(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(1)?.name;
        world.start_units("before", "1", &node).await?;
        breaking::restart(world, ClusterPart::Kubelet, &node).await?;
        until_registered(world, &node).await?;
        world.start_units("after", "1", &node).await?;
        world.until_running(&["before", "after"]).await
    }
    .boxed()
}

fn own_socket_deleted(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(1)?.name;
        breaking::replace_plugin_sockets(world, &node).await?;
        until_registered(world, &node).await?;
        world.start_units("after", "1", &node).await.map(|_| ())
    }
    .boxed()
}

fn kubelet_missing(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(1)?.name;
        breaking::remove_kubelet_socket(world, &node).await?;
        breaking::restart(world, ClusterPart::Plugin, &node).await?;
        breaking::until_plugin_waits_for_kubelet(world, &node).await?;
        breaking::restart(world, ClusterPart::Kubelet, &node).await?;
        until_registered(world, &node).await?;
        world.start_units("after", "1", &node).await.map(|_| ())
    }
    .boxed()
}

fn xid_79(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
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
        for (idx, units) in node.units.iter().enumerate().skip(1) {
            world
                .start(
                    PodBuilder::new(&format!("beside-{idx}"), &[(GPU_MEM, &units.to_string())])
                        .on(&node.name),
                )
                .await?;
        }
        world.create_units("waits", "1", &node.name).await?;
        world.until_refused("waits", "nodes are available").await?;
        world.verify().await?;
        world
            .node(&node.name)?
            .set_health(sick_minor, GpuFault::Healthy)?;
        world.until_running(&["waits"]).await
    }
    .boxed()
}
