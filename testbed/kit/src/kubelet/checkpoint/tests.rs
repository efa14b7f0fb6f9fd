//! Tests of the checkpoint file.

use std::collections::BTreeMap;

use proto::kubelet::deviceplugin::{ContainerAllocateResponse, Device};
use tempfile::TempDir;

use super::{read, render};
use crate::kubelet::devices::{DeviceHolder, HeldDevices};
use crate::kubelet::devices::{DeviceManagerState, ResourceRequest};

/// The content for a container that holds one of two devices.
fn content() -> String {
    let mut devices = DeviceManagerState::default();
    let list = ["a", "b"].map(|id| Device {
        id: id.to_owned(),
        health: "Healthy".to_owned(),
        topology: None,
    });
    devices.update("x.io/y", list.to_vec());
    let holder = DeviceHolder {
        pod: "uid".to_owned(),
        container: "main".to_owned(),
    };
    let request = ResourceRequest {
        holder: &holder,
        resource: "x.io/y",
        required: 1,
        skips_allocation: false,
    };
    let envs = [("NAME".to_owned(), "value".to_owned())].into_iter().collect();
    devices.grant(
        &request,
        &["a".into()].into(),
        ContainerAllocateResponse {
            envs,
            ..Default::default()
        },
    );
    render(&devices.held().rendered(), &devices.registered_json())
}

#[test]
fn a_written_checkpoint_is_read_back() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("checkpoint");
    assert!(read(&path).unwrap().registered_devices.is_empty());
    let content = content();
    insta::assert_snapshot!(content, @r#"{"Data":{"PodDeviceEntries":[{"PodUID":"uid","ContainerName":"main","ResourceName":"x.io/y","DeviceIDs":{"-1":["a"]},"AllocResp":"Cg0KBE5BTUUSBXZhbHVl"}],"RegisteredDevices":{"x.io/y":["a","b"]}},"Checksum":0}"#);
    std::fs::write(&path, &content).unwrap();
    let data = read(&path).unwrap();
    assert_eq!(
        data.registered_devices,
        BTreeMap::from([("x.io/y".to_owned(), vec!["a".to_owned(), "b".to_owned()])])
    );
    let held = HeldDevices::restore(data.pod_device_entries);
    let holder = DeviceHolder {
        pod: "uid".to_owned(),
        container: "main".to_owned(),
    };
    let grant = held.grant(&holder, "x.io/y").unwrap();
    assert_eq!(grant.response.envs["NAME"], "value");
}

#[test]
fn a_malformed_file_is_refused() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("checkpoint");
    std::fs::write(&path, "{}").unwrap();
    assert!(read(&path).is_err());
    assert!(read(dir.path()).is_err());
}
