//! Compares what owners hold two by two: virtual functions and exclusive use.

use crate::brief::Brief;
use crate::check::Violation;
use crate::class::DeviceRef;
use crate::fleet::Fleet;
use crate::holding::{GpuRef, Holding, Origin};
use crate::node::{Held, Node};
use crate::traits::{Place, Traits};
use crate::wishes::{Exclusion, Kind};

pub(super) fn check_pairs(node: &Node) -> Vec<Violation> {
    let mut violations: Vec<Violation> = Vec::new();
    for (at, one) in node.held.iter().enumerate() {
        for other in node.held.iter().skip(at + 1) {
            violations.extend(functions_of_both(node, one, other));
            violations.extend(broken(node, one, other));
            violations.extend(broken(node, other, one));
        }
    }
    violations
}

/// What is kept ready besides rows.
pub(super) fn check_derived(fleet: &Fleet, node: &Node, generation: u32, brief: Brief) -> Vec<Violation> {
    let mut violations: Vec<Violation> = Vec::new();
    let kept = brief
        .state
        .and_then(|id| fleet.states.get(id))
        .map(|(state, _)| state);
    if kept != node.state().as_ref() {
        violations.push(differs(
            node,
            "the state that is kept to compare nodes by is not the node's",
        ));
    }
    let told = (brief.is_there, brief.generation, brief.has_hints, brief.has_rules);
    if told != (true, generation, !node.hints.is_empty(), node.has_rules) {
        violations.push(differs(node, "what is told of it in brief is not so"));
    }
    let held = node.held.iter().map(|held| &held.holdings.exclusions);
    let any = held
        .chain(node.hints.iter().map(|hint| &hint.placement.exclusions))
        .any(|exclusions| !exclusions.is_empty());
    let binds = node
        .inventory
        .as_ref()
        .and_then(|inventory| inventory.partitions.as_ref())
        .is_some_and(|table| table.is_binding);
    if node.has_rules != (any || binds) {
        violations.push(differs(node, "it is not noted whether there are rules"));
    }
    violations
}

fn differs(node: &Node, detail: &str) -> Violation {
    Violation::RowDiffers {
        node: node.name.to_string(),
        detail: detail.to_owned(),
    }
}

/// Virtual functions that two owners certainly hold.
fn functions_of_both(node: &Node, one: &Held, other: &Held) -> Vec<Violation> {
    let mut violations = Vec::new();
    for part in one.holdings.others.iter().filter(|part| part.trusted) {
        for same in other
            .holdings
            .others
            .iter()
            .filter(|same| same.trusted && same.kind == part.kind)
        {
            for function in part
                .functions
                .iter()
                .filter(|function| same.functions.contains(function))
            {
                violations.push(Violation::FunctionHeldTwice {
                    node: node.name.to_string(),
                    function: function.clone(),
                    owners: [one.owner.clone(), other.owner.clone()],
                });
            }
        }
    }
    violations
}

/// Devices that one owner keeps and another holds, if both were decided here.
fn broken(node: &Node, keeper: &Held, other: &Held) -> Vec<Violation> {
    if [keeper, other].iter().any(|held| held.origin == Origin::Fact) {
        return Vec::new();
    }
    let mut violations = Vec::new();
    for (kind, exclusion) in &keeper.holdings.exclusions {
        let kept = devices(node, keeper, kind);
        let meets = |(device, place): &(String, Option<&Place>)| {
            kept.iter().any(|(kept, kept_place)| match exclusion {
                Exclusion::Device => kept == device,
                Exclusion::Switch => {
                    kept == device
                        || (kept_place == place && place.is_some_and(|place| place.switch.is_some()))
                }
            })
        };
        violations.extend(
            devices(node, other, kind)
                .iter()
                .filter(|device| meets(device))
                .map(|(device, _)| Violation::ExclusionBroken {
                    node: node.name.to_string(),
                    keeper: keeper.owner.clone(),
                    other: other.owner.clone(),
                    kind: kind.clone(),
                    device: device.clone(),
                }),
        );
    }
    violations
}

/// Devices of a type that an owner certainly holds, with where they sit.
fn devices<'a>(node: &'a Node, held: &Held, kind: &Kind) -> Vec<(String, Option<&'a Place>)> {
    fn place(traits: &Traits) -> Option<&Place> {
        traits.place.as_ref()
    }
    match kind {
        Kind::Gpu => {
            let Holding::Shares(shares) = &held.holdings.gpus else {
                return Vec::new();
            };
            let is_held = |uuid| {
                shares
                    .iter()
                    .any(|share| share.trusted && matches!(&share.gpu, GpuRef::Uuid(held) if held == uuid))
            };
            let gpus = node.gpus().iter().filter(|gpu| is_held(&gpu.uuid));
            gpus.map(|gpu| (gpu.uuid.to_string(), place(&gpu.traits)))
                .collect()
        }
        Kind::Other(kind) => {
            let parts = || {
                held.holdings
                    .others
                    .iter()
                    .filter(|part| part.trusted && part.kind == *kind)
            };
            let is_held = |id| parts().any(|part| matches!(&part.device, DeviceRef::Id(held) if held == id));
            let devices = node
                .classes()
                .iter()
                .filter(|class| class.kind == *kind)
                .flat_map(|class| &class.devices);
            devices
                .filter(|device| is_held(&device.id))
                .map(|device| (device.id.to_string(), place(&device.traits)))
                .collect()
        }
    }
}
