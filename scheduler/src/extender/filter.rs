//! `filter`: the nodes of the request that have room for the pod, or the best of them.
//!
//! The hot path: parse the request, take the pod's demand, evaluate the nodes, write the result, and keep what later requests
//! need. A filter writes nothing outside of this process.

use std::borrow::Cow;
use std::time::Instant;

use placement::Reason;
use proto::extender::{ExtenderFilterResult, NodeList, WholeNode};
use proto::pod::Pod;

use super::evaluation::{Demand, Evaluation, NodeMisfit, evaluate_all};
use super::preempt::awaited_victims_text;
use super::rank::Ranker;
use super::recheck::{PodRefusal, wait_for_update};
use super::request::{FilterRequest, hash_of_set};
use super::requeue::{MIN_SAMPLE, SampleRetries};
use super::{Extender, RequestError, now};
use crate::accounting::PodFacts;
use crate::api_server::shorten;
use crate::bind::is_pod_identity;
use crate::config::MisfitNodes;
use crate::index::{Decision, Index, ResourceDemand};
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
    /// The refusal, if no node has room for the pod and kube-scheduler will try it again only after an event.
    refusal: Option<PodRefusal>,
    /// True if the text of the refusal differs from the last one, so that kube-scheduler tries the pod again soon.
    is_retried: bool,
    /// The pod's UID; `None` if the pod requests nothing that this scheduler counts.
    uid: Option<Box<str>>,
    /// True if some node fits.
    fits: bool,
    /// The number of refused nodes for each reason, in the order of [`Reason::ALL`].
    n_refused: [u64; Reason::ALL.len()],
}

/// The texts for nodes that do not fit, where these differ from the nodes' reasons.
#[derive(Debug, Default)]
struct Texts<'a> {
    /// The text for all nodes.
    uniform: Option<&'a str>,
    /// The node that the pod is nominated to, and the text for it while pods that were evicted for the pod have not ended.
    nominated: Option<(&'a str, &'static str)>,
    /// A suffix for one node's text, so that the refusal differs from the last one.
    suffix: Option<&'static str>,
}

/// Answers a request. Rechecks a refusal once if the state may be stale.
///
/// # Errors
/// The body is not a filter request, the watches have not synced, or another replica leads.
pub(super) async fn answer_rechecked(extender: &Extender, body: &[u8]) -> Result<Vec<u8>, RequestError> {
    extender.check_leading()?;
    let mut result = answer(extender, body, now())?;
    let refusal = result.refusal.take().filter(|_| !result.is_retried);
    if let Some(refusal) = refusal
        && extender.memory().recheck.should_recheck(&refusal, now())
    {
        // No lock is held while waiting: the watch needs it to bring the update.
        let is_updated = wait_for_update(&extender.index, &refusal).await;
        extender.check_leading()?;
        // The body is parsed once more; rechecks are rare, and the first answer borrows from it.
        result = answer(extender, body, now())?;
        let refusal = result.refusal.as_ref();
        extender.memory().recheck.finish(refusal, is_updated, now());
        extender.metrics.rechecked(refusal.is_none());
    }
    result.count(&extender.metrics, now());
    Ok(result.json)
}

/// Answers a request from the state as it is.
///
/// # Errors
/// The body is not a filter request, or the watches have not synced.
pub fn answer(extender: &Extender, body: &[u8], now: Instant) -> Result<FilterResult, RequestError> {
    let FilterRequest {
        pod,
        names,
        whole_nodes,
    } = FilterRequest::parse(body).map_err(|error| RequestError::malformed("filter", &error))?;
    let uid = pod.uid();
    let group = Decision::group_of(&pod);
    expire_hints(extender, group.as_deref(), now);
    let index = extender.index.read();
    index.ready().map_err(RequestError::NotReady)?;
    let filter = Filter {
        extender,
        index: &index,
        pod: &pod,
        names: &names,
        now,
    };
    let facts = PodFacts::of(&pod, index.names());
    let mut demand = filter.demand(facts.as_ref(), body);
    // A pod whose hint expired gets no other for a while. A member of a gang needs one, or it could be sent to the devices of
    // another member, so that no node is offered to it. The hints of a PodGroup expire together, by rules of their own.
    let is_resting = group.is_none() && is_gang_member(&pod, &demand) && index.hints().is_resting(uid, now);
    if is_resting {
        demand = Demand::Rejected(GANG_RESTS.into());
    }
    let evaluation = filter.evaluate(&demand, whole_nodes.as_deref());
    let refused = demand.resources().filter(|_| evaluation.n_fitting == 0);
    // kube-scheduler tries a PodGroup again after its back-off, whatever the text is.
    let waiting = refused.filter(|_| group.is_none());
    let mut texts = Texts {
        uniform: demand.rejection(),
        nominated: refused.and_then(|_| filter.nominated_text()),
        suffix: waiting.and_then(|resources| filter.retry_suffix(resources)),
    };
    if refused.is_some() && texts.nominated.is_none() && texts.suffix.is_none() && filter.may_be_sample() {
        texts.uniform = Some(NO_NODE);
    }
    // Read under the same lock as the evaluation: room that opens after it has to count as news.
    let openings = index.openings();
    let refusal = waiting.map(|_| PodRefusal {
        uid: uid.into(),
        is_unseen: !index.is_shown(uid),
        n_openings: openings.all,
    });
    // The facts of a pod that the watch shows are newer than those of any request.
    let is_new = index.pod(uid).is_none();
    drop(index);

    // The identity in a request is anyone's; state is kept only for pods that can exist.
    let (namespace, name) = (pod.metadata.namespace.as_deref(), pod.metadata.name.as_deref());
    let can_exist = is_pod_identity(uid, namespace.unwrap_or_default(), name.unwrap_or_default());
    let asks = demand.rejection().is_some() || demand.resources().is_some_and(ResourceDemand::has_devices);
    if can_exist {
        if let Some(facts) = facts.filter(|_| is_new) {
            extender.memory().facts.insert(uid, facts);
        }
        if waiting.is_some() || is_resting {
            extender.memory().waiting.refuse(uid, openings);
        }
        if let Some(resources) = demand.resources() {
            keep_room(extender, &pod, resources, &evaluation, &names, now);
        }
    }
    // Written last, since the next pod's filter may come before this result is complete.
    let json = write_result(&names, whole_nodes, &evaluation, &texts, extender.misfit_nodes);
    Ok(FilterResult {
        json,
        refusal,
        is_retried: texts.suffix.is_some(),
        uid: (can_exist && asks).then(|| uid.into()),
        fits: evaluation.n_fitting > 0,
        n_refused: count_reasons(&demand, &evaluation),
    })
}

impl FilterResult {
    /// Counts the refusals in metrics, and notes the pod's result.
    fn count(&self, metrics: &Metrics, now: Instant) {
        if let Some(uid) = &self.uid {
            metrics.note_filter(uid, self.refusal_label(), now);
        }
        if self.is_retried {
            metrics.sample_retried();
        }
        for (reason, n_nodes) in Reason::ALL.into_iter().zip(self.n_refused) {
            if n_nodes > 0 {
                metrics.refused(reason, n_nodes);
            }
        }
    }
}

impl FilterResult {
    /// The metrics label of the reason that most nodes have, if no node fits. Nodes without GPUs say nothing about the pod, so
    /// their reason counts only if there is no other.
    fn refusal_label(&self) -> Option<&'static str> {
        if self.fits {
            return None;
        }
        let counted = Reason::ALL.into_iter().zip(self.n_refused);
        let most = counted.max_by_key(|(reason, n_nodes)| match reason {
            Reason::NoDevice => u64::from(*n_nodes > 0),
            _ => n_nodes.saturating_mul(2),
        });
        let most = most.filter(|(_, n_nodes)| *n_nodes > 0);
        Some(most.map_or(Reason::InvalidRequest, |(reason, _)| reason).label())
    }
}

/// The result of a replica that does not lead: kube-scheduler tries the pod again.
pub(super) fn error_result(reason: NotLeading) -> Vec<u8> {
    let result = ExtenderFilterResult {
        error: reason.to_string(),
        ..ExtenderFilterResult::default()
    };
    serde_json::to_vec(&result).unwrap_or_default()
}

/// Ends hints whose time is up, and those of other `PodGroup`s whose scheduling cycle ended without binds.
fn expire_hints(extender: &Extender, group: Option<&str>, now: Instant) {
    // Most filters find nothing to do, and need no write lock.
    let (is_due, is_in_vain) = {
        let index = extender.index.read();
        (index.is_due(now), index.hints().has_gang_cycles_in_vain(group))
    };
    // Between the two locks another filter may have done this already, which then is a second look at nothing.
    if is_due || is_in_vain {
        let mut index = extender.index.write();
        index.tick(now);
        index.end_gang_cycles(group);
    }
}

/// Returns true if kube-scheduler may ask about other pods of a gang before it binds this one.
fn is_gang_member(pod: &Pod, demand: &Demand<'_>) -> bool {
    pod.is_in_gang() && demand.resources().is_some_and(ResourceDemand::has_devices)
}

/// A request under evaluation.
struct Filter<'a, 'p> {
    extender: &'a Extender,
    index: &'a Index,
    pod: &'p Pod,
    names: &'a [Cow<'a, str>],
    now: Instant,
}

impl<'p> Filter<'_, 'p> {
    /// The demand of the pod, unless the webhooks' rules reject it.
    fn demand(&self, facts: Option<&PodFacts>, body: &[u8]) -> Demand<'p> {
        // The write of an open decision may have got through, so that the pod can go nowhere else.
        if let Some(node) = self.index.assumed_node(self.pod.uid())
            && self.names.iter().any(|name| name == node)
        {
            return Demand::AssumedOn(node.into());
        }
        let demand = Demand::of(self.index, self.pod, facts);
        if demand.rejection().is_some() {
            return demand;
        }
        match self.extender.rules.refusal_of_filter(body, self.pod) {
            Some(rule) => Demand::Rejected(shorten(&rule).into()),
            None => demand,
        }
    }

    /// Evaluates all nodes, and reports as many as the pod and the configuration want.
    fn evaluate(&self, demand: &Demand<'_>, whole_nodes: Option<&[WholeNode]>) -> Evaluation {
        if demand.resources().is_none() {
            return evaluate_all(self.index, demand, self.names, whole_nodes, None);
        }
        let is_gang_member = is_gang_member(self.pod, demand);
        let n_reported = match self.extender.answer_nodes.most() {
            // Room has to be kept for each member of a gang before the next is asked about, so each gets one node.
            _ if is_gang_member => Some(1),
            // kube-scheduler weighs the pod's preferences, and has to do so among all nodes.
            _ if self.pod.spec.has_preferences() => None,
            n => n,
        };
        let failed = self
            .extender
            .memory()
            .attempts
            .begin(self.pod.uid(), is_gang_member, self.now);
        let best = n_reported.map(|n| (Ranker::new(self.index, &self.pod.spec, &failed), n));
        evaluate_all(self.index, demand, self.names, whole_nodes, best)
    }

    /// The node that the refused pod is nominated to and its text, while pods that were evicted for the pod have not ended.
    fn nominated_text(&self) -> Option<(&'p str, &'static str)> {
        let node = self.pod.nominated_node()?;
        let text = awaited_victims_text(self.extender, self.index, self.pod, node, self.now)?;
        Some((node, text))
    }

    /// Returns true if kube-scheduler may know more nodes than the request has.
    fn may_be_sample(&self) -> bool {
        (MIN_SAMPLE..self.index.n_nodes()).contains(&self.names.len())
    }

    /// The suffix that makes kube-scheduler try the refused pod again soon, if the nodes are a sample and another node fits.
    fn retry_suffix(&self, resources: &ResourceDemand<'_>) -> Option<&'static str> {
        let fits_another = self.may_be_sample() && self.index.filter().fits_anywhere(resources);
        // The hash reads every name, so it is taken only if it is needed, and before the lock.
        let hash_of_nodes = if fits_another { hash_of_set(self.names) } else { 0 };
        let limit = SampleRetries::limit(self.index.n_nodes(), self.names.len());
        let n_openings = self.index.openings().all;
        let mut memory = self.extender.memory();
        if fits_another && memory.retries.is_sample(resources.uid, hash_of_nodes) {
            memory.retries.refuse(resources.uid, limit, n_openings, self.now)
        } else {
            memory.retries.forget(resources.uid);
            None
        }
    }
}

/// Keeps room for the pod on the best node, or on the only one that fits, and remembers the attempt.
fn keep_room(
    extender: &Extender,
    pod: &Pod,
    resources: &ResourceDemand<'_>,
    evaluation: &Evaluation,
    names: &[Cow<'_, str>],
    now: Instant,
) {
    let decision = Decision::of(pod);
    let first = evaluation.reported.first();
    let is_chosen_here = evaluation.reported.len() < evaluation.n_fitting;
    match first.and_then(|(idx, _)| names.get(*idx)) {
        Some(name) if is_chosen_here => extender.memory().attempts.send(resources.uid, name),
        // kube-scheduler chooses, so that the pod's return says nothing of a node.
        Some(_) => {}
        None => extender.memory().attempts.excuse(resources.uid),
    }
    let hinted = first.filter(|_| evaluation.is_ranked || evaluation.n_fitting == 1);
    match hinted.and_then(|(_, node)| *node) {
        Some(node) => extender.index.write().hint(node, resources, &decision, now),
        // kube-scheduler may try several placements of a PodGroup in turn, and come back to one whose room is kept.
        None if pod.is_in_gang() => extender
            .index
            .write()
            .refuse_member(resources.uid, &decision, now),
        None => {
            let is_outdated = {
                let index = extender.index.read();
                index.hints().is_hinted(resources.uid) && !index.hints().is_nominated(resources.uid)
            };
            // The result names several nodes or none, so that the hint of an earlier result says nothing any more. A nomination
            // is kube-scheduler's own decision, and stays.
            if is_outdated {
                extender.index.write().unhint(resources.uid);
            }
        }
    }
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
        let mut suffix = texts.suffix;
        for (idx, misfit) in &evaluation.misfits {
            let Some(name) = names.get(*idx) else { continue };
            // One text is enough to make the refusal differ.
            let suffix = if misfit.is_unknown_node {
                None
            } else {
                suffix.take()
            };
            let text = texts.of(name, *misfit);
            let text = suffix.map_or(Cow::Borrowed(text), |suffix| format!("{text}{suffix}").into());
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
    fn of(&self, name: &str, misfit: NodeMisfit) -> &str {
        match (self.uniform, self.nominated) {
            (Some(text), _) => text,
            (None, Some((node, text))) if node == name => text,
            (None, _) => misfit.reason.as_str(),
        }
    }

    /// Returns true if kube-scheduler may look for victims on a node.
    fn is_resolvable(&self, name: &str, misfit: NodeMisfit, misfit_nodes: MisfitNodes) -> bool {
        misfit.is_unknown_node
            || self.nominated.is_some_and(|(node, _)| node == name)
            || (misfit_nodes == MisfitNodes::Resolvable && misfit.reason.is_lack_of_room())
    }
}
