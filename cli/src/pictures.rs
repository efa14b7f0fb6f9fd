//! The pictures of README and `docs/cli.md`: the output of `top` and `explain` for one small cluster, as a terminal shows it.
//!
//! The scheduler's library reads the cluster's objects, so that the pictures show what the program prints. After a change of the
//! output, `UPDATE_PICTURES=1 cargo test -p cli --lib pictures` draws them again; without the variable the test compares.

use std::path::Path;

use scheduler::index::{Index, Shared};
use scheduler::read_api;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::args::Format;
use crate::offline::index_of;
use crate::output::Screen;
use crate::{explain, top};

const SCREEN: Screen = Screen {
    width: Some(105),
    has_colour: true,
    has_blocks: true,
    has_headers: true,
    format: Format::Table,
};

/// Nodes: name, model, GiB of a GPU, and whether each GPU is healthy.
const NODES: [(&str, &str, u64, &[bool]); 3] = [
    ("gpu-a", "A100", 80, &[true, true, true, false]),
    ("gpu-b", "A100", 80, &[true, true, true, true]),
    ("edge-1", "L4", 24, &[true, true]),
];

/// Pods: namespace, name, node, minor of the GPU, GiB, percent of compute.
const PODS: [(&str, &str, &str, usize, u64, u64); 14] = [
    ("chat", "llama-0", "gpu-a", 0, 48, 50),
    ("search", "embed-0", "gpu-a", 0, 16, 25),
    ("lab", "ana", "gpu-a", 0, 16, 10),
    ("train", "bert-0", "gpu-a", 1, 80, 100),
    ("search", "rank-0", "gpu-a", 2, 40, 40),
    ("ci", "job-71", "gpu-a", 2, 16, 20),
    ("chat", "llama-1", "gpu-b", 0, 48, 50),
    ("lab", "ben", "gpu-b", 0, 16, 10),
    ("train", "bert-1", "gpu-b", 1, 80, 100),
    ("search", "rank-1", "gpu-b", 2, 40, 40),
    ("lab", "eve", "gpu-b", 2, 16, 10),
    ("chat", "whisper-0", "gpu-b", 3, 76, 60),
    ("ci", "job-72", "edge-1", 0, 16, 20),
    ("lab", "kim", "edge-1", 1, 8, 0),
];

fn uuid(node: &str, minor: usize) -> String {
    format!("GPU-{node}-{minor}")
}

/// A pod without a node that requests a share of one GPU.
fn pod((namespace, name): (&str, &str), gib: u64, core: u64) -> Value {
    let mut limits =
        json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": format!("{gib}Gi")});
    if core > 0 {
        limits["koordinator.sh/gpu-core"] = core.to_string().into();
    }
    json!({
        "metadata": {"namespace": namespace, "name": name, "uid": format!("{namespace}-{name}"), "annotations": {}},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits.clone(), "requests": limits}}]},
    })
}

/// [`NODES`], [`PODS`] with their records, and one pod that waits.
fn cluster() -> Shared<Index> {
    let (mut nodes, mut devices, mut pods) = (Vec::new(), Vec::new(), Vec::new());
    for (name, model, gib, healthy) in NODES {
        let n_gpus = healthy.len() as u64;
        let labels = json!({"gpushare": "true", "node.koordinator.sh/gpu-vendor": "nvidia", "node.koordinator.sh/gpu-model": model});
        let capacity = json!({
            "koordinator.sh/gpu.shared": (100 * n_gpus).to_string(), "koordinator.sh/gpu-core": (100 * n_gpus).to_string(),
            "koordinator.sh/gpu-memory": format!("{}Gi", gib * n_gpus), "pods": "110",
        });
        nodes.push(json!({"metadata": {"name": name, "labels": labels}, "status": {"capacity": capacity, "allocatable": capacity}}));
        let gpu = |(minor, health): (usize, &bool)| {
            json!({
                "type": "gpu", "id": uuid(name, minor), "minor": minor, "health": health,
                "resources": {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": format!("{gib}Gi"), "koordinator.sh/gpu-memory-ratio": "100"},
            })
        };
        let gpus: Vec<Value> = healthy.iter().enumerate().map(gpu).collect();
        devices.push(json!({"metadata": {"name": name, "labels": labels}, "spec": {"devices": gpus}}));
    }
    for (namespace, name, node, minor, gib, core) in PODS {
        let mut pod = pod((namespace, name), gib, core);
        let mut resources = json!({"koordinator.sh/gpu-memory": format!("{gib}Gi")});
        if core > 0 {
            resources["koordinator.sh/gpu-core"] = core.to_string().into();
        }
        let record = json!({"gpu": [{"minor": minor, "id": uuid(node, minor), "resources": resources}]});
        pod["metadata"]["annotations"]["scheduling.koordinator.sh/device-allocated"] =
            record.to_string().into();
        pod["spec"]["nodeName"] = node.into();
        pod["status"] = json!({"phase": "Running"});
        pods.push(pod);
    }
    pods.push(pod(("search", "rank-2"), 40, 40));
    index_of(read(nodes), read(devices), read(pods))
}

fn read<T: DeserializeOwned>(objects: Vec<Value>) -> Vec<T> {
    serde_json::from_value(objects.into()).unwrap()
}

/// Width of a column, in pixels.
const COLUMN_WIDTH: usize = 8;
/// Height of a line, in pixels.
const LINE_HEIGHT: usize = 19;
const MARGIN: usize = 14;

/// A terminal's text as a picture whose colours follow the reader's light or dark theme.
fn drawn(title: &str, text: &str) -> String {
    let width = SCREEN.width.unwrap() * COLUMN_WIDTH + 2 * MARGIN;
    let height = text.lines().count() * LINE_HEIGHT + 2 * MARGIN;
    let mut svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{title}">
<style>
  text {{ font: 13px ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace; fill: #1f2328; white-space: pre; }}
  .page {{ fill: #f6f8fa; stroke: #d1d9e0; }}
  .c31 {{ fill: #cf222e; }} .c32 {{ fill: #1a7f37; }} .c33 {{ fill: #9a6700; }} .c34 {{ fill: #0969da; }} .c35 {{ fill: #8250df; }} .c36 {{ fill: #1b7c83; }} .c90 {{ fill: #818b98; }}
  @media (prefers-color-scheme: dark) {{
    text {{ fill: #e6edf3; }} .page {{ fill: #0d1117; stroke: #3d444d; }}
    .c31 {{ fill: #ff7b72; }} .c32 {{ fill: #3fb950; }} .c33 {{ fill: #d29922; }} .c34 {{ fill: #58a6ff; }} .c35 {{ fill: #bc8cff; }} .c36 {{ fill: #39c5cf; }} .c90 {{ fill: #656c76; }}
  }}
</style>
<rect class="page" x="0.5" y="0.5" width="{}" height="{}" rx="6"/>
"#,
        width - 1,
        height - 1
    );
    for (row, line) in text.lines().enumerate() {
        let top = MARGIN + row * LINE_HEIGHT;
        let mut column = 0;
        for (class, run) in runs(line) {
            draw_run(&mut svg, (column, top), class, run);
            column += run.chars().count();
        }
        assert!(column <= SCREEN.width.unwrap(), "a terminal would wrap {line}");
    }
    svg + "</svg>\n"
}

/// Draws blocks as rectangles, since fonts differ in their width, and words at their own column.
fn draw_run(svg: &mut String, (column, top): (usize, usize), class: &str, run: &str) {
    let class = if class.is_empty() {
        String::new()
    } else {
        format!(r#" class="c{class}""#)
    };
    if let Some(block @ ('█' | '▓' | '░')) = run.chars().next() {
        let opacity = match block {
            '█' => "1",
            '▓' => "0.7",
            _ => "0.3",
        };
        let width = run.chars().count() * COLUMN_WIDTH;
        let (x, y) = (MARGIN + column * COLUMN_WIDTH, top + 2);
        *svg += &format!(
            "<rect{class} x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"15\" fill-opacity=\"{opacity}\"/>\n"
        );
        return;
    }
    let mut at = column;
    for word in run.split_inclusive(' ') {
        let shown = word.trim_end();
        if !shown.is_empty() {
            let (length, escaped) = (shown.chars().count() * COLUMN_WIDTH, escaped(shown));
            let (x, y) = (MARGIN + at * COLUMN_WIDTH, top + 14);
            *svg += &format!("<text{class} x=\"{x}\" y=\"{y}\" textLength=\"{length}\">{escaped}</text>\n");
        }
        at += word.chars().count();
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// The pieces of a line by colour, as numbers of ANSI; empty for the terminal's own.
fn runs(line: &str) -> Vec<(&str, &str)> {
    let mut pieces = line.split("\u{1b}[");
    let mut runs = vec![("", pieces.next().unwrap())];
    for piece in pieces {
        let (class, text) = piece.split_once('m').unwrap();
        runs.push((if class == "0" { "" } else { class }, text));
    }
    runs
}

/// Compares the picture of a text with the file, or writes the file.
fn compare(file: &str, title: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../docs/pictures")
        .join(file);
    let svg = drawn(title, text);
    if std::env::var_os("UPDATE_PICTURES").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, svg).unwrap();
        return;
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == svg,
        "docs/pictures/{file} shows other output: run UPDATE_PICTURES=1 cargo test -p cli --lib pictures"
    );
}

fn command(line: &str) -> String {
    format!("\u{1b}[90m$\u{1b}[0m {line}\n")
}

#[tokio::test]
async fn pictures_show_the_output() {
    let index = cluster();
    let state = read_api::state_of(index.clone()).await;
    let text = command("kubectl gpushare top")
        + &top::render(&state, &top::gpus(&state.nodes, &SCREEN, false), &SCREEN);
    let title = "kubectl gpushare top: a row for each GPU with a bar that is cut by pod, allocated and free memory, and health";
    compare("top.svg", title, &text);

    let explanation = read_api::explain(&index, "search", "rank-2", false).unwrap();
    let text =
        command("kubectl gpushare explain rank-2 -n search") + &explain::render(&explanation, &SCREEN, false);
    let title = "kubectl gpushare explain: the pod needs 40 GiB, no node has room, and the nearest GPU lacks some GiB";
    compare("explain.svg", title, &text);
}
