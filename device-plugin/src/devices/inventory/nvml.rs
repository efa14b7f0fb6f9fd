//! NVIDIA GPUs through NVML, which is loaded at run time. No other module of this crate uses NVML. NVML's order of devices is
//! neither that of the minor numbers nor stable.
//!
//! A container gets the library from NVIDIA's runtime, as a mount that the runtime makes with the container; or it sees the
//! directory in which the node keeps its driver, which also shows a driver that was installed later.

mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use memory_limits::{CgroupMemory, cgroup_memory};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::{Device, Nvml, error::NvmlError};
use proto::topology::GpuLinks;
use tracing::warn;

use super::driver_library::find_library;
use super::feed::Watcher;
use super::pci::{self, Bus};
use super::{
    CgroupOnGpu, ExcludedGpu, Gpu, InventoryError, MIG, NodeInventory, PhysicalId, ProcessMemory, no_gpu,
};
use watch::NvmlWatch;

pub(crate) const LIBRARY: &str = "libnvidia-ml.so.1";

/// `NVML_DEVICE_MIG_ENABLE`.
const MIG_ENABLED: u32 = 1;

/// Limit of the loop over a GPU's links: more than any GPU has.
const MAX_LINKS: u32 = 64;

/// NVIDIA's vendor number in the PCI registry; the functions of its NVLink switches are PCI bridges.
const NVIDIA: u32 = 0x10de;

/// The NVIDIA devices of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlSource {
    /// The library: a path, or a name that the dynamic loader looks up.
    pub library: PathBuf,
    /// Directories that may hold the driver. If there are any, the library comes from the first that has it.
    pub driver_roots: Vec<PathBuf>,
    /// The mount point of sysfs.
    pub sysfs: PathBuf,
    /// The mount point of procfs, where the driver writes minor numbers that NVML may not know.
    pub procfs: PathBuf,
    /// Memory, in bytes, of a GPU whose memory NVML does not know, such as one that shares the memory of its processor.
    pub unknown_memory: Option<u64>,
    /// True if pods may not share the memory that the driver reserves for itself.
    pub withholds_reserved: bool,
    /// The interval at which a watch probes each device.
    pub probe_interval: Duration,
    /// The interval at which a watch compares the listed devices with the known ones, and may open another session.
    pub reopen_interval: Duration,
}

impl Default for NvmlSource {
    fn default() -> Self {
        Self {
            library: PathBuf::from(LIBRARY),
            driver_roots: Vec::new(),
            sysfs: PathBuf::from("/sys"),
            procfs: PathBuf::from("/proc"),
            unknown_memory: None,
            withholds_reserved: true,
            probe_interval: Duration::from_secs(10),
            reopen_interval: Duration::from_secs(30),
        }
    }
}

impl NvmlSource {
    /// Lists the GPUs that can be shared, with their links, and logs the GPUs that cannot.
    pub(super) fn discover(&self) -> Result<NodeInventory, InventoryError> {
        let nvml = self.open()?;
        let mut inventory = self.list(&nvml)?;
        // Written here because the watch calls `list` again and again, which would repeat the lines.
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

    /// The memory that compute processes use on each GPU, except processes whose memory the driver does not know.
    pub(super) fn memory_use(&self) -> Result<Vec<ProcessMemory>, InventoryError> {
        let nvml = self.open()?;
        let mut uses = Vec::new();
        for index in 0..count_devices(&nvml)? {
            // A GPU that cannot be read does not hide the others.
            let Ok(device) = nvml.device_by_index(index) else {
                continue;
            };
            let Some(gpu) = uuid_of(&device) else { continue };
            // Without this GPU the sum would pass for the memory on all GPUs.
            let processes = device.running_compute_processes();
            for process in processes.map_err(failed("list the processes on a GPU"))? {
                // The driver does not know the use where it does not manage the memory itself, as in WSL.
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

    /// The memory of each of these cgroups on a GPU, and the first failure; one that cannot be read counts as not limited.
    pub(super) fn cgroup_memory(
        &self,
        cgroups: &[CgroupOnGpu],
    ) -> Result<(Vec<CgroupMemory>, Option<InventoryError>), InventoryError> {
        let nvml = self.open()?;
        let mut found = Vec::with_capacity(cgroups.len());
        let mut failure = None;
        for CgroupOnGpu { gpu, cgroup } in cgroups {
            let device = nvml.device_by_uuid(gpu.as_str());
            let error = match device.and_then(|device| cgroup_memory(&device, cgroup)) {
                Ok(memory) => {
                    found.push(memory);
                    continue;
                }
                Err(error) => error,
            };
            found.push(CgroupMemory::NotLimited);
            // The container may have ended meanwhile; then NVML cannot open the directory of its cgroup.
            if failure.is_none() && !matches!(error, NvmlError::InvalidArg) {
                let problem = format!("cannot read the memory of cgroup {} on {gpu}", cgroup.display());
                failure = Some(InventoryError::failed(problem, error));
            }
        }
        Ok((found, failure))
    }

    pub(super) fn watcher(&self, inventory: &NodeInventory) -> Watcher {
        let mut watch = NvmlWatch::new(self.clone(), inventory.clone());
        Box::new(move |reporter| watch.run(reporter))
    }

    fn open(&self) -> Result<Nvml, InventoryError> {
        let library = self.find_library()?;
        let error = match Nvml::builder().lib_path(library.as_os_str()).init() {
            Ok(nvml) => return Ok(nvml),
            Err(error) => error,
        };
        Err(match error {
            NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_) if self.is_stale_container() => {
                InventoryError::DriverReplaced {
                    how: "it was installed after this container was created, or the container runtime gives this container no library; \
                          deploy/which-node.sh names the component that this node needs"
                        .to_owned(),
                }
            }
            NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_) => InventoryError::Absent {
                problem: format!(
                    "cannot load the NVIDIA management library {}: install the NVIDIA driver on this node, run this container with \
                     the NVIDIA runtime so that the library is mounted, or name the driver's directory with --driver-root",
                    library.display()
                ),
                source: Some(Box::new(error)),
            },
            NvmlError::DriverNotLoaded => InventoryError::absent(format!(
                "{} is present but the NVIDIA kernel driver is not loaded: check `lsmod | grep nvidia` and the kernel log of this \
                 node",
                library.display()
            )),
            NvmlError::LibRmVersionMismatch if self.driver_roots.is_empty() => {
                InventoryError::DriverReplaced {
                    how: "the loaded kernel driver is of another version than the library in this container: load the driver's modules \
                          again, or reboot this node"
                        .to_owned(),
                }
            }
            // The library in a driver root changes with the driver, so this container can stay.
            NvmlError::LibRmVersionMismatch => InventoryError::absent(format!(
                "{} is of another version than the loaded NVIDIA kernel driver: load the driver's modules again, or reboot this node",
                library.display()
            )),
            error => failed("open a session")(error),
        })
    }

    /// The library in the first driver root that has it; without driver roots the configured library.
    fn find_library(&self) -> Result<PathBuf, InventoryError> {
        if self.driver_roots.is_empty() {
            return Ok(self.library.clone());
        }
        let name = self.library.file_name().unwrap_or(OsStr::new(LIBRARY));
        // A root may be there before its driver, as the empty mount point of a driver container.
        if let Some(found) = find_library(&self.driver_roots, name) {
            return Ok(found);
        }
        let roots = self.driver_roots.iter();
        let roots: Vec<_> = roots.map(|root| root.to_string_lossy()).collect();
        Err(InventoryError::absent(format!(
            "no {} in {}: install the NVIDIA driver on this node, or name with --driver-root the directory that holds it",
            name.to_string_lossy(),
            roots.join(", ")
        )))
    }

    /// The version of the loaded kernel driver, empty if it names none; `None` if no driver is loaded.
    pub(super) fn loaded_driver(&self) -> Option<String> {
        let module = self.sysfs.join("module/nvidia");
        let version = fs::read_to_string(module.join("version"));
        module.exists().then(|| version.unwrap_or_default())
    }

    /// Returns true if only a new container can have the loaded driver's library: the runtime mounts it, and does so at creation.
    fn is_stale_container(&self) -> bool {
        self.driver_roots.is_empty() && self.loaded_driver().is_some()
    }

    /// The GPUs that this session with the driver lists, without their links. It is no error if none of them can be shared.
    fn list(&self, nvml: &Nvml) -> Result<NodeInventory, InventoryError> {
        let count = count_devices(nvml)?;
        if count == 0 {
            return Err(no_gpu(&self.library));
        }
        let bus = Bus::read(&self.sysfs);
        let (mut gpus, mut excluded) = (Vec::<Gpu>::new(), Vec::new());
        for index in 0..count {
            let mut found = ExcludedGpu {
                index,
                ..ExcludedGpu::default()
            };
            // A GPU that cannot be read does not hide the others.
            match self.read_gpu(nvml, &bus, &gpus, &mut found) {
                Ok(gpu) => gpus.push(gpu),
                Err(problem) => excluded.push(ExcludedGpu { problem, ..found }),
            }
        }
        // NVML's order changes with the GPUs that are there, and kubelet's device IDs must keep theirs.
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

    /// Reads the GPU at the index of `found`, and notes its UUID and MIG mode there; `before` are the GPUs at lower indices.
    fn read_gpu(
        &self,
        nvml: &Nvml,
        bus: &Bus,
        before: &[Gpu],
        found: &mut ExcludedGpu,
    ) -> Result<Gpu, String> {
        let device = nvml.device_by_index(found.index).map_err(unreadable("handle"))?;
        let uuid = device.uuid().map_err(unreadable("UUID"))?;
        let uuid: PhysicalId = uuid.parse()?;
        found.uuid = Some(uuid.clone());
        // MIG instances have UUIDs and memory of their own, which the records of gpushare's scheduler do not name.
        found.is_mig = is_mig(&device);
        if found.is_mig {
            return Err(MIG.to_owned());
        }
        let bus_id = device.pci_info().ok().and_then(|pci| pci::address(&pci.bus_id));
        let minor = self.minor(&device, bus_id.as_deref())?;
        let (memory_bytes, reserved_bytes) = self.memory(&device)?;
        let model = device.name().map_err(unreadable("name"))?;
        // Records of pods name GPUs by UUID or by minor number.
        let mut others = before.iter();
        if let Some(other) = others.find(|other| other.uuid == uuid || other.minor == minor) {
            return Err(format!(
                "GPU {} has the same UUID or minor number {}",
                other.index, other.minor
            ));
        }
        Ok(Gpu {
            uuid,
            minor,
            index: found.index,
            memory_bytes,
            reserved_bytes,
            model,
            location: bus.location(bus_id.as_deref().unwrap_or_default()),
            bus_id,
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
            Err(error) => return Err(unreadable("minor number")(error)),
        }
        let Some(bus_id) = bus_id else {
            return Err(format!("{UNSUPPORTED} it has no PCI address"));
        };
        let folder = self.procfs.join("driver/nvidia/gpus").join(bus_id);
        let file = folder.join("information");
        let text = fs::read_to_string(&file)
            .map_err(|error| format!("{UNSUPPORTED} {} cannot be read: {error}", file.display()))?;
        let number = text.lines().find_map(|line| line.strip_prefix("Device Minor:"));
        let minor = number.unwrap_or_default().trim().parse();
        minor.map_err(|_| format!("{UNSUPPORTED} {} does not name it", file.display()))
    }

    /// The bytes of a GPU that pods may share, and the bytes that the driver reserves and pods may not share.
    fn memory(&self, device: &Device<'_>) -> Result<(u64, u64), String> {
        let (total, reserved) = match device.memory_info() {
            Ok(memory) => (memory.total, memory.reserved),
            // The wrapper makes the second version of this call, which older libraries do not have.
            Err(NvmlError::FailedToLoadSymbol(_)) => {
                return Err("the driver is too old to report its memory: it must be 510 or newer".to_owned());
            }
            // GPUs that share the memory of their processor, such as GB10.
            Err(NvmlError::NotSupported) => (0, 0),
            Err(error) => return Err(unreadable("memory")(error)),
        };
        match (total, self.unknown_memory) {
            (0, Some(bytes)) => Ok((bytes, 0)),
            (0, None) => Err("NVML does not know its memory: say with --gpu-memory how much of it pods may share, such as 96Gi".to_owned()),
            _ if self.withholds_reserved => Ok((total.saturating_sub(reserved), reserved.min(total))),
            _ => Ok((total, 0)),
        }
    }
}

/// Returns true if the GPU is in MIG mode. A GPU without MIG answers with an error, and is in no MIG mode.
fn is_mig(device: &Device<'_>) -> bool {
    device.mig_mode().is_ok_and(|mode| mode.current == MIG_ENABLED)
}

fn count_devices(nvml: &Nvml) -> Result<u32, InventoryError> {
    nvml.device_count().map_err(failed("count the devices"))
}

fn uuid_of(device: &Device<'_>) -> Option<PhysicalId> {
    device.uuid().ok()?.parse().ok()
}

fn unreadable(property: &'static str) -> impl FnOnce(NvmlError) -> String {
    move |error| format!("its {property} cannot be read: {error}")
}

fn failed(operation: &'static str) -> impl FnOnce(NvmlError) -> InventoryError {
    move |error| InventoryError::failed(format!("NVML: cannot {operation}"), error)
}

/// The device at the far end of an active link (NVLink) of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FarEnd {
    Gpu(u32),
    Switch,
}

/// The active links between the GPUs at present. The watch does not report a link that breaks later.
fn links(nvml: &Nvml, bus: &Bus, gpus: &[Gpu]) -> Vec<GpuLinks> {
    let mut ends = Vec::new();
    for gpu in gpus {
        let Ok(device) = nvml.device_by_uuid(gpu.uuid.as_str()) else {
            continue;
        };
        for number in 0..MAX_LINKS {
            let link = device.link_wrapper_for(number);
            // NVML answers with an error for the first number beyond the last link.
            let Ok(is_active) = link.is_active() else { break };
            if !is_active {
                continue;
            }
            if let Ok(pci) = link.remote_pci_info()
                && let Some(address) = pci::address(&pci.bus_id)
                && let Some(far) = far_end(bus, gpus, &address)
            {
                ends.push((gpu.minor, far));
            }
        }
    }
    link_groups(&ends)
}

fn far_end(bus: &Bus, gpus: &[Gpu], address: &str) -> Option<FarEnd> {
    if let Some(other) = gpus.iter().find(|other| other.bus_id.as_deref() == Some(address)) {
        return Some(FarEnd::Gpu(other.minor));
    }
    // NVML's crate has no call for the type of the far end, so sysfs decides.
    let is_switch = match bus.functions.get(address) {
        Some(function) => function.vendor == NVIDIA && function.class >> 16 == pci::BRIDGE,
        // In a virtual machine switches have no function of their own; processors have one of another vendor.
        None => true,
    };
    is_switch.then_some(FarEnd::Switch)
}

/// Groups of linked GPUs, from pairs of a GPU's minor number and the far end of one of its links. GPUs on switches reach each
/// other with all their links, so together they are one group.
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
    // The links of a GPU to switches lead to no GPU if no other GPU is on switches.
    if to_switches.len() > 1 {
        groups.push(GpuLinks {
            // A broken link of one GPU limits all pairs with it.
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
        let there = between.get(&(one, other)).copied().unwrap_or(0);
        let back = between.get(&(other, one)).copied().unwrap_or(0);
        groups.push(GpuLinks {
            minors: vec![one, other],
            // NVML may fail to name the far end of a link for one of the two GPUs, so the larger count is right.
            links: there.max(back),
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
