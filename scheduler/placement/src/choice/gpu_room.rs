//! Fit: compares the free amounts of a node's GPUs with a request, apart from rules; most of the time of a filter goes here.
//!
//! A few comparisons per GPU, without allocation. Pods that ask for whole GPUs by the vendor's resource name (`nvidia.com/gpu`)
//! and pods that share never use one GPU: where gpushare's plugin serves that resource, the engine chooses different GPUs for
//! them. If the vendor's plugin takes any of its GPUs, whole GPUs are refused while one of these is shared, and shares while
//! that plugin may have allocated any of them.

use crate::data::amounts::{Amounts, NamedAmounts};
use crate::data::device::Device;
use crate::data::holding::{Hints, Share, n_unknown_whole};
use crate::data::ident::DeviceType;
use crate::data::reason::Reason;
use crate::data::request::{RequestedGpus, ShareNeed, ShareRequest};
use crate::state::node::{GpuFlags, Node, Row};

/// Checks that the GPUs of a node have room for a request.
#[inline]
pub(crate) fn fit_gpus(node: &Node, request: &RequestedGpus, hints: Hints<'_>) -> Result<(), Reason> {
    match request {
        RequestedGpus::Share(request) => fit_shares(node, request, hints),
        RequestedGpus::Whole(n) => fit_whole(node, *n, hints),
        RequestedGpus::All { slots } => share_all_gpus(node, *slots, hints).map(drop),
        RequestedGpus::Nothing => Ok(()),
    }
}

/// A request for shares in the terms of this node; else the reason of the refusal, such as a node without GPUs.
#[inline]
pub(crate) fn share_need(node: &Node, request: &ShareRequest) -> Result<ShareNeed, Reason> {
    if node.rows.is_empty() {
        return Err(Reason::NoDevice);
    }
    ShareNeed::new(request, node.inventory.unit_bytes)
}

/// Checks that enough GPUs of a node have room for a share.
#[inline]
fn fit_shares(node: &Node, request: &ShareRequest, hints: Hints<'_>) -> Result<(), Reason> {
    let need = share_need(node, request)?;
    // On most nodes no hint counts, and then rows are compared without a copy.
    let comparison = if node.any_hint_counts(hints) {
        compare(need, node.rows_with(hints))
    } else {
        compare(need, node.rows.iter().copied())
    };
    match comparison {
        Err(lacks) if node.any_unavailable => Err(reason_with_unavailable(node, need, hints, lacks)),
        comparison => comparison.map_err(|lacks| lacks.reason(need)),
    }
}

/// The reason of a refusal where some GPUs are unhealthy, closed or withheld. The rows of such GPUs have nothing free, which
/// would hide what the available GPUs lack.
fn reason_with_unavailable(node: &Node, need: ShareNeed, hints: Hints<'_>, all: Lacks) -> Reason {
    // Health, maintenance and vendors do not matter if even an empty node were too small.
    if all.has_too_few_large_enough(need) {
        return Reason::TooLarge;
    }
    let open = node.open_rows(hints);
    let available = open.clone().filter(|(.., flags)| !flags.is_withheld);
    if let Err(lacks) = compare(need, available.map(|(row, ..)| row))
        && !lacks.has_too_few_large_enough(need)
    {
        return lacks.reason(need);
    }
    let healthy = node.rows_with(hints).zip(node.gpus());
    let healthy = healthy.filter(|(_, gpu)| gpu.healthy).map(|(row, _)| row);
    if compare(need, healthy).is_err_and(|lacks| lacks.has_too_few_large_enough(need)) {
        return Reason::Unhealthy;
    }
    let open = open.map(|(row, ..)| row);
    if compare(need, open).is_err_and(|lacks| lacks.has_too_few_large_enough(need)) {
        return Reason::Closed;
    }
    Reason::Vendor
}

/// The dimensions in which GPUs lack room.
#[derive(Clone, Copy, Default)]
struct Lacks {
    /// Number of GPUs that could take the share if they were empty.
    n_large_enough: usize,
    /// Bit `1 << set` is set if one of these GPUs lacks exactly this set of dimensions; memory is 1, core 2, slots 4.
    sets: u8,
}

/// Compares a need with GPUs until enough have room.
#[inline]
fn compare(need: ShareNeed, rows: impl Iterator<Item = Row>) -> Result<(), Lacks> {
    let mut n_missing = need.devices;
    let mut lacks = Lacks::default();
    for Row { free, total } in rows {
        let needed = need.amounts_on(total);
        // Without branches, since most of a filter's time goes into this loop.
        let set = u8::from(needed.memory > free.memory)
            | u8::from(needed.core > free.core) << 1
            | u8::from(needed.slots > free.slots) << 2;
        if set == 0 {
            // Never below zero, because a need is for at least one GPU.
            n_missing -= 1;
            if n_missing == 0 {
                return Ok(());
            }
        }
        if needed.within(total) {
            lacks.n_large_enough += 1;
            lacks.sets |= 1 << set;
        }
    }
    Err(lacks)
}

impl Lacks {
    /// Returns true if fewer GPUs than needed could take the share even if they were empty.
    fn has_too_few_large_enough(self, need: ShareNeed) -> bool {
        self.n_large_enough < need.devices
    }

    /// The reason of the GPU that lacks the fewest dimensions.
    fn reason(self, need: ShareNeed) -> Reason {
        // Sets of dimensions as in `Lacks::sets`. A GPU that lacks no dimension has room, so that there are too few of such GPUs.
        const FEWEST_FIRST: [(u8, Reason); 8] = [
            (0b000, Reason::TooFew),
            (0b001, Reason::Memory),
            (0b010, Reason::Core),
            (0b100, Reason::Slots),
            (0b011, Reason::Memory),
            (0b101, Reason::Memory),
            (0b110, Reason::Core),
            (0b111, Reason::Memory),
        ];
        if self.has_too_few_large_enough(need) {
            return Reason::TooLarge;
        }
        // Always found, since a need is for at least one GPU, and so one is large enough here.
        let nearest = FEWEST_FIRST.iter().find(|(set, _)| self.sets & (1 << set) != 0);
        nearest.map_or(Reason::TooLarge, |(_, reason)| *reason)
    }
}

/// Checks one GPU, for an explanation, against the amounts that a request takes of it.
pub(crate) fn fit_gpu(gpu: &Device, flags: GpuFlags, free: Amounts, need: Amounts) -> Result<(), Reason> {
    // Size comes first: no end of another pod, and no repair, would make the request fit.
    if !need.within(gpu.total()) {
        return Err(Reason::TooLarge);
    }
    if !gpu.healthy {
        return Err(Reason::Unhealthy);
    }
    if gpu.closed {
        return Err(Reason::Closed);
    }
    if flags.is_withheld {
        return Err(Reason::Vendor);
    }
    need.lacking(free).map_or(Ok(()), Err)
}

/// Checks that `n` whole GPUs can be had.
pub(crate) fn fit_whole(node: &Node, n: u32, hints: Hints<'_>) -> Result<(), Reason> {
    let inventory = &node.inventory;
    if inventory.gpus.is_empty() {
        // kube-scheduler knows how many GPUs kubelet offers, but not which pods share them.
        for held in &node.held {
            if !held.holdings.is_vendor && held.holdings.has_parts_of(&DeviceType::Gpu) {
                return Err(Reason::Vendor);
            }
        }
        return Ok(());
    }
    let n = usize::try_from(n).unwrap_or(usize::MAX);
    // `TooLarge`, so that kube-scheduler tries no eviction, which would not help.
    if inventory.for_vendor().count() < n {
        return Err(Reason::TooLarge);
    }
    // The vendor's plugin would allocate a shared GPU, since it knows nothing of shares.
    if !inventory.serves_vendor && is_any_shared(node, hints) {
        return Err(Reason::Vendor);
    }
    let mut n_unknown = n_unknown_whole(&node.held);
    for hint in node.counted_hints(hints) {
        n_unknown = n_unknown.saturating_add(hint.holdings.n_unknown_gpus);
    }
    // The GPUs in use are not all known, so a choice of the engine might be one of them; the vendor's plugin would know.
    if inventory.serves_vendor && n_unknown > 0 {
        return Err(Reason::Vendor);
    }
    if inventory.for_vendor().filter(|(_, gpu)| gpu.healthy).count() < n {
        return Err(Reason::Unhealthy);
    }
    let n_open = inventory.for_vendor().filter(|(_, gpu)| gpu.is_open()).count();
    // The vendor's plugin knows nothing of closed GPUs, and would allocate one of them.
    if n_open < n || (!inventory.serves_vendor && inventory.for_vendor().any(|(_, gpu)| gpu.closed)) {
        return Err(Reason::Closed);
    }
    // GPUs that are free by the holdings may be in use by pods whose GPUs are not known.
    let n_unknown = usize::try_from(n_unknown).unwrap_or(usize::MAX);
    if free_whole(node, hints).count().saturating_sub(n_unknown) < n {
        return Err(Reason::TooFew);
    }
    Ok(())
}

/// Returns true if a GPU that the vendor's plugin may take is shared.
fn is_any_shared(node: &Node, hints: Hints<'_>) -> bool {
    for (at, _) in node.inventory.for_vendor() {
        // A hinted share counts like a held one, since its pod may be bound before this one.
        let is_shared = node.flags.get(at).is_some_and(|flags| flags.is_shared);
        if is_shared || node.counted_hints(hints).any(|hint| hint.occupies(at)) {
            return true;
        }
    }
    false
}

/// Indices of the open unused GPUs that a request for whole GPUs may get; GPUs that take no shares come first.
pub(crate) fn free_whole<'a>(node: &'a Node, hints: Hints<'a>) -> impl Iterator<Item = usize> + 'a {
    let free = node.inventory.for_vendor().filter(move |(at, gpu)| {
        let is_occupied = node.flags.get(*at).is_none_or(|flags| flags.is_occupied);
        gpu.is_open() && !is_occupied && !node.counted_hints(hints).any(|hint| hint.occupies(*at))
    });
    let of_sharing = move |sharing: bool| free.clone().filter(move |(_, gpu)| gpu.sharing == sharing);
    // Pods that share can use the GPUs that are left over only if these take shares.
    of_sharing(false).chain(of_sharing(true)).map(|(at, _)| at)
}

/// Shares of all healthy GPUs, for a pod that sees all: slots on the GPU with most slots free, which comes first, and nothing of
/// the others. A closed GPU refuses the pod, whose containers would see it.
pub(crate) fn share_all_gpus(node: &Node, slots: u32, hints: Hints<'_>) -> Result<Vec<Share>, Reason> {
    if node.rows.is_empty() {
        return Err(Reason::NoDevice);
    }
    // The flag first, which spares most nodes the look at every GPU.
    if node.any_unavailable && node.gpus().iter().any(|gpu| gpu.healthy && gpu.closed) {
        return Err(Reason::Closed);
    }
    let open = node.open_rows(hints);
    // Pods that see all GPUs are spread over the GPUs by their slots, of which a busy GPU has few.
    let with_slots = open.clone().filter(|(row, ..)| row.free.slots >= slots);
    let Some((_, first, _)) = with_slots.min_by_key(|(row, gpu, _)| (!row.free.slots, gpu.minor)) else {
        return Err(if open.clone().next().is_some() {
            Reason::Slots
        } else {
            Reason::Unhealthy
        });
    };
    let slots_alone = Amounts {
        slots,
        ..Amounts::ZERO
    };
    let mut shares = vec![share_of_gpu(first, slots_alone)];
    for (_, gpu, _) in open {
        if gpu.id != first.id {
            // A share of nothing, so that the record names every GPU that the containers see.
            shares.push(share_of_gpu(gpu, Amounts::ZERO));
        }
    }
    Ok(shares)
}

/// A share of a GPU with these amounts.
pub(crate) fn share_of_gpu(gpu: &Device, amounts: Amounts) -> Share {
    Share {
        kind: DeviceType::Gpu,
        id: gpu.id.clone(),
        minor: gpu.minor,
        amounts,
        resources: NamedAmounts::new(),
        virtual_functions: Vec::new(),
    }
}
