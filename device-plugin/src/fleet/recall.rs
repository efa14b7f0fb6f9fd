//! Recalls the health from before this process: the XIDs in the node's Device object, which no probe finds.
//!
//! Reads the object once, when the process starts, and asks again until the API server answers. Loss and failed probes are not
//! taken over: probes find them again. A boot resets devices, so XIDs of an earlier boot are not taken over either.

use std::time::Duration;

use daemon::api_server::{Backoff, one_line};
use kube::Api;
use proto::device::{BOOT_ID, DeviceSpec, RawDevice};
use tokio::time::timeout;
use tracing::{info, warn};

use crate::inventory::PhysicalId;
use crate::publish::device_object;

/// Longest time that one request may take.
const LIMIT: Duration = Duration::from_secs(5);

/// Pauses after failures, doubled each time.
pub const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));

/// A critical error that an earlier process saw on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recalled {
    /// The device.
    pub device: PhysicalId,
    /// The number of the error.
    pub xid: u64,
    /// The time since which the device is unhealthy, as the object has it.
    pub since: String,
}

/// The XIDs that the node's Device object names; none if there is no such object, or it cannot be read.
///
/// kubelet hears of the devices before this is known. The Device object is not written again before, and no container starts.
///
/// `boot_id` is the boot of this node, if the kernel names it.
pub async fn recall(
    devices: &Api<RawDevice>,
    node: &str,
    boot_id: Option<&str>,
    backoff: &mut Backoff,
) -> Vec<Recalled> {
    let Some(device) = read(devices, node, backoff).await else {
        return Vec::new();
    };
    let written_in = device
        .metadata
        .annotations
        .as_ref()
        .and_then(|annotations| annotations.get(BOOT_ID));
    if written_in.zip(boot_id).is_some_and(|(before, now)| before != now) {
        info!("this node has booted since its Device object was written, so its devices have been reset");
        return Vec::new();
    }
    let spec = device.read().unwrap_or_else(|error| {
        warn!(%error, "the Device object of before says nothing that can be read, so all devices begin as healthy");
        DeviceSpec::default()
    });
    let sick = device_object::sick_by_xid(&spec);
    sick.map(|(device, xid, since)| Recalled {
        device,
        xid,
        since: since.to_owned(),
    })
    .collect()
}

/// Reads the object, again and again while the API server is away or cannot answer.
async fn read(devices: &Api<RawDevice>, node: &str, backoff: &mut Backoff) -> Option<RawDevice> {
    let mut is_told = false;
    loop {
        let error = match timeout(LIMIT, devices.get_opt(node)).await {
            Ok(Ok(found)) => return found,
            Ok(Err(kube::Error::Api(status))) if status.code < 500 && status.code != 429 => {
                warn!(
                    error = one_line(&status),
                    "the Device object of before cannot be read, so all devices begin as healthy"
                );
                return None;
            }
            Ok(Err(error)) => one_line(&error),
            Err(_) => format!("no answer within {LIMIT:?}"),
        };
        if !is_told {
            warn!(
                error,
                "the Device object of before cannot be read yet; containers start once it is"
            );
            is_told = true;
        }
        backoff.pause().await;
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;
    use crate::builders;
    use daemon::api_server::Contact;

    fn device(minor: u32, kind: &str, status: &str, reason: &str) -> Value {
        let condition = json!({"type": "Healthy", "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z", "reason": reason, "message": ""});
        json!({"type": kind, "id": builders::gpu(minor).uuid.to_string(), "health": status == "True", "conditions": [condition]})
    }

    /// The XIDs by minor number, when the API server gives these answers one after the other, and none in place of `None`.
    async fn recalled(answers: Vec<Option<(u16, Value)>>) -> Vec<(u32, u64)> {
        let (service, mut requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let devices = Api::all(Client::new(service, "default"));
        let server = tokio::spawn(async move {
            let mut unanswered = Vec::new();
            for answer in answers {
                let (request, response) = requests.next_request().await.unwrap();
                assert!(request.uri().path().ends_with("/devices/n1"), "{}", request.uri());
                match answer {
                    Some((code, body)) => {
                        response.send_response(
                            Response::builder()
                                .status(code)
                                .body(Body::from(body.to_string().into_bytes()))
                                .unwrap(),
                        );
                    }
                    None => unanswered.push(response),
                }
            }
        });
        let recalled = recall(
            &devices,
            "n1",
            Some("this-boot"),
            &mut Contact::default().backoff(PAUSES),
        )
        .await;
        server.await.unwrap();
        let minor = |device: &PhysicalId| {
            (0..8)
                .find(|minor| builders::gpu(*minor).uuid == *device)
                .unwrap()
        };
        recalled
            .iter()
            .map(|error| (minor(&error.device), error.xid))
            .collect()
    }

    #[tokio::test]
    async fn only_xids_are_recalled() {
        let devices = [
            device(0, "gpu", "False", "Xid79"),
            device(1, "gpu", "False", "Lost"),
            device(2, "gpu", "True", "Xid48"),
            device(2, "rdma", "False", "Xid48"),
            device(7, "gpu", "False", "Xid79"),
        ];
        let object = json!({"metadata": {"name": "n1"}, "spec": {"devices": devices}});
        assert_eq!(recalled(vec![Some((200, object))]).await, [(0, 79), (7, 79)]);
    }

    /// An object of an earlier boot was written before a reset.
    #[tokio::test]
    async fn a_boot_resets_devices() {
        for (boot, expected) in [("this-boot", vec![(0, 48)]), ("an-earlier-boot", vec![])] {
            let devices = [device(0, "gpu", "False", "Xid48")];
            let object = json!({"metadata": {"name": "n1", "annotations": {BOOT_ID: boot}}, "spec": {"devices": devices}});
            assert_eq!(recalled(vec![Some((200, object))]).await, expected, "{boot}");
        }
    }

    fn failure(code: u16, reason: &str) -> (u16, Value) {
        (
            code,
            json!({"kind": "Status", "status": "Failure", "reason": reason, "code": code, "message": "no"}),
        )
    }

    #[tokio::test]
    async fn an_answer_without_an_object_recalls_nothing() {
        let nonsense = json!({"metadata": {"name": "n1"}, "spec": {"devices": [{"health": "no"}]}});
        for answer in [
            failure(404, "NotFound"),
            failure(403, "Forbidden"),
            (200, nonsense),
        ] {
            assert_eq!(recalled(vec![Some(answer)]).await, []);
        }
    }

    /// A sick device that begins as healthy because the API server is away gets pods again.
    #[tokio::test(start_paused = true)]
    async fn without_an_answer_the_object_is_read_again() {
        let object =
            json!({"metadata": {"name": "n1"}, "spec": {"devices": [device(0, "gpu", "False", "Xid79")]}});
        let answers = vec![
            None,
            Some(failure(500, "InternalError")),
            Some(failure(429, "TooManyRequests")),
            Some((200, object)),
        ];
        assert_eq!(recalled(answers).await, [(0, 79)]);
    }
}
