//! GPUs and network adapters that belong together.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use proto::resource::RDMA;
use serde_json::json;

use super::machines::{LONE, PAIRED};
use super::{APART, HINT, JOINT, NO_DEVICE, ensure_minors, ensure_shown, minors, virtual_functions_of};
use crate::scenario::{Scenario, World};
use kit::pods::PodBuilder;
use kit::vendor_plugin::NVIDIA_GPU;

pub(in crate::scenario) const SCENARIOS: &[Scenario] = scenarios! { needs "machines of known topologies", on [Topology]:
    "joint" => joint_allocation,
        "four GPUs bring the four adapters of their switches, and where there is one adapter only, that one";
    "joint-same-switch" => same_switch,
        "GPUs and adapters share their switches, or the pod waits";
    "joint-exclusive" => joint_exclusive,
        "an exclusive pod keeps others off its switches, in any order of arrival";
};

/// The scope that demands an adapter at the switch of each GPU.
const SAME_SWITCH: Option<&str> = Some("SamePCIe");

/// The pod of the proposal's examples: it asks for four GPUs and an RDMA adapter, to be allocated together.
fn four_gpus_and_adapter(name: &str, node: &str, scope: Option<&str>) -> PodBuilder {
    let mut joint = json!({"deviceTypes": ["gpu", "rdma"]});
    if let (Some(scope), Some(joint)) = (scope, joint.as_object_mut()) {
        joint.insert("requiredScope".to_owned(), json!(scope));
    }
    let spec = PodBuilder::new(name, &[(NVIDIA_GPU, "4"), (RDMA, "1")]).on(node);
    spec.annotation(JOINT, &joint.to_string())
}

/// The minors of a pod's four GPUs, which are also those of its adapters: on these machines the GPU and the adapter of one switch
/// have the same minor number.
fn four_pairs(pod: &Pod) -> Result<Vec<i32>> {
    let (gpus, adapters) = (minors(pod, "gpu")?, minors(pod, "rdma")?);
    let are_pairs = gpus.len() == 4 && gpus == adapters;
    ensure!(are_pairs, "GPUs {gpus:?} and adapters {adapters:?}");
    Ok(gpus)
}

async fn joint_allocation(world: &mut World) -> Result<()> {
    let placed = world.start(four_gpus_and_adapter("four", PAIRED, None)).await?;
    let gpus = four_pairs(&placed)?;
    let are_near = gpus == [0, 1, 2, 3] || gpus == [4, 5, 6, 7];
    ensure!(are_near, "GPUs {gpus:?} are not of one NUMA node");
    ensure_shown(world, "four").await?;
    let lone = four_gpus_and_adapter("one-adapter", LONE, None);
    let lone = world.start(lone).await?;
    ensure_minors(&lone, "gpu", &[4, 5, 6, 7])?;
    ensure_minors(&lone, "rdma", &[0])?;
    ensure_shown(world, "one-adapter").await?;
    // The remaining GPUs are in the other NUMA node than the only adapter: the pod gets them with that adapter.
    let far = four_gpus_and_adapter("far-adapter", LONE, None);
    let far = world.start(far).await?;
    ensure_minors(&far, "gpu", &[0, 1, 2, 3])?;
    ensure_minors(&far, "rdma", &[0])?;
    for (node, name) in [(PAIRED, "four"), (LONE, "far-adapter")] {
        world.node(node)?.restart_plugin().await?;
        world.restart_container(node, name).await?;
        ensure_shown(world, name).await?;
    }
    Ok(())
}

/// `SamePCIe` demands an adapter at the switch of each GPU; the pod waits while there are too few.
async fn same_switch(world: &mut World) -> Result<()> {
    let apart = four_gpus_and_adapter("apart", LONE, SAME_SWITCH);
    world.create_refused(apart, APART).await?;
    // A pod takes five whole adapters, so that only three switches have an adapter left.
    let five = PodBuilder::new("adapters", &[(RDMA, "500")]).on(PAIRED);
    let taken = minors(&world.start(five).await?, "rdma")?;
    ensure!(taken.len() == 5, "{taken:?}");
    let together = four_gpus_and_adapter("together", PAIRED, SAME_SWITCH);
    world.create_refused(together, APART).await?;
    world.verify().await?;
    world.delete_for("adapters", "together").await?;
    four_pairs(&world.pod("together")?)?;
    ensure_shown(world, "together").await
}

/// A pod that shares its switches with no other.
fn alone(name: &str) -> PodBuilder {
    let hint = json!({"rdma": {"vfSelector": {}, "exclusivePolicy": "PCIeLevel"}}).to_string();
    four_gpus_and_adapter(name, PAIRED, SAME_SWITCH).annotation(HINT, &hint)
}

async fn joint_exclusive(world: &mut World) -> Result<()> {
    let hint = json!({"rdma": {"vfSelector": {}}}).to_string();
    let sharing = PodBuilder::new("sharing", &[(RDMA, "1")])
        .annotation(HINT, &hint)
        .on(PAIRED);
    let first = world.start(alone("alone-0")).await?;
    let adapters = four_pairs(&first)?;
    let functions = virtual_functions_of(&first)?;
    ensure!(functions.len() == 4, "{functions:?}");
    ensure_shown(world, "alone-0").await?;
    // A sharing pod that came first keeps an exclusive pod away, too.
    let other = minors(&world.start(sharing.clone()).await?, "rdma")?;
    let is_apart = other.iter().all(|minor| !adapters.contains(minor));
    ensure!(is_apart, "{other:?} and {adapters:?}");
    ensure_shown(world, "sharing").await?;
    world.create_refused(alone("alone-1"), APART).await?;
    world.delete_for("sharing", "alone-1").await?;
    ensure_shown(world, "alone-1").await?;
    world.create_refused(sharing, NO_DEVICE).await?;
    world.verify().await?;
    world.delete_for("alone-0", "sharing").await
}
