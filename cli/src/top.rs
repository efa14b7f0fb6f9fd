//! `top`: a row for each GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Node as NodeObject;
use proto::read_api::{Gpu, Node, State, Totals};
use tokio::time::sleep;

use crate::args::{Format, OutputArgs};
use crate::connection::Connection;
use crate::failure::{Failure, Verdict};
use crate::format::{bar, count, memory, percent};
use crate::output::{Cell, Colour, Column, Screen, Table, number, text};
use crate::read_api::ReadApi;
use crate::source::Source;

/// The pause before a lost connection is opened again.
const PAUSE: Duration = Duration::from_secs(2);

/// Shows all GPUs, and with `watch` those of nodes that change.
pub(crate) async fn run(
    connection: &Connection,
    screen: &Screen,
    output: &OutputArgs,
    watch: bool,
    selector: Option<String>,
) -> Result<Verdict, Failure> {
    let mut source = Source::open(connection, screen).await?;
    // Events do not show the memory in use, and every row of one command has the same columns.
    let mut state = source.state(!watch).await?;
    let selected = match &selector {
        Some(selector) => Some(selected_nodes(connection, selector).await?),
        None => None,
    };
    select(&mut state, selected.as_ref());
    show(&state, screen, output)?;
    match source {
        Source::Scheduler(api) if watch => {
            follow(connection, screen, output, api, state, selected.as_ref()).await
        }
        Source::Objects(_) if watch => Err(Failure::Refused(
            "--watch follows the scheduler's events, and the scheduler does not answer".to_owned(),
        )),
        _ => Ok(Verdict::Yes),
    }
}

async fn selected_nodes(connection: &Connection, selector: &str) -> Result<BTreeSet<String>, Failure> {
    let nodes: Vec<NodeObject> = connection.list("nodes", Some(selector)).await?;
    Ok(nodes.into_iter().filter_map(|node| node.metadata.name).collect())
}

/// Leaves the nodes with these names, and sums up again.
fn select(state: &mut State, selected: Option<&BTreeSet<String>>) {
    let Some(selected) = selected else { return };
    state.nodes.retain(|node| selected.contains(&node.name));
    state.totals = Totals::default();
    state.models = BTreeMap::new();
    for node in &state.nodes {
        let totals = Totals::of_node(node);
        state.totals.add(&totals);
        state.models.entry(node.model.clone()).or_default().add(&totals);
    }
}

fn show(state: &State, screen: &Screen, output: &OutputArgs) -> Result<(), Failure> {
    match output.output {
        format @ (Format::Json | Format::Yaml) => screen.print_as(format, state),
        Format::Name => {
            let mut names = String::new();
            for node in &state.nodes {
                names += &format!("node/{}\n", node.name);
            }
            screen.print(&names)
        }
        format => screen.print(&render(state, screen, format == Format::Wide)),
    }
}

/// The table and the sums.
pub(crate) fn render(state: &State, screen: &Screen, is_wide: bool) -> String {
    if state.nodes.is_empty() {
        return "No node shares GPUs. Label a node for the device plugin, and see `kubectl gpushare doctor`.\n".to_owned();
    }
    let mut lines = table(&state.nodes, screen, is_wide).render(screen);
    if screen.has_headers {
        lines += &sums(state, screen);
        lines += &unknown_use(state);
    }
    for node in &state.nodes {
        let problems = node.problems.iter().chain(&node.plugin);
        for problem in problems {
            lines += &screen.paint(Colour::Yellow, &format!("{}: {problem}\n", node.name));
        }
    }
    lines
}

/// The table of these nodes' GPUs.
fn table(nodes: &[Node], screen: &Screen, is_wide: bool) -> Table {
    let gpus = || nodes.iter().flat_map(|node| &node.gpus);
    let has_used = is_wide || gpus().any(|gpu| gpu.used.is_some());
    let has_enforcement = is_wide || gpus().any(|gpu| gpu.enforcement.is_some());
    let mut columns: Vec<Column> = vec![
        text("NODE", 0),
        number("GPU", 0),
        text("MEMORY", 1),
        number("ALLOC", 5),
        number("FREE", 0),
        number("STRANDED", 4),
        number("CORE", 3),
        number("PODS", 6),
        text("HEALTH", 2),
    ];
    if has_used {
        columns.push(number("USED", 7));
    }
    if has_enforcement {
        columns.push(text("LIMITS", 8));
    }
    if is_wide {
        columns.extend([text("MODEL", 9), number("NUMA", 11), text("UUID", 10)]);
    }
    let mut table = Table::new(columns);
    for node in nodes {
        for gpu in &node.gpus {
            let mut row = row(node, gpu, screen);
            if has_used {
                row.push(gpu.used.map_or("unknown".into(), |used| memory(used).into()));
            }
            if has_enforcement {
                row.push(gpu.enforcement.as_deref().unwrap_or("-").into());
            }
            if is_wide {
                let numa = gpu.numa.map_or("-".to_owned(), |numa| numa.to_string());
                row.extend([dash(&node.model), numa.into(), dash(&gpu.uuid)]);
            }
            table.push(row);
        }
    }
    table
}

fn row(node: &Node, gpu: &Gpu, screen: &Screen) -> Vec<Cell> {
    let allocated = memory(gpu.memory.allocated);
    let allocated = if gpu.memory.allocated > gpu.memory.total {
        Cell::coloured(allocated, Colour::Red)
    } else {
        allocated.into()
    };
    let stranded = match gpu.stranded {
        0 => Cell::from("-"),
        stranded => Cell::coloured(memory(stranded), Colour::Yellow),
    };
    let health = match (gpu.healthy, &node.plugin) {
        (false, _) => Cell::coloured("unhealthy", Colour::Red),
        (true, Some(_)) => Cell::coloured("no plugin", Colour::Yellow),
        (true, None) => Cell::from("ok"),
    };
    vec![
        node.name.as_str().into(),
        gpu.minor.to_string().into(),
        bar(gpu, screen),
        allocated,
        memory(gpu.memory.free()).into(),
        stranded,
        format!("{} %", percent(gpu.core.allocated, gpu.core.total)).into(),
        gpu.holders.len().to_string().into(),
        health,
    ]
}

fn dash(text: &str) -> Cell {
    if text.is_empty() { "-".into() } else { text.into() }
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
        let pods = count(u64::try_from(state.pending_total).unwrap_or(u64::MAX), "pod");
        let verb = if state.pending_total == 1 { "waits" } else { "wait" };
        line += &screen.paint(Colour::Yellow, &format!("; {pods} {verb}"));
    }
    line + "\n"
}

/// The reasons for which the memory in use is not known, with the number of nodes.
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

/// Shows the GPUs of nodes that change. A lost connection is opened again, and resumes after the last event.
async fn follow(
    connection: &Connection,
    screen: &Screen,
    output: &OutputArgs,
    mut api: ReadApi,
    state: State,
    selected: Option<&BTreeSet<String>>,
) -> Result<Verdict, Failure> {
    let mut last = state.revision;
    loop {
        let ended = follow_connection(screen, output, &mut api, &mut last, selected).await;
        match ended {
            Err(failure @ Failure::NoReadApi { .. }) => {
                screen.complain(&format!("note: {failure}; connecting again"));
                api = connect_again(connection).await?;
            }
            Err(failure) => return Err(failure),
            // Another process answers, which does not know what this client has seen.
            Ok(()) => {
                api = connect_again(connection).await?;
                match api.get::<State>("state").await {
                    Ok(mut state) => {
                        select(&mut state, selected);
                        show(&state, screen, output)?;
                        last = state.revision;
                    }
                    // It has not seen every object yet, and sends the same reset again.
                    Err(Failure::NoReadApi { .. }) => sleep(PAUSE).await,
                    Err(failure) => return Err(failure),
                }
            }
        }
    }
}

/// Connects as soon as a replica is ready.
async fn connect_again(connection: &Connection) -> Result<ReadApi, Failure> {
    loop {
        match ReadApi::connect(connection).await {
            Err(Failure::NoReadApi { .. } | Failure::Unreachable(_)) => sleep(PAUSE).await,
            connected => return connected,
        }
    }
}

/// Follows changes until the connection is lost, or the server asks to read the state again.
async fn follow_connection(
    screen: &Screen,
    output: &OutputArgs,
    api: &mut ReadApi,
    last: &mut String,
    selected: Option<&BTreeSet<String>>,
) -> Result<(), Failure> {
    let without_headers = Screen {
        has_headers: false,
        ..*screen
    };
    let mut events = api.follow(last).await?;
    loop {
        let event = events.next().await?;
        if let Some(id) = event.id {
            *last = id;
        }
        match event.name.as_str() {
            "node" => {
                let node: Node = serde_json::from_str(&event.data).unwrap_or_default();
                if selected.is_none_or(|selected| selected.contains(&node.name)) {
                    show_changed(&node, &without_headers, output)?;
                }
            }
            "reset" => return Ok(()),
            _ => {}
        }
    }
}

fn show_changed(node: &Node, screen: &Screen, output: &OutputArgs) -> Result<(), Failure> {
    match output.output {
        format @ (Format::Json | Format::Yaml) => screen.print_as(format, node),
        Format::Name => screen.print(&format!("node/{}\n", node.name)),
        format => {
            let nodes = std::slice::from_ref(node);
            screen.print(&table(nodes, screen, format == Format::Wide).render(screen))
        }
    }
}

#[cfg(test)]
mod tests;
