//! How a pod's author wants devices to be chosen: the annotations of Koordinator's proposals on hints, joint allocation and
//! partitions.
//!
//! Reads and refuses; which devices that comes to is the scheduler's business.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{PodRequest, RequestError};
use crate::device::TYPE_GPU;
use crate::pod::Pod;

mod form;

/// JSON object of hints by type of device.
pub const ALLOCATE_HINT: &str = "scheduling.koordinator.sh/device-allocate-hint";
/// JSON object: which types of devices belong together.
pub const JOINT_ALLOCATE: &str = "scheduling.koordinator.sh/device-joint-allocate";
/// JSON object: how GPUs are to be taken from the partition table of their node.
pub const PARTITION_SPEC: &str = "scheduling.koordinator.sh/gpu-partition-spec";

/// Longest annotation that is read, in bytes: what it says is weighed for every node.
const MAX_BYTES: usize = 8 * 1024;
/// Most characters of an annotation that a refusal repeats.
const EXCERPT: usize = 64;

/// Everything that a pod's author says about the choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Hints by type of device, such as `rdma`.
    pub by_type: BTreeMap<String, DeviceHint>,
    /// The types of devices that belong together.
    pub joint: Option<JointAllocate>,
    /// How GPUs are to be taken from a partition table; none if that is left open.
    pub partition: Option<PartitionSpec>,
}

/// How devices of one type are to be chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceHint {
    /// Only devices with such labels.
    pub selector: Option<LabelSelector>,
    /// Virtual functions with such labels, instead of the devices themselves; any, if it is there and empty.
    pub vf_selector: Option<LabelSelector>,
    /// How the amount that is asked for becomes devices.
    pub strategy: Option<AllocateStrategy>,
    /// What others are kept from.
    pub exclusive: Option<ExclusivePolicy>,
    /// How wide the devices may be spread at most.
    pub scope: Option<TopologyScope>,
}

/// Labels that are wanted: all of these requirements hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSelector {
    /// The requirements.
    pub requirements: Vec<LabelRequirement>,
}

/// What one label must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelRequirement {
    /// The label's key.
    pub key: String,
    /// What it must be.
    pub test: LabelTest,
}

/// What a label must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabelTest {
    /// One of these.
    In(Vec<String>),
    /// None of these; it may be missing.
    NotIn(Vec<String>),
    /// There.
    Exists,
    /// Missing.
    DoesNotExist,
}

/// How the amount that is asked for becomes devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocateStrategy {
    /// It is taken of every device.
    ApplyForAll,
    /// It is a number of devices.
    RequestsAsCount,
}

/// What others are kept from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExclusivePolicy {
    /// The pod's devices.
    DeviceLevel,
    /// All devices of the type on their PCIe switches.
    PcieLevel,
}

/// How wide devices may be spread over a machine.
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

/// Types of devices that belong together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JointAllocate {
    /// The types, the leading one first.
    pub device_types: Vec<String>,
    /// Whether they must share their PCIe switches.
    pub same_pcie: bool,
}

/// How GPUs are to be taken from a partition table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartitionSpec {
    /// Whether only partitions of the best score will do.
    pub restricted: bool,
    /// Least bandwidth of a ring through the GPUs, in bytes per second.
    pub ring_bus_bandwidth: Option<u64>,
}

/// An annotation of a pod that says how its devices are to be chosen.
#[derive(Clone, Copy, Debug)]
pub struct Hint {
    /// Its key.
    pub key: &'static str,
    read: fn(&str, &mut Hints) -> Result<(), String>,
}

/// Every such annotation.
pub const HINTS: [Hint; 3] = [
    Hint {
        key: ALLOCATE_HINT,
        read: |text, hints| form::by_type(text).map(|by_type| hints.by_type = by_type),
    },
    Hint {
        key: JOINT_ALLOCATE,
        read: |text, hints| form::joint(text).map(|joint| hints.joint = joint),
    },
    Hint {
        key: PARTITION_SPEC,
        read: |text, hints| form::partition(text).map(|partition| hints.partition = Some(partition)),
    },
];

impl Hint {
    /// Whether a pod's annotation, if it has it, can be read and makes sense.
    ///
    /// # Errors
    /// It is of another form than the proposals say, or has a value that they do not know.
    pub fn judge(self, pod: &Pod) -> Result<(), RequestError> {
        self.read(pod, &mut Hints::default())
    }

    fn read(self, pod: &Pod, hints: &mut Hints) -> Result<(), RequestError> {
        let Some(text) = text(pod, self.key) else {
            return Ok(());
        };
        if text.len() > MAX_BYTES {
            return Err(refusal(self.key, text, format!("longer than {MAX_BYTES} bytes")));
        }
        (self.read)(text, hints).map_err(|rule| refusal(self.key, text, rule))
    }
}

impl Hints {
    /// Reads a pod's annotations.
    ///
    /// # Errors
    /// The first that [`Hint::judge`] refuses.
    pub fn of(pod: &Pod) -> Result<Self, RequestError> {
        let mut hints = Self::default();
        HINTS
            .into_iter()
            .try_for_each(|hint| hint.read(pod, &mut hints))?;
        Ok(hints)
    }

    /// Reads the annotations of a pod that has its devices: what cannot be read takes nothing from the rest.
    pub fn of_placed(pod: &Pod) -> Self {
        let mut hints = Self::default();
        for hint in HINTS {
            hint.read(pod, &mut hints).unwrap_or_default();
        }
        hints
    }

    /// Refuses what no node can give to a pod that asks for this.
    pub(super) fn refuse_impossible(&self, pod: &Pod, request: &PodRequest) -> Result<(), RequestError> {
        let Some((gpus, hint)) = request.gpus.as_ref().zip(self.by_type.get(TYPE_GPU)) else {
            return Ok(());
        };
        let impossible = |rule: String| {
            Err(refusal(
                ALLOCATE_HINT,
                text(pod, ALLOCATE_HINT).unwrap_or_default(),
                rule,
            ))
        };
        if hint.vf_selector.is_some() {
            return impossible("gpu.vfSelector: GPUs are not given by virtual functions".to_owned());
        }
        if hint.scope == Some(TopologyScope::Device) && gpus.devices > 1 {
            return impossible(format!(
                "gpu.requiredTopologyScope is Device, but the pod asks for {} GPUs",
                gpus.devices
            ));
        }
        Ok(())
    }
}

fn text<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn refusal(key: &'static str, text: &str, rule: String) -> RequestError {
    RequestError::Hint {
        key,
        value: text.chars().take(EXCERPT).collect(),
        rule,
    }
}

/// Reads a JSON object; serde alone would take a list for one too.
fn object<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if !value.is_object() {
        return Err("not a JSON object".to_owned());
    }
    serde_json::from_value(value).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
