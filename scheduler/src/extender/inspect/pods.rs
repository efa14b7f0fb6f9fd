//! Why a pod waits: what it asks for, and what every node and device says to it.
//!
//! The index is locked for a few hundred nodes at a time, so each node answers as it was when its turn came.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use placement::{DeviceVerdict, Hints, OwnerId, Reason};
use serde::Serialize;

use super::json;
use crate::accounting::{Ask, PodFacts};
use crate::index::{Index, NodeAsk, Shared};

/// Nodes that are asked under one lock.
const NODES: usize = 256;

/// Most nodes that one answer lists.
const MAX_NODES: usize = 100;

/// The pod that a query such as `pod=namespace/name` asks for.
///
/// Names of pods need no escapes; the slash between them may have one.
pub fn of_query(query: &str) -> Option<String> {
    let pod = query.split('&').find_map(|pair| pair.strip_prefix("pod="))?;
    Some(pod.replace("%2F", "/").replace("%2f", "/"))
}

/// Whether a query such as `format=text` asks for an answer that people read.
pub fn wants_text(query: Option<&str>) -> bool {
    query.is_some_and(|query| query.split('&').any(|pair| pair == "format=text"))
}

/// The standing of one pod.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Standing {
    namespace: String,
    name: String,
    uid: String,
    /// What it asks for, for people.
    request: String,
    /// Why no node can take it, whatever is free.
    #[serde(skip_serializing_if = "Option::is_none")]
    invalid: Option<String>,
    /// Where it is bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    assumed: bool,
    /// Why it is counted conservatively.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// What the nodes with devices say to it, as long as it is not bound.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    verdicts: Option<Verdicts>,
}

/// What nodes with devices say to a pod.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Verdicts {
    /// How many nodes have devices.
    n_nodes: usize,
    /// How many of them have room.
    n_fitting: usize,
    /// How many refuse the pod for each reason.
    reasons: BTreeMap<&'static str, usize>,
    /// Some of them, those with room first.
    nodes: Vec<NodeStanding>,
    /// What the GPUs of these say, where amounts of GPUs are asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    devices: Vec<DeviceStanding>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeStanding {
    node: String,
    fits: bool,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'static str,
    /// The rule, and how near the node comes.
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceStanding {
    node: String,
    id: u32,
    free_bytes: u64,
    needed_bytes: u64,
    fits: bool,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'static str,
}

/// The answer for pods.
#[derive(Debug, Default, Serialize)]
struct InspectedPods {
    pods: Vec<Standing>,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
}

/// One pod, by `namespace/name`; for people to read, if they want that.
pub fn pod(index: &Shared<Index>, pod: &str, as_text: bool) -> Vec<u8> {
    let answer = standings(index, pod);
    if as_text { answer.text().into_bytes() } else { json(&answer) }
}

fn standings(index: &Shared<Index>, pod: &str) -> InspectedPods {
    let Some((namespace, name)) = pod.split_once('/') else {
        let error = format!("{pod:?} is not namespace/name");
        return InspectedPods { pods: Vec::new(), error };
    };
    let found = find(&index.read(), namespace, name);
    let mut pods: Vec<Standing> = found.into_iter().map(|found| found.standing(index)).collect();
    pods.sort_by(|a, b| a.uid.cmp(&b.uid));
    let error = if pods.is_empty() { format!("there is no pod {pod:?} that asks for a share of a GPU") } else { String::new() };
    InspectedPods { pods, error }
}

/// A pod as the index has it.
struct Found {
    uid: OwnerId,
    facts: PodFacts,
    assumed: bool,
    problem: Option<String>,
}

fn find(index: &Index, namespace: &str, name: &str) -> Vec<Found> {
    let asking = index.pods_named(namespace, name).filter(|(_, facts)| index.concerns(facts));
    let found = asking.map(|(uid, facts)| {
        let (assumed, problem) = index.standing(uid);
        Found { uid: uid.clone(), facts: facts.clone(), assumed, problem: problem.map(str::to_owned) }
    });
    found.collect()
}

impl Found {
    fn standing(self, index: &Shared<Index>) -> Standing {
        let Self { uid, facts, assumed, problem } = self;
        let node = facts.bound.as_ref().map(|bound| bound.node.to_string());
        let request = match &facts.ask {
            Ask::Request(request) => request.to_string(),
            Ask::Invalid(..) => String::new(),
        };
        let rule = index.read().ask(uid.as_str(), &facts).err();
        let is_open = rule.is_none() && node.is_none() && !assumed;
        Standing {
            namespace: facts.namespace.to_string(),
            name: facts.name.to_string(),
            uid: uid.to_string(),
            request,
            invalid: rule.map(|rule| rule.to_string()),
            node,
            assumed,
            problem,
            verdicts: is_open.then(|| Verdicts::of(index, uid.as_str(), &facts)),
        }
    }
}

impl Verdicts {
    fn of(index: &Shared<Index>, uid: &str, facts: &PodFacts) -> Self {
        let mut names = index.read().device_nodes();
        names.sort_unstable();
        let refusals: Vec<Option<Reason>> = names.chunks(NODES).flat_map(|names| refusals(&index.read(), names, uid, facts)).collect();
        let mut verdicts = Self { n_nodes: refusals.len(), ..Self::default() };
        for reason in refusals.iter().flatten() {
            *verdicts.reasons.entry(reason.as_str()).or_default() += 1;
        }
        let judged = || names.iter().map(|name| &**name).zip(refusals.iter().copied());
        let fitting = judged().filter(|(_, reason)| reason.is_none());
        verdicts.n_fitting = fitting.clone().count();
        for (name, reason) in fitting.chain(judged().filter(|(_, reason)| reason.is_some())).take(MAX_NODES) {
            verdicts.show(&index.read(), (name, reason), uid, facts);
        }
        verdicts
    }

    fn show(&mut self, index: &Index, (name, reason): (&str, Option<Reason>), uid: &str, facts: &PodFacts) {
        let Ok(Some(ask)) = index.ask(uid, facts) else { return };
        let detail = reason.and_then(|reason| index.detail(name, &ask, reason));
        self.nodes.push(NodeStanding { node: name.to_owned(), fits: reason.is_none(), reason: reason.map_or("", Reason::as_str), detail });
        self.devices.extend(devices(index, &ask, name));
    }
}

/// The reason for which each of these nodes refuses the pod; `None` if it fits.
fn refusals(index: &Index, names: &[Box<str>], uid: &str, facts: &PodFacts) -> Vec<Option<Reason>> {
    let Ok(Some(ask)) = index.ask(uid, facts) else { return Vec::new() };
    let mut asking = index.asking(&ask);
    names.iter().map(|name| index.fit_found(name, index.fleet().node_id(name), &ask, &mut asking).err()).collect()
}

fn devices(index: &Index, ask: &NodeAsk<'_>, name: &str) -> Vec<DeviceStanding> {
    let Some(node) = index.fleet().node_id(name) else { return Vec::new() };
    let verdicts = index.fleet().explain(node, ask.gpus, Hints::RespectOthers(ask.uid));
    verdicts.into_iter().flatten().map(|verdict| DeviceStanding::new(name, &verdict)).collect()
}

impl DeviceStanding {
    fn new(node: &str, verdict: &DeviceVerdict<'_>) -> Self {
        Self {
            node: node.to_owned(),
            id: verdict.gpu.minor,
            free_bytes: verdict.free.memory.bytes_floor(),
            needed_bytes: verdict.need.memory.bytes_ceil(),
            fits: verdict.fit.is_ok(),
            reason: verdict.fit.err().map_or("", Reason::as_str),
        }
    }
}

impl InspectedPods {
    fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a text never fails.
        let _ = self.pods.iter().try_for_each(|pod| pod.write(&mut text));
        if !self.error.is_empty() {
            let _ = writeln!(text, "{}", self.error);
        }
        text
    }
}

impl Standing {
    fn write(&self, text: &mut String) -> std::fmt::Result {
        writeln!(text, "pod {}/{} (UID {}) asks for {}", self.namespace, self.name, self.uid, self.request)?;
        match (&self.node, &self.invalid) {
            (Some(node), _) => writeln!(text, "  it is bound to node {node}")?,
            (None, Some(rule)) => writeln!(text, "  no node can take it: {rule}")?,
            (None, None) if self.assumed => writeln!(text, "  it is being bound")?,
            (None, None) => {}
        }
        if let Some(problem) = &self.problem {
            writeln!(text, "  it is counted conservatively: {problem}")?;
        }
        let Some(verdicts) = &self.verdicts else { return Ok(()) };
        writeln!(text, "  {} of {} nodes with devices have room", verdicts.n_fitting, verdicts.n_nodes)?;
        for node in &verdicts.nodes {
            let verdict = if node.fits { "has room" } else { node.reason };
            let detail = node.detail.as_ref().map(|detail| format!(": {detail}")).unwrap_or_default();
            writeln!(text, "  {}: {verdict}{detail}", node.node)?;
        }
        let n_left_out = verdicts.n_nodes.saturating_sub(verdicts.nodes.len());
        if n_left_out > 0 {
            writeln!(text, "  and {n_left_out} more nodes")?;
        }
        Ok(())
    }
}
