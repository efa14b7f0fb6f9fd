//! RDMA, FPGA and whole GPUs as kubelet sees them, over real sockets.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::fake_kubelet::{FakeKubelet, SOON};
use super::node::{Equipment, Node, SHARES, UNITS, WHOLE, device, gpushare, koordinator, pod, uuid};
use insta::assert_json_snapshot;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

const RDMA: &str = "koordinator.sh/rdma";
const FPGA: &str = "koordinator.sh/fpga";

/// A record of `percent` of each of these devices, and of these GPUs.
fn record(device_type: &str, minors: &[u32], percent: u32, gpus: &[u32], assumed_at: u64) -> Value {
    let one = |minor: &u32| json!({"minor": minor, "id": format!("0000:{minor:02x}:00.0"), "resources": {(format!("koordinator.sh/{device_type}")): percent}});
    let gpus: Vec<_> = gpus
        .iter()
        .map(|minor| json!({"minor": minor, "id": uuid(*minor), "resources": {}}))
        .collect();
    let devices: Vec<_> = minors.iter().map(one).collect();
    json!({
        "scheduling.koordinator.sh/device-allocated": json!({device_type: devices, "gpu": gpus}).to_string(),
        "scheduling.koordinator.sh/bind-timestamp": assumed_at.to_string(),
    })
}

fn with_adapters(minors: &[u32]) -> Equipment {
    Equipment {
        others: minors
            .iter()
            .map(|minor| device("rdma", *minor, &["/dev/null", "/dev/absent"]))
            .collect(),
        ..Equipment::default()
    }
}

/// A kubelet at which these are registered, and nothing else.
async fn kubelet(node: &Node, resources: &[&str]) -> FakeKubelet {
    let mut kubelet = FakeKubelet::start(node.path());
    for _ in resources {
        kubelet.register().await;
    }
    assert_eq!(
        kubelet.plugins.keys().map(String::as_str).collect::<Vec<_>>(),
        resources
    );
    kubelet
}

/// The number of used IDs of a resource by device.
fn used(kubelet: &mut FakeKubelet, resource: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for id in &kubelet.plugin(resource).used {
        let device = id.rsplit_once("::").map_or(id.as_str(), |(device, _)| device);
        *counts.entry(device.to_owned()).or_default() += 1;
    }
    counts
}

/// It appears, falls sick, goes away and comes back with the adapters; the lists of the other resources are not sent again.
#[tokio::test]
async fn a_resource_comes_and_goes_with_its_devices() {
    let node = Node::with(&Equipment::default());
    let mut kubelet = kubelet(&node, &[UNITS, SHARES]).await;
    node.fleet.send_replace(Arc::new(with_adapters(&[1, 2]).fleet()));
    assert_eq!(kubelet.register().await, RDMA);
    let adapters = &kubelet.plugin(RDMA).devices;
    assert_eq!(
        (adapters.len(), adapters[0].id.as_str(), adapters[199].id.as_str()),
        (200, "0000:01:00.0::0", "0000:02:00.0::99")
    );
    node.fleet
        .send_modify(|fleet| Arc::make_mut(fleet).others[1].is_healthy = false);
    let list = kubelet.plugin(RDMA).next_list().await;
    assert!(
        list.iter()
            .all(|device| (device.health == "Unhealthy") == device.id.starts_with("0000:02:"))
    );
    node.fleet.send_replace(Arc::new(Equipment::default().fleet()));
    let plugin = kubelet.plugin(RDMA);
    assert_eq!(
        plugin.next_list().await.len(),
        0,
        "kubelet forgets a resource late, so the plugin lists none"
    );
    let end = timeout(SOON, plugin.stream.message())
        .await
        .expect("the stream goes on");
    assert!(!matches!(end, Ok(Some(_))));
    let gone = async {
        while node.path().join("gpushare-rdma.sock").exists() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, gone).await.expect("the socket stays");
    node.fleet.send_replace(Arc::new(with_adapters(&[3]).fleet()));
    assert_eq!(kubelet.register().await, RDMA);
    assert_eq!(kubelet.plugin(RDMA).devices.len(), 100);
    let sent = timeout(Duration::from_millis(50), kubelet.plugin(UNITS).stream.message()).await;
    assert!(sent.is_err(), "{sent:?}");
}

#[tokio::test]
async fn a_part_of_the_recorded_adapter_is_allocated() {
    let node = Node::with(&with_adapters(&[1, 2]));
    let mut kubelet = kubelet(&node, &[UNITS, SHARES, RDMA]).await;
    node.show(&pod("a", &[&[(RDMA, 50)]], &record("rdma", &[2], 50, &[], 1)));
    let env = kubelet.container(&[(RDMA, 50)]).await.unwrap();
    assert_eq!(
        env,
        [("GPUSHARE_RDMA_DEVICES".to_owned(), "0000:02:00.0".to_owned())].into(),
        "and nothing about GPUs"
    );
    assert_eq!(used(&mut kubelet, RDMA), [("0000:02:00.0".to_owned(), 50)].into());
    let nodes = &kubelet.plugin(RDMA).answers[0].devices;
    let nodes: Vec<_> = nodes
        .iter()
        .map(|node| {
            (
                node.container_path.as_str(),
                node.host_path.as_str(),
                node.permissions.as_str(),
            )
        })
        .collect();
    assert_eq!(nodes, [("/dev/null", "/dev/null", "rw")], "only what is there");
}

#[tokio::test]
async fn whole_cards_are_allocated_in_the_order_of_the_record() {
    let others = (0..3).map(|minor| device("fpga", minor, &[])).collect();
    let node = Node::with(&Equipment {
        others,
        ..Equipment::default()
    });
    let mut kubelet = kubelet(&node, &[UNITS, FPGA, SHARES]).await;
    node.show(&pod(
        "a",
        &[&[(FPGA, 200)]],
        &record("fpga", &[2, 0], 100, &[], 1),
    ));
    let env = kubelet.container(&[(FPGA, 200)]).await.unwrap();
    assert_eq!(env["GPUSHARE_FPGA_DEVICES"], "0000:02:00.0,0000:00:00.0");
    assert_eq!(
        used(&mut kubelet, FPGA),
        [("0000:00:00.0".to_owned(), 100), ("0000:02:00.0".to_owned(), 100)].into()
    );
}

/// The IDs say whose they are, and the record what the pod has: one percent brings four adapters with their files, of which one
/// is of them all.
#[tokio::test]
async fn one_percent_of_apply_for_all_brings_four_adapters() {
    let nodes: [&[&str]; 4] = [
        &["/dev/null", "/dev/zero"],
        &["/dev/null", "/dev/full"],
        &["/dev/null"],
        &["/dev/null", "/dev/random"],
    ];
    let others = (0..)
        .zip(nodes)
        .map(|(minor, nodes)| device("rdma", minor, nodes))
        .collect();
    let node = Node::with(&Equipment {
        others,
        ..Equipment::default()
    });
    let mut kubelet = kubelet(&node, &[UNITS, SHARES, RDMA]).await;
    node.show(&pod(
        "a",
        &[&[(RDMA, 1)]],
        &record("rdma", &[3, 1, 2, 0], 1, &[], 1),
    ));
    let env = kubelet.container(&[(RDMA, 1)]).await.unwrap();
    assert_eq!(
        env["GPUSHARE_RDMA_DEVICES"],
        "0000:03:00.0,0000:01:00.0,0000:02:00.0,0000:00:00.0"
    );
    let given: Vec<_> = kubelet.plugin(RDMA).answers[0]
        .devices
        .iter()
        .map(|node| node.container_path.clone())
        .collect();
    assert_eq!(given, ["/dev/null", "/dev/random", "/dev/full", "/dev/zero"]);
    assert_eq!(used(&mut kubelet, RDMA).values().sum::<usize>(), 1);
}

/// A container with virtual functions gets their addresses and files, and not the adapter's.
#[tokio::test]
async fn recorded_virtual_functions_are_allocated() {
    let mut equipment = with_adapters(&[1]);
    let nodes = |paths: [&str; 2]| paths.map(Into::into).to_vec();
    equipment.others[0].function_nodes = [
        ("0000:01:00.2".to_owned(), nodes(["/dev/full", "/dev/zero"])),
        ("0000:01:00.3".to_owned(), nodes(["/dev/zero", "/dev/absent"])),
    ]
    .into();
    let node = Node::with(&equipment);
    let mut kubelet = kubelet(&node, &[UNITS, SHARES, RDMA]).await;
    let allocation = json!({"minor": 1, "id": "0000:01:00.0", "resources": {(RDMA): "1"}, "extension": {"vfs": [{"minor": -1, "busID": "0000:01:00.3"}]}});
    let annotations = json!({
        "scheduling.koordinator.sh/device-allocated": json!({"rdma": [allocation]}).to_string(),
        "scheduling.koordinator.sh/bind-timestamp": "1",
    });
    node.show(&pod("a", &[&[(RDMA, 1)]], &annotations));
    assert_json_snapshot!(kubelet.container(&[(RDMA, 1)]).await.unwrap(), @r#"
    {
      "GPUSHARE_RDMA_DEVICES": "0000:01:00.0",
      "GPUSHARE_RDMA_FUNCTIONS": "0000:01:00.3"
    }
    "#);
    let given: Vec<_> = kubelet.plugin(RDMA).answers[0]
        .devices
        .iter()
        .map(|node| node.container_path.clone())
        .collect();
    assert_eq!(given, ["/dev/zero"]);
}

/// kubelet asks in any order. Once both are answered the pod has all it waits for, and the next one's calls are its own.
#[tokio::test]
async fn one_container_gets_shares_and_an_adapter() {
    for order in [[(SHARES, 1), (RDMA, 30)], [(RDMA, 30), (SHARES, 1)]] {
        let node = Node::with(&Equipment {
            n_gpus: 2,
            n_shared: 2,
            ..with_adapters(&[1, 2])
        });
        let mut kubelet = kubelet(&node, &[UNITS, SHARES, RDMA]).await;
        for (name, at) in [("a", 1), ("b", 0)] {
            node.show(&pod(
                name,
                &[&[(SHARES, 1), (RDMA, 30)]],
                &record("rdma", &[at + 1], 30, &[at], u64::from(2 - at)),
            ));
        }
        for at in [1, 0] {
            let env = kubelet.container(&order).await.unwrap();
            let expected = [
                ("NVIDIA_VISIBLE_DEVICES", uuid(at)),
                ("GPUSHARE_GPU_DEVICES", uuid(at)),
                ("GPUSHARE_RDMA_DEVICES", format!("0000:{:02x}:00.0", at + 1)),
            ];
            assert_eq!(env, expected.map(|(name, value)| (name.to_owned(), value)).into());
        }
    }
}

/// The other plugin is asked for those, so they are nothing to wait for.
#[tokio::test]
async fn resources_of_other_plugins_are_not_waited_for() {
    let node = Node::new(2);
    let mut kubelet = kubelet(&node, &[UNITS, SHARES]).await;
    node.show(&pod(
        "a",
        &[&[(SHARES, 1), (RDMA, 30)]],
        &record("rdma", &[1], 30, &[1], 1),
    ));
    node.show(&pod("b", &[&[(SHARES, 1)]], &koordinator(&[0], 2)));
    for minor in [1, 0] {
        assert_eq!(
            kubelet.container(&[(SHARES, 1)]).await.unwrap()["NVIDIA_VISIBLE_DEVICES"],
            uuid(minor)
        );
    }
}

/// One ID for each GPU, shared or not; its health is the GPU's.
#[tokio::test]
async fn whole_gpus_are_listed_by_uuid() {
    let node = Node::with(&Equipment {
        n_gpus: 3,
        n_shared: 2,
        serves_whole: true,
        ..Equipment::default()
    });
    let mut kubelet = kubelet(&node, &[UNITS, SHARES, WHOLE]).await;
    let ids = |list: &[proto::kubelet::deviceplugin::Device]| {
        list.iter().map(|device| device.id.clone()).collect::<Vec<_>>()
    };
    assert_eq!(ids(&kubelet.plugin(WHOLE).devices), [0, 1, 2].map(uuid));
    assert_eq!(kubelet.plugin(SHARES).devices.len(), 200);
    node.set_health(2, false);
    let list = kubelet.plugin(WHOLE).next_list().await;
    assert_eq!(
        list.iter()
            .map(|device| device.health.as_str())
            .collect::<Vec<_>>(),
        ["Healthy", "Healthy", "Unhealthy"]
    );
    let sent = timeout(Duration::from_millis(50), kubelet.plugin(SHARES).stream.message()).await;
    assert!(
        sent.is_err(),
        "a GPU that is not shared is none of its business: {sent:?}"
    );
}

#[tokio::test]
async fn whole_gpus_are_allocated_as_recorded() {
    let node = Node::with(&Equipment {
        n_gpus: 4,
        n_shared: 2,
        serves_whole: true,
        ..Equipment::default()
    });
    let mut kubelet = kubelet(&node, &[UNITS, SHARES, WHOLE]).await;
    node.show(&pod(
        "a",
        &[&[(WHOLE, 1)], &[(WHOLE, 1)]],
        &koordinator(&[3, 1], 1),
    ));
    for _ in 0..2 {
        let env = kubelet.container(&[(WHOLE, 1)]).await.unwrap();
        let both = format!("{},{}", uuid(3), uuid(1));
        assert_eq!(
            env,
            ["NVIDIA_VISIBLE_DEVICES", "GPUSHARE_GPU_DEVICES"]
                .map(|name| (name.to_owned(), both.clone()))
                .into()
        );
    }
    assert_eq!(
        kubelet.plugin(WHOLE).used.iter().cloned().collect::<Vec<_>>(),
        [uuid(1), uuid(3)]
    );
    node.show(&pod("b", &[&[(WHOLE, 2)]], &koordinator(&[0, 2], 2)));
    let env = kubelet.container(&[(WHOLE, 2)]).await.unwrap();
    assert_eq!(env["NVIDIA_VISIBLE_DEVICES"], format!("{},{}", uuid(0), uuid(2)));
}

/// Of several resources that speak of GPUs one answer names them: memory before shares before whole GPUs. Of two values of one
/// variable kubelet would keep one at random.
#[tokio::test]
async fn only_one_answer_for_a_container_names_the_gpus() {
    for asked in [
        vec![(UNITS, 2), (SHARES, 1)],
        vec![(SHARES, 1), (UNITS, 2)],
        vec![(UNITS, 2), (WHOLE, 1)],
        vec![(WHOLE, 1), (SHARES, 1)],
        vec![(WHOLE, 1), (UNITS, 2), (SHARES, 1)],
    ] {
        let node = Node::with(&Equipment {
            serves_whole: true,
            ..Equipment::default()
        });
        let mut kubelet = kubelet(&node, &[UNITS, SHARES, WHOLE]).await;
        node.show(&pod("a", &[&asked], &gpushare(0, 2, 1)));
        let mut speaking = Vec::new();
        for (resource, count) in &asked {
            if kubelet
                .container(&[(resource, *count)])
                .await
                .unwrap()
                .contains_key("NVIDIA_VISIBLE_DEVICES")
            {
                speaking.push(*resource);
            }
        }
        let expected = [UNITS, SHARES, WHOLE]
            .into_iter()
            .find(|resource| asked.iter().any(|(asked, _)| asked == resource));
        assert_eq!(speaking, expected.into_iter().collect::<Vec<_>>());
    }
}

/// A GPU that is left to whole-GPU pods has no shares, and none is taken from it whatever a record says.
#[tokio::test]
async fn no_ids_of_a_gpu_that_is_not_shared_are_listed() {
    let node = Node::with(&Equipment {
        n_gpus: 2,
        n_shared: 1,
        ..Equipment::default()
    });
    let mut kubelet = kubelet(&node, &[UNITS, SHARES]).await;
    for resource in [UNITS, SHARES] {
        let fleet = node.fleet.borrow().clone();
        let of = |id: &str| {
            device_plugin::devices::extended_resource::ExtendedResource::ALL
                .iter()
                .find_map(|served| fleet.ids.device_of(*served, id).cloned())
        };
        assert!(
            kubelet
                .plugin(resource)
                .devices
                .iter()
                .all(|device| of(&device.id).is_some_and(|gpu| gpu.as_str() == uuid(0)))
        );
    }
    node.show(&pod("a", &[&[(SHARES, 1)]], &koordinator(&[1], 1)));
    kubelet.container(&[(SHARES, 1)]).await.unwrap();
    assert_eq!(used(&mut kubelet, SHARES), [(uuid(0), 1)].into());
}
