//! RDMA, FPGA and whole GPUs as kubelet sees them, over real sockets.

use std::sync::Arc;
use std::time::Duration;

use insta::assert_json_snapshot;
use rstest::rstest;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use crate::kubelet::{FakeKubelet, SOON};
use crate::node::{Equipment, Node, SHARES, UNITS, WHOLE, device, gpushare, koordinator, pod, uuid};

const RDMA: &str = "koordinator.sh/rdma";
const FPGA: &str = "koordinator.sh/fpga";

/// A record of `percent` of each of these devices.
fn record(device_type: &str, minors: &[u32], percent: u32, assumed_at: u64) -> Value {
    let one = |minor: &u32| json!({"minor": minor, "id": format!("0000:{minor:02x}:00.0"), "resources": {(format!("koordinator.sh/{device_type}")): percent}});
    let devices: Vec<_> = minors.iter().map(one).collect();
    json!({
        "scheduling.koordinator.sh/device-allocated": json!({device_type: devices}).to_string(),
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
    assert!(
        kubelet.plugins.keys().eq(resources),
        "{:?}",
        kubelet.plugins.keys()
    );
    kubelet
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

/// The IDs say whose they are, and the record what the pod has: its devices in its order with those of their files that exist,
/// each once, and nothing about GPUs.
#[rstest]
#[case::a_part(RDMA, &[(1, "null absent"), (2, "null absent")], &[2], (50, 50), "null")]
#[case::whole_cards(FPGA, &[(0, ""), (1, ""), (2, "")], &[2, 0], (100, 200), "")]
#[case::one_percent_of_four(
    RDMA,
    &[(0, "null zero"), (1, "null full"), (2, "null"), (3, "null random")],
    &[3, 1, 2, 0],
    (1, 1),
    "null random full zero"
)]
#[tokio::test]
async fn recorded_devices_are_allocated_with_their_files(
    #[case] resource: &str,
    #[case] devices: &[(u32, &str)],
    #[case] recorded: &[u32],
    #[case] (percent, asked): (u32, usize),
    #[case] files: &str,
) {
    let (_, device_type) = resource.split_once('/').unwrap();
    let in_dev = |names: &str| {
        names
            .split(' ')
            .filter(|name| !name.is_empty())
            .map(|name| format!("/dev/{name}"))
            .collect()
    };
    let mut equipment = Equipment::default();
    for (minor, files) in devices {
        let files: Vec<String> = in_dev(files);
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        equipment.others.push(device(device_type, *minor, &files));
    }
    let node = Node::with(&equipment);
    let mut registered = [UNITS, SHARES, resource];
    registered.sort_unstable();
    let mut kubelet = kubelet(&node, &registered).await;
    node.show(&pod(
        "a",
        &[&[(resource, asked)]],
        &record(device_type, recorded, percent, 1),
    ));
    let addresses: Vec<_> = recorded
        .iter()
        .map(|minor| format!("0000:{minor:02x}:00.0"))
        .collect();
    let variable = format!("GPUSHARE_{}_DEVICES", device_type.to_uppercase());
    let env = kubelet.container(&[(resource, asked)]).await.unwrap();
    assert_eq!(env, [(variable, addresses.join(","))].into());
    let plugin = kubelet.plugin(resource);
    let given: Vec<_> = plugin.answers[0]
        .devices
        .iter()
        .map(|node| node.container_path.clone())
        .collect();
    assert_eq!(given, in_dev(files));
    assert_eq!(plugin.used.len(), asked);
    assert!(
        plugin
            .used
            .iter()
            .all(|id| addresses.iter().any(|address| id.starts_with(address))),
        "{:?}",
        plugin.used
    );
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

/// The other plugin is asked for those, so they are nothing to wait for.
#[tokio::test]
async fn resources_of_other_plugins_are_not_waited_for() {
    let node = Node::new(2);
    let mut kubelet = kubelet(&node, &[UNITS, SHARES]).await;
    node.show(&pod("a", &[&[(SHARES, 1), (RDMA, 30)]], &koordinator(&[1], 1)));
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
