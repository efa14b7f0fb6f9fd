//! The Device object, the labels and the memory unit.

use insta::assert_json_snapshot;
use rstest::rstest;
use serde_json::json;

use super::*;
use crate::inject::enforcement::{Level, same_level};
use crate::inject::mode::{Certainty, Exposure, Injection, Mode};
use crate::tests::builders::gpu;

/// Simulated GPUs, of which the driver limits one and keeps some of its memory, and a lost adapter.
#[test]
fn the_device_object_of_a_node() {
    let mut fleet = sick(1);
    let first = &mut fleet.gpus[0].device;
    first.location = PciLocation {
        numa_node: Some(1),
        root: Some("pci0000:3a".to_owned()),
        switch: None,
    };
    (first.memory_bytes, first.reserved_bytes) = (1000, 24);
    fleet.others = vec![nic(false)];
    let mut levels = same_level(Level::Driver, [gpu(0)]);
    levels.extend(same_level(Level::HamiCore, [gpu(1)]));
    let inputs = DeviceObjectInputs {
        checkpoints: Some(r#"[{"podUID":"u"}]"#.to_owned()),
        serves_vendor: true,
        is_simulated: true,
        enforcements: Arc::new(levels),
        ..DeviceObjectInputs::default()
    };
    assert_json_snapshot!(inputs.device(&fleet, &node(&json!({})), None, at(0)));
}

/// Healthy, sick, sick for another reason, well again; then another process that only knows the object.
#[test]
fn conditions_say_why_and_since_when() {
    let node = node(&json!({}));
    let after = |fleet: &NodeFleet, before: &DeviceSpec, second| {
        DeviceObjectInputs::default()
            .device(fleet, &node, Some(before), at(second))
            .spec
    };
    let healthy = object(&fleet(2)).spec;
    assert_eq!(condition(&healthy), None);
    let mut fleet = sick(0);
    let first = after(&fleet, &healthy, 10);
    assert_eq!(condition(&first), Some(("False", "Xid79", 10)));
    fleet.gpus[0].reason = Some(HealthReason::Lost);
    let second = after(&fleet, &first, 20);
    assert_eq!(condition(&second), Some(("False", "Lost", 10)));
    (fleet.gpus[0].is_healthy, fleet.gpus[0].reason) = (true, Some(HealthReason::Recovered));
    let third = after(&fleet, &second, 30);
    assert_eq!(condition(&third), Some(("True", "Recovered", 30)));
    assert_eq!(after(&self::fleet(2), &third, 40), third);
    assert_eq!(
        condition(&after(&self::fleet(2), &second, 50)),
        Some(("True", "Healthy", 50)),
        "what was lost is back"
    );
    assert!(third.devices[1].conditions.is_empty());
}

#[test]
fn foreign_additions_stay_and_foreign_changes_are_undone() {
    let wanted = object(&sick(1));
    let matches = |change: fn(&mut RawDevice)| {
        let StoredDevice::Present(mut held) = stored(&wanted) else {
            unreachable!()
        };
        change(&mut held);
        device_object::matches(&held, &wanted)
    };
    assert!(matches(|_| {}));
    assert!(matches(|held| {
        held.metadata
            .labels
            .as_mut()
            .unwrap()
            .insert("team".to_owned(), "a".to_owned());
        held.metadata.annotations = Some(
            [(
                "scheduling.koordinator.sh/gpu-partitions".to_owned(),
                "{}".to_owned(),
            )]
            .into(),
        );
    }));
    assert!(!matches(|held| held.metadata.labels = None));
    assert!(!matches(|held| held.metadata.owner_references = None));
    assert!(!matches(|held| held.spec["devices"][1]["health"] = json!(true)));
    assert!(!matches(
        |held| held.spec["devices"][0]["resources"]["koordinator.sh/gpu-memory"] = json!("a lot")
    ));
    assert!(!matches(|held| held.spec = Value::Null));
}

#[test]
fn labels_are_valid_and_omit_mixed_models() {
    let mut mixed = fleet(2);
    mixed.gpus[0].device.model = "NVIDIA A100-SXM4-80GB".to_owned();
    let labels = |fleet: &NodeFleet| object(fleet).metadata.labels.unwrap();
    assert_eq!(labels(&mixed).get("node.koordinator.sh/gpu-model"), None);
    mixed.gpus[1].device.model = format!("NVIDIA A100 (PCIe) {}", "x".repeat(80));
    mixed.gpus.remove(0);
    let model = labels(&mixed)["node.koordinator.sh/gpu-model"].clone();
    assert!(model.starts_with("A100--PCIe--x") && model.len() <= 63, "{model}");
    mixed.gpus.clear();
    assert_eq!(labels(&mixed), BTreeMap::new(), "labels go with the devices");
}

#[test]
fn the_node_gets_the_labels_of_its_devices() {
    let mut node = node(&json!({}));
    let labels = object(&fleet(1)).metadata.labels.unwrap();
    let patch = node_patches::labels(&node, &labels).unwrap();
    assert_eq!(
        patch,
        json!({"metadata": {"labels": {
            "node.koordinator.sh/gpu-vendor": "nvidia", "node.koordinator.sh/gpu-model": "Tesla-T4",
            "node.koordinator.sh/gpu-driver-version": "550.54.15",
        }}})
    );
    node.metadata.labels = serde_json::from_value(patch["metadata"]["labels"].clone()).unwrap();
    node.metadata
        .labels
        .as_mut()
        .unwrap()
        .insert("gpushare".to_owned(), "true".to_owned());
    assert_eq!(node_patches::labels(&node, &labels), None);
    let gone = json!({"node.koordinator.sh/gpu-vendor": null, "node.koordinator.sh/gpu-model": null, "node.koordinator.sh/gpu-driver-version": null});
    assert_eq!(
        node_patches::labels(&node, &BTreeMap::new()),
        Some(json!({"metadata": {"labels": gone}}))
    );
}

#[test]
fn the_memory_unit_is_annotated_once() {
    let names = ResourceNames::default();
    let mut node = node(&json!({}));
    let patch = node_patches::memory_unit(&node, &names, MemoryUnit::GIB).unwrap();
    assert_eq!(
        patch,
        json!({"metadata": {"annotations": {"aliyun.com/gpu-mem-unit": "GiB"}}})
    );
    node.metadata.annotations = serde_json::from_value(patch["metadata"]["annotations"].clone()).unwrap();
    assert_eq!(node_patches::memory_unit(&node, &names, MemoryUnit::GIB), None);
    assert!(node_patches::memory_unit(&node, &names, MemoryUnit::MIB).is_some());
}

/// The operator's labels add to those of the devices.
#[test]
fn labels_links_and_partitions_are_published() {
    let labels = json!({
        "devices": {"gpu": {"tier": "high"}, "0000:1f:00.0": {"fabric": "b"}}, "virtualFunctions": {"rdma": {"type": "fast"}},
    });
    let overrides = NodeOverrides {
        labels: serde_json::from_value(labels).unwrap(),
        ..NodeOverrides::default()
    };
    let mut fleet = fleet(8);
    let mut nic = nic(true);
    nic.device.vf_groups =
        serde_json::from_value(json!([{"vfs": [{"minor": 0, "busID": "0000:1f:00.2"}]}])).unwrap();
    fleet.others = vec![nic];
    for entry in &mut fleet.gpus {
        entry.device.model = "NVIDIA H100 80GB HBM3".to_owned();
    }
    fleet.links = serde_json::from_value(json!([{"minors": [0, 1, 2, 3, 4, 5, 6, 7], "links": 18}])).unwrap();
    let mut inputs = DeviceObjectInputs {
        overrides: Arc::new(overrides),
        ..DeviceObjectInputs::default()
    };
    let device = inputs.device(&fleet, &node(&json!({})), None, at(0));
    let (gpu, nic) = (&device.spec.devices[0], &device.spec.devices[8]);
    let labels = [
        &gpu.labels["tier"],
        &nic.labels["fabric"],
        &nic.vf_groups[0].labels["type"],
    ];
    assert_eq!(labels, ["high", "b", "fast"]);
    let annotations = device.metadata.annotations.unwrap();
    assert_eq!(
        annotations["gpushare/gpu-links"],
        r#"[{"links":18,"minors":[0,1,2,3,4,5,6,7]}]"#
    );
    assert!(annotations["scheduling.koordinator.sh/gpu-partitions"].contains(r#""minors":[4,5,6,7]"#));
    let policy = |labels: Option<BTreeMap<String, String>>| {
        labels.unwrap().remove("node.koordinator.sh/gpu-partition-policy")
    };
    assert_eq!(policy(device.metadata.labels).as_deref(), Some("Prefer"));
    inputs.partition_policy = Some(GpuPartitionPolicy::Honor);
    let of = |fleet| {
        policy(
            inputs
                .device(fleet, &node(&json!({})), None, at(0))
                .metadata
                .labels,
        )
    };
    assert_eq!(of(&fleet).as_deref(), Some("Honor"));
    assert_eq!(of(&sick(0)), None, "there is nothing to honour");
}

/// The type, status and reason of each condition of a node's first GPU about the way in which containers get it, and the last
/// message. A status is Unknown as long as nothing has shown that the mode works, or that no other container sees the GPU.
#[rstest]
#[case::proven(Certainty::Proven, None, "Injectable True Cdi", "why")]
#[case::assumed(Certainty::Assumed, None, "Injectable Unknown Cdi", "why")]
#[case::impossible(Certainty::Impossible, None, "Injectable False Cdi", "why")]
#[case::every_pod(
    Certainty::Proven,
    Some(Exposure::EveryPod),
    "Injectable True Cdi, Isolated False ImageVariable",
    "a container that asks for no GPU sees this one if its image"
)]
#[case::pods_of_a_class(
    Certainty::Proven,
    Some(Exposure::RuntimeClass("nvidia".to_owned())),
    "Injectable True Cdi, Isolated False ImageVariable",
    "a container that asks for no GPU in a pod with runtimeClassName: nvidia sees this one if"
)]
#[case::not_known(
    Certainty::Proven,
    Some(Exposure::Unknown("the plugin is privileged")),
    "Injectable True Cdi, Isolated Unknown NotObservable",
    "a container that asks for no GPU may see this one if its image sets the vendor's variable; not known, because the plugin is \
     privileged; the runtime hook"
)]
fn conditions_say_how_containers_get_a_gpu(
    #[case] certainty: Certainty,
    #[case] exposure: Option<Exposure>,
    #[case] expected: &str,
    #[case] message: &str,
) {
    let injection = Injection {
        mode: Mode::Cdi,
        certainty,
        reason: "Cdi",
        message: "why".to_owned(),
        exposure,
    };
    let inputs = DeviceObjectInputs {
        injection: Some(injection),
        ..DeviceObjectInputs::default()
    };
    let device = inputs.device(&fleet(1), &node(&json!({})), None, at(0));
    let conditions = &device.spec.devices[0].conditions;
    let found: Vec<_> = conditions
        .iter()
        .map(|one| format!("{} {} {}", one.condition_type, one.status, one.reason))
        .collect();
    assert_eq!(found.join(", "), expected);
    let last = &conditions.last().unwrap().message;
    assert!(last.starts_with(message), "{last}");
}
