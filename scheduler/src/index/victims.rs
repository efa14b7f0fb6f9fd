//! The victims by which a pod fits on a node: pods that the watch shows there, of lower priority than the pod, and not ended.
//!
//! kube-scheduler proposes some in its preempt request, also for reasons that the index knows little of, such as ports. So these
//! stay victims, except for those that hold devices and can be proposed for their amounts alone: they may be spared or replaced.
//! All victims together must free each amount that is short. For pods that kube-scheduler proposes none for, the leader searches
//! ([`Preemptor::for_room`]).

use std::collections::{BTreeMap, BTreeSet};
use std::ptr;

use placement::{Evictable, EvictionCost, HostAmounts, NodeView, OwnerId, Preemption, Victims};
use proto::extender::{MetaPod, MetaVictims};
use proto::pod::Pod;
use proto::resource::is_gpu_resource;
use proto::totals::{CPU, MEMORY, named_requests};

use super::budgets::Budget;
use super::cluster::Cluster;
use super::eviction::{EvictionRank, PreemptionFacts};
use super::node_filter::NodeFilter;
use super::pods::PodEntry;
use super::resource_demand::ResourceDemand;
use crate::bind::PodId;
use crate::kube_scheduler::PodRules;

/// The pod that preempts others, and the amounts that it asks for.
#[derive(Debug)]
pub struct Preemptor<'a> {
    priority: i32,
    /// Only pods below this priority may be evicted for the pod.
    pub(crate) victims_below: i32,
    pub(crate) demand: &'a ResourceDemand<'a>,
    /// True if other pods may keep it from a node by more than their amounts, such as by anti-affinity.
    depends_on_other_pods: bool,
    promised: &'a Promised,
    /// True if the leader evicts the victims, and not kube-scheduler.
    makes_room: bool,
    /// True if pods that are leaving make room without an eviction.
    counts_leaving: bool,
    /// The pod's requests for all resources except CPU and memory, by name. kube-scheduler sums these up by node too.
    named_requests: Vec<(String, u64)>,
}

/// The outcome of the search for room on one node that no victims are proposed for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoomSearch {
    /// The pod fits as it is, or once pods that are leaving have ended.
    NeedsNoEviction,
    /// The pod fits once these pods have gone.
    Evictions(NodeRoom),
    /// No permitted eviction helps.
    Nothing,
}

/// Room on one node after evictions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRoom {
    /// The node.
    pub node: Box<str>,
    /// The cost by which nodes are compared.
    pub cost: EvictionCost,
    /// The pods to evict, by falling importance.
    pub victims: Vec<RoomVictim>,
    /// The victims, and the pods that are leaving anyway and whose room the pod needs.
    pub freeing: Vec<OwnerId>,
}

/// A pod that is evicted so that another has room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomVictim {
    /// The pod.
    pub pod: PodId,
    /// The seconds that its processes have to end.
    pub grace_seconds: u32,
}

/// The victims that make room for other preemptors, by node.
pub type Promised = BTreeMap<Box<str>, BTreeSet<OwnerId>>;

struct VictimSearch<'a> {
    cluster: &'a Cluster,
    view: NodeView<'a>,
    preemptor: &'a Preemptor<'a>,
    proposed: &'a MetaVictims,
    proposed_uids: BTreeSet<&'a str>,
    /// The budgets of the node's pods, in the order in which the engine gets them.
    budgets: Vec<&'a Budget>,
}

impl<'a> Preemptor<'a> {
    /// A pod that kube-scheduler proposes victims for. With `depends_on_other_pods` all proposed victims must go; `promised` are
    /// the victims that make room for other preemptors.
    pub fn new(
        pod: &'a Pod,
        demand: &'a ResourceDemand<'a>,
        depends_on_other_pods: bool,
        promised: &'a Promised,
    ) -> Self {
        Self {
            priority: pod.priority(),
            victims_below: pod.priority(),
            demand,
            depends_on_other_pods,
            promised,
            makes_room: false,
            counts_leaving: true,
            named_requests: named_requests(pod).into_iter().collect(),
        }
    }

    /// A waiting pod that kube-scheduler proposes no victims for: the leader may evict pods that a controller replaces and whose
    /// priority is below the pod's and below `below`. Pods that are leaving make room too if `counts_leaving` is true.
    pub fn for_room(
        rules: &PodRules,
        (below, counts_leaving): (i32, bool),
        demand: &'a ResourceDemand<'a>,
        promised: &'a Promised,
    ) -> Self {
        let mut named_requests = Vec::new();
        for (name, amount) in &rules.requests {
            // CPU and memory have places of their own in the sums, see `sums_freed`.
            if ![CPU, MEMORY].contains(&&**name) {
                named_requests.push((name.to_string(), *amount));
            }
        }
        Self {
            priority: rules.priority,
            victims_below: rules.priority.min(below),
            demand,
            depends_on_other_pods: false,
            promised,
            makes_room: true,
            counts_leaving,
            named_requests,
        }
    }

    /// The pods to evict on a node so that the pod fits there. Evictions that violate a disruption budget are not among them.
    pub fn room_on(&self, filter: NodeFilter<'_>, node: &str) -> RoomSearch {
        let none_proposed = MetaVictims::default();
        let Some(search) = self.search(filter, node, &none_proposed) else {
            return RoomSearch::Nothing;
        };
        let pods = search.evictable();
        let found = match search.victims(&pods) {
            // The Eviction API refuses evictions that violate a budget.
            Some(victims) if victims.n_violations == 0 => victims,
            _ => return RoomSearch::Nothing,
        };
        let mut victims = Vec::new();
        for owner in &found.owners {
            if let Some(entry) = filter.cluster.pods.get(owner)
                && !entry.preemption.is_leaving
            {
                victims.push(RoomVictim {
                    pod: entry.id(owner),
                    grace_seconds: entry.preemption.evictable_within.unwrap_or_default(),
                });
            }
        }
        if victims.is_empty() {
            return RoomSearch::NeedsNoEviction;
        }
        RoomSearch::Evictions(NodeRoom {
            node: node.into(),
            cost: found.cost,
            victims,
            freeing: found.owners,
        })
    }

    /// The search on a node; `None` for a node that cannot serve the pod even without other pods, or whose devices are not known.
    fn search<'s>(
        &'s self,
        filter: NodeFilter<'s>,
        node: &str,
        proposed: &'s MetaVictims,
    ) -> Option<VictimSearch<'s>> {
        filter.check_served(node, self.demand).ok()?;
        let cluster = filter.cluster;
        let view = cluster.view(node)?;
        let mut budgets: Vec<&Budget> = Vec::new();
        for entry in view.held().filter_map(|held| cluster.pods.get(&held.owner)) {
            for budget in cluster.budgets.guarding(entry) {
                if !budgets.iter().any(|known| ptr::eq(*known, budget)) {
                    budgets.push(budget);
                }
            }
        }
        Some(VictimSearch {
            cluster,
            view,
            preemptor: self,
            proposed,
            proposed_uids: proposed.pods.iter().map(|pod| pod.uid.as_str()).collect(),
            budgets,
        })
    }

    /// The victims by which the pod fits on a node, instead of those that kube-scheduler proposes; `None` if none help.
    pub fn victims_on(
        &self,
        filter: NodeFilter<'_>,
        node: &str,
        proposed: &MetaVictims,
    ) -> Option<MetaVictims> {
        let search = self.search(filter, node, proposed)?;
        let pods = search.evictable();
        let victims = search.victims(&pods)?;
        if victims.owners.is_empty() {
            // The index knows no reason for an eviction, so kube-scheduler has one of its own. Promised victims go for other pods.
            let mut rest = proposed.clone();
            rest.pods.retain(|pod| !search.is_promised(&pod.uid));
            return (!rest.pods.is_empty()).then_some(rest);
        }
        Some(search.with_violations(&victims, &pods))
    }

    /// The amounts that a pod's eviction frees, in the order of kube-scheduler's sums: CPU, memory, the number of pods, and each
    /// other resource that the preemptor requests. A pod that requests no devices counts as freeing only the first three.
    fn sums_freed(&self, cluster: &Cluster, uid: &str, host: HostAmounts) -> Vec<u64> {
        let mut freed = vec![host.cpu_milli, host.memory, 1];
        for (name, _) in &self.named_requests {
            freed.push(cluster.requested(uid, name));
        }
        freed
    }
}

impl VictimSearch<'_> {
    /// The cheapest of these pods by whose eviction the preemptor fits; `None` if the eviction of all does not help.
    fn victims(&self, pods: &[Evictable]) -> Option<Victims> {
        let preemption = Preemption {
            pods,
            budgets: &self.allowed(),
            must_free: &self.must_free(pods),
            outranked: &self.outranked_hints(),
        };
        let demand = self.preemptor.demand.devices();
        self.cluster.fleet.preempt(self.view.id(), demand, preemption)
    }

    /// The number of evictions that each budget allows.
    fn allowed(&self) -> Vec<i64> {
        self.budgets.iter().map(|budget| budget.allowed).collect()
    }

    /// The pods that may be evicted for the preemptor: those that hold devices of the node, and those that kube-scheduler
    /// proposes.
    fn evictable(&self) -> Vec<Evictable> {
        let preemptor = self.preemptor;
        let makes_room = preemptor.makes_room;
        let mut pods = Vec::new();
        for held in self.view.held() {
            let Some((owner, entry)) = self.cluster.pods.get_key_value(&held.owner) else {
                continue;
            };
            let eviction = &entry.preemption;
            let bound = entry.facts.bound.as_deref();
            // kube-scheduler does not see an assumed pod on the node before its binding, and cannot evict it.
            let is_here = entry.list != 0 && bound.is_some_and(|bound| *bound.node == *self.view.name());
            if !is_here || !self.may_make_room(eviction) || self.is_promised(owner.as_str()) {
                continue;
            }
            // The Eviction API never evicts a pod that two budgets select.
            if makes_room && !eviction.is_leaving && self.cluster.budgets.guarding(entry).len() > 1 {
                continue;
            }
            pods.push(Evictable {
                owner: owner.clone(),
                priority: eviction.rank.priority,
                started: eviction.rank.started,
                is_leaving: eviction.is_leaving,
                // A proposed pod may be in the way by more than amounts: anti-affinity, ports or volumes.
                is_forced: self.proposed_uids.contains(owner.as_str())
                    && (eviction.repels || preemptor.depends_on_other_pods),
                // The leader does not evict a pod again that is leaving, so that no budget is drawn on.
                budgets: if makes_room && eviction.is_leaving {
                    Vec::new()
                } else {
                    self.budgets_of(entry)
                },
                frees: preemptor.sums_freed(self.cluster, owner.as_str(), entry.facts.host),
            });
        }
        self.add_proposed(&mut pods);
        pods
    }

    /// Returns true if a pod's room may count for the preemptor. Of pods with a lower priority kube-scheduler may evict all, the
    /// leader those that a controller replaces. Pods that are leaving count for the leader if the search says so.
    fn may_make_room(&self, eviction: &PreemptionFacts) -> bool {
        let makes_room = self.preemptor.makes_room;
        if makes_room && eviction.is_leaving {
            return self.preemptor.counts_leaving;
        }
        let may_be_evicted = !makes_room || eviction.evictable_within.is_some();
        may_be_evicted && eviction.rank.priority < self.preemptor.victims_below
    }

    /// Returns true if the eviction of this pod from the node makes room for another preemptor.
    fn is_promised(&self, uid: &str) -> bool {
        let promised = self.preemptor.promised.get(self.view.name());
        promised.is_some_and(|victims| victims.contains(uid))
    }

    /// The indices of the budgets that the eviction of a pod draws on: by the rules of the Eviction API if the leader evicts it,
    /// and otherwise by kube-scheduler's.
    fn budgets_of(&self, entry: &PodEntry) -> Vec<usize> {
        let (name, labels) = (&entry.facts.name, &entry.preemption.labels);
        let mut drawn_on = Vec::new();
        for budget in self.cluster.budgets.guarding(entry) {
            if self.preemptor.makes_room || budget.counts(name, labels) {
                drawn_on.extend(self.budgets.iter().position(|known| ptr::eq(*known, budget)));
            }
        }
        drawn_on
    }

    /// Adds the proposed victims that are not among `pods`, mostly because they hold no device. They stay victims: the index does
    /// not know for which reason kube-scheduler proposes them.
    fn add_proposed(&self, pods: &mut Vec<Evictable>) {
        let known: BTreeSet<OwnerId> = pods.iter().map(|pod| pod.owner.clone()).collect();
        // kube-scheduler lists victims by falling importance, so a pod that the index does not know is at most as important as
        // the one before it.
        let mut last = EvictionRank {
            priority: self.preemptor.priority.saturating_sub(1),
            started: i64::MIN,
        };
        for pod in &self.proposed.pods {
            let uid = pod.uid.as_str();
            let entry = self.cluster.pods.get(uid);
            let rank = match (entry, self.cluster.plain.get(uid)) {
                (Some(entry), _) => entry.preemption.rank,
                (None, Some(plain)) => plain.rank,
                (None, None) => last,
            };
            last = rank;
            if known.contains(uid) || (entry.is_some() && self.is_promised(uid)) {
                continue;
            }
            let host = match entry {
                Some(entry) => entry.facts.host,
                None => self.cluster.fleet.host_use_of(uid).unwrap_or_default(),
            };
            pods.push(Evictable {
                owner: OwnerId::from(uid),
                priority: rank.priority,
                started: rank.started,
                is_leaving: false,
                is_forced: true,
                // kube-scheduler has counted the violations of these pods already.
                budgets: Vec::new(),
                frees: self.preemptor.sums_freed(self.cluster, uid, host),
            });
        }
    }

    /// The least amounts that all victims together must free, in the order of [`Preemptor::sums_freed`]: the shortage on the node
    /// where it is known, and otherwise as much as all proposed victims free.
    fn must_free(&self, pods: &[Evictable]) -> Vec<u64> {
        // CPU, memory and the number of pods come first.
        let mut must_free = vec![0_u64; 3 + self.preemptor.named_requests.len()];
        for pod in pods {
            if self.proposed_uids.contains(pod.owner.as_str()) {
                for (sum, freed) in must_free.iter_mut().zip(&pod.frees) {
                    *sum = sum.saturating_add(*freed);
                }
            }
        }
        let (host, free) = (self.preemptor.demand.host, self.view.host_free());
        let mut shortages = vec![
            free.map(|free| host.cpu_milli.saturating_sub(free.cpu_milli)),
            free.map(|free| host.memory.saturating_sub(free.memory)),
            // kubelet's limit of pods is not known here.
            None,
        ];
        for (name, amount) in &self.preemptor.named_requests {
            shortages.push(self.shortage(name, *amount));
        }
        for (sum, shortage) in must_free.iter_mut().zip(shortages) {
            match shortage {
                None => {}
                Some(shortage) if self.proposed.pods.is_empty() => *sum = shortage,
                // The victims that kube-scheduler proposes suffice for it, whatever shortage is computed here.
                Some(shortage) => *sum = shortage.min(*sum),
            }
        }
        must_free
    }

    /// The amount of a resource that the node lacks for a request, by kube-scheduler's sum; `None` for a resource of no GPUs, as
    /// pods without devices may request it, and for one that the node does not list. A bound pod that holds no device is left
    /// out, though kube-scheduler counts its request.
    fn shortage(&self, resource: &str, amount: u64) -> Option<u64> {
        let cluster = self.cluster;
        if !is_gpu_resource(resource, &cluster.names) {
            return None;
        }
        let state = cluster.node(self.view.name())?;
        if !state.facts.lists(resource) {
            return None;
        }
        let mut free = state.facts.allocatable(resource);
        for held in self.view.held() {
            free = free.saturating_sub(cluster.requested(held.owner.as_str(), resource));
        }
        // kube-scheduler counts the pods that it keeps the node for, unless they are less important.
        let Preemptor { priority, demand, .. } = self.preemptor;
        for (node, requests) in cluster.nominees(demand.uid, *priority) {
            if node == self.view.name() {
                free = free.saturating_sub(requests.get(resource).copied().unwrap_or(0));
            }
        }
        Some(amount.saturating_sub(free))
    }

    /// The pods whose hints on the node do not count: the preemptor itself, and less important ones if kube-scheduler evicts the
    /// victims, as it then removes the nominations of these pods to the node.
    fn outranked_hints(&self) -> Vec<OwnerId> {
        let removes_nominations = !self.preemptor.makes_room;
        let mut outranked = Vec::new();
        for owner in self.view.hinted() {
            let entry = self.cluster.pods.get(owner);
            let is_outranked =
                entry.is_some_and(|entry| entry.preemption.rank.priority < self.preemptor.priority);
            if (removes_nominations && is_outranked) || owner.as_str() == self.preemptor.demand.uid {
                outranked.push(owner.clone());
            }
        }
        outranked
    }

    /// The victims in the form of kube-scheduler's answer, with the number of evictions that violate a budget.
    fn with_violations(&self, victims: &Victims, pods: &[Evictable]) -> MetaVictims {
        let uids = victims.owners.iter().map(ToString::to_string);
        let mut chosen = MetaVictims {
            pods: uids.map(|uid| MetaPod { uid }).collect(),
            n_pdb_violations: i64::try_from(victims.n_violations).unwrap_or(i64::MAX),
        };
        if chosen.are_same_pods(self.proposed) {
            chosen.n_pdb_violations = self.proposed.n_pdb_violations;
            return chosen;
        }
        // Only kube-scheduler knows the budgets of pods without devices, so the violations that it counts for these pods are
        // added.
        if !(victims.owners.iter()).all(|owner| self.cluster.pods.contains_key(owner)) {
            let is_proposed = |pod: &&Evictable| self.proposed_uids.contains(pod.owner.as_str());
            let n_known = placement::n_violations(pods.iter().filter(is_proposed), &self.allowed());
            let n_known = i64::try_from(n_known).unwrap_or(i64::MAX);
            let n_unknown = self.proposed.n_pdb_violations.saturating_sub(n_known).max(0);
            chosen.n_pdb_violations = chosen.n_pdb_violations.saturating_add(n_unknown);
        }
        chosen
    }
}
