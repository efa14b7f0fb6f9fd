//! Whole GPUs in a vendor's name beside pods that share: served by our plugin, by the vendor's, and divided between them.

use anyhow::{Result, ensure};

use super::world::{allocatable, n_healthy};
use super::{DEADLINE, Scenario, World};
use kit::kubelet::Kubelet;
use kit::observer::ClusterSnapshot;
use kit::pods::PodBuilder;
use kit::vendor_plugin::NVIDIA_GPU;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "nodes of other kinds", on [Mixed]:
    "vendor-ours" => vendor_ours,
        "our plugin serves nvidia.com/gpu: whole and shared pods on one node, each on GPUs of its own";
    "vendor-theirs" => vendor_theirs,
        "the vendor's plugin serves it: no GPU is handed out twice, in any order of arrival";
    "vendor-divided" => vendor_divided,
        "a node divided between both plugins takes both kinds at once";
};

/// Node whose plugin serves the vendor's resource.
pub(super) const OURS: &str = "ours";
/// Node with the vendor's plugin.
pub(super) const THEIRS: &str = "theirs";
/// Node whose first two GPUs are shared and whose last one is the vendor's.
pub(super) const DIVIDED: &str = "divided";

/// A pod of whole GPUs by the vendor's resource.
pub(super) fn whole(name: &str, n_gpus: usize, node: &str) -> PodBuilder {
    PodBuilder::new(name, &[(NVIDIA_GPU, &n_gpus.to_string())]).on(node)
}

/// A pod of a percentage of one GPU.
pub(super) fn share(name: &str, ratio: &str, node: &str) -> PodBuilder {
    PodBuilder::share(name, ratio).on(node)
}

/// Waits until kubelet, and then the node's status, has `n_gpus` of the vendor's resource.
pub(super) async fn until_offered(world: &mut World, node: &str, n_gpus: usize) -> Result<()> {
    let kubelet = world.node(node)?.kubelet();
    let offered = |kubelet: &Kubelet| n_healthy(kubelet, NVIDIA_GPU) == n_gpus;
    let failure = format!("{node} offers not {n_gpus} {NVIDIA_GPU}");
    kubelet.expect_until(DEADLINE, failure, offered).await?;
    let text = n_gpus.to_string();
    let shows = |snapshot: &ClusterSnapshot| (allocatable(snapshot, node, NVIDIA_GPU)? == text).then_some(());
    let what = format!("{node} to offer {n_gpus} {NVIDIA_GPU}");
    world.until(&what, shows).await
}

async fn vendor_ours(world: &mut World) -> Result<()> {
    until_offered(world, OURS, 3).await?;
    world.start(share("share-0", "60", OURS)).await?;
    world.start(whole("whole-0", 1, OURS)).await?;
    world.start(share("share-1", "60", OURS)).await?;
    world.verify().await?;
    let mut of_all = Vec::new();
    for name in ["share-0", "whole-0", "share-1"] {
        of_all.extend(world.minors(name)?);
    }
    of_all.sort_unstable();
    ensure!(of_all == [0, 1, 2], "three GPUs for three pods: {of_all:?}");
    world.create_waiting(whole("whole-1", 1, OURS)).await?;
    world.create_waiting_units("units", 8, OURS).await?;
    // Both pods wait, and one GPU becomes free after the other: either may be tried first.
    world.delete("share-0").await?;
    world.delete("whole-0").await?;
    world.until_running(&["whole-1", "units"]).await
}

async fn vendor_theirs(world: &mut World) -> Result<()> {
    world.node(THEIRS)?.start_vendor_plugin(&[0, 1, 2]).await?;
    until_offered(world, THEIRS, 3).await?;
    world.start(whole("whole-0", 1, THEIRS)).await?;
    // Two GPUs are left for sharing pods, whichever GPU the vendor's plugin gave to the first pod.
    world.start(share("share-0", "60", THEIRS)).await?;
    world.start(share("share-1", "60", THEIRS)).await?;
    world.verify().await?;
    world.create_waiting(share("share-2", "60", THEIRS)).await?;
    world.create_waiting(whole("whole-1", 1, THEIRS)).await?;
    world.verify().await?;
    world.delete_for("whole-0", "share-2").await?;
    world.verify().await?;
    for name in ["share-0", "share-1", "share-2"] {
        world.delete(name).await?;
    }
    world.until_running(&["whole-1"]).await
}

async fn vendor_divided(world: &mut World) -> Result<()> {
    world.node(DIVIDED)?.start_vendor_plugin(&[2]).await?;
    until_offered(world, DIVIDED, 1).await?;
    world.start(share("share-0", "60", DIVIDED)).await?;
    world.start(share("share-1", "60", DIVIDED)).await?;
    world.start(whole("whole", 1, DIVIDED)).await?;
    world.verify().await?;
    world.create_waiting(share("share-2", "60", DIVIDED)).await?;
    world.create_waiting(whole("whole-1", 1, DIVIDED)).await
}
