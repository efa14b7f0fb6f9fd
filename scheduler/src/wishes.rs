//! How a pod's devices are to be chosen: its annotations in the engine's terms.

use std::sync::Arc;

use placement::{
    DeviceType, Exclusion, Joint, Kind, PartitionWish, Requirement, Scope, Selector, Strategy, Test, Wish,
    Wishes,
};
use proto::device::TYPE_GPU;
use proto::pod::Pod;
use proto::request::RequestError;
use proto::request::hints::{
    AllocateStrategy, DeviceHint, ExclusivePolicy, Hints, LabelRequirement, LabelSelector, LabelTest,
    TopologyScope,
};

/// What a pod's annotations wish for; nothing, if they say nothing that matters.
///
/// # Errors
/// The first annotation that cannot be read.
pub fn of(pod: &Pod) -> Result<Option<Arc<Wishes>>, Arc<RequestError>> {
    Ok(some(Hints::read(pod)?))
}

/// The same of a pod that has its devices: annotations that cannot be read are passed over.
pub fn of_placed(pod: &Pod) -> Option<Arc<Wishes>> {
    some(Hints::read_placed(pod))
}

fn some(hints: Hints) -> Option<Arc<Wishes>> {
    let wishes = wishes(hints);
    (wishes != Wishes::default()).then(|| Arc::new(wishes))
}

fn wishes(hints: Hints) -> Wishes {
    let joint = hints.joint.map(|joint| Joint {
        kinds: joint.device_types.iter().map(|kind| self::kind(kind)).collect(),
        same_switch: joint.same_pcie,
    });
    let partition = hints.partition.map(|spec| PartitionWish {
        restricted: spec.restricted,
        bandwidth: spec.ring_bus_bandwidth,
    });
    let by_kind = hints
        .by_type
        .into_iter()
        .map(|(kind, hint)| (self::kind(&kind), wish(hint)));
    let by_kind = by_kind.filter(|(_, wish)| *wish != Wish::default()).collect();
    Wishes {
        joint,
        partition,
        by_kind,
    }
}

/// The engine's word for a type of devices.
fn kind(kind: &str) -> Kind {
    if kind == TYPE_GPU {
        Kind::Gpu
    } else {
        Kind::Other(DeviceType::from(kind))
    }
}

fn wish(hint: DeviceHint) -> Wish {
    let DeviceHint {
        selector: devices,
        vf_selector,
        strategy,
        exclusive,
        scope,
    } = hint;
    Wish {
        selector: devices.map(selector),
        functions: vf_selector.map(selector),
        strategy: strategy.map(|strategy| match strategy {
            AllocateStrategy::ApplyForAll => Strategy::All,
            AllocateStrategy::RequestsAsCount => Strategy::Count,
        }),
        exclusion: exclusive.map(|policy| match policy {
            ExclusivePolicy::DeviceLevel => Exclusion::Device,
            ExclusivePolicy::PcieLevel => Exclusion::Switch,
        }),
        scope: scope.map(|scope| match scope {
            TopologyScope::Device => Scope::Device,
            TopologyScope::Pcie => Scope::Switch,
            TopologyScope::NumaNode => Scope::Numa,
            TopologyScope::Node => Scope::Machine,
        }),
    }
}

fn selector(selector: LabelSelector) -> Selector {
    let values = |values: Vec<String>| values.into_iter().map(String::into_boxed_str).collect();
    let requirement = |LabelRequirement { key, test }: LabelRequirement| Requirement {
        key: key.into(),
        test: match test {
            LabelTest::In(wanted) => Test::In(values(wanted)),
            LabelTest::NotIn(unwanted) => Test::NotIn(values(unwanted)),
            LabelTest::Exists => Test::Exists,
            LabelTest::DoesNotExist => Test::DoesNotExist,
        },
    };
    Selector {
        requirements: selector.requirements.into_iter().map(requirement).collect(),
    }
}

#[cfg(test)]
mod tests {
    use placement::Labels;
    use serde_json::{Value, json};

    use super::*;

    fn read(annotations: &Value) -> Result<Option<Arc<Wishes>>, String> {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"annotations": annotations}})).unwrap();
        of(&pod).map_err(|error| error.to_string())
    }

    #[test]
    fn every_word_has_its_meaning() {
        let hint = r#"{"gpu": {"requiredTopologyScope": "NUMANode", "exclusivePolicy": "PCIeLevel"},
            "npu": {"allocateStrategy": "ApplyForAll", "requiredTopologyScope": "PCIe"},
            "rdma": {"vfSelector": {}, "allocateStrategy": "RequestsAsCount", "exclusivePolicy": "DeviceLevel"}}"#;
        let wishes = read(&json!({
            "scheduling.koordinator.sh/device-allocate-hint": hint,
            "scheduling.koordinator.sh/device-joint-allocate": r#"{"deviceTypes": ["rdma", "gpu"], "requiredScope": "SamePCIe"}"#,
            "scheduling.koordinator.sh/gpu-partition-spec": r#"{"allocatePolicy": "Restricted", "ringBusBandwidth": "1Ki"}"#,
        }));
        let other = |kind: &str| Kind::Other(kind.into());
        let gpu = Wish {
            scope: Some(Scope::Numa),
            exclusion: Some(Exclusion::Switch),
            ..Wish::default()
        };
        let npu = Wish {
            strategy: Some(Strategy::All),
            scope: Some(Scope::Switch),
            ..Wish::default()
        };
        let functions = Some(Selector::default());
        let rdma = Wish {
            functions,
            strategy: Some(Strategy::Count),
            exclusion: Some(Exclusion::Device),
            ..Wish::default()
        };
        let expected = Wishes {
            joint: Some(Joint {
                kinds: vec![other("rdma"), Kind::Gpu],
                same_switch: true,
            }),
            partition: Some(PartitionWish {
                restricted: true,
                bandwidth: Some(1024),
            }),
            by_kind: vec![(Kind::Gpu, gpu), (other("npu"), npu), (other("rdma"), rdma)],
        };
        assert_eq!(read(&json!({})), Ok(None));
        assert_eq!(wishes, Ok(Some(Arc::new(expected))));
    }

    #[test]
    fn selectors_select_as_kubernetes_says() {
        let hint = r#"{"rdma": {"selector": {"matchLabels": {"type": "a"}, "matchExpressions": [{"key": "slow", "operator": "DoesNotExist"}]}}}"#;
        let wishes = read(&json!({"scheduling.koordinator.sh/device-allocate-hint": hint}))
            .unwrap()
            .unwrap();
        let selector = wishes.by_kind[0].1.selector.as_ref().unwrap();
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
    fn hints_that_say_nothing_are_none() {
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
