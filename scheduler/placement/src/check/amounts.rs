//! The naive count of one node: for each device of each type, the sum over every held part that may be of this device.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Violation, differs};
use crate::data::amounts::{Amounts, NamedAmounts};
use crate::data::device::{Device, DeviceRef};
use crate::data::holding::{HeldMemory, HeldPart};
use crate::data::ident::{DeviceId, DeviceType, OwnerId};
use crate::data::request::RequestedMemory;
use crate::state::node::{GpuFlags, Hint, Node};

/// Sums of amounts by resource, which cannot overflow. Memory of a GPU is in hundredths of a byte.
type Sums<'a> = BTreeMap<&'a str, u128>;

/// One part of a holding, with its owner.
#[derive(Clone)]
struct Part<'a> {
    owner: &'a OwnerId,
    held: Cow<'a, HeldPart>,
    /// The GPU that a share of a pending holding is charged to; `None` for all other parts.
    charged_to: Option<&'a DeviceId>,
    is_vendor: bool,
}

impl Part<'_> {
    /// The amounts that the part takes of a device, if this is the device that the part is of.
    fn amounts_of(&self, node: &Node, device: &Device) -> Sums<'_> {
        let mut sums = named(&self.held.resources);
        if self.held.kind == DeviceType::Gpu {
            let (memory, _) = memory_on(device, self.held.memory, node.inventory.unit_bytes);
            sums.extend(gpu_sums(memory, self.held.core, self.held.slots));
        }
        sums
    }

    /// Returns true if the part may be of a device, as far as is known.
    fn may_be_of(&self, node: &Node, kind: &DeviceType, device: &Device) -> bool {
        if self.held.kind != *kind {
            return false;
        }
        match &self.held.device {
            DeviceRef::Id(id) => device.id == *id,
            DeviceRef::Any => self.charged_to.is_none_or(|id| *id == device.id),
            // Minors change: one that no device has may be any device.
            DeviceRef::Minor(minor) => {
                device.minor == *minor || !devices(node, kind).iter().any(|device| device.minor == *minor)
            }
        }
    }
}

fn named(resources: &NamedAmounts) -> Sums<'_> {
    let mut sums = Sums::new();
    for (resource, amount) in resources {
        sums.insert(resource.as_str(), u128::from(*amount));
    }
    sums
}

/// An amount by its resource; zero where there is none.
fn amount(sums: &Sums<'_>, resource: &str) -> u128 {
    sums.get(resource).copied().unwrap_or(0)
}

pub(super) fn devices<'a>(node: &'a Node, kind: &DeviceType) -> &'a [Device] {
    for (of, devices) in node.inventory.types() {
        if of == kind {
            return devices;
        }
    }
    &[]
}

/// Compares the free amounts of all devices, the flags of GPUs, and the hints on them, with a naive count.
pub(super) fn check_amounts(node: &Node) -> Vec<Violation> {
    let mut violations = check_order(node);
    let parts = parts(node);
    for (type_at, (kind, devices)) in node.inventory.types().enumerate() {
        for (at, device) in devices.iter().enumerate() {
            let (certain, suspect) = count(node, kind, device, &parts);
            let totals = totals(kind, device);
            for (resource, total) in &totals {
                let used = amount(&certain, resource);
                if used > *total + kept_by_driver(kind, device, resource) {
                    violations.push(Violation::Oversubscribed {
                        node: node.name.to_string(),
                        id: device.id.clone(),
                        resource: (*resource).into(),
                        used,
                        total: *total,
                    });
                }
            }
            let free = free(node, kind, device, &add(certain, suspect));
            let kept = if *kind == DeviceType::Gpu {
                violations.extend(check_flags(node, at, device, &parts));
                violations.extend(check_same_gpu(device, &parts));
                let row = node.rows.get(at);
                row.map(|row| (sums(row.total), sums(row.free)))
            } else {
                // The total is in the inventory alone.
                let kept = node.free_of_type(type_at).get(at);
                kept.map(|free| (totals.clone(), named(free)))
            };
            let expected = (totals, free);
            if kept.as_ref() != Some(&expected) {
                let id = &device.id;
                let text = format!("{kind} {id}: total and free amounts are {kept:?}, not {expected:?}");
                violations.push(differs(node, &text));
            }
        }
    }
    if node.hardware.is_some() {
        violations.extend(parts.iter().filter_map(|part| missing_gpu(node, part)));
    }
    violations.extend(node.hints.iter().filter_map(|hint| check_hint(node, hint)));
    violations
}

/// Returns true if a GPU takes no shares: it is left to the vendor's plugin, or that plugin may have allocated it.
fn is_withheld(node: &Node, gpu: &Device) -> bool {
    let any_unknown = node.held.iter().any(|held| held.holdings.n_unknown_gpus > 0);
    !gpu.sharing || (any_unknown && is_for_vendor(node, gpu))
}

/// Returns true if a request for whole GPUs by the vendor's resource name may get the GPU.
fn is_for_vendor(node: &Node, gpu: &Device) -> bool {
    let any_reserved = node.gpus().iter().any(|gpu| !gpu.sharing);
    node.inventory.serves_vendor || !any_reserved || !gpu.sharing
}

/// All parts of all holdings. Those of pending holdings come last, owner by owner, each charged to the GPUs that have room and
/// the most free memory.
fn parts(node: &Node) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    for held in &node.held {
        for part in &held.holdings.parts {
            parts.push(Part {
                owner: &held.owner,
                held: Cow::Borrowed(part),
                charged_to: None,
                is_vendor: held.holdings.is_vendor,
            });
        }
    }
    for held in &node.held {
        let Some(request) = &held.holdings.pending else {
            continue;
        };
        let asked = Part {
            owner: &held.owner,
            held: Cow::Owned(HeldPart::from(request)),
            charged_to: None,
            is_vendor: held.holdings.is_vendor,
        };
        let mut ranked = Vec::new();
        for (at, gpu) in node.gpus().iter().enumerate() {
            let (certain, suspect) = count(node, &DeviceType::Gpu, gpu, &parts);
            let free = free(node, &DeviceType::Gpu, gpu, &add(certain, suspect));
            let needed = asked.amounts_of(node, gpu);
            let lacks_room = needed.iter().any(|(resource, n)| *n > amount(&free, resource));
            ranked.push((lacks_room, Reverse(amount(&free, "memory")), at, &gpu.id));
        }
        ranked.sort();
        ranked.truncate(usize::try_from(request.devices).unwrap_or(usize::MAX));
        for (.., id) in ranked {
            let mut part = asked.clone();
            part.charged_to = Some(id);
            parts.push(part);
        }
    }
    parts
}

/// Amounts that are certainly held of a device, and amounts that may be held besides.
fn count<'a>(node: &Node, kind: &DeviceType, device: &Device, parts: &'a [Part<'_>]) -> (Sums<'a>, Sums<'a>) {
    let (mut certain, mut suspect) = (Sums::new(), Sums::new());
    for part in parts.iter().filter(|part| part.may_be_of(node, kind, device)) {
        let (_, is_known) = memory_on(device, part.held.memory, node.inventory.unit_bytes);
        let is_certain = part.held.device.identifies(device) && is_known && part.held.trusted;
        let sums = if is_certain { &mut certain } else { &mut suspect };
        *sums = add(std::mem::take(sums), part.amounts_of(node, device));
    }
    (certain, suspect)
}

fn add<'a>(mut sums: Sums<'a>, more: Sums<'a>) -> Sums<'a> {
    for (resource, amount) in more {
        *sums.entry(resource).or_default() += amount;
    }
    sums
}

/// The held memory in hundredths of a byte, and true if it is known; else all memory of the device, and false.
fn memory_on(device: &Device, memory: HeldMemory, unit_bytes: Option<u64>) -> (u128, bool) {
    let bytes = u128::from(device.memory_bytes);
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

/// All that a device has, by resource.
fn totals<'a>(kind: &DeviceType, device: &'a Device) -> Sums<'a> {
    let mut totals = named(&device.resources);
    if *kind == DeviceType::Gpu {
        let memory = u128::from(device.memory_bytes) * 100;
        totals.extend(gpu_sums(memory, device.core, device.slots));
    }
    totals
}

/// The amount beyond the total of a resource that may be held without oversubscription: memory that the driver keeps for itself.
fn kept_by_driver(kind: &DeviceType, device: &Device, resource: &str) -> u128 {
    if *kind == DeviceType::Gpu && resource == "memory" {
        u128::from(device.reserved_bytes) * 100
    } else {
        0
    }
}

/// Amounts of a GPU by resource.
fn sums(amounts: Amounts) -> Sums<'static> {
    gpu_sums(amounts.memory.hundredths().into(), amounts.core, amounts.slots)
}

/// Memory in hundredths of a byte, computing power and slots by resource.
fn gpu_sums(memory: u128, core: u32, slots: u32) -> Sums<'static> {
    [("memory", memory), ("core", core.into()), ("slots", slots.into())].into()
}

/// The amounts of a device that are free for new owners when other owners hold the `taken` amounts.
fn free<'a>(node: &Node, kind: &DeviceType, device: &'a Device, taken: &Sums<'_>) -> Sums<'a> {
    let is_gpu = *kind == DeviceType::Gpu;
    let mut free = totals(kind, device);
    for (resource, free) in &mut free {
        let is_unavailable = is_gpu && (!device.healthy || device.closed || is_withheld(node, device));
        *free = if is_unavailable {
            0
        } else {
            free.saturating_sub(amount(taken, resource))
        };
    }
    free
}

/// Compares the flags that a node keeps for a GPU with the flags that all held parts give.
fn check_flags(node: &Node, at: usize, gpu: &Device, parts: &[Part<'_>]) -> Option<Violation> {
    // A missing row is reported by the comparison of amounts.
    node.rows.get(at)?;
    let mut expected = GpuFlags {
        is_withheld: is_withheld(node, gpu),
        ..GpuFlags::default()
    };
    let parts = parts.iter();
    for part in parts.filter(|part| part.may_be_of(node, &DeviceType::Gpu, gpu)) {
        let amounts = part.amounts_of(node, gpu);
        // A slot alone does not keep a GPU from being allocated whole.
        if amount(&amounts, "memory") > 0 || amount(&amounts, "core") > 0 {
            expected.is_occupied = true;
            expected.is_shared |= !part.is_vendor;
        }
    }
    let flags = node.flags.get(at);
    if flags == Some(&expected) {
        return None;
    }
    let text = format!("GPU {} has the flags {flags:?}, not {expected:?}", gpu.id);
    Some(differs(node, &text))
}

/// Finds owners of which two parts name the same GPU.
fn check_same_gpu(gpu: &Device, parts: &[Part<'_>]) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut last = None;
    for part in parts {
        if part.held.kind != DeviceType::Gpu || !part.held.device.identifies(gpu) {
            continue;
        }
        // Parts are in the order of owners.
        if last == Some(part.owner) {
            let text = format!("{} holds two parts of {}", part.owner, gpu.id);
            violations.push(Violation::SameGpuTwice(text));
        }
        last = Some(part.owner);
    }
    violations
}

/// The violation of a part that names a GPU which its node does not have; `None` if the node has it, or the part names none.
fn missing_gpu(node: &Node, part: &Part<'_>) -> Option<Violation> {
    let device = &part.held.device;
    let is_found = node.gpus().iter().any(|gpu| device.identifies(gpu));
    if part.held.kind != DeviceType::Gpu || *device == DeviceRef::Any || is_found {
        return None;
    }
    let (owner, node) = (part.owner, &node.name);
    Some(Violation::MissingGpu(format!(
        "node {node} has no {device:?}, which {owner} holds"
    )))
}

/// Compares the amounts that a hint is charged on GPUs with those that its holdings name.
fn check_hint(node: &Node, hint: &Hint) -> Option<Violation> {
    let mut expected = Vec::new();
    let parts = hint.holdings.parts.iter();
    for part in parts.filter(|part| part.kind == DeviceType::Gpu) {
        let (HeldMemory::Exact(memory), DeviceRef::Id(_)) = (part.memory, &part.device) else {
            let text = format!("the hint of {} is not of known amounts of known GPUs", hint.owner);
            return Some(differs(node, &text));
        };
        for (at, gpu) in node.gpus().iter().enumerate() {
            if part.device.identifies(gpu) {
                let (core, slots) = (part.core, part.slots);
                expected.push((at, Amounts { memory, core, slots }));
            }
        }
    }
    for (at, gpu) in node.gpus().iter().enumerate() {
        if hint.holdings.n_unknown_gpus > 0 && is_for_vendor(node, gpu) {
            expected.push((at, gpu.total()));
        }
    }
    let (owner, charges) = (&hint.owner, &hint.gpu_charges);
    if **charges == *expected {
        return None;
    }
    let text = format!("the hint of {owner} is charged as {charges:?} instead of {expected:?}");
    Some(differs(node, &text))
}

/// Checks the orders and sizes that look-ups rely on.
fn check_order(node: &Node) -> Vec<Violation> {
    let gpus = node.gpus();
    let mut ids: Vec<&DeviceId> = gpus.iter().map(|gpu| &gpu.id).collect();
    ids.sort();
    let mut all = gpus.iter();
    let any_unavailable = all.any(|gpu| !gpu.healthy || gpu.closed || is_withheld(node, gpu));
    let conditions = [
        (node.rows.len() == gpus.len(), "there is not one row per GPU"),
        (
            gpus.is_sorted_by(|one, next| one.minor < next.minor),
            "GPUs are not ordered by minor",
        ),
        (ids.is_sorted_by(|one, next| one < next), "two GPUs have one UUID"),
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
    let mut violations = Vec::new();
    for (holds, text) in conditions {
        if !holds {
            violations.push(Violation::Index(format!("node {}: {text}", node.name)));
        }
    }
    violations
}
