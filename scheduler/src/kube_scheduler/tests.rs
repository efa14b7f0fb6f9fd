//! Refusals as kube-scheduler's plugins give them.

use proto::node::Node;
use proto::pod::Pod;
use rstest::rstest;
use serde_json::{Value, json};

use super::{NodeFacts, NodeRefusal, NodeRequests, PodRules, RequestSums, Shortage, check, requests_of};

fn node(spec: &Value) -> NodeFacts {
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": "n1", "labels": {"zone": "a", "empty": ""}},
        "spec": spec,
        "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "3", "aliyun.com/gpu-mem": "16"}},
    }))
    .unwrap();
    NodeFacts::of(&node)
}

fn pod(spec: &Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "team", "uid": "u"}, "spec": spec}))
        .unwrap()
}

/// The spec of a pod with one container that requests these amounts.
fn asks(requests: &Value) -> Value {
    json!({"containers": [{"name": "main", "resources": {"requests": requests}}]})
}

fn sums(pods: &[Pod]) -> RequestSums {
    let mut sums = RequestSums::default();
    for pod in pods {
        sums.add(&requests_of(pod));
    }
    sums
}

fn taint(effect: &str) -> Value {
    json!({"taints": [{"key": "gpu", "value": "yes", "effect": effect}]})
}

/// Required node affinity of one term, which names each of these nodes alone.
fn named(nodes: &[&str]) -> Value {
    let mut fields = Vec::new();
    for node in nodes {
        fields.push(json!({"key": "metadata.name", "operator": "In", "values": [node]}));
    }
    let terms = json!([{ "matchFields": fields }]);
    json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}})
}

#[rstest]
#[case::nothing_in_the_way(json!({}), json!({}), "fits")]
#[case::cordoned(json!({"unschedulable": true}), json!({}), "unschedulable")]
#[case::cordoned_and_tolerated(
    json!({"unschedulable": true}),
    json!({"tolerations": [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]}),
    "fits"
)]
#[case::another_node(json!({}), json!({"nodeName": "n2"}), "other node")]
#[case::this_node(json!({}), json!({"nodeName": "n1"}), "fits")]
#[case::hard_taint(taint("NoSchedule"), json!({}), "taint gpu")]
#[case::evicting_taint(taint("NoExecute"), json!({}), "taint gpu")]
#[case::soft_taint(taint("PreferNoSchedule"), json!({}), "fits")]
#[case::tolerated(taint("NoSchedule"), json!({"tolerations": [{"key": "gpu", "value": "yes"}]}), "fits")]
#[case::other_value(taint("NoSchedule"), json!({"tolerations": [{"key": "gpu", "value": "no"}]}), "taint gpu")]
#[case::selected(json!({}), json!({"nodeSelector": {"zone": "a", "empty": ""}}), "fits")]
#[case::not_selected(json!({}), json!({"nodeSelector": {"zone": "b"}}), "affinity")]
#[case::label_missing(json!({}), json!({"nodeSelector": {"disk": ""}}), "affinity")]
#[case::affinity(
    json!({}),
    json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}
    ]}}}}),
    "affinity"
)]
#[case::other_name_before_a_taint(taint("NoSchedule"), named(&["n9"]), "not named")]
#[case::names_that_exclude_each_other(taint("NoSchedule"), named(&["n8", "n9"]), "conflict")]
#[case::preferred_affinity(
    json!({}),
    json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}}
    ]}}}),
    "fits"
)]
#[case::taint_before_affinity(taint("NoSchedule"), json!({"nodeSelector": {"zone": "b"}}), "taint gpu")]
#[case::all_of_it(json!({}), asks(&json!({"cpu": "4", "memory": "8Gi", "aliyun.com/gpu-mem": "16"})), "fits")]
#[case::a_little_more_cpu(json!({}), asks(&json!({"cpu": "4001m"})), "Insufficient cpu 4001 of 4000")]
#[case::not_offered(json!({}), asks(&json!({"nvidia.com/gpu": "1"})), "Insufficient nvidia.com/gpu 1 of 0")]
#[case::zero_of_what_is_not_offered(json!({}), asks(&json!({"nvidia.com/gpu": "0"})), "fits")]
#[case::two_at_once(
    json!({}),
    asks(&json!({"cpu": "5", "aliyun.com/gpu-mem": "17"})),
    "Insufficient aliyun.com/gpu-mem 17 of 16, cpu 5000 of 4000"
)]
fn an_empty_node_is_refused_by_the_first_check_that_fails(
    #[case] node_spec: Value,
    #[case] pod_spec: Value,
    #[case] expected: &str,
) {
    let verdict = check(
        &PodRules::of(&pod(&pod_spec)),
        &node(&node_spec),
        &RequestSums::default(),
    );
    let text = match verdict {
        Ok(()) => "fits".to_owned(),
        Err(NodeRefusal::NotNamed) => "not named".to_owned(),
        Err(NodeRefusal::AffinityConflict) => "conflict".to_owned(),
        Err(NodeRefusal::Unschedulable) => "unschedulable".to_owned(),
        Err(NodeRefusal::OtherNode) => "other node".to_owned(),
        Err(NodeRefusal::Taint(taint)) => format!("taint {}", taint.key),
        Err(NodeRefusal::Affinity) => "affinity".to_owned(),
        Err(NodeRefusal::Insufficient(shortages)) => {
            let each = shortages
                .iter()
                .map(|s| format!("{} {} of {}", s.resource, s.asked, s.free()));
            format!("Insufficient {}", each.collect::<Vec<_>>().join(", "))
        }
    };
    assert_eq!(text, expected);
}

#[test]
fn requests_of_the_pods_on_a_node_leave_less() {
    let rules = PodRules::of(&pod(&asks(&json!({"aliyun.com/gpu-mem": "10"}))));
    let one = sums(&[pod(&asks(&json!({"aliyun.com/gpu-mem": "7"})))]);
    let refusal = check(&rules, &node(&json!({})), &one).unwrap_err();
    let shortage = Shortage {
        resource: "aliyun.com/gpu-mem".into(),
        asked: 10,
        allocatable: 16,
        requested: 7,
    };
    assert_eq!(
        (shortage.free(), shortage.missing(), shortage.is_lasting()),
        (9, 1, false)
    );
    assert!(refusal.is_lack_of_room());
    assert_eq!(refusal, NodeRefusal::Insufficient(vec![shortage]));
}

/// Other schedulers may bind more than a node has: the excess has to end too.
#[test]
fn an_overcommitted_node_lacks_more_than_is_asked() {
    let pods = [pod(&asks(&json!({"cpu": "3"}))), pod(&asks(&json!({"cpu": "3"})))];
    let of = |cpu: &str| {
        let rules = PodRules::of(&pod(&asks(&json!({"cpu": cpu}))));
        check(&rules, &node(&json!({})), &sums(&pods))
    };
    let Err(NodeRefusal::Insufficient(shortages)) = of("100m") else {
        panic!("fits");
    };
    assert_eq!((shortages[0].free(), shortages[0].missing()), (0, 2100));
    assert_eq!(of("0"), Ok(()), "kube-scheduler compares nothing with nothing");
}

#[test]
fn a_node_takes_as_many_pods_as_it_allows() {
    let idle = pod(&json!({"containers": [{"name": "main"}]}));
    let rules = PodRules::of(&idle);
    let (two, three) = (
        sums(&[idle.clone(), idle.clone()]),
        sums(&[idle.clone(), idle.clone(), idle]),
    );
    assert_eq!(check(&rules, &node(&json!({})), &two), Ok(()));
    let Err(NodeRefusal::Insufficient(shortages)) = check(&rules, &node(&json!({})), &three) else {
        panic!("a fourth pod fits a node for three");
    };
    assert_eq!((&*shortages[0].resource, shortages[0].allocatable), ("pods", 3));
}

#[test]
fn sums_are_those_of_the_pods_that_are_counted() {
    let mut requests = NodeRequests::default();
    let (small, large) = (
        requests_of(&pod(&asks(&json!({"cpu": "1"})))),
        requests_of(&pod(&asks(
            &json!({"cpu": "2", "example.com/x": u64::MAX.to_string()}),
        ))),
    );
    requests.put("a".into(), "n1", &small, false);
    // An assumed pod counts as tied to no node, until the watch shows that it is of a `DaemonSet`.
    requests.put("b".into(), "n1", &large, false);
    requests.put("b".into(), "n1", &large, true);
    requests.put("c".into(), "n1", &large, false);
    assert_eq!(
        requests.on("n1").map(|sums| (sums.n_pods, sums.of("cpu"))),
        Some((3, 5000))
    );
    assert_eq!(requests.of_tied_pods_on("n1").of("cpu"), 2000);
    // A pod that moves, as in a restore of etcd, counts once.
    requests.put("c".into(), "n2", &small, false);
    requests.remove("b");
    assert_eq!(requests.on("n1").map(|sums| sums.n_pods), Some(1));
    assert_eq!(requests.on("n1").map(|sums| sums.of("example.com/x")), Some(0));
    assert_eq!(requests.of_pod("c"), Some(&small));
    requests.remove("a");
    requests.remove("a");
    assert_eq!(requests.on("n1"), None);
}
