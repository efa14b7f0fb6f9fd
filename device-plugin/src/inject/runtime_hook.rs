//! The runtime hook: a plugin of the container runtime by the Node Resource Interface (NRI). The runtime calls the hook before it
//! creates a container, and the hook gives the container the devices of its pod's record, whatever kubelet or a vendor's plugin
//! has given it. The hook also learns the GPUs that containers of pods without a record see, for the scheduler to count them.
//!
//! A runtime closes a plugin that takes longer than 2 s, so every answer comes from memory and waits for the watch of pods only.
//! The protocol is in [`proto::nri`]: the crates `ttrpc` and `trapeze` need another protobuf runtime, and know no NRI framing.

mod adjust;
pub(crate) mod seen;
mod session;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{anyhow, bail};
use proto::nri::api::{Container, ContainerAdjustment, PodSandbox};
use proto::nri::code;
use proto::nri::ttrpc::Status;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, info, warn};

use crate::devices::fleet::NodeFleet;
use crate::devices::inventory::PhysicalId;
use crate::inject::enforcement::Enforcements;
use crate::inject::mode::Injection;
use crate::inject::settings::NodeSettings;
use crate::logged_error::LoggedError;
use crate::metrics::{HookOutcome, Metrics};
use crate::node::pods::{NodePods, PodUid};

use adjust::{DeviceAdjustment, HookDecision, HookInputs};
use seen::SeenGpus;

/// The pause after the first failed attempt to connect, which doubles each time, and the longest one.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Longest wait for a container's pod to be known. The runtime creates no other container meanwhile.
const POD_WAIT: Duration = Duration::from_secs(1);

/// Answers the calls of a container runtime.
#[derive(Debug)]
pub(crate) struct RuntimeHook {
    pub(crate) settings: NodeSettings,
    pub(crate) fleet: watch::Receiver<Arc<NodeFleet>>,
    pub(crate) pods: watch::Receiver<NodePods>,
    pub(crate) injection: watch::Receiver<Option<Injection>>,
    pub(crate) enforcements: watch::Receiver<Arc<Enforcements>>,
    pub(crate) metrics: Metrics,
    pub(crate) seen: watch::Sender<SeenGpus>,
    /// Namespaces whose containers keep a value of the vendor's variable that shows them GPUs, although they request none.
    pub(crate) unrestricted: Vec<String>,
}

impl RuntimeHook {
    /// The adjustment of a container that the runtime is about to create; waits at most `limit` for its pod to be known.
    async fn create(
        &self,
        sandbox: &PodSandbox,
        container: &Container,
        limit: Duration,
    ) -> Result<ContainerAdjustment, Status> {
        // The runtime closes the connection to a plugin that takes too long.
        let until = Instant::now() + limit.min(POD_WAIT);
        let mut pods = self.pods.clone();
        loop {
            let decision = {
                let (pods, fleet) = (pods.borrow_and_update(), self.fleet.borrow());
                let (enforcements, injection) = (self.enforcements.borrow(), self.injection.borrow());
                HookInputs {
                    pods: &pods,
                    fleet: &fleet,
                    settings: &self.settings,
                    mode: self.settings.mode(injection.as_ref()),
                    enforcements: &enforcements,
                    unrestricted: &self.unrestricted,
                }
                .decide(sandbox, container)
            };
            let problem = match decision {
                HookDecision::Ignore => {
                    self.metrics.count_hook(HookOutcome::Left);
                    // A container of the vendor's plugin, whose GPUs the scheduler must count.
                    if let Some(gpus) = seen::gpus_of(container, &self.fleet.borrow()) {
                        self.record_seen(sandbox, container, gpus);
                    }
                    return Ok(ContainerAdjustment::default());
                }
                HookDecision::Adjust(change) => return Ok(self.apply(sandbox, container, *change)),
                HookDecision::Refuse(problem) => {
                    return Err(self.refuse(sandbox, container, code::FAILED_PRECONDITION, &problem));
                }
                HookDecision::Unknown(problem) => problem,
            };
            if !matches!(timeout_at(until, pods.changed()).await, Ok(Ok(()))) {
                let problem = format!("{problem}; trying again may help");
                return Err(self.refuse(sandbox, container, code::UNAVAILABLE, &problem));
            }
        }
    }

    /// Logs and counts the adjustment of a container, and returns it in the runtime's form.
    fn apply(
        &self,
        sandbox: &PodSandbox,
        container: &Container,
        change: DeviceAdjustment,
    ) -> ContainerAdjustment {
        let (pod, before) = (name_of(sandbox), change.before.as_deref().unwrap_or_default());
        let gpus: Vec<&str> = change.gpus.iter().map(PhysicalId::as_str).collect();
        let (name, gpus) = (&container.name, gpus.join(","));
        let outcome = if change.gpus.is_empty() {
            info!(
                pod,
                container = name,
                before,
                "hid the GPUs from a container that requests none"
            );
            HookOutcome::Hidden
        } else if change.is_empty() {
            debug!(pod, container = name, gpus, "a container already has its devices");
            HookOutcome::Confirmed
        } else {
            info!(
                pod,
                container = name,
                gpus,
                before,
                "gave a container the devices of its pod's record"
            );
            HookOutcome::Adjusted
        };
        self.metrics.count_hook(outcome);
        if !change.gpus.is_empty() {
            self.record_seen(sandbox, container, change.gpus.clone());
        }
        change.into_adjustment()
    }

    /// The error on which the runtime does not create the container, and kubelet tries again. Logs and counts the refusal.
    fn refuse(&self, sandbox: &PodSandbox, container: &Container, code: i32, problem: &str) -> Status {
        self.metrics.count_hook(HookOutcome::Refused);
        let message = format!("pod {}: {problem}", name_of(sandbox));
        warn!(
            container = container.name,
            reason = message,
            "refused the creation of a container"
        );
        Status { code, message }
    }

    /// Records the GPUs that a container sees: the plugin publishes them instead of those that kubelet allocated.
    fn record_seen(&self, sandbox: &PodSandbox, container: &Container, gpus: BTreeSet<PhysicalId>) {
        let uid = PodUid::from(sandbox.uid.as_str());
        // A container that is created again with the same GPUs must not make the plugin publish again.
        self.seen
            .send_if_modified(|seen| seen.record(uid, &container.name, gpus, &self.pods.borrow()));
    }

    /// Replaces all records of GPUs that containers see by those of `running`, the containers that the runtime has reported.
    fn synchronize(&self, running: SeenGpus) {
        let n_containers = running.n_containers();
        info!(
            n_containers,
            "the container runtime has reported the running containers"
        );
        // The plugin publishes again for each message in this channel.
        if *self.seen.borrow() != running {
            self.seen.send_replace(running);
        }
    }
}

fn name_of(sandbox: &PodSandbox) -> String {
    format!("{}/{}", sandbox.namespace, sandbox.name)
}

/// Serves the runtime at this socket until the task is dropped; connects again after the connection has ended or failed.
pub(crate) async fn serve_runtime(hook: RuntimeHook, socket: PathBuf) {
    let mut pause = SHORTEST_PAUSE;
    let mut logged = LoggedError::default();
    loop {
        let ended = connect(&hook, &socket).await;
        // The runtime had accepted the hook, so earlier failures are over.
        if hook.metrics.set_hook_connected(false) {
            pause = SHORTEST_PAUSE;
            logged.clear();
        }
        match ended {
            Ok(()) => {
                info!(socket = %socket.display(), "the container runtime has closed the connection; connecting again");
            }
            Err(error) => {
                if let Some(error) = logged.changed(error.as_ref()) {
                    let socket = socket.display();
                    warn!(%socket, error, "no runtime hook: containers get the devices that kubelet has given them; trying again");
                }
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Connects to the container runtime's socket for its Node Resource Interface, and answers its calls until the connection ends.
async fn connect(hook: &RuntimeHook, socket: &Path) -> anyhow::Result<()> {
    let stream = match UnixStream::connect(socket).await {
        Ok(stream) => stream,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!(
                "there is no socket: the container runtime has no Node Resource Interface, or it is turned off"
            )
        }
        Err(error) => return Err(anyhow!(error).context("cannot connect")),
    };
    session::run(stream, hook).await
}

#[cfg(test)]
mod tests;
