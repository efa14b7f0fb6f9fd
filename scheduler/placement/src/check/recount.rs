//! The naive count of one node: for each device, a sum over every share there is.

use super::Violation;
use crate::amounts::{Amounts, Dimension};
use crate::gpu::Gpu;
use crate::holding::{GpuRef, HeldMemory, HeldShare, Holding};
use crate::ident::{GpuUuid, OwnerId};
use crate::node::{Hint, Node};
use crate::request::MemoryAsk;
use crate::whole::Mark;

/// Sums wide enough that nothing that is added up can exceed them: memory (hundredths of a byte), core, slots.
type Sums = [u128; 3];

const DIMENSIONS: [Dimension; 3] = [Dimension::Memory, Dimension::Core, Dimension::Slots];

/// One part of a holding, as if holdings were a flat list.
struct Part<'a> {
    owner: &'a OwnerId,
    /// `None` if it is not known which device it is.
    gpu: Option<&'a GpuRef>,
    /// The device that it is charged on until that is known, if on one alone.
    charged_on: Option<&'a GpuUuid>,
    memory: HeldMemory,
    core: u32,
    slots: u32,
    trusted: bool,
    is_vendor: bool,
}

pub(super) fn check_node(node: &Node) -> Vec<Violation> {
    let mut violations = check_shape(node);
    let mut parts: Vec<Part<'_>> = parts(node).collect();
    place_somewhere(node, &mut parts);
    for (at, gpu) in node.gpus().iter().enumerate() {
        let (certain, suspect) = count(node, gpu, &parts);
        violations.extend(oversubscription(node, gpu, certain));
        violations.extend(check_row(node, at, &parts, certain, suspect));
        violations.extend(shared_twice(node, gpu, &parts));
    }
    if node.inventory.is_some() {
        violations.extend(missing(node, &parts));
    }
    violations.extend(node.hints.iter().filter_map(|hint| check_hint(node, hint)));
    violations
}

/// Whether a GPU takes no shares: it is kept for the vendor's plugin, or that may have given it away.
fn is_withheld(node: &Node, gpu: &Gpu) -> bool {
    let any_apart = node.gpus().iter().any(|gpu| !gpu.sharing);
    let serves_vendor = node
        .inventory
        .as_ref()
        .is_some_and(|inventory| inventory.serves_vendor);
    let any_unknown = node.held.iter().any(|held| held.holdings.unknown_whole > 0);
    let may_be_given = serves_vendor || !any_apart;
    !gpu.sharing || (any_unknown && may_be_given)
}

fn parts(node: &Node) -> impl Iterator<Item = Part<'_>> {
    node.held.iter().flat_map(|held| {
        let (owner, is_vendor) = (&held.owner, held.holdings.is_vendor);
        let parts: Vec<Part<'_>> = match &held.holdings.gpus {
            Holding::Shares(shares) => shares
                .iter()
                .map(
                    |HeldShare {
                         gpu,
                         memory,
                         core,
                         slots,
                         trusted,
                     }| {
                        let (memory, core, slots, trusted) = (*memory, *core, *slots, *trusted);
                        Part {
                            owner,
                            gpu: Some(gpu),
                            charged_on: None,
                            memory,
                            core,
                            slots,
                            trusted,
                            is_vendor,
                        }
                    },
                )
                .collect(),
            Holding::Anywhere(request) => {
                let memory = HeldMemory::Ask(request.memory);
                let (core, slots) = (request.core, request.slots);
                vec![Part {
                    owner,
                    gpu: None,
                    charged_on: None,
                    memory,
                    core,
                    slots,
                    trusted: false,
                    is_vendor,
                }]
            }
            // Placed once everything else is known.
            Holding::Somewhere(_) => Vec::new(),
        };
        parts
    })
}

/// Adds what is on devices that are yet to be known, owner by owner: where it has room, and there where most memory is free.
fn place_somewhere<'a>(node: &'a Node, parts: &mut Vec<Part<'a>>) {
    for held in &node.held {
        let Holding::Somewhere(request) = &held.holdings.gpus else {
            continue;
        };
        let memory = HeldMemory::Ask(request.memory);
        let mut ranked: Vec<(bool, std::cmp::Reverse<u128>, usize, &'a GpuUuid)> = Vec::new();
        for (at, gpu) in node.gpus().iter().enumerate() {
            let mut free = Sums::default();
            if gpu.healthy && !is_withheld(node, gpu) {
                let (certain, suspect) = count(node, gpu, parts);
                for (free, (total, taken)) in free
                    .iter_mut()
                    .zip(totals(gpu).into_iter().zip(certain.into_iter().zip(suspect)))
                {
                    *free = total.saturating_sub(taken.0 + taken.1);
                }
            }
            let asked = [
                memory_on(gpu, memory, node.unit_bytes()).0,
                request.core.into(),
                request.slots.into(),
            ];
            let lacks_room = asked.iter().zip(&free).any(|(asked, free)| asked > free);
            ranked.push((
                lacks_room,
                std::cmp::Reverse(free.first().copied().unwrap_or_default()),
                at,
                &gpu.uuid,
            ));
        }
        ranked.sort();
        for (_, _, _, uuid) in ranked
            .into_iter()
            .take(usize::try_from(request.devices).unwrap_or(usize::MAX))
        {
            let (owner, is_vendor, core, slots) =
                (&held.owner, held.holdings.is_vendor, request.core, request.slots);
            parts.push(Part {
                owner,
                gpu: None,
                charged_on: Some(uuid),
                memory,
                core,
                slots,
                trusted: false,
                is_vendor,
            });
        }
    }
}

fn names(reference: &GpuRef, gpu: &Gpu) -> bool {
    match reference {
        GpuRef::Uuid(uuid) => gpu.uuid == *uuid,
        GpuRef::Minor(minor) => gpu.minor == *minor,
    }
}

/// What is certainly taken of a device, and what may be taken of it besides.
fn count(node: &Node, gpu: &Gpu, parts: &[Part<'_>]) -> (Sums, Sums) {
    let (mut certain, mut suspect) = (Sums::default(), Sums::default());
    for part in parts {
        let named = part.gpu.is_some_and(|reference| names(reference, gpu));
        if !may_be_on(node, part, gpu) {
            continue;
        }
        let (memory, known) = memory_on(gpu, part.memory, node.unit_bytes());
        let sums = if named && known && part.trusted {
            &mut certain
        } else {
            &mut suspect
        };
        for (sum, amount) in sums.iter_mut().zip([memory, part.core.into(), part.slots.into()]) {
            *sum += amount;
        }
    }
    (certain, suspect)
}

/// Hundredths of a byte, and whether that is more than a guess.
fn memory_on(gpu: &Gpu, memory: HeldMemory, unit_bytes: Option<u64>) -> (u128, bool) {
    let bytes = u128::from(gpu.memory_bytes);
    match memory {
        HeldMemory::Exact(memory) => (memory.hundredths().into(), true),
        HeldMemory::Ask(MemoryAsk::Bytes(asked)) => (u128::from(asked) * 100, true),
        HeldMemory::Ask(MemoryAsk::Ratio(percent)) => (u128::from(percent) * bytes, true),
        HeldMemory::Ask(MemoryAsk::Units(units)) => match unit_bytes {
            // Two factors of 64 bits and 100 may exceed 128 bits.
            Some(unit) => (
                (u128::from(units) * u128::from(unit))
                    .saturating_mul(100)
                    .min(1 << 100),
                true,
            ),
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

fn oversubscription(node: &Node, gpu: &Gpu, certain: Sums) -> impl Iterator<Item = Violation> {
    let all = DIMENSIONS.into_iter().zip(certain.into_iter().zip(totals(gpu)));
    all.filter(|(_, (used, total))| used > total)
        .map(|(dimension, (used, total))| Violation::Oversubscribed {
            node: node.name.to_string(),
            gpu: gpu.uuid.clone(),
            dimension,
            used,
            total,
        })
}

fn check_row(node: &Node, at: usize, parts: &[Part<'_>], certain: Sums, suspect: Sums) -> Option<Violation> {
    let (gpu, row) = (node.gpus().get(at)?, node.rows.get(at));
    let differs = |detail| {
        Some(Violation::RowDiffers {
            node: node.name.to_string(),
            detail,
        })
    };
    let Some(row) = row else {
        return differs(format!("GPU {} has no row", gpu.uuid));
    };
    let total = totals(gpu);
    let mut free = Sums::default();
    if gpu.healthy && !is_withheld(node, gpu) {
        let taken = certain
            .into_iter()
            .zip(suspect)
            .map(|(certain, suspect)| certain + suspect);
        for (free, (total, taken)) in free.iter_mut().zip(total.into_iter().zip(taken)) {
            *free = total.saturating_sub(taken);
        }
    }
    if sums(row.total) != total || sums(row.free) != free {
        return differs(format!(
            "GPU {} is kept as {row:?}, but {free:?} of {total:?} is free",
            gpu.uuid
        ));
    }
    let takes = |part: &Part<'_>| {
        may_be_on(node, part, gpu) && (memory_on(gpu, part.memory, node.unit_bytes()).0 > 0 || part.core > 0)
    };
    let is_held = parts.iter().any(takes);
    let is_shared = parts.iter().any(|part| takes(part) && !part.is_vendor);
    let expected = Mark {
        is_held,
        is_shared,
        is_withheld: is_withheld(node, gpu),
    };
    if node.marks.get(at) == Some(&expected) {
        return None;
    }
    differs(format!(
        "GPU {} is marked {:?}, not {expected:?}",
        gpu.uuid,
        node.marks.get(at)
    ))
}

/// Whether a part may be on a GPU, for all that is known.
fn may_be_on(node: &Node, part: &Part<'_>, gpu: &Gpu) -> bool {
    match part.gpu {
        None => part.charged_on.is_none_or(|uuid| *uuid == gpu.uuid),
        Some(reference @ GpuRef::Uuid(_)) => names(reference, gpu),
        Some(GpuRef::Minor(minor)) => {
            gpu.minor == *minor || node.gpus().iter().all(|gpu| gpu.minor != *minor)
        }
    }
}

fn shared_twice(node: &Node, gpu: &Gpu, parts: &[Part<'_>]) -> Vec<Violation> {
    let mut owners: Vec<&OwnerId> = Vec::new();
    owners.extend(
        parts
            .iter()
            .filter(|part| part.gpu.is_some_and(|reference| names(reference, gpu)))
            .map(|part| part.owner),
    );
    let pairs = owners.iter().zip(owners.iter().skip(1));
    let twice = pairs
        .filter(|(one, next)| one == next)
        .map(|(owner, _)| (*owner).clone());
    twice
        .map(|owner| Violation::SameGpuTwice {
            node: node.name.to_string(),
            owner,
            gpu: gpu.uuid.clone(),
        })
        .collect()
}

fn missing(node: &Node, parts: &[Part<'_>]) -> Vec<Violation> {
    let missing = |part: &Part<'_>| {
        let reference = part
            .gpu
            .filter(|reference| node.gpus().iter().all(|gpu| !names(reference, gpu)))?;
        let gpu = match reference {
            GpuRef::Uuid(uuid) => uuid.to_string(),
            GpuRef::Minor(minor) => format!("minor {minor}"),
        };
        Some(Violation::MissingGpu {
            node: node.name.to_string(),
            owner: part.owner.clone(),
            gpu,
        })
    };
    parts.iter().filter_map(missing).collect()
}

fn check_hint(node: &Node, hint: &Hint) -> Option<Violation> {
    let mut expected = Vec::new();
    for share in &hint.placement.shares {
        for (at, gpu) in node.gpus().iter().enumerate() {
            if gpu.uuid == share.gpu {
                expected.push((at, share.amounts));
            }
        }
    }
    let any_apart = node.gpus().iter().any(|gpu| !gpu.sharing);
    let serves_vendor = node
        .inventory
        .as_ref()
        .is_some_and(|inventory| inventory.serves_vendor);
    for (at, gpu) in node.gpus().iter().enumerate() {
        if hint.placement.unknown_whole > 0 && (serves_vendor || !any_apart || !gpu.sharing) {
            expected.push((at, gpu.total()));
        }
    }
    let detail = || {
        format!(
            "the hint of {} is kept as {:?} instead of {expected:?}",
            hint.owner, hint.charges
        )
    };
    (*hint.charges != *expected).then(|| Violation::RowDiffers {
        node: node.name.to_string(),
        detail: detail(),
    })
}

/// The orders and sizes that look-ups rely on.
fn check_shape(node: &Node) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut demand = |holds: bool, what: &str| {
        if !holds {
            violations.push(Violation::Index {
                detail: format!("node {}: {what}", node.name),
            });
        }
    };
    let (gpus, rows) = (node.gpus(), node.rows.len());
    demand(rows == gpus.len(), "there is not one row per GPU");
    demand(
        gpus.is_sorted_by(|one, next| one.minor < next.minor),
        "GPUs are not ordered by minor",
    );
    let distinct = |(at, gpu): (usize, &Gpu)| gpus.iter().skip(at + 1).all(|other| other.uuid != gpu.uuid);
    demand(gpus.iter().enumerate().all(distinct), "two GPUs have one UUID");
    let any_aside = gpus.iter().any(|gpu| !gpu.healthy || is_withheld(node, gpu));
    demand(
        node.any_aside == any_aside,
        "it is not noted whether a GPU is sick or withheld",
    );
    demand(
        node.held.is_sorted_by(|one, next| one.owner < next.owner),
        "holdings are not ordered by owner",
    );
    demand(
        node.hints.is_sorted_by(|one, next| one.owner < next.owner),
        "hints are not ordered by owner",
    );
    violations
}
