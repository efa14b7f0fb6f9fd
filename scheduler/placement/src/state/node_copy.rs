//! Copies of nodes: for another fleet, which a caller fills a few nodes at a time, so that it never locks the original for long;
//! and for placements that show how many more pods would fit.

use crate::data::ident::{NodeId, OwnerId};
use crate::state::node::{HostUse, Node};
use crate::state::nodes::Nodes;

/// A node with its devices, holdings and hints, its CPU and memory, and the CPU and memory that each holder of devices uses.
#[derive(Debug)]
pub struct NodeCopy {
    pub(crate) node: Node,
    host_uses: Vec<(OwnerId, HostUse)>,
}

impl NodeCopy {
    /// A copy of a node; `None` if the node is gone.
    pub(crate) fn of(nodes: &Nodes, id: NodeId) -> Option<Self> {
        let node = nodes.get(id)?.copy_with_hints(|_| true);
        let owners = node.held.iter().map(|held| &held.owner);
        let uses = owners.filter_map(|owner| Some((owner.clone(), *nodes.host_uses.get(owner)?)));
        Some(Self {
            host_uses: uses.filter(|(_, used)| used.node_index == id.index).collect(),
            node,
        })
    }

    /// As [`Self::of`], but without any holding, hint or use of its CPU and memory.
    pub(crate) fn emptied(nodes: &Nodes, id: NodeId) -> Option<Self> {
        Some(Self {
            node: nodes.get(id)?.emptied(),
            host_uses: Vec::new(),
        })
    }

    /// Opens all GPUs of the copy, as those of a node that is added are.
    pub fn open_gpus(&mut self) {
        self.node.open();
    }

    /// Closes all GPUs of the copy: it takes no new pod.
    pub fn close_gpus(&mut self) {
        let gpus: Vec<usize> = (0..self.node.gpus().len()).collect();
        self.node.close(&gpus);
    }

    /// Adds the node to other nodes, which must not have one of its name or owners.
    pub(crate) fn insert_into(self, nodes: &mut Nodes) -> NodeId {
        let Self { node, host_uses } = self;
        let id = nodes.insert(node);
        for (owner, used) in host_uses {
            let node_index = id.index;
            nodes.host_uses.insert(owner, HostUse { node_index, ..used });
        }
        id
    }
}
