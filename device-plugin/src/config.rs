//! The flags and their environment variables, checked once, at start.

mod values;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use daemon::logging::{LogFilter, LogFormat};
use proto::admission::UNRESTRICTED_NAMESPACES;
use proto::memory_unit::MemoryUnit;
use proto::resource::{GPU_MEM, ResourceNames};
use proto::topology::GpuPartitionPolicy;

use crate::cdi::SpecDir;
use crate::cdi::vendor::VendorSpecs;
use crate::extended_resource::ExtendedResourceNames;
use crate::fleet::sharing::SharedDevices;
use crate::health::{HealthPolicy, Xids};
use crate::injection::InjectionSettings;
use crate::injection::content::VOID;
use crate::inventory::{FileSource, MachineSource, NvmlSource, PciVendor, Source, SysfsSource};
use crate::publish::node_overrides::OverrideFiles;
use crate::settings::{OnMismatch, Settings, StartPolicy, Unplaced};
use crate::uninstall::UninstallWhen;

use values::{
    DeviceKind, GpuMemory, Inject, InventoryKind, MemoryResource, PartitionPolicy, ReservedMemory,
    VariableName, duration, limit,
};

pub use values::{DraDrivers, InvalidValue, NoGpu, NodeName, VendorResource, VendorServer};

/// Longest wait of a call from kubelet for its pod to arrive by the watch.
const ALLOCATE_WAIT: Duration = Duration::from_secs(2);

/// Shares the GPUs of this node among pods.
///
/// Advertises shares and memory units of each GPU to kubelet, gives each container the GPU that
/// gpushare-scheduler chose for its pod, and reports devices and their health to the cluster.
#[derive(Clone, Debug, Parser)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "one for each flag without a value, independent of the others"
)]
#[command(name = "gpushare-device-plugin", version, max_term_width = 120)]
pub struct Args {
    /// Name of this node
    #[arg(long, env = "NODE_NAME")]
    node_name: NodeName,

    /// UID of the plugin's own pod, which the scheduler compares with the state that the plugin writes into the Node
    #[arg(long, env = "POD_UID", value_name = "UID")]
    pod_uid: Option<String>,

    /// kubelet's device plugin directory
    #[arg(
        long,
        env = "GPUSHARE_DEVICE_PLUGIN_DIR",
        default_value = "/var/lib/kubelet/device-plugins",
        value_name = "DIR"
    )]
    device_plugin_dir: PathBuf,

    /// Source of the devices: nvml (GPUs by NVML, others by sysfs), or a file of simulated devices
    #[arg(
        long,
        env = "GPUSHARE_INVENTORY",
        default_value = "nvml",
        value_name = "nvml|file:PATH"
    )]
    inventory: InventoryKind,

    /// Mount point of sysfs, which shows RDMA adapters, FPGAs, and the PCI location of each device
    #[arg(long, env = "GPUSHARE_SYSFS_ROOT", default_value = "/sys", value_name = "DIR")]
    sysfs_root: PathBuf,

    /// Types of devices that the plugin looks for in this machine
    #[arg(
        long,
        env = "GPUSHARE_LOOK_FOR",
        default_value = "gpu,rdma,fpga",
        value_delimiter = ',',
        value_enum,
        value_name = "TYPES"
    )]
    look_for: Vec<DeviceKind>,

    /// PCI vendors whose processing accelerators are FPGAs, besides the FPGAs that the kernel's own drivers manage
    #[arg(
        long,
        env = "GPUSHARE_FPGA_VENDORS",
        default_value = "10ee,1172",
        value_delimiter = ',',
        value_name = "VENDORS"
    )]
    fpga_vendors: Vec<PciVendor>,

    /// File with labels of devices and of virtual functions, by which pods select them; may be missing, and may change
    #[arg(long, env = "GPUSHARE_DEVICE_LABELS", value_name = "FILE")]
    device_labels: Option<PathBuf>,

    /// File with the partitions of this node's GPUs; may be missing, and may change
    #[arg(long, env = "GPUSHARE_GPU_PARTITIONS", value_name = "FILE")]
    gpu_partitions: Option<PathBuf>,

    /// Policy for partitions: pods get only partitions (honor), or a partition if possible (prefer)
    #[arg(long, env = "GPUSHARE_GPU_PARTITION_POLICY", value_enum)]
    gpu_partition_policy: Option<PartitionPolicy>,

    /// Memory of a GPU whose driver does not report it, such as one that shares its processor's memory: a quantity such as 96Gi
    #[arg(long, env = "GPUSHARE_GPU_MEMORY", value_name = "QUANTITY")]
    gpu_memory: Option<GpuMemory>,

    /// Treatment of the memory that the driver reserves for itself, which no pod can allocate
    #[arg(long, env = "GPUSHARE_RESERVED_MEMORY", default_value = "share", value_enum)]
    reserved_memory: ReservedMemory,

    /// Reaction to a node without library, driver or GPU
    #[arg(long, env = "GPUSHARE_NO_GPU", default_value = "exit", value_enum)]
    no_gpu: NoGpu,

    /// Number of containers that may share one GPU: the amount of koordinator.sh/gpu.shared per GPU
    #[arg(long, env = "GPUSHARE_SLOTS", default_value_t = NonZeroU32::MIN.saturating_add(proto::resource::DEFAULT_SLOTS - 1))]
    slots: NonZeroU32,

    /// GPUs that pods may share: all, or UUIDs and minor numbers separated by commas; the others are left to whole-GPU pods
    #[arg(
        long,
        env = "GPUSHARE_SHARED_DEVICES",
        default_value = "all",
        value_name = "all|GPUS"
    )]
    shared_devices: SharedDevices,

    /// Server of a vendor's resource on this node: the vendor's plugin (this one watches its pods), this plugin, or none; may be repeated
    #[arg(
        long = "vendor-resource",
        env = "GPUSHARE_VENDOR_RESOURCES",
        default_value = "nvidia.com/gpu=vendor",
        value_delimiter = ',',
        value_name = "NAME=vendor|ours|ignore"
    )]
    vendor_resources: Vec<VendorResource>,

    /// DRA drivers whose devices are GPUs of this node, separated by commas, or none: GPUs of their claims are not shared
    #[arg(
        long,
        env = "GPUSHARE_DRA_DRIVERS",
        default_value = "gpu.nvidia.com",
        value_name = "none|DRIVERS"
    )]
    dra_drivers: DraDrivers,

    /// Resource name of memory units
    #[arg(long, env = "GPUSHARE_MEMORY_RESOURCE", default_value = GPU_MEM, value_name = "NAME")]
    memory_resource: MemoryResource,

    /// Size of one memory unit: MiB, GiB, or a quantity such as 256Mi
    #[arg(
        long,
        env = "GPUSHARE_MEMORY_UNIT",
        default_value = "GiB",
        value_name = "UNIT"
    )]
    memory_unit: MemoryUnit,

    /// Variable from which the container runtime reads the GPUs of a container
    #[arg(
        long,
        env = "GPUSHARE_VISIBLE_DEVICES_ENV",
        default_value = "NVIDIA_VISIBLE_DEVICES",
        value_name = "VARIABLE"
    )]
    visible_devices_env: VariableName,

    /// Injection mode: CDI, the vendor's variable, or the one that works on this node
    #[arg(long, env = "GPUSHARE_INJECT", default_value = "auto", value_enum)]
    inject: Inject,

    /// Report the NUMA node of each device to kubelet, for its topology manager; needs --inject=cdi
    #[arg(long, env = "GPUSHARE_NUMA_HINTS")]
    numa_hints: bool,

    /// Directory for CDI specs; the container runtime must read it
    #[arg(
        long,
        env = "GPUSHARE_CDI_DIR",
        default_value = "/var/run/cdi",
        value_name = "DIR"
    )]
    cdi_dir: PathBuf,

    /// Directories of NVIDIA's CDI specs, separated by commas
    #[arg(
        long,
        env = "GPUSHARE_CDI_SPEC_DIRS",
        default_value = "/etc/cdi,/var/run/cdi",
        value_delimiter = ',',
        value_name = "DIRS"
    )]
    cdi_spec_dirs: Vec<PathBuf>,

    /// Also name device nodes in answers to kubelet, for runtimes that are not NVIDIA's
    #[arg(long, env = "GPUSHARE_PASS_DEVICE_SPECS")]
    pass_device_specs: bool,

    /// Socket of the container runtime for plugins (NRI): each container then gets the devices of its pod's record at its creation
    #[arg(long, env = "GPUSHARE_NRI_SOCKET", value_name = "SOCKET")]
    nri_socket: Option<PathBuf>,

    /// Start containers that see all GPUs of this node without being counted (annotation gpushare/all-devices); the scheduler needs
    /// the flag too
    #[arg(long, env = "GPUSHARE_ALLOW_ALL_DEVICES")]
    allow_all_devices: bool,

    /// Namespaces whose containers keep the vendor's variable although they request no GPU; with --nri-socket all others lose it
    #[arg(
        long,
        env = "GPUSHARE_UNRESTRICTED_NAMESPACES",
        default_value = UNRESTRICTED_NAMESPACES,
        value_delimiter = ',',
        value_name = "NAMESPACES"
    )]
    unrestricted_namespaces: Vec<String>,

    /// Mount point of the node's root directory, for device nodes
    #[arg(long, env = "GPUSHARE_HOST_ROOT", default_value = "/", value_name = "DIR")]
    host_root: PathBuf,

    /// Mount points of the node's directories that may hold the driver; NVML comes from the first that has it
    #[arg(
        long = "driver-root",
        env = "GPUSHARE_DRIVER_ROOT",
        value_delimiter = ',',
        value_name = "DIRS"
    )]
    driver_roots: Vec<PathBuf>,

    /// The `RuntimeClass` of this plugin's own pod, if it has one: the runtime then acts on the vendor's variable in such pods alone
    #[arg(long, env = "GPUSHARE_RUNTIME_CLASS", value_name = "NAME")]
    runtime_class: Option<String>,

    /// Reaction to a pod that would see other devices than its record names
    #[arg(long, env = "GPUSHARE_ON_MISMATCH", default_value = "refuse", value_enum)]
    on_mismatch: OnMismatch,

    /// Reaction to a pod that the scheduler did not place
    #[arg(long, env = "GPUSHARE_UNPLACED", default_value = "refuse", value_enum)]
    unplaced: Unplaced,

    /// Critical XIDs without effect: numbers separated by commas, all, or none
    #[arg(long, env = "GPUSHARE_IGNORE_XIDS", default_value_t = Xids::none(), value_name = "XIDS")]
    ignore_xids: Xids,

    /// Critical XIDs that an application causes: they make events on the pods of the GPU, which stays healthy
    #[arg(long, env = "GPUSHARE_APPLICATION_XIDS", default_value_t = Xids::of_applications(), value_name = "XIDS")]
    application_xids: Xids,

    /// Critical XIDs after which a GPU stays unhealthy until it has been reset or an operator clears it
    #[arg(long, env = "GPUSHARE_RESET_XIDS", default_value_t = Xids::of_resets(), value_name = "XIDS")]
    reset_xids: Xids,

    /// Evict pods from a device that has been unhealthy for a minute; the plugin's role must allow it
    #[arg(long, env = "GPUSHARE_EVICT_FROM_SICK_DEVICES")]
    evict_from_sick_devices: bool,

    /// Interval between probes of each GPU; for simulated ones, between reads of their file
    #[arg(long, env = "GPUSHARE_PROBE_INTERVAL", default_value = "10s", value_parser = duration, value_name = "DURATION")]
    probe_interval: Duration,

    /// Time without trouble after which a GPU is healthy again
    #[arg(long, env = "GPUSHARE_RECOVERY_QUIET", default_value = "60s", value_parser = duration, value_name = "DURATION")]
    recovery_quiet: Duration,

    /// Only list to kubelet the devices that it remembers, from a boot until another process of the plugin serves. For a service of the
    /// host: without it kubelet fails the pods that hold devices before the plugin's own pod can run
    #[arg(long, env = "GPUSHARE_AT_BOOT", conflicts_with = "uninstall")]
    at_boot: bool,

    /// Remove everything that the plugin has written on this node and into its Node, instead of serving devices: once no pod holds a
    /// device (unused), or at once (now)
    #[arg(long, env = "GPUSHARE_UNINSTALL", value_enum, value_name = "unused|now")]
    uninstall: Option<UninstallWhen>,

    /// Kubeconfig for the API server; without it the pod's service account
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Address for /healthz, /readyz and /metrics, such as 0.0.0.0:8081; none if left out
    #[arg(long, env = "GPUSHARE_HEALTH_LISTEN", value_name = "ADDRESS")]
    health_listen: Option<SocketAddr>,

    /// Time for which the plugin may hang, running none of its tasks, before it ends itself; kubelet then starts it again. The time
    /// that it is stopped does not count; 0s never ends it
    #[arg(long, env = "GPUSHARE_HANG_TIMEOUT", default_value = "10s", value_parser = limit, value_name = "DURATION")]
    hang_timeout: Duration,

    /// Form of the log
    #[arg(long, env = "GPUSHARE_LOG_FORMAT", default_value = "text", value_enum)]
    log_format: LogFormat,

    /// Lines in the log: error, warn, info, debug, trace, or directives such as info,kube=debug
    #[arg(
        long,
        env = "GPUSHARE_LOG_LEVEL",
        default_value = "info",
        value_name = "LEVEL"
    )]
    log_level: LogFilter,
}

/// The checked settings.
#[derive(Clone, Debug)]
pub struct Config {
    /// This node.
    pub node_name: NodeName,
    /// UID of the plugin's own pod, if it runs in one.
    pub pod_uid: Option<String>,
    /// kubelet's device plugin directory.
    pub device_plugin_dir: PathBuf,
    /// The source of the devices.
    pub source: Source,
    /// The operator's files about the devices.
    pub overrides: OverrideFiles,
    /// The policy for partitions of GPUs, if the operator sets one.
    pub partition_policy: Option<GpuPartitionPolicy>,
    /// The reaction to a node without devices.
    pub no_gpu: NoGpu,
    /// Shares of each GPU.
    pub slots: NonZeroU32,
    /// The GPUs that are shared.
    pub shared_devices: SharedDevices,
    /// The servers of the vendors' resources.
    pub vendor_resources: Vec<VendorResource>,
    /// The DRA drivers whose claims are watched.
    pub dra_drivers: DraDrivers,
    /// kubelet's pod-resources socket.
    pub pod_resources_socket: PathBuf,
    /// The container runtime's socket for plugins, if the runtime hook is wanted.
    pub nri_socket: Option<PathBuf>,
    /// The settings of the kubelet server.
    pub settings: Settings,
    /// The value of the vendor's variable in this process.
    pub visible_devices: Option<String>,
    /// Directories that may hold the driver.
    pub driver_roots: Vec<PathBuf>,
    /// The `RuntimeClass` of this plugin's pod.
    pub runtime_class: Option<String>,
    /// Namespaces that the runtime hook does not restrict.
    pub unrestricted_namespaces: Vec<String>,
    /// The policy of the check before a container starts.
    pub starts: StartPolicy,
    /// The rules of health.
    pub health: HealthPolicy,
    /// True if pods of an unhealthy device are evicted.
    pub evicts_from_sick_devices: bool,
    /// True if kubelet gets the NUMA node of each device.
    pub numa_hints: bool,
    /// True if this process only lists devices after a boot.
    pub at_boot: bool,
    /// Set if this process only removes what the plugin has written.
    pub uninstall: Option<UninstallWhen>,
    /// Kubeconfig for the API server; the pod's service account if none.
    pub kubeconfig: Option<PathBuf>,
    /// The address for probes and metrics.
    pub health_listen: Option<SocketAddr>,
    /// Time for which the process may hang before it ends itself; zero for no limit.
    pub hang_timeout: Duration,
    /// Form of the log.
    pub log_format: LogFormat,
    /// The lines in the log.
    pub log_filter: LogFilter,
}

impl Config {
    /// The vendors' resources with this server.
    pub fn served_by(&self, server: VendorServer) -> impl Iterator<Item = &str> {
        let theirs = self
            .vendor_resources
            .iter()
            .filter(move |resource| resource.server == server);
        theirs.map(|resource| resource.name.as_str())
    }

    /// Returns true if this plugin serves a vendor's resource.
    pub fn serves_vendor(&self) -> bool {
        self.served_by(VendorServer::Ours).next().is_some()
    }
}

impl Args {
    fn source(&self) -> Source {
        let interval = self.probe_interval;
        if let InventoryKind::File(path) = &self.inventory {
            return Source::File(FileSource {
                path: path.clone(),
                node: self.node_name.to_string(),
                interval,
            });
        }
        let looks_for = |kind| self.look_for.contains(&kind);
        let nvml = NvmlSource {
            sysfs: self.sysfs_root.clone(),
            driver_roots: self.driver_roots.clone(),
            unknown_memory: self.gpu_memory.map(|memory| memory.0),
            withholds_reserved: self.reserved_memory == ReservedMemory::Withhold,
            probe_interval: interval,
            ..NvmlSource::default()
        };
        let others = SysfsSource {
            root: self.sysfs_root.clone(),
            interval,
            has_rdma: looks_for(DeviceKind::Rdma),
            has_fpga: looks_for(DeviceKind::Fpga),
            fpga_vendors: self.fpga_vendors.clone(),
        };
        Source::Machine(MachineSource {
            gpus: looks_for(DeviceKind::Gpu).then_some(nvml),
            others,
        })
    }
}

/// The value of a variable in this process. NVIDIA's runtime appends its own value and leaves the first one there.
fn own_variable(name: &str) -> Option<String> {
    let values = || {
        std::env::vars_os()
            .filter(|(own, _)| own == name)
            .filter_map(|(_, value)| value.into_string().ok())
    };
    values().find(|value| value == VOID).or_else(|| values().next())
}

impl From<Args> for Config {
    fn from(args: Args) -> Self {
        let source = args.source();
        let vendor_resources = values::distinct(args.vendor_resources);
        let whole = vendor_resources
            .iter()
            .find(|resource| resource.server == VendorServer::Ours)
            .map(|resource| resource.name.clone());
        let visible_devices = own_variable(&args.visible_devices_env.0);
        let settings = Settings {
            names: ExtendedResourceNames {
                cluster: ResourceNames {
                    memory: args.memory_resource.0,
                },
                whole,
            },
            memory_unit: args.memory_unit,
            visible_devices_env: args.visible_devices_env.0,
            allocate_wait: ALLOCATE_WAIT,
            injection: InjectionSettings {
                mode: args.inject.mode(),
                specs: SpecDir::new(args.cdi_dir),
                vendor_specs: VendorSpecs::of(args.cdi_spec_dirs),
                pass_device_specs: args.pass_device_specs,
                host_root: args.host_root,
            },
            allows_all_devices: args.allow_all_devices,
        };
        // kubelet keeps both directories below its root.
        let kubelet_root = args.device_plugin_dir.parent().unwrap_or(&args.device_plugin_dir);
        let pod_resources_socket = kubelet_root.join("pod-resources/kubelet.sock");
        let starts = StartPolicy {
            pod_resources: pod_resources_socket.clone(),
            on_mismatch: args.on_mismatch,
            unplaced: args.unplaced,
        };
        Self {
            visible_devices,
            driver_roots: args.driver_roots,
            runtime_class: args.runtime_class,
            unrestricted_namespaces: args.unrestricted_namespaces,
            pod_resources_socket,
            nri_socket: args.nri_socket,
            node_name: args.node_name,
            pod_uid: args.pod_uid.filter(|uid| !uid.is_empty()),
            device_plugin_dir: args.device_plugin_dir,
            source,
            overrides: OverrideFiles {
                labels: args.device_labels,
                partitions: args.gpu_partitions,
            },
            partition_policy: args.gpu_partition_policy.map(GpuPartitionPolicy::from),
            no_gpu: args.no_gpu,
            slots: args.slots,
            shared_devices: args.shared_devices,
            vendor_resources,
            dra_drivers: args.dra_drivers,
            settings,
            starts,
            health: HealthPolicy {
                ignored_xids: args.ignore_xids,
                application_xids: args.application_xids,
                reset_xids: args.reset_xids,
                quiet: args.recovery_quiet,
                ..HealthPolicy::default()
            },
            evicts_from_sick_devices: args.evict_from_sick_devices,
            numa_hints: args.numa_hints,
            at_boot: args.at_boot,
            uninstall: args.uninstall,
            kubeconfig: args.kubeconfig,
            health_listen: args.health_listen,
            hang_timeout: args.hang_timeout,
            log_format: args.log_format,
            log_filter: args.log_level,
        }
    }
}

#[cfg(test)]
mod tests;
