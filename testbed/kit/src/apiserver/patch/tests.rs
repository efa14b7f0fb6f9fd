//! Tables of patches: object, patch, result.

use chrono::DateTime;
use rstest::rstest;
use serde_json::json;

use super::managers::FieldWriter;
use super::strategic::Schema;
use super::*;

#[rstest]
#[case::replaces_a_value(json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"}))]
#[case::adds_a_value(json!({"a": "b"}), json!({"b": "c"}), json!({"a": "b", "b": "c"}))]
#[case::null_removes(json!({"a": "b", "b": 1}), json!({"a": null}), json!({"b": 1}))]
#[case::lists_replace(json!({"a": [1, 2]}), json!({"a": [3]}), json!({"a": [3]}))]
#[case::objects_merge(json!({"a": {"b": "c"}}), json!({"a": {"b": "d", "c": null}}), json!({"a": {"b": "d"}}))]
#[case::nulls_inside_new_objects_vanish(json!({}), json!({"a": {"bb": {"ccc": null}}}), json!({"a": {"bb": {}}}))]
#[case::an_object_replaces_a_scalar(json!({"a": 1}), json!({"a": {"b": 1}}), json!({"a": {"b": 1}}))]
fn merge_patches(#[case] mut object: Value, #[case] patch: Value, #[case] expected: Value) {
    merge(&mut object, &patch);
    assert_eq!(object, expected);
}

fn containers() -> Value {
    json!({"spec": {"containers": [
        {"name": "a", "image": "i", "env": [{"name": "X", "value": "1"}]},
        {"name": "b", "image": "j"},
    ]}})
}

#[rstest]
#[case::containers_merge_by_name(
    containers(),
    json!({"spec": {"containers": [{"name": "b", "image": "k"}, {"name": "c", "image": "l"}]}}),
    json!({"spec": {"containers": [
        {"name": "a", "image": "i", "env": [{"name": "X", "value": "1"}]},
        {"name": "b", "image": "k"}, {"name": "c", "image": "l"}]}})
)]
#[case::env_merges_inside_containers(
    containers(),
    json!({"spec": {"containers": [{"name": "a", "env": [{"name": "Y", "value": "2"}]}]}}),
    json!({"spec": {"containers": [
        {"name": "a", "image": "i", "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}]},
        {"name": "b", "image": "j"}]}})
)]
#[case::items_are_deleted_by_key(
    containers(),
    json!({"spec": {"containers": [{"name": "a", "$patch": "delete"}]}}),
    json!({"spec": {"containers": [{"name": "b", "image": "j"}]}})
)]
#[case::lists_are_replaced_on_demand(
    containers(),
    json!({"spec": {"containers": [{"$patch": "replace"}, {"name": "z"}]}}),
    json!({"spec": {"containers": [{"name": "z"}]}})
)]
#[case::lists_are_ordered_on_demand(
    containers(),
    json!({"spec": {"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}]}}),
    json!({"spec": {"containers": [
        {"name": "b", "image": "j"}, {"name": "a", "image": "i", "env": [{"name": "X", "value": "1"}]}]}})
)]
#[case::conditions_merge_by_type(
    json!({"status": {"conditions": [{"type": "Ready", "status": "False"}, {"type": "X", "status": "True"}]}}),
    json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
    json!({"status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "X", "status": "True"}]}})
)]
#[case::tolerations_are_atomic(
    json!({"spec": {"tolerations": [{"key": "a"}]}}),
    json!({"spec": {"tolerations": [{"key": "b"}]}}),
    json!({"spec": {"tolerations": [{"key": "b"}]}})
)]
#[case::finalizers_are_a_set(
    json!({"metadata": {"finalizers": ["a", "b"]}}),
    json!({"metadata": {"finalizers": ["b", "c"], "$deleteFromPrimitiveList/finalizers": ["a"]}}),
    json!({"metadata": {"finalizers": ["b", "c"]}})
)]
#[case::maps_are_replaced_on_demand(
    json!({"metadata": {"labels": {"a": "1"}}}),
    json!({"metadata": {"labels": {"$patch": "replace", "b": "2"}}}),
    json!({"metadata": {"labels": {"b": "2"}}})
)]
#[case::maps_are_deleted_on_demand(
    json!({"metadata": {"labels": {"a": "1"}, "name": "n"}}),
    json!({"metadata": {"labels": {"$patch": "delete"}}}),
    json!({"metadata": {"name": "n"}})
)]
#[case::only_retained_keys_stay(
    json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}),
    json!({"spec": {"volumes": [{"name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/"}}]}}),
    json!({"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}})
)]
fn strategic_patches(#[case] mut object: Value, #[case] patch: Value, #[case] expected: Value) {
    strategic::merge(&mut object, &patch, &Schema::Builtin).unwrap();
    assert_eq!(object, expected);
}

#[rstest]
#[case::item_without_its_key(json!({"spec": {"containers": [{"image": "x"}]}}))]
#[case::unknown_directive(json!({"metadata": {"labels": {"$patch": "frobnicate"}}}))]
#[case::not_an_object(json!([1]))]
fn bad_strategic_patches_are_refused(#[case] patch: Value) {
    assert_eq!(
        strategic::merge(&mut containers(), &patch, &Schema::Builtin)
            .unwrap_err()
            .code,
        400
    );
}

#[test]
fn a_failed_json_patch_test_is_unprocessable() {
    let operations = json!([{"op": "test", "path": "/a", "value": 1}, {"op": "remove", "path": "/a"}]);
    let mut object = json!({"a": 1});
    json_patch(&mut object, operations.clone()).unwrap();
    assert_eq!(object, json!({}));
    assert_eq!(json_patch(&mut object, operations).unwrap_err().code, 422);
    assert_eq!(
        json_patch(&mut object, json!({"op": "remove"})).unwrap_err().code,
        400
    );
}

fn writer(manager: &str) -> FieldWriter<'_> {
    FieldWriter {
        manager,
        subresource: "",
        api_version: "v1",
        now: DateTime::UNIX_EPOCH,
    }
}

fn applied(live: Option<&Value>, declared: &Value, manager: &str, force: bool) -> Result<Value, ApiError> {
    apply::apply(live, declared, writer(manager), force, &Schema::Builtin)
}

/// An object without its ownership record.
fn bare(mut object: Value) -> Value {
    managers::write(&mut object, &[]);
    if object["metadata"]
        .as_object()
        .is_some_and(serde_json::Map::is_empty)
    {
        object.as_object_mut().unwrap().remove("metadata");
    }
    object
}

#[test]
fn a_field_dropped_from_the_next_apply_is_removed_unless_another_manager_owns_it() {
    let one = applied(None, &json!({"data": {"mine": "1", "shared": "2"}}), "a", false).unwrap();
    let two = applied(
        Some(&one),
        &json!({"data": {"shared": "2", "theirs": "3"}}),
        "b",
        false,
    )
    .unwrap();
    let three = applied(Some(&two), &json!({"data": {"other": "4"}}), "a", false).unwrap();
    assert_eq!(
        bare(three),
        json!({"data": {"shared": "2", "theirs": "3", "other": "4"}})
    );
}

#[test]
fn another_managers_value_conflicts_until_forced() {
    let live = applied(None, &json!({"data": {"k": "1", "l": "1"}}), "a", false).unwrap();
    assert!(applied(Some(&live), &json!({"data": {"k": "1"}}), "b", false).is_ok());
    let error = applied(Some(&live), &json!({"data": {"k": "2"}}), "b", false).unwrap_err();
    assert_eq!(error.code, 409);
    insta::assert_snapshot!(error.message, @r#"Apply failed with 1 conflict: conflict with "a" using v1: .data.k"#);
    let error = applied(Some(&live), &json!({"data": {"k": "2", "l": "2"}}), "b", false).unwrap_err();
    insta::assert_snapshot!(error.message, @r#"
    Apply failed with 2 conflicts: conflicts with "a" using v1:
    - .data.k
    - .data.l
    "#);
    let forced = applied(Some(&live), &json!({"data": {"k": "2"}}), "b", true).unwrap();
    let again = applied(Some(&forced), &json!({"data": {"l": "1"}}), "a", false).unwrap();
    assert_eq!(bare(again), json!({"data": {"k": "2", "l": "1"}}));
}

#[test]
fn apply_merges_lists_by_key_and_removes_only_own_items() {
    let declared = |names: &[&str]| {
        let items: Vec<Value> = names.iter().map(|n| json!({"name": n, "image": "i"})).collect();
        json!({"spec": {"containers": items, "tolerations": [{"key": names[0]}]}})
    };
    let one = applied(None, &declared(&["a", "b"]), "x", false).unwrap();
    let mine = json!({"spec": {"containers": [{"name": "c", "image": "k"}]}});
    let two = applied(Some(&one), &mine, "y", false).unwrap();
    let three = applied(Some(&two), &declared(&["b"]), "x", false).unwrap();
    assert_eq!(
        bare(three),
        json!({"spec": {
            "containers": [{"name": "b", "image": "i"}, {"name": "c", "image": "k"}],
            "tolerations": [{"key": "b"}],
        }})
    );
}

#[test]
fn a_list_item_that_another_manager_extended_stays() {
    let one = applied(
        None,
        &json!({"spec": {"containers": [{"name": "a", "image": "i"}]}}),
        "x",
        false,
    )
    .unwrap();
    let extra = json!({"spec": {"containers": [{"name": "a", "env": [{"name": "E", "value": "1"}]}]}});
    let two = applied(Some(&one), &extra, "y", false).unwrap();
    let three = applied(
        Some(&two),
        &json!({"metadata": {"labels": {"l": "1"}}}),
        "x",
        false,
    )
    .unwrap();
    assert_eq!(
        three["spec"],
        json!({"containers": [{"name": "a", "env": [{"name": "E", "value": "1"}]}]})
    );
}

#[test]
fn fields_written_before_the_first_apply_have_an_owner() {
    let live = json!({"data": {"k": "1"}});
    let error = applied(Some(&live), &json!({"data": {"k": "2"}}), "a", false).unwrap_err();
    assert!(
        error.message.contains("\"before-first-apply\""),
        "{}",
        error.message
    );
    let merged = applied(Some(&live), &json!({"data": {"l": "2"}}), "a", false).unwrap();
    assert_eq!(bare(merged), json!({"data": {"k": "1", "l": "2"}}));
}

#[test]
fn an_update_takes_over_the_changed_fields() {
    let live = applied(None, &json!({"data": {"k": "1"}}), "a", false).unwrap();
    let mut updated = live.clone();
    updated["data"]["k"] = json!("2");
    managers::track_update(&live, &mut updated, writer("editor"), &Schema::Builtin);
    let error = applied(Some(&updated), &json!({"data": {"k": "1"}}), "a", false).unwrap_err();
    assert!(
        error.message.contains("conflict with \"editor\""),
        "{}",
        error.message
    );
    assert_eq!(
        bare(applied(Some(&updated), &json!({}), "a", false).unwrap()),
        json!({"data": {"k": "2"}})
    );
}

#[test]
fn custom_resources_merge_lists_as_their_schema_says() {
    let schema = json!({"properties": {"spec": {"properties": {
        "keyed": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["id"], "items": {}},
        "plain": {"items": {}},
    }}}});
    let schema = Schema::Custom(Some(std::sync::Arc::new(schema)));
    let declared = |id: &str| json!({"spec": {"keyed": [{"id": id}], "plain": [id]}});
    let one = apply::apply(None, &declared("a"), writer("x"), false, &schema).unwrap();
    let two = apply::apply(Some(&one), &declared("b"), writer("y"), true, &schema).unwrap();
    assert_eq!(
        bare(two),
        json!({"spec": {"keyed": [{"id": "a"}, {"id": "b"}], "plain": ["b"]}})
    );
}

#[test]
fn field_sets_keep_their_wire_form() {
    let object = json!({
        "metadata": {"finalizers": ["f"], "labels": {"a": "1"}},
        "spec": {"containers": [{"name": "c", "ports": [{"containerPort": 80}]}], "tolerations": [{"key": "t"}]},
    });
    let fields = fields::FieldSet::of(&object, &Schema::Builtin);
    let wire = fields.to_value();
    assert_eq!(fields::FieldSet::from_root(&wire), fields);
    insta::assert_snapshot!(serde_json::to_string_pretty(&wire).unwrap());
}
