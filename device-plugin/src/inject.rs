//! What a container is told about its devices: variables, device nodes, or the edits of a CDI spec.
//!
//! Pure but for a look at which device nodes and vendor's specs there are. Who the container is and which devices its pod has
//! has been decided before.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use clap::ValueEnum;
use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::{CdiDevice, ContainerAllocateResponse, DeviceSpec};
use proto::record::{FPGA_DEVICES, FPGA_FUNCTIONS, MEM_CONTAINER, MEM_DEV, MEM_IDX, MEM_POD, RDMA_DEVICES, RDMA_FUNCTIONS};
use proto::request::ContainerRequest;

use crate::cdi::vendor::VendorSpecs;
use crate::cdi::{self, Edits};
use crate::fleet::{DeviceKey, Fleet};
use crate::inventory::{Gpu, GpuUuid, OtherDevice};
use crate::plugin::Settings;
use crate::pods::{NodePod, Placement};
use crate::served::Served;

/// What HAMi-core reads the limit of a device's memory from, followed by the device's place.
const MEMORY_LIMIT: &str = "CUDA_DEVICE_MEMORY_LIMIT";

/// What HAMi-core reads the limit of computing power from.
const CORE_LIMIT: &str = "CUDA_DEVICE_SM_LIMIT";

/// Device nodes that go with every NVIDIA GPU, as far as they are there.
const COMMON_NODES: [&str; 3] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];

/// How containers are given their devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Manner {
    /// By a variable in the answer to Allocate, which stands as long as the container lives.
    Envvar,
    /// By a CDI device whose spec is written before the container starts.
    Cdi,
}

impl Manner {
    /// What the node's runtime can do, by the name and version that its Node object tells, and why.
    pub fn of_runtime(runtime: &str, is_dir_writable: bool) -> (Self, &'static str) {
        /// The first versions that take CDI devices from kubelet without being configured for it.
        const KNOWN: [(&str, (u32, u32)); 2] = [("containerd", (2, 0)), ("cri-o", (1, 28))];
        let Some((name, version)) = runtime.split_once("://") else {
            return (Self::Envvar, "the node's runtime is not known");
        };
        let mut numbers = version.trim_start_matches('v').split(['.', '-', '+']).map_while(|number| number.parse::<u32>().ok());
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        match KNOWN.iter().find(|(known, _)| *known == name) {
            None => (Self::Envvar, "the node's runtime is not known to take CDI devices"),
            Some((_, first)) if version < *first => {
                (Self::Envvar, "the node's runtime is too old to take CDI devices without being configured for it")
            }
            Some(_) if !is_dir_writable => (Self::Envvar, "the directory of CDI specs cannot be written"),
            Some(_) => (Self::Cdi, "the node's runtime takes CDI devices"),
        }
    }
}

/// How, and where what is needed for it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The manner; none if it is to be found out what the node's runtime can do.
    pub manner: Option<Manner>,
    /// Where specs are written.
    pub cdi_dir: PathBuf,
    /// The vendor's specs.
    pub vendor_specs: VendorSpecs,
    /// Whether device nodes are handed over too.
    pub pass_device_specs: bool,
    /// What device nodes are looked for below.
    pub device_root: PathBuf,
}

impl Injection {
    /// By the variable alone.
    pub fn envvar() -> Self {
        Self {
            manner: Some(Manner::Envvar),
            cdi_dir: "/var/run/cdi".into(),
            vendor_specs: VendorSpecs::default(),
            pass_device_specs: false,
            device_root: "/".into(),
        }
    }
}

/// Whether the answer for this resource is the one that says which devices of its type the container sees: of two values of a
/// variable kubelet would keep one at random.
pub fn speaks(resource: Served, container: &ContainerRequest) -> bool {
    match resource {
        Served::Memory | Served::Rdma | Served::Fpga => true,
        Served::Shared => container.memory_units == 0,
        Served::Whole => container.memory_units == 0 && container.shared == 0,
    }
}

/// The variable that names a container's devices of a resource's type, if `of_gpus` is the one of GPUs.
pub fn variable(of_gpus: &str, resource: Served) -> &str {
    match resource {
        Served::Shared | Served::Memory | Served::Whole => of_gpus,
        Served::Rdma => RDMA_DEVICES,
        Served::Fpga => FPGA_DEVICES,
    }
}

/// The variable that names a container's virtual functions of devices of a resource's type.
pub fn functions_variable(resource: Served) -> Option<&'static str> {
    match resource {
        Served::Shared | Served::Memory | Served::Whole => None,
        Served::Rdma => Some(RDMA_FUNCTIONS),
        Served::Fpga => Some(FPGA_FUNCTIONS),
    }
}

/// The devices that a container is given for a resource.
#[derive(Clone, Debug)]
pub enum Given<'a> {
    /// GPUs.
    Gpus(Vec<&'a Gpu>),
    /// Devices of another type.
    Others(Vec<&'a OtherDevice>),
}

impl<'a> Given<'a> {
    /// Those of this node that are called so, in this order.
    pub fn of(fleet: &'a Fleet, resource: Served, keys: &[DeviceKey]) -> Self {
        let device_type = resource.device_type();
        if device_type == TYPE_GPU {
            let find = |key: &DeviceKey| fleet.gpus.iter().map(|entry| &entry.gpu).find(|gpu| gpu.uuid == key.id);
            return Self::Gpus(keys.iter().filter_map(find).collect());
        }
        let find = |key: &DeviceKey| fleet.devices_of(device_type).map(|entry| &entry.device).find(|device| device.id == key.id);
        Self::Others(keys.iter().filter_map(find).collect())
    }

    /// What identifies them, separated by commas.
    pub fn ids(&self) -> String {
        let ids: Vec<&str> = match self {
            Self::Gpus(gpus) => gpus.iter().map(|gpu| gpu.uuid.as_str()).collect(),
            Self::Others(devices) => devices.iter().map(|device| device.id.as_str()).collect(),
        };
        ids.join(",")
    }
}

/// The answer that depends on nothing but the device IDs.
pub fn cdi_answer(resource: Served, ids: &[String]) -> ContainerAllocateResponse {
    let name = format!("{}{}", cdi::PREFIX, cdi::device_name(resource, ids));
    ContainerAllocateResponse { cdi_devices: vec![CdiDevice { name }], ..ContainerAllocateResponse::default() }
}

/// Who is given devices.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// The pod.
    pub pod: &'a NodePod,
    /// The container.
    pub container: &'a ContainerRequest,
    /// The record that counts.
    pub placement: Option<&'a Placement>,
}

/// The answer that says once and for all what the container of a call sees, which may not be known.
pub fn envvar_answer(settings: &Settings, known: Option<&Known<'_>>, resource: Served, given: &Given<'_>) -> ContainerAllocateResponse {
    let mut envs: HashMap<String, String> =
        known.map(|known| variables(settings, known, resource, given)).unwrap_or_default().into_iter().collect();
    let mut nodes = Vec::new();
    if known.is_none_or(|known| speaks(resource, known.container)) {
        envs.insert(variable(&settings.visible_devices_env, resource).to_owned(), given.ids());
        // NVIDIA's runtime finds the nodes of GPUs itself.
        if settings.injection.pass_device_specs || matches!(given, Given::Others(_)) {
            nodes = device_nodes(settings, known, resource, given);
        }
    }
    let spec = |(path, host): (PathBuf, PathBuf)| DeviceSpec {
        container_path: path.to_string_lossy().into_owned(),
        host_path: host.to_string_lossy().into_owned(),
        permissions: "rw".to_owned(),
    };
    ContainerAllocateResponse { envs, devices: nodes.into_iter().map(spec).collect(), ..ContainerAllocateResponse::default() }
}

/// The edits for one resource of a container of this pod.
pub fn cdi_edits(settings: &Settings, known: &Known<'_>, resource: Served, given: &Given<'_>) -> Edits {
    let variable = variable(&settings.visible_devices_env, resource);
    let mut edits = Edits::default();
    if speaks(resource, known.container) {
        let of_vendor = match given {
            Given::Gpus(gpus) => settings.injection.vendor_specs.edits(gpus, variable),
            Given::Others(_) => None,
        };
        let own = || Edits { device_nodes: device_nodes(settings, Some(known), resource, given), ..Edits::default() };
        edits = of_vendor.unwrap_or_else(own);
    }
    edits.env.extend(variables(settings, known, resource, given));
    // A spec must do something, and saying the same twice does no harm.
    edits.env.insert(variable.to_owned(), given.ids());
    edits
}

/// The device nodes of these devices that are there: in the container and on the host. Who was given virtual functions of a
/// device is given their nodes, and not the device's.
fn device_nodes(settings: &Settings, known: Option<&Known<'_>>, resource: Served, given: &Given<'_>) -> Vec<(PathBuf, PathBuf)> {
    let root = &settings.injection.device_root;
    let paths: Vec<PathBuf> = match given {
        Given::Gpus(gpus) => {
            let own = gpus.iter().map(|gpu| gpu.device_node.clone());
            COMMON_NODES.iter().map(PathBuf::from).chain(own).collect()
        }
        Given::Others(devices) => {
            let mut own = Vec::<PathBuf>::new();
            for path in devices.iter().flat_map(|device| own_nodes(known, resource, device)) {
                // Some files are of all adapters.
                if !own.contains(path) {
                    own.push(path.clone());
                }
            }
            own
        }
    };
    let host = |path: &PathBuf| root.join(path.strip_prefix("/").unwrap_or(path));
    paths.into_iter().map(|path| (host(&path), path)).filter(|(host, _)| host.exists()).map(|(host, path)| (path, host)).collect()
}

/// The device nodes of what is given of a device.
fn own_nodes<'a>(known: Option<&Known<'_>>, resource: Served, device: &'a OtherDevice) -> impl Iterator<Item = &'a PathBuf> {
    let functions = known.map_or(&[][..], |known| functions(known, resource, device));
    let own = if functions.is_empty() { &device.device_nodes[..] } else { &[] };
    let of_functions: Vec<_> = functions.iter().filter_map(|function| device.function_nodes.get(function.as_str())).flatten().collect();
    own.iter().chain(of_functions)
}

/// The virtual functions of a device that the pod's record gives it.
fn functions<'a>(known: &Known<'a>, resource: Served, device: &OtherDevice) -> &'a [GpuUuid] {
    let others = known.placement.and_then(|placement| placement.others.get(resource.device_type()));
    let key = DeviceKey::from(device);
    let held = others.and_then(|others| others.names.iter().zip(&others.held).find(|(name, _)| name.is(&key)));
    held.map_or(&[], |(_, portion)| &portion.functions)
}

/// Everything but the variable that names the devices.
fn variables(settings: &Settings, known: &Known<'_>, resource: Served, given: &Given<'_>) -> BTreeMap<String, String> {
    match given {
        Given::Gpus(gpus) => of_gpus(settings, known, resource, gpus),
        Given::Others(devices) => {
            let functions: Vec<&str> = devices.iter().flat_map(|device| functions(known, resource, device)).map(GpuUuid::as_str).collect();
            let named = functions_variable(resource).filter(|_| !functions.is_empty());
            named.map(|name| (name.to_owned(), functions.join(","))).into_iter().collect()
        }
    }
}

/// The variables of the old gpushare plugin, and those that limit the container.
fn of_gpus(settings: &Settings, known: &Known<'_>, resource: Served, gpus: &[&Gpu]) -> BTreeMap<String, String> {
    let Known { pod, container, placement } = *known;
    let mut env = BTreeMap::new();
    if speaks(resource, container) {
        env.extend(limits(settings, pod, placement, gpus));
    }
    if let (Served::Memory, Some(gpu)) = (resource, gpus.first()) {
        let record = placement.and_then(|placement| placement.gpushare);
        let pod_units = record.map(|record| record.pod_units).filter(|units| *units > 0).unwrap_or_else(|| pod.memory_units());
        let device_units = record.map(|record| record.device_units).filter(|units| *units > 0);
        let device_units = device_units.unwrap_or_else(|| settings.memory_unit.units_in(gpu.memory_bytes));
        env.insert(MEM_IDX.to_owned(), gpu.minor.to_string());
        env.insert(MEM_POD.to_owned(), pod_units.to_string());
        env.insert(MEM_CONTAINER.to_owned(), container.memory_units.to_string());
        env.insert(MEM_DEV.to_owned(), device_units.to_string());
    }
    env
}

/// Whether a variable is one of the limits that HAMi-core enforces.
pub fn is_limit(name: &str) -> bool {
    name.starts_with(MEMORY_LIMIT) || name == CORE_LIMIT
}

/// The limits that HAMi-core enforces, of each device by its place among the pod's; none of a device that is all the pod's.
pub fn limits(settings: &Settings, pod: &NodePod, placement: Option<&Placement>, gpus: &[&Gpu]) -> BTreeMap<String, String> {
    let Some(placement) = placement.filter(|_| pod.is_limited) else { return BTreeMap::new() };
    let held = |gpu: &Gpu| placement.gpus.iter().zip(&placement.held).find(|(name, _)| name.names(gpu)).map(|(_, held)| held);
    let mut env = BTreeMap::new();
    for (at, gpu) in gpus.iter().enumerate() {
        let Some(bytes) =
            held(gpu).and_then(|held| held.bytes_of(gpu.memory_bytes)).or_else(|| settings.memory_unit.bytes_of(pod.memory_units()))
        else {
            continue;
        };
        if bytes > 0 && bytes < gpu.memory_bytes {
            // HAMi-core takes zero for no limit at all.
            env.insert(format!("{MEMORY_LIMIT}_{at}"), format!("{}m", (bytes >> 20).max(1)));
        }
    }
    let core = gpus.first().and_then(|gpu| held(gpu)).map_or(0, |held| held.core);
    if core > 0 && core < 100 {
        env.insert(CORE_LIMIT.to_owned(), core.to_string());
    }
    env
}

#[cfg(test)]
mod tests;
