//! The stage of one connection, from its TLS handshake to its end, and the time that each stage may take.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use tokio::time::{Instant, sleep_until};

/// Time for which a client may keep an idle connection: longer than Go's 90 s, as Go repeats no POST on a closed connection.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The client has connected, and its TLS handshake is not complete.
    Handshake { since: Instant },
    /// The client may send its first request, or has begun the head of one. The head must be complete at `until`.
    Head { until: Instant },
    /// `n` requests are being answered; the handler limits the time in which their bodies arrive.
    Answering { n: u32 },
    /// No request is being answered.
    Idle { since: Instant },
}

/// The stage of a connection, shared by its stream, which sees the bytes, its service, which sees the requests, and the listener.
#[derive(Clone, Debug)]
pub(super) struct Conversation {
    stage: Arc<Mutex<Stage>>,
    /// Longest time of a handshake, and of a head: from its first byte, or for the first request from the moment it may be sent.
    limit: Duration,
    pub(super) address: IpAddr,
}

/// Counts a request as being answered until dropped.
#[derive(Debug)]
pub(super) struct Answering(Conversation);

impl Conversation {
    /// The stage of a connection that was just accepted; the TLS handshake, if there is one, comes first.
    pub(super) fn new(address: IpAddr, limit: Duration, has_handshake: bool) -> Self {
        let since = Instant::now();
        let stage = if has_handshake {
            Stage::Handshake { since }
        } else {
            // A client that connects and sends nothing holds a connection as well.
            Stage::Head { until: since + limit }
        };
        Self {
            stage: Arc::new(Mutex::new(stage)),
            limit,
            address: address.to_canonical(),
        }
    }

    pub(super) fn note_handshake(&self) {
        *self.stage() = Stage::Head {
            until: Instant::now() + self.limit,
        };
    }

    /// Notes that bytes of HTTP/1.1 have arrived.
    pub(super) fn note_bytes(&self) {
        let mut stage = self.stage();
        // While a request is being answered, the bytes are of its body or of a pipelined request, and change no stage.
        if matches!(*stage, Stage::Idle { .. }) {
            *stage = Stage::Head {
                until: Instant::now() + self.limit,
            };
        }
    }

    pub(super) fn answering(&self) -> Answering {
        let mut stage = self.stage();
        let n = match *stage {
            Stage::Answering { n } => n + 1,
            _ => 1,
        };
        *stage = Stage::Answering { n };
        drop(stage);
        Answering(self.clone())
    }

    /// The time at which the head must be complete, while the client sends one.
    pub(super) fn head_until(&self) -> Option<Instant> {
        match *self.stage() {
            Stage::Head { until } => Some(until),
            _ => None,
        }
    }

    /// The time since which no request is being answered; `None` while one is.
    pub(super) fn quiet_since(&self) -> Option<Instant> {
        match *self.stage() {
            Stage::Answering { .. } => None,
            Stage::Handshake { since } | Stage::Idle { since } => Some(since),
            Stage::Head { until } => Some(until - self.limit),
        }
    }

    pub(super) fn is_in_handshake(&self) -> bool {
        matches!(*self.stage(), Stage::Handshake { .. })
    }

    /// Returns when the client has sent no request in time. Only for HTTP/2, whose pings keep idle connections alive.
    pub(super) async fn overdue(self) {
        loop {
            let until = match *self.stage() {
                Stage::Head { until } => until,
                Stage::Idle { since } => since + KEEP_ALIVE,
                Stage::Handshake { .. } | Stage::Answering { .. } => Instant::now() + KEEP_ALIVE,
            };
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The body of an answer: once it is dropped, its request no longer counts as being answered.
#[derive(Debug)]
pub(super) struct AnsweringBody {
    pub(super) body: Body,
    pub(super) _answering: Answering,
}

impl HttpBody for AnsweringBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let mut stage = self.0.stage();
        *stage = match *stage {
            Stage::Answering { n } if n > 1 => Stage::Answering { n: n - 1 },
            _ => Stage::Idle {
                since: Instant::now(),
            },
        };
    }
}
