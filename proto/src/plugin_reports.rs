//! Annotations in which a node's plugin reports to the scheduler. On the Device object: the allocation records that it has
//! swapped between pods, and the pods that kubelet admitted without a device. On the Node: the plugin's own state.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::annotation::{self, AnnotationError};
use crate::record::DeviceAllocations;

/// Annotation of the Device object: JSON of [`SwappedRecords`]. kubelet may admit two equal pods in another order than the
/// scheduler placed them; then the plugin swaps their records by one write that names both. From then on the entry here is the
/// effective record of a pod, and its own annotations follow.
pub const EXCHANGED_RECORDS: &str = "gpushare/exchanged-records";

/// Annotation of the Device object: a JSON list of UIDs of pods that kubelet has admitted without a device although their records
/// or requests name devices. Written only by a plugin that lets no container start on a device without room. kubelet allocates at
/// admission alone, so that an entry stays true for the life of its pod.
pub const PODS_WITHOUT_DEVICES: &str = "gpushare/pods-without-devices";

/// Annotation of the Node: JSON of [`PluginState`]. Written when kubelet has opened all device lists, when it has lost one, and
/// before the plugin ends; a plugin that is killed writes nothing.
const PLUGIN_STATE: &str = "gpushare/device-plugin";

/// Values of the label `app.kubernetes.io/name` of the plugin's pods: the plugin, and the variant that serves whole GPUs.
pub const PLUGIN_NAMES: [&str; 2] = ["gpushare-device-plugin", "gpushare-device-plugin-whole-gpus"];

/// The label selector of the pods with one of [`PLUGIN_NAMES`].
pub const PLUGIN_SELECTOR: &str =
    "app.kubernetes.io/name in (gpushare-device-plugin,gpushare-device-plugin-whole-gpus)";

/// Longest [`EXCHANGED_RECORDS`], in bytes; the API server allows 256 KiB for all annotations of an object.
const MAX_SWAPPED_BYTES: usize = 96 * 1024;
/// Longest [`PODS_WITHOUT_DEVICES`], in bytes.
const MAX_PODS_BYTES: usize = 16 * 1024;
/// Longest [`PLUGIN_STATE`], in bytes.
const MAX_STATE_BYTES: usize = 512;
/// Most pods with swapped records; kubelet runs 110 pods by default, and a few hundred at most.
const MAX_SWAPPED_PODS: usize = 1024;
/// Longest UID of a pod, in bytes; the API server's have 36, those of static pods 32.
const MAX_UID_BYTES: usize = 128;

/// The effective records of pods whose records were swapped, by UID.
pub type SwappedRecords = BTreeMap<String, DeviceAllocations>;

/// UIDs of pods.
pub type PodUids = BTreeSet<Box<str>>;

type Annotations = BTreeMap<String, String>;

/// Reads [`EXCHANGED_RECORDS`]; empty without the annotation. After an error readers keep the last valid value.
pub fn read_swapped_records(annotations: Option<&Annotations>) -> Result<SwappedRecords, AnnotationError> {
    let swapped = read(annotations, EXCHANGED_RECORDS, MAX_SWAPPED_BYTES)?.unwrap_or_default();
    check_swapped_records(&swapped)?;
    Ok(swapped)
}

/// The value of [`EXCHANGED_RECORDS`], unless [`read_swapped_records`] would refuse it.
pub fn write_swapped_records(swapped: &SwappedRecords) -> Result<String, AnnotationError> {
    check_swapped_records(swapped)?;
    match serde_json::to_string(swapped) {
        Ok(text) if text.len() <= MAX_SWAPPED_BYTES => Ok(text),
        Ok(_) => Err(swapped_error(format!(
            "would be longer than {MAX_SWAPPED_BYTES} bytes"
        ))),
        Err(cause) => Err(swapped_error(format!("cannot be written: {cause}"))),
    }
}

/// Checks the rules of [`EXCHANGED_RECORDS`] that hold for its reader and its writer.
fn check_swapped_records(swapped: &SwappedRecords) -> Result<(), AnnotationError> {
    if swapped.len() > MAX_SWAPPED_PODS {
        return Err(swapped_error(format!("more than {MAX_SWAPPED_PODS} pods")));
    }
    for (uid, record) in swapped {
        // Such an entry would match no pod, and its writer has a fault that would stay hidden.
        if uid.is_empty() || uid.len() > MAX_UID_BYTES {
            return Err(swapped_error("an entry whose name is not the UID of a pod"));
        }
        // A record without devices would free the devices of a running pod.
        if record.values().all(Vec::is_empty) {
            return Err(swapped_error(format!("no device for the pod with UID {uid}")));
        }
    }
    Ok(())
}

fn swapped_error(rule: impl Into<String>) -> AnnotationError {
    AnnotationError::new(EXCHANGED_RECORDS, rule)
}

/// Reads [`PODS_WITHOUT_DEVICES`]; `None` if the plugin does not report such pods.
pub fn read_pods_without_devices(
    annotations: Option<&Annotations>,
) -> Result<Option<PodUids>, AnnotationError> {
    read(annotations, PODS_WITHOUT_DEVICES, MAX_PODS_BYTES)
}

/// The value of [`PODS_WITHOUT_DEVICES`]. Leaves out UIDs beyond its length: the scheduler counts devices for these pods.
pub fn write_pods_without_devices<'a>(uids: impl IntoIterator<Item = &'a str>) -> String {
    let mut n_bytes = 2;
    let mut written = BTreeSet::new();
    // In the order of UIDs: an annotation that changes with an iteration order would be written again and again.
    for uid in uids.into_iter().collect::<BTreeSet<_>>() {
        // Two quotes and a comma. UIDs have no characters that JSON escapes, so others are left out.
        n_bytes += uid.len() + 3;
        let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'"' && byte != b'\\';
        if n_bytes <= MAX_PODS_BYTES && uid.bytes().all(is_plain) {
            written.insert(uid);
        }
    }
    json!(written).to_string()
}

/// The state of a node's device plugin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginState {
    /// True if kubelet has the plugin's device lists, so that pods can be admitted.
    // kubelet fails a pod for good whose device plugin is away at admission.
    pub serving: bool,
    /// The time of the report by the clock of the node, RFC 3339.
    // Not Kubernetes' `Time`, which drops fractions of a second: a plugin may report twice within one.
    pub since: Timestamp,
    /// UID of the plugin's pod; `None` for a plugin that runs in no pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

impl PluginState {
    /// Reads the annotation of the plugin's state; `None` if the plugin has never reported.
    pub fn read(annotations: Option<&Annotations>) -> Result<Option<Self>, AnnotationError> {
        read(annotations, PLUGIN_STATE, MAX_STATE_BYTES)
    }

    /// The merge patch of the Node that writes the annotation of the plugin's state.
    pub fn patch(&self) -> Value {
        // A struct of a flag and two texts always serializes.
        let text = serde_json::to_string(self).unwrap_or_default();
        json!({"metadata": {"annotations": {PLUGIN_STATE: text}}})
    }
}

fn read<T: DeserializeOwned>(
    annotations: Option<&Annotations>,
    key: &'static str,
    max_bytes: usize,
) -> Result<Option<T>, AnnotationError> {
    match annotations.and_then(|annotations| annotations.get(key)) {
        None => Ok(None),
        Some(text) => annotation::parse(key, text, max_bytes).map(Some),
    }
}

#[cfg(test)]
mod tests;
