//! The extender's JSON, with the keys of kube-scheduler.

use rstest::rstest;
use serde_json::{Value, json};

use super::*;

#[test]
fn names_are_borrowed_from_the_request() {
    let body = r#"{"Pod":{"metadata":{"name":"p","uid":"u"},"spec":{"containers":[]}},"Nodes":null,"NodeNames":["n1","n\u0032"]}"#;
    let args: ExtenderArgs<'_> = serde_json::from_str(body).unwrap();
    let names = args.node_names.unwrap();
    assert!(matches!(&names[0].0, Cow::Borrowed("n1")));
    assert_eq!(names[1].0, "n2");
    assert!(args.nodes.is_none());
    assert_eq!(args.pod.uid(), "u");
}

#[test]
fn whole_nodes_are_returned_unchanged() {
    let node = r#"{"metadata":{"name":"n1","creationTimestamp":null},"spec":{"podCIDR":"10.0.0.0/24"},"status":{"capacity":{"aliyun.com/gpu-mem":"30"}}}"#;
    let body = format!(
        r#"{{"Pod":{{"spec":{{"containers":null}}}},"Nodes":{{"metadata":{{}},"items":[{node}]}},"NodeNames":null}}"#
    );
    let args: ExtenderArgs<'_> = serde_json::from_str(&body).unwrap();
    let nodes = args.nodes.unwrap();
    assert_eq!(nodes.items[0].node.capacity("aliyun.com/gpu-mem"), Some(30));
    let sent: Value = serde_json::from_str(node).unwrap();
    assert_eq!(serde_json::to_value(&nodes.items[0]).unwrap(), sent);
}

/// Go writes nil slices and maps as null.
#[test]
fn null_lists_are_read_as_empty() {
    let body = r#"{"Pod":{"spec":{"containers":null,"initContainers":null}},"Nodes":{"items":null},"NodeNames":null}"#;
    assert!(
        serde_json::from_str::<ExtenderArgs<'_>>(body)
            .unwrap()
            .nodes
            .unwrap()
            .items
            .is_empty()
    );
    let body = r#"{"Pod":{},"Nodes":{"items":[{"metadata":{"name":"n"},"status":{"capacity":null,"allocatable":null}}]}}"#;
    assert_eq!(
        serde_json::from_str::<ExtenderArgs<'_>>(body)
            .unwrap()
            .nodes
            .unwrap()
            .items[0]
            .node
            .capacity("cpu"),
        None
    );
}

#[test]
fn keys_of_answers_are_capitalised() {
    let filter = ExtenderFilterResult {
        node_names: Some(vec!["n3"]),
        failed_nodes: vec![("n1", "unknown".into())],
        failed_and_unresolvable_nodes: vec![("n2", "full".into())],
        ..ExtenderFilterResult::default()
    };
    let priorities = [HostPriority {
        host: "n3",
        score: 10,
    }];
    insta::assert_snapshot!(serde_json::to_string(&filter).unwrap(), @r#"{"Nodes":null,"NodeNames":["n3"],"FailedNodes":{"n1":"unknown"},"FailedAndUnresolvableNodes":{"n2":"full"},"Error":""}"#);
    insta::assert_snapshot!(serde_json::to_string(&priorities).unwrap(), @r#"[{"Host":"n3","Score":10}]"#);
    insta::assert_snapshot!(serde_json::to_string(&ExtenderBindingResult::default()).unwrap(), @r#"{"Error":""}"#);
}

#[test]
fn the_key_of_the_uid_in_binding_arguments_is_in_capitals() {
    let args: ExtenderBindingArgs =
        serde_json::from_str(r#"{"PodName":"p","PodNamespace":"ns","PodUID":"u","Node":"n"}"#).unwrap();
    assert_eq!((args.pod_name.as_str(), args.pod_uid.as_str()), ("p", "u"));
}

#[test]
fn malformed_bodies_are_errors() {
    for body in [
        "",
        "{",
        "[]",
        r#"{"NodeNames":["n1"]}"#,
        r#"{"Pod":{"spec":{"containers":7}}}"#,
        r#"{"Pod":{},"NodeNames":[1]}"#,
    ] {
        assert!(serde_json::from_str::<ExtenderArgs<'_>>(body).is_err(), "{body}");
    }
}

/// As kube-scheduler 1.36 writes it to an extender that is `nodeCacheCapable`.
#[test]
fn victims_are_read_by_uid_and_as_whole_pods() {
    let by_uid = json!({
        "Pod": {"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": null}, "status": {}},
        "NodeNameToVictims": null,
        "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "a"}, {"UID": "b"}], "NumPDBViolations": 1}, "n2": {"Pods": null, "NumPDBViolations": 0}},
    });
    let pod =
        |uid: &str| json!({"metadata": {"name": uid, "uid": uid}, "spec": {"containers": []}, "status": {}});
    let whole = json!({
        "Pod": {"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": null}, "status": {}},
        "NodeNameToVictims": {"n1": {"Pods": [pod("a"), pod("b")], "NumPDBViolations": 1}, "n2": {"Pods": null, "NumPDBViolations": 0}},
        "NodeNameToMetaVictims": null,
    });
    let read = |args: Value| {
        serde_json::from_value::<ExtenderPreemptionArgs>(args)
            .unwrap()
            .into_proposals()
            .1
    };
    assert_eq!(read(by_uid.clone()), read(whole));
    let victims = read(by_uid);
    assert_eq!(
        victims["n1"]
            .pods
            .iter()
            .map(|pod| pod.uid.as_str())
            .collect::<Vec<_>>(),
        ["a", "b"]
    );
    assert_eq!((victims["n1"].n_pdb_violations, victims["n2"].pods.len()), (1, 0));
}

#[test]
fn field_names_of_answers_are_those_of_the_go_types() {
    let victims = MetaVictims {
        pods: vec![MetaPod { uid: "a".to_owned() }],
        n_pdb_violations: 2,
    };
    let result = ExtenderPreemptionResult {
        node_name_to_meta_victims: [("n1".to_owned(), victims)].into(),
    };
    let expected = json!({"NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "a"}], "NumPDBViolations": 2}}});
    assert_eq!(serde_json::to_value(result).unwrap(), expected);
}

#[rstest]
#[case::nothing(json!({"containers": [{"name": "c"}]}), false)]
#[case::a_port_of_its_own(json!({"containers": [{"name": "c", "ports": [{"containerPort": 80}]}]}), false)]
#[case::a_port_of_the_node(json!({"containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": 80}]}]}), true)]
#[case::volumes_of_its_own(json!({"volumes": [{"name": "v", "emptyDir": {}}, {"name": "token", "projected": {"sources": []}}]}), false)]
#[case::a_claim(json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}), true)]
#[case::away_from_pods(json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}}), true)]
#[case::near_pods(json!({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}}), true)]
#[case::on_nodes(json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}}), false)]
#[case::spread(json!({"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]}), true)]
#[case::spread_unless(json!({"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]}), false)]
fn dependence_on_other_pods(#[case] spec: Value, #[case] expected: bool) {
    let pod = json!({"metadata": {"name": "p"}, "spec": spec});
    let request = json!({"Pod": pod, "NodeNameToMetaVictims": {}}).to_string();
    let pod: Pod = serde_json::from_value(pod).unwrap();
    assert_eq!(depends_on_other_pods(request.as_bytes(), &pod).unwrap(), expected);
}
