//! Swaps against an API server whose answers the tests choose.

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::Value;

use super::*;
use crate::tests::api_server::{ApiServer, failure};
use crate::tests::builders::{fleet, node_state, pod, pods, units};

fn uid(name: &str) -> PodUid {
    PodUid::from(name)
}

/// A node with equal pods a, b and c on GPUs 0, 1 and 2.
fn scene() -> (NodeState, RecordSwaps, ApiServer) {
    scene_of([("a", 0), ("b", 1), ("c", 2)])
}

/// A node with equal pods on GPUs of these minors.
fn scene_of<N: AsRef<str>>(of: impl IntoIterator<Item = (N, u32)>) -> (NodeState, RecordSwaps, ApiServer) {
    let (client, server) = ApiServer::new();
    let on = |(name, minor): (N, u32)| pod(name.as_ref(), u64::from(minor), [units(2)]).on([minor]);
    let (sender, seen) = watch::channel(pods(of.into_iter().map(on)));
    let mut node = node_state(fleet(4), NodePods::default());
    node.pods = seen;
    let connection = client.into();
    let metrics = Metrics::register(&mut Registry::default());
    (
        node,
        RecordSwaps::new(&connection, "n1".to_owned(), sender, metrics),
        server,
    )
}

/// Answers the next request, and returns its method.
async fn answer(server: &mut ApiServer, code: u16, body: &Value) -> String {
    let (line, _) = server.answer(code, body).await;
    line.split_once(' ').unwrap().0.to_owned()
}

/// The Device object with these records, by the minor of each.
fn holding(version: &str, minors: &[(&str, u32)]) -> Value {
    let record =
        |minor: u32| json!({"gpu": [{"minor": minor, "resources": {"koordinator.sh/gpu-memory": "2Gi"}}]});
    let records: Value = minors
        .iter()
        .map(|(name, minor)| ((*name).to_owned(), record(*minor)))
        .collect();
    let mut device = device(version);
    device["metadata"]["annotations"] = json!({EXCHANGED_RECORDS: records.to_string()});
    device
}

fn device(version: &str) -> Value {
    json!({"metadata": {"name": "n1", "resourceVersion": version}, "spec": {"devices": []}})
}

fn minors(node: &NodeState) -> Vec<String> {
    node.pods
        .borrow()
        .iter()
        .map(|pod| pod.placement.as_ref().unwrap().to_string())
        .collect()
}

/// Only the two pods whose swap is in doubt have to wait.
#[tokio::test(start_paused = true)]
async fn a_write_without_a_reply_does_not_block_other_swaps() {
    let (node, mut swaps, mut requests) = scene();
    let (a, b, c) = (uid("a"), uid("b"), uid("c"));
    let server = tokio::spawn(async move {
        assert_eq!(answer(&mut requests, 200, &device("1")).await, "GET");
        let unanswered = requests.next().await;
        (requests, unanswered)
    });
    swaps.load().await.unwrap();
    assert!(matches!(
        swaps.swap(&node, &a, &b).await,
        Err(SwapError::Request(ApiRequestError::Slow { .. }))
    ));
    let (mut requests, unanswered) = server.await.unwrap();
    drop(unanswered);
    swaps.load_for(&c).await.unwrap();
    assert!(
        matches!(swaps.load_for(&a).await, Err(SwapError::Resting(_))),
        "no start waits for it at once"
    );
    tokio::time::sleep(REST).await;
    // It was done.
    let done = holding("2", &[("a", 1), ("b", 0)]);
    let (loaded, _) = tokio::join!(swaps.load_for(&a), answer(&mut requests, 200, &done));
    loaded.unwrap();
    assert_eq!(minors(&node), ["minor 1", "minor 0", "minor 2"]);
    swaps.load_for(&b).await.unwrap();
}

/// The object was deleted and created again before the pods' annotations followed.
#[tokio::test(start_paused = true)]
async fn records_missing_in_the_object_are_written_again() {
    let (node, mut swaps, mut requests) = scene();
    let (a, b) = (uid("a"), uid("b"));
    let server = async {
        assert_eq!(answer(&mut requests, 200, &device("1")).await, "GET");
        assert_eq!(answer(&mut requests, 200, &device("2")).await, "PATCH");
        assert_eq!(answer(&mut requests, 200, &device("7")).await, "GET");
        let (_, patch) = requests.answer(200, &device("8")).await;
        patch["metadata"].clone()
    };
    let client = async {
        swaps.load().await.unwrap();
        swaps.swap(&node, &a, &b).await.unwrap();
        swaps.verify().await.unwrap()
    };
    let (is_restored, patch) = tokio::join!(client, server);
    assert!(is_restored);
    assert_eq!(patch["resourceVersion"], "7");
    assert!(
        patch["annotations"][EXCHANGED_RECORDS]
            .as_str()
            .unwrap()
            .contains("\"a\""),
        "{patch}"
    );
    assert_eq!(minors(&node), ["minor 1", "minor 0", "minor 2"]);
}

#[tokio::test(start_paused = true)]
async fn records_of_another_writer_are_not_overwritten() {
    let (node, mut swaps, mut requests) = scene();
    let other = holding("2", &[("b", 2), ("c", 1)]);
    let conflict = failure(409, "Conflict", "changed");
    let server = async {
        assert_eq!(answer(&mut requests, 200, &device("1")).await, "GET");
        assert_eq!(answer(&mut requests, 409, &conflict).await, "PATCH");
        assert_eq!(answer(&mut requests, 200, &other).await, "GET");
    };
    let (a, b) = (uid("a"), uid("b"));
    let swap = async {
        swaps.load().await.unwrap();
        swaps.swap(&node, &a, &b).await.unwrap();
    };
    let ((), ()) = tokio::join!(swap, server);
    assert_eq!(
        minors(&node),
        ["minor 0", "minor 2", "minor 1"],
        "the other records are loaded, and none swapped"
    );
}

/// The whole annotation that a write carries.
async fn written(server: &mut ApiServer, version: &str) -> Value {
    let (_, patch) = server.answer(200, &device(version)).await;
    serde_json::from_str(
        patch["metadata"]["annotations"][EXCHANGED_RECORDS]
            .as_str()
            .unwrap(),
    )
    .unwrap()
}

/// Entries outlive their pods, but not where they leave no room for others.
#[tokio::test(start_paused = true)]
async fn entries_of_deleted_pods_are_removed() {
    let name = |at: u32| format!("{at:0>120}");
    let n_pods = 700;
    let (node, mut swaps, mut requests) = scene_of((0..n_pods).map(|at| (name(at), at % 2)));
    let (one, other) = (uid(&name(n_pods - 2)), uid(&name(n_pods - 1)));
    let unit = node.settings.memory_unit;
    let record = node
        .pods
        .borrow()
        .get(&one)
        .unwrap()
        .record()
        .unwrap()
        .to_allocations(unit);
    let stored = device("1");
    let (loaded, _) = tokio::join!(swaps.load(), answer(&mut requests, 200, &stored));
    loaded.unwrap();
    let mut full = Records::new();
    let n_kept = (0..n_pods)
        .find(|at| {
            full.insert(uid(&name(*at)), record.clone());
            annotation_text(&full).is_err()
        })
        .unwrap();
    assert!(
        n_kept > 0 && n_kept < n_pods - 2,
        "as many as there is room for: {n_kept}"
    );
    full.pop_last();
    swaps.pods.send_modify(|pods| {
        pods.set_swapped(full);
        (0..n_kept).for_each(|at| pods.delete(&uid(&name(at))));
    });
    let (swapped, text) = tokio::join!(swaps.swap(&node, &one, &other), written(&mut requests, "2"));
    assert!(swapped.unwrap());
    assert_eq!(
        text.as_object().unwrap().len(),
        2,
        "those that are gone are left out"
    );
}

/// The number of swaps in `/metrics`.
fn n_swapped(registry: &Registry) -> String {
    let mut text = String::new();
    encode(&mut text, registry).unwrap();
    let name = "gpushare_device_plugin_identity_mismatch_total{outcome=\"exchanged\"} ";
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap().to_owned()
}

/// Refused because of another writer, then without an answer, then done.
#[tokio::test(start_paused = true)]
async fn only_a_written_swap_is_counted() {
    let (node, mut swaps, mut requests) = scene();
    let mut registry = Registry::default();
    swaps.metrics = Metrics::register(&mut registry);
    let (a, b) = (uid("a"), uid("b"));
    let other = holding("2", &[("c", 2)]);
    let conflict = failure(409, "Conflict", "changed");
    let server = async {
        assert_eq!(answer(&mut requests, 200, &device("1")).await, "GET");
        assert_eq!(answer(&mut requests, 409, &conflict).await, "PATCH");
        assert_eq!(answer(&mut requests, 200, &other).await, "GET");
        drop(requests.next().await);
        requests
    };
    let client = async {
        swaps.load().await.unwrap();
        assert!(!swaps.swap(&node, &a, &b).await.unwrap());
        assert!(swaps.swap(&node, &a, &b).await.is_err());
    };
    let ((), mut requests) = tokio::join!(client, server);
    assert_eq!(n_swapped(&registry), "0");
    tokio::time::sleep(REST).await;
    let server = async {
        assert_eq!(answer(&mut requests, 200, &other).await, "GET");
        assert_eq!(answer(&mut requests, 200, &device("3")).await, "PATCH");
    };
    let (swapped, ()) = tokio::join!(swaps.swap(&node, &a, &b), server);
    assert!(swapped.unwrap());
    assert_eq!(n_swapped(&registry), "1");
}
