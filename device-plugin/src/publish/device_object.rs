//! The Device object of this node, in the form that Koordinator's scheduler and gpushare's read.

use std::collections::BTreeMap;
use std::sync::Arc;

use chrono::{DateTime, SecondsFormat, Utc};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use proto::device::{
    BOOT_ID, CONDITION_HEALTHY, CONDITION_INJECTABLE, CONDITION_ISOLATED, CONDITION_LIMITED,
    CONDITION_REPORT_VALID, Device, DeviceCondition, DeviceInfo, DeviceSpec, DeviceTopology, ENFORCEMENT,
    GPU_DRIVER_LABEL, GPU_MODEL_LABEL, GPU_VENDOR_LABEL, RESERVED_MEMORY, RawDevice, SERVES_VENDOR_LABEL,
    SHARING_DISABLED, SHARING_LABEL, SIMULATED_LABEL, TYPE_GPU,
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

use crate::devices::fleet::{FleetDevice, FleetEntry, NodeFleet};
use crate::devices::inventory::{Gpu, OtherDevice, PciLocation};
use crate::inject::enforcement::{Enforcements, Level, lowest_level};
use crate::inject::mode::{Certainty, Exposure, Injection};
use crate::node::pods::WHOLE_DEVICE_PERCENT;

use super::node_overrides::{MAX_LABEL, NodeOverrides};
use super::partitions;
use super::report_problem::ReportProblem;

/// The status of a condition that the plugin can neither confirm nor deny.
const UNKNOWN: &str = "Unknown";

/// The inputs of the Device object beside the devices themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceObjectInputs {
    /// The annotation with the devices of pods that gpushare's scheduler did not place, if there are any.
    pub(crate) kubelet_allocations: Option<String>,
    /// True if this plugin serves whole GPUs too, under a vendor's resource name.
    pub(crate) serves_vendor: bool,
    /// True if the devices are simulated: read from a file (`--inventory=file:`).
    pub(crate) is_simulated: bool,
    pub(crate) overrides: Arc<NodeOverrides>,
    pub(crate) partition_policy: Option<GpuPartitionPolicy>,
    /// The injection mode (`cdi` or `envvar`); none until it is decided.
    pub(crate) injection: Option<Injection>,
    /// The enforcement level of memory limits on each GPU; empty until the levels are decided.
    pub enforcements: Arc<Enforcements>,
    pub(crate) boot_id: Option<String>,
    /// The annotation with the pods that have no device, if it is known.
    pub(crate) pods_without_devices: Option<String>,
    pub(crate) report_problem: Option<ReportProblem>,
}

impl DeviceObjectInputs {
    /// The Device object that describes `fleet`. A condition with the same status as in the object `before` keeps its time.
    pub fn device(
        &self,
        fleet: &NodeFleet,
        node: &Node,
        before: Option<&DeviceSpec>,
        now: DateTime<Utc>,
    ) -> Device {
        let entries = DeviceEntries {
            inputs: self,
            before,
            now,
        };
        let mut devices = Vec::new();
        for entry in &fleet.gpus {
            devices.push(entries.gpu(entry, fleet.ids.slots()));
        }
        for entry in &fleet.others {
            devices.push(entries.other_device(entry));
        }
        // Schedulers find the object by the name of its node.
        let name = node.metadata.name.clone().unwrap_or_default();
        let mut device = Device::new(&name, DeviceSpec { devices });
        device.metadata.labels = Some(self.labels(fleet));
        let annotations = self.annotations(fleet);
        // With server-side apply an empty map would claim the field from other writers.
        device.metadata.annotations = (!annotations.is_empty()).then_some(annotations);
        if let Some(uid) = node.metadata.uid.clone() {
            // The garbage collector removes the object with its node.
            device.metadata.owner_references = Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name,
                uid,
                ..OwnerReference::default()
            }]);
        }
        device
    }

    fn labels(&self, fleet: &NodeFleet) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::new();
        if !fleet.gpus.is_empty() {
            for (key, text) in [
                (GPU_VENDOR_LABEL, Some(fleet.vendor.as_str())),
                (GPU_MODEL_LABEL, common_model(fleet)),
                (GPU_DRIVER_LABEL, fleet.driver_version.as_deref()),
            ] {
                let value = label_value(text.unwrap_or_default());
                if !value.is_empty() {
                    labels.insert(key.to_owned(), value);
                }
            }
        }
        if let Some(level) = lowest_level(&self.enforcements) {
            labels.insert(ENFORCEMENT.to_owned(), level.as_str().to_owned());
        }
        if self.serves_vendor {
            labels.insert(SERVES_VENDOR_LABEL.to_owned(), "true".to_owned());
        }
        if self.is_simulated {
            labels.insert(SIMULATED_LABEL.to_owned(), "true".to_owned());
        }
        // An unreadable partition table keeps its policy, which decides if whole GPUs may be placed without a partition.
        let is_unreadable = self.overrides.partitions_problem.is_some();
        if is_unreadable || partitions::table(fleet, &self.overrides).is_some() {
            let policy = self.partition_policy.or(fleet.partition_policy);
            let policy = policy.unwrap_or_default().as_str();
            labels.insert(GPU_PARTITION_POLICY.to_owned(), policy.to_owned());
        }
        labels
    }

    /// The annotations that schedulers read, and the boot ID, which [`super::corrections`] reads after a restart of the plugin.
    fn annotations(&self, fleet: &NodeFleet) -> BTreeMap<String, String> {
        let table = partitions::table(fleet, &self.overrides);
        let links = (!fleet.links.is_empty()).then_some(&fleet.links);
        let mut annotations = BTreeMap::new();
        for (key, text) in [
            (GPU_PARTITIONS, table.map(|table| json!(table).to_string())),
            (GPU_LINKS, links.map(|links| json!(links).to_string())),
            (DEVICES_CHECKPOINTS, self.kubelet_allocations.clone()),
            (BOOT_ID, self.boot_id.clone()),
            (PODS_WITHOUT_DEVICES, self.pods_without_devices.clone()),
        ] {
            if let Some(text) = text {
                annotations.insert(key.to_owned(), text);
            }
        }
        annotations
    }
}

/// Returns true if the API server's object `stored` has everything of `wanted`. It may have labels and annotations of others too.
pub fn matches(stored: &RawDevice, wanted: &Device) -> bool {
    let stored_owners = stored.metadata.owner_references.as_deref().unwrap_or_default();
    let mut owners = wanted.metadata.owner_references.iter().flatten();
    stored.read().is_ok_and(|spec| spec == wanted.spec)
        && includes(stored.metadata.labels.as_ref(), wanted.metadata.labels.as_ref())
        && includes(stored.metadata.annotations.as_ref(), wanted.metadata.annotations.as_ref())
        // A Node that was deleted and created again has the same name and another UID.
        && owners.all(|owner| stored_owners.iter().any(|stored| stored.uid == owner.uid))
}

type Pairs = BTreeMap<String, String>;

fn includes(stored: Option<&Pairs>, wanted: Option<&Pairs>) -> bool {
    let mut wanted = wanted.into_iter().flatten();
    wanted.all(|(key, value)| stored.and_then(|stored| stored.get(key)) == Some(value))
}

/// The location in the form of the Device object; none if nothing of it is known. Unknown parts of the PCIe tree are empty.
fn topology(bus_id: Option<&str>, location: &PciLocation) -> Option<DeviceTopology> {
    if location.is_unknown() {
        return None;
    }
    Some(DeviceTopology {
        // Unknown: neither NVML nor sysfs names the socket.
        socket_id: -1,
        // Koordinator's scheduler needs a NUMA node. Machines with only one do not report it, and a label marks it as unknown.
        node_id: location.numa_node.unwrap_or(0),
        pcie_id: location.pcie_id().unwrap_or_default().to_owned(),
        bus_id: bus_id.unwrap_or_default().to_owned(),
    })
}

/// Adds labels for the parts of a location that have no field in the topology of a device: root complex, and an unknown NUMA
/// node.
fn add_location_labels(location: &PciLocation, labels: &mut BTreeMap<String, String>) {
    if let Some(root) = &location.root {
        labels.insert(PCIE_ROOT.to_owned(), label_value(root));
    }
    if location.numa_node.is_none() && !location.is_unknown() {
        labels.insert(NUMA_NODE.to_owned(), NUMA_UNKNOWN.to_owned());
    }
}

fn common_model(fleet: &NodeFleet) -> Option<&str> {
    let mut models = fleet.gpus.iter().map(|entry| entry.device.model.as_str());
    let model = models.next()?;
    if models.any(|other| other != model) {
        return None;
    }
    // NVML's name begins with the vendor, the value of Koordinator's label does not.
    Some(model.strip_prefix("NVIDIA ").unwrap_or(model))
}

/// The text as the value of a label: cut to the longest length, with `-` in place of characters that no label may have.
fn label_value(text: &str) -> String {
    let mut allowed = String::new();
    for c in text.chars().take(MAX_LABEL) {
        let is_allowed = c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        allowed.push(if is_allowed { c } else { '-' });
    }
    // The API server demands a letter or a digit at both ends.
    let is_inner = |c: char| !c.is_ascii_alphanumeric();
    allowed.trim_matches(is_inner).to_owned()
}

fn status(is_true: bool) -> &'static str {
    if is_true { "True" } else { "False" }
}

struct DeviceEntries<'a> {
    inputs: &'a DeviceObjectInputs,
    /// The devices in the last write, or in the stored object before the first write; their conditions have transition times.
    before: Option<&'a DeviceSpec>,
    now: DateTime<Utc>,
}

impl DeviceEntries<'_> {
    fn gpu(&self, entry: &FleetDevice<Gpu>, slots: u32) -> DeviceInfo {
        let percent = Quantity::from_unsigned(WHOLE_DEVICE_PERCENT);
        let mut info = self.device_info(&FleetEntry::from(entry));
        info.resources = BTreeMap::from([
            (GPU_CORE.to_owned(), percent),
            (
                GPU_MEMORY.to_owned(),
                Quantity::from_unsigned(entry.device.memory_bytes),
            ),
            (GPU_MEMORY_RATIO.to_owned(), percent),
        ]);
        if entry.device.reserved_bytes > 0 {
            let bytes = entry.device.reserved_bytes.to_string();
            info.labels.insert(RESERVED_MEMORY.to_owned(), bytes);
        }
        if let Some(found) = self.inputs.enforcements.get(&entry.device.uuid) {
            let level = found.level.as_str().to_owned();
            info.labels.insert(ENFORCEMENT.to_owned(), level);
        }
        if entry.is_shared {
            let slots = Quantity::from_unsigned(u64::from(slots));
            info.resources.insert(GPU_SHARED.to_owned(), slots);
        } else {
            // A missing number of slots is not enough: the scheduler reads it as the default, for Device objects of Koordinator.
            info.labels
                .insert(SHARING_LABEL.to_owned(), SHARING_DISABLED.to_owned());
        }
        info
    }

    fn other_device(&self, entry: &FleetDevice<OtherDevice>) -> DeviceInfo {
        let device = &entry.device;
        let address = device.bus_id.as_deref().unwrap_or(device.id.as_str());
        let labels = &self.inputs.overrides.labels;
        DeviceInfo {
            resources: device.resources.clone(),
            vf_groups: labels.regroup(&device.device_type, address, &device.vf_groups),
            ..self.device_info(&FleetEntry::from(entry))
        }
    }

    /// The part of a device's entry that is alike for devices of all types.
    fn device_info(&self, entry: &FleetEntry<'_>) -> DeviceInfo {
        let mut labels = entry.labels.clone();
        let configured = &self.inputs.overrides.labels;
        labels.extend(configured.of_device(entry.device_type, entry.key.id.as_str(), entry.bus_id));
        // Last, because the operator's labels must not replace those that the scheduler relies on.
        add_location_labels(entry.location, &mut labels);
        let injection = self.inputs.injection.as_ref();
        let is_injectable = injection.is_none_or(|injection| injection.is_possible_for(entry.device_type));
        DeviceInfo {
            device_type: entry.device_type.to_owned(),
            id: entry.key.id.to_string(),
            minor: i32::try_from(entry.key.minor).ok(),
            labels,
            // A device that no container can get is no place for a pod, however healthy it is.
            health: entry.is_healthy && is_injectable,
            topology: topology(entry.bus_id, entry.location),
            conditions: self.conditions(entry),
            ..DeviceInfo::default()
        }
    }

    /// The conditions of a device: health and injection, and those of GPUs about isolation, the report and memory limits.
    fn conditions(&self, entry: &FleetEntry<'_>) -> Vec<DeviceCondition> {
        let id = entry.key.id.as_str();
        let mut conditions = Vec::new();
        conditions.extend(self.health_condition(id, entry));
        if let Some(injection) = &self.inputs.injection {
            conditions.push(self.injection_condition(id, entry.device_type, injection));
            if entry.device_type == TYPE_GPU {
                conditions.extend(self.isolation_condition(id, injection));
            }
        }
        if entry.device_type == TYPE_GPU {
            conditions.extend(self.report_condition(id));
        }
        if let Some(found) = self.inputs.enforcements.get(&entry.key.id) {
            let status = status(found.level == Level::Driver);
            conditions.push(self.condition(id, CONDITION_LIMITED, status, found.reason, &found.message));
        }
        conditions
    }

    /// The condition about the health of a device; none for a device that never had trouble.
    fn health_condition(&self, id: &str, entry: &FleetEntry<'_>) -> Option<DeviceCondition> {
        let status = status(entry.is_healthy);
        let before = self.find_before(id, CONDITION_HEALTHY);
        let reason = match (entry.reason, before) {
            (Some(reason), _) => reason.to_string(),
            // The process that observed the reason is gone, and its words are better than none.
            (None, Some(before)) if before.status == status => return Some(before.clone()),
            // Nothing was observed since the process began, so a device that was unhealthy before counts as healthy.
            (None, Some(_)) => CONDITION_HEALTHY.to_owned(),
            (None, None) => return None,
        };
        Some(self.condition(id, CONDITION_HEALTHY, status, &reason, entry.message))
    }

    /// The condition about the injection of devices of this type into containers.
    fn injection_condition(&self, id: &str, device_type: &str, injection: &Injection) -> DeviceCondition {
        let is_possible = injection.is_possible_for(device_type);
        let (status, reason, message) = if is_possible && !injection.is_possible() {
            // A missing CDI spec of the driver blocks GPUs alone.
            (status(true), "Cdi", "devices of this type need no driver")
        } else if injection.certainty == Certainty::Assumed {
            (UNKNOWN, injection.reason, injection.message.as_str())
        } else {
            (status(is_possible), injection.reason, injection.message.as_str())
        };
        self.condition(id, CONDITION_INJECTABLE, status, reason, message)
    }

    /// The condition that is false if containers which request no GPU see this one; none if they never could.
    fn isolation_condition(&self, id: &str, injection: &Injection) -> Option<DeviceCondition> {
        let of_pods = match &injection.exposure {
            Some(Exposure::Unknown(why)) => {
                let message = format!(
                    "a container that asks for no GPU may see this one if its image sets the vendor's variable; not known, because \
                     {why}; the runtime hook (--nri-socket) closes it in any case"
                );
                return Some(self.condition(id, CONDITION_ISOLATED, UNKNOWN, "NotObservable", &message));
            }
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

    /// The condition that is false if a part of the node's report is not valid; none if it never was.
    fn report_condition(&self, id: &str) -> Option<DeviceCondition> {
        let before = self.find_before(id, CONDITION_REPORT_VALID);
        let (status, reason, message) = match &self.inputs.report_problem {
            Some(problem) if problem.is_certain => (status(false), problem.reason, problem.message.as_str()),
            Some(problem) => (UNKNOWN, problem.reason, problem.message.as_str()),
            None => {
                before?;
                let message = "partition table, links and allocations can be read, and name GPUs of the node";
                (status(true), "Valid", message)
            }
        };
        Some(self.condition(id, CONDITION_REPORT_VALID, status, reason, message))
    }

    /// A condition of the device with ID `id`; its transition time stays if its status does.
    fn condition(
        &self,
        id: &str,
        condition_type: &str,
        status: &str,
        reason: &str,
        message: &str,
    ) -> DeviceCondition {
        let last_transition_time = match self.find_before(id, condition_type) {
            Some(before) if before.status == status => before.last_transition_time.clone(),
            _ => self.now.to_rfc3339_opts(SecondsFormat::Secs, true),
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
        let mut devices = self.before?.devices.iter();
        let device = devices.find(|device| device.id == id)?;
        let mut conditions = device.conditions.iter();
        conditions.find(|condition| condition.condition_type == condition_type)
    }
}
