//! Compares holdings two by two (virtual functions, exclusive use), and what is derived from a node with the node.

use super::{Violation, differs};
use crate::data::constraints::{DeviceKind, Exclusion};
use crate::data::device::{DeviceLocation, DeviceRef};
use crate::data::holding::{GpuRef, Held, HeldGpus, Hints, Origin};
use crate::data::ident::NodeId;
use crate::state::equivalence::{has_class, key_with};
use crate::state::node::Node;
use crate::state::nodes::Nodes;

pub(super) fn check_pairs(node: &Node) -> Vec<Violation> {
    let mut violations: Vec<Violation> = Vec::new();
    for (at, one) in node.held.iter().enumerate() {
        for other in node.held.iter().skip(at + 1) {
            check_functions(node, one, other, &mut violations);
            check_exclusions(node, one, other, &mut violations);
            check_exclusions(node, other, one, &mut violations);
        }
    }
    violations
}

/// Checks the summary, the equivalence class and the rules flag of a node.
pub(super) fn check_derived(nodes: &Nodes, id: NodeId, node: &Node) -> Vec<Violation> {
    let mut violations: Vec<Violation> = Vec::new();
    let summary = nodes
        .summaries
        .get(id.index as usize)
        .copied()
        .unwrap_or_default();
    let key = summary
        .class
        .and_then(|class| nodes.classes.get(class))
        .map(|(key, _)| key);
    if key != has_class(node).then(|| key_with(node, Hints::Ignore)).as_ref() {
        violations.push(differs(node, "its equivalence class does not match it"));
    }
    let flags = (
        summary.exists,
        summary.generation,
        summary.has_hints,
        summary.has_rules,
    );
    if flags != (true, id.generation, !node.hints.is_empty(), node.has_rules) {
        violations.push(differs(node, "its summary does not match it"));
    }
    let any_held = node.held.iter().any(|held| !held.holdings.exclusions.is_empty());
    let any_hinted = node.hints.iter().any(|hint| !hint.holdings.exclusions.is_empty());
    let table = node
        .inventory
        .as_ref()
        .and_then(|inventory| inventory.partitions.as_ref());
    let is_binding = table.is_some_and(|table| table.is_binding);
    if node.has_rules != (any_held || any_hinted || is_binding) {
        violations.push(differs(node, "the flag for rules is wrong"));
    }
    violations
}

/// Finds virtual functions that two owners certainly hold.
fn check_functions(node: &Node, one: &Held, other: &Held, violations: &mut Vec<Violation>) {
    for part in one.holdings.others.iter().filter(|part| part.trusted) {
        let same_type = other
            .holdings
            .others
            .iter()
            .filter(|same| same.trusted && same.kind == part.kind);
        for function in same_type.flat_map(|same| &same.functions) {
            if part.functions.contains(function) {
                violations.push(Violation::FunctionHeldTwice {
                    node: node.name.to_string(),
                    function: function.clone(),
                    owners: [one.owner.clone(), other.owner.clone()],
                });
            }
        }
    }
}

/// Finds devices of which one owner has exclusive use and another holds them, if both are decisions of the engine.
fn check_exclusions(node: &Node, keeper: &Held, other: &Held, violations: &mut Vec<Violation>) {
    if [keeper, other].iter().any(|held| held.origin == Origin::Fact) {
        return;
    }
    for (kind, exclusion) in &keeper.holdings.exclusions {
        let kept = devices(node, keeper, kind);
        for (device, location) in devices(node, other, kind) {
            let meets = |(kept, kept_location): &(String, Option<&DeviceLocation>)| {
                let shares_switch =
                    *kept_location == location && location.is_some_and(|location| location.switch.is_some());
                *kept == device || (*exclusion == Exclusion::Switch && shares_switch)
            };
            if kept.iter().any(meets) {
                violations.push(Violation::ExclusionBroken {
                    node: node.name.to_string(),
                    keeper: keeper.owner.clone(),
                    other: other.owner.clone(),
                    kind: kind.clone(),
                    device,
                });
            }
        }
    }
}

/// Devices of a type that an owner certainly holds, with their locations.
fn devices<'a>(node: &'a Node, held: &Held, kind: &DeviceKind) -> Vec<(String, Option<&'a DeviceLocation>)> {
    let mut devices = Vec::new();
    match kind {
        DeviceKind::Gpu => {
            let HeldGpus::Shares(shares) = &held.holdings.gpus else {
                return devices;
            };
            for gpu in node.gpus() {
                let is_held =
                    |reference: &GpuRef| matches!(reference, GpuRef::Uuid(uuid) if *uuid == gpu.uuid);
                if shares.iter().any(|share| share.trusted && is_held(&share.gpu)) {
                    devices.push((gpu.uuid.to_string(), gpu.attributes.location.as_ref()));
                }
            }
        }
        DeviceKind::Other(kind) => {
            let parts = || {
                held.holdings
                    .others
                    .iter()
                    .filter(|part| part.trusted && part.kind == *kind)
            };
            let of_type = node.types().iter().filter(|of_type| of_type.kind == *kind);
            for device in of_type.flat_map(|of_type| &of_type.devices) {
                let is_held =
                    |reference: &DeviceRef| matches!(reference, DeviceRef::Id(id) if *id == device.id);
                if parts().any(|part| is_held(&part.device)) {
                    devices.push((device.id.to_string(), device.attributes.location.as_ref()));
                }
            }
        }
    }
    devices
}
