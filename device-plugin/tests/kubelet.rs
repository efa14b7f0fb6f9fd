//! The plugin as kubelet sees it, over real sockets.

use std::fs;
use std::time::Duration;

use super::fake_kubelet::{FakeKubelet, SOON};
use super::node::{
    Node, SHARES, UNITS, gpushare, in_the_middle_of_a_container, indices, koordinator, pod, uuid,
};
use device_plugin::devices::extended_resource::{ExtendedResource, ExtendedResourceNames, Registrations};
use device_plugin::kubelet::boot;
use insta::assert_json_snapshot;
use proto::kubelet::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, PreStartContainerRequest,
    PreferredAllocationRequest,
};
use proto::memory_unit::MemoryUnit;
use serde_json::json;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

#[tokio::test]
async fn every_virtual_device_is_listed() {
    let node = Node::new(2);
    let mut kubelet = node.kubelet().await;
    let units = &kubelet.plugin(UNITS).devices;
    assert_eq!(
        (units.len(), units[0].id.as_str(), units[0].health.as_str()),
        (32, "9507230f-0", "Healthy")
    );
    let shares = &kubelet.plugin(SHARES).devices;
    assert_eq!(
        (shares.len(), shares[199].id.clone()),
        (200, format!("{}::99", uuid(1)))
    );
}

/// One list per set of changes, not one per device.
#[tokio::test]
async fn simultaneous_health_changes_are_sent_as_one_list() {
    let node = Node::new(2);
    let mut kubelet = node.kubelet().await;
    node.set_health(1, false);
    for resource in [UNITS, SHARES] {
        let plugin = kubelet.plugin(resource);
        let list = plugin.next_list().await;
        let n_sick = list.iter().filter(|device| device.health == "Unhealthy").count();
        assert_eq!(n_sick, list.len() / 2);
        let second = timeout(Duration::from_millis(50), plugin.stream.message()).await;
        assert!(second.is_err(), "{resource}: {second:?}");
    }
    node.set_health(1, true);
    assert!(
        kubelet
            .plugin(UNITS)
            .next_list()
            .await
            .iter()
            .all(|device| device.health == "Healthy")
    );
}

/// kubelet parses thousands of devices of every list, so it gets no unchanged one.
#[tokio::test]
async fn a_changed_message_with_the_same_health_is_not_sent() {
    let node = Node::new(2);
    let mut kubelet = node.kubelet().await;
    node.fleet
        .send_modify(|fleet| std::sync::Arc::make_mut(fleet).gpus[0].message = "all is well".to_owned());
    let list = timeout(Duration::from_millis(50), kubelet.plugin(UNITS).stream.message()).await;
    assert!(list.is_err(), "{list:?}");
}

#[tokio::test]
async fn the_plugin_waits_for_kubelet() {
    let node = Node::new(1);
    while !node.path().join("gpushare-memory.sock").exists()
        || !node.path().join("gpushare-shared.sock").exists()
    {
        sleep(Duration::from_millis(5)).await;
    }
    node.kubelet().await;
}

/// The plugin publishes that it serves when this wakes it.
#[tokio::test]
async fn the_registration_of_all_resources_is_noticed() {
    let node = Node::new(1);
    let mut registrations = node.registrations.subscribe();
    let are_complete = |all: &Registrations| {
        let mut resources = [ExtendedResource::Memory, ExtendedResource::Shared].iter();
        resources.all(|resource| all.get(resource) == Some(&true))
    };
    let (_kubelet, noticed) = tokio::join!(
        node.kubelet(),
        timeout(SOON, registrations.wait_for(are_complete))
    );
    assert!(noticed.is_ok());
}

#[tokio::test]
async fn the_plugin_registers_again_when_kubelet_restarts() {
    let node = Node::new(1);
    for _ in 0..3 {
        node.kubelet().await.kill().await;
    }
    node.kubelet().await;
}

#[tokio::test]
async fn the_plugin_registers_again_when_its_socket_is_removed() {
    let node = Node::new(1);
    let mut kubelet = node.kubelet().await;
    fs::remove_file(node.path().join("gpushare-memory.sock")).unwrap();
    assert_eq!(kubelet.register().await, UNITS);
}

/// A kubelet goes on without the file of its socket, and loses all devices if the streams end. The next kubelet finds them ended.
#[tokio::test]
async fn streams_stay_open_when_the_file_of_kubelets_socket_is_removed() {
    let node = Node::new(1);
    let mut kubelet = node.kubelet().await;
    for socket in ["kubelet.sock", "gpushare-memory.sock"] {
        fs::remove_file(node.path().join(socket)).unwrap();
    }
    for resource in [UNITS, SHARES] {
        let end = timeout(
            Duration::from_millis(200),
            kubelet.plugin(resource).stream.message(),
        )
        .await;
        assert!(end.is_err(), "{resource}: {end:?}");
    }
    node.set_health(0, false);
    assert!(
        kubelet
            .plugin(UNITS)
            .next_list()
            .await
            .iter()
            .all(|device| device.health == "Unhealthy")
    );
    node.kubelet().await;
    for resource in [UNITS, SHARES] {
        while matches!(kubelet.plugin(resource).stream.message().await, Ok(Some(_))) {}
    }
}

/// The socket of a dead kubelet stays; the next one must not wait for the pauses that it caused.
#[tokio::test]
async fn the_plugin_registers_soon_after_a_long_absence_of_kubelet() {
    let node = Node::new(1);
    node.kubelet().await.kill().await;
    sleep(Duration::from_secs(4)).await;
    let began = std::time::Instant::now();
    node.kubelet().await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

/// A kubelet that opens the device list and drops it at once is noticed as one that dropped it.
#[tokio::test]
async fn the_plugin_registers_again_when_the_stream_ends_at_once() {
    let node = Node::new(1);
    let mut kubelet = FakeKubelet::start(node.path());
    let began = std::time::Instant::now();
    for _ in 0..2 {
        let resource = kubelet.register().await;
        kubelet.plugins.remove(&resource);
    }
    kubelet.register_both().await;
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

/// The old stream must have ended before the new registration: kubelet finds plugins by name.
#[tokio::test]
async fn all_streams_are_closed_before_the_plugin_registers_again() {
    let node = Node::new(1);
    let mut kubelet = node.kubelet().await;
    let mut old = kubelet.plugins.remove(SHARES).unwrap();
    fs::remove_file(node.path().join("gpushare-shared.sock")).unwrap();
    assert_eq!(kubelet.register().await, SHARES);
    let end = timeout(Duration::from_millis(200), old.stream.message()).await;
    assert!(matches!(end, Ok(Ok(None) | Err(_))), "the old stream is open");
}

#[tokio::test]
async fn the_plugin_registers_again_when_kubelet_drops_the_stream() {
    let node = Node::new(1);
    let mut kubelet = node.kubelet().await;
    kubelet.plugins.remove(UNITS);
    assert_eq!(kubelet.register().await, UNITS);
}

#[tokio::test]
async fn shutdown_ends_streams_and_removes_sockets() {
    let mut node = Node::new(1);
    let mut kubelet = node.kubelet().await;
    node.stop.cancel();
    timeout(SOON, async { while node.tasks.join_next().await.is_some() {} })
        .await
        .unwrap();
    assert!(!matches!(
        kubelet.plugin(UNITS).stream.message().await,
        Ok(Some(_))
    ));
    let left: Vec<_> = fs::read_dir(node.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["kubelet.sock"]);
}

/// After a boot kubelet admits its pods before the plugin's pod runs, if their devices are listed.
#[tokio::test]
async fn devices_are_listed_after_a_boot_until_the_plugin_serves() {
    let dir = tempfile::tempdir().unwrap();
    let entries =
        json!([{"PodUID": "u", "ContainerName": "c", "ResourceName": SHARES, "DeviceIDs": {"-1": ["g::7"]}}]);
    let text = json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {UNITS: ["a-0", "a-1"]}}, "Checksum": 1});
    fs::write(dir.path().join("kubelet_internal_checkpoint"), text.to_string()).unwrap();
    let (path, stop) = (dir.path().to_owned(), CancellationToken::new());
    let service =
        tokio::spawn(async move { boot::run(&path, &ExtendedResourceNames::default(), stop).await });
    let mut kubelet = FakeKubelet::start(dir.path());
    kubelet.register_both().await;
    let ids: Vec<_> = kubelet
        .plugin(UNITS)
        .devices
        .iter()
        .map(|device| (device.id.as_str(), device.health.as_str()))
        .collect();
    assert_eq!(ids, [("a-0", "Healthy"), ("a-1", "Healthy")]);
    assert_eq!(kubelet.plugin(SHARES).devices.len(), 1);
    let refused = kubelet
        .plugin(UNITS)
        .allocate(&["a-0".to_owned()])
        .await
        .unwrap_err();
    assert!(refused.message().contains("does not run yet"), "{refused}");
    let start = PreStartContainerRequest {
        device_ids: vec!["g::7".to_owned()],
    };
    assert!(
        kubelet
            .plugin(SHARES)
            .client
            .pre_start_container(start)
            .await
            .is_err(),
        "only the plugin starts containers"
    );

    let _plugin = tokio::net::UnixListener::bind(dir.path().join("gpushare-memory.sock")).unwrap();
    timeout(SOON, service).await.unwrap().unwrap().unwrap();
    assert!(!matches!(
        kubelet.plugin(UNITS).stream.message().await,
        Ok(Some(_))
    ));
    assert!(!dir.path().join("boot-gpushare-memory.sock").exists());
}

/// A file of another plugin under our name is not removed, and does not end the daemon.
#[tokio::test]
async fn a_foreign_file_in_place_of_the_socket_is_left_alone() {
    let node = Node::new(1);
    let mut kubelet = FakeKubelet::start(node.path());
    kubelet.register_both().await;
    let path = node.path().join("gpushare-memory.sock");
    fs::remove_file(&path).unwrap();
    fs::write(&path, "x").unwrap();
    sleep(Duration::from_millis(100)).await;
    assert_eq!(fs::read(&path).unwrap(), b"x");
    fs::remove_file(&path).unwrap();
    assert_eq!(kubelet.register().await, UNITS);
}

#[tokio::test]
async fn a_gpushare_pod_is_allocated_and_started() {
    let node = Node::new(4);
    let mut kubelet = node.kubelet().await;
    node.show(&pod("a", &[&[(UNITS, 3)]], &gpushare(2, 3, 1)));
    assert_json_snapshot!(kubelet.container(&[(UNITS, 3)]).await.unwrap(), @r#"
    {
      "ALIYUN_COM_GPU_MEM_CONTAINER": "3",
      "ALIYUN_COM_GPU_MEM_DEV": "16",
      "ALIYUN_COM_GPU_MEM_IDX": "2",
      "ALIYUN_COM_GPU_MEM_POD": "3",
      "GPUSHARE_GPU_DEVICES": "GPU-00000002-aaaa-bbbb-cccc-000000000002",
      "NVIDIA_VISIBLE_DEVICES": "GPU-00000002-aaaa-bbbb-cccc-000000000002"
    }
    "#);
    assert!(
        kubelet
            .plugin(UNITS)
            .used
            .iter()
            .all(|id| id.starts_with("44f120a6-"))
    );
}

/// The next kubelet knows of whole containers only and asks for both halves of the second one.
#[tokio::test]
async fn kubelet_restarts_between_allocate_and_prestart() {
    let (node, kubelet) = in_the_middle_of_a_container((SHARES, 1)).await;
    kubelet.kill().await;
    let mut kubelet = node.kubelet().await;
    kubelet.container(&[(SHARES, 1)]).await.unwrap();
    assert_eq!(indices(&mut kubelet, 2).await, ["0", "1"]);
}

/// The same kubelet goes on, and has written down the first half when the plugin registered.
#[tokio::test]
async fn the_plugin_registers_again_between_two_calls_for_a_container() {
    let (node, mut kubelet) = in_the_middle_of_a_container((UNITS, 3)).await;
    kubelet.plugins.remove(UNITS);
    assert_eq!(kubelet.register().await, UNITS);
    node.write_checkpoint(&[("c0", UNITS), ("c1", UNITS)]);
    kubelet.container(&[(SHARES, 1)]).await.unwrap();
    assert_eq!(indices(&mut kubelet, 1).await, ["1"]);
}

#[tokio::test]
async fn a_koordinator_pod_on_two_gpus_is_allocated_and_started() {
    let node = Node::new(4);
    let mut kubelet = node.kubelet().await;
    node.show(&pod(
        "a",
        &[&[(SHARES, 1)], &[(SHARES, 1)]],
        &koordinator(&[3, 1], 1),
    ));
    for _ in 0..2 {
        let env = kubelet.container(&[(SHARES, 1)]).await.unwrap();
        let both = format!("{},{}", uuid(3), uuid(1));
        assert_eq!(
            env,
            ["NVIDIA_VISIBLE_DEVICES", "GPUSHARE_GPU_DEVICES"]
                .map(|name| (name.to_owned(), both.clone()))
                .into()
        );
    }
    let used: Vec<_> = kubelet.plugin(SHARES).used.iter().cloned().collect();
    assert_eq!(
        used,
        [format!("{}::0", uuid(1)), format!("{}::0", uuid(3))],
        "each container takes the next device"
    );
}

/// kubelet hands the IDs of an ordinary init container on, and calls again for the app container.
#[tokio::test]
async fn ids_of_an_init_container_are_reused() {
    let node = Node::new(2);
    let mut kubelet = node.kubelet().await;
    let mut with_init = pod("a", &[&[(UNITS, 2)]], &gpushare(1, 2, 1));
    with_init["spec"]["initContainers"] = json!([{"name": "i", "resources": {"limits": {UNITS: "2"}}}]);
    node.show(&with_init);
    let plugin = kubelet.plugin(UNITS);
    let ids = plugin.preferred(2, &[]).await;
    for _ in 0..2 {
        assert_eq!(
            plugin.allocate(&ids).await.unwrap()["NVIDIA_VISIBLE_DEVICES"],
            uuid(1)
        );
    }
    let unknown = plugin.allocate(&ids).await.unwrap();
    let of_ids = ["NVIDIA_VISIBLE_DEVICES", "GPUSHARE_GPU_DEVICES"].map(|name| (name.to_owned(), uuid(1)));
    assert_eq!(unknown, of_ids.into(), "nobody is due: the GPU of the IDs");
}

/// kubelet may know the pod before our watch does.
#[tokio::test]
async fn allocate_waits_for_a_pod_that_is_not_known_yet() {
    let node = Node::new(1);
    let mut kubelet = node.kubelet().await;
    let ids = vec!["9507230f-0".to_owned()];
    let plugin = kubelet.plugin(UNITS);
    let call = plugin.allocate(&ids);
    let show = async {
        sleep(Duration::from_millis(20)).await;
        node.show(&pod("other", &[&[(UNITS, 5)]], &gpushare(0, 5, 1)));
        sleep(Duration::from_millis(20)).await;
        node.show(&pod("late", &[&[(UNITS, 1)]], &gpushare(0, 1, 2)));
    };
    let (answer, ()) = tokio::join!(call, show);
    assert_eq!(answer.unwrap()["ALIYUN_COM_GPU_MEM_POD"], "1");
}

/// kubelet fails a pod for good when Allocate is refused. Such a pod is held before its containers start.
#[tokio::test]
async fn allocate_fails_for_a_pod_without_a_record() {
    let node = Node::new(2);
    let mut kubelet = node.kubelet().await;
    node.set_health(1, false);
    kubelet.plugin(UNITS).next_list().await;
    node.show(&pod("elsewhere", &[&[(UNITS, 1)]], &gpushare(7, 1, 1)));
    node.show(&pod("sick", &[&[(UNITS, 1)]], &gpushare(1, 1, 2)));
    node.show(&pod("well", &[&[(UNITS, 1)]], &gpushare(0, 1, 3)));
    let ids = vec!["9507230f-0".to_owned()];
    for minor in [0, 0, 1] {
        assert_eq!(
            kubelet.plugin(UNITS).allocate(&ids).await.unwrap()["NVIDIA_VISIBLE_DEVICES"],
            uuid(minor)
        );
    }
}

/// kubelet sends every available ID, and once more those that must be included: more than gRPC takes by default.
#[tokio::test]
async fn long_requests_are_accepted() {
    let node = Node::with_unit(8, "2Mi".parse::<MemoryUnit>().unwrap());
    let mut kubelet = node.kubelet().await;
    let plugin = kubelet.plugin(UNITS);
    let ids: Vec<String> = plugin
        .devices
        .iter()
        .map(|device| device.id.clone())
        .chain((0..300_000).map(|n| format!("unknown-{n}")))
        .collect();
    let request = ContainerPreferredAllocationRequest {
        available_device_ids: ids,
        must_include_device_ids: Vec::new(),
        allocation_size: 3,
    };
    let answer = plugin
        .client
        .get_preferred_allocation(PreferredAllocationRequest {
            container_requests: vec![request],
        })
        .await
        .unwrap();
    assert_eq!(answer.into_inner().container_responses[0].device_ids.len(), 3);
}

/// A kubelet with a fault, or another process of the node: a request of any size has a short answer, and the next is served.
#[tokio::test]
async fn nonsense_of_any_size_gets_no_device_and_a_few_words() {
    let node = Node::new(1);
    node.show(&pod("a", &[&[(UNITS, 1)]], &gpushare(0, 1, 1)));
    let mut kubelet = node.kubelet().await;
    let plugin = kubelet.plugin(UNITS);
    // As one ID and as many, and longer than any request of kubelet.
    let long = |n_bytes: usize| vec!["x".repeat(n_bytes), "y".to_owned()];
    let many = (0..300_000).map(|n| format!("unknown-{n}")).collect();
    for ids in [long(4 << 20), many, long(17 << 20)] {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                device_ids: ids.clone(),
            }],
        };
        let answer = plugin.client.allocate(request).await;
        // An answer without a device: the check before the start refuses the container, with IDs as they are.
        let seen = answer
            .as_ref()
            .map_or_else(|error| error.message().to_owned(), |answer| format!("{answer:?}"));
        assert!(seen.len() < 1024, "{} bytes", seen.len());
        assert!(!seen.contains(&uuid(0)), "{seen}");
        let request = PreStartContainerRequest { device_ids: ids };
        let error = plugin.client.pre_start_container(request).await.unwrap_err();
        assert!(error.message().len() < 1024, "{} bytes", error.message().len());
    }
    kubelet.container(&[(UNITS, 1)]).await.unwrap();
}
