//! Simulated devices, described by a JSON file that is read again when it changes.
//!
//! ```json
//! {"driverVersion": "550.54.15", "gpus": [
//!   {"uuid": "GPU-a", "minor": 0, "memory": "16276Mi", "model": "T4", "health": "Xid 79"}],
//!  "devices": [{"type": "rdma", "id": "0000:1f:00.0", "minor": 0, "deviceNodes": ["/dev/infiniband/uverbs0"]}]}
//! ```
//!
//! Devices of other types than GPUs are in `devices`; what can be said of them is in `file/others.rs`. A GPU may also have
//! `busId`, `numaNode`, `pcieId` (its switch, or the root complex of one without), `pcieRoot`, `labels` and `deviceNode`. Beside
//! the lists, `gpuLinks` tells how GPUs are linked, `gpuPartitions` which may be given away together and `gpuPartitionPolicy`
//! (`Honor` or `Prefer`) whether only those, all in the form of the Device object's annotations and label.
//!
//! A device's `health` is `Healthy` (the default), `Lost`, or `Xid` and a number, which means that
//! this error is reported again and again until the file says otherwise. Whoever changes it makes a
//! device sick or well again; one that is taken out of the list is lost. Everything else about a
//! device is fixed: another value is another inventory.
//!
//! `{node}` in a UUID stands for the node, so that one file can serve many nodes and UUIDs still differ.
//!
//! A file that is broken while it is watched changes nothing.

mod others;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use proto::quantity::Quantity;
use proto::topology::{GpuPartitionPolicy, GpuPartitionTable, read_partitions};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::sync::mpsc;
use tracing::warn;

use super::{
    Feed, Gpu, Inventory, InventoryError, OtherDevice, PciLocation, PhysicalId,
    feed::{Outbox, Over},
    pci,
};
use crate::health::{Observation, ObservationKind};

/// A file of simulated devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSource {
    /// The JSON file.
    pub path: PathBuf,
    /// What `{node}` in a UUID stands for; a hash of it where the UUID would become too long.
    pub node: String,
    /// How often a watch looks at it; each look probes every device.
    pub interval: Duration,
}

/// What the file says about a device's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ailment {
    Healthy,
    Xid(u64),
    Lost,
}

/// The file as it is understood.
#[derive(Debug)]
struct Reading {
    inventory: Inventory,
    /// Of every device.
    ailments: Vec<(PhysicalId, Ailment)>,
}

impl FileSource {
    pub(super) fn discover(&self) -> Result<Inventory, InventoryError> {
        Ok(parse(&self.path, &self.node, &self.read()?)?.inventory)
    }

    pub(super) fn watch(
        &self,
        inventory: &Inventory,
    ) -> Result<(Feed, mpsc::Receiver<Observation>), InventoryError> {
        let reading = parse(&self.path, &self.node, &self.read()?)?;
        let mut watch = Watch {
            source: self.clone(),
            known: inventory.clone(),
            reading,
            text: Vec::new(),
            announced: false,
            complaint: None,
        };
        Feed::start(vec![Box::new(move |outbox| watch.run(outbox))])
    }

    fn read(&self) -> Result<Vec<u8>, InventoryError> {
        fs::read(&self.path).map_err(|source| InventoryError::ReadFile {
            path: self.path.clone(),
            source,
        })
    }
}

struct Watch {
    source: FileSource,
    /// The devices that are watched.
    known: Inventory,
    /// The last reading that was in order.
    reading: Reading,
    /// The text that was read last, in order or not.
    text: Vec<u8>,
    /// Whether the reader has been told that the devices are others now.
    announced: bool,
    /// The last failure that was logged.
    complaint: Option<String>,
}

impl Watch {
    fn run(&mut self, outbox: &Outbox) -> Over {
        loop {
            self.refresh();
            if let Err(over) = self.look(outbox) {
                return over;
            }
        }
    }

    fn look(&mut self, outbox: &Outbox) -> Result<(), Over> {
        let fabric = |inventory: &Inventory| {
            (
                inventory.links.clone(),
                inventory.partitions.clone(),
                inventory.partition_policy,
            )
        };
        let now = &self.reading.inventory;
        if !self.announced && (self.known.is_outdated_by(now) || fabric(&self.known) != fabric(now)) {
            self.announced = true;
            outbox.send(None, ObservationKind::InventoryChanged)?;
        }
        for id in self.known.ids() {
            self.report(id, outbox)?;
        }
        outbox.pause(self.source.interval)
    }

    /// Reads the file again. It is small, so its text is compared: a change cannot hide behind an
    /// equal length and time.
    fn refresh(&mut self) {
        let understood = self.source.read().and_then(|text| {
            if text == self.text {
                return Ok(None);
            }
            let reading = parse(&self.source.path, &self.source.node, &text);
            self.text = text;
            reading.map(Some)
        });
        match understood {
            Ok(None) => {}
            Ok(Some(reading)) => {
                self.reading = reading;
                self.complaint = None;
            }
            Err(error) => {
                let problem = with_sources(&error);
                if self.complaint.as_ref() != Some(&problem) {
                    warn!(error = %problem, "keeping the last readable state of the simulated devices");
                    self.complaint = Some(problem);
                }
            }
        }
    }

    /// A device with an XID does answer probes: an XID that the policy ignores does not keep a
    /// device from recovering, another one does because there is no quiet.
    fn report(&self, id: &PhysicalId, outbox: &Outbox) -> Result<(), Over> {
        let found = self.reading.ailments.iter().find(|(other, _)| other == id);
        match found.map_or(Ailment::Lost, |(_, ailment)| *ailment) {
            Ailment::Healthy => outbox.send(Some(id), ObservationKind::Sound),
            Ailment::Lost => outbox.send(Some(id), ObservationKind::Lost),
            Ailment::Xid(xid) => {
                outbox.send(Some(id), ObservationKind::Xid(xid))?;
                outbox.send(Some(id), ObservationKind::Sound)
            }
        }
    }
}

/// The error and what caused it, for one line of log.
fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}

fn parse(path: &Path, node: &str, text: &[u8]) -> Result<Reading, InventoryError> {
    let object = serde_json::from_slice(text).map_err(|source| InventoryError::FileForm {
        path: path.to_owned(),
        source,
    })?;
    let at_top = |fault: Fault| fault.at(path, "top level");
    let mut document = Fields(object);
    let driver_version = document.take("driverVersion").map_err(at_top)?;
    let needs_driver = document.take("needsDriver").map_err(at_top)?.unwrap_or(false);
    let vendor = document
        .take("vendor")
        .map_err(at_top)?
        .unwrap_or_else(|| "nvidia".to_owned());
    let gpus = document.need::<Vec<Value>>("gpus").map_err(at_top)?;
    let links = document.take("gpuLinks").map_err(at_top)?.unwrap_or_default();
    let partitions = partitions(&mut document).map_err(at_top)?;
    let partition_policy = partition_policy(&mut document).map_err(at_top)?;
    let others = document
        .take::<Vec<Value>>("devices")
        .map_err(at_top)?
        .unwrap_or_default();
    document.finish().map_err(at_top)?;
    if gpus.is_empty() && others.is_empty() {
        return Err(InventoryError::NoGpu {
            path: path.to_owned(),
        });
    }
    let mut devices = Vec::<(Gpu, Ailment)>::new();
    for (index, value) in (0..).zip(gpus) {
        let device = name("gpus", "uuid", index, &value);
        let understood = understand(index, node, value, &devices).map_err(|fault| fault.at(path, &device));
        devices.push(understood?);
    }
    devices.sort_by_key(|(gpu, _)| gpu.minor);
    let others = others_beside(path, node, others, &devices)?;
    let of_gpus = devices.iter().map(|(gpu, ailment)| (gpu.uuid.clone(), *ailment));
    let ailments = of_gpus
        .chain(others.iter().map(|(other, ailment)| (other.id.clone(), *ailment)))
        .collect();
    let gpus = devices.into_iter().map(|(gpu, _)| gpu).collect();
    let others = others.into_iter().map(|(other, _)| other).collect();
    let inventory = Inventory {
        gpus,
        others,
        excluded: Vec::new(),
        links,
        partitions,
        partition_policy,
        needs_driver,
        driver_version,
        vendor,
    };
    Ok(Reading { inventory, ailments })
}

/// The devices of other types, sorted.
fn others_beside(
    path: &Path,
    node: &str,
    values: Vec<Value>,
    gpus: &[(Gpu, Ailment)],
) -> Result<Vec<(OtherDevice, Ailment)>, InventoryError> {
    let mut others = Vec::<(OtherDevice, Ailment)>::new();
    for (index, value) in (0..).zip(values) {
        let device = name("devices", "id", index, &value);
        let understood =
            others::understand(node, value, gpus, &others).map_err(|fault| fault.at(path, &device));
        others.push(understood?);
    }
    others.sort_by(|(one, _), (other, _)| {
        (&one.device_type, one.minor).cmp(&(&other.device_type, other.minor))
    });
    Ok(others)
}

/// How an error calls a device: its place in the list, and its identity if it has one.
fn name(list: &str, identity: &str, index: u32, value: &Value) -> String {
    match value.get(identity) {
        Some(id) => format!("{list}[{index}] ({identity} {id})"),
        None => format!("{list}[{index}]"),
    }
}

/// A value that cannot be accepted.
struct Fault {
    field: String,
    value: String,
    problem: String,
}

impl Fault {
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
        InventoryError::Field {
            path: path.to_owned(),
            device: device.to_owned(),
            field,
            value,
            problem,
        }
    }
}

/// An object whose fields are taken out one by one, so that an error can name the field.
struct Fields(Map<String, Value>);

impl Fields {
    fn take<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, Fault> {
        let Some(value) = self.0.remove(field) else {
            return Ok(None);
        };
        T::deserialize(&value)
            .map(Some)
            .map_err(|problem| Fault::new(field, &value, &problem))
    }

    fn need<T: DeserializeOwned>(&mut self, field: &str) -> Result<T, Fault> {
        self.take(field)?
            .ok_or_else(|| Fault::new(field, &"missing", &"must be given"))
    }

    /// Everything must have been taken.
    fn finish(self) -> Result<(), Fault> {
        match self.0.into_iter().next() {
            Some((field, value)) => Err(Fault::new(&field, &value, &"no such field")),
            None => Ok(()),
        }
    }
}

/// One device, which must differ from those `before` it.
fn understand(
    index: u32,
    node: &str,
    value: Value,
    before: &[(Gpu, Ailment)],
) -> Result<(Gpu, Ailment), Fault> {
    let Value::Object(object) = value else {
        return Err(Fault::new("gpus", &value, &"must be an object"));
    };
    let mut fields = Fields(object);
    let uuid = on_node(node, &fields.need::<String>("uuid")?);
    let minor = fields.need("minor")?;
    let health = fields.take("health")?.unwrap_or_else(|| "Healthy".to_owned());
    let gpu = Gpu {
        uuid: uuid.parse().map_err(|error| Fault::new("uuid", &uuid, &error))?,
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
    fields.finish()?;
    is_distinct(before, &gpu)?;
    Ok((gpu, ailment(&health)?))
}

/// The partition table, in the form of its annotation.
fn partitions(document: &mut Fields) -> Result<Option<GpuPartitionTable>, Fault> {
    let Some(value) = document.take::<Value>("gpuPartitions")? else {
        return Ok(None);
    };
    read_partitions(&value.to_string())
        .map(Some)
        .map_err(|error| Fault::new("gpuPartitions", &value, &error))
}

fn partition_policy(document: &mut Fields) -> Result<Option<GpuPartitionPolicy>, Fault> {
    let Some(text) = document.take::<String>("gpuPartitionPolicy")? else {
        return Ok(None);
    };
    let known = [GpuPartitionPolicy::Honor, GpuPartitionPolicy::Prefer]
        .into_iter()
        .find(|policy| policy.as_str() == text);
    known
        .map(Some)
        .ok_or_else(|| Fault::new("gpuPartitionPolicy", &text, &"must be `Honor` or `Prefer`"))
}

/// Where a device sits: `numaNode`, `pcieId` (a switch, or the root complex of a device without one) and `pcieRoot`.
fn location(fields: &mut Fields) -> Result<PciLocation, Fault> {
    let numa_node = fields.take::<i32>("numaNode")?.filter(|node| *node >= 0);
    let (pcie_id, root) = (
        fields.take::<String>("pcieId")?,
        fields.take::<String>("pcieRoot")?,
    );
    Ok(match pcie_id {
        Some(id) if pci::is_root(&id) => PciLocation {
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

/// A UUID with the node in place of `{node}`.
fn on_node(node: &str, uuid: &str) -> String {
    let readable = uuid.replace("{node}", node);
    if readable.len() <= PhysicalId::MAX_LEN {
        return readable;
    }
    // FNV-1a: stable across versions, which std's hasher does not promise.
    let hash = node.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    uuid.replace("{node}", &format!("{hash:016x}"))
}

fn memory(quantity: Quantity) -> Result<u64, Fault> {
    let bytes = quantity.unsigned().filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| Fault::new("memory", &quantity, &"must be a whole number of bytes above zero"))
}

fn ailment(text: &str) -> Result<Ailment, Fault> {
    let xid = || text.strip_prefix("Xid ")?.parse().ok();
    match text {
        "Healthy" => Ok(Ailment::Healthy),
        "Lost" => Ok(Ailment::Lost),
        _ => xid()
            .map(Ailment::Xid)
            .ok_or_else(|| Fault::new("health", &text, &"must be `Healthy`, `Lost` or `Xid <number>`")),
    }
}

fn is_distinct(before: &[(Gpu, Ailment)], gpu: &Gpu) -> Result<(), Fault> {
    let taken = |other: &Gpu| format!("is that of gpus[{}] already", other.index);
    for (other, _) in before {
        if other.uuid == gpu.uuid {
            return Err(Fault::new("uuid", &gpu.uuid, &taken(other)));
        }
        if other.minor == gpu.minor {
            return Err(Fault::new("minor", &gpu.minor, &taken(other)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
