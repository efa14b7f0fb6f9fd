//! `pods/portforward` over a `WebSocket`, the protocol `v4.channel.k8s.io`.
//!
//! Each port has two channels, data and error; a message begins with the number of its channel, and the first message of each
//! channel is the port. kubectl's newer protocol, SPDY within a `WebSocket`, is not served: kubectl falls back to SPDY and fails.

use std::net::SocketAddr;

use axum::extract::Request;
use axum::response::Response;
use futures::stream::SplitSink;
use futures::{SinkExt, StreamExt};
use hyper::upgrade::OnUpgrade;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio_tungstenite::tungstenite::{Error, Message};

use super::Server;
use super::route::Query;
use super::websocket::{Socket, accept, channel_message, open};
use crate::apiserver::status::ApiError;
use crate::apiserver::verbs::RequestTarget;

const PROTOCOL: &str = "v4.channel.k8s.io";
/// The channels of the one port that a connection carries.
const DATA: u8 = 0;
const ERROR: u8 = 1;

/// Switches to a `WebSocket` that carries one port of a pod.
pub(super) fn upgrade(
    server: &Server,
    mut request: Request,
    target: &RequestTarget,
    query: &Query,
) -> Result<Response, ApiError> {
    server.objects.state().current(target)?;
    let port = query.number("ports")?.and_then(|port| u16::try_from(port).ok());
    let port = port.ok_or_else(|| ApiError::bad_request("ports: one port must be named"))?;
    let (response, upgrade) = accept(&mut request, &[PROTOCOL])?;
    let address = server.objects.pod_port(&target.namespace, &target.name, port);
    let stopping = server.stopping.clone();
    tokio::spawn(async move {
        tokio::select! {
            carried = forward_port(upgrade, port, address) => {
                if let Err(error) = carried {
                    tracing::debug!(%error, "port-forward ended");
                }
            }
            () = stopping.cancelled() => {}
        }
    });
    Ok(response)
}

/// Carries bytes between the `WebSocket` of a client and a TCP port until either side closes.
async fn forward_port(upgrade: OnUpgrade, port: u16, address: Option<SocketAddr>) -> anyhow::Result<()> {
    let mut socket = open(upgrade).await?;
    // The protocol begins with the port number, little-endian, on both channels of each port.
    for channel in [DATA, ERROR] {
        socket.send(channel_message(channel, &port.to_le_bytes())).await?;
    }
    let connected = match address {
        Some(address) => TcpStream::connect(address)
            .await
            .map_err(|error| error.to_string()),
        None => Err("connection refused".to_owned()),
    };
    let stream = match connected {
        Ok(stream) => stream,
        Err(reason) => {
            // containerd's error text, which kubectl prints to the user.
            let reason = format!("failed to connect to localhost:{port} inside namespace: {reason}");
            socket.send(channel_message(ERROR, reason.as_bytes())).await?;
            return Ok(socket.close(None).await?);
        }
    };
    let (reader, mut writer) = stream.into_split();
    let (sink, mut messages) = socket.split();
    let sending = tokio::spawn(copy_to_socket(reader, sink));
    while let Some(Ok(received)) = messages.next().await {
        match received {
            Message::Binary(bytes) if bytes.first() == Some(&DATA) => {
                writer.write_all(bytes.get(1..).unwrap_or_default()).await?;
            }
            Message::Close(_) => break,
            _ => {}
        }
    }
    // The pod sees the end of its input, and the copying task has no reader any more.
    drop(writer);
    sending.abort();
    Ok(())
}

/// Copies bytes from the pod to the `WebSocket` until the pod closes its connection.
async fn copy_to_socket(
    mut reader: OwnedReadHalf,
    mut sink: SplitSink<Socket, Message>,
) -> Result<(), Error> {
    let mut buffer = vec![0; 32 << 10];
    loop {
        let n_read = reader.read(&mut buffer).await.unwrap_or_default();
        if n_read == 0 {
            return sink.send(Message::Close(None)).await;
        }
        sink.send(channel_message(DATA, buffer.get(..n_read).unwrap_or_default()))
            .await?;
    }
}
