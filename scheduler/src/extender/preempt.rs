//! `preempt`: which pods must go so that a pod fits, on each node on which kube-scheduler would evict some.
//!
//! kube-scheduler proposes victims by the sums of a node. Here they are replaced by holders of the devices that the pod can
//! be given, a node that they cannot help is dropped, and nothing is offered to a pod whose earlier victims have not ended.
//! Changes nothing but what is remembered of the answer.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use placement::OwnerId;
use proto::extender::{ExtenderPreemptionArgs, ExtenderPreemptionResult, MetaVictims, depends_on_other_pods};
use proto::pod::Pod;

use super::evaluation::Demand;
use super::{Extender, RequestFailure};
use crate::accounting::PodFacts;
use crate::index::{Index, Preemptor, Promised};
use crate::metrics::Candidate;

/// The time for which an answer looks for more victims once it has some: kube-scheduler waits, and more nodes are a choice.
const SEARCH: Duration = Duration::from_secs(1);

/// The time within which the watch shows that victims of a nominated pod are being deleted. Later they were not evicted.
const SHOWN_WITHIN: Duration = Duration::from_secs(30);

/// The same where kube-scheduler has not nominated a node, or has withdrawn it: it may have evicted none of them.
const SHOWN_WITHIN_WITHOUT_NOMINATION: Duration = Duration::from_secs(10);

/// The victims that the last answer named for a pod.
#[derive(Debug)]
pub(super) struct Offered {
    at: Instant,
    by_node: BTreeMap<Box<str>, Box<[OwnerId]>>,
    /// The number of times the pod was refused its nominated node since, as the watch had not shown the victims' end.
    n_waits: u32,
}

impl Offered {
    /// Returns true if victims that kube-scheduler may have evicted have not ended, as far as the watch shows.
    fn is_awaited(&self, index: &Index, nominated: Option<&str>, now: Instant) -> bool {
        let on_nominated = nominated.and_then(|node| self.by_node.get(node));
        let limit = if on_nominated.is_some() {
            SHOWN_WITHIN
        } else {
            SHOWN_WITHIN_WITHOUT_NOMINATION
        };
        let is_recent = now.saturating_duration_since(self.at) < limit;
        let is_awaited = |victim: &OwnerId| {
            index
                .awaited(victim.as_str())
                .is_some_and(|is_leaving| is_leaving || is_recent)
        };
        match on_nominated {
            Some(victims) => victims.iter().any(is_awaited),
            None => self
                .by_node
                .values()
                .any(|victims| victims.iter().any(is_awaited)),
        }
    }
}

/// Request bytes in, answer bytes out.
///
/// # Errors
/// If the bytes are no preempt request, or the state is not complete.
pub(super) fn answer(extender: &Extender, body: &[u8], now: Instant) -> Result<Vec<u8>, RequestFailure> {
    let malformed = |error: serde_json::Error| RequestFailure::malformed("preempt", &error.to_string());
    let (pod, proposals) = serde_json::from_slice::<ExtenderPreemptionArgs>(body)
        .map_err(malformed)?
        .into_proposals();
    let depends_on_other_pods = depends_on_other_pods(body, &pod).map_err(malformed)?;
    extender
        .index
        .read()
        .ready()
        .map_err(|reason| RequestFailure::NotReady { reason })?;
    let candidates = extender.candidates(&pod, body, depends_on_other_pods, proposals, now);
    tracing::info!(
        pod = pod.display_name(),
        n_candidates = candidates.len(),
        "victims named"
    );
    serde_json::to_vec(&ExtenderPreemptionResult {
        node_name_to_meta_victims: candidates,
    })
    .map_err(malformed)
}

impl Extender {
    /// The victims of each node that stays a candidate.
    fn candidates(
        &self,
        pod: &Pod,
        body: &[u8],
        depends_on_other_pods: bool,
        proposals: BTreeMap<String, MetaVictims>,
        now: Instant,
    ) -> BTreeMap<String, MetaVictims> {
        let n_proposals = proposals.len();
        let facts = PodFacts::of(pod, self.index.read().names());
        let demand = Demand::of(&self.index.read(), pod, facts.as_ref());
        let ask = match &demand {
            Demand::Resources(ask)
                if facts.is_some() && self.rules.refusal_of_filter(body, pod).is_none() =>
            {
                ask
            }
            // Nothing of ours is asked for, and so nothing of it is short.
            Demand::Nothing | Demand::Resources(_) if facts.is_none() => {
                return proposals
                    .into_iter()
                    .filter(|(_, victims)| !victims.pods.is_empty())
                    .collect();
            }
            _ => return BTreeMap::new(),
        };
        if self.awaits_victims(pod, now) {
            self.metrics.preempted(Candidate::Waiting, n_proposals);
            return BTreeMap::new();
        }
        let promised = self.promised(pod.uid(), now);
        let preemptor = Preemptor::new(pod, ask, depends_on_other_pods, &promised);
        let mut kept = BTreeMap::new();
        for (node, proposed) in proposals {
            if !kept.is_empty() && super::now().saturating_duration_since(now) > SEARCH {
                break;
            }
            let victims = self.index.read().victims(&node, &preemptor, &proposed);
            self.metrics
                .preempted(Candidate::of(&proposed, victims.as_ref()), 1);
            kept.extend(victims.map(|victims| (node, victims)));
        }
        self.note_offer(pod.uid(), &kept, now);
        kept
    }

    fn note_offer(&self, uid: &str, candidates: &BTreeMap<String, MetaVictims>, now: Instant) {
        if candidates.is_empty() || uid.is_empty() {
            return;
        }
        let index = self.index.read();
        let owners = |victims: &MetaVictims| victims.pods.iter().map(|pod| index.owner(&pod.uid)).collect();
        let by_node = candidates
            .iter()
            .map(|(node, victims)| (node.as_str().into(), owners(victims)))
            .collect();
        drop(index);
        self.offered().put(
            uid,
            Offered {
                at: now,
                by_node,
                n_waits: 0,
            },
        );
    }

    /// Returns true if victims that an answer named for a pod have not ended, as far as the watch shows.
    fn awaits_victims(&self, pod: &Pod, now: Instant) -> bool {
        // The index is locked first, here as everywhere.
        let index = self.index.read();
        self.offered()
            .get(pod.uid())
            .is_some_and(|offered| offered.is_awaited(&index, pod.nominated_node(), now))
    }

    /// The victims of each node that make room for other pods, which are to have it.
    fn promised(&self, uid: &str, now: Instant) -> Promised {
        let mut promised = Promised::new();
        let index = self.index.read();
        for (other, offered) in self
            .offered()
            .iter()
            .filter(|(other, _)| *other != uid && index.is_pending(other))
        {
            let nominated = index.nominated_node(other);
            let is_recent = now.saturating_duration_since(offered.at) < SHOWN_WITHIN_WITHOUT_NOMINATION;
            let is_meant = |node: &str| nominated.map_or(is_recent, |nominated| nominated == node);
            for (node, victims) in offered.by_node.iter().filter(|(node, _)| is_meant(node)) {
                promised
                    .entry(node.clone())
                    .or_default()
                    .extend(victims.iter().cloned());
            }
        }
        promised
    }

    /// Returns the text that refuses a pod its nominated node while victims there have not ended: not as unresolvable, so that
    /// kube-scheduler evicts no others for it.
    ///
    /// kube-scheduler may have seen them end already, and then nothing makes it ask again but the pod's own condition, which
    /// it writes when the text differs from that of the last attempt: so the text alternates.
    pub(super) fn wait_for_victims(
        &self,
        index: &Index,
        pod: &Pod,
        node: &str,
        now: Instant,
    ) -> Option<&'static str> {
        const TEXTS: [&str; 2] = [
            "pods that were evicted for the pod have not ended on its nominated node",
            "pods that were evicted for the pod still have not ended on its nominated node",
        ];
        let mut offered = self.offered();
        if let Some(offered) = offered
            .get_mut(pod.uid())
            .filter(|offered| offered.is_awaited(index, Some(node), now))
        {
            offered.n_waits = offered.n_waits.wrapping_add(1);
            let [first, second] = TEXTS;
            return Some(if offered.n_waits % 2 == 1 { first } else { second });
        }
        let [first, _] = TEXTS;
        index.has_leaving(node, pod.priority()).then_some(first)
    }
}

impl Candidate {
    fn of(proposed: &MetaVictims, victims: Option<&MetaVictims>) -> Self {
        match victims {
            None => Self::Dropped,
            Some(victims) if victims.are_same_pods(proposed) => Self::Kept,
            Some(_) => Self::Replaced,
        }
    }
}
