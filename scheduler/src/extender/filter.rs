//! `filter`: which of the named nodes have a device with room, or the best of them. Writes nothing but a hint in memory.
//!
//! The hot path: the request is parsed once, names are looked up once each, and the answer is written once.

use std::time::Instant;

use placement::{NodeId, Reason};
use proto::extender::ExtenderFilterResult;
use proto::pod::Pod;

use super::judged::{Report, judge};
use super::question::{Nodes, Question};
use super::standing::Order;
use super::wanted::{Miss, Wanted};
use super::{Extender, RequestFailure};
use crate::accounting::PodFacts;
use crate::bind::{is_identity, shorten};
use crate::index::NodeAsk;
use crate::leader::NotLeading;
use crate::metrics::Metrics;

/// An answer, and what it comes from.
#[derive(Debug)]
pub struct Answer {
    /// As kube-scheduler reads it.
    pub json: Vec<u8>,
    /// The pod, if no node has room for it.
    pub(super) refused: Option<Refused>,
    /// The nodes that were found wanting; none where nothing was judged anew.
    missed: Vec<(usize, Miss)>,
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

impl Answer {
    /// Counts the refusals that it tells of.
    pub(super) fn count(&self, metrics: &Metrics) {
        let mut counts = [0; Reason::ALL.len()];
        for (_, miss) in &self.missed {
            if let Some(count) = counts.get_mut(miss.reason as usize) {
                *count += 1;
            }
        }
        for (reason, n_nodes) in Reason::ALL.into_iter().zip(counts).filter(|(_, n_nodes)| *n_nodes > 0) {
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
    let Question { pod, head, nodes } =
        Question::read(body, &roll).map_err(|error| RequestFailure::malformed("filter", &error.to_string()))?;
    let uid = pod.uid();
    if extender.index.read().has_expired_hints(now) {
        extender.index.write().expire_hints(now);
    }
    let index = extender.index.read();
    index.ready().map_err(|reason| RequestFailure::NotReady { reason })?;
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
    let is_room = matches!(wanted, Wanted::Room(_));
    let judged = judge(&index, &wanted, &nodes, &roll, extender.n_most(&pod, is_room).map(|n| (Order::new(&index, &pod.spec, None), n)));
    let is_refused = is_room && judged.is_empty();
    let refused = is_refused.then(|| Refused { uid: uid.into(), is_unseen: !index.is_shown(uid), n_openings: index.fleet().n_openings() });
    let left = match wanted {
        Wanted::Room(ref ask) => {
            Some(Left { ask: ask.clone(), hinted: judged.hinted(), picked: judged.picked().map(Into::into), is_refused })
        }
        _ => None,
    };
    let is_new = index.pod(uid).is_none();
    if let (true, Nodes::Names(names)) = (is_room, &nodes) {
        extender.call_roll(roll, names, index.fleet());
    }
    let nominated = pod.nominated_node().filter(|_| is_refused);
    let waiting = nominated.and_then(|node| Some((node, extender.wait_for_victims(&index, &pod, node, now)?)));
    let report = Report { rule: wanted.rule(), misfits: extender.misfit_nodes, waiting };
    let (json, missed) = judged.verdict().told(nodes, body.len(), report);
    let missed = if matches!(wanted, Wanted::Only(_)) { Vec::new() } else { missed };
    drop(index);
    // What is kept for later is kept for pods only that the API server can have named.
    let (namespace, name) = (pod.metadata.namespace.as_deref(), pod.metadata.name.as_deref());
    if is_identity(uid, namespace.unwrap_or_default(), name.unwrap_or_default()) {
        if let Some(facts) = facts.filter(|_| is_new) {
            extender.remember(uid, &facts);
        }
        if let Some(left) = left {
            extender.note(&left, now);
        }
    }
    Ok(Answer { json, refused, missed })
}

/// The answer of a replica that does not lead: kube-scheduler tries the pod again.
///
/// # Errors
/// Never; an answer can always be written.
pub(super) fn refusal(reason: NotLeading) -> Result<Vec<u8>, RequestFailure> {
    let answer = ExtenderFilterResult { error: reason.to_string(), ..ExtenderFilterResult::default() };
    serde_json::to_vec(&answer).map_err(|error| RequestFailure::malformed("filter", &error.to_string()))
}

/// What an answer leaves for later.
struct Left<'a> {
    ask: NodeAsk<'a>,
    /// Where room is kept for the pod.
    hinted: Option<NodeId>,
    /// The node that was picked while others that fit were held back.
    picked: Option<Box<str>>,
    is_refused: bool,
}

impl Extender {
    /// How many nodes a pod is answered with at most; `None` if with all that fit.
    ///
    /// What a pod prefers kube-scheduler weighs, among all; and a pod for which our choice came to nothing needs others.
    fn n_most(&self, pod: &Pod, is_room: bool) -> Option<usize> {
        let is_picky = is_room && !pod.spec.has_preferences() && !self.attempts().ask(pod.uid());
        Some(self.answer_nodes).filter(|_| is_picky)?.most()
    }

    /// Takes note of what an answer leaves for later.
    fn note(&self, left: &Left<'_>, now: Instant) {
        let uid = left.ask.uid;
        match &left.picked {
            Some(node) => self.attempts().begin(uid, node),
            None if left.is_refused => self.attempts().end(uid),
            None => {}
        }
        match left.hinted {
            Some(node) => self.index.write().hint(node, &left.ask, now),
            None if self.index.read().is_hinted(uid) => self.index.write().unhint(uid),
            None => {}
        }
    }
}
