//! The GPU memory that each container uses: as the driver knows it for the container's cgroup where it limits the container,
//! else by the processes that the driver lists and the cgroups in which they run.
//!
//! The processes of other containers are visible only in the node's PID namespace (`hostPID`). Memory of a process that is in no
//! container of a known pod is not attributed: it may be of the node itself, or of a pod that requests no device.

mod container_cgroups;
pub mod overrun;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use memory_limits::CgroupMemory;
use proto::memory_unit::MemoryUnit;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::warn;

use crate::devices::fleet::{FleetDevice, NodeFleet};
use crate::devices::inventory::source::DeviceSource;
use crate::devices::inventory::{CgroupOnGpu, Gpu, InventoryError, PhysicalId, ProcessMemory};
use crate::inject::enforcement::limits::given_memory;
use crate::inject::enforcement::{Enforcements, is_by_driver};
use crate::logged_error::LoggedError;
use crate::node::pods::{NodePod, NodePods, PodUid, until_known};
use crate::start::node_state::NodeState;

use container_cgroups::{container_ids, find_cgroups};

/// Longest time between measurements.
const INTERVAL: Duration = Duration::from_secs(15);

/// Shortest time between measurements: containers may come in great numbers, and each measurement asks the driver about all GPUs.
const PAUSE: Duration = Duration::from_secs(1);

/// Time after which the last measurement is no longer shown, if the driver does not answer.
const LIMIT: Duration = Duration::from_secs(10);

/// A container on a GPU, by which its memory there is found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerGpu {
    /// The pod.
    pub pod: PodUid,
    /// The container's name.
    pub container: String,
    /// The GPU.
    pub gpu: PhysicalId,
}

impl ContainerGpu {
    fn new(pod: &PodUid, container: &str, gpu: &PhysicalId) -> Self {
        Self {
            pod: pod.clone(),
            container: container.to_owned(),
            gpu: gpu.clone(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GpuProcess {
    pub(crate) gpu: PhysicalId,
    /// Its number in this process's PID namespace; 0 for simulated processes.
    pub(crate) pid: u32,
    /// The pod and the name of its container; none for a process in no container of a known pod.
    pub(crate) container: Option<(PodUid, String)>,
}

/// The memory in use at one moment, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeasuredMemory {
    /// The bytes that each container uses on each GPU.
    pub by_container: BTreeMap<ContainerGpu, u64>,
    /// The processes on all GPUs, if they were measured.
    pub(crate) processes: BTreeSet<GpuProcess>,
    /// The bytes on each GPU of processes in no container of a known pod. `None` if the processes were not measured.
    pub unattributed: Option<BTreeMap<PhysicalId, u64>>,
    /// The IDs of the containers that existed when the processes were measured, and of those that the driver limits. If processes
    /// were measured, one of these containers that is not in `by_container` has no process on the GPU.
    pub containers: BTreeSet<String>,
    /// The limit, in bytes, on each container on each GPU, as read back from the driver.
    pub limits: BTreeMap<ContainerGpu, u64>,
}

impl MeasuredMemory {
    /// Attributes the memory of processes to containers. `cgroups_of` returns the text of a process's cgroup file.
    pub(crate) fn attribute(
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
        let (mut measured, mut unattributed) = (Self::default(), BTreeMap::<PhysicalId, u64>::new());
        for process in processes {
            let owner = if let Some(id) = &process.container {
                containers.get(id.as_str())
            } else {
                // With cgroup v1 the file has a line for each controller, of which several may name the container.
                let cgroups = cgroups_of(process.pid).unwrap_or_default();
                container_ids(&cgroups).find_map(|id| containers.get(id))
            };
            measured.processes.insert(GpuProcess {
                gpu: process.gpu.clone(),
                pid: process.pid,
                container: owner.map(|(pod, container)| ((*pod).clone(), (*container).clone())),
            });
            let bytes = match owner {
                Some((pod, container)) => {
                    let key = ContainerGpu::new(pod, container, &process.gpu);
                    measured.by_container.entry(key).or_default()
                }
                // A process that has ended since the driver listed it counts here too, until the next round.
                None => unattributed.entry(process.gpu.clone()).or_default(),
            };
            *bytes = bytes.saturating_add(process.bytes);
        }
        measured.unattributed = Some(unattributed);
        measured.containers = container_ids_of(pods);
        measured
    }

    /// The bytes that the container of `pod` named in `key` uses on the GPU; `None` if one of its instances was not measured.
    pub fn used(&self, pod: &NodePod, key: &ContainerGpu) -> Option<u64> {
        let mut is_created = false;
        for (id, name) in &pod.created {
            if *name == key.container {
                is_created = true;
                if !self.containers.contains(id) {
                    return None;
                }
            }
        }
        if !is_created {
            return None;
        }
        let no_process = self.unattributed.is_some().then_some(0);
        self.by_container.get(key).copied().or(no_process)
    }

    /// The processes on a GPU that are no longer in `later`; `None` unless both measurements have processes.
    pub(crate) fn ended(&self, later: &Self, gpu: &PhysicalId) -> Option<Vec<&GpuProcess>> {
        self.unattributed.as_ref().and(later.unattributed.as_ref())?;
        let is_gone = |process: &&GpuProcess| process.gpu == *gpu && !later.processes.contains(*process);
        Some(self.processes.iter().filter(is_gone).collect())
    }

    /// Notes the driver's figures for a container with this ID, which replace the sum over the container's processes.
    fn set(&mut self, (key, id): (ContainerGpu, String), used: u64, limit: Option<u64>) {
        self.containers.insert(id);
        if let Some(limit) = limit {
            self.limits.insert(key.clone(), limit);
        }
        self.by_container.insert(key, used);
    }
}

#[derive(Debug)]
pub(crate) struct ContainerMemory<'a> {
    pub(crate) pod: &'a NodePod,
    pub(crate) gpu: &'a Gpu,
    pub(crate) key: ContainerGpu,
    /// The bytes in use; `None` if they are not known.
    pub(crate) used: Option<u64>,
    /// The bytes of its share; `None` if it has none, or they are not known.
    pub(crate) given: Option<u64>,
}

/// The memory of each container that requests devices, on each GPU of its pod's record.
pub(crate) fn memory_of_containers<'a>(
    pods: &'a NodePods,
    fleet: &'a NodeFleet,
    unit: MemoryUnit,
    measured: &MeasuredMemory,
) -> Vec<ContainerMemory<'a>> {
    let mut containers = Vec::new();
    for pod in pods.live() {
        let Ok(placement) = &pod.placement else { continue };
        for container in &pod.containers {
            for FleetDevice { device: gpu, .. } in &fleet.gpus {
                if !placement.has_gpu(gpu) {
                    continue;
                }
                let key = ContainerGpu::new(&pod.uid, &container.name, &gpu.uuid);
                containers.push(ContainerMemory {
                    pod,
                    gpu,
                    used: measured.used(pod, &key),
                    given: given_memory(unit, container, placement, gpu, placement.gpus.len()),
                    key,
                });
            }
        }
    }
    containers
}

fn container_ids_of(pods: &NodePods) -> BTreeSet<String> {
    let created = pods.iter().flat_map(|pod| &pod.created);
    created.map(|(id, _)| id.clone()).collect()
}

/// The containers on each GPU where the enforcement level is `driver`, with their IDs: the driver may limit their memory there.
fn containers_by_driver(
    pods: &NodePods,
    fleet: &NodeFleet,
    levels: &Enforcements,
) -> Vec<(ContainerGpu, String)> {
    let mut containers = Vec::new();
    for pod in pods.live() {
        let Ok(placement) = &pod.placement else { continue };
        for (id, name) in &pod.created {
            // A container that requests no device gets none.
            if pod.container(name).is_none() {
                continue;
            }
            for FleetDevice { device: gpu, .. } in &fleet.gpus {
                if placement.has_gpu(gpu) && is_by_driver(levels, &gpu.uuid) {
                    containers.push((ContainerGpu::new(&pod.uid, name, &gpu.uuid), id.clone()));
                }
            }
        }
    }
    containers
}

/// Measures the memory once: by processes if `procfs` is given, and by cgroups where the driver limits containers. Returns the
/// memory in use, none if no source knows any, and the failure of a source. Blocks.
fn measure(
    node: &NodeState,
    source: &DeviceSource,
    procfs: Option<&Path>,
) -> (Option<MeasuredMemory>, Option<InventoryError>) {
    let (mut measured, mut problem) = (None, None);
    let processes = procfs.map(|procfs| (procfs, source.memory_use()));
    // Cloned, because files are read meanwhile and the watch of pods must not wait for them.
    let pods = node.pods.borrow().clone();
    match processes {
        Some((procfs, Ok(processes))) => {
            let by_process = MeasuredMemory::attribute(&processes, &pods, |pid| cgroups_of(procfs, pid));
            measured = Some(by_process);
        }
        Some((_, Err(error))) => problem = Some(error),
        None => {}
    }
    let fleet = node.fleet.borrow().clone();
    let containers = containers_by_driver(&pods, &fleet, &node.enforcements.borrow().clone());
    // The search reads the directories of all pods, so a node without such containers does not search.
    if containers.is_empty() {
        return (measured, problem);
    }
    let ids = containers.iter().map(|(_, id)| id.as_str()).collect();
    let directories = find_cgroups(&node.settings.sysfs_root.join("fs/cgroup"), &ids);
    let (mut owners, mut cgroups) = (Vec::new(), Vec::new());
    for (key, id) in containers {
        if let Some(cgroup) = directories.get(&id).cloned() {
            let gpu = key.gpu.clone();
            cgroups.push(CgroupOnGpu { gpu, cgroup });
            owners.push((key, id));
        }
    }
    if cgroups.is_empty() {
        return (measured, problem);
    }
    match source.cgroup_memory(&cgroups) {
        Ok((memory, failure)) => {
            problem = problem.or(failure);
            for (owner, memory) in owners.into_iter().zip(memory) {
                if let CgroupMemory::Limited { used, limit } = memory {
                    measured.get_or_insert_default().set(owner, used, limit);
                }
            }
        }
        Err(error) => problem = Some(error),
    }
    (measured, problem)
}

/// Measures until the task is dropped: once the pods are known, every 15 s, soon after a container comes or goes, and when
/// `NodeState::measure_again` is notified. Sends `None` while the use is not known. Without `procfs` no process is measured.
pub async fn measure_memory_use(
    node: Arc<NodeState>,
    source: DeviceSource,
    procfs: Option<PathBuf>,
    measured: watch::Sender<Option<Arc<MeasuredMemory>>>,
) {
    let mut logged = LoggedError::default();
    let mut pods = node.pods.clone();
    // Before that, all memory would count as that of unknown processes.
    until_known(&mut pods).await;
    loop {
        let started = Instant::now();
        // Taken before the measurement, so that a container that comes meanwhile leads to another one.
        let containers = container_ids_of(&pods.borrow());
        let (state, source, procfs) = (Arc::clone(&node), source.clone(), procfs.clone());
        let mut reading = spawn_blocking(move || measure(&state, &source, procfs.as_deref()));
        let read = if let Ok(read) = timeout_at(started + LIMIT, &mut reading).await {
            read
        } else {
            // The last measurement would pass for the present one.
            measured.send_replace(None);
            // Another call would hang as well.
            reading.await
        };
        match read {
            Ok((now, problem)) => {
                measured.send_replace(now.map(Arc::new));
                match problem {
                    None => logged.clear(),
                    Some(error) => logged.warn(&error, "cannot measure the memory that containers use"),
                }
            }
            Err(error) => {
                warn!(%error, "a measurement of memory has failed");
                measured.send_replace(None);
            }
        }
        sleep(PAUSE).await;
        let changed = pods.wait_for(|pods| container_ids_of(pods) != containers);
        tokio::select! {
            _ = timeout_at(started + INTERVAL, changed) => {}
            () = node.measure_again.notified() => {}
        }
    }
}

/// The text of the cgroup file of a process; none if the process has ended.
fn cgroups_of(procfs: &Path, pid: u32) -> Option<String> {
    std::fs::read_to_string(procfs.join(pid.to_string()).join("cgroup")).ok()
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::devices::inventory::source::FileSource;
    use crate::inject::enforcement::{Level, same_level};
    use crate::node::pods::PodStage;
    use crate::tests::builders::{fleet, gpu, node_state, pod, pods, units};

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

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
        assert_eq!(measured.unattributed, Some([(gpu(0).uuid, 101)].into()));
        let main = Some((PodUid::from("a"), "main".to_owned()));
        let of_main = measured
            .processes
            .iter()
            .filter(|process| process.container == main);
        assert_eq!(of_main.map(|process| process.pid).collect::<Vec<_>>(), [7, 8, 7]);
        assert_eq!(measured.processes.len(), 5);
    }

    /// The use of a container that was created after the measurement is not known, and is not 0.
    #[test]
    fn a_container_that_was_not_measured_has_no_figure() {
        let created = |ids: &[&str]| NodePod {
            created: ids.iter().map(|id| ((*id).to_owned(), "u1".to_owned())).collect(),
            ..pod("a", 1, [units(1)])
        };
        let of = ContainerGpu {
            pod: PodUid::from("a"),
            container: "u1".to_owned(),
            gpu: gpu(0).uuid,
        };
        let by_process = MeasuredMemory::attribute(&[], &pods([created(&[ID])]), |_| None);
        let mut by_driver = MeasuredMemory::default();
        by_driver.set((of.clone(), ID.to_owned()), 7, None);
        let found = |measured: &MeasuredMemory, ids: &[&str]| measured.used(&created(ids), &of);
        assert_eq!(found(&by_process, &[ID]), Some(0), "it has no process");
        assert_eq!(found(&by_process, &[]), None, "it is not created");
        assert_eq!(found(&by_process, &["restarted"]), None, "it was created later");
        assert_eq!(found(&by_driver, &[ID]), Some(7));
        assert_eq!(found(&by_driver, &["restarted"]), None);
    }

    /// All memory would be that of unknown processes while the pods are not known, and as long as a container is new.
    #[tokio::test(start_paused = true)]
    async fn measuring_begins_with_the_pods_and_follows_containers() {
        let dir = tempfile::tempdir().unwrap();
        let file = FileSource {
            path: dir.path().join("devices.json"),
            node: "n1".to_owned(),
            interval: Duration::from_secs(1),
        };
        let process = format!(r#"{{"memory": "1Gi", "container": "{ID}"}}"#);
        let uuid = gpu(0).uuid;
        let text = format!(
            r#"{{"gpus": [{{"uuid": "{uuid}", "minor": 0, "memory": "16Gi", "model": "T4", "processes": [{process}]}}]}}"#
        );
        std::fs::write(&file.path, text).unwrap();
        let (known, pods_watch) = watch::channel(NodePods::default());
        let mut node = node_state(fleet(1), NodePods::default());
        node.pods = pods_watch;
        let (sender, mut measured) = watch::channel(None);
        let procfs = Some(dir.path().to_owned());
        let node = Arc::new(node);
        let measuring = measure_memory_use(Arc::clone(&node), DeviceSource::File(file), procfs, sender);
        tokio::spawn(measuring);
        assert!(
            timeout(INTERVAL, measured.changed()).await.is_err(),
            "nothing is measured while the pods are not known"
        );
        known.send_replace(pods([pod("a", 1, [units(1)])]));
        measured.changed().await.unwrap();
        let first = measured.borrow_and_update().clone().unwrap();
        assert_eq!(first.unattributed, Some([(uuid, 1 << 30)].into()));
        let started = Instant::now();
        known.send_replace(pods([NodePod {
            created: vec![(ID.to_owned(), "u1".to_owned())],
            ..pod("a", 1, [units(1)])
        }]));
        measured.changed().await.unwrap();
        let second = measured.borrow_and_update().clone().unwrap();
        assert_eq!(second.unattributed, Some(BTreeMap::new()));
        node.measure_again.notify_one();
        measured.changed().await.unwrap();
        assert!(started.elapsed() < INTERVAL / 2, "{:?}", started.elapsed());
    }

    #[test]
    fn figures_of_the_driver_replace_those_of_processes() {
        let of = |container: &str| ContainerGpu {
            pod: PodUid::from("a"),
            container: container.to_owned(),
            gpu: gpu(0).uuid,
        };
        let mut measured = MeasuredMemory {
            by_container: [(of("both"), 5), (of("process"), 6)].into(),
            ..MeasuredMemory::default()
        };
        measured.set((of("both"), ID.to_owned()), 7, Some(9));
        measured.set((of("driver"), ID.to_owned()), 0, None);
        assert_eq!(
            measured.by_container,
            [(of("both"), 7), (of("driver"), 0), (of("process"), 6)].into()
        );
        assert_eq!(measured.limits, [(of("both"), 9)].into());
    }

    #[test]
    fn the_driver_is_asked_about_created_containers_on_its_gpus() {
        let (fleet, levels) = (fleet(2), same_level(Level::Driver, [gpu(0)]));
        let created = |names: &[&str]| {
            names
                .iter()
                .map(|name| (ID.to_owned(), (*name).to_owned()))
                .collect()
        };
        let known = pods([
            NodePod {
                created: created(&["u1", "without-a-request"]),
                ..pod("a", 1, [units(1)]).on([0, 1])
            },
            pod("not-created", 2, [units(1)]).on([0]),
            NodePod {
                created: created(&["u1"]),
                ..pod("on-another-gpu", 3, [units(1)]).on([1])
            },
            NodePod {
                created: created(&["u1"]),
                ..pod("ended", 4, [units(1)]).on([0]).at(PodStage::Terminal)
            },
        ]);
        let of = ContainerGpu {
            pod: PodUid::from("a"),
            container: "u1".to_owned(),
            gpu: gpu(0).uuid,
        };
        assert_eq!(
            containers_by_driver(&known, &fleet, &levels),
            [(of, ID.to_owned())]
        );
    }
}
