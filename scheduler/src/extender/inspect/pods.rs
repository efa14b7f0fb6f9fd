//! The view of a pod: what it asks for, where it is, the verdict of every node and device on it while it waits, the best nodes
//! for it, and the pods that the look-ahead policy expects.
//!
//! The index is locked for a few hundred nodes at a time, so that no filter waits for long; each node is shown as it was in
//! its turn.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use placement::{
    DeviceFit, Hints, OwnerId, PodProfile, Reason, RequestedGpus, RequestedMemory, ShareRequest,
};
use serde::Serialize;

use crate::accounting::{ParsedRequest, PodFacts};
use crate::extender::Extender;
use crate::index::{BestNode, CostTerms, Index, ResourceDemand, Shared};

/// The number of nodes that are evaluated under one lock.
const NODES: usize = 256;

/// The most nodes that one answer lists.
const MAX_NODES: usize = 100;

/// The most kinds of expected pods that one answer lists.
const MAX_EXPECTED: usize = 8;

/// The pod that a query such as `pod=namespace/name` asks for. Names of pods need no escapes; the slash may have one.
pub(super) fn pod_in_query(query: &str) -> Option<String> {
    let pod = query.split('&').find_map(|pair| pair.strip_prefix("pod="))?;
    Some(pod.replace("%2F", "/").replace("%2f", "/"))
}

/// The answer: more than one pod while a pod and its successor of the same name overlap.
#[derive(Debug, Default, Serialize)]
pub(super) struct InspectedPods {
    pods: Vec<PodView>,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodView {
    namespace: String,
    name: String,
    uid: String,
    /// The request, for people.
    request: String,
    /// The reason that no node can take it, whatever is free.
    #[serde(skip_serializing_if = "Option::is_none")]
    invalid: Option<String>,
    /// The node that it is bound to.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    assumed: bool,
    /// The reason that it is counted conservatively.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// The best nodes when it was bound, or now; best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    best_nodes: Vec<BestNode>,
    /// The pods that are expected to come, if the policy looks ahead; the most frequent first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    expected: Vec<ExpectedPods>,
    /// The verdicts of the nodes with devices while it waits.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    verdicts: Option<Verdicts>,
}

/// Expected pods with equal requests.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ExpectedPods {
    /// Their number in a thousand pods.
    permille: u32,
    /// The request of each, for people.
    request: String,
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Verdicts {
    /// The number of nodes with devices.
    n_nodes: usize,
    n_fitting: usize,
    /// The number of nodes that refuse the pod for each reason.
    reasons: BTreeMap<&'static str, usize>,
    /// Some of the nodes, those that fit first.
    nodes: Vec<NodeVerdict>,
    /// The verdicts of the GPUs of these nodes, if the pod asks for amounts of GPUs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    devices: Vec<GpuVerdict>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeVerdict {
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
struct GpuVerdict {
    node: String,
    id: u32,
    free_bytes: u64,
    needed_bytes: u64,
    fits: bool,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'static str,
}

/// Shows the pods of a name such as `namespace/name`.
pub(super) fn inspect(extender: &Extender, pod: &str) -> InspectedPods {
    let mut answer = InspectedPods::default();
    let Some((namespace, name)) = pod.split_once('/') else {
        answer.error = format!("{pod:?} is not namespace/name");
        return answer;
    };
    for (uid, facts) in find(&extender.index.read(), namespace, name) {
        answer.pods.push(PodView::new(extender, &uid, &facts));
    }
    // The index finds them in the order of a hash map.
    answer.pods.sort_by(|a, b| a.uid.cmp(&b.uid));
    if answer.pods.is_empty() {
        answer.error = format!("there is no pod {pod:?} that asks for a share of a GPU");
    }
    answer
}

fn find(index: &Index, namespace: &str, name: &str) -> Vec<(OwnerId, PodFacts)> {
    let named = index.pods_named(namespace, name);
    let requesting = named.filter(|(_, facts)| index.concerns(facts));
    requesting
        .map(|(uid, facts)| (uid.clone(), facts.clone()))
        .collect()
}

impl PodView {
    fn new(extender: &Extender, uid: &OwnerId, facts: &PodFacts) -> Self {
        let index = &extender.index;
        let (assumed, problem) = {
            let index = index.read();
            let (assumed, problem) = index.standing(uid);
            (assumed, problem.map(str::to_owned))
        };
        let node = facts.bound.as_ref().map(|bound| bound.node.to_string());
        let rule = index.read().demand(uid.as_str(), facts).err();
        let is_waiting = rule.is_none() && node.is_none() && !assumed;
        let verdicts = is_waiting.then(|| Verdicts::of_nodes(index, uid.as_str(), facts));
        let best = if is_waiting {
            // Of the verdicts that were just worked out: the engine ranks by those that it remembers.
            index.read().filter().best_nodes(uid.as_str(), facts)
        } else {
            let mut memory = extender.memory();
            memory.best_nodes.get(uid.as_str()).cloned().unwrap_or_default()
        };
        // Only a policy that looks ahead has costs, and expects pods.
        let mut expected = Vec::new();
        if best.iter().any(|node| node.cost.is_some()) {
            expected = index.read().fleet().expected_workload();
            expected.truncate(MAX_EXPECTED);
        }
        Self {
            namespace: facts.namespace.to_string(),
            name: facts.name.to_string(),
            uid: uid.to_string(),
            request: match &facts.request {
                ParsedRequest::Valid(request) => request.to_string(),
                ParsedRequest::Invalid(..) => String::new(),
            },
            invalid: rule.map(|rule| rule.to_string()),
            node,
            assumed,
            problem,
            best_nodes: best,
            expected: expected.into_iter().map(ExpectedPods::from).collect(),
            verdicts,
        }
    }
}

impl From<(PodProfile, u32)> for ExpectedPods {
    fn from((PodProfile { gpus, host }, permille): (PodProfile, u32)) -> Self {
        let gpus = match gpus {
            RequestedGpus::Nothing | RequestedGpus::All { .. } => "no GPU".to_owned(),
            RequestedGpus::Whole(n) => format!("{n} whole GPUs"),
            RequestedGpus::Share(request) => share_text(&request),
        };
        let request = format!(
            "{gpus}, {} m CPU, {:.1} GiB of memory",
            host.cpu_milli,
            to_gib(host.memory)
        );
        Self { permille, request }
    }
}

fn share_text(request: &ShareRequest) -> String {
    let memory = match request.memory {
        RequestedMemory::Bytes(bytes) => format!("{:.1} GiB", to_gib(bytes)),
        RequestedMemory::Units(units) => format!("{units} units"),
        RequestedMemory::Ratio(percent) => format!("{percent} %"),
    };
    let of = match request.devices {
        1 => "a GPU's".to_owned(),
        n => format!("each of {n} GPUs'"),
    };
    let core = match request.core {
        0 => String::new(),
        core => format!(" and {core} % of its computing power"),
    };
    format!("{memory} of {of} memory{core}")
}

impl Verdicts {
    /// The verdicts of all nodes with devices on a pod that waits.
    fn of_nodes(index: &Shared<Index>, uid: &str, facts: &PodFacts) -> Self {
        let mut names = index.read().device_nodes();
        // Of many nodes the same ones are listed each time.
        names.sort_unstable();
        let (mut fitting, mut others) = (Vec::new(), Vec::new());
        let mut verdicts = Self::default();
        for chunk in names.chunks(NODES) {
            let refusals = refusals(&index.read(), chunk, uid, facts);
            for (name, refusal) in chunk.iter().zip(refusals) {
                verdicts.n_nodes += 1;
                match refusal {
                    None => fitting.push((name, None)),
                    Some(reason) => {
                        *verdicts.reasons.entry(reason.as_str()).or_default() += 1;
                        others.push((name, Some(reason)));
                    }
                }
            }
        }
        verdicts.n_fitting = fitting.len();
        for (name, refusal) in fitting.into_iter().chain(others).take(MAX_NODES) {
            // One lock for each node, since details are worked out device by device.
            let index = index.read();
            if let Ok(Some(demand)) = index.demand(uid, facts) {
                verdicts
                    .nodes
                    .push(NodeVerdict::new(&index, &demand, name, refusal));
                verdicts.devices.extend(gpu_verdicts(&index, &demand, name));
            }
        }
        verdicts
    }
}

/// The reason that each of these nodes refuses the pod; `None` if it fits.
fn refusals(index: &Index, names: &[Box<str>], uid: &str, facts: &PodFacts) -> Vec<Option<Reason>> {
    let Ok(Some(demand)) = index.demand(uid, facts) else {
        return Vec::new();
    };
    let filter = index.filter();
    let mut batch = filter.batch(&demand);
    let mut refusals = Vec::with_capacity(names.len());
    for name in names {
        refusals.push(filter.evaluate(name, &demand, &mut batch).err());
    }
    refusals
}

impl NodeVerdict {
    fn new(index: &Index, demand: &ResourceDemand<'_>, node: &str, refusal: Option<Reason>) -> Self {
        Self {
            node: node.to_owned(),
            fits: refusal.is_none(),
            reason: refusal.map_or("", Reason::as_str),
            detail: refusal.and_then(|reason| index.filter().detail(node, demand, reason)),
        }
    }
}

fn gpu_verdicts(index: &Index, demand: &ResourceDemand<'_>, name: &str) -> Vec<GpuVerdict> {
    let fleet = index.fleet();
    let Some(node) = fleet.node_id(name) else {
        return Vec::new();
    };
    let verdicts = fleet.explain(node, demand.gpus, Hints::RespectOthers(demand.uid));
    let verdicts = verdicts.into_iter().flatten();
    verdicts.map(|verdict| GpuVerdict::new(name, &verdict)).collect()
}

impl GpuVerdict {
    fn new(node: &str, verdict: &DeviceFit<'_>) -> Self {
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
    /// The answer for people.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for pod in &self.pods {
            // Writing to a string never fails.
            let _ = pod.write(&mut text);
        }
        if !self.error.is_empty() {
            let _ = writeln!(text, "{}", self.error);
        }
        text
    }
}

impl PodView {
    fn write(&self, text: &mut String) -> fmt::Result {
        writeln!(
            text,
            "pod {}/{} (UID {}) asks for {}",
            self.namespace, self.name, self.uid, self.request
        )?;
        match (&self.node, &self.invalid) {
            (Some(node), _) => writeln!(text, "  it is bound to node {node}")?,
            (None, Some(rule)) => writeln!(text, "  no node can take it: {rule}")?,
            (None, None) if self.assumed => writeln!(text, "  it is being bound")?,
            (None, None) => {}
        }
        if let Some(problem) = &self.problem {
            writeln!(text, "  it is counted conservatively: {problem}")?;
        }
        self.write_best_nodes(text)?;
        let Some(verdicts) = &self.verdicts else {
            return Ok(());
        };
        writeln!(
            text,
            "  {} of {} nodes with devices have room",
            verdicts.n_fitting, verdicts.n_nodes
        )?;
        for node in &verdicts.nodes {
            let verdict = if node.fits { "has room" } else { node.reason };
            let detail = node.detail.as_ref().map(|detail| format!(": {detail}"));
            writeln!(text, "  {}: {verdict}{}", node.node, detail.unwrap_or_default())?;
        }
        let n_left_out = verdicts.n_nodes.saturating_sub(verdicts.nodes.len());
        if n_left_out > 0 {
            writeln!(text, "  and {n_left_out} more nodes")?;
        }
        Ok(())
    }

    fn write_best_nodes(&self, text: &mut String) -> fmt::Result {
        if !self.best_nodes.is_empty() {
            let when = if self.verdicts.is_some() {
                "now"
            } else {
                "when it was bound"
            };
            writeln!(text, "  the best nodes for it {when}:")?;
        }
        for node in &self.best_nodes {
            write_best_node(text, node)?;
        }
        if !self.expected.is_empty() {
            writeln!(text, "  of a thousand pods to come are expected:")?;
        }
        for pods in &self.expected {
            writeln!(text, "    {:>4} of {}", pods.permille, pods.request)?;
        }
        Ok(())
    }
}

fn write_best_node(text: &mut String, BestNode { node, score, cost }: &BestNode) -> fmt::Result {
    let Some(CostTerms {
        unfilled,
        useless,
        broken,
    }) = cost
    else {
        return writeln!(text, "    {node} scores {score} of 10");
    };
    let sum = unfilled + useless + broken;
    writeln!(
        text,
        "    {node} costs {sum} thousandths of a GPU: {unfilled} unfilled, {useless} useless, {broken} of idle GPUs broken up"
    )
}

#[expect(clippy::cast_precision_loss, reason = "one digit is shown, to people")]
fn to_gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
