//! What a holding takes from each device of the inventory as it is now.

use crate::amounts::Amounts;
use crate::gpu::{Gpu, Inventory};
use crate::holding::{GpuRef, HeldMemory, HeldShare, Holding};

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

    /// Visits every charge of a holding, in the order of its shares.
    pub(crate) fn charge(&self, holding: &Holding, visit: &mut dyn FnMut(Charge)) {
        match holding {
            Holding::Shares(shares) => shares.iter().for_each(|share| self.charge_share(share, visit)),
            Holding::Anywhere(request) => {
                let memory = HeldMemory::Ask(request.memory);
                self.charge_every(memory, request.core, request.slots, visit);
            }
        }
    }

    fn charge_share(&self, share: &HeldShare, visit: &mut dyn FnMut(Charge)) {
        let found = self.position(&share.gpu).and_then(|row| Some((row, self.gpus.get(row)?)));
        match (found, &share.gpu) {
            (Some((row, gpu)), _) => {
                let (amounts, known) = self.amounts(gpu, share.memory, share.core, share.slots);
                visit(Charge { row, amounts, suspect: !(known && share.trusted) });
            }
            // The device is gone, and nothing says that its sharer went elsewhere.
            (None, GpuRef::Uuid(_)) => {}
            (None, GpuRef::Minor(_)) => self.charge_every(share.memory, share.core, share.slots, visit),
        }
    }

    fn charge_every(&self, memory: HeldMemory, core: u32, slots: u32, visit: &mut dyn FnMut(Charge)) {
        for (row, gpu) in self.gpus.iter().enumerate() {
            let (amounts, _) = self.amounts(gpu, memory, core, slots);
            visit(Charge { row, amounts, suspect: true });
        }
    }

    /// Amounts on a device, and whether they are known: an amount in unknown units counts as the whole device.
    fn amounts(&self, gpu: &Gpu, memory: HeldMemory, core: u32, slots: u32) -> (Amounts, bool) {
        let total = gpu.total().memory;
        let known = match memory {
            HeldMemory::Exact(memory) => Some(memory),
            HeldMemory::Ask(ask) => ask.on(total, self.unit_bytes),
        };
        (Amounts { memory: known.unwrap_or(total), core, slots }, known.is_some())
    }
}
