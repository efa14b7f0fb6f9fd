//! `GET changes`: the changes of the state as server-sent events, which a client can resume after a break.
//!
//! Each revision is one batch of events, whose last bears the revision as its ID. A client that breaks off within a batch gets
//! the batch again, which changes nothing: every event carries the whole state of its node.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream;
use http::header;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Duration, Instant, sleep};

use super::names::Viewer;
use super::snapshot::{Delta, MAX_AGE, StateSnapshot};
use super::{ReadApi, json};
use crate::extender::Denied;

/// Time after which a client's token is reviewed again: a client whose token has ended, or lost its rights, gets changes for this
/// time at the longest, plus that for which reviews are cached.
const REVIEW_INTERVAL: Duration = Duration::from_secs(60);
/// Time without an event after which a comment is sent, so that proxies keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

struct ChangeFollower {
    api: Arc<ReadApi>,
    viewer: Viewer,
    /// The ID of the last event that the client had when it connected; `None` after the first batch.
    since: Option<String>,
    /// The revision of the state after the last batch.
    revision: u64,
    last_sent: Instant,
    last_review: Instant,
    /// Held as long as the client follows, since their number is limited.
    _permit: OwnedSemaphorePermit,
}

pub(super) fn stream(
    api: Arc<ReadApi>,
    viewer: Viewer,
    since: String,
    permit: OwnedSemaphorePermit,
) -> Response {
    let follower = ChangeFollower {
        api,
        viewer,
        since: Some(since),
        revision: 0,
        last_sent: Instant::now(),
        last_review: Instant::now(),
        _permit: permit,
    };
    // The next batch is made when the client has taken the last one, so that a slow client costs no memory.
    let batches = stream::unfold(follower, async |mut follower| {
        let batch = follower.next_batch().await?;
        Some((Ok::<_, Infallible>(batch), follower))
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, Body::from_stream(batches)).into_response()
}

impl ChangeFollower {
    /// Waits for the next batch of events; `None` ends the stream.
    async fn next_batch(&mut self) -> Option<Bytes> {
        loop {
            if self.api.stop.is_cancelled() || !self.review_access().await {
                return None;
            }
            let snapshot = self.api.snapshot().await;
            if let Some(batch) = self.batch(&snapshot) {
                self.last_sent = Instant::now();
                return Some(batch);
            }
            if self.last_sent.elapsed() >= KEEP_ALIVE {
                self.last_sent = Instant::now();
                // A comment of server-sent events, which clients ignore.
                return Some(Bytes::from_static(b":\n\n"));
            }
            tokio::select! {
                () = sleep(MAX_AGE) => {}
                () = self.api.stop.cancelled() => return None,
            }
        }
    }

    /// Reviews the client's token if it is time; returns false if the API server has just refused it.
    async fn review_access(&mut self) -> bool {
        let Some(credentials) = &self.viewer.credentials else {
            return true;
        };
        if self.last_review.elapsed() < REVIEW_INTERVAL {
            return true;
        }
        self.last_review = Instant::now();
        match self.api.viewer_with_token(credentials).await {
            // The user's rights may have changed, and with them the namespaces whose pods the client sees.
            Ok(viewer) => self.viewer = viewer,
            // While the API server does not answer, clients keep their rights, so that not all of them have to connect again.
            Err(Denied::Unreviewed { .. }) => {}
            Err(_) => return false,
        }
        true
    }

    /// The events between the last batch and a snapshot; `None` if nothing has changed.
    fn batch(&mut self, snapshot: &StateSnapshot) -> Option<Bytes> {
        let is_first = self.since.is_some();
        let seen_revision = match self.since.take() {
            Some(id) => snapshot.parse_id(&id),
            None => Some(self.revision),
        };
        self.revision = snapshot.revision();
        let delta = seen_revision.and_then(|revision| snapshot.changes_since(revision));
        let mut text = Vec::new();
        match delta {
            // Another process issued the ID, or it is too old: the client has to read the state again.
            None => write_event(&mut text, "reset", b"{}"),
            Some(delta) if !delta.is_empty() => self.write_delta(&mut text, &delta, snapshot),
            // The first batch is sent without changes too: it shows that the client is up to date, and gives it an ID.
            Some(_) if is_first => {}
            Some(_) => return None,
        }
        text.extend_from_slice(format!("id: {}\n", snapshot.id()).as_bytes());
        let totals = serde_json::json!({
            "totals": snapshot.totals, "models": snapshot.models, "pendingTotal": snapshot.pending.total,
        });
        write_event(&mut text, "totals", &json(&totals));
        Some(text.into())
    }

    fn write_delta(&self, text: &mut Vec<u8>, delta: &Delta, snapshot: &StateSnapshot) {
        for node in &delta.changed {
            write_event(text, "node", &node.json_for(&self.viewer.names));
        }
        for name in &delta.removed {
            write_event(text, "removed", &json(&serde_json::json!({ "name": &**name })));
        }
        if delta.has_pending_changed {
            let pending = self.viewer.names.pending(&snapshot.pending.pods);
            write_event(text, "pending", &json(&pending));
        }
    }
}

/// Writes one event, behind the line of its ID, if it has one.
fn write_event(text: &mut Vec<u8>, name: &str, data: &[u8]) {
    text.extend_from_slice(b"event: ");
    text.extend_from_slice(name.as_bytes());
    // JSON escapes line breaks, so that the data is one line.
    text.extend_from_slice(b"\ndata: ");
    text.extend_from_slice(data);
    text.extend_from_slice(b"\n\n");
}
