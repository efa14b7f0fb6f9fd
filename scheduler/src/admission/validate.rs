//! The validating webhook for pods: refuses pods that can never work, with the same texts as the filter. It alone refuses a pod
//! whose annotation about the domain of its group cannot be read.
//!
//! An update is refused only for what it makes worse: an existing pod can always be deleted, and its finalizers removed.

use proto::admission::{AdmissionRequest, Operation};
use proto::pod::{ALL_DEVICES, Pod};
use proto::pod_group::{GROUP_DOMAIN, GROUP_DOMAIN_POLICY, GroupWish};
use proto::record::{Record, RecordError};
use proto::request::hints::HINTS;
use proto::request::{self, PodRequest, RequestError};

use super::requested_kinds::{RECORD_ANNOTATIONS, RequestedKinds, is_mirror};
use super::visible_devices;
use super::{Refusal, Rules, Unreadable, Verdict, read, read_old};
use crate::accounting::PodFacts;
use crate::index::{Index, Shared};

/// Decides about a request for a pod or its ephemeral containers.
pub(super) fn review(
    rules: &Rules,
    request: &AdmissionRequest,
    cluster: &Shared<Index>,
) -> Result<Verdict, Unreadable> {
    if !request.resource.group.is_empty() || request.resource.resource != "pods" {
        return Ok(Verdict::ALLOWED);
    }
    match (request.operation, request.sub_resource.as_str()) {
        (Operation::Create, "") => check_new(rules, request, cluster),
        (Operation::Update, "") => check_update(rules, request),
        (Operation::Update, "ephemeralcontainers") => check_ephemeral(rules, request),
        _ => Ok(Verdict::ALLOWED),
    }
}

/// Decides about a new pod.
fn check_new(
    rules: &Rules,
    request: &AdmissionRequest,
    cluster: &Shared<Index>,
) -> Result<Verdict, Unreadable> {
    let pod: Pod = read(request)?;
    // kubelet runs the static pod whatever the answer is; a refusal would only hide it.
    if is_mirror(&pod) {
        return Ok(Verdict::ALLOWED);
    }
    let kinds = RequestedKinds::of_pod(&pod, &rules.names);
    let mut warnings = Vec::new();
    if !kinds.is_empty() || pod.annotation(ALL_DEVICES).is_some() {
        match check_request(rules, &pod, cluster) {
            Ok(found) => warnings = found,
            Err(refusal) => return Ok(Verdict::Refused(refusal)),
        }
    }
    if !rules.is_unrestricted(&request.namespace)
        && let Err(refusal) = check_device_fields(rules, &pod, &request.namespace)
    {
        return Ok(Verdict::Refused(refusal));
    }
    Ok(Verdict::Allowed {
        patch: Vec::new(),
        warnings,
    })
}

/// The reason for which no node of this cluster can ever take a new pod: its memory seems to be in another unit, or it names a
/// type of devices that no node has. `None` if there is no such reason, or while not all nodes are known.
fn cluster_refusal(cluster: &Shared<Index>, pod: &Pod) -> Option<String> {
    let index = cluster.read();
    index.ready().ok()?;
    let facts = PodFacts::of(pod, index.names())?;
    let refusal = index.demand(pod.uid(), &facts).err()?;
    Some(refusal.to_string())
}

/// Checks the device requests and annotations of a new pod; returns warnings about what is valid and looks like a mistake.
fn check_request(rules: &Rules, pod: &Pod, cluster: &Shared<Index>) -> Result<Vec<String>, Refusal> {
    let requested = PodRequest::read_new(pod, &rules.names)?;
    refuse_all_devices(rules, pod)?;
    for key in RECORD_ANNOTATIONS {
        if pod.annotation(key).is_some() {
            return Err(Refusal::Invalid(format!(
                "annotation {key} is for the scheduler to write; make the pod without it"
            )));
        }
    }
    check_wish(pod)?;
    if let Some(refusal) = cluster_refusal(cluster, pod) {
        return Err(Refusal::Invalid(refusal));
    }
    let mut warnings = Vec::new();
    warnings.extend(requested.and_then(|requested| requested.gpus?.warning()));
    if pod.annotation(GROUP_DOMAIN).is_some() && !pod.is_in_gang() {
        warnings.push(format!(
            "annotation {GROUP_DOMAIN} has no effect: the pod is in no group, by spec.schedulingGroup or by the marks of \
             coscheduling or Koordinator"
        ));
    }
    Ok(warnings)
}

/// Refuses a pod whose wish for the domain of its group cannot be read. The filter does not: it takes such a wish for `any`.
fn check_wish(pod: &Pod) -> Result<(), Refusal> {
    match GroupWish::read(pod.metadata.annotations.as_ref()) {
        Ok(_) => Ok(()),
        Err(error) => Err(Refusal::Invalid(error.to_string())),
    }
}

/// Refuses a pod by its fields that select devices, such as variables of containers and annotations.
fn check_device_fields(rules: &Rules, pod: &Pod, namespace: &str) -> Result<(), Refusal> {
    if rules.deny_overrides && RequestedKinds::of_pod(pod, &rules.names).shares_devices() {
        visible_devices::check_overrides(pod, &rules.names)?;
    }
    visible_devices::check(pod, &rules.names, namespace)
}

/// The reason for which [`check_device_fields`] refuses a pod in a filter request; `None` if it does not.
pub(super) fn refusal_of_filter(rules: &Rules, pod: &Pod) -> Option<String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    if rules.is_unrestricted(namespace) {
        return None;
    }
    match check_device_fields(rules, pod, namespace) {
        Ok(()) => None,
        Err(Refusal::Invalid(message) | Refusal::Forbidden(message)) => Some(message),
    }
}

/// Decides about an update of a pod.
fn check_update(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let (new, old): (Pod, Pod) = (read(request)?, read_old(request)?);
    // The finalizers of a pod that is being deleted must always be removable.
    if new.is_deleting() || is_mirror(&new) {
        return Ok(Verdict::ALLOWED);
    }
    if !RequestedKinds::of_pod(&new, &rules.names).is_empty()
        && let Err(refusal) = check_changed_annotations(&old, &new)
    {
        return Ok(Verdict::Refused(refusal));
    }
    if rules.is_unrestricted(&request.namespace) {
        return Ok(Verdict::ALLOWED);
    }
    Ok(visible_devices::check_changed_annotations(&old, &new, &request.namespace).into())
}

/// Refuses ephemeral containers that an update adds if they select devices; with `deny_overrides`, in a pod that shares devices,
/// also if they are privileged or override devices or limits.
fn check_ephemeral(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let new: Pod = read(request)?;
    if new.is_deleting() || rules.is_unrestricted(&request.namespace) {
        return Ok(Verdict::ALLOWED);
    }
    let old: Pod = read_old(request)?;
    if rules.deny_overrides
        && RequestedKinds::of_pod(&new, &rules.names).shares_devices()
        && let Err(refusal) = visible_devices::check_added_container_overrides(&old, &new)
    {
        return Ok(Verdict::Refused(refusal));
    }
    Ok(visible_devices::check_added_containers(&old, &new, &rules.names, &request.namespace).into())
}

/// Refuses the annotation to see all devices if its value cannot be read, or is true and not allowed in this cluster.
pub(super) fn refuse_all_devices(rules: &Rules, pod: &Pod) -> Result<(), Refusal> {
    if request::sees_all_devices(pod)? && !rules.allow_all_devices {
        return Err(Refusal::Forbidden(RequestError::AllDevicesForbidden.to_string()));
    }
    Ok(())
}

/// Refuses an update that changes the annotation to see all devices, that makes the record or an annotation about the choice of
/// devices unreadable, or that changes such an annotation of a pod that is placed already.
fn check_changed_annotations(old: &Pod, new: &Pod) -> Result<(), Refusal> {
    let is_changed = |key: &str| old.annotation(key) != new.annotation(key);
    if is_changed(ALL_DEVICES) {
        return Err(Refusal::Invalid(format!(
            "annotation {ALL_DEVICES} counts when a pod is made; it cannot be changed afterwards"
        )));
    }
    // A record that was unreadable before may take several updates to mend, so an update that leaves it unreadable is allowed.
    if RECORD_ANNOTATIONS.into_iter().any(is_changed)
        && let Err(error) = read_record(new)
        && read_record(old).is_ok()
    {
        return Err(Refusal::Invalid(error.to_string()));
    }
    if [GROUP_DOMAIN, GROUP_DOMAIN_POLICY].into_iter().any(is_changed)
        && let Err(refusal) = check_wish(new)
        && check_wish(old).is_ok()
    {
        return Err(refusal);
    }
    let is_placed = old.spec.node_name.as_deref().is_some_and(|node| !node.is_empty());
    for hint in HINTS.into_iter().filter(|hint| is_changed(hint.key)) {
        // The scheduler chose the devices by the old value, and counts the demands of placed pods too, such as exclusiveness.
        if is_placed {
            return Err(Refusal::Invalid(format!(
                "annotation {} counts when a pod is placed; it cannot be changed afterwards",
                hint.key
            )));
        }
        hint.check(new)?;
    }
    Ok(())
}

/// Checks that the allocation record in a pod's annotations can be read, if the pod has one.
fn read_record(pod: &Pod) -> Result<(), RecordError> {
    match &pod.metadata.annotations {
        None => Ok(()),
        Some(annotations) => Record::read(annotations).map(drop),
    }
}
