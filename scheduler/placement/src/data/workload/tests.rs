//! Properties of samples.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{PodProfile, Workload};
use crate::data::amounts::HostAmounts;
use crate::data::request::{RequestedGpus, RequestedMemory, ShareRequest};

fn profile(kind: u32) -> PodProfile {
    let request = ShareRequest {
        devices: 1,
        memory: RequestedMemory::Ratio(kind + 1),
        core: 0,
        slots: 1,
    };
    PodProfile {
        gpus: RequestedGpus::Share(request),
        host: HostAmounts {
            cpu_milli: u64::from(kind) * 500,
            memory: 1,
        },
    }
}

fn workload(counts: &[u32]) -> Workload {
    let mut workload = Workload::default();
    for (kind, count) in (0..).zip(counts) {
        (0..*count).for_each(|_| workload.add(profile(kind)));
    }
    workload
}

fn numbers(sample: &[PodProfile]) -> BTreeMap<String, usize> {
    let mut numbers = BTreeMap::new();
    for profile in sample {
        *numbers.entry(format!("{:?}", profile.gpus)).or_default() += 1;
    }
    numbers
}

#[test]
fn the_sample_of_no_pods_is_empty() {
    assert_eq!(workload(&[]).sample(&Workload::default()), []);
    let mut idle = Workload::default();
    idle.add(PodProfile {
        gpus: RequestedGpus::Nothing,
        host: HostAmounts::default(),
    });
    idle.add(PodProfile {
        gpus: RequestedGpus::Whole(0),
        host: HostAmounts::default(),
    });
    assert_eq!((idle.sample(&Workload::default()), idle.n_pods()), (vec![], 0));
}

#[test]
fn a_workload_of_one_kind_fills_the_sample() {
    assert_eq!(workload(&[3]).sample(&Workload::default()), vec![profile(0); 144]);
}

#[test]
fn a_kind_has_places_in_the_sample_in_proportion_to_its_pods() {
    let numbers: Vec<usize> = numbers(&workload(&[500, 300, 200]).sample(&Workload::default()))
        .into_values()
        .collect();
    assert_eq!(numbers, [72, 43, 29]);
}

/// Any part of a sample has the kinds in proportion, as well as its few places allow.
#[test]
fn each_part_of_the_sample_has_the_kinds_in_proportion() {
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
fn one_pod_moves_at_most_one_place_of_each_kind() {
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
    fn the_sample_depends_on_the_present_pods_only(kinds in proptest::collection::vec(0_u32..6, 0..40), gone in proptest::collection::vec(0_u32..6, 0..20)) {
        let [mut one, mut other] = [Workload::default(), Workload::default()];
        for kind in &kinds {
            one.add(profile(*kind));
        }
        for kind in gone.iter().chain(kinds.iter().rev()) {
            other.add(profile(*kind));
        }
        for kind in gone.iter().rev() {
            other.remove(&profile(*kind));
        }
        prop_assert_eq!(one.sample(&Workload::default()), other.sample(&Workload::default()));
        prop_assert_eq!(one.n_pods(), other.n_pods());
    }
}
