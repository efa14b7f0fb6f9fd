//! A node's resources as kubelet counts them after a restart: a sick GPU, devices that go, and a checkpoint that is lost.

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use proto::node::CONDITION_SHARING_READY;
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::json;

use super::breaking::{self, until_registered};
use super::node_faults::until_reported;
use super::world::{GpuNode, allocatable, n_healthy};
use super::{DEADLINE, Scenario, World};
use kit::cluster::GpuFault;
use kit::files;
use kit::kubelet::{Kubelet, KubeletConfig, OrderRule, RunState};
use kit::observer::ClusterSnapshot;
use kit::parts::{ClusterPart, Need, NodeFile};
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "GPUs that fall sick on command", on [Plugins]:
    "sick-and-restarted" => sick_and_restarted,
        "a sick GPU and a kubelet that restarts fail no pod for want of resources";
    "devices-gone" => devices_gone,
        "what a node offers goes away with its devices, and comes back with them";
    "checkpoint-lost" needs [Need::Kill(ClusterPart::Kubelet), Need::Remove(NodeFile::KubeletCheckpoint)] => checkpoint_lost,
        "a kubelet that has lost its checkpoint sets resources to zero, and the plugin restores them";
    "checkpoint-cut" => checkpoint_cut,
        "half of kubelet's checkpoint is read by no one: the plugin logs it, and no unit is counted twice or forgotten";
    "ended-pods-forgotten" => ended_pods_forgotten,
        "a kubelet that restarts after pods have ended admits the pods that got their room";
};

/// Memory units of each pod of the scenario `checkpoint-cut`.
const CUT_UNITS: u64 = 8;

/// Resources that are written into node status.
const PATCHED: [&str; 3] = [GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO];

/// A pod that takes all of a GPU, in the terms of node status.
fn of_one_gpu(name: &str) -> PodBuilder {
    let limits = [(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "100"), (GPU_CORE, "100")];
    PodBuilder::new(name, &limits)
}

async fn sick_and_restarted(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    let all = node.units.len();
    let mut names = Vec::new();
    // The pods take all that node status lists. A kubelet that counted one GPU less after its restart would fail one of them.
    for idx in 0..all {
        let name = format!("full-{idx}");
        world.start(of_one_gpu(&name).on(&node.name)).await?;
        names.push(name);
    }
    world.node(&node.name)?.set_health(0, GpuFault::Xid(79))?;
    until_reported(world, &node.name, false).await?;
    for _ in 0..2 {
        world.node(&node.name)?.restart_kubelet().await?;
        until_registered(world, &node.name).await?;
        let run = world.until_running(&names).await;
        run.context("after kubelet's restart")?;
    }
    world.verify().await?;
    world.node(&node.name)?.set_health(0, GpuFault::Healthy)?;
    until_reported(world, &node.name, true).await?;
    world.clear().await?;
    world.start_units("after", "1", &node.name).await.map(drop)
}

/// Waits until a node's status offers the amounts of `n_gpus` GPUs; for 0, until it offers none.
async fn until_node_offers(world: &World, node: &str, n_gpus: usize) -> Result<()> {
    let percent = (n_gpus * 100).to_string();
    let wanted = (n_gpus > 0).then_some(percent.as_str());
    let offers_as_much = |snapshot: &ClusterSnapshot| {
        let has_memory = allocatable(snapshot, node, GPU_MEMORY).is_some();
        let percents = [GPU_CORE, GPU_MEMORY_RATIO].map(|resource| allocatable(snapshot, node, resource));
        (has_memory == (n_gpus > 0) && percents == [wanted; 2]).then_some(())
    };
    let what = format!("{node} to offer {n_gpus} GPUs");
    world.until(&what, offers_as_much).await
}

/// Waits until kubelet counts `n_shares` shares of a node's GPUs as healthy.
async fn until_shares(world: &mut World, node: &str, n_shares: usize) -> Result<()> {
    let kubelet = world.node(node)?.kubelet();
    let counts = |kubelet: &Kubelet| n_healthy(kubelet, GPU_SHARED) == n_shares;
    let failure = format!("{node} offers not {n_shares} shares");
    kubelet.expect_until(DEADLINE, failure, counts).await
}

/// The node's resources follow its GPUs: fewer, all again, all lost. A plugin that starts without GPUs removes the
/// amounts that an earlier one left, and waits.
async fn devices_gone(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    let name = &node.name;
    let gpus = world.node(name)?.gpus().to_vec();
    let (first, all) = (gpus.iter().take(1).cloned().collect::<Vec<_>>(), gpus.len());
    for (left, n_left) in [(first, 1), (gpus.clone(), all)] {
        world.node(name)?.set_gpus(left)?;
        until_node_offers(world, name, n_left).await?;
        until_shares(world, name, 100 * n_left).await?;
    }
    for gpu in &gpus {
        world.node(name)?.set_health(gpu.minor, GpuFault::Lost)?;
    }
    until_node_offers(world, name, 0).await?;
    until_shares(world, name, 0).await?;
    world.create_waiting(of_one_gpu("waits").on(name)).await?;
    // The amounts of the removed plugin are still in node status. A plugin that starts without any device has to remove them.
    let node = world.node(name)?;
    node.remove_plugin().await;
    node.set_gpus(Vec::new())?;
    let api = world.cluster()?.api().objects().clone();
    let left = json!({GPU_CORE: "100", GPU_MEMORY_RATIO: "100", GPU_MEMORY: "16Gi"});
    api.patch_status("nodes", "", name, &json!({"capacity": left, "allocatable": left}))?;
    world.node(name)?.start_plugin(&[])?;
    until_node_offers(world, name, 0).await?;
    until_sharing_ready(world, name, "False").await?;
    let node = world.node(name)?;
    node.set_gpus(gpus)?;
    node.restart_plugin().await?;
    until_node_offers(world, name, all).await?;
    until_sharing_ready(world, name, "True").await?;
    world.until_running(&["waits"]).await?;
    world.cluster()?.until_ready(DEADLINE).await
}

/// Waits until the node's condition about its GPUs has this status.
async fn until_sharing_ready(world: &World, node: &str, status: &str) -> Result<()> {
    let has_status = |snapshot: &ClusterSnapshot| {
        let of_node = snapshot.nodes.get(node)?.status.as_ref()?;
        let mut conditions = of_node.conditions.as_ref()?.iter();
        let found = conditions.find(|condition| condition.type_ == CONDITION_SHARING_READY)?;
        (found.status == status).then_some(())
    };
    let what = format!("{CONDITION_SHARING_READY} of {node} to be {status}");
    world.until(&what, has_status).await
}

async fn checkpoint_lost(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?.name;
    let patched = |snapshot: &ClusterSnapshot| {
        PATCHED.map(|resource| allocatable(snapshot, &node, resource).map(str::to_owned))
    };
    let before = patched(&world.observer.now());
    let is_patched = before.iter().all(Option::is_some);
    ensure!(is_patched, "the node offers {before:?} of {PATCHED:?}");
    let checkpoint = Some(NodeFile::KubeletCheckpoint);
    breaking::restart_without(world, ClusterPart::Kubelet, &node, checkpoint).await?;
    until_registered(world, &node).await?;
    let is_restored = |snapshot: &ClusterSnapshot| (patched(snapshot) == before).then_some(());
    world.until("what was zeroed to be restored", is_restored).await?;
    world.start(of_one_gpu("after").on(&node)).await.map(drop)
}

/// Cuts kubelet's checkpoint in half, as a disk can after a power failure.
fn cut_checkpoint(config: &KubeletConfig) -> std::io::Result<()> {
    let checkpoint = config.checkpoint();
    let whole = std::fs::read(&checkpoint)?;
    let half = whole.get(..whole.len() / 2).unwrap_or_default();
    let temporary = checkpoint.with_extension("half");
    std::fs::write(&temporary, half)?;
    std::fs::rename(temporary, checkpoint)
}

/// Starts pods of [`CUT_UNITS`] with these numbers on a node, one after the other; returns their names.
async fn start_numbered(world: &World, node: &str, numbers: Range<u64>) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for number in numbers {
        let name = format!("pod-{number}");
        world.start_units(&name, CUT_UNITS, node).await?;
        names.push(name);
    }
    Ok(names)
}

/// Half of kubelet's checkpoint is left: under a running plugin, at a start of the plugin, and at a start of kubelet. Running
/// containers keep their GPUs, and the pods that come later fill the node to its last unit and no further.
async fn checkpoint_cut(world: &mut World) -> Result<()> {
    let GpuNode { name: node, units } = world.gpu_node(2)?;
    let n_pods: u64 = units.iter().map(|units| units / CUT_UNITS).sum();
    let mut names = start_numbered(world, &node, 0..3).await?;
    cut_checkpoint(world.node(&node)?.kubelet().config())?;
    world.restart_container(&node, "pod-0").await?;
    let plugin = world.node(&node)?.plugin().context("no plugin runs")?;
    let (log, said) = (
        files::read(plugin.log())?,
        "cannot read the devices that kubelet has allocated",
    );
    ensure!(log.contains(said), "the plugin does not log {said:?}");
    names.extend(start_numbered(world, &node, 3..4).await?);

    cut_checkpoint(world.node(&node)?.kubelet().config())?;
    breaking::restart(world, ClusterPart::Plugin, &node).await?;
    until_registered(world, &node).await?;
    world.restart_container(&node, "pod-1").await?;
    world.verify().await.context("after a start of the plugin")?;

    let mut cut = Ok(());
    world
        .node(&node)?
        .restart_kubelet_with(|config| cut = cut_checkpoint(config))
        .await?;
    cut?;
    until_registered(world, &node).await?;
    names.extend(start_numbered(world, &node, 4..n_pods).await?);
    world
        .create_waiting_units("one-too-many", CUT_UNITS, &node)
        .await?;
    world.until_running(&names).await?;
    world.verify().await.context("after a start of kubelet")?;
    replace_forgotten(world, &node, "pod-2").await
}

/// Ends the container of a pod whose devices kubelet has forgotten: the container does not start again. Once the pod is deleted,
/// the pod `one-too-many` gets its room.
async fn replace_forgotten(world: &mut World, node: &str, name: &str) -> Result<()> {
    let namespace = world.namespace.clone();
    let kubelet = world.node(node)?.kubelet();
    kubelet.restart_container(&namespace, name, "main")?;
    let is_refused = |kubelet: &Kubelet| {
        let container = kubelet.container(&namespace, name, "main");
        container.is_some_and(|container| match container.state {
            RunState::Waiting { message, .. } => {
                message.contains("no devices found allocated in local cache")
            }
            _ => false,
        })
    };
    let failure = format!("kubelet starts the container of {name} again");
    kubelet.expect_until(DEADLINE, failure, is_refused).await?;
    world.delete_for(name, "one-too-many").await
}

async fn ended_pods_forgotten(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    let sizes = node.largest_first();
    let full = |name: &str, units: u64| PodBuilder::units(name, units).on(&node.name);
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for idx in 0..sizes.len() {
        before.push(format!("before-{idx}"));
        after.push(format!("after-{idx}"));
    }
    for (name, units) in before.iter().zip(&sizes) {
        world.start(full(name, *units)).await?;
    }
    for name in &before {
        world.delete(name).await?;
    }
    let kubelet = world.node(&node.name)?.kubelet();
    let names_none = |kubelet: &Kubelet| {
        std::fs::read_to_string(kubelet.config().checkpoint()).is_ok_and(|text| !text.contains("PodUID"))
    };
    let failure = "kubelet's checkpoint still names pods that have ended";
    kubelet.expect_until(DEADLINE, failure, names_none).await?;
    // kubelet restarts while the pods are bound and not admitted. It then counts from its checkpoint, where
    // devices of the ended pods would take the room of the new ones.
    kubelet.hold();
    for (name, units) in after.iter().zip(&sizes) {
        world.create(full(name, *units)).await?;
        world.until_bound(name).await?;
    }
    world.node(&node.name)?.restart_kubelet().await?;
    until_registered(world, &node.name).await?;
    world.node(&node.name)?.kubelet().release(OrderRule::Creation, 0);
    world.until_running(&after).await
}
