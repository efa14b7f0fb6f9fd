//! Writes which pods have exchanged their records into the node's Device object, and then into the pods' annotations.
//!
//! The first is the exchange: one write that names both pods, with the version of the object that was read, so that
//! nothing is overwritten that was not seen. It has a field manager of its own, as the object's other writer applies what
//! it writes whole. The annotations follow as soon as they can; readers prefer the Device object.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::{Connection, one_line};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use proto::device::Device;
use proto::memory_unit::MemoryUnit;
use proto::plugin_reports::{self, EXCHANGED_RECORDS, ReportError, SwappedRecords};
use proto::pod::Pod;
use proto::record::{DeviceAllocations, GpushareRecord, MEM_ASSIGNED, Record};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use crate::plugin::NodeState;
use crate::pods::{NodePod, PodUid, Pods};

/// Who writes, as the API server records it.
const FIELD_MANAGER: &str = "gpushare-exchange";

/// How long one request may take: kubelet waits for some.
const REQUEST_LIMIT: Duration = Duration::from_secs(4);

/// How often a write is tried when somebody else has changed the object meanwhile.
const TRIES: usize = 4;

/// How long an entry outlives its pod: the scheduler may learn of that later than we do.
const LINGER: Duration = Duration::from_secs(60);

/// Pauses after failures, doubled each time.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// How long nothing is tried after a request that was not answered: whoever waits for the exchange waits for its turn.
const REST: Duration = Duration::from_secs(10);

/// Records that could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeFailed {
    /// The API server answered with an error.
    #[error("cannot {what} the Device object {name}, in which pods' records are exchanged")]
    Request {
        /// What was tried.
        what: &'static str,
        /// The object.
        name: String,
        /// What went wrong.
        #[source]
        source: Box<kube::Error>,
    },
    /// No answer.
    #[error("no answer about the Device object {0} within {REQUEST_LIMIT:?}")]
    Slow(String),
    /// There was no answer a moment ago.
    #[error(
        "the API server has just not answered about the Device object {0}; it is asked again in a few seconds"
    )]
    Resting(String),
    /// It has not been made.
    #[error("there is no Device object {0} yet, in which pods' records are exchanged")]
    Absent(String),
    /// Others write all the time.
    #[error("the Device object {0} changes all the time")]
    Contended(String),
    /// There is no room for more.
    #[error(transparent)]
    Unwritable(#[from] ReportError),
}

/// The annotation of this node's Device object. Only one task uses it at a time.
#[derive(Debug)]
pub struct Exchange {
    devices: Api<Device>,
    node_name: String,
    /// The records of this node's pods; what is exchanged shows there.
    pods: watch::Sender<Pods>,
    /// Version of the object as it was last seen, if what it says is known for sure.
    version: Option<String>,
    is_loaded: bool,
    /// Pods of which a write says something else than what is known, as long as nobody knows whether it was done.
    in_doubt: BTreeSet<PodUid>,
    /// Until when nothing is tried.
    rest_until: Option<Instant>,
    /// Notified when the API server answers after an absence, which ends the rest.
    regained: watch::Receiver<()>,
}

impl Exchange {
    /// Nothing has been read yet.
    pub fn new(connection: &Connection, node_name: String, pods: watch::Sender<Pods>) -> Self {
        let (devices, regained) = (Api::all(connection.client.clone()), connection.contact.regained());
        Self {
            devices,
            node_name,
            pods,
            version: None,
            is_loaded: false,
            in_doubt: BTreeSet::new(),
            rest_until: None,
            regained,
        }
    }

    /// Reads what has been exchanged, unless it is known for this pod. What is not known of others is not read for it.
    ///
    /// # Errors
    /// It cannot be read.
    pub async fn load_for(&mut self, uid: &PodUid) -> Result<(), ExchangeFailed> {
        let is_known = self.pods.borrow().exchanged().is_some() && !self.in_doubt.contains(uid);
        if is_known { Ok(()) } else { self.load().await }
    }

    /// Reads what has been exchanged, unless that is known.
    ///
    /// # Errors
    /// It cannot be read.
    pub async fn load(&mut self) -> Result<(), ExchangeFailed> {
        if self.is_loaded {
            return Ok(());
        }
        let (devices, name) = (self.devices.clone(), self.node_name.clone());
        let found = self.limited("read", devices.get_opt(&name)).await?;
        let read = plugin_reports::read_swapped_records(
            found
                .as_ref()
                .and_then(|device| device.metadata.annotations.as_ref()),
        );
        let exchanged = read.unwrap_or_else(|error| {
            warn!(node = self.node_name, %error, "no pod of this node is taken to have exchanged its record");
            SwappedRecords::new()
        });
        let exchanged: BTreeMap<PodUid, DeviceAllocations> = exchanged
            .into_iter()
            .map(|(uid, record)| (PodUid::from(uid.as_str()), record))
            .collect();
        self.version = found.and_then(|device| device.resource_version());
        self.in_doubt.clear();
        self.pods.send_if_modified(|pods| {
            let is_news = pods.exchanged() != Some(&exchanged);
            pods.exchange(exchanged);
            is_news
        });
        self.is_loaded = true;
        Ok(())
    }

    /// Exchanges the records of two pods, and in the same write those of the pairs `beside`, if there is room for them; how
    /// many exchanges were written. Nobody is named twice. What has been read may have been out of date: then nothing is
    /// written, and what is there now shows.
    ///
    /// # Errors
    /// It was not done, or nobody knows.
    pub async fn swap(
        &mut self,
        node: &NodeState,
        pair: (&PodUid, &PodUid),
        beside: &[(PodUid, PodUid)],
    ) -> Result<usize, ExchangeFailed> {
        let (wanted, swaps) = {
            let pods = self.pods.borrow();
            let beside = beside.iter().map(|(one, other)| (one, other));
            let swaps: Vec<(&PodUid, &PodUid)> = std::iter::once(pair).chain(beside).collect();
            let Some((wanted, n_swaps)) = exchanged(&pods, &swaps, node.settings.memory_unit) else {
                return Ok(0);
            };
            let swaps: Vec<_> = swaps.into_iter().take(n_swaps).collect();
            let mut ledger = node.ledger();
            for (one, other) in &swaps {
                ledger.plan_exchange(one, other);
            }
            (wanted, swaps)
        };
        if !self.write(&wanted).await? {
            return Ok(0);
        }
        self.pods.send_modify(|pods| {
            pods.exchange(wanted);
            let mut ledger = node.ledger();
            for (one, other) in &swaps {
                ledger.exchanged(one, other);
            }
        });
        Ok(swaps.len())
    }

    /// Gives one pod another record than it has: that of the devices which it is known to use. False if something else was
    /// there than is known, which has been taken in.
    ///
    /// # Errors
    /// It was not done, or nobody knows.
    pub async fn put(&mut self, uid: &PodUid, record: DeviceAllocations) -> Result<bool, ExchangeFailed> {
        let mut wanted = self.pods.borrow().exchanged().cloned().unwrap_or_default();
        wanted.insert(uid.clone(), record);
        let is_written = self.write(&wanted).await?;
        if is_written {
            self.pods.send_modify(|pods| pods.exchange(wanted));
        }
        Ok(is_written)
    }

    /// Writes what has been exchanged once more if the object does not say it: it may have been made anew, or somebody may
    /// have emptied it. Whether that was necessary.
    ///
    /// # Errors
    /// It is not known what the object says, or it was not written.
    pub async fn verify(&mut self) -> Result<bool, ExchangeFailed> {
        self.load().await?;
        let known = self.pods.borrow().exchanged().cloned().unwrap_or_default();
        if known.is_empty() {
            return Ok(false);
        }
        let text = text_of(&known)?;
        for _ in 0..TRIES {
            let (devices, name) = (self.devices.clone(), self.node_name.clone());
            // It is made again by whoever publishes the devices.
            let Some(device) = self.limited("read", devices.get_opt(&name)).await? else {
                return Ok(false);
            };
            let read = plugin_reports::read_swapped_records(device.metadata.annotations.as_ref());
            if read.is_ok_and(|there| known.keys().all(|uid| there.contains_key(uid.as_str()))) {
                return Ok(false);
            }
            if let Some(version) = device.resource_version()
                && self.patch(&version, &text).await?
            {
                return Ok(true);
            }
        }
        Err(ExchangeFailed::Contended(self.node_name.clone()))
    }

    /// Writes what is exchanged; false if something else was there than is known, which has been taken in.
    async fn write(&mut self, wanted: &BTreeMap<PodUid, DeviceAllocations>) -> Result<bool, ExchangeFailed> {
        let text = text_of(wanted)?;
        for _ in 0..TRIES {
            let Some(version) = self.version.clone() else {
                self.is_loaded = false;
                let known = self.pods.borrow().exchanged().cloned();
                self.load().await?;
                if self.version.is_none() {
                    return Err(ExchangeFailed::Absent(self.node_name.clone()));
                }
                if self.pods.borrow().exchanged() != known.as_ref() {
                    return Ok(false);
                }
                continue;
            };
            // Until it is known to have succeeded it may or may not have been done.
            self.version = None;
            self.is_loaded = false;
            self.in_doubt = differing(self.pods.borrow().exchanged(), wanted);
            if self.patch(&version, &text).await? {
                return Ok(true);
            }
        }
        Err(ExchangeFailed::Contended(self.node_name.clone()))
    }

    /// Writes the annotation over this version of the object; false if there is another one by now.
    async fn patch(&mut self, version: &str, text: &str) -> Result<bool, ExchangeFailed> {
        let patch =
            json!({"metadata": {"resourceVersion": version, "annotations": {EXCHANGED_RECORDS: text}}});
        let params = PatchParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let (devices, name) = (self.devices.clone(), self.node_name.clone());
        match self
            .limited("write", devices.patch(&name, &params, &Patch::Merge(&patch)))
            .await
        {
            Ok(device) => {
                self.version = device.resource_version();
                self.is_loaded = true;
                self.in_doubt.clear();
                Ok(true)
            }
            Err(ExchangeFailed::Request { source, .. }) if matches!(&*source, kube::Error::Api(status) if status.code == 409) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Drops the entries of these pods.
    ///
    /// # Errors
    /// It was not done, or nobody knows.
    pub async fn forget(&mut self, gone: &BTreeSet<PodUid>) -> Result<(), ExchangeFailed> {
        let mut wanted = self.pods.borrow().exchanged().cloned().unwrap_or_default();
        wanted.retain(|uid, _| !gone.contains(uid));
        if self.write(&wanted).await? {
            self.pods.send_modify(|pods| pods.exchange(wanted));
        }
        Ok(())
    }

    async fn limited<T>(
        &mut self,
        what: &'static str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ExchangeFailed> {
        if self.regained.has_changed().unwrap_or(false) {
            self.regained.mark_unchanged();
            self.rest_until = None;
        }
        if self.rest_until.is_some_and(|until| Instant::now() < until) {
            return Err(ExchangeFailed::Resting(self.node_name.clone()));
        }
        let Ok(answer) = timeout(REQUEST_LIMIT, request).await else {
            self.rest_until = Some(Instant::now() + REST);
            return Err(ExchangeFailed::Slow(self.node_name.clone()));
        };
        self.rest_until = None;
        answer.map_err(|source| ExchangeFailed::Request {
            what,
            name: self.node_name.clone(),
            source: Box::new(source),
        })
    }
}

/// What is exchanged after these exchanges, and how many of them there is room for: at least one is tried. None if the record
/// of one of the pods is not known.
///
/// Entries outlive their pods for a while, but not where they leave no room for others: a pod that is gone uses no device,
/// whichever of two records it is still counted by.
fn exchanged(
    pods: &Pods,
    swaps: &[(&PodUid, &PodUid)],
    unit: MemoryUnit,
) -> Option<(BTreeMap<PodUid, DeviceAllocations>, usize)> {
    let record = |uid: &PodUid| Some(pods.get(uid)?.placement.as_ref().ok()?.to_allocations(unit));
    let pairs: Option<Vec<_>> = swaps
        .iter()
        .map(|(one, other)| Some([((*one).clone(), record(other)?), ((*other).clone(), record(one)?)]))
        .collect();
    let pairs = pairs?;
    let mut n_swaps = pairs.len();
    loop {
        let mut wanted = pods.exchanged().cloned().unwrap_or_default();
        wanted.extend(pairs.iter().take(n_swaps).flatten().cloned());
        if pods.is_current() && text_of(&wanted).is_err() {
            wanted.retain(|uid, _| pods.get(uid).is_some());
        }
        if n_swaps <= 1 || text_of(&wanted).is_ok() {
            return Some((wanted, n_swaps));
        }
        n_swaps /= 2;
    }
}

/// The annotation that says this.
fn text_of(exchanged: &BTreeMap<PodUid, DeviceAllocations>) -> Result<String, ReportError> {
    plugin_reports::write_swapped_records(
        &exchanged
            .iter()
            .map(|(uid, record)| (uid.as_str().to_owned(), record.clone()))
            .collect(),
    )
}

/// The pods of which the two say different things.
fn differing(
    known: Option<&BTreeMap<PodUid, DeviceAllocations>>,
    wanted: &BTreeMap<PodUid, DeviceAllocations>,
) -> BTreeSet<PodUid> {
    let uids = known.into_iter().flatten().chain(wanted).map(|(uid, _)| uid);
    uids.filter(|uid| known.and_then(|known| known.get(*uid)) != wanted.get(*uid))
        .cloned()
        .collect()
}

/// Lets pods' annotations follow, and drops entries of pods that are long gone, until the task is dropped.
pub async fn follow(
    connection: Connection,
    node: Arc<NodeState>,
    exchange: Arc<tokio::sync::Mutex<Exchange>>,
) {
    let Connection { client, contact } = connection;
    let mut pods = node.pods.clone();
    let mut gone_since = BTreeMap::new();
    let mut backoff = contact.backoff(PAUSES);
    loop {
        let followed = follow_once(&client, &node, &exchange, &mut gone_since).await;
        let wait = match followed {
            Ok(()) if gone_since.is_empty() => Duration::MAX,
            Ok(()) => LINGER,
            Err(error) => {
                warn!(error = %format!("{error:#}"), "the annotations of pods that have exchanged their records are written later");
                backoff.pause().await;
                continue;
            }
        };
        backoff.reset();
        let _ = timeout(wait, pods.changed()).await;
    }
}

async fn follow_once(
    client: &Client,
    node: &NodeState,
    exchange: &tokio::sync::Mutex<Exchange>,
    gone_since: &mut BTreeMap<PodUid, Instant>,
) -> anyhow::Result<()> {
    exchange.lock().await.load().await?;
    let (behind, gone) = {
        let pods = node.pods.borrow();
        let behind: Vec<_> = pods
            .behind()
            .map(|(pod, record)| (pod.clone(), record.clone()))
            .collect();
        let is_gone = |uid: &&PodUid| pods.is_current() && pods.get(uid).is_none();
        let gone: BTreeSet<PodUid> = pods
            .exchanged()
            .into_iter()
            .flatten()
            .map(|(uid, _)| uid)
            .filter(is_gone)
            .cloned()
            .collect();
        (behind, gone)
    };
    gone_since.retain(|uid, _| gone.contains(uid));
    for uid in gone {
        gone_since.entry(uid).or_insert_with(Instant::now);
    }
    for (pod, record) in behind {
        annotate(client, &pod, &annotations(node, &pod, &record)).await?;
    }
    let overdue: BTreeSet<PodUid> = gone_since
        .iter()
        .filter(|(_, since)| since.elapsed() >= LINGER)
        .map(|(uid, _)| uid.clone())
        .collect();
    if !overdue.is_empty() {
        exchange.lock().await.forget(&overdue).await?;
        gone_since.retain(|uid, _| !overdue.contains(uid));
    }
    Ok(())
}

/// What the pod's annotations are to say.
fn annotations(node: &NodeState, pod: &NodePod, allocations: &DeviceAllocations) -> BTreeMap<String, String> {
    let placement = pod.placement.as_ref().ok();
    let fleet = node.fleet.borrow();
    let gpu = placement.and_then(|placement| placement.gpus.first());
    let gpu = gpu
        .and_then(|name| fleet.gpus.iter().find(|entry| name.names(&entry.gpu)))
        .map(|entry| &entry.gpu);
    let gpushare = placement
        .and_then(|placement| placement.gpushare)
        .zip(gpu)
        .map(|(record, gpu)| GpushareRecord {
            idx: gpu.minor,
            device_units: node.settings.memory_unit.units_in(gpu.memory_bytes),
            ..record
        });
    let record = Record {
        allocations: allocations.clone(),
        assumed_at: placement.map(|placement| placement.assumed_at),
        gpushare,
    };
    let mut annotations = record.annotations();
    // Somebody else writes that.
    annotations.remove(MEM_ASSIGNED);
    annotations
}

/// Writes annotations of a pod; one that is gone, or replaced by another of its name, counts as done.
///
/// # Errors
/// It was not done, or nobody knows.
pub async fn annotate(
    client: &Client,
    pod: &NodePod,
    annotations: &BTreeMap<String, String>,
) -> anyhow::Result<()> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    let patch = json!({"metadata": {"uid": pod.uid.as_str(), "annotations": annotations}});
    match timeout(
        REQUEST_LIMIT,
        api.patch(&pod.name, &PatchParams::default(), &Patch::Merge(&patch)),
    )
    .await?
    {
        Ok(_) => {
            info!(
                pod = pod.display_name(),
                "the pod's record is written into its annotations"
            );
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(kube::Error::Api(status))
            if status.code == 409 && status.message.to_lowercase().contains("uid") =>
        {
            Ok(())
        }
        Err(error) => Err(anyhow::anyhow!(one_line(&error))
            .context(format!("cannot write annotations of pod {}", pod.display_name()))),
    }
}

#[cfg(test)]
mod tests;
