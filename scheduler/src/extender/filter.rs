//! `filter`: which of the named nodes have a device with room. Writes nothing but a hint in memory.
//!
//! The hot path: the request is parsed once, names are looked up once each, and the answer is written once.

use std::borrow::Cow;
use std::time::Instant;

use placement::{Asking, Fleet, GpuAsk, NodeId, Reason};
use proto::extender::{ExtenderArgs, ExtenderFilterResult, Name, NodeList, WholeNode};
use proto::node::Node;
use proto::request::Dialect;

use super::{Extender, RequestFailure};
use crate::accounting::PodFacts;
use crate::admission::overrides_of_filter;
use crate::bind::{is_identity, shorten};
use crate::index::{Index, NodeAsk};
use crate::inventory;
use crate::leader::NotLeading;
use crate::metrics::Metrics;

/// Most bytes that one failed node's entry takes besides its name.
const ENTRY: usize = 96;

/// What a pod wants of every node.
#[derive(Clone, Debug)]
pub(super) enum Wanted<'a> {
    /// Nothing: every node will do.
    Nothing,
    /// This.
    Room(NodeAsk<'a>),
    /// Something that no node can give, by this rule.
    Impossible(Box<str>),
    /// This very node, which a decision names that is open still.
    Only(Box<str>),
}

/// Why a node does not do.
#[derive(Clone, Copy, Debug)]
struct Miss {
    reason: Reason,
    /// Whether we do not know the node: it may be new, and nothing is said about its devices.
    unknown: bool,
}

impl<'a> Wanted<'a> {
    /// The rule that the request breaks.
    fn rule(&self) -> Option<&str> {
        match self {
            Self::Impossible(rule) => Some(rule),
            _ => None,
        }
    }

    /// What a pod wants.
    pub(super) fn of(index: &Index, uid: &'a str, facts: Option<&PodFacts>) -> Self {
        let Some(facts) = facts else { return Self::Nothing };
        match index.ask(uid, facts) {
            Ok(None) => Self::Nothing,
            Ok(Some(ask)) => Self::Room(ask),
            Err(error) => Self::Impossible(shorten(&error.to_string()).into()),
        }
    }

    /// The question, to be put to many nodes; none, if the answer does not depend on what they have.
    pub(super) fn asking<'q>(&'q self, index: &'q Index) -> Option<Asking<'q>> {
        match self {
            Self::Room(ask) => Some(index.asking(ask)),
            Self::Nothing | Self::Impossible(_) | Self::Only(_) => None,
        }
    }

    /// Whether a node will do that has been looked up already.
    #[inline]
    fn of_found(&self, index: &Index, name: &str, node: Option<NodeId>, asking: Option<&mut Asking<'_>>) -> Result<Option<NodeId>, Miss> {
        match (self, asking) {
            (Self::Room(ask), Some(asking)) => index
                .fit_found(name, node, ask, asking)
                .map_err(|reason| Miss { reason, unknown: reason == Reason::NoDevice && !index.knows_node(name) }),
            (Self::Nothing | Self::Room(_), _) => Ok(None),
            (Self::Only(only), _) if **only == *name => Ok(None),
            (Self::Only(_), _) => Err(Miss { reason: Reason::NoDevice, unknown: false }),
            (Self::Impossible(_), _) => Err(Miss { reason: Reason::InvalidRequest, unknown: false }),
        }
    }
}

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
        for reason in Reason::ALL {
            let n_nodes = self.missed.iter().filter(|(_, miss)| miss.reason == reason).count();
            if n_nodes > 0 {
                metrics.refused(reason, u64::try_from(n_nodes).unwrap_or(u64::MAX));
            }
        }
    }
}

/// Request bytes in, answer bytes out.
///
/// # Errors
/// If the bytes are no filter request, or the state is not complete.
pub fn answer(extender: &Extender, body: &[u8], now: Instant) -> Result<Answer, RequestFailure> {
    let malformed = |reason: String| RequestFailure::malformed("filter", &reason);
    let args: ExtenderArgs<'_> = serde_json::from_slice(body).map_err(|error| malformed(error.to_string()))?;
    let uid = args.pod.uid();
    if extender.index.read().has_expired_hints(now) {
        extender.index.write().expire_hints(now);
    }
    let index = extender.index.read();
    index.ready().map_err(|reason| RequestFailure::NotReady { reason })?;
    let facts = PodFacts::of(&args.pod, index.names());
    // An open decision is repeated, as its write may have got through: its node is the only one for the pod.
    let wanted = match index.assumed_node(uid) {
        Some(node) if is_asked_about(node, args.node_names.as_deref(), args.nodes.as_ref()) => Wanted::Only(node.into()),
        _ => Wanted::of(&index, uid, facts.as_ref()),
    };
    let wanted = match facts.as_ref().filter(|_| extender.denies_overrides).and_then(|facts| overrides(body, facts, &index)) {
        Some(rule) if matches!(wanted, Wanted::Room(_)) => Wanted::Impossible(rule),
        _ => wanted,
    };
    let (mut judged, json) = match (&args.node_names, args.nodes) {
        (Some(names), _) => {
            let judged = judge_names(&index, &wanted, names);
            let json = judged.json(names, body.len(), wanted.rule());
            (judged, json)
        }
        (None, Some(nodes)) => judge_nodes(&index, &wanted, nodes),
        (None, None) => return Err(malformed("neither NodeNames nor Nodes is given".to_owned())),
    };
    let (is_new, was_hinted) = (index.pod(uid).is_none(), index.is_hinted(uid));
    let is_room = matches!(wanted, Wanted::Room(_)) && judged.fitting.is_empty();
    let refused = is_room.then(|| Refused { uid: uid.into(), is_unseen: !index.is_shown(uid), n_openings: index.fleet().n_openings() });
    let missed = if matches!(wanted, Wanted::Only(_)) { Vec::new() } else { std::mem::take(&mut judged.missed) };
    // What is kept for later is kept for pods only that the API server can have named.
    let is_pod = facts.as_ref().is_some_and(|facts| is_identity(uid, &facts.namespace, &facts.name));
    let hint = match wanted {
        Wanted::Room(ask) if is_pod => Some((judged.only(), ask)),
        _ => None,
    };
    drop(index);
    if let Some(facts) = facts.filter(|_| is_new && is_pod) {
        extender.remember(uid, &facts);
    }
    if let Some((node, ask)) = hint {
        match node {
            Some(node) => extender.index.write().hint(node, &ask, now),
            None if was_hinted => extender.index.write().unhint(uid),
            None => {}
        }
    }
    Ok(Answer { json, refused, missed })
}

/// The rule by which the policy against overrides refuses a pod, as the webhook would.
fn overrides(body: &[u8], facts: &PodFacts, index: &Index) -> Option<Box<str>> {
    facts.ask.gpus().filter(|gpus| gpus.dialect != Dialect::Vendor)?;
    overrides_of_filter(body, &facts.namespace, index.names()).map(|rule| shorten(&rule).into())
}

/// The answer of a replica that does not lead: kube-scheduler tries the pod again.
///
/// # Errors
/// Never; an answer can always be written.
pub(super) fn refusal(reason: NotLeading) -> Result<Vec<u8>, RequestFailure> {
    let answer = ExtenderFilterResult { error: reason.to_string(), ..ExtenderFilterResult::default() };
    serde_json::to_vec(&answer).map_err(|error| RequestFailure::malformed("filter", &error.to_string()))
}

fn is_asked_about(node: &str, names: Option<&[Name<'_>]>, nodes: Option<&NodeList>) -> bool {
    match (names, nodes) {
        (Some(names), _) => names.iter().any(|name| name.0 == node),
        (None, Some(nodes)) => nodes.items.iter().any(|whole| whole.node.metadata.name.as_deref() == Some(node)),
        (None, None) => false,
    }
}

/// The verdict on every node of a request, by its place in the request.
struct Judged {
    fitting: Vec<usize>,
    missed: Vec<(usize, Miss)>,
    last_fit: Option<NodeId>,
}

impl Judged {
    fn with_capacity(n_nodes: usize) -> Self {
        Self { fitting: Vec::with_capacity(n_nodes), missed: Vec::new(), last_fit: None }
    }

    #[inline]
    fn push(&mut self, at: usize, verdict: Result<Option<NodeId>, Miss>) {
        match verdict {
            Ok(node) => {
                self.fitting.push(at);
                self.last_fit = node;
            }
            Err(miss) => self.missed.push((at, miss)),
        }
    }

    /// The node, if it is the only one that fits.
    fn only(&self) -> Option<NodeId> {
        self.last_fit.filter(|_| self.fitting.len() == 1)
    }

    /// The answer to a request of names.
    ///
    /// Failed nodes are listed only if none fits: nobody asks about them otherwise.
    fn json(&self, names: &[Name<'_>], size: usize, rule: Option<&str>) -> Vec<u8> {
        let listed = if self.fitting.is_empty() { self.missed.as_slice() } else { &[] };
        let mut json = Vec::with_capacity(size + listed.len() * ENTRY + 128);
        json.extend_from_slice(br#"{"Nodes":null,"NodeNames":["#);
        for (nth, name) in self.fitting.iter().filter_map(|at| names.get(*at)).enumerate() {
            if nth > 0 {
                json.push(b',');
            }
            push_name(&mut json, name);
        }
        json.extend_from_slice(br#"],"FailedNodes":{"#);
        push_missed(&mut json, names, listed.iter().filter(|(_, miss)| miss.unknown), None);
        json.extend_from_slice(br#"},"FailedAndUnresolvableNodes":{"#);
        push_missed(&mut json, names, listed.iter().filter(|(_, miss)| !miss.unknown), rule);
        json.extend_from_slice(br#"},"Error":""}"#);
        json
    }
}

/// The rule that a request breaks is told in place of a reason.
fn push_missed<'m>(json: &mut Vec<u8>, names: &[Name<'_>], missed: impl Iterator<Item = &'m (usize, Miss)>, rule: Option<&str>) {
    let rule = rule.map(|rule| serde_json::Value::from(rule).to_string());
    let entries = missed.filter_map(|(at, miss)| Some((names.get(*at)?, miss.reason)));
    for (nth, (name, reason)) in entries.enumerate() {
        if nth > 0 {
            json.push(b',');
        }
        push_name(json, name);
        json.push(b':');
        match &rule {
            Some(rule) => json.extend_from_slice(rule.as_bytes()),
            // Reasons are our own texts and have nothing in them that JSON would escape.
            None => json.extend([b"\"", reason.as_str().as_bytes(), b"\""].concat()),
        }
    }
}

fn push_name(json: &mut Vec<u8>, name: &Name<'_>) {
    match &name.0 {
        // It stood in the request as it is, so it needs no escape here either.
        Cow::Borrowed(plain) => {
            json.push(b'"');
            json.extend_from_slice(plain.as_bytes());
            json.push(b'"');
        }
        Cow::Owned(escaped) => json.extend_from_slice(serde_json::Value::from(escaped.as_str()).to_string().as_bytes()),
    }
}

fn judge_names(index: &Index, wanted: &Wanted<'_>, names: &[Name<'_>]) -> Judged {
    let mut judged = Judged::with_capacity(names.len());
    // All are looked up before any is judged, so that the processor waits for the memory of many at a time.
    let found: Vec<Option<NodeId>> = match wanted {
        Wanted::Room(_) => names.iter().map(|name| index.fleet().node_id(&name.0)).collect(),
        Wanted::Nothing | Wanted::Impossible(_) | Wanted::Only(_) => vec![None; names.len()],
    };
    let mut asking = wanted.asking(index);
    for ((at, name), node) in names.iter().enumerate().zip(found) {
        judged.push(at, wanted.of_found(index, &name.0, node, asking.as_mut()));
    }
    judged
}

/// Judges nodes that were sent whole, and answers with those that fit, as they came.
fn judge_nodes(index: &Index, wanted: &Wanted<'_>, nodes: NodeList) -> (Judged, Vec<u8>) {
    let mut judged = Judged::with_capacity(nodes.items.len());
    let name = |node: &WholeNode| node.node.metadata.name.clone().unwrap_or_default();
    let names: Vec<String> = nodes.items.iter().map(name).collect();
    let mut asking = wanted.asking(index);
    for (at, (node, name)) in nodes.items.iter().zip(&names).enumerate() {
        let verdict = match wanted {
            Wanted::Room(ask) if !index.knows_node(name) => fit_template(index, &node.node, ask).map(|()| None),
            _ => wanted.of_found(index, name, index.fleet().node_id(name), asking.as_mut()),
        };
        judged.push(at, verdict);
    }
    let mut result = ExtenderFilterResult::default();
    if judged.fitting.is_empty() {
        for (at, miss) in &judged.missed {
            let failed = if miss.unknown { &mut result.failed_nodes } else { &mut result.failed_and_unresolvable_nodes };
            if let Some(name) = names.get(*at) {
                failed.insert(name.as_str(), wanted.rule().unwrap_or(miss.reason.as_str()));
            }
        }
    }
    let mut fitting = judged.fitting.iter().copied().peekable();
    let items = nodes.items.into_iter().enumerate().filter(|(at, _)| fitting.next_if_eq(at).is_some());
    result.nodes = Some(NodeList { items: items.map(|(_, node)| node).collect() });
    let json = serde_json::to_vec(&result).unwrap_or_default();
    (judged, json)
}

/// Judges a node that does not exist yet: an empty one of its capacity.
fn fit_template(index: &Index, node: &Node, ask: &NodeAsk<'_>) -> Result<(), Miss> {
    let miss = |reason| Miss { reason, unknown: true };
    let Some(report) = inventory::of_template(node, index.names()) else {
        return if matches!(ask.gpus, GpuAsk::Share(_) | GpuAsk::All { .. }) { Err(miss(Reason::NoDevice)) } else { Ok(()) };
    };
    if report.opaque && !ask.in_units {
        return Err(miss(Reason::NotServed));
    }
    let mut empty = Fleet::new();
    empty.set_inventory("template", report.inventory);
    let id = empty.node_id("template").ok_or(miss(Reason::NoDevice))?;
    empty.fit(id, ask.devices(), placement::Hints::Ignore).map_err(|reason| Miss { reason, unknown: false })
}
