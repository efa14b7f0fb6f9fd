//! What a pod asks of nodes, and whether a node can give it.

use std::sync::Arc;

use placement::{
    BatchEvaluation, Constraints, DeviceKind, DeviceRequest, Hints, HostAmounts, NodeId, NodeRequest,
    PlacementCost, Policies, Reason, RequestedGpus, Score,
};
use proto::request::{Dialect, Memory, RequestError};
use proto::resource::ISOLATION_PROVIDER;

use super::{Index, NodeState};
use crate::accounting::{self, PodFacts};

/// Nodes that are told of as the best.
const N_LEADERS: usize = 3;

/// What is asked of nodes, and for whom.
#[derive(Clone, Debug, Default)]
pub struct NodeAsk<'a> {
    /// UID of the pod, so that its own hint does not count against it.
    pub uid: &'a str,
    /// What it needs of a node's GPUs.
    pub gpus: RequestedGpus,
    /// What it needs of a node's other devices.
    pub others: Vec<DeviceRequest>,
    /// How its devices are to be chosen, if it says so.
    pub wishes: Option<Arc<Constraints>>,
    /// Whether it can go without knowing how large a memory unit is, or asks in such units.
    pub in_units: bool,
    /// What must limit containers on the node.
    pub isolation: Option<Box<str>>,
    /// By which policies nodes and devices are preferred for it.
    pub policies: Policies,
    /// What it asks of the node's CPU and memory, which refuses no node.
    pub host: HostAmounts,
}

/// A node that stands well for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// The node.
    pub name: Box<str>,
    /// What it scores, from 0 to 10.
    pub tenths: u8,
    /// The terms of what it costs to place the pod there, in thousandths of a GPU, where the policy is one that looks ahead: less
    /// that pods to come would fill, more that is useless to them, less that whole idle GPUs are worth.
    pub cost: Option<[i64; 3]>,
}

impl NodeAsk<'_> {
    /// The question in the engine's terms.
    #[inline]
    pub fn devices(&self) -> NodeRequest<'_> {
        NodeRequest {
            gpus: self.gpus,
            others: &self.others,
            constraints: self.wishes.as_deref(),
            host: self.host,
        }
    }

    /// Returns true if it asks for devices at all, and not for CPU and memory alone.
    pub fn asks_for_devices(&self) -> bool {
        self.gpus != RequestedGpus::Nothing || !self.others.is_empty()
    }

    /// Whether only nodes do that are known to have devices.
    fn needs_known_devices(&self) -> bool {
        matches!(self.gpus, RequestedGpus::Share(_) | RequestedGpus::All { .. })
            || self.wishes.as_deref().is_some_and(|wishes| self.demands(wishes))
    }

    /// Whether wishes say what devices must be like that are asked for, and not only what they had best be like.
    fn demands(&self, wishes: &Constraints) -> bool {
        let is_asked_for = |kind: &DeviceKind| match kind {
            DeviceKind::Gpu => self.gpus != RequestedGpus::Nothing,
            DeviceKind::Other(kind) => self.others.iter().any(|request| request.kind == *kind),
        };
        let joined = wishes
            .joint
            .iter()
            .filter(|joint| joint.same_switch)
            .flat_map(|joint| &joint.kinds);
        wishes.by_kind.iter().any(|(kind, _)| is_asked_for(kind))
            || (wishes.partition.is_some() && is_asked_for(&DeviceKind::Gpu))
            || joined.filter(|kind| is_asked_for(kind)).count() > 1
    }
}

impl Index {
    /// What a pod asks of nodes; `None` if it asks for no device.
    ///
    /// # Errors
    /// The rule that its request breaks, wherever it goes.
    pub fn ask<'a>(&self, uid: &'a str, facts: &PodFacts) -> Result<Option<NodeAsk<'a>>, RequestError> {
        let request = match &facts.ask {
            accounting::Ask::Request(request) => request,
            accounting::Ask::Invalid(error, _) => return Err((**error).clone()),
        };
        let gpus = request.gpus.as_ref();
        if !self.allows_all_devices && gpus.is_some_and(|gpus| gpus.dialect == Dialect::AllDevices) {
            return Err(RequestError::AllDevicesForbidden);
        }
        let others = self.kinds.requests(&request.others);
        if gpus.is_none() && others.is_empty() {
            return Ok(None);
        }
        let wishes = facts.wishes.clone().map_err(|error| (*error).clone())?;
        let counts_bytes = gpus.is_some_and(|gpus| {
            gpus.dialect == Dialect::Koordinator && !matches!(gpus.memory, Memory::Units(_))
        });
        let gpus = gpus.map(accounting::gpu_ask).unwrap_or_default();
        let isolation = facts.needs_isolation().map(Into::into);
        Ok(Some(NodeAsk {
            uid,
            gpus,
            others,
            wishes,
            in_units: !counts_bytes,
            isolation,
            policies: facts.preference.or(self.policies),
            host: facts.host,
        }))
    }

    /// Whether a pod asks for devices, or for something that breaks a rule.
    pub fn concerns(&self, facts: &PodFacts) -> bool {
        !matches!(self.ask("", facts), Ok(None))
    }

    /// The question, to be put to many nodes: alike ones share answers.
    pub fn asking<'q>(&'q self, ask: &'q NodeAsk<'_>) -> BatchEvaluation<'q> {
        self.fleet
            .evaluation(ask.devices(), Hints::RespectOthers(ask.uid))
    }

    /// Whether a node has room; its place in the fleet, if anything is known of its devices.
    ///
    /// # Errors
    /// The reason why not.
    #[inline]
    pub fn fit(&self, name: &str, ask: &NodeAsk<'_>) -> Result<Option<NodeId>, Reason> {
        self.fit_found(name, self.fleet.node_id(name), ask, &mut self.asking(ask))
    }

    /// The same for a node that has been looked up already, if it has devices, one of many that are asked.
    ///
    /// # Errors
    /// The reason why not.
    #[inline]
    pub fn fit_found(
        &self,
        name: &str,
        node: Option<NodeId>,
        ask: &NodeAsk<'_>,
        asking: &mut BatchEvaluation<'_>,
    ) -> Result<Option<NodeId>, Reason> {
        let node = self.to_be_asked(name, node, ask)?;
        node.map(|node| asking.fit(node).map(|()| node)).transpose()
    }

    /// The same, with how good the node is for what is asked: both from memory, if nothing has changed there.
    ///
    /// # Errors
    /// The reason why not.
    #[inline]
    pub fn judge(
        &self,
        name: &str,
        node: Option<NodeId>,
        ask: &NodeAsk<'_>,
        asking: &mut BatchEvaluation<'_>,
    ) -> Result<Option<(NodeId, Score)>, Reason> {
        let node = self.to_be_asked(name, node, ask)?;
        node.map(|node| asking.evaluate(node, ask.policies).map(|score| (node, score)))
            .transpose()
    }

    /// The node, if the engine is to be asked about it; of a node without devices nothing is asked.
    #[inline]
    fn to_be_asked(
        &self,
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
            // What kubelet offers of the rest, kube-scheduler knows.
            None => Ok(None),
        }
    }

    /// The three best nodes for a pod, as far as verdicts on them are remembered; the best first, none if it asks for no devices.
    pub fn leaders_of(&self, uid: &str, facts: &PodFacts) -> Vec<Leader> {
        self.ask(uid, facts)
            .ok()
            .flatten()
            .map(|ask| self.leaders(&ask, N_LEADERS))
            .unwrap_or_default()
    }

    fn leaders(&self, ask: &NodeAsk<'_>, n: usize) -> Vec<Leader> {
        let mut asking = self.asking(ask);
        let leader = |asking: &BatchEvaluation<'_>, (node, score): (NodeId, Score)| {
            let name = self.fleet.view(node)?.name().into();
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

    /// Returns true if a pod fits any node of the fleet, without regard to kube-scheduler's own filters.
    pub fn fits_anywhere(&self, ask: &NodeAsk<'_>) -> bool {
        let mut asking = self.asking(ask);
        let mut nodes = self
            .fleet
            .nodes()
            .filter(|node| asking.evaluate(node.id(), ask.policies).is_ok());
        nodes.any(|node| self.knows_node(node.name()) && self.refuse_unserved(node.name(), ask).is_ok())
    }

    /// Whether no node is refused for what it does not tell of itself.
    #[inline]
    pub fn serves_all(&self, ask: &NodeAsk<'_>) -> bool {
        (self.n_opaque == 0 || ask.in_units)
            && ask.isolation.is_none()
            && (self.plugins.is_calm() || !ask.asks_for_devices())
    }

    /// Refuses amounts that cannot be compared with units of unknown size, nodes without the pod's isolation, and nodes whose device
    /// plugin is away.
    #[inline]
    pub(super) fn refuse_unserved(&self, name: &str, ask: &NodeAsk<'_>) -> Result<(), Reason> {
        if self.serves_all(ask) {
            return Ok(());
        }
        let state = self.nodes.get(name);
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

    /// The rule by which a node refuses what is asked, and how near it comes, if there is more to say than the reason does.
    pub fn detail(&self, name: &str, ask: &NodeAsk<'_>, reason: Reason) -> Option<String> {
        if reason == Reason::PluginAway {
            return self.plugin_problem(name);
        }
        let node = self.fleet.node_id(name)?;
        let detail = self
            .fleet
            .misfit(node, ask.devices(), Hints::RespectOthers(ask.uid))?
            .to_string();
        (reason != Reason::NotServed && detail != reason.as_str()).then_some(detail)
    }
}

impl NodeState {
    /// What limits containers on the node, by its label.
    fn isolation(&self) -> Option<&str> {
        let labels = self.node.as_ref()?.metadata.labels.as_ref()?;
        labels.get(ISOLATION_PROVIDER).map(String::as_str)
    }
}
