//! `close` and `open`: the annotation of a Node by which its GPUs take no new pods, written with the rights of the caller.

use std::process::ExitCode;

use http::StatusCode;
use proto::closed_gpus::{CLOSED_GPUS, ClosedGpus};
use proto::read_api::State;
use serde_json::{Value, json};

use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult};
use crate::fields::text as field;
use crate::output::Screen;
use crate::read_api::ReadApiClient;

/// Most tries of a write against which another client changes the Node: kubelet updates it often.
const MAX_TRIES: usize = 5;

/// Closes GPUs of a node, beside those that are closed already; all without `gpus`.
pub(crate) async fn close(
    connection: &ClusterConnection,
    screen: &Screen,
    node: &str,
    gpus: &[u32],
) -> CommandResult {
    if let Some(sentence) = check_minors(connection, node, gpus).await {
        return Err(CommandFailure::Refused(sentence));
    }
    let closed = add(connection, node, gpus).await?;
    screen.print(&format!("{}\n", closing(node, &closed)))?;
    Ok(ExitCode::SUCCESS)
}

/// The sentence that refuses minors which no GPU of the node has; `None` too if the scheduler does not answer.
async fn check_minors(connection: &ClusterConnection, node: &str, gpus: &[u32]) -> Option<String> {
    if gpus.is_empty() {
        return None;
    }
    let mut api = ReadApiClient::connect(connection).await.ok()?;
    let state: State = api.get("state").await.ok()?;
    let known = state.nodes.into_iter().find(|one| one.name == node)?.gpus;
    let known: Vec<u32> = known.iter().map(|gpu| gpu.minor).collect();
    let absent = gpus.iter().find(|minor| !known.contains(minor))?;
    Some(format!("node {node} has no GPU {absent}: its GPUs are {known:?}"))
}

/// Closes GPUs as [`close`] does. Returns those that may be opened alone: none, which stands for all, if all are closed.
pub(crate) async fn add(
    connection: &ClusterConnection,
    node: &str,
    gpus: &[u32],
) -> Result<Vec<u32>, CommandFailure> {
    let asked = match gpus {
        [] => ClosedGpus::all(),
        gpus => ClosedGpus::of(gpus.iter().copied()),
    };
    for _ in 0..MAX_TRIES {
        let object = read(connection, node).await?;
        let closed = closed_gpus(&object).with(asked.clone());
        if write(connection, &object, node, &json!(closed.to_string())).await? {
            let may_open_alone = closed.without(gpus).is_some();
            return Ok(if may_open_alone { gpus.to_vec() } else { Vec::new() });
        }
    }
    Err(too_busy(node))
}

/// Opens GPUs of a node; all without `gpus`.
pub(crate) async fn open(
    connection: &ClusterConnection,
    screen: &Screen,
    node: &str,
    gpus: &[u32],
) -> CommandResult {
    for _ in 0..MAX_TRIES {
        let object = read(connection, node).await?;
        let closed = closed_gpus(&object);
        // The annotation may name GPUs that the node does not have.
        let open: Vec<u32> = gpus.iter().copied().filter(|gpu| !closed.has(*gpu)).collect();
        if let Some(sentence) = check_minors(connection, node, &open).await {
            return Err(CommandFailure::Refused(sentence));
        }
        let rest = match gpus {
            [] => ClosedGpus::default(),
            gpus => closed.without(gpus).ok_or_else(|| {
                CommandFailure::Refused(format!(
                    "all GPUs of node {node} are closed: open all without --gpus, and close the others by their minors"
                ))
            })?,
        };
        let value = if rest.is_empty() {
            Value::Null
        } else {
            json!(rest.to_string())
        };
        if write(connection, &object, node, &value).await? {
            screen.print(&format!("{} of node {node} are open\n", which(gpus)))?;
            return Ok(ExitCode::SUCCESS);
        }
    }
    Err(too_busy(node))
}

/// The sentence that GPUs are closed.
pub(crate) fn closing(node: &str, gpus: &[u32]) -> String {
    format!(
        "{} of node {node} take no new pods until `{}`; pods there stay",
        which(gpus),
        opening(node, gpus)
    )
}

/// The GPUs in words.
pub(crate) fn which(gpus: &[u32]) -> String {
    match gpus {
        [] => "all GPUs".to_owned(),
        gpus => format!("GPUs {}", ClosedGpus::of(gpus.iter().copied())),
    }
}

/// The command that opens these GPUs, and no others.
pub(crate) fn opening(node: &str, gpus: &[u32]) -> String {
    match gpus {
        [] => format!("kubectl gpushare open {node}"),
        gpus => format!(
            "kubectl gpushare open {node} --gpus {}",
            ClosedGpus::of(gpus.iter().copied())
        ),
    }
}

/// The GPUs that the annotation of a Node closes.
fn closed_gpus(node: &Value) -> ClosedGpus {
    let annotations = node.pointer("/metadata/annotations");
    let annotations = annotations.and_then(|value| serde_json::from_value(value.clone()).ok());
    ClosedGpus::read(annotations.as_ref())
}

fn too_busy(node: &str) -> CommandFailure {
    CommandFailure::Api {
        code: StatusCode::CONFLICT.as_u16(),
        action: format!("annotate node {node}"),
        reason: format!(
            "others changed it {MAX_TRIES} times meanwhile; wait a moment, and run the command again"
        ),
    }
}

/// The path of a Node; refuses a name that would change the path.
fn path(node: &str) -> Result<String, CommandFailure> {
    let is_plain = node
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.');
    if is_plain && !node.is_empty() {
        Ok(format!("/api/v1/nodes/{node}"))
    } else {
        Err(no_such_node(node))
    }
}

fn no_such_node(node: &str) -> CommandFailure {
    CommandFailure::Refused(format!(
        "there is no node {node:?}; `kubectl get nodes` lists all"
    ))
}

async fn read(connection: &ClusterConnection, node: &str) -> Result<Value, CommandFailure> {
    let found = connection.get("read the node", &path(node)?).await?;
    found.ok_or_else(|| no_such_node(node))
}

/// Writes the value of the annotation; returns false if the Node has changed since it was read.
async fn write(
    connection: &ClusterConnection,
    object: &Value,
    node: &str,
    value: &Value,
) -> Result<bool, CommandFailure> {
    let version = field(object, "/metadata/resourceVersion");
    let patch = json!({"metadata": {"resourceVersion": version, "annotations": {CLOSED_GPUS: value}}});
    match connection.patch("annotate the node", &path(node)?, &patch).await {
        Ok(Some(_)) => Ok(true),
        Ok(None) => Err(no_such_node(node)),
        Err(CommandFailure::Api { code: 409, .. }) => Ok(false),
        Err(failure) => Err(failure),
    }
}
