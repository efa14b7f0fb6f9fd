//! The state of this node that kubelet's calls, the pre-start check and the runtime hook share.
//!
//! Watches keep it up to date; reading it sends no request to the API server.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{DeviceKey, NodeFleet};
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
    pub(crate) injection: watch::Receiver<Option<Injection>>,
    /// The enforcement level of memory limits on each GPU; empty until the levels are decided.
    pub enforcements: watch::Receiver<Arc<Enforcements>>,
    pub(crate) readers: Readers,
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) pod_resources: PodResources,
    /// Notified after an answer to Allocate and after a start, when a pod may have become assigned.
    pub(crate) answered: Notify,
    /// Notified before the plugin registers with kubelet again.
    pub(crate) resumed: Notify,
    /// Notified when the memory in use should be measured before its time.
    pub(crate) measure_again: Notify,
    /// Has the plugin send an unchanged device list to kubelet once more: kubelet then writes its checkpoint.
    pub(crate) list_again: watch::Sender<()>,
    /// Cloned for each `GetPreferredAllocation` or Allocate call that the plugin is answering.
    calls: Arc<()>,
    log: Mutex<AllocateLog>,
    pods_known_at: OnceLock<Instant>,
    last_number: AtomicU64,
}

impl NodeState {
    /// The state of a node; `dir` is kubelet's device plugin directory.
    pub fn new(
        settings: NodeSettings,
        fleet: watch::Receiver<Arc<NodeFleet>>,
        pods: watch::Receiver<NodePods>,
        dir: &Path,
    ) -> Self {
        Self {
            checkpoint: Arc::new(Checkpoint::new(dir, settings.names.clone())),
            settings,
            fleet,
            pods,
            injection: watch::channel(None).1,
            enforcements: watch::channel(Arc::default()).1,
            readers: Readers::default(),
            pod_resources: PodResources::new(kubelet_pod_resources::socket(dir)),
            answered: Notify::new(),
            resumed: Notify::new(),
            measure_again: Notify::new(),
            list_again: watch::Sender::new(()),
            calls: Arc::default(),
            log: Mutex::default(),
            pods_known_at: OnceLock::new(),
            last_number: AtomicU64::new(0),
        }
    }

    pub(crate) fn mode(&self) -> Mode {
        self.settings.mode(self.injection.borrow().as_ref())
    }

    /// Returns when the injection mode is decided, and for `envvar` the enforcement levels, or after `DECISION_WAIT` for each.
    pub(crate) async fn until_injection_decided(&self) {
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
    pub(crate) async fn until_limits_decided(&self) {
        let mut enforcements = self.enforcements.clone();
        while !self.are_limits_decided() && enforcements.changed().await.is_ok() {}
    }

    /// True if the enforcement levels are decided, or the driver limits no container here.
    pub(crate) fn are_limits_decided(&self) -> bool {
        let is_decided = self.enforcements.borrow().iter().next().is_some();
        is_decided || !self.settings.driver_limits || self.fleet.borrow().gpus.is_empty()
    }

    /// Longest wait of a call for its pod in mode `envvar`; at least `SYNC_WAIT` until the pods of this node are known.
    pub(crate) fn pod_wait(&self) -> Duration {
        let wait = self.settings.allocate_wait;
        if self.pods.borrow().is_synced() {
            wait
        } else {
            wait.max(SYNC_WAIT)
        }
    }

    /// The reason that no container of this node can get a device of this type; none if containers can.
    pub(crate) fn injection_problem(&self, device_type: &str) -> Option<String> {
        match &*self.injection.borrow() {
            Some(injection) if !injection.is_possible_for(device_type) => Some(injection.message.clone()),
            _ => None,
        }
    }

    /// True if the plugin has seen the container runtime act on CDI devices.
    pub(crate) fn is_cdi_proven(&self) -> bool {
        let injection = self.injection.borrow();
        let found = injection.as_ref().map(|found| (found.mode, found.certainty));
        found == Some((Mode::Cdi, Certainty::Proven))
    }

    /// A number that no other name of a CDI device has, not even one of an earlier process.
    pub(crate) fn fresh_number(&self) -> u64 {
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
    #[must_use]
    pub(crate) fn begin_call(&self) -> Arc<()> {
        Arc::clone(&self.calls)
    }

    /// True while the plugin answers a `GetPreferredAllocation` or Allocate call.
    pub(crate) fn is_allocating(&self) -> bool {
        Arc::strong_count(&self.calls) > 1
    }

    /// The resources that this node advertises to kubelet.
    pub(crate) fn offered(&self) -> Vec<ExtendedResource> {
        let fleet = self.fleet.borrow();
        let mut offered = ExtendedResource::ALL.to_vec();
        offered.retain(|resource| fleet.advertises(*resource, &self.settings.names));
        offered
    }

    /// The devices that these device IDs belong to, in the order of the inventory. IDs that this node does not have are left out.
    pub(crate) fn devices_of(&self, resource: ExtendedResource, ids: &[String]) -> Vec<DeviceKey> {
        let fleet = self.fleet.borrow();
        let mut named = BTreeSet::new();
        for id in ids {
            named.extend(fleet.ids.device_of(resource, id));
        }
        let mut keys = Vec::new();
        for entry in fleet.entries(resource.device_type()) {
            if named.contains(&entry.key.id) {
                keys.push(entry.key);
            }
        }
        keys
    }

    /// Loads kubelet's checkpoint into the log. A file longer than `max_bytes` is loaded if it was parsed before, or may name a pod
    /// of which the log lacks calls.
    pub(crate) fn load_checkpoint(&self, log: &mut AllocateLog, pods: &NodePods, max_bytes: u64) {
        log.set_offered(self.offered());
        let is_needed = log.note_existing_pods(pods) || log.needs_checkpoint(pods);
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
        if log.note_existing_pods(pods)
            && let Some(allocated) = self.checkpoint.read()
        {
            log.load(&allocated, pods);
        }
    }

    /// True while the API server may not show yet which pods an earlier process let start.
    pub(crate) fn is_young(&self) -> bool {
        self.pods_known_at.get().is_none_or(|at| at.elapsed() < YOUTH)
    }

    /// Prepares for another registration, as kubelet may have restarted: the log goes on from kubelet's checkpoint.
    pub(crate) fn resume(&self) {
        let pods = self.pods.borrow();
        if let Some(allocated) = self.checkpoint.read() {
            let mut log = self.log();
            log.set_offered(self.offered());
            log.resume(&allocated, &pods);
        }
        self.resumed.notify_one();
    }

    /// The log of Allocate calls. Never held across an await. Every function that locks both locks the pods before the log, so
    /// that no two tasks wait for each other.
    pub fn log(&self) -> MutexGuard<'_, AllocateLog> {
        // Every change leaves the log consistent, so a panic elsewhere does not spoil it.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
