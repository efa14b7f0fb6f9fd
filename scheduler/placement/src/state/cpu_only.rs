//! CPU-only pods on nodes with GPUs: they take CPU and memory that pods with GPUs need, so they count in the [`Workload`], from
//! which the engine expects the pods to come.
//!
//! They are counted as they come and go, so that no update of the model has to visit all pods.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::data::amounts::HostAmounts;
use crate::data::request::RequestedGpus;
use crate::data::workload::{PodProfile, Workload};
use crate::state::node::HostUse;

/// The pods that use nodes without holding devices.
#[derive(Debug, Default)]
pub(crate) struct CpuOnlyPods {
    /// By the node's index in the fleet.
    nodes: Vec<CpuOnlyNode>,
    /// The pods on nodes with GPUs.
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
    /// The pods on nodes with GPUs.
    pub(crate) fn workload(&self) -> &Workload {
        &self.workload
    }

    /// Counts one more pod.
    pub(crate) fn add(&mut self, used: HostUse) {
        let (Some(node), workload) = self.node(used.index) else {
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

    /// Counts one pod less: it ended, or holds devices now.
    pub(crate) fn remove(&mut self, used: HostUse) {
        let (Some(node), workload) = self.node(used.index) else {
            return;
        };
        let Entry::Occupied(mut count) = node.counts.entry(used.amounts) else {
            return;
        };
        if used.is_daemon {
            return;
        }
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
        // Its pods came before it was known to have GPUs, or stay although its report is gone.
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

    /// The entry of a node, which always exists afterwards, and the workload of all.
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
