//! What a sample stands for.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{Spec, Workload};
use crate::host::HostAmounts;
use crate::request::{GpuAsk, MemoryAsk, Request};

fn spec(kind: u32) -> Spec {
    let request = Request {
        devices: 1,
        memory: MemoryAsk::Ratio(kind + 1),
        core: 0,
        slots: 1,
    };
    Spec {
        gpus: GpuAsk::Share(request),
        host: HostAmounts {
            cpu_milli: u64::from(kind) * 500,
            memory: 1,
        },
    }
}

fn workload(counts: &[u32]) -> Workload {
    let mut workload = Workload::default();
    for (kind, count) in (0..).zip(counts) {
        (0..*count).for_each(|_| workload.add(spec(kind)));
    }
    workload
}

fn numbers(sample: &[Spec]) -> BTreeMap<String, usize> {
    let mut numbers = BTreeMap::new();
    for spec in sample {
        *numbers.entry(format!("{:?}", spec.gpus)).or_default() += 1;
    }
    numbers
}

#[test]
fn nobody_stands_for_nobody() {
    assert_eq!(workload(&[]).sample(&Workload::default()), []);
    let mut idle = Workload::default();
    idle.add(Spec {
        gpus: GpuAsk::Nothing,
        host: HostAmounts::default(),
    });
    idle.add(Spec {
        gpus: GpuAsk::Whole(0),
        host: HostAmounts::default(),
    });
    assert_eq!((idle.sample(&Workload::default()), idle.n_pods()), (vec![], 0));
}

#[test]
fn one_kind_stands_for_itself() {
    assert_eq!(workload(&[3]).sample(&Workload::default()), vec![spec(0); 144]);
}

#[test]
fn kinds_have_places_in_proportion() {
    let numbers: Vec<usize> = numbers(&workload(&[500, 300, 200]).sample(&Workload::default()))
        .into_values()
        .collect();
    assert_eq!(numbers, [72, 43, 29]);
}

/// Any part of a sample stands for all as well as so few can.
#[test]
fn parts_have_kinds_in_proportion() {
    for part in workload(&[500, 300, 200]).sample(&Workload::default()).chunks(36) {
        let numbers: Vec<usize> = numbers(part).into_values().collect();
        let expected = [18, 11, 7];
        assert!(
            numbers
                .iter()
                .zip(expected)
                .all(|(n, expected)| n.abs_diff(expected) <= 1),
            "{numbers:?}"
        );
    }
}

/// One pod of a thousand moves no more than a place of each kind.
#[test]
fn a_pod_changes_little() {
    let (before, after) = (
        workload(&[500, 300, 200]).sample(&Workload::default()),
        workload(&[500, 300, 201]).sample(&Workload::default()),
    );
    let n_changed = before
        .iter()
        .zip(&after)
        .filter(|(before, after)| before != after)
        .count();
    assert!(n_changed <= 2, "{n_changed}");
}

proptest! {
    /// A sample is a function of how many pods of each kind there are: not of the order in which they came, nor of those
    /// that came and went.
    #[test]
    fn history_does_not_matter(kinds in proptest::collection::vec(0_u32..6, 0..40), gone in proptest::collection::vec(0_u32..6, 0..20)) {
        let [mut one, mut other] = [Workload::default(), Workload::default()];
        for kind in &kinds {
            one.add(spec(*kind));
        }
        for kind in gone.iter().chain(kinds.iter().rev()) {
            other.add(spec(*kind));
        }
        for kind in gone.iter().rev() {
            other.remove(&spec(*kind));
        }
        prop_assert_eq!(one.sample(&Workload::default()), other.sample(&Workload::default()));
        prop_assert_eq!(one.n_pods(), other.n_pods());
    }
}
