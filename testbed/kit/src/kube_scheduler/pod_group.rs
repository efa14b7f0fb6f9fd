//! The scheduling cycle of a `PodGroup`: members are placed one after the other in memory, and bound only if
//! enough of them have a place.
//!
//! As in kube-scheduler 1.36 (`schedule_one_podgroup.go`, `gangscheduling.go`), as far as an extender can see: each cycle
//! calls the extender for every member that is not bound, in the same order, with the members that it has placed counted,
//! and for no other pod. For a group with a topology constraint (`TopologyAwareWorkloadScheduling`) a cycle tries all members
//! among the nodes of one value of the label after the other, which are its placements.
//!
//! It leaves out preemption for whole groups (`WorkloadAwarePreemption`), and that an idle kube-scheduler does not wait out the
//! back-off of a member that was refused.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use kube::ResourceExt;
use kube::runtime::watcher;
use tokio::time::Instant;

use super::amounts::ResourceAmounts;
use super::cycle::CycleFailure;
use super::diagnosis::SchedulingDiagnosis;
use super::report::{Nomination, ReportContent, namespace};
use super::{Loop, SchedulingOutcome};

/// The message of a member that has a place while its group has not enough of them.
const TOO_FEW: &str = "pod group is unschedulable, waiting for minCount pods from a gang to be scheduled, one or more plugins asked \
                       to wait and no plugin rejected pod";
/// The message of a member that has a place while victims of its group have not ended.
const WAITING: &str = "pod group is unschedulable, pod group is waiting for preemption to complete";

pub(super) type GroupKey = (String, String);

/// The group that a pod names; `None` for a pod on its own.
pub(super) fn group_of(pod: &Pod) -> Option<GroupKey> {
    let group = pod.spec.as_ref()?.scheduling_group.as_ref()?;
    Some((namespace(pod).to_owned(), group.pod_group_name.clone()?))
}

#[derive(Debug, Default)]
pub(super) struct Groups(BTreeMap<GroupKey, PodGroup>);

impl Groups {
    /// Takes note of a group; returns true if it is new, so that its members may be tried.
    pub(super) fn update(&mut self, event: watcher::Event<PodGroup>) -> bool {
        let key = |group: &PodGroup| (group.namespace().unwrap_or_default(), group.name_any());
        match event {
            watcher::Event::Init => self.0.clear(),
            watcher::Event::InitApply(group) | watcher::Event::Apply(group) => {
                return self.0.insert(key(&group), group).is_none();
            }
            watcher::Event::InitDone => {}
            watcher::Event::Delete(group) => drop(self.0.remove(&key(&group))),
        }
        false
    }
}

#[derive(Debug)]
enum MemberResult {
    /// It fits this node.
    Place(String),
    /// It will fit this node, for which it is nominated, once its victims have ended.
    AfterVictims(String),
    Nowhere(Nomination),
    Error(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupVerdict {
    /// Members that have a place are bound.
    Bind,
    /// Enough members will have a place once the victims of preemption have ended; none is bound yet.
    AwaitVictims,
    /// Too few members have a place, or the cycle has placed none; no member is bound.
    TooFew,
    /// No member is bound after an error.
    Error,
}

impl MemberResult {
    /// The node on which the member has, or will have, a place.
    fn node(&self) -> Option<&str> {
        match self {
            Self::Place(node) | Self::AfterVictims(node) => Some(node),
            Self::Nowhere(_) | Self::Error(_) => None,
        }
    }
}

/// Decides the end of a cycle: it must have placed a member, and together with the `n_placed_before` members that had a place
/// before it at least `min_count` members must have one.
fn group_verdict<'a>(
    results: impl IntoIterator<Item = &'a MemberResult>,
    n_placed_before: usize,
    min_count: usize,
) -> GroupVerdict {
    let (mut n_placed_now, mut has_victims) = (0, false);
    for member in results {
        match member {
            MemberResult::Error(_) => return GroupVerdict::Error,
            MemberResult::Nowhere(_) => continue,
            MemberResult::AfterVictims(_) => has_victims = true,
            MemberResult::Place(_) => {}
        }
        n_placed_now += 1;
    }
    let is_enough = n_placed_now > 0 && n_placed_before + n_placed_now >= min_count;
    match (is_enough, has_victims) {
        (false, _) => GroupVerdict::TooFew,
        (true, true) => GroupVerdict::AwaitVictims,
        (true, false) => GroupVerdict::Bind,
    }
}

struct Member {
    uid: String,
    pod: Arc<Pod>,
    request: ResourceAmounts,
    diagnosis: SchedulingDiagnosis,
    result: MemberResult,
}

/// The nodes among which a cycle tries the members of a group.
struct GroupPlacement {
    /// The value of the label; empty without a topology constraint.
    name: String,
    nodes: BTreeSet<String>,
}

struct PlacementResult {
    placement: GroupPlacement,
    members: Vec<Member>,
    verdict: GroupVerdict,
}

impl PlacementResult {
    /// The members that have, or will have, a place.
    fn placed(&self) -> impl Iterator<Item = &Member> {
        self.members
            .iter()
            .filter(|member| member.result.node().is_some())
    }
}

/// The reason for which no member of a group is tried.
enum NoPlacement {
    /// No node has the label, or the value at which members are bound.
    NoNode,
    /// The members that are bound have no common value of the label.
    Error(String),
}

/// Schedules the members of a group; the queue has given out the member `popped`.
pub(super) async fn schedule_group(scheduling: &mut Loop, group: &GroupKey, popped: &str) {
    let is_member = |pod: &Pod| group_of(pod).as_ref() == Some(group);
    let members_in_queue = scheduling.queue.pods().filter(|(_, pod)| is_member(pod));
    let unbound: Vec<String> = members_in_queue.map(|(uid, _)| uid.clone()).collect();
    let mut placed: Vec<(String, Arc<Pod>)> = Vec::new();
    for (node, pods) in scheduling.cache.pods() {
        let members = pods.into_iter().filter(|pod| is_member(pod));
        placed.extend(members.map(|pod| (node.clone(), pod)));
    }
    let is_placed = |uid: &String| placed.iter().any(|(_, pod)| pod.uid().as_ref() == Some(uid));
    let n_all = placed.len() + unbound.iter().filter(|uid| !is_placed(uid)).count();
    // PreEnqueue of GangScheduling keeps members out of the active queue until the group has its least number of members.
    scheduling.queue.gate(popped, Instant::now());
    let Some(spec) = scheduling.groups.0.get(group).map(|group| group.spec.clone()) else {
        return;
    };
    // A group whose policy is `basic` needs no number of members.
    let gang = spec.scheduling_policy.gang;
    let min_count = gang.map_or(0, |gang| usize::try_from(gang.min_count).unwrap_or_default());
    if n_all < min_count {
        return;
    }
    let pods = scheduling.queue.start_all(&unbound);
    let constraints = spec
        .scheduling_constraints
        .and_then(|constraints| constraints.topology);
    let topology = constraints.iter().flatten().next();
    let placements = match placements(
        scheduling,
        topology.map(|topology| topology.key.as_str()),
        &placed,
    ) {
        Ok(placements) => placements,
        Err(reason) => return end_untried(scheduling, pods, &reason),
    };
    let result = try_placements(scheduling, &pods, placements, (placed.len(), min_count)).await;
    let Some(result) = result else { return };
    // Members that were not tried after the error of another one.
    let mut left = unbound;
    left.retain(|uid| !is_placed(uid) && result.members.iter().all(|member| member.uid != *uid));
    for member in result.members {
        end_member(scheduling, member, result.verdict);
    }
    for uid in left {
        scheduling.queue.retry(&uid, Instant::now());
    }
}

/// The placements of a group in the order in which they are tried (`TopologyPlacementGenerator`).
fn placements(
    scheduling: &mut Loop,
    topology_key: Option<&str>,
    placed: &[(String, Arc<Pod>)],
) -> Result<Vec<GroupPlacement>, NoPlacement> {
    let nodes = scheduling.cache.nodes();
    let Some(key) = topology_key else {
        let (name, nodes) = (String::new(), nodes.keys().cloned().collect());
        return Ok(vec![GroupPlacement { name, nodes }]);
    };
    let value_of = |node: &str| nodes.get(node)?.node.labels().get(key);
    let mut required: Option<&String> = None;
    for (node, pod) in placed {
        let value = value_of(node).filter(|value| required.is_none_or(|other| other == *value));
        let Some(value) = value else {
            let name = pod.name_any();
            let text = format!("cannot determine domain for already scheduled pods: pod {name}");
            return Err(NoPlacement::Error(text));
        };
        required = Some(value);
    }
    let mut by_value: BTreeMap<&String, BTreeSet<String>> = BTreeMap::new();
    for name in nodes.keys() {
        let value = value_of(name).filter(|value| required.is_none_or(|required| required == *value));
        if let Some(value) = value {
            by_value.entry(value).or_default().insert(name.clone());
        }
    }
    let mut placements = Vec::new();
    for (value, nodes) in by_value {
        let name = value.clone();
        placements.push(GroupPlacement { name, nodes });
    }
    // In a random order, as kube-scheduler ranges over a map.
    scheduling.cycle.ties.shuffle(&mut placements);
    if placements.is_empty() {
        return Err(NoPlacement::NoNode);
    }
    Ok(placements)
}

/// Tries the members in every placement. Returns the results of the best in which the group can be bound, or else of the first.
async fn try_placements(
    scheduling: &mut Loop,
    pods: &[(String, Arc<Pod>)],
    placements: Vec<GroupPlacement>,
    (n_placed_before, min_count): (usize, usize),
) -> Option<PlacementResult> {
    let mut results = Vec::new();
    for placement in placements {
        let result = try_placement(scheduling, pods, placement, (n_placed_before, min_count)).await;
        if result.verdict == GroupVerdict::Error {
            return Some(result);
        }
        results.push(result);
    }
    let best = best_placement(scheduling, &results, n_placed_before);
    // The results of a placement count as they were found: the extender is not asked again about the chosen one.
    let at = results
        .iter()
        .position(|result| Some(&result.placement.name) == best.as_ref());
    results.into_iter().nth(at.unwrap_or(0))
}

/// The name of the placement with the best score (`findBestPlacement`) of those in which the group can be bound.
fn best_placement(
    scheduling: &mut Loop,
    results: &[PlacementResult],
    n_placed_before: usize,
) -> Option<String> {
    let mut possible = Vec::new();
    for result in results
        .iter()
        .filter(|result| result.verdict != GroupVerdict::TooFew)
    {
        possible.push((result, n_placed_before + result.placed().count()));
    }
    let most = possible.iter().map(|(_, n_placed)| *n_placed).max()?;
    let mut scores = Vec::new();
    for (result, n_placed) in possible {
        let mut asked = ResourceAmounts::default();
        for member in result.placed() {
            asked.add(&member.request);
        }
        let (mut allocatable, mut used) = (ResourceAmounts::default(), ResourceAmounts::default());
        for name in &result.placement.nodes {
            if let Some(view) = scheduling.cache.nodes().get(name) {
                allocatable.add(&view.allocatable);
                used.add(&view.used);
            }
        }
        // PodGroupPodsCount and NodeResourcesFit have a weight of 1 each.
        let by_count = i64::try_from(100 * n_placed / most.max(1)).unwrap_or(0);
        let score = by_count + asked.most_allocated(&allocatable, &used);
        scores.push((result.placement.name.as_str(), score));
    }
    scheduling.cycle.select_host(&scores)
}

async fn try_placement(
    scheduling: &mut Loop,
    pods: &[(String, Arc<Pod>)],
    placement: GroupPlacement,
    (n_placed_before, min_count): (usize, usize),
) -> PlacementResult {
    let mut members = Vec::new();
    for (uid, pod) in pods {
        let member = find_place_of_member(scheduling, uid.clone(), Arc::clone(pod), &placement).await;
        let is_error = matches!(member.result, MemberResult::Error(_));
        // Assumed for the rest of the placement, so that the next member does not get the same room.
        if let Some(node) = member.result.node() {
            let request = member.request.clone();
            scheduling.cache.assume(&member.uid, node, &member.pod, request);
        }
        members.push(member);
        if is_error {
            break;
        }
    }
    let results = members.iter().map(|member| &member.result);
    let verdict = group_verdict(results, n_placed_before, min_count);
    let result = PlacementResult {
        placement,
        members,
        verdict,
    };
    // All members give back their room. Members that are to be bound are assumed again one by one at the end of the cycle.
    for member in result.placed() {
        scheduling.cache.release(&member.uid);
    }
    result
}

/// Ends the attempt of members that were not tried.
fn end_untried(scheduling: &mut Loop, pods: Vec<(String, Arc<Pod>)>, reason: &NoPlacement) {
    for (uid, pod) in pods {
        let diagnosis = SchedulingDiagnosis::default();
        match reason {
            NoPlacement::Error(message) => scheduling.fail(&uid, &pod, diagnosis, message.clone()),
            NoPlacement::NoNode => {
                let text = "no feasible placements found".to_owned();
                scheduling.queue.retry(&uid, Instant::now());
                scheduling.report(&uid, &pod, ReportContent::Unschedulable(text, Nomination::Clear));
                scheduling.record(&pod, diagnosis, SchedulingOutcome::NoFit);
            }
        }
    }
}

/// Finds a node of a placement for one member, by preemption if need be.
async fn find_place_of_member(
    scheduling: &mut Loop,
    uid: String,
    pod: Arc<Pod>,
    placement: &GroupPlacement,
) -> Member {
    let mut diagnosis = SchedulingDiagnosis::default();
    let request = ResourceAmounts::of_pod(&pod);
    let placed = match &request {
        Ok(request) => {
            let mut nodes = scheduling.nodes_for(&uid, &pod);
            nodes.retain(|name, _| placement.nodes.contains(name));
            scheduling
                .cycle
                .place(&pod, request, &nodes, &mut diagnosis)
                .await
        }
        Err(error) => Err(CycleFailure::Error(error.to_string())),
    };
    let result = match placed {
        Ok(node) => MemberResult::Place(node),
        Err(CycleFailure::Error(message)) => MemberResult::Error(message),
        Err(CycleFailure::NoFit) => match scheduling.preempt(&uid, &pod, &diagnosis).await {
            Nomination::Node(node) => MemberResult::AfterVictims(node),
            nomination => MemberResult::Nowhere(nomination),
        },
    };
    Member {
        uid,
        pod,
        request: request.unwrap_or_default(),
        diagnosis,
        result,
    }
}

/// Ends the attempt of one member after the verdict on its group: starts its binding, or reports why it waits.
fn end_member(scheduling: &mut Loop, member: Member, verdict: GroupVerdict) {
    let Member {
        uid,
        pod,
        request,
        diagnosis,
        result,
    } = member;
    let (text, nomination) = match (verdict, result) {
        (GroupVerdict::Bind, MemberResult::Place(node)) => {
            scheduling.cache.assume(&uid, &node, &pod, request);
            scheduling.nominated.remove(&uid);
            return scheduling.start_binding(uid, pod, node, diagnosis);
        }
        (_, MemberResult::Error(message)) => return scheduling.fail(&uid, &pod, diagnosis, message),
        (GroupVerdict::Error, _) => {
            let message = "failed to schedule other pod from a pod group".to_owned();
            return scheduling.fail(&uid, &pod, diagnosis, message);
        }
        (GroupVerdict::AwaitVictims, MemberResult::Place(node)) => {
            (WAITING.to_owned(), Nomination::Node(node))
        }
        (GroupVerdict::AwaitVictims, MemberResult::AfterVictims(node)) => {
            (diagnosis.message(), Nomination::Node(node))
        }
        (_, MemberResult::Nowhere(nomination)) => (diagnosis.message(), nomination),
        (_, MemberResult::Place(_) | MemberResult::AfterVictims(_)) => {
            (TOO_FEW.to_owned(), Nomination::Clear)
        }
    };
    scheduling.nominate(&uid, &pod, &nomination);
    scheduling.queue.retry(&uid, Instant::now());
    scheduling.report(&uid, &pod, ReportContent::Unschedulable(text, nomination));
    scheduling.record(&pod, diagnosis, SchedulingOutcome::NoFit);
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// `+` for a member with a place, `v` for one with victims, `-` for one without, `!` for an error.
    fn found(members: &str) -> Vec<MemberResult> {
        let one = |sign| match sign {
            '+' => MemberResult::Place("n".to_owned()),
            'v' => MemberResult::AfterVictims("n".to_owned()),
            '-' => MemberResult::Nowhere(Nomination::Keep),
            _ => MemberResult::Error("e".to_owned()),
        };
        members.chars().map(one).collect()
    }

    /// As Permit of `GangScheduling` in 1.36: a member passes once as many are assumed or bound as the group needs.
    #[rstest]
    #[case::all("+++", 0, 3, GroupVerdict::Bind)]
    #[case::too_few("++-", 0, 3, GroupVerdict::TooFew)]
    #[case::more_than_needed("-+++-", 0, 3, GroupVerdict::Bind)]
    #[case::bound_members_count("+-", 2, 3, GroupVerdict::Bind)]
    #[case::nothing_is_left_to_bind("--", 3, 3, GroupVerdict::TooFew)]
    #[case::victims("+v+", 0, 3, GroupVerdict::AwaitVictims)]
    #[case::victims_in_vain("v--", 0, 3, GroupVerdict::TooFew)]
    #[case::an_error_fails_all("++!", 0, 2, GroupVerdict::Error)]
    #[case::a_basic_group("-+-", 0, 0, GroupVerdict::Bind)]
    #[case::a_basic_group_without_room("--", 0, 0, GroupVerdict::TooFew)]
    fn the_verdict_of_a_pod_group_cycle(
        #[case] members: &str,
        #[case] n_before: usize,
        #[case] min_count: usize,
        #[case] expected: GroupVerdict,
    ) {
        assert_eq!(group_verdict(&found(members), n_before, min_count), expected);
    }
}
