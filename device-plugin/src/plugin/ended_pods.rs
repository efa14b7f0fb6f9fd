//! Has kubelet forget devices of pods that have ended, and write its checkpoint without them.
//!
//! kubelet frees such devices only when it allocates the next ones or lists pod resources, and writes the checkpoint only when it
//! allocates or takes a device list (`pkg/kubelet/cm/devicemanager/manager.go`). One that restarts before that counts them as in
//! use while it admits the pods that it finds, and fails those for good to which the scheduler has given the room. Pods that end
//! while kubelet is away are not covered: nobody but kubelet writes its checkpoint.

use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::one_line;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::debug;

use super::NodeState;
use crate::identity::checkpoint::{Allocated, Checkpoint};
use crate::pods::{Pods, Stage};
use crate::proof::podresources::Lister;

/// Pods that end together are one change, and kubelet learns of a deletion as late as this plugin.
const SETTLE: Duration = Duration::from_millis(100);
/// The pause before the first and before later tries, which double up to the second value.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(60));

/// Keeps pods that have ended out of kubelet's checkpoint until the task is dropped.
pub async fn keep_forgotten(node: Arc<NodeState>, lister: Lister) {
    let mut pods = node.pods.clone();
    if pods.wait_for(Pods::is_synced).await.is_err() {
        return std::future::pending().await;
    }
    let mut pause = PAUSES.0;
    loop {
        let written = node.checkpoint().and_then(Checkpoint::read).unwrap_or_default();
        let is_due = names_ended(&written, &pods.borrow_and_update());
        // kubelet frees devices itself before it allocates. If it is asked in the middle of an allocation, it forgets which
        // devices it has just chosen, and may give them to the next pod too.
        if is_due && !node.is_allocating() {
            match lister.list(&node.settings.names).await {
                Ok(_) => node.list_again.send_replace(()),
                Err(error) => debug!(
                    error = one_line(&error),
                    "kubelet is asked later to forget pods that have ended"
                ),
            }
        }
        changed(&mut pods, is_due.then_some(pause)).await;
        pause = if is_due {
            (pause * 2).min(PAUSES.1)
        } else {
            PAUSES.0
        };
        sleep(SETTLE).await;
    }
}

/// Waits for a change of the pods, at most for `longest`.
async fn changed(pods: &mut watch::Receiver<Pods>, longest: Option<Duration>) {
    let changed = async {
        if pods.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    match longest {
        Some(longest) => drop(tokio::time::timeout(longest, changed).await),
        None => changed.await,
    }
}

/// Returns true if the checkpoint names a pod that has ended.
fn names_ended(written: &[Allocated], pods: &Pods) -> bool {
    written.iter().any(|entry| {
        pods.get(&entry.pod)
            .is_none_or(|pod| pod.stage == Stage::Terminal)
    })
}

#[cfg(test)]
mod tests {
    use proto::kubelet::deviceplugin::ContainerAllocateResponse;
    use rstest::rstest;

    use super::*;
    use crate::builders::{pod, pods, units};
    use crate::extended_resource::ExtendedResource;
    use crate::pods::{NodePod, PodUid};

    fn entry(uid: &str) -> Allocated {
        let answer = ContainerAllocateResponse::default();
        Allocated {
            pod: PodUid::from(uid),
            container: "c".to_owned(),
            resource: ExtendedResource::Memory,
            ids: vec!["a".to_owned()],
            answer,
        }
    }

    #[rstest]
    #[case::nothing_is_written(&[], &[("a", Stage::Running)], false)]
    #[case::all_run(&["a"], &[("a", Stage::Running), ("b", Stage::Admitted)], false)]
    #[case::one_is_gone(&["a", "gone"], &[("a", Stage::Running)], true)]
    #[case::one_has_ended(&["a", "b"], &[("a", Stage::Running), ("b", Stage::Terminal)], true)]
    #[case::the_api_server_knows_no_end(&["a"], &[("a", Stage::Bound)], false)]
    fn what_kubelet_is_to_forget(
        #[case] written: &[&str],
        #[case] there: &[(&str, Stage)],
        #[case] expected: bool,
    ) {
        let there: Vec<NodePod> = there
            .iter()
            .map(|(name, stage)| NodePod {
                stage: *stage,
                ..pod(name, 1, [units(1)])
            })
            .collect();
        let written: Vec<Allocated> = written.iter().map(|uid| entry(uid)).collect();
        assert_eq!(names_ended(&written, &pods(there)), expected);
    }
}
