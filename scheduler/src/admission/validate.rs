//! The validating webhook for pods: refuses pods that can never work, with the same texts as the filter. It alone refuses a pod
//! whose annotation about the domain of its group cannot be read.
//!
//! An update is refused only for what it makes worse: an existing pod can always be deleted, and its finalizers removed.

use proto::admission::{AdmissionRequest, Operation};
use proto::annotation::AnnotationError;
use proto::pod::{ALL_DEVICES, Pod};
use proto::pod_group::{GROUP_DOMAIN, GROUP_DOMAIN_POLICY, GroupWish};
use proto::record::Record;
use proto::request::hints::{HINTS, Hints};
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
    let namespace = &*request.namespace;
    let checked = match (request.operation, request.sub_resource.as_str()) {
        (Operation::Create, "") => check_new(rules, &read(request)?, namespace, cluster),
        (Operation::Update, "" | "ephemeralcontainers") => {
            let checked = check_update(rules, &read_old(request)?, &read(request)?, namespace);
            checked.map(|()| Vec::new())
        }
        _ => Ok(Vec::new()),
    };
    Ok(Verdict::of(checked.map(|warnings| (Vec::new(), warnings))))
}

/// Checks a new pod; returns warnings about what is valid and looks like a mistake.
fn check_new(
    rules: &Rules,
    pod: &Pod,
    namespace: &str,
    cluster: &Shared<Index>,
) -> Result<Vec<String>, Refusal> {
    // kubelet runs the static pod whatever the answer is; a refusal would only hide it.
    if is_mirror(pod) {
        return Ok(Vec::new());
    }
    let kinds = RequestedKinds::of_pod(pod, &rules.names);
    let mut warnings = Vec::new();
    if !kinds.is_empty() || pod.annotation(ALL_DEVICES).is_some() {
        warnings = check_request(rules, pod, cluster)?;
    }
    check_device_fields(rules, None, pod, namespace)?;
    Ok(warnings)
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
    let warning = requested.and_then(|requested| requested.gpus?.warning());
    let mut warnings: Vec<String> = warning.into_iter().collect();
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
    let wish = GroupWish::read(pod.metadata.annotations.as_ref());
    wish.map(drop)
        .map_err(|error| Refusal::Invalid(error.to_string()))
}

/// Refuses a new pod in this namespace, or an update of the pod `old`, by its fields that select devices, such as variables of
/// containers and annotations.
pub(super) fn check_device_fields(
    rules: &Rules,
    old: Option<&Pod>,
    new: &Pod,
    namespace: &str,
) -> Result<(), Refusal> {
    if rules.is_unrestricted(namespace) {
        return Ok(());
    }
    if rules.deny_overrides && RequestedKinds::of_pod(new, &rules.names).shares_devices() {
        visible_devices::check_overrides(old, new, &rules.names)?;
    }
    visible_devices::check(old, new, &rules.names, namespace)
}

/// Checks an update of a pod or of its ephemeral containers.
fn check_update(rules: &Rules, old: &Pod, new: &Pod, namespace: &str) -> Result<(), Refusal> {
    // The finalizers of a pod that is being deleted must always be removable.
    if new.is_deleting() || is_mirror(new) {
        return Ok(());
    }
    if !RequestedKinds::of_pod(new, &rules.names).is_empty() {
        check_changed_annotations(old, new)?;
    }
    check_device_fields(rules, Some(old), new, namespace)
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
    let is_placed = !old.spec.node_name.as_deref().unwrap_or_default().is_empty();
    for key in HINTS.into_iter().filter(|key| is_changed(key)) {
        // The scheduler chose the devices by the old value, and counts the demands of placed pods too, such as exclusiveness.
        if is_placed {
            return Err(Refusal::Invalid(format!(
                "annotation {key} counts when a pod is placed; it cannot be changed afterwards"
            )));
        }
        Hints::check(key, new)?;
    }
    Ok(())
}

/// Checks that the allocation record in a pod's annotations can be read, if the pod has one.
fn read_record(pod: &Pod) -> Result<(), AnnotationError> {
    if let Some(annotations) = &pod.metadata.annotations {
        Record::read(annotations)?;
    }
    Ok(())
}
