//! Whole GPUs in a vendor's name beside pods that share: served by our plugin, by the vendor's, and divided between them.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};

use super::{DEADLINE, ScenarioEntry, World};
use kit::pods::PodBuilder;
use kit::vendor_plugin::NVIDIA_GPU;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
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
    let offered = |kubelet: &kit::kubelet::Kubelet| {
        kubelet
            .capacity()
            .get(NVIDIA_GPU)
            .is_some_and(|(_, healthy)| *healthy == n_gpus)
    };
    let failure = format!("{node} offers not {n_gpus} {NVIDIA_GPU}");
    kubelet.expect_until(DEADLINE, failure, offered).await?;
    let text = n_gpus.to_string();
    let shows = |snapshot: &kit::observer::ClusterSnapshot| {
        let allocatable = snapshot.nodes.get(node)?.status.as_ref()?.allocatable.as_ref()?;
        allocatable
            .get(NVIDIA_GPU)
            .is_some_and(|amount| amount.0 == text)
            .then_some(())
    };
    world
        .until(&format!("{node} to offer {n_gpus} {NVIDIA_GPU}"), shows)
        .await
}

/// gpushare's plugin serves `nvidia.com/gpu` too: whole GPUs and shares get different GPUs.
async fn vendor_ours(world: &mut World) -> Result<()> {
    until_offered(world, OURS, 3).await?;
    world.start(share("share-0", "60", OURS)).await?;
    world.start(whole("whole-0", 1, OURS)).await?;
    world.start(share("share-1", "60", OURS)).await?;
    world.verify().await?;
    let of_all = [
        world.minors("share-0")?,
        world.minors("whole-0")?,
        world.minors("share-1")?,
    ]
    .concat();
    let distinct: BTreeSet<i32> = of_all.iter().copied().collect();
    ensure!(
        of_all.len() == 3 && distinct.len() == 3,
        "three GPUs for three pods: {of_all:?}"
    );
    world.create(whole("whole-1", 1, OURS)).await?;
    world.until_refused("whole-1", "nodes are available").await?;
    world.create_units("units", "8", OURS).await?;
    world.until_refused("units", "nodes are available").await?;
    // Both pods wait, and one GPU becomes free after the other: either may be tried first.
    world.delete("share-0").await?;
    world.delete("whole-0").await?;
    world.until_running(&["whole-1", "units"]).await
}

/// The vendor's plugin serves whole GPUs: sharing pods avoid the GPUs that it has given away.
async fn vendor_theirs(world: &mut World) -> Result<()> {
    world.node(THEIRS)?.start_vendor_plugin(&[0, 1, 2]).await?;
    until_offered(world, THEIRS, 3).await?;
    world.start(whole("whole-0", 1, THEIRS)).await?;
    // Two GPUs are left for sharing pods, whichever GPU the vendor's plugin gave to the first pod.
    world.start(share("share-0", "60", THEIRS)).await?;
    world.start(share("share-1", "60", THEIRS)).await?;
    world.verify().await?;
    world.create(share("share-2", "60", THEIRS)).await?;
    world.until_refused("share-2", "nodes are available").await?;
    world.create(whole("whole-1", 1, THEIRS)).await?;
    world.until_refused("whole-1", "nodes are available").await?;
    world.verify().await?;
    world.delete("whole-0").await?;
    world.until_running(&["share-2"]).await?;
    world.verify().await?;
    for name in ["share-0", "share-1", "share-2"] {
        world.delete(name).await?;
    }
    world.until_running(&["whole-1"]).await
}

/// The GPUs are divided by number between the vendor's plugin and gpushare's.
async fn vendor_divided(world: &mut World) -> Result<()> {
    world.node(DIVIDED)?.start_vendor_plugin(&[2]).await?;
    until_offered(world, DIVIDED, 1).await?;
    world.start(share("share-0", "60", DIVIDED)).await?;
    world.start(share("share-1", "60", DIVIDED)).await?;
    world.start(whole("whole", 1, DIVIDED)).await?;
    world.verify().await?;
    world.create(share("share-2", "60", DIVIDED)).await?;
    world.until_refused("share-2", "nodes are available").await?;
    world.create(whole("whole-1", 1, DIVIDED)).await?;
    world.until_refused("whole-1", "nodes are available").await
}
