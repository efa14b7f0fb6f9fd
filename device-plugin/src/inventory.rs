//! The devices of this node, GPUs before all: what they are, and a feed of what happens to them.
//!
//! A [`Source`] says which devices exist ([`Source::discover`]) and watches them from threads
//! of its own ([`Source::watch`]). It reports what it saw as [`Observation`]s and judges nothing:
//! whether a device is healthy is decided in [`crate::health`]. It knows nothing of kubelet or of
//! the API server either.
//!
//! Only `inventory/nvml` uses NVML.

mod error;
mod feed;
mod file;
mod links;
mod machine;
mod nvml;
pub mod pci;
mod physical_id;
mod sysfs;

use std::{collections::BTreeMap, fmt, path::PathBuf, time::Duration};

use proto::device::{TYPE_FPGA, TYPE_RDMA, VirtualFunctionGroup};
use proto::quantity::Quantity;
use proto::resource::{FPGA, RDMA};
use proto::topology::{GpuLinks, GpuPartitionPolicy, GpuPartitionTable};
use tokio::sync::mpsc;

pub use error::InventoryError;
pub use feed::Feed;
pub use file::FileSource;
pub use machine::MachineSource;
pub use nvml::NvmlSource;
pub use pci::PciLocation;
pub use physical_id::{InvalidPhysicalId, PhysicalId};
pub use sysfs::{InvalidVendor, PciVendor, SysfsSource};

use crate::health::Observation;

/// One physical GPU that can be shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// What identifies the device everywhere.
    pub uuid: PhysicalId,
    /// The number in the name of its device node, for display and for the annotations that demand
    /// it.
    pub minor: u32,
    /// Its place in the order of the source (NVML's enumeration, or the file's list); not the minor
    /// number.
    pub index: u32,
    /// Memory that pods may share.
    pub memory_bytes: u64,
    /// Memory besides, which the driver keeps for itself and which is left out; 0 if it counts as memory that pods may share.
    pub reserved_bytes: u64,
    /// The product's name as its vendor gives it.
    pub model: String,
    /// PCI address in the form sysfs uses, such as `0000:3b:00.0`.
    pub bus_id: Option<String>,
    /// Where it sits, as far as the source tells.
    pub location: PciLocation,
    /// What pods may select it by.
    pub labels: BTreeMap<String, String>,
    /// The device file, such as `/dev/nvidia0`.
    pub device_node: PathBuf,
}

/// A device of another type than a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherDevice {
    /// `rdma`, `fpga`, or a type nobody compiled in.
    pub device_type: String,
    /// What identifies it, such as its PCI address. In the form of a GPU's identity, and no GPU's: health is kept by it.
    pub id: PhysicalId,
    /// Its number among the devices of its type.
    pub minor: u32,
    /// What it has, by resource name.
    pub resources: BTreeMap<String, Quantity>,
    /// What pods may select it by.
    pub labels: BTreeMap<String, String>,
    /// PCI address, where the source tells.
    pub bus_id: Option<String>,
    /// Where it sits, as far as the source tells.
    pub location: PciLocation,
    /// Its virtual functions.
    pub vf_groups: Vec<VirtualFunctionGroup>,
    /// The files that a container needs to use it.
    pub device_nodes: Vec<PathBuf>,
    /// The files that a container needs to use one of its virtual functions, by PCI address.
    pub function_nodes: BTreeMap<String, Vec<PathBuf>>,
}

impl OtherDevice {
    /// Percent that it has of the resource that is named for its type, if there is one.
    pub fn percent(&self) -> Option<u64> {
        let resource = match self.device_type.as_str() {
            TYPE_RDMA => RDMA,
            TYPE_FPGA => FPGA,
            _ => return None,
        };
        self.resources.get(resource).and_then(|amount| amount.unsigned())
    }
}

/// A GPU that is present but cannot be shared now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExcludedGpu {
    /// Its place in the order of the source.
    pub index: u32,
    /// Its identity, unless the device is too sick to tell it.
    pub uuid: Option<PhysicalId>,
    /// Why it is left out.
    pub exclusion: Exclusion,
}

/// Why a GPU cannot be shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exclusion {
    /// It is in MIG mode.
    Mig,
    /// The device does not tell what must be known of it; the text says what is missing.
    Unreadable(String),
}

impl fmt::Display for ExcludedGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {}", self.index)?;
        if let Some(uuid) = &self.uuid {
            write!(f, " ({uuid})")?;
        }
        match &self.exclusion {
            Exclusion::Mig => write!(f, ": {}", nvml::MIG),
            Exclusion::Unreadable(problem) => write!(f, ": {problem}"),
        }
    }
}

/// The devices of this node at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The GPUs that can be shared, sorted by minor number; UUIDs and minors are distinct and
    /// memory is not zero.
    pub gpus: Vec<Gpu>,
    /// Devices of other types, sorted by type and minor number; IDs are distinct, also from GPUs'.
    pub others: Vec<OtherDevice>,
    /// GPUs that are present and left out, such as those in MIG mode.
    pub excluded: Vec<ExcludedGpu>,
    /// How GPUs are linked with each other, as far as the source tells.
    pub links: Vec<GpuLinks>,
    /// The partitions of the GPUs, if the source tells.
    pub partitions: Option<GpuPartitionTable>,
    /// What the partitions are for, if the source tells.
    pub partition_policy: Option<GpuPartitionPolicy>,
    /// True if containers need the vendor's driver to use the GPUs; false for those of a file unless it says so.
    pub needs_driver: bool,
    /// Version of the driver, if the source knows one.
    pub driver_version: Option<String>,
    /// Who makes the devices, in lower case: `nvidia`.
    pub vendor: String,
}

impl Inventory {
    /// The GPU with this UUID.
    pub fn gpu(&self, uuid: &PhysicalId) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == *uuid)
    }

    /// The identity of every device.
    pub fn ids(&self) -> impl Iterator<Item = &PhysicalId> {
        let gpus = self.gpus.iter().map(|gpu| &gpu.uuid);
        gpus.chain(self.others.iter().map(|other| &other.id))
    }

    /// Whether `now` has a device that this inventory lacks or describes otherwise. A device that
    /// `now` lacks, and a new order of the others because of that, is not news: it is sick.
    fn is_outdated_by(&self, now: &Self) -> bool {
        let is_news = |gpu: &Gpu| {
            let Some(before) = self.gpu(&gpu.uuid) else {
                return true;
            };
            // The driver may reserve a little more or less at any time; that is no other device.
            let has_same_total =
                before.memory_bytes + before.reserved_bytes == gpu.memory_bytes + gpu.reserved_bytes;
            let (memory_bytes, reserved_bytes) = if has_same_total {
                (gpu.memory_bytes, gpu.reserved_bytes)
            } else {
                (before.memory_bytes, before.reserved_bytes)
            };
            Gpu {
                index: gpu.index,
                memory_bytes,
                reserved_bytes,
                ..before.clone()
            } != *gpu
        };
        let left_out = |excluded: &ExcludedGpu| {
            excluded.exclusion == Exclusion::Mig
                && excluded
                    .uuid
                    .as_ref()
                    .is_some_and(|uuid| self.gpu(uuid).is_some())
        };
        self.driver_version != now.driver_version
            || self.vendor != now.vendor
            || now.gpus.iter().any(is_news)
            || now.others.iter().any(|other| !self.others.contains(other))
            || now.excluded.iter().any(left_out)
    }
}

/// Where the devices come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// This machine: the NVIDIA management library, loaded at run time, and sysfs.
    Machine(MachineSource),
    /// A file that describes simulated devices.
    File(FileSource),
}

impl Source {
    /// How often a watch says something of each device.
    pub fn interval(&self) -> Duration {
        match self {
            Self::Machine(machine) => machine
                .gpus
                .as_ref()
                .map_or(machine.others.interval, |gpus| gpus.probe_interval),
            Self::File(file) => file.interval,
        }
    }

    /// Looks at the devices once. Blocks: NVML may take seconds to wake a GPU.
    pub fn discover(&self) -> Result<Inventory, InventoryError> {
        match self {
            Self::Machine(machine) => machine.discover(),
            Self::File(file) => file.discover(),
        }
    }

    /// Starts to watch the devices of `inventory` from threads of its own.
    ///
    /// Every device is probed at once and then at the source's interval, so that health which was
    /// bad from the start is seen too, and recovery needs no other clock. When the devices
    /// themselves change (a GPU appears, or its memory is another) the feed says
    /// [`ObservationKind::InventoryChanged`](crate::health::ObservationKind) once; it goes on with
    /// the devices it was started for, and the caller discovers and watches anew.
    pub fn watch(
        &self,
        inventory: &Inventory,
    ) -> Result<(Feed, mpsc::Receiver<Observation>), InventoryError> {
        match self {
            Self::Machine(machine) => machine.watch(inventory),
            Self::File(file) => file.watch(inventory),
        }
    }
}
