//! The binding cycle: its waits for Permit and for volumes, then an extender's bind verb or kube-scheduler's own binding.
//!
//! The loop writes `status.nominatedNodeName` before it waits, as kube-scheduler does since 1.35. For pods with
//! the annotation [`NO_NOMINATION`] it behaves like kube-scheduler before 1.35.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Status};
use kube::api::{Api, PostParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use tracing::warn;

use super::extender::ExtenderClient;
use super::report::{namespace, patch_status};

/// Binds pods; cloned into every binding cycle.
#[derive(Clone)]
pub(super) struct PodBinder {
    client: Client,
    extender: Option<ExtenderClient>,
}

impl PodBinder {
    /// A binder that calls the extender with a bind verb, if there is one.
    pub(super) fn new(client: Client, extenders: &[ExtenderClient]) -> Self {
        Self {
            client,
            extender: extenders
                .iter()
                .find(|extender| !extender.configuration.bind_verb.is_empty())
                .cloned(),
        }
    }

    /// Waits for as long as Permit and `PreBind` delay the binding.
    pub(super) async fn wait(&self, pod: &Pod, node: &str, waits: &Waits) {
        if waits.nominates
            && let Err(error) = patch_status(&self.client, pod, &json!({"nominatedNodeName": node})).await
        {
            warn!(pod = pod.name_any(), %error, "cannot nominate a node for a pod that waits");
        }
        tokio::time::sleep(waits.total).await;
    }

    /// Binds a pod, by the extender that binds or else directly; a failure is not repeated.
    pub(super) async fn bind(&self, pod: &Pod, uid: &str, node: &str) -> Result<(), String> {
        if let Some(extender) = &self.extender
            && extender.is_interested(pod)
        {
            // extendersBinding: there is no second try by the default binder after an error.
            return extender.bind(namespace(pod), &pod.name_any(), uid, node).await;
        }
        let bound = self.bind_directly(pod, uid, node).await;
        bound.map_err(|error| error.to_string())
    }

    /// Binds a pod by its `binding` subresource, as kube-scheduler does if no extender binds the pod.
    async fn bind_directly(&self, pod: &Pod, uid: &str, node: &str) -> kube::Result<()> {
        let target = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        let metadata = ObjectMeta {
            name: Some(pod.name_any()),
            uid: Some(uid.to_owned()),
            ..ObjectMeta::default()
        };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace(pod));
        let binding = Binding { metadata, target };
        let params = PostParams::default();
        // The type decides the decoding: the API server answers a binding with a Status.
        let _: Status = pods
            .create_subresource("binding", &pod.name_any(), &params, &binding)
            .await?;
        Ok(())
    }
}

/// Annotation: the milliseconds that Permit makes the pod wait.
pub const PERMIT_WAIT: &str = "testbed/permit-wait-ms";
/// Annotation: the milliseconds that `PreBind` takes to bind the pod's volumes that are not bound yet.
pub const VOLUME_WAIT: &str = "testbed/volume-wait-ms";
/// Annotation: the pod is treated as by a kube-scheduler before 1.35, which nominates no node for pods that wait.
pub const NO_NOMINATION: &str = "testbed/no-nomination";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Waits {
    pub(super) total: Duration,
    /// True if the pod is nominated to its node before the wait.
    pub(super) nominates: bool,
}

/// The node of each bound volume claim, by namespace and name of the claim. Volumes are local to the node on
/// which their first pod was placed.
#[derive(Debug, Default)]
pub(super) struct VolumeClaims(HashMap<(String, String), String>);

impl VolumeClaims {
    /// The time that Permit and `PreBind` delay the binding of a pod.
    pub(super) fn waits(&self, pod: &Pod) -> Waits {
        let annotated = |key: &str| {
            let milliseconds = pod.annotations().get(key).and_then(|text| text.parse().ok());
            Duration::from_millis(milliseconds.unwrap_or(0))
        };
        let mut total = annotated(PERMIT_WAIT);
        // VolumeBinding waits in PreBind only for claims that no earlier pod has had bound.
        if claims(pod).iter().any(|claim| !self.0.contains_key(claim)) {
            total += annotated(VOLUME_WAIT);
        }
        Waits {
            total,
            nominates: !total.is_zero() && !pod.annotations().contains_key(NO_NOMINATION),
        }
    }

    /// Binds the unbound volumes of a pod on this node.
    pub(super) fn bind(&mut self, pod: &Pod, node: &str) {
        for claim in claims(pod) {
            self.0.entry(claim).or_insert_with(|| node.to_owned());
        }
    }

    /// Returns true if a volume of the pod is on another node.
    pub(super) fn is_bound_elsewhere(&self, pod: &Pod, node: &str) -> bool {
        let claims = claims(pod);
        let mut bound = claims.iter().filter_map(|claim| self.0.get(claim));
        bound.any(|bound| bound != node)
    }
}

fn claims(pod: &Pod) -> Vec<(String, String)> {
    let mut claims = Vec::new();
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        if let Some(source) = &volume.persistent_volume_claim {
            claims.push((namespace(pod).to_owned(), source.claim_name.clone()));
        }
    }
    claims
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn pod(annotations: &Value, claim: &str) -> Pod {
        let volumes = json!([{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]);
        let metadata = json!({"name": "p", "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": [], "volumes": volumes}}))
            .unwrap()
    }

    #[test]
    fn binding_waits_for_volumes_once_and_they_pin_the_pod() {
        let (mut claims, waiting) = (VolumeClaims::default(), pod(&json!({VOLUME_WAIT: "500"}), "a"));
        assert_eq!(
            claims.waits(&waiting),
            Waits {
                total: Duration::from_millis(500),
                nominates: true
            }
        );
        assert!(!claims.is_bound_elsewhere(&waiting, "n1"));
        claims.bind(&waiting, "n1");
        assert_eq!(claims.waits(&waiting), Waits::default());
        assert!(
            claims.is_bound_elsewhere(&waiting, "n2")
                && !claims.is_bound_elsewhere(&waiting, "n1")
                && !claims.is_bound_elsewhere(&pod(&json!({}), "b"), "n2")
        );
    }

    #[test]
    fn annotations_of_a_pod_delay_its_binding_and_suppress_the_nomination() {
        let pod = pod(
            &json!({PERMIT_WAIT: "20", VOLUME_WAIT: "10", NO_NOMINATION: ""}),
            "a",
        );
        assert_eq!(
            VolumeClaims::default().waits(&pod),
            Waits {
                total: Duration::from_millis(30),
                nominates: false
            }
        );
    }
}
