//! The containers whose start is held at this moment, by reason. For metrics.
//!
//! kubelet asks again for a held container every 10 to 30 s. It does not say that it has given one up, so a container that it
//! has not asked about for a minute does not count.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::extended_resource::ExtendedResource;
use crate::proof::verdict::Refusal;

use super::Held;

/// Time after which a container that kubelet has not asked about again does not count.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// The reason for a held start, in the words of the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HeldReason {
    /// It is not proven whose container it is.
    Unproven,
    /// The API server has not answered since the plugin started, or does not answer now.
    NoApiServer,
    /// The scheduler did not place the pod.
    Unplaced,
    /// A device of its record is unhealthy, not shared or not on the node.
    Unavailable,
    /// Its device has no room.
    NoRoom,
    /// It would see other devices, or have other limits, than its record says.
    Mismatch,
    /// Its pod is marked to see all GPUs, which the operator has not allowed.
    AllDevicesForbidden,
    /// It is not known yet what another pod was given.
    Unsettled,
    /// Its CDI spec is not in place.
    Spec,
    /// No container of this node can get a device.
    NoInjection,
}

impl HeldReason {
    /// Every reason.
    pub const ALL: [Self; 10] = [
        Self::Unproven,
        Self::NoApiServer,
        Self::Unplaced,
        Self::Unavailable,
        Self::NoRoom,
        Self::Mismatch,
        Self::AllDevicesForbidden,
        Self::Unsettled,
        Self::Spec,
        Self::NoInjection,
    ];

    /// The reason as the metric writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unproven => "unproven",
            Self::NoApiServer => "no_api_server",
            Self::Unplaced => "unplaced",
            Self::Unavailable => "unavailable",
            Self::NoRoom => "no_room",
            Self::Mismatch => "mismatch",
            Self::AllDevicesForbidden => "all_devices_forbidden",
            Self::Unsettled => "unsettled",
            Self::Spec => "spec",
            Self::NoInjection => "no_injection",
        }
    }
}

impl From<&Held> for HeldReason {
    fn from(held: &Held) -> Self {
        match held {
            Held::Unproven(_) => Self::Unproven,
            Held::NotExchanged { .. } | Held::NotLoaded(_) | Held::NotRecalled => Self::NoApiServer,
            Held::Unsettled { .. } => Self::Unsettled,
            Held::Spec { .. } => Self::Spec,
            Held::NoInjection { .. } => Self::NoInjection,
            Held::NotAdopted { .. } => Self::Unplaced,
            Held::Refused { refusal, .. } => match refusal {
                Refusal::Unplaced(_) => Self::Unplaced,
                Refusal::Unavailable(_) => Self::Unavailable,
                Refusal::NoRoom(_) => Self::NoRoom,
                Refusal::Mismatch { .. }
                | Refusal::NotAllDevices { .. }
                | Refusal::Limits { .. }
                | Refusal::Overridden { .. }
                | Refusal::OverridesVoid { .. } => Self::Mismatch,
                Refusal::AllDevicesForbidden => Self::AllDevicesForbidden,
                Refusal::Unknown => Self::Unproven,
            },
        }
    }
}

/// A container, by what kubelet asks with: a resource and the device IDs.
type Key = (ExtendedResource, Vec<String>);

/// The held containers.
#[derive(Debug, Default)]
pub struct HeldContainers(Mutex<BTreeMap<Key, (HeldReason, Instant)>>);

impl HeldContainers {
    /// Adds a container whose start was held now.
    pub(super) fn hold(&self, resource: ExtendedResource, ids: &[String], reason: HeldReason) {
        let now = Instant::now();
        let mut held = self.lock();
        held.retain(|_, (_, since)| now - *since < FORGOTTEN);
        held.insert((resource, ids.to_vec()), (reason, now));
    }

    /// Removes a container that starts now.
    pub(super) fn release(&self, resource: ExtendedResource, ids: &[String]) {
        self.lock().remove(&(resource, ids.to_vec()));
    }

    /// The number of held containers for each reason.
    pub fn count(&self) -> BTreeMap<HeldReason, usize> {
        let now = Instant::now();
        let mut counts: BTreeMap<_, _> = HeldReason::ALL.into_iter().map(|reason| (reason, 0)).collect();
        for (reason, since) in self.lock().values() {
            if now - *since < FORGOTTEN {
                *counts.entry(*reason).or_default() += 1;
            }
        }
        counts
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, (HeldReason, Instant)>> {
        // Each change is one insertion or removal, so a panic elsewhere leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn counted(held: &HeldContainers) -> Vec<(&'static str, usize)> {
        held.count()
            .into_iter()
            .filter(|(_, n_held)| *n_held > 0)
            .map(|(reason, n_held)| (reason.as_str(), n_held))
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_container_counts_until_it_starts_or_kubelet_asks_no_more() {
        let held = HeldContainers::default();
        let [one, other] = [["a".to_owned()], ["b".to_owned()]];
        held.hold(ExtendedResource::Memory, &one, HeldReason::Unproven);
        held.hold(ExtendedResource::Shared, &one, HeldReason::NoRoom);
        held.hold(ExtendedResource::Memory, &other, HeldReason::NoRoom);
        assert_eq!(counted(&held), [("unproven", 1), ("no_room", 2)]);
        advance(FORGOTTEN / 2).await;
        held.hold(ExtendedResource::Memory, &one, HeldReason::NoRoom);
        held.release(ExtendedResource::Memory, &other);
        held.release(ExtendedResource::Memory, &other);
        assert_eq!(counted(&held), [("no_room", 2)]);
        advance(FORGOTTEN / 2).await;
        assert_eq!(
            counted(&held),
            [("no_room", 1)],
            "kubelet has not asked about the other one"
        );
        assert_eq!(held.count().len(), HeldReason::ALL.len());
    }
}
