//! The group of pods that a pod is a member of, by the marks of all mechanisms that place such a group together.

use serde::{Deserialize, Serialize};

use super::Pod;

/// Labels of pods that a coscheduling plugin of kube-scheduler (scheduler-plugins) places together, the newest name first.
const COSCHEDULING_LABELS: [&str; 2] = [
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io",
];

/// Annotation of the pods of a gang that Koordinator's coscheduling plugin places together: the gang's name.
const KOORDINATOR_NAME: &str = "gang.scheduling.koordinator.sh/name";

/// Annotation of the same pods: the least number of them that may run.
pub(super) const KOORDINATOR_MIN_AVAILABLE: &str = "gang.scheduling.koordinator.sh/min-available";

/// A mechanism that places groups of pods together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupKind {
    /// kube-scheduler itself, by a `PodGroup` of `scheduling.k8s.io` that the pod's spec names.
    #[default]
    Native,
    /// The coscheduling plugin, by a `PodGroup` of `scheduling.x-k8s.io` that a label of the pod names.
    Coscheduling,
    /// Koordinator's plugin, by an annotation of the pod.
    Koordinator,
}

/// The group that a pod names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRef<'a> {
    /// The mechanism of the group.
    pub kind: GroupKind,
    /// The namespace of the pod, and so of the group.
    pub namespace: &'a str,
    /// The name of the group.
    pub name: &'a str,
}

impl Pod {
    /// The group that the pod is a member of. Of several marks the first counts, in the order of [`GroupKind`].
    pub fn group(&self) -> Option<GroupRef<'_>> {
        // Each of the three mechanisms takes an empty name for none.
        let written = |name: &&str| !name.is_empty();
        let labels = self.metadata.labels.as_ref();
        let label = |key: &&str| labels?.get(*key).map(String::as_str).filter(written);
        let (kind, name) = if let Some(name) = self.pod_group().filter(written) {
            (GroupKind::Native, name)
        } else if let Some(name) = COSCHEDULING_LABELS.iter().find_map(label) {
            (GroupKind::Coscheduling, name)
        } else {
            let name = self.annotation(KOORDINATOR_NAME).filter(written)?;
            (GroupKind::Koordinator, name)
        };
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        Some(GroupRef {
            kind,
            namespace,
            name,
        })
    }
}

impl GroupRef<'_> {
    /// `namespace/name`.
    pub fn key(&self) -> Box<str> {
        format!("{}/{}", self.namespace, self.name).into()
    }
}

/// The least number of members of a group, from a number in an object or annotation that may be negative or too large.
pub(crate) fn n_members(written: i64) -> u32 {
    u32::try_from(written.max(0)).unwrap_or(u32::MAX)
}
