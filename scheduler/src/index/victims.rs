//! The victims by which a pod fits on a node.
//!
//! Victims are pods that the watch shows on that node, of lower priority than the pod, and not ended. kube-scheduler's own
//! proposal also depends on other things, of which little is known here. So its victims stay, except for those that hold devices
//! and that only amounts can be the reason for; the rest must free no less of any amount than is short.

use std::collections::{BTreeMap, BTreeSet};

use placement::{Evictable, HostAmounts, NodeView, OwnerId, Preemption, Victims};
use proto::extender::{MetaPod, MetaVictims};
use proto::pod::Pod;
use proto::resource::is_gpu_resource;
use proto::totals::NamedRequests;
use rustc_hash::FxHashSet;

use super::budgets::Budgets;
use super::eviction::{Eviction, EvictionRank, PlainPods};
use super::node_filter::NodeFilter;
use super::pods::PodEntry;
use super::resource_demand::ResourceDemand;

/// The pod that is to have room, and what the sums of nodes must have for it.
#[derive(Debug)]
pub struct Preemptor<'a> {
    pod: &'a Pod,
    demand: &'a ResourceDemand<'a>,
    depends_on_other_pods: bool,
    promised: &'a Promised,
    sums: Sums,
}

/// Victims by node.
pub type Promised = BTreeMap<Box<str>, BTreeSet<OwnerId>>;

impl<'a> Preemptor<'a> {
    /// A pod and its request for devices. `depends_on_other_pods` says that it may lack a node for other reasons than amounts, so that
    /// all victims that are proposed must go; `promised` are the victims that make room for other pods.
    pub fn new(
        pod: &'a Pod,
        demand: &'a ResourceDemand<'a>,
        depends_on_other_pods: bool,
        promised: &'a Promised,
    ) -> Self {
        let sums = Sums {
            host: demand.host,
            named: NamedRequests::of_pod(pod).0.into_iter().collect(),
        };
        Self {
            pod,
            demand,
            depends_on_other_pods,
            promised,
            sums,
        }
    }

    fn is_promised(&self, node: &str, uid: &str) -> bool {
        self.promised
            .get(node)
            .is_some_and(|victims| victims.contains(uid))
    }
}

/// The amounts that a pod asks for and kube-scheduler sums up per node: CPU, memory, the pod itself, then the others by name.
#[derive(Debug)]
struct Sums {
    host: HostAmounts,
    named: Vec<(String, u64)>,
}

impl Sums {
    /// The amount of each sum that evicting a pod with these requests frees.
    fn freed(&self, host: HostAmounts, requests: &NamedRequests) -> Vec<u64> {
        let named = self
            .named
            .iter()
            .map(|(name, _)| requests.0.get(name).copied().unwrap_or(0));
        [host.cpu_milli, host.memory, 1]
            .into_iter()
            .chain(named)
            .collect()
    }
}

/// Searches for victims on the nodes of a cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClusterVictimSearch<'a> {
    pub(super) filter: NodeFilter<'a>,
    pub(super) budgets: &'a Budgets,
    pub(super) plain: &'a PlainPods,
    /// Pods that kube-scheduler keeps a node for.
    pub(super) nominated: &'a FxHashSet<OwnerId>,
}

impl ClusterVictimSearch<'_> {
    /// The victims by which a pod fits on a node, instead of those that kube-scheduler proposes; `None` if none help.
    ///
    /// All that is proposed where nothing of ours is short.
    pub(super) fn victims(
        self,
        node: &str,
        preemptor: &Preemptor<'_>,
        proposed: &MetaVictims,
    ) -> Option<MetaVictims> {
        self.filter.check_served(node, preemptor.demand).ok()?;
        let id = self.filter.cluster.fleet.node_id(node)?;
        let view = self.filter.cluster.fleet.view(id)?;
        let (budgets, pods) = self.evictable(view, preemptor, proposed);
        let must_free = self.must_free(view, preemptor, &pods, proposed);
        let outranked: Vec<OwnerId> = view
            .hinted()
            .filter(|owner| self.is_outranked(owner, preemptor))
            .cloned()
            .collect();
        let preemption = Preemption {
            pods: &pods,
            budgets: &budgets,
            must_free: &must_free,
            outranked: &outranked,
        };
        let victims = self
            .filter
            .cluster
            .fleet
            .preempt(id, preemptor.demand.devices(), preemption)?;
        if victims.owners.is_empty() {
            // Devices are not what is short.
            return (!proposed.pods.is_empty()).then(|| proposed.clone());
        }
        Some(self.with_violations(&victims, &pods, &budgets, proposed))
    }

    /// Pods that may go for another, and what budgets allow: those that hold devices of the node, and those that are proposed.
    fn evictable(
        self,
        view: NodeView<'_>,
        preemptor: &Preemptor<'_>,
        proposed: &MetaVictims,
    ) -> (Vec<i64>, Vec<Evictable>) {
        let sums = &preemptor.sums;
        let budgets: Vec<_> = self.budgets.iter().collect();
        let is_proposed: BTreeSet<&str> = proposed.pods.iter().map(|pod| pod.uid.as_str()).collect();
        let mut pods = Vec::new();
        for (owner, entry) in view
            .held()
            .filter_map(|held| self.filter.cluster.pods.get_key_value(held.owner))
        {
            // A pod that only a decision binds is not on the node for kube-scheduler, which cannot evict it.
            let is_here = entry.list != 0
                && entry
                    .facts
                    .bound
                    .as_deref()
                    .is_some_and(|bound| *bound.node == *view.name());
            if !is_here
                || entry.eviction.rank.priority >= preemptor.pod.priority()
                || preemptor.is_promised(view.name(), owner.as_str())
            {
                continue;
            }
            let Eviction {
                rank,
                is_leaving,
                repels,
                labels,
                requests,
                ..
            } = &entry.eviction;
            let is_counted = |at: &usize| {
                let budget = budgets
                    .get(*at)
                    .filter(|((namespace, _), _)| **namespace == *entry.facts.namespace);
                budget.is_some_and(|(_, budget)| budget.counts(&entry.facts.name, labels))
            };
            pods.push(Evictable {
                owner: owner.clone(),
                priority: rank.priority,
                started: rank.started,
                is_leaving: *is_leaving,
                // A proposed pod may be in the way by more than amounts: anti-affinity, ports or volumes.
                is_forced: is_proposed.contains(owner.as_str())
                    && (*repels || preemptor.depends_on_other_pods),
                budgets: (0..budgets.len()).filter(is_counted).collect(),
                frees: sums.freed(entry.facts.host, requests),
            });
        }
        self.add_proposed(&mut pods, view.name(), preemptor, proposed);
        (budgets.iter().map(|(_, budget)| budget.allowed).collect(), pods)
    }

    /// Adds the proposed victims that hold no device: they stay victims, as nothing is known here of why they are.
    fn add_proposed(
        self,
        pods: &mut Vec<Evictable>,
        node: &str,
        preemptor: &Preemptor<'_>,
        proposed: &MetaVictims,
    ) {
        let sums = &preemptor.sums;
        let known: BTreeSet<OwnerId> = pods.iter().map(|pod| pod.owner.clone()).collect();
        // They come by falling importance, so that one that is not known is at most as important as the one before it.
        let mut last = EvictionRank {
            priority: preemptor.pod.priority().saturating_sub(1),
            started: i64::MIN,
        };
        for uid in proposed.pods.iter().map(|pod| pod.uid.as_str()) {
            let entry = self.filter.cluster.pods.get(uid);
            let rank = entry
                .map(|entry| entry.eviction.rank)
                .or_else(|| self.plain.get(uid).map(|plain| plain.rank))
                .unwrap_or(last);
            last = rank;
            if known.contains(uid) || (entry.is_some() && preemptor.is_promised(node, uid)) {
                continue;
            }
            let nothing = NamedRequests::default();
            let requests = entry.map_or(&nothing, |entry| &entry.eviction.requests);
            let host = entry
                .map(|entry| entry.facts.host)
                .or_else(|| self.filter.cluster.fleet.host_use_of(uid))
                .unwrap_or_default();
            pods.push(Evictable {
                owner: OwnerId::from(uid),
                priority: rank.priority,
                started: rank.started,
                is_leaving: false,
                is_forced: true,
                budgets: Vec::new(),
                frees: sums.freed(host, requests),
            });
        }
    }

    /// The amount of each sum that victims must free: the shortage, if the sum is known in full, and otherwise no less than all
    /// proposed victims free.
    fn must_free(
        self,
        view: NodeView<'_>,
        preemptor: &Preemptor<'_>,
        pods: &[Evictable],
        proposed: &MetaVictims,
    ) -> Vec<u64> {
        let sums = &preemptor.sums;
        let is_proposed: BTreeSet<&str> = proposed.pods.iter().map(|pod| pod.uid.as_str()).collect();
        let of_proposed = |sum: usize| {
            let freed = pods
                .iter()
                .filter(|pod| is_proposed.contains(pod.owner.as_str()))
                .filter_map(|pod| pod.frees.get(sum));
            freed.fold(0, |freed: u64, more| freed.saturating_add(*more))
        };
        let free = view.host_free();
        let short_of_cpu = free.map(|free| sums.host.cpu_milli.saturating_sub(free.cpu_milli));
        let short_of_memory = free.map(|free| sums.host.memory.saturating_sub(free.memory));
        let named = sums
            .named
            .iter()
            .map(|(name, amount)| self.short_of(view, name, *amount, preemptor));
        let short = [short_of_cpu, short_of_memory, None].into_iter().chain(named);
        let needed = |(sum, short): (usize, Option<u64>)| match short {
            None => of_proposed(sum),
            Some(short) if proposed.pods.is_empty() => short,
            // kube-scheduler knows best, and what it proposes suffices.
            Some(short) => short.min(of_proposed(sum)),
        };
        short.enumerate().map(needed).collect()
    }

    /// The amount of a resource that a node lacks for a request, by kube-scheduler's sum; `None` if pods that are not known here
    /// may have some of it.
    fn short_of(
        self,
        view: NodeView<'_>,
        resource: &str,
        amount: u64,
        preemptor: &Preemptor<'_>,
    ) -> Option<u64> {
        let total = self
            .filter
            .cluster
            .nodes
            .get(view.name())?
            .allocatable_of(resource)
            .filter(|_| is_gpu_resource(resource, &self.filter.cluster.names))?;
        let of = |entry: &PodEntry| entry.eviction.requests.0.get(resource).copied().unwrap_or(0);
        let held = view
            .held()
            .filter_map(|held| self.filter.cluster.pods.get_key_value(held.owner));
        // kube-scheduler counts those that it keeps the node for, unless they are less important.
        let nominated = self
            .nominated
            .iter()
            .filter_map(|owner| self.filter.cluster.pods.get_key_value(owner))
            .filter(|(owner, entry)| {
                let eviction = &entry.eviction;
                let is_here = eviction.nominated.as_deref() == Some(view.name()) && entry.bound().is_none();
                is_here
                    && eviction.rank.priority >= preemptor.pod.priority()
                    && owner.as_str() != preemptor.pod.uid()
            });
        let used = held
            .chain(nominated)
            .map(|(_, entry)| of(entry))
            .fold(0, u64::saturating_add);
        Some(amount.saturating_sub(total.saturating_sub(used)))
    }

    /// Returns true if a hint is the pod's own, or that of a less important one.
    fn is_outranked(self, owner: &OwnerId, preemptor: &Preemptor<'_>) -> bool {
        let rank = self
            .filter
            .cluster
            .pods
            .get(owner)
            .map(|entry| entry.eviction.rank);
        owner.as_str() == preemptor.pod.uid()
            || rank.is_some_and(|rank| rank.priority < preemptor.pod.priority())
    }

    /// The victims as kube-scheduler reads them; of budgets of pods without devices it alone knows, so its count of those stays.
    fn with_violations(
        self,
        victims: &Victims,
        pods: &[Evictable],
        budgets: &[i64],
        proposed: &MetaVictims,
    ) -> MetaVictims {
        let metas = victims
            .owners
            .iter()
            .map(|owner| MetaPod {
                uid: owner.to_string(),
            })
            .collect();
        let is_proposed = |pod: &&Evictable| proposed.pods.iter().any(|meta| meta.uid == pod.owner.as_str());
        let by_ours = placement::n_violations(pods.iter().filter(is_proposed), budgets);
        let by_others = proposed
            .n_pdb_violations
            .saturating_sub(i64::try_from(by_ours).unwrap_or(i64::MAX))
            .max(0);
        let n_violations = i64::try_from(victims.n_violations).unwrap_or(i64::MAX);
        // Budgets are counted here for pods that the index knows; of others only the proposal has a count.
        let has_others = victims
            .owners
            .iter()
            .any(|owner| !self.filter.cluster.pods.contains_key(owner));
        let n_pdb_violations = n_violations.saturating_add(if has_others { by_others } else { 0 });
        let chosen = MetaVictims {
            pods: metas,
            n_pdb_violations,
        };
        let n_pdb_violations = if chosen.are_same_pods(proposed) {
            proposed.n_pdb_violations
        } else {
            n_pdb_violations
        };
        MetaVictims {
            n_pdb_violations,
            ..chosen
        }
    }
}
