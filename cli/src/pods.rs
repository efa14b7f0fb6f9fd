//! `top pods`: a row for each pod that holds a share of a GPU, or waits for one.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use k8s_openapi::api::core::v1::Pod;
use proto::read_api::State;
use serde::Serialize;

use crate::args::{Format, Rows};
use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult};
use crate::follow::{ChangeFeed, ClusterChange};
use crate::format::{joined, memory, memory_cell};
use crate::gone;
use crate::output::{Cell, Colour, Screen, TextTable, number, text};
use crate::source::AnswerSource;
use crate::top::unknown_use;

/// The row of one pod, which is also its JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodRow {
    namespace: String,
    name: String,
    uid: String,
    node: Option<String>,
    /// Minor numbers of the GPUs on which the pod holds a part.
    gpus: Vec<u32>,
    asked: String,
    /// Bytes of memory that the pod may use, on all its GPUs together.
    limit: u64,
    /// Percent of computing power that the pod holds, on all its GPUs together.
    core: u64,
    /// Bytes of memory in use by the pod's containers; `None` if it is not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<u64>,
    /// True if a container of the pod uses more memory of a GPU than its share.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    over_share: bool,
    /// The reason that the scheduler cannot read the pod's record.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// The GPUs of the pod's record that its node does not have any more.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gone: Vec<String>,
}

/// Shows the pods of a namespace, or of all; with `watch` also each pod whose row changes, until the command is interrupted.
pub(crate) async fn run(
    connection: &ClusterConnection,
    screen: &Screen,
    all_namespaces: bool,
    args: Rows,
) -> CommandResult {
    screen.check_order(args.sort_by.as_deref())?;
    let mut source = AnswerSource::open(connection, screen).await?;
    // Events do not show the memory in use, and every row of one command has the same columns.
    let state = source.state(!args.watch).await?;
    let mut selection = PodSelection {
        connection,
        all_namespaces,
        selector: args.selector.as_deref(),
        selected: None,
        seen: BTreeSet::new(),
    };
    let rows = selection.rows(&state).await?;
    if rows.is_empty() && !all_namespaces {
        connection.check_namespace(&connection.namespace).await?;
    }
    if rows.is_empty() && state.names_hidden {
        return Err(CommandFailure::Refused(
            "the scheduler shows this user no names of pods: `top pods` takes the right to list pods in the namespace"
                .to_owned(),
        ));
    }
    let is_table = screen.is_table();
    // A line of column names alone does not say that there is no pod.
    if is_table && rows.is_empty() {
        let pod = match &args.selector {
            Some(selector) => format!("pod with {selector}"),
            None => "pod".to_owned(),
        };
        let place = if all_namespaces {
            "the cluster".to_owned()
        } else {
            format!("namespace {}; -A shows all namespaces", connection.namespace)
        };
        screen.complain(&format!("No {pod} asks for a share of a GPU in {place}."));
    } else {
        show(&rows, screen, all_namespaces, args.sort_by.as_deref())?;
    }
    if is_table && screen.has_headers {
        let sentences = gone::sentences(&state.nodes);
        for sentence in rows.iter().filter_map(|row| sentences.get(&row.uid)) {
            screen.print(&screen.paint(Colour::Yellow, &screen.wrap(0, &format!("{sentence}\n"))))?;
        }
        screen.print(&screen.wrap(0, &unknown_use(&state)))?;
    }
    if !args.watch {
        return Ok(ExitCode::SUCCESS);
    }
    let changes = ChangeFeed::after(&state, source, connection, screen)?;
    follow(changes, screen, &mut selection, rows).await
}

/// Shows the row of each selected pod that is new or changes, until the command is interrupted.
async fn follow(
    mut changes: ChangeFeed<'_>,
    screen: &Screen,
    selection: &mut PodSelection<'_>,
    rows: Vec<PodRow>,
) -> CommandResult {
    let without_headers = screen.without_headers();
    let mut shown: BTreeMap<String, PodRow> = BTreeMap::new();
    for row in rows {
        shown.insert(row.uid.clone(), row);
    }
    loop {
        let part = match changes.next().await? {
            // Each change as a state of its own, so that the same code makes the rows of a change and of a whole state.
            ClusterChange::Node(node) => State {
                nodes: vec![*node],
                ..State::default()
            },
            ClusterChange::Pending(pending) => State {
                pending,
                ..State::default()
            },
            ClusterChange::State(state) => *state,
        };
        let mut new_rows = Vec::new();
        for row in selection.rows(&part).await? {
            if shown.get(&row.uid) != Some(&row) {
                shown.insert(row.uid.clone(), row.clone());
                new_rows.push(row);
            }
        }
        if !new_rows.is_empty() {
            show(&new_rows, &without_headers, selection.all_namespaces, None)?;
        }
    }
}

fn show(
    rows: &[PodRow],
    screen: &Screen,
    all_namespaces: bool,
    sort_by: Option<&str>,
) -> Result<(), CommandFailure> {
    let mut table = table(rows, all_namespaces, screen.format == Format::Wide);
    if let Some(column) = sort_by {
        table.sort_by(column)?;
    }
    let names = rows.iter().map(|row| format!("pod/{}", row.name));
    screen.show(&rows, names, |_| table.render(screen))
}

struct PodSelection<'a> {
    connection: &'a ClusterConnection,
    all_namespaces: bool,
    selector: Option<&'a str>,
    /// The UIDs of the pods that the label selector selects; `None` without a selector.
    selected: Option<BTreeSet<String>>,
    /// The UIDs of all pods so far; the label selector is evaluated again once there is another.
    seen: BTreeSet<String>,
}

impl PodSelection<'_> {
    async fn rows(&mut self, state: &State) -> Result<Vec<PodRow>, CommandFailure> {
        let (all_namespaces, namespace) = (self.all_namespaces, self.connection.namespace.as_str());
        let mut found = rows(state);
        // A pod without a name is in a namespace whose pods the user may not list.
        found.retain(|row| !row.name.is_empty() && (all_namespaces || row.namespace == namespace));
        let has_new = found.iter().any(|row| !self.seen.contains(&row.uid));
        // Events carry no labels, so a new pod takes another list of the pods that the selector selects.
        if let Some(selector) = self.selector
            && (has_new || self.selected.is_none())
        {
            let namespace = (!all_namespaces).then_some(namespace);
            let pods: Vec<Pod> = self.connection.list(namespace, Some(selector)).await?;
            self.selected = Some(pods.into_iter().filter_map(|pod| pod.metadata.uid).collect());
        }
        for row in &found {
            self.seen.insert(row.uid.clone());
        }
        if let Some(selected) = &self.selected {
            found.retain(|row| selected.contains(&row.uid));
        }
        Ok(found)
    }
}

/// The rows of all pods of a state by namespace and name: those that hold a part of a GPU, and those that wait.
fn rows(state: &State) -> Vec<PodRow> {
    let mut by_uid: BTreeMap<&str, PodRow> = BTreeMap::new();
    for node in &state.nodes {
        for gpu in &node.gpus {
            for holder in &gpu.holders {
                let row = by_uid.entry(&holder.uid).or_insert_with(|| PodRow {
                    namespace: holder.namespace.clone(),
                    name: holder.name.clone(),
                    uid: holder.uid.clone(),
                    node: Some(node.name.clone()),
                    asked: holder.asked.clone(),
                    problem: holder.problem.clone(),
                    gone: holder.gone.clone(),
                    ..PodRow::default()
                });
                row.gpus.push(gpu.minor);
                // A pod with several GPUs has one row, with the sum over its GPUs.
                row.limit = row.limit.saturating_add(holder.memory);
                row.core = row.core.saturating_add(holder.core);
                if let Some(used) = holder.used {
                    row.used = Some(row.used.unwrap_or(0).saturating_add(used));
                }
                row.over_share |= holder.over_share;
            }
        }
    }
    // A pod that holds something already keeps its row: its binding is under way.
    for pod in &state.pending {
        by_uid.entry(&pod.uid).or_insert_with(|| PodRow {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            asked: pod.asked.clone(),
            ..PodRow::default()
        });
    }
    let mut rows: Vec<PodRow> = by_uid.into_values().collect();
    // A StatefulSet may have an old and a new pod of one name for a moment: the UID makes the order stable.
    rows.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
    rows
}

fn table(rows: &[PodRow], all_namespaces: bool, is_wide: bool) -> TextTable {
    let mut table = TextTable::new([
        text("NAMESPACE", 0),
        text("NAME", 0),
        text("NODE", 0),
        text("GPUS", 2),
        text("ASKED", 3),
        number("LIMIT", 1),
        number("CORE", 4),
        number("USED", 0),
        text("PROBLEM", 5),
    ]);
    for row in rows {
        let is_placed = row.node.is_some();
        table.push([
            row.namespace.as_str().into(),
            row.name.as_str().into(),
            match &row.node {
                Some(node) => node.as_str().into(),
                None => Cell::coloured("(waits)", Colour::Yellow),
            },
            if is_placed {
                joined(&row.gpus, ",").into()
            } else {
                "-".into()
            },
            row.asked.as_str().into(),
            if is_placed {
                memory_cell(row.limit)
            } else {
                "-".into()
            },
            if row.core == 0 {
                "-".into()
            } else {
                Cell::percent(row.core)
            },
            match row.used {
                Some(used) if row.over_share => {
                    Cell::coloured(over_share(used, row.limit), Colour::Red).with_amount(used)
                }
                Some(used) => memory_cell(used),
                None if is_placed => "unknown".into(),
                None => "-".into(),
            },
            row.problem.as_deref().unwrap_or("-").into(),
        ]);
    }
    table.show_if(all_namespaces, &["NAMESPACE"]);
    table.show_if(is_wide || rows.iter().any(|row| row.used.is_some()), &["USED"]);
    table.show_if(is_wide, &["PROBLEM"]);
    table
}

/// The memory in use of a pod with a container that uses more than its share of a GPU.
fn over_share(used: u64, limit: u64) -> String {
    let used_text = memory(used);
    if used > limit {
        format!("{used_text} (over {})", memory(limit))
    } else {
        // The pod as a whole is within its limit: other containers, or its part of another GPU, use less.
        format!("{used_text} (over in part)")
    }
}

#[cfg(test)]
mod tests {
    use proto::read_api::{Gpu, Holder, Node};

    use super::*;

    const GIB: u64 = 1 << 30;

    /// A use that is known and over its share has the share beside it; another one has not.
    #[test]
    fn a_use_over_its_share_is_marked() {
        let holder = |name: &str, used: Option<u64>, over_share| Holder {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: name.to_owned(),
            memory: 8 * GIB,
            used,
            over_share,
            ..Holder::default()
        };
        let gpu = |minor, holders| Gpu {
            minor,
            holders,
            ..Gpu::default()
        };
        let state = State {
            nodes: vec![Node {
                gpus: vec![
                    gpu(
                        0,
                        vec![
                            holder("at-its-share", Some(8 * GIB), false),
                            holder("over", Some(16 * GIB), true),
                            holder("over-on-one-gpu", Some(9 * GIB), true),
                            holder("unknown", None, false),
                        ],
                    ),
                    gpu(1, vec![holder("over-on-one-gpu", Some(GIB), false)]),
                ],
                ..Node::default()
            }],
            ..State::default()
        };
        insta::assert_snapshot!(table(&rows(&state), false, false).render(&Screen::PLAIN));
    }
}
