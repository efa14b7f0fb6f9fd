//! The choice of devices where it matters which: labels, virtual functions, exclusive use, partitions, links, locations, and
//! devices of several types that are allocated close to one another.
//!
//! Rules come first: a device must be `eligible`; GPUs must be a partition (`groups`) where only partitions will do, and lie
//! within their scope; devices that must share switches do. Of all choices that break no rule the engine takes the one with
//! the least rank (`problem`), which the `search` finds. A request for more than 64 devices of a type takes them by preference.

mod candidates;
mod eligible;
mod groups;
mod problem;
mod search;

use std::collections::BTreeMap;

use crate::choice::cost::ChoiceContext;
use crate::choice::gpu_room::{fit_gpus, free_whole};
use crate::choice::topology::candidates::{CandidateSet, MAX_MEMBERS, Pool};
use crate::choice::topology::eligible::{DecisionContext, TypeDemand, takes_whole_gpus};
use crate::choice::topology::groups::{GpuSet, Links, partition_sets};
use crate::choice::topology::problem::{Follower, FollowerRank, Problem, Rank};
use crate::choice::topology::search::search;
use crate::data::constraints::{Constraints, JointAllocation, Scope};
use crate::data::device::LimitLevel;
use crate::data::holding::Share;
use crate::data::ident::{DeviceType, SwitchId};
use crate::data::inventory::GPUS;
use crate::data::misfit::{Misfit, number_of};
use crate::data::reason::Reason;
use crate::data::request::{NodeRequest, RequestedGpus};
use crate::state::hardware::Location;
use crate::state::node::Node;
use crate::state::occupancy::Occupancy;

/// The devices that a request gets.
#[derive(Debug, Default)]
pub(crate) struct DeviceChoice {
    /// Indices of GPUs, where the engine chooses them.
    pub(crate) gpus: Vec<usize>,
    /// Shares of devices of all other types.
    pub(crate) others: Vec<Share>,
}

/// Chosen devices of one type, by their indices in the inventory.
type Chosen<'p> = (&'p DeviceType, Vec<usize>);

/// The devices that a request gets on a node, or the refusal with the rule that no choice meets.
pub(crate) fn choose_by_rules(node: &Node, inputs: ChoiceContext<'_>) -> Result<DeviceChoice, Misfit> {
    let ChoiceContext { request, hints, .. } = inputs;
    // The enforcement of memory limits comes first, so that the reason stays the same however much room there is.
    refuse_weak_limits(node, request)?;
    fit_gpus(node, &request.gpus, hints)?;
    let vendor_chooses = matches!(request.gpus, RequestedGpus::Whole(_)) && !node.inventory.serves_vendor;
    // The vendor's plugin knows nothing of constraints, and may pick GPUs that break them.
    if vendor_chooses && request.constraints.is_some_and(Constraints::narrow_gpus) {
        let text = "the vendor's plugin chooses GPUs on this node and cannot meet constraints on them";
        return Err(Misfit::new(Reason::Vendor, text));
    }
    let Some(hardware) = &node.hardware else {
        return Ok(DeviceChoice::default());
    };
    let context = DecisionContext {
        node,
        inventory: &node.inventory,
        hardware,
        occupancy: Occupancy::new(node, hints),
        inputs,
    };
    let sees_all = matches!(request.gpus, RequestedGpus::All { .. });
    // A pod that sees a GPU can use it, so it must not see a GPU of which another pod has exclusive use.
    if sees_all && context.occupancy.of_type(GPUS).iter().any(|gpu| gpu.is_exclusive) {
        let text = "another pod has exclusive use of a GPU, and a pod that sees all GPUs would see it";
        return Err(Misfit::new(Reason::Selected, text));
    }
    choose_by_type(&context)
}

/// Refuses a node if fewer of its GPUs than the request shares enforce memory limits as strongly as it demands.
fn refuse_weak_limits(node: &Node, request: NodeRequest<'_>) -> Result<(), Misfit> {
    let (RequestedGpus::Share(share), Some(constraints), Some(_)) =
        (request.gpus, request.constraints, &node.hardware)
    else {
        return Ok(());
    };
    let needed = usize::try_from(share.devices).unwrap_or(usize::MAX);
    let (mut found, mut best) = (0, LimitLevel::None);
    for gpu in node.gpus() {
        let limits = gpu.attributes.limits;
        if limits >= constraints.limits {
            found += 1;
        } else {
            best = best.max(limits);
        }
    }
    if found < needed && constraints.limits > LimitLevel::None {
        let reason = match best {
            LimitLevel::None => Reason::Unlimited,
            // Never `Driver`, since GPUs whose driver enforces limits meet every demand.
            LimitLevel::Library | LimitLevel::Driver => Reason::LimitedByLibrary,
        };
        let are = if needed == 1 { "is" } else { "are" };
        let text = format!(
            "{found} of the node's GPUs limit memory as the pod demands, {needed} {are} needed: {reason}"
        );
        return Err(Misfit::new(reason, text));
    }
    Ok(())
}

/// Chooses devices of all types: those of a joint allocation together, other types one by one.
fn choose_by_type(context: &DecisionContext<'_>) -> Result<DeviceChoice, Misfit> {
    let request = context.inputs.request;
    // Without a report of devices of other types, kube-scheduler's own check of extended resources has to do.
    let reports_devices = context.inventory.other_devices.is_some();
    let requests = if reports_devices { request.others } else { &[] };
    let mut others = Vec::with_capacity(requests.len());
    for request in requests {
        let demand = TypeDemand::of_others(context, request)?;
        let pool = demand.eligible(context)?;
        others.push((demand, pool));
    }
    // Devices of other types come first, so that the misfit names them where both are missing.
    let gpus = match TypeDemand::of_gpus(context)? {
        Some(demand) => Some(demand.eligible(context)?),
        None => None,
    };
    let gpu_sets = match &gpus {
        Some(pool) => gpu_sets(context, pool)?,
        None => Vec::new(),
    };
    let (mut chosen, mut vendor_gpus) = (Vec::new(), None);
    let constraints = request.constraints;
    let joint = constraints.and_then(|constraints| constraints.joint.as_ref());
    if let Some(joint) = joint {
        chosen = choose_joint_devices(context, joint, gpus.as_ref(), &others, &gpu_sets)?;
        vendor_gpus = leading_vendor_gpus(context, joint);
    }
    for pool in gpus.iter().chain(others.iter().map(|(_, pool)| pool)) {
        if chosen.iter().any(|(kind, _)| **kind == pool.kind) {
            continue;
        }
        let is_joint = joint.is_some_and(|joint| joint.kinds.contains(&pool.kind));
        match &vendor_gpus {
            // If the vendor's plugin can only choose these GPUs, the other types are taken near them, and no search is needed.
            Some(gpus) if is_joint && pool.n_requested <= MAX_MEMBERS => {
                chosen.push((&pool.kind, devices_near(pool, gpus)));
            }
            _ => chosen.extend(choose_close_devices(context, &[pool], &gpu_sets, false)?),
        }
    }
    let mut decision = DeviceChoice::default();
    // In the order of the request, whichever type led the choice.
    for (demand, pool) in &others {
        let shares = demand.shares(context, devices_of(&chosen, &pool.kind));
        decision.others.extend(shares);
    }
    decision.gpus = devices_of(&chosen, &DeviceType::Gpu).to_vec();
    Ok(decision)
}

/// The chosen devices of one type; empty if none of the type are chosen.
fn devices_of<'c>(chosen: &'c [Chosen<'_>], kind: &DeviceType) -> &'c [usize] {
    let found = chosen.iter().find(|(of, _)| *of == kind);
    found.map_or(&[], |(_, devices)| devices)
}

/// The locations of the GPUs that the vendor's plugin will choose, if GPUs lead the joint allocation and the request takes all
/// free ones; otherwise the engine cannot foresee the plugin's choice.
fn leading_vendor_gpus(context: &DecisionContext<'_>, joint: &JointAllocation) -> Option<Vec<Location>> {
    let RequestedGpus::Whole(n) = context.inputs.request.gpus else {
        return None;
    };
    let locations = context.hardware.locations_of(GPUS);
    let free = free_whole(context.node, context.inputs.hints).filter_map(|at| locations.get(at));
    let free: Vec<Location> = free.copied().collect();
    let takes_all_free = usize::try_from(n) == Ok(free.len());
    let leads = joint.kinds.first() == Some(&DeviceType::Gpu);
    (leads && takes_all_free && !context.inventory.serves_vendor).then_some(free)
}

/// The devices of a pool that are nearest to GPUs at these locations.
fn devices_near(pool: &Pool, gpus: &[Location]) -> Vec<usize> {
    let allowed = pool.all();
    let (chosen, _) = Follower { pool, allowed }.follow(gpus);
    pool.devices(chosen)
}

/// The devices of the requested types of a joint allocation, if these are two or more; else nothing, and the caller chooses them
/// one by one.
fn choose_joint_devices<'p>(
    context: &DecisionContext<'_>,
    joint: &JointAllocation,
    gpus: Option<&'p Pool>,
    others: &'p [(TypeDemand<'_>, Pool)],
    gpu_sets: &[GpuSet],
) -> Result<Vec<Chosen<'p>>, Misfit> {
    let mut requested: Vec<&Pool> = Vec::from_iter(gpus);
    for (demand, pool) in others {
        // If all devices of a type are taken, nothing is left to choose.
        if demand.n_requested.is_some() {
            requested.push(pool);
        }
    }
    let mut types: Vec<&Pool> = Vec::new();
    for kind in &joint.kinds {
        if let Some(at) = requested.iter().position(|pool| pool.kind == *kind) {
            types.push(requested.remove(at));
        }
    }
    let is_too_large = types.iter().any(|pool| pool.n_requested > MAX_MEMBERS);
    if types.len() < 2 || (is_too_large && !joint.same_switch) {
        return Ok(Vec::new());
    }
    choose_close_devices(context, &types, gpu_sets, joint.same_switch)
}

/// Devices of one type, or of types that are allocated close to one another; the leading type comes first.
fn choose_close_devices<'p>(
    context: &DecisionContext<'_>,
    pools: &[&'p Pool],
    gpu_sets: &[GpuSet],
    same_switch: bool,
) -> Result<Vec<Chosen<'p>>, Misfit> {
    let Some(lead) = pools.first() else {
        return Ok(Vec::new());
    };
    let is_gpu = lead.kind == DeviceType::Gpu;
    if pools.len() == 1 {
        // If only preferences matter, no search is needed.
        let is_unrestricted = !is_gpu || *gpu_sets == [GpuSet::plain(lead.all())];
        let takes_all = lead.n_requested == lead.candidates.len() && !is_gpu;
        if lead.n_requested > MAX_MEMBERS || (lead.n_requested == 1 && is_unrestricted) || takes_all {
            return Ok(vec![(&lead.kind, lead.preferred())]);
        }
    }
    let links = is_gpu.then(|| Links::new(context.inventory, lead)).flatten();
    let Some(sets) = best_sets(pools, gpu_sets, same_switch, links.as_ref()) else {
        return Err(nearest_misfit(context, pools).unwrap_or(Reason::Together.into()));
    };
    let sets = pools.iter().zip(sets);
    Ok(sets.map(|(pool, set)| (&pool.kind, pool.devices(set))).collect())
}

/// The best choice of devices of all types, in the order of the types, with the GPUs from one of the sets; `None` if each choice
/// breaks a rule.
fn best_sets(
    pools: &[&Pool],
    gpu_sets: &[GpuSet],
    same_switch: bool,
    links: Option<&Links>,
) -> Option<Vec<CandidateSet>> {
    let (lead, rest) = pools.split_first()?;
    // One set of no GPU, with which the other types are chosen once.
    let without_gpus = [GpuSet::plain(CandidateSet::EMPTY)];
    let has_gpus = pools.iter().any(|pool| pool.kind == DeviceType::Gpu);
    let gpu_sets = if has_gpus { gpu_sets } else { &without_gpus };
    let only_partitions = gpu_sets.iter().all(GpuSet::is_partition);
    let mut best: Option<(Rank, Vec<FollowerRank>, Vec<CandidateSet>)> = None;
    for gpu_set in gpu_sets {
        let mut followers = Vec::with_capacity(rest.len());
        for pool in rest.iter().copied() {
            let allowed = gpu_set.allowed_of(pool);
            followers.push(Follower { pool, allowed });
        }
        let problem = Problem::new(lead, gpu_set.allowed_of(lead), followers, same_switch, links);
        let Some((chosen, rank)) = search(&problem) else {
            continue;
        };
        // `Problem::rank` knows no partitions, so their part of the rank is added here.
        let (partition, partition_after) = match (&lead.kind, rest) {
            // GPUs alone: no other type has to be near, so the order of preference among partitions decides at once.
            (DeviceType::Gpu, []) => (gpu_set.preference_place, 0),
            // GPUs that follow and need not be a partition: nearness to the leading devices weighs more.
            (DeviceType::Other(_), _) if !only_partitions => (0, gpu_set.preference_place),
            _ => (gpu_set.score_place, gpu_set.preference_place),
        };
        let rank = Rank {
            partition,
            partition_after,
            ..rank
        };
        // The devices of follower types only decide between equal ranks, and take longer to find.
        if let Some((least, ..)) = &best
            && *least < rank
        {
            continue;
        }
        let (followers, ranks): (Vec<CandidateSet>, Vec<FollowerRank>) =
            problem.follow(chosen).into_iter().unzip();
        match &best {
            Some((least, least_followers, _)) if (least, least_followers) <= (&rank, &ranks) => {}
            _ => best = Some((rank, ranks, [chosen].into_iter().chain(followers).collect())),
        }
    }
    best.map(|(.., sets)| sets)
}

/// The sets of GPUs to choose from: partitions, if the request takes GPUs whole and the table or the request demands them; the
/// GPUs of each part of the machine that the scope allows; or both, if partitions are preferred only.
fn gpu_sets(context: &DecisionContext<'_>, pool: &Pool) -> Result<Vec<GpuSet>, Misfit> {
    let scope = context.constraint(&DeviceType::Gpu).scope;
    let scope = scope.unwrap_or(Scope::Machine);
    let mut scopes = sets_within(pool, scope);
    let is_about_places = [Scope::Switch, Scope::Numa].contains(&scope);
    // No candidate has a known location.
    if is_about_places && scopes.is_empty() && !pool.candidates.is_empty() {
        return Err(Misfit::places_unknown(&DeviceType::Gpu, scope));
    }
    let most = scopes.iter().map(|set| set.len()).max().unwrap_or(0);
    // A pool has at most `MAX_MEMBERS` candidates here, so that the machine may seem to have fewer than the request takes.
    let least = if scope == Scope::Machine {
        pool.n_requested.min(MAX_MEMBERS)
    } else {
        pool.n_requested
    };
    scopes.retain(|set| set.len() >= least);
    if scopes.is_empty() {
        return Err(too_few_within(scope, pool, most));
    }
    let (inventory, constraints) = (context.inventory, context.inputs.request.constraints);
    let constraint = constraints.and_then(|constraints| constraints.partition);
    // Partitions consist of whole GPUs; shares of GPUs are chosen as if there were no table.
    let may_need_table = inventory.partitions.is_some() || constraint.is_some();
    if !may_need_table || !takes_whole_gpus(context, pool) {
        return Ok(scopes.into_iter().map(GpuSet::plain).collect());
    }
    let is_binding = constraint.is_some() || inventory.has_binding_partitions();
    let mut sets = match partition_sets(inventory, constraint, context.occupancy.of_type(GPUS), pool) {
        Err(misfit) if is_binding => return Err(misfit),
        sets => sets.unwrap_or_default(),
    };
    sets.retain(|set| scopes.iter().any(|scope| set.allowed.is_within(*scope)));
    // If partitions are only preferred, sets that are no partition will do as well; their rank puts them behind every
    // partition.
    if !is_binding {
        sets.extend(scopes.into_iter().map(GpuSet::plain));
    } else if sets.is_empty() {
        return Err(too_few_within(scope, pool, most));
    }
    Ok(sets)
}

/// The refusal where no part of the machine within a scope has enough GPUs; the most on one part are `most`.
fn too_few_within(scope: Scope, pool: &Pool, most: usize) -> Misfit {
    let (scope, gpus) = (scope.name(), number_of(pool.n_requested, &DeviceType::Gpu));
    let text = format!("no {scope} has {gpus} that may be taken; the most on one {scope} is {most}");
    Misfit::new(Reason::Together, text)
}

/// Sets of candidates, each of those in one part of the machine: a device, a switch, a NUMA node, or all of it.
fn sets_within(pool: &Pool, scope: Scope) -> Vec<CandidateSet> {
    if scope == Scope::Machine {
        return vec![pool.all()];
    }
    // Two devices are never within one device.
    if scope == Scope::Device && pool.n_requested > 1 {
        return Vec::new();
    }
    let mut sets: BTreeMap<usize, CandidateSet> = BTreeMap::new();
    for (at, candidate) in pool.candidates.iter().enumerate() {
        let location = candidate.location;
        // A device of unknown location is within no scope for certain.
        let (is_known, place) = match scope {
            Scope::Machine | Scope::Device => (location.is_reported, at),
            Scope::Switch => (location.knows_switch, location.switch.into()),
            Scope::Numa => (location.knows_numa, location.numa.into()),
        };
        if is_known {
            let set = sets.entry(place).or_default();
            *set = set.with(at);
        }
    }
    sets.into_values().collect()
}

/// The refusal of a joint allocation, by the choice that would be nearest to the rule if types need not share switches; `None` if
/// there is no such choice.
fn nearest_misfit(context: &DecisionContext<'_>, pools: &[&Pool]) -> Option<Misfit> {
    if let Some(pool) = pools.iter().find(|pool| knows_no_switch(pool)) {
        return Some(Misfit::places_unknown(&pool.kind, Scope::Switch));
    }
    let (lead, rest) = pools.split_first()?;
    let mut followers = Vec::with_capacity(rest.len());
    for pool in rest.iter().copied() {
        let allowed = pool.all();
        followers.push(Follower { pool, allowed });
    }
    // Without the rule of the same switch, the nearest choice shows what is missing on its switches.
    let mut problem = Problem::new(lead, lead.all(), followers, false, None);
    // The choice nearest to the other types, however far its leading devices are from one another.
    problem.closeness_first = false;
    let (nearest, _) = search(&problem)?;
    let mut lacking = *rest.first()?;
    let mut switch = None;
    let switches = problem.numas.iter().flat_map(|numa| &numa.switches);
    for used in switches.filter(|switch| switch.is_used(nearest)) {
        if let Some((pool, _)) = rest.iter().zip(&used.n_followers).find(|(_, n)| **n == 0) {
            lacking = pool;
            if let Some(device) = lead.devices(used.lead).first() {
                switch = switch_of(context, &lead.kind, *device);
            }
            break;
        }
    }
    let (lead, lacking) = (number_of(lead.n_requested, &lead.kind), &lacking.kind);
    let text = match switch {
        Some(switch) => format!("{lead} fit, no {lacking} left on switch {switch}"),
        None => format!("{lead} fit, too few {lacking} left on their switches"),
    };
    Some(Misfit::new(Reason::Together, text))
}

/// Returns true if the node reports the switch of no device in the pool.
fn knows_no_switch(pool: &Pool) -> bool {
    let mut candidates = pool.candidates.iter();
    candidates.all(|candidate| !candidate.location.knows_switch)
}

/// The name of the switch of a device, by the index of the device in the inventory; `None` if it is not reported.
fn switch_of(context: &DecisionContext<'_>, kind: &DeviceType, at: usize) -> Option<SwitchId> {
    let devices = context.inventory.devices(context.inventory.type_index(kind)?);
    devices.get(at)?.attributes.location.as_ref()?.switch.clone()
}
