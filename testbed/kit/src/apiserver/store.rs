//! The storage core: objects by collection, namespace and name under one monotonic revision, and the window of past changes
//! of each collection, which watches and consistent paging read.
//!
//! Pure and synchronous: no clock, no network, no rules about objects. Every stored version is serialised once
//! and its bytes are shared by all lists and watches. The window keeps a bounded number of changes; a request
//! for older ones is answered "compacted".

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::{Bound, ControlFlow};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::watch;

use super::object;

/// The key of an object in its collection; the namespace is empty for cluster-scoped objects.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    pub(crate) fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

/// One immutable version of an object.
#[derive(Debug)]
pub(crate) struct ObjectVersion {
    pub(crate) rv: u64,
    pub(crate) value: Arc<Value>,
    pub(crate) bytes: Bytes,
}

/// The part of a collection to read.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Slice<'a> {
    /// Only this namespace.
    pub(crate) namespace: Option<&'a str>,
    /// Only keys after this one.
    pub(crate) after: Option<&'a Key>,
    /// The collection as it was at this revision.
    pub(crate) at: Option<u64>,
}

#[derive(Debug)]
struct Collection {
    objects: BTreeMap<Key, Arc<ObjectVersion>>,
    log: EventLog,
    signal: watch::Sender<u64>,
}

/// All objects and the revision counter. A collection is named by the `storage` of its resource.
#[derive(Debug)]
pub(crate) struct Store {
    revision: u64,
    window: usize,
    compacted: u64,
    collections: HashMap<String, Collection>,
}

impl Store {
    /// An empty store that remembers `window` changes per collection.
    pub(crate) fn new(window: usize) -> Self {
        Self {
            revision: 1,
            window,
            compacted: 0,
            collections: HashMap::new(),
        }
    }

    /// The revision of the latest write.
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    pub(crate) fn get(&self, storage: &str, key: &Key) -> Option<&Arc<ObjectVersion>> {
        self.collections.get(storage)?.objects.get(key)
    }

    /// Stores a new version of an object under the next revision, and logs the change for watches.
    pub(crate) fn put(&mut self, storage: &str, key: Key, value: Value) -> Arc<ObjectVersion> {
        self.revision += 1;
        let version = Arc::new(stamp(value, self.revision));
        let collection = self.collection(storage);
        let previous = collection.objects.insert(key.clone(), Arc::clone(&version));
        let change = if previous.is_some() {
            ChangeKind::Modified
        } else {
            ChangeKind::Added
        };
        collection.record(ObjectChange::new(change, key, Arc::clone(&version), previous));
        version
    }

    /// Removes an object; its last state under the deletion's revision is returned and logged.
    /// `last` is that state if the deletion has changed the object, as by a `deletionTimestamp`.
    pub(crate) fn remove(
        &mut self,
        storage: &str,
        key: &Key,
        last: Option<Value>,
    ) -> Option<Arc<ObjectVersion>> {
        // The revision advances only if there is an object to remove.
        let revision = self.revision + 1;
        let collection = self.collection(storage);
        let previous = collection.objects.remove(key)?;
        let value = last.unwrap_or_else(|| Value::clone(&previous.value));
        let version = Arc::new(stamp(value, revision));
        collection.record(ObjectChange::new(
            ChangeKind::Deleted,
            key.clone(),
            Arc::clone(&version),
            Some(previous),
        ));
        self.revision = revision;
        Some(version)
    }

    /// Visits a slice in key order until the visitor breaks.
    pub(crate) fn scan(
        &self,
        storage: &str,
        slice: Slice<'_>,
        mut visit: impl FnMut(&Key, &Arc<ObjectVersion>) -> ControlFlow<()>,
    ) -> Result<(), Compacted> {
        let Some(collection) = self.collections.get(storage) else {
            return Ok(());
        };
        let past = match slice.at {
            Some(at) => collection.undone_since(at)?,
            None => BTreeMap::new(),
        };
        let first = slice.namespace.map(|ns| Key::new(ns, ""));
        let from = match (slice.after, &first) {
            (Some(after), _) => Bound::Excluded(after),
            (None, Some(first)) => Bound::Included(first),
            (None, None) => Bound::Unbounded,
        };
        let inside = |key: &Key| slice.namespace.is_none_or(|ns| key.namespace == ns);
        let range = (from, Bound::Unbounded);
        // Objects that changed after the revision come from the log, all others are as they were.
        let live = collection
            .objects
            .range::<Key, _>(range)
            .filter(|(key, _)| !past.contains_key(*key));
        let old = past
            .range::<Key, _>(range)
            .filter_map(|(key, v)| v.as_ref().map(|v| (key, v)));
        for (key, version) in merged(live, old).take_while(|(key, _)| inside(key)) {
            if visit(key, version).is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Up to `max` changes after a revision, and the revision up to which a caller that has read these has seen everything.
    pub(crate) fn events(
        &self,
        storage: &str,
        after: u64,
        max: usize,
    ) -> Result<(Vec<Arc<ObjectChange>>, u64), Compacted> {
        let Some(collection) = self.collections.get(storage) else {
            let oldest = self.compacted;
            return if after < oldest {
                Err(Compacted { oldest })
            } else {
                Ok((Vec::new(), self.revision.max(after)))
            };
        };
        let mut rest = collection.log.since(after)?;
        let events: Vec<_> = rest.by_ref().take(max).map(Arc::clone).collect();
        let seen = match (rest.next(), events.last()) {
            (Some(_), Some(last)) => last.version.rv,
            // The collection is silent up to the store's revision: a watch may advance its bookmark.
            _ => self.revision.max(after),
        };
        Ok((events, seen))
    }

    /// A signal that changes whenever the collection does.
    pub(crate) fn signal(&mut self, storage: &str) -> watch::Receiver<u64> {
        self.collection(storage).signal.subscribe()
    }

    /// Forgets every past change, as a compaction of the real storage does.
    pub(crate) fn compact(&mut self) {
        self.compacted = self.revision;
        for collection in self.collections.values_mut() {
            collection.log.compact(self.revision);
        }
    }

    /// The collection of a resource, which its first use makes.
    fn collection(&mut self, storage: &str) -> &mut Collection {
        if !self.collections.contains_key(storage) {
            // A collection that is new after a compaction must not serve revisions from before it.
            let mut log = EventLog::new(self.window);
            log.compact(self.compacted);
            let fresh = Collection {
                objects: BTreeMap::new(),
                log,
                signal: watch::Sender::new(0),
            };
            self.collections.insert(storage.to_owned(), fresh);
        }
        match self.collections.get_mut(storage) {
            Some(collection) => collection,
            None => unreachable!("inserted above"),
        }
    }
}

impl Collection {
    fn record(&mut self, event: ObjectChange) {
        let rv = event.version.rv;
        self.log.push(event);
        self.signal.send_replace(rv);
    }

    /// The versions at a revision of all keys that were changed after it.
    fn undone_since(&self, rv: u64) -> Result<BTreeMap<Key, Option<Arc<ObjectVersion>>>, Compacted> {
        let mut past = BTreeMap::new();
        // Newest first, so that the entry of the oldest change of a key is the one that stays.
        for event in self.log.since(rv)?.rev() {
            past.insert(event.key.clone(), event.previous.clone());
        }
        Ok(past)
    }
}

/// The version of an object with this revision as its `resourceVersion`.
fn stamp(mut value: Value, rv: u64) -> ObjectVersion {
    object::meta(&mut value).insert("resourceVersion".to_owned(), Value::from(rv.to_string()));
    // Serialised here, once per version, and not once for each of the watches and lists that send it.
    let bytes = Bytes::from(value.to_string());
    ObjectVersion {
        rv,
        value: Arc::new(value),
        bytes,
    }
}

/// Merges two iterators that are sorted by key and have no key in common.
fn merged<'a>(
    left: impl Iterator<Item = (&'a Key, &'a Arc<ObjectVersion>)>,
    right: impl Iterator<Item = (&'a Key, &'a Arc<ObjectVersion>)>,
) -> impl Iterator<Item = (&'a Key, &'a Arc<ObjectVersion>)> {
    let (mut left, mut right) = (left.peekable(), right.peekable());
    std::iter::from_fn(move || match (left.peek(), right.peek()) {
        (Some((l, _)), Some((r, _))) if r < l => right.next(),
        (Some(_), _) => left.next(),
        (None, _) => right.next(),
    })
}

/// The kind of a change of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// The object was created.
    Added,
    /// The object was replaced by a newer version.
    Modified,
    /// The object was removed.
    Deleted,
}

/// One change of one object.
#[derive(Debug)]
pub(crate) struct ObjectChange {
    pub(crate) change: ChangeKind,
    pub(crate) key: Key,
    /// The version after the change; for a deletion the last state under the deletion's revision.
    pub(crate) version: Arc<ObjectVersion>,
    /// The version before the change.
    pub(crate) previous: Option<Arc<ObjectVersion>>,
    departed: OnceLock<Option<Arc<ObjectVersion>>>,
}

impl ObjectChange {
    pub(crate) fn new(
        change: ChangeKind,
        key: Key,
        version: Arc<ObjectVersion>,
        previous: Option<Arc<ObjectVersion>>,
    ) -> Self {
        Self {
            change,
            key,
            version,
            previous,
            departed: OnceLock::new(),
        }
    }

    /// The previous version with this change's revision, which a watch reports as the deletion of an object
    /// that has left its selector. Computed once for all watches.
    pub(crate) fn departed(&self) -> Option<Arc<ObjectVersion>> {
        let make = || {
            let previous = self.previous.as_ref()?;
            Some(Arc::new(stamp(Value::clone(&previous.value), self.version.rv)))
        };
        self.departed.get_or_init(make).clone()
    }
}

/// The error for a revision from before the window of past changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Compacted {
    /// The oldest revision from which the log is complete.
    pub(crate) oldest: u64,
}

/// The changes of one collection, oldest first.
#[derive(Debug)]
pub(crate) struct EventLog {
    events: VecDeque<Arc<ObjectChange>>,
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
    pub(crate) fn push(&mut self, event: ObjectChange) {
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
    pub(crate) fn since(
        &self,
        rv: u64,
    ) -> Result<impl DoubleEndedIterator<Item = &Arc<ObjectChange>>, Compacted> {
        if rv < self.complete_after {
            return Err(Compacted {
                oldest: self.complete_after,
            });
        }
        let start = self.events.partition_point(|e| e.version.rv <= rv);
        Ok(self.events.range(start..))
    }
}

#[cfg(test)]
mod tests;
