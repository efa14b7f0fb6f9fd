//! The Device object of this node, in the form that Koordinator's scheduler and ours read.

use std::collections::BTreeMap;
use std::sync::Arc;

use chrono::{DateTime, SecondsFormat, Utc};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use proto::device::{
    BOOT_ID, CONDITION_HEALTHY, CONDITION_INJECTABLE, CONDITION_ISOLATED, Device, DeviceCondition,
    DeviceInfo, DeviceSpec, DeviceTopology, GPU_DRIVER_LABEL, GPU_MODEL_LABEL, GPU_VENDOR_LABEL, RawDevice,
    SERVES_VENDOR_LABEL, SHARING_DISABLED, SHARING_LABEL, TYPE_GPU,
};
use proto::kubelet_allocations::DEVICES_CHECKPOINTS;
use proto::node::Node;
use proto::plugin_reports::PODS_WITHOUT_DEVICES;
use proto::quantity::Quantity;
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use proto::topology::{
    GPU_LINKS, GPU_PARTITION_POLICY, GPU_PARTITIONS, GpuPartitionPolicy, GpuPartitionTable, NUMA_NODE,
    NUMA_UNKNOWN, PCIE_ROOT,
};
use serde_json::json;

use crate::fleet::{Fleet, FleetDevice, FleetGpu};
use crate::health::HealthReason;
use crate::injection::{Certainty, Exposure, Injection};
use crate::inventory::{PciLocation, PhysicalId};
use crate::pods::WHOLE_DEVICE_PERCENT;

use super::additions::{Additions, DeviceLabels};
use super::partitions;

/// Longest value of a label.
const MAX_LABEL: usize = 63;

/// What the object says besides the devices themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remarks {
    /// The annotation with the devices of pods that somebody else placed, if there are any.
    pub checkpoints: Option<String>,
    /// Whether this plugin serves a vendor's resource too.
    pub serves_vendor: bool,
    /// What the operator says of the devices.
    pub additions: Arc<Additions>,
    /// What partitions of GPUs are for, if the operator says it.
    pub partition_policy: Option<GpuPartitionPolicy>,
    /// The way in which containers get their devices; none until that is decided.
    pub injection: Option<Injection>,
    /// The boot of this node, if the kernel names it.
    pub boot_id: Option<String>,
    /// The annotation with the pods that have no device, where that is reported.
    pub without_devices: Option<String>,
}

/// The object that describes `fleet`; a condition that is as it was `before` keeps its time.
pub fn device(
    fleet: &Fleet,
    node: &Node,
    remarks: &Remarks,
    before: Option<&DeviceSpec>,
    now: DateTime<Utc>,
) -> Device {
    let history = History { before, now };
    let name = node.metadata.name.clone().unwrap_or_default();
    let said = &remarks.additions.labels;
    let injection = remarks.injection.as_ref();
    let gpus = fleet
        .gpus
        .iter()
        .map(|entry| gpu(entry, fleet.ids.slots(), &history, said, injection));
    let others = fleet
        .others
        .iter()
        .map(|entry| other(entry, &history, said, injection));
    let partitions = partitions::table(fleet, remarks.additions.partitions.as_ref());
    let mut device = Device::new(
        &name,
        DeviceSpec {
            devices: gpus.chain(others).collect(),
        },
    );
    let policy = partitions.as_ref().map(|_| {
        remarks
            .partition_policy
            .or(fleet.partition_policy)
            .unwrap_or_default()
    });
    let policy = policy.map(|policy| (GPU_PARTITION_POLICY.to_owned(), policy.as_str().to_owned()));
    device.metadata.labels = Some(labels(fleet, remarks).chain(policy).collect());
    let annotations = annotations(fleet, remarks, partitions.as_ref());
    device.metadata.annotations = (!annotations.is_empty()).then_some(annotations);
    device.metadata.owner_references = node.metadata.uid.clone().map(|uid| {
        vec![OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name,
            uid,
            ..OwnerReference::default()
        }]
    });
    device
}

/// The GPUs that the object says are unhealthy by an XID, each with that and since when.
pub fn sick_by_xid(spec: &DeviceSpec) -> impl Iterator<Item = (PhysicalId, u64, &str)> {
    let conditions = spec
        .devices
        .iter()
        .filter(|device| device.device_type == TYPE_GPU)
        .flat_map(|device| {
            let is_illness = |condition: &&DeviceCondition| {
                condition.condition_type == CONDITION_HEALTHY && condition.status == "False"
            };
            device
                .conditions
                .iter()
                .filter(is_illness)
                .map(|condition| (device.id.as_str(), condition))
        });
    conditions.filter_map(|(id, condition)| {
        Some((
            id.parse().ok()?,
            HealthReason::xid(&condition.reason)?,
            condition.last_transition_time.as_str(),
        ))
    })
}

/// Whether the object that the API server holds says all of `wanted`; labels and annotations of others may be there too.
pub fn says(held: &RawDevice, wanted: &Device) -> bool {
    let (ours, theirs) = (&wanted.metadata, &held.metadata);
    let includes = |held: &Option<BTreeMap<String, String>>, wanted: &Option<BTreeMap<String, String>>| {
        wanted
            .iter()
            .flatten()
            .all(|(key, value)| held.as_ref().and_then(|held| held.get(key)) == Some(value))
    };
    let is_owner = |owner: &OwnerReference| {
        theirs
            .owner_references
            .iter()
            .flatten()
            .any(|held| held.uid == owner.uid)
    };
    held.read().is_ok_and(|spec| spec == wanted.spec)
        && includes(&theirs.labels, &ours.labels)
        && includes(&theirs.annotations, &ours.annotations)
        && ours.owner_references.iter().flatten().all(is_owner)
}

/// What was said before, and when it is now.
struct History<'a> {
    before: Option<&'a DeviceSpec>,
    now: DateTime<Utc>,
}

fn annotations(
    fleet: &Fleet,
    remarks: &Remarks,
    partitions: Option<&GpuPartitionTable>,
) -> BTreeMap<String, String> {
    let checkpoints = remarks
        .checkpoints
        .clone()
        .map(|text| (DEVICES_CHECKPOINTS, text));
    let links = (!fleet.links.is_empty()).then(|| (GPU_LINKS, json!(fleet.links).to_string()));
    let partitions = partitions.map(|table| (GPU_PARTITIONS, json!(table).to_string()));
    let boot = remarks.boot_id.clone().map(|id| (BOOT_ID, id));
    let without = remarks
        .without_devices
        .clone()
        .map(|uids| (PODS_WITHOUT_DEVICES, uids));
    checkpoints
        .into_iter()
        .chain(links)
        .chain(partitions)
        .chain(boot)
        .chain(without)
        .map(|(name, text)| (name.to_owned(), text))
        .collect()
}

fn gpu(
    entry: &FleetGpu,
    slots: u32,
    history: &History<'_>,
    said: &DeviceLabels,
    injection: Option<&Injection>,
) -> DeviceInfo {
    let gpu = &entry.gpu;
    let said = said.of(TYPE_GPU, gpu.uuid.as_str(), gpu.bus_id.as_deref());
    let percent = Quantity::from_unsigned(WHOLE_DEVICE_PERCENT);
    let amounts = [
        (GPU_CORE, percent),
        (GPU_MEMORY, Quantity::from_unsigned(gpu.memory_bytes)),
        (GPU_MEMORY_RATIO, percent),
    ];
    let shares = entry
        .is_shared
        .then(|| (GPU_SHARED, Quantity::from_unsigned(u64::from(slots))));
    let sharing = (!entry.is_shared).then(|| (SHARING_LABEL.to_owned(), SHARING_DISABLED.to_owned()));
    DeviceInfo {
        device_type: TYPE_GPU.to_owned(),
        id: gpu.uuid.to_string(),
        minor: i32::try_from(gpu.minor).ok(),
        labels: gpu
            .labels
            .clone()
            .into_iter()
            .chain(said)
            .chain(location_labels(&gpu.location))
            .chain(sharing)
            .collect(),
        health: entry.is_healthy && is_injectable(injection, TYPE_GPU),
        resources: amounts
            .into_iter()
            .chain(shares)
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
        topology: topology(gpu.bus_id.as_deref(), &gpu.location),
        conditions: history
            .health(gpu.uuid.as_str(), entry.is_healthy, entry.reason, &entry.message)
            .into_iter()
            .chain(history.injection(gpu.uuid.as_str(), TYPE_GPU, injection))
            .chain(history.isolation(gpu.uuid.as_str(), injection))
            .collect(),
        ..DeviceInfo::default()
    }
}

fn other(
    entry: &FleetDevice,
    history: &History<'_>,
    said: &DeviceLabels,
    injection: Option<&Injection>,
) -> DeviceInfo {
    let device = &entry.device;
    let (kind, id) = (&device.device_type, device.id.as_str());
    let labels = said.of(kind, id, device.bus_id.as_deref());
    DeviceInfo {
        device_type: device.device_type.clone(),
        id: device.id.to_string(),
        minor: i32::try_from(device.minor).ok(),
        labels: device
            .labels
            .clone()
            .into_iter()
            .chain(labels)
            .chain(location_labels(&device.location))
            .collect(),
        health: entry.is_healthy && is_injectable(injection, kind),
        resources: device.resources.clone(),
        topology: topology(device.bus_id.as_deref(), &device.location),
        vf_groups: said.regroup(kind, device.bus_id.as_deref().unwrap_or(id), &device.vf_groups),
        conditions: history
            .health(id, entry.is_healthy, entry.reason, &entry.message)
            .into_iter()
            .chain(history.injection(id, kind, injection))
            .collect(),
        ..DeviceInfo::default()
    }
}

/// Schedulers of others want a NUMA node: where it is not known, as on machines that have only one, it is 0, and a label says
/// so. What is not known of the PCIe tree is empty.
fn topology(bus_id: Option<&str>, location: &PciLocation) -> Option<DeviceTopology> {
    if location.is_unknown() {
        return None;
    }
    let text = |text: Option<&str>| text.unwrap_or_default().to_owned();
    Some(DeviceTopology {
        socket_id: -1,
        node_id: location.numa_node.unwrap_or(0),
        pcie_id: text(location.pcie_id()),
        bus_id: text(bus_id),
    })
}

/// The labels that say what has no field in the topology.
fn location_labels(location: &PciLocation) -> impl Iterator<Item = (String, String)> {
    let root = location
        .root
        .as_deref()
        .map(|root| (PCIE_ROOT, label_value(root)));
    let numa = (location.numa_node.is_none() && !location.is_unknown())
        .then(|| (NUMA_NODE, NUMA_UNKNOWN.to_owned()));
    root.into_iter()
        .chain(numa)
        .map(|(name, value)| (name.to_owned(), value))
}

fn is_injectable(injection: Option<&Injection>, device_type: &str) -> bool {
    injection.is_none_or(|injection| injection.is_possible_for(device_type))
}

impl History<'_> {
    /// Why a device is in the state it is in, and since when; nothing of one that never had trouble.
    fn health(
        &self,
        id: &str,
        is_healthy: bool,
        reason: Option<HealthReason>,
        message: &str,
    ) -> Option<DeviceCondition> {
        let before = self.before(id, CONDITION_HEALTHY);
        let reason = match (reason, before) {
            (Some(reason), _) => reason.to_string(),
            // The process that saw why is gone.
            (None, Some(before)) if before.status == status(is_healthy) => return Some(before.clone()),
            (None, Some(_)) => CONDITION_HEALTHY.to_owned(),
            (None, None) => return None,
        };
        Some(self.condition(id, CONDITION_HEALTHY, status(is_healthy), &reason, message))
    }

    /// The condition that shows if a container can get a device of this type, and in which way.
    fn injection(
        &self,
        id: &str,
        device_type: &str,
        injection: Option<&Injection>,
    ) -> Option<DeviceCondition> {
        let injection = injection?;
        let is_possible = injection.is_possible_for(device_type);
        // A missing CDI spec of the driver blocks GPUs alone.
        if is_possible && !injection.is_possible() {
            return Some(self.condition(
                id,
                CONDITION_INJECTABLE,
                status(true),
                "Cdi",
                "devices of this type need no driver",
            ));
        }
        let status = match injection.certainty {
            Certainty::Assumed => UNKNOWN,
            Certainty::Proven | Certainty::Impossible => status(is_possible),
        };
        Some(self.condition(
            id,
            CONDITION_INJECTABLE,
            status,
            injection.reason,
            &injection.message,
        ))
    }

    /// That containers which ask for no GPU may see this one; nothing where they do not, unless they did.
    fn isolation(&self, id: &str, injection: Option<&Injection>) -> Option<DeviceCondition> {
        let exposure = injection?.exposure.as_ref();
        if exposure.is_none() && self.before(id, CONDITION_ISOLATED).is_none() {
            return None;
        }
        let of_pods = match exposure {
            None => {
                return Some(self.condition(
                    id,
                    CONDITION_ISOLATED,
                    status(true),
                    "Closed",
                    "containers that ask for no GPU see none",
                ));
            }
            Some(Exposure::EveryPod) => String::new(),
            Some(Exposure::RuntimeClass(class)) => format!(" in a pod with runtimeClassName: {class}"),
        };
        let message = format!(
            "a container that asks for no GPU{of_pods} sees this one if its image sets the vendor's variable, because the container \
             runtime acts on that; the runtime hook (--nri-socket) closes it"
        );
        Some(self.condition(id, CONDITION_ISOLATED, status(false), "ImageVariable", &message))
    }

    /// A condition that keeps its time as long as its status stays.
    fn condition(
        &self,
        id: &str,
        condition_type: &str,
        status: &str,
        reason: &str,
        message: &str,
    ) -> DeviceCondition {
        let same = self
            .before(id, condition_type)
            .filter(|before| before.status == status);
        let since = same.map(|same| same.last_transition_time.clone());
        DeviceCondition {
            condition_type: condition_type.to_owned(),
            status: status.to_owned(),
            observed_generation: None,
            last_transition_time: since
                .unwrap_or_else(|| self.now.to_rfc3339_opts(SecondsFormat::Secs, true)),
            reason: reason.to_owned(),
            message: message.to_owned(),
        }
    }

    fn before(&self, id: &str, condition_type: &str) -> Option<&DeviceCondition> {
        let devices = self
            .before
            .iter()
            .flat_map(|before| &before.devices)
            .filter(|device| device.id == id);
        devices
            .flat_map(|device| &device.conditions)
            .find(|condition| condition.condition_type == condition_type)
    }
}

/// The status of a condition of which neither is known.
const UNKNOWN: &str = "Unknown";

fn status(is_true: bool) -> &'static str {
    if is_true { "True" } else { "False" }
}

fn labels(fleet: &Fleet, remarks: &Remarks) -> impl Iterator<Item = (String, String)> {
    let mut models = fleet.gpus.iter().map(|entry| entry.gpu.model.as_str());
    let model = models.next().filter(|first| models.all(|model| model == *first));
    let model = model.map(|model| model.strip_prefix("NVIDIA ").unwrap_or(model));
    let of_gpus = [
        (GPU_VENDOR_LABEL, Some(fleet.vendor.as_str())),
        (GPU_MODEL_LABEL, model),
        (GPU_DRIVER_LABEL, fleet.driver_version.as_deref()),
    ];
    let of_gpus = of_gpus.into_iter().filter(|_| !fleet.gpus.is_empty());
    let value = |text: Option<&str>| text.map(label_value).filter(|value| !value.is_empty());
    let serves_vendor = remarks
        .serves_vendor
        .then(|| (SERVES_VENDOR_LABEL.to_owned(), "true".to_owned()));
    of_gpus
        .filter_map(move |(key, text)| Some((key.to_owned(), value(text)?)))
        .chain(serves_vendor)
}

/// The text in the characters that a label may have.
fn label_value(text: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let allowed: String = text
        .chars()
        .map(|c| if is_allowed(c) { c } else { '-' })
        .take(MAX_LABEL)
        .collect();
    allowed
        .trim_matches(|c: char| !c.is_ascii_alphanumeric())
        .to_owned()
}
