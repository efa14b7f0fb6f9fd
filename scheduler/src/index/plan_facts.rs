//! The facts by which a plan moves pods: the holders of a node's devices, and the nodes that their successors may go to.

use std::sync::Arc;

use placement::{NodeId, NodeView, Obstacle, OwnerId};
use proto::pod_group::{DomainPolicy, GroupDomain};
use rustc_hash::FxHashMap;

use super::budgets::Budget;
use super::cluster::Cluster;
use super::pod_groups::PodGroups;
use super::pods::PodEntry;
use super::{NodeFilter, ResourceDemand};
use crate::kube_scheduler::{PodRules, obstacles};

/// The cluster, as far as plans depend on it.
#[derive(Debug)]
pub struct PlanFacts<'a> {
    cluster: &'a Cluster,
    groups: &'a PodGroups,
    /// The disruption budgets of each namespace with their names.
    budgets: FxHashMap<&'a str, Vec<(&'a str, &'a Budget)>>,
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
        let mut budgets: FxHashMap<&str, Vec<(&str, &Budget)>> = FxHashMap::default();
        for ((namespace, name), budget) in &cluster.budgets {
            budgets.entry(namespace).or_default().push((name, budget));
        }
        Self {
            cluster,
            groups,
            budgets,
        }
    }

    /// The pods that hold devices of a node. `now` is in seconds since 1970.
    pub fn holders_on(&self, node: NodeId, now: i64) -> Vec<HolderFacts> {
        let held = self.cluster.fleet.view(node).into_iter().flat_map(NodeView::held);
        let holders = held.filter_map(|held| {
            let (owner, entry) = self.cluster.pods.get_key_value(&held.owner)?;
            Some(self.holder(owner, entry, now))
        });
        holders.collect()
    }

    fn holder(&self, owner: &OwnerId, entry: &PodEntry, now: i64) -> HolderFacts {
        let facts = &entry.facts;
        let demand = ResourceDemand::of_pod(self.cluster, owner.as_str(), facts);
        let demand = demand.ok().flatten().map(|demand| demand.for_no_pod());
        let rank = entry.eviction.rank;
        let run_seconds = u64::try_from(now.saturating_sub(rank.started)).unwrap_or(0);
        let (rules, stays) = match &entry.moving {
            _ if demand.is_none() => (None, Some(Obstacle::Unknown)),
            Some(Ok(_)) if self.is_held_by_group(owner) => (None, Some(Obstacle::Group)),
            Some(Ok(rules)) => (Some(Arc::clone(rules)), self.budget_obstacle(entry)),
            Some(Err(obstacle)) => (None, Some((**obstacle).clone())),
            None => (None, Some(Obstacle::Binding)),
        };
        HolderFacts {
            owner: owner.clone(),
            namespace: facts.namespace.clone(),
            name: facts.name.clone(),
            demand: demand.unwrap_or_default(),
            rules,
            priority: rank.priority,
            run_seconds,
            stays,
        }
    }

    /// The disruption budgets that keep a pod from being evicted now.
    fn budget_obstacle(&self, entry: &PodEntry) -> Option<Obstacle> {
        let budgets = self.budgets.get(&*entry.facts.namespace)?;
        let mut guards = budgets
            .iter()
            .filter(|(_, budget)| budget.guards(&entry.eviction.labels));
        let (name, budget) = guards.next()?;
        if guards.next().is_some() {
            return Some(Obstacle::Budgets);
        }
        (budget.allowed <= 0).then(|| Obstacle::Budget {
            name: (*name).into(),
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
                .any(|(other, member)| other != owner && member.is_bound())
    }
}

/// Returns true if a node may take a successor, by all rules but amounts: kube-scheduler's own, those of the node's plugin, and
/// the isolation that the pod demands.
pub(super) fn allows(cluster: &Cluster, node: &str, rules: &PodRules, demand: &ResourceDemand<'_>) -> bool {
    let Some(state) = cluster.node(node).filter(|state| state.exists()) else {
        return false;
    };
    let filter = NodeFilter { cluster };
    obstacles(rules, &state.facts).is_empty() && filter.check_served(node, demand).is_ok()
}
