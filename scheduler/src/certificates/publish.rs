//! Writes the authorities that the API server must trust into our webhook configurations, and nothing else of them.

use anyhow::Context;
use http::{Method, Request, header};
use k8s_openapi::ByteString;
use kube::Client;
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::{debug, info};

/// Where configurations of both kinds are.
const PATH: &str = "/apis/admissionregistration.k8s.io/v1";
/// Plural names of both kinds.
const KINDS: [&str; 2] = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"];

#[derive(Debug, Deserialize)]
struct Configuration {
    #[serde(default)]
    webhooks: Vec<Webhook>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Webhook {
    name: String,
    #[serde(default)]
    client_config: ClientConfig,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClientConfig {
    #[serde(default)]
    ca_bundle: Option<ByteString>,
}

/// Brings the configurations of this name, as far as they exist, to trust these authorities (PEM).
pub(super) async fn publish(client: &Client, name: &str, authorities: &str) -> anyhow::Result<()> {
    let bundle = ByteString(authorities.as_bytes().to_vec());
    for kind in KINDS {
        let path = format!("{PATH}/{kind}/{name}");
        let failed = || format!("{kind} {name}");
        let configuration: Configuration = match client.request(Request::get(&path).body(Vec::new())?).await {
            Ok(configuration) => configuration,
            Err(kube::Error::Api(status)) if status.code == 404 => {
                debug!(kind, name, "there is no such configuration");
                continue;
            }
            Err(error) => return Err(error).with_context(failed),
        };
        let changes = changes(&configuration, &bundle);
        if !changes.is_empty() {
            let request = Request::builder()
                .method(Method::PATCH)
                .uri(&path)
                .header(header::CONTENT_TYPE, "application/json-patch+json");
            let _: Value = client
                .request(request.body(serde_json::to_vec(&changes)?)?)
                .await
                .with_context(failed)?;
            info!(kind, name, "the API server knows the webhooks' authorities");
        }
    }
    Ok(())
}

/// What has to change. Each change names the webhook that it is for, as the list may have another order by then.
fn changes(configuration: &Configuration, bundle: &ByteString) -> Vec<Value> {
    let differs = |webhook: &Webhook| webhook.client_config.ca_bundle.as_ref() != Some(bundle);
    let differing = configuration
        .webhooks
        .iter()
        .enumerate()
        .filter(|(_, webhook)| differs(webhook));
    let changes = differing.flat_map(|(idx, webhook)| {
        [
            json!({"op": "test", "path": format!("/webhooks/{idx}/name"), "value": webhook.name}),
            json!({"op": "add", "path": format!("/webhooks/{idx}/clientConfig/caBundle"), "value": bundle}),
        ]
    });
    changes.collect()
}
