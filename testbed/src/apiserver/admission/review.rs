//! `AdmissionReview`: what a webhook is asked, and how its answer is read.

use k8s_openapi::ByteString;
use serde::Deserialize;
use serde_json::{Value, json};

use super::call::CallError;
use super::hook::Hook;
use super::{Objects, Operation, Request, kind_of};
use crate::apiserver::object;
use crate::apiserver::status::ApiError;

/// The answer of a webhook.
#[derive(Debug)]
pub(super) struct Verdict {
    allowed: bool,
    /// A `Status`, or null.
    status: Value,
    patch: Option<Value>,
    pub(super) warnings: Vec<String>,
}

/// The question.
pub(super) fn request(uid: &str, request: &Request<'_>, objects: &Objects) -> Value {
    let resource = &request.target.resource;
    let (group, version, kind) = kind_of(resource, request.subresource, &objects.new);
    let kind = json!({"group": group, "version": version, "kind": kind});
    let plural = json!({"group": resource.group, "version": resource.version, "resource": resource.plural});
    let user = request.user;
    let mut asked = json!({
        "uid": uid,
        "kind": kind,
        "resource": plural,
        "requestKind": kind,
        "requestResource": plural,
        "operation": request.operation.as_str(),
        "userInfo": {"username": user.name, "groups": user.all_groups()},
        "object": if request.operation == Operation::Delete { &Value::Null } else { &objects.new },
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
        object::make_object(&mut asked).insert(field.to_owned(), Value::from(text));
    }
    json!({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": asked})
}

/// The answer, if it is one to this question.
pub(super) fn read(uid: &str, hook: &Hook, answer: &Value) -> Result<Verdict, CallError> {
    let bad = |why: String| CallError::Response(why);
    let (version, kind) = (object::text(answer, "/apiVersion"), object::text(answer, "/kind"));
    if version != "admission.k8s.io/v1" || kind != "AdmissionReview" {
        return Err(bad(format!(
            "expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got {version}, Kind={kind}"
        )));
    }
    let Some(response) = answer.get("response").filter(|response| response.is_object()) else {
        return Err(bad("webhook response is absent".to_owned()));
    };
    let found = object::text(response, "/uid");
    if found != uid {
        return Err(bad(format!("expected response.uid=\"{uid}\", got \"{found}\"")));
    }
    let warnings = object::array(response, "/warnings")
        .iter()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect();
    Ok(Verdict {
        allowed: response.get("allowed").and_then(Value::as_bool).unwrap_or(false),
        status: response.get("status").cloned().unwrap_or_default(),
        patch: read_patch(response).map_err(|why| bad(format!("webhook \"{}\": {why}", hook.name)))?,
        warnings,
    })
}

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
    serde_json::from_slice(&bytes.0)
        .map(Some)
        .map_err(|error| format!("response.patch: {error}"))
}

impl Verdict {
    /// The patch of a webhook that allows the request, or the error that its client gets.
    pub(super) fn decide(self, hook: &str) -> Result<Option<Value>, ApiError> {
        if self.allowed {
            return Ok(self.patch);
        }
        let denied = format!("admission webhook \"{hook}\" denied the request");
        let (message, reason) = (
            object::text(&self.status, "/message"),
            object::text(&self.status, "/reason"),
        );
        let text = match (message, reason) {
            ("", "") => format!("{denied} without explanation"),
            ("", reason) => format!("{denied}: {reason}"),
            (message, _) => format!("{denied}: {message}"),
        };
        let code = self
            .status
            .get("code")
            .and_then(Value::as_u64)
            .and_then(|code| u16::try_from(code).ok());
        Err(ApiError::denied(
            code.filter(|code| (400..600).contains(code)).unwrap_or(400),
            reason,
            text,
        ))
    }
}
