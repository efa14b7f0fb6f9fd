//! Evaluation of nodes for one pod: the request, the demand of its pod, a verdict on each node, and the order of the nodes that
//! fit.
//!
//! `filter` and `prioritize` evaluate alike. The engine caches its verdict on each node by kind of request until the node
//! changes, so that most nodes of a request cost two look-ups: that of the name, which a remembered list of names
//! ([`NameLists`]) saves, and that of the verdict.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::hash::BuildHasher;
use std::sync::Arc;

use placement::{BatchEvaluation, Fleet, Hints, NodeId, Reason, RequestedGpus, Score};
use proto::extender::{ExtenderArgs, Name, WholeNode};
use proto::node::Node;
use proto::pod::{Pod, PodSpec};
use rustc_hash::FxBuildHasher;

use super::RequestError;
use super::name_lists::{NameLists, NodeNames};
use crate::accounting::PodFacts;
use crate::api_server::shorten;
use crate::index::{Index, NodeFit, ResourceDemand};
use crate::inventory;

/// The text for every node if the pod is a member of a gang for which room was kept (hints) until the time was up.
const GANG_PAUSED: &str =
    "the pod's gang had room kept for it and was not bound in time: the room is for others for a while";

/// The request of `filter` and `prioritize`: a pod, and the nodes that kube-scheduler considers for it.
#[derive(Debug)]
pub(super) struct FilterRequest<'a> {
    pub(super) pod: Pod,
    /// Node names in the order of the request: it may carry thousands of them.
    pub(super) names: NodeNames<'a>,
    /// The Node object of each name, in the same order, unless the extender is configured with `nodeCacheCapable: true`.
    pub(super) whole_nodes: Option<Vec<WholeNode>>,
}

/// The demand of a pod on every node.
#[derive(Debug)]
pub(super) enum Demand<'a> {
    /// Nothing by which this scheduler refuses or ranks nodes: every node fits.
    Nothing,
    /// Devices; or the CPU and memory of a pod without devices, which rank nodes and refuse none.
    Resources(ResourceDemand<'a>),
    /// No node fits, for a reason of the pod itself.
    Rejected(Cow<'static, str>),
    /// No node fits for a while: room was kept for the pod's gang, and the gang was not bound in time.
    GangPaused,
    /// The node of a binding whose outcome is not known yet: the binding may have been written, so no other node fits.
    AssumedOn(Box<str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeMisfit {
    pub(super) reason: Reason,
    /// True if no watch has shown the node yet: kube-scheduler may know a new node earlier.
    pub(super) is_unknown_node: bool,
}

/// The verdicts on all nodes of a request.
#[derive(Debug, Default)]
pub(super) struct Evaluation<'n> {
    pub(super) n_fitting: usize,
    /// The nodes to report as fitting: all of them in the order of the request, or the best ones, best first.
    pub(super) reported: Vec<ReportedNode<'n>>,
    /// True if the best of `reported` comes first.
    pub(super) is_ranked: bool,
    /// The number of nodes that do not fit for each reason, in the order of [`Reason::ALL`].
    pub(super) n_refused: [u64; Reason::ALL.len()],
    /// The nodes that do not fit, each with its place in the request, in the order of places. Incomplete if some node fits: then
    /// the answer has no reasons.
    pub(super) misfits: Vec<(usize, NodeMisfit)>,
    /// The text for every node if the pod is refused for its group.
    pub(super) group_text: Option<Arc<str>>,
}

/// A node that a result of `filter` reports as fitting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReportedNode<'n> {
    /// The node's place in the request.
    pub(super) idx: usize,
    pub(super) name: &'n str,
    /// The node's ID in the fleet, if it has devices that matter for the demand.
    pub(super) node: Option<NodeId>,
    pub(super) score: Score,
}

/// The rank of a node; the least is the best. No two nodes have the same rank, so that equal requests get equal answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RankKey<'a> {
    /// True if the pod avoids the node ([`super::avoided_nodes`]), or kubelet has refused several pods there lately.
    pub(super) has_failed: bool,
    /// True if the node has a `PreferNoSchedule` taint that the pod does not tolerate.
    pub(super) is_avoided: bool,
    pub(super) score: Reverse<Score>,
    pub(super) name: &'a str,
}

#[derive(Debug)]
pub(super) struct Ranker<'a> {
    pub(super) index: &'a Index,
    pub(super) spec: &'a PodSpec,
    /// The nodes that the pod avoids: see [`super::avoided_nodes`].
    pub(super) failed: &'a [Box<str>],
}

/// The `n` best of many nodes, each with a value of the caller.
#[derive(Debug)]
struct TopN<'a, T> {
    n: usize,
    /// True if nodes are inserted in the order of their names, in which nodes of one score rank.
    are_sorted: bool,
    /// Best first.
    best: Vec<(RankKey<'a>, T)>,
}

impl<'a> FilterRequest<'a> {
    /// Parses a body: it has `NodeNames`, or without `nodeCacheCapable` the objects in `Nodes`. If it has both, the names count.
    pub(super) fn parse(verb: &'static str, body: &'a [u8], lists: &NameLists) -> Result<Self, RequestError> {
        // A body that ends with a remembered list of names is parsed with an empty list in its place.
        if let Some((list, rest)) = lists.find(body)
            && let Ok(args) = serde_json::from_slice::<ExtenderArgs<'_>>(&rest)
        {
            return Ok(Self {
                pod: args.pod,
                names: NodeNames::Remembered(list),
                whole_nodes: None,
            });
        }
        // One check of the whole body for UTF-8 is cheaper than one for each name.
        let text = std::str::from_utf8(body).map_err(|error| RequestError::malformed(verb, &error))?;
        let args = serde_json::from_str::<ExtenderArgs<'a>>(text);
        let args = args.map_err(|error| RequestError::malformed(verb, &error))?;
        let (names, whole_nodes) = match (args.node_names, args.nodes) {
            (Some(names), _) => {
                let names: Vec<Cow<'a, str>> = names.into_iter().map(|Name(name)| name).collect();
                lists.remember(text, &names);
                (names, None)
            }
            (None, Some(nodes)) => {
                let mut names = Vec::with_capacity(nodes.items.len());
                for node in &nodes.items {
                    // A name with a JSON escape is not in the body as it is, so names of whole nodes are copies.
                    names.push(Cow::Owned(node.name().to_owned()));
                }
                (names, Some(nodes.items))
            }
            (None, None) => {
                let problem = "neither NodeNames nor Nodes is given";
                return Err(RequestError::malformed(verb, &problem));
            }
        };
        Ok(Self {
            pod: args.pod,
            names: NodeNames::Read(names),
            whole_nodes,
        })
    }

    /// A hash of the set of node names, which does not depend on their order.
    pub(super) fn hash_of_names(&self) -> u64 {
        let mut hash = 0_u64;
        for name in self.names.iter() {
            // A sum is the same in any order.
            hash = hash.wrapping_add(FxBuildHasher.hash_one(name));
        }
        hash
    }
}

impl<'a> Demand<'a> {
    /// The demand of a pod; `facts` is `None` for a pod that does not ask for devices.
    pub(super) fn of(index: &Index, pod: &'a Pod, facts: Option<&PodFacts>) -> Self {
        match facts.map(|facts| index.demand(pod.uid(), facts)) {
            Some(Ok(Some(resources))) => Self::Resources(resources),
            // An extended resource that no Device object lists belongs to another plugin, and kube-scheduler counts it itself.
            None | Some(Ok(None)) => index.host_demand(pod).map_or(Self::Nothing, Self::Resources),
            Some(Err(error)) => Self::Rejected(shorten(&error.to_string()).into()),
        }
    }

    /// The resources for which nodes are evaluated; `None` if each node gets the same answer, or only one node fits.
    pub(super) const fn resources(&self) -> Option<&ResourceDemand<'a>> {
        match self {
            Self::Resources(resources) => Some(resources),
            Self::Nothing | Self::Rejected(_) | Self::GangPaused | Self::AssumedOn(_) => None,
        }
    }

    /// Returns true if the pod asks for devices that this scheduler counts.
    pub(super) fn has_devices(&self) -> bool {
        self.resources().is_some_and(ResourceDemand::has_devices)
    }

    /// The text for every node if the pod itself is the reason that none fits.
    pub(super) fn rejection(&self) -> Option<&str> {
        match self {
            Self::Rejected(text) => Some(text),
            Self::GangPaused => Some(GANG_PAUSED),
            Self::Nothing | Self::Resources(_) | Self::AssumedOn(_) => None,
        }
    }
}

impl Evaluation<'_> {
    #[inline]
    pub(super) fn refuse(&mut self, idx: usize, misfit: NodeMisfit) {
        if let Some(count) = self.n_refused.get_mut(misfit.reason as usize) {
            *count += 1;
        }
        if self.n_fitting == 0 {
            self.misfits.push((idx, misfit));
        }
    }
}

impl NodeMisfit {
    /// The misfit of a node that watches have shown, or of a template that will not fit later either.
    pub(super) const fn of_known_node(reason: Reason) -> Self {
        Self {
            reason,
            is_unknown_node: false,
        }
    }
}

/// The verdict on one node, which is `node` in the fleet. `batch` evaluates a demand of resources; for any other it is `None`.
/// `name` is a function, since most nodes are decided without their names, and most names are in no cache of the processor.
#[inline]
fn evaluate<'n>(
    index: &Index,
    demand: &Demand<'_>,
    batch: Option<&mut BatchEvaluation<'_>>,
    name: impl Fn() -> &'n str,
    node: Option<NodeId>,
) -> Result<NodeFit, Reason> {
    match (demand, batch) {
        (Demand::Resources(resources), Some(batch)) => index.filter().evaluate(name, node, resources, batch),
        // The answer has `Demand::rejection` as the text for every node. No eviction ends this reason, so that kube-scheduler
        // looks for no victims; metrics count it for a rejected pod alone.
        (Demand::Rejected(_) | Demand::GangPaused, _) => Err(Reason::InvalidRequest),
        // A placeholder: an answer has reasons only if no node fits, and the node of the binding is in the request and fits.
        (Demand::AssumedOn(node), _) if **node != *name() => Err(Reason::NoDevice),
        // `AssumedOn` is left only for the node of the binding. `Resources` always has a batch.
        (Demand::Nothing | Demand::Resources(_) | Demand::AssumedOn(_), _) => Ok(NodeFit::default()),
    }
}

/// Evaluates a node that does not exist: an empty one with the capacity of the template.
fn evaluate_template(index: &Index, node: &Node, demand: &ResourceDemand<'_>) -> Result<(), NodeMisfit> {
    let unknown = |reason| NodeMisfit {
        reason,
        is_unknown_node: true,
    };
    let Some(report) = inventory::of_template(node, index.names()) else {
        // Without device resources the template may still be a node of the vendor's plugin, which kube-scheduler counts itself.
        return match demand.gpus {
            RequestedGpus::Share(_) | RequestedGpus::All { .. } => Err(unknown(Reason::NoDevice)),
            RequestedGpus::Nothing | RequestedGpus::Whole(_) => Ok(()),
        };
    };
    if report.is_unit_unknown && !demand.in_units {
        return Err(unknown(Reason::UnitUnknown));
    }
    // A fleet of its own, so that the request leaves no trace in the index.
    let mut empty = Fleet::new();
    empty.set_inventory("template", report.inventory);
    let id = empty.node_id("template").ok_or(unknown(Reason::NoDevice))?;
    let fit = empty.fit(id, demand.devices(), Hints::Ignore);
    // A template that is too small stays so, while a node that is unknown may turn out to fit.
    fit.map_err(NodeMisfit::of_known_node)
}

/// Evaluates the nodes of a request. Reports all nodes that fit, or with `best` this number of the best by the ranker.
pub(super) fn evaluate_all<'n>(
    index: &Index,
    demand: &Demand<'_>,
    request: &'n FilterRequest<'_>,
    best: Option<(Ranker<'_>, usize)>,
) -> Evaluation<'n> {
    let names = &request.names;
    // One batch for all nodes: nodes that are alike share the work.
    let resources = demand.resources();
    let mut batch = resources.map(|resources| index.filter().batch(resources));
    let mut evaluation = Evaluation {
        is_ranked: best.is_some(),
        ..Evaluation::default()
    };
    let mut best = best.map(|(ranker, n)| (ranker, TopN::new(n, names.are_sorted())));
    let nodes = match resources {
        Some(_) => names.nodes(index),
        None => (0..).map(|place| (place, None)).take(names.len()).collect(),
    };
    // If the engine's results alone decide, nodes with a cached score below that of every reported node are only counted.
    let are_all_served = request.whole_nodes.is_none()
        && resources.is_some_and(|resources| index.filter().are_all_served(resources));
    // The least score of a node that can still be reported, once enough nodes are.
    let mut least = None;
    let mut rest = &*nodes;
    loop {
        if are_all_served && let (Some(least), Some(batch)) = (least, &batch) {
            let n_below = count_below(least, rest, batch);
            evaluation.n_fitting += n_below;
            rest = rest.get(n_below..).unwrap_or_default();
        }
        let Some(((place, id), others)) = rest.split_first() else {
            break;
        };
        rest = others;
        let idx = *place as usize;
        let name = || names.get(idx);
        let whole = request.whole_nodes.as_deref().and_then(|nodes| nodes.get(idx));
        let verdict = match (whole, demand) {
            // An autoscaler asks about nodes that do not exist yet. The fleet has no such node, and its score counts as 0. Of a
            // node that exists, the index knows more than the Node object says: its devices, and the pods that hold them.
            (Some(whole), Demand::Resources(resources)) if !index.knows_node(name()) => {
                evaluate_template(index, &whole.node, resources).map(|()| NodeFit::default())
            }
            _ => evaluate(index, demand, batch.as_mut(), name, *id).map_err(NodeMisfit::of_known_node),
        };
        let NodeFit { node, score } = match verdict {
            Ok(fit) => fit,
            Err(misfit) => {
                evaluation.refuse(idx, misfit);
                continue;
            }
        };
        evaluation.n_fitting += 1;
        let reported = || ReportedNode {
            idx,
            name: name(),
            node,
            score,
        };
        match &mut best {
            None => evaluation.reported.push(reported()),
            // A rank takes two more look-ups by name, and most nodes of a large request are excluded by their score.
            Some(_) if least.is_some_and(|least| score < least) => {}
            Some((ranker, top)) => {
                top.insert(ranker.rank(name(), score), reported());
                least = top.least();
            }
        }
    }
    match best {
        Some((_, top)) => evaluation.reported = top.into_items(),
        None => put_in_order(&mut evaluation.reported, names.len(), |reported| reported.idx),
    }
    if evaluation.n_fitting == 0 && request.whole_nodes.is_none() {
        put_in_order(&mut evaluation.misfits, names.len(), |(idx, _)| *idx);
        for (idx, misfit) in &mut evaluation.misfits {
            // Every other reason follows from devices that a watch has shown.
            misfit.is_unknown_node = misfit.reason == Reason::NoDevice && !index.knows_node(names.get(*idx));
        }
    }
    evaluation
}

/// The number of nodes at the beginning of `nodes` that fit, as the batch knows already, with a score below `least`.
fn count_below(least: Score, nodes: &[(u32, Option<NodeId>)], batch: &BatchEvaluation<'_>) -> usize {
    // A loop of its own: most nodes of a large request end here.
    let is_below = |id: NodeId| batch.is_known_below(least, id);
    let below = nodes.iter().take_while(|(_, id)| id.is_some_and(is_below));
    below.count()
}

/// Sorts items by their places, each below `n` and no two the same, in linear time.
fn put_in_order<T: Copy>(items: &mut Vec<T>, n: usize, place: impl Fn(&T) -> usize) {
    let mut by_place = vec![None; n];
    for item in items.drain(..) {
        if let Some(at_place) = by_place.get_mut(place(&item)) {
            *at_place = Some(item);
        }
    }
    items.extend(by_place.into_iter().flatten());
}

impl RankKey<'_> {
    /// Returns true if two nodes differ in rank by their names alone.
    pub(super) fn is_as_good(&self, other: &Self) -> bool {
        (self.has_failed, self.is_avoided, self.score) == (other.has_failed, other.is_avoided, other.score)
    }
}

impl Ranker<'_> {
    /// The rank of a node: nodes without failures come first, then nodes without a `PreferNoSchedule` taint that the pod does not
    /// tolerate, then the higher score.
    #[inline]
    pub(super) fn rank<'n>(&self, name: &'n str, score: Score) -> RankKey<'n> {
        // Few clusters have failing nodes or soft taints; without any, both look-ups end at once.
        let taints = self.index.soft_taints(name);
        RankKey {
            has_failed: self.index.is_failing(name) || self.failed.iter().any(|failed| **failed == *name),
            is_avoided: taints.is_some_and(|taints| self.spec.avoids(taints)),
            score: Reverse(score),
            name,
        }
    }
}

impl<'a, T> TopN<'a, T> {
    fn new(n: usize, are_sorted: bool) -> Self {
        let best = Vec::new();
        Self { n, are_sorted, best }
    }

    /// The least score with which a further node may be among the best, if neither failures nor taints speak against the node;
    /// `None` if any score may do. Of equal scores an earlier name is better, so that a later one in sorted names takes more.
    fn least(&self) -> Option<Score> {
        let (worst, _) = self.best.last().filter(|_| self.best.len() == self.n)?;
        let Reverse(score) = worst.score;
        let least = if self.are_sorted { score.next() } else { score };
        (!worst.has_failed && !worst.is_avoided).then_some(least)
    }

    /// Adds an item if it is among the `n` best so far, in place of the worst of them.
    fn insert(&mut self, rank: RankKey<'a>, item: T) {
        // A sorted vector beats a heap: results have few nodes, and most nodes of a request are excluded before.
        let at = self.best.partition_point(|(better, _)| *better <= rank);
        // Beyond the last place the node is not among the best.
        if at < self.n {
            self.best.truncate(self.n - 1);
            self.best.insert(at, (rank, item));
        }
    }

    /// The items of the best nodes, best first.
    fn into_items(self) -> Vec<T> {
        self.best.into_iter().map(|(_, item)| item).collect()
    }
}

#[cfg(test)]
pub(super) mod tests;
