//! CPU-only pods on nodes with GPUs: they take CPU and memory that pods with GPUs need, so they count in the [`Workload`], from
//! which the engine expects the pods to come.
//!
//! They are counted as they come and go, so that no refresh of the workload model has to visit all pods.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::data::amounts::HostAmounts;
use crate::data::request::RequestedGpus;
use crate::data::workload::{PodProfile, Workload};
use crate::state::node::HostUse;

/// The pods that use CPU and memory of nodes without holding devices.
#[derive(Debug, Default)]
pub(crate) struct CpuOnlyPods {
    /// The CPU-only pods of each node, by its index in the fleet.
    nodes: Vec<CpuOnlyNode>,
    /// The CPU-only pods of all nodes with GPUs.
    workload: Workload,
}

/// The CPU-only pods of one node.
#[derive(Debug, Default)]
struct CpuOnlyNode {
    /// True if the pods of the node count for the workload model.
    has_gpus: bool,
    /// Numbers of pods by the amounts that they use.
    counts: BTreeMap<HostAmounts, u32>,
}

impl CpuOnlyPods {
    /// The CPU-only pods of all nodes with GPUs.
    pub(crate) fn workload(&self) -> &Workload {
        &self.workload
    }

    /// Counts one more CPU-only pod, by its use of CPU and memory.
    pub(crate) fn add(&mut self, used: HostUse) {
        let (Some(node), workload) = self.node(used.node_index) else {
            return;
        };
        // Pods of a DaemonSet come with the node, so they are no part of the workload to come.
        if used.is_daemon {
            return;
        }
        *node.counts.entry(used.amounts).or_default() += 1;
        if node.has_gpus {
            workload.add(profile(used.amounts));
        }
    }

    /// Counts one CPU-only pod less: it has ended, or holds devices now.
    pub(crate) fn remove(&mut self, used: HostUse) {
        let (Some(node), workload) = self.node(used.node_index) else {
            return;
        };
        // Pods of a DaemonSet were never counted.
        if used.is_daemon {
            return;
        }
        let Entry::Occupied(mut count) = node.counts.entry(used.amounts) else {
            return;
        };
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
        if node.has_gpus {
            workload.remove(&profile(used.amounts));
        }
    }

    /// Records that a node has GPUs or none; its pods count only if it has some.
    pub(crate) fn set_has_gpus(&mut self, index: u32, has_gpus: bool) {
        let (node, workload) = self.node(index);
        let Some(node) = node.filter(|node| node.has_gpus != has_gpus) else {
            return;
        };
        node.has_gpus = has_gpus;
        // Pods that were counted while the node had no GPUs count for the workload now, or the other way round.
        for (amounts, count) in &node.counts {
            for _ in 0..*count {
                if has_gpus {
                    workload.add(profile(*amounts));
                } else {
                    workload.remove(&profile(*amounts));
                }
            }
        }
    }

    /// The entry of a node, which is added if it is missing, and the workload of all nodes.
    fn node(&mut self, index: u32) -> (Option<&mut CpuOnlyNode>, &mut Workload) {
        let at = index as usize;
        if self.nodes.len() <= at {
            self.nodes.resize_with(at + 1, CpuOnlyNode::default);
        }
        (self.nodes.get_mut(at), &mut self.workload)
    }
}

/// The profile of a pod that uses these amounts and no GPU.
fn profile(host: HostAmounts) -> PodProfile {
    PodProfile {
        gpus: RequestedGpus::Nothing,
        host,
    }
}
