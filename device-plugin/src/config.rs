//! The flags and their environment variables, checked once, at start.

mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Parser, Subcommand};
use daemon::process::ProcessArgs;
use proto::admission::UNRESTRICTED_NAMESPACES;
use proto::memory_unit::MemoryUnit;
use proto::resource::{GPU_MEM, ResourceNames};
use proto::topology::GpuPartitionPolicy;

use crate::devices::extended_resource::ExtendedResourceNames;
use crate::devices::fleet::sharing::{SharedDevices, Sharing};
use crate::devices::health::{HealthPolicy, Xids};
use crate::devices::inventory::source::{DeviceSource, FileSource, NvmlSource};
use crate::inject::cdi::SpecDir;
use crate::inject::cdi::vendor::VendorSpecs;
use crate::inject::hami_core::HamiCore;
use crate::inject::own_container::OwnContainer;
use crate::inject::settings::NodeSettings;
use crate::publish::node_overrides::OverrideFiles;
use crate::start::OnUnplaced;

use values::{dra_drivers, gpu_memory, memory_resource, node_name, partition_policy};

pub use values::{EvictionReason, Inject, InventoryKind, ReservedMemory, VendorResource, VendorServer};

/// Longest wait of an Allocate call until the watch of pods shows the pod that kubelet allocates for.
const ALLOCATE_WAIT: Duration = Duration::from_secs(2);

/// Number of probe intervals without trouble after which a device is healthy again: a minute where NVML is probed.
const QUIET_PROBES: u32 = 6;

/// Shares the GPUs of this node among pods.
///
/// Advertises shares and memory units of each GPU to kubelet, gives each container the GPU that
/// gpushare-scheduler chose for its pod, and reports devices and their health to the cluster.
#[derive(Clone, Debug, Parser)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "one for each flag without a value, independent of the others"
)]
#[command(name = "gpushare-device-plugin", version)]
#[command(max_term_width = 120, disable_help_subcommand = true)]
pub struct Config {
    /// Name of the Node object of this machine
    #[arg(long, env = "NODE_NAME", value_parser = node_name)]
    pub node_name: String,

    /// UID of the plugin's own pod. The plugin writes it into the Node with its state; the scheduler sees by it when that pod is
    /// gone. If the pod has a `RuntimeClass`, the runtime acts on `NVIDIA_VISIBLE_DEVICES` in such pods alone
    #[arg(long, env = "POD_UID", value_name = "UID")]
    pub pod_uid: Option<String>,

    /// kubelet's device plugin directory, with its sockets and its checkpoint
    #[arg(long, env = "GPUSHARE_DEVICE_PLUGIN_DIR")]
    #[arg(default_value = "/var/lib/kubelet/device-plugins", value_name = "DIR")]
    pub device_plugin_dir: PathBuf,

    /// Source of the devices: nvml (GPUs from NVML, RDMA adapters and FPGAs from sysfs), or a file of simulated devices
    #[arg(long, env = "GPUSHARE_INVENTORY", default_value = "nvml")]
    #[arg(value_name = "nvml|file:PATH")]
    pub inventory: InventoryKind,

    /// YAML file with labels of devices and of their virtual functions, by which pods select them. It may be missing, and may
    /// change
    #[arg(long, env = "GPUSHARE_DEVICE_LABELS", value_name = "FILE")]
    pub device_labels: Option<PathBuf>,

    /// File with the sets of this node's GPUs that may be allocated together (partitions). It may be missing, and may change
    #[arg(long, env = "GPUSHARE_GPU_PARTITIONS", value_name = "FILE")]
    pub gpu_partitions: Option<PathBuf>,

    /// Use of partitions: pods get only partitions (honor), or a partition if possible (prefer, the default)
    #[arg(long, env = "GPUSHARE_GPU_PARTITION_POLICY", value_parser = partition_policy, value_name = "honor|prefer")]
    pub gpu_partition_policy: Option<GpuPartitionPolicy>,

    /// Memory of each GPU whose driver does not report it, such as one that shares its processor's memory: a quantity such as
    /// 96Gi
    #[arg(long, env = "GPUSHARE_GPU_MEMORY", value_parser = gpu_memory, value_name = "QUANTITY")]
    pub gpu_memory: Option<u64>,

    /// Use of the memory that the driver of a GPU reserves for itself, if it reports any: no pod can allocate it
    #[arg(long, env = "GPUSHARE_RESERVED_MEMORY", default_value = "withhold")]
    pub reserved_memory: ReservedMemory,

    /// Number of containers that may share one GPU: the amount of koordinator.sh/gpu.shared per GPU
    #[arg(long, env = "GPUSHARE_SLOTS", default_value_t = NonZeroU32::MIN.saturating_add(proto::resource::DEFAULT_SLOTS - 1))]
    pub slots: NonZeroU32,

    /// GPUs that pods may share: all, or UUIDs and minor numbers separated by commas; the others are left to whole-GPU pods
    #[arg(long, env = "GPUSHARE_SHARED_DEVICES", default_value = "all")]
    #[arg(value_name = "all|GPUS")]
    pub(crate) shared_devices: SharedDevices,

    /// A resource of whole GPUs, and the device plugin that serves it on this node: the vendor's, of which this plugin counts the
    /// pods (vendor), this one (ours), or one that does not matter (ignore). May be repeated
    #[arg(long = "vendor-resource", env = "GPUSHARE_VENDOR_RESOURCES")]
    #[arg(default_value = "nvidia.com/gpu=vendor", value_delimiter = ',')]
    #[arg(value_name = "NAME=vendor|ours|ignore")]
    pub vendor_resources: Vec<VendorResource>,

    /// DRA drivers whose devices are GPUs of this node, separated by commas, or none: GPUs of their claims are not shared
    #[arg(long, env = "GPUSHARE_DRA_DRIVERS", default_value = "gpu.nvidia.com")]
    #[arg(value_parser = dra_drivers, value_name = "none|DRIVERS")]
    pub dra_drivers: BTreeSet<String>,

    /// Name of the extended resource that counts memory units
    #[arg(long, env = "GPUSHARE_MEMORY_RESOURCE", default_value = GPU_MEM)]
    #[arg(value_parser = memory_resource, value_name = "NAME")]
    pub memory_resource: String,

    /// Size of one memory unit: MiB, GiB, or a quantity such as 256Mi
    #[arg(long, env = "GPUSHARE_MEMORY_UNIT", default_value = "GiB")]
    #[arg(value_name = "UNIT")]
    pub memory_unit: MemoryUnit,

    /// Way in which containers get their devices
    #[arg(long, env = "GPUSHARE_INJECT", default_value = "auto")]
    pub inject: Inject,

    /// Report the NUMA node of each device to kubelet, on nodes where its topology manager aligns CPUs with devices; needs
    /// --inject=cdi
    #[arg(long, env = "GPUSHARE_NUMA_HINTS")]
    pub numa_hints: bool,

    /// Directories of CDI specs that the container runtime reads, separated by commas: the plugin looks in them for those of
    /// NVIDIA's tools, and writes its own into the last
    #[arg(long, env = "GPUSHARE_CDI_SPEC_DIRS", default_value = "/etc/cdi,/var/run/cdi")]
    #[arg(value_delimiter = ',', value_name = "DIRS")]
    pub cdi_spec_dirs: Vec<PathBuf>,

    /// Socket on which the container runtime accepts plugins (NRI), such as /var/run/nri/nri.sock: this plugin then corrects the
    /// devices of each container when the runtime creates it
    #[arg(long, env = "GPUSHARE_NRI_SOCKET", value_name = "SOCKET")]
    pub nri_socket: Option<PathBuf>,

    /// Have the GPU driver limit the memory of each container, on nodes where everything that this needs has been seen: driver
    /// 615 or newer, cgroup v2, and the hook of NVIDIA's container toolkit 1.20.1 or newer
    #[arg(long, env = "GPUSHARE_DRIVER_LIMITS")]
    pub driver_limits: bool,

    /// Measure the GPU memory that each container uses, for /metrics; needs the PID namespace of the node (hostPID)
    #[arg(long, env = "GPUSHARE_MEASURE_MEMORY")]
    pub measure_memory: bool,

    /// Directory of your own HAMi-core library (libvgpu.so), at the same path on the node and in this container: pods with the
    /// label koordinator.sh/gpu-isolation-provider: HAMi-core get the library, and ld.so.preload of the directory as
    /// /etc/ld.so.preload
    #[arg(long, env = "GPUSHARE_HAMI_CORE", value_name = "DIR")]
    pub hami_core: Option<PathBuf>,

    /// Start containers that see all GPUs of this node without being counted (annotation gpushare/all-devices); the scheduler
    /// needs the flag too
    #[arg(long, env = "GPUSHARE_ALLOW_ALL_DEVICES")]
    pub allow_all_devices: bool,

    /// Namespaces whose containers keep `NVIDIA_VISIBLE_DEVICES` although they request no GPU; with --nri-socket the plugin makes
    /// it void in all others
    #[arg(long, env = "GPUSHARE_UNRESTRICTED_NAMESPACES")]
    #[arg(default_value = UNRESTRICTED_NAMESPACES, value_delimiter = ',')]
    #[arg(value_name = "NAMESPACES")]
    pub unrestricted_namespaces: Vec<String>,

    /// Mount point of the node's root directory, or of some of its directories, in which the plugin looks for sysfs, for device
    /// nodes, for the MPS control daemon and for the configuration of the container runtime. Without /sys or /dev in it those of
    /// the plugin's own container count
    #[arg(long, env = "GPUSHARE_HOST_ROOT", default_value = "/", value_name = "DIR")]
    pub host_root: PathBuf,

    /// Mount points of the node's directories that may hold the driver, separated by commas; the plugin loads NVML from the first
    /// that has it
    #[arg(long = "driver-root", env = "GPUSHARE_DRIVER_ROOT", value_delimiter = ',')]
    #[arg(value_name = "DIRS")]
    pub driver_roots: Vec<PathBuf>,

    /// Reasons to evict pods, separated by commas; the plugin's role must allow it
    #[arg(long, env = "GPUSHARE_EVICT", value_delimiter = ',')]
    #[arg(value_name = "REASONS")]
    pub evict: Vec<EvictionReason>,

    /// Reaction to a pod that gpushare-scheduler did not place
    #[arg(long, env = "GPUSHARE_UNPLACED", default_value = "refuse")]
    pub unplaced: OnUnplaced,

    /// Classes of single critical errors of the driver (XIDs), or of all, separated by commas; the last entry for an XID counts.
    /// One of an application makes an event on the pod that caused it if it is known, else on the node, and the GPU stays
    /// healthy (13, 31, 43, 45, 68, 109 unless changed). After one of the class reset the GPU stays unhealthy until it has been
    /// reset or an operator clears it (48, 62, 64, 74, 79, 95, 119, 120, 140, 143, 154 unless changed). After a critical one,
    /// which all others are, it is unhealthy until it has been without trouble for a while
    #[arg(long, env = "GPUSHARE_XIDS", value_name = "XID=application|reset|critical")]
    pub(crate) xids: Option<Xids>,

    /// The flags that every daemon has
    #[command(flatten)]
    pub process: ProcessArgs,

    /// The work of the process, if it does not serve devices.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// The commands of the plugin, after its flags; without one it serves devices.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum Command {
    /// Lists to kubelet the devices that kubelet remembers, from a boot until the plugin's pod serves. For a service of the host:
    /// without it, kubelet fails the pods that hold devices before the plugin's own pod can run
    AtBoot,
    /// Removes everything that the plugin has written on this node and into its Node, once no pod holds a device
    Uninstall {
        /// Although pods hold devices: a container that starts again gets no device any more
        #[arg(long)]
        now: bool,
    },
}

impl Config {
    /// The names of the `--vendor-resource` entries that `server` serves. Of several entries for one resource the last counts.
    pub fn served_by(&self, server: VendorServer) -> impl Iterator<Item = &str> {
        let mut by_name = BTreeMap::new();
        // A flag of an overlay comes after that of its base, and must be able to replace it.
        for resource in &self.vendor_resources {
            by_name.insert(resource.name.as_str(), resource.server);
        }
        by_name.retain(|_, served_by| *served_by == server);
        by_name.into_keys()
    }

    /// The names of the extended resources that this plugin may serve.
    pub fn resource_names(&self) -> ExtendedResourceNames {
        ExtendedResourceNames {
            cluster: ResourceNames {
                memory: self.memory_resource.clone(),
            },
            // The start of the process refuses several resources that are `ours`.
            whole: self.served_by(VendorServer::Ours).next().map(str::to_owned),
        }
    }

    /// The source of the devices that `--inventory` names.
    pub fn source(&self) -> DeviceSource {
        if let InventoryKind::File(path) = &self.inventory {
            return DeviceSource::File(FileSource {
                path: path.clone(),
                node: self.node_name.clone(),
                interval: FileSource::INTERVAL,
            });
        }
        DeviceSource::Machine(NvmlSource {
            sysfs: self.sysfs(),
            driver_roots: self.driver_roots.clone(),
            unknown_memory: self.gpu_memory,
            withholds_reserved: self.reserved_memory == ReservedMemory::Withhold,
            ..NvmlSource::default()
        })
    }

    /// The root under which this process reads the node's directory `name`: `--host-root` if it has the directory, else `/`.
    fn root_that_has(&self, name: &str) -> &Path {
        if self.host_root.join(name).is_dir() {
            &self.host_root
        } else {
            Path::new("/")
        }
    }

    /// The mount point of sysfs, the node's if it is mounted: a container's own sysfs shows neither the cgroups of other
    /// containers nor RDMA adapters that belong to the node's network namespace.
    fn sysfs(&self) -> PathBuf {
        self.root_that_has("sys").join("sys")
    }

    /// The directory of this plugin's own CDI specs: the last one, whose specs the runtime prefers.
    pub fn own_specs(&self) -> SpecDir {
        SpecDir::new(self.cdi_spec_dirs.last().cloned().unwrap_or_default())
    }

    /// The settings on which answers to kubelet and CDI specs depend. The settings of each call have CDI caches of their own.
    pub fn settings(&self) -> NodeSettings {
        NodeSettings {
            names: self.resource_names(),
            memory_unit: self.memory_unit,
            allocate_wait: ALLOCATE_WAIT,
            injection_mode: self.inject.mode(),
            specs: self.own_specs(),
            vendor_specs: VendorSpecs::new(self.cdi_spec_dirs.clone()),
            host_root: self.host_root.clone(),
            sysfs_root: self.sysfs(),
            device_root: self.root_that_has("dev").to_owned(),
            // The environment and the rights of this process do not change, so they are read once.
            own_container: OwnContainer::observe(!self.driver_roots.is_empty(), self.pod_uid.as_deref()),
            has_runtime_hook: self.nri_socket.is_some(),
            allows_all_devices: self.allow_all_devices,
            driver_limits: self.driver_limits,
            hami_core: self.hami_core.clone().map(HamiCore::new),
        }
    }

    /// The settings that decide which GPUs pods share, and by which units kubelet counts them; `allocated` has those it has given.
    pub(crate) fn sharing(&self, allocated: BTreeSet<String>) -> Sharing {
        Sharing {
            devices: self.shared_devices.clone(),
            slots: self.slots,
            memory_unit: self.memory_unit,
            has_numa_hints: self.numa_hints,
            allocated,
        }
    }

    /// The rules by which devices become unhealthy and healthy again, from `--xids` and the probe interval of the device source.
    pub fn health_policy(&self) -> HealthPolicy {
        HealthPolicy {
            xids: self.xids.clone().unwrap_or_default(),
            quiet: self.source().probe_interval() * QUIET_PROBES,
            ..HealthPolicy::default()
        }
    }

    /// The cluster administrator's files of overrides: labels of this node's devices, and partitions of its GPUs.
    pub(crate) fn override_files(&self) -> OverrideFiles {
        OverrideFiles {
            labels: self.device_labels.clone(),
            partitions: self.gpu_partitions.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
