//! The arrivals of pods: a list, shuffled and scaled to a demand, or in recorded order.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::world::{ReplayInput, ReplayPod};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The index of the arriving pod in [`ReplayInput::pods`]; a copy has the index of its original.
    pub pod: usize,
    /// The name of the pod or of the copy, unique in the run.
    pub name: Box<str>,
}

/// All pods in random order. With a `demand` in GPU thousandths, random pods are left out, or copies of random
/// pods are appended, until all together come as close to it from below as the next copy allows.
pub fn shuffled(world: &ReplayInput, seed: u64, demand: Option<i64>) -> Vec<Arrival> {
    let mut dice = StdRng::seed_from_u64(seed);
    let mut order: Vec<usize> = (0..world.pods.len()).collect();
    order.shuffle(&mut dice);
    let asked = |pod: usize| world.pods.get(pod).map_or(0, ReplayPod::demand);
    let mut sum: i64 = order.iter().copied().map(asked).sum();
    let is_too_long = demand.is_some_and(|demand| sum > demand);
    while is_too_long && Some(sum) > demand && !order.is_empty() {
        sum -= asked(order.remove(dice.random_range(0..order.len())));
    }
    let mut arrivals: Vec<Arrival> = order
        .iter()
        .map(|pod| Arrival {
            pod: *pod,
            name: name_of(world, *pod),
        })
        .collect();
    let Some(demand) = demand else { return arrivals };
    // Without pods that ask for GPUs no number of copies reaches the demand.
    if is_too_long || sum == 0 {
        return arrivals;
    }
    for copy in 0.. {
        let Some(pod) = order.get(dice.random_range(0..order.len())).copied() else {
            break;
        };
        sum += asked(pod);
        if sum > demand {
            break;
        }
        let name = format!("{}-tuned-{copy}", name_of(world, pod)).into();
        arrivals.push(Arrival { pod, name });
    }
    arrivals
}

pub fn recorded(world: &ReplayInput) -> Vec<Arrival> {
    let pods = world.pods.iter().enumerate();
    pods.map(|(idx, pod)| Arrival {
        pod: idx,
        name: pod.name.clone(),
    })
    .collect()
}

/// Sorts arrivals by time; a stable sort, in which pods without a time come first.
pub fn by_time(world: &ReplayInput, arrivals: &mut [Arrival]) {
    arrivals.sort_by_key(|arrival| world.pods.get(arrival.pod).and_then(|pod| pod.stay.from));
}

fn name_of(world: &ReplayInput, pod: usize) -> Box<str> {
    world
        .pods
        .get(pod)
        .map_or_else(Box::default, |pod| pod.name.clone())
}

#[cfg(test)]
mod tests {
    use super::super::objects;
    use super::super::trace::pods_of;
    use super::*;

    fn world() -> ReplayInput {
        let pod = |at: usize| {
            format!(
                "p{at:02},1,1,{},{},,{}\n",
                at % 4,
                if at % 4 == 1 { 500 } else { 1000 },
                40 - at
            )
        };
        let pods = (0..40).map(pod).collect::<Vec<_>>().concat();
        objects::world(
            &[],
            &pods_of(&format!(
                "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time\n{pods}"
            ))
            .unwrap(),
            Vec::new(),
        )
        .unwrap()
    }

    fn demand(world: &ReplayInput, arrivals: &[Arrival]) -> i64 {
        arrivals
            .iter()
            .map(|arrival| world.pods[arrival.pod].demand())
            .sum()
    }

    #[test]
    fn a_seed_determines_the_order() {
        let world = world();
        let names = |seed| {
            shuffled(&world, seed, None)
                .iter()
                .map(|arrival| arrival.name.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(1), names(1));
        assert_ne!(names(1), names(2));
        let mut sorted = names(1);
        sorted.sort();
        assert_eq!(
            sorted,
            world.pods.iter().map(|pod| pod.name.clone()).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_list_is_extended_or_cut_to_a_demand() {
        let world = world();
        let whole = demand(&world, &shuffled(&world, 1, None));
        let more = shuffled(&world, 1, Some(whole * 13 / 10));
        assert!((whole * 13 / 10 - 3000..=whole * 13 / 10).contains(&demand(&world, &more)));
        assert!(
            more[..40].iter().all(|arrival| !arrival.name.contains("tuned")),
            "the list itself comes first"
        );
        assert!(
            more[40..]
                .iter()
                .zip(0..)
                .all(|(arrival, at)| arrival.name.ends_with(&format!("-tuned-{at}")))
        );
        let less = shuffled(&world, 1, Some(whole / 2));
        assert!((whole / 2 - 3000..=whole / 2).contains(&demand(&world, &less)));
        assert!(less.iter().all(|arrival| !arrival.name.contains("tuned")));
    }

    #[test]
    fn pods_without_gpus_cannot_reach_a_demand() {
        let world = objects::world(
            &[],
            &pods_of("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\na,1,1,0,0,\n").unwrap(),
            Vec::new(),
        )
        .unwrap();
        assert_eq!(shuffled(&world, 1, Some(1000)).len(), 1);
    }

    #[test]
    fn recorded_times_determine_the_order() {
        let world = world();
        let mut arrivals = shuffled(&world, 1, None);
        by_time(&world, &mut arrivals);
        let times: Vec<Option<i64>> = arrivals
            .iter()
            .map(|arrival| world.pods[arrival.pod].stay.from)
            .collect();
        assert!(times.is_sorted() && times[0] == Some(1));
    }
}
