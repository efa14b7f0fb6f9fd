//! The configuration of a simulated node: its kubelet, delays, order of admission, and container runtime.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use parking_lot::Mutex;

use super::nvidia_runtime::NvidiaRuntime;
use super::probe_program::ProbeProgram;
use super::runtime::{ContainersHook, RuntimeContainer};

/// The internal address of every node, also of every pod.
pub(crate) const ADDRESS: &str = "127.0.0.1";

/// Receives a container's output: namespace, pod, container, text.
pub type LogSink = Arc<dyn Fn(&str, &str, &str, String) + Send + Sync>;

/// The configuration of a [`Kubelet`](super::Kubelet).
#[derive(Clone)]
pub struct KubeletConfig {
    /// Name of the node, also its hostname label.
    pub node: String,
    /// The directory in place of `/var/lib/kubelet`, with `device-plugins/` and `pod-resources/`.
    pub dir: PathBuf,
    /// Directories of CDI specs, the later ones overriding the earlier.
    pub cdi_dirs: Vec<PathBuf>,
    /// The socket of a `cdi-injector` process, if containerd's own code injects CDI devices in place of the model.
    pub cdi_injector: Option<PathBuf>,
    /// The client of the API server.
    pub client: Client,
    /// A function to call at every start of a container.
    pub started: StartHook,
    /// A function to call at every change of the node's containers.
    pub containers: ContainersHook,
    /// Receives the device nodes and environment of each container that starts, as `NAME=value` lines, and the output of
    /// `gpu-probe`.
    pub log: LogSink,
    /// Capacity of the node's own resources (`cpu`, `memory`, `pods`, ..), as quantities.
    pub capacity: BTreeMap<String, String>,
    /// Labels of the Node object beside the usual ones.
    pub labels: BTreeMap<String, String>,
    /// The seed of everything that is random in a real kubelet, such as the order of a Go map.
    pub seed: u64,
    /// Deadlines and pauses.
    pub delays: Delays,
    /// True if the container runtime has an NRI socket, whose plugins may adjust a container before it is made.
    pub has_nri: bool,
    /// True if the container runtime creates no container while no NRI plugin is registered.
    pub needs_nri: bool,
    /// The container runtime.
    pub runtime: RuntimeConfig,
    /// The GPUs that the machine's driver lists. A test may change them.
    pub gpus: MachineGpus,
    /// The program `gpu-probe`, if containers that name it run it.
    pub probe: Option<ProbeProgram>,
}

/// A node's container runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeConfig {
    /// The runtime's treatment of CDI devices.
    pub cdi: CdiSupport,
    /// The longest delay after a change of CDI specs until the runtime reads them again; each is a random part of it.
    pub refresh: Duration,
    /// NVIDIA's container runtime, if it is installed.
    pub nvidia: Option<NvidiaRuntime>,
    /// The `RuntimeClass` whose pods NVIDIA's runtime handles; `None` for all pods.
    pub nvidia_class: Option<&'static str>,
}

/// A container runtime's treatment of the CDI devices of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CdiSupport {
    /// The runtime injects the devices.
    #[default]
    On,
    /// The runtime ignores the devices silently, as containerd up to 2.2 with `enable_cdi = false`.
    Dropped,
    /// The runtime refuses the container, as containerd from 2.3 on with `enable_cdi = false`.
    Refused,
}

/// The GPUs that a machine's driver lists; clones share them.
#[derive(Clone, Debug, Default)]
pub struct MachineGpus(Arc<Mutex<Vec<(String, u32)>>>);

impl MachineGpus {
    /// Replaces the list: UUIDs and minor numbers, in the order of the driver.
    pub fn set(&self, gpus: Vec<(String, u32)>) {
        *self.0.lock() = gpus;
    }

    /// UUIDs and minor numbers of all GPUs.
    pub fn all(&self) -> Vec<(String, u32)> {
        self.0.lock().clone()
    }

    /// The UUID of the GPU behind a device node such as `/dev/nvidia0`; `None` if it is no GPU's.
    pub(crate) fn of_device_node(&self, path: &str) -> Option<String> {
        let minor: u32 = path.strip_prefix("/dev/nvidia")?.parse().ok()?;
        let found = self.all().into_iter().find(|(_, own)| *own == minor)?;
        Some(found.0)
    }
}

impl KubeletConfig {
    /// A node of 64 cores, 256 GiB and 250 pods that behaves as kubelet 1.36 does.
    pub fn new(node: impl Into<String>, dir: impl Into<PathBuf>, client: Client) -> Self {
        let dir = dir.into();
        let capacity = [
            ("cpu", "64"),
            ("memory", "256Gi"),
            ("ephemeral-storage", "500Gi"),
            ("pods", "250"),
        ];
        Self {
            node: node.into(),
            cdi_dirs: vec![dir.join("cdi")],
            cdi_injector: None,
            dir,
            client,
            started: StartHook::default(),
            containers: Arc::new(|_| {}),
            log: Arc::new(|_, _, _, _| {}),
            capacity: capacity
                .map(|(name, amount)| (name.to_owned(), amount.to_owned()))
                .into(),
            labels: BTreeMap::new(),
            seed: 0,
            delays: Delays::default(),
            has_nri: false,
            needs_nri: false,
            runtime: RuntimeConfig::default(),
            gpus: MachineGpus::default(),
            probe: None,
        }
    }

    /// The directory of plugins' sockets, of `kubelet.sock` and of the checkpoint.
    pub fn plugin_dir(&self) -> PathBuf {
        self.dir.join("device-plugins")
    }

    /// The Registration socket.
    pub fn plugin_socket(&self) -> PathBuf {
        self.plugin_dir().join("kubelet.sock")
    }

    /// The pod-resources socket.
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.dir.join("pod-resources").join("kubelet.sock")
    }

    pub(crate) fn nri_socket(&self) -> PathBuf {
        self.dir.join("nri.sock")
    }

    /// The device manager's checkpoint.
    pub fn checkpoint(&self) -> PathBuf {
        self.plugin_dir().join("kubelet_internal_checkpoint")
    }
}

impl fmt::Debug for KubeletConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KubeletConfig")
            .field("node", &self.node)
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

type OnStart = dyn Fn(&ContainerStart) + Send + Sync;

/// A function that is called at every start of a container.
#[derive(Clone, Default)]
pub struct StartHook(Option<Arc<OnStart>>);

impl StartHook {
    /// Makes a hook of a function; each container starts when the function has returned.
    pub fn new(call: impl Fn(&ContainerStart) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(call)))
    }

    pub(crate) fn call(&self, start: &ContainerStart) {
        if let Some(call) = &self.0 {
            call(start);
        }
    }
}

impl fmt::Debug for StartHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StartHook")
    }
}

/// A container as it starts, and the attempts before that.
#[derive(Clone, Debug)]
pub struct ContainerStart {
    /// The container.
    pub container: RuntimeContainer,
    /// The reasons of earlier failed attempts to start the container.
    pub refusals: Vec<String>,
    /// The time that all attempts took, without the pauses between them.
    pub spent: Duration,
    /// The part of `spent` that `PreStartContainer` of plugins took.
    pub pre_start: Duration,
    /// The part of `spent` that the injection of CDI devices took.
    pub injection: Duration,
}

/// The treatment of pods that [`Kubelet::hold`](super::Kubelet::hold) has kept waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) is_held: bool,
    /// The order in which the pods are admitted after the hold.
    pub(crate) rule: OrderRule,
    /// Decides a random order; the other rules do not read it.
    pub(crate) seed: u64,
}

/// The rule for the order of the pods in a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OrderRule {
    /// By creation time, then by arrival, as kubelet sorts.
    #[default]
    Creation,
    /// The reverse of the creation order.
    Reversed,
    /// A random order, decided by the seed.
    Shuffled,
}

/// Pauses between attempts, each kubelet's own by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delays {
    /// Between two attempts to start a container.
    pub start_retry: Duration,
    /// Between two attempts to write to the API server.
    pub api_retry: Duration,
}

impl Default for Delays {
    fn default() -> Self {
        Self {
            start_retry: Duration::from_secs(10),
            api_retry: Duration::from_secs(1),
        }
    }
}
