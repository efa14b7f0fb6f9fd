//! Watches: each is a cursor into the log of past changes of a collection.
//!
//! A watch queues only the present objects that it begins with. It reads changes from the log once those are reported, so the
//! queue of a slow client does not grow. The watch ends with 410 once the cursor is older than the log.

use std::sync::Arc;

use tokio::sync::watch;

use super::selector::Selectors;
use super::status::ApiError;
use super::store::{ChangeKind, ObjectChange, ObjectVersion};
use super::verbs::SharedState;

/// Changes read from the log at a time, to keep the lock short.
const BATCH: usize = 1000;

/// The first events of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WatchStart {
    /// Every present object first, as added.
    Present,
    /// The changes after a revision.
    After(u64),
}

/// A change as a watch reports it; an object that leaves its selectors is deleted.
#[derive(Debug, Clone)]
pub(crate) struct ReportedChange {
    pub(crate) change: ChangeKind,
    pub(crate) version: Arc<ObjectVersion>,
}

/// A running watch.
#[derive(Debug)]
pub(crate) struct Watch {
    state: SharedState,
    storage: String,
    namespace: Option<String>,
    selectors: Selectors,
    /// Changes up to this revision were read from the log.
    cursor: u64,
    signal: watch::Receiver<u64>,
    /// Present objects that were not reported yet.
    pending: Vec<ReportedChange>,
}

impl Watch {
    /// Starts a watch. It fails if the log no longer reaches back to the revision to start after.
    pub(crate) fn new(
        shared: &SharedState,
        storage: &str,
        namespace: Option<&str>,
        selectors: Selectors,
        start: WatchStart,
    ) -> Result<Self, ApiError> {
        // Under one lock: a change between the scan and the cursor would be lost or reported twice.
        let mut state = shared.write();
        let mut watch = Self {
            state: shared.clone(),
            storage: storage.to_owned(),
            namespace: namespace.map(str::to_owned),
            selectors,
            cursor: state.store.revision(),
            signal: state.store.signal(storage),
            pending: Vec::new(),
        };
        if let WatchStart::After(rv) = start {
            watch.cursor = rv;
            // No event is read: this only checks that the log still reaches back to the revision.
            state
                .store
                .events(storage, rv, 0)
                .map_err(|c| ApiError::expired(rv, c.oldest))?;
            return Ok(watch);
        }
        for (_, version) in state.store.scan(storage, namespace, None) {
            if watch.selectors.is_everything() || watch.selectors.matches(&version.value) {
                watch.pending.push(ReportedChange {
                    change: ChangeKind::Added,
                    version: Arc::clone(version),
                });
            }
        }
        Ok(watch)
    }

    /// The revision up to which the watch has reported every change, once its pending changes are taken.
    pub(crate) fn cursor(&self) -> u64 {
        self.cursor
    }

    /// The changes that can be reported now, without waiting.
    pub(crate) fn read_changes(&mut self) -> Result<Vec<ReportedChange>, ApiError> {
        if !self.pending.is_empty() {
            return Ok(std::mem::take(&mut self.pending));
        }
        loop {
            // Marked before the log is read: a change during the read must wake the next wait.
            self.signal.mark_unchanged();
            let read = self.state.read().store.events(&self.storage, self.cursor, BATCH);
            let (events, seen) = read.map_err(|c| ApiError::expired(self.cursor, c.oldest))?;
            let exhausted = events.len() < BATCH;
            self.cursor = seen;
            let found: Vec<ReportedChange> =
                events.iter().filter_map(|e| self.seen_by_selectors(e)).collect();
            if exhausted || !found.is_empty() {
                // More events wait in the log, so the next wait must not block.
                if !exhausted {
                    self.signal.mark_changed();
                }
                return Ok(found);
            }
        }
    }

    /// Waits until the collection may have changed since the last [`Self::read_changes`].
    pub(crate) async fn changed(&mut self) {
        if self.signal.changed().await.is_err() {
            // The store is gone; nothing will ever change.
            std::future::pending::<()>().await;
        }
    }

    /// Translates a change for the watch's selectors: an object that no longer matches them is reported as deleted,
    /// one that begins to match as added.
    fn seen_by_selectors(&self, event: &ObjectChange) -> Option<ReportedChange> {
        if self
            .namespace
            .as_deref()
            .is_some_and(|ns| event.key.namespace != ns)
        {
            return None;
        }
        let matches =
            |v: &Arc<ObjectVersion>| self.selectors.is_everything() || self.selectors.matches(&v.value);
        let before = event.previous.as_ref().is_some_and(matches);
        let after = event.change != ChangeKind::Deleted && matches(&event.version);
        let version = Arc::clone(&event.version);
        let (change, version) = match (before, after) {
            (false, false) => return None,
            (false, true) => (ChangeKind::Added, version),
            (true, true) => (ChangeKind::Modified, version),
            (true, false) if event.change == ChangeKind::Deleted => (ChangeKind::Deleted, version),
            (true, false) => (ChangeKind::Deleted, Arc::new(event.departed()?)),
        };
        Some(ReportedChange { change, version })
    }
}
