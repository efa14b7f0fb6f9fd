//! Calls one webhook over HTTPS with an `AdmissionReview`. Each call makes its own connection, and trusts the
//! authorities of `caBundle` alone.

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http::StatusCode;
use k8s_openapi::ByteString;
use serde::Deserialize;
use serde_json::{Value, json};

use super::hook::WebhookConfig;
use super::{ReviewObjects, ReviewedWrite};
use crate::apiserver::api_objects::ApiObjects;
use crate::apiserver::status::ApiError;
use crate::apiserver::{name, object};
use crate::connector::Connector;
use crate::http_client::HttpClient;

/// The answer of a webhook that was called: the patch of one that allows the request, or the error for the client.
type Verdict = Result<Option<Value>, ApiError>;

/// Calls a webhook. An error is that of a failed call, in the words of kube-apiserver.
pub(super) async fn call(
    objects: &ApiObjects,
    hook: &WebhookConfig,
    request: &ReviewedWrite<'_>,
    reviewed: &ReviewObjects,
) -> Result<Verdict> {
    let uid = name::uid();
    let posted = post(objects, hook, &review_of(&uid, request, reviewed)).await;
    let answer = posted.context("failed to call webhook")?;
    read_verdict(&uid, hook, &answer).context("received invalid webhook response")
}

/// Posts a review to a webhook; returns the body of its answer. Webhooks with a URL are not modelled, and so not found.
async fn post(objects: &ApiObjects, hook: &WebhookConfig, review: &Value) -> Result<Bytes> {
    let service = hook.client.service.clone().unwrap_or_default();
    let port = u16::try_from(service.port.unwrap_or(443))?;
    let Some(address) = objects.service(&service.namespace, &service.name, port) else {
        bail!("service \"{}\" not found", service.name);
    };
    let path = service.path.unwrap_or_default();
    let (path, timeout) = (path.trim_start_matches('/'), hook.timeout.as_secs());
    let host = format!("{}.{}.svc:{port}", service.name, service.namespace);
    let url = format!("https://{host}/{path}?timeout={timeout}s");
    let bundle = hook.client.ca_bundle.clone().unwrap_or_default();
    let client = HttpClient::by(Connector::trusting(&bundle.0)?.at(address));
    let posted = tokio::time::timeout(hook.timeout, client.post(&url, review.to_string())).await;
    let (status, body) = posted.context("context deadline exceeded")??;
    if status != StatusCode::OK {
        let text = String::from_utf8_lossy(&body);
        bail!(
            "an error on the server ({:?}) has prevented the request from succeeding",
            text.trim()
        );
    }
    Ok(body)
}

/// Builds the `AdmissionReview` of a request, with the fields that gpushare's webhooks and policies read.
pub(super) fn review_of(uid: &str, request: &ReviewedWrite<'_>, objects: &ReviewObjects) -> Value {
    let resource = &request.target.resource;
    let kind = match request.target.subresource.as_str() {
        "binding" => json!({"group": "", "version": "v1", "kind": "Binding"}),
        "eviction" => json!({"group": "policy", "version": "v1", "kind": "Eviction"}),
        _ => json!({"group": resource.group, "version": resource.version, "kind": resource.kind}),
    };
    let plural = json!({"group": resource.group, "version": resource.version, "resource": resource.plural});
    let user = request.user;
    let options = match request.manager {
        "" => json!({}),
        manager => json!({"fieldManager": manager}),
    };
    let mut admission_request = json!({
        "uid": uid,
        "kind": kind,
        "resource": plural,
        "operation": request.operation,
        "userInfo": {"username": user.name, "groups": user.all_groups()},
        "object": objects.new,
        "oldObject": *objects.old,
        "dryRun": request.dry_run,
        "options": options,
    });
    let optional = [
        ("name", request.target.name.as_str()),
        ("namespace", request.target.namespace.as_str()),
        ("subResource", request.target.subresource.as_str()),
    ];
    for (field, text) in optional.into_iter().filter(|(_, text)| !text.is_empty()) {
        object::make_object(&mut admission_request).insert(field.to_owned(), Value::from(text));
    }
    json!({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": admission_request})
}

/// Reads a webhook's answer to the review with this UID.
fn read_verdict(uid: &str, hook: &WebhookConfig, answer: &[u8]) -> Result<Verdict> {
    let answer: Value = serde_json::from_slice(answer)?;
    let (version, kind) = (
        object::text(&answer, "/apiVersion"),
        object::text(&answer, "/kind"),
    );
    ensure!(
        version == "admission.k8s.io/v1" && kind == "AdmissionReview",
        "expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got {version}, Kind={kind}"
    );
    let response = answer.get("response").context("webhook response is absent")?;
    // The UID proves that the answer belongs to this request.
    let answer_uid = object::text(response, "/uid");
    ensure!(
        answer_uid == uid,
        "expected response.uid=\"{uid}\", got \"{answer_uid}\""
    );
    let patch = read_patch(response)?;
    if object::is_true(response, "/allowed") {
        return Ok(Ok(patch));
    }
    let denied = format!("admission webhook \"{}\" denied the request", hook.name);
    let reason = object::text(response, "/status/reason");
    // ToStatusErr: the message is quoted, else the reason.
    let text = match (object::text(response, "/status/message"), reason) {
        ("", "") => format!("{denied} without explanation"),
        ("", reason) => format!("{denied}: {reason}"),
        (message, _) => format!("{denied}: {message}"),
    };
    // A webhook may choose the HTTP code of its refusal, but not one that means success.
    let code = match object::integer(response, "/status/code").map(u16::try_from) {
        Some(Ok(code @ 400..600)) => code,
        _ => 400,
    };
    Ok(Err(ApiError::denied(code, reason, text)))
}

/// Decodes the JSON patch of a webhook's response; `None` if the response has no patch.
fn read_patch(response: &Value) -> Result<Option<Value>> {
    let Some(encoded) = response.get("patch").filter(|patch| !patch.is_null()) else {
        return Ok(None);
    };
    let kind = object::text(response, "/patchType");
    ensure!(
        kind == "JSONPatch",
        "response.patchType must be \"JSONPatch\", got {kind:?}"
    );
    let bytes = ByteString::deserialize(encoded).context("response.patch")?;
    serde_json::from_slice(&bytes.0).context("response.patch")
}
