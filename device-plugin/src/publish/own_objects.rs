//! Watches of this node's own objects: its Node, from which kubelet takes the plugin's resources out now and then, and its Device
//! object, which others may delete or change.

use std::time::Duration;

use daemon::api_server::Connection;
use daemon::watch::{ObjectWatch, Update};
use kube::Api;
use kube::runtime::watcher;
use proto::device::RawDevice;
use proto::node::Node;
use tokio::sync::watch;
use tracing::warn;

/// Longest pause after a failure; nothing else waits for these watches.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The Device object in the API server.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum StoredDevice {
    /// The API server has not answered yet.
    #[default]
    Unknown,
    /// There is none.
    Absent,
    /// This one.
    Present(Box<RawDevice>),
}

impl StoredDevice {
    /// The object, if there is one.
    pub fn object(&self) -> Option<&RawDevice> {
        match self {
            Self::Present(object) => Some(object),
            Self::Unknown | Self::Absent => None,
        }
    }
}

/// Watches this node's Node until the task is dropped.
pub async fn watch_node(connection: Connection, node_name: String, node: watch::Sender<Option<Node>>) {
    let config = watcher::Config::default().fields(&format!("metadata.name={node_name}"));
    let mut is_listed = false;
    let Connection { client, contact } = connection;
    let nodes = (Api::<Node>::all(client), &contact);
    let mut watch = ObjectWatch::new("this node", nodes, config, LONGEST_PAUSE);
    loop {
        if let Update::Event(event) = watch.next().await {
            apply_node(event, &node_name, &mut is_listed, &node);
        }
    }
}

fn apply_node(
    event: watcher::Event<Node>,
    node_name: &str,
    is_listed: &mut bool,
    node: &watch::Sender<Option<Node>>,
) {
    match event {
        watcher::Event::Init => *is_listed = false,
        watcher::Event::InitApply(found) => {
            *is_listed = true;
            send_node(found, node);
        }
        watcher::Event::Apply(found) => send_node(found, node),
        watcher::Event::InitDone if *is_listed => {}
        watcher::Event::InitDone | watcher::Event::Delete(_) => {
            warn!(
                node = node_name,
                "there is no such node; nothing is published until it is there"
            );
            node.send_replace(None);
        }
    }
}

/// Sends the node if a field that the plugin uses has changed: kubelet's heartbeats change none.
fn send_node(mut found: Node, node: &watch::Sender<Option<Node>>) {
    found.metadata.managed_fields = None;
    found.metadata.resource_version = None;
    node.send_if_modified(|stored| {
        let is_changed = stored.as_ref() != Some(&found);
        *stored = Some(found);
        is_changed
    });
}

/// Watches this node's Device object until the task is dropped.
pub async fn watch_device(connection: Connection, node_name: String, device: watch::Sender<StoredDevice>) {
    let config = watcher::Config::default().fields(&format!("metadata.name={node_name}"));
    let mut listed = StoredDevice::Absent;
    let Connection { client, contact } = connection;
    let devices = (Api::<RawDevice>::all(client), &contact);
    let mut watch = ObjectWatch::new("this node's Device object", devices, config, LONGEST_PAUSE);
    loop {
        if let Update::Event(event) = watch.next().await {
            apply_device(event, &mut listed, &device);
        }
    }
}

fn apply_device(
    event: watcher::Event<RawDevice>,
    listed: &mut StoredDevice,
    device: &watch::Sender<StoredDevice>,
) {
    let now = match event {
        watcher::Event::Init => {
            *listed = StoredDevice::Absent;
            return;
        }
        watcher::Event::InitApply(found) => {
            *listed = present(found);
            return;
        }
        // A list without the object means that it is gone.
        watcher::Event::InitDone => std::mem::replace(listed, StoredDevice::Absent),
        watcher::Event::Apply(found) => present(found),
        watcher::Event::Delete(_) => StoredDevice::Absent,
    };
    device.send_if_modified(|stored| {
        let is_changed = *stored != now;
        *stored = now;
        is_changed
    });
}

/// The object without the fields that change with every write. Its generation changes with the devices only.
fn present(mut found: RawDevice) -> StoredDevice {
    found.metadata.managed_fields = None;
    found.metadata.resource_version = None;
    StoredDevice::Present(Box::new(found))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proto::device::DEVICES_REVISION;
    use serde_json::json;

    use super::*;
    use crate::publish::node_patches;

    /// kube-scheduler must also see a change that was undone: pods were refused meanwhile.
    #[test]
    fn every_change_of_the_devices_is_another_revision() {
        let (device, stored) = watch::channel(StoredDevice::Unknown);
        let mut listed = StoredDevice::Absent;
        let mut revisions = BTreeSet::new();
        for (generation, devices) in [
            (1, json!([{"type": "gpu"}])),
            (2, json!([])),
            (3, json!([{"type": "gpu"}])),
        ] {
            let metadata = json!({"name": "n", "uid": "u", "generation": generation, "resourceVersion": generation.to_string()});
            let found: RawDevice =
                serde_json::from_value(json!({"metadata": metadata, "spec": {"devices": devices}})).unwrap();
            apply_device(watcher::Event::Apply(found), &mut listed, &device);
            let stored = stored.borrow();
            let patch = node_patches::revision(&Node::default(), stored.object().unwrap()).unwrap();
            revisions.insert(patch["metadata"]["annotations"][DEVICES_REVISION].to_string());
        }
        assert_eq!(revisions.len(), 3);
    }

    #[test]
    fn a_write_that_changes_no_device_wakes_no_reader() {
        let (device, mut stored) = watch::channel(StoredDevice::Unknown);
        let mut listed = StoredDevice::Absent;
        for version in ["1", "2"] {
            let metadata = json!({"name": "n", "uid": "u", "generation": 1, "resourceVersion": version});
            let found = serde_json::from_value(json!({"metadata": metadata})).unwrap();
            apply_device(watcher::Event::Apply(found), &mut listed, &device);
            assert_eq!(stored.has_changed().unwrap(), version == "1");
            stored.mark_unchanged();
        }
    }
}
