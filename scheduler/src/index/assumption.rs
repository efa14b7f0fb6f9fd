//! Assumptions. An assumption is the decision of a bind until the watch of pods shows the pod bound: a node, and devices there
//! that are chosen and reserved for the pod.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use placement::{Hints, Holdings, NodeId, OwnerId, Placement, Reason, RequestedGpus, ReserveError};
use proto::pod_group::DomainPolicy;
use proto::record::DEVICE_ALLOCATED;
use proto::request::RequestError;

use super::cluster::Cluster;
use super::pods::{Assumption, AssumptionState, Phase, PodEntry};
use super::record::record;
use super::resource_demand::ResourceDemand;
use super::{Index, hints, started_groups};
use crate::accounting::{Bound, PodFacts};
use crate::bind::{PodBinding, PodId, PodLookup};

/// The time after which a write without an answer has ended: far longer than the timeout in the request to the API server.
const LONGEST_WRITE: Duration = Duration::from_secs(60);

/// The result of [`Index::assume`] for a pod that may be bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Assumed {
    /// The binding to write.
    Write {
        /// The binding.
        binding: PodBinding,
        /// The assume time of the assumption.
        assumed_at: u64,
        /// True if it has been written before, with an unknown outcome.
        repeated: bool,
    },
    /// The watch has shown the pod on that node already.
    AlreadyBound,
}

/// The reason for which a bind cannot be decided; nothing is reserved.
#[derive(Debug, thiserror::Error)]
pub enum AssumeError {
    /// The pod is on this other node.
    #[error("the pod is already bound to node {0:?}")]
    BoundElsewhere(String),
    /// An earlier bind to this other node may have got through.
    #[error("an earlier bind of the pod to node {0:?} is not settled yet")]
    AssumedElsewhere(String),
    /// This replica's term as the leader has ended since an earlier bind to the same node, which must not be repeated.
    #[error("an earlier bind of the pod is not settled yet; another replica may have decided since")]
    Outlived,
    /// The request breaks a rule.
    #[error(transparent)]
    Invalid(#[from] RequestError),
    /// The node has no room for the pod.
    #[error("node {node:?}: {text}")]
    NoRoom {
        /// The node.
        node: String,
        /// The reason.
        reason: Reason,
        /// The reason with the amounts of the request, the rule, and how near the node comes.
        text: String,
    },
    /// The engine refused its own choice.
    #[error("node {0:?} cannot take the pod")]
    Reserve(String, #[source] ReserveError),
}

/// Returns the binding of an assumption to be written again, unchanged: the API server merges the annotations into the pod, so
/// that another choice of devices would contradict a write that got through.
fn repeat(assumption: &mut Assumption, node: &str, now: Instant) -> Result<Assumed, AssumeError> {
    if assumption.binding.node != node {
        return Err(AssumeError::AssumedElsewhere(assumption.binding.node.clone()));
    }
    // Another leader may have given the room away since.
    if assumption.outlived {
        return Err(AssumeError::Outlived);
    }
    assumption.state.phase = Phase::Writing;
    assumption.state.since = now;
    Ok(Assumed::Write {
        binding: assumption.binding.clone(),
        assumed_at: assumption.state.assumed_at,
        repeated: true,
    })
}

/// Does what [`Index::assume`] says.
pub(super) fn assume(
    index: &mut Index,
    pod: &PodId,
    facts: &PodFacts,
    node: &str,
    nanos: u64,
    now: Instant,
) -> Result<Assumed, AssumeError> {
    let entry = index.cluster.pods.get_mut(pod.uid.as_str());
    let shown = entry.as_ref().and_then(|entry| entry.facts.bound.as_ref());
    if let Some(bound) = shown.or(facts.bound.as_ref()) {
        if *bound.node == *node {
            return Ok(Assumed::AlreadyBound);
        }
        return Err(AssumeError::BoundElsewhere(bound.node.to_string()));
    }
    // kube-scheduler repeats a bind whose answer it did not get.
    if let Some(assumption) = entry.and_then(|entry| entry.assumption.as_mut()) {
        return repeat(assumption, node, now);
    }
    // kube-scheduler may know a new node earlier; its devices are not known until a watch of this process shows it.
    if !index.cluster.knows_node(node) {
        return Err(AssumeError::NoRoom {
            node: node.to_owned(),
            reason: Reason::NoDevice,
            text: Reason::NoDevice.to_string(),
        });
    }
    // Device objects may have changed since the caller looked, so that the pod requests no device any more.
    let demand = index.demand(&pod.uid, facts)?.unwrap_or_default();
    let placement = choose_and_reserve(index, &demand, node)?;
    let assumed_at = index.assume_times.next(nanos);
    let record = record(&index.cluster, facts.request.gpus(), node, &placement, assumed_at);
    let mut annotations = record.annotations();
    // If no devices are chosen, an empty record replaces one in a copied manifest, which would pass for this choice.
    let record = annotations.entry(DEVICE_ALLOCATED.to_owned());
    record.or_insert_with(|| "{}".to_owned());
    let binding = PodBinding {
        pod: pod.clone(),
        node: node.to_owned(),
        annotations,
        labels: facts.labels_on(node),
    };
    let owner = index.cluster.owner(&pod.uid);
    let entry = index.cluster.pods.entry(owner.clone());
    let entry = entry.or_insert_with(|| Box::new(PodEntry::new(facts.clone())));
    entry.assumption = Some(Box::new(Assumption {
        binding: binding.clone(),
        state: AssumptionState {
            assumed_at,
            phase: Phase::Writing,
            since: now,
        },
        unlisted: false,
        outlived: false,
    }));
    let is_tied_to_node = false;
    // The pod's requests count on the node now, not only when a watch shows the pod bound.
    if let Some(rules) = &entry.rules {
        let requests = &mut index.cluster.requests;
        requests.put(owner.clone(), node, &rules.requests, is_tied_to_node);
    }
    // The hint has served its purpose; on another node its room is free again.
    hints::end(index, &pod.uid, Some(node));
    let fleet = &mut index.cluster.fleet;
    fleet.set_host_use(&owner, node, facts.host, is_tied_to_node);
    index.cluster.group_members.note_assumption(&pod.uid);
    index.cluster.unbound.insert(owner);
    Ok(Assumed::Write {
        binding,
        assumed_at,
        repeated: false,
    })
}

/// Chooses devices on a node and reserves them. Room that is kept for other pods is taken only if there is no other;
/// a pod that loses its room fails its own bind, and kube-scheduler filters it again.
fn choose_and_reserve(
    index: &mut Index,
    demand: &ResourceDemand<'_>,
    node: &str,
) -> Result<Placement, AssumeError> {
    let owner = index.cluster.owner(demand.uid);
    let Some(id) = index.cluster.fleet.node_id(node) else {
        // A node without known devices takes pods that need none of them, and the vendor's pods with whole GPUs.
        let fit = index.filter().fit(node, demand);
        fit.map_err(|reason| no_room(index, node, demand, reason))?;
        return Ok(hold_unknown_gpus(&mut index.cluster, &owner, demand.gpus, node));
    };
    // The engine checks the room itself when it chooses; only the facts that it does not know are checked here.
    let served = index.filter().check_served(node, demand);
    served.map_err(|reason| no_room(index, node, demand, reason))?;
    hints::choose_placement(index, demand.uid, id);
    let placement = choose_devices_on(index, id, demand);
    let placement = placement.map_err(|reason| no_room(index, node, demand, reason))?;
    if placement != Placement::default() {
        let reserved = index.cluster.fleet.reserve(&owner, id, &placement);
        reserved.map_err(|error| AssumeError::Reserve(node.to_owned(), error))?;
    }
    Ok(placement)
}

fn no_room(index: &Index, node: &str, demand: &ResourceDemand<'_>, reason: Reason) -> AssumeError {
    let text = demand.refusal(reason);
    let text = match index.filter().detail(node, demand, reason) {
        // It may say the same already.
        Some(detail) if detail.starts_with(&text) => detail,
        Some(detail) => format!("{text}: {detail}"),
        None => text,
    };
    let node = node.to_owned();
    AssumeError::NoRoom { node, reason, text }
}

/// Chooses devices on a node of the fleet: in the room that is kept for the pod's group, else in the domain that the group
/// wishes for, else any.
fn choose_devices_on(index: &Index, id: NodeId, demand: &ResourceDemand<'_>) -> Result<Placement, Reason> {
    match index.hints.rooms.place_at_bind(&index.cluster, id, demand) {
        Some(Ok(placement)) => return Ok(placement),
        Some(Err(DomainPolicy::Required)) => return Err(Reason::Together),
        Some(Err(DomainPolicy::Preferred)) => {}
        None => {
            if let Some(placement) = started_groups::place_without_kept_room(index, id, demand) {
                return placement;
            }
        }
    }
    let (fleet, policy) = (&index.cluster.fleet, demand.policies.device);
    let chosen = fleet.choose_devices(id, demand.devices(), policy, Hints::RespectOthers(demand.uid));
    if chosen.is_ok() {
        return chosen;
    }
    // Room that is kept for other pods comes last.
    fleet.choose_devices(id, demand.devices(), policy, Hints::Ignore)
}

/// Counts the whole GPUs that a pod will hold on a node whose devices are not known; kubelet chooses them.
fn hold_unknown_gpus(cluster: &mut Cluster, owner: &OwnerId, gpus: RequestedGpus, node: &str) -> Placement {
    let mut placement = Placement::default();
    if let RequestedGpus::Whole(n) = gpus {
        (placement.n_unknown_gpus, placement.is_vendor) = (n, true);
        cluster.fleet.hold(owner, node, Holdings::from(&placement));
    }
    placement
}

/// Confirms the assumption of a pod that a read of the API server found on the assumed node. The pod then holds the devices
/// in its annotations as read.
pub(crate) fn confirm_found(
    index: &mut Index,
    uid: &str,
    assumed_at: u64,
    annotations: &BTreeMap<String, String>,
    now: Instant,
) {
    index.confirm(uid, assumed_at, now);
    let Some(assumption) = index.cluster.assumption_mut(uid, assumed_at) else {
        return;
    };
    let binding = &mut assumption.binding;
    // Another scheduler may have written the annotations.
    if Bound::read(&binding.node, Some(annotations)).assumed_at != Some(assumed_at) {
        binding.annotations.clone_from(annotations);
        let owner = index.cluster.owner(uid);
        index.cluster.account(&owner);
    }
}

/// The binding of the assumption may have been written.
pub(crate) fn mark_unknown(index: &mut Index, uid: &str, assumed_at: u64, now: Instant) {
    set_phase(&mut index.cluster, uid, assumed_at, Phase::Unknown, now);
}

/// Sets the phase of the assumption with this assume time; any other assumption stays as it is.
pub(super) fn set_phase(cluster: &mut Cluster, uid: &str, assumed_at: u64, phase: Phase, now: Instant) {
    if let Some(assumption) = cluster.assumption_mut(uid, assumed_at) {
        assumption.state.phase = phase;
        assumption.state.since = now;
        assumption.unlisted = false;
    }
}

/// Does what [`Index::settle`] says.
pub(super) fn settle(
    index: &mut Index,
    uid: &str,
    state: AssumptionState,
    found: &PodLookup,
    now: Instant,
) -> bool {
    let Some(assumption) = index.cluster.assumption(uid) else {
        return true;
    };
    if assumption.state != state {
        return false;
    }
    let n_openings = index.cluster.fleet.n_openings();
    match found {
        PodLookup::Bound { node, annotations } if *node == assumption.binding.node => {
            confirm_found(index, uid, state.assumed_at, annotations, now);
        }
        // The write of its binding may still be under way.
        PodLookup::Unbound if now.saturating_duration_since(state.since) < LONGEST_WRITE => return false,
        PodLookup::Gone => index.remove_pod(uid),
        // If another scheduler has bound it, the watch will show where; the room here is free.
        PodLookup::Bound { .. } | PodLookup::Unbound => index.forget(uid, state.assumed_at),
    }
    // kube-scheduler does not see that a binding turns out not to have been written.
    index.cluster.note_silent_since(n_openings);
    true
}

/// Ends this replica's term as the leader: another replica may decide from now on, and may give away the devices of
/// open assumptions, so that their bindings are not written again.
pub(crate) fn end_term(index: &mut Index) {
    for entry in index.cluster.pods.values_mut() {
        // The assumption itself stays counted: a write of its binding that is under way may still get through.
        if let Some(assumption) = &mut entry.assumption {
            assumption.outlived = true;
        }
    }
}
