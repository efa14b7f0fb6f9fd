//! The annotations as they are written, and what their words mean.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{
    AllocateStrategy as Strategy, DeviceHint, ExclusivePolicy as Exclusive, JointAllocate, LabelRequirement,
    LabelSelector, LabelTest, PartitionSpec, TopologyScope as Scope, object,
};
use crate::quantity::Quantity;
use crate::topology;

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, expecting = "a JSON object")]
struct Hint {
    selector: Option<Selector>,
    vf_selector: Option<Selector>,
    allocate_strategy: String,
    required_topology_scope: String,
    exclusive_policy: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, expecting = "a JSON object")]
struct Selector {
    match_labels: Option<BTreeMap<String, String>>,
    match_expressions: Option<Vec<Expression>>,
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct Expression {
    key: String,
    operator: String,
    #[serde(default)]
    values: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, expecting = "a JSON object")]
struct Joint {
    device_types: Option<Vec<String>>,
    required_scope: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, expecting = "a JSON object")]
struct Spec {
    allocate_policy: String,
    ring_bus_bandwidth: Option<Quantity>,
}

/// Reads hints by type.
pub(super) fn by_type(text: &str) -> Result<BTreeMap<String, DeviceHint>, String> {
    let forms: BTreeMap<String, Option<Hint>> = object(text)?;
    let hint = |(kind, form): (String, Option<Hint>)| {
        let hint = form
            .unwrap_or_default()
            .meaning()
            .map_err(|rule| format!("{kind}.{rule}"))?;
        Ok((kind, hint))
    };
    forms.into_iter().map(hint).collect()
}

/// Reads which types belong together; none, if it names none.
pub(super) fn joint(text: &str) -> Result<Option<JointAllocate>, String> {
    let Joint {
        device_types,
        required_scope,
    } = object(text)?;
    let same_pcie = word("requiredScope", &required_scope, [("SamePCIe", ())])?.is_some();
    let device_types = device_types.unwrap_or_default();
    for (at, kind) in device_types.iter().enumerate() {
        if kind.is_empty() {
            return Err(format!("deviceTypes[{at}] is empty"));
        }
        if device_types.iter().take(at).any(|other| other == kind) {
            return Err(format!("deviceTypes names {kind:?} twice"));
        }
    }
    Ok((!device_types.is_empty()).then_some(JointAllocate {
        device_types,
        same_pcie,
    }))
}

/// Reads how GPUs are to be taken from a partition table.
pub(super) fn partition(text: &str) -> Result<PartitionSpec, String> {
    let Spec {
        allocate_policy,
        ring_bus_bandwidth,
    } = object(text)?;
    let restricted = word(
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

impl Hint {
    fn meaning(self) -> Result<DeviceHint, String> {
        let strategies = [
            ("ApplyForAll", Strategy::ApplyForAll),
            ("RequestsAsCount", Strategy::RequestsAsCount),
        ];
        let policies = [
            ("DeviceLevel", Exclusive::DeviceLevel),
            ("PCIeLevel", Exclusive::PcieLevel),
        ];
        let scopes = [
            ("Device", Scope::Device),
            ("PCIe", Scope::Pcie),
            ("NUMANode", Scope::NumaNode),
            ("Node", Scope::Node),
        ];
        Ok(DeviceHint {
            selector: self
                .selector
                .map(|selector| selector.meaning("selector"))
                .transpose()?,
            vf_selector: self
                .vf_selector
                .map(|selector| selector.meaning("vfSelector"))
                .transpose()?,
            strategy: word("allocateStrategy", &self.allocate_strategy, strategies)?,
            exclusive: word("exclusivePolicy", &self.exclusive_policy, policies)?,
            scope: word("requiredTopologyScope", &self.required_topology_scope, scopes)?,
        })
    }
}

impl Selector {
    fn meaning(self, field: &str) -> Result<LabelSelector, String> {
        let labels = self.match_labels.unwrap_or_default().into_iter();
        let mut requirements: Vec<LabelRequirement> = labels
            .map(|(key, value)| LabelRequirement {
                key,
                test: LabelTest::In(vec![value]),
            })
            .collect();
        for (at, expression) in self.match_expressions.unwrap_or_default().into_iter().enumerate() {
            requirements.push(
                expression
                    .meaning()
                    .map_err(|rule| format!("{field}.matchExpressions[{at}].{rule}"))?,
            );
        }
        match requirements.iter().find(|requirement| requirement.key.is_empty()) {
            Some(_) => Err(format!("{field} has an empty key")),
            None => Ok(LabelSelector { requirements }),
        }
    }
}

impl Expression {
    fn meaning(self) -> Result<LabelRequirement, String> {
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

/// What a word means; nothing, if it is empty.
fn word<T, const N: usize>(field: &str, text: &str, known: [(&str, T); N]) -> Result<Option<T>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let words = known.each_ref().map(|(word, _)| *word).join(", ");
    let found = known.into_iter().find(|(word, _)| *word == text);
    let shown: String = text.chars().take(super::EXCERPT).collect();
    found
        .map(|(_, meaning)| Some(meaning))
        .ok_or_else(|| format!("{field} is {shown:?}, none of {words}"))
}
