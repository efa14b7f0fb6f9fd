//! Calls one webhook over HTTPS with an `AdmissionReview`. Each call makes its own connection, and trusts the
//! authorities of `caBundle` alone.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use k8s_openapi::ByteString;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use super::hook::WebhookConfig;
use super::{AdmissionOperation, LocalPorts, ReviewObjects, ReviewedWrite};
use crate::apiserver::object;
use crate::apiserver::status::ApiError;

/// The largest answer of a webhook that is read, in bytes.
const MAX_ANSWER: usize = 3 * 1024 * 1024;

/// Why a call failed, in the words of kube-apiserver.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error("failed to call webhook: service \"{0}\" not found")]
    Address(String),
    #[error("failed to call webhook: Post \"{url}\": {why}")]
    Post { url: String, why: String },
    #[error(
        "failed to call webhook: an error on the server ({0:?}) has prevented the request from succeeding"
    )]
    Status(String),
    #[error("received invalid webhook response: {0}")]
    Response(String),
}

/// The place at which a webhook is called.
struct WebhookAddress {
    url: String,
    /// The DNS name of its Service, which its certificate has to be for.
    server_name: String,
    /// The local port behind its Service.
    address: SocketAddr,
}

/// Posts a review to a webhook; returns the JSON of its answer.
pub(super) async fn post(
    services: &LocalPorts,
    hook: &WebhookConfig,
    review: &Value,
) -> Result<Value, CallError> {
    let webhook_address = locate(services, hook)?;
    let failed = |why: String| CallError::Post {
        url: webhook_address.url.clone(),
        why,
    };
    let (status, body) =
        match tokio::time::timeout(hook.timeout, exchange(hook, &webhook_address, review)).await {
            Err(_) => return Err(failed("context deadline exceeded".to_owned())),
            Ok(Err(error)) => return Err(failed(format!("{error:#}"))),
            Ok(Ok(answer)) => answer,
        };
    if status != StatusCode::OK {
        let text = String::from_utf8_lossy(&body);
        return Err(CallError::Status(text.trim().to_owned()));
    }
    serde_json::from_slice(&body).map_err(|error| CallError::Response(error.to_string()))
}

/// Finds the address of a webhook by its Service; webhooks with a URL are not modelled, and so not found.
fn locate(services: &LocalPorts, hook: &WebhookConfig) -> Result<WebhookAddress, CallError> {
    let service = hook.client.service.clone().unwrap_or_default();
    let port = service
        .port
        .and_then(|port| u16::try_from(port).ok())
        .unwrap_or(443);
    let Some(address) = services.get(&service.namespace, &service.name, port) else {
        return Err(CallError::Address(service.name));
    };
    let server_name = format!("{}.{}.svc", service.name, service.namespace);
    let path = service.path.unwrap_or_default();
    let (path, timeout) = (path.trim_start_matches('/'), hook.timeout.as_secs());
    Ok(WebhookAddress {
        url: format!("https://{server_name}:{port}/{path}?timeout={timeout}s"),
        server_name,
        address,
    })
}

/// Sends one `AdmissionReview` to a webhook over a new TLS connection, and returns the status and body of the answer.
async fn exchange(
    hook: &WebhookConfig,
    webhook_address: &WebhookAddress,
    review: &Value,
) -> anyhow::Result<(StatusCode, Bytes)> {
    let connected = TcpStream::connect(webhook_address.address).await;
    let stream = connected.map_err(|error| io::Error::new(error.kind(), format!("dial tcp: {error}")))?;
    // A review is one small write, and Nagle's algorithm would hold it back.
    stream.set_nodelay(true)?;
    let connector = TlsConnector::from(Arc::new(client_config(hook)?));
    let server_name = ServerName::try_from(webhook_address.server_name.clone())?;
    let stream = connector.connect(server_name, stream).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let url: http::Uri = webhook_address.url.parse()?;
    let request = http::Request::post(url.path_and_query().map_or("/", http::uri::PathAndQuery::as_str))
        .header(header::HOST, &webhook_address.server_name)
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::ACCEPT, "application/json, */*")
        .body(Full::<Bytes>::from(review.to_string()))?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body = Limited::new(body, MAX_ANSWER).collect().await;
    let body = body.map_err(anyhow::Error::from_boxed)?;
    Ok((head.status, body.to_bytes()))
}

/// TLS settings of a call: only the authorities of the webhook's `caBundle` are trusted.
fn client_config(hook: &WebhookConfig) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    if let Some(bundle) = &hook.client.ca_bundle {
        for certificate in CertificateDer::pem_slice_iter(&bundle.0) {
            roots.add(certificate?)?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

/// The answer of a webhook to a review.
#[derive(Debug)]
pub(super) struct WebhookVerdict {
    allowed: bool,
    /// A `Status`, or null.
    status: Value,
    patch: Option<Value>,
}

/// Builds the `AdmissionReview` of a request.
pub(super) fn review_of(uid: &str, request: &ReviewedWrite<'_>, objects: &ReviewObjects) -> Value {
    let resource = &request.target.resource;
    let kind = match request.subresource {
        "binding" => json!({"group": "", "version": "v1", "kind": "Binding"}),
        "eviction" => json!({"group": "policy", "version": "v1", "kind": "Eviction"}),
        _ => json!({"group": resource.group, "version": resource.version, "kind": resource.kind}),
    };
    let plural = json!({"group": resource.group, "version": resource.version, "resource": resource.plural});
    let user = request.user;
    let mut admission_request = json!({
        "uid": uid,
        "kind": kind,
        "resource": plural,
        "requestKind": kind,
        "requestResource": plural,
        "operation": request.operation.as_str(),
        "userInfo": {"username": user.name, "groups": user.all_groups()},
        "object": if request.operation == AdmissionOperation::Delete { &Value::Null } else { &objects.new },
        "oldObject": *objects.old,
        "dryRun": request.dry_run,
        "options": request.options,
    });
    let optional = [
        ("name", request.target.name.as_str()),
        ("namespace", request.target.namespace.as_str()),
        ("subResource", request.subresource),
        ("requestSubResource", request.subresource),
    ];
    for (field, text) in optional.into_iter().filter(|(_, text)| !text.is_empty()) {
        object::make_object(&mut admission_request).insert(field.to_owned(), Value::from(text));
    }
    json!({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": admission_request})
}

/// Reads a webhook's answer to the review with this UID.
pub(super) fn read_verdict(
    uid: &str,
    hook: &WebhookConfig,
    answer: &Value,
) -> Result<WebhookVerdict, CallError> {
    let invalid = |why: String| CallError::Response(why);
    let (version, kind) = (object::text(answer, "/apiVersion"), object::text(answer, "/kind"));
    if version != "admission.k8s.io/v1" || kind != "AdmissionReview" {
        return Err(invalid(format!(
            "expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got {version}, Kind={kind}"
        )));
    }
    let Some(response) = answer.get("response").filter(|response| response.is_object()) else {
        return Err(invalid("webhook response is absent".to_owned()));
    };
    // The UID proves that the answer belongs to this request.
    let answer_uid = object::text(response, "/uid");
    if answer_uid != uid {
        return Err(invalid(format!(
            "expected response.uid=\"{uid}\", got \"{answer_uid}\""
        )));
    }
    Ok(WebhookVerdict {
        allowed: object::is_true(response, "/allowed"),
        status: response.get("status").cloned().unwrap_or_default(),
        patch: read_patch(response).map_err(|why| invalid(format!("webhook \"{}\": {why}", hook.name)))?,
    })
}

/// Decodes the JSON patch of a webhook's response; `None` if the response has no patch.
fn read_patch(response: &Value) -> Result<Option<Value>, String> {
    let Some(encoded) = response.get("patch").filter(|patch| !patch.is_null()) else {
        return Ok(None);
    };
    let bytes = ByteString::deserialize(encoded).map_err(|error| format!("response.patch: {error}"))?;
    match response.get("patchType").and_then(Value::as_str) {
        Some("JSONPatch") => {}
        Some(other) => {
            return Err(format!(
                "response.patchType must be \"JSONPatch\", got \"{other}\""
            ));
        }
        None => return Err("webhook returned response.patch but not response.patchType".to_owned()),
    }
    let patch = serde_json::from_slice(&bytes.0);
    patch
        .map(Some)
        .map_err(|error| format!("response.patch: {error}"))
}

impl WebhookVerdict {
    /// Returns the patch of a webhook that allows the request, or the error for the client of one that denies it.
    pub(super) fn decide(self, hook: &str) -> Result<Option<Value>, ApiError> {
        if self.allowed {
            return Ok(self.patch);
        }
        let denied = format!("admission webhook \"{hook}\" denied the request");
        let reason = object::text(&self.status, "/reason");
        // ToStatusErr: the message is quoted, else the reason.
        let text = match (object::text(&self.status, "/message"), reason) {
            ("", "") => format!("{denied} without explanation"),
            ("", reason) => format!("{denied}: {reason}"),
            (message, _) => format!("{denied}: {message}"),
        };
        // A webhook may choose the HTTP code of its refusal, but not one that means success.
        let code = match object::integer(&self.status, "/code").map(u16::try_from) {
            Some(Ok(code @ 400..600)) => code,
            _ => 400,
        };
        Err(ApiError::denied(code, reason, text))
    }
}
