//! `/healthz`, `/readyz`, `/metrics` and `/version`, for kubelet's probes and for Prometheus.

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;

use crate::metrics_text::MetricsText;

/// The routes of probes and metrics. `readiness` returns the reason if the daemon is not ready.
pub fn router(
    readiness: impl Fn() -> Result<(), String> + Clone + Send + Sync + 'static,
    metrics: MetricsText,
) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(async move || ready(readiness())))
        .route("/metrics", get(async move || metrics.scrape().await))
        .route("/version", get(version))
}

/// The answer of `/version`.
pub async fn version() -> String {
    format!("{}\n", env!("CARGO_PKG_VERSION"))
}

fn ready(readiness: Result<(), String>) -> (StatusCode, String) {
    match readiness {
        Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}
