//! On which sets of NUMA nodes a pod can be placed.
//!
//! Koordinator says so to its scheduler as hints, with scores of its own, which nothing here requests and which are not
//! compared. A set counts where the pod is placed although all other devices are sick; the smallest ones are preferred.

use std::collections::BTreeSet;

use proto::resource::{FPGA, RDMA};
use serde_json::{Value, json};

use super::allocate::{device, fill, requests};
use super::case::{Case, Outcome};
use super::world::{Placed, Refused, World, annotated, pod};

/// Runs a case of NUMA nodes.
pub(crate) fn run(case: &Case<'_>) -> Outcome {
    if let Some(skip) = case.of_other_vendor() {
        return skip;
    }
    match case.kind {
        "hints" => hints(case),
        "allocate_in_numa" => allocate(case),
        kind => Outcome::skipped(format!("kind {kind:?} is not understood")),
    }
}

/// Places the case's pod, on these NUMA nodes only if they are given.
fn place(case: &Case<'_>, numa_nodes: Option<&BTreeSet<i64>>) -> Result<Placed, Refused> {
    let mut device = device(case);
    for entry in device["devices"].as_array_mut().unwrap() {
        let numa_node = entry["topology"]["nodeID"].as_i64();
        if numa_nodes.is_some_and(|nodes| numa_node.is_none_or(|node| !nodes.contains(&node))) {
            entry["health"] = json!(false);
        }
    }
    let mut world = World::plain();
    world.set_device(&device);
    fill(&mut world, &case.input["used"], &Value::Null);
    let asked = requests(&case.input["pod"]);
    world.place(&annotated(
        pod(&asked, &Value::Null),
        &case.input["pod"]["annotations"],
    ))
}

fn hints(case: &Case<'_>) -> Outcome {
    let device = device(case);
    let devices = device["devices"].as_array().unwrap();
    let nodes: BTreeSet<i64> = devices
        .iter()
        .filter_map(|entry| entry["topology"]["nodeID"].as_i64())
        .collect();
    let sets = subsets(&nodes)
        .into_iter()
        .filter(|set| place(case, Some(set)).is_ok());
    let sets: Vec<BTreeSet<i64>> = sets.collect();
    if sets.is_empty() || !case.is_ok() {
        return Outcome::equal(&!sets.is_empty(), &case.is_ok());
    }
    let fewest = sets.iter().map(BTreeSet::len).min();
    let got: BTreeSet<(Vec<i64>, bool)> = sets
        .iter()
        .map(|set| (set.iter().copied().collect(), Some(set.len()) == fewest))
        .collect();
    for (kind, hints) in case.expected["hints"].as_object().into_iter().flatten() {
        let hint = |hint: &Value| {
            let mut nodes: Vec<i64> = hint["numa_nodes"]
                .as_array()
                .unwrap()
                .iter()
                .map(|node| node.as_i64().unwrap())
                .collect();
            nodes.sort_unstable();
            (nodes, hint["preferred"].as_bool().unwrap())
        };
        let expected: BTreeSet<_> = hints.as_array().into_iter().flatten().map(hint).collect();
        if !asks_for(case, kind) || got != expected {
            return Outcome::Failed(format!("{kind}: expected {expected:?}, got {got:?}"));
        }
    }
    Outcome::Passed
}

fn asks_for(case: &Case<'_>, kind: &str) -> bool {
    let asked = requests(&case.input["pod"]);
    let is_of = |name: &str| {
        if name == RDMA || name == FPGA {
            name.ends_with(kind)
        } else {
            kind == "gpu"
        }
    };
    asked.as_object().unwrap().keys().any(|name| is_of(name))
}

fn allocate(case: &Case<'_>) -> Outcome {
    let nodes = case.input["numa_nodes"].as_array();
    let nodes = nodes.map(|nodes| nodes.iter().map(|node| node.as_i64().unwrap()).collect());
    match (place(case, nodes.as_ref()), case.is_ok()) {
        (Ok(_), true) | (Err(Refused::NoRoom(_)), false) => Outcome::Passed,
        (Ok(placed), false) => Outcome::Failed(format!("placed on {:?}", placed.allocations)),
        (Err(refused), _) => Outcome::Failed(refused.to_string()),
    }
}

/// Every set of some of these, but the empty one.
fn subsets(nodes: &BTreeSet<i64>) -> Vec<BTreeSet<i64>> {
    let mut subsets = vec![BTreeSet::new()];
    for node in nodes {
        let with: Vec<_> = subsets
            .iter()
            .map(|set: &BTreeSet<i64>| set.iter().copied().chain([*node]).collect())
            .collect();
        subsets.extend(with);
    }
    subsets
        .into_iter()
        .filter(|set: &BTreeSet<i64>| !set.is_empty())
        .collect()
}
