//! Histories of rooms that the leader makes by evictions: any writes fail, leaders end at any write, device plugins and other
//! pods come and go, and another scheduler takes room.
//!
//! Not tried: two leaders at once, which the fence of bindings keeps apart, and nodes that come and go.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proto::pod::Pod;
use serde_json::{Value, json};
use tokio::time::{Instant, advance};

use crate::api::{Fault, SECOND_TIER};
use crate::making_room::{HOLD, Making, important, running, with_app};
use crate::objects::units;
use crate::plugin_away::reporting_node;
use crate::world::World;

/// The nodes, of two GPUs each.
const NODES: [&str; 2] = ["n0", "n1"];

/// The units of memory of each GPU.
const GPU: u64 = 80;

/// The units that the pods of high priority ask for, by rising priority.
const ASKED: [u64; 4] = [40, 60, 80, 40];

/// The units of memory that a pod of another scheduler takes.
const STRANGER: u64 = 20;

/// One step of a history.
#[derive(Clone, Debug)]
enum Step {
    /// Seconds pass, with a decision after each.
    Seconds(u64),
    /// kube-scheduler tries a pod.
    Try(usize),
    /// All pods that are leaving end.
    EndLeaving,
    /// A pod that room may be made for is deleted.
    Delete(usize),
    /// kube-scheduler nominates a pod to another node, or to none.
    Nominate(usize, bool),
    /// A pod is created in place of evicted ones, and placed if it fits.
    Replace(usize),
    /// The next eviction has a fault, after some that have none.
    FailEviction(usize, Fault),
    /// The next nomination has a fault.
    FailNomination(Fault),
    /// The next read of a pod has a fault.
    FailRead,
    /// The watch shows nothing, or everything again.
    Watch(bool),
    /// Another replica takes over: its index has been shown everything, and its memory is empty.
    TakeOver,
    /// The leader ends at its write of this number, which is carried out or not, and another replica takes over.
    EndAt(usize, bool),
    /// kube-scheduler preempts for a pod, as far as `preempt` names victims.
    Preempt(usize),
    /// The budget allows this number of evictions.
    Budget(i64),
    /// The device plugin of the node of this number goes away, or serves again.
    Plugin(usize, bool),
    /// Another scheduler binds a pod to the GPU of this number if it has free memory, also where room is kept.
    Stranger(u64),
    /// The leader starts again with `--make-room evict`, or with `report`.
    Switch(bool),
}

/// A history: pods of low priority, by GPU and priority, and steps.
#[derive(Clone, Debug)]
struct History {
    low: Vec<(u64, i32)>,
    budget: i64,
    is_budget_shown: bool,
    per_hour: usize,
    steps: Vec<Step>,
}

fn fault() -> impl Strategy<Value = Fault> {
    select(vec![
        Fault::Status(429),
        Fault::Status(500),
        Fault::Status(409),
        Fault::StatusAfterwards(500),
        Fault::Hang,
        Fault::HangAfterwards,
        Fault::Break,
        Fault::BreakAfterwards,
        Fault::Slow(Duration::from_secs(1)),
    ])
}

fn history() -> impl Strategy<Value = History> {
    let step = prop_oneof![
        6 => (1..15_u64).prop_map(Step::Seconds),
        4 => (0..ASKED.len()).prop_map(Step::Try),
        3 => Just(Step::EndLeaving),
        1 => (0..ASKED.len()).prop_map(Step::Delete),
        1 => (0..ASKED.len(), any::<bool>()).prop_map(|(pod, is_elsewhere)| Step::Nominate(pod, is_elsewhere)),
        2 => (1..5_usize).prop_map(Step::Replace),
        3 => (0..5_usize, fault()).prop_map(|(n, fault)| Step::FailEviction(n, fault)),
        2 => fault().prop_map(Step::FailNomination),
        1 => Just(Step::FailRead),
        2 => any::<bool>().prop_map(Step::Watch),
        1 => Just(Step::TakeOver),
        3 => (0..8_usize, any::<bool>()).prop_map(|(n, is_done)| Step::EndAt(n, is_done)),
        2 => (0..ASKED.len()).prop_map(Step::Preempt),
        1 => (0..4_i64).prop_map(Step::Budget),
        2 => (0..NODES.len(), any::<bool>()).prop_map(|(node, is_away)| Step::Plugin(node, is_away)),
        2 => (0..4_u64).prop_map(Step::Stranger),
        1 => any::<bool>().prop_map(Step::Switch),
    ];
    let low = vec((0..4_u64, select(std::vec![-5, 0, 3, 7])), 4..20);
    let settings = (0..4_i64, any::<bool>(), select(std::vec![1, 3, 60]));
    (low, settings, vec(step, 5..30)).prop_map(|(low, settings, steps)| {
        let (budget, is_budget_shown, per_hour) = settings;
        History {
            low,
            budget,
            is_budget_shown,
            per_hour,
            steps,
        }
    })
}

/// A history under way.
struct Run {
    making: Making,
    low: Vec<Value>,
    high: Vec<Value>,
    /// The number of pods that replacements and other schedulers have added.
    n_added: usize,
    is_watching: bool,
    /// True if pods are evicted, and false if events alone say which could be.
    evicts: bool,
    per_hour: usize,
    /// The number of evictions and writes before the leader began to lead.
    before: (usize, usize),
    /// True for each node whose device plugin is away.
    away: [bool; NODES.len()],
    n_plugin_reports: u32,
    /// The bytes of each GPU that are kept over pods of other schedulers, which came later.
    overlaps: BTreeMap<(String, u32), u64>,
}

impl Run {
    /// The nodes with pods of low priority, and pods of high priority.
    fn new(history: &History, evicts: bool) -> Self {
        let mut world = World::making_room();
        for node in NODES {
            world = world.with_node(node, &[GPU, GPU]);
        }
        let mut used = [0; 4];
        let mut low = Vec::new();
        for (at, (gpu, priority)) in history.low.iter().enumerate() {
            let slot = usize::try_from(*gpu).unwrap();
            if used[slot] < GPU {
                used[slot] += 20;
                let pod = running(
                    &format!("low{at}"),
                    &format!("n{}", gpu / 2),
                    gpu % 2,
                    20,
                    *priority,
                );
                let mut pod = if at % 3 < 2 { with_app(pod, "a") } else { pod };
                if at % 5 == 0 {
                    pod["metadata"]["labels"]["tier"] = SECOND_TIER.into();
                }
                world = world.with_pod(&pod);
                low.push(pod);
            }
        }
        world.api.set_budget("a", history.budget);
        let numbered = ASKED.iter().zip(1000..);
        let high = numbered.map(|(asked, priority)| important(&format!("high{priority}"), *asked, priority));
        let high: Vec<Value> = high.collect();
        for pod in &high {
            world = world.with_pod(pod);
        }
        let making = Making::of(world, evicts, history.per_hour);
        if history.is_budget_shown {
            making.world.api.with_shown_budgets();
        }
        Self {
            making,
            low,
            high,
            n_added: 0,
            is_watching: true,
            evicts,
            per_hour: history.per_hour,
            before: (0, 0),
            away: [false; NODES.len()],
            n_plugin_reports: 0,
            overlaps: BTreeMap::new(),
        }
    }

    /// Shows everything that the API server has, and nothing else.
    fn catch_up(&self) {
        let (world, pods) = (&self.making.world, self.making.world.api.all());
        world.list::<Pod>(&pods);
        world.api.show_budgets();
    }

    /// Another replica takes over from one that has ended.
    fn take_over(&mut self) {
        let mut world = World::making_room_by(self.evicts);
        for node in NODES {
            world = world.with_node(node, &[GPU, GPU]);
        }
        world.api = self.making.world.api.clone();
        world.api.forget_plans();
        self.before = (world.api.evicted().len(), world.api.n_writes());
        self.overlaps.clear();
        self.is_watching = true;
        self.making = Making::of(world, self.evicts, self.per_hour);
        self.show_plugins();
        self.catch_up();
    }

    /// The watch shows which device plugins are away.
    fn show_plugins(&mut self) {
        self.n_plugin_reports += 1;
        for (node, is_away) in NODES.iter().zip(self.away) {
            let node = reporting_node(node, !is_away, self.n_plugin_reports);
            self.making.world.apply_node(&node);
        }
    }

    /// A decision, at which the leader may end.
    async fn tick(&mut self) {
        let api = self.making.world.api.clone();
        api.set_away(self.left_out());
        let has_ended = tokio::select! {
            biased;
            () = api.ended() => true,
            () = self.making.tick() => false,
        };
        if has_ended {
            self.take_over();
        }
    }

    /// kube-scheduler asks for victims among all less important pods of each node, deletes those of the first node, nominates the
    /// pod to it and removes the nominations of less important pods there.
    async fn preempt(&self, pod: &Value) {
        let (world, api) = (&self.making.world, &self.making.world.api);
        let is_less_important = |other: &&Value| {
            other["spec"]["priority"].as_i64().unwrap_or(0) < pod["spec"]["priority"].as_i64().unwrap()
        };
        let mut proposals = json!({});
        for node in NODES {
            let pods = api.all();
            let mut bound: Vec<&Value> = pods
                .iter()
                .filter(|other| other["spec"]["nodeName"] == node)
                .filter(is_less_important)
                .collect();
            bound.sort_by_key(|other| std::cmp::Reverse(other["spec"]["priority"].as_i64()));
            let uid = |pod: &&Value| json!({"UID": pod["metadata"]["uid"]});
            let victims: Vec<Value> = bound.iter().map(uid).collect();
            if !victims.is_empty() {
                proposals[node] = json!({"Pods": victims, "NumPDBViolations": 0});
            }
        }
        let is_made = api.is_nominated_for_room(pod);
        let body = json!({"Pod": pod, "NodeNameToMetaVictims": proposals}).to_string();
        let (_, text) = world.send("POST", "/gpushare-scheduler/preempt", body).await;
        let answer: Value = serde_json::from_str(&text).unwrap();
        let named = answer["NodeNameToMetaVictims"].as_object().unwrap();
        let Some((node, victims)) = named.iter().next() else {
            return;
        };
        assert!(
            !is_made || !self.evicts,
            "the leader evicts pods for {pod} already"
        );
        let planned = api.planned_for_others(pod);
        for victim in victims["Pods"].as_array().unwrap() {
            let name = victim["UID"].as_str().unwrap().trim_start_matches("uid-");
            assert!(!planned.contains(&name.to_owned()), "{name} goes for another pod");
            api.preempt(name);
        }
        api.nominate(pod, &json!(node));
        for other in api.all().iter().filter(is_less_important) {
            if other["status"]["nominatedNodeName"] == **node {
                api.nominate(other, &Value::Null);
            }
        }
    }

    /// The nodes that no pods are sent to.
    fn left_out(&self) -> BTreeSet<String> {
        let index = self.making.world.index.read();
        let problem = |node: &&str| index.filter().plugin_problem(node).unwrap_or_default();
        let left_out = NODES
            .iter()
            .filter(|node| problem(node).starts_with("no pods are sent here"));
        left_out.map(|node| (*node).to_owned()).collect()
    }

    /// The bytes of each GPU that are kept for pods over those of others that stay: neither leave nor go by a plan.
    fn overlaps(&self) -> BTreeMap<(String, u32), u64> {
        let api = &self.making.world.api;
        let planned = api.planned();
        let is_staying = |pod: &&Value| pod["metadata"]["deletionTimestamp"].is_null();
        let all = api.all();
        let uids = all
            .iter()
            .filter(is_staying)
            .map(|pod| pod["metadata"]["uid"].as_str().unwrap());
        let staying: BTreeSet<&str> = uids.filter(|uid| !planned.contains(*uid)).collect();
        let index = self.making.world.index.read();
        let mut overlaps = BTreeMap::new();
        for node in index.fleet().nodes() {
            for gpu in node.gpus() {
                let stays = gpu
                    .holders
                    .iter()
                    .filter(|holder| staying.contains(holder.owner.as_str()));
                let stays: u64 = stays.map(|holder| holder.amounts.memory.bytes_ceil()).sum();
                let taken = stays + gpu.hinted.memory.bytes_ceil();
                let overlap = taken.saturating_sub(gpu.device.total().memory.bytes_ceil());
                overlaps.insert((node.name().to_owned(), gpu.device.minor), overlap);
            }
        }
        overlaps
    }

    /// All room that is kept is free, or becomes free by pods that go, unless another scheduler has taken it since.
    fn check_hints(&mut self) -> Result<(), TestCaseError> {
        let overlaps = self.overlaps();
        let before = std::mem::replace(&mut self.overlaps, overlaps);
        for (gpu, overlap) in &self.overlaps {
            let allowed = before.get(gpu).copied().unwrap_or(0);
            prop_assert!(
                *overlap <= allowed,
                "{} bytes of {:?} are kept over other pods",
                overlap,
                gpu
            );
        }
        Ok(())
    }

    /// The leader evicts no more pods than it may in an hour, which no history lasts, and writes nothing if it only reports.
    fn check_limits(&self) -> Result<(), TestCaseError> {
        let api = &self.making.world.api;
        let (n_evicted, n_writes) = self.before;
        let n_evicted = api.evicted().len() - n_evicted;
        prop_assert!(n_evicted <= self.per_hour, "{} pods in an hour", n_evicted);
        prop_assert!(self.evicts || api.n_writes() == n_writes, "a report writes");
        Ok(())
    }

    /// Another scheduler binds a pod.
    fn add_stranger(&mut self, gpu: u64) {
        let (node, minor) = (NODES[usize::try_from(gpu / 2).unwrap()], gpu % 2);
        let is_free = {
            let index = self.making.world.index.read();
            let view = index.fleet().view(index.fleet().node_id(node).unwrap()).unwrap();
            let gpus = view.gpus();
            gpus[usize::try_from(minor).unwrap()].free.memory.bytes_ceil() >= STRANGER << 20
        };
        if is_free && self.is_watching {
            self.n_added += 1;
            let pod = running(&format!("stranger{}", self.n_added), node, minor, STRANGER, 5000);
            self.making.world.api.put(&pod);
            self.making.world.apply_pod(&pod);
            self.overlaps = self.overlaps();
        }
    }

    /// kube-scheduler tries a pod.
    async fn try_pod(&self, at: usize) {
        let world = &self.making.world;
        let waiting = world.api.find(&self.high[at]);
        let Some(pod) = waiting.filter(|pod| pod["spec"]["nodeName"].is_null()) else {
            return;
        };
        let nominated = pod["status"]["nominatedNodeName"].as_str().map(str::to_owned);
        let mut fitting = match &nominated {
            Some(node) => world.fitting(&pod, &[node]).await,
            None => Vec::new(),
        };
        if fitting.is_empty() {
            fitting = world.fitting(&pod, &NODES).await;
        }
        if let Some(node) = fitting.first()
            && world.bind(&pod, node).await.is_empty()
            && self.is_watching
        {
            world.see(&pod);
        }
    }

    async fn take(&mut self, step: &Step) {
        let api = self.making.world.api.clone();
        match step {
            Step::Seconds(n) => {
                for _ in 0..*n {
                    advance(Duration::from_secs(1)).await;
                    self.tick().await;
                }
            }
            Step::Try(at) => self.try_pod(*at).await,
            Step::EndLeaving => {
                for pod in api.all() {
                    if !pod["metadata"]["deletionTimestamp"].is_null() {
                        api.remove(&pod);
                        if self.is_watching {
                            self.making.world.delete_pod(&pod);
                        }
                    }
                }
            }
            Step::Delete(at) => {
                api.remove(&self.high[*at]);
                if self.is_watching {
                    self.making.world.delete_pod(&self.high[*at]);
                }
            }
            Step::Nominate(at, is_elsewhere) => {
                let pod = api
                    .find(&self.high[*at])
                    .filter(|pod| pod["spec"]["nodeName"].is_null());
                if let Some(pod) = pod {
                    api.nominate(&pod, &if *is_elsewhere { json!("n9") } else { Value::Null });
                }
            }
            Step::Replace(n) => {
                for _ in 0..*n {
                    self.n_added += 1;
                    let pod = units(&format!("replacement{}", self.n_added), 20);
                    let world = &self.making.world;
                    let fitting = world.fitting(&pod, &NODES).await;
                    if let Some(node) = fitting.first().filter(|_| self.is_watching) {
                        world.api.put(&pod);
                        world.apply_pod(&pod);
                        if world.bind(&pod, node).await.is_empty() {
                            world.see(&pod);
                        }
                    }
                }
            }
            Step::FailEviction(n, fault) => {
                api.fail_evictions(std::iter::repeat_n(None, *n).chain([Some(*fault)]));
            }
            Step::FailNomination(fault) => api.fail_nominations([Some(*fault)]),
            Step::FailRead => api.fail_gets([Fault::Break]),
            Step::Watch(is_watching) => {
                self.is_watching = *is_watching;
                api.show_to(is_watching.then(|| self.making.world.index.clone()));
                if *is_watching {
                    self.catch_up();
                }
            }
            Step::TakeOver => self.take_over(),
            Step::EndAt(n, is_carried_out) => api.end_after(*n, *is_carried_out),
            Step::Preempt(at) => {
                let pod = api
                    .find(&self.high[*at])
                    .filter(|pod| pod["spec"]["nodeName"].is_null());
                if let Some(pod) = pod {
                    self.preempt(&pod).await;
                }
            }
            Step::Budget(allowed) => api.set_budget("a", *allowed),
            Step::Plugin(node, is_away) => {
                self.away[*node] = *is_away;
                self.show_plugins();
            }
            Step::Stranger(gpu) => self.add_stranger(*gpu),
            Step::Switch(evicts) => {
                self.evicts = *evicts;
                self.take_over();
            }
        }
    }
}

/// With any fault at any write nothing is evicted but the plan of a nominated pod of higher priority, nothing twice, nothing for
/// two pods, nothing against budgets that are known or beyond the limit of an hour, nothing for a pod that others have gone for a
/// short time ago, and nothing where the device plugin is away; nothing is kept for two pods, over a pod that stays, or after its
/// time.
async fn play(history: History) -> Result<(), TestCaseError> {
    let mut run = Run::new(&history, true);
    let limit = HOLD + Duration::from_secs(60);
    for step in &history.steps {
        run.take(step).await;
        let wrongs = run.making.world.api.wrongs();
        prop_assert!(wrongs.is_empty(), "{:?} after {:?}", wrongs, step);
        run.check_hints()?;
        run.check_limits()?;
    }
    run.making.world.api.heal();
    if !run.evicts {
        run.take(&Step::Switch(true)).await;
    }
    run.take(&Step::Watch(true)).await;
    let mut n_late = 0;
    for _ in 0..80 {
        advance(Duration::from_secs(5)).await;
        run.tick().await;
        run.check_limits()?;
        n_late += usize::from(run.making.world.api.longest_nomination() > limit);
    }
    prop_assert_eq!(n_late, 0, "a nomination lasts after its time");
    for pod in run.high.iter().filter_map(|pod| run.making.world.api.find(pod)) {
        let is_nominated = pod["status"]["nominatedNodeName"].is_string();
        let is_hinted = run
            .making
            .world
            .index
            .read()
            .hints()
            .is_hinted(pod["metadata"]["uid"].as_str().unwrap());
        let is_waiting = pod["spec"]["nodeName"].is_null();
        prop_assert!(
            !is_waiting || is_nominated || !is_hinted,
            "a room is kept after its time"
        );
    }
    prop_assert_eq!(run.making.world.api.wrongs(), Vec::<String>::new());
    let evicted = run.making.world.api.evicted();
    let low: BTreeSet<&str> = run
        .low
        .iter()
        .map(|pod| pod["metadata"]["name"].as_str().unwrap())
        .collect();
    prop_assert!(
        evicted.iter().all(|name| low.contains(&**name)),
        "replacements have no controller: {:?}",
        evicted
    );
    Ok(())
}

/// Plays a history again and again for an hour, with `--make-room report`.
async fn play_report(history: History) -> Result<(), TestCaseError> {
    let mut run = Run::new(&history, false);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3600) {
        for step in &history.steps {
            if !matches!(step, Step::Switch(_)) {
                run.take(step).await;
            }
        }
        // Each round may leave pods, of which few rounds keep the number small.
        run.take(&Step::Seconds(30)).await;
    }
    prop_assert_eq!(run.making.world.api.n_writes(), 0);
    Ok(())
}

fn block_on(future: impl Future<Output = Result<(), TestCaseError>>) -> Result<(), TestCaseError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(future)
}

proptest! {
    // A quarter of the usual number, as each history has many seconds: `PROPTEST_CASES=40000` tries 10,000.
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 4))]

    #[test]
    fn faults_cause_no_further_evictions(history in history()) {
        block_on(play(history))?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2))]

    #[test]
    fn a_report_writes_nothing_but_events(history in history()) {
        block_on(play_report(history))?;
    }
}
