//! `close` and `open`: the annotation of a Node by which its GPUs take no new pods, written with the rights of the caller.

use std::process::ExitCode;

use http::header::CONTENT_TYPE;
use http::{Request, StatusCode};
use proto::closed_gpus::{CLOSED_GPUS, ClosedGpus};
use proto::read_api::State;
use serde_json::json;

use crate::args::NodeGpus;
use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult};
use crate::fields::text as field;
use crate::output::Screen;
use crate::pod_path::is_plain;
use crate::read_api::ReadApiClient;

/// Most tries of a write against which another client changes the Node: kubelet updates it often.
const MAX_TRIES: usize = 5;

/// Closes GPUs of a node, beside those that are closed already; all without `gpus`.
pub(crate) async fn close(connection: &ClusterConnection, screen: &Screen, at: &NodeGpus) -> CommandResult {
    let NodeGpus { node, gpus } = at;
    if let Some(sentence) = check_minors(connection, node, gpus).await {
        return Err(CommandFailure::Refused(sentence));
    }
    let closed = add(connection, node, gpus).await?;
    screen.print(&format!("{}\n", closing(node, &closed)))?;
    Ok(ExitCode::SUCCESS)
}

/// The sentence that refuses minors which no GPU of the node has; `None` if there are none, or the scheduler does not answer.
async fn check_minors(connection: &ClusterConnection, node: &str, gpus: &[u32]) -> Option<String> {
    if gpus.is_empty() {
        return None;
    }
    // The annotation goes to the API server, so a scheduler that does not answer keeps no GPU open or closed.
    let mut api = ReadApiClient::connect(connection).await.ok()?;
    let state: State = api.get("state").await.ok()?;
    absent_gpu(&state, node, gpus)
}

/// The sentence about the first of these minors that the node does not have.
fn absent_gpu(state: &State, node: &str, gpus: &[u32]) -> Option<String> {
    let known = state.nodes.iter().find(|one| one.name == node)?;
    let known: Vec<u32> = known.gpus.iter().map(|gpu| gpu.minor).collect();
    let absent = gpus.iter().find(|minor| !known.contains(minor))?;
    Some(format!("node {node} has no GPU {absent}: its GPUs are {known:?}"))
}

/// Closes GPUs as [`close`] does. Returns those that [`opening`] has to name: none, which stands for all, if all are closed.
pub(crate) async fn add(
    connection: &ClusterConnection,
    node: &str,
    gpus: &[u32],
) -> Result<Vec<u32>, CommandFailure> {
    let asked = match gpus {
        [] => ClosedGpus::all(),
        gpus => ClosedGpus::of(gpus.iter().copied()),
    };
    let closed = change(connection, node, async |closed| Ok(closed.with(asked.clone()))).await?;
    let may_open_alone = closed.without(gpus).is_some();
    Ok(if may_open_alone { gpus.to_vec() } else { Vec::new() })
}

/// Opens GPUs of a node; all without `gpus`.
pub(crate) async fn open(connection: &ClusterConnection, screen: &Screen, at: &NodeGpus) -> CommandResult {
    let NodeGpus { node, gpus } = at;
    let open_gpus = async |closed: ClosedGpus| {
        // Minors that the annotation names can be opened, also if the node has no such GPU.
        let open: Vec<u32> = gpus.iter().copied().filter(|gpu| !closed.has(*gpu)).collect();
        if let Some(sentence) = check_minors(connection, node, &open).await {
            return Err(CommandFailure::Refused(sentence));
        }
        if gpus.is_empty() {
            return Ok(ClosedGpus::default());
        }
        closed.without(gpus).ok_or_else(|| {
            CommandFailure::Refused(format!(
                "all GPUs of node {node} are closed: open all without --gpus, and close the others by their minors"
            ))
        })
    };
    change(connection, node, open_gpus).await?;
    screen.print(&format!("{} of node {node} are open\n", which(gpus)))?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn closing(node: &str, gpus: &[u32]) -> String {
    format!(
        "{} of node {node} take no new pods until `{}`; pods there stay",
        which(gpus),
        opening(node, gpus)
    )
}

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

/// Replaces the closed GPUs in the annotation of a Node by those that `changed` makes of them, and returns these. Tries again if
/// another client has changed the Node since it was read.
async fn change(
    connection: &ClusterConnection,
    node: &str,
    changed: impl AsyncFn(ClosedGpus) -> Result<ClosedGpus, CommandFailure>,
) -> Result<ClosedGpus, CommandFailure> {
    let no_such_node = || {
        CommandFailure::Refused(format!(
            "there is no node {node:?}; `kubectl get nodes` lists all"
        ))
    };
    // With other characters the name would make another path.
    if !is_plain(node) {
        return Err(no_such_node());
    }
    let path = format!("/api/v1/nodes/{node}");
    for _ in 0..MAX_TRIES {
        let object = connection.get("read the node", &path).await?;
        let object = object.ok_or_else(no_such_node)?;
        let annotations = object.pointer("/metadata/annotations");
        let annotations = annotations.and_then(|value| serde_json::from_value(value.clone()).ok());
        let closed = changed(ClosedGpus::read(annotations.as_ref())).await?;
        // Null, which removes the annotation, if no GPU is closed.
        let value = (!closed.is_empty()).then_some(closed.to_string());
        // With the version the API server refuses the patch if another client has changed the Node since.
        let version = field(&object, "/metadata/resourceVersion");
        let annotated =
            json!({"metadata": {"resourceVersion": version, "annotations": {CLOSED_GPUS: value}}});
        let request = Request::patch(&path).header(CONTENT_TYPE, "application/merge-patch+json");
        match connection.write("annotate the node", request, &annotated).await {
            Ok(Some(_)) => return Ok(closed),
            Ok(None) => return Err(no_such_node()),
            Err(CommandFailure::Api { code: 409, .. }) => {}
            Err(failure) => return Err(failure),
        }
    }
    Err(CommandFailure::Api {
        code: StatusCode::CONFLICT.as_u16(),
        action: format!("annotate node {node}"),
        reason: format!(
            "others changed it {MAX_TRIES} times meanwhile; wait a moment, and run the command again"
        ),
    })
}

#[cfg(test)]
mod tests {
    use proto::read_api::{Gpu, Node};
    use rstest::rstest;

    use super::*;

    fn node(name: &str, minors: &[u32]) -> Node {
        let gpus = minors.iter().map(|minor| Gpu {
            minor: *minor,
            ..Gpu::default()
        });
        Node {
            name: name.to_owned(),
            gpus: gpus.collect(),
            ..Node::default()
        }
    }

    #[rstest]
    #[case::both_are_there("n2", &[0, 1], None)]
    #[case::of_another_node("n1", &[0, 1], Some("node n1 has no GPU 1: its GPUs are [0]"))]
    #[case::a_node_that_the_scheduler_does_not_know("n3", &[5], None)]
    fn gpus_that_a_node_lacks_are_named(
        #[case] of: &str,
        #[case] gpus: &[u32],
        #[case] sentence: Option<&str>,
    ) {
        let state = State {
            nodes: vec![node("n1", &[0]), node("n2", &[0, 1])],
            ..State::default()
        };
        assert_eq!(absent_gpu(&state, of, gpus).as_deref(), sentence);
    }
}
