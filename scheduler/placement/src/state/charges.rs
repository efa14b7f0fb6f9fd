//! Charges: the amounts that a holding takes of each device of the inventory as it is now.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::data::amounts::{Amounts, Memory, NamedAmounts};
use crate::data::device::{Device, DeviceRef};
use crate::data::holding::{Held, HeldMemory, HeldPart, Holdings, n_unknown_whole};
use crate::data::inventory::{GPUS, Inventory};
use crate::data::request::ShareRequest;

// A charge borrows its named resources; a charge on a GPU, which has none, borrows this empty map.
static NO_RESOURCES: NamedAmounts = NamedAmounts::new();

/// The amounts that one part of a holding takes of one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge<'a> {
    /// Index of the device's type in the inventory.
    pub(crate) type_at: usize,
    /// Index of the device among those of its type.
    pub(crate) device: usize,
    /// Memory, computing power and slots of a GPU.
    pub(crate) amounts: Amounts,
    /// Named resources of a device of another type.
    pub(crate) resources: &'a NamedAmounts,
    /// True if the part may be on another device or of another amount, or its record is doubtful: the amounts count as taken, and
    /// explanations list them apart from amounts that are certainly used.
    pub(crate) suspect: bool,
}

impl Charge<'_> {
    /// Returns true if the charge keeps its device from being allocated whole; a slot of a GPU alone does not.
    pub(crate) fn occupies(&self) -> bool {
        self.type_at != GPUS || self.amounts.occupies()
    }
}

/// All charges of the holdings of a node, which are ordered by owner.
///
/// Pending holdings (shares that the node has not allocated yet) come last: each is charged to the GPUs with the most room left.
pub(crate) fn charges_of_all<'a>(inventory: &'a Inventory, held: &'a [Held]) -> Vec<(&'a Held, Charge<'a>)> {
    let mut all = Vec::with_capacity(held.len());
    let mut any_pending = false;
    for one in held {
        any_pending |= one.holdings.pending.is_some();
        for part in &one.holdings.parts {
            all.extend(charges_of_part(inventory, part).map(|charge| (one, charge)));
        }
    }
    // Few nodes have pending holdings (their plugins have to report waiting containers), and comparing all GPUs takes time.
    if any_pending {
        add_pending(inventory, held, &mut all);
    }
    all
}

/// Adds the charges of pending holdings to `all`, which has those of all other holdings; owner by owner.
fn add_pending<'a>(inventory: &'a Inventory, held: &'a [Held], all: &mut Vec<(&'a Held, Charge<'a>)>) {
    let n_unknown = n_unknown_whole(held);
    let mut free: Vec<Amounts> = Vec::with_capacity(inventory.gpus.len());
    for gpu in &inventory.gpus {
        let is_available = gpu.is_open() && !inventory.is_withheld(gpu, n_unknown);
        free.push(if is_available { gpu.total() } else { Amounts::ZERO });
    }
    for (_, charge) in all.iter() {
        subtract(&mut free, charge);
    }
    for one in held {
        let Some(request) = &one.holdings.pending else {
            continue;
        };
        for charge in pending_charges(inventory, request, &free) {
            subtract(&mut free, &charge);
            all.push((one, charge));
        }
    }
}

/// Subtracts a charge from the free amounts of its GPU.
fn subtract(free: &mut [Amounts], charge: &Charge<'_>) {
    if charge.type_at == GPUS
        && let Some(free) = free.get_mut(charge.device)
    {
        *free = free.less(charge.amounts);
    }
}

/// The charges of a request that the node has not allocated yet, on as many GPUs as it asks for: first those with room, of these
/// the ones with most free memory.
fn pending_charges<'a>(
    inventory: &'a Inventory,
    request: &'a ShareRequest,
    free: &[Amounts],
) -> Vec<Charge<'a>> {
    let mut ranked = Vec::with_capacity(free.len());
    for (charge, free) in charges_of_request(inventory, request).zip(free) {
        // A GPU without room comes last and is charged nevertheless, so that no request disappears from the count.
        let lacks_room = !charge.amounts.within(*free);
        ranked.push(((lacks_room, Reverse(free.memory), charge.device), charge));
    }
    ranked.sort_by_key(|(key, _)| *key);
    ranked.truncate(usize::try_from(request.devices).unwrap_or(usize::MAX));
    ranked.into_iter().map(|(_, charge)| charge).collect()
}

/// The charges of one holding, in the order of its parts. A pending request is charged to every GPU.
pub(crate) fn charges<'a>(
    inventory: &'a Inventory,
    holdings: &'a Holdings,
) -> impl Iterator<Item = Charge<'a>> + 'a {
    let (parts, pending) = (holdings.parts.iter(), holdings.pending.iter());
    let of_parts = parts.flat_map(|part| charges_of_part(inventory, part));
    of_parts.chain(pending.flat_map(|request| charges_of_request(inventory, request)))
}

/// The GPUs that an owner holds, or may hold, a part of, by their indices, with the memory that it takes of each.
pub(crate) fn gpus_of_holdings(inventory: &Inventory, holdings: &Holdings) -> BTreeMap<usize, Memory> {
    let mut gpus: BTreeMap<usize, Memory> = BTreeMap::new();
    for charge in charges(inventory, holdings).filter(|charge| charge.type_at == GPUS) {
        let memory = gpus.entry(charge.device).or_default();
        *memory = memory.plus(charge.amounts.memory);
    }
    if holdings.n_unknown_gpus > 0 {
        // The vendor's plugin may have allocated any GPU to the pod.
        for at in 0..inventory.gpus.len() {
            gpus.entry(at).or_default();
        }
    }
    gpus
}

/// The charges of one part: on its device, or on every device of the type that it may be on.
fn charges_of_part<'a>(inventory: &'a Inventory, part: &'a HeldPart) -> impl Iterator<Item = Charge<'a>> {
    let type_at = inventory.type_index(&part.kind);
    let devices = type_at.map_or(&[][..], |type_at| inventory.devices(type_at));
    let found = devices.iter().position(|device| part.device.identifies(device));
    let (first, n) = match (found, &part.device) {
        (Some(at), _) => (at, 1),
        // The device is gone, and nothing says that the part is on another one.
        (None, DeviceRef::Id(_)) => (0, 0),
        // Minors change with the devices of a node, so the part may be on any device.
        (None, DeviceRef::Minor(_) | DeviceRef::Any) => (0, devices.len()),
    };
    // One kind of iterator for one device, for all devices and for none, so that nothing is boxed.
    let listed = devices.iter().enumerate().skip(first).take(n);
    listed.map(move |(at, device)| {
        let known = memory_on(device, part.memory, inventory.unit_bytes);
        Charge {
            // Without the type there is no device and so no charge: this index is never read.
            type_at: type_at.unwrap_or(GPUS),
            device: at,
            amounts: Amounts {
                // Memory in units of unknown size may be all that the GPU has.
                memory: known.unwrap_or(device.total().memory),
                core: part.core,
                slots: part.slots,
            },
            resources: &part.resources,
            suspect: found.is_none() || known.is_none() || !part.trusted,
        }
    })
}

/// The charge of a request on each GPU of the node, as if the request were allocated there.
fn charges_of_request<'a>(
    inventory: &'a Inventory,
    request: &'a ShareRequest,
) -> impl Iterator<Item = Charge<'a>> {
    let ShareRequest {
        memory, core, slots, ..
    } = *request;
    inventory.gpus.iter().enumerate().map(move |(at, gpu)| {
        let total = gpu.total().memory;
        Charge {
            type_at: GPUS,
            device: at,
            amounts: Amounts {
                // Units of unknown size may come to all memory of the GPU.
                memory: memory.on(total, inventory.unit_bytes).unwrap_or(total),
                core,
                slots,
            },
            resources: &NO_RESOURCES,
            suspect: true,
        }
    })
}

/// The memory that a part takes of a device; `None` if the part is in units of a size that the node does not report.
fn memory_on(device: &Device, memory: HeldMemory, unit_bytes: Option<u64>) -> Option<Memory> {
    match memory {
        HeldMemory::Exact(memory) => Some(memory),
        HeldMemory::Requested(requested) => requested.on(device.total().memory, unit_bytes),
    }
}
