//! The Device object of this node, in the form that Koordinator's scheduler and gpushare's read.

use std::collections::BTreeMap;
use std::sync::Arc;

use chrono::{DateTime, SecondsFormat, Utc};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use proto::device::{
    BOOT_ID, CONDITION_HEALTHY, CONDITION_INJECTABLE, CONDITION_ISOLATED, CONDITION_LIMITED, Device,
    DeviceCondition, DeviceInfo, DeviceSpec, DeviceTopology, ENFORCEMENT, GPU_DRIVER_LABEL, GPU_MODEL_LABEL,
    GPU_VENDOR_LABEL, RawDevice, SERVES_VENDOR_LABEL, SHARING_DISABLED, SHARING_LABEL, TYPE_GPU,
};
use proto::kubelet_allocations::DEVICES_CHECKPOINTS;
use proto::node::Node;
use proto::plugin_reports::PODS_WITHOUT_DEVICES;
use proto::quantity::Quantity;
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use proto::topology::{
    GPU_LINKS, GPU_PARTITION_POLICY, GPU_PARTITIONS, GpuPartitionPolicy, NUMA_NODE, NUMA_UNKNOWN, PCIE_ROOT,
};
use serde_json::json;

use crate::enforcement::{Enforcements, Level};
use crate::fleet::{FleetDevice, FleetEntry, FleetGpu, NodeFleet};
use crate::health::HealthReason;
use crate::injection::{Certainty, Exposure, Injection};
use crate::inventory::{PciLocation, PhysicalId};
use crate::pods::WHOLE_DEVICE_PERCENT;

use super::node_overrides::NodeOverrides;
use super::partitions;

/// Longest value of a label.
const MAX_LABEL: usize = 63;

/// The status of a condition that is neither true nor false.
const UNKNOWN: &str = "Unknown";

/// The inputs of the object beside the devices themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceObjectInputs {
    /// The annotation with the devices of pods that gpushare's scheduler did not place, if there are any.
    pub checkpoints: Option<String>,
    /// True if this plugin serves a vendor's resource too.
    pub serves_vendor: bool,
    /// The operator's labels and partitions.
    pub overrides: Arc<NodeOverrides>,
    /// The policy for partitions of GPUs, if the operator sets one.
    pub partition_policy: Option<GpuPartitionPolicy>,
    /// The injection mode; none until it is decided.
    pub injection: Option<Injection>,
    /// The enforcement levels of the GPUs; empty until they are decided.
    pub enforcements: Arc<Enforcements>,
    /// The present boot of this node, if the kernel names it.
    pub boot_id: Option<String>,
    /// The annotation with the pods that have no device, if it is known.
    pub pods_without_devices: Option<String>,
}

impl DeviceObjectInputs {
    /// The object that describes `fleet`. A condition with the same status as in `before` keeps its time.
    pub fn device(
        &self,
        fleet: &NodeFleet,
        node: &Node,
        before: Option<&DeviceSpec>,
        now: DateTime<Utc>,
    ) -> Device {
        let conditions = Conditions {
            before,
            now,
            injection: self.injection.as_ref(),
            enforcements: &self.enforcements,
        };
        let mut devices = Vec::new();
        for entry in &fleet.gpus {
            devices.push(self.gpu(entry, fleet.ids.slots(), &conditions));
        }
        for entry in &fleet.others {
            devices.push(self.other_device(entry, &conditions));
        }
        let name = node.metadata.name.clone().unwrap_or_default();
        let mut device = Device::new(&name, DeviceSpec { devices });
        let (labels, annotations) = self.metadata(fleet);
        device.metadata.labels = Some(labels);
        device.metadata.annotations = (!annotations.is_empty()).then_some(annotations);
        // The garbage collector removes the object with its node.
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

    /// The entry of a GPU.
    fn gpu(&self, entry: &FleetGpu, slots: u32, conditions: &Conditions<'_>) -> DeviceInfo {
        let percent = Quantity::from_unsigned(WHOLE_DEVICE_PERCENT);
        let mut info = self.device_info(&FleetEntry::from(entry), conditions);
        info.resources = BTreeMap::from([
            (GPU_CORE.to_owned(), percent),
            (
                GPU_MEMORY.to_owned(),
                Quantity::from_unsigned(entry.gpu.memory_bytes),
            ),
            (GPU_MEMORY_RATIO.to_owned(), percent),
        ]);
        if let Some(found) = self.enforcements.of(&entry.gpu.uuid) {
            let level = found.level.as_str().to_owned();
            info.labels.insert(ENFORCEMENT.to_owned(), level);
        }
        if entry.is_shared {
            let slots = Quantity::from_unsigned(u64::from(slots));
            info.resources.insert(GPU_SHARED.to_owned(), slots);
        } else {
            info.labels
                .insert(SHARING_LABEL.to_owned(), SHARING_DISABLED.to_owned());
        }
        info
    }

    /// The entry of a device that is not a GPU.
    fn other_device(&self, entry: &FleetDevice, conditions: &Conditions<'_>) -> DeviceInfo {
        let device = &entry.device;
        let address = device.bus_id.as_deref().unwrap_or(device.id.as_str());
        let labels = &self.overrides.labels;
        DeviceInfo {
            resources: device.resources.clone(),
            vf_groups: labels.regroup(&device.device_type, address, &device.vf_groups),
            ..self.device_info(&FleetEntry::from(entry), conditions)
        }
    }

    /// The part of an entry that is alike for all types.
    fn device_info(&self, entry: &FleetEntry<'_>, conditions: &Conditions<'_>) -> DeviceInfo {
        let mut labels = entry.labels.clone();
        let configured = &self.overrides.labels;
        labels.extend(configured.of(entry.device_type, entry.key.id.as_str(), entry.bus_id));
        add_location_labels(entry.location, &mut labels);
        DeviceInfo {
            device_type: entry.device_type.to_owned(),
            id: entry.key.id.to_string(),
            minor: i32::try_from(entry.key.minor).ok(),
            labels,
            // A device that no container can get is no place for a pod, however healthy it is.
            health: entry.is_healthy && conditions.is_injectable(entry.device_type),
            topology: topology(entry.bus_id, entry.location),
            conditions: conditions.of(entry),
            ..DeviceInfo::default()
        }
    }

    /// The object's labels and annotations.
    fn metadata(&self, fleet: &NodeFleet) -> (BTreeMap<String, String>, BTreeMap<String, String>) {
        let (mut labels, mut annotations) = (BTreeMap::new(), BTreeMap::new());
        if !fleet.gpus.is_empty() {
            for (key, text) in [
                (GPU_VENDOR_LABEL, Some(fleet.vendor.as_str())),
                (GPU_MODEL_LABEL, common_model(fleet)),
                (GPU_DRIVER_LABEL, fleet.driver_version.as_deref()),
            ] {
                let value = text.map(label_value).filter(|value| !value.is_empty());
                labels.extend(value.map(|value| (key.to_owned(), value)));
            }
        }
        if let Some(level) = self.enforcements.lowest() {
            labels.insert(ENFORCEMENT.to_owned(), level.as_str().to_owned());
        }
        if self.serves_vendor {
            labels.insert(SERVES_VENDOR_LABEL.to_owned(), "true".to_owned());
        }
        if let Some(table) = partitions::table(fleet, self.overrides.partitions.as_ref()) {
            let policy = self.partition_policy.or(fleet.partition_policy);
            let policy = policy.unwrap_or_default().as_str();
            labels.insert(GPU_PARTITION_POLICY.to_owned(), policy.to_owned());
            annotations.insert(GPU_PARTITIONS.to_owned(), json!(table).to_string());
        }
        if !fleet.links.is_empty() {
            annotations.insert(GPU_LINKS.to_owned(), json!(fleet.links).to_string());
        }
        for (key, text) in [
            (DEVICES_CHECKPOINTS, &self.checkpoints),
            (BOOT_ID, &self.boot_id),
            (PODS_WITHOUT_DEVICES, &self.pods_without_devices),
        ] {
            annotations.extend(text.clone().map(|text| (key.to_owned(), text)));
        }
        (labels, annotations)
    }
}

/// The GPUs that the object says are unhealthy by an XID, with the XID and the time since when.
pub fn unhealthy_by_xid(spec: &DeviceSpec) -> Vec<(PhysicalId, u64, &str)> {
    let mut found = Vec::new();
    for device in spec
        .devices
        .iter()
        .filter(|device| device.device_type == TYPE_GPU)
    {
        for condition in &device.conditions {
            if condition.condition_type != CONDITION_HEALTHY || condition.status != status(false) {
                continue;
            }
            if let (Ok(id), Some(xid)) = (device.id.parse(), HealthReason::xid(&condition.reason)) {
                found.push((id, xid, condition.last_transition_time.as_str()));
            }
        }
    }
    found
}

/// Returns true if the stored object has everything of `wanted`. It may also have labels and annotations of others.
pub fn matches(stored: &RawDevice, wanted: &Device) -> bool {
    let includes = |stored: &Option<BTreeMap<String, String>>, wanted: &Option<BTreeMap<String, String>>| {
        let mut wanted = wanted.iter().flatten();
        wanted.all(|(key, value)| stored.as_ref().and_then(|stored| stored.get(key)) == Some(value))
    };
    let stored_owners = stored.metadata.owner_references.as_deref().unwrap_or_default();
    let mut wanted_owners = wanted.metadata.owner_references.iter().flatten();
    stored.read().is_ok_and(|spec| spec == wanted.spec)
        && includes(&stored.metadata.labels, &wanted.metadata.labels)
        && includes(&stored.metadata.annotations, &wanted.metadata.annotations)
        && wanted_owners.all(|owner| stored_owners.iter().any(|stored| stored.uid == owner.uid))
}

/// The location in the form of the object. Unknown parts of the PCIe tree are empty.
fn topology(bus_id: Option<&str>, location: &PciLocation) -> Option<DeviceTopology> {
    if location.is_unknown() {
        return None;
    }
    Some(DeviceTopology {
        socket_id: -1,
        // Koordinator's scheduler needs one. Machines with only one do not report it, and a label marks it as unknown.
        node_id: location.numa_node.unwrap_or(0),
        pcie_id: location.pcie_id().unwrap_or_default().to_owned(),
        bus_id: bus_id.unwrap_or_default().to_owned(),
    })
}

/// Adds the labels for those parts of a location that have no field in the topology.
fn add_location_labels(location: &PciLocation, labels: &mut BTreeMap<String, String>) {
    if let Some(root) = &location.root {
        labels.insert(PCIE_ROOT.to_owned(), label_value(root));
    }
    if location.numa_node.is_none() && !location.is_unknown() {
        labels.insert(NUMA_NODE.to_owned(), NUMA_UNKNOWN.to_owned());
    }
}

/// The model of the GPUs, if all have the same.
fn common_model(fleet: &NodeFleet) -> Option<&str> {
    let mut models = fleet.gpus.iter().map(|entry| entry.gpu.model.as_str());
    let model = models.next()?;
    if models.any(|other| other != model) {
        return None;
    }
    Some(model.strip_prefix("NVIDIA ").unwrap_or(model))
}

/// The text with only those characters that a label may have.
fn label_value(text: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let allowed: String = text
        .chars()
        .map(|c| if is_allowed(c) { c } else { '-' })
        .take(MAX_LABEL)
        .collect();
    let is_end = |c: char| c.is_ascii_alphanumeric();
    allowed.trim_matches(|c| !is_end(c)).to_owned()
}

fn status(is_true: bool) -> &'static str {
    if is_true { "True" } else { "False" }
}

/// The inputs of a device's conditions.
struct Conditions<'a> {
    before: Option<&'a DeviceSpec>,
    now: DateTime<Utc>,
    injection: Option<&'a Injection>,
    enforcements: &'a Enforcements,
}

impl Conditions<'_> {
    /// All conditions of a device.
    fn of(&self, entry: &FleetEntry<'_>) -> Vec<DeviceCondition> {
        let id = entry.key.id.as_str();
        let mut conditions = Vec::new();
        conditions.extend(self.health(id, entry));
        if let Some(injection) = self.injection {
            conditions.push(self.injectable(id, entry.device_type, injection));
            if entry.device_type == TYPE_GPU {
                conditions.extend(self.isolated(id, injection));
            }
        }
        if let Some(found) = self.enforcements.of(&entry.key.id) {
            let status = status(found.level == Level::Driver);
            conditions.push(self.condition(id, CONDITION_LIMITED, status, found.reason, &found.message));
        }
        conditions
    }

    fn is_injectable(&self, device_type: &str) -> bool {
        self.injection
            .is_none_or(|injection| injection.is_possible_for(device_type))
    }

    /// The health of a device and the time since when; none for a device that never had trouble.
    fn health(&self, id: &str, entry: &FleetEntry<'_>) -> Option<DeviceCondition> {
        let status = status(entry.is_healthy);
        let before = self.find_before(id, CONDITION_HEALTHY);
        let reason = match (entry.reason, before) {
            (Some(reason), _) => reason.to_string(),
            // The process that observed the reason is gone.
            (None, Some(before)) if before.status == status => return Some(before.clone()),
            (None, Some(_)) => CONDITION_HEALTHY.to_owned(),
            (None, None) => return None,
        };
        Some(self.condition(id, CONDITION_HEALTHY, status, &reason, entry.message))
    }

    /// Shows whether a container can get a device of this type, and in which injection mode.
    fn injectable(&self, id: &str, device_type: &str, injection: &Injection) -> DeviceCondition {
        let is_possible = injection.is_possible_for(device_type);
        let condition =
            |status, reason, message| self.condition(id, CONDITION_INJECTABLE, status, reason, message);
        // A missing CDI spec of the driver blocks GPUs alone.
        if is_possible && !injection.is_possible() {
            return condition(status(true), "Cdi", "devices of this type need no driver");
        }
        let status = match injection.certainty {
            Certainty::Assumed => UNKNOWN,
            Certainty::Proven | Certainty::Impossible => status(is_possible),
        };
        condition(status, injection.reason, &injection.message)
    }

    /// Shows that containers which request no GPU may see this one; none where they cannot, unless they could earlier.
    fn isolated(&self, id: &str, injection: &Injection) -> Option<DeviceCondition> {
        let of_pods = match &injection.exposure {
            None if self.find_before(id, CONDITION_ISOLATED).is_none() => return None,
            None => {
                let message = "containers that ask for no GPU see none";
                return Some(self.condition(id, CONDITION_ISOLATED, status(true), "Closed", message));
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
        let before = self.find_before(id, condition_type);
        let last_transition_time = match before.filter(|before| before.status == status) {
            Some(same) => same.last_transition_time.clone(),
            None => self.now.to_rfc3339_opts(SecondsFormat::Secs, true),
        };
        DeviceCondition {
            condition_type: condition_type.to_owned(),
            status: status.to_owned(),
            observed_generation: None,
            last_transition_time,
            reason: reason.to_owned(),
            message: message.to_owned(),
        }
    }

    fn find_before(&self, id: &str, condition_type: &str) -> Option<&DeviceCondition> {
        let devices = self.before?.devices.iter().filter(|device| device.id == id);
        devices
            .flat_map(|device| &device.conditions)
            .find(|condition| condition.condition_type == condition_type)
    }
}
