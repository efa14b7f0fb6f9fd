//! One run: a policy, a seed, and pods that come one by one, each placed before the next.
//!
//! A pod that fits nowhere, or that kube-scheduler does not try again by itself, is deleted: no pod waits, and
//! none is preempted. With [`Job::evictions`] such pods wait until pods leave, and may be evicted.

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
    /// With `departures`, pods wait that fit nowhere, and these evictions are made for those of high priority.
    pub evictions: Option<Evictions>,
    /// Most moves of each plan that is made once the cluster is nearly full.
    pub joins: &'w [usize],
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
    /// Waiting times and evictions, if pods wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits: Option<Waits>,
    /// The gains of plans.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub joins: Vec<JoinGain>,
}

/// Places all pods of a job; `None` if it was stopped.
///
/// # Errors
/// An invariant that does not hold, or an answer of the scheduler that makes no sense.
pub async fn run(job: Job<'_>, stop: &AtomicBool) -> Result<Option<RunResult>> {
    let began = Instant::now();
    let capacity = job.world.capacity();
    let demand = job
        .tune
        .filter(|_| !job.in_order)
        .map(|part| floor(part * real(capacity)));
    let arrivals = arrivals(job, demand);
    let mut run = ReplayRun::new(job)?;
    for (at, arrival) in arrivals.iter().enumerate() {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        run.arrive(&arrivals, arrival, at)
            .await
            .with_context(|| format!("{} of {} pods", at + 1, arrivals.len()))?;
    }
    if run.queue.is_some() {
        run.depart_until(&arrivals, i64::MAX).await?;
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
        waits: run.waits(&arrivals),
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

/// A run under way; its methods name a pod by the index of its arrival (`at`).
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
    /// The pods that wait, if refused pods do.
    queue: Option<Queue>,
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
            queue: job.evictions.map(Queue::new),
            stays: BinaryHeap::new(),
            places: Vec::new(),
            curve: Curve::default(),
            result: RunResult::default(),
            n_placed: 0,
        })
    }

    /// Handles the arrival of one pod: pods whose time is over leave first, then the pod is placed if it fits.
    async fn arrive(&mut self, arrivals: &[Arrival], arrival: &Arrival, at: usize) -> Result<()> {
        let pod = self.pod(arrival)?;
        let now = pod.stay.from.unwrap_or(0);
        if self.job.departures {
            self.depart_until(arrivals, now).await?;
        }
        self.places.push(None);
        if let Some(queue) = &mut self.queue {
            queue.add(self.job.seed, &arrival.name, pod.demand(), now);
            let nodes: Vec<usize> = (0..self.job.world.nodes.len()).collect();
            self.seat(arrivals, at, &nodes, now).await?;
            self.seat_waiting(arrivals, now).await?;
        } else {
            if self.job.departures {
                self.stays
                    .extend(pod.stay.end(self.job.stretch).map(|end| Reverse((end, at))));
            }
            self.engine.create(pod, arrival, self.rank(at, now))?;
            if !self.settle(arrival, at).await? {
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
            let gains = self.job.joins.iter().map(|most| self.engine.join(*most));
            self.result.joins = gains.collect::<Result<_>>()?;
        }
        Ok(())
    }

    fn pod(&self, arrival: &Arrival) -> Result<&'w ReplayPod> {
        let pod = self.job.world.pods.get(arrival.pod);
        pod.context("there is no such pod")
    }

    /// The rank of a pod in a run with evictions or plans, which choose pods by their ranks; `None` in other runs.
    fn rank(&self, at: usize, now: i64) -> Option<PodRank> {
        let priority = match &self.queue {
            Some(queue) => queue.priority(at),
            None if self.job.joins.is_empty() => return None,
            None => 0,
        };
        Some(PodRank {
            priority,
            started: now,
        })
    }

    /// Places the engine's current pod; returns false if it fits nowhere.
    async fn settle(&mut self, arrival: &Arrival, at: usize) -> Result<bool> {
        let pod = self.pod(arrival)?;
        let place = self.place(arrival.pod, pod).await;
        let Some((node, parts)) = place.with_context(|| format!("pod {}", arrival.name))? else {
            return Ok(false);
        };
        self.occupancy.put(node, pod, &parts);
        self.update_fragment(node);
        self.n_placed += 1;
        // All invariants of a large cluster take longer than hundreds of placements.
        if self.n_placed.is_multiple_of(self.job.check_every) {
            self.check()?;
        }
        if let Some(place) = self.places.get_mut(at) {
            *place = Some((node, parts));
        }
        Ok(true)
    }

    /// Places a pod of the queue if it fits on one of these nodes, which have new room, or once pods are evicted from one of them
    /// for it. Evicted pods are placed elsewhere, or wait.
    async fn seat(&mut self, arrivals: &[Arrival], at: usize, nodes: &[usize], now: i64) -> Result<()> {
        let arrival = arrivals.get(at).context("there is no such pod")?;
        let pod = self.pod(arrival)?;
        let may_fit = |node: &usize| {
            let free = self.occupancy.node(*node);
            self.job.world.is_eligible(pod.eligible, *node)
                && free.is_some_and(|free| free.cpu_free >= pod.cpu && free.n_with(pod.milli) >= pod.gpus)
        };
        if nodes.iter().any(may_fit) && self.seat_one(arrivals, at, now).await? {
            return Ok(());
        }
        let may_preempt = self.queue.as_ref().is_some_and(|queue| queue.may_preempt(at));
        if !may_preempt {
            return Ok(());
        }
        self.engine.create(pod, arrival, self.rank(at, now))?;
        let evicted = self.evict_for(arrivals, pod, nodes, now)?;
        if !evicted.is_empty() {
            self.seat_one(arrivals, at, now).await?;
        }
        for at in evicted {
            self.seat_one(arrivals, at, now).await?;
        }
        Ok(())
    }

    /// Tries once to place a pod of the queue, without evictions; returns false if it fits nowhere.
    async fn seat_one(&mut self, arrivals: &[Arrival], at: usize, now: i64) -> Result<bool> {
        let arrival = arrivals.get(at).context("there is no such pod")?;
        let pod = self.pod(arrival)?;
        self.engine.create(pod, arrival, self.rank(at, now))?;
        let is_placed = self.settle(arrival, at).await?;
        if let Some(queue) = self.queue.as_mut().filter(|_| is_placed) {
            queue.start(at, now);
            let life = pod.stay.seconds(self.job.stretch);
            self.stays.extend(life.map(|life| Reverse((now + life, at))));
        }
        Ok(is_placed)
    }

    /// Places waiting pods on the nodes that have new room, until the evictions for them make no more.
    async fn seat_waiting(&mut self, arrivals: &[Arrival], now: i64) -> Result<()> {
        while let Some(queue) = self.queue.as_mut().filter(|queue| !queue.freed.is_empty()) {
            let freed = std::mem::take(&mut queue.freed);
            for at in queue.waiting() {
                self.seat(arrivals, at, &freed, now).await?;
            }
        }
        Ok(())
    }

    /// Evicts pods from one of these nodes so that the engine's current pod, which is `pod`, fits there; returns the evicted pods.
    fn evict_for(
        &mut self,
        arrivals: &[Arrival],
        pod: &ReplayPod,
        nodes: &[usize],
        now: i64,
    ) -> Result<Vec<usize>> {
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
        let by_kube_scheduler = || self.engine.room(&short);
        let by_make_room = || self.engine.room(&others);
        let found = match self.job.evictions {
            None | Some(Evictions::None) => None,
            Some(Evictions::MakeRoom) => by_make_room()?,
            Some(Evictions::KubeScheduler) => by_kube_scheduler()?,
            Some(Evictions::Both) => match by_kube_scheduler()? {
                None => by_make_room()?,
                found => found,
            },
        };
        let mut evicted = Vec::new();
        for victim in found.iter().flat_map(|(_, room)| &room.victims) {
            let at = arrivals
                .iter()
                .position(|arrival| *arrival.name == *victim.pod.name);
            let at = at.context("a victim never arrived")?;
            if let Some(node) = self.leave(arrivals, at)? {
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
    fn leave(&mut self, arrivals: &[Arrival], at: usize) -> Result<Option<usize>> {
        let arrival = arrivals.get(at).context("there is no such pod")?;
        let pod = self.pod(arrival)?;
        let Some((node, parts)) = self.places.get_mut(at).and_then(Option::take) else {
            return Ok(None);
        };
        self.occupancy.remove(node, pod, &parts);
        self.engine.delete(pod, arrival);
        self.update_fragment(node);
        Ok(Some(node))
    }

    /// Deletes the pods whose end has come, and gives their room to waiting pods at once.
    async fn depart_until(&mut self, arrivals: &[Arrival], now: i64) -> Result<()> {
        while let Some(Reverse((end, at))) =
            self.stays.peek().copied().filter(|Reverse((end, _))| *end <= now)
        {
            self.stays.pop();
            let arrival = arrivals.get(at).context("there is no such pod")?;
            self.offered -= self.pod(arrival)?.demand();
            let node = self.leave(arrivals, at)?;
            if let Some(queue) = &mut self.queue {
                queue.freed.extend(node);
            }
            self.seat_waiting(arrivals, end).await?;
        }
        Ok(())
    }

    /// Waiting times and evictions, if refused pods wait.
    fn waits(&self, arrivals: &[Arrival]) -> Option<Waits> {
        let mut asked = 0;
        for pod in arrivals.iter().filter_map(|arrival| self.pod(arrival).ok()) {
            asked += pod.demand() * pod.stay.seconds(self.job.stretch).unwrap_or(0);
        }
        self.queue.as_ref().map(|queue| queue.waits(asked))
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
