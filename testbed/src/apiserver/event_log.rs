//! The window of past changes of one collection, which watches and consistent paging read.
//!
//! It keeps a bounded number of changes; a request for older ones is answered "compacted".

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use serde_json::Value;

use super::object;
use super::store::{Key, Version};

/// The kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It came into being.
    Added,
    /// It was replaced by a newer version.
    Modified,
    /// It was removed.
    Deleted,
}

/// One change of one object.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) change: Change,
    pub(crate) key: Key,
    /// The version after the change; for a deletion the last state under the deletion's revision.
    pub(crate) version: Arc<Version>,
    /// The version before the change.
    pub(crate) previous: Option<Arc<Version>>,
    departed: OnceLock<Option<Arc<Version>>>,
}

impl Event {
    pub(crate) fn new(
        change: Change,
        key: Key,
        version: Arc<Version>,
        previous: Option<Arc<Version>>,
    ) -> Self {
        Self {
            change,
            key,
            version,
            previous,
            departed: OnceLock::new(),
        }
    }

    /// The previous version under this event's revision: what a watch sees whose selector the object left.
    /// Computed once for all watchers.
    pub(crate) fn departed(&self) -> Option<Arc<Version>> {
        let make = || {
            self.previous
                .as_ref()
                .map(|p| Arc::new(restamped(p, self.version.rv)))
        };
        self.departed.get_or_init(make).clone()
    }
}

fn restamped(version: &Version, rv: u64) -> Version {
    let mut value = Value::clone(&version.value);
    object::meta(&mut value).insert("resourceVersion".to_owned(), Value::from(rv.to_string()));
    let bytes = Bytes::from(value.to_string());
    Version {
        rv,
        value: Arc::new(value),
        bytes,
    }
}

/// The asked revision lies before the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Compacted {
    /// The oldest revision from which the log is complete.
    pub(crate) oldest: u64,
}

/// The changes of one collection, oldest first.
#[derive(Debug)]
pub(crate) struct EventLog {
    events: VecDeque<Arc<Event>>,
    window: usize,
    complete_after: u64,
}

impl EventLog {
    pub(crate) fn new(window: usize) -> Self {
        Self {
            events: VecDeque::new(),
            window: window.max(1),
            complete_after: 0,
        }
    }

    /// Appends a change, forgetting the oldest beyond the window.
    pub(crate) fn push(&mut self, event: Event) {
        self.events.push_back(Arc::new(event));
        while self.events.len() > self.window {
            self.forget_oldest();
        }
    }

    /// Forgets all changes up to and including a revision.
    pub(crate) fn compact(&mut self, up_to: u64) {
        while self.events.front().is_some_and(|e| e.version.rv <= up_to) {
            self.forget_oldest();
        }
        self.complete_after = self.complete_after.max(up_to);
    }

    fn forget_oldest(&mut self) {
        if let Some(event) = self.events.pop_front() {
            self.complete_after = self.complete_after.max(event.version.rv);
        }
    }

    /// The changes after a revision, oldest first.
    pub(crate) fn since(&self, rv: u64) -> Result<impl DoubleEndedIterator<Item = &Arc<Event>>, Compacted> {
        if rv < self.complete_after {
            return Err(Compacted {
                oldest: self.complete_after,
            });
        }
        let start = self.events.partition_point(|e| e.version.rv <= rv);
        Ok(self.events.range(start..))
    }
}
