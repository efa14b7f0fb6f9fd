//! The check before a container starts: kubelet's `PreStartContainer` succeeds once kubelet's own data proves which pod the
//! container belongs to, and the container will see the devices of that pod's record (its annotations that name devices).
//!
//! [`StartChecker`] takes a snapshot of kubelet's allocations, finds the pod that owns the device IDs of kubelet's call, verifies
//! the pod (all in `verify`), and writes the container's CDI spec (`specs`). `reconcile` compares running pods with their records
//! later. Before the check the pod of a call is a guess (`matching`).

mod adopt;
pub mod assigned;
pub mod blocked;
pub(crate) mod envvar;
pub(crate) mod matching;
pub mod node_state;
pub(crate) mod pod_of_call;
pub(crate) mod reconcile;
mod specs;
pub mod swap;
pub(crate) mod verify;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use daemon::api_server::one_line;
use daemon::events::Recorder;
use kube::Client;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use crate::devices::extended_resource::ExtendedResource;
use crate::metrics::{Metrics, Outcome};
use crate::node::eviction::evict;
use crate::node::pods::{NodePod, PodUid};
use crate::start::envvar::check::settle;
use crate::start::node_state::NodeState;
use crate::start::swap::RecordSwaps;
use crate::start::verify::container::StartingContainer;
use crate::start::verify::owner::{KubeletSnapshot, OwnerUnknown, find_owner};
use crate::start::verify::snapshot::{PACE, SharedRead, take_snapshot};
use crate::start::verify::{CheckedStart, StartRefusal, verify_start};

use adopt::adopt;
use blocked::{BlockedStarts, StartBlocked};
use specs::{SpecFiles, write_specs};

/// Longest wait of a start for facts that are not known yet: kubelet gives up after 30 s and tries again after 10 s more.
const CHECK_LIMIT: Duration = Duration::from_secs(8);

/// Delay before kubelet's state is read again when it was not conclusive yet.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// The reaction to a pod that the scheduler did not place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnUnplaced {
    /// Block the start of its containers.
    Refuse,
    /// Write a record for it where it fits.
    Adopt,
}

/// The state and the clients that the check and the reconciliation share.
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "a client has none")]
pub struct StartContext {
    /// The state of this node.
    pub node: Arc<NodeState>,
    /// Writes pods' annotations and evicts pods.
    pub client: Client,
    /// True to evict pods that would see other devices than their allocation records name for as long as they live.
    pub evicts_mismatched: bool,
    /// The operator's reaction to pods that the scheduler did not place.
    pub unplaced: OnUnplaced,
    /// The swapped records in this node's Device object. Locked while a start is decided: no two starts count on one record.
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

/// Checks each container before it starts.
#[expect(missing_debug_implementations, reason = "a client has none")]
pub struct StartChecker {
    pub(crate) context: StartContext,
    /// Starts that are checked at the same time share a snapshot.
    snapshots: SharedRead<KubeletSnapshot>,
    blocked: BlockedStarts,
}

enum StartDecision {
    /// The container may start once the runtime has read these CDI specs.
    Start(SpecFiles),
    /// The decision needs a newer snapshot of kubelet's allocations, which shows the devices of this other pod.
    LookAgain(PodUid),
}

impl StartChecker {
    /// A checker that keeps the containers that it blocks in `blocked`.
    pub fn new(context: StartContext, blocked: BlockedStarts) -> Self {
        Self {
            snapshots: SharedRead::new(PACE),
            context,
            blocked,
        }
    }

    /// Returns when the container with these device IDs may start.
    pub(crate) async fn check_start(
        &self,
        resource: ExtendedResource,
        mut ids: Vec<String>,
    ) -> Result<(), StartBlocked> {
        // kubelet names the IDs in any order; the log of Allocate calls and the plugin's copy of the checkpoint have them sorted.
        ids.sort_unstable();
        let began = Instant::now();
        let checked = self.check(resource, &ids, began + CHECK_LIMIT).await;
        let metrics = &self.context.metrics;
        metrics.pre_started(began.elapsed());
        match &checked {
            Ok(()) => self.blocked.remove(resource, &ids),
            Err(blocked) => {
                self.blocked.insert(resource, &ids, blocked);
                metrics.count(Outcome::Refused);
                warn!(
                    node = self.context.recorder.node_name(),
                    resource = self.context.node.settings.names.of(resource),
                    count = ids.len(),
                    reason = one_line(blocked),
                    "blocked the start of a container"
                );
            }
        }
        checked
    }

    /// Decides the start of the container with these device IDs, and until the deadline `until` again while a newer snapshot of
    /// kubelet may still settle the matter.
    async fn check(
        &self,
        resource: ExtendedResource,
        ids: &[String],
        until: Instant,
    ) -> Result<(), StartBlocked> {
        let node = &*self.context.node;
        let (mut pods, mut fleet) = (node.pods.clone(), node.fleet.clone());
        // The start waits for XIDs that an earlier process saw: they are in the Device object, and no probe finds them again.
        let health_loaded = fleet.wait_for(|fleet| fleet.is_health_loaded);
        if !matches!(timeout_at(until, health_loaded).await, Ok(Ok(_))) {
            return Err(StartBlocked::HealthUnknown);
        }
        // The CDI spec carries the GPU memory limits, which cannot be changed once the container runs. So the start waits until
        // the plugin has decided on which GPUs the driver enforces them.
        if timeout_at(until, node.until_limits_decided()).await.is_err() {
            return Err(StartBlocked::LimitsUnknown);
        }
        loop {
            // kubelet names neither pod nor container in its call, only device IDs.
            let snapshot = self.snapshots.read(take_snapshot(node)).await;
            let found = find_owner(&snapshot, &pods.borrow_and_update(), resource, ids);
            let uid = match found {
                Ok(uid) => uid,
                // kubelet may see a pod before this plugin's watch does.
                Err(OwnerUnknown::NotSeen) if Instant::now() < until => {
                    // After a timeout the condition of this match arm is false, which ends the loop.
                    let _ = timeout_at(until, pods.changed()).await;
                    continue;
                }
                // Without an owner there is no pod to record an event on; kubelet shows the error's text with the pod.
                Err(unknown) => return Err(unknown.into()),
            };
            let blocked = match self.decide(&snapshot, resource, ids, &uid).await {
                Ok(StartDecision::Start(files)) => {
                    node.readers.until_resolved(&node.settings.specs, &files).await;
                    return Ok(());
                }
                Ok(StartDecision::LookAgain(_)) if Instant::now() < until => {
                    tokio::time::sleep(RETRY_DELAY).await;
                    continue;
                }
                Ok(StartDecision::LookAgain(other)) => {
                    let pods = node.pods.borrow();
                    let (pod, other) = (pods.display_name(&uid), pods.display_name(&other));
                    StartBlocked::Unsettled { pod, other }
                }
                Err(blocked) => blocked,
            };
            self.report(&uid, &blocked).await;
            return Err(blocked);
        }
    }

    /// Decides on the start of the container of this pod that has these device IDs.
    async fn decide(
        &self,
        snapshot: &KubeletSnapshot,
        resource: ExtendedResource,
        ids: &[String],
        uid: &PodUid,
    ) -> Result<StartDecision, StartBlocked> {
        let (context, node) = (&self.context, &*self.context.node);
        let mut swaps = context.swaps.lock().await;
        // A record in the Device object counts before the pod's annotations, in either injection mode.
        swaps.load_for(uid).await.map_err(StartBlocked::SwapsUnknown)?;
        let mut checked = verify_start(node, snapshot, resource, ids, uid)?;
        let pod = checked.starting.pod.display_name();
        if checked.is_by_spec
            && let Some(problem) = node.injection_problem(resource.device_type())
        {
            return Err(StartBlocked::NoInjection { pod, problem });
        }
        if context.unplaced == OnUnplaced::Adopt && matches!(checked.verified, Err(StartRefusal::Unplaced(_)))
        {
            match adopt(node, &context.client, &checked.starting, snapshot.entries()).await {
                Ok(()) => context.metrics.count(Outcome::Adopted),
                Err(not_adopted) if checked.is_inherited => return Ok(restart(&pod, &not_adopted)),
                Err(not_adopted) => return Err(not_adopted.into()),
            }
            checked = verify_start(node, snapshot, resource, ids, uid)?;
        }
        // An answer by variable fixes a container's devices, so its pod may have to swap records with an equal pod.
        if let Some(other) = settle(&mut checked, snapshot, node, &mut swaps).await? {
            return Ok(StartDecision::LookAgain(other));
        }
        match &checked.verified {
            Ok(()) => self.start(&checked),
            Err(refusal) if checked.is_inherited && may_go_on(resource, refusal) => {
                Ok(restart(&pod, refusal))
            }
            Err(refusal) => {
                let refusal = refusal.clone();
                Err(StartBlocked::Refused { pod, refusal })
            }
        }
    }

    /// Lets a verified container start: writes its CDI spec, if it has one.
    fn start(&self, checked: &CheckedStart<'_>) -> Result<StartDecision, StartBlocked> {
        let (node, starting, pod) = (&*self.context.node, &checked.starting, &checked.starting.pod);
        let mut files = SpecFiles::new();
        if checked.is_by_spec {
            let pod = pod.display_name();
            files = write_specs(node, starting).map_err(|source| StartBlocked::Spec { pod, source })?;
        }
        // From here on the pod counts as started, also before the watch shows it.
        node.log().note_start(&pod.uid, starting.resource, starting.ids);
        node.answered.notify_one();
        self.log_start(starting);
        for (reason, doubt) in &pod.doubts {
            self.context.recorder.warn(pod, reason, doubt.clone());
        }
        Ok(StartDecision::Start(files))
    }

    fn log_start(&self, starting: &StartingContainer<'_>) {
        let settings = &self.context.node.settings;
        let StartingContainer { pod, resource, .. } = starting;
        let record = pod.record();
        let allocations = record.map(|placement| placement.to_allocations(settings.memory_unit));
        let devices = allocations.unwrap_or_default().remove(resource.device_type());
        info!(
            pod = pod.display_name(),
            container = starting.entries.first().map(|entry| entry.container.as_str()),
            node = self.context.recorder.node_name(),
            resource = settings.names.of(*resource),
            count = starting.ids.len(),
            devices = devices.and_then(|devices| serde_json::to_string(&devices).ok()),
            "a container starts"
        );
    }

    /// Records an event on the pod, and evicts the pod if no later try can succeed and the operator has turned evictions on.
    async fn report(&self, uid: &PodUid, blocked: &StartBlocked) {
        let Some(pod) = self.context.node.pods.borrow().get(uid).cloned() else {
            return;
        };
        let recorder = &self.context.recorder;
        recorder.warn(&pod, blocked.event_reason(), one_line(blocked));
        if blocked.is_final() {
            self.context.metrics.count(Outcome::Impossible);
            if self.context.evicts_mismatched {
                self.context.evict(&pod).await;
            }
        }
    }
}

/// True if a refused container may start again with the devices that another plugin gave it: its pod is charged for all of them.
fn may_go_on(resource: ExtendedResource, refusal: &StartRefusal) -> bool {
    match refusal {
        // The scheduler charges a pod without a usable record on every device that it may be on,
        StartRefusal::Unplaced(_) | StartRefusal::Unknown => true,
        // and a pod that the vendor's plugin served on the GPUs in kubelet's checkpoint, whatever its record names.
        StartRefusal::Mismatch { .. } => resource == ExtendedResource::Whole,
        _ => false,
    }
}

/// The decision that a container of a running pod starts again without a CDI spec, although the check failed for `reason`.
fn restart(pod: &str, reason: &(dyn Error + 'static)) -> StartDecision {
    warn!(
        pod,
        reason = one_line(reason),
        "a container of a running pod starts again with the devices that another plugin gave it"
    );
    StartDecision::Start(SpecFiles::new())
}

#[cfg(test)]
mod tests;
