//! Devices that DRA drivers have prepared for claims, as pod-resources lists them.
//!
//! A test sets the prepared devices ([`super::Kubelet::prepare_claim`]); the allocation by kube-scheduler and the calls between
//! kubelet and drivers are left out, and so are claims from templates and claims for extended resources.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use proto::kubelet::podresources::{CdiDevice, ClaimResource, DynamicResource};

use super::pod::{ContainerSpec, KubeletPod};

/// A device as its driver prepared it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedDevice {
    /// Name of the driver.
    pub driver: String,
    /// The driver's pool that the device is in.
    pub pool: String,
    /// Name of the device.
    pub name: String,
    /// The CDI devices that a container gets for it.
    pub cdi_names: Vec<String>,
}

/// Prepared devices by namespace and name of the claim. They outlive the kubelet process, which keeps a checkpoint of them.
#[derive(Debug, Default)]
pub(crate) struct PreparedClaims(Mutex<BTreeMap<(String, String), Vec<PreparedDevice>>>);

impl PreparedClaims {
    pub(crate) fn prepare(&self, namespace: &str, name: &str, devices: Vec<PreparedDevice>) {
        let mut claims = self.0.lock();
        claims.insert((namespace.to_owned(), name.to_owned()), devices);
    }

    /// The claims that a container uses, with their devices.
    pub(crate) fn of(&self, pod: &KubeletPod, container: &ContainerSpec) -> Vec<DynamicResource> {
        let claims = self.0.lock();
        let mut resources = Vec::new();
        for (alias, name) in &pod.claims {
            if !container.claims.contains(alias) {
                continue;
            }
            // As in kubelet, the list is empty if one of the claims is not prepared.
            let Some(devices) = claims.get(&(pod.namespace.clone(), name.clone())) else {
                return Vec::new();
            };
            resources.push(DynamicResource {
                claim_name: name.clone(),
                claim_namespace: pod.namespace.clone(),
                claim_resources: claim_resources(devices),
            });
        }
        resources
    }
}

/// The entries of a claim's devices.
fn claim_resources(devices: &[PreparedDevice]) -> Vec<ClaimResource> {
    let mut cdi_by_driver = BTreeMap::<String, Vec<CdiDevice>>::new();
    let mut resources = Vec::new();
    for device in devices {
        // As in kubelet, each entry of a driver repeats the CDI devices of the driver's earlier entries.
        let cdi_devices = cdi_by_driver.entry(device.driver.clone()).or_default();
        for name in &device.cdi_names {
            cdi_devices.push(CdiDevice { name: name.clone() });
        }
        resources.push(ClaimResource {
            cdi_devices: cdi_devices.clone(),
            driver_name: device.driver.clone(),
            pool_name: device.pool.clone(),
            device_name: device.name.clone(),
            share_id: None,
        });
    }
    resources
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn device(name: &str) -> PreparedDevice {
        PreparedDevice {
            driver: "gpu.nvidia.com".to_owned(),
            pool: "n1".to_owned(),
            name: name.to_owned(),
            cdi_names: vec![format!("k8s.gpu.nvidia.com/claim=u-{name}")],
        }
    }

    /// A pod with two claims, of which its containers use the first, both, and none.
    fn pod() -> KubeletPod {
        let claim = |name: &str| json!({"name": name, "resourceClaimName": format!("claim-{name}")});
        let container = |name: &str, claims: &[&str]| {
            let claims: Vec<_> = claims.iter().map(|claim| json!({"name": claim})).collect();
            json!({"name": name, "resources": {"claims": claims}})
        };
        let pod = json!({
            "metadata": {"name": "p", "namespace": "team", "uid": "u"},
            "spec": {
                "resourceClaims": [claim("a"), claim("b")],
                "containers": [container("one", &["a"]), container("both", &["a", "b"]), container("none", &[])],
            },
        });
        KubeletPod::read(&serde_json::from_value(pod).unwrap()).unwrap()
    }

    fn listed_for(claims: &PreparedClaims, container: &str) -> Vec<(String, Vec<(String, usize)>)> {
        let pod = pod();
        let container = pod
            .containers
            .iter()
            .find(|found| found.name == container)
            .unwrap();
        let devices = |claim: DynamicResource| {
            let devices = claim
                .claim_resources
                .into_iter()
                .map(|device| (device.device_name, device.cdi_devices.len()));
            (claim.claim_name, devices.collect())
        };
        claims.of(&pod, container).into_iter().map(devices).collect()
    }

    #[test]
    fn containers_hold_the_claims_that_they_name() {
        let claims = PreparedClaims::default();
        claims.prepare("team", "claim-a", vec![device("gpu-0"), device("gpu-1")]);
        let a = (
            "claim-a".to_owned(),
            vec![("gpu-0".to_owned(), 1), ("gpu-1".to_owned(), 2)],
        );
        assert_eq!(listed_for(&claims, "one"), std::slice::from_ref(&a));
        assert_eq!(listed_for(&claims, "none"), []);
        assert_eq!(listed_for(&claims, "both"), []);
        claims.prepare("team", "claim-b", vec![device("gpu-2")]);
        claims.prepare("other", "claim-a", Vec::new());
        assert_eq!(
            listed_for(&claims, "both"),
            [a, ("claim-b".to_owned(), vec![("gpu-2".to_owned(), 1)])]
        );
    }
}
