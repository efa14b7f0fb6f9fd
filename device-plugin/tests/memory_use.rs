//! The memory that containers use, measured by the plugin's own task from a stand-in for libnvidia-ml and a directory of cgroups.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed step fails the test"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::machine::{Machine, card};
use clap::Parser;
use device_plugin::config::Config;
use device_plugin::devices::device_ids::IdScheme;
use device_plugin::devices::fleet::NodeFleet;
use device_plugin::inject::enforcement::{Enforcement, Enforcements, Level};
use device_plugin::node::pods::{NodePod, NodePods};
use device_plugin::publish::memory_use::{ContainerGpu, MeasuredMemory, measure_memory_use};
use device_plugin::start::node_state::NodeState;
use proto::memory_unit::MemoryUnit;
use proto::resource::ResourceNames;
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

/// A machine with two GPUs, of which the driver limits memory on the first, and three pods there: the driver limits the first two,
/// and the second by a soft limit alone. For the third it answers that no limit is set. The third has a process, and so has the
/// first, with other figures than the driver's.
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
fn words(figures: &BTreeMap<ContainerGpu, u64>) -> Vec<String> {
    let mut words = Vec::new();
    for (of, bytes) in figures {
        words.push(format!("{} {} {}", of.pod.as_str(), of.gpu.as_str(), bytes / GIB));
    }
    words
}

/// The use of the first measurement by the plugin's task, the limits that it read back, and the measurement; none if nothing is known.
async fn measure(
    machine: &Machine,
    level: Level,
    processes: bool,
) -> Option<(Vec<String>, Vec<String>, Arc<MeasuredMemory>)> {
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
    let measured = measured.borrow().clone()?;
    Some((words(&measured.by_container), words(&measured.limits), measured))
}

/// Without the PID namespace of the node only the driver knows the use, and nothing is said about other containers.
#[tokio::test]
async fn the_driver_alone_measures_the_containers_that_it_limits() {
    let machine = machine();
    let (used, limits, measured) = measure(&machine, Level::Driver, false).await.unwrap();
    assert_eq!(used, ["1 GPU-0 3", "2 GPU-0 1"]);
    assert_eq!(limits, ["1 GPU-0 4"], "the second has a soft limit alone");
    assert_eq!(measured.unattributed, None);
}

/// A process of a container that the driver measures counts neither twice nor as unattributed.
#[tokio::test]
async fn the_driver_is_believed_before_the_processes() {
    let machine = machine();
    let (used, limits, measured) = measure(&machine, Level::Driver, true).await.unwrap();
    assert_eq!(used, ["1 GPU-0 3", "2 GPU-0 1", "3 GPU-0 2"]);
    assert_eq!(limits, ["1 GPU-0 4"]);
    let others: Vec<_> = measured
        .unattributed
        .as_ref()
        .unwrap()
        .values()
        .copied()
        .collect();
    assert_eq!(others, [5, 6]);
}

/// On a GPU with a lower level the driver is not asked, and an older driver cannot be.
#[tokio::test]
async fn other_levels_and_older_drivers_leave_the_processes() {
    let machine = machine();
    assert!(measure(&machine, Level::None, false).await.is_none());
    let (used, limits, _) = measure(&machine, Level::None, true).await.unwrap();
    assert_eq!(used, ["1 GPU-0 0", "3 GPU-0 2"]);
    assert_eq!(limits, <[&str; 0]>::default());
    machine.downgrade();
    assert!(measure(&machine, Level::Driver, false).await.is_none());
}

/// A container whose cgroup is not found is measured by its processes.
#[tokio::test]
async fn without_a_cgroup_the_processes_are_counted() {
    let machine = machine();
    fs::remove_dir_all(machine.path("sys/fs")).unwrap();
    let (used, ..) = measure(&machine, Level::Driver, true).await.unwrap();
    assert_eq!(
        used,
        ["1 GPU-0 0", "3 GPU-0 2"],
        "no cgroup is found, and the processes are"
    );
}
