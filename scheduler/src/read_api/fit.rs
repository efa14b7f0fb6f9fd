//! The number of equal pods that fit now, tried on copies of nodes.
//!
//! The copies are taken one by one under short read locks, each when the first pod is placed on it. CPU and memory count where
//! the node's are known; taints, affinity and other resources are kube-scheduler's.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use placement::{NodeId, Placement, Reason, Score, Trial};
use proto::pod::Pod;
use proto::read_api::{FitAnswer, FitPlacement, FitRequest, MAX_ADDED_NODES, MAX_REPLICAS, VERSION};

use crate::accounting::PodFacts;
use crate::index::{Index, ResourceDemand, Shared, asked};

/// Nodes that are evaluated under one lock.
const NODES: usize = 64;
/// The refusal of a node that lacks CPU or memory of its own.
const NO_HOST_ROOM: &str = "not enough CPU or memory on the node";

/// A node that may take pods.
struct FitCandidate {
    name: String,
    /// The node to copy.
    node: NodeId,
    /// The copy, once there is one.
    copy: Option<usize>,
    placed: FitPlacement,
}

/// A question that cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// Too many pods or nodes.
    #[error("{field}: {asked} is more than {most}, the most of one question")]
    TooMany {
        /// The field.
        field: &'static str,
        /// Its value.
        asked: u32,
        /// The largest value.
        most: u32,
    },
    /// The node to copy does not exist or has no devices.
    #[error("addNodes: there is no node {0:?} with devices; name a node whose kind is to be added")]
    NoSuchNode(String),
}

/// Answers how many equal pods fit.
///
/// # Errors
/// The field that cannot be used.
pub fn fit(index: &Shared<Index>, request: &FitRequest) -> Result<FitAnswer, FitError> {
    check_limits(request)?;
    let mut answer = FitAnswer {
        api_version: VERSION.to_owned(),
        replicas: request.replicas,
        ..FitAnswer::default()
    };
    // A manifest that was read back from a cluster may be of a pod that runs.
    let mut pod = Pod::clone(&request.pod);
    pod.spec.node_name = None;
    let facts = PodFacts::of(&pod, index.read().names());
    let facts = facts.filter(|facts| index.read().concerns(facts));
    let Some(facts) = facts else {
        answer.invalid = Some("the pod asks for no device that gpushare schedules".to_owned());
        return Ok(answer);
    };
    answer.asked = asked(&facts.request);
    // The lock ends here: a second read within it would wait for a writer that waits for the first.
    let demand = index.read().demand("", &facts);
    match demand {
        Ok(Some(demand)) => Search::new(index, &demand).run(request, answer),
        Ok(None) => Ok(answer),
        Err(rule) => {
            answer.invalid = Some(rule.to_string());
            Ok(answer)
        }
    }
}

fn check_limits(request: &FitRequest) -> Result<(), FitError> {
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
            return Err(FitError::TooMany { field, asked, most });
        }
    }
    Ok(())
}

/// The search for places, one pod after the other, each on the best node.
struct Search<'a> {
    index: &'a Shared<Index>,
    demand: &'a ResourceDemand<'a>,
    trial: Trial,
    candidates: Vec<FitCandidate>,
    /// Candidates with room, the best first; of equal ones the first.
    by_score: BinaryHeap<(Score, Reverse<usize>)>,
    refusals: BTreeMap<&'static str, u32>,
    /// Candidates in the order in which they got their first pod.
    used: Vec<usize>,
}

impl<'a> Search<'a> {
    fn new(index: &'a Shared<Index>, demand: &'a ResourceDemand<'a>) -> Self {
        Self {
            index,
            demand,
            trial: Trial::default(),
            candidates: Vec::new(),
            by_score: BinaryHeap::new(),
            refusals: BTreeMap::new(),
            used: Vec::new(),
        }
    }

    fn run(mut self, request: &FitRequest, mut answer: FitAnswer) -> Result<FitAnswer, FitError> {
        self.add_existing();
        for nodes in &request.add_nodes {
            self.add_copies(&nodes.like, nodes.count)?;
        }
        while answer.fitting < request.replicas
            && let Some((_, Reverse(at))) = self.by_score.pop()
        {
            answer.fitting += u32::from(self.place(at));
        }
        if answer.fitting < request.replicas {
            let refusals = self.refusals.into_iter();
            answer.blocked = refusals.map(|(reason, n)| (reason.to_owned(), n)).collect();
        }
        for at in self.used {
            if let Some(candidate) = self.candidates.get_mut(at) {
                answer.placements.push(std::mem::take(&mut candidate.placed));
            }
        }
        Ok(answer)
    }

    fn add_existing(&mut self) {
        let mut names = self.index.read().device_nodes();
        names.sort_unstable();
        let shared = self.index;
        for chunk in names.chunks(NODES) {
            let index = shared.read();
            let mut batch = index.filter().batch(self.demand);
            for name in chunk {
                match index.filter().evaluate(name, self.demand, &mut batch) {
                    Ok(Some((node, score))) => self.add_candidate(name.to_string(), node, None, Ok(score)),
                    // Nothing is known of the devices of such a node, so that no pod can be tried there.
                    Ok(None) => {}
                    Err(reason) => self.refuse(reason.as_str()),
                }
            }
        }
    }

    fn add_copies(&mut self, like: &str, count: u32) -> Result<(), FitError> {
        let shared = self.index;
        for number in 1..=count {
            let index = shared.read();
            let no_such_node = || FitError::NoSuchNode(like.to_owned());
            let node = index.fleet().node_id(like).ok_or_else(no_such_node)?;
            let copy = self
                .trial
                .copy_empty(index.fleet(), node)
                .ok_or_else(no_such_node)?;
            let score = self
                .trial
                .score(index.fleet(), copy, self.demand.devices(), self.demand.policies);
            self.add_candidate(format!("{like}+{number}"), node, Some(copy), score);
        }
        Ok(())
    }

    fn add_candidate(
        &mut self,
        name: String,
        node: NodeId,
        copy: Option<usize>,
        score: Result<Score, Reason>,
    ) {
        match score {
            Ok(score) => {
                self.by_score.push((score, Reverse(self.candidates.len())));
                self.candidates.push(FitCandidate {
                    name,
                    node,
                    copy,
                    placed: FitPlacement::default(),
                });
            }
            Err(reason) => self.refuse(reason.as_str()),
        }
    }

    fn refuse(&mut self, reason: &'static str) {
        *self.refusals.entry(reason).or_default() += 1;
    }

    /// Places one pod on a candidate; returns false if the candidate has no room after all.
    fn place(&mut self, at: usize) -> bool {
        match self.try_place(at) {
            Ok(placement) => {
                self.note(at, &placement);
                true
            }
            Err(reason) => {
                self.refuse(reason);
                false
            }
        }
    }

    fn try_place(&mut self, at: usize) -> Result<Placement, &'static str> {
        let (request, policies) = (self.demand.devices(), self.demand.policies);
        let index = self.index.read();
        let candidate = self.candidates.get_mut(at).ok_or(Reason::NoDevice.as_str())?;
        let copy = match candidate.copy {
            Some(copy) => copy,
            None => self
                .trial
                .copy(index.fleet(), candidate.node)
                .ok_or(Reason::NoDevice.as_str())?,
        };
        candidate.copy = Some(copy);
        if !self.trial.has_host_room(copy, request.host) {
            return Err(NO_HOST_ROOM);
        }
        let placement = self.trial.place(index.fleet(), copy, request, policies);
        let placement = placement.map_err(Reason::as_str)?;
        match self.trial.score(index.fleet(), copy, request, policies) {
            Ok(score) => self.by_score.push((score, Reverse(at))),
            Err(reason) => *self.refusals.entry(reason.as_str()).or_default() += 1,
        }
        Ok(placement)
    }

    fn note(&mut self, at: usize, placement: &Placement) {
        let Some(candidate) = self.candidates.get_mut(at) else {
            return;
        };
        let placed = &mut candidate.placed;
        if placed.pods == 0 {
            placed.node.clone_from(&candidate.name);
            self.used.push(at);
        }
        placed.pods += 1;
        for share in &placement.shares {
            *placed.gpus.entry(share.minor).or_default() += 1;
        }
    }
}
