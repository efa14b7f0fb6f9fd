//! What devices a node has: its Device object, or its capacity where there is none, in the engine's terms.
//!
//! Pure. Whatever cannot be read is left out and reported; the rest is used.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use placement::{
    Device, DeviceAttributes, DeviceId, DeviceLocation, DeviceType, DevicesOfType, Function, FunctionGroup,
    FunctionId, GpuUuid, Inventory, Labels, LimitLevel, LinkGroup, ResourceName, SwitchId,
};
use proto::device::{
    DeviceInfo, DeviceTopology, ENFORCED_BY_DRIVER, ENFORCEMENT, GPU_MODEL_LABEL, GPU_VENDOR_LABEL,
    SERVES_VENDOR_LABEL, SHARING_LABEL, TYPE_GPU,
};
use proto::memory_unit::MemoryUnit;
use proto::node::Node;
use proto::quantity::Quantity;
use proto::resource::{
    DEFAULT_SLOTS, GPU_CORE, GPU_COUNT, GPU_MEMORY, GPU_SHARED, ISOLATION_PROVIDER, ResourceNames, canonical,
};
use proto::topology::{GPU_PARTITION_POLICY, NUMA_NODE, NUMA_UNKNOWN};
use serde::Deserialize;
use serde_json::Value;

pub mod device_types;
mod partitions;

use partitions::ReportedTable;

/// Most devices that a node's capacity is believed to speak of.
const MAX_GPUS: u64 = 1024;
/// Most of a resource that a device may have, as for the memory of a GPU.
const MAX_AMOUNT: u64 = 1 << 50;
/// Prefix of the generated IDs of devices that are known from a node's capacity only.
const MADE_UP: &str = "minor-";
/// Labels of nodes that are read.
const NODE_LABELS: [&str; 4] = [
    ISOLATION_PROVIDER,
    GPU_VENDOR_LABEL,
    GPU_MODEL_LABEL,
    GPU_PARTITION_POLICY,
];

/// A node's devices as far as they can be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeReport {
    /// The devices and the unit.
    pub inventory: Inventory,
    /// Whether the unit is unknown, so that a unit counts as 1 MiB and only pods that ask in units can be compared.
    pub opaque: bool,
    /// What could not be read, for people.
    pub problems: Vec<String>,
}

/// What a Device object says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceReport {
    gpus: Vec<placement::Gpu>,
    classes: Vec<DevicesOfType>,
    serves_vendor: bool,
    table: ReportedTable,
    links: Vec<LinkGroup>,
    problems: Vec<String>,
}

/// A node's devices; `None` if it shares no GPUs, or if only its Device object can tell and has not been seen yet.
pub fn report(node: &Node, device: Option<&DeviceReport>, names: &ResourceNames) -> Option<NodeReport> {
    match device {
        // The author of the object has seen the devices; the capacity would only allow a guess.
        Some(device) => (!device.is_empty() || !device.problems.is_empty()).then(|| device.on(node, names)),
        // A plugin that states GPU memory in bytes writes a Device object too. Until the watch shows it, dividing the capacity
        // evenly among the GPUs would be a guess.
        None if node.capacity(GPU_MEMORY).is_some() => None,
        None => of_capacity(node, names),
    }
}

/// The parts of a node that [`report`] reads: nodes are large and many.
pub fn trim(node: &Node, names: &ResourceNames) -> Node {
    let mut trimmed = Node::default();
    let key = names.memory_unit_annotation();
    let unit = node
        .metadata
        .annotations
        .as_ref()
        .and_then(|annotations| annotations.get(&key));
    trimmed.metadata.annotations = unit.map(|unit| [(key, unit.clone())].into());
    let labels = NODE_LABELS
        .into_iter()
        .filter_map(|key| node.metadata.labels.as_ref()?.get_key_value(key));
    let labels: BTreeMap<String, String> = labels.map(|(key, value)| (key.clone(), value.clone())).collect();
    trimmed.metadata.labels = (!labels.is_empty()).then_some(labels);
    trimmed.spec.taints = node
        .spec
        .taints
        .iter()
        .filter(|taint| taint.is_prefer_no_schedule())
        .cloned()
        .collect();
    for resource in [names.memory.as_str(), GPU_COUNT, GPU_MEMORY] {
        if let Some(value) = node.status.capacity.get(resource) {
            trimmed.status.capacity.insert(resource.to_owned(), value.clone());
        }
    }
    trimmed
}

impl DeviceReport {
    /// Reads a Device object.
    pub fn of(metadata: &ObjectMeta, spec: &Value) -> Self {
        let marks = [metadata.labels.as_ref(), metadata.annotations.as_ref()];
        let serves_vendor = marks
            .into_iter()
            .flatten()
            .any(|marks| marks.get(SERVES_VENDOR_LABEL).is_some_and(|mark| mark == "true"));
        let mut report = Self {
            serves_vendor,
            ..Self::default()
        };
        let entries = match spec.get("devices") {
            None | Some(Value::Null) => &[],
            Some(Value::Array(entries)) => entries.as_slice(),
            Some(_) => {
                report
                    .problems
                    .push("Device object: spec.devices is no list".to_owned());
                &[]
            }
        };
        for (at, entry) in entries.iter().enumerate() {
            if let Err(problem) = report.add(entry) {
                report
                    .problems
                    .push(format!("Device object: spec.devices[{at}]: {problem}"));
            }
        }
        report.table = ReportedTable::of(metadata, &mut report.problems);
        report.links = partitions::links(metadata, &mut report.problems);
        report
    }

    fn add(&mut self, entry: &Value) -> Result<(), String> {
        let info = DeviceInfo::deserialize(entry).map_err(|error| error.to_string())?;
        if info.device_type == TYPE_GPU || info.device_type.is_empty() {
            self.gpus.push(gpu(info)?);
            return Ok(());
        }
        let kind = DeviceType::from(info.device_type.as_str());
        let device = device(info)?;
        match self.classes.iter_mut().find(|class| class.kind == kind) {
            Some(class) => class.devices.push(device),
            None => self.classes.push(DevicesOfType {
                kind,
                devices: vec![device],
            }),
        }
        Ok(())
    }

    /// Devices of other types than GPU.
    pub fn classes(&self) -> &[DevicesOfType] {
        &self.classes
    }

    fn is_empty(&self) -> bool {
        self.gpus.is_empty() && self.classes.is_empty()
    }

    fn on(&self, node: &Node, names: &ResourceNames) -> NodeReport {
        let mut problems = self.problems.clone();
        let unit = published_unit(node, names).unwrap_or_else(|problem| {
            problems.push(problem);
            None
        });
        let inventory = Inventory {
            gpus: self.gpus.clone(),
            unit_bytes: unit.map(MemoryUnit::bytes),
            serves_vendor: self.serves_vendor,
            other_devices: Some(self.classes.clone()),
            partitions: self.table.on(node, &self.gpus),
            links: self.links.clone(),
        };
        NodeReport {
            inventory,
            opaque: false,
            problems,
        }
    }
}

fn gpu(info: DeviceInfo) -> Result<placement::Gpu, String> {
    let minor = minor(&info)?;
    let sharing = info
        .labels
        .get(SHARING_LABEL)
        .is_none_or(|sharing| sharing != "disabled");
    let resources: BTreeMap<&str, Quantity> = info
        .resources
        .iter()
        .map(|(name, amount)| (canonical(name), *amount))
        .collect();
    let amount = |resource: &str| match resources.get(resource) {
        None => Ok(None),
        Some(quantity) => quantity
            .unsigned()
            .map(Some)
            .ok_or_else(|| format!("{resource} is {quantity}, not a whole number")),
    };
    let count = |resource: &str, usual: u32| match amount(resource)? {
        None => Ok(usual),
        Some(count) => u32::try_from(count).map_err(|_| format!("{resource} is {count}, which is absurd")),
    };
    Ok(placement::Gpu {
        minor,
        memory_bytes: amount(GPU_MEMORY)?.ok_or_else(|| format!("resources has no {GPU_MEMORY}"))?,
        core: count(GPU_CORE, 100)?,
        slots: count(GPU_SHARED, DEFAULT_SLOTS)?,
        healthy: info.health,
        sharing,
        attributes: attributes(&info),
        uuid: if info.id.is_empty() {
            GpuUuid::from(made_up(minor))
        } else {
            GpuUuid::from(info.id)
        },
    })
}

fn device(info: DeviceInfo) -> Result<Device, String> {
    let minor = minor(&info)?;
    let amount = |(name, quantity): (&String, &Quantity)| {
        let amount = quantity.unsigned().filter(|amount| *amount <= MAX_AMOUNT);
        let amount = amount.ok_or_else(|| format!("{name} is {quantity}, not a whole number up to 2^50"))?;
        Ok((ResourceName::from(canonical(name)), amount))
    };
    let resources = info.resources.iter().map(amount).collect::<Result<_, String>>()?;
    let attributes = attributes(&info);
    let id = if info.id.is_empty() {
        DeviceId::from(made_up(minor))
    } else {
        DeviceId::from(info.id)
    };
    Ok(Device {
        id,
        minor,
        resources,
        healthy: info.health,
        attributes,
    })
}

fn minor(info: &DeviceInfo) -> Result<u32, String> {
    let minor = info.minor.ok_or("minor is missing")?;
    u32::try_from(minor).map_err(|_| format!("minor is {minor}"))
}

/// What stands for the ID of a device that is known by its minor only.
fn made_up(minor: u32) -> String {
    format!("{MADE_UP}{minor}")
}

/// The unit that the node's plugin publishes.
fn published_unit(node: &Node, names: &ResourceNames) -> Result<Option<MemoryUnit>, String> {
    let key = names.memory_unit_annotation();
    let Some(text) = node
        .metadata
        .annotations
        .as_ref()
        .and_then(|annotations| annotations.get(&key))
    else {
        return Ok(None);
    };
    text.parse()
        .map(Some)
        .map_err(|error| format!("node annotation {key}: {error}"))
}

/// Equal devices, numbered from 0, of a node whose plugin is the old one.
fn of_capacity(node: &Node, names: &ResourceNames) -> Option<NodeReport> {
    let n_gpus = node
        .capacity(GPU_COUNT)
        .filter(|count| (1..=MAX_GPUS).contains(count))?;
    let units = node.capacity(&names.memory)? / n_gpus;
    let (unit, problems) = match published_unit(node, names) {
        Ok(unit) => (unit, Vec::new()),
        Err(problem) => (None, vec![problem]),
    };
    // Any unit serves to compare units with units; requests in bytes are refused on such a node.
    let unit_bytes = unit.unwrap_or(MemoryUnit::MIB).bytes();
    let gpus = equal_gpus(n_gpus, units.saturating_mul(unit_bytes));
    // Zero units is what kubelet shows while a plugin has not registered again; nothing can be said until it has.
    let gpus = if units == 0 { Vec::new() } else { gpus };
    let inventory = Inventory {
        gpus,
        unit_bytes: Some(unit_bytes),
        ..Inventory::default()
    };
    Some(NodeReport {
        inventory,
        opaque: unit.is_none(),
        problems,
    })
}

/// What a node that does not exist yet would have, by its template alone.
pub fn of_template(node: &Node, names: &ResourceNames) -> Option<NodeReport> {
    let Some(bytes) = node.capacity(GPU_MEMORY) else {
        return of_capacity(node, names);
    };
    let per_gpu = u64::from(DEFAULT_SLOTS);
    let percent = || {
        node.capacity(GPU_CORE)
            .or_else(|| node.capacity(GPU_SHARED))
            .map(|percent| percent / per_gpu)
    };
    let n_gpus = node
        .capacity(GPU_COUNT)
        .or_else(percent)
        .filter(|count| (1..=MAX_GPUS).contains(count))?;
    let unit_bytes = published_unit(node, names).ok().flatten().map(MemoryUnit::bytes);
    let mut gpus = equal_gpus(n_gpus, bytes / n_gpus);
    // No plugin has seen the node: the operator says in the node group's template what its nodes can enforce.
    let label = node
        .metadata
        .labels
        .as_ref()
        .and_then(|labels| labels.get(ENFORCEMENT));
    let limits = limit_level(label);
    for gpu in &mut gpus {
        gpu.attributes.limits = limits;
    }
    let partitions = ReportedTable::default().on(node, &gpus);
    let inventory = Inventory {
        gpus,
        unit_bytes,
        partitions,
        ..Inventory::default()
    };
    Some(NodeReport {
        inventory,
        opaque: false,
        problems: Vec::new(),
    })
}

fn equal_gpus(n_gpus: u64, memory_bytes: u64) -> Vec<placement::Gpu> {
    let gpu = |minor: u32| placement::Gpu {
        uuid: GpuUuid::from(made_up(minor)),
        minor,
        memory_bytes,
        core: 100,
        slots: DEFAULT_SLOTS,
        healthy: true,
        sharing: true,
        attributes: DeviceAttributes::default(),
    };
    (0..u32::try_from(n_gpus).unwrap_or(0)).map(gpu).collect()
}

/// The ID for records; empty for a device that is known by its minor only.
pub fn record_id(id: &str) -> &str {
    if id.starts_with(MADE_UP) { "" } else { id }
}

/// The attributes that distinguish a device. Functions without an address cannot be allocated, and are left out.
fn attributes(info: &DeviceInfo) -> DeviceAttributes {
    let groups = info.vf_groups.iter().map(|group| FunctionGroup {
        labels: labels(&group.labels),
        functions: group
            .vfs
            .iter()
            .filter(|function| !function.bus_id.is_empty())
            .map(function)
            .collect(),
    });
    DeviceAttributes {
        labels: labels(&info.labels),
        location: info
            .topology
            .as_ref()
            .and_then(|topology| place(topology, is_numa_known(info))),
        functions: groups.filter(|group| !group.functions.is_empty()).collect(),
        limits: limit_level(info.labels.get(ENFORCEMENT)),
    }
}

/// The enforcement level that a label's value names.
fn limit_level(label: Option<&String>) -> LimitLevel {
    match label.map(String::as_str) {
        Some(ENFORCED_BY_DRIVER) => LimitLevel::Driver,
        Some("hami-core") => LimitLevel::Library,
        _ => LimitLevel::None,
    }
}

fn function(function: &proto::device::VirtualFunction) -> Function {
    Function {
        id: FunctionId::from(function.bus_id.as_str()),
        minor: function.minor,
    }
}

/// Returns true if the NUMA node was read, and is not a default.
fn is_numa_known(info: &DeviceInfo) -> bool {
    info.labels
        .get(NUMA_NODE)
        .is_none_or(|label| label != NUMA_UNKNOWN)
}

/// Negative numbers and empty texts say that nothing is known.
fn place(topology: &DeviceTopology, is_numa_known: bool) -> Option<DeviceLocation> {
    let numa = u32::try_from(topology.node_id).ok().filter(|_| is_numa_known);
    let switch = Some(topology.pcie_id.as_str())
        .filter(|id| !id.is_empty() && !id.starts_with('-'))
        .map(SwitchId::from);
    (numa.is_some() || switch.is_some()).then_some(DeviceLocation { numa, switch })
}

fn labels<'a>(labels: impl IntoIterator<Item = (&'a String, &'a String)>) -> Labels {
    labels
        .into_iter()
        .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
        .collect()
}

#[cfg(test)]
mod tests;
