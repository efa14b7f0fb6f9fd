//! The cost of a choice of GPUs, for the policy `fill`; of equal costs, the choice that leaves less on its node is best.
//!
//! cost = ½ · (value(node) − value(node after) − size of the choice) + ½ · increase in unusable idle capacity + weighted loss of
//! whole GPUs that are idle together. The first term may be zero where small pods fill a node as well as large ones; the second
//! counts that the node is lost to large pods; the third is for pods unlike those seen so far.

use rustc_hash::FxHashMap;

use crate::choice::gpu_room::share_need;
use crate::choice::simulate::{
    FreeGpus, GpuPart, N_SEQUENCES, NO_PODS, Simulation, WHOLE, thousandths_down, thousandths_up,
};
use crate::data::amounts::{Amounts, HostAmounts, Memory};
use crate::data::holding::Hints;
use crate::data::inventory::GpuModel;
use crate::data::policy::{COST_END, DevicePolicy, ResourceWeights};
use crate::data::request::{NodeRequest, RequestedGpus, ShareNeed, ShareRequest};
use crate::data::workload::Sample;
use crate::state::node::{Node, Row};

/// Thousandths of a GPU in one step of a cost: the simulation is not exact enough for smaller differences.
const STEP: i64 = 10;

/// The steps in the rank of a cost of zero. Not 0, as a choice may cost less than nothing.
const ZERO_STEPS: i64 = 1024;

/// Bits of a rank for the idle part of GPUs that a choice leaves on the node.
const LEFT_BITS: u32 = 15;

/// The workload model: the pods that are expected, and their simulation on every model of GPU that nodes have had.
#[derive(Clone, Debug, Default)]
pub(crate) struct WorkloadModel {
    /// Differs from that of every other model of the fleet.
    pub(crate) number: u64,
    pub(crate) sample: Sample,
    by_gpu: FxHashMap<GpuModel, Simulation>,
}

impl WorkloadModel {
    /// The model of these expected pods, without any model of GPU yet.
    pub(crate) fn new(number: u64, sample: Sample) -> Self {
        Self {
            number,
            sample,
            ..Self::default()
        }
    }

    /// Adds the models of GPU that another workload model has.
    pub(crate) fn add_gpu_models_of(&mut self, other: &Self) {
        for gpu in other.gpu_models() {
            self.add_gpu_model(gpu);
        }
    }

    /// Adds the simulation for nodes with this model of GPU, unless there is one.
    pub(crate) fn add_gpu_model(&mut self, gpu: GpuModel) {
        // At the report of a node, because a simulation takes too long to be computed while a request waits.
        let entry = self.by_gpu.entry(gpu);
        entry.or_insert_with(|| Simulation::new(&self.sample, gpu));
    }

    pub(crate) fn gpu_models(&self) -> impl Iterator<Item = GpuModel> {
        self.by_gpu.keys().copied()
    }
}

/// Everything that a choice depends on besides the node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChoiceContext<'a> {
    pub(crate) request: NodeRequest<'a>,
    pub(crate) policy: DevicePolicy,
    pub(crate) weights: &'a ResourceWeights,
    pub(crate) model: &'a WorkloadModel,
    pub(crate) hints: Hints<'a>,
}

/// The cost of a choice, term by term; each term may be negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlacementCost {
    /// Loss of the node's value beyond the size of the choice; half of it counts.
    value_loss: i64,
    /// Increase in unusable idle capacity; half of it counts.
    unusable: i64,
    /// Weighted loss of whole GPUs that are idle together; all of it counts.
    broken: i64,
    /// Idle thousandths of the node's GPUs after the choice.
    left: u32,
}

impl PlacementCost {
    /// Units of a term per thousandth of a GPU.
    const SCALE: i64 = N_SEQUENCES as i64;

    /// The cost in steps, then the idle part of GPUs that is left on the node; less is better, and always below [`COST_END`].
    pub(crate) fn rank(self) -> u32 {
        // Rounded down on both sides of zero: truncation would round negative costs up and positive ones down.
        let sum = (self.value_loss + self.unusable).div_euclid(2) + self.broken;
        // Rounded up: a loss of less than a step is a loss.
        let steps = -(-sum).div_euclid(STEP * Self::SCALE) + ZERO_STEPS;
        let most_steps = i64::from(COST_END >> LEFT_BITS) - 1;
        // Costs beyond either end count as the end, since more steps would need bits that the score does not have.
        let steps = u32::try_from(steps.clamp(0, most_steps)).unwrap_or(0);
        // Fifteen bits have room for half of the thousandths of 64 GPUs, which are the most that count.
        steps << LEFT_BITS | (self.left / 2).min((1 << LEFT_BITS) - 1)
    }
}

/// One node before a choice, ready to compute the costs of choices.
pub(crate) struct CostBasis<'a> {
    simulation: &'a Simulation,
    gpus: FreeGpus,
    /// CPU and memory that the request leaves.
    host_after: HostAmounts,
    /// Value of the node before the choice.
    value: u32,
    /// Unusable idle capacity of the node before the choice.
    unusable: u32,
    /// Weight of whole GPUs that are idle together on this node, in thousandths.
    idle_weight: u64,
}

impl<'a> CostBasis<'a> {
    /// Measures a node before the choice: its value, its unusable idle capacity and the weight of its idle GPUs.
    pub(crate) fn new(node: &Node, context: ChoiceContext<'a>) -> Self {
        let ChoiceContext { model, hints, .. } = context;
        let simulation = node.model.and_then(|gpu| model.by_gpu.get(&gpu));
        // A node without GPUs has no value.
        let simulation = simulation.unwrap_or(&NO_PODS);
        let gpus = FreeGpus::new(node.rows_with(hints).map(free_part));
        let host = node.host.free();
        let compute = || (simulation.value(&gpus, host), simulation.unusable(&gpus, host));
        // The node caches the values for requests that count every hint, as most requests do.
        let (value, unusable) = if node.hints.iter().all(|hint| hints.counts(&hint.owner)) {
            node.value_cache.get_or_compute(model.number, compute)
        } else {
            compute()
        };
        Self {
            simulation,
            gpus,
            // At least zero: kube-scheduler checks CPU and memory, and the cost only estimates.
            host_after: host.less(context.request.host),
            value,
            unusable,
            idle_weight: simulation.idle_weight(node.gpus().len(), node.host.total),
        }
    }

    /// The cost of taking parts of GPUs, by their indices.
    pub(crate) fn cost_of(&self, taken: impl IntoIterator<Item = (usize, GpuPart)>) -> PlacementCost {
        self.cost_up_to(u32::MAX, taken).unwrap_or_default()
    }

    /// The cost of taking parts of GPUs, by their indices; `None` if a lower bound of its rank, which takes no simulation, is
    /// above `most`.
    fn cost_up_to(
        &self,
        most: u32,
        taken: impl IntoIterator<Item = (usize, GpuPart)>,
    ) -> Option<PlacementCost> {
        let (mut gpus, mut size) = (self.gpus, 0);
        for (at, part) in taken {
            gpus.take(at, part);
            size += i64::from(part.size()) * PlacementCost::SCALE;
        }
        let broken = self.gpus.idle_value().saturating_sub(gpus.idle_value()) * self.idle_weight / 1000;
        let (simulation, expected) = (self.simulation, i64::from(self.value) - size);
        // The bound: the node is worth the most that it can be after the choice.
        let mut cost = PlacementCost {
            value_loss: expected - i64::from(simulation.most_value(&gpus)),
            unusable: i64::from(simulation.unusable(&gpus, self.host_after)) - i64::from(self.unusable),
            broken: i64::try_from(broken).unwrap_or(0) * PlacementCost::SCALE,
            left: gpus.idle(),
        };
        if cost.rank() > most {
            return None;
        }
        cost.value_loss = expected - i64::from(simulation.value(&gpus, self.host_after));
        Some(cost)
    }
}

/// Returns true if the cost decides which GPU of a node is taken: under the policy `fill`, for a share of one GPU and nothing
/// else, without rules. For other requests the cost only compares nodes.
pub(crate) fn cost_decides(node: &Node, context: ChoiceContext<'_>) -> bool {
    let request = context.request;
    let is_one_share = matches!(
        request.gpus,
        RequestedGpus::Share(ShareRequest { devices: 1, .. })
    );
    let is_alone = request.constraints.is_none() && request.others.is_empty();
    context.policy == DevicePolicy::Fill && is_one_share && is_alone && !node.has_rules
}

/// The cost of taking these GPUs for a request.
pub(crate) fn cost_of_gpus(node: &Node, gpus: &[usize], context: ChoiceContext<'_>) -> PlacementCost {
    let need = match context.request.gpus {
        RequestedGpus::Share(request) => share_need(node, &request).ok(),
        RequestedGpus::Whole(_) | RequestedGpus::All { .. } | RequestedGpus::Nothing => None,
    };
    let taken = gpus.iter().filter_map(|at| {
        let total = node.rows.get(*at)?.total;
        // A request that is no share takes GPUs whole.
        let part = need.map_or(GpuPart::WHOLE, |need| taken_part(need.amounts_on(total), total));
        Some((*at, part))
    });
    CostBasis::new(node, context).cost_of(taken)
}

/// The order of GPUs: rank of the cost; then memory, core and slots that the GPU has left; then its index.
type CheapestKey = (u32, Memory, u32, u32, usize);

/// The GPU on which a share costs least, and the cost; `None` if no GPU has room, or the rank of each cost is above `most`.
pub(crate) fn cheapest(
    node: &Node,
    need: ShareNeed,
    context: ChoiceContext<'_>,
    most: u32,
) -> Option<(usize, PlacementCost)> {
    let (basis, hints) = (CostBasis::new(node, context), context.hints);
    let mut best: Option<(CheapestKey, PlacementCost)> = None;
    for (at, row) in node.rows_with(hints).enumerate() {
        let amounts = need.amounts_on(row.total);
        // A share costs the same on GPUs with equal rows, so the first of them stands for all.
        if !amounts.within(row.free) || node.rows_with(hints).take(at).any(|known| known == row) {
            continue;
        }
        // A GPU on which the share certainly costs more than on the best so far needs no simulation.
        let most = best.map_or(most, |((rank, ..), _)| rank);
        let Some(cost) = basis.cost_up_to(most, [(at, taken_part(amounts, row.total))]) else {
            continue;
        };
        let left = row.free.less(amounts);
        let key = (cost.rank(), left.memory, left.core, left.slots, at);
        if cost.rank() <= most && best.is_none_or(|(best, _)| key < best) {
            best = Some((key, cost));
        }
    }
    best.map(|((.., at), cost)| (at, cost))
}

/// Free amounts as a part of a GPU, rounded down.
fn free_part(row: Row) -> GpuPart {
    let Row { free, total } = row;
    // If a GPU's computing power is not counted, its memory alone decides how much of the GPU is idle.
    let core = if total.core == 0 {
        WHOLE
    } else {
        thousandths_down(free.core.into(), total.core.into())
    };
    GpuPart {
        memory: thousandths_down(free.memory.hundredths(), total.memory.hundredths()),
        core,
    }
}

/// Taken amounts as a part of a GPU; memory is rounded up.
pub(crate) fn taken_part(taken: Amounts, total: Amounts) -> GpuPart {
    let core = taken.core.saturating_mul(1000);
    // A GPU without computing power has none that could be taken.
    let core = core.checked_div(total.core).unwrap_or(0);
    GpuPart {
        // Free parts are rounded down and taken ones up, so that the simulation finds no room that does not exist.
        memory: thousandths_up(taken.memory, total.memory).unwrap_or(WHOLE),
        core: i16::try_from(core).unwrap_or(WHOLE).min(WHOLE),
    }
}
