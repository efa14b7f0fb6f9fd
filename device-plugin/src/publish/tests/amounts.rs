//! The amounts in node status, and the pods that kubelet admits after its restart.

use insta::assert_json_snapshot;
use proto::device::DeviceInfo;
use serde_json::json;

use super::*;
use crate::devices::device_ids::IdScheme;
use crate::node::pods::{NodePod, PodStage};
use crate::tests::builders::gpu;

#[test]
fn the_node_status_of_two_gpus() {
    assert_json_snapshot!(node_patches::status_amounts(&node(&json!({})), offers(&fleet(2))));
}

/// Extended resources of the plugin, and GPUs that are not shared, are not in node status.
#[test]
fn only_healthy_shared_gpus_are_advertised() {
    let mut fleet = sick(0);
    fleet.others = vec![nic(true)];
    assert_eq!(offers(&fleet), offers(&self::fleet(1)));
    let ids = IdScheme::new(&[gpu(0)], 100, MemoryUnit::GIB).unwrap();
    let inventory = crate::devices::inventory::NodeInventory {
        gpus: vec![gpu(0), gpu(1)],
        vendor: "nvidia".to_owned(),
        ..crate::devices::inventory::NodeInventory::default()
    };
    let partly = NodeFleet::new(inventory, ids);
    assert_eq!(offers(&partly), offers(&self::fleet(1)));
    let unshared = &object(&partly).spec.devices[1];
    assert_eq!(
        unshared.labels,
        [("gpushare/sharing".to_owned(), "disabled".to_owned())].into()
    );
    assert!(unshared.health && !unshared.resources.contains_key("koordinator.sh/gpu.shared"));
}

#[test]
fn a_correct_node_status_is_not_written() {
    let held = json!({
        "aliyun.com/gpu-count": "1", "koordinator.sh/gpu": 100, "koordinator.sh/gpu-core": "100",
        "koordinator.sh/gpu-memory": "17179869184", "koordinator.sh/gpu-memory-ratio": "100",
        "aliyun.com/gpu-mem": "16", "cpu": "4",
    });
    assert_eq!(
        node_patches::status_amounts(&node(&held), offers(&fleet(1))),
        None
    );
}

/// A sick device takes no new pods, but those that run must survive kubelet's restart.
#[test]
fn node_status_covers_running_pods_on_an_unhealthy_gpu() {
    let mut asking = NodePod {
        stage: PodStage::Running,
        ..pod("a", 1, [units(1)])
    };
    let spec = json!({"containers": [{"resources": {"requests": {"koordinator.sh/gpu-core": "150"}}}]});
    asking.requests = Requests::from_spec(&serde_json::from_value(spec).unwrap());
    let ended = NodePod {
        stage: PodStage::Terminal,
        uid: "b".into(),
        ..asking.clone()
    };
    let values = offers(&sick(0)).max(node_patches::requested(&pods([asking, ended])));
    let patch = node_patches::status_amounts(&node(&json!({})), values).unwrap();
    assert_eq!(patch["status"]["capacity"]["koordinator.sh/gpu-core"], "150");
    assert_eq!(
        patch["status"]["allocatable"]["koordinator.sh/gpu-memory-ratio"],
        "100"
    );
}

#[test]
fn resources_without_devices_are_removed_from_the_node_status() {
    let held = json!({"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu.shared": "100"});
    let patch = node_patches::status_amounts(&node(&held), Requests::default()).unwrap();
    assert_eq!(
        patch,
        json!({"status": {"capacity": {"koordinator.sh/gpu-core": null}, "allocatable": {"koordinator.sh/gpu-core": null}}})
    );
    assert_eq!(
        node_patches::status_amounts(&node(&json!({})), Requests::default()),
        None
    );
}
/// A pod that kubelet has not admitted, and cannot admit, must not make room for itself.
#[test]
fn requests_of_pods_that_cannot_be_admitted_do_not_count() {
    let asking = |name: &str, stage| NodePod {
        stage,
        requests: Requests::of_device(1),
        ..pod(name, 1, [units(1)])
    };
    let unplaced = NodePod {
        placement: Err(crate::node::pods::Unplaced::NoDevice("gpu")),
        ..asking("c", PodStage::Bound)
    };
    let all = [
        asking("a", PodStage::Bound),
        asking("b", PodStage::Running),
        asking("d", PodStage::Admitted),
        unplaced,
        asking("e", PodStage::Terminal),
    ];
    let three = (0..3).fold(Requests::default(), |sum, _| sum.plus(Requests::of_device(1)));
    assert_eq!(node_patches::requested(&pods(all)), three);
}

/// kubelet as far as node status goes: it admits every pod again when it restarts, and without its checkpoint zeroes what no
/// plugin serves.
struct Kubelet {
    node: Node,
}

impl Kubelet {
    /// The pods that it would turn away with `OutOf...`, taken in the order in which they are given.
    fn turned_away(&self, pods: &[NodePod]) -> Vec<String> {
        let held = |name: &str| {
            self.node
                .status
                .allocatable
                .get(name)
                .map_or(0, |text| text.quantity().unwrap().unsigned().unwrap())
        };
        let mut admitted = Requests::default();
        let mut refused = Vec::new();
        for pod in pods.iter().filter(|pod| pod.stage != PodStage::Terminal) {
            let with = admitted.plus(pod.requests);
            let asked = |name: &str| {
                pod.requests
                    .iter()
                    .any(|(other, amount)| other == name && amount > 0)
            };
            if with
                .iter()
                .all(|(name, amount)| !asked(name) || amount <= held(name))
            {
                admitted = with;
            } else {
                refused.push(pod.name.clone());
            }
        }
        refused
    }

    fn lose_checkpoint(&mut self) {
        for amounts in [&mut self.node.status.capacity, &mut self.node.status.allocatable] {
            for amount in amounts.values_mut() {
                *amount = proto::pod::QuantityText::Number(0);
            }
        }
    }

    /// Applies the publisher's merge patch as the API server does.
    fn merge(&mut self, patch: Option<Value>) {
        let Some(patch) = patch else { return };
        for (field, amounts) in [
            ("capacity", &mut self.node.status.capacity),
            ("allocatable", &mut self.node.status.allocatable),
        ] {
            for (name, value) in patch["status"][field].as_object().into_iter().flatten() {
                match value {
                    Value::Null => drop(amounts.remove(name)),
                    value => {
                        drop(amounts.insert(name.clone(), serde_json::from_value(value.clone()).unwrap()));
                    }
                }
            }
        }
    }
}

fn asking(name: &str, core: u64, memory_bytes: u64, stage: PodStage) -> NodePod {
    let requests = Requests::from_fn(|resource| match resource {
        "koordinator.sh/gpu-core" => core,
        "koordinator.sh/gpu-memory" => memory_bytes,
        _ => 0,
    });
    NodePod {
        stage,
        requests,
        ..pod(name, 1, [units(1)])
    }
}

proptest::proptest! {
    /// kubelet restarts with or without its checkpoint while some GPUs are unhealthy: it rejects no running pod, and once these
    /// have ended only healthy GPUs are advertised.
    #[test]
    fn no_running_pod_is_rejected_after_a_restart_of_kubelet_with_unhealthy_gpus(
        are_healthy in proptest::collection::vec(proptest::bool::ANY, 1..5),
        amounts in proptest::collection::vec((0..150_u64, 0..20_u64, proptest::bool::ANY), 0..6),
        is_checkpoint_lost in proptest::bool::ANY,
    ) {
        let mut fleet = fleet(u32::try_from(are_healthy.len()).unwrap());
        let running: Vec<NodePod> = amounts.iter().enumerate().map(|(at, (core, gib, has_ended))| {
            asking(&at.to_string(), *core, gib << 30, if *has_ended { PodStage::Terminal } else { PodStage::Running })
        }).collect();
        let mut kubelet = Kubelet { node: node(&json!({})) };
        let publish = |kubelet: &mut Kubelet, fleet: &NodeFleet, all: &[NodePod]| {
            let values = offers(fleet).max(node_patches::requested(&pods(all.iter().cloned())));
            kubelet.merge(node_patches::status_amounts(&kubelet.node, values));
        };
        publish(&mut kubelet, &fleet, &running);
        for (entry, is_healthy) in fleet.gpus.iter_mut().zip(&are_healthy) {
            entry.is_healthy = *is_healthy;
        }
        publish(&mut kubelet, &fleet, &running);
        if is_checkpoint_lost {
            kubelet.lose_checkpoint();
            publish(&mut kubelet, &fleet, &running);
        }
        proptest::prop_assert_eq!(kubelet.turned_away(&running), Vec::<String>::new());
        publish(&mut kubelet, &fleet, &[]);
        let left: Vec<String> = offers(&fleet).iter().filter(|(_, amount)| *amount > 0).map(|(name, _)| name.to_owned()).collect();
        let mut held: Vec<String> = kubelet.node.status.capacity.keys().cloned().collect();
        held.sort();
        let mut left = left;
        left.sort();
        proptest::prop_assert_eq!(held, left);
    }
}

/// The amounts of a Device object do not depend on fields that the publisher does not know.
#[test]
fn malformed_amounts_count_as_none() {
    let mut device = DeviceInfo {
        device_type: "gpu".to_owned(),
        health: true,
        ..DeviceInfo::default()
    };
    device
        .resources
        .insert("koordinator.sh/gpu-memory".to_owned(), "-1".parse().unwrap());
    device
        .resources
        .insert("koordinator.sh/gpu-core".to_owned(), "100m".parse().unwrap());
    assert_eq!(
        node_patches::offered(&[device]),
        Requests::from_fn(|name| u64::from(name == "aliyun.com/gpu-count"))
    );
}
