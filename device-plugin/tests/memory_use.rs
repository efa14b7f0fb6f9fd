//! The memory that containers use, measured by the plugin's own task from a stand-in for libnvidia-ml and a directory of cgroups.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed step fails the test"
)]

#[path = "stand_in/machine.rs"]
#[expect(dead_code, reason = "not every test file uses all of the machine")]
mod machine;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use device_plugin::config::Config;
use device_plugin::devices::device_ids::IdScheme;
use device_plugin::devices::fleet::NodeFleet;
use device_plugin::inject::enforcement::{Enforcement, Enforcements, Level};
use device_plugin::node::pods::{NodePod, NodePods};
use device_plugin::publish::memory_use::{ContainerGpu, MeasuredMemory, measure_memory_use};
use device_plugin::start::node_state::NodeState;
use machine::{Machine, card};
use proto::memory_unit::MemoryUnit;
use proto::resource::ResourceNames;
use rstest::rstest;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::timeout;

/// GiB in bytes.
const GIB: u64 = 1 << 30;

/// The ID of the container of the pod with this number.
fn container_id(pod: u32) -> String {
    format!("{pod:064x}")
}

/// The cgroup's directory of the container of the pod with this number.
fn cgroup(machine: &Machine, pod: u32) -> PathBuf {
    let name = format!(
        "kubepods.slice/kubepods-pod{pod}.slice/cri-containerd-{}.scope",
        container_id(pod)
    );
    machine.path("sys/fs/cgroup").join(name)
}

/// Pod number n holds 4 GiB of GPU 0, as the API server shows it.
fn pod(number: u32) -> NodePod {
    let value = json!({
        "metadata": {"name": format!("p{number}"), "namespace": "default", "uid": number.to_string(), "annotations": {
            "ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "4", "ALIYUN_COM_GPU_MEM_DEV": "16",
            "ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": number.to_string(),
        }},
        "spec": {"nodeName": "n1", "containers": [
            {"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": "4"}}},
        ]},
        "status": {"phase": "Running", "containerStatuses": [
            {"name": "main", "containerID": format!("containerd://{}", container_id(number))},
        ]},
    });
    let pod = serde_json::from_value(value).unwrap();
    NodePod::from_pod(&pod, "n1", &ResourceNames::default()).unwrap()
}

/// A machine with two GPUs, of which the driver limits memory on the first, and three pods there: the driver limits the first
/// two, and the second by a soft limit alone. For the third it answers that no limit is set. The third has a process, and so has
/// the first, with other figures than the driver's.
fn machine() -> Machine {
    let machine = Machine::new(&[card(0), card(1)]);
    let [first, second, third] = [1, 2, 3].map(|pod| cgroup(&machine, pod).display().to_string());
    let limits = format!(
        "0 {first} 0 {} {} 0\n0 {second} {GIB} {max} {GIB} 0\n0 {third} 0 {max} {GIB} 0\n",
        4 * GIB,
        3 * GIB,
        max = u64::MAX
    );
    machine.set("memory-limits", Some(&limits));
    for pod in 1..=3 {
        fs::create_dir_all(cgroup(&machine, pod)).unwrap();
        fs::create_dir_all(machine.path(&format!("proc/{pod}"))).unwrap();
        let process = format!("0::/kubepods/pod{pod}/{}\n", container_id(pod));
        fs::write(machine.path(&format!("proc/{pod}/cgroup")), process).unwrap();
    }
    machine.run_processes(&[(0, 1, GIB / 2), (0, 3, 2 * GIB), (0, 9, 5), (1, 9, 6)]);
    machine
}

/// Figures in words: pod, GPU and GiB.
fn words(figures: &BTreeMap<ContainerGpu, u64>) -> String {
    let mut words = Vec::new();
    for (of, bytes) in figures {
        words.push(format!("{} {} {}", of.pod.as_str(), of.gpu.as_str(), bytes / GIB));
    }
    words.join(", ")
}

/// The first measurement by the plugin's task; none if nothing is known.
async fn measure(machine: &Machine, level: Level, processes: bool) -> Option<Arc<MeasuredMemory>> {
    let root = format!("--host-root={}", machine.path("").display());
    let config = Config::parse_from([
        "gpushare-device-plugin",
        "--node-name=n1",
        "--driver-limits",
        &root,
    ]);
    let inventory = machine.source().discover().unwrap();
    let mut levels = Enforcements::new();
    for gpu in &inventory.gpus {
        let enforcement = Enforcement {
            level: if gpu.minor == 0 { level } else { Level::None },
            reason: "DriverLimits",
            message: String::new(),
        };
        levels.insert(gpu.uuid.clone(), enforcement);
    }
    let ids = IdScheme::with_numa_nodes(false, &inventory.gpus, 100, MemoryUnit::GIB).unwrap();
    let (_fleet, fleet) = watch::channel(Arc::new(NodeFleet::new(inventory, ids)));
    let mut known = NodePods::default();
    known.reset((1..=3).map(pod));
    let (_pods, pods) = watch::channel(known);
    let (_levels, enforcements) = watch::channel(Arc::new(levels));
    let mut node = NodeState::new(config.settings(), fleet, pods, &machine.path("kubelet"));
    node.enforcements = enforcements;
    let procfs = processes.then(|| machine.path("proc"));
    let (sender, mut measured) = watch::channel(None);
    let task = tokio::spawn(measure_memory_use(
        Arc::new(node),
        machine.source(),
        procfs,
        sender,
    ));
    let waited = timeout(Duration::from_secs(30), measured.changed()).await;
    waited.expect("nothing was measured in time").unwrap();
    task.abort();
    measured.borrow().clone()
}

type Change = fn(&Machine);

/// The second pod has a soft limit alone. Without the PID namespace of the node only the driver knows the use. A process of a
/// container that the driver measures counts neither twice nor as unattributed. On a GPU with a lower level the driver is not
/// asked, an older driver cannot be, and without a cgroup it is not; then the processes count.
#[rstest]
#[case::driver_alone(Level::Driver, false, |_: &Machine| {}, Some(("1 GPU-0 3, 2 GPU-0 1", "1 GPU-0 4", None)))]
#[case::driver_and_processes(
    Level::Driver, true, |_: &Machine| {}, Some(("1 GPU-0 3, 2 GPU-0 1, 3 GPU-0 2", "1 GPU-0 4", Some(vec![5, 6])))
)]
#[case::lower_level(Level::None, false, |_: &Machine| {}, None)]
#[case::lower_level_and_processes(Level::None, true, |_: &Machine| {}, Some(("1 GPU-0 0, 3 GPU-0 2", "", Some(vec![5, 6]))))]
#[case::older_driver(Level::Driver, false, Machine::downgrade, None)]
#[case::no_cgroup(
    Level::Driver, true, |machine: &Machine| fs::remove_dir_all(machine.path("sys/fs")).unwrap(),
    Some(("1 GPU-0 0, 3 GPU-0 2", "", Some(vec![5, 6])))
)]
#[tokio::test]
async fn the_memory_of_containers(
    #[case] level: Level,
    #[case] processes: bool,
    #[case] change: Change,
    #[case] expected: Option<(&str, &str, Option<Vec<u64>>)>,
) {
    let machine = machine();
    change(&machine);
    let measured = measure(&machine, level, processes).await;
    let found = measured.map(|measured| {
        let others = measured
            .unattributed
            .as_ref()
            .map(|others| others.values().copied().collect());
        (words(&measured.by_container), words(&measured.limits), others)
    });
    assert_eq!(
        found,
        expected.map(|(used, limits, others)| (used.to_owned(), limits.to_owned(), others))
    );
}
