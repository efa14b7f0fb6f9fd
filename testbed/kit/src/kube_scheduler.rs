//! A model of kube-scheduler 1.36, in its behaviour towards pods, nodes and extenders.
//!
//! It reads a real `KubeSchedulerConfiguration`, and talks to the API server and to extenders over HTTP: one scheduling cycle at a
//! time, with binding cycles beside it. The feature gates `GenericWorkload` and `GangScheduling` are on.
//!
//! Requests to extenders have the form of those recorded from 1.36.2 (`scheduler/tests/extender/golden`). The rest follows the
//! real program's code, and `testbed/kit/tests/scheduler_loop.rs` states the behaviour; names such as `selectHost` in comments
//! are functions of that code. It leaves out plugins that no extender can notice: affinity between pods, spreading, images, and
//! the scores of preferences.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::Result;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tracing::debug;

use crate::pod_fields::{has_ended, node_of};

use binding::{PodBinder, VolumeClaims};
use cache::{Cache, CachedNode};
use cycle::{Cycle, CycleFailure, Sampling};
use extender::ExtenderClient;
use pod_group::Groups;
use preemption::{PreemptionContext, evict, priority};
use queue::Queue;
use report::{Nomination, Report, ReportContent, Reporter, nominated_node};

pub use configuration::{ExtenderConfiguration, ManagedResource, SchedulerConfiguration};
pub use cycle::Ties;

pub use amounts::ResourceAmounts;
pub use binding::{NO_NOMINATION, PERMIT_WAIT, VOLUME_WAIT};
pub use diagnosis::{FilterRefusal, SchedulingDiagnosis, no_fit_message};
pub use fit::repels;
pub use offline::{OfflineAttempt, OfflineScheduler};

mod amounts;
mod binding;
mod cache;
mod configuration;
mod cycle;
mod diagnosis;
mod extender;
mod fit;
pub mod leader_election;
mod node_affinity;
mod offline;
mod pod_group;
mod preemption;
mod queue;
mod report;

/// The result of an attempt to schedule a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SchedulingOutcome {
    /// The pod is bound to this node.
    Bound(String),
    /// No node fits.
    NoFit,
    /// An extender or the API server failed.
    Error(String),
}

/// One attempt to schedule a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulingAttempt {
    /// `namespace/name`.
    pub pod: String,
    /// The refused nodes, and the reasons.
    pub diagnosis: SchedulingDiagnosis,
    /// The result.
    pub outcome: SchedulingOutcome,
}

/// Settings of the model beside the `KubeSchedulerConfiguration`.
#[derive(Debug, Default)]
pub struct Options {
    /// Seed of the random choice among nodes of equal score; without a seed the first name wins.
    pub seed: Option<u64>,
    /// Receives every attempt to schedule a pod.
    pub journal: Option<mpsc::UnboundedSender<SchedulingAttempt>>,
}

/// A running scheduling loop. Dropping it stops it at once, with the bindings that are in flight.
#[derive(Debug)]
pub struct KubeScheduler {
    _loop: AbortOnDropHandle<()>,
}

impl KubeScheduler {
    /// Starts a scheduling loop on the API server that `client` talks to.
    pub fn start(client: &Client, configuration: &SchedulerConfiguration, options: Options) -> Result<Self> {
        let scheduling = Loop::new(client, configuration, options)?;
        Ok(Self {
            _loop: AbortOnDropHandle::new(tokio::spawn(scheduling.run())),
        })
    }
}

#[derive(Debug)]
enum Input {
    Node(Box<watcher::Event<Node>>),
    /// An event, and the time at which the watch brought it: pods queue up while another is being placed.
    Pod(Box<watcher::Event<Pod>>, Instant),
    Budget(Box<watcher::Event<PodDisruptionBudget>>),
    Capacity(Box<watcher::Event<CSIStorageCapacity>>),
    Group(Box<watcher::Event<PodGroup>>),
    BindingEnded(Box<BindingCycle>),
}

#[derive(Debug)]
struct BindingCycle {
    uid: String,
    pod: Arc<Pod>,
    node: String,
    diagnosis: SchedulingDiagnosis,
    result: Result<(), String>,
}

/// The progress of a watch's list.
#[derive(Debug, Default)]
struct ListProgress {
    /// Names of nodes or UIDs of pods that the list has shown so far.
    seen: BTreeSet<String>,
    /// True once a first list is complete.
    synced: bool,
}

struct Loop {
    configuration: SchedulerConfiguration,
    cache: Cache,
    queue: Queue,
    cycle: Cycle,
    binder: PodBinder,
    client: Client,
    budgets: BTreeMap<String, PodDisruptionBudget>,
    /// Resource versions of `CSIStorageCapacity` objects, by UID.
    capacities: BTreeMap<String, Option<String>>,
    groups: Groups,
    /// Nodes that are nominated for pods, by the pods' UIDs; the API server may not show a nomination yet.
    nominated: BTreeMap<String, (String, Arc<Pod>)>,
    bindings: JoinSet<()>,
    nodes: ListProgress,
    pods: ListProgress,
    journal: Option<mpsc::UnboundedSender<SchedulingAttempt>>,
    reports: mpsc::UnboundedSender<Report>,
    inputs: mpsc::UnboundedReceiver<Input>,
    /// Sends the loop its own input: the ends of binding cycles.
    inbox: mpsc::UnboundedSender<Input>,
    _helpers: [AbortOnDropHandle<()>; 6],
}

impl Loop {
    /// A scheduling loop with an empty cache and queue, by the parsed `KubeSchedulerConfiguration`.
    fn new(client: &Client, configuration: &SchedulerConfiguration, options: Options) -> Result<Self> {
        let mut extenders = Vec::new();
        for extender in &configuration.extenders {
            extenders.push(ExtenderClient::new(extender.clone())?);
        }
        let (inbox, inputs) = mpsc::unbounded_channel();
        let (reports, pending_reports) = mpsc::unbounded_channel();
        let component = configuration.schedulers.first().cloned().unwrap_or_default();
        let reporter = Reporter::new(client.clone(), component);
        Ok(Self {
            cache: Cache::default(),
            queue: Queue::new(configuration.initial_backoff, configuration.max_backoff),
            binder: PodBinder::new(client.clone(), &extenders),
            client: client.clone(),
            budgets: BTreeMap::new(),
            capacities: BTreeMap::new(),
            groups: Groups::default(),
            nominated: BTreeMap::new(),
            cycle: Cycle {
                extenders,
                ties: options.seed.map_or_else(Ties::default, Ties::random),
                sampling: Sampling::of(configuration.percentage_of_nodes_to_score),
                claims: VolumeClaims::default(),
            },
            configuration: configuration.clone(),
            bindings: JoinSet::new(),
            nodes: ListProgress::default(),
            pods: ListProgress::default(),
            journal: options.journal,
            reports,
            inputs,
            _helpers: [
                watch_kind(client, Input::Node, &inbox),
                watch_kind(client, |event| Input::Pod(event, Instant::now()), &inbox),
                watch_kind(client, Input::Budget, &inbox),
                watch_kind(client, Input::Capacity, &inbox),
                watch_kind(client, Input::Group, &inbox),
                AbortOnDropHandle::new(tokio::spawn(reporter.run(pending_reports))),
            ],
            inbox,
        })
    }

    /// Runs the loop: handles what the watches show, and schedules the next pod of the queue, until its future is dropped.
    async fn run(mut self) {
        loop {
            // All known events are handled before the next attempt, so that the attempt sees the newest state.
            while let Ok(input) = self.inputs.try_recv() {
                self.handle(input);
            }
            // Ended binding tasks have sent their results already; joining them only frees memory.
            while self.bindings.try_join_next().is_some() {}
            let ready = self.nodes.synced && self.pods.synced;
            if let Some((uid, pod)) = ready.then(|| self.queue.pop(Instant::now())).flatten() {
                match pod_group::group_of(&pod) {
                    Some(group) => pod_group::schedule_group(&mut self, &group, &uid).await,
                    None => self.schedule(&uid, pod).await,
                }
                continue;
            }
            let wake = self.queue.next_change();
            let timer = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(input) = self.inputs.recv() => self.handle(input),
                () = timer => {}
            }
        }
    }

    fn handle(&mut self, input: Input) {
        match input {
            Input::Node(event) => self.handle_node(*event),
            Input::Pod(event, arrived) => self.handle_pod(*event, arrived),
            Input::Budget(event) => self.handle_budget(*event),
            Input::Capacity(event) => self.handle_capacity(*event),
            Input::Group(event) => {
                let is_new = self.groups.update(*event);
                self.wake_if(is_new);
            }
            Input::BindingEnded(binding) => self.end_binding(*binding),
        }
    }

    /// Updates the cache by an event of the watch of nodes, and wakes waiting pods if the change may let them fit.
    fn handle_node(&mut self, event: watcher::Event<Node>) {
        let changed = match event {
            watcher::Event::Init => {
                self.nodes.seen.clear();
                false
            }
            watcher::Event::InitApply(node) => {
                self.nodes.seen.insert(node.name_any());
                self.cache.put_node(&node.name_any(), node)
            }
            watcher::Event::InitDone => {
                self.nodes.synced = true;
                // A node that the new list no longer shows was deleted while the watch was broken.
                self.cache.retain_nodes(&self.nodes.seen)
            }
            watcher::Event::Apply(node) => self.cache.put_node(&node.name_any(), node),
            watcher::Event::Delete(node) => self.cache.remove_node(&node.name_any()),
        };
        self.wake_if(changed);
    }

    fn handle_pod(&mut self, event: watcher::Event<Pod>, arrived: Instant) {
        match event {
            watcher::Event::Init => self.pods.seen.clear(),
            watcher::Event::InitApply(pod) => {
                self.pods.seen.extend(pod.uid());
                self.update_pod(pod, arrived);
            }
            watcher::Event::InitDone => {
                self.pods.synced = true;
                let queued = self.queue.pods().map(|(uid, _)| uid);
                let known: BTreeSet<String> = self.cache.uids().chain(queued).cloned().collect();
                for uid in known.difference(&std::mem::take(&mut self.pods.seen)) {
                    self.remove_pod(uid);
                }
            }
            watcher::Event::Apply(pod) => self.update_pod(pod, arrived),
            watcher::Event::Delete(pod) => self.remove_pod(&pod.uid().unwrap_or_default()),
        }
    }

    fn handle_budget(&mut self, event: watcher::Event<PodDisruptionBudget>) {
        match event {
            watcher::Event::Init => self.budgets.clear(),
            watcher::Event::InitApply(budget) | watcher::Event::Apply(budget) => {
                self.budgets.insert(budget.uid().unwrap_or_default(), budget);
            }
            watcher::Event::InitDone => {}
            watcher::Event::Delete(budget) => drop(self.budgets.remove(&budget.uid().unwrap_or_default())),
        }
    }

    /// Wakes the pods that an extender refused, which kube-scheduler tries again after any event of a cluster.
    fn handle_capacity(&mut self, event: watcher::Event<CSIStorageCapacity>) {
        // gpushare's scheduler changes a CSIStorageCapacity to cause an event.
        let (watcher::Event::InitApply(capacity) | watcher::Event::Apply(capacity)) = event else {
            return;
        };
        let version = capacity.resource_version();
        // A list after a broken watch may bring a change that was missed, or an unchanged object, which wakes no pod.
        let uid = capacity.uid().unwrap_or_default();
        if self.capacities.insert(uid, version.clone()) != Some(version) {
            self.queue.wake_refused_by_extenders(Instant::now());
        }
    }

    /// Puts a pod where it belongs: a bound one into the cache, a waiting one of this scheduler into the queue.
    fn update_pod(&mut self, pod: Pod, arrived: Instant) {
        let Some(uid) = pod.uid() else { return };
        let pod = Arc::new(pod);
        if has_ended(&pod) {
            self.remove_pod(&uid);
        } else if let Some(node) = node_of(&pod) {
            self.queue.remove(&uid);
            self.nominated.remove(&uid);
            let is_new = self.cache.bind(&uid, node, &pod);
            self.wake_if(is_new);
        } else if pod.metadata.deletion_timestamp.is_some() {
            // An assumed pod keeps its place until its binding ends, although it is being deleted.
            if !self.cache.is_assumed(&uid) {
                self.remove_pod(&uid);
            }
        } else if self.is_ours(&pod) {
            self.note_nomination(&uid, &pod);
            // The members of a group wait until enough of them exist, and this pod may be the last that was missing.
            let completes_a_group = pod_group::group_of(&pod).is_some() && self.queue.get(&uid).is_none();
            self.queue.put(&uid, pod, arrived);
            self.wake_if(completes_a_group);
        }
    }

    /// Returns true if this scheduler schedules the pod: it has one of the loop's names and no scheduling gate.
    fn is_ours(&self, pod: &Pod) -> bool {
        let spec = pod.spec.as_ref();
        let gates = spec.and_then(|spec| spec.scheduling_gates.as_ref());
        if gates.is_some_and(|gates| !gates.is_empty()) {
            return false;
        }
        let scheduler = spec.and_then(|spec| spec.scheduler_name.as_deref());
        self.configuration
            .schedulers
            .contains(scheduler.unwrap_or("default-scheduler"))
    }

    fn note_nomination(&mut self, uid: &str, pod: &Arc<Pod>) {
        let before = self.queue.get(uid);
        if let Some(node) = nominated_node(pod) {
            self.nominated
                .insert(uid.to_owned(), (node.to_owned(), Arc::clone(pod)));
        } else if before.is_some_and(|before| nominated_node(before).is_some()) {
            // One that the API server has not shown yet stays.
            self.nominated.remove(uid);
        }
    }

    fn nominate(&mut self, uid: &str, pod: &Arc<Pod>, nomination: &Nomination) {
        match nomination {
            Nomination::Node(node) => {
                self.nominated
                    .insert(uid.to_owned(), (node.clone(), Arc::clone(pod)));
            }
            Nomination::Clear => drop(self.nominated.remove(uid)),
            Nomination::Keep => {}
        }
    }

    /// Forgets a pod that has ended or was deleted, and wakes pods that may fit in its room.
    fn remove_pod(&mut self, uid: &str) {
        self.queue.remove(uid);
        self.nominated.remove(uid);
        let was_counted = self.cache.release(uid);
        self.wake_if(was_counted);
    }

    /// Wakes all waiting pods after a change that may let them fit.
    fn wake_if(&mut self, something_changed: bool) {
        if something_changed {
            self.queue.wake_all(Instant::now());
        }
    }

    /// Runs one scheduling cycle: chooses a node and starts the binding, or tries preemption and parks the pod.
    async fn schedule(&mut self, uid: &str, pod: Arc<Pod>) {
        let mut diagnosis = SchedulingDiagnosis::default();
        let placed = match ResourceAmounts::of_pod(&pod) {
            Ok(request) => {
                let nodes = self.nodes_for(uid, &pod);
                let node = self.cycle.place(&pod, &request, &nodes, &mut diagnosis).await;
                node.map(|node| (node, request))
            }
            Err(error) => Err(CycleFailure::Error(error.to_string())),
        };
        match placed {
            Ok((node, request)) => {
                self.cache.assume(uid, &node, &pod, request);
                self.nominated.remove(uid);
                self.start_binding(uid.to_owned(), pod, node, diagnosis);
            }
            Err(CycleFailure::NoFit) => {
                let nomination = self.preempt(uid, &pod, &diagnosis).await;
                self.queue.park(uid, diagnosis.is_by_extender(), Instant::now());
                let content = ReportContent::Unschedulable(diagnosis.message(), nomination);
                self.report(uid, &pod, content);
                self.record(&pod, diagnosis, SchedulingOutcome::NoFit);
            }
            Err(CycleFailure::Error(message)) => self.fail(uid, &pod, diagnosis, message),
        }
    }

    /// The nodes as the filters see them for a pod.
    fn nodes_for(&self, uid: &str, pod: &Pod) -> BTreeMap<String, CachedNode> {
        let mut nodes = self.cache.nodes().clone();
        // Pods that are nominated to a node count there if they are at least as important.
        for (other, (node, nominated)) in &self.nominated {
            if other != uid
                && priority(nominated) >= priority(pod)
                && let Some(view) = nodes.get_mut(node)
            {
                view.used
                    .add(&ResourceAmounts::of_pod(nominated).unwrap_or_default());
            }
        }
        nodes
    }

    /// Evicts less important pods if that makes room for a pod; returns the change of its nominated node.
    async fn preempt(&mut self, uid: &str, pod: &Arc<Pod>, diagnosis: &SchedulingDiagnosis) -> Nomination {
        let Ok(request) = ResourceAmounts::of_pod(pod) else {
            return Nomination::Keep;
        };
        let (nodes, pods) = (self.nodes_for(uid, pod), self.cache.pods());
        let budgets: Vec<PodDisruptionBudget> = self.budgets.values().cloned().collect();
        let context = PreemptionContext {
            nodes: &nodes,
            pods: &pods,
            budgets: &budgets,
            extenders: &self.cycle.extenders,
        };
        let nomination = match context.preempt(pod, &request, diagnosis).await {
            Ok((node, victims)) => {
                evict(&self.client, &victims).await;
                // Less important pods that were nominated to this node may not fit there any more.
                self.nominated
                    .retain(|_, (other, nominated)| *other != node || priority(nominated) >= priority(pod));
                Nomination::Node(node)
            }
            Err(nomination) => nomination,
        };
        self.nominate(uid, pod, &nomination);
        nomination
    }

    /// Starts the binding of a pod as a task; its end comes back as an input of the loop.
    fn start_binding(&mut self, uid: String, pod: Arc<Pod>, node: String, diagnosis: SchedulingDiagnosis) {
        let (inbox, binder) = (self.inbox.clone(), self.binder.clone());
        let waits = self.cycle.claims.waits(&pod);
        self.bindings.spawn(async move {
            if !waits.total.is_zero() {
                binder.wait(&pod, &node, &waits).await;
            }
            let result = binder.bind(&pod, &uid, &node).await;
            // The loop is gone if the channel is closed; there is nothing left to do.
            let _ = inbox.send(Input::BindingEnded(Box::new(BindingCycle {
                uid,
                pod,
                node,
                diagnosis,
                result,
            })));
        });
    }

    /// Handles the end of a binding cycle.
    fn end_binding(&mut self, binding: BindingCycle) {
        let BindingCycle {
            uid,
            pod,
            node,
            diagnosis,
            result,
        } = binding;
        // PreBind comes before the binding itself: the volumes that it has bound stay bound even if the binding fails.
        self.cycle.claims.bind(&pod, &node);
        match result {
            Ok(()) => {
                self.report(&uid, &pod, ReportContent::Scheduled(node.clone()));
                self.record(&pod, diagnosis, SchedulingOutcome::Bound(node));
            }
            // The pod is tried again, unless the watch has shown meanwhile that it is bound after all.
            Err(message) if self.cache.is_assumed(&uid) => {
                // The room is free again, which is an event for all other pods.
                self.cache.release(&uid);
                self.queue.wake_all(Instant::now());
                self.fail(&uid, &pod, diagnosis, message);
            }
            Err(message) => debug!(
                pod = pod.name_any(),
                message, "the binding failed, but the pod is bound or gone"
            ),
        }
    }

    /// Ends an attempt by an error: the pod is tried again after its backoff.
    fn fail(&mut self, uid: &str, pod: &Arc<Pod>, diagnosis: SchedulingDiagnosis, message: String) {
        self.queue.retry(uid, Instant::now());
        self.nominated.remove(uid);
        self.report(uid, pod, ReportContent::Failed(message.clone()));
        self.record(pod, diagnosis, SchedulingOutcome::Error(message));
    }

    /// Passes the result of an attempt to the task that writes the pod's condition and event, with the newest version of the pod.
    fn report(&self, uid: &str, pod: &Arc<Pod>, content: ReportContent) {
        let newest = self.queue.get(uid).unwrap_or(pod);
        // The writer ends only with the loop.
        let _ = self.reports.send((Arc::clone(newest), content));
    }

    /// Writes an attempt to the journal, if the caller of the loop reads one.
    fn record(&self, pod: &Pod, diagnosis: SchedulingDiagnosis, outcome: SchedulingOutcome) {
        if let Some(journal) = &self.journal {
            let attempt = SchedulingAttempt {
                pod: format!("{}/{}", report::namespace(pod), pod.name_any()),
                diagnosis,
                outcome,
            };
            // The reader of the journal may have stopped.
            let _ = journal.send(attempt);
        }
    }
}

/// Starts the task that sends the events of the watch of one kind to the loop, and starts a broken watch again.
fn watch_kind<K>(
    client: &Client,
    wrap: fn(Box<watcher::Event<K>>) -> Input,
    inbox: &mpsc::UnboundedSender<Input>,
) -> AbortOnDropHandle<()>
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    let inbox = inbox.clone();
    let config = watcher::Config::default();
    let mut events = watcher(Api::<K>::all(client.clone()), config)
        .default_backoff()
        .boxed();
    AbortOnDropHandle::new(tokio::spawn(async move {
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    if inbox.send(wrap(Box::new(event))).is_err() {
                        return;
                    }
                }
                Err(error) => debug!(%error, "a watch of the scheduling loop starts again"),
            }
        }
    }))
}
