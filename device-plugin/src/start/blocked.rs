//! The reasons to block the start of a container, and the containers whose start is blocked at this moment, for metrics.
//!
//! kubelet tries a blocked start again every 10 to 30 s. It does not report that it has given up, so a container that kubelet has
//! not tried to start for a minute does not count.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::devices::extended_resource::ExtendedResource;
use crate::inject::cdi::SpecError;
use crate::start::swap::SwapError;
use crate::start::verify::StartRefusal;
use crate::start::verify::owner::OwnerUnknown;

use super::adopt::NotAdopted;

/// Time after the last try from which a container does not count.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// The reason that a container does not start now. kubelet tries again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartBlocked {
    #[error(transparent)]
    OwnerUnknown(#[from] OwnerUnknown),
    #[error("pod {pod}: {refusal}")]
    Refused { pod: String, refusal: StartRefusal },
    #[error(
        "kubelet allocated the devices of pod {other} to pod {pod}, and their records could not be swapped"
    )]
    NotSwapped {
        pod: String,
        other: String,
        source: SwapError,
    },
    #[error(
        "kubelet allocated devices to pod {pod} that are counted for pod {other}, and the devices of pod {other} are not known yet"
    )]
    Unsettled { pod: String, other: String },
    #[error("cannot read which pods have swapped their records")]
    SwapsUnknown(#[source] SwapError),
    #[error("pod {pod}: its CDI spec is not in place")]
    Spec {
        pod: String,
        #[source]
        source: SpecError,
    },
    #[error(
        "the devices that were unhealthy before the plugin started are not known yet: the API server does not answer"
    )]
    HealthUnknown,
    #[error("it is not known yet if the driver limits the memory of containers on this node")]
    LimitsUnknown,
    #[error("pod {pod}: this node cannot inject devices: {problem}")]
    NoInjection { pod: String, problem: String },
    #[error(transparent)]
    NotAdopted(#[from] NotAdopted),
}

impl StartBlocked {
    pub(crate) fn event_reason(&self) -> &'static str {
        match self {
            Self::Refused { refusal, .. } => refusal.event_reason(),
            Self::NotAdopted(_) => "GPUNotPlaced",
            Self::NoInjection { .. } => "GPUInjectionImpossible",
            _ => "GPUNotReady",
        }
    }

    /// The reason as a label of the metric `held_containers`, one of [`LABELS`].
    fn label(&self) -> &'static str {
        match self {
            Self::OwnerUnknown(_) => "unproven",
            Self::NotSwapped { .. } | Self::SwapsUnknown(_) | Self::HealthUnknown => "no_api_server",
            Self::Unsettled { .. } => "unsettled",
            Self::Spec { .. } => "spec",
            Self::NoInjection { .. } | Self::LimitsUnknown => "no_injection",
            Self::NotAdopted(_) => "unplaced",
            Self::Refused { refusal, .. } => refusal.label(),
        }
    }

    /// True if no later try of kubelet can succeed.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Self::Refused { refusal, .. } if refusal.is_final())
    }
}

/// The reasons of blocked starts, as labels of the metric. Each is exported from the start, with 0, so that alerts have a series.
const LABELS: [&str; 10] = [
    "unproven",
    "no_api_server",
    "unplaced",
    "unavailable",
    "no_room",
    "mismatch",
    "all_devices_forbidden",
    "unsettled",
    "spec",
    "no_injection",
];

/// A container, identified by what kubelet's call says of it: a resource and the sorted IDs of that resource's devices.
type ContainerKey = (ExtendedResource, Vec<String>);

/// The blocked containers, each with its reason and the time of kubelet's last try. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct BlockedStarts(Arc<Mutex<BTreeMap<ContainerKey, (&'static str, Instant)>>>);

impl BlockedStarts {
    pub(super) fn insert(&self, resource: ExtendedResource, ids: &[String], blocked: &StartBlocked) {
        let now = Instant::now();
        let mut containers = self.lock();
        // kubelet gives a container up without a call to the plugin, so an entry that no try renews has to go by its age.
        containers.retain(|_, (_, since)| now - *since < FORGOTTEN);
        containers.insert((resource, ids.to_vec()), (blocked.label(), now));
    }

    pub(super) fn remove(&self, resource: ExtendedResource, ids: &[String]) {
        self.lock().remove(&(resource, ids.to_vec()));
    }

    /// The number of containers whose start is blocked now, for each reason in `LABELS`.
    pub(crate) fn count(&self) -> [(&'static str, usize); LABELS.len()] {
        let now = Instant::now();
        let mut counts = LABELS.map(|label| (label, 0));
        for (label, since) in self.lock().values() {
            for (counted, n_blocked) in &mut counts {
                *n_blocked += usize::from(counted == label && now - *since < FORGOTTEN);
            }
        }
        counts
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ContainerKey, (&'static str, Instant)>> {
        // Each change is one insertion or removal, so a panic elsewhere leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn counted(blocked: &BlockedStarts) -> Vec<(&'static str, usize)> {
        blocked
            .count()
            .into_iter()
            .filter(|(_, n_blocked)| *n_blocked > 0)
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_blocked_container_counts_until_it_starts_or_kubelet_gives_up() {
        let blocked = BlockedStarts::default();
        let unproven = StartBlocked::OwnerUnknown(OwnerUnknown::NoPod);
        let [one, other] = [["a".to_owned()], ["b".to_owned()]];
        blocked.insert(ExtendedResource::Memory, &one, &unproven);
        blocked.insert(ExtendedResource::Shared, &one, &StartBlocked::HealthUnknown);
        blocked.insert(ExtendedResource::Memory, &other, &StartBlocked::HealthUnknown);
        assert_eq!(counted(&blocked), [("unproven", 1), ("no_api_server", 2)]);
        advance(FORGOTTEN / 2).await;
        blocked.insert(ExtendedResource::Memory, &one, &StartBlocked::HealthUnknown);
        blocked.remove(ExtendedResource::Memory, &other);
        blocked.remove(ExtendedResource::Memory, &other);
        assert_eq!(counted(&blocked), [("no_api_server", 2)]);
        advance(FORGOTTEN / 2).await;
        assert_eq!(
            counted(&blocked),
            [("no_api_server", 1)],
            "kubelet has not tried the other one"
        );
        assert_eq!(blocked.count().len(), LABELS.len());
    }
}
