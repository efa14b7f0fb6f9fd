//! Asks the API server to evict a pod. Disruption budgets may forbid that, and so do the plugin's roles unless the operator adds
//! the right.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};

use daemon::api_server::one_line;
use tracing::{info, warn};

use crate::node::api_request::within;
use crate::node::pods::NodePod;

const LIMIT: Duration = Duration::from_secs(5);

/// Evicts this pod, not another one of its name; `why` is for the log. Returns true if the API server has accepted that or has no
/// such pod.
pub(crate) async fn evict(client: &Client, pod: &NodePod, why: &str) -> bool {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    // kube's own function for evictions writes the options under a name that the API server ignores.
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid.as_str()}},
    });
    let params = PostParams::default();
    let posted = api.create_subresource::<_, Value>("eviction", &pod.name, &params, &eviction);
    let evicted = within(LIMIT, "evict the pod", posted).await;
    match &evicted {
        // 404 means that the pod is gone already.
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
