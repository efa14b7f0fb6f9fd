//! `/healthz`, `/readyz`, `/metrics` and `/version`, for kubelet's probes and for Prometheus.

use std::fmt;
use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::registry::Registry;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics of a daemon, as text for Prometheus. Clones share one registry.
#[derive(Clone, Debug)]
pub struct MetricsText(Arc<Mutex<Registry>>);

impl MetricsText {
    /// The text of these metrics. No metric can be registered afterwards.
    pub fn new(registry: Registry) -> Self {
        Self(Arc::new(Mutex::new(registry)))
    }

    /// Writes all metrics as text for Prometheus, on a thread for blocking work.
    async fn encode(&self) -> Result<String, fmt::Error> {
        // The lock admits one scrape at a time: on a cluster of 15,000 nodes the text has over 100 MB.
        let registry = Arc::clone(&self.0).lock_owned().await;
        let encode = move || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).map(|()| text)
        };
        // Such a text takes most of a second, in which a thread of the runtime could run no other task.
        spawn_blocking(encode).await.unwrap_or(Err(fmt::Error))
    }
}

/// The routes of probes and metrics. `readiness` returns the reason if the daemon is not ready; `/healthz` answers while the
/// runtime runs tasks.
pub fn router(
    readiness: impl Fn() -> Result<(), String> + Clone + Send + Sync + 'static,
    metrics: MetricsText,
) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(async move || ready(readiness())))
        .route("/metrics", get(async move || scrape(&metrics).await))
        .route("/version", get(version))
}

/// Answers with the version of this build.
pub async fn version() -> String {
    format!("{}\n", env!("CARGO_PKG_VERSION"))
}

/// The answer of `/readyz`: 200, or 503 with the reason for which the daemon is not ready.
fn ready(readiness: Result<(), String>) -> (StatusCode, String) {
    match readiness {
        Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

/// The answer of `/metrics`.
async fn scrape(metrics: &MetricsText) -> Response {
    match metrics.encode().await {
        Ok(text) => ([(CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use axum::body::Body;
    use axum::http::Request;
    use prometheus_client::collector::Collector;
    use prometheus_client::encoding::DescriptorEncoder;
    use tower::ServiceExt;

    use super::*;

    /// A metric that takes until the test lets it end, or ten seconds.
    #[derive(Debug)]
    struct SlowMetric {
        running: Arc<AtomicUsize>,
        release: std::sync::Mutex<mpsc::Receiver<()>>,
    }

    impl Collector for SlowMetric {
        fn encode(&self, _: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
            self.running.fetch_add(1, Ordering::SeqCst);
            // An error means that the test has given up.
            let _ = self.release.lock().unwrap().recv_timeout(Duration::from_secs(10));
            self.running.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        }
    }

    async fn status(router: &Router, path: &str) -> StatusCode {
        let request = Request::get(path).body(Body::empty()).unwrap();
        router.clone().oneshot(request).await.unwrap().status()
    }

    /// A scrape of a large cluster kept a runtime thread, and all requests on it, for most of a second.
    #[tokio::test]
    async fn other_requests_are_answered_during_a_scrape_and_a_second_scrape_waits() {
        let (release, released) = mpsc::channel();
        let running = Arc::new(AtomicUsize::new(0));
        let mut registry = Registry::default();
        registry.register_collector(Box::new(SlowMetric {
            running: Arc::clone(&running),
            release: std::sync::Mutex::new(released),
        }));
        let router = router(|| Ok(()), MetricsText::new(registry));
        let scrapes = [router.clone(), router.clone()]
            .map(|router| tokio::spawn(async move { status(&router, "/metrics").await }));
        while running.load(Ordering::SeqCst) == 0 && !scrapes[0].is_finished() {
            tokio::task::yield_now().await;
        }
        assert_eq!(status(&router, "/readyz").await, StatusCode::OK);
        assert_eq!(
            running.load(Ordering::SeqCst),
            1,
            "the first scrape goes on, and no second one beside it"
        );
        for scrape in scrapes {
            release.send(()).unwrap();
            assert_eq!(scrape.await.unwrap(), StatusCode::OK);
        }
    }
}
