//! The waits of a binding cycle: for Permit, and for volumes that `PreBind` binds; and the nodes that such volumes pin pods to.
//!
//! As kube-scheduler 1.35 and later the loop writes `status.nominatedNodeName` before it waits; pods that say so are treated as
//! by an older one.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::report::namespace;

/// Annotation: the milliseconds that Permit makes the pod wait.
pub const PERMIT_WAIT: &str = "testbed/permit-wait-ms";
/// Annotation: the milliseconds that `PreBind` takes to bind the pod's volumes that are not bound yet.
pub const VOLUME_WAIT: &str = "testbed/volume-wait-ms";
/// Annotation: the pod is treated as by a kube-scheduler before 1.35, which nominates no node for pods that wait.
pub const NO_NOMINATION: &str = "testbed/no-nomination";

/// The wait of one binding cycle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Waits {
    pub(super) total: Duration,
    pub(super) nominates: bool,
}

/// The node on which each claim is bound, by namespace and name: volumes that wait for their first consumer are local to it.
#[derive(Debug, Default)]
pub(super) struct Claims(HashMap<(String, String), String>);

impl Claims {
    /// The wait before the loop binds a pod.
    pub(super) fn waits(&self, pod: &Pod) -> Waits {
        let annotated = |key: &str| {
            pod.annotations()
                .get(key)
                .and_then(|text| text.parse().ok())
                .map(Duration::from_millis)
        };
        let is_unbound = claims(pod).any(|claim| !self.0.contains_key(&claim));
        let volumes = annotated(VOLUME_WAIT).filter(|_| is_unbound).unwrap_or_default();
        let total = annotated(PERMIT_WAIT).unwrap_or_default() + volumes;
        Waits {
            total,
            nominates: !total.is_zero() && !pod.annotations().contains_key(NO_NOMINATION),
        }
    }

    /// The volumes of a pod are bound on this node.
    pub(super) fn bind(&mut self, pod: &Pod, node: &str) {
        for claim in claims(pod) {
            self.0.entry(claim).or_insert_with(|| node.to_owned());
        }
    }

    /// Returns true if a volume of the pod is on another node.
    pub(super) fn refuse(&self, pod: &Pod, node: &str) -> bool {
        claims(pod).any(|claim| self.0.get(&claim).is_some_and(|bound| bound != node))
    }
}

fn claims(pod: &Pod) -> impl Iterator<Item = (String, String)> {
    let volumes = pod.spec.iter().filter_map(|spec| spec.volumes.as_ref()).flatten();
    let names =
        volumes.filter_map(|volume| Some(volume.persistent_volume_claim.as_ref()?.claim_name.clone()));
    names.map(|name| (namespace(pod).to_owned(), name))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(annotations: &Value, claim: &str) -> Pod {
        let volumes = json!([{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]);
        let metadata = json!({"name": "p", "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": [], "volumes": volumes}}))
            .unwrap()
    }

    #[test]
    fn volumes_are_waited_for_once_and_pin_the_pod() {
        let (mut claims, waiting) = (Claims::default(), pod(&json!({VOLUME_WAIT: "500"}), "a"));
        assert_eq!(
            claims.waits(&waiting),
            Waits {
                total: Duration::from_millis(500),
                nominates: true
            }
        );
        assert!(!claims.refuse(&waiting, "n1"));
        claims.bind(&waiting, "n1");
        assert_eq!(claims.waits(&waiting), Waits::default());
        assert!(
            claims.refuse(&waiting, "n2")
                && !claims.refuse(&waiting, "n1")
                && !claims.refuse(&pod(&json!({}), "b"), "n2")
        );
    }

    #[test]
    fn permit_and_an_older_kube_scheduler() {
        let pod = pod(
            &json!({PERMIT_WAIT: "20", VOLUME_WAIT: "10", NO_NOMINATION: ""}),
            "a",
        );
        assert_eq!(
            Claims::default().waits(&pod),
            Waits {
                total: Duration::from_millis(30),
                nominates: false
            }
        );
    }
}
