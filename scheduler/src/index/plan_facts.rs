//! The facts by which a plan moves pods: the holders of a node's devices, and the nodes that their successors may go to.

use std::sync::Arc;

use placement::{Obstacle, OwnerId};
use proto::pod::NodeSelector;
use proto::pod_group::{DomainPolicy, GroupDomain};

use super::{Cluster, Index, PodEntry, ResourceDemand};
use crate::kube_scheduler::{PodRules, obstacles};

/// A pod that holds devices of a node.
#[derive(Clone, Debug)]
pub(crate) struct HolderFacts {
    pub(crate) owner: OwnerId,
    pub(crate) namespace: Box<str>,
    pub(crate) name: Box<str>,
    /// The disruption budgets that keep it from being evicted now.
    pub(crate) protection: Option<Obstacle>,
    /// True if it has claims of volumes that outlast it.
    pub(crate) has_claims: bool,
    /// The demand of its successor.
    pub(crate) demand: ResourceDemand<'static>,
    /// The rules by which its successor gets a node; `None` if it stays.
    pub(crate) rules: Option<Arc<PodRules>>,
    pub(crate) priority: i32,
    pub(crate) run_seconds: u64,
    /// The reason for which it must not move.
    pub(crate) stays: Option<Obstacle>,
}

/// A pod that holds devices; `None` if it is gone. `now` is in seconds since 1970.
pub(crate) fn holder(index: &Index, owner: &str, now: i64) -> Option<HolderFacts> {
    let (owner, entry) = index.cluster.pods.get_key_value(owner)?;
    let facts = &entry.facts;
    let demand = index.demand(owner.as_str(), facts);
    let demand = demand.ok().flatten().map(|demand| demand.for_no_pod());
    let rank = entry.preemption.rank;
    let run_seconds = u64::try_from(now.saturating_sub(rank.started)).unwrap_or(0);
    let (rules, stays) = match &entry.moving {
        _ if demand.is_none() => (None, Some(Obstacle::Unknown)),
        Some(Ok(_)) if is_held_by_group(index, owner) => (None, Some(Obstacle::Group)),
        Some(Ok(pod)) => (Some(Arc::clone(&pod.rules)), None),
        Some(Err(obstacle)) => (None, Some((**obstacle).clone())),
        None => (None, Some(Obstacle::Binding)),
    };
    Some(HolderFacts {
        owner: owner.clone(),
        namespace: facts.namespace.clone(),
        name: facts.name.clone(),
        protection: protection(&index.cluster, entry),
        has_claims: matches!(&entry.moving, Some(Ok(pod)) if pod.has_claims),
        demand: demand.unwrap_or_default(),
        rules,
        priority: rank.priority,
        run_seconds,
        stays,
    })
}

/// Returns true if a node may take a successor, by all rules but amounts: kube-scheduler's own, those of the node's plugin,
/// the isolation that the pod demands, and the node affinity of its volumes.
pub(crate) fn allows_successor(
    index: &Index,
    node: &str,
    rules: &PodRules,
    demand: &ResourceDemand<'_>,
    volumes: &[NodeSelector],
) -> bool {
    let Some(facts) = index.node_facts(node) else {
        return false;
    };
    obstacles(rules, facts).is_empty()
        && index.filter().check_served(node, demand).is_ok()
        && (volumes.iter()).all(|volume| volume.matches(&facts.name, |key| facts.label(key)))
}

fn protection(cluster: &Cluster, entry: &PodEntry) -> Option<Obstacle> {
    match cluster.budgets.guarding(entry)[..] {
        [budget] if budget.allowed <= 0 => Some(Obstacle::Budget {
            name: budget.name.clone(),
            allowed: budget.allowed,
        }),
        [] | [_] => None,
        // The Eviction API never evicts a pod that two budgets select.
        _ => Some(Obstacle::Budgets),
    }
}

/// Returns true if the pod belongs to a group whose members are refused outside of one domain, in which others are bound.
fn is_held_by_group(index: &Index, owner: &OwnerId) -> bool {
    let members = &index.cluster.group_members;
    let Some((id, marks)) = members.find(owner.as_str()) else {
        return false;
    };
    let wish = index.pod_groups.group(id.clone(), marks).wish;
    let mut members = members.of(id);
    wish.domain != GroupDomain::Any
        && wish.policy == DomainPolicy::Required
        && members.any(|(other, member)| other != owner && member.is_bound)
}
