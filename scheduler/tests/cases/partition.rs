//! Partition tables of GPUs: read, known by the model, and what policies and pods say of them.
//!
//! A table's index and the links' type are Koordinator's own; here a table is its partitions with their scores.

use std::collections::{BTreeMap, BTreeSet};

use placement::PartitionTable;
use proto::pod::Pod;
use proto::quantity::Quantity;
use proto::request::hints::Hints;
use proto::topology::{GPU_PARTITION_POLICY, GPU_PARTITIONS, GpuPartitionPolicy};
use scheduler::inventory::{self, DeviceReport, NodeReport};
use serde_json::{Value, json};

use super::allocate;
use super::case::{Case, Outcome};
use super::world::{annotated, pod, read};

/// Sets of GPUs with their scores and bandwidths, by their size.
type Sets = BTreeMap<usize, BTreeSet<(Vec<u64>, i64, Option<Quantity>)>>;

/// Runs a case of partitions.
pub(crate) fn run(case: &Case<'_>) -> Outcome {
    if let Some(skip) = case.of_other_vendor() {
        return skip;
    }
    match case.kind {
        "allocate" => allocate::run(case),
        "index_table" => index(case),
        "parse_table" => parse(case),
        "parse_spec" => spec(case),
        "policy" => policy(case),
        "builtin_table" => known(case),
        kind => Outcome::skipped(format!("kind {kind:?} is not understood")),
    }
}

/// The report of a node with eight GPUs, these labels and this table.
fn report(node_labels: &Value, annotations: &Value) -> NodeReport {
    let gpu = |minor: u32| json!({"type": "gpu", "minor": minor, "health": true, "resources": {"koordinator.sh/gpu-memory": "16Gi"}});
    let device = DeviceReport::of(
        &read(json!({"annotations": annotations})),
        &json!({"devices": (0..8).map(gpu).collect::<Vec<_>>()}),
    );
    let node = read(json!({"metadata": {"labels": node_labels}}));
    inventory::report(&node, Some(&device), &proto::resource::ResourceNames::default()).unwrap()
}

fn sets_of(table: Option<&PartitionTable>) -> Sets {
    let mut sets = Sets::new();
    for partition in table.into_iter().flat_map(|table| &table.partitions) {
        let minors: Vec<u64> = partition.minors.iter().copied().map(u64::from).collect();
        let bandwidth = partition.bandwidth.map(Quantity::from_unsigned);
        sets.entry(minors.len())
            .or_default()
            .insert((minors, partition.score, bandwidth));
    }
    sets
}

/// The sets of a table as JSON, whatever they are grouped by below their size.
fn sets_of_json(table: &Value) -> Sets {
    let mut sets = Sets::new();
    for (size, entries) in table.as_object().into_iter().flatten() {
        let groups = entries.as_array().unwrap().iter();
        let partitions = groups.flat_map(|entry| {
            entry["partitions"]
                .as_array()
                .map_or_else(|| vec![entry.clone()], Clone::clone)
        });
        for partition in partitions {
            let minors = partition["minors"]
                .as_array()
                .unwrap()
                .iter()
                .map(|minor| minor.as_u64().unwrap())
                .collect();
            let bandwidth = serde_json::from_value(partition["ringBusBandwidth"].clone()).unwrap();
            let set = (
                minors,
                partition["allocationScore"].as_i64().unwrap_or_default(),
                bandwidth,
            );
            sets.entry(size.parse().unwrap()).or_default().insert(set);
        }
    }
    sets
}

/// A table and its index say the same.
fn index(case: &Case<'_>) -> Outcome {
    let report = report(
        &Value::Null,
        &json!({GPU_PARTITIONS: case.input["table"].to_string()}),
    );
    Outcome::equal(&report.problems, &Vec::new()).and(|| {
        Outcome::equal(
            &sets_of(report.inventory.partitions.as_ref()),
            &sets_of_json(&case.expected["groups_by_count"]),
        )
    })
}

fn parse(case: &Case<'_>) -> Outcome {
    let annotations = &case.input["device_annotations"];
    let report = report(&Value::Null, annotations);
    Outcome::equal(&report.problems.is_empty(), &case.is_ok()).and(|| {
        Outcome::equal(
            &sets_of(report.inventory.partitions.as_ref()),
            &sets_of_json(&case.expected["table"]),
        )
    })
}

fn spec(case: &Case<'_>) -> Outcome {
    let pod: Pod = read(annotated(
        pod(&Value::Null, &Value::Null),
        &case.input["pod_annotations"],
    ));
    let expected = &case.expected["spec"];
    match (Hints::read(&pod), case.is_ok()) {
        (Ok(hints), true) => {
            let said = |hints: Hints| {
                hints.partition.map(|spec| {
                    (
                        spec.restricted,
                        spec.ring_bus_bandwidth.map(Quantity::from_unsigned),
                    )
                })
            };
            let bandwidth = serde_json::from_value(expected["ringBusBandwidth"].clone()).unwrap();
            let expected =
                (!expected.is_null()).then(|| (expected["allocatePolicy"] == "Restricted", bandwidth));
            Outcome::equal(&said(hints), &expected)
        }
        (Ok(hints), false) => Outcome::Failed(format!("read as {:?}", hints.partition)),
        (Err(error), true) => Outcome::Failed(error.to_string()),
        (Err(_), false) => Outcome::Passed,
    }
}

fn policy(case: &Case<'_>) -> Outcome {
    let policy = GpuPartitionPolicy::read(case.input["labels"][GPU_PARTITION_POLICY].as_str());
    Outcome::equal(&Some(policy.as_str()), &case.expected["policy"].as_str())
}

fn known(case: &Case<'_>) -> Outcome {
    let of = |field: &str| case.input[field].as_array().cloned().unwrap_or_default();
    for model in of("gpu_models") {
        for vendor in of("gpu_vendors") {
            let labels =
                json!({"node.koordinator.sh/gpu-model": model, "node.koordinator.sh/gpu-vendor": vendor});
            let report = report(&labels, &Value::Null);
            let outcome = Outcome::equal(
                &sets_of(report.inventory.partitions.as_ref()),
                &sets_of_json(&case.expected["table"]),
            );
            if outcome != Outcome::Passed {
                return outcome;
            }
        }
    }
    Outcome::Passed
}
