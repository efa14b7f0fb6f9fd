//! The number and the order of the nodes in the results of `filter` and `prioritize`.

use rstest::rstest;
use serde_json::{Value, json};

use crate::api::Fault;
use crate::objects::{node, units};
use crate::world::World;

const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

/// Nodes of two GPUs of 100 MiB, one of which is used as far as the number says.
async fn cluster(world: World, taken: &[(&str, u64)]) -> World {
    let world = taken
        .iter()
        .fold(world, |world, (name, _)| world.with_node(name, &[100, 100]));
    for (name, mib) in taken.iter().filter(|(_, mib)| *mib > 0) {
        world.place(&units(&format!("on-{name}"), *mib), name).await;
    }
    world
}

/// A pod that prefers one zone.
fn choosy(name: &str, mib: u64) -> Value {
    let mut pod = units(name, mib);
    let term = json!({"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}});
    pod["spec"]["affinity"] = json!({"nodeAffinity": {PREFERRED: [term]}});
    pod
}

fn tainted(name: &str, effect: &str) -> Value {
    let mut node = node(name, "MiB");
    node["spec"]["taints"] = json!([{"key": "spot", "value": "yes", "effect": effect}]);
    node
}

async fn scores(world: &World, pod: &Value, names: &[&str]) -> Vec<i64> {
    let answer = world.prioritize(pod, names).await;
    let hosts: Vec<&str> = answer
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["Host"].as_str().unwrap())
        .collect();
    assert_eq!(hosts, names);
    answer
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["Score"].as_i64().unwrap())
        .collect()
}

#[tokio::test]
async fn the_result_is_the_best_node() {
    let world = cluster(
        World::new(),
        &[("empty", 0), ("fuller", 40), ("full", 90), ("like-fuller", 40)],
    )
    .await;
    let names = ["empty", "like-fuller", "full", "fuller", "unknown"];
    assert_eq!(world.fitting(&units("a", 100), &names).await, ["full"]);
    assert_eq!(
        world.fitting(&units("b", 100), &names).await,
        ["fuller"],
        "room on the best node is kept for the first pod; names decide between equals"
    );
    assert_eq!(
        world
            .fitting(&units("c", 60), &["like-fuller", "empty", "fuller"])
            .await,
        ["fuller"]
    );
    assert_eq!(world.fitting(&units("d", 60), &["empty"]).await, ["empty"]);
}

#[tokio::test]
async fn pods_that_are_filtered_before_others_are_bound_do_not_pile_up() {
    let world = cluster(World::new(), &[("n1", 0), ("n2", 0)]).await;
    let mut picked = Vec::new();
    for name in ["a", "b", "c", "d"] {
        picked.extend(world.fitting(&units(name, 100), &["n2", "n1"]).await);
    }
    assert_eq!(picked, ["n1", "n1", "n2", "n2"]);
    assert_eq!(
        world.fitting(&units("e", 100), &["n1", "n2"]).await,
        Vec::<String>::new()
    );
    assert_eq!(world.index.read().snapshot().n_hints, 4);
    for (name, node) in ["a", "b", "c", "d"].into_iter().zip(&picked) {
        world.place(&units(name, 100), node).await;
    }
    assert_eq!(world.index.read().snapshot().n_hints, 0);
}

#[rstest]
#[case::one("1", &["c"], &[10])]
#[case::two("2", &["c", "b"], &[10, 9])]
#[case::more_than_fit("5", &["c", "b", "a"], &[10, 9, 8])]
#[case::all("all", &["a", "b", "c"], &[8, 9, 10])]
#[tokio::test]
async fn filter_returns_as_many_nodes_as_the_flag_says(
    #[case] answers: &str,
    #[case] expected: &[&str],
    #[case] scored: &[i64],
) {
    let world = cluster(
        World::with_answer_nodes(answers),
        &[("a", 0), ("b", 20), ("c", 40), ("d", 90)],
    )
    .await;
    world.place(&units("more", 90), "d").await;
    let pod = units("p", 60);
    assert_eq!(world.fitting(&pod, &["a", "b", "c", "d"]).await, expected);
    assert_eq!(scores(&world, &pod, expected).await, scored);
}

#[tokio::test]
async fn a_pod_with_scheduling_preferences_gets_all_fitting_nodes() {
    let world = cluster(World::new(), &[("a", 0), ("b", 20), ("c", 20)]).await;
    let names = ["a", "b", "c"];
    assert_eq!(world.fitting(&choosy("p", 60), &names).await, names);
    assert_eq!(scores(&world, &choosy("p", 60), &names).await, [8, 10, 9]);
    assert_eq!(world.index.read().snapshot().n_hints, 0, "kube-scheduler chooses");
    let mut spread = units("q", 60);
    spread["spec"]["topologySpreadConstraints"] =
        json!([{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]);
    assert_eq!(world.fitting(&spread, &names).await, names);
    spread["metadata"]["uid"] = json!("uid-r");
    spread["spec"]["topologySpreadConstraints"][0]["whenUnsatisfiable"] = json!("DoNotSchedule");
    assert_eq!(world.fitting(&spread, &names).await, ["b"]);
}

/// Of many nodes the best has a score of its own, and equally good ones share a score.
#[tokio::test]
async fn different_nodes_get_different_scores() {
    let names: Vec<String> = (0..20).map(|at| format!("n{at:02}")).collect();
    let taken: Vec<(&str, u64)> = names
        .iter()
        .enumerate()
        .map(|(at, name)| (name.as_str(), u64::from(at >= 10) * 30))
        .collect();
    let world = cluster(World::new(), &taken).await;
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let scores = scores(&world, &choosy("p", 60), &names).await;
    assert_eq!((scores[10], &scores[11..]), (10, [9; 9].as_slice()), "{scores:?}");
    assert_eq!(scores[..10], [5; 10], "{scores:?}");
}

#[tokio::test]
async fn nodes_with_prefer_no_schedule_taints_come_last() {
    let world = cluster(World::new(), &[("better", 40), ("worse", 0)]).await;
    let names = ["better", "worse"];
    world.apply_node(&tainted("better", "PreferNoSchedule"));
    let pod = units("p", 60);
    assert_eq!(world.fitting(&pod, &names).await, ["worse"]);
    world.delete_pod(&pod);
    assert_eq!(scores(&world, &choosy("c", 60), &names).await, [9, 10]);
    let mut tolerant = units("t", 60);
    tolerant["spec"]["tolerations"] = json!([{"key": "spot", "operator": "Exists"}]);
    assert_eq!(world.fitting(&tolerant, &names).await, ["better"]);
    world.delete_pod(&tolerant);
    let pods = [units("q", 60), units("r", 60)];
    assert_eq!(
        world.fitting(&pods[0], &["better"]).await,
        ["better"],
        "last, but not never"
    );
    world.apply_node(&tainted("better", "NoSchedule"));
    assert_eq!(
        world.fitting(&pods[1], &names).await,
        ["better"],
        "kube-scheduler itself applies NoSchedule"
    );
    for pod in &pods {
        world.delete_pod(pod);
    }
    world.apply_node(&tainted("better", "PreferNoSchedule"));
    world.delete_node(&node("better", "MiB"));
    world.apply_node(&node("better", "MiB"));
    assert_eq!(
        world.fitting(&units("s", 60), &names).await,
        ["better"],
        "a new node of the name"
    );
}

/// The extender does not learn the reason of a failed attempt; it returns one node, the same at first.
#[tokio::test]
async fn a_pod_that_is_filtered_again_gets_the_same_node_and_then_the_second_best() {
    let world = cluster(World::new(), &[("a", 40), ("b", 20), ("c", 0)]).await;
    let (pod, names) = (units("p", 60), ["a", "b", "c"]);
    for expected in ["a", "a", "a", "b", "b", "b", "c", "c", "c"] {
        assert_eq!(world.fitting(&pod, &names).await, [expected]);
        assert_eq!(
            world.index.read().snapshot().n_hints,
            1,
            "room is kept all the time"
        );
    }
    assert_eq!(world.fitting(&pod, &names).await, ["a"], "it avoids all alike");
}

/// A busy API server, a late bind and a webhook do not count against the node.
#[rstest]
#[case::busy(Fault::Busy(u64::MAX), "api_server_busy")]
#[case::forbidden(Fault::Status(403), "api_server")]
#[tokio::test]
async fn a_bind_that_fails_elsewhere_is_counted_and_changes_no_node(
    #[case] fault: Fault,
    #[case] reason: &str,
) {
    let world = cluster(World::with_answer_nodes("2"), &[("a", 40), ("b", 20), ("c", 0)]).await;
    let (pod, names) = (units("p", 60), ["a", "b", "c"]);
    world.api.put(&pod);
    world.apply_pod(&pod);
    assert_eq!(world.fitting(&pod, &names).await, ["a", "b"]);
    world.api.fail_posts([fault]);
    assert!(!world.bind(&pod, "a").await.is_empty());
    assert_eq!(world.fitting(&pod, &names).await, ["a", "b"]);
    assert_eq!(scores(&world, &pod, &names).await, [10, 9, 8]);
    let (_, metrics) = world.send("GET", "/metrics", "").await;
    assert!(
        metrics.contains(&format!(
            "gpushare_scheduler_refused_binds_total{{reason=\"{reason}\"}} 1"
        )),
        "{metrics}"
    );
    assert_eq!(world.bind(&pod, "a").await, "");
}

#[tokio::test]
async fn a_bind_for_which_the_node_has_no_room_sends_the_pod_to_the_second_best_node() {
    let world = cluster(World::new(), &[("a", 40), ("b", 20), ("c", 0)]).await;
    let (pod, names) = (units("p", 90), ["a", "b", "c"]);
    world.api.put(&pod);
    world.apply_pod(&pod);
    assert_eq!(world.fitting(&pod, &names).await, ["a"]);
    world.place(&units("thief", 100), "a").await;
    assert!(
        !world.bind(&pod, "a").await.is_empty(),
        "another pod was bound there meanwhile"
    );
    world.delete_pod(&units("thief", 100));
    assert_eq!(world.fitting(&pod, &names).await, ["b"], "one node, and not all");
    assert_eq!(scores(&world, &pod, &names).await, [8, 10, 9]);
}

#[tokio::test]
async fn the_order_and_form_of_the_request_do_not_matter() {
    let world = cluster(World::new(), &[("a", 10), ("b", 30), ("c", 30)]).await;
    for (nth, names) in [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]]
        .iter()
        .enumerate()
    {
        let pod = units(&format!("p{nth}"), 70);
        assert_eq!(world.fitting(&pod, names).await, ["b"]);
        world.delete_pod(&pod);
        let pod = units(&format!("q{nth}"), 70);
        let whole: Vec<Value> = names.iter().map(|name| node(name, "MiB")).collect();
        let answer = world.filter_whole(&pod, &whole).await;
        assert_eq!(answer["Nodes"]["items"], json!([node("b", "MiB")]));
        world.delete_pod(&pod);
    }
}
