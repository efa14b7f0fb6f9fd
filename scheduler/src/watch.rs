//! Carries the updates of watches into a store of objects.
//!
//! Level-based: at the end of a list, the store removes the objects that the list did not name. Decides nothing.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::Contact;
use daemon::watch::{ObjectWatch, Update};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use serde::de::DeserializeOwned;
use tracing::info;

/// The longest pause between two attempts to watch. After an outage each kind takes two: a watch whose resource version has
/// become too old, and then a list.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// State behind a lock that is held for moments only. A writer that waits is next, which the lock of the standard library does
/// not promise while other threads read again and again, as long searches do.
#[derive(Debug)]
pub struct Shared<I>(Arc<RwLock<I>>);

impl<I> Clone for Shared<I> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<I> Shared<I> {
    /// Puts a state behind a lock that clones share.
    pub fn new(state: I) -> Self {
        Self(Arc::new(RwLock::new(state)))
    }

    /// Locks the state to read it.
    pub fn read(&self) -> RwLockReadGuard<'_, I> {
        self.0.read()
    }

    /// Locks the state to change it.
    pub fn write(&self) -> RwLockWriteGuard<'_, I> {
        self.0.write()
    }
}

/// A store of the objects of one kind.
pub trait ObjectStore<K> {
    /// The kind, for the log and for readiness.
    const KIND: &'static str;

    /// True for a kind that a cluster may do without: an API server that does not know it has no such object.
    const MAY_BE_ABSENT: bool = false;

    /// Adds or replaces an object.
    fn apply(&mut self, object: K);

    /// Removes an object.
    fn delete(&mut self, object: &K);

    /// Begins a list: until its end, every object that exists is applied.
    fn begin_list(&mut self);

    /// Ends a list: removes the objects that it did not name.
    fn end_list(&mut self);
}

/// Watches all objects of a kind, beginning with a list.
pub fn watch<K>(name: &'static str, api: Api<K>, contact: &Contact) -> ObjectWatch<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    ObjectWatch::new(name, (api, contact), watcher::Config::default(), LONGEST_PAUSE)
}

/// Carries the updates of a watch into a store until the task is dropped.
pub async fn follow<K, S>(mut watch: ObjectWatch<K>, store: Shared<S>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    S: ObjectStore<K>,
{
    loop {
        apply(watch.next().await, &store);
    }
}

/// Carries one update into a shared store.
pub fn apply<K, S: ObjectStore<K>>(update: Update<K>, store: &Shared<S>) {
    let ends_list = matches!(update, Update::Event(Event::InitDone));
    apply_to(update, &mut *store.write());
    // After the lock is released.
    if ends_list {
        info!(kind = S::KIND, "list complete");
    }
}

/// Carries one update into a store.
pub fn apply_to<K, S: ObjectStore<K>>(update: Update<K>, store: &mut S) {
    match update {
        Update::Event(Event::Apply(object) | Event::InitApply(object)) => store.apply(object),
        Update::Event(Event::Delete(object)) => store.delete(&object),
        Update::Event(Event::Init) => store.begin_list(),
        Update::Event(Event::InitDone) => store.end_list(),
        // A cluster without the CRD has no objects of it, and must not wait for a list of them.
        Update::UnknownKind if S::MAY_BE_ABSENT => {
            store.begin_list();
            store.end_list();
        }
        // The store keeps its objects while the connection is away.
        Update::UnknownKind | Update::Interrupted | Update::Restored => {}
    }
}

#[cfg(test)]
mod tests;
