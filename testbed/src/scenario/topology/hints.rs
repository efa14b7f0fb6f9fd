//! A pod's adapters, their number and their virtual functions; and the distance between its GPUs.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use proto::resource::{GPU_MEMORY_RATIO, GPU_SHARED, RDMA};
use serde_json::{Value, json};

use super::machines::{COUPLED, FUNCTIONS_PER_ADAPTER, PAIRED};
use super::{
    APART, HINT, NO_DEVICE, ScenarioEntry, annotated, ensure_minors, ensure_shown, minors,
    virtual_functions_of,
};
use crate::scenario::World;
use kit::pods::PodBuilder;
use kit::vendor_plugin::NVIDIA_GPU;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
    "all-adapters" => all_adapters,
        "a pod that applies for all adapters gets every one that it selects, or waits";
    "virtual-functions" => virtual_functions,
        "one function of each of two adapters, by label, and none of them twice";
    "gpu-scope" => gpu_scope,
        "GPUs stay within a switch or a NUMA node where the pod demands it";
    "hint-refusals" => hint_refusals,
        "hints that no device meets, devices that others keep, and unknown words are refused";
    "tightest-gpus" => tightest_gpus,
        "without a word GPUs of one switch go together, and pods that share leave whole switches whole";
};

/// A pod that asks for shares of RDMA adapters, with a hint for the choice.
fn adapters(name: &str, amount: &str, hint: &Value) -> PodBuilder {
    annotated(
        PodBuilder::new(name, &[(RDMA, amount)]).on(PAIRED),
        &[(HINT, json!({"rdma": hint}))],
    )
}

/// The hint `ApplyForAll` gives a pod every adapter that its selector matches, and waits while one is in use.
async fn all_adapters(world: &mut World) -> Result<()> {
    let one = world
        .start(PodBuilder::new("one", &[(RDMA, "100")]).on(PAIRED))
        .await?;
    let used = minors(&one, "rdma")?;
    let every = json!({"allocateStrategy": "ApplyForAll"});
    world.create(adapters("all", "100", &every)).await?;
    world.until_refused("all", NO_DEVICE).await?;
    world.delete("one").await?;
    world.until_running(&["all"]).await?;
    let all = minors(&world.pod("all")?, "rdma")?;
    ensure!(
        all == (0..8).collect::<Vec<i32>>(),
        "{all:?}; {used:?} were in use"
    );
    ensure_shown(world, "all").await?;
    world.verify().await?;
    world.delete("all").await?;
    let of_fabric = json!({"selector": {"matchLabels": {"fabric": "b"}}, "allocateStrategy": "ApplyForAll"});
    let half = world.start(adapters("half", "100", &of_fabric)).await?;
    ensure_minors(&half, "rdma", &[4, 5, 6, 7])?;
    ensure_shown(world, "half").await
}

/// The hint `vfSelector` gives each pod virtual functions of its own, until none is left.
async fn virtual_functions(world: &mut World) -> Result<()> {
    let hint = |kind: &str| json!({"vfSelector": {"matchExpressions": [{"key": "type", "operator": "In", "values": [kind]}]}, "allocateStrategy": "RequestsAsCount"});
    world.create(adapters("special", "2", &hint("special"))).await?;
    world.until_refused("special", NO_DEVICE).await?;
    world.delete("special").await?;
    // The proposal's example, until every virtual function is allocated: one that was allocated twice would show.
    let n_pods = 8 * FUNCTIONS_PER_ADAPTER / 2;
    let mut given = BTreeSet::new();
    for at in 0..n_pods {
        let name = format!("pair-{at}");
        let hint = if at == 0 {
            json!({"vfSelector": {}, "allocateStrategy": "RequestsAsCount"})
        } else {
            hint("general")
        };
        let pair = world.start(adapters(&name, "2", &hint)).await?;
        let (of, functions) = (minors(&pair, "rdma")?, virtual_functions_of(&pair)?);
        ensure!(
            of.len() == 2 && of.first() != of.last() && functions.len() == 2,
            "functions {functions:?} of adapters {of:?}"
        );
        ensure_shown(world, &name).await?;
        given.extend(functions);
    }
    ensure!(given.len() == (8 * FUNCTIONS_PER_ADAPTER) as usize, "{given:?}");
    world.create(adapters("late", "2", &hint("general"))).await?;
    world.until_refused("late", NO_DEVICE).await?;
    world.verify().await?;
    world.delete("pair-0").await?;
    world.until_running(&["late"]).await
}

/// The hint `requiredTopologyScope` keeps a pod's GPUs at one PCIe switch or NUMA node.
async fn gpu_scope(world: &mut World) -> Result<()> {
    let scoped = |name: &str, n_gpus: &str, scope: &str| {
        let hint = json!({"gpu": {"requiredTopologyScope": scope}});
        annotated(
            PodBuilder::new(name, &[(NVIDIA_GPU, n_gpus)]).on(COUPLED),
            &[(HINT, hint)],
        )
    };
    for (name, n_gpus, scope) in [("three", "3", "PCIe"), ("five", "5", "NUMANode")] {
        world.create(scoped(name, n_gpus, scope)).await?;
        world.until_refused(name, APART).await?;
    }
    let pair = world.start(scoped("pair", "2", "PCIe")).await?;
    let pair = minors(&pair, "gpu")?;
    ensure!(matches!(*pair, [one, other] if one / 2 == other / 2), "{pair:?}");
    let four = world.start(scoped("four", "4", "NUMANode")).await?;
    let four = minors(&four, "gpu")?;
    let numa_nodes: BTreeSet<i32> = four.iter().map(|minor| minor / 4).collect();
    ensure!(numa_nodes.len() == 1, "{four:?}");
    world.create(scoped("eight", "4", "NUMANode")).await?;
    world.until_refused("eight", "nodes are available").await?;
    world.verify().await?;
    world.delete("pair").await?;
    world.until_running(&["eight"]).await
}

/// Hints with an unknown strategy, or that no device meets, are refused; exclusive pods share no adapter.
async fn hint_refusals(world: &mut World) -> Result<()> {
    let unknown = adapters("unknown", "1", &json!({"allocateStrategy": "All"}));
    world
        .ensure_is_refused(unknown, "none of ApplyForAll, RequestsAsCount")
        .await?;
    let of_no_adapter = json!({"selector": {"matchLabels": {"fabric": "c"}}});
    world.create(adapters("labels", "1", &of_no_adapter)).await?;
    world.until_refused("labels", NO_DEVICE).await?;
    let by_count = json!({"allocateStrategy": "RequestsAsCount"});
    world.create(adapters("too-many", "9", &by_count)).await?;
    world.until_refused("too-many", NO_DEVICE).await?;
    // A pod with `exclusivePolicy` shares its adapters with no other pod, whichever of them comes first.
    let alone = json!({"exclusivePolicy": "DeviceLevel", "allocateStrategy": "RequestsAsCount"});
    let first = world.start(adapters("alone", "7", &alone)).await?;
    let second = world
        .start(PodBuilder::new("beside", &[(RDMA, "1")]).on(PAIRED))
        .await?;
    let (kept, left) = (minors(&first, "rdma")?, minors(&second, "rdma")?);
    ensure!(
        kept.len() == 7 && left.len() == 1 && left.iter().all(|minor| !kept.contains(minor)),
        "{kept:?} and {left:?}"
    );
    world.create(adapters("also-alone", "1", &alone)).await?;
    world.until_refused("also-alone", NO_DEVICE).await?;
    world.verify().await?;
    world.delete("beside").await?;
    world.until_running(&["also-alone"]).await?;
    world
        .create(PodBuilder::new("beside", &[(RDMA, "1")]).on(PAIRED))
        .await?;
    world.until_refused("beside", NO_DEVICE).await
}

/// Pods are placed so that whole PCIe switches stay free for pods of two GPUs.
async fn tightest_gpus(world: &mut World) -> Result<()> {
    let share = |name: &str, ratio: &str| PodBuilder::share(name, ratio).on(COUPLED);
    let switch = |pod: &Pod| {
        minors(pod, "gpu").map(|gpus| gpus.into_iter().map(|minor| minor / 2).collect::<BTreeSet<i32>>())
    };
    let broken = switch(&world.start(share("share-0", "60")).await?)?;
    // The second pod does not fit beside the first on one GPU, and takes the other GPU of the same switch.
    let second = switch(&world.start(share("share-1", "60")).await?)?;
    ensure!(second == broken, "switches {broken:?} and {second:?}");
    for name in ["pair-0", "pair-1", "pair-2"] {
        let pair = world
            .start(PodBuilder::new(name, &[(GPU_SHARED, "2"), (GPU_MEMORY_RATIO, "200")]).on(COUPLED))
            .await?;
        ensure!(switch(&pair)?.len() == 1, "{:?}", minors(&pair, "gpu")?);
    }
    Ok(())
}
