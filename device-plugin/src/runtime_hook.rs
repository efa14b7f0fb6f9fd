//! The runtime hook: a plugin of the container runtime by the Node Resource Interface (NRI). When a container is made, it is
//! given the devices of its pod's record, whatever kubelet or a vendor's plugin has given it; and when the runtime tells what
//! runs already, devices of containers that nobody has a record of become known.
//!
//! A runtime closes a plugin that takes longer than 2 s, and makes no other container meanwhile: every answer comes from
//! memory and waits for the watch of pods only. Nothing here talks to the API server.
//!
//! The protocol is written out here and in [`proto::nri`] rather than taken from a crate: `ttrpc` and `trapeze` build on an
//! older prost or on another protobuf runtime beside the one that kubelet's protocols use, the first fixes the version of a crate that
//! others may need newer, and neither knows NRI's framing. What is needed of it is one call in one direction and four in the other.

mod adjust;
pub mod seen;
mod session;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::one_line;
use proto::nri::api::{Container, ContainerAdjustment, PodSandbox};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, info, warn};

use crate::metrics::{Hooked, Metrics};
use crate::node_state::NodeState;
use crate::pods::PodUid;

use adjust::{Change, Decision, View};
use seen::Seen;
use session::SessionError;

/// Pauses between attempts to connect, doubled each time.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// How long a container's making waits for its pod to be known. The runtime makes no other one meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// Answers a container runtime.
#[derive(Debug)]
pub struct Hook {
    node: Arc<NodeState>,
    metrics: Metrics,
    seen: watch::Sender<Seen>,
    /// Namespaces whose containers keep the vendor's variable although they ask for nothing.
    unrestricted: Vec<String>,
}

/// Why a container is not made. The runtime tells kubelet, which tries again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is not known yet what it is to get.
    #[error("pod {pod}: {problem}; trying again may help")]
    NotKnown {
        /// The pod.
        pod: String,
        /// What is missing.
        problem: String,
    },
    /// What it is to get cannot be given.
    #[error("pod {pod}: {problem}")]
    Impossible {
        /// The pod.
        pod: String,
        /// Why.
        problem: String,
    },
}

impl Hook {
    /// A hook that tells `seen` which GPUs containers really see.
    pub fn new(
        node: Arc<NodeState>,
        metrics: Metrics,
        seen: watch::Sender<Seen>,
        unrestricted: Vec<String>,
    ) -> Self {
        Self {
            node,
            metrics,
            seen,
            unrestricted,
        }
    }

    /// What is to be changed of a container that is being made; waits at most so long for its pod to be known.
    async fn create(
        &self,
        sandbox: &PodSandbox,
        container: &Container,
        limit: Duration,
    ) -> Result<ContainerAdjustment, Refused> {
        let until = Instant::now() + limit.min(PATIENCE);
        let mut pods = self.node.pods.clone();
        loop {
            let decision = {
                let (pods, fleet) = (pods.borrow_and_update(), self.node.fleet.borrow());
                let (settings, mode) = (&self.node.settings, self.node.mode());
                View {
                    pods: &pods,
                    fleet: &fleet,
                    settings,
                    mode,
                    unrestricted: &self.unrestricted,
                }
                .decide(sandbox, container)
            };
            let problem = match decision {
                Decision::Leave => {
                    self.metrics.hooked(Hooked::Left);
                    self.note(sandbox, container);
                    return Ok(ContainerAdjustment::default());
                }
                Decision::Change(change) => return Ok(self.apply(sandbox, container, *change)),
                Decision::Refuse(problem) => {
                    return Err(self.refuse(
                        container,
                        Refused::Impossible {
                            pod: name_of(sandbox),
                            problem,
                        },
                    ));
                }
                Decision::Unknown(problem) => problem,
            };
            if !matches!(timeout_at(until, pods.changed()).await, Ok(Ok(()))) {
                return Err(self.refuse(
                    container,
                    Refused::NotKnown {
                        pod: name_of(sandbox),
                        problem,
                    },
                ));
            }
        }
    }

    fn apply(&self, sandbox: &PodSandbox, container: &Container, change: Change) -> ContainerAdjustment {
        let uuids: Vec<&str> = change
            .gpus
            .iter()
            .map(crate::inventory::PhysicalId::as_str)
            .collect();
        if change.gpus.is_empty() {
            let (pod, before) = (name_of(sandbox), change.before.as_deref().unwrap_or_default());
            info!(
                pod,
                container = container.name,
                before,
                "a container that asks for no GPU is shown none"
            );
            self.metrics.hooked(Hooked::Hidden);
            return change.into_adjustment();
        }
        if change.is_empty() {
            debug!(
                pod = name_of(sandbox),
                container = container.name,
                "a container is made with its devices"
            );
        } else {
            let (pod, gpus, before) = (
                name_of(sandbox),
                uuids.join(","),
                change.before.as_deref().unwrap_or_default(),
            );
            info!(
                pod,
                container = container.name,
                gpus,
                before,
                "a container is given the devices of its pod's record"
            );
        }
        self.metrics.hooked(if change.is_empty() {
            Hooked::Confirmed
        } else {
            Hooked::Adjusted
        });
        let (uid, gpus) = (PodUid::from(sandbox.uid.as_str()), change.gpus.clone());
        self.seen
            .send_if_modified(|seen| seen.note(uid, &container.name, gpus, &self.node.pods.borrow()));
        change.into_adjustment()
    }

    fn refuse(&self, container: &Container, refused: Refused) -> Refused {
        self.metrics.hooked(Hooked::Refused);
        warn!(container = container.name, reason = %refused, "a container is not made");
        refused
    }

    /// Remembers what a container sees that is left as it is.
    fn note(&self, sandbox: &PodSandbox, container: &Container) {
        let found = seen::of_container(
            container,
            &self.node.settings.visible_devices_env,
            &self.node.fleet.borrow(),
        );
        let Some(gpus) = found else { return };
        let uid = PodUid::from(sandbox.uid.as_str());
        self.seen
            .send_if_modified(|seen| seen.note(uid, &container.name, gpus, &self.node.pods.borrow()));
    }

    /// Takes in everything that runs.
    fn synchronize(&self, running: Seen) {
        info!(
            n_containers = running.len(),
            "the runtime has told which containers see GPUs"
        );
        self.seen.send_if_modified(|seen| {
            let is_news = *seen != running;
            *seen = running;
            is_news
        });
    }
}

fn name_of(sandbox: &PodSandbox) -> String {
    format!("{}/{}", sandbox.namespace, sandbox.name)
}

/// Serves the runtime that listens there until the task is dropped. A runtime without this interface is asked now and then.
pub async fn serve_runtime(hook: Hook, socket: PathBuf) {
    let mut pause = PAUSES.0;
    let mut complaint = None;
    loop {
        let ended = connect(&hook, &socket).await;
        if hook.metrics.hook_connected(false) {
            (pause, complaint) = (PAUSES.0, None);
        }
        match ended {
            Ok(()) => {
                info!(socket = %socket.display(), "the container runtime has closed the connection; connecting again");
            }
            Err(error) => {
                let problem = one_line(&error);
                if complaint.as_ref() != Some(&problem) {
                    let socket = socket.display();
                    warn!(%socket, error = problem, "no runtime hook: containers get what kubelet has given them; trying again");
                    complaint = Some(problem);
                }
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

async fn connect(hook: &Hook, socket: &Path) -> Result<(), SessionError> {
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => SessionError::Absent,
            _ => SessionError::Connect(source),
        })?;
    session::run(stream, hook).await
}

#[cfg(test)]
mod tests;
