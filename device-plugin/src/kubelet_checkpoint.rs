//! kubelet's own file of the devices that it has allocated, `kubelet_internal_checkpoint`.
//!
//! The file is kubelet's, and its form is not promised: device IDs are one list in files of old kubelets and lists by NUMA node
//! since. Entries that cannot be understood are left out. Whose entries they are is the reader's business.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use k8s_openapi::ByteString;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tracing::warn;

/// Name of the file in the device plugin directory.
pub const FILE: &str = "kubelet_internal_checkpoint";

/// Longest file that is read: kubelet writes the ID of every device of every plugin.
const MAX_BYTES: u64 = 64 << 20;

/// One resource of one container.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Entry {
    /// UID of the pod.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// Name of the container.
    pub container_name: String,
    /// The resource.
    pub resource_name: String,
    /// The devices, sorted; none if kubelet took them back.
    #[serde(rename = "DeviceIDs", default, deserialize_with = "in_either_form")]
    pub device_ids: Vec<String>,
    /// The plugin's answer, which kubelet keeps; empty if there is none.
    #[serde(default, deserialize_with = "bytes")]
    pub alloc_resp: Vec<u8>,
}

/// The file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// It is not there, or may not be read.
    #[error("cannot read kubelet's checkpoint")]
    Read(#[source] io::Error),
    /// It is longer than any kubelet writes it.
    #[error("kubelet's checkpoint is longer than {MAX_BYTES} bytes")]
    TooLong,
    /// It is not of the form that is known.
    #[error("not a checkpoint of allocated devices")]
    Form(#[source] serde_json::Error),
}

#[derive(Deserialize)]
#[serde(bound(deserialize = "E: Deserialize<'de>"))]
struct Checkpoint<E> {
    #[serde(rename = "Data")]
    data: Data<E>,
}

#[derive(Deserialize)]
#[serde(bound(deserialize = "E: Deserialize<'de>"))]
struct Data<E> {
    #[serde(rename = "PodDeviceEntries", default = "Option::default")]
    entries: Option<Vec<E>>,
}

#[derive(Deserialize)]
struct RegisteredCheckpoint {
    #[serde(rename = "Data")]
    data: RegisteredData,
}

#[derive(Deserialize)]
struct RegisteredData {
    #[serde(rename = "RegisteredDevices", default)]
    devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

/// Reads the checkpoint in kubelet's device plugin directory.
///
/// # Errors
/// There is none, or it cannot be understood.
pub fn read(dir: &Path) -> Result<Vec<Entry>, CheckpointError> {
    parse(&text(dir)?)
}

fn text(dir: &Path) -> Result<Vec<u8>, CheckpointError> {
    let mut text = Vec::new();
    let file = File::open(dir.join(FILE)).map_err(CheckpointError::Read)?;
    let n_bytes = file
        .take(MAX_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(CheckpointError::Read)?;
    if u64::try_from(n_bytes).is_ok_and(|n_bytes| n_bytes > MAX_BYTES) {
        return Err(CheckpointError::TooLong);
    }
    Ok(text)
}

/// The healthy devices that kubelet had from plugins when it wrote the checkpoint, by resource; a resource stays without devices
/// when its plugin is gone.
///
/// # Errors
/// There is no checkpoint, or it cannot be understood.
pub fn registered(dir: &Path) -> Result<BTreeMap<String, Vec<String>>, CheckpointError> {
    let checkpoint: RegisteredCheckpoint =
        serde_json::from_slice(&text(dir)?).map_err(CheckpointError::Form)?;
    let devices = checkpoint.data.devices.unwrap_or_default().into_iter();
    Ok(devices
        .map(|(resource, ids)| (resource, ids.unwrap_or_default()))
        .collect())
}

/// kubelet writes the file anew for each container, so it is read in one go; only where that fails, entry by entry.
fn parse(text: &[u8]) -> Result<Vec<Entry>, CheckpointError> {
    if let Ok(checkpoint) = serde_json::from_slice::<Checkpoint<Entry>>(text) {
        return Ok(checkpoint.data.entries.unwrap_or_default());
    }
    let checkpoint: Checkpoint<Value> = serde_json::from_slice(text).map_err(CheckpointError::Form)?;
    let understood = |entry| {
        let read = serde_json::from_value::<Entry>(entry);
        read.inspect_err(|error| warn!(%error, "an entry of kubelet's checkpoint is left out"))
            .ok()
    };
    Ok(checkpoint
        .data
        .entries
        .unwrap_or_default()
        .into_iter()
        .filter_map(understood)
        .collect())
}

fn in_either_form<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let mut ids = deserializer.deserialize_any(EitherForm)?;
    ids.sort();
    Ok(ids)
}

/// A list, or lists by NUMA node.
struct EitherForm;

impl<'de> Visitor<'de> for EitherForm {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of device IDs, or such lists by NUMA node")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = list.next_element()? {
            ids.push(id);
        }
        Ok(ids)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut by_node: A) -> Result<Self::Value, A::Error> {
        let mut ids = Vec::new();
        while let Some((IgnoredAny, of_node)) = by_node.next_entry::<_, Option<Vec<String>>>()? {
            ids.extend(of_node.unwrap_or_default());
        }
        Ok(ids)
    }
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    Ok(Option::<ByteString>::deserialize(deserializer)?
        .map(|bytes| bytes.0)
        .unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    fn ids(value: &Value) -> Option<Vec<String>> {
        let entry = json!({"PodUID": "u", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": value, "AllocResp": "CgA="});
        let text =
            json!({"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {"r": ["a"]}}, "Checksum": 1})
                .to_string();
        parse(text.as_bytes())
            .unwrap()
            .pop()
            .map(|entry| entry.device_ids)
    }

    #[rstest]
    #[case::by_node(json!({"-1": ["b"], "0": ["a", "c"]}), Some(vec!["a", "b", "c"]))]
    #[case::list(json!(["b", "a"]), Some(vec!["a", "b"]))]
    #[case::node_without_devices(json!({"0": []}), Some(vec![]))]
    #[case::node_of_go(json!({"0": null}), Some(vec![]))]
    #[case::nothing(json!(null), Some(vec![]))]
    #[case::number(json!(7), None)]
    #[case::numbers(json!([7]), None)]
    fn device_ids_of_both_forms(#[case] value: Value, #[case] expected: Option<Vec<&str>>) {
        assert_eq!(
            ids(&value),
            expected.map(|ids| ids.into_iter().map(str::to_owned).collect())
        );
    }

    #[test]
    fn one_entry_does_not_hide_another() {
        let good = json!({"PodUID": "u", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": ["a"]});
        let text = json!({"Data": {"PodDeviceEntries": [{"PodUID": 7}, good, "x"]}}).to_string();
        assert_eq!(parse(text.as_bytes()).unwrap().len(), 1);
    }

    #[rstest]
    #[case::empty("")]
    #[case::cut_short(r#"{"Data":{"PodDeviceEntries":[{"PodUID":"#)]
    #[case::another_form(r#"{"Data":{"PodDeviceEntries":{}}}"#)]
    fn what_is_no_checkpoint_is_an_error(#[case] text: &str) {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(read(dir.path()), Err(CheckpointError::Read(_))));
        fs::write(dir.path().join(FILE), text).unwrap();
        assert!(matches!(read(dir.path()), Err(CheckpointError::Form(_))));
    }

    #[rstest]
    #[case::registered(json!({"r": ["a", "b"], "s": ["c"]}), &["a", "b"])]
    #[case::plugin_gone(json!({"r": []}), &[])]
    #[case::plugin_gone_in_the_form_of_go(json!({"r": null}), &[])]
    #[case::never_registered(json!({}), &[])]
    #[case::nothing(json!(null), &[])]
    fn devices_that_a_plugin_registered(#[case] devices: Value, #[case] expected: &[&str]) {
        let dir = tempfile::tempdir().unwrap();
        let text = json!({"Data": {"PodDeviceEntries": [{"PodUID": 7}], "RegisteredDevices": devices}, "Checksum": 1}).to_string();
        fs::write(dir.path().join(FILE), text).unwrap();
        assert_eq!(
            registered(dir.path()).unwrap().remove("r").unwrap_or_default(),
            expected
        );
    }

    #[test]
    fn no_allocations_are_no_entries() {
        assert_eq!(parse(br#"{"Data":{"PodDeviceEntries":null}}"#).unwrap(), []);
    }

    proptest! {
        #[test]
        fn never_panics(text in r#"(\{|\}|\[|\]|"Data":|"PodDeviceEntries":|"DeviceIDs":|"PodUID":|"a"|,|:|1|null){0,20}"#) {
            let _ = parse(text.as_bytes());
        }

        /// Both forms say the same.
        #[test]
        fn forms_agree(by_node in prop::collection::btree_map("[0-9]", prop::collection::vec("[a-z]{1,3}", 0..3), 0..4)) {
            let flat: Vec<&String> = by_node.values().flatten().collect();
            prop_assert_eq!(ids(&json!(flat)), ids(&json!(by_node)));
        }
    }
}
