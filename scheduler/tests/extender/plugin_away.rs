//! Nodes whose device plugin is away: no pod is sent there, bound there, or evicted there.

use scheduler::config::MisfitNodes;
use serde_json::{Value, json};

use crate::objects::{annotated, node, on, units};
use crate::world::World;

/// The Node with the word of its plugin.
pub(crate) fn reporting_node(name: &str, serving: bool, second: u32) -> Value {
    let word =
        json!({"serving": serving, "since": format!("2026-01-01T00:{:02}:{:02}Z", second / 60, second % 60)});
    annotated(node(name, "MiB"), "gpushare/device-plugin", &word.to_string())
}

fn failed(pod: &Value, node: &str) -> Value {
    let mut failed = on(pod.clone(), node);
    let message = "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices \
                   aliyun.com/gpu-mem, which is unexpected";
    let reason = "UnexpectedAdmissionError";
    failed["status"] =
        json!({"phase": "Failed", "reason": reason, "message": message, "startTime": "2026-01-01T00:01:00Z"});
    failed
}

fn admitted(mut pod: Value) -> Value {
    pod["status"]["startTime"] = "2026-01-01T00:01:00Z".into();
    pod
}

fn n_silent(world: &World) -> u64 {
    world.index.read().openings().silent
}

#[tokio::test(start_paused = true)]
async fn nodes_without_a_serving_plugin_are_refused() {
    let world = World::with_misfit_nodes(MisfitNodes::Resolvable)
        .with_node("n1", &[100])
        .with_node("n2", &[100]);
    let late = units("late", 10);
    world.api.put(&late);
    world.apply_pod(&late);
    world.apply_node(&reporting_node("n1", true, 1));
    assert_eq!(world.fitting(&late, &["n1"]).await, ["n1"]);
    world.apply_node(&reporting_node("n1", false, 2));
    let refusal =
        "node's device plugin does not serve kubelet now, or is tried again with few pods at a time";
    let answer = world.filter(&units("p", 10), &["n1"]).await;
    assert_eq!(
        answer["FailedAndUnresolvableNodes"]["n1"], refusal,
        "eviction helps nothing"
    );
    assert_eq!(world.fitting(&units("q", 10), &["n1", "n2"]).await, ["n2"]);
    let error = world.bind(&late, "n1").await;
    assert!(
        error.contains(refusal) && error.contains("no pods are sent here: the device plugin has ended"),
        "{error}"
    );
    let shown = world.inspect(Some("n1")).await;
    assert_eq!(
        shown["nodes"][0]["plugin"],
        "no pods are sent here: the device plugin has ended"
    );
    let (_, metrics) = world.send("GET", "/metrics", "").await;
    for line in [
        "gpushare_scheduler_plugin_away_nodes 1",
        r#"refused_binds_total{reason="plugin_away"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    let n_before = n_silent(&world);
    world.apply_node(&reporting_node("n1", true, 3));
    assert_eq!(n_silent(&world), n_before + 1, "refused pods are tried again");
    assert_eq!(world.bind(&late, "n1").await, "");
}

#[tokio::test(start_paused = true)]
async fn pods_without_a_device_request_need_no_plugin() {
    let world = World::new().with_node("n1", &[100]);
    world.apply_node(&reporting_node("n1", false, 1));
    let plain = crate::objects::pod("plain", &json!({"cpu": "1"}));
    assert_eq!(world.fitting(&plain, &["n1"]).await, ["n1"]);
}

#[tokio::test(start_paused = true)]
async fn no_pod_is_evicted_on_a_node_without_a_serving_plugin() {
    let world = World::new().with_node("n1", &[100]);
    let holder = units("holder", 80);
    world.place(&holder, "n1").await;
    let mut important = units("important", 80);
    important["spec"]["priority"] = 1000.into();
    let proposals = json!({"n1": {"Pods": [{"UID": "uid-holder"}], "NumPDBViolations": 0}});
    let body =
        json!({"Pod": important, "NodeNameToVictims": null, "NodeNameToMetaVictims": proposals}).to_string();
    for (serving, n_candidates) in [(false, 0), (true, 1)] {
        world.apply_node(&reporting_node("n1", serving, 1 + u32::from(serving)));
        let (_, answer) = world
            .send("POST", "/gpushare-scheduler/preempt", body.clone())
            .await;
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(
            answer["NodeNameToMetaVictims"].as_object().unwrap().len(),
            n_candidates
        );
    }
}

/// Each pod that fails frees its room, and the node would be the best one again.
#[tokio::test(start_paused = true)]
async fn a_restarted_plugin_gets_few_pods_at_first() {
    let world = World::new().with_node("n1", &[100]);
    world.apply_node(&reporting_node("n1", true, 1));
    let first = units("first", 10);
    world.place(&first, "n1").await;
    world.apply_pod(&failed(&world.api.pod(&first), "n1"));
    assert!(world.fitting(&units("p", 10), &["n1"]).await.is_empty());
    world.apply_node(&reporting_node("n1", true, 62));
    let pods: Vec<Value> = (0..5).map(|nth| units(&format!("p{nth}"), 10)).collect();
    let mut n_sent = 0;
    for pod in &pods {
        world.api.put(pod);
        world.apply_pod(pod);
        n_sent += world.fitting(pod, &["n1"]).await.len();
    }
    assert_eq!(n_sent, 3);
    for pod in &pods[..3] {
        assert_eq!(world.bind(pod, "n1").await, "");
        world.see(pod);
    }
    assert!(
        world
            .bind(&pods[3], "n1")
            .await
            .contains("3 pods are tried at a time")
    );
    assert!(world.fitting(&pods[3], &["n1"]).await.is_empty());
    let n_before = n_silent(&world);
    world.apply_pod(&admitted(world.api.pod(&pods[0])));
    assert_eq!(n_silent(&world), n_before + 1);
    assert_eq!(world.fitting(&pods[3], &["n1"]).await, ["n1"]);
}
