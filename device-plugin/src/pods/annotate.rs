//! Writes annotations of one pod.

use std::collections::BTreeMap;
use std::time::Duration;

use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use proto::pod::Pod;
use serde_json::json;
use tokio::time::timeout;
use tracing::info;

use daemon::api_server::one_line;

use super::NodePod;

/// Longest duration of the request: kubelet waits for some.
const REQUEST_LIMIT: Duration = Duration::from_secs(4);

/// Writes annotations of a pod; one that is gone, or replaced by another of its name, counts as done.
///
/// # Errors
/// They were not written, or it is not known whether they were.
pub async fn annotate(
    client: &Client,
    pod: &NodePod,
    annotations: &BTreeMap<String, String>,
) -> anyhow::Result<()> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    // The UID makes the API server refuse the patch of another pod of this name.
    let patch = Patch::Merge(json!({"metadata": {"uid": pod.uid.as_str(), "annotations": annotations}}));
    let params = PatchParams::default();
    match timeout(REQUEST_LIMIT, api.patch(&pod.name, &params, &patch)).await? {
        Ok(_) => {
            let keys: Vec<&str> = annotations.keys().map(String::as_str).collect();
            info!(
                pod = pod.display_name(),
                keys = keys.join(","),
                "wrote annotations of the pod"
            );
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(kube::Error::Api(status))
            if status.code == 409 && status.message.to_lowercase().contains("uid") =>
        {
            Ok(())
        }
        Err(error) => {
            let problem = format!("cannot write annotations of pod {}", pod.display_name());
            Err(anyhow::anyhow!(one_line(&error)).context(problem))
        }
    }
}
