//! Decisions about starts, from kubelet's checkpoint.

use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::memory_unit::MemoryUnit;
use proto::request::ContainerRequest;
use proto::resource::RDMA;
use rstest::rstest;
use serde_json::json;

use super::super::*;
use crate::devices::fleet::NodeFleet;
use crate::devices::inventory::NodeInventory;
use crate::inject::content::cdi_answer;
use crate::node::kubelet_checkpoint::Allocated;
use crate::node::pods::PodStage;
use crate::start::envvar::check::verification;
use crate::start::envvar::partners::{Verification, verify_or_swap};
use crate::start::matching::AllocateLog;
use crate::start::verify::VisibleByType;
use crate::tests::builders::{
    adapter, allocated, fleet, gpu, node_state, pod, pods, rdma, says, shares, units, whole,
};
use ExtendedResource::{Memory, Rdma, Shared, Whole};

const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// The checkpoint's entry of the only container of a pod.
fn entry(
    pod: &NodePod,
    resource: ExtendedResource,
    ids: &[&str],
    answer: ContainerAllocateResponse,
) -> Allocated {
    allocated(pod.uid.as_str(), &pod.containers[0].name, resource, ids).with(answer)
}

/// Two GPUs, two adapters, and a plugin that serves whole GPUs too and has answered nothing.
fn checked(
    all: Vec<NodePod>,
    allocated: &[Allocated],
    of: usize,
    resource: ExtendedResource,
    ids: &[&str],
) -> Ending {
    checked_after(all, allocated, of, resource, ids, None)
}

/// The same after the plugin has given this answer.
fn checked_after(
    all: Vec<NodePod>,
    allocated: &[Allocated],
    of: usize,
    resource: ExtendedResource,
    ids: &[&str],
    answer: Option<ContainerAllocateResponse>,
) -> Ending {
    checked_where(false, all, allocated, of, resource, ids, answer)
}

/// The same, where pods may see all GPUs or not.
fn checked_where(
    is_allowed: bool,
    all: Vec<NodePod>,
    allocated: &[Allocated],
    of: usize,
    resource: ExtendedResource,
    ids: &[&str],
    answer: Option<ContainerAllocateResponse>,
) -> Ending {
    let gpus = fleet(2);
    let inventory = NodeInventory {
        gpus: gpus.gpus.iter().map(|entry| entry.device.clone()).collect(),
        others: vec![adapter(0), adapter(1)],
        ..NodeInventory::default()
    };
    let uid = all[of].uid.clone();
    let known = pods(all);
    let mut node = node_state(NodeFleet::new(inventory, gpus.ids), known.clone());
    node.settings.names.whole = Some("nvidia.com/gpu".to_owned());
    node.settings.allows_all_devices = is_allowed;
    node.note_existing_pods(&known);
    let ids: Vec<String> = ids.iter().map(|id| (*id).to_owned()).collect();
    if let Some(answer) = answer {
        node.log().add_answer(resource, &ids, Some(uid.clone()), answer);
    }
    let snapshot = KubeletSnapshot {
        listed: Ok(Arc::default()),
        allocated: Some(Arc::new(allocated.to_vec())),
    };
    let checked = verify_start(&node, &snapshot, resource, &ids, &uid);
    let checked = checked.unwrap_or_else(|blocked| panic!("{blocked}"));
    Ending {
        verification: verification(&checked, &snapshot, &node),
        is_by_spec: checked.is_by_spec,
        is_inherited: checked.is_inherited,
    }
}

/// The end of a check.
struct Ending {
    verification: Verification,
    is_by_spec: bool,
    is_inherited: bool,
}

fn running(pod: NodePod) -> NodePod {
    pod.at(PodStage::Running)
}

/// The outcome of a start in words.
fn ending(checked: &Ending, resource: ExtendedResource) -> String {
    match &checked.verification {
        Verification::Passed => "starts".to_owned(),
        Verification::Refused(refusal) if checked.is_inherited && may_go_on(resource, refusal) => {
            "starts again".to_owned()
        }
        Verification::Refused(refusal) => refusal.to_string(),
        Verification::Swap(partner) => format!("swaps with {}", partner.as_str()),
        Verification::LookAgain(_) => format!("{:?}", checked.verification),
    }
}

/// Containers of the old gpushare plugin, with IDs of its own and by index, known from kubelet's checkpoint alone.
#[rstest]
#[case::by_index(running(pod("a", 1, [units(1)]).on([1])), Some("1"), "starts")]
#[case::by_uuid(running(pod("a", 1, [units(1)]).on([1])), Some("GPU-00000001-aaaa-bbbb-cccc-000000000001"), "starts")]
#[case::the_only_gpu_and_no_record(running(pod("a", 1, [units(1)]).unplaced()), Some("0"), "starts again")]
#[case::no_record_and_never_run(pod("a", 1, [units(1)]).unplaced(), Some("0"), "annotation scheduling.koordinator.sh/device-allocated names no GPU")]
#[case::no_file(running(pod("a", 1, [units(1)]).on([1])), None, "starts again")]
#[case::no_file_and_never_run(pod("a", 1, [units(1)]).on([1]), None, "the devices of the container are not known")]
#[case::another_gpu(running(pod("a", 1, [units(1)]).on([1])), Some("0"), "kubelet allocated GPU-00000000")]
fn containers_of_the_old_plugin(#[case] pod: NodePod, #[case] visible: Option<&str>, #[case] expected: &str) {
    let ids = ["GPU-00000001-aaaa-bbbb-cccc-000000000001-_-3"];
    let allocated: Vec<_> = visible
        .map(|value| entry(&pod, Memory, &ids, says(VISIBLE, value)))
        .into_iter()
        .collect();
    let found = ending(&checked(vec![pod], &allocated, 0, Memory, &ids), Memory);
    assert!(found.starts_with(expected), "{found}");
}

/// The vendor's plugin picked the GPUs, whatever the record says; kubelet's checkpoint counts the GPUs that it gave.
#[rstest]
#[case::as_recorded(running(pod("a", 1, [whole(1)]).on([1])), 1, "starts")]
#[case::another(running(pod("a", 1, [whole(1)]).on([1])), 0, "starts again")]
#[case::not_recorded(running(pod("a", 1, [whole(1)]).unplaced()), 0, "starts again")]
#[case::another_and_never_run(pod("a", 1, [whole(1)]).on([1]), 0, "kubelet allocated GPU-00000000")]
fn containers_of_the_vendors_plugin(#[case] pod: NodePod, #[case] seen: u32, #[case] expected: &str) {
    let uuid = gpu(seen).uuid.to_string();
    let allocated = [entry(&pod, Whole, &[&uuid], says(VISIBLE, &uuid))];
    let found = ending(&checked(vec![pod], &allocated, 0, Whole, &[&uuid]), Whole);
    assert!(found.starts_with(expected), "{found}");
}

/// Answers by CDI are of this plugin alone.
#[test]
fn a_container_of_a_running_pod_without_a_record_is_blocked() {
    let pod = running(pod("a", 1, [whole(1)]).unplaced());
    let ids = [gpu(0).uuid.to_string()];
    let allocated = [entry(&pod, Whole, &[&ids[0]], cdi_answer(Whole, &ids, 1))];
    let checked = checked(vec![pod], &allocated, 0, Whole, &[&ids[0]]);
    assert!(
        checked.is_by_spec
            && !checked.is_inherited
            && matches!(
                checked.verification,
                Verification::Refused(StartRefusal::Unplaced(_))
            )
    );
}

/// A pod with this percentage of an adapter, and a share of a GPU if it has one.
fn with_adapter(name: &str, assumed_at: u64, minor: u32, percent: u64, gpu_minor: Option<u32>) -> NodePod {
    let mut record = json!({"rdma": [{"minor": minor, "resources": {RDMA: percent.to_string()}}]});
    if let Some(minor) = gpu_minor {
        record["gpu"] = json!([{"minor": minor, "resources": {}}]);
    }
    let mut container = rdma(percent);
    container.shared = gpu_minor.map_or(0, |_| 1);
    pod(name, assumed_at, [container]).recorded(assumed_at, record)
}

fn sees_adapter(pod: &NodePod, minor: u32) -> Allocated {
    entry(
        pod,
        Rdma,
        &[&format!("{}-id", pod.name)],
        says("GPUSHARE_RDMA_DEVICES", &format!("0000:{minor:02x}:00.0")),
    )
}

#[test]
fn adapters_are_verified_like_gpus() {
    let (a, b) = (
        with_adapter("a", 1, 0, 60, None),
        with_adapter("b", 2, 1, 60, None),
    );
    let start = |allocated: &[Allocated], all: Vec<NodePod>| {
        ending(&checked(all, allocated, 0, Rdma, &["a-id"]), Rdma)
    };
    assert_eq!(
        start(&[sees_adapter(&a, 0)], vec![a.clone(), b.clone()]),
        "starts"
    );
    assert_eq!(
        start(
            &[sees_adapter(&a, 1), sees_adapter(&b, 0)],
            vec![a.clone(), b.clone()]
        ),
        "swaps with b"
    );
    let other = with_adapter("b", 2, 1, 70, None);
    let found = start(
        &[sees_adapter(&a, 1), sees_adapter(&other, 0)],
        vec![a.clone(), other],
    );
    assert!(
        found.starts_with("kubelet allocated 0000:01:00.0, but the scheduler assigned minor 0"),
        "{found}"
    );
    let before = running(with_adapter("b", 2, 0, 60, None));
    let found = start(&[sees_adapter(&a, 0)], vec![a.clone(), before]);
    assert_eq!(
        found,
        "rdma 0000:00:00.0 has no room for it: 60 of 100 percent are held by pods that came before, and it requests 60, 20 too much; \
         delete the pod to reschedule it"
    );
    let nothing = NodePod {
        placement: pod("x", 1, [shares(1)]).placement,
        ..a
    };
    let found = start(&[sees_adapter(&nothing, 0)], vec![nothing.clone()]);
    assert_eq!(
        found,
        "annotation scheduling.koordinator.sh/device-allocated names no rdma; delete the pod to reschedule it"
    );
}

/// The two may have each other's adapter and both the same GPU; then only the whole records fit.
#[test]
fn a_swap_exchanges_all_devices_of_a_record() {
    let pair = |gpu_of_b: u32| {
        [
            with_adapter("a", 1, 0, 40, Some(0)),
            with_adapter("b", 2, 1, 40, Some(gpu_of_b)),
        ]
    };
    let sees_gpu =
        |pod: &NodePod, minor: u32| entry(pod, Shared, &["s"], says(VISIBLE, gpu(minor).uuid.as_str()));
    for (gpu_of_b, expected) in [(0, "swaps with b"), (1, "kubelet allocated")] {
        let [a, b] = pair(gpu_of_b);
        let allocated = [
            sees_adapter(&a, 1),
            sees_gpu(&a, 0),
            sees_adapter(&b, 0),
            sees_gpu(&b, gpu_of_b),
        ];
        let found = ending(&checked(vec![a, b], &allocated, 0, Rdma, &["a-id"]), Rdma);
        assert!(found.starts_with(expected), "{found}");
    }
}

/// The mode of the node has changed between two answers of one pod: the GPU comes by a spec, the adapter is that of another
/// record.
#[test]
fn a_container_with_a_spec_may_need_a_swap_for_its_variable() {
    let a = with_adapter("a", 1, 0, 40, Some(0));
    let b = with_adapter("b", 2, 1, 40, Some(0));
    let by_spec = cdi_answer(Shared, &["s".to_owned()], 1);
    let allocated = [
        sees_adapter(&a, 1),
        entry(&a, Shared, &["s"], by_spec),
        sees_adapter(&b, 0),
    ];
    let checked = checked(vec![a, b], &allocated, 0, Shared, &["s"]);
    assert!(checked.is_by_spec);
    assert_eq!(ending(&checked, Shared), "swaps with b");
}

/// The mode of the node has changed to `cdi` between the answers for two equal pods, a and b; b has the record of GPU 1.
#[rstest]
#[case::the_other_sees_our_gpu(pod("a", 1, [units(2)]).on([0]), 1, "swaps with a")]
#[case::the_other_sees_its_own(pod("a", 1, [units(2)]).on([0]), 0, "starts")]
#[case::the_other_runs(running(pod("a", 1, [units(2)]).on([0])), 1, "starts")]
#[case::the_other_requests_more(pod("a", 1, [units(3)]).on([0]), 1, "starts")]
fn a_pod_with_a_spec_gives_its_record_to_a_pod_that_needs_it(
    #[case] a: NodePod,
    #[case] seen_by_a: u32,
    #[case] expected: &str,
) {
    let b = pod("b", 2, [units(2)]).on([1]);
    let allocated = [
        entry(&a, Memory, &["x"], says(VISIBLE, gpu(seen_by_a).uuid.as_str())),
        entry(&b, Memory, &["y"], cdi_answer(Memory, &["y".to_owned()], 1)),
    ];
    let checked = checked(vec![a, b], &allocated, 1, Memory, &["y"]);
    assert!(checked.is_by_spec);
    assert_eq!(ending(&checked, Memory), expected);
}

/// The operator's choice holds for new pods; one that runs on such a GPU goes on.
#[test]
fn a_gpu_that_is_not_shared_takes_no_new_sharer() {
    let gpus = fleet(2);
    let only_first = crate::devices::device_ids::IdScheme::new(&[gpu(0)], 100, MemoryUnit::GIB).unwrap();
    let inventory = NodeInventory {
        gpus: gpus.gpus.iter().map(|entry| entry.device.clone()).collect(),
        ..NodeInventory::default()
    };
    let fleet = NodeFleet::new(inventory, only_first);
    let verdict = |pod: NodePod| {
        let pods = pods([pod.clone()]);
        let log = AllocateLog::default();
        let evidence = super::evidence(&pods, &fleet, &log, &[]);
        verify_or_swap(&evidence, &pod, &VisibleByType::new())
    };
    let Verification::Refused(refusal) = verdict(pod("a", 1, [shares(1)]).on([1])) else {
        panic!("it starts")
    };
    assert_eq!(
        refusal.to_string(),
        "GPU GPU-00000001-aaaa-bbbb-cccc-000000000001 of this node is not shared: --shared-devices of its plugin leaves it to pods that \
         take whole GPUs; delete the pod to reschedule it"
    );
    assert_eq!(
        verdict(running(pod("a", 1, [shares(1)]).on([1]))),
        Verification::Passed
    );
    assert_eq!(verdict(pod("a", 1, [shares(1)]).on([0])), Verification::Passed);
}

/// Another plugin gives devices by mounts or CDI devices of its own, or by a variable of another name.
#[rstest]
#[case::never_run(pod("a", 1, [units(1)]), "the devices of the container are not known")]
#[case::running(running(pod("a", 1, [units(1)])), "starts again")]
#[case::units_beside_shares(pod("a", 1, [ContainerRequest { shared: 1, ..units(1) }]), "the devices of the container are not known")]
fn an_answer_that_names_no_device_is_none(#[case] pod: NodePod, #[case] expected: &str) {
    let allocated = [entry(&pod, Memory, &["x"], says("OTHER", "0"))];
    let found = ending(&checked(vec![pod], &allocated, 0, Memory, &["x"]), Memory);
    assert!(found.starts_with(expected), "{found}");
}

/// Of a container that asks for units too, the answer about shares says nothing.
#[test]
fn an_answer_without_devices_is_valid_beside_memory_units() {
    let both = ContainerRequest {
        shared: 1,
        ..units(1)
    };
    let pod = pod("a", 1, [both]);
    let silent = entry(&pod, Shared, &["s"], ContainerAllocateResponse::default());
    let allocated = [
        silent,
        entry(&pod, Memory, &["m"], says(VISIBLE, gpu(0).uuid.as_str())),
    ];
    assert_eq!(
        ending(&checked(vec![pod], &allocated, 0, Shared, &["s"]), Shared),
        "starts"
    );
}

/// kubelet's file has another container of the pod already, and not yet this one, which this process has answered otherwise.
#[test]
fn an_answer_that_is_not_in_the_checkpoint_yet_counts() {
    let pod = pod("a", 1, [units(1), units(2)]);
    let allocated = [entry(&pod, Memory, &["x"], says(VISIBLE, gpu(0).uuid.as_str()))];
    let found = |minor: u32| {
        let answer = says(VISIBLE, gpu(minor).uuid.as_str());
        ending(
            &checked_after(
                vec![pod.clone()],
                &allocated,
                0,
                Memory,
                &["y", "z"],
                Some(answer),
            ),
            Memory,
        )
    };
    assert_eq!(found(0), "starts");
    assert!(
        found(1).contains("its containers were given different devices"),
        "{}",
        found(1)
    );
}

/// A pod of this name that is marked to see all GPUs and whose record names these.
fn marked(minors: impl IntoIterator<Item = u32>) -> NodePod {
    NodePod {
        sees_all: true,
        ..pod("a", 1, [shares(1)]).on(minors)
    }
}

/// The author of a pod writes the mark and may have written the record, and binds it past the scheduler.
#[rstest]
#[case::allowed(true, marked([0, 1]), "0,1", "starts", "")]
#[case::allowed_and_known_by_another_order(true, marked([1, 0]), "0,1", "starts", "")]
#[case::off(false, marked([0, 1]), "0,1", "annotation gpushare/all-devices: this node's device plugin runs without --allow-all-devices", "GPUAllDevicesForbidden")]
#[case::off_and_running(false, running(marked([0, 1])), "0,1", "annotation gpushare/all-devices: this node's device plugin", "GPUAllDevicesForbidden")]
#[case::off_and_without_record(false, marked([0]).unplaced(), "0", "annotation gpushare/all-devices: this node's", "GPUAllDevicesForbidden")]
#[case::partial(true, marked([1]), "1", "annotation gpushare/all-devices counts only where the record names every healthy GPU of the node: minor 1 is recorded, GPU-00000000-aaaa-bbbb-cccc-000000000000 is not", "GPUMismatch")]
#[case::forged(true, marked([1, 1]), "1", "annotation gpushare/all-devices counts only where", "GPUMismatch")]
#[case::forged_with_none(true, marked([0]).unplaced(), "0", "annotation scheduling.koordinator.sh/device-allocated names no GPU", "GPUNotPlaced")]
#[case::of_what_is_not_here(true, marked([0, 1, 7]), "0,1", "its record names", "GPUNotPlaced")]
fn the_mark_for_all_gpus(
    #[case] is_allowed: bool,
    #[case] pod: NodePod,
    #[case] seen: &str,
    #[case] expected: &str,
    #[case] reason: &str,
) {
    let uuids: Vec<String> = seen
        .split(',')
        .map(|minor| gpu(minor.parse().unwrap()).uuid.to_string())
        .collect();
    let ids = ["GPU-00000000-aaaa-bbbb-cccc-000000000000-_-3"];
    let allocated = [entry(&pod, Shared, &ids, says(VISIBLE, &uuids.join(",")))];
    let checked = checked_where(is_allowed, vec![pod], &allocated, 0, Shared, &ids, None);
    let found = ending(&checked, Shared);
    assert!(found.starts_with(expected), "{found}");
    if let Verification::Refused(refusal) = &checked.verification {
        assert_eq!(refusal.event_reason(), reason);
    }
}

/// The mark does not hold up the pod's requests for devices other than GPUs.
#[test]
fn the_all_devices_annotation_concerns_gpus_only() {
    let marked = NodePod {
        sees_all: true,
        ..pod("a", 1, [rdma(50)])
    };
    let checked = checked(vec![marked], &[], 0, Rdma, &["x"]);
    assert!(
        !matches!(
            checked.verification,
            Verification::Refused(StartRefusal::AllDevicesForbidden)
        ),
        "{:?}",
        checked.verification
    );
}
