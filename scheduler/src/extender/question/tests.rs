//! The two ways of reading compared: whatever the fast one takes on, it reads as the other does.

use std::ops::Range;

use proptest::prelude::*;
use rstest::rstest;

use super::*;

/// What of a question counts: the pod, the names as they are and as they are written, and how many whole nodes there are.
type Read = (Pod, Vec<(String, String)>, Option<usize>);

fn shown(question: Question<'_>) -> Read {
    let head: Head = serde_json::from_slice(&question.head).unwrap();
    assert_eq!(head.pod, question.pod, "the head has the pod in it");
    match question.nodes {
        Nodes::Names(names) => {
            assert_eq!(names.get(names.len()), None);
            let written = |at| {
                let mut json = Vec::new();
                names.write(at, &mut json);
                String::from_utf8(json).unwrap()
            };
            let names = names
                .iter()
                .enumerate()
                .map(|(at, name)| (name.to_owned(), written(at)));
            (question.pod, names.collect(), None)
        }
        Nodes::Whole(nodes) => (question.pod, Vec::new(), Some(nodes.items.len())),
    }
}

/// What both ways make of a body; `None` for the fast one if it leaves the body to the other, whatever is on the roll.
fn both(body: &[u8], rolls: &[Roll]) -> (Option<Read>, Result<Read, String>) {
    let read = |roll: &Roll| Question::read_plain(body, roll).map(shown);
    let fast = read(&Roll::default());
    for roll in rolls {
        assert_eq!(read(roll), fast, "{roll:?}");
    }
    (
        fast,
        Question::parse(body)
            .map(shown)
            .map_err(|error| error.to_string()),
    )
}

/// A roll of these names, and one that has every other of them the other way round.
fn rolls(names: &[String]) -> [Roll; 2] {
    let plain = || {
        names
            .iter()
            .map(String::as_str)
            .filter(|name| !name.contains(|c: char| !(' '..='~').contains(&c) || c == '"' || c == '\\'))
    };
    let mut rolls = [Roll::default(), Roll::default()];
    rolls[0].update(&Fleet::new(), plain());
    rolls[1].update(
        &Fleet::new(),
        plain().step_by(2).collect::<Vec<_>>().into_iter().rev(),
    );
    rolls
}

#[rstest]
#[case::as_kube_scheduler_sends_it(
    r#"{"Pod":{"metadata":{"uid":"u"}},"Nodes":null,"NodeNames":["a","b-1.example.com"]}"#,
    true
)]
#[case::one(r#"{"Pod":{},"NodeNames":["a"]}"#, true)]
#[case::none(r#"{"Pod":{},"Nodes":null,"NodeNames":[]}"#, true)]
#[case::empty_name(r#"{"Pod":{},"NodeNames":["","a"]}"#, true)]
#[case::odd_but_plain(r#"{"Pod":{},"NodeNames":["a,b]}","{"]}"#, true)]
#[case::field_that_nobody_knows(r#"{"Pod":{},"Else":[1],"NodeNames":["a"]}"#, true)]
#[case::whole_nodes_too(r#"{"Pod":{},"Nodes":{"items":[{}]},"NodeNames":["a"]}"#, true)]
#[case::words_in_an_annotation(
    r#"{"Pod":{"metadata":{"annotations":{"a":"\",\"NodeNames\":[\"x\"]}"}}},"NodeNames":["a"]}"#,
    true
)]
#[case::field_of_the_pod(r#"{"Pod":{"metadata":{"a":1,"NodeNames":["x"]}},"NodeNames":["a"]}"#, false)]
#[case::names_first(r#"{"NodeNames":["a"],"Pod":{}}"#, false)]
#[case::null(r#"{"Pod":{},"Nodes":null,"NodeNames":null}"#, false)]
#[case::names_twice(r#"{"Pod":{},"NodeNames":["a"],"NodeNames":["b"]}"#, false)]
#[case::null_and_names(r#"{"Pod":{},"NodeNames":null,"NodeNames":["b"]}"#, false)]
#[case::escape(r#"{"Pod":{},"NodeNames":["a\u0062"]}"#, false)]
#[case::escaped_quote(r#"{"Pod":{},"NodeNames":["a\"","b"]}"#, false)]
#[case::not_ascii(r#"{"Pod":{},"NodeNames":["ä"]}"#, false)]
#[case::space_between(r#"{"Pod":{},"NodeNames":["a", "b"]}"#, false)]
#[case::space_behind("{\"Pod\":{},\"NodeNames\":[\"a\"]}\n", false)]
#[case::one_comma_more(r#"{"Pod":{},"NodeNames":["a",]}"#, false)]
#[case::no_comma(r#"{"Pod":{},"NodeNames":["a""b"]}"#, false)]
#[case::comma_alone(r#"{"Pod":{},"NodeNames":[,]}"#, false)]
#[case::number(r#"{"Pod":{},"NodeNames":[1]}"#, false)]
#[case::one_quote(r#"{"Pod":{},"NodeNames":["]}"#, false)]
#[case::cut_off(r#"{"Pod":{},"NodeNames":["a"]"#, false)]
#[case::something_behind(r#"{"Pod":{},"NodeNames":["a"]},"b"]}"#, false)]
#[case::closed_before(r#"{"Pod":{}},"NodeNames":["a"]}"#, false)]
#[case::no_pod(r#"{"Nodes":null,"NodeNames":["a"]}"#, false)]
#[case::pod_is_no_object(r#"{"Pod":7,"NodeNames":["a"]}"#, false)]
#[case::comma_before(r#"{"Pod":{},,"NodeNames":["a"]}"#, false)]
fn both_ways_agree(#[case] body: &str, #[case] is_plain: bool) {
    let (fast, usual) = both(body.as_bytes(), &rolls(&["a".to_owned()]));
    assert_eq!(fast.is_some(), is_plain, "{fast:?}");
    if let Some(fast) = fast {
        assert_eq!(usual, Ok(fast));
    }
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![8 => "[a-z0-9.-]{0,60}", 1 => "[ -~]{0,8}", 1 => "\\PC{0,4}"]
}

/// A piece of JSON by which a body is made of parts that belong there, and some that do not.
fn part() -> impl Strategy<Value = String> {
    let pod =
        |text: String| serde_json::json!({"metadata": {"uid": "u", "annotations": {"a": text}}}).to_string();
    let names = || prop::collection::vec(name(), 0..6);
    prop_oneof![
        4 => prop_oneof![Just(r#","NodeNames":["x"]}"#.to_owned()), ".{0,9}"].prop_map(move |text| format!(r#""Pod":{}"#, pod(text))),
        1 => Just(r#""Nodes":null"#.to_owned()),
        1 => Just(r#""Else":{"NodeNames":["x"]}"#.to_owned()),
        4 => names().prop_map(|names| format!(r#""NodeNames":{}"#, serde_json::Value::from(names))),
        1 => names().prop_map(|names| format!(r#""NodeNames":["{}"]"#, names.join(r#"","#))),
    ]
}

fn body() -> impl Strategy<Value = (String, Vec<String>)> {
    let usual = prop::collection::vec(name(), 0..40).prop_map(|names| {
        let json = serde_json::Value::from(names.clone());
        (
            format!(r#"{{"Pod":{{"metadata":{{"uid":"u"}}}},"Nodes":null,"NodeNames":{json}}}"#),
            names,
        )
    });
    let odd = prop::collection::vec(part(), 0..4)
        .prop_map(|parts| (format!("{{{}}}", parts.join(",")), Vec::new()));
    prop_oneof![usual, odd]
}

proptest! {
    /// Whole bodies, and bodies in which some bytes are replaced by others.
    #[test]
    fn what_is_read_fast_is_read_right((body, names) in body(), swap in any::<(prop::sample::Index, prop::sample::Index)>(), at in any::<prop::sample::Index>(), cut in 0..3_usize, put in "[\\[\\]{}\",:a\\\\ ]{0,3}") {
        let (mut body, mut known) = (body.into_bytes(), names);
        if !known.is_empty() {
            let (one, other) = (swap.0.index(known.len()), swap.1.index(known.len()));
            known.swap(one, other);
        }
        let rolls = rolls(&known);
        let (fast, usual) = both(&body, &rolls);
        prop_assert!(fast.is_none_or(|fast| usual == Ok(fast)), "{}", String::from_utf8_lossy(&body));
        let at = at.index(body.len() + 1);
        let cut: Range<usize> = at..(at + cut).min(body.len());
        body.splice(cut, put.bytes()).for_each(drop);
        let (fast, usual) = both(&body, &rolls);
        prop_assert!(fast.is_none_or(|fast| usual == Ok(fast)), "{}", String::from_utf8_lossy(&body));
    }

    /// What kube-scheduler sends is read fast.
    #[test]
    fn names_of_nodes_are_plain(names in prop::collection::vec("[a-z0-9]([a-z0-9.-]{0,60}[a-z0-9])?", 0..50)) {
        let json = serde_json::Value::from(names.clone());
        let body = format!(r#"{{"Pod":{{"metadata":{{"uid":"u"}}}},"Nodes":null,"NodeNames":{json}}}"#);
        let (_, read, _) = Question::read_plain(body.as_bytes(), &Roll::default()).map(shown).unwrap();
        prop_assert_eq!(read.into_iter().map(|(name, _)| name).collect::<Vec<_>>(), names);
    }
}
