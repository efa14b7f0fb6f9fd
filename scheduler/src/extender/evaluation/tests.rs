//! Tests of the request's parser and of the order of nodes.

use proptest::prelude::*;
use rstest::rstest;

use super::*;

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
    fn the_top_n_are_the_first_n_of_all_nodes_in_order(nodes in nodes(), n in 1..12_usize) {
        let mut top = TopN::new(n);
        for (idx, node) in nodes.iter().enumerate() {
            top.insert(rank(node), idx);
        }
        let mut order: Vec<usize> = (0..nodes.len()).collect();
        order.sort_by_key(|idx| rank(&nodes[*idx]));
        let (best, others) = order.split_at(n.min(order.len()));
        let is_excluded = |idx: &usize| top.excludes(Score::of_points(nodes[*idx].2), || &nodes[*idx].3);
        let is_plain = |idx: &usize| !nodes[*idx].0 && !nodes[*idx].1;
        prop_assert!(!best.iter().any(is_excluded));
        if best.last().is_some_and(is_plain) {
            prop_assert!(others.iter().filter(|idx| is_plain(idx)).all(is_excluded), "plain nodes are excluded");
        }
        prop_assert_eq!(top.into_items(), best);
    }
}
