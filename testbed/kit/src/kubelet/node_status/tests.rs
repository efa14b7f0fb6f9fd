//! Tests of the node status patch.

use rstest::rstest;
use serde_json::{Value, json};

use super::{ResourceList, status_patch};
use crate::kubelet::devices::Capacity;

fn list(pairs: &[(&str, &str)]) -> ResourceList {
    pairs
        .iter()
        .map(|(name, amount)| ((*name).to_owned(), (*amount).to_owned()))
        .collect()
}

fn plugins(counts: &[(&str, usize, usize)], removed: &[&str]) -> Capacity {
    let counts = counts
        .iter()
        .map(|(name, all, healthy)| ((*name).to_owned(), (*all, *healthy)))
        .collect();
    Capacity {
        counts,
        removed: removed.iter().map(|name| (*name).to_owned()).collect(),
    }
}

#[rstest]
#[case::nothing_to_do(&[("cpu", "2"), ("x.io/p", "5")], &[("cpu", "2000m"), ("x.io/p", "5")], &plugins(&[], &[]), None)]
#[case::devices_appear(&[("cpu", "2")], &[("cpu", "2")], &plugins(&[("x.io/d", 4, 3)], &[]),
    Some(json!({"capacity": {"x.io/d": "4"}, "allocatable": {"x.io/d": "3"}})))]
#[case::a_patched_capacity_is_copied_to_allocatable(&[("cpu", "2"), ("x.io/p", "5")], &[("cpu", "2"), ("x.io/p", "4")], &plugins(&[], &[]),
    Some(json!({"capacity": {}, "allocatable": {"x.io/p": "5"}})))]
#[case::allocatable_without_capacity_goes(&[("cpu", "2")], &[("cpu", "2"), ("x.io/p", "4")], &plugins(&[], &[]),
    Some(json!({"capacity": {}, "allocatable": {"x.io/p": null}})))]
#[case::a_removed_resource_is_zero(&[("cpu", "2"), ("x.io/d", "4")], &[("cpu", "2"), ("x.io/d", "0")], &plugins(&[], &["x.io/d"]),
    Some(json!({"capacity": {"x.io/d": "0"}, "allocatable": {}})))]
#[case::a_resource_that_came_back_is_counted(&[("cpu", "2")], &[("cpu", "2")], &plugins(&[("x.io/d", 1, 1)], &["x.io/d"]),
    Some(json!({"capacity": {"x.io/d": "1"}, "allocatable": {"x.io/d": "1"}})))]
#[case::own_resources_are_kept(&[("cpu", "3")], &[], &plugins(&[], &[]),
    Some(json!({"capacity": {"cpu": "2"}, "allocatable": {"cpu": "2"}})))]
fn node_status(
    #[case] capacity: &[(&str, &str)],
    #[case] allocatable: &[(&str, &str)],
    #[case] plugins: &Capacity,
    #[case] expected: Option<Value>,
) {
    let patch = status_patch(
        &list(capacity),
        &list(allocatable),
        &list(&[("cpu", "2")]),
        plugins,
    );
    assert_eq!(patch, expected.map(|status| json!({"status": status})));
}
