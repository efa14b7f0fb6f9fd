//! Carries what a watch says into the state, for any kind of object.
//!
//! Level-based: after a list has been read anew, whatever it did not name is gone. Knows no kind and decides nothing.

pub mod heard;

use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use futures::{Stream, StreamExt, pin_mut};
use kube::runtime::utils::{Backoff, ResetTimerBackoff};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch_objects};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tracing::{debug, info, warn};

use crate::index::Shared;

/// Objects in one page of a list: small, so that lists of large pods do not fill the memory.
const PAGE: u32 = 500;

/// The first pause after a failure; each is twice the one before, and up to its own length of chance is added.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause, without what chance adds.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Time without a failure after which pauses are short again.
const CALM: Duration = Duration::from_secs(30);

/// Pauses after failures. Few processes watch, so they need not be long: after an outage each kind is tried again within
/// seconds, once for the watch that has grown too old and once for a list.
struct Pauses(Duration);

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let chance = f64::from(u32::try_from(RandomState::new().hash_one(()) >> 32).unwrap_or(u32::MAX))
            / f64::from(u32::MAX);
        let pause = self.0.mul_f64(1.0 + chance);
        self.0 = (self.0 * 2).min(LONGEST_PAUSE);
        Some(pause)
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.0 = FIRST_PAUSE;
    }
}

/// State that follows the objects of one kind.
pub trait Follow<K> {
    /// The kind, for the log and for readiness.
    const KIND: &'static str;

    /// Whether a cluster may do without this kind, so that "not found" means that there are no such objects.
    const MAY_BE_ABSENT: bool = false;

    /// An object exists and looks like this.
    fn apply(&mut self, object: K);

    /// An object is gone.
    fn delete(&mut self, object: &K);

    /// A list begins: every object that exists will be applied.
    fn begin_list(&mut self);

    /// The list is complete: objects that it did not name are gone.
    fn end_list(&mut self);
}

/// Follows all objects of a kind until the process ends.
pub async fn watch<K, I>(api: Api<K>, index: Shared<I>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    I: Follow<K>,
{
    follow(events(api), index).await;
}

/// What happens to the objects of a kind, beginning with a list of all that there are: read from the API server itself, so
/// that it names whatever was written before it was asked for.
pub fn events<K>(api: Api<K>) -> impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let config = watcher::Config::default().page_size(PAGE);
    watch_objects(api, config).backoff(ResetTimerBackoff::new(Pauses(FIRST_PAUSE), CALM))
}

/// Carries a stream of events into the state.
pub async fn follow<K, I>(events: impl Stream<Item = watcher::Result<Event<K>>>, index: Shared<I>)
where
    I: Follow<K>,
{
    pin_mut!(events);
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => index.write().apply(object),
            Ok(Event::Delete(object)) => index.write().delete(&object),
            Ok(Event::Init) => index.write().begin_list(),
            Ok(Event::InitDone) => {
                index.write().end_list();
                info!(kind = I::KIND, "list complete");
            }
            Err(error) if I::MAY_BE_ABSENT && is_unknown_kind(&error) => {
                debug!(kind = I::KIND, %error, "the API server does not know this kind: there is no such object");
                let mut index = index.write();
                index.begin_list();
                index.end_list();
            }
            Err(error) => warn!(
                kind = I::KIND,
                error = format!("{:#}", anyhow::Error::from(error)),
                "watch failed, trying again"
            ),
        }
    }
}

/// Whether the custom resource is not installed, which is the case in clusters that run the old plugin only.
fn is_unknown_kind(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404)
}

#[cfg(test)]
mod tests;
