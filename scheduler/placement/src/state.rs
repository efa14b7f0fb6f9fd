//! What of a node is taken, in a form that is quickly compared: nodes of one shape and one state give the same answers.

use std::borrow::Cow;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::FxHasher;

use crate::amounts::Amounts;
use crate::class::Device;
use crate::fit::Hints;
use crate::ident::FunctionId;
use crate::node::Node;
use crate::topology::Use;

/// All that an answer depends on besides a node's shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct State {
    /// Of the words and the shape.
    pub(crate) hash: u64,
    words: Box<[u64]>,
}

impl Node {
    /// The state with the hints that count; `None` if it is not worth comparing.
    pub(crate) fn comparable(&self, hints: Hints<'_>) -> Option<Cow<'_, State>> {
        let state = self.state.as_ref()?;
        Some(if self.any_hint_counts(hints) { Cow::Owned(self.state_under(hints)) } else { Cow::Borrowed(state) })
    }

    pub(crate) fn state_under(&self, hints: Hints<'_>) -> State {
        let uses = self.uses(hints);
        let heeded = || self.hints.iter().filter(|hint| hints.heeds(&hint.owner));
        let hinted = heeded().fold(0_u64, |sum, hint| sum.saturating_add(hint.placement.unknown_whole.into()));
        let mut words = vec![u64::from(self.n_unknown_whole()), hinted];
        let mut flags = Flags::default();
        for (at, ((row, mark), one)) in self.rows_under(hints).zip(self.marks.iter()).zip(&uses.gpus).enumerate() {
            let Amounts { memory, core, slots } = row.free;
            let is_hinted = heeded().any(|hint| hint.takes_part_of(at));
            words.extend([memory.hundredths(), u64::from(core) << 32 | u64::from(slots)]);
            flags.extend([mark.is_held, mark.is_shared, mark.is_withheld, is_hinted].into_iter().chain(flags_of(*one)));
        }
        let classes = self.classes().iter().zip(&self.free_others).zip(uses.others.iter().zip(&uses.functions));
        for ((class, free), (uses, functions)) in classes {
            for ((device, free), one) in class.devices.iter().zip(free).zip(uses) {
                words.extend(self.less_hints_of(&class.kind, device, free, hints).values());
                flags.extend(flags_of(*one).into_iter().chain(used(device, functions)));
            }
        }
        words.append(&mut flags.words);
        let mut hasher = FxHasher::default();
        (self.shape.as_ref().map(|shape| shape.hash), &words).hash(&mut hasher);
        State { hash: hasher.finish(), words: words.into() }
    }

    /// Whether another node gives the same answers.
    pub(crate) fn is_like(&self, state: &State, other: &Self, its: &State) -> bool {
        let same_shape = self.shape.as_ref().zip(other.shape.as_ref()).is_some_and(|(one, other)| Arc::ptr_eq(one, other));
        same_shape && state.words == its.words
    }
}

/// Flags, as many to a word as it has bits.
#[derive(Default)]
struct Flags {
    words: Vec<u64>,
    n: usize,
}

impl Extend<bool> for Flags {
    fn extend<T: IntoIterator<Item = bool>>(&mut self, flags: T) {
        for flag in flags {
            if self.n.is_multiple_of(64) {
                self.words.push(0);
            }
            if let Some(word) = self.words.last_mut() {
                *word |= u64::from(flag) << (self.n % 64);
            }
            self.n += 1;
        }
    }
}

fn flags_of(one: Use) -> [bool; 3] {
    [one.is_held, one.is_taken, one.is_kept]
}

/// Which virtual functions of a device are held, in the order of its inventory.
fn used<'a>(device: &'a Device, used: &'a [&FunctionId]) -> impl Iterator<Item = bool> + 'a {
    let functions = device.traits.functions.iter().flat_map(|group| &group.functions);
    functions.map(|function| used.contains(&&function.id))
}
