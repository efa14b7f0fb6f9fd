//! The parameters of a simulated node: its GPUs, its kubelet and container runtime, and the plugin's flags.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};

use super::NodeKind;
use crate::kubelet::nvidia_runtime::{NvidiaRuntime, RuntimeMode};
use crate::kubelet::{Delays, ProbeProgram, RuntimeConfig, StartHook};

/// The longest delay until the container runtime of [`NodeSetup::of_kind`] reads changed CDI specs, several
/// times the delay that was measured.
const SPECS_REFRESH: Duration = Duration::from_millis(300);

/// One simulated GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuSpec {
    /// Its UUID.
    pub uuid: String,
    /// Its minor number.
    pub minor: u32,
    /// Its memory.
    pub mib: u64,
    /// Its health, as the inventory file says it.
    pub health: GpuFault,
    /// Further fields of the inventory file, such as the NUMA node.
    pub details: Map<String, Value>,
}

/// The health of a simulated GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuFault {
    /// It has no fault.
    #[default]
    Healthy,
    /// It reports this error again and again.
    Xid(u64),
    /// The driver has lost it.
    Lost,
}

/// The CDI specs of the vendor that a node has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DriverSpecs {
    /// The GPUs are simulated and need no driver.
    #[default]
    NotNeeded,
    /// None, although containers need the driver.
    Missing,
    /// The spec of NVIDIA's toolkit, which names each GPU.
    Toolkit,
    /// The spec of NVIDIA's toolkit, as long as on a real node: with every library, program and hook of a driver.
    LongToolkit,
    /// The spec of GPU Operator, which names all GPUs as one device.
    Management,
}

/// The NRI plugins of a node's container runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RuntimeSpec {
    /// None.
    #[default]
    Plain,
    /// Gpushare's device plugin is one of them.
    Plugins,
    /// Gpushare's device plugin is one of them; while it is away the runtime makes no container, as containerd with NRI's
    /// default validator and `required_plugins`.
    RequiredPlugins,
}

/// The specification of a node.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "properties of a node that are independent of each other"
)]
pub struct NodeSetup {
    /// Its name.
    pub name: String,
    /// Its GPUs.
    pub gpus: Vec<GpuSpec>,
    /// `--memory-unit` of its plugin.
    pub memory_unit: String,
    /// Labels of the Node object.
    pub labels: BTreeMap<String, String>,
    /// True if a plugin runs there.
    pub has_plugin: bool,
    /// Pauses of the kubelet.
    pub delays: Delays,
    /// Most pods that the kubelet takes.
    pub max_pods: u32,
    /// True if the programs in its containers use part of the GPU memory that their pods were given.
    pub uses_memory: bool,
    /// Called at every start of a container there.
    pub started: StartHook,
    /// `--inject` of its plugin.
    pub inject: &'static str,
    /// The NRI plugins of its container runtime.
    pub runtime: RuntimeSpec,
    /// Its container runtime.
    pub container_runtime: RuntimeConfig,
    /// The vendor's CDI specs on it. Containers need the driver on a node that is to have some.
    pub driver: DriverSpecs,
    /// The program `cdi-injector`, if containerd's own code is to inject CDI devices in place of the testbed's model.
    pub cdi_injector: Option<PathBuf>,
    /// Further flags of its plugin.
    pub plugin_args: Vec<String>,
    /// The value of `NVIDIA_VISIBLE_DEVICES` in its plugin's own container, which is unprivileged; none for a process that has
    /// the testbed's environment and rights.
    pub plugin_variable: Option<&'static str>,
    /// Devices of other types than GPUs, as the inventory file has them.
    pub others: Vec<Value>,
    /// Further fields of the inventory file for the machine, such as the links of its GPUs.
    pub machine: Map<String, Value>,
    /// True if the plugin must survive a limit of zero on file sizes, by which chaos runs imitate a full disk.
    pub disk_may_be_full: bool,
    /// The program `gpu-probe`, if containers that name it run it.
    pub probe: Option<ProbeProgram>,
    /// True if its driver can limit containers and its plugin has the driver do it.
    pub driver_limits: bool,
}

impl NodeSetup {
    /// A node with GPUs of these sizes, in GiB units.
    pub fn new(name: &str, mib_of_gpus: &[u64]) -> Self {
        let mut gpus = Vec::new();
        for (minor, mib) in (0..).zip(mib_of_gpus) {
            gpus.push(GpuSpec {
                uuid: format!("GPU-{name}-{minor}"),
                minor,
                mib: *mib,
                health: GpuFault::Healthy,
                details: Map::new(),
            });
        }
        Self {
            name: name.to_owned(),
            gpus,
            memory_unit: "GiB".to_owned(),
            labels: BTreeMap::new(),
            has_plugin: true,
            // A real kubelet tries to start a container again after 10 s, which would only make runs longer.
            delays: Delays {
                start_retry: Duration::from_millis(500),
                api_retry: Duration::from_millis(200),
            },
            max_pods: 250,
            uses_memory: false,
            started: StartHook::default(),
            inject: "auto",
            runtime: RuntimeSpec::Plain,
            // Most nodes: NVIDIA's runtime handles every pod, and the runtime before it takes CDI devices too.
            container_runtime: RuntimeConfig {
                nvidia: Some(NvidiaRuntime::of_mode(RuntimeMode::Legacy)),
                ..RuntimeConfig::default()
            },
            driver: DriverSpecs::default(),
            cdi_injector: None,
            plugin_args: Vec::new(),
            plugin_variable: None,
            others: Vec::new(),
            machine: Map::new(),
            disk_may_be_full: false,
            probe: None,
            driver_limits: false,
        }
    }

    /// A node of this kind, with the plugin's flags and environment there. Its container runtime reads changed
    /// CDI specs with a delay, as containerd does.
    pub fn of_kind(kind: NodeKind, name: &str, mib_of_gpus: &[u64]) -> Self {
        Self {
            container_runtime: RuntimeConfig {
                refresh: SPECS_REFRESH,
                ..kind.container_runtime()
            },
            driver: kind.driver(),
            plugin_args: kind.plugin_args(),
            plugin_variable: Some(kind.plugin_variable()),
            ..Self::new(name, mib_of_gpus)
        }
    }

    /// The same node in other memory units.
    #[must_use]
    pub fn unit(self, memory_unit: &str) -> Self {
        Self {
            memory_unit: memory_unit.to_owned(),
            ..self
        }
    }
}
