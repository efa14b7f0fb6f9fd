//! Parses the file of simulated devices. Every error names the file, the device, the field and its value.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proto::device::{TYPE_GPU, VirtualFunctionGroup};
use proto::quantity::Quantity;
use proto::resource::WHOLE_PERCENT;
use proto::topology::{GpuLinks, GpuPartitionPolicy, GpuPartitionTable, read_partitions};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::devices::inventory::{
    Gpu, InventoryError, NodeInventory, OtherDevice, PciLocation, PhysicalId, ProcessMemory, no_gpu, pci,
    percent_resource,
};

#[derive(Debug, Default)]
pub(super) struct SimulatedDevices {
    pub(super) inventory: NodeInventory,
    pub(super) health: BTreeMap<PhysicalId, SimulatedHealth>,
    pub(super) processes: Vec<ProcessMemory>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(super) enum SimulatedHealth {
    #[default]
    Healthy,
    Xid(u64),
    Lost,
}

impl TryFrom<String> for SimulatedHealth {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match (text.as_str(), text.strip_prefix("Xid ").map(str::parse)) {
            ("Healthy", _) => Ok(Self::Healthy),
            ("Lost", _) => Ok(Self::Lost),
            (_, Some(Ok(xid))) => Ok(Self::Xid(xid)),
            _ => Err(format!("{text:?} must be `Healthy`, `Lost` or `Xid <number>`")),
        }
    }
}

/// The whole file.
// With a misspelled field a test would simulate something else than it says.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, expecting = "a JSON object")]
struct DeviceFile {
    driver_version: Option<String>,
    #[serde(default)]
    needs_driver: bool,
    #[serde(default = "default_vendor")]
    vendor: String,
    gpus: Vec<SimulatedGpu>,
    #[serde(default)]
    devices: Vec<SimulatedOther>,
    #[serde(default)]
    gpu_links: Vec<GpuLinks>,
    #[serde(default, deserialize_with = "partitions")]
    gpu_partitions: Option<GpuPartitionTable>,
    gpu_partition_policy: Option<GpuPartitionPolicy>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, expecting = "a JSON object")]
struct SimulatedGpu {
    uuid: String,
    minor: u32,
    memory: Bytes,
    #[serde(default = "default_model")]
    model: String,
    bus_id: Option<String>,
    numa_node: Option<i32>,
    pcie_id: Option<String>,
    pcie_root: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    device_node: Option<PathBuf>,
    #[serde(default)]
    health: SimulatedHealth,
    #[serde(default)]
    processes: Vec<SimulatedProcess>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct SimulatedProcess {
    #[serde(default)]
    container: String,
    memory: Bytes,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, expecting = "a JSON object")]
struct SimulatedOther {
    #[serde(rename = "type", deserialize_with = "device_type")]
    device_type: String,
    id: String,
    minor: u32,
    resources: Option<BTreeMap<String, Quantity>>,
    bus_id: Option<String>,
    numa_node: Option<i32>,
    pcie_id: Option<String>,
    pcie_root: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    health: SimulatedHealth,
    #[serde(default)]
    vf_groups: Vec<VirtualFunctionGroup>,
    #[serde(default)]
    device_nodes: Vec<PathBuf>,
    #[serde(default)]
    function_nodes: BTreeMap<String, Vec<PathBuf>>,
}

/// A whole number of bytes above zero, written as a quantity.
#[derive(Deserialize)]
#[serde(try_from = "Quantity")]
struct Bytes(u64);

impl TryFrom<Quantity> for Bytes {
    type Error = String;

    fn try_from(quantity: Quantity) -> Result<Self, String> {
        match quantity.unsigned() {
            Some(bytes) if bytes > 0 => Ok(Self(bytes)),
            _ => Err(format!("{quantity} must be a whole number of bytes above zero")),
        }
    }
}

fn default_vendor() -> String {
    "nvidia".to_owned()
}

fn default_model() -> String {
    "Simulated".to_owned()
}

/// Reads the table of GPU partitions, whose format has a parser of its own.
fn partitions<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<GpuPartitionTable>, D::Error> {
    let Some(value) = Option::<Value>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let table = read_partitions(&value.to_string());
    table.map(Some).map_err(D::Error::custom)
}

/// Reads the type of a device other than a GPU, and checks its form.
fn device_type<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text == TYPE_GPU {
        return Err(D::Error::custom("GPUs are listed in `gpus`"));
    }
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_bounded = !text.is_empty() && !text.starts_with('-') && !text.ends_with('-') && text.len() <= 63;
    if is_bounded && text.bytes().all(is_allowed) {
        Ok(text)
    } else {
        Err(D::Error::custom(format!(
            "{text:?} must be lower-case letters, digits and `-`"
        )))
    }
}

/// Parses the text of the file at `path`; the name `node` replaces `{node}` in IDs.
pub(super) fn parse(path: &Path, node: &str, text: &[u8]) -> Result<SimulatedDevices, InventoryError> {
    let mut json = serde_json::Deserializer::from_slice(text);
    let invalid = format!("the device file {} is invalid", path.display());
    let file: DeviceFile = match serde_path_to_error::deserialize(&mut json) {
        Ok(file) => file,
        Err(error) => return Err(InventoryError::failed(invalid, error)),
    };
    // A second object behind the first would be ignored otherwise.
    if let Err(error) = json.end() {
        return Err(InventoryError::failed(invalid, error));
    }
    if file.gpus.is_empty() && file.devices.is_empty() {
        return Err(no_gpu(path));
    }
    file.into_devices(node).map_err(|rule| InventoryError::Failed {
        problem: format!("{invalid}: {rule}"),
        source: None,
    })
}

impl DeviceFile {
    fn into_devices(self, node: &str) -> Result<SimulatedDevices, String> {
        let mut found = SimulatedDevices {
            inventory: NodeInventory {
                needs_driver: self.needs_driver,
                driver_version: self.driver_version,
                vendor: self.vendor,
                links: self.gpu_links,
                partitions: self.gpu_partitions,
                partition_policy: self.gpu_partition_policy,
                ..NodeInventory::default()
            },
            ..SimulatedDevices::default()
        };
        for (index, gpu) in (0..).zip(self.gpus) {
            let added = gpu.add_to(&mut found, index, node);
            added.map_err(|rule| format!("gpus[{index}].{rule}"))?;
        }
        for (index, device) in self.devices.into_iter().enumerate() {
            let added = device.add_to(&mut found, node);
            added.map_err(|rule| format!("devices[{index}].{rule}"))?;
        }
        let NodeInventory { gpus, others, .. } = &mut found.inventory;
        gpus.sort_by_key(|gpu| gpu.minor);
        others.sort_by_cached_key(|other| (other.device_type.clone(), other.minor));
        Ok(found)
    }
}

impl SimulatedGpu {
    fn add_to(self, found: &mut SimulatedDevices, index: u32, node: &str) -> Result<(), String> {
        let uuid: PhysicalId = parse_id("uuid", node, &self.uuid)?;
        for other in &found.inventory.gpus {
            if other.uuid == uuid {
                return Err(format!("uuid: {uuid} is that of gpus[{}] already", other.index));
            }
            if other.minor == self.minor {
                return Err(format!(
                    "minor: {} is that of gpus[{}] already",
                    self.minor, other.index
                ));
            }
        }
        for process in self.processes {
            found.processes.push(ProcessMemory {
                gpu: uuid.clone(),
                // A placeholder: a simulated process has no PID, and its container is found by the container's ID.
                pid: 0,
                container: Some(process.container),
                bytes: process.memory.0,
            });
        }
        found.health.insert(uuid.clone(), self.health);
        let usual_node = PathBuf::from(format!("/dev/nvidia{}", self.minor));
        found.inventory.gpus.push(Gpu {
            uuid,
            minor: self.minor,
            index,
            memory_bytes: self.memory.0,
            reserved_bytes: 0,
            model: self.model,
            bus_id: self.bus_id,
            location: location(self.numa_node, self.pcie_id, self.pcie_root),
            labels: self.labels,
            device_node: self.device_node.unwrap_or(usual_node),
        });
        Ok(())
    }
}

impl SimulatedOther {
    fn add_to(self, found: &mut SimulatedDevices, node: &str) -> Result<(), String> {
        let id: PhysicalId = parse_id("id", node, &self.id)?;
        if found.health.contains_key(&id) {
            return Err(format!("id: {id} is that of another device already"));
        }
        for other in &found.inventory.others {
            if other.device_type == self.device_type && other.minor == self.minor {
                return Err(format!("minor: {} is that of {} already", self.minor, other.id));
            }
        }
        // The watch would report the XID, and the device would stay unhealthy until a reset that no adapter has.
        if matches!(self.health, SimulatedHealth::Xid(_)) {
            return Err("health: only GPUs have XIDs; it must be `Healthy` or `Lost`".to_owned());
        }
        let nodes_of_functions = self.function_nodes.values().flatten();
        for path in self.device_nodes.iter().chain(nodes_of_functions) {
            if !path.is_absolute() {
                return Err(format!(
                    "deviceNodes, functionNodes: {} must be an absolute path",
                    path.display()
                ));
            }
        }
        found.health.insert(id.clone(), self.health);
        found.inventory.others.push(OtherDevice {
            resources: resources(&self.device_type, self.resources)?,
            device_type: self.device_type,
            id,
            minor: self.minor,
            labels: self.labels,
            bus_id: self.bus_id,
            location: location(self.numa_node, self.pcie_id, self.pcie_root),
            vf_groups: self.vf_groups,
            device_nodes: self.device_nodes,
            function_nodes: self.function_nodes,
        });
        Ok(())
    }
}

/// The place of a device in the PCI tree; the ID of a root complex in `pcieId` means that the device is below no switch.
fn location(numa_node: Option<i32>, pcie_id: Option<String>, pcie_root: Option<String>) -> PciLocation {
    // sysfs shows -1 for a NUMA node that is not known.
    let numa_node = numa_node.filter(|node| *node >= 0);
    let (root, switch) = match pcie_id {
        Some(id) if pci::is_root_complex(&id) => (pcie_root.or(Some(id)), None),
        switch => (pcie_root, switch),
    };
    PciLocation {
        numa_node,
        root,
        switch,
    }
}

fn parse_id(field: &str, node: &str, id: &str) -> Result<PhysicalId, String> {
    let parsed = fill_in_node(node, id).parse();
    parsed.map_err(|error| format!("{field}: {error}"))
}

/// The ID with the node's name in place of `{node}`; with the name's hash if it would be too long otherwise.
pub(super) fn fill_in_node(node: &str, id: &str) -> String {
    let readable = id.replace("{node}", node);
    // A `PhysicalId` is short, since kubelet's device IDs and variables of containers contain it.
    if readable.len() <= PhysicalId::MAX_LEN {
        return readable;
    }
    id.replace("{node}", &format!("{:016x}", crate::fnv::fnv1a(node)))
}

/// The resources of a device: those that the file names, else 100 (percent) of the one that is named after the device's type.
fn resources(
    device_type: &str,
    named: Option<BTreeMap<String, Quantity>>,
) -> Result<BTreeMap<String, Quantity>, String> {
    let Some(named) = named else {
        let resource =
            percent_resource(device_type).ok_or("resources: missing, and the type has no default")?;
        return Ok([(resource.to_owned(), Quantity::from_unsigned(WHOLE_PERCENT))].into());
    };
    if named.is_empty() {
        return Err("resources: {} must name a resource".to_owned());
    }
    for (name, amount) in &named {
        if *amount < Quantity::default() {
            return Err(format!("resources: {name} {amount} must not be negative"));
        }
    }
    Ok(named)
}
