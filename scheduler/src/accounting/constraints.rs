//! The constraints in a pod's annotations on the choice of its devices, in the engine's terms.

use std::sync::Arc;

use placement::{
    Constraints, DeviceConstraint, DeviceType, Exclusion, JointAllocation, LabelCondition,
    PartitionConstraint, Requirement, Scope, Selector, Strategy,
};
use proto::pod::Pod;
use proto::request::RequestError;
use proto::request::hints::{
    AllocateStrategy, DeviceHint, ExclusivePolicy, Hints, LabelRequirement, LabelSelector, LabelTest,
    TopologyScope,
};

/// The constraints in a pod's annotations, which Koordinator calls hints; `None` if none of them restricts or ranks devices.
///
/// # Errors
/// The first annotation that cannot be read.
pub fn read(pod: &Pod) -> Result<Option<Arc<Constraints>>, Arc<RequestError>> {
    Ok(unless_empty(Hints::read(pod)?))
}

/// The constraints of a pod that has its devices already; annotations that cannot be read do not count.
pub(crate) fn read_placed(pod: &Pod) -> Option<Arc<Constraints>> {
    unless_empty(Hints::read_placed(pod))
}

/// The constraints in the engine's terms; `None` if none of them restricts or ranks devices.
fn unless_empty(hints: Hints) -> Option<Arc<Constraints>> {
    let constraints = constraints(hints);
    (constraints != Constraints::default()).then(|| Arc::new(constraints))
}

/// Converts the constraints of a pod's annotations to those of the engine. Device types without any constraint are left out.
fn constraints(hints: Hints) -> Constraints {
    let joint = hints.joint.map(|joint| JointAllocation {
        kinds: (joint.device_types.iter().map(|kind| kind.as_str().into())).collect(),
        same_switch: joint.same_pcie,
    });
    let partition = hints.partition.map(|spec| PartitionConstraint {
        restricted: spec.restricted,
        bandwidth: spec.ring_bus_bandwidth,
    });
    let mut by_kind = Vec::new();
    for (kind, hint) in hints.by_type {
        let constraint = constraint(hint);
        if constraint != DeviceConstraint::default() {
            by_kind.push((DeviceType::from(kind.as_str()), constraint));
        }
    }
    Constraints {
        joint,
        partition,
        by_kind,
        ..Constraints::default()
    }
}

fn constraint(hint: DeviceHint) -> DeviceConstraint {
    DeviceConstraint {
        selector: hint.selector.map(selector),
        virtual_functions: hint.vf_selector.map(selector),
        strategy: match hint.strategy {
            None => None,
            Some(AllocateStrategy::ApplyForAll) => Some(Strategy::ApplyForAll),
            Some(AllocateStrategy::RequestsAsCount) => Some(Strategy::RequestsAsCount),
        },
        exclusion: match hint.exclusive {
            None => None,
            Some(ExclusivePolicy::DeviceLevel) => Some(Exclusion::Device),
            Some(ExclusivePolicy::PcieLevel) => Some(Exclusion::Switch),
        },
        scope: match hint.scope {
            None => None,
            Some(TopologyScope::Device) => Some(Scope::Device),
            Some(TopologyScope::Pcie) => Some(Scope::Switch),
            Some(TopologyScope::NumaNode) => Some(Scope::Numa),
            Some(TopologyScope::Node) => Some(Scope::Machine),
        },
    }
}

fn selector(selector: LabelSelector) -> Selector {
    let mut requirements = Vec::with_capacity(selector.len());
    for LabelRequirement { key, test } in selector {
        requirements.push(Requirement {
            key: key.into(),
            test: match test {
                LabelTest::In(values) => LabelCondition::In(boxed(values)),
                LabelTest::NotIn(values) => LabelCondition::NotIn(boxed(values)),
                LabelTest::Exists => LabelCondition::Exists,
                LabelTest::DoesNotExist => LabelCondition::DoesNotExist,
            },
        });
    }
    Selector { requirements }
}

fn boxed(values: Vec<String>) -> Vec<Box<str>> {
    values.into_iter().map(String::into_boxed_str).collect()
}

#[cfg(test)]
mod tests {
    use placement::Labels;
    use serde_json::{Value, json};

    use super::*;

    fn read(annotations: &Value) -> Result<Option<Arc<Constraints>>, String> {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"annotations": annotations}})).unwrap();
        super::read(&pod).map_err(|error| error.to_string())
    }

    #[test]
    fn each_word_of_the_annotations_becomes_its_constraint() {
        let hint = r#"{"gpu": {"requiredTopologyScope": "NUMANode", "exclusivePolicy": "PCIeLevel"},
            "npu": {"allocateStrategy": "ApplyForAll", "requiredTopologyScope": "PCIe"},
            "rdma": {"vfSelector": {}, "allocateStrategy": "RequestsAsCount", "exclusivePolicy": "DeviceLevel"}}"#;
        let constraints = read(&json!({
            "scheduling.koordinator.sh/device-allocate-hint": hint,
            "scheduling.koordinator.sh/device-joint-allocate": r#"{"deviceTypes": ["rdma", "gpu"], "requiredScope": "SamePCIe"}"#,
            "scheduling.koordinator.sh/gpu-partition-spec": r#"{"allocatePolicy": "Restricted", "ringBusBandwidth": "1Ki"}"#,
        }));
        let other = |kind: &str| DeviceType::from(kind);
        let gpu = DeviceConstraint {
            scope: Some(Scope::Numa),
            exclusion: Some(Exclusion::Switch),
            ..DeviceConstraint::default()
        };
        let npu = DeviceConstraint {
            strategy: Some(Strategy::ApplyForAll),
            scope: Some(Scope::Switch),
            ..DeviceConstraint::default()
        };
        let virtual_functions = Some(Selector::default());
        let rdma = DeviceConstraint {
            virtual_functions,
            strategy: Some(Strategy::RequestsAsCount),
            exclusion: Some(Exclusion::Device),
            ..DeviceConstraint::default()
        };
        let expected = Constraints {
            joint: Some(JointAllocation {
                kinds: vec![other("rdma"), DeviceType::Gpu],
                same_switch: true,
            }),
            partition: Some(PartitionConstraint {
                restricted: true,
                bandwidth: Some(1024),
            }),
            by_kind: vec![(DeviceType::Gpu, gpu), (other("npu"), npu), (other("rdma"), rdma)],
            ..Constraints::default()
        };
        assert_eq!(read(&json!({})), Ok(None));
        assert_eq!(constraints, Ok(Some(Arc::new(expected))));
    }

    #[test]
    fn selectors_match_as_kubernetes_label_selectors_do() {
        let hint = r#"{"rdma": {"selector": {"matchLabels": {"type": "a"}, "matchExpressions": [{"key": "slow", "operator": "DoesNotExist"}]}}}"#;
        let constraints = read(&json!({"scheduling.koordinator.sh/device-allocate-hint": hint}))
            .unwrap()
            .unwrap();
        let selector = constraints.by_kind[0].1.selector.as_ref().unwrap();
        let labels = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(key, value)| ((*key).into(), (*value).into()))
                .collect::<Labels>()
        };
        assert!(selector.selects(&labels(&[("type", "a"), ("other", "b")])));
        assert!(!selector.selects(&labels(&[("type", "b")])));
        assert!(!selector.selects(&labels(&[("type", "a"), ("slow", "")])));
    }

    #[test]
    fn an_empty_hint_constrains_nothing() {
        assert_eq!(
            read(&json!({"scheduling.koordinator.sh/device-allocate-hint": r#"{"rdma": {}}"#})),
            Ok(None)
        );
        assert!(
            read(&json!({"scheduling.koordinator.sh/device-allocate-hint": "[]"}))
                .unwrap_err()
                .contains("not a JSON object")
        );
    }
}
