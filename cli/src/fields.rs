//! Fields of Kubernetes objects that are read as JSON. The text, list or number of an absent field is empty or 0.

use serde_json::Value;

/// The label of nodes that share their GPUs, by which the `DaemonSet` of the device plugin selects them.
pub(crate) const NODE_LABEL: &str = "gpushare";
/// The label of nodes by which a cloud provider names the kind of machine.
pub(crate) const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";

pub(crate) fn label_node(node: &str) -> String {
    format!("kubectl label node {node} {NODE_LABEL}=true --overwrite")
}

pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    let value = object.pointer(pointer).and_then(Value::as_str);
    value.unwrap_or_default()
}

pub(crate) fn name(object: &Value) -> &str {
    text(object, "/metadata/name")
}

pub(crate) fn label<'a>(object: &'a Value, key: &str) -> &'a str {
    entry(object, "/metadata/labels", key)
}

pub(crate) fn annotation<'a>(object: &'a Value, key: &str) -> &'a str {
    entry(object, "/metadata/annotations", key)
}

/// The text under a key of the map at a pointer. Keys of labels have slashes, which a pointer would take for levels.
fn entry<'a>(object: &'a Value, map: &str, key: &str) -> &'a str {
    let map = object.pointer(map).unwrap_or(&Value::Null);
    map.get(key).and_then(Value::as_str).unwrap_or_default()
}

pub(crate) fn array<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    let values = object.pointer(pointer).and_then(Value::as_array);
    values.map_or(&[], Vec::as_slice)
}

pub(crate) fn number(object: &Value, pointer: &str) -> u64 {
    let value = object.pointer(pointer).and_then(Value::as_u64);
    value.unwrap_or_default()
}

pub(crate) fn controller(pod: &Value) -> Option<&Value> {
    let mut owners = pod.pointer("/metadata/ownerReferences")?.as_array()?.iter();
    owners.find(|owner| owner.get("controller") == Some(&Value::Bool(true)))
}

/// The template of a workload's pods, or the pod itself.
pub(crate) fn pod_template(object: &Value) -> Option<&Value> {
    match text(object, "/kind") {
        "Pod" => Some(object),
        // The template is a level deeper than in a Job.
        "CronJob" => object.pointer("/spec/jobTemplate/spec/template"),
        // Every workload of Kubernetes, and most of others, have their pods here.
        _ => object.pointer("/spec/template"),
    }
}

pub(crate) fn images(object: &Value) -> impl Iterator<Item = &str> {
    let template = pod_template(object).unwrap_or(&Value::Null);
    let containers = array(template, "/spec/containers").iter();
    containers.map(|container| text(container, "/image"))
}

/// The tag of an image; `None` for an image without a tag, such as one by digest alone.
pub(crate) fn image_tag(image: &str) -> Option<&str> {
    // The digest of an image also follows a colon, and so does the port of a registry.
    let name_and_tag = image.split('@').next().unwrap_or_default();
    let (_, tag) = name_and_tag.rsplit_once(':')?;
    (!tag.contains('/')).then_some(tag)
}

pub(crate) fn named<'a>(name: &str, objects: &'a [Value]) -> Option<&'a Value> {
    objects.iter().find(|object| self::name(object) == name)
}

/// The condition of the type `kind` in the list of conditions at the JSON pointer `conditions`.
pub(crate) fn condition<'a>(object: &'a Value, conditions: &str, kind: &str) -> Option<&'a Value> {
    let mut conditions = array(object, conditions).iter();
    conditions.find(|condition| text(condition, "/type") == kind)
}

pub(crate) fn has_condition(object: &Value, conditions: &str, kind: &str) -> bool {
    condition(object, conditions, kind).is_some_and(|found| text(found, "/status") == "True")
}
