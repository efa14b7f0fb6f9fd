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
use rand::SeedableRng;
use rand::rngs::StdRng;
use scheduler::config::AnswerNodes;
use serde::Serialize;

use super::arrivals::{Arrival, by_time, recorded, shuffled};
use super::conditions::RunConditions;
use super::curve::{Curve, Point, without_gaps};
use super::engine::Engine;
use super::fragment::{TypicalPod, fragment};
use super::occupancy::{FreeRoom, GpuShare};
use super::policy::Policy;
use super::portion::{floor, percent, real};
use super::reference::Chooser;
use super::world::{ReplayInput, ReplayPod};
use kit::console::Bar;
use kit::kube_scheduler::OfflineAttempt;

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
    /// True if pods arrive and leave at the times that the trace has.
    pub departures: bool,
    /// With `departures`, the factor on the time from a pod's creation to its deletion.
    pub stretch: f64,
    /// True if each pod arrives once, in the order of creation; otherwise the list is shuffled, and follows `tune`.
    pub in_order: bool,
    /// The number of placements between two checks of every invariant.
    pub check_every: u32,
}

/// The result of one run.
#[derive(Clone, Debug, Default, Serialize)]
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
    /// The number of checks of all invariants.
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
pub async fn run(job: Job<'_>, bar: &Bar, stop: &AtomicBool) -> Result<Option<RunResult>> {
    let began = Instant::now();
    let capacity = job.world.capacity();
    let demand = job
        .tune
        .filter(|_| !job.in_order)
        .map(|part| floor(part * real(capacity)));
    let arrivals = arrivals(job, demand);
    bar.set_length(arrivals.len());
    let mut run = ReplayRun::new(job)?;
    for (at, arrival) in arrivals.iter().enumerate() {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        run.arrive(&arrivals, arrival, at)
            .await
            .with_context(|| format!("{} of {} pods", at + 1, arrivals.len()))?;
        bar.advance();
    }
    run.check()?;
    // The arrivals end before the pod that would exceed the wanted demand, so that the demand is not quite reached.
    let last = demand.map(|demand| usize::try_from(floor(percent(demand, capacity))).unwrap_or(0));
    let points = run.curve.points();
    let curve = match last.filter(|_| !job.departures) {
        Some(last) => without_gaps(&points, last),
        None => points,
    };
    Ok(Some(RunResult {
        seed: job.seed,
        pods: arrivals.len(),
        curve,
        filter_micros: run.engine.filter_micros(),
        seconds: began.elapsed().as_secs_f64(),
        ..run.result
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
    occupancy: FreeRoom,
    /// The fragmentation of every node; `fragment` is the sum over all nodes.
    fragments: Vec<f64>,
    fragment: f64,
    /// GPU thousandths that the pods so far ask for, without those that have left.
    offered: i64,
    /// The departures to come, the earliest first: the time, and the arrival's index.
    stays: BinaryHeap<Reverse<(i64, usize)>>,
    /// The places of the pods by the index of their arrival; `None` for a pod that was not placed or has left.
    places: Vec<Option<Place>>,
    curve: Curve,
    /// The counts so far.
    result: RunResult,
    n_placed: u32,
}

/// A node, and the parts of its GPUs.
type Place = (usize, Vec<GpuShare>);

impl<'w> ReplayRun<'w> {
    /// A run before its first pod arrives.
    fn new(job: Job<'w>) -> Result<Self> {
        let Job {
            world,
            typical,
            policy,
            conditions,
            seed,
            ..
        } = job;
        let mut dice = StdRng::seed_from_u64(seed);
        let ties = conditions.ties(world, seed, &mut dice);
        let (policies, chooser) = match policy {
            Policy::Engine(policies) => (*policies, None),
            Policy::Reference(reference) => (
                Policies::default(),
                Some(Chooser::new(world, *reference, typical, dice)),
            ),
        };
        let configuration = conditions.configuration(chooser.is_some())?;
        let occupancy = FreeRoom::at_start(world);
        let fragments: Vec<f64> = occupancy
            .nodes()
            .iter()
            .enumerate()
            .map(|(at, free)| fragment(world, at, free, typical))
            .collect();
        Ok(Self {
            job,
            engine: Engine::new(world, policies, job.answer_nodes, &configuration, ties)?,
            chooser,
            occupancy,
            fragment: fragments.iter().sum(),
            fragments,
            offered: world.present_demand(),
            stays: BinaryHeap::new(),
            places: Vec::new(),
            curve: Curve::default(),
            result: RunResult::default(),
            n_placed: 0,
        })
    }

    /// Handles the arrival of one pod: pods whose time is over leave first, then the pod is placed if it fits.
    async fn arrive(&mut self, arrivals: &[Arrival], arrival: &Arrival, at: usize) -> Result<()> {
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
            .await
            .with_context(|| format!("pod {}", arrival.name))?;
        if let Some((node, parts)) = &place {
            self.occupancy.put(*node, pod, parts);
            self.measure(*node);
            self.n_placed += 1;
            // All invariants of a large cluster take longer than hundreds of placements.
            if self.n_placed.is_multiple_of(self.job.check_every) {
                self.check()?;
            }
        } else {
            self.result.unplaced += 1;
            self.engine.delete(pod, arrival);
        }
        self.places.push(place);
        self.offered += pod.demand();
        let capacity = self.job.world.capacity();
        let fragment = 100.0 * self.fragment / real(capacity.max(1));
        let allocated = percent(self.occupancy.allocated_milli(), capacity);
        self.curve
            .add(percent(self.offered, capacity), allocated, fragment);
        self.result.allocated.push(allocated);
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

    /// Finds a place for a pod and binds it there; `None` if it fits nowhere or kube-scheduler would not try it again.
    ///
    /// kube-scheduler begins each attempt where the last search ended. It tries a pod that the extender refused
    /// again when the pod's condition changes. A pod fits nowhere once all nodes in a row have refused it, as
    /// nothing else happens meanwhile.
    async fn place(&mut self, pod_at: usize, pod: &ReplayPod) -> Result<Option<Place>> {
        let (mut n_seen, mut n_refusals) = (0, 0);
        let mut condition = None;
        loop {
            let (attempt, place) = self.attempt(pod_at, pod).await?;
            n_seen += attempt.n_seen;
            if place.is_some() {
                self.result.sample_refusals += n_refusals;
                return Ok(place);
            }
            // A pod whose affinity names nodes that are not there is tried on none.
            if attempt.n_seen == 0 || n_seen >= self.job.world.nodes.len() {
                return Ok(None);
            }
            n_refusals += 1;
            if !attempt.diagnosis.is_by_extender() {
                continue;
            }
            let message = attempt.diagnosis.message();
            if condition.as_ref() == Some(&message) {
                // A node that the extender was never asked about may have room.
                if self.engine.fits_any().await? {
                    self.result.sample_refusals += n_refusals;
                    self.result.missed += 1;
                }
                return Ok(None);
            }
            self.engine.refuse(&message)?;
            condition = Some(message);
        }
    }

    /// Tries once to place a pod, by the policy of the run.
    async fn attempt(&mut self, pod_at: usize, pod: &ReplayPod) -> Result<(OfflineAttempt, Option<Place>)> {
        // The extender sees a pod that it does not manage on the watch only, as any pod of another scheduler.
        let Some(chooser) = self.chooser.as_mut().filter(|_| self.engine.is_extended()) else {
            let attempt = self.engine.attempt().await?;
            let Some(name) = &attempt.chosen else {
                return Ok((attempt, None));
            };
            let node = self.engine.node_idx(name)?;
            let parts = self.engine.bind(node)?;
            if self.job.world.is_in_percents && parts.len() != pod.gpus {
                bail!("it is given {} GPUs and asks for {}", parts.len(), pod.gpus);
            }
            return Ok((attempt, Some((node, parts))));
        };
        let attempt = self.engine.find().await?;
        let found = attempt.fitting.iter().map(|name| self.engine.node_idx(name));
        let found: Vec<usize> = found.collect::<Result<_>>()?;
        let scored = chooser.score(pod_at, &found, &self.occupancy, &self.engine)?;
        let Some(node) = self.engine.select(&scored)? else {
            return Ok((attempt, None));
        };
        let free = self.occupancy.node(node).context("there is no such node")?;
        let parts = chooser.parts(node, free, pod);
        self.engine.bind_elsewhere(node, &parts)?;
        Ok((attempt, Some((node, parts))))
    }

    /// Updates `fragments` and their sum after a change of one node.
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
        self.result.checks += 1;
        self.engine
            .check(&self.occupancy)
            .with_context(|| format!("after {} placements", self.n_placed))
    }
}
