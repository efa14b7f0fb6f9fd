//! A watch of the API server that never ends: broken ones are begun again with backoff, and said so once each time.
//!
//! What the events mean is the business of whoever watches.

use std::error::Error;
use std::fmt::Debug;
use std::time::Duration;

use futures::StreamExt;
use kube::runtime::watcher;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::time::sleep;
use tracing::warn;

/// Pauses after failures, doubled each time.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// Hands every event to `take_in` until the task is dropped.
pub async fn follow<K>(what: &str, api: Api<K>, config: watcher::Config, mut take_in: impl FnMut(watcher::Event<K>))
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut pause = PAUSES.0;
    let mut events = watcher(api, config).boxed();
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                // The watcher announces a list before it has asked for one, so that is no sign of life.
                if !matches!(event, watcher::Event::Init) {
                    pause = PAUSES.0;
                }
                take_in(event);
            }
            Err(error) => {
                warn!(watch = what, error = one_line(&error), ?pause, "a watch is interrupted, trying again");
                sleep(pause).await;
                pause = (pause * 2).min(PAUSES.1);
            }
        }
    }
}

/// An error and its causes in one line, without those that it names already.
pub fn one_line(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let words = cause.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        next = cause.source();
    }
    text
}
