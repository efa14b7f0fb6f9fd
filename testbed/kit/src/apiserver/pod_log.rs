//! The output of containers, which the log subresource serves.
//!
//! A pod's log belongs to its uid: a later pod of the same name starts with an empty one.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::store::Key;

/// The logs of all containers, by pod.
#[derive(Debug, Default)]
pub(crate) struct PodLogs(Mutex<HashMap<Key, PodLog>>);

#[derive(Debug, Default)]
struct PodLog {
    uid: String,
    by_container: HashMap<String, String>,
}

impl PodLogs {
    /// Appends text to the log of a container; the logs of an earlier pod of the same name are dropped.
    pub(crate) fn append(&self, key: Key, uid: String, container: &str, text: &str) {
        let mut logs = self.0.lock();
        let log = logs.entry(key).or_default();
        if log.uid != uid {
            *log = PodLog {
                uid,
                by_container: HashMap::new(),
            };
        }
        log.by_container
            .entry(container.to_owned())
            .or_default()
            .push_str(text);
    }

    /// The log of a container of the pod with this UID; empty if the container has printed nothing.
    pub(crate) fn read(&self, key: &Key, uid: &str, container: &str) -> String {
        let logs = self.0.lock();
        let log = logs.get(key).filter(|log| log.uid == uid);
        log.and_then(|log| log.by_container.get(container))
            .cloned()
            .unwrap_or_default()
    }
}
