//! Variables that containers set themselves, and limits of other pods' records.

use proto::kubelet::deviceplugin::DeviceSpec;
use rstest::rstest;

use super::*;
use crate::inject::content::{AssignedDevices, variable_answer};
use crate::node::pods::{NodePod, RecordedAmounts};
use crate::tests::builders::{adapter, fleet, gpu, pod, rdma, recipient, says, settings, shares};

const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// A pod on the GPUs 2 and 0 with 4 GiB and 30 percent of each.
fn two() -> NodePod {
    let mut pod = NodePod {
        is_limited: true,
        ..pod("a", 1, [shares(2)]).on([2, 0])
    };
    pod.placement.as_mut().unwrap().held = vec![
        RecordedAmounts {
            bytes: Some(4 << 30),
            ratio: None,
            core: 30
        };
        2
    ];
    pod
}

fn setting(pod: NodePod, container: &str, name: &str, value: Option<&str>) -> NodePod {
    let own = OwnVariable {
        container: container.to_owned(),
        name: name.to_owned(),
        value: value.map(str::to_owned),
    };
    NodePod {
        variables: [own].into(),
        ..pod
    }
}

/// The answer by variable for the pod's only container.
fn envs(pod: &NodePod) -> ContainerAllocateResponse {
    let (two, zero) = (gpu(2), gpu(0));
    variable_answer(
        &settings(),
        Some(&recipient(pod)),
        ExtendedResource::Shared,
        &AssignedDevices::Gpus(vec![&two, &zero]),
    )
}

/// Checks the environment of the pod's only container on a node with these devices.
fn check(
    pod: &NodePod,
    resource: ExtendedResource,
    answer: &ContainerAllocateResponse,
    fleet: &NodeFleet,
) -> Result<(), StartRefusal> {
    let ids = vec![String::new(); usize::try_from(pod.peak(resource)).unwrap()];
    let starting = StartingContainer::find(pod.clone(), resource, &ids, &[], Some(answer.clone()));
    check_environment(&starting, &Enforcements::default(), &settings(), fleet)
}

fn checked(pod: &NodePod, answer: &ContainerAllocateResponse) -> Result<(), String> {
    check(pod, ExtendedResource::Shared, answer, &fleet(3)).map_err(|refusal| refusal.to_string())
}

#[rstest]
#[case::something_else("A", Some("b"), true)]
#[case::all(VISIBLE, Some("all"), false)]
#[case::none(VISIBLE, Some("none"), false)]
#[case::nothing(VISIBLE, Some(""), false)]
#[case::from_elsewhere(VISIBLE, None, false)]
#[case::another(VISIBLE, Some("1"), false)]
#[case::one_of_them(VISIBLE, Some("2"), false)]
#[case::its_own(
    VISIBLE,
    Some("GPU-00000002-aaaa-bbbb-cccc-000000000002,GPU-00000000-aaaa-bbbb-cccc-000000000000"),
    true
)]
#[case::its_own_by_index(VISIBLE, Some("2,0"), true)]
// The limits go by the place of each.
#[case::its_own_the_other_way_round(VISIBLE, Some("0,2"), false)]
#[case::a_reference(VISIBLE, Some("$(OTHER)"), false)]
#[case::a_larger_limit("CUDA_DEVICE_MEMORY_LIMIT_1", Some("16384m"), false)]
#[case::its_own_limit("CUDA_DEVICE_MEMORY_LIMIT_1", Some("4096m"), true)]
#[case::no_limit("CUDA_DEVICE_SM_LIMIT", Some("0"), false)]
#[case::of_a_device_that_it_has_not("CUDA_DEVICE_MEMORY_LIMIT_2", Some("1m"), true)]
// Read only for devices that have no limit of their own.
#[case::of_all_devices("CUDA_DEVICE_MEMORY_LIMIT", Some("1m"), true)]
fn variables_that_the_pod_sets_itself_are_refused(
    #[case] name: &str,
    #[case] value: Option<&str>,
    #[case] starts: bool,
) {
    let pod = setting(two(), "s2", name, value);
    let found = checked(&pod, &envs(&pod));
    assert_eq!(found.is_ok(), starts, "{found:?}");
    let beside = setting(two(), "beside", name, value);
    assert_eq!(
        checked(&beside, &envs(&beside)),
        Ok(()),
        "it is another container's"
    );
}

#[test]
fn the_error_names_the_remedy() {
    let pod = setting(two(), "s2", "CUDA_DEVICE_SM_LIMIT", Some("100"));
    assert_eq!(
        checked(&pod, &envs(&pod)).unwrap_err(),
        "container \"s2\" sets CUDA_DEVICE_SM_LIMIT, which is not allowed in a pod that shares devices: it would override \"30\", which is \
         counted for it; remove it from the pod, or run this node's plugin with --inject=cdi"
    );
}

/// The driver's limits are refused whatever their value, in the words of the validating webhook.
#[test]
fn a_pod_must_not_set_the_driver_s_limits() {
    let pod = setting(two(), "s2", "NVIDIA_GPU_MEMORY_LIMIT", Some("4096"));
    let mut answer = envs(&pod);
    assert!(checked(&pod, &answer).is_ok(), "the driver does not limit it");
    answer
        .envs
        .insert("NVIDIA_GPU_MEMORY_LIMIT".to_owned(), "4096".to_owned());
    assert_eq!(
        checked(&pod, &answer).unwrap_err(),
        "container \"s2\" sets NVIDIA_GPU_MEMORY_LIMIT, which is not allowed in a pod that shares devices; remove it from the pod"
    );
}

#[test]
fn a_pod_without_limits_may_set_the_limit_variables() {
    let free = NodePod {
        is_limited: false,
        ..setting(two(), "s2", "CUDA_DEVICE_SM_LIMIT", Some("5"))
    };
    assert_eq!(checked(&free, &envs(&free)), Ok(()));
}

#[test]
fn a_pod_that_sees_all_gpus_may_choose_some() {
    let all = NodePod {
        sees_all: true,
        ..setting(two(), "s2", VISIBLE, Some("all"))
    };
    assert_eq!(checked(&all, &envs(&all)), Ok(()));
}

#[test]
fn devices_other_than_gpus_have_their_own_variable() {
    let pod = setting(
        pod("a", 1, [rdma(50)]),
        "r50",
        "GPUSHARE_RDMA_DEVICES",
        Some("0000:01:00.0"),
    );
    let answer = says("GPUSHARE_RDMA_DEVICES", "0000:00:00.0");
    assert!(matches!(
        check(&pod, ExtendedResource::Rdma, &answer, &fleet(1)),
        Err(StartRefusal::Overridden { .. })
    ));
}

/// Pods that ask for the same may be admitted in another order than they were placed in, and only one of them be limited.
#[test]
fn limits_are_those_of_the_matched_record() {
    let (limited, free) = (
        two(),
        NodePod {
            is_limited: false,
            ..two()
        },
    );
    assert_eq!(checked(&limited, &envs(&limited)), Ok(()));
    assert_eq!(
        checked(&limited, &envs(&free)).unwrap_err(),
        "kubelet gave it no limits, but its record says CUDA_DEVICE_MEMORY_LIMIT_0=4096m CUDA_DEVICE_MEMORY_LIMIT_1=4096m \
         CUDA_DEVICE_SM_LIMIT=30; delete the pod to reschedule it"
    );
    assert!(
        checked(&free, &envs(&limited)).is_err(),
        "it would be limited without having asked for it"
    );
    let mut larger = two();
    larger.placement.as_mut().unwrap().held[1].bytes = Some(8 << 30);
    assert!(checked(&larger, &envs(&limited)).is_err());
    assert_eq!(
        checked(&larger.at(PodStage::Running), &envs(&limited)),
        Ok(()),
        "it has started with them"
    );
}

/// After a reboot a file can be another function's. One that all adapters use says nothing.
#[rstest]
#[case::its_own(&["rdma_cm", "vf2"], true)]
#[case::only_what_all_use(&["rdma_cm"], true)]
#[case::another_function_s(&["rdma_cm", "vf3"], false)]
#[case::the_adapter_s(&["rdma_cm", "pf0"], false)]
#[case::another_adapter_s(&["pf1"], false)]
fn files_of_virtual_functions_are_those_of_the_record(#[case] nodes: &[&str], #[case] starts: bool) {
    let path = |name: &str| std::path::PathBuf::from(format!("/dev/infiniband/{name}"));
    let adapter = |minor: u32, own: &str| crate::devices::inventory::OtherDevice {
        device_nodes: vec![path("rdma_cm"), path(own)],
        function_nodes: ["vf2", "vf3"]
            .iter()
            .filter(|_| minor == 0)
            .map(|name| ((*name).to_owned(), vec![path("rdma_cm"), path(name)]))
            .collect(),
        ..adapter(minor)
    };
    let inventory = crate::devices::inventory::NodeInventory {
        others: vec![adapter(0, "pf0"), adapter(1, "pf1")],
        ..Default::default()
    };
    let fleet = NodeFleet::new(inventory, fleet(0).ids);
    let pod = pod("a", 1, [rdma(1)]).on_function(1, &adapter(0, "pf0"), "vf2");
    let spec = |name: &&str| {
        let path = path(name).display().to_string();
        DeviceSpec {
            container_path: path.clone(),
            host_path: path,
            permissions: "rw".to_owned(),
        }
    };
    let answer = ContainerAllocateResponse {
        devices: nodes.iter().map(spec).collect(),
        ..ContainerAllocateResponse::default()
    };
    assert_eq!(
        check(&pod, ExtendedResource::Rdma, &answer, &fleet).is_ok(),
        starts
    );
}
