//! Charges: the amounts that a holding takes of each GPU of the inventory as it is now.

use std::cmp::Reverse;
use std::ops::Range;

use crate::data::amounts::Amounts;
use crate::data::device::Gpu;
use crate::data::holding::{GpuRef, Held, HeldGpus, HeldMemory, HeldShare, n_unknown_whole};
use crate::data::inventory::Inventory;
use crate::data::request::ShareRequest;

/// The amounts that one share takes of one GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge {
    /// Index of the GPU in the inventory.
    pub(crate) gpu: usize,
    pub(crate) amounts: Amounts,
    /// True if the share may be on another GPU or of another amount, or its record is doubtful: it takes its room, and
    /// explanations list it apart from what is used for sure.
    pub(crate) suspect: bool,
}

/// All charges of the holdings of a node, which are ordered by owner.
///
/// Pending holdings come last: each goes to the GPUs where the most room is left by then.
pub(crate) fn charges_of_all<'a>(inventory: &Inventory, held: &'a [Held]) -> Vec<(&'a Held, Charge)> {
    let mut all = Vec::with_capacity(held.len());
    let mut pending = Vec::new();
    for one in held {
        if let HeldGpus::Pending(request) = &one.holdings.gpus {
            pending.push((one, request));
        } else {
            all.extend(charges(inventory, &one.holdings.gpus).map(|charge| (one, charge)));
        }
    }
    if pending.is_empty() {
        return all;
    }
    let n_unknown = n_unknown_whole(held);
    let mut free: Vec<Amounts> = Vec::with_capacity(inventory.gpus.len());
    for gpu in &inventory.gpus {
        let is_available = gpu.healthy && !inventory.is_withheld(gpu, n_unknown);
        free.push(if is_available { gpu.total() } else { Amounts::ZERO });
    }
    for (_, charge) in &all {
        subtract(&mut free, *charge);
    }
    for (held, request) in pending {
        for charge in pending_charges(inventory, request, &free) {
            subtract(&mut free, charge);
            all.push((held, charge));
        }
    }
    all
}

fn subtract(free: &mut [Amounts], charge: Charge) {
    if let Some(free) = free.get_mut(charge.gpu) {
        *free = free.less(charge.amounts);
    }
}

/// The charges of a request that the node has not allocated yet: GPUs with room first, of these the one with most memory.
fn pending_charges(inventory: &Inventory, request: &ShareRequest, free: &[Amounts]) -> Vec<Charge> {
    let charges = charges_of_request(inventory, request).zip(free);
    let mut ranked: Vec<_> = charges
        .map(|(charge, free)| {
            let lacks_room = !charge.amounts.within(*free);
            ((lacks_room, Reverse(free.memory), charge.gpu), charge)
        })
        .collect();
    ranked.sort_by_key(|(key, _)| *key);
    ranked.truncate(usize::try_from(request.devices).unwrap_or(usize::MAX));
    ranked.into_iter().map(|(_, charge)| charge).collect()
}

/// The charges of one holding, in the order of its shares. A share of an unknown GPU is charged to every GPU.
pub(crate) fn charges<'a>(inventory: &'a Inventory, held: &'a HeldGpus) -> impl Iterator<Item = Charge> + 'a {
    let (shares, request) = match held {
        HeldGpus::Shares(shares) => (&shares[..], None),
        HeldGpus::Unknown(request) | HeldGpus::Pending(request) => (&[][..], Some(request)),
    };
    let of_shares = shares.iter().flat_map(|share| charges_of_share(inventory, share));
    let of_request = request
        .into_iter()
        .flat_map(|request| charges_of_request(inventory, request));
    of_shares.chain(of_request)
}

/// The charges of one share: on its GPU, or on every GPU if the record does not say for sure which one it is.
fn charges_of_share<'a>(inventory: &'a Inventory, share: &'a HeldShare) -> impl Iterator<Item = Charge> + 'a {
    let found = inventory.position(&share.gpu);
    let gpus = match (found, &share.gpu) {
        (Some(at), _) => at..at + 1,
        // The GPU is gone, and nothing says that the share is on another one.
        (None, GpuRef::Uuid(_)) => 0..0,
        // Minors change with the devices of a node, so the share may be on any GPU.
        (None, GpuRef::Minor(_)) => 0..inventory.gpus.len(),
    };
    charges_on(inventory, gpus, share.memory, share.core, share.slots).map(
        move |(charge, is_memory_known)| Charge {
            suspect: found.is_none() || !is_memory_known || !share.trusted,
            ..charge
        },
    )
}

fn charges_of_request(inventory: &Inventory, request: &ShareRequest) -> impl Iterator<Item = Charge> {
    let memory = HeldMemory::Requested(request.memory);
    let all = 0..inventory.gpus.len();
    charges_on(inventory, all, memory, request.core, request.slots).map(|(charge, _)| charge)
}

/// Charges on a range of GPUs, and whether their memory is known: memory in unknown units counts as all of the GPU's.
fn charges_on(
    inventory: &Inventory,
    gpus: Range<usize>,
    memory: HeldMemory,
    core: u32,
    slots: u32,
) -> impl Iterator<Item = (Charge, bool)> {
    let listed = inventory
        .gpus
        .iter()
        .enumerate()
        .skip(gpus.start)
        .take(gpus.len());
    listed.map(move |(at, gpu)| {
        let known = memory_on(gpu, memory, inventory.unit_bytes);
        let memory = known.unwrap_or(gpu.total().memory);
        let charge = Charge {
            gpu: at,
            amounts: Amounts { memory, core, slots },
            suspect: true,
        };
        (charge, known.is_some())
    })
}

fn memory_on(gpu: &Gpu, memory: HeldMemory, unit_bytes: Option<u64>) -> Option<crate::data::amounts::Memory> {
    match memory {
        HeldMemory::Exact(memory) => Some(memory),
        HeldMemory::Requested(requested) => requested.on(gpu.total().memory, unit_bytes),
    }
}
