//! Compares running pods with their records (the annotations that name their devices): when the plugin starts, after every
//! restart of kubelet, when a record changes, and once a minute.
//!
//! The comparison finds differences that come after the pre-start check: changed or lost records, missing or unused CDI specs,
//! false marks. The plugin corrects those that need no change of a container, and reports the others.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::time::Duration;

use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::record::{DeviceAllocations, MEM_ASSIGNED, Record};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{DeviceKey, NodeFleet};
use crate::devices::inventory::PhysicalId;
use crate::inject::cdi::device_of;
use crate::inject::content::{own_variable, visible_variable};
use crate::metrics::Outcome;
use crate::node::kubelet_checkpoint::Allocated;
use crate::node::pods::annotate::annotate;
use crate::node::pods::{NodePod, NodePods, Placement, PodStage, PodUid, until_known};
use crate::start::OnUnplaced;
use crate::start::envvar::partners::{Verification, verify_or_swap};
use crate::start::matching::AllocateLog;
use crate::start::node_state::NodeState;
use crate::start::swap::RecordSwaps;
use crate::start::verify::container::StartingContainer;
use crate::start::verify::{StartEvidence, StartRefusal, Visible, VisibleByType, visible_to_pod};
use daemon::api_server::one_line;

use super::StartContext;
use super::adopt::{adopt, removed_record, started_with_record};
use super::specs::restore_specs;

const INTERVAL: Duration = Duration::from_secs(60);

/// Delay of the comparison after a restart of kubelet, and after a record has changed: several changes often come together.
const SETTLE: Duration = Duration::from_secs(2);

/// Compares running pods with their allocation records. Remembers the differences, so that the plugin reports each once.
pub(crate) struct Reconciler {
    context: StartContext,
    /// The text of the last event about each pod.
    reported: BTreeMap<PodUid, String>,
    /// Pods that seemed wrongly marked assigned at the last comparison.
    suspects: BTreeSet<PodUid>,
    /// [`NodePods::n_altered`] at the last comparison.
    n_altered: u64,
}

impl Reconciler {
    pub(crate) fn new(context: StartContext) -> Self {
        Self {
            context,
            reported: BTreeMap::new(),
            suspects: BTreeSet::new(),
            n_altered: 0,
        }
    }

    /// Compares all running pods with their records: now, every minute, and after the changes that the head of this file names.
    pub(crate) async fn run(mut self) {
        let mut pods = self.context.node.pods.clone();
        until_known(&mut pods).await;
        loop {
            if let Some(allocated) = self.context.node.checkpoint.read() {
                self.reconcile(&allocated).await;
            }
            let n_altered = self.n_altered;
            let prompted = async {
                tokio::select! {
                    () = self.context.node.resumed.notified() => {}
                    Ok(_) = pods.wait_for(|pods| pods.n_altered() != n_altered) => {}
                }
            };
            if timeout(INTERVAL, prompted).await.is_ok() {
                sleep(SETTLE).await;
            }
        }
    }

    /// Compares every running pod with its allocation record once. `allocated` are the entries of kubelet's checkpoint.
    async fn reconcile(&mut self, allocated: &[Allocated]) {
        let verified = self.context.swaps.lock().await.verify().await;
        match verified {
            Ok(false) => {}
            Ok(true) => {
                self.context.metrics.count(Outcome::Restored);
                warn!("the Device object had lost the swapped records of pods; wrote them again");
            }
            // The comparison goes on without the API server: CDI specs are files of this node.
            Err(error) => log_postponed(&error),
        }
        let mut running = Vec::new();
        {
            let node = &*self.context.node;
            let pods = node.pods.borrow();
            self.n_altered = pods.n_altered();
            // Without the swapped records a pod would be compared with a record that does not count any more.
            if !pods.is_synced() || pods.swapped().is_none() {
                return;
            }
            restore_specs(node, &pods, allocated);
            let mut log = node.log();
            log.forget_gone(&pods);
            log.forget_starts(allocated);
            self.reported.retain(|uid, _| pods.get(uid).is_some());
            for pod in pods.iter().filter(|pod| log.is_started(pod)) {
                running.push(pod.uid.clone());
            }
        }
        for uid in running {
            // Each comparison takes the lock of the records for itself, so that no start waits for all of them.
            self.reconcile_pod(allocated, &uid).await;
        }
        self.clear_stale_marks(allocated).await;
    }

    /// Corrects the record of one running pod, or reports the difference. If a container of the pod may not have started yet,
    /// only corrections are made that are right in any case: the check before that start does the rest.
    async fn reconcile_pod(&mut self, allocated: &[Allocated], uid: &PodUid) {
        let context = self.context.clone();
        let mut swaps = context.swaps.lock().await;
        let Some(compared) = compare(&context.node, allocated, uid) else {
            return;
        };
        let pod = &compared.pod;
        if let Some(record) = &compared.removed {
            // The next comparison goes by the restored record.
            self.restore(pod, record).await;
            return;
        }
        match &compared.verification {
            Verification::Passed
            // A later comparison knows more about the other pod's devices, and an unhealthy device has an event of its own.
            | Verification::LookAgain(_)
            | Verification::Refused(StartRefusal::Unavailable(_) | StartRefusal::Unknown) => {
                self.reported.remove(uid);
            }
            Verification::Swap(partner) => match swaps.swap(&context.node, uid, partner).await {
                Ok(false) => {}
                Ok(true) => warn!(
                    pod = pod.display_name(),
                    other = partner.as_str(),
                    "a running pod has the devices of another: swapped their records"
                ),
                Err(error) => log_postponed(&error),
            },
            Verification::Refused(StartRefusal::Unplaced(_))
                if context.unplaced == OnUnplaced::Adopt =>
            {
                self.adopt_running(allocated, pod).await;
            }
            Verification::Refused(refusal) => {
                self.correct_record(&mut swaps, &compared, refusal).await;
            }
        }
    }

    /// Writes a record for a running pod that the scheduler did not place, or reports the reason that it cannot have one.
    async fn adopt_running(&mut self, allocated: &[Allocated], pod: &NodePod) {
        let has_gpus = |entry: &&Allocated| entry.pod == pod.uid && entry.resource.device_type() == TYPE_GPU;
        let Some(entry) = allocated.iter().find(has_gpus) else {
            return;
        };
        let starting = StartingContainer::find(pod.clone(), entry.resource, &entry.ids, allocated, None);
        match adopt(&self.context.node, &self.context.client, &starting, allocated).await {
            Ok(()) => self.context.metrics.count(Outcome::Adopted),
            Err(not_adopted) => self.report(pod, "GPUNotPlaced", one_line(&not_adopted)),
        }
    }

    async fn restore(&self, pod: &NodePod, record: &Record) {
        match annotate(&self.context.client, pod, &record.annotations()).await {
            Ok(()) => {
                self.context.metrics.count(Outcome::Recorded);
                let text = "the annotations of its record were removed or unreadable; the plugin has written the record of its devices again";
                self.context.recorder.warn(pod, "GPUMismatch", text.to_owned());
                warn!(
                    pod = pod.display_name(),
                    "the annotations of a running pod's record were removed or unreadable; wrote them again"
                );
            }
            Err(error) => log_postponed(&error),
        }
    }

    /// If the refusal is final and all containers have started, writes a record of the devices that the pod sees. If that cannot
    /// be, reports the refusal, and may evict the pod.
    async fn correct_record(&mut self, swaps: &mut RecordSwaps, compared: &Compared, refusal: &StartRefusal) {
        let pod = &compared.pod;
        // While a start is not decided, a swap or the container's spec may still put the pod right.
        let is_past_help = refusal.is_final() && compared.is_certain;
        let record = if is_past_help {
            record_of_visible(&self.context.node, pod, &compared.seen)
        } else {
            None
        };
        let Some(record) = record else {
            self.report(pod, refusal.event_reason(), refusal.to_string());
            if is_past_help && self.context.evicts_mismatched {
                self.context.evict(pod).await;
            }
            return;
        };
        match swaps.replace(&pod.uid, record).await {
            Ok(true) => {
                self.context.metrics.count(Outcome::Recorded);
                let text = format!("{refusal}; its record now names the devices that it has");
                self.context.recorder.warn(pod, "GPUMismatch", text);
                warn!(
                    pod = pod.display_name(),
                    reason = %refusal,
                    "the record of a running pod now names the devices that it has"
                );
            }
            Ok(false) => {}
            Err(error) => log_postponed(&error),
        }
    }

    /// Records an event on the pod, unless the last one about it had the same text.
    fn report(&mut self, pod: &NodePod, reason: &'static str, text: String) {
        // A comparison comes every minute, and each difference is worth one event.
        let before = self.reported.insert(pod.uid.clone(), text.clone());
        if before.as_ref() != Some(&text) {
            self.context.metrics.count(Outcome::Reported);
            warn!(
                pod = pod.display_name(),
                reason = text,
                "a running pod and its record do not agree"
            );
            self.context.recorder.warn(pod, reason, text);
        }
    }

    /// Removes the assigned mark from pods that had it at two comparisons and no devices: no call is matched with a marked pod.
    async fn clear_stale_marks(&mut self, allocated: &[Allocated]) {
        // At one comparison kubelet may just be admitting the pod, and not have written its checkpoint yet.
        let stale = {
            let node = &self.context.node;
            let pods = node.pods.borrow();
            stale_marks(&pods, &node.log(), allocated)
        };
        for pod in stale.iter().filter(|pod| self.suspects.contains(&pod.uid)) {
            let mark = [(MEM_ASSIGNED.to_owned(), "false".to_owned())].into();
            match annotate(&self.context.client, pod, &mark).await {
                Ok(()) => {
                    self.context.metrics.count(Outcome::Unflagged);
                    info!(
                        pod = pod.display_name(),
                        "kubelet has not allocated devices to the pod: it is not marked assigned any more"
                    );
                }
                Err(error) => log_postponed(&error),
            }
        }
        self.suspects = stale.into_iter().map(|pod| pod.uid).collect();
    }
}

/// Logs at level debug that a correction has failed: the next comparison tries again.
fn log_postponed(error: &(dyn Error + 'static)) {
    debug!(error = one_line(error), "cannot correct records, trying later");
}

struct Compared {
    pod: NodePod,
    seen: VisibleByType,
    verification: Verification,
    /// True if this process has let all containers of the pod start that have devices.
    is_certain: bool,
    /// The record to restore, if the pod's annotations have lost it.
    removed: Option<Record>,
}

/// Compares a running pod with its allocation record; none if the pod does not run, or has no devices of this plugin.
fn compare(node: &NodeState, allocated: &[Allocated], uid: &PodUid) -> Option<Compared> {
    let pods = node.pods.borrow();
    let log = node.log();
    let fleet = node.fleet.borrow();
    let pod = pods.get(uid).filter(|pod| log.is_started(pod))?;
    let (mut is_certain, mut was_placed) = (true, true);
    let mut entries = Vec::with_capacity(allocated.len());
    for entry in allocated {
        let is_own = entry.pod == *uid;
        let has_started = log.has_started_container(entry);
        let has_run = has_started || (is_own && started_with_record(pod, entry));
        is_certain &= has_started || !is_own;
        was_placed &= has_run || !is_own;
        // The spec of a container that has not started may be that of an earlier holder of its IDs.
        let seen = if has_run { as_started(node, entry) } else { None };
        entries.push(seen.unwrap_or_else(|| entry.clone()));
    }
    let seen = visible_to_pod(&entries, uid, &fleet);
    if seen.is_empty() {
        return None;
    }
    let evidence = StartEvidence::new(&pods, &fleet, &log, &entries, node.settings.memory_unit);
    Some(Compared {
        verification: verify_or_swap(&evidence, pod, &seen),
        removed: removed_record(node, &evidence, pod, &seen, was_placed),
        pod: pod.clone(),
        seen,
        is_certain,
    })
}

/// The entry with the variables of its CDI spec in place of its answer: a running container sees the devices that the spec named.
fn as_started(node: &NodeState, entry: &Allocated) -> Option<Allocated> {
    let mut envs = node.settings.specs.env(device_of(&entry.answer)?)?;
    // In a spec the vendor's variable is void, and a variable of this project names the devices.
    if let Some(named) = envs.get(own_variable(entry.resource)).cloned() {
        envs.insert(visible_variable(entry.resource).to_owned(), named);
    }
    let answer = ContainerAllocateResponse {
        envs,
        ..ContainerAllocateResponse::default()
    };
    Some(Allocated {
        answer,
        ..entry.clone()
    })
}

/// The record of a pod with the GPUs that it sees in place of the recorded ones; none if it sees more or fewer.
fn record_of_visible(node: &NodeState, pod: &NodePod, seen: &VisibleByType) -> Option<DeviceAllocations> {
    let Some(Visible::Devices(gpus)) = seen.get(TYPE_GPU) else {
        return None;
    };
    let placement = pod.record()?;
    let record = placement.to_allocations(node.settings.memory_unit);
    on_gpus(placement, record, gpus, &node.fleet.borrow())
}

/// The record moved to these GPUs: a GPU that it does not name takes the place and the amounts of one that is not among them.
fn on_gpus(
    placement: &Placement,
    mut record: DeviceAllocations,
    gpus: &BTreeSet<PhysicalId>,
    fleet: &NodeFleet,
) -> Option<DeviceAllocations> {
    let gpus = gpus.iter().filter_map(|uuid| fleet.gpu(uuid));
    let mut keys: Vec<DeviceKey> = gpus.map(DeviceKey::from).collect();
    // In a fixed order, so that every comparison moves the amounts in the same way.
    keys.sort_by_key(|key| key.minor);
    let entries = record.get_mut(TYPE_GPU)?;
    if entries.len() != keys.len() || placement.gpus.len() != keys.len() {
        return None;
    }
    let mut unnamed = keys.clone();
    unnamed.retain(|key| !placement.has_device(ExtendedResource::Whole, key));
    let mut unnamed = unnamed.into_iter();
    for (entry, name) in entries.iter_mut().zip(&placement.gpus) {
        if !keys.iter().any(|key| name.is(key)) {
            let key = unnamed.next()?;
            entry.minor = i32::try_from(key.minor).ok()?;
            entry.id = key.id.to_string();
        }
    }
    Some(record)
}

/// The pods that have the mark of assigned pods (`MEM_ASSIGNED`) though kubelet has allocated no devices to them.
fn stale_marks(pods: &NodePods, log: &AllocateLog, allocated: &[Allocated]) -> Vec<NodePod> {
    let mut stale = Vec::new();
    for pod in pods.iter() {
        let is_marked = pod.stage == PodStage::Bound && pod.record().is_some_and(Placement::is_assigned);
        if is_marked
            && !log.is_answered(&pod.uid)
            && !log.started.contains(&pod.uid)
            && !allocated.iter().any(|entry| entry.pod == pod.uid)
        {
            stale.push(pod.clone());
        }
    }
    stale
}

#[cfg(test)]
mod tests;
