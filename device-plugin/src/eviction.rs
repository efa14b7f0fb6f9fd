//! Asks the API server to evict a pod. Disruption budgets and the cluster's roles may forbid that: by default the plugin has no
//! permission.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};

use daemon::api_server::one_line;
use tracing::{info, warn};

use crate::api_request::within;
use crate::pods::NodePod;

/// Longest duration of an eviction.
const LIMIT: Duration = Duration::from_secs(5);

/// Evicts exactly this pod, not another one of its name. Returns true if it is gone or will go.
pub async fn evict(client: &Client, pod: &NodePod, why: &str) -> bool {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    // kube's own call for this writes the options under a name that the API server does not know.
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid.as_str()}},
    });
    let params = PostParams::default();
    let posted = api.create_subresource::<_, Value>("eviction", &pod.name, &params, &eviction);
    let evicted = within(LIMIT, "evict the pod", posted).await;
    match &evicted {
        Err(error) if error.status() != Some(404) => {
            warn!(
                pod = pod.display_name(),
                why,
                error = one_line(error),
                "cannot evict a pod, trying again later"
            );
            false
        }
        _ => {
            info!(pod = pod.display_name(), why, "evicted a pod");
            true
        }
    }
}
