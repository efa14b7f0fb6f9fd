//! A model of kubelet 1.36 and of the container runtime under it.
//!
//! A container "runs" by having its environment recorded. NVIDIA's container runtime 1.20 is compared with recordings
//! (`testbed/tests/nvidia_runtime.rs`). The rest follows the code of kubelet 1.36, and tests in `testbed/kit/tests/kubelet` state
//! the behaviour that gpushare's plugin depends on; names such as `devicesToReuse` in comments are functions of that code.
//!
//! It uses the API server only through the client that it is given, so it works against any API server. It leaves out processes
//! but for `gpu-probe`, app containers that end by themselves, images, probes, eviction and alignment of devices by NUMA node
//! (the topology manager's policy is `none`, kubelet's default).

mod cdi;
mod checkpoint;
mod claims;
mod config;
mod container_start;
mod device_manager;
mod devices;
mod endpoint;
mod environment;
mod fit;
mod gpu_probe;
mod injector;
mod machine;
mod node_status;
mod nri;
pub mod nvidia_runtime;
mod pod;
mod pod_resources;
mod pod_table;
mod pod_worker;
pub mod probe_program;
mod process;
mod run;
mod runtime;
pub(crate) mod socket;
mod status_manager;
mod sync_loop;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::sync::watch;

pub use claims::PreparedDevice;
pub use config::{
    CdiSupport, ContainerStart, Delays, KubeletConfig, LogSink, MachineGpus, OrderRule, RuntimeConfig,
    StartHook,
};
pub use machine::{KubeletCounts, PodAdmission};
pub use pod::ContainerType;
pub use probe_program::ProbeProgram;
pub use runtime::{ContainersHook, DEVICE_NODES, RunState, RuntimeContainer};

use config::Hold;
use machine::KubeletMachine;
use pod_table::PodCommand;
use process::KubeletProcess;

/// The devices of one resource that one container holds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerAllocation {
    /// UID of the pod.
    pub pod_uid: String,
    /// Name of the container.
    pub container: String,
    /// Name of the resource.
    pub resource: String,
    /// The device IDs, sorted.
    pub device_ids: Vec<String>,
}

/// A kubelet with its container runtime.
///
/// Dropping it leaves its tasks running; [`Kubelet::stop`] ends them.
#[derive(Debug)]
pub struct Kubelet {
    machine: Arc<KubeletMachine>,
    process: KubeletProcess,
}

impl Kubelet {
    /// Opens the sockets, registers the node and begins to watch its pods, in the background.
    pub fn start(config: KubeletConfig) -> Result<Self> {
        Self::start_held(config, watch::Sender::default())
    }

    /// Starts a kubelet whose admissions may be held back already.
    fn start_held(config: KubeletConfig, hold: watch::Sender<Hold>) -> Result<Self> {
        let machine = Arc::new(KubeletMachine::start(config, hold)?);
        let process = KubeletProcess::start(&machine)?;
        Ok(Self { machine, process })
    }

    /// Kills the kubelet process and starts it again; containers keep running meanwhile.
    pub async fn restart(&mut self) -> Result<()> {
        self.restart_with(|_| {}).await
    }

    /// Kills the kubelet process, runs `meanwhile`, such as the removal of the checkpoint, and starts the
    /// process again.
    pub async fn restart_with(&mut self, meanwhile: impl FnOnce(&KubeletConfig)) -> Result<()> {
        self.process.run.stop().await;
        meanwhile(&self.machine.config);
        self.process = KubeletProcess::start(&self.machine)?;
        Ok(())
    }

    /// Reboots the machine: containers and the CDI specs of `/var/run` are gone, and kubelet starts with its checkpoint. Pods
    /// that [`Kubelet::hold`] holds back stay held back.
    pub async fn reboot(&mut self) -> Result<()> {
        self.process.run.stop().await;
        if let Some(dir) = self.machine.config.cdi_dirs.last() {
            // /var/run, with the CDI specs, is in memory and empty after a reboot; the directory may not exist.
            let _ = std::fs::remove_dir_all(dir);
        }
        *self = Self::start_held(self.machine.config.clone(), self.machine.hold.clone())?;
        Ok(())
    }

    /// Ends the kubelet process with its connections.
    pub async fn stop(self) {
        self.process.run.stop().await;
    }

    /// The configuration of this node.
    pub fn config(&self) -> &KubeletConfig {
        &self.machine.config
    }

    /// Containers of pods that still exist, those included whose start has failed.
    pub fn containers(&self) -> Vec<RuntimeContainer> {
        self.machine.runtime.all()
    }

    /// One container by its pod's namespace and name.
    pub fn container(&self, namespace: &str, pod: &str, container: &str) -> Option<RuntimeContainer> {
        let mut containers = self.containers();
        containers.retain(|one| one.namespace == namespace && one.pod == pod && one.name == container);
        containers.pop()
    }

    /// Devices that containers hold, also those of ended pods until a later container needs some.
    pub fn allocations(&self) -> Vec<ContainerAllocation> {
        let mut allocations = Vec::new();
        for (holder, resource, grant) in self.process.devices.lock().held().iter() {
            allocations.push(ContainerAllocation {
                pod_uid: holder.pod.clone(),
                container: holder.container.clone(),
                resource: resource.clone(),
                device_ids: grant.device_ids(),
            });
        }
        allocations
    }

    /// The number of all devices and of healthy devices, by resource.
    pub fn capacity(&self) -> BTreeMap<String, (usize, usize)> {
        self.process.devices.lock().counts()
    }

    /// Returns true once kubelet has admitted or refused the pods that were there at its last start.
    pub fn has_synced(&self) -> bool {
        self.process.run.pods.lock().sources_ready
    }

    /// Sets the devices that DRA drivers have prepared for a claim.
    pub fn prepare_claim(&self, namespace: &str, name: &str, devices: Vec<PreparedDevice>) {
        self.machine.claims.prepare(namespace, name, devices);
    }

    /// Holds back the admission of pods from now on, also across restarts of kubelet and of the machine.
    pub fn hold(&self) {
        self.machine.hold.send_replace(Hold {
            is_held: true,
            ..Hold::default()
        });
    }

    /// Admits the pods that were held back as one batch, in this order; `seed` decides a random order.
    pub fn release(&self, rule: OrderRule, seed: u64) {
        self.machine.hold.send_replace(Hold {
            is_held: false,
            rule,
            seed,
        });
    }

    /// Counts and times of its calls and admissions so far.
    pub fn counts(&self) -> KubeletCounts {
        self.machine.counts.lock().clone()
    }

    /// Makes a container crash; kubelet starts it again with the devices and the answer of Allocate that it had.
    pub fn restart_container(&self, namespace: &str, pod: &str, container: &str) -> Result<()> {
        let unknown = || format!("pod {namespace}/{pod} has no container {container} on this node");
        let found = self.container(namespace, pod, container).with_context(unknown)?;
        let pods = self.process.run.pods.lock();
        let record = pods.records.get(&found.pod_uid).with_context(unknown)?;
        ensure!(record.send(PodCommand::Restart(container.to_owned())), unknown());
        Ok(())
    }

    /// Breaks a plugin's `ListAndWatch` stream from kubelet's side; false if there is none.
    pub fn drop_stream(&self, resource: &str) -> bool {
        self.process.devices.drop_stream(resource)
    }

    /// Waits until plugins of the container runtime (NRI) have registered `times` times; false if `deadline` comes first.
    pub async fn until_nri_registered(&self, times: usize, deadline: Duration) -> bool {
        let Some(nri) = &self.machine.nri else {
            return false;
        };
        tokio::time::timeout(deadline, nri.until_registered(times))
            .await
            .is_ok()
    }

    /// Waits until `condition` holds, checking at every change; false if `deadline` comes first.
    pub async fn until(&self, deadline: Duration, mut condition: impl FnMut(&Self) -> bool) -> bool {
        let mut changes = self.machine.subscribe();
        let held = async {
            while !condition(self) {
                if changes.changed().await.is_err() {
                    return std::future::pending().await;
                }
            }
        };
        tokio::time::timeout(deadline, held).await.is_ok()
    }

    /// Waits until `condition` holds, as [`Kubelet::until`].
    ///
    /// # Errors
    /// It does not hold within `deadline`: `failure` says so, and the error adds the pods that are held back, the devices that
    /// plugins offer, and the containers that wait.
    pub async fn expect_until(
        &self,
        deadline: Duration,
        failure: impl Display,
        condition: impl FnMut(&Self) -> bool,
    ) -> Result<()> {
        if self.until(deadline, condition).await {
            return Ok(());
        }
        let mut waiting = Vec::new();
        for one in self.containers() {
            if let RunState::Waiting { reason, message } = one.state {
                waiting.push(format!("{}/{}: {reason}: {message}", one.pod, one.name));
            }
        }
        let (n_held, offered, waiting) = (self.counts().held, self.capacity(), waiting.join("; "));
        bail!("{failure}; {n_held} pods are held, {offered:?} are offered; {waiting}")
    }
}
