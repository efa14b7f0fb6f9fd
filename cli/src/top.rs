//! `top`: a row for each GPU; `top nodes`: a row for each node.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use k8s_openapi::api::core::v1::Node as NodeObject;
use proto::read_api::{Gpu, Node, State, Totals};

use crate::args::{Format, Rows};
use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult};
use crate::follow::{ChangeFeed, ClusterChange};
use crate::format::{bar, count, memory, memory_cell, percent};
use crate::gone;
use crate::output::{Cell, Colour, Screen, TextTable, number, text};
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
    screen.check_order(rows.sort_by.as_deref())?;
    let mut source = AnswerSource::open(connection, screen).await?;
    // Events do not show the memory in use, and every row of one command has the same columns.
    let mut state = source.state(!rows.watch).await?;
    let mut selected = None;
    if let Some(selector) = &rows.selector {
        let nodes = connection.list::<NodeObject>(None, Some(selector)).await?;
        selected = Some(nodes.into_iter().filter_map(|node| node.metadata.name).collect());
    }
    keep_selected(&mut state, selected.as_ref());
    if let Some(selector) = rows.selector
        && state.nodes.is_empty()
        && screen.is_table()
    {
        screen.complain(&format!("No node with {selector} shares GPUs."));
    } else {
        show(&state, screen, table, rows.sort_by.as_deref())?;
    }
    if !rows.watch {
        return Ok(ExitCode::SUCCESS);
    }
    // The feed begins at the state's revision, so that no change since then is lost.
    let changes = ChangeFeed::after(&state, source, connection, screen)?;
    follow(changes, screen, table, selected.as_ref()).await
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

pub(crate) fn gpus(nodes: &[Node], screen: &Screen, is_wide: bool) -> TextTable {
    let mut table = TextTable::new([
        text("NODE", 0),
        number("GPU", 0),
        text("MEMORY", 3),
        number("ALLOC", 6),
        number("FREE", 0),
        number("STRANDED", 5),
        number("CORE", 4),
        number("PODS", 7),
        text("HEALTH", 2),
        number("USED", 1),
        text("LIMITS", 8),
        text("MODEL", 9),
        number("NUMA", 11),
        text("UUID", 10),
    ]);
    let (mut has_used, mut has_enforcement) = (is_wide, is_wide);
    for node in nodes {
        for gpu in &node.gpus {
            has_used |= gpu.used.is_some();
            has_enforcement |= gpu.enforcement.is_some();
            table.push(row(node, gpu, screen));
        }
    }
    // A column without values would only take room on the screen.
    table.show_if(has_used, &["USED"]);
    table.show_if(has_enforcement, &["LIMITS"]);
    table.show_if(is_wide, &["MODEL", "NUMA", "UUID"]);
    table
}

fn row(node: &Node, gpu: &Gpu, screen: &Screen) -> [Cell; 14] {
    let allocated = memory_cell(gpu.memory.allocated);
    // No new pod gets free memory of an unhealthy or closed GPU, or of a node whose device plugin is away.
    let takes_pods = gpu.healthy && !gpu.closed && node.plugin.is_none();
    [
        node.name.as_str().into(),
        Cell::number(gpu.minor.into()),
        Cell::from(bar(gpu, screen)).with_amount(gpu.memory.allocated),
        // Red if pods hold more than there is: a record was edited, or a smaller GPU has replaced the one of the record.
        allocated.red_if(gpu.memory.allocated > gpu.memory.total),
        if takes_pods {
            memory_cell(gpu.memory.free())
        } else {
            "-".into()
        },
        stranded_cell(if takes_pods { gpu.stranded } else { 0 }),
        Cell::percent(percent(gpu.core.allocated, gpu.core.total)),
        Cell::number(gpu.holders.len() as u64),
        match (gpu.healthy, &node.plugin) {
            // An unhealthy GPU takes no pods, whatever the state of the plugin.
            (false, _) => Cell::coloured("unhealthy", Colour::Red),
            (true, Some(_)) => Cell::coloured("no plugin", Colour::Yellow),
            (true, None) if gpu.closed => Cell::coloured("closed", Colour::Yellow),
            (true, None) => "ok".into(),
        },
        use_cell(gpu.used),
        gpu.enforcement.as_deref().unwrap_or("-").into(),
        Cell::or_dash(&node.model),
        gpu.numa.map_or("-".into(), |numa| numa.to_string().into()),
        Cell::or_dash(&gpu.uuid),
    ]
}

/// The table of these nodes, with the sums over the GPUs of each. The screen is unused, since the table has no bars.
pub(crate) fn nodes(nodes: &[Node], _: &Screen, is_wide: bool) -> TextTable {
    let mut table = TextTable::new([
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
        number("USED", 1),
        text("MODEL", 8),
    ]);
    let mut has_used = is_wide;
    // A node may be part of the state for its problems alone, which stand below the table.
    for node in nodes.iter().filter(|node| !node.gpus.is_empty()) {
        let totals = Totals::of_node(node);
        let (mut free, mut pods) = (0, BTreeSet::new());
        for gpu in &node.gpus {
            // GPU by GPU: the memory that an overcommitted one lacks is not taken from the others.
            if gpu.healthy && !gpu.closed {
                free += gpu.memory.free();
            }
            // A set, because a pod on several GPUs holds a part of each.
            pods.extend(gpu.holders.iter().map(|holder| holder.uid.as_str()));
        }
        let used = node.gpus.iter().map(|gpu| gpu.used).sum::<Option<u64>>();
        has_used |= used.is_some();
        table.push([
            node.name.as_str().into(),
            Cell::number(totals.gpus.into()),
            memory_cell(totals.memory.total),
            memory_cell(totals.memory.allocated),
            Cell::percent(percent(totals.memory.allocated, totals.memory.total)),
            match node.plugin {
                // No new pod gets free memory of a node whose device plugin is away.
                Some(_) => "-".into(),
                None => memory_cell(free),
            },
            stranded_cell(totals.stranded),
            Cell::percent(percent(totals.core.allocated, totals.core.total)),
            Cell::number(pods.len() as u64),
            match (&node.plugin, totals.unhealthy) {
                (Some(_), _) => Cell::coloured("no plugin", Colour::Yellow),
                (None, 0) => "ok".into(),
                (None, n) => Cell::coloured(format!("{n} unhealthy"), Colour::Red),
            },
            use_cell(used),
            Cell::or_dash(&node.model),
        ]);
    }
    table.show_if(has_used, &["USED"]);
    table.show_if(is_wide, &["MODEL"]);
    table
}

fn stranded_cell(bytes: u64) -> Cell {
    if bytes > 0 {
        Cell::coloured(memory(bytes), Colour::Yellow).with_amount(bytes)
    } else {
        "-".into()
    }
}

/// A cell with the memory in use; `None` if the device plugin does not measure it.
fn use_cell(used: Option<u64>) -> Cell {
    used.map_or("unknown".into(), memory_cell)
}

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
        let pods = count(state.pending_total as u64, "pod");
        let verb = if state.pending_total == 1 { "waits" } else { "wait" };
        line += &screen.paint(Colour::Yellow, &format!("; {pods} {verb}"));
    }
    line + "\n"
}

/// A line for each reason that the memory in use is not known, with the number of nodes.
pub(crate) fn unknown_use(state: &State) -> String {
    let mut lines = String::new();
    for (reason, nodes) in &state.use_unknown {
        let n_nodes = count(nodes.len() as u64, "node");
        lines += &format!("memory in use is unknown on {n_nodes}: {reason}\n");
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
