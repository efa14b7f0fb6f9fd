//! Planned swaps: the pods whose Allocate calls are matched with another pod's record until the two records are swapped.
//!
//! A planned swap keeps the plan a permutation of pods that request the same, so that no record is used twice.

use std::collections::BTreeMap;

use crate::node::pods::PodUid;

/// For each pod whose calls are not matched with its own record, the pod whose allocation record that is.
#[derive(Clone, Debug, Default)]
pub(super) struct SwapPlan(BTreeMap<PodUid, PodUid>);

impl SwapPlan {
    /// The pod whose allocation record this pod's calls are matched with.
    pub(super) fn record_of<'a>(&'a self, pod: &'a PodUid) -> &'a PodUid {
        self.0.get(pod).unwrap_or(pod)
    }

    /// Plans to match the pod's further Allocate calls with the allocation record of the pod `owner`.
    pub(super) fn set(&mut self, pod: &PodUid, owner: PodUid) {
        // A pod that is matched with its own record needs no entry.
        if *pod == owner {
            self.0.remove(pod);
        } else {
            self.0.insert(pod.clone(), owner);
        }
    }

    /// Plans for each of the two pods the allocation record that was planned for the other.
    pub(super) fn swap(&mut self, one: &PodUid, other: &PodUid) {
        let (for_one, for_other) = (self.record_of(one).clone(), self.record_of(other).clone());
        self.set(one, for_other);
        self.set(other, for_one);
    }

    /// Notes that the two pods have swapped their records: every pod keeps the devices that are planned for it.
    pub(super) fn note_swap(&mut self, one: &PodUid, other: &PodUid) {
        let mut planned = self.0.clone();
        for pod in [one, other] {
            planned.entry(pod.clone()).or_insert_with(|| pod.clone());
        }
        for (pod, record_of) in planned {
            // The record that was that of `one` is now that of `other`, and the reverse.
            let holder = if record_of == *one {
                other.clone()
            } else if record_of == *other {
                one.clone()
            } else {
                record_of
            };
            self.set(&pod, holder);
        }
    }

    /// Removes pods that are gone. The record that was planned for such a pod goes to the pod for which its own was planned.
    pub(super) fn forget_gone(&mut self, is_there: impl Fn(&PodUid) -> bool) {
        let mut gone = Vec::new();
        for (pod, record_of) in &self.0 {
            gone.extend([pod, record_of].into_iter().filter(|pod| !is_there(pod)).cloned());
        }
        for pod in gone {
            let freed = self.0.remove(&pod);
            let mut heirs = self.0.clone();
            heirs.retain(|_, record_of| *record_of == pod);
            for heir in heirs.into_keys() {
                let record_of = freed.clone().unwrap_or_else(|| heir.clone());
                self.set(&heir, record_of);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn uid(n: usize) -> PodUid {
        PodUid::from(n.to_string().as_str())
    }

    proptest! {
        /// No record is ever planned for two pods, and a swap of records changes no pod's planned devices.
        #[test]
        fn a_swap_plan_is_always_a_permutation(events in prop::collection::vec((0..3_u8, 0..6_usize, 0..6_usize), 0..40)) {
            let mut plan = SwapPlan::default();
            let mut record: Vec<usize> = (0..6).collect();
            let mut there: Vec<usize> = (0..6).collect();
            for (kind, one, other) in events {
                let is_pair = one != other && there.contains(&one) && there.contains(&other);
                let place = |plan: &SwapPlan, record: &[usize], n: usize| record[plan.record_of(&uid(n)).as_str().parse::<usize>().unwrap()];
                match kind {
                    0 if is_pair => plan.swap(&uid(one), &uid(other)),
                    1 if is_pair => {
                        let before: Vec<usize> = there.iter().map(|n| place(&plan, &record, *n)).collect();
                        record.swap(one, other);
                        plan.note_swap(&uid(one), &uid(other));
                        prop_assert_eq!(before, there.iter().map(|n| place(&plan, &record, *n)).collect::<Vec<_>>());
                    }
                    _ => {
                        there.retain(|n| *n != one);
                        plan.forget_gone(|pod| there.iter().any(|n| uid(*n) == *pod));
                    }
                }
                let mut meant: Vec<usize> = there.iter().map(|n| plan.record_of(&uid(*n)).as_str().parse().unwrap()).collect();
                meant.sort_unstable();
                prop_assert_eq!(&meant, &there);
            }
        }
    }
}
