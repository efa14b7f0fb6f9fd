//! Faults of watches, as clients meet them.

use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kit::apiserver::ApiServer;
use kube::api::{WatchEvent, WatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::timeout;

use crate::policies::pod;

/// The next item of a stream, which must come in time; none at its end.
async fn next<T>(stream: &mut (impl Stream<Item = T> + Unpin)) -> Option<T> {
    timeout(Duration::from_secs(20), stream.next())
        .await
        .expect("nothing came in time")
}

#[tokio::test]
async fn watches_are_closed_and_held() {
    let server = ApiServer::start().await.unwrap();
    let client = Client::try_from(kube::Config::new(server.url().parse().unwrap())).unwrap();
    let api: Api<Pod> = Api::namespaced(client, "default");
    let (faults, objects) = (server.faults(), server.objects());
    let mut stream = Box::pin(api.watch(&WatchParams::default(), "0").await.unwrap());
    let held = faults.hold_watches_of("", "pods");
    objects.create("pods", pod("p")).unwrap();
    let early = timeout(Duration::from_millis(100), stream.next()).await;
    assert!(early.is_err(), "held back: {early:?}");
    assert_eq!(faults.n_late(), 0);
    drop(held);
    let added = next(&mut stream).await.unwrap().unwrap();
    assert!(matches!(added, WatchEvent::Added(_)), "{added:?}");
    assert_eq!(faults.n_late(), 1);
    faults.drop_watches_of("", "nodes");
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    objects.patch("pods", "default", "p", label).unwrap();
    let modified = next(&mut stream).await.unwrap().unwrap();
    assert!(matches!(modified, WatchEvent::Modified(_)), "{modified:?}");
    assert_eq!((faults.n_cut(), faults.n_late()), (0, 1));
    faults.drop_watches_of("", "");
    let ended = next(&mut stream).await;
    assert!(!matches!(ended, Some(Ok(_))), "{ended:?}");
    assert_eq!(faults.n_cut(), 1);
}
