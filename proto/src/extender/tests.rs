//! The extender's JSON, key by key as kube-scheduler spells it.

use std::borrow::Cow;

use super::{ExtenderArgs, ExtenderBindingArgs, ExtenderBindingResult, ExtenderFilterResult, HostPriority};

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
fn whole_nodes_come_back_unchanged() {
    let node = r#"{"metadata":{"name":"n1","creationTimestamp":null},"spec":{"podCIDR":"10.0.0.0/24"},"status":{"capacity":{"aliyun.com/gpu-mem":"30"}}}"#;
    let body = format!(
        r#"{{"Pod":{{"spec":{{"containers":null}}}},"Nodes":{{"metadata":{{}},"items":[{node}]}},"NodeNames":null}}"#
    );
    let args: ExtenderArgs<'_> = serde_json::from_str(&body).unwrap();
    let nodes = args.nodes.unwrap();
    assert_eq!(nodes.items[0].node.capacity("aliyun.com/gpu-mem"), Some(30));
    let sent: serde_json::Value = serde_json::from_str(node).unwrap();
    assert_eq!(serde_json::to_value(&nodes.items[0]).unwrap(), sent);
}

/// Go writes nil slices and maps as null.
#[test]
fn nothing_can_be_null() {
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
fn answers_have_capitalised_keys() {
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
fn binding_arguments_spell_the_uid_in_capitals() {
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
