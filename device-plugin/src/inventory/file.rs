//! Simulated devices, described by a JSON file that is read again when it changes.
//!
//! ```json
//! {"driverVersion": "550.54.15", "gpus": [
//!   {"uuid": "GPU-a", "minor": 0, "memory": "16276Mi", "model": "T4", "health": "Xid 79"}]}
//! ```
//!
//! A device's `health` is `Healthy` (the default), `Lost`, or `Xid` and a number, which means that
//! this error is reported again and again until the file says otherwise. Whoever changes it makes a
//! device sick or well again; one that is taken out of the list is lost. Everything else about a
//! device is fixed: another value is another inventory.
//!
//! A file that is broken while it is watched changes nothing.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use proto::quantity::Quantity;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::mpsc;
use tracing::warn;

use super::{
    Feed, Gpu, GpuUuid, Inventory, InventoryError,
    feed::{Outbox, Over},
};
use crate::health::{Observation, ObservationKind};

/// A file of simulated devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSource {
    /// The JSON file.
    pub path: PathBuf,
    /// How often a watch looks at it; each look probes every device.
    pub interval: Duration,
}

/// The file as it is written.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Document {
    driver_version: Option<String>,
    #[serde(default = "nvidia")]
    vendor: String,
    /// Read one by one, so that an error can name the device.
    gpus: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Entry {
    uuid: String,
    minor: u32,
    /// A quantity; Kubernetes also writes it as a bare number.
    memory: Value,
    #[serde(default = "simulated")]
    model: String,
    #[serde(default = "healthy")]
    health: String,
    bus_id: Option<String>,
    numa_node: Option<i32>,
    device_node: Option<PathBuf>,
}

fn nvidia() -> String {
    "nvidia".to_owned()
}

fn simulated() -> String {
    "Simulated".to_owned()
}

fn healthy() -> String {
    "Healthy".to_owned()
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
    /// In the order of the inventory's GPUs.
    ailments: Vec<(GpuUuid, Ailment)>,
}

impl FileSource {
    pub(super) fn discover(&self) -> Result<Inventory, InventoryError> {
        Ok(parse(&self.path, &self.read()?)?.inventory)
    }

    pub(super) fn watch(&self, inventory: &Inventory) -> Result<(Feed, mpsc::Receiver<Observation>), InventoryError> {
        let reading = parse(&self.path, &self.read()?)?;
        let mut watch =
            Watch { source: self.clone(), known: inventory.clone(), reading, text: Vec::new(), announced: false, complaint: None };
        Feed::start(move |outbox| watch.run(outbox))
    }

    fn read(&self) -> Result<Vec<u8>, InventoryError> {
        fs::read(&self.path).map_err(|source| InventoryError::ReadFile { path: self.path.clone(), source })
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
        if !self.announced && self.known.is_outdated_by(&self.reading.inventory) {
            self.announced = true;
            outbox.send(None, ObservationKind::InventoryChanged)?;
        }
        for gpu in &self.known.gpus {
            self.report(&gpu.uuid, outbox)?;
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
            let reading = parse(&self.source.path, &text);
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
    fn report(&self, uuid: &GpuUuid, outbox: &Outbox) -> Result<(), Over> {
        let found = self.reading.ailments.iter().find(|(other, _)| other == uuid);
        match found.map_or(Ailment::Lost, |(_, ailment)| *ailment) {
            Ailment::Healthy => outbox.send(Some(uuid), ObservationKind::Answered),
            Ailment::Lost => outbox.send(Some(uuid), ObservationKind::Lost),
            Ailment::Xid(xid) => {
                outbox.send(Some(uuid), ObservationKind::Xid(xid))?;
                outbox.send(Some(uuid), ObservationKind::Answered)
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

fn parse(path: &Path, text: &[u8]) -> Result<Reading, InventoryError> {
    let form = |part: String| move |source| InventoryError::FileForm { path: path.to_owned(), part, source };
    let document: Document = serde_json::from_slice(text).map_err(form("top level".to_owned()))?;
    if document.gpus.is_empty() {
        return Err(InventoryError::NoGpu { place: path.to_owned() });
    }
    let mut devices = Vec::<(Gpu, Ailment)>::new();
    for (index, value) in (0..).zip(document.gpus) {
        let device = name(index, &value);
        let entry: Entry = serde_json::from_value(value).map_err(form(device.clone()))?;
        let understood = understand(index, &entry).and_then(|(gpu, ailment)| {
            is_distinct(&devices, &gpu)?;
            Ok((gpu, ailment))
        });
        devices.push(understood.map_err(|fault| fault.at(path, device))?);
    }
    devices.sort_by_key(|(gpu, _)| gpu.minor);
    let ailments = devices.iter().map(|(gpu, ailment)| (gpu.uuid.clone(), *ailment)).collect();
    let inventory = Inventory {
        gpus: devices.into_iter().map(|(gpu, _)| gpu).collect(),
        excluded: Vec::new(),
        driver_version: document.driver_version,
        vendor: document.vendor,
    };
    Ok(Reading { inventory, ailments })
}

/// How an error calls a device: its place in the list, and its UUID if it has one.
fn name(index: u32, value: &Value) -> String {
    match value.get("uuid") {
        Some(uuid) => format!("gpus[{index}] (uuid {uuid})"),
        None => format!("gpus[{index}]"),
    }
}

/// A value that cannot be accepted.
struct Fault {
    field: &'static str,
    value: String,
    problem: String,
}

impl Fault {
    fn new(field: &'static str, value: impl ToString, problem: impl ToString) -> Self {
        Self { field, value: value.to_string(), problem: problem.to_string() }
    }

    fn at(self, path: &Path, device: String) -> InventoryError {
        let Self { field, value, problem } = self;
        InventoryError::Field { path: path.to_owned(), device, field, value, problem }
    }
}

fn understand(index: u32, entry: &Entry) -> Result<(Gpu, Ailment), Fault> {
    let Entry { minor, .. } = *entry;
    let uuid = entry.uuid.parse().map_err(|error| Fault::new("uuid", &entry.uuid, error))?;
    let default_node = || PathBuf::from(format!("/dev/nvidia{minor}"));
    let gpu = Gpu {
        uuid,
        minor,
        index,
        memory_bytes: memory(&entry.memory)?,
        model: entry.model.clone(),
        bus_id: entry.bus_id.clone(),
        numa_node: entry.numa_node,
        device_node: entry.device_node.clone().unwrap_or_else(default_node),
    };
    Ok((gpu, ailment(&entry.health)?))
}

fn memory(value: &Value) -> Result<u64, Fault> {
    let fault = |problem: &dyn ToString| Fault::new("memory", value, problem.to_string());
    let quantity: Quantity = Deserialize::deserialize(value).map_err(|error: serde_json::Error| fault(&error))?;
    match quantity.unsigned() {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(fault(&"must be a whole number of bytes above zero")),
    }
}

fn ailment(text: &str) -> Result<Ailment, Fault> {
    let xid = || text.strip_prefix("Xid ")?.parse().ok();
    match text {
        "Healthy" => Ok(Ailment::Healthy),
        "Lost" => Ok(Ailment::Lost),
        _ => xid()
            .map(Ailment::Xid)
            .ok_or_else(|| Fault::new("health", format_args!("{text:?}"), "must be `Healthy`, `Lost` or `Xid <number>`")),
    }
}

fn is_distinct(before: &[(Gpu, Ailment)], gpu: &Gpu) -> Result<(), Fault> {
    let taken = |other: &Gpu| format!("is that of gpus[{}] already", other.index);
    for (other, _) in before {
        if other.uuid == gpu.uuid {
            return Err(Fault::new("uuid", &gpu.uuid, taken(other)));
        }
        if other.minor == gpu.minor {
            return Err(Fault::new("minor", gpu.minor, taken(other)));
        }
    }
    Ok(())
}
