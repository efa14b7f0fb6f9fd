//! `POST fit`: the number of equal pods that fit now, tried on copies of nodes.
//!
//! Each copy is made under a short read lock when the first pod is tried on the node. CPU and memory count where the node reports
//! them; kube-scheduler alone evaluates taints, affinity and other resources.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use placement::{NodeId, Placement, Reason, Score, Trial};
use proto::pod::Pod;
use proto::read_api::{FitAnswer, FitPlacement, FitRequest, MAX_ADDED_NODES, MAX_REPLICAS, VERSION};

use crate::accounting::PodFacts;
use crate::index::view::asked;
use crate::index::{Index, ResourceDemand, Shared};

/// Nodes that are evaluated under one read lock: a watch that waits to write holds up filters, too.
const NODES: usize = 64;
/// The reason of nodes that lack CPU or memory.
const NO_HOST_ROOM: &str = "not enough CPU or memory on the node";

/// A node that may take pods.
struct FitCandidate {
    name: String,
    /// The node on whose copy pods are tried.
    node: NodeId,
    /// The number of the copy in `trial`; `None` until the first pod is tried on it.
    copy: Option<usize>,
    /// The pods that were placed on it.
    placed: FitPlacement,
}

/// A fit request that cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// The request has too many pods or nodes.
    #[error("{field}: {asked} is more than {most}, the most of one question")]
    TooMany {
        /// The field of the request.
        field: &'static str,
        /// The field's value.
        asked: u32,
        /// The largest value of the field.
        most: u32,
    },
    /// The node to copy does not exist or has no devices.
    #[error("addNodes: there is no node {0:?} with devices; name a node whose kind is to be added")]
    NoSuchNode(String),
}

/// The number of equal pods that fit, and their places.
///
/// # Errors
/// A field of the request has too large a value, or names a node that does not exist.
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
    let facts = facts.filter(|facts| index.read().requests_devices(facts));
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

/// Checks that a request asks for no more copies and added nodes than one answer may cost.
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

/// The search for places: one pod after the other, each on the node that the scheduler's policy ranks first.
struct Search<'a> {
    index: &'a Shared<Index>,
    demand: &'a ResourceDemand<'a>,
    trial: Trial,
    candidates: Vec<FitCandidate>,
    /// The candidates with room by score, each under its number; of equal scores the lowest number first.
    by_score: BinaryHeap<(Score, Reverse<usize>)>,
    refusals: BTreeMap<&'static str, u32>,
    /// Candidates in the order in which they got their first pod.
    used: Vec<usize>,
}

impl<'a> Search<'a> {
    /// A search that has placed nothing yet.
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

    /// Places pods until all are placed, or no candidate has room.
    fn run(mut self, request: &FitRequest, mut answer: FitAnswer) -> Result<FitAnswer, FitError> {
        self.add_existing();
        for nodes in &request.add_nodes {
            self.add_copies(&nodes.like, nodes.count)?;
        }
        while answer.fitting < request.replicas
            && let Some((_, Reverse(at))) = self.by_score.pop()
        {
            match self.try_place(at) {
                Ok(placement) => {
                    self.record(at, &placement);
                    answer.fitting += 1;
                }
                // The candidate was ranked by devices alone, or its node has changed since.
                Err(reason) => self.refuse(reason),
            }
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

    /// Evaluates the nodes of the cluster.
    fn add_existing(&mut self) {
        let mut names = self.index.read().device_nodes();
        // Sorted, so that the same question gets the same answer: of equal scores the first name wins.
        names.sort_unstable();
        let shared = self.index;
        for chunk in names.chunks(NODES) {
            let index = shared.read();
            let filter = index.filter();
            let mut batch = filter.batch(self.demand);
            for name in chunk {
                match filter.evaluate(name, filter.node_id(name), self.demand, &mut batch) {
                    Ok(Some((node, score))) => self.add_candidate(name.to_string(), node, None, Ok(score)),
                    // Nothing is known of the devices of such a node, so that no pod can be tried there.
                    Ok(None) => {}
                    Err(reason) => self.refuse(reason.as_str()),
                }
            }
        }
    }

    /// Adds empty copies of a node.
    fn add_copies(&mut self, like: &str, count: u32) -> Result<(), FitError> {
        let shared = self.index;
        for number in 1..=count {
            // The lock is taken for each copy: a thousand copies would hold it too long.
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

    /// Adds a node that was evaluated to the candidates, or its refusal to the reasons.
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

    /// Counts a node that takes no further pod, under its reason.
    fn refuse(&mut self, reason: &'static str) {
        *self.refusals.entry(reason).or_default() += 1;
    }

    /// Places one pod on a candidate's copy, and ranks the candidate again if it has more room.
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
        // Filter leaves CPU and memory to kube-scheduler, which is not asked here.
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

    /// Records a placed pod in the answer of its candidate.
    fn record(&mut self, at: usize, placement: &Placement) {
        let Some(candidate) = self.candidates.get_mut(at) else {
            return;
        };
        let placed = &mut candidate.placed;
        if placed.pods == 0 {
            placed.node.clone_from(&candidate.name);
            self.used.push(at);
        }
        placed.pods += 1;
        for share in placement.gpus() {
            *placed.gpus.entry(share.minor).or_default() += 1;
        }
    }
}
