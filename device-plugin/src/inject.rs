//! The content of an answer to Allocate and of a CDI spec: a container's variables and device nodes.
//!
//! Pure except that it looks which device nodes and vendor's specs are there. The callers choose the container and the
//! devices of its pod.
//!
//! With CDI the answer names a spec that no answer named before, and says `void` in the vendor's variable: where the runtime does not
//! act on CDI devices, the container gets no GPU rather than those that the variable of its image names. The UUIDs are in a
//! variable of this project.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::{CdiDevice, ContainerAllocateResponse, DeviceSpec};
use proto::record::{
    FPGA_DEVICES, FPGA_FUNCTIONS, GPU_DEVICES, MEM_CONTAINER, MEM_DEV, MEM_IDX, MEM_POD, RDMA_DEVICES,
    RDMA_FUNCTIONS,
};
use proto::request::ContainerRequest;

use crate::cdi::{self, Edits};
use crate::extended_resource::ExtendedResource;
use crate::fleet::{DeviceKey, Fleet};
use crate::inventory::{Gpu, OtherDevice, PhysicalId};
use crate::plugin::Settings;
use crate::pods::{NodePod, Placement};

/// What HAMi-core reads the limit of a device's memory from, followed by the device's place.
const MEMORY_LIMIT: &str = "CUDA_DEVICE_MEMORY_LIMIT";

/// What HAMi-core reads the limit of computing power from.
const CORE_LIMIT: &str = "CUDA_DEVICE_SM_LIMIT";

/// Device nodes that go with every NVIDIA GPU, as far as they are there.
const COMMON_NODES: [&str; 3] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];

/// The value of the vendor's variable that makes its runtime do nothing.
pub const VOID: &str = "void";

/// Whether the answer for this resource is the one that says which devices of its type the container sees: of two values of a
/// variable kubelet would keep one at random.
pub fn speaks(resource: ExtendedResource, container: &ContainerRequest) -> bool {
    match resource {
        ExtendedResource::Memory | ExtendedResource::Rdma | ExtendedResource::Fpga => true,
        ExtendedResource::Shared => container.memory_units == 0,
        ExtendedResource::Whole => container.memory_units == 0 && container.shared == 0,
    }
}

/// The variable by which an answer without CDI names a container's devices of a resource's type; `of_gpus` is the vendor's.
pub fn variable(of_gpus: &str, resource: ExtendedResource) -> &str {
    match resource {
        ExtendedResource::Shared | ExtendedResource::Memory | ExtendedResource::Whole => of_gpus,
        ExtendedResource::Rdma | ExtendedResource::Fpga => own_variable(resource),
    }
}

/// This project's variable that names a container's devices of a resource's type.
pub fn own_variable(resource: ExtendedResource) -> &'static str {
    match resource {
        ExtendedResource::Shared | ExtendedResource::Memory | ExtendedResource::Whole => GPU_DEVICES,
        ExtendedResource::Rdma => RDMA_DEVICES,
        ExtendedResource::Fpga => FPGA_DEVICES,
    }
}

/// The variable that names a container's virtual functions of devices of a resource's type.
pub fn functions_variable(resource: ExtendedResource) -> Option<&'static str> {
    match resource {
        ExtendedResource::Shared | ExtendedResource::Memory | ExtendedResource::Whole => None,
        ExtendedResource::Rdma => Some(RDMA_FUNCTIONS),
        ExtendedResource::Fpga => Some(FPGA_FUNCTIONS),
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
    pub fn of(fleet: &'a Fleet, resource: ExtendedResource, keys: &[DeviceKey]) -> Self {
        let device_type = resource.device_type();
        if device_type == TYPE_GPU {
            let find = |key: &DeviceKey| {
                fleet
                    .gpus
                    .iter()
                    .map(|entry| &entry.gpu)
                    .find(|gpu| gpu.uuid == key.id)
            };
            return Self::Gpus(keys.iter().filter_map(find).collect());
        }
        let find = |key: &DeviceKey| {
            fleet
                .devices_of(device_type)
                .map(|entry| &entry.device)
                .find(|device| device.id == key.id)
        };
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

/// The answer with CDI: a function of the device IDs and of a number that no other answer has. `visible` is the vendor's
/// variable.
pub fn cdi_answer(
    visible: &str,
    resource: ExtendedResource,
    ids: &[String],
    fresh: u64,
) -> ContainerAllocateResponse {
    let device = CdiDevice {
        name: cdi::container_device(resource, ids, fresh),
    };
    if resource.device_type() != TYPE_GPU {
        return ContainerAllocateResponse {
            cdi_devices: vec![device],
            ..ContainerAllocateResponse::default()
        };
    }
    ContainerAllocateResponse {
        envs: [(visible.to_owned(), VOID.to_owned())].into(),
        cdi_devices: vec![
            CdiDevice {
                name: cdi::DRIVER_DEVICE.to_owned(),
            },
            device,
        ],
        ..ContainerAllocateResponse::default()
    }
}

/// The edits of the device that brings the driver: `edits` of a vendor's spec, and the control nodes that are there.
pub fn driver_edits(settings: &Settings, mut edits: Edits) -> Edits {
    edits
        .env
        .insert(settings.visible_devices_env.clone(), VOID.to_owned());
    let has_node = |edits: &Edits, path: &str| {
        edits
            .device_nodes
            .iter()
            .any(|node| node.get("path").is_some_and(|own| own == path))
    };
    for path in COMMON_NODES {
        if !has_node(&edits, path) && is_on_host(settings, Path::new(path)) {
            edits.add_node(Path::new(path));
        }
    }
    edits
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

/// The answer without CDI, which decides for as long as the container lives. The container may not be known.
pub fn envvar_answer(
    settings: &Settings,
    known: Option<&Known<'_>>,
    resource: ExtendedResource,
    given: &Given<'_>,
) -> ContainerAllocateResponse {
    let mut envs: HashMap<String, String> = known
        .map(|known| variables(settings, known, resource, given))
        .unwrap_or_default()
        .into_iter()
        .collect();
    let mut nodes = Vec::new();
    if known.is_none_or(|known| speaks(resource, known.container)) {
        envs.insert(
            variable(&settings.visible_devices_env, resource).to_owned(),
            given.ids(),
        );
        envs.insert(own_variable(resource).to_owned(), given.ids());
        // NVIDIA's runtime finds the nodes of GPUs itself.
        if settings.injection.pass_device_specs || matches!(given, Given::Others(_)) {
            nodes = device_nodes(settings, known, resource, given);
        }
    }
    let spec = |path: PathBuf| {
        let path = path.to_string_lossy().into_owned();
        DeviceSpec {
            container_path: path.clone(),
            host_path: path,
            permissions: "rw".to_owned(),
        }
    };
    ContainerAllocateResponse {
        envs,
        devices: nodes.into_iter().map(spec).collect(),
        ..ContainerAllocateResponse::default()
    }
}

/// The edits for one resource of a container: device nodes and variables alone, as another device brings the driver.
pub fn cdi_edits(
    settings: &Settings,
    known: &Known<'_>,
    resource: ExtendedResource,
    given: &Given<'_>,
) -> Edits {
    let mut edits = Edits::default();
    if speaks(resource, known.container) {
        match given {
            Given::Gpus(gpus) => gpus
                .iter()
                .for_each(|gpu| add_nodes_of_gpu(&mut edits, settings, gpu)),
            Given::Others(_) => device_nodes(settings, Some(known), resource, given)
                .iter()
                .for_each(|path| edits.add_node(path)),
        }
    }
    edits.env.extend(variables(settings, known, resource, given));
    // A spec must do something, and two resources that say the same do no harm.
    edits.env.insert(own_variable(resource).to_owned(), given.ids());
    if let Given::Gpus(_) = given {
        edits
            .env
            .insert(settings.visible_devices_env.clone(), VOID.to_owned());
    }
    edits
}

/// The edits for an answer of a version before the driver had a device of its own: kubelet keeps such answers as long as
/// their pods live. `driver` is what that device brings, if there is one; without it the vendor's runtime has to act on the
/// variable, as it did when the pod was admitted.
pub fn inlined_edits(
    settings: &Settings,
    driver: Option<&Edits>,
    known: &Known<'_>,
    resource: ExtendedResource,
    given: &Given<'_>,
) -> Edits {
    let mut edits = cdi_edits(settings, known, resource, given);
    match (given, driver) {
        (Given::Gpus(_), Some(driver)) if speaks(resource, known.container) => edits.merge(driver),
        (Given::Gpus(_), None) => drop(
            edits
                .env
                .insert(settings.visible_devices_env.clone(), given.ids()),
        ),
        _ => {}
    }
    edits
}

/// The device nodes of a GPU: those that a vendor's spec names, else its own.
fn add_nodes_of_gpu(edits: &mut Edits, settings: &Settings, gpu: &Gpu) {
    if let Some(nodes) = settings.injection.vendor_specs.nodes(gpu) {
        edits.device_nodes.extend(nodes);
    } else if is_on_host(settings, &gpu.device_node) {
        edits.add_node(&gpu.device_node);
    }
}

/// The device nodes of these devices that are on the host. A container that was given virtual functions of a device gets
/// their nodes, and not the device's.
fn device_nodes(
    settings: &Settings,
    known: Option<&Known<'_>>,
    resource: ExtendedResource,
    given: &Given<'_>,
) -> Vec<PathBuf> {
    let mut paths = Vec::<PathBuf>::new();
    match given {
        Given::Gpus(gpus) => {
            let own = gpus.iter().map(|gpu| gpu.device_node.clone());
            paths.extend(COMMON_NODES.iter().map(PathBuf::from).chain(own));
        }
        Given::Others(devices) => {
            for path in devices
                .iter()
                .flat_map(|device| own_nodes(known, resource, device))
            {
                // Some files are of all adapters.
                if !paths.contains(path) {
                    paths.push(path.clone());
                }
            }
        }
    }
    paths.retain(|path| is_on_host(settings, path));
    paths
}

/// Returns true if the host has this file. Answers and specs name paths of the host, wherever this process sees them.
fn is_on_host(settings: &Settings, path: &Path) -> bool {
    settings
        .injection
        .host_root
        .join(path.strip_prefix("/").unwrap_or(path))
        .exists()
}

/// The device nodes of what is given of a device.
fn own_nodes<'a>(
    known: Option<&Known<'_>>,
    resource: ExtendedResource,
    device: &'a OtherDevice,
) -> impl Iterator<Item = &'a PathBuf> {
    let functions = known.map_or(&[][..], |known| functions(known, resource, device));
    let own = if functions.is_empty() {
        &device.device_nodes[..]
    } else {
        &[]
    };
    let of_functions: Vec<_> = functions
        .iter()
        .filter_map(|function| device.function_nodes.get(function.as_str()))
        .flatten()
        .collect();
    own.iter().chain(of_functions)
}

/// The virtual functions of a device that the pod's record gives it.
fn functions<'a>(known: &Known<'a>, resource: ExtendedResource, device: &OtherDevice) -> &'a [PhysicalId] {
    let others = known
        .placement
        .and_then(|placement| placement.others.get(resource.device_type()));
    let key = DeviceKey::from(device);
    let held = others.and_then(|others| {
        others
            .names
            .iter()
            .zip(&others.held)
            .find(|(name, _)| name.is(&key))
    });
    held.map_or(&[], |(_, portion)| &portion.functions)
}

/// Everything but the variable that names the devices.
fn variables(
    settings: &Settings,
    known: &Known<'_>,
    resource: ExtendedResource,
    given: &Given<'_>,
) -> BTreeMap<String, String> {
    match given {
        Given::Gpus(gpus) => of_gpus(settings, known, resource, gpus),
        Given::Others(devices) => {
            let functions: Vec<&str> = devices
                .iter()
                .flat_map(|device| functions(known, resource, device))
                .map(PhysicalId::as_str)
                .collect();
            let named = functions_variable(resource).filter(|_| !functions.is_empty());
            named
                .map(|name| (name.to_owned(), functions.join(",")))
                .into_iter()
                .collect()
        }
    }
}

/// The variables of the old gpushare plugin, and those that limit the container.
fn of_gpus(
    settings: &Settings,
    known: &Known<'_>,
    resource: ExtendedResource,
    gpus: &[&Gpu],
) -> BTreeMap<String, String> {
    let Known {
        pod,
        container,
        placement,
    } = *known;
    let mut env = BTreeMap::new();
    if speaks(resource, container) {
        env.extend(limits(settings, pod, placement, gpus));
    }
    if let (ExtendedResource::Memory, Some(gpu)) = (resource, gpus.first()) {
        let record = placement.and_then(|placement| placement.gpushare);
        let pod_units = record
            .map(|record| record.pod_units)
            .filter(|units| *units > 0)
            .unwrap_or_else(|| pod.memory_units());
        let device_units = record
            .map(|record| record.device_units)
            .filter(|units| *units > 0);
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
pub fn limits(
    settings: &Settings,
    pod: &NodePod,
    placement: Option<&Placement>,
    gpus: &[&Gpu],
) -> BTreeMap<String, String> {
    let Some(placement) = placement.filter(|_| pod.is_limited) else {
        return BTreeMap::new();
    };
    let held = |gpu: &Gpu| {
        placement
            .gpus
            .iter()
            .zip(&placement.held)
            .find(|(name, _)| name.names(gpu))
            .map(|(_, held)| held)
    };
    let mut env = BTreeMap::new();
    for (at, gpu) in gpus.iter().enumerate() {
        let Some(bytes) = held(gpu)
            .and_then(|held| held.bytes_of(gpu.memory_bytes))
            .or_else(|| settings.memory_unit.bytes_of(pod.memory_units()))
        else {
            continue;
        };
        if bytes > 0 && bytes < gpu.memory_bytes {
            // HAMi-core takes zero for no limit at all.
            env.insert(
                format!("{MEMORY_LIMIT}_{at}"),
                format!("{}m", (bytes >> 20).max(1)),
            );
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
