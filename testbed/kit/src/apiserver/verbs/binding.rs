//! Binding and eviction of pods.

use std::sync::Arc;

use serde_json::{Value, json};

use super::create::refuse;
use super::delete::{DeleteOptions, delete};
use super::{ApiState, RequestTarget, WriteOptions};
use crate::apiserver::object;
use crate::apiserver::pod;
use crate::apiserver::status::{ApiError, InvalidField};
use crate::apiserver::store::ObjectVersion;

/// Binds a pod to the node that a Binding names; its annotations and labels become the pod's in the same write.
pub(crate) fn bind(
    state: &mut ApiState,
    target: &RequestTarget,
    binding: &Value,
    options: &WriteOptions,
) -> Result<Arc<ObjectVersion>, ApiError> {
    check_binding(target, binding)?;
    let current = state.current(target)?;
    let node = object::text(binding, "/target/name");
    check_bindable(&current.value, binding, &target.name)
        .map_err(|why| ApiError::conflict("pods/binding", &target.name, &why))?;
    let mut bound = Value::clone(&current.value);
    object::child(&mut bound, "spec").insert("nodeName".to_owned(), Value::from(node));
    for field in ["annotations", "labels"] {
        let Some(added) = object::object(binding, &format!("/metadata/{field}")) else {
            continue;
        };
        let slot = object::meta(&mut bound).entry(field).or_insert(Value::Null);
        object::make_object(slot).extend(added.clone());
    }
    let condition = json!({
        "type": "PodScheduled", "status": "True",
        "lastTransitionTime": object::timestamp(options.now),
    });
    pod::set_condition(&mut bound, condition);
    Ok(state.store_unless_dry_run(target, bound, options.dry_run))
}

/// Evicts a pod: a deletion with the options that the Eviction carries.
pub(crate) fn evict(
    state: &mut ApiState,
    target: &RequestTarget,
    eviction: &Value,
    options: &WriteOptions,
) -> Result<(), ApiError> {
    let given = eviction.get("deleteOptions").cloned().unwrap_or_default();
    let mut deletion = DeleteOptions::read(&given, options.now);
    deletion.dry_run |= options.dry_run;
    delete(state, target, &deletion).map(drop)
}

/// Checks the body of a binding: its kind, the pod's name, and the node that it names.
fn check_binding(target: &RequestTarget, binding: &Value) -> Result<(), ApiError> {
    if !matches!(object::text(binding, "/kind"), "" | "Binding") {
        return Err(ApiError::bad_request("the request body must be a Binding"));
    }
    let named = object::text(binding, "/metadata/name");
    if !named.is_empty() && named != target.name {
        return Err(ApiError::bad_request(
            "name in URL does not match name in Binding object",
        ));
    }
    let mut errors = Vec::new();
    let kind = object::text(binding, "/target/kind");
    if !matches!(kind, "" | "Node") {
        errors.push(InvalidField::unsupported(
            "target.kind",
            kind,
            &["Node", "<empty>"],
        ));
    }
    if object::text(binding, "/target/name").is_empty() {
        errors.push(InvalidField::required("target.name", ""));
    }
    refuse_binding(target, &errors)?;
    super::check_string_maps(binding)
}

/// Refuses a binding with a 422 if there are errors. Its text names the Binding although the target is the pod.
fn refuse_binding(target: &RequestTarget, errors: &[InvalidField]) -> Result<(), ApiError> {
    refuse(&target.resource, &target.name, errors).map_err(|error| ApiError {
        message: error.message.replacen("Pod ", "Binding ", 1),
        ..error
    })
}

/// Returns an error if the pod must not be bound, in the words of kube-apiserver.
fn check_bindable(pod: &Value, binding: &Value, name: &str) -> Result<(), String> {
    for (what, field) in [("UID", "uid"), ("ResourceVersion", "resourceVersion")] {
        let pointer = format!("/metadata/{field}");
        let (asked, found) = (object::text(binding, &pointer), object::text(pod, &pointer));
        if !asked.is_empty() && asked != found {
            return Err(format!(
                "Precondition failed: {what} in precondition: {asked}, {what} in object meta: {found}"
            ));
        }
    }
    // assignPod: each of these is a 409, so that kube-scheduler fails the attempt and looks at the pod again.
    let node = object::text(pod, "/spec/nodeName");
    if object::is_deleting(pod) {
        Err(format!(
            "pod {name} is being deleted, cannot be assigned to a host"
        ))
    } else if !node.is_empty() {
        Err(format!("pod {name} is already assigned to node \"{node}\""))
    } else if !object::array(pod, "/spec/schedulingGates").is_empty() {
        Err(format!("pod {name} has non-empty .spec.schedulingGates"))
    } else {
        Ok(())
    }
}
