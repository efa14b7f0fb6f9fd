//! The Device object, the labels and the memory unit.

use insta::assert_json_snapshot;
use proto::topology::GpuPartitionPolicy;
use rstest::rstest;
use serde_json::json;

use super::*;
use crate::inject::enforcement::{Enforcement, Level};
use crate::inject::mode::{Certainty, Exposure, Injection, Mode};
use crate::tests::builders::gpu;

#[test]
fn the_device_object_of_a_node() {
    let mut fleet = sick(1);
    fleet.gpus[0].device.location = PciLocation {
        numa_node: Some(1),
        root: Some("pci0000:3a".to_owned()),
        switch: None,
    };
    fleet.others = vec![nic(false)];
    let kubelet_allocations = Some(r#"[{"podUID":"u"}]"#.to_owned());
    let inputs = DeviceObjectInputs {
        kubelet_allocations,
        serves_vendor: true,
        ..DeviceObjectInputs::default()
    };
    assert_json_snapshot!(inputs.device(&fleet, &node(&json!({})), None, at(0)));
}

#[test]
fn devices_of_a_file_are_marked_as_simulated() {
    let mark = |is_simulated| {
        let inputs = DeviceObjectInputs {
            is_simulated,
            ..DeviceObjectInputs::default()
        };
        let device = inputs.device(&fleet(1), &node(&json!({})), None, at(0));
        device.metadata.labels.unwrap().get("gpushare/simulated").cloned()
    };
    assert_eq!((mark(true).as_deref(), mark(false)), (Some("true"), None));
}

#[test]
fn the_enforcement_level_is_a_label_and_a_condition_of_each_gpu() {
    let levels = [(0, Level::Driver), (1, Level::HamiCore)];
    let levels = levels.map(|(minor, level)| {
        let message = format!("message of {}", level.as_str());
        (
            gpu(minor).uuid,
            Enforcement {
                level,
                reason: "Reason",
                message,
            },
        )
    });
    let inputs = DeviceObjectInputs {
        enforcements: Arc::new(levels.into_iter().collect()),
        ..DeviceObjectInputs::default()
    };
    let device = inputs.device(&fleet(3), &node(&json!({})), None, at(0));
    assert_eq!(
        device.metadata.labels.unwrap()["gpushare/enforcement"],
        "hami-core"
    );
    let of_each = device.spec.devices.iter().map(|info| {
        let condition = info.conditions.first();
        let label = info.labels.get("gpushare/enforcement").map(String::as_str);
        (
            label,
            condition.map(|one| {
                (
                    one.condition_type.as_str(),
                    one.status.as_str(),
                    one.message.as_str(),
                )
            }),
        )
    });
    assert_eq!(
        of_each.collect::<Vec<_>>(),
        [
            (Some("driver"), Some(("Limited", "True", "message of driver"))),
            (
                Some("hami-core"),
                Some(("Limited", "False", "message of hami-core"))
            ),
            (None, None),
        ]
    );
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

#[rstest]
#[case::nothing(None, None, None)]
#[case::no_numa(None, Some("pci0000:3a"), Some((0, "pci0000:3a")))]
#[case::numa(Some(1), None, Some((1, "")))]
#[case::both(Some(1), Some("pci0000:3a"), Some((1, "pci0000:3a")))]
fn the_topology_of_a_device_is_published(
    #[case] numa_node: Option<i32>,
    #[case] root: Option<&str>,
    #[case] expected: Option<(i32, &str)>,
) {
    let mut fleet = fleet(1);
    fleet.gpus[0].device.location = PciLocation {
        numa_node,
        root: root.map(str::to_owned),
        switch: None,
    };
    let topology = object(&fleet).spec.devices[0].topology.clone();
    assert!(
        topology
            .iter()
            .all(|topology| topology.socket_id == -1 && topology.bus_id == "0000:00:00.0")
    );
    assert_eq!(
        topology
            .as_ref()
            .map(|topology| (topology.node_id, topology.pcie_id.as_str())),
        expected
    );
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

/// The operator's labels add to those of the devices, and the publisher writes them again when they change.
#[test]
fn labels_links_and_partitions_are_published() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("labels.yaml");
    std::fs::write(
        &path,
        "devices: {gpu: {tier: high}, '0000:1F:00.0': {fabric: b}}\nvirtualFunctions: {rdma: {type: fast}}",
    )
    .unwrap();
    let files = node_overrides::OverrideFiles {
        labels: Some(path),
        partitions: None,
    };
    let mut fleet = fleet(8);
    let mut nic = nic(true);
    let vfs = vec![proto::device::VirtualFunction {
        minor: 0,
        bus_id: "0000:1f:00.2".to_owned(),
    }];
    nic.device.vf_groups = vec![proto::device::VirtualFunctionGroup {
        vfs,
        ..Default::default()
    }];
    fleet.others = vec![nic];
    for entry in &mut fleet.gpus {
        entry.device.model = "NVIDIA H100 80GB HBM3".to_owned();
    }
    fleet.links = vec![proto::topology::GpuLinks {
        minors: (0..8).collect(),
        links: 18,
    }];
    let published = |policy| {
        let overrides = Arc::new(NodeOverrides::read(&files).unwrap());
        let inputs = DeviceObjectInputs {
            overrides,
            partition_policy: policy,
            ..DeviceObjectInputs::default()
        };
        inputs.device(&fleet, &node(&json!({})), None, at(0))
    };
    let device = published(None);
    let (gpu, nic) = (&device.spec.devices[0], &device.spec.devices[8]);
    assert_eq!(
        (
            gpu.labels["tier"].as_str(),
            nic.labels["fabric"].as_str(),
            nic.vf_groups[0].labels["type"].as_str()
        ),
        ("high", "b", "fast")
    );
    let annotations = device.metadata.annotations.unwrap();
    assert_eq!(
        annotations["gpushare/gpu-links"],
        r#"[{"links":18,"minors":[0,1,2,3,4,5,6,7]}]"#
    );
    let table =
        proto::topology::read_partitions(&annotations["scheduling.koordinator.sh/gpu-partitions"]).unwrap();
    assert_eq!(
        table
            .iter()
            .map(|(size, sets)| (*size, sets.len()))
            .collect::<Vec<_>>(),
        [(1, 8), (2, 4), (4, 2), (8, 1)]
    );
    let policy = |device: Device| {
        device
            .metadata
            .labels
            .unwrap()
            .remove("node.koordinator.sh/gpu-partition-policy")
    };
    assert_eq!(policy(published(None)).as_deref(), Some("Prefer"));
    assert_eq!(
        policy(published(Some(GpuPartitionPolicy::Honor))).as_deref(),
        Some("Honor")
    );
    assert_eq!(policy(object(&sick(0))), None, "there is nothing to honour");
}

/// The conditions of a node's first GPU about the way in which containers get it: type, status and reason of each.
fn conditions_of(injection: Injection) -> (Vec<String>, String) {
    let inputs = DeviceObjectInputs {
        injection: Some(injection),
        ..DeviceObjectInputs::default()
    };
    let device = inputs.device(&fleet(1), &node(&json!({})), None, at(0));
    let conditions = &device.spec.devices[0].conditions;
    let text = |one: &proto::device::DeviceCondition| {
        format!("{} {} {}", one.condition_type, one.status, one.reason)
    };
    (
        conditions.iter().map(text).collect(),
        conditions.last().unwrap().message.clone(),
    )
}

/// The status is Unknown as long as nothing has shown that the mode works.
#[test]
fn a_condition_shows_if_injection_is_known_to_work() {
    let injection = |certainty, reason| Injection {
        mode: Mode::Cdi,
        certainty,
        reason,
        message: "why".to_owned(),
        exposure: None,
    };
    let found = |certainty, reason| conditions_of(injection(certainty, reason)).0;
    assert_eq!(found(Certainty::Proven, "Cdi"), ["Injectable True Cdi"]);
    assert_eq!(
        found(Certainty::Assumed, "CdiAssumed"),
        ["Injectable Unknown CdiAssumed"]
    );
    assert_eq!(
        found(Certainty::Impossible, "CdiOff"),
        ["Injectable False CdiOff"]
    );
}

#[test]
fn a_condition_names_the_pods_that_see_gpus_uncounted() {
    let found = |exposure| {
        let exposure = Some(exposure);
        conditions_of(Injection {
            mode: Mode::Cdi,
            certainty: Certainty::Proven,
            reason: "Cdi",
            message: String::new(),
            exposure,
        })
    };
    let (conditions, message) = found(Exposure::EveryPod);
    assert_eq!(
        conditions,
        ["Injectable True Cdi", "Isolated False ImageVariable"]
    );
    assert!(
        message.starts_with("a container that asks for no GPU sees this one if"),
        "{message}"
    );
    let (conditions, message) = found(Exposure::Unknown("the plugin's own container is privileged"));
    assert_eq!(
        conditions,
        ["Injectable True Cdi", "Isolated Unknown NotObservable"]
    );
    assert!(
        message.contains("not known, because the plugin's own container is privileged; the runtime hook"),
        "{message}"
    );
    let (_, message) = found(Exposure::RuntimeClass("nvidia".to_owned()));
    assert!(
        message.starts_with(
            "a container that asks for no GPU in a pod with runtimeClassName: nvidia sees this one if"
        ),
        "{message}"
    );
}

#[test]
fn memory_that_the_driver_keeps_is_named_beside_the_offered_memory() {
    let mut fleet = fleet(2);
    (
        fleet.gpus[0].device.memory_bytes,
        fleet.gpus[0].device.reserved_bytes,
    ) = (1000, 24);
    let devices = object(&fleet).spec.devices;
    let memory = |at: usize| devices[at].resources["koordinator.sh/gpu-memory"].unsigned();
    let kept = |at: usize| {
        devices[at]
            .labels
            .get("gpushare/reserved-memory")
            .map(String::as_str)
    };
    assert_eq!((memory(0), kept(0)), (Some(1000), Some("24")));
    assert_eq!(kept(1), None, "the driver of this one names no such memory");
}
