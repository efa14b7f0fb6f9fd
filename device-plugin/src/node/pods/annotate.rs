//! Writes annotations of a pod.

use std::collections::BTreeMap;
use std::time::Duration;

use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use proto::pod::Pod;
use serde_json::json;
use tracing::info;

use crate::node::api_request::{ApiRequestError, within};

use super::NodePod;

/// Longest duration of the request; kubelet waits for some of these requests.
const REQUEST_LIMIT: Duration = Duration::from_secs(4);

/// Writes annotations of a pod. Succeeds also if the pod has been deleted, or another pod has its name by now.
pub(crate) async fn annotate(
    client: &Client,
    pod: &NodePod,
    annotations: &BTreeMap<String, String>,
) -> Result<(), ApiRequestError> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    // The UID makes the API server refuse the patch of another pod of this name.
    let patch = Patch::Merge(json!({"metadata": {"uid": pod.uid.as_str(), "annotations": annotations}}));
    let params = PatchParams::default();
    let name = pod.display_name();
    let what = format!("write annotations of pod {name}");
    match within(REQUEST_LIMIT, what, api.patch(&pod.name, &params, &patch)).await {
        Ok(_) => {
            let keys: Vec<&str> = annotations.keys().map(String::as_str).collect();
            info!(pod = name, keys = keys.join(","), "wrote annotations of the pod");
            Ok(())
        }
        Err(ApiRequestError::Failed { source, .. }) if is_gone(&source) => Ok(()),
        Err(error) => Err(error),
    }
}

/// True if the answer shows that the pod is gone, or that another pod has its name.
fn is_gone(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else {
        return false;
    };
    status.code == 404 || (status.code == 409 && status.message.to_lowercase().contains("uid"))
}
