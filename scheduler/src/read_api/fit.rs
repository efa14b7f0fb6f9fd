//! `POST fit`: the number of equal pods that fit now, tried on copies of nodes.
//!
//! A pod counts if the [`verdict`](crate::verdict) on a node is yes in all its parts. Each copy is made under a short read lock
//! when the first pod is tried on the node. Pods that have to share a domain are placed as the filter places a group.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use placement::{
    GroupRequest, GroupRoom, GroupSearch, Hints, MAX_GROUP, NodeCopy, NodeId, Placement, Reason, Score,
};
use proto::annotation::AnnotationError;
use proto::pod::{Pod, PodStatus};
use proto::pod_group::{GroupDomain, GroupWish};
use proto::read_api::{FitAnswer, FitPlacement, FitRequest, MAX_ADDED_NODES, MAX_REPLICAS, VERSION};

use crate::accounting::PodFacts;
use crate::index::view::asked;
use crate::index::{Index, ResourceDemand, Shared};
use crate::kube_scheduler::{self, NodeFacts, NodeRefusal, PodRules, RequestSums};
use crate::verdict::{Asker, NominatedRequests, Refusal, evaluate, words};

/// Nodes that are evaluated under one read lock: a watch that waits to write holds up filters, too.
const NODES_PER_LOCK: usize = 64;

struct FitCandidate {
    facts: NodeFacts,
    /// The requests of the pods on the node and of those that were placed there.
    requested: RequestSums,
    /// The node in the fleet; `None` if its devices are not known, and the pod needs only such as kube-scheduler counts itself.
    node: Option<NodeId>,
    /// The copy of the node on which pods are placed; `None` until the first pod is tried on it.
    copy: Option<NodeCopy>,
    placed: FitPlacement,
}

/// The number of equal pods that fit, and their places; else the fault of the request.
pub fn fit(index: &Shared<Index>, request: &FitRequest) -> Result<FitAnswer, String> {
    check_limits(request)?;
    let mut answer = FitAnswer {
        api_version: VERSION.to_owned(),
        replicas: request.replicas,
        ..FitAnswer::default()
    };
    // A manifest that was read back from a cluster may be of a pod that runs, and have its node and status.
    let mut pod = Pod::clone(&request.pod);
    pod.spec.node_name = None;
    pod.status = PodStatus::default();
    let facts = PodFacts::of(&pod, index.read().names());
    let Some(facts) = facts.filter(|facts| index.read().requests_devices(facts)) else {
        answer.invalid = Some("the pod asks for no device that gpushare schedules".to_owned());
        return Ok(answer);
    };
    answer.asked = asked(&facts.request, index.read().common_unit());
    match domain(request) {
        Ok(domain) => answer.domain = domain,
        Err(error) => {
            answer.invalid = Some(error.to_string());
            return Ok(answer);
        }
    }
    if answer.domain != GroupDomain::Any && group_size(request) > MAX_GROUP {
        return Err(format!(
            "replicas: {} is more than {MAX_GROUP}, the most pods of one domain; ask for fewer, or with the domain any",
            request.replicas
        ));
    }
    let rules = PodRules::of(&pod);
    // In a statement of its own, so that the lock ends: a second read within it would wait for a writer that waits for the first.
    let demand = index.read().demand("", &facts);
    match demand {
        Ok(Some(demand)) => Search::new(index, &demand, &rules).run(request, answer),
        Ok(None) => Ok(answer),
        Err(rule) => {
            answer.invalid = Some(rule.to_string());
            Ok(answer)
        }
    }
}

/// Checks that a request asks for no more pods and added nodes than one answer may cost.
fn check_limits(request: &FitRequest) -> Result<(), String> {
    let mut n_added = 0_u32;
    for nodes in &request.add_nodes {
        n_added = n_added.saturating_add(nodes.count);
    }
    let limits = [
        ("replicas", request.replicas, MAX_REPLICAS),
        ("addNodes", n_added, MAX_ADDED_NODES),
    ];
    for (field, asked, most) in limits {
        if asked > most {
            return Err(format!(
                "{field}: {asked} is more than {most}, the most of one question"
            ));
        }
    }
    Ok(())
}

/// The domain that all pods have to share: that of the request, or else that of the pod's annotation.
fn domain(request: &FitRequest) -> Result<GroupDomain, AnnotationError> {
    if let Some(domain) = request.domain {
        return Ok(domain);
    }
    let wish = GroupWish::read(request.pod.metadata.annotations.as_ref())?;
    Ok(wish.unwrap_or_default().domain)
}

fn group_size(request: &FitRequest) -> usize {
    usize::try_from(request.replicas).unwrap_or(usize::MAX)
}

/// The search for places: one pod after the other, each on the node that the scheduler's policy ranks first.
struct Search<'a> {
    index: &'a Shared<Index>,
    demand: &'a ResourceDemand<'a>,
    rules: &'a PodRules,
    nominated: NominatedRequests,
    candidates: Vec<FitCandidate>,
    /// The candidates with room, by score and index in `candidates`; of equal scores the lowest index comes first.
    by_score: BinaryHeap<(Score, Reverse<usize>)>,
    refusals: BTreeMap<String, u32>,
    /// The indices of candidates in the order in which they got their first pod.
    used: Vec<usize>,
}

impl<'a> Search<'a> {
    fn new(index: &'a Shared<Index>, demand: &'a ResourceDemand<'a>, rules: &'a PodRules) -> Self {
        Self {
            index,
            demand,
            rules,
            nominated: index.read().nominated_requests("", rules.priority),
            candidates: Vec::new(),
            by_score: BinaryHeap::new(),
            refusals: BTreeMap::new(),
            used: Vec::new(),
        }
    }

    fn run(mut self, request: &FitRequest, answer: FitAnswer) -> Result<FitAnswer, String> {
        self.add_existing();
        for nodes in &request.add_nodes {
            self.add_copies(&nodes.like, nodes.count)?;
        }
        Ok(match answer.domain {
            GroupDomain::Any => self.place_apart(request, answer),
            GroupDomain::Node => self.place_together(placement::SharedDomain::Node, request, answer),
            GroupDomain::Link => self.place_together(placement::SharedDomain::Link, request, answer),
        })
    }

    fn place_apart(mut self, request: &FitRequest, mut answer: FitAnswer) -> FitAnswer {
        while answer.fitting < request.replicas
            && let Some((_, Reverse(idx))) = self.by_score.pop()
        {
            match self.try_place(idx) {
                Ok(()) => answer.fitting += 1,
                // The candidate is full, or its node has changed since it was ranked.
                Err(refusal) => self.count_full(idx, &refusal),
            }
        }
        if answer.fitting < request.replicas {
            answer.blocked = self.refusals;
        }
        for idx in self.used {
            if let Some(candidate) = self.candidates.get_mut(idx) {
                answer.placements.push(std::mem::take(&mut candidate.placed));
            }
        }
        answer
    }

    /// Places all pods in the domain with the best score, or finds the most pods for which one has room.
    fn place_together(
        mut self,
        domain: placement::SharedDomain,
        request: &FitRequest,
        mut answer: FitAnswer,
    ) -> FitAnswer {
        let n_members = group_size(request);
        let group = GroupRequest {
            member: self.demand.devices(),
            n_members,
            n_in_link_group: n_members,
            domain,
            bound: &[],
            policies: self.demand.policies,
        };
        // A workload may have no pods, and the engine finds room for one at least.
        if n_members == 0 {
            return answer;
        }
        let mut best: Option<(Score, FitPlacement)> = None;
        let mut most = 0;
        // For all nodes together, as in a filter request.
        let mut search = GroupSearch::default();
        // From the node that ranks first for one pod on, as a filter request does: of equal scores the first wins.
        while let Some((_, Reverse(idx))) = self.by_score.pop() {
            match self.find_room(idx, &group, &mut search) {
                Ok((score, placement)) => {
                    answer.nodes_with_room += 1;
                    if best.as_ref().is_none_or(|(of_best, _)| *of_best < score) {
                        best = Some((score, placement));
                    }
                }
                Err(n_fitting) => most = most.max(n_fitting),
            }
        }
        if let Some((_, placement)) = best {
            answer.fitting = request.replicas;
            answer.placements.push(placement);
        } else {
            answer.fitting = u32::try_from(most).unwrap_or(u32::MAX);
            answer.blocked = self.refusals;
        }
        answer
    }

    fn add_existing(&mut self) {
        let mut names = self.index.read().node_names();
        // Sorted, so that the same request gets the same answer: of equal scores the first name wins.
        names.sort_unstable();
        let (asker, shared) = (self.asker(), self.index);
        for chunk in names.chunks(NODES_PER_LOCK) {
            let index = shared.read();
            let mut batch = index.filter().batch(self.demand);
            for name in chunk {
                let Some(facts) = index.node_facts(name) else {
                    continue;
                };
                match evaluate(&index, name, asker, &self.nominated, Some(&mut batch)) {
                    Ok(accepted) => {
                        let mut requested = index.requests().on(name).cloned().unwrap_or_default();
                        if let Some(nominated) = self.nominated.get(name) {
                            requested = requested.plus(nominated);
                        }
                        let candidate = FitCandidate {
                            facts: facts.clone(),
                            requested,
                            node: accepted.node,
                            copy: None,
                            placed: nothing_placed(name.to_string()),
                        };
                        self.add_candidate(candidate, accepted.score);
                    }
                    Err(refusal) => self.count_refusal(&index, name, &refusal),
                }
            }
        }
    }

    /// Adds `count` copies of the node `like`, none of its devices closed, and of its pods those of `DaemonSet`s alone.
    fn add_copies(&mut self, like: &str, count: u32) -> Result<(), String> {
        let shared = self.index;
        let requested = shared.read().requests().of_tied_pods_on(like);
        for number in 1..=count {
            // The lock is taken for each copy: a thousand copies would hold it too long.
            let index = shared.read();
            let fleet = index.fleet();
            let node = fleet.node_id(like);
            let (Some(facts), Some(mut copy)) = (
                index.node_facts(like),
                node.and_then(|node| fleet.copy_empty_node(node)),
            ) else {
                return Err(format!(
                    "addNodes: there is no node {like:?} with devices; name a node whose kind is to be added"
                ));
            };
            copy.open_gpus();
            let candidate = FitCandidate {
                facts: facts.clone(),
                requested: requested.clone(),
                node,
                copy: Some(copy),
                placed: nothing_placed(format!("{like}+{number}")),
            };
            match score(&index, self.rules, self.demand, &candidate) {
                Ok(score) => self.add_candidate(candidate, score),
                Err(refusal) => self.count_refusal(&index, like, &refusal),
            }
        }
        Ok(())
    }

    fn asker(&self) -> Asker<'a> {
        Asker {
            rules: self.rules,
            demand: Ok(self.demand),
        }
    }

    fn add_candidate(&mut self, candidate: FitCandidate, score: Score) {
        self.by_score.push((score, Reverse(self.candidates.len())));
        self.candidates.push(candidate);
    }

    /// Counts a candidate that takes no further pod, under the reasons of its refusal.
    fn count_full(&mut self, idx: usize, refusal: &Refusal) {
        if let Some(candidate) = self.candidates.get(idx) {
            let (index, name) = (self.index, candidate.facts.name.clone());
            self.count_refusal(&index.read(), &name, refusal);
        }
    }

    fn count_refusal(&mut self, index: &Index, name: &str, refusal: &Refusal) {
        for reason in words::reasons(index, name, refusal, self.asker()) {
            *self.refusals.entry(reason).or_default() += 1;
        }
    }

    /// Places one pod on a candidate, and ranks the candidate again if it takes another.
    fn try_place(&mut self, idx: usize) -> Result<(), Refusal> {
        let gone = || Refusal::Devices(Reason::NoDevice);
        let shared = self.index;
        let index = shared.read();
        let candidate = self.candidates.get_mut(idx).ok_or_else(gone)?;
        kube_scheduler::check(self.rules, &candidate.facts, &candidate.requested)
            .map_err(Refusal::KubeScheduler)?;
        if let Some(node) = candidate.node {
            let fleet = index.fleet();
            if candidate.copy.is_none() {
                candidate.copy = fleet.copy_node(node);
            }
            let copy = candidate.copy.as_mut().ok_or_else(gone)?;
            let placement = fleet.place_on_copy(copy, self.demand.devices(), self.demand.policies);
            count_gpus(&mut candidate.placed, &placement.map_err(Refusal::Devices)?);
        }
        candidate.requested.add(&self.rules.requests);
        if candidate.placed.pods == 0 {
            self.used.push(idx);
        }
        candidate.placed.pods += 1;
        match score(&index, self.rules, self.demand, candidate) {
            Ok(score) => self.by_score.push((score, Reverse(idx))),
            Err(refusal) => {
                // Freed first, since `count_full` takes the lock again.
                drop(index);
                self.count_full(idx, &refusal);
            }
        }
        Ok(())
    }

    /// Room for all pods of a group on a candidate, with its score; else the most pods that fit there.
    fn find_room(
        &mut self,
        idx: usize,
        group: &GroupRequest<'_>,
        search: &mut GroupSearch,
    ) -> Result<(Score, FitPlacement), usize> {
        let shared = self.index;
        // A lock for each candidate, as a group of many pods takes a while.
        let index = shared.read();
        let candidate = self.candidates.get(idx).ok_or(0_usize)?;
        let (n_by_requests, refusal) = n_by_requests(self.rules, candidate, group.n_members);
        let fleet = index.fleet();
        let room = match (&candidate.copy, candidate.node) {
            (Some(copy), _) => fleet.room_on_copy(copy, group, search),
            (None, Some(node)) => fleet.room_for_group(node, group, Hints::Respect, search),
            // Nothing is known of its devices.
            (None, None) => Err(0),
        };
        match (refusal, room) {
            (None, Ok(room)) => Ok((room.score, placed_together(candidate, &room))),
            (Some(refusal), room) => {
                let n_by_devices = room.err().unwrap_or(group.n_members);
                let name = candidate.facts.name.clone();
                self.count_refusal(&index, &name, &Refusal::KubeScheduler(refusal));
                Err(n_by_requests.min(n_by_devices))
            }
            (None, Err(n_by_devices)) => {
                let text = match group.domain {
                    placement::SharedDomain::Node => "the node has no room for all pods",
                    placement::SharedDomain::Link => "no link group of the node has room for all pods",
                };
                *self.refusals.entry(text.to_owned()).or_default() += 1;
                Err(n_by_devices)
            }
        }
    }
}

/// The number of pods of a group that kube-scheduler's own checks let onto a candidate, and the refusal of the next one.
fn n_by_requests(
    rules: &PodRules,
    candidate: &FitCandidate,
    n_members: usize,
) -> (usize, Option<NodeRefusal>) {
    let mut requested = candidate.requested.clone();
    for n in 0..n_members {
        if let Err(refusal) = kube_scheduler::check(rules, &candidate.facts, &requested) {
            return (n, Some(refusal));
        }
        requested.add(&rules.requests);
    }
    (n_members, None)
}

fn placed_together(candidate: &FitCandidate, room: &GroupRoom) -> FitPlacement {
    let mut placed = candidate.placed.clone();
    for placement in &room.placements {
        placed.pods += 1;
        count_gpus(&mut placed, placement);
    }
    placed
}

fn nothing_placed(node: String) -> FitPlacement {
    FitPlacement {
        node,
        ..FitPlacement::default()
    }
}

fn count_gpus(placed: &mut FitPlacement, placement: &Placement) {
    for share in placement.gpus() {
        *placed.gpus.entry(share.minor).or_default() += 1;
    }
}

fn score(
    index: &Index,
    rules: &PodRules,
    demand: &ResourceDemand<'_>,
    candidate: &FitCandidate,
) -> Result<Score, Refusal> {
    kube_scheduler::check(rules, &candidate.facts, &candidate.requested).map_err(Refusal::KubeScheduler)?;
    let Some(copy) = &candidate.copy else {
        // A node of which only sums are known has the same score as long as these suffice.
        return Ok(Score::default());
    };
    let score = index.fleet().score_copy(copy, demand.devices(), demand.policies);
    score.map_err(Refusal::Devices)
}
