//! The rules of creation, update, deletion and binding, through the in-process handle.

use std::sync::Arc;

use rstest::rstest;
use serde_json::{Value, json};

use crate::apiserver::{ApiError, ApiObjects};

fn pod(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}})
}

fn with_resources(resources: &Value) -> Value {
    let mut pod = pod("p");
    pod["spec"]["containers"][0]["resources"] = resources.clone();
    pod
}

fn cluster() -> ApiObjects {
    ApiObjects::new(1000)
}

fn bind_to(node: &str) -> Value {
    json!({"target": {"kind": "Node", "name": node}})
}

#[test]
fn new_pods_get_defaults() {
    let mut new = with_resources(&json!({"limits": {"aliyun.com/gpu-mem": 3, "cpu": "1"}}));
    new["status"] = json!({"phase": "Running"});
    let pod = cluster().create("pods", new).unwrap();
    assert_eq!(pod["spec"]["schedulerName"], "default-scheduler");
    assert_eq!(pod["spec"]["restartPolicy"], "Always");
    assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], 30);
    assert_eq!(pod["spec"]["containers"][0]["imagePullPolicy"], "Always");
    assert_eq!(
        pod["spec"]["containers"][0]["resources"]["requests"],
        json!({"aliyun.com/gpu-mem": "3", "cpu": "1"})
    );
    assert_eq!(
        pod["status"],
        json!({"phase": "Pending", "qosClass": "Burstable"})
    );
    assert_eq!(pod["metadata"]["namespace"], "default");
    assert_eq!(pod["metadata"]["uid"].as_str().unwrap().len(), 36);
}

#[rstest]
#[case::fraction(
    json!({"limits": {"a.b/c": "1500m"}}),
    r#"spec.containers[0].resources.limits[a.b/c]: Invalid value: "1500m": must be an integer"#
)]
#[case::request_without_limit(
    json!({"requests": {"a.b/c": "1"}}),
    "spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources"
)]
#[case::request_unlike_limit(
    json!({"requests": {"a.b/c": "1"}, "limits": {"a.b/c": "2"}}),
    r#"spec.containers[0].resources.requests: Invalid value: "1": must be equal to a.b/c limit of 2"#
)]
#[case::request_above_limit(
    json!({"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}),
    r#"spec.containers[0].resources.requests: Invalid value: "2": must be less than or equal to cpu limit of 1"#
)]
#[case::negative(
    json!({"limits": {"a.b/c": "-1"}}),
    r#"spec.containers[0].resources.limits[a.b/c]: Invalid value: "-1": must be greater than or equal to 0"#
)]
fn bad_resources_are_refused(#[case] resources: Value, #[case] expected: &str) {
    let error = cluster().create("pods", with_resources(&resources)).unwrap_err();
    assert_eq!(error.code, 422, "{error}");
    assert!(error.message.starts_with("Pod \"p\" is invalid: "), "{error}");
    assert!(error.message.contains(expected), "{error}");
}

#[rstest]
#[case::not_a_quantity(with_resources(&json!({"limits": {"cpu": "lots"}})), 400)]
#[case::containers_are_a_list(json!({"metadata": {"name": "p"}, "spec": {"containers": "c"}}), 400)]
#[case::labels_are_strings(json!({"metadata": {"name": "p", "labels": {"a": 1}}}), 400)]
#[case::other_kind(json!({"kind": "Node", "metadata": {"name": "p"}}), 400)]
#[case::no_containers(json!({"metadata": {"name": "p"}, "spec": {"containers": []}}), 422)]
#[case::bad_name(pod("Not_DNS"), 422)]
#[case::no_name(json!({"spec": {"containers": [{"name": "c", "image": "i"}]}}), 422)]
#[case::bad_label(json!({"metadata": {"name": "p", "labels": {"a": "-"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}), 422)]
#[case::extended_resource_of_the_pod(json!({"metadata": {"name": "p"}, "spec": {"resources": {"limits": {"a.b/c": "1"}}, "containers": [{"name": "c", "image": "i"}]}}), 422)]
#[case::mirror_without_node(json!({"metadata": {"name": "p", "annotations": {"kubernetes.io/config.mirror": "x"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}), 422)]
#[case::no_such_namespace(json!({"metadata": {"name": "p", "namespace": "nope"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}), 404)]
fn bad_pods_are_refused(#[case] pod: Value, #[case] code: u16) {
    let objects = cluster();
    let before = objects.revision();
    let error = objects.create("pods", pod).unwrap_err();
    assert_eq!(error.code, code, "{error}");
    assert_eq!(objects.revision(), before, "nothing may change");
}

#[rstest]
#[case::node("nodes", json!({"metadata": {"name": "n"}, "status": {"capacity": ["cpu"]}}))]
#[case::lease("leases", json!({"metadata": {"name": "l"}, "spec": {"renewTime": "yesterday"}}))]
#[case::config_map("configmaps", json!({"metadata": {"name": "m"}, "data": {"a": 1}}))]
fn objects_that_are_not_of_their_type_are_refused(#[case] resource: &str, #[case] object: Value) {
    let error = cluster().create(resource, object).unwrap_err();
    assert_eq!(error.code, 400, "{error}");
    assert!(error.message.contains("cannot be handled as a "), "{error}");
}

#[test]
fn generated_names_differ() {
    let objects = cluster();
    let mut generated = pod("");
    generated["metadata"] = json!({"generateName": "web-"});
    let names: Vec<Value> = (0..3)
        .map(|_| objects.create("pods", generated.clone()).unwrap()["metadata"]["name"].clone())
        .collect();
    assert!(
        names
            .iter()
            .all(|n| n.as_str().unwrap().starts_with("web-") && n.as_str().unwrap().len() == 9)
    );
    assert_ne!(names[0], names[1]);
}

#[test]
fn a_binding_sets_node_annotations_and_condition_in_one_write() {
    let objects = cluster();
    objects.create("pods", pod("p")).unwrap();
    let mut binding = bind_to("n1");
    binding["metadata"] = json!({"annotations": {"a": "1"}, "labels": {"l": "2"}});
    let before = objects.revision();
    let bound = objects.bind("default", "p", binding).unwrap();
    assert_eq!(objects.revision(), before + 1);
    assert_eq!(bound["spec"]["nodeName"], "n1");
    assert_eq!(bound["metadata"]["annotations"], json!({"a": "1"}));
    assert_eq!(bound["metadata"]["labels"], json!({"l": "2"}));
    assert_eq!(bound["status"]["conditions"][0]["type"], "PodScheduled");
    assert_eq!(bound["status"]["conditions"][0]["status"], "True");
}

fn refused_binding(objects: &ApiObjects, binding: &Value) -> ApiError {
    let before = objects.get("pods", "default", "p").unwrap();
    let error = objects.bind("default", "p", binding).unwrap_err();
    assert!(
        Arc::ptr_eq(&before, &objects.get("pods", "default", "p").unwrap()),
        "nothing may change"
    );
    error
}

#[test]
fn refused_bindings_have_the_messages_of_kube_apiserver() {
    let objects = cluster();
    let uid = objects.create("pods", pod("p")).unwrap()["metadata"]["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    let mut stale = bind_to("n1");
    stale["metadata"] = json!({"uid": "other"});
    let error = refused_binding(&objects, &stale);
    let words = "Operation cannot be fulfilled on pods/binding \"p\": Precondition failed: UID in precondition: other, \
                 UID in object meta: ";
    assert_eq!((error.code, error.message), (409, format!("{words}{uid}")));
    let mut old = bind_to("n1");
    old["metadata"] = json!({"resourceVersion": "1"});
    assert!(
        refused_binding(&objects, &old)
            .message
            .contains("Precondition failed: ResourceVersion in precondition: 1")
    );
    assert_eq!(
        refused_binding(&objects, &json!({"target": {"kind": "Node"}})).code,
        422
    );
    assert_eq!(
        refused_binding(&objects, &json!({"target": {"kind": "Pod", "name": "x"}})).code,
        422
    );
    objects.bind("default", "p", bind_to("n1")).unwrap();
    let error = refused_binding(&objects, &bind_to("n1"));
    assert_eq!(error.code, 409);
    assert_eq!(
        error.message,
        "Operation cannot be fulfilled on pods/binding \"p\": pod p is already assigned to node \"n1\""
    );
}

#[test]
fn terminating_and_gated_pods_are_not_bound() {
    let objects = cluster();
    let mut held = pod("p");
    held["metadata"]["finalizers"] = json!(["a.b/c"]);
    held["spec"]["schedulingGates"] = json!([{"name": "g"}]);
    objects.create("pods", held).unwrap();
    assert!(
        refused_binding(&objects, &bind_to("n"))
            .message
            .contains("has non-empty .spec.schedulingGates")
    );
    objects
        .patch("pods", "default", "p", json!({"spec": {"schedulingGates": []}}))
        .unwrap();
    assert!(!objects.delete("pods", "default", "p", None).unwrap());
    assert!(
        refused_binding(&objects, &bind_to("n"))
            .message
            .contains("is being deleted")
    );
}

#[test]
fn bound_pods_are_deleted_with_grace_and_unbound_ones_at_once() {
    let objects = cluster();
    objects.create("pods", pod("free")).unwrap();
    assert!(objects.delete("pods", "default", "free", None).unwrap());
    objects.create("pods", pod("p")).unwrap();
    objects.bind("default", "p", bind_to("n")).unwrap();
    assert!(!objects.delete("pods", "default", "p", None).unwrap());
    let dying = objects.get("pods", "default", "p").unwrap();
    assert_eq!(dying["metadata"]["deletionGracePeriodSeconds"], 30);
    let revision = objects.revision();
    assert!(
        !objects.delete("pods", "default", "p", Some(60)).unwrap(),
        "grace never grows"
    );
    assert_eq!(objects.revision(), revision);
    assert!(!objects.delete("pods", "default", "p", Some(5)).unwrap());
    assert_eq!(
        objects.get("pods", "default", "p").unwrap()["metadata"]["deletionGracePeriodSeconds"],
        5
    );
    assert!(objects.delete("pods", "default", "p", Some(0)).unwrap());
    assert_eq!(objects.get("pods", "default", "p").unwrap_err().code, 404);
}

#[test]
fn finished_pods_are_deleted_without_grace() {
    let objects = cluster();
    objects.create("pods", pod("p")).unwrap();
    objects.bind("default", "p", bind_to("n")).unwrap();
    objects
        .patch_status("pods", "default", "p", &json!({"phase": "Failed"}))
        .unwrap();
    assert!(objects.delete("pods", "default", "p", None).unwrap());
}

#[test]
fn finalizers_hold_an_object_until_the_last_is_gone() {
    let objects = cluster();
    let map = json!({"metadata": {"name": "m", "finalizers": ["a.b/c"]}});
    objects.create("configmaps", map).unwrap();
    assert!(!objects.delete("configmaps", "default", "m", None).unwrap());
    let more = json!({"metadata": {"finalizers": ["a.b/c", "d.e/f"]}});
    assert_eq!(
        objects
            .patch("configmaps", "default", "m", more)
            .unwrap_err()
            .code,
        422
    );
    objects
        .patch(
            "configmaps",
            "default",
            "m",
            json!({"metadata": {"finalizers": null}}),
        )
        .unwrap();
    assert_eq!(objects.get("configmaps", "default", "m").unwrap_err().code, 404);
}

#[rstest]
#[case::image(json!({"spec": {"containers": [{"name": "c", "image": "other"}]}}), 0)]
#[case::command(json!({"spec": {"containers": [{"name": "c", "image": "busybox", "command": ["x"]}]}}), 422)]
#[case::no_longer_a_pod(json!({"spec": {"containers": "c"}}), 400)]
#[case::node(json!({"spec": {"nodeName": "n"}}), 422)]
#[case::deadline(json!({"spec": {"activeDeadlineSeconds": 5}}), 0)]
#[case::annotation(json!({"metadata": {"annotations": {"a": "b"}}}), 0)]
#[case::toleration_changed(
    json!({"spec": {"tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Equal", "effect": "NoExecute"}]}}),
    422
)]
#[case::other_uid(json!({"metadata": {"uid": "x"}}), 409)]
#[case::old_version(json!({"metadata": {"resourceVersion": "1"}}), 409)]
fn pod_updates_follow_the_rules(#[case] patch: Value, #[case] code: u16) {
    let objects = cluster();
    objects.create("pods", pod("p")).unwrap();
    let found = objects
        .patch("pods", "default", "p", patch)
        .map_or_else(|e| e.code, |_| 0);
    assert_eq!(found, code);
}

#[test]
fn images_may_change_and_an_unchanged_update_keeps_the_revision() {
    let objects = cluster();
    let mut changed = Value::clone(&objects.create("pods", pod("p")).unwrap());
    changed["spec"]["containers"][0]["image"] = json!("other");
    let updated = objects.update("pods", changed).unwrap();
    assert_eq!(updated["metadata"]["generation"], 2);
    let revision = objects.revision();
    objects.update("pods", Value::clone(&updated)).unwrap();
    assert_eq!(objects.revision(), revision);
}

#[test]
fn status_and_spec_are_written_separately() {
    let objects = cluster();
    objects
        .create(
            "nodes",
            json!({"metadata": {"name": "n"}, "status": {"capacity": {"cpu": 4}}}),
        )
        .unwrap();
    let both = json!({"spec": {"unschedulable": true}, "status": {"capacity": {"cpu": "8"}}});
    let node = objects.patch("nodes", "", "n", both).unwrap();
    assert_eq!(
        (&node["spec"]["unschedulable"], &node["status"]["capacity"]["cpu"]),
        (&json!(true), &json!("4"))
    );
    let node = objects
        .patch_status("nodes", "", "n", &json!({"capacity": {"x.y/z": "1"}}))
        .unwrap();
    assert_eq!(node["status"]["capacity"], json!({"cpu": "4", "x.y/z": "1"}));
    assert_eq!(node["spec"]["unschedulable"], true);
}

fn definition() -> Value {
    json!({
        "metadata": {"name": "devices.x.io"},
        "spec": {
            "group": "x.io", "scope": "Cluster", "names": {"plural": "devices", "kind": "Device"},
            "versions": [{"name": "v1", "served": true, "storage": true, "subresources": {"status": {}}}],
        },
    })
}

#[test]
fn a_custom_resource_definition_adds_and_removes_its_resource() {
    let objects = cluster();
    assert_eq!(objects.list("devices.x.io", None).unwrap_err().code, 404);
    objects.create("customresourcedefinitions", definition()).unwrap();
    let device = json!({"metadata": {"name": "d"}, "spec": {"n": 1}, "status": {"dropped": true}});
    let device = objects.create("devices.x.io", device).unwrap();
    assert_eq!(
        (device.get("status"), &device["apiVersion"]),
        (None, &json!("x.io/v1"))
    );
    let device = objects
        .patch_status("devices.x.io", "", "d", &json!({"ok": true}))
        .unwrap();
    assert_eq!(device["metadata"]["generation"], 1);
    let mut changed = Value::clone(&device);
    changed["spec"]["n"] = json!(2);
    changed["metadata"]
        .as_object_mut()
        .unwrap()
        .remove("resourceVersion");
    assert_eq!(
        objects.update("devices.x.io", changed).unwrap_err().code,
        422,
        "custom updates need a version"
    );
    assert_eq!(
        objects
            .patch("devices.x.io", "", "d", json!({"spec": {"n": 2}}))
            .unwrap()["metadata"]["generation"],
        2
    );
    objects
        .delete("customresourcedefinitions", "", "devices.x.io", None)
        .unwrap();
    assert_eq!(objects.get("devices.x.io", "", "d").unwrap_err().code, 404);
    objects.create("customresourcedefinitions", definition()).unwrap();
    assert!(objects.list("devices.x.io", None).unwrap().is_empty());
}

#[test]
fn a_namespace_is_removed_with_its_last_object() {
    let objects = cluster();
    objects
        .create("namespaces", json!({"metadata": {"name": "team"}}))
        .unwrap();
    let inside = |mut object: Value| {
        object["metadata"]["namespace"] = json!("team");
        object
    };
    objects.create("pods", inside(pod("p"))).unwrap();
    objects
        .create("configmaps", inside(json!({"metadata": {"name": "m"}})))
        .unwrap();
    objects.bind("team", "p", bind_to("n")).unwrap();
    objects.delete("namespaces", "", "team", None).unwrap();
    assert_eq!(objects.get("configmaps", "team", "m").unwrap_err().code, 404);
    assert_eq!(
        objects.get("namespaces", "", "team").unwrap()["status"]["phase"],
        "Terminating"
    );
    assert_eq!(objects.create("pods", inside(pod("q"))).unwrap_err().code, 403);
    objects.delete("pods", "team", "p", Some(0)).unwrap();
    assert_eq!(objects.get("namespaces", "", "team").unwrap_err().code, 404);
}

#[tokio::test]
async fn a_watch_reports_objects_that_enter_or_leave_its_selector() {
    let objects = cluster();
    objects.create("pods", pod("p")).unwrap();
    let mut watch = objects
        .watch("pods", Some("default"), "", "spec.nodeName=", None)
        .unwrap();
    let mut on_node = objects.watch("pods", None, "", "spec.nodeName=n", None).unwrap();
    objects.bind("default", "p", bind_to("n")).unwrap();
    let revision = objects.revision().to_string();
    let kinds = [
        watch.next().await.unwrap(),
        watch.next().await.unwrap(),
        on_node.next().await.unwrap(),
    ];
    insta::assert_debug_snapshot!(kinds.each_ref().map(|e| e.change), @r"
    [
        Added,
        Deleted,
        Added,
    ]
    ");
    assert_eq!(kinds[1].object["metadata"]["resourceVersion"], revision);
    assert_eq!(
        kinds[1].object["spec"].get("nodeName"),
        None,
        "the last state that matched"
    );
    objects.compact();
    assert_eq!(
        objects.watch("pods", None, "", "", Some(2)).unwrap_err().code,
        410
    );
}
