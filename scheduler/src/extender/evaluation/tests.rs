//! Tests of the request's parser and of the order of nodes.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::index::{Attempt, hints};
use crate::offline;
use crate::watch::ObjectStore;

fn parse(body: &str) -> Result<FilterRequest<'_>, RequestError> {
    FilterRequest::parse("filter", body.as_bytes(), &NameLists::default())
}

#[rstest]
#[case::as_kube_scheduler_sends_it(
    r#"{"Pod":{"metadata":{"uid":"u"}},"Nodes":null,"NodeNames":["a","b-1.example.com"]}"#,
    &["a", "b-1.example.com"]
)]
#[case::none(r#"{"Pod":{},"Nodes":null,"NodeNames":[]}"#, &[])]
#[case::unknown_field(r#"{"Pod":{},"Else":[1],"NodeNames":["a"]}"#, &["a"])]
#[case::other_order("{ \"NodeNames\": [\"a\", \"b\"], \"Pod\": {} }\n", &["a", "b"])]
#[case::words_in_an_annotation(
    r#"{"Pod":{"metadata":{"annotations":{"a":"\",\"NodeNames\":[\"x\"]}"}}},"NodeNames":["a"]}"#,
    &["a"]
)]
#[case::field_of_the_pod(r#"{"Pod":{"metadata":{"NodeNames":["x"]}},"NodeNames":["a"]}"#, &["a"])]
#[case::brackets_in_a_name(r#"{"Pod":{},"NodeNames":["a,b]}","{"]}"#, &["a,b]}", "{"])]
#[case::escapes(r#"{"Pod":{},"NodeNames":["a\u0062","\"","ä",""]}"#, &["ab", "\"", "ä", ""])]
#[case::whole_nodes(r#"{"Pod":{},"Nodes":{"items":[{"metadata":{"name":"a"}},{}]}}"#, &["a", ""])]
#[case::both_forms(r#"{"Pod":{},"Nodes":{"items":[{}]},"NodeNames":["a"]}"#, &["a"])]
fn names_are_read(#[case] body: &str, #[case] expected: &[&str]) {
    let request = parse(body).unwrap();
    assert_eq!(request.names.iter().collect::<Vec<_>>(), expected);
    let n_whole = request.whole_nodes.map(|nodes| nodes.len());
    assert!(n_whole.is_none_or(|n| n == expected.len()), "{n_whole:?}");
}

#[test]
fn the_hash_of_names_does_not_depend_on_their_order() {
    let hash = |names: &str| {
        let body = format!(r#"{{"Pod":{{}},"NodeNames":{names}}}"#);
        parse(&body).unwrap().hash_of_names()
    };
    assert_eq!(hash(r#"["a", "b", "c"]"#), hash(r#"["c", "a", "b"]"#));
    assert_ne!(hash(r#"["a", "b"]"#), hash(r#"["a", "c"]"#));
}

/// Nodes that differ at least by name: failed, avoided, score, name.
fn nodes() -> impl Strategy<Value = Vec<(bool, bool, u32, String)>> {
    let one = (any::<bool>(), any::<bool>(), 0..4_u32);
    let by_name = prop::collection::btree_map("[a-z]{3}", one, 0..40);
    let nodes = by_name.prop_map(|nodes| {
        let nodes = nodes.into_iter();
        nodes
            .map(|(name, (failed, avoided, score))| (failed, avoided, score, name))
            .collect::<Vec<_>>()
    });
    nodes.prop_shuffle()
}

/// The rank of a node with these properties.
pub(in crate::extender) fn rank(
    (has_failed, is_avoided, score, name): &(bool, bool, u32, String),
) -> RankKey<'_> {
    RankKey {
        has_failed: *has_failed,
        is_avoided: *is_avoided,
        score: Reverse(Score::of_points(*score)),
        name,
    }
}

proptest! {
    /// `TopN` comes to the same as sorting all nodes.
    #[test]
    fn the_top_n_are_the_first_n_of_all_nodes_in_order(mut nodes in nodes(), n in 1..12_usize, are_sorted: bool) {
        if are_sorted {
            nodes.sort_by(|one, other| one.3.cmp(&other.3));
        }
        let mut top = TopN::new(n, are_sorted);
        let is_below = |top: &TopN<'_, usize>, idx: usize| {
            top.least().is_some_and(|least| Score::of_points(nodes[idx].2) < least)
        };
        let mut below = Vec::new();
        for (idx, node) in nodes.iter().enumerate() {
            below.push(is_below(&top, idx));
            top.insert(rank(node), idx);
        }
        let mut order: Vec<usize> = (0..nodes.len()).collect();
        order.sort_by_key(|idx| rank(&nodes[*idx]));
        let (best, others) = order.split_at(n.min(order.len()));
        prop_assert!(!best.iter().any(|idx| below[*idx]));
        if let Some(last) = best.last().filter(|last| best.len() == n && !nodes[**last].0 && !nodes[**last].1) {
            let is_worse = |idx: &&usize| nodes[**idx].2 < nodes[*last].2;
            prop_assert!(others.iter().filter(is_worse).all(|idx| is_below(&top, *idx)), "lower scores are excluded");
        }
        prop_assert_eq!(top.into_items(), best);
    }
}

/// The number of nodes, which is enough for a list of names to be remembered.
const N_NODES: usize = 256;

/// A node with one GPU of up to eight units, none at all in some cases, or with a taint.
fn node(at: usize) -> Value {
    let units = at % 9;
    let amounts = json!({"aliyun.com/gpu-mem": units.to_string(), "aliyun.com/gpu-count": "1"});
    let taints = json!([{"key": "k", "effect": "PreferNoSchedule"}]);
    let capacity = if units == 0 { json!({}) } else { amounts };
    json!({
        "metadata": {"name": format!("n{}", at * 7 % 1000)},
        "spec": if at.is_multiple_of(5) { json!({"taints": taints}) } else { json!({}) },
        "status": {"capacity": capacity, "allocatable": capacity},
    })
}

/// A change before a request: a node goes or comes, or room is kept on the best node for the pod of the last request.
#[derive(Clone, Copy, Debug)]
enum Change {
    Nothing,
    Node(usize),
    Hint,
}

proptest! {
    /// The nodes of a remembered list are evaluated to the same result as those of any other, and as many fit as one by one.
    #[test]
    fn remembered_lists_are_evaluated_as_others(
        steps in prop::collection::vec((1..10_u32, 1..4_usize, prop_oneof![Just(Change::Nothing), (0..N_NODES).prop_map(Change::Node), Just(Change::Hint)]), 2..24)
    ) {
        let mut index = offline::index((0..N_NODES).map(node), std::iter::empty(), std::iter::empty());
        let lists = NameLists::default();
        // The last name has no node.
        let mut names: Vec<Value> = (0..N_NODES).map(|at| node(at)["metadata"]["name"].clone()).collect();
        names.push(json!("unknown"));
        let began = Instant::now();
        for (at, (units, n, change)) in (0..).zip(steps) {
            if let Change::Node(at) = change {
                let object: Node = serde_json::from_value(node(at)).unwrap();
                if index.knows_node(node(at)["metadata"]["name"].as_str().unwrap()) {
                    index.delete(&object);
                } else {
                    index.apply(object);
                }
            }
            let limits = json!({"aliyun.com/gpu-mem": units.to_string()});
            let pod = json!({
                "metadata": {"name": "p", "namespace": "d", "uid": format!("u{at}")},
                "spec": {"containers": [{"name": "c", "resources": {"limits": limits}}]},
            });
            let body = format!(r#"{{"Pod":{pod},"NodeNames":{}}}"#, Value::from(names.clone()));
            let failed = [Box::from("n0")];
            let evaluate = |lists: &NameLists| {
                let request = FilterRequest::parse("filter", body.as_bytes(), lists).unwrap();
                let facts = PodFacts::of(&request.pod, index.names());
                let demand = Demand::of(&index, &request.pod, facts.as_ref());
                let ranker = Ranker { index: &index, spec: &request.pod.spec, failed: &failed };
                let found = evaluate_all(&index, &demand, &request, Some((ranker, n)));
                let fits = |name: &&str| index.filter().fit(name, demand.resources().unwrap()).is_ok();
                assert_eq!(found.n_fitting, request.names.iter().filter(fits).count());
                let misfits = if found.n_fitting == 0 { found.misfits } else { Vec::new() };
                let reported: Vec<_> = found.reported.iter().map(|one| (one.idx, one.name.to_owned(), one.node)).collect();
                (found.n_fitting, found.n_refused, reported, misfits)
            };
            let first = evaluate(&NameLists::default());
            prop_assert_eq!(&evaluate(&lists), &first);
            prop_assert_eq!(&evaluate(&lists), &first);
            let best = first.2.first().and_then(|best| best.2);
            if let (Change::Hint, Some(best)) = (change, best) {
                let request = parse(&body).unwrap();
                let facts = PodFacts::of(&request.pod, index.names());
                let demand = index.demand(request.pod.uid(), &facts.unwrap()).unwrap().unwrap();
                let (attempt, now) = (Attempt::of(&request.pod), began + Duration::from_secs(at));
                hints::hint(&mut index, best, &demand, &attempt, now);
            }
        }
    }
}
