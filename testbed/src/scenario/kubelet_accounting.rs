//! A node's resources as kubelet counts them after a restart: a sick GPU, devices that go, and a checkpoint that is lost.

use std::cmp::Reverse;

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use proto::resource::{GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::json;

use super::breaking::{self, until_registered};
use super::{Body, DEADLINE, World};
use crate::cluster::GpuFault;
use crate::kubelet::OrderRule;
use crate::observer::ClusterSnapshot;
use crate::parts::{ClusterPart, NodeFile};
use crate::pods::PodBuilder;

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] = &[
    (
        "sick-and-restarted",
        "a sick GPU and a kubelet that restarts fail no pod for want of resources",
        sick_and_restarted,
    ),
    (
        "devices-gone",
        "what a node offers goes away with its devices, and comes back with them",
        devices_gone,
    ),
    (
        "checkpoint-lost",
        "a kubelet that has lost its checkpoint sets resources to zero, and the plugin restores them",
        checkpoint_lost,
    ),
    (
        "ended-pods-forgotten",
        "a kubelet that restarts after pods have ended admits the pods that got their room",
        ended_pods_forgotten,
    ),
];

/// Resources that are written into node status.
const PATCHED: [&str; 3] = [GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO];

/// A node's amount of a resource.
fn offered(snapshot: &ClusterSnapshot, node: &str, resource: &str) -> Option<String> {
    snapshot
        .nodes
        .get(node)?
        .status
        .as_ref()?
        .allocatable
        .as_ref()?
        .get(resource)
        .map(|amount| amount.0.clone())
}

fn sick_and_restarted(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?;
        let all = node.units.len();
        let mut names = Vec::new();
        // All that the node has, in the terms of node status, so that a GPU less would not be enough for them.
        for idx in 0..all {
            let spec = PodBuilder::new(
                &format!("full-{idx}"),
                &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "100"), (GPU_CORE, "100")],
            );
            names.push(format!("full-{idx}"));
            world.start(spec.on(&node.name)).await?;
        }
        world
            .cluster()?
            .node(&node.name)?
            .set_health(0, GpuFault::Xid(79))?;
        let is_sick = |snapshot: &ClusterSnapshot| {
            let device = snapshot.devices.get(&node.name)?;
            device
                .spec
                .devices
                .iter()
                .any(|info| info.minor == Some(0) && !info.health)
                .then_some(())
        };
        world.until("the GPU to be reported sick", is_sick).await?;
        for _ in 0..2 {
            world.cluster()?.node(&node.name)?.restart_kubelet().await?;
            until_registered(world, &node.name).await?;
            world
                .until_all_run(&names)
                .await
                .context("after kubelet's restart")?;
        }
        world.verify().await?;
        world
            .cluster()?
            .node(&node.name)?
            .set_health(0, GpuFault::Healthy)?;
        world
            .until("the GPU to recover", |snapshot| {
                is_sick(snapshot).is_none().then_some(())
            })
            .await?;
        world.clear().await?;
        world
            .start(PodBuilder::new("after", &[(GPU_MEM, "1")]).on(&node.name))
            .await
            .map(|_| ())
    }
    .boxed()
}

/// Waits until a node offers the resources in node status of `n` GPUs; for 0, until it offers none.
async fn until_worth(world: &World, node: &str, n_gpus: usize) -> Result<()> {
    let percent = (n_gpus * 100).to_string();
    let wanted = (n_gpus > 0).then_some(percent);
    let is_worth = |snapshot: &ClusterSnapshot| {
        let is_there = offered(snapshot, node, GPU_MEMORY).is_some();
        let percents = [GPU_CORE, GPU_MEMORY_RATIO].map(|resource| offered(snapshot, node, resource));
        (is_there == (n_gpus > 0) && percents.iter().all(|percent| *percent == wanted)).then_some(())
    };
    world
        .until(&format!("{node} to offer {n_gpus} GPUs"), is_worth)
        .await
}

/// Waits until kubelet counts `n` shares of a node's GPUs as healthy.
async fn until_shares(world: &mut World, node: &str, n_shares: usize) -> Result<()> {
    let kubelet = world.cluster()?.node(node)?.kubelet();
    let counts = |kubelet: &crate::kubelet::Kubelet| {
        kubelet
            .capacity()
            .get(GPU_SHARED)
            .map_or(0, |(_, healthy)| *healthy)
            == n_shares
    };
    ensure!(
        kubelet.until(DEADLINE, counts).await,
        "{node} offers {:?}, not {n_shares} shares",
        kubelet.capacity()
    );
    Ok(())
}

fn devices_gone(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?;
        let name = &node.name;
        let gpus = world.cluster()?.node(name)?.gpus().to_vec();
        let (first, all) = (gpus.iter().take(1).cloned().collect::<Vec<_>>(), gpus.len());
        for (left, n_left) in [(first, 1), (gpus.clone(), all)] {
            world.cluster()?.node(name)?.set_gpus(left)?;
            until_worth(world, name, n_left).await?;
            until_shares(world, name, 100 * n_left).await?;
        }
        for gpu in &gpus {
            world
                .cluster()?
                .node(name)?
                .set_health(gpu.minor, GpuFault::Lost)?;
        }
        until_worth(world, name, 0).await?;
        until_shares(world, name, 0).await?;
        world
            .create(
                PodBuilder::new(
                    "waits",
                    &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "100"), (GPU_CORE, "100")],
                )
                .on(name),
            )
            .await?;
        world.until_refused("waits", "nodes are available").await?;
        // A plugin that starts without devices removes the resources of its predecessor.
        let node = world.cluster()?.node(name)?;
        node.remove_plugin().await;
        node.set_gpus(Vec::new())?;
        let api = world.cluster()?.api().objects().clone();
        let left = json!({GPU_CORE: "100", GPU_MEMORY_RATIO: "100", GPU_MEMORY: "16Gi"});
        api.patch_status("nodes", "", name, &json!({"capacity": left, "allocatable": left}))?;
        world.cluster()?.node(name)?.start_plugin(&["--no-gpu", "wait"])?;
        until_worth(world, name, 0).await?;
        let node = world.cluster()?.node(name)?;
        node.set_gpus(gpus)?;
        node.restart_plugin().await?;
        until_worth(world, name, all).await?;
        world.until_running(&["waits"]).await?;
        world.cluster()?.until_ready(DEADLINE).await
    }
    .boxed()
}

fn checkpoint_lost(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?.name;
        let before: Vec<_> = PATCHED
            .iter()
            .map(|resource| offered(&world.observer.now(), &node, resource))
            .collect();
        ensure!(
            before.iter().all(Option::is_some),
            "the node offers {before:?} of {PATCHED:?}"
        );
        breaking::restart_without(
            world,
            ClusterPart::Kubelet,
            &node,
            Some(NodeFile::KubeletCheckpoint),
        )
        .await?;
        until_registered(world, &node).await?;
        let is_restored = |snapshot: &ClusterSnapshot| {
            let now: Vec<_> = PATCHED
                .iter()
                .map(|resource| offered(snapshot, &node, resource))
                .collect();
            (now == before).then_some(())
        };
        world.until("what was zeroed to be restored", is_restored).await?;
        world
            .start(
                PodBuilder::new(
                    "after",
                    &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "100"), (GPU_CORE, "100")],
                )
                .on(&node),
            )
            .await
            .map(|_| ())
    }
    .boxed()
}

fn ended_pods_forgotten(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?;
        // The largest first, as each fits one GPU only.
        let mut sizes = node.units.clone();
        sizes.sort_unstable_by_key(|units| Reverse(*units));
        let full = |name: &str, units: u64| {
            PodBuilder::new(name, &[(GPU_MEM, units.to_string().as_str())]).on(&node.name)
        };
        let names = |prefix: &str| {
            (0..sizes.len())
                .map(|idx| format!("{prefix}-{idx}"))
                .collect::<Vec<_>>()
        };
        for (name, units) in names("before").iter().zip(&sizes) {
            world.start(full(name, *units)).await?;
        }
        for name in names("before") {
            world.delete(&name).await?;
        }
        let kubelet = world.cluster()?.node(&node.name)?.kubelet();
        let names_none = |kubelet: &crate::kubelet::Kubelet| {
            std::fs::read_to_string(kubelet.config().checkpoint()).is_ok_and(|text| !text.contains("PodUID"))
        };
        ensure!(
            kubelet.until(DEADLINE, names_none).await,
            "kubelet's checkpoint still names pods that have ended"
        );
        kubelet.hold();
        for (name, units) in names("after").iter().zip(&sizes) {
            world.create(full(name, *units)).await?;
            let key = [world.key(name)];
            let is_bound = |snapshot: &ClusterSnapshot| (World::n_bound(snapshot, &key) == 1).then_some(());
            world.until(&format!("{name} to be bound"), is_bound).await?;
        }
        world.cluster()?.node(&node.name)?.restart_kubelet().await?;
        until_registered(world, &node.name).await?;
        world
            .cluster()?
            .node(&node.name)?
            .kubelet()
            .release(OrderRule::Creation, 0);
        world.until_all_run(&names("after")).await
    }
    .boxed()
}
