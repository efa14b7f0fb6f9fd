//! A server that reads requests and gives all of them one answer: the least time in which an extender on the same HTTP library and
//! machine can answer.
//!
//! On two further paths it does one step of an extender's work, or two, before it answers.

use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::http::header::{self, HeaderName};
use axum::routing::post;
use axum::serve::ListenerExt;
use proto::extender::ExtenderArgs;
use rustc_hash::FxHashMap;
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

use super::fleet;

/// The paths of the server: it reads the request; parses it too; looks each name up too.
pub(super) const STEPS: [&str; 3] = ["/", "/parse", "/look-up"];

/// The constant answer: a filter result that names one node.
const ANSWER: &str = r#"{"Nodes":null,"NodeNames":["node-00000.example.com"],"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":""}"#;

type Answer = ([(HeaderName, &'static str); 1], &'static str);

/// The server; it ends when dropped.
#[derive(Debug)]
pub(super) struct Baseline {
    pub(super) address: SocketAddr,
    _serving: AbortOnDropHandle<std::io::Result<()>>,
}

impl Baseline {
    /// Starts the server on a free port. The last of [`STEPS`] looks the names of a request up in a table of `n_nodes` nodes.
    pub(super) async fn start(n_nodes: u32) -> Result<Self> {
        let mut nodes: FxHashMap<Box<str>, u32> = FxHashMap::default();
        for idx in 0..n_nodes {
            nodes.insert(fleet::node_name(idx).into(), idx);
        }
        let nodes = Arc::new(nodes);
        let [read, parse, look_up] = STEPS;
        let routes = Router::new()
            .route(read, post(answer))
            .route(parse, post(parse_and_answer))
            .route(
                look_up,
                post(move |body| look_up_and_answer(body, Arc::clone(&nodes))),
            );
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        // The scheduler sets TCP_NODELAY too; without it Nagle's algorithm would slow this server alone.
        let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
        let serving = axum::serve(listener, routes);
        Ok(Self {
            address,
            _serving: AbortOnDropHandle::new(tokio::spawn(serving.into_future())),
        })
    }
}

async fn answer(body: Bytes) -> Answer {
    // The whole body is read and copied, as any extender must.
    black_box(body);
    ([(header::CONTENT_TYPE, "application/json")], ANSWER)
}

/// Parses the request as the scheduler does, and gives the constant answer.
async fn parse_and_answer(body: Bytes) -> Result<Answer, StatusCode> {
    black_box(parsed(&body)?);
    Ok(answer(body).await)
}

async fn look_up_and_answer(body: Bytes, nodes: Arc<FxHashMap<Box<str>, u32>>) -> Result<Answer, StatusCode> {
    let args = parsed(&body)?;
    let names = args.node_names.unwrap_or_default();
    let found: Vec<Option<u32>> = names.iter().map(|name| nodes.get(&*name.0).copied()).collect();
    black_box(found);
    Ok(answer(body).await)
}

/// The request as the scheduler parses it: the pod, and the names in place.
fn parsed(body: &[u8]) -> Result<ExtenderArgs<'_>, StatusCode> {
    serde_json::from_slice(body).map_err(|_| StatusCode::BAD_REQUEST)
}
