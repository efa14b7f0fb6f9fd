//! Events on pods whose containers use more GPU memory than their share: one for each time that a container goes over it.

use std::collections::BTreeSet;
use std::sync::Arc;

use daemon::events::Recorder;
use proto::memory_overrun::is_over_share;
use proto::memory_text::memory_text;
use tokio::sync::watch;

use crate::start::node_state::NodeState;

use super::{ContainerGpu, ContainerMemory, MeasuredMemory, memory_of_containers};

const REASON: &str = "GPUMemoryOverShare";

/// The containers that are over their share of a GPU; each has an event on its pod. Pure.
#[derive(Debug, Default)]
struct Overruns(BTreeSet<ContainerGpu>);

impl Overruns {
    /// Notes a measurement, and returns the containers that have gone over their share since the measurement before.
    fn update<'m, 'p>(&mut self, measured: &'m [ContainerMemory<'p>]) -> Vec<&'m ContainerMemory<'p>> {
        let mut new = Vec::new();
        let mut over = BTreeSet::new();
        for memory in measured {
            let was_over = self.0.contains(&memory.key);
            let is_over = match (memory.used, memory.given) {
                // A use just below the tolerance does not end the overrun: it may be above it again in a moment.
                (Some(used), Some(given)) => is_over_share(used, given) || (was_over && used > given),
                // Without both figures nothing shows that an overrun has ended.
                _ => was_over,
            };
            if is_over {
                over.insert(memory.key.clone());
                if !was_over {
                    new.push(memory);
                }
            }
        }
        self.0 = over;
        new
    }
}

fn message(memory: &ContainerMemory<'_>) -> String {
    let [used, given] = [memory.used, memory.given].map(|bytes| memory_text(bytes.unwrap_or_default()));
    format!(
        "container {} uses {used} of GPU {} ({}), where its share is {given}, so that other pods of the GPU may not get theirs: have \
         its program allocate less, or request more memory; with the annotation gpushare/enforcement: driver a pod goes only where \
         the GPU driver enforces its share",
        memory.key.container, memory.gpu.minor, memory.gpu.uuid
    )
}

/// Writes the events, after each measurement, until the task is dropped.
pub(crate) async fn report_overruns(
    node: Arc<NodeState>,
    mut measured: watch::Receiver<Option<Arc<MeasuredMemory>>>,
    recorder: Recorder,
) {
    let mut overruns = Overruns::default();
    // The end of the measuring task ends the process.
    while measured.changed().await.is_ok() {
        let Some(measured) = measured.borrow_and_update().clone() else {
            continue;
        };
        let (fleet, pods) = (node.fleet.borrow().clone(), node.pods.borrow());
        let containers = memory_of_containers(&pods, &fleet, node.settings.memory_unit, &measured);
        for memory in overruns.update(&containers) {
            recorder.warn(memory.pod, REASON, message(memory));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::inventory::Gpu;
    use crate::node::pods::{NodePod, PodUid};
    use crate::tests::builders::{gpu, pod, units};

    const GIB: u64 = 1 << 30;

    /// The use of the pod's container, whose share is 8 GiB.
    fn using<'a>(pod: &'a NodePod, gpu: &'a Gpu, used: Option<u64>) -> ContainerMemory<'a> {
        let key = ContainerGpu {
            pod: PodUid::from("a"),
            container: "main".to_owned(),
            gpu: gpu.uuid.clone(),
        };
        ContainerMemory {
            pod,
            gpu,
            key,
            used,
            given: Some(8 * GIB),
        }
    }

    /// The containers with an event after each measurement of one container's use (none: not known); its share is 8 GiB.
    fn events(pod: &NodePod, uses: &[Option<u64>]) -> Vec<usize> {
        let gpu = gpu(0);
        let mut overruns = Overruns::default();
        let mut counts = Vec::new();
        for used in uses {
            counts.push(overruns.update(&[using(pod, &gpu, *used)]).len());
        }
        counts
    }

    #[test]
    fn each_overrun_is_reported_once() {
        let pod = pod("a", 1, [units(8)]);
        let (within, at_share, edge, over) = (Some(GIB), Some(8 * GIB), Some(33 * GIB / 4), Some(16 * GIB));
        for (uses, expected) in [
            (vec![within, edge, over, over], vec![0, 0, 1, 0]),
            (vec![over, at_share, over], vec![1, 0, 1]),
            (vec![over, edge, over], vec![1, 0, 0]),
            (vec![over, None, over], vec![1, 0, 0]),
            (vec![None, over], vec![0, 1]),
        ] {
            assert_eq!(events(&pod, &uses), expected, "{uses:?}");
        }
    }

    #[test]
    fn a_container_that_is_gone_is_forgotten() {
        let (pod, gpu) = (pod("a", 1, [units(8)]), gpu(0));
        let mut overruns = Overruns::default();
        assert_eq!(overruns.update(&[using(&pod, &gpu, Some(16 * GIB))]).len(), 1);
        assert!(overruns.update(&[]).is_empty() && overruns.0.is_empty());
    }

    #[test]
    fn the_event_has_both_figures_and_the_remedy() {
        let (pod, gpu) = (pod("a", 1, [units(8)]), gpu(0));
        assert_eq!(
            message(&using(&pod, &gpu, Some(16 * GIB))),
            "container main uses 16 GiB of GPU 0 (GPU-00000000-aaaa-bbbb-cccc-000000000000), where its share is 8 GiB, so that other \
             pods of the GPU may not get theirs: have its program allocate less, or request more memory; with the annotation \
             gpushare/enforcement: driver a pod goes only where the GPU driver enforces its share"
        );
    }
}
