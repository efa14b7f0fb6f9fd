//! The state: all nodes, by name and by dense index, and who holds what where.

use rustc_hash::FxHashMap;

use crate::beside::Beside;
use crate::brief::Brief;
use crate::fill::{Forecasts, Worth};
use crate::gpu::{Inventory, InventoryProblem};
use crate::holding::{Holdings, Origin, Placement};
use crate::host::HostUse;
use crate::ident::OwnerId;
use crate::names::Names;
use crate::node::{Held, Node};
use crate::ranking::Rankings;
use crate::shape::Shapes;
use crate::state::States;
use crate::weigh::Weights;
use crate::workload::Workload;

/// A node's place in a [`Fleet`]; names nothing once the node is gone, even if its place is taken again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId {
    index: u32,
    generation: u32,
}

/// All nodes with their devices, holdings and hints.
#[derive(Debug, Default)]
pub struct Fleet {
    /// Place in `slots` of every node.
    pub(crate) names: Names,
    pub(crate) slots: Vec<Slot>,
    /// By the same index.
    pub(crate) briefs: Vec<Brief>,
    /// What verdicts on each are known by, apart from the rest, as questions to all nodes read little else.
    pub(crate) versions: Vec<u64>,
    vacant: Vec<u32>,
    /// Index of the node that each owner holds something of.
    pub(crate) owners: FxHashMap<OwnerId, u32>,
    /// Index of the node that each owner's hint is on.
    pub(crate) hinted: FxHashMap<OwnerId, u32>,
    /// How much each resource counts for the policies that weigh them.
    pub(crate) weights: Weights,
    /// What owners use of nodes themselves.
    pub(crate) running: FxHashMap<OwnerId, HostUse>,
    workload: Workload,
    pub(crate) beside: Beside,
    pub(crate) forecasts: Forecasts,
    /// Those that have been worked out and do not count yet.
    pub(crate) next: Option<Forecasts>,
    /// How many have been worked out.
    pub(crate) n_forecasts: u32,
    pub(crate) rankings: Rankings,
    /// What nodes have, apart from names.
    shapes: Shapes,
    /// What of nodes is taken, as far as nodes are compared.
    pub(crate) states: States,
    n_openings: u64,
    n_changes: u64,
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

    /// What pods that ask for GPUs usually ask for; what counts is what has been [learnt](Self::learn) of it.
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// What pods that ask for GPUs usually ask for, to add to and to take from.
    pub fn workload_mut(&mut self) -> &mut Workload {
        &mut self.workload
    }

    /// How often something has changed by which a request may fit that did not: grows with every inventory and release.
    pub fn n_openings(&self) -> u64 {
        self.n_openings
    }

    /// Something outside has changed by which a request may fit that did not, such as a hint that ended for good.
    pub fn note_opening(&mut self) {
        self.n_openings += 1;
    }

    /// Grows whenever a name comes or goes: while it stays the same, so does what [`Fleet::node_id`] says of any name.
    pub fn names_version(&self) -> u64 {
        self.names.version()
    }

    /// How many nodes there are.
    pub fn n_names(&self) -> usize {
        self.names.len()
    }

    /// Finds a node that has devices, holdings or hints.
    #[inline]
    pub fn node_id(&self, name: &str) -> Option<NodeId> {
        self.names.get(name)
    }

    /// The node at a place.
    pub fn id_at(&self, index: u32) -> Option<NodeId> {
        let brief = self.briefs.get(index as usize).filter(|brief| brief.is_there)?;
        Some(NodeId::new(index, brief.generation))
    }

    /// Says what devices a node has now; everything held there is worked out anew.
    ///
    /// Devices that make no sense are left out and reported.
    pub fn set_inventory(&mut self, node: &str, mut inventory: Inventory) -> Vec<InventoryProblem> {
        let problems = inventory.sift();
        self.n_openings += 1;
        let index = self.index_of(node);
        let shape = self.shapes.of(&inventory);
        if let Some(model) = inventory.model() {
            self.forecasts.know(model);
            if let Some(next) = &mut self.next {
                next.know(model);
            }
        }
        let before = self.change(index, |node| node.set_inventory(Some((inventory, shape))));
        self.note_gpus(index);
        self.shapes.drop_unused(before.flatten());
        problems
    }

    /// Says that a node, or its report of devices, is gone. What is held there stays held until it is released.
    pub fn remove_inventory(&mut self, node: &str) {
        if let Some(index) = self.names.get(node).map(NodeId::index) {
            let before = self.change(index, |node| node.set_inventory(None));
            self.note_gpus(index);
            self.shapes.drop_unused(before.flatten());
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
        let Some(index) = self.owners.remove(owner) else {
            return false;
        };
        if let Some(used) = self.running.get(owner) {
            self.beside.come(*used);
        }
        self.change(index, |node| node.take(owner));
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
        if self.node(node).is_none() {
            return false;
        }
        self.change(node.index(), |node| node.put_hint(owner.clone(), placement));
        self.hinted.insert(owner.clone(), node.index());
        true
    }

    /// Forgets an owner's hint; whether there was one.
    pub fn unhint(&mut self, owner: &str) -> bool {
        let Some(index) = self.hinted.remove(owner) else {
            return false;
        };
        self.change(index, |node| node.take_hint(owner));
        self.vacate_if_idle(index);
        true
    }

    pub(crate) fn put(&mut self, owner: &OwnerId, index: u32, origin: Origin, holdings: Holdings) {
        let before = self.owners.insert(owner.clone(), index);
        if let Some(used) = self.running.get(owner).filter(|_| before.is_none()) {
            self.beside.go(*used);
        }
        self.n_openings += u64::from(before.is_some());
        let before = before.filter(|&before| before != index);
        // The new node is filled before anything is vacated: it may be there for the sake of this owner's hint only.
        let held = Held {
            owner: owner.clone(),
            origin,
            holdings,
        };
        self.change(index, |node| node.put(held));
        if let Some(before) = before {
            self.change(before, |node| node.take(owner.as_str()));
            self.vacate_if_idle(before);
        }
        self.unhint(owner.as_str());
    }

    #[inline]
    pub(crate) fn node(&self, id: NodeId) -> Option<&Node> {
        let slot = self.slots.get(id.index() as usize)?;
        slot.node.as_ref().filter(|_| slot.generation == id.generation)
    }

    pub(crate) fn at(&self, index: u32) -> Option<&Node> {
        self.slots.get(index as usize)?.node.as_ref()
    }

    /// What is quickly told of a node, unless it is gone.
    #[inline]
    pub(crate) fn brief_of(&self, id: NodeId) -> Option<&Brief> {
        self.briefs
            .get(id.index() as usize)
            .filter(|brief| brief.generation == id.generation)
    }

    /// Grows with every change of the node at a place, also from one node to its successor there; 0 where there never was one.
    #[inline]
    pub(crate) fn version_at(&self, index: u32) -> u64 {
        self.versions.get(index as usize).copied().unwrap_or(0)
    }

    /// Changes a node, and what is told of it.
    pub(crate) fn change<T>(&mut self, index: u32, change: impl FnOnce(&mut Node) -> T) -> Option<T> {
        let slot = self.slots.get_mut(index as usize)?;
        let node = slot.node.as_mut()?;
        let result = change(node);
        node.worth = Worth::default();
        // The new state is entered before the old one is left: most often they are the same, or shared with others.
        let state = node.state().map(|state| self.states.enter(state));
        let (has_hints, has_rules) = (!node.hints.is_empty(), node.has_rules);
        let brief = Brief {
            generation: slot.generation,
            is_there: true,
            has_hints,
            has_rules,
            state,
        };
        self.tell(index, brief);
        Some(result)
    }

    fn tell(&mut self, index: u32, brief: Brief) {
        self.n_changes += 1;
        let (Some(told), Some(version)) = (
            self.briefs.get_mut(index as usize),
            self.versions.get_mut(index as usize),
        ) else {
            return;
        };
        *version = self.n_changes;
        let before = std::mem::replace(told, brief);
        if let Some(state) = before.state {
            self.states.leave(state);
        }
    }

    /// Index of the node of this name, which is entered if need be.
    pub(crate) fn index_of(&mut self, name: &str) -> u32 {
        if let Some(known) = self.names.get(name) {
            return known.index();
        }
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.briefs.push(Brief::default());
            self.versions.push(0);
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        if let (Some(slot), Some(brief)) = (
            self.slots.get_mut(index as usize),
            self.briefs.get_mut(index as usize),
        ) {
            slot.node = Some(Node::new(name.into()));
            brief.is_there = true;
            self.names.insert(name, NodeId::new(index, slot.generation));
        }
        index
    }

    pub(crate) fn vacate_if_idle(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else {
            return;
        };
        let Some(node) = slot.node.take_if(|node| node.is_idle()) else {
            return;
        };
        slot.generation = slot.generation.wrapping_add(1);
        let generation = slot.generation;
        self.tell(
            index,
            Brief {
                generation,
                ..Brief::default()
            },
        );
        self.names.remove(&node.name);
        self.vacant.push(index);
    }
}

impl NodeId {
    pub(crate) fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// The number of its place among all; that of another node once it is gone, which [`Fleet::names_version`] tells.
    #[inline]
    pub const fn index(self) -> u32 {
        self.index
    }
}
