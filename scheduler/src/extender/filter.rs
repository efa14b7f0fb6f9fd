//! `filter`: which of the named nodes have a device with room, or the best of them. Writes nothing but a hint in memory.
//!
//! The hot path: the request is parsed once, names are looked up once each, and the answer is written once.

use std::time::Instant;

use placement::{NodeId, Reason};
use proto::extender::ExtenderFilterResult;
use proto::pod::Pod;

use super::judged::{Judged, Report, judge};
use super::question::{Nodes, Question};
use super::retries::{LEAST_SAMPLE, Refusal, SAMPLE, Variation, rounds};
use super::standing::Order;
use super::wanted::{Miss, Wanted};
use super::{Extender, RequestFailure};
use crate::accounting::PodFacts;
use crate::api_server::shorten;
use crate::bind::is_identity;
use crate::index::{Decision, Index, NodeAsk};
use crate::leader::NotLeading;
use crate::metrics::Metrics;

/// Said of every node to a pod of a gang that had room kept for it until the time was up.
const GANG_RESTS: &str =
    "the pod's gang had room kept for it and was not bound in time: the room is for others for a while";

/// The text for every node of a sample: the number of nodes refused for each reason differs from sample to sample, and
/// kube-scheduler would take that for news and try the pod again and again.
const NO_NODE: &str = "none of the nodes that were asked about has devices for the pod now; the scheduler's view of the pod says why";

/// An answer, and what it comes from.
#[derive(Debug)]
pub struct Answer {
    /// As kube-scheduler reads it.
    pub json: Vec<u8>,
    /// The pod, if no node has room for it.
    pub(super) refused: Option<Refused>,
    /// The nodes that were found wanting; none where nothing was judged anew.
    missed: Vec<(usize, Miss)>,
    /// True if kube-scheduler is made to try the pod again soon, as it was refused for a sample.
    is_tried_again: bool,
}

/// A pod that no node has room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) uid: Box<str>,
    /// Whether no watch has shown the pod yet.
    pub(super) is_unseen: bool,
    /// How often room had been made anywhere by then.
    pub(super) n_openings: u64,
}

impl Refused {
    fn of(index: &Index, uid: &str) -> Self {
        Self {
            uid: uid.into(),
            is_unseen: !index.is_shown(uid),
            n_openings: index.openings().all,
        }
    }
}

impl Answer {
    /// Returns true if kube-scheduler is made to try the pod again soon.
    pub(super) const fn is_tried_again(&self) -> bool {
        self.is_tried_again
    }

    /// Counts the refusals that it tells of.
    pub(super) fn count(&self, metrics: &Metrics) {
        let mut counts = [0; Reason::ALL.len()];
        for (_, miss) in &self.missed {
            if let Some(count) = counts.get_mut(miss.reason as usize) {
                *count += 1;
            }
        }
        if self.is_tried_again {
            metrics.tried_again(SAMPLE);
        }
        for (reason, n_nodes) in Reason::ALL
            .into_iter()
            .zip(counts)
            .filter(|(_, n_nodes)| *n_nodes > 0)
        {
            metrics.refused(reason, n_nodes);
        }
    }
}

/// Request bytes in, answer bytes out.
///
/// # Errors
/// If the bytes are no filter request, or the state is not complete.
pub fn answer(extender: &Extender, body: &[u8], now: Instant) -> Result<Answer, RequestFailure> {
    let roll = extender.roll();
    let Question { pod, head, nodes } = Question::read(body, &roll)
        .map_err(|error| RequestFailure::malformed("filter", &error.to_string()))?;
    let uid = pod.uid();
    let group = Decision::group_of(&pod);
    extender.catch_up(group.as_deref(), now);
    let index = extender.index.read();
    index
        .ready()
        .map_err(|reason| RequestFailure::NotReady { reason })?;
    let facts = PodFacts::of(&pod, index.names());
    // An open decision is repeated, as its write may have got through: its node is the only one for the pod.
    let wanted = match index.assumed_node(uid) {
        Some(node) if nodes.contains(node) => Wanted::Only(node.into()),
        _ => Wanted::of(&index, &pod, facts.as_ref()),
    };
    let wanted = match wanted {
        Wanted::Nothing | Wanted::Room(_) => match extender.rules.refusal_of_filter(&head, &pod) {
            Some(rule) => Wanted::Impossible(shorten(&rule).into()),
            None => wanted,
        },
        wanted => wanted,
    };
    let is_in_gang = pod.is_in_gang() && matches!(&wanted, Wanted::Room(ask) if ask.asks_for_devices());
    // Members of a gang are never answered without room being kept: two of them could be sent to the same device.
    let rests = is_in_gang && group.is_none() && index.is_resting(uid, now);
    let wanted = if rests {
        Wanted::Impossible(GANG_RESTS.into())
    } else {
        wanted
    };
    let is_room = wanted.room().is_some();
    let avoided = if is_room {
        extender.attempts().ask(uid, is_in_gang, now)
    } else {
        Vec::new()
    };
    let best = extender
        .n_most(&pod, is_room, is_in_gang)
        .map(|n| (Order::new(&index, &pod.spec, &avoided), n));
    let judged = judge(&index, &wanted, &nodes, &roll, best);
    let is_refused = is_room && judged.is_empty();
    // kube-scheduler tries a PodGroup again after its back-off, whatever happens.
    let is_awaited = is_refused && group.is_none();
    let variation = wanted
        .room()
        .filter(|_| is_awaited)
        .and_then(|ask| extender.vary(&index, ask, &nodes, now));
    let openings = index.openings();
    let refused = is_awaited.then(|| Refused::of(&index, uid));
    let left = Left::of(&wanted, &judged, &pod);
    let is_new = index.pod(uid).is_none();
    if let (true, Nodes::Names(names)) = (is_room, &nodes) {
        extender.call_roll(roll, names, index.fleet());
    }
    let nominated = pod.nominated_node().filter(|_| is_refused);
    let waiting =
        nominated.and_then(|node| Some((node, extender.wait_for_victims(&index, &pod, node, now)?)));
    let is_uniform = is_refused && variation.is_none() && waiting.is_none() && may_be_sample(&index, &nodes);
    let rule = wanted.rule().or(is_uniform.then_some(NO_NODE));
    let report = Report {
        rule,
        misfits: extender.misfit_nodes,
        waiting,
        variation,
        varied: None,
    };
    let (json, missed) = judged.verdict().told(nodes, body.len(), report);
    let missed = if matches!(wanted, Wanted::Only(_)) {
        Vec::new()
    } else {
        missed
    };
    drop(index);
    // What is kept for later is kept for pods only that the API server can have named.
    let (namespace, name) = (pod.metadata.namespace.as_deref(), pod.metadata.name.as_deref());
    if is_identity(uid, namespace.unwrap_or_default(), name.unwrap_or_default()) {
        if let Some(facts) = facts.filter(|_| is_new) {
            extender.remember(uid, &facts);
        }
        if is_awaited || rests {
            extender.waiting().refuse(uid, openings);
        }
        if let Some(left) = left {
            extender.note(&left, now);
        }
    }
    Ok(Answer {
        json,
        refused,
        missed,
        is_tried_again: variation.is_some(),
    })
}

/// The answer of a replica that does not lead: kube-scheduler tries the pod again.
///
/// # Errors
/// Never; an answer can always be written.
pub(super) fn refusal(reason: NotLeading) -> Result<Vec<u8>, RequestFailure> {
    let answer = ExtenderFilterResult {
        error: reason.to_string(),
        ..ExtenderFilterResult::default()
    };
    serde_json::to_vec(&answer).map_err(|error| RequestFailure::malformed("filter", &error.to_string()))
}

/// Returns true if kube-scheduler may know of more nodes than it asks about.
fn may_be_sample(index: &Index, nodes: &Nodes<'_>) -> bool {
    (LEAST_SAMPLE..index.n_nodes()).contains(&nodes.len())
}

/// What an answer leaves for later.
struct Left<'a> {
    ask: NodeAsk<'a>,
    decision: Decision,
    /// Where room is kept for the pod.
    hinted: Option<NodeId>,
    /// The node that was picked while others that fit were held back.
    picked: Option<Box<str>>,
    is_refused: bool,
    is_in_gang: bool,
}

impl<'a> Left<'a> {
    fn of(wanted: &Wanted<'a>, judged: &Judged<'_>, pod: &Pod) -> Option<Self> {
        Some(Self {
            ask: wanted.room()?.clone(),
            decision: Decision::of(pod),
            hinted: judged.hinted(),
            picked: judged.picked().map(Into::into),
            is_refused: judged.is_empty(),
            is_in_gang: pod.is_in_gang(),
        })
    }
}

impl Extender {
    /// Ends the hints whose time is up, and those of groups whose cycle came to nothing and is over now.
    fn catch_up(&self, group: Option<&str>, now: Instant) {
        let (is_due, is_in_vain) = {
            let index = self.index.read();
            (index.is_due(now), index.has_gang_cycles_in_vain(group))
        };
        if is_due || is_in_vain {
            let mut index = self.index.write();
            index.tick(now);
            index.end_gang_cycles(group);
        }
    }

    /// Varies the text of a refusal, if a node that was not asked about fits.
    fn vary(&self, index: &Index, ask: &NodeAsk<'_>, nodes: &Nodes<'_>, now: Instant) -> Option<Variation> {
        // None of the nodes that were asked about fits.
        let fits_another = may_be_sample(index, nodes) && index.fits_anywhere(ask);
        let mut retries = self.retries();
        if !fits_another || !retries.is_sample(ask.uid, nodes.set()) {
            retries.end(ask.uid);
            return None;
        }
        let most = rounds(index.n_nodes(), nodes.len());
        retries.vary(
            ask.uid,
            Refusal {
                most,
                n_openings: index.openings().all,
            },
            now,
        )
    }

    /// The most nodes that a pod is answered with; `None` for all that fit.
    ///
    /// kube-scheduler weighs a pod's preferences, among all of the nodes. It asks about the members of a gang one after the other
    /// before it binds any of them, so that room has to be kept for each: each is answered with one node.
    fn n_most(&self, pod: &Pod, is_room: bool, is_in_gang: bool) -> Option<usize> {
        if is_room && is_in_gang {
            return Some(1);
        }
        let is_picky = is_room && !pod.spec.has_preferences();
        Some(self.answer_nodes).filter(|_| is_picky)?.most()
    }

    /// Takes note of what an answer leaves for later.
    fn note(&self, left: &Left<'_>, now: Instant) {
        let uid = left.ask.uid;
        match &left.picked {
            Some(node) => self.attempts().begin(uid, node),
            None if left.is_refused => self.attempts().excuse(uid),
            None => {}
        }
        match left.hinted {
            Some(node) => self.index.write().hint(node, &left.ask, &left.decision, now),
            // kube-scheduler may ask about the nodes of one placement after the other, and come back to the first.
            None if left.is_in_gang => self.index.write().refuse_member(uid, &left.decision, now),
            None => {
                let is_forgotten = {
                    let index = self.index.read();
                    index.is_hinted(uid) && !index.is_nominated(uid)
                };
                if is_forgotten {
                    self.index.write().unhint(uid);
                }
            }
        }
    }
}
