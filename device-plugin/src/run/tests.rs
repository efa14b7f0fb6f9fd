//! The start and the end of the process.

use std::collections::BTreeMap;
use std::task::Poll;
use std::time::Duration;

use clap::Parser;
use futures::poll;
use proto::kubelet_allocations::{KubeletAllocation, KubeletAllocations, MAX_BYTES};
use proto::memory_unit::MemoryUnit;
use proto::node::Node;
use rstest::rstest;
use serde_json::{Value, json};

use tokio::time::timeout;

use super::advertise::{keeps_memory_units, unit_published, whole_published};
use super::devices::publish_no_devices;
use super::*;
use crate::devices::device_ids::IdScheme;
use crate::devices::fleet::NodeFleet;
use crate::devices::inventory::NodeInventory;
use crate::node::kubelet_checkpoint;
use crate::publish::node_patches::Absence;
use crate::publish::own_objects::StoredDevice;
use crate::tests::api_server::ApiServer;
use crate::tests::builders::settings;

/// Longest wait for a request of the plugin.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// A unit that has been changed must not be counted in the one before; once seen, it does not matter who is away.
#[tokio::test]
async fn memory_is_registered_after_its_unit_is_published() {
    let settings = settings();
    let node = |unit: &str| -> Option<Node> {
        let node = json!({"metadata": {"name": "n1", "annotations": {"aliyun.com/gpu-mem-unit": unit}}});
        Some(serde_json::from_value(node).unwrap())
    };
    let (sender, receiver) = watch::channel(None);
    let mut wait = std::pin::pin!(unit_published(receiver, &settings));
    assert_eq!(poll!(&mut wait), Poll::Pending);
    sender.send_replace(node("MiB"));
    assert_eq!(poll!(&mut wait), Poll::Pending, "the unit of before");
    sender.send_replace(node("GiB"));
    assert_eq!(poll!(&mut wait), Poll::Ready(()));
}

/// kubelet has the units of an earlier process in its checkpoint: they need not be published again first.
#[rstest]
#[case::same_units("GiB", &[0, 1], true)]
#[case::one_gpu_was_unhealthy("GiB", &[1], true)]
#[case::smaller_units("MiB", &[0, 1], false)]
#[case::larger_units("2Gi", &[0, 1], false)]
#[case::another_gpu_besides("GiB", &[0, 1, 2], false)]
#[case::none("GiB", &[], false)]
fn units_that_kubelet_has_already(
    #[case] unit_before: &str,
    #[case] gpus_before: &[u32],
    #[case] expected: bool,
) {
    let fleet = |unit: MemoryUnit, minors: &[u32]| {
        let gpus: Vec<_> = minors
            .iter()
            .map(|minor| crate::tests::builders::gpu(*minor))
            .collect();
        let ids = IdScheme::new(&gpus, 2, unit).unwrap();
        NodeFleet::new(
            NodeInventory {
                gpus,
                ..NodeInventory::default()
            },
            ids,
        )
    };
    let before = fleet(unit_before.parse().unwrap(), gpus_before);
    let ids: Vec<String> = before
        .ids
        .numbered(ExtendedResource::Memory)
        .iter()
        .flat_map(|ids| ids.iter().collect::<Vec<_>>())
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let settings = settings();
    let now = fleet(MemoryUnit::GIB, &[0, 1]);
    assert!(
        !keeps_memory_units(dir.path(), &settings, &now),
        "there is no checkpoint"
    );
    kubelet_checkpoint::tests::write(dir.path(), &Value::Null, &json!({"aliyun.com/gpu-mem": ids}));
    assert_eq!(keeps_memory_units(dir.path(), &settings, &now), expected);
}

/// Whole GPUs are registered once the scheduler can see that it chooses them and which of them other pods hold.
#[tokio::test]
async fn whole_gpus_are_registered_after_the_device_object_is_written() {
    let held = |labels: Value, annotations: Value| {
        let device = json!({"metadata": {"name": "n1", "labels": labels, "annotations": annotations}, "spec": {"devices": []}});
        StoredDevice::Present(Box::new(serde_json::from_value(device).unwrap()))
    };
    let (device, device_seen) = watch::channel(StoredDevice::Absent);
    let (checkpoints, checkpoints_seen) = watch::channel(None);
    let mut wait = std::pin::pin!(whole_published(device_seen, checkpoints_seen));
    let label = json!({"gpushare/serves-vendor": "true"});
    device.send_replace(held(label.clone(), json!({})));
    assert_eq!(poll!(&mut wait), Poll::Pending, "the holders are not known yet");
    let entry = KubeletAllocation {
        resource_name: "nvidia.com/gpu".to_owned(),
        ..Default::default()
    };
    let allocations = KubeletAllocations {
        entries: vec![entry.clone()],
    };
    let list = allocations.annotation().unwrap();
    checkpoints.send_replace(Some(allocations));
    assert_eq!(poll!(&mut wait), Poll::Pending, "and not published yet");
    let annotation = |value: &str| json!({"node.koordinator.sh/devices-checkpoints": value});
    device.send_replace(held(label.clone(), annotation("[]")));
    assert_eq!(poll!(&mut wait), Poll::Pending, "the list of an earlier process");
    device.send_replace(held(json!({}), annotation(&list)));
    assert_eq!(poll!(&mut wait), Poll::Pending, "the vendor's plugin serves it");
    let too_long = KubeletAllocation {
        device_ids: vec!["x".repeat(MAX_BYTES)],
        ..entry
    };
    checkpoints.send_replace(Some(KubeletAllocations {
        entries: vec![too_long],
    }));
    device.send_replace(held(label.clone(), json!({})));
    assert_eq!(poll!(&mut wait), Poll::Pending, "no list is published");
    checkpoints.send_replace(Some(KubeletAllocations::default()));
    device.send_replace(held(label.clone(), annotation(&list)));
    assert_eq!(poll!(&mut wait), Poll::Pending, "no pod holds any");
    device.send_replace(held(label, json!({})));
    assert_eq!(poll!(&mut wait), Poll::Ready(()));
}

/// A request in short: its method and the last parts of its path.
fn shortened(line: &str) -> String {
    let (method, uri) = line.split_once(' ').unwrap();
    let path = uri.split('?').next().unwrap();
    let mut parts: Vec<&str> = path.rsplit('/').take(2).collect();
    parts.reverse();
    format!("{method} {}", parts.join("/"))
}

/// A node that had a GPU when this process ran the last time: labels, status and devices go, and what running pods ask for stays.
#[tokio::test]
async fn published_objects_are_removed_with_the_devices() {
    let args = [
        "gpushare-device-plugin",
        "--node-name",
        "n1",
        "--vendor-resource",
        "nvidia.com/gpu=ignore",
    ];
    let config = Config::try_parse_from(args).unwrap();
    let (client, mut server) = ApiServer::new();
    let absence = Absence {
        reason: "GPUsNotFound",
        message: "no driver".to_owned(),
    };
    let (_absence, absent) = watch::channel(Some(absence));
    let connection = client.into();
    let _tasks = publish_no_devices(&config, &connection, absent).unwrap();
    let amounts = json!({"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu": "100", "cpu": "4"});
    let node = json!({
        "metadata": {"name": "n1", "uid": "u", "labels": {"node.koordinator.sh/gpu-vendor": "nvidia"}, "annotations": {"aliyun.com/gpu-mem-unit": "GiB"}},
        "status": {"capacity": amounts, "allocatable": amounts},
    });
    let container = json!({"name": "c", "resources": {"limits": {"koordinator.sh/gpu-core": "30"}}});
    let pod = json!({"metadata": {"name": "p", "uid": "p"}, "spec": {"nodeName": "n1", "containers": [container]}, "status": {"phase": "Running"}});
    let device = json!({"metadata": {"name": "n1", "labels": {"node.koordinator.sh/gpu-vendor": "nvidia"}}, "spec": {"devices": [{"health": true}]}});
    let mut written = BTreeMap::new();
    let mut watches = Vec::new();
    while written.len() < 4 {
        let (asked, body, answer) = timeout(REQUEST_LIMIT, server.next()).await.unwrap();
        let line = shortened(&asked);
        let list = |item: &Value| json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": [item]});
        let body = match line.as_str() {
            _ if asked.contains("watch=true") => {
                watches.push(answer);
                continue;
            }
            "GET v1/nodes" => list(&node),
            "GET v1/pods" => list(&pod),
            "GET v1alpha1/devices" => list(&device),
            _ => {
                let is_condition = body["status"].get("conditions").is_some();
                written.insert(
                    format!("{line}{}", if is_condition { " condition" } else { "" }),
                    body.clone(),
                );
                body
            }
        };
        answer.send(200, &body);
    }
    let device = &written["PATCH devices/n1"];
    assert_eq!(
        (&device["spec"], &device["metadata"]["labels"]),
        (&json!({"devices": []}), &json!({}))
    );
    assert_eq!(
        written["PATCH nodes/n1"],
        json!({"metadata": {"labels": {"node.koordinator.sh/gpu-vendor": null}}})
    );
    let condition = &written["PATCH n1/status condition"]["status"]["conditions"][0];
    assert_eq!(
        (&condition["type"], &condition["status"], &condition["message"]),
        (&json!("GPUSharingReady"), &json!("False"), &json!("no driver"))
    );
    let amounts = json!({"koordinator.sh/gpu-core": "30", "koordinator.sh/gpu": null});
    assert_eq!(
        written["PATCH n1/status"],
        json!({"status": {"capacity": amounts, "allocatable": amounts}})
    );
}

/// One plugin knows one vendor's GPUs.
#[test]
fn whole_gpus_of_two_vendors_are_refused() {
    let args = [
        "gpushare-device-plugin",
        "--node-name",
        "n1",
        "--vendor-resource",
        "nvidia.com/gpu=ours,amd.com/gpu=ours",
    ];
    let error = check_flags(&Config::try_parse_from(args).unwrap()).unwrap_err();
    assert!(
        error.to_string().contains("only one resource can be ours"),
        "{error}"
    );
}

/// With hints of NUMA nodes kubelet offers other IDs than the scheduler chose, so only CDI will do.
#[rstest]
#[case::auto(&[], false)]
#[case::envvar(&["--inject", "envvar"], false)]
#[case::cdi(&["--inject", "cdi"], true)]
fn numa_hints_need_cdi_mode(#[case] flags: &[&str], #[case] is_fine: bool) {
    let args = ["gpushare-device-plugin", "--node-name", "n1", "--numa-hints"];
    let checked = check_flags(&Config::try_parse_from(args.iter().chain(flags)).unwrap());
    assert_eq!(checked.is_ok(), is_fine, "{checked:?}");
    if let Err(error) = checked {
        assert!(
            error.to_string().contains("--numa-hints needs --inject=cdi"),
            "{error}"
        );
    }
}
