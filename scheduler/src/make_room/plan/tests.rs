//! The choice on small fleets, compared with every set of pods on every node.

use std::cell::Cell;
use std::cmp::Reverse;
use std::time::Instant;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use proto::pod::Pod;
use serde_json::{Value, json};

use super::*;
use crate::accounting::PodFacts;
use crate::index::Promised;
use crate::kube_scheduler::PodRules;
use crate::offline;
use crate::watch::ObjectStore;

/// The memory of a GPU, in units.
const GPU: u64 = 80;

/// The number of random cases.
const N_CASES: u32 = 10_000;

/// The number of pods on a node of which the search tries every set; of more a better set may exist.
const FEW_PODS: usize = 8;

/// The priority of the pod that room is made for.
const PRIORITY: i32 = 1000;

/// A pod that holds a part of a GPU.
#[derive(Clone, Debug)]
struct Holder {
    node: usize,
    gpu: usize,
    units: u64,
    priority: i32,
    started: i64,
    is_leaving: bool,
    has_controller: bool,
    has_budget: bool,
}

/// A fleet, and a pod that asks for a part of one GPU.
#[derive(Clone, Debug)]
struct Case {
    n_nodes: usize,
    n_gpus: usize,
    holders: Vec<Holder>,
    allowed: i64,
    asked: u64,
}

/// kube-scheduler's order of nodes: highest priority, sum of priorities, number of pods, latest start; then the name.
type Cost = (i64, i64, usize, Reverse<i64>, usize);

impl Case {
    /// Removes holders that a GPU has no room for.
    fn fitting(mut self) -> Self {
        let mut used = vec![0; self.n_nodes * self.n_gpus];
        self.holders.retain(|holder| {
            let at = holder.node % self.n_nodes * self.n_gpus + holder.gpu % self.n_gpus;
            let fits = used[at] + holder.units <= GPU;
            used[at] += if fits { holder.units } else { 0 };
            fits
        });
        for holder in &mut self.holders {
            (holder.node, holder.gpu) = (holder.node % self.n_nodes, holder.gpu % self.n_gpus);
        }
        self
    }

    fn index(&self) -> Shared<Index> {
        let name = |at: usize| format!("n{at}");
        let node = |at: usize| {
            json!({
                "metadata": {"name": name(at), "annotations": {"aliyun.com/gpu-mem-unit": "MiB"}},
                "status": {"capacity": {"aliyun.com/gpu-count": "4"}},
            })
        };
        let device = |at: usize| {
            let gpu = |minor: usize| {
                let resources = json!({"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": format!("{GPU}Mi"), "koordinator.sh/gpu-memory-ratio": "100"});
                json!({"type": "gpu", "id": format!("{at}-{minor}"), "minor": minor, "health": true, "resources": resources})
            };
            let gpus: Vec<Value> = (0..self.n_gpus).map(gpu).collect();
            json!({"metadata": {"name": name(at)}, "spec": {"devices": gpus}})
        };
        let holders = self.holders.iter().enumerate().map(|(at, holder)| holder.pod(at));
        let pods = holders.chain([self.pod()]);
        let nodes = 0..self.n_nodes;
        let mut index = offline::index(nodes.clone().map(node), nodes.map(device), pods);
        let spec = json!({"selector": {"matchLabels": {"app": "a"}}});
        let status = json!({"disruptionsAllowed": self.allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1});
        let budget = json!({"metadata": {"name": "b", "namespace": "d"}, "spec": spec, "status": status});
        index.apply(serde_json::from_value::<PodDisruptionBudget>(budget).unwrap());
        Shared::new(index)
    }

    /// The pod that room is made for.
    fn pod(&self) -> Value {
        let limits = json!({"aliyun.com/gpu-mem": self.asked.to_string()});
        json!({
            "metadata": {"name": "high", "namespace": "d", "uid": "high"},
            "spec": {"priority": PRIORITY, "containers": [{"name": "c", "resources": {"limits": limits}}]},
        })
    }

    /// Returns true if the pod fits on a node without these holders and those that are leaving.
    fn fits(&self, node: usize, gone: &[usize]) -> bool {
        (0..self.n_gpus).any(|gpu| {
            let stays = |(at, holder): &(usize, &Holder)| {
                (holder.node, holder.gpu) == (node, gpu) && !holder.is_leaving && !gone.contains(at)
            };
            let used = self.holders.iter().enumerate().filter(stays);
            used.map(|(_, holder)| holder.units).sum::<u64>() + self.asked <= GPU
        })
    }

    /// The least cost over these nodes and all sets of pods that may be evicted; `None` if no set helps.
    fn least_cost(&self, is_counted: impl Fn(usize) -> bool) -> Option<Cost> {
        let mut least = None;
        for node in (0..self.n_nodes).filter(|node| is_counted(*node)) {
            let may_go: Vec<usize> = (0..self.holders.len())
                .filter(|at| self.holders[*at].may_go(node))
                .collect();
            for bits in 1..1_u32 << may_go.len() {
                let set = may_go
                    .iter()
                    .enumerate()
                    .filter(|(nth, _)| bits & (1 << nth) != 0);
                let set: Vec<usize> = set.map(|(_, at)| *at).collect();
                let n_protected = set.iter().filter(|at| self.holders[**at].has_budget).count();
                if i64::try_from(n_protected).unwrap() <= self.allowed && self.fits(node, &set) {
                    let cost = self.cost(node, &set);
                    least = Some(least.map_or(cost, |least: Cost| least.min(cost)));
                }
            }
        }
        least
    }

    fn cost(&self, node: usize, set: &[usize]) -> Cost {
        let holders = || set.iter().map(|at| &self.holders[*at]);
        let highest = holders().map(|holder| holder.priority).max().unwrap();
        let sum = holders()
            .map(|holder| i64::from(holder.priority) - i64::from(i32::MIN))
            .sum();
        let most_important = holders().filter(|holder| holder.priority == highest);
        let started = most_important.map(|holder| holder.started).min().unwrap();
        (highest.into(), sum, set.len(), Reverse(started), node)
    }

    /// True of a node where the search tries every set of pods.
    fn is_searched_whole(&self, node: usize) -> bool {
        let on = |holder: &&Holder| holder.may_go(node) || (holder.node == node && holder.is_leaving);
        self.holders.iter().filter(on).count() <= FEW_PODS
    }
}

impl Holder {
    fn may_go(&self, node: usize) -> bool {
        self.node == node && !self.is_leaving && self.has_controller && self.priority < PRIORITY
    }

    fn pod(&self, at: usize) -> Value {
        let units = self.units.to_string();
        let mut pod = json!({
            "metadata": {
                "name": format!("p{at}"), "namespace": "d", "uid": at.to_string(),
                "annotations": {
                    "ALIYUN_COM_GPU_MEM_IDX": self.gpu.to_string(), "ALIYUN_COM_GPU_MEM_POD": units,
                    "ALIYUN_COM_GPU_MEM_DEV": GPU.to_string(), "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
                    "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000000000000",
                },
            },
            "spec": {
                "nodeName": format!("n{}", self.node), "priority": self.priority,
                "containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": units}}}],
            },
            "status": {"phase": "Running", "startTime": format!("2026-01-01T00:00:{:02}Z", self.started)},
        });
        if self.is_leaving {
            pod["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z".into();
        }
        if self.has_controller {
            pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]);
        }
        if self.has_budget {
            pod["metadata"]["labels"] = json!({"app": "a"});
        }
        pod
    }
}

fn holder() -> impl Strategy<Value = Holder> {
    let place = (0..3_usize, 0..4_usize, (1..=8_u64).prop_map(|tens| tens * 10));
    let priorities = proptest::sample::select(vec![-5, 0, 0, 3, 7, PRIORITY, 2000]);
    let flags = (
        proptest::bool::weighted(0.1),
        proptest::bool::weighted(0.9),
        proptest::bool::weighted(0.2),
    );
    (place, priorities, 0..4_i64, flags).prop_map(|((node, gpu, units), priority, started, flags)| Holder {
        node,
        gpu,
        units,
        priority,
        started,
        is_leaving: flags.0,
        has_controller: flags.1,
        has_budget: flags.2,
    })
}

fn case() -> impl Strategy<Value = Case> {
    let asked = (1..=8_u64).prop_map(|tens| tens * 10);
    let holders = proptest::collection::vec(holder(), 0..=10);
    (1..=3_usize, 1..=4_usize, holders, 0..3_i64, asked).prop_map(
        |(n_nodes, n_gpus, holders, allowed, asked)| {
            Case {
                n_nodes,
                n_gpus,
                holders,
                allowed,
                asked,
            }
            .fitting()
        },
    )
}

/// The plans for the pod of a case, on all nodes.
fn plans(case: &Case) -> Plans {
    let index = case.index();
    let pod: Pod = serde_json::from_value(case.pod()).unwrap();
    let (facts, rules, nodes) = {
        let index = index.read();
        let names = (0..case.n_nodes).map(|at| format!("n{at}"));
        let nodes: Vec<NodeId> = names.map(|name| index.filter().node_id(&name).unwrap()).collect();
        (
            PodFacts::of(&pod, index.names()).unwrap(),
            PodRules::of(&pod),
            nodes,
        )
    };
    let demand = index.read().demand("high", &facts).unwrap().unwrap();
    let promised = Promised::new();
    let preemptor = Preemptor::for_room(&rules, (i32::MAX, true), &demand, &promised);
    let began = Instant::now();
    super::plans(&preemptor, &BTreeSet::new(), &index, &nodes, || began)
}

/// The best plan costs as little as any set of pods on any node. A better set exists on nodes alone where the search is bounded,
/// and in few cases.
#[test]
fn no_set_of_pods_costs_less() {
    let n_above = Cell::new(0_u32);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(N_CASES));
    let tried = runner.run(&case(), |case| {
        let plans = plans(&case);
        let is_free = (0..case.n_nodes).any(|node| case.fits(node, &[]));
        prop_assert!(plans.free.is_none() || is_free);
        let least = case.least_cost(|_| true);
        let Some(plan) = plans.best.first() else {
            prop_assert!(plans.free.is_some() || least.is_none());
            return Ok(());
        };
        let victims: Vec<usize> = plan
            .victims
            .iter()
            .map(|victim| victim.pod.uid.parse().unwrap())
            .collect();
        let node: usize = plan.node[1..].parse().unwrap();
        prop_assert!(victims.iter().all(|at| case.holders[*at].may_go(node)));
        prop_assert!(case.fits(node, &victims));
        let n_protected = victims.iter().filter(|at| case.holders[**at].has_budget).count();
        prop_assert!(
            i64::try_from(n_protected).unwrap() <= case.allowed,
            "a budget is violated"
        );
        if !is_free {
            let cost = Some(case.cost(node, &victims));
            prop_assert!(least <= cost);
            n_above.set(n_above.get() + u32::from(least < cost));
            let least = case.least_cost(|node| case.is_searched_whole(node));
            prop_assert!(least.is_none() || cost <= least);
        }
        Ok(())
    });
    tried.unwrap();
    let n_above = n_above.get();
    assert!(
        n_above * 50 <= N_CASES,
        "{n_above} of {N_CASES} plans cost more than the least"
    );
}
