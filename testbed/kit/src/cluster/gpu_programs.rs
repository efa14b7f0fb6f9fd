//! The GPU memory that the programs in a simulated node's containers use, in the file from which the node's plugin reads its
//! simulated GPUs and their processes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use parking_lot::Mutex;
use proto::record::{DEVICE_ALLOCATED, DeviceAllocations};
use proto::resource::GPU_MEMORY;
use serde_json::{Value, json};

use crate::apiserver::{ApiObjects, object};
use crate::files;
use crate::kubelet::{ContainersHook, RunState, RuntimeContainer};

/// The processes on each GPU, by its UUID, as the file has them.
type Processes = BTreeMap<String, Vec<Value>>;

/// The plugin's inventory file.
#[derive(Debug)]
pub(super) struct InventoryFile {
    path: PathBuf,
    content: Mutex<Content>,
}

#[derive(Debug, Default)]
struct Content {
    /// The file without the processes of containers.
    machine: Value,
    processes: Processes,
}

impl InventoryFile {
    pub(super) fn at(path: PathBuf) -> Self {
        Self {
            path,
            content: Mutex::default(),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces everything in it but the processes of containers.
    pub(super) fn set_machine(&self, machine: Value) -> Result<()> {
        self.change(|content| content.machine = machine)
    }

    /// Replaces the processes of containers.
    fn set_processes(&self, processes: Processes) -> Result<()> {
        // Most changes of containers change nothing here, and the plugin reads the file after each write.
        if self.content.lock().processes == processes {
            return Ok(());
        }
        self.change(|content| content.processes = processes)
    }

    /// Changes the content and writes the file again.
    fn change(&self, change: impl FnOnce(&mut Content)) -> Result<()> {
        let mut content = self.content.lock();
        change(&mut content);
        let mut document = content.machine.clone();
        let gpus = document.get_mut("gpus").and_then(Value::as_array_mut);
        for gpu in gpus.into_iter().flatten() {
            if let Some(processes) = content.processes.get(object::text(gpu, "/uuid")) {
                object::make_object(gpu).insert("processes".to_owned(), Value::from(processes.clone()));
            }
        }
        files::replace(&self.path, &format!("{document:#}\n"))
    }
}

/// A hook that has each running container use memory: that which its program reports where containers run `gpu-probe`, else a
/// part of the memory that its pod holds.
pub(super) fn memory_use(api: ApiObjects, inventory: Arc<InventoryFile>, has_probe: bool) -> ContainersHook {
    Arc::new(move |containers| {
        let mut running = containers.to_vec();
        running.retain(|container| matches!(container.state, RunState::Running { .. }));
        let processes = if has_probe {
            probes(&running)
        } else {
            processes(&api, &running)
        };
        if let Err(error) = inventory.set_processes(processes) {
            tracing::error!(%error, "the memory in use does not follow the containers");
        }
    })
}

/// The processes of `gpu-probe`, which use the first GPU of their containers.
fn probes(running: &[&RuntimeContainer]) -> Processes {
    let mut processes = Processes::new();
    for container in running.iter().filter(|container| container.gpu_bytes > 0) {
        if let Some(uuid) = container.gpus.first() {
            let process = json!({"memory": container.gpu_bytes.to_string(), "container": container.id()});
            processes.entry(uuid.clone()).or_default().push(process);
        }
    }
    processes
}

/// A process on each GPU that a container sees.
fn processes(api: &ApiObjects, running: &[&RuntimeContainer]) -> Processes {
    let mut processes = Processes::new();
    for container in running {
        let n_containers = running
            .iter()
            .filter(|other| other.pod_uid == container.pod_uid && other.gpus == container.gpus)
            .count() as u64;
        let held = held_mib(api, container);
        for uuid in &container.gpus {
            let mib = held.get(uuid).copied().unwrap_or_default() * percent_in_use(&container.pod)
                / (100 * n_containers.max(1));
            let process = json!({"memory": format!("{mib}Mi"), "container": container.id()});
            processes.entry(uuid.clone()).or_default().push(process);
        }
    }
    processes
}

/// The MiB of each GPU that a container's pod holds by its record.
fn held_mib(api: &ApiObjects, container: &RuntimeContainer) -> BTreeMap<String, u64> {
    let pod = api.get("pods", &container.namespace, &container.pod);
    let pod = pod.unwrap_or_default();
    let annotation = format!("/metadata/annotations/{}", DEVICE_ALLOCATED.replace('/', "~1"));
    let record: DeviceAllocations = serde_json::from_str(object::text(&pod, &annotation)).unwrap_or_default();
    let mut held = BTreeMap::new();
    for part in record.get("gpu").into_iter().flatten() {
        let bytes = part
            .resources
            .get(GPU_MEMORY)
            .and_then(|amount| amount.unsigned());
        held.insert(part.id.clone(), bytes.unwrap_or_default() >> 20);
    }
    held
}

/// The part of its memory that a program uses: some use most of it, and some little. It depends on the pod's name alone, so that
/// every run shows the same.
fn percent_in_use(pod: &str) -> u64 {
    const LEAST: u64 = 35;
    const MOST: u64 = 95;
    let mut mixed = 0_u64;
    for byte in pod.bytes() {
        mixed = mixed.wrapping_mul(31).wrapping_add(u64::from(byte));
    }
    LEAST + mixed % (MOST - LEAST)
}
