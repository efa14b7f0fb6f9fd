//! Invented clusters and workloads: kinds that are hard for a policy in different ways, each in any number of
//! variants.
//!
//! A variant's number decides the nodes and the mix of pods, the seed decides the single pods: runs of one
//! number differ by chance alone. Everything is a function of kind, number and seed.

use anyhow::Result;
use clap::ValueEnum;
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde_json::{Value, json};

use super::mix::{GPUS, Mix, MixRules};
use crate::replay::objects;
use crate::replay::portion::{floor, real};
use crate::replay::trace::{NodeRow, TracePod, WHOLE};
use crate::replay::world::ReplayInput;
use kit::command::value_name;
use kit::dice::dice;

/// A kind of cluster and workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Family {
    /// Shares of a few sizes, until the cluster is full.
    Shares,
    /// Shares of any size, until the cluster is full.
    AnyShares,
    /// Whole GPUs, one to eight for a pod.
    Whole,
    /// Shares and whole GPUs, on one node.
    Mixed1,
    /// The same, on 3 nodes.
    Mixed3,
    /// The same, on 20 nodes.
    Mixed20,
    /// The same, on 150 nodes.
    Mixed150,
    /// The same, on 1,213 nodes.
    Mixed1213,
    /// Shares and whole GPUs on nodes of one to eight GPUs.
    Unequal,
    /// Shares, and whole GPUs by `nvidia.com/gpu`.
    Vendor,
    /// Pods that ask for more CPU than their part, and pods without GPUs.
    ShortOfCpu,
    /// Shares and whole GPUs on nodes with a dozen pods of `DaemonSets` each.
    DaemonSets,
    /// Whole GPUs on nodes with `DaemonSets` as above; then pods of whole nodes.
    DaemonSetsThenNodes,
    /// Shares of one size; then pods of whole nodes.
    ShareThenNodes,
    /// Shares of some sizes; then pods of whole nodes.
    SharesThenNodes,
    /// Shares and pods without GPUs; then pods of whole nodes.
    PlainThenNodes,
    /// Whole GPUs; then shares.
    WholeThenShares,
    /// Shares that come and go; then pods of whole nodes too.
    TurnoverThenNodes,
    /// The same, with stays twice as long.
    LongTurnoverThenNodes,
    /// Shares and whole GPUs that come and go, about as many as there is room for.
    Turnover,
    /// Shares by day and large pods by night, which come and go.
    DayAndNight,
}

/// The figure by which policies are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocationMeasure {
    End,
    /// The mean allocated share while the second half of the pods arrives.
    SecondHalf,
}

/// An invented cluster with its pods, in the order in which they arrive.
#[derive(Clone, Debug)]
pub struct MadeCluster {
    pub world: ReplayInput,
    pub measure: AllocationMeasure,
}

struct LoadPhase {
    mix: Mix,
    /// The GPUs that the pods ask for, in percent of the cluster's: all pods together, or those that are there at one time.
    percent: i64,
    /// The length of the phase, as a multiple of [`STAY`]; `None` if its pods never leave.
    stays: Option<i64>,
}

/// The mean stay of a pod, in seconds.
const STAY: i64 = 100_000;

impl LoadPhase {
    /// A phase of pods that never leave; it ends when they ask for this percentage of the cluster's GPUs.
    fn new(mix: Mix, percent: i64) -> Self {
        Self {
            mix,
            percent,
            stays: None,
        }
    }

    /// A phase of pods that never leave, and one of other pods, until both together ask for 130 % of the cluster's GPUs.
    fn then(mix: Mix, percent: i64, other: Mix) -> Vec<Self> {
        vec![Self::new(mix, percent), Self::new(other, 130 - percent)]
    }

    /// A phase of pods that come and go, and ask for this percentage of the cluster's GPUs on average, for `stays` mean stays.
    fn turning(mix: Mix, percent: i64, stays: i64) -> Self {
        Self {
            mix,
            percent,
            stays: Some(stays),
        }
    }
}

impl Family {
    pub fn name(self) -> String {
        value_name(&self)
    }

    pub fn make(self, number: u64, seed: u64) -> Result<MadeCluster> {
        let mut dice = dice(number, &[&self.name()]);
        let cpu_of_gpu = one_of(&[6000, 8000, 12_000, 16_000], &mut dice);
        let rules = MixRules {
            cpu_of_gpu,
            cpu_percent: (30, 90),
        };
        let nodes = self.nodes(rules, &mut dice);
        let phases = self.phases(rules, &mut dice);
        let n_gpus: usize = nodes.iter().map(|node| node.gpus).sum();
        let capacity = i64::try_from(n_gpus)? * WHOLE;
        let daemons = if matches!(self, Self::DaemonSets | Self::DaemonSetsThenNodes) {
            dice.random_range(6..=14)
        } else {
            0
        };
        // The pods have dice of their own, so that another seed changes no node.
        let mut dice = self::dice(number, &[&self.name(), &seed.to_string()]);
        let pods = pods(&phases, capacity, &mut dice);
        let world = objects::world(&nodes, &pods, daemon_pods(&nodes, daemons, cpu_of_gpu / 40))?;
        let measure = if phases.iter().any(|phase| phase.stays.is_some()) {
            AllocationMeasure::SecondHalf
        } else {
            AllocationMeasure::End
        };
        Ok(MadeCluster { world, measure })
    }

    fn nodes(self, rules: MixRules, dice: &mut StdRng) -> Vec<NodeRow> {
        let n = match self {
            Self::Mixed1 => 1,
            Self::Mixed3 => 3,
            Self::Mixed20 | Self::DaemonSets | Self::DaemonSetsThenNodes | Self::ShareThenNodes => 20,
            Self::Mixed150 | Self::TurnoverThenNodes | Self::LongTurnoverThenNodes => 150,
            Self::Mixed1213 => 1213,
            _ => 40,
        };
        let mut nodes = Vec::new();
        for at in 0..n {
            let (mut gpus, mut cpu_of_gpu) = (GPUS, rules.cpu_of_gpu);
            if self == Self::Unequal {
                // Half of all GPUs or more are on nodes of eight, as in real clusters.
                gpus = one_of(&[1, 2, 4, 8, 8], dice);
                cpu_of_gpu = rules.cpu_of_gpu * dice.random_range(50..=150) / 100;
            }
            let n_gpus = i64::try_from(gpus).unwrap_or(0);
            nodes.push(NodeRow {
                name: format!("n{at:04}"),
                cpu_milli: cpu_of_gpu * n_gpus,
                memory_mib: (64 << 10) * n_gpus,
                gpus,
                model: "made".to_owned(),
            });
        }
        nodes
    }

    /// The phases of load that the family puts on its cluster one after the other.
    fn phases(self, rules: MixRules, dice: &mut StdRng) -> Vec<LoadPhase> {
        let mixed = |dice: &mut StdRng| {
            let percent = dice.random_range(20..=50);
            Mix::of_shares(rules, dice).with(Mix::of_whole(rules, dice), percent)
        };
        match self {
            Self::Shares => vec![LoadPhase::new(Mix::of_shares(rules, dice), 130)],
            Self::AnyShares => vec![LoadPhase::new(Mix::of_any(rules, dice), 130)],
            Self::Whole => vec![LoadPhase::new(Mix::of_whole(rules, dice), 130)],
            Self::Mixed1
            | Self::Mixed3
            | Self::Mixed20
            | Self::Mixed150
            | Self::Mixed1213
            | Self::Unequal
            | Self::DaemonSets => {
                vec![LoadPhase::new(mixed(dice), 130)]
            }
            Self::Vendor => vec![LoadPhase::new(mixed(dice).by_vendor(), 130)],
            Self::ShortOfCpu => {
                let greedy = MixRules {
                    cpu_percent: (40, 220),
                    ..rules
                };
                let plain = dice.random_range(20..=60);
                let mix = Mix::of_shares(greedy, dice).with(Mix::of_whole(rules, dice), 30);
                vec![LoadPhase::new(mix.with(Mix::of_plain(rules, dice), plain), 130)]
            }
            Self::DaemonSetsThenNodes => {
                let first = dice.random_range(20..=50);
                LoadPhase::then(Mix::of_one(WHOLE, rules, dice), first, Mix::of_nodes(rules, dice))
            }
            Self::ShareThenNodes => {
                let (first, milli) = (
                    dice.random_range(8..=50),
                    one_of(&[50, 100, 200, 250, 300, 400, 500, 600], dice),
                );
                LoadPhase::then(Mix::of_one(milli, rules, dice), first, Mix::of_nodes(rules, dice))
            }
            Self::SharesThenNodes => {
                let first = dice.random_range(10..=60);
                LoadPhase::then(Mix::of_shares(rules, dice), first, Mix::of_nodes(rules, dice))
            }
            Self::PlainThenNodes => {
                let (first, plain) = (dice.random_range(10..=60), dice.random_range(20..=70));
                let modest = MixRules {
                    cpu_percent: (10, 40),
                    ..rules
                };
                let shares = Mix::of_shares(modest, dice).with(Mix::of_plain(rules, dice), plain);
                LoadPhase::then(shares, first, Mix::of_nodes(modest, dice))
            }
            Self::WholeThenShares => {
                let first = dice.random_range(20..=70);
                LoadPhase::then(Mix::of_whole(rules, dice), first, Mix::of_shares(rules, dice))
            }
            Self::TurnoverThenNodes | Self::LongTurnoverThenNodes => {
                // The mean stay is fixed: for stays twice as long, the phases are half as long.
                let stays = if self == Self::TurnoverThenNodes { 2 } else { 1 };
                let (shares, nodes) = (Mix::of_shares(rules, dice), Mix::of_nodes(rules, dice));
                let (first, then) = (dice.random_range(40..=80), dice.random_range(20..=40));
                // The two mixes are blended by demand: a pod of a whole node asks for more than a pod of a share.
                let both = blend(&shares, then, nodes, 110 - then);
                vec![
                    LoadPhase::turning(shares, first, stays),
                    LoadPhase::turning(both, 110, stays),
                ]
            }
            Self::Turnover => vec![LoadPhase::turning(mixed(dice), dice.random_range(85..=120), 4)],
            Self::DayAndNight => {
                let (day, night) = (Mix::of_shares(rules, dice), Mix::of_whole(rules, dice));
                let load = dice.random_range(80..=110);
                let days = [&day, &night].into_iter().cycle().take(6);
                days.map(|mix| LoadPhase::turning(mix.clone(), load, 1)).collect()
            }
        }
    }
}

fn one_of<T: Copy + Default>(values: &[T], dice: &mut StdRng) -> T {
    values.choose(dice).copied().unwrap_or_default()
}

/// A mix of two others whose demands are in the proportion of these amounts.
fn blend(one: &Mix, amount: i64, other: Mix, other_amount: i64) -> Mix {
    let n_pods = real(amount) / real(one.mean());
    let n_others = real(other_amount) / real(other.mean());
    let percent = u32::try_from(floor(100.0 * n_others / (n_pods + n_others)).clamp(1, 99)).unwrap_or(50);
    one.clone().with(other, percent)
}

/// Makes the pods of all phases: sizes and arrival times are drawn by the dice.
fn pods(phases: &[LoadPhase], capacity: i64, dice: &mut StdRng) -> Vec<TracePod> {
    let mut rows: Vec<TracePod> = Vec::new();
    let mut now = 0.0;
    for phase in phases {
        let demand = capacity * phase.percent / 100;
        let until = now + phase.stays.map_or(f64::MAX, |stays| real(stays * STAY));
        // Seconds between two arrivals: by Little's law, the pods that are there then ask for the wanted demand
        // on average.
        let pause = real(STAY) * real(phase.mix.mean()) / real(demand.max(1));
        let mut asked = 0;
        while phase.stays.is_some() || asked < demand {
            let Some(size) = phase.mix.draw(dice) else { break };
            // Pods that never leave need no times, only an order.
            now += if phase.stays.is_some() {
                exponential(pause, dice)
            } else {
                1.0
            };
            asked += size.demand();
            if now > until {
                break;
            }
            let end = phase
                .stays
                .map(|_| floor(now + exponential(real(STAY), dice)) + 1);
            rows.push(TracePod {
                name: format!("p{:06}", rows.len()),
                cpu_milli: size.cpu_milli,
                memory_mib: size.memory_mib,
                gpus: size.gpus,
                gpu_milli: size.milli,
                models: String::new(),
                wants_vendor_resource: size.wants_vendor_resource,
                created: Some(floor(now)),
                deleted: end,
            });
        }
    }
    rows
}

fn exponential(mean: f64, dice: &mut StdRng) -> f64 {
    -mean * (1.0 - dice.random_range(0.0..1.0_f64)).ln()
}

/// `n` pods of `DaemonSets` for every node, each with `cpu_milli` of CPU.
fn daemon_pods(nodes: &[NodeRow], n: usize, cpu_milli: i64) -> Vec<Value> {
    let mut pods = Vec::new();
    for node in nodes {
        for at in 0..n {
            let (daemon, name) = (format!("daemon-{at}"), format!("daemon-{at}-{}", node.name));
            let owner = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": daemon, "uid": daemon, "controller": true});
            let requests = json!({"cpu": format!("{cpu_milli}m"), "memory": "256Mi"});
            let containers =
                json!([{"name": "main", "image": "busybox:1.36", "resources": {"requests": requests}}]);
            pods.push(json!({
                "metadata": {"name": name, "namespace": "kube-system", "uid": name, "ownerReferences": [owner]},
                "spec": {"nodeName": node.name, "containers": containers}, "status": {"phase": "Running"},
            }));
        }
    }
    pods
}
