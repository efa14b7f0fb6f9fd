//! Decisions on one node: the fit of a request, the devices that it takes, and the score of the node with these devices taken.

use crate::choice::cost::{ChoiceContext, WorkloadModel, cheapest, cost_decides, cost_of_gpus};
use crate::choice::gpu_room::{fit_gpus, free_whole, share_all_gpus, share_need, share_of_gpu};
use crate::choice::order::{chosen_gpus, resource_scores};
use crate::choice::topology::{DeviceChoice, choose_by_rules};
use crate::data::amounts::Amounts;
use crate::data::device::Device;
use crate::data::holding::{Hints, Placement, Share};
use crate::data::misfit::Misfit;
use crate::data::policy::{BEST, DevicePolicy, NodePolicy, ResourceWeights, Score, ScoringStrategy};
use crate::data::reason::Reason;
use crate::data::request::{NodeRequest, RequestedGpus};
use crate::state::node::Node;

/// Checks that a node has room for all devices of a request, by all rules.
#[inline]
pub(crate) fn fit(node: &Node, request: NodeRequest<'_>, hints: Hints<'_>) -> Result<(), Reason> {
    // Rules and devices of other types need a full choice; requests for GPUs alone take a few comparisons.
    if node.has_rules || request.constraints.is_some() || !request.others.is_empty() {
        return misfit(node, request, hints).map_or(Ok(()), |misfit| Err(misfit.into()));
    }
    fit_gpus(node, &request.gpus, hints)
}

/// The detailed explanation of a refusal; `None` if there is room.
pub(crate) fn misfit(node: &Node, request: NodeRequest<'_>, hints: Hints<'_>) -> Option<Misfit> {
    // Any order will do: if some choice fits, each order finds one.
    let context = ChoiceContext {
        request,
        policy: DevicePolicy::InOrder,
        weights: &ResourceWeights::default(),
        model: &WorkloadModel::default(),
        hints,
    };
    choose_by_rules(node, context).err()
}

/// The devices to take of a node for a request, or the reason for which there is no room.
pub(crate) fn choose_devices(node: &Node, context: ChoiceContext<'_>) -> Result<Placement, Reason> {
    let request = context.request;
    let mut placement = Placement {
        is_vendor: matches!(request.gpus, RequestedGpus::Whole(_)),
        ..Placement::default()
    };
    let DeviceChoice { gpus, mut others } = choose(node, context)?;
    match request.gpus {
        RequestedGpus::Nothing => {}
        RequestedGpus::All { slots } => placement.shares = share_all_gpus(node, slots, context.hints)?,
        RequestedGpus::Share(request) => {
            let need = share_need(node, &request)?;
            placement.shares = shares_of(node, &gpus, |gpu| need.amounts_on(gpu.total()));
        }
        // No GPU is chosen where the node reports none, see `fit_whole`.
        RequestedGpus::Whole(_) if node.inventory.serves_vendor && !gpus.is_empty() => {
            placement.shares = shares_of(node, &gpus, Device::whole);
        }
        // If the vendor's plugin chooses, only the number is known.
        RequestedGpus::Whole(n) => placement.n_unknown_gpus = n,
    }
    placement.shares.append(&mut others);
    let constraints = request.constraints.iter();
    for (kind, constraint) in constraints.flat_map(|constraints| &constraints.by_kind) {
        // Exclusive use counts only for types of which the pod takes devices.
        if let Some(exclusion) = constraint.exclusion
            && request.takes(kind)
        {
            placement.exclusions.push((kind.clone(), exclusion));
        }
    }
    Ok(placement)
}

/// The GPUs to take, or that the vendor's plugin is expected to take where only free amounts decide, and devices of other types.
fn choose(node: &Node, context: ChoiceContext<'_>) -> Result<DeviceChoice, Reason> {
    let ChoiceContext { request, hints, .. } = context;
    let asks_for_more = request.constraints.is_some() || !request.others.is_empty();
    if asks_for_more || node.has_rules || node.has_topology() {
        return Ok(choose_by_rules(node, context)?);
    }
    fit_gpus(node, &request.gpus, hints)?;
    let gpus = match request.gpus {
        RequestedGpus::Share(request) => chosen_gpus(node, share_need(node, &request)?, context),
        RequestedGpus::Whole(n) => {
            let n = usize::try_from(n).unwrap_or(usize::MAX);
            free_whole(node, hints).take(n).collect()
        }
        RequestedGpus::All { .. } | RequestedGpus::Nothing => Vec::new(),
    };
    Ok(DeviceChoice {
        gpus,
        ..DeviceChoice::default()
    })
}

/// The share that a placement takes of each GPU at the indices in `gpus`, with the amounts that `amounts` returns for that GPU;
/// sorted by minor.
fn shares_of(node: &Node, gpus: &[usize], amounts: impl Fn(&Device) -> Amounts) -> Vec<Share> {
    let mut shares = Vec::with_capacity(gpus.len());
    for gpu in gpus.iter().filter_map(|at| node.gpus().get(*at)) {
        shares.push(share_of_gpu(gpu, amounts(gpu)));
    }
    // Records list devices by minor, and equal choices give equal records.
    shares.sort_by_key(|share| share.minor);
    shares
}

/// The score of a node after the best choice of its devices, or the reason for which there is no room.
pub(crate) fn score(node: &Node, policy: NodePolicy, context: ChoiceContext<'_>) -> Result<Score, Reason> {
    if policy == NodePolicy::Fill {
        return if cost_decides(node, context) {
            score_from(Score::default(), node, context)
        } else {
            Ok(score_of_gpus(node, &gpus_to_take(node, context)?, context))
        };
    }
    fit(node, context.request, context.hints)?;
    let strategy = match policy {
        NodePolicy::LeastAllocated => ScoringStrategy::LeastAllocated,
        NodePolicy::MostAllocated => ScoringStrategy::MostAllocated,
        NodePolicy::Fill | NodePolicy::Binpack | NodePolicy::Spread => {
            let (left, total) = memory_left(node, context);
            let is_binpack = policy == NodePolicy::Binpack;
            let part = if is_binpack {
                total.saturating_sub(left)
            } else {
                left
            };
            return Ok(Score::of_share(part, total));
        }
    };
    let scores = resource_scores(node, strategy, context);
    // Every type of device counts alike, so the best sum is the best score times the number of types.
    let best = u128::from(BEST) * scores.len() as u128;
    Ok(Score::of_share(scores.into_iter().map(u128::from).sum(), best))
}

/// The score of a node by the cost of the GPU on which a share costs least, where [`cost_decides`]. An error if there is no room,
/// or the score is below `least`: less work than without `least` where it is far lower.
pub(crate) fn score_from(least: Score, node: &Node, context: ChoiceContext<'_>) -> Result<Score, Reason> {
    fit_gpus(node, &context.request.gpus, context.hints)?;
    let RequestedGpus::Share(share) = context.request.gpus else {
        return Err(Reason::TooFew);
    };
    let need = share_need(node, &share)?;
    let cheapest = cheapest(node, need, context, least.rank_of_cost());
    let (_, cost) = cheapest.ok_or(Reason::TooFew)?;
    Ok(Score::of_cost(cost.rank()))
}

/// Indices of the GPUs that a request takes; the same for all nodes of an equivalence class, unless [`cost_decides`].
pub(crate) fn gpus_to_take(node: &Node, context: ChoiceContext<'_>) -> Result<Vec<usize>, Reason> {
    Ok(choose(node, context)?.gpus)
}

/// The score of a node by the cost of taking these GPUs.
pub(crate) fn score_of_gpus(node: &Node, gpus: &[usize], context: ChoiceContext<'_>) -> Score {
    Score::of_cost(cost_of_gpus(node, gpus, context).rank())
}

/// Memory of the GPUs that take new owners, as it would be free after the best choice, and all of it, in hundredths of a byte.
fn memory_left(node: &Node, context: ChoiceContext<'_>) -> (u128, u128) {
    // A node may report GPUs of any size, so their sums get twice the bits of one amount.
    let (mut free, mut total, mut n_open) = (0_u128, 0_u128, 0_u128);
    for (row, ..) in node.open_rows(context.hints) {
        free += u128::from(row.free.memory.hundredths());
        total += u128::from(row.total.memory.hundredths());
        n_open += 1;
    }
    let mut taken = 0;
    match context.request.gpus {
        RequestedGpus::Share(request) => {
            if let Ok(need) = share_need(node, &request) {
                for gpu in chosen_gpus(node, need, context) {
                    let total = node.rows.get(gpu).copied().unwrap_or_default().total;
                    taken += u128::from(need.amounts_on(total).memory.hundredths());
                }
            }
        }
        // Only open GPUs are taken. On a node of several models each counts as the mean: the vendor's plugin may take any.
        RequestedGpus::Whole(n) => taken = total * u128::from(n) / n_open.max(1),
        RequestedGpus::All { .. } | RequestedGpus::Nothing => {}
    }
    (free.saturating_sub(taken), total)
}
