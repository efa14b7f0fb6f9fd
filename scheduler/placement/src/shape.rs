//! What a node has, apart from names and from what is taken: nodes that were bought together share it.
//!
//! Says where every device sits in small numbers, so that nothing compares texts while devices are chosen.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHasher};

use crate::gpu::Inventory;
use crate::traits::{Place, Traits};

/// Where a device sits. What is not known of a device is its own: it shares no switch and no NUMA node with any other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spot {
    /// Its PCIe switch, below one NUMA node.
    pub(crate) switch: u16,
    /// Its NUMA node.
    pub(crate) numa: u16,
    /// Whether the node says anything about its place.
    pub(crate) is_placed: bool,
    /// Whether the switch is known.
    pub(crate) knows_switch: bool,
    /// Whether the NUMA node is known, or at least that devices of the same switch share it.
    pub(crate) knows_numa: bool,
}

/// Where all devices of a node sit, in the order of its inventory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Spots {
    pub(crate) gpus: Box<[Spot]>,
    /// By type, as the inventory has them.
    pub(crate) others: Box<[Box<[Spot]>]>,
}

/// What a node has.
#[derive(Debug)]
pub(crate) struct Shape {
    /// Without UUIDs and IDs.
    inventory: Inventory,
    pub(crate) spots: Spots,
    /// Whether devices are told apart by more than what is free of them.
    pub(crate) has_topology: bool,
    /// No other shape has had it.
    pub(crate) number: u64,
    hash: u64,
}

/// All shapes that nodes have, each once.
#[derive(Debug, Default)]
pub(crate) struct Shapes {
    by_hash: FxHashMap<u64, Vec<Arc<Shape>>>,
    n_numbers: u64,
}

impl Shapes {
    /// The shape of an inventory.
    pub(crate) fn of(&mut self, inventory: &Inventory) -> Arc<Shape> {
        let shape = Shape::of(inventory, self.n_numbers);
        let same_hash = self.by_hash.entry(shape.hash).or_default();
        if let Some(known) = same_hash.iter().find(|known| known.inventory == shape.inventory) {
            return Arc::clone(known);
        }
        self.n_numbers += 1;
        let shape = Arc::new(shape);
        same_hash.push(Arc::clone(&shape));
        shape
    }

    /// Lets go of a shape that a node had, if no other node has it.
    pub(crate) fn drop_unused(&mut self, shape: Option<Arc<Shape>>) {
        let Some(hash) = shape.map(|shape| shape.hash) else {
            return;
        };
        if let Some(same_hash) = self.by_hash.get_mut(&hash) {
            same_hash.retain(|known| Arc::strong_count(known) > 1);
            if same_hash.is_empty() {
                self.by_hash.remove(&hash);
            }
        }
    }
}

impl Shape {
    fn of(inventory: &Inventory, number: u64) -> Self {
        let inventory = nameless(inventory);
        let mut hasher = FxHasher::default();
        inventory.hash(&mut hasher);
        let spots = Spots::of(&inventory);
        let devices = inventory
            .classes
            .iter()
            .flatten()
            .flat_map(|class| &class.devices)
            .map(|device| &device.traits);
        let mut traits = inventory.gpus.iter().map(|gpu| &gpu.traits).chain(devices);
        let has_topology = traits.any(|traits| *traits != Traits::default())
            || inventory.partitions.is_some()
            || !inventory.links.is_empty();
        Self {
            spots,
            has_topology,
            number,
            hash: hasher.finish(),
            inventory,
        }
    }
}

/// The same inventory without what tells one node's devices from another's.
fn nameless(inventory: &Inventory) -> Inventory {
    let mut nameless = inventory.clone();
    let function = crate::ident::FunctionId::from("");
    let without_ids = |traits: &mut Traits| {
        let functions = traits.functions.iter_mut().flat_map(|group| &mut group.functions);
        functions.for_each(|one| (one.id, one.minor) = (function.clone(), 0));
    };
    for gpu in &mut nameless.gpus {
        gpu.uuid = "".into();
        without_ids(&mut gpu.traits);
    }
    for device in nameless
        .classes
        .iter_mut()
        .flatten()
        .flat_map(|class| &mut class.devices)
    {
        device.id = "".into();
        without_ids(&mut device.traits);
    }
    nameless
}

/// Numbers that have been given to switches and NUMA nodes.
#[derive(Default)]
struct Numbers<'a> {
    switches: Vec<Option<&'a Place>>,
    numas: Vec<Option<&'a Place>>,
}

impl<'a> Numbers<'a> {
    fn spot(&mut self, traits: &'a Traits) -> Spot {
        let place = traits.place.as_ref();
        let (with_switch, with_numa) = (
            place.filter(|place| place.switch.is_some()),
            place.filter(|place| place.numa.is_some() || place.switch.is_some()),
        );
        let is_same_numa = |one: &Place, other: &Place| {
            one.numa == other.numa && (one.numa.is_some() || one.switch == other.switch)
        };
        Spot {
            switch: number(&mut self.switches, with_switch, |one, other| one == other),
            numa: number(&mut self.numas, with_numa, is_same_numa),
            is_placed: place.is_some(),
            knows_switch: with_switch.is_some(),
            knows_numa: with_numa.is_some(),
        }
    }
}

/// The number of a place among those that have one; a new one for an unknown place.
fn number<'a>(
    known: &mut Vec<Option<&'a Place>>,
    place: Option<&'a Place>,
    is_same: impl Fn(&Place, &Place) -> bool,
) -> u16 {
    let same = |other: Option<&Place>| place.zip(other).is_some_and(|(one, other)| is_same(one, other));
    let at = known.iter().position(|other| same(*other)).unwrap_or_else(|| {
        known.push(place);
        known.len() - 1
    });
    u16::try_from(at).unwrap_or(u16::MAX)
}

impl Spots {
    fn of(inventory: &Inventory) -> Self {
        let mut numbers = Numbers::default();
        let gpus = inventory
            .gpus
            .iter()
            .map(|gpu| numbers.spot(&gpu.traits))
            .collect();
        let classes = inventory.classes.iter().flatten();
        let others = classes
            .map(|class| {
                class
                    .devices
                    .iter()
                    .map(|device| numbers.spot(&device.traits))
                    .collect()
            })
            .collect();
        Self { gpus, others }
    }
}
