//! The machine under a kubelet: its container runtime, and records that survive restarts of the kubelet process.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use parking_lot::{Mutex, MutexGuard};
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

#[derive(Debug)]
pub(crate) struct KubeletMachine {
    pub(crate) config: KubeletConfig,
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) admissions: AdmissionLog,
    pub(crate) hold: watch::Sender<Hold>,
    pub(crate) counts: KubeletCounts,
    /// The container runtime's socket for plugins, if it has one.
    pub(crate) nri: Option<Nri>,
    /// The container runtime's injection of CDI devices; `None` if CDI is off.
    pub(crate) injector: Option<Injector>,
    pub(crate) claims: PreparedClaims,
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
            admissions: AdmissionLog::default(),
            hold,
            counts: KubeletCounts::default(),
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

#[derive(Debug, Default)]
pub(crate) struct KubeletCounts {
    /// Pods that wait for [`Hold`] to end.
    pub(crate) held: AtomicUsize,
    /// Calls of Allocate that have begun.
    pub(crate) allocate_calls: AtomicUsize,
    /// Duration of each call of Allocate that was answered.
    pub(crate) allocate_took: Mutex<Vec<Duration>>,
    /// Calls of List of the pod-resources API, refused ones included.
    pub(crate) lists: AtomicUsize,
    /// Registrations of plugins that could be reached.
    pub(crate) registrations: AtomicUsize,
    /// Lists of devices that plugins have sent.
    pub(crate) device_lists: AtomicUsize,
}

impl KubeletCounts {
    pub(crate) fn add(counter: &AtomicUsize) {
        counter.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn get(counter: &AtomicUsize) -> usize {
        counter.load(Ordering::Acquire)
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

/// All admissions since the machine was started, across restarts of kubelet.
#[derive(Debug, Default)]
pub(crate) struct AdmissionLog(Mutex<Vec<PodAdmission>>);

impl AdmissionLog {
    /// The admissions after the first `n_known`.
    pub(crate) fn since(&self, n_known: usize) -> Vec<PodAdmission> {
        self.lock().get(n_known..).unwrap_or_default().to_vec()
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    pub(crate) fn add(&self, admission: PodAdmission) {
        self.lock().push(admission);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PodAdmission>> {
        self.0.lock()
    }
}
