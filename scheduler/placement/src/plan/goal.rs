//! The goal of a plan and its limits, with the goals that no fleet can reach.

use crate::data::ident::NodeId;
use crate::fleet::Fleet;
use crate::state::node::Node;

/// Most names of nodes in a refusal.
const N_SHOWN: usize = 3;

/// The goal of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal<'a> {
    /// Every pod that may move leaves the GPUs of a node, which take no new pod meanwhile.
    EmptyNode(NodeId),
    /// Every pod that may move leaves the GPUs with these minors, which take no new pod meanwhile.
    EmptyGpus(NodeId, &'a [u32]),
    /// A node has memory free on several GPUs at the same time. GPUs that are unhealthy, closed or kept for the vendor's plugin
    /// do not count.
    Free {
        /// Bytes on each GPU, more than 0.
        bytes: u64,
        /// Number of GPUs of one node, at least 1.
        n_gpus: usize,
        /// The nodes of which any may be chosen.
        nodes: &'a [NodeId],
    },
    /// The largest free blocks grow by the most bytes. The block of a node is the most memory that is free on one of its GPUs,
    /// since no share spans two of them; the sum over all nodes counts. The plan has the best single move, then the best after
    /// it, and so on, each out of the 256 moves with the best chances.
    Join,
}

/// Limits of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most moves. The time that [`Goal::Join`] takes grows with it.
    pub max_moves: usize,
    /// A pod that has run for fewer seconds stays.
    pub min_run_seconds: u64,
}

/// Why no plan can exist for a goal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The node is gone, or its devices are not known.
    #[error("the node has no known GPU")]
    NoGpu,
    /// The node has no GPU with this minor.
    #[error("the node has no GPU {minor}: its GPUs are {known:?}")]
    UnknownGpu {
        /// The minor.
        minor: u32,
        /// The minors that the node has.
        known: Vec<u32>,
    },
    /// The goal names no GPU of the node.
    #[error("no GPU is named: those of the node are {known:?}")]
    NoGpuNamed {
        /// The minors that the node has.
        known: Vec<u32>,
    },
    /// The goal names 0 bytes or 0 GPUs, so that nothing is to be done.
    #[error("0 bytes or 0 GPUs are asked for: the largest GPU has {largest} bytes")]
    Nothing {
        /// Bytes of the largest GPU.
        largest: u64,
    },
    /// None of the nodes is known with GPUs; the text names some that are.
    #[error("no node with GPUs is selected; {0}")]
    NoNode(String),
    /// No GPU of the nodes has as much memory.
    #[error("{bytes} bytes are more than any GPU has: the largest has {largest}")]
    TooLarge {
        /// The requested bytes.
        bytes: u64,
        /// Bytes of the largest GPU.
        largest: u64,
    },
    /// No node has as many GPUs of this size.
    #[error("no node has {n_gpus} GPUs of {bytes} bytes: the most is {most}")]
    TooMany {
        /// The requested number of GPUs.
        n_gpus: usize,
        /// The requested bytes.
        bytes: u64,
        /// The most GPUs of one node that have as many bytes.
        most: usize,
    },
}

/// Indices of the GPUs of a node with these minors, or of all its GPUs.
pub(super) fn gpus_of(fleet: &Fleet, node: NodeId, minors: Option<&[u32]>) -> Result<Vec<usize>, PlanError> {
    let node = fleet.nodes.get(node).ok_or(PlanError::NoGpu)?;
    let known: Vec<u32> = node.gpus().iter().map(|gpu| gpu.minor).collect();
    if known.is_empty() {
        return Err(PlanError::NoGpu);
    }
    let minors = minors.unwrap_or(&known);
    if minors.is_empty() {
        return Err(PlanError::NoGpuNamed { known });
    }
    match minors.iter().find(|minor| !known.contains(minor)) {
        Some(minor) => Err(PlanError::UnknownGpu { minor: *minor, known }),
        None => Ok(node.inventory.indices_of(minors).into_iter().collect()),
    }
}

/// Checks that some node has enough GPUs of this size.
pub(super) fn check_free(
    fleet: &Fleet,
    bytes: u64,
    n_gpus: usize,
    nodes: &[NodeId],
) -> Result<(), PlanError> {
    let nodes = nodes.iter().filter_map(|node| fleet.nodes.get(*node));
    let gpus = nodes.clone().flat_map(Node::gpus);
    let largest = gpus.map(|gpu| gpu.memory_bytes).max();
    let largest = largest.ok_or_else(|| PlanError::NoNode(nodes_with_gpus(fleet)))?;
    if bytes == 0 || n_gpus == 0 {
        return Err(PlanError::Nothing { largest });
    }
    if bytes > largest {
        return Err(PlanError::TooLarge { bytes, largest });
    }
    let n_large_enough = |node: &Node| node.gpus().iter().filter(|gpu| gpu.memory_bytes >= bytes).count();
    let most = nodes.map(n_large_enough).max().unwrap_or(0);
    if n_gpus > most {
        return Err(PlanError::TooMany { n_gpus, bytes, most });
    }
    Ok(())
}

/// Some nodes that have GPUs, in words, for the refusal of others.
pub fn nodes_with_gpus(fleet: &Fleet) -> String {
    let nodes = fleet.nodes.iter().filter(|(_, node)| !node.gpus().is_empty());
    let mut names: Vec<&str> = nodes.map(|(_, node)| &*node.name).collect();
    // Nodes come in an arbitrary order, and the names that are cut off must not depend on it.
    names.sort_unstable();
    let n = names.len();
    names.truncate(N_SHOWN);
    let shown = names.join(", ");
    match n {
        0 => "no node has any".to_owned(),
        n if n <= N_SHOWN => format!("those with GPUs are {shown}"),
        n => format!("{n} have GPUs, such as {shown}"),
    }
}
