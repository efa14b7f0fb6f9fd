//! Warnings about this replica's own pod, which `kubectl describe pod` shows.

use std::time::Duration;

use http::Method;
use kube::Client;
use serde_json::json;
use tokio::time::timeout;
use tracing::warn;

use super::PodName;
use crate::api_server;

/// Longest time that the API server may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);

/// Writes an event of type `Warning`; one that cannot be written is logged.
pub(super) async fn write_warning(
    client: &Client,
    PodName { namespace, name }: &PodName,
    reason: &str,
    text: &str,
) {
    let now = jiff::Timestamp::now();
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": reason, "message": text, "count": 1,
        "metadata": {"namespace": namespace, "name": format!("{name}.{:x}", now.as_nanosecond())},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name},
        "source": {"component": "gpushare-scheduler"},
        "firstTimestamp": now.round(jiff::Unit::Second).unwrap_or(now).to_string(),
        "lastTimestamp": now.round(jiff::Unit::Second).unwrap_or(now).to_string(),
    });
    let path = format!("/api/v1/namespaces/{namespace}/events");
    let sent = timeout(
        REQUEST_TIMEOUT,
        api_server::send(client, Method::POST, &path, event.to_string().into_bytes()),
    )
    .await;
    let problem = match sent {
        Ok(Ok(answer)) if answer.status.is_success() => return,
        Ok(Ok(answer)) => answer.message(),
        Ok(Err(error)) => error,
        Err(_) => "no answer in time".to_owned(),
    };
    warn!(error = problem, "cannot write an event");
}
