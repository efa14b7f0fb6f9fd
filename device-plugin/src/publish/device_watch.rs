//! Follows this node's own Device object: somebody may delete it or write into it.

use std::time::Duration;

use daemon::api_server::Connection;
use daemon::watch::{ObjectWatch, Update};
use kube::Api;
use kube::runtime::watcher;
use proto::device::RawDevice;
use tokio::sync::watch;

/// Nobody waits for this watch.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The Device object as the API server holds it.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Held {
    /// The API server has not said yet.
    #[default]
    Unknown,
    /// There is none.
    Nothing,
    /// This one.
    Object(Box<RawDevice>),
}

/// Watches until the task is dropped.
pub async fn watch_device(connection: Connection, node_name: String, held: watch::Sender<Held>) {
    let config = watcher::Config::default().fields(&format!("metadata.name={node_name}"));
    let mut listed = Held::Nothing;
    let Connection { client, contact } = connection;
    let mut watch = ObjectWatch::new(
        "this node's Device object",
        (Api::<RawDevice>::all(client), &contact),
        config,
        LONGEST_PAUSE,
    );
    loop {
        if let Update::Event(event) = watch.next().await {
            take_in(event, &mut listed, &held);
        }
    }
}

fn take_in(event: watcher::Event<RawDevice>, listed: &mut Held, held: &watch::Sender<Held>) {
    let object = |found: RawDevice| Held::Object(Box::new(without_bookkeeping(found)));
    let now = match event {
        watcher::Event::Init => {
            *listed = Held::Nothing;
            return;
        }
        watcher::Event::InitApply(found) => {
            *listed = object(found);
            return;
        }
        watcher::Event::InitDone => std::mem::replace(listed, Held::Nothing),
        watcher::Event::Apply(found) => object(found),
        watcher::Event::Delete(_) => Held::Nothing,
    };
    held.send_if_modified(|held| {
        let is_news = *held != now;
        *held = now;
        is_news
    });
}

/// Without what changes with every write; the generation changes with the devices only.
fn without_bookkeeping(mut found: RawDevice) -> RawDevice {
    found.metadata.managed_fields = None;
    found.metadata.resource_version = None;
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proto::device::DEVICES_REVISION;
    use proto::node::Node;
    use serde_json::json;

    use super::*;
    use crate::publish::wake;

    /// kube-scheduler must hear of a change that was undone as well: pods were refused meanwhile.
    #[test]
    fn every_change_of_the_devices_is_another_revision() {
        let (held, seen) = watch::channel(Held::Unknown);
        let mut listed = Held::Nothing;
        let mut revisions = BTreeSet::new();
        for (generation, devices) in [
            (1, json!([{"type": "gpu"}])),
            (2, json!([])),
            (3, json!([{"type": "gpu"}])),
        ] {
            let metadata = json!({"name": "n", "uid": "u", "generation": generation, "resourceVersion": generation.to_string()});
            let device: RawDevice =
                serde_json::from_value(json!({"metadata": metadata, "spec": {"devices": devices}})).unwrap();
            take_in(watcher::Event::Apply(device), &mut listed, &held);
            let Held::Object(object) = seen.borrow().clone() else {
                panic!("it is not held")
            };
            let patch = wake::patch(&Node::default(), &object).unwrap();
            revisions.insert(patch["metadata"]["annotations"][DEVICES_REVISION].to_string());
        }
        assert_eq!(revisions.len(), 3);
    }

    #[test]
    fn a_write_that_changes_no_device_is_no_news() {
        let (held, mut seen) = watch::channel(Held::Unknown);
        let mut listed = Held::Nothing;
        for version in ["1", "2"] {
            let metadata = json!({"name": "n", "uid": "u", "generation": 1, "resourceVersion": version});
            let device = serde_json::from_value(json!({"metadata": metadata})).unwrap();
            take_in(watcher::Event::Apply(device), &mut listed, &held);
            assert_eq!(seen.has_changed().unwrap(), version == "1");
            seen.mark_unchanged();
        }
    }
}
