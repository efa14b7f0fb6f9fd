//! `WebSocket` upgrades of subresources of pods, and the messages of Kubernetes' channel protocols on them: the number of a
//! channel, then data.

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use http::{StatusCode, header};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::header_text;
use crate::apiserver::status::ApiError;

/// The server's end of a `WebSocket`.
pub(super) type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// Accepts the upgrade of a request to the first of these protocols that the client offers. The connection switches after the
/// answer is sent.
pub(super) fn accept(
    request: &mut Request,
    protocols: &[&'static str],
) -> Result<(Response, OnUpgrade), ApiError> {
    let key = header_text(request.headers(), header::SEC_WEBSOCKET_KEY);
    let accept = derive_accept_key(key.as_bytes());
    let offered = header_text(request.headers(), header::SEC_WEBSOCKET_PROTOCOL);
    let offered: Vec<&str> = offered.split(',').map(str::trim).collect();
    let Some(protocol) = protocols.iter().find(|protocol| offered.contains(*protocol)) else {
        let why = format!("only {} is served", protocols.join(", "));
        return Err(ApiError::bad_request(why));
    };
    let response = http::Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_ACCEPT, accept)
        .header(header::SEC_WEBSOCKET_PROTOCOL, *protocol)
        .body(Body::empty());
    let response = response.map_err(|_| ApiError::bad_request("no such header"))?;
    Ok((response, hyper::upgrade::on(request)))
}

/// The `WebSocket` on an upgraded connection.
pub(super) async fn open(upgrade: OnUpgrade) -> hyper::Result<Socket> {
    let io = TokioIo::new(upgrade.await?);
    Ok(WebSocketStream::from_raw_socket(io, Role::Server, None).await)
}

pub(super) fn channel_message(channel: u8, data: &[u8]) -> Message {
    let mut bytes = BytesMut::with_capacity(data.len() + 1);
    bytes.put_u8(channel);
    bytes.extend_from_slice(data);
    Message::Binary(Bytes::from(bytes))
}
