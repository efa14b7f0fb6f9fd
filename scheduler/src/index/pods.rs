//! A pod that requests device resources: the fields that watches show, those that the index derives from them, its assumption.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use placement::{OwnerId, PodProfile};

use super::eviction::PreemptionFacts;
use super::moving::Moving;
use crate::accounting::{Bound, PodFacts};
use crate::bind::{PodBinding, PodId};
use crate::kube_scheduler::PodRules;

/// A pod that requests device resources.
#[derive(Debug)]
pub(super) struct PodEntry {
    pub(super) facts: PodFacts,
    /// The fields that kube-scheduler compares with nodes; `None` for a pod that a watch has shown bound, or not shown yet.
    pub(super) rules: Option<Box<PodRules>>,
    /// A hash of the request and the rules ([`kind`]), by which the read API explains equal waiting pods once.
    pub(super) kind: u64,
    pub(super) assumption: Option<Box<Assumption>>,
    /// The reason for which its record is counted conservatively or not at all.
    pub(super) problem: Option<Box<str>>,
    /// See [`crate::accounting::Account::contradicts`].
    pub(super) contradicts: bool,
    pub(super) counted: Option<PodProfile>,
    pub(super) preemption: PreemptionFacts,
    /// The fields by which a plan moves the pod; `None` for a pod that no watch has shown bound.
    pub(super) moving: Option<Moving>,
    /// The serial number of the newest list when a list or a watch event last showed it; zero if no watch has shown it.
    pub(super) list: u32,
}

/// The decision of a bind that the watch of pods has not shown yet.
#[derive(Clone, Debug)]
pub(super) struct Assumption {
    /// The binding, which is the same each time that it is written.
    pub(super) binding: PodBinding,
    pub(super) state: AssumptionState,
    /// True if a complete list of pods, after the binding was written, lacks its pod: the pod was deleted, or is younger than the
    /// list.
    pub(super) unlisted: bool,
    /// True if this replica's term as the leader has ended since the decision, so that the binding must not be written again.
    pub(super) outlived: bool,
}

/// The phase of the write of a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Writing,
    /// No watch has shown it yet.
    Written,
    /// It may have been written or not.
    Unknown,
}

/// The state of an assumption at one moment, to compare with a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AssumptionState {
    /// The assume time, which differs from that of every other assumption.
    pub(crate) assumed_at: u64,
    pub(crate) phase: Phase,
    /// The beginning of the phase.
    pub(super) since: Instant,
}

impl PodEntry {
    /// The entry of a pod without an assumption, which no list has shown yet.
    pub(super) fn new(facts: PodFacts) -> Self {
        Self {
            facts,
            rules: None,
            kind: 0,
            assumption: None,
            problem: None,
            contradicts: false,
            counted: None,
            preemption: PreemptionFacts::default(),
            moving: None,
            list: 0,
        }
    }

    pub(super) fn id(&self, uid: &OwnerId) -> PodId {
        PodId {
            namespace: self.facts.namespace.to_string(),
            name: self.facts.name.to_string(),
            uid: uid.to_string(),
        }
    }

    /// Replaces the fields that come from watches; `rules` is `None` for a bound pod.
    pub(super) fn show(&mut self, facts: PodFacts, list: u32, rules: Option<Box<PodRules>>) {
        self.kind = rules.as_deref().map_or(0, |rules| kind(&facts, rules));
        (self.facts, self.list, self.rules) = (facts, list, rules);
    }

    /// The pod's node and record: those that a watch has shown, else those of the assumption.
    pub(super) fn bound(&self) -> Option<Cow<'_, Bound>> {
        if let Some(bound) = &self.facts.bound {
            return Some(Cow::Borrowed(bound));
        }
        let binding = &self.assumption.as_ref()?.binding;
        Some(Cow::Owned(Bound::read(&binding.node, Some(&binding.annotations))))
    }
}

/// A number below 2^53 that is equal for waiting pods with equal requests and rules, whatever their names.
fn kind(facts: &PodFacts, rules: &PodRules) -> u64 {
    let rules = PodRules {
        // kube-scheduler's last attempt to schedule the pod differs from pod to pod.
        last_attempt: None,
        ..rules.clone()
    };
    let mut hasher = DefaultHasher::new();
    let facts = (
        &facts.request,
        &facts.constraints,
        &facts.preference,
        &facts.isolation,
    );
    // Types from Kubernetes' API have no `Hash`.
    format!("{facts:?} {rules:?}").hash(&mut hasher);
    // JavaScript reads numbers below 2^53 exactly.
    hasher.finish() >> 11
}

#[cfg(test)]
mod tests {
    use proto::pod::Pod;
    use proto::resource::ResourceNames;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::kind;
    use crate::accounting::PodFacts;
    use crate::kube_scheduler::PodRules;

    fn kind_of(pod: &Value) -> u64 {
        let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
        let facts = PodFacts::of(&pod, &ResourceNames::default()).unwrap();
        kind(&facts, &PodRules::of(&pod))
    }

    fn pod() -> Value {
        let limits = json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "1Gi"});
        json!({
            "metadata": {"name": "a", "uid": "u", "namespace": "default"},
            "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
        })
    }

    /// The name and kube-scheduler's words about the last attempt are no part of the kind.
    #[test]
    fn pods_of_one_template_are_of_one_kind() {
        let mut other = pod();
        other["metadata"] = json!({"name": "b", "uid": "v", "namespace": "default"});
        assert_eq!(kind_of(&pod()), kind_of(&other));
    }

    #[rstest]
    #[case::amount("/spec/containers/0/resources/limits/koordinator.sh~1gpu-memory", json!("2Gi"))]
    #[case::selector("/spec/nodeSelector", json!({"gpu-type": "a100"}))]
    #[case::toleration("/spec/tolerations", json!([{"operator": "Exists"}]))]
    #[case::other_resource("/spec/containers/0/resources/requests", json!({"cpu": "900"}))]
    #[case::annotation(
        "/metadata/annotations",
        json!({"scheduling.koordinator.sh/device-allocate-hint": r#"{"gpu": {"selector": {"matchLabels": {"a": "b"}}}}"#})
    )]
    #[case::gate("/spec/schedulingGates", json!([{"name": "example.com/quota"}]))]
    fn what_decides_makes_another_kind(#[case] field: &str, #[case] value: Value) {
        let mut other = pod();
        let (parent, key) = field.rsplit_once('/').unwrap();
        other.pointer_mut(parent).unwrap()[key.replace("~1", "/")] = value;
        assert_ne!(kind_of(&pod()), kind_of(&other));
    }
}
