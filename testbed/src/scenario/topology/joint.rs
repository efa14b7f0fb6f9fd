//! GPUs and network adapters that belong together.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use proto::resource::RDMA;
use serde_json::{Value, json};

use super::machines::{LONE, PAIRED};
use super::{
    APART, HINT, JOINT, NO_DEVICE, ScenarioEntry, annotated, ensure_minors, ensure_shown, minors,
    virtual_functions_of,
};
use crate::scenario::World;
use kit::pods::PodBuilder;
use kit::vendor_plugin::NVIDIA_GPU;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
    "joint" => joint_allocation,
        "four GPUs bring the four adapters of their switches, and where there is one adapter only, that one";
    "joint-same-switch" => same_switch,
        "GPUs and adapters share their switches, or the pod waits";
    "joint-exclusive" => joint_exclusive,
        "an exclusive pod keeps others off its switches, in any order of arrival";
};

/// The pod of the proposal's examples: it asks for four GPUs and an RDMA adapter, to be allocated together.
fn four_gpus_and_adapter(name: &str, node: &str, scope: Option<&str>, hint: Option<Value>) -> PodBuilder {
    let mut joint = json!({"deviceTypes": ["gpu", "rdma"]});
    if let (Some(scope), Some(joint)) = (scope, joint.as_object_mut()) {
        joint.insert("requiredScope".to_owned(), json!(scope));
    }
    let mut annotations = vec![(JOINT, joint)];
    annotations.extend(hint.map(|hint| (HINT, hint)));
    annotated(
        PodBuilder::new(name, &[(NVIDIA_GPU, "4"), (RDMA, "1")]).on(node),
        &annotations,
    )
}

/// The minors of a pod's four GPUs, which are also those of its adapters: on these machines the GPU and the adapter of one switch
/// have the same minor number.
fn four_pairs(pod: &Pod) -> Result<Vec<i32>> {
    let (gpus, adapters) = (minors(pod, "gpu")?, minors(pod, "rdma")?);
    ensure!(
        gpus.len() == 4 && gpus == adapters,
        "GPUs {gpus:?} and adapters {adapters:?}"
    );
    Ok(gpus)
}

/// GPUs and an adapter that a pod asks for together are close to each other where possible.
async fn joint_allocation(world: &mut World) -> Result<()> {
    let placed = world
        .start(four_gpus_and_adapter("four", PAIRED, None, None))
        .await?;
    let gpus = four_pairs(&placed)?;
    ensure!(
        gpus == [0, 1, 2, 3] || gpus == [4, 5, 6, 7],
        "GPUs {gpus:?} are not of one NUMA node"
    );
    ensure_shown(world, "four").await?;
    let lone = world
        .start(four_gpus_and_adapter("one-adapter", LONE, None, None))
        .await?;
    ensure_minors(&lone, "gpu", &[4, 5, 6, 7])?;
    ensure_minors(&lone, "rdma", &[0])?;
    ensure_shown(world, "one-adapter").await?;
    // The remaining GPUs are in the other NUMA node than the only adapter: the pod gets them with that adapter.
    let far = world
        .start(four_gpus_and_adapter("far-adapter", LONE, None, None))
        .await?;
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
    world
        .create(four_gpus_and_adapter("apart", LONE, Some("SamePCIe"), None))
        .await?;
    world.until_refused("apart", APART).await?;
    // A pod takes five whole adapters, so that only three switches have an adapter left.
    let taken = world
        .start(PodBuilder::new("adapters", &[(RDMA, "500")]).on(PAIRED))
        .await?;
    let taken = minors(&taken, "rdma")?;
    ensure!(taken.len() == 5, "{taken:?}");
    world
        .create(four_gpus_and_adapter("together", PAIRED, Some("SamePCIe"), None))
        .await?;
    world.until_refused("together", APART).await?;
    world.verify().await?;
    world.delete("adapters").await?;
    world.until_running(&["together"]).await?;
    four_pairs(&world.pod("together")?)?;
    ensure_shown(world, "together").await
}

/// A pod that has its PCIe switches to itself shares none of their adapters.
async fn joint_exclusive(world: &mut World) -> Result<()> {
    let alone = |name: &str| {
        let hint = json!({"rdma": {"vfSelector": {}, "exclusivePolicy": "PCIeLevel"}});
        four_gpus_and_adapter(name, PAIRED, Some("SamePCIe"), Some(hint))
    };
    let sharing = || {
        annotated(
            PodBuilder::new("sharing", &[(RDMA, "1")]).on(PAIRED),
            &[(HINT, json!({"rdma": {"vfSelector": {}}}))],
        )
    };
    let first = world.start(alone("alone-0")).await?;
    let adapters = four_pairs(&first)?;
    let functions = virtual_functions_of(&first)?;
    ensure!(functions.len() == 4, "{functions:?}");
    ensure_shown(world, "alone-0").await?;
    // A sharing pod that came first keeps an exclusive pod away, too.
    let other = minors(&world.start(sharing()).await?, "rdma")?;
    let is_apart = other.iter().all(|minor| !adapters.contains(minor));
    ensure!(is_apart, "{other:?} and {adapters:?}");
    ensure_shown(world, "sharing").await?;
    world.create(alone("alone-1")).await?;
    world.until_refused("alone-1", APART).await?;
    world.delete("sharing").await?;
    world.until_running(&["alone-1"]).await?;
    ensure_shown(world, "alone-1").await?;
    world.create(sharing()).await?;
    world.until_refused("sharing", NO_DEVICE).await?;
    world.verify().await?;
    world.delete("alone-0").await?;
    world.until_running(&["sharing"]).await
}
