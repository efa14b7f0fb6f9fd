//! Decisions on one node: the fit of a request, the devices that it takes, and the score of the node with these devices taken.

use crate::choice::cost::{
    CostBasis, LookAhead, PlacementCost, WorkloadModel, cheapest, cost_decides, cost_of_gpus,
};
use crate::choice::gpu_room::{fit_gpus, free_whole, share_all_gpus, share_need, share_of_gpu};
use crate::choice::order::{DeviceOrder, chosen_gpus, resource_scores};
use crate::choice::topology::choose_by_rules;
use crate::data::amounts::Amounts;
use crate::data::device::Device;
use crate::data::holding::{Hints, Placement, Share};
use crate::data::misfit::Misfit;
use crate::data::policy::{
    BEST, COST_END, DevicePolicy, NodePolicy, Policies, ResourceWeights, Score, ScoringStrategy,
};
use crate::data::reason::Reason;
use crate::data::request::{NodeRequest, RequestedGpus};
use crate::state::node::Node;

/// The inputs of a choice besides node and request: weights of resources, workload model, and the hints that count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChoiceContext<'a> {
    pub(crate) weights: &'a ResourceWeights,
    pub(crate) model: &'a WorkloadModel,
    pub(crate) hints: Hints<'a>,
}

impl<'a> ChoiceContext<'a> {
    /// The expectations by which choices for a request are compared.
    pub(crate) fn look_ahead(&self, request: NodeRequest<'_>) -> LookAhead<'a> {
        LookAhead {
            model: self.model,
            host: request.host,
        }
    }

    /// The order in which devices of a node are taken for a request, by cost where the cost decides.
    fn order(&self, policy: DevicePolicy, node: &Node, request: NodeRequest<'_>) -> DeviceOrder<'a> {
        DeviceOrder {
            look_ahead: cost_decides(node, request).then(|| self.look_ahead(request)),
            ..self.order_without_cost(policy)
        }
    }

    /// An order that no look-ahead changes.
    fn order_without_cost(&self, policy: DevicePolicy) -> DeviceOrder<'a> {
        DeviceOrder {
            policy,
            weights: self.weights,
            look_ahead: None,
        }
    }
}

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
    let order = DeviceOrder {
        policy: DevicePolicy::InOrder,
        weights: &ResourceWeights::default(),
        look_ahead: None,
    };
    choose_by_rules(node, request, order, hints).err()
}

/// Returns true if rules, topology or devices of other types, and not free amounts of GPUs alone, decide which devices are taken.
fn needs_rules(node: &Node, request: NodeRequest<'_>) -> bool {
    node.has_rules || node.has_topology() || request.constraints.is_some() || !request.others.is_empty()
}

/// The devices to take of a node for a request, or the reason for which there is no room.
pub(crate) fn choose_devices(
    node: &Node,
    request: NodeRequest<'_>,
    policy: DevicePolicy,
    context: ChoiceContext<'_>,
) -> Result<Placement, Reason> {
    let hints = context.hints;
    let order = context.order(policy, node, request);
    let mut placement = Placement {
        is_vendor: matches!(request.gpus, RequestedGpus::Whole(_)),
        ..Placement::default()
    };
    let (gpus, mut others) = if needs_rules(node, request) {
        let decision = choose_by_rules(node, request, order, hints)?;
        (decision.gpus, decision.others)
    } else {
        fit_gpus(node, &request.gpus, hints)?;
        (
            gpus_by_free_amounts(node, request.gpus, &order, hints)?,
            Vec::new(),
        )
    };
    match request.gpus {
        RequestedGpus::Nothing => {}
        RequestedGpus::All { slots } => placement.shares = share_all_gpus(node, slots, hints)?,
        RequestedGpus::Share(request) => {
            let need = share_need(node, &request)?;
            placement.shares = shares_of(node, &gpus, |gpu| need.amounts_on(gpu.total()));
        }
        RequestedGpus::Whole(n) => {
            placement.shares = shares_of(node, &gpus, Device::whole);
            // If the vendor's plugin chooses, only the number is known.
            placement.n_unknown_gpus = if gpus.is_empty() { n } else { 0 };
        }
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

/// Indices of the GPUs to take where only free amounts decide; empty where the vendor's plugin chooses.
fn gpus_by_free_amounts(
    node: &Node,
    request: RequestedGpus,
    order: &DeviceOrder<'_>,
    hints: Hints<'_>,
) -> Result<Vec<usize>, Reason> {
    match request {
        RequestedGpus::Share(request) => {
            Ok(chosen_gpus(node, share_need(node, &request)?, order, hints).collect())
        }
        RequestedGpus::Whole(n) if node.serves_vendor() => {
            let n = usize::try_from(n).unwrap_or(usize::MAX);
            Ok(free_whole(node, hints).take(n).collect())
        }
        RequestedGpus::Whole(_) | RequestedGpus::All { .. } | RequestedGpus::Nothing => Ok(Vec::new()),
    }
}

/// The score of a node after the best choice of its devices, or the reason for which there is no room.
pub(crate) fn score(
    node: &Node,
    request: NodeRequest<'_>,
    policies: Policies,
    context: ChoiceContext<'_>,
) -> Result<Score, Reason> {
    if policies.node == NodePolicy::Fill {
        let cost = cost(node, request, policies.device, context)?;
        return Ok(Score::of_cost(cost.rank()));
    }
    let hints = context.hints;
    fit(node, request, hints)?;
    let strategy = match policies.node {
        NodePolicy::LeastAllocated => ScoringStrategy::LeastAllocated,
        NodePolicy::MostAllocated => ScoringStrategy::MostAllocated,
        NodePolicy::Fill | NodePolicy::Binpack | NodePolicy::Spread => {
            let order = context.order(policies.device, node, request);
            let (left, total) = memory_left(node, request.gpus, &order, hints);
            let is_binpack = policies.node == NodePolicy::Binpack;
            let part = if is_binpack {
                total.saturating_sub(left)
            } else {
                left
            };
            return Ok(Score::of_share(part, total));
        }
    };
    let (mut sum, mut best) = (0, 0);
    for score in resource_scores(node, request, context.weights, strategy, hints) {
        // Every type of device counts alike, so the best sum is the best score times the number of types.
        (sum, best) = (sum + u128::from(score), best + u128::from(BEST));
    }
    Ok(Score::of_share(sum, best))
}

/// Returns true if the score of a node is the cost of the one GPU on which a share costs least.
pub(crate) fn is_cheapest_share(node: &Node, request: NodeRequest<'_>, policies: Policies) -> bool {
    let has_cost = policies.node == NodePolicy::Fill && policies.device == DevicePolicy::Fill;
    has_cost && cost_decides(node, request)
}

/// The score of a node as of [`is_cheapest_share`], if there is room and it is at least `least`: less work than [`score`] where
/// it is far lower.
pub(crate) fn score_from(
    least: Score,
    node: &Node,
    request: NodeRequest<'_>,
    context: ChoiceContext<'_>,
) -> Option<Score> {
    let hints = context.hints;
    fit(node, request, hints).ok()?;
    let RequestedGpus::Share(share) = request.gpus else {
        return None;
    };
    let need = share_need(node, &share).ok()?;
    let basis = CostBasis::new(node, context.look_ahead(request), hints);
    let (_, cost) = cheapest(node, need, &basis, hints, least.rank_of_cost())?;
    Some(Score::of_cost(cost.rank()))
}

/// The cost of the best choice of GPUs, or the reason for which there is no room.
pub(crate) fn cost(
    node: &Node,
    request: NodeRequest<'_>,
    policy: DevicePolicy,
    context: ChoiceContext<'_>,
) -> Result<PlacementCost, Reason> {
    let (hints, look_ahead) = (context.hints, context.look_ahead(request));
    let cost_decides = cost_decides(node, request);
    // By a trait object: four kinds of iterators come here, and the simulation takes far longer than a call.
    let cost_of =
        |gpus: &mut dyn Iterator<Item = usize>| cost_of_gpus(node, request, gpus, look_ahead, hints);
    // If the cost decides, it also decides between GPUs of different locations.
    if needs_rules(node, request) && !cost_decides {
        let gpus = gpus_by_rules(node, request, policy, context)?;
        return Ok(cost_of(&mut gpus.into_iter()));
    }
    fit(node, request, hints)?;
    match request.gpus {
        RequestedGpus::Share(share) => {
            let need = share_need(node, &share)?;
            if policy == DevicePolicy::Fill && cost_decides {
                let basis = CostBasis::new(node, look_ahead, hints);
                let (_, cost) = cheapest(node, need, &basis, hints, COST_END).ok_or(Reason::TooFew)?;
                return Ok(cost);
            }
            let order = context.order_without_cost(policy);
            Ok(cost_of(&mut chosen_gpus(node, need, &order, hints)))
        }
        RequestedGpus::Whole(n) => {
            let n = usize::try_from(n).unwrap_or(usize::MAX);
            Ok(cost_of(&mut free_whole(node, hints).take(n)))
        }
        RequestedGpus::All { .. } | RequestedGpus::Nothing => Ok(cost_of(&mut std::iter::empty())),
    }
}

/// Indices of the GPUs that are taken where rules or topology decide; the same for all nodes of an equivalence class.
pub(crate) fn gpus_by_rules(
    node: &Node,
    request: NodeRequest<'_>,
    policy: DevicePolicy,
    context: ChoiceContext<'_>,
) -> Result<Vec<usize>, Reason> {
    let order = context.order_without_cost(policy);
    Ok(choose_by_rules(node, request, order, context.hints)?.gpus)
}

/// Memory of the GPUs that take new owners, as it would be free after the best choice, and all of it, in hundredths of a byte.
fn memory_left(
    node: &Node,
    request: RequestedGpus,
    order: &DeviceOrder<'_>,
    hints: Hints<'_>,
) -> (u128, u128) {
    // A node may report GPUs of any size, so their sums get twice the bits of one amount.
    let (mut free, mut total, mut n_open) = (0_u128, 0_u128, 0_u128);
    for (row, ..) in node.open_rows(hints) {
        free += u128::from(row.free.memory.hundredths());
        total += u128::from(row.total.memory.hundredths());
        n_open += 1;
    }
    let mut taken = 0;
    match request {
        RequestedGpus::Share(request) => {
            if let Ok(need) = share_need(node, &request) {
                for gpu in chosen_gpus(node, need, order, hints) {
                    let total = node.rows.get(gpu).map(|row| row.total).unwrap_or_default();
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
