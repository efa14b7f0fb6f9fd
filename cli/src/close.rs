//! `close` and `open`: the annotation of a Node by which its GPUs take no new pods, written with the rights of the caller.

use std::process::ExitCode;

use proto::closed_gpus::{CLOSED_GPUS, ClosedGpus};
use serde_json::{Value, json};

use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult};
use crate::fields::text as field;
use crate::output::Screen;

/// Most tries of a write against which another client changes the Node: kubelet updates it often.
const MAX_TRIES: usize = 5;

/// Closes GPUs of a node, beside those that are closed already; all without `gpus`.
pub(crate) async fn close(
    connection: &ClusterConnection,
    screen: &Screen,
    node: &str,
    gpus: &[u32],
) -> CommandResult {
    let asked = match gpus {
        [] => ClosedGpus::all(),
        gpus => ClosedGpus::of(gpus.iter().copied()),
    };
    for _ in 0..MAX_TRIES {
        let object = read(connection, node).await?;
        let annotations = object.pointer("/metadata/annotations");
        let annotations = annotations.and_then(|value| serde_json::from_value(value.clone()).ok());
        let closed = ClosedGpus::read(annotations.as_ref()).with(asked.clone());
        if write(connection, &object, node, &json!(closed.to_string())).await? {
            let which = match closed.to_string().as_str() {
                "all" => "all GPUs".to_owned(),
                minors => format!("GPUs {minors}"),
            };
            screen.print(&format!(
                "{which} of node {node} take no new pods until `kubectl gpushare open {node}`; pods there stay\n"
            ))?;
            return Ok(ExitCode::SUCCESS);
        }
    }
    Err(too_busy(node))
}

/// Opens all GPUs of a node.
pub(crate) async fn open(connection: &ClusterConnection, screen: &Screen, node: &str) -> CommandResult {
    for _ in 0..MAX_TRIES {
        let object = read(connection, node).await?;
        if write(connection, &object, node, &Value::Null).await? {
            screen.print(&format!("all GPUs of node {node} are open\n"))?;
            return Ok(ExitCode::SUCCESS);
        }
    }
    Err(too_busy(node))
}

fn too_busy(node: &str) -> CommandFailure {
    CommandFailure::Refused(format!(
        "node {node} was changed by others {MAX_TRIES} times meanwhile; wait a moment, and run the command again"
    ))
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
    CommandFailure::Input(format!(
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
