//! GPUs that an administrator has closed by the Node's annotation: no verb gives them to a new pod, and their holders stay.

use proto::node::Node;
use proto::read_api::{AddedNodes, FitAnswer, FitRequest};
use rstest::rstest;
use scheduler::index::RawDevice;
use scheduler::read_api::fit;
use serde_json::{Value, json};

use crate::objects::{annotated, device, node, on, units};
use crate::world::World;

impl World {
    fn close(&self, name: &str, value: &str) {
        self.apply_node(&annotated(node(name, "MiB"), "gpushare/closed-gpus", value));
    }

    fn fit(&self, pod: &Value, replicas: u32) -> FitAnswer {
        let request = FitRequest {
            pod: serde_json::from_value(pod.clone()).unwrap(),
            replicas,
            ..FitRequest::default()
        };
        fit(&self.index, &request).unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn no_verb_gives_a_closed_gpu_to_a_new_pod() {
    let world = World::new().with_node("n1", &[100, 100]).with_node("n2", &[100]);
    let holder = units("holder", 40);
    world.place(&holder, "n1").await;
    world.close("n1", "0,1");
    let late = units("late", 10);
    world.api.put(&late);
    world.apply_pod(&late);

    let answer = world.filter(&units("p", 10), &["n1"]).await;
    let text = answer["FailedAndUnresolvableNodes"]["n1"]
        .as_str()
        .unwrap_or_default();
    assert!(text.contains("closed for maintenance"), "{answer}");
    assert_eq!(
        world.fitting(&units("q", 10), &["n1", "n2"]).await,
        ["n2"],
        "other nodes take it"
    );
    let error = world.bind(&late, "n1").await;
    assert!(error.contains("closed for maintenance"), "{error}");
    let answer = world.fit(&units("r", 10), 20);
    assert_eq!(answer.placements.len(), 1, "{answer:?}");
    assert_eq!(answer.placements[0].node, "n2");
    assert!(
        answer
            .blocked
            .keys()
            .any(|text| text.contains("closed for maintenance")),
        "{answer:?}"
    );
    assert_eq!(world.used("n1").await, [40, 0], "holders stay");
    let (_, metrics) = world.send("GET", "/metrics", "").await;
    assert!(
        metrics.contains("gpushare_scheduler_closed_gpus 2\n"),
        "{metrics}"
    );

    let n_before = world.index.read().openings().all;
    world.apply_node(&node("n1", "MiB"));
    assert!(
        world.index.read().openings().all > n_before,
        "refused pods are tried again"
    );
    assert_eq!(world.bind(&late, "n1").await, "");
    let (_, metrics) = world.send("GET", "/metrics", "").await;
    assert!(
        metrics.contains("gpushare_scheduler_closed_gpus 0\n"),
        "{metrics}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_pod_goes_to_the_gpus_that_stay_open() {
    let world = World::new().with_node("n1", &[100, 100]);
    world.close("n1", "0");
    for name in ["a", "b"] {
        world.place(&units(name, 40), "n1").await;
    }
    assert_eq!(world.used("n1").await, [0, 80]);
    assert!(world.fitting(&units("c", 40), &["n1"]).await.is_empty());
}

/// A filter has kept room for the pod; then the GPU is closed.
#[tokio::test(start_paused = true)]
async fn a_hint_opens_no_closed_gpu() {
    let world = World::new().with_node("n1", &[100]);
    let pod = units("p", 10);
    world.api.put(&pod);
    world.apply_pod(&pod);
    assert_eq!(world.fitting(&pod, &["n1"]).await, ["n1"]);
    world.close("n1", "all");
    let error = world.bind(&pod, "n1").await;
    assert!(error.contains("closed for maintenance"), "{error}");
    assert!(world.fitting(&pod, &["n1"]).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn no_pod_is_evicted_for_a_closed_gpu() {
    let world = World::new().with_node("n1", &[100]);
    world.place(&units("holder", 80), "n1").await;
    let mut important = units("important", 80);
    important["spec"]["priority"] = 1000.into();
    let proposals = json!({"n1": {"Pods": [{"UID": "uid-holder"}], "NumPDBViolations": 0}});
    let body =
        json!({"Pod": important, "NodeNameToVictims": null, "NodeNameToMetaVictims": proposals}).to_string();
    for (closed, n_candidates) in [("0", 0), ("", 1)] {
        world.close("n1", closed);
        let (_, answer) = world
            .send("POST", "/gpushare-scheduler/preempt", body.clone())
            .await;
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(
            answer["NodeNameToMetaVictims"].as_object().unwrap().len(),
            n_candidates,
            "closed: {closed:?}"
        );
    }
}

/// Caches of filters follow, of nodes of the same devices too.
#[tokio::test(start_paused = true)]
async fn filters_follow_each_node_alone() {
    let world = World::new()
        .with_node("n1", &[100])
        .with_node("n2", &[100])
        .with_node("n3", &[100]);
    let all = ["n1", "n2", "n3"];
    for (closed, open) in [("n2", ["n1", "n3"]), ("n3", ["n1", "n2"]), ("n1", ["n2", "n3"])] {
        world.close(closed, "all");
        for name in ["p", "q"] {
            let answer = world.filter(&units(name, 10), &all).await;
            let failed = answer["FailedAndUnresolvableNodes"].as_object().unwrap();
            assert!(failed.is_empty() || failed.contains_key(closed), "{answer}");
            assert!(
                !world
                    .fitting(&units(name, 10), &[closed])
                    .await
                    .contains(&closed.to_owned())
            );
            for name_of_open in open {
                assert_eq!(
                    world.fitting(&units(name, 10), &[name_of_open]).await,
                    [name_of_open]
                );
            }
        }
        world.apply_node(&node(closed, "MiB"));
    }
}

#[rstest]
#[case::nonsense("x,0", 1, true)]
#[case::an_absent_minor("1,7", 1, true)]
#[case::nothing("", 0, true)]
#[case::valid("0,1", 2, false)]
#[tokio::test(start_paused = true)]
async fn a_bad_value_closes_what_it_names_and_is_reported(
    #[case] value: &str,
    #[case] n_closed: u64,
    #[case] has_problem: bool,
) {
    let world = World::new().with_node("n1", &[100, 100]);
    world.close("n1", value);
    assert_eq!(world.index.read().snapshot().n_closed_gpus, n_closed);
    let shown = world.inspect(Some("n1")).await;
    assert_eq!(
        shown["nodes"][0]["problems"]
            .as_array()
            .is_some_and(|problems| !problems.is_empty()),
        has_problem
    );
    assert_eq!(
        world.index.read().closing_problems().contains_key("n1"),
        has_problem
    );
    world.delete_node(&node("n1", "MiB"));
    assert_eq!(world.index.read().snapshot().n_closed_gpus, 0);
    assert!(world.index.read().closing_problems().is_empty());
}

/// A pod that runs on a closed GPU is counted there after a restart of the scheduler.
#[tokio::test(start_paused = true)]
async fn a_holder_is_shown_after_the_gpu_was_closed() {
    let world = World::new().with_node("n1", &[100]);
    let holder = units("holder", 40);
    world.place(&holder, "n1").await;
    let bound = world.api.pod(&holder);
    let restarted = World::new();
    restarted.close("n1", "all");
    restarted.apply_device(&device("n1", &[100]));
    restarted.apply_pod(&on(bound, "n1"));
    assert_eq!(restarted.used("n1").await, [40]);
}

/// A node like it that an autoscaler adds would not be closed.
#[tokio::test(start_paused = true)]
async fn added_copies_of_a_closed_node_are_open() {
    let world = World::new().with_node("n1", &[100]);
    world.close("n1", "all");
    let mut request = FitRequest {
        pod: serde_json::from_value(units("p", 100)).unwrap(),
        replicas: 2,
        ..FitRequest::default()
    };
    assert_eq!(fit(&world.index, &request).unwrap().fitting, 0);
    request.add_nodes = vec![AddedNodes {
        like: "n1".to_owned(),
        count: 1,
    }];
    assert_eq!(fit(&world.index, &request).unwrap().fitting, 1);
}

/// As `kubectl annotate nodes --all` closes them: the answers to equal pods come from a cache.
#[tokio::test(start_paused = true)]
async fn filters_follow_five_thousand_annotations() {
    let names: Vec<String> = (0..5000).map(|at| format!("n{at}")).collect();
    let asked: Vec<&str> = names.iter().map(String::as_str).collect();
    let world = World::new();
    let devices: Vec<Value> = names.iter().map(|name| device(name, &[100, 100])).collect();
    world.list::<RawDevice>(&devices);
    for (at, (value, has_room)) in [
        ("", true),
        ("all", false),
        ("1", true),
        ("0,1", false),
        ("", true),
    ]
    .into_iter()
    .enumerate()
    {
        let closed = |name: &String| annotated(node(name, "MiB"), "gpushare/closed-gpus", value);
        world.list::<Node>(&names.iter().map(closed).collect::<Vec<_>>());
        let fitting = world.fitting(&units(&format!("p{at}"), 10), &asked).await;
        assert_eq!(!fitting.is_empty(), has_room, "{value:?}");
        // A filter of many names returns the best node alone.
        for name in asked.iter().step_by(500) {
            let fitting = world.fitting(&units(&format!("p{at}"), 10), &[name]).await;
            assert_eq!(!fitting.is_empty(), has_room, "{name} {value:?}");
        }
    }
}
