//! Admission of one pod: devices for every container, then kubelet's own fit check.
//!
//! Called for one pod at a time. A refusal is final: the pod becomes Failed.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::broadcast;

use super::devices::AllocationError;
use super::fit::{Shortage, fit};
use super::pod::PodSpec;
use super::pod_worker::KILLED;
use super::process::Process;

/// Why a pod is refused; displays as kubelet's message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Rejection {
    #[error("Allocate failed due to {0}, which is unexpected")]
    Allocation(AllocationError),
    #[error(transparent)]
    Shortage(Shortage),
}

impl Rejection {
    /// The reason in pod status.
    pub(crate) fn reason(&self) -> String {
        match self {
            Self::Allocation(_) => "UnexpectedAdmissionError".to_owned(),
            Self::Shortage(shortage) => format!("OutOf{}", shortage.resource),
        }
    }
}

/// How one admission went.
#[derive(Clone, Debug)]
pub struct Admission {
    /// `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// When it began.
    pub began: Instant,
    /// How long it took, plugins' answers included.
    pub took: Duration,
    /// Reason and message of a refusal.
    pub refusal: Option<(String, String)>,
}

/// All admissions since the node was started, across restarts of kubelet.
#[derive(Debug)]
pub(crate) struct AdmissionLog {
    past: Mutex<Vec<Admission>>,
    live: broadcast::Sender<Admission>,
}

impl AdmissionLog {
    pub(crate) fn empty() -> Self {
        Self {
            past: Mutex::default(),
            live: broadcast::Sender::new(4096),
        }
    }

    pub(crate) fn past(&self) -> Vec<Admission> {
        self.since(0)
    }

    pub(crate) fn since(&self, n_known: usize) -> Vec<Admission> {
        self.past
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(n_known..)
            .unwrap_or_default()
            .to_vec()
    }

    pub(crate) fn n_past(&self) -> usize {
        self.past.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Admission> {
        self.live.subscribe()
    }

    fn add(&self, admission: Admission) {
        self.past
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(admission.clone());
        // Nobody has to listen.
        let _ = self.live.send(admission);
    }
}

impl Process {
    /// Admits one pod and starts the task that runs it, or makes it Failed.
    pub(crate) async fn admit(self: &Arc<Self>, pod: Arc<PodSpec>) {
        let began = Instant::now();
        self.pods().arrive(&pod, false);
        let outcome = self.check(&pod).await;
        let refusal = outcome
            .as_ref()
            .err()
            .map(|rejection| (rejection.reason(), rejection.to_string()));
        match &refusal {
            None => self.start_worker(&pod),
            Some((reason, message)) => self.reject(&pod, reason, message),
        }
        self.admissions.add(Admission {
            pod: pod.full_name(),
            uid: pod.uid.clone(),
            began,
            took: began.elapsed(),
            refusal,
        });
        self.changed();
    }

    async fn check(&self, pod: &PodSpec) -> Result<(), Rejection> {
        self.allocate_pod(pod).await.map_err(Rejection::Allocation)?;
        let mut allocatable = self.allocatable();
        let devices = self.devices();
        // Devices that are already held count as there, even if their plugin is away.
        for (resource, held) in devices.held().devices() {
            allocatable.raise(&resource, i64::try_from(held.len()).unwrap_or(i64::MAX));
        }
        drop(devices);
        let others: Vec<Arc<PodSpec>> = self
            .pods()
            .active()
            .filter(|other| other.uid != pod.uid)
            .cloned()
            .collect();
        fit(
            &pod.requests,
            others.iter().map(|other| &other.requests),
            &allocatable,
        )
        .map_err(Rejection::Shortage)
    }

    fn reject(&self, pod: &PodSpec, reason: &str, message: &str) {
        tracing::warn!(pod = pod.full_name(), reason, message, "pod rejected");
        self.pods().end(&pod.uid);
        // After a restart of kubelet its containers may be running.
        self.runtime.kill(&pod.uid, KILLED);
        self.publish_rejection(pod, reason, message);
        self.publish_event(pod, reason, message);
    }
}
