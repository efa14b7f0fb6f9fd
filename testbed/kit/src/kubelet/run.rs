//! One run of the kubelet process: the state that its parts share, and its tasks, which all end with it.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::machine::KubeletMachine;
use super::pod_table::PodTable;

#[derive(Debug)]
pub(crate) struct KubeletRun {
    pub(crate) machine: Arc<KubeletMachine>,
    pub(crate) pods: Mutex<PodTable>,
    pub(crate) cancel: CancellationToken,
    tracker: TaskTracker,
}

impl KubeletRun {
    pub(crate) fn start(machine: &Arc<KubeletMachine>) -> Self {
        Self {
            machine: Arc::clone(machine),
            pods: Mutex::default(),
            cancel: CancellationToken::new(),
            tracker: TaskTracker::new(),
        }
    }

    /// Runs a task until it returns or the process ends.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let cancel = self.cancel.clone();
        self.tracker.spawn(async move {
            cancel.run_until_cancelled(task).await;
        });
    }

    /// Ends every task, as SIGKILL would, and waits until all are gone.
    pub(crate) async fn stop(&self) {
        self.cancel.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}
