//! Koordinator's Device custom resource: what a node's plugin found, read by the scheduler whoever wrote it.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;

/// The device type of GPUs.
pub const TYPE_GPU: &str = "gpu";

/// The devices of the node whose name this object bears.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema, CustomResource)]
#[kube(
    group = "scheduling.koordinator.sh",
    version = "v1alpha1",
    kind = "Device",
    plural = "devices",
    status = "DeviceStatus",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct DeviceSpec {
    /// Every device of every type, healthy or not.
    #[serde(default)]
    pub devices: Vec<DeviceInfo>,
}

/// Declared by the schema; nothing writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceStatus {
    /// Which pods hold which devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allocations: Vec<StatusAllocation>,
}

/// The holders of one type of device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StatusAllocation {
    /// Device type.
    #[serde(rename = "type", default)]
    pub device_type: String,
    /// One entry per pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<StatusEntry>,
}

/// One holder.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StatusEntry {
    /// Pod name.
    #[serde(default)]
    pub name: String,
    /// Pod namespace.
    #[serde(default)]
    pub namespace: String,
    /// Pod UID.
    #[serde(default)]
    pub uuid: String,
    /// The devices it holds.
    #[serde(default)]
    pub minors: Vec<i32>,
}

/// One physical device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceInfo {
    /// `gpu`, `rdma`, `fpga`, or a type nobody compiled in.
    #[serde(rename = "type", default)]
    pub device_type: String,
    /// Labels that hints select by.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// UUID of a GPU, PCI address of another device.
    #[serde(default)]
    pub id: String,
    /// Number of the device node, for display and for annotations that demand it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<i32>,
    /// Physical position in the machine.
    #[serde(rename = "moduleID", default, skip_serializing_if = "Option::is_none")]
    pub module_id: Option<i32>,
    /// An unhealthy device takes no new pods.
    #[serde(default)]
    pub health: bool,
    /// Everything the device has, by resource name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub resources: BTreeMap<String, Quantity>,
    /// Where it sits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<DeviceTopology>,
    /// Virtual functions of a NIC.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vf_groups: Vec<VirtualFunctionGroup>,
    /// Why the device is healthy or not, and since when.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<DeviceCondition>,
}

/// Where a device sits in the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceTopology {
    /// CPU socket, -1 if unknown.
    #[serde(rename = "socketID", default)]
    pub socket_id: i32,
    /// NUMA node.
    #[serde(rename = "nodeID", default)]
    pub node_id: i32,
    /// PCIe switch or root complex.
    #[serde(rename = "pcieID", default)]
    pub pcie_id: String,
    /// PCI address.
    #[serde(rename = "busID", default, skip_serializing_if = "String::is_empty")]
    pub bus_id: String,
}

/// Virtual functions that share their labels.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VirtualFunctionGroup {
    /// Labels that a `vfSelector` selects by.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The functions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vfs: Vec<VirtualFunction>,
}

/// One virtual function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VirtualFunction {
    /// Its number, -1 if unknown.
    #[serde(default)]
    pub minor: i32,
    /// Its PCI address.
    #[serde(rename = "busID", default)]
    pub bus_id: String,
}

/// A condition in the form of `metav1.Condition`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceCondition {
    /// `Healthy`.
    #[serde(rename = "type")]
    pub condition_type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// RFC 3339, whole seconds.
    pub last_transition_time: String,
    /// One word, e.g. `Xid79`.
    pub reason: String,
    /// One sentence for people.
    pub message: String,
}
