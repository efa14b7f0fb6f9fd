//! Rules for pods: defaults, validation, resources, and the fields that may change after creation. A pod gets no `qosClass`.
//!
//! Pure functions over untyped pods.

use std::collections::HashSet;

use proto::quantity::Quantity;
use serde_json::{Map, Value, json};

use super::status::InvalidField;
use super::{name, object};

/// The lists of a pod's containers.
const CONTAINERS: [&str; 2] = ["/spec/containers", "/spec/initContainers"];
/// The list of containers that only the subresource `ephemeralcontainers` writes.
const EPHEMERAL: &str = "/spec/ephemeralContainers";
/// The annotation of a mirror pod, the copy that kubelet writes of a static pod.
const MIRROR: &str = "/metadata/annotations/kubernetes.io~1config.mirror";
const NOT_NEGATIVE: &str = "must be greater than or equal to 0";

/// Fills in the defaults of a new pod, and resets its status.
pub(crate) fn default_new(pod: &mut Value) {
    default_spec(pod);
    let is_gated = !object::array(pod, "/spec/schedulingGates").is_empty();
    let status = object::child(pod, "status");
    // podStrategy.PrepareForCreate: a user does not decide on the status of a new pod, so a given status is dropped.
    status.clear();
    status.insert("phase".to_owned(), Value::from("Pending"));
    if is_gated {
        let condition = json!({
            "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
        });
        status.insert("conditions".to_owned(), json!([condition]));
    }
}

/// Fills in the defaults of a pod's spec, as on every write: those that a test or a daemon may read.
pub(crate) fn default_spec(pod: &mut Value) {
    let spec = object::child(pod, "spec");
    object::default(spec, "restartPolicy", "Always");
    object::default(spec, "terminationGracePeriodSeconds", 30);
    object::default(spec, "schedulerName", "default-scheduler");
    object::default(spec, "preemptionPolicy", "PreemptLowerPriority");
    object::default(spec, "priority", 0);
    object::default(spec, "securityContext", json!({}));
    object::default(spec, "serviceAccountName", "default");
    tolerate_unreachable(spec);
    for list in CONTAINERS {
        for container in object::items_mut(pod, list) {
            object::default(object::make_object(container), "resources", json!({}));
            for port in object::items_mut(container, "/ports") {
                object::default(object::make_object(port), "protocol", "TCP");
            }
            default_requests(container);
        }
    }
}

/// Adds the tolerations of unreachable nodes that kube-apiserver gives every pod.
fn tolerate_unreachable(spec: &mut Map<String, Value>) {
    // DefaultTolerationSeconds: a pod stays on an unreachable node for five minutes, unless it has its own tolerations.
    let tolerations = object::make_array(spec.entry("tolerations").or_insert(Value::Null));
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        if !tolerations.iter().any(|found| tolerates(found, key)) {
            tolerations.push(
                json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}),
            );
        }
    }
}

/// Returns true if a toleration is for the effect `NoExecute` of a taint with this key.
fn tolerates(toleration: &Value, key: &str) -> bool {
    let (found, effect) = (
        object::text(toleration, "/key"),
        object::text(toleration, "/effect"),
    );
    (found == key || found.is_empty()) && matches!(effect, "" | "NoExecute")
}

/// Sets a condition of a pod, in place of the pod's earlier condition of the same type.
pub(crate) fn set_condition(pod: &mut Value, condition: Value) {
    let status = object::child(pod, "status");
    let conditions = object::make_array(status.entry("conditions").or_insert(Value::Null));
    let kind = condition.get("type").cloned();
    match conditions.iter_mut().find(|c| c.get("type") == kind.as_ref()) {
        Some(found) => *found = condition,
        None => conditions.push(condition),
    }
}

/// True if the pod has a final phase: its containers have all ended for good.
pub(crate) fn is_terminal(pod: &Value) -> bool {
    matches!(object::text(pod, "/status/phase"), "Succeeded" | "Failed")
}

/// The grace period of a pod's deletion in seconds: `asked` by the request, else the pod's own; zero for pods that run nowhere.
pub(crate) fn grace(pod: &Value, asked: Option<i64>) -> i64 {
    if object::text(pod, "/spec/nodeName").is_empty() || is_terminal(pod) {
        return 0;
    }
    let own = object::integer(pod, "/spec/terminationGracePeriodSeconds");
    asked.or(own).unwrap_or(30)
}

/// Lists the rules that a new pod breaks; its defaults are filled in already.
pub(crate) fn validate(pod: &Value) -> Vec<InvalidField> {
    let mut errors = Vec::new();
    // Names are unique over the init and app containers of a pod together.
    let mut names = HashSet::new();
    if object::array(pod, "/spec/containers").is_empty() {
        errors.push(InvalidField::required("spec.containers", ""));
    }
    for list in ["initContainers", "containers"] {
        for (i, container) in object::array(pod, &format!("/spec/{list}")).iter().enumerate() {
            let path = format!("spec.{list}[{i}]");
            check_container(container, &path, &mut names, &mut errors);
        }
    }
    let policy = object::text(pod, "/spec/restartPolicy");
    if !matches!(policy, "Always" | "OnFailure" | "Never") {
        let allowed = ["Always", "OnFailure", "Never"];
        errors.push(InvalidField::unsupported("spec.restartPolicy", policy, &allowed));
    }
    check_pod_resources(pod, &mut errors);
    let mirror = object::text(pod, MIRROR);
    if !mirror.is_empty() && object::text(pod, "/spec/nodeName").is_empty() {
        let field = "metadata.annotations[kubernetes.io/config.mirror]";
        let why = "must set spec.nodeName if mirror pod annotation is set";
        errors.push(InvalidField::invalid(field, mirror, why));
    }
    if let Some(grace @ ..0) = object::integer(pod, "/spec/terminationGracePeriodSeconds") {
        let field = "spec.terminationGracePeriodSeconds";
        errors.push(InvalidField::invalid(field, &grace.to_string(), NOT_NEGATIVE));
    }
    errors
}

/// Adds the errors of the resources of the whole pod, where no extended resource is allowed.
fn check_pod_resources(pod: &Value, errors: &mut Vec<InvalidField>) {
    for list in ["limits", "requests"] {
        let amounts = object::object(pod, &format!("/spec/resources/{list}"));
        for name in amounts.into_iter().flat_map(Map::keys) {
            if !matches!(name.as_str(), "cpu" | "memory") && !name.starts_with("hugepages-") {
                let field = format!("spec.resources.{list}[{name}]");
                let allowed = ["cpu", "hugepages-", "memory"];
                errors.push(InvalidField::unsupported(field, name, &allowed));
            }
        }
    }
}

/// Adds the errors of a container: its name, which must be unique in the pod, its image and its resources.
fn check_container<'a>(
    container: &'a Value,
    path: &str,
    names: &mut HashSet<&'a str>,
    errors: &mut Vec<InvalidField>,
) {
    let found = object::text(container, "/name");
    if found.is_empty() {
        errors.push(InvalidField::required(format!("{path}.name"), ""));
    } else if !name::is_label(found) {
        let why = "a lowercase RFC 1123 label is required";
        errors.push(InvalidField::invalid(format!("{path}.name"), found, why));
    } else if !names.insert(found) {
        errors.push(InvalidField::duplicate(format!("{path}.name"), found));
    }
    if object::text(container, "/image").is_empty() {
        errors.push(InvalidField::required(format!("{path}.image"), ""));
    }
    check_resources(container, path, errors);
}

/// Lists the changes of an update that the rules for pods forbid.
pub(crate) fn check_update(old: &Value, new: &Value) -> Vec<InvalidField> {
    // Most updates are of metadata or status.
    if old.get("spec") == new.get("spec") || immutable_part(old) == immutable_part(new) {
        return Vec::new();
    }
    let why = "pod updates may not change fields other than `spec.containers[*].image`,\
        `spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing \
        tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";
    vec![InvalidField::forbidden("spec", why)]
}

/// The pod after a request for a resize: resources of its containers from the request, everything else from the old pod
/// (`dropNonResizeUpdates`). kube-apiserver refuses a request that changes the list of containers, and takes `resizePolicy` too.
pub(crate) fn resized(old: &Value, new: &Value) -> Value {
    let mut pod = object::with_managers_of(old, new);
    for list in CONTAINERS {
        for container in object::items_mut(&mut pod, list) {
            let named = object::text(container, "/name").to_owned();
            let mut asked = object::array(new, list).iter();
            if let Some(asked) = asked.find(|asked| object::text(asked, "/name") == named) {
                let resources = asked.get("resources").cloned();
                object::set(object::make_object(container), "resources", resources);
            }
        }
    }
    pod
}

/// Lists the changes of a resize that the rules for pods forbid. Rules about the quality-of-service class, about removed amounts
/// of CPU and memory and about static pods are left out.
pub(crate) fn check_resize(old: &Value, new: &Value) -> Vec<InvalidField> {
    let mut errors = Vec::new();
    for list in ["initContainers", "containers"] {
        for (i, container) in object::array(new, &format!("/spec/{list}")).iter().enumerate() {
            check_resources(container, &format!("spec.{list}[{i}]"), &mut errors);
        }
    }
    if without_native(old) != without_native(new) {
        let why = "only cpu and memory resources are mutable";
        errors.push(InvalidField::forbidden("spec", why));
    }
    errors
}

/// A pod without its containers' amounts of CPU and memory.
fn without_native(pod: &Value) -> Value {
    let mut pod = pod.clone();
    for list in CONTAINERS {
        for container in object::items_mut(&mut pod, list) {
            for amounts in ["limits", "requests"] {
                let resources = object::child(container, "resources");
                let amounts = object::make_object(resources.entry(amounts).or_insert(Value::Null));
                amounts.retain(|name, _| name != "cpu" && name != "memory");
            }
        }
    }
    object::make_object(&mut pod).remove("spec").unwrap_or_default()
}

/// The pod after a request for ephemeral containers: `dropNonEphemeralContainerUpdates` takes everything else from the old pod.
pub(crate) fn with_ephemeral_containers(old: &Value, new: &Value) -> Value {
    let mut pod = object::with_managers_of(old, new);
    let containers = new.pointer(EPHEMERAL).cloned();
    object::set(object::child(&mut pod, "spec"), "ephemeralContainers", containers);
    pod
}

/// Lists the changes of ephemeral containers that kube-apiserver forbids (`ValidatePodEphemeralContainersUpdate`): an existing
/// one stays as it is, and none has resources. Its rules about other fields and static pods are left out.
pub(crate) fn check_ephemeral_containers(old: &Value, new: &Value) -> Vec<InvalidField> {
    let mut errors = Vec::new();
    let containers = object::array(new, EPHEMERAL);
    for (i, container) in containers.iter().enumerate() {
        if object::object(container, "/resources").is_some_and(|resources| !resources.is_empty()) {
            let field = format!("spec.ephemeralContainers[{i}].resources");
            let why = "cannot be set for an Ephemeral Container";
            errors.push(InvalidField::forbidden(&field, why));
        }
    }
    for before in object::array(old, EPHEMERAL) {
        if containers.contains(before) {
            continue;
        }
        let name = object::text(before, "/name");
        let is_there = containers
            .iter()
            .any(|found| object::text(found, "/name") == name);
        let problem = if is_there { "changed" } else { "removed" };
        let why = format!("existing ephemeral containers {name:?} may not be {problem}\n");
        errors.push(InvalidField::forbidden("spec.ephemeralContainers", &why));
    }
    errors
}

/// The part of a spec that must not change. kube-apiserver also lets clients add tolerations, and open scheduling gates.
fn immutable_part(pod: &Value) -> Value {
    let mut pod = pod.clone();
    for list in CONTAINERS {
        for container in object::items_mut(&mut pod, list) {
            object::make_object(container).remove("image");
        }
    }
    let spec = object::child(&mut pod, "spec");
    spec.remove("activeDeadlineSeconds");
    Value::Object(std::mem::take(spec))
}

/// Copies limits into requests that are not given.
pub(crate) fn default_requests(container: &mut Value) {
    let Some(limits) = object::object(container, "/resources/limits").cloned() else {
        return;
    };
    let resources = object::child(container, "resources");
    let requests = object::make_object(resources.entry("requests").or_insert(Value::Null));
    for (name, limit) in limits {
        requests.entry(name).or_insert(limit);
    }
}

/// Converts amounts that are JSON numbers to strings, the form in which the API stores quantities.
fn normalize(object: &mut Value, pointer: &str) {
    let Some(Value::Object(amounts)) = object.pointer_mut(pointer) else {
        return;
    };
    for amount in amounts.values_mut().filter(|amount| amount.is_number()) {
        *amount = Value::from(amount.to_string());
    }
}

/// Normalizes the resources of every container of a pod.
pub(crate) fn normalize_pod(pod: &mut Value) {
    for list in CONTAINERS {
        for container in object::items_mut(pod, list) {
            normalize(container, "/resources/limits");
            normalize(container, "/resources/requests");
        }
    }
}

/// Normalizes a node's capacity and allocatable amounts.
pub(crate) fn normalize_node(node: &mut Value) {
    normalize(node, "/status/capacity");
    normalize(node, "/status/allocatable");
}

/// True for an extended resource: neither native nor of the `kubernetes.io` domain.
pub(crate) fn is_extended(name: &str) -> bool {
    name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

/// Returns true if requests of a resource may be lower than its limits, as for CPU and memory.
fn is_overcommittable(name: &str) -> bool {
    !is_extended(name) && !name.starts_with("hugepages-")
}

/// The text of an amount, which a client may send as a number too.
fn text_of(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn parse_amount(value: &Value) -> Option<Quantity> {
    text_of(value).parse().ok()
}

/// Checks the resources of the container at `path`.
fn check_resources(container: &Value, path: &str, errors: &mut Vec<InvalidField>) {
    let empty = Map::new();
    let limits = object::object(container, "/resources/limits").unwrap_or(&empty);
    let requests = object::object(container, "/resources/requests").unwrap_or(&empty);
    for (list, amounts) in [("limits", limits), ("requests", requests)] {
        for (name, value) in amounts {
            check_amount(&format!("{path}.resources.{list}"), name, value, errors);
        }
    }
    let field = format!("{path}.resources.requests");
    for (name, request) in requests {
        // A request for a device or huge pages needs a limit, and equals it; one for CPU or memory may be lower.
        let Some(limit) = limits.get(name) else {
            if !is_overcommittable(name) {
                let why = "Limit must be set for non overcommitable resources";
                errors.push(InvalidField::required(format!("{path}.resources.limits"), why));
            }
            continue;
        };
        let (Some(asked), Some(allowed)) = (parse_amount(request), parse_amount(limit)) else {
            continue;
        };
        let (asked_text, limit_text) = (text_of(request), text_of(limit));
        let bound = if !is_overcommittable(name) && asked != allowed {
            "equal to"
        } else if asked > allowed {
            "less than or equal to"
        } else {
            continue;
        };
        let why = format!("must be {bound} {name} limit of {limit_text}");
        errors.push(InvalidField::invalid(&field, &asked_text, &why));
    }
}

/// Adds the errors of one amount in the limits or requests of a container: an illegal name, a negative or broken amount.
fn check_amount(list: &str, name: &str, value: &Value, errors: &mut Vec<InvalidField>) {
    let field = format!("{list}[{name}]");
    let text = text_of(value);
    if !name.contains('/') && !is_native(name) {
        let why = "must be a standard resource type or fully qualified";
        errors.push(InvalidField::invalid(&field, name, why));
    }
    match parse_amount(value) {
        Some(found) if text.starts_with('-') && found < Quantity::from_integer(0) => {
            errors.push(InvalidField::invalid(&field, &text, NOT_NEGATIVE));
        }
        // Extended resources are counted in whole devices.
        Some(found) if is_extended(name) && found.integer().is_none() => {
            errors.push(InvalidField::invalid(&field, &text, "must be an integer"));
        }
        _ => {}
    }
}

/// Returns true if a name without a domain is one of Kubernetes' own resources.
fn is_native(name: &str) -> bool {
    matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-")
}

/// The text of the first amount in a pod's limits and requests that does not parse as a quantity.
pub(crate) fn first_unparsable(pod: &Value) -> Option<String> {
    for container in object::containers(pod) {
        for list in ["/resources/limits", "/resources/requests"] {
            for value in object::object(container, list).into_iter().flat_map(Map::values) {
                if parse_amount(value).is_none() {
                    return Some(text_of(value));
                }
            }
        }
    }
    None
}
