//! The filter's view of a node: the room for a pod's request, the score, and the refusals that only the cluster cache knows.

use placement::{BatchEvaluation, Hints, NodeId, NodeView, OwnerId, PlacementCost, Reason, Score};

use super::cluster::{Cluster, NodeState};
use super::node_ask::{Leader, NodeAsk};
use super::plugins::{Plugins, Standing, TRIED_AT_ONCE};
use crate::accounting::PodFacts;

/// The number of best nodes that [`NodeFilter::leaders_of`] returns.
const N_LEADERS: usize = 3;

/// The nodes of the cluster, as a filter sees them.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeFilter<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) plugins: &'a Plugins,
}

impl<'a> NodeFilter<'a> {
    /// The batch evaluation of a request on many nodes, which share results where they are alike.
    pub(super) fn asking<'q>(self, ask: &'q NodeAsk<'_>) -> BatchEvaluation<'q>
    where
        'a: 'q,
    {
        self.cluster
            .fleet
            .evaluation(ask.devices(), Hints::RespectOthers(ask.uid))
    }

    /// Checks that a node has room; returns its place in the fleet, if its devices are known.
    ///
    /// # Errors
    /// The reason for which it does not fit.
    #[inline]
    pub(super) fn fit(self, name: &str, ask: &NodeAsk<'_>) -> Result<Option<NodeId>, Reason> {
        self.fit_found(name, self.cluster.fleet.node_id(name), ask, &mut self.asking(ask))
    }

    /// [`Self::fit`] for one of many nodes that are evaluated together.
    ///
    /// # Errors
    /// The reason for which it does not fit.
    #[inline]
    pub(super) fn fit_found(
        self,
        name: &str,
        node: Option<NodeId>,
        ask: &NodeAsk<'_>,
        asking: &mut BatchEvaluation<'_>,
    ) -> Result<Option<NodeId>, Reason> {
        let node = self.to_be_asked(name, node, ask)?;
        node.map(|node| asking.fit(node).map(|()| node)).transpose()
    }

    /// [`Self::fit_found`] with the node's score; both are remembered while the node does not change.
    ///
    /// # Errors
    /// The reason for which it does not fit.
    #[inline]
    pub(super) fn judge(
        self,
        name: &str,
        node: Option<NodeId>,
        ask: &NodeAsk<'_>,
        asking: &mut BatchEvaluation<'_>,
    ) -> Result<Option<(NodeId, Score)>, Reason> {
        let node = self.to_be_asked(name, node, ask)?;
        node.map(|node| asking.evaluate(node, ask.policies).map(|score| (node, score)))
            .transpose()
    }

    /// The node if the engine has to evaluate it; `None` for one without devices that fits.
    #[inline]
    fn to_be_asked(
        self,
        name: &str,
        node: Option<NodeId>,
        ask: &NodeAsk<'_>,
    ) -> Result<Option<NodeId>, Reason> {
        match node {
            Some(node) => self
                .refuse_unserved(name, ask)
                .and_then(|()| self.refuse_crowd(name, ask))
                .map(|()| Some(node)),
            None if ask.needs_known_devices() => Err(Reason::NoDevice),
            // kube-scheduler compares the other resources with the node's allocatable.
            None => Ok(None),
        }
    }

    /// The three best nodes for a pod among the remembered scores, the best first; none if it requests no devices.
    pub(super) fn leaders_of(self, uid: &str, facts: &PodFacts) -> Vec<Leader> {
        self.cluster
            .ask(uid, facts)
            .ok()
            .flatten()
            .map(|ask| self.leaders(&ask, N_LEADERS))
            .unwrap_or_default()
    }

    fn leaders(self, ask: &NodeAsk<'_>, n: usize) -> Vec<Leader> {
        let mut asking = self.asking(ask);
        let leader = |asking: &BatchEvaluation<'_>, (node, score): (NodeId, Score)| {
            let name = self.cluster.fleet.view(node)?.name().into();
            Some(Leader {
                name,
                tenths: score.tenths(),
                cost: asking
                    .placement_cost(node, ask.policies)
                    .map(PlacementCost::thousandths),
            })
        };
        let leaders = asking.best_nodes(n, ask.policies);
        leaders
            .into_iter()
            .filter_map(|found| leader(&asking, found))
            .collect()
    }

    /// Returns true if a pod fits a node of the fleet, without regard to kube-scheduler's own filters.
    pub(super) fn fits_anywhere(self, ask: &NodeAsk<'_>) -> bool {
        let mut asking = self.asking(ask);
        let mut nodes = self
            .cluster
            .fleet
            .nodes()
            .filter(|node| asking.evaluate(node.id(), ask.policies).is_ok());
        nodes.any(|node| {
            self.cluster.knows_node(node.name()) && self.refuse_unserved(node.name(), ask).is_ok()
        })
    }

    /// Returns true if no node is refused for its labels, its memory unit or its device plugin.
    #[inline]
    pub(super) fn serves_all(self, ask: &NodeAsk<'_>) -> bool {
        (self.cluster.n_opaque == 0 || ask.in_units)
            && ask.isolation.is_none()
            && (self.plugins.is_calm() || !ask.asks_for_devices())
    }

    /// Refuses nodes whose memory unit is unknown, that lack the pod's isolation provider, or whose device plugin is away.
    #[inline]
    pub(super) fn refuse_unserved(self, name: &str, ask: &NodeAsk<'_>) -> Result<(), Reason> {
        if self.serves_all(ask) {
            return Ok(());
        }
        let state = self.cluster.nodes.get(name);
        let is_unclear = !ask.in_units && state.is_some_and(NodeState::is_opaque);
        let lacks_isolation = ask
            .isolation
            .as_deref()
            .is_some_and(|wanted| state.and_then(NodeState::isolation) != Some(wanted));
        if is_unclear || lacks_isolation {
            Err(Reason::NotServed)
        } else {
            self.refuse_without_plugin(name, ask)
        }
    }

    /// The rule by which a node refuses a request, and how near it comes, if there is more to say than the reason does.
    pub(super) fn detail(self, name: &str, ask: &NodeAsk<'_>, reason: Reason) -> Option<String> {
        if reason == Reason::PluginAway {
            return self.plugin_problem(name);
        }
        let node = self.cluster.fleet.node_id(name)?;
        let detail = self
            .cluster
            .fleet
            .misfit(node, ask.devices(), Hints::RespectOthers(ask.uid))?
            .to_string();
        (reason != Reason::NotServed && detail != reason.as_str()).then_some(detail)
    }

    /// Refuses a node whose plugin is away, or is on trial and has as many pods in flight as may be lost.
    pub(super) fn refuse_without_plugin(self, name: &str, ask: &NodeAsk<'_>) -> Result<(), Reason> {
        let is_refused = ask.asks_for_devices()
            && match self.plugins.standing(name) {
                Standing::Offered => false,
                Standing::Tried => self
                    .cluster
                    .view(name)
                    .is_some_and(|view| self.n_on_their_way(view, ask.uid) >= TRIED_AT_ONCE),
                Standing::Out(_) => true,
            };
        if is_refused {
            Err(Reason::PluginAway)
        } else {
            Ok(())
        }
    }

    /// The same, counting the pods for which room is kept on the node: they will be bound before this one.
    #[inline]
    pub(super) fn refuse_crowd(self, name: &str, ask: &NodeAsk<'_>) -> Result<(), Reason> {
        if self.plugins.is_calm() || !ask.asks_for_devices() || self.plugins.standing(name) != Standing::Tried
        {
            return Ok(());
        }
        let n_pods = |view: NodeView<'_>| {
            let n_hinted = view.hinted().filter(|owner| owner.as_str() != ask.uid).count();
            n_hinted + self.n_on_their_way(view, ask.uid)
        };
        if self.cluster.view(name).map_or(0, n_pods) >= TRIED_AT_ONCE {
            Err(Reason::PluginAway)
        } else {
            Ok(())
        }
    }

    /// Number of other pods that are bound, or about to be, and that kubelet has not admitted.
    fn n_on_their_way(self, view: NodeView<'_>, uid: &str) -> usize {
        let is_on_its_way = |owner: &OwnerId| {
            self.cluster
                .pods
                .get(owner)
                .is_some_and(|entry| !entry.eviction.is_admitted())
        };
        view.held()
            .filter(|held| held.owner.as_str() != uid && is_on_its_way(held.owner))
            .count()
    }

    /// The reason for which a node gets no pods, or few, on account of its plugin.
    pub(super) fn plugin_problem(self, name: &str) -> Option<String> {
        match self.plugins.standing(name) {
            Standing::Offered => None,
            Standing::Tried => Some(format!(
                "the device plugin has come back: {TRIED_AT_ONCE} pods are tried at a time"
            )),
            Standing::Out(away) => Some(format!("no pods are sent here: {away}")),
        }
    }
}
