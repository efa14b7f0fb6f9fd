//! The end of the process: it goes on serving for pods that were bound before the scheduler knew that it ends.
//!
//! kubelet fails a pod for good that it admits without the plugin. The scheduler sends no more pods once the Node says that the
//! plugin ends; those that are bound by then are admitted within moments.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::pods::{NodePod, Pods, Stage};

/// Longest wait for the Node to say that the plugin ends.
const WRITTEN_WITHIN: Duration = Duration::from_secs(2);

/// Time for which the plugin serves on in any case: the scheduler's last bindings are on their way, and the watch behind.
const SHORTEST: Duration = Duration::from_secs(2);

/// Longest time after that for kubelet to admit the pods that are bound to this node.
const LONGEST: Duration = Duration::from_secs(5);

/// What an end waits for.
#[derive(Debug)]
pub(super) struct Ending {
    /// Whether kubelet knows each resource.
    pub(super) registered: Vec<watch::Receiver<bool>>,
    /// Set when the Node says that this plugin ends.
    pub(super) is_written: watch::Receiver<bool>,
    /// The pods of this node.
    pub(super) pods: watch::Receiver<Pods>,
}

impl Ending {
    /// Cancels `stop` some time after `signal`, when no pod needs the plugin any more. Never returns.
    pub(super) async fn run(mut self, signal: CancellationToken, stop: CancellationToken) {
        signal.cancelled().await;
        if self
            .registered
            .iter()
            .any(|is_registered| *is_registered.borrow())
        {
            info!("asked to end: serving kubelet until pods that are bound to this node are admitted");
            self.serve_on().await;
        }
        stop.cancel();
        std::future::pending::<()>().await;
    }

    async fn serve_on(&mut self) {
        if timeout(WRITTEN_WITHIN, self.is_written.wait_for(|is_written| *is_written))
            .await
            .is_err()
        {
            warn!(
                "the Node does not say in time that this plugin ends: pods that are bound here later will fail"
            );
        }
        sleep(SHORTEST).await;
        let admitted = self.pods.wait_for(|pods| !pods.iter().any(is_on_its_way));
        if timeout(LONGEST, admitted).await.is_err() {
            warn!("kubelet has not admitted all pods that are bound to this node: they will fail");
        }
    }
}

/// Returns true if kubelet may ask for devices for the pod at any moment.
fn is_on_its_way(pod: &NodePod) -> bool {
    pod.stage == Stage::Bound && !pod.deleting && !pod.containers.is_empty()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tokio::time::Instant;

    use super::*;
    use crate::builders::{pod, pods, units};

    fn bound(stage: Stage) -> Pods {
        pods([NodePod {
            stage,
            ..pod("p", 1, [units(2)])
        }])
    }

    #[rstest]
    #[case::never_registered(false, true, Stage::Bound, Duration::ZERO)]
    #[case::nothing_is_on_its_way(true, true, Stage::Running, SHORTEST)]
    #[case::a_pod_is_never_admitted(true, true, Stage::Bound, SHORTEST + LONGEST)]
    #[case::the_api_server_does_not_answer(true, false, Stage::Admitted, WRITTEN_WITHIN + SHORTEST)]
    #[tokio::test(start_paused = true)]
    async fn the_time_until_the_end(
        #[case] is_registered: bool,
        #[case] is_written: bool,
        #[case] stage: Stage,
        #[case] expected: Duration,
    ) {
        let (_registered, registered) = watch::channel(is_registered);
        let (_written, is_written) = watch::channel(is_written);
        let (_pods, pods) = watch::channel(bound(stage));
        let ending = Ending {
            registered: vec![registered],
            is_written,
            pods,
        };
        let (signal, stop) = (CancellationToken::new(), CancellationToken::new());
        tokio::spawn(ending.run(signal.clone(), stop.clone()));
        let began = Instant::now();
        signal.cancel();
        stop.cancelled().await;
        let took = began.elapsed();
        assert!(
            took >= expected && took < expected + Duration::from_millis(10),
            "{took:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_comes_when_the_last_pod_is_admitted() {
        let (_registered, registered) = watch::channel(true);
        let (_written, is_written) = watch::channel(true);
        let (pods_sender, pods) = watch::channel(bound(Stage::Bound));
        let ending = Ending {
            registered: vec![registered],
            is_written,
            pods,
        };
        let (signal, stop) = (CancellationToken::new(), CancellationToken::new());
        tokio::spawn(ending.run(signal.clone(), stop.clone()));
        signal.cancel();
        sleep(SHORTEST + LONGEST / 2).await;
        assert!(!stop.is_cancelled());
        pods_sender.send_replace(bound(Stage::Admitted));
        stop.cancelled().await;
    }
}
