//! The verdicts of all nodes on one pod, ordered by how near the nodes come, and the largest amounts that nodes offer.

use std::collections::{BTreeMap, BTreeSet};

use placement::{DeviceFit, NodeView};
use proto::read_api::PodName;

use super::device_fits;
use crate::index::{Index, ResourceDemand, Shared};
use crate::kube_scheduler::{self, NodeRefusal, Shortage};
use crate::verdict::{Asker, NominatedRequests, Refusal, evaluate, fits_on_empty, pods_in_the_way, words};

/// Nodes that are evaluated under one read lock: a watch that waits to write holds up filters, too.
const NODES_PER_LOCK: usize = 64;

/// The distance of a node, or a GPU, from fitting: the part of its total that it lacks, in thousandths, summed over resources.
pub(super) type Distance = u64;

#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Names of the nodes that take the pod, sorted.
    pub(super) fitting: Vec<Box<str>>,
    /// The nodes that refuse it, the nearest first.
    pub(super) refused: Vec<Refused>,
    /// The amounts that nodes offer of each resource that the pod requests, in the order of the resources' names.
    pub(super) offers: Vec<Offer>,
    /// The number of nodes by the value of each label by which the pod chooses its nodes.
    pub(super) labels: BTreeMap<Box<str>, BTreeMap<Box<str>, usize>>,
    pub(super) largest: LargestGpus,
    pub(super) largest_usable: LargestGpus,
    /// True if some node would take the pod once all pods on it have ended; `None` if that was not tried.
    pub(super) is_helped_by_ends: Option<bool>,
    /// Counted as taken on the nodes that other pods are nominated to.
    nominated: NominatedRequests,
}

#[derive(Debug)]
pub(super) struct Refused {
    kind: Nearness,
    distance: Distance,
    pub(super) name: Box<str>,
    pub(super) refusal: Refusal,
    /// The texts under which the explanation counts the refusal.
    pub(super) reasons: Vec<String>,
    /// All refusals by kube-scheduler that free resources would not end.
    pub(super) obstacles: Vec<NodeRefusal>,
    /// The amounts of the node by which it refuses the pod; only where pods in the way were searched.
    pub(super) detail: Option<String>,
    /// A smallest set of pods by whose end the node takes the pod; empty if none was found or searched.
    pub(super) would_fit_without: Vec<PodName>,
    /// True if the node would take the pod once all pods on it have ended; `None` if that was not tried.
    pub(super) fits_when_empty: Option<bool>,
}

/// The kinds of refusals, the nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Nearness {
    /// The node lacks room, which the end of pods may make.
    LacksRoom,
    /// The node would refuse the pod even without other pods, by its devices, its size or the pod's request.
    BreaksRule,
    /// kube-scheduler does not let the pod go to the node, by a taint, affinity or another rule.
    NotAllowed,
    /// The node has no devices.
    WithoutDevices,
}

#[derive(Debug, Default)]
pub(super) struct Offer {
    pub(super) resource: Box<str>,
    pub(super) asked: u64,
    /// The largest allocatable amount of a node, with the node's name.
    pub(super) most: Option<(u64, Box<str>)>,
    pub(super) most_usable: Option<(u64, Box<str>)>,
    /// The nodes that offer as much as the pod requests, whether or not the pod may use them.
    nodes_with_enough: BTreeSet<Box<str>>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LargestGpus {
    pub(super) n_healthy: usize,
    /// The memory of the largest GPU in bytes, healthy or not.
    pub(super) memory: u64,
}

impl Survey {
    pub(super) fn of(index: &Shared<Index>, uid: &str, asker: Asker<'_>) -> Self {
        let mut survey = Self::default();
        let mut names = {
            let index = index.read();
            survey.nominated = index.nominated_requests(uid, asker.rules.priority);
            index.node_names()
        };
        names.sort_unstable();
        for (resource, asked) in &asker.rules.requests {
            survey.offers.push(Offer {
                resource: resource.clone(),
                asked: *asked,
                ..Offer::default()
            });
        }
        for key in asker.rules.label_keys() {
            survey.labels.insert(key.into(), BTreeMap::new());
        }
        for chunk in names.chunks(NODES_PER_LOCK) {
            let index = index.read();
            let mut batch = asker.demand.ok().map(|demand| index.filter().batch(demand));
            for name in chunk {
                // The node was deleted since the names were read.
                if index.node_facts(name).is_none() {
                    continue;
                }
                let verdict = evaluate(&index, name, asker, &survey.nominated, batch.as_mut());
                survey.note_offers(&index, name, verdict.as_ref().err());
                survey.note_labels(&index, name);
                match verdict {
                    Ok(_) => survey.fitting.push(name.clone()),
                    Err(refusal) => survey.refused.push(Refused::of(&index, name, refusal, asker)),
                }
            }
        }
        // The sort is stable and the names are sorted, so that of equally near nodes the same ones are listed each time.
        survey.refused.sort_by_key(|node| (node.kind, node.distance));
        survey
    }

    /// Notes the amounts that a node offers of the requested resources, and the size of its GPUs. `refusal` is `None` if it fits.
    fn note_offers(&mut self, index: &Index, name: &str, refusal: Option<&Refusal>) {
        let Some(node) = index.node_facts(name) else {
            return;
        };
        let is_usable = match refusal {
            Some(Refusal::KubeScheduler(refusal)) => matches!(refusal, NodeRefusal::Insufficient(_)),
            None | Some(Refusal::Devices(_) | Refusal::Request) => true,
        };
        for offer in &mut self.offers {
            let amount = node.allocatable(&offer.resource);
            if amount >= offer.asked {
                offer.nodes_with_enough.insert(name.into());
            }
            if amount > 0 {
                keep_larger(&mut offer.most, amount, name);
                if is_usable {
                    keep_larger(&mut offer.most_usable, amount, name);
                }
            }
        }
        let mut on_node = LargestGpus::default();
        let view = index.fleet().node_id(name).and_then(|id| index.fleet().view(id));
        let inventory = view.and_then(NodeView::inventory);
        for gpu in inventory.into_iter().flat_map(|inventory| &inventory.gpus) {
            on_node.memory = on_node.memory.max(gpu.memory_bytes);
            on_node.n_healthy += usize::from(gpu.healthy);
        }
        self.largest.raise_to(on_node);
        if is_usable {
            self.largest_usable.raise_to(on_node);
        }
    }

    fn note_labels(&mut self, index: &Index, name: &str) {
        for (key, values) in &mut self.labels {
            if let Some(value) = index.node_facts(name).and_then(|node| node.label(key)) {
                *values.entry(value.into()).or_default() += 1;
            }
        }
    }

    /// If no node takes the pod, searches the pods by whose end the `most` nearest nodes that lack room would take it.
    pub(super) fn search_ends(&mut self, index: &Shared<Index>, asker: Asker<'_>, most: usize) {
        let Ok(demand) = asker.demand else { return };
        if !self.fitting.is_empty() {
            return;
        }
        let mut n_found = 0;
        for (idx, refused) in self.refused.iter_mut().enumerate() {
            let lacks_room = refused.kind == Nearness::LacksRoom;
            // The first node, which is the nearest, gets its detail whatever it lacks.
            if n_found == most || (idx > 0 && !lacks_room) {
                break;
            }
            let index = index.read();
            let Some(node) = index.fleet().node_id(&refused.name) else {
                continue;
            };
            let fits = device_fits(&index, &refused.name, demand);
            refused.detail = words::detail(&index, &refused.name, &refused.refusal, asker, &fits);
            if !lacks_room {
                break;
            }
            if refused.detail.is_none() {
                refused.detail = words::nearest_gpu(&fits, demand.n_gpus());
            }
            let fits_when_empty = fits_on_empty(&index, node, &refused.name, asker.rules, demand);
            refused.fits_when_empty = Some(fits_when_empty);
            if fits_when_empty {
                n_found += 1;
                refused.would_fit_without =
                    pods_in_the_way(&index, node, asker.rules, demand, &self.nominated);
            }
        }
        self.is_helped_by_ends = Some(n_found > 0);
    }

    /// Removes the names of pods in namespaces that the client does not see; the number of pods stays.
    pub(super) fn hide_names(&mut self, sees: impl Fn(&str) -> bool) {
        for refused in &mut self.refused {
            for pod in &mut refused.would_fit_without {
                if !sees(&pod.namespace) {
                    *pod = PodName::default();
                }
            }
        }
    }
}

impl LargestGpus {
    fn raise_to(&mut self, other: Self) {
        self.n_healthy = self.n_healthy.max(other.n_healthy);
        self.memory = self.memory.max(other.memory);
    }
}

fn keep_larger(largest: &mut Option<(u64, Box<str>)>, amount: u64, name: &str) {
    if largest.as_ref().is_none_or(|(known, _)| amount > *known) {
        *largest = Some((amount, name.into()));
    }
}

impl Refused {
    pub(super) fn offers(&self, offer: &Offer) -> bool {
        offer.nodes_with_enough.contains(&self.name)
    }

    /// A node that refuses the pod, with its place in the order of such nodes.
    fn of(index: &Index, name: &str, refusal: Refusal, asker: Asker<'_>) -> Self {
        let has_devices = index.fleet().node_id(name).is_some();
        let kind = match &refusal {
            _ if !has_devices => Nearness::WithoutDevices,
            refusal if refusal.is_lack_of_room() => Nearness::LacksRoom,
            Refusal::KubeScheduler(NodeRefusal::Insufficient(_)) | Refusal::Devices(_) | Refusal::Request => {
                Nearness::BreaksRule
            }
            Refusal::KubeScheduler(_) => Nearness::NotAllowed,
        };
        let lack_of_allocatable = match &refusal {
            Refusal::KubeScheduler(NodeRefusal::Insufficient(shortages)) => {
                shortages.iter().map(part_lacking).max().unwrap_or(0)
            }
            _ => 0,
        };
        let obstacles = match (&refusal, index.node_facts(name)) {
            (Refusal::KubeScheduler(_), Some(node)) => kube_scheduler::obstacles(asker.rules, node),
            _ => Vec::new(),
        };
        let lack_of_gpus = asker.demand.map_or(0, |demand| gpu_distance(index, name, demand));
        Self {
            kind,
            distance: lack_of_gpus.saturating_add(lack_of_allocatable),
            name: name.into(),
            reasons: words::reasons(index, name, &refusal, asker),
            refusal,
            obstacles,
            detail: None,
            would_fit_without: Vec::new(),
            fits_when_empty: None,
        }
    }
}

/// The part of a node's allocatable amount that has to become free, in thousandths.
fn part_lacking(shortage: &Shortage) -> Distance {
    // `missing` counts the free amount already.
    part(shortage.missing(), 0, shortage.allocatable)
}

/// The distance of a node's GPUs from fitting: the GPUs count that lack least, as many as the request needs, and the distance is
/// the lack of the last of them.
fn gpu_distance(index: &Index, name: &str, demand: &ResourceDemand<'_>) -> Distance {
    let Some(n_gpus) = demand.gpus.n_gpus() else {
        return 0;
    };
    let last = usize::try_from(n_gpus).unwrap_or(usize::MAX).saturating_sub(1);
    // A node with too few GPUs is farthest.
    device_fits(index, name, demand)
        .get(last)
        .map_or(Distance::MAX, lack)
}

/// The sum of the parts of its memory, computing power and slots that a GPU lacks; 0 if the GPU fits.
pub(super) fn lack(fit: &DeviceFit<'_>) -> Distance {
    if fit.fit.is_ok() {
        return 0;
    }
    let (need, free, total) = (&fit.need, &fit.free, &fit.total);
    let [needed, free_memory, memory] = [need, free, total].map(|amounts| amounts.memory.hundredths());
    let memory = part(needed, free_memory, memory);
    let core = part(need.core.into(), free.core.into(), total.core.into());
    let slots = part(need.slots.into(), free.slots.into(), total.slots.into());
    // A GPU that lacks nothing measurable is refused for a rule, or lacks less than a thousandth.
    (memory + core + slots).max(1)
}

/// The missing part of a total in thousandths: that makes bytes, percent and slots comparable.
fn part(needed: u64, free: u64, total: u64) -> Distance {
    let missing = u128::from(needed.saturating_sub(free)) * 1000;
    let part = missing.checked_div(u128::from(total)).unwrap_or(0);
    u64::try_from(part).unwrap_or(1000)
}
