//! Loading earlier XIDs, and clearing devices.

use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::tests::api_server::{ApiServer, failure};
use crate::tests::builders;
use daemon::api_server::Contact;

#[rstest]
#[case::one("GPU-1", &[1], &[])]
#[case::two(" GPU-0 ,GPU-2", &[0, 2], &[])]
#[case::all("all", &[0, 1, 2], &[])]
#[case::one_of_another_node("GPU-1,GPU-9", &[1], &["GPU-9"])]
#[case::nothing("", &[], &[""])]
fn the_annotation_names_the_devices_to_clear(
    #[case] text: &str,
    #[case] expected: &[u32],
    #[case] unknown: &[&str],
) {
    let text = (0..3).fold(text.to_owned(), |text, minor| {
        text.replace(&format!("GPU-{minor}"), builders::gpu(minor).uuid.as_str())
    });
    let expected: Vec<_> = expected.iter().map(|minor| builders::gpu(*minor).uuid).collect();
    assert_eq!(
        named_devices(&text, &builders::fleet(3)),
        (expected, unknown.to_vec())
    );
}

/// The plugin acts on the annotation and then removes it.
#[tokio::test]
async fn the_plugin_acts_on_the_annotation_once() {
    let (client, mut server) = ApiServer::new();
    let (device, held) = watch::channel(StoredDevice::Unknown);
    let (_fleet, fleet) = watch::channel(Arc::new(builders::fleet(1)));
    let (sender, mut corrections) = mpsc::channel(1);
    tokio::spawn(clear_devices(Api::all(client), held, fleet, sender));
    let object = json!({"metadata": {"name": "n1", "annotations": {CLEAR_UNHEALTHY: "all"}}, "spec": {}});
    device.send_replace(StoredDevice::Present(Box::new(
        serde_json::from_value(object.clone()).unwrap(),
    )));
    assert_eq!(
        corrections.recv().await,
        Some(Correction::Cleared(builders::gpu(0).uuid))
    );
    let (line, body) = server.answer(200, &object).await;
    assert!(
        line.starts_with("PATCH ") && line.ends_with("/devices/n1"),
        "{line}"
    );
    assert_eq!(
        body,
        json!({"metadata": {"annotations": {CLEAR_UNHEALTHY: null}}})
    );
}

fn device(minor: u32, kind: &str, status: &str, reason: &str) -> Value {
    let condition = json!({"type": "Healthy", "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z", "reason": reason, "message": ""});
    json!({"type": kind, "id": builders::gpu(minor).uuid.to_string(), "health": status == "True", "conditions": [condition]})
}

/// The XIDs by minor number, when the API server gives these answers one after the other; `None` is a request without an answer.
async fn loaded(answers: Vec<Option<(u16, Value)>>) -> Vec<(u32, u64)> {
    let (client, mut server) = ApiServer::new();
    let devices = Api::all(client);
    let server = tokio::spawn(async move {
        let mut unanswered = Vec::new();
        for answer in answers {
            let (line, _, response) = server.next().await;
            assert!(line.ends_with("/devices/n1"), "{line}");
            match answer {
                Some((code, body)) => response.send(code, &body),
                None => unanswered.push(response),
            }
        }
    });
    let loaded = load_xids(
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
    loaded
        .iter()
        .map(|error| (minor(&error.device), error.xid))
        .collect()
}

#[tokio::test]
async fn only_xids_are_read_back_from_the_device_object() {
    let devices = [
        device(0, "gpu", "False", "Xid79"),
        device(1, "gpu", "False", "Lost"),
        device(2, "gpu", "True", "Xid48"),
        device(2, "rdma", "False", "Xid48"),
        device(7, "gpu", "False", "Xid79"),
    ];
    let object = json!({"metadata": {"name": "n1"}, "spec": {"devices": devices}});
    assert_eq!(loaded(vec![Some((200, object))]).await, [(0, 79), (7, 79)]);
}

/// An object of an earlier boot was written before a reset.
#[tokio::test]
async fn conditions_of_an_earlier_boot_are_not_read_back() {
    for (boot, expected) in [("this-boot", vec![(0, 48)]), ("an-earlier-boot", vec![])] {
        let devices = [device(0, "gpu", "False", "Xid48")];
        let object =
            json!({"metadata": {"name": "n1", "annotations": {BOOT_ID: boot}}, "spec": {"devices": devices}});
        assert_eq!(loaded(vec![Some((200, object))]).await, expected, "{boot}");
    }
}

fn refusal(code: u16, reason: &str) -> (u16, Value) {
    (code, failure(code, reason, "no"))
}

#[tokio::test]
async fn without_a_device_object_nothing_is_read_back() {
    let nonsense = json!({"metadata": {"name": "n1"}, "spec": {"devices": [{"health": "no"}]}});
    for answer in [
        refusal(404, "NotFound"),
        refusal(403, "Forbidden"),
        (200, nonsense),
    ] {
        assert_eq!(loaded(vec![Some(answer)]).await, []);
    }
}

/// An unhealthy device that started as healthy because the API server is away would get pods again.
#[tokio::test(start_paused = true)]
async fn without_an_answer_the_plugin_reads_the_object_again() {
    let object =
        json!({"metadata": {"name": "n1"}, "spec": {"devices": [device(0, "gpu", "False", "Xid79")]}});
    let answers = vec![
        None,
        Some(refusal(500, "InternalError")),
        Some(refusal(429, "TooManyRequests")),
        Some((200, object)),
    ];
    assert_eq!(loaded(answers).await, [(0, 79)]);
}
