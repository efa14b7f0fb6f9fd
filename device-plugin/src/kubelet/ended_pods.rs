//! Makes kubelet free the devices of pods that have ended, and write its checkpoint without them.
//!
//! kubelet frees such devices only when it allocates the next ones or lists pod resources, and writes the checkpoint only when it
//! allocates or receives a device list (`pkg/kubelet/cm/devicemanager/manager.go`). A kubelet that restarts before that counts
//! the devices as in use while it admits its pods again, and fails pods for good to which the scheduler has given the freed
//! devices. Pods that end while kubelet is away are not covered: kubelet alone writes its checkpoint.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::node::kubelet_checkpoint::Allocated;
use crate::node::pods::{NodePods, until_known};
use crate::start::node_state::NodeState;
use daemon::api_server::one_line;

/// Pause after a change of the pods: pods that end together become one change, and kubelet may see a deletion after this plugin.
const SETTLE: Duration = Duration::from_millis(100);

/// The pause before the first retry, which doubles each time, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Has kubelet free the devices of ended pods until the task is dropped.
pub(crate) async fn free_ended_pods(node: Arc<NodeState>) {
    let mut pods = node.pods.clone();
    until_known(&mut pods).await;
    let mut pause = FIRST_PAUSE;
    loop {
        let allocated = node.checkpoint.read().unwrap_or_default();
        let is_due = names_ended(&allocated, &pods.borrow_and_update());
        // kubelet frees devices itself before it allocates. A list in the middle of an allocation makes it forget the devices
        // that it has just chosen, so that it may give them to the next pod too.
        if is_due && !node.is_allocating() {
            match node.pod_resources.list().await {
                // The list has freed the devices, and receiving a device list makes kubelet write its checkpoint.
                Ok(_) => node.list_again.send_replace(()),
                Err(error) => debug!(
                    error = one_line(&error),
                    "cannot have kubelet free devices of ended pods, trying later"
                ),
            }
        }
        let limit = if is_due { pause } else { Duration::MAX };
        // The end of the watch ends the process.
        let _ = timeout(limit, pods.changed()).await;
        pause = if is_due {
            (pause * 2).min(LONGEST_PAUSE)
        } else {
            FIRST_PAUSE
        };
        sleep(SETTLE).await;
    }
}

fn names_ended(allocated: &[Allocated], pods: &NodePods) -> bool {
    allocated.iter().any(|entry| pods.get_live(&entry.pod).is_none())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::devices::extended_resource::ExtendedResource;
    use crate::node::pods::{NodePod, PodStage};
    use crate::tests::builders::{allocated, pod, pods, units};

    #[rstest]
    #[case::empty_checkpoint(&[], &[("a", PodStage::Running)], false)]
    #[case::all_run(&["a"], &[("a", PodStage::Running), ("b", PodStage::Admitted)], false)]
    #[case::one_is_gone(&["a", "gone"], &[("a", PodStage::Running)], true)]
    #[case::one_has_ended(&["a", "b"], &[("a", PodStage::Running), ("b", PodStage::Terminal)], true)]
    #[case::the_api_server_knows_no_end(&["a"], &[("a", PodStage::Bound)], false)]
    fn kubelet_is_asked_for_ended_pods_alone(
        #[case] written: &[&str],
        #[case] there: &[(&str, PodStage)],
        #[case] expected: bool,
    ) {
        let there: Vec<NodePod> = there
            .iter()
            .map(|(name, stage)| pod(name, 1, [units(1)]).at(*stage))
            .collect();
        let written: Vec<Allocated> = written
            .iter()
            .map(|uid| allocated(uid, "c", ExtendedResource::Memory, &["a"]))
            .collect();
        assert_eq!(names_ended(&written, &pods(there)), expected);
    }
}
