//! The content of an answer to Allocate and of a CDI spec: a container's variables and device nodes. Pure except that it checks
//! which device nodes and vendor's specs exist.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::{CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount};
use proto::record::{
    DRIVER_MEMORY_LIMIT, FPGA_DEVICES, FPGA_FUNCTIONS, GPU_DEVICES, MEM_CONTAINER, MEM_DEV, MEM_IDX, MEM_POD,
    RDMA_DEVICES, RDMA_FUNCTIONS, VISIBLE_DEVICES,
};
use proto::request::ContainerRequest;
use serde_json::{Value, json};

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{DeviceKey, NodeFleet};
use crate::devices::inventory::{Gpu, OtherDevice, PhysicalId};
use crate::inject::cdi::{self, Edits};
use crate::inject::enforcement::limits::{Recipient, is_of_hami_core, limits};
use crate::inject::hami_core::HamiCore;
use crate::inject::mode::VOID;
use crate::inject::settings::NodeSettings;

/// Device nodes that go with every NVIDIA GPU, as far as they exist.
const COMMON_NODES: [&str; 3] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];

/// True if the answer for this resource names the container's devices: of the answers for resources of one device type exactly
/// one does.
pub(crate) fn names_devices(resource: ExtendedResource, container: &ContainerRequest) -> bool {
    // If two answers set different values of a variable, kubelet would keep one of them at random.
    match resource {
        ExtendedResource::Memory | ExtendedResource::Rdma | ExtendedResource::Fpga => true,
        ExtendedResource::Shared => container.memory_units == 0,
        ExtendedResource::Whole => container.memory_units == 0 && container.shared == 0,
    }
}

/// The variable by which an answer without CDI names a container's devices of a resource's type: for GPUs the vendor's.
pub(crate) fn visible_variable(resource: ExtendedResource) -> &'static str {
    let own = own_variable(resource);
    if own == GPU_DEVICES { VISIBLE_DEVICES } else { own }
}

/// This project's variable that names a container's devices of a resource's type.
pub(crate) fn own_variable(resource: ExtendedResource) -> &'static str {
    match resource {
        ExtendedResource::Shared | ExtendedResource::Memory | ExtendedResource::Whole => GPU_DEVICES,
        ExtendedResource::Rdma => RDMA_DEVICES,
        ExtendedResource::Fpga => FPGA_DEVICES,
    }
}

/// The variable that names a container's virtual functions of devices of a resource's type.
pub(crate) fn functions_variable(resource: ExtendedResource) -> Option<&'static str> {
    match resource {
        ExtendedResource::Shared | ExtendedResource::Memory | ExtendedResource::Whole => None,
        ExtendedResource::Rdma => Some(RDMA_FUNCTIONS),
        ExtendedResource::Fpga => Some(FPGA_FUNCTIONS),
    }
}

/// The devices that the value of a variable names, in its order, GPUs also by index; none if one of them is not on this node.
pub(crate) fn named_devices(
    resource: ExtendedResource,
    value: &str,
    fleet: &NodeFleet,
) -> Option<Vec<PhysicalId>> {
    let names = value.split(',');
    names.map(|name| named_device(resource, name, fleet)).collect()
}

/// The ID of the device that a word in an answer to Allocate names: by its ID, or, for a GPU, by the driver's index.
fn named_device(resource: ExtendedResource, name: &str, fleet: &NodeFleet) -> Option<PhysicalId> {
    let device_type = resource.device_type();
    let mut entries = fleet.entries(device_type);
    if let Some(entry) = entries.find(|entry| entry.key.id.as_str() == name) {
        return Some(entry.key.id);
    }
    if device_type != TYPE_GPU {
        return None;
    }
    // NVIDIA's runtime takes indices too, and the old gpushare plugin answered with them.
    let index: u32 = name.parse().ok()?;
    let entry = fleet.gpus.iter().find(|entry| entry.device.index == index)?;
    Some(entry.device.uuid.clone())
}

/// The devices that a container gets.
#[derive(Clone, Debug)]
pub(crate) enum AssignedDevices<'a> {
    Gpus(Vec<&'a Gpu>),
    Others(Vec<&'a OtherDevice>),
}

impl<'a> AssignedDevices<'a> {
    /// Looks up the devices with these keys in the fleet, in this order. Keys of devices that are not on this node are left out.
    pub(crate) fn find(fleet: &'a NodeFleet, resource: ExtendedResource, keys: &[DeviceKey]) -> Self {
        let device_type = resource.device_type();
        if device_type == TYPE_GPU {
            return Self::Gpus(keys.iter().filter_map(|key| fleet.gpu(&key.id)).collect());
        }
        let mut devices = Vec::new();
        for key in keys {
            let mut entries = fleet.devices_of(device_type);
            if let Some(entry) = entries.find(|entry| entry.device.id == key.id) {
                devices.push(&entry.device);
            }
        }
        Self::Others(devices)
    }

    pub(crate) fn ids(&self) -> String {
        let ids: Vec<&str> = match self {
            Self::Gpus(gpus) => gpus.iter().map(|gpu| gpu.uuid.as_str()).collect(),
            Self::Others(devices) => devices.iter().map(|device| device.id.as_str()).collect(),
        };
        ids.join(",")
    }
}

/// The answer to Allocate with CDI: a function of the device IDs and of a number that no other answer has.
pub(crate) fn cdi_answer(
    resource: ExtendedResource,
    ids: &[String],
    fresh: u64,
) -> ContainerAllocateResponse {
    let device = CdiDevice {
        name: cdi::container_device(resource, ids, fresh),
    };
    let mut answer = ContainerAllocateResponse::default();
    if resource.device_type() == TYPE_GPU {
        // If the runtime ignores CDI devices, the container gets no GPU rather than those that its image names.
        answer.envs.insert(VISIBLE_DEVICES.to_owned(), VOID.to_owned());
        let name = cdi::DRIVER_DEVICE.to_owned();
        answer.cdi_devices.push(CdiDevice { name });
    }
    answer.cdi_devices.push(device);
    answer
}

/// The answer to Allocate by the vendor's variable. Without a recipient (the pod is not known) it has no limits.
pub(crate) fn variable_answer(
    settings: &NodeSettings,
    recipient: Option<&Recipient<'_>>,
    resource: ExtendedResource,
    assigned: &AssignedDevices<'_>,
) -> ContainerAllocateResponse {
    let mut envs = HashMap::new();
    // Limits and the variables of the old gpushare plugin need the pod; the devices follow from the IDs alone.
    if let Some(recipient) = recipient {
        envs.extend(variables(settings, recipient, resource, assigned));
    }
    let mut mounts = Vec::new();
    if envs.keys().any(|name| is_of_hami_core(name)) {
        for (host, container) in settings.hami_core.iter().flat_map(HamiCore::files) {
            mounts.push(Mount {
                host_path: host.to_string_lossy().into_owned(),
                container_path: container.to_string_lossy().into_owned(),
                read_only: true,
            });
        }
    }
    let mut devices = Vec::new();
    if recipient.is_none_or(|recipient| names_devices(resource, recipient.container)) {
        envs.insert(visible_variable(resource).to_owned(), assigned.ids());
        envs.insert(own_variable(resource).to_owned(), assigned.ids());
        // NVIDIA's runtime finds the nodes of GPUs itself, and knows nothing of other devices.
        if let AssignedDevices::Others(others) = assigned {
            for path in device_nodes(settings, recipient, resource, others) {
                let path = path.to_string_lossy().into_owned();
                devices.push(DeviceSpec {
                    container_path: path.clone(),
                    host_path: path,
                    permissions: "rw".to_owned(),
                });
            }
        }
    }
    ContainerAllocateResponse {
        envs,
        devices,
        mounts,
        ..ContainerAllocateResponse::default()
    }
}

/// The edits of the CDI device that brings the driver: `edits` of a vendor's spec, and the common nodes that exist.
pub(crate) fn driver_edits(settings: &NodeSettings, mut edits: Edits) -> Edits {
    // NVIDIA's runtime would otherwise give a container the GPUs that its image names, beside those of the CDI devices.
    edits.env.insert(VISIBLE_DEVICES.to_owned(), VOID.to_owned());
    let mut listed = Vec::new();
    for node in &edits.device_nodes {
        listed.extend(node.get("path").and_then(Value::as_str).map(str::to_owned));
    }
    for path in COMMON_NODES {
        // The vendor's spec may name another path on the host for the same node, and its path counts.
        if !listed.iter().any(|listed| listed == path) && is_on_host(settings, Path::new(path)) {
            edits.add_node(Path::new(path));
        }
    }
    edits
}

/// The edits for one resource of a container: device nodes, variables, and the hooks and files that limit the container.
pub(crate) fn cdi_edits(
    settings: &NodeSettings,
    recipient: &Recipient<'_>,
    resource: ExtendedResource,
    assigned: &AssignedDevices<'_>,
) -> Edits {
    let mut edits = Edits {
        env: variables(settings, recipient, resource, assigned),
        ..Edits::default()
    };
    // A spec without any edit is invalid, and the specs of two resources of a container set the same value.
    let variable = own_variable(resource).to_owned();
    edits.env.insert(variable, assigned.ids());
    let has_nodes = names_devices(resource, recipient.container);
    match assigned {
        AssignedDevices::Gpus(gpus) => {
            for gpu in gpus.iter().filter(|_| has_nodes) {
                add_nodes_of_gpu(&mut edits, settings, gpu);
            }
            add_limiters(&mut edits, settings, gpus);
            // The CDI spec's value counts, also where the pod sets its own: with `void` NVIDIA's runtime adds no GPU.
            edits.env.insert(VISIBLE_DEVICES.to_owned(), VOID.to_owned());
        }
        AssignedDevices::Others(others) if has_nodes => {
            for path in device_nodes(settings, Some(recipient), resource, others) {
                edits.add_node(&path);
            }
        }
        AssignedDevices::Others(_) => {}
    }
    edits
}

/// Adds the device nodes of a GPU: those that a vendor's spec names, else its own.
fn add_nodes_of_gpu(edits: &mut Edits, settings: &NodeSettings, gpu: &Gpu) {
    if let Some(nodes) = settings.vendor_specs.nodes(gpu) {
        edits.device_nodes.extend(nodes);
    } else if is_on_host(settings, &gpu.device_node) {
        edits.add_node(&gpu.device_node);
    }
}

/// True if edits have limits for the driver, and lack NVIDIA's hook that passes the limits to the driver.
pub(crate) fn lacks_limit_hook(edits: &Edits) -> bool {
    edits.env.contains_key(DRIVER_MEMORY_LIMIT) && !edits.others.contains_key("hooks")
}

/// If the edits have limits, adds the parts that enforce them: HAMi-core's files, and NVIDIA's hook of each GPU.
fn add_limiters(edits: &mut Edits, settings: &NodeSettings, gpus: &[&Gpu]) {
    if edits.env.keys().any(|name| is_of_hami_core(name)) {
        let mut mounts = Vec::new();
        for (host, container) in settings.hami_core.iter().flat_map(HamiCore::files) {
            // A container that could write to the library would change it for all containers.
            let options = ["ro", "nosuid", "nodev", "bind"];
            mounts.push(json!({"hostPath": host, "containerPath": container, "options": options}));
        }
        if !mounts.is_empty() {
            edits.others.insert("mounts".to_owned(), Value::Array(mounts));
        }
    }
    if edits.env.contains_key(DRIVER_MEMORY_LIMIT) {
        let mut hooks = Vec::new();
        for gpu in gpus {
            // Hooks of some GPUs alone would leave the others unlimited; without any hook the start waits for a spec that has it.
            let Some(hook) = settings.vendor_specs.limit_hook(gpu) else {
                return;
            };
            // The spec needs the newest version among those of its hooks.
            edits.version = edits.version.take().max(Some(hook.cdi_version));
            hooks.push(hook.hook);
        }
        edits.others.insert("hooks".to_owned(), Value::Array(hooks));
    }
}

/// The device nodes of these devices that exist on the host: of a device's virtual functions if the pod has some, else its own.
/// Without a recipient the pod is not known, and gets those of the devices.
fn device_nodes(
    settings: &NodeSettings,
    recipient: Option<&Recipient<'_>>,
    resource: ExtendedResource,
    devices: &[&OtherDevice],
) -> Vec<PathBuf> {
    let mut paths = Vec::<PathBuf>::new();
    for device in devices {
        let functions = recipient.map_or(&[][..], |recipient| given_vfs(recipient, resource, device));
        if functions.is_empty() {
            paths.extend(device.device_nodes.iter().cloned());
        }
        for function in functions {
            let nodes = device.function_nodes.get(function.as_str());
            paths.extend(nodes.into_iter().flatten().cloned());
        }
    }
    // Some files belong to all adapters of the node, and a container may get several.
    let mut unique = Vec::with_capacity(paths.len());
    for path in paths {
        if !unique.contains(&path) && is_on_host(settings, &path) {
            unique.push(path);
        }
    }
    unique
}

/// True if the host has this file. Answers and specs name paths of the host, wherever this process sees them.
fn is_on_host(settings: &NodeSettings, path: &Path) -> bool {
    let below_root = path.strip_prefix("/").unwrap_or(path);
    settings.device_root.join(below_root).exists()
}

/// The virtual functions of this device that the record of the pod gives the pod.
fn given_vfs<'a>(
    recipient: &Recipient<'a>,
    resource: ExtendedResource,
    device: &OtherDevice,
) -> &'a [PhysicalId] {
    let placement = recipient.placement;
    let portion = placement.and_then(|placement| placement.portion(resource, &DeviceKey::from(device)));
    portion.map_or(&[], |portion| &portion.virtual_functions)
}

/// The variables of a container except those that name its devices; those that name virtual functions are among them.
fn variables(
    settings: &NodeSettings,
    recipient: &Recipient<'_>,
    resource: ExtendedResource,
    assigned: &AssignedDevices<'_>,
) -> BTreeMap<String, String> {
    let devices = match assigned {
        AssignedDevices::Gpus(gpus) => return gpu_variables(settings, recipient, resource, gpus),
        AssignedDevices::Others(devices) => devices,
    };
    let mut names = Vec::new();
    for device in devices {
        let functions = given_vfs(recipient, resource, device);
        names.extend(functions.iter().map(PhysicalId::as_str));
    }
    match functions_variable(resource) {
        Some(variable) if !names.is_empty() => [(variable.to_owned(), names.join(","))].into(),
        _ => BTreeMap::new(),
    }
}

/// The variables of the old gpushare plugin, and those that limit the container.
fn gpu_variables(
    settings: &NodeSettings,
    recipient: &Recipient<'_>,
    resource: ExtendedResource,
    gpus: &[&Gpu],
) -> BTreeMap<String, String> {
    let container = recipient.container;
    let mut env = BTreeMap::new();
    if names_devices(resource, container) {
        env.extend(limits(settings.memory_unit, recipient, gpus));
    }
    if let (ExtendedResource::Memory, Some(gpu)) = (resource, gpus.first()) {
        let (mut pod_units, mut device_units) = (0, 0);
        if let Some(record) = recipient.placement.and_then(|placement| placement.gpushare) {
            (pod_units, device_units) = (record.pod_units, record.device_units);
        }
        // Records of old versions of the gpushare extender may lack the amounts.
        if pod_units == 0 {
            pod_units = recipient.pod.peak(ExtendedResource::Memory);
        }
        if device_units == 0 {
            device_units = settings.memory_unit.units_in(gpu.memory_bytes);
        }
        env.insert(MEM_IDX.to_owned(), gpu.minor.to_string());
        env.insert(MEM_POD.to_owned(), pod_units.to_string());
        env.insert(MEM_CONTAINER.to_owned(), container.memory_units.to_string());
        env.insert(MEM_DEV.to_owned(), device_units.to_string());
    }
    env
}

#[cfg(test)]
mod tests;
