//! What a sample stands for.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{N_PLACES, Spec, Workload};
use crate::host::HostAmounts;
use crate::request::{GpuAsk, MemoryAsk, Request};

fn spec(kind: u32) -> Spec {
    let request = Request { devices: 1, memory: MemoryAsk::Ratio(kind + 1), core: 0, slots: 1 };
    Spec { gpus: GpuAsk::Share(request), host: HostAmounts { cpu_milli: u64::from(kind) * 500, memory: 1 } }
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
    assert_eq!(workload(&[]).sample(), []);
    let mut plain = Workload::default();
    plain.add(Spec { gpus: GpuAsk::Nothing, host: HostAmounts::default() });
    plain.add(Spec { gpus: GpuAsk::Whole(0), host: HostAmounts::default() });
    assert_eq!((plain.sample(), plain.n_pods()), (vec![], 0));
}

#[test]
fn one_kind_stands_for_itself() {
    assert_eq!(workload(&[3]).sample(), vec![spec(0); N_PLACES]);
}

/// Half, three tenths and two tenths, as near as so many races come: three standard deviations.
#[test]
fn kinds_have_places_in_proportion() {
    let numbers: Vec<usize> = numbers(&workload(&[500, 300, 200]).sample()).into_values().collect();
    for (n, share) in numbers.iter().zip([0.5, 0.3, 0.2_f64]) {
        let expected = share * 288.0;
        let n = f64::from(u32::try_from(*n).unwrap());
        assert!((n - expected).abs() < 3.0 * (expected * (1.0 - share)).sqrt(), "{numbers:?}");
    }
}

/// One pod of a thousand decides few of the races, and only in favour of its own kind.
#[test]
fn a_pod_changes_little() {
    let (before, after) = (workload(&[500, 300, 200]).sample(), workload(&[500, 300, 201]).sample());
    let changed: Vec<_> = before.iter().zip(&after).filter(|(before, after)| before != after).collect();
    assert!(changed.len() < 5, "{}", changed.len());
    assert!(changed.iter().all(|(_, after)| **after == spec(2)));
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
        prop_assert_eq!(one.sample(), other.sample());
        prop_assert_eq!(one.n_pods(), other.n_pods());
    }
}
