//! The GPU memory that each container uses, by the processes that the driver lists and the cgroups in which they run.
//!
//! A process of this node is visible only with the node's PID namespace (`hostPID`). Memory of a process that is in no container of
//! a known pod is not attributed: it may be of the node itself, or of a pod that requests no device.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::inventory::{DeviceSource, PhysicalId, ProcessMemory};
use crate::logged_error::LoggedError;
use crate::node_state::NodeState;
use crate::pods::{NodePods, PodUid};

/// Interval between measurements.
const INTERVAL: Duration = Duration::from_secs(15);

/// Time after which the last measurement is no longer shown, if the driver does not answer.
const LIMIT: Duration = Duration::from_secs(10);

/// Characters of a container's ID in a cgroup's name.
const ID_LENGTH: usize = 64;

/// One container's use of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerGpu {
    /// The pod.
    pub pod: PodUid,
    /// The container's name.
    pub container: String,
    /// The GPU.
    pub gpu: PhysicalId,
}

/// The memory in use at one moment, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeasuredMemory {
    /// The bytes that each container uses on each GPU.
    pub by_container: BTreeMap<ContainerGpu, u64>,
    /// The bytes on each GPU of processes in no container of a known pod.
    pub unattributed: BTreeMap<PhysicalId, u64>,
}

impl MeasuredMemory {
    /// Attributes the memory of processes to containers. `cgroups_of` returns the text of a process's cgroup file.
    pub fn attribute(
        processes: &[ProcessMemory],
        pods: &NodePods,
        cgroups_of: impl Fn(u32) -> Option<String>,
    ) -> Self {
        let mut containers = BTreeMap::new();
        for pod in pods.iter() {
            for (id, name) in &pod.created {
                containers.insert(id.as_str(), (&pod.uid, name));
            }
        }
        let mut measured = Self::default();
        for process in processes {
            let owner = if let Some(id) = &process.container {
                containers.get(id.as_str())
            } else {
                // With cgroup v1 the file has a line for each controller, of which several may name the container.
                let cgroups = cgroups_of(process.pid).unwrap_or_default();
                container_ids(&cgroups).find_map(|id| containers.get(id))
            };
            let bytes = match owner {
                Some((pod, container)) => {
                    let of = ContainerGpu {
                        pod: (*pod).clone(),
                        container: (*container).clone(),
                        gpu: process.gpu.clone(),
                    };
                    measured.by_container.entry(of).or_default()
                }
                // A process that has ended since the driver listed it counts here too, until the next round.
                None => measured.unattributed.entry(process.gpu.clone()).or_default(),
            };
            *bytes = bytes.saturating_add(process.bytes);
        }
        measured
    }
}

/// The container IDs in the text of a process's cgroup file: the ends of names such as `cri-containerd-ID.scope`, `crio-ID` and
/// `ID`.
fn container_ids(cgroups: &str) -> impl Iterator<Item = &str> {
    let names = cgroups.split(['/', '\n', ':']);
    names.filter_map(|name| {
        let id = name.trim_end_matches(".scope").rsplit('-').next()?;
        let is_id = id.len() == ID_LENGTH && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_id.then_some(id)
    })
}

/// Measures until the task is dropped. `None` is sent while the use is not known.
pub async fn measure_memory_use(
    node: Arc<NodeState>,
    source: DeviceSource,
    procfs: PathBuf,
    measured: watch::Sender<Option<Arc<MeasuredMemory>>>,
) {
    let mut logged = LoggedError::default();
    loop {
        let source = source.clone();
        let mut reading = spawn_blocking(move || source.memory_use());
        let read = if let Ok(read) = timeout(LIMIT, &mut reading).await {
            read
        } else {
            // The last measurement would pass for the present one.
            measured.send_replace(None);
            // Another call would hang as well.
            reading.await
        };
        match read {
            Ok(Ok(processes)) => {
                // Cloned, because the files of processes are read meanwhile and the watch of pods must not wait for them.
                let pods = node.pods.borrow().clone();
                let now = MeasuredMemory::attribute(&processes, &pods, |pid| cgroups_of(&procfs, pid));
                measured.send_replace(Some(Arc::new(now)));
                logged.clear();
            }
            Ok(Err(error)) => {
                measured.send_replace(None);
                if let Some(error) = logged.changed(&error) {
                    warn!(error, "cannot measure the memory that containers use");
                }
            }
            Err(error) => warn!(%error, "a measurement of memory has failed"),
        }
        sleep(INTERVAL).await;
    }
}

fn cgroups_of(procfs: &Path, pid: u32) -> Option<String> {
    std::fs::read_to_string(procfs.join(pid.to_string()).join("cgroup")).ok()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::pods::NodePod;
    use crate::tests::builders::{gpu, pod, pods, units};

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[rstest]
    #[case::systemd(
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-ID.scope\n",
        1
    )]
    #[case::crio("0::/kubepods.slice/kubepods-pod1_2.slice/crio-ID.scope\n", 1)]
    #[case::cgroupfs("0::/kubepods/besteffort/pod1-2/ID\n", 1)]
    #[case::seen_from_another_cgroup("0::/../../kubepods-pod1_2.slice/cri-containerd-ID.scope\n", 1)]
    #[case::below_the_container("0::/kubepods/pod1-2/ID/init\n", 1)]
    #[case::cgroup_v1("5:cpu:/kubepods/pod1-2/ID\n4:memory:/kubepods/pod1-2/ID\n", 2)]
    #[case::a_service("0::/system.slice/nvidia-persistenced.service\n", 0)]
    #[case::nothing("", 0)]
    fn container_ids_of_cgroups(#[case] cgroups: &str, #[case] n: usize) {
        let cgroups = cgroups.replace("ID", ID);
        assert_eq!(container_ids(&cgroups).collect::<Vec<_>>(), vec![ID; n]);
    }

    #[test]
    fn memory_of_unknown_processes_is_a_figure_of_its_own() {
        let known = NodePod {
            created: vec![(ID.to_owned(), "main".to_owned())],
            ..pod("a", 1, [units(1)])
        };
        let process = |minor, pid, bytes| ProcessMemory {
            gpu: gpu(minor).uuid,
            pid,
            container: None,
            bytes,
        };
        let processes = [
            process(0, 7, 10),
            process(0, 8, 5),
            process(1, 7, 1),
            process(0, 9, 100),
            process(0, 10, 1),
        ];
        let cgroups_of = |pid| match pid {
            7 | 8 => Some(format!("0::/kubepods/pod1/{ID}\n")),
            9 => Some(format!("0::/kubepods/pod2/{}\n", ID.replace('0', "f"))),
            _ => None,
        };
        let measured = MeasuredMemory::attribute(&processes, &pods([known]), cgroups_of);
        let found: Vec<_> = measured
            .by_container
            .iter()
            .map(|(of, bytes)| {
                (
                    of.pod.as_str(),
                    of.container.as_str(),
                    of.gpu == gpu(0).uuid,
                    *bytes,
                )
            })
            .collect();
        assert_eq!(found, [("a", "main", true, 15), ("a", "main", false, 1)]);
        assert_eq!(measured.unattributed, [(gpu(0).uuid, 101)].into());
    }
}
