//! `explain`: the reasons for which a pod waits.

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use proto::pod::GroupKind;
use proto::pod_group::GroupDomain;
use proto::read_api::{ExplainedGroup, Explanation, GpuVerdict, MemberPlace, NodeVerdict};

use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult, code_of_answer};
use crate::format::{count, joined, memory};
use crate::gone;
use crate::output::{Cell, Colour, Screen, TextTable, number, text};
use crate::pod_path::is_plain;
use crate::source::AnswerSource;

/// Most GPUs of one node in the table, unless `--all` asks for every GPU.
const MAX_GPUS: usize = 2;

/// Explains a pod. The answer, in the exit code, is no if the pod waits and no node takes it, or its group is refused.
pub(crate) async fn run(
    connection: &ClusterConnection,
    screen: &Screen,
    pod: &[String],
    all: bool,
) -> CommandResult {
    let (namespace, name) = pod_name(pod, &connection.namespace)?;
    let mut source = AnswerSource::open(connection, screen).await?;
    let explanation = match source.explain(&namespace, &name, all).await {
        // The scheduler knows only pods that ask for devices; the API server knows of every pod.
        Err(CommandFailure::Refused(reason)) => {
            connection.check_namespace(&namespace).await?;
            return Err(missing_pod(connection, &namespace, &name, reason).await);
        }
        explanation => explanation?,
    };
    let name = format!("pod/{}", explanation.name);
    screen.show(&explanation, [name], |_| render(&explanation, screen, all))?;
    let is_refused = matches!(&explanation.group, Some(ExplainedGroup { refused: Some(_), .. }));
    Ok(code_of_answer(
        // Yes also for a pod that has room and waits: it waits for kube-scheduler, not for devices.
        explanation.node.is_some() || (explanation.fitting > 0 && !is_refused),
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
    if is_plain(namespace) && is_plain(name) {
        Ok((namespace.to_owned(), name.to_owned()))
    } else {
        Err(CommandFailure::Input(format!(
            "{word:?} is no name of a pod: write NAME, or NAMESPACE/NAME"
        )))
    }
}

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
        // Without the right to read the pod, the scheduler's reason has to do.
        Err(_) => CommandFailure::Refused(reason),
    }
}

/// The explanation as text: first the reason that decides, then the words of kube-scheduler, the group, and the nearest nodes.
pub(crate) fn render(explanation: &Explanation, screen: &Screen, all: bool) -> String {
    let (asked, fitting) = (&explanation.asked, explanation.fitting);
    let pod = format!("{}/{}", explanation.namespace, explanation.name);
    if let Some(node) = &explanation.node {
        let state = if explanation.assumed {
            "is being bound to"
        } else {
            "is on"
        };
        let mut text = screen.wrap(0, &format!("{pod} needs {asked}; it {state} node {node}.\n"));
        text += &warning(explanation, screen);
        if !explanation.gone.is_empty() {
            let sentence = gone::sentence(&pod, node, &explanation.gone, &explanation.counted_on);
            text += &screen.paint(Colour::Yellow, &screen.wrap(0, &format!("{sentence}\n")));
        }
        text += &group(explanation, screen);
        return text;
    }
    let first = match &explanation.invalid {
        // The rule holds on every node, so that nodes need not be counted.
        Some(_) => format!("{pod} waits.\n"),
        None => format!(
            "{pod} needs {asked}; {fitting} of {} {} it.\n",
            count(explanation.nodes, "node"),
            if fitting == 1 { "takes" } else { "take" }
        ),
    };
    let mut lines = screen.wrap(0, &first);
    lines += &warning(explanation, screen);
    for (idx, sentence) in explanation.summary.iter().enumerate() {
        let sentence = &screen.wrap(0, sentence);
        if idx == 0 && fitting == 0 {
            lines += &screen.paint(Colour::Red, sentence);
        } else {
            lines += sentence;
        }
        lines += "\n";
    }
    // The summary names the rule, unless the scheduler is of an older version, which sends none.
    if let Some(rule) = &explanation.invalid
        && explanation.summary.is_empty()
    {
        let sentence = format!(
            "It fits no node, whatever is free: {rule}. Correct the pod's manifest, and create the pod again.\n"
        );
        lines += &screen.wrap(0, &sentence);
    }
    if let Some(words) = &explanation.kube_scheduler {
        lines += &screen.wrap(0, &format!("kube-scheduler says: {words}\n"));
    }
    lines += &group(explanation, screen);
    if explanation.invalid.is_some() {
        return lines;
    }
    if explanation.verdicts.iter().any(|verdict| !verdict.fits) {
        lines += "\n";
        lines += &table(&explanation.verdicts, all).render(screen);
        if !all && is_cut(explanation) {
            lines += "The nearest nodes and GPUs; --all shows every one.\n";
        }
    }
    if !explanation.reasons.is_empty() {
        lines += "\n";
    }
    for (reason, n) in &explanation.reasons {
        lines += &screen.wrap(2, &format!("{}: {reason}\n", count(*n, "node")));
    }
    lines
}

fn warning(explanation: &Explanation, screen: &Screen) -> String {
    let Some(warning) = &explanation.warning else {
        return String::new();
    };
    screen.paint(Colour::Yellow, &screen.wrap(0, &format!("Warning: {warning}\n")))
}

/// The lines about the pod's group: its name and size, and if it has to share a domain the places of its members; empty for a pod
/// of no group.
fn group(explanation: &Explanation, screen: &Screen) -> String {
    let Some(group) = &explanation.group else {
        return String::new();
    };
    let kind = match group.kind {
        GroupKind::Native => "PodGroup",
        GroupKind::Coscheduling => "coscheduling",
        GroupKind::Koordinator => "Koordinator",
    };
    let ExplainedGroup {
        name, size, domain, ..
    } = group;
    let mut first = format!("group: {name} ({kind}), size {size}");
    if *domain != GroupDomain::Any {
        first += &format!(", domain {} {}", domain.as_str(), group.policy.as_str());
    }
    let mut lines = screen.wrap(0, &format!("{first}\n"));
    if !group.differing.is_empty() {
        let names = group.differing.join(", ");
        lines += &screen.wrap(
            4,
            &format!("  another domain in the annotations, which does not count: {names}\n"),
        );
    }
    if *domain == GroupDomain::Any {
        return lines;
    }
    if !group.bound.is_empty() {
        lines += &screen.wrap(4, &format!("  bound: {}\n", places(&group.bound)));
    }
    if let Some(room) = &group.room {
        let mut parts = Vec::new();
        if !room.members.is_empty() {
            parts.push(places(&room.members));
        }
        if room.open > 0 {
            let open = count(room.open, "place");
            parts.push(format!(
                "{open} on {}{} for members to come",
                room.node,
                on_gpus(&room.open_gpus)
            ));
        }
        lines += &screen.wrap(4, &format!("  kept: {}\n", parts.join(", ")));
    }
    if let Some(text) = &group.refused {
        lines += &screen.paint(Colour::Red, &screen.wrap(4, &format!("  refused: {text}\n")));
    }
    // With as many members bound as the group needs, no room has to be kept.
    let is_placed = group.bound.len() >= usize::try_from(group.size).unwrap_or(usize::MAX);
    if group.room.is_none() && group.refused.is_none() && !is_placed {
        lines += "  no room is kept now\n";
    }
    lines
}

fn places(members: &[MemberPlace]) -> String {
    let mut parts = Vec::with_capacity(members.len());
    for MemberPlace { name, node, gpus } in members {
        parts.push(format!("{name} on {node}{}", on_gpus(gpus)));
    }
    parts.join(", ")
}

fn on_gpus(gpus: &[u32]) -> String {
    match gpus {
        [] => String::new(),
        [gpu] => format!(" (GPU {gpu})"),
        gpus => format!(" (GPUs {})", joined(gpus, ", ")),
    }
}

/// Returns true if the table without `--all` leaves out nodes or GPUs.
fn is_cut(explanation: &Explanation) -> bool {
    let n_nodes = u32::try_from(explanation.verdicts.len()).unwrap_or(u32::MAX);
    let has_more_gpus = |verdict: &NodeVerdict| verdict.gpus.len() > shown_gpus(verdict, false).count();
    n_nodes < explanation.nodes || explanation.verdicts.iter().any(has_more_gpus)
}

/// Returns true if the node itself refuses the pod, whatever room its GPUs have.
fn node_refuses(verdict: &NodeVerdict) -> bool {
    !verdict.fits && verdict.detail.is_some()
}

/// The GPUs of a node that are listed, the nearest first: all of them with `all`, or else two; and of a node that refuses the pod
/// itself only GPUs without room.
fn shown_gpus(verdict: &NodeVerdict, all: bool) -> impl Iterator<Item = &GpuVerdict> {
    let n_gpus = if all { verdict.gpus.len() } else { MAX_GPUS };
    let is_shown = move |gpu: &&GpuVerdict| all || !(node_refuses(verdict) && gpu.fits);
    verdict.gpus.iter().filter(is_shown).take(n_gpus)
}

/// The table of verdicts: a row for a node that refuses or takes the pod by itself, and rows for its [`shown_gpus`].
fn table(verdicts: &[NodeVerdict], all: bool) -> TextTable {
    let mut table = TextTable::new([
        text("NODE", 0),
        number("GPU", 0),
        number("NEEDS", 2),
        number("FREE", 1),
        text("VERDICT", 0),
    ]);
    for verdict in verdicts {
        // The node's own refusal comes first: it decides, whatever room the GPUs have.
        if node_refuses(verdict) || (!verdict.fits && verdict.gpus.is_empty()) {
            let detail = verdict.detail.as_deref().unwrap_or(&verdict.reason);
            table.push(node_row(verdict, detail.into()));
        }
        for gpu in shown_gpus(verdict, all) {
            let lacks = if gpu.lacks.is_empty() {
                &gpu.reason
            } else {
                &gpu.lacks
            };
            table.push([
                verdict.node.as_str().into(),
                gpu.minor.to_string().into(),
                memory(gpu.needed).into(),
                memory(gpu.free).into(),
                if gpu.fits {
                    Cell::coloured("has room", Colour::Green)
                } else {
                    lacks.as_str().into()
                },
            ]);
        }
        if verdict.fits && verdict.gpus.is_empty() {
            table.push(node_row(verdict, Cell::coloured("takes it", Colour::Green)));
        }
    }
    table
}

/// A row about the node itself, without a GPU and amounts.
fn node_row(verdict: &NodeVerdict, answer: Cell) -> [Cell; 5] {
    let node = verdict.node.as_str();
    [node.into(), "".into(), "".into(), "".into(), answer]
}

#[cfg(test)]
mod tests;
