//! Finds every broken invariant by working everything out again, naively.
//!
//! Shares no arithmetic with the dense rows: it would otherwise repeat their mistakes.

mod others;
mod recount;
mod rules;

use std::collections::BTreeMap;

use crate::amounts::Dimension;
use crate::fleet::{Fleet, NodeId, Slot};
use crate::host::HostAmounts;
use crate::ident::{DeviceId, DeviceType, FunctionId, GpuUuid, OwnerId, ResourceName};
use crate::request::GpuAsk;
use crate::state::StateId;
use crate::wishes::Kind;
use crate::workload::{Spec, Workload};

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// More of a device is certainly held than it has.
    Oversubscribed {
        /// The node's name.
        node: String,
        /// The device.
        gpu: GpuUuid,
        /// What there is too little of.
        dimension: Dimension,
        /// What is held; memory in hundredths of a byte.
        used: u128,
        /// What there is, in the same unit.
        total: u128,
    },
    /// More of a device of another type is certainly held than it has.
    DeviceOversubscribed {
        /// The node's name.
        node: String,
        /// The device's type.
        kind: DeviceType,
        /// The device.
        id: DeviceId,
        /// What there is too little of.
        resource: ResourceName,
        /// What is held.
        used: u128,
        /// What there is.
        total: u64,
    },
    /// What is kept ready for requests is not what the inventory and the holdings amount to.
    RowDiffers {
        /// The node's name.
        node: String,
        /// What differs, in words.
        detail: String,
    },
    /// An owner holds something of several nodes.
    OwnerOnSeveralNodes {
        /// The owner.
        owner: OwnerId,
        /// The nodes' names.
        nodes: Vec<String>,
    },
    /// Two shares of one owner are on the same device.
    SameGpuTwice {
        /// The node's name.
        node: String,
        /// The owner.
        owner: OwnerId,
        /// The device.
        gpu: GpuUuid,
    },
    /// Two owners certainly hold a virtual function.
    FunctionHeldTwice {
        /// The node's name.
        node: String,
        /// The function.
        function: FunctionId,
        /// The owners.
        owners: [OwnerId; 2],
    },
    /// Somebody was given a device that another keeps to itself.
    ExclusionBroken {
        /// The node's name.
        node: String,
        /// Who keeps it.
        keeper: OwnerId,
        /// Who else holds it, or a device on its switch.
        other: OwnerId,
        /// The device's type.
        kind: Kind,
        /// What identifies it.
        device: String,
    },
    /// An owner holds a share of a device that the node does not have.
    MissingGpu {
        /// The node's name.
        node: String,
        /// The owner.
        owner: OwnerId,
        /// The device, as the record names it.
        gpu: String,
    },
    /// Names, owners, hints and nodes do not agree with one another.
    Index {
        /// What does not agree, in words.
        detail: String,
    },
}

impl Fleet {
    /// Every invariant that does not hold; empty if all is well.
    ///
    /// Shares whose device, amount or record is in doubt do not count as oversubscription. What is held of a sick
    /// device, or of a node that is gone, breaks nothing. Exclusive use can be broken by decisions only: facts may be so.
    pub fn check(&self) -> Vec<Violation> {
        let mut violations = self.check_names();
        violations.extend(self.check_owners());
        violations.extend(self.check_hints());
        violations.extend(self.check_states());
        violations.extend(self.check_hosts());
        violations.extend(self.check_beside());
        let nodes = self
            .slots
            .iter()
            .zip(&self.briefs)
            .filter_map(|(slot, brief)| Some((slot.generation, slot.node.as_ref()?, *brief)));
        for (generation, node, brief) in nodes {
            let mut found = recount::check_node(node);
            found.extend(others::check_node(node));
            // What is derived from rows that are wrong is wrong as well.
            if found.is_empty() {
                found.extend(rules::check_derived(self, node, generation, brief));
            }
            found.extend(rules::check_pairs(node));
            violations.append(&mut found);
        }
        violations
    }

    fn check_names(&self) -> Vec<Violation> {
        let mut violations = Vec::new();
        let place = |index, slot: &Slot| NodeId::new(index, slot.generation);
        let nodes = || {
            (0_u32..)
                .zip(&self.slots)
                .filter_map(|(index, slot)| Some((place(index, slot), slot.node.as_ref()?)))
        };
        for (place, node) in nodes() {
            if self.names.get(&node.name) != Some(place) {
                violations.push(index_error(format!(
                    "the name {} does not lead to its node",
                    node.name
                )));
            }
            if node.is_idle() {
                violations.push(index_error(format!(
                    "nothing refers to node {}, but it is still there",
                    node.name
                )));
            }
        }
        if self.names.len() != nodes().count() {
            violations.push(index_error(format!(
                "{} names for {} nodes",
                self.names.len(),
                nodes().count()
            )));
        }
        violations
    }

    fn check_owners(&self) -> Vec<Violation> {
        let mut violations = Vec::new();
        let mut found: BTreeMap<&OwnerId, Vec<u32>> = BTreeMap::new();
        for (index, slot) in (0..).zip(&self.slots) {
            let held = slot.node.iter().flat_map(|node| &node.held);
            held.for_each(|held| found.entry(&held.owner).or_default().push(index));
        }
        for (owner, indices) in &found {
            if indices.len() > 1 {
                let nodes = indices
                    .iter()
                    .filter_map(|&index| Some(self.at(index)?.name.to_string()))
                    .collect();
                violations.push(Violation::OwnerOnSeveralNodes {
                    owner: (*owner).clone(),
                    nodes,
                });
            }
            if indices.first() != self.owners.get(*owner) {
                violations.push(index_error(format!(
                    "owner {owner} is not found on the node where it is"
                )));
            }
        }
        if found.len() != self.owners.len() {
            violations.push(index_error(format!(
                "{} owners are known, {} hold something",
                self.owners.len(),
                found.len()
            )));
        }
        violations
    }

    /// What is used of nodes themselves is what owners use.
    fn check_hosts(&self) -> Vec<Violation> {
        let mut sums: BTreeMap<u32, (u32, u128, u128)> = BTreeMap::new();
        for used in self.running.values() {
            let sum = sums.entry(used.index).or_default();
            let HostAmounts { cpu_milli, memory } = used.amounts;
            *sum = (
                sum.0 + 1,
                sum.1 + u128::from(cpu_milli),
                sum.2 + u128::from(memory),
            );
        }
        let counted = (0..).zip(&self.slots).map(|(index, slot)| {
            let host = slot.node.as_ref().map(|node| node.host).unwrap_or_default();
            (
                index,
                (
                    host.n_owners,
                    u128::from(host.used.cpu_milli),
                    u128::from(host.used.memory),
                ),
            )
        });
        let wrong =
            counted.filter(|(index, counted)| sums.get(index).copied().unwrap_or_default() != *counted);
        wrong
            .map(|(index, _)| {
                index_error(format!(
                    "CPU and memory used of node {index} are not what owners use"
                ))
            })
            .collect()
    }

    /// Pods that count beside GPUs are those that hold nothing and run where GPUs are.
    fn check_beside(&self) -> Option<Violation> {
        let mut beside = Workload::default();
        for (owner, used) in &self.running {
            let has_gpus = self.at(used.index).is_some_and(|node| !node.gpus().is_empty());
            if has_gpus && !used.is_tied && !self.owners.contains_key(owner) {
                beside.add(Spec {
                    gpus: GpuAsk::Nothing,
                    host: used.amounts,
                });
            }
        }
        let is_counted = self.beside.workload().is_same(&beside);
        (!is_counted)
            .then(|| index_error("the pods that count beside GPUs are not those that run there".to_owned()))
    }

    /// Every state is counted for the nodes that are in it, and none is kept that no node is in.
    fn check_states(&self) -> Option<Violation> {
        let mut n_nodes: BTreeMap<StateId, usize> = BTreeMap::new();
        for state in self.briefs.iter().filter_map(|brief| brief.state) {
            *n_nodes.entry(state).or_default() += 1;
        }
        let is_counted =
            |(id, n): (&StateId, &usize)| self.states.get(*id).is_some_and(|(_, counted)| counted == *n);
        let is_whole = n_nodes.len() == self.states.len() && n_nodes.iter().all(is_counted);
        (!is_whole)
            .then(|| index_error("the states that are kept are not those that nodes are in".to_owned()))
    }

    fn check_hints(&self) -> Vec<Violation> {
        let mut violations = Vec::new();
        let mut n_hints = 0;
        for (index, slot) in (0..).zip(&self.slots) {
            for hint in slot.node.iter().flat_map(|node| &node.hints) {
                n_hints += 1;
                if self.hinted.get(&hint.owner) != Some(&index) {
                    violations.push(index_error(format!(
                        "the hint of {} is not found on the node where it is",
                        hint.owner
                    )));
                }
                if self.owners.contains_key(&hint.owner) {
                    violations.push(index_error(format!(
                        "{} has both a holding and a hint",
                        hint.owner
                    )));
                }
            }
        }
        if n_hints != self.hinted.len() {
            violations.push(index_error(format!(
                "{} hints are known, {n_hints} are out",
                self.hinted.len()
            )));
        }
        violations
    }
}

fn index_error(detail: String) -> Violation {
    Violation::Index { detail }
}

#[cfg(test)]
mod tests;
