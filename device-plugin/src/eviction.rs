//! Asks the API server to evict a pod. Disruption budgets and the cluster's roles may forbid that: by default the plugin has no
//! permission.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::pods::NodePod;

/// Longest duration of an eviction.
const LIMIT: Duration = Duration::from_secs(5);

/// A pod was not evicted.
#[derive(Debug, thiserror::Error)]
pub enum EvictionFailed {
    /// The API server refuses it, for now or for good.
    #[error("cannot evict pod {pod}")]
    Refused {
        /// The pod.
        pod: String,
        /// The API server's error.
        #[source]
        source: Box<kube::Error>,
    },
    /// No answer.
    #[error("cannot evict pod {0}: no answer within {LIMIT:?}")]
    Slow(String),
}

/// Evicts exactly this pod, not another one of its name.
///
/// # Errors
/// It was not done, or it is not known whether it was.
pub async fn evict(client: &Client, pod: &NodePod) -> Result<(), EvictionFailed> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    // kube's own call for this writes the options under a name that the API server does not know.
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid.as_str()}},
    });
    let params = PostParams::default();
    let posted = api.create_subresource::<_, Value>("eviction", &pod.name, &params, &eviction);
    match timeout(LIMIT, posted).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(()),
        Ok(Err(source)) => Err(EvictionFailed::Refused {
            pod: pod.display_name(),
            source: Box::new(source),
        }),
        Err(_) => Err(EvictionFailed::Slow(pod.display_name())),
    }
}
