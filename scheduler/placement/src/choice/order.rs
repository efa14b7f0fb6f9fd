//! The order in which a policy prefers devices of one node, and scores by weighted resources.

use std::borrow::Cow;

use crate::choice::cost::{ChoiceContext, cheapest, cost_decides};
use crate::choice::gpu_room::share_need;
use crate::data::amounts::{Amounts, NamedAmounts};
use crate::data::device::Device;
use crate::data::policy::{BEST, COST_END, DevicePolicy, ResourceUsage, ResourceWeights, ScoringStrategy};
use crate::data::request::{DeviceRequest, RequestedGpus, ShareNeed};
use crate::state::node::{Node, Row};

/// Memory, or computing power, of a whole GPU in percent.
const WHOLE_PERCENT: u64 = 100;

/// The order of GPUs by the room that they would have left: memory, core, slots; then their index.
type RowKey = (u64, u32, u32, usize);

/// A key that is smaller for a GPU that the policy prefers (`at` is its index); no two GPUs of a node have the same key.
fn row_key(context: &ChoiceContext<'_>, need: ShareNeed, at: usize, row: &Row) -> RowKey {
    let left = row.free.less(need.amounts_on(row.total));
    let (memory, core, slots) = (left.memory.hundredths(), left.core, left.slots);
    let strategy = match context.policy {
        // If the cost does not decide, `fill` packs shares onto few GPUs, which leaves whole GPUs for large pods.
        DevicePolicy::Fill | DevicePolicy::Binpack => return (memory, core, slots, at),
        // All bits flipped, so that the GPU with most room left has the smallest key.
        DevicePolicy::Spread => return (!memory, !core, !slots, at),
        DevicePolicy::InOrder => return (0, 0, 0, at),
        DevicePolicy::LeastAllocated => ScoringStrategy::LeastAllocated,
        DevicePolicy::MostAllocated => ScoringStrategy::MostAllocated,
    };
    let score = strategy.score(gpu_usages(context.weights, [*row], need.stated()));
    (u64::from(BEST.saturating_sub(score)), 0, 0, at)
}

/// As `row_key`, but GPUs between which the policy does not decide have the same key, so that their locations decide.
pub(crate) fn gpu_preference(context: &ChoiceContext<'_>, need: ShareNeed, at: usize, row: &Row) -> [u64; 4] {
    let (memory, core, slots, at) = row_key(context, need, at, row);
    let at = if context.policy == DevicePolicy::InOrder {
        at
    } else {
        0
    };
    [memory, core.into(), slots.into(), at as u64]
}

/// A key that is smaller for a device that the policy prefers. The policies compare the resources that the device has left
/// (of `free`) after a request takes `amounts` of it; [`DevicePolicy::InOrder`] compares minors.
pub(crate) fn resource_preference(
    context: &ChoiceContext<'_>,
    device: &Device,
    free: Cow<'_, NamedAmounts>,
    amounts: &NamedAmounts,
) -> Vec<u64> {
    let strategy = match context.policy {
        DevicePolicy::LeastAllocated => ScoringStrategy::LeastAllocated,
        DevicePolicy::MostAllocated => ScoringStrategy::MostAllocated,
        DevicePolicy::InOrder => return vec![device.minor.into()],
        DevicePolicy::Fill | DevicePolicy::Binpack | DevicePolicy::Spread => {
            let mut key = Vec::with_capacity(amounts.len());
            for (resource, taken) in amounts {
                let left = free.get(resource).unwrap_or(&0).saturating_sub(*taken);
                key.push(if context.policy == DevicePolicy::Spread {
                    !left
                } else {
                    left
                });
            }
            return key;
        }
    };
    let score = strategy.score(resource_usages(context.weights, &[(device, free)], amounts));
    vec![u64::from(BEST.saturating_sub(score))]
}

/// Indices of the GPUs that shares are taken of, best first; enough GPUs are known to have room.
pub(crate) fn chosen_gpus(node: &Node, need: ShareNeed, context: ChoiceContext<'_>) -> Vec<usize> {
    if cost_decides(node, context) {
        let cheapest = cheapest(node, need, context, COST_END);
        return cheapest.into_iter().map(|(at, _)| at).collect();
    }
    let mut keys = Vec::with_capacity(node.rows.len());
    for (at, row) in node.rows_with(context.hints).enumerate() {
        if need.amounts_on(row.total).within(row.free) {
            keys.push(row_key(&context, need, at, &row));
        }
    }
    keys.sort_unstable();
    keys.truncate(need.devices);
    keys.into_iter().map(|(.., at)| at).collect()
}

/// The scores of a node by weighted resources, one for each type of device that is requested.
///
/// A score compares what is free on all devices of the type together, unhealthy and closed ones left out, with what the request
/// takes of one device.
pub(crate) fn resource_scores(
    node: &Node,
    strategy: ScoringStrategy,
    context: ChoiceContext<'_>,
) -> Vec<u32> {
    let mut scores = Vec::new();
    if let Some(stated) = stated(node, context.request.gpus) {
        let open = node.open_rows(context.hints).map(|(row, ..)| row);
        scores.push(strategy.score(gpu_usages(context.weights, open, stated)));
    }
    for request in context.request.others {
        // A type that the node does not report scores 0.
        scores.push(device_score(node, request, strategy, context).unwrap_or_default());
    }
    scores
}

/// The amounts asked of one GPU, as of [`ShareNeed::stated`]; `None` if no GPU is asked for.
fn stated(node: &Node, request: RequestedGpus) -> Option<[u64; 3]> {
    match request {
        RequestedGpus::Nothing => None,
        RequestedGpus::Share(request) => share_need(node, &request).ok().map(ShareNeed::stated),
        // GPUs differ in their bytes, so a whole one counts by its percentage.
        RequestedGpus::Whole(_) => Some([WHOLE_PERCENT, 0, WHOLE_PERCENT]),
        RequestedGpus::All { .. } => Some([0; 3]),
    }
}

/// The score of a node for the devices of one other type; `None` if the node has no devices that the request can use.
fn device_score(
    node: &Node,
    request: &DeviceRequest,
    strategy: ScoringStrategy,
    context: ChoiceContext<'_>,
) -> Option<u32> {
    let type_at = node.inventory.type_index(&request.kind)?;
    let devices = node.inventory.devices(type_at);
    let (_, amounts) = request.split_over(devices)?;
    let mut open = Vec::with_capacity(devices.len());
    for (at, device) in devices.iter().enumerate() {
        if device.is_open() {
            open.push((device, node.free_resources_with(type_at, at, context.hints)));
        }
    }
    Some(strategy.score(resource_usages(context.weights, &open, &amounts)))
}

/// Weighted resources of GPUs, summed: memory in percent, memory in bytes, computing power.
fn gpu_usages(
    weights: &ResourceWeights,
    rows: impl IntoIterator<Item = Row>,
    requested: [u64; 3],
) -> [ResourceUsage; 3] {
    let mut usages = [weights.memory_ratio, weights.memory, weights.core].map(|weight| ResourceUsage {
        weight,
        ..ResourceUsage::default()
    });
    for (usage, requested) in usages.iter_mut().zip(requested) {
        usage.requested = requested;
    }
    for Row { free, total } in rows {
        let Amounts { memory: used, .. } = total.less(free);
        // The used percentage is rounded up, so that the free one is not overstated.
        let free_ratio = WHOLE_PERCENT.saturating_sub(u64::from(used.percent_of(total.memory)));
        let amounts = [
            (WHOLE_PERCENT, free_ratio),
            (total.memory.bytes_floor(), free.memory.bytes_floor()),
            (u64::from(total.core), u64::from(free.core)),
        ];
        for (usage, (total, free)) in usages.iter_mut().zip(amounts) {
            usage.total = usage.total.saturating_add(total);
            usage.free = usage.free.saturating_add(free);
        }
    }
    usages
}

/// Weighted resources of devices of another type, summed; resources without a weight are left out.
fn resource_usages(
    weights: &ResourceWeights,
    devices: &[(&Device, Cow<'_, NamedAmounts>)],
    requested: &NamedAmounts,
) -> Vec<ResourceUsage> {
    let amount = |amounts: &NamedAmounts, resource| amounts.get(resource).copied().unwrap_or(0);
    let mut usages = Vec::with_capacity(weights.others.len());
    for (resource, weight) in &weights.others {
        let (mut total, mut free) = (0_u64, 0_u64);
        for (device, free_of_device) in devices {
            total = total.saturating_add(amount(&device.resources, resource));
            free = free.saturating_add(amount(free_of_device, resource));
        }
        usages.push(ResourceUsage {
            weight: *weight,
            total,
            free,
            requested: amount(requested, resource),
        });
    }
    usages
}
