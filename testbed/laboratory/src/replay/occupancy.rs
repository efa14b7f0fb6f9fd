//! The free CPU and GPUs of every node, counted from bindings alone and independently of the engine.

use super::trace::WHOLE;
use super::world::{PlacedPod, ReplayInput, ReplayNode, ReplayPod};

/// The free room of every node, and the GPU thousandths that are allocated on all nodes.
#[derive(Clone, Debug)]
pub struct FreeRoom {
    nodes: Vec<NodeUse>,
    allocated_milli: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeUse {
    pub cpu_free: i64,
    /// Free thousandths of every GPU, in the order of the node's minors.
    pub gpus: Box<[i64]>,
    /// Changes with every change of the other fields, so that scores of the node can be cached.
    pub version: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuShare {
    /// The GPU's index on its node, not its minor.
    pub gpu: usize,
    pub milli: i64,
}

impl NodeUse {
    pub fn empty(node: &ReplayNode) -> Self {
        Self {
            cpu_free: node.cpu,
            gpus: vec![WHOLE; node.minors.len()].into(),
            version: 1,
        }
    }

    pub fn gpu_free(&self) -> i64 {
        self.gpus.iter().sum()
    }

    pub fn n_with(&self, milli: i64) -> usize {
        self.gpus.iter().filter(|free| **free >= milli).count()
    }

    /// Takes a pod's request and parts of GPUs away; for a `sign` of -1, gives them back.
    pub fn take(&mut self, pod: &ReplayPod, parts: &[GpuShare], sign: i64) {
        self.cpu_free -= sign * pod.cpu;
        for part in parts {
            if let Some(free) = self.gpus.get_mut(part.gpu) {
                *free -= sign * part.milli;
            }
        }
        self.version = self.version.wrapping_add(1);
    }
}

impl FreeRoom {
    pub fn empty(world: &ReplayInput) -> Self {
        Self {
            nodes: world.nodes.iter().map(NodeUse::empty).collect(),
            allocated_milli: 0,
        }
    }

    /// The cluster with the pods that are bound from the start and stay ([`ReplayInput::present`]).
    pub fn at_start(world: &ReplayInput) -> Self {
        let mut occupancy = Self::empty(world);
        for PlacedPod { pod, node, parts, .. } in &world.present {
            occupancy.put(*node, pod, parts);
        }
        occupancy
    }

    /// The cluster before the replay: all pods are on the nodes that they are bound to today.
    pub fn today(world: &ReplayInput) -> Self {
        let mut occupancy = Self::at_start(world);
        for (pod, node, parts) in &world.bound_today {
            if let Some(pod) = world.pods.get(*pod) {
                occupancy.put(*node, pod, parts);
            }
        }
        occupancy
    }

    pub fn node(&self, node: usize) -> Option<&NodeUse> {
        self.nodes.get(node)
    }

    pub fn nodes(&self) -> &[NodeUse] {
        &self.nodes
    }

    pub fn allocated_milli(&self) -> i64 {
        self.allocated_milli
    }

    pub fn put(&mut self, node: usize, pod: &ReplayPod, parts: &[GpuShare]) {
        self.change(node, pod, parts, 1);
    }

    pub fn remove(&mut self, node: usize, pod: &ReplayPod, parts: &[GpuShare]) {
        self.change(node, pod, parts, -1);
    }

    /// Adds or removes a pod: `sign` is 1 if it comes and -1 if it goes.
    fn change(&mut self, node: usize, pod: &ReplayPod, parts: &[GpuShare], sign: i64) {
        self.allocated_milli += sign * parts.iter().map(|part| part.milli).sum::<i64>();
        if let Some(free) = self.nodes.get_mut(node) {
            free.take(pod, parts, sign);
        }
    }
}
