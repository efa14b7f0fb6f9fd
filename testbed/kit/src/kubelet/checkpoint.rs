//! The device manager's checkpoint file, in kubelet's JSON shape.
//!
//! The checksum is a hash (FNV-1a, eight bytes at a time) over the JSON of `Data`. kubelet hashes a dump of its
//! Go structure instead, so neither program accepts a file of the other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use k8s_openapi::ByteString;
use serde::{Deserialize, Serialize};

/// Why a checkpoint cannot be written or used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointFileError {
    #[error("cannot read or write the checkpoint {}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("the checkpoint {} is not JSON of the expected shape", path.display())]
    Shape {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("the checkpoint {} is corrupt: its checksum is {stated}, its data makes {computed}", path.display())]
    Checksum {
        path: PathBuf,
        stated: u32,
        computed: u32,
    },
}

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

#[derive(Debug, Serialize, Deserialize)]
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
    checksum: u32,
}

/// The file's content: entries of containers, and the healthy devices by resource, all in JSON.
pub(crate) fn render(entries: &[&str], registered: &str) -> String {
    let data = format!(
        r#"{{"PodDeviceEntries":[{}],"RegisteredDevices":{registered}}}"#,
        entries.join(",")
    );
    format!(r#"{{"Data":{data},"Checksum":{}}}"#, checksum(&data))
}

/// Replaces the file in one step, so that a reader sees either the old or the new content.
pub(crate) fn write(path: &Path, content: &str) -> Result<(), CheckpointFileError> {
    let failed = |source| CheckpointFileError::Io {
        path: path.to_owned(),
        source,
    };
    let temporary = path.with_extension("tmp");
    std::fs::write(&temporary, content).map_err(failed)?;
    std::fs::rename(&temporary, path).map_err(failed)
}

/// Reads the file; `None` if there is none.
pub(crate) fn read(path: &Path) -> Result<Option<CheckpointData>, CheckpointFileError> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(CheckpointFileError::Io {
                path: path.to_owned(),
                source,
            });
        }
    };
    let shape = |source| CheckpointFileError::Shape {
        path: path.to_owned(),
        source,
    };
    let file: File = serde_json::from_str(&text).map_err(shape)?;
    let computed = checksum(&serde_json::to_string(&file.data).map_err(shape)?);
    if computed != file.checksum {
        return Err(CheckpointFileError::Checksum {
            path: path.to_owned(),
            stated: file.checksum,
            computed,
        });
    }
    Ok(Some(file.data))
}

/// The checksum of this model's checkpoints: FNV over words of eight bytes.
fn checksum(data: &str) -> u32 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for bytes in data.as_bytes().chunks(8) {
        let mut word = 0;
        for byte in bytes {
            word = word << 8 | u64::from(*byte);
        }
        hash = (hash ^ word).wrapping_mul(0x0100_0000_01b3);
    }
    u32::try_from(hash >> 32).unwrap_or_default()
}

#[cfg(test)]
mod tests;
