//! A server that reads requests and gives all of them one answer: the lower bound of any extender on the same machine.

use std::net::SocketAddr;

use anyhow::Result;
use axum::Router;
use axum::body::Body;
use axum::routing::post;
use http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// The constant answer: a filter result that names one node.
const ANSWER: &str = r#"{"Nodes":null,"NodeNames":["node-00000.example.com"],"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":""}"#;

/// The server; it ends when dropped.
#[derive(Debug)]
pub(super) struct Baseline {
    pub(super) address: SocketAddr,
    serving: JoinHandle<()>,
}

impl Baseline {
    /// Starts the server on a free port.
    pub(super) async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let router = Router::new().route("/", post(answer));
        let serving = async move {
            if let Err(error) = axum::serve(
                // The scheduler sets TCP_NODELAY too; without it Nagle's algorithm would slow the bound alone.
                axum::serve::ListenerExt::tap_io(listener, |stream| drop(stream.set_nodelay(true))),
                router,
            )
            .await
            {
                tracing::error!(%error, "the baseline server has ended");
            }
        };
        Ok(Self {
            address,
            serving: tokio::spawn(serving),
        })
    }
}

impl Drop for Baseline {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Reads the request and gives the constant answer.
async fn answer(
    request: Request<Body>,
) -> Result<([(header::HeaderName, &'static str); 1], &'static str), StatusCode> {
    let body = request
        .into_body()
        .collect()
        .await
        .map_err(|_| StatusCode::BAD_REQUEST)?;
    // The whole body is read and copied, as any extender must.
    std::hint::black_box(body.to_bytes());
    Ok(([(header::CONTENT_TYPE, "application/json")], ANSWER))
}
