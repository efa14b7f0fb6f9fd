//! The state of this node that kubelet's calls, the pre-start check and the runtime hook share.
//!
//! Watches keep it up to date; reading it sends no request to the API server.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{DeviceKey, NodeFleet};
use crate::devices::inventory::PhysicalId;
use crate::inject::cdi::readers::Readers;
use crate::inject::enforcement::Enforcements;
use crate::inject::mode::{Certainty, Injection, Mode};
use crate::inject::settings::NodeSettings;
use crate::node::kubelet_checkpoint::Checkpoint;
use crate::node::kubelet_pod_resources::{self, PodResources};
use crate::node::pods::NodePods;
use crate::start::matching::AllocateLog;

/// Longest wait of a call for the decision on the injection mode.
const DECISION_WAIT: Duration = Duration::from_secs(5);

/// Longest wait of a call for its pod while the first list of this node's pods is awaited and the answer depends on the pod.
const SYNC_WAIT: Duration = Duration::from_secs(5);

/// The time after the first list of pods for which the API server may not show yet which pods an earlier process let start.
const YOUTH: Duration = Duration::from_secs(30);

/// The shared state of this node.
#[derive(Debug)]
pub struct NodeState {
    /// The operator's settings, fixed for the life of the process.
    pub settings: NodeSettings,
    /// The devices and their health.
    pub fleet: watch::Receiver<Arc<NodeFleet>>,
    /// The pods of this node.
    pub pods: watch::Receiver<NodePods>,
    /// The injection mode (`cdi` or `envvar`); none until it is decided.
    pub injection: watch::Receiver<Option<Injection>>,
    /// The enforcement level of memory limits on each GPU; empty until the levels are decided.
    pub enforcements: watch::Receiver<Arc<Enforcements>>,
    /// The container runtime's reads of the directory of CDI specs.
    pub readers: Readers,
    /// kubelet's checkpoint of allocated devices.
    pub checkpoint: Arc<Checkpoint>,
    /// kubelet's list of allocated devices.
    pub pod_resources: PodResources,
    /// Notified after an answer to Allocate and after a start, when a pod may have become assigned.
    pub answered: Notify,
    /// Notified before the plugin registers with kubelet again.
    pub resumed: Notify,
    /// Notified when the memory in use should be measured before its time.
    pub measure_again: Notify,
    /// Has the plugin send an unchanged device list to kubelet once more: kubelet then writes its checkpoint.
    pub list_again: watch::Sender<()>,
    /// The number of `GetPreferredAllocation` and Allocate calls that the plugin is answering.
    n_calls: AtomicUsize,
    /// The answered Allocate calls.
    log: Mutex<AllocateLog>,
    /// The time of the first complete list of pods.
    pods_known_at: OnceLock<Instant>,
    /// The last number that was part of a CDI device's name.
    last_number: AtomicU64,
}

impl NodeState {
    /// The state of a node. The log of Allocate calls begins with kubelet's checkpoint in `dir`, the device plugin directory.
    pub fn new(
        settings: NodeSettings,
        fleet: watch::Receiver<Arc<NodeFleet>>,
        pods: watch::Receiver<NodePods>,
        dir: &Path,
    ) -> Self {
        let checkpoint = Checkpoint::new(dir, settings.names.clone());
        let log = AllocateLog::after(checkpoint.read().map(|allocated| allocated.to_vec()));
        Self {
            settings,
            fleet,
            pods,
            injection: watch::channel(None).1,
            enforcements: watch::channel(Arc::default()).1,
            readers: Readers::default(),
            checkpoint: Arc::new(checkpoint),
            pod_resources: PodResources::new(kubelet_pod_resources::socket(dir)),
            answered: Notify::new(),
            resumed: Notify::new(),
            measure_again: Notify::new(),
            list_again: watch::Sender::new(()),
            n_calls: AtomicUsize::new(0),
            log: Mutex::new(log),
            pods_known_at: OnceLock::new(),
            last_number: AtomicU64::new(0),
        }
    }

    /// The injection mode of this moment.
    pub fn mode(&self) -> Mode {
        self.settings.mode(self.injection.borrow().as_ref())
    }

    /// Returns when the injection mode is decided, and for `envvar` the enforcement levels, or after `DECISION_WAIT` for each.
    pub async fn until_injection_decided(&self) {
        if self.settings.injection_mode.is_none() {
            // If no decision comes, the answer names a CDI device, which shows no GPU to a wrong container.
            let _ = timeout(DECISION_WAIT, self.injection.clone().wait_for(Option::is_some)).await;
        }
        // In mode `envvar` the answer carries the memory limits. In mode `cdi` the pre-start check waits for the levels.
        if self.mode() == Mode::Envvar {
            let _ = timeout(DECISION_WAIT, self.until_limits_decided()).await;
        }
    }

    /// Returns when the enforcement levels are decided: a container that starts earlier would have no limits.
    pub async fn until_limits_decided(&self) {
        let mut enforcements = self.enforcements.clone();
        while !self.are_limits_decided() && enforcements.changed().await.is_ok() {}
    }

    /// True if the enforcement levels are decided, or the driver limits no container here.
    pub fn are_limits_decided(&self) -> bool {
        let is_decided = self.enforcements.borrow().iter().next().is_some();
        is_decided || !self.settings.driver_limits || self.fleet.borrow().gpus.is_empty()
    }

    /// Longest wait of a call for its pod in mode `envvar`; at least `SYNC_WAIT` until the pods of this node are known.
    pub fn pod_wait(&self) -> Duration {
        let wait = self.settings.allocate_wait;
        if self.pods.borrow().is_synced() {
            wait
        } else {
            wait.max(SYNC_WAIT)
        }
    }

    /// The reason that no container of this node can get a device of this type; none if containers can.
    pub fn injection_problem(&self, device_type: &str) -> Option<String> {
        let injection = self.injection.borrow();
        injection
            .as_ref()
            .filter(|injection| !injection.is_possible_for(device_type))
            .map(|injection| injection.message.clone())
    }

    /// True if the plugin has seen the container runtime act on CDI devices.
    pub fn is_cdi_proven(&self) -> bool {
        self.injection
            .borrow()
            .as_ref()
            .is_some_and(|injection| injection.mode == Mode::Cdi && injection.certainty == Certainty::Proven)
    }

    /// A number that no other name of a CDI device has, not even one of an earlier process.
    pub fn fresh_number(&self) -> u64 {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = u64::try_from(since_epoch.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX);
        // Atomic, so that two calls at the same time get different numbers.
        let last = self.last_number.fetch_max(now, Ordering::Relaxed);
        if now > last {
            return now;
        }
        // The clock stands still or was set back.
        self.last_number.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Counts a `GetPreferredAllocation` or Allocate call until the return value is dropped.
    pub fn begin_call(&self) -> AdmissionCall<'_> {
        self.n_calls.fetch_add(1, Ordering::Relaxed);
        AdmissionCall(&self.n_calls)
    }

    /// True while the plugin answers a `GetPreferredAllocation` or Allocate call.
    pub fn is_allocating(&self) -> bool {
        self.n_calls.load(Ordering::Relaxed) > 0
    }

    /// The resources that this node advertises to kubelet.
    pub fn offered(&self) -> Vec<ExtendedResource> {
        let fleet = self.fleet.borrow();
        let mut offered = ExtendedResource::ALL.to_vec();
        offered.retain(|resource| fleet.advertises(*resource, &self.settings.names));
        offered
    }

    /// The devices that these device IDs belong to, in the order of the inventory. IDs that this node does not have are left out.
    pub fn devices_of(&self, resource: ExtendedResource, ids: &[String]) -> Vec<DeviceKey> {
        let fleet = self.fleet.borrow();
        let named: BTreeSet<&PhysicalId> = ids
            .iter()
            .filter_map(|id| fleet.ids.device_of(resource, id))
            .collect();
        let mut keys = Vec::new();
        for entry in fleet.entries(resource.device_type()) {
            if named.contains(&entry.key.id) {
                keys.push(entry.key);
            }
        }
        keys
    }

    /// Loads kubelet's checkpoint into the log, unless the file is longer than `max_bytes` and was not parsed before. A file that
    /// may name a pod of which the log lacks calls is loaded whatever its length.
    pub fn load_checkpoint(&self, log: &mut AllocateLog, pods: &NodePods, max_bytes: u64) {
        log.set_offered(self.offered());
        log.note_existing_pods(pods);
        let is_needed = log.needs_checkpoint(pods);
        let max_bytes = if is_needed { u64::MAX } else { max_bytes };
        if let Some(allocated) = self.checkpoint.read_if_short(max_bytes) {
            // Calls of an earlier process are added before those of this one are compared.
            log.load(&allocated, pods);
            log.correct_by_checkpoint(&allocated, pods);
        }
    }

    /// Notes the pods of the first complete list of pods, for which an earlier process may have answered.
    pub fn note_existing_pods(&self, pods: &NodePods) {
        if pods.is_synced() {
            self.pods_known_at.get_or_init(Instant::now);
        }
        let mut log = self.log();
        log.set_offered(self.offered());
        log.note_existing_pods(pods);
    }

    /// True while the API server may not show yet which pods an earlier process let start.
    pub fn is_young(&self) -> bool {
        self.pods_known_at.get().is_none_or(|at| at.elapsed() < YOUTH)
    }

    /// Prepares for another registration, as kubelet may have restarted: the log goes on from kubelet's checkpoint.
    pub fn resume(&self) {
        // Every function that locks both locks the pods before the log, so that no two tasks wait for each other.
        let pods = self.pods.borrow();
        if let Some(allocated) = self.checkpoint.read() {
            let mut log = self.log();
            log.set_offered(self.offered());
            log.resume(&allocated, &pods);
        }
        self.resumed.notify_one();
    }

    /// The log of Allocate calls. Never held across an await.
    pub fn log(&self) -> MutexGuard<'_, AllocateLog> {
        // Every change leaves the log consistent, so a panic elsewhere does not spoil it.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts one call in [`NodeState::is_allocating`] until it is dropped.
#[derive(Debug)]
#[must_use]
pub struct AdmissionCall<'a>(&'a AtomicUsize);

impl Drop for AdmissionCall<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
