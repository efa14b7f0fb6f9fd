//! Groups of pods that have to be on one node, or on the GPUs of one link group: from the members' marks to their devices.

use std::collections::BTreeSet;
use std::time::Duration;

use rstest::rstest;
use scheduler::config::MisfitNodes;
use scheduler::index::HintTimes;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::objects::{annotated, device, node, on, shared, units};
use crate::world::World;

pub(crate) const TTL: Duration = Duration::from_secs(30);
const RECORD: &str = "scheduling.koordinator.sh/device-allocated";

/// The mark of the members of the group.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    /// A `PodGroup` of Kubernetes, whose object a watch shows.
    Native,
    /// Koordinator's annotations, which have the size.
    Koordinator,
}

/// The Device object of a node with eight GPUs of 100 MiB, four on each NUMA node; those for which `is_healthy` returns false
/// are sick.
fn eight_gpus(name: &str, is_healthy: impl Fn(usize) -> bool) -> Value {
    let mut object = device(name, &[100; 8]);
    let entries = object["spec"]["devices"].as_array_mut().unwrap();
    for (minor, entry) in entries.iter_mut().enumerate() {
        entry["topology"] = json!({"socketID": -1, "nodeID": minor / 4, "pcieID": format!("0000:{minor:02x}:00.0"), "busID": ""});
        entry["health"] = is_healthy(minor).into();
    }
    object
}

/// Nodes with eight GPUs each.
pub(crate) fn world(nodes: &[&str]) -> World {
    let world = World::with_hint_times(HintTimes::all(TTL));
    for name in nodes {
        world.apply_node(&node(name, "MiB"));
        world.apply_device(&eight_gpus(name, |_| true));
    }
    world
}

/// A pod on GPUs of a node, by minor.
pub(crate) fn taking(world: &World, name: &str, node: &str, minors: &[u64]) {
    let parts: Vec<Value> = minors
        .iter()
        .map(|minor| json!({"minor": minor, "resources": {"koordinator.sh/gpu-memory-ratio": "100", "koordinator.sh/gpu-memory": "100Mi", "koordinator.sh/gpu-core": "0"}}))
        .collect();
    let pod = annotated(
        shared(name, minors.len() as u64, 100 * minors.len() as u64),
        RECORD,
        &json!({"gpu": parts}).to_string(),
    );
    world.apply_pod(&on(pod, node));
}

/// A member of a group of `min_count` that asks for a share of one GPU.
pub(crate) fn member(world: &World, mark: Mark, name: &str, mib: u64, min_count: u32, wish: &str) -> Value {
    marked(world, mark, shared(name, 1, mib), min_count, wish)
}

/// The pod as a member of the group, with a wish in words, such as `link required`.
fn marked(world: &World, mark: Mark, mut pod: Value, min_count: u32, wish: &str) -> Value {
    let (domain, policy) = wish.split_once(' ').unwrap();
    pod = annotated(pod, "gpushare/group-domain", domain);
    pod = annotated(pod, "gpushare/group-domain-policy", policy);
    match mark {
        Mark::Native => {
            pod["spec"]["schedulingGroup"] = json!({"podGroupName": "group"});
            let group = json!({
                "apiVersion": "scheduling.k8s.io/v1alpha2", "kind": "PodGroup",
                "metadata": {"name": "group", "namespace": "default"},
                "spec": {"schedulingPolicy": {"gang": {"minCount": min_count}}},
            });
            world.apply_pod_group(&group);
        }
        Mark::Koordinator => {
            pod = annotated(pod, "gang.scheduling.koordinator.sh/name", "group");
            let size = min_count.to_string();
            pod = annotated(pod, "gang.scheduling.koordinator.sh/min-available", &size);
        }
    }
    world.apply_pod(&pod);
    pod
}

/// The minors in the record of a bound pod.
fn minors(world: &World, pod: &Value) -> Vec<u64> {
    let record = world.api.pod(pod)["metadata"]["annotations"][RECORD].clone();
    let record: Value = serde_json::from_str(record.as_str().unwrap()).unwrap();
    let gpus = record["gpu"].as_array().unwrap();
    gpus.iter().map(|gpu| gpu["minor"].as_u64().unwrap()).collect()
}

/// Filters each pod on all nodes and returns the node of each, then binds all of them.
async fn run(world: &World, pods: &[Value], nodes: &[&str]) -> Vec<String> {
    let mut chosen = Vec::new();
    for pod in pods {
        let fitting = world.fitting(pod, nodes).await;
        assert_eq!(fitting.len(), 1, "{pod}");
        chosen.push(fitting[0].clone());
    }
    for (pod, node) in pods.iter().zip(&chosen) {
        world.api.put(pod);
        assert_eq!(world.bind(pod, node).await, "");
        world.check();
    }
    chosen
}

/// The text with which a pod is refused on all nodes.
pub(crate) async fn refusal(world: &World, pod: &Value, nodes: &[&str]) -> String {
    let answer = world.filter(pod, nodes).await;
    assert_eq!(answer["NodeNames"], json!([]), "{answer}");
    let mut texts: Vec<String> = Vec::new();
    for kind in ["FailedNodes", "FailedAndUnresolvableNodes"] {
        let of_kind = answer[kind].as_object().into_iter().flatten();
        texts.extend(of_kind.map(|(_, text)| text.as_str().unwrap().to_owned()));
    }
    texts.dedup();
    assert_eq!(texts.len(), 1, "{answer}");
    texts.remove(0)
}

pub(crate) fn members(world: &World, mark: Mark, n: usize, mib: u64, wish: &str) -> Vec<Value> {
    let n_members = u32::try_from(n).unwrap();
    let named = (0..n).map(|at| member(world, mark, &format!("m{at}"), mib, n_members, wish));
    named.collect()
}

/// Each NUMA node of n1 has three free GPUs, which is more than the first member needs and fewer than the group does.
#[rstest]
#[tokio::test(start_paused = true)]
async fn a_group_is_placed_where_one_link_group_holds_all_of_it(
    #[values(Mark::Native, Mark::Koordinator)] mark: Mark,
    #[values("link required", "link preferred")] wish: &str,
) {
    let world = world(&["n1", "n2"]);
    taking(&world, "a", "n1", &[0, 4]);
    taking(&world, "b", "n2", &[5]);
    let pods = members(&world, mark, 4, 100, wish);
    assert_eq!(run(&world, &pods, &["n1", "n2"]).await, ["n2"; 4]);
    let mut taken: Vec<u64> = pods.iter().flat_map(|pod| minors(&world, pod)).collect();
    taken.sort_unstable();
    assert_eq!(taken, [0, 1, 2, 3]);
}

#[rstest]
#[case::link(
    "link required",
    "no link group has room for 4 pods of 100 MiB of one GPU; the largest has room for 3"
)]
#[case::node(
    "node required",
    "no node has room for 7 pods of 100 MiB of one GPU; the largest has room for 6"
)]
#[tokio::test(start_paused = true)]
async fn a_required_domain_that_does_not_exist_refuses_every_member(
    #[values(Mark::Native, Mark::Koordinator)] mark: Mark,
    #[case] wish: &str,
    #[case] text: &str,
) {
    let world = world(&["n1", "n2"]);
    taking(&world, "a", "n1", &[0, 4]);
    taking(&world, "b", "n2", &[1, 5, 6]);
    let n = if wish.starts_with("link") { 4 } else { 7 };
    for pod in members(&world, mark, n, 100, wish) {
        assert_eq!(refusal(&world, &pod, &["n1", "n2"]).await, text);
    }
    assert_eq!(
        world.index.read().fleet().n_hints(),
        0,
        "no half of the group holds room"
    );
}

/// A preferred link group that does not exist gives way to one node, and one node to any.
#[rstest]
#[case::one_node(&[0, 4], &[], 4, "n2", 4)]
#[case::any_nodes(&[0, 1, 2, 3], &[0, 1, 2, 3], 6, "n1", 4)]
#[tokio::test(start_paused = true)]
async fn a_preferred_domain_that_does_not_exist_refuses_nothing(
    #[case] on_n1: &[u64],
    #[case] on_n2: &[u64],
    #[case] n: usize,
    #[case] node: &str,
    #[case] n_there: usize,
) {
    let world = world(&["n1", "n2"]);
    taking(&world, "a", "n1", on_n1);
    taking(&world, "b", "n2", on_n2);
    if on_n2.is_empty() {
        taking(&world, "c", "n2", &[0, 1, 4, 5]);
    }
    let pods = members(&world, Mark::Native, n, 100, "link preferred");
    let chosen = run(&world, &pods, &["n1", "n2"]).await;
    assert!(
        chosen.iter().filter(|of| *of == node).count() >= n_there,
        "{chosen:?}"
    );
}

/// The places of members that were not filtered yet are kept for the group alone, until the first member is bound.
#[tokio::test(start_paused = true)]
async fn open_places_are_kept_for_the_group_alone() {
    let world = world(&["n1"]);
    let pods = members(&world, Mark::Koordinator, 8, 100, "node required");
    assert_eq!(world.fitting(&pods[0], &["n1"]).await, ["n1"]);
    assert_eq!(world.index.read().fleet().n_hints(), 8);
    let other = units("other", 10);
    assert_eq!(world.fitting(&other, &["n1"]).await, [""; 0]);
    for pod in &pods[1..] {
        assert_eq!(world.fitting(pod, &["n1"]).await, ["n1"]);
    }
    assert_eq!(world.index.read().fleet().n_hints(), 8);
    sleep(TTL).await;
    assert_eq!(
        world.fitting(&other, &["n1"]).await,
        ["n1"],
        "the places end with the hints of the members"
    );
}

#[tokio::test(start_paused = true)]
async fn places_that_no_member_takes_are_free_once_a_member_is_bound() {
    let world = world(&["n1"]);
    let pods = members(&world, Mark::Koordinator, 8, 100, "node required");
    world.fitting(&pods[0], &["n1"]).await;
    world.fitting(&pods[1], &["n1"]).await;
    world.place(&pods[0], "n1").await;
    assert_eq!(world.index.read().fleet().n_hints(), 1);
    world.place(&pods[1], "n1").await;
    assert_eq!(world.index.read().fleet().n_hints(), 0);
}

/// A launcher asks for no GPU, so that the workers alone need room.
#[tokio::test(start_paused = true)]
async fn members_without_devices_need_no_room() {
    let world = world(&["n1"]);
    let launcher = crate::objects::pod("launcher", &json!({"cpu": "1"}));
    marked(&world, Mark::Native, launcher, 5, "link required");
    let pods: Vec<Value> = (0..4)
        .map(|at| member(&world, Mark::Native, &format!("m{at}"), 100, 5, "link required"))
        .collect();
    assert_eq!(run(&world, &pods, &["n1"]).await, ["n1"; 4]);
}

/// Members that are alike have their places from the first filter on; all others find room in the same link group.
#[tokio::test(start_paused = true)]
async fn members_with_other_requests_are_placed_in_the_same_domain() {
    let world = world(&["n1", "n2"]);
    taking(&world, "a", "n1", &[4, 5]);
    let member = |name, mib| member(&world, Mark::Native, name, mib, 5, "link required");
    let pods =
        [("l0", 100), ("s0", 30), ("l1", 100), ("s1", 30), ("l2", 100)].map(|(name, mib)| member(name, mib));
    run(&world, &pods, &["n1"]).await;
    let mut taken: Vec<u64> = pods.iter().flat_map(|pod| minors(&world, pod)).collect();
    taken.sort_unstable();
    taken.dedup();
    assert_eq!(taken, [0, 1, 2, 3]);
}

/// While members do not exist yet, each may need the room of the first.
#[tokio::test(start_paused = true)]
async fn a_member_with_another_request_takes_the_place_of_an_unknown_one() {
    let world = world(&["n1"]);
    let large = member(&world, Mark::Koordinator, "large", 100, 4, "link required");
    assert_eq!(world.fitting(&large, &["n1"]).await, ["n1"]);
    assert_eq!(world.index.read().fleet().n_hints(), 4);
    let small = member(&world, Mark::Koordinator, "small", 30, 4, "link required");
    assert_eq!(world.fitting(&small, &["n1"]).await, ["n1"]);
    assert_eq!(world.index.read().fleet().n_hints(), 4);
}

/// kube-scheduler tries one set of nodes after the other in one cycle, beginning with the first member each time.
#[tokio::test(start_paused = true)]
async fn another_set_of_nodes_in_one_cycle_gets_a_decision_of_its_own() {
    let world = world(&["n1", "n2"]);
    let mut pods = members(&world, Mark::Native, 4, 100, "link required");
    for pod in &mut pods {
        pod["status"] = json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"}]});
        world.apply_pod(pod);
    }
    let n_hints = || world.index.read().fleet().n_hints();
    for (nth, (n_kept, node)) in [(4, "n1"), (8, "n2"), (8, "n1"), (8, "n2")]
        .into_iter()
        .enumerate()
    {
        for pod in &pods {
            assert_eq!(world.fitting(pod, &[node]).await, [node]);
        }
        assert_eq!(n_hints(), n_kept, "the room in each set is kept once");
        if (nth, node) == (1, "n2") {
            let other = units("other", 1);
            world.apply_pod(&other);
            world.fitting(&other, &["n1"]).await;
            assert_eq!(
                n_hints(),
                9,
                "the cycle has two sets, and did not fail in the first"
            );
            world.delete_pod(&other);
        }
    }
    let late = member(&world, Mark::Native, "late", 100, 4, "link required");
    let text = refusal(&world, &late, &["n1"]).await;
    assert!(text.contains("is not among those asked about"), "{text}");
    sleep(TTL).await;
    world.fitting(&units("last", 1), &["n1"]).await;
    assert_eq!(n_hints(), 1, "no room is kept for ever");
    assert_eq!(run(&world, &pods, &["n2"]).await, ["n2"; 4]);
}

/// kube-scheduler tries the racks one after the other, and binds to the better one without asking again.
#[rstest]
#[case::the_last_had_no_room("link required", &[0, 4])]
#[case::the_last_had_room("link required", &[])]
#[case::preferred("link preferred", &[0, 4])]
#[case::the_last_had_no_domain("link preferred", &[0, 1, 2, 4, 5])]
#[tokio::test(start_paused = true)]
async fn a_group_is_bound_in_a_set_of_nodes_that_was_not_the_last(#[case] wish: &str, #[case] on_n1: &[u64]) {
    let world = world(&["n1", "n2"]);
    if !on_n1.is_empty() {
        taking(&world, "a", "n1", on_n1);
    }
    // The first NUMA node has too few GPUs for the group, and is the better one for a single member.
    taking(&world, "b", "n2", &[0]);
    let pods = members(&world, Mark::Native, 4, 100, wish);
    for rack in ["n2", "n1"] {
        for pod in &pods {
            world.filter(pod, &[rack]).await;
        }
    }
    let next = shared("next", 4, 400);
    world.apply_pod(&next);
    for (at, pod) in pods.iter().enumerate() {
        assert!(world.fitting(&next, &["n2"]).await.is_empty(), "{at} are bound");
        world.api.put(pod);
        assert_eq!(world.bind(pod, "n2").await, "");
        world.check();
    }
    let taken: BTreeSet<u64> = pods.iter().flat_map(|pod| minors(&world, pod)).collect();
    assert_eq!(taken, BTreeSet::from([4, 5, 6, 7]));
    assert_eq!(world.index.read().fleet().n_hints(), 0);
}

/// The GPU of a place becomes unhealthy between the filter and the bind: the member gets another GPU of the link group, or none.
#[tokio::test(start_paused = true)]
async fn a_bind_takes_the_place_or_refuses() {
    let world = world(&["n1"]);
    taking(&world, "a", "n1", &[3]);
    let pods = members(&world, Mark::Native, 3, 100, "link required");
    for pod in &pods {
        world.fitting(pod, &["n1"]).await;
        world.api.put(pod);
    }
    assert_eq!(world.bind(&pods[0], "n1").await, "");
    let first = minors(&world, &pods[0])[0];
    let link = if first < 4 { 0..4 } else { 4..8 };
    world.apply_device(&eight_gpus("n1", |minor| {
        !link.contains(&minor) || minor as u64 == first
    }));
    let error = world.bind(&pods[1], "n1").await;
    assert!(error.contains("belong together"), "{error}");
    world.check();
}

/// An object of Kubernetes' `PodGroup` wins over its pods, and is read at the first question of every cycle.
#[tokio::test(start_paused = true)]
async fn the_size_is_read_at_every_cycle() {
    let world = world(&["n1"]);
    taking(&world, "a", "n1", &[0, 4]);
    let pods = members(&world, Mark::Native, 4, 100, "link required");
    assert!(refusal(&world, &pods[0], &["n1"]).await.contains("4 pods"));
    // Only three of the four are needed now.
    member(&world, Mark::Native, "m3", 100, 3, "link required");
    assert_eq!(world.fitting(&pods[0], &["n1"]).await, ["n1"]);
}
/// Each decision for a group counts once, whatever the number of its members.
#[tokio::test(start_paused = true)]
async fn decisions_and_kept_rooms_are_counted() {
    let world = world(&["n1"]);
    for pod in members(&world, Mark::Native, 3, 100, "link preferred") {
        world.fitting(&pod, &["n1"]).await;
    }
    let (_, metrics) = world.send("GET", "/metrics", "").await;
    let lines = |name: &str| -> Vec<&str> { metrics.lines().filter(|line| line.starts_with(name)).collect() };
    assert_eq!(
        lines("gpushare_scheduler_group_decisions_total"),
        ["gpushare_scheduler_group_decisions_total{domain=\"link\",outcome=\"link\"} 1"]
    );
    assert_eq!(
        lines("gpushare_scheduler_group_rooms"),
        ["gpushare_scheduler_group_rooms 1"]
    );
}

/// A leader that died between two bindings has left a group of which two of four members are bound; its successor knows no
/// room, and keeps what the missing members need before it answers another pod.
#[rstest]
#[case::link("link required", "other", [""; 0].as_slice())]
#[case::any("any preferred", "other", [""; 0].as_slice())]
#[case::a_missing_member("link required", "m3", ["n1"].as_slice())]
#[tokio::test(start_paused = true)]
async fn room_is_kept_for_the_missing_members_of_a_group_that_has_started(
    #[values(Mark::Native, Mark::Koordinator)] mark: Mark,
    #[case] wish: &str,
    #[case] asked: &str,
    #[case] expected: &[&str],
) {
    let world = world(&["n1"]);
    taking(&world, "a", "n1", &[4, 5, 6, 7]);
    for (minor, name) in [(0, "m0"), (1, "m1")] {
        let part = json!({"gpu": [{"minor": minor, "resources": {"koordinator.sh/gpu-memory": "100Mi"}}]});
        let bound = annotated(
            member(&world, mark, name, 100, 4, wish),
            RECORD,
            &part.to_string(),
        );
        world.apply_pod(&on(bound, "n1"));
    }
    for name in ["m2", "m3"] {
        member(&world, mark, name, 100, 4, wish);
    }
    let pod = if asked == "other" {
        units("other", 10)
    } else {
        member(&world, mark, asked, 100, 4, wish)
    };
    assert_eq!(world.fitting(&pod, &["n1"]).await, expected);
    assert_eq!(world.index.read().fleet().n_hints(), 2);
    sleep(TTL).await;
    let late = units("late", 10);
    assert_eq!(
        world.fitting(&late, &["n1"]).await,
        ["n1"],
        "nothing is kept for ever"
    );
}

/// kube-scheduler reports the bind that failed with the former leader when the new one has kept room for the pod already.
#[tokio::test(start_paused = true)]
async fn a_report_of_an_earlier_attempt_ends_no_room_of_a_started_group() {
    let world = world(&["n1"]);
    taking(&world, "a", "n1", &[4, 5, 6, 7]);
    let part = json!({"gpu": [{"minor": 0, "resources": {"koordinator.sh/gpu-memory": "100Mi"}}]});
    let bound = member(&world, Mark::Native, "m0", 100, 4, "link required");
    world.apply_pod(&on(annotated(bound, RECORD, &part.to_string()), "n1"));
    let missing = ["m1", "m2", "m3"].map(|name| member(&world, Mark::Native, name, 100, 4, "link required"));
    let other = units("other", 10);
    assert!(world.fitting(&other, &["n1"]).await.is_empty());
    for mut pod in missing {
        pod["status"] = json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulerError", "message": "bind"}]});
        world.apply_pod(&pod);
    }
    assert!(world.fitting(&other, &["n1"]).await.is_empty());
}

/// Members differ in their wishes, and the group has none of its own.
#[tokio::test(start_paused = true)]
async fn the_wish_of_the_first_member_counts_for_its_cycle() {
    let world = world(&["n1", "n2"]);
    taking(&world, "a", "n1", &[0, 4]);
    taking(&world, "b", "n2", &[5]);
    let first = member(&world, Mark::Native, "m0", 100, 4, "link required");
    let mut pods = vec![first];
    for name in ["m1", "m2", "m3"] {
        pods.push(member(&world, Mark::Native, name, 100, 4, "any preferred"));
    }
    assert_eq!(run(&world, &pods, &["n1", "n2"]).await, ["n2"; 4]);
}

/// kube-scheduler 1.38 would look for victims on nodes that are refused for want of room, for one member of the group alone.
#[tokio::test(start_paused = true)]
async fn no_pod_is_evicted_for_a_refused_group() {
    let world = World::with_misfit_nodes(MisfitNodes::Resolvable).with_node("n1", &[100, 100]);
    let pods = members(&world, Mark::Koordinator, 3, 100, "node required");
    let answer = world.filter(&pods[0], &["n1"]).await;
    assert!(answer["FailedAndUnresolvableNodes"]["n1"].is_string(), "{answer}");
}

/// A launcher that is filtered leaves the room of the other members as it is.
#[tokio::test(start_paused = true)]
async fn a_member_without_devices_begins_no_cycle() {
    let world = world(&["n1"]);
    let wish = "link required";
    let part = json!({"gpu": [{"minor": 0, "resources": {"koordinator.sh/gpu-memory": "100Mi"}}]});
    let bound = member(&world, Mark::Native, "m0", 100, 2, wish);
    world.apply_pod(&on(annotated(bound, RECORD, &part.to_string()), "n1"));
    member(&world, Mark::Native, "m1", 100, 2, wish);
    world.fitting(&units("other", 10), &["n1"]).await;
    let n_hints = || world.index.read().fleet().n_hints();
    assert_eq!(n_hints(), 2, "of the other pod, and of the missing member");
    let launcher = crate::objects::pod("launcher", &json!({"cpu": "1"}));
    let launcher = marked(&world, Mark::Native, launcher, 2, wish);
    world.fitting(&launcher, &["n1"]).await;
    assert_eq!(n_hints(), 2);
}

/// Members that wait in Permit keep their room while kube-scheduler asks about another one again and again.
#[tokio::test(start_paused = true)]
async fn a_member_that_finds_no_room_takes_none_from_the_others() {
    let world = world(&["n1", "n2"]);
    taking(&world, "a", "n1", &[0, 1, 2, 4, 5, 6]);
    taking(&world, "b", "n2", &[0, 1, 2, 3, 4, 5, 6]);
    let pods = members(&world, Mark::Koordinator, 4, 100, "link preferred");
    for pod in &pods[..3] {
        assert_eq!(world.fitting(pod, &["n1", "n2"]).await.len(), 1);
    }
    for _ in 0..3 {
        assert_eq!(world.fitting(&pods[3], &["n1", "n2"]).await, [""; 0]);
        assert_eq!(world.index.read().fleet().n_hints(), 3);
    }
}

/// An autoscaler asks about nodes that do not exist, with pods that kube-scheduler is placing.
#[tokio::test(start_paused = true)]
async fn questions_about_whole_nodes_leave_the_room_of_a_group_as_it_is() {
    let world = world(&["n1"]);
    let pods = members(&world, Mark::Native, 2, 100, "link required");
    for pod in &pods {
        world.fitting(pod, &["n1"]).await;
    }
    world.filter_whole(&pods[0], &[node("template", "MiB")]).await;
    assert_eq!(world.index.read().fleet().n_hints(), 2);
}

/// After the cycle in which all members found room, questions about one of them take nothing from those that are being bound.
#[rstest]
#[case::nominated(true)]
#[case::being_bound(false)]
#[tokio::test(start_paused = true)]
async fn members_that_are_being_bound_keep_their_places(#[case] are_nominated: bool) {
    let world = world(&["n1", "n2"]);
    let pods = members(&world, Mark::Native, 3, 100, "link required");
    for pod in &pods {
        assert_eq!(world.fitting(pod, &["n1"]).await, ["n1"]);
        world.api.put(pod);
    }
    if are_nominated {
        for pod in &pods {
            let mut nominated = pod.clone();
            nominated["metadata"]["resourceVersion"] = "9".into();
            nominated["status"]["nominatedNodeName"] = "n1".into();
            world.apply_pod(&nominated);
        }
    } else {
        assert_eq!(world.bind(&pods[0], "n1").await, "");
    }
    // One more than the group needs.
    let late = member(&world, Mark::Native, "late", 100, 3, "link required");
    for _ in 0..2 {
        assert_eq!(world.fitting(&late, &["n1"]).await, ["n1"]);
        let expected = if are_nominated { 4 } else { 3 };
        assert_eq!(world.index.read().fleet().n_hints(), expected);
    }
    for pod in &pods {
        assert_eq!(world.bind(pod, "n1").await, "");
    }
    let link: BTreeSet<u64> = pods
        .iter()
        .flat_map(|pod| minors(&world, pod))
        .map(|minor| minor / 4)
        .collect();
    assert_eq!(link.len(), 1);
}

/// No room is known after a change of the leader: the domain of the members that are bound holds all the same.
#[rstest]
#[tokio::test(start_paused = true)]
async fn a_bind_without_kept_room_stays_in_the_domain(
    #[values("link required", "link preferred")] wish: &str,
) {
    let world = world(&["n1"]);
    let on_gpu = |pod: Value, mib: u64, minor: u64| {
        let resources = json!({"koordinator.sh/gpu-memory": format!("{mib}Mi")});
        let record = json!({"gpu": [{"minor": minor, "resources": resources}]});
        on(annotated(pod, RECORD, &record.to_string()), "n1")
    };
    // The second member fits best beside this pod, on the other link group.
    world.apply_pod(&on_gpu(shared("beside", 1, 40), 40, 5));
    let first = member(&world, Mark::Native, "m0", 60, 2, wish);
    world.apply_pod(&on_gpu(first, 60, 0));
    let second = member(&world, Mark::Native, "m1", 60, 2, wish);
    world.api.put(&second);
    assert_eq!(world.bind(&second, "n1").await, "");
    assert_eq!(minors(&world, &second)[0] / 4, 0);
}

/// The first member of a group would fix a domain for the others.
#[rstest]
#[case::required("link required", "belong together")]
#[case::preferred("link preferred", "")]
#[tokio::test(start_paused = true)]
async fn a_bind_without_kept_room_looks_for_room_for_all(#[case] wish: &str, #[case] text: &str) {
    let world = world(&["n1"]);
    taking(&world, "a", "n1", &[0, 4]);
    let pods = members(&world, Mark::Native, 4, 100, wish);
    world.api.put(&pods[0]);
    let error = world.bind(&pods[0], "n1").await;
    assert!(
        error.contains(text) && error.is_empty() == text.is_empty(),
        "{error}"
    );
}

/// The other members are about to be bound, in any order, while kube-scheduler filters the next pod.
#[tokio::test(start_paused = true)]
async fn a_bind_without_kept_room_keeps_room_for_the_others() {
    let world = world(&["n1"]);
    taking(&world, "a", "n1", &[0]);
    let pods = members(&world, Mark::Native, 4, 100, "link required");
    let too_large = shared("too-large", 8, 800);
    assert!(world.fitting(&too_large, &["n1"]).await.is_empty());
    world.api.put(&pods[0]);
    assert_eq!(world.bind(&pods[0], "n1").await, "");
    let next = shared("next", 4, 400);
    world.apply_pod(&next);
    assert!(world.fitting(&next, &["n1"]).await.is_empty());
    for pod in &pods[1..] {
        world.api.put(pod);
        assert_eq!(world.bind(pod, "n1").await, "");
    }
    world.check();
}

/// The group is known to have failed: no other pod waits for its room in any set of nodes.
#[tokio::test(start_paused = true)]
async fn a_failed_group_keeps_no_room_in_the_sets_that_were_tried() {
    let world = world(&["n1", "n2"]);
    let pods = members(&world, Mark::Native, 4, 100, "link required");
    for node in ["n1", "n2"] {
        for pod in &pods {
            world.fitting(pod, &[node]).await;
        }
    }
    for mut pod in pods {
        pod["status"] = json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"}]});
        world.apply_pod(&pod);
    }
    assert_eq!(world.index.read().fleet().n_hints(), 0);
}

/// A member with another request finds no place on the node of a preferred domain, and is bound first.
#[tokio::test(start_paused = true)]
async fn a_member_that_is_placed_apart_takes_no_room_from_the_others() {
    let world = world(&["n1", "n2"]);
    taking(&world, "a", "n1", &[3, 4, 5, 6, 7]);
    let mut pods = members(&world, Mark::Native, 3, 100, "node preferred");
    pods.push(marked(
        &world,
        Mark::Native,
        shared("apart", 4, 400),
        4,
        "node preferred",
    ));
    let mut chosen = Vec::new();
    for pod in &pods {
        chosen.push(world.fitting(pod, &["n1", "n2"]).await.concat());
    }
    assert_eq!(chosen, ["n1", "n1", "n1", "n2"]);
    let last = &pods[3];
    world.api.put(last);
    assert_eq!(world.bind(last, "n2").await, "");
    let other = units("other", 10);
    assert!(world.fitting(&other, &["n1"]).await.is_empty());
}

/// A member that takes the place of one that has ended needs room for itself alone, beside members with other requests.
#[tokio::test(start_paused = true)]
async fn a_replaced_member_finds_its_link_group_again() {
    let world = world(&["n1", "n2"]);
    let large = |name| member(&world, Mark::Native, name, 100, 5, "link required");
    let small = |name| member(&world, Mark::Native, name, 30, 5, "link required");
    let pods = [large("l0"), large("l1"), large("l2"), small("s0"), small("s1")];
    run(&world, &pods, &["n1"]).await;
    for pod in &pods {
        world.see(pod);
    }
    world.delete_pod(&pods[2]);
    let again = large("l3");
    assert_eq!(world.fitting(&again, &["n1", "n2"]).await, ["n1"]);
}

/// A GPU of an open place falls sick: the members that are left have GPUs of their own, or are refused.
#[tokio::test(start_paused = true)]
async fn no_gpu_is_promised_to_two_members() {
    let world = world(&["n1"]);
    taking(&world, "a", "n1", &[4, 5, 6, 7]);
    let pods = members(&world, Mark::Native, 4, 100, "link required");
    assert_eq!(world.fitting(&pods[0], &["n1"]).await, ["n1"]);
    world.apply_device(&eight_gpus("n1", |minor| minor != 3));
    let mut n_placed = 1;
    for pod in &pods[1..] {
        n_placed += world.fitting(pod, &["n1"]).await.len();
    }
    assert_eq!(n_placed, 3);
}

/// The GPU of the next open place falls sick, and a member takes that of another one: room for the last member is chosen again.
#[tokio::test(start_paused = true)]
async fn open_places_are_chosen_again_beside_a_member_that_takes_one_of_them() {
    let world = world(&["n1"]);
    taking(&world, "a", "n1", &[4, 5, 6, 7]);
    let pods = members(&world, Mark::Native, 3, 100, "link required");
    assert_eq!(world.fitting(&pods[0], &["n1"]).await, ["n1"]);
    world.apply_device(&eight_gpus("n1", |minor| minor != 2));
    assert_eq!(world.fitting(&pods[1], &["n1"]).await, ["n1"]);
    let other = shared("other", 1, 100);
    assert!(world.fitting(&other, &["n1"]).await.is_empty());
    assert_eq!(world.fitting(&pods[2], &["n1"]).await, ["n1"]);
}
