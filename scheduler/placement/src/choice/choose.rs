//! Decisions on one node: whether a request fits, which devices it takes, and how good the node is once it has them.

use crate::choice::cost::{
    CostBasis, LookAhead, PlacementCost, WorkloadModel, cheapest, cost_decides, cost_of_gpus,
};
use crate::choice::fit::{choose_all, fit_gpus, free_whole, need};
use crate::choice::order::{DeviceOrder, chosen_rows, resource_scores};
use crate::choice::topology::decide;
use crate::data::device::Gpu;
use crate::data::holding::{Hints, Placement, Share};
use crate::data::misfit::Misfit;
use crate::data::policy::{
    BEST, DevicePolicy, NodePolicy, Policies, ResourceWeights, Score, ScoringStrategy,
};
use crate::data::reason::Reason;
use crate::data::request::{NodeRequest, RequestedGpus};
use crate::state::node::Node;

/// The settings of a choice that no request changes, and the hints that count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChoiceContext<'a> {
    pub(crate) weights: &'a ResourceWeights,
    pub(crate) model: &'a WorkloadModel,
    pub(crate) hints: Hints<'a>,
}

impl<'a> ChoiceContext<'a> {
    pub(crate) fn look_ahead(&self, request: NodeRequest<'_>) -> LookAhead<'a> {
        LookAhead {
            model: self.model,
            host: request.host,
        }
    }

    fn order(&self, policy: DevicePolicy, look_ahead: Option<LookAhead<'a>>) -> DeviceOrder<'a> {
        DeviceOrder {
            policy,
            weights: self.weights,
            look_ahead,
        }
    }
}

/// Checks that there is room for everything, by all rules.
#[inline]
pub(crate) fn fit(node: &Node, request: NodeRequest<'_>, hints: Hints<'_>) -> Result<(), Reason> {
    // Rules and other devices need a full decision; everything else is a few comparisons.
    if node.has_rules || request.constraints.is_some() || !request.others.is_empty() {
        return misfit(node, request, hints).map_or(Ok(()), |misfit| Err(misfit.reason()));
    }
    fit_gpus(node, &request.gpus, hints)
}

/// The detailed explanation of a refusal; `None` if there is room.
pub(crate) fn misfit(node: &Node, request: NodeRequest<'_>, hints: Hints<'_>) -> Option<Misfit> {
    let order = DeviceOrder {
        policy: DevicePolicy::InOrder,
        weights: &ResourceWeights::default(),
        look_ahead: None,
    };
    decide(node, request, order, hints).err()
}

/// Returns true if more than the free amounts of GPUs decides which devices are taken.
fn needs_decision(node: &Node, request: NodeRequest<'_>) -> bool {
    node.has_rules || node.has_topology() || request.constraints.is_some() || !request.others.is_empty()
}

/// The devices to take for a request.
pub(crate) fn choose(
    node: &Node,
    request: NodeRequest<'_>,
    policy: DevicePolicy,
    context: ChoiceContext<'_>,
) -> Result<Placement, Reason> {
    let hints = context.hints;
    let order = context.order(
        policy,
        cost_decides(node, request).then(|| context.look_ahead(request)),
    );
    let mut placement = Placement {
        is_vendor: matches!(request.gpus, RequestedGpus::Whole(_)),
        ..Placement::default()
    };
    let gpus: Vec<usize> = if needs_decision(node, request) {
        let decision = decide(node, request, order, hints).map_err(|misfit| misfit.reason())?;
        placement.others = decision.others;
        decision.gpus
    } else {
        fit_gpus(node, &request.gpus, hints)?;
        choose_gpus(node, request.gpus, &order, hints)?
    };
    match request.gpus {
        RequestedGpus::Nothing => {}
        RequestedGpus::All { slots } => placement.shares = choose_all(node, slots, hints)?,
        RequestedGpus::Share(request) => {
            let need = need(node, &request)?;
            placement.shares = shares_of(node, &gpus, |gpu| need.on(gpu.total()));
        }
        RequestedGpus::Whole(n) => {
            placement.shares = shares_of(node, &gpus, Gpu::whole);
            placement.unknown_whole = if gpus.is_empty() { n } else { 0 };
        }
    }
    let constraints = request
        .constraints
        .map_or(&[][..], |constraints| &constraints.by_kind);
    for (kind, constraint) in constraints.iter().filter(|(kind, _)| request.takes(kind)) {
        let exclusion = constraint.exclusion.map(|exclusion| (kind.clone(), exclusion));
        placement.exclusions.extend(exclusion);
    }
    Ok(placement)
}

/// Shares of GPUs by their indices, by rising minor.
fn shares_of(
    node: &Node,
    gpus: &[usize],
    amounts: impl Fn(&Gpu) -> crate::data::amounts::Amounts,
) -> Vec<Share> {
    let chosen = gpus.iter().filter_map(|at| node.gpus().get(*at));
    let mut shares: Vec<Share> = chosen
        .map(|gpu| Share {
            gpu: gpu.uuid.clone(),
            minor: gpu.minor,
            amounts: amounts(gpu),
        })
        .collect();
    shares.sort_by_key(|share| share.minor);
    shares
}

/// Indices of the GPUs to take where only free amounts decide; empty where the vendor's plugin chooses.
fn choose_gpus(
    node: &Node,
    request: RequestedGpus,
    order: &DeviceOrder<'_>,
    hints: Hints<'_>,
) -> Result<Vec<usize>, Reason> {
    match request {
        RequestedGpus::Share(request) => {
            let chosen = chosen_rows(node, need(node, &request)?, order, hints);
            Ok(chosen.map(|(at, _)| at).collect())
        }
        RequestedGpus::Whole(n) if node.serves_vendor() => {
            let n = usize::try_from(n).unwrap_or(usize::MAX);
            Ok(free_whole(node, hints).map(|(at, _)| at).take(n).collect())
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
    let order = context.order(
        policies.device,
        cost_decides(node, request).then(|| context.look_ahead(request)),
    );
    let share_of_best = |strategy| {
        let scores = resource_scores(node, request, context.weights, strategy, hints);
        scores.fold((0, 0), |(sum, best), score| {
            (sum + u128::from(score), best + u128::from(BEST))
        })
    };
    let (part, total) = match policies.node {
        // Returned above.
        NodePolicy::Fill => (0, 1),
        NodePolicy::Binpack => {
            let (left, total) = memory_left(node, request.gpus, &order, hints);
            (total.saturating_sub(left), total)
        }
        NodePolicy::Spread => memory_left(node, request.gpus, &order, hints),
        NodePolicy::LeastAllocated => share_of_best(ScoringStrategy::LeastAllocated),
        NodePolicy::MostAllocated => share_of_best(ScoringStrategy::MostAllocated),
    };
    Ok(Score::of_share(part, total))
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
    let cost_of =
        |gpus: &mut dyn Iterator<Item = usize>| cost_of_gpus(node, request, gpus, look_ahead, hints);
    // Where the cost decides, it also decides between GPUs of different locations.
    if needs_decision(node, request) && !cost_decides {
        let gpus = gpus_by_rules(node, request, policy, context)?;
        return Ok(cost_of(&mut gpus.into_iter()));
    }
    fit(node, request, hints)?;
    match request.gpus {
        RequestedGpus::Share(share) => {
            let need = need(node, &share)?;
            if policy == DevicePolicy::Fill && cost_decides {
                let basis = CostBasis::new(node, look_ahead, hints);
                let cheapest = cheapest(node, need, &basis, hints);
                return cheapest.map(|(.., cost)| cost).ok_or(Reason::TooFew);
            }
            let order = context.order(policy, None);
            Ok(cost_of(
                &mut chosen_rows(node, need, &order, hints).map(|(at, _)| at),
            ))
        }
        RequestedGpus::Whole(n) => {
            let n = usize::try_from(n).unwrap_or(usize::MAX);
            Ok(cost_of(&mut free_whole(node, hints).map(|(at, _)| at).take(n)))
        }
        RequestedGpus::All { .. } | RequestedGpus::Nothing => Ok(cost_of(&mut std::iter::empty())),
    }
}

/// The GPUs that are taken where rules or topology decide; the same for all nodes of an equivalence class.
pub(crate) fn gpus_by_rules(
    node: &Node,
    request: NodeRequest<'_>,
    policy: DevicePolicy,
    context: ChoiceContext<'_>,
) -> Result<Vec<usize>, Reason> {
    let order = context.order(policy, None);
    let decision = decide(node, request, order, context.hints).map_err(|misfit| misfit.reason())?;
    Ok(decision.gpus)
}

/// Memory of healthy GPUs that would be free after the best choice, and all of it, in hundredths of a byte.
fn memory_left(
    node: &Node,
    request: RequestedGpus,
    order: &DeviceOrder<'_>,
    hints: Hints<'_>,
) -> (u128, u128) {
    let (mut free, mut total) = (0_u128, 0_u128);
    for (row, ..) in node.healthy_rows(hints) {
        free += u128::from(row.free.memory.hundredths());
        total += u128::from(row.total.memory.hundredths());
    }
    let taken = match request {
        RequestedGpus::Share(request) => need(node, &request).map_or(0, |need| {
            let chosen = chosen_rows(node, need, order, hints);
            chosen
                .map(|(_, row)| u128::from(need.on(row.total).memory.hundredths()))
                .sum()
        }),
        RequestedGpus::Whole(n) => {
            let n_gpus = u128::try_from(node.gpus().len()).unwrap_or(u128::MAX);
            total * u128::from(n) / n_gpus.max(1)
        }
        RequestedGpus::All { .. } | RequestedGpus::Nothing => 0,
    };
    (free.saturating_sub(taken), total)
}
