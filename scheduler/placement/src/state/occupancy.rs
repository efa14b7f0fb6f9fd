//! Occupancy: the devices of a node that are in use, as rules about exclusive use, whole groups and virtual functions need it.

use crate::data::constraints::Exclusion;
use crate::data::holding::{Held, Hints, Holdings};
use crate::data::ident::FunctionId;
use crate::data::inventory::{GPUS, Inventory};
use crate::state::charges::{charges, charges_of_all};
use crate::state::hardware::{Location, Locations};
use crate::state::node::{Hint, Node};

/// The use of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceUse {
    /// True if an owner may hold a part of the device, or its containers may see it.
    pub(crate) is_held: bool,
    /// True if an owner may hold memory or computing power of the GPU, or any amount of a device of another type.
    pub(crate) is_occupied: bool,
    /// True if an owner has exclusive use of the device.
    pub(crate) is_exclusive: bool,
}

/// The use of all devices of a node, by the index of their type and in the order of its inventory.
#[derive(Debug, Default)]
pub(crate) struct Occupancy<'a> {
    /// The use of each device, by the index of its type and its own.
    uses: Vec<Vec<DeviceUse>>,
    /// Virtual functions that are held, by the index of the device's type.
    held_functions: Vec<Vec<&'a FunctionId>>,
}

/// A device that an owner may hold a part of, as far as is known.
struct DeviceInUse {
    type_at: usize,
    device: usize,
    is_occupied: bool,
}

impl<'a> Occupancy<'a> {
    /// The occupancy by all holdings and the hints that count.
    pub(crate) fn new(node: &'a Node, hints: Hints<'_>) -> Self {
        let (Some(inventory), Some(hardware)) = (&node.inventory, &node.hardware) else {
            return Self::default();
        };
        let mut uses = Vec::with_capacity(inventory.n_types());
        for (_, devices) in inventory.types() {
            uses.push(vec![DeviceUse::default(); devices.len()]);
        }
        let held_functions = vec![Vec::new(); uses.len()];
        let mut occupancy = Self { uses, held_functions };
        for held in &node.held {
            let in_use = devices_of_held(node, inventory, held);
            occupancy.add(inventory, &hardware.locations, &held.holdings, &in_use);
        }
        for hint in node.hints.iter().filter(|hint| hints.counts(&hint.owner)) {
            let in_use = devices_of_hint(inventory, hint);
            occupancy.add(inventory, &hardware.locations, &hint.holdings, &in_use);
        }
        occupancy
    }

    /// Adds the devices of one owner, its virtual functions and its exclusive use.
    fn add(
        &mut self,
        inventory: &Inventory,
        locations: &Locations,
        holdings: &'a Holdings,
        in_use: &[DeviceInUse],
    ) {
        for one in in_use {
            let uses = self.uses.get_mut(one.type_at);
            if let Some(device) = uses.and_then(|uses| uses.get_mut(one.device)) {
                // An owner that only sees the device, without an amount of it, keeps others from its exclusive use too.
                device.is_held = true;
                device.is_occupied |= one.is_occupied;
            }
        }
        let parts = holdings.parts.iter();
        for part in parts.filter(|part| !part.virtual_functions.is_empty()) {
            let type_at = inventory.type_index(&part.kind);
            if let Some(held) = type_at.and_then(|at| self.held_functions.get_mut(at)) {
                // Virtual functions have IDs of their own, so they are held even if the device of the part is not found.
                held.extend(&part.virtual_functions);
            }
        }
        for (kind, exclusion) in &holdings.exclusions {
            if let Some(type_at) = inventory.type_index(kind)
                && let Some(uses) = self.uses.get_mut(type_at)
            {
                let own = in_use.iter().filter(|one| one.type_at == type_at);
                let locations = locations.of_type(type_at);
                exclude(uses, locations, own.map(|one| one.device), *exclusion);
            }
        }
    }

    /// The use of each device of the type at an index.
    pub(crate) fn of_type(&self, type_at: usize) -> &[DeviceUse] {
        self.uses.get(type_at).map_or(&[], Vec::as_slice)
    }

    /// The virtual functions of the type at an index that are held.
    pub(crate) fn held_functions_of(&self, type_at: usize) -> &[&'a FunctionId] {
        self.held_functions.get(type_at).map_or(&[], Vec::as_slice)
    }
}

/// Records an owner's exclusive use of its devices of one type, or of all devices of the type on their switches.
fn exclude(
    uses: &mut [DeviceUse],
    locations: &[Location],
    own: impl Iterator<Item = usize>,
    exclusion: Exclusion,
) {
    for at in own {
        if let Some(device) = uses.get_mut(at) {
            device.is_exclusive = true;
        }
        let Some(own) = locations.get(at).filter(|_| exclusion == Exclusion::Switch) else {
            continue;
        };
        for (device, location) in uses.iter_mut().zip(locations) {
            device.is_exclusive |= location.switch == own.switch;
        }
    }
}

/// Devices that an owner may hold a part of, or to which its pending holding is charged.
fn devices_of_held(node: &Node, inventory: &Inventory, held: &Held) -> Vec<DeviceInUse> {
    let mut in_use = Vec::new();
    let mut add = |type_at, device, is_occupied| {
        in_use.push(DeviceInUse {
            type_at,
            device,
            is_occupied,
        });
    };
    if held.holdings.pending.is_some() {
        // A pending holding is charged where the holdings of all owners leave room.
        for (other, charge) in charges_of_all(inventory, &node.held) {
            if other.owner == held.owner {
                add(charge.type_at, charge.device, charge.occupies());
            }
        }
    } else {
        for charge in charges(inventory, &held.holdings) {
            add(charge.type_at, charge.device, charge.occupies());
        }
    }
    if held.holdings.n_unknown_gpus > 0 {
        for (at, _) in inventory.for_vendor() {
            // Not marked as occupied: only the number of these GPUs in use is known, which `n_unknown_whole` counts.
            add(GPUS, at, false);
        }
    }
    in_use
}

/// Devices that an owner will hold a part of once its hint becomes a reservation.
fn devices_of_hint(inventory: &Inventory, hint: &Hint) -> Vec<DeviceInUse> {
    let mut in_use = Vec::new();
    for (device, amounts) in &hint.gpu_charges {
        in_use.push(DeviceInUse {
            type_at: GPUS,
            device: *device,
            is_occupied: amounts.occupies(),
        });
    }
    for charge in charges(inventory, &hint.holdings).filter(|charge| charge.type_at != GPUS) {
        in_use.push(DeviceInUse {
            type_at: charge.type_at,
            device: charge.device,
            is_occupied: true,
        });
    }
    in_use
}

/// Returns true if the device at an index may be taken: no other owner has exclusive use of it, and the exclusive use that the
/// request asks for (`own`) is possible.
pub(crate) fn permits(own: Option<Exclusion>, at: usize, locations: &[Location], uses: &[DeviceUse]) -> bool {
    // The exclusive use of another owner holds, whether or not this request asks for any.
    let Some(device) = uses.get(at).filter(|device| !device.is_exclusive) else {
        return false;
    };
    match own {
        None => true,
        Some(Exclusion::Device) => !device.is_held,
        Some(Exclusion::Switch) => {
            let switch = locations.get(at).map(|location| location.switch);
            for (location, device) in locations.iter().zip(uses) {
                if Some(location.switch) == switch && device.is_held {
                    return false;
                }
            }
            true
        }
    }
}
