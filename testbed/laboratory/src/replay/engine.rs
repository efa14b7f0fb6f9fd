//! gpushare-scheduler in process: the code of its filter, prioritize and bind verbs over its index, without HTTP.
//!
//! It also stands in for the API server: it keeps the pods, and gives the index the events that watches would
//! bring.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use placement::Policies;
use proto::device::TYPE_GPU;
use proto::extender::Name;
use proto::quantity::Quantity;
use proto::record::{DeviceAllocation, Record};
use proto::resource::{GPU_CORE, GPU_MEMORY_RATIO};
use scheduler::bind::PodId;
use scheduler::config::AnswerNodes;
use scheduler::extender::{Extender, filter, prioritize};
use scheduler::offline;
use scheduler::watch::ObjectStore;
use serde::Deserialize;
use serde_json::json;

use super::arrivals::Arrival;
use super::occupancy::{FreeRoom, GpuShare};
use super::refusal::{Misfits, Refused};
use super::trace::PERCENT;
use super::world::{ReplayInput, ReplayNode, ReplayPod};

/// The scheduler, and the pod that it is placing.
pub struct Engine<'w> {
    world: &'w ReplayInput,
    extender: Extender,
    by_name: HashMap<&'w str, usize>,
    /// Node names as JSON strings, ready for requests.
    quoted: Vec<Box<[u8]>>,
    pod: proto::pod::Pod,
    /// The pod's JSON up to the phase of its status.
    pod_head: String,
    pod_json: Vec<u8>,
    body: Vec<u8>,
    n_bound: u64,
    /// The number of invariants that did not hold from the start: a real cluster's pods may contradict its
    /// devices.
    n_broken: usize,
    /// The time spent in the filter verb, and the number of its calls.
    filtered: (Duration, u32),
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct FilterAnswer<'a> {
    #[serde(borrow)]
    node_names: Option<Vec<Name<'a>>>,
    #[serde(borrow)]
    failed_nodes: Misfits<'a>,
    #[serde(borrow)]
    failed_and_unresolvable_nodes: Misfits<'a>,
    #[serde(borrow)]
    error: Cow<'a, str>,
}

/// The filter verb's answer.
#[derive(Debug, Default)]
pub struct FilterOutcome {
    /// The nodes that the extender lets the pod go to.
    pub nodes: Vec<usize>,
    /// The reasons for which it refuses the other nodes.
    pub refused: Refused,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Priority<'a> {
    #[serde(borrow)]
    host: Name<'a>,
    score: i64,
}

impl<'w> Engine<'w> {
    /// A scheduler that has seen the world's nodes, and the pods that are there from the start. Call it within
    /// a tokio runtime.
    pub fn new(world: &'w ReplayInput, policies: Policies, answer_nodes: AnswerNodes) -> Self {
        let nodes = world.nodes.iter().map(|node| node.object.clone());
        let devices = world.nodes.iter().filter_map(|node| node.device.clone());
        let present = world.present.iter().map(|present| present.object.clone());
        let extender = offline::extender_of(offline::index_with(policies, nodes, devices, present))
            .with_answer_nodes(answer_nodes);
        let n_broken = extender.index().read().fleet().check().len();
        let (mut by_name, mut quoted) = (HashMap::new(), Vec::new());
        for (at, node) in world.nodes.iter().enumerate() {
            by_name.insert(&*node.name, at);
            quoted.push(json!(node.name).to_string().into_bytes().into());
        }
        Self {
            world,
            extender,
            by_name,
            quoted,
            pod: proto::pod::Pod::default(),
            pod_head: String::new(),
            pod_json: Vec::new(),
            body: Vec::new(),
            n_bound: 0,
            n_broken,
            filtered: (Duration::ZERO, 0),
        }
    }

    /// Plays a user who creates a pod: the pod becomes the current one, and the index gets the watch's event.
    pub fn create(&mut self, pod: &ReplayPod, arrival: &Arrival) -> Result<()> {
        let ReplayPod {
            namespace,
            metadata,
            spec,
            ..
        } = pod;
        let (name, uid) = (&arrival.name, uid(pod, arrival));
        self.pod_head = format!(
            r#"{{"metadata":{{"name":"{name}","namespace":"{namespace}","uid":"{uid}"{metadata}}},"spec":{spec},"status":{{"phase":"Pending""#
        );
        self.show("")
    }

    /// kube-scheduler writes the condition of a pod that it found no node for, and the watch shows it.
    pub fn refuse(&mut self, message: &str) -> Result<()> {
        let condition =
            json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message});
        self.show(&format!(r#","conditions":[{condition}]"#))
    }

    /// The watch shows the pod with these further fields of its status.
    fn show(&mut self, status: &str) -> Result<()> {
        self.pod_json = format!("{}{status}}}}}", self.pod_head).into_bytes();
        self.pod = serde_json::from_slice(&self.pod_json)
            .with_context(|| format!("cannot read a pod: {}", self.pod_head))?;
        self.extender.index().write().apply(self.pod.clone());
        Ok(())
    }

    /// Asks the extender which of these nodes the pod may go to.
    pub fn filter(&mut self, nodes: &[usize]) -> Result<FilterOutcome> {
        let (filtered, time) = self.ask_filter(nodes)?;
        self.filtered = (self.filtered.0 + time, self.filtered.1 + 1);
        Ok(filtered)
    }

    /// Returns true if the pod fits any of these nodes; not counted in `filter_micros`, since kube-scheduler
    /// would not ask.
    pub fn fits_any(&mut self, nodes: &[usize]) -> Result<bool> {
        Ok(!self.ask_filter(nodes)?.0.nodes.is_empty())
    }

    /// Calls the scheduler's filter about these nodes; returns the nodes that fit, the refusals, and the time that it
    /// took.
    fn ask_filter(&mut self, nodes: &[usize]) -> Result<(FilterOutcome, Duration)> {
        self.ask_about(nodes);
        let began = Instant::now();
        let answer = filter::answer(&self.extender, &self.body, began)?;
        let time = began.elapsed();
        let answer: FilterAnswer<'_> =
            serde_json::from_slice(&answer.json).context("filter answers nonsense")?;
        ensure!(answer.error.is_empty(), "filter fails: {}", answer.error);
        let mut nodes = Vec::new();
        for Name(name) in answer.node_names.unwrap_or_default() {
            let at = self.by_name.get(&*name).copied();
            nodes.push(at.with_context(|| format!("filter names node {name:?}"))?);
        }
        let refused = Refused::of(answer.failed_nodes, answer.failed_and_unresolvable_nodes);
        Ok((FilterOutcome { nodes, refused }, time))
    }

    /// The extender's scores of these nodes, from 0 to 10.
    pub fn prioritize(&mut self, nodes: &[usize]) -> Result<HashMap<usize, i64>> {
        self.ask_about(nodes);
        let answer = prioritize::answer(&self.extender, &self.body)?;
        let priorities: Vec<Priority<'_>> =
            serde_json::from_slice(&answer).context("prioritize answers nonsense")?;
        let mut scores = HashMap::new();
        for priority in priorities {
            let node = self.by_name.get(&*priority.host.0);
            scores.extend(node.map(|node| (*node, priority.score)));
        }
        Ok(scores)
    }

    /// Writes the body of a filter request about these nodes for the current pod.
    fn ask_about(&mut self, nodes: &[usize]) {
        self.body.clear();
        self.body.extend_from_slice(br#"{"Pod":"#);
        self.body.extend_from_slice(&self.pod_json);
        self.body.extend_from_slice(br#","Nodes":null,"NodeNames":["#);
        for (nth, name) in nodes.iter().filter_map(|node| self.quoted.get(*node)).enumerate() {
            if nth > 0 {
                self.body.push(b',');
            }
            self.body.extend_from_slice(name);
        }
        self.body.extend_from_slice(b"]}");
    }

    /// kube-scheduler asks the extender to bind the pod to a node; returns the parts of GPUs that it is given.
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
        let order = offline::bind(&self.extender, &pod, name, self.n_bound, Instant::now());
        let failure = || {
            format!(
                "pod {} is not bound to node {name}, which filter had named",
                pod.name
            )
        };
        let order = order.with_context(failure)?;
        self.write(node, order.annotations)
    }

    /// Binds the pod to a node, with these parts of its GPUs, on behalf of another scheduler.
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

    /// The API server stores the binding, and the watch shows the pod with it.
    fn write(&mut self, node: usize, annotations: BTreeMap<String, String>) -> Result<Vec<GpuShare>> {
        // The record is read back from the annotations, so that what counts is what a plugin would read.
        let name = self.name(node)?.to_owned();
        let minors = &self.node(node)?.minors;
        let record = Record::read(&annotations)?.unwrap_or_default();
        let mut parts = Vec::new();
        for allocation in record.allocations.get(TYPE_GPU).into_iter().flatten() {
            let gpu = minors.iter().position(|minor| *minor == allocation.minor);
            let milli = milli(allocation);
            parts.extend(gpu.map(|gpu| GpuShare { gpu, milli }));
        }
        self.pod
            .metadata
            .annotations
            .get_or_insert_default()
            .extend(annotations);
        self.pod.spec.node_name = Some(name);
        // The index gets the watch's event at once; in a cluster it comes a little later.
        self.extender.index().write().apply(self.pod.clone());
        Ok(parts)
    }

    /// Plays the deletion of a pod: the index gets the watch's event.
    pub fn delete(&mut self, pod: &ReplayPod, arrival: &Arrival) {
        let metadata = ObjectMeta {
            uid: Some(uid(pod, arrival)),
            ..ObjectMeta::default()
        };
        let gone = proto::pod::Pod {
            metadata,
            ..proto::pod::Pod::default()
        };
        ObjectStore::<proto::pod::Pod>::delete(&mut *self.extender.index().write(), &gone);
    }

    /// Fails if an invariant of the engine does not hold, or if it counts a GPU otherwise than the records say.
    pub fn check(&self, occupancy: &FreeRoom) -> Result<()> {
        let index = self.extender.index().read();
        // Violations of a live cluster's own objects are no fault of this run.
        let violations = index.fleet().check();
        if let Some(violation) = violations.last().filter(|_| violations.len() > self.n_broken) {
            let n = violations.len();
            bail!("{n} invariants of the engine do not hold, one of them: {violation:?}");
        }
        // For requests in bytes or units the engine rounds otherwise than the thousandths that this run counts.
        if !self.world.is_exact {
            return Ok(());
        }
        for (node, counted) in self.world.nodes.iter().zip(occupancy.nodes()) {
            let id = index.fleet().node_id(&node.name);
            let Some(view) = id.and_then(|id| index.fleet().view(id)) else {
                continue;
            };
            let mut core = Vec::new();
            for gpu in view.gpus() {
                core.push(i64::from(gpu.free.core) * PERCENT);
            }
            ensure!(
                *core == *counted.gpus,
                "node {}: the engine counts {core:?} thousandths free, its records say {:?}",
                node.name,
                counted.gpus
            );
        }
        Ok(())
    }

    /// Microseconds that the filter verb took on average.
    pub fn filter_micros(&self) -> f64 {
        let (time, n) = self.filtered;
        if n == 0 {
            0.0
        } else {
            time.as_secs_f64() * 1e6 / f64::from(n)
        }
    }

    fn node(&self, node: usize) -> Result<&'w ReplayNode> {
        self.world.nodes.get(node).context("there is no such node")
    }

    fn name(&self, node: usize) -> Result<&'w str> {
        Ok(&self.node(node)?.name)
    }
}

/// A UID: names are unique in a namespace only, UIDs in the cluster.
fn uid(pod: &ReplayPod, arrival: &Arrival) -> String {
    format!("{}_{}", pod.namespace, arrival.name)
}

/// The entry of a record for a part of a GPU.
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

/// The part of a GPU that a record gives a pod: of memory or of computing power, whichever is more.
fn milli(allocation: &DeviceAllocation) -> i64 {
    let percent = |resource: &str| {
        let amount = allocation.resources.get(resource).copied();
        amount.and_then(Quantity::unsigned).unwrap_or(0)
    };
    i64::try_from(percent(GPU_CORE).max(percent(GPU_MEMORY_RATIO))).unwrap_or(0) * PERCENT
}
