//! The task that runs one admitted pod: init containers in order, then the others, until the pod ends.
//!
//! Starting a container asks plugins for `PreStartContainer` and holds no lock meanwhile; what cannot be started
//! is tried again after a pause.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::Instant;

use super::config::Start;
use super::pod::{ContainerKind, ContainerSpec, PodSpec};
use super::process::Process;
use super::runtime::{Attempts, Container, DEVICE_NODES, RunState, Spent};
use super::start::StartError;

/// Exit code of a container that is killed.
pub(crate) const KILLED: i32 = 137;

/// What a pod's task is told.
#[derive(Debug)]
pub(crate) enum Command {
    /// The pod has a deletionTimestamp.
    Delete,
    /// The pod is gone from the API.
    Remove,
    /// This container has crashed.
    Restart(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Nothing to do until told.
    Settled,
    /// A container could not be started.
    Retry,
    /// All app containers have finished.
    Finished,
}

impl Process {
    /// Starts the task of a pod.
    pub(crate) fn start_worker(self: &Arc<Self>, pod: &Arc<PodSpec>) {
        let (sender, commands) = unbounded_channel();
        if let Some(record) = self.pods().0.get_mut(&pod.uid) {
            record.worker = Some(sender);
        }
        let process = Arc::clone(self);
        let pod = Arc::clone(pod);
        self.spawn(async move { process.work(&pod, commands).await });
    }

    async fn work(&self, pod: &PodSpec, mut commands: UnboundedReceiver<Command>) {
        let mut due = Some(Instant::now());
        self.publish_status(pod);
        loop {
            let step = async {
                match due {
                    Some(at) => {
                        tokio::time::sleep_until(at).await;
                        self.sync_pod(pod).await
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    None => return,
                    Some(Command::Restart(container)) => {
                        self.crash(pod, &container);
                        due = Some(Instant::now());
                    }
                    Some(command) => return self.terminate(pod, &command).await,
                },
                progress = step => {
                    due = (progress == Progress::Retry).then(|| Instant::now() + self.config.delays.start_retry);
                    if progress == Progress::Finished {
                        self.runtime.kill(&pod.uid, 0);
                        self.pods().end(&pod.uid);
                    }
                    self.publish_status(pod);
                }
            }
        }
    }

    /// Starts what should run and does not.
    async fn sync_pod(&self, pod: &PodSpec) -> Progress {
        let mut progress = Progress::Settled;
        for container in &pod.containers {
            if !self.should_start(pod, container) {
                continue;
            }
            if let Err(error) = self.start_container(pod, container).await {
                self.report_failed_start(pod, container, &error);
                progress = Progress::Retry;
                if container.kind != ContainerKind::App {
                    return progress;
                }
            }
        }
        let finished = |container: &ContainerSpec| {
            container.kind != ContainerKind::App
                || matches!(
                    self.runtime.state(&pod.uid, &container.name),
                    Some(RunState::Exited { .. })
                )
        };
        if pod.containers.iter().all(finished) {
            Progress::Finished
        } else {
            progress
        }
    }

    fn should_start(&self, pod: &PodSpec, container: &ContainerSpec) -> bool {
        match self.runtime.state(&pod.uid, &container.name) {
            None | Some(RunState::Waiting { .. }) => true,
            Some(RunState::Running { .. }) => false,
            Some(RunState::Exited { .. }) => container.kind != ContainerKind::Init && pod.restarts,
        }
    }

    fn crash(&self, pod: &PodSpec, container: &str) {
        let state = RunState::Waiting {
            reason: "ContainerCreating".to_owned(),
            message: "restarted after a crash".to_owned(),
        };
        self.runtime.set_state(&pod.uid, container, state);
    }

    fn report_failed_start(&self, pod: &PodSpec, container: &ContainerSpec, error: &StartError) {
        let state = RunState::Waiting {
            reason: error.reason().to_owned(),
            message: error.to_string(),
        };
        tracing::warn!(pod = pod.full_name(), container = container.name, %error, "container not started");
        if self.runtime.state(&pod.uid, &container.name).as_ref() != Some(&state) {
            self.publish_event(pod, "Failed", &format!("Error: {error}"));
        }
        if !self.runtime.set_state(&pod.uid, &container.name, state.clone()) {
            self.runtime.put(Container::never_started(pod, container, state));
        }
    }

    async fn terminate(&self, pod: &PodSpec, command: &Command) {
        tokio::time::sleep(self.config.delays.termination).await;
        self.runtime.kill(&pod.uid, KILLED);
        self.pods().end(&pod.uid);
        if matches!(command, Command::Remove) {
            self.runtime.remove(&pod.uid);
        } else {
            self.publish_status(pod);
            self.publish_deletion(pod);
        }
        self.changed();
    }
}

impl Process {
    /// Records a container as started; those that end by themselves have ended at once.
    pub(crate) fn record_start(
        &self,
        pod: &PodSpec,
        container: &ContainerSpec,
        started: Container,
        attempts: Attempts,
    ) {
        let mut lines = started.env.iter().fold(String::new(), |text, (name, value)| {
            text + name + "=" + value + "\n"
        });
        if !self.config.gpus.all().is_empty() {
            lines = format!("{DEVICE_NODES}={}\n{lines}", started.device_nodes.join(","));
        }
        (self.config.log)(&pod.namespace, &pod.name, &container.name, lines);
        let now = Timestamp::now();
        let ends = container.kind == ContainerKind::Init
            || (container.kind == ContainerKind::App && container.finishes);
        let state = if ends {
            RunState::Exited {
                code: 0,
                started: now,
                finished: now,
            }
        } else {
            RunState::Running { since: now }
        };
        let starts = self
            .runtime
            .of_pod(&pod.uid)
            .get(&container.name)
            .map_or(0, |before| before.starts)
            + 1;
        let container = Container {
            state,
            starts,
            ..started
        };
        let Attempts { refusals, spent } = attempts;
        let Spent {
            total,
            pre_start,
            injection,
        } = spent;
        self.config.started.call(&Start {
            container: container.clone(),
            refusals,
            spent: total,
            pre_start,
            injection,
        });
        self.runtime.put(container);
    }

    /// The turn that a start of this container is, for the dice.
    pub(crate) fn turn(&self, pod: &PodSpec, container: &ContainerSpec) -> u32 {
        self.runtime
            .of_pod(&pod.uid)
            .get(&container.name)
            .map_or(0, |before| before.starts)
            + 1
    }
}
