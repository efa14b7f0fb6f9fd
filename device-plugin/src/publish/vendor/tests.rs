//! The annotation that follows from kubelet's allocations.

use std::collections::BTreeMap;
use std::fs;

use proptest::prelude::*;
use prost::Message;
use proto::kubelet::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use proto::kubelet::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, CdiDevice, ClaimResource,
    ContainerDevices as Devices, ContainerResources, DynamicResource, GetPodResourcesRequest,
    GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
};
use proto::request::ContainerRequest;
use rstest::rstest;
use serde_json::json;
use tokio::net::UnixListener;
use tokio::time::timeout;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::*;
use crate::node::pods::{Claimant, NodePod};
use crate::tests::builders::{fleet, gpu, pod, pods, says, units, whole};

const NVIDIA: &str = "nvidia.com/gpu";
const DRIVER: &str = "gpu.nvidia.com";

fn uuid(minor: u32) -> String {
    gpu(minor).uuid.to_string()
}

fn allocation(pod: PodKey, ids: &[&str]) -> Allocation {
    let device_ids = ids.iter().map(|id| (*id).to_owned()).collect();
    Allocation {
        pod,
        container: "c".to_owned(),
        resource: NVIDIA.to_owned(),
        device_ids,
        sees_recorded_devices: false,
        claim: None,
    }
}

fn named(name: &str) -> PodKey {
    PodKey::Named {
        namespace: "default".to_owned(),
        name: name.to_owned(),
    }
}

/// A pod without a record of our scheduler.
fn unrecorded_pod(name: &str) -> NodePod {
    unplaced(name, whole(1))
}

fn unplaced(name: &str, request: ContainerRequest) -> NodePod {
    pod(name, 1, [request]).unplaced().at(PodStage::Running)
}

fn published(
    allocations: &[Allocation],
    known: impl IntoIterator<Item = NodePod>,
) -> Vec<(String, Vec<String>)> {
    let checkpoints = unrecorded(allocations, &pods(known), &fleet(4));
    checkpoints
        .entries
        .into_iter()
        .map(|entry| (entry.pod_uid, entry.device_ids))
        .collect()
}

#[rstest]
#[case::uuid(&uuid(1), uuid(1))]
#[case::replica(&format!("{}::7", uuid(1)), uuid(1))]
#[case::index("2", uuid(2))]
#[case::replica_of_an_index("2::0", uuid(2))]
#[case::instance_of_an_index("2:1", uuid(2))]
#[case::old_instance(&format!("MIG-{}/1/0", uuid(3)), uuid(3))]
#[case::instance("MIG-5c9e", "MIG-5c9e")]
#[case::another_gpu("GPU-x", "GPU-x")]
#[case::no_such_index("9", "9")]
#[case::nonsense("", "")]
fn device_ids_become_uuids_where_the_gpu_is_known(#[case] id: &str, #[case] expected: String) {
    assert_eq!(allocation::device_name(id, &fleet(4)), expected);
}

#[test]
fn pods_without_a_record_are_published_and_pods_with_one_are_not() {
    let [ours, elsewhere] = ["ours", "elsewhere"].map(|name| pod(name, 1, [whole(1)]).at(PodStage::Running));
    let allocations = [
        allocation(named("ours"), &[&uuid(0)]),
        allocation(named("elsewhere"), &[&uuid(1)]),
        allocation(named("theirs"), &[&uuid(2)]),
        allocation(named("unknown"), &[&uuid(3)]),
    ];
    let expected = [
        (String::new(), vec![uuid(3)]),
        ("elsewhere".to_owned(), vec![uuid(1)]),
        ("theirs".to_owned(), vec![uuid(2)]),
    ];
    assert_eq!(
        published(&allocations, [ours, elsewhere, unrecorded_pod("theirs")]),
        expected
    );
}

/// A record that names one of two devices does not agree.
#[test]
fn a_record_that_names_one_of_two_devices_does_not_agree() {
    let ours = pod("ours", 1, [whole(2)]).at(PodStage::Running);
    let allocations = [allocation(named("ours"), &[&uuid(0), &uuid(1)])];
    assert_eq!(
        published(&allocations, [ours]),
        [("ours".to_owned(), vec![uuid(0), uuid(1)])]
    );
}

#[test]
fn pods_that_have_ended_hold_nothing() {
    let ended = unrecorded_pod("ended").at(PodStage::Terminal);
    let by_uid = |uid: &str| PodKey::Uid(uid.into());
    let allocations = [
        allocation(named("ended"), &[&uuid(0)]),
        allocation(by_uid("ended"), &[&uuid(0)]),
        allocation(by_uid("gone"), &[&uuid(1)]),
        allocation(by_uid("there"), &[&uuid(2)]),
        allocation(by_uid("there"), &[]),
    ];
    assert_eq!(
        published(&allocations, [ended, unrecorded_pod("there")]),
        [("there".to_owned(), vec![uuid(2)])]
    );
}

proptest! {
    /// Every device that a pod which is there holds is on its record or published.
    #[test]
    fn no_device_in_use_is_forgotten(held in prop::collection::vec((0..4_u32, 0..5_u32, 0..3_u32, any::<bool>()), 0..6)) {
        let known = held.iter().enumerate().map(|(at, (_, record, _, is_ended))| {
            let pod = if *record == 4 { unrecorded_pod(&at.to_string()) } else { pod(&at.to_string(), 1, [whole(1)]).on([*record]) };
            NodePod { stage: if *is_ended { PodStage::Terminal } else { PodStage::Running }, ..pod }
        });
        let allocations: Vec<_> = held.iter().enumerate().map(|(at, (device, _, form, _))| {
            let id = match form {
                0 => uuid(*device),
                1 => format!("{}::{at}", uuid(*device)),
                _ => device.to_string(),
            };
            allocation(named(&at.to_string()), &[&id])
        }).collect();
        let published: BTreeMap<_, _> = published(&allocations, known).into_iter().collect();
        for (at, (device, record, _, is_ended)) in held.iter().enumerate() {
            let expected = (!is_ended && record != device).then(|| vec![uuid(*device)]);
            prop_assert_eq!(published.get(&at.to_string()), expected.as_ref());
        }
    }

    #[test]
    fn normalising_a_device_id_twice_changes_nothing(id in "(GPU-|MIG-|[0-9]|:|/|a){0,10}") {
        let once = allocation::device_name(&id, &fleet(4));
        prop_assert_eq!(allocation::device_name(&once, &fleet(4)), once);
    }
}

/// kubelet's end of the pod-resources API.
struct Kubelet(watch::Receiver<Vec<PodResources>>);

#[tonic::async_trait]
impl PodResourcesLister for Kubelet {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        Ok(Response::new(ListPodResourcesResponse {
            pod_resources: self.0.borrow().clone(),
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn get(
        &self,
        _: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}

/// A pod with one container as kubelet lists it: each list of devices on a NUMA node of its own.
fn listed(name: &str, resource: &str, ids: &[&[&str]]) -> PodResources {
    let part = |ids: &&[&str]| Devices {
        resource_name: resource.to_owned(),
        device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        ..Devices::default()
    };
    let container = ContainerResources {
        name: "c".to_owned(),
        devices: ids.iter().map(part).collect(),
        ..ContainerResources::default()
    };
    PodResources {
        name: name.to_owned(),
        namespace: "default".to_owned(),
        containers: vec![container],
    }
}

/// Serves what kubelet lists.
fn serve(settings: &VendorSettings, lists: watch::Receiver<Vec<PodResources>>) {
    let listener = UnixListener::bind(&settings.pod_resources.socket).unwrap();
    let server = Server::builder().add_service(PodResourcesListerServer::new(Kubelet(lists)));
    tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
}

/// A pod whose one container has these devices by a claim, as kubelet lists it.
fn claiming(name: &str, driver: &str, devices: &[&str]) -> PodResources {
    let cdi = |device: &&str| CdiDevice {
        name: format!("k8s.{driver}/claim=c1-{device}"),
    };
    let resource = |(at, device): (usize, &&str)| ClaimResource {
        // kubelet lists those of the devices before too.
        cdi_devices: devices[..=at].iter().map(cdi).collect(),
        driver_name: driver.to_owned(),
        pool_name: "n1".to_owned(),
        device_name: (*device).to_owned(),
        share_id: None,
    };
    let claim = DynamicResource {
        claim_name: format!("claim-of-{name}"),
        claim_namespace: "default".to_owned(),
        claim_resources: devices.iter().enumerate().map(resource).collect(),
    };
    let container = ContainerResources {
        name: "c".to_owned(),
        dynamic_resources: vec![claim],
        ..ContainerResources::default()
    };
    PodResources {
        name: name.to_owned(),
        namespace: "default".to_owned(),
        containers: vec![container],
    }
}

fn claimant(name: &str, stage: PodStage) -> Claimant {
    Claimant {
        uid: name.into(),
        namespace: "default".to_owned(),
        name: name.to_owned(),
        stage,
    }
}

/// An API server without claims.
fn no_claims() -> AdminAccess {
    let refuse = |_: http::Request<kube::client::Body>| async {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": "NotFound", "code": 404});
        let body = kube::client::Body::from(status.to_string().into_bytes());
        Ok::<_, std::convert::Infallible>(http::Response::builder().status(404).body(body).unwrap())
    };
    AdminAccess::new(kube::Client::new(tower::service_fn(refuse), "default"))
}

fn recorder() -> Recorder {
    let (client, _server) = crate::tests::api_server::ApiServer::new();
    daemon::events::recorder(&client.into(), "test", Some("n1".to_owned())).0
}

/// Starts a watch with these settings; its devices arrive at the receiver.
fn start(
    settings: VendorSettings,
    fleet: watch::Receiver<Arc<NodeFleet>>,
    pods: watch::Receiver<NodePods>,
    checkpoints: watch::Sender<Option<KubeletAllocations>>,
) {
    let watch = VendorWatch {
        settings,
        fleet,
        pods,
        seen: watch::channel(SeenGpus::default()).1,
        admin_access: no_claims(),
        kubelet_allocations: checkpoints,
        recorder: recorder(),
    };
    tokio::spawn(watch.run());
}

fn settings(dir: &std::path::Path) -> VendorSettings {
    VendorSettings {
        resources: [NVIDIA.to_owned()].into(),
        ours: None,
        dra_drivers: [DRIVER.to_owned()].into(),
        pod_resources: crate::node::kubelet_pod_resources::PodResources::new(dir.join("kubelet.sock")),
        device_plugin_dir: dir.to_owned(),
        has_hook: false,
    }
}

/// The devices that are published once they are these.
async fn until(seen: &mut watch::Receiver<Option<KubeletAllocations>>, expected: &[String]) {
    let is_so = |now: &Option<KubeletAllocations>| {
        now.as_ref().is_some_and(|now| {
            now.entries
                .iter()
                .flat_map(|entry| &entry.device_ids)
                .eq(expected)
        })
    };
    let found = timeout(Duration::from_secs(20), seen.wait_for(is_so))
        .await
        .is_ok();
    assert!(found, "{:?}", seen.borrow());
}

#[tokio::test]
async fn allocations_are_read_from_the_pod_resources_api() {
    let dir = tempfile::tempdir().unwrap();
    let settings = settings(dir.path());
    let (kubelet, lists) = watch::channel(vec![
        listed("a", NVIDIA, &[&[&uuid(1)], &[&uuid(0)]]),
        listed("b", "other.com/gpu", &[&["x"]]),
    ]);
    serve(&settings, lists);
    let (known, pods_seen) = watch::channel(pods([unrecorded_pod("a")]));
    let (_fleet, fleet_seen) = watch::channel(Arc::new(fleet(4)));
    let (sender, mut seen) = watch::channel(None);
    start(settings, fleet_seen, pods_seen, sender);
    until(&mut seen, &[uuid(0), uuid(1)]).await;

    kubelet.send_replace(vec![listed("c", NVIDIA, &[&[&uuid(2)]])]);
    known.send_if_modified(|pods| pods.apply(unrecorded_pod("c")));
    until(&mut seen, &[uuid(2)]).await;
    kubelet.send_replace(Vec::new());
    known.send_modify(|pods| pods.delete(&"c".into()));
    until(&mut seen, &[]).await;
}

/// Once this plugin serves the resource, its own answers add nothing to the records. The devices of the vendor's plugin are those
/// of its answer, even if kubelet's ID or the record names others.
#[tokio::test]
async fn devices_of_the_vendors_plugin_count_after_it_was_replaced() {
    use crate::inject::content::cdi_answer;
    let dir = tempfile::tempdir().unwrap();
    let by_variable = |minor: u32| says("NVIDIA_VISIBLE_DEVICES", &uuid(minor));
    let ours = |id: &str| cdi_answer(ExtendedResource::Whole, &[id.to_owned()], 1);
    let entry = |pod: &str, id: &str, answer: &ContainerAllocateResponse| {
        let answer = k8s_openapi::ByteString(answer.encode_to_vec());
        json!({"PodUID": pod, "ContainerName": "c", "ResourceName": NVIDIA, "DeviceIDs": {"0": [id]}, "AllocResp": answer})
    };
    let entries = json!([
        entry("ours", &uuid(3), &ours(&uuid(3))),
        entry("ours-by-variable", &uuid(3), &by_variable(1)),
        entry("theirs", "0", &by_variable(0)),
        entry("theirs-elsewhere", &uuid(2), &by_variable(2)),
        entry("ours-without-record", &uuid(3), &ours(&uuid(3))),
    ]);
    kubelet_checkpoint::tests::write(dir.path(), &entries, &json!({}));
    let settings = VendorSettings {
        resources: BTreeSet::new(),
        ours: Some(NVIDIA.to_owned()),
        ..settings(dir.path())
    };
    let placed = |name: &str, minor: u32| pod(name, 1, [whole(1)]).on([minor]).at(PodStage::Running);
    let known = [
        placed("ours", 0),
        placed("ours-by-variable", 1),
        unrecorded_pod("theirs"),
        placed("theirs-elsewhere", 0),
        unrecorded_pod("ours-without-record"),
    ];
    let found = published(
        &read(&settings, &fleet(4), false, &mut no_claims()).await.unwrap(),
        known,
    );
    let expected = [("ours-without-record", 3), ("theirs", 0), ("theirs-elsewhere", 2)];
    assert_eq!(
        found,
        expected.map(|(pod, minor)| (pod.to_owned(), vec![uuid(minor)]))
    );
    // Without the answers kubelet's names have to do: rather too much is counted than too little.
    fs::remove_file(dir.path().join(kubelet_checkpoint::FILE)).unwrap();
    assert!(read(&settings, &fleet(4), false, &mut no_claims()).await.is_err());
}

#[tokio::test]
async fn without_kubelet_nothing_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let found = read(&settings(dir.path()), &fleet(1), false, &mut no_claims()).await;
    assert!(found.is_err(), "{found:?}");
}

#[tokio::test(start_paused = true)]
async fn without_resources_to_watch_there_are_no_allocations() {
    let nothing = settings(std::path::Path::new("/nowhere"));
    let settings = VendorSettings {
        resources: BTreeSet::new(),
        dra_drivers: BTreeSet::new(),
        ..nothing
    };
    let (_pods, pods_seen) = watch::channel(NodePods::default());
    let (_fleet, fleet_seen) = watch::channel(Arc::new(fleet(1)));
    let (sender, mut seen) = watch::channel(None);
    start(settings, fleet_seen, pods_seen, sender);
    assert_eq!(
        seen.wait_for(Option::is_some).await.unwrap().clone(),
        Some(KubeletAllocations::default())
    );
}

/// A claim's GPU counts from when kubelet has prepared it until its pod has ended, also while other pods are on the GPU.
#[tokio::test]
async fn claims_of_a_dra_driver_count_while_their_pods_run() {
    let dir = tempfile::tempdir().unwrap();
    let settings = VendorSettings {
        resources: BTreeSet::new(),
        ..settings(dir.path())
    };
    let (kubelet, lists) = watch::channel(Vec::new());
    serve(&settings, lists);
    let shares = NodePod {
        stage: PodStage::Running,
        ..pod("shares", 1, [crate::tests::builders::shares(1)]).on([2])
    };
    let (known, pods_seen) = watch::channel(pods([shares]));
    let (_fleet, fleet_seen) = watch::channel(Arc::new(fleet(4)));
    let (sender, mut seen) = watch::channel(None);
    start(settings, fleet_seen, pods_seen, sender);
    until(&mut seen, &[]).await;

    let admitted = |stage| move |pods: &mut NodePods| pods.note_claimant(claimant("a", stage));
    kubelet.send_replace(vec![
        claiming("a", DRIVER, &["gpu-0", "gpu-2"]),
        claiming("b", "other.com", &["gpu-1"]),
    ]);
    known.send_if_modified(admitted(PodStage::Admitted));
    until(&mut seen, &[uuid(0), uuid(2)]).await;
    let entry = seen.borrow().as_ref().unwrap().entries[0].clone();
    assert_eq!(
        (entry.pod_uid.as_str(), entry.resource_name.as_str()),
        ("a", DRIVER)
    );
    // kubelet lists a pod until it has cleaned up after it.
    known.send_if_modified(admitted(PodStage::Terminal));
    until(&mut seen, &[]).await;
}

#[tokio::test]
async fn an_unknown_device_counts_as_all_gpus() {
    let dir = tempfile::tempdir().unwrap();
    let settings = VendorSettings {
        resources: BTreeSet::new(),
        ..settings(dir.path())
    };
    let (_kubelet, lists) = watch::channel(vec![claiming("a", DRIVER, &["gpu-vfio-0"])]);
    serve(&settings, lists);
    let found = read(&settings, &fleet(2), true, &mut no_claims()).await.unwrap();
    assert_eq!(
        found
            .iter()
            .map(|found| found.device_ids.clone())
            .collect::<Vec<_>>(),
        [vec![uuid(0), uuid(1)]]
    );
    // kubelet is not asked as long as no pod of the node uses claims.
    assert_eq!(
        read(&settings, &fleet(2), false, &mut no_claims()).await.unwrap(),
        []
    );
}

/// A kubelet that does not answer may have prepared anything.
#[tokio::test]
async fn claims_that_cannot_be_listed_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let settings = VendorSettings {
        resources: BTreeSet::new(),
        ..settings(dir.path())
    };
    drop(UnixListener::bind(&settings.pod_resources.socket).unwrap());
    let found = read(&settings, &fleet(1), true, &mut no_claims()).await;
    assert!(found.is_err(), "{found:?}");
}

/// kubelet has allocated GPU 0 to container `w1` of the pod `listed`; the runtime hook has seen other GPUs.
#[rstest]
#[case::nothing_is_known(&[], &["listed w1 0"])]
#[case::the_container_sees_the_same(&[("listed", "w1", 0)], &["listed w1 0"])]
#[case::the_container_sees_another(&[("listed", "w1", 2)], &["listed w1 2"])]
#[case::another_container(&[("listed", "other", 2)], &["listed w1 0"])]
#[case::without_record_and_not_listed(&[("unlisted", "w1", 3)], &["listed w1 0", "unlisted w1 3"])]
#[case::without_record_for_units(&[("units", "u2", 3)], &["listed w1 0"])]
#[case::with_record(&[("ours", "w1", 3)], &["listed w1 0"])]
#[case::ended(&[("ended", "w1", 3)], &["listed w1 0"])]
#[case::unknown(&[("unknown", "w1", 3)], &["listed w1 0"])]
fn seen_gpus_correct_kubelet_s_allocations(#[case] entries: &[(&str, &str, u32)], #[case] expected: &[&str]) {
    let ended = NodePod {
        stage: PodStage::Terminal,
        ..unplaced("ended", whole(1))
    };
    let known = [
        unplaced("listed", whole(1)),
        unplaced("unlisted", whole(1)),
        unplaced("units", units(2)),
        pod("ours", 1, [whole(1)]),
        ended,
    ];
    let allocation = Allocation {
        pod: PodKey::Named {
            namespace: "default".to_owned(),
            name: "listed".to_owned(),
        },
        container: "w1".to_owned(),
        resource: "nvidia.com/gpu".to_owned(),
        device_ids: vec![uuid(0)],
        sees_recorded_devices: false,
        claim: None,
    };
    let mut seen = SeenGpus::default();
    for (uid, container, minor) in entries {
        seen.record((*uid).into(), container, [gpu(*minor).uuid].into(), &pods([]));
    }
    let corrected = correct_by_runtime(vec![allocation], &seen, &pods(known), &fleet(4));
    let minor = |id: &String| {
        fleet(4)
            .gpus
            .iter()
            .find(|entry| entry.device.uuid.as_str() == id)
            .map(|entry| entry.device.minor.to_string())
    };
    let texts: Vec<String> = corrected
        .iter()
        .map(|allocation| {
            assert_eq!(allocation.resource, "nvidia.com/gpu");
            let pod = match &allocation.pod {
                PodKey::Named { name, .. } => name,
                PodKey::Uid(uid) => uid.as_str(),
            };
            let minors: Vec<String> = allocation.device_ids.iter().filter_map(minor).collect();
            format!("{pod} {} {}", allocation.container, minors.join(","))
        })
        .collect();
    assert_eq!(texts, expected);
}

/// kubelet's list of a pod with a device of NVIDIA's plugin and of one with devices by a claim, as it comes from the socket.
fn listed_bytes() -> Vec<u8> {
    let first = listed("a", NVIDIA, &[&[&uuid(0)], &["1"]]);
    let second = claiming("b", DRIVER, &["gpu-1", "gpu-2-mig-1g5gb-19-0"]);
    ListPodResourcesResponse {
        pod_resources: vec![first, second],
    }
    .encode_to_vec()
}

proptest! {
    #![proptest_config(fuzz::config(500))]

    /// Every device of the vendor's that kubelet lists is published, as a GPU of the node or by its name.
    #[test]
    fn no_list_makes_the_reader_panic(bytes in fuzz::damaged(vec![listed_bytes()])) {
        let Ok(listed) = ListPodResourcesResponse::decode(bytes.as_slice()) else {
            return Ok(());
        };
        let fleet = fleet(3);
        let mut allocations = plugin_allocations(&listed, &[NVIDIA.to_owned()].into());
        for claimed in claims::claimed_devices(&listed) {
            allocations.extend(claims::allocation(claimed, &fleet));
        }
        let containers = listed.pod_resources.iter().flat_map(|pod| &pod.containers);
        let devices = containers.flat_map(|container| &container.devices);
        let has_devices = devices.into_iter().any(|part| part.resource_name == NVIDIA && !part.device_ids.is_empty());
        prop_assert!(!has_devices || !allocations.is_empty());
        let published = unrecorded(&allocations, &pods([]), &fleet);
        prop_assert!(published.entries.len() <= allocations.len());
    }
}
