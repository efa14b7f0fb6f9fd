//! A server that reads requests and gives all of them one answer: no extender on the same machine can answer sooner.

use std::net::SocketAddr;

use anyhow::Result;
use axum::Router;
use axum::body::Bytes;
use axum::http::header::{self, HeaderName};
use axum::routing::post;
use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

/// The constant answer: a filter result that names one node.
const ANSWER: &str = r#"{"Nodes":null,"NodeNames":["node-00000.example.com"],"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":""}"#;

/// The server; it ends when dropped.
#[derive(Debug)]
pub(super) struct Baseline {
    pub(super) address: SocketAddr,
    _serving: AbortOnDropHandle<std::io::Result<()>>,
}

impl Baseline {
    /// Starts the server on a free port.
    pub(super) async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        // The scheduler sets TCP_NODELAY too; without it Nagle's algorithm would slow this server alone.
        let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
        let serving = axum::serve(listener, Router::new().route("/", post(answer)));
        Ok(Self {
            address,
            _serving: AbortOnDropHandle::new(tokio::spawn(serving.into_future())),
        })
    }
}

/// Reads the request and gives the constant answer.
async fn answer(body: Bytes) -> ([(HeaderName, &'static str); 1], &'static str) {
    // The whole body is read and copied, as any extender must.
    std::hint::black_box(body);
    ([(header::CONTENT_TYPE, "application/json")], ANSWER)
}
