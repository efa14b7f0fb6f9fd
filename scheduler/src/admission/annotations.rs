//! Annotations of pods that we read, and what they must look like.

use proto::pod::{ALL_DEVICES, Pod};
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, GPU_MINORS, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_DEV, MEM_IDX, MEM_POD,
    Record,
};
use proto::request::hints::HINTS;

use super::Refusal;
use super::asks::annotation;

/// What only a scheduler, and the plugin of the pod's node, write.
pub(super) const RECORD: [&str; 8] = [
    DEVICE_ALLOCATED,
    BIND_TIMESTAMP,
    GPU_MINORS,
    MEM_IDX,
    MEM_POD,
    MEM_DEV,
    MEM_ASSIGNED,
    MEM_ASSUME_TIME,
];

/// Refuses a new pod whose annotations are not for its author to write.
pub(super) fn judge_new(pod: &Pod) -> Result<(), Refusal> {
    let key = RECORD.into_iter().find(|key| annotation(pod, key).is_some());
    let refusal = |key| {
        Refusal::Invalid(format!(
            "annotation {key} is for the scheduler to write; make the pod without it"
        ))
    };
    key.map_or(Ok(()), |key| Err(refusal(key)))
}

/// Refuses a change that makes an annotation unreadable, or that says after the fact that a pod shares all devices, or how its
/// devices were to be chosen.
pub(super) fn judge_change(old: &Pod, new: &Pod) -> Result<(), Refusal> {
    let changed = |key: &str| annotation(old, key) != annotation(new, key);
    if changed(ALL_DEVICES) {
        return Err(Refusal::Invalid(format!(
            "annotation {ALL_DEVICES} counts when a pod is made; it cannot be changed afterwards"
        )));
    }
    if RECORD.into_iter().any(changed)
        && let Err(error) = record(new)
        && record(old).is_ok()
    {
        return Err(Refusal::Invalid(error));
    }
    let mut changed = HINTS.into_iter().filter(|hint| changed(hint.key)).peekable();
    let is_placed = old.spec.node_name.as_deref().is_some_and(|node| !node.is_empty());
    if let Some(hint) = changed.peek().filter(|_| is_placed) {
        return Err(Refusal::Invalid(format!(
            "annotation {} counts when a pod is placed; it cannot be changed afterwards",
            hint.key
        )));
    }
    changed
        .try_for_each(|hint| hint.check(new))
        .map_err(|error| Refusal::Invalid(error.to_string()))
}

fn record(pod: &Pod) -> Result<(), String> {
    let read = pod.metadata.annotations.as_ref().map(Record::read).transpose();
    read.map(drop).map_err(|error| error.to_string())
}
