//! Devices that kubelet allocated to pods which gpushare's scheduler did not place: an annotation of the Device object, by the
//! proposal "Fine-grained device scheduling" (section on compatibility).
//!
//! A node's plugin writes it where the vendor's plugin serves the vendor's resource; the scheduler counts those devices as
//! used. Nothing here looks up the pods and the devices that an entry names.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::annotation::{self, AnnotationError};
use crate::pod::{is_default, null_as_default};
use crate::resource::VENDOR_GPUS;

/// The annotation's key in the text of the proposal; the only key that the plugin writes.
pub const DEVICES_CHECKPOINTS: &str = "node.koordinator.sh/devices-checkpoints";
/// The annotation's key in the example of the proposal; read where [`DEVICES_CHECKPOINTS`] is absent.
pub const GPU_CHECKPOINTS: &str = "node.koordinator.sh/gpu-checkpoints";

/// Longest annotation that is read or written, in bytes; the API server allows 256 KiB for all annotations of an object.
pub const MAX_BYTES: usize = 128 * 1024;

/// Separates the ID of a GPU from the number of its replica where the vendor's plugin shares GPUs by time-slicing.
const REPLICA: &str = "::";

/// Prefix of kubelet's IDs of MIG instances (parts of a GPU in MIG mode).
const MIG: &str = "MIG-";

/// The devices of one resource that kubelet allocated to one container.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletAllocation {
    /// UID of the pod; empty if the writer does not know it.
    #[serde(rename = "podUID", skip_serializing_if = "String::is_empty")]
    pub pod_uid: String,
    /// Name of the container; empty if the writer does not know it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub container_name: String,
    /// Name of the extended resource, such as `nvidia.com/gpu`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource_name: String,
    /// kubelet's IDs of the devices; see [`physical_id`].
    #[serde(rename = "deviceIDs")]
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub device_ids: Vec<String>,
    /// The answer to Allocate that kubelet's checkpoint holds, in base64; passed through, never decoded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alloc_resp: Option<String>,
}

/// The devices of all containers whose devices gpushare's scheduler did not choose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubeletAllocations {
    /// One entry for each container and resource, in the writer's order.
    pub entries: Vec<KubeletAllocation>,
}

impl KubeletAllocations {
    /// Reads the annotations of a Device object, if it has one. After an error the caller counts the last valid value.
    pub fn read(annotations: &BTreeMap<String, String>) -> Result<Option<Self>, AnnotationError> {
        let text = Self::key(annotations).and_then(|key| Some((key, annotations.get(key)?)));
        text.map(|(key, text)| Self::parse(key, text)).transpose()
    }

    /// Reads the annotation [`GPU_CHECKPOINTS`] alone; `None` if it is absent or cannot be read.
    pub fn read_gpu_checkpoints(annotations: &BTreeMap<String, String>) -> Option<Self> {
        Self::parse(GPU_CHECKPOINTS, annotations.get(GPU_CHECKPOINTS)?).ok()
    }

    /// The key of the annotation that counts; `None` if the object has neither.
    pub fn key(annotations: &BTreeMap<String, String>) -> Option<&'static str> {
        let mut keys = [DEVICES_CHECKPOINTS, GPU_CHECKPOINTS].into_iter();
        keys.find(|key| annotations.contains_key(*key))
    }

    /// The first GPU of a vendor's resource for which `is_listed` is false. MIG instances are never listed, and are left out.
    pub fn unlisted_gpu(&self, is_listed: impl Fn(&str) -> bool) -> Option<&str> {
        let entries = self.entries.iter();
        let of_gpus = entries.filter(|entry| VENDOR_GPUS.contains(&entry.resource_name.as_str()));
        let mut ids = of_gpus.flat_map(|entry| &entry.device_ids);
        let id = ids.find(|id| !id.starts_with(MIG) && !is_listed(physical_id(id)))?;
        Some(physical_id(id))
    }

    fn parse(key: &'static str, text: &str) -> Result<Self, AnnotationError> {
        // Entry by entry, so that an error names the entry.
        let list: Option<Vec<Value>> = annotation::parse(key, text, MAX_BYTES)?;
        let mut entries = Vec::new();
        for (i, value) in list.into_iter().flatten().enumerate() {
            let entry = annotation::keys::read_value::<KubeletAllocation>(value);
            entries.push(entry.map_err(|cause| AnnotationError::new(key, format!("entry {i}: {cause}")))?);
        }
        Ok(Self { entries })
    }

    /// The value of the annotation [`DEVICES_CHECKPOINTS`]. One that would be too long is shortened: first without the answers to
    /// Allocate, then to one list of devices per resource. `None` without entries, or if even that is too long.
    pub fn annotation(&self) -> Option<String> {
        if self.entries.is_empty() {
            return None;
        }
        // All forms have all devices: one that is left out would count as free.
        if let Some(text) = short_text(&self.entries) {
            return Some(text);
        }
        let mut without_answers = self.entries.clone();
        for entry in &mut without_answers {
            entry.alloc_resp = None;
        }
        short_text(&without_answers).or_else(|| short_text(&self.without_pods()))
    }

    fn without_pods(&self) -> Vec<KubeletAllocation> {
        let mut by_resource = BTreeMap::<&str, BTreeSet<&String>>::new();
        for entry in &self.entries {
            let devices = by_resource.entry(&entry.resource_name).or_default();
            devices.extend(&entry.device_ids);
        }
        let mut entries = Vec::new();
        for (resource, device_ids) in by_resource {
            entries.push(KubeletAllocation {
                resource_name: resource.to_owned(),
                device_ids: device_ids.into_iter().cloned().collect(),
                ..KubeletAllocation::default()
            });
        }
        entries
    }
}

/// The JSON of the entries, if it is short enough for an annotation.
fn short_text(entries: &[KubeletAllocation]) -> Option<String> {
    let text = serde_json::to_string(entries).ok()?;
    (text.len() <= MAX_BYTES).then_some(text)
}

/// The ID of the physical device behind an ID of kubelet: a replica (`GPU-a::3`) belongs to its device, and an instance in the
/// notation of old drivers (`MIG-GPU-a/1/0`) to its GPU. Any other ID is returned unchanged.
pub fn physical_id(id: &str) -> &str {
    let (device, _) = id.split_once(REPLICA).unwrap_or((id, ""));
    // Drivers before R470 name a MIG instance by its GPU; later drivers by a UUID of its own, which does not name the GPU.
    let instance = device.strip_prefix(MIG).unwrap_or_default();
    match instance.split_once('/') {
        Some((gpu, _)) if gpu.starts_with("GPU-") => gpu,
        _ => device,
    }
}

#[cfg(test)]
mod tests;
