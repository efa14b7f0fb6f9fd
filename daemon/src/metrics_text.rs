//! `/metrics`: all metrics of a daemon as text for Prometheus.
//!
//! Nothing here knows a metric. On a cluster of 15,000 nodes the text has over 100 MB, of which a few pieces are in memory at a
//! time: one scrape writes it while its client reads.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, mpsc};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, timeout_at};

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The length from which a piece of the text is complete, in bytes.
const PIECE_BYTES: usize = 64 << 10;
/// Memory of a piece beyond [`PIECE_BYTES`], for the label, value or help text that completes it, in bytes.
const LONGEST_WRITE: usize = 1 << 10;
/// Most pieces that wait for the client to read them.
const PIECES_AHEAD: usize = 8;
/// Longest time of a scrape, as by default in Prometheus. A slower client gets no more, since the next scrape waits for the end.
const LONGEST_SCRAPE: Duration = Duration::from_secs(10);

/// The metrics of a daemon, as text for Prometheus. Clones share one registry.
#[derive(Clone, Debug)]
pub struct MetricsText {
    registry: Arc<Mutex<Registry>>,
    longest_scrape: Duration,
}

#[derive(Debug)]
struct PiecedText {
    piece: String,
    complete: mpsc::Sender<Bytes>,
    runtime: Handle,
    deadline: Instant,
}

impl MetricsText {
    /// The text of these metrics. No metric can be registered afterwards.
    pub fn new(registry: Registry) -> Self {
        Self {
            registry: Arc::new(Mutex::new(registry)),
            longest_scrape: LONGEST_SCRAPE,
        }
    }

    /// The answer to one scrape. It breaks off if a metric cannot be written, or if the client is slow.
    pub(crate) async fn scrape(&self) -> Response {
        // The lock admits one scrape at a time.
        let registry = Arc::clone(&self.registry).lock_owned().await;
        let (complete, mut pieces) = mpsc::channel(PIECES_AHEAD);
        let mut text = PiecedText {
            piece: String::new(),
            complete,
            runtime: Handle::current(),
            deadline: Instant::now() + self.longest_scrape,
        };
        // A large text takes most of a second, in which a thread of the runtime could run no other task.
        let writing = spawn_blocking(move || {
            encode(&mut text, &registry)?;
            text.send()
        });
        let Some(first) = pieces.recv().await else {
            return (StatusCode::INTERNAL_SERVER_ERROR, "a metric cannot be written\n").into_response();
        };
        let all = stream::once(async { Ok(first) }).chain(rest_of(pieces, writing));
        ([(CONTENT_TYPE, OPENMETRICS)], Body::from_stream(all)).into_response()
    }
}

/// The pieces of a text that is being written, and an error at the end if it is not complete.
fn rest_of(
    pieces: mpsc::Receiver<Bytes>,
    writing: JoinHandle<fmt::Result>,
) -> impl Stream<Item = Result<Bytes, fmt::Error>> {
    stream::unfold((pieces, Some(writing)), async |(mut pieces, writing)| {
        if let Some(piece) = pieces.recv().await {
            return Some((Ok(piece), (pieces, writing)));
        }
        match writing?.await {
            Ok(Ok(())) => None,
            Ok(Err(_)) | Err(_) => Some((Err(fmt::Error), (pieces, None))),
        }
    })
}

impl PiecedText {
    /// Sends the piece, and begins the next one. Blocks the thread while the client is slow, until the deadline.
    fn send(&mut self) -> fmt::Result {
        let next = String::with_capacity(PIECE_BYTES + LONGEST_WRITE);
        let piece = std::mem::replace(&mut self.piece, next);
        let sent = self.complete.send(piece.into());
        match self.runtime.block_on(timeout_at(self.deadline, sent)) {
            Ok(Ok(())) => Ok(()),
            // The client is gone, or reads too slowly.
            Ok(Err(_)) | Err(_) => Err(fmt::Error),
        }
    }
}

impl fmt::Write for PiecedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.piece.push_str(text);
        if self.piece.len() < PIECE_BYTES {
            return Ok(());
        }
        self.send()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use axum::Router;
    use axum::http::Request;
    use http_body_util::BodyExt;
    use prometheus_client::collector::Collector;
    use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
    use prometheus_client::metrics::MetricType;
    use prometheus_client::metrics::gauge::ConstGauge;
    use tower::ServiceExt;

    use super::*;
    use crate::health;

    /// A metric that takes until the test lets it end, or ten seconds.
    #[derive(Debug)]
    struct SlowMetric {
        running: Arc<AtomicUsize>,
        release: std::sync::Mutex<mpsc::Receiver<()>>,
    }

    impl Collector for SlowMetric {
        fn encode(&self, _: DescriptorEncoder<'_>) -> fmt::Result {
            self.running.fetch_add(1, Ordering::SeqCst);
            // An error means that the test has given up.
            let _ = self.release.lock().unwrap().recv_timeout(Duration::from_secs(10));
            self.running.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        }
    }

    /// A metric with this number of samples.
    #[derive(Debug)]
    struct ManySamples(u32);

    impl Collector for ManySamples {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            let mut family = encoder.encode_descriptor("many", "Many samples", None, MetricType::Gauge)?;
            for number in 0..self.0 {
                ConstGauge::new(1.0).encode(family.encode_family(&[("number", number.to_string())])?)?;
            }
            Ok(())
        }
    }

    /// A metric that cannot be written.
    #[derive(Debug)]
    struct Broken;

    impl Collector for Broken {
        fn encode(&self, _: DescriptorEncoder<'_>) -> fmt::Result {
            Err(fmt::Error)
        }
    }

    fn registry_of(collector: impl Collector) -> Registry {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(collector));
        registry
    }

    async fn status(router: &Router, path: &str) -> StatusCode {
        let request = Request::get(path).body(Body::empty()).unwrap();
        router.clone().oneshot(request).await.unwrap().status()
    }

    /// A text of 120,000 GPUs takes most of a second to write.
    #[tokio::test]
    async fn other_requests_are_answered_during_a_scrape_and_a_second_scrape_waits() {
        let (release, released) = mpsc::channel();
        let running = Arc::new(AtomicUsize::new(0));
        let text = MetricsText::new(registry_of(SlowMetric {
            running: Arc::clone(&running),
            release: std::sync::Mutex::new(released),
        }));
        let router = health::router(|| Ok(()), text);
        let scrapes = [(); 2].map(|()| {
            let router = router.clone();
            tokio::spawn(async move { status(&router, "/metrics").await })
        });
        while running.load(Ordering::SeqCst) == 0 && !scrapes[0].is_finished() {
            tokio::task::yield_now().await;
        }
        assert_eq!(status(&router, "/readyz").await, StatusCode::OK);
        assert_eq!(
            running.load(Ordering::SeqCst),
            1,
            "the first scrape goes on, and no second one beside it"
        );
        for _ in &scrapes {
            release.send(()).unwrap();
        }
        for scrape in scrapes {
            assert_eq!(scrape.await.unwrap(), StatusCode::OK);
        }
    }

    /// The text of 120,000 GPUs has 133 MB, in a process that may have 1 GiB.
    #[tokio::test]
    async fn a_long_text_is_sent_in_pieces() {
        let mut whole = String::new();
        encode(&mut whole, &registry_of(ManySamples(20_000))).unwrap();
        let answer = MetricsText::new(registry_of(ManySamples(20_000))).scrape().await;
        assert_eq!(answer.status(), StatusCode::OK);
        let (mut body, mut sent) = (answer.into_body(), Vec::new());
        while let Some(frame) = body.frame().await {
            let piece = frame.unwrap().into_data().unwrap();
            assert!(
                piece.len() < PIECE_BYTES + LONGEST_WRITE,
                "{} bytes in a piece",
                piece.len()
            );
            sent.extend_from_slice(&piece);
        }
        assert!(sent.len() > 5 * PIECE_BYTES, "the text is short");
        assert!(
            sent == whole.as_bytes(),
            "the text differs from that of one piece"
        );
    }

    /// The pieces that a client gets, and true if the text is complete.
    async fn read(answer: Response) -> (usize, bool) {
        let (mut body, mut n_pieces) = (answer.into_body(), 0);
        while let Some(frame) = body.frame().await {
            if frame.is_err() {
                return (n_pieces, false);
            }
            n_pieces += 1;
        }
        (n_pieces, true)
    }

    /// Others would wait for a client that does not read.
    #[tokio::test]
    async fn the_text_for_a_slow_client_breaks_off() {
        let text = MetricsText {
            longest_scrape: Duration::ZERO,
            ..MetricsText::new(registry_of(ManySamples(100_000)))
        };
        let slow = text.scrape().await;
        // The second scrape begins when the first has ended.
        drop(text.scrape().await);
        let (n_pieces, is_complete) = read(slow).await;
        assert!(n_pieces <= 1 + PIECES_AHEAD && !is_complete, "{n_pieces} pieces");
    }

    #[tokio::test]
    async fn a_text_that_cannot_be_completed_breaks_off() {
        let mut registry = registry_of(ManySamples(10_000));
        registry.register_collector(Box::new(Broken));
        let (n_pieces, is_complete) = read(MetricsText::new(registry).scrape().await).await;
        assert!(n_pieces > 2 && !is_complete, "{n_pieces} pieces");
    }

    #[tokio::test]
    async fn a_metric_that_cannot_be_written_fails_the_scrape() {
        let answer = MetricsText::new(registry_of(Broken)).scrape().await;
        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}
