//! The devices of a node in the engine's terms: as its Device object reports them, or as its capacity suggests where there is
//! no object.
//!
//! Pure. A device or annotation that cannot be read is left out and reported; all other devices and annotations are used.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use placement::{
    Device, DeviceAttributes, DeviceLocation, DeviceType, Devices, DevicesOfType, FunctionGroup, FunctionId,
    Inventory, Labels, LimitLevel, ResourceName, SwitchId, VirtualFunction,
};
use proto::closed_gpus::{CLOSED_GPUS, ClosedGpus};
use proto::device::{
    DeviceCondition, DeviceInfo, DeviceTopology, ENFORCED_BY_DRIVER, ENFORCEMENT, GPU_MODEL_LABEL,
    GPU_VENDOR_LABEL, RESERVED_MEMORY, SERVES_VENDOR_LABEL, SHARING_LABEL,
};
use proto::kubelet_allocations::KubeletAllocations;
use proto::memory_unit::MemoryUnit;
use proto::node::Node;
use proto::resource::{
    DEFAULT_SLOTS, GPU_CORE, GPU_COUNT, GPU_MEMORY, GPU_SHARED, ISOLATION_PROVIDER, ResourceNames, canonical,
};
use proto::topology::{GPU_PARTITION_POLICY, NUMA_NODE, NUMA_UNKNOWN};
use serde::Deserialize;
use serde_json::Value;

pub(crate) mod device_types;
mod partitions;

use partitions::{ReportedTable, value_of};

/// Most GPUs that are read out of a node's capacity; a larger number is an error of its author.
const MAX_GPUS: u64 = 1024;
/// The largest amount of a resource of a device that is no GPU. The engine has the same limit for the memory of a GPU.
const MAX_AMOUNT: u64 = 1 << 50;
/// Longest part of a device's ID that a problem shows, in characters.
const MAX_SHOWN_ID: usize = 64;
/// Most bytes of keys and values in the labels of a device and its virtual functions. The scheduler keeps several copies of a
/// device's labels: 1 MiB of them in one Device object would take 5 MiB of memory.
const MAX_LABELS: usize = 4096;
/// The status of a condition that its writer can neither confirm nor deny.
const STATUS_UNKNOWN: &str = "Unknown";
/// Prefix of the UUIDs of NVIDIA's driver.
const UUID_PREFIX: &str = "GPU-";
/// Prefix of the IDs that the scheduler makes up for devices without an ID, which are known by their minor only.
const GENERATED: &str = "minor-";
/// Labels of Node objects that [`trim`] keeps.
const NODE_LABELS: [&str; 4] = [
    ISOLATION_PROVIDER,
    GPU_VENDOR_LABEL,
    GPU_MODEL_LABEL,
    GPU_PARTITION_POLICY,
];

/// A node's devices as far as they can be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeReport {
    /// The devices, and the memory unit: the bytes that each 1 in a request for [`ResourceNames::memory`] stands for.
    pub inventory: Inventory,
    /// True if the size of a memory unit is unknown. A unit counts as 1 MiB then, and only requests in units can be compared.
    pub is_unit_unknown: bool,
    /// The parts that could not be read, for people.
    pub problems: Vec<String>,
    /// The problem of the partition table: it cannot be read, names GPUs that are not listed, or is not used.
    pub table_problem: Option<String>,
    /// The problem that kubelet has allocated GPUs under IDs that may stand for any GPU of the node.
    pub allocation_problem: Option<String>,
    /// The problem of the Node's annotation that closes GPUs: a part of its value names none of the node's.
    pub closing_problem: Option<String>,
}

/// The devices that a Device object reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceReport {
    /// The devices and the links between them; the Node object adds the memory unit and partitions.
    inventory: Inventory,
    /// The partition table in the object's annotation.
    table: ReportedTable,
    /// The condition [`proto::device::CONDITION_REPORT_VALID`] of the GPUs, while it is not true.
    condition: Option<DeviceCondition>,
    /// The parts of the object that cannot be read, for people.
    problems: Vec<String>,
    /// [`NodeReport::allocation_problem`].
    allocation_problem: Option<String>,
    /// True if `problems` has one of an annotation: the plugin's condition has the same one in other words.
    has_unusable_annotation: bool,
}

/// A node's devices; `None` if it has none, or if its Device object is needed and has not been seen yet.
pub fn report(node: &Node, device: Option<&DeviceReport>, names: &ResourceNames) -> Option<NodeReport> {
    let mut report = match device {
        // The Device object names each device; the capacity has sums alone.
        Some(device) => {
            let has_content = device.inventory.has_devices() || !device.problems.is_empty();
            has_content.then(|| device.with_node(node, names))
        }
        // A plugin that states GPU memory in bytes writes a Device object too. Until the watch shows it, dividing the capacity
        // evenly among the GPUs would be a guess.
        None if node.capacity(GPU_MEMORY).is_some() => None,
        None => of_capacity(node, names),
    }?;
    report.close(&ClosedGpus::read(node.metadata.annotations.as_ref()));
    Some(report)
}

impl NodeReport {
    /// Closes to new pods the GPUs that the Node's annotation names, and reports a part of its value that names no GPU.
    fn close(&mut self, closed: &ClosedGpus) {
        let gpus = &mut self.inventory.gpus;
        let known: Vec<u32> = gpus.iter().map(|gpu| gpu.minor).collect();
        // `iter_mut` copies the devices, which this report shares with the report of the Device object.
        if !closed.is_empty() {
            for gpu in gpus.iter_mut() {
                gpu.closed = closed.has(gpu.minor);
            }
        }
        // Before the node's GPUs are known, any minor may be one of theirs.
        self.closing_problem = closed.problem(&known).filter(|_| !known.is_empty());
        self.problems.extend(self.closing_problem.clone());
    }
}

/// The parts of a node that the index needs: those that [`report`] reads, and the `PreferNoSchedule` taints. Nodes are large and
/// many.
pub(crate) fn trim(node: &Node, names: &ResourceNames) -> Node {
    let mut trimmed = Node::default();
    let key = names.memory_unit_annotation();
    trimmed.metadata.annotations = retained(node.metadata.annotations.as_ref(), &[&key, CLOSED_GPUS]);
    trimmed.metadata.labels = retained(node.metadata.labels.as_ref(), &NODE_LABELS);
    let taints = node.spec.taints.iter();
    let taints = taints.filter(|taint| taint.is_prefer_no_schedule());
    trimmed.spec.taints = taints.cloned().collect();
    for resource in [names.memory.as_str(), GPU_COUNT, GPU_MEMORY] {
        if let Some(value) = node.status.capacity.get(resource) {
            trimmed.status.capacity.insert(resource.to_owned(), value.clone());
        }
    }
    trimmed
}

/// The entries of labels or annotations with these keys; `None` if there are none.
fn retained(map: Option<&BTreeMap<String, String>>, keys: &[&str]) -> Option<BTreeMap<String, String>> {
    let mut retained = BTreeMap::new();
    for key in keys {
        if let Some((key, value)) = map?.get_key_value(*key) {
            retained.insert(key.clone(), value.clone());
        }
    }
    (!retained.is_empty()).then_some(retained)
}

impl DeviceReport {
    /// Reads a Device object, without the plugin's reports on pods.
    pub fn of(metadata: &ObjectMeta, spec: &Value) -> Self {
        let mut report = Self::default();
        let inventory = &mut report.inventory;
        for map in [&metadata.labels, &metadata.annotations] {
            inventory.serves_vendor |= value_of(map.as_ref(), SERVES_VENDOR_LABEL) == Some("true");
        }
        let entries = match spec.get("devices") {
            None | Some(Value::Null) => &[],
            Some(Value::Array(entries)) => entries.as_slice(),
            Some(_) => {
                let problem = "Device object: spec.devices is no list";
                report.problems.push(problem.to_owned());
                &[]
            }
        };
        let mut by_type: Vec<(DeviceType, Vec<Device>)> = Vec::new();
        for (at, entry) in entries.iter().enumerate() {
            match report.read(entry) {
                Ok((kind, device)) => match by_type.iter_mut().find(|(of_type, _)| *of_type == kind) {
                    Some((_, devices)) => devices.push(device),
                    None => by_type.push((kind, vec![device])),
                },
                Err(problem) => {
                    let problem = format!("Device object: spec.devices[{at}]: {problem}");
                    report.problems.push(problem);
                }
            }
        }
        // The object lists devices of all types, so that an empty list means that there are none.
        let others = report.inventory.other_devices.insert(Vec::new());
        for (kind, devices) in by_type {
            let devices = devices.into();
            if kind == DeviceType::Gpu {
                report.inventory.gpus = devices;
            } else {
                others.push(DevicesOfType { kind, devices });
            }
        }
        let gpus = &report.inventory.gpus;
        report.table = ReportedTable::read(metadata, gpus, report.condition.as_ref());
        let (links, problem_of_links) = partitions::links(metadata, gpus);
        report.inventory.links = links;
        let problem_of_table = report.table.mistake();
        for problem in problem_of_table.into_iter().chain(problem_of_links) {
            report.add_annotation_problem(problem);
        }
        report
    }

    /// Adds the problem of an annotation that cannot be read, or names a device that is not listed.
    pub(crate) fn add_annotation_problem(&mut self, problem: impl fmt::Display) {
        self.problems.push(format!("Device object: {problem}"));
        self.has_unusable_annotation = true;
    }

    /// Adds a problem if the annotation with this key names a GPU, allocated by kubelet, that the object does not list.
    pub(crate) fn check_allocations(&mut self, key: &str, allocations: &KubeletAllocations) {
        let gpus = &self.inventory.gpus;
        let is_listed = |id: &str| gpus.iter().any(|gpu| gpu.id.as_str() == id);
        let Some(id) = allocations.unlisted_gpu(is_listed) else {
            return;
        };
        let shown: String = id.chars().take(MAX_SHOWN_ID).collect();
        let problem = format!("annotation {key} names GPU {shown:?}, which the object does not list");
        if is_certainly_absent(id, &self.inventory) {
            self.add_annotation_problem(format_args!("{problem}; it counts on no other GPU"));
        } else {
            let problem = format!("{problem}; until it names GPUs by UUID, no GPU of the node is shared");
            self.add_annotation_problem(&problem);
            self.allocation_problem = Some(problem);
        }
    }

    /// Reads one device of a Device object, and the condition of a GPU; an error is the reason for which the device cannot be
    /// used, for people.
    fn read(&mut self, entry: &Value) -> Result<(DeviceType, Device), String> {
        let info = DeviceInfo::deserialize(entry).map_err(|error| error.to_string())?;
        let kind = match info.device_type.as_str() {
            "" => DeviceType::Gpu,
            name => DeviceType::from(name),
        };
        let device = device(&kind, &info)?;
        if kind == DeviceType::Gpu && self.condition.is_none() {
            self.condition = partitions::report_condition(&info.conditions).cloned();
        }
        Ok((kind, device))
    }

    /// Devices of other types than GPU.
    pub(crate) fn other_devices(&self) -> &[DevicesOfType] {
        self.inventory.other_devices.as_deref().unwrap_or_default()
    }

    /// The devices of a node with this Device object. The Node object adds the memory unit and labels.
    fn with_node(&self, node: &Node, names: &ResourceNames) -> NodeReport {
        let mut problems = self.problems.clone();
        // The condition's message is the plugin's text, which would repeat the problem of an annotation.
        if let Some(condition) = &self.condition
            && condition.status != STATUS_UNKNOWN
            && !self.has_unusable_annotation
        {
            problems.push(condition.message.clone());
        }
        let unit = published_unit(node, names, &mut problems);
        NodeReport {
            inventory: Inventory {
                unit_bytes: unit.map(MemoryUnit::bytes),
                partitions: self.table.table(node, &self.inventory.gpus),
                has_unreadable_partitions: self.table.is_unreadable,
                ..self.inventory.clone()
            },
            problems,
            table_problem: self.table.problem.clone(),
            allocation_problem: self.allocation_problem.clone(),
            ..NodeReport::default()
        }
    }
}

/// Returns true if no listed GPU can be the one with this ID, since both the ID and the list have UUIDs of NVIDIA's driver. Any
/// other ID, such as an index, may stand for any GPU.
pub(crate) fn is_certainly_absent(id: &str, inventory: &Inventory) -> bool {
    let mut gpus = inventory.gpus.iter();
    id.starts_with(UUID_PREFIX)
        && gpus.all(|gpu| gpu.id.as_str().starts_with(UUID_PREFIX) && gpu.id.as_str() != id)
}

/// Reads a device of a Device object: memory, compute and slots of a GPU, or all resources of a device of another type.
fn device(kind: &DeviceType, info: &DeviceInfo) -> Result<Device, String> {
    let minor = minor(info)?;
    let id = match info.id.as_str() {
        "" => generated_id(minor),
        id => id.to_owned(),
    };
    let mut n_bytes = 0;
    let labels_of_functions = info.vf_groups.iter().flat_map(|group| &group.labels);
    for (key, value) in info.labels.iter().chain(labels_of_functions) {
        n_bytes += key.len() + value.len();
    }
    if n_bytes > MAX_LABELS {
        return Err(format!("labels have {n_bytes} bytes, more than {MAX_LABELS}"));
    }
    let mut device = Device {
        healthy: info.health,
        attributes: attributes(info),
        ..Device::new(id, minor)
    };
    if *kind == DeviceType::Gpu {
        device.sharing = value_of(Some(&info.labels), SHARING_LABEL) != Some("disabled");
        let memory = amount(info, GPU_MEMORY)?;
        device.memory_bytes = memory.ok_or_else(|| format!("resources has no {GPU_MEMORY}"))?;
        // A label with more than the offered memory is ignored. The amount only keeps that which earlier pods hold from being
        // reported as too much.
        let reserved = info.labels.get(RESERVED_MEMORY);
        let reserved = reserved.and_then(|label| label.parse().ok()).unwrap_or(0);
        if reserved <= device.memory_bytes {
            device.reserved_bytes = reserved;
        }
        device.core = count(info, GPU_CORE, 100)?;
        device.slots = count(info, GPU_SHARED, DEFAULT_SLOTS)?;
        return Ok(device);
    }
    for (name, quantity) in &info.resources {
        let Some(amount @ ..=MAX_AMOUNT) = quantity.unsigned() else {
            return Err(format!("{name} is {quantity}, not a whole number up to 2^50"));
        };
        let name = ResourceName::from(canonical(name));
        device.resources.insert(name, amount);
    }
    Ok(device)
}

/// The amount of a GPU's resource, by whichever of its names the object has.
fn amount(info: &DeviceInfo, resource: &str) -> Result<Option<u64>, String> {
    let mut found = None;
    for (name, quantity) in &info.resources {
        if canonical(name) == resource {
            let amount = quantity.unsigned();
            found = Some(amount.ok_or_else(|| format!("{resource} is {quantity}, not a whole number"))?);
        }
    }
    Ok(found)
}

/// The amount of a GPU's resource as a `u32`; `usual` if the GPU does not list the resource.
fn count(info: &DeviceInfo, resource: &str, usual: u32) -> Result<u32, String> {
    let Some(count) = amount(info, resource)? else {
        return Ok(usual);
    };
    u32::try_from(count).map_err(|_| format!("{resource} is {count}, which is absurd"))
}

/// The minor of a device, which must be a whole number from 0 on.
fn minor(info: &DeviceInfo) -> Result<u32, String> {
    let minor = info.minor.ok_or("minor is missing")?;
    u32::try_from(minor).map_err(|_| format!("minor is {minor}"))
}

/// A stand-in for the ID of a device that is known by its minor only.
fn generated_id(minor: u32) -> String {
    format!("{GENERATED}{minor}")
}

/// The memory unit in the node's annotation, which its plugin publishes.
fn published_unit(node: &Node, names: &ResourceNames, problems: &mut Vec<String>) -> Option<MemoryUnit> {
    let key = names.memory_unit_annotation();
    let text = value_of(node.metadata.annotations.as_ref(), &key)?;
    match text.parse() {
        Ok(unit) => Some(unit),
        Err(error) => {
            problems.push(format!("node annotation {key}: {error}"));
            None
        }
    }
}

/// The devices of a node without a Device object, as with the plugin of gpushare-scheduler-extender: as many GPUs as the capacity
/// says, numbered from 0, each with an equal part of the memory units.
fn of_capacity(node: &Node, names: &ResourceNames) -> Option<NodeReport> {
    let n_gpus = node.capacity(GPU_COUNT);
    let n_gpus = n_gpus.filter(|n| (1..=MAX_GPUS).contains(n))?;
    let units = node.capacity(&names.memory)? / n_gpus;
    let mut problems = Vec::new();
    let unit = published_unit(node, names, &mut problems);
    // Any unit serves to compare units with units; requests in bytes are refused on such a node.
    let unit_bytes = unit.unwrap_or(MemoryUnit::MIB).bytes();
    let gpus = equal_gpus(n_gpus, units.saturating_mul(unit_bytes));
    // kubelet shows zero units until a plugin that has restarted registers again; nothing is known until then.
    let gpus = if units == 0 { Devices::default() } else { gpus };
    Some(NodeReport {
        inventory: Inventory {
            gpus,
            unit_bytes: Some(unit_bytes),
            ..Inventory::default()
        },
        is_unit_unknown: unit.is_none(),
        problems,
        ..NodeReport::default()
    })
}

/// The devices that a node made from this template of an autoscaler would have, by capacity, annotations and labels.
pub(crate) fn of_template(node: &Node, names: &ResourceNames) -> Option<NodeReport> {
    let Some(bytes) = node.capacity(GPU_MEMORY) else {
        return of_capacity(node, names);
    };
    // A plugin publishes 100 percent of core and 100 slots for each GPU, so either sum shows the number of GPUs.
    let percent = node.capacity(GPU_CORE).or(node.capacity(GPU_SHARED));
    let by_percent = percent.map(|percent| percent / u64::from(DEFAULT_SLOTS));
    let n_gpus = node.capacity(GPU_COUNT).or(by_percent);
    let n_gpus = n_gpus.filter(|n| (1..=MAX_GPUS).contains(n))?;
    let unit_bytes = published_unit(node, names, &mut Vec::new()).map(MemoryUnit::bytes);
    let mut gpus = equal_gpus(n_gpus, bytes / n_gpus);
    // No plugin has seen the node, so the enforcement is the one that the operator has set in the node group's template.
    let limits = limit_level(value_of(node.metadata.labels.as_ref(), ENFORCEMENT));
    for gpu in gpus.iter_mut() {
        gpu.attributes.limits = limits;
    }
    let partitions = ReportedTable::default().table(node, &gpus);
    let inventory = Inventory {
        gpus,
        unit_bytes,
        partitions,
        ..Inventory::default()
    };
    Some(NodeReport {
        inventory,
        ..NodeReport::default()
    })
}

/// GPUs of equal memory with generated IDs, for a node whose Device object is not there.
fn equal_gpus(n_gpus: u64, memory_bytes: u64) -> Devices {
    let mut gpus = Vec::new();
    for minor in 0..u32::try_from(n_gpus).unwrap_or(0) {
        gpus.push(Device {
            memory_bytes,
            core: 100,
            slots: DEFAULT_SLOTS,
            ..Device::new(generated_id(minor), minor)
        });
    }
    gpus.into()
}

/// The ID of a device as records have it: empty in place of one that the scheduler made up.
pub(crate) fn record_id(id: &str) -> &str {
    if id.starts_with(GENERATED) { "" } else { id }
}

/// The attributes that distinguish a device. Virtual functions without an address cannot be allocated, and are left out.
fn attributes(info: &DeviceInfo) -> DeviceAttributes {
    let mut groups = Vec::new();
    for group in &info.vf_groups {
        let mut virtual_functions = Vec::new();
        for function in group.vfs.iter().filter(|function| !function.bus_id.is_empty()) {
            virtual_functions.push(VirtualFunction {
                id: FunctionId::from(function.bus_id.as_str()),
                minor: function.minor,
            });
        }
        if !virtual_functions.is_empty() {
            groups.push(FunctionGroup {
                labels: labels(&group.labels),
                functions: virtual_functions,
            });
        }
    }
    let is_numa_known = value_of(Some(&info.labels), NUMA_NODE) != Some(NUMA_UNKNOWN);
    let topology = info.topology.as_ref();
    DeviceAttributes {
        labels: labels(&info.labels),
        location: topology.and_then(|topology| location(topology, is_numa_known)),
        function_groups: groups,
        limits: limit_level(info.labels.get(ENFORCEMENT).map(String::as_str)),
    }
}

/// The enforcement of memory limits that the value of the label [`ENFORCEMENT`] names.
fn limit_level(label: Option<&str>) -> LimitLevel {
    match label {
        Some(ENFORCED_BY_DRIVER) => LimitLevel::Driver,
        Some("hami-core") => LimitLevel::Library,
        _ => LimitLevel::None,
    }
}

/// The location of a device; `None` if nothing is known. A NUMA node that the plugin could not read is 0 in the object, and
/// marked by a label.
fn location(topology: &DeviceTopology, is_numa_known: bool) -> Option<DeviceLocation> {
    // Negative numbers, and empty or negative texts, mean that nothing is known.
    let numa = u32::try_from(topology.node_id).ok().filter(|_| is_numa_known);
    let switch = topology.pcie_id.as_str();
    let switch = (!switch.is_empty() && !switch.starts_with('-')).then(|| SwitchId::from(switch));
    (numa.is_some() || switch.is_some()).then_some(DeviceLocation { numa, switch })
}

fn labels<'a>(labels: impl IntoIterator<Item = (&'a String, &'a String)>) -> Labels {
    let mut converted = Labels::default();
    for (key, value) in labels {
        converted.insert(key.as_str().into(), value.as_str().into());
    }
    converted
}

#[cfg(test)]
mod tests;
