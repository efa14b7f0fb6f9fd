//! Nodes as filters evaluate them: the room for a pod's request, the score, and the refusals that only the cluster cache knows.
//!
//! A hint is room kept on a node for a pod that is not bound yet, because its filter answer named the node or kube-scheduler
//! nominated the pod to it. For a pod's request all hints count as taken but those of the pod itself.

use placement::{BatchEvaluation, Hints, NodeId, NodeView, Reason, Score};

use super::cluster::Cluster;
use super::node_state::NodeState;
use super::plugins::{Standing, TRIED_AT_ONCE};
use super::resource_demand::ResourceDemand;
use crate::api_server::shorten;
use crate::inventory::NodeReport;

/// A node that fits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeFit {
    /// The node in the fleet; `None` if nothing is known of its devices and the pod needs none that have to be known.
    pub node: Option<NodeId>,
    /// The node's score by policy.
    pub score: Score,
}

/// The nodes of the cluster, as a filter sees them.
#[derive(Clone, Copy, Debug)]
pub struct NodeFilter<'a> {
    pub(super) cluster: &'a Cluster,
}

impl<'a> NodeFilter<'a> {
    pub(super) const fn of(cluster: &'a Cluster) -> Self {
        Self { cluster }
    }

    /// The evaluation of a demand on many nodes, with the room that hints keep for other pods counted as taken. Nodes that are
    /// alike share results.
    pub fn batch<'q>(self, demand: &'q ResourceDemand<'_>) -> BatchEvaluation<'q>
    where
        'a: 'q,
    {
        let (fleet, hints) = (&self.cluster.fleet, Hints::RespectOthers(demand.uid));
        fleet.evaluation(demand.devices(), demand.policies, hints)
    }

    /// The node in the fleet, if its devices are known.
    #[inline]
    pub fn node_id(self, name: &str) -> Option<NodeId> {
        self.cluster.fleet.node_id(name)
    }

    /// The version of the table of node names, see [`placement::Fleet::names_version`].
    pub fn names_version(self) -> u64 {
        self.cluster.fleet.names_version()
    }

    /// Checks that a node has room; returns its place in the fleet, if its devices are known.
    ///
    /// # Errors
    /// The reason for which it does not fit.
    pub fn fit(self, name: &str, demand: &ResourceDemand<'_>) -> Result<Option<NodeId>, Reason> {
        let node = self.served_node(|| name, self.node_id(name), demand)?;
        if let Some(node) = node {
            let hints = Hints::RespectOthers(demand.uid);
            self.cluster.fleet.fit(node, demand.devices(), hints)?;
        }
        Ok(node)
    }

    /// [`Self::fit`] with the node's score, for one of many nodes that are evaluated together; the batch caches both while
    /// the node does not change. `node` is [`Self::node_id`] of the name, and the name itself is asked for only where it matters.
    ///
    /// # Errors
    /// The reason for which it does not fit.
    #[inline]
    pub fn evaluate<'n>(
        self,
        name: impl Fn() -> &'n str,
        node: Option<NodeId>,
        demand: &ResourceDemand<'_>,
        batch: &mut BatchEvaluation<'_>,
    ) -> Result<NodeFit, Reason> {
        let node = self.served_node(name, node, demand)?;
        let score = match node {
            Some(node) => batch.evaluate(node)?,
            None => Score::default(),
        };
        Ok(NodeFit { node, score })
    }

    /// Checks the facts of a node that the engine does not know. Returns the node if the engine has to evaluate it, and `None`
    /// for one without known devices that fits.
    #[inline]
    fn served_node<'n>(
        self,
        name: impl Fn() -> &'n str,
        node: Option<NodeId>,
        demand: &ResourceDemand<'_>,
    ) -> Result<Option<NodeId>, Reason> {
        match node {
            Some(node) => {
                if !self.are_all_served(demand) {
                    // Pods for which room is kept on the node will be bound before this one.
                    let counts_hints = true;
                    self.check(name(), demand, counts_hints)?;
                }
                Ok(Some(node))
            }
            None if demand.needs_known_devices() => Err(Reason::NoDevice),
            // kube-scheduler compares the other resources with the node's allocatable.
            None => Ok(None),
        }
    }

    /// Returns true if a pod fits a node of the fleet, without regard to kube-scheduler's own filters.
    pub fn fits_anywhere(self, demand: &ResourceDemand<'_>) -> bool {
        let mut batch = self.batch(demand);
        for node in self.cluster.fleet.nodes() {
            // The cheapest check comes first: its result is cached for nodes that have not changed.
            if batch.evaluate(node.id()).is_ok()
                && self.cluster.knows_node(node.name())
                && self.check_served(node.name(), demand).is_ok()
            {
                return true;
            }
        }
        false
    }

    /// Checks the facts of a node that the engine does not know: refuses a node whose memory unit is unknown, that lacks the
    /// pod's isolation provider, or whose device plugin is away.
    pub(crate) fn check_served(self, name: &str, demand: &ResourceDemand<'_>) -> Result<(), Reason> {
        if self.are_all_served(demand) {
            return Ok(());
        }
        let counts_hints = false;
        self.check(name, demand, counts_hints)
    }

    /// Returns true if every node passes `check_served`, so that the engine alone decides which nodes of the fleet fit.
    #[inline]
    pub fn are_all_served(self, demand: &ResourceDemand<'_>) -> bool {
        (self.cluster.n_unknown_units == 0 || demand.in_units)
            && demand.isolation.is_none()
            && (self.cluster.plugins.all_serve() || !demand.has_devices())
    }

    /// [`Self::check_served`]; `counts_hints` is that of [`Self::n_in_flight`].
    fn check(self, name: &str, demand: &ResourceDemand<'_>, counts_hints: bool) -> Result<(), Reason> {
        // Most pods need no look-up of the node here.
        if !demand.in_units && self.cluster.node(name).is_some_and(NodeState::is_unit_unknown) {
            return Err(Reason::UnitUnknown);
        }
        if demand.isolation.is_some()
            && demand.isolation.as_deref() != self.cluster.node(name).and_then(NodeState::isolation)
        {
            return Err(Reason::NoIsolationProvider);
        }
        // A pod without devices needs no plugin.
        if !demand.has_devices() {
            return Ok(());
        }
        match self.cluster.plugins.standing(name) {
            Standing::Offered => Ok(()),
            Standing::Tried => {
                let view = self.cluster.view(name);
                let n_in_flight = view.map_or(0, |view| self.n_in_flight(view, demand.uid, counts_hints));
                if n_in_flight < TRIED_AT_ONCE {
                    Ok(())
                } else {
                    Err(Reason::PluginAway)
                }
            }
            Standing::Out(_) => Err(Reason::PluginAway),
        }
    }

    /// Returns true if a node takes few pods at a time, since its plugin came back a short time ago: too few for a group.
    pub fn is_on_trial(self, name: &str) -> bool {
        self.cluster.plugins.standing(name) == Standing::Tried
    }

    /// The number of other pods that are bound or assumed and that kubelet has not admitted; with `counts_hints` also of those
    /// for which room is kept.
    fn n_in_flight(self, view: NodeView<'_>, uid: &str, counts_hints: bool) -> usize {
        let mut n = 0;
        for held in view.held().filter(|held| held.owner.as_str() != uid) {
            let entry = self.cluster.pods.get(&held.owner);
            n += usize::from(entry.is_some_and(|entry| !entry.preemption.is_admitted()));
        }
        // Hints count for filters alone: a bind comes before the binds of pods that only have hints.
        if counts_hints {
            n += view.hinted().filter(|owner| owner.as_str() != uid).count();
        }
        n
    }

    /// The rule by which a node refuses a request, and how near it comes, if there is more to say than the reason does.
    pub fn detail(self, name: &str, demand: &ResourceDemand<'_>, reason: Reason) -> Option<String> {
        if reason == Reason::PluginAway {
            return self.plugin_problem(name);
        }
        let fleet = &self.cluster.fleet;
        let hints = Hints::RespectOthers(demand.uid);
        let misfit = fleet.misfit(fleet.node_id(name)?, demand.devices(), hints)?;
        let mut detail = misfit.to_string();
        if let Some(problem) = self.problem_behind(name, reason) {
            let is_explained = reason == Reason::PartitionsUnreadable;
            let separator = if is_explained { ":" } else { ";" };
            detail = format!("{detail}{separator} {problem}");
        }
        // The engine does not know these two reasons, so its misfit is about another rule.
        let is_of_engine = ![Reason::UnitUnknown, Reason::NoIsolationProvider].contains(&reason);
        (is_of_engine && detail != reason.as_str()).then_some(detail)
    }

    /// The text of a node's refusal, as kube-scheduler and people get it.
    pub fn refusal(self, name: &str, reason: Reason, demand: &ResourceDemand<'_>) -> String {
        match self.problem_behind(name, reason) {
            Some(problem) if reason == Reason::PartitionsUnreadable => {
                shorten(&format!("{reason}: {problem}"))
            }
            Some(problem) => shorten(&format!("{}; {problem}", demand.refusal(reason))),
            None => demand.refusal(reason),
        }
    }

    /// The problem of the node's report that may be behind a refusal for this reason: of its partition table, or of the GPUs that
    /// kubelet has allocated.
    pub fn problem_behind(self, name: &str, reason: Reason) -> Option<&'a str> {
        let problem_in: fn(&NodeReport) -> &Option<String> = match reason {
            // A table that names GPUs which are gone, or is not used, leaves too few partitions.
            Reason::Partition | Reason::PartitionsUnreadable => |report| &report.table_problem,
            Reason::Vendor => |report| &report.allocation_problem,
            // No look-up of the node: filters call this for each node that they refuse.
            _ => return None,
        };
        problem_in(self.cluster.node(name)?.report.as_ref()?).as_deref()
    }

    /// The reason for which a node gets no pods, or few, on account of its plugin.
    pub fn plugin_problem(self, name: &str) -> Option<String> {
        match self.cluster.plugins.standing(name) {
            Standing::Offered => None,
            Standing::Tried => Some(format!(
                "the device plugin has come back: {TRIED_AT_ONCE} pods are tried at a time"
            )),
            Standing::Out(away) => Some(format!("no pods are sent here: {away}")),
        }
    }
}
