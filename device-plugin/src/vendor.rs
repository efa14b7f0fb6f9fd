//! Devices that kubelet gave to pods of a vendor's plugin, or of a vendor's DRA driver: read from kubelet, compared with the
//! records of our scheduler, and what no record names is published for the scheduler to count.
//!
//! Reads when such a pod comes, goes or gets on, and now and then; never while kubelet waits for an answer of ours, because a
//! list of its devices can disturb an allocation that is under way.

mod admin_access;
mod claims;
mod pod_resources;
mod warnings;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::one_line;
use daemon::events::Recorder;
use prost::Message;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::kubelet_allocations::{KubeletAllocation, KubeletAllocations, physical_id};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use crate::extended_resource::ExtendedResource;
use crate::fleet::Fleet;
use crate::inventory::{Gpu, PhysicalId};
use crate::kubelet_checkpoint::{self, CheckpointError};
use crate::pods::{Claimant, NodePod, PodUid, Pods, Stage};
use crate::runtime_hook::seen::Seen;
use crate::verify::visible::{Visible, visible_by_answer};

use pod_resources::Listed;
use warnings::Warnings;

pub use admin_access::AdminAccess;
pub use claims::{Claim, ClaimName, ClaimedDevice, DraDevice};
pub use pod_resources::PodResourcesError;

/// How often kubelet is asked although nothing is known to have happened.
const PERIOD: Duration = Duration::from_secs(60);

/// Events that come together are one; kubelet answers a limited number of questions a second.
const SETTLE: Duration = Duration::from_millis(500);

/// How long the first word waits for the runtime: what it tells corrects what kubelet tells.
const HOOK_WAIT: Duration = Duration::from_secs(5);

/// Where to read and what to look for.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The resources that vendors' plugins serve.
    pub resources: BTreeSet<String>,
    /// The vendor's resource that this plugin serves itself: pods may be left that the vendor's plugin served before.
    pub ours: Option<String>,
    /// The DRA drivers whose devices are GPUs of this node.
    pub dra_drivers: BTreeSet<String>,
    /// The variable that names a container's GPUs.
    pub visible_devices_env: String,
    /// kubelet's pod-resources socket.
    pub socket: PathBuf,
    /// kubelet's device plugin directory, with its checkpoint.
    pub device_plugin_dir: PathBuf,
    /// Whether a container runtime is to tell what containers really see.
    pub has_hook: bool,
}

impl Settings {
    /// Returns true if nothing is to be read.
    fn is_idle(&self) -> bool {
        self.resources.is_empty() && self.ours.is_none() && self.dra_drivers.is_empty() && !self.has_hook
    }
}

/// Devices of one resource that kubelet gave to one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Whose container it is.
    pub pod: PodName,
    /// The container.
    pub container: String,
    /// The resource; of a claim its DRA driver.
    pub resource: String,
    /// What kubelet calls the devices.
    pub device_ids: Vec<String>,
    /// Whether the container sees what its pod's record says, whatever kubelet calls that.
    pub is_by_record: bool,
    /// The claim, if a DRA driver serves the devices.
    pub claim: Option<Claim>,
}

/// How kubelet tells which pod it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodName {
    /// By namespace and name, in the pod-resources API.
    Named {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// By UID, in its checkpoint.
    Uid(PodUid),
}

/// Why it is not known what kubelet allocated.
#[derive(Debug, thiserror::Error)]
pub enum VendorError {
    /// kubelet does not answer.
    #[error("kubelet's pod-resources API cannot be used")]
    PodResources(#[source] PodResourcesError),
    /// It has no such API, and its file cannot be read either.
    #[error("kubelet has no pod-resources API at {}, and its checkpoint cannot be read", socket.display())]
    Neither {
        /// The socket that was tried.
        socket: PathBuf,
        /// What is wrong with the file.
        #[source]
        source: CheckpointError,
    },
}

/// The devices of pods that somebody else placed: those of `allocations` of which our scheduler's records do not tell already.
///
/// A pod that has ended holds nothing. Of the checkpoint's entries only those of pods that are there count, because kubelet
/// clears away what ended pods held only when it allocates again; what the API tells is of pods that are there.
pub fn foreign(allocations: &[Allocation], pods: &Pods, fleet: &Fleet) -> KubeletAllocations {
    let entries = allocations.iter().filter_map(|allocation| {
        let uid = uid_of(pods, &allocation.pod);
        let pod = uid.and_then(|uid| pods.get(uid));
        let device_ids: BTreeSet<String> = allocation
            .device_ids
            .iter()
            .map(|id| normalised(id, fleet))
            .collect();
        let is_counted = |pod: &NodePod| {
            (allocation.is_by_record && has_gpus(pod)) || is_on_record(pod, &device_ids, fleet)
        };
        if has_ended(allocation, pods) || device_ids.is_empty() || pod.is_some_and(is_counted) {
            return None;
        }
        Some(KubeletAllocation {
            pod_uid: uid.map(|uid| uid.as_str().to_owned()).unwrap_or_default(),
            container_name: allocation.container.clone(),
            resource_name: allocation.resource.clone(),
            device_ids: device_ids.into_iter().collect(),
            alloc_resp: None,
        })
    });
    let mut entries: Vec<KubeletAllocation> = entries.collect();
    entries.sort();
    entries.dedup();
    KubeletAllocations { entries }
}

/// The UID of the pod that kubelet means, if the pod is known: it asks for something of ours, or uses claims.
pub fn uid_of<'a>(pods: &'a Pods, name: &PodName) -> Option<&'a PodUid> {
    match name {
        PodName::Uid(uid) => pods.get(uid).map(|pod| &pod.uid),
        PodName::Named { namespace, name } => {
            let ours = pods
                .iter()
                .find(|pod| pod.name == *name && pod.namespace == *namespace)
                .map(|pod| &pod.uid);
            let is_it = |claimant: &&Claimant| claimant.name == *name && claimant.namespace == *namespace;
            ours.or_else(|| pods.claimants().find(is_it).map(|claimant| &claimant.uid))
        }
    }
}

/// Returns true if the pod of an allocation has ended. The pod-resources API lists only pods that are there, known or not.
fn has_ended(allocation: &Allocation, pods: &Pods) -> bool {
    let Some(uid) = uid_of(pods, &allocation.pod) else {
        return matches!(allocation.pod, PodName::Uid(_));
    };
    let stage = pods
        .get(uid)
        .map(|pod| pod.stage)
        .or_else(|| pods.claimant(uid).map(|claimant| claimant.stage));
    stage == Some(Stage::Terminal)
}

/// The UUID of the GPU that kubelet's ID is about; the ID of the device as it is, if that is not known.
fn normalised(id: &str, fleet: &Fleet) -> String {
    let physical = physical_id(id);
    // `0`, or `0:1` for an instance of it.
    let index: Option<u32> = physical.split(':').next().and_then(|index| index.parse().ok());
    let at = |index: u32| fleet.gpus.iter().find(|entry| entry.gpu.index == index);
    index
        .and_then(at)
        .map_or_else(|| physical.to_owned(), |entry| entry.gpu.uuid.to_string())
}

fn has_gpus(pod: &NodePod) -> bool {
    pod.placement
        .as_ref()
        .is_ok_and(|placement| !placement.gpus.is_empty())
}

/// Whether our scheduler placed the pod on these very devices.
fn is_on_record(pod: &NodePod, device_ids: &BTreeSet<String>, fleet: &Fleet) -> bool {
    let Ok(placement) = &pod.placement else {
        return false;
    };
    let gpu = |id: &String| -> Option<&Gpu> {
        let uuid: PhysicalId = id.parse().ok()?;
        fleet
            .gpus
            .iter()
            .map(|entry| &entry.gpu)
            .find(|gpu| gpu.uuid == uuid)
    };
    device_ids
        .iter()
        .all(|id| gpu(id).is_some_and(|gpu| placement.gpus.iter().any(|name| name.names(gpu))))
}

/// What is published is made of this.
#[derive(Debug)]
pub struct Sources {
    /// The devices.
    pub fleet: watch::Receiver<Arc<Fleet>>,
    /// The pods.
    pub pods: watch::Receiver<Pods>,
    /// What containers really see.
    pub seen: watch::Receiver<Seen>,
}

/// Where what was found goes.
#[derive(Debug)]
pub struct Sinks {
    /// The devices that the scheduler is to count.
    pub checkpoints: watch::Sender<Option<KubeletAllocations>>,
    /// Events on claims.
    pub recorder: Recorder,
}

/// Keeps what is published up to date until the task is dropped; it stays as it is while kubelet does not answer.
pub async fn watch_vendor(settings: Settings, sources: Sources, mut admin_access: AdminAccess, sinks: Sinks) {
    let Sources {
        fleet,
        mut pods,
        mut seen,
    } = sources;
    let Sinks {
        checkpoints,
        recorder,
    } = sinks;
    if settings.is_idle() {
        checkpoints.send_replace(Some(KubeletAllocations::default()));
        return std::future::pending().await;
    }
    if pods.wait_for(Pods::is_synced).await.is_err() {
        return std::future::pending().await;
    }
    if settings.has_hook {
        // What was published stands meanwhile. A runtime without hook never tells.
        let _ = timeout(HOOK_WAIT, seen.wait_for(Seen::is_synced)).await;
    }
    let mut complaint = None;
    let mut warnings = Warnings::default();
    loop {
        let before = progress(&pods.borrow_and_update());
        let has_claimants = pods
            .borrow()
            .claimants()
            .any(|claimant| claimant.stage != Stage::Terminal);
        let now = fleet.borrow().clone();
        match read(&settings, &now, has_claimants, &mut admin_access).await {
            Ok(allocations) => {
                complaint = None;
                let now = {
                    let (pods, fleet) = (pods.borrow(), fleet.borrow());
                    let allocations = seen.borrow_and_update().correct(allocations, &pods, &fleet);
                    warnings.update(&allocations, &pods, &fleet, &recorder);
                    foreign(&allocations, &pods, &fleet)
                };
                publish(now, &checkpoints);
            }
            Err(error) => {
                let problem = one_line(&error);
                if complaint.as_ref() != Some(&problem) {
                    warn!(
                        error = problem,
                        "it is not known which devices pods of the vendor's plugin and of DRA drivers hold"
                    );
                    complaint = Some(problem);
                }
            }
        }
        sleep(SETTLE).await;
        until_progress(&mut pods, &before, &mut seen).await;
    }
}

fn publish(now: KubeletAllocations, checkpoints: &watch::Sender<Option<KubeletAllocations>>) {
    checkpoints.send_if_modified(|held| {
        let is_news = held.as_ref() != Some(&now);
        if is_news {
            info!(
                n_containers = now.entries.len(),
                "other devices are held by pods that somebody else placed"
            );
            *held = Some(now);
        }
        is_news
    });
}

/// Reads the devices that kubelet allocated of the vendors' resources, and those that DRA drivers have prepared.
async fn read(
    settings: &Settings,
    fleet: &Fleet,
    has_claimants: bool,
    admin_access: &mut AdminAccess,
) -> Result<Vec<Allocation>, VendorError> {
    let answered = settings
        .ours
        .as_ref()
        .map(|ours| answered(settings, ours, fleet).ok());
    let is_asked = |allocation: &Allocation| {
        // Without the answers the IDs have to do.
        settings.resources.contains(&allocation.resource)
            || answered == Some(None) && settings.ours.as_ref() == Some(&allocation.resource)
    };
    let needs_ids = !settings.resources.is_empty() || answered == Some(None);
    let needs_claims = has_claimants && !settings.dra_drivers.is_empty();
    let listed = if needs_ids || needs_claims {
        list(settings, needs_ids).await?
    } else {
        Listed::default()
    };
    let claimed = listed
        .claimed
        .into_iter()
        .filter(|claimed| settings.dra_drivers.contains(&claimed.device.driver))
        .collect();
    let claimed = admin_access.leave_out(claimed).await;
    let mut found: Vec<Allocation> = listed.allocations.into_iter().filter(is_asked).collect();
    found.extend(
        claimed
            .into_iter()
            .filter_map(|claimed| claims::allocation(claimed, fleet)),
    );
    found.extend(answered.flatten().into_iter().flatten());
    Ok(found)
}

/// The devices that kubelet's pods hold. A kubelet without the API has a checkpoint, and no claims.
async fn list(settings: &Settings, needs_ids: bool) -> Result<Listed, VendorError> {
    match pod_resources::list(&settings.socket).await {
        Ok(listed) => Ok(listed),
        Err(PodResourcesError::Absent) if needs_ids => Ok(Listed {
            allocations: from_checkpoint(settings)?,
            claimed: Vec::new(),
        }),
        Err(PodResourcesError::Absent) => Ok(Listed::default()),
        Err(error) => Err(VendorError::PodResources(error)),
    }
}

/// The GPUs that containers see which asked for the resource that this plugin serves: by the answers that kubelet keeps, some
/// of which another plugin may have given.
fn answered(settings: &Settings, ours: &str, fleet: &Fleet) -> Result<Vec<Allocation>, CheckpointError> {
    let entries = kubelet_checkpoint::read(&settings.device_plugin_dir)?
        .into_iter()
        .filter(|entry| entry.resource_name == ours);
    let allocation = |entry: kubelet_checkpoint::Entry| {
        let answer = ContainerAllocateResponse::decode(entry.alloc_resp.as_slice()).unwrap_or_default();
        let visible = visible_by_answer(
            ExtendedResource::Whole,
            &answer,
            &settings.visible_devices_env,
            fleet,
        );
        let is_by_record = visible == Some(Visible::BySpec);
        let allocation = of_entry(entry);
        match visible {
            Some(Visible::Devices(seen)) => Allocation {
                device_ids: seen.iter().map(PhysicalId::to_string).collect(),
                ..allocation
            },
            _ => Allocation {
                is_by_record,
                ..allocation
            },
        }
    };
    Ok(entries.map(allocation).collect())
}

fn from_checkpoint(settings: &Settings) -> Result<Vec<Allocation>, VendorError> {
    let entries =
        kubelet_checkpoint::read(&settings.device_plugin_dir).map_err(|source| VendorError::Neither {
            socket: settings.socket.clone(),
            source,
        })?;
    Ok(entries.into_iter().map(of_entry).collect())
}

fn of_entry(entry: kubelet_checkpoint::Entry) -> Allocation {
    Allocation {
        pod: PodName::Uid(PodUid::from(entry.pod_uid.as_str())),
        container: entry.container_name,
        resource: entry.resource_name,
        device_ids: entry.device_ids,
        is_by_record: false,
        claim: None,
    }
}

/// The stages and records of the pods that ask for whole devices or use claims: kubelet reports nothing new before they change.
fn progress(pods: &Pods) -> Vec<(PodUid, Stage, Option<String>)> {
    let asks = |pod: &&NodePod| pod.containers.iter().any(|container| container.whole > 0);
    let record = |pod: &NodePod| pod.placement.as_ref().ok().map(ToString::to_string);
    let asking = pods
        .iter()
        .filter(asks)
        .map(|pod| (pod.uid.clone(), pod.stage, record(pod)));
    asking
        .chain(
            pods.claimants()
                .map(|claimant| (claimant.uid.clone(), claimant.stage, None)),
        )
        .collect()
}

async fn until_progress(
    pods: &mut watch::Receiver<Pods>,
    before: &[(PodUid, Stage, Option<String>)],
    seen: &mut watch::Receiver<Seen>,
) {
    let latest = Instant::now() + PERIOD;
    let news = async {
        if pods.wait_for(|pods| progress(pods) != before).await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let sights = async {
        if seen.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = news => {}
        () = sights => {}
        () = sleep_until(latest) => {}
    }
}

#[cfg(test)]
mod tests;
