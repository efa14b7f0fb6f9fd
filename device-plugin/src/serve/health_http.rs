//! `/healthz` and `/readyz` over HTTP, for the kubelet that runs this daemon, and `/metrics` for whoever collects them.

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use axum::routing::get;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tracing::warn;

use crate::pods::Pods;

/// What makes this daemon ready.
#[derive(Clone, Debug)]
pub(super) struct Readiness {
    /// Whether kubelet knows each resource that this node has.
    pub(super) registered: Vec<watch::Receiver<bool>>,
    /// The pods of this node.
    pub(super) pods: watch::Receiver<Pods>,
}

/// The answer to a probe of readiness.
pub(super) trait ReadinessCheck:
    Fn() -> (StatusCode, &'static str) + Clone + Send + Sync + 'static
{
}

impl<F: Fn() -> (StatusCode, &'static str) + Clone + Send + Sync + 'static> ReadinessCheck for F {}

impl Readiness {
    pub(super) fn answer(&self) -> (StatusCode, &'static str) {
        if !self.pods.borrow().is_synced() {
            return (
                StatusCode::SERVICE_UNAVAILABLE,
                "the pods of this node are not known yet\n",
            );
        }
        if !self
            .registered
            .iter()
            .all(|is_registered| *is_registered.borrow())
        {
            return (StatusCode::SERVICE_UNAVAILABLE, "not registered with kubelet\n");
        }
        (StatusCode::OK, "ok\n")
    }
}

/// Answers until the task is dropped.
pub(super) async fn serve(listener: TcpListener, readiness: impl ReadinessCheck, registry: Arc<Registry>) {
    let router = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(move || std::future::ready(readiness())))
        .route("/metrics", get(move || async move { metrics(&registry) }));
    if let Err(error) = axum::serve(listener, router).await {
        warn!(%error, "health requests are no longer answered");
    }
}

fn metrics(registry: &Registry) -> (StatusCode, [(HeaderName, &'static str); 1], String) {
    let mut text = String::new();
    let status = match prometheus_client::encoding::text::encode(&mut text, registry) {
        Ok(()) => StatusCode::OK,
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
    };
    (
        status,
        [(
            CONTENT_TYPE,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        )],
        text,
    )
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::nothing_yet(false, [false, false], StatusCode::SERVICE_UNAVAILABLE)]
    #[case::kubelet_knows_one(true, [true, false], StatusCode::SERVICE_UNAVAILABLE)]
    #[case::pods_unknown(false, [true, true], StatusCode::SERVICE_UNAVAILABLE)]
    #[case::all_there(true, [true, true], StatusCode::OK)]
    fn ready_when_pods_are_known_and_all_resources_registered(
        #[case] is_synced: bool,
        #[case] registered: [bool; 2],
        #[case] expected: StatusCode,
    ) {
        let mut known = Pods::default();
        if is_synced {
            known.reset([]);
        }
        let (_pods, pods) = watch::channel(known);
        let senders = registered.map(watch::Sender::new);
        let readiness = Readiness {
            registered: senders.iter().map(watch::Sender::subscribe).collect(),
            pods,
        };
        assert_eq!(readiness.answer().0, expected);
    }
}
