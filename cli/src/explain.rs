//! `explain`: the reasons for which a pod waits.

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use proto::read_api::{Explanation, GpuVerdict, NodeVerdict};

use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult, code_of_answer};
use crate::format::{count, memory};
use crate::output::{Cell, Colour, Screen, TextTable, number, text};
use crate::source::AnswerSource;

/// Most GPUs of one node in the table, unless `--all` asks for every GPU.
const MAX_GPUS: usize = 2;
/// Most pods in the way that the sentence names.
const MAX_NAMES: usize = 3;

/// Explains a pod; the answer is no if the pod waits and no node has room.
pub(crate) async fn run(
    connection: &ClusterConnection,
    screen: &Screen,
    pod: &[String],
    all: bool,
) -> CommandResult {
    let (namespace, name) = pod_name(pod, &connection.namespace)?;
    let mut source = AnswerSource::open(connection, screen).await?;
    let explanation = match source.explain(&namespace, &name, all).await {
        // The scheduler knows only pods that ask for devices: the API server says whether there is another one.
        Err(CommandFailure::Refused(reason)) => {
            return Err(missing_pod(connection, &namespace, &name, reason).await);
        }
        explanation => explanation?,
    };
    let name = format!("pod/{}", explanation.name);
    screen.show(&explanation, [name], |_| render(&explanation, screen, all))?;
    Ok(code_of_answer(
        // A pod that has room and waits is a matter of kube-scheduler, not of devices.
        explanation.node.is_some() || explanation.fitting > 0,
    ))
}

/// The namespace and name in `NAME`, `pod NAME`, `pod/NAME` or `NAMESPACE/NAME`.
fn pod_name(words: &[String], namespace: &str) -> Result<(String, String), CommandFailure> {
    let word = match words {
        [word] => word,
        [kind, word] if is_pod(kind) => word,
        _ => {
            return Err(CommandFailure::Input(format!(
                "{:?} is no pod: write NAME, or pod NAME",
                words.join(" ")
            )));
        }
    };
    let (namespace, name) = match word.split_once('/') {
        Some((kind, name)) if is_pod(kind) => (namespace, name),
        Some((namespace, name)) => (namespace, name),
        None => (namespace, word.as_str()),
    };
    // The names go into the path of a request, which other characters would change.
    let is_plain = |text: &str| {
        !text.is_empty()
            && text
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-.".contains(&b))
    };
    if is_plain(namespace) && is_plain(name) {
        Ok((namespace.to_owned(), name.to_owned()))
    } else {
        Err(CommandFailure::Input(format!("{word:?} is no name of a pod")))
    }
}

/// Returns true for a word by which kubectl names the kind of a pod.
fn is_pod(kind: &str) -> bool {
    ["pod", "pods", "po"].contains(&kind)
}

/// The failure if the scheduler knows no such pod: the pod does not exist, or asks for no devices.
async fn missing_pod(
    connection: &ClusterConnection,
    namespace: &str,
    name: &str,
    reason: String,
) -> CommandFailure {
    // With --read-api alone there is no API server to ask.
    let Ok(client) = connection.client() else {
        return CommandFailure::Refused(format!("{reason}; name another namespace with -n"));
    };
    match Api::<Pod>::namespaced(client, namespace).get_opt(name).await {
        Ok(Some(_)) => CommandFailure::Refused(format!(
            "pod {namespace}/{name} asks for no device of gpushare, or has ended. If it waits, see `kubectl describe pod -n {namespace} {name}`"
        )),
        Ok(None) => CommandFailure::Refused(format!(
            "there is no pod {name} in namespace {namespace}; name another namespace with -n"
        )),
        // Without the right to read the pod, the words of the scheduler are the best there are.
        Err(_) => CommandFailure::Refused(reason),
    }
}

/// The explanation as text.
pub(crate) fn render(explanation: &Explanation, screen: &Screen, all: bool) -> String {
    let Explanation {
        namespace,
        name,
        asked,
        nodes,
        fitting,
        ..
    } = explanation;
    let pod = format!("{namespace}/{name}");
    if let Some(rule) = &explanation.invalid {
        // The rule holds on every node, so that nodes need not be named.
        let text =
            format!("{pod} fits no node, whatever is free: {rule}. Correct its resources or annotations.\n");
        return screen.paint(Colour::Red, &text);
    }
    if let Some(node) = &explanation.node {
        let state = if explanation.assumed {
            "is being bound to"
        } else {
            "is on"
        };
        return format!("{pod} needs {asked}; it {state} node {node}.\n");
    }
    let mut lines = format!(
        "{pod} needs {asked}; {fitting} of {} {}",
        count(*nodes, "node"),
        if *fitting == 1 { "has room" } else { "have room" }
    );
    match explanation.verdicts.iter().find(|verdict| !verdict.fits) {
        _ if *fitting > 0 => {
            let fits: Vec<&str> = explanation
                .verdicts
                .iter()
                .filter(|v| v.fits)
                .map(|v| v.node.as_str())
                .collect();
            lines += &format!(
                ": {}.\nIts devices are no reason to wait: see `kubectl describe pod -n {namespace} {name}` for taints, affinity and CPU.\n",
                fits.join(", ")
            );
        }
        Some(nearest) => lines += &format!("; {}.\n", nearest_miss(nearest)),
        None => lines += ".\nLabel a node for the device plugin, and see `kubectl gpushare doctor`.\n",
    }
    if explanation.verdicts.iter().any(|verdict| !verdict.fits) {
        lines += "\n";
        lines += &table(&explanation.verdicts, all).render(screen);
    }
    if !explanation.reasons.is_empty() {
        lines += "\n";
    }
    for (reason, n) in &explanation.reasons {
        lines += &format!("{}: {reason}\n", count(*n, "node"));
    }
    lines
}

/// The node that comes nearest, the amounts that it lacks, and the pods whose end makes room.
fn nearest_miss(verdict: &NodeVerdict) -> String {
    let mut text = format!("nearest: {}", verdict.node);
    match verdict.gpus.iter().find(|gpu| !gpu.fits) {
        Some(gpu) => text += &format!(" GPU {} {}", gpu.minor, lacks(gpu)),
        None => text += &format!(" ({})", verdict.detail.as_deref().unwrap_or(&verdict.reason)),
    }
    let pods = &verdict.would_fit_without;
    let first_pods = pods.iter().take(MAX_NAMES);
    let names: Vec<String> = first_pods
        .map(|pod| format!("{}/{}", pod.namespace, pod.name))
        .collect();
    // Of a long list the number says more than the names.
    let n_more = pods.len().saturating_sub(names.len());
    match pods.len() {
        0 => {}
        1 => text += &format!("; fits when {} ends", names.concat()),
        _ if n_more > 0 => text += &format!("; fits when {} and {n_more} more end", names.join(", ")),
        _ => text += &format!("; fits when {} end", names.join(" and ")),
    }
    text
}

/// The amounts that a GPU lacks, in words.
fn lacks(gpu: &GpuVerdict) -> String {
    let mut parts = Vec::new();
    if gpu.needed > gpu.free {
        parts.push(memory(gpu.needed - gpu.free));
    }
    if gpu.needed_core > gpu.free_core {
        parts.push(format!("{} % core", gpu.needed_core - gpu.free_core));
    }
    if gpu.no_sharer {
        parts.push("a place for one more pod".to_owned());
    }
    if parts.is_empty() {
        format!("is refused: {}", gpu.reason)
    } else {
        format!("lacks {}", parts.join(" and "))
    }
}

/// The table of the verdicts of nodes and GPUs.
fn table(verdicts: &[NodeVerdict], all: bool) -> TextTable {
    let mut table = TextTable::new([
        text("NODE", 0),
        number("GPU", 0),
        number("NEEDS", 2),
        number("FREE", 1),
        text("VERDICT", 0),
    ]);
    for verdict in verdicts {
        // The nearest GPUs come first: two of them show what a node lacks.
        let n_gpus = if all { verdict.gpus.len() } else { MAX_GPUS };
        for gpu in verdict.gpus.iter().take(n_gpus) {
            table.push([
                verdict.node.as_str().into(),
                gpu.minor.to_string().into(),
                memory(gpu.needed).into(),
                memory(gpu.free).into(),
                if gpu.fits {
                    Cell::coloured("has room", Colour::Green)
                } else {
                    lacks(gpu).into()
                },
            ]);
        }
        // A row of the node itself, if a rule of the whole node decides or the pod asks for no GPU.
        if let Some(detail) = verdict
            .detail
            .as_deref()
            .or(verdict.gpus.is_empty().then_some(verdict.reason.as_str()))
        {
            let detail = if verdict.fits { "has room" } else { detail };
            table.push([
                verdict.node.as_str().into(),
                "".into(),
                "".into(),
                "".into(),
                detail.into(),
            ]);
        }
    }
    table
}

#[cfg(test)]
mod tests;
