//! The check before a container starts: kubelet's `PreStartContainer` succeeds once it is proven whose the container is and that
//! it will see the devices of its pod's record.
//!
//! The walk is [`check`] → [`crate::verify::snapshot`] → [`crate::verify::owner`] → [`crate::verify`] (allocation, health,
//! capacity) → `specs`, which writes the container's CDI spec. kubelet tries a blocked start again, and the pod's events have the
//! reason. [`reconcile`] compares what runs with what is recorded afterwards.

pub mod adopt;
pub mod blocked;
pub mod check;
pub mod reconcile;
mod specs;

use std::sync::Arc;

use kube::Client;
use proto::request::ContainerRequest;
use tokio::sync::Mutex;

use crate::envvar::partners::{Remedy, remedy};
use crate::envvar::swap::RecordSwaps;
use crate::eviction::evict;
use crate::extended_resource::ExtendedResource;
use crate::kubelet_checkpoint::Allocated;
use crate::metrics::{Metrics, Outcome};
use crate::node_state::NodeState;
use crate::pods::{NodePod, PodUid};
use crate::settings::StartPolicy;
use crate::verify::visible::VisibleByType;
use crate::verify::{StartEvidence, StartRefusal};
use daemon::events::Recorder;

/// The state and the clients that the check and the reconciliation share.
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "a client has none")]
pub struct StartContext {
    /// The state of this node.
    pub node: Arc<NodeState>,
    /// Writes pods' annotations and evicts pods.
    pub client: Client,
    /// The operator's settings.
    pub policy: StartPolicy,
    /// Held while a start is decided, so that two starts do not count on the same pod's record.
    pub swaps: Arc<Mutex<RecordSwaps>>,
    /// Records events.
    pub recorder: Recorder,
    /// The process's metrics.
    pub metrics: Metrics,
}

impl StartContext {
    /// Evicts a pod that sees devices which are not counted for it.
    async fn evict(&self, pod: &NodePod) {
        if evict(&self.client, pod, "it sees devices that are not counted for it").await {
            self.metrics.count(Outcome::Evicted);
        }
    }
}

/// A container that kubelet is about to start.
#[derive(Debug)]
struct Start<'a> {
    resource: ExtendedResource,
    /// Its device IDs, sorted.
    ids: &'a [String],
    /// Its pod.
    uid: PodUid,
}

impl Start<'_> {
    /// True if the entry of kubelet's checkpoint may be this container's: another container of the pod can have the same IDs.
    fn is_in(&self, entry: &Allocated) -> bool {
        entry.pod == self.uid && entry.resource == self.resource && entry.ids == self.ids
    }

    /// The containers of the pod that this one may be: those to which kubelet allocated the IDs, else those that request as many.
    fn containers<'p>(&self, pod: &'p NodePod, allocated: &'p [Allocated]) -> Vec<&'p str> {
        let own = allocated.iter().filter(|entry| self.is_in(entry));
        let named: Vec<&str> = own.map(|entry| entry.container.as_str()).collect();
        if !named.is_empty() {
            return named;
        }
        let requesting = pod
            .containers
            .iter()
            .filter(|container| self.resource.count(container) == self.ids.len() as u64);
        requesting.map(|container| container.name.as_str()).collect()
    }
}

/// The result of verifying a pod.
#[derive(Clone, Debug, PartialEq)]
enum Verification {
    /// Its containers see the devices of its record, and may.
    Passed,
    /// They see those of another pod's record.
    Remedy(Remedy),
    /// They must not start.
    Refused(StartRefusal),
}

/// Verifies a pod whose containers see `seen`, and looks for a remedy if these are the devices of another pod's record.
fn verify_or_remedy(evidence: &StartEvidence<'_>, pod: &NodePod, seen: &VisibleByType) -> Verification {
    match evidence.verify(pod, seen) {
        Ok(()) => Verification::Passed,
        Err(refusal @ StartRefusal::Mismatch { .. }) => match remedy(evidence, pod, seen) {
            Some(remedy) => Verification::Remedy(remedy),
            None => Verification::Refused(refusal),
        },
        Err(refusal) => Verification::Refused(refusal),
    }
}

fn container<'a>(pod: &'a NodePod, name: &str) -> Option<&'a ContainerRequest> {
    pod.containers.iter().find(|container| container.name == name)
}

#[cfg(test)]
mod tests;
