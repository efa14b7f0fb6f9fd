//! How a pod's author wants devices to be chosen, by Koordinator's proposals: whether the annotations can be read.
//!
//! What they ask for is not looked at here.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::RequestError;
use crate::pod::Pod;
use crate::quantity::Quantity;

/// Most characters of an annotation that a refusal repeats.
const EXCERPT: usize = 64;

/// An annotation of a pod that says how its devices are to be chosen.
#[derive(Clone, Copy, Debug)]
pub struct Hint {
    /// Its key.
    pub key: &'static str,
    check: fn(&str) -> Result<(), String>,
}

/// Every such annotation.
pub const HINTS: [Hint; 3] = [
    Hint { key: "scheduling.koordinator.sh/device-allocate-hint", check: check::<BTreeMap<String, AllocateHint>> },
    Hint { key: "scheduling.koordinator.sh/device-joint-allocate", check: check::<JointAllocate> },
    Hint { key: "scheduling.koordinator.sh/gpu-partition-spec", check: check::<PartitionSpec> },
];

impl Hint {
    /// Whether a pod's annotation, if it has it, can be read.
    ///
    /// # Errors
    /// It is of another form than the proposals say.
    pub fn judge(self, pod: &Pod) -> Result<(), RequestError> {
        let Some(text) = pod.metadata.annotations.as_ref().and_then(|annotations| annotations.get(self.key)) else { return Ok(()) };
        (self.check)(text).map_err(|rule| RequestError::Hint { key: self.key, value: text.chars().take(EXCERPT).collect(), rule })
    }
}

/// Whether a text is a JSON object with the fields of a type; serde alone would take a list for one too.
fn check<T: DeserializeOwned>(text: &str) -> Result<(), String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if !value.is_object() {
        return Err("not a JSON object".to_owned());
    }
    serde_json::from_value::<T>(value).map(drop).map_err(|error| error.to_string())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AllocateHint {
    #[serde(default, rename = "selector")]
    _selector: Option<Selector>,
    #[serde(default, rename = "vfSelector")]
    _vf_selector: Option<Selector>,
    #[serde(default, rename = "allocateStrategy")]
    _allocate_strategy: String,
    #[serde(default, rename = "requiredTopologyScope")]
    _required_topology_scope: String,
    #[serde(default, rename = "exclusivePolicy")]
    _exclusive_policy: String,
}

#[derive(Deserialize)]
struct Selector {
    #[serde(default, rename = "matchLabels")]
    _match_labels: Option<BTreeMap<String, String>>,
    #[serde(default, rename = "matchExpressions")]
    _match_expressions: Option<Vec<Expression>>,
}

#[derive(Deserialize)]
struct Expression {
    #[serde(rename = "key")]
    _key: String,
    #[serde(rename = "operator")]
    _operator: String,
    #[serde(default, rename = "values")]
    _values: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct JointAllocate {
    #[serde(default, rename = "deviceTypes")]
    _device_types: Option<Vec<String>>,
    #[serde(default, rename = "requiredScope")]
    _required_scope: String,
}

#[derive(Deserialize)]
struct PartitionSpec {
    #[serde(default, rename = "allocatePolicy")]
    _allocate_policy: String,
    #[serde(default, rename = "ringBusBandwidth")]
    _ring_bus_bandwidth: Option<Quantity>,
}
