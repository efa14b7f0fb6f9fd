//! Parses the file of simulated devices. Every error names the file, the device, the field and its value.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proto::device::{TYPE_FPGA, TYPE_GPU, TYPE_RDMA};
use proto::quantity::Quantity;
use proto::resource::{FPGA, RDMA, WHOLE_PERCENT};
use proto::topology::{GpuPartitionPolicy, GpuPartitionTable, read_partitions};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::inventory::{
    Gpu, Inventory, InventoryError, OtherDevice, PciLocation, PhysicalId, ProcessMemory, no_gpu, pci,
};

/// The devices that the file describes, and their health.
#[derive(Debug)]
pub(super) struct SimulatedDevices {
    pub(super) inventory: Inventory,
    /// The health of every device.
    pub(super) health: BTreeMap<PhysicalId, SimulatedHealth>,
    /// The processes on all GPUs.
    pub(super) processes: Vec<ProcessMemory>,
}

/// The health of a device according to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SimulatedHealth {
    Healthy,
    Xid(u64),
    Lost,
}

/// Parses the text of the file at `path`; `node` replaces `{node}` in IDs.
pub(super) fn parse(path: &Path, node: &str, text: &[u8]) -> Result<SimulatedDevices, InventoryError> {
    let object = serde_json::from_slice(text).map_err(|source| {
        let problem = format!("the device file {} is not a JSON object", path.display());
        InventoryError::failed(problem, source)
    })?;
    let (mut inventory, gpu_values, other_values) =
        top_level(object).map_err(|error| error.at(path, "top level"))?;
    if gpu_values.is_empty() && other_values.is_empty() {
        return Err(no_gpu(path));
    }
    let (mut health, mut processes) = (BTreeMap::new(), Vec::new());
    for (index, value) in (0..).zip(gpu_values) {
        let name = device_name("gpus", "uuid", index, &value);
        let (gpu, its_health, its_processes) =
            gpu(index, node, value, &inventory.gpus).map_err(|error| error.at(path, &name))?;
        processes.extend(its_processes);
        health.insert(gpu.uuid.clone(), its_health);
        inventory.gpus.push(gpu);
    }
    for (index, value) in (0..).zip(other_values) {
        let name = device_name("devices", "id", index, &value);
        let (device, its_health) =
            other_device(node, value, &inventory).map_err(|error| error.at(path, &name))?;
        health.insert(device.id.clone(), its_health);
        inventory.others.push(device);
    }
    inventory.gpus.sort_by_key(|gpu| gpu.minor);
    inventory
        .others
        .sort_by_cached_key(|other| (other.device_type.clone(), other.minor));
    Ok(SimulatedDevices {
        inventory,
        health,
        processes,
    })
}

/// The fields beside the lists of devices, as an inventory without devices; and the two lists.
fn top_level(object: Map<String, Value>) -> Result<(Inventory, Vec<Value>, Vec<Value>), FieldError> {
    let mut document = Fields(object);
    let driver_version = document.take("driverVersion")?;
    let needs_driver = document.take("needsDriver")?.unwrap_or(false);
    let vendor = document.take("vendor")?.unwrap_or_else(|| "nvidia".to_owned());
    let gpus = document.need("gpus")?;
    let inventory = Inventory {
        needs_driver,
        driver_version,
        vendor,
        links: document.take("gpuLinks")?.unwrap_or_default(),
        partitions: partitions(&mut document)?,
        partition_policy: partition_policy(&mut document)?,
        ..Inventory::default()
    };
    let others = document.take("devices")?.unwrap_or_default();
    document.finish()?;
    Ok((inventory, gpus, others))
}

/// Names a device in an error: its position in the list, and its ID if it has one.
fn device_name(list: &str, id_field: &str, index: u32, value: &Value) -> String {
    match value.get(id_field) {
        Some(id) => format!("{list}[{index}] ({id_field} {id})"),
        None => format!("{list}[{index}]"),
    }
}

/// An invalid value of a field.
struct FieldError {
    field: String,
    value: String,
    problem: String,
}

impl FieldError {
    fn new(field: &str, value: &dyn ToString, problem: &dyn ToString) -> Self {
        Self {
            field: field.to_owned(),
            value: value.to_string(),
            problem: problem.to_string(),
        }
    }

    fn at(self, path: &Path, device: &str) -> InventoryError {
        let Self {
            field,
            value,
            problem,
        } = self;
        let path = path.display();
        InventoryError::Failed {
            problem: format!("the device file {path}, {device}, field {field}: {value}: {problem}"),
            source: None,
        }
    }
}

/// An object whose fields are taken out one by one, so that an error can name the field.
struct Fields(Map<String, Value>);

impl Fields {
    fn of_entry(list: &str, value: Value) -> Result<Self, FieldError> {
        match value {
            Value::Object(object) => Ok(Self(object)),
            value => Err(FieldError::new(list, &value, &"must be an object")),
        }
    }

    fn take<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, FieldError> {
        let Some(value) = self.0.remove(field) else {
            return Ok(None);
        };
        match T::deserialize(&value) {
            Ok(parsed) => Ok(Some(parsed)),
            Err(problem) => Err(FieldError::new(field, &value, &problem)),
        }
    }

    fn need<T: DeserializeOwned>(&mut self, field: &str) -> Result<T, FieldError> {
        self.take(field)?
            .ok_or_else(|| FieldError::new(field, &"missing", &"must be given"))
    }

    /// Refuses fields that nothing has taken.
    fn finish(self) -> Result<(), FieldError> {
        match self.0.into_iter().next() {
            Some((field, value)) => Err(FieldError::new(&field, &value, &"no such field")),
            None => Ok(()),
        }
    }
}

/// One GPU, which must be distinct from those `before` it.
fn gpu(
    index: u32,
    node: &str,
    value: Value,
    before: &[Gpu],
) -> Result<(Gpu, SimulatedHealth, Vec<ProcessMemory>), FieldError> {
    let mut fields = Fields::of_entry("gpus", value)?;
    let uuid = on_node(node, &fields.need::<String>("uuid")?);
    let minor = fields.need("minor")?;
    let health = fields.take("health")?.unwrap_or_else(|| "Healthy".to_owned());
    let gpu = Gpu {
        uuid: uuid
            .parse()
            .map_err(|error| FieldError::new("uuid", &uuid, &error))?,
        minor,
        index,
        memory_bytes: memory(fields.need("memory")?)?,
        reserved_bytes: 0,
        model: fields.take("model")?.unwrap_or_else(|| "Simulated".to_owned()),
        bus_id: fields.take("busId")?,
        location: location(&mut fields)?,
        labels: fields.take("labels")?.unwrap_or_default(),
        device_node: fields
            .take("deviceNode")?
            .unwrap_or_else(|| PathBuf::from(format!("/dev/nvidia{minor}"))),
    };
    let processes = processes(&gpu.uuid, fields.take("processes")?.unwrap_or_default())?;
    fields.finish()?;
    for other in before {
        let taken = format!("is that of gpus[{}] already", other.index);
        if other.uuid == gpu.uuid {
            return Err(FieldError::new("uuid", &gpu.uuid, &taken));
        }
        if other.minor == gpu.minor {
            return Err(FieldError::new("minor", &gpu.minor, &taken));
        }
    }
    Ok((gpu, simulated_health(&health)?, processes))
}

/// The processes on one GPU.
fn processes(gpu: &PhysicalId, values: Vec<Value>) -> Result<Vec<ProcessMemory>, FieldError> {
    let mut processes = Vec::with_capacity(values.len());
    for value in values {
        let mut fields = Fields::of_entry("processes", value)?;
        processes.push(ProcessMemory {
            gpu: gpu.clone(),
            pid: 0,
            container: Some(fields.take("container")?.unwrap_or_default()),
            bytes: memory(fields.need("memory")?)?,
        });
        fields.finish()?;
    }
    Ok(processes)
}

/// One device of another type, which must be distinct from all devices `before` it.
fn other_device(
    node: &str,
    value: Value,
    before: &Inventory,
) -> Result<(OtherDevice, SimulatedHealth), FieldError> {
    let mut fields = Fields::of_entry("devices", value)?;
    let device_type = device_type(fields.need("type")?)?;
    let id = on_node(node, &fields.need::<String>("id")?);
    let health = match fields.take::<String>("health")? {
        Some(text) => health_of_other(&text)?,
        None => SimulatedHealth::Healthy,
    };
    let device = OtherDevice {
        id: id.parse().map_err(|error| FieldError::new("id", &id, &error))?,
        minor: fields.need("minor")?,
        resources: resources(&device_type, fields.take("resources")?)?,
        labels: fields.take("labels")?.unwrap_or_default(),
        bus_id: fields.take("busId")?,
        location: location(&mut fields)?,
        vf_groups: fields.take("vfGroups")?.unwrap_or_default(),
        device_nodes: device_nodes("deviceNodes", fields.take("deviceNodes")?.unwrap_or_default())?,
        function_nodes: function_nodes(fields.take("functionNodes")?.unwrap_or_default())?,
        device_type,
    };
    fields.finish()?;
    if before.gpu(&device.id).is_some() {
        return Err(FieldError::new("id", &device.id, &"is that of a GPU"));
    }
    for other in &before.others {
        if other.id == device.id {
            return Err(FieldError::new(
                "id",
                &device.id,
                &"is that of another device already",
            ));
        }
        if other.device_type == device.device_type && other.minor == device.minor {
            let taken = format!("is that of {} already", other.id);
            return Err(FieldError::new("minor", &device.minor, &taken));
        }
    }
    Ok((device, health))
}

/// The partition table, in the form of its annotation.
fn partitions(document: &mut Fields) -> Result<Option<GpuPartitionTable>, FieldError> {
    let Some(value) = document.take::<Value>("gpuPartitions")? else {
        return Ok(None);
    };
    match read_partitions(&value.to_string()) {
        Ok(table) => Ok(Some(table)),
        Err(error) => Err(FieldError::new("gpuPartitions", &value, &error)),
    }
}

fn partition_policy(document: &mut Fields) -> Result<Option<GpuPartitionPolicy>, FieldError> {
    let Some(text) = document.take::<String>("gpuPartitionPolicy")? else {
        return Ok(None);
    };
    for policy in [GpuPartitionPolicy::Honor, GpuPartitionPolicy::Prefer] {
        if policy.as_str() == text {
            return Ok(Some(policy));
        }
    }
    Err(FieldError::new(
        "gpuPartitionPolicy",
        &text,
        &"must be `Honor` or `Prefer`",
    ))
}

/// The location, from `numaNode`, `pcieId` (a switch, or the root complex of a device without one) and `pcieRoot`.
fn location(fields: &mut Fields) -> Result<PciLocation, FieldError> {
    let numa_node = fields.take::<i32>("numaNode")?.filter(|node| *node >= 0);
    let (pcie_id, root) = (
        fields.take::<String>("pcieId")?,
        fields.take::<String>("pcieRoot")?,
    );
    Ok(match pcie_id {
        Some(id) if pci::is_root_complex(&id) => PciLocation {
            numa_node,
            root: root.or(Some(id)),
            switch: None,
        },
        switch => PciLocation {
            numa_node,
            root,
            switch,
        },
    })
}

/// The ID with the node's name in place of `{node}`.
pub(super) fn on_node(node: &str, id: &str) -> String {
    let readable = id.replace("{node}", node);
    if readable.len() <= PhysicalId::MAX_LEN {
        return readable;
    }
    id.replace("{node}", &format!("{:016x}", crate::cdi::fnv1a(node)))
}

fn memory(quantity: Quantity) -> Result<u64, FieldError> {
    match quantity.unsigned() {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(FieldError::new(
            "memory",
            &quantity,
            &"must be a whole number of bytes above zero",
        )),
    }
}

fn simulated_health(text: &str) -> Result<SimulatedHealth, FieldError> {
    match text {
        "Healthy" => return Ok(SimulatedHealth::Healthy),
        "Lost" => return Ok(SimulatedHealth::Lost),
        _ => {}
    }
    match text.strip_prefix("Xid ").map(str::parse) {
        Some(Ok(xid)) => Ok(SimulatedHealth::Xid(xid)),
        _ => Err(FieldError::new(
            "health",
            &text,
            &"must be `Healthy`, `Lost` or `Xid <number>`",
        )),
    }
}

/// The health of a device that is no GPU. Only GPUs have XIDs.
fn health_of_other(text: &str) -> Result<SimulatedHealth, FieldError> {
    match simulated_health(text) {
        Ok(SimulatedHealth::Xid(_)) | Err(_) => {
            Err(FieldError::new("health", &text, &"must be `Healthy` or `Lost`"))
        }
        Ok(health) => Ok(health),
    }
}

fn device_type(text: String) -> Result<String, FieldError> {
    if text == TYPE_GPU {
        return Err(FieldError::new("type", &text, &"GPUs are listed in `gpus`"));
    }
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_bounded = !text.is_empty() && !text.starts_with('-') && !text.ends_with('-') && text.len() <= 63;
    if is_bounded && text.bytes().all(is_allowed) {
        Ok(text)
    } else {
        Err(FieldError::new(
            "type",
            &text,
            &"must be lower-case letters, digits and `-`",
        ))
    }
}

fn resources(
    device_type: &str,
    given: Option<BTreeMap<String, Quantity>>,
) -> Result<BTreeMap<String, Quantity>, FieldError> {
    let Some(given) = given else {
        let resource = match device_type {
            TYPE_RDMA => RDMA,
            TYPE_FPGA => FPGA,
            _ => return Err(FieldError::new("resources", &"missing", &"must be given")),
        };
        return Ok([(resource.to_owned(), Quantity::from_unsigned(WHOLE_PERCENT))].into());
    };
    if given.is_empty() {
        return Err(FieldError::new("resources", &"{}", &"must name a resource"));
    }
    for (name, amount) in &given {
        if *amount < Quantity::default() {
            let value = format!("{name} {amount}");
            return Err(FieldError::new("resources", &value, &"must not be negative"));
        }
    }
    Ok(given)
}

fn function_nodes(
    nodes: BTreeMap<String, Vec<PathBuf>>,
) -> Result<BTreeMap<String, Vec<PathBuf>>, FieldError> {
    let mut checked = BTreeMap::new();
    for (function, paths) in nodes {
        checked.insert(function, device_nodes("functionNodes", paths)?);
    }
    Ok(checked)
}

fn device_nodes(field: &str, paths: Vec<PathBuf>) -> Result<Vec<PathBuf>, FieldError> {
    match paths.iter().find(|path| !path.is_absolute()) {
        Some(path) => Err(FieldError::new(
            field,
            &path.display(),
            &"must be an absolute path",
        )),
        None => Ok(paths),
    }
}
