//! The input of a replay from any source: nodes and pods, as numbers and as Kubernetes objects.

use serde_json::Value;

use super::occupancy::GpuShare;
use super::portion::{floor, real};
use super::trace::WHOLE;

/// The nodes, the pods, and which pods may go to which nodes.
#[derive(Clone, Debug, Default)]
pub struct ReplayInput {
    /// In the order of the source; kube-scheduler searches them by name.
    pub nodes: Vec<ReplayNode>,
    /// The pods to place; a replay may copy some and leave others out.
    pub pods: Vec<ReplayPod>,
    /// Sets of nodes that pods may go to by their constraints, with a flag for each node; [`ReplayPod::eligible`] is an index.
    pub eligible: Vec<Box<[bool]>>,
    /// Pods that are on their nodes from the start, and stay.
    pub present: Vec<PlacedPod>,
    /// The places of `pods` in the cluster today, before the replay: index of the pod, index of the node, parts of GPUs.
    pub bound_today: Vec<(usize, usize, Vec<GpuShare>)>,
    /// True if all pods ask for whole percents, alike of memory and of computing power: then the engine's amounts equal the
    /// thousandths that the replay counts.
    pub is_in_percents: bool,
}

#[derive(Clone, Debug)]
pub struct PlacedPod {
    /// The object as the API server shows it.
    pub object: Value,
    pub pod: ReplayPod,
    pub node: usize,
    pub parts: Vec<GpuShare>,
}

#[derive(Clone, Debug)]
pub struct ReplayNode {
    pub name: Box<str>,
    /// Allocatable thousandths of a CPU.
    pub cpu: i64,
    pub minors: Box<[i32]>,
    /// The object as the API server would show it.
    pub object: Value,
    pub device: Option<Value>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ReplayPod {
    pub name: Box<str>,
    pub namespace: Box<str>,
    /// The object as its user writes it: without a node and a status.
    pub object: Value,
    /// Thousandths of a CPU.
    pub cpu: i64,
    pub gpus: usize,
    /// Thousandths of each of them.
    pub milli: i64,
    /// The index in [`ReplayInput::eligible`] of the nodes that it may go to; `None` if that is every node.
    pub eligible: Option<usize>,
    pub stay: Lifetime,
}

/// The times at which a pod comes and goes, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lifetime {
    pub from: Option<i64>,
    pub to: Option<i64>,
}

impl Lifetime {
    /// The end of a pod whose life is multiplied by `stretch`.
    pub fn end(self, stretch: f64) -> Option<i64> {
        Some(self.from.unwrap_or(0) + self.seconds(stretch)?)
    }

    /// The length of a life that is multiplied by `stretch`.
    pub fn seconds(self, stretch: f64) -> Option<i64> {
        let (from, to) = (self.from.unwrap_or(0), self.to?);
        Some(floor(real(to - from) * stretch))
    }
}

impl ReplayPod {
    pub fn demand(&self) -> i64 {
        i64::try_from(self.gpus)
            .unwrap_or(i64::MAX)
            .saturating_mul(self.milli)
    }
}

impl ReplayInput {
    pub fn capacity(&self) -> i64 {
        let gpus: usize = self.nodes.iter().map(|node| node.minors.len()).sum();
        i64::try_from(gpus).unwrap_or(0) * WHOLE
    }

    /// The thousandths of GPUs that the pods ask for which are bound from the start.
    pub fn present_demand(&self) -> i64 {
        self.present.iter().map(|present| present.pod.demand()).sum()
    }

    /// True if the node is in the set of nodes with this index in `eligible`; `None` is the set of all nodes.
    pub fn is_eligible(&self, set: Option<usize>, node: usize) -> bool {
        let Some(set) = set else { return true };
        let set = self.eligible.get(set);
        set.and_then(|set| set.get(node))
            .is_some_and(|is_eligible| *is_eligible)
    }
}
