//! A snapshot of the cluster that watches keep up to date, and waits for conditions on it.
//!
//! The watches use the public API alone, so they work against any API server.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::runtime::utils::Backoff;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use proto::device::Device;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::{Instant, interval_at, sleep_until};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, info};

use crate::apiserver::ApiObjects;
use crate::pod_fields::{container_statuses, is_running, node_of, phase, unscheduled_because};

/// Every node, pod and Device object.
#[derive(Clone, Debug, Default)]
pub struct ClusterSnapshot {
    /// By name.
    pub nodes: BTreeMap<String, Node>,
    /// By `namespace/name`.
    pub pods: BTreeMap<String, Pod>,
    /// By name, which is that of the node.
    pub devices: BTreeMap<String, Device>,
    /// The kinds whose first list is complete.
    synced: BTreeSet<&'static str>,
}

/// The interval at which a long wait logs what is still missing.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// The answer of a condition that is waited for.
///
/// A condition that knows the missing part returns a `Result` with that text as its error; one that does not returns
/// an `Option`, and the snapshot's pods that do not run stand for the text.
pub trait Condition {
    /// The result of the wait.
    type Found;

    /// Returns the result, or a text about what is still missing.
    fn found(self) -> Result<Self::Found, Option<String>>;
}

impl<T> Condition for Option<T> {
    type Found = T;

    fn found(self) -> Result<T, Option<String>> {
        self.ok_or(None)
    }
}

impl<T> Condition for Result<T, String> {
    type Found = T;

    fn found(self) -> Result<T, Option<String>> {
        self.map_err(Some)
    }
}

/// Watches of nodes, pods and Device objects; clones share them.
#[derive(Clone, Debug)]
pub struct Observer {
    snapshot: watch::Receiver<ClusterSnapshot>,
    _watches: Arc<[AbortOnDropHandle<()>; 3]>,
}

impl Observer {
    /// Starts to watch.
    pub fn start(client: &Client) -> Self {
        let (sender, snapshot) = watch::channel(ClusterSnapshot::default());
        let watches = [
            watch_kind::<Node>(client, "nodes", |s| &mut s.nodes, sender.clone()),
            watch_kind::<Pod>(client, "pods", |s| &mut s.pods, sender.clone()),
            watch_kind::<Device>(client, "devices", |s| &mut s.devices, sender),
        ];
        Self {
            snapshot,
            _watches: Arc::new(watches),
        }
    }

    /// The snapshot as it is now.
    pub fn now(&self) -> ClusterSnapshot {
        self.snapshot.borrow().clone()
    }

    /// Waits until the first lists of all watches are complete.
    pub async fn synced(&self, deadline: Duration) -> Result<()> {
        let have_begun = |snapshot: &ClusterSnapshot| (snapshot.synced.len() == 3).then_some(());
        self.until("the watches to begin", deadline, have_begun).await
    }

    /// Waits until `condition` is met, evaluating it at every change.
    ///
    /// A long wait logs every few seconds what is still missing.
    pub async fn until<C: Condition>(
        &self,
        what: &str,
        deadline: Duration,
        mut condition: impl FnMut(&ClusterSnapshot) -> C,
    ) -> Result<C::Found> {
        let began = Instant::now();
        let mut progress = interval_at(began + PROGRESS_INTERVAL, PROGRESS_INTERVAL);
        let mut snapshot = self.snapshot.clone();
        let mut has_sender = true;
        loop {
            let missing = {
                let seen = snapshot.borrow_and_update();
                match condition(&seen).found() {
                    Ok(found) => return Ok(found),
                    Err(missing) => missing.unwrap_or_else(|| seen.summary()),
                }
            };
            loop {
                tokio::select! {
                    changed = snapshot.changed(), if has_sender => {
                        // Without a sender nothing can change any more, and polling it again would spin until the deadline.
                        has_sender = changed.is_ok();
                        break;
                    }
                    _ = progress.tick() => info!("{:.0} s: waiting for {what}: {missing}", began.elapsed().as_secs_f64()),
                    () = sleep_until(began + deadline) => {
                        bail!("timed out after {deadline:?} waiting for {what}: {missing}");
                    }
                }
            }
        }
    }
}

impl ClusterSnapshot {
    /// The objects of an API server of this process.
    pub fn of(api: &ApiObjects) -> Self {
        Self {
            nodes: all_objects(api, "nodes"),
            pods: all_objects(api, "pods"),
            devices: all_objects(api, "devices.scheduling.koordinator.sh"),
            synced: BTreeSet::new(),
        }
    }

    /// A pod of the namespace `default` or, written `namespace/name`, of any.
    pub fn pod(&self, name: &str) -> Option<&Pod> {
        if name.contains('/') {
            self.pods.get(name)
        } else {
            self.pods.get(&format!("default/{name}"))
        }
    }

    /// True if each of these pods exists and meets the condition.
    pub fn has_all(&self, names: &[String], meets: impl Fn(&Pod) -> bool) -> bool {
        names.iter().all(|name| self.pod(name).is_some_and(&meets))
    }

    /// True if none of these pods exists.
    pub fn has_none_of(&self, names: &[String]) -> bool {
        names.iter().all(|name| self.pod(name).is_none())
    }

    /// True if a node has some of a resource that pods may request.
    pub fn offers(&self, node: &str, resource: &str) -> bool {
        let status = self.nodes.get(node).and_then(|node| node.status.as_ref());
        let Some(allocatable) = status.and_then(|status| status.allocatable.as_ref()) else {
            return false;
        };
        allocatable.get(resource).is_some_and(|amount| amount.0 != "0")
    }

    /// The pods that do not run, with their phase and reason.
    fn summary(&self) -> String {
        let mut clauses = Vec::new();
        for (name, pod) in &self.pods {
            if !is_running(pod) {
                clauses.push(format!("{name} is {} ({})", phase(pod), reason_not_running(pod)));
            }
        }
        if clauses.is_empty() {
            "every pod is running".to_owned()
        } else {
            clauses.join(", ")
        }
    }
}

/// The reason why a pod does not run: from its scheduling, its status or a waiting container.
pub fn reason_not_running(pod: &Pod) -> String {
    if let Some(message) = unscheduled_because(pod) {
        return message.to_owned();
    }
    if let Some(message) = pod.status.as_ref().and_then(|status| status.message.clone()) {
        return message;
    }
    for container in container_statuses(pod) {
        if let Some(waiting) = container.state.as_ref().and_then(|state| state.waiting.as_ref()) {
            let reason = waiting.reason.as_deref().unwrap_or("waiting");
            return format!("{reason}: {}", waiting.message.as_deref().unwrap_or_default());
        }
    }
    match node_of(pod) {
        Some(node) => format!("on {node}"),
        None => "no reason is given".to_owned(),
    }
}

/// All objects of a resource, by `namespace/name` or name.
fn all_objects<K: ResourceExt + DeserializeOwned>(api: &ApiObjects, resource: &str) -> BTreeMap<String, K> {
    let mut objects = BTreeMap::new();
    for object in api.list(resource, None).unwrap_or_default() {
        if let Ok(object) = K::deserialize(&*object) {
            objects.insert(key(&object), object);
        }
    }
    objects
}

/// `namespace/name` of an object, or its name if it has no namespace.
fn key(object: &impl ResourceExt) -> String {
    match object.namespace() {
        Some(namespace) => format!("{namespace}/{}", object.name_any()),
        None => object.name_any(),
    }
}

/// The pause before a failed watch starts again. kube's default grows to 30 s, and is reset only after two minutes.
struct RetryInterval;

impl Iterator for RetryInterval {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(Duration::from_millis(500))
    }
}

impl Backoff for RetryInterval {
    fn reset(&mut self) {}
}

/// Watches all objects of a kind, and keeps them in the snapshot.
fn watch_kind<K>(
    client: &Client,
    name: &'static str,
    objects_of_kind: fn(&mut ClusterSnapshot) -> &mut BTreeMap<String, K>,
    sender: watch::Sender<ClusterSnapshot>,
) -> AbortOnDropHandle<()>
where
    K: kube::Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let api: Api<K> = Api::all(client.clone());
    AbortOnDropHandle::new(tokio::spawn(async move {
        let mut events = watcher(api, watcher::Config::default())
            .backoff(RetryInterval)
            .boxed();
        let mut listed = BTreeMap::new();
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Init) => listed.clear(),
                Ok(watcher::Event::InitApply(object)) => {
                    listed.insert(key(&object), object);
                }
                Ok(watcher::Event::InitDone) => sender.send_modify(|snapshot| {
                    *objects_of_kind(snapshot) = std::mem::take(&mut listed);
                    snapshot.synced.insert(name);
                }),
                Ok(watcher::Event::Apply(object)) => sender.send_modify(|snapshot| {
                    objects_of_kind(snapshot).insert(key(&object), object);
                }),
                Ok(watcher::Event::Delete(object)) => sender.send_modify(|snapshot| {
                    objects_of_kind(snapshot).remove(&key(&object));
                }),
                Err(error) => debug!(%error, name, "a watch starts again"),
            }
        }
    }))
}
