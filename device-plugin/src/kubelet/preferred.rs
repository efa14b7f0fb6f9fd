//! Answers `GetPreferredAllocation` with the available device IDs that kubelet should take: those of the devices that the
//! scheduler chose, so that kubelet's own accounting, and every tool that reads it, names the right device. The answer is never
//! an error: kubelet would fail the pod.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use proto::kubelet::deviceplugin::{
    ContainerPreferredAllocationRequest, ContainerPreferredAllocationResponse,
};
use proto::request::ContainerKind;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::NodeFleet;
use crate::devices::inventory::PhysicalId;
use crate::inject::mode::Mode;
use crate::node::pods::NodePods;
use crate::start::matching::{Call, Match};
use crate::start::node_state::NodeState;
use crate::start::pod_of_call::{SHORT_CHECKPOINT, wait_for_match};

/// Longest wait until the pod of a call is known, in mode `cdi`, in which the answer to Allocate does not depend on the pod.
const CDI_WAIT: Duration = Duration::from_millis(250);

/// Returns the device IDs that kubelet should take for the container to which it is about to allocate.
pub(crate) async fn prefer(
    node: &NodeState,
    resource: ExtendedResource,
    request: &ContainerPreferredAllocationRequest,
) -> ContainerPreferredAllocationResponse {
    node.until_injection_decided().await;
    let devices = node.devices_of(resource, &request.must_include_device_ids);
    let call = Call {
        resource,
        count: u64::try_from(request.allocation_size).unwrap_or(0),
        devices: &devices,
    };
    // The Allocate call after this one uses the match that is set here, so that of an earlier call must go.
    node.log().preferred = None;
    // In mode cdi the IDs do not decide the device: they only keep kubelet's accounting right.
    let limit = match node.mode() {
        Mode::Cdi => node.settings.allocate_wait.min(CDI_WAIT),
        Mode::Envvar => node.pod_wait(),
    };
    let found = wait_for_match(node, &call, limit).await;
    let allocated = node.checkpoint.read_if_short(SHORT_CHECKPOINT);
    let pods = node.pods.borrow();
    let mut log = node.log();
    let wanted = match &found {
        Some(found) => recorded(node, &pods, found, resource),
        None => Vec::new(),
    };
    // Allocate follows at once, and need not wait for the same pod again if this call waited without success.
    log.has_waited = found.is_none();
    log.preferred = found;
    let mut in_use = log.ids_in_use(resource, &pods);
    for entry in allocated.iter().flat_map(|allocated| allocated.iter()) {
        // The log may have matched the answer about these IDs with a pod that is gone, so the checkpoint counts too.
        if entry.resource == resource && pods.get_live(&entry.pod).is_some() {
            in_use.extend(entry.ids.iter().map(String::as_str));
        }
    }
    ContainerPreferredAllocationResponse {
        device_ids: choose(&node.fleet.borrow(), resource, request, &wanted, &in_use),
    }
}

/// The devices in the matched pod's record (its annotations), first those of which earlier containers of the pod have no ID.
fn recorded(node: &NodeState, pods: &NodePods, found: &Match, resource: ExtendedResource) -> Vec<PhysicalId> {
    let (Some(pod), Some(placement)) = (pods.get(&found.pod), &found.placement) else {
        return Vec::new();
    };
    let resolved = node.fleet.borrow().resolve(resource, placement.names(resource));
    let mut devices = resolved.unwrap_or_default();
    let mut n_earlier_ids = 0_u64;
    for container in pod.containers.iter().take(found.container) {
        // kubelet gives the IDs of an ordinary init container to later containers too.
        if container.kind != ContainerKind::Init {
            n_earlier_ids = n_earlier_ids.saturating_add(resource.count(container));
        }
    }
    if may_span_devices(resource)
        && let Some(skip) = n_earlier_ids.checked_rem(devices.len() as u64)
    {
        // Each container begins with another device, so that the IDs of all containers name all devices of the record.
        devices.rotate_left(usize::try_from(skip).unwrap_or(0));
    }
    devices
}

/// True if the IDs of one container may be of several devices.
fn may_span_devices(resource: ExtendedResource) -> bool {
    resource != ExtendedResource::Memory
}

/// The IDs that kubelet should take: those that it must include, then those of the `wanted` devices (one of each in turn, but of
/// memory units one GPU after the other), then of as few others as possible, up to the requested number. IDs `in_use` come last.
fn choose(
    fleet: &NodeFleet,
    resource: ExtendedResource,
    request: &ContainerPreferredAllocationRequest,
    wanted: &[PhysicalId],
    in_use: &HashSet<&str>,
) -> Vec<String> {
    let included: BTreeSet<&str> = request
        .must_include_device_ids
        .iter()
        .map(String::as_str)
        .collect();
    let mut included_devices = Vec::new();
    for id in &included {
        included_devices.extend(fleet.ids.device_of(resource, id));
    }
    let (mut free, mut used) = (FreeIds::new(), FreeIds::new());
    for id in &request.available_device_ids {
        if !included.contains(id.as_str())
            && let Some(device) = fleet.ids.device_of(resource, id)
        {
            let available = if in_use.contains(id.as_str()) {
                &mut used
            } else {
                &mut free
            };
            available.entry(device).or_default().ids.push(id);
        }
    }
    let mut choice = Choice {
        chosen: request.must_include_device_ids.clone(),
        size: usize::try_from(request.allocation_size).unwrap_or(0),
        free,
    };
    choice.fill(resource, wanted, &included_devices);
    // IDs in use are available only by kubelet's fault: it forgets an allocation under way if its pod-resources API is called at
    // that moment while a pod has just ended. If it allocates them twice, the pre-start check cannot find which of the two pods is
    // starting. An ID of a device that is not wanted misleads only the tools that read kubelet's accounting.
    choice.free = used;
    choice.fill(resource, wanted, &included_devices);
    choice.chosen
}

/// Available IDs of one device. They are sorted when the first of them is taken, as no ID of most devices is taken.
#[derive(Default)]
struct Free<'a> {
    ids: Vec<&'a str>,
    /// True once the ID with the lowest number is last.
    is_sorted: bool,
}

/// Available IDs by device; a device without available IDs has no entry.
type FreeIds<'a> = BTreeMap<&'a PhysicalId, Free<'a>>;

/// The device IDs that are chosen so far for an answer, and those that are left.
struct Choice<'a> {
    chosen: Vec<String>,
    size: usize,
    free: FreeIds<'a>,
}

impl<'a> Choice<'a> {
    /// Chooses IDs in `free` until enough are chosen or none is left.
    fn fill(&mut self, resource: ExtendedResource, wanted: &[PhysicalId], included_devices: &[&PhysicalId]) {
        if may_span_devices(resource) {
            // Each device of the record gets an ID before any gets a second one, so that kubelet's accounting names all of them.
            for device in wanted.iter().filter(|device| !included_devices.contains(device)) {
                self.take(device, 1);
            }
            // Ends when enough IDs are chosen, or no wanted device has any left.
            while wanted.iter().map(|device| self.take(device, 1)).sum::<usize>() > 0 {}
        }
        // Memory units: all of one wanted device before the next. Then devices of which kubelet must take an ID anyway.
        for device in wanted.iter().chain(included_devices.iter().copied()) {
            self.take(device, usize::MAX);
        }
        while let Some(device) = self.best_device() {
            self.take(device, usize::MAX);
        }
    }

    /// Chooses at most `max` free IDs of a device, the lowest numbers first, and returns their number.
    fn take(&mut self, device: &PhysicalId, max: usize) -> usize {
        let missing = self.size.saturating_sub(self.chosen.len()).min(max);
        let Some(Free { ids, is_sorted }) = self.free.get_mut(device).filter(|_| missing > 0) else {
            return 0;
        };
        if !std::mem::replace(is_sorted, true) {
            // Numbers have no leading zeros: of two IDs of a device the longer one has the higher number.
            ids.sort_by_key(|id| Reverse((id.len(), *id)));
        }
        let taken = ids.split_off(ids.len() - ids.len().min(missing));
        self.chosen.extend(taken.iter().rev().map(|id| (*id).to_owned()));
        if ids.is_empty() {
            self.free.remove(device);
        }
        taken.len()
    }

    /// The device with the fewest free IDs that suffice, else with the most; none if no ID is missing or left.
    fn best_device(&self) -> Option<&'a PhysicalId> {
        let missing = self.size.saturating_sub(self.chosen.len());
        if missing == 0 {
            return None;
        }
        let (device, _) = self.free.iter().min_by_key(|(device, free)| {
            let n_free = free.ids.len();
            (n_free < missing, n_free.abs_diff(missing), **device)
        })?;
        Some(*device)
    }
}

#[cfg(test)]
mod tests;
