//! Eligible devices: the devices of each type that health, room, labels, virtual functions and exclusive use leave.
//!
//! Devices of all types pass the same rules in the same order. Types differ only in the amounts that are taken of a device:
//! [`NeededAmounts`].

use crate::choice::cost::{ChoiceContext, CostBasis, cost_decides, taken_part};
use crate::choice::gpu_room::{free_whole, share_need};
use crate::choice::order::{gpu_preference, resource_preference};
use crate::choice::topology::candidates::Pool;
use crate::choice::topology::groups::{Loss, losses};
use crate::data::amounts::{Amounts, NamedAmounts, is_within};
use crate::data::constraints::{DeviceConstraint, Exclusion, Strategy, UNCONSTRAINED};
use crate::data::device::{Device, VirtualFunction};
use crate::data::holding::Share;
use crate::data::ident::DeviceType;
use crate::data::inventory::{GPUS, Inventory};
use crate::data::misfit::{CandidateCounts, Misfit};
use crate::data::reason::Reason;
use crate::data::request::{DeviceRequest, RequestedGpus, ShareNeed};
use crate::state::hardware::{HardwareClass, Location};
use crate::state::node::Node;
use crate::state::occupancy::{Occupancy, permits};

/// The node, the rules and the order of one decision.
pub(crate) struct DecisionContext<'a> {
    pub(crate) node: &'a Node,
    pub(crate) inventory: &'a Inventory,
    pub(crate) hardware: &'a HardwareClass,
    pub(crate) occupancy: Occupancy<'a>,
    pub(crate) inputs: ChoiceContext<'a>,
}

impl<'a> DecisionContext<'a> {
    /// The request's constraint on devices of a type; without one, a constraint that allows every choice.
    pub(crate) fn constraint(&self, kind: &DeviceType) -> &'a DeviceConstraint {
        let constraints = self.inputs.request.constraints;
        let of_kind = constraints.and_then(|constraints| constraints.of(kind));
        of_kind.unwrap_or(&UNCONSTRAINED)
    }
}

/// The part of a request for the devices of one type, in the terms of a node.
pub(crate) struct TypeDemand<'a> {
    kind: &'a DeviceType,
    /// Index of the type in the inventory.
    type_at: usize,
    /// Number of devices to take; `None` if every selected device is taken, whatever their number.
    pub(crate) n_requested: Option<usize>,
    amounts: NeededAmounts<'a>,
    constraint: &'a DeviceConstraint,
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

/// The preference for a device over others of its type; smaller is better: a key by cost and device policy, then the groups of
/// free devices (partitions, links, switches, NUMA nodes) that are broken when the device is taken.
type Preference = (Vec<u64>, Loss);

impl<'a> TypeDemand<'a> {
    /// The demand for GPUs; `None` if the request takes none of them, or the vendor's plugin chooses them.
    pub(crate) fn of_gpus(context: &'a DecisionContext<'a>) -> Result<Option<Self>, Misfit> {
        let (node, inputs) = (context.node, context.inputs);
        let (n_requested, amounts) = match inputs.request.gpus {
            RequestedGpus::Nothing | RequestedGpus::All { .. } => return Ok(None),
            RequestedGpus::Whole(_) if !context.inventory.serves_vendor => return Ok(None),
            RequestedGpus::Whole(n) => {
                let n = usize::try_from(n).unwrap_or(usize::MAX);
                (n, NeededAmounts::Whole(free_whole(node, inputs.hints).collect()))
            }
            RequestedGpus::Share(request) => {
                let need = share_need(node, &request)?;
                let basis = cost_decides(node, inputs).then(|| CostBasis::new(node, inputs));
                (need.devices, NeededAmounts::Share(need, basis))
            }
        };
        Ok(Some(Self {
            kind: &DeviceType::Gpu,
            type_at: GPUS,
            n_requested: Some(n_requested),
            amounts,
            constraint: context.constraint(&DeviceType::Gpu),
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
        let (n_requested, amounts) = n_and_amounts(request, devices, constraint).ok_or(lacking)?;
        Ok(Self {
            kind: &request.kind,
            type_at,
            n_requested,
            amounts: NeededAmounts::Resources(amounts),
            constraint,
        })
    }

    /// The devices that pass all rules and have room, with their preferences; the refusal if they are too few.
    pub(crate) fn eligible(&self, context: &DecisionContext<'_>) -> Result<Pool, Misfit> {
        let locations = context.hardware.locations_of(self.type_at);
        let uses = context.occupancy.of_type(self.type_at);
        let constraint = self.constraint;
        let losses = losses(context.inventory, self.type_at, locations, uses);
        let devices = context.inventory.devices(self.type_at);
        let mut counts = CandidateCounts::default();
        let mut keyed: Vec<(usize, Location, Preference)> = Vec::with_capacity(devices.len());
        for (at, device) in devices.iter().enumerate() {
            // Not counted as a failed rule: `refuse_weak_limits` has refused nodes with too few GPUs of enforced limits by now.
            if !self.has_limits(context, device) {
                continue;
            }
            let selector = constraint.selector.as_ref();
            let is_selected = selector.is_none_or(|selector| selector.selects(&device.attributes.labels));
            let has_function =
                constraint.virtual_functions.is_none() || self.free_function(context, device).is_some();
            let key = self.preference(context, at, device);
            let is_permitted = permits(constraint.exclusion, at, locations, uses);
            if counts.add([is_selected, has_function, key.is_some(), is_permitted])
                && let (Some(key), Some(location), Some(loss)) = (key, locations.get(at), losses.get(at))
            {
                keyed.push((at, *location, (key, *loss)));
            }
        }
        let kind = self.kind.clone();
        let n_selected = counts.selected;
        if self.n_requested.is_none() && (n_selected == 0 || keyed.len() < n_selected) {
            let mut text = counts.describe(&kind, n_selected.max(1), constraint);
            if n_selected > 0 {
                text += ", all are needed";
            }
            return Err(Misfit::new(Reason::OtherDevices, text));
        }
        // All selected devices are eligible here, so their number is the number to take.
        let needed = self.n_requested.unwrap_or(keyed.len());
        if keyed.len() < needed {
            let reason = match kind {
                DeviceType::Gpu => Reason::Selected,
                DeviceType::Other(_) => Reason::OtherDevices,
            };
            let counts = counts.describe(&kind, needed, constraint);
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
        match context.inputs.request.constraints {
            Some(constraints) => device.attributes.limits >= constraints.limits,
            None => true,
        }
    }

    /// The key of the preference for a device; `None` if the device has no room or is not open.
    fn preference(&self, context: &DecisionContext<'_>, at: usize, device: &Device) -> Option<Vec<u64>> {
        let (node, inputs) = (context.node, &context.inputs);
        match &self.amounts {
            NeededAmounts::Share(need, basis) => {
                let row = node.row_with(at, *node.rows.get(at)?, inputs.hints);
                let taken = need.amounts_on(row.total);
                if !taken.within(row.free) {
                    return None;
                }
                // One number by the cost, and four by the policy.
                let mut key: Vec<u64> = Vec::with_capacity(5);
                if let Some(basis) = basis {
                    let cost = basis.cost_of([(at, taken_part(taken, row.total))]);
                    key.push(cost.rank().into());
                }
                key.extend(gpu_preference(inputs, *need, at, &row));
                Some(key)
            }
            // GPUs that take no shares come first, as pods that share can use all other GPUs.
            NeededAmounts::Whole(free) => free.contains(&at).then(|| vec![device.sharing.into()]),
            NeededAmounts::Resources(amounts) => {
                let free = node.free_resources_with(self.type_at, at, inputs.hints);
                if !device.is_open() || !is_within(amounts, &free) {
                    return None;
                }
                Some(resource_preference(inputs, device, free, amounts))
            }
        }
    }

    /// The virtual function to take of a device: the first by ID that is free and of the requested kind.
    fn free_function<'d>(
        &self,
        context: &DecisionContext<'_>,
        device: &'d Device,
    ) -> Option<&'d VirtualFunction> {
        let selector = self.constraint.virtual_functions.as_ref()?;
        let held = context.occupancy.held_functions_of(self.type_at);
        let mut first: Option<&VirtualFunction> = None;
        for group in &device.attributes.function_groups {
            // Pods take no virtual functions of GPUs.
            if self.type_at == GPUS || !selector.selects(&group.labels) {
                continue;
            }
            for function in &group.functions {
                // The first by ID, so that nodes in the same state give the same function whatever the order of their report.
                let is_earlier = first.is_none_or(|first| function.id < first.id);
                if is_earlier && !held.contains(&&function.id) {
                    first = Some(function);
                }
            }
        }
        first
    }

    /// The shares of the devices at these indices; none for GPUs, whose shares the caller builds.
    pub(crate) fn shares(&self, context: &DecisionContext<'_>, devices: &[usize]) -> Vec<Share> {
        let NeededAmounts::Resources(resources) = &self.amounts else {
            return Vec::new();
        };
        let all = context.inventory.devices(self.type_at);
        let mut shares = Vec::with_capacity(devices.len());
        for device in devices.iter().filter_map(|at| all.get(*at)) {
            shares.push(Share {
                kind: self.kind.clone(),
                id: device.id.clone(),
                minor: device.minor,
                amounts: Amounts::ZERO,
                resources: resources.clone(),
                virtual_functions: self.free_function(context, device).cloned().into_iter().collect(),
            });
        }
        shares
    }
}

/// Returns true if the request takes its GPUs whole, be it as whole GPUs or as shares of all their memory. Only such a request
/// gets a partition: a set of GPUs that may be allocated together.
pub(crate) fn takes_whole_gpus(context: &DecisionContext<'_>, pool: &Pool) -> bool {
    let RequestedGpus::Share(share) = context.inputs.request.gpus else {
        return matches!(context.inputs.request.gpus, RequestedGpus::Whole(_));
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

/// The number of devices to take (`None` for every device that the selector selects), and the amounts of each; `None` if the
/// amounts are no number of devices.
fn n_and_amounts(
    request: &DeviceRequest,
    devices: &[Device],
    constraint: &DeviceConstraint,
) -> Option<(Option<usize>, NamedAmounts)> {
    let split = request.split_over(devices);
    // An amount of two or more whole devices takes that number: the pod's strategy is for smaller amounts alone.
    let is_several = matches!(split, Some((2.., _)));
    let strategy = if is_several { None } else { constraint.strategy };
    match strategy {
        None => split.map(|(n, amounts)| (Some(n), amounts)),
        Some(Strategy::ApplyForAll) => Some((None, request.amounts.clone())),
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
            Some((Some(usize::try_from(n_devices).ok()?), amounts))
        }
    }
}
