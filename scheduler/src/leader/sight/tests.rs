//! When the watch counts as having shown something: after it has been carried into the state, and lists when they are whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::channel::mpsc;
use kube::runtime::watcher::Event;
use proto::pod::Pod;
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::{PodName, Sight};
use crate::index::Shared;
use crate::watch::Follow;

/// How many pods it was told of.
#[derive(Debug, Default)]
struct Told(usize);

impl Follow<Pod> for Told {
    const KIND: &'static str = "pods";

    fn apply(&mut self, _: Pod) {
        self.0 += 1;
    }

    fn delete(&mut self, _: &Pod) {}

    fn begin_list(&mut self) {}

    fn end_list(&mut self) {}
}

fn pod(name: &str, since: Option<&str>) -> Pod {
    let annotations = since.map(|since| json!({"gpushare/leader-since": since}));
    serde_json::from_value(json!({"metadata": {"name": name, "namespace": "n", "annotations": annotations}}))
        .unwrap()
}

struct World {
    sight: Sight,
    told: Shared<Told>,
    events: mpsc::UnboundedSender<Event<Pod>>,
}

fn world() -> World {
    let sight = Sight::new(Some(PodName {
        namespace: "n".to_owned(),
        name: "own".to_owned(),
    }));
    let told = Shared::new(Told::default());
    let (events, stream) = mpsc::unbounded();
    let stream = Arc::new(std::sync::Mutex::new(Some(stream)));
    let (following, state) = (sight.clone(), told.clone());
    tokio::spawn(async move {
        use futures::StreamExt;
        let events = || stream.lock().unwrap().take().unwrap().map(Ok);
        following.follow(state, events).await;
    });
    World { sight, told, events }
}

/// Whether it has been shown; time is paused, so that everything else has been done by the end of the wait.
async fn has_shown(sight: &Sight, since: &str) -> bool {
    sleep(Duration::from_millis(1)).await;
    timeout(Duration::from_secs(1), sight.has_shown(since))
        .await
        .is_ok()
}

#[tokio::test(start_paused = true)]
async fn the_own_pod_stands_for_all_that_was_before_it() {
    let world = world();
    let send = |event| world.events.unbounded_send(event).unwrap();
    for event in [
        Event::Init,
        Event::InitApply(pod("own", Some("1"))),
        Event::InitApply(pod("a", None)),
    ] {
        send(event);
    }
    assert!(!has_shown(&world.sight, "1").await, "more of the list may come");
    send(Event::InitDone);
    assert!(has_shown(&world.sight, "1").await);
    send(Event::Apply(pod("a", Some("2"))));
    assert!(!has_shown(&world.sight, "2").await, "another pod");
    send(Event::Apply(pod("own", Some("2"))));
    assert!(has_shown(&world.sight, "2").await);
    assert_eq!(world.told.read().0, 4);
    send(Event::Apply(pod("own", None)));
    assert!(!has_shown(&world.sight, "2").await);
}

#[tokio::test(start_paused = true)]
async fn looking_again_is_another_whole_list() {
    let sight = Sight::new(None);
    let n_lists = Arc::new(AtomicUsize::new(0));
    let (following, counted) = (sight.clone(), Arc::clone(&n_lists));
    tokio::spawn(async move {
        let events = || {
            counted.fetch_add(1, Ordering::SeqCst);
            let list = [Event::Init, Event::InitApply(pod("a", None)), Event::InitDone];
            futures::StreamExt::chain(futures::stream::iter(list.map(Ok)), futures::stream::pending())
        };
        following.follow(Shared::new(Told::default()), events).await;
    });
    sleep(Duration::from_millis(1)).await;
    for expected in 2..5 {
        timeout(Duration::from_secs(1), sight.look_again()).await.unwrap();
        assert_eq!(n_lists.load(Ordering::SeqCst), expected);
    }
}
