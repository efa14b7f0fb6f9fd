//! What kubelet has written down of the devices that it allocated, read when this process starts or registers anew, and until the pods of before are answered for.
//!
//! Only who was answered for which container: the devices themselves are in the pods' records. The file
//! is kubelet's own and its form is not promised, so what cannot be read is left out.

use std::fs;
use std::path::Path;

use anyhow::Context;
use proto::resource::ResourceNames;
use serde::Deserialize;
use serde_json::Value;
use tracing::warn;

use crate::pods::{NodePod, PodUid};
use crate::served::Served;

use super::Step;

/// Name of the file in the device plugin directory.
pub const FILE: &str = "kubelet_internal_checkpoint";

/// A call that was answered before this process began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// The pod.
    pub pod: PodUid,
    /// Name of the container.
    pub container: String,
    /// The resource.
    pub resource: Served,
}

impl Allocated {
    /// The same in terms of the pod, if it has such a container that asks for the resource.
    pub(super) fn step(&self, pod: &NodePod) -> Option<Step> {
        let (idx, container) = pod.containers.iter().enumerate().find(|(_, container)| container.name == self.container)?;
        let count = self.resource.count(container);
        (count > 0).then_some(Step { container: idx, resource: self.resource, count })
    }
}

#[derive(Deserialize)]
struct File {
    #[serde(rename = "Data")]
    data: Data,
}

#[derive(Deserialize)]
struct Data {
    #[serde(rename = "PodDeviceEntries", default)]
    entries: Option<Vec<Value>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "PodUID")]
    pod: String,
    container_name: String,
    resource_name: String,
    #[serde(rename = "DeviceIDs", default)]
    device_ids: Value,
}

impl Entry {
    /// Lists by NUMA node, or one list in files of old kubelets.
    fn names_devices(&self) -> bool {
        let is_list = |ids: &Value| ids.as_array().is_some_and(|ids| !ids.is_empty());
        is_list(&self.device_ids) || self.device_ids.as_object().is_some_and(|by_node| by_node.values().any(is_list))
    }
}

/// Reads the checkpoint in `dir`; none, with a warning, if there is none or it cannot be understood.
pub fn read(dir: &Path, names: &ResourceNames) -> Option<Vec<Allocated>> {
    let path = dir.join(FILE);
    let text = fs::read(&path).context("cannot read it");
    let allocated = text.and_then(|text| parse(&text, names));
    let complain =
        |error: &anyhow::Error| warn!(file = %path.display(), error = %format!("{error:#}"), "what kubelet allocated before is not known");
    allocated.inspect_err(complain).ok()
}

/// The entries of this plugin's resources; entries that cannot be understood are left out.
fn parse(text: &[u8], names: &ResourceNames) -> anyhow::Result<Vec<Allocated>> {
    let file: File = serde_json::from_slice(text).context("not a checkpoint of allocated devices")?;
    let entries = file.data.entries.unwrap_or_default().into_iter().filter_map(|entry| {
        let read = serde_json::from_value::<Entry>(entry);
        read.inspect_err(|error| warn!(%error, "an entry of kubelet's checkpoint is left out")).ok()
    });
    let allocated = entries.filter(Entry::names_devices).filter_map(|entry| {
        let resource = Served::ALL.into_iter().find(|resource| resource.name(names) == entry.resource_name)?;
        Some(Allocated { pod: PodUid::from(entry.pod.as_str()), container: entry.container_name, resource })
    });
    Ok(allocated.collect())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    fn entry(pod: &str, resource: &str, ids: &Value) -> Value {
        json!({"PodUID": pod, "ContainerName": "c", "ResourceName": resource, "DeviceIDs": ids, "AllocResp": "CgA="})
    }

    #[test]
    fn both_forms_are_read_and_what_is_not_ours_is_left_out() {
        let entries = json!([
            entry("u1", "aliyun.com/gpu-mem", &json!({"-1": ["a-0"], "0": []})),
            entry("u2", "koordinator.sh/gpu.shared", &json!(["GPU-a::0"])),
            entry("u3", "nvidia.com/gpu", &json!({"0": ["x"]})),
            entry("u4", "aliyun.com/gpu-mem", &json!({"0": []})),
            {"PodUID": 7},
        ]);
        let dir = tempfile::tempdir().unwrap();
        let text = json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}).to_string();
        fs::write(dir.path().join(FILE), text).unwrap();
        let found = read(dir.path(), &ResourceNames::default()).unwrap();
        let found: Vec<_> = found.iter().map(|found| (found.pod.as_str(), found.container.as_str(), found.resource)).collect();
        assert_eq!(found, [("u1", "c", Served::Memory), ("u2", "c", Served::Shared)]);
    }

    #[rstest]
    #[case::empty("")]
    #[case::cut_short(r#"{"Data":{"PodDeviceEntries":[{"PodUID":"#)]
    #[case::another_form(r#"{"Data":{"PodDeviceEntries":{}}}"#)]
    fn nothing_is_made_of_what_cannot_be_read(#[case] text: &str) {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path(), &ResourceNames::default()), None, "no file");
        fs::write(dir.path().join(FILE), text).unwrap();
        assert_eq!(read(dir.path(), &ResourceNames::default()), None);
    }

    /// That nothing was allocated is known, which is not the same as not knowing it.
    #[test]
    fn empty_checkpoint_is_read() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), r#"{"Data":{"PodDeviceEntries":null}}"#).unwrap();
        assert_eq!(read(dir.path(), &ResourceNames::default()), Some(Vec::new()));
    }
}
