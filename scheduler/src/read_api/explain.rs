//! The explanation of one pod: its place, or the verdicts of the nodes, the nearest misses first.
//!
//! Every verdict is the filter's own, from the same evaluation.

use std::cmp::Reverse;

use placement::{DeviceFit, Hints, OwnerId, Reason, RequestedGpus};
use proto::read_api::{Explanation, GpuVerdict, NodeVerdict, VERSION};

use crate::accounting::PodFacts;
use crate::index::{Index, ResourceDemand, Shared, asked};

/// Nodes that are evaluated under one lock.
const NODES: usize = 64;
/// The most fitting nodes that are listed, unless all are asked for.
const MAX_FITTING: usize = 3;
/// The most refusing nodes that are listed, unless all are asked for.
const MAX_NEAREST: usize = 5;
/// The most refusing nodes for which pods in the way are searched: a search may take thousands of comparisons.
const MAX_SEARCHES: usize = 3;

/// The distance of a node from fitting, in thousandths of the GPUs that lack something; nodes that cannot be measured come last.
type Distance = u64;

/// Explains the pod of this name; `None` if no such pod asks for devices.
pub fn explain(index: &Shared<Index>, namespace: &str, name: &str, all: bool) -> Option<Explanation> {
    let (uid, facts) = find(&index.read(), namespace, name)?;
    let (assumed_on, request) = {
        let index = index.read();
        let node = index.assumed_node(uid.as_str()).map(str::to_owned);
        (node, index.demand(uid.as_str(), &facts))
    };
    let bound = facts.bound.as_ref().map(|bound| bound.node.to_string());
    let mut explanation = Explanation {
        api_version: VERSION.to_owned(),
        namespace: facts.namespace.to_string(),
        name: facts.name.to_string(),
        uid: uid.to_string(),
        asked: asked(&facts.request),
        assumed: bound.is_none() && assumed_on.is_some(),
        node: bound.or(assumed_on),
        ..Explanation::default()
    };
    match request {
        Err(rule) => explanation.invalid = Some(rule.to_string()),
        Ok(Some(demand)) if explanation.node.is_none() => add_verdicts(&mut explanation, index, &demand, all),
        Ok(_) => {}
    }
    Some(explanation)
}

/// The pod of a name; while a pod and its successor overlap, the one that waits.
fn find(index: &Index, namespace: &str, name: &str) -> Option<(OwnerId, PodFacts)> {
    let mut found: Option<(&OwnerId, &PodFacts)> = None;
    for (uid, facts) in index.pods_named(namespace, name) {
        if index.concerns(facts) && (found.is_none() || facts.bound.is_none()) {
            found = Some((uid, facts));
        }
    }
    found.map(|(uid, facts)| (uid.clone(), facts.clone()))
}

fn add_verdicts(
    explanation: &mut Explanation,
    index: &Shared<Index>,
    demand: &ResourceDemand<'_>,
    all: bool,
) {
    let mut names = index.read().device_nodes();
    // Of equally near nodes the same ones are listed each time.
    names.sort_unstable();
    let (mut fitting, mut refusing) = (Vec::new(), Vec::new());
    for chunk in names.chunks(NODES) {
        let index = index.read();
        let mut batch = index.filter().batch(demand);
        for name in chunk {
            match index.filter().evaluate(name, demand, &mut batch) {
                Ok(_) => fitting.push(name),
                Err(reason) => refusing.push((distance(&index, name, demand, reason), name, reason)),
            }
        }
    }
    explanation.nodes = u32::try_from(names.len()).unwrap_or(u32::MAX);
    explanation.fitting = u32::try_from(fitting.len()).unwrap_or(u32::MAX);
    for (_, _, reason) in &refusing {
        *explanation.reasons.entry(reason.as_str().to_owned()).or_default() += 1;
    }
    refusing.sort();
    let n_fitting = if all { fitting.len() } else { MAX_FITTING };
    for name in fitting.into_iter().take(n_fitting) {
        explanation
            .verdicts
            .push(verdict(&index.read(), name, demand, None));
    }
    let n_refusing = if all { refusing.len() } else { MAX_NEAREST };
    for (at, (_, name, reason)) in refusing.into_iter().take(n_refusing).enumerate() {
        // One lock for each node: details are worked out device by device.
        let index = index.read();
        let mut verdict = verdict(&index, name, demand, Some(reason));
        if at < MAX_SEARCHES && explanation.fitting == 0 && reason.is_lack_of_room() {
            let node = index.fleet().node_id(name);
            verdict.would_fit_without = node
                .map(|node| index.pods_in_the_way(node, demand))
                .unwrap_or_default();
        }
        explanation.verdicts.push(verdict);
    }
}

fn verdict(index: &Index, name: &str, demand: &ResourceDemand<'_>, refusal: Option<Reason>) -> NodeVerdict {
    let mut fits = device_fits(index, name, demand);
    fits.sort_by_key(|fit| (lack(fit), fit.gpu.minor));
    let mut gpus = Vec::with_capacity(fits.len());
    for fit in &fits {
        gpus.push(GpuVerdict {
            minor: fit.gpu.minor,
            fits: fit.fit.is_ok(),
            reason: fit.fit.err().map_or("", Reason::as_str).to_owned(),
            needed: fit.need.memory.bytes_ceil(),
            free: fit.free.memory.bytes_floor(),
            needed_core: fit.need.core,
            free_core: fit.free.core,
            no_sharer: fit.need.slots > fit.free.slots,
        });
    }
    NodeVerdict {
        node: name.to_owned(),
        fits: refusal.is_none(),
        reason: refusal.map_or("", Reason::as_str).to_owned(),
        detail: refusal.and_then(|reason| index.filter().detail(name, demand, reason)),
        would_fit_without: Vec::new(),
        gpus,
    }
}

fn device_fits<'a>(index: &'a Index, name: &str, demand: &ResourceDemand<'_>) -> Vec<DeviceFit<'a>> {
    let fleet = index.fleet();
    let fits = fleet.node_id(name).and_then(|node| {
        fleet
            .explain(node, demand.gpus, Hints::RespectOthers(demand.uid))
            .ok()
    });
    fits.unwrap_or_default()
}

/// The distance of a node: that of the last of the GPUs that the request needs, nearest first.
fn distance(
    index: &Index,
    name: &str,
    demand: &ResourceDemand<'_>,
    reason: Reason,
) -> (Reverse<bool>, Distance) {
    let n_gpus = match demand.gpus {
        RequestedGpus::Share(share) => share.devices,
        RequestedGpus::Whole(n) => n,
        RequestedGpus::All { .. } | RequestedGpus::Nothing => 0,
    };
    let mut lacks: Vec<Distance> = device_fits(index, name, demand).iter().map(lack).collect();
    lacks.sort_unstable();
    let last = usize::try_from(n_gpus).unwrap_or(usize::MAX).saturating_sub(1);
    let distance = lacks.get(last).copied().unwrap_or(Distance::MAX);
    (Reverse(reason.is_lack_of_room()), distance)
}

/// The sum of the parts that a GPU lacks, in thousandths.
fn lack(fit: &DeviceFit<'_>) -> Distance {
    if fit.fit.is_ok() {
        return 0;
    }
    let part = |needed: u64, free: u64, total: u64| match total {
        0 => 0,
        total => {
            u64::try_from(u128::from(needed.saturating_sub(free)) * 1000 / u128::from(total)).unwrap_or(1000)
        }
    };
    let memory = part(
        fit.need.memory.hundredths(),
        fit.free.memory.hundredths(),
        fit.total.memory.hundredths(),
    );
    let core = part(fit.need.core.into(), fit.free.core.into(), fit.total.core.into());
    // A GPU that lacks nothing measurable is refused for a rule, or lacks less than a thousandth.
    let slots = part(
        fit.need.slots.into(),
        fit.free.slots.into(),
        fit.total.slots.into(),
    );
    (memory + core + slots).max(1)
}
