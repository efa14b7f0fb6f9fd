//! Tests of the node status patch.

use rstest::rstest;
use serde_json::{Value, json};

use super::{ResourceList, status_patch};

fn list(pairs: &[(&str, &str)]) -> ResourceList {
    pairs
        .iter()
        .map(|(name, amount)| ((*name).to_owned(), (*amount).to_owned()))
        .collect()
}

#[rstest]
#[case::nothing_to_do(&[("cpu", "2"), ("x.io/p", "5")], &[("cpu", "2000m"), ("x.io/p", "5")], &[], &[], None)]
#[case::devices_appear(&[("cpu", "2")], &[("cpu", "2")], &[("x.io/d", 4, 3)], &[],
    Some(json!({"capacity": {"x.io/d": "4"}, "allocatable": {"x.io/d": "3"}})))]
#[case::a_patched_capacity_is_copied_to_allocatable(&[("cpu", "2"), ("x.io/p", "5")], &[("cpu", "2"), ("x.io/p", "4")], &[], &[],
    Some(json!({"capacity": {}, "allocatable": {"x.io/p": "5"}})))]
#[case::allocatable_without_capacity_goes(&[("cpu", "2")], &[("cpu", "2"), ("x.io/p", "4")], &[], &[],
    Some(json!({"capacity": {}, "allocatable": {"x.io/p": null}})))]
#[case::a_removed_resource_is_zero(&[("cpu", "2"), ("x.io/d", "4")], &[("cpu", "2"), ("x.io/d", "0")], &[], &["x.io/d"],
    Some(json!({"capacity": {"x.io/d": "0"}, "allocatable": {}})))]
#[case::a_resource_that_came_back_is_counted(&[("cpu", "2")], &[("cpu", "2")], &[("x.io/d", 1, 1)], &["x.io/d"],
    Some(json!({"capacity": {"x.io/d": "1"}, "allocatable": {"x.io/d": "1"}})))]
#[case::own_resources_are_kept(&[("cpu", "3")], &[], &[], &[],
    Some(json!({"capacity": {"cpu": "2"}, "allocatable": {"cpu": "2"}})))]
fn node_status(
    #[case] capacity: &[(&str, &str)],
    #[case] allocatable: &[(&str, &str)],
    #[case] counts: &[(&str, usize, usize)],
    #[case] removed: &[&str],
    #[case] expected: Option<Value>,
) {
    let counts = counts
        .iter()
        .map(|(name, all, healthy)| ((*name).to_owned(), (*all, *healthy)));
    let removed: Vec<String> = removed.iter().map(|name| (*name).to_owned()).collect();
    let lists = [&list(capacity), &list(allocatable), &list(&[("cpu", "2")])];
    let patch = status_patch(lists, &counts.collect(), &removed);
    assert_eq!(patch, expected.map(|status| json!({"status": status})));
}
