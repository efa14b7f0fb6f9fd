//! Compares holdings two by two (virtual functions, exclusive use), and nodes with their summary, class and flag of rules.

use super::{Violation, amounts, differs};
use crate::data::constraints::Exclusion;
use crate::data::device::{Device, DeviceRef};
use crate::data::holding::{Held, Hints, Origin};
use crate::data::ident::{DeviceType, NodeId};
use crate::state::equivalence::{has_class, key_with};
use crate::state::node::Node;
use crate::state::nodes::Nodes;

/// Checks every two holdings of a node: no two owners hold one virtual function, or a device of which one has exclusive use.
pub(super) fn check_pairs(node: &Node) -> Vec<Violation> {
    let mut violations: Vec<Violation> = Vec::new();
    for (at, one) in node.held.iter().enumerate() {
        for other in node.held.iter().skip(at + 1) {
            check_functions(one, other, &mut violations);
            check_exclusions(node, one, other, &mut violations);
            // In both directions, since only the owner with exclusive use has the rule in its holdings.
            check_exclusions(node, other, one, &mut violations);
        }
    }
    violations
}

/// Checks the summary, the equivalence class and the rules flag of a node.
pub(super) fn check_derived(nodes: &Nodes, id: NodeId, node: &Node) -> Vec<Violation> {
    let mut violations: Vec<Violation> = Vec::new();
    let summary = nodes.summaries.get(id.index as usize);
    let class = summary.and_then(|summary| summary.class.as_deref());
    if class != has_class(node).then(|| key_with(node, Hints::Ignore)).as_ref() {
        violations.push(differs(node, "its equivalence class does not match it"));
    }
    let has_hints = !node.hints.is_empty();
    if summary.is_none_or(|summary| !summary.exists || summary.has_hints != has_hints) {
        violations.push(differs(node, "its summary does not match it"));
    }
    let any_held = node.held.iter().any(|held| !held.holdings.exclusions.is_empty());
    let any_hinted = node.hints.iter().any(|hint| !hint.holdings.exclusions.is_empty());
    let partitions = node.inventory.partitions.as_ref();
    let is_binding = partitions.is_some_and(|table| table.is_binding);
    if node.has_rules != (any_held || any_hinted || is_binding) {
        violations.push(differs(node, "the flag for rules is wrong"));
    }
    violations
}

/// Finds virtual functions that two owners certainly hold.
fn check_functions(one: &Held, other: &Held, violations: &mut Vec<Violation>) {
    for part in one.holdings.parts.iter().filter(|part| part.trusted) {
        for same in &other.holdings.parts {
            if !same.trusted || same.kind != part.kind {
                continue;
            }
            let functions = same.virtual_functions.iter();
            for function in functions.filter(|function| part.virtual_functions.contains(function)) {
                let text = format!("{} and {} hold function {function}", one.owner, other.owner);
                violations.push(Violation::FunctionHeldTwice(text));
            }
        }
    }
}

/// Finds devices of which one owner has exclusive use and another holds them, if both are decisions of the engine.
fn check_exclusions(node: &Node, keeper: &Held, other: &Held, violations: &mut Vec<Violation>) {
    // Facts, which are read from records of pods, stand whether or not a rule allows them.
    if [keeper, other].iter().any(|held| held.origin == Origin::Fact) {
        return;
    }
    for (kind, exclusion) in &keeper.holdings.exclusions {
        let kept = held_devices(node, keeper, kind);
        for device in held_devices(node, other, kind) {
            if kept.iter().any(|kept| excludes(*exclusion, kept, device)) {
                let (keeper, other) = (&keeper.owner, &other.owner);
                let text = format!("{other} holds {kind} {}, which {keeper} excludes", device.id);
                violations.push(Violation::ExclusionBroken(text));
            }
        }
    }
}

/// Returns true if the exclusive use of `kept` forbids others the use of `other`, a device of the same type: it is the same
/// device, or with [`Exclusion::Switch`] one on the same PCIe switch.
fn excludes(exclusion: Exclusion, kept: &Device, other: &Device) -> bool {
    let location = &kept.attributes.location;
    let is_switch_known = location
        .as_ref()
        .is_some_and(|location| location.switch.is_some());
    // The name of a switch is unique only within the rest of the location.
    let is_on_same_switch = is_switch_known && *location == other.attributes.location;
    kept.id == other.id || (exclusion == Exclusion::Switch && is_on_same_switch)
}

/// Devices of a type that an owner certainly holds.
fn held_devices<'a>(node: &'a Node, held: &Held, kind: &DeviceType) -> Vec<&'a Device> {
    let mut devices = Vec::new();
    for device in amounts::devices(node, kind) {
        // A minor is of a device for certain only until the devices of the node change.
        for part in &held.holdings.parts {
            let is_device = matches!(&part.device, DeviceRef::Id(id) if *id == device.id);
            if part.trusted && part.kind == *kind && is_device {
                devices.push(device);
                break;
            }
        }
    }
    devices
}
