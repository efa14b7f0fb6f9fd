//! Lets a container start once it is proven whose it is and that it will see what its pod's record says.
//!
//! Decides nothing itself: whose the device IDs are and what is to be done is decided in [`crate::proof`]. Whoever is held
//! is tried again by kubelet, with the reason in the pod's events.

mod adopt;
mod held;
mod reconcile;
mod restore;
mod specs;

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::ValueEnum;
use daemon::api_server::one_line;
use daemon::events::Recorder;
use kube::Client;
use proto::device::TYPE_GPU;
use proto::request::ContainerRequest;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use crate::cdi::SpecError;
use crate::eviction::evict;
use crate::exchange::{Exchange, ExchangeFailed};
use crate::extended_resource::ExtendedResource;
use crate::identity::checkpoint::{Allocated, Checkpoint};
use crate::inject;
use crate::metrics::{Metrics, Outcome};
use crate::plugin::NodeState;
use crate::pods::{NodePod, PodUid, Stage};
use crate::proof::environment::Kept;
use crate::proof::look::SharedLook;
use crate::proof::owner::{self, Look, Unproven};
use crate::proof::podresources::Lister;
use crate::proof::sight::{self, Sight};
use crate::proof::verdict::{self, Evidence, Refusal, Verdict};

use specs::{Files, prepare, until_resolved};

pub use held::{HeldContainers, HeldReason};
pub use reconcile::keep_reconciled;

/// Least time between two questions to kubelet, which answers a hundred a second in all.
const PACE: Duration = Duration::from_millis(15);

/// How long a start waits for what is not known yet: kubelet gives up after 30 s and tries again after 10 s more.
const PATIENCE: Duration = Duration::from_secs(8);

/// How long a look that was too early is waited after.
const SOON: Duration = Duration::from_millis(50);

/// How long after it has first told of the pods the API server may not tell yet what a predecessor let start.
const YOUTH: Duration = Duration::from_secs(30);

/// Most exchanges that one start may need.
const MOST_EXCHANGES: usize = 16;

/// What to do with a pod that sees other devices than its record names, for as long as it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnMismatch {
    /// Hold its containers.
    Refuse,
    /// Evict it, so that whoever made it makes another one.
    Evict,
}

/// What to do with a pod that the scheduler did not place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Unplaced {
    /// Hold its containers.
    Refuse,
    /// Write a record for it where it fits.
    Adopt,
}

/// What the operator chooses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// kubelet's pod-resources socket.
    pub pod_resources: PathBuf,
    /// For pods that see wrong devices.
    pub on_mismatch: OnMismatch,
    /// For pods without record.
    pub unplaced: Unplaced,
}

/// Why a container does not start now.
#[derive(Debug, thiserror::Error)]
pub enum Held {
    /// It is not known whose it is.
    #[error(transparent)]
    Unproven(#[from] Unproven),
    /// It must not start.
    #[error("pod {pod}: {refusal}")]
    Refused {
        /// The pod.
        pod: String,
        /// Why.
        refusal: Refusal,
    },
    /// The records of two pods could not be exchanged.
    #[error("pod {pod} was given the devices of pod {other}, and their records could not be exchanged")]
    NotExchanged {
        /// The pod.
        pod: String,
        /// The other one.
        other: String,
        /// Why.
        #[source]
        source: ExchangeFailed,
    },
    /// Whoever it could exchange records with may have the same devices.
    #[error(
        "pod {pod} was given devices that are counted for pod {other}, and it is not known yet what that one was given"
    )]
    Unsettled {
        /// The pod.
        pod: String,
        /// The other one.
        other: String,
    },
    /// What has been exchanged is not known.
    #[error("it is not known which pods have exchanged their records")]
    NotLoaded(#[source] ExchangeFailed),
    /// Its CDI spec is not in place.
    #[error("pod {pod}: its CDI spec is not in place")]
    Spec {
        /// The pod.
        pod: String,
        /// The reason.
        #[source]
        source: SpecError,
    },
    /// The errors that an earlier process saw on the devices are not known yet.
    #[error(
        "it is not known yet which devices were unhealthy before the plugin started: the API server does not answer"
    )]
    NotRecalled,
    /// No container of this node can get a device.
    #[error("pod {pod}: this node cannot inject devices: {problem}")]
    NoInjection {
        /// The pod.
        pod: String,
        /// The reason, with the setting to change.
        problem: String,
    },
    /// A record cannot be written for it.
    #[error("pod {pod} was not placed by gpushare-scheduler and cannot be adopted: {problem}")]
    NotAdopted {
        /// The pod.
        pod: String,
        /// Why.
        problem: String,
    },
}

/// Lets containers start.
pub struct Gate {
    client: Client,
    policy: Policy,
    lister: Lister,
    looks: SharedLook<Look>,
    /// Whoever decides holds this, so that two starts do not count on the same pod.
    exchange: Arc<Mutex<Exchange>>,
    recorder: Recorder,
    metrics: Metrics,
    held: HeldContainers,
    /// When the pods of this node were known first.
    told: OnceLock<Instant>,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

/// What came of one decision.
enum Decision {
    /// It starts once the runtime has read these specs.
    Start(Files),
    /// This pod's devices may be another's too.
    LookAgain(PodUid),
}

/// The call of kubelet that asks for a start; the IDs are sorted.
struct Start<'a> {
    resource: ExtendedResource,
    ids: &'a [String],
    uid: PodUid,
}

impl Gate {
    /// A gate that has let nobody start yet.
    pub fn new(
        client: Client,
        policy: Policy,
        exchange: Arc<Mutex<Exchange>>,
        recorder: Recorder,
        metrics: Metrics,
    ) -> Self {
        let lister = Lister::new(policy.pod_resources.clone());
        Self {
            client,
            policy,
            lister,
            looks: SharedLook::new(PACE),
            exchange,
            recorder,
            metrics,
            held: HeldContainers::default(),
            told: OnceLock::new(),
        }
    }

    /// What is counted.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The containers that do not start at present.
    pub fn held(&self) -> &HeldContainers {
        &self.held
    }

    /// Returns when the container that holds these device IDs may start.
    ///
    /// # Errors
    /// Why it must not, or not yet.
    pub async fn open(
        &self,
        node: &NodeState,
        resource: ExtendedResource,
        mut ids: Vec<String>,
    ) -> Result<(), Held> {
        ids.sort_unstable();
        let began = Instant::now();
        let opened = self.try_open(node, resource, &ids, began + PATIENCE).await;
        self.metrics.pre_started(began.elapsed());
        match &opened {
            Ok(()) => self.held.release(resource, &ids),
            Err(held) => {
                self.held.hold(resource, &ids, HeldReason::from(held));
                self.metrics.count(Outcome::Refused);
                let (node_name, resource) = (self.recorder.node_name(), node.settings.names.of(resource));
                warn!(
                    node = node_name,
                    resource,
                    count = ids.len(),
                    reason = one_line(held),
                    "a container is held"
                );
            }
        }
        opened
    }

    async fn try_open(
        &self,
        node: &NodeState,
        resource: ExtendedResource,
        ids: &[String],
        until: Instant,
    ) -> Result<(), Held> {
        let (mut pods, mut fleet) = (node.pods.clone(), node.fleet.clone());
        if !matches!(
            timeout_at(until, fleet.wait_for(|fleet| fleet.is_health_loaded)).await,
            Ok(Ok(_))
        ) {
            return Err(Held::NotRecalled);
        }
        loop {
            let look = self.look(node).await;
            let found = owner::find(&look, &pods.borrow_and_update(), resource, ids);
            match found {
                Ok(uid) => {
                    let start = Start { resource, ids, uid };
                    match self.decide(node, &look, &start).await {
                        Ok(Decision::Start(files)) => {
                            until_resolved(node, &files).await;
                            return Ok(());
                        }
                        Ok(Decision::LookAgain(_)) if Instant::now() < until => {
                            tokio::time::sleep(SOON).await;
                        }
                        Ok(Decision::LookAgain(other)) => {
                            let name = |uid| {
                                node.pods
                                    .borrow()
                                    .get(uid)
                                    .map(NodePod::display_name)
                                    .unwrap_or_default()
                            };
                            let held = Held::Unsettled {
                                pod: name(&start.uid),
                                other: name(&other),
                            };
                            self.tell(node, &start.uid, &held).await;
                            return Err(held);
                        }
                        Err(held) => {
                            self.tell(node, &start.uid, &held).await;
                            return Err(held);
                        }
                    }
                }
                // kubelet knows the pod before we do.
                Err(Unproven::NotTold) if Instant::now() < until => {
                    let _ = timeout_at(until, pods.changed()).await;
                }
                Err(unproven) => return Err(unproven.into()),
            }
        }
    }

    /// Notes that the pods of this node are known.
    fn note_told(&self) {
        self.told.get_or_init(Instant::now);
    }

    fn is_young(&self) -> bool {
        self.told.get().is_none_or(|told| told.elapsed() < YOUTH)
    }

    async fn look(&self, node: &NodeState) -> Look {
        let look = async || {
            let listed = self.lister.list(&node.settings.names).await;
            // After the list, so that it is no older.
            Look {
                listed: listed.map(Arc::new),
                written: node.checkpoint().and_then(Checkpoint::read),
            }
        };
        self.looks.look(look).await
    }

    async fn decide(&self, node: &NodeState, look: &Look, start: &Start<'_>) -> Result<Decision, Held> {
        let mut exchange = self.exchange.lock().await;
        exchange.load_for(&start.uid).await.map_err(Held::NotLoaded)?;
        let written = &look.written.clone().unwrap_or_default();
        for _ in 0..MOST_EXCHANGES {
            let knowledge = Knowledge {
                is_written_known: look.written.is_some(),
                is_young: self.is_young(),
            };
            let Judged {
                pod,
                verdict,
                beside,
                is_by_spec,
                is_inherited,
            } = judge(node, written, knowledge, start)?;
            if is_by_spec && let Some(problem) = node.no_injection(start.resource.device_type()) {
                return Err(Held::NoInjection {
                    pod: pod.display_name(),
                    problem,
                });
            }
            match verdict {
                Verdict::Confirm => {
                    let files = if is_by_spec {
                        prepare(node, &pod, written, start)?
                    } else {
                        Files::new()
                    };
                    node.ledger().confirm(&pod.uid);
                    node.ledger().start(start.resource, start.ids);
                    node.answered.notify_one();
                    self.log_start(node, &pod, written, start);
                    return Ok(Decision::Start(files));
                }
                Verdict::LookAgain(other) => return Ok(Decision::LookAgain(other)),
                Verdict::Exchange(other) => {
                    let name = node
                        .pods
                        .borrow()
                        .get(&other)
                        .map(NodePod::display_name)
                        .unwrap_or_default();
                    let swapped = exchange.swap(node, (&pod.uid, &other), &beside).await;
                    let n_swapped = swapped.map_err(|source| Held::NotExchanged {
                        pod: pod.display_name(),
                        other: name.clone(),
                        source,
                    })?;
                    for _ in 0..n_swapped {
                        self.metrics.count(Outcome::Exchanged);
                    }
                    info!(
                        pod = pod.display_name(),
                        other = name,
                        n_beside = n_swapped.saturating_sub(1),
                        "kubelet admitted these equal pods in another order: their records are exchanged"
                    );
                }
                Verdict::Refuse(Refusal::Unplaced(_)) if self.policy.unplaced == Unplaced::Adopt => {
                    match self.adopt(node, &pod, written, start).await {
                        Ok(()) => self.metrics.count(Outcome::Adopted),
                        Err(held) if is_inherited => return Ok(start_again(&pod, &held)),
                        Err(held) => return Err(held),
                    }
                }
                Verdict::Refuse(refusal) if is_inherited && survives(start.resource, &refusal) => {
                    return Ok(start_again(&pod, &refusal));
                }
                Verdict::Refuse(refusal) => {
                    return Err(Held::Refused {
                        pod: pod.display_name(),
                        refusal,
                    });
                }
            }
        }
        Ok(Decision::LookAgain(start.uid.clone()))
    }

    /// Logs a start that the pod's record and kubelet agree on: pod, container, and the devices with their amounts.
    fn log_start(&self, node: &NodeState, pod: &NodePod, written: &[Allocated], start: &Start<'_>) {
        let record = pod
            .placement
            .as_ref()
            .map(|placement| placement.to_allocations(node.settings.memory_unit));
        let devices = record
            .ok()
            .and_then(|record| serde_json::to_string(record.get(start.resource.device_type())?).ok());
        let is_own = |entry: &&Allocated| {
            entry.pod == start.uid && entry.resource == start.resource && entry.ids == start.ids
        };
        info!(
            pod = pod.display_name(),
            container = written.iter().find(is_own).map(|entry| entry.container.as_str()),
            node = self.recorder.node_name(),
            resource = node.settings.names.of(start.resource),
            count = start.ids.len(),
            devices,
            "a container starts"
        );
    }

    /// Tells the pod's owner, and evicts the pod if it is past help and the policy says so.
    async fn tell(&self, node: &NodeState, uid: &PodUid, held: &Held) {
        let Some(pod) = node.pods.borrow().get(uid).cloned() else {
            return;
        };
        let (reason, is_final) = match held {
            Held::Refused { refusal, .. } => (refusal_reason(refusal), refusal.is_final()),
            Held::NotAdopted { .. } => ("GPUNotPlaced", false),
            Held::NoInjection { .. } => ("GPUInjectionImpossible", false),
            _ => ("GPUNotReady", false),
        };
        self.recorder.warn(&pod, reason, one_line(held));
        if !is_final {
            return;
        }
        self.metrics.count(Outcome::Impossible);
        if self.policy.on_mismatch == OnMismatch::Evict {
            self.evict(&pod).await;
        }
    }

    /// Evicts a pod that sees devices which are not counted for it.
    async fn evict(&self, pod: &NodePod) {
        match evict(&self.client, pod).await {
            Ok(()) => {
                self.metrics.count(Outcome::Evicted);
                info!(
                    pod = pod.display_name(),
                    "evicted, as it sees devices that are not counted for it"
                );
            }
            Err(error) => warn!(
                pod = pod.display_name(),
                error = one_line(&error),
                "trying again at its next start"
            ),
        }
    }
}

fn refusal_reason(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::Unplaced(_) => "GPUNotPlaced",
        Refusal::Unavailable(_) => "GPUUnavailable",
        Refusal::NoRoom(_) => "GPUOvercommitted",
        Refusal::Mismatch { .. }
        | Refusal::NotAllDevices { .. }
        | Refusal::Limits { .. }
        | Refusal::Overridden { .. }
        | Refusal::OverridesVoid { .. } => "GPUMismatch",
        Refusal::AllDevicesForbidden => "GPUAllDevicesForbidden",
        Refusal::Unknown => "GPUNotReady",
    }
}

/// Whether a container that another plugin gave its devices goes on with them: nobody is charged for less than it holds. A pod
/// without record is charged on every device that it may be on, and one that the vendor's plugin served on the GPUs that
/// kubelet's books name.
fn survives(resource: ExtendedResource, refusal: &Refusal) -> bool {
    match refusal {
        Refusal::Unplaced(_) | Refusal::Unknown => true,
        Refusal::Mismatch { .. } => resource == ExtendedResource::Whole,
        Refusal::Unavailable(_)
        | Refusal::NoRoom(_)
        | Refusal::Overridden { .. }
        | Refusal::OverridesVoid { .. }
        | Refusal::AllDevicesForbidden
        | Refusal::NotAllDevices { .. }
        | Refusal::Limits { .. } => false,
    }
}

fn start_again(pod: &NodePod, reason: &(dyn std::error::Error + 'static)) -> Decision {
    let (pod, reason) = (pod.display_name(), one_line(reason));
    warn!(
        pod,
        reason, "a container of a running pod starts again with what it was given before this plugin came"
    );
    Decision::Start(Files::new())
}

/// What is to be done with a start.
struct Judged {
    pod: NodePod,
    verdict: Verdict,
    /// What can be exchanged in the same write, if something is to be.
    beside: Vec<(PodUid, PodUid)>,
    /// Whether the container sees what its CDI spec says.
    is_by_spec: bool,
    /// Whether it ran before this process gave any answer for it, and sees what it saw then.
    is_inherited: bool,
}

/// How much is known besides.
#[derive(Clone, Copy)]
struct Knowledge {
    is_written_known: bool,
    is_young: bool,
}

/// What is to be done with the start of this pod's container, by what is known now.
fn judge(
    node: &NodeState,
    written: &Arc<Vec<Allocated>>,
    knowledge: Knowledge,
    start: &Start<'_>,
) -> Result<Judged, Held> {
    let offered = node.offered();
    let pods = node.pods.borrow();
    let mut ledger = node.ledger();
    ledger.serve(offered);
    ledger.learn_from(written, &pods);
    let pod = pods.get(&start.uid).cloned().ok_or(Unproven::NotTold)?;
    let fleet = node.fleet.borrow();
    if start.resource.device_type() == TYPE_GPU
        && let Err(refusal) = verdict::check_all_devices(&pod, &fleet, node.settings.allows_all_devices)
    {
        return Ok(Judged {
            pod,
            verdict: Verdict::Refuse(refusal),
            beside: Vec::new(),
            is_by_spec: false,
            is_inherited: false,
        });
    }
    let variable = &node.settings.visible_devices_env;
    let is_own = |entry: &&Allocated| {
        entry.pod == start.uid && entry.resource == start.resource && entry.ids == start.ids
    };
    // Containers of the pod that hold the same IDs were answered alike, or one of them cannot be helped.
    let kept = written
        .iter()
        .filter(is_own)
        .map(|entry| &entry.answer)
        .next()
        .or_else(|| ledger.response(start.resource, start.ids));
    // A pod runs once all its containers have been created: this is none's first start, and kubelet repeats the answer of then.
    let ran_before = pod.stage == Stage::Running && ledger.response(start.resource, start.ids).is_none();
    let Some(kept) = kept else {
        let verdict = Verdict::Refuse(Refusal::Unknown);
        return Ok(Judged {
            pod,
            verdict,
            beside: Vec::new(),
            is_by_spec: false,
            is_inherited: ran_before,
        });
    };
    let containers = containers_of(&pod, written, start);
    let own = sight::of_answer(start.resource, kept, variable, &fleet);
    if own.is_none() && must_speak(&pod, &containers, start.resource) {
        let verdict = Verdict::Refuse(Refusal::Unknown);
        return Ok(Judged {
            pod,
            verdict,
            beside: Vec::new(),
            is_by_spec: false,
            is_inherited: ran_before,
        });
    }
    let is_by_spec = own == Some(Sight::Spec);
    let mut seen = sight::of_pod(written, &start.uid, variable, &fleet);
    if let Some(own) = own {
        sight::add(&mut seen, start.resource.device_type(), own);
    }
    let Knowledge {
        is_written_known,
        is_young,
    } = knowledge;
    let unit = node.settings.memory_unit;
    let evidence = Evidence {
        pods: &pods,
        fleet: &fleet,
        ledger: &ledger,
        written,
        is_written_known,
        is_young,
        variable,
        unit,
    };
    let verdict = match evidence.judge(&pod, &seen) {
        Verdict::Confirm if !is_by_spec => {
            let kept = Kept {
                pod: &pod,
                containers: &containers,
                resource: start.resource,
                answer: kept,
            };
            kept.check(&node.settings, &fleet)
                .map_or_else(Verdict::Refuse, |()| Verdict::Confirm)
        }
        Verdict::Confirm if !node.is_cdi_proven() => {
            let variable = sets_variable(&pod, &containers, variable);
            variable.map_or(Verdict::Confirm, |container| {
                Verdict::Refuse(Refusal::OverridesVoid {
                    container,
                    variable: node.settings.visible_devices_env.clone(),
                })
            })
        }
        verdict => verdict,
    };
    let beside = if let Verdict::Exchange(other) = &verdict {
        evidence.exchanges_beside(&pod, other)
    } else {
        Vec::new()
    };
    Ok(Judged {
        pod,
        verdict,
        beside,
        is_by_spec,
        is_inherited: ran_before && !is_by_spec,
    })
}

/// The containers of the pod that may be the one which starts: those that kubelet has given these IDs, else those that ask for
/// so many.
fn containers_of<'a>(pod: &'a NodePod, written: &'a [Allocated], start: &Start<'_>) -> Vec<&'a str> {
    let is_own = |entry: &&Allocated| {
        entry.pod == pod.uid && entry.resource == start.resource && entry.ids == start.ids
    };
    let named: Vec<&str> = written
        .iter()
        .filter(is_own)
        .map(|entry| &*entry.container)
        .collect();
    let asks = |container: &&ContainerRequest| start.resource.count(container) == start.ids.len() as u64;
    if named.is_empty() {
        pod.containers
            .iter()
            .filter(asks)
            .map(|container| &*container.name)
            .collect()
    } else {
        named
    }
}

/// The first of these containers that sets the vendor's variable itself to something that may show it a GPU. With CDI that
/// means nothing; where the runtime drops CDI devices it would win over the answer.
fn sets_variable(pod: &NodePod, containers: &[&str], variable: &str) -> Option<String> {
    let shows_none = |value: &str| matches!(value, "" | "void" | "none");
    let own = pod
        .variables
        .iter()
        .filter(|own| own.name == variable && containers.contains(&&*own.container));
    own.into_iter()
        .find(|own| !own.value.as_deref().is_some_and(shows_none))
        .map(|own| own.container.clone())
}

/// Whether the answer for this resource says what the container sees, whichever of these it is.
fn must_speak(pod: &NodePod, containers: &[&str], resource: ExtendedResource) -> bool {
    let mut asking = pod
        .containers
        .iter()
        .filter(|container| containers.contains(&&*container.name) && resource.count(container) > 0);
    !containers.is_empty() && asking.all(|container| inject::speaks(resource, container))
}

#[cfg(test)]
mod tests;
