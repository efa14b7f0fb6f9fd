//! `/healthz`, `/readyz`, `/metrics` and `/version`, for kubelet's probes and for Prometheus.

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::registry::Registry;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The routes. `readiness` returns the reason if the daemon is not ready; `/healthz` answers while the runtime runs tasks.
pub fn router(
    readiness: impl Fn() -> Result<(), String> + Clone + Send + Sync + 'static,
    registry: Arc<Registry>,
) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(async move || ready(readiness())))
        .route("/metrics", get(async move || metrics(&registry)))
        .route("/version", get(version))
}

/// Answers with the version of this build.
pub async fn version() -> String {
    format!("{}\n", env!("CARGO_PKG_VERSION"))
}

fn ready(readiness: Result<(), String>) -> (StatusCode, String) {
    match readiness {
        Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

fn metrics(registry: &Registry) -> Response {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, registry) {
        Ok(()) => ([(CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}
