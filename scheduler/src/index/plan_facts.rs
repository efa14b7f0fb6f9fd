//! The facts by which a plan moves pods: the holders of a node's devices, and the nodes that their successors may go to.

use std::sync::Arc;

use placement::{Obstacle, OwnerId};
use proto::pod::NodeSelector;
use proto::pod_group::{DomainPolicy, GroupDomain};

use super::cluster::Cluster;
use super::pod_groups::PodGroups;
use super::{NodeFilter, PodEntry, ResourceDemand};
use crate::kube_scheduler::{PodRules, obstacles};

/// The cluster, as far as plans depend on it.
#[derive(Debug)]
pub struct PlanFacts<'a> {
    cluster: &'a Cluster,
    groups: &'a PodGroups,
}

/// A pod that holds devices of a node.
#[derive(Clone, Debug)]
pub struct HolderFacts {
    /// The pod, by its UID.
    pub owner: OwnerId,
    /// Its namespace.
    pub namespace: Box<str>,
    /// Its name.
    pub name: Box<str>,
    /// The disruption budgets that keep it from being evicted now.
    pub protection: Option<Obstacle>,
    /// True if it has claims of volumes that outlast it.
    pub has_claims: bool,
    /// The demand of its successor.
    pub demand: ResourceDemand<'static>,
    /// The rules by which its successor gets a node; `None` if it stays.
    pub rules: Option<Arc<PodRules>>,
    /// Its priority.
    pub priority: i32,
    /// Seconds for which it has run.
    pub run_seconds: u64,
    /// The reason for which it must not move; `None` if there is none.
    pub stays: Option<Obstacle>,
}

impl<'a> PlanFacts<'a> {
    pub(super) fn new(cluster: &'a Cluster, groups: &'a PodGroups) -> Self {
        Self { cluster, groups }
    }

    /// A pod that holds devices; `None` if it is gone. `now` is in seconds since 1970.
    pub fn holder(&self, owner: &str, now: i64) -> Option<HolderFacts> {
        let (owner, entry) = self.cluster.pods.get_key_value(owner)?;
        let facts = &entry.facts;
        let demand = ResourceDemand::of_pod(self.cluster, owner.as_str(), facts);
        let demand = demand.ok().flatten().map(|demand| demand.for_no_pod());
        let rank = entry.preemption.rank;
        let run_seconds = u64::try_from(now.saturating_sub(rank.started)).unwrap_or(0);
        let (rules, stays) = match &entry.moving {
            _ if demand.is_none() => (None, Some(Obstacle::Unknown)),
            Some(Ok(_)) if self.is_held_by_group(owner) => (None, Some(Obstacle::Group)),
            Some(Ok(pod)) => (Some(Arc::clone(&pod.rules)), None),
            Some(Err(obstacle)) => (None, Some((**obstacle).clone())),
            None => (None, Some(Obstacle::Binding)),
        };
        Some(HolderFacts {
            owner: owner.clone(),
            namespace: facts.namespace.clone(),
            name: facts.name.clone(),
            protection: self.protection(entry),
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
    pub fn allows(
        &self,
        node: &str,
        rules: &PodRules,
        demand: &ResourceDemand<'_>,
        volumes: &[NodeSelector],
    ) -> bool {
        let Some(state) = self.cluster.node(node).filter(|state| state.exists()) else {
            return false;
        };
        let (filter, facts) = (NodeFilter::of(self.cluster), &state.facts);
        obstacles(rules, facts).is_empty()
            && filter.check_served(node, demand).is_ok()
            && (volumes.iter()).all(|volume| volume.matches(&facts.name, |key| facts.label(key)))
    }

    /// The disruption budgets that keep a pod from being evicted now.
    fn protection(&self, entry: &PodEntry) -> Option<Obstacle> {
        let mut guarding = self.cluster.budgets.guarding(entry);
        let budget = guarding.next()?;
        // The Eviction API never evicts a pod that two budgets select.
        if guarding.next().is_some() {
            return Some(Obstacle::Budgets);
        }
        (budget.allowed <= 0).then(|| Obstacle::Budget {
            name: budget.name.clone(),
            allowed: budget.allowed,
        })
    }

    /// Returns true if the pod belongs to a group whose members are refused outside of one domain, in which others are bound.
    fn is_held_by_group(&self, owner: &OwnerId) -> bool {
        let members = &self.cluster.group_members;
        let Some((kind, key, member)) = members.find(owner.as_str()) else {
            return false;
        };
        let wish = self.groups.group(kind, key.into(), member.marks).wish;
        let is_required = wish.domain != GroupDomain::Any && wish.policy == DomainPolicy::Required;
        is_required
            && members
                .of(kind, key)
                .any(|(other, member)| other != owner && member.is_bound)
    }
}
