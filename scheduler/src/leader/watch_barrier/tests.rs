//! The watch has shown a write once the store has it; a list shows nothing before its end.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use daemon::api_server::Contact;
use daemon::watch::Update;
use http::{Request, Response};
use kube::client::Body;
use kube::runtime::watcher::Event;
use kube::{Api, Client};
use proto::pod::Pod;
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::{Listing, PodName, WatchBarrier};
use crate::index::Shared;
use crate::watch::{ObjectStore, watch};

/// The number of pods that were applied.
#[derive(Debug, Default)]
struct Count(usize);

impl ObjectStore<Pod> for Count {
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

/// Returns true if the watch has shown the annotation; time is paused, so that all other tasks have run by the end of the wait.
async fn is_shown(barrier: &WatchBarrier, since: &str) -> bool {
    timeout(Duration::from_secs(1), barrier.wait_for_annotation(since))
        .await
        .is_ok()
}

#[tokio::test(start_paused = true)]
async fn seeing_the_own_pod_proves_that_earlier_writes_were_seen() {
    let barrier = WatchBarrier::new(Some(PodName {
        namespace: "n".to_owned(),
        name: "own".to_owned(),
    }));
    let store = Shared::new(Count::default());
    let mut listing = Listing::default();
    let mut send = |event| barrier.apply(Update::Event(event), (&mut listing, 0), &store);
    send(Event::Init);
    send(Event::InitApply(pod("own", Some("1"))));
    send(Event::InitApply(pod("a", None)));
    assert!(!is_shown(&barrier, "1").await, "more of the list may come");
    send(Event::InitDone);
    assert!(is_shown(&barrier, "1").await);
    send(Event::Apply(pod("a", Some("2"))));
    assert!(!is_shown(&barrier, "2").await, "another pod");
    send(Event::Apply(pod("own", Some("2"))));
    assert!(is_shown(&barrier, "2").await);
    assert_eq!(store.read().0, 4);
    send(Event::Apply(pod("own", None)));
    assert!(!is_shown(&barrier, "2").await);
}

#[tokio::test(start_paused = true)]
async fn a_request_starts_another_complete_list() {
    let n_lists = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&n_lists);
    let server = move |request: Request<Body>| {
        let is_watch = request
            .uri()
            .query()
            .is_some_and(|query| query.contains("watch=true"));
        let counted = Arc::clone(&counted);
        async move {
            if is_watch {
                std::future::pending::<()>().await;
            }
            counted.fetch_add(1, Ordering::SeqCst);
            let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []});
            Ok::<_, Infallible>(Response::new(Body::from(list.to_string().into_bytes())))
        }
    };
    let client = Client::new(tower::service_fn(server), "default");
    let pods = watch("pods", Api::all(client), &Contact::default());
    let barrier = WatchBarrier::new(None);
    let following = barrier.clone();
    tokio::spawn(async move { following.follow(pods, Shared::new(Count::default())).await });
    sleep(Duration::from_millis(1)).await;
    for expected in 2..5 {
        timeout(Duration::from_secs(1), barrier.wait_for_new_list())
            .await
            .unwrap();
        assert_eq!(n_lists.load(Ordering::SeqCst), expected);
    }
}
