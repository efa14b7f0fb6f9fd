//! The task of one admitted pod. It starts init containers in order, then the others, and ends them with the pod.
//!
//! No lock is held during a start, which calls `PreStartContainer` of plugins. A start that fails is repeated after a pause.

use std::sync::Arc;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::Instant;

use super::container_start::{ContainerStarter, StartError};
use super::pod::{ContainerSpec, ContainerType, KubeletPod};
use super::pod_table::PodCommand;
use super::run::KubeletRun;
use super::runtime::{RunState, RuntimeContainer};
use super::status_manager::StatusManager;

#[derive(Debug)]
pub(crate) struct PodWorkers {
    pub(crate) run: Arc<KubeletRun>,
    pub(crate) starter: ContainerStarter,
    pub(crate) status: Arc<StatusManager>,
}

impl PodWorkers {
    /// Starts the task that runs an admitted pod's containers.
    pub(crate) fn start(self: &Arc<Self>, pod: &Arc<KubeletPod>) {
        let (sender, commands) = unbounded_channel();
        if let Some(record) = self.run.pods.lock().records.get_mut(&pod.uid) {
            record.worker = Some(sender);
        }
        let workers = Arc::clone(self);
        let pod = Arc::clone(pod);
        self.run.spawn(async move { workers.work(pod, commands).await });
    }

    /// Runs the task of one pod: starts its containers, repeats failed starts, and obeys commands until the pod is removed.
    async fn work(&self, mut pod: Arc<KubeletPod>, mut commands: UnboundedReceiver<PodCommand>) {
        let mut next_sync = Some(Instant::now());
        self.status.publish_status(&pod);
        loop {
            let step = async {
                match next_sync {
                    Some(at) => {
                        tokio::time::sleep_until(at).await;
                        self.sync_pod(&pod).await
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    None => return,
                    Some(PodCommand::Restart(container)) => {
                        self.crash(&pod, &container);
                        next_sync = Some(Instant::now());
                    }
                    Some(PodCommand::Update(new)) => {
                        pod = new;
                        next_sync = Some(Instant::now());
                    }
                    Some(command) => return self.terminate(&pod, &command),
                },
                is_done = step => {
                    next_sync = (!is_done).then(|| Instant::now() + self.run.machine.config.delays.start_retry);
                    self.status.publish_status(&pod);
                }
            }
        }
    }

    /// Starts the containers that should run and do not; returns false if one of them has to be tried again.
    async fn sync_pod(&self, pod: &KubeletPod) -> bool {
        let mut is_done = true;
        for container in &pod.containers {
            if !self.should_start(pod, container) {
                continue;
            }
            if let Err(error) = self.starter.start(pod, container).await {
                self.report_failed_start(pod, container, &error);
                is_done = false;
                // The containers after an init container wait until it has started.
                if matches!(container.kind, ContainerType::Init | ContainerType::Sidecar) {
                    return false;
                }
            }
        }
        is_done
    }

    /// Returns true if a container has not started yet, or has to start again after its exit.
    fn should_start(&self, pod: &KubeletPod, container: &ContainerSpec) -> bool {
        match self.run.machine.runtime.state(&pod.uid, &container.name) {
            None | Some(RunState::Waiting { .. }) => true,
            Some(RunState::Running { .. }) => false,
            Some(RunState::Exited { .. }) => {
                matches!(container.kind, ContainerType::Sidecar | ContainerType::App) && pod.restarts
            }
        }
    }

    fn crash(&self, pod: &KubeletPod, container: &str) {
        let state = RunState::Waiting {
            reason: "ContainerCreating".to_owned(),
            message: "restarted after a crash".to_owned(),
        };
        self.run.machine.runtime.set_state(&pod.uid, container, state);
    }

    /// Shows a failed start in the container's state, and writes an event if the failure is a new one.
    fn report_failed_start(&self, pod: &KubeletPod, container: &ContainerSpec, error: &StartError) {
        let state = RunState::Waiting {
            reason: error.reason.to_owned(),
            message: error.to_string(),
        };
        tracing::warn!(pod = pod.full_name(), container = container.name, %error, "container not started");
        let runtime = &self.run.machine.runtime;
        if runtime.state(&pod.uid, &container.name).as_ref() != Some(&state) {
            self.status
                .publish_event(pod, "Failed", &format!("Error: {error}"));
        }
        if !runtime.set_state(&pod.uid, &container.name, state.clone()) {
            runtime.put(RuntimeContainer::never_started(pod, container, state));
        }
    }

    /// Kills the containers of a pod, and deletes the pod at the API server unless that has removed it already.
    fn terminate(&self, pod: &KubeletPod, command: &PodCommand) {
        self.run.machine.runtime.kill(&pod.uid);
        self.run.pods.lock().end(&pod.uid);
        if matches!(command, PodCommand::Remove) {
            self.run.machine.runtime.remove(&pod.uid);
        } else {
            self.status.publish_status(pod);
            self.status.publish_deletion(pod);
        }
        self.run.machine.notify();
    }
}
