//! kubelet's sync loop: takes pods in and admits them one at a time, in batches that are put in order.
//!
//! Another task reads the watch, so that pods queue up here while a plugin answers. Admission gives every container its
//! devices, then checks kubelet's own resources; a refusal is final and makes the pod Failed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::{WatchStreamExt as _, watcher};
use proto::pod::MIRROR;
use rand::seq::SliceRandom;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::config::{Hold, OrderRule};
use super::device_manager::DeviceManager;
use super::fit::fit;
use super::machine::PodAdmission;
use super::node_status::NodeStatusSync;
use super::pod::KubeletPod;
use super::pod_table::PodCommand;
use super::pod_worker::PodWorkers;
use super::run::KubeletRun;
use super::status_manager::StatusManager;
use crate::dice::dice;

#[derive(Debug)]
enum PodUpdate {
    /// The complete list, at start and after a broken watch.
    List(Vec<Arc<KubeletPod>>),
    Applied(Arc<KubeletPod>),
    /// The UID of a pod that was removed.
    Removed(String),
}

#[derive(Debug)]
pub(crate) struct SyncLoop {
    pub(crate) run: Arc<KubeletRun>,
    pub(crate) devices: Arc<DeviceManager>,
    pub(crate) status: Arc<StatusManager>,
    pub(crate) node: Arc<NodeStatusSync>,
    pub(crate) workers: Arc<PodWorkers>,
}

impl SyncLoop {
    /// Watches this node's pods and takes them in until the process ends.
    pub(crate) async fn run(self: Arc<Self>) {
        let (queue, arrivals) = unbounded_channel();
        let watching = Arc::clone(&self);
        self.run.spawn(async move { watching.watch(&queue).await });
        self.take_in(arrivals).await;
    }

    async fn watch(&self, queue: &UnboundedSender<PodUpdate>) {
        let api: Api<Pod> = Api::all(self.run.machine.config.client.clone());
        // NewSourceApiserver: a field selector, so that kubelet gets its own pods only.
        let config =
            watcher::Config::default().fields(&format!("spec.nodeName={}", self.run.machine.config.node));
        let mut events = watcher(api, config).default_backoff().boxed();
        let mut listed = Vec::new();
        loop {
            let arrival = match events.try_next().await {
                Ok(Some(watcher::Event::Init)) => {
                    listed.clear();
                    continue;
                }
                Ok(Some(watcher::Event::InitApply(pod))) => {
                    listed.extend(KubeletPod::read(&pod).map(Arc::new));
                    continue;
                }
                Ok(Some(watcher::Event::InitDone)) => Some(PodUpdate::List(std::mem::take(&mut listed))),
                Ok(Some(watcher::Event::Apply(pod))) => {
                    KubeletPod::read(&pod).map(|pod| PodUpdate::Applied(Arc::new(pod)))
                }
                Ok(Some(watcher::Event::Delete(pod))) => pod.metadata.uid.map(PodUpdate::Removed),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "the watch of this node's pods failed");
                    continue;
                }
            };
            // The loop may have ended before its queue.
            let _ = arrival.map(|arrival| queue.send(arrival));
        }
    }

    /// Takes in updates, and admits new pods one by one: those of a list, or that were held back, in the order of their batch.
    async fn take_in(&self, mut arrivals: UnboundedReceiver<PodUpdate>) {
        while let Some(arrival) = arrivals.recv().await {
            let mut batch = Vec::new();
            // After a start all pods of the node come as one batch; HandlePodAdditions sorts them by creation time.
            let is_list = matches!(arrival, PodUpdate::List(_));
            self.collect(arrival, &mut batch);
            let order = self.collect_while_held(&mut batch, &mut arrivals).await;
            for pod in in_order(batch, order) {
                self.admit(pod).await;
            }
            // sourcesReady is true once the first list has been handled. Until then an unknown pod may still come, so kubelet
            // frees no devices and removes no containers.
            if is_list {
                self.run.pods.lock().sources_ready = true;
                self.run.machine.notify();
            }
        }
    }

    /// Collects pods until a test lets it go on ([`Hold`]); returns the order in which they are admitted then.
    async fn collect_while_held(
        &self,
        batch: &mut Vec<Arc<KubeletPod>>,
        arrivals: &mut UnboundedReceiver<PodUpdate>,
    ) -> Hold {
        let mut hold = self.run.machine.hold.subscribe();
        let mut was_held = false;
        loop {
            let now = *hold.borrow_and_update();
            was_held |= now.is_held;
            self.run.machine.counts.lock().held = if now.is_held { batch.len() } else { 0 };
            self.run.machine.notify();
            if !now.is_held {
                return if was_held { now } else { Hold::default() };
            }
            tokio::select! {
                _ = hold.changed() => {}
                Some(arrival) = arrivals.recv() => self.collect(arrival, batch),
            }
        }
    }

    /// Takes in one update: pods that need admission join the batch, and deleted pods leave it.
    fn collect(&self, arrival: PodUpdate, batch: &mut Vec<Arc<KubeletPod>>) {
        match arrival {
            PodUpdate::Applied(pod) => {
                // A pod that changed while it waits in the batch is admitted as it is now.
                batch.retain(|waiting| waiting.uid != pod.uid);
                batch.extend(self.update(pod));
            }
            PodUpdate::Removed(uid) => {
                batch.retain(|waiting| waiting.uid != uid);
                self.forget(&uid);
            }
            PodUpdate::List(pods) => {
                self.forget_missing(&pods);
                let known: BTreeSet<String> = batch.iter().map(|pod| pod.uid.clone()).collect();
                let new = pods.into_iter().filter(|pod| !known.contains(&pod.uid));
                batch.extend(new.filter_map(|pod| self.update(pod)));
            }
        }
    }

    /// Acts on the changes of a known pod; takes over a new pod, and returns it if it needs admission.
    fn update(&self, pod: Arc<KubeletPod>) -> Option<Arc<KubeletPod>> {
        let mut pods = self.run.pods.lock();
        let Some(record) = pods.records.get_mut(&pod.uid) else {
            drop(pods);
            return self.take_over(pod);
        };
        if pod.deleting && !record.spec.deleting {
            // A worker that has ended has nothing left to stop.
            if !record.send(PodCommand::Delete) {
                self.status.publish_deletion(&pod);
            }
            record.spec = pod;
        } else if pod.containers.len() > record.spec.containers.len() {
            // Of the containers of a known pod only ephemeral ones become more.
            record.send(PodCommand::Update(Arc::clone(&pod)));
            record.spec = pod;
        }
        None
    }

    /// Takes note of a pod seen for the first time, and returns it if it needs admission.
    fn take_over(&self, pod: Arc<KubeletPod>) -> Option<Arc<KubeletPod>> {
        // HandlePodCleanups: kubelet runs static pods by their files, and deletes mirrors that have none. This one has no files.
        if pod.annotations.contains_key(MIRROR) {
            self.status.publish_deletion(&pod);
            return None;
        }
        // A pod that has ended or is being deleted needs no admission.
        if !pod.deleting && !pod.terminal {
            return Some(pod);
        }
        self.run.pods.lock().arrive(&pod);
        if pod.deleting && pod.terminal {
            self.status.publish_deletion(&pod);
        } else if pod.deleting {
            self.workers.start(&pod);
            if let Some(record) = self.run.pods.lock().records.get(&pod.uid) {
                record.send(PodCommand::Delete);
            }
        }
        None
    }

    /// Forgets pods and containers that a new list no longer shows.
    fn forget_missing(&self, listed: &[Arc<KubeletPod>]) {
        let listed: BTreeSet<&str> = listed.iter().map(|pod| pod.uid.as_str()).collect();
        let mut known: Vec<String> = self.run.pods.lock().records.keys().cloned().collect();
        known.retain(|uid| !listed.contains(uid.as_str()));
        for uid in known {
            self.forget(&uid);
        }
        // Containers of pods that went away while kubelet was down.
        for container in self.run.machine.runtime.all() {
            if !listed.contains(container.pod_uid.as_str()) {
                self.run.machine.runtime.remove(&container.pod_uid);
            }
        }
    }

    /// Forgets a deleted pod and removes its containers: its worker does, or this function if the worker has ended.
    fn forget(&self, uid: &str) {
        let record = self.run.pods.lock().records.remove(uid);
        if !record.is_some_and(|record| record.send(PodCommand::Remove)) {
            self.run.machine.runtime.remove(uid);
        }
        self.run.machine.notify();
    }

    /// Admits one pod and starts the task that runs it, or makes it Failed.
    async fn admit(&self, pod: Arc<KubeletPod>) {
        let began = Instant::now();
        self.run.pods.lock().arrive(&pod);
        let refusal = self.check(&pod).await.err();
        match &refusal {
            None => self.workers.start(&pod),
            Some((reason, message)) => self.reject(&pod, reason, message),
        }
        let admission = PodAdmission {
            pod: pod.full_name(),
            uid: pod.uid.clone(),
            began,
            took: began.elapsed(),
            refusal,
        };
        self.run.machine.counts.lock().admissions.push(admission);
        self.run.machine.notify();
    }

    /// Admits a pod or returns reason and message of its refusal: no devices, or too few resources beside the other pods.
    async fn check(&self, pod: &KubeletPod) -> Result<(), (String, String)> {
        // The handler that allocates devices comes before predicateAdmitHandler, which checks the fit: a pod
        // that does not fit has called the plugins first.
        if let Err(error) = self.devices.allocate_pod(pod).await {
            let message = format!("Allocate failed due to {error}, which is unexpected");
            return Err(("UnexpectedAdmissionError".to_owned(), message));
        }
        let mut allocatable = self.node.allocatable();
        // Devices that are held already count as allocatable, even if their plugin is not connected.
        for (resource, held) in self.devices.lock().held().devices() {
            allocatable.raise(&resource, held.len());
        }
        let pods = self.run.pods.lock();
        let others = pods.active().filter(|other| other.uid != pod.uid);
        let others = others.map(|other| &other.requests);
        fit(&pod.requests, others, &allocatable)
    }

    /// Ends a pod that is not admitted: its status says Failed, and an event says why.
    fn reject(&self, pod: &KubeletPod, reason: &str, message: &str) {
        tracing::warn!(pod = pod.full_name(), reason, message, "pod rejected");
        self.run.pods.lock().end(&pod.uid);
        // After a restart of kubelet the containers of the rejected pod may be running.
        self.run.machine.runtime.kill(&pod.uid);
        self.status.publish_rejection(pod, reason, message);
        self.status.publish_event(pod, reason, message);
    }
}

/// Puts one batch in order; pods of one creation time keep the order of their arrival before the rule applies.
fn in_order(mut batch: Vec<Arc<KubeletPod>>, order: Hold) -> Vec<Arc<KubeletPod>> {
    // kubelet sorts a batch by creation time; a test's rule then changes that order.
    batch.sort_by_key(|pod| pod.created);
    match order.rule {
        OrderRule::Creation => {}
        OrderRule::Reversed => batch.reverse(),
        OrderRule::Shuffled => {
            // By the seed alone, not by the order in which the pods arrived.
            batch.sort_by_cached_key(|pod| pod.full_name());
            batch.shuffle(&mut dice(order.seed, &["release"]));
        }
    }
    batch
}
