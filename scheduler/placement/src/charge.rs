//! What a holding takes from each device of the inventory as it is now.

use std::cmp::Reverse;

use crate::amounts::Amounts;
use crate::gpu::{Gpu, Inventory};
use crate::holding::{GpuRef, HeldMemory, HeldShare, Holding};
use crate::node::Held;
use crate::request::Request;

/// What one share takes from one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge {
    /// Index of the device in the inventory.
    pub(crate) row: usize,
    pub(crate) amounts: Amounts,
    /// Whether it may be on another device, or another amount.
    pub(crate) suspect: bool,
}

impl Inventory {
    /// Index of a device that a record names.
    pub(crate) fn position(&self, gpu: &GpuRef) -> Option<usize> {
        self.gpus.iter().position(|candidate| match gpu {
            GpuRef::Uuid(uuid) => candidate.uuid == *uuid,
            GpuRef::Minor(minor) => candidate.minor == *minor,
        })
    }

    /// Visits every charge of all holdings of a node, which are ordered by owner: first those of devices that are named or may
    /// be any, then those of devices that are yet to be known, each where the most room is left by then.
    pub(crate) fn charge_all<'a>(&self, held: &'a [Held], visit: &mut dyn FnMut(&'a Held, Charge)) {
        let is_somewhere = |held: &&Held| matches!(held.holdings.gpus, Holding::Somewhere(_));
        if !held.iter().any(|held| is_somewhere(&held)) {
            for held in held {
                self.charge(&held.holdings.gpus, &mut |charge| visit(held, charge));
            }
            return;
        }
        let n_unknown = held
            .iter()
            .fold(0_u32, |sum, held| sum.saturating_add(held.holdings.unknown_whole));
        let is_aside = |gpu: &Gpu| !gpu.healthy || self.is_withheld(gpu, n_unknown);
        let room = |gpu: &Gpu| if is_aside(gpu) { Amounts::ZERO } else { gpu.total() };
        let mut free: Vec<Amounts> = self.gpus.iter().map(room).collect();
        let mut take = |free: &mut Vec<Amounts>, held: &'a Held, charge: Charge| {
            if let Some(free) = free.get_mut(charge.row) {
                *free = free.less(charge.amounts);
            }
            visit(held, charge);
        };
        for held in held.iter().filter(|held| !is_somewhere(held)) {
            self.charge(&held.holdings.gpus, &mut |charge| take(&mut free, held, charge));
        }
        for held in held {
            let Holding::Somewhere(request) = &held.holdings.gpus else {
                continue;
            };
            for charge in self.charges_somewhere(request, &free) {
                take(&mut free, held, charge);
            }
        }
    }

    /// The charges of a request whose devices are yet to be known, where so much is free.
    fn charges_somewhere(&self, request: &Request, free: &[Amounts]) -> Vec<Charge> {
        let charge = |(row, (gpu, free)): (usize, (&Gpu, &Amounts))| {
            let (amounts, _) =
                self.amounts(gpu, HeldMemory::Ask(request.memory), request.core, request.slots);
            let lacks_room = amounts.lacking(*free).next().is_some();
            (
                (lacks_room, Reverse(free.memory), row),
                Charge {
                    row,
                    amounts,
                    suspect: true,
                },
            )
        };
        let mut charges: Vec<_> = self.gpus.iter().zip(free).enumerate().map(charge).collect();
        charges.sort_by_key(|(key, _)| *key);
        let n_devices = usize::try_from(request.devices).unwrap_or(usize::MAX);
        charges
            .into_iter()
            .take(n_devices)
            .map(|(_, charge)| charge)
            .collect()
    }

    /// Visits every charge of a holding, in the order of its shares; every device that it may be on, if it is on some only.
    pub(crate) fn charge(&self, holding: &Holding, visit: &mut dyn FnMut(Charge)) {
        match holding {
            Holding::Shares(shares) => shares.iter().for_each(|share| self.charge_share(share, visit)),
            Holding::Anywhere(request) | Holding::Somewhere(request) => {
                let memory = HeldMemory::Ask(request.memory);
                self.charge_every(memory, request.core, request.slots, visit);
            }
        }
    }

    fn charge_share(&self, share: &HeldShare, visit: &mut dyn FnMut(Charge)) {
        let found = self
            .position(&share.gpu)
            .and_then(|row| Some((row, self.gpus.get(row)?)));
        match (found, &share.gpu) {
            (Some((row, gpu)), _) => {
                let (amounts, known) = self.amounts(gpu, share.memory, share.core, share.slots);
                visit(Charge {
                    row,
                    amounts,
                    suspect: !(known && share.trusted),
                });
            }
            // The device is gone, and nothing says that its sharer went elsewhere.
            (None, GpuRef::Uuid(_)) => {}
            (None, GpuRef::Minor(_)) => self.charge_every(share.memory, share.core, share.slots, visit),
        }
    }

    fn charge_every(&self, memory: HeldMemory, core: u32, slots: u32, visit: &mut dyn FnMut(Charge)) {
        for (row, gpu) in self.gpus.iter().enumerate() {
            let (amounts, _) = self.amounts(gpu, memory, core, slots);
            visit(Charge {
                row,
                amounts,
                suspect: true,
            });
        }
    }

    /// Amounts on a device, and whether they are known: an amount in unknown units counts as the whole device.
    fn amounts(&self, gpu: &Gpu, memory: HeldMemory, core: u32, slots: u32) -> (Amounts, bool) {
        let total = gpu.total().memory;
        let known = match memory {
            HeldMemory::Exact(memory) => Some(memory),
            HeldMemory::Ask(ask) => ask.on(total, self.unit_bytes),
        };
        (
            Amounts {
                memory: known.unwrap_or(total),
                core,
                slots,
            },
            known.is_some(),
        )
    }
}
