//! Binds that wait for others on their way to the API server. Time is simulated.

use std::time::Duration;

use futures::future::join_all;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::api::Fault;
use crate::bind_outcomes::{n_assumed, stamp};
use crate::objects::{pod, units};
use crate::world::World;

const fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Nodes `n0`, `n1` and so on with one GPU each, and a limit of bindings under way.
fn world(n_nodes: usize, most: usize) -> World {
    (0..n_nodes).fold(World::with_bind_concurrency(most), |world, nth| {
        world.with_node(&format!("n{nth}"), &[16_276])
    })
}

/// Begins these binds in order, without waiting for the answers. Returns each error and the time that the bind took.
async fn bind_all(world: &World, binds: &[(Value, &str)]) -> Vec<(String, Duration)> {
    let begun = Instant::now();
    join_all(
        binds
            .iter()
            .map(async |(pod, node)| (world.bind(pod, node).await, begun.elapsed())),
    )
    .await
}

#[tokio::test(start_paused = true)]
async fn the_number_of_running_binds_is_limited_and_all_pods_are_bound() {
    let world = world(8, 3);
    let names: Vec<String> = (0..8).map(|nth| format!("n{nth}")).collect();
    let binds: Vec<(Value, &str)> = names
        .iter()
        .map(|node| (units(&format!("on-{node}"), 1), node.as_str()))
        .collect();
    let plain = pod("plain", &json!({"cpu": "1"}));
    let binds = [binds, vec![(plain, "n0")]].concat();
    let world = binds.iter().fold(world, |world, (pod, _)| world.with_pod(pod));
    world.api.fail_posts([Fault::Slow(millis(100)); 9]);
    let done = bind_all(&world, &binds).await;
    assert!(done.iter().all(|(error, _)| error.is_empty()), "{done:?}");
    let at: Vec<u128> = done.iter().map(|(_, taken)| taken.as_millis()).collect();
    assert_eq!(
        (world.api.most_posting(), at),
        (3, vec![100, 100, 100, 200, 200, 200, 300, 300, 300])
    );
}

/// No decision and no write is left behind, so that the pod may go elsewhere at once.
#[tokio::test(start_paused = true)]
async fn a_bind_that_waits_too_long_writes_nothing_and_frees_its_room() {
    let (hangs, waits, plain) = (
        units("hangs", 1),
        units("waits", 8138),
        pod("plain", &json!({"cpu": "1"})),
    );
    let world = [&hangs, &waits, &plain]
        .into_iter()
        .fold(world(3, 1), World::with_pod);
    world.api.fail_posts([Fault::Hang]);
    let done = bind_all(&world, &[(hangs, "n0"), (waits.clone(), "n1"), (plain, "n1")]).await;
    for (error, taken) in &done[1..] {
        assert_eq!(
            error,
            "nothing is written: there is no time left after waiting for other bindings to be written"
        );
        assert_eq!(*taken, Duration::from_secs(4));
    }
    assert_eq!((world.api.bindings().len(), world.used("n1").await), (1, vec![0]));
    assert_eq!(n_assumed(&world), 1, "the one that hangs");
    assert_eq!(world.bind(&waits, "n2").await, "");
}

/// The bindings of a node stay in order after a long wait for permits.
#[tokio::test(start_paused = true)]
async fn bindings_of_a_node_stay_in_order_behind_others() {
    let pods = ["x", "y", "a", "b", "c"].map(|name| units(name, 1));
    let world = pods.iter().fold(world(3, 2), World::with_pod);
    world
        .api
        .fail_posts([2000, 2000, 300, 200, 100].map(|n| Fault::Slow(millis(n))));
    let binds: Vec<(Value, &str)> = pods.into_iter().zip(["n0", "n1", "n2", "n2", "n2"]).collect();
    let done = bind_all(&world, &binds).await;
    assert!(done.iter().all(|(error, _)| error.is_empty()), "{done:?}");
    let at: Vec<u128> = done.iter().map(|(_, taken)| taken.as_millis()).collect();
    assert_eq!(at, [2000, 2000, 2300, 2500, 2600], "one after the other");
    let stamps: Vec<u64> = world.api.bindings().iter().map(stamp).collect();
    assert!(stamps.len() == 5 && stamps.is_sorted(), "{stamps:?}");
}

/// Bindings that wait for their node do not count as under way.
#[tokio::test(start_paused = true)]
async fn many_bindings_of_a_node_hold_up_no_other_node() {
    let pods = ["a", "b", "c", "x"].map(|name| units(name, 1));
    let world = pods.iter().fold(world(2, 2), World::with_pod);
    world.api.fail_posts([Fault::Slow(millis(200)); 4]);
    let binds: Vec<(Value, &str)> = pods.into_iter().zip(["n0", "n0", "n0", "n1"]).collect();
    let done = bind_all(&world, &binds).await;
    let at: Vec<u128> = done.iter().map(|(_, taken)| taken.as_millis()).collect();
    assert_eq!((world.api.most_posting(), at), (2, vec![200, 400, 600, 200]));
}

/// A binding without an answer keeps its permit until its timeout.
#[tokio::test(start_paused = true)]
async fn permits_are_free_again_after_a_timeout() {
    let pods = ["a", "b"].map(|name| units(name, 1));
    let world = pods.iter().fold(world(2, 1), World::with_pod);
    world.api.fail_posts([Fault::Hang]);
    assert_ne!(world.bind(&pods[0], "n0").await, "");
    let begun = Instant::now();
    assert_eq!(
        (world.bind(&pods[1], "n1").await.as_str(), begun.elapsed()),
        ("", Duration::ZERO)
    );
}
