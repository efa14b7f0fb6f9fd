//! Writes which pods have exchanged their records into the node's Device object, and then into the pods' annotations.
//!
//! The first is the exchange: one write that names both pods, with the version of the object that was read, so that
//! nothing is overwritten that was not seen. It has a field manager of its own, as the object's other writer applies what
//! it writes whole. The annotations follow as soon as they can; readers prefer the Device object.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use proto::device::Device;
use proto::exchange::{self, EXCHANGED_RECORDS, ExchangeError, Exchanged};
use proto::pod::Pod;
use proto::record::{DeviceAllocations, GpushareRecord, MEM_ASSIGNED, Record};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::plugin::NodeState;
use crate::pods::{NodePod, PodUid, Pods};
use crate::watching::one_line;

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
    #[error("the API server has just not answered about the Device object {0}; it is asked again in a few seconds")]
    Resting(String),
    /// It has not been made.
    #[error("there is no Device object {0} yet, in which pods' records are exchanged")]
    Absent(String),
    /// Others write all the time.
    #[error("the Device object {0} changes all the time")]
    Contended(String),
    /// There is no room for more.
    #[error(transparent)]
    Unwritable(#[from] ExchangeError),
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
}

impl Exchange {
    /// Nothing has been read yet.
    pub fn new(client: &Client, node_name: String, pods: watch::Sender<Pods>) -> Self {
        let (in_doubt, rest_until) = (BTreeSet::new(), None);
        Self { devices: Api::all(client.clone()), node_name, pods, version: None, is_loaded: false, in_doubt, rest_until }
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
        let read = exchange::read(found.as_ref().and_then(|device| device.metadata.annotations.as_ref()));
        let exchanged = read.unwrap_or_else(|error| {
            warn!(node = self.node_name, %error, "no pod of this node is taken to have exchanged its record");
            Exchanged::new()
        });
        let exchanged: BTreeMap<PodUid, DeviceAllocations> =
            exchanged.into_iter().map(|(uid, record)| (PodUid::from(uid.as_str()), record)).collect();
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

    /// Exchanges the records of two pods. What has been read may have been out of date: then nothing is written, and what is
    /// there now shows.
    ///
    /// # Errors
    /// It was not done, or nobody knows.
    pub async fn swap(&mut self, node: &NodeState, one: &PodUid, other: &PodUid) -> Result<(), ExchangeFailed> {
        let wanted = {
            let pods = self.pods.borrow();
            let record = |uid: &PodUid| {
                let placement = pods.get(uid).and_then(|pod| pod.placement.as_ref().ok());
                placement.map(|placement| placement.to_allocations(node.settings.memory_unit))
            };
            let Some((ones, others)) = record(one).zip(record(other)) else { return Ok(()) };
            let mut wanted = pods.exchanged().cloned().unwrap_or_default();
            wanted.extend([(one.clone(), others), (other.clone(), ones)]);
            node.ledger().plan_exchange(one, other);
            wanted
        };
        if self.write(&wanted).await? {
            self.pods.send_modify(|pods| {
                pods.exchange(wanted);
                node.ledger().exchanged(one, other);
            });
        }
        Ok(())
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
            let Some(device) = self.limited("read", devices.get_opt(&name)).await? else { return Ok(false) };
            let read = exchange::read(device.metadata.annotations.as_ref());
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
        let patch = json!({"metadata": {"resourceVersion": version, "annotations": {EXCHANGED_RECORDS: text}}});
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let (devices, name) = (self.devices.clone(), self.node_name.clone());
        match self.limited("write", devices.patch(&name, &params, &Patch::Merge(&patch))).await {
            Ok(device) => {
                self.version = device.resource_version();
                self.is_loaded = true;
                self.in_doubt.clear();
                Ok(true)
            }
            Err(ExchangeFailed::Request { source, .. }) if matches!(&*source, kube::Error::Api(status) if status.code == 409) => Ok(false),
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

    async fn limited<T>(&mut self, what: &'static str, request: impl Future<Output = kube::Result<T>>) -> Result<T, ExchangeFailed> {
        if self.rest_until.is_some_and(|until| Instant::now() < until) {
            return Err(ExchangeFailed::Resting(self.node_name.clone()));
        }
        let Ok(answer) = timeout(REQUEST_LIMIT, request).await else {
            self.rest_until = Some(Instant::now() + REST);
            return Err(ExchangeFailed::Slow(self.node_name.clone()));
        };
        self.rest_until = None;
        answer.map_err(|source| ExchangeFailed::Request { what, name: self.node_name.clone(), source: Box::new(source) })
    }
}

/// The annotation that says this.
fn text_of(exchanged: &BTreeMap<PodUid, DeviceAllocations>) -> Result<String, ExchangeError> {
    exchange::write(&exchanged.iter().map(|(uid, record)| (uid.as_str().to_owned(), record.clone())).collect())
}

/// The pods of which the two say different things.
fn differing(known: Option<&BTreeMap<PodUid, DeviceAllocations>>, wanted: &BTreeMap<PodUid, DeviceAllocations>) -> BTreeSet<PodUid> {
    let uids = known.into_iter().flatten().chain(wanted).map(|(uid, _)| uid);
    uids.filter(|uid| known.and_then(|known| known.get(*uid)) != wanted.get(*uid)).cloned().collect()
}

/// Lets pods' annotations follow, and drops entries of pods that are long gone, until the task is dropped.
pub async fn follow(client: Client, node: Arc<NodeState>, exchange: Arc<tokio::sync::Mutex<Exchange>>) {
    let mut pods = node.pods.clone();
    let mut gone_since = BTreeMap::new();
    let mut pause = PAUSES.0;
    loop {
        let followed = follow_once(&client, &node, &exchange, &mut gone_since).await;
        let wait = match followed {
            Ok(()) if gone_since.is_empty() => Duration::MAX,
            Ok(()) => LINGER,
            Err(error) => {
                warn!(error = %format!("{error:#}"), "the annotations of pods that have exchanged their records are written later");
                pause = (pause * 2).min(PAUSES.1);
                sleep(pause).await;
                continue;
            }
        };
        pause = PAUSES.0;
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
        let behind: Vec<_> = pods.behind().map(|(pod, record)| (pod.clone(), record.clone())).collect();
        let is_gone = |uid: &&PodUid| pods.is_current() && pods.get(uid).is_none();
        let gone: BTreeSet<PodUid> = pods.exchanged().into_iter().flatten().map(|(uid, _)| uid).filter(is_gone).cloned().collect();
        (behind, gone)
    };
    gone_since.retain(|uid, _| gone.contains(uid));
    for uid in gone {
        gone_since.entry(uid).or_insert_with(Instant::now);
    }
    for (pod, record) in behind {
        annotate(client, &pod, &annotations(node, &pod, &record)).await?;
    }
    let overdue: BTreeSet<PodUid> = gone_since.iter().filter(|(_, since)| since.elapsed() >= LINGER).map(|(uid, _)| uid.clone()).collect();
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
    let gpu = gpu.and_then(|name| fleet.gpus.iter().find(|entry| name.names(&entry.gpu))).map(|entry| &entry.gpu);
    let gpushare = placement.and_then(|placement| placement.gpushare).zip(gpu).map(|(record, gpu)| GpushareRecord {
        idx: gpu.minor,
        device_units: node.settings.memory_unit.units_in(gpu.memory_bytes),
        ..record
    });
    let record = Record { allocations: allocations.clone(), assumed_at: placement.map(|placement| placement.assumed_at), gpushare };
    let mut annotations = record.annotations();
    // Somebody else writes that.
    annotations.remove(MEM_ASSIGNED);
    annotations
}

/// Writes annotations of a pod; one that is gone, or replaced by another of its name, counts as done.
///
/// # Errors
/// It was not done, or nobody knows.
pub async fn annotate(client: &Client, pod: &NodePod, annotations: &BTreeMap<String, String>) -> anyhow::Result<()> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    let patch = json!({"metadata": {"uid": pod.uid.as_str(), "annotations": annotations}});
    match timeout(REQUEST_LIMIT, api.patch(&pod.name, &PatchParams::default(), &Patch::Merge(&patch))).await? {
        Ok(_) => {
            info!(pod = pod.display_name(), "the pod's record is written into its annotations");
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 && status.message.to_lowercase().contains("uid") => Ok(()),
        Err(error) => Err(anyhow::anyhow!(one_line(&error)).context(format!("cannot write annotations of pod {}", pod.display_name()))),
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use proto::memory_unit::MemoryUnit;
    use proto::resource::ResourceNames;
    use serde_json::Value;
    use tower_test::mock::{Handle, pair};

    use super::*;
    use crate::builders::{fleet, pod, pods, units};
    use crate::identity::Ledger;
    use crate::plugin::Settings;

    fn uid(name: &str) -> PodUid {
        PodUid::from(name)
    }

    /// A node with equal pods a, b and c on GPUs 0, 1 and 2.
    fn scene() -> (NodeState, Exchange, Handle<Request<Body>, Response<Body>>) {
        let (service, requests) = pair::<Request<Body>, Response<Body>>();
        let on = |name: &str, minor: u32| pod(name, u64::from(minor), [units(2)]).on([minor]);
        let (sender, seen) = watch::channel(pods([on("a", 0), on("b", 1), on("c", 2)]));
        let (_, fleet) = watch::channel(Arc::new(fleet(3)));
        let settings = Settings::plain(ResourceNames::default(), MemoryUnit::GIB, Duration::from_secs(2));
        let node = NodeState::new(settings, fleet, seen, Ledger::default());
        (node, Exchange::new(&Client::new(service, "default"), "n1".to_owned(), sender), requests)
    }

    async fn answer(requests: &mut Handle<Request<Body>, Response<Body>>, code: u16, body: &Value) -> String {
        let (request, response) = requests.next_request().await.unwrap();
        response.send_response(Response::builder().status(code).body(Body::from(body.to_string().into_bytes())).unwrap());
        request.method().to_string()
    }

    fn device(version: &str) -> Value {
        json!({"metadata": {"name": "n1", "resourceVersion": version}, "spec": {"devices": []}})
    }

    fn minors(node: &NodeState) -> Vec<String> {
        node.pods.borrow().iter().map(|pod| pod.placement.as_ref().unwrap().to_string()).collect()
    }

    /// Only the two of which it is not known whether they have exchanged their records have to wait until it is.
    #[tokio::test(start_paused = true)]
    async fn a_write_without_an_answer_leaves_others_alone() {
        let (node, mut exchange, mut requests) = scene();
        let (a, b, c) = (uid("a"), uid("b"), uid("c"));
        let server = tokio::spawn(async move {
            assert_eq!(answer(&mut requests, 200, &device("1")).await, "GET");
            let unanswered = requests.next_request().await.unwrap();
            (requests, unanswered)
        });
        exchange.load().await.unwrap();
        assert!(matches!(exchange.swap(&node, &a, &b).await, Err(ExchangeFailed::Slow(_))));
        let (mut requests, unanswered) = server.await.unwrap();
        drop(unanswered);
        exchange.load_for(&c).await.unwrap();
        assert!(matches!(exchange.load_for(&a).await, Err(ExchangeFailed::Resting(_))), "nobody waits for it at once");
        sleep(REST).await;
        // It was done.
        let record = |minor: u32| json!({"gpu": [{"minor": minor, "resources": {"koordinator.sh/gpu-memory": "2Gi"}}]});
        let mut done = device("2");
        done["metadata"]["annotations"] = json!({EXCHANGED_RECORDS: json!({"a": record(1), "b": record(0)}).to_string()});
        let (loaded, _) = tokio::join!(exchange.load_for(&a), answer(&mut requests, 200, &done));
        loaded.unwrap();
        assert_eq!(minors(&node), ["minor 1", "minor 0", "minor 2"]);
        exchange.load_for(&b).await.unwrap();
    }

    /// Somebody has deleted the object, and the publisher has made it anew, before the pods' annotations followed.
    #[tokio::test(start_paused = true)]
    async fn what_is_gone_from_the_object_is_written_again() {
        let (node, mut exchange, mut requests) = scene();
        let (a, b) = (uid("a"), uid("b"));
        let server = async {
            assert_eq!(answer(&mut requests, 200, &device("1")).await, "GET");
            assert_eq!(answer(&mut requests, 200, &device("2")).await, "PATCH");
            assert_eq!(answer(&mut requests, 200, &device("7")).await, "GET");
            let (request, response) = requests.next_request().await.unwrap();
            let body = request.into_body().collect_bytes().await.unwrap();
            let patch: Value = serde_json::from_slice(&body).unwrap();
            response.send_response(Response::builder().body(Body::from(device("8").to_string().into_bytes())).unwrap());
            patch["metadata"].clone()
        };
        let client = async {
            exchange.load().await.unwrap();
            exchange.swap(&node, &a, &b).await.unwrap();
            exchange.verify().await.unwrap()
        };
        let (is_restored, patch) = tokio::join!(client, server);
        assert!(is_restored);
        assert_eq!(patch["resourceVersion"], "7");
        assert!(patch["annotations"][EXCHANGED_RECORDS].as_str().unwrap().contains("\"a\""), "{patch}");
        assert_eq!(minors(&node), ["minor 1", "minor 0", "minor 2"]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_somebody_else_has_written_is_not_written_over() {
        let (node, mut exchange, mut requests) = scene();
        let record = |minor: u32| json!({"gpu": [{"minor": minor, "resources": {"koordinator.sh/gpu-memory": "2Gi"}}]});
        let mut other = device("2");
        other["metadata"]["annotations"] = json!({EXCHANGED_RECORDS: json!({"b": record(2), "c": record(1)}).to_string()});
        let conflict = json!({"kind": "Status", "status": "Failure", "reason": "Conflict", "code": 409, "message": "changed"});
        let server = async {
            assert_eq!(answer(&mut requests, 200, &device("1")).await, "GET");
            assert_eq!(answer(&mut requests, 409, &conflict).await, "PATCH");
            assert_eq!(answer(&mut requests, 200, &other).await, "GET");
        };
        let (a, b) = (uid("a"), uid("b"));
        let swap = async {
            exchange.load().await.unwrap();
            exchange.swap(&node, &a, &b).await.unwrap();
        };
        let ((), ()) = tokio::join!(swap, server);
        assert_eq!(minors(&node), ["minor 0", "minor 2", "minor 1"], "taken in, and nothing exchanged");
    }
}
