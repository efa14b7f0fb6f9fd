//! The validating webhook for pods: refuses pods that can never work, with the same texts as the filter.
//!
//! An update is refused only for what it makes worse: an existing pod can always be deleted, and its finalizers removed.

use proto::admission::{AdmissionRequest, Operation};
use proto::pod::{ALL_DEVICES, Pod};
use proto::record::Record;
use proto::request::hints::HINTS;
use proto::request::{self, RequestError};
use serde::Deserialize;

use super::asks::{Asks, RECORD, all_devices, annotation, is_mirror};
use super::visible_devices::{self, DeviceFields};
use super::{Refusal, Rules, Unreadable, Verdict, read};

pub(super) fn review(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    if !request.resource.group.is_empty() || request.resource.resource != "pods" {
        return Ok(Verdict::ALLOWED);
    }
    match (request.operation, request.sub_resource.as_str()) {
        (Operation::Create, "") => check_new(rules, request),
        (Operation::Update, "") => check_change(rules, request),
        (Operation::Update, "ephemeralcontainers") => check_ephemeral(rules, request),
        _ => Ok(Verdict::ALLOWED),
    }
}

fn check_new(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let pod = new_pod(request)?;
    if is_mirror(&pod) {
        return Ok(Verdict::ALLOWED);
    }
    let asks = Asks::of(&pod, &rules.names);
    if !(asks.is_empty() && all_devices(&pod).is_none())
        && let Err(refusal) = check_request(rules, &pod)
    {
        return Ok(Verdict::Refused(refusal));
    }
    if rules.is_unrestricted(&request.namespace) {
        return Ok(Verdict::ALLOWED);
    }
    let fields: DeviceFields = read(request, "object", "Pod", request.object.as_ref())?;
    Ok(check_device_fields(rules, asks, &fields, &request.namespace).into())
}

/// Checks the device requests and annotations of a new pod.
fn check_request(rules: &Rules, pod: &Pod) -> Result<(), Refusal> {
    request::refuse_old_names(&pod.spec)
        .and_then(|()| request::validate(pod, &rules.names))
        .map_err(|error| Refusal::Invalid(error.to_string()))
        .and_then(|()| refuse_all_devices(rules, pod))
        .and_then(|()| check_new_annotations(pod))
}

/// Checks the fields of a pod that select devices.
fn check_device_fields(
    rules: &Rules,
    asks: Asks,
    fields: &DeviceFields,
    namespace: &str,
) -> Result<(), Refusal> {
    if rules.deny_overrides && asks.shares_devices() {
        visible_devices::check_overrides(fields, &rules.names)?;
    }
    visible_devices::check(fields, &rules.names, namespace)
}

/// The pod of a filter request.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct FilterBody {
    pod: DeviceFields,
}

/// The refusal of a pod in a filter request by [`check_device_fields`]. Parses the body a second time only for pods that it could
/// refuse.
pub(super) fn refusal_of_filter(rules: &Rules, body: &[u8], pod: &Pod) -> Option<String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let asks = if rules.deny_overrides {
        Asks::of(pod, &rules.names)
    } else {
        Asks::default()
    };
    if rules.is_unrestricted(namespace)
        || !(asks.shares_devices() || visible_devices::may_select_devices(pod))
    {
        return None;
    }
    let FilterBody { pod: fields } = serde_json::from_slice(body).ok()?;
    match check_device_fields(rules, asks, &fields, namespace) {
        Ok(()) => None,
        Err(Refusal::Invalid(message) | Refusal::Forbidden(message)) => Some(message),
    }
}

fn check_change(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let (new, old) = (new_pod(request)?, old_pod(request)?);
    if new.is_deleting() || is_mirror(&new) {
        return Ok(Verdict::ALLOWED);
    }
    if !Asks::of(&new, &rules.names).is_empty()
        && let Err(refusal) = check_changed_annotations(&old, &new)
    {
        return Ok(Verdict::Refused(refusal));
    }
    if rules.is_unrestricted(&request.namespace) {
        return Ok(Verdict::ALLOWED);
    }
    let (old, new) = device_fields(request)?;
    Ok(visible_devices::check_changed_annotations(&old, &new, &request.namespace).into())
}

fn check_ephemeral(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let pod = new_pod(request)?;
    if pod.is_deleting() || rules.is_unrestricted(&request.namespace) {
        return Ok(Verdict::ALLOWED);
    }
    let (old, new) = device_fields(request)?;
    if rules.deny_overrides
        && Asks::of(&pod, &rules.names).shares_devices()
        && let Err(refusal) = visible_devices::check_added_overrides(&old, &new)
    {
        return Ok(Verdict::Refused(refusal));
    }
    Ok(visible_devices::check_added(&old, &new, &rules.names, &request.namespace).into())
}

fn device_fields(request: &AdmissionRequest) -> Result<(DeviceFields, DeviceFields), Unreadable> {
    let old = read(request, "oldObject", "Pod", request.old_object.as_ref())?;
    Ok((old, read(request, "object", "Pod", request.object.as_ref())?))
}

fn new_pod(request: &AdmissionRequest) -> Result<Pod, Unreadable> {
    read(request, "object", "Pod", request.object.as_ref())
}

fn old_pod(request: &AdmissionRequest) -> Result<Pod, Unreadable> {
    read(request, "oldObject", "Pod", request.old_object.as_ref())
}

/// Refuses a request to see all devices that cannot be read or is not allowed in this cluster.
pub(super) fn refuse_all_devices(rules: &Rules, pod: &Pod) -> Result<(), Refusal> {
    match request::sees_all_devices(pod) {
        Ok(true) if !rules.allow_all_devices => {
            Err(Refusal::Forbidden(RequestError::AllDevicesForbidden.to_string()))
        }
        Ok(_) => Ok(()),
        Err(error) => Err(Refusal::Invalid(error.to_string())),
    }
}

/// Refuses a new pod with annotations that only a scheduler writes.
fn check_new_annotations(pod: &Pod) -> Result<(), Refusal> {
    let key = RECORD.into_iter().find(|key| annotation(pod, key).is_some());
    let refusal = |key| {
        Refusal::Invalid(format!(
            "annotation {key} is for the scheduler to write; make the pod without it"
        ))
    };
    key.map_or(Ok(()), |key| Err(refusal(key)))
}

/// Refuses an update that changes the request for all devices, that makes a record or a rule for the choice of devices
/// unreadable, or that changes such a rule of a pod that is placed already.
fn check_changed_annotations(old: &Pod, new: &Pod) -> Result<(), Refusal> {
    let changed = |key: &str| annotation(old, key) != annotation(new, key);
    if changed(ALL_DEVICES) {
        return Err(Refusal::Invalid(format!(
            "annotation {ALL_DEVICES} counts when a pod is made; it cannot be changed afterwards"
        )));
    }
    if RECORD.into_iter().any(changed)
        && let Err(error) = record(new)
        && record(old).is_ok()
    {
        return Err(Refusal::Invalid(error));
    }
    let mut changed = HINTS.into_iter().filter(|hint| changed(hint.key)).peekable();
    let is_placed = old.spec.node_name.as_deref().is_some_and(|node| !node.is_empty());
    if let Some(hint) = changed.peek().filter(|_| is_placed) {
        return Err(Refusal::Invalid(format!(
            "annotation {} counts when a pod is placed; it cannot be changed afterwards",
            hint.key
        )));
    }
    changed
        .try_for_each(|hint| hint.check(new))
        .map_err(|error| Refusal::Invalid(error.to_string()))
}

fn record(pod: &Pod) -> Result<(), String> {
    let read = pod.metadata.annotations.as_ref().map(Record::read).transpose();
    read.map(drop).map_err(|error| error.to_string())
}
