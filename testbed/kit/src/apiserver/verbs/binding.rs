//! Binding and eviction of pods.

use std::sync::Arc;

use chrono::Utc;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::Selector;
use serde::Deserialize;
use serde_json::{Value, json};

use super::delete::{delete, is_dry_run, read_options};
use super::{ApiState, RequestTarget, unmet_precondition};
use crate::apiserver::object;
use crate::apiserver::pod;
use crate::apiserver::selector::has_labels;
use crate::apiserver::status::{ApiError, InvalidField};
use crate::apiserver::store::ObjectVersion;

/// Binds a pod to the node that a Binding names; its annotations and labels become the pod's in the same write.
pub(crate) fn bind(
    state: &mut ApiState,
    target: &RequestTarget,
    binding: &Value,
    dry_run: bool,
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
        "lastTransitionTime": object::timestamp(Utc::now()),
    });
    pod::set_condition(&mut bound, condition);
    Ok(state.store_unless_dry_run(target, bound, dry_run))
}

/// The collection of disruption budgets.
const BUDGETS: &str = "policy/poddisruptionbudgets";

/// Evicts a pod: a deletion with the options that the Eviction carries, if the pod's disruption budget has room.
pub(crate) fn evict(
    state: &mut ApiState,
    target: &RequestTarget,
    eviction: &Value,
    dry_run: bool,
) -> Result<(), ApiError> {
    let mut deletion = read_options(eviction.get("deleteOptions").unwrap_or(&Value::Null))?;
    if dry_run {
        deletion.dry_run = Some(vec!["All".to_owned()]);
    }
    draw_on_budget(state, target, is_dry_run(&deletion))?;
    delete(state, target, &deletion).map(drop)
}

/// Counts the eviction of a pod in the status of its disruption budget, which a controller writes. As in `EvictionREST.Create`,
/// but for pods that do not run or are not ready, of which kube-apiserver may ignore the budget.
fn draw_on_budget(state: &mut ApiState, target: &RequestTarget, dry_run: bool) -> Result<(), ApiError> {
    let pod = state.current(target)?;
    let mut budgets = state.store.scan(BUDGETS, &target.namespace, None);
    let Some((key, budget)) = budgets.find(|(_, budget)| guards(&budget.value, &pod.value)) else {
        return Ok(());
    };
    if budgets.any(|(_, budget)| guards(&budget.value, &pod.value)) {
        let why = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
        return Err(ApiError::new(500, why));
    }
    let (key, mut counted) = (key.clone(), Value::clone(&budget.value));
    drop(budgets);
    let allowed = object::integer(&counted, "/status/disruptionsAllowed").unwrap_or(0);
    if allowed <= 0 {
        let why = "Cannot evict pod as it would violate the pod's disruption budget.";
        return Err(ApiError::new(429, why));
    }
    if !dry_run {
        object::child(&mut counted, "status")
            .insert("disruptionsAllowed".to_owned(), Value::from(allowed - 1));
        state.store.put(BUDGETS, key, counted);
    }
    Ok(())
}

/// Returns true if a disruption budget selects the pod.
fn guards(budget: &Value, pod: &Value) -> bool {
    let selector = budget.pointer("/spec/selector").map(LabelSelector::deserialize);
    let selector = selector.and_then(|selector| Selector::try_from(selector.ok()?).ok());
    selector.is_some_and(|selector| has_labels(&selector, pod))
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
    if !errors.is_empty() {
        return Err(ApiError::invalid("Binding", "", &target.name, &errors));
    }
    super::check_string_maps(binding)
}

/// Returns an error if the pod must not be bound, in the words of kube-apiserver.
fn check_bindable(pod: &Value, binding: &Value, name: &str) -> Result<(), String> {
    for (what, field) in [("UID", "uid"), ("ResourceVersion", "resourceVersion")] {
        let pointer = format!("/metadata/{field}");
        let (asked, found) = (object::text(binding, &pointer), object::text(pod, &pointer));
        if let Some(why) = unmet_precondition(what, asked, found) {
            return Err(why);
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
