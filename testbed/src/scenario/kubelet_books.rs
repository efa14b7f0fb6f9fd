//! What kubelet holds against a node's resources when it starts again: a sick GPU, and a checkpoint that is lost.

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use proto::resource::{GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};

use super::node_faults::until_registered;
use super::{Body, World};
use crate::cluster::Health;
use crate::observer::Snapshot;
use crate::pods::PodSpec;

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] = &[
    ("sick-and-restarted", "a sick GPU and a kubelet that restarts fail no pod for want of resources", sick_and_restarted),
    ("checkpoint-lost", "a kubelet that has lost its checkpoint sets resources to zero, and the plugin restores them", checkpoint_lost),
];

/// Resources that are written into node status.
const PATCHED: [&str; 3] = [GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO];

/// What a node offers of a resource.
fn offered(snapshot: &Snapshot, node: &str, resource: &str) -> Option<String> {
    snapshot.nodes.get(node)?.status.as_ref()?.allocatable.as_ref()?.get(resource).map(|amount| amount.0.clone())
}

fn sick_and_restarted(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?;
        let all = node.units.len();
        let mut names = Vec::new();
        // All that the node has, in the terms of node status, so that a GPU less would not be enough for them.
        for idx in 0..all {
            let spec = PodSpec::new(&format!("full-{idx}"), &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "100"), (GPU_CORE, "100")]);
            names.push(format!("full-{idx}"));
            world.start(spec.on(&node.name)).await?;
        }
        world.cluster()?.node(&node.name)?.set_health(0, Health::Xid(79))?;
        let is_sick = |snapshot: &Snapshot| {
            let device = snapshot.devices.get(&node.name)?;
            device.spec.devices.iter().any(|info| info.minor == Some(0) && !info.health).then_some(())
        };
        world.until("the GPU to be reported sick", is_sick).await?;
        for _ in 0..2 {
            world.cluster()?.node(&node.name)?.restart_kubelet().await?;
            until_registered(world, &node.name).await?;
            world.until_all_run(&names).await.context("after kubelet's restart")?;
        }
        world.verify().await?;
        world.cluster()?.node(&node.name)?.set_health(0, Health::Healthy)?;
        world.until("the GPU to recover", |snapshot| is_sick(snapshot).is_none().then_some(())).await?;
        world.clear().await?;
        world.start(PodSpec::new("after", &[(GPU_MEM, "1")]).on(&node.name)).await.map(|_| ())
    }
    .boxed()
}

fn checkpoint_lost(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?.name;
        let before: Vec<_> = PATCHED.iter().map(|resource| offered(&world.observer.now(), &node, resource)).collect();
        ensure!(before.iter().all(Option::is_some), "the node offers {before:?} of {PATCHED:?}");
        let remove = |config: &crate::kubelet::KubeletConfig| {
            // It may have none yet.
            let _ = std::fs::remove_file(config.checkpoint());
        };
        world.cluster()?.node(&node)?.restart_kubelet_with(remove).await?;
        until_registered(world, &node).await?;
        let is_restored = |snapshot: &Snapshot| {
            let now: Vec<_> = PATCHED.iter().map(|resource| offered(snapshot, &node, resource)).collect();
            (now == before).then_some(())
        };
        world.until("what was zeroed to be restored", is_restored).await?;
        world.start(PodSpec::new("after", &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "100"), (GPU_CORE, "100")]).on(&node)).await.map(|_| ())
    }
    .boxed()
}
