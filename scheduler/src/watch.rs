//! Carries what a watch says into the state, for any kind of object.
//!
//! Level-based: after a list has been read anew, whatever it did not name is gone. Knows no kind and decides nothing.

pub mod heard;

use std::fmt::Debug;

use futures::{Stream, StreamExt, pin_mut};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch_objects};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tracing::{debug, info, warn};

use crate::index::Shared;

/// Objects in one page of a list: small, so that lists of large pods do not fill the memory.
const PAGE: u32 = 500;

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
    watch_objects(api, config).default_backoff()
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
            Err(error) => warn!(kind = I::KIND, error = format!("{:#}", anyhow::Error::from(error)), "watch failed, trying again"),
        }
    }
}

/// Whether the custom resource is not installed, which is the case in clusters that run the old plugin only.
fn is_unknown_kind(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404)
}

#[cfg(test)]
mod tests;
