//! kubelet's checkpoint of allocated devices, the file `kubelet_internal_checkpoint` in its device plugin directory.
//!
//! kubelet does not promise the file's form, so entries that do not parse are left out. The file names pods by UID, also some
//! that have ended: kubelet removes their entries late.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::ByteString;
use prost::Message;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tracing::warn;

use crate::devices::extended_resource::{ExtendedResource, ExtendedResourceNames};
use crate::file_version::FileVersion;
use crate::node::pods::PodUid;
use daemon::api_server::one_line;

pub(crate) const FILE: &str = "kubelet_internal_checkpoint";

/// Longest file that is read, in bytes. kubelet writes the ID of every device of every plugin.
const MAX_BYTES: u64 = 64 << 20;

/// An entry of the checkpoint: one resource of one container, of any plugin.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct CheckpointEntry {
    #[serde(rename = "PodUID")]
    pub(crate) pod_uid: String,
    pub(crate) container_name: String,
    pub(crate) resource_name: String,
    /// The IDs of the allocated devices, sorted; none if kubelet has freed them.
    #[serde(rename = "DeviceIDs", default, deserialize_with = "of_all_nodes")]
    pub(crate) device_ids: Vec<String>,
    /// The plugin's answer to Allocate as kubelet received it; empty if there is none.
    #[serde(default, deserialize_with = "bytes")]
    pub(crate) alloc_resp: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointError {
    #[error("cannot read kubelet's checkpoint")]
    Read(#[source] io::Error),
    #[error("kubelet's checkpoint is longer than {MAX_BYTES} bytes")]
    TooLong,
    #[error("not a checkpoint of allocated devices")]
    Form(#[source] serde_json::Error),
}

/// An entry of the checkpoint for one of this plugin's resources, with the answer parsed.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocated {
    pub(crate) pod: PodUid,
    pub(crate) container: String,
    pub(crate) resource: ExtendedResource,
    pub(crate) ids: Vec<String>,
    /// This plugin's answer to Allocate, which kubelet keeps and applies to the container at each start.
    pub(crate) answer: ContainerAllocateResponse,
}

/// Reads this plugin's entries of the checkpoint, and keeps them until the file changes.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    names: ExtendedResourceNames,
    last_read: Mutex<Option<(FileVersion, Parsed)>>,
}

/// The entries of one version of the file; none if it is no checkpoint.
type Parsed = Option<Arc<Vec<Allocated>>>;

impl Checkpoint {
    /// The checkpoint in kubelet's device plugin directory.
    pub(crate) fn new(dir: &Path, names: ExtendedResourceNames) -> Self {
        Self {
            dir: dir.to_owned(),
            names,
            last_read: Mutex::new(None),
        }
    }

    /// The entries of this plugin's resources; none if the file is missing, or, with a log line, if it cannot be read or is no
    /// checkpoint. A version of the file that is no checkpoint is not read again.
    pub(crate) fn read(&self) -> Option<Arc<Vec<Allocated>>> {
        self.read_if_short(u64::MAX)
    }

    /// As [`Self::read`], but does not parse a file longer than `max_bytes`, since kubelet waits meanwhile: none then, unless
    /// this version of the file was parsed before.
    pub(crate) fn read_if_short(&self, max_bytes: u64) -> Option<Arc<Vec<Allocated>>> {
        let mut last_read = self.last_read.lock().unwrap_or_else(PoisonError::into_inner);
        let found = fs::metadata(self.dir.join(FILE)).ok()?;
        // kubelet writes another file and renames it, so two versions never have the same inode and times.
        let version = FileVersion::from(&found);
        match &*last_read {
            Some((known, allocated)) if *known == version => return allocated.clone(),
            _ if found.len() > max_bytes => return None,
            _ => {}
        }
        let parsed = self.parse();
        if let Err(error) = &parsed {
            warn!(dir = %self.dir.display(), error = one_line(error), "cannot read the devices that kubelet has allocated");
        }
        // An I/O error may be gone at the next try, though the version is the same.
        if matches!(parsed, Err(CheckpointError::Read(_))) {
            return None;
        }
        let allocated = parsed.ok().map(Arc::new);
        *last_read = Some((version, allocated.clone()));
        allocated
    }

    /// Reads the entries of this plugin's resources. An answer that does not parse is left out.
    fn parse(&self) -> Result<Vec<Allocated>, CheckpointError> {
        let mut allocated = Vec::new();
        for entry in read(&self.dir)? {
            let Some(resource) = self.names.find(&entry.resource_name) else {
                continue;
            };
            // kubelet has freed the devices, so the container owns none.
            if entry.device_ids.is_empty() {
                continue;
            }
            match ContainerAllocateResponse::decode(entry.alloc_resp.as_slice()) {
                Ok(answer) => allocated.push(Allocated {
                    pod: PodUid::from(entry.pod_uid.as_str()),
                    container: entry.container_name,
                    resource,
                    ids: entry.device_ids,
                    answer,
                }),
                Err(error) => {
                    warn!(pod = entry.pod_uid, %error, "skipping an answer in kubelet's checkpoint that does not parse");
                }
            }
        }
        Ok(allocated)
    }
}

/// The JSON form of the checkpoint. `E` is the form of an entry, so that the reader may skip entries that do not parse.
#[derive(Deserialize)]
#[serde(bound(deserialize = "E: Deserialize<'de>"))]
struct CheckpointFile<E> {
    #[serde(rename = "Data")]
    data: Data<E>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", bound(deserialize = "E: Deserialize<'de>"))]
struct Data<E> {
    #[serde(default = "Option::default")]
    pod_device_entries: Option<Vec<E>>,
    #[serde(default)]
    registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

/// Reads the entries of all plugins in kubelet's device plugin directory.
pub(crate) fn read(dir: &Path) -> Result<Vec<CheckpointEntry>, CheckpointError> {
    parse(&read_text(dir)?)
}

fn read_text(dir: &Path) -> Result<Vec<u8>, CheckpointError> {
    let mut text = Vec::new();
    let file = File::open(dir.join(FILE)).map_err(CheckpointError::Read)?;
    // One byte more, so that a longer file is an error rather than cut off.
    let mut limited = file.take(MAX_BYTES + 1);
    limited.read_to_end(&mut text).map_err(CheckpointError::Read)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(CheckpointError::TooLong);
    }
    Ok(text)
}

/// The IDs of the healthy devices that plugins had listed when kubelet wrote the checkpoint, by resource. A resource whose plugin
/// is gone has none.
pub(crate) fn registered(dir: &Path) -> Result<BTreeMap<String, Vec<String>>, CheckpointError> {
    let checkpoint: CheckpointFile<IgnoredAny> =
        serde_json::from_slice(&read_text(dir)?).map_err(CheckpointError::Form)?;
    let mut registered = BTreeMap::new();
    for (resource, ids) in checkpoint.data.registered_devices.unwrap_or_default() {
        registered.insert(resource, ids.unwrap_or_default());
    }
    Ok(registered)
}

/// Parses all entries of the checkpoint at once, which is faster, and one by one only if that fails.
fn parse(text: &[u8]) -> Result<Vec<CheckpointEntry>, CheckpointError> {
    if let Ok(checkpoint) = serde_json::from_slice::<CheckpointFile<CheckpointEntry>>(text) {
        return Ok(checkpoint.data.pod_device_entries.unwrap_or_default());
    }
    let checkpoint: CheckpointFile<Value> = serde_json::from_slice(text).map_err(CheckpointError::Form)?;
    let mut entries = Vec::new();
    for entry in checkpoint.data.pod_device_entries.unwrap_or_default() {
        match serde_json::from_value::<CheckpointEntry>(entry) {
            Ok(entry) => entries.push(entry),
            Err(error) => warn!(%error, "skipping an entry of kubelet's checkpoint that does not parse"),
        }
    }
    Ok(entries)
}

/// Device IDs, which kubelet lists by NUMA node, with `null` in place of an empty list or map.
fn of_all_nodes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let by_node = Option::<BTreeMap<String, Option<Vec<String>>>>::deserialize(deserializer)?;
    let lists = by_node.unwrap_or_default().into_values().flatten();
    let mut ids: Vec<String> = lists.flatten().collect();
    // Sorted as the IDs of kubelet's calls are, with which they are compared.
    ids.sort();
    Ok(ids)
}

/// Bytes in base64, or `null`.
fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    Ok(Option::<ByteString>::deserialize(deserializer)?
        .unwrap_or_default()
        .0)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    fn text(entries: &Value, registered: &Value) -> String {
        json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered}, "Checksum": 1})
            .to_string()
    }

    /// Writes a checkpoint as kubelet does.
    pub(crate) fn write(dir: &Path, entries: &Value, registered: &Value) {
        fs::write(dir.join(FILE), text(entries, registered)).unwrap();
    }

    fn ids(value: &Value) -> Option<Vec<String>> {
        let text = text(&json!([entry("u", "r", value)]), &json!({"r": ["a"]}));
        parse(text.as_bytes())
            .unwrap()
            .pop()
            .map(|entry| entry.device_ids)
    }

    #[rstest]
    #[case::by_node(json!({"-1": ["b"], "0": ["a", "c"]}), Some(vec!["a", "b", "c"]))]
    #[case::node_without_devices(json!({"0": []}), Some(vec![]))]
    #[case::node_of_go(json!({"0": null}), Some(vec![]))]
    #[case::nothing(json!(null), Some(vec![]))]
    #[case::number(json!(7), None)]
    #[case::numbers(json!({"0": [7]}), None)]
    fn device_ids_of_all_nodes(#[case] value: Value, #[case] expected: Option<Vec<&str>>) {
        assert_eq!(
            ids(&value),
            expected.map(|ids| ids.into_iter().map(str::to_owned).collect())
        );
    }

    #[test]
    fn a_malformed_entry_does_not_hide_another() {
        let good =
            json!({"PodUID": "u", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": {"0": ["a"]}});
        let text = json!({"Data": {"PodDeviceEntries": [{"PodUID": 7}, good, "x"]}}).to_string();
        assert_eq!(parse(text.as_bytes()).unwrap().len(), 1);
    }

    #[rstest]
    #[case::empty("")]
    #[case::cut_short(r#"{"Data":{"PodDeviceEntries":[{"PodUID":"#)]
    #[case::another_form(r#"{"Data":{"PodDeviceEntries":{}}}"#)]
    fn a_file_that_is_no_checkpoint_is_an_error(#[case] text: &str) {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(read(dir.path()), Err(CheckpointError::Read(_))));
        fs::write(dir.path().join(FILE), text).unwrap();
        assert!(matches!(read(dir.path()), Err(CheckpointError::Form(_))));
        assert_eq!(reread(dir.path()), None);
    }

    #[rstest]
    #[case::registered(json!({"r": ["a", "b"], "s": ["c"]}), &["a", "b"])]
    #[case::plugin_gone(json!({"r": []}), &[])]
    #[case::plugin_gone_in_the_form_of_go(json!({"r": null}), &[])]
    #[case::never_registered(json!({}), &[])]
    #[case::nothing(json!(null), &[])]
    fn the_devices_that_a_plugin_registered_are_read(#[case] devices: Value, #[case] expected: &[&str]) {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &json!([{"PodUID": 7}]), &devices);
        assert_eq!(
            registered(dir.path()).unwrap().remove("r").unwrap_or_default(),
            expected
        );
    }

    fn reread(dir: &Path) -> Option<Vec<Allocated>> {
        Checkpoint::new(dir, ExtendedResourceNames::default())
            .read()
            .map(|read| read.to_vec())
    }

    fn entry(pod: &str, resource: &str, ids: &Value) -> Value {
        json!({"PodUID": pod, "ContainerName": "c", "ResourceName": resource, "DeviceIDs": ids, "AllocResp": "CgA="})
    }

    #[test]
    fn entries_of_this_plugin_are_read() {
        let entries = json!([
            entry("u1", "aliyun.com/gpu-mem", &json!({"-1": ["a-0"], "0": []})),
            entry("u2", "koordinator.sh/gpu.shared", &json!({"1": ["GPU-a::0"]})),
            entry("u3", "nvidia.com/gpu", &json!({"0": ["x"]})),
            entry("u4", "aliyun.com/gpu-mem", &json!({"0": []})),
            {"PodUID": 7},
        ]);
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &entries, &json!({}));
        let found = reread(dir.path()).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|found| (found.pod.as_str(), found.container.as_str(), found.resource))
            .collect();
        assert_eq!(
            found,
            [
                ("u1", "c", ExtendedResource::Memory),
                ("u2", "c", ExtendedResource::Shared)
            ]
        );
    }

    /// A directory stands for a file that cannot be read for the moment.
    #[test]
    fn a_read_that_fails_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(FILE)).unwrap();
        let checkpoint = Checkpoint::new(dir.path(), ExtendedResourceNames::default());
        assert_eq!(checkpoint.read(), None);
        assert!(checkpoint.last_read.lock().unwrap().is_none());
    }

    /// An empty checkpoint says that nothing is allocated; a missing one says nothing.
    #[test]
    fn an_empty_checkpoint_differs_from_a_missing_one() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(reread(dir.path()), None);
        write(dir.path(), &Value::Null, &json!({}));
        assert_eq!(reread(dir.path()), Some(Vec::new()));
    }

    /// A checkpoint of this plugin and of another one.
    fn checkpoint() -> Value {
        let entries = json!([
            entry("u1", "aliyun.com/gpu-mem", &json!({"-1": ["a-0"], "0": []})),
            entry("u2", "koordinator.sh/gpu.shared", &json!({"1": ["GPU-a::0"]})),
            entry("u3", "nvidia.com/gpu", &json!({"0": ["x"]})),
        ]);
        let registered = json!({"aliyun.com/gpu-mem": ["a-0"], "nvidia.com/gpu": null});
        serde_json::from_str(&text(&entries, &registered)).unwrap()
    }

    proptest! {
        #![proptest_config(fuzz::config(500))]

        #[test]
        fn no_text_makes_the_reader_panic(text in r#"(\{|\}|\[|\]|"Data":|"PodDeviceEntries":|"DeviceIDs":|"PodUID":|"a"|,|:|1|null){0,20}"#) {
            let _ = parse(text.as_bytes());
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in fuzz::damaged(vec![checkpoint().to_string().into_bytes()])) {
            let _ = parse(&bytes);
        }

        #[test]
        fn no_json_makes_the_reader_panic(value in fuzz::damaged_json(vec![checkpoint()])) {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(FILE), value.to_string()).unwrap();
            let _ = (reread(dir.path()), registered(dir.path()));
        }
    }
}
