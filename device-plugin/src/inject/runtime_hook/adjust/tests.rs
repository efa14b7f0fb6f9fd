//! Decisions about containers, in short texts: GPUs are called G0, G1, and so on.

use std::sync::LazyLock;

use proto::nri::api::LinuxContainer;
use proto::record::{DRIVER_MEMORY_LIMIT, DRIVER_MEMORY_REQUEST};
use rstest::rstest;

use super::*;
use crate::inject::enforcement::{Level, same_level};
use crate::node::pods::{NodePod, NodePods};
use crate::tests::builders::{self, fleet, gpu, pod, pods, shares, units, whole};

/// Spells out the GPUs of a text.
fn spelled(text: &str) -> String {
    (0..4).fold(text.to_owned(), |text, n| {
        text.replace(&format!("G{n}"), gpu(n).uuid.as_str())
    })
}

fn shortened(text: &str) -> String {
    (0..4).fold(text.to_owned(), |text, n| {
        text.replace(gpu(n).uuid.as_str(), &format!("G{n}"))
    })
}

fn container(name: &str, env: &[&str], nodes: &[u32]) -> Container {
    let node = |minor: &u32| LinuxDevice {
        path: format!("/dev/nvidia{minor}"),
        ..LinuxDevice::default()
    };
    let linux = Some(LinuxContainer {
        devices: nodes.iter().map(node).collect(),
    });
    let env = env.iter().map(|pair| spelled(pair)).collect();
    Container {
        name: name.to_owned(),
        env,
        linux,
        ..Container::default()
    }
}

fn sandbox(uid: &str) -> PodSandbox {
    PodSandbox {
        uid: uid.to_owned(),
        namespace: "default".to_owned(),
        name: uid.to_owned(),
        ..PodSandbox::default()
    }
}

fn settings() -> NodeSettings {
    NodeSettings {
        device_root: "/nowhere".into(),
        ..builders::settings()
    }
}

/// The view of a node by variable and without enforcement, where every pod is restricted.
fn view<'a>(pods: &'a NodePods, fleet: &'a NodeFleet, settings: &'a NodeSettings) -> HookInputs<'a> {
    static NO_LEVELS: LazyLock<Enforcements> = LazyLock::new(Enforcements::default);
    HookInputs {
        pods,
        fleet,
        settings,
        mode: Mode::Envvar,
        enforcements: &NO_LEVELS,
        unrestricted: &[],
    }
}

fn text_of(decision: HookDecision) -> String {
    let change = match decision {
        HookDecision::Ignore => return "leave".to_owned(),
        HookDecision::Refuse(problem) => return format!("refuse: {problem}"),
        HookDecision::Unknown(problem) => return format!("unknown: {problem}"),
        HookDecision::Adjust(change) if change.is_empty() => return "right".to_owned(),
        HookDecision::Adjust(change) => change,
    };
    let adjustment = change.into_adjustment();
    let env = adjustment
        .env
        .iter()
        .map(|pair| format!("{}={}", pair.key, pair.value));
    let nodes = adjustment
        .linux
        .iter()
        .flat_map(|linux| &linux.devices)
        .map(|device| device.path.clone());
    shortened(&env.chain(nodes).collect::<Vec<_>>().join(" "))
}

fn decide(pod: NodePod, container: &Container, mode: Mode) -> String {
    let sandbox = sandbox(pod.uid.as_str());
    let (mut pods, fleet, settings) = (pods([pod]), fleet(4), settings());
    pods.set_swapped(BTreeMap::new());
    let inputs = HookInputs {
        mode,
        ..view(&pods, &fleet, &settings)
    };
    text_of(inputs.decide(&sandbox, container))
}

/// A pod that asks for one whole GPU and whose record says G1. Where the container was made with a CDI device of this plugin, the
/// vendor's variable stays void, and nodes are exchanged.
#[rstest]
#[case::the_vendor_chose_another(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=G0", "A=b"], &[], "NVIDIA_VISIBLE_DEVICES=G1")]
#[case::the_vendor_chose_the_same(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=G1"], &[], "right")]
#[case::another_by_index(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=0"], &[], "NVIDIA_VISIBLE_DEVICES=G1")]
#[case::the_same_by_index(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=1"], &[], "right")]
#[case::the_image_says_all(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=all"], &[], "NVIDIA_VISIBLE_DEVICES=G1")]
#[case::more_than_recorded(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=G1,G2"], &[], "NVIDIA_VISIBLE_DEVICES=G1")]
#[case::nobody_said_anything(Mode::Envvar, &[], &[], "NVIDIA_VISIBLE_DEVICES=G1")]
#[case::void_without_nodes(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=void"], &[], "NVIDIA_VISIBLE_DEVICES=G1")]
#[case::right_by_nodes(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=void"], &[1], "right")]
#[case::another_by_nodes(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=void"], &[2], "-/dev/nvidia2")]
#[case::another_by_both(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=G2"], &[2], "NVIDIA_VISIBLE_DEVICES=G1 -/dev/nvidia2")]
#[case::more_nodes_than_recorded(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=G1"], &[0, 1, 3], "-/dev/nvidia0 -/dev/nvidia3")]
#[case::the_pod_sets_it_too(
    Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=G1", "NVIDIA_VISIBLE_DEVICES=all"], &[],
    "refuse: its container w1 sets NVIDIA_VISIBLE_DEVICES itself, from which it reads its devices; leave that out of the pod"
)]
#[case::the_pod_sets_it_rightly(Mode::Envvar, &["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=G1"], &[], "right")]
#[case::right_by_cdi(Mode::Cdi, &["NVIDIA_VISIBLE_DEVICES=void", "GPUSHARE_GPU_DEVICES=G1"], &[1], "right")]
#[case::right_by_cdi_without_nodes(Mode::Cdi, &["NVIDIA_VISIBLE_DEVICES=void", "GPUSHARE_GPU_DEVICES=G1"], &[], "right")]
#[case::another_by_cdi(
    Mode::Cdi, &["NVIDIA_VISIBLE_DEVICES=void", "GPUSHARE_GPU_DEVICES=G2"], &[2], "GPUSHARE_GPU_DEVICES=G1 -/dev/nvidia2"
)]
#[case::the_vendors_by_cdi(Mode::Cdi, &["NVIDIA_VISIBLE_DEVICES=void"], &[2], "-/dev/nvidia2")]
#[case::by_variable_alone(Mode::Cdi, &["NVIDIA_VISIBLE_DEVICES=G0"], &[], "NVIDIA_VISIBLE_DEVICES=G1")]
fn whole_gpus(#[case] mode: Mode, #[case] env: &[&str], #[case] nodes: &[u32], #[case] expected: &str) {
    let pod = pod("p", 1, [whole(1)]).on([1]);
    assert_eq!(decide(pod, &container("w1", env, nodes), mode), expected);
}

/// NVIDIA's hook reads the first value of several, and the runtime leaves one when a plugin sets the variable: the last.
#[rstest]
#[case::by_the_spec_alone(&["LIMIT=8192", "REQUEST=0"], "right")]
#[case::the_image_says_more(&["LIMIT=99999", "REQUEST=9", "LIMIT=8192", "REQUEST=0"], "LIMIT=8192 REQUEST=0")]
#[case::the_image_says_one(&["LIMIT=99999", "LIMIT=8192", "REQUEST=0"], "LIMIT=8192")]
#[case::the_pod_comes_last(
    &["LIMIT=8192", "REQUEST=0", "LIMIT=99999"],
    "refuse: its container s1 sets LIMIT itself, from which it reads its devices; leave that out of the pod"
)]
fn limits_are_those_of_the_container_s_part(#[case] env: &[&str], #[case] expected: &str) {
    let long = |text: &str| {
        text.replace("LIMIT", DRIVER_MEMORY_LIMIT)
            .replace("REQUEST", DRIVER_MEMORY_REQUEST)
    };
    let given = ["NVIDIA_VISIBLE_DEVICES=void", "GPUSHARE_GPU_DEVICES=G1"];
    let env: Vec<String> = given.iter().chain(env).map(|pair| long(pair)).collect();
    let env: Vec<&str> = env.iter().map(String::as_str).collect();
    let half = ContainerRequest {
        memory_ratio: 50,
        ..shares(1)
    };
    let pod = pod("p", 1, [half]).on([1]);
    let sandbox = sandbox(pod.uid.as_str());
    let (mut pods, fleet, settings) = (pods([pod]), fleet(4), settings());
    pods.set_swapped(BTreeMap::new());
    let inputs = HookInputs {
        mode: Mode::Cdi,
        enforcements: &same_level(Level::Driver, [gpu(1)]),
        ..view(&pods, &fleet, &settings)
    };
    let found = text_of(inputs.decide(&sandbox, &container("s1", &env, &[1])));
    assert_eq!(found, long(expected));
}

/// The answer said void and named a CDI device, and nothing of that device is there.
#[test]
fn a_runtime_that_drops_cdi_devices_is_detected() {
    let found = decide(
        pod("p", 1, [shares(1)]).on([1]),
        &container("s1", &["NVIDIA_VISIBLE_DEVICES=void"], &[]),
        Mode::Cdi,
    );
    assert!(
        found.starts_with("refuse: the container runtime has dropped its CDI devices"),
        "{found}"
    );
    let by_variable = decide(
        pod("p", 1, [shares(1)]).on([1]),
        &container("s1", &["NVIDIA_VISIBLE_DEVICES=G1"], &[]),
        Mode::Cdi,
    );
    assert_eq!(by_variable, "right", "it was admitted before the mode changed");
}

/// Containers that ask for nothing: beside one that does, in a pod of their own, and in one that the watch has not shown yet.
#[rstest]
#[case::an_image_for_gpus(&["NVIDIA_VISIBLE_DEVICES=all"], "void", "void", "void")]
#[case::an_old_image_for_gpus(&["CUDA_VERSION=9.0"], "void", "void", "void")]
#[case::a_newer_image_without_the_variable(&["CUDA_VERSION=12.4", "NVIDIA_REQUIRE_CUDA=cuda>=12.4"], "leave", "leave", "leave")]
#[case::a_cdi_name(&["NVIDIA_VISIBLE_DEVICES=management.nvidia.com/gpu=all"], "void", "void", "void")]
#[case::a_gpu_by_name(&["NVIDIA_VISIBLE_DEVICES=G2"], "void", "void", "leave")]
#[case::a_gpu_by_index(&["NVIDIA_VISIBLE_DEVICES=7, 1"], "void", "void", "leave")]
#[case::an_instance_of_another_plugin(&["NVIDIA_VISIBLE_DEVICES=MIG-1234"], "leave", "leave", "leave")]
#[case::none(&["NVIDIA_VISIBLE_DEVICES=none", "CUDA_VERSION=12.0"], "leave", "leave", "leave")]
#[case::nothing(&["A=b"], "leave", "leave", "leave")]
fn who_asks_for_nothing_sees_nothing(
    #[case] env: &[&str],
    #[case] sidecar: &str,
    #[case] alone: &str,
    #[case] unknown: &str,
) {
    let mut all = pods([pod("p", 1, [units(2)]).on([3])]);
    all.set_swapped(BTreeMap::new());
    all.note_without_requests("alone".into(), None);
    let (fleet, settings) = (fleet(4), settings());
    let unrestricted = ["kube-system".to_owned()];
    let view = HookInputs {
        unrestricted: &unrestricted,
        ..view(&all, &fleet, &settings)
    };
    for (uid, expected) in [("p", sidecar), ("alone", alone), ("unknown", unknown)] {
        let found = text_of(view.decide(&sandbox(uid), &container("c", env, &[])));
        assert_eq!(
            found.replace("NVIDIA_VISIBLE_DEVICES=void", "void"),
            expected,
            "{uid}"
        );
        let operators = PodSandbox {
            namespace: "kube-system".to_owned(),
            ..sandbox(uid)
        };
        assert_eq!(
            text_of(view.decide(&operators, &container("c", env, &[]))),
            "leave"
        );
    }
}

/// Pods of ours: all that their answer would have said, where it is not there.
#[rstest]
#[case::units(
    pod("p", 1, [units(2)]).on([3]), "u2",
    "ALIYUN_COM_GPU_MEM_CONTAINER=2 ALIYUN_COM_GPU_MEM_DEV=16 ALIYUN_COM_GPU_MEM_IDX=3 ALIYUN_COM_GPU_MEM_POD=2 NVIDIA_VISIBLE_DEVICES=G3"
)]
#[case::shares_of_two(pod("p", 1, [shares(2)]).on([0, 2]), "s2", "NVIDIA_VISIBLE_DEVICES=G0,G2")]
#[case::no_record(pod("p", 1, [whole(1)]).unplaced(), "w1", "leave")]
#[case::a_gpu_that_is_not_there(
    pod("p", 1, [whole(1)]).on([9]), "w1", "refuse: its record names minor 9, which this node does not have; delete the pod to reschedule it"
)]
fn pods_of_all_kinds(#[case] pod: NodePod, #[case] name: &str, #[case] expected: &str) {
    assert_eq!(
        decide(
            pod,
            &container(name, &["NVIDIA_VISIBLE_DEVICES=G1"], &[]),
            Mode::Envvar
        ),
        expected
    );
}

#[test]
fn the_order_of_gpus_in_a_variable_does_not_matter() {
    let container = container("s2", &["NVIDIA_VISIBLE_DEVICES=G2,G0"], &[]);
    let pod = pod("p", 1, [shares(2)]).on([0, 2]);
    assert_eq!(decide(pod, &container, Mode::Envvar), "right");
}

#[rstest]
#[case::with_record_and_device(
    true,
    "NVIDIA_VISIBLE_DEVICES=G0",
    "unknown: it has a record, and this node's plugin"
)]
#[case::with_record_and_an_image_for_gpus(true, "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=void")]
#[case::with_record_and_nothing(true, "A=b", "leave")]
#[case::pinned_by_hand(false, "NVIDIA_VISIBLE_DEVICES=G0", "leave")]
fn containers_of_unknown_pods_are_hidden_from_gpus_or_wait(
    #[case] has_record: bool,
    #[case] env: &str,
    #[case] expected: &str,
) {
    let mut sandbox = sandbox("unknown");
    if has_record {
        sandbox
            .annotations
            .insert(DEVICE_ALLOCATED.to_owned(), "{}".to_owned());
    }
    let (pods, fleet, settings) = (pods([]), fleet(4), settings());
    let view = view(&pods, &fleet, &settings);
    let found = text_of(view.decide(&sandbox, &container("c", &[env], &[])));
    assert!(found.starts_with(expected), "{found}");
}

/// A container of this plugin starts only once swapped records are known, which takes a moment after a restart.
#[test]
fn a_container_waits_until_swapped_records_are_known() {
    let (all, fleet, settings) = (
        pods([pod("p", 1, [units(2)]), pod("w", 1, [whole(1)])]),
        fleet(4),
        settings(),
    );
    let view = view(&all, &fleet, &settings);
    let of = |view: &HookInputs<'_>, uid: &str, name: &str| {
        text_of(view.decide(&sandbox(uid), &container(name, &[], &[])))
    };
    assert!(of(&view, "p", "u2").starts_with("unknown: it is not known yet which pods have swapped"));
    assert_eq!(of(&view, "w", "w1"), "NVIDIA_VISIBLE_DEVICES=G0");
    let mut known = all.clone();
    known.set_swapped(BTreeMap::new());
    assert!(of(&HookInputs { pods: &known, ..view }, "p", "u2").ends_with("NVIDIA_VISIBLE_DEVICES=G0"));
}

/// The numbers of a device that every system has; a file that is no device is none.
#[test]
fn device_numbers_are_read_from_device_files() {
    let null = device_node(Path::new("/"), Path::new("/dev/null")).unwrap();
    assert_eq!(
        (null.path.as_str(), null.r#type.as_str(), null.major, null.minor),
        ("/dev/null", "c", 1, 3)
    );
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    assert_eq!(device_node(dir.path(), Path::new("/file")), None);
    assert_eq!(device_node(dir.path(), Path::new("/absent")), None);
}
