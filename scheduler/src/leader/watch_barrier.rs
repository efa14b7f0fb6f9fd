//! Waits until the watch of pods has shown every write up to a certain moment.
//!
//! There are two ways. A leader annotates its own pod: once the watch shows that annotation, it has shown every earlier write,
//! since a watch shows the writes of one kind in their order. A replica that does not know its own pod lists all pods again.

use std::sync::Arc;

use daemon::watch::{ObjectWatch, Update};
use kube::runtime::watcher::Event;
use proto::pod::Pod;
use tokio::sync::watch;

use super::{PodName, label};
use crate::index::Shared;
use crate::watch::{ObjectStore, apply};

/// The progress of the watch of pods; clones share it.
#[derive(Clone, Debug)]
pub struct WatchBarrier {
    /// This replica's pod, if it is known.
    own_pod: Option<PodName>,
    /// The annotation [`label::LEADER_SINCE`] of that pod as the watch showed it last; empty if the pod has none.
    shown: Arc<watch::Sender<String>>,
    /// The number of lists that [`Self::wait_for_new_list`] has requested.
    requested: Arc<watch::Sender<u64>>,
    /// The value of `requested` when the last complete list began.
    listed: Arc<watch::Sender<u64>>,
}

/// A list that is being received. Its objects come in no order, so they show nothing of earlier writes before its end.
#[derive(Debug, Default)]
struct Listing {
    /// True until the list has ended.
    is_open: bool,
    /// The annotation of this replica's pod, if it was seen and is not in `shown` yet.
    annotation: Option<String>,
}

impl WatchBarrier {
    /// The barrier of a watch that has shown nothing yet; `own_pod` is this replica's pod.
    pub fn new(own_pod: Option<PodName>) -> Self {
        Self {
            own_pod,
            shown: Arc::default(),
            requested: Arc::default(),
            listed: Arc::default(),
        }
    }

    /// Waits until the watch has shown this replica's pod with this annotation, and so every earlier write.
    pub async fn wait_for_annotation(&self, since: &str) {
        let mut shown = self.shown.subscribe();
        // An error is impossible: the sender lives as long as `self`.
        let _ = shown.wait_for(|shown| shown == since).await;
    }

    /// Lists all pods again, and waits for the end of the list.
    pub async fn wait_for_new_list(&self) {
        // A list that is under way may have begun before the writes that the caller waits for, so the wait is for another list.
        self.requested.send_modify(|n| *n += 1);
        let requested = *self.requested.borrow();
        let mut listed = self.listed.subscribe();
        let _ = listed.wait_for(|listed| *listed >= requested).await;
    }

    /// Carries the updates of a watch into a store until the task is dropped.
    pub async fn follow<S: ObjectStore<Pod>>(&self, mut watch: ObjectWatch<Pod>, store: Shared<S>) {
        let mut requested = self.requested.subscribe();
        let mut n_requested = *requested.borrow_and_update();
        let mut listing = Listing::default();
        loop {
            tokio::select! {
                update = watch.next() => self.apply(update, (&mut listing, n_requested), &store),
                // `self` holds the sender, so this is never an error.
                _ = requested.changed() => {
                    n_requested = *requested.borrow_and_update();
                    // A list that begins now shows every write so far.
                    watch.restart();
                }
            }
        }
    }

    /// Carries an update into the store, then ends the waits for it. `n_requested` is the value of `requested` when the last list
    /// began.
    fn apply<S: ObjectStore<Pod>>(
        &self,
        update: Update<Pod>,
        (listing, n_requested): (&mut Listing, u64),
        store: &Shared<S>,
    ) {
        if matches!(update, Update::Event(Event::Init)) {
            *listing = Listing::default();
            listing.is_open = true;
        }
        let is_end = matches!(update, Update::Event(Event::InitDone));
        // Read before `apply`, which consumes the update, and sent after it, since a waiter reads the store next.
        let annotation = match &update {
            Update::Event(Event::Apply(pod) | Event::InitApply(pod)) => self.annotation_of_own(pod),
            _ => None,
        };
        apply(update, store);
        listing.annotation = annotation.or(listing.annotation.take());
        if is_end {
            listing.is_open = false;
            self.listed.send_replace(n_requested);
        }
        // During a list, the annotation waits for the end of the list.
        if let Some(annotation) = listing.annotation.take_if(|_| !listing.is_open) {
            self.shown.send_replace(annotation);
        }
    }

    /// The annotation of this replica's pod, empty if the pod has none; `None` for any other pod.
    fn annotation_of_own(&self, pod: &Pod) -> Option<String> {
        let PodName { namespace, name } = self.own_pod.as_ref()?;
        let is_own =
            pod.metadata.name.as_ref() == Some(name) && pod.metadata.namespace.as_ref() == Some(namespace);
        is_own.then(|| pod.annotation(label::LEADER_SINCE).unwrap_or_default().to_owned())
    }
}

#[cfg(test)]
mod tests;
