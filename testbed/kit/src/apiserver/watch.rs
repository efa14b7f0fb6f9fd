//! Watches: each is a cursor into the log of past changes of a collection.
//!
//! A watch queues only the present objects that it begins with. It reads changes from the log once those are reported, so the
//! queue of a slow client does not grow. The watch ends with 410 once the cursor is older than the log.

use std::sync::Arc;

use tokio::sync::watch;

use super::api_objects::ApiObjects;
use super::selector::Selectors;
use super::status::ApiError;
use super::store::{ObjectChange, ObjectVersion};
use super::verbs::RequestTarget;

/// Changes read from the log at a time, to keep the lock short.
const BATCH: usize = 1000;

/// A change as a watch reports it; an object that leaves its selectors is deleted.
#[derive(Debug)]
pub(crate) struct ReportedChange {
    /// `ADDED`, `MODIFIED` or `DELETED`.
    pub(crate) kind: &'static str,
    pub(crate) version: Arc<ObjectVersion>,
}

/// A running watch.
#[derive(Debug)]
pub(crate) struct Watch {
    objects: ApiObjects,
    target: RequestTarget,
    selectors: Selectors,
    /// Changes up to this revision were read from the log.
    cursor: u64,
    signal: watch::Receiver<()>,
    /// Present objects that were not reported yet.
    pending: Vec<ReportedChange>,
}

impl Watch {
    /// Starts a watch after a revision, or with every present object, as added. It fails if the log no longer reaches back to the
    /// revision.
    pub(crate) fn new(
        objects: &ApiObjects,
        target: &RequestTarget,
        selectors: Selectors,
        after: Option<u64>,
    ) -> Result<Self, ApiError> {
        let storage = &target.resource.storage;
        // Under one lock: a change between the scan and the cursor would be lost or reported twice.
        let mut state = objects.state_mut();
        let mut watch = Self {
            objects: objects.clone(),
            target: target.clone(),
            selectors,
            cursor: state.store.revision(),
            signal: state.store.signal(storage),
            pending: Vec::new(),
        };
        if let Some(rv) = after {
            watch.cursor = rv;
            // No event is read: this only checks that the log still reaches back to the revision.
            state.store.events(storage, rv, 0)?;
            return Ok(watch);
        }
        for (_, version) in state.store.scan(storage, &target.namespace, None) {
            if watch.selectors.matches(&version.value) {
                watch.pending.push(ReportedChange {
                    kind: "ADDED",
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
            let storage = &self.target.resource.storage;
            let (events, seen) = self.objects.state().store.events(storage, self.cursor, BATCH)?;
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
        if !self.target.namespace.is_empty() && event.key.namespace != self.target.namespace {
            return None;
        }
        let previous = event.previous.as_ref();
        let before = previous.is_some_and(|previous| self.selectors.matches(&previous.value));
        let after = !event.is_removal && self.selectors.matches(&event.version.value);
        let version = Arc::clone(&event.version);
        let (kind, version) = match (before, after) {
            (false, false) => return None,
            (false, true) => ("ADDED", version),
            (true, true) => ("MODIFIED", version),
            (true, false) if event.is_removal => ("DELETED", version),
            (true, false) => ("DELETED", Arc::new(event.departed()?)),
        };
        Some(ReportedChange { kind, version })
    }
}
