//! A model of kube-scheduler 1.36's node search and scores, without extenders.
//!
//! Sample sizes and scores are compared with kube-scheduler's in the tests below. It models the fit of resources, the sampling of nodes, the two default scores that tell nodes apart
//! for a pod without preferences, and ties. It leaves out preferences of pods, spreading, images and volumes.
//! Pure, but for its seeded random numbers.

use clap::ValueEnum;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};

use super::occupancy::{FreeRoom, NodeUse};
use super::portion::{floor, portion};
use super::world::{ReplayInput, ReplayNode, ReplayPod};
use kit::kube_scheduler::Sampling;

/// Thousandths of a CPU that a container counts as when nodes are scored, if it asks for none.
pub const DEFAULT_CPU: i64 = 100;
/// Bytes that a container counts as when nodes are scored, if it asks for none.
pub const DEFAULT_MEMORY: i64 = 200 << 20;
/// The best score that a plugin gives.
const BEST: i64 = 100;

/// The number of fitting nodes that the search wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleSize {
    /// kube-scheduler's adaptive default: from half of a small cluster to a twentieth of a huge one.
    Stock,
    /// A percentage, as `percentageOfNodesToScore` says.
    Percent(u8),
}

/// The choice among nodes with equal scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Ties {
    /// A random one of the best nodes.
    Random,
    /// The first of the best nodes in an order that is drawn once per run.
    Fixed,
}

/// The state of the modelled kube-scheduler.
#[derive(Debug)]
pub struct SearchModel {
    sampling: Sampling,
    dice: StdRng,
    /// Each node's rank among equals; empty if ties are drawn every time.
    ranks: Vec<usize>,
}

/// The result of one search.
#[derive(Debug, Default)]
pub struct SearchResult {
    /// Nodes that fit, in the order in which they were found.
    pub nodes: Vec<usize>,
    /// The node that was looked at first.
    pub first: usize,
    /// The number of nodes that were looked at.
    pub n_seen: usize,
}

impl SampleSize {
    fn sampling(self) -> Sampling {
        Sampling::of(match self {
            Self::Stock => 0,
            Self::Percent(percent) => percent.into(),
        })
    }
}

impl SearchModel {
    /// A kube-scheduler that has just started, for a cluster of `n_nodes` nodes.
    pub fn new(n_nodes: usize, sampling: SampleSize, ties: Ties, seed: u64) -> Self {
        let mut dice = StdRng::seed_from_u64(seed);
        let mut ranks: Vec<usize> = if ties == Ties::Fixed {
            (0..n_nodes).collect()
        } else {
            Vec::new()
        };
        ranks.shuffle(&mut dice);
        Self {
            sampling: sampling.sampling(),
            dice,
            ranks,
        }
    }

    /// Looks for nodes with room for a pod, from where the last search ended.
    pub fn find(
        &mut self,
        world: &ReplayInput,
        occupancy: &FreeRoom,
        pod: &ReplayPod,
        found: &mut SearchResult,
    ) {
        found.nodes.clear();
        found.n_seen = 0;
        let n_nodes = world.nodes.len();
        let n_to_find = self.sampling.n_to_find(n_nodes);
        found.first = self.sampling.search_order(n_nodes).next().unwrap_or(0);
        for node in self.sampling.search_order(n_nodes) {
            if found.nodes.len() == n_to_find {
                break;
            }
            found.n_seen += 1;
            if world.is_eligible(pod.eligible, node) && occupancy.has_room(node, pod) {
                found.nodes.push(node);
            }
        }
        self.sampling.advance(found.n_seen, n_nodes);
    }

    /// The node with the best score; among equals, as `Ties` says.
    pub fn choose(&mut self, scored: &[(usize, i64)]) -> Option<usize> {
        let best = scored.iter().map(|(_, score)| *score).max()?;
        let mut tied = scored
            .iter()
            .filter(|(_, score)| *score == best)
            .map(|(node, _)| *node);
        if self.ranks.is_empty() {
            let tied: Vec<usize> = tied.collect();
            return tied.choose(&mut self.dice).copied();
        }
        let first = tied.next()?;
        Some(tied.fold(first, |one, other| {
            if self.ranks.get(other) < self.ranks.get(one) {
                other
            } else {
                one
            }
        }))
    }

    /// A random number from 0 to `bound`, exclusive.
    pub fn below(&mut self, bound: i64) -> i64 {
        self.dice.random_range(0..bound.max(1))
    }
}

/// The scores of `NodeResourcesFit` and `NodeResourcesBalancedAllocation`, each with its default weight of 1.
pub fn default_score(node: &ReplayNode, used: &NodeUse, pod: &ReplayPod) -> i64 {
    least_allocated(node, used, pod) + balanced(node, used, pod)
}

/// kube-scheduler's score `LeastAllocated` for CPU and memory: the larger, the more the pod would leave free.
fn least_allocated(node: &ReplayNode, used: &NodeUse, pod: &ReplayPod) -> i64 {
    let [cpu, memory] = used.scored;
    let [pod_cpu, pod_memory] = pod.scored;
    let resources = [(node.cpu, cpu + pod_cpu), (node.memory, memory + pod_memory)];
    let (mut sum, mut n) = (0, 0);
    // A node without CPU is scored by memory alone, one without memory by CPU alone.
    for (total, taken) in resources.into_iter().filter(|(total, _)| *total > 0) {
        sum += if taken > total {
            0
        } else {
            (total - taken) * BEST / total
        };
        n += 1;
    }
    if n == 0 { 0 } else { sum / n }
}

/// `NodeResourcesBalancedAllocation`: since 1.36 the score is how the pod changes the balance of CPU and
/// memory.
fn balanced(node: &ReplayNode, used: &NodeUse, pod: &ReplayPod) -> i64 {
    // kube-scheduler's plugin skips pods that request neither CPU nor memory.
    if pod.cpu == 0 && pod.memory == 0 {
        return 0;
    }
    let (cpu, memory) = (node.cpu - used.cpu_free, node.memory - used.memory_free);
    let with = balance(node, cpu + pod.cpu, memory + pod.memory);
    BEST / 2 + (BEST / 2 + with - balance(node, cpu, memory)) / 2
}

/// kube-scheduler's score `BalancedAllocation`: the larger, the closer the used portions of CPU and memory are.
fn balance(node: &ReplayNode, cpu: i64, memory: i64) -> i64 {
    if node.cpu == 0 || node.memory == 0 {
        return BEST;
    }
    let deviation = (portion(cpu, node.cpu).min(1.0) - portion(memory, node.memory).min(1.0)).abs() / 2.0;
    floor((1.0 - deviation) * 100.0)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::objects;
    use super::super::trace::{NodeRow, TracePod};
    use super::*;

    const GIB: i64 = 1024;

    fn node(name: String, model: &str) -> NodeRow {
        NodeRow {
            name,
            cpu_milli: 10_000,
            memory_mib: 10 * GIB,
            gpus: 1,
            model: model.to_owned(),
        }
    }

    fn pod(cpu_milli: i64, memory_mib: i64) -> TracePod {
        let (name, models) = ("p".to_owned(), String::new());
        TracePod {
            name,
            cpu_milli,
            memory_mib,
            gpus: 0,
            gpu_milli: 0,
            models,
            is_vendor: false,
            created: None,
            deleted: None,
        }
    }

    #[rstest]
    #[case::few(99, SampleSize::Stock, 99)]
    #[case::at_least_a_hundred(150, SampleSize::Stock, 100)]
    #[case::the_trace(1213, SampleSize::Stock, 497)]
    #[case::many(5000, SampleSize::Stock, 500)]
    #[case::never_less_than_a_twentieth(15_000, SampleSize::Stock, 750)]
    #[case::all(5000, SampleSize::Percent(100), 5000)]
    #[case::percentage(5000, SampleSize::Percent(5), 250)]
    fn the_number_of_sampled_nodes_is_that_of_kube_scheduler(
        #[case] n_nodes: usize,
        #[case] sampling: SampleSize,
        #[case] n: usize,
    ) {
        assert_eq!(sampling.sampling().n_to_find(n_nodes), n);
    }

    /// Cases: free before, requested, and the two scores of kube-scheduler 1.36.
    #[rstest]
    #[case::empty((0, 0), (1000, GIB), 90 + 75)]
    #[case::half_full((5000, 5 * GIB), (1000, GIB), 40 + 75)]
    #[case::towards_balance((4000, 0), (0, 4 * GIB), 59 + 85)]
    #[case::out_of_balance((0, 0), (4000, 0), 79 + 65)]
    #[case::asks_for_nothing((0, 0), (0, 0), 98)]
    fn the_default_scores_are_those_of_kube_scheduler(
        #[case] used: (i64, i64),
        #[case] asked: (i64, i64),
        #[case] score: i64,
    ) {
        let world = objects::world(&[node("n".to_owned(), "")], &[pod(asked.0, asked.1)]);
        let other = objects::world(&[], &[pod(used.0, used.1)]);
        let node = &world.nodes[0];
        let mut free = NodeUse::empty(node);
        free.take(
            &ReplayPod {
                scored: [used.0, used.1 << 20],
                ..other.pods[0].clone()
            },
            &[],
            1,
        );
        let pod = &world.pods[0];
        let pod = if used.0 == 4000 {
            &ReplayPod {
                scored: [100, pod.memory],
                ..pod.clone()
            }
        } else {
            pod
        };
        assert_eq!(default_score(node, &free, pod), score);
    }

    #[test]
    fn sampling_continues_where_the_last_cycle_ended() {
        let nodes: Vec<NodeRow> = (0..200)
            .map(|at| node(format!("n{at}"), if at % 2 == 0 { "even" } else { "odd" }))
            .collect();
        let world = objects::world(
            &nodes,
            &[
                pod(1, 1),
                TracePod {
                    models: "odd".to_owned(),
                    ..pod(1, 1)
                },
            ],
        );
        let occupancy = FreeRoom::empty(&world);
        let mut kube = SearchModel::new(200, SampleSize::Stock, Ties::Random, 0);
        let mut found = SearchResult::default();
        let mut find = |pod: usize| {
            kube.find(&world, &occupancy, &world.pods[pod], &mut found);
            (found.n_seen, found.nodes[0], found.nodes.len())
        };
        assert_eq!(
            (find(0), find(0), find(1), find(0)),
            ((100, 0, 100), (100, 100, 100), (200, 1, 100), (100, 0, 100))
        );
    }

    #[test]
    fn ties_are_broken_at_random_or_by_a_fixed_order() {
        let scored: Vec<(usize, i64)> = (0..50).map(|node| (node, i64::from(node > 3))).collect();
        let choices = |ties, seed| {
            let mut kube = SearchModel::new(50, SampleSize::Stock, ties, seed);
            (0..20)
                .filter_map(|_| kube.choose(&scored))
                .collect::<Vec<usize>>()
        };
        let fixed = choices(Ties::Fixed, 1);
        assert!(
            fixed.len() == 20 && fixed.iter().all(|node| *node == fixed[0] && *node > 3),
            "{fixed:?}"
        );
        assert!(
            (2..12).any(|seed| choices(Ties::Fixed, seed) != fixed),
            "each run has an order of its own"
        );
        let mut random = choices(Ties::Random, 1);
        assert_eq!(random, choices(Ties::Random, 1));
        random.sort_unstable();
        random.dedup();
        assert!(random.len() > 10 && random[0] > 3, "{random:?}");
    }
}
