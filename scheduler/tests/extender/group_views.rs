//! Groups in the read API: `fit` with a domain answers as the filter decides, and `explain` shows a group and its places.

use std::collections::BTreeMap;

use proto::pod_group::GroupDomain;
use proto::read_api::{AddedNodes, FitAnswer, FitPlacement, FitRequest};
use rstest::rstest;
use scheduler::read_api::{explain, fit};
use serde_json::{Value, json};

use crate::groups::{Mark, member, members, refusal, taking, world};
use crate::objects::{annotated, device, node, on, shared, units};
use crate::world::World;

const TOGETHER: &str = "no link group of the node has room for all pods";

/// A request about pods of one kind.
fn asking(pod: &Value, replicas: u32, domain: Option<GroupDomain>) -> FitRequest {
    FitRequest {
        pod: serde_json::from_value(pod.clone()).unwrap(),
        replicas,
        domain,
        ..FitRequest::default()
    }
}

/// The answer about pods that each take one GPU of 100 MiB.
fn answer(world: &World, replicas: u32, domain: GroupDomain) -> FitAnswer {
    let request = asking(&shared("probe", 1, 100), replicas, Some(domain));
    fit(&world.index, &request).unwrap()
}

/// Two nodes of two link groups: three and three GPUs are free on n1, four and three on n2.
fn two_nodes() -> World {
    two_nodes_named("n1", "n2")
}

/// The same with other names.
fn two_nodes_named(fuller: &str, emptier: &str) -> World {
    let world = world(&["n1", "n2"]);
    taking(&world, "a", fuller, &[0, 4]);
    taking(&world, "b", emptier, &[5]);
    world
}

/// The number of pods that fit, that of nodes with room for all, and the node and GPUs of all pods.
#[rstest]
#[case::link(GroupDomain::Link, 4, 4, 1, "n2 [0, 1, 2, 3]")]
#[case::larger_than_each_link(GroupDomain::Link, 5, 4, 0, "")]
#[case::node(GroupDomain::Node, 7, 7, 1, "n2 [0, 1, 2, 3, 4, 6, 7]")]
#[case::both_nodes(GroupDomain::Node, 6, 6, 2, "n1 [1, 2, 3, 5, 6, 7]")]
#[case::larger_than_each_node(GroupDomain::Node, 8, 7, 0, "")]
#[case::no_pods(GroupDomain::Link, 0, 0, 0, "")]
#[tokio::test(start_paused = true)]
async fn room_in_one_domain(
    #[case] domain: GroupDomain,
    #[case] replicas: u32,
    #[case] fitting: u32,
    #[case] nodes_with_room: u32,
    #[case] place: &str,
) {
    let answer = answer(&two_nodes(), replicas, domain);
    assert_eq!(
        (answer.domain, answer.fitting, answer.nodes_with_room),
        (domain, fitting, nodes_with_room)
    );
    let mut places = Vec::new();
    for FitPlacement { node, pods, gpus } in answer.placements {
        places.push(format!("{node} {:?}", gpus.into_keys().collect::<Vec<u32>>()));
        assert_eq!(pods, replicas);
    }
    assert_eq!(places.concat(), place);
    assert_eq!(answer.blocked.values().sum::<u32>() == 2, fitting < replicas);
}

#[tokio::test(start_paused = true)]
async fn without_a_domain_pods_are_placed_apart() {
    let answer = answer(&two_nodes(), 8, GroupDomain::Any);
    assert_eq!((answer.fitting, answer.nodes_with_room), (8, 0));
    assert_eq!(answer.placements.len(), 2);
}

/// Whatever the number of pods, the filter places a group on the node of the answer, or refuses it with the same largest number.
#[rstest]
#[tokio::test(start_paused = true)]
async fn fit_answers_as_the_filter_decides(
    #[values(GroupDomain::Node, GroupDomain::Link)] domain: GroupDomain,
    #[values(2, 3, 4, 5, 6, 7, 8)] n: u32,
    #[values(("n1", "n2"), ("n2", "n1"))] names: (&str, &str),
) {
    let world = two_nodes_named(names.0, names.1);
    let answer = answer(&world, n, domain);
    let wish = format!("{} required", domain.as_str());
    let first = member(&world, Mark::Native, "m0", 100, n, &wish);
    if let Some(placed) = answer.placements.first() {
        assert_eq!(world.fitting(&first, &["n1", "n2"]).await, [placed.node.as_str()]);
        let index = world.index.read();
        assert_eq!(index.fleet().n_hints(), usize::try_from(placed.pods).unwrap());
    } else {
        let text = refusal(&world, &first, &["n1", "n2"]).await;
        assert!(
            text.ends_with(&format!("the largest has room for {}", answer.fitting)),
            "{text}"
        );
    }
}

/// The flag of the command counts before the annotation of the manifest, and a broken annotation is a fault of the manifest.
#[rstest]
#[case::annotation("link", None, Ok(GroupDomain::Link))]
#[case::flag("link", Some(GroupDomain::Node), Ok(GroupDomain::Node))]
#[case::flag_any("link", Some(GroupDomain::Any), Ok(GroupDomain::Any))]
#[case::flag_alone("", Some(GroupDomain::Link), Ok(GroupDomain::Link))]
#[case::neither("", None, Ok(GroupDomain::Any))]
#[case::unknown(
    "rack",
    None,
    Err("annotation gpushare/group-domain: \"rack\" is none of any, node, link")
)]
#[tokio::test]
async fn the_domain_of_a_question(
    #[case] annotation: &str,
    #[case] flag: Option<GroupDomain>,
    #[case] expected: Result<GroupDomain, &str>,
) {
    let world = world(&["n1"]);
    let mut probe = shared("probe", 1, 100);
    if !annotation.is_empty() {
        probe = annotated(probe, "gpushare/group-domain", annotation);
    }
    let answer = fit(&world.index, &asking(&probe, 2, flag)).unwrap();
    assert_eq!(answer.invalid.as_deref().map_or(Ok(answer.domain), Err), expected);
    assert_eq!(answer.fitting, if expected.is_ok() { 2 } else { 0 });
}

#[tokio::test]
async fn a_domain_is_searched_for_64_pods_at_most() {
    let world = world(&["n1"]);
    let ask = |replicas, domain| fit(&world.index, &asking(&shared("probe", 1, 10), replicas, domain));
    assert_eq!(ask(64, Some(GroupDomain::Node)).unwrap().fitting, 64);
    let error = ask(65, Some(GroupDomain::Node)).unwrap_err();
    assert_eq!(
        error,
        "replicas: 65 is more than 64, the most pods of one domain; ask for fewer, or with the domain any"
    );
    assert_eq!(ask(65, None).unwrap().fitting, 65);
}

/// kube-scheduler compares sums of a node, which all pods of the group have to pass: n1 takes one pod and n2 three.
#[tokio::test]
async fn the_sums_of_a_node_bound_a_group() {
    let world = World::new();
    for (name, pods, n_gpus) in [("n1", "1", 8), ("n2", "3", 2)] {
        let mut small = node(name, "MiB");
        small["status"]["allocatable"]["pods"] = pods.into();
        world.apply_node(&small);
        world.apply_device(&device(name, &vec![100; n_gpus]));
    }
    let group = |replicas| answer(&world, replicas, GroupDomain::Node);
    let reason = |text: &str, n: u32| (text.to_owned(), n);
    let (sums, devices) = ("Too many pods", "the node has no room for all pods");
    let expected = [
        (2, 2, vec![]),
        (3, 2, vec![reason(sums, 1), reason(devices, 1)]),
        (4, 2, vec![reason(sums, 2)]),
    ];
    for (replicas, fitting, blocked) in expected {
        let answer = group(replicas);
        assert_eq!(
            (answer.fitting, answer.blocked),
            (fitting, BTreeMap::from_iter(blocked))
        );
    }
    assert_eq!((group(1).nodes_with_room, group(2).nodes_with_room), (2, 1));
}

/// A node that refuses each single pod is counted under its own reason.
#[tokio::test]
async fn nodes_that_take_no_pod_have_their_own_reason() {
    let world = world(&["n1", "n2"]);
    let mut cordoned = node("n2", "MiB");
    cordoned["spec"] = json!({"unschedulable": true});
    world.apply_node(&cordoned);
    let answer = answer(&world, 5, GroupDomain::Link);
    let expected = [
        (TOGETHER.to_owned(), 1),
        ("node(s) were unschedulable".to_owned(), 1),
    ];
    assert_eq!((answer.fitting, answer.blocked), (4, BTreeMap::from(expected)));
}

#[tokio::test]
async fn added_nodes_have_domains_of_their_own() {
    let world = world(&["n1"]);
    taking(&world, "a", "n1", &[0, 1, 2, 3, 4, 5]);
    let mut request = asking(&shared("probe", 1, 100), 4, Some(GroupDomain::Link));
    let answer = fit(&world.index, &request).unwrap();
    assert_eq!((answer.fitting, answer.nodes_with_room), (2, 0));
    request.add_nodes.push(AddedNodes {
        like: "n1".to_owned(),
        count: 2,
    });
    let answer = fit(&world.index, &request).unwrap();
    assert_eq!((answer.fitting, answer.nodes_with_room), (4, 2));
    assert_eq!(
        (answer.placements[0].node.as_str(), answer.placements[0].pods),
        ("n1+1", 4)
    );
    request.replicas = 5;
    assert_eq!(fit(&world.index, &request).unwrap().fitting, 4);
}

/// The group of a pod, as `explain` shows it.
fn explained(world: &World, name: &str) -> Value {
    json!(explain(&world.index, "default", name, false).unwrap())["group"].clone()
}

/// Before the first filter request nothing is kept, after it room for all; the room that no member has taken is free as soon as one
/// is bound.
#[tokio::test(start_paused = true)]
async fn explain_shows_the_places_of_a_group() {
    let world = two_nodes();
    let pods = members(&world, Mark::Native, 4, 100, "link required");
    let group = json!({"name": "group", "kind": "native", "size": 4, "domain": "link", "policy": "required"});
    assert_eq!(explained(&world, "m3"), group);
    for pod in &pods[..3] {
        world.fitting(pod, &["n1", "n2"]).await;
    }
    let place = |name: &str, gpu: u32| json!({"name": name, "node": "n2", "gpus": [gpu]});
    let mut begun = group.clone();
    begun["room"] = json!({
        "node": "n2", "members": [place("m0", 0), place("m1", 3), place("m2", 2)], "open": 1, "openGpus": [1],
    });
    assert_eq!(explained(&world, "m3"), begun);
    world.place(&pods[1], "n2").await;
    let mut bound = group;
    bound["bound"] = json!([place("m1", 3)]);
    bound["room"] = json!({"node": "n2", "members": [place("m0", 0), place("m2", 2)], "open": 0});
    assert_eq!(explained(&world, "m3"), bound);
    assert_eq!(
        explained(&world, "m1"),
        bound,
        "a bound member has the same group"
    );
}

#[tokio::test(start_paused = true)]
async fn explain_shows_that_a_group_is_refused() {
    let world = two_nodes();
    let pods = members(&world, Mark::Koordinator, 5, 100, "link required");
    let text = refusal(&world, &pods[0], &["n1", "n2"]).await;
    let group = explained(&world, "m4");
    assert_eq!(
        group,
        json!({"name": "group", "kind": "koordinator", "size": 5, "domain": "link", "policy": "required", "refused": text})
    );
}

/// Groups without a wish have no places of their own, and most pods have no group.
#[tokio::test]
async fn explain_shows_groups_without_a_domain_in_short() {
    let world = world(&["n1"]);
    let short = |domain: &str| json!({"name": "group", "kind": "native", "size": 4, "domain": domain, "policy": "preferred"});
    world.apply_pod(&on(
        member(&world, Mark::Native, "m0", 100, 4, "any preferred"),
        "n1",
    ));
    assert_eq!(explained(&world, "m0"), short("any"));
    world.apply_pod(&units("alone", 1));
    assert_eq!(explained(&world, "alone"), Value::Null);
    member(&world, Mark::Native, "m1", 100, 4, "node preferred");
    let mut with_bound = short("node");
    with_bound["differing"] = json!(["m0"]);
    with_bound["bound"] = json!([{"name": "m0", "node": "n1", "gpus": [0, 1, 2, 3, 4, 5, 6, 7]}]);
    assert_eq!(
        explained(&world, "m1"),
        with_bound,
        "a pod without a record is counted on every GPU"
    );
}

/// The first member decides, and those with another wish are named, unless the object of the group has a wish.
#[tokio::test(start_paused = true)]
async fn explain_names_the_members_that_wish_something_else() {
    let world = two_nodes();
    let first = member(&world, Mark::Native, "m0", 100, 4, "link required");
    for name in ["m2", "m1"] {
        member(&world, Mark::Native, name, 100, 4, "node required");
    }
    assert_eq!(explained(&world, "m0")["differing"], json!(["m1", "m2"]));
    assert_eq!(
        explained(&world, "m2")["differing"],
        json!(["m0"]),
        "before a cycle"
    );
    world.fitting(&first, &["n1", "n2"]).await;
    let in_cycle = explained(&world, "m2");
    assert_eq!(
        (&in_cycle["domain"], &in_cycle["differing"]),
        (&json!("link"), &json!(["m1", "m2"]))
    );
    world.apply_pod_group(&json!({
        "apiVersion": "scheduling.k8s.io/v1alpha2", "kind": "PodGroup",
        "metadata": {"name": "group", "namespace": "default", "annotations": {"gpushare/group-domain": "node"}},
        "spec": {"schedulingPolicy": {"gang": {"minCount": 4}}},
    }));
    assert_eq!(explained(&world, "m0")["differing"], Value::Null);
}
