//! `inspect`: read-only views of nodes and their pods over HTTP, in the JSON of the old extender, for its tools.
//!
//! A view of all nodes is a stream. A node is copied out of the index under a lock that is held for that node alone, and the
//! next piece is made when the client has taken the last one. So a view of any size takes a few dozen KiB of memory and holds
//! up no filter, and each node is shown as it was in its turn.

mod access;
mod nodes;

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, RawQuery, State};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use futures::stream;
use http::{StatusCode, header};
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Extender, respond};
use crate::config::PREFIX;
use crate::metrics::{Ending, Verb};
pub(crate) use access::{Access, Denied};
use nodes::{NodeListing, Page};

/// The most views that are answered at one time; more wait as long as a request may take to arrive.
const MAX_VIEWS: usize = 8;
/// The length at which a piece of an answer is sent, in bytes.
const PIECE: usize = 32 << 10;

/// Limits of the views.
#[derive(Debug)]
pub(super) struct ViewLimits {
    /// One permit for each answer, until the client has taken its last byte.
    views: Arc<Semaphore>,
    /// One permit: views take at most one core from filters.
    rendering: Semaphore,
}

impl Default for ViewLimits {
    fn default() -> Self {
        Self {
            views: Arc::new(Semaphore::new(MAX_VIEWS)),
            rendering: Semaphore::new(1),
        }
    }
}

/// The routes of the views, for clients with access.
pub(super) fn routes(extender: &Arc<Extender>) -> Router<Arc<Extender>> {
    Router::new()
        .route(&format!("{PREFIX}/inspect"), get(inspect_all))
        .route(&format!("{PREFIX}/inspect/{{node}}"), get(inspect_node))
        .route_layer(from_fn_with_state(Arc::clone(extender), access::require_access))
}

/// Streams the view of all nodes with GPUs, or of one page of them.
async fn inspect_all(State(extender): State<Arc<Extender>>, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let page = match Page::parse(&query) {
        Ok(page) => page,
        Err(error) => {
            extender.metrics.time(Verb::Inspect).ending = Ending::Malformed;
            return (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response();
        }
    };
    match acquire_view(&extender).await {
        Err(refusal) => refusal,
        Ok(permit) => {
            let stream = NodeStream {
                extender,
                listing: NodeListing::new(page),
                started: Instant::now(),
                is_complete: false,
                _permit: permit,
            };
            stream.into_response()
        }
    }
}

/// Answers with the view of one node.
async fn inspect_node(State(extender): State<Arc<Extender>>, Path(node): Path<String>) -> Response {
    let _permit = match acquire_view(&extender).await {
        Ok(permit) => permit,
        Err(refusal) => return refusal,
    };
    let mut timer = extender.metrics.time(Verb::Inspect);
    let shown = extender.index.read().show_node(&node);
    respond(&mut timer, Ok(nodes::show(shown, &node)))
}

/// Waits for a permit; returns the refusal if none is free in time.
async fn acquire_view(extender: &Extender) -> Result<OwnedSemaphorePermit, Response> {
    let permit = Arc::clone(&extender.view_limits.views).acquire_owned();
    if let Ok(Ok(permit)) = tokio::time::timeout(extender.serving.read_timeout, permit).await {
        return Ok(permit);
    }
    extender.metrics.time(Verb::Inspect).ending = Ending::Refused;
    let text = format!(
        "{MAX_VIEWS} views are being answered, as many as there may be at one time; try again later\n"
    );
    Err((StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "10")], text).into_response())
}

fn json(answer: &impl Serialize) -> Vec<u8> {
    // Structs of texts and numbers always serialize.
    serde_json::to_vec(answer).unwrap_or_default()
}

/// A view of nodes that is being sent.
struct NodeStream {
    extender: Arc<Extender>,
    listing: NodeListing,
    started: Instant,
    is_complete: bool,
    _permit: OwnedSemaphorePermit,
}

impl NodeStream {
    /// The HTTP answer whose body is this stream.
    fn into_response(self) -> Response {
        let pieces = stream::unfold(self, async |mut stream| {
            let piece = stream.next_piece().await?;
            Some((Ok::<_, Infallible>(piece), stream))
        });
        (
            [(header::CONTENT_TYPE, "application/json")],
            Body::from_stream(pieces),
        )
            .into_response()
    }

    /// Writes the next nodes as JSON, about `PIECE` bytes of them; `None` after the last piece.
    async fn next_piece(&mut self) -> Option<Bytes> {
        if self.is_complete {
            return None;
        }
        let permit = self.extender.view_limits.rendering.acquire().await;
        // Larger pieces would hold up the next view, smaller ones cost a frame each.
        let mut json = Vec::with_capacity(PIECE);
        while json.len() < PIECE && !self.is_complete {
            let written = self.listing.write_next(&self.extender.index, &mut json);
            self.is_complete = written == ControlFlow::Break(());
        }
        // Other views go on while this client takes the piece.
        drop(permit);
        // Filters that wait for a thread come first.
        tokio::task::yield_now().await;
        Some(json.into())
    }
}

impl Drop for NodeStream {
    /// Counts the view in the metrics.
    fn drop(&mut self) {
        // A client that disconnects drops the stream before its end.
        let ending = if self.is_complete {
            Ending::Ok
        } else {
            Ending::Broken
        };
        self.extender
            .metrics
            .record(Verb::Inspect, ending, self.started.elapsed());
    }
}
