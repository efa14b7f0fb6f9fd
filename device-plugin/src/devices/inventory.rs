//! The physical devices of this node. A [`source`] lists them, and watches them: a [`Feed`] reports observations of them.

mod driver_library;
mod error;
mod feed;
mod file;
mod nvml;
pub mod pci;
mod physical_id;
pub mod source;
mod sysfs;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use proto::device::{TYPE_FPGA, TYPE_RDMA, VirtualFunctionGroup};
use proto::quantity::Quantity;
use proto::resource::{FPGA, RDMA};
use proto::topology::{GpuLinks, GpuPartitionPolicy, GpuPartitionTable};

pub use error::InventoryError;
pub use feed::{Feed, Observation, ObservationKind, Observations};
pub use pci::PciLocation;
pub use physical_id::PhysicalId;

/// The reason that a GPU in MIG mode is left out.
pub(crate) const MIG: &str = "it is in MIG mode, and sharing MIG instances is not supported";

/// One physical GPU that can be shared. It has fields that an [`OtherDevice`] lacks: NVML reports UUID, memory and model of GPUs,
/// and NVIDIA's container runtime injects GPUs by UUID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The UUID that NVML reports.
    pub uuid: PhysicalId,
    /// The minor number, as in the name of the GPU's device node; for display, and for annotations that name GPUs by it.
    pub minor: u32,
    /// The position in the order of the source (NVML's enumeration, or the file's list), which is not that of minor numbers.
    pub index: u32,
    /// Memory that pods may share.
    pub memory_bytes: u64,
    /// Memory that the driver reserves for itself, not part of `memory_bytes`; 0 if pods may share that too.
    pub reserved_bytes: u64,
    /// The vendor's product name.
    pub model: String,
    /// PCI address in the form of sysfs, such as `0000:3b:00.0`.
    pub bus_id: Option<String>,
    /// The location on the PCI bus, as far as the source reports it.
    pub location: PciLocation,
    /// Labels by which pods may select the device.
    pub labels: BTreeMap<String, String>,
    /// The device file, such as `/dev/nvidia0`.
    pub device_node: PathBuf,
}

impl Gpu {
    /// All memory of the GPU in bytes, that of its driver included.
    pub(crate) fn memory_with_reserved(&self) -> u64 {
        self.memory_bytes.saturating_add(self.reserved_bytes)
    }
}

/// A device of another type than a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherDevice {
    /// `rdma`, `fpga`, or a type that only the file of simulated devices names.
    pub device_type: String,
    /// Identifies the device among all devices of the node, GPUs included.
    pub id: PhysicalId,
    /// The device's number among the devices of its type.
    pub minor: u32,
    /// The amounts that the device offers, by resource name.
    pub resources: BTreeMap<String, Quantity>,
    /// Labels by which pods may select the device.
    pub labels: BTreeMap<String, String>,
    /// PCI address, if the source reports it.
    pub bus_id: Option<String>,
    /// The location on the PCI bus, as far as the source reports it.
    pub location: PciLocation,
    /// The virtual functions (SR-IOV) of an adapter or FPGA, in groups of equal labels.
    pub vf_groups: Vec<VirtualFunctionGroup>,
    /// The device files that a container needs to use the whole device.
    pub device_nodes: Vec<PathBuf>,
    /// The device files that a container needs to use one of the virtual functions, by the function's PCI address.
    pub function_nodes: BTreeMap<String, Vec<PathBuf>>,
}

impl OtherDevice {
    /// The amount, in percent, of the resource that is named after the device type; none for other types than `rdma` and `fpga`.
    pub fn percent(&self) -> Option<u64> {
        let resource = percent_resource(&self.device_type)?;
        self.resources.get(resource)?.unsigned()
    }
}

/// The resource that is named after a device type and counts percent of a device; none for other types than `rdma` and `fpga`.
fn percent_resource(device_type: &str) -> Option<&'static str> {
    match device_type {
        TYPE_RDMA => Some(RDMA),
        TYPE_FPGA => Some(FPGA),
        _ => None,
    }
}

/// A GPU that is present but cannot be shared now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExcludedGpu {
    /// The position in the order of the source.
    pub index: u32,
    /// The UUID, unless it cannot be read.
    pub uuid: Option<PhysicalId>,
    /// True if the problem is that the GPU is in MIG mode.
    pub is_mig: bool,
    /// The reason that the plugin leaves the GPU out.
    pub problem: String,
}

impl fmt::Display for ExcludedGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {}", self.index)?;
        if let Some(uuid) = &self.uuid {
            write!(f, " ({uuid})")?;
        }
        write!(f, ": {}", self.problem)
    }
}

/// The devices of this node at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInventory {
    /// The GPUs that can be shared, sorted by minor number; UUIDs and minor numbers are distinct, memory is above zero.
    pub gpus: Vec<Gpu>,
    /// Devices of other types, sorted by type and minor number; no two devices, GPUs included, have the same ID.
    pub others: Vec<OtherDevice>,
    /// GPUs that are present and cannot be shared, such as those in MIG mode.
    pub excluded: Vec<ExcludedGpu>,
    /// The links between GPUs, as far as the source reports them.
    pub links: Vec<GpuLinks>,
    /// The partitions of the GPUs, if the source reports them.
    pub partitions: Option<GpuPartitionTable>,
    /// The policy for these partitions, if the source reports it.
    pub partition_policy: Option<GpuPartitionPolicy>,
    /// True if containers need the vendor's driver to use the GPUs; false for simulated GPUs unless their file says otherwise.
    pub needs_driver: bool,
    /// Version of the driver, if the source reports it.
    pub driver_version: Option<String>,
    /// The vendor of the GPUs, in lower case: `nvidia`.
    pub vendor: String,
}

impl NodeInventory {
    /// The GPU with this UUID.
    pub fn gpu(&self, uuid: &PhysicalId) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == *uuid)
    }

    /// The identity of every device.
    pub fn ids(&self) -> impl Iterator<Item = &PhysicalId> {
        let gpus = self.gpus.iter().map(|gpu| &gpu.uuid);
        gpus.chain(self.others.iter().map(|other| &other.id))
    }

    /// Returns true if the devices must be listed again: `now` has a device that this inventory lacks or describes otherwise.
    /// Order and lost devices do not count.
    fn is_outdated_by(&self, now: &Self) -> bool {
        self.driver_version != now.driver_version
            || self.vendor != now.vendor
            // A device that `now` lacks does not count: the module `health` makes it unhealthy.
            || now.gpus.iter().any(|gpu| !self.describes(gpu))
            || now.others.iter().any(|other| !self.others.contains(other))
            || now.excluded.iter().any(|gpu| self.shares_mig(gpu))
    }

    /// Returns true if `excluded` is a GPU in MIG mode that this inventory still shares.
    fn shares_mig(&self, excluded: &ExcludedGpu) -> bool {
        let uuid = excluded.uuid.as_ref();
        excluded.is_mig && uuid.is_some_and(|uuid| self.gpu(uuid).is_some())
    }

    /// Returns true if this inventory has the GPU with the same properties, apart from its index and the driver's reserve.
    fn describes(&self, gpu: &Gpu) -> bool {
        let Some(known) = self.gpu(&gpu.uuid) else {
            return false;
        };
        let mut expected = Gpu {
            // NVML leaves out a lost GPU when it counts, so the indices of the GPUs behind it change.
            index: gpu.index,
            ..known.clone()
        };
        // The driver may reserve a little more or less memory at any time, which does not make the GPU another device.
        if known.memory_with_reserved() == gpu.memory_with_reserved() {
            (expected.memory_bytes, expected.reserved_bytes) = (gpu.memory_bytes, gpu.reserved_bytes);
        }
        expected == *gpu
    }
}

fn no_gpu(path: &Path) -> InventoryError {
    InventoryError::absent(format!(
        "{} lists no GPU: keep this daemon off nodes without GPUs (node selector), or pass the devices to its container",
        path.display()
    ))
}

/// The memory of one GPU that one process uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// The GPU.
    pub gpu: PhysicalId,
    /// The process, by its number in this process's PID namespace.
    pub pid: u32,
    /// The container ID of a simulated process, which has no cgroup that names its container; none for real processes.
    pub container: Option<String>,
    /// The bytes that the process uses on the GPU.
    pub bytes: u64,
}

/// A cgroup, and a GPU on which the driver may limit its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CgroupOnGpu {
    pub(crate) gpu: PhysicalId,
    /// The cgroup's directory as this process sees it.
    pub(crate) cgroup: PathBuf,
}
