//! Equivalence classes: nodes with equal hardware, of which the same is in use, answer every request alike, except that the cost
//! by the policy `fill` depends on their CPU and memory too.
//!
//! The fleet keeps each class once, so that comparing two nodes is comparing two pointers.

use std::sync::Arc;

use rustc_hash::FxHashSet;

use crate::data::amounts::Amounts;
use crate::data::holding::{Hints, n_unknown_whole};
use crate::data::inventory::GPUS;
use crate::state::node::Node;
use crate::state::occupancy::Occupancy;

/// Everything of a node that the answer to a request depends on, except CPU and memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EquivalenceKey {
    /// Number of the hardware class; `None` without an inventory.
    hardware: Option<u64>,
    /// Free amounts and states of use of all devices, packed: nodes of one hardware class have them in the same places.
    words: Box<[u64]>,
}

/// The equivalence classes of all nodes, each once: nodes are of one class if they have the same `Arc`.
#[derive(Debug, Default)]
pub(crate) struct EquivalenceClasses(pub(crate) FxHashSet<Arc<EquivalenceKey>>);

impl EquivalenceClasses {
    /// The class with a key.
    pub(crate) fn class_of(&mut self, key: EquivalenceKey) -> Arc<EquivalenceKey> {
        if let Some(known) = self.0.get(&key) {
            return Arc::clone(known);
        }
        let class = Arc::new(key);
        self.0.insert(Arc::clone(&class));
        class
    }

    /// Drops a class that a node had, if no other node has it.
    pub(crate) fn drop_unused(&mut self, class: &Arc<EquivalenceKey>) {
        // The set and the caller have one reference each.
        if Arc::strong_count(class) == 2 {
            self.0.remove(class);
        }
    }
}

/// Returns true if a node belongs to an equivalence class. Other nodes answer a request by a few comparisons of free amounts of
/// GPUs, which take less time than the look-up of a class.
pub(crate) fn has_class(node: &Node) -> bool {
    // Only nodes with devices of other types than GPU have lists of free named resources.
    !node.free_resources.is_empty() || node.has_rules || node.has_topology()
}

/// The key of a node, with these hints counted as in use.
pub(crate) fn key_with(node: &Node, hints: Hints<'_>) -> EquivalenceKey {
    let occupancy = Occupancy::new(node, hints);
    let hinted = node.counted_hints(hints);
    let mut n_hinted_whole_gpus = 0_u64;
    for hint in hinted.clone() {
        n_hinted_whole_gpus += u64::from(hint.holdings.n_unknown_gpus);
    }
    let mut words = vec![u64::from(n_unknown_whole(&node.held)), n_hinted_whole_gpus];
    // Flags are packed apart from the amounts, or each of them would take a word of the key.
    let mut bits = Bits::default();
    for (at, (row, flags)) in node.rows_with(hints).zip(&node.flags).enumerate() {
        let Amounts { memory, core, slots } = row.free;
        // Two amounts of 32 bits share a word, since a key is hashed at every change of its node.
        words.extend([memory.hundredths(), u64::from(core) << 32 | u64::from(slots)]);
        for bit in [flags.is_occupied, flags.is_shared, flags.is_withheld] {
            bits.push(bit);
        }
        bits.push(hinted.clone().any(|hint| hint.occupies(at)));
    }
    for type_at in 0..node.inventory.n_types() {
        let held_functions = occupancy.held_functions_of(type_at);
        let devices = node.inventory.devices(type_at).iter();
        for (at, (device, device_use)) in devices.zip(occupancy.of_type(type_at)).enumerate() {
            if type_at != GPUS {
                // Amounts without names: devices of one hardware class have the same resources in the same order.
                words.extend(node.free_resources_with(type_at, at, hints).values());
            }
            bits.push(device_use.is_held);
            bits.push(device_use.is_occupied);
            bits.push(device_use.is_exclusive);
            for function in device.attributes.all_functions() {
                bits.push(held_functions.contains(&&function.id));
            }
        }
    }
    // All nodes of a hardware class have the same number of words, so that no separator is needed.
    words.append(&mut bits.words);
    EquivalenceKey {
        hardware: node.hardware.as_ref().map(|hardware| hardware.number),
        words: words.into(),
    }
}

/// Bits, 64 to a word.
#[derive(Default)]
struct Bits {
    words: Vec<u64>,
    n_bits: usize,
}

impl Bits {
    fn push(&mut self, bit: bool) {
        if self.n_bits.is_multiple_of(64) {
            self.words.push(0);
        }
        if let Some(word) = self.words.last_mut() {
            *word |= u64::from(bit) << (self.n_bits % 64);
        }
        self.n_bits += 1;
    }
}
