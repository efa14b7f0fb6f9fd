//! Whether a node has room for a request, and if not, what it lacks: the hot path of every filter.

use crate::fleet::{Fleet, NodeId};
use crate::ident::OwnerId;
use crate::miss::Miss;
use crate::node::Node;
use crate::policy::DevicePolicy;
use crate::rank::Order;
use crate::reason::Reason;
use crate::request::{Ask, GpuAsk, Need, Request};
use crate::rows::Row;
use crate::weigh::Weights;

/// Which hints count as taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hints<'a> {
    /// None: what is hinted at is free.
    Ignore,
    /// All.
    Respect,
    /// All but those of this owner.
    RespectOthers(&'a str),
}

impl Hints<'_> {
    /// Whether an owner's hint counts.
    pub(crate) fn heeds(self, owner: &OwnerId) -> bool {
        match self {
            Self::Ignore => false,
            Self::Respect => true,
            Self::RespectOthers(own) => owner.as_str() != own,
        }
    }
}

impl Fleet {
    /// Whether a node has room for what is asked; if not, the reason of the nearest miss.
    ///
    /// A few comparisons per device; nothing is allocated.
    ///
    /// # Errors
    /// The most helpful reason: what would have to change least for the request to fit.
    #[inline]
    pub fn fit<'r>(&self, node: NodeId, ask: impl Into<Ask<'r>>, hints: Hints<'_>) -> Result<(), Reason> {
        self.node(node)
            .ok_or(Reason::NoDevice)?
            .fit_all(ask.into(), hints)
    }

    /// Why a node has no room for what is asked, in the terms of the node; `None` if it has. Not for the hot path.
    pub fn miss<'r>(&self, node: NodeId, ask: impl Into<Ask<'r>>, hints: Hints<'_>) -> Option<Miss> {
        self.node(node)
            .map_or(Some(Miss::Plain(Reason::NoDevice)), |node| {
                node.miss(ask.into(), hints)
            })
    }
}

impl Node {
    /// Whether there is room for everything that is asked.
    #[inline]
    pub(crate) fn fit_all(&self, ask: Ask<'_>, hints: Hints<'_>) -> Result<(), Reason> {
        if self.has_rules || ask.wishes.is_some() {
            return self.fit_by_rules(ask, hints);
        }
        self.fit_gpus(&ask.gpus, hints)?;
        if ask.others.is_empty() {
            Ok(())
        } else {
            self.fit_others(ask.others, hints)
        }
    }

    /// Whether there is room on GPUs, whatever rules say.
    #[inline]
    pub(crate) fn fit_gpus(&self, ask: &GpuAsk, hints: Hints<'_>) -> Result<(), Reason> {
        match ask {
            GpuAsk::Share(request) => self.fit(request, hints).map(drop),
            GpuAsk::Whole(n) => self.fit_whole(*n, hints),
            GpuAsk::All { slots } => self.choose_all(*slots, hints).map(drop),
            GpuAsk::Nothing => Ok(()),
        }
    }

    /// Whether there is room for everything that is asked, by all rules.
    pub(crate) fn fit_by_rules(&self, ask: Ask<'_>, hints: Hints<'_>) -> Result<(), Reason> {
        self.miss(ask, hints).map_or(Ok(()), |miss| Err(miss.reason()))
    }

    /// Why there is no room, if so.
    pub(crate) fn miss(&self, ask: Ask<'_>, hints: Hints<'_>) -> Option<Miss> {
        let order = Order {
            policy: DevicePolicy::InOrder,
            weights: &Weights::default(),
            outlook: None,
        };
        self.decide(ask, order, hints).err()
    }

    /// What the request means on this node, if there is room.
    #[inline]
    pub(crate) fn fit(&self, request: &Request, hints: Hints<'_>) -> Result<Need, Reason> {
        let need = self.need(request)?;
        let lookup = if self.any_hint_counts(hints) {
            look(need, self.rows_under(hints))
        } else {
            look(need, self.rows.iter().copied())
        };
        match lookup {
            Lookup::Fits => Ok(need),
            Lookup::Misses(misses) if self.any_aside => Err(self.miss_with_aside(need, hints, misses)),
            Lookup::Misses(misses) => Err(misses.reason(need)),
        }
    }

    pub(crate) fn need(&self, request: &Request) -> Result<Need, Reason> {
        if self.rows.is_empty() {
            return Err(Reason::NoDevice);
        }
        Need::of(request, self.unit_bytes())
    }

    /// The reason where some devices are sick or take no shares: these are no near misses.
    fn miss_with_aside(&self, need: Need, hints: Hints<'_>, all: Misses) -> Reason {
        if all.n_large_enough < need.devices {
            return Reason::TooLarge;
        }
        let healthy = || {
            self.rows_under(hints)
                .zip(self.gpus())
                .zip(self.marks.iter())
                .filter(|((_, gpu), _)| gpu.healthy)
        };
        match look(
            need,
            healthy()
                .filter(|(_, mark)| !mark.is_withheld)
                .map(|((row, _), _)| row),
        ) {
            Lookup::Misses(misses) if misses.n_large_enough >= need.devices => return misses.reason(need),
            _ => {}
        }
        match look(need, healthy().map(|((row, _), _)| row)) {
            Lookup::Misses(misses) if misses.n_large_enough < need.devices => Reason::Unhealthy,
            _ => Reason::Vendor,
        }
    }
}

/// What comparing a need with devices comes to.
enum Lookup {
    /// Enough devices have room.
    Fits,
    /// Too few have.
    Misses(Misses),
}

/// How devices miss a need.
#[derive(Clone, Copy, Default)]
struct Misses {
    /// How many devices could take it if they were empty.
    n_large_enough: usize,
    /// Bit `1 << set` says that some of them is short of exactly this set of dimensions; memory is 1, core 2, slots 4.
    short_of: u8,
}

/// Compares a need with devices until enough have room.
#[inline]
fn look(need: Need, rows: impl Iterator<Item = Row>) -> Lookup {
    let mut n_missing = need.devices;
    let mut misses = Misses::default();
    for Row { free, total } in rows {
        let needed = need.on(total);
        let short_of = u8::from(needed.memory > free.memory)
            | u8::from(needed.core > free.core) << 1
            | u8::from(needed.slots > free.slots) << 2;
        if short_of == 0 {
            n_missing -= 1;
            if n_missing == 0 {
                return Lookup::Fits;
            }
        }
        if needed.within(total) {
            misses.n_large_enough += 1;
            misses.short_of |= 1 << short_of;
        }
    }
    Lookup::Misses(misses)
}

impl Misses {
    /// The reason of the device that is short of the fewest dimensions.
    fn reason(self, need: Need) -> Reason {
        const NEAREST_FIRST: [(u8, Reason); 8] = [
            (0b000, Reason::TooFew),
            (0b001, Reason::Memory),
            (0b010, Reason::Core),
            (0b100, Reason::Slots),
            (0b011, Reason::Memory),
            (0b101, Reason::Memory),
            (0b110, Reason::Core),
            (0b111, Reason::Memory),
        ];
        if self.n_large_enough < need.devices {
            return Reason::TooLarge;
        }
        let nearest = NEAREST_FIRST
            .iter()
            .find(|(set, _)| self.short_of & (1 << set) != 0);
        nearest.map_or(Reason::TooLarge, |(_, reason)| *reason)
    }
}
