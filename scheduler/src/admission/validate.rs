//! Refuses pods that can never work, in the words in which the filter refuses them.
//!
//! A change of a pod is refused only for what it makes worse: a pod that is there already can always be deleted, and its
//! finalizers removed.

use proto::admission::{AdmissionRequest, Operation};
use proto::pod::Pod;
use proto::request::{self, RequestError};
use serde::Deserialize;

use super::asks::{Asks, all_devices, is_mirror};
use super::sights::Sights;
use super::{Refusal, Rules, Unreadable, Verdict, annotations, overrides, read, uncounted};

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
    if is_mirror(&pod) {
        return Ok(Verdict::ALLOWED);
    }
    let asks = Asks::of(&pod, &rules.names);
    if !(asks.is_empty() && all_devices(&pod).is_none())
        && let Err(refusal) = judge_request(rules, &pod)
    {
        return Ok(Verdict::Refused(refusal));
    }
    if rules.is_unrestricted(&request.namespace) {
        return Ok(Verdict::ALLOWED);
    }
    let sights: Sights = read(request, "object", "Pod", request.object.as_ref())?;
    Ok(judge_sights(rules, asks, &sights, &request.namespace).into())
}

/// Refuses what a pod asks for, or says of it.
fn judge_request(rules: &Rules, pod: &Pod) -> Result<(), Refusal> {
    request::refuse_old_names(&pod.spec)
        .and_then(|()| request::validate(pod, &rules.names))
        .map_err(|error| Refusal::Invalid(error.to_string()))
        .and_then(|()| refuse_all_devices(rules, pod))
        .and_then(|()| annotations::judge_new(pod))
}

/// Refuses what a pod says of the devices that its containers are to see.
fn judge_sights(rules: &Rules, asks: Asks, sights: &Sights, namespace: &str) -> Result<(), Refusal> {
    if rules.deny_overrides && asks.shares_devices() {
        overrides::judge(sights, &rules.names)?;
    }
    uncounted::judge(sights, &rules.names, namespace)
}

/// The part of a filter's request that decides what the pod sees.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Filter {
    pod: Sights,
}

/// Returns the refusal by [`judge_sights`] of a pod in a filter request. Parses the body a second time only for pods that
/// it could refuse.
pub(super) fn refusal_of_filter(rules: &Rules, body: &[u8], pod: &Pod) -> Option<String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let asks = if rules.deny_overrides {
        Asks::of(pod, &rules.names)
    } else {
        Asks::default()
    };
    if rules.is_unrestricted(namespace) || !(asks.shares_devices() || uncounted::may_concern(pod)) {
        return None;
    }
    let Filter { pod: sights } = serde_json::from_slice(body).ok()?;
    match judge_sights(rules, asks, &sights, namespace) {
        Ok(()) => None,
        Err(Refusal::Invalid(message) | Refusal::Forbidden(message)) => Some(message),
    }
}

fn judge_change(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let (new, old) = (new_pod(request)?, old_pod(request)?);
    if new.is_deleting() || is_mirror(&new) {
        return Ok(Verdict::ALLOWED);
    }
    if !Asks::of(&new, &rules.names).is_empty()
        && let Err(refusal) = annotations::judge_change(&old, &new)
    {
        return Ok(Verdict::Refused(refusal));
    }
    if rules.is_unrestricted(&request.namespace) {
        return Ok(Verdict::ALLOWED);
    }
    let (old, new) = sights(request)?;
    Ok(uncounted::judge_changed(&old, &new, &request.namespace).into())
}

fn judge_ephemeral(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let pod = new_pod(request)?;
    if pod.is_deleting() || rules.is_unrestricted(&request.namespace) {
        return Ok(Verdict::ALLOWED);
    }
    let (old, new) = sights(request)?;
    if rules.deny_overrides
        && Asks::of(&pod, &rules.names).shares_devices()
        && let Err(refusal) = overrides::judge_added(&old, &new)
    {
        return Ok(Verdict::Refused(refusal));
    }
    Ok(uncounted::judge_added(&old, &new, &rules.names, &request.namespace).into())
}

fn sights(request: &AdmissionRequest) -> Result<(Sights, Sights), Unreadable> {
    let old = read(request, "oldObject", "Pod", request.old_object.as_ref())?;
    Ok((old, read(request, "object", "Pod", request.object.as_ref())?))
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
        Ok(true) if !rules.allow_all_devices => {
            Err(Refusal::Forbidden(RequestError::AllDevicesForbidden.to_string()))
        }
        Ok(_) => Ok(()),
        Err(error) => Err(Refusal::Invalid(error.to_string())),
    }
}
