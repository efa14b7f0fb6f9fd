//! gpushare-scheduler in process, and the model of kube-scheduler that calls its filter and prioritize verbs, without a
//! network.
//!
//! It also stands in for the API server: it keeps the pod that is being placed, and shows both programs what watches
//! would bring.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kit::kube_scheduler::{OfflineAttempt, OfflineScheduler, SchedulerConfiguration, Ties};
use kit::pods::{set, set_in};
use parking_lot::Mutex;
use placement::Policies;
use proto::device::TYPE_GPU;
use proto::quantity::Quantity;
use proto::read_api::{PlanGoal, PlanLimits, PlanRequest};
use proto::record::{DeviceAllocation, Record};
use proto::resource::{GPU_CORE, GPU_MEMORY_RATIO};
use scheduler::bind::PodId;
use scheduler::config::AnswerNodes;
use scheduler::extender::{Extender, filter, prioritize};
use scheduler::index::{NodeRoom, Preemptor, Promised, RoomSearch};
use scheduler::offline;
use scheduler::read_api::plan;
use scheduler::watch::ObjectStore;
use serde_json::{Value, json};

use super::arrivals::Arrival;
use super::join::JoinGain;
use super::occupancy::{FreeRoom, GpuShare};
use super::seen::read;
use super::trace::PERCENT;
use super::world::{ReplayInput, ReplayNode, ReplayPod};

/// The most nodes that are searched for room, as in the scheduler: those with the fewest pods of lower priority.
const MAX_SEARCHED: usize = 64;

/// The place of a pod among others, where pods may be evicted.
#[derive(Clone, Copy, Debug)]
pub struct PodRank {
    pub priority: i32,
    pub started: i64,
}

pub struct Engine<'w> {
    world: &'w ReplayInput,
    verbs: Arc<Verbs>,
    kube: OfflineScheduler,
    by_name: HashMap<&'w str, usize>,
    /// The pod as the API server shows it, and the same as kube-scheduler reads it.
    shown: Value,
    pod: Pod,
    /// Bindings so far; also the assume time of the newest record, since assume times must grow.
    n_bound: u64,
    /// Invariants that do not hold before the first pod: a real cluster's pods may contradict its devices.
    n_violations_at_start: usize,
}

struct Verbs {
    extender: Extender,
    /// The time of all filter requests, and their number.
    filtered: Mutex<(Duration, u32)>,
}

impl Verbs {
    /// The verbs without the layers that the server puts around them, so that the time of the filter alone is measured.
    fn routes(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/gpushare-scheduler/filter", post(filter))
            .route("/gpushare-scheduler/prioritize", post(prioritize))
            .with_state(Arc::clone(self))
    }
}

async fn filter(State(verbs): State<Arc<Verbs>>, body: Bytes) -> Result<Vec<u8>, (StatusCode, String)> {
    let began = Instant::now();
    let answer = filter::answer(&verbs.extender, &body, began).map_err(refusal)?;
    let mut filtered = verbs.filtered.lock();
    *filtered = (filtered.0 + began.elapsed(), filtered.1 + 1);
    Ok(answer.json)
}

async fn prioritize(State(verbs): State<Arc<Verbs>>, body: Bytes) -> Result<Vec<u8>, (StatusCode, String)> {
    prioritize::answer(&verbs.extender, &body).map_err(refusal)
}

fn refusal(error: impl std::fmt::Display) -> (StatusCode, String) {
    (StatusCode::BAD_REQUEST, error.to_string())
}

impl<'w> Engine<'w> {
    /// Schedulers that have seen the world's nodes, and the pods that are there from the start. Call it within
    /// a tokio runtime.
    pub fn new(
        world: &'w ReplayInput,
        policies: Policies,
        answer_nodes: AnswerNodes,
        configuration: &SchedulerConfiguration,
        ties: Ties,
    ) -> Result<Self> {
        let nodes = world.nodes.iter().map(|node| node.object.clone());
        let devices = world.nodes.iter().filter_map(|node| node.device.clone());
        let present = world.present.iter().map(|present| present.object.clone());
        let index = offline::index_with(policies, nodes, devices, present);
        let mut extender = offline::extender(index);
        extender.answer_nodes = answer_nodes;
        let n_violations_at_start = extender.index().read().fleet().check().len();
        let verbs = Arc::new(Verbs {
            extender,
            filtered: Mutex::default(),
        });
        let mut kube = OfflineScheduler::new(configuration, &verbs.routes(), ties);
        let mut by_name = HashMap::new();
        for (at, node) in world.nodes.iter().enumerate() {
            by_name.insert(&*node.name, at);
            kube.put_node(read::<Node>(&node.object)?);
        }
        for present in &world.present {
            kube.put_pod(&read(&present.object)?);
        }
        Ok(Self {
            world,
            verbs,
            kube,
            by_name,
            shown: Value::Null,
            pod: Pod::default(),
            n_bound: 0,
            n_violations_at_start,
        })
    }

    /// Plays a user who creates a pod, which becomes the current one. A pod with a rank has a controller, and may be evicted.
    pub fn create(&mut self, pod: &ReplayPod, arrival: &Arrival, rank: Option<PodRank>) -> Result<()> {
        self.shown = pod.object.clone();
        set_in(&mut self.shown, "metadata", "name", json!(arrival.name));
        set_in(&mut self.shown, "metadata", "uid", json!(uid(pod, arrival)));
        set(&mut self.shown, "status", json!({"phase": "Pending"}));
        if let Some(PodRank { priority, started }) = rank {
            let controller = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
            set_in(
                &mut self.shown,
                "metadata",
                "ownerReferences",
                json!([controller]),
            );
            set_in(&mut self.shown, "spec", "priority", json!(priority));
            let started = Timestamp::from_second(started)?.to_string();
            set_in(&mut self.shown, "status", "startTime", json!(started));
        }
        self.show()
    }

    /// Writes the condition by which kube-scheduler says that it found no node for the pod.
    pub fn refuse(&mut self, message: &str) -> Result<()> {
        let condition =
            json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message});
        set_in(&mut self.shown, "status", "conditions", json!([condition]));
        self.show()
    }

    /// Shows the pod to both schedulers; in a cluster their watches do so a little later.
    fn show(&mut self) -> Result<()> {
        self.pod = read(&self.shown)?;
        self.kube.put_pod(&self.pod);
        let index = self.verbs.extender.index();
        index.write().apply(read::<proto::pod::Pod>(&self.shown)?);
        Ok(())
    }

    pub fn is_extended(&self) -> bool {
        self.kube.is_extended(&self.pod)
    }

    /// kube-scheduler's attempt to place the pod.
    pub async fn attempt(&mut self) -> Result<OfflineAttempt> {
        self.kube.attempt(&self.pod).await.map_err(|error| anyhow!(error))
    }

    /// The nodes with room for the pod that kube-scheduler finds in an attempt.
    pub async fn find(&mut self) -> Result<OfflineAttempt> {
        self.kube.find(&self.pod).await.map_err(|error| anyhow!(error))
    }

    /// kube-scheduler's choice among nodes with these scores, by index.
    pub fn select(&mut self, scores: &[(usize, i64)]) -> Result<Option<usize>> {
        let mut named = Vec::with_capacity(scores.len());
        for (node, score) in scores {
            named.push((self.name(*node)?, *score));
        }
        let chosen = self.kube.select(&named);
        chosen.map(|node| self.node_idx(&node)).transpose()
    }

    /// kube-scheduler's own score of a node for the pod.
    pub fn default_score(&self, node: usize) -> Result<i64> {
        let score = self.kube.score(&self.pod, self.name(node)?);
        score.map_err(|error| anyhow!(error))
    }

    /// Returns true if the pod fits any node. A real kube-scheduler does not ask that, so `filter_micros` leaves these calls out.
    pub async fn fits_any(&self) -> Result<bool> {
        let before = *self.verbs.filtered.lock();
        let fits = self.kube.fits_any(&self.pod).await;
        *self.verbs.filtered.lock() = before;
        fits.map_err(|error| anyhow!(error))
    }

    /// The extender binds the pod to a node; returns the parts of GPUs that the pod is given.
    pub fn bind(&mut self, node: usize) -> Result<Vec<GpuShare>> {
        let metadata = &self.pod.metadata;
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let pod = PodId {
            namespace: text(&metadata.namespace),
            name: text(&metadata.name),
            uid: text(&metadata.uid),
        };
        let name = self.name(node)?;
        self.n_bound += 1;
        let order = offline::bind(&self.verbs.extender, &pod, name, self.n_bound, Instant::now());
        let refused = || {
            format!(
                "pod {} is not bound to node {name}, which filter had named",
                pod.name
            )
        };
        let order = order.with_context(refused)?;
        self.write(node, order.annotations)
    }

    /// Binds the pod to a node past the extender, with a record of these parts of the node's GPUs.
    pub fn bind_elsewhere(&mut self, node: usize, parts: &[GpuShare]) -> Result<()> {
        let mut annotations = BTreeMap::new();
        if !parts.is_empty() {
            let minors = &self.node(node)?.minors;
            let mut allocations = Vec::new();
            for part in parts {
                let minor = minors.get(part.gpu);
                allocations.extend(minor.map(|minor| allocation(*minor, part.milli)));
            }
            self.n_bound += 1;
            let record = Record {
                allocations: [(TYPE_GPU.to_owned(), allocations)].into(),
                assumed_at: Some(self.n_bound),
                gpushare: None,
            };
            annotations = record.annotations();
        }
        self.write(node, annotations).map(drop)
    }

    /// Stores a binding as the API server would; returns the parts of GPUs that the pod's record names.
    fn write(&mut self, node: usize, annotations: BTreeMap<String, String>) -> Result<Vec<GpuShare>> {
        // The record is read back from the annotations, as a plugin would read it.
        let ReplayNode { name, minors, .. } = self.node(node)?;
        let record = Record::read(&annotations)?.unwrap_or_default();
        let mut parts = Vec::new();
        for allocation in record.allocations.get(TYPE_GPU).into_iter().flatten() {
            let gpu = minors.iter().position(|minor| *minor == allocation.minor);
            let milli = milli(allocation);
            parts.extend(gpu.map(|gpu| GpuShare { gpu, milli }));
        }
        if let Some(metadata) = self.shown.get_mut("metadata") {
            for (key, value) in annotations {
                set_in(metadata, "annotations", &key, json!(value));
            }
        }
        set_in(&mut self.shown, "spec", "nodeName", json!(name));
        self.show()?;
        Ok(parts)
    }

    pub fn delete(&mut self, pod: &ReplayPod, arrival: &Arrival) {
        let uid = uid(pod, arrival);
        self.kube.remove_pod(&uid);
        let mut gone = proto::pod::Pod::default();
        gone.metadata.uid = Some(uid);
        ObjectStore::<proto::pod::Pod>::delete(&mut *self.verbs.extender.index().write(), &gone);
    }

    /// The best of these nodes to evict pods from so that the current pod fits, and the pods.
    pub fn room(&self, nodes: &[usize]) -> Result<Option<(usize, NodeRoom)>> {
        let index = self.verbs.extender.index().read();
        let uid = self.pod.metadata.uid.as_deref().unwrap_or_default();
        let (Some(facts), Some(rules)) = (index.pod(uid), index.rules_of(uid)) else {
            return Ok(None);
        };
        let Some(demand) = index.demand(uid, facts)? else {
            return Ok(None);
        };
        let mut counted = Vec::new();
        for node in nodes {
            if let Some(id) = index.fleet().node_id(self.name(*node)?) {
                let n_victims = index.n_victims_on(id, rules.priority);
                counted.extend((n_victims > 0).then_some((n_victims, *node)));
            }
        }
        counted.sort_unstable();
        let promised = Promised::new();
        let preemptor = Preemptor::for_room(rules, (i32::MAX, true), &demand, &promised);
        let mut rooms = Vec::new();
        for (_, node) in counted.into_iter().take(MAX_SEARCHED) {
            if let RoomSearch::Evictions(room) = preemptor.room_on(index.filter(), self.name(node)?) {
                rooms.push((node, room));
            }
        }
        Ok(rooms.into_iter().min_by_key(|(node, room)| (room.cost, *node)))
    }

    /// The gain of the moves, at most so many, by which the largest free blocks of the nodes grow most.
    pub fn join(&self, most: usize) -> Result<JoinGain> {
        let request = PlanRequest {
            goal: PlanGoal::Join {},
            limits: PlanLimits {
                max_moves: most,
                min_run_seconds: 0,
                ..PlanLimits::default()
            },
        };
        let found = plan(self.verbs.extender.index(), &request, 0, &|| false, || {})?;
        Ok(JoinGain {
            most,
            restarts: found.price.restarts,
            bytes: found.gain,
        })
    }

    /// Fails if an invariant of the engine does not hold, or if the engine counts other free amounts than `occupancy`.
    pub fn check(&self, occupancy: &FreeRoom) -> Result<()> {
        let index = self.verbs.extender.index().read();
        let violations = index.fleet().check();
        let n = violations.len();
        // Violations of a live cluster's own objects are no fault of this run.
        if n > self.n_violations_at_start
            && let Some(violation) = violations.last()
        {
            bail!("{n} invariants of the engine do not hold, one of them: {violation:?}");
        }
        // For requests in bytes or units the engine rounds otherwise than the thousandths that this run counts.
        if !self.world.is_in_percents {
            return Ok(());
        }
        for (node, counted) in self.world.nodes.iter().zip(occupancy.nodes()) {
            let id = index.fleet().node_id(&node.name);
            let Some(view) = id.and_then(|id| index.fleet().view(id)) else {
                continue;
            };
            let core: Vec<i64> = view
                .gpus()
                .iter()
                .map(|gpu| i64::from(gpu.free.core) * PERCENT)
                .collect();
            ensure!(
                *core == *counted.gpus,
                "node {}: the engine counts {core:?} thousandths free, its records say {:?}",
                node.name,
                counted.gpus
            );
        }
        Ok(())
    }

    pub fn filter_micros(&self) -> f64 {
        let (time, n) = *self.verbs.filtered.lock();
        time.as_secs_f64() / f64::from(n.max(1)) * 1e6
    }

    pub fn node_idx(&self, name: &str) -> Result<usize> {
        let at = self.by_name.get(name).copied();
        at.with_context(|| format!("there is no node {name}"))
    }

    fn node(&self, node: usize) -> Result<&'w ReplayNode> {
        self.world.nodes.get(node).context("there is no such node")
    }

    fn name(&self, node: usize) -> Result<&'w str> {
        Ok(&self.node(node)?.name)
    }
}

/// The UID of an arriving pod: names are unique in a namespace only, UIDs in the cluster.
fn uid(pod: &ReplayPod, arrival: &Arrival) -> String {
    format!("{}_{}", pod.namespace, arrival.name)
}

fn allocation(minor: i32, milli: i64) -> DeviceAllocation {
    let percent = Quantity::from_integer(milli / PERCENT);
    let resources = [GPU_CORE, GPU_MEMORY_RATIO].map(|resource| (resource.to_owned(), percent));
    DeviceAllocation {
        minor,
        resources: resources.into(),
        id: String::new(),
        extension: None,
    }
}

/// The thousandths of a GPU in an entry of a record: of memory or of computing power, whichever is more.
fn milli(allocation: &DeviceAllocation) -> i64 {
    let percent = |resource: &str| {
        let amount = allocation.resources.get(resource).copied();
        amount.and_then(Quantity::unsigned).unwrap_or(0)
    };
    i64::try_from(percent(GPU_CORE).max(percent(GPU_MEMORY_RATIO))).unwrap_or(0) * PERCENT
}
