//! Occupancy: which devices of a node are in use, as far as exclusive use, whole groups and virtual functions depend on it.

use crate::data::constraints::{DeviceKind, Exclusion, widest};
use crate::data::holding::{Held, HeldGpus, Hints, Holdings};
use crate::data::ident::FunctionId;
use crate::data::inventory::Inventory;
use crate::state::charges::{charges, charges_of_all};
use crate::state::hardware::{Location, Locations};
use crate::state::node::Node;

/// The use of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceUse {
    /// True if an owner may hold a part of it, or see it.
    pub(crate) is_held: bool,
    /// True if an owner may hold memory or computing power of it, or any amount of a device of another type.
    pub(crate) is_occupied: bool,
    /// True if an owner has exclusive use of it.
    pub(crate) is_exclusive: bool,
}

/// The use of all devices of a node, in the order of its inventory.
#[derive(Debug, Default)]
pub(crate) struct Occupancy<'a> {
    pub(crate) gpus: Vec<DeviceUse>,
    pub(crate) others: Vec<Vec<DeviceUse>>,
    /// Virtual functions that are held, by type.
    pub(crate) functions: Vec<Vec<&'a FunctionId>>,
}

impl<'a> Occupancy<'a> {
    /// The occupancy with the hints that count.
    pub(crate) fn of(node: &'a Node, hints: Hints<'_>) -> Self {
        let (Some(inventory), Some(hardware)) = (&node.inventory, &node.hardware) else {
            return Self::default();
        };
        let locations = &hardware.locations;
        let mut occupancy = Self::empty(inventory);
        for (gpu, flags) in occupancy.gpus.iter_mut().zip(&node.flags) {
            gpu.is_occupied = flags.is_occupied;
        }
        // Holdings add who may see a device, and exclusive use, which amounts do not show.
        for held in &node.held {
            let gpus = gpus_of(node, inventory, held);
            occupancy.add(inventory, locations, &held.holdings, &gpus);
        }
        for hint in node.hints.iter().filter(|hint| hints.counts(&hint.owner)) {
            let gpus: Vec<usize> = hint.charges.iter().map(|(gpu, _)| *gpu).collect();
            occupancy.add(inventory, locations, &hint.holdings, &gpus);
            // The flags of the node count what is held; hints come on top.
            for (gpu, amounts) in &hint.charges {
                if let Some(gpu) = occupancy.gpus.get_mut(*gpu) {
                    gpu.is_occupied |= amounts.occupies();
                }
            }
        }
        occupancy
    }

    /// Adds an owner's devices: the GPUs at these indices, and parts of devices of other types.
    fn add(&mut self, inventory: &Inventory, locations: &Locations, holdings: &'a Holdings, gpus: &[usize]) {
        let exclusion = |kind: &DeviceKind| widest(&holdings.exclusions, kind);
        mark(&mut self.gpus, &locations.gpus, gpus, exclusion(&DeviceKind::Gpu));
        if holdings.others.is_empty() {
            return;
        }
        for (type_at, of_type) in inventory.types().iter().enumerate() {
            let mut held = Vec::new();
            for part in holdings.others.iter().filter(|part| part.kind == of_type.kind) {
                for (at, device) in of_type.devices.iter().enumerate() {
                    if of_type.may_be(&part.device, device) {
                        held.push(at);
                    }
                }
                if let Some(functions) = self.functions.get_mut(type_at) {
                    functions.extend(&part.functions);
                }
            }
            let exclusion = exclusion(&DeviceKind::Other(of_type.kind.clone()));
            let Some(uses) = self.others.get_mut(type_at) else {
                continue;
            };
            mark(uses, locations.of_type(type_at), &held, exclusion);
            for at in held {
                if let Some(device) = uses.get_mut(at) {
                    device.is_occupied = true;
                }
            }
        }
    }

    fn empty(inventory: &Inventory) -> Self {
        let types = inventory.types();
        Self {
            gpus: vec![DeviceUse::default(); inventory.gpus.len()],
            others: types
                .iter()
                .map(|of_type| vec![DeviceUse::default(); of_type.devices.len()])
                .collect(),
            functions: vec![Vec::new(); types.len()],
        }
    }

    /// The use of the devices of the type at an index.
    pub(crate) fn of_type(&self, at: usize) -> &[DeviceUse] {
        self.others.get(at).map_or(&[], |uses| uses)
    }

    /// The virtual functions of the type at an index that are held.
    pub(crate) fn functions_of(&self, at: usize) -> &[&'a FunctionId] {
        self.functions.get(at).map_or(&[], |functions| functions)
    }
}

/// Enters that an owner may hold some devices of a type, and its exclusive use of these or of their switches.
fn mark(uses: &mut [DeviceUse], locations: &[Location], held: &[usize], exclusion: Option<Exclusion>) {
    for at in held {
        if let Some(device) = uses.get_mut(*at) {
            device.is_held = true;
            device.is_exclusive |= exclusion == Some(Exclusion::Device);
        }
    }
    if exclusion == Some(Exclusion::Switch) {
        for (device, location) in uses.iter_mut().zip(locations) {
            let mut held = held.iter().filter_map(|at| locations.get(*at));
            device.is_exclusive |= held.any(|held| held.switch == location.switch);
        }
    }
}

/// GPUs that an owner may hold a part of, as far as is known, or to which its pending holding is charged.
fn gpus_of(node: &Node, inventory: &Inventory, held: &Held) -> Vec<usize> {
    let mut gpus: Vec<usize> = Vec::new();
    if let HeldGpus::Pending(_) = held.holdings.gpus {
        let all = charges_of_all(inventory, &node.held);
        let own = all.iter().filter(|(other, _)| other.owner == held.owner);
        gpus.extend(own.map(|(_, charge)| charge.gpu));
    } else {
        gpus.extend(charges(inventory, &held.holdings.gpus).map(|charge| charge.gpu));
    }
    if held.holdings.unknown_whole > 0 {
        gpus.extend(inventory.for_vendor().map(|(at, _)| at));
    }
    gpus
}

/// Returns true if exclusive use, of other owners and of the asking one, leaves the device at an index.
pub(crate) fn permits(own: Option<Exclusion>, at: usize, locations: &[Location], uses: &[DeviceUse]) -> bool {
    let Some(device) = uses.get(at).filter(|device| !device.is_exclusive) else {
        return false;
    };
    match own {
        None => true,
        Some(Exclusion::Device) => !device.is_held,
        Some(Exclusion::Switch) => {
            let switch = locations.get(at).map(|location| location.switch);
            let is_held_on_switch = |(location, device): (&Location, &DeviceUse)| {
                Some(location.switch) == switch && device.is_held
            };
            !locations.iter().zip(uses).any(is_held_on_switch)
        }
    }
}
