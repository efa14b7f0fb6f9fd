//! The Device object of this node, in the form that Koordinator's scheduler and ours read.

use std::collections::BTreeMap;

use chrono::{DateTime, SecondsFormat, Utc};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use proto::device::{Device, DeviceCondition, DeviceInfo, DeviceSpec, DeviceTopology, TYPE_GPU};
use proto::node::Node;
use proto::quantity::Quantity;
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};

use crate::fleet::{Fleet, FleetGpu};
use crate::health::Reason;
use crate::inventory::{Gpu, GpuUuid};
use crate::pods::WHOLE_DEVICE_PERCENT;

const VENDOR_LABEL: &str = "node.koordinator.sh/gpu-vendor";
const MODEL_LABEL: &str = "node.koordinator.sh/gpu-model";
const DRIVER_LABEL: &str = "node.koordinator.sh/gpu-driver-version";
const HEALTHY: &str = "Healthy";

/// Longest value of a label.
const MAX_LABEL: usize = 63;

/// The object that describes `fleet`; a condition that is as it was in `before` keeps its time.
pub fn device(fleet: &Fleet, node: &Node, before: Option<&Device>, now: DateTime<Utc>) -> Device {
    let name = node.metadata.name.clone().unwrap_or_default();
    let devices = fleet.gpus.iter().map(|entry| info(entry, fleet.ids.slots(), before, now)).collect();
    let mut device = Device::new(&name, DeviceSpec { devices });
    device.metadata.labels = Some(labels(fleet));
    device.metadata.owner_references =
        node.metadata.uid.clone().map(|uid| {
            vec![OwnerReference { api_version: "v1".to_owned(), kind: "Node".to_owned(), name, uid, ..OwnerReference::default() }]
        });
    device
}

/// The GPUs that the object says are unhealthy by an XID, each with that and since when.
pub fn sick_by_xid(device: &Device) -> impl Iterator<Item = (GpuUuid, u64, &str)> {
    let conditions = device.spec.devices.iter().filter(|device| device.device_type == TYPE_GPU).flat_map(|device| {
        let own = device.conditions.iter().filter(|condition| condition.condition_type == HEALTHY && condition.status == "False");
        own.map(|condition| (device.id.as_str(), condition))
    });
    conditions
        .filter_map(|(id, condition)| Some((id.parse().ok()?, Reason::xid(&condition.reason)?, condition.last_transition_time.as_str())))
}

/// Whether applying `wanted` over `held` would change nothing.
pub fn is_same(held: &Device, wanted: &Device) -> bool {
    held.spec == wanted.spec
        && held.metadata.labels == wanted.metadata.labels
        && held.metadata.owner_references == wanted.metadata.owner_references
}

fn info(entry: &FleetGpu, slots: u32, before: Option<&Device>, now: DateTime<Utc>) -> DeviceInfo {
    let gpu = &entry.gpu;
    let percent = Quantity::from_unsigned(WHOLE_DEVICE_PERCENT);
    let resources = [
        (GPU_CORE, percent),
        (GPU_MEMORY, Quantity::from_unsigned(gpu.memory_bytes)),
        (GPU_MEMORY_RATIO, percent),
        (GPU_SHARED, Quantity::from_unsigned(u64::from(slots))),
    ];
    DeviceInfo {
        device_type: TYPE_GPU.to_owned(),
        id: gpu.uuid.to_string(),
        minor: i32::try_from(gpu.minor).ok(),
        health: entry.is_healthy,
        resources: resources.map(|(name, value)| (name.to_owned(), value)).into(),
        topology: topology(gpu),
        conditions: vec![condition(entry, before, now)],
        ..DeviceInfo::default()
    }
}

fn topology(gpu: &Gpu) -> Option<DeviceTopology> {
    let node_id = gpu.numa_node?;
    Some(DeviceTopology { socket_id: -1, node_id, pcie_id: String::new(), bus_id: gpu.bus_id.clone().unwrap_or_default() })
}

fn condition(entry: &FleetGpu, before: Option<&Device>, now: DateTime<Utc>) -> DeviceCondition {
    let status = if entry.is_healthy { "True" } else { "False" };
    let devices = before.iter().flat_map(|before| &before.spec.devices);
    let conditions = devices.filter(|device| device.id == entry.gpu.uuid.as_str()).flat_map(|device| &device.conditions);
    let mut same = conditions.filter(|condition| condition.condition_type == HEALTHY && condition.status == status);
    let since = same.next().map(|condition| condition.last_transition_time.clone());
    DeviceCondition {
        condition_type: HEALTHY.to_owned(),
        status: status.to_owned(),
        last_transition_time: since.unwrap_or_else(|| now.to_rfc3339_opts(SecondsFormat::Secs, true)),
        reason: entry.reason.map_or_else(|| HEALTHY.to_owned(), |reason| reason.to_string()),
        message: entry.message.clone(),
    }
}

fn labels(fleet: &Fleet) -> BTreeMap<String, String> {
    let mut models = fleet.gpus.iter().map(|entry| entry.gpu.model.as_str());
    let model = models.next().filter(|first| models.all(|model| model == *first));
    let model = model.map(|model| model.strip_prefix("NVIDIA ").unwrap_or(model));
    let labels = [(VENDOR_LABEL, Some(fleet.vendor.as_str())), (MODEL_LABEL, model), (DRIVER_LABEL, fleet.driver_version.as_deref())];
    let value = |text: Option<&str>| text.map(label_value).filter(|value| !value.is_empty());
    labels.into_iter().filter_map(|(key, text)| Some((key.to_owned(), value(text)?))).collect()
}

/// The text in the characters that a label may have.
fn label_value(text: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let allowed: String = text.chars().map(|c| if is_allowed(c) { c } else { '-' }).take(MAX_LABEL).collect();
    allowed.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}
