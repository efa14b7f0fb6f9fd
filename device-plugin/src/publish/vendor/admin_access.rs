//! Finds devices of a claim that are allocated for administration only: a monitor sees them, and other pods may use them
//! meanwhile.
//!
//! kubelet does not report this, so the plugin reads each `ResourceClaim` that kubelet has prepared from the API server, once.
//! The devices of a claim count as used until the plugin has read it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, ensure};
use daemon::api_server::one_line;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client};
use serde::Deserialize;
use serde_json::json;
use tracing::warn;

use crate::node::api_request::within;

use super::allocation::{ClaimName, DraDevice};
use super::claims::ClaimedDevice;

const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// Leaves out devices that are allocated for administration only, by the `ResourceClaim`s that it reads and remembers.
pub(crate) struct AdminAccess {
    api: Client,
    /// The claims that containers used at the last call.
    known: BTreeMap<ClaimName, ReadClaim>,
}

/// A claim that a container uses, as last read.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ReadClaim {
    /// The claim's CDI devices, which identify the object: a claim may be deleted and created again with the same name.
    cdi_names: BTreeSet<String>,
    /// The devices that are allocated for administration only; none until the claim has been read.
    for_administration: Option<BTreeSet<DraDevice>>,
}

/// A device that a claim has been allocated.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClaimResult {
    driver: String,
    pool: String,
    device: String,
    #[serde(default)]
    admin_access: Option<bool>,
}

impl AdminAccess {
    pub(crate) fn new(api: Client) -> Self {
        Self {
            api,
            known: BTreeMap::new(),
        }
    }

    /// The claimed devices without those that are allocated for administration only.
    pub(super) async fn without_admin_access(
        &mut self,
        mut claimed: Vec<ClaimedDevice>,
    ) -> Vec<ClaimedDevice> {
        let mut cdi_names: BTreeMap<ClaimName, BTreeSet<String>> = BTreeMap::new();
        for device in &claimed {
            let names = cdi_names.entry(device.claim.clone()).or_default();
            names.extend(device.cdi_names.iter().cloned());
        }
        // Claims that no container uses any more are forgotten.
        let mut before = std::mem::take(&mut self.known);
        for (claim, cdi_names) in cdi_names {
            let known = before.remove(&claim).filter(|known| known.cdi_names == cdi_names);
            let present = match known {
                // The allocation of a claim does not change while a pod uses it.
                Some(known) if known.for_administration.is_some() => known,
                known => {
                    let found = self.get(&claim, &cdi_names).await;
                    // An attempt that has failed before is logged already.
                    if let (Err(error), None) = (&found, known) {
                        warn!(
                            error = one_line(error.as_ref()),
                            "the devices of the claim count as used"
                        );
                    }
                    ReadClaim {
                        cdi_names,
                        for_administration: found.ok(),
                    }
                }
            };
            self.known.insert(claim, present);
        }
        claimed.retain(|claimed| {
            let known = self.known.get(&claimed.claim);
            let for_administration = known.and_then(|known| known.for_administration.as_ref());
            for_administration.is_none_or(|devices| !devices.contains(&claimed.device))
        });
        claimed
    }

    /// Gets a claim, and returns its devices that are allocated for administration only.
    async fn get(
        &self,
        claim: &ClaimName,
        cdi_names: &BTreeSet<String>,
    ) -> anyhow::Result<BTreeSet<DraDevice>> {
        let resource = ApiResource::from_gvk_with_plural(
            &GroupVersionKind::gvk("resource.k8s.io", "v1", "ResourceClaim"),
            "resourceclaims",
        );
        let api: Api<DynamicObject> = Api::namespaced_with(self.api.clone(), &claim.namespace, &resource);
        let what = format!("get ResourceClaim {claim} (resource.k8s.io/v1)");
        let object = within(REQUEST_LIMIT, what, api.get(&claim.name)).await?;
        let uid = object.metadata.uid.unwrap_or_default();
        // A claim of this name may have been deleted and created again since kubelet prepared its devices.
        ensure!(
            !uid.is_empty() && cdi_names.iter().any(|name| name.contains(&uid)),
            "kubelet's CDI devices of ResourceClaim {claim} do not bear its UID {uid}"
        );
        let results = object.data.pointer("/status/allocation/devices/results");
        let results = results.cloned().unwrap_or_else(|| json!([]));
        let results = serde_json::from_value(results)
            .with_context(|| format!("ResourceClaim {claim} is not of the form of resource.k8s.io/v1"))?;
        Ok(for_administration(results))
    }
}

/// The devices that a claim has for administration only, without those that it has for use too.
fn for_administration(results: Vec<ClaimResult>) -> BTreeSet<DraDevice> {
    let (mut for_administration, mut used) = (BTreeSet::new(), BTreeSet::new());
    for result in results {
        let device = DraDevice {
            driver: result.driver,
            pool: result.pool,
            name: result.device,
        };
        if result.admin_access == Some(true) {
            for_administration.insert(device);
        } else {
            used.insert(device);
        }
    }
    for_administration.retain(|device| !used.contains(device));
    for_administration
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::Value;

    use super::*;
    use crate::publish::vendor::claims;
    use crate::tests::api_server::{ApiServer, failure};

    const UID: &str = "dab5ab50-d59a-42a6-af16-cfd4628c0f7a";

    fn claimed(device: &str) -> ClaimedDevice {
        ClaimedDevice {
            cdi_names: [format!("k8s.gpu.nvidia.com/claim={UID}-{device}")].into(),
            ..claims::tests::claimed(device)
        }
    }

    fn result(device: &str, admin_access: Option<bool>) -> Value {
        json!({"request": "r", "driver": "gpu.nvidia.com", "pool": "n1", "device": device, "adminAccess": admin_access})
    }

    fn claim(uid: &str, results: &[Value]) -> Value {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": "one-gpu", "namespace": "team", "uid": uid},
            "status": {"allocation": {"devices": {"results": results}}},
        })
    }

    fn refusal(code: u16) -> Value {
        failure(code, "x", "no")
    }

    /// Answers one request; its line.
    async fn answer(server: &mut ApiServer, object: &Value) -> String {
        let code = object
            .get("code")
            .and_then(Value::as_u64)
            .map_or(200, |code| u16::try_from(code).unwrap());
        server.answer(code, object).await.0
    }

    /// The names of the devices that count, of `gpu-0` and `gpu-1`.
    async fn counted(object: &Value) -> Vec<String> {
        let (client, mut server) = ApiServer::new();
        let mut access = AdminAccess::new(client);
        let (left, line) = tokio::join!(
            access.without_admin_access(vec![claimed("gpu-0"), claimed("gpu-1")]),
            answer(&mut server, object)
        );
        assert_eq!(
            line,
            "GET /apis/resource.k8s.io/v1/namespaces/team/resourceclaims/one-gpu"
        );
        left.into_iter().map(|claimed| claimed.device.name).collect()
    }

    #[rstest]
    #[case::all_for_administration(claim(UID, &[result("gpu-0", Some(true)), result("gpu-1", Some(true))]), &[])]
    #[case::one_for_use(claim(UID, &[result("gpu-0", Some(true)), result("gpu-1", Some(false))]), &["gpu-1"])]
    #[case::not_said(claim(UID, &[result("gpu-0", None), result("gpu-1", None)]), &["gpu-0", "gpu-1"])]
    #[case::for_both(claim(UID, &[result("gpu-0", Some(true)), result("gpu-0", None), result("gpu-1", Some(true))]), &["gpu-0"])]
    #[case::another_claim_of_its_name(claim("another", &[result("gpu-0", Some(true)), result("gpu-1", Some(true))]), &["gpu-0", "gpu-1"])]
    #[case::not_allocated(json!({"metadata": {"name": "one-gpu", "uid": UID}}), &["gpu-0", "gpu-1"])]
    #[case::forbidden(refusal(403), &["gpu-0", "gpu-1"])]
    #[case::not_served(refusal(404), &["gpu-0", "gpu-1"])]
    #[case::nonsense(json!({"metadata": {"name": "one-gpu", "uid": UID}, "status": 7}), &["gpu-0", "gpu-1"])]
    #[tokio::test]
    async fn devices_with_admin_access_are_left_out(#[case] object: Value, #[case] expected: &[&str]) {
        assert_eq!(counted(&object).await, expected);
    }

    /// A claim is read once, again if it could not be read, and again if another one has come in its place.
    #[tokio::test]
    async fn each_claim_is_read_once() {
        let (client, mut server) = ApiServer::new();
        let mut access = AdminAccess::new(client);
        let failure = refusal(500);
        let (left, _) = tokio::join!(
            access.without_admin_access(vec![claimed("gpu-0")]),
            answer(&mut server, &failure)
        );
        assert_eq!(left.len(), 1);
        let object = claim(UID, &[result("gpu-0", Some(true))]);
        let (left, _) = tokio::join!(
            access.without_admin_access(vec![claimed("gpu-0")]),
            answer(&mut server, &object)
        );
        assert_eq!(left, []);
        // No request is answered here.
        assert_eq!(access.without_admin_access(vec![claimed("gpu-0")]).await, []);
        let successor = ClaimedDevice {
            cdi_names: ["k8s.gpu.nvidia.com/claim=e1-gpu-0".to_owned()].into(),
            ..claimed("gpu-0")
        };
        let object = claim("e1", &[result("gpu-0", None)]);
        let (left, _) = tokio::join!(
            access.without_admin_access(vec![successor]),
            answer(&mut server, &object)
        );
        assert_eq!(left.len(), 1);
    }
}
