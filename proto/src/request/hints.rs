//! Annotations with which a pod influences the choice of its node and devices: Koordinator's hints, joint allocation and
//! partitions, and gpushare's policies.
//!
//! Reads and refuses the annotations; the scheduler turns them into constraints.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{PodRequest, RequestError, excerpt};
use crate::device::{ENFORCED_BY_DRIVER, ENFORCEMENT, TYPE_GPU};
use crate::pod::Pod;
use crate::quantity::Quantity;
use crate::topology;

/// JSON object of hints by device type.
pub const ALLOCATE_HINT: &str = "scheduling.koordinator.sh/device-allocate-hint";
/// JSON object with the device types that are allocated together.
pub const JOINT_ALLOCATE: &str = "scheduling.koordinator.sh/device-joint-allocate";
/// JSON object with constraints on partitions of GPUs.
pub const PARTITION_SPEC: &str = "scheduling.koordinator.sh/gpu-partition-spec";
/// The policy by which the scheduler ranks the fitting nodes for this pod.
pub const NODE_POLICY: &str = "gpushare/node-policy";
/// The policy by which the scheduler ranks the fitting devices of a node for this pod.
pub const DEVICE_POLICY: &str = "gpushare/device-policy";

/// Values of [`NODE_POLICY`].
pub const NODE_POLICIES: [&str; 5] = ["fill", "binpack", "spread", "least-allocated", "most-allocated"];
/// Values of [`DEVICE_POLICY`].
pub const DEVICE_POLICIES: [&str; 6] = [
    "fill",
    "binpack",
    "spread",
    "in-order",
    "least-allocated",
    "most-allocated",
];

/// Values of [`ENFORCEMENT`] on a pod.
pub const DEMANDED_ENFORCEMENTS: [&str; 2] = [ENFORCED_BY_DRIVER, "any"];

/// Longest annotation that is read, in bytes: the scheduler evaluates its contents for every node.
const MAX_BYTES: usize = 8 * 1024;

/// All hints of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Hints by type of device, such as `rdma`.
    pub by_type: BTreeMap<String, DeviceHint>,
    /// The types that are allocated together.
    pub joint: Option<JointAllocate>,
    /// Constraints on partitions; `None` without the annotation.
    pub partition: Option<PartitionSpec>,
}

/// Constraints on the devices of one type.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceHint {
    /// Labels that each device must have.
    pub selector: Option<LabelSelector>,
    /// Labels of a virtual function that each device must have free; the pod gets the function instead of the device.
    pub vf_selector: Option<LabelSelector>,
    /// The conversion of the requested amount to a number of devices.
    pub strategy: Option<AllocateStrategy>,
    /// The devices that no other pod may use.
    pub exclusive: Option<ExclusivePolicy>,
    /// The part of the machine in which all devices must lie.
    pub scope: Option<TopologyScope>,
}

/// A label selector; all of its requirements must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSelector {
    /// The requirements.
    pub requirements: Vec<LabelRequirement>,
}

/// A requirement on one label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelRequirement {
    /// The label's key.
    pub key: String,
    /// The condition on its value.
    pub test: LabelTest,
}

/// The condition on a label's value, by the operators of Kubernetes' label selectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabelTest {
    /// One of these values.
    In(Vec<String>),
    /// None of these values; the label may be missing.
    NotIn(Vec<String>),
    /// Any value.
    Exists,
    /// No such label.
    DoesNotExist,
}

/// The conversion of a requested amount to a number of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocateStrategy {
    /// Every selected device gives the amount.
    ApplyForAll,
    /// The amount is a number of devices.
    RequestsAsCount,
}

/// The devices that no other pod may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExclusivePolicy {
    /// The pod's devices.
    DeviceLevel,
    /// All devices of the type on their PCIe switches.
    PcieLevel,
}

/// A part of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopologyScope {
    /// One device.
    Device,
    /// One PCIe switch.
    Pcie,
    /// One NUMA node.
    NumaNode,
    /// The machine.
    Node,
}

/// Types of devices that are allocated together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JointAllocate {
    /// The types, the leading one first.
    pub device_types: Vec<String>,
    /// True if they must share their PCIe switches.
    pub same_pcie: bool,
}

/// Constraints on the partition from which GPUs are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartitionSpec {
    /// True if only partitions of the best score may be used.
    pub restricted: bool,
    /// Least bandwidth of a ring through the GPUs, in bytes per second.
    pub ring_bus_bandwidth: Option<u64>,
}

/// An annotation with hints.
#[derive(Clone, Copy, Debug)]
pub struct Hint {
    /// Its key.
    pub key: &'static str,
    parse: fn(&str, &mut Hints) -> Result<(), String>,
}

/// Every annotation with hints.
pub const HINTS: [Hint; 3] = [
    Hint {
        key: ALLOCATE_HINT,
        parse: |text, hints| parse_by_type(text).map(|by_type| hints.by_type = by_type),
    },
    Hint {
        key: JOINT_ALLOCATE,
        parse: |text, hints| parse_joint(text).map(|joint| hints.joint = joint),
    },
    Hint {
        key: PARTITION_SPEC,
        parse: |text, hints| parse_partition(text).map(|partition| hints.partition = Some(partition)),
    },
];

impl Hint {
    /// Checks a pod's annotation, if the pod has it.
    ///
    /// # Errors
    /// It has another form than the proposals demand, or a value that they do not know.
    pub fn check(self, pod: &Pod) -> Result<(), RequestError> {
        self.read(pod, &mut Hints::default())
    }

    fn read(self, pod: &Pod, hints: &mut Hints) -> Result<(), RequestError> {
        let Some(text) = annotation(pod, self.key) else {
            return Ok(());
        };
        if text.len() > MAX_BYTES {
            return Err(refusal(self.key, text, format!("longer than {MAX_BYTES} bytes")));
        }
        (self.parse)(text, hints).map_err(|rule| refusal(self.key, text, rule))
    }
}

impl Hints {
    /// Reads a pod's annotations.
    ///
    /// # Errors
    /// The first that [`Hint::check`] refuses.
    pub fn read(pod: &Pod) -> Result<Self, RequestError> {
        let mut hints = Self::default();
        for hint in HINTS {
            hint.read(pod, &mut hints)?;
        }
        Ok(hints)
    }

    /// Reads the annotations of a pod that has its devices; skips those that cannot be read.
    pub fn read_placed(pod: &Pod) -> Self {
        let mut hints = Self::default();
        for hint in HINTS {
            hint.read(pod, &mut hints).unwrap_or_default();
        }
        hints
    }

    /// Refuses hints that no node can satisfy for this request.
    pub(super) fn refuse_impossible(&self, pod: &Pod, request: &PodRequest) -> Result<(), RequestError> {
        let Some((gpus, hint)) = request.gpus.as_ref().zip(self.by_type.get(TYPE_GPU)) else {
            return Ok(());
        };
        let rule = if hint.vf_selector.is_some() {
            "gpu.vfSelector: GPUs are not given by virtual functions".to_owned()
        } else if hint.scope == Some(TopologyScope::Device) && gpus.devices > 1 {
            let n_gpus = gpus.devices;
            format!("gpu.requiredTopologyScope is Device, but the pod asks for {n_gpus} GPUs")
        } else {
            return Ok(());
        };
        let text = annotation(pod, ALLOCATE_HINT).unwrap_or_default();
        Err(refusal(ALLOCATE_HINT, text, rule))
    }
}

/// The value of [`NODE_POLICY`], known or not.
pub fn node_policy(pod: &Pod) -> Option<&str> {
    annotation(pod, NODE_POLICY)
}

/// The value of [`DEVICE_POLICY`], known or not.
pub fn device_policy(pod: &Pod) -> Option<&str> {
    annotation(pod, DEVICE_POLICY)
}

/// The enforcement of memory limits that a pod demands on the GPUs that it shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemandedEnforcement {
    /// None: any level will do.
    Any,
    /// That of the driver.
    Driver,
}

/// The value of the annotation [`ENFORCEMENT`]; `None` without it, or if it is not one of [`DEMANDED_ENFORCEMENTS`].
pub fn enforcement(pod: &Pod) -> Option<DemandedEnforcement> {
    match annotation(pod, ENFORCEMENT)? {
        "any" => Some(DemandedEnforcement::Any),
        ENFORCED_BY_DRIVER => Some(DemandedEnforcement::Driver),
        _ => None,
    }
}

/// Refuses policies and enforcement levels that do not exist.
pub(super) fn refuse_unknown_policies(pod: &Pod) -> Result<(), RequestError> {
    let known = [
        (NODE_POLICY, &NODE_POLICIES[..]),
        (DEVICE_POLICY, &DEVICE_POLICIES[..]),
        (ENFORCEMENT, &DEMANDED_ENFORCEMENTS[..]),
    ];
    for (key, choice) in known {
        if let Some(value) = annotation(pod, key).filter(|value| !choice.contains(value)) {
            return Err(refusal(
                key,
                value,
                format!("choose one of {}", choice.join(", ")),
            ));
        }
    }
    Ok(())
}

pub(super) fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn refusal(key: &'static str, text: &str, rule: String) -> RequestError {
    RequestError::Annotation {
        key,
        value: excerpt(text),
        rule,
    }
}

/// [`DeviceHint`] as the annotation has it.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, expecting = "a JSON object")]
struct HintJson {
    selector: Option<SelectorJson>,
    vf_selector: Option<SelectorJson>,
    allocate_strategy: String,
    required_topology_scope: String,
    exclusive_policy: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, expecting = "a JSON object")]
struct SelectorJson {
    match_labels: Option<BTreeMap<String, String>>,
    match_expressions: Option<Vec<ExpressionJson>>,
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct ExpressionJson {
    key: String,
    operator: String,
    #[serde(default)]
    values: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, expecting = "a JSON object")]
struct JointJson {
    device_types: Option<Vec<String>>,
    required_scope: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, expecting = "a JSON object")]
struct PartitionJson {
    allocate_policy: String,
    ring_bus_bandwidth: Option<Quantity>,
}

fn parse_by_type(text: &str) -> Result<BTreeMap<String, DeviceHint>, String> {
    let by_type: BTreeMap<String, Option<HintJson>> = parse_object(text)?;
    let mut hints = BTreeMap::new();
    for (device_type, json) in by_type {
        let hint = json
            .unwrap_or_default()
            .parse()
            .map_err(|rule| format!("{device_type}.{rule}"))?;
        hints.insert(device_type, hint);
    }
    Ok(hints)
}

/// `None` if the annotation names no types.
fn parse_joint(text: &str) -> Result<Option<JointAllocate>, String> {
    let JointJson {
        device_types,
        required_scope,
    } = parse_object(text)?;
    let same_pcie = parse_enum("requiredScope", &required_scope, [("SamePCIe", ())])?.is_some();
    let device_types = device_types.unwrap_or_default();
    // Each type once: the order of the types decides which one leads.
    for (i, device_type) in device_types.iter().enumerate() {
        if device_type.is_empty() {
            return Err(format!("deviceTypes[{i}] is empty"));
        }
        if device_types.iter().take(i).any(|other| other == device_type) {
            return Err(format!("deviceTypes names {device_type:?} twice"));
        }
    }
    Ok((!device_types.is_empty()).then_some(JointAllocate {
        device_types,
        same_pcie,
    }))
}

fn parse_partition(text: &str) -> Result<PartitionSpec, String> {
    let PartitionJson {
        allocate_policy,
        ring_bus_bandwidth,
    } = parse_object(text)?;
    let restricted = parse_enum(
        "allocatePolicy",
        &allocate_policy,
        [("BestEffort", false), ("Restricted", true)],
    )?
    .unwrap_or_default();
    let bandwidth = |quantity: Quantity| {
        topology::bandwidth(quantity)
            .ok_or_else(|| format!("ringBusBandwidth is {quantity}, not a whole number of bytes up to 2^50"))
    };
    Ok(PartitionSpec {
        restricted,
        ring_bus_bandwidth: ring_bus_bandwidth.map(bandwidth).transpose()?,
    })
}

impl HintJson {
    fn parse(self) -> Result<DeviceHint, String> {
        let strategies = [
            ("ApplyForAll", AllocateStrategy::ApplyForAll),
            ("RequestsAsCount", AllocateStrategy::RequestsAsCount),
        ];
        let policies = [
            ("DeviceLevel", ExclusivePolicy::DeviceLevel),
            ("PCIeLevel", ExclusivePolicy::PcieLevel),
        ];
        let scopes = [
            ("Device", TopologyScope::Device),
            ("PCIe", TopologyScope::Pcie),
            ("NUMANode", TopologyScope::NumaNode),
            ("Node", TopologyScope::Node),
        ];
        Ok(DeviceHint {
            selector: self
                .selector
                .map(|selector| selector.parse("selector"))
                .transpose()?,
            vf_selector: self
                .vf_selector
                .map(|selector| selector.parse("vfSelector"))
                .transpose()?,
            strategy: parse_enum("allocateStrategy", &self.allocate_strategy, strategies)?,
            exclusive: parse_enum("exclusivePolicy", &self.exclusive_policy, policies)?,
            scope: parse_enum("requiredTopologyScope", &self.required_topology_scope, scopes)?,
        })
    }
}

impl SelectorJson {
    fn parse(self, field: &str) -> Result<LabelSelector, String> {
        let mut requirements = Vec::new();
        for (key, value) in self.match_labels.unwrap_or_default() {
            let test = LabelTest::In(vec![value]);
            requirements.push(LabelRequirement { key, test });
        }
        for (i, expression) in self.match_expressions.unwrap_or_default().into_iter().enumerate() {
            let requirement = expression.parse();
            requirements.push(requirement.map_err(|rule| format!("{field}.matchExpressions[{i}].{rule}"))?);
        }
        if requirements.iter().any(|requirement| requirement.key.is_empty()) {
            return Err(format!("{field} has an empty key"));
        }
        Ok(LabelSelector { requirements })
    }
}

impl ExpressionJson {
    fn parse(self) -> Result<LabelRequirement, String> {
        let values = self.values.unwrap_or_default();
        let (operator, n_values) = (self.operator.as_str(), values.len());
        let test = match operator {
            "In" | "NotIn" if values.is_empty() => {
                return Err(format!("values is empty, and {operator} needs one"));
            }
            "In" => LabelTest::In(values),
            "NotIn" => LabelTest::NotIn(values),
            "Exists" | "DoesNotExist" if n_values > 0 => {
                return Err(format!("values is not empty, and {operator} takes none"));
            }
            "Exists" => LabelTest::Exists,
            "DoesNotExist" => LabelTest::DoesNotExist,
            other => {
                return Err(format!(
                    "operator is {other:?}, none of In, NotIn, Exists, DoesNotExist"
                ));
            }
        };
        Ok(LabelRequirement { key: self.key, test })
    }
}

/// Looks up a value by its name; `None` if the text is empty.
fn parse_enum<T, const N: usize>(
    field: &str,
    text: &str,
    values: [(&str, T); N],
) -> Result<Option<T>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let names = values.each_ref().map(|(name, _)| *name).join(", ");
    let found = values.into_iter().find(|(name, _)| *name == text);
    let shown = excerpt(text);
    found
        .map(|(_, value)| Some(value))
        .ok_or_else(|| format!("{field} is {shown:?}, none of {names}"))
}

/// Parses a JSON object; serde alone would accept a list of the fields' values too.
fn parse_object<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if !value.is_object() {
        return Err("not a JSON object".to_owned());
    }
    serde_json::from_value(value).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
