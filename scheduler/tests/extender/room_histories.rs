//! Histories of rooms that the leader makes by evictions: any writes fail, leaders end at any write, and other pods come and go.
//!
//! Not tried: two leaders at once, which the fence of bindings keeps apart, and nodes that come and go.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proto::pod::Pod;
use serde_json::{Value, json};
use tokio::time::{Instant, advance};

use crate::api::Fault;
use crate::making_room::{HOLD, Making, important, running, with_app};
use crate::objects::units;
use crate::world::World;

/// The nodes, of two GPUs each.
const NODES: [&str; 2] = ["n0", "n1"];

/// The units of memory of each GPU.
const GPU: u64 = 80;

/// The units that the pods of high priority ask for, by rising priority.
const ASKED: [u64; 4] = [40, 60, 80, 40];

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
}

/// A history: pods of low priority, by GPU and priority, and steps.
#[derive(Clone, Debug)]
struct History {
    low: Vec<(u64, i32)>,
    budget: i64,
    is_budget_shown: bool,
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
    ];
    let low = vec((0..4_u64, select(std::vec![-5, 0, 3, 7])), 4..20);
    (low, 0..4_i64, any::<bool>(), vec(step, 5..30)).prop_map(|(low, budget, is_budget_shown, steps)| {
        History {
            low,
            budget,
            is_budget_shown,
            steps,
        }
    })
}

/// A history under way.
struct Run {
    making: Making,
    low: Vec<Value>,
    high: Vec<Value>,
    n_replaced: usize,
    is_watching: bool,
    /// True if pods are evicted, and false if events alone say which could be.
    evicts: bool,
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
                let pod = if at % 3 < 2 { with_app(pod, "a") } else { pod };
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
        let making = Making::of(world, evicts, 60);
        if history.is_budget_shown {
            making.world.api.with_shown_budgets();
        }
        Self {
            making,
            low,
            high,
            n_replaced: 0,
            is_watching: true,
            evicts,
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
        let mut world = World::making_room();
        for node in NODES {
            world = world.with_node(node, &[GPU, GPU]);
        }
        world.api = self.making.world.api.clone();
        world.api.forget_plans();
        self.is_watching = true;
        self.making = Making::of(world, self.evicts, 60);
        self.catch_up();
    }

    /// A decision, at which the leader may end.
    async fn tick(&mut self) {
        let api = self.making.world.api.clone();
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
        assert!(!is_made, "the leader evicts pods for {pod} already");
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

    /// The amounts of GPUs that are kept for several pods together.
    fn check_hints(&self) -> Result<(), TestCaseError> {
        let index = self.making.world.index.read();
        for node in index.fleet().nodes() {
            for gpu in node.gpus() {
                let (kept, total) = (
                    gpu.hinted.memory.bytes_ceil(),
                    gpu.device.total().memory.bytes_ceil(),
                );
                prop_assert!(
                    kept <= total,
                    "{} of {} bytes of {} are kept",
                    kept,
                    total,
                    node.name()
                );
            }
        }
        Ok(())
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
            Step::Try(at) => {
                let Some(pod) = api
                    .find(&self.high[*at])
                    .filter(|pod| pod["spec"]["nodeName"].is_null())
                else {
                    return;
                };
                let nominated = pod["status"]["nominatedNodeName"].as_str().map(str::to_owned);
                let world = &self.making.world;
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
                    self.n_replaced += 1;
                    let pod = units(&format!("replacement{}", self.n_replaced), 20);
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
        }
    }
}

/// With any fault at any write nothing is evicted but the plan of a nominated pod of higher priority, nothing twice, nothing for two
/// pods and nothing against a budget that is known; nothing is kept for two pods, or after its time.
async fn play(history: History) -> Result<(), TestCaseError> {
    let mut run = Run::new(&history, true);
    let limit = HOLD + Duration::from_secs(60);
    for step in &history.steps {
        run.take(step).await;
        let wrongs = run.making.world.api.wrongs();
        prop_assert!(wrongs.is_empty(), "{:?} after {:?}", wrongs, step);
        run.check_hints()?;
    }
    run.making.world.api.heal();
    run.take(&Step::Watch(true)).await;
    let mut n_late = 0;
    for _ in 0..80 {
        advance(Duration::from_secs(5)).await;
        run.tick().await;
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
            run.take(step).await;
        }
        run.take(&Step::Seconds(1)).await;
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
