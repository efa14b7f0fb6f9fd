//! Swaps the records of pods (the annotations that name their devices), and corrects those of running pods: writes them into the
//! node's Device object first, and then into the pods' annotations.
//!
//! The write to the Device object is the swap: it carries both pods' records, and the version of the object that was read, so
//! that it overwrites nothing unseen. Scheduler and plugin prefer the record in the Device object; the annotations follow.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use proto::annotation::AnnotationError;
use proto::device::Device;
use proto::memory_unit::MemoryUnit;
use proto::plugin_reports::{self, EXCHANGED_RECORDS, SwappedRecords};
use proto::record::{DeviceAllocations, GpushareRecord, MEM_ASSIGNED, Record};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::warn;

use crate::metrics::{Metrics, Outcome};
use crate::node::api_request::{ApiRequestError, within};
use crate::node::pods::annotate::annotate;
use crate::node::pods::{NodePod, NodePods, PodUid};
use crate::start::node_state::NodeState;
use daemon::api_server::Connection;

/// The field manager of swapped records: under that of the task that publishes the devices, its server-side apply would remove
/// them.
const FIELD_MANAGER: &str = "gpushare-exchange";

/// Longest duration of one request to the API server. kubelet waits for those that a start needs.
const REQUEST_LIMIT: Duration = Duration::from_secs(4);

const MAX_TRIES: usize = 4;

/// Time for which a swapped record outlives its pod: the scheduler may see the end of the pod later than this plugin.
const LINGER: Duration = Duration::from_secs(60);

/// The pause after the first failure, which doubles each time, and the longest one.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// Time without requests after an unanswered one: every start waits for the lock of the swapped records.
const REST: Duration = Duration::from_secs(10);

type Records = BTreeMap<PodUid, DeviceAllocations>;

/// The records in the Device object could not be read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SwapError {
    #[error(transparent)]
    Request(#[from] ApiRequestError),
    /// No request was sent: the API server left one unanswered less than `REST` (10 s) ago.
    #[error("the API server did not answer about the Device object {0}; trying again in a few seconds")]
    Resting(String),
    #[error("there is no Device object {0} yet, which holds the swapped records of pods")]
    Absent(String),
    #[error("the Device object {0} changes all the time")]
    Contended(String),
    #[error(transparent)]
    Unwritable(#[from] AnnotationError),
}

/// The swapped records in an annotation of this node's Device object. One task at a time uses them.
#[derive(Debug)]
pub struct RecordSwaps {
    devices: Api<Device>,
    node_name: String,
    /// The pods of this node, which get the swapped records from here.
    pods: watch::Sender<NodePods>,
    /// `resourceVersion` of the Device object, if its swapped records are known for certain.
    version: Option<String>,
    /// True if the last read or write of the swapped records has succeeded.
    is_loaded: bool,
    /// Pods whose allocation record is changed by a write with an unknown outcome.
    in_doubt: BTreeSet<PodUid>,
    /// The end of [`REST`], after the API server did not answer.
    rest_until: Option<Instant>,
    /// Ends [`REST`] when the API server answers another request of the plugin.
    regained: watch::Receiver<bool>,
    metrics: Metrics,
}

impl RecordSwaps {
    /// The swapped records of this node's pods, before they are loaded.
    pub fn new(
        connection: &Connection,
        node_name: String,
        pods: watch::Sender<NodePods>,
        metrics: Metrics,
    ) -> Self {
        Self {
            devices: Api::all(connection.client.clone()),
            node_name,
            pods,
            version: None,
            is_loaded: false,
            in_doubt: BTreeSet::new(),
            rest_until: None,
            regained: connection.contact.regained(),
            metrics,
        }
    }

    /// Reads the swapped records from the Device object, unless it is known for certain which record this pod has.
    pub(crate) async fn load_for(&mut self, uid: &PodUid) -> Result<(), SwapError> {
        let is_known = self.pods.borrow().swapped().is_some() && !self.in_doubt.contains(uid);
        if is_known { Ok(()) } else { self.load().await }
    }

    /// Reads the swapped records, unless they are known.
    pub(crate) async fn load(&mut self) -> Result<(), SwapError> {
        if self.is_loaded {
            return Ok(());
        }
        let (devices, name) = (self.devices.clone(), self.node_name.clone());
        let device = self.send("read", devices.get_opt(&name)).await?;
        let object = device.as_ref();
        let annotations = object.and_then(|object| object.metadata.annotations.as_ref());
        let mut records = Records::new();
        match plugin_reports::read_swapped_records(annotations) {
            Ok(swapped) => {
                for (uid, record) in swapped {
                    records.insert(PodUid::from(uid.as_str()), record);
                }
            }
            // The pods' annotations count again, which name the devices of a swap as soon as they are written.
            Err(error) => {
                warn!(node = self.node_name, %error, "ignoring the swapped records of this node's pods");
            }
        }
        self.version = device.and_then(|device| device.resource_version());
        self.in_doubt.clear();
        self.pods.send_if_modified(|pods| {
            let is_changed = pods.swapped() != Some(&records);
            pods.set_swapped(records);
            is_changed
        });
        self.is_loaded = true;
        Ok(())
    }

    /// Swaps the allocation records of two pods. Returns false, and loads the swapped records, if another writer changed them.
    pub(crate) async fn swap(
        &mut self,
        node: &NodeState,
        one: &PodUid,
        other: &PodUid,
    ) -> Result<bool, SwapError> {
        // A pod that is gone, or whose record is not readable, cannot swap.
        let Some(wanted) = records_after_swap(&self.pods.borrow(), one, other, node.settings.memory_unit)
        else {
            return Ok(false);
        };
        // kubelet may admit more containers of these pods meanwhile: their calls are matched with the records after the swap.
        node.log().plan_swap(one, other);
        if !self.write(&wanted).await? {
            return Ok(false);
        }
        // A swap counts only when its write has succeeded for certain.
        self.metrics.count(Outcome::Exchanged);
        self.pods.send_modify(|pods| {
            pods.set_swapped(wanted);
            node.log().note_swap(one, other);
        });
        Ok(true)
    }

    /// Replaces the allocation record of a pod. Returns false, and loads the swapped records, if another writer changed them.
    pub(crate) async fn replace(
        &mut self,
        uid: &PodUid,
        record: DeviceAllocations,
    ) -> Result<bool, SwapError> {
        let mut wanted = self.known_records();
        wanted.insert(uid.clone(), record);
        self.write_and_show(wanted).await
    }

    /// Writes the swapped records again if the Device object does not have them: the object may have been recreated, or its
    /// annotation removed. Returns true if that was necessary.
    pub(crate) async fn verify(&mut self) -> Result<bool, SwapError> {
        self.load().await?;
        let known = self.known_records();
        if known.is_empty() {
            return Ok(false);
        }
        let text = annotation_text(&known)?;
        for _ in 0..MAX_TRIES {
            let (devices, name) = (self.devices.clone(), self.node_name.clone());
            // The task that publishes the devices creates the object again, and the next comparison writes the records.
            let Some(device) = self.send("read", devices.get_opt(&name)).await? else {
                return Ok(false);
            };
            let there = plugin_reports::read_swapped_records(device.metadata.annotations.as_ref());
            if let Ok(there) = there
                && known.keys().all(|uid| there.contains_key(uid.as_str()))
            {
                return Ok(false);
            }
            if let Some(version) = device.resource_version()
                && self.patch(&version, &text).await?
            {
                return Ok(true);
            }
        }
        Err(SwapError::Contended(self.node_name.clone()))
    }

    /// Removes the swapped records of pods that are gone.
    pub(crate) async fn remove(&mut self, gone: &BTreeSet<PodUid>) -> Result<(), SwapError> {
        let mut wanted = self.known_records();
        wanted.retain(|uid, _| !gone.contains(uid));
        self.write_and_show(wanted).await.map(drop)
    }

    fn known_records(&self) -> Records {
        self.pods.borrow().swapped().cloned().unwrap_or_default()
    }

    /// Writes the swapped records, and shows them to the readers of [`NodePods`] once they are written.
    async fn write_and_show(&mut self, wanted: Records) -> Result<bool, SwapError> {
        let is_written = self.write(&wanted).await?;
        if is_written {
            self.pods.send_modify(|pods| pods.set_swapped(wanted));
        }
        Ok(is_written)
    }

    /// Writes the swapped records. If the Device object has other records than the known ones, loads these and returns false.
    async fn write(&mut self, wanted: &Records) -> Result<bool, SwapError> {
        let text = annotation_text(wanted)?;
        for _ in 0..MAX_TRIES {
            // Records that are not known for certain are read before they are written over.
            let Some(version) = self.version.clone() else {
                self.is_loaded = false;
                let known = self.pods.borrow().swapped().cloned();
                self.load().await?;
                if self.version.is_none() {
                    return Err(SwapError::Absent(self.node_name.clone()));
                }
                // `wanted` was made from records that do not count any more.
                if self.pods.borrow().swapped() != known.as_ref() {
                    return Ok(false);
                }
                continue;
            };
            // Until the answer comes, the write may or may not have been done.
            self.version = None;
            self.is_loaded = false;
            self.in_doubt = pods_with_other_record(&self.known_records(), wanted);
            if self.patch(&version, &text).await? {
                return Ok(true);
            }
        }
        Err(SwapError::Contended(self.node_name.clone()))
    }

    /// Writes the annotation over this version of the Device object; returns false if the object has another version by now.
    async fn patch(&mut self, version: &str, text: &str) -> Result<bool, SwapError> {
        // With the version the API server refuses the write if another writer came first.
        let patch =
            json!({"metadata": {"resourceVersion": version, "annotations": {EXCHANGED_RECORDS: text}}});
        let params = PatchParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let (devices, name) = (self.devices.clone(), self.node_name.clone());
        let patch = Patch::Merge(&patch);
        match self.send("write", devices.patch(&name, &params, &patch)).await {
            Ok(device) => {
                self.version = device.resource_version();
                self.is_loaded = true;
                self.in_doubt.clear();
                Ok(true)
            }
            // The API server's answer to a write with an old `resourceVersion`.
            Err(SwapError::Request(error)) if error.status() == Some(409) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sends a request to the API server, unless it did not answer one a moment ago. `what` is the verb, for errors.
    async fn send<T>(
        &mut self,
        what: &'static str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, SwapError> {
        if self.regained.has_changed().unwrap_or(false) {
            self.regained.mark_unchanged();
            // Another request of this process was answered after an absence, so this one need not rest.
            self.rest_until = None;
        }
        if self.rest_until.is_some_and(|until| Instant::now() < until) {
            return Err(SwapError::Resting(self.node_name.clone()));
        }
        let name = &self.node_name;
        let what = format!("{what} the Device object {name}, which holds the swapped records of pods");
        let answer = within(REQUEST_LIMIT, what, request).await;
        let is_slow = matches!(answer, Err(ApiRequestError::Slow { .. }));
        self.rest_until = is_slow.then(|| Instant::now() + REST);
        Ok(answer?)
    }
}

/// All swapped records after a swap of these two pods; none if one of the pods is gone or has no usable record.
fn records_after_swap(pods: &NodePods, one: &PodUid, other: &PodUid, unit: MemoryUnit) -> Option<Records> {
    let mut wanted = pods.swapped().cloned().unwrap_or_default();
    for (uid, holder) in [(one, other), (other, one)] {
        wanted.insert(uid.clone(), pods.get(holder)?.record()?.to_allocations(unit));
    }
    if pods.is_current() && annotation_text(&wanted).is_err() {
        // Records outlive their pods (`LINGER`) only while there is room: a pod that is gone uses no device.
        wanted.retain(|uid, _| pods.get(uid).is_some());
    }
    Some(wanted)
}

fn annotation_text(records: &Records) -> Result<String, AnnotationError> {
    let mut entries = SwappedRecords::new();
    for (uid, record) in records {
        entries.insert(uid.as_str().to_owned(), record.clone());
    }
    plugin_reports::write_swapped_records(&entries)
}

/// The pods whose allocation record in `known` is not the same as in `wanted`.
fn pods_with_other_record(known: &Records, wanted: &Records) -> BTreeSet<PodUid> {
    let mut uids: BTreeSet<PodUid> = known.keys().chain(wanted.keys()).cloned().collect();
    uids.retain(|uid| known.get(uid) != wanted.get(uid));
    uids
}

/// Writes swapped records into the pods' annotations, and removes those of pods that are long gone.
pub(crate) async fn follow_swaps(
    connection: Connection,
    node: Arc<NodeState>,
    swaps: Arc<tokio::sync::Mutex<RecordSwaps>>,
) {
    let Connection { client, contact } = connection;
    let mut pods = node.pods.clone();
    let mut gone_since = BTreeMap::new();
    let mut backoff = contact.backoff(PAUSES);
    loop {
        let wait = match follow_once(&client, &node, &swaps, &mut gone_since).await {
            Ok(()) if gone_since.is_empty() => Duration::MAX,
            Ok(()) => LINGER,
            Err(error) => {
                warn!(error = %format!("{error:#}"), "cannot write swapped records into pods' annotations, trying again");
                backoff.pause().await;
                continue;
            }
        };
        backoff.reset();
        let _ = timeout(wait, pods.changed()).await;
    }
}

/// One pass of [`follow_swaps`]. `gone_since` has the pods with a swapped record that are gone, and when that was first seen.
async fn follow_once(
    client: &Client,
    node: &NodeState,
    swaps: &tokio::sync::Mutex<RecordSwaps>,
    gone_since: &mut BTreeMap<PodUid, Instant>,
) -> anyhow::Result<()> {
    swaps.lock().await.load().await?;
    let (behind, gone) = {
        let pods = node.pods.borrow();
        (pods.with_old_annotations(), gone_with_swapped_record(&pods))
    };
    gone_since.retain(|uid, _| gone.contains(uid));
    for uid in gone {
        gone_since.entry(uid).or_insert_with(Instant::now);
    }
    for (pod, record) in behind {
        annotate(client, &pod, &annotations(node, &pod, record)).await?;
    }
    let mut overdue = BTreeSet::new();
    for (uid, since) in &*gone_since {
        if since.elapsed() >= LINGER {
            overdue.insert(uid.clone());
        }
    }
    if !overdue.is_empty() {
        swaps.lock().await.remove(&overdue).await?;
        gone_since.retain(|uid, _| !overdue.contains(uid));
    }
    Ok(())
}

/// The pods with a swapped record that are gone; none while the list of pods may be incomplete.
fn gone_with_swapped_record(pods: &NodePods) -> BTreeSet<PodUid> {
    let swapped = pods.swapped().filter(|_| pods.is_current());
    let uids = swapped.into_iter().flat_map(BTreeMap::keys);
    uids.filter(|uid| pods.get(uid).is_none()).cloned().collect()
}

/// The annotations of a pod that has got these allocations by a swap.
fn annotations(node: &NodeState, pod: &NodePod, allocations: DeviceAllocations) -> BTreeMap<String, String> {
    let mut record = Record {
        allocations,
        assumed_at: pod.assumed_at(),
        gpushare: None,
    };
    let fleet = node.fleet.borrow();
    if let Some(placement) = pod.record()
        && let Some(before) = placement.gpushare
        && let Some(name) = placement.gpus.first()
        && let Some(gpu) = fleet.gpu_named(name)
    {
        record.gpushare = Some(GpushareRecord {
            idx: gpu.minor,
            device_units: node.settings.memory_unit.units_in(gpu.memory_bytes),
            ..before
        });
    }
    let mut annotations = record.annotations();
    // Another task of the plugin marks pods assigned.
    annotations.remove(MEM_ASSIGNED);
    annotations
}

#[cfg(test)]
mod tests;
