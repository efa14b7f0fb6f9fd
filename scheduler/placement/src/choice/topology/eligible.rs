//! Eligible devices: the devices of each type that health, room, labels, virtual functions and exclusive use leave.
//!
//! All types pass the same rules in the same order. They differ in one thing, the amounts that are taken of a device:
//! [`NeededAmounts`].

use crate::choice::cost::{CostBasis, taken_part};
use crate::choice::gpu_room::{free_whole, need};
use crate::choice::order::DeviceOrder;
use crate::choice::topology::candidates::Pool;
use crate::choice::topology::groups::{Loss, losses};
use crate::data::amounts::{Amounts, NamedAmounts, is_within};
use crate::data::constraints::{Constraints, DeviceConstraint, Exclusion, Strategy, UNCONSTRAINED};
use crate::data::device::{Device, Function, Labels};
use crate::data::holding::{Hints, Share};
use crate::data::ident::{DeviceType, FunctionId};
use crate::data::inventory::{GPUS, Inventory};
use crate::data::misfit::{CandidateCounts, Misfit};
use crate::data::reason::Reason;
use crate::data::request::{DeviceRequest, RequestedGpus, ShareNeed};
use crate::state::hardware::HardwareClass;
use crate::state::node::Node;
use crate::state::occupancy::{Occupancy, permits};

/// The node, the rules and the order of one decision.
pub(crate) struct DecisionContext<'a> {
    pub(crate) node: &'a Node,
    pub(crate) inventory: &'a Inventory,
    pub(crate) hardware: &'a HardwareClass,
    pub(crate) occupancy: Occupancy<'a>,
    pub(crate) constraints: Option<&'a Constraints>,
    pub(crate) order: DeviceOrder<'a>,
    pub(crate) hints: Hints<'a>,
}

impl<'a> DecisionContext<'a> {
    pub(crate) fn constraint(&self, kind: &DeviceType) -> &'a DeviceConstraint {
        self.constraints
            .and_then(|constraints| constraints.of(kind))
            .unwrap_or(&UNCONSTRAINED)
    }
}

/// Counts the devices that pass each rule.
struct RuleCheck<'a> {
    constraint: &'a DeviceConstraint,
    counts: CandidateCounts,
}

impl<'a> RuleCheck<'a> {
    /// A check by these constraints that has counted no device yet.
    fn new(constraint: &'a DeviceConstraint) -> Self {
        let counts = CandidateCounts {
            selector: constraint.selector.clone(),
            wants_functions: constraint.functions.is_some(),
            ..CandidateCounts::default()
        };
        Self { constraint, counts }
    }

    /// Returns true if a device passes all rules; counts the rules that it passes before the first failure.
    fn passes(&mut self, labels: &Labels, has_function: bool, has_room: bool, is_permitted: bool) -> bool {
        let selector = self.counts.selector.as_ref();
        let is_selected = selector.is_none_or(|selector| selector.selects(labels));
        let counts = &mut self.counts;
        counts.all += 1;
        // In the order in which an explanation names them: the first rule that leaves too few devices.
        for (passes, count) in [
            (is_selected, &mut counts.selected),
            (has_function, &mut counts.with_function),
            (has_room, &mut counts.with_room),
            (is_permitted, &mut counts.permitted),
        ] {
            if !passes {
                return false;
            }
            *count += 1;
        }
        true
    }
}

/// The part of a request for the devices of one type, in the terms of a node.
pub(crate) struct TypeDemand<'a> {
    kind: &'a DeviceType,
    /// Index of the type in the inventory.
    type_at: usize,
    devices: &'a [Device],
    /// Number of devices to take.
    n: usize,
    /// True if every selected device is taken, whatever their number.
    pub(crate) takes_all: bool,
    amounts: NeededAmounts<'a>,
    constraint: &'a DeviceConstraint,
    /// Virtual functions of these devices that pods hold.
    held_functions: &'a [&'a FunctionId],
}

/// The amounts that are taken of each device.
#[expect(
    clippy::large_enum_variant,
    reason = "a decision has one for each device type; a box would only allocate"
)]
enum NeededAmounts<'a> {
    /// A share of a GPU; with it the basis of a choice's cost, if the cost decides (policy `fill`, one GPU).
    Share(ShareNeed, Option<CostBasis<'a>>),
    /// A whole GPU in the vendor's name, out of those at these indices.
    Whole(Vec<usize>),
    /// Named resources.
    Resources(NamedAmounts),
}

/// The preference among devices of one type that may be taken; smaller is better, the first field weighs most.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Preference {
    /// Rank of the cost of taking the GPU, where the cost decides.
    cost: Option<u32>,
    /// The key of a GPU by the device policy.
    gpu: [u64; 4],
    /// The key of a device of another type by the device policy.
    resources: Vec<u64>,
    /// The groups of free devices that are broken when the device is taken.
    loss: Option<Loss>,
}

impl<'a> TypeDemand<'a> {
    /// The demand for GPUs; `None` if the engine chooses none.
    pub(crate) fn of_gpus(
        context: &'a DecisionContext<'a>,
        request: RequestedGpus,
    ) -> Result<Option<Self>, Misfit> {
        let (node, hints) = (context.node, context.hints);
        let (n, amounts) = match request {
            RequestedGpus::Nothing | RequestedGpus::All { .. } => return Ok(None),
            RequestedGpus::Whole(_) if !context.inventory.serves_vendor => return Ok(None),
            RequestedGpus::Whole(n) => {
                let n = usize::try_from(n).unwrap_or(usize::MAX);
                (n, NeededAmounts::Whole(free_whole(node, hints).collect()))
            }
            RequestedGpus::Share(request) => {
                let need = need(node, &request)?;
                let look_ahead = context.order.look_ahead_for(need);
                let basis = look_ahead.map(|look_ahead| CostBasis::new(node, look_ahead, hints));
                (need.devices, NeededAmounts::Share(need, basis))
            }
        };
        Ok(Some(Self {
            kind: &DeviceType::Gpu,
            type_at: GPUS,
            devices: &context.inventory.gpus,
            n,
            takes_all: false,
            amounts,
            constraint: context.constraint(&DeviceType::Gpu),
            held_functions: &[],
        }))
    }

    /// The demand for devices of another type.
    pub(crate) fn of_others(
        context: &'a DecisionContext<'a>,
        request: &'a DeviceRequest,
    ) -> Result<Self, Misfit> {
        let lacking = Misfit::from(Reason::OtherDevices);
        let Some(type_at) = context.inventory.type_index(&request.kind) else {
            return Err(lacking);
        };
        let devices = context.inventory.devices(type_at);
        let constraint = context.constraint(&request.kind);
        let (n, amounts, takes_all) = split(request, devices, constraint).ok_or(lacking)?;
        Ok(Self {
            kind: &request.kind,
            type_at,
            devices,
            n,
            takes_all,
            amounts: NeededAmounts::Resources(amounts),
            constraint,
            held_functions: context.occupancy.functions_of(type_at),
        })
    }

    /// The devices that may be taken.
    pub(crate) fn eligible(&self, context: &DecisionContext<'_>) -> Result<Pool, Misfit> {
        let locations = context.hardware.locations.of_type(self.type_at);
        let uses = context.occupancy.of_type(self.type_at);
        let mut check = RuleCheck::new(self.constraint);
        let losses = losses(context.inventory, self.type_at, locations, uses);
        let mut keyed = Vec::with_capacity(self.devices.len());
        for (at, device) in self.devices.iter().enumerate() {
            // Not counted as a failed rule: `refuse_weak_limits` has refused nodes with too few GPUs of enforced limits by now.
            if !self.has_limits(context, device) {
                continue;
            }
            let has_function = !check.counts.wants_functions || self.function(device).is_some();
            let preference = self.preference(context, at, device);
            let is_permitted = permits(check.constraint.exclusion, at, locations, uses);
            let labels = &device.attributes.labels;
            if check.passes(labels, has_function, preference.is_some(), is_permitted)
                && let Some(mut preference) = preference
            {
                preference.loss = losses.get(at).copied();
                keyed.push((at, locations.get(at).copied().unwrap_or_default(), preference));
            }
        }
        let (kind, tally) = (self.kind.clone(), check.counts);
        if self.takes_all && (tally.selected == 0 || keyed.len() < tally.selected) {
            let mut text = tally.describe(&kind, tally.selected.max(1));
            if tally.selected > 0 {
                text += ", all are needed";
            }
            return Err(Misfit::new(Reason::OtherDevices, text));
        }
        // All selected devices are eligible here, so their number is the number to take.
        let needed = if self.takes_all { keyed.len() } else { self.n };
        if keyed.len() < needed {
            let reason = match kind {
                DeviceType::Gpu => Reason::Selected,
                DeviceType::Other(_) => Reason::OtherDevices,
            };
            let (counts, are) = (
                tally.describe(&kind, needed),
                if needed == 1 { "is" } else { "are" },
            );
            return Err(Misfit::new(reason, format!("{counts}, {needed} {are} needed")));
        }
        Ok(Pool::new(kind, needed, &keyed))
    }

    /// Returns true if memory limits are enforced on a device as strongly as the request demands of shared GPUs.
    fn has_limits(&self, context: &DecisionContext<'_>, device: &Device) -> bool {
        // A pod that has GPUs whole needs no limits, and other devices know none.
        let NeededAmounts::Share(..) = self.amounts else {
            return true;
        };
        let demanded = context.constraints.map(|constraints| constraints.limits);
        device.attributes.limits >= demanded.unwrap_or_default()
    }

    /// The preference for a device, apart from the groups that it breaks; `None` if it has no room.
    fn preference(&self, context: &DecisionContext<'_>, at: usize, device: &Device) -> Option<Preference> {
        let mut preference = Preference::default();
        match &self.amounts {
            NeededAmounts::Share(need, basis) => {
                let row = context
                    .node
                    .row_with(at, *context.node.rows.get(at)?, context.hints);
                let taken: Amounts = need.amounts_on(row.total);
                if !taken.within(row.free) {
                    return None;
                }
                preference.gpu = context.order.gpu_preference(*need, at, &row);
                if let Some(basis) = basis {
                    preference.cost = Some(basis.cost_of([(at, taken_part(taken, row.total))]).rank());
                }
            }
            NeededAmounts::Whole(free) => {
                if !free.contains(&at) {
                    return None;
                }
                // GPUs that take no shares come first, as pods that share can use all other GPUs.
                preference.gpu = [device.sharing.into(), 0, 0, 0];
            }
            NeededAmounts::Resources(amounts) => {
                let free = context.node.free_resources_with(self.type_at, at, context.hints);
                if !device.healthy || !is_within(amounts, &free) {
                    return None;
                }
                preference.resources = context.order.resource_preference(device, free, amounts);
            }
        }
        Some(preference)
    }

    /// The virtual function to take of a device: the first by ID that is free and of the requested kind.
    fn function<'d>(&self, device: &'d Device) -> Option<&'d Function> {
        let selector = self.constraint.functions.as_ref()?;
        let mut first: Option<&Function> = None;
        for group in &device.attributes.functions {
            // Pods take no virtual functions of GPUs.
            if self.type_at == GPUS || !selector.selects(&group.labels) {
                continue;
            }
            for function in &group.functions {
                // The first by ID, so that nodes in the same state give the same function whatever the order of their report.
                let is_earlier = first.is_none_or(|first| function.id < first.id);
                if is_earlier && !self.held_functions.contains(&&function.id) {
                    first = Some(function);
                }
            }
        }
        first
    }

    /// Shares of devices of another type than GPU, by their indices.
    pub(crate) fn shares(&self, devices: &[usize]) -> Vec<Share> {
        let NeededAmounts::Resources(resources) = &self.amounts else {
            return Vec::new();
        };
        let mut shares = Vec::with_capacity(devices.len());
        for device in devices.iter().filter_map(|at| self.devices.get(*at)) {
            shares.push(Share {
                kind: self.kind.clone(),
                id: device.id.clone(),
                minor: device.minor,
                amounts: Amounts::ZERO,
                resources: resources.clone(),
                functions: self.function(device).cloned().into_iter().collect(),
            });
        }
        shares
    }
}

/// Returns true if the request takes its GPUs whole, be it as whole GPUs or as shares of all their memory. Only such a request gets
/// a partition: a set of GPUs that may be allocated together.
pub(crate) fn takes_whole_gpus(context: &DecisionContext<'_>, request: RequestedGpus, pool: &Pool) -> bool {
    let RequestedGpus::Share(share) = request else {
        return matches!(request, RequestedGpus::Whole(_));
    };
    let Ok(need) = need(context.node, &share) else {
        return false;
    };
    for candidate in &pool.candidates {
        let gpu = context.inventory.gpus.get(candidate.device);
        // Every share takes memory, so a share of all memory leaves a GPU to one pod alone.
        if gpu.is_none_or(|gpu| need.amounts_on(gpu.total()).memory < gpu.total().memory) {
            return false;
        }
    }
    true
}

/// The number of devices to take, the amounts of each, and true if all selected ones are taken; `None` if none can be.
fn split(
    request: &DeviceRequest,
    devices: &[Device],
    constraint: &DeviceConstraint,
) -> Option<(usize, NamedAmounts, bool)> {
    let split = request.split(devices);
    // A request for two or more whole devices takes that number: the pod's strategy does not apply.
    let is_several = matches!(split, Some((2.., _)));
    let strategy = if is_several { None } else { constraint.strategy };
    match strategy {
        None => split.map(|(n, amounts)| (n, amounts, false)),
        Some(Strategy::All) => Some((0, request.amounts.clone(), true)),
        Some(Strategy::Count) => {
            let is_exclusive = constraint.exclusion == Some(Exclusion::Device);
            let n = request.amounts.values().max().copied()?;
            let mut amounts = NamedAmounts::new();
            for resource in request.amounts.keys() {
                // A counted device is taken whole for exclusive use, else a unit of it.
                let whole = request.whole_device(devices, resource).filter(|_| is_exclusive);
                amounts.insert(resource.clone(), whole.unwrap_or(1));
            }
            Some((usize::try_from(n).ok()?, amounts, false))
        }
    }
}
