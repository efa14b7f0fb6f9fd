//! The independent check: computes everything again, naively, and reports every violated invariant.
//!
//! It shares no arithmetic with the rows of free amounts that nodes keep, whose mistakes it would otherwise repeat.

mod amounts;
mod domain;
mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::data::ident::{DeviceId, OwnerId, ResourceName};
use crate::data::request::RequestedGpus;
use crate::data::workload::{PodProfile, Workload};
use crate::state::node::Node;
use crate::state::nodes::Nodes;

/// A violated invariant, in words. Amounts count if an owner is known to hold them, and not if its record is in doubt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Owners are known to hold more of a device than it has.
    Oversubscribed {
        /// The node's name.
        node: String,
        /// The device.
        id: DeviceId,
        /// The named resource, or a GPU's memory, core or slots.
        resource: ResourceName,
        /// The held amount; memory in hundredths of a byte.
        used: u128,
        /// The total, in the same unit.
        total: u128,
    },
    /// A value that a node keeps (free amounts, flags, its class) differs from the value that inventory and holdings give.
    RowDiffers(String),
    /// An owner holds something of several nodes.
    OwnerOnSeveralNodes(String),
    /// Two parts that one owner holds are of the same GPU.
    SameGpuTwice(String),
    /// Two owners are known to hold a virtual function.
    FunctionHeldTwice(String),
    /// An owner was given a device of which another has exclusive use, or one on the same switch.
    ExclusionBroken(String),
    /// An owner holds a share of a GPU that the node does not have.
    MissingGpu(String),
    /// Members of a group that share a domain are on several nodes, or on GPUs of several link groups.
    GroupApart(String),
    /// The indices of names, owners and hints do not match the nodes.
    Index(String),
}

pub(crate) use domain::check_group;

/// Every violated invariant.
pub(crate) fn check(nodes: &Nodes) -> Vec<Violation> {
    let mut violations = Vec::new();
    check_names(nodes, &mut violations);
    check_owners(nodes, &mut violations);
    check_hints(nodes, &mut violations);
    check_classes(nodes, &mut violations);
    check_host_uses(nodes, &mut violations);
    check_cpu_only(nodes, &mut violations);
    for (id, node) in nodes.iter() {
        let mut found = amounts::check_amounts(node);
        // Derived values follow from the rows, and would all be reported beside a wrong row.
        if found.is_empty() {
            found.extend(rules::check_derived(nodes, id, node));
        }
        violations.append(&mut found);
        violations.extend(rules::check_pairs(node));
    }
    violations
}

/// Finds names that do not lead to their nodes, and entries of nodes of which nothing is known.
fn check_names(nodes: &Nodes, violations: &mut Vec<Violation>) {
    let mut report = |text: String| violations.push(Violation::Index(text));
    let mut n_nodes = 0;
    for (id, node) in nodes.iter() {
        n_nodes += 1;
        let name = &node.name;
        if nodes.names.get(name) != Some(&id) {
            report(format!("the name {name} does not lead to its node"));
        }
        if node.is_idle() {
            report(format!("node {name} is idle, but still exists"));
        }
    }
    if nodes.names.len() != n_nodes {
        report(format!("{} names for {n_nodes} nodes", nodes.names.len()));
    }
}

/// Finds owners that hold something on several nodes, or are indexed on another node than theirs.
fn check_owners(nodes: &Nodes, violations: &mut Vec<Violation>) {
    let mut by_owner: BTreeMap<&OwnerId, Vec<(u32, &Node)>> = BTreeMap::new();
    for (id, node) in nodes.iter() {
        for held in &node.held {
            by_owner.entry(&held.owner).or_default().push((id.index, node));
        }
    }
    for (owner, holding) in &by_owner {
        if let [(_, first), (_, second), ..] = holding.as_slice() {
            let text = format!("{owner} holds something on {} and {}", first.name, second.name);
            violations.push(Violation::OwnerOnSeveralNodes(text));
        }
        if holding.first().map(|(index, _)| index) != nodes.owners.get(*owner) {
            violations.push(Violation::Index(format!(
                "owner {owner} is indexed on another node"
            )));
        }
    }
    if by_owner.len() != nodes.owners.len() {
        let (indexed, holding) = (nodes.owners.len(), by_owner.len());
        let text = format!("{indexed} owners are indexed, {holding} hold something");
        violations.push(Violation::Index(text));
    }
}

/// Finds hints that are indexed on another node than theirs, and hints of owners that hold something already.
fn check_hints(nodes: &Nodes, violations: &mut Vec<Violation>) {
    let mut report = |text: String| violations.push(Violation::Index(text));
    let mut n_hints = 0;
    for (id, node) in nodes.iter() {
        for hint in &node.hints {
            n_hints += 1;
            let owner = &hint.owner;
            if nodes.hinted.get(owner) != Some(&id.index) {
                report(format!("the hint of {owner} is indexed on another node"));
            }
            if nodes.owners.contains_key(owner) {
                report(format!("{owner} has both a holding and a hint"));
            }
        }
    }
    let indexed = nodes.hinted.len();
    if n_hints != indexed {
        report(format!("{indexed} hints are indexed, {n_hints} exist"));
    }
}

/// Finds equivalence classes without nodes, and nodes of classes that are not known.
fn check_classes(nodes: &Nodes, violations: &mut Vec<Violation>) {
    let mut used = BTreeSet::new();
    for summary in &nodes.summaries {
        used.extend(summary.class.as_ref().map(Arc::as_ptr));
    }
    let known: BTreeSet<_> = nodes.classes.0.iter().map(Arc::as_ptr).collect();
    if used != known {
        let text = "the equivalence classes are not those of the nodes".to_owned();
        violations.push(Violation::Index(text));
    }
}

/// Finds nodes whose used CPU and memory is not the sum over their owners.
fn check_host_uses(nodes: &Nodes, violations: &mut Vec<Violation>) {
    let mut sums: BTreeMap<u32, (u32, u128, u128)> = BTreeMap::new();
    for used in nodes.host_uses.values() {
        let (n_owners, cpu_milli, memory) = sums.entry(used.node_index).or_default();
        *n_owners += 1;
        // In 128 bits, since the sums of the fleet saturate in 64, which the check must not do as well.
        *cpu_milli += u128::from(used.amounts.cpu_milli);
        *memory += u128::from(used.amounts.memory);
    }
    for (index, node) in (0..).zip(&nodes.slots) {
        let host = node.as_ref().map(|node| node.host).unwrap_or_default();
        let used = host.used;
        let counted = (host.n_owners, u128::from(used.cpu_milli), u128::from(used.memory));
        if sums.get(&index).copied().unwrap_or_default() != counted {
            let text = format!("CPU and memory used of node {index} are not the sums over its owners");
            violations.push(Violation::Index(text));
        }
    }
}

/// Compares the CPU-only pods that count for the workload model with the owners that hold nothing and run on nodes with GPUs.
fn check_cpu_only(nodes: &Nodes, violations: &mut Vec<Violation>) {
    let mut expected = Workload::default();
    for (owner, used) in &nodes.host_uses {
        let has_gpus = nodes.at(used.node_index).is_some_and(Node::has_gpus);
        if has_gpus && !used.is_daemon && !nodes.owners.contains_key(owner) {
            expected.add(PodProfile {
                gpus: RequestedGpus::Nothing,
                host: used.amounts,
            });
        }
    }
    if !nodes.cpu_only.has_same_pods(&expected) {
        let text = "the CPU-only pods that count are not those on nodes with GPUs".to_owned();
        violations.push(Violation::Index(text));
    }
}

/// The violation of a node that keeps another value than follows from its inventory and holdings.
fn differs(node: &Node, text: &str) -> Violation {
    Violation::RowDiffers(format!("node {}: {text}", node.name))
}

#[cfg(test)]
mod tests;
