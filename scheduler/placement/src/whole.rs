//! Whole GPUs in the vendor's name, and how they keep clear of GPUs that are shared.
//!
//! Where the devices that are chosen here are the ones that a container gets, both kinds live on one node, each on GPUs of
//! its own. Where the vendor's plugin takes whichever it likes, its GPUs are apart: those that are marked so if some are,
//! else all, and then either kind keeps the other off the node.

use crate::amounts::Amounts;
use crate::fit::Hints;
use crate::gpu::{Gpu, Inventory};
use crate::holding::{Holding, Share};
use crate::memory::Memory;
use crate::node::{Held, Hint, Node};
use crate::reason::Reason;

/// What is to be known of a GPU besides its row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    /// Whether somebody holds memory or computing power of it.
    pub(crate) is_held: bool,
    /// Whether one of those shares it.
    pub(crate) is_shared: bool,
    /// Whether it takes no shares, whatever is free.
    pub(crate) is_withheld: bool,
}

impl Inventory {
    /// Whether a whole request in the vendor's name may get this GPU.
    pub(crate) fn is_for_vendor(&self, gpu: &Gpu) -> bool {
        self.serves_vendor || !gpu.sharing || self.gpus.iter().all(|gpu| gpu.sharing)
    }

    /// Whether a GPU takes no shares while so many whole ones are out that nobody knows.
    pub(crate) fn is_withheld(&self, gpu: &Gpu, n_unknown: u32) -> bool {
        !gpu.sharing || (n_unknown > 0 && self.is_for_vendor(gpu))
    }
}

impl Amounts {
    /// Whether anything that a whole request would miss is taken.
    pub(crate) fn takes_part(self) -> bool {
        self.memory > Memory::ZERO || self.core > 0
    }
}

impl Node {
    /// Whole GPUs that are out and nobody knows which.
    pub(crate) fn n_unknown_whole(&self) -> u32 {
        self.held
            .iter()
            .fold(0, |sum, held| sum.saturating_add(held.holdings.unknown_whole))
    }

    /// Whether so many whole GPUs can be had.
    pub(crate) fn fit_whole(&self, n: u32, hints: Hints<'_>) -> Result<(), Reason> {
        let Some(inventory) = self
            .inventory
            .as_ref()
            .filter(|inventory| !inventory.gpus.is_empty())
        else {
            // Nobody says what there is: kube-scheduler knows what kubelet offers, but not who shares of it.
            let shares =
                |held: &Held| !held.holdings.is_vendor && held.holdings.gpus != Holding::Shares(Vec::new());
            return if self.held.iter().any(shares) {
                Err(Reason::Vendor)
            } else {
                Ok(())
            };
        };
        let n = usize::try_from(n).unwrap_or(usize::MAX);
        let for_vendor = || {
            (0..)
                .zip(&inventory.gpus)
                .zip(self.marks.iter())
                .filter(|((_, gpu), _)| inventory.is_for_vendor(gpu))
        };
        if for_vendor().count() < n {
            return Err(Reason::TooLarge);
        }
        let heeded = || self.hints.iter().filter(|hint| hints.heeds(&hint.owner));
        let is_hinted = |row: usize| heeded().any(|hint| hint.takes_part_of(row));
        if !inventory.serves_vendor && for_vendor().any(|((row, _), mark)| mark.is_shared || is_hinted(row)) {
            return Err(Reason::Vendor);
        }
        let hinted_unknown = heeded().fold(0_u32, |sum, hint| {
            sum.saturating_add(hint.placement.unknown_whole)
        });
        let n_unknown =
            usize::try_from(self.n_unknown_whole().saturating_add(hinted_unknown)).unwrap_or(usize::MAX);
        // The vendor's plugin knows which of its GPUs are out; whoever chooses here may take just one of those.
        if inventory.serves_vendor && n_unknown > 0 {
            return Err(Reason::Vendor);
        }
        if for_vendor().filter(|((_, gpu), _)| gpu.healthy).count() < n {
            return Err(Reason::Unhealthy);
        }
        if self.whole_rows(hints).count().saturating_sub(n_unknown) >= n {
            Ok(())
        } else {
            Err(Reason::TooFew)
        }
    }

    /// Healthy GPUs that a whole request may get and that nobody uses: those first that nothing else may use.
    pub(crate) fn whole_rows(&self, hints: Hints<'_>) -> impl Iterator<Item = (usize, &Gpu)> {
        let inventory = self.inventory.as_ref();
        let gpus = self.gpus().iter().enumerate().zip(self.marks.iter());
        let is_hinted = move |row: usize| {
            self.hints
                .iter()
                .any(|hint| hints.heeds(&hint.owner) && hint.takes_part_of(row))
        };
        let free = gpus.filter(move |((row, gpu), mark)| {
            let may = inventory.is_some_and(|inventory| inventory.is_for_vendor(gpu));
            may && gpu.healthy && !mark.is_held && !is_hinted(*row)
        });
        let (free, again) = (free.clone().map(|(gpu, _)| gpu), free.map(|(gpu, _)| gpu));
        free.filter(|(_, gpu)| !gpu.sharing)
            .chain(again.filter(|(_, gpu)| gpu.sharing))
    }

    /// The GPUs that a whole request gets, where that is chosen here; empty where the vendor's plugin chooses.
    pub(crate) fn choose_whole(&self, n: u32, hints: Hints<'_>) -> Vec<Share> {
        if !self
            .inventory
            .as_ref()
            .is_some_and(|inventory| inventory.serves_vendor)
        {
            return Vec::new();
        }
        let rows = self
            .whole_rows(hints)
            .take(usize::try_from(n).unwrap_or(usize::MAX));
        rows.map(|(_, gpu)| Share {
            gpu: gpu.uuid.clone(),
            minor: gpu.minor,
            amounts: gpu.whole(),
        })
        .collect()
    }

    /// All healthy GPUs, the one first whose place for sharers is taken.
    ///
    /// # Errors
    /// If there is no such GPU.
    pub(crate) fn choose_all(&self, slots: u32, hints: Hints<'_>) -> Result<Vec<Share>, Reason> {
        if self.rows.is_empty() {
            return Err(Reason::NoDevice);
        }
        let healthy = || {
            self.rows_under(hints)
                .zip(self.gpus())
                .filter(|(_, gpu)| gpu.healthy)
        };
        let roomiest = healthy()
            .filter(|(row, _)| row.free.slots >= slots)
            .min_by_key(|(row, gpu)| (!row.free.slots, gpu.minor));
        let Some((_, first)) = roomiest else {
            return Err(if healthy().next().is_some() {
                Reason::Slots
            } else {
                Reason::Unhealthy
            });
        };
        let share = |gpu: &Gpu, slots| Share {
            gpu: gpu.uuid.clone(),
            minor: gpu.minor,
            amounts: Amounts {
                slots,
                ..Amounts::ZERO
            },
        };
        let others = healthy()
            .filter(|(_, gpu)| gpu.uuid != first.uuid)
            .map(|(_, gpu)| share(gpu, 0));
        Ok([share(first, slots)].into_iter().chain(others).collect())
    }
}

impl Gpu {
    /// Everything but places for sharers: a whole request needs none.
    pub(crate) fn whole(&self) -> Amounts {
        Amounts {
            slots: 0,
            ..self.total()
        }
    }
}

impl Hint {
    pub(crate) fn takes_part_of(&self, row: usize) -> bool {
        self.placement.unknown_whole == 0
            && self
                .charges
                .iter()
                .any(|(charged, amounts)| *charged == row && amounts.takes_part())
    }
}
