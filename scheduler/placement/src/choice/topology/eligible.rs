//! Eligible devices: the devices of each type that health, room, labels, virtual functions and exclusive use leave.

use crate::choice::cost::{CostBasis, taken_part};
use crate::choice::fit::{free_whole, need};
use crate::choice::order::DeviceOrder;
use crate::choice::topology::candidates::Pool;
use crate::choice::topology::groups::{gpu_losses, losses};
use crate::data::amounts::{NamedAmounts, is_within};
use crate::data::constraints::{Constraints, DeviceConstraint, DeviceKind, Exclusion, Strategy};
use crate::data::device::{Device, DevicesOfType, Function, Labels};
use crate::data::holding::{DeviceShare, Hints};
use crate::data::ident::FunctionId;
use crate::data::inventory::Inventory;
use crate::data::misfit::{CandidateCounts, Misfit};
use crate::data::reason::Reason;
use crate::data::request::{DeviceRequest, RequestedGpus, ShareRequest};
use crate::state::hardware::{HardwareClass, Location};
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
    pub(crate) fn constraint(&self, kind: &DeviceKind) -> Option<&'a DeviceConstraint> {
        self.constraints.and_then(|constraints| constraints.of(kind))
    }

    /// Returns true if memory limits are enforced on a GPU as strongly as the request demands.
    fn has_limits(&self, at: usize) -> bool {
        let demanded = self.constraints.map(|constraints| constraints.limits);
        let gpu = self.inventory.gpus.get(at);
        gpu.is_some_and(|gpu| gpu.attributes.limits >= demanded.unwrap_or_default())
    }

    fn gpu_location(&self, at: usize) -> Location {
        self.hardware.locations.gpus.get(at).copied().unwrap_or_default()
    }
}

/// Counts the devices that pass each rule.
struct RuleCheck<'a> {
    constraint: Option<&'a DeviceConstraint>,
    counts: CandidateCounts,
}

impl<'a> RuleCheck<'a> {
    fn new(constraint: Option<&'a DeviceConstraint>) -> Self {
        let counts = CandidateCounts {
            selector: constraint.and_then(|constraint| constraint.selector.clone()),
            wants_functions: constraint.is_some_and(|constraint| constraint.functions.is_some()),
            ..CandidateCounts::default()
        };
        Self { constraint, counts }
    }

    fn exclusion(&self) -> Option<Exclusion> {
        self.constraint.and_then(|constraint| constraint.exclusion)
    }

    /// Returns true if a device passes all rules; counts the rules that it passes before the first failure.
    fn passes(&mut self, labels: &Labels, has_function: bool, has_room: bool, is_permitted: bool) -> bool {
        let selector = self.counts.selector.as_ref();
        let is_selected = selector.is_none_or(|selector| selector.selects(labels));
        let counts = &mut self.counts;
        counts.all += 1;
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

/// GPUs that may be taken; `None` if the engine chooses none.
pub(crate) fn eligible_gpus(
    context: &DecisionContext<'_>,
    request: RequestedGpus,
) -> Result<Option<Pool>, Misfit> {
    let mut check = RuleCheck::new(context.constraint(&DeviceKind::Gpu));
    let pool = match request {
        RequestedGpus::Nothing | RequestedGpus::All { .. } => return Ok(None),
        RequestedGpus::Whole(_) if !context.inventory.serves_vendor => return Ok(None),
        RequestedGpus::Share(request) => gpus_with_room(context, &request, &mut check)?,
        RequestedGpus::Whole(n) => whole_gpus(context, n, &mut check),
    };
    if pool.candidates.len() < pool.n {
        return Err(Misfit::TooFew {
            kind: DeviceKind::Gpu,
            needed: pool.n,
            tally: check.counts,
        });
    }
    Ok(Some(pool))
}

fn gpus_with_room(
    context: &DecisionContext<'_>,
    request: &ShareRequest,
    check: &mut RuleCheck<'_>,
) -> Result<Pool, Misfit> {
    let (node, hints) = (context.node, context.hints);
    let need = need(node, request).map_err(Misfit::Plain)?;
    let look_ahead = context.order.look_ahead_for(need);
    let basis = look_ahead.map(|look_ahead| CostBasis::new(node, look_ahead, hints));
    let losses = gpu_losses(
        context.inventory,
        &context.hardware.locations.gpus,
        &context.occupancy.gpus,
    );
    let mut keyed = Vec::new();
    for (at, row) in node.rows_with(hints).enumerate() {
        let taken = need.on(row.total);
        if context.has_limits(at) && gpu_passes(context, check, at, taken.within(row.free)) {
            let cost = basis
                .as_ref()
                .map(|basis| basis.cost_of([(at, taken_part(taken, row.total))]).rank());
            let preference = context.order.gpu_preference(need, at, &row);
            keyed.push((
                at,
                context.gpu_location(at),
                (cost, preference, losses.get(at).copied()),
            ));
        }
    }
    Ok(Pool::new(DeviceKind::Gpu, need.devices, &keyed))
}

fn whole_gpus(context: &DecisionContext<'_>, n: u32, check: &mut RuleCheck<'_>) -> Pool {
    let free: Vec<usize> = free_whole(context.node, context.hints)
        .map(|(at, _)| at)
        .collect();
    let losses = gpu_losses(
        context.inventory,
        &context.hardware.locations.gpus,
        &context.occupancy.gpus,
    );
    let mut keyed = Vec::new();
    for (at, gpu) in context.inventory.gpus.iter().enumerate() {
        if gpu_passes(context, check, at, free.contains(&at)) {
            keyed.push((
                at,
                context.gpu_location(at),
                (gpu.sharing, losses.get(at).copied()),
            ));
        }
    }
    Pool::new(DeviceKind::Gpu, usize::try_from(n).unwrap_or(usize::MAX), &keyed)
}

fn gpu_passes(context: &DecisionContext<'_>, check: &mut RuleCheck<'_>, at: usize, has_room: bool) -> bool {
    let Some(gpu) = context.inventory.gpus.get(at) else {
        return false;
    };
    // Pods take no virtual functions of GPUs.
    let has_function = !check.counts.wants_functions;
    let (locations, uses) = (&context.hardware.locations.gpus, &context.occupancy.gpus);
    let is_permitted = permits(check.exclusion(), at, locations, uses);
    check.passes(&gpu.attributes.labels, has_function, has_room, is_permitted)
}

/// Returns true if the request takes whole GPUs, in whatever terms, which a partition can serve.
pub(crate) fn takes_whole_gpus(context: &DecisionContext<'_>, request: RequestedGpus, pool: &Pool) -> bool {
    let RequestedGpus::Share(share) = request else {
        return matches!(request, RequestedGpus::Whole(_));
    };
    let Ok(need) = need(context.node, &share) else {
        return false;
    };
    pool.candidates.iter().all(|candidate| {
        let gpu = context.inventory.gpus.get(candidate.device);
        gpu.is_some_and(|gpu| need.on(gpu.total()).memory >= gpu.total().memory)
    })
}

/// The part of a request for devices of one type other than GPU.
pub(crate) struct TypeDemand<'a> {
    of_type: &'a DevicesOfType,
    /// Amounts taken of each device.
    amounts: NamedAmounts,
    /// True if every selected device is taken.
    pub(crate) takes_all: bool,
    constraint: Option<&'a DeviceConstraint>,
    held_functions: &'a [&'a FunctionId],
}

impl TypeDemand<'_> {
    /// The virtual function to take of a device: the first by ID that is free and of the requested kind.
    fn function<'d>(&self, device: &'d Device) -> Option<&'d Function> {
        let selector = self.constraint?.functions.as_ref()?;
        let groups = device.attributes.functions.iter();
        let selected = groups.filter(|group| selector.selects(&group.labels));
        let free = selected
            .flat_map(|group| &group.functions)
            .filter(|function| !self.held_functions.contains(&&function.id));
        free.min_by(|one, other| one.id.cmp(&other.id))
    }

    /// Shares of devices by their indices.
    pub(crate) fn shares(&self, devices: &[usize]) -> Vec<DeviceShare> {
        let mut shares = Vec::with_capacity(devices.len());
        for device in devices.iter().filter_map(|at| self.of_type.devices.get(*at)) {
            shares.push(DeviceShare {
                kind: self.of_type.kind.clone(),
                id: device.id.clone(),
                minor: device.minor,
                amounts: self.amounts.clone(),
                functions: self.function(device).cloned().into_iter().collect(),
            });
        }
        shares
    }
}

/// Devices of another type that may be taken, and the part of the request that they serve.
pub(crate) fn eligible_devices<'a>(
    context: &'a DecisionContext<'a>,
    request: &'a DeviceRequest,
) -> Result<(TypeDemand<'a>, Pool), Misfit> {
    let kind = DeviceKind::Other(request.kind.clone());
    let plain = || Misfit::Plain(Reason::OtherDevices);
    let (type_at, of_type, free) = context.node.type_at(&request.kind).ok_or_else(plain)?;
    let (locations, uses) = (
        context.hardware.locations.of_type(type_at),
        context.occupancy.of_type(type_at),
    );
    let mut check = RuleCheck::new(context.constraint(&kind));
    let constraint = check.constraint;
    let (n, amounts, takes_all) = split(request, of_type, constraint).ok_or_else(plain)?;
    let demand = TypeDemand {
        of_type,
        amounts,
        takes_all,
        constraint,
        held_functions: context.occupancy.functions_of(type_at),
    };
    let losses = losses(locations, uses);
    let mut keyed = Vec::new();
    for (at, (device, free)) in of_type.devices.iter().zip(free).enumerate() {
        let free = context
            .node
            .free_of_device(&request.kind, device, free, context.hints);
        let has_function = !check.counts.wants_functions || demand.function(device).is_some();
        let has_room = device.healthy && is_within(&demand.amounts, &free);
        let is_permitted = permits(check.exclusion(), at, locations, uses);
        if check.passes(&device.attributes.labels, has_function, has_room, is_permitted) {
            let preference = context.order.device_preference(device, &free, &demand.amounts);
            let location = locations.get(at).copied().unwrap_or_default();
            keyed.push((at, location, (preference, losses.get(at).copied())));
        }
    }
    let tally = check.counts;
    if takes_all && (tally.selected == 0 || keyed.len() < tally.selected) {
        return Err(Misfit::NotAll { kind, tally });
    }
    // All selected devices are eligible here, so their number is the number to take.
    let n = if takes_all { keyed.len() } else { n };
    if keyed.len() < n {
        return Err(Misfit::TooFew {
            kind,
            needed: n,
            tally,
        });
    }
    Ok((demand, Pool::new(kind, n, &keyed)))
}

/// The number of devices to take, the amounts of each, and whether all selected ones are taken; `None` if none can be.
///
/// A number of whole devices stays that, whatever strategy the pod sets.
fn split(
    request: &DeviceRequest,
    of_type: &DevicesOfType,
    constraint: Option<&DeviceConstraint>,
) -> Option<(usize, NamedAmounts, bool)> {
    let split = request.split(of_type);
    let strategy = constraint
        .and_then(|constraint| constraint.strategy)
        .filter(|_| split.as_ref().is_none_or(|(n, _)| *n == 1));
    match strategy {
        None => split.map(|(n, amounts)| (n, amounts, false)),
        Some(Strategy::All) => Some((0, request.amounts.clone(), true)),
        Some(Strategy::Count) => {
            let is_exclusive =
                constraint.is_some_and(|constraint| constraint.exclusion == Some(Exclusion::Device));
            let n = request.amounts.values().max().copied()?;
            let mut amounts = NamedAmounts::new();
            for resource in request.amounts.keys() {
                // A counted device is taken whole for exclusive use, else a unit of it.
                let whole = request.whole_device(of_type, resource).filter(|_| is_exclusive);
                amounts.insert(resource.clone(), whole.unwrap_or(1));
            }
            Some((usize::try_from(n).ok()?, amounts, false))
        }
    }
}
