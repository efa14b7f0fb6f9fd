//! The state: all nodes, by name and by dense index, and who holds what where.

use rustc_hash::FxHashMap;

use crate::gpu::{Inventory, InventoryProblem};
use crate::holding::{Holdings, Origin, Placement};
use crate::ident::OwnerId;
use crate::names::Names;
use crate::node::{Held, Node};
use crate::shape::Shapes;
use crate::weigh::Weights;

/// A node's place in a [`Fleet`]; names nothing once the node is gone, even if its place is taken again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId {
    index: u32,
    generation: u32,
}

/// All nodes with their devices, holdings and hints.
#[derive(Debug, Default)]
pub struct Fleet {
    /// Index into `slots` of every node.
    pub(crate) names: Names,
    pub(crate) slots: Vec<Slot>,
    vacant: Vec<u32>,
    /// Index of the node that each owner holds something of.
    pub(crate) owners: FxHashMap<OwnerId, u32>,
    /// Index of the node that each owner's hint is on.
    pub(crate) hinted: FxHashMap<OwnerId, u32>,
    /// How much each resource counts for the policies that weigh them.
    pub(crate) weights: Weights,
    /// What nodes have, apart from names.
    shapes: Shapes,
    n_openings: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Slot {
    pub(crate) generation: u32,
    pub(crate) node: Option<Node>,
}

impl Fleet {
    /// A fleet without nodes.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same fleet with other weights for the policies that weigh resources; without this, none has any.
    #[must_use]
    pub fn weighing(self, weights: Weights) -> Self {
        Self { weights, ..self }
    }

    /// How often something has changed by which a request may fit that did not: grows with every inventory and release.
    pub fn n_openings(&self) -> u64 {
        self.n_openings
    }

    /// Finds a node that has devices, holdings or hints.
    #[inline]
    pub fn node_id(&self, name: &str) -> Option<NodeId> {
        let index = self.names.get(name)?;
        Some(NodeId { index, generation: self.slots.get(index as usize)?.generation })
    }

    /// Says what devices a node has now; everything held there is worked out anew.
    ///
    /// Devices that make no sense are left out and reported.
    pub fn set_inventory(&mut self, node: &str, mut inventory: Inventory) -> Vec<InventoryProblem> {
        let problems = inventory.sift();
        self.n_openings += 1;
        let index = self.index_of(node);
        let shape = self.shapes.of(&inventory);
        let before = self.at_mut(index).and_then(|node| node.set_inventory(Some((inventory, shape))));
        self.shapes.drop_unused(before);
        problems
    }

    /// Says that a node, or its report of devices, is gone. What is held there stays held until it is released.
    pub fn remove_inventory(&mut self, node: &str) {
        if let Some(index) = self.names.get(node) {
            let before = self.at_mut(index).and_then(|node| node.set_inventory(None));
            self.shapes.drop_unused(before);
            self.vacate_if_idle(index);
        }
    }

    /// Takes note of a fact: what an owner holds, in place of anything that it held, reserved or hinted at before.
    ///
    /// Facts are never refused; one that exceeds a device leaves nothing free there. The node need not be known yet.
    pub fn hold(&mut self, owner: &OwnerId, node: &str, holdings: impl Into<Holdings>) {
        let index = self.index_of(node);
        self.put(owner, index, Origin::Fact, holdings.into());
    }

    /// Forgets what an owner holds, and its hint; whether it held something.
    pub fn release(&mut self, owner: &str) -> bool {
        self.unhint(owner);
        let Some(index) = self.owners.remove(owner) else { return false };
        if let Some(node) = self.at_mut(index) {
            node.take(owner);
        }
        self.vacate_if_idle(index);
        self.n_openings += 1;
        true
    }

    /// Takes note of what an owner is expected to take soon, in place of its earlier hint; whether it was noted.
    ///
    /// An owner that already holds something needs no hint, and a node that is gone takes none. When a hint expires is
    /// the caller's business.
    pub fn hint(&mut self, owner: &OwnerId, node: NodeId, placement: Placement) -> bool {
        self.unhint(owner.as_str());
        if self.owners.contains_key(owner) {
            return false;
        }
        let Some(node_state) = self.node_mut(node) else { return false };
        node_state.put_hint(owner.clone(), placement);
        self.hinted.insert(owner.clone(), node.index);
        true
    }

    /// Forgets an owner's hint; whether there was one.
    pub fn unhint(&mut self, owner: &str) -> bool {
        let Some(index) = self.hinted.remove(owner) else { return false };
        if let Some(node) = self.at_mut(index) {
            node.take_hint(owner);
        }
        self.vacate_if_idle(index);
        true
    }

    pub(crate) fn put(&mut self, owner: &OwnerId, index: u32, origin: Origin, holdings: Holdings) {
        let before = self.owners.insert(owner.clone(), index);
        self.n_openings += u64::from(before.is_some());
        let before = before.filter(|&before| before != index);
        // The new node is filled before anything is vacated: it may be there for the sake of this owner's hint only.
        let held = Held { owner: owner.clone(), origin, holdings };
        if let Some(node) = self.at_mut(index) {
            node.put(held);
        }
        if let Some(before) = before {
            if let Some(node) = self.at_mut(before) {
                node.take(owner.as_str());
            }
            self.vacate_if_idle(before);
        }
        self.unhint(owner.as_str());
    }

    #[inline]
    pub(crate) fn node(&self, id: NodeId) -> Option<&Node> {
        let slot = self.slots.get(id.index as usize)?;
        slot.node.as_ref().filter(|_| slot.generation == id.generation)
    }

    fn node_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        let slot = self.slots.get_mut(id.index as usize)?;
        slot.node.as_mut().filter(|_| slot.generation == id.generation)
    }

    pub(crate) fn at(&self, index: u32) -> Option<&Node> {
        self.slots.get(index as usize)?.node.as_ref()
    }

    fn at_mut(&mut self, index: u32) -> Option<&mut Node> {
        self.slots.get_mut(index as usize)?.node.as_mut()
    }

    /// Index of the node of this name, which is entered if need be.
    fn index_of(&mut self, name: &str) -> u32 {
        if let Some(index) = self.names.get(name) {
            return index;
        }
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.node = Some(Node::new(name.into()));
        }
        self.names.insert(name, index);
        index
    }

    fn vacate_if_idle(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let Some(node) = slot.node.take_if(|node| node.is_idle()) else { return };
        slot.generation = slot.generation.wrapping_add(1);
        self.names.remove(&node.name);
        self.vacant.push(index);
    }
}

impl NodeId {
    pub(crate) fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    pub(crate) fn index(self) -> u32 {
        self.index
    }
}
