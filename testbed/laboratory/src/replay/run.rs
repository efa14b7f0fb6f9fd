//! One run: a policy, a seed, and pods that come one by one, each placed before the next.
//!
//! A pod that fits nowhere, or that kube-scheduler does not try again by itself, is deleted: no pod waits, and
//! none is preempted.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use placement::Policies;
use scheduler::config::AnswerNodes;
use serde::Serialize;

use super::arrivals::{Arrival, by_time, recorded, shuffled};
use super::conditions::{PlainPods, RunConditions};
use super::curve::{Curve, Point, without_gaps};
use super::engine::{Engine, FilterOutcome};
use super::fragment::{TypicalPod, fragment};
use super::kube::{SearchModel, SearchResult, default_score};
use super::occupancy::{FreeRoom, GpuShare};
use super::policy::Policy;
use super::portion::{floor, percent, real};
use super::reference::Chooser;
use super::refusal;
use super::world::{ReplayInput, ReplayPod};
use kit::console::Bar;

/// The weight of one point of the extender, as `deploy/` configures it, beside kube-scheduler's plugins, which give up to 100.
const PER_POINT: i64 = 10;

/// The parameters of one run.
#[derive(Clone, Copy, Debug)]
pub struct Job<'w> {
    /// Nodes and pods.
    pub world: &'w ReplayInput,
    /// The kinds of pods that fragmentation is measured by.
    pub typical: &'w [TypicalPod],
    /// The policy.
    pub policy: &'w Policy,
    /// The conditions of the run: nodes looked at, choice among equals, placement of pods without devices.
    pub conditions: &'w RunConditions,
    /// Decides everything that is random.
    pub seed: u64,
    /// The demand that the list of pods is extended or cut to, as a part of the cluster's GPUs; `None` takes
    /// the list as it is.
    pub tune: Option<f64>,
    /// The number of nodes in the extender's answer.
    pub answer_nodes: AnswerNodes,
    /// True if pods come and go at their times.
    pub departures: bool,
    /// The factor on the life of recorded pods.
    pub stretch: f64,
    /// True if pods come once each, in the order of their creation.
    pub in_order: bool,
    /// The number of placements between two checks of every invariant.
    pub check_every: u32,
}

/// The result of one run.
#[derive(Clone, Debug, Serialize)]
pub struct RunResult {
    /// The run's seed.
    pub seed: u64,
    /// Pods that arrived.
    pub pods: usize,
    /// Pods that were not placed.
    pub unplaced: usize,
    /// Refusals of a sample of nodes while a node that was not asked about had room.
    pub sample_refusals: usize,
    /// Pods that stayed unplaced after such a refusal: kube-scheduler would not have tried them again by itself.
    pub missed: usize,
    /// How often all invariants were checked.
    pub checks: u32,
    /// Allocation and fragmentation by offered demand.
    pub curve: Vec<Point>,
    /// The allocated GPUs after each arrival, in percent of all.
    #[serde(skip)]
    pub allocated: Vec<f64>,
    /// The mean time of a filter call, in microseconds.
    pub filter_micros: f64,
    /// The duration of the run.
    pub seconds: f64,
}

/// Places all pods of a job; `None` if it was stopped.
///
/// # Errors
/// An invariant that does not hold, or an answer of the scheduler that makes no sense.
pub fn run(job: Job<'_>, bar: &Bar, stop: &AtomicBool) -> Result<Option<RunResult>> {
    let began = Instant::now();
    let capacity = job.world.capacity();
    let demand = job
        .tune
        .filter(|_| !job.in_order)
        .map(|part| floor(part * real(capacity)));
    let arrivals = arrivals(job, demand);
    bar.set_length(arrivals.len());
    let mut run = ReplayRun::new(job);
    for (at, arrival) in arrivals.iter().enumerate() {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        run.arrive(&arrivals, arrival, at)
            .with_context(|| format!("{} of {} pods", at + 1, arrivals.len()))?;
        bar.advance();
    }
    run.check()?;
    let (pods, seconds) = (arrivals.len(), began.elapsed().as_secs_f64());
    let ReplayRun {
        unplaced,
        sample_refusals,
        missed,
        checks,
        curve,
        allocated,
        engine,
        ..
    } = run;
    // The arrivals end before the pod that would exceed the wanted demand, so that the demand is not quite reached.
    let last = demand.map(|demand| usize::try_from(floor(percent(demand, capacity))).unwrap_or(0));
    let curve = match last.filter(|_| !job.departures) {
        Some(last) => without_gaps(&curve.points(), last),
        None => curve.points(),
    };
    let filter_micros = engine.filter_micros();
    Ok(Some(RunResult {
        seed: job.seed,
        pods,
        unplaced,
        sample_refusals,
        missed,
        checks,
        curve,
        allocated,
        filter_micros,
        seconds,
    }))
}

/// The pods in the order in which they arrive: as recorded, or shuffled by the seed.
fn arrivals(job: Job<'_>, demand: Option<i64>) -> Vec<Arrival> {
    let to_come = demand.map(|demand| (demand - job.world.present_demand()).max(0));
    let mut arrivals = if job.in_order {
        recorded(job.world)
    } else {
        shuffled(job.world, job.seed, to_come)
    };
    if job.departures || job.in_order {
        by_time(job.world, &mut arrivals);
    }
    arrivals
}

struct ReplayRun<'w> {
    job: Job<'w>,
    engine: Engine<'w>,
    chooser: Option<Chooser<'w>>,
    kube: SearchModel,
    found: SearchResult,
    occupancy: FreeRoom,
    /// The fragmentation of every node; `fragment` is the sum over all nodes.
    fragments: Vec<f64>,
    fragment: f64,
    /// GPU thousandths that the pods so far ask for, without those that have left.
    offered: i64,
    /// The departures to come, the earliest first: the time, and the arrival's index.
    stays: BinaryHeap<Reverse<(i64, usize)>>,
    places: Vec<Option<(usize, Vec<GpuShare>)>>,
    curve: Curve,
    allocated: Vec<f64>,
    unplaced: usize,
    sample_refusals: usize,
    missed: usize,
    placed: u32,
    checks: u32,
}

/// The outcome of one attempt to place a pod.
enum AttemptResult {
    Placed(usize, Vec<GpuShare>),
    /// kube-scheduler itself found no node.
    Refused,
    /// The extender refused all nodes of the sample; the text of the pod's condition.
    RefusedByExtender(String),
}

impl<'w> ReplayRun<'w> {
    /// A run before its first pod arrives.
    fn new(job: Job<'w>) -> Self {
        let Job {
            world,
            typical,
            policy,
            conditions,
            seed,
            ..
        } = job;
        let (policies, chooser) = match policy {
            Policy::Engine(policies) => (*policies, None),
            Policy::Reference(reference) => (
                Policies::default(),
                Some(Chooser::new(world, *reference, typical)),
            ),
        };
        let occupancy = FreeRoom::at_start(world);
        let fragments: Vec<f64> = occupancy
            .nodes()
            .iter()
            .enumerate()
            .map(|(at, free)| fragment(world, at, free, typical))
            .collect();
        Self {
            job,
            engine: Engine::new(world, policies, job.answer_nodes),
            chooser,
            kube: SearchModel::new(world.nodes.len(), conditions.sampling, conditions.ties, seed),
            found: SearchResult::default(),
            occupancy,
            fragment: fragments.iter().sum(),
            fragments,
            offered: world.present_demand(),
            stays: BinaryHeap::new(),
            places: Vec::new(),
            curve: Curve::default(),
            allocated: Vec::new(),
            unplaced: 0,
            sample_refusals: 0,
            missed: 0,
            placed: 0,
            checks: 0,
        }
    }

    /// Handles the arrival of one pod: pods whose time is over leave first, then the pod is placed if it fits.
    fn arrive(&mut self, arrivals: &[Arrival], arrival: &Arrival, at: usize) -> Result<()> {
        let pod = self
            .job
            .world
            .pods
            .get(arrival.pod)
            .context("there is no such pod")?;
        if self.job.departures {
            self.depart(arrivals, pod.stay.from.unwrap_or(i64::MIN));
            self.stays
                .extend(pod.stay.end(self.job.stretch).map(|end| Reverse((end, at))));
        }
        self.engine.create(pod, arrival)?;
        let place = self
            .place(arrival.pod, pod)
            .with_context(|| format!("pod {}", arrival.name))?;
        if let Some((node, parts)) = &place {
            self.occupancy.put(*node, pod, parts);
            self.measure(*node);
            self.placed += 1;
            // All invariants of a large cluster take longer than hundreds of placements.
            if self.placed.is_multiple_of(self.job.check_every) {
                self.check()?;
            }
        } else {
            self.unplaced += 1;
            self.engine.delete(pod, arrival);
        }
        self.places.push(place);
        self.offered += pod.demand();
        let capacity = self.job.world.capacity();
        let fragment = 100.0 * self.fragment / real(capacity.max(1));
        let allocated = percent(self.occupancy.n_allocated(), capacity);
        self.curve
            .add(percent(self.offered, capacity), allocated, fragment);
        self.allocated.push(allocated);
        Ok(())
    }

    /// Deletes the pods whose end has come.
    fn depart(&mut self, arrivals: &[Arrival], now: i64) {
        while let Some(Reverse((_, at))) = self.stays.peek().copied().filter(|Reverse((to, _))| *to <= now) {
            self.stays.pop();
            let Some(arrival) = arrivals.get(at) else { continue };
            let Some(pod) = self.job.world.pods.get(arrival.pod) else {
                continue;
            };
            self.offered -= pod.demand();
            if let Some((node, parts)) = self.places.get_mut(at).and_then(Option::take) {
                self.occupancy.remove(node, pod, &parts);
                self.engine.delete(pod, arrival);
                self.measure(node);
            }
        }
    }

    /// Finds a place for a pod and binds it there.
    ///
    /// kube-scheduler begins each attempt where the last search ended. It tries a pod that the extender refused
    /// again when the pod's condition changes. A pod fits nowhere once all nodes in a row have refused it, as
    /// nothing else happens meanwhile.
    fn place(&mut self, pod_at: usize, pod: &ReplayPod) -> Result<Option<(usize, Vec<GpuShare>)>> {
        let (mut n_seen, mut n_refusals) = (0, 0);
        let mut condition = None;
        loop {
            let mut found = std::mem::take(&mut self.found);
            self.kube.find(self.job.world, &self.occupancy, pod, &mut found);
            n_seen += found.n_seen;
            let attempt = self.attempt(pod_at, pod, &found);
            self.found = found;
            let attempt = attempt?;
            if let AttemptResult::Placed(node, parts) = attempt {
                self.sample_refusals += n_refusals;
                return Ok(Some((node, parts)));
            }
            if n_seen >= self.job.world.nodes.len() {
                return Ok(None);
            }
            n_refusals += 1;
            let AttemptResult::RefusedByExtender(message) = attempt else {
                continue;
            };
            if condition.as_ref() == Some(&message) {
                self.give_up(pod, n_refusals)?;
                return Ok(None);
            }
            self.engine.refuse(&message)?;
            condition = Some(message);
        }
    }

    /// Counts a pod as missed if a node has room that the extender was never asked about.
    fn give_up(&mut self, pod: &ReplayPod, n_refusals: usize) -> Result<()> {
        let world = self.job.world;
        let has_room =
            |node: &usize| world.is_eligible(pod.eligible, *node) && self.occupancy.has_room(*node, pod);
        let with_room: Vec<usize> = (0..world.nodes.len()).filter(has_room).collect();
        if self.engine.fits_any(&with_room)? {
            self.sample_refusals += n_refusals;
            self.missed += 1;
        }
        Ok(())
    }

    /// Tries once to place a pod on one of the nodes that were found, by the policy of the run.
    fn attempt(&mut self, pod_at: usize, pod: &ReplayPod, found: &SearchResult) -> Result<AttemptResult> {
        let nodes = &found.nodes;
        if nodes.is_empty() {
            return Ok(AttemptResult::Refused);
        }
        if !pod.is_managed && self.job.conditions.plain_pods == PlainPods::KubeScheduler {
            let scored: Vec<(usize, i64)> = nodes
                .iter()
                .map(|node| (*node, self.default_score(*node, pod)))
                .collect();
            let Some(node) = self.kube.choose(&scored) else {
                return Ok(AttemptResult::Refused);
            };
            // The extender sees such a pod on the watch only, as any pod of another scheduler.
            self.engine.bind_elsewhere(node, &[])?;
            return Ok(AttemptResult::Placed(node, Vec::new()));
        }
        if let Some(chooser) = &mut self.chooser {
            let scored = chooser.score(pod_at, nodes, &self.occupancy, &mut self.kube);
            let Some(node) = self.kube.choose(&scored) else {
                return Ok(AttemptResult::Refused);
            };
            let free = self.occupancy.node(node).context("there is no such node")?;
            let parts = chooser.parts(node, free, pod, &mut self.kube);
            self.engine.bind_elsewhere(node, &parts)?;
            return Ok(AttemptResult::Placed(node, parts));
        }
        let FilterOutcome {
            nodes: fitting,
            refused,
        } = self.engine.filter(nodes)?;
        let Some(node) = self.choose_among(pod, &fitting)? else {
            return Ok(AttemptResult::RefusedByExtender(refusal::message(
                self.job.world,
                &self.occupancy,
                pod,
                found,
                &refused,
            )));
        };
        let parts = self.engine.bind(node)?;
        if self.job.world.is_exact && parts.len() != pod.gpus {
            bail!("it is given {} GPUs and asks for {}", parts.len(), pod.gpus);
        }
        Ok(AttemptResult::Placed(node, parts))
    }

    /// Chooses a node by the scores of kube-scheduler and extender; like kube-scheduler, it asks for none if
    /// one node is left.
    fn choose_among(&mut self, pod: &ReplayPod, fitting: &[usize]) -> Result<Option<usize>> {
        if fitting.len() < 2 {
            return Ok(fitting.first().copied());
        }
        let points = self.engine.prioritize(fitting)?;
        let score = |node: &usize| {
            (
                *node,
                self.default_score(*node, pod) + PER_POINT * points.get(node).copied().unwrap_or(0),
            )
        };
        let scored: Vec<(usize, i64)> = fitting.iter().map(score).collect();
        Ok(self.kube.choose(&scored))
    }

    fn default_score(&self, node: usize, pod: &ReplayPod) -> i64 {
        let found = self.job.world.nodes.get(node).zip(self.occupancy.node(node));
        found.map_or(0, |(node, used)| default_score(node, used, pod))
    }

    /// Updates the run's fragmentation after a change of one node.
    fn measure(&mut self, node: usize) {
        let (Some(free), Some(known)) = (self.occupancy.node(node), self.fragments.get_mut(node)) else {
            return;
        };
        let now = fragment(self.job.world, node, free, self.job.typical);
        self.fragment += now - *known;
        *known = now;
    }

    /// Checks the engine's invariants, and its amounts against those of this run.
    fn check(&mut self) -> Result<()> {
        self.checks += 1;
        self.engine
            .check(&self.occupancy)
            .with_context(|| format!("after {} placements", self.placed))
    }
}
