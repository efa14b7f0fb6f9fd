//! The naive count of one node: for each device, a sum over every share.

use std::cmp::Reverse;

use super::{Violation, differs};
use crate::data::amounts::{Amounts, Dimension};
use crate::data::device::{Device, DeviceRef, DevicesOfType, Gpu};
use crate::data::holding::{GpuRef, Held, HeldGpus, HeldMemory, HeldShare};
use crate::data::ident::{GpuUuid, OwnerId, ResourceName};
use crate::data::request::{RequestedMemory, ShareRequest};
use crate::state::node::{GpuFlags, Hint, Node};

/// Sums that cannot overflow: memory (hundredths of a byte), core, slots.
type Sums = [u128; 3];

const DIMENSIONS: [Dimension; 3] = [Dimension::Memory, Dimension::Core, Dimension::Slots];

/// One share of a holding, with its owner.
struct Part<'a> {
    owner: &'a OwnerId,
    /// `None` if the GPU is not known.
    gpu: Option<&'a GpuRef>,
    /// The GPU that a pending share is charged to.
    charged_to: Option<&'a GpuUuid>,
    memory: HeldMemory,
    core: u32,
    slots: u32,
    trusted: bool,
    is_vendor: bool,
}

impl<'a> Part<'a> {
    fn of_share(held: &'a Held, share: &'a HeldShare) -> Self {
        Self {
            owner: &held.owner,
            gpu: Some(&share.gpu),
            charged_to: None,
            memory: share.memory,
            core: share.core,
            slots: share.slots,
            trusted: share.trusted,
            is_vendor: held.holdings.is_vendor,
        }
    }

    fn of_request(held: &'a Held, request: &ShareRequest, charged_to: Option<&'a GpuUuid>) -> Self {
        Self {
            owner: &held.owner,
            gpu: None,
            charged_to,
            memory: HeldMemory::Requested(request.memory),
            core: request.core,
            slots: request.slots,
            trusted: false,
            is_vendor: held.holdings.is_vendor,
        }
    }

    fn sums_on(&self, node: &Node, gpu: &Gpu) -> Sums {
        let (memory, _) = memory_on(gpu, self.memory, node.unit_bytes());
        [memory, self.core.into(), self.slots.into()]
    }
}

/// Compares the rows and flags of all GPUs, and the hints on them, with a naive count.
pub(super) fn check_gpus(node: &Node) -> Vec<Violation> {
    let mut violations = check_order(node);
    let parts = parts(node);
    for (at, gpu) in node.gpus().iter().enumerate() {
        let (certain, suspect) = count(node, gpu, &parts);
        for ((dimension, used), total) in DIMENSIONS.into_iter().zip(certain).zip(totals(gpu)) {
            if used > total {
                violations.push(Violation::Oversubscribed {
                    node: node.name.to_string(),
                    gpu: gpu.uuid.clone(),
                    dimension,
                    used,
                    total,
                });
            }
        }
        violations.extend(check_row(node, at, gpu, &parts, add(certain, suspect)));
        let named = parts
            .iter()
            .filter(|part| part.gpu.is_some_and(|reference| identifies(reference, gpu)));
        let owners: Vec<&OwnerId> = named.map(|part| part.owner).collect();
        for (owner, _) in owners
            .iter()
            .zip(owners.iter().skip(1))
            .filter(|(one, next)| one == next)
        {
            violations.push(Violation::SameGpuTwice {
                node: node.name.to_string(),
                owner: (*owner).clone(),
                gpu: gpu.uuid.clone(),
            });
        }
    }
    if node.inventory.is_some() {
        violations.extend(parts.iter().filter_map(|part| missing_gpu(node, part)));
    }
    violations.extend(node.hints.iter().filter_map(|hint| check_hint(node, hint)));
    violations
}

/// Returns true if a GPU takes no shares: it is reserved for the vendor's plugin, or this may have given it away.
fn is_withheld(node: &Node, gpu: &Gpu) -> bool {
    let any_unknown = node.held.iter().any(|held| held.holdings.unknown_whole > 0);
    !gpu.sharing || (any_unknown && is_for_vendor(node, gpu))
}

fn is_for_vendor(node: &Node, gpu: &Gpu) -> bool {
    let any_reserved = node.gpus().iter().any(|gpu| !gpu.sharing);
    node.serves_vendor() || !any_reserved || !gpu.sharing
}

/// All parts of all holdings; pending ones last, owner by owner: where there is room, and there where most memory is free.
fn parts(node: &Node) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    for held in &node.held {
        match &held.holdings.gpus {
            HeldGpus::Shares(shares) => parts.extend(shares.iter().map(|share| Part::of_share(held, share))),
            HeldGpus::Unknown(request) => parts.push(Part::of_request(held, request, None)),
            HeldGpus::Pending(_) => {}
        }
    }
    for held in &node.held {
        let HeldGpus::Pending(request) = &held.holdings.gpus else {
            continue;
        };
        let asked = Part::of_request(held, request, None);
        let mut ranked = Vec::new();
        for (at, gpu) in node.gpus().iter().enumerate() {
            let (certain, suspect) = count(node, gpu, &parts);
            let free = free(node, gpu, add(certain, suspect));
            let lacks_room = asked
                .sums_on(node, gpu)
                .iter()
                .zip(&free)
                .any(|(asked, free)| asked > free);
            let [memory, ..] = free;
            ranked.push((lacks_room, Reverse(memory), at, &gpu.uuid));
        }
        ranked.sort();
        ranked.truncate(usize::try_from(request.devices).unwrap_or(usize::MAX));
        let placed = ranked
            .into_iter()
            .map(|(.., uuid)| Part::of_request(held, request, Some(uuid)));
        parts.extend(placed);
    }
    parts
}

fn identifies(reference: &GpuRef, gpu: &Gpu) -> bool {
    match reference {
        GpuRef::Uuid(uuid) => gpu.uuid == *uuid,
        GpuRef::Minor(minor) => gpu.minor == *minor,
    }
}

/// Amounts that are certainly held of a GPU, and amounts that may be held besides.
fn count(node: &Node, gpu: &Gpu, parts: &[Part<'_>]) -> (Sums, Sums) {
    let (mut certain, mut suspect) = (Sums::default(), Sums::default());
    for part in parts.iter().filter(|part| may_be_on(node, part, gpu)) {
        let is_named = part.gpu.is_some_and(|reference| identifies(reference, gpu));
        let (_, is_known) = memory_on(gpu, part.memory, node.unit_bytes());
        let sums = if is_named && is_known && part.trusted {
            &mut certain
        } else {
            &mut suspect
        };
        *sums = add(*sums, part.sums_on(node, gpu));
    }
    (certain, suspect)
}

fn add(mut sums: Sums, more: Sums) -> Sums {
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum += more;
    }
    sums
}

/// Returns true if a part may be on a GPU, as far as is known.
fn may_be_on(node: &Node, part: &Part<'_>, gpu: &Gpu) -> bool {
    match part.gpu {
        None => part.charged_to.is_none_or(|uuid| *uuid == gpu.uuid),
        Some(reference @ GpuRef::Uuid(_)) => identifies(reference, gpu),
        Some(GpuRef::Minor(minor)) => {
            gpu.minor == *minor || node.gpus().iter().all(|gpu| gpu.minor != *minor)
        }
    }
}

/// Memory in hundredths of a byte, and false if that is a guess.
fn memory_on(gpu: &Gpu, memory: HeldMemory, unit_bytes: Option<u64>) -> (u128, bool) {
    let bytes = u128::from(gpu.memory_bytes);
    match memory {
        HeldMemory::Exact(memory) => (memory.hundredths().into(), true),
        HeldMemory::Requested(RequestedMemory::Bytes(asked)) => (u128::from(asked) * 100, true),
        HeldMemory::Requested(RequestedMemory::Ratio(percent)) => (u128::from(percent) * bytes, true),
        HeldMemory::Requested(RequestedMemory::Units(units)) => match unit_bytes {
            // Two factors of 64 bits and 100 may exceed 128 bits.
            Some(unit) => {
                let product = u128::from(units) * u128::from(unit);
                (product.saturating_mul(100).min(1 << 100), true)
            }
            None => (bytes * 100, false),
        },
    }
}

fn totals(gpu: &Gpu) -> Sums {
    [
        u128::from(gpu.memory_bytes) * 100,
        gpu.core.into(),
        gpu.slots.into(),
    ]
}

fn sums(amounts: Amounts) -> Sums {
    [
        amounts.memory.hundredths().into(),
        amounts.core.into(),
        amounts.slots.into(),
    ]
}

/// Amounts that are free for new shares when these are taken.
fn free(node: &Node, gpu: &Gpu, [memory, core, slots]: Sums) -> Sums {
    if !gpu.healthy || is_withheld(node, gpu) {
        return Sums::default();
    }
    let [all_memory, all_core, all_slots] = totals(gpu);
    [
        all_memory.saturating_sub(memory),
        all_core.saturating_sub(core),
        all_slots.saturating_sub(slots),
    ]
}

fn check_row(node: &Node, at: usize, gpu: &Gpu, parts: &[Part<'_>], taken: Sums) -> Option<Violation> {
    let Some(row) = node.rows.get(at) else {
        return Some(differs(node, format!("GPU {} has no row", gpu.uuid)));
    };
    let (free, total) = (free(node, gpu, taken), totals(gpu));
    if sums(row.total) != total || sums(row.free) != free {
        let detail = format!(
            "GPU {} has the row {row:?}, but {free:?} of {total:?} is free",
            gpu.uuid
        );
        return Some(differs(node, detail));
    }
    let occupies = |part: &&Part<'_>| {
        let [memory, core, _] = part.sums_on(node, gpu);
        may_be_on(node, part, gpu) && (memory > 0 || core > 0)
    };
    let occupying: Vec<&Part<'_>> = parts.iter().filter(occupies).collect();
    let expected = GpuFlags {
        is_occupied: !occupying.is_empty(),
        is_shared: occupying.iter().any(|part| !part.is_vendor),
        is_withheld: is_withheld(node, gpu),
    };
    let flags = node.flags.get(at);
    (flags != Some(&expected)).then(|| {
        let detail = format!("GPU {} has the flags {flags:?}, not {expected:?}", gpu.uuid);
        differs(node, detail)
    })
}

fn missing_gpu(node: &Node, part: &Part<'_>) -> Option<Violation> {
    let reference = part.gpu?;
    if node.gpus().iter().any(|gpu| identifies(reference, gpu)) {
        return None;
    }
    Some(Violation::MissingGpu {
        node: node.name.to_string(),
        owner: part.owner.clone(),
        gpu: match reference {
            GpuRef::Uuid(uuid) => uuid.to_string(),
            GpuRef::Minor(minor) => format!("minor {minor}"),
        },
    })
}

fn check_hint(node: &Node, hint: &Hint) -> Option<Violation> {
    let mut expected = Vec::new();
    let HeldGpus::Shares(shares) = &hint.holdings.gpus else {
        return Some(differs(
            node,
            format!("the hint of {} is of no known GPUs", hint.owner),
        ));
    };
    for share in shares {
        for (at, gpu) in node.gpus().iter().enumerate() {
            if let HeldMemory::Exact(memory) = share.memory
                && identifies(&share.gpu, gpu)
            {
                let (core, slots) = (share.core, share.slots);
                expected.push((at, Amounts { memory, core, slots }));
            }
        }
    }
    for (at, gpu) in node.gpus().iter().enumerate() {
        if hint.holdings.unknown_whole > 0 && is_for_vendor(node, gpu) {
            expected.push((at, gpu.total()));
        }
    }
    let (owner, charges) = (&hint.owner, &hint.charges);
    (**charges != *expected).then(|| {
        differs(
            node,
            format!("the hint of {owner} is charged as {charges:?} instead of {expected:?}"),
        )
    })
}

/// Checks the orders and sizes that look-ups rely on.
fn check_order(node: &Node) -> Vec<Violation> {
    let gpus = node.gpus();
    let mut uuids: Vec<&GpuUuid> = gpus.iter().map(|gpu| &gpu.uuid).collect();
    uuids.sort();
    let any_unavailable = gpus.iter().any(|gpu| !gpu.healthy || is_withheld(node, gpu));
    let conditions = [
        (node.rows.len() == gpus.len(), "there is not one row per GPU"),
        (
            gpus.is_sorted_by(|one, next| one.minor < next.minor),
            "GPUs are not ordered by minor",
        ),
        (
            uuids.is_sorted_by(|one, next| one < next),
            "two GPUs have one UUID",
        ),
        (
            node.any_unavailable == any_unavailable,
            "the flag for unavailable GPUs is wrong",
        ),
        (
            node.held.is_sorted_by(|one, next| one.owner < next.owner),
            "holdings are not ordered by owner",
        ),
        (
            node.hints.is_sorted_by(|one, next| one.owner < next.owner),
            "hints are not ordered by owner",
        ),
    ];
    let violated = conditions.into_iter().filter(|(holds, _)| !holds);
    violated
        .map(|(_, detail)| super::inconsistent(format!("node {}: {detail}", node.name)))
        .collect()
}

/// Compares the free amounts of devices of other types with a naive count.
pub(super) fn check_devices(node: &Node) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (type_at, of_type) in node.types().iter().enumerate() {
        for (at, device) in of_type.devices.iter().enumerate() {
            for (resource, total) in &device.resources {
                let (certain, suspect) = count_device(node, of_type, device, resource);
                if certain > u128::from(*total) {
                    violations.push(Violation::DeviceOversubscribed {
                        node: node.name.to_string(),
                        kind: of_type.kind.clone(),
                        id: device.id.clone(),
                        resource: resource.clone(),
                        used: certain,
                        total: *total,
                    });
                }
                let free = u128::from(*total).saturating_sub(certain + suspect);
                let kept = node
                    .free_devices
                    .get(type_at)
                    .and_then(|of_type| of_type.get(at)?.get(resource));
                if kept.map(|kept| u128::from(*kept)) != Some(free) {
                    let (kind, id) = (&of_type.kind, &device.id);
                    let detail = format!("{kind} {id}: {kept:?} of {resource} is kept as free, not {free}");
                    violations.push(differs(node, detail));
                }
            }
        }
    }
    violations
}

/// The amount that is certainly held of a device, and the amount that may be held besides.
fn count_device(
    node: &Node,
    of_type: &DevicesOfType,
    device: &Device,
    resource: &ResourceName,
) -> (u128, u128) {
    let (mut certain, mut suspect) = (0, 0);
    let parts = node.held.iter().flat_map(|held| &held.holdings.others);
    for part in parts.filter(|part| part.kind == of_type.kind) {
        let amount = u128::from(part.amounts.get(resource).copied().unwrap_or(0));
        let (is_this, may_be_any) = match &part.device {
            DeviceRef::Id(id) => (device.id == *id, false),
            DeviceRef::Minor(minor) => {
                let is_known = of_type.devices.iter().any(|device| device.minor == *minor);
                (device.minor == *minor, !is_known)
            }
            DeviceRef::Any => (false, true),
        };
        if is_this && part.trusted {
            certain += amount;
        } else if is_this || may_be_any {
            suspect += amount;
        }
    }
    (certain, suspect)
}
