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

use super::config::{BatchOrder, Hold, OrderRule};
use super::device_manager::DeviceManager;
use super::devices::AllocationError;
use super::fit::{Shortage, fit};
use super::machine::{KubeletMachine, PodAdmission};
use super::node_status::NodeStatusSync;
use super::pod::KubeletPod;
use super::pod_table::{PodCommand, PodTable};
use super::pod_worker::PodWorkers;
use super::status_manager::StatusManager;
use super::tasks::KubeletTasks;
use crate::dice::dice;

/// A change of this node's pods in the API.
#[derive(Debug)]
enum PodUpdate {
    /// The complete list, at start and after a broken watch.
    List(Vec<Arc<KubeletPod>>),
    Applied(Arc<KubeletPod>),
    /// The UID of a pod that was removed.
    Removed(String),
}

/// The reason for which admission refuses a pod; displays as kubelet's message.
#[derive(Debug, thiserror::Error)]
enum Rejection {
    #[error("Allocate failed due to {0}, which is unexpected")]
    Allocation(AllocationError),
    #[error(transparent)]
    Shortage(Shortage),
}

impl Rejection {
    /// The reason in pod status.
    fn reason(&self) -> String {
        match self {
            Self::Allocation(_) => "UnexpectedAdmissionError".to_owned(),
            Self::Shortage(shortage) => format!("OutOf{}", shortage.resource),
        }
    }
}

/// Admits the pods of this node.
#[derive(Debug)]
pub(crate) struct SyncLoop {
    pub(crate) machine: Arc<KubeletMachine>,
    pub(crate) pods: Arc<PodTable>,
    pub(crate) devices: Arc<DeviceManager>,
    pub(crate) status: Arc<StatusManager>,
    pub(crate) node: Arc<NodeStatusSync>,
    pub(crate) workers: Arc<PodWorkers>,
    pub(crate) tasks: KubeletTasks,
}

impl SyncLoop {
    /// Watches this node's pods and takes them in until the process ends.
    pub(crate) async fn run(self: Arc<Self>) {
        let (queue, arrivals) = unbounded_channel();
        let watching = Arc::clone(&self);
        self.tasks.spawn(async move { watching.watch(&queue).await });
        self.take_in(arrivals).await;
    }

    /// Watches the pods of this node, and queues each update.
    async fn watch(&self, queue: &UnboundedSender<PodUpdate>) {
        let api: Api<Pod> = Api::all(self.machine.config.client.clone());
        // NewSourceApiserver: a field selector, so that kubelet gets its own pods only.
        let config =
            watcher::Config::default().fields(&format!("spec.nodeName={}", self.machine.config.node));
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
                self.pods.set_sources_ready();
                self.machine.notify();
            }
        }
    }

    /// Collects pods until a test lets it go on ([`Hold`]); returns the order in which they are admitted then.
    async fn collect_while_held(
        &self,
        batch: &mut Vec<Arc<KubeletPod>>,
        arrivals: &mut UnboundedReceiver<PodUpdate>,
    ) -> BatchOrder {
        let mut hold = self.machine.hold.subscribe();
        let mut was_held = false;
        loop {
            let Hold { is_held, order } = *hold.borrow_and_update();
            was_held |= is_held;
            self.machine.counts.lock().held = if is_held { batch.len() } else { 0 };
            self.machine.notify();
            if !is_held {
                return order.filter(|_| was_held).unwrap_or(BatchOrder::BY_CREATION);
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

    /// Acts on the deletion and the new ephemeral containers of a known pod; takes over a new pod, and returns it if it needs
    /// admission.
    fn update(&self, pod: Arc<KubeletPod>) -> Option<Arc<KubeletPod>> {
        let mut pods = self.pods.lock();
        let Some(record) = pods.0.get_mut(&pod.uid) else {
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

    /// Takes note of a pod seen for the first time. Returns it if it needs admission; a pod that has ended or is being deleted
    /// needs none.
    fn take_over(&self, pod: Arc<KubeletPod>) -> Option<Arc<KubeletPod>> {
        // HandlePodCleanups: kubelet runs static pods by their files, and deletes mirrors that have none. This one has no files.
        if pod.annotations.contains_key(MIRROR) {
            self.status.publish_deletion(&pod);
            return None;
        }
        if !pod.deleting && !pod.terminal {
            return Some(pod);
        }
        self.pods.lock().arrive(&pod);
        if pod.deleting && pod.terminal {
            self.status.publish_deletion(&pod);
        } else if pod.deleting {
            self.workers.start(&pod);
            if let Some(record) = self.pods.lock().0.get(&pod.uid) {
                record.send(PodCommand::Delete);
            }
        }
        None
    }

    /// Forgets pods and containers that a new list no longer shows.
    fn forget_missing(&self, listed: &[Arc<KubeletPod>]) {
        let listed: BTreeSet<&str> = listed.iter().map(|pod| pod.uid.as_str()).collect();
        let missing: Vec<String> = self
            .pods
            .lock()
            .0
            .keys()
            .filter(|uid| !listed.contains(uid.as_str()))
            .cloned()
            .collect();
        for uid in missing {
            self.forget(&uid);
        }
        // Containers of pods that went away while kubelet was down.
        for container in self.machine.runtime.all() {
            if !listed.contains(container.pod_uid.as_str()) {
                self.machine.runtime.remove(&container.pod_uid);
            }
        }
    }

    /// Forgets a deleted pod and removes its containers: its worker does, or this function if the worker has ended.
    fn forget(&self, uid: &str) {
        let record = self.pods.lock().0.remove(uid);
        if !record.is_some_and(|record| record.send(PodCommand::Remove)) {
            self.machine.runtime.remove(uid);
        }
        self.machine.notify();
    }

    /// Admits one pod and starts the task that runs it, or makes it Failed.
    async fn admit(&self, pod: Arc<KubeletPod>) {
        let began = Instant::now();
        self.pods.lock().arrive(&pod);
        let refusal = match self.check(&pod).await {
            Ok(()) => {
                self.workers.start(&pod);
                None
            }
            Err(rejection) => {
                let (reason, message) = (rejection.reason(), rejection.to_string());
                self.reject(&pod, &reason, &message);
                Some((reason, message))
            }
        };
        let admission = PodAdmission {
            pod: pod.full_name(),
            uid: pod.uid.clone(),
            began,
            took: began.elapsed(),
            refusal,
        };
        self.machine.counts.lock().admissions.push(admission);
        self.machine.notify();
    }

    /// Admits a pod or returns the reason to reject it: no devices, or too few resources beside the other pods.
    async fn check(&self, pod: &KubeletPod) -> Result<(), Rejection> {
        // The handler that allocates devices comes before predicateAdmitHandler, which checks the fit: a pod
        // that does not fit has called the plugins first.
        self.devices
            .allocate_pod(pod)
            .await
            .map_err(Rejection::Allocation)?;
        let mut allocatable = self.node.allocatable();
        // Devices that are held already count as allocatable, even if their plugin is not connected.
        for (resource, held) in self.devices.lock().held().devices() {
            allocatable.raise(&resource, held.len());
        }
        let pods = self.pods.lock();
        let others = pods.active().filter(|other| other.uid != pod.uid);
        let others = others.map(|other| &other.requests);
        fit(&pod.requests, others, &allocatable).map_err(Rejection::Shortage)
    }

    /// Ends a pod that is not admitted: its status says Failed, and an event says why.
    fn reject(&self, pod: &KubeletPod, reason: &str, message: &str) {
        tracing::warn!(pod = pod.full_name(), reason, message, "pod rejected");
        self.pods.lock().end(&pod.uid);
        // After a restart of kubelet the containers of the rejected pod may be running.
        self.machine.runtime.kill(&pod.uid);
        self.status.publish_rejection(pod, reason, message);
        self.status.publish_event(pod, reason, message);
    }
}

/// Puts one batch in order; pods of one creation time keep the order of their arrival before the rule applies.
fn in_order(mut batch: Vec<Arc<KubeletPod>>, order: BatchOrder) -> Vec<Arc<KubeletPod>> {
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
