//! `pods/exec` over a `WebSocket`, with the protocols `v5.channel.k8s.io` and `v4.channel.k8s.io`, for a few programs that only
//! read.
//!
//! kubectl up to 1.30 asks for SPDY, which is not served.

use axum::extract::Request;
use axum::response::Response;
use futures::SinkExt;
use hyper::upgrade::OnUpgrade;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Utf8Bytes;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use super::Server;
use super::object_verbs::choose_container;
use super::route::Query;
use super::websocket::{accept, channel_message, open};
use crate::apiserver::container_programs::{self, ContainerView, ProgramResult};
use crate::apiserver::object;
use crate::apiserver::status::ApiError;
use crate::apiserver::verbs::RequestTarget;

const PROTOCOLS: [&str; 2] = ["v5.channel.k8s.io", "v4.channel.k8s.io"];
/// The channels on which the server sends; the last carries a `Status`.
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;

/// Runs a program as if it ran in a container, and switches to a `WebSocket` that carries its output.
pub(super) fn upgrade(
    server: &Server,
    mut request: Request,
    target: &RequestTarget,
    query: &Query,
) -> Result<Response, ApiError> {
    let pod = server.objects.state().current(target)?;
    let container = choose_container(query, &target.name, &pod.value)?;
    if object::text(&pod.value, "/spec/nodeName").is_empty() {
        let text = format!("pod {} does not have a host assigned", target.name);
        return Err(ApiError::bad_request(text));
    }
    if object::text(&pod.value, "/status/phase") != "Running" {
        let text = format!("unable to upgrade connection: container not found (\"{container}\")");
        return Err(ApiError::new(500, text));
    }
    let view = ContainerView::of(&server.objects, &pod.value, container);
    let result = container_programs::run(&view, &query.all("command"));
    let (response, upgrade) = accept(&mut request, &PROTOCOLS)?;
    tokio::spawn(async move {
        if let Err(error) = send(upgrade, &result).await {
            tracing::debug!(%error, "exec ended");
        }
    });
    Ok(response)
}

/// Sends the output of a program, then its exit code.
async fn send(upgrade: OnUpgrade, result: &ProgramResult) -> anyhow::Result<()> {
    let mut socket = open(upgrade).await?;
    let (channel, text, code) = match result {
        Ok(output) => (STDOUT, output, 0),
        Err((code, text)) => (STDERR, text, *code),
    };
    if !text.is_empty() {
        socket.send(channel_message(channel, text.as_bytes())).await?;
    }
    let status = status(code).to_string();
    socket.send(channel_message(ERROR, status.as_bytes())).await?;
    // kubectl takes any other end for a broken connection.
    let normal = CloseFrame {
        code: CloseCode::Normal,
        reason: Utf8Bytes::default(),
    };
    Ok(socket.close(Some(normal)).await?)
}

/// The `Status` that carries a program's exit code to the client.
fn status(code: u8) -> Value {
    if code == 0 {
        return json!({"metadata": {}, "status": "Success"});
    }
    json!({
        "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
        "message": format!("command terminated with non-zero exit code: exit status {code}"),
        "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
    })
}
