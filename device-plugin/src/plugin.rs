//! kubelet's device plugin protocol: virtual device IDs, registration and the gRPC service of each resource.
//!
//! Nothing here talks to the API server: what is known of pods comes out of [`NodeState`], which
//! watches keep up to date.

pub mod allocate;
pub mod ended_pods;
pub mod ids;
pub mod offer;
pub mod preferred;
pub mod registration;
pub mod server;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use proto::memory_unit::MemoryUnit;
use proto::resource::ResourceNames;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use crate::cdi::readers::Readers;
use crate::extended_resource::{ExtendedResource, ExtendedResourceNames};
use crate::fleet::Fleet;
use crate::gate::Gate;
use crate::identity::Ledger;
use crate::identity::checkpoint::Checkpoint;
use crate::injection::{Certainty, Injection, InjectionSettings, Mode};
use crate::pods::Pods;

/// Longest wait of a call for the decision on how containers get their devices.
const DECISION_WAIT: Duration = Duration::from_secs(5);

/// Longest wait of a call for its pod while no pod of this node is known yet, where the answer depends on the pod.
const SYNC_WAIT: Duration = Duration::from_secs(5);

/// A checkpoint up to this size is looked at while kubelet waits; a longer one only when nobody is found without it.
const SHORT_CHECKPOINT: u64 = 256 << 10;

/// What every Allocate answer depends on besides pods and devices.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What the resources are called.
    pub names: ExtendedResourceNames,
    /// Bytes of a memory unit.
    pub memory_unit: MemoryUnit,
    /// The variable that tells the container runtime which GPUs a container sees.
    pub visible_devices_env: String,
    /// How long a call waits for its pod to show up.
    pub allocate_wait: Duration,
    /// The operator's settings for the way in which containers get their devices.
    pub injection: InjectionSettings,
    /// True if pods may see all GPUs of this node and be charged for none.
    pub allows_all_devices: bool,
}

impl Settings {
    /// A node whose containers get their devices by the usual variable.
    pub fn plain(names: ResourceNames, memory_unit: MemoryUnit, allocate_wait: Duration) -> Self {
        let names = names.into();
        Self {
            names,
            memory_unit,
            visible_devices_env: "NVIDIA_VISIBLE_DEVICES".to_owned(),
            allocate_wait,
            injection: InjectionSettings::envvar(),
            allows_all_devices: false,
        }
    }
}

/// Everything that the services of all resources share.
#[derive(Debug)]
pub struct NodeState {
    /// Fixed for the life of the process.
    pub settings: Settings,
    /// The devices and their health.
    pub fleet: watch::Receiver<Arc<Fleet>>,
    /// The pods of this node.
    pub pods: watch::Receiver<Pods>,
    /// Told when a call has been answered.
    pub answered: Notify,
    /// Told before kubelet is told of this plugin again.
    pub resumed: Notify,
    /// Told when kubelet is to get a device list once more though it is the same: it writes its checkpoint then.
    pub list_again: watch::Sender<()>,
    /// Lets containers start; without it every container starts.
    pub gate: OnceLock<Gate>,
    /// The calls of kubelet's admission that are being answered.
    n_calls: AtomicUsize,
    ledger: Mutex<Ledger>,
    /// kubelet's checkpoint, if it is to be read again.
    checkpoint: Option<Checkpoint>,
    /// The way in which containers get their devices; none until that is decided.
    pub injection: watch::Receiver<Option<Injection>>,
    /// The runtime's reads of the spec directory.
    pub readers: Readers,
    /// The last number that was part of a CDI device's name.
    fresh: AtomicU64,
    /// Whether `GetPreferredAllocation` has waited in vain for the pod of the next Allocate.
    has_waited: AtomicBool,
}

impl NodeState {
    /// With books that have been begun and are all that is known.
    pub fn new(
        settings: Settings,
        fleet: watch::Receiver<Arc<Fleet>>,
        pods: watch::Receiver<Pods>,
        ledger: Ledger,
    ) -> Self {
        Self {
            settings,
            fleet,
            pods,
            answered: Notify::new(),
            resumed: Notify::new(),
            list_again: watch::Sender::new(()),
            gate: OnceLock::new(),
            n_calls: AtomicUsize::new(0),
            ledger: Mutex::new(ledger),
            checkpoint: None,
            injection: watch::channel(None).1,
            readers: Readers::default(),
            fresh: AtomicU64::new(0),
            has_waited: AtomicBool::new(false),
        }
    }

    /// With books that begin with kubelet's checkpoint in this directory, and are compared with it all the time.
    pub fn beside_kubelet(
        settings: Settings,
        fleet: watch::Receiver<Arc<Fleet>>,
        pods: watch::Receiver<Pods>,
        dir: &Path,
    ) -> Self {
        let checkpoint = Checkpoint::new(dir, settings.names.clone());
        let ledger = Ledger::after(checkpoint.read().map(|before| before.to_vec()));
        Self {
            checkpoint: Some(checkpoint),
            ..Self::new(settings, fleet, pods, ledger)
        }
    }

    /// The same node with what decides how containers get their devices.
    #[must_use]
    pub fn with_injection(self, injection: watch::Receiver<Option<Injection>>, readers: Readers) -> Self {
        Self {
            injection,
            readers,
            ..self
        }
    }

    /// The way in which containers get their devices: as decided, else as the operator says.
    pub fn mode(&self) -> Mode {
        let decided = self.injection.borrow().as_ref().map(|injection| injection.mode);
        decided.or(self.settings.injection.mode).unwrap_or(Mode::Cdi)
    }

    /// Returns when it is decided how containers get their devices, soon after the start of the process.
    async fn until_decided(&self) {
        if self.settings.injection.mode.is_none() {
            // Without a decision an answer names a CDI device, which shows no GPU to the wrong container.
            let _ = timeout(DECISION_WAIT, self.injection.clone().wait_for(Option::is_some)).await;
        }
    }

    /// Longest wait of a call for its pod where the answer depends on the pod.
    fn pod_wait(&self) -> Duration {
        let wait = self.settings.allocate_wait;
        if self.pods.borrow().is_synced() {
            wait
        } else {
            wait.max(SYNC_WAIT)
        }
    }

    /// The reason that no container of this node can get a device of this type, if that is so.
    pub fn no_injection(&self, device_type: &str) -> Option<String> {
        let injection = self.injection.borrow();
        injection
            .as_ref()
            .filter(|injection| !injection.is_possible_for(device_type))
            .map(|injection| injection.message.clone())
    }

    /// Returns true if the runtime has been seen to act on CDI.
    pub fn is_cdi_proven(&self) -> bool {
        let is_proven =
            |injection: &Injection| injection.mode == Mode::Cdi && injection.certainty == Certainty::Proven;
        self.injection.borrow().as_ref().is_some_and(is_proven)
    }

    /// A number that is in no other name of a CDI device, also of an earlier process.
    pub fn fresh_number(&self) -> u64 {
        let since = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let now = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        let next = |last: u64| Some(now.max(last.saturating_add(1)));
        let last = self
            .fresh
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .unwrap_or_default();
        now.max(last.saturating_add(1))
    }

    /// Counts a call of kubelet's admission until what it returns is dropped.
    pub fn begin_call(&self) -> Call<'_> {
        self.n_calls.fetch_add(1, Ordering::Relaxed);
        Call(&self.n_calls)
    }

    /// Returns true while a call of kubelet's admission is being answered.
    pub fn is_allocating(&self) -> bool {
        self.n_calls.load(Ordering::Relaxed) > 0
    }

    /// kubelet's checkpoint, if there is one.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_ref()
    }

    /// Brings the books up to date with what kubelet has written down.
    fn catch_up(&self, ledger: &mut Ledger, pods: &Pods, most_bytes: u64) {
        ledger.serve(self.offered());
        ledger.inherit(pods);
        let most_bytes = if ledger.is_unsure(pods) {
            u64::MAX
        } else {
            most_bytes
        };
        if let Some(written) = self
            .checkpoint
            .as_ref()
            .and_then(|checkpoint| checkpoint.read_up_to(most_bytes))
        {
            ledger.catch_up(&written, pods);
            if self.gate.get().is_some() {
                ledger.learn_from(&written, pods);
            }
        }
    }

    /// The resources that kubelet is told of.
    pub fn offered(&self) -> Vec<ExtendedResource> {
        let fleet = self.fleet.borrow();
        ExtendedResource::ALL
            .into_iter()
            .filter(|resource| fleet.offers(*resource, &self.settings.names))
            .collect()
    }

    /// Takes in which pods a predecessor of this process may have answered for.
    pub fn inherit(&self, pods: &Pods) {
        let mut ledger = self.ledger();
        ledger.serve(self.offered());
        ledger.inherit(pods);
    }

    /// Before kubelet is told of this plugin again: it may be another kubelet.
    fn resume(&self) {
        // The pods before the books, as everywhere.
        let pods = self.pods.borrow();
        if let Some(before) = self.checkpoint.as_ref().and_then(Checkpoint::read) {
            let mut ledger = self.ledger();
            ledger.serve(self.offered());
            ledger.resume(&before, &pods);
        }
        self.resumed.notify_one();
    }

    /// The books of answered calls. Never held across an await.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Every change of the ledger leaves it consistent, so a panic elsewhere does not spoil it.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call of kubelet's admission that is being answered.
#[derive(Debug)]
#[must_use]
pub struct Call<'a>(&'a AtomicUsize);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
