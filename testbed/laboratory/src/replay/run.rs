//! One run: a policy, a seed, and pods that come one by one, each placed before the next.
//!
//! A pod that fits nowhere, or that kube-scheduler does not try again by itself, is deleted: no pod waits, and
//! none is preempted. With [`RunOptions::evictions`] such pods wait until pods leave, and may be evicted.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use placement::Policies;
use proto::read_api::MAX_PLANNED_MOVES;
use rand::SeedableRng;
use rand::rngs::StdRng;
use scheduler::config::AnswerNodes;
use serde::Serialize;

use super::arrivals::{Arrival, by_time, recorded, shuffled};
use super::conditions::RunConditions;
use super::curve::{Curve, Point, without_gaps};
use super::engine::{Engine, PodRank};
use super::fragment::{TypicalPod, fragment};
use super::join::{JoinGain, NEARLY_FULL};
use super::occupancy::{FreeRoom, GpuShare};
use super::policy::Policy;
use super::portion::{floor, percent, real};
use super::queue::{Evictions, Queue, Waits};
use super::reference::Chooser;
use super::world::{ReplayInput, ReplayPod};
use kit::kube_scheduler::OfflineAttempt;

/// The settings that the runs of a replay share.
#[derive(Clone, Debug, Args)]
pub struct RunOptions {
    /// The number of fitting nodes in the extender's answer, 1 to 11 or all, as for the scheduler's flag.
    #[arg(long, default_value = "1")]
    pub answer_nodes: AnswerNodes,
    /// Let pods come and go at their `creation_time` and `deletion_time`; offered is then the demand at the time.
    #[arg(long)]
    pub departures: bool,
    /// With --departures, multiply the life of pods by this factor, so that more of them are there together.
    #[arg(long, default_value_t = 1.0, value_parser = factor, requires = "departures")]
    pub stretch: f64,
    /// With --departures, let pods wait that fit nowhere, a tenth of all pods at a high priority, and by these evictions for them.
    #[arg(long, value_enum, requires = "departures")]
    pub evictions: Option<Evictions>,
    /// With --departures, plan to join free memory by at most so many moves, such as 1,5,20, once 95 % are allocated.
    #[arg(long, value_name = "MOVES", value_delimiter = ',', requires = "departures", value_parser = moves)]
    pub join: Vec<usize>,
    /// Check every invariant of the engine after this number of placements, and at the end.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub check_every: u32,
}

/// Parses a factor, at most so large that demands and times still fit an integer.
pub fn factor(text: &str) -> Result<f64, String> {
    let factor = text.parse().ok().filter(|factor| (0.0..=1e4).contains(factor));
    factor.ok_or_else(|| "write a number from 0 to 10000, such as 1.3".to_owned())
}

fn moves(text: &str) -> Result<usize, String> {
    let moves = text
        .parse()
        .ok()
        .filter(|moves| (1..=MAX_PLANNED_MOVES).contains(moves));
    moves.ok_or_else(|| format!("write a number from 1 to {MAX_PLANNED_MOVES}"))
}

#[derive(Clone, Copy, Debug)]
pub struct Job<'w> {
    pub world: &'w ReplayInput,
    /// The kinds of pods that fragmentation is measured by.
    pub typical: &'w [TypicalPod],
    pub policy: &'w Policy,
    pub conditions: &'w RunConditions,
    /// Decides everything that is random.
    pub seed: u64,
    /// The demand that the list of pods is extended or cut to, as a part of the cluster's GPUs; `None` takes the list as it is.
    pub tune: Option<f64>,
    /// True if each pod arrives once, in the order of creation; otherwise the list is shuffled, and follows `tune`.
    pub in_order: bool,
    pub options: &'w RunOptions,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct RunResult {
    pub seed: u64,
    pub pods: usize,
    pub unplaced: usize,
    /// Refusals of a sample of nodes while a node that was not asked about had room.
    pub sample_refusals: usize,
    /// Pods that stayed unplaced after such a refusal: kube-scheduler would not have tried them again by itself.
    pub missed: usize,
    pub checks: u32,
    pub curve: Vec<Point>,
    /// The allocated GPUs after each arrival, in percent of all.
    #[serde(skip)]
    pub allocated: Vec<f64>,
    pub filter_micros: f64,
    pub seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits: Option<Waits>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub joins: Vec<JoinGain>,
}

/// Places all pods of a job; `None` if it was stopped.
pub async fn run(job: Job<'_>, stop: &AtomicBool) -> Result<Option<RunResult>> {
    let began = Instant::now();
    let capacity = job.world.capacity();
    let tune = job.tune.filter(|_| !job.in_order);
    let demand = tune.map(|part| floor(part * real(capacity)));
    let arrivals = arrivals(job, demand);
    let mut run = ReplayRun::new(job, &arrivals)?;
    for at in 0..arrivals.len() {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let arrived = run.arrive(at).await;
        arrived.with_context(|| format!("{} of {} pods", at + 1, arrivals.len()))?;
    }
    if run.queue.is_some() {
        run.depart_until(i64::MAX).await?;
    }
    run.check()?;
    let mut curve = run.curve.points();
    if let Some(demand) = demand
        && !job.options.departures
    {
        // The arrivals end before the pod that would exceed the wanted demand, so that the demand is not quite reached.
        let last = usize::try_from(floor(percent(demand, capacity))).unwrap_or(0);
        curve = without_gaps(&curve, last);
    }
    Ok(Some(RunResult {
        seed: job.seed,
        pods: arrivals.len(),
        curve,
        waits: run.waits()?,
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
    if job.options.departures || job.in_order {
        by_time(job.world, &mut arrivals);
    }
    arrivals
}

/// A run under way; its methods name a pod by the index of its arrival (`at`).
struct ReplayRun<'w> {
    job: Job<'w>,
    arrivals: &'w [Arrival],
    engine: Engine<'w>,
    chooser: Option<Chooser<'w>>,
    occupancy: FreeRoom,
    /// The fragmentation of every node; `fragment` is the sum over all nodes.
    fragments: Vec<f64>,
    fragment: f64,
    /// GPU thousandths that the pods so far ask for, without those that have left.
    offered: i64,
    /// The pods that wait, if refused pods do.
    queue: Option<Queue>,
    /// The departures to come, the earliest first: the time, and the arrival's index.
    stays: BinaryHeap<Reverse<(i64, usize)>>,
    /// The places of the pods by the index of their arrival; `None` for a pod that was not placed or has left.
    places: Vec<Option<Place>>,
    curve: Curve,
    result: RunResult,
    n_placed: u32,
}

type Place = (usize, Vec<GpuShare>);

impl<'w> ReplayRun<'w> {
    fn new(job: Job<'w>, arrivals: &'w [Arrival]) -> Result<Self> {
        let Job { world, typical, .. } = job;
        let mut dice = StdRng::seed_from_u64(job.seed);
        let ties = job.conditions.ties(world, job.seed, &mut dice);
        let (policies, chooser) = match job.policy {
            Policy::Engine(policies) => (*policies, None),
            Policy::Reference(reference) => (
                Policies::default(),
                Some(Chooser::new(world, *reference, typical, dice)),
            ),
        };
        let configuration = job.conditions.configuration(chooser.is_some())?;
        let occupancy = FreeRoom::at_start(world);
        let mut fragments = Vec::new();
        for (at, free) in occupancy.nodes().iter().enumerate() {
            fragments.push(fragment(world, at, free, typical));
        }
        Ok(Self {
            job,
            arrivals,
            engine: Engine::new(world, policies, job.options.answer_nodes, &configuration, ties)?,
            chooser,
            occupancy,
            fragment: fragments.iter().sum(),
            fragments,
            offered: world.present_demand(),
            queue: job.options.evictions.map(Queue::new),
            stays: BinaryHeap::new(),
            places: Vec::new(),
            curve: Curve::default(),
            result: RunResult::default(),
            n_placed: 0,
        })
    }

    /// Handles the arrival of one pod: pods whose time is over leave first, then the pod is placed if it fits.
    async fn arrive(&mut self, at: usize) -> Result<()> {
        let (arrival, pod) = self.pod(at)?;
        let now = pod.stay.from.unwrap_or(0);
        if self.job.options.departures {
            self.depart_until(now).await?;
        }
        self.places.push(None);
        if let Some(queue) = &mut self.queue {
            queue.add(self.job.seed, &arrival.name, pod.demand(), now);
            let nodes: Vec<usize> = (0..self.job.world.nodes.len()).collect();
            self.seat(at, &nodes, now).await?;
            self.seat_waiting(now).await?;
        } else {
            if self.job.options.departures {
                let end = pod.stay.end(self.job.options.stretch);
                self.stays.extend(end.map(|end| Reverse((end, at))));
            }
            self.engine.create(pod, arrival, self.rank(at, now))?;
            if !self.settle(at).await? {
                self.result.unplaced += 1;
                self.engine.delete(pod, arrival);
            }
        }
        self.offered += pod.demand();
        let capacity = self.job.world.capacity();
        let fragment = 100.0 * self.fragment / real(capacity.max(1));
        let allocated = percent(self.occupancy.allocated_milli(), capacity);
        self.curve
            .add(percent(self.offered, capacity), allocated, fragment);
        self.result.allocated.push(allocated);
        if allocated >= NEARLY_FULL && self.result.joins.is_empty() {
            for most in &self.job.options.join {
                self.result.joins.push(self.engine.join(*most)?);
            }
        }
        Ok(())
    }

    fn pod(&self, at: usize) -> Result<(&'w Arrival, &'w ReplayPod)> {
        let arrival = self.arrivals.get(at);
        let pod = arrival.and_then(|arrival| self.job.world.pods.get(arrival.pod));
        arrival.zip(pod).context("there is no such pod")
    }

    /// The rank of a pod in a run with evictions or plans, which choose pods by their ranks; `None` in other runs.
    fn rank(&self, at: usize, now: i64) -> Option<PodRank> {
        let priority = match &self.queue {
            Some(queue) => queue.priority(at),
            None if self.job.options.join.is_empty() => return None,
            None => 0,
        };
        Some(PodRank {
            priority,
            started: now,
        })
    }

    /// Places the engine's current pod; returns false if it fits nowhere.
    async fn settle(&mut self, at: usize) -> Result<bool> {
        let (arrival, pod) = self.pod(at)?;
        let place = self.place(arrival.pod, pod).await;
        let Some((node, parts)) = place.with_context(|| format!("pod {}", arrival.name))? else {
            return Ok(false);
        };
        self.occupancy.put(node, pod, &parts);
        self.update_fragment(node);
        self.n_placed += 1;
        // All invariants of a large cluster take longer than hundreds of placements.
        if self.n_placed.is_multiple_of(self.job.options.check_every) {
            self.check()?;
        }
        if let Some(place) = self.places.get_mut(at) {
            *place = Some((node, parts));
        }
        Ok(true)
    }

    /// Places a pod of the queue if it fits on one of these nodes, which have new room, or once pods are evicted from one of them
    /// for it. Evicted pods are placed elsewhere, or wait.
    async fn seat(&mut self, at: usize, nodes: &[usize], now: i64) -> Result<()> {
        let (arrival, pod) = self.pod(at)?;
        let may_fit = |node: &usize| {
            let free = self.occupancy.node(*node);
            self.job.world.is_eligible(pod.eligible, *node)
                && free.is_some_and(|free| free.cpu_free >= pod.cpu && free.n_with(pod.milli) >= pod.gpus)
        };
        if nodes.iter().any(may_fit) && self.seat_one(at, now).await? {
            return Ok(());
        }
        if !self.queue.as_ref().is_some_and(|queue| queue.may_preempt(at)) {
            return Ok(());
        }
        self.engine.create(pod, arrival, self.rank(at, now))?;
        let evicted = self.evict_for(pod, nodes, now)?;
        if !evicted.is_empty() {
            self.seat_one(at, now).await?;
        }
        for at in evicted {
            self.seat_one(at, now).await?;
        }
        Ok(())
    }

    /// Tries once to place a pod of the queue, without evictions; returns false if it fits nowhere.
    async fn seat_one(&mut self, at: usize, now: i64) -> Result<bool> {
        let (arrival, pod) = self.pod(at)?;
        self.engine.create(pod, arrival, self.rank(at, now))?;
        let is_placed = self.settle(at).await?;
        if let Some(queue) = self.queue.as_mut().filter(|_| is_placed) {
            queue.start(at, now);
            let life = pod.stay.seconds(self.job.options.stretch);
            self.stays.extend(life.map(|life| Reverse((now + life, at))));
        }
        Ok(is_placed)
    }

    /// Places waiting pods on the nodes that have new room, until the evictions for them make no more.
    async fn seat_waiting(&mut self, now: i64) -> Result<()> {
        while let Some(queue) = self.queue.as_mut().filter(|queue| !queue.freed.is_empty()) {
            let freed = std::mem::take(&mut queue.freed);
            for at in queue.waiting() {
                self.seat(at, &freed, now).await?;
            }
        }
        Ok(())
    }

    /// Evicts pods from one of these nodes so that the engine's current pod, which is `pod`, fits there; returns the evicted pods.
    fn evict_for(&mut self, pod: &ReplayPod, nodes: &[usize], now: i64) -> Result<Vec<usize>> {
        let (mut short, mut others) = (Vec::new(), Vec::new());
        for node in nodes {
            let free = self.occupancy.node(*node).context("there is no such node")?;
            if !self.job.world.is_eligible(pod.eligible, *node) {
                continue;
            }
            // kube-scheduler looks for victims where a sum of the node is short, and nowhere else.
            if free.cpu_free < pod.cpu || free.gpu_free() < pod.demand() {
                short.push(*node);
            } else {
                others.push(*node);
            }
        }
        let evictions = self.job.options.evictions;
        let mut found = None;
        if let Some(Evictions::KubeScheduler | Evictions::Both) = evictions {
            found = self.engine.room(&short)?;
        }
        if let (None, Some(Evictions::MakeRoom | Evictions::Both)) = (&found, evictions) {
            found = self.engine.room(&others)?;
        }
        let mut evicted = Vec::new();
        for victim in found.iter().flat_map(|(_, room)| &room.victims) {
            let mut arrivals = self.arrivals.iter();
            let at = arrivals.position(|arrival| *arrival.name == *victim.pod.name);
            let at = at.context("a victim never arrived")?;
            if let Some(node) = self.leave(at)? {
                self.stays.retain(|Reverse((_, staying))| *staying != at);
                evicted.push(at);
                if let Some(queue) = &mut self.queue {
                    queue.evict(at, node, now);
                }
            }
        }
        Ok(evicted)
    }

    /// Deletes a pod from its node; returns the node, if it was placed.
    fn leave(&mut self, at: usize) -> Result<Option<usize>> {
        let (arrival, pod) = self.pod(at)?;
        let Some((node, parts)) = self.places.get_mut(at).and_then(Option::take) else {
            return Ok(None);
        };
        self.occupancy.remove(node, pod, &parts);
        self.engine.delete(pod, arrival);
        self.update_fragment(node);
        Ok(Some(node))
    }

    /// Deletes the pods whose end has come, and gives their room to waiting pods at once.
    async fn depart_until(&mut self, now: i64) -> Result<()> {
        while let Some(Reverse((end, at))) = self.stays.peek().copied()
            && end <= now
        {
            self.stays.pop();
            self.offered -= self.pod(at)?.1.demand();
            let node = self.leave(at)?;
            if let Some(queue) = &mut self.queue {
                queue.freed.extend(node);
            }
            self.seat_waiting(end).await?;
        }
        Ok(())
    }

    fn waits(&self) -> Result<Option<Waits>> {
        let Some(queue) = &self.queue else {
            return Ok(None);
        };
        let mut asked = 0;
        for at in 0..self.arrivals.len() {
            let (_, pod) = self.pod(at)?;
            asked += pod.demand() * pod.stay.seconds(self.job.options.stretch).unwrap_or(0);
        }
        Ok(Some(queue.waits(asked)))
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
    fn update_fragment(&mut self, node: usize) {
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
