//! What kubelet has written down of the devices that it allocated: to which pod, and what it was answered.
//!
//! Whose entries they are is told by UID.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use daemon::api_server::one_line;
use prost::Message;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use tracing::warn;

use crate::extended_resource::{ExtendedResource, ExtendedResourceNames};
use crate::file_version::FileVersion;
use crate::kubelet_checkpoint::{self, CheckpointError, FILE};
use crate::pods::{NodePod, PodUid};

use super::Step;

/// An answered call.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocated {
    /// The pod.
    pub pod: PodUid,
    /// Name of the container.
    pub container: String,
    /// The resource.
    pub resource: ExtendedResource,
    /// The device IDs, sorted.
    pub ids: Vec<String>,
    /// The answer that kubelet keeps, and gives the container at each start.
    pub answer: ContainerAllocateResponse,
}

impl Allocated {
    /// The same in terms of the pod, if it has such a container that asks for the resource.
    pub(super) fn step(&self, pod: &NodePod) -> Option<Step> {
        let (idx, container) = pod
            .containers
            .iter()
            .enumerate()
            .find(|(_, container)| container.name == self.container)?;
        let count = self.resource.count(container);
        (count > 0).then_some(Step {
            container: idx,
            resource: self.resource,
            count,
        })
    }
}

/// The file, read again only when it is another one.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    names: ExtendedResourceNames,
    read: Mutex<Option<(FileVersion, Written)>>,
}

/// What was read of one version, if it could be understood.
type Written = Option<Arc<Vec<Allocated>>>;

impl Checkpoint {
    /// The checkpoint in kubelet's device plugin directory.
    pub fn new(dir: &Path, names: ExtendedResourceNames) -> Self {
        Self {
            dir: dir.to_owned(),
            names,
            read: Mutex::new(None),
        }
    }

    /// What it says; none, with a warning, if there is none or it cannot be understood.
    pub fn read(&self) -> Option<Arc<Vec<Allocated>>> {
        self.read_up_to(u64::MAX)
    }

    /// The same unless it is longer than so many bytes and has not been read yet.
    pub fn read_up_to(&self, most: u64) -> Option<Arc<Vec<Allocated>>> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let found = fs::metadata(self.dir.join(FILE)).ok()?;
        let version = FileVersion::from(&found);
        match &*read {
            Some((known, allocated)) if *known == version => allocated.clone(),
            _ if found.len() > most => None,
            _ => {
                let allocated = read_file(&self.dir, &self.names).map(Arc::new);
                *read = Some((version, allocated.clone()));
                allocated
            }
        }
    }
}

fn read_file(dir: &Path, names: &ExtendedResourceNames) -> Option<Vec<Allocated>> {
    let complain = |error: &CheckpointError| warn!(dir = %dir.display(), error = one_line(error), "what kubelet allocated before is not known");
    let entries = kubelet_checkpoint::read(dir).inspect_err(complain).ok()?;
    let allocated = entries.into_iter().filter(|entry| !entry.device_ids.is_empty()).filter_map(|entry| {
        let resource = names.find(&entry.resource_name)?;
        let answer = ContainerAllocateResponse::decode(entry.alloc_resp.as_slice());
        let answer =
            answer.inspect_err(|error| warn!(pod = entry.pod_uid, %error, "an answer in kubelet's checkpoint cannot be read")).ok()?;
        let pod = PodUid::from(entry.pod_uid.as_str());
        Some(Allocated { pod, container: entry.container_name, resource, ids: entry.device_ids, answer })
    });
    Some(allocated.collect())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn reread(dir: &Path) -> Option<Vec<Allocated>> {
        Checkpoint::new(dir, ExtendedResourceNames::default())
            .read()
            .map(|read| read.to_vec())
    }

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
        let text = json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1})
            .to_string();
        fs::write(dir.path().join(FILE), text).unwrap();
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

    #[rstest]
    #[case::empty("")]
    #[case::cut_short(r#"{"Data":{"PodDeviceEntries":[{"PodUID":"#)]
    #[case::another_form(r#"{"Data":{"PodDeviceEntries":{}}}"#)]
    fn nothing_is_made_of_what_cannot_be_read(#[case] text: &str) {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(reread(dir.path()), None, "no file");
        fs::write(dir.path().join(FILE), text).unwrap();
        assert_eq!(reread(dir.path()), None);
    }

    /// That nothing was allocated is known, which is not the same as not knowing it.
    #[test]
    fn empty_checkpoint_is_read() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), r#"{"Data":{"PodDeviceEntries":null}}"#).unwrap();
        assert_eq!(reread(dir.path()), Some(Vec::new()));
    }
}
