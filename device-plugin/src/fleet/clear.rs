//! An operator's word that a device is well again: an annotation on the node's Device object.
//!
//! `kubectl annotate device NODE gpushare/clear-unhealthy=GPU-…` names devices, separated by commas, or `all`. It counts once:
//! the plugin removes the annotation when it has acted on it, so that later trouble makes the device unhealthy again.

use std::sync::Arc;

use daemon::api_server::one_line;
use kube::Api;
use kube::api::{Patch, PatchParams};
use proto::device::{CLEAR_UNHEALTHY, RawDevice};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use crate::inventory::PhysicalId;
use crate::publish::device_watch::Held;

use super::Fleet;
use super::watch::Correction;

/// Acts on the annotation until the task is dropped.
pub async fn watch_clearance(
    devices: Api<RawDevice>,
    mut held: watch::Receiver<Held>,
    fleet: watch::Receiver<Arc<Fleet>>,
    corrections: mpsc::Sender<Correction>,
) {
    while held.changed().await.is_ok() {
        let Some((node, text)) = asked(&held.borrow_and_update()) else {
            continue;
        };
        let named = named(&text, &fleet.borrow());
        if named.is_empty() {
            warn!(
                node,
                value = text,
                "the annotation {CLEAR_UNHEALTHY} names no device of this node"
            );
        }
        for device in named {
            info!(%device, "an operator clears a device");
            if corrections.send(Correction::Cleared(device)).await.is_err() {
                return;
            }
        }
        let removal = json!({"metadata": {"annotations": {CLEAR_UNHEALTHY: null}}});
        if let Err(error) = devices
            .patch(&node, &PatchParams::default(), &Patch::Merge(removal))
            .await
        {
            warn!(
                node,
                error = one_line(&error),
                "cannot remove the annotation {CLEAR_UNHEALTHY}: until then it clears devices again"
            );
        }
    }
}

/// The node and the annotation's value, if the object has it.
fn asked(held: &Held) -> Option<(String, String)> {
    let Held::Object(object) = held else { return None };
    let text = object.metadata.annotations.as_ref()?.get(CLEAR_UNHEALTHY)?;
    Some((object.metadata.name.clone()?, text.clone()))
}

/// The devices of the fleet that an annotation's value names.
fn named(text: &str, fleet: &Fleet) -> Vec<PhysicalId> {
    let all = fleet
        .gpus
        .iter()
        .map(|entry| &entry.gpu.uuid)
        .chain(fleet.others.iter().map(|entry| &entry.device.id));
    let names: Vec<_> = text.split(',').map(str::trim).collect();
    all.filter(|id| names.contains(&"all") || names.contains(&id.as_str()))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use http::{Method, Request, Response};
    use kube::Client;
    use kube::client::Body;
    use rstest::rstest;

    use super::*;
    use crate::builders;

    #[rstest]
    #[case::one("GPU-1", &[1])]
    #[case::two(" GPU-0 ,GPU-2", &[0, 2])]
    #[case::all("all", &[0, 1, 2])]
    #[case::another_nodes("GPU-9", &[])]
    #[case::nothing("", &[])]
    fn devices_that_a_value_names(#[case] text: &str, #[case] expected: &[u32]) {
        let text = (0..3).fold(text.to_owned(), |text, minor| {
            text.replace(&format!("GPU-{minor}"), builders::gpu(minor).uuid.as_str())
        });
        let expected: Vec<_> = expected.iter().map(|minor| builders::gpu(*minor).uuid).collect();
        assert_eq!(named(&text, &builders::fleet(3)), expected);
    }

    /// The annotation is acted on and then removed.
    #[tokio::test]
    async fn an_annotation_counts_once() {
        let (service, mut requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let (device, held) = watch::channel(Held::Unknown);
        let (_fleet, fleet) = watch::channel(Arc::new(builders::fleet(1)));
        let (sender, mut corrections) = mpsc::channel(1);
        tokio::spawn(watch_clearance(
            Api::all(Client::new(service, "default")),
            held,
            fleet,
            sender,
        ));
        let object = json!({"metadata": {"name": "n1", "annotations": {CLEAR_UNHEALTHY: "all"}}, "spec": {}});
        device.send_replace(Held::Object(Box::new(
            serde_json::from_value(object.clone()).unwrap(),
        )));
        assert_eq!(
            corrections.recv().await,
            Some(Correction::Cleared(builders::gpu(0).uuid))
        );
        let (request, response) = requests.next_request().await.unwrap();
        assert_eq!(
            (request.method(), request.uri().path().rsplit('/').next()),
            (&Method::PATCH, Some("n1"))
        );
        let body = request.into_body().collect_bytes().await.unwrap();
        assert_eq!(
            serde_json::from_slice::<serde_json::Value>(&body).unwrap(),
            json!({"metadata": {"annotations": {CLEAR_UNHEALTHY: null}}})
        );
        response.send_response(Response::new(Body::from(object.to_string().into_bytes())));
    }
}
