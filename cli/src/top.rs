//! `top`: a row for each GPU; `top nodes`: a row for each node.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use k8s_openapi::api::core::v1::Node as NodeObject;
use proto::read_api::{Gpu, Node, State, Totals};

use crate::args::{Format, Rows};
use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult};
use crate::follow::{ChangeFeed, ClusterChange};
use crate::format::{bar, count, memory, percent};
use crate::gone;
use crate::output::{Cell, Colour, Column, Screen, TextTable, number, text};
use crate::source::AnswerSource;

/// A function that makes the table of nodes or of their GPUs; its last argument is true for every column (`-o wide`).
pub(crate) type MakeTable = fn(&[Node], &Screen, bool) -> TextTable;

/// Shows all GPUs or nodes, by `table`; with `watch` also the rows of each node that changes, until the command is interrupted.
pub(crate) async fn run(
    connection: &ClusterConnection,
    screen: &Screen,
    table: MakeTable,
    rows: Rows,
) -> CommandResult {
    let Rows {
        watch,
        selector,
        sort_by,
    } = rows;
    screen.check_order(sort_by.as_deref())?;
    let mut source = AnswerSource::open(connection, screen).await?;
    // Events do not show the memory in use, and every row of one command has the same columns.
    let mut state = source.state(!watch).await?;
    let selected = match &selector {
        Some(selector) => Some(selected_nodes(connection, selector).await?),
        None => None,
    };
    keep_selected(&mut state, selected.as_ref());
    if let Some(selector) = selector
        && state.nodes.is_empty()
        && screen.is_table()
    {
        screen.complain(&format!("No node with {selector} shares GPUs."));
    } else {
        show(&state, screen, table, sort_by.as_deref())?;
    }
    if !watch {
        return Ok(ExitCode::SUCCESS);
    }
    // The feed begins at the state's revision, so that no change since then is lost.
    let changes = ChangeFeed::after(&state, source, connection, screen)?;
    follow(changes, screen, table, selected.as_ref()).await
}

/// The names of the nodes that a label selector selects.
async fn selected_nodes(
    connection: &ClusterConnection,
    selector: &str,
) -> Result<BTreeSet<String>, CommandFailure> {
    let nodes: Vec<NodeObject> = connection.list(None, Some(selector)).await?;
    Ok(nodes.into_iter().filter_map(|node| node.metadata.name).collect())
}

/// Removes all nodes but those with these names from a state, and computes the sums again.
fn keep_selected(state: &mut State, selected: Option<&BTreeSet<String>>) {
    let Some(selected) = selected else { return };
    state.nodes.retain(|node| selected.contains(&node.name));
    // The scheduler has summed up all nodes; the line under the table speaks of the rows above it.
    state.totals = Totals::default();
    state.models = BTreeMap::new();
    for node in &state.nodes {
        let totals = Totals::of_node(node);
        state.totals.add(&totals);
        state.models.entry(node.model.clone()).or_default().add(&totals);
    }
}

/// Writes a whole state in the form of `-o`; `sort_by` is the column that orders the rows.
fn show(
    state: &State,
    screen: &Screen,
    table: MakeTable,
    sort_by: Option<&str>,
) -> Result<(), CommandFailure> {
    let mut table = table(&state.nodes, screen, screen.format == Format::Wide);
    if let Some(column) = sort_by {
        table.sort_by(column)?;
    }
    let names = state.nodes.iter().map(|node| format!("node/{}", node.name));
    screen.show(state, names, |_| render(state, &table, screen))
}

/// A table of GPUs or nodes, with the sums and the problems of nodes below it.
pub(crate) fn render(state: &State, table: &TextTable, screen: &Screen) -> String {
    if state.nodes.is_empty() {
        return "No node shares GPUs. Label a node for the device plugin, and see `kubectl gpushare doctor`.\n".to_owned();
    }
    let mut lines = table.render(screen);
    if screen.has_headers {
        lines += &screen.wrap(0, &sums(state, screen));
        lines += &screen.wrap(0, &unknown_use(state));
    }
    for node in &state.nodes {
        // Problems of a node stand below the table: they are sentences, and most nodes have none.
        let problems = node.problems.iter().chain(&node.plugin);
        for problem in problems {
            let sentence = screen.wrap(0, &format!("{}: {problem}\n", node.name));
            lines += &screen.paint(Colour::Yellow, &sentence);
        }
    }
    for sentence in gone::sentences(&state.nodes).values() {
        lines += &screen.paint(Colour::Yellow, &screen.wrap(0, &format!("{sentence}\n")));
    }
    lines
}

/// The table of these nodes' GPUs.
pub(crate) fn gpus(nodes: &[Node], screen: &Screen, is_wide: bool) -> TextTable {
    let gpus = || nodes.iter().flat_map(|node| &node.gpus);
    // A column without values would only take room on the screen.
    let has_used = is_wide || gpus().any(|gpu| gpu.used.is_some());
    let has_enforcement = is_wide || gpus().any(|gpu| gpu.enforcement.is_some());
    let mut columns: Vec<Column> = vec![
        text("NODE", 0),
        number("GPU", 0),
        text("MEMORY", 3),
        number("ALLOC", 6),
        number("FREE", 0),
        number("STRANDED", 5),
        number("CORE", 4),
        number("PODS", 7),
        text("HEALTH", 2),
    ];
    if has_used {
        columns.push(number("USED", 1));
    }
    if has_enforcement {
        columns.push(text("LIMITS", 8));
    }
    if is_wide {
        columns.extend([text("MODEL", 9), number("NUMA", 11), text("UUID", 10)]);
    }
    let mut table = TextTable::new(columns);
    for node in nodes {
        for gpu in &node.gpus {
            let mut row = row(node, gpu, screen);
            if has_used {
                row.push(use_cell(gpu.used));
            }
            if has_enforcement {
                row.push(gpu.enforcement.as_deref().unwrap_or("-").into());
            }
            if is_wide {
                let numa = gpu.numa.map_or("-".to_owned(), |numa| numa.to_string());
                row.extend([text_or_dash(&node.model), numa.into(), text_or_dash(&gpu.uuid)]);
            }
            table.push(row);
        }
    }
    table
}

/// The table of these nodes, with the sums over the GPUs of each. The screen is unused, since the table has no bars.
pub(crate) fn nodes(nodes: &[Node], _: &Screen, is_wide: bool) -> TextTable {
    let used = |node: &Node| node.gpus.iter().map(|gpu| gpu.used).sum::<Option<u64>>();
    let has_used = is_wide || nodes.iter().any(|node| used(node).is_some());
    let mut columns: Vec<Column> = vec![
        text("NODE", 0),
        number("GPUS", 0),
        number("MEMORY", 3),
        number("ALLOC", 4),
        number("ALLOC%", 0),
        number("FREE", 0),
        number("STRANDED", 5),
        number("CORE", 6),
        number("PODS", 7),
        text("HEALTH", 2),
    ];
    if has_used {
        columns.push(number("USED", 1));
    }
    if is_wide {
        columns.push(text("MODEL", 8));
    }
    let mut table = TextTable::new(columns);
    // A node may be part of the state for its problems alone, which stand below the table.
    for node in nodes.iter().filter(|node| !node.gpus.is_empty()) {
        let totals = Totals::of_node(node);
        let share = percent(totals.memory.allocated, totals.memory.total);
        // GPU by GPU: the memory that an overcommitted one lacks is not taken from the others.
        let open = node.gpus.iter().filter(|gpu| gpu.healthy && !gpu.closed);
        let free: u64 = open.map(|gpu| gpu.memory.free()).sum();
        let free = match node.plugin {
            Some(_) => Cell::from("-"),
            None => memory_cell(free),
        };
        let core = percent(totals.core.allocated, totals.core.total);
        let holders = node.gpus.iter().flat_map(|gpu| &gpu.holders);
        // A set, because a pod on several GPUs holds a part of each.
        let pods: BTreeSet<&str> = holders.map(|holder| holder.uid.as_str()).collect();
        let mut row = vec![
            node.name.as_str().into(),
            amount(totals.gpus),
            memory_cell(totals.memory.total),
            memory_cell(totals.memory.allocated),
            Cell::from(format!("{share} %")).with_amount(share),
            free,
            if totals.stranded > 0 {
                Cell::coloured(memory(totals.stranded), Colour::Yellow).with_amount(totals.stranded)
            } else {
                "-".into()
            },
            Cell::from(format!("{core} %")).with_amount(core),
            amount(u32::try_from(pods.len()).unwrap_or(u32::MAX)),
            match (&node.plugin, totals.unhealthy) {
                (Some(_), _) => Cell::coloured("no plugin", Colour::Yellow),
                (None, 0) => "ok".into(),
                (None, n) => Cell::coloured(format!("{n} unhealthy"), Colour::Red),
            },
        ];
        if has_used {
            row.push(use_cell(used(node)));
        }
        if is_wide {
            row.push(text_or_dash(&node.model));
        }
        table.push(row);
    }
    table
}

fn amount(n: u32) -> Cell {
    Cell::from(n.to_string()).with_amount(n.into())
}

fn memory_cell(bytes: u64) -> Cell {
    Cell::from(memory(bytes)).with_amount(bytes)
}

/// A cell with the memory in use; `None` if the device plugin does not measure it.
fn use_cell(used: Option<u64>) -> Cell {
    used.map_or("unknown".into(), memory_cell)
}

/// The cells of one GPU in the columns that every table has.
fn row(node: &Node, gpu: &Gpu, screen: &Screen) -> Vec<Cell> {
    let allocated = memory(gpu.memory.allocated);
    // Red if pods hold more than there is: a record was edited, or a smaller GPU has replaced the one of the record.
    let allocated = if gpu.memory.allocated > gpu.memory.total {
        Cell::coloured(allocated, Colour::Red)
    } else {
        allocated.into()
    };
    // No new pod gets free memory of an unhealthy or closed GPU, or of a node whose device plugin is away.
    let takes_pods = gpu.healthy && !gpu.closed && node.plugin.is_none();
    let free = if takes_pods {
        memory_cell(gpu.memory.free())
    } else {
        Cell::from("-")
    };
    let stranded = if takes_pods && gpu.stranded > 0 {
        Cell::coloured(memory(gpu.stranded), Colour::Yellow).with_amount(gpu.stranded)
    } else {
        Cell::from("-")
    };
    let health = match (gpu.healthy, &node.plugin) {
        // An unhealthy GPU takes no pods, whatever the state of the plugin.
        (false, _) => Cell::coloured("unhealthy", Colour::Red),
        (true, Some(_)) => Cell::coloured("no plugin", Colour::Yellow),
        (true, None) if gpu.closed => Cell::coloured("closed", Colour::Yellow),
        (true, None) => Cell::from("ok"),
    };
    let core = percent(gpu.core.allocated, gpu.core.total);
    vec![
        node.name.as_str().into(),
        amount(gpu.minor),
        bar(gpu, screen).with_amount(gpu.memory.allocated),
        allocated.with_amount(gpu.memory.allocated),
        free,
        stranded,
        Cell::from(format!("{core} %")).with_amount(core),
        amount(u32::try_from(gpu.holders.len()).unwrap_or(u32::MAX)),
        health,
    ]
}

/// A cell with a dash for an empty text.
fn text_or_dash(text: &str) -> Cell {
    if text.is_empty() { "-".into() } else { text.into() }
}

/// The line with the sums over all GPUs.
fn sums(state: &State, screen: &Screen) -> String {
    let totals = &state.totals;
    let amount = totals.memory;
    let mut line = format!(
        "{} on {}: {} of {} allocated ({} %)",
        count(totals.gpus, "GPU"),
        count(totals.nodes, "node"),
        memory(amount.allocated),
        memory(amount.total),
        percent(amount.allocated, amount.total),
    );
    if totals.stranded > 0 {
        line += &format!(", {} stranded", memory(totals.stranded));
    }
    if totals.unhealthy > 0 {
        line += &format!(", {} unhealthy", count(totals.unhealthy, "GPU"));
    }
    if state.pending_total > 0 {
        let pods = count(u64::try_from(state.pending_total).unwrap_or(u64::MAX), "pod");
        let verb = if state.pending_total == 1 { "waits" } else { "wait" };
        line += &screen.paint(Colour::Yellow, &format!("; {pods} {verb}"));
    }
    line + "\n"
}

/// A line for each reason that the memory in use is not known, with the number of nodes.
pub(crate) fn unknown_use(state: &State) -> String {
    let mut lines = String::new();
    for (reason, nodes) in &state.use_unknown {
        let n_nodes = u64::try_from(nodes.len()).unwrap_or(u64::MAX);
        lines += &format!(
            "memory in use is unknown on {}: {reason}\n",
            count(n_nodes, "node")
        );
    }
    lines
}

/// Shows the rows of each selected node that changes, until the command is interrupted.
async fn follow(
    mut changes: ChangeFeed<'_>,
    screen: &Screen,
    table: MakeTable,
    selected: Option<&BTreeSet<String>>,
) -> CommandResult {
    let without_headers = screen.without_headers();
    loop {
        match changes.next().await? {
            ClusterChange::Node(node) if selected.is_none_or(|selected| selected.contains(&node.name)) => {
                let (nodes, name) = (std::slice::from_ref(&*node), format!("node/{}", node.name));
                without_headers.show(&node, [name], |is_wide| {
                    table(nodes, &without_headers, is_wide).render(&without_headers)
                })?;
            }
            ClusterChange::State(mut state) => {
                keep_selected(&mut state, selected);
                show(&state, screen, table, None)?;
            }
            ClusterChange::Node(_) | ClusterChange::Pending(_) => {}
        }
    }
}

#[cfg(test)]
mod tests;
