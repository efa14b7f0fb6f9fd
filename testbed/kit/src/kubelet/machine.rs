//! The machine under a kubelet: its container runtime, and records that survive restarts of the kubelet process.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::claims::PreparedClaims;
use super::config::{CdiSupport, Hold, KubeletConfig};
use super::injector::Injector;
use super::nri::Nri;
use super::runtime::Runtime;

/// The error text for a directory or socket of kubelet that cannot be made.
pub(super) fn cannot_prepare(path: &Path) -> String {
    format!("cannot prepare {}", path.display())
}

/// A machine between two reboots.
#[derive(Debug)]
pub(crate) struct KubeletMachine {
    pub(crate) config: KubeletConfig,
    pub(crate) runtime: Arc<Runtime>,
    /// The order of a test to hold back admissions.
    pub(crate) hold: watch::Sender<Hold>,
    pub(crate) counts: Mutex<KubeletCounts>,
    pub(crate) nri: Option<Nri>,
    /// The container runtime's injection of CDI devices; `None` if CDI is off.
    pub(crate) injector: Option<Injector>,
    pub(crate) claims: PreparedClaims,
    /// Signals each change that a test may wait for.
    changes: watch::Sender<()>,
}

impl KubeletMachine {
    /// Starts the container runtime. `hold` outlives a reboot.
    pub(crate) fn start(config: KubeletConfig, hold: watch::Sender<Hold>) -> Result<Self> {
        let changes = watch::Sender::new(());
        let runtime = Arc::new(Runtime::new(changes.clone(), config.containers.clone()));
        let mut nri = None;
        if config.has_nri {
            let path = config.nri_socket();
            let listening = Nri::listen(&path, Arc::clone(&runtime), config.needs_nri);
            nri = Some(listening.with_context(|| cannot_prepare(&path))?);
        }
        let mut injector = None;
        if config.runtime.cdi == CdiSupport::On {
            injector = Some(Injector::start(&config).context("cannot watch CDI specs")?);
        }
        Ok(Self {
            config,
            runtime,
            hold,
            counts: Mutex::default(),
            nri,
            injector,
            claims: PreparedClaims::default(),
            changes,
        })
    }

    /// Wakes every task that waits for a condition on this kubelet.
    pub(crate) fn notify(&self) {
        self.changes.send_replace(());
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }
}

/// Counts and times of calls since the machine was started, across restarts of kubelet.
#[derive(Clone, Debug, Default)]
pub struct KubeletCounts {
    /// Pods that [`Kubelet::hold`](super::Kubelet::hold) holds back now.
    pub held: usize,
    /// Calls of Allocate that have begun.
    pub allocate_calls: usize,
    /// Duration of each call of Allocate that was answered, as kubelet sees it.
    pub allocate_took: Vec<Duration>,
    /// Calls of List of the pod-resources API, refused ones included.
    pub lists: usize,
    /// Registrations of plugins that could be reached, each resource counted.
    pub registrations: usize,
    /// Lists of devices that plugins have sent, of all resources.
    pub device_lists: usize,
    /// All admissions.
    pub admissions: Vec<PodAdmission>,
}

impl KubeletCounts {
    /// The admissions after the first `n_known`.
    pub fn admissions_since(&self, n_known: usize) -> Vec<PodAdmission> {
        self.admissions.get(n_known..).unwrap_or_default().to_vec()
    }
}

/// One admission of a pod, with its result.
#[derive(Clone, Debug)]
pub struct PodAdmission {
    /// `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// The time at which the admission began.
    pub began: Instant,
    /// The duration of the admission, calls to plugins included.
    pub took: Duration,
    /// Reason and message of a refusal.
    pub refusal: Option<(String, String)>,
}
