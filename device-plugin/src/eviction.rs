//! Asks the API server to evict a pod. Disruption budgets and the cluster's roles may forbid that: by default the plugin has no
//! permission.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::api_request::{RequestError, within};
use crate::pods::NodePod;

/// Longest duration of an eviction.
const LIMIT: Duration = Duration::from_secs(5);

/// Evicts exactly this pod, not another one of its name.
///
/// # Errors
/// It was not done, or it is not known whether it was.
pub async fn evict(client: &Client, pod: &NodePod) -> Result<(), RequestError> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    // kube's own call for this writes the options under a name that the API server does not know.
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid.as_str()}},
    });
    let params = PostParams::default();
    let posted = api.create_subresource::<_, Value>("eviction", &pod.name, &params, &eviction);
    match within(LIMIT, format!("evict pod {}", pod.display_name()), posted).await {
        Err(error) if error.status() != Some(404) => Err(error),
        _ => Ok(()),
    }
}
