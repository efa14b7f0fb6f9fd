//! The verdict: may a pod go to a node, and if not, why.
//!
//! Three parts decide, in this order: kube-scheduler's own checks, the pod's request, and the devices. kube-scheduler makes the
//! first part itself before it asks the extender, so that `filter` evaluates the other two alone; every explanation for people
//! evaluates all three here. [`words`] makes all texts from the refusals.

mod ending;
pub(crate) mod words;

use std::collections::BTreeMap;

use placement::{BatchEvaluation, Reason};

pub(crate) use ending::{fits_on_empty, pods_in_the_way};

use crate::index::{Index, NodeFit, ResourceDemand};
use crate::kube_scheduler::{self, NodeRefusal, PodRules, RequestSums};

/// The pod that is compared with nodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asker<'a> {
    pub(crate) rules: &'a PodRules,
    /// The devices that the pod requests, or the text of the rule that its request breaks on every node.
    pub(crate) demand: Result<&'a ResourceDemand<'a>, &'a str>,
}

/// The reason for which a node does not take a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// kube-scheduler itself refuses the node, and does not name it in its request to the extender.
    KubeScheduler(NodeRefusal),
    /// The pod's request breaks a rule on every node.
    Request,
    /// The node's devices, or its device plugin.
    Devices(Reason),
}

/// By node, the sum of the requests of pods that are nominated to it, for which kube-scheduler keeps room there.
pub(crate) type NominatedRequests = BTreeMap<Box<str>, RequestSums>;

impl Refusal {
    /// Returns true if the end of pods on the node could end the refusal.
    pub(crate) fn is_lack_of_room(&self) -> bool {
        match self {
            Self::KubeScheduler(refusal) => refusal.is_lack_of_room(),
            Self::Request => false,
            Self::Devices(reason) => reason.is_lack_of_room(),
        }
    }
}

/// The first part of the verdict: kube-scheduler's own checks, nominated pods counted. The error is the check that fails first.
pub(crate) fn check_node(
    index: &Index,
    name: &str,
    rules: &PodRules,
    nominated: &NominatedRequests,
) -> Result<(), NodeRefusal> {
    let none = RequestSums::default();
    let mut sums = index.requests().on(name).unwrap_or(&none);
    let with_nominated;
    if let Some(nominated) = nominated.get(name) {
        with_nominated = sums.plus(nominated);
        sums = &with_nominated;
    }
    match index.node_facts(name) {
        Some(facts) => kube_scheduler::check(rules, facts, sums),
        // The node was deleted between the caller's list of names and this look-up.
        None => Err(NodeRefusal::OtherNode),
    }
}

/// The verdict on one of many nodes that are evaluated together; `batch` is `None` for a pod whose request breaks a rule.
pub(crate) fn evaluate(
    index: &Index,
    name: &str,
    asker: Asker<'_>,
    nominated: &NominatedRequests,
    batch: Option<&mut BatchEvaluation<'_>>,
) -> Result<NodeFit, Refusal> {
    check_node(index, name, asker.rules, nominated).map_err(Refusal::KubeScheduler)?;
    let (Ok(demand), Some(batch)) = (asker.demand, batch) else {
        return Err(Refusal::Request);
    };
    let filter = index.filter();
    let fit = filter.evaluate(|| name, filter.node_id(name), demand, batch);
    fit.map_err(Refusal::Devices)
}
