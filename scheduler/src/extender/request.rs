//! The request of `filter` and `prioritize`: a pod, and the nodes that kube-scheduler considers for it.
//!
//! kube-scheduler sends node names if the extender is configured with `nodeCacheCapable: true`, and whole Node objects
//! otherwise. Names are borrowed from the body, since a request may carry thousands of them.

use std::borrow::Cow;
use std::hash::BuildHasher;

use proto::extender::{ExtenderArgs, Name, WholeNode};
use proto::pod::Pod;
use rustc_hash::FxBuildHasher;

/// A parsed request.
#[derive(Debug)]
pub(super) struct FilterRequest<'a> {
    pub(super) pod: Pod,
    /// Node names in the order of the request.
    pub(super) names: Vec<Cow<'a, str>>,
    /// The Node object of each name, in the same order, if the request carries whole nodes.
    pub(super) whole_nodes: Option<Vec<WholeNode>>,
}

/// The body of a request cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ParseError {
    #[error(transparent)]
    Encoding(#[from] std::str::Utf8Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("neither NodeNames nor Nodes is given")]
    NoNodes,
}

impl<'a> FilterRequest<'a> {
    /// Parses a body. `NodeNames` counts if both forms are given.
    pub(super) fn parse(body: &'a [u8]) -> Result<Self, ParseError> {
        // One check of the whole body for UTF-8 is cheaper than one for each name.
        let body = std::str::from_utf8(body)?;
        let ExtenderArgs {
            pod,
            nodes,
            node_names,
        } = serde_json::from_str(body)?;
        let (names, whole_nodes) = match (node_names, nodes) {
            (Some(names), _) => (names.into_iter().map(|Name(name)| name).collect(), None),
            (None, Some(nodes)) => {
                // Copies, since the nodes themselves are handed back.
                let names = nodes
                    .items
                    .iter()
                    .map(|whole| Cow::Owned(whole.name().to_owned()));
                (names.collect(), Some(nodes.items))
            }
            (None, None) => return Err(ParseError::NoNodes),
        };
        Ok(Self {
            pod,
            names,
            whole_nodes,
        })
    }
}

/// A hash of the set of names, whatever their order.
pub(super) fn hash_of_set(names: &[Cow<'_, str>]) -> u64 {
    let hashes = names.iter().map(|name| FxBuildHasher.hash_one(&**name));
    hashes.fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

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
        let request = FilterRequest::parse(body.as_bytes()).unwrap();
        assert_eq!(request.names, expected);
        let n_whole = request.whole_nodes.map(|nodes| nodes.len());
        assert!(n_whole.is_none_or(|n| n == expected.len()), "{n_whole:?}");
    }

    #[rstest]
    #[case::no_nodes(r#"{"Pod":{},"NodeNames":null}"#)]
    #[case::names_twice(r#"{"Pod":{},"NodeNames":["a"],"NodeNames":["b"]}"#)]
    #[case::name_is_a_number(r#"{"Pod":{},"NodeNames":[1]}"#)]
    #[case::no_pod(r#"{"Nodes":null,"NodeNames":["a"]}"#)]
    #[case::pod_is_a_number(r#"{"Pod":7,"NodeNames":["a"]}"#)]
    #[case::one_comma_more(r#"{"Pod":{},"NodeNames":["a",]}"#)]
    #[case::cut_off(r#"{"Pod":{},"NodeNames":["a"]"#)]
    #[case::something_behind(r#"{"Pod":{},"NodeNames":["a"]},"b"]}"#)]
    fn other_bodies_are_refused(#[case] body: &str) {
        assert!(FilterRequest::parse(body.as_bytes()).is_err());
    }

    #[test]
    fn the_hash_of_a_set_does_not_depend_on_the_order() {
        let hash = |names: &[&'static str]| {
            hash_of_set(&names.iter().map(|name| Cow::Borrowed(*name)).collect::<Vec<_>>())
        };
        assert_eq!(hash(&["a", "b", "c"]), hash(&["c", "a", "b"]));
        assert_ne!(hash(&["a", "b"]), hash(&["a", "c"]));
    }
}
