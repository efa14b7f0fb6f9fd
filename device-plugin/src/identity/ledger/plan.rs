//! Whose record each pod is to be answered with: mostly its own.
//!
//! Always a permutation of pods that ask for the same, so that no record is answered with twice. Pods whose containers
//! have what their plan says exchange their records before a container starts; until then nothing else knows of it.

use std::collections::BTreeMap;

use crate::pods::PodUid;

/// Pods that are not to be answered with their own record, and whose it is.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan(BTreeMap<PodUid, PodUid>);

impl Plan {
    /// Whose record the pod is to be answered with.
    pub(super) fn record_of<'a>(&'a self, pod: &'a PodUid) -> &'a PodUid {
        self.0.get(pod).unwrap_or(pod)
    }

    /// From now on the pod is to be answered with this one's record.
    pub(super) fn set(&mut self, pod: &PodUid, record_of: PodUid) {
        if *pod == record_of {
            self.0.remove(pod);
        } else {
            self.0.insert(pod.clone(), record_of);
        }
    }

    /// Each of the two is to be answered with what was meant for the other.
    pub(super) fn swap(&mut self, one: &PodUid, other: &PodUid) {
        let (ones, others) = (self.record_of(one).clone(), self.record_of(other).clone());
        self.set(one, others);
        self.set(other, ones);
    }

    /// The two pods have exchanged their records: who was meant to get the one's is meant to get the other's.
    pub(super) fn exchanged(&mut self, one: &PodUid, other: &PodUid) {
        let swapped = |record_of: &PodUid| match record_of {
            record_of if record_of == one => other.clone(),
            record_of if record_of == other => one.clone(),
            record_of => record_of.clone(),
        };
        let now: Vec<_> = self
            .0
            .iter()
            .map(|(pod, record_of)| (pod.clone(), swapped(record_of)))
            .collect();
        let rest: Vec<_> = [one, other]
            .into_iter()
            .filter(|pod| !self.0.contains_key(*pod))
            .map(|pod| (pod.clone(), swapped(pod)))
            .collect();
        for (pod, record_of) in now.into_iter().chain(rest) {
            self.set(&pod, record_of);
        }
    }

    /// Takes pods out that are gone: who was meant to get such a pod's record is meant to get what that one would have got.
    pub(super) fn forget_gone(&mut self, is_there: impl Fn(&PodUid) -> bool) {
        let gone: Vec<PodUid> = self
            .0
            .iter()
            .flat_map(|(pod, record_of)| [pod, record_of])
            .filter(|pod| !is_there(pod))
            .cloned()
            .collect();
        for pod in gone {
            let left = self.0.remove(&pod);
            let heirs: Vec<PodUid> = self
                .0
                .iter()
                .filter(|(_, record_of)| **record_of == pod)
                .map(|(heir, _)| heir.clone())
                .collect();
            for heir in heirs {
                self.set(&heir, left.clone().unwrap_or_else(|| heir.clone()));
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
        /// Whatever happens no record is meant for two pods; and an exchange changes records, not what a pod is meant to see.
        #[test]
        fn always_a_permutation(events in prop::collection::vec((0..3_u8, 0..6_usize, 0..6_usize), 0..40)) {
            let mut plan = Plan::default();
            let mut record: Vec<usize> = (0..6).collect();
            let mut there: Vec<usize> = (0..6).collect();
            for (kind, one, other) in events {
                let is_pair = one != other && there.contains(&one) && there.contains(&other);
                let place = |plan: &Plan, record: &[usize], n: usize| record[plan.record_of(&uid(n)).as_str().parse::<usize>().unwrap()];
                match kind {
                    0 if is_pair => plan.swap(&uid(one), &uid(other)),
                    1 if is_pair => {
                        let before: Vec<usize> = there.iter().map(|n| place(&plan, &record, *n)).collect();
                        record.swap(one, other);
                        plan.exchanged(&uid(one), &uid(other));
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
