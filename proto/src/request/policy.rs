//! Annotations by which a pod prefers nodes, and their devices, by another policy than the cluster's.

use super::RequestError;
use crate::pod::Pod;

/// Annotation: which of the fitting nodes is best for this pod.
pub const NODE_POLICY: &str = "gpushare/node-policy";
/// Annotation: which of a node's fitting devices this pod gets.
pub const DEVICE_POLICY: &str = "gpushare/device-policy";

/// What [`NODE_POLICY`] may be.
pub const NODE_POLICIES: [&str; 5] = ["fill", "binpack", "spread", "least-allocated", "most-allocated"];
/// What [`DEVICE_POLICY`] may be.
pub const DEVICE_POLICIES: [&str; 6] = [
    "fill",
    "binpack",
    "spread",
    "in-order",
    "least-allocated",
    "most-allocated",
];

/// What a pod says of its node, if it says anything.
pub fn node_policy(pod: &Pod) -> Option<&str> {
    annotation(pod, NODE_POLICY)
}

/// What a pod says of its devices, if it says anything.
pub fn device_policy(pod: &Pod) -> Option<&str> {
    annotation(pod, DEVICE_POLICY)
}

fn annotation<'p>(pod: &'p Pod, key: &str) -> Option<&'p str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// Refuses policies that do not exist.
pub(super) fn refuse_unknown(pod: &Pod) -> Result<(), RequestError> {
    for (key, choice) in [
        (NODE_POLICY, &NODE_POLICIES[..]),
        (DEVICE_POLICY, &DEVICE_POLICIES[..]),
    ] {
        if let Some(value) = annotation(pod, key).filter(|value| !choice.contains(value)) {
            let rule = format!("choose one of {}", choice.join(", "));
            return Err(RequestError::Hint {
                key,
                value: value.chars().take(64).collect(),
                rule,
            });
        }
    }
    Ok(())
}
