//! NVIDIA GPUs through NVML, which is loaded at run time. Only this module uses NVML.
//!
//! Devices are identified by UUID; NVML's order is neither that of the minor numbers nor stable. GPUs in MIG mode are listed
//! as excluded: sharing their instances is not supported.
//!
//! A container gets the library from NVIDIA's runtime, as a mount that is made with the container; or it sees the directory in which
//! the node keeps its driver, which also shows a driver that was installed later.

mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::{Device, Nvml, error::NvmlError};
use proto::topology::GpuLinks;
use tracing::warn;

use super::{
    ExcludedGpu, ExclusionReason, Gpu, InvalidPhysicalId, InventoryError, NodeInventory, PciLocation,
    PhysicalId, ProcessMemory,
    feed::Watcher,
    no_gpu,
    pci::{self, Bus},
};
use watch::NvmlWatch;

/// `NVML_DEVICE_MIG_ENABLE`.
const MIG_ENABLED: u32 = 1;

/// The reason that a GPU in MIG mode is left out.
pub(crate) const MIG: &str = "it is in MIG mode, and sharing MIG instances is not supported";

/// More links than any GPU has.
const MAX_LINKS: u32 = 64;

/// NVIDIA's number in the PCI registry; its switches are bridges.
const NVIDIA: u32 = 0x10de;

/// The library's directories below the root of a driver: with distributions and NVIDIA's driver container, in the order of NVIDIA's
/// own tools; then with Container-Optimized OS (`lib64` below its driver directory), Talos and Bottlerocket.
const LIBRARY_DIRECTORIES: [&str; 12] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib",
    "lib",
    "usr/local/glibc/usr/lib",
    "usr/lib/nvidia/tesla",
];

/// The NVIDIA devices of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlSource {
    /// The library: a path, or a name that the dynamic loader looks up.
    pub library: PathBuf,
    /// Directories that may hold the driver. If there are any, the library comes from the first that has one.
    pub driver_roots: Vec<PathBuf>,
    /// The mount point of sysfs.
    pub sysfs: PathBuf,
    /// The mount point of procfs, where the driver writes minor numbers that NVML may not know.
    pub procfs: PathBuf,
    /// Bytes of a GPU whose memory NVML does not know, such as one that shares the memory of its processor.
    pub unknown_memory: Option<u64>,
    /// True if pods may not share the memory that the driver reserves for itself.
    pub withholds_reserved: bool,
    /// The interval at which a watch probes each device.
    pub probe_interval: Duration,
    /// The interval at which a watch compares the devices with those it knows. A watch that misses a device opens another session
    /// then, at growing intervals while that does not help.
    pub reopen_interval: Duration,
}

impl Default for NvmlSource {
    fn default() -> Self {
        Self {
            library: PathBuf::from("libnvidia-ml.so.1"),
            driver_roots: Vec::new(),
            sysfs: PathBuf::from("/sys"),
            procfs: PathBuf::from("/proc"),
            unknown_memory: None,
            withholds_reserved: false,
            probe_interval: Duration::from_secs(10),
            reopen_interval: Duration::from_secs(30),
        }
    }
}

impl NvmlSource {
    pub(super) fn discover(&self) -> Result<NodeInventory, InventoryError> {
        let nvml = self.open()?;
        let mut inventory = self.list(&nvml)?;
        for excluded in &inventory.excluded {
            warn!("GPU is not shared: {excluded}");
        }
        if inventory.gpus.is_empty() {
            let reasons: Vec<_> = inventory.excluded.iter().map(ExcludedGpu::to_string).collect();
            return Err(InventoryError::NothingToShare {
                path: self.library.clone(),
                reasons: reasons.join("; "),
            });
        }
        inventory.links = links(&nvml, &Bus::read(&self.sysfs), &inventory.gpus);
        Ok(inventory)
    }

    /// The memory that processes use on each GPU. A process whose memory the driver does not know is left out.
    pub(super) fn memory_use(&self) -> Result<Vec<ProcessMemory>, InventoryError> {
        let nvml = self.open()?;
        let count = nvml
            .device_count()
            .map_err(|error| failed("count the devices", error))?;
        let mut uses = Vec::new();
        for index in 0..count {
            // A GPU that cannot be read does not hide the others.
            let Ok(device) = nvml.device_by_index(index) else {
                continue;
            };
            let Ok(Ok(gpu)) = device.uuid().map(|uuid| uuid.parse::<PhysicalId>()) else {
                continue;
            };
            let processes = device
                .running_compute_processes()
                .map_err(|error| failed("list the processes on a GPU", error))?;
            for process in processes {
                if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
                    uses.push(ProcessMemory {
                        gpu: gpu.clone(),
                        pid: process.pid,
                        container: None,
                        bytes,
                    });
                }
            }
        }
        Ok(uses)
    }

    /// A watcher of the GPUs of `inventory`.
    pub(super) fn watcher(&self, inventory: &NodeInventory) -> Watcher {
        let mut watch = NvmlWatch::new(self.clone(), inventory.clone());
        Box::new(move |reporter| watch.run(reporter))
    }

    /// Loads the library and opens a session.
    fn open(&self) -> Result<Nvml, InventoryError> {
        let library = self.find_library()?;
        let opened = Nvml::builder().lib_path(library.as_os_str()).init();
        opened.map_err(|error| match error {
            NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_) if self.is_stale_container() => {
                InventoryError::DriverReplaced {
                    how: "it was installed after this container was created".to_owned(),
                }
            }
            NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_) => {
                InventoryError::Absent {
                    problem: format!(
                        "cannot load the NVIDIA management library {}: install the NVIDIA driver on this node, run this container with \
                         the NVIDIA runtime so that the library is mounted, or name the driver's directory with --driver-root",
                        library.display()
                    ),
                    source: Some(Box::new(error)),
                }
            }
            NvmlError::DriverNotLoaded => InventoryError::absent(format!(
                "{} is present but the NVIDIA kernel driver is not loaded: check `lsmod | grep nvidia` and the kernel log of this \
                 node",
                library.display()
            )),
            NvmlError::LibRmVersionMismatch if self.driver_roots.is_empty() => {
                InventoryError::DriverReplaced {
                    how: "it is of another version than the library in this container".to_owned(),
                }
            }
            // The library in a driver root changes with the driver, so this container can stay.
            NvmlError::LibRmVersionMismatch => InventoryError::absent(format!(
                "{} is of another version than the loaded NVIDIA kernel driver: load the driver's modules again, or reboot this node",
                library.display()
            )),
            error => failed("open a session", error),
        })
    }

    /// The library in the first driver root that has one; without driver roots the configured one.
    fn find_library(&self) -> Result<PathBuf, InventoryError> {
        if self.driver_roots.is_empty() {
            return Ok(self.library.clone());
        }
        let default_name = Path::new("libnvidia-ml.so.1");
        let name = self.library.file_name().map_or(default_name, Path::new);
        for root in &self.driver_roots {
            for directory in LIBRARY_DIRECTORIES {
                let path = root.join(directory).join(name);
                // A root may be there before its driver, as the empty mount point of a driver container.
                if path.exists() {
                    return Ok(path);
                }
            }
        }
        let mut roots = Vec::new();
        for root in &self.driver_roots {
            roots.push(root.display().to_string());
        }
        Err(InventoryError::absent(format!(
            "no {} in {}: install the NVIDIA driver on this node, or name with --driver-root the directory that holds it",
            name.display(),
            roots.join(", ")
        )))
    }

    /// Returns true if a driver is loaded although this container has no library: it can get one only at its creation.
    fn is_stale_container(&self) -> bool {
        self.driver_roots.is_empty() && self.sysfs.join("module/nvidia").exists()
    }

    /// The GPUs that this session lists. It is no error if none of them can be shared.
    fn list(&self, nvml: &Nvml) -> Result<NodeInventory, InventoryError> {
        let count = nvml
            .device_count()
            .map_err(|error| failed("count the devices", error))?;
        if count == 0 {
            return Err(no_gpu(&self.library));
        }
        let bus = Bus::read(&self.sysfs);
        let (mut gpus, mut excluded) = (Vec::<Gpu>::new(), Vec::new());
        for index in 0..count {
            // A GPU that cannot be read does not hide the others.
            let read = self.read_gpu(nvml, &bus, index);
            match read.and_then(|gpu| distinct(&gpus, gpu)) {
                Ok(gpu) => gpus.push(gpu),
                Err(reason) => excluded.push(reason),
            }
        }
        gpus.sort_by_key(|gpu| gpu.minor);
        Ok(NodeInventory {
            gpus,
            excluded,
            needs_driver: true,
            driver_version: nvml.sys_driver_version().ok(),
            vendor: "nvidia".to_owned(),
            ..NodeInventory::default()
        })
    }

    fn read_gpu(&self, nvml: &Nvml, bus: &Bus, index: u32) -> Result<Gpu, ExcludedGpu> {
        let without_uuid = |problem: String| ExcludedGpu {
            index,
            uuid: None,
            exclusion: ExclusionReason::Unreadable(problem),
        };
        let device = nvml
            .device_by_index(index)
            .map_err(|error| without_uuid(unreadable("handle", &error)))?;
        let uuid: PhysicalId = device
            .uuid()
            .map_err(|error| without_uuid(unreadable("UUID", &error)))?
            .parse()
            .map_err(|error: InvalidPhysicalId| without_uuid(error.to_string()))?;
        // Its instances have UUIDs and memory of their own, which the records of this scheduler do not name.
        let exclusion = if is_mig(&device) {
            ExclusionReason::Mig
        } else {
            match self.describe(&device, bus, index, &uuid) {
                Ok(gpu) => return Ok(gpu),
                Err(problem) => ExclusionReason::Unreadable(problem),
            }
        };
        Err(ExcludedGpu {
            index,
            uuid: Some(uuid),
            exclusion,
        })
    }

    fn describe(&self, device: &Device<'_>, bus: &Bus, index: u32, uuid: &PhysicalId) -> Result<Gpu, String> {
        let bus_id = device.pci_info().ok().and_then(|pci| pci::address(&pci.bus_id));
        let minor = self.minor(device, bus_id.as_deref())?;
        let (memory_bytes, reserved_bytes) = self.memory(device)?;
        let location = match &bus_id {
            Some(address) => bus.location(address),
            None => PciLocation::default(),
        };
        Ok(Gpu {
            uuid: uuid.clone(),
            minor,
            index,
            memory_bytes,
            reserved_bytes,
            model: device.name().map_err(|error| unreadable("name", &error))?,
            bus_id,
            location,
            labels: BTreeMap::new(),
            device_node: PathBuf::from(format!("/dev/nvidia{minor}")),
        })
    }

    /// The minor number, from the driver's files in procfs where NVML does not know it.
    fn minor(&self, device: &Device<'_>, bus_id: Option<&str>) -> Result<u32, String> {
        const UNSUPPORTED: &str = "its minor number cannot be read: NVML does not support it, and";
        match device.minor_number() {
            Ok(minor) => return Ok(minor),
            Err(NvmlError::NotSupported) => {}
            Err(error) => return Err(unreadable("minor number", &error)),
        }
        let Some(bus_id) = bus_id else {
            return Err(format!("{UNSUPPORTED} it has no PCI address"));
        };
        let file = self
            .procfs
            .join("driver/nvidia/gpus")
            .join(bus_id)
            .join("information");
        let text = fs::read_to_string(&file)
            .map_err(|error| format!("{UNSUPPORTED} {} cannot be read: {error}", file.display()))?;
        text.lines()
            .find_map(|line| line.strip_prefix("Device Minor:")?.trim().parse().ok())
            .ok_or_else(|| format!("{UNSUPPORTED} {} does not name it", file.display()))
    }

    /// The bytes that pods may share, and the bytes that the driver reserves and pods may not share.
    fn memory(&self, device: &Device<'_>) -> Result<(u64, u64), String> {
        let (total, reserved) = match device.memory_info() {
            Ok(memory) => (memory.total, memory.reserved),
            // This is the second version of the call, which older libraries do not have.
            Err(NvmlError::FailedToLoadSymbol(_)) => {
                return Err("the driver is too old to report its memory: it must be 510 or newer".to_owned());
            }
            // GPUs that share the memory of their processor, such as GB10.
            Err(NvmlError::NotSupported) => (0, 0),
            Err(error) => return Err(unreadable("memory", &error)),
        };
        match (total, self.unknown_memory) {
            (0, Some(bytes)) => Ok((bytes, 0)),
            (0, None) => Err("NVML does not know its memory: say with --gpu-memory how much of it pods may share, such as 96Gi".to_owned()),
            _ if self.withholds_reserved => Ok((total.saturating_sub(reserved), reserved.min(total))),
            _ => Ok((total, 0)),
        }
    }
}

/// Returns true if the GPU is in MIG mode. One that cannot do MIG answers with an error.
fn is_mig(device: &Device<'_>) -> bool {
    device.mig_mode().is_ok_and(|mode| mode.current == MIG_ENABLED)
}

/// `gpu`, unless one of those `before` it has its UUID or minor number.
fn distinct(before: &[Gpu], gpu: Gpu) -> Result<Gpu, ExcludedGpu> {
    for other in before {
        if other.uuid == gpu.uuid || other.minor == gpu.minor {
            let problem = format!(
                "GPU {} has the same UUID or minor number {}",
                other.index, other.minor
            );
            return Err(ExcludedGpu {
                index: gpu.index,
                uuid: Some(gpu.uuid),
                exclusion: ExclusionReason::Unreadable(problem),
            });
        }
    }
    Ok(gpu)
}

fn unreadable(property: &str, error: &NvmlError) -> String {
    format!("its {property} cannot be read: {error}")
}

fn failed(operation: &str, error: NvmlError) -> InventoryError {
    InventoryError::failed(format!("NVML: cannot {operation}"), error)
}

/// The far end of an active link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FarEnd {
    /// The GPU with this minor number.
    Gpu(u32),
    /// A switch.
    Switch,
}

/// The present links between the GPUs. The watch does not report a link that breaks later.
fn links(nvml: &Nvml, bus: &Bus, gpus: &[Gpu]) -> Vec<GpuLinks> {
    let mut ends = Vec::new();
    for gpu in gpus {
        let Ok(device) = nvml.device_by_uuid(gpu.uuid.as_str()) else {
            continue;
        };
        for number in 0..MAX_LINKS {
            let link = device.link_wrapper_for(number);
            // The first number beyond the last link is an error.
            let Ok(is_active) = link.is_active() else { break };
            if !is_active {
                continue;
            }
            let address = link
                .remote_pci_info()
                .ok()
                .and_then(|pci| pci::address(&pci.bus_id));
            let far = address.and_then(|address| far_end(bus, gpus, &address));
            ends.extend(far.map(|far| (gpu.minor, far)));
        }
    }
    link_groups(&ends)
}

/// The far end at this address, if it is a switch or one of these GPUs. NVML's wrapper does not distinguish GPUs from switches.
fn far_end(bus: &Bus, gpus: &[Gpu], address: &str) -> Option<FarEnd> {
    if let Some(other) = gpus.iter().find(|other| other.bus_id.as_deref() == Some(address)) {
        return Some(FarEnd::Gpu(other.minor));
    }
    let is_switch = match bus.get(address) {
        Some(function) => function.vendor == NVIDIA && function.class >> 16 == pci::BRIDGE,
        // In a virtual machine switches have no function of their own; processors have one of another vendor.
        None => true,
    };
    is_switch.then_some(FarEnd::Switch)
}

/// Groups of linked GPUs, from the minor number of each link's owner and its far end.
///
/// GPUs on switches reach each other with all their links, so together they are one group.
fn link_groups(ends: &[(u32, FarEnd)]) -> Vec<GpuLinks> {
    let mut to_switches = BTreeMap::<u32, u32>::new();
    let mut between = BTreeMap::<(u32, u32), u32>::new();
    for (own, far) in ends {
        match far {
            FarEnd::Switch => *to_switches.entry(*own).or_default() += 1,
            FarEnd::Gpu(other) => *between.entry((*own, *other)).or_default() += 1,
        }
    }
    let mut groups = Vec::new();
    if to_switches.len() > 1 {
        groups.push(GpuLinks {
            links: to_switches.values().copied().min().unwrap_or(0),
            minors: to_switches.into_keys().collect(),
        });
    }
    let mut pairs = BTreeSet::new();
    for (one, other) in between.keys() {
        if one != other {
            pairs.insert((*one.min(other), *one.max(other)));
        }
    }
    for (one, other) in pairs {
        // Each of the two GPUs may see fewer links than the other.
        let count = |from, to| between.get(&(from, to)).copied().unwrap_or(0);
        groups.push(GpuLinks {
            minors: vec![one, other],
            links: count(one, other).max(count(other, one)),
        });
    }
    groups
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn text(groups: &[GpuLinks]) -> String {
        serde_json::to_string(groups).unwrap()
    }

    #[rstest]
    #[case::none(&[], "[]")]
    #[case::alone_on_a_switch(&[(0, None), (0, None)], "[]")]
    #[case::on_switches(&[(0, None), (0, None), (2, None), (2, None), (1, None), (1, None)], r#"[{"minors":[0,1,2],"links":2}]"#)]
    #[case::one_with_a_broken_link(&[(0, None), (0, None), (1, None)], r#"[{"minors":[0,1],"links":1}]"#)]
    #[case::pairs(&[(0, Some(1)), (1, Some(0)), (2, Some(3)), (2, Some(3)), (3, Some(2))], r#"[{"minors":[0,1],"links":1},{"minors":[2,3],"links":2}]"#)]
    #[case::one_tells_nothing(&[(1, Some(0)), (1, Some(0))], r#"[{"minors":[0,1],"links":2}]"#)]
    #[case::a_loop(&[(0, Some(0))], "[]")]
    #[case::both(&[(0, None), (1, None), (1, Some(2))], r#"[{"minors":[0,1],"links":1},{"minors":[1,2],"links":1}]"#)]
    fn found(#[case] links: &[(u32, Option<u32>)], #[case] expected: &str) {
        let links: Vec<_> = links
            .iter()
            .map(|(own, far)| (*own, far.map_or(FarEnd::Switch, FarEnd::Gpu)))
            .collect();
        assert_eq!(text(&link_groups(&links)), expected);
    }

    proptest! {
        /// Links that both ends see make a group for each pair, with as many links.
        #[test]
        fn links_between_two_gpus_are_counted(counts in prop::collection::btree_map((0..8_u32, 0..8_u32), 1..4_u32, 0..10)) {
            let counts: BTreeMap<_, _> = counts.into_iter().filter(|((one, other), _)| one < other).collect();
            let ends = |((one, other), n): (&(u32, u32), &u32)| {
                (0..*n).flat_map(|_| [(*one, FarEnd::Gpu(*other)), (*other, FarEnd::Gpu(*one))]).collect::<Vec<_>>()
            };
            let links: Vec<_> = counts.iter().flat_map(ends).collect();
            let expected: Vec<_> = counts.iter().map(|((one, other), n)| GpuLinks { minors: vec![*one, *other], links: *n }).collect();
            prop_assert_eq!(link_groups(&links), expected);
        }
    }
}
