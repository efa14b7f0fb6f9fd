//! Which devices kubelet gave to pods that this project's scheduler did not place: an annotation of the Device object.
//!
//! Written by a node's plugin where the vendor's plugin serves the vendor's resource, read by the scheduler, which counts those
//! devices as used. Whose pods they are and what is known of the devices is their readers' business.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::pod::null_as_default;

/// The annotation that is written (proposal "Fine-grained device scheduling").
pub const DEVICES_CHECKPOINTS: &str = "node.koordinator.sh/devices-checkpoints";
/// What the proposal's example calls the same annotation; read where the other one is absent.
pub const GPU_CHECKPOINTS: &str = "node.koordinator.sh/gpu-checkpoints";

/// Longest annotation that is read or written, in bytes; the API server allows 256 KiB of annotations in all.
pub const MAX_BYTES: usize = 128 * 1024;

/// What separates a device's ID from the number of its replica when the vendor's plugin shares devices by time slicing.
const REPLICA: &str = "::";

/// The devices of one container, of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerDevices {
    /// UID of the pod; empty if the writer does not know.
    #[serde(rename = "podUID", default, skip_serializing_if = "String::is_empty")]
    pub pod_uid: String,
    /// The container.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container_name: String,
    /// The resource that kubelet counts, such as `nvidia.com/gpu`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub resource_name: String,
    /// What kubelet calls the devices; see [`physical_id`].
    #[serde(
        rename = "deviceIDs",
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub device_ids: Vec<String>,
    /// kubelet's copy of the plugin's answer, base64; passed through, never looked into.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alloc_resp: Option<String>,
}

/// Every container that holds devices which this project's scheduler did not give it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DevicesCheckpoints {
    /// In the writer's order.
    pub entries: Vec<ContainerDevices>,
}

/// The annotation cannot be read. Devices that it named before must then be counted as used still.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key} {rule}")]
pub struct CheckpointsError {
    key: &'static str,
    rule: String,
}

impl DevicesCheckpoints {
    /// Reads the annotations of a Device object; `None` if it has no such annotation.
    ///
    /// # Errors
    /// It is no list of entries, one of them is not of the right form, or it is too long.
    pub fn read(annotations: &BTreeMap<String, String>) -> Result<Option<Self>, CheckpointsError> {
        let found = [DEVICES_CHECKPOINTS, GPU_CHECKPOINTS]
            .into_iter()
            .find_map(|key| Some((key, annotations.get(key)?)));
        found
            .map(|(key, text)| Self::parse(text).map_err(|rule| CheckpointsError { key, rule }))
            .transpose()
    }

    fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MAX_BYTES {
            return Err(format!("is {} bytes long, more than {MAX_BYTES}", text.len()));
        }
        let list = serde_json::from_str::<Option<Vec<Value>>>(text)
            .map_err(|cause| format!("is no list: {cause}"))?;
        let entry = |(at, value)| {
            ContainerDevices::deserialize(value).map_err(|cause| format!("entry {at}: {cause}"))
        };
        let entries = list
            .iter()
            .flatten()
            .enumerate()
            .map(entry)
            .collect::<Result<_, _>>()?;
        Ok(Self { entries })
    }

    /// The value of the annotation [`DEVICES_CHECKPOINTS`]; `None` if nothing is to be said.
    ///
    /// What would be too long is said in fewer words: first without kubelet's copies of answers, then as one list of devices per
    /// resource that tells no pods. The devices themselves are never left out, unless even that is too long.
    pub fn annotation(&self) -> Option<String> {
        if self.entries.is_empty() {
            return None;
        }
        let full = self.entries.clone();
        let without_answers = || {
            full.iter()
                .cloned()
                .map(|entry| ContainerDevices {
                    alloc_resp: None,
                    ..entry
                })
                .collect()
        };
        let shorter: [&dyn Fn() -> Vec<ContainerDevices>; 3] =
            [&|| full.clone(), &without_answers, &|| self.without_pods()];
        let texts = shorter
            .iter()
            .filter_map(|entries| serde_json::to_string(&entries()).ok());
        texts.into_iter().find(|text| text.len() <= MAX_BYTES)
    }

    /// Every device once, by resource.
    fn without_pods(&self) -> Vec<ContainerDevices> {
        let mut by_resource = BTreeMap::<&str, Vec<String>>::new();
        for entry in &self.entries {
            by_resource
                .entry(&entry.resource_name)
                .or_default()
                .extend(entry.device_ids.iter().cloned());
        }
        let entry = |(resource, mut device_ids): (&str, Vec<String>)| {
            device_ids.sort();
            device_ids.dedup();
            ContainerDevices {
                resource_name: resource.to_owned(),
                device_ids,
                ..ContainerDevices::default()
            }
        };
        by_resource.into_iter().map(entry).collect()
    }
}

/// The ID of the physical device that kubelet's ID is about, as far as the words alone tell.
///
/// A replica (`GPU-a::3`) is of its device, and an instance in the notation of old drivers (`MIG-GPU-a/1/0`) of its GPU. Anything
/// else, an index or an instance's own UUID, is returned as it is.
pub fn physical_id(id: &str) -> &str {
    let device = id.split_once(REPLICA).map_or(id, |(device, _)| device);
    match device
        .strip_prefix("MIG-")
        .and_then(|instance| instance.split_once('/'))
    {
        Some((gpu, _)) if gpu.starts_with("GPU-") => gpu,
        _ => device,
    }
}

#[cfg(test)]
mod tests;
