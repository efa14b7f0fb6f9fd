//! The container runtime's table of containers. A container "runs" by having its final environment recorded.
//!
//! The table outlives the kubelet process, as containers do, and knows no more of a pod than its identity.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::pod::{ContainerSpec, ContainerType, KubeletPod};

/// The variable in which a container on a machine with GPUs prints its device nodes, separated by commas.
pub const DEVICE_NODES: &str = "DEVICE_NODES";

/// Exit code of a container that is killed.
const KILLED: i32 = 137;

/// The state of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunState {
    /// It has not been created, or could not be.
    Waiting {
        /// As in pod status, e.g. `CreateContainerConfigError`.
        reason: String,
        /// The reason in words.
        message: String,
    },
    /// It runs.
    Running {
        /// Time of the start.
        since: Timestamp,
    },
    /// It ended.
    Exited {
        /// Its exit code.
        code: i32,
        /// Time of the start.
        started: Timestamp,
        /// Time of the end.
        finished: Timestamp,
    },
}

/// A container as its last start left it.
#[derive(Clone, Debug)]
pub struct RuntimeContainer {
    /// Namespace of its pod.
    pub namespace: String,
    /// Name of its pod.
    pub pod: String,
    /// UID of its pod.
    pub pod_uid: String,
    /// Its own name.
    pub name: String,
    /// The part of the pod's life in which it runs.
    pub kind: ContainerType,
    /// Its state.
    pub state: RunState,
    /// The number of its starts.
    pub starts: u32,
    /// Its final environment.
    pub env: BTreeMap<String, String>,
    /// The device IDs it holds, sorted, by resource.
    pub devices: BTreeMap<String, Vec<String>>,
    /// The CDI devices that plugins named.
    pub cdi_devices: Vec<String>,
    /// CDI devices that the runtime injected from an outdated spec: it was gone or had other content by then.
    pub stale_devices: Vec<String>,
    /// Container paths of device nodes, from plugins and CDI specs.
    pub device_nodes: Vec<String>,
    /// Container paths of mounts, from plugins and CDI specs.
    pub mounts: Vec<String>,
    /// Command lines of the hooks of CDI specs.
    pub hooks: Vec<String>,
    /// UUIDs of the GPUs whose device nodes it has, sorted.
    pub gpus: Vec<String>,
    /// Bytes of the first of these GPUs' memory that the container's program, `gpu-probe`, has reported to use.
    pub gpu_bytes: u64,
}

impl RuntimeContainer {
    /// Its ID in pod status, without the name of the runtime.
    pub(crate) fn id(&self) -> String {
        format!("{}/{}/{}", self.pod_uid, self.name, self.starts)
    }

    /// A container of this pod that was not started yet.
    pub(crate) fn never_started(pod: &KubeletPod, container: &ContainerSpec, state: RunState) -> Self {
        Self {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            pod_uid: pod.uid.clone(),
            name: container.name.clone(),
            kind: container.kind,
            state,
            starts: 0,
            env: BTreeMap::new(),
            devices: BTreeMap::new(),
            cdi_devices: Vec::new(),
            stale_devices: Vec::new(),
            device_nodes: Vec::new(),
            mounts: Vec::new(),
            hooks: Vec::new(),
            gpus: Vec::new(),
            gpu_bytes: 0,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct StartAttempts {
    pub(crate) refusals: Vec<String>,
    pub(crate) spent: StartTimes,
}

/// The time that attempts to start a container have taken.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StartTimes {
    pub(crate) total: Duration,
    /// `PreStartContainer` of plugins.
    pub(crate) pre_start: Duration,
    /// The injection of CDI devices.
    pub(crate) injection: Duration,
}

/// A function that gets all containers of the node after each change of one, before any client can see the change.
pub type ContainersHook = Arc<dyn Fn(&[&RuntimeContainer]) + Send + Sync>;

/// All containers of the node.
pub(crate) struct Runtime {
    /// By the UID of the pod and the name of the container.
    containers: Mutex<BTreeMap<(String, String), RuntimeContainer>>,
    /// Starts that have been tried and have not succeeded yet, by the same.
    attempts: Mutex<BTreeMap<(String, String), StartAttempts>>,
    hook: ContainersHook,
    changed: watch::Sender<()>,
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Runtime")
    }
}

impl Runtime {
    pub(crate) fn new(changed: watch::Sender<()>, hook: ContainersHook) -> Self {
        Self {
            containers: Mutex::default(),
            attempts: Mutex::default(),
            hook,
            changed,
        }
    }

    /// Changes containers, and passes the change to the hook and to those who wait.
    fn change<T>(&self, change: impl FnOnce(&mut BTreeMap<(String, String), RuntimeContainer>) -> T) -> T {
        let mut containers = self.containers.lock();
        let changed = change(&mut containers);
        (self.hook)(&containers.values().collect::<Vec<_>>());
        drop(containers);
        self.changed.send_replace(());
        changed
    }

    pub(crate) fn state(&self, uid: &str, container: &str) -> Option<RunState> {
        let containers = self.containers.lock();
        Some(
            containers
                .get(&(uid.to_owned(), container.to_owned()))?
                .state
                .clone(),
        )
    }

    pub(crate) fn of_pod(&self, uid: &str) -> BTreeMap<String, RuntimeContainer> {
        let mut of_pod = BTreeMap::new();
        for ((of, name), container) in self.containers.lock().range((uid.to_owned(), String::new())..) {
            if of != uid {
                break;
            }
            of_pod.insert(name.clone(), container.clone());
        }
        of_pod
    }

    pub(crate) fn all(&self) -> Vec<RuntimeContainer> {
        self.containers.lock().values().cloned().collect()
    }

    /// Records a container, in place of its earlier start.
    pub(crate) fn put(&self, container: RuntimeContainer) {
        let key = (container.pod_uid.clone(), container.name.clone());
        self.change(|containers| containers.insert(key, container));
    }

    /// Changes the state of a container; false if there is no such container.
    pub(crate) fn set_state(&self, uid: &str, container: &str, state: RunState) -> bool {
        self.change(|containers| {
            let found = containers.get_mut(&(uid.to_owned(), container.to_owned()));
            found.map(|found| found.state = state).is_some()
        })
    }

    /// Records the memory that the program of a container uses, unless the container has been started again since.
    pub(crate) fn set_gpu_bytes(&self, started: &RuntimeContainer, bytes: u64) {
        let key = (started.pod_uid.clone(), started.name.clone());
        self.change(|containers| {
            if let Some(found) = containers.get_mut(&key)
                && found.starts == started.starts
            {
                found.gpu_bytes = bytes;
            }
        });
    }

    pub(crate) fn kill(&self, uid: &str) {
        let finished = Timestamp::now();
        self.change(|containers| {
            for ((of, _), container) in containers {
                if let RunState::Running { since } = container.state
                    && of == uid
                {
                    container.state = RunState::Exited {
                        code: KILLED,
                        started: since,
                        finished,
                    };
                }
            }
        });
    }

    /// Records an attempt to start a container, with its error if it failed; returns all attempts since the last success.
    pub(crate) fn record_attempt(
        &self,
        uid: &str,
        container: &str,
        spent: StartTimes,
        error: Option<String>,
    ) -> StartAttempts {
        let mut attempts = self.attempts.lock();
        let key = (uid.to_owned(), container.to_owned());
        let attempt = attempts.entry(key.clone()).or_default();
        attempt.spent.total += spent.total;
        attempt.spent.pre_start += spent.pre_start;
        attempt.spent.injection += spent.injection;
        let has_failed = error.is_some();
        attempt.refusals.extend(error);
        let all = attempt.clone();
        if !has_failed {
            attempts.remove(&key);
        }
        all
    }

    pub(crate) fn remove(&self, uid: &str) {
        self.attempts.lock().retain(|(of, _), _| of != uid);
        self.change(|containers| containers.retain(|(of, _), _| of != uid));
    }
}
