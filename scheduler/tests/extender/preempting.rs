//! `preempt`: victims by device, in kube-scheduler's order, and none while earlier ones have not ended.

use std::time::Duration;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use rstest::rstest;
use scheduler::config::MisfitNodes;
use scheduler::watch::ObjectStore;
use serde_json::{Value, json};

use crate::objects::{annotated, node, on, phase, placed_by_old_extender, pod, units};
use crate::world::World;

/// A pod of this priority on a GPU of 80 units.
fn running(name: &str, node: &str, gpu: u64, units_held: u64, priority: i32) -> Value {
    let mut pod = phase(
        placed_by_old_extender(units(name, units_held), node, gpu, units_held, 80),
        "Running",
    );
    pod["spec"]["priority"] = priority.into();
    pod["status"]["startTime"] = "2026-01-01T00:00:00Z".into();
    pod
}

fn important(name: &str, units_asked: u64) -> Value {
    let mut pod = units(name, units_asked);
    pod["spec"]["priority"] = 1000.into();
    pod
}

fn labelled(mut pod: Value, key: &str, value: &str) -> Value {
    pod["metadata"]["labels"][key] = value.into();
    pod
}

fn leaving(mut pod: Value) -> Value {
    pod["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z".into();
    pod
}

fn nominated(mut pod: Value, node: &str) -> Value {
    pod["status"]["nominatedNodeName"] = node.into();
    pod
}

fn uid(name: &str) -> String {
    format!("uid-{name}")
}

/// The victims that kube-scheduler proposes for one node, by names of pods.
fn proposal(names: &[&str]) -> Value {
    let pods: Vec<Value> = names.iter().map(|name| json!({"UID": uid(name)})).collect();
    json!({"Pods": pods, "NumPDBViolations": 0})
}

impl World {
    async fn preempt(&self, pod: &Value, proposals: &Value) -> Value {
        let body =
            json!({"Pod": pod, "NodeNameToVictims": null, "NodeNameToMetaVictims": proposals}).to_string();
        let (status, text) = self.send("POST", "/gpushare-scheduler/preempt", body).await;
        assert_eq!(status, 200, "{text}");
        serde_json::from_str::<Value>(&text).unwrap()["NodeNameToMetaVictims"].clone()
    }

    /// The victims on one node by name, and the number of violated budgets; `None` if it is no candidate.
    async fn victims(&self, pod: &Value, node: &str, proposed: &[&str]) -> Option<(Vec<String>, i64)> {
        let answer = self.preempt(pod, &json!({node: proposal(proposed)})).await;
        let victims = answer.get(node)?;
        let names = victims["Pods"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pod| pod["UID"].as_str().unwrap()["uid-".len()..].to_owned());
        Some((names.collect(), victims["NumPDBViolations"].as_i64().unwrap()))
    }

    fn with_budget(self, app: &str, allowed: i32) -> Self {
        let spec = json!({"selector": {"matchLabels": {"app": app}}});
        let status = json!({"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1});
        let budget =
            json!({"metadata": {"name": app, "namespace": "default"}, "spec": spec, "status": status});
        self.index
            .write()
            .apply(serde_json::from_value::<PodDisruptionBudget>(budget).unwrap());
        self
    }

    /// A node of four GPUs of 80 units, full of pods of 10: p00 to p31, eight on each.
    fn full() -> Self {
        let mut world = Self::new().with_node("n1", &[80; 4]);
        for at in 0..32 {
            world = world.with_pod(&running(&format!("p{at:02}"), "n1", at / 8, 10, 0));
        }
        world
    }
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// kube-scheduler's four victims free 40 units of the node, 10 on each GPU.
#[tokio::test]
async fn victims_are_chosen_on_one_gpu_instead_of_four() {
    let world = World::full();
    let (victims, n_violations) = world
        .victims(&important("new", 40), "n1", &["p00", "p08", "p16", "p24"])
        .await
        .unwrap();
    assert_eq!((victims.len(), n_violations), (4, 0));
    let gpus: std::collections::BTreeSet<u64> = victims
        .iter()
        .map(|name| name[1..].parse::<u64>().unwrap() / 8)
        .collect();
    assert_eq!(gpus.len(), 1, "{victims:?}");
}

#[tokio::test]
async fn proposed_victims_that_suffice_are_kept() {
    let world = World::new()
        .with_node("n1", &[80, 80])
        .with_pod(&running("a", "n1", 0, 80, 5))
        .with_pod(&running("b", "n1", 1, 80, 3));
    assert_eq!(
        world.victims(&important("new", 40), "n1", &["b"]).await,
        Some((names(&["b"]), 0))
    );
    let text = world.send_to(&world.health, "GET", "/metrics", "").await.1;
    assert!(
        text.contains("preemption_candidates_total{outcome=\"kept\"} 1"),
        "{text}"
    );
    assert!(
        text.contains("requests_total{verb=\"preempt\",outcome=\"ok\"} 1"),
        "{text}"
    );
}

/// Only pods of lower priority are victims, and a node on which they do not suffice is no candidate.
#[tokio::test]
async fn a_node_without_sufficient_victims_is_dropped() {
    let world = World::new().with_node("n1", &[80, 80]).with_node("n2", &[80, 80]);
    let mut world = world.with_pod(&running("a", "n2", 0, 80, 0));
    for (name, gpu, priority) in [
        ("low0", 0, 0),
        ("low1", 1, 0),
        ("high0", 0, 1000),
        ("high1", 1, 2000),
    ] {
        world = world.with_pod(&running(name, "n1", gpu, 40, priority));
    }
    let answer = world
        .preempt(
            &important("new", 60),
            &json!({"n1": proposal(&["low0", "low1"]), "gone": proposal(&["x"]), "n2": proposal(&[])}),
        )
        .await;
    assert_eq!(
        answer,
        json!({}),
        "n2 has a GPU free, n1 has none that can be freed, and the third is unknown"
    );
}

/// From 1.38 on kube-scheduler proposes no victims where the sums suffice.
#[tokio::test]
async fn victims_are_chosen_if_kube_scheduler_proposes_none() {
    let mut world = World::new().with_node("n1", &[80, 80]);
    for (name, gpu, priority) in [("a", 0, 5), ("b", 1, 3)] {
        world = world.with_pod(&running(name, "n1", gpu, 50, priority));
    }
    assert_eq!(
        world.victims(&important("new", 60), "n1", &[]).await,
        Some((names(&["b"]), 0))
    );
}

#[rstest]
#[case::forbids(0, &["other"], 0)]
#[case::allows(1, &["guarded"], 0)]
#[tokio::test]
async fn disruption_budgets_are_respected(
    #[case] allowed: i32,
    #[case] expected: &[&str],
    #[case] n_violations: i64,
) {
    let world = World::new().with_node("n1", &[80, 80]).with_budget("a", allowed);
    let world = world
        .with_pod(&labelled(running("guarded", "n1", 0, 80, 0), "app", "a"))
        .with_pod(&running("other", "n1", 1, 80, 7));
    assert_eq!(
        world.victims(&important("new", 40), "n1", &["guarded"]).await,
        Some((names(expected), n_violations))
    );
}

#[tokio::test]
async fn a_violated_budget_is_counted() {
    let mut world = World::new().with_node("n1", &[80]).with_budget("a", 1);
    for name in ["a", "b"] {
        world = world.with_pod(&labelled(running(name, "n1", 0, 40, 0), "app", "a"));
    }
    let victims = world.victims(&important("new", 80), "n1", &["b"]).await.unwrap();
    assert_eq!((victims.0.len(), victims.1), (2, 1));
}

/// The extender keeps a proposed victim without devices, and every one if the pod may need more than amounts of resources.
#[tokio::test]
async fn proposed_victims_without_devices_are_kept() {
    let plain = |name: &str| {
        let mut plain = on(pod(name, &json!({"cpu": "1"})), "n1");
        plain["spec"]["priority"] = 3.into();
        plain
    };
    let world = World::full().with_pod(&plain("web"));
    let (victims, _) = world
        .victims(&important("new", 20), "n1", &["web", "p00", "p08"])
        .await
        .unwrap();
    assert_eq!(
        (victims.len(), victims[0].as_str()),
        (3, "web"),
        "the one of highest priority comes first"
    );
    let mut picky = important("picky", 20);
    picky["spec"]["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": 80}]);
    let (victims, _) = world.victims(&picky, "n1", &["p00", "p08"]).await.unwrap();
    assert!(
        victims.contains(&"p00".to_owned()) && victims.contains(&"p08".to_owned()) && victims.len() == 3,
        "{victims:?}"
    );
}

/// The node is short of CPU too: the victims must free enough of it.
#[tokio::test]
async fn victims_free_enough_cpu_too() {
    let with_cpu = |mut pod: Value, cpu: &str| {
        for kind in ["limits", "requests"] {
            pod["spec"]["containers"][0]["resources"][kind]["cpu"] = cpu.into();
        }
        pod
    };
    let mut busy = node("n1", "MiB");
    busy["status"]["allocatable"] = json!({"cpu": "8", "memory": "64Gi"});
    let world = World::new().with_node("n1", &[80, 80]);
    world.apply_node(&busy);
    let world = world
        .with_pod(&with_cpu(running("idle", "n1", 0, 80, 0), "1"))
        .with_pod(&with_cpu(running("busy", "n1", 1, 80, 5), "7"));
    assert_eq!(
        world
            .victims(&with_cpu(important("small", 40), "1"), "n1", &["idle"])
            .await,
        Some((names(&["idle"]), 0))
    );
    let world = World::new().with_node("n1", &[80, 80]);
    world.apply_node(&busy);
    let world = world
        .with_pod(&with_cpu(running("idle", "n1", 0, 80, 0), "1"))
        .with_pod(&with_cpu(running("busy", "n1", 1, 80, 5), "7"));
    assert_eq!(
        world
            .victims(&with_cpu(important("large", 40), "5"), "n1", &["busy"])
            .await,
        Some((names(&["busy"]), 0))
    );
}

/// No Device object lists the resource, so another scheduler counts it; an extender without `managedResources` is asked all the
/// same. GPU pods had been named for such a pod.
#[tokio::test]
async fn victims_for_resources_of_another_scheduler_stay_as_proposed() {
    let mut busy = node("n1", "MiB");
    busy["status"]["allocatable"] = json!({"cpu": "8", "memory": "64Gi", "example.com/x": "1"});
    let with_cpu = |mut pod: Value, cpu: &str| {
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = cpu.into();
        pod
    };
    let world = World::new().with_node("n1", &[80, 80]);
    world.apply_node(&busy);
    let world = world
        .with_pod(&with_cpu(running("idle", "n1", 0, 80, 0), "1"))
        .with_pod(&with_cpu(running("busy", "n1", 1, 80, 5), "7"));
    let mut other = pod("other", &json!({"example.com/x": "1", "cpu": "1"}));
    other["spec"]["priority"] = 1000.into();
    assert_eq!(world.victims(&other, "n1", &[]).await, None);
    assert_eq!(
        world.victims(&other, "n1", &["busy"]).await,
        Some((names(&["busy"]), 0))
    );
}

/// A pod that is being deleted is the best victim; pods that have ended or that no watch has shown are none.
#[tokio::test]
async fn pods_under_deletion_are_preferred_victims() {
    let world = World::new().with_node("n1", &[80, 80]);
    let world = world
        .with_pod(&running("a", "n1", 0, 80, 0))
        .with_pod(&leaving(running("b", "n1", 1, 80, 9)));
    assert_eq!(
        world.victims(&important("new", 40), "n1", &["a"]).await,
        Some((names(&["b"]), 0))
    );
}

/// The watch is behind: the pod is nominated, and its victims still exist as far as the scheduler knows.
#[tokio::test(start_paused = true)]
async fn no_node_is_a_candidate_while_earlier_victims_have_not_ended() {
    let world = World::new().with_node("n1", &[80]).with_node("n2", &[80]);
    let (a, b) = (running("a", "n1", 0, 80, 0), running("b", "n2", 0, 80, 0));
    let world = world.with_pod(&a).with_pod(&b);
    let new = important("new", 40);
    let both = json!({"n1": proposal(&["a"]), "n2": proposal(&["b"])});
    assert_eq!(world.preempt(&new, &both).await.as_object().unwrap().len(), 2);
    let pending = nominated(new.clone(), "n1");
    assert_eq!(
        world.preempt(&new, &both).await,
        json!({}),
        "kube-scheduler may not have written the node yet"
    );
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(world.preempt(&pending, &both).await, json!({}));
    world.apply_pod(&leaving(a.clone()));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(
        world.preempt(&pending, &both).await,
        json!({}),
        "however long it takes to end"
    );
    let text = world.send_to(&world.health, "GET", "/metrics", "").await.1;
    assert!(
        text.contains("preemption_candidates_total{outcome=\"waiting\"} 6"),
        "{text}"
    );
    world.delete_pod(&a);
    assert_eq!(world.fitting(&pending, &["n1", "n2"]).await, ["n1"]);
    assert!(
        world.victims(&pending, "n2", &["b"]).await.is_some(),
        "nothing is waited for any more"
    );
}

/// The room of the victims is the first pod's, even before the watch shows their deletion.
#[tokio::test(start_paused = true)]
async fn two_preemptors_get_different_victims() {
    let world = World::full();
    let (first, _) = world
        .victims(&important("first", 40), "n1", &["p00", "p01", "p02", "p03"])
        .await
        .unwrap();
    let (second, _) = world
        .victims(&important("second", 40), "n1", &["p00", "p01", "p02", "p03"])
        .await
        .unwrap();
    assert!(
        !first.iter().any(|name| second.contains(name)),
        "{first:?} {second:?}"
    );
    assert_eq!((first.len(), second.len()), (4, 4));
    // The first one has been nominated for another node, and these victims were never evicted.
    world.apply_pod(&nominated(important("first", 40), "n2"));
    assert!(
        world
            .victims(
                &important("third", 80),
                "n1",
                &first.iter().map(String::as_str).collect::<Vec<_>>()
            )
            .await
            .is_some()
    );
    let (third, _) = world
        .victims(&important("fourth", 40), "n1", &["p00", "p01", "p02", "p03"])
        .await
        .unwrap();
    assert!(
        !second.iter().any(|name| third.contains(name)),
        "{second:?} {third:?}"
    );
}

/// kube-scheduler may have failed to evict them.
#[tokio::test(start_paused = true)]
async fn victims_that_were_not_evicted_are_named_again() {
    let world = World::new()
        .with_node("n1", &[80])
        .with_pod(&running("a", "n1", 0, 80, 0));
    let pending = nominated(important("new", 40), "n1");
    assert!(world.victims(&pending, "n1", &["a"]).await.is_some());
    assert!(world.victims(&pending, "n1", &["a"]).await.is_none());
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert!(world.victims(&pending, "n1", &["a"]).await.is_some());
}

/// If the nominated node were unresolvable, kube-scheduler would look for other victims at once. The text alternates, which makes
/// kube-scheduler try again.
#[tokio::test(start_paused = true)]
async fn a_nominated_node_with_victims_is_resolvable() {
    let world = World::new().with_node("n1", &[80]).with_node("n2", &[80]);
    let world = world
        .with_pod(&running("a", "n1", 0, 80, 0))
        .with_pod(&running("b", "n2", 0, 80, 0));
    let pending = nominated(important("new", 40), "n1");
    let before = world.filter(&pending, &["n1", "n2"]).await;
    assert_eq!(before["FailedNodes"], json!({}));
    assert!(world.victims(&pending, "n1", &["a"]).await.is_some());
    let mut texts = Vec::new();
    for _ in 0..3 {
        let answer = world.filter(&pending, &["n1", "n2"]).await;
        assert_eq!(
            answer["FailedAndUnresolvableNodes"]
                .as_object()
                .unwrap()
                .keys()
                .collect::<Vec<_>>(),
            ["n2"]
        );
        texts.push(answer["FailedNodes"]["n1"].as_str().unwrap().to_owned());
    }
    assert!(texts[0] != texts[1] && texts[0] == texts[2], "{texts:?}");
}

/// A leader that has not named the victims itself sees that they are being deleted.
#[tokio::test]
async fn a_new_leader_waits_for_deletions_on_a_nominated_node() {
    let world = World::new()
        .with_node("n1", &[80])
        .with_pod(&leaving(running("a", "n1", 0, 80, 0)));
    let pending = nominated(important("new", 40), "n1");
    let answer = world.filter(&pending, &["n1"]).await;
    assert_eq!(answer["FailedNodes"].as_object().unwrap().len(), 1);
    assert_eq!(answer["FailedAndUnresolvableNodes"], json!({}));
}

/// The setting for kube-scheduler from 1.38 on.
#[tokio::test]
async fn a_flag_makes_nodes_that_do_not_fit_resolvable() {
    let world = World::with_misfit_nodes(MisfitNodes::Resolvable)
        .with_node("n1", &[80])
        .with_node("n2", &[20]);
    let world = world.with_pod(&running("a", "n1", 0, 80, 0));
    let answer = world.filter(&important("new", 40), &["n1", "n2"]).await;
    assert_eq!(
        answer["FailedNodes"]
            .as_object()
            .unwrap()
            .keys()
            .collect::<Vec<_>>(),
        ["n1"]
    );
    assert_eq!(
        answer["FailedAndUnresolvableNodes"]
            .as_object()
            .unwrap()
            .keys()
            .collect::<Vec<_>>(),
        ["n2"],
        "too small for good"
    );
}

#[tokio::test]
async fn malformed_preemption_requests_are_refused() {
    let world = World::full();
    let (status, text) = world
        .send("POST", "/gpushare-scheduler/preempt", r#"{"Pod": 1}"#)
        .await;
    assert_eq!(status, 400, "{text}");
    let unready = World::unsynced(&scheduler::config::Serving::default());
    let body = json!({"Pod": important("new", 1), "NodeNameToMetaVictims": {}}).to_string();
    assert_eq!(
        unready.send("POST", "/gpushare-scheduler/preempt", body).await.0,
        503
    );
    // A pod that asks for nothing of ours is kube-scheduler's alone.
    let plain = pod("plain", &json!({"cpu": "1"}));
    assert_eq!(
        world.victims(&plain, "n1", &["x", "y"]).await,
        Some((names(&["x", "y"]), 0))
    );
    // One that breaks a rule fits nowhere.
    let broken = annotated(important("broken", 1), "x", "y");
    let mut broken = broken;
    broken["spec"]["containers"][0]["resources"]["limits"] = json!({"aliyun.com/gpu-mem": "-1"});
    broken["spec"]["containers"][0]["resources"]["requests"] = json!({"aliyun.com/gpu-mem": "-1"});
    assert_eq!(world.victims(&broken, "n1", &["p00"]).await, None);
}
