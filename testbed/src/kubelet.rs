//! A simulated kubelet: the device manager over its real gRPC sockets, admission, and containers that "run" by
//! recording their environment.
//!
//! Speaks to the API server through the client it is given and to nothing else of the testbed, so it works
//! against any API server. It runs no processes, pulls no images, probes nothing and evicts nobody; NUMA
//! alignment (topology manager) is off, as in kubelet's default policy.

mod active;
mod admission;
mod allocation;
mod cdi;
mod checkpoint;
mod claims;
mod config;
mod devices;
mod endpoint;
mod fit;
mod held;
mod injector;
mod node;
mod nri;
pub mod nvidia_runtime;
mod pod;
mod pod_resources;
mod pod_worker;
mod process;
mod rate_limit;
mod registration;
mod runtime;
mod socket;
mod start;
mod status;
mod status_writer;
mod sync_loop;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, atomic};
use std::time::Duration;

use tokio::sync::{broadcast, watch};

pub use admission::Admission;
pub use cdi::RefreshDelay;
pub use claims::PreparedDevice;
pub use config::{
    CdiSupport, Delays, Faults, KubeletConfig, LogSink, MachineGpus, OrderRule, Ordering, RuntimeConfig,
    Start, StartHook,
};
pub use pod::{ContainerKind, EXIT_AFTER};
pub use process::StartupError;
pub use runtime::{Container, DEVICE_NODES, RunState};

use admission::AdmissionLog;
use claims::Claims;
use config::Hold;
use injector::Injector;
use nri::Nri;
use pod_worker::Command;
use process::{Lasting, Process};
use runtime::Runtime;

/// The devices of one resource that one container holds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Allocation {
    /// UID of the pod.
    pub pod_uid: String,
    /// Name of the container.
    pub container: String,
    /// Name of the resource.
    pub resource: String,
    /// The device IDs, sorted.
    pub device_ids: Vec<String>,
}

/// No such container on this node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pod {pod} has no container {container} on this node")]
pub struct UnknownContainer {
    pod: String,
    container: String,
}

/// A node of the testbed.
///
/// Dropping it leaves its tasks running; [`Kubelet::stop`] ends them.
#[derive(Debug)]
pub struct Kubelet {
    lasting: Lasting,
    process: Arc<Process>,
}

/// Opens the runtime's socket for plugins, if there is to be one.
fn listen(config: &KubeletConfig, runtime: &Arc<Runtime>) -> Result<Option<Arc<Nri>>, StartupError> {
    let open = |path: PathBuf| {
        Nri::listen(&path, Arc::clone(runtime), config.needs_nri)
            .map_err(|source| StartupError::Prepare { path, source })
    };
    config
        .has_nri
        .then(|| open(config.nri_socket()).map(Arc::new))
        .transpose()
}

/// Starts the runtime's side of CDI, if it has one.
fn injector(config: &KubeletConfig) -> Result<Option<Arc<Injector>>, StartupError> {
    let start = || Injector::start(config).map(Arc::new);
    (config.runtime.cdi == CdiSupport::On)
        .then(start)
        .transpose()
        .map_err(StartupError::Watch)
}

impl Kubelet {
    /// Opens the sockets and starts to register the node and to watch its pods.
    pub fn start(config: KubeletConfig) -> Result<Self, StartupError> {
        Self::start_held(config, watch::Sender::default())
    }

    fn start_held(config: KubeletConfig, hold: watch::Sender<Hold>) -> Result<Self, StartupError> {
        let changed = watch::Sender::new(());
        let runtime = Arc::new(Runtime::new(changed.clone()));
        let lasting = Lasting {
            nri: listen(&config, &runtime)?,
            injector: injector(&config)?,
            config: Arc::new(config),
            runtime,
            admissions: Arc::new(AdmissionLog::empty()),
            changed,
            hold,
            counts: Arc::default(),
            claims: Arc::new(Claims::default()),
        };
        let process = Process::start(lasting.clone())?;
        Ok(Self { lasting, process })
    }

    /// Kills the kubelet process and starts it again; containers go on running meanwhile.
    pub async fn restart(&mut self) -> Result<(), StartupError> {
        self.restart_with(|_| {}).await
    }

    /// Restarts with something done while the process is down, e.g. the checkpoint removed.
    pub async fn restart_with(&mut self, meanwhile: impl FnOnce(&KubeletConfig)) -> Result<(), StartupError> {
        self.process.stop().await;
        meanwhile(&self.lasting.config);
        self.process = Process::start(self.lasting.clone())?;
        Ok(())
    }

    /// The machine reboots: all containers and CDI specs are gone, and kubelet starts with its checkpoint. Pods that
    /// [`Kubelet::hold`] keeps waiting go on waiting.
    pub async fn reboot(&mut self) -> Result<(), StartupError> {
        self.process.stop().await;
        if let Some(dir) = self.lasting.config.cdi_dirs.last() {
            // /var/run is in memory; it may not have been there.
            let _ = std::fs::remove_dir_all(dir);
        }
        *self = Self::start_held(
            KubeletConfig::clone(&self.lasting.config),
            self.lasting.hold.clone(),
        )?;
        Ok(())
    }

    /// Ends the kubelet process, its connections included.
    pub async fn stop(self) {
        self.process.stop().await;
    }

    /// What the kubelet was given.
    pub fn config(&self) -> &KubeletConfig {
        &self.lasting.config
    }

    /// The containers that were started, or tried to, of pods that still exist.
    pub fn containers(&self) -> Vec<Container> {
        self.lasting.runtime.all()
    }

    /// One container by its pod's namespace and name.
    pub fn container(&self, namespace: &str, pod: &str, container: &str) -> Option<Container> {
        let is_it =
            |found: &Container| found.namespace == namespace && found.pod == pod && found.name == container;
        self.containers().into_iter().find(is_it)
    }

    /// The devices that containers hold, those of ended pods included until kubelet takes them back.
    pub fn allocations(&self) -> Vec<Allocation> {
        let devices = self.process.devices();
        let allocations = devices.held().iter().map(|(holder, resource, grant)| Allocation {
            pod_uid: holder.pod.clone(),
            container: holder.container.clone(),
            resource: resource.clone(),
            device_ids: grant.devices().iter().map(|id| id.as_ref().to_owned()).collect(),
        });
        allocations.collect()
    }

    /// By plugin resource: all devices and healthy devices.
    pub fn capacity(&self) -> BTreeMap<String, (usize, usize)> {
        self.process.devices().capacity(Duration::MAX).counts
    }

    /// Whether the pods that were there at the last start have been worked through.
    pub fn has_synced(&self) -> bool {
        self.process.sources_ready()
    }

    /// Has DRA drivers prepare these devices for a claim, in place of those before.
    pub fn prepare_claim(&self, namespace: &str, name: &str, devices: Vec<PreparedDevice>) {
        self.lasting.claims.prepare(namespace, name, devices);
    }

    /// Lets no pod be admitted from now on: those that arrive wait, across restarts of kubelet and of the machine too.
    pub fn hold(&self) {
        self.lasting.hold.send_replace(Hold {
            is_held: true,
            order: None,
        });
    }

    /// How many pods wait because of [`Kubelet::hold`].
    pub fn n_held(&self) -> usize {
        self.lasting.counts.held.load(atomic::Ordering::Acquire)
    }

    /// Admits the pods that wait, as one batch in this order; `seed` decides what is random in it.
    pub fn release(&self, rule: OrderRule, seed: u64) {
        self.lasting.hold.send_replace(Hold {
            is_held: false,
            order: Some((rule, seed)),
        });
    }

    /// How many calls of Allocate have begun.
    pub fn n_allocate_calls(&self) -> usize {
        self.lasting.counts.allocate_calls.load(atomic::Ordering::Acquire)
    }

    /// How long each answered call of Allocate took, the way there and back included.
    pub fn allocate_took(&self) -> Vec<Duration> {
        self.lasting
            .counts
            .allocate_took
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// How often the pod-resources API was asked to list.
    pub fn n_lists(&self) -> usize {
        self.lasting.counts.lists.load(atomic::Ordering::Acquire)
    }

    /// How often plugins have registered, each resource on its own.
    pub fn n_registrations(&self) -> usize {
        self.lasting.counts.registrations.load(atomic::Ordering::Acquire)
    }

    /// All admissions so far, in order.
    pub fn admissions(&self) -> Vec<Admission> {
        self.lasting.admissions.past()
    }

    /// Those admissions that came after the first so many.
    pub fn admissions_since(&self, n_known: usize) -> Vec<Admission> {
        self.lasting.admissions.since(n_known)
    }

    /// How many admissions there were.
    pub fn n_admissions(&self) -> usize {
        self.lasting.admissions.n_past()
    }

    /// Admissions from now on.
    pub fn watch_admissions(&self) -> broadcast::Receiver<Admission> {
        self.lasting.admissions.subscribe()
    }

    /// Makes a container crash; kubelet starts it again with what Allocate once answered.
    pub fn restart_container(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
    ) -> Result<(), UnknownContainer> {
        let unknown = || UnknownContainer {
            pod: format!("{namespace}/{pod}"),
            container: container.to_owned(),
        };
        let found = self.container(namespace, pod, container).ok_or_else(unknown)?;
        let pods = self.process.pods();
        let worker = pods
            .0
            .get(&found.pod_uid)
            .and_then(|record| record.worker.as_ref())
            .ok_or_else(unknown)?;
        worker
            .send(Command::Restart(container.to_owned()))
            .map_err(|_| unknown())
    }

    /// Breaks a plugin's `ListAndWatch` stream from kubelet's side; whether there was one.
    pub fn drop_stream(&self, resource: &str) -> bool {
        let plugins = self.process.plugins();
        plugins
            .get(resource)
            .map(|plugin| plugin.closed.cancel())
            .is_some()
    }

    /// Waits until plugins of the container runtime have registered so many times; whether they did before `deadline`.
    pub async fn until_asked(&self, times: usize, deadline: Duration) -> bool {
        let Some(nri) = &self.lasting.nri else {
            return false;
        };
        tokio::time::timeout(deadline, nri.until_registered(times))
            .await
            .is_ok()
    }

    /// Waits until `condition` holds, looking again at every change; whether it did before `deadline`.
    pub async fn until(&self, deadline: Duration, mut condition: impl FnMut(&Self) -> bool) -> bool {
        let mut changes = self.lasting.changed.subscribe();
        let held = async {
            while !condition(self) {
                if changes.changed().await.is_err() {
                    return std::future::pending().await;
                }
            }
        };
        tokio::time::timeout(deadline, held).await.is_ok()
    }
}
