//! The time for which the extender keeps room for a pod that is not bound yet, and the pods that it refuses because of it.

use std::time::Duration;

use rstest::rstest;
use scheduler::index::HintTimes;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::objects::{device, node, on, placed_by_old_extender, units};
use crate::world::World;

const TIMES: HintTimes = HintTimes {
    plain: Duration::from_secs(30),
    claims: Duration::from_secs(600),
    nominated: Duration::from_secs(1800),
};

/// One GPU of 100 MiB on each node.
fn world(nodes: &[&str]) -> World {
    nodes.iter().fold(World::with_hint_times(TIMES), |world, name| {
        world.with_node(name, &[100])
    })
}

/// The pod at a version, with the text of its last failed attempt and the node that it is nominated to.
fn shown(pod: &Value, version: u64, failure: Option<(&str, &str)>, nominated: Option<&str>) -> Value {
    let mut pod = pod.clone();
    pod["metadata"]["resourceVersion"] = version.to_string().into();
    pod["status"]["nominatedNodeName"] = nominated.into();
    if let Some((reason, message)) = failure {
        pod["status"]["conditions"] =
            json!([{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]);
    }
    pod
}

/// Returns true if another pod finds room on the node now, and removes the hint that the question left.
async fn is_free(world: &World, node: &str) -> bool {
    let other = units("other", 80);
    let fits = world.fitting(&other, &[node]).await == [node];
    world.index.write().unhint("uid-other");
    fits
}

async fn refusal(world: &World, pod: &Value, names: &[&str]) -> String {
    let answer = world.filter(pod, names).await;
    assert_eq!(answer["NodeNames"], json!([]), "{answer}");
    let texts = answer["FailedAndUnresolvableNodes"].as_object().unwrap().values();
    let mut texts: Vec<&str> = texts.map(|text| text.as_str().unwrap()).collect();
    texts.sort_unstable();
    texts.dedup();
    texts.join("; ")
}

async fn tried_again(world: &World, cause: &str) -> u64 {
    let (_, metrics) = world.send("GET", "/metrics", "").await;
    let name = format!("gpushare_scheduler_refusals_tried_again_total{{cause=\"{cause}\"}} ");
    metrics
        .lines()
        .find_map(|line| line.strip_prefix(&name))
        .map_or(0, |count| count.parse().unwrap())
}

#[tokio::test(start_paused = true)]
async fn room_is_kept_for_as_long_as_the_nomination_names_the_node() {
    let (world, pod) = (world(&["n1"]), units("waiting", 80));
    world.fitting(&shown(&pod, 5, None, None), &["n1"]).await;
    world.apply_pod(&shown(&pod, 6, None, Some("n1")));
    sleep(TIMES.plain * 10).await;
    assert!(
        !is_free(&world, "n1").await,
        "kube-scheduler waits in Permit or PreBind"
    );
    world.apply_pod(&shown(
        &pod,
        7,
        Some(("Unschedulable", "rejected by Permit")),
        None,
    ));
    assert!(is_free(&world, "n1").await, "the nomination is gone");

    let second = units("second", 80);
    world.fitting(&shown(&second, 8, None, None), &["n1"]).await;
    world.apply_pod(&shown(&second, 9, None, Some("n1")));
    assert!(!is_free(&world, "n1").await);
    sleep(TIMES.nominated).await;
    assert!(is_free(&world, "n1").await, "nothing is kept for ever");
}

#[tokio::test(start_paused = true)]
async fn room_for_a_pod_with_volumes_is_kept_while_kube_scheduler_waits_for_them() {
    let world = world(&["n1"]);
    let mut pod = units("waiting", 80);
    pod["spec"]["volumes"] = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]);
    world.fitting(&pod, &["n1"]).await;
    sleep(TIMES.claims.checked_sub(Duration::from_secs(1)).unwrap()).await;
    assert!(!is_free(&world, "n1").await);
    sleep(Duration::from_secs(1)).await;
    assert!(is_free(&world, "n1").await);
}

#[tokio::test(start_paused = true)]
async fn room_is_kept_until_a_failed_attempt_that_is_newer_than_the_decision() {
    let (world, pod) = (world(&["n1"]), units("p", 80));
    let before = ("Unschedulable", "0/1 nodes are available");
    world.fitting(&shown(&pod, 5, Some(before), None), &["n1"]).await;
    world.apply_pod(&shown(&pod, 4, Some(("SchedulerError", "long ago")), None));
    assert!(!is_free(&world, "n1").await, "the watch is behind");
    world.apply_pod(&shown(&pod, 6, Some(before), None));
    assert!(
        !is_free(&world, "n1").await,
        "an older failure in a newer version"
    );
    world.apply_pod(&shown(
        &pod,
        7,
        Some(("Unschedulable", "rejected by another plugin")),
        None,
    ));
    assert!(is_free(&world, "n1").await);
}

/// A preemptor is nominated before room is decided on for it; a filter that times out takes the nomination away.
#[tokio::test(start_paused = true)]
async fn the_room_of_a_preemptor_outlasts_one_cycle_that_ends_in_an_error() {
    let (world, pod) = (world(&["n1"]), units("preemptor", 80));
    let victim = units("victim", 80);
    world.place(&victim, "n1").await;
    world.apply_pod(&shown(&pod, 5, Some(("Unschedulable", "preempts")), Some("n1")));
    assert!(!is_free(&world, "n1").await);
    world.delete_pod(&victim);
    assert!(
        !is_free(&world, "n1").await,
        "room is kept from the moment on at which the victim goes"
    );
    let error = |text| Some(("SchedulerError", text));
    world.apply_pod(&shown(&pod, 6, error("filter timed out"), None));
    assert!(!is_free(&world, "n1").await);
    assert_eq!(
        world
            .fitting(&shown(&pod, 6, error("filter timed out"), None), &["n1"])
            .await,
        ["n1"]
    );
    world.apply_pod(&shown(&pod, 7, error("filter timed out again"), None));
    assert!(is_free(&world, "n1").await, "twice is once too often");
}

/// As after a restart of the scheduler in the middle of a wait.
#[tokio::test(start_paused = true)]
async fn room_is_kept_for_pods_that_are_nominated_in_the_first_list() {
    let world = world(&[]);
    world.list::<proto::pod::Pod>(&[shown(&units("waiting", 80), 5, None, Some("n1"))]);
    let world = world.with_node("n1", &[100]);
    assert!(!is_free(&world, "n1").await);
    world.apply_pod(&on(units("waiting", 80), "n1"));
    assert_eq!(world.index.read().snapshot().n_hints, 0);
}

/// kube-scheduler tries a pod again whose condition changes, which helps nothing before the hint ends.
#[tokio::test(start_paused = true)]
async fn a_pod_that_is_refused_because_of_a_hint_is_not_tried_again_before_it_ends() {
    let (world, late) = (world(&["n1", "n2"]), units("late", 80));
    world.place(&units("holder", 80), "n2").await;
    world.fitting(&units("first", 80), &["n1", "n2"]).await;
    for _ in 0..3 {
        assert_eq!(
            refusal(&world, &late, &["n1", "n2"]).await,
            "not enough free GPU memory on any one GPU of the node (asked: 80 MiB (80 units of 1 MiB) of one GPU)"
        );
    }
    sleep(TIMES.plain).await;
    assert_eq!(world.fitting(&late, &["n1", "n2"]).await, ["n1"]);
}

/// A member of a gang by its `PodGroup`, or by the label of a coscheduling plugin.
fn member(name: &str, in_pod_group: bool) -> Value {
    let mut pod = units(name, 80);
    if in_pod_group {
        pod["spec"]["schedulingGroup"] = json!({"podGroupName": "gang"});
    } else {
        pod["metadata"]["labels"] = json!({"scheduling.x-k8s.io/pod-group": "gang"});
    }
    pod
}

/// The same member once kube-scheduler has written that its gang does not fit.
fn failed(member: &Value) -> Value {
    shown(
        member,
        7,
        Some(("Unschedulable", "pod group is unschedulable")),
        None,
    )
}

/// Two members of a gang that are asked about in every cycle of their group, with preferences among nodes even.
#[rstest]
#[tokio::test(start_paused = true)]
async fn members_of_a_gang_are_never_sent_to_the_same_gpu(#[values(true, false)] in_pod_group: bool) {
    let world = world(&["n1", "n2", "n3"]);
    let picky = |name: &str| {
        let mut pod = member(name, in_pod_group);
        pod["spec"]["topologySpreadConstraints"] =
            json!([{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]);
        pod
    };
    let (a, b, names) = (picky("a"), picky("b"), ["n1", "n2", "n3"]);
    for cycle in 0..10 {
        let (first, second) = (world.fitting(&a, &names).await, world.fitting(&b, &names).await);
        assert_eq!((first.len(), second.len()), (1, 1), "cycle {cycle}");
        assert_ne!(first, second, "cycle {cycle}");
        assert_eq!(world.index.read().snapshot().n_hints, 2, "cycle {cycle}");
        // A placement that the group does not fit in drops no room that was kept for another.
        assert_eq!(world.fitting(&a, &[]).await, Vec::<String>::new());
        assert_eq!(world.index.read().snapshot().n_hints, 2, "cycle {cycle}");
        sleep(Duration::from_secs(2)).await;
    }
    sleep(TIMES.plain).await;
    if !in_pod_group {
        let texts = [
            refusal(&world, &a, &names).await,
            refusal(&world, &a, &names).await,
        ];
        assert_eq!(
            texts[0], texts[1],
            "room is for others for a while, and nothing is promised without room"
        );
        assert!(
            texts[0].contains("the room is for others for a while"),
            "{texts:?}"
        );
        sleep(TIMES.plain).await;
    }
    assert_ne!(world.fitting(&a, &names).await, world.fitting(&b, &names).await);
}

/// As an idle kube-scheduler 1.36 does: a group that does not fit is tried again twice a second, for minutes, and nothing that it
/// writes changes after the first cycle.
#[tokio::test(start_paused = true)]
async fn a_group_that_does_not_fit_never_has_all_members_placed() {
    let (world, names) = (world(&["n1", "n2"]), ["n1", "n2"]);
    let members = ["a", "b", "c"].map(|name| member(name, true));
    for cycle in 0..200 {
        let mut n_placed = 0;
        for pod in &members {
            let pod = if cycle == 0 { pod.clone() } else { failed(pod) };
            n_placed += world.fitting(&pod, &names).await.len();
            sleep(Duration::from_millis(200)).await;
        }
        assert_eq!(n_placed, 2, "cycle {cycle}");
    }
}

/// kube-scheduler looks at one pod or one group at a time.
#[tokio::test(start_paused = true)]
async fn other_pods_get_the_room_of_a_group_that_does_not_fit() {
    let (world, names) = (world(&["n1", "n2"]), ["n1", "n2"]);
    let [a, b, c] = ["a", "b", "c"].map(|name| member(name, true));
    for pod in [&a, &b] {
        world.fitting(pod, &names).await;
    }
    refusal(&world, &c, &names).await;
    let single = units("single", 80);
    // The group may be about to be bound.
    refusal(&world, &single, &names).await;
    let n_before = world.index.read().openings().silent;
    for pod in [&a, &b, &c].map(failed) {
        world.filter(&pod, &names).await;
    }
    assert_eq!(
        world.index.read().openings().silent,
        n_before + 1,
        "which the single pod is to be tried again for"
    );
    for _ in 0..3 {
        for pod in [&a, &b, &c].map(failed) {
            world.filter(&pod, &names).await;
        }
    }
    assert_eq!(world.index.read().openings().silent, n_before + 1);
    assert_eq!(world.fitting(&single, &names).await.len(), 1);
    assert_eq!(world.index.read().snapshot().n_hints, 1);

    world.delete_pod(&single);
    world.index.write().unhint("uid-single");
    let world = world.with_node("n3", &[100]);
    let names = ["n1", "n2", "n3"];
    for pod in [&a, &b, &c].map(failed) {
        assert_eq!(world.fitting(&pod, &names).await.len(), 1);
    }
    // More members fit than ever, so they may be bound now.
    refusal(&world, &single, &names).await;
    assert_eq!(world.index.read().snapshot().n_hints, 3);
}

/// A node whose kubelet refuses every pod is the best for each new one, unless it ranks behind the others.
#[tokio::test(start_paused = true)]
async fn a_node_that_refuses_pods_again_and_again_is_the_last_choice_for_a_while() {
    let world = world(&["bad", "good"]);
    let names = ["bad", "good"];
    for nth in 0..3 {
        let pod = units(&format!("p{nth}"), 80);
        assert_eq!(world.fitting(&pod, &names).await, ["bad"]);
        let mut refused = on(pod, "bad");
        world.apply_pod(&refused);
        (refused["status"]["phase"], refused["status"]["reason"]) =
            ("Failed".into(), "UnexpectedAdmissionError".into());
        world.apply_pod(&refused);
    }
    assert_eq!(world.fitting(&units("next", 80), &names).await, ["good"]);
    let (_, metrics) = world.send("GET", "/metrics", "").await;
    assert!(
        metrics.contains("gpushare_scheduler_failing_nodes 1"),
        "{metrics}"
    );
    assert_eq!(
        world.fitting(&units("pinned", 80), &["bad"]).await,
        ["bad"],
        "no other node fits"
    );
    sleep(Duration::from_secs(60)).await;
    assert_eq!(world.fitting(&units("later", 80), &names).await, ["bad"]);
}

/// kube-scheduler names a sample of the nodes, from where the last one ended, and takes its refusal for one of all.
#[tokio::test(start_paused = true)]
async fn a_pod_that_is_refused_for_a_sample_is_tried_again_while_another_node_has_room() {
    let names: Vec<String> = (0..200).map(|at| format!("n{at:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let world = World::with_hint_times(TIMES);
    for name in &names {
        world.apply_node(&node(name, "MiB"));
        world.apply_device(&device(name, &[if *name == "n199" { 100 } else { 10 }]));
    }
    let pod = units("p", 80);
    let mut texts = Vec::new();
    for start in [0, 10, 20] {
        texts.push(refusal(&world, &pod, &names[start..start + 150]).await);
    }
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "{texts:#?}");
    assert!(
        texts[0].contains("a node that was not asked about has room"),
        "{texts:#?}"
    );
    assert_eq!(tried_again(&world, "sample").await, 3);

    let same = refusal(&world, &pod, &names[20..170]).await;
    assert!(
        !same.contains("trying"),
        "the same nodes as before are all that kube-scheduler lets through: {same}"
    );
    let short = refusal(&world, &pod, &names[..99]).await;
    assert!(!short.contains("trying"), "too few for a sample: {short}");
    let nowhere = units("nowhere", 1000);
    let texts = [
        refusal(&world, &nowhere, &names[..150]).await,
        refusal(&world, &nowhere, &names[50..]).await,
    ];
    assert!(
        texts[0] == texts[1] && texts[0].starts_with("none of the nodes that were asked about"),
        "one text, whatever the sample: {texts:?}"
    );
    assert_eq!(world.fitting(&pod, &names[50..]).await, ["n199"]);
}

/// A list names a nominated pod before the one that holds its node: no room is kept for it among devices that are not free.
#[tokio::test(start_paused = true)]
async fn the_order_of_a_list_of_pods_does_not_matter() {
    let mut nominee = units("nominee", 80);
    nominee["status"]["nominatedNodeName"] = "n1".into();
    let holder = placed_by_old_extender(units("holder", 50), "n1", 0, 50, 100);
    let world = World::new().with_node("n1", &[100]);
    world.list::<proto::pod::Pod>(&[nominee.clone(), holder.clone()]);
    assert!(!world.index.read().hints().is_hinted("uid-nominee"));
    world.list::<proto::pod::Pod>(&[nominee]);
    assert!(world.index.read().hints().is_hinted("uid-nominee"));
}
