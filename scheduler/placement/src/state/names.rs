//! The table of node names.

use rustc_hash::FxHashMap;

use crate::data::ident::NodeId;

/// Nodes by name.
// A plain table: the scheduler remembers the nodes of the name lists that requests repeat, as long as the version is the same.
#[derive(Debug, Default)]
pub(crate) struct Names {
    nodes: FxHashMap<Box<str>, NodeId>,
    /// Number of changes so far: the result of a look-up stays right as long as it is the same.
    version: u64,
}

impl Names {
    #[inline]
    pub(crate) fn get(&self, name: &str) -> Option<NodeId> {
        self.nodes.get(name).copied()
    }

    pub(crate) fn insert(&mut self, name: &str, node: NodeId) {
        self.nodes.insert(name.into(), node);
        self.version += 1;
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.nodes.remove(name);
        self.version += 1;
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    #[cfg(any(test, feature = "check"))]
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }
}
