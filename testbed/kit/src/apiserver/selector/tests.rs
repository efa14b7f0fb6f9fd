//! Tests of selectors: accepted texts, and matches.

use rstest::rstest;
use serde_json::json;

use super::*;

fn pod() -> Value {
    json!({
        "metadata": {"name": "p", "namespace": "ns", "labels": {"app": "web", "tier": "front", "example.com/x": ""}},
        "spec": {"nodeName": "n1", "hostNetwork": true, "priority": 7},
        "status": {"phase": "Running"},
    })
}

#[rstest]
#[case::nothing("", true)]
#[case::equal("app=web", true)]
#[case::double_equal("app == web", true)]
#[case::other_value("app=db", false)]
#[case::not_equal("app!=db", true)]
#[case::not_equal_without_the_label("none!=db", true)]
#[case::several("app=web,tier=front", true)]
#[case::one_of_several_fails("app=web,tier=back", false)]
#[case::among("app in (db, web)", true)]
#[case::among_then_more("app in (db,web),tier=back", false)]
#[case::absent_label_is_in_nothing("none in (a)", false)]
#[case::not_among("app notin (db,web)", false)]
#[case::absent_label_is_not_among("none notin (a)", true)]
#[case::exists("tier", true)]
#[case::exists_with_prefix("example.com/x", true)]
#[case::does_not_exist("!tier", false)]
#[case::absent("!none", true)]
#[case::empty_value("example.com/x=", true)]
fn label_selectors_match_as_in_kubernetes(#[case] text: &str, #[case] expected: bool) {
    assert_eq!(ParsedSelector::parse(text).unwrap().matches(&pod()), expected);
}

#[rstest]
#[case::unbalanced("app in (a")]
#[case::no_operator("app of (a)")]
#[case::no_key("=a")]
#[case::bad_key("a b=c")]
fn bad_label_selectors_are_refused(#[case] text: &str) {
    assert_eq!(ParsedSelector::parse(text).unwrap_err().code, 400);
}

#[rstest]
#[case::name("metadata.name=p", true)]
#[case::node("spec.nodeName=n1", true)]
#[case::unbound("spec.nodeName=", false)]
#[case::terminal("status.phase!=Succeeded,status.phase!=Failed", true)]
#[case::double_equal("metadata.namespace==ns", true)]
#[case::missing_is_empty("spec.schedulerName=", true)]
#[case::missing_differs("spec.schedulerName!=x", true)]
#[case::boolean("spec.hostNetwork=true", true)]
#[case::number("spec.priority=8", false)]
fn field_selectors_match_as_in_kubernetes(#[case] text: &str, #[case] expected: bool) {
    assert_eq!(FieldSelector::parse(text).unwrap().matches(&pod()), expected);
}

#[test]
fn a_field_selector_needs_an_operator() {
    assert_eq!(FieldSelector::parse("spec.nodeName").unwrap_err().code, 400);
}
