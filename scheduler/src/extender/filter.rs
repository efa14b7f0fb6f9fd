//! `filter`: the nodes of the request that have room for the pod, or the best of them.
//!
//! The hot path: parse the request, take the pod's demand, evaluate the nodes, write the result, and keep what later requests
//! need. A filter writes nothing outside of this process.

use std::borrow::Cow;
use std::time::Instant;

use placement::Reason;
use proto::extender::{ExtenderFilterResult, NodeList, WholeNode};
use proto::pod::Pod;

use super::evaluation::{Demand, Evaluation, Misfit, evaluate_all};
use super::rank::Ranker;
use super::request::{FilterRequest, hash_of_set};
use super::retries::{LEAST_SAMPLE, Refusal, SAMPLE, Variation, rounds};
use super::{Extender, RequestFailure};
use crate::accounting::PodFacts;
use crate::api_server::shorten;
use crate::bind::is_identity;
use crate::config::MisfitNodes;
use crate::index::{Decision, Index, NodeAsk};
use crate::leader::NotLeading;
use crate::metrics::Metrics;

/// The text for every node if the pod is a member of a gang whose hints expired.
const GANG_RESTS: &str =
    "the pod's gang had room kept for it and was not bound in time: the room is for others for a while";

/// The text for every node of a sample: the number of nodes refused for each reason differs from sample to sample, and
/// kube-scheduler would write the pod's condition, and so try the pod again, for each.
const NO_NODE: &str = "none of the nodes that were asked about has devices for the pod now; the scheduler's view of the pod says why";

/// The result of a request.
#[derive(Debug)]
pub struct FilterResult {
    /// The JSON for kube-scheduler.
    pub json: Vec<u8>,
    /// The pod, if no node has room for it.
    pub(super) refused: Option<RefusedPod>,
    /// True if the text of the refusal differs from the last one, so that kube-scheduler tries the pod again soon.
    pub(super) is_retried: bool,
    /// The number of refused nodes for each reason, in the order of [`Reason::ALL`].
    n_refused: [u64; Reason::ALL.len()],
}

/// A pod that no node has room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RefusedPod {
    pub(super) uid: Box<str>,
    /// True if no watch has shown the pod yet.
    pub(super) is_unseen: bool,
    /// The number of times room had opened anywhere by then.
    pub(super) n_openings: u64,
}

/// The texts for nodes that do not fit, where these differ from the nodes' reasons.
#[derive(Debug, Default)]
struct Texts<'a> {
    /// The text for all nodes.
    uniform: Option<&'a str>,
    /// The node that the pod is nominated to, and the text for it while pods that were evicted for the pod have not ended.
    nominated: Option<(&'a str, &'static str)>,
    /// A suffix for one node's text, so that the refusal differs from the last one.
    variation: Option<Variation>,
}

impl FilterResult {
    /// Counts what the result says of nodes.
    pub(super) fn count(&self, metrics: &Metrics) {
        if self.is_retried {
            metrics.tried_again(SAMPLE);
        }
        for (reason, n_nodes) in Reason::ALL.into_iter().zip(self.n_refused) {
            if n_nodes > 0 {
                metrics.refused(reason, n_nodes);
            }
        }
    }
}

/// Answers a request.
///
/// # Errors
/// The body is not a filter request, or the watches have not synced.
pub fn answer(extender: &Extender, body: &[u8], now: Instant) -> Result<FilterResult, RequestFailure> {
    let FilterRequest {
        pod,
        names,
        whole_nodes,
    } = FilterRequest::parse(body)
        .map_err(|error| RequestFailure::malformed("filter", &error.to_string()))?;
    let uid = pod.uid();
    let group = Decision::group_of(&pod);
    extender.expire_hints(group.as_deref(), now);
    let index = extender.index.read();
    index
        .ready()
        .map_err(|reason| RequestFailure::NotReady { reason })?;
    let facts = PodFacts::of(&pod, index.names());
    let mut demand = match index.assumed_node(uid) {
        Some(node) if names.iter().any(|name| name == node) => Demand::AssumedOn(node.into()),
        _ => extender.demand(&index, &pod, facts.as_ref(), body),
    };
    // Without a group of kube-scheduler's own, room is kept for each member alone, and two gangs could block each other for
    // ever if each kept the room of some members.
    let is_resting = group.is_none() && is_gang_member(&pod, &demand) && index.is_resting(uid, now);
    if is_resting {
        demand = Demand::Rejected(GANG_RESTS.into());
    }
    let evaluation = extender.evaluate(&index, &pod, &demand, &names, whole_nodes.as_deref(), now);
    let resources = demand.resources();
    let no_room_for = resources.filter(|_| evaluation.n_fitting == 0);
    // kube-scheduler tries a PodGroup again after its back-off, whatever the text is.
    let retriable = no_room_for.filter(|_| group.is_none());
    let variation = retriable.and_then(|ask| extender.vary_text(&index, ask, &names, now));
    let nominated = no_room_for.and_then(|_| {
        let node = pod.nominated_node()?;
        Some((node, extender.wait_for_victims(&index, &pod, node, now)?))
    });
    let may_be_sample = may_be_sample(&index, names.len());
    let is_uniform = no_room_for.is_some() && variation.is_none() && nominated.is_none() && may_be_sample;
    let texts = Texts {
        uniform: demand.rejection().or(is_uniform.then_some(NO_NODE)),
        nominated,
        variation,
    };
    let openings = index.openings();
    let refused = retriable.map(|_| RefusedPod {
        uid: uid.into(),
        is_unseen: !index.is_shown(uid),
        n_openings: openings.all,
    });
    let is_new = index.pod(uid).is_none();
    drop(index);

    let n_refused = count_reasons(&demand, &evaluation);
    let json = write_result(&names, whole_nodes, &evaluation, &texts, extender.misfit_nodes);
    // State is kept only for pods that can exist: the names in a request are anyone's.
    let (namespace, name) = (pod.metadata.namespace.as_deref(), pod.metadata.name.as_deref());
    if is_identity(uid, namespace.unwrap_or_default(), name.unwrap_or_default()) {
        if let Some(facts) = facts.filter(|_| is_new) {
            extender.remember(uid, &facts);
        }
        if refused.is_some() || is_resting {
            extender.waiting().refuse(uid, openings);
        }
        if let Some(ask) = resources {
            extender.keep_room(&pod, ask, &evaluation, &names, now);
        }
    }
    Ok(FilterResult {
        json,
        refused,
        is_retried: variation.is_some(),
        n_refused,
    })
}

/// The result of a replica that does not lead: kube-scheduler tries the pod again.
///
/// # Errors
/// Never; a result can always be written.
pub(super) fn refusal(reason: NotLeading) -> Result<Vec<u8>, RequestFailure> {
    let result = ExtenderFilterResult {
        error: reason.to_string(),
        ..ExtenderFilterResult::default()
    };
    serde_json::to_vec(&result).map_err(|error| RequestFailure::malformed("filter", &error.to_string()))
}

/// Returns true if kube-scheduler may know more nodes than these.
fn may_be_sample(index: &Index, n_names: usize) -> bool {
    (LEAST_SAMPLE..index.n_nodes()).contains(&n_names)
}

/// kube-scheduler asks about all members of a gang before it binds one of them.
fn is_gang_member(pod: &Pod, demand: &Demand<'_>) -> bool {
    pod.is_in_gang() && demand.resources().is_some_and(NodeAsk::asks_for_devices)
}

fn count_reasons(demand: &Demand<'_>, evaluation: &Evaluation) -> [u64; Reason::ALL.len()] {
    let mut counts = [0; Reason::ALL.len()];
    // With a binding under way the other nodes were not evaluated.
    if matches!(demand, Demand::AssumedOn(_)) {
        return counts;
    }
    for (_, misfit) in &evaluation.misfits {
        if let Some(count) = counts.get_mut(misfit.reason as usize) {
            *count += 1;
        }
    }
    counts
}

/// Writes the result in the form of the request: node names, or whole nodes as they came.
fn write_result(
    names: &[Cow<'_, str>],
    whole_nodes: Option<Vec<WholeNode>>,
    evaluation: &Evaluation,
    texts: &Texts<'_>,
    misfit_nodes: MisfitNodes,
) -> Vec<u8> {
    let mut result = ExtenderFilterResult::default();
    let reported = evaluation.reported.iter().map(|(idx, _)| *idx);
    if let Some(nodes) = whole_nodes {
        let mut nodes: Vec<Option<WholeNode>> = nodes.into_iter().map(Some).collect();
        let items = reported.filter_map(|idx| nodes.get_mut(idx)?.take()).collect();
        result.nodes = Some(NodeList { items });
    } else {
        result.node_names = Some(
            reported
                .filter_map(|idx| names.get(idx))
                .map(|name| &**name)
                .collect(),
        );
    }
    // kube-scheduler uses the reasons only if no node fits.
    if evaluation.reported.is_empty() {
        let mut variation = texts.variation;
        for (idx, misfit) in &evaluation.misfits {
            let Some(name) = names.get(*idx) else { continue };
            // One text is enough to make the refusal differ.
            let suffix = if misfit.is_unknown_node {
                None
            } else {
                variation.take()
            };
            let text = texts.of(name, *misfit);
            let text = suffix.map_or(Cow::Borrowed(text), |suffix| {
                format!("{text}{}", suffix.text()).into()
            });
            if texts.is_resolvable(name, *misfit, misfit_nodes) {
                result.failed_nodes.push((name, text));
            } else {
                result.failed_and_unresolvable_nodes.push((name, text));
            }
        }
    }
    serde_json::to_vec(&result).unwrap_or_default()
}

impl Texts<'_> {
    fn of(&self, name: &str, misfit: Misfit) -> &str {
        match (self.uniform, self.nominated) {
            (Some(text), _) => text,
            (None, Some((node, text))) if node == name => text,
            (None, _) => misfit.reason.as_str(),
        }
    }

    /// Returns true if kube-scheduler may look for victims on a node.
    fn is_resolvable(&self, name: &str, misfit: Misfit, misfit_nodes: MisfitNodes) -> bool {
        misfit.is_unknown_node
            || self.nominated.is_some_and(|(node, _)| node == name)
            || (misfit_nodes == MisfitNodes::Resolvable && misfit.reason.is_lack_of_room())
    }
}

impl Extender {
    /// Ends hints whose time is up, and those of other `PodGroup`s whose scheduling cycle ended without binds.
    fn expire_hints(&self, group: Option<&str>, now: Instant) {
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

    /// The demand of a pod, if the webhooks' rules let it have devices at all.
    fn demand<'p>(&self, index: &Index, pod: &'p Pod, facts: Option<&PodFacts>, body: &[u8]) -> Demand<'p> {
        let demand = Demand::of(index, pod, facts);
        match demand {
            Demand::Nothing | Demand::Resources(_) => match self.rules.refusal_of_filter(body, pod) {
                Some(rule) => Demand::Rejected(shorten(&rule).into()),
                None => demand,
            },
            Demand::Rejected(_) | Demand::AssumedOn(_) => demand,
        }
    }

    /// Evaluates all nodes, and reports as many as the pod and the configuration want.
    fn evaluate(
        &self,
        index: &Index,
        pod: &Pod,
        demand: &Demand<'_>,
        names: &[Cow<'_, str>],
        whole_nodes: Option<&[WholeNode]>,
        now: Instant,
    ) -> Evaluation {
        if demand.resources().is_none() {
            return evaluate_all(index, demand, names, whole_nodes, None);
        }
        let is_gang_member = is_gang_member(pod, demand);
        let n_reported = match self.answer_nodes.most() {
            // Room has to be kept for each member of a gang before the next is asked about, so each gets one node.
            _ if is_gang_member => Some(1),
            // kube-scheduler weighs the pod's preferences, and has to do so among all nodes.
            _ if pod.spec.has_preferences() => None,
            n => n,
        };
        let failed = self.attempts().ask(pod.uid(), is_gang_member, now);
        let best = n_reported.map(|n| (Ranker::new(index, &pod.spec, &failed), n));
        evaluate_all(index, demand, names, whole_nodes, best)
    }

    /// The text that makes kube-scheduler try the pod again soon, if the nodes are a sample and another node fits.
    fn vary_text(
        &self,
        index: &Index,
        ask: &NodeAsk<'_>,
        names: &[Cow<'_, str>],
        now: Instant,
    ) -> Option<Variation> {
        let fits_another = may_be_sample(index, names.len()) && index.fits_anywhere(ask);
        let refusal = Refusal {
            most: rounds(index.n_nodes(), names.len()),
            n_openings: index.openings().all,
        };
        let mut retries = self.retries();
        if fits_another && retries.is_sample(ask.uid, hash_of_set(names)) {
            retries.vary(ask.uid, refusal, now)
        } else {
            retries.end(ask.uid);
            None
        }
    }

    /// Keeps room for the pod on the best node, or on the only one that fits, and remembers the attempt.
    fn keep_room(
        &self,
        pod: &Pod,
        ask: &NodeAsk<'_>,
        evaluation: &Evaluation,
        names: &[Cow<'_, str>],
        now: Instant,
    ) {
        let decision = Decision::of(pod);
        let first = evaluation.reported.first();
        let is_chosen_here = evaluation.reported.len() < evaluation.n_fitting;
        // Of the attempt nothing is to be learnt where kube-scheduler chooses.
        match first.and_then(|(idx, _)| names.get(*idx)) {
            Some(name) if is_chosen_here => self.attempts().begin(ask.uid, name),
            Some(_) => {}
            None => self.attempts().excuse(ask.uid),
        }
        let node = first.filter(|_| evaluation.is_ranked || evaluation.n_fitting == 1);
        match node.and_then(|(_, node)| *node) {
            Some(node) => self.index.write().hint(node, ask, &decision, now),
            // The room of a `PodGroup` is kept as long as its members are asked about, placement by placement.
            None if pod.is_in_gang() => self.index.write().refuse_member(ask.uid, &decision, now),
            None => {
                let is_outdated = {
                    let index = self.index.read();
                    index.is_hinted(ask.uid) && !index.is_nominated(ask.uid)
                };
                if is_outdated {
                    self.index.write().unhint(ask.uid);
                }
            }
        }
    }
}
