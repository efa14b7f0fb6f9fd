//! Fragmentation: the part of the idle GPUs that typical pods cannot use where it is.
//!
//! The measure F of "Beware of Fragmentation" (USENIX ATC '23), in GPU thousandths; memory is not in it.

use std::collections::HashMap;

use super::occupancy::NodeUse;
use super::portion::{float, real};
use super::world::ReplayInput;

/// The percentage of all pods that typical ones cover.
const COVER_PERCENT: usize = 95;

/// A kind of pod that comes often: its request in the units of [`ReplayPod`](super::world::ReplayPod), and the part of all
/// typical pods that are of this kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TypicalPod {
    cpu: i64,
    gpus: usize,
    milli: i64,
    eligible: Option<usize>,
    frequency: f64,
}

/// The commonest kinds of pods, which make up 95 % of all; pods without GPUs among them.
pub fn typical_pods(world: &ReplayInput) -> Vec<TypicalPod> {
    let mut counts: HashMap<(i64, usize, i64, Option<usize>), usize> = HashMap::new();
    for pod in &world.pods {
        *counts
            .entry((pod.cpu, pod.gpus, pod.milli, pod.eligible))
            .or_default() += 1;
    }
    let mut kinds: Vec<_> = counts.into_iter().collect();
    // Ties are broken by the request, since a hash map has no order.
    kinds.sort_by(|(one, n_one), (other, n_other)| n_other.cmp(n_one).then(one.cmp(other)));
    let mut covered = 0;
    let mut typical = Vec::new();
    for ((cpu, gpus, milli, eligible), n) in kinds {
        if covered * 100 >= world.pods.len() * COVER_PERCENT {
            break;
        }
        covered += n;
        typical.push(TypicalPod {
            cpu,
            gpus,
            milli,
            eligible,
            frequency: float(n),
        });
    }
    for kind in &mut typical {
        kind.frequency /= float(covered);
    }
    typical
}

/// The idle GPU thousandths of a node that typical pods could not use, on average over these pods.
pub fn fragment(world: &ReplayInput, node: usize, free: &NodeUse, typical: &[TypicalPod]) -> f64 {
    let idle = free.gpu_free();
    let unusable = |kind: &TypicalPod| {
        // A pod that asks for no GPU, or does not fit the node, can use none of its idle GPUs.
        let is_of_use = kind.gpus > 0
            && world.is_eligible(kind.eligible, node)
            && free.cpu_free >= kind.cpu
            && free.n_with(kind.milli) >= kind.gpus;
        if is_of_use {
            free.gpus.iter().filter(|free| **free < kind.milli).sum()
        } else {
            idle
        }
    };
    typical
        .iter()
        .map(|kind| kind.frequency * real(unusable(kind)))
        .sum()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::objects;
    use super::super::trace::{NodeRow, nodes_of, pods_of};
    use super::*;

    const NODES: &str = "sn,cpu_milli,memory_mib,gpu,model\nn,8000,1024,2,T4\n";

    fn nodes() -> Vec<NodeRow> {
        nodes_of(NODES).unwrap()
    }

    fn pods(n: usize, cpu: u32, gpus: u32, milli: u32, models: &str) -> String {
        (0..n)
            .map(|at| format!("p{cpu}-{gpus}-{milli}-{at},{cpu},1,{gpus},{milli},{models}\n"))
            .collect::<Vec<_>>()
            .concat()
    }

    fn world(pods: &str) -> ReplayInput {
        objects::world(
            &nodes(),
            &pods_of(&format!(
                "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n{pods}"
            ))
            .unwrap(),
            Vec::new(),
        )
        .unwrap()
    }

    #[test]
    fn typical_pods_are_the_most_frequent_kinds_up_to_95_percent() {
        let world = world(
            &[
                pods(60, 1, 1, 500, ""),
                pods(34, 2, 0, 0, ""),
                pods(5, 3, 1, 1000, ""),
                pods(1, 4, 2, 1000, ""),
            ]
            .concat(),
        );
        let typical = typical_pods(&world);
        assert_eq!(typical.iter().map(|kind| kind.cpu).collect::<Vec<_>>(), [1, 2, 3]);
        let frequencies: Vec<i64> = typical
            .iter()
            .map(|kind| super::super::portion::floor(kind.frequency * 99.0 + 0.5))
            .collect();
        assert_eq!(frequencies, [60, 34, 5]);
    }

    /// Free thousandths of two GPUs, free CPU, one kind of pod, and the part that it cannot use.
    #[rstest]
    #[case::all_of_use([1000, 500], 8000, (1000, 1, 500, ""), 0.0)]
    #[case::too_small([1000, 400], 8000, (1000, 1, 500, ""), 400.0)]
    #[case::no_gpu_wanted([1000, 400], 8000, (1000, 0, 0, ""), 1400.0)]
    #[case::no_cpu([1000, 400], 999, (1000, 1, 500, ""), 1400.0)]
    #[case::too_few([1000, 900], 8000, (1000, 2, 1000, ""), 1900.0)]
    #[case::other_model([1000, 1000], 8000, (1000, 1, 500, "V100|P100"), 2000.0)]
    #[case::its_model([1000, 1000], 8000, (1000, 1, 500, "V100|T4"), 0.0)]
    fn of_one_kind(
        #[case] gpus: [i64; 2],
        #[case] cpu: i64,
        #[case] kind: (u32, u32, u32, &str),
        #[case] expected: f64,
    ) {
        let world = world(&pods(1, kind.0, kind.1, kind.2, kind.3));
        let free = NodeUse {
            cpu_free: cpu,
            gpus: gpus.into(),
            ..NodeUse::empty(&world.nodes[0])
        };
        assert!((fragment(&world, 0, &free, &typical_pods(&world)) - expected).abs() < 1e-9);
    }

    #[test]
    fn kinds_count_as_often_as_they_come() {
        let world = world(&[pods(3, 1000, 1, 500, ""), pods(1, 1000, 0, 0, "")].concat());
        let free = NodeUse {
            gpus: [1000, 400].into(),
            ..NodeUse::empty(&world.nodes[0])
        };
        assert!(
            (fragment(&world, 0, &free, &typical_pods(&world)) - (0.75 * 400.0 + 0.25 * 1400.0)).abs() < 1e-9
        );
    }
}
