//! The storage core: objects by collection, namespace and name under one monotonic revision, and the window of past changes
//! of each collection, which watches read.
//!
//! Pure and synchronous: no clock, no network, no rules about objects. Every stored version is serialised once
//! and its bytes are shared by all lists and watches. The window keeps a bounded number of changes; a request
//! for older ones is answered "compacted".

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::watch;

use super::object;
use super::status::ApiError;

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
    /// The revision of the write, which is the object's `resourceVersion`.
    pub(crate) rv: u64,
    pub(crate) value: Arc<Value>,
    /// `value` as JSON.
    pub(crate) bytes: Bytes,
}

#[derive(Debug, Default)]
struct Collection {
    objects: BTreeMap<Key, Arc<ObjectVersion>>,
    /// Past changes, oldest first.
    log: VecDeque<Arc<ObjectChange>>,
    /// The log has every change after this revision.
    complete_after: u64,
    /// Wakes watches at each change.
    signal: watch::Sender<()>,
}

/// All objects and the revision counter. A collection is named by the `storage` of its resource.
#[derive(Debug)]
pub(crate) struct Store {
    revision: u64,
    /// The number of past changes that each collection keeps.
    window: usize,
    /// Changes up to this revision are forgotten.
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
        let version = Arc::new(version_at(value, self.revision));
        let window = self.window;
        let collection = self.collection(storage);
        let previous = collection.objects.insert(key.clone(), Arc::clone(&version));
        let change = ObjectChange {
            key,
            version: Arc::clone(&version),
            previous,
            is_removal: false,
        };
        collection.record(change, window);
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
        let (revision, window) = (self.revision + 1, self.window);
        let collection = self.collection(storage);
        let previous = collection.objects.remove(key)?;
        let value = last.unwrap_or_else(|| Value::clone(&previous.value));
        let version = Arc::new(version_at(value, revision));
        let change = ObjectChange {
            key: key.clone(),
            version: Arc::clone(&version),
            previous: Some(previous),
            is_removal: true,
        };
        collection.record(change, window);
        self.revision = revision;
        Some(version)
    }

    /// The objects of a collection, ordered by key: of one namespace unless it is empty, and after a key if it is given.
    pub(crate) fn scan<'a>(
        &'a self,
        storage: &str,
        namespace: &'a str,
        after: Option<&Key>,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<ObjectVersion>)> + use<'a> {
        let from = match after {
            Some(after) => Bound::Excluded(after.clone()),
            None => Bound::Included(Key::new(namespace, "")),
        };
        let collection = self.collections.get(storage);
        let objects = collection.map(|found| found.objects.range((from, Bound::Unbounded)));
        let objects = objects.into_iter().flatten();
        objects.take_while(move |(key, _)| namespace.is_empty() || key.namespace == namespace)
    }

    /// Up to `max` changes after a revision, and the revision up to which they are complete.
    pub(crate) fn events(
        &self,
        storage: &str,
        after: u64,
        max: usize,
    ) -> Result<(Vec<Arc<ObjectChange>>, u64), ApiError> {
        let collection = self.collections.get(storage);
        let complete_after = collection.map_or(0, |collection| collection.complete_after);
        let oldest = complete_after.max(self.compacted);
        if after < oldest {
            return Err(ApiError::expired(after, oldest));
        }
        let mut rest = collection.into_iter().flat_map(|found| found.since(after));
        let events: Vec<_> = rest.by_ref().take(max).map(Arc::clone).collect();
        let seen = match (rest.next(), events.last()) {
            (Some(_), Some(last)) => last.version.rv,
            // The collection is silent up to the store's revision: a watch may advance its bookmark.
            _ => self.revision.max(after),
        };
        Ok((events, seen))
    }

    /// A signal that changes whenever the collection does.
    pub(crate) fn signal(&mut self, storage: &str) -> watch::Receiver<()> {
        self.collection(storage).signal.subscribe()
    }

    /// Forgets every past change, as a compaction of the real storage does.
    pub(crate) fn compact(&mut self) {
        self.compacted = self.revision;
    }

    /// The collection of a resource, which its first use makes.
    fn collection(&mut self, storage: &str) -> &mut Collection {
        self.collections.entry(storage.to_owned()).or_default()
    }
}

impl Collection {
    /// The changes after a revision, oldest first.
    fn since(&self, revision: u64) -> impl Iterator<Item = &Arc<ObjectChange>> {
        let start = self.log.partition_point(|change| change.version.rv <= revision);
        self.log.range(start..)
    }

    /// Logs a change, forgets the oldest beyond the window, and wakes the watches of the collection.
    fn record(&mut self, change: ObjectChange, window: usize) {
        self.log.push_back(Arc::new(change));
        if self.log.len() > window
            && let Some(oldest) = self.log.pop_front()
        {
            self.complete_after = oldest.version.rv;
        }
        self.signal.send_replace(());
    }
}

/// The version of an object with this revision as its `resourceVersion`.
fn version_at(mut value: Value, rv: u64) -> ObjectVersion {
    object::meta(&mut value).insert("resourceVersion".to_owned(), Value::from(rv.to_string()));
    // Serialised here, once per version, and not once for each of the watches and lists that send it.
    let bytes = Bytes::from(value.to_string());
    ObjectVersion {
        rv,
        value: Arc::new(value),
        bytes,
    }
}

/// A change of an object, as the log of its collection keeps it.
#[derive(Debug)]
pub(crate) struct ObjectChange {
    pub(crate) key: Key,
    /// The version after the change; for a deletion the last state under the deletion's revision.
    pub(crate) version: Arc<ObjectVersion>,
    pub(crate) previous: Option<Arc<ObjectVersion>>,
    pub(crate) is_removal: bool,
}

impl ObjectChange {
    /// The previous version with this change's revision, which a watch reports as the deletion of an object
    /// that has left its selector.
    pub(crate) fn departed(&self) -> Option<ObjectVersion> {
        let previous = self.previous.as_ref()?;
        Some(version_at(Value::clone(&previous.value), self.version.rv))
    }
}
