//! The device manager's checkpoint file, in kubelet's JSON shape. Its checksum, a hash of a dump of kubelet's Go structure, is
//! left out.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use serde::{Deserialize, Serialize};

use crate::files;

/// One container's devices of one resource.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct CheckpointEntry {
    #[serde(rename = "PodUID")]
    pub(crate) pod_uid: String,
    pub(crate) container_name: String,
    pub(crate) resource_name: String,
    /// Device IDs by NUMA node, -1 for none.
    #[serde(rename = "DeviceIDs")]
    pub(crate) device_ids: BTreeMap<i64, Vec<String>>,
    /// The plugin's answer, encoded as on the wire.
    pub(crate) alloc_resp: ByteString,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct CheckpointData {
    pub(crate) pod_device_entries: Vec<CheckpointEntry>,
    /// Healthy devices by resource.
    pub(crate) registered_devices: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: CheckpointData,
}

/// The content of the checkpoint file: entries of containers, and the healthy devices by resource, all in JSON.
pub(crate) fn render(entries: &[&str], registered: &str) -> String {
    format!(
        r#"{{"Data":{{"PodDeviceEntries":[{}],"RegisteredDevices":{registered}}},"Checksum":0}}"#,
        entries.join(",")
    )
}

/// Reads the checkpoint file; empty if there is none.
pub(crate) fn read(path: &Path) -> Result<CheckpointData> {
    if !path.exists() {
        return Ok(CheckpointData::default());
    }
    let file: File = serde_json::from_str(&files::read(path)?)
        .with_context(|| format!("{} is no checkpoint", path.display()))?;
    Ok(file.data)
}

#[cfg(test)]
mod tests;
