//! Binding and eviction of pods.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::Selector;
use serde::Deserialize;
use serde_json::{Value, json};

use super::create::refuse;
use super::delete::{DeleteOptions, delete};
use super::{ApiState, RequestTarget, WriteOptions};
use crate::apiserver::object;
use crate::apiserver::pod;
use crate::apiserver::selector::has_labels;
use crate::apiserver::status::{ApiError, InvalidField};
use crate::apiserver::store::{Key, ObjectVersion};

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

/// The collection of disruption budgets.
const BUDGETS: &str = "policy/poddisruptionbudgets";

/// Evicts a pod: a deletion with the options that the Eviction carries, if the pod's disruption budget has room.
pub(crate) fn evict(
    state: &mut ApiState,
    target: &RequestTarget,
    eviction: &Value,
    options: &WriteOptions,
) -> Result<(), ApiError> {
    let given = eviction.get("deleteOptions").cloned().unwrap_or_default();
    let mut deletion = DeleteOptions::read(&given, options.now);
    deletion.dry_run |= options.dry_run;
    draw_on_budget(state, target, deletion.dry_run)?;
    delete(state, target, &deletion).map(drop)
}

/// Counts the eviction of a pod in the status of its disruption budget, which a controller writes. As in `EvictionREST.Create`, but for
/// pods that do not run or are not ready, of which kube-apiserver may ignore the budget.
fn draw_on_budget(state: &mut ApiState, target: &RequestTarget, dry_run: bool) -> Result<(), ApiError> {
    let pod = state.current(target)?;
    let guards = |budget: &Value| {
        let selector = budget.pointer("/spec/selector").map(LabelSelector::deserialize);
        let selector = selector.and_then(|selector| Selector::try_from(selector.ok()?).ok());
        selector.is_some_and(|selector| has_labels(&selector, &pod.value))
    };
    let budgets = state.store.scan(BUDGETS, Some(&target.namespace), None);
    let found = budgets.filter(|(_, budget)| guards(&budget.value));
    let budgets: Vec<(Key, Arc<ObjectVersion>)> = found
        .map(|(key, budget)| (key.clone(), Arc::clone(budget)))
        .collect();
    let Some((key, budget)) = budgets.first() else {
        return Ok(());
    };
    if budgets.len() > 1 {
        let why = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
        return Err(ApiError::new(500, why));
    }
    let allowed = budget
        .value
        .pointer("/status/disruptionsAllowed")
        .and_then(Value::as_i64);
    let allowed = allowed.unwrap_or(0);
    if allowed <= 0 {
        let why = "Cannot evict pod as it would violate the pod's disruption budget.";
        return Err(ApiError::new(429, why));
    }
    if !dry_run {
        let mut counted = Value::clone(&budget.value);
        object::child(&mut counted, "status")
            .insert("disruptionsAllowed".to_owned(), Value::from(allowed - 1));
        state.store.put(BUDGETS, key.clone(), counted);
    }
    Ok(())
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
    } else {
        Ok(())
    }
}
