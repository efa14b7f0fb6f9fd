//! What kubelet has written down of the devices that it allocated, read when this process starts or registers anew, and until the pods of before are answered for.
//!
//! Only who was answered for which container: the devices themselves are in the pods' records.

use std::path::Path;

use proto::resource::ResourceNames;
use tracing::warn;

use crate::kubelet_checkpoint::{self, CheckpointError};
use crate::pods::{NodePod, PodUid};
use crate::served::Served;
use crate::watching::one_line;

use super::Step;

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

/// Reads the checkpoint in `dir`; none, with a warning, if there is none or it cannot be understood.
pub fn read(dir: &Path, names: &ResourceNames) -> Option<Vec<Allocated>> {
    let complain =
        |error: &CheckpointError| warn!(dir = %dir.display(), error = one_line(error), "what kubelet allocated before is not known");
    let entries = kubelet_checkpoint::read(dir).inspect_err(complain).ok()?;
    let allocated = entries.into_iter().filter(|entry| !entry.device_ids.is_empty()).filter_map(|entry| {
        let resource = Served::ALL.into_iter().find(|resource| resource.name(names) == entry.resource_name)?;
        Some(Allocated { pod: PodUid::from(entry.pod_uid.as_str()), container: entry.container_name, resource })
    });
    Some(allocated.collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::kubelet_checkpoint::FILE;

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
