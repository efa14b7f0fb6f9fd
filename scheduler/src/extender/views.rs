//! The views over HTTP: access, a limit of answers at one time, and answers that go out piece by piece.
//!
//! A view of nodes is a stream: a node is copied out of the index under a lock that is held for that one node, and written
//! outside of it; the next piece is made when the client has taken the last one. So a view of any size costs a few dozen
//! KiB, no filter waits for one, and nodes in one answer are each as they were when their turn came.

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
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::inspect::{Listing, Page, pods};
use super::{Extender, access, inspect, respond};
use crate::metrics::{Ending, Verb};

/// Most views that are answered at one time; more wait, as long as a request may take to come in.
const MOST: usize = 8;
/// Length of a piece of an answer, in bytes, before the node that exceeds it.
const PIECE: usize = 32 << 10;

/// Limits of the views.
#[derive(Debug)]
pub(super) struct Views {
    /// Answers under way, until the last byte of each is taken.
    under_way: Arc<Semaphore>,
    /// Pieces being made: one at a time, so that views take at most one core from filters.
    rendering: Semaphore,
}

impl Default for Views {
    fn default() -> Self {
        Self {
            under_way: Arc::new(Semaphore::new(MOST)),
            rendering: Semaphore::new(1),
        }
    }
}

/// Routes of the views; clients have to say who they are where the extender demands it.
pub(super) fn routes(extender: &Arc<Extender>, prefix: &str) -> Router<Arc<Extender>> {
    Router::new()
        .route(&format!("{prefix}/inspect"), get(inspect_all))
        .route(&format!("{prefix}/inspect/{{node}}"), get(inspect_node))
        .route(
            &format!("{prefix}/inspect/pods/{{namespace}}/{{name}}"),
            get(inspect_pod),
        )
        .route_layer(from_fn_with_state(Arc::clone(extender), access::admit))
}

/// Waits for one of the places; the refusal if none becomes free in time.
async fn place(extender: &Extender) -> Result<OwnedSemaphorePermit, Response> {
    let waiting = Arc::clone(&extender.views.under_way).acquire_owned();
    if let Ok(Ok(permit)) = tokio::time::timeout(extender.limits.read_timeout, waiting).await {
        return Ok(permit);
    }
    extender.metrics.time(Verb::Inspect).ending = Ending::Refused;
    let text =
        format!("{MOST} views are being answered, as many as there may be at one time; try again later\n");
    Err((StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "10")], text).into_response())
}

async fn inspect_all(State(extender): State<Arc<Extender>>, RawQuery(query): RawQuery) -> Response {
    if let Some(pod) = query.as_deref().and_then(pods::of_query) {
        return explain_pod(&extender, &pod, query.as_deref()).await;
    }
    let page = match Page::of_query(query.as_deref()) {
        Ok(page) => page,
        Err(error) => {
            extender.metrics.time(Verb::Inspect).ending = Ending::Malformed;
            return (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response();
        }
    };
    match place(&extender).await {
        Ok(permit) => NodeStream::new(extender, page, permit).respond(),
        Err(refusal) => refusal,
    }
}

async fn inspect_pod(
    State(extender): State<Arc<Extender>>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
) -> Response {
    explain_pod(&extender, &format!("{namespace}/{name}"), query.as_deref()).await
}

/// Answers with the reasons for which a pod waits, for programs or for people.
async fn explain_pod(extender: &Extender, pod: &str, query: Option<&str>) -> Response {
    let _place = match place(extender).await {
        Ok(permit) => permit,
        Err(refusal) => return refusal,
    };
    let _rendering = extender.views.rendering.acquire().await;
    let mut timer = extender.metrics.time(Verb::Inspect);
    let as_text = pods::wants_text(query);
    let leaders = |uid: &str| extender.leaders().get(uid).cloned();
    let answer = pods::pod(&extender.index, leaders, pod, as_text);
    if as_text {
        return ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], answer).into_response();
    }
    respond(&mut timer, Ok(answer))
}

async fn inspect_node(State(extender): State<Arc<Extender>>, Path(node): Path<String>) -> Response {
    let _place = match place(&extender).await {
        Ok(permit) => permit,
        Err(refusal) => return refusal,
    };
    let mut timer = extender.metrics.time(Verb::Inspect);
    let shown = extender.index.read().show_node(&node);
    respond(&mut timer, Ok(inspect::node(shown, &node)))
}

/// An answer about nodes that is being sent.
struct NodeStream {
    extender: Arc<Extender>,
    listing: Listing,
    started: Instant,
    /// True if all of it has been made.
    is_whole: bool,
    _place: OwnedSemaphorePermit,
}

impl NodeStream {
    fn new(extender: Arc<Extender>, page: Page, place: OwnedSemaphorePermit) -> Self {
        Self {
            extender,
            listing: Listing::new(page),
            started: Instant::now(),
            is_whole: false,
            _place: place,
        }
    }

    fn respond(self) -> Response {
        let pieces = stream::unfold(self, async |mut sending| {
            let piece = sending.piece().await?;
            Some((Ok::<_, std::convert::Infallible>(piece), sending))
        });
        (
            [(header::CONTENT_TYPE, "application/json")],
            Body::from_stream(pieces),
        )
            .into_response()
    }

    async fn piece(&mut self) -> Option<Bytes> {
        if self.is_whole {
            return None;
        }
        let extender = Arc::clone(&self.extender);
        let permit = extender.views.rendering.acquire().await;
        let mut json = Vec::with_capacity(PIECE);
        while json.len() < PIECE && !self.is_whole {
            self.is_whole = self.listing.write_next(&extender.index, &mut json) == ControlFlow::Break(());
        }
        drop(permit);
        // Filters that wait for a thread come first.
        tokio::task::yield_now().await;
        Some(json.into())
    }
}

impl Drop for NodeStream {
    fn drop(&mut self) {
        let ending = if self.is_whole { Ending::Ok } else { Ending::Broken };
        self.extender
            .metrics
            .record(Verb::Inspect, ending, self.started.elapsed());
    }
}
