//! What the operator chooses: flags and their environment variables, checked once, at start.

mod vendor_resource;

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use proto::memory_unit::MemoryUnit;
use proto::resource::{GPU_MEM, GPU_SHARED, ResourceNames, VENDOR_GPUS};
use proto::topology::GpuPartitionPolicy;

use crate::cdi::vendor::VendorSpecs;
use crate::fleet::sharing::SharedDevices;
use crate::gate::{self, OnMismatch, Unplaced};
use crate::health::{Policy, Xids};
use crate::inject::{Injection, Manner};
use crate::inventory::{FileSource, MachineSource, NvmlSource, PciVendor, Source, SysfsSource};
use crate::plugin::Settings;
use crate::pods::IN_NODE_STATUS;
use crate::publish::additions::Files;
use crate::served::ServedNames;

pub use vendor_resource::{VendorResource, VendorServer};

/// Shares the GPUs of this node among pods.
///
/// Advertises shares and memory units of each GPU to kubelet, gives each container the GPU that
/// gpushare-scheduler chose for its pod, and reports devices and their health to the cluster.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpushare-device-plugin", version, max_term_width = 120)]
pub struct Args {
    /// Name of the node this runs on
    #[arg(long, env = "NODE_NAME")]
    node_name: NodeName,

    /// kubelet's device plugin directory
    #[arg(long, env = "GPUSHARE_DEVICE_PLUGIN_DIR", default_value = "/var/lib/kubelet/device-plugins", value_name = "DIR")]
    device_plugin_dir: PathBuf,

    /// Where the devices come from: nvml (GPUs by NVML, others by sysfs), or a file of simulated ones
    #[arg(long, env = "GPUSHARE_INVENTORY", default_value = "nvml", value_name = "nvml|file:PATH")]
    inventory: InventoryKind,

    /// NVIDIA's management library: a path, or a name for the dynamic loader
    #[arg(long, env = "GPUSHARE_NVML_LIBRARY", default_value = "libnvidia-ml.so.1", value_name = "LIBRARY")]
    nvml_library: PathBuf,

    /// Where sysfs is mounted, which tells where in the machine devices sit, and of RDMA adapters and FPGAs
    #[arg(long, env = "GPUSHARE_SYSFS_ROOT", default_value = "/sys", value_name = "DIR")]
    sysfs_root: PathBuf,

    /// The types of devices that are looked for in this machine
    #[arg(long, env = "GPUSHARE_LOOK_FOR", default_value = "gpu,rdma,fpga", value_delimiter = ',', value_enum, value_name = "TYPES")]
    look_for: Vec<DeviceKind>,

    /// PCI vendors whose processing accelerators are FPGAs, besides the FPGAs that the kernel's own drivers manage
    #[arg(long, env = "GPUSHARE_FPGA_VENDORS", default_value = "10ee,1172", value_delimiter = ',', value_name = "VENDORS")]
    fpga_vendors: Vec<PciVendor>,

    /// A file with labels of devices and of virtual functions, by which pods choose them; may be missing, and may change
    #[arg(long, env = "GPUSHARE_DEVICE_LABELS", value_name = "FILE")]
    device_labels: Option<PathBuf>,

    /// A file with the partitions of this node's GPUs; may be missing, and may change
    #[arg(long, env = "GPUSHARE_GPU_PARTITIONS", value_name = "FILE")]
    gpu_partitions: Option<PathBuf>,

    /// Whether pods get partitions alone (honor), or best a partition (prefer)
    #[arg(long, env = "GPUSHARE_GPU_PARTITION_POLICY", value_enum)]
    gpu_partition_policy: Option<PartitionPolicy>,

    /// What to do when this node has no library, driver or GPU
    #[arg(long, env = "GPUSHARE_NO_GPU", default_value = "exit", value_enum)]
    no_gpu: NoGpu,

    /// How many containers may share one GPU: the number of koordinator.sh/gpu.shared per GPU
    #[arg(long, env = "GPUSHARE_SLOTS", default_value_t = NonZeroU32::MIN.saturating_add(proto::resource::DEFAULT_SLOTS - 1))]
    slots: NonZeroU32,

    /// The GPUs that pods may share: all, or UUIDs and minor numbers separated by commas; the others are left to whole-GPU pods
    #[arg(long, env = "GPUSHARE_SHARED_DEVICES", default_value = "all", value_name = "all|GPUS")]
    shared_devices: SharedDevices,

    /// Who serves a vendor's resource on this node: the vendor's plugin (its pods are watched), this one, or nobody; may be repeated
    #[arg(
        long = "vendor-resource",
        env = "GPUSHARE_VENDOR_RESOURCES",
        default_value = "nvidia.com/gpu=vendor",
        value_delimiter = ',',
        value_name = "NAME=vendor|ours|ignore"
    )]
    vendor_resources: Vec<VendorResource>,

    /// kubelet's pod-resources socket; without this, pod-resources/kubelet.sock beside the device plugin directory
    #[arg(long, env = "GPUSHARE_POD_RESOURCES_SOCKET", value_name = "SOCKET")]
    pod_resources_socket: Option<PathBuf>,

    /// Resource name of memory units
    #[arg(long, env = "GPUSHARE_MEMORY_RESOURCE", default_value = GPU_MEM, value_name = "NAME")]
    memory_resource: MemoryResource,

    /// How much one memory unit is: MiB, GiB, or a quantity such as 256Mi
    #[arg(long, env = "GPUSHARE_MEMORY_UNIT", default_value = "GiB", value_name = "UNIT")]
    memory_unit: MemoryUnit,

    /// The variable that tells the container runtime which GPUs a container sees
    #[arg(long, env = "GPUSHARE_VISIBLE_DEVICES_ENV", default_value = "NVIDIA_VISIBLE_DEVICES", value_name = "VARIABLE")]
    visible_devices_env: VariableName,

    /// How long a call of kubelet waits for its pod to show up in the watch
    #[arg(long, env = "GPUSHARE_ALLOCATE_WAIT", default_value = "2s", value_parser = duration, value_name = "DURATION")]
    allocate_wait: Duration,

    /// How containers are given their devices; auto asks what the node's runtime can do
    #[arg(long, env = "GPUSHARE_INJECT", default_value = "auto", value_enum)]
    inject: Inject,

    /// How it is told whose a container is: by proof before it starts, or by the order of assume times alone
    #[arg(long, env = "GPUSHARE_IDENTITY", default_value = "proof", value_enum)]
    identity: Identity,

    /// Tell kubelet on which NUMA node each device hangs, for its topology manager; needs --inject=cdi
    #[arg(long, env = "GPUSHARE_NUMA_HINTS")]
    numa_hints: bool,

    /// Where CDI specs are written; the container runtime must look there
    #[arg(long, env = "GPUSHARE_CDI_DIR", default_value = "/var/run/cdi", value_name = "DIR")]
    cdi_dir: PathBuf,

    /// Where NVIDIA's CDI specs are looked for, separated by commas
    #[arg(long, env = "GPUSHARE_CDI_SPEC_DIRS", default_value = "/etc/cdi,/var/run/cdi", value_delimiter = ',', value_name = "DIRS")]
    cdi_spec_dirs: Vec<PathBuf>,

    /// Hand over device nodes in answers to kubelet too, for runtimes that are not NVIDIA's
    #[arg(long, env = "GPUSHARE_PASS_DEVICE_SPECS")]
    pass_device_specs: bool,

    /// The container runtime's socket for plugins (NRI): each container then gets the devices of its pod's record when it is made
    #[arg(long, env = "GPUSHARE_NRI_SOCKET", value_name = "SOCKET")]
    nri_socket: Option<PathBuf>,

    /// Where the node's root is seen from here, for device nodes
    #[arg(long, env = "GPUSHARE_DEVICE_ROOT", default_value = "/", value_name = "DIR")]
    device_root: PathBuf,

    /// What to do with a pod that sees other devices than its record names, for as long as it lives
    #[arg(long, env = "GPUSHARE_ON_MISMATCH", default_value = "refuse", value_enum)]
    on_mismatch: OnMismatch,

    /// What to do with a pod that the scheduler did not place
    #[arg(long, env = "GPUSHARE_UNPLACED", default_value = "refuse", value_enum)]
    unplaced: Unplaced,

    /// Critical XIDs that nobody is told of: numbers separated by commas, all, or none
    #[arg(long, env = "GPUSHARE_IGNORE_XIDS", default_value_t = Xids::none(), value_name = "XIDS")]
    ignore_xids: Xids,

    /// Critical XIDs that an application causes: the pods on the GPU are told, and it stays healthy
    #[arg(long, env = "GPUSHARE_APPLICATION_XIDS", default_value_t = Xids::of_applications(), value_name = "XIDS")]
    application_xids: Xids,

    /// Evict pods from a device that has been unhealthy for a minute; the plugin's role must allow it
    #[arg(long, env = "GPUSHARE_EVICT_FROM_SICK_DEVICES")]
    evict_from_sick_devices: bool,

    /// How often each GPU is probed; for simulated ones, how often their file is read
    #[arg(long, env = "GPUSHARE_PROBE_INTERVAL", default_value = "10s", value_parser = duration, value_name = "DURATION")]
    probe_interval: Duration,

    /// How long a GPU must have been without trouble to be healthy again
    #[arg(long, env = "GPUSHARE_RECOVERY_QUIET", default_value = "60s", value_parser = duration, value_name = "DURATION")]
    recovery_quiet: Duration,

    /// Configuration for the API server; without it the pod's service account
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Where to answer /healthz, /readyz and /metrics, such as 0.0.0.0:8081; nowhere if left out
    #[arg(long, env = "GPUSHARE_HEALTH_LISTEN", value_name = "ADDRESS")]
    health_listen: Option<SocketAddr>,

    /// Form of the log
    #[arg(long, env = "GPUSHARE_LOG_FORMAT", default_value = "text", value_enum)]
    log_format: LogFormat,

    /// What is logged: error, warn, info, debug, trace, or directives such as info,kube=debug
    #[arg(long, env = "GPUSHARE_LOG_LEVEL", default_value = "info", value_name = "LEVEL")]
    log_level: LogLevel,
}

/// The checked choices.
#[derive(Clone, Debug)]
pub struct Config {
    /// The node this runs on.
    pub node_name: NodeName,
    /// kubelet's device plugin directory.
    pub device_plugin_dir: PathBuf,
    /// Where the devices come from.
    pub source: Source,
    /// Where the operator says more of the devices.
    pub additions: Files,
    /// What partitions of GPUs are for, if the operator says it.
    pub partition_policy: Option<GpuPartitionPolicy>,
    /// What to do without devices.
    pub no_gpu: NoGpu,
    /// Shares of each GPU.
    pub slots: NonZeroU32,
    /// The GPUs that are shared.
    pub shared_devices: SharedDevices,
    /// Who serves the vendors' resources.
    pub vendor_resources: Vec<VendorResource>,
    /// kubelet's pod-resources socket.
    pub pod_resources_socket: PathBuf,
    /// The container runtime's socket for plugins, if its hook is wanted.
    pub nri_socket: Option<PathBuf>,
    /// What Allocate answers depend on.
    pub settings: Settings,
    /// How it is told whose a container is.
    pub identity: Identity,
    /// What lets a container start.
    pub starts: gate::Policy,
    /// What makes a GPU sick and well.
    pub health: Policy,
    /// Whether pods of a sick device are evicted.
    pub evicts_from_sick_devices: bool,
    /// Whether kubelet is told on which NUMA node each device hangs.
    pub numa_hints: bool,
    /// Configuration for the API server, in-cluster if none.
    pub kubeconfig: Option<PathBuf>,
    /// Where to answer health requests.
    pub health_listen: Option<SocketAddr>,
    /// Form of the log.
    pub log_format: LogFormat,
    /// What is logged.
    pub log_level: LogLevel,
}

impl Config {
    /// The resources that this server serves.
    pub fn served_by(&self, server: VendorServer) -> impl Iterator<Item = &str> {
        let theirs = self.vendor_resources.iter().filter(move |resource| resource.server == server);
        theirs.map(|resource| resource.name.as_str())
    }

    /// Whether this plugin serves a vendor's resource.
    pub fn serves_vendor(&self) -> bool {
        self.served_by(VendorServer::Ours).next().is_some()
    }
}

impl Args {
    fn source(&self) -> Source {
        let interval = self.probe_interval;
        if let InventoryKind::File(path) = &self.inventory {
            return Source::File(FileSource { path: path.clone(), node: self.node_name.to_string(), interval });
        }
        let looks_for = |kind| self.look_for.contains(&kind);
        let (library, sysfs) = (self.nvml_library.clone(), self.sysfs_root.clone());
        let nvml = || NvmlSource { library, sysfs, probe_interval: interval, ..NvmlSource::default() };
        let others = SysfsSource {
            root: self.sysfs_root.clone(),
            interval,
            has_rdma: looks_for(DeviceKind::Rdma),
            has_fpga: looks_for(DeviceKind::Fpga),
            fpga_vendors: self.fpga_vendors.clone(),
        };
        Source::Machine(MachineSource { gpus: looks_for(DeviceKind::Gpu).then(nvml), others })
    }
}

impl From<Args> for Config {
    fn from(args: Args) -> Self {
        let source = args.source();
        let vendor_resources = vendor_resource::distinct(args.vendor_resources);
        let whole = vendor_resources.iter().find(|resource| resource.server == VendorServer::Ours).map(|resource| resource.name.clone());
        let settings = Settings {
            names: ServedNames { cluster: ResourceNames { memory: args.memory_resource.0 }, whole },
            memory_unit: args.memory_unit,
            visible_devices_env: args.visible_devices_env.0,
            allocate_wait: args.allocate_wait,
            injection: Injection {
                // Without proof there is nobody to write specs.
                manner: if args.identity == Identity::Timestamp { Some(Manner::Envvar) } else { args.inject.manner() },
                cdi_dir: args.cdi_dir,
                vendor_specs: VendorSpecs::of(args.cdi_spec_dirs),
                pass_device_specs: args.pass_device_specs,
                device_root: args.device_root,
            },
        };
        let beside = || args.device_plugin_dir.parent().unwrap_or(&args.device_plugin_dir).join("pod-resources/kubelet.sock");
        let pod_resources_socket = args.pod_resources_socket.clone().unwrap_or_else(beside);
        let starts = gate::Policy { pod_resources: pod_resources_socket.clone(), on_mismatch: args.on_mismatch, unplaced: args.unplaced };
        Self {
            pod_resources_socket,
            nri_socket: args.nri_socket,
            node_name: args.node_name,
            device_plugin_dir: args.device_plugin_dir,
            source,
            additions: Files { labels: args.device_labels, partitions: args.gpu_partitions },
            partition_policy: args.gpu_partition_policy.map(GpuPartitionPolicy::from),
            no_gpu: args.no_gpu,
            slots: args.slots,
            shared_devices: args.shared_devices,
            vendor_resources,
            settings,
            identity: args.identity,
            starts,
            health: Policy {
                ignored_xids: args.ignore_xids,
                application_xids: args.application_xids,
                quiet: args.recovery_quiet,
                ..Policy::default()
            },
            evicts_from_sick_devices: args.evict_from_sick_devices,
            numa_hints: args.numa_hints,
            kubeconfig: args.kubeconfig,
            health_listen: args.health_listen,
            log_format: args.log_format,
            log_level: args.log_level,
        }
    }
}

/// A flag's value that cannot be accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidValue(String);

/// Name of a node: part of URLs and field selectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeName(String);

impl NodeName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for NodeName {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        if is_dns_subdomain(text) { Ok(Self(text.to_owned())) } else { Err(InvalidValue("not the name of a node".to_owned())) }
    }
}

/// Name of a resource that kubelet lets plugins serve.
#[derive(Clone, Debug)]
struct MemoryResource(String);

impl FromStr for MemoryResource {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        extended_resource(text)?;
        if text == GPU_SHARED || IN_NODE_STATUS.contains(&text) || VENDOR_GPUS.contains(&text) {
            return Err(InvalidValue("this name has another meaning already".to_owned()));
        }
        Ok(Self(text.to_owned()))
    }
}

/// Checks the name of a resource that plugins may serve.
fn extended_resource(text: &str) -> Result<(), InvalidValue> {
    let Some((domain, name)) = text.split_once('/') else {
        return Err(InvalidValue("not of the form domain/name".to_owned()));
    };
    let is_name_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_bounded = name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.ends_with(|c: char| c.is_ascii_alphanumeric());
    // The annotation of the unit has a longer name, which must be legal too.
    if !is_dns_subdomain(domain) || !is_bounded || !name.chars().all(is_name_char) || name.len() > 63 - "-unit".len() {
        return Err(InvalidValue("not the name of an extended resource".to_owned()));
    }
    if domain == "kubernetes.io" || domain.ends_with(".kubernetes.io") {
        return Err(InvalidValue("the domain kubernetes.io belongs to Kubernetes".to_owned()));
    }
    Ok(())
}

fn is_dns_subdomain(text: &str) -> bool {
    let is_label = |label: &str| {
        let is_inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        !label.is_empty() && !label.starts_with('-') && !label.ends_with('-') && label.bytes().all(is_inner)
    };
    text.len() <= 253 && text.split('.').all(is_label)
}

/// Name of an environment variable.
#[derive(Clone, Debug)]
struct VariableName(String);

impl FromStr for VariableName {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        if text.is_empty() || text.starts_with(|c: char| c.is_ascii_digit()) || !text.bytes().all(is_allowed) {
            return Err(InvalidValue("not the name of an environment variable".to_owned()));
        }
        Ok(Self(text.to_owned()))
    }
}

/// Where devices come from, as written on the command line.
#[derive(Clone, Debug)]
enum InventoryKind {
    Nvml,
    File(PathBuf),
}

impl FromStr for InventoryKind {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        match (text, text.strip_prefix("file:")) {
            ("nvml", _) => Ok(Self::Nvml),
            (_, Some(path)) if !path.is_empty() => Ok(Self::File(path.into())),
            _ => Err(InvalidValue("write nvml, or file: and the path of a file of simulated devices".to_owned())),
        }
    }
}

/// What partitions of GPUs are for, as written on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PartitionPolicy {
    /// They alone are given away.
    Honor,
    /// They are given away first.
    Prefer,
}

impl From<PartitionPolicy> for GpuPartitionPolicy {
    fn from(policy: PartitionPolicy) -> Self {
        match policy {
            PartitionPolicy::Honor => Self::Honor,
            PartitionPolicy::Prefer => Self::Prefer,
        }
    }
}

/// A type of devices that is looked for in a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeviceKind {
    /// GPUs that NVML lists.
    Gpu,
    /// RDMA adapters.
    Rdma,
    /// FPGAs.
    Fpga,
}

/// How it is told whose a container is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Identity {
    /// kubelet is asked before a container starts.
    Proof,
    /// By the order of assume times, as the old gpushare plugin did; for comparison.
    Timestamp,
}

/// How containers are given their devices, as written on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Inject {
    /// By CDI if the node's runtime is known to take it, else by variable.
    Auto,
    /// By a variable.
    Envvar,
    /// By a CDI device.
    Cdi,
}

impl Inject {
    fn manner(self) -> Option<Manner> {
        match self {
            Self::Auto => None,
            Self::Envvar => Some(Manner::Envvar),
            Self::Cdi => Some(Manner::Cdi),
        }
    }
}

/// What to do when there are no devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NoGpu {
    /// End with an error.
    Exit,
    /// Look again every 30 seconds.
    Wait,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What is logged; directives that are known to be readable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLevel(String);

impl LogLevel {
    /// The directives as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for LogLevel {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        let directives = tracing_subscriber::EnvFilter::builder().parse(text);
        // A lone word that is no level would be taken for the name of a module, and silence everything.
        let lone = text.split(',').filter(|part| !part.contains(['=', '[', ':']));
        let levels = ["error", "warn", "info", "debug", "trace", "off"];
        let is_level = lone.into_iter().all(|word| levels.contains(&word.trim().to_lowercase().as_str()));
        match directives {
            Ok(_) if is_level => Ok(Self(text.to_owned())),
            Ok(_) => Err(InvalidValue("write error, warn, info, debug, trace, or directives such as info,kube=debug".to_owned())),
            Err(error) => Err(InvalidValue(error.to_string())),
        }
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A duration such as `500ms`, `2s` or `1m`.
fn duration(text: &str) -> Result<Duration, InvalidValue> {
    /// Nothing here makes sense beyond an hour.
    const LONGEST: Duration = Duration::from_secs(3600);
    let fail = || InvalidValue("not a duration: write a number and ms, s or m, such as 500ms; at most 60m".to_owned());
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at_checked(digits).ok_or_else(fail)?;
    let number: u64 = number.parse().map_err(|_| fail())?;
    let duration = match unit {
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        "m" => Duration::from_secs(number.checked_mul(60).ok_or_else(fail)?),
        _ => return Err(fail()),
    };
    if duration.is_zero() || duration > LONGEST { Err(fail()) } else { Ok(duration) }
}

#[cfg(test)]
mod tests;
