//! Annotations of pods that we read, and what they must look like.

use std::collections::BTreeMap;

use proto::pod::{ALL_DEVICES, Pod};
use proto::record::{BIND_TIMESTAMP, DEVICE_ALLOCATED, GPU_MINORS, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_DEV, MEM_IDX, MEM_POD, Record};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Refusal;
use super::asks::annotation;

/// What only a scheduler, and the plugin of the pod's node, write.
pub(super) const RECORD: [&str; 8] =
    [DEVICE_ALLOCATED, BIND_TIMESTAMP, GPU_MINORS, MEM_IDX, MEM_POD, MEM_DEV, MEM_ASSIGNED, MEM_ASSUME_TIME];

/// How the pod's author wants devices to be chosen, by Koordinator's proposals.
const HINTS: [(&str, Check); 3] = [
    ("scheduling.koordinator.sh/device-allocate-hint", check::<BTreeMap<String, AllocateHint>>),
    ("scheduling.koordinator.sh/device-joint-allocate", check::<JointAllocate>),
    ("scheduling.koordinator.sh/gpu-partition-spec", check::<PartitionSpec>),
];

type Check = fn(&str) -> Result<(), String>;

/// Whether a text is a JSON object with the fields of a type; serde alone would take a list for one too.
fn check<T: DeserializeOwned>(text: &str) -> Result<(), String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if !value.is_object() {
        return Err("not a JSON object".to_owned());
    }
    serde_json::from_value::<T>(value).map(drop).map_err(|error| error.to_string())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AllocateHint {
    #[serde(default, rename = "selector")]
    _selector: Option<Selector>,
    #[serde(default, rename = "vfSelector")]
    _vf_selector: Option<Selector>,
    #[serde(default, rename = "allocateStrategy")]
    _allocate_strategy: String,
    #[serde(default, rename = "requiredTopologyScope")]
    _required_topology_scope: String,
    #[serde(default, rename = "exclusivePolicy")]
    _exclusive_policy: String,
}

#[derive(Deserialize)]
struct Selector {
    #[serde(default, rename = "matchLabels")]
    _match_labels: Option<BTreeMap<String, String>>,
    #[serde(default, rename = "matchExpressions")]
    _match_expressions: Option<Vec<Expression>>,
}

#[derive(Deserialize)]
struct Expression {
    #[serde(rename = "key")]
    _key: String,
    #[serde(rename = "operator")]
    _operator: String,
    #[serde(default, rename = "values")]
    _values: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct JointAllocate {
    #[serde(default, rename = "deviceTypes")]
    _device_types: Option<Vec<String>>,
    #[serde(default, rename = "requiredScope")]
    _required_scope: String,
}

#[derive(Deserialize)]
struct PartitionSpec {
    #[serde(default, rename = "allocatePolicy")]
    _allocate_policy: String,
    #[serde(default, rename = "ringBusBandwidth")]
    _ring_bus_bandwidth: Option<proto::quantity::Quantity>,
}

/// Refuses a new pod whose annotations are not for its author to write, or cannot be read.
pub(super) fn judge_new(pod: &Pod) -> Result<(), Refusal> {
    if let Some(key) = RECORD.into_iter().find(|key| annotation(pod, key).is_some()) {
        return Err(Refusal::Invalid(format!("annotation {key} is for the scheduler to write; make the pod without it")));
    }
    HINTS.iter().try_for_each(|(key, check)| judge_hint(key, *check, annotation(pod, key)))
}

/// Refuses a change that makes an annotation unreadable, or says after the fact that a pod shares all devices.
pub(super) fn judge_change(old: &Pod, new: &Pod) -> Result<(), Refusal> {
    let changed = |key: &str| annotation(old, key) != annotation(new, key);
    if changed(ALL_DEVICES) {
        return Err(Refusal::Invalid(format!("annotation {ALL_DEVICES} counts when a pod is made; it cannot be changed afterwards")));
    }
    if RECORD.into_iter().any(changed)
        && let Err(error) = record(new)
        && record(old).is_ok()
    {
        return Err(Refusal::Invalid(error));
    }
    let mut changed = HINTS.iter().filter(|(key, _)| changed(key));
    changed.try_for_each(|(key, check)| judge_hint(key, *check, annotation(new, key)))
}

fn judge_hint(key: &str, check: Check, text: Option<&str>) -> Result<(), Refusal> {
    let Some(text) = text else { return Ok(()) };
    check(text).map_err(|error| {
        let excerpt: String = text.chars().take(64).collect();
        Refusal::Invalid(format!("annotation {key} is {excerpt:?}: {error}"))
    })
}

fn record(pod: &Pod) -> Result<(), String> {
    let read = pod.metadata.annotations.as_ref().map(Record::read).transpose();
    read.map(drop).map_err(|error| error.to_string())
}
