//! Tests: made-up clusters are the same every time, and the table shows the distance of each policy from the best.

use std::sync::atomic::AtomicBool;

use clap::ValueEnum;
use kit::console::Console;

use super::cluster::Family;
use super::{FamilyResult, SeedSpread, Task, render};
use crate::replay::conditions::{NamedConditions, Overrides, RunConditions};
use crate::replay::policy::Policy;

#[test]
fn a_cluster_is_determined_by_kind_number_and_seed() {
    for kind in Family::value_variants()
        .iter()
        .filter(|kind| **kind != Family::Mixed1213)
    {
        let shape = |number, seed| {
            let made = kind.make(number, seed).unwrap().world;
            let nodes: Vec<(i64, usize)> = made
                .nodes
                .iter()
                .map(|node| (node.cpu, node.minors.len()))
                .collect();
            let pods: Vec<(i64, i64)> = made.pods.iter().map(|pod| (pod.cpu, pod.demand())).collect();
            (nodes, pods)
        };
        let first = shape(1, 1);
        assert!(
            !first.0.is_empty() && first.1.len() > 1,
            "{}: {} pods",
            kind.name(),
            first.1.len()
        );
        assert_eq!(first, shape(1, 1), "{}", kind.name());
        assert_ne!(first, shape(2, 1), "{}", kind.name());
    }
}

#[test]
fn another_seed_of_pods_keeps_the_nodes() {
    let (one, other) = (
        Family::Unequal.make(3, 1).unwrap().world,
        Family::Unequal.make(3, 2).unwrap().world,
    );
    assert!(
        one.nodes
            .iter()
            .map(|node| node.cpu)
            .eq(other.nodes.iter().map(|node| node.cpu))
    );
    assert!(
        one.pods
            .iter()
            .map(|pod| pod.cpu)
            .ne(other.pods.iter().map(|pod| pod.cpu))
    );
}

/// A run fails if a pod is not given as many GPUs as it asks for.
#[tokio::test]
async fn whole_gpus_of_the_vendor_are_given_too() {
    let (kind, number, seed) = (Family::Vendor, 1, 1);
    let conditions = RunConditions::of(NamedConditions::S, Overrides::default());
    let policies = ["fill".parse().unwrap()];
    let task = Task { kind, number, seed };
    let (console, stop) = (Console::new(true), AtomicBool::new(false));
    let ran = task.run(&policies, &conditions, &console, &stop).await;
    assert!(ran.unwrap().unwrap()[0] > 50.0);
}

#[test]
fn losses_are_relative_to_the_best_policy() {
    let policies: Vec<Policy> = ["fill", "binpack"].map(|name| name.parse().unwrap()).into();
    let line = |kind: &str, runs: [Vec<f64>; 2]| FamilyResult {
        kind: kind.to_owned(),
        number: 1,
        allocated: runs.map(|runs| SeedSpread::of(&runs)).into(),
    };
    let lines = [
        line("shares", [vec![97.0, 99.0], vec![98.0, 98.0]]),
        line("whole", [vec![80.0], vec![83.5]]),
    ];
    insta::assert_snapshot!(render(&policies, &lines));
}
