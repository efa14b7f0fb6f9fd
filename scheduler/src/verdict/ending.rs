//! The pods on a node that would have to end so that the node takes a waiting pod.
//!
//! The engine removes the pods from a copy of the node, and evaluates the copy as it did the node itself.

use placement::{Evictable, NodeId, OwnerId, Preemption};
use proto::read_api::PodName;

use super::{NominatedRequests, check_node};
use crate::index::{Index, ResourceDemand};
use crate::kube_scheduler::{NodeRefusal, PODS, PodRules, Shortage};

/// Returns true if the node would take the pod without all the pods that are on it now.
pub(crate) fn fits_on_empty(
    index: &Index,
    node: NodeId,
    name: &str,
    rules: &PodRules,
    demand: &ResourceDemand<'_>,
) -> bool {
    // kube-scheduler's own refusal may be for room that the pods on the node take.
    let may_go_there = match check_node(index, name, rules, &NominatedRequests::new()) {
        Ok(()) => true,
        Err(refusal) => refusal.is_lack_of_room(),
    };
    if !may_go_there || index.filter().check_served(name, demand).is_err() {
        return false;
    }
    let (fleet, devices) = (index.fleet(), demand.devices());
    let empty = fleet.copy_empty_node(node);
    empty.is_some_and(|empty| fleet.score_copy(&empty, devices, demand.policies).is_ok())
}

/// A smallest set of pods by whose end a node that lacks room takes the pod; empty if no set of pods that hold devices does.
pub(crate) fn pods_in_the_way(
    index: &Index,
    node: NodeId,
    rules: &PodRules,
    demand: &ResourceDemand<'_>,
    nominated: &NominatedRequests,
) -> Vec<PodName> {
    let Some(view) = index.fleet().view(node) else {
        return Vec::new();
    };
    let shortages = match check_node(index, view.name(), rules, nominated) {
        Ok(()) => Vec::new(),
        Err(NodeRefusal::Insufficient(shortages)) => shortages,
        Err(_) => return Vec::new(),
    };
    let must_free: Vec<u64> = shortages.iter().map(Shortage::missing).collect();
    let mut pods = Vec::new();
    for held in view.held() {
        // Holdings by kubelet allocations of a pod that no watch shows: there is no pod that a person could end.
        if index.pod(held.owner.as_str()).is_none() {
            continue;
        }
        pods.push(Evictable {
            owner: held.owner.clone(),
            // Priorities, starts and budgets do not matter: a person ends these pods, and they are as few as can be.
            priority: 0,
            started: 0,
            is_leaving: false,
            is_forced: false,
            budgets: Vec::new(),
            frees: freed(index, held.owner.as_str(), &shortages),
        });
    }
    let preemption = Preemption {
        pods: &pods,
        budgets: &[],
        must_free: &must_free,
        // Room that is kept for other pods does not count as free, whichever pods end.
        outranked: &[OwnerId::from(demand.uid)],
    };
    let victims = index.fleet().preempt(node, demand.devices(), preemption);
    let mut names = Vec::new();
    for owner in victims.into_iter().flat_map(|victims| victims.owners) {
        if let Some(facts) = index.pod(owner.as_str()) {
            names.push(PodName {
                namespace: facts.namespace.to_string(),
                name: facts.name.to_string(),
            });
        }
    }
    names.sort();
    names
}

/// The amount of each short resource that the end of a pod frees.
fn freed(index: &Index, uid: &str, shortages: &[Shortage]) -> Vec<u64> {
    let Some(requests) = index.requests().of_pod(uid) else {
        return vec![0; shortages.len()];
    };
    let mut freed = Vec::with_capacity(shortages.len());
    for shortage in shortages {
        freed.push(match &*shortage.resource {
            PODS => 1,
            resource => requests.get(resource).copied().unwrap_or(0),
        });
    }
    freed
}
