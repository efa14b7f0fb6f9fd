//! Koordinator's Device custom resource, in which a node's plugin publishes its devices; koordlet writes the same resource.
//!
//! The types are the schema that Koordinator ships, field by field (`apis/scheduling/v1alpha1/device_types.go`); the
//! `CustomResourceDefinition` is generated from them. They read more than the schema allows, since a cluster may have another
//! definition, or had one when an object was written.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{CustomResource, Resource};
use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::pod::{is_default, null_as_default};
use crate::quantity::Quantity;

/// The device type of GPUs.
pub const TYPE_GPU: &str = "gpu";
/// The device type of RDMA network adapters.
pub const TYPE_RDMA: &str = "rdma";
/// The device type of FPGA cards.
pub const TYPE_FPGA: &str = "fpga";

/// Label of the Device object and of the node: the vendor of the GPUs, such as `nvidia`.
pub const GPU_VENDOR_LABEL: &str = "node.koordinator.sh/gpu-vendor";
/// Label of the Device object and of the node: the model of the GPUs, such as `A100-SXM4-80GB`; absent if it has several.
pub const GPU_MODEL_LABEL: &str = "node.koordinator.sh/gpu-model";
/// Label of the Device object and of the node: the version of the GPU driver, such as `570.133.20`.
pub const GPU_DRIVER_LABEL: &str = "node.koordinator.sh/gpu-driver-version";
/// The labels that the plugin writes to the Device object and to its node.
// On both: users select nodes by them, and a scheduler reads the Device object alone.
pub const NODE_LABELS: [&str; 3] = [GPU_VENDOR_LABEL, GPU_MODEL_LABEL, GPU_DRIVER_LABEL];

/// Label of the Device object of a node whose plugin serves the vendor's resource (`nvidia.com/gpu`) too: `true`.
pub const SERVES_VENDOR_LABEL: &str = "gpushare/serves-vendor";
/// Label of the Device object of a node whose devices are simulated, read from a file: `true`.
pub const SIMULATED_LABEL: &str = "gpushare/simulated";
/// Label of a device in the Device object: [`SHARING_DISABLED`] if the device is left to the vendor's plugin.
pub const SHARING_LABEL: &str = "gpushare/sharing";
/// The only value of [`SHARING_LABEL`].
pub const SHARING_DISABLED: &str = "disabled";

/// Annotation of the node that the plugin changes after its Device object: kube-scheduler watches nodes, but no Device objects,
/// and retries pending pods when a node changes.
pub const DEVICES_REVISION: &str = "gpushare/devices-revision";

/// Annotation of the Device object with the boot ID that the node's kernel had when the plugin wrote the object.
pub const BOOT_ID: &str = "gpushare/boot-id";

/// Annotation of the Device object with which an operator declares devices healthy: IDs, separated by commas, or `all`.
pub const CLEAR_UNHEALTHY: &str = "gpushare/clear-unhealthy";

/// Label of a GPU, and of the Device object for its lowest: the level at which memory limits are enforced, `none`, `hami-core` or
/// [`ENFORCED_BY_DRIVER`]. Annotation of pods: the level that the pod demands.
pub const ENFORCEMENT: &str = "gpushare/enforcement";
/// The value of [`ENFORCEMENT`] for limits that the GPU driver enforces.
pub const ENFORCED_BY_DRIVER: &str = "driver";

/// Label of a GPU: the bytes of memory that the driver keeps for itself, beside the amount that the Device object offers.
pub const RESERVED_MEMORY: &str = "gpushare/reserved-memory";

/// The condition of a device that is true if it works.
pub const CONDITION_HEALTHY: &str = "Healthy";
/// The condition of a device that is true if containers of the node can get it; its message names the injection mode.
pub const CONDITION_INJECTABLE: &str = "Injectable";
/// The condition of a GPU that is true if the driver enforces the memory limits of containers.
pub const CONDITION_LIMITED: &str = "Limited";
/// The condition of a GPU that is true if only containers that request GPUs see it.
pub const CONDITION_ISOLATED: &str = "Isolated";
/// The condition of a GPU that is false if partition table, links or the devices of other plugins cannot be read, or name a GPU
/// that is not listed. Unknown if the operator's partition table is taken to be that of another kind of node.
pub const CONDITION_REPORT_VALID: &str = "ReportValid";
/// The reason of [`CONDITION_REPORT_VALID`] if the node has a partition table that cannot be read, and no other.
pub const PARTITIONS_UNREADABLE: &str = "PartitionsUnreadable";
/// The reason of [`CONDITION_REPORT_VALID`] if the operator's partition table names GPUs that the node does not have.
pub const PARTITIONS_OF_OTHER_NODE: &str = "PartitionsOfOtherNode";

/// The devices of the node of the same name, as its plugin reports them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema, CustomResource)]
#[kube(
    group = "scheduling.koordinator.sh",
    version = "v1alpha1",
    kind = "Device",
    plural = "devices",
    // No program writes a status, but Koordinator's definition has one, and the two must be able to replace each other.
    status = "DeviceStatus",
    derive = "PartialEq",
    doc = "The devices of the node of the same name: their amounts, places and health. The node's plugin writes it, and schedulers read it.",
    printcolumn = r#"{"name": "Vendor", "type": "string", "jsonPath": ".metadata.labels.node\\.koordinator\\.sh/gpu-vendor", "description": "Vendor of the GPUs"}"#,
    printcolumn = r#"{"name": "Model", "type": "string", "jsonPath": ".metadata.labels.node\\.koordinator\\.sh/gpu-model", "description": "Model of the GPUs, if all are equal"}"#,
    printcolumn = r#"{"name": "Driver", "type": "string", "jsonPath": ".metadata.labels.node\\.koordinator\\.sh/gpu-driver-version", "description": "Version of the GPU driver"}"#,
    printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase", default)]
#[schemars(transform = without_defaults)]
pub struct DeviceSpec {
    /// Every device of every type, healthy or not.
    #[serde(deserialize_with = "null_as_default")]
    pub devices: Vec<DeviceInfo>,
}

/// A Device object with its spec as JSON: one that does not decode must not fail a list of objects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, Resource)]
#[serde(default)]
#[resource(inherit = Device)]
pub struct RawDevice {
    /// The node's name, labels and annotations.
    pub metadata: ObjectMeta,
    /// JSON of [`DeviceSpec`], if it is valid.
    pub spec: Value,
}

impl RawDevice {
    /// Decodes the spec; an absent or null spec has no devices.
    // Decoded on demand, so that a spec of another form fails its node and no other.
    pub fn read(&self) -> Result<DeviceSpec, serde_json::Error> {
        Option::<DeviceSpec>::deserialize(&self.spec).map(Option::unwrap_or_default)
    }
}

/// The status that Koordinator's schema declares; no program writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(transform = without_defaults)]
pub struct DeviceStatus {
    /// The pods that hold devices, by device type.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub allocations: Vec<StatusAllocation>,
}

/// The pods that hold devices of one type.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(transform = without_defaults)]
pub struct StatusAllocation {
    /// Device type, such as `gpu`.
    #[serde(rename = "type")]
    pub device_type: String,
    /// One entry for each pod.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<StatusEntry>,
}

/// A pod that holds devices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(transform = without_defaults)]
pub struct StatusEntry {
    /// Pod name.
    pub name: String,
    /// Pod namespace.
    pub namespace: String,
    /// Pod UID.
    pub uuid: String,
    /// Minor numbers of the devices that the pod holds.
    #[serde(deserialize_with = "null_as_default")]
    pub minors: Vec<i32>,
}

/// One physical device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(transform = without_defaults, extend("required" = ["health"]))]
pub struct DeviceInfo {
    /// `gpu`, `rdma`, `fpga`, or any other type.
    #[serde(rename = "type")]
    pub device_type: String,
    /// Labels of the device, which the `selector` of a pod's hint selects.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub labels: BTreeMap<String, String>,
    /// UUID of a GPU, PCI address of another device.
    pub id: String,
    /// Number of the device file from 0, for display and for annotations that demand it; `id` identifies the device.
    // `with`: the schema of an `Option` would allow `null`, which Koordinator's does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i32")]
    pub minor: Option<i32>,
    /// Physical position in the machine, as NVML's module ID.
    // `with`, as for `minor`.
    #[serde(rename = "moduleID", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i32")]
    pub module_id: Option<i32>,
    /// True if the device works. An unhealthy device takes no new pods.
    pub health: bool,
    /// All amounts of the device by resource name, in bytes for `koordinator.sh/gpu-memory` and in percent for the others.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    // By name, because a device of any type may have amounts that this code does not know.
    pub resources: BTreeMap<String, Quantity>,
    /// The device's place in the machine; absent if it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "DeviceTopology")]
    pub topology: Option<DeviceTopology>,
    /// Virtual functions (SR-IOV) of a network adapter.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub vf_groups: Vec<VirtualFunctionGroup>,
    /// Conditions of the device, such as `Healthy` with the reason and time of a failure.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<DeviceCondition>,
}

/// The place of a device in the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(transform = without_defaults, extend("required" = ["nodeID", "pcieID", "socketID"]))]
pub struct DeviceTopology {
    /// Number of the CPU socket, -1 if it is not known.
    #[serde(rename = "socketID")]
    pub socket_id: i32,
    /// Number of the NUMA node; 0 on a machine whose kernel reports none (-1 in sysfs).
    #[serde(rename = "nodeID")]
    pub node_id: i32,
    /// The PCIe switch above the device, or its root complex.
    #[serde(rename = "pcieID")]
    pub pcie_id: String,
    /// PCI address, such as `0000:3b:00.0`; empty if it is not known.
    #[serde(rename = "busID", skip_serializing_if = "String::is_empty")]
    pub bus_id: String,
}

/// Virtual functions with equal labels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(transform = without_defaults)]
pub struct VirtualFunctionGroup {
    /// Labels, which the `vfSelector` of a hint selects.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub labels: BTreeMap<String, String>,
    /// The virtual functions of the group.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub vfs: Vec<VirtualFunction>,
}

/// One virtual function.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(transform = without_defaults, extend("required" = ["minor"]))]
pub struct VirtualFunction {
    /// Number of the function, -1 if it is not known.
    pub minor: i32,
    /// PCI address of the function.
    #[serde(rename = "busID")]
    pub bus_id: String,
}

/// A condition in the form of `metav1.Condition`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = without_defaults)]
pub struct DeviceCondition {
    /// Type of the condition, such as `Healthy`, `Injectable`, `Limited` or `Isolated`.
    #[serde(rename = "type")]
    #[schemars(
        length(max = 316),
        regex(
            pattern = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
        )
    )]
    pub condition_type: String,
    /// `True`, `False` or `Unknown`.
    #[schemars(extend("enum" = ["True", "False", "Unknown"]))]
    pub status: String,
    /// The `metadata.generation` for which the condition was set; the plugin does not set it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i64", range(min = 0))]
    pub observed_generation: Option<i64>,
    /// Time at which the status changed last, RFC 3339 in whole seconds.
    // A text: another program's time that does not parse must not make the whole object unreadable.
    #[schemars(extend("format" = "date-time"))]
    pub last_transition_time: String,
    /// The reason in CamelCase, such as `Xid79`.
    #[schemars(
        length(min = 1, max = 1024),
        regex(pattern = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    )]
    pub reason: String,
    /// The reason in a sentence.
    #[schemars(length(max = 32768))]
    pub message: String,
}

/// Removes the defaults of decoding from the schema: the API server would write them into objects.
fn without_defaults(schema: &mut Schema) {
    let Some(Value::Object(properties)) = schema.get_mut("properties") else {
        return;
    };
    for field in properties.values_mut().filter_map(Value::as_object_mut) {
        // The default of `health` stays, as Koordinator's schema has it: a boolean that is left out is false there too.
        if field.get("default").is_some_and(|default| !default.is_boolean()) {
            field.remove("default");
        }
    }
}

#[cfg(test)]
mod tests;
