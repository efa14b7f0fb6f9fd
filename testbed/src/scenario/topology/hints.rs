//! A pod's adapters, their number and their virtual functions; and the distance between its GPUs.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use proto::resource::{GPU_MEMORY_RATIO, GPU_SHARED, RDMA};
use serde_json::{Value, json};

use super::machines::{COUPLED, FUNCTIONS_PER_ADAPTER, PAIRED};
use super::{APART, HINT, NO_DEVICE, ensure_minors, ensure_shown, minors, virtual_functions_of};
use crate::scenario::{Scenario, World};
use kit::pods::PodBuilder;
use kit::vendor_plugin::NVIDIA_GPU;

pub(in crate::scenario) const SCENARIOS: &[Scenario] = scenarios! { needs "machines of known topologies", on [Topology]:
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
    let hint = json!({"rdma": hint}).to_string();
    PodBuilder::new(name, &[(RDMA, amount)])
        .annotation(HINT, &hint)
        .on(PAIRED)
}

/// The hint `ApplyForAll` gives a pod every adapter that its selector matches, and waits while one is in use.
async fn all_adapters(world: &mut World) -> Result<()> {
    let one = PodBuilder::new("one", &[(RDMA, "100")]).on(PAIRED);
    world.start(one).await?;
    let every = json!({"allocateStrategy": "ApplyForAll"});
    world
        .create_refused(adapters("all", "100", &every), NO_DEVICE)
        .await?;
    world.delete_for("one", "all").await?;
    ensure_minors(&world.pod("all")?, "rdma", &[0, 1, 2, 3, 4, 5, 6, 7])?;
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
    world
        .create_refused(adapters("special", "2", &hint("special")), NO_DEVICE)
        .await?;
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
        let are_two = of.len() == 2 && of.first() != of.last() && functions.len() == 2;
        ensure!(are_two, "functions {functions:?} of adapters {of:?}");
        ensure_shown(world, &name).await?;
        given.extend(functions);
    }
    ensure!(given.len() == (8 * FUNCTIONS_PER_ADAPTER) as usize, "{given:?}");
    world
        .create_refused(adapters("late", "2", &hint("general")), NO_DEVICE)
        .await?;
    world.verify().await?;
    world.delete_for("pair-0", "late").await
}

/// A pod of whole GPUs within a scope.
fn scoped(name: &str, n_gpus: &str, scope: &str) -> PodBuilder {
    let hint = json!({"gpu": {"requiredTopologyScope": scope}}).to_string();
    let spec = PodBuilder::new(name, &[(NVIDIA_GPU, n_gpus)]).on(COUPLED);
    spec.annotation(HINT, &hint)
}

/// The hint `requiredTopologyScope` keeps a pod's GPUs at one PCIe switch or NUMA node.
async fn gpu_scope(world: &mut World) -> Result<()> {
    for (name, n_gpus, scope) in [("three", "3", "PCIe"), ("five", "5", "NUMANode")] {
        world.create_refused(scoped(name, n_gpus, scope), APART).await?;
    }
    let pair = world.start(scoped("pair", "2", "PCIe")).await?;
    let pair = minors(&pair, "gpu")?;
    ensure!(matches!(*pair, [one, other] if one / 2 == other / 2), "{pair:?}");
    let four = world.start(scoped("four", "4", "NUMANode")).await?;
    let four = minors(&four, "gpu")?;
    let numa_nodes: BTreeSet<i32> = four.iter().map(|minor| minor / 4).collect();
    ensure!(numa_nodes.len() == 1, "{four:?}");
    world.create_waiting(scoped("eight", "4", "NUMANode")).await?;
    world.verify().await?;
    world.delete_for("pair", "eight").await
}

/// Hints with an unknown strategy, or that no device meets, are refused; exclusive pods share no adapter.
async fn hint_refusals(world: &mut World) -> Result<()> {
    let unknown = adapters("unknown", "1", &json!({"allocateStrategy": "All"}));
    let words = "none of ApplyForAll, RequestsAsCount";
    world.ensure_is_refused(unknown, words).await?;
    let of_no_adapter = json!({"selector": {"matchLabels": {"fabric": "c"}}});
    world
        .create_refused(adapters("labels", "1", &of_no_adapter), NO_DEVICE)
        .await?;
    let by_count = json!({"allocateStrategy": "RequestsAsCount"});
    world
        .create_refused(adapters("too-many", "9", &by_count), NO_DEVICE)
        .await?;
    // A pod with `exclusivePolicy` shares its adapters with no other pod, whichever of them comes first.
    let alone = json!({"exclusivePolicy": "DeviceLevel", "allocateStrategy": "RequestsAsCount"});
    let first = world.start(adapters("alone", "7", &alone)).await?;
    let beside = PodBuilder::new("beside", &[(RDMA, "1")]).on(PAIRED);
    let second = world.start(beside.clone()).await?;
    let (kept, left) = (minors(&first, "rdma")?, minors(&second, "rdma")?);
    let are_apart = left.iter().all(|minor| !kept.contains(minor));
    ensure!(
        kept.len() == 7 && left.len() == 1 && are_apart,
        "{kept:?} and {left:?}"
    );
    world
        .create_refused(adapters("also-alone", "1", &alone), NO_DEVICE)
        .await?;
    world.verify().await?;
    world.delete_for("beside", "also-alone").await?;
    world.create_refused(beside, NO_DEVICE).await
}

async fn tightest_gpus(world: &mut World) -> Result<()> {
    let broken = start_on_switch(world, PodBuilder::share("share-0", 60)).await?;
    // The second pod does not fit beside the first on one GPU, and takes the other GPU of the same switch.
    let second = start_on_switch(world, PodBuilder::share("share-1", 60)).await?;
    ensure!(second == broken, "switches {broken:?} and {second:?}");
    for name in ["pair-0", "pair-1", "pair-2"] {
        let pair = PodBuilder::new(name, &[(GPU_SHARED, "2"), (GPU_MEMORY_RATIO, "200")]);
        let switches = start_on_switch(world, pair).await?;
        ensure!(switches.len() == 1, "{switches:?}");
    }
    Ok(())
}

/// Starts a pod on the node [`COUPLED`]; returns the switches of its GPUs.
async fn start_on_switch(world: &World, spec: PodBuilder) -> Result<BTreeSet<i32>> {
    let pod = world.start(spec.on(COUPLED)).await?;
    Ok(minors(&pod, "gpu")?.into_iter().map(|minor| minor / 2).collect())
}
