//! The plugin's farewell after SIGTERM: it goes on serving the pods that were bound before the scheduler knew of the end.
//!
//! kubelet fails a pod for good if it admits the pod without the plugin. The scheduler binds no more pods to this node once the
//! Node says that the plugin ends; kubelet admits the pods that are bound by then within moments.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::devices::extended_resource::Registrations;
use crate::node::pods::{NodePod, NodePods, PodStage};

/// Longest wait for the write of the Node: without an API server the plugin must end as well.
const WRITE_LIMIT: Duration = Duration::from_secs(2);

/// Time for which the plugin goes on serving in any case: the scheduler's last bindings may be under way, and the watch may lag.
const MIN_SERVING: Duration = Duration::from_secs(2);

/// Longest time after that for kubelet to admit the pods that are bound to this node.
const ADMISSION_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Farewell {
    pub(super) registered: watch::Receiver<Registrations>,
    /// Set when the Node says that this plugin ends.
    pub(super) is_written: watch::Receiver<bool>,
    pub(super) pods: watch::Receiver<NodePods>,
}

impl Farewell {
    /// Waits, after SIGTERM, while pods may still need the plugin: its servers go on meanwhile. At most nine seconds.
    pub(super) async fn run(mut self) {
        // kubelet admits no pod with a resource that is not registered, so there is nothing to wait for.
        let serves = self
            .registered
            .borrow()
            .values()
            .any(|is_registered| *is_registered);
        if serves {
            info!("serving kubelet until pods that are bound to this node are admitted");
            self.serve_bound_pods().await;
        }
    }

    async fn serve_bound_pods(&mut self) {
        let written = self.is_written.wait_for(|is_written| *is_written);
        if timeout(WRITE_LIMIT, written).await.is_err() {
            warn!(
                "the Node does not say in time that this plugin ends: pods that are bound to it later will fail"
            );
        }
        sleep(MIN_SERVING).await;
        let admitted = self.pods.wait_for(|pods| !pods.iter().any(is_awaiting_admission));
        if timeout(ADMISSION_LIMIT, admitted).await.is_err() {
            warn!("kubelet has not admitted all pods that are bound to this node: they will fail");
        }
    }
}

/// Returns true if kubelet may still call Allocate for the pod.
fn is_awaiting_admission(pod: &NodePod) -> bool {
    // kubelet does not admit a pod that is being deleted, and asks nothing for one without our resources.
    pod.stage == PodStage::Bound && !pod.deleting && !pod.containers.is_empty()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tokio::time::Instant;

    use super::*;
    use crate::devices::extended_resource::ExtendedResource;
    use crate::tests::builders::{pod, pods, units};

    fn bound(stage: PodStage) -> NodePods {
        pods([NodePod {
            stage,
            ..pod("p", 1, [units(2)])
        }])
    }

    #[rstest]
    #[case::never_registered(false, true, PodStage::Bound, Duration::ZERO)]
    #[case::nothing_is_awaiting_admission(true, true, PodStage::Running, MIN_SERVING)]
    #[case::a_pod_is_never_admitted(true, true, PodStage::Bound, MIN_SERVING + ADMISSION_LIMIT)]
    #[case::the_api_server_does_not_answer(true, false, PodStage::Admitted, WRITE_LIMIT + MIN_SERVING)]
    #[tokio::test(start_paused = true)]
    async fn the_time_until_shutdown(
        #[case] is_registered: bool,
        #[case] is_written: bool,
        #[case] stage: PodStage,
        #[case] expected: Duration,
    ) {
        let (_registered, registered) = watch::channel([(ExtendedResource::Shared, is_registered)].into());
        let (_written, is_written) = watch::channel(is_written);
        let (_pods, pods) = watch::channel(bound(stage));
        let farewell = Farewell {
            registered,
            is_written,
            pods,
        };
        let began = Instant::now();
        farewell.run().await;
        let took = began.elapsed();
        assert!(
            took >= expected && took < expected + Duration::from_millis(10),
            "{took:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_plugin_ends_when_the_last_pod_is_admitted() {
        let (_registered, registered) = watch::channel([(ExtendedResource::Shared, true)].into());
        let (_written, is_written) = watch::channel(true);
        let (pods_sender, pods) = watch::channel(bound(PodStage::Bound));
        let farewell = Farewell {
            registered,
            is_written,
            pods,
        };
        let ended = tokio::spawn(farewell.run());
        sleep(MIN_SERVING + ADMISSION_LIMIT / 2).await;
        assert!(!ended.is_finished());
        pods_sender.send_replace(bound(PodStage::Admitted));
        ended.await.unwrap();
    }
}
