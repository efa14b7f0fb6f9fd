//! Tasks that run as long as the process: when one ends, the process ends.
//!
//! Otherwise a daemon whose watch has ended would go on to decide by the last state that it saw, and report that it is ready.
//! [`crate::process`] ends the process when [`Tasks::ended`] returns.

use std::collections::HashMap;

use tokio::sync::watch;
use tokio::task::{Id, JoinError, JoinSet};

use crate::panics::named;

/// Tasks with names for the log. All of the tasks are aborted if this value is dropped.
#[derive(Debug, Default)]
pub struct Tasks {
    running: JoinSet<()>,
    names: HashMap<Id, &'static str>,
}

/// A task that has ended, by its name.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The task returned.
    #[error("task {0:?} has ended, and the process with it")]
    Returned(&'static str),
    /// The task panicked, or was aborted.
    #[error("task {0:?} has failed, and the process with it")]
    Failed(&'static str, #[source] JoinError),
}

impl Tasks {
    /// Starts a task.
    pub fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        // `named` has the name for the log line of a panic, `names` for the error of a task that returns.
        let id = self.running.spawn(named(name, task)).id();
        self.names.insert(id, name);
    }

    /// Starts a task that keeps a value up to date. Returns the receiver of the value, which begins as `first`.
    pub fn spawn_updating<T, F>(
        &mut self,
        name: &'static str,
        first: T,
        task: impl FnOnce(watch::Sender<T>) -> F,
    ) -> watch::Receiver<T>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, receiver) = watch::channel(first);
        self.spawn(name, task(sender));
        receiver
    }

    /// Returns when a task has ended; never returns without tasks. Dropping the future loses no end of a task.
    pub async fn ended(&mut self) -> Ended {
        match self.running.join_next_with_id().await {
            Some(Ok((id, ()))) => Ended::Returned(self.name(id)),
            Some(Err(source)) => Ended::Failed(self.name(source.id()), source),
            // No task has ended: `crate::process` keeps its servers in a set of their own, which may be empty.
            None => std::future::pending().await,
        }
    }

    /// Aborts all tasks; each ends at its next `.await`.
    pub fn abort_all(&mut self) {
        self.running.abort_all();
    }

    /// Returns when every task has ended, whatever its outcome.
    pub async fn all_ended(&mut self) {
        while self.running.join_next().await.is_some() {}
    }

    fn name(&mut self, id: Id) -> &'static str {
        self.names.remove(&id).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_task_is_reported_by_name() {
        let mut tasks = Tasks::default();
        tasks.spawn("goes on", std::future::pending());
        let waited = tokio::time::timeout(Duration::from_secs(3600), tasks.ended()).await;
        assert!(waited.is_err(), "{waited:?}");
        tasks.spawn("returns", async {});
        assert_eq!(
            tasks.ended().await.to_string(),
            "task \"returns\" has ended, and the process with it"
        );
        tasks.spawn("panics", async { panic!("by intent") });
        let ended = tasks.ended().await;
        assert_eq!(
            ended.to_string(),
            "task \"panics\" has failed, and the process with it"
        );
        let Ended::Failed(_, source) = ended else {
            panic!("{ended:?}")
        };
        assert!(source.is_panic());
        tasks.abort_all();
        tasks.all_ended().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_supervisor_without_tasks_never_ends() {
        assert!(
            tokio::time::timeout(Duration::from_secs(3600), Tasks::default().ended())
                .await
                .is_err()
        );
    }
}
