//! Finds the devices that pods hold by a vendor's device plugin or DRA driver, for the scheduler to count: kubelet's allocations,
//! corrected by the GPUs that the runtime hook (NRI) has seen, without those that a record of gpushare's scheduler names.

mod admin_access;
pub mod allocation;
mod claims;
mod warnings;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use daemon::events::Recorder;
use prost::Message;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::kubelet_allocations::KubeletAllocations;
use proto::resource::VENDOR_GPUS;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::info;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::NodeFleet;
use crate::devices::inventory::PhysicalId;
use crate::inject::runtime_hook::seen::SeenGpus;
use crate::logged_error::LoggedError;
use crate::node::kubelet_checkpoint;
use crate::node::kubelet_checkpoint::CheckpointError;
use crate::node::kubelet_pod_resources::{PodResources, PodResourcesError};
use crate::node::pods::{NodePods, PodStage, PodUid, until_known};
use crate::start::verify::{Visible, visible_by_answer};

use allocation::{Allocation, PodKey, plugin_allocations, unrecorded};
use warnings::Warnings;

pub(crate) use admin_access::AdminAccess;

/// The interval at which the plugin reads kubelet's allocations although no pod has changed.
const PERIOD: Duration = Duration::from_secs(60);

/// Changes within this time are read together: kubelet answers a limited number of requests per second.
const SETTLE: Duration = Duration::from_millis(500);

/// Longest wait for the runtime hook before the first report: the hook corrects kubelet's allocations.
const HOOK_WAIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct VendorSettings {
    /// The resources that vendors' plugins serve.
    pub(crate) resources: BTreeSet<String>,
    /// The vendor's resource that this plugin serves itself: pods that the vendor's plugin served earlier may still run.
    pub(crate) ours: Option<String>,
    /// The DRA drivers whose devices are GPUs of this node.
    pub(crate) dra_drivers: BTreeSet<String>,
    pub(crate) pod_resources: PodResources,
    pub(crate) device_plugin_dir: PathBuf,
    /// True if a runtime hook reports the GPUs that containers see.
    pub(crate) has_hook: bool,
}

impl VendorSettings {
    /// True if there is nothing to publish: no resource of a vendor, no DRA driver, and no runtime hook.
    fn is_idle(&self) -> bool {
        self.resources.is_empty() && self.ours.is_none() && self.dra_drivers.is_empty() && !self.has_hook
    }
}

/// The task that keeps the devices of other plugins published.
pub(crate) struct VendorWatch {
    pub(crate) settings: VendorSettings,
    pub(crate) fleet: watch::Receiver<Arc<NodeFleet>>,
    pub(crate) pods: watch::Receiver<NodePods>,
    pub(crate) seen: watch::Receiver<SeenGpus>,
    /// Finds the claimed devices that are allocated for administration only.
    pub(crate) admin_access: AdminAccess,
    /// Gets the devices of other plugins that the scheduler must count.
    pub(crate) kubelet_allocations: watch::Sender<Option<KubeletAllocations>>,
    pub(crate) recorder: Recorder,
}

impl VendorWatch {
    /// Keeps the devices published until the task is dropped; they stay as they are while kubelet does not answer.
    pub(crate) async fn run(mut self) {
        if self.settings.is_idle() {
            let nothing = KubeletAllocations::default();
            self.kubelet_allocations.send_replace(Some(nothing));
            return std::future::pending().await;
        }
        until_known(&mut self.pods).await;
        if self.settings.has_hook {
            // The published devices stand meanwhile. A runtime without hook never reports.
            let _ = timeout(HOOK_WAIT, self.seen.wait_for(SeenGpus::is_synced)).await;
        }
        let mut logged = LoggedError::default();
        let mut warnings = Warnings::default();
        loop {
            // Taken before kubelet answers: a pod that changes meanwhile leads to another round.
            let before = pod_states(&self.pods.borrow_and_update());
            let mut has_claimants = false;
            for claimant in self.pods.borrow().claimants() {
                has_claimants |= claimant.stage != PodStage::Terminal;
            }
            let fleet = Arc::clone(&self.fleet.borrow());
            match read(&self.settings, &fleet, has_claimants, &mut self.admin_access).await {
                Ok(allocations) => {
                    logged.clear();
                    self.publish(allocations, &mut warnings);
                }
                Err(error) => {
                    let what =
                        "cannot read which devices pods of the vendor's plugin and of DRA drivers hold";
                    logged.warn(&error, what);
                }
            }
            let pods_changed = self.pods.wait_for(|pods| pod_states(pods) != before);
            tokio::select! {
                Ok(_) = pods_changed => {}
                Ok(()) = self.seen.changed() => {}
                () = sleep(PERIOD) => {}
            }
            // After the change, since kubelet allocates for a pod that has just been bound: a call may make it forget those IDs.
            sleep(SETTLE).await;
        }
    }

    fn publish(&mut self, allocations: Vec<Allocation>, warnings: &mut Warnings) {
        let (pods, fleet) = (self.pods.borrow(), self.fleet.borrow());
        let allocations = correct_by_runtime(allocations, &self.seen.borrow_and_update(), &pods, &fleet);
        warnings.update(&allocations, &pods, &fleet, &self.recorder);
        let now = unrecorded(&allocations, &pods, &fleet);
        // Each change is a write of the Device object, which wakes every scheduler's watch.
        if self.kubelet_allocations.borrow().as_ref() != Some(&now) {
            let n_containers = now.entries.len();
            info!(n_containers, "containers of other plugins hold other devices");
            self.kubelet_allocations.send_replace(Some(now));
        }
    }
}

/// Reads the devices that kubelet allocated of the vendors' resources and, if pods that have not ended use claims
/// (`has_claimants`), those that DRA drivers have prepared.
async fn read(
    settings: &VendorSettings,
    fleet: &NodeFleet,
    has_claimants: bool,
    admin_access: &mut AdminAccess,
) -> Result<Vec<Allocation>, PodResourcesError> {
    let (mut found, mut resources) = (Vec::new(), settings.resources.clone());
    if let Some(ours) = &settings.ours {
        match allocations_by_answers(settings, ours, fleet) {
            Ok(allocations) => found = allocations,
            // Without the checkpoint, the device IDs that kubelet lists have to do.
            Err(_) => {
                resources.insert(ours.clone());
            }
        }
    }
    let needs_claims = has_claimants && !settings.dra_drivers.is_empty();
    if resources.is_empty() && !needs_claims {
        return Ok(found);
    }
    let listed = settings.pod_resources.list().await?;
    let mut claimed = claims::claimed_devices(&listed);
    // The devices of other drivers are network adapters and the like.
    claimed.retain(|claimed| settings.dra_drivers.contains(&claimed.device.driver));
    for claimed in admin_access.without_admin_access(claimed).await {
        found.extend(claims::allocation(claimed, fleet));
    }
    found.extend(plugin_allocations(&listed, &resources));
    Ok(found)
}

/// The GPUs of containers that requested the vendor's resource which this plugin serves itself (`ours`), read from the Allocate
/// answers in kubelet's checkpoint. The vendor's plugin may have given some of these answers before.
fn allocations_by_answers(
    settings: &VendorSettings,
    ours: &str,
    fleet: &NodeFleet,
) -> Result<Vec<Allocation>, CheckpointError> {
    let mut found = Vec::new();
    for entry in kubelet_checkpoint::read(&settings.device_plugin_dir)? {
        if entry.resource_name != ours {
            continue;
        }
        // An answer that does not parse names no device, and the IDs count as below.
        let answer = ContainerAllocateResponse::decode(entry.alloc_resp.as_slice()).unwrap_or_default();
        let pod = PodKey::Uid(PodUid::from(entry.pod_uid.as_str()));
        let mut allocation =
            Allocation::new(pod, entry.container_name, entry.resource_name, entry.device_ids);
        match visible_by_answer(ExtendedResource::Whole, &answer, fleet) {
            Some(Visible::Devices(seen)) => {
                allocation.device_ids = seen.iter().map(PhysicalId::to_string).collect();
            }
            Some(Visible::BySpec) => allocation.sees_recorded_devices = true,
            // The answer is another plugin's, or names no device of this node: the IDs that kubelet allocated have to do.
            _ => {}
        }
        found.push(allocation);
    }
    Ok(found)
}

/// Replaces the GPUs of kubelet's allocations, except those of claims, by those that the containers see. Adds an allocation for
/// each container of whole GPUs that sees some and is in neither a record nor kubelet's list.
fn correct_by_runtime(
    mut allocations: Vec<Allocation>,
    seen: &SeenGpus,
    pods: &NodePods,
    fleet: &NodeFleet,
) -> Vec<Allocation> {
    let mut corrected = BTreeSet::new();
    for allocation in &mut allocations {
        let Some(uid) = allocation.pod.uid(pods) else {
            continue;
        };
        let Some(gpus) = seen.gpus_of(uid, &allocation.container) else {
            continue;
        };
        corrected.insert((uid.clone(), allocation.container.clone()));
        // A claim holds its devices whichever of them a container sees.
        if allocation.claim.is_none() {
            allocation.device_ids = gpus.iter().map(PhysicalId::to_string).collect();
            allocation.sees_recorded_devices = false;
        }
    }
    for (key, gpus) in seen.iter() {
        let (uid, container) = key;
        let Some(pod) = pods.get_live(uid) else { continue };
        if pod.placement.is_ok() || corrected.contains(key) {
            continue;
        }
        if let Some(resource) = whole_resource(pods, uid, container, fleet) {
            let (pod, ids) = (PodKey::Uid(uid.clone()), gpus.iter().map(PhysicalId::to_string));
            allocations.push(Allocation::new(pod, container.clone(), resource, ids.collect()));
        }
    }
    allocations
}

/// The vendor's resource under which the GPUs of a container that requests whole ones are published; none if it requests none.
fn whole_resource(pods: &NodePods, uid: &PodUid, container: &str, fleet: &NodeFleet) -> Option<String> {
    let mut requests = pods.get(uid)?.containers.iter();
    let request = requests.find(|request| request.name == container)?;
    // A share without a record needs no entry: the scheduler counts it on every GPU where it may be.
    if request.whole == 0 {
        return None;
    }
    // The hook sees GPUs and no resource name, so the name is the one of the node's vendor.
    let prefix = format!("{}.", fleet.vendor);
    let of_vendor = VENDOR_GPUS.iter().find(|name| name.starts_with(&prefix));
    Some((*of_vendor.or(VENDOR_GPUS.first())?).to_owned())
}

/// The stages and records of the pods that request whole GPUs or use claims. While they stay, so do kubelet's allocations.
fn pod_states(pods: &NodePods) -> Vec<(PodUid, PodStage, Option<String>)> {
    let mut states = Vec::new();
    for pod in pods.iter() {
        if pod.containers.iter().any(|container| container.whole > 0) {
            let record = pod.record().map(ToString::to_string);
            states.push((pod.uid.clone(), pod.stage, record));
        }
    }
    for claimant in pods.claimants() {
        states.push((claimant.uid.clone(), claimant.stage, None));
    }
    states
}

#[cfg(test)]
mod tests;
