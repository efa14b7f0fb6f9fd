//! Restores health from before this process: the XIDs in the node's Device object, which no probe finds.
//!
//! Reads it once, when the process starts. Loss and failed probes are not taken over: probes find them again. A boot resets
//! devices, so XIDs of an earlier boot are not taken over either.

use std::time::Duration;

use kube::Api;
use proto::device::{BOOT_ID, DeviceSpec, RawDevice};
use tokio::time::timeout;
use tracing::{info, warn};

use crate::health::Health;
use crate::publish::device_object;
use crate::watching::one_line;

use super::Fleet;
use super::watch::changed;

/// How long the start waits for the object.
const LIMIT: Duration = Duration::from_secs(5);

/// `fleet` and its `health` with the XIDs that a predecessor of this process saw; as they are if nobody tells.
///
/// Asked before kubelet is told of any device and before the object is written again.
///
/// `boot_id` is the boot of this node, if the kernel names it.
pub async fn recall(devices: &Api<RawDevice>, node: &str, boot_id: Option<&str>, health: &mut Health, fleet: Fleet) -> Fleet {
    let device = match timeout(LIMIT, devices.get_opt(node)).await {
        Ok(Ok(Some(device))) => device,
        Ok(Ok(None)) => return fleet,
        Ok(Err(error)) => {
            warn!(error = one_line(&error), "the Device object of before cannot be read, so all devices begin as healthy");
            return fleet;
        }
        Err(_) => {
            warn!("no answer about the Device object of before, so all devices begin as healthy");
            return fleet;
        }
    };
    let written_in = device.metadata.annotations.as_ref().and_then(|annotations| annotations.get(BOOT_ID));
    if written_in.zip(boot_id).is_some_and(|(before, now)| before != now) {
        info!("this node has booted since its Device object was written, so its devices have been reset");
        return fleet;
    }
    let spec = device.read().unwrap_or_else(|error| {
        warn!(%error, "the Device object of before says nothing that can be read, so all devices begin as healthy");
        DeviceSpec::default()
    });
    let sick = device_object::sick_by_xid(&spec);
    let changes: Vec<_> = sick.filter_map(|(uuid, xid, since)| health.recall(Duration::ZERO, &uuid, xid, since)).collect();
    changed(&fleet, &changes)
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;
    use crate::builders;
    use crate::health::{Policy, Reason};

    fn device(minor: u32, kind: &str, status: &str, reason: &str) -> Value {
        let condition =
            json!({"type": "Healthy", "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z", "reason": reason, "message": ""});
        json!({"type": kind, "id": builders::gpu(minor).uuid.to_string(), "health": status == "True", "conditions": [condition]})
    }

    /// What becomes of three healthy devices, when the API server answers so or not at all.
    async fn recalled(answer: Option<(u16, Value)>) -> Vec<Option<Reason>> {
        let (service, mut requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let fleet = builders::fleet(3);
        let mut health = Health::new(Policy::default(), fleet.gpus.iter().map(|entry| entry.gpu.uuid.clone()));
        let devices = Api::all(Client::new(service, "default"));
        let server = tokio::spawn(async move {
            let (request, response) = requests.next_request().await.unwrap();
            assert!(request.uri().path().ends_with("/devices/n1"), "{}", request.uri());
            match answer {
                Some((code, body)) => {
                    response.send_response(Response::builder().status(code).body(Body::from(body.to_string().into_bytes())).unwrap());
                }
                None => std::future::pending().await,
            }
        });
        let fleet = recall(&devices, "n1", Some("this-boot"), &mut health, fleet).await;
        server.abort();
        assert!(fleet.gpus.iter().all(|entry| entry.is_healthy == entry.reason.is_none()));
        assert!(fleet.gpus.iter().all(|entry| health.illness(&entry.gpu.uuid) == entry.reason), "both tell the same");
        fleet.gpus.iter().map(|entry| entry.reason).collect()
    }

    #[tokio::test]
    async fn only_xids_are_remembered() {
        let devices = [
            device(0, "gpu", "False", "Xid79"),
            device(1, "gpu", "False", "Lost"),
            device(2, "gpu", "True", "Xid48"),
            device(2, "rdma", "False", "Xid48"),
            device(7, "gpu", "False", "Xid79"),
        ];
        let object = json!({"metadata": {"name": "n1"}, "spec": {"devices": devices}});
        assert_eq!(recalled(Some((200, object))).await, [Some(Reason::Xid(79)), None, None]);
    }

    /// An object of an earlier boot was written before a reset.
    #[tokio::test]
    async fn a_boot_resets_devices() {
        for (boot, expected) in [("this-boot", Some(Reason::Xid(48))), ("an-earlier-boot", None)] {
            let devices = [device(0, "gpu", "False", "Xid48")];
            let object = json!({"metadata": {"name": "n1", "annotations": {BOOT_ID: boot}}, "spec": {"devices": devices}});
            assert_eq!(recalled(Some((200, object))).await.first(), Some(&expected), "{boot}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_remembered_without_an_answer() {
        let missing = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404, "message": "no"});
        let broken = json!({"kind": "Status", "status": "Failure", "reason": "InternalError", "code": 500, "message": "no"});
        let nonsense = json!({"metadata": {"name": "n1"}, "spec": {"devices": [{"health": "no"}]}});
        for answer in [Some((404, missing)), Some((500, broken)), Some((200, nonsense)), None] {
            assert_eq!(recalled(answer).await, [None; 3]);
        }
    }
}
