//! The schedule of a run, a function of the seed: batches of equal pods, deletions, restarts, disruptions.
//!
//! Pure. Pods are named by number. The schedule itself counts the room of each node, so that every pod fits
//! however the daemons behave.

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};

use kit::kubelet::OrderRule;

/// GPUs of each node.
pub(super) const N_GPUS: u64 = 8;
/// Memory units (GiB) of each GPU.
pub(super) const UNITS_PER_GPU: u64 = 40;
/// Most units that a pod holds of one GPU.
const MOST_OF_ONE: u64 = 4;
/// Units of a node that pods may hold together: in the units that stay free, a pod of [`MOST_OF_ONE`] always finds a GPU.
const MOST_UNITS: u64 = N_GPUS * (UNITS_PER_GPU - MOST_OF_ONE);
/// Units that a node's pods may hold before a batch of pods of two devices, so that each of [`MOST_FOR_TWO`] finds two GPUs.
const MOST_UNITS_FOR_TWO: u64 =
    (N_GPUS - 1) * (UNITS_PER_GPU - MOST_OF_ONE + 1) - 2 * MOST_OF_ONE * MOST_FOR_TWO;
/// Most pods of two devices in one batch.
const MOST_FOR_TWO: u64 = 12;
/// Most pods of one batch.
const MOST_PODS: usize = 48;
/// Most pods of one node; kubelet takes 250.
const MOST_PODS_OF_NODE: usize = 200;

/// The request of every pod of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Memory units of one GPU.
    Units(u64),
    /// Memory units of one GPU, and an init container that asks for as much.
    UnitsAndInit(u64),
    /// Two containers that see the same GPU.
    TwoContainers(u64),
    /// Memory units of one GPU, for an init container alone.
    InitOnly(u64),
    /// 10 % of one GPU: of its memory, by ratio, and of its computing power.
    Ratio,
    /// 10 % of each of two GPUs.
    TwoDevices,
}

impl Shape {
    /// Memory units that a pod of this shape holds, over all its GPUs.
    pub(super) fn units(self) -> u64 {
        match self {
            Self::Units(units) | Self::UnitsAndInit(units) | Self::InitOnly(units) => units,
            Self::TwoContainers(each) => 2 * each,
            Self::Ratio => MOST_OF_ONE,
            Self::TwoDevices => 2 * MOST_OF_ONE,
        }
    }
}

/// A disruption between the binding of a batch and its admission, or during the admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Disruption {
    Nothing,
    /// The plugin is killed, and registers again before the pods are admitted.
    PluginRestarts,
    /// Kubelet is killed, and the plugin registers again before the pods are admitted.
    KubeletRestarts,
    /// The scheduler is killed once the pods are bound.
    SchedulerRestarts,
    /// The scheduler is killed while the pods are being bound.
    SchedulerRestartsEarly,
    /// kube-scheduler is killed while the pods are being bound.
    KubeSchedulerRestarts,
    /// The plugin's watch of pods breaks.
    PluginWatchBreaks,
    /// All watches break, and the changes that they missed are compacted away.
    AllWatchesBreak,
    /// The plugin learns of the pods only after kubelet has asked it for the first of them.
    PluginWatchLags,
    /// The plugin learns of the deletions only after kubelet has asked it for the first of the pods.
    PluginMissesDeletions,
    /// Kubelet learns that pods are deleted only after it has admitted them.
    KubeletMissesDeletions,
    /// The scheduler sees none of the pods, nor that they are bound, until they run.
    SchedulerWatchLags,
    /// The plugin is killed while the pods are being admitted.
    PluginDies,
    /// No CDI spec can be written until kubelet has tried to start the pods: a file stands in place of the directory.
    CdiBlocked,
    /// The plugin cannot write to any file, as on a full disk, until kubelet has tried to start the pods.
    DiskFull,
    /// All CDI specs disappear.
    CdiWiped,
    /// The API server refuses the first writes of the plugin.
    ApiRefuses,
    /// The API server serves the requests, and the first replies are lost.
    RepliesLost,
}

/// Pods that are bound together and admitted together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) node: usize,
    pub(super) pods: Vec<usize>,
    pub(super) shape: Shape,
    /// The order in which kubelet admits them.
    pub(super) order: OrderRule,
    /// The seed of a shuffled order.
    pub(super) order_seed: u64,
    /// The pods among them that are deleted after they are bound and before they are admitted.
    pub(super) deleted: Vec<usize>,
    /// True if the deleted pods vanish at once (grace period 0), without waiting for kubelet.
    pub(super) by_force: bool,
    pub(super) meanwhile: Disruption,
}

/// One step of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ChaosStep {
    Batch(Batch),
    Delete(Vec<usize>),
    /// The containers of pods crash and are started again.
    Crash(Vec<usize>),
    /// The plugin of a node is killed and comes back.
    RestartPlugin(usize),
    /// Kubelet of a node is killed and comes back.
    RestartKubelet(usize),
    /// Kubelet breaks its stream from the plugin.
    BreakStream(usize),
    /// All CDI specs of a node disappear, and the containers of pods crash.
    WipeCdi(usize, Vec<usize>),
}

/// A pod that exists according to the schedule.
#[derive(Clone, Copy, Debug)]
struct Placed {
    number: usize,
    node: usize,
    shape: Shape,
}

/// The generator of a schedule: the pods so far (`n_pods`), those that still exist (`placed`), and the random numbers.
struct Generator {
    n_nodes: usize,
    dice: StdRng,
    n_pods: usize,
    placed: Vec<Placed>,
}

/// Draws all steps of a run on `n_nodes` nodes; the seed decides them.
pub(super) fn schedule(seed: u64, n_steps: usize, n_nodes: usize) -> Vec<ChaosStep> {
    let mut generator = Generator {
        n_nodes,
        dice: StdRng::seed_from_u64(seed),
        n_pods: 0,
        placed: Vec::new(),
    };
    (0..n_steps).map(|_| generator.step()).collect()
}

impl Generator {
    /// Draws the next step at random, and counts the room that it takes or frees.
    fn step(&mut self) -> ChaosStep {
        let node = self.dice.random_range(0..self.n_nodes);
        // A node that is nearly full is emptied, so that device IDs change hands and batches stay large.
        if self.used(node) > MOST_UNITS * 2 / 3 || self.pods_on(node).len() > MOST_PODS_OF_NODE - MOST_PODS {
            return ChaosStep::Delete(self.remove_most(node));
        }
        // All steps but a batch need pods on the node.
        if self.pods_on(node).is_empty() {
            return self.batch(node);
        }
        match self.dice.random_range(0..100) {
            // Batches are where pods race for devices: most steps are batches.
            0..72 => self.batch(node),
            72..80 => ChaosStep::Crash(self.some_of(node)),
            80..86 => ChaosStep::RestartPlugin(node),
            86..91 => ChaosStep::RestartKubelet(node),
            91..94 => ChaosStep::BreakStream(node),
            94..97 => ChaosStep::WipeCdi(node, self.some_of(node)),
            _ => ChaosStep::Delete(self.remove_most(node)),
        }
    }

    /// GPU memory units that the pods on a node hold together.
    fn used(&self, node: usize) -> u64 {
        self.placed
            .iter()
            .filter(|pod| pod.node == node)
            .map(|pod| pod.shape.units())
            .sum()
    }

    /// Numbers of the pods on a node.
    fn pods_on(&self, node: usize) -> Vec<usize> {
        self.placed
            .iter()
            .filter(|pod| pod.node == node)
            .map(|pod| pod.number)
            .collect()
    }

    /// Draws one to eight pods of a node.
    fn some_of(&mut self, node: usize) -> Vec<usize> {
        let mut numbers = self.pods_on(node);
        numbers.shuffle(&mut self.dice);
        numbers.truncate(self.dice.random_range(1..=8));
        numbers
    }

    /// Draws at least two thirds of a node's pods, which the step will delete, and removes them from `placed`; returns their
    /// numbers.
    fn remove_most(&mut self, node: usize) -> Vec<usize> {
        let mut numbers = self.pods_on(node);
        numbers.shuffle(&mut self.dice);
        let kept = self.dice.random_range(0..=numbers.len() / 3);
        numbers.truncate(numbers.len() - kept);
        self.placed.retain(|pod| !numbers.contains(&pod.number));
        numbers
    }

    /// Draws a batch of pods that fits a node: their number and shape, the early deletions, and a disruption.
    fn batch(&mut self, node: usize) -> ChaosStep {
        let shape = self.shape(node);
        let mut most = (MOST_UNITS - self.used(node)) / shape.units();
        if shape == Shape::TwoDevices {
            most = most.min(MOST_FOR_TWO);
        }
        let most = usize::try_from(most).unwrap_or(0).min(MOST_PODS);
        // At least two, since one pod alone cannot be given another's device.
        let n_pods = self.dice.random_range(most.min(2)..=most);
        let pods: Vec<usize> = (self.n_pods..self.n_pods + n_pods).collect();
        self.n_pods += n_pods;
        let mut deleted = pods.clone();
        deleted.shuffle(&mut self.dice);
        let meanwhile = self.meanwhile();
        let misses_deletions = matches!(
            meanwhile,
            Disruption::PluginMissesDeletions | Disruption::KubeletMissesDeletions
        );
        // In two batches of three no pod is deleted early, unless the disruption is about missed deletions.
        let has_deletions = misses_deletions || self.dice.random_range(0..3) == 0;
        let n_deleted = if has_deletions {
            self.dice.random_range(usize::from(misses_deletions)..=n_pods / 2)
        } else {
            0
        };
        deleted.truncate(n_deleted);
        // An order that is listed twice is drawn twice as often.
        let orders = [
            OrderRule::Creation,
            OrderRule::Reversed,
            OrderRule::Reversed,
            OrderRule::Shuffled,
            OrderRule::Shuffled,
        ];
        let placed = pods.iter().filter(|number| !deleted.contains(number));
        self.placed.extend(placed.map(|number| Placed {
            number: *number,
            node,
            shape,
        }));
        let order = orders
            .choose(&mut self.dice)
            .copied()
            .unwrap_or(OrderRule::Shuffled);
        let (order_seed, by_force) = (self.dice.random(), self.dice.random());
        ChaosStep::Batch(Batch {
            node,
            pods,
            shape,
            order,
            order_seed,
            deleted,
            by_force,
            meanwhile,
        })
    }

    /// Draws a shape of pods that fits a node.
    fn shape(&mut self, node: usize) -> Shape {
        let units = self.dice.random_range(1..=4);
        let fits_two = self.used(node) <= MOST_UNITS_FOR_TWO;
        match self.dice.random_range(0..10) {
            0..4 => Shape::Units(units),
            4 => Shape::UnitsAndInit(units),
            5 => Shape::TwoContainers(1 + units % 2),
            6 => Shape::InitOnly(units),
            7 if fits_two => Shape::TwoDevices,
            _ => Shape::Ratio,
        }
    }

    /// Draws the disruption that happens while a batch starts.
    fn meanwhile(&mut self) -> Disruption {
        use Disruption as M;
        match self.dice.random_range(0..100) {
            0..30 => M::Nothing,
            30..36 => M::PluginRestarts,
            36..41 => M::KubeletRestarts,
            41..44 => M::SchedulerRestarts,
            44..47 => M::SchedulerRestartsEarly,
            47..50 => M::KubeSchedulerRestarts,
            50..54 => M::PluginWatchBreaks,
            54..57 => M::AllWatchesBreak,
            57..65 => M::PluginWatchLags,
            65..70 => M::PluginMissesDeletions,
            70..75 => M::KubeletMissesDeletions,
            75..79 => M::SchedulerWatchLags,
            79..82 => M::PluginDies,
            82..86 => M::CdiBlocked,
            86..90 => M::DiskFull,
            90..94 => M::CdiWiped,
            94..97 => M::ApiRefuses,
            _ => M::RepliesLost,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const N_NODES: usize = 2;

    /// The least number of admissions in a schedule: a pod that is deleted early may never be admitted.
    fn n_admissions(steps: &[ChaosStep]) -> usize {
        let of = |step: &ChaosStep| match step {
            ChaosStep::Batch(batch) => batch.pods.len() - batch.deleted.len(),
            _ => 0,
        };
        steps.iter().map(of).sum()
    }

    #[test]
    fn a_seed_determines_the_schedule() {
        assert_eq!(schedule(7, 200, N_NODES), schedule(7, 200, N_NODES));
        assert_ne!(schedule(7, 200, N_NODES), schedule(8, 200, N_NODES));
        assert_eq!(
            schedule(7, 200, N_NODES)[..50],
            schedule(7, 50, N_NODES),
            "a longer run begins as a shorter one"
        );
    }

    #[test]
    fn a_long_run_has_every_kind_of_event() {
        let steps = schedule(1, 2000, N_NODES);
        let batches: Vec<&Batch> = steps
            .iter()
            .filter_map(|step| {
                if let ChaosStep::Batch(batch) = step {
                    Some(batch)
                } else {
                    None
                }
            })
            .collect();
        let meanwhile: std::collections::BTreeSet<String> = batches
            .iter()
            .map(|batch| format!("{:?}", batch.meanwhile))
            .collect();
        assert_eq!(meanwhile.len(), 18, "{meanwhile:?}");
        assert!(
            batches.iter().any(|batch| batch.shape == Shape::TwoDevices)
                && batches.iter().any(|batch| !batch.deleted.is_empty())
        );
        assert!(
            steps.iter().any(|step| matches!(step, ChaosStep::WipeCdi(..)))
                && steps.iter().any(|step| matches!(step, ChaosStep::BreakStream(_)))
        );
        assert!(n_admissions(&steps) > 15_000, "{}", n_admissions(&steps));
    }

    proptest! {
        #[test]
        fn no_node_is_overfull_and_only_existing_pods_are_touched(seed: u64) {
            let mut pods = BTreeMap::new();
            for step in schedule(seed, 100, N_NODES) {
                match step {
                    ChaosStep::Batch(batch) => {
                        prop_assert!(batch.deleted.iter().all(|number| batch.pods.contains(number)));
                        pods.extend(batch.pods.iter().map(|number| (*number, (batch.node, batch.shape.units()))));
                        for node in 0..N_NODES {
                            // Pods that are deleted before their admission hold their units while the batch is bound.
                            let used: u64 = pods.values().filter(|(of, _)| *of == node).map(|(_, units)| units).sum();
                            prop_assert!(used <= MOST_UNITS);
                        }
                        pods.retain(|number, _| !batch.deleted.contains(number));
                    }
                    ChaosStep::Delete(numbers) => {
                        for number in numbers {
                            prop_assert!(pods.remove(&number).is_some());
                        }
                    }
                    ChaosStep::Crash(numbers) | ChaosStep::WipeCdi(_, numbers) => prop_assert!(numbers.iter().all(|number| pods.contains_key(number))),
                    _ => {}
                }
            }
        }
    }
}
