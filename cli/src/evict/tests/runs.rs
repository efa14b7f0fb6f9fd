//! Whole runs, with the faults that may come between.

use super::world::{State, World, pod};
use super::*;
use crate::args::NodeGpus;
use crate::plan::AskedPlan;

const EMPTY: [&str; 2] = ["empty-node", "n1"];

/// A receiver without an interruption.
fn undisturbed() -> watch::Receiver<bool> {
    watch::channel(false).1
}

/// Pods a-0 and a-1 of one controller, and b-0 and c-0.
fn world() -> World {
    World::of(&["a-0", "a-1", "b-0", "c-0"])
}

/// The sentence for which a run stops.
fn sentence(result: Result<Option<String>, CommandFailure>) -> String {
    result.unwrap().unwrap_or_else(|| "reached".to_owned())
}

#[rstest]
#[case::one(&[], 1)]
#[case::two(&["--parallel", "2"], 2)]
#[case::many(&["--parallel", "9"], 3)]
#[tokio::test(start_paused = true)]
async fn moves_in_flight(
    #[case] flags: &[&str],
    #[case] most: usize,
    #[values(true, false)] has_budget: bool,
) {
    let world = world();
    if has_budget {
        world.state().budgets = vec!["a"];
    }
    let ended = world.evict_by(&[&EMPTY[..], flags].concat(), undisturbed()).await;
    assert_eq!(sentence(ended.result), "reached");
    let state = world.state();
    assert_eq!(
        (ended.n_moved, state.evicted.len(), state.most_down),
        (4, 4, most)
    );
    assert!(
        state.most_down_of.values().all(|most| *most == 1),
        "{:?}",
        state.most_down_of
    );
}

/// The scheduler answers 503 while it makes the plans of others, or restarts.
#[tokio::test(start_paused = true)]
async fn a_plan_that_is_refused_is_asked_for_again() {
    let world = world();
    world.state().plan_faults = [(3, 503)].into();
    let ended = world.evict_by(&EMPTY, undisturbed()).await;
    assert_eq!((sentence(ended.result).as_str(), ended.n_moved), ("reached", 4));
}

#[tokio::test(start_paused = true)]
async fn a_scheduler_that_stays_away_is_a_failure() {
    let world = world();
    world.state().plan_faults = (3..1000).map(|n| (n, 503)).collect();
    let before = Instant::now();
    let ended = world.evict_by(&EMPTY, undisturbed()).await;
    assert!(matches!(ended.result, Err(CommandFailure::Busy { .. })));
    assert_eq!(ended.n_moved, 1);
    assert!(before.elapsed() >= RETRY_TIME);
}

#[tokio::test(start_paused = true)]
async fn two_people_evict_each_pod_once() {
    let world = world();
    world.state().budgets = vec!["a"];
    let (one, other) = tokio::join!(
        world.evict_by(&EMPTY, undisturbed()),
        world.evict_by(&EMPTY, undisturbed())
    );
    assert_eq!(
        [sentence(one.result), sentence(other.result)],
        ["reached", "reached"]
    );
    let mut evicted = world.state().evicted.clone();
    evicted.sort();
    assert_eq!(evicted, ["a-0", "a-1", "b-0", "c-0"]);
}

/// Another pod has the name by the time of the eviction.
#[tokio::test(start_paused = true)]
async fn a_pod_of_the_same_name_is_not_evicted() {
    let world = world();
    world.state().on_eviction = Some(Box::new(|state: &mut State, name, is_dry| {
        if name == "b-0" && !is_dry {
            let mut other = pod("b-0", "n2");
            other["metadata"]["uid"] = json!("other");
            state.pods.insert("b-0".to_owned(), other);
        }
    }));
    let ended = world.evict_by(&EMPTY, undisturbed()).await;
    assert_eq!((sentence(ended.result).as_str(), ended.n_moved), ("reached", 3));
    assert_eq!(world.state().evicted, ["a-0", "a-1", "c-0"]);
}

/// The successor of the last move comes back, or is on other GPUs than planned, and another pod has the memory by then.
#[rstest]
#[case::as_planned(["n2", ""], "", "reached")]
#[case::elsewhere_and_the_goal_is_reached(["n3", ""], "", "reached")]
#[case::taken_by_a_pod_that_waited(["n2", ""], "w-0", "reached")]
#[case::comes_back(["n1", ""], "", "by now pod team/a-0-next would have to move, which was not shown; run the command again to see the new plan")]
#[case::on_other_gpus(["n2", "7"], "w-0", "by now pod team/w-0 would have to move, which was not shown; run the command again to see the new plan")]
#[tokio::test(start_paused = true)]
async fn the_last_successor_of_free(
    #[case] astray: [&'static str; 2],
    #[case] newcomer: &'static str,
    #[case] expected: &str,
) {
    let world = World::of(&["a-0"]);
    world.state().astray = astray;
    world.state().on_eviction = Some(Box::new(move |state: &mut State, _, is_dry| {
        if !is_dry && !newcomer.is_empty() {
            state.pods.insert(newcomer.to_owned(), pod(newcomer, "n1"));
        }
    }));
    let ended = world.evict_by(&["free", "1Gi"], undisturbed()).await;
    assert_eq!((sentence(ended.result).as_str(), ended.n_moved), (expected, 1));
}

/// A pod that was too young for the confirmed plan stays, however long the run takes.
#[tokio::test(start_paused = true)]
async fn a_young_pod_stays() {
    let world = world();
    world.state().young = Some(("a-0", Instant::now()));
    world.state().grace = Duration::from_secs(150);
    let ended = world.evict_by(&EMPTY, undisturbed()).await;
    assert_eq!((sentence(ended.result).as_str(), ended.n_moved), ("reached", 3));
    assert_eq!(world.state().evicted, ["a-1", "b-0", "c-0"]);
}

#[tokio::test(start_paused = true)]
async fn a_budget_that_never_has_room_ends_the_run() {
    let world = world();
    let mut down = pod("b-1", "");
    down["metadata"]["deletionTimestamp"] = json!(null);
    world.state().pods.insert("b-1".to_owned(), down);
    world.state().budgets = vec!["b"];
    world.state().hides_budgets = true;
    let before = Instant::now();
    let ended = world.evict_by(&EMPTY, undisturbed()).await;
    assert_eq!(sentence(ended.result), "pod team/b-0 may not be evicted: no");
    assert_eq!(world.state().evicted, ["a-0", "a-1"]);
    assert!(before.elapsed() >= RETRY_TIME);
}

#[rstest]
#[case::pod("a-1", "", "pod team/a-1 was evicted, and does not go after 300s")]
#[case::successor("", "a-1", "pod team/a-1 is gone, and no successor has a node after 300s")]
#[tokio::test(start_paused = true)]
async fn a_move_that_does_not_end(
    #[case] stuck: &'static str,
    #[case] without: &'static str,
    #[case] expected: &str,
) {
    let world = world();
    world.state().stuck = stuck;
    world.state().without_successor = without;
    let ended = world.evict_by(&EMPTY, undisturbed()).await;
    assert_eq!((sentence(ended.result).as_str(), ended.n_moved), (expected, 1));
    assert_eq!(world.state().evicted, ["a-0", "a-1"]);
}

/// A move of several that does not end keeps no other from its end, and none begins after it.
#[tokio::test(start_paused = true)]
async fn moves_beside_one_that_does_not_end() {
    let world = world();
    world.state().stuck = "a-1";
    let ended = world
        .evict_by(&[&EMPTY[..], &["--parallel", "2"]].concat(), undisturbed())
        .await;
    assert_eq!(
        sentence(ended.result),
        "pod team/a-1 was evicted, and does not go after 300s"
    );
    assert_eq!(ended.n_moved, 2);
    // Neither b-0 nor c-0 is evicted beside a-0, as their moves hold only after that of a-1.
    assert_eq!(world.state().evicted, ["a-0", "a-1", "b-0"]);
}

/// The budget has no room for the second controller until the pod of the first has a successor.
#[tokio::test(start_paused = true)]
async fn moves_of_two_controllers_under_one_budget() {
    let world = world();
    world.state().budgets = vec!["bc"];
    world.state().grace = Duration::from_secs(150);
    let args = [&EMPTY[..], &["--parallel", "9"]].concat();
    let ended = world.evict_by(&args, undisturbed()).await;
    assert_eq!((sentence(ended.result).as_str(), ended.n_moved), ("reached", 4));
}

#[tokio::test(start_paused = true)]
async fn the_network_goes_in_the_middle() {
    let world = world();
    world.state().on_eviction = Some(Box::new(|state: &mut State, name, is_dry| {
        state.is_away = name == "a-1" && !is_dry;
    }));
    let before = Instant::now();
    let ended = world.evict_by(&EMPTY, undisturbed()).await;
    let sentence = sentence(ended.result);
    assert!(
        sentence.starts_with("pod team/a-1 was evicted, and its successor cannot be seen: "),
        "{sentence}"
    );
    // The time that the command waits for a successor.
    assert!(before.elapsed() >= Duration::from_secs(300));
    assert_eq!((world.state().evicted.len(), ended.n_moved), (2, 1));
}

/// A Job that cannot be read for a moment does not keep its pod on the node for the rest of the run.
#[tokio::test(start_paused = true)]
async fn the_network_goes_while_a_job_is_read() {
    let world = world();
    world.set_job("b", json!({"spec": {"backoffLimit": 3}}));
    world.state().on_eviction = Some(Box::new(|state: &mut State, name, is_dry| {
        state.has_no_jobs = name == "a-1" && !is_dry;
    }));
    let ended = world.evict_by(&EMPTY, undisturbed()).await;
    assert!(
        matches!(ended.result, Err(CommandFailure::Api { code: 503, .. })),
        "{:?}",
        ended.result
    );
    assert_eq!((world.state().evicted.len(), ended.n_moved), (2, 2));
}

/// The answer to an eviction is lost, and the API server does not come back, or the user does not wait for it.
#[rstest]
#[tokio::test(start_paused = true)]
async fn an_eviction_without_an_answer_is_named(#[values(true, false)] is_interrupted: bool) {
    let world = world();
    let (sender, interrupted) = watch::channel(false);
    world.state().on_eviction = Some(Box::new(move |state: &mut State, name, is_dry| {
        if name == "a-1" && !is_dry {
            state.loses_answers = true;
            sender.send_replace(is_interrupted);
        }
    }));
    let before = Instant::now();
    let ended = world.evict_by(&EMPTY, interrupted).await;
    let sentence = sentence(ended.result);
    assert!(
        sentence.starts_with("pod team/a-1 may have been evicted: "),
        "{sentence}"
    );
    // This API server evicts a pod that is leaving once more.
    world.state().evicted.dedup();
    assert_eq!((world.state().evicted.len(), ended.n_moved), (2, 1));
    assert_eq!(before.elapsed() < RETRY_TIME, is_interrupted);
}

#[tokio::test(start_paused = true)]
async fn an_interrupted_run_names_the_pod_that_waits() {
    let world = world();
    let (sender, interrupted) = watch::channel(false);
    world.state().on_eviction = Some(Box::new(move |_: &mut State, name, is_dry| {
        if name == "a-1" && !is_dry {
            sender.send_replace(true);
        }
    }));
    let ended = world.evict_by(&EMPTY, interrupted).await;
    assert_eq!(
        sentence(ended.result),
        "interrupted: pod team/a-1 was evicted, and does not go yet"
    );
    assert_eq!((world.state().evicted.len(), ended.n_moved), (2, 1));
}

/// Of four pods two may move.
#[rstest]
#[case::refused(&EMPTY, &[], 0, json!(null))]
#[case::partial(&EMPTY, &["--partial"], 2, json!("all"))]
#[case::free_refused(&["free", "1Gi"], &[], 0, json!(null))]
#[case::free_partial(&["free", "1Gi"], &["--partial"], 2, json!(null))]
#[tokio::test(start_paused = true)]
async fn a_goal_out_of_reach(
    #[case] goal: &[&str],
    #[case] flags: &[&str],
    #[case] n_evicted: usize,
    #[case] closed: Value,
) {
    let world = world();
    let args = [goal, &["--max-moves", "2"], flags].concat();
    let code = world.run(&args).await.unwrap();
    assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::from(NOT_REACHED)));
    let state = world.state();
    assert_eq!((state.evicted.len(), &state.closed), (n_evicted, &closed));
}

#[tokio::test]
async fn a_malformed_selector_is_refused_as_a_goal() {
    let world = world();
    let (connection, args, mut source) = world.prepare(&["free", "1Gi", "--on", "a=b=c"]).await;
    let failure = crate::plan::ask(&connection, &mut source, &args).await.err();
    let expected = "--on \"a=b=c\" is no label selector: no";
    assert!(matches!(failure, Some(CommandFailure::Refused(text)) if text == expected));
}

/// Each plan of a run has the node affinity of the volumes that the caller may read.
#[rstest]
#[case::network_storage(Some(json!({"spec": {}})), Some(json!([])))]
#[case::of_a_node(
    Some(json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": []}}}})),
    Some(json!([{"nodeSelectorTerms": []}]))
)]
#[case::with_more_parts_than_a_request_may_have(
    Some(json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": vec![json!({}); 256]}}}})),
    None
)]
#[case::unreadable(None, None)]
#[tokio::test(start_paused = true)]
async fn volumes_are_read(#[case] volume: Option<Value>, #[case] expected: Option<Value>) {
    let world = world();
    let claims =
        json!([{"name": "e", "emptyDir": {}}, {"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]);
    if let Some(pod) = world.state().pods.get_mut("a-0") {
        pod["spec"]["volumes"] = claims;
    }
    world
        .state()
        .volumes
        .extend(volume.map(|volume| ("data", volume)));
    let (connection, args, mut source) = world.prepare(&EMPTY).await;
    let AskedPlan { request, answer, .. } = crate::plan::ask(&connection, &mut source, &args).await.unwrap();
    let volumes = serde_json::to_value(&request.limits.volumes).unwrap();
    assert_eq!(volumes.get("uid-a-0"), expected.as_ref());
    let (n_moves, n_left) = if expected.is_some() { (4, 0) } else { (3, 1) };
    assert_eq!(
        (answer.moves.len(), answer.left.len()),
        (n_moves, n_left),
        "{answer:?}"
    );
}

/// A pod whose end may fail its Job is left. A node becomes empty without it; free memory needs it, and nothing is evicted.
#[rstest]
#[case::far_from_its_limit(&EMPTY, json!({"spec": {"backoffLimit": 3}}), "", (4, 0, true), (0, 4))]
#[case::at_its_limit(&EMPTY, json!({"spec": {"backoffLimit": 0}}), "Job a is at its back-off limit", (2, 2, true), (0, 2))]
#[case::unreadable(&EMPTY, json!(null), "its Job cannot be read: ", (2, 2, true), (0, 2))]
#[case::free(&["free", "1Gi"], json!({"spec": {"backoffLimit": 0}}), "Job a is at its back-off limit", (4, 2, false), (NOT_REACHED, 0))]
#[case::partial(&["free", "1Gi", "--partial"], json!({"spec": {"backoffLimit": 0}}), "Job a is at its back-off limit", (4, 2, false), (NOT_REACHED, 0))]
#[tokio::test(start_paused = true)]
async fn pods_of_jobs(
    #[case] goal: &[&str],
    #[case] job: Value,
    #[case] reason: &str,
    #[case] planned: (usize, usize, bool),
    #[case] (code, n_evicted): (u8, usize),
) {
    let world = world();
    world.set_job("a", job);
    let (connection, args, mut source) = world.prepare(goal).await;
    let AskedPlan { answer, of_jobs, .. } = crate::plan::ask(&connection, &mut source, &args).await.unwrap();
    let PlanAnswer {
        moves, left, reached, ..
    } = answer;
    assert_eq!((moves.len(), left.len(), reached), planned);
    assert_eq!(of_jobs.len(), left.len());
    assert!(left.iter().all(|one| one.reason.starts_with(reason)), "{left:?}");
    let ended = world.run(goal).await.unwrap();
    assert_eq!(format!("{ended:?}"), format!("{:?}", ExitCode::from(code)));
    assert_eq!(world.state().evicted.len(), n_evicted);
}

/// A volume that one node at a time can use keeps its pods, if it has several, from moving one after the other.
#[rstest]
#[case::one_node("ReadWriteOnce", "Running", false)]
#[case::the_other_has_ended("ReadWriteOnce", "Succeeded", true)]
#[case::many_nodes("ReadWriteMany", "Running", true)]
#[tokio::test(start_paused = true)]
async fn volumes_of_two_pods(#[case] mode: &str, #[case] phase: &str, #[case] is_known: bool) {
    let world = world();
    for name in ["a-0", "a-1"] {
        if let Some(pod) = world.state().pods.get_mut(name) {
            pod["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]);
            pod["status"]["phase"] = json!(if name == "a-1" { phase } else { "Running" });
        }
    }
    let volume = json!({"spec": {"accessModes": [mode]}});
    world.state().volumes.insert("data", volume);
    let (connection, args, mut source) = world.prepare(&EMPTY).await;
    let AskedPlan { request, .. } = crate::plan::ask(&connection, &mut source, &args).await.unwrap();
    assert_eq!(request.limits.volumes.contains_key("uid-a-0"), is_known);
}

/// The scheduler may be busy with the plans of others by then.
#[tokio::test(start_paused = true)]
async fn the_plan_without_volumes_holds_if_the_second_is_refused() {
    let world = world();
    if let Some(pod) = world.state().pods.get_mut("a-0") {
        pod["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]);
    }
    world.state().volumes.insert("data", json!({"spec": {}}));
    world.state().plan_faults = [(2, 503)].into();
    let (connection, args, mut source) = world.prepare(&EMPTY).await;
    let AskedPlan { request, answer, .. } = crate::plan::ask(&connection, &mut source, &args).await.unwrap();
    assert!(request.limits.volumes.is_empty());
    assert_eq!((answer.moves.len(), answer.left.len()), (3, 1), "{answer:?}");
}

/// A pod that waits for its budget is confirmed too, and its name is needed then.
#[tokio::test(start_paused = true)]
async fn a_waiting_pod_with_a_hidden_name_is_refused() {
    let world = world();
    world.state().hidden = "c-0";
    if let Some(pod) = world.state().pods.get_mut("c-0") {
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    }
    let failure = world.run(&EMPTY).await.err().map(|failure| failure.to_string());
    let failure = failure.unwrap_or_default();
    assert!(
        failure.starts_with("the names of some pods are hidden"),
        "{failure}"
    );
    let state = world.state();
    assert_eq!((state.evicted.len(), &state.closed), (0, &json!(null)));
}

/// Of GPUs that were closed beside all others, the command that opens them alone would be refused.
#[rstest]
#[case::none(json!(null), &[0], json!("0"), "kubectl gpushare open n1 --gpus 0")]
#[case::others(json!("3"), &[0], json!("0,3"), "kubectl gpushare open n1 --gpus 0")]
#[case::all(json!("all"), &[0], json!("all"), "kubectl gpushare open n1")]
#[tokio::test(start_paused = true)]
async fn the_command_that_opens_closed_gpus(
    #[case] closed: Value,
    #[case] gpus: &[u32],
    #[case] expected: Value,
    #[case] opening: &str,
) {
    let world = world();
    world.state().closed = closed;
    let (connection, ..) = world.prepare(&EMPTY).await;
    let closed = close::add(&connection, "n1", gpus).await.unwrap();
    assert_eq!(world.state().closed, expected);
    assert_eq!(close::opening("n1", &closed), opening);
    assert!(close::closing("n1", &closed).contains(&format!("`{opening}`")));
}

#[rstest]
#[case::some(json!("0,3"), &[0], json!("3"), "")]
#[case::the_last(json!("3"), &[3], json!(null), "")]
#[case::all(json!("0,3"), &[], json!(null), "")]
#[case::one_of_all(json!("all"), &[0], json!("all"), "all GPUs of node n1 are closed: open all without --gpus")]
#[tokio::test(start_paused = true)]
async fn open_leaves_other_gpus_closed(
    #[case] closed: Value,
    #[case] gpus: &[u32],
    #[case] expected: Value,
    #[case] said: &str,
) {
    let world = world();
    world.state().closed = closed;
    let (connection, ..) = world.prepare(&EMPTY).await;
    let at = NodeGpus {
        node: "n1".to_owned(),
        gpus: gpus.to_vec(),
    };
    let opened = close::open(&connection, &Screen::PLAIN, &at).await;
    let text = opened
        .err()
        .map(|failure| failure.to_string())
        .unwrap_or_default();
    assert_eq!(
        (world.state().closed.clone(), text.starts_with(said)),
        (expected, true),
        "{text}"
    );
    assert_eq!(text.is_empty(), said.is_empty());
}
