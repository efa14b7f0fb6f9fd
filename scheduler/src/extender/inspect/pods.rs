//! Why a pod waits, or is where it is: what it asks for, what every node and device says to it, which nodes stood best, and what
//! is expected of pods to come.
//!
//! The index is locked for a few hundred nodes at a time, so each node answers as it was when its turn came.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use placement::{
    DeviceFit, Hints, OwnerId, PodProfile, Reason, RequestedGpus, RequestedMemory, ShareRequest,
};
use serde::Serialize;

use super::json;
use crate::accounting::{Ask, PodFacts};
use crate::index::{Index, Leader, NodeAsk, Shared};

/// Nodes that are asked under one lock.
const NODES: usize = 256;

/// Most nodes that one answer lists.
const MAX_NODES: usize = 100;

/// Most kinds of expected pods that one answer lists.
const MAX_EXPECTED: usize = 8;

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
    /// The nodes that stood best when it was bound, or stand best now; the best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    best_nodes: Vec<BestNode>,
    /// What is expected of pods to come, where the policy is one that looks ahead; the commonest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    expected: Vec<ExpectedPods>,
    /// What the nodes with devices say to it, as long as it is not bound.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    verdicts: Option<Verdicts>,
}

/// A node that stands well for a pod.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct BestNode {
    node: String,
    /// From 0 to 10.
    score: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<CostTerms>,
}

/// What it costs to place the pod on a node, in thousandths of a GPU.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CostTerms {
    /// How much less pods to come would fill, beyond what the pod takes.
    unfilled: i64,
    /// How much of what is idle becomes useless to them.
    useless: i64,
    /// What whole GPUs that lie idle together lose.
    broken: i64,
}

/// Pods of one kind, which are expected to come.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ExpectedPods {
    /// How many of a thousand pods.
    permille: u32,
    /// What each asks for, for people.
    request: String,
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
///
/// `leaders` knows the nodes that stood best for a pod, by its UID, when it was bound.
pub fn pod(
    index: &Shared<Index>,
    leaders: impl Fn(&str) -> Option<Vec<Leader>>,
    pod: &str,
    as_text: bool,
) -> Vec<u8> {
    let answer = standings(index, leaders, pod);
    if as_text {
        answer.text().into_bytes()
    } else {
        json(&answer)
    }
}

fn standings(
    index: &Shared<Index>,
    leaders: impl Fn(&str) -> Option<Vec<Leader>>,
    pod: &str,
) -> InspectedPods {
    let Some((namespace, name)) = pod.split_once('/') else {
        let error = format!("{pod:?} is not namespace/name");
        return InspectedPods {
            pods: Vec::new(),
            error,
        };
    };
    let found = find(&index.read(), namespace, name);
    let mut pods: Vec<Standing> = found
        .into_iter()
        .map(|found| found.standing(index, &leaders))
        .collect();
    pods.sort_by(|a, b| a.uid.cmp(&b.uid));
    let error = if pods.is_empty() {
        format!("there is no pod {pod:?} that asks for a share of a GPU")
    } else {
        String::new()
    };
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
    let asking = index
        .pods_named(namespace, name)
        .filter(|(_, facts)| index.concerns(facts));
    let found = asking.map(|(uid, facts)| {
        let (assumed, problem) = index.standing(uid);
        Found {
            uid: uid.clone(),
            facts: facts.clone(),
            assumed,
            problem: problem.map(str::to_owned),
        }
    });
    found.collect()
}

impl Found {
    fn standing(self, index: &Shared<Index>, leaders: impl Fn(&str) -> Option<Vec<Leader>>) -> Standing {
        let Self {
            uid,
            facts,
            assumed,
            problem,
        } = self;
        let node = facts.bound.as_ref().map(|bound| bound.node.to_string());
        let request = match &facts.ask {
            Ask::Request(request) => request.to_string(),
            Ask::Invalid(..) => String::new(),
        };
        let rule = index.read().ask(uid.as_str(), &facts).err();
        let is_open = rule.is_none() && node.is_none() && !assumed;
        let verdicts = is_open.then(|| Verdicts::of(index, uid.as_str(), &facts));
        let best = if is_open {
            index.read().leaders_of(uid.as_str(), &facts)
        } else {
            leaders(uid.as_str()).unwrap_or_default()
        };
        let looks_ahead = best.iter().any(|leader| leader.cost.is_some());
        let expected = if looks_ahead {
            index.read().fleet().expected_workload()
        } else {
            Vec::new()
        };
        Standing {
            namespace: facts.namespace.to_string(),
            name: facts.name.to_string(),
            uid: uid.to_string(),
            request,
            invalid: rule.map(|rule| rule.to_string()),
            node,
            assumed,
            problem,
            best_nodes: best.into_iter().map(BestNode::from).collect(),
            expected: expected
                .into_iter()
                .take(MAX_EXPECTED)
                .map(ExpectedPods::from)
                .collect(),
            verdicts,
        }
    }
}

impl From<Leader> for BestNode {
    fn from(leader: Leader) -> Self {
        let cost = leader.cost.map(|[unfilled, useless, broken]| CostTerms {
            unfilled,
            useless,
            broken,
        });
        Self {
            node: leader.name.into(),
            score: leader.tenths,
            cost,
        }
    }
}

impl CostTerms {
    fn sum(&self) -> i64 {
        self.unfilled + self.useless + self.broken
    }
}

impl From<(PodProfile, u32)> for ExpectedPods {
    fn from((PodProfile { gpus, host }, permille): (PodProfile, u32)) -> Self {
        let gpus = match gpus {
            RequestedGpus::Nothing | RequestedGpus::All { .. } => "no GPU".to_owned(),
            RequestedGpus::Whole(n) => format!("{n} whole GPUs"),
            RequestedGpus::Share(ShareRequest {
                devices,
                memory,
                core,
                ..
            }) => {
                let memory = match memory {
                    RequestedMemory::Bytes(bytes) => format!("{:.1} GiB", to_gib(bytes)),
                    RequestedMemory::Units(units) => format!("{units} units"),
                    RequestedMemory::Ratio(percent) => format!("{percent} %"),
                };
                let of = if devices == 1 {
                    "a GPU's".to_owned()
                } else {
                    format!("each of {devices} GPUs'")
                };
                let core = if core == 0 {
                    String::new()
                } else {
                    format!(" and {core} % of its computing power")
                };
                format!("{memory} of {of} memory{core}")
            }
        };
        let request = format!(
            "{gpus}, {} m CPU, {:.1} GiB of memory",
            host.cpu_milli,
            to_gib(host.memory)
        );
        Self { permille, request }
    }
}

impl Verdicts {
    fn of(index: &Shared<Index>, uid: &str, facts: &PodFacts) -> Self {
        let mut names = index.read().device_nodes();
        names.sort_unstable();
        let refusals: Vec<Option<Reason>> = names
            .chunks(NODES)
            .flat_map(|names| refusals(&index.read(), names, uid, facts))
            .collect();
        let mut verdicts = Self {
            n_nodes: refusals.len(),
            ..Self::default()
        };
        for reason in refusals.iter().flatten() {
            *verdicts.reasons.entry(reason.as_str()).or_default() += 1;
        }
        let judged = || names.iter().map(|name| &**name).zip(refusals.iter().copied());
        let fitting = judged().filter(|(_, reason)| reason.is_none());
        verdicts.n_fitting = fitting.clone().count();
        for (name, reason) in fitting
            .chain(judged().filter(|(_, reason)| reason.is_some()))
            .take(MAX_NODES)
        {
            verdicts.show(&index.read(), (name, reason), uid, facts);
        }
        verdicts
    }

    fn show(&mut self, index: &Index, (name, reason): (&str, Option<Reason>), uid: &str, facts: &PodFacts) {
        let Ok(Some(ask)) = index.ask(uid, facts) else {
            return;
        };
        let detail = reason.and_then(|reason| index.detail(name, &ask, reason));
        self.nodes.push(NodeStanding {
            node: name.to_owned(),
            fits: reason.is_none(),
            reason: reason.map_or("", Reason::as_str),
            detail,
        });
        self.devices.extend(devices(index, &ask, name));
    }
}

/// The reason for which each of these nodes refuses the pod; `None` if it fits.
fn refusals(index: &Index, names: &[Box<str>], uid: &str, facts: &PodFacts) -> Vec<Option<Reason>> {
    let Ok(Some(ask)) = index.ask(uid, facts) else {
        return Vec::new();
    };
    let mut asking = index.asking(&ask);
    names
        .iter()
        .map(|name| {
            index
                .judge(name, index.fleet().node_id(name), &ask, &mut asking)
                .err()
        })
        .collect()
}

fn devices(index: &Index, ask: &NodeAsk<'_>, name: &str) -> Vec<DeviceStanding> {
    let Some(node) = index.fleet().node_id(name) else {
        return Vec::new();
    };
    let verdicts = index
        .fleet()
        .explain(node, ask.gpus, Hints::RespectOthers(ask.uid));
    verdicts
        .into_iter()
        .flatten()
        .map(|verdict| DeviceStanding::new(name, &verdict))
        .collect()
}

impl DeviceStanding {
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
        self.write_best(text)?;
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
            let detail = node
                .detail
                .as_ref()
                .map(|detail| format!(": {detail}"))
                .unwrap_or_default();
            writeln!(text, "  {}: {verdict}{detail}", node.node)?;
        }
        let n_left_out = verdicts.n_nodes.saturating_sub(verdicts.nodes.len());
        if n_left_out > 0 {
            writeln!(text, "  and {n_left_out} more nodes")?;
        }
        Ok(())
    }

    fn write_best(&self, text: &mut String) -> fmt::Result {
        if !self.best_nodes.is_empty() {
            let when = if self.verdicts.is_some() {
                "now"
            } else {
                "when it was bound"
            };
            writeln!(text, "  the best nodes for it {when}:")?;
        }
        self.best_nodes
            .iter()
            .try_for_each(|node| writeln!(text, "    {node}"))?;
        if !self.expected.is_empty() {
            writeln!(text, "  of a thousand pods to come are expected:")?;
        }
        self.expected
            .iter()
            .try_for_each(|pods| writeln!(text, "    {:>4} of {}", pods.permille, pods.request))
    }
}

impl fmt::Display for BestNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, score, cost } = self;
        let Some(cost) = cost else {
            return write!(f, "{node} scores {score} of 10");
        };
        let CostTerms {
            unfilled,
            useless,
            broken,
        } = cost;
        let sum = cost.sum();
        write!(
            f,
            "{node} costs {sum} thousandths of a GPU: {unfilled} unfilled, {useless} useless, {broken} of idle GPUs broken up"
        )
    }
}

/// For people.
#[expect(clippy::cast_precision_loss, reason = "one digit is shown")]
fn to_gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
