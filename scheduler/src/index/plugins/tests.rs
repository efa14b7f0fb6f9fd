use std::time::{Duration, Instant};

use proptest::prelude::*;
use proto::plugin_reports::PluginState;
use proto::pod::Pod;
use rstest::rstest;
use serde_json::{Value, json};

use super::{Away, FIRST_PAUSE, GONE_COUNTS_FOR, Plugins, Standing, TRIAL, failed_without_plugin};

const NAMESPACE: &str = "gpushare-system";

fn at(second: u32) -> String {
    format!("2026-11-23T05:44:{second:02}Z")
}

/// A pod of the plugin on node `n`, whose process started at this second and is ready or not.
fn plugin(uid: &str, process: Option<(u32, bool)>) -> Value {
    let state = process.map_or_else(
        || json!({"waiting": {}}),
        |(second, _)| json!({"running": {"startedAt": at(second)}}),
    );
    let is_ready = process.is_some_and(|(_, is_ready)| is_ready);
    json!({
        "metadata": {
            "name": uid, "namespace": NAMESPACE, "uid": uid, "labels": {"app.kubernetes.io/name": "gpushare-device-plugin"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "p", "uid": "d", "controller": true}],
        },
        "spec": {"nodeName": "n", "containers": []},
        "status": {"phase": "Running", "containerStatuses": [{"name": "p", "ready": is_ready, "state": state}]},
    })
}

/// The plugin's pod, which is being deleted.
fn leaving(uid: &str) -> Value {
    let mut pod = plugin(uid, Some((1, true)));
    pod["metadata"]["deletionTimestamp"] = json!(at(30));
    pod
}

fn pod(value: Value) -> Pod {
    serde_json::from_value(value).unwrap()
}

/// The annotation in which the plugin of a node reports since this second that it serves, or not.
fn report(serving: bool, second: u32, pod: Option<&str>) -> PluginState {
    PluginState {
        serving,
        since: at(second).parse().unwrap(),
        pod: pod.map(str::to_owned),
    }
}

fn plugins() -> Plugins {
    Plugins::of_namespace(NAMESPACE)
}

#[rstest]
#[case::nothing_is_known(&[], None, None)]
#[case::no_pod_and_a_report_that_it_serves(&[], Some(report(true, 1, None)), None)]
#[case::the_report_of_a_pod_that_is_not_seen(&[], Some(report(true, 1, Some("a"))), None)]
#[case::no_pod_and_a_report_that_it_ends(&[], Some(report(false, 1, None)), Some(Away::Gone))]
#[case::ready(&[plugin("a", Some((1, true)))], None, None)]
#[case::does_not_run(&[plugin("a", None)], None, Some(Away::NotServing))]
#[case::runs_and_is_not_ready(&[plugin("a", Some((1, false)))], None, Some(Away::NotServing))]
#[case::registered_before_the_probe(&[plugin("a", Some((1, false)))], Some(report(true, 2, Some("a"))), None)]
#[case::registered_in_the_second_of_the_start(&[plugin("a", Some((1, false)))], Some(report(true, 1, Some("a"))), None)]
#[case::a_report_of_the_process_before(&[plugin("a", Some((3, false)))], Some(report(true, 2, Some("a"))), Some(Away::NotServing))]
#[case::a_report_of_another_pod(&[plugin("b", Some((1, false)))], Some(report(true, 2, Some("a"))), Some(Away::NotServing))]
#[case::a_report_of_no_pod(&[plugin("a", Some((1, false)))], Some(report(true, 2, None)), None)]
#[case::kubelet_has_closed_a_list(&[plugin("a", Some((1, true)))], Some(report(false, 2, Some("a"))), Some(Away::NotServing))]
#[case::a_new_pod_after_the_report_of_the_old(&[plugin("b", Some((5, true)))], Some(report(false, 4, Some("a"))), None)]
#[case::being_deleted(&[leaving("a")], Some(report(true, 2, Some("a"))), Some(Away::Ending))]
#[case::the_old_pod_is_stuck(&[leaving("a"), plugin("b", Some((5, true)))], Some(report(false, 4, Some("a"))), None)]
#[case::the_new_pod_is_not_there_yet(&[leaving("a"), plugin("b", None)], Some(report(false, 4, Some("a"))), Some(Away::NotServing))]
fn pods_and_the_annotation_decide_if_a_node_is_offered(
    #[case] pods: &[Value],
    #[case] state: Option<PluginState>,
    #[case] expected: Option<Away>,
) {
    let expected = expected.map_or(Standing::Offered, Standing::Out);
    let (mut plugins, mut later) = (plugins(), plugins());
    for value in pods {
        plugins.put_pod(&pod(value.clone()), 1);
    }
    plugins.set_state("n", state.clone());
    later.set_state("n", state);
    for value in pods {
        later.put_pod(&pod(value.clone()), 1);
    }
    assert_eq!(
        (plugins.standing("n"), later.standing("n")),
        (expected, expected),
        "in either order"
    );
    assert_eq!(plugins.all_serve(), expected == Standing::Offered);
}

#[rstest]
#[case::another_namespace(&["metadata", "namespace"], json!("tenant"))]
#[case::no_label(&["metadata", "labels"], json!({}))]
#[case::no_daemon_set(&["metadata", "ownerReferences"], json!([]))]
fn pods_that_are_not_of_the_daemon_set_are_ignored(#[case] path: &[&str], #[case] value: Value) {
    let mut forged = leaving("a");
    let target = path.iter().fold(&mut forged, |at, key| &mut at[*key]);
    *target = value;
    let mut plugins = plugins();
    plugins.put_pod(&pod(forged), 1);
    assert_eq!(plugins.standing("n"), Standing::Offered);
}

#[test]
fn a_node_is_not_offered_during_a_rollout_until_the_new_plugin_serves() {
    let (mut plugins, now) = (plugins(), Instant::now());
    plugins.put_pod(&pod(plugin("a", Some((1, true)))), 1);
    plugins.set_state("n", Some(report(true, 1, Some("a"))));
    assert!(!plugins.put_pod(&pod(leaving("a")), 1));
    assert_eq!(plugins.standing("n"), Standing::Out(Away::Ending));
    plugins.set_state("n", Some(report(false, 30, Some("a"))));
    assert!(!plugins.remove_pod("a"));
    assert_eq!(
        plugins.standing("n"),
        Standing::Out(Away::Gone),
        "its pod is gone, and no other is there yet"
    );
    plugins.advance(now);
    plugins.put_pod(&pod(plugin("b", None)), 1);
    plugins.put_pod(&pod(plugin("b", Some((33, false)))), 1);
    assert_eq!(plugins.standing("n"), Standing::Out(Away::NotServing));
    assert!(
        plugins.set_state("n", Some(report(true, 34, Some("b")))),
        "room has opened"
    );
    assert_eq!(
        plugins.standing("n"),
        Standing::Offered,
        "a plugin that was replaced is not tried"
    );
    assert!(!plugins.advance(now + GONE_COUNTS_FOR) && plugins.all_serve());
}

/// The plugin's report counts until a probe fails after it.
#[test]
fn a_failed_probe_overrides_the_annotation_of_a_plugin() {
    let mut plugins = plugins();
    plugins.set_state("n", Some(report(true, 2, Some("a"))));
    plugins.put_pod(&pod(plugin("a", Some((1, false)))), 1);
    plugins.put_pod(&pod(plugin("a", Some((1, true)))), 1);
    assert_eq!(plugins.standing("n"), Standing::Offered);
    for _ in 0..2 {
        plugins.put_pod(&pod(plugin("a", Some((1, false)))), 1);
        assert_eq!(plugins.standing("n"), Standing::Out(Away::NotServing));
    }
    plugins.set_state("n", Some(report(true, 9, Some("a"))));
    assert_eq!(
        plugins.standing("n"),
        Standing::Offered,
        "it has registered again, and the probe follows"
    );
}

#[rstest]
#[case::list_is_closed(
    "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices aliyun.com/gpu-mem, which is unexpected",
    true
)]
#[case::socket_is_closed(
    "Pod was rejected: Allocate failed due to rpc error: code = Unavailable desc = error reading from server: EOF, which is unexpected",
    true
)]
#[case::plugin_refuses(
    "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition desc = no, which is unexpected",
    false
)]
#[case::accounts_differ(
    "Pod was rejected: Allocate failed due to requested number of devices unavailable for aliyun.com/gpu-mem. Requested: 4, Available: 1, which is unexpected",
    false
)]
fn failures_that_show_that_the_plugin_is_away(#[case] message: &str, #[case] expected: bool) {
    let failed =
        |reason: &str| pod(json!({"status": {"phase": "Failed", "reason": reason, "message": message}}));
    assert_eq!(
        failed_without_plugin(&failed("UnexpectedAdmissionError")),
        expected
    );
    assert!(!failed_without_plugin(&failed("Evicted")));
}

/// A plugin of a version that writes no annotation.
#[test]
fn a_deleted_plugin_pod_counts_for_a_while_or_until_another_is_ready() {
    let (mut plugins, now) = (plugins(), Instant::now());
    plugins.put_pod(&pod(plugin("a", Some((1, true)))), 1);
    plugins.end_list(2);
    assert_eq!(plugins.standing("n"), Standing::Out(Away::Gone));
    plugins.advance(now);
    assert!(!plugins.advance(now + GONE_COUNTS_FOR / 2));
    assert!(
        plugins.advance(now + GONE_COUNTS_FOR),
        "kubelet has taken the resources from the node by now"
    );
    assert_eq!(plugins.standing("n"), Standing::Offered);
}

#[test]
fn an_expired_annotation_does_not_count_again() {
    let (mut plugins, now) = (plugins(), Instant::now());
    plugins.set_state("n", Some(report(false, 1, None)));
    plugins.advance(now);
    assert!(plugins.advance(now + GONE_COUNTS_FOR));
    plugins.set_state("n", Some(report(false, 1, None)));
    assert_eq!(
        plugins.standing("n"),
        Standing::Offered,
        "the Node is shown again and again"
    );
    plugins.set_state("n", Some(report(false, 2, None)));
    assert_eq!(plugins.standing("n"), Standing::Out(Away::Gone));
    plugins.forget_node("n");
    assert!(plugins.all_serve() && plugins.nodes.is_empty());
}

#[test]
fn a_restarted_plugin_is_tried_before_it_is_ready() {
    let (mut plugins, now) = (plugins(), Instant::now());
    plugins.put_pod(&pod(plugin("a", Some((1, true)))), 1);
    plugins.put_pod(&pod(plugin("a", None)), 1);
    assert_eq!(plugins.standing("n"), Standing::Out(Away::NotServing));
    plugins.put_pod(&pod(plugin("a", Some((10, false)))), 1);
    plugins.advance(now);
    assert!(plugins.set_state("n", Some(report(true, 11, Some("a")))));
    assert_eq!(plugins.standing("n"), Standing::Tried);
    assert!(!plugins.all_serve() && plugins.is_due(now));
    plugins.advance(now);
    assert!(plugins.advance(now + TRIAL));
    assert_eq!(plugins.standing("n"), Standing::Offered);
}

#[test]
fn a_node_on_which_a_pod_has_failed_is_not_offered() {
    let (mut plugins, now) = (plugins(), Instant::now());
    plugins.set_state("n", Some(report(true, 1, None)));
    plugins.fail("n", Some(at(0).parse().unwrap()));
    assert_eq!(
        plugins.standing("n"),
        Standing::Offered,
        "the pod failed before the plugin served"
    );
    plugins.fail("n", Some(at(5).parse().unwrap()));
    plugins.fail("n", None);
    assert_eq!(plugins.standing("n"), Standing::Out(Away::Refusing));
    assert_eq!(plugins.n_left_out(), 1);
    plugins.advance(now);
    assert!(plugins.advance(now + FIRST_PAUSE));
    assert_eq!(plugins.standing("n"), Standing::Tried);
    plugins.fail("n", None);
    plugins.advance(now + FIRST_PAUSE);
    assert!(!plugins.advance(now + FIRST_PAUSE * 2), "twice as long");
    assert!(
        plugins.set_state("n", Some(report(true, 20, None))),
        "the plugin has reported again"
    );
    assert_eq!(plugins.standing("n"), Standing::Tried);
}

/// An event of one node.
#[derive(Clone, Debug)]
enum Event {
    Fail(u32),
    Wait(u16),
    Other(u8),
    List,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        (0..60_u32).prop_map(Event::Fail),
        (0..1000_u16).prop_map(Event::Wait),
        (0..4_u8).prop_map(Event::Other),
        Just(Event::List)
    ];
    proptest::collection::vec(event, 0..40)
}

proptest! {
    #[test]
    fn a_node_that_never_had_a_plugin_is_always_offered(events in events()) {
        let (mut plugins, mut now) = (plugins(), Instant::now());
        for (nth, event) in (1..).zip(events) {
            match event {
                Event::Fail(second) => plugins.fail("n", Some(at(second).parse().unwrap())),
                Event::Wait(seconds) => {
                    now += Duration::from_secs(seconds.into());
                    plugins.advance(now);
                }
                Event::Other(which) => {
                    let mut elsewhere = leaving(&which.to_string());
                    elsewhere["spec"]["nodeName"] = json!("m");
                    plugins.put_pod(&pod(elsewhere), nth);
                    plugins.set_state("m", Some(report(which == 0, 7, None)));
                }
                Event::List => {
                    plugins.end_list(nth);
                    plugins.set_state("n", None);
                }
            }
            prop_assert_eq!(plugins.standing("n"), Standing::Offered);
            let n_limited = plugins.nodes.values().filter(|on| on.standing != Standing::Offered).count();
            prop_assert_eq!(plugins.n_limited, n_limited);
        }
    }
}
