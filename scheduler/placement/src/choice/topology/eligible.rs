//! Eligible devices: the devices of each type that health, room, labels, virtual functions and exclusive use leave.
//!
//! Devices of all types pass the same rules in the same order. Types differ only in the amounts that are taken of a device:
//! [`NeededAmounts`].

use crate::choice::cost::{CostBasis, taken_part};
use crate::choice::gpu_room::{free_whole, share_need};
use crate::choice::order::DeviceOrder;
use crate::choice::topology::candidates::Pool;
use crate::choice::topology::groups::{Loss, losses};
use crate::data::amounts::{Amounts, NamedAmounts, is_within};
use crate::data::constraints::{Constraints, DeviceConstraint, Exclusion, Strategy, UNCONSTRAINED};
use crate::data::device::{Device, Labels, VirtualFunction};
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
    /// The request's constraint on devices of a type; without one, a constraint that allows every choice.
    pub(crate) fn constraint(&self, kind: &DeviceType) -> &'a DeviceConstraint {
        self.constraints
            .and_then(|constraints| constraints.of(kind))
            .unwrap_or(&UNCONSTRAINED)
    }
}

impl CandidateCounts {
    /// The counts under the constraint of a device type, before the first device.
    fn of(constraint: &DeviceConstraint) -> Self {
        Self {
            selector: constraint.selector.clone(),
            wants_virtual_functions: constraint.virtual_functions.is_some(),
            ..Self::default()
        }
    }

    /// Counts a device under each rule that it passes before the first failure; returns true if it passes all.
    fn add(&mut self, labels: &Labels, has_function: bool, has_room: bool, is_permitted: bool) -> bool {
        let selector = self.selector.as_ref();
        let is_selected = selector.is_none_or(|selector| selector.selects(labels));
        self.all += 1;
        // In the order of `CandidateCounts::describe`, which names the first rule that leaves too few devices.
        for (passes, count) in [
            (is_selected, &mut self.selected),
            (has_function, &mut self.with_free_function),
            (has_room, &mut self.with_room),
            (is_permitted, &mut self.permitted),
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
    /// All devices of the type on the node.
    devices: &'a [Device],
    /// Number of devices to take; 0 if `takes_all` is true.
    n_requested: usize,
    /// True if every selected device is taken, whatever their number.
    pub(crate) takes_all: bool,
    amounts: NeededAmounts<'a>,
    constraint: &'a DeviceConstraint,
    /// Virtual functions of these devices that other pods hold.
    held_functions: &'a [&'a FunctionId],
}

/// The amounts that are taken of each device.
#[expect(
    clippy::large_enum_variant,
    reason = "a decision has one for each device type; a box would only allocate"
)]
enum NeededAmounts<'a> {
    /// A share of a GPU. With it the basis of the costs of choices, if the cost decides: for one GPU under the policy `fill`.
    Share(ShareNeed, Option<CostBasis<'a>>),
    /// A whole GPU by the vendor's resource name (`nvidia.com/gpu`), out of those at these indices.
    Whole(Vec<usize>),
    /// Named resources, the same amounts of each device.
    Resources(NamedAmounts),
}

/// The preference for a device that may be taken over others of its type; smaller is better, the first field weighs most.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Preference {
    /// Rank of the cost of taking the GPU, where the cost decides.
    cost: Option<u32>,
    /// The key of a GPU by the device policy.
    gpu: [u64; 4],
    /// The key of a device of another type by the device policy.
    resources: Vec<u64>,
    /// The groups of free devices (partitions, links, switches, NUMA nodes) that are broken when the device is taken. Added last.
    loss: Option<Loss>,
}

impl<'a> TypeDemand<'a> {
    /// The demand for GPUs; `None` if the request takes none of them, or the vendor's plugin chooses them.
    pub(crate) fn of_gpus(
        context: &'a DecisionContext<'a>,
        request: RequestedGpus,
    ) -> Result<Option<Self>, Misfit> {
        let (node, hints) = (context.node, context.hints);
        let (n_requested, amounts) = match request {
            RequestedGpus::Nothing | RequestedGpus::All { .. } => return Ok(None),
            RequestedGpus::Whole(_) if !context.inventory.serves_vendor => return Ok(None),
            RequestedGpus::Whole(n) => {
                let n = usize::try_from(n).unwrap_or(usize::MAX);
                (n, NeededAmounts::Whole(free_whole(node, hints).collect()))
            }
            RequestedGpus::Share(request) => {
                let need = share_need(node, &request)?;
                let look_ahead = context.order.look_ahead_for(need);
                let basis = look_ahead.map(|look_ahead| CostBasis::new(node, look_ahead, hints));
                (need.devices, NeededAmounts::Share(need, basis))
            }
        };
        Ok(Some(Self {
            kind: &DeviceType::Gpu,
            type_at: GPUS,
            devices: &context.inventory.gpus,
            n_requested,
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
        let (n_requested, amounts, takes_all) = n_and_amounts(request, devices, constraint).ok_or(lacking)?;
        Ok(Self {
            kind: &request.kind,
            type_at,
            devices,
            n_requested,
            takes_all,
            amounts: NeededAmounts::Resources(amounts),
            constraint,
            held_functions: context.occupancy.held_functions_of(type_at),
        })
    }

    /// The devices that pass all rules and have room, with their preferences; the refusal if they are too few.
    pub(crate) fn eligible(&self, context: &DecisionContext<'_>) -> Result<Pool, Misfit> {
        let locations = context.hardware.locations.of_type(self.type_at);
        let uses = context.occupancy.of_type(self.type_at);
        let mut tally = CandidateCounts::of(self.constraint);
        let losses = losses(context.inventory, self.type_at, locations, uses);
        let mut keyed = Vec::with_capacity(self.devices.len());
        for (at, device) in self.devices.iter().enumerate() {
            // Not counted as a failed rule: `refuse_weak_limits` has refused nodes with too few GPUs of enforced limits by now.
            if !self.has_limits(context, device) {
                continue;
            }
            let has_function = !tally.wants_virtual_functions || self.free_function(device).is_some();
            let preference = self.preference(context, at, device);
            let is_permitted = permits(self.constraint.exclusion, at, locations, uses);
            let labels = &device.attributes.labels;
            if tally.add(labels, has_function, preference.is_some(), is_permitted)
                && let Some(mut preference) = preference
            {
                preference.loss = losses.get(at).copied();
                keyed.push((at, locations.get(at).copied().unwrap_or_default(), preference));
            }
        }
        let kind = self.kind.clone();
        if self.takes_all && (tally.selected == 0 || keyed.len() < tally.selected) {
            let mut text = tally.describe(&kind, tally.selected.max(1));
            if tally.selected > 0 {
                text += ", all are needed";
            }
            return Err(Misfit::new(Reason::OtherDevices, text));
        }
        // All selected devices are eligible here, so their number is the number to take.
        let needed = if self.takes_all {
            keyed.len()
        } else {
            self.n_requested
        };
        if keyed.len() < needed {
            let reason = match kind {
                DeviceType::Gpu => Reason::Selected,
                DeviceType::Other(_) => Reason::OtherDevices,
            };
            let counts = tally.describe(&kind, needed);
            let are = if needed == 1 { "is" } else { "are" };
            return Err(Misfit::new(reason, format!("{counts}, {needed} {are} needed")));
        }
        Ok(Pool::new(kind, needed, &keyed))
    }

    /// Returns true if memory limits are enforced on a device as strongly as the request demands of shared GPUs.
    fn has_limits(&self, context: &DecisionContext<'_>, device: &Device) -> bool {
        // A pod with whole GPUs needs no memory limits, and devices of other types have none.
        let NeededAmounts::Share(..) = self.amounts else {
            return true;
        };
        let demanded = context.constraints.map(|constraints| constraints.limits);
        device.attributes.limits >= demanded.unwrap_or_default()
    }

    /// The preference for a device without its `loss`, which the caller adds; `None` if the device has no room or is not open.
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
                if !device.is_open() || !is_within(amounts, &free) {
                    return None;
                }
                preference.resources = context.order.resource_preference(device, free, amounts);
            }
        }
        Some(preference)
    }

    /// The virtual function to take of a device: the first by ID that is free and of the requested kind.
    fn free_function<'d>(&self, device: &'d Device) -> Option<&'d VirtualFunction> {
        let selector = self.constraint.virtual_functions.as_ref()?;
        let mut first: Option<&VirtualFunction> = None;
        for group in &device.attributes.function_groups {
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

    /// The shares of the devices at these indices; none for GPUs, whose shares the caller builds.
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
                virtual_functions: self.free_function(device).cloned().into_iter().collect(),
            });
        }
        shares
    }
}

/// Returns true if the request takes its GPUs whole, be it as whole GPUs or as shares of all their memory. Only such a request
/// gets a partition: a set of GPUs that may be allocated together.
pub(crate) fn takes_whole_gpus(context: &DecisionContext<'_>, request: RequestedGpus, pool: &Pool) -> bool {
    let RequestedGpus::Share(share) = request else {
        return matches!(request, RequestedGpus::Whole(_));
    };
    let Ok(need) = share_need(context.node, &share) else {
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

/// The number of devices to take, the amounts of each, and true if every device that the selector selects is taken (the number is
/// 0 then, and not read); `None` if the amounts are no number of devices.
fn n_and_amounts(
    request: &DeviceRequest,
    devices: &[Device],
    constraint: &DeviceConstraint,
) -> Option<(usize, NamedAmounts, bool)> {
    let split = request.split_over(devices);
    // An amount of two or more whole devices takes that number: the pod's strategy is for smaller amounts alone.
    let is_several = matches!(split, Some((2.., _)));
    let strategy = if is_several { None } else { constraint.strategy };
    match strategy {
        None => split.map(|(n, amounts)| (n, amounts, false)),
        Some(Strategy::ApplyForAll) => Some((0, request.amounts.clone(), true)),
        Some(Strategy::RequestsAsCount) => {
            let is_exclusive = constraint.exclusion == Some(Exclusion::Device);
            let n_devices = request.amounts.values().max().copied()?;
            let mut amounts = NamedAmounts::new();
            for resource in request.amounts.keys() {
                // With `RequestsAsCount` the amount is used up as the number of devices. Of each device the pod takes all for
                // exclusive use, and else one unit.
                let exclusive = request.whole_amount(devices, resource).filter(|_| is_exclusive);
                amounts.insert(resource.clone(), exclusive.unwrap_or(1));
            }
            Some((usize::try_from(n_devices).ok()?, amounts, false))
        }
    }
}
