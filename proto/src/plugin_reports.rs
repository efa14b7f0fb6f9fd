//! Annotations in which a node's plugin reports to the scheduler: swapped records and pods without devices on the Device
//! object, and the plugin's own state on the Node.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::record::DeviceAllocations;

/// Annotation of the Device object: JSON of [`SwappedRecords`].
///
/// kubelet may admit equal pods in another order than they were assumed, so that each sees the other's devices. Then the
/// plugin swaps their records by one write that names both pods, and the pods' own annotations follow. From that write on
/// a pod's effective record is its entry here, if it has one, and else its own annotations.
pub const EXCHANGED_RECORDS: &str = "gpushare/exchanged-records";

/// Annotation of the Device object: a JSON list of UIDs of pods that kubelet has admitted without a device although their
/// records or requests name devices.
///
/// Only a plugin that lets no container start on a device without room writes it; without the annotation the plugin reports
/// no such pods. kubelet allocates devices at admission alone, so an entry stays true for the life of its pod.
pub const PODS_WITHOUT_DEVICES: &str = "gpushare/pods-without-devices";

/// Annotation of the Node: JSON of [`PluginState`].
///
/// The plugin writes it when kubelet has opened all of its device lists, when it has lost one, and before it ends. A plugin
/// that is killed writes nothing, so the annotation alone does not prove that the plugin lives.
const PLUGIN_STATE: &str = "gpushare/device-plugin";

/// Longest [`EXCHANGED_RECORDS`], in bytes; the API server allows 256 KiB of annotations in all.
const MAX_SWAPPED_BYTES: usize = 96 * 1024;
/// Longest [`PODS_WITHOUT_DEVICES`], in bytes.
const MAX_PODS_BYTES: usize = 16 * 1024;
/// Longest [`PLUGIN_STATE`], in bytes.
const MAX_STATE_BYTES: usize = 512;
/// Most pods with swapped records; kubelet runs a few hundred.
const MAX_SWAPPED_PODS: usize = 1024;
/// Longest UID of a pod, in bytes.
const MAX_UID_BYTES: usize = 128;

/// The effective records of pods whose records were swapped, by UID.
pub type SwappedRecords = BTreeMap<String, DeviceAllocations>;

/// UIDs of pods.
pub type PodUids = BTreeSet<Box<str>>;

type Annotations = BTreeMap<String, String>;

/// An annotation of a plugin that cannot be read, or cannot be written. Its last valid value stays in force.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key} {rule}")]
pub struct ReportError {
    key: &'static str,
    rule: String,
}

/// The records that the plugin has swapped, from the annotation [`EXCHANGED_RECORDS`]; empty without the annotation.
///
/// # Errors
/// It does not parse, is too long, or names no devices for a pod.
pub fn read_swapped_records(annotations: Option<&Annotations>) -> Result<SwappedRecords, ReportError> {
    let swapped = read(annotations, EXCHANGED_RECORDS, MAX_SWAPPED_BYTES)?.unwrap_or_default();
    check_swapped_records(&swapped)?;
    Ok(swapped)
}

/// The value of [`EXCHANGED_RECORDS`].
///
/// # Errors
/// [`read_swapped_records`] would refuse it.
pub fn write_swapped_records(swapped: &SwappedRecords) -> Result<String, ReportError> {
    check_swapped_records(swapped)?;
    let text = serde_json::to_string(swapped)
        .map_err(|cause| swapped_error(format!("cannot be written: {cause}")))?;
    if text.len() > MAX_SWAPPED_BYTES {
        return Err(swapped_error(format!(
            "would be longer than {MAX_SWAPPED_BYTES} bytes"
        )));
    }
    Ok(text)
}

fn check_swapped_records(swapped: &SwappedRecords) -> Result<(), ReportError> {
    if swapped.len() > MAX_SWAPPED_PODS {
        return Err(swapped_error(format!("names more than {MAX_SWAPPED_PODS} pods")));
    }
    for (uid, record) in swapped {
        // Such an entry would never match a pod, and hide that its writer is broken.
        if uid.is_empty() || uid.len() > MAX_UID_BYTES {
            return Err(swapped_error(
                "has an entry whose name is not the UID of a pod".to_owned(),
            ));
        }
        // A record without devices would free those of a running pod.
        if record.values().all(Vec::is_empty) {
            return Err(swapped_error(format!(
                "names no device for the pod with UID {uid}"
            )));
        }
    }
    Ok(())
}

fn swapped_error(rule: String) -> ReportError {
    ReportError {
        key: EXCHANGED_RECORDS,
        rule,
    }
}

/// Reads [`PODS_WITHOUT_DEVICES`]; `None` if the plugin does not report such pods.
///
/// # Errors
/// It is not a JSON list of strings, or is too long.
pub fn read_pods_without_devices(annotations: Option<&Annotations>) -> Result<Option<PodUids>, ReportError> {
    read(annotations, PODS_WITHOUT_DEVICES, MAX_PODS_BYTES)
}

/// The value of [`PODS_WITHOUT_DEVICES`]. Leaves out UIDs that would make it too long; the scheduler still counts those pods.
pub fn write_pods_without_devices<'a>(uids: impl IntoIterator<Item = &'a str>) -> String {
    let mut n_bytes = 2;
    let mut written = BTreeSet::new();
    for uid in uids.into_iter().collect::<BTreeSet<_>>() {
        // Two quotes and a comma. UIDs have no characters that JSON escapes, so others are left out.
        n_bytes += uid.len() + 3;
        let is_plain = uid
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b'"' && byte != b'\\');
        if n_bytes <= MAX_PODS_BYTES && is_plain {
            written.insert(uid);
        }
    }
    json!(written).to_string()
}

/// The state of a node's device plugin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginState {
    /// True if kubelet has the plugin's device lists, so that pods can be admitted.
    pub serving: bool,
    /// The time of the report, by the clock of the node.
    #[serde(with = "rfc3339")]
    pub since: Timestamp,
    /// UID of the plugin's pod; `None` for a plugin outside of pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

impl PluginState {
    /// Reads the annotation of the plugin's state; `None` if the plugin has never reported.
    ///
    /// # Errors
    /// It does not parse, or is too long.
    pub fn read(annotations: Option<&Annotations>) -> Result<Option<Self>, ReportError> {
        read(annotations, PLUGIN_STATE, MAX_STATE_BYTES)
    }

    /// The merge patch of the Node that writes the annotation of the plugin's state.
    pub fn patch(&self) -> Value {
        let text = serde_json::to_string(self).unwrap_or_default();
        json!({"metadata": {"annotations": {PLUGIN_STATE: text}}})
    }
}

fn read<T: DeserializeOwned>(
    annotations: Option<&Annotations>,
    key: &'static str,
    max_bytes: usize,
) -> Result<Option<T>, ReportError> {
    let Some(text) = annotations.and_then(|annotations| annotations.get(key)) else {
        return Ok(None);
    };
    let fail = |rule: String| ReportError { key, rule };
    // Before parsing, so that a long annotation costs nothing.
    if text.len() > max_bytes {
        return Err(fail(format!("is longer than {max_bytes} bytes")));
    }
    let value = serde_json::from_str(text).map_err(|cause| fail(format!("does not parse: {cause}")))?;
    Ok(Some(value))
}

/// Serialises a time as RFC 3339 with its full precision; `Time` of Kubernetes drops fractions of a second.
mod rfc3339 {
    use k8s_openapi::jiff::Timestamp;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(time)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map_err(|error| D::Error::custom(format!("{text:?} is no time: {error}")))
    }
}

#[cfg(test)]
mod tests;
