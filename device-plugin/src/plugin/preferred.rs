//! Answers `GetPreferredAllocation`: which of the available IDs kubelet should take.
//!
//! IDs of the devices that the scheduler chose, so that kubelet's own books, and everybody who reads
//! them, name the right device. Never an error: kubelet would fail the pod.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use proto::kubelet::deviceplugin::{
    ContainerPreferredAllocationRequest, ContainerPreferredAllocationResponse,
};
use proto::request::ContainerKind;
use tracing::debug;

use crate::extended_resource::ExtendedResource;
use crate::fleet::Fleet;
use crate::identity::{Call, Found};
use crate::injection::Mode;
use crate::inventory::PhysicalId;
use crate::pods::Pods;

use super::{NodeState, SHORT_CHECKPOINT};

/// How long a call waits at most for its pod where the answer to Allocate does not depend on it.
const CDI_WAIT: Duration = Duration::from_millis(250);

impl NodeState {
    /// Answers for one container.
    pub(super) async fn prefer(
        &self,
        resource: ExtendedResource,
        request: &ContainerPreferredAllocationRequest,
    ) -> ContainerPreferredAllocationResponse {
        self.until_decided().await;
        let devices = self.devices_of(resource, &request.must_include_device_ids);
        let count = u64::try_from(request.allocation_size).unwrap_or(0);
        let call = Call {
            resource,
            count,
            devices: &devices,
        };
        self.ledger().prefer(None);
        // Mode cdi needs no pinning for the right device, only for those who read kubelet's books.
        let patience = if self.mode() == Mode::Cdi {
            self.settings.allocate_wait.min(CDI_WAIT)
        } else {
            self.pod_wait()
        };
        let wanted = self.when_identified(&call, patience, |pods, found| {
            let wanted = self.wanted(pods, &found, resource);
            self.ledger().prefer(Some(found));
            wanted
        });
        let wanted = wanted.await;
        self.has_waited.store(wanted.is_err(), Ordering::Relaxed);
        let wanted = wanted.unwrap_or_else(|reason| {
            debug!(?reason, "preferring as few devices as possible");
            Vec::new()
        });
        let device_ids = {
            let written = self
                .checkpoint()
                .and_then(|checkpoint| checkpoint.read_up_to(SHORT_CHECKPOINT));
            // The same order as everywhere: pods before the books.
            let pods = self.pods.borrow();
            let ledger = self.ledger();
            let mut given = ledger.given(resource, &pods);
            // An answer may be in the books as that of a pod which has gone since.
            let written = written.iter().flat_map(|written| written.iter());
            let held = written.filter(|entry| entry.resource == resource && pods.get(&entry.pod).is_some());
            given.extend(held.flat_map(|entry| entry.ids.iter().map(String::as_str)));
            choose(&self.fleet.borrow(), resource, request, &wanted, &given)
        };
        ContainerPreferredAllocationResponse { device_ids }
    }

    /// The devices of the pod, beginning with those that the containers before this one have no share of.
    fn wanted(&self, pods: &Pods, found: &Found, resource: ExtendedResource) -> Vec<PhysicalId> {
        let Some(pod) = pods.get(&found.pod) else {
            return Vec::new();
        };
        let fleet = self.fleet.borrow();
        let Some(placement) = &found.placement else {
            return Vec::new();
        };
        let Ok(mut devices) = fleet.resolve(resource, placement.names(resource)) else {
            return Vec::new();
        };
        // The IDs of an ordinary init container are handed on, so they are not taken.
        let before = pod
            .containers
            .iter()
            .take(found.container)
            .filter(|before| before.kind != ContainerKind::Init);
        let before: u64 = before
            .map(|container| resource.count(container))
            .fold(0, u64::saturating_add);
        if let (true, Some(skip)) = (is_spread(resource), before.checked_rem(devices.len() as u64)) {
            devices.rotate_left(usize::try_from(skip).unwrap_or(0));
        }
        devices
    }
}

/// Whether what a container asks for of a resource may be of several devices.
fn is_spread(resource: ExtendedResource) -> bool {
    resource != ExtendedResource::Memory
}

/// Completes what must be included to the size that is asked for: first from the wanted devices (one ID of each in turn, but
/// memory units of one GPU after the other), then from as few others as possible. Those that were `given` to somebody come
/// last of their device: kubelet forgets what it is handing out if it is asked for its books at that moment while a pod has
/// just ended, and would hand it out twice.
fn choose(
    fleet: &Fleet,
    resource: ExtendedResource,
    request: &ContainerPreferredAllocationRequest,
    wanted: &[PhysicalId],
    given: &HashSet<&str>,
) -> Vec<String> {
    let included: BTreeSet<&str> = request
        .must_include_device_ids
        .iter()
        .map(String::as_str)
        .collect();
    let covered: Vec<&PhysicalId> = included
        .iter()
        .filter_map(|id| fleet.ids.device_of(resource, id))
        .collect();
    let mut choice = Choice::new(fleet, resource, request, &included, given);
    if is_spread(resource) {
        for uuid in wanted.iter().filter(|uuid| !covered.contains(uuid)) {
            choice.take(uuid, 1);
        }
        while wanted.iter().map(|uuid| choice.take(uuid, 1)).sum::<usize>() > 0 {}
    }
    for uuid in wanted.iter().chain(covered) {
        choice.take(uuid, usize::MAX);
    }
    while let Some(uuid) = choice.best_device() {
        choice.take(uuid, usize::MAX);
    }
    choice.chosen
}

/// Available IDs of one device. Few devices are taken from, so they are put in order when one is.
#[derive(Default)]
struct Free<'a> {
    ids: Vec<&'a str>,
    /// Whether the lowest number is last and given ones are first.
    is_in_order: bool,
}

/// A list of IDs in the making.
struct Choice<'a> {
    chosen: Vec<String>,
    size: usize,
    /// Available IDs per device; a device without any is left out.
    free: BTreeMap<&'a PhysicalId, Free<'a>>,
    given: &'a HashSet<&'a str>,
}

impl<'a> Choice<'a> {
    fn new(
        fleet: &'a Fleet,
        resource: ExtendedResource,
        request: &'a ContainerPreferredAllocationRequest,
        included: &BTreeSet<&str>,
        given: &'a HashSet<&'a str>,
    ) -> Self {
        let mut free = BTreeMap::<&PhysicalId, Free<'_>>::new();
        for id in request
            .available_device_ids
            .iter()
            .map(String::as_str)
            .filter(|id| !included.contains(id))
        {
            if let Some(gpu) = fleet.ids.device_of(resource, id) {
                free.entry(gpu).or_default().ids.push(id);
            }
        }
        let size = usize::try_from(request.allocation_size).unwrap_or(0);
        Self {
            chosen: request.must_include_device_ids.clone(),
            size,
            free,
            given,
        }
    }

    /// Takes at most `most` IDs of a device, the lowest numbers first and given ones last, and returns how many.
    fn take(&mut self, uuid: &PhysicalId, most: usize) -> usize {
        let missing = self.size.saturating_sub(self.chosen.len()).min(most);
        let Some(Free { ids, is_in_order }) = self.free.get_mut(uuid).filter(|_| missing > 0) else {
            return 0;
        };
        if !std::mem::replace(is_in_order, true) {
            ids.sort_by_cached_key(|id| Reverse((self.given.contains(id), id.len(), *id)));
        }
        let taken = ids.split_off(ids.len() - ids.len().min(missing));
        self.chosen.extend(taken.iter().rev().map(|id| (*id).to_owned()));
        if ids.is_empty() {
            self.free.remove(uuid);
        }
        taken.len()
    }

    /// The fullest device that has all that is missing, or else the emptiest one; none when nothing is missing or left.
    fn best_device(&self) -> Option<&'a PhysicalId> {
        let missing = self.size.saturating_sub(self.chosen.len());
        let sizes = || {
            self.free
                .iter()
                .map(|(uuid, free)| (free.ids.len(), *uuid))
                .filter(|_| missing > 0)
        };
        let enough = sizes().filter(|(n_free, _)| *n_free >= missing).min();
        enough
            .or_else(|| sizes().max_by_key(|(n_free, uuid)| (*n_free, Reverse(*uuid))))
            .map(|(_, uuid)| uuid)
    }
}

#[cfg(test)]
mod tests;
