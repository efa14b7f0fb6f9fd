//! `/metrics`: all metrics of a daemon as text for Prometheus.
//!
//! Nothing here knows a metric. On a cluster of 15,000 nodes the text has over 100 MB.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;

use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The length from which a piece of the text is complete, in bytes.
const PIECE_BYTES: usize = 64 << 10;
/// Memory of a piece beyond [`PIECE_BYTES`], for the label, value or help text that completes it, in bytes.
const LONGEST_WRITE: usize = 1 << 10;

/// The metrics of a daemon, as text for Prometheus. Clones share one registry.
#[derive(Clone, Debug)]
pub struct MetricsText(Arc<Mutex<Registry>>);

impl MetricsText {
    /// The text of these metrics. No metric can be registered afterwards.
    pub fn new(registry: Registry) -> Self {
        Self(Arc::new(Mutex::new(registry)))
    }

    /// The answer to one scrape.
    pub(crate) async fn scrape(&self) -> Response {
        match self.write().await {
            // Each piece is sent by itself, and its memory is free afterwards.
            Ok(pieces) => {
                let pieces = stream::iter(pieces.into_iter().map(Ok::<_, Infallible>));
                ([(CONTENT_TYPE, OPENMETRICS)], Body::from_stream(pieces)).into_response()
            }
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
        }
    }

    /// Writes the text of all metrics, on a thread for blocking work.
    ///
    /// The text is complete before the first piece is sent: collectors hold locks while they write, and a client may be slow.
    async fn write(&self) -> Result<Vec<Bytes>, fmt::Error> {
        // The lock admits one scrape at a time.
        let registry = Arc::clone(&self.0).lock_owned().await;
        let write = move || {
            let mut text = PiecedText::default();
            encode(&mut text, &registry)?;
            Ok(text.finish())
        };
        // A large text takes most of a second, in which a thread of the runtime could run no other task.
        spawn_blocking(write).await.unwrap_or(Err(fmt::Error))
    }
}

/// A text in pieces: one `String` of such a length would be copied whenever it grows, and have three times the memory meanwhile.
#[derive(Debug, Default)]
struct PiecedText {
    complete: Vec<Bytes>,
    piece: String,
}

impl PiecedText {
    fn finish(mut self) -> Vec<Bytes> {
        self.complete.push(self.piece.into());
        self.complete
    }
}

impl fmt::Write for PiecedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.piece.push_str(text);
        if self.piece.len() >= PIECE_BYTES {
            let next = String::with_capacity(PIECE_BYTES + LONGEST_WRITE);
            let piece = std::mem::replace(&mut self.piece, next);
            self.complete.push(piece.into());
        }
        Ok(())
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

    #[tokio::test]
    async fn a_metric_that_cannot_be_written_fails_the_scrape() {
        let answer = MetricsText::new(registry_of(Broken)).scrape().await;
        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}
