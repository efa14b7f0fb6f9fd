//! Refuses pods that can never work, in the words in which the filter refuses them.
//!
//! A change of a pod is refused only for what it makes worse: a pod that is there already can always be deleted, and its
//! finalizers removed.

use proto::admission::{AdmissionRequest, Operation};
use proto::pod::Pod;
use proto::request::{self, RequestError};

use super::asks::{Asks, all_devices, is_mirror};
use super::overrides::{self, Sights};
use super::{Refusal, Rules, Unreadable, Verdict, annotations, read};

/// What becomes of a request about a pod.
pub(super) fn verdict(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    if !request.resource.group.is_empty() || request.resource.resource != "pods" {
        return Ok(Verdict::ALLOWED);
    }
    match (request.operation, request.sub_resource.as_str()) {
        (Operation::Create, "") => judge_new(rules, request),
        (Operation::Update, "") => judge_change(rules, request),
        (Operation::Update, "ephemeralcontainers") => judge_ephemeral(rules, request),
        _ => Ok(Verdict::ALLOWED),
    }
}

fn judge_new(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let pod = new_pod(request)?;
    let asks = Asks::of(&pod, &rules.names);
    if is_mirror(&pod) || (asks.is_empty() && all_devices(&pod).is_none()) {
        return Ok(Verdict::ALLOWED);
    }
    let judged = request::refuse_old_names(&pod.spec)
        .and_then(|()| request::validate(&pod, &rules.names))
        .map_err(|error| Refusal::Invalid(error.to_string()))
        .and_then(|()| refuse_all_devices(rules, &pod))
        .and_then(|()| annotations::judge_new(&pod));
    if judged.is_ok() && rules.deny_overrides && asks.shares_devices() {
        let sights: Sights = read(request, "object", "Pod", request.object.as_ref())?;
        return Ok(overrides::judge(&sights, &rules.names).into());
    }
    Ok(judged.into())
}

fn judge_change(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let (new, old) = (new_pod(request)?, old_pod(request)?);
    if new.is_deleting() || is_mirror(&new) || Asks::of(&new, &rules.names).is_empty() {
        return Ok(Verdict::ALLOWED);
    }
    Ok(annotations::judge_change(&old, &new).into())
}

fn judge_ephemeral(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let new = new_pod(request)?;
    if !rules.deny_overrides || new.is_deleting() || !Asks::of(&new, &rules.names).shares_devices() {
        return Ok(Verdict::ALLOWED);
    }
    let old: Sights = read(request, "oldObject", "Pod", request.old_object.as_ref())?;
    let new: Sights = read(request, "object", "Pod", request.object.as_ref())?;
    Ok(overrides::judge_added(&old, &new).into())
}

fn new_pod(request: &AdmissionRequest) -> Result<Pod, Unreadable> {
    read(request, "object", "Pod", request.object.as_ref())
}

fn old_pod(request: &AdmissionRequest) -> Result<Pod, Unreadable> {
    read(request, "oldObject", "Pod", request.old_object.as_ref())
}

/// Refuses a wish for all devices that cannot be read or is not granted in this cluster.
pub(super) fn refuse_all_devices(rules: &Rules, pod: &Pod) -> Result<(), Refusal> {
    match request::sees_all_devices(pod) {
        Ok(true) if rules.forbid_all_devices => Err(Refusal::Forbidden(RequestError::AllDevicesForbidden.to_string())),
        Ok(_) => Ok(()),
        Err(error) => Err(Refusal::Invalid(error.to_string())),
    }
}
