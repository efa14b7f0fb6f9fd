//! Refusals that come too early: kube-scheduler tries a pod again because of a change that the watches of the scheduler show a
//! moment later.

use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::objects::{device, node, units};
use crate::world::World;

/// The delay of the watch.
const BEHIND: Duration = Duration::from_millis(7);

/// The longest time that a refusal is held back.
const HOLD: Duration = Duration::from_millis(50);

/// The nodes that `filter` returns while the watch delivers `update` late, and the time that the request takes.
async fn fitting_with(world: &World, pod: &Value, update: impl AsyncFnOnce()) -> (Vec<String>, Duration) {
    let began = Instant::now();
    let late = async {
        sleep(BEHIND).await;
        update().await;
    };
    let asked = async {
        let fitting = world.fitting(pod, &["n1"]).await;
        (fitting, began.elapsed())
    };
    tokio::join!(asked, late).0
}

/// A full node, its holder, and a pod that was refused for it.
async fn full() -> (World, Value, Value) {
    let (holder, waiting) = (units("holder", 80), units("waiting", 50));
    let world = World::new().with_node("n1", &[100]);
    world.place(&holder, "n1").await;
    world.apply_pod(&waiting);
    let began = Instant::now();
    assert_eq!(world.fitting(&waiting, &["n1"]).await, Vec::<String>::new());
    assert_eq!(
        began.elapsed(),
        Duration::ZERO,
        "the first refusal is not held back"
    );
    (world, holder, waiting)
}

#[tokio::test(start_paused = true)]
async fn a_refusal_waits_for_the_room_of_a_deleted_pod() {
    let (world, holder, waiting) = full().await;
    let (fitting, took) = fitting_with(&world, &waiting, async || world.delete_pod(&holder)).await;
    assert_eq!(fitting, ["n1"]);
    assert!(took < HOLD, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_waits_for_new_devices() {
    let (world, _, waiting) = full().await;
    let (fitting, _) = fitting_with(&world, &waiting, async || {
        world.apply_device(&device("n1", &[100, 100]));
    })
    .await;
    assert_eq!(fitting, ["n1"]);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_waits_for_a_node_that_gets_the_pod_s_isolation() {
    let world = World::new().with_node("n1", &[100]);
    let mut pod = units("limited", 50);
    pod["metadata"]["labels"] = json!({"koordinator.sh/gpu-isolation-provider": "HAMi-core"});
    world.apply_pod(&pod);
    assert_eq!(world.fitting(&pod, &["n1"]).await, Vec::<String>::new());
    let mut labelled = node("n1", "MiB");
    labelled["metadata"]["labels"] = json!({"koordinator.sh/gpu-isolation-provider": "HAMi-core"});
    let (fitting, _) = fitting_with(&world, &pod, async || world.apply_node(&labelled)).await;
    assert_eq!(fitting, ["n1"]);
}

/// The pod is created right after another was deleted. The watch shows both late, and in this order.
#[tokio::test(start_paused = true)]
async fn a_refusal_of_an_unseen_pod_waits_for_earlier_deletions() {
    let world = World::new().with_node("n1", &[100]);
    let (old, new) = (units("old", 80), units("new", 80));
    world.place(&old, "n1").await;
    let update = async || {
        world.delete_pod(&old);
        sleep(BEHIND).await;
        world.apply_pod(&new);
    };
    let (fitting, took) = fitting_with(&world, &new, update).await;
    assert_eq!(fitting, ["n1"]);
    assert!(took >= 2 * BEHIND, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_without_an_update_is_held_back_briefly_and_rarely() {
    let (world, ..) = full().await;
    let mut took = Vec::new();
    for _ in 0..3 {
        let began = Instant::now();
        assert_eq!(
            world.fitting(&units("waiting", 50), &["n1"]).await,
            Vec::<String>::new()
        );
        took.push(began.elapsed());
    }
    assert!(took[0] >= HOLD && took[0] < HOLD * 2, "{took:?}");
    assert_eq!(took[1..], [Duration::ZERO; 2], "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_recheck_is_counted_once() {
    let (world, holder, waiting) = full().await;
    fitting_with(&world, &waiting, async || world.delete_pod(&holder)).await;
    let (status, metrics) = world.send("GET", "/metrics", "").await;
    assert_eq!(status, StatusCode::OK);
    let lines: Vec<&str> = metrics
        .lines()
        .filter(|line| line.contains("_refused_nodes_total{") || line.contains("_thought_over_total{"))
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r#"
    gpushare_scheduler_refused_nodes_total{reason="memory"} 1
    gpushare_scheduler_refusals_thought_over_total{outcome="fits"} 1
    "#);
}
