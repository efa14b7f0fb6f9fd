//! The tasks of one kubelet process, which all end with the process.

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

#[derive(Clone, Debug, Default)]
pub(crate) struct KubeletTasks {
    cancel: CancellationToken,
    tracker: TaskTracker,
}

impl KubeletTasks {
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

    /// Cancelled when the process ends.
    pub(crate) fn cancellation(&self) -> &CancellationToken {
        &self.cancel
    }
}
