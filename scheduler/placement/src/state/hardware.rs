//! Hardware classes: inventories without identifiers of devices. Nodes that were bought together are of one class.
//!
//! A class has the location of every device as small numbers, so that the choice of devices compares numbers and no texts.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::data::device::{DeviceAttributes, DeviceLocation};
use crate::data::inventory::Inventory;

/// The location of a device. A device of unknown location shares its switch and NUMA node with no other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Location {
    /// Number of the device's PCIe switch; the same switch name below two NUMA nodes is two switches.
    pub(crate) switch: u16,
    /// Number of the device's NUMA node.
    pub(crate) numa: u16,
    /// True if the node reports anything about the device's location.
    pub(crate) is_reported: bool,
    /// True if the switch is known.
    pub(crate) knows_switch: bool,
    /// True if the NUMA node is known, or at least that devices of the same switch share it.
    pub(crate) knows_numa: bool,
}

/// The hardware of a node.
#[derive(Debug)]
pub(crate) struct HardwareClass {
    /// The inventory without identifiers.
    inventory: Arc<Inventory>,
    /// The locations of all devices, by the index of their type and in the order of the inventory.
    locations: Vec<Vec<Location>>,
    /// True if the node reports partitions, links, or attributes of some device.
    pub(crate) has_topology: bool,
    /// Unique among all classes that have ever existed.
    pub(crate) number: u64,
}

impl HardwareClass {
    /// The class of an inventory without identifiers.
    fn new(inventory: Arc<Inventory>, number: u64) -> Self {
        let mut has_topology = inventory.partitions.is_some() || !inventory.links.is_empty();
        // Switches and NUMA nodes are numbered across all device types.
        let mut numbers = LocationNumbers::default();
        let mut by_type = Vec::with_capacity(inventory.n_types());
        for (_, devices) in inventory.types() {
            let mut locations = Vec::with_capacity(devices.len());
            for device in devices {
                locations.push(numbers.locate(&device.attributes));
                has_topology |= device.attributes != DeviceAttributes::default();
            }
            by_type.push(locations);
        }
        Self {
            locations: by_type,
            has_topology,
            number,
            inventory,
        }
    }

    /// The locations of the devices of the type at an index.
    pub(crate) fn locations_of(&self, type_at: usize) -> &[Location] {
        self.locations.get(type_at).map_or(&[], Vec::as_slice)
    }
}

/// The hardware classes of all nodes, by their inventories.
#[derive(Debug, Default)]
pub(crate) struct HardwareClasses {
    known: FxHashMap<Arc<Inventory>, Arc<HardwareClass>>,
    /// The number that the next new class gets.
    next_number: u64,
}

impl HardwareClasses {
    /// The class of an inventory.
    pub(crate) fn class_of(&mut self, inventory: &Inventory) -> Arc<HardwareClass> {
        let inventory = without_identifiers(inventory);
        if let Some(known) = self.known.get(&inventory) {
            return Arc::clone(known);
        }
        let inventory = Arc::new(inventory);
        let class = Arc::new(HardwareClass::new(Arc::clone(&inventory), self.next_number));
        // Numbers are never reused, so that equivalence keys of a dropped class match no later one.
        self.next_number += 1;
        self.known.insert(inventory, Arc::clone(&class));
        class
    }

    /// Drops a class that a node had, if no other node has it.
    pub(crate) fn drop_unused(&mut self, class: &Arc<HardwareClass>) {
        // The map and the caller have one reference each.
        if Arc::strong_count(class) == 2 {
            self.known.remove(&class.inventory);
        }
    }
}

/// The inventory without the identifiers by which one node's devices differ from another's.
fn without_identifiers(inventory: &Inventory) -> Inventory {
    let mut inventory = inventory.clone();
    let others = inventory.other_devices.iter_mut().flatten();
    let gpus = inventory.gpus.iter_mut();
    for device in gpus.chain(others.flat_map(|of_type| of_type.devices.iter_mut())) {
        // Amounts, health and attributes stay: answers depend on them.
        device.id = "".into();
        for group in &mut device.attributes.function_groups {
            for function in &mut group.functions {
                (function.id, function.minor) = ("".into(), 0);
            }
        }
    }
    inventory
}

/// Assigns numbers to switches and NUMA nodes; `None` stands for a device of unknown location.
#[derive(Default)]
struct LocationNumbers<'a> {
    switches: Vec<Option<&'a DeviceLocation>>,
    numas: Vec<Option<&'a DeviceLocation>>,
}

impl<'a> LocationNumbers<'a> {
    /// The location of a device, with new numbers for a switch or NUMA node that is seen for the first time.
    fn locate(&mut self, attributes: &'a DeviceAttributes) -> Location {
        let location = attributes.location.as_ref();
        let with_switch = location.filter(|location| location.switch.is_some());
        // Devices of one switch are on one NUMA node, even where the node does not report its number.
        let with_numa = location.filter(|location| location.numa.is_some() || location.switch.is_some());
        Location {
            switch: number(&mut self.switches, with_switch, PartialEq::eq),
            numa: number(&mut self.numas, with_numa, is_same_numa),
            is_reported: location.is_some(),
            knows_switch: with_switch.is_some(),
            knows_numa: with_numa.is_some(),
        }
    }
}

/// Returns true if two locations are on one NUMA node. Devices whose NUMA node is not reported share one if they share their
/// switch.
fn is_same_numa(one: &DeviceLocation, other: &DeviceLocation) -> bool {
    one.numa == other.numa && (one.numa.is_some() || one.switch == other.switch)
}

/// The number of a location that is in the list, else a new number; an unknown location gets a new number each time.
fn number<'a>(
    known: &mut Vec<Option<&'a DeviceLocation>>,
    location: Option<&'a DeviceLocation>,
    is_same: fn(&DeviceLocation, &DeviceLocation) -> bool,
) -> u16 {
    // A machine has few switches and NUMA nodes, so a search through the list needs no map.
    let mut others = known.iter().map(|other| location.zip(*other));
    let found = others.position(|both| both.is_some_and(|(one, other)| is_same(one, other)));
    let at = found.unwrap_or(known.len());
    if found.is_none() {
        // An unknown location is listed too, so that no later device gets its number.
        known.push(location);
    }
    u16::try_from(at).unwrap_or(u16::MAX)
}
