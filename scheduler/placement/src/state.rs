//! What of a node is taken, in a form that is quickly compared: nodes of one shape and one state give the same answers.
//!
//! States are kept for the whole fleet, each once, so that comparing two nodes is comparing two numbers.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::amounts::Amounts;
use crate::class::Device;
use crate::fit::Hints;
use crate::ident::FunctionId;
use crate::node::Node;
use crate::topology::Use;

/// All that an answer depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// Number of the node's shape.
    shape: Option<u64>,
    words: Box<[u64]>,
}

/// The number of a state that some node is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StateId(u32);

/// All states that nodes are in, each once.
#[derive(Debug, Default)]
pub(crate) struct States {
    ids: FxHashMap<Arc<State>, StateId>,
    /// By number; `None` where no node is in it.
    known: Vec<Option<Shared>>,
    vacant: Vec<StateId>,
}

/// A state and how many nodes are in it.
#[derive(Debug)]
struct Shared {
    state: Arc<State>,
    n_nodes: usize,
}

impl States {
    /// The number of a state that one more node is in from now on.
    pub(crate) fn enter(&mut self, state: State) -> StateId {
        if let Some(id) = self.ids.get(&state).copied() {
            if let Some(shared) = self.at_mut(id) {
                shared.n_nodes += 1;
            }
            return id;
        }
        let id = self.vacant.pop().unwrap_or_else(|| {
            self.known.push(None);
            StateId(u32::try_from(self.known.len() - 1).unwrap_or(u32::MAX))
        });
        let state = Arc::new(state);
        self.ids.insert(Arc::clone(&state), id);
        if let Some(place) = self.known.get_mut(id.0 as usize) {
            *place = Some(Shared { state, n_nodes: 1 });
        }
        id
    }

    /// One node less is in this state.
    pub(crate) fn leave(&mut self, id: StateId) {
        let Some(shared) = self.at_mut(id) else { return };
        shared.n_nodes -= 1;
        if shared.n_nodes == 0
            && let Some(shared) = self.known.get_mut(id.0 as usize).and_then(Option::take)
        {
            self.ids.remove(&shared.state);
            self.vacant.push(id);
        }
    }

    /// The state of this number, and how many nodes are in it.
    pub(crate) fn get(&self, id: StateId) -> Option<(&State, usize)> {
        let shared = self.known.get(id.0 as usize)?.as_ref()?;
        Some((&shared.state, shared.n_nodes))
    }

    /// How many different states nodes are in.
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    fn at_mut(&mut self, id: StateId) -> Option<&mut Shared> {
        self.known.get_mut(id.0 as usize)?.as_mut()
    }
}

impl Node {
    /// The state with no hint counted; `None` if it is not worth comparing.
    pub(crate) fn state(&self) -> Option<State> {
        self.is_varied().then(|| self.state_under(Hints::Ignore))
    }

    /// The state with the hints that count.
    pub(crate) fn state_under(&self, hints: Hints<'_>) -> State {
        let uses = self.uses(hints);
        let heeded = || self.hints.iter().filter(|hint| hints.heeds(&hint.owner));
        let hinted = heeded().fold(0_u64, |sum, hint| {
            sum.saturating_add(hint.placement.unknown_whole.into())
        });
        let mut words = vec![u64::from(self.n_unknown_whole()), hinted];
        let mut flags = Flags::default();
        for (at, ((row, mark), one)) in self
            .rows_under(hints)
            .zip(self.marks.iter())
            .zip(&uses.gpus)
            .enumerate()
        {
            let Amounts { memory, core, slots } = row.free;
            let is_hinted = heeded().any(|hint| hint.takes_part_of(at));
            words.extend([memory.hundredths(), u64::from(core) << 32 | u64::from(slots)]);
            flags.extend(
                [mark.is_held, mark.is_shared, mark.is_withheld, is_hinted]
                    .into_iter()
                    .chain(flags_of(*one)),
            );
        }
        let classes = self
            .classes()
            .iter()
            .zip(&self.free_others)
            .zip(uses.others.iter().zip(&uses.functions));
        for ((class, free), (uses, functions)) in classes {
            for ((device, free), one) in class.devices.iter().zip(free).zip(uses) {
                words.extend(self.less_hints_of(&class.kind, device, free, hints).values());
                flags.extend(flags_of(*one).into_iter().chain(used(device, functions)));
            }
        }
        words.append(&mut flags.words);
        State {
            shape: self.shape.as_ref().map(|shape| shape.number),
            words: words.into(),
        }
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
