//! Announcements of room that opens without an event for kube-scheduler, while refused pods wait.

use std::sync::Arc;
use std::time::Duration;

use rstest::rstest;
use scheduler::config::Serving;
use scheduler::extender::{bind, requeue};
use scheduler::leader::Leadership;
use scheduler::room::Room;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::api::Fault;
use crate::objects::{device, node, units};
use crate::world::{HINT, World};

/// A little more than the time between two polls for opened room.
const SOON: Duration = Duration::from_millis(300);
const SECOND: Duration = Duration::from_secs(1);

/// One GPU of 100 MiB, and a scheduler that has made its first announcement.
async fn world() -> World {
    let world = World::new().with_node("n1", &[100]);
    announcing(&world);
    sleep(2 * SECOND).await;
    assert_eq!(
        world.api.applied().len(),
        1,
        "an earlier process may have refused pods"
    );
    world
}

fn announcing(world: &World) {
    tokio::spawn(requeue::announce_room(
        Arc::clone(&world.extender),
        Room::new(world.api.client(), "gpu".to_owned()),
    ));
    tokio::spawn(bind::sweep_unseen(Arc::clone(&world.extender)));
}

/// The number of announcements since the first.
fn n_announced(world: &World) -> usize {
    world.api.applied().len() - 1
}

async fn refused(world: &World, name: &str) -> Value {
    let pod = units(name, 80);
    assert_eq!(world.fitting(&pod, &["n1"]).await, Vec::<String>::new());
    pod
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_hint_is_announced_without_any_request() {
    let world = world().await;
    assert_eq!(world.fitting(&units("first", 80), &["n1"]).await, ["n1"]);
    let late = refused(&world, "late").await;
    sleep(HINT.checked_sub(SECOND).unwrap()).await;
    assert_eq!(n_announced(&world), 0, "room is still kept");
    sleep(SECOND + SOON).await;
    assert_eq!(n_announced(&world), 1);
    assert_eq!(world.fitting(&late, &["n1"]).await, ["n1"]);
    let (url, mut object) = world.api.applied().pop().unwrap();
    assert_eq!(
        url,
        "/apis/storage.k8s.io/v1/namespaces/gpu/csistoragecapacities/gpushare-room?fieldManager=gpushare-scheduler&force=true"
    );
    object["metadata"]["annotations"]["gpushare/room-opened"] = "a time".into();
    let labels =
        json!({"app.kubernetes.io/name": "gpushare-scheduler", "app.kubernetes.io/part-of": "gpushare"});
    let annotations = json!({"gpushare/room-opened": "a time"});
    let metadata =
        json!({"name": "gpushare-room", "namespace": "gpu", "labels": labels, "annotations": annotations});
    let expected = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "CSIStorageCapacity", "metadata": metadata, "storageClassName": "gpushare-room",
    });
    assert_eq!(object, expected, "storage that no class has and no node reaches");
    let times: Vec<Value> = world
        .api
        .applied()
        .iter()
        .map(|(_, object)| object["metadata"]["annotations"].clone())
        .collect();
    assert_ne!(times[0], times[1], "an object that stays the same is no event");
    let (_, metrics) = world.send("GET", "/metrics", "").await;
    assert!(
        metrics.contains("gpushare_scheduler_room_announced_total 2"),
        "{metrics}"
    );
}

#[tokio::test(start_paused = true)]
async fn nothing_is_announced_if_no_pod_waits() {
    let world = world().await;
    assert_eq!(world.fitting(&units("first", 80), &["n1"]).await, ["n1"]);
    sleep(HINT * 3).await;
    assert_eq!(n_announced(&world), 0);
}

/// kube-scheduler sees that a bound pod ends, and tries the refused pod again; if it does not, it did so too early.
#[tokio::test(start_paused = true)]
async fn room_with_an_event_is_announced_if_kube_scheduler_does_not_retry() {
    let world = world().await;
    let holder = units("holder", 80);
    world.place(&holder, "n1").await;
    refused(&world, "late").await;
    world.delete_pod(&holder);
    sleep(14 * SECOND).await;
    assert_eq!(n_announced(&world), 0);
    sleep(SECOND + SOON).await;
    assert_eq!(n_announced(&world), 1);
}

/// kube-scheduler has seen the end of a pod, and tried the refused one, seconds before this process's watch shows that end.
#[rstest]
#[case::tried_for_the_room(2, 1)]
#[case::tried_for_something_else(6, 0)]
#[tokio::test(start_paused = true)]
async fn room_that_the_watch_shows_late_is_announced_at_once(#[case] seconds: u32, #[case] expected: usize) {
    let world = world().await;
    let holder = units("holder", 80);
    world.place(&holder, "n1").await;
    let late = refused(&world, "late").await;
    world.apply_pod(&late);
    sleep(20 * SECOND).await;
    refused(&world, "late").await;
    sleep(seconds * SECOND).await;
    world.delete_pod(&holder);
    sleep(SOON).await;
    assert_eq!(n_announced(&world), expected);
    assert_eq!(world.fitting(&late, &["n1"]).await, ["n1"]);
}

/// The binding was written and its pod deleted while the watch was down.
#[tokio::test(start_paused = true)]
async fn a_binding_that_a_list_leaves_out_is_checked_when_the_list_is_complete() {
    let world = world().await;
    let pod = units("p", 80);
    world.api.put(&pod);
    world.apply_pod(&pod);
    assert_eq!(world.bind(&pod, "n1").await, "");
    let late = refused(&world, "late").await;
    world.api.remove(&pod);
    world.list::<proto::pod::Pod>(std::slice::from_ref(&late));
    sleep(Duration::from_millis(10)).await;
    assert_eq!(world.used("n1").await, [0], "at once, not in the next sweep");
    sleep(SOON).await;
    assert_eq!(n_announced(&world), 1);
}

#[tokio::test(start_paused = true)]
async fn announcements_are_a_second_apart_and_the_last_is_not_lost() {
    let world = world().await;
    world.apply_device(&device("n1", &[9]));
    for nth in 0..8 {
        refused(&world, "late").await;
        world.apply_device(&device("n1", &[10 + nth]));
        sleep(SOON / 2).await;
    }
    refused(&world, "late").await;
    world.apply_device(&device("n1", &[100]));
    let within = n_announced(&world);
    assert!((1..=2).contains(&within), "{within}");
    sleep(SECOND + SOON).await;
    assert_eq!(n_announced(&world), within + 1);
    sleep(60 * SECOND).await;
    assert_eq!(n_announced(&world), within + 1);
}

/// Without the right to write the object, refused pods wait for the next event.
#[rstest]
#[case::forbidden(Fault::Status(403), 60)]
#[case::busy(Fault::Status(500), 5)]
#[case::broken(Fault::Break, 5)]
#[tokio::test(start_paused = true)]
async fn a_failed_announcement_is_repeated(#[case] fault: Fault, #[case] pause: u64) {
    let world = world().await;
    assert_eq!(world.fitting(&units("first", 80), &["n1"]).await, ["n1"]);
    let late = refused(&world, "late").await;
    world.api.fail_applies([fault, fault]);
    sleep(HINT + SOON).await;
    assert_eq!(n_announced(&world), 1);
    sleep(Duration::from_secs(2 * pause - 2)).await;
    assert_eq!(n_announced(&world), 2);
    sleep(3 * SECOND).await;
    assert_eq!(n_announced(&world), 3);
    sleep(Duration::from_secs(2 * pause)).await;
    assert_eq!(n_announced(&world), 3);
    assert_eq!(world.fitting(&late, &["n1"]).await, ["n1"]);
}

#[tokio::test(start_paused = true)]
async fn a_replica_without_leadership_announces_nothing() {
    let world = World::with_leadership(&Serving::default(), Leadership::standby());
    world.list::<proto::node::Node>(&[node("n1", "MiB")]);
    world.list::<scheduler::index::RawDevice>(&[device("n1", &[100])]);
    world.list::<proto::pod::Pod>(&[]);
    announcing(&world);
    sleep(60 * SECOND).await;
    assert_eq!(world.api.applied(), []);
}

/// A member of a coscheduling plugin's gang whose hint expired is refused for a while, and tried again after that.
#[tokio::test(start_paused = true)]
async fn the_end_of_the_pause_of_a_gang_is_announced() {
    let world = world().await;
    let mut member = units("member", 80);
    member["metadata"]["labels"] = json!({"scheduling.x-k8s.io/pod-group": "gang"});
    assert_eq!(world.fitting(&member, &["n1"]).await, ["n1"]);
    sleep(HINT + SOON).await;
    assert_eq!(world.fitting(&member, &["n1"]).await, Vec::<String>::new());
    let (_, metrics) = world.send("GET", "/metrics", String::new()).await;
    let is_counted = metrics.contains("unplaced_pods{reason=\"gang_paused\"} 1");
    assert!(is_counted && !metrics.contains("invalid_request"), "{metrics}");
    sleep(HINT + SOON).await;
    assert_eq!(n_announced(&world), 1);
    assert_eq!(world.fitting(&member, &["n1"]).await, ["n1"]);
}
