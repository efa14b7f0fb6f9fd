//! Annotations with which a pod influences the choice of its node and devices: hints and joint allocation (Koordinator's proposal
//! "Device Allocate Hint APIs"), partitions (proposal "GPU Partitioning APIs"), and gpushare's own policies.
//!
//! Reads and refuses the annotations; the scheduler turns them into constraints.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{PodRequest, RequestError};
use crate::annotation::AnnotationError;
use crate::annotation::keys::{UnknownKeys, nearest, parse_object};
use crate::device::{ENFORCED_BY_DRIVER, ENFORCEMENT, TYPE_GPU};
use crate::excerpt::excerpt;
use crate::pod::Pod;
use crate::quantity::Quantity;
use crate::topology;

/// Pod annotation: a JSON object with one [`DeviceHint`] for each device type.
pub const ALLOCATE_HINT: &str = "scheduling.koordinator.sh/device-allocate-hint";
/// Pod annotation: a JSON object with the device types that are allocated together, see [`JointAllocate`].
pub const JOINT_ALLOCATE: &str = "scheduling.koordinator.sh/device-joint-allocate";
/// Pod annotation: a JSON object with constraints on partitions of GPUs, see [`PartitionSpec`].
pub const PARTITION_SPEC: &str = "scheduling.koordinator.sh/gpu-partition-spec";
/// Pod annotation: the policy by which the scheduler ranks the fitting nodes for the pod, one of [`NODE_POLICIES`].
pub const NODE_POLICY: &str = "gpushare/node-policy";
/// Pod annotation: the policy by which the scheduler ranks the fitting devices of a node for the pod, one of [`DEVICE_POLICIES`].
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

/// Values of the annotation [`ENFORCEMENT`] of a pod.
pub const DEMANDED_ENFORCEMENTS: [&str; 2] = [ENFORCED_BY_DRIVER, "any"];

/// Longest annotation that is read, in bytes. The scheduler evaluates its contents for every node.
const MAX_BYTES: usize = 8 * 1024;

/// The annotations [`ALLOCATE_HINT`], [`JOINT_ALLOCATE`] and [`PARTITION_SPEC`] of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Constraints by device type, such as `rdma`.
    pub by_type: BTreeMap<String, DeviceHint>,
    /// The device types that are allocated together; `None` without the annotation, or if it names none.
    pub joint: Option<JointAllocate>,
    /// Constraints on partitions; `None` without the annotation.
    pub partition: Option<PartitionSpec>,
}

/// Constraints on the devices of one type, which the pod may be given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceHint {
    /// `selector`: labels that each device must have.
    pub selector: Option<LabelSelector>,
    /// `vfSelector`: labels of virtual functions, of which the pod gets a free one of each device; an empty selector takes any.
    pub vf_selector: Option<LabelSelector>,
    /// `allocateStrategy`: the conversion of the requested amount to a number of devices.
    pub strategy: Option<AllocateStrategy>,
    /// `exclusivePolicy`: the devices that no other pod may use.
    pub exclusive: Option<ExclusivePolicy>,
    /// `requiredTopologyScope`: the part of the machine in which all devices must lie; in Koordinator's code, not its proposal.
    pub scope: Option<TopologyScope>,
}

/// A label selector: requirements on one label each, which must all hold.
pub type LabelSelector = Vec<LabelRequirement>;

/// A requirement on one label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelRequirement {
    /// The label's key.
    pub key: String,
    /// The condition on the label's value.
    pub test: LabelTest,
}

/// The condition on a label's value, with the operators of `metav1.LabelSelector`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabelTest {
    /// The label has one of these values.
    In(Vec<String>),
    /// The label has none of these values, or is missing.
    NotIn(Vec<String>),
    /// The label is there, with any value.
    Exists,
    /// The label is missing.
    DoesNotExist,
}

/// The conversion of a requested amount to a number of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocateStrategy {
    /// Every device that the selector selects gives the requested amount.
    ApplyForAll,
    /// The requested amount is the number of devices.
    RequestsAsCount,
}

/// The devices that no other pod may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExclusivePolicy {
    /// The pod's devices themselves.
    DeviceLevel,
    /// All devices of the type on the PCIe switches of the pod's devices. Koordinator's code reads it, and does nothing.
    PcieLevel,
}

/// A part of a machine, from the smallest to the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopologyScope {
    /// One device: the pod may be given no second.
    Device,
    /// The devices under one PCIe switch.
    Pcie,
    /// The devices of one NUMA node.
    NumaNode,
    /// All devices of the machine.
    Node,
}

/// Types of devices that are allocated together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JointAllocate {
    /// The device types. The scheduler chooses devices of the first type, and devices of the other types near them.
    pub device_types: Vec<String>,
    /// True if all devices must share their PCIe switches (`requiredScope: SamePCIe`); else near ones are preferred.
    pub same_pcie: bool,
}

/// Constraints on the partition from which GPUs are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartitionSpec {
    /// True if only partitions of the highest score may be used (`allocatePolicy: Restricted`); else they are preferred.
    pub restricted: bool,
    /// Least bandwidth of a ring through the GPUs, in bytes per second; `None` for any.
    pub ring_bus_bandwidth: Option<u64>,
}

/// The annotations that [`Hints`] has. If several have a fault, that of the first in this order is reported.
pub const HINTS: [&str; 3] = [ALLOCATE_HINT, JOINT_ALLOCATE, PARTITION_SPEC];

impl Hints {
    /// Reads the annotations of a pod that waits for a node.
    pub fn read(pod: &Pod) -> Result<Self, RequestError> {
        let mut hints = Self::default();
        for key in HINTS {
            hints.add(key, pod, UnknownKeys::Refuse)?;
        }
        Ok(hints)
    }

    /// Checks one of [`HINTS`], if the pod has it, as [`Self::read`] does.
    pub fn check(key: &'static str, pod: &Pod) -> Result<(), RequestError> {
        Self::default().add(key, pod, UnknownKeys::Refuse)
    }

    /// Reads the annotations of a pod that has its devices; skips those that cannot be read, and unknown keys.
    pub fn read_placed(pod: &Pod) -> Self {
        let mut hints = Self::default();
        for key in HINTS {
            // An annotation that cannot be read restricted nothing when the devices were chosen.
            hints.add(key, pod, UnknownKeys::Skip).unwrap_or_default();
        }
        hints
    }

    fn add(&mut self, key: &'static str, pod: &Pod, unknown: UnknownKeys) -> Result<(), RequestError> {
        let Some(text) = pod.annotation(key) else {
            return Ok(());
        };
        let parsed = self.parse(key, text, unknown);
        parsed.map_err(|rule| AnnotationError::of_value(key, text, rule).into())
    }

    fn parse(&mut self, key: &str, text: &str, unknown: UnknownKeys) -> Result<(), String> {
        // Before parsing, so that a long text costs no time.
        if text.len() > MAX_BYTES {
            return Err(format!("longer than {MAX_BYTES} bytes"));
        }
        match key {
            ALLOCATE_HINT => self.by_type = parse_by_type(text, unknown)?,
            JOINT_ALLOCATE => self.joint = parse_joint(text, unknown)?,
            // Every key is one of `HINTS`, and this is the last.
            _ => self.partition = Some(parse_partition(text, unknown)?),
        }
        Ok(())
    }

    /// Refuses constraints in the annotations that no node can satisfy for this request.
    pub(super) fn refuse_impossible(&self, pod: &Pod, request: &PodRequest) -> Result<(), RequestError> {
        let Some((gpus, hint)) = request.gpus.as_ref().zip(self.by_type.get(TYPE_GPU)) else {
            return Ok(());
        };
        // Only rules about GPUs: nodes differ in the virtual functions that their adapters have.
        let rule = if hint.vf_selector.is_some() {
            "gpu.vfSelector: GPUs are not given by virtual functions".to_owned()
        } else if hint.scope == Some(TopologyScope::Device) && gpus.devices > 1 {
            let n_gpus = gpus.devices;
            format!("gpu.requiredTopologyScope is Device, but the pod asks for {n_gpus} GPUs")
        } else if hint.strategy == Some(AllocateStrategy::ApplyForAll) {
            // Koordinator accepts it, gives the pod the GPUs of its resources all the same, and then ignores that they are to be
            // near its other devices.
            "gpu.allocateStrategy: ApplyForAll is not for GPUs, whose number is that of the pod's resources; take it out"
                .to_owned()
        } else {
            return Ok(());
        };
        let text = pod.annotation(ALLOCATE_HINT).unwrap_or_default();
        Err(AnnotationError::of_value(ALLOCATE_HINT, text, rule).into())
    }
}

/// The refusal of a device type in the annotation `key` that no node has devices of, and that is none of the `known` types.
pub fn unknown_device_type(key: &'static str, device_type: &str, known: &[&str]) -> RequestError {
    let shown = excerpt(device_type);
    let meant = nearest(device_type, known).map(|name| format!("; did you mean {name:?}?"));
    let (known, meant) = (known.join(", "), meant.unwrap_or_default());
    let rule = format!("unknown device type {shown:?}; known are {known}{meant}");
    AnnotationError::new(key, rule).into()
}

/// The enforcement of memory limits that a pod demands on the GPUs that it shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DemandedEnforcement {
    /// `any`: no level is demanded, also where the operator demands one of all pods.
    #[default]
    Any,
    /// `driver`: the GPU driver enforces the limits.
    Driver,
}

/// The value of the annotation [`ENFORCEMENT`]; `None` without it, or if it is not one of [`DEMANDED_ENFORCEMENTS`].
pub fn enforcement(pod: &Pod) -> Option<DemandedEnforcement> {
    match pod.annotation(ENFORCEMENT)? {
        "any" => Some(DemandedEnforcement::Any),
        ENFORCED_BY_DRIVER => Some(DemandedEnforcement::Driver),
        // New pods with another value are refused; a placed one is not judged again.
        _ => None,
    }
}

/// Refuses values of the policies and of the demanded enforcement that do not exist.
pub(super) fn refuse_unknown_policies(pod: &Pod) -> Result<(), RequestError> {
    let known = [
        (NODE_POLICY, &NODE_POLICIES[..]),
        (DEVICE_POLICY, &DEVICE_POLICIES[..]),
        (ENFORCEMENT, &DEMANDED_ENFORCEMENTS[..]),
    ];
    for (key, choice) in known {
        if let Some(value) = pod.annotation(key).filter(|value| !choice.contains(value)) {
            let rule = format!("choose one of {}", choice.join(", "));
            return Err(AnnotationError::of_value(key, value, rule).into());
        }
    }
    Ok(())
}

/// The JSON of a [`DeviceHint`]. Absent and empty fields mean the same, as Go leaves empty ones out.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, expecting = "a JSON object")]
struct HintJson {
    selector: Option<SelectorJson>,
    vf_selector: Option<SelectorJson>,
    allocate_strategy: String,
    required_topology_scope: String,
    exclusive_policy: String,
}

/// The JSON of a [`LabelSelector`], in the form of `metav1.LabelSelector`.
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

fn parse_by_type(text: &str, unknown: UnknownKeys) -> Result<BTreeMap<String, DeviceHint>, String> {
    let by_type: BTreeMap<String, Option<HintJson>> = parse_object(text, unknown)?;
    let mut hints = BTreeMap::new();
    // Any type, known or not: Device objects may list types that this code has no name for.
    for (device_type, json) in by_type {
        let hint = json.unwrap_or_default().parse();
        let hint = hint.map_err(|rule| format!("{device_type}.{rule}"))?;
        hints.insert(device_type, hint);
    }
    Ok(hints)
}

/// Parses [`JOINT_ALLOCATE`]; `None` if the annotation names no types.
fn parse_joint(text: &str, unknown: UnknownKeys) -> Result<Option<JointAllocate>, String> {
    let json: JointJson = parse_object(text, unknown)?;
    let same_pcie = parse_enum("requiredScope", &json.required_scope, [("SamePCIe", ())])?.is_some();
    let device_types = json.device_types.unwrap_or_default();
    // Each type once: the order of the types decides which one leads.
    for (i, device_type) in device_types.iter().enumerate() {
        if device_type.is_empty() {
            return Err(format!("deviceTypes[{i}] is empty"));
        }
        if device_types.iter().take(i).any(|other| other == device_type) {
            return Err(format!("deviceTypes names {device_type:?} twice"));
        }
    }
    // Without types there is nothing to join, as for Koordinator.
    Ok((!device_types.is_empty()).then_some(JointAllocate {
        device_types,
        same_pcie,
    }))
}

fn parse_partition(text: &str, unknown: UnknownKeys) -> Result<PartitionSpec, String> {
    let json: PartitionJson = parse_object(text, unknown)?;
    let policies = [("BestEffort", false), ("Restricted", true)];
    let restricted = parse_enum("allocatePolicy", &json.allocate_policy, policies)?.unwrap_or_default();
    let bandwidth = json.ring_bus_bandwidth.and_then(topology::bandwidth);
    match json.ring_bus_bandwidth {
        Some(quantity) if bandwidth.is_none() => Err(format!(
            "ringBusBandwidth is {quantity}, not a whole number of bytes up to 2^50"
        )),
        _ => Ok(PartitionSpec {
            restricted,
            ring_bus_bandwidth: bandwidth,
        }),
    }
}

impl HintJson {
    /// The constraints on one device type; an error names the field, and the rule that it breaks.
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
            selector: parse_selector("selector", self.selector)?,
            vf_selector: parse_selector("vfSelector", self.vf_selector)?,
            strategy: parse_enum("allocateStrategy", &self.allocate_strategy, strategies)?,
            exclusive: parse_enum("exclusivePolicy", &self.exclusive_policy, policies)?,
            scope: parse_enum("requiredTopologyScope", &self.required_topology_scope, scopes)?,
        })
    }
}

/// Parses the selector of a field; an error is the rule that the JSON breaks.
fn parse_selector(field: &str, json: Option<SelectorJson>) -> Result<Option<LabelSelector>, String> {
    let Some(json) = json else {
        return Ok(None);
    };
    let mut requirements = LabelSelector::new();
    // `matchLabels` is short for `In` with one value.
    for (key, value) in json.match_labels.unwrap_or_default() {
        let test = LabelTest::In(vec![value]);
        requirements.push(LabelRequirement { key, test });
    }
    for (i, expression) in json.match_expressions.into_iter().flatten().enumerate() {
        let requirement = expression.parse();
        requirements.push(requirement.map_err(|rule| format!("{field}.matchExpressions[{i}].{rule}"))?);
    }
    // No label has an empty key, so that no device would match.
    if requirements.iter().any(|requirement| requirement.key.is_empty()) {
        return Err(format!("{field} has an empty key"));
    }
    Ok(Some(requirements))
}

impl ExpressionJson {
    fn parse(self) -> Result<LabelRequirement, String> {
        let values = self.values.unwrap_or_default();
        let (operator, n_values) = (self.operator.as_str(), values.len());
        let test = match operator {
            // The API server has the same rules for label selectors, but does not check selectors in annotations.
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

/// Looks up the value of a field by its name; `None` if the text is empty.
fn parse_enum<T, const N: usize>(
    field: &str,
    text: &str,
    values: [(&str, T); N],
) -> Result<Option<T>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let names = values.each_ref().map(|(name, _)| *name).join(", ");
    match values.into_iter().find(|(name, _)| *name == text) {
        Some((_, value)) => Ok(Some(value)),
        None => Err(format!("{field} is {:?}, none of {names}", excerpt(text))),
    }
}

#[cfg(test)]
mod tests;
