//! Watches of this node's own objects: its Node, whose amounts a kubelet without a checkpoint sets to zero, and its Device
//! object, which others may delete or change.

use std::fmt;
use std::time::Duration;

use daemon::api_server::Connection;
use daemon::watch::{ObjectWatch, Update};
use kube::runtime::watcher;
use kube::{Api, Resource};
use proto::device::RawDevice;
use proto::node::Node;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tracing::warn;

/// Longest pause after a failure; nothing else waits for these watches.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The Device object in the API server.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum StoredDevice {
    /// The API server has not answered yet.
    #[default]
    Unknown,
    /// The API server has no Device object for this node.
    Absent,
    /// The Device object as the API server has it.
    Present(Box<RawDevice>),
}

impl StoredDevice {
    pub(crate) fn object(&self) -> Option<&RawDevice> {
        match self {
            Self::Present(object) => Some(object),
            Self::Unknown | Self::Absent => None,
        }
    }
}

/// Sends each state of this node's Node to `node`, until the task is dropped.
pub(crate) async fn watch_node(connection: Connection, node_name: String, node: watch::Sender<Option<Node>>) {
    let show = |found: Option<Node>| {
        if found.is_none() {
            warn!(
                node = node_name,
                "there is no such node; nothing is published until it is there"
            );
        }
        send_if_changed(&node, found);
    };
    watch_object("this node", connection, &node_name, show).await;
}

/// Sends each state of this node's Device object to `device`, until the task is dropped.
pub(crate) async fn watch_device(
    connection: Connection,
    node_name: String,
    device: watch::Sender<StoredDevice>,
) {
    let show = |found: Option<RawDevice>| {
        let present = found.map(Box::new).map(StoredDevice::Present);
        send_if_changed(&device, present.unwrap_or(StoredDevice::Absent));
    };
    watch_object("this node's Device object", connection, &node_name, show).await;
}

/// Watches the object of this name; `show` gets each state of it, `None` when there is none. `description` is for log lines.
async fn watch_object<K>(
    description: &'static str,
    connection: Connection,
    name: &str,
    mut show: impl FnMut(Option<K>),
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
{
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let Connection { client, contact } = connection;
    let objects = (Api::<K>::all(client), &contact);
    let mut watch = ObjectWatch::new(description, objects, config, LONGEST_PAUSE);
    let mut listed = None;
    loop {
        // While the API server is away the last state stands.
        let Update::Event(event) = watch.next().await else {
            continue;
        };
        match event {
            // The watch lists again after it was lost; until the list ends the last state stands.
            watcher::Event::Init => listed = None,
            watcher::Event::InitApply(found) => listed = Some(without_versions(found)),
            // A list without the object means that it is gone.
            watcher::Event::InitDone => show(listed.take()),
            watcher::Event::Apply(found) => show(Some(without_versions(found))),
            watcher::Event::Delete(_) => show(None),
        }
    }
}

/// The object without the fields that change with every write of any program, and would wake the publisher each time.
fn without_versions<K: Resource>(mut found: K) -> K {
    found.meta_mut().managed_fields = None;
    found.meta_mut().resource_version = None;
    found
}

/// Passes on a value, and returns true, if it differs from the last one, so that receivers wake only for a change.
pub(crate) fn send_if_changed<T: PartialEq>(sender: &watch::Sender<T>, now: T) -> bool {
    sender.send_if_modified(|stored| {
        let is_changed = *stored != now;
        *stored = now;
        is_changed
    })
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
        let mut revisions = BTreeSet::new();
        for (generation, devices) in [
            (1, json!([{"type": "gpu"}])),
            (2, json!([])),
            (3, json!([{"type": "gpu"}])),
        ] {
            let metadata = json!({"name": "n", "uid": "u", "generation": generation, "resourceVersion": generation.to_string()});
            let found: RawDevice =
                serde_json::from_value(json!({"metadata": metadata, "spec": {"devices": devices}})).unwrap();
            send_if_changed(&device, StoredDevice::Present(Box::new(without_versions(found))));
            let stored = stored.borrow();
            let patch = node_patches::revision(&Node::default(), stored.object().unwrap()).unwrap();
            revisions.insert(patch["metadata"]["annotations"][DEVICES_REVISION].to_string());
        }
        assert_eq!(revisions.len(), 3);
    }

    #[test]
    fn a_write_that_changes_no_device_notifies_no_reader() {
        let (device, mut stored) = watch::channel(StoredDevice::Unknown);
        for version in ["1", "2"] {
            let metadata = json!({"name": "n", "uid": "u", "generation": 1, "resourceVersion": version});
            let found: RawDevice = serde_json::from_value(json!({"metadata": metadata})).unwrap();
            send_if_changed(&device, StoredDevice::Present(Box::new(without_versions(found))));
            assert_eq!(stored.has_changed().unwrap(), version == "1");
            stored.mark_unchanged();
        }
    }
}
