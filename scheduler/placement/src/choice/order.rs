//! The order in which a policy prefers devices of one node, and scores by weighted resources.

use std::borrow::Cow;

use crate::choice::cost::{CostBasis, LookAhead, cheapest};
use crate::choice::gpu_room::share_need;
use crate::data::amounts::{Amounts, NamedAmounts};
use crate::data::device::Device;
use crate::data::holding::Hints;
use crate::data::policy::{BEST, COST_END, DevicePolicy, ResourceUsage, ResourceWeights, ScoringStrategy};
use crate::data::request::{DeviceRequest, NodeRequest, RequestedGpus, ShareNeed, StatedAmounts};
use crate::state::node::{Node, Row};

/// Memory, or computing power, of a whole GPU in percent.
const WHOLE_PERCENT: u64 = 100;

/// The order of devices: a policy, and the weights and expectations that some policies need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceOrder<'a> {
    pub(crate) policy: DevicePolicy,
    pub(crate) weights: &'a ResourceWeights,
    /// The look-ahead of the policy `fill`; without it no policy looks ahead.
    pub(crate) look_ahead: Option<LookAhead<'a>>,
}

/// The order of GPUs by the room that they would have left: memory, core, slots; then their index.
type RowKey = (u64, u32, u32, usize);

impl DeviceOrder<'_> {
    /// The look-ahead, if the policy uses it for one share of one GPU.
    pub(crate) fn look_ahead_for(&self, need: ShareNeed) -> Option<LookAhead<'_>> {
        self.look_ahead
            .filter(|_| self.policy == DevicePolicy::Fill && need.devices == 1)
    }

    /// A key that is smaller for a GPU that the policy prefers (`at` is its index); no two GPUs of a node have the same key.
    fn row_key(&self, need: ShareNeed, at: usize, row: &Row) -> RowKey {
        let left = row.free.less(need.amounts_on(row.total));
        let (memory, core, slots) = (left.memory.hundredths(), left.core, left.slots);
        let by_score = |strategy: ScoringStrategy| {
            let score = strategy.score(gpu_usages(self.weights, [*row], need.stated()));
            (u64::from(BEST.saturating_sub(score)), 0, 0, at)
        };
        match self.policy {
            // If the cost does not decide, `fill` packs shares onto few GPUs, which leaves whole GPUs for large pods.
            DevicePolicy::Fill | DevicePolicy::Binpack => (memory, core, slots, at),
            // All bits flipped, so that the GPU with most room left has the smallest key.
            DevicePolicy::Spread => (!memory, !core, !slots, at),
            DevicePolicy::InOrder => (0, 0, 0, at),
            DevicePolicy::LeastAllocated => by_score(ScoringStrategy::LeastAllocated),
            DevicePolicy::MostAllocated => by_score(ScoringStrategy::MostAllocated),
        }
    }

    /// As `row_key`, but GPUs between which the policy does not decide have the same key, so that their locations decide.
    pub(crate) fn gpu_preference(&self, need: ShareNeed, at: usize, row: &Row) -> [u64; 4] {
        let (memory, core, slots, at) = self.row_key(need, at, row);
        let at = if self.policy == DevicePolicy::InOrder {
            at
        } else {
            0
        };
        [memory, core.into(), slots.into(), at as u64]
    }

    /// A key that is smaller for a device that the policy prefers. The policies compare the resources that the device has left
    /// (of `free`) after a request takes `amounts` of it; [`DevicePolicy::InOrder`] compares minors.
    pub(crate) fn resource_preference(
        &self,
        device: &Device,
        free: Cow<'_, NamedAmounts>,
        amounts: &NamedAmounts,
    ) -> Vec<u64> {
        let strategy = match self.policy {
            DevicePolicy::LeastAllocated => ScoringStrategy::LeastAllocated,
            DevicePolicy::MostAllocated => ScoringStrategy::MostAllocated,
            DevicePolicy::InOrder => return vec![device.minor.into()],
            DevicePolicy::Fill | DevicePolicy::Binpack | DevicePolicy::Spread => {
                let mut key = Vec::with_capacity(amounts.len());
                for (resource, taken) in amounts {
                    let left = free.get(resource).unwrap_or(&0).saturating_sub(*taken);
                    key.push(if self.policy == DevicePolicy::Spread {
                        !left
                    } else {
                        left
                    });
                }
                return key;
            }
        };
        let score = strategy.score(resource_usages(self.weights, &[(device, free)], amounts));
        vec![u64::from(BEST.saturating_sub(score))]
    }
}

/// Indices of the GPUs that shares are taken of, best first; enough GPUs are known to have room. With a look-ahead that applies,
/// the one GPU on which the share costs least; else as many as the request needs, in the order of the policy.
pub(crate) fn chosen_gpus<'a>(
    node: &'a Node,
    need: ShareNeed,
    order: &'a DeviceOrder<'a>,
    hints: Hints<'a>,
) -> impl Iterator<Item = usize> + 'a {
    // The look-ahead takes the place of the policy's order; it only applies to a share of a single GPU.
    let (mut by_cost, mut n_by_order) = (None, need.devices);
    if let Some(look_ahead) = order.look_ahead_for(need) {
        let basis = CostBasis::new(node, look_ahead, hints);
        (by_cost, n_by_order) = (cheapest(node, need, &basis, hints, COST_END), 0);
    }
    let mut last: Option<RowKey> = None;
    // Each step looks for the next best among the few GPUs of a node, so that nothing is allocated.
    let by_order = std::iter::from_fn(move || {
        last = Some(next_best(node, need, order, hints, last)?);
        last.map(|(.., at)| at)
    });
    let by_cost = by_cost.map(|(at, _)| at);
    by_cost.into_iter().chain(by_order.take(n_by_order))
}

/// The key of the best fitting GPU whose key is larger than the last one's.
fn next_best(
    node: &Node,
    need: ShareNeed,
    order: &DeviceOrder<'_>,
    hints: Hints<'_>,
    last: Option<RowKey>,
) -> Option<RowKey> {
    let mut best: Option<RowKey> = None;
    for (at, row) in node.rows_with(hints).enumerate() {
        if !need.amounts_on(row.total).within(row.free) {
            continue;
        }
        let key = order.row_key(need, at, &row);
        // No two GPUs have one key, so that each comes up once.
        if last.is_none_or(|last| key > last) && best.is_none_or(|best| key < best) {
            best = Some(key);
        }
    }
    best
}

/// The scores of a node by weighted resources, one for each type of device that is requested.
///
/// A score compares what is free on all devices of the type together, unhealthy and closed ones left out, with what the request
/// takes of one device.
pub(crate) fn resource_scores<'a>(
    node: &'a Node,
    request: NodeRequest<'a>,
    weights: &'a ResourceWeights,
    strategy: ScoringStrategy,
    hints: Hints<'a>,
) -> impl Iterator<Item = u32> + 'a {
    let gpus = stated(node, request.gpus).map(|stated| {
        let open = node.open_rows(hints);
        strategy.score(gpu_usages(weights, open.map(|(row, ..)| row), stated))
    });
    // A type that the node does not report scores 0.
    let others = request
        .others
        .iter()
        .map(move |request| device_score(node, request, weights, strategy, hints));
    gpus.into_iter().chain(others.map(Option::unwrap_or_default))
}

/// The amounts asked of one GPU; `None` if no GPU is asked for.
fn stated(node: &Node, request: RequestedGpus) -> Option<StatedAmounts> {
    match request {
        RequestedGpus::Nothing => None,
        RequestedGpus::Share(request) => share_need(node, &request).ok().map(ShareNeed::stated),
        // GPUs differ in their bytes, so a whole one counts by its percentage.
        RequestedGpus::Whole(_) => Some(StatedAmounts {
            ratio: WHOLE_PERCENT,
            bytes: 0,
            core: WHOLE_PERCENT,
        }),
        RequestedGpus::All { .. } => Some(StatedAmounts::default()),
    }
}

/// The score of a node for the devices of one other type; `None` if the node has no devices that the request can use.
fn device_score(
    node: &Node,
    request: &DeviceRequest,
    weights: &ResourceWeights,
    strategy: ScoringStrategy,
    hints: Hints<'_>,
) -> Option<u32> {
    let type_at = node.inventory.as_ref()?.type_index(&request.kind)?;
    let devices = node.devices(type_at);
    let (_, amounts) = request.split_over(devices)?;
    let mut open = Vec::with_capacity(devices.len());
    for (at, device) in devices.iter().enumerate() {
        if device.is_open() {
            open.push((device, node.free_resources_with(type_at, at, hints)));
        }
    }
    Some(strategy.score(resource_usages(weights, &open, &amounts)))
}

/// Weighted resources of GPUs, summed: memory in percent, memory in bytes, computing power.
fn gpu_usages(
    weights: &ResourceWeights,
    rows: impl IntoIterator<Item = Row>,
    requested: StatedAmounts,
) -> [ResourceUsage; 3] {
    let mut usages = [
        (weights.memory_ratio, requested.ratio),
        (weights.memory, requested.bytes),
        (weights.core, requested.core),
    ]
    .map(|(weight, requested)| ResourceUsage {
        weight,
        total: 0,
        free: 0,
        requested,
    });
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
