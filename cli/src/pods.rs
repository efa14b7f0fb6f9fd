//! `top pods`: a row for each pod that holds a share of a GPU, or waits for one.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use proto::read_api::State;
use serde::Serialize;

use crate::args::{Format, OutputArgs};
use crate::connection::Connection;
use crate::failure::{Failure, Verdict};
use crate::format::memory;
use crate::output::{Cell, Colour, Screen, Table, number, text};
use crate::source::Source;
use crate::top::unknown_use;

/// One pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodRow {
    namespace: String,
    name: String,
    uid: String,
    /// `None` while it waits.
    node: Option<String>,
    /// Minor numbers.
    gpus: Vec<u32>,
    asked: String,
    /// Bytes that it may use, over all its GPUs.
    limit: u64,
    core: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Shows the pods of a namespace, or of all.
pub(crate) async fn run(
    connection: &Connection,
    screen: &Screen,
    output: &OutputArgs,
    all_namespaces: bool,
    selector: Option<String>,
) -> Result<Verdict, Failure> {
    let state = Source::open(connection, screen).await?.state(true).await?;
    let mut rows = rows(&state);
    rows.retain(|row| is_shown(row, connection, all_namespaces));
    if rows.is_empty() && state.names_hidden {
        return Err(Failure::Refused(
            "the scheduler shows this user no names of pods: `top pods` takes the right to list pods in the namespace"
                .to_owned(),
        ));
    }
    if let Some(selector) = &selector {
        let uids = selected_pods(connection, selector, all_namespaces).await?;
        rows.retain(|row| uids.contains(&row.uid));
    }
    match output.output {
        format @ (Format::Json | Format::Yaml) => screen.print_as(format, &rows)?,
        Format::Name => {
            let names: Vec<String> = rows.iter().map(|row| format!("pod/{}\n", row.name)).collect();
            screen.print(&names.concat())?;
        }
        _ if rows.is_empty() => {
            let place = if all_namespaces {
                "the cluster".to_owned()
            } else {
                format!("namespace {}; -A shows all namespaces", connection.namespace)
            };
            screen.complain(&format!("No pod asks for a share of a GPU in {place}."));
        }
        format => {
            let table = table(&rows, all_namespaces, format == Format::Wide);
            screen.print(&table.render(screen))?;
            if screen.has_headers {
                screen.print(&unknown_use(&state))?;
            }
        }
    }
    Ok(Verdict::Yes)
}

/// Returns true for pods of the namespaces in question. Pods whose names are hidden are in others.
fn is_shown(row: &PodRow, connection: &Connection, all_namespaces: bool) -> bool {
    !row.name.is_empty() && (all_namespaces || row.namespace == connection.namespace)
}

async fn selected_pods(
    connection: &Connection,
    selector: &str,
    all: bool,
) -> Result<BTreeSet<String>, Failure> {
    let pods: Vec<Pod> = if all {
        connection.list("pods", Some(selector)).await?
    } else {
        connection
            .list_in(&connection.namespace, "pods", Some(selector))
            .await?
    };
    Ok(pods.into_iter().filter_map(|pod| pod.metadata.uid).collect())
}

/// The pods of a state by namespace and name: those that hold something, and those that wait.
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
                    ..PodRow::default()
                });
                row.gpus.push(gpu.minor);
                row.limit = row.limit.saturating_add(holder.memory);
                row.core = row.core.saturating_add(holder.core);
                if let Some(used) = holder.used {
                    row.used = Some(row.used.unwrap_or(0).saturating_add(used));
                }
            }
        }
    }
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
    rows.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
    rows
}

fn table(rows: &[PodRow], all_namespaces: bool, is_wide: bool) -> Table {
    let has_used = is_wide || rows.iter().any(|row| row.used.is_some());
    let mut columns = Vec::new();
    if all_namespaces {
        columns.push(text("NAMESPACE", 0));
    }
    columns.extend([
        text("NAME", 0),
        text("NODE", 1),
        text("GPUS", 2),
        text("ASKED", 0),
        number("LIMIT", 1),
        number("CORE", 3),
    ]);
    if has_used {
        columns.push(number("USED", 1));
    }
    if is_wide {
        columns.push(text("PROBLEM", 4));
    }
    let mut table = Table::new(columns);
    for row in rows {
        let mut cells: Vec<Cell> = Vec::new();
        if all_namespaces {
            cells.push(row.namespace.as_str().into());
        }
        let gpus: Vec<String> = row.gpus.iter().map(ToString::to_string).collect();
        let is_placed = row.node.is_some();
        let or_dash = |text: String| if is_placed { text } else { "-".to_owned() };
        cells.extend([
            row.name.as_str().into(),
            match &row.node {
                Some(node) => Cell::from(node.as_str()),
                None => Cell::coloured("(waits)", Colour::Yellow),
            },
            or_dash(gpus.join(",")).into(),
            row.asked.as_str().into(),
            or_dash(memory(row.limit)).into(),
            if row.core == 0 {
                "-".into()
            } else {
                format!("{} %", row.core).into()
            },
        ]);
        if has_used {
            cells.push(match row.used {
                // More than the limit is the reason to look at this column.
                Some(used) if used > row.limit => Cell::coloured(memory(used), Colour::Red),
                Some(used) => memory(used).into(),
                None if is_placed => "unknown".into(),
                None => "-".into(),
            });
        }
        if is_wide {
            cells.push(row.problem.as_deref().unwrap_or("-").into());
        }
        table.push(cells);
    }
    table
}
