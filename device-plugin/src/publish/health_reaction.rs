//! Reacts to changes of health: events on the node when a device becomes unhealthy or healthy, is added or removed; events on the
//! pods that hold the device; and eviction of these pods, if the operator wants it.
//!
//! [`crate::devices::health`] decides on the health of devices; the Device object keeps the scheduler from unhealthy ones.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use daemon::events::{EventType, Recorder};
use kube::Client;
use proto::device::TYPE_GPU;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::watch::sleep_until_some;
use crate::devices::fleet::{DeviceKey, DeviceName, FleetEntry, NodeFleet, type_name};
use crate::node::eviction::evict;
use crate::node::pods::{NodePod, NodePods, PodUid, until_known};
use crate::start::node_state::NodeState;

/// The time for which a device must have been unhealthy before its pods are evicted: some errors pass.
const EVICTION_GRACE: Duration = Duration::from_secs(60);

/// Delay before another attempt after a refused eviction.
const EVICTION_RETRY: Duration = Duration::from_secs(15);

/// The error of a device that is not on the node any more.
const GONE: &str = "is no longer on this node";

/// The type and the ID of a device.
type DeviceId = (String, String);

/// An action of the [`HealthTracker`], which [`perform`] carries out.
#[derive(Clone, Debug, PartialEq, Eq)]
enum HealthAction {
    /// Write an event on the node, with this reason and message.
    NodeEvent(EventType, &'static str, String),
    /// Write an event on a pod, with this reason and message.
    PodEvent(PodUid, &'static str, String),
    Evict(PodUid),
}

/// The last known state of one device.
#[derive(Clone, Debug)]
struct DeviceState {
    key: DeviceKey,
    /// The last error, and the time since when the device is unhealthy; none while it is healthy.
    trouble: Option<(String, Instant)>,
    /// The pods with an event about this trouble.
    notified: BTreeSet<PodUid>,
}

/// Tracks the health of devices and decides on actions. Pure: the caller passes the time.
#[derive(Clone, Debug, Default)]
struct HealthTracker {
    /// The devices at the last update; none before the first one.
    devices: Option<BTreeMap<DeviceId, DeviceState>>,
    evicts: bool,
    /// The time of the last attempt to evict each pod.
    evicted: BTreeMap<PodUid, Instant>,
    /// The GPUs of pods' allocation records that this process has never seen, each with an event on its pod.
    unknown: BTreeSet<(PodUid, DeviceName)>,
}

impl HealthTracker {
    fn update(&mut self, fleet: &NodeFleet, pods: &NodePods, now: Instant) -> Vec<HealthAction> {
        let mut actions = self.update_devices(fleet, now);
        self.evicted.retain(|uid, _| pods.get(uid).is_some());
        actions.extend(self.report_unknown(pods));
        for ((device_type, id), device) in self.devices.iter_mut().flatten() {
            let Some((trouble, since)) = &device.trouble else {
                continue;
            };
            for pod in pods.live() {
                if !holds(pod, device_type, &device.key) {
                    continue;
                }
                if device.notified.insert(pod.uid.clone()) {
                    let name = type_name(device_type);
                    let message = if trouble == GONE {
                        gone_message(&format!("{name} {id}"))
                    } else {
                        format!(
                            "{name} {id}, which this pod holds, is unhealthy: {trouble}. Delete the pod to reschedule it."
                        )
                    };
                    actions.push(HealthAction::PodEvent(pod.uid.clone(), "GPUUnhealthy", message));
                }
                let last = self.evicted.get(&pod.uid);
                let is_recent = last.is_some_and(|last| *last + EVICTION_RETRY > now);
                if self.evicts && !pod.deleting && now >= *since + EVICTION_GRACE && !is_recent {
                    // A disruption budget may refuse the eviction for long, so it is not requested at every change.
                    self.evicted.insert(pod.uid.clone(), now);
                    actions.push(HealthAction::Evict(pod.uid.clone()));
                }
            }
        }
        actions
    }

    /// Compares the devices with those of the last update, and returns the events on the node. A removed device stays in the
    /// tracker, unhealthy, until it is back.
    fn update_devices(&mut self, fleet: &NodeFleet, now: Instant) -> Vec<HealthAction> {
        // At the start of the process every device is new, and only an unhealthy one is worth an event.
        let is_first = self.devices.is_none();
        let devices = self.devices.get_or_insert_default();
        let mut gone: BTreeSet<DeviceId> = devices.keys().cloned().collect();
        let mut actions = Vec::new();
        for entry in fleet.all_entries() {
            let id = (entry.device_type.to_owned(), entry.key.id.to_string());
            gone.remove(&id);
            let before = devices.get(&id);
            let event = if is_first && entry.is_healthy {
                None
            } else {
                node_event(before, &entry)
            };
            // The grace before eviction counts from the first error, also when another error follows.
            let since = before.and_then(|before| before.trouble.as_ref());
            let since = since.map_or(now, |(_, since)| *since);
            let trouble = (!entry.is_healthy).then(|| (entry.message.to_owned(), since));
            let notified = match before {
                // Without a new error the pods that know of it get no second event.
                Some(before) if event.is_none() => before.notified.clone(),
                _ => BTreeSet::new(),
            };
            actions.extend(event);
            let state = DeviceState {
                key: entry.key,
                trouble,
                notified,
            };
            devices.insert(id, state);
        }
        for id in gone {
            let Some(device) = devices.get_mut(&id) else {
                continue;
            };
            let since = match &device.trouble {
                Some((trouble, _)) if trouble == GONE => continue,
                Some((_, since)) => *since,
                None => now,
            };
            let (device_type, device_id) = &id;
            let message = format!("{} {device_id} {GONE}", type_name(device_type));
            actions.push(HealthAction::NodeEvent(EventType::Warning, "GPUGone", message));
            device.trouble = Some((GONE.to_owned(), since));
            device.notified.clear();
        }
        actions
    }

    /// The events on pods whose allocation records name GPUs that were gone before this process started, one for each GPU.
    fn report_unknown(&mut self, pods: &NodePods) -> Vec<HealthAction> {
        let mut unknown = BTreeSet::new();
        for pod in pods.live() {
            let Ok(placement) = &pod.placement else { continue };
            for name in placement.names(ExtendedResource::Whole) {
                let mut devices = self.devices.iter().flatten();
                if !devices.any(|((kind, _), device)| kind == TYPE_GPU && name.is(&device.key)) {
                    unknown.insert((pod.uid.clone(), name.clone()));
                }
            }
        }
        let mut actions = Vec::new();
        for (uid, name) in unknown.difference(&self.unknown) {
            let gpu = match name {
                DeviceName::Id(id) => format!("GPU {id}"),
                DeviceName::Minor(minor) => format!("GPU minor {minor}"),
            };
            actions.push(HealthAction::PodEvent(
                uid.clone(),
                "GPUUnhealthy",
                gone_message(&gpu),
            ));
        }
        self.unknown = unknown;
        actions
    }

    /// The time at which the tracker must be updated for an eviction, if no device and no pod changes until then.
    fn next_eviction(&self, now: Instant) -> Option<Instant> {
        if !self.evicts {
            return None;
        }
        let mut next = None;
        for device in self.devices.iter().flat_map(BTreeMap::values) {
            if let Some((_, since)) = &device.trouble {
                let due = *since + EVICTION_GRACE;
                // An eviction that was due is tried again after a while: it was refused, or the pod is not gone yet.
                let due = if due > now { due } else { now + EVICTION_RETRY };
                next = Some(due.min(next.unwrap_or(due)));
            }
        }
        next
    }
}

fn gone_message(device: &str) -> String {
    format!("{device}, which this pod holds, {GONE}. Delete the pod to reschedule it.")
}

/// The event on the node about a device that is new, or whose health or error differs from `before`, its last state.
fn node_event(before: Option<&DeviceState>, entry: &FleetEntry<'_>) -> Option<HealthAction> {
    let device = format!("{} {}", type_name(entry.device_type), entry.key.id);
    let trouble_before = before.and_then(|before| before.trouble.as_ref());
    let (event_type, reason, message) = match (entry.is_healthy, before.is_some(), trouble_before) {
        (true, true, None) => return None,
        (true, true, Some(_)) => (
            EventType::Normal,
            "GPUHealthy",
            format!("{device} is healthy again: {}", entry.message),
        ),
        (true, false, _) => (EventType::Normal, "GPUAdded", format!("{device} has come")),
        (false, _, Some((trouble, _))) if trouble == entry.message => return None,
        (false, ..) => (
            EventType::Warning,
            "GPUUnhealthy",
            format!("{device} is unhealthy: {}", entry.message),
        ),
    };
    Some(HealthAction::NodeEvent(event_type, reason, message))
}

fn holds(pod: &NodePod, device_type: &str, key: &DeviceKey) -> bool {
    let Ok(placement) = &pod.placement else {
        return false;
    };
    // A record names the same GPUs for all resources of GPUs.
    let resource = ExtendedResource::of_type(device_type).unwrap_or(ExtendedResource::Whole);
    placement.has_device(resource, key)
}

/// Writes events, and evicts pods if the operator wants it (`evicts`), until the task is dropped.
pub(crate) async fn react_to_health(node: Arc<NodeState>, client: Client, recorder: Recorder, evicts: bool) {
    let mut tracker = HealthTracker {
        evicts,
        ..HealthTracker::default()
    };
    let (mut fleets, mut pods) = (node.fleet.clone(), node.pods.clone());
    until_known(&mut pods).await;
    loop {
        let now = Instant::now();
        let fleet = Arc::clone(&fleets.borrow_and_update());
        let actions = tracker.update(&fleet, &pods.borrow_and_update(), now);
        for action in actions {
            perform(action, &pods, &client, &recorder).await;
        }
        tokio::select! {
            _ = fleets.changed() => {}
            _ = pods.changed() => {}
            () = sleep_until_some(tracker.next_eviction(now)) => {}
        }
    }
}

async fn perform(
    action: HealthAction,
    pods: &watch::Receiver<NodePods>,
    client: &Client,
    recorder: &Recorder,
) {
    match action {
        HealthAction::NodeEvent(event_type, reason, message) => recorder.node(event_type, reason, message),
        HealthAction::PodEvent(uid, reason, message) => {
            if let Some(pod) = pods.borrow().get(&uid) {
                recorder.warn(pod, reason, message);
            }
        }
        HealthAction::Evict(uid) => {
            // The lock of the pods must not be held during the request.
            let pod = pods.borrow().get(&uid).cloned();
            if let Some(pod) = pod {
                evict(client, &pod, "it holds an unhealthy device").await;
            }
        }
    }
}

#[cfg(test)]
mod tests;
