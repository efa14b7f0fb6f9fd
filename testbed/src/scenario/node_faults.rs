//! Nodes in trouble: kubelet restarted or not there, sockets deleted, a GPU that falls sick.

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use proto::resource::GPU_MEM;

use super::{Body, DEADLINE, World};
use crate::cluster::Health;
use crate::observer::Snapshot;
use crate::pods::PodSpec;

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] = &[
    ("kubelet-restarted", "the plugin registers again, running pods keep their GPU, new ones start", kubelet_restarted),
    ("own-socket-deleted", "the plugin notices, and serves again", own_socket_deleted),
    ("kubelet-missing", "a plugin that starts without kubelet's socket waits for it", kubelet_missing),
    ("xid-79", "a sick GPU takes no new pods until it recovers", xid_79),
];

/// Waits until a node's plugin serves all its resources again, to a kubelet that knew nothing of it.
pub(super) async fn until_registered(world: &mut World, node: &str) -> Result<()> {
    let cluster = world.cluster()?;
    let kubelet = cluster.node(node)?.kubelet();
    let serves = |kubelet: &crate::kubelet::Kubelet| {
        let counts = kubelet.capacity();
        counts.len() >= 2 && counts.values().all(|(_, healthy)| *healthy > 0)
    };
    ensure!(kubelet.until(DEADLINE, serves).await, "the plugin of {node} has not registered again");
    world.cluster()?.until_ready(DEADLINE).await
}

fn kubelet_restarted(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(1)?.name;
        world.start(PodSpec::new("before", &[(GPU_MEM, "1")]).on(&node)).await?;
        world.cluster()?.node(&node)?.restart_kubelet().await?;
        until_registered(world, &node).await?;
        world.start(PodSpec::new("after", &[(GPU_MEM, "1")]).on(&node)).await?;
        world.until_running(&["before", "after"]).await
    }
    .boxed()
}

fn own_socket_deleted(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(1)?.name;
        let sockets = world.cluster()?.node(&node)?.plugin_sockets()?;
        ensure!(!sockets.is_empty(), "the plugin has no socket");
        for socket in &sockets {
            std::fs::remove_file(socket).with_context(|| format!("cannot remove {}", socket.display()))?;
        }
        let back = async {
            while !sockets.iter().all(|socket| socket.exists()) {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(DEADLINE, back).await.context("the sockets do not come back")?;
        until_registered(world, &node).await?;
        world.start(PodSpec::new("after", &[(GPU_MEM, "1")]).on(&node)).await.map(|_| ())
    }
    .boxed()
}

fn kubelet_missing(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(1)?.name;
        let found = world.cluster()?.node(&node)?;
        let socket = found.kubelet().config().plugin_socket();
        std::fs::remove_file(&socket).with_context(|| format!("cannot remove {}", socket.display()))?;
        found.restart_plugin().await?;
        let waits = |tail: String| tail.contains("kubelet");
        let says_so = async {
            while !found.plugin().is_some_and(|plugin| waits(plugin.log_tail())) {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(DEADLINE, says_so).await.context("the plugin does not say that kubelet is missing")?;
        ensure!(!found.plugin().is_none_or(crate::daemons::Daemon::is_down), "the plugin has given up");
        found.restart_kubelet().await?;
        until_registered(world, &node).await?;
        world.start(PodSpec::new("after", &[(GPU_MEM, "1")]).on(&node)).await.map(|_| ())
    }
    .boxed()
}

fn xid_79(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?;
        let sick_minor = 0;
        let is_healthy = |snapshot: &Snapshot| {
            let device = snapshot.devices.get(&node.name)?;
            device.spec.devices.iter().find(|info| info.minor == Some(0)).map(|info| info.health)
        };
        world.cluster()?.node(&node.name)?.set_health(sick_minor, Health::Xid(79))?;
        world.until("the GPU to be reported sick", |snapshot| (is_healthy(snapshot) == Some(false)).then_some(())).await?;
        for (idx, units) in node.units.iter().enumerate().skip(1) {
            world.start(PodSpec::new(&format!("beside-{idx}"), &[(GPU_MEM, &units.to_string())]).on(&node.name)).await?;
        }
        world.create(PodSpec::new("waits", &[(GPU_MEM, "1")]).on(&node.name)).await?;
        world.until_refused("waits", "nodes are available").await?;
        world.verify().await?;
        world.cluster()?.node(&node.name)?.set_health(sick_minor, Health::Healthy)?;
        world.until_running(&["waits"]).await
    }
    .boxed()
}
