//! Follows this node's own Device object: somebody may delete it or write into it.

use std::time::Duration;

use kube::runtime::watcher;
use kube::{Api, Client};
use proto::device::RawDevice;
use tokio::sync::watch;

use crate::watching::{News, follow};

/// Nobody waits for this watch.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The Device object as the API server holds it.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Held {
    /// The API server has not said yet.
    #[default]
    Unknown,
    /// There is none.
    Nothing,
    /// This one.
    Object(Box<RawDevice>),
}

/// Watches until the task is dropped.
pub async fn watch_device(client: Client, node_name: String, held: watch::Sender<Held>) {
    let config = watcher::Config::default().fields(&format!("metadata.name={node_name}"));
    let mut listed = Held::Nothing;
    let take_in = |news| match news {
        News::Interrupted | News::Restored => {}
        News::Event(event) => take_in(event, &mut listed, &held),
    };
    follow("this node's Device object", Api::<RawDevice>::all(client), config, LONGEST_PAUSE, take_in).await;
}

fn take_in(event: watcher::Event<RawDevice>, listed: &mut Held, held: &watch::Sender<Held>) {
    let object = |found: RawDevice| Held::Object(Box::new(without_bookkeeping(found)));
    let now = match event {
        watcher::Event::Init => {
            *listed = Held::Nothing;
            return;
        }
        watcher::Event::InitApply(found) => {
            *listed = object(found);
            return;
        }
        watcher::Event::InitDone => std::mem::replace(listed, Held::Nothing),
        watcher::Event::Apply(found) => object(found),
        watcher::Event::Delete(_) => Held::Nothing,
    };
    held.send_if_modified(|held| {
        let is_news = *held != now;
        *held = now;
        is_news
    });
}

fn without_bookkeeping(mut found: RawDevice) -> RawDevice {
    found.metadata.managed_fields = None;
    found.metadata.resource_version = None;
    found.metadata.generation = None;
    found
}
