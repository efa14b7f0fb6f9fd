//! Occupancy: the devices of a node that are in use, as rules about exclusive use, whole groups and virtual functions need it.

use crate::data::constraints::Exclusion;
use crate::data::holding::{Hints, Holdings};
use crate::data::ident::FunctionId;
use crate::data::inventory::GPUS;
use crate::state::charges::{charges, charges_of_all};
use crate::state::hardware::Location;
use crate::state::node::Node;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceUse {
    /// True if an owner may hold a part of the device, or its containers may see it.
    pub(crate) is_held: bool,
    /// True if an owner may hold memory or computing power of the GPU, or any amount of a device of another type.
    pub(crate) is_occupied: bool,
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

/// A device that an owner may hold a part of: its holdings, the index of the type, its own, and true if it is occupied.
type InUse<'a> = (&'a Holdings, usize, usize, bool);

impl<'a> Occupancy<'a> {
    /// The occupancy by all holdings and the hints that count.
    pub(crate) fn new(node: &'a Node, hints: Hints<'a>) -> Self {
        let inventory = &node.inventory;
        let Some(hardware) = &node.hardware else {
            return Self::default();
        };
        let mut occupancy = Self::default();
        for (_, devices) in inventory.types() {
            occupancy.uses.push(vec![DeviceUse::default(); devices.len()]);
            occupancy.held_functions.push(Vec::new());
        }
        let in_use = devices_in_use(node, hints);
        for (_, type_at, device, is_occupied) in &in_use {
            if let Some(uses) = occupancy.uses.get_mut(*type_at)
                && let Some(device) = uses.get_mut(*device)
            {
                // An owner that only sees the device, without an amount of it, keeps others from its exclusive use too.
                device.is_held = true;
                device.is_occupied |= is_occupied;
            }
        }
        let held = node.held.iter().map(|held| &held.holdings);
        let hinted = node.counted_hints(hints).map(|hint| &hint.holdings);
        for holdings in held.chain(hinted) {
            for part in &holdings.parts {
                if let Some(type_at) = inventory.type_index(&part.kind)
                    && let Some(held) = occupancy.held_functions.get_mut(type_at)
                {
                    // Virtual functions have IDs of their own, so they are held even if the device of the part is not found.
                    held.extend(&part.virtual_functions);
                }
            }
            for (kind, exclusion) in &holdings.exclusions {
                let Some(type_at) = inventory.type_index(kind) else {
                    continue;
                };
                let Some(uses) = occupancy.uses.get_mut(type_at) else {
                    continue;
                };
                let locations = hardware.locations_of(type_at);
                for (holder, of_type, device, _) in &in_use {
                    // By address, since several owners may have equal holdings.
                    if std::ptr::eq(*holder, holdings) && *of_type == type_at {
                        exclude(uses, locations, *device, *exclusion);
                    }
                }
            }
        }
        occupancy
    }

    pub(crate) fn of_type(&self, type_at: usize) -> &[DeviceUse] {
        self.uses.get(type_at).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn held_functions_of(&self, type_at: usize) -> &[&'a FunctionId] {
        self.held_functions.get(type_at).map_or(&[], Vec::as_slice)
    }
}

/// Records an owner's exclusive use of its device at an index, or of all devices of the type on the device's switch.
fn exclude(uses: &mut [DeviceUse], locations: &[Location], at: usize, exclusion: Exclusion) {
    if let Some(device) = uses.get_mut(at) {
        device.is_exclusive = true;
    }
    if exclusion == Exclusion::Switch
        && let Some(own) = locations.get(at)
    {
        for (device, location) in uses.iter_mut().zip(locations) {
            device.is_exclusive |= location.switch == own.switch;
        }
    }
}

/// The devices that holdings, and the hints that count, may be of.
fn devices_in_use<'a>(node: &'a Node, hints: Hints<'a>) -> Vec<InUse<'a>> {
    let inventory = &node.inventory;
    let mut in_use = Vec::with_capacity(node.held.len());
    for (held, charge) in charges_of_all(inventory, &node.held) {
        in_use.push((&held.holdings, charge.type_at, charge.device, charge.occupies()));
    }
    for held in node.held.iter().filter(|held| held.holdings.n_unknown_gpus > 0) {
        for (at, _) in inventory.for_vendor() {
            // Not marked as occupied: only the number of these GPUs in use is known, which `n_unknown_whole` counts.
            in_use.push((&held.holdings, GPUS, at, false));
        }
    }
    for hint in node.counted_hints(hints) {
        for (device, amounts) in &hint.gpu_charges {
            in_use.push((&hint.holdings, GPUS, *device, amounts.occupies()));
        }
        for charge in charges(inventory, &hint.holdings).filter(|charge| charge.type_at != GPUS) {
            in_use.push((&hint.holdings, charge.type_at, charge.device, true));
        }
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
