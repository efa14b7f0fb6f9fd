//! `filter`: the nodes of the request that have room for the pod, or the best of them.
//!
//! The functions stand in the order in which a request passes them: parse, read the pod's demand, evaluate the nodes, word a
//! refusal, keep what later requests need, write the result. A filter writes nothing outside of this process. In memory it
//! keeps room for the pod on the node that its answer names (a *hint*), until the pod is bound or its time is up.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Instant;

use placement::{NodeId, Reason};
use proto::extender::{ExtenderFilterResult, FittingNodes};
use proto::pod_group::GroupDomain;

use super::evaluation::{Demand, Evaluation, FilterRequest, NodeMisfit, Ranker, evaluate_all};
use super::group::MemberFilter;
use super::preempt::awaited_victims_text;
use super::recheck::{PAUSE, PodRefusal, wait_for_update};
use super::requeue::{MIN_SAMPLE, SampleRetries};
use super::{Extender, RequestError, json, now};
use crate::accounting::PodFacts;
use crate::api_server::shorten;
use crate::bind::{PodId, is_pod_identity};
use crate::config::MisfitNodes;
use crate::index::room_rules::check_spec;
use crate::index::{
    Attempt, GroupOfPod, Index, MemberOutcome, MemberStep, ResourceDemand, hints, started_groups,
};
use crate::metrics::Metrics;

/// The text for every node of a request that may be a sample of the cluster's nodes: with a text for each reason, the counts in
/// the pod's condition would differ from sample to sample, and kube-scheduler tries the pod again after each change of those.
const NO_NODE: &str = "none of the nodes that were asked about has devices for the pod now; the scheduler's view of the pod says why";

/// The metrics label of a pod whose gang waits, as no node gives a reason for it.
const GANG_PAUSED_LABEL: &str = "gang_paused";

/// The result of a request.
#[derive(Debug)]
pub struct FilterResult {
    /// The JSON for kube-scheduler.
    pub json: Vec<u8>,
    outcome: Outcome,
    /// True if no room has opened since the pod's last refusal.
    is_repeated: bool,
    /// The pod's UID; `None` if the pod requests nothing that this scheduler counts.
    uid: Option<Box<str>>,
    /// The number of refused nodes for each reason, in the order of [`Reason::ALL`].
    n_refused: [u64; Reason::ALL.len()],
    /// The domain that the pod's group wishes, and the outcome for metrics, if room for the whole group was decided about.
    group_decision: Option<(GroupDomain, &'static str)>,
}

/// The outcome of a request, by what kube-scheduler does with the pod next.
#[derive(Debug)]
enum Outcome {
    Fits,
    /// No node fits, for a reason of the pod itself.
    Rejected,
    /// No node is offered for a while: the pod waits until its gang may have room again.
    GangPaused,
    /// No node has room. kube-scheduler tries the `PodGroup` again after its back-off, whatever the answer is.
    GroupRefused,
    /// No node has room. kube-scheduler tries the pod again after an event.
    Refused(PodRefusal),
    /// No node of a sample has room. kube-scheduler tries the pod again soon, since this suffix on one node's text makes the
    /// refusal differ from the last one.
    SampleRefused(PodRefusal, &'static str),
}

/// The request that is filtered, and the state that it is answered from.
struct Filter<'i, 'r> {
    extender: &'i Extender,
    index: &'i Index,
    request: &'r FilterRequest<'r>,
    /// Namespace and name of the pod's `PodGroup`.
    group: Option<&'r str>,
    /// The group of the pod if it has to be, or prefers to be, in one domain.
    with_wish: Option<&'r GroupOfPod>,
    now: Instant,
}

#[derive(Debug, Default)]
struct RefusalTexts<'a> {
    /// The text of each reason, with the amounts of the request; empty if some node fits.
    by_reason: Vec<(Reason, String)>,
    /// The text for every node; `None` if nodes have texts of their own.
    uniform: Option<&'a str>,
    /// The node that the pod is nominated to, and the text for it while pods that were evicted for the pod have not ended.
    nominated: Option<(&'a str, &'static str)>,
    /// By name, the texts for nodes that may be refused because of a mistake in their Device object: the texts say the mistake.
    mistaken: BTreeMap<&'a str, String>,
    /// A suffix for one node's text, so that the refusal differs from the last one.
    suffix: Option<&'static str>,
    /// True if the pod is refused for its group, which the eviction of pods for one member would not help.
    is_for_group: bool,
}

/// Answers a filter request. Rechecks a refusal once if the state may be stale.
pub(super) async fn answer_rechecked(extender: &Extender, body: &[u8]) -> Result<Vec<u8>, RequestError> {
    extender.check_leading()?;
    let request = FilterRequest::parse("filter", body, &extender.name_lists)?;
    let mut result = answer_once(extender, &request, now())?;
    if let Outcome::Refused(refusal) = &result.outcome
        // kube-scheduler has tried a refused pod again, and no room has opened here since. A first attempt needs no such cause,
        // but a watch that has not even shown the pod may lack the end of other pods before it.
        && (refusal.is_unseen || result.is_repeated)
        && extender.memory().rechecks_paused_until.is_none_or(|until| until <= now())
    {
        // No lock is held while waiting: the watch needs it to bring the update.
        let is_updated = wait_for_update(&extender.index, refusal).await;
        // The wait is long enough for another replica to have taken over.
        extender.check_leading()?;
        result = answer_once(extender, &request, now())?;
        // The watch is not behind, or is too far behind: the next refusals would be held back for nothing too.
        if !is_updated {
            extender.memory().rechecks_paused_until = Some(now() + PAUSE);
        }
        extender.metrics.count_recheck(result.outcome.refusal().is_none());
    }
    result.count(&extender.metrics, now());
    Ok(result.json)
}

/// Answers a filter request from the state as it is, without a recheck.
///
/// # Errors
/// The body is not a filter request, or the watches have not synced.
pub fn answer(extender: &Extender, body: &[u8], now: Instant) -> Result<FilterResult, RequestError> {
    let request = FilterRequest::parse("filter", body, &extender.name_lists)?;
    answer_once(extender, &request, now)
}

/// Evaluates the named nodes for a pod, words the refusals, applies the effects in memory (hint, counters), and writes the
/// result.
fn answer_once(
    extender: &Extender,
    request: &FilterRequest<'_>,
    now: Instant,
) -> Result<FilterResult, RequestError> {
    let pod = &request.pod;
    let group = Attempt::group_of(pod);
    end_hints(extender, group.as_deref(), now);
    // Whole nodes may be an autoscaler's, which do not exist: no link between their devices is known, as a group's room needs.
    let with_wish = if request.whole_nodes.is_some() {
        None
    } else {
        begin_group_cycle(extender, request, now)
    };
    let index = extender.index.read();
    index.ready().map_err(RequestError::NotReady)?;
    let filter = Filter {
        extender,
        index: &index,
        request,
        group: group.as_deref(),
        with_wish: with_wish.as_ref(),
        now,
    };
    let facts = PodFacts::of(pod, index.names());
    let demand = filter.demand(facts.as_ref());
    let (evaluation, member, decision) = filter.evaluate(&demand);
    let outcome = filter.outcome(&demand, &evaluation);
    let texts = filter.refusal_texts(&demand, &evaluation, &outcome);
    // Read under the same lock as the evaluation: room that opens after it was not taken into account.
    let openings = index.openings();
    let (namespace, name) = (pod.metadata.namespace.as_deref(), pod.metadata.name.as_deref());
    // Any client may have sent the request: state is kept only for an identity that the API server could have given to a pod.
    let can_exist = is_pod_identity(pod.uid(), namespace.unwrap_or_default(), name.unwrap_or_default());
    if extender.evicts_for_room.is_some() && can_exist {
        filter.note_for_room(&demand, &evaluation, &outcome);
    }
    // The facts of a pod that the watch shows are newer than those of any request.
    let unseen_facts = facts.filter(|_| index.pod(pod.uid()).is_none());
    // Both locks are released before `keep_room`, which takes them itself.
    drop(index);

    let mut is_repeated = false;
    if can_exist {
        let mut memory = extender.memory();
        if let Some(facts) = unseen_facts {
            memory.facts.insert(pod.uid(), facts);
        }
        if outcome.waits_for_room() {
            is_repeated = memory.waiting.refuse(pod.uid(), openings, now);
        }
        drop(memory);
        if let Some(resources) = demand.resources() {
            let member = with_wish.as_ref().zip(member);
            keep_room(extender, request, resources, (&evaluation, member), now);
        }
    }
    let is_counted = can_exist && (demand.rejection().is_some() || demand.has_devices());
    Ok(FilterResult {
        // Written once the room is kept, as kube-scheduler filters the next pod as soon as it has the result.
        json: write_result(request, &evaluation, &texts, extender.misfit_nodes),
        outcome,
        is_repeated,
        uid: is_counted.then(|| pod.uid().into()),
        n_refused: match &demand {
            // With a binding under way, or while the pod's gang waits, the reasons of the nodes are placeholders.
            Demand::AssumedOn(_) | Demand::GangPaused => [0; Reason::ALL.len()],
            Demand::Nothing | Demand::Resources(_) | Demand::Rejected(_) => evaluation.n_refused,
        },
        group_decision: with_wish.map(|group| group.wish.domain).zip(decision),
    })
}

impl Outcome {
    /// The refusal for want of room of a pod that kube-scheduler tries by itself, and not with its `PodGroup`.
    const fn refusal(&self) -> Option<&PodRefusal> {
        match self {
            Self::Refused(refusal) | Self::SampleRefused(refusal, _) => Some(refusal),
            Self::Fits | Self::Rejected | Self::GangPaused | Self::GroupRefused => None,
        }
    }

    /// Returns true if the pod has to be tried again once room opens, even where kube-scheduler sees no event.
    const fn waits_for_room(&self) -> bool {
        matches!(self, Self::GangPaused) || self.refusal().is_some()
    }
}

/// Ends hints whose time is up, and those of `PodGroup`s other than `group` whose scheduling cycle ended without binds; then
/// keeps room for the missing members of groups that have started in part.
fn end_hints(extender: &Extender, group: Option<&str>, now: Instant) {
    // Most filters find nothing to do, and need no write lock.
    let (is_due, is_in_vain) = {
        let index = extender.index.read();
        let is_due = index.is_due(now) || index.has_changed_groups();
        (is_due, index.hints().has_gang_cycles_in_vain(group))
    };
    // Another filter may have done this between the two locks; to do it twice changes nothing.
    if is_due || is_in_vain {
        let mut index = extender.index.write();
        index.tick(now);
        hints::end_gang_cycles(&mut index, group);
        started_groups::keep_room(&mut index, now);
    }
}

/// The pod's group, if it wishes to be in one domain (a node, or linked GPUs). Frees the room of the group's last scheduling
/// cycle if this pod begins another.
fn begin_group_cycle(extender: &Extender, request: &FilterRequest<'_>, now: Instant) -> Option<GroupOfPod> {
    let FilterRequest { pod, names, .. } = request;
    if !pod.is_in_gang() {
        return None;
    }
    let (group, has_to_choose) = {
        let index = extender.index.read();
        // A member without devices, such as a launcher, needs no place, and begins no cycle.
        PodFacts::of(pod, index.names()).filter(|facts| index.requests_devices(facts))?;
        let mut group = index.group_of(pod)?;
        // Members may differ in their wishes: that of the first one of a cycle counts.
        if let Some(wish) = index.hints().wish_in_cycle(&group, pod.uid()) {
            group.wish = wish;
        }
        let has_to_choose = index.hints().step(&group, pod.uid()) == MemberStep::Choose;
        (group, has_to_choose)
    };
    if group.wish.domain == GroupDomain::Any {
        return None;
    }
    if has_to_choose {
        let is_asked = |node: &str| names.iter().any(|name| name == node);
        let mut index = extender.index.write();
        hints::begin_group_cycle(&mut index, &group, pod.uid(), is_asked, now);
    }
    Some(group)
}

impl<'r> Filter<'_, 'r> {
    /// The demand of the pod, or the reason for which all nodes, or all but one, refuse it whatever room they have.
    fn demand(&self, facts: Option<&PodFacts>) -> Demand<'r> {
        let FilterRequest { pod, names, .. } = self.request;
        // A bind has chosen devices there, and its binding may have been written: the pod can go nowhere else.
        if let Some(node) = self.index.assumed_node(pod.uid())
            && names.iter().any(|name| name == node)
        {
            return Demand::AssumedOn(node.into());
        }
        let demand = Demand::of(self.index, pod, facts);
        // The text of an invalid request is more precise than that of a rule of the webhooks.
        if demand.rejection().is_some() {
            return demand;
        }
        // A cluster without the webhooks gets their refusals here.
        if let Some(rule) = self.extender.rules.refusal_of_filter(pod) {
            return Demand::Rejected(shorten(&rule).into());
        }
        // A pod whose hint expired gets no other hint for a while. A member of a gang needs one, or it could be sent to the
        // devices of another member, so that no node is offered to it. The hints of a cycle of a PodGroup expire
        // together, by rules of their own.
        let is_paused = self.group.is_none()
            && self.needs_hint(&demand)
            && self.index.hints().is_resting(pod.uid(), self.now);
        if is_paused { Demand::GangPaused } else { demand }
    }

    /// Returns true if room has to be kept for the pod: it is a member of a gang and requests devices, and kube-scheduler may
    /// filter other members before it binds this one.
    fn needs_hint(&self, demand: &Demand<'_>) -> bool {
        self.request.pod.is_in_gang() && demand.has_devices()
    }

    /// Evaluates all nodes. The number of reported nodes follows from the pod and the configuration. For a member of a group with
    /// a wish, returns also its place for later requests, and the metrics label of a decision for the whole group.
    fn evaluate(&self, demand: &Demand<'_>) -> (Evaluation<'r>, Option<MemberOutcome>, Option<&'static str>) {
        let Some(resources) = demand.resources() else {
            return (evaluate_all(self.index, demand, self.request, None), None, None);
        };
        let pod = &self.request.pod;
        let is_gang_member = self.needs_hint(demand);
        let n_reported = match self.extender.answer_nodes.most() {
            // Room has to be kept for each member of a gang before the next is filtered, so the answer names one node.
            _ if is_gang_member => Some(1),
            // kube-scheduler weighs the pod's preferences, and has to do so among all nodes.
            _ if pod.spec.has_preferences() => None,
            n_nodes => n_nodes,
        };
        let mut memory = self.extender.memory();
        let failed = memory
            .avoided_nodes
            .count_return(pod.uid(), is_gang_member, self.now);
        drop(memory);
        let ranker = Ranker {
            index: self.index,
            spec: &pod.spec,
            failed: &failed,
        };
        let (mut outcome, mut decision) = (None, None);
        if is_gang_member && let Some(group) = self.with_wish {
            let member = MemberFilter {
                index: self.index,
                request: self.request,
                group,
                demand,
                resources,
            };
            let (evaluation, outcome_to_keep, decided) = member.evaluate(&ranker);
            (outcome, decision) = (Some(outcome_to_keep), decided);
            if let Some(evaluation) = evaluation {
                return (evaluation, outcome, decision);
            }
        }
        let best = n_reported.map(|n| (ranker, n));
        let evaluation = evaluate_all(self.index, demand, self.request, best);
        (evaluation, outcome, decision)
    }

    /// The outcome of the request by the evaluation of all nodes. Notes a refusal for a sample of the nodes.
    fn outcome(&self, demand: &Demand<'_>, evaluation: &Evaluation<'_>) -> Outcome {
        let refused = match demand {
            Demand::Rejected(_) => return Outcome::Rejected,
            Demand::GangPaused => return Outcome::GangPaused,
            Demand::Resources(resources) if evaluation.n_fitting == 0 => resources,
            Demand::Nothing | Demand::Resources(_) | Demand::AssumedOn(_) => return Outcome::Fits,
        };
        if self.group.is_some() {
            return Outcome::GroupRefused;
        }
        let refusal = PodRefusal {
            uid: refused.uid.into(),
            is_unseen: !self.index.is_shown(refused.uid),
            n_openings: self.index.openings().all,
        };
        match self.retry_suffix(refused) {
            Some(suffix) => Outcome::SampleRefused(refusal, suffix),
            None => Outcome::Refused(refusal),
        }
    }

    /// The texts for the nodes that do not fit.
    fn refusal_texts<'d>(
        &self,
        demand: &'d Demand<'_>,
        evaluation: &'d Evaluation<'r>,
        outcome: &Outcome,
    ) -> RefusalTexts<'d>
    where
        'r: 'd,
    {
        let uniform = demand.rejection().or(evaluation.group_text.as_deref());
        let (Some(resources), 0) = (demand.resources(), evaluation.n_fitting) else {
            return RefusalTexts {
                uniform,
                ..RefusalTexts::default()
            };
        };
        let nominated = self.request.pod.nominated_node().and_then(|node| {
            let text = awaited_victims_text(self.extender, self.index, &self.request.pod, node, self.now)?;
            Some((node, text))
        });
        let suffix = match outcome {
            Outcome::SampleRefused(_, suffix) => Some(*suffix),
            _ => None,
        };
        let is_constant = nominated.is_none() && suffix.is_none() && self.may_be_sample();
        RefusalTexts {
            by_reason: texts_by_reason(resources, evaluation),
            uniform: uniform.or(is_constant.then_some(NO_NODE)),
            nominated,
            mistaken: self.mistaken_texts(resources, evaluation),
            suffix,
            is_for_group: evaluation.group_text.is_some(),
        }
    }

    /// The texts of [`RefusalTexts::mistaken`]. They name no node: an operator's partition table may be that of many nodes, and
    /// kube-scheduler counts equal texts.
    fn mistaken_texts(
        &self,
        resources: &ResourceDemand<'_>,
        evaluation: &Evaluation<'r>,
    ) -> BTreeMap<&'r str, String> {
        let filter = self.index.filter();
        let mut texts = BTreeMap::new();
        for (idx, misfit) in &evaluation.misfits {
            let name = self.request.names.get(*idx);
            if filter.problem_behind(name, misfit.reason).is_some() {
                texts.insert(name, filter.refusal(name, misfit.reason, resources));
            }
        }
        texts
    }

    /// Notes for `make_room` the nodes that refuse the pod for want of room on devices; forgets a pod that evictions cannot help.
    fn note_for_room(&self, demand: &Demand<'_>, evaluation: &Evaluation<'r>, outcome: &Outcome) {
        let pod = &self.request.pod;
        match outcome {
            // kube-scheduler asks about the nominated node alone first: the nodes that were noted before stay.
            Outcome::Refused(_) | Outcome::SampleRefused(..) if pod.nominated_node().is_some() => return,
            // A sample's refusal counts for its nodes: kube-scheduler's own filters may refuse the nodes that have room.
            Outcome::Refused(_) | Outcome::SampleRefused(..)
                if demand.has_devices() && check_spec(pod).is_ok() => {}
            _ => return self.extender.memory().refused.forget(pod.uid()),
        }
        let nodes = self.request.names.nodes(self.index);
        // No node fits, so that every place of the request has its misfit.
        let mut lacking: Vec<NodeId> = Vec::new();
        for (place, node) in nodes.iter() {
            let misfit = evaluation.misfits.get(*place as usize);
            if misfit.is_some_and(|(_, misfit)| misfit.reason.is_lack_of_room()) {
                lacking.extend(*node);
            }
        }
        if lacking.is_empty() {
            // The end of no pod helps.
            return self.extender.memory().refused.forget(pod.uid());
        }
        let id = PodId {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            name: pod.metadata.name.clone().unwrap_or_default(),
            uid: pod.uid().to_owned(),
        };
        let created = pod.metadata.creation_timestamp.as_ref();
        let created = created.map_or(i64::MAX, |created| created.0.as_second());
        let mut memory = self.extender.memory();
        let waiting = (id, pod.priority(), created);
        memory.refused.refuse(waiting, lacking.into_iter(), self.now);
    }

    /// Returns true if the request may name a sample of the cluster's nodes: kube-scheduler may know more.
    fn may_be_sample(&self) -> bool {
        (MIN_SAMPLE..self.index.n_nodes()).contains(&self.request.names.len())
    }

    /// The suffix that makes kube-scheduler try the refused pod again soon, if it asked about a part of its nodes only (a
    /// sample) and another node fits.
    fn retry_suffix(&self, resources: &ResourceDemand<'_>) -> Option<&'static str> {
        if !self.may_be_sample() || !self.index.filter().fits_anywhere(resources) {
            self.extender.memory().retries.forget(resources.uid);
            return None;
        }
        // The hash reads every name, so it is taken before the lock.
        let hash_of_names = self.request.hash_of_names();
        let limit = SampleRetries::limit(self.index.n_nodes(), self.request.names.len());
        let mut memory = self.extender.memory();
        if memory.retries.is_sample(resources.uid, hash_of_names) {
            let n_openings = self.index.openings().all;
            memory.retries.refuse(resources.uid, limit, n_openings, self.now)
        } else {
            memory.retries.forget(resources.uid);
            None
        }
    }
}

/// The text of each reason for which a node is refused: nodes share them, and a cluster may have thousands.
fn texts_by_reason(resources: &ResourceDemand<'_>, evaluation: &Evaluation<'_>) -> Vec<(Reason, String)> {
    let mut texts = Vec::new();
    for (reason, n_nodes) in Reason::ALL.into_iter().zip(evaluation.n_refused) {
        if n_nodes > 0 {
            texts.push((reason, resources.refusal(reason)));
        }
    }
    texts
}

/// Keeps room for the pod on the best node, or on the only one that fits, and notes the node that the pod is sent to.
fn keep_room(
    extender: &Extender,
    request: &FilterRequest<'_>,
    resources: &ResourceDemand<'_>,
    (evaluation, member): (&Evaluation<'_>, Option<(&GroupOfPod, MemberOutcome)>),
    now: Instant,
) {
    let (uid, attempt) = (resources.uid, Attempt::of(&request.pod));
    let first = evaluation.reported.first();
    match first {
        None => extender.memory().avoided_nodes.end_count(uid),
        Some(first) if evaluation.reported.len() < evaluation.n_fitting => {
            extender.memory().avoided_nodes.note_sent(uid, first.name);
        }
        // kube-scheduler chooses among all fitting nodes, so that a return of the pod would say nothing of a single node.
        Some(_) => {}
    }
    if let Some((group, outcome)) = member {
        let is_kept = !matches!(outcome, MemberOutcome::Unplaced(_));
        let mut index = extender.index.write();
        hints::note_outcome(&mut index, group, outcome, resources, &attempt, now);
        if is_kept {
            return;
        }
    }
    let is_best = evaluation.is_ranked || evaluation.n_fitting == 1;
    if is_best && let Some(node) = first.and_then(|first| first.node) {
        hints::hint(&mut extender.index.write(), node, resources, &attempt, now);
        return;
    }
    // kube-scheduler may try several placements of a PodGroup in turn, and come back to one whose room is kept.
    if request.pod.is_in_gang() {
        hints::note_member(&mut extender.index.write(), uid, &attempt, false, now);
        return;
    }
    let index = extender.index.read();
    let is_outdated = index.hints().is_hinted(uid) && !index.hints().is_nominated(uid);
    drop(index);
    // The result names several nodes or none, so that the room kept by an earlier result serves no pod. The room of a nomination,
    // which is kube-scheduler's own decision, stays.
    if is_outdated {
        extender.index.write().unhint(uid);
    }
}

/// Writes the result in the form of the request: node names, or whole nodes as they came.
fn write_result(
    request: &FilterRequest<'_>,
    evaluation: &Evaluation<'_>,
    texts: &RefusalTexts<'_>,
    misfit_nodes: MisfitNodes,
) -> Vec<u8> {
    let mut result = ExtenderFilterResult::default();
    let reported = evaluation.reported.iter();
    if let Some(nodes) = &request.whole_nodes {
        let items = reported.filter_map(|fit| nodes.get(fit.idx)).collect();
        result.nodes = Some(FittingNodes { items });
    } else {
        result.node_names = Some(reported.map(|fit| fit.name).collect());
    }
    // kube-scheduler uses the reasons only if no node fits.
    if evaluation.reported.is_empty() {
        let mut suffix = texts.suffix;
        for (idx, misfit) in &evaluation.misfits {
            let name = request.names.get(*idx);
            let text = texts.of(name, *misfit);
            // A suffix on the text of one node is enough: the whole refusal then differs from the last one, and kube-scheduler
            // tries the pod again.
            let text = match suffix.take() {
                Some(suffix) => format!("{text}{suffix}").into(),
                None => Cow::Borrowed(text),
            };
            if texts.is_resolvable(name, *misfit, misfit_nodes) {
                result.failed_nodes.push((name, text));
            } else {
                result.failed_and_unresolvable_nodes.push((name, text));
            }
        }
    }
    json(&result)
}

impl RefusalTexts<'_> {
    /// The text for a node.
    fn of(&self, name: &str, misfit: NodeMisfit) -> &str {
        match (self.uniform, self.nominated) {
            (Some(text), _) => text,
            (None, Some((node, text))) if node == name => text,
            (None, _) => {
                let of_reason = self.by_reason.iter().find(|(reason, _)| *reason == misfit.reason);
                let text = self.mistaken.get(name).or(of_reason.map(|(_, text)| text));
                text.map_or(misfit.reason.as_str(), String::as_str)
            }
        }
    }

    /// Returns true if kube-scheduler may look for victims on a node.
    fn is_resolvable(&self, name: &str, misfit: NodeMisfit, misfit_nodes: MisfitNodes) -> bool {
        // kube-scheduler would evict further pods for a pod whose nominated node is unresolvable.
        let is_nominated = self.nominated.is_some_and(|(node, _)| node == name);
        let is_out_of_room =
            misfit_nodes == MisfitNodes::Resolvable && misfit.reason.is_lack_of_room() && !self.is_for_group;
        misfit.is_unknown_node || is_nominated || is_out_of_room
    }
}

impl FilterResult {
    /// Counts the refusals in metrics, and notes there whether the pod got a node.
    fn count(&self, metrics: &Metrics, now: Instant) {
        if let Some(uid) = &self.uid {
            metrics.note_filter(uid, self.refusal_label(), now);
        }
        if let Some((domain, outcome)) = self.group_decision {
            metrics.count_group_decision(domain.as_str(), outcome);
        }
        if let Outcome::SampleRefused(..) = self.outcome {
            metrics.count_sample_retry();
        }
        for (reason, n_nodes) in Reason::ALL.into_iter().zip(self.n_refused) {
            if n_nodes > 0 {
                metrics.count_refused_nodes(reason, n_nodes);
            }
        }
    }

    /// The metrics label of the reason that most nodes have, if no node fits.
    fn refusal_label(&self) -> Option<&'static str> {
        match self.outcome {
            Outcome::Fits => return None,
            Outcome::GangPaused => return Some(GANG_PAUSED_LABEL),
            _ => {}
        }
        let (mut reason, mut n_most) = (Reason::InvalidRequest, 0);
        for (nth, n_nodes) in Reason::ALL.into_iter().zip(self.n_refused) {
            // Nodes without GPUs say nothing about the pod, so that their reason counts only if there is no other.
            let weight = match nth {
                Reason::NoDevice => n_nodes.min(1),
                _ => n_nodes.saturating_mul(2),
            };
            if weight > 0 && weight >= n_most {
                (reason, n_most) = (nth, weight);
            }
        }
        Some(reason.label())
    }
}
