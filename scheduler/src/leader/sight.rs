//! How far the watch of pods has come: whether it has shown what was written before a certain moment.
//!
//! Two ways to know. A leader writes his own pod, and once the watch shows that write it has shown every earlier one, as
//! it shows them in the order in which they were made. Without a pod of one's own all pods are listed anew.

use std::sync::Arc;

use futures::{Stream, StreamExt};
use kube::runtime::watcher::{self, Event};
use proto::pod::Pod;
use tokio::sync::watch;

use super::{PodName, label};
use crate::index::Shared;
use crate::watch::{Follow, follow};

/// What the watch has shown; clones share it.
#[derive(Clone, Debug)]
pub struct Sight {
    own: Option<PodName>,
    /// What the annotation of the own pod says; empty if it is not there.
    since: Arc<watch::Sender<String>>,
    /// How many lists have been asked for.
    wanted: Arc<watch::Sender<u64>>,
    /// How many were asked for when the last complete one began.
    listed: Arc<watch::Sender<u64>>,
}

impl Sight {
    /// Of a watch that has shown nothing; `own` is this replica's pod.
    pub fn new(own: Option<PodName>) -> Self {
        Self {
            own,
            since: Arc::default(),
            wanted: Arc::default(),
            listed: Arc::default(),
        }
    }

    /// Waits until the watch has shown the own pod with this annotation, and so all that was written before.
    pub async fn has_shown(&self, since: &str) {
        let mut shown = self.since.subscribe();
        // The sender lives as long as this.
        let _ = shown.wait_for(|shown| shown == since).await;
    }

    /// Has all pods listed anew, and waits until that is done.
    pub async fn look_again(&self) {
        self.wanted.send_modify(|n| *n += 1);
        let wanted = *self.wanted.borrow();
        let mut listed = self.listed.subscribe();
        let _ = listed.wait_for(|listed| *listed >= wanted).await;
    }

    /// Carries pods into a state until the process ends; `events` begins with a list each time.
    pub async fn follow<I, S>(&self, index: Shared<I>, events: impl Fn() -> S)
    where
        I: Follow<Pod>,
        S: Stream<Item = watcher::Result<Event<Pod>>> + Send + 'static,
    {
        let mut wanted = self.wanted.subscribe();
        loop {
            let number = *wanted.borrow_and_update();
            tokio::select! {
                () = follow(self.clone().note(number, events()), index.clone()) => return,
                changed = wanted.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Takes note of an event when the next one is asked for: it has been carried into the state by then.
    fn note(
        self,
        number: u64,
        events: impl Stream<Item = watcher::Result<Event<Pod>>> + Send + 'static,
    ) -> impl Stream<Item = watcher::Result<Event<Pod>>> {
        futures::stream::unfold(
            (self, events.boxed(), Noted::default()),
            move |(sight, mut events, mut noted)| async move {
                sight.publish(&mut noted, number);
                let event = events.next().await?;
                noted.take(&sight, &event);
                Some((event, (sight, events, noted)))
            },
        )
    }

    fn publish(&self, noted: &mut Noted, number: u64) {
        if noted.is_listing {
            // What a list names comes in no order: it counts when it is complete.
            return;
        }
        if std::mem::take(&mut noted.is_listed) {
            self.listed.send_replace(number);
        }
        if let Some(since) = noted.since.take() {
            self.since.send_replace(since);
        }
    }

    fn since_of(&self, pod: &Pod) -> Option<String> {
        let own = self.own.as_ref()?;
        let meta = &pod.metadata;
        let is_own = meta.name.as_deref() == Some(own.name.as_str())
            && meta.namespace.as_deref() == Some(own.namespace.as_str());
        is_own.then(|| {
            meta.annotations
                .as_ref()
                .and_then(|annotations| annotations.get(label::SINCE).cloned())
                .unwrap_or_default()
        })
    }
}

/// What is to be told once the event has been carried on.
#[derive(Debug, Default)]
struct Noted {
    is_listing: bool,
    is_listed: bool,
    since: Option<String>,
}

impl Noted {
    fn take(&mut self, sight: &Sight, event: &watcher::Result<Event<Pod>>) {
        match event {
            Ok(Event::Init) => {
                *self = Self {
                    is_listing: true,
                    ..Self::default()
                }
            }
            Ok(Event::InitDone) => (self.is_listing, self.is_listed) = (false, true),
            Ok(Event::Apply(pod) | Event::InitApply(pod)) => {
                if let Some(since) = sight.since_of(pod) {
                    self.since = Some(since);
                }
            }
            Ok(Event::Delete(_)) | Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests;
