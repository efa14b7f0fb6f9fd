//! Evaluation of nodes: the demand of one pod, and the verdict of each node on it.
//!
//! `filter` and `prioritize` evaluate the same way. The engine remembers verdicts per kind of request and version of the
//! node, so that a node which has not changed since the last similar pod costs a look-up by name and a comparison.

use std::borrow::Cow;

use placement::{BatchEvaluation, Fleet, Hints, NodeId, Reason, RequestedGpus, Score};
use proto::extender::WholeNode;
use proto::node::Node;
use proto::pod::Pod;

use super::rank::{Ranker, TopN};
use crate::accounting::PodFacts;
use crate::api_server::shorten;
use crate::index::{Index, ResourceDemand};
use crate::inventory;

/// The demand of a pod on every node.
#[derive(Debug)]
pub(super) enum Demand<'a> {
    /// Nothing that nodes are evaluated for: every node fits.
    Nothing,
    /// Devices. For a pod without devices CPU and memory, which rank nodes and refuse none.
    Resources(ResourceDemand<'a>),
    /// No node fits, for a reason of the pod itself.
    Rejected(Cow<'static, str>),
    /// The node of a binding whose outcome is not known yet: the binding may have been written, so no other node fits.
    AssumedOn(Box<str>),
}

/// A node that fits.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fit {
    /// The node's ID in the fleet, if it has devices that matter for the demand.
    pub(super) node: Option<NodeId>,
    /// The node's score by policy.
    pub(super) score: Score,
}

/// A node that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeMisfit {
    pub(super) reason: Reason,
    /// True if no watch has shown the node yet: kube-scheduler may know a new node earlier.
    pub(super) is_unknown_node: bool,
}

/// Puts the demand of one pod to many nodes.
#[derive(Debug)]
pub(super) struct Evaluator<'q> {
    index: &'q Index,
    demand: &'q Demand<'q>,
    batch: Option<BatchEvaluation<'q>>,
}

/// The verdicts of all nodes of a request, by the nodes' indices in the request.
#[derive(Debug, Default)]
pub(super) struct Evaluation {
    pub(super) n_fitting: usize,
    /// The nodes to report as fitting: all of them in the order of the request, or the best ones, best first.
    pub(super) reported: Vec<(usize, Option<NodeId>)>,
    /// True if the best of `reported` comes first.
    pub(super) is_ranked: bool,
    pub(super) misfits: Vec<(usize, NodeMisfit)>,
}

impl<'a> Demand<'a> {
    /// The demand of a pod; `facts` is `None` for a pod that does not ask for devices.
    pub(super) fn of(index: &Index, pod: &'a Pod, facts: Option<&PodFacts>) -> Self {
        match facts.map_or(Ok(None), |facts| index.demand(pod.uid(), facts)) {
            Ok(Some(resources)) => Self::Resources(resources),
            Ok(None) => index.host_demand(pod).map_or(Self::Nothing, Self::Resources),
            Err(error) => Self::Rejected(shorten(&error.to_string()).into()),
        }
    }

    /// The resources that nodes are evaluated for.
    pub(super) const fn resources(&self) -> Option<&ResourceDemand<'a>> {
        match self {
            Self::Resources(resources) => Some(resources),
            Self::Nothing | Self::Rejected(_) | Self::AssumedOn(_) => None,
        }
    }

    /// The text for every node if the pod itself is the reason that none fits.
    pub(super) fn rejection(&self) -> Option<&str> {
        match self {
            Self::Rejected(text) => Some(text),
            Self::Nothing | Self::Resources(_) | Self::AssumedOn(_) => None,
        }
    }
}

impl<'q> Evaluator<'q> {
    pub(super) fn new(index: &'q Index, demand: &'q Demand<'q>) -> Self {
        // One batch for all nodes: nodes that are alike share the work.
        let batch = demand
            .resources()
            .map(|resources| index.filter().batch(resources));
        Self { index, demand, batch }
    }

    /// The verdict on a node by its name.
    #[inline]
    pub(super) fn evaluate(&mut self, name: &str) -> Result<Fit, NodeMisfit> {
        let misfit = |reason| NodeMisfit {
            reason,
            is_unknown_node: false,
        };
        match (self.demand, &mut self.batch) {
            (Demand::Resources(resources), Some(batch)) => {
                match self.index.filter().evaluate(name, resources, batch) {
                    Ok(Some((node, score))) => Ok(Fit {
                        node: Some(node),
                        score,
                    }),
                    Ok(None) => Ok(Fit::default()),
                    Err(reason) => Err(NodeMisfit {
                        reason,
                        // Every other reason follows from devices that a watch has shown.
                        is_unknown_node: reason == Reason::NoDevice && !self.index.knows_node(name),
                    }),
                }
            }
            (Demand::Nothing | Demand::Resources(_), _) => Ok(Fit::default()),
            (Demand::AssumedOn(node), _) if **node == *name => Ok(Fit::default()),
            // The reason is never reported, since the node of the binding is in the request and fits.
            (Demand::AssumedOn(_), _) => Err(misfit(Reason::NoDevice)),
            (Demand::Rejected(_), _) => Err(misfit(Reason::InvalidRequest)),
        }
    }

    /// The verdict on a node that the request carries whole: an autoscaler asks about nodes that do not exist yet.
    fn evaluate_whole(&mut self, name: &str, node: &Node) -> Result<Fit, NodeMisfit> {
        match self.demand {
            Demand::Resources(resources) if !self.index.knows_node(name) => {
                evaluate_template(self.index, node, resources).map(|()| Fit::default())
            }
            // Of an existing node the index knows more than the Node object says: its devices, and the pods that hold them.
            _ => self.evaluate(name),
        }
    }
}

/// Evaluates a node that does not exist: an empty one with the capacity of the template.
fn evaluate_template(index: &Index, node: &Node, demand: &ResourceDemand<'_>) -> Result<(), NodeMisfit> {
    let unknown = |reason| NodeMisfit {
        reason,
        is_unknown_node: true,
    };
    let Some(report) = inventory::of_template(node, index.names()) else {
        // Without capacity of ours the template may still be a node of the vendor's plugin, which kube-scheduler counts itself.
        return match demand.gpus {
            RequestedGpus::Share(_) | RequestedGpus::All { .. } => Err(unknown(Reason::NoDevice)),
            RequestedGpus::Nothing | RequestedGpus::Whole(_) => Ok(()),
        };
    };
    if report.opaque && !demand.in_units {
        return Err(unknown(Reason::NotServed));
    }
    // A fleet of its own, so that the request leaves no trace in the index.
    let mut empty = Fleet::new();
    empty.set_inventory("template", report.inventory);
    let id = empty.node_id("template").ok_or(unknown(Reason::NoDevice))?;
    empty
        .fit(id, demand.devices(), Hints::Ignore)
        .map_err(|reason| NodeMisfit {
            reason,
            is_unknown_node: false,
        })
}

/// Evaluates the nodes of a request. Reports all that fit, or only the best if `best` says how to rank and how many.
pub(super) fn evaluate_all(
    index: &Index,
    demand: &Demand<'_>,
    names: &[Cow<'_, str>],
    whole_nodes: Option<&[WholeNode]>,
    best: Option<(Ranker<'_>, usize)>,
) -> Evaluation {
    let mut evaluator = Evaluator::new(index, demand);
    let mut evaluation = Evaluation {
        is_ranked: best.is_some(),
        ..Evaluation::default()
    };
    let mut best = best.map(|(ranker, n)| (ranker, TopN::new(n)));
    for (idx, name) in names.iter().enumerate() {
        let whole = whole_nodes.and_then(|nodes| nodes.get(idx));
        let verdict = match whole {
            Some(whole) => evaluator.evaluate_whole(name, &whole.node),
            None => evaluator.evaluate(name),
        };
        let fit = match verdict {
            Ok(fit) => fit,
            Err(misfit) => {
                evaluation.misfits.push((idx, misfit));
                continue;
            }
        };
        evaluation.n_fitting += 1;
        match &mut best {
            None => evaluation.reported.push((idx, fit.node)),
            // A rank needs two more look-ups by name, which most nodes of a large request can be spared.
            Some((_, top)) if top.excludes(fit.score, name) => {}
            Some((ranker, top)) => top.insert(ranker.rank(name, fit.score), (idx, fit.node)),
        }
    }
    if let Some((_, top)) = best {
        evaluation.reported = top.into_items();
    }
    evaluation
}
