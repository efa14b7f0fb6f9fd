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
    for (_, node) in nodes.iter() {
        for held in node.held.iter().filter(|held| members.contains(&held.owner)) {
            let on_node = minors.entry(&node.name).or_default();
            for part in &held.holdings.parts {
                let gpus = node.gpus().iter().filter(|_| part.kind == DeviceType::Gpu);
                on_node.extend(gpus.filter(|gpu| is_of(&part.device, gpu)).map(|gpu| gpu.minor));
            }
        }
    }
    let mut nodes = nodes.iter().filter(|(_, node)| minors.contains_key(&*node.name));
    let is_together = match (nodes.next(), nodes.next()) {
        (None, _) => true,
        (Some(_), Some(_)) => false,
        (Some((_, node)), None) => {
            let minors = minors.get(&*node.name);
            domain == SharedDomain::Node || minors.is_none_or(|minors| are_linked(node, minors))
        }
    };
    (!is_together).then(|| Violation::GroupApart(format!("GPUs by node: {minors:?}")))
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
