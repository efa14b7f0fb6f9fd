//! The check that kubelet's `PreStartContainer` waits for.

use std::sync::Arc;
use std::time::Duration;

use proto::device::TYPE_GPU;
use proto::record::VISIBLE_DEVICES;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use crate::envvar::environment::ByVariable;
use crate::envvar::partners::Remedy;
use crate::envvar::swap::RecordSwaps;
use crate::extended_resource::ExtendedResource;
use crate::injection::content::speaks;
use crate::kubelet_checkpoint::Allocated;
use crate::metrics::{Metrics, Outcome};
use crate::node_state::NodeState;
use crate::pods::{NodePod, PodStage, PodUid};
use crate::settings::{OnMismatch, OnUnplaced};
use crate::verify::owner::{OwnerUnknown, find_owner};
use crate::verify::snapshot::{KubeletSnapshot, Snapshots};
use crate::verify::visible::{Visible, add_visible, visible_by_answer, visible_to_pod};
use crate::verify::{StartEvidence, StartRefusal, check_all_devices};
use daemon::api_server::one_line;

use super::adopt::adopt;
use super::blocked::{BlockedStarts, StartBlocked};
use super::specs::{SpecFiles, until_resolved, write_specs};
use super::{Start, StartContext, Verification, container, verify_or_remedy};

/// Longest wait of a start for facts that are not known yet: kubelet gives up after 30 s and tries again after 10 s more.
const CHECK_LIMIT: Duration = Duration::from_secs(8);

/// Delay before kubelet's state is read again when it was not conclusive yet.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Most swaps of records that one start may need.
const MAX_SWAPS: usize = 16;

/// Checks each container before it starts.
#[expect(missing_debug_implementations, reason = "a client has none")]
pub struct StartChecker {
    context: StartContext,
    snapshots: Snapshots,
    blocked: BlockedStarts,
}

/// The decision about one start.
enum StartDecision {
    /// The container starts once the runtime has read these specs.
    Start(SpecFiles),
    /// The pod's devices may be another pod's too, which another snapshot may show.
    LookAgain(PodUid),
}

impl StartChecker {
    /// A checker that keeps the containers that it blocks in `blocked`.
    pub fn new(context: StartContext, blocked: BlockedStarts) -> Self {
        Self {
            snapshots: Snapshots::default(),
            context,
            blocked,
        }
    }

    /// The process's metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.context.metrics
    }

    /// Returns when the container with these device IDs may start.
    ///
    /// # Errors
    /// It must not start, or not yet.
    pub async fn check_start(
        &self,
        resource: ExtendedResource,
        mut ids: Vec<String>,
    ) -> Result<(), StartBlocked> {
        // kubelet names the IDs in any order; the log and the checkpoint have them sorted.
        ids.sort_unstable();
        let began = Instant::now();
        let checked = self.check(resource, &ids, began + CHECK_LIMIT).await;
        self.metrics().pre_started(began.elapsed());
        match &checked {
            Ok(()) => self.blocked.remove(resource, &ids),
            Err(blocked) => {
                self.blocked.insert(resource, &ids, blocked);
                self.metrics().count(Outcome::Refused);
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

    async fn check(
        &self,
        resource: ExtendedResource,
        ids: &[String],
        until: Instant,
    ) -> Result<(), StartBlocked> {
        let node = &*self.context.node;
        let (mut pods, mut fleet) = (node.pods.clone(), node.fleet.clone());
        // An XID that an earlier process saw is in the Device object alone: no probe finds it again.
        let recalled = fleet.wait_for(|fleet| fleet.is_health_loaded);
        if !matches!(timeout_at(until, recalled).await, Ok(Ok(_))) {
            return Err(StartBlocked::HealthUnknown);
        }
        // The CDI spec carries the limits, and those of a running container cannot be changed.
        if timeout_at(until, node.until_limits_decided()).await.is_err() {
            return Err(StartBlocked::LimitsUnknown);
        }
        loop {
            // kubelet names neither pod nor container in its call, only device IDs.
            let snapshot = self.snapshots.take(node).await;
            let found = find_owner(&snapshot, &pods.borrow_and_update(), resource, ids);
            let uid = match found {
                Ok(uid) => uid,
                // kubelet may see a pod before this plugin's watch does.
                Err(OwnerUnknown::NotSeen) if Instant::now() < until => {
                    let _ = timeout_at(until, pods.changed()).await;
                    continue;
                }
                Err(unknown) => return Err(unknown.into()),
            };
            let start = Start { resource, ids, uid };
            let blocked = match self.decide(&snapshot, &start).await {
                Ok(StartDecision::Start(files)) => {
                    until_resolved(node, &files).await;
                    return Ok(());
                }
                Ok(StartDecision::LookAgain(_)) if Instant::now() < until => {
                    tokio::time::sleep(RETRY_DELAY).await;
                    continue;
                }
                Ok(StartDecision::LookAgain(other)) => StartBlocked::Unsettled {
                    pod: self.display_name(&start.uid),
                    other: self.display_name(&other),
                },
                Err(blocked) => blocked,
            };
            self.report(&start.uid, &blocked).await;
            return Err(blocked);
        }
    }

    async fn decide(
        &self,
        snapshot: &KubeletSnapshot,
        start: &Start<'_>,
    ) -> Result<StartDecision, StartBlocked> {
        let node = &*self.context.node;
        let mut swaps = self.context.swaps.lock().await;
        swaps
            .load_for(&start.uid)
            .await
            .map_err(StartBlocked::SwapsUnknown)?;
        let allocated = snapshot.allocated.clone().unwrap_or_default();
        // Each swap gives the pod another record, by which the next verification goes.
        for _ in 0..MAX_SWAPS {
            let CheckedStart {
                pod,
                verification,
                is_by_spec,
                is_inherited,
            } = verify_start(node, snapshot, start)?;
            if is_by_spec && let Some(problem) = node.no_injection(start.resource.device_type()) {
                return Err(StartBlocked::NoInjection {
                    pod: pod.display_name(),
                    problem,
                });
            }
            match verification {
                Verification::Passed => {
                    let files = if is_by_spec {
                        write_specs(node, &pod, &allocated, start)?
                    } else {
                        SpecFiles::new()
                    };
                    // From here on the pod counts as started, also before the watch shows it.
                    node.log().note_start(&pod.uid, start.resource, start.ids);
                    node.answered.notify_one();
                    self.log_start(&pod, &allocated, start);
                    return Ok(StartDecision::Start(files));
                }
                Verification::Remedy(Remedy::LookAgain(other)) => return Ok(StartDecision::LookAgain(other)),
                Verification::Remedy(Remedy::Swap(partner)) => {
                    self.swap(&mut swaps, &pod, &partner).await?;
                }
                Verification::Refused(StartRefusal::Unplaced(_))
                    if self.context.policy.unplaced == OnUnplaced::Adopt =>
                {
                    match adopt(&self.context, &pod, &allocated, start).await {
                        Ok(()) => self.metrics().count(Outcome::Adopted),
                        Err(blocked) if is_inherited => return Ok(start_again(&pod, &blocked)),
                        Err(blocked) => return Err(blocked),
                    }
                }
                Verification::Refused(refusal) if is_inherited && survives(start.resource, &refusal) => {
                    return Ok(start_again(&pod, &refusal));
                }
                Verification::Refused(refusal) => {
                    return Err(StartBlocked::Refused {
                        pod: pod.display_name(),
                        refusal,
                    });
                }
            }
        }
        Ok(StartDecision::LookAgain(start.uid.clone()))
    }

    async fn swap(
        &self,
        swaps: &mut RecordSwaps,
        pod: &NodePod,
        partner: &PodUid,
    ) -> Result<(), StartBlocked> {
        let other = self.display_name(partner);
        match swaps.swap(&self.context.node, &pod.uid, partner).await {
            Ok(true) => {
                self.metrics().count(Outcome::Exchanged);
                let pod = pod.display_name();
                info!(
                    pod,
                    other, "kubelet admitted these equal pods in another order: swapped their records"
                );
                Ok(())
            }
            Ok(false) => Ok(()),
            Err(source) => Err(StartBlocked::NotSwapped {
                pod: pod.display_name(),
                other,
                source,
            }),
        }
    }

    /// Logs a start with pod, container, and the devices with their amounts.
    fn log_start(&self, pod: &NodePod, allocated: &[Allocated], start: &Start<'_>) {
        let settings = &self.context.node.settings;
        let record = pod.record();
        let devices = record.and_then(|placement| {
            let allocations = placement.to_allocations(settings.memory_unit);
            serde_json::to_string(allocations.get(start.resource.device_type())?).ok()
        });
        let entry = allocated.iter().find(|entry| start.is_in(entry));
        info!(
            pod = pod.display_name(),
            container = entry.map(|entry| entry.container.as_str()),
            node = self.context.recorder.node_name(),
            resource = settings.names.of(start.resource),
            count = start.ids.len(),
            devices,
            "a container starts"
        );
    }

    /// Records an event on the pod, and evicts the pod if no other try can succeed and the policy says so.
    async fn report(&self, uid: &PodUid, blocked: &StartBlocked) {
        let Some(pod) = self.context.node.pods.borrow().get(uid).cloned() else {
            return;
        };
        self.context
            .recorder
            .warn(&pod, blocked.event_reason(), one_line(blocked));
        if blocked.is_final() {
            self.metrics().count(Outcome::Impossible);
            if self.context.policy.on_mismatch == OnMismatch::Evict {
                self.context.evict(&pod).await;
            }
        }
    }

    fn display_name(&self, uid: &PodUid) -> String {
        let pods = self.context.node.pods.borrow();
        pods.get(uid).map(NodePod::display_name).unwrap_or_default()
    }
}

/// True if a container that another plugin gave its devices goes on with them: it is charged for no less than it holds.
fn survives(resource: ExtendedResource, refusal: &StartRefusal) -> bool {
    match refusal {
        // A pod without record is charged on every device that it may be on.
        StartRefusal::Unplaced(_) | StartRefusal::Unknown => true,
        // A pod that the vendor's plugin served is charged on the GPUs of kubelet's checkpoint.
        StartRefusal::Mismatch { .. } => resource == ExtendedResource::Whole,
        StartRefusal::Unavailable(_)
        | StartRefusal::NoCapacity(_)
        | StartRefusal::Overridden { .. }
        | StartRefusal::OverridesVoid { .. }
        | StartRefusal::SetsLimit { .. }
        | StartRefusal::AllDevicesForbidden
        | StartRefusal::NotAllDevices { .. }
        | StartRefusal::Limits { .. } => false,
    }
}

fn start_again(pod: &NodePod, reason: &(dyn std::error::Error + 'static)) -> StartDecision {
    warn!(
        pod = pod.display_name(),
        reason = one_line(reason),
        "a container of a running pod starts again with the devices that another plugin gave it"
    );
    StartDecision::Start(SpecFiles::new())
}

/// A start with the result of its verification.
struct CheckedStart {
    pod: NodePod,
    verification: Verification,
    /// True if a CDI spec decides the devices of the container.
    is_by_spec: bool,
    /// True if the container ran before this process gave any answer for it, and sees the same devices as then.
    is_inherited: bool,
}

impl CheckedStart {
    fn refused(pod: NodePod, refusal: StartRefusal, is_inherited: bool) -> Self {
        Self {
            pod,
            verification: Verification::Refused(refusal),
            is_by_spec: false,
            is_inherited,
        }
    }
}

/// Verifies the start of this pod's container with the facts of this moment.
fn verify_start(
    node: &NodeState,
    snapshot: &KubeletSnapshot,
    start: &Start<'_>,
) -> Result<CheckedStart, StartBlocked> {
    let allocated: &Arc<Vec<Allocated>> = &snapshot.allocated.clone().unwrap_or_default();
    let is_young = node.is_young();
    let offered = node.offered();
    let pods = node.pods.borrow();
    let mut log = node.log();
    log.set_offered(offered);
    // kubelet's checkpoint is proof, so it corrects the log before the pod is verified by it.
    log.reconcile(allocated, &pods);
    let pod = pods.get(&start.uid).cloned().ok_or(OwnerUnknown::NotSeen)?;
    let fleet = node.fleet.borrow();
    if start.resource.device_type() == TYPE_GPU
        && let Err(refusal) = check_all_devices(&pod, &fleet, node.settings.allows_all_devices)
    {
        return Ok(CheckedStart::refused(pod, refusal, false));
    }
    let response = log.response(start.resource, start.ids);
    // A pod runs once all its containers have been created: this is not the first start, and kubelet repeats the answer of then.
    let ran_before = pod.stage == PodStage::Running && response.is_none();
    // Containers of the pod with the same IDs have equal answers, or the verification refuses the pod.
    let entry = allocated.iter().find(|entry| start.is_in(entry));
    let Some(answer) = entry.map(|entry| &entry.answer).or(response) else {
        return Ok(CheckedStart::refused(pod, StartRefusal::Unknown, ran_before));
    };
    let containers = start.containers(&pod, allocated);
    let own = visible_by_answer(start.resource, answer, &fleet);
    if own.is_none() && must_name_devices(&pod, &containers, start.resource) {
        return Ok(CheckedStart::refused(pod, StartRefusal::Unknown, ran_before));
    }
    let is_by_spec = own == Some(Visible::BySpec);
    let mut seen = visible_to_pod(allocated, &start.uid, &fleet);
    if let Some(own) = own {
        add_visible(&mut seen, start.resource.device_type(), own);
    }
    let evidence = StartEvidence {
        pods: &pods,
        fleet: &fleet,
        log: &log,
        allocated,
        is_checkpoint_known: snapshot.allocated.is_some(),
        is_young,
        unit: node.settings.memory_unit,
    };
    let mut verification = verify_or_remedy(&evidence, &pod, &seen);
    if verification == Verification::Passed {
        let checked = if is_by_spec {
            check_variable(node, &pod, &containers)
        } else {
            let enforcements = node.enforcements.borrow();
            let by_variable = ByVariable {
                enforcements: &enforcements,
                pod: &pod,
                containers: &containers,
                resource: start.resource,
                answer,
            };
            by_variable.check(&node.settings, &fleet)
        };
        if let Err(refusal) = checked {
            verification = Verification::Refused(refusal);
        }
    }
    Ok(CheckedStart {
        verification,
        is_by_spec,
        is_inherited: ran_before && !is_by_spec,
        pod: pod.clone(),
    })
}

/// Checks that none of these containers sets the vendor's variable to a value that may show it a GPU, unless the runtime is known
/// to act on CDI devices: a runtime that drops them would act on the variable.
fn check_variable(node: &NodeState, pod: &NodePod, containers: &[&str]) -> Result<(), StartRefusal> {
    if node.is_cdi_proven() {
        return Ok(());
    }
    for own in pod.variables.iter() {
        let shows_none = matches!(own.value.as_deref(), Some("" | "void" | "none"));
        if own.name == VISIBLE_DEVICES && !shows_none && containers.contains(&own.container.as_str()) {
            return Err(StartRefusal::OverridesVoid {
                container: own.container.clone(),
                variable: VISIBLE_DEVICES.to_owned(),
            });
        }
    }
    Ok(())
}

/// True if the answer for this resource names the devices of the container, whichever of these it is.
fn must_name_devices(pod: &NodePod, containers: &[&str], resource: ExtendedResource) -> bool {
    for name in containers {
        if let Some(container) = container(pod, name)
            && resource.count(container) > 0
            && !speaks(resource, container)
        {
            return false;
        }
    }
    !containers.is_empty()
}

#[cfg(test)]
mod tests;
