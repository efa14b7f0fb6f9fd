//! All nodes, by name and by dense index; the node on which each owner (a pod, by its UID) holds something; and every change of
//! these.

use std::collections::VecDeque;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::data::amounts::HostAmounts;
use crate::data::holding::{Held, Hints, Holdings, Origin, Placement};
use crate::data::ident::{NodeId, OwnerId};
use crate::data::inventory::Inventory;
use crate::data::request::RequestedGpus;
use crate::data::workload::{PodProfile, Workload};
use crate::state::equivalence::{EquivalenceClasses, EquivalenceKey, has_class, key_with};
use crate::state::hardware::{HardwareClass, HardwareClasses};
use crate::state::node::{HostUse, Node};

/// All nodes with their inventories, holdings and hints.
#[derive(Debug, Default)]
pub(crate) struct Nodes {
    // A plain table: the scheduler remembers the nodes of the name lists that requests repeat, by `names_version`.
    pub(crate) names: FxHashMap<Box<str>, NodeId>,
    pub(crate) names_version: u64,
    pub(crate) slots: Vec<Option<Node>>,
    /// The summary of the node at each index of `slots`.
    pub(crate) summaries: Vec<NodeSummary>,
    /// Indices that no node has at the moment.
    vacant: Vec<u32>,
    /// Index of the node on which each owner holds devices.
    pub(crate) owners: FxHashMap<OwnerId, u32>,
    /// Index of the node that each owner's hint is on.
    pub(crate) hinted: FxHashMap<OwnerId, u32>,
    /// CPU and memory that each owner uses of its node.
    pub(crate) host_uses: FxHashMap<OwnerId, HostUse>,
    /// The CPU-only pods on nodes with GPUs, which take CPU and memory that pods with GPUs need. Counted as they come and go, so
    /// that no refresh of the workload model has to visit all pods.
    pub(crate) cpu_only: Workload,
    hardware: HardwareClasses,
    pub(crate) classes: EquivalenceClasses,
    /// Number of changes so far by which a request that was refused may fit now.
    pub(crate) n_openings: u64,
    /// Number of changes of all nodes; the version of a node is this number at its last change.
    pub(crate) n_changes: u64,
    /// The indices of the nodes that have changed last, the latest at the end; [`N_RECENT`] at most.
    recent: VecDeque<u32>,
}

/// Number of changes of which the nodes are remembered.
const N_RECENT: usize = 4096;

/// The part of a node that an evaluation reads first. Summaries are dense in memory, unlike nodes.
#[derive(Debug, Default)]
pub(crate) struct NodeSummary {
    /// Grows with every change of the node at the index, also from one node to its successor there; 0 before the first node.
    pub(crate) version: u64,
    /// The generation of the node, or of the next node at the index if there is none.
    pub(crate) generation: u32,
    pub(crate) exists: bool,
    pub(crate) has_hints: bool,
    /// The equivalence class with no hint counted; `None` where an answer takes a few comparisons only.
    pub(crate) class: Option<Arc<EquivalenceKey>>,
}

impl NodeSummary {
    /// The node with this summary, at this index.
    pub(crate) fn node_at(&self, index: u32) -> NodeId {
        let generation = self.generation;
        NodeId { index, generation }
    }
}

impl Nodes {
    /// The node with this identifier, unless it is gone.
    #[inline]
    pub(crate) fn get(&self, id: NodeId) -> Option<&Node> {
        self.summary(id)?;
        self.at(id.index)
    }

    /// The node that is at an index now.
    #[inline]
    pub(crate) fn at(&self, index: u32) -> Option<&Node> {
        self.slots.get(index as usize)?.as_ref()
    }

    /// The identifier of the node that is at an index now.
    pub(crate) fn id_at(&self, index: u32) -> NodeId {
        let summary = self.summaries.get(index as usize);
        let generation = summary.map_or(0, |summary| summary.generation);
        NodeId { index, generation }
    }

    /// Every node, by index.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        let slots = (0..).zip(&self.slots).zip(&self.summaries);
        slots.filter_map(|((index, node), summary)| Some((summary.node_at(index), node.as_ref()?)))
    }

    /// The summary of a node; `None` if the node is gone.
    #[inline]
    pub(crate) fn summary(&self, id: NodeId) -> Option<&NodeSummary> {
        let summary = self.summaries.get(id.index as usize)?;
        // Another node may have the index by now.
        (summary.generation == id.generation).then_some(summary)
    }

    /// The indices of the nodes that have changed since there were `n_changes` changes, some of them several times.
    pub(crate) fn changed_since(&self, n_changes: u64) -> impl Iterator<Item = u32> {
        let n = usize::try_from(self.n_changes - n_changes).unwrap_or(usize::MAX);
        let first = self.recent.len().checked_sub(n);
        let recent = self.recent.range(first.unwrap_or(self.recent.len())..).copied();
        // Where `recent` does not go back that far, the versions of all nodes are compared.
        let summaries = if first.is_none() { &*self.summaries } else { &[] };
        let others = (0..).zip(summaries);
        let others = others.filter(move |(_, summary)| summary.version > n_changes);
        recent.chain(others.map(|(index, _)| index))
    }

    /// Sets a node's inventory, which is normalized.
    pub(crate) fn set_inventory(&mut self, name: &str, inventory: Inventory) {
        // Even a report with no more devices may let a refused request fit: a GPU has become healthy, or takes shares again.
        self.n_openings += 1;
        let index = self.enter(name);
        let hardware = self.hardware.class_of(&inventory);
        self.replace_inventory(index, Some((inventory, hardware)));
    }

    pub(crate) fn remove_inventory(&mut self, name: &str) {
        if let Some(node) = self.names.get(name).copied() {
            self.replace_inventory(node.index, None);
            self.remove_if_idle(node.index);
        }
    }

    /// Replaces a node's inventory, and updates what depends on it outside the node: CPU-only pods that count, and hardware
    /// classes.
    fn replace_inventory(&mut self, index: u32, inventory: Option<(Inventory, Arc<HardwareClass>)>) {
        let had_any = self.at(index).is_some_and(Node::has_gpus);
        let replaced = self.change(index, |node| node.set_inventory(inventory));
        let node = self.slots.get(index as usize).and_then(Option::as_ref);
        let has_gpus = node.is_some_and(Node::has_gpus);
        if let Some(node) = node
            && has_gpus != had_any
        {
            for (amounts, n) in &node.cpu_only {
                for _ in 0..*n {
                    count_pod(&mut self.cpu_only, *amounts, has_gpus);
                }
            }
        }
        if let Some(replaced) = replaced.flatten() {
            self.hardware.drop_unused(&replaced);
        }
    }

    /// Adds a copy of a node of another fleet. There must be no node of its name, and none of its owners must be known.
    pub(crate) fn insert(&mut self, node: Node) -> NodeId {
        let index = self.enter(&node.name);
        if node.hardware.is_some() {
            let hardware = self.hardware.class_of(&node.inventory);
            self.replace_inventory(index, Some((node.inventory, hardware)));
        }
        for held in &node.held {
            self.owners.insert(held.owner.clone(), index);
        }
        for hint in &node.hints {
            self.hinted.insert(hint.owner.clone(), index);
        }
        self.change(index, |copy| {
            (copy.held, copy.hints, copy.host) = (node.held, node.hints, node.host);
            copy.update_free();
        });
        self.id_at(index)
    }

    /// Sets an owner's holding in place of its earlier holding and its hint.
    pub(crate) fn hold(&mut self, owner: &OwnerId, index: u32, origin: Origin, holdings: Holdings) {
        let replaced = self.owners.insert(owner.clone(), index);
        if replaced.is_some() {
            // A refused request may fit now: the new holding may be smaller, or on another node.
            self.n_openings += 1;
        } else if let Some(used) = self.host_uses.get(owner) {
            // An owner of devices is no CPU-only pod any more.
            self.count_cpu_only(*used, false);
        }
        let held = Held {
            owner: owner.clone(),
            origin,
            holdings,
        };
        // The new node gets the holding before the hint is removed: a node without either could be removed.
        self.change(index, |node| node.insert_held(held));
        if let Some(replaced) = replaced
            && replaced != index
        {
            self.change(replaced, |node| node.remove_held(owner.as_str()));
            self.remove_if_idle(replaced);
        }
        // The hint stood for this holding, or is out of date.
        self.unhint(owner.as_str());
    }

    pub(crate) fn release(&mut self, owner: &str) -> bool {
        self.unhint(owner);
        let Some(index) = self.owners.remove(owner) else {
            return false;
        };
        if let Some(used) = self.host_uses.get(owner) {
            // The pod counts as a CPU-only pod until its CPU and memory are released too.
            self.count_cpu_only(*used, true);
        }
        self.change(index, |node| node.remove_held(owner));
        self.remove_if_idle(index);
        self.n_openings += 1;
        true
    }

    pub(crate) fn hint(&mut self, owner: &OwnerId, node: NodeId, placement: &Placement) -> bool {
        self.unhint(owner.as_str());
        if self.owners.contains_key(owner) || self.get(node).is_none() {
            return false;
        }
        self.change(node.index, |node| {
            node.insert_hint(owner.clone(), Holdings::from(placement));
        });
        self.hinted.insert(owner.clone(), node.index);
        true
    }

    pub(crate) fn unhint(&mut self, owner: &str) -> bool {
        // Not counted in `n_openings`: most hints end when their pod holds the devices. For the others the caller decides.
        let Some(index) = self.hinted.remove(owner) else {
            return false;
        };
        self.change(index, |node| node.remove_hint(owner));
        self.remove_if_idle(index);
        true
    }

    pub(crate) fn set_host(&mut self, name: &str, total: Option<HostAmounts>) {
        // A node of which nothing is known gets no entry for that.
        if total.is_none() && !self.names.contains_key(name) {
            return;
        }
        let index = self.enter(name);
        // Nodes are reported again and again without a change, and a change makes the cached results of a node worthless.
        // Not counted in `n_openings`, as no request is refused for CPU or memory.
        if self.at(index).is_some_and(|node| node.host.total != total) {
            self.change(index, |node| node.host.total = total);
        }
        self.remove_if_idle(index);
    }

    pub(crate) fn set_host_use(
        &mut self,
        owner: &OwnerId,
        name: &str,
        amounts: HostAmounts,
        is_daemon: bool,
    ) {
        let used = HostUse {
            node_index: self.enter(name),
            amounts,
            is_daemon,
        };
        // Pods are reported at every change of their status, and hardly any changes their CPU.
        if self.host_uses.get(owner) == Some(&used) {
            return;
        }
        self.change(used.node_index, |node| {
            node.host.used = node.host.used.plus(amounts);
            node.host.n_owners += 1;
        });
        let holds_devices = self.owners.contains_key(owner);
        if !holds_devices {
            self.count_cpu_only(used, true);
        }
        // The new use is added before the old one is subtracted, so that a node with this pod alone is never idle.
        if let Some(replaced) = self.host_uses.insert(owner.clone(), used) {
            self.subtract_host_use(replaced, holds_devices);
        }
    }

    pub(crate) fn clear_host_use(&mut self, owner: &str) {
        if let Some(used) = self.host_uses.remove(owner) {
            self.subtract_host_use(used, self.owners.contains_key(owner));
        }
    }

    /// Takes CPU and memory that an owner no longer uses off the sum of its node.
    fn subtract_host_use(&mut self, used: HostUse, holds_devices: bool) {
        if !holds_devices {
            self.count_cpu_only(used, false);
        }
        self.change(used.node_index, |node| {
            node.host.used = node.host.used.less(used.amounts);
            node.host.n_owners -= 1;
        });
        self.remove_if_idle(used.node_index);
    }

    /// Counts one CPU-only pod more on a node, or one less: it has ended, or holds devices now.
    fn count_cpu_only(&mut self, used: HostUse, is_new: bool) {
        // Pods of a DaemonSet come with the node, so they are no part of the workload to come.
        if used.is_daemon {
            return;
        }
        let Some(Some(node)) = self.slots.get_mut(used.node_index as usize) else {
            return;
        };
        let count = node.cpu_only.entry(used.amounts).or_default();
        *count = if is_new {
            *count + 1
        } else {
            count.saturating_sub(1)
        };
        if *count == 0 {
            node.cpu_only.remove(&used.amounts);
        }
        // On a node without GPUs a pod takes nothing that pods with GPUs need.
        if node.has_gpus() {
            count_pod(&mut self.cpu_only, used.amounts, is_new);
        }
    }

    /// Changes a node, and updates everything that follows from it.
    fn change<T>(&mut self, index: u32, change: impl FnOnce(&mut Node) -> T) -> Option<T> {
        let node = self.slots.get_mut(index as usize)?.as_mut()?;
        let result = change(node);
        // Every change may change the node's value, which is computed again when a request needs it.
        node.value_cache.clear();
        let has_hints = !node.hints.is_empty();
        // The class is found before the old one is left: most often both are the same.
        let class = has_class(node).then(|| self.classes.class_of(key_with(node, Hints::Ignore)));
        let summary = NodeSummary {
            generation: self.id_at(index).generation,
            exists: true,
            has_hints,
            class,
            ..NodeSummary::default()
        };
        self.set_summary(index, summary);
        Some(result)
    }

    /// Replaces the summary of the node at an index; gives the node a new version, and takes it out of its former class.
    fn set_summary(&mut self, index: u32, mut summary: NodeSummary) {
        self.n_changes += 1;
        // One counter for all nodes, so that a node never has the version of a predecessor at its index.
        summary.version = self.n_changes;
        if self.recent.len() == N_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(index);
        if let Some(known) = self.summaries.get_mut(index as usize)
            && let Some(class) = std::mem::replace(known, summary).class
        {
            self.classes.drop_unused(&class);
        }
    }

    /// Index of the node with this name, which gets an entry if it has none.
    pub(crate) fn enter(&mut self, name: &str) -> u32 {
        if let Some(known) = self.names.get(name) {
            return known.index;
        }
        // Indices are reused, so that the dense vectors are no longer than the most nodes at one time.
        let index = if let Some(vacant) = self.vacant.pop() {
            vacant
        } else {
            self.slots.push(None);
            self.summaries.push(NodeSummary::default());
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        };
        let (at, id) = (index as usize, self.id_at(index));
        if let (Some(slot), Some(summary)) = (self.slots.get_mut(at), self.summaries.get_mut(at)) {
            *slot = Some(Node::new(name.into()));
            summary.exists = true;
            self.names.insert(name.into(), id);
            self.names_version += 1;
        }
        index
    }

    /// Removes the entry of a node that [is idle](Node::is_idle).
    fn remove_if_idle(&mut self, index: u32) {
        let slot = self.slots.get_mut(index as usize);
        let Some(node) = slot.and_then(|slot| slot.take_if(|node| node.is_idle())) else {
            return;
        };
        let summary = NodeSummary {
            // A `NodeId` of the removed node must not find the next node at the index.
            generation: self.id_at(index).generation.wrapping_add(1),
            ..NodeSummary::default()
        };
        self.set_summary(index, summary);
        self.names.remove(&node.name);
        self.names_version += 1;
        self.vacant.push(index);
    }
}

/// Counts one pod without GPUs more or less in a workload.
fn count_pod(workload: &mut Workload, host: HostAmounts, is_new: bool) {
    let gpus = RequestedGpus::Nothing;
    if is_new {
        workload.add(PodProfile { gpus, host });
    } else {
        workload.remove(&PodProfile { gpus, host });
    }
}
