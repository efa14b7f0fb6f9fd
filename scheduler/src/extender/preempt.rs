//! `preempt`: the pods to evict so that a pod fits, on each node on which kube-scheduler would evict some.
//!
//! kube-scheduler proposes victims by the sum of a resource over all devices of a node. `preempt` names instead the pods that
//! hold those devices which can be given to the pod, drops nodes on which no eviction helps, and names no victims for a pod
//! whose earlier victims have not ended. It changes nothing but the memory of its answers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use placement::OwnerId;
use proto::extender::{ExtenderPreemptionArgs, ExtenderPreemptionResult, MetaVictims, depends_on_other_pods};
use proto::pod::Pod;

use super::evaluation::Demand;
use super::pod_memory::PodMemory;
use super::{Extender, RequestError, json, now};
use crate::accounting::PodFacts;
use crate::index::{Index, Preemptor, Promised, ResourceDemand, room_facts};
use crate::make_room::Hold;

/// The time after which no further nodes are searched if there is a candidate: kube-scheduler waits for the answer, and further
/// candidates only give it a choice.
const SEARCH_LIMIT: Duration = Duration::from_secs(1);

/// The time within which a watch shows the deletion of the victims on the pod's nominated node. If it does not, they were not
/// evicted.
const DELETED_WITHIN: Duration = Duration::from_secs(30);

/// The same time while the pod is nominated to none of the nodes that the answer named. It is shorter, since kube-scheduler
/// may be evicting the victims on any of them or on none.
const DELETED_WITHIN_WITHOUT_NOMINATION: Duration = Duration::from_secs(10);

/// Texts for the nominated node of a pod whose victims have not ended, in turn.
const VICTIMS_NOT_ENDED: [&str; 2] = [
    "pods that were evicted for the pod have not ended on its nominated node",
    "pods that were evicted for the pod still have not ended on its nominated node",
];

/// The victims in the last answer for a pod.
#[derive(Debug)]
pub(super) struct NamedVictims {
    at: Instant,
    by_node: BTreeMap<Box<str>, Box<[OwnerId]>>,
    /// True if the leader evicts these pods by itself, and no answer has named them.
    is_for_room: bool,
    /// The number of times `filter` has refused the pod its nominated node because these victims had not ended.
    n_refusals: u32,
}

impl NamedVictims {
    /// Returns true if kube-scheduler may be evicting the victims on a node. It evicts on one of the named nodes, and shows which
    /// by the nomination of the pod a moment later.
    fn may_be_evicted_on(&self, index: &Index, (uid, node): (&str, &str), now: Instant) -> bool {
        let is_recent = now.saturating_duration_since(self.at) < DELETED_WITHIN_WITHOUT_NOMINATION;
        let nominated = index.nominated_node(uid);
        nominated.map_or(is_recent, |nominated| nominated == node)
    }

    /// Returns true if victims that kube-scheduler may have evicted have not ended, as far as the watch shows. `nominated` is the
    /// pod's nominated node.
    fn are_awaited(&self, index: &Index, nominated: Option<&str>, now: Instant) -> bool {
        let on_nominated = nominated.and_then(|node| self.by_node.get(node));
        let limit = match on_nominated {
            Some(_) => DELETED_WITHIN,
            None => DELETED_WITHIN_WITHOUT_NOMINATION,
        };
        // The leader knows which pods it evicts.
        let is_recent = !self.is_for_room && now.saturating_duration_since(self.at) < limit;
        // Without a nomination kube-scheduler may have chosen any of the nodes.
        let victims: Vec<&OwnerId> = match on_nominated {
            Some(victims) => victims.iter().collect(),
            None => self.by_node.values().flatten().collect(),
        };
        // As long as no watch shows the deletion of a victim, it may still come, or kube-scheduler has evicted others.
        let victims = victims.iter();
        let mut leaving = victims.filter_map(|victim| index.is_victim_leaving(victim.as_str()));
        leaving.any(|is_leaving| is_leaving || is_recent)
    }
}

pub(super) fn answer(extender: &Extender, body: &[u8]) -> Result<Vec<u8>, RequestError> {
    let malformed = |error: serde_json::Error| RequestError::malformed("preempt", &error);
    let args: ExtenderPreemptionArgs = serde_json::from_slice(body).map_err(malformed)?;
    // kube-scheduler sends either whole pods or their UIDs, by nodeCacheCapable.
    let (pod, mut proposals) = args.into_proposals();
    // Host ports, volumes and the like: victims may be in the way of the pod by more than amounts. Only this verb needs to know.
    let depends_on_other_pods = depends_on_other_pods(body, &pod).map_err(malformed)?;
    let demand = {
        let index = extender.index.read();
        index.ready().map_err(RequestError::NotReady)?;
        let facts = PodFacts::of(&pod, index.names());
        Demand::of(&index, &pod, facts.as_ref())
    };
    let node_name_to_meta_victims = match &demand {
        Demand::Resources(resources) if resources.has_devices() => {
            // The filter refused the pod for the rule on every node, so that no eviction would help it.
            if extender.rules.refusal_of_filter(&pod).is_some() {
                BTreeMap::new()
            } else {
                find_candidates(extender, &pod, resources, depends_on_other_pods, proposals)
            }
        }
        // The pod asks for no devices that this scheduler counts, so that kube-scheduler's proposals stand.
        Demand::Nothing | Demand::Resources(_) => {
            // kube-scheduler takes an answer without victims for an error of the extender.
            proposals.retain(|_, victims| !victims.pods.is_empty());
            proposals
        }
        // `Demand::of` makes neither `GangPaused` nor `AssumedOn`; a rejected pod fits nowhere.
        Demand::Rejected(_) | Demand::GangPaused | Demand::AssumedOn(_) => BTreeMap::new(),
    };
    let n_candidates = node_name_to_meta_victims.len();
    tracing::info!(pod = pod.display_name(), n_candidates, "victims named");
    Ok(json(&ExtenderPreemptionResult {
        node_name_to_meta_victims,
    }))
}

/// The victims on each node on which evictions help the pod.
fn find_candidates(
    extender: &Extender,
    pod: &Pod,
    resources: &ResourceDemand<'_>,
    depends_on_other_pods: bool,
    proposals: BTreeMap<String, MetaVictims>,
) -> BTreeMap<String, MetaVictims> {
    let began = now();
    // kube-scheduler may ask again before a watch shows that the earlier victims have ended. Further victims would be evicted in
    // vain.
    let is_waiting = {
        let index = extender.index.read();
        let mut memory = extender.memory();
        // A replica that has just begun to lead takes over the rooms of its predecessor a moment later.
        let is_nominee = extender.evicts_for_room == Some(true) && room_facts::is_nominee(&index, pod.uid());
        let is_being_made = is_nominee || memory.rooms.held.contains_key(pod.uid());
        let named = memory.victims.get_mut(pod.uid());
        is_being_made || named.is_some_and(|named| named.are_awaited(&index, pod.nominated_node(), began))
    };
    if is_waiting {
        extender.metrics.count_candidates("waiting", proposals.len());
        return BTreeMap::new();
    }
    let promised = promised_to_others(extender, pod.uid(), began);
    let preemptor = Preemptor::new(pod, resources, depends_on_other_pods, &promised);
    let mut candidates = BTreeMap::new();
    for (node, proposed) in proposals {
        if !candidates.is_empty() && now().saturating_duration_since(began) > SEARCH_LIMIT {
            break;
        }
        // One node at a time under the lock: the search on a node may take milliseconds.
        let victims = preemptor.victims_on(extender.index.read().filter(), &node, &proposed);
        let outcome = match &victims {
            None => "dropped",
            Some(victims) if victims.are_same_pods(&proposed) => "kept",
            Some(_) => "replaced",
        };
        extender.metrics.count_candidates(outcome, 1);
        if let Some(victims) = victims {
            candidates.insert(node, victims);
        }
    }
    if !remember_victims(extender, pod.uid(), &candidates, began) {
        return BTreeMap::new();
    }
    candidates
}

/// Remembers the victims that the answer names on each node, so that later requests know that the pod may be waiting for their
/// end. Returns false if the leader has begun to make room for the pod meanwhile, or to evict one of the victims for another pod,
/// so that no victims may be named.
fn remember_victims(
    extender: &Extender,
    uid: &str,
    candidates: &BTreeMap<String, MetaVictims>,
    now: Instant,
) -> bool {
    // Without a candidate nothing is evicted, and the victims of an earlier answer may still be under way.
    if candidates.is_empty() || uid.is_empty() {
        return true;
    }
    let index = extender.index.read();
    let mut by_node = BTreeMap::new();
    for (node, victims) in candidates {
        let owners = victims.pods.iter().map(|pod| index.owner(&pod.uid)).collect();
        by_node.insert(node.as_str().into(), owners);
    }
    let named = NamedVictims {
        at: now,
        by_node,
        is_for_room: false,
        n_refusals: 0,
    };
    // Under one lock: kube-scheduler and the leader must not both evict pods for this pod, nor each evict one pod for another.
    let mut memory = extender.memory();
    let mut is_promised = false;
    for (node, freeing) in memory.rooms.of_others(uid) {
        let mut victims = named.by_node.get(node).into_iter().flatten();
        is_promised |= victims.any(|victim| freeing.contains(victim));
    }
    let may_be_named = !is_promised && !memory.rooms.held.contains_key(uid);
    if may_be_named {
        memory.victims.insert(uid, named);
    }
    may_be_named
}

/// Keeps a [`Hold`] in memory: the leader makes room for its pod. Returns false if kube-scheduler may be evicting pods for it.
pub(crate) fn begin_hold(extender: &Extender, hold: Hold, now: Instant) -> bool {
    let uid = hold.pod.uid.clone();
    let named = NamedVictims {
        at: now,
        by_node: BTreeMap::from([(hold.node.clone(), hold.freeing.as_slice().into())]),
        is_for_room: true,
        n_refusals: 0,
    };
    let index = extender.index.read();
    let mut memory = extender.memory();
    if let Some(earlier) = memory.victims.get_mut(&uid)
        && !earlier.is_for_room
        && earlier.are_awaited(&index, None, now)
    {
        return false;
    }
    memory.victims.insert(&uid, named);
    memory.rooms.held.insert(uid.into(), hold);
    true
}

/// Removes the [`Hold`] of a pod from memory.
pub(crate) fn end_hold(extender: &Extender, uid: &str) {
    let mut memory = extender.memory();
    memory.rooms.held.remove(uid);
    memory.victims.remove(uid);
}

/// Returns true if kube-scheduler evicts pods on the node of a hold for a more important pod. It removes the nominations of less
/// important pods to that node then.
pub(crate) fn is_outranked(memory: &PodMemory, index: &Index, hold: &Hold, now: Instant) -> bool {
    let priority = |uid: &str| index.rules_of(uid).map(|rules| rules.priority);
    let own = priority(&hold.pod.uid);
    for (other, named) in memory.victims.iter() {
        let is_rival = !named.is_for_room && named.by_node.contains_key(&hold.node);
        if is_rival && named.may_be_evicted_on(index, (other, &hold.node), now) && priority(other) > own {
            return true;
        }
    }
    false
}

/// By node, the pods that are evicted for other pods than `uid`, to which their room is promised.
pub(crate) fn promised_to_others(extender: &Extender, uid: &str, now: Instant) -> Promised {
    let mut promised = Promised::new();
    let index = extender.index.read();
    let memory = extender.memory();
    for (node, freeing) in memory.rooms.of_others(uid) {
        let promised = promised.entry(node.into()).or_default();
        promised.extend(freeing.iter().cloned());
    }
    for (other, named) in memory.victims.iter() {
        // The victims of a pod that is bound, or about to be, have served their purpose.
        if other == uid || !index.is_pending(other) {
            continue;
        }
        for (node, victims) in &named.by_node {
            if named.may_be_evicted_on(&index, (other, node), now) {
                let promised = promised.entry(node.clone()).or_default();
                promised.extend(victims.iter().cloned());
            }
        }
    }
    promised
}

/// The text by which `filter` refuses a pod its nominated node while victims there have not ended. The node stays resolvable, so
/// that kube-scheduler evicts no further pods.
///
/// The text alternates: kube-scheduler may have seen the victims end already, and then it tries the pod again only because the
/// pod's condition changes, which it writes only if the text differs from the last one.
pub(super) fn awaited_victims_text(
    extender: &Extender,
    index: &Index,
    pod: &Pod,
    node: &str,
    now: Instant,
) -> Option<&'static str> {
    let [first, second] = VICTIMS_NOT_ENDED;
    let mut memory = extender.memory();
    let hold = memory.rooms.held.get(pod.uid());
    let is_being_made = hold.is_some_and(|hold| *hold.node == *node);
    if let Some(named) = memory.victims.get_mut(pod.uid())
        && (is_being_made || named.are_awaited(index, Some(node), now))
    {
        named.n_refusals = named.n_refusals.wrapping_add(1);
        return Some(if named.n_refusals % 2 == 1 { first } else { second });
    }
    // A replica that became the leader has no memory of the answers, and goes by the deletions on the node.
    room_facts::has_leaving(index, node, pod.priority()).then_some(first)
}
