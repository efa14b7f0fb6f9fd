//! `GET explain`: the node of one pod, or the verdicts of the nodes on the pod, the nearest misses first.
//!
//! Every verdict is the filter's own, from the same evaluation.

use std::cmp::Reverse;

use placement::{DeviceFit, Hints, OwnerId, Reason, RequestedGpus};
use proto::read_api::{Explanation, GpuVerdict, NodeVerdict, VERSION};

use crate::accounting::PodFacts;
use crate::index::view::{asked, pods_in_the_way};
use crate::index::{Index, ResourceDemand, Shared};

/// Nodes that are evaluated under one read lock: a watch that waits to write holds up filters, too.
const NODES: usize = 64;
/// Most fitting nodes that are listed, unless the client asks for all.
const MAX_FITTING: usize = 3;
/// Most refusing nodes that are listed, unless the client asks for all.
const MAX_NEAREST: usize = 5;
/// Most refusing nodes for which pods in the way are searched: a search may take thousands of comparisons.
const MAX_SEARCHES: usize = 3;

/// The sum of the parts of a GPU's memory, computing power and slots that the GPU lacks, in thousandths.
type Distance = u64;

/// Explains the pod of this name; `None` if no such pod asks for devices.
pub fn explain(index: &Shared<Index>, namespace: &str, name: &str, all: bool) -> Option<Explanation> {
    let (uid, facts) = find_pod(&index.read(), namespace, name)?;
    let assumed_on = index.read().assumed_node(uid.as_str()).map(str::to_owned);
    let demand = index.read().demand(uid.as_str(), &facts);
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
    match demand {
        Err(rule) => explanation.invalid = Some(rule.to_string()),
        Ok(Some(demand)) if explanation.node.is_none() => add_verdicts(&mut explanation, index, &demand, all),
        Ok(_) => {}
    }
    Some(explanation)
}

/// The pod of this name that asks for devices. While a pod and its successor overlap, as in a `StatefulSet`, the one that waits.
fn find_pod(index: &Index, namespace: &str, name: &str) -> Option<(OwnerId, PodFacts)> {
    let mut found: Option<(&OwnerId, &PodFacts)> = None;
    for (uid, facts) in index.pods_named(namespace, name) {
        if index.requests_devices(facts) && (found.is_none() || facts.bound.is_none()) {
            found = Some((uid, facts));
        }
    }
    found.map(|(uid, facts)| (uid.clone(), facts.clone()))
}

/// Evaluates the pod on every node with devices, and adds the counts, the reasons and the verdicts that are listed.
fn add_verdicts(
    explanation: &mut Explanation,
    index: &Shared<Index>,
    demand: &ResourceDemand<'_>,
    all: bool,
) {
    let mut names = index.read().device_nodes();
    names.sort_unstable();
    let (mut fitting, mut refusing) = (Vec::new(), Vec::new());
    for chunk in names.chunks(NODES) {
        let index = index.read();
        let filter = index.filter();
        let mut batch = filter.batch(demand);
        for name in chunk {
            match filter.evaluate(name, filter.node_id(name), demand, &mut batch) {
                Ok(_) => fitting.push(name),
                // The name after the distance: of equally near nodes the same ones are listed each time.
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
        // One lock for each node, since details are worked out device by device.
        let index = index.read();
        let mut verdict = verdict(&index, name, demand, Some(reason));
        // While a node has room, no pod is in the way.
        if at < MAX_SEARCHES && explanation.fitting == 0 && reason.is_lack_of_room() {
            let node = index.fleet().node_id(name);
            verdict.would_fit_without = node
                .map(|node| pods_in_the_way(&index, node, demand))
                .unwrap_or_default();
        }
        explanation.verdicts.push(verdict);
    }
}

/// The verdict of one node, with its GPUs in the order in which they come near.
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

/// The fit of each GPU of a node, hints of other pods counted; none if the pod asks for no GPU.
fn device_fits<'a>(index: &'a Index, name: &str, demand: &ResourceDemand<'_>) -> Vec<DeviceFit<'a>> {
    let fleet = index.fleet();
    let fits = fleet.node_id(name).and_then(|node| {
        fleet
            .explain(node, demand.gpus, Hints::RespectOthers(demand.uid))
            .ok()
    });
    fits.unwrap_or_default()
}

/// The distance of a node from fitting. Nodes that only lack room come before nodes that break a rule. Then the GPUs count that
/// lack least, as many as the request needs: the distance is the lack of the last of them.
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
    // A node with too few GPUs is farthest.
    let last = usize::try_from(n_gpus).unwrap_or(usize::MAX).saturating_sub(1);
    let distance = lacks.get(last).copied().unwrap_or(Distance::MAX);
    // True sorts first: a node that only lacks room comes nearer than one that breaks a rule.
    (Reverse(reason.is_lack_of_room()), distance)
}

/// The sum of the parts of its memory, computing power and slots that a GPU lacks; 0 if the GPU fits.
fn lack(fit: &DeviceFit<'_>) -> Distance {
    if fit.fit.is_ok() {
        return 0;
    }
    // A share of the total makes bytes, percent and slots comparable.
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
