//! Devices that kubelet gave to pods of a vendor's plugin: read from kubelet, compared with the records of our scheduler, and
//! what nobody else tells is published for the scheduler to count.
//!
//! Reads when such a pod comes, goes or gets on, and now and then; never while kubelet waits for an answer of ours, because a
//! list of its devices can disturb an allocation that is under way.

mod pod_resources;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use proto::checkpoints::{ContainerDevices, DevicesCheckpoints, physical_id};
use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use crate::fleet::Fleet;
use crate::inventory::{Gpu, GpuUuid};
use crate::kubelet_checkpoint::{self, CheckpointError};
use crate::pods::{NodePod, PodUid, Pods, Stage};
use crate::proof::sight::{self, Sight};
use crate::runtime_hook::seen::Seen;
use crate::served::Served;
use crate::watching::one_line;

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
    /// The variable that names a container's GPUs.
    pub visible_devices_env: String,
    /// kubelet's pod-resources socket.
    pub socket: PathBuf,
    /// kubelet's device plugin directory, with its checkpoint.
    pub device_plugin_dir: PathBuf,
    /// Whether a container runtime is to tell what containers really see.
    pub has_hook: bool,
}

/// Devices of one resource that kubelet gave to one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Whose container it is.
    pub pod: PodName,
    /// The container.
    pub container: String,
    /// The resource.
    pub resource: String,
    /// What kubelet calls the devices.
    pub device_ids: Vec<String>,
    /// Whether the container sees what its pod's record says, whatever kubelet calls that.
    pub is_by_record: bool,
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
pub fn foreign(allocations: &[Allocation], pods: &Pods, fleet: &Fleet) -> DevicesCheckpoints {
    let entries = allocations.iter().filter_map(|allocation| {
        let pod = find(pods, &allocation.pod);
        let is_gone = match (&allocation.pod, pod) {
            (_, Some(pod)) => pod.stage == Stage::Terminal,
            (PodName::Uid(_), None) => true,
            (PodName::Named { .. }, None) => false,
        };
        let device_ids: BTreeSet<String> = allocation.device_ids.iter().map(|id| normalised(id, fleet)).collect();
        let is_counted = |pod: &NodePod| (allocation.is_by_record && has_gpus(pod)) || is_on_record(pod, &device_ids, fleet);
        if is_gone || device_ids.is_empty() || pod.is_some_and(is_counted) {
            return None;
        }
        Some(ContainerDevices {
            pod_uid: pod.map(|pod| pod.uid.as_str().to_owned()).unwrap_or_default(),
            container_name: allocation.container.clone(),
            resource_name: allocation.resource.clone(),
            device_ids: device_ids.into_iter().collect(),
            alloc_resp: None,
        })
    });
    let mut entries: Vec<ContainerDevices> = entries.collect();
    entries.sort();
    entries.dedup();
    DevicesCheckpoints { entries }
}

/// The pod that kubelet means.
pub fn find<'a>(pods: &'a Pods, name: &PodName) -> Option<&'a NodePod> {
    match name {
        PodName::Uid(uid) => pods.get(uid),
        PodName::Named { namespace, name } => pods.iter().find(|pod| pod.name == *name && pod.namespace == *namespace),
    }
}

/// The UUID of the GPU that kubelet's ID is about; the ID of the device as it is, if that is not known.
fn normalised(id: &str, fleet: &Fleet) -> String {
    let physical = physical_id(id);
    // `0`, or `0:1` for an instance of it.
    let index: Option<u32> = physical.split(':').next().and_then(|index| index.parse().ok());
    let at = |index: u32| fleet.gpus.iter().find(|entry| entry.gpu.index == index);
    index.and_then(at).map_or_else(|| physical.to_owned(), |entry| entry.gpu.uuid.to_string())
}

fn has_gpus(pod: &NodePod) -> bool {
    pod.placement.as_ref().is_ok_and(|placement| !placement.gpus.is_empty())
}

/// Whether our scheduler placed the pod on these very devices.
fn is_on_record(pod: &NodePod, device_ids: &BTreeSet<String>, fleet: &Fleet) -> bool {
    let Ok(placement) = &pod.placement else { return false };
    let gpu = |id: &String| -> Option<&Gpu> {
        let uuid: GpuUuid = id.parse().ok()?;
        fleet.gpus.iter().map(|entry| &entry.gpu).find(|gpu| gpu.uuid == uuid)
    };
    device_ids.iter().all(|id| gpu(id).is_some_and(|gpu| placement.gpus.iter().any(|name| name.names(gpu))))
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

/// Keeps `checkpoints` up to date until the task is dropped; it stays as it is while kubelet does not tell.
pub async fn watch_vendor(settings: Settings, sources: Sources, checkpoints: watch::Sender<Option<DevicesCheckpoints>>) {
    let Sources { fleet, mut pods, mut seen } = sources;
    if settings.resources.is_empty() && settings.ours.is_none() && !settings.has_hook {
        checkpoints.send_replace(Some(DevicesCheckpoints::default()));
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
    loop {
        let before = progress(&pods.borrow_and_update());
        let now = fleet.borrow().clone();
        match read(&settings, &now).await {
            Ok(allocations) => {
                complaint = None;
                let now = {
                    let (pods, fleet) = (pods.borrow(), fleet.borrow());
                    foreign(&seen.borrow_and_update().correct(allocations, &pods, &fleet), &pods, &fleet)
                };
                publish(now, &checkpoints);
            }
            Err(error) => {
                let problem = one_line(&error);
                if complaint.as_ref() != Some(&problem) {
                    warn!(error = problem, "it is not known which devices pods of the vendor's plugin hold");
                    complaint = Some(problem);
                }
            }
        }
        sleep(SETTLE).await;
        until_progress(&mut pods, &before, &mut seen).await;
    }
}

fn publish(now: DevicesCheckpoints, checkpoints: &watch::Sender<Option<DevicesCheckpoints>>) {
    checkpoints.send_if_modified(|held| {
        let is_news = held.as_ref() != Some(&now);
        if is_news {
            info!(n_containers = now.entries.len(), "other devices are held by pods that somebody else placed");
            *held = Some(now);
        }
        is_news
    });
}

/// What kubelet allocated of the vendors' resources.
async fn read(settings: &Settings, fleet: &Fleet) -> Result<Vec<Allocation>, VendorError> {
    if settings.resources.is_empty() && settings.ours.is_none() {
        return Ok(Vec::new());
    }
    let answered = settings.ours.as_ref().map(|ours| answered(settings, ours, fleet).ok());
    let is_asked = |allocation: &Allocation| {
        // Without the answers the IDs have to do.
        settings.resources.contains(&allocation.resource) || answered == Some(None) && settings.ours.as_ref() == Some(&allocation.resource)
    };
    if let (true, Some(Some(answered))) = (settings.resources.is_empty(), &answered) {
        return Ok(answered.clone());
    }
    let listed = match pod_resources::list(&settings.socket).await {
        Ok(all) => all,
        Err(PodResourcesError::Absent) => from_checkpoint(settings)?,
        Err(error) => return Err(VendorError::PodResources(error)),
    };
    let mut found: Vec<Allocation> = listed.into_iter().filter(is_asked).collect();
    found.extend(answered.flatten().into_iter().flatten());
    Ok(found)
}

/// The GPUs that containers see which asked for the resource that this plugin serves: by the answers that kubelet keeps, some
/// of which another plugin may have given.
fn answered(settings: &Settings, ours: &str, fleet: &Fleet) -> Result<Vec<Allocation>, CheckpointError> {
    let entries = kubelet_checkpoint::read(&settings.device_plugin_dir)?.into_iter().filter(|entry| entry.resource_name == ours);
    let allocation = |entry: kubelet_checkpoint::Entry| {
        let answer = ContainerAllocateResponse::decode(entry.alloc_resp.as_slice()).unwrap_or_default();
        let sight = sight::of_answer(Served::Whole, &answer, &settings.visible_devices_env, fleet);
        let is_by_record = sight == Some(Sight::Spec);
        let allocation = of_entry(entry);
        match sight {
            Some(Sight::Devices(seen)) => Allocation { device_ids: seen.iter().map(GpuUuid::to_string).collect(), ..allocation },
            _ => Allocation { is_by_record, ..allocation },
        }
    };
    Ok(entries.map(allocation).collect())
}

fn from_checkpoint(settings: &Settings) -> Result<Vec<Allocation>, VendorError> {
    let entries = kubelet_checkpoint::read(&settings.device_plugin_dir)
        .map_err(|source| VendorError::Neither { socket: settings.socket.clone(), source })?;
    Ok(entries.into_iter().map(of_entry).collect())
}

fn of_entry(entry: kubelet_checkpoint::Entry) -> Allocation {
    Allocation {
        pod: PodName::Uid(PodUid::from(entry.pod_uid.as_str())),
        container: entry.container_name,
        resource: entry.resource_name,
        device_ids: entry.device_ids,
        is_by_record: false,
    }
}

/// How far the pods have come that ask for whole devices: what must have changed for kubelet to tell something new.
fn progress(pods: &Pods) -> Vec<(PodUid, Stage, Option<String>)> {
    let asks = |pod: &&NodePod| pod.containers.iter().any(|container| container.whole > 0);
    let record = |pod: &NodePod| pod.placement.as_ref().ok().map(ToString::to_string);
    pods.iter().filter(asks).map(|pod| (pod.uid.clone(), pod.stage, record(pod))).collect()
}

async fn until_progress(pods: &mut watch::Receiver<Pods>, before: &[(PodUid, Stage, Option<String>)], seen: &mut watch::Receiver<Seen>) {
    let latest = Instant::now() + PERIOD;
    let news = async {
        if pods.wait_for(|pods| progress(pods) != before).await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let told = async {
        if seen.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = news => {}
        () = told => {}
        () = sleep_until(latest) => {}
    }
}

#[cfg(test)]
mod tests;
