//! The rule of groups: all members are on one node, or on the GPUs of one link group of a node.

use std::collections::{BTreeMap, BTreeSet};

use super::Violation;
use crate::choice::group::SharedDomain;
use crate::data::device::{Device, DeviceRef};
use crate::data::ident::{DeviceType, OwnerId};
use crate::state::node::Node;
use crate::state::nodes::Nodes;

/// The violation of members that hold devices outside of one domain; hints do not count.
pub(crate) fn check_group(nodes: &Nodes, members: &[OwnerId], domain: SharedDomain) -> Option<Violation> {
    let mut minors: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
    let mut last = None;
    for (_, node) in nodes.iter() {
        for held in node.held.iter().filter(|held| members.contains(&held.owner)) {
            last = Some(node);
            let on_node = minors.entry(&node.name).or_default();
            for part in &held.holdings.parts {
                for gpu in node.gpus() {
                    if part.kind == DeviceType::Gpu && is_of(&part.device, gpu) {
                        on_node.insert(gpu.minor);
                    }
                }
            }
        }
    }
    // Both are of the same node unless members are on several, and then they are apart in any case.
    let is_linked = match (last, minors.values().next()) {
        (Some(node), Some(minors)) => are_linked(node, minors),
        _ => true,
    };
    if minors.len() > 1 || (domain == SharedDomain::Link && !is_linked) {
        return Some(Violation::GroupApart(format!("GPUs by node: {minors:?}")));
    }
    None
}

/// Returns true if a part is of a GPU, or may be.
fn is_of(part: &DeviceRef, gpu: &Device) -> bool {
    *part == DeviceRef::Any || part.identifies(gpu)
}

/// Returns true if GPUs are in one group of linked GPUs, or known to be on one switch, or on one NUMA node.
fn are_linked(node: &Node, minors: &BTreeSet<u32>) -> bool {
    for group in &node.inventory.links {
        if minors.iter().all(|minor| group.minors.contains(minor)) {
            return true;
        }
    }
    let (mut switches, mut numas) = (BTreeSet::new(), BTreeSet::new());
    for gpu in node.gpus().iter().filter(|gpu| minors.contains(&gpu.minor)) {
        let Some(location) = &gpu.attributes.location else {
            // A GPU of unknown location is near no other for certain.
            return minors.len() <= 1;
        };
        switches.insert((location.numa, location.switch.clone()));
        numas.insert(location.numa);
    }
    let is_one_switch = switches.len() <= 1 && switches.iter().all(|(_, switch)| switch.is_some());
    let is_one_numa = numas.len() <= 1 && numas.iter().all(Option::is_some);
    is_one_switch || is_one_numa
}
