//! Bodies: reading what clients send and building what they get.

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER, WARNING};
use http::{HeaderValue, StatusCode};
use serde_json::Value;

use crate::apiserver::status::ApiError;

/// Marks a response that is never sent: the connection closes instead.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hangup;

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// A JSON answer from serialised bytes.
pub(super) fn bytes_answer(code: u16, body: Bytes) -> Response {
    body_answer(code, JSON, Body::from(body))
}

/// An answer whose body is produced as it is sent.
pub(super) fn body_answer(code: u16, content_type: HeaderValue, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

/// An answer with the warnings of webhooks.
pub(super) fn warned(mut response: Response, warnings: &[String]) -> Response {
    for warning in warnings {
        let quoted = warning.replace('\\', "\\\\").replace('"', "\\\"");
        if let Ok(value) = HeaderValue::from_str(&format!("299 - \"{quoted}\"")) {
            response.headers_mut().append(WARNING, value);
        }
    }
    response
}

/// A JSON answer.
pub(super) fn json_answer(code: u16, value: &Value) -> Response {
    bytes_answer(code, Bytes::from(value.to_string()))
}

/// A plain text answer.
pub(super) fn text_answer(text: String) -> Response {
    body_answer(
        200,
        HeaderValue::from_static("text/plain; charset=utf-8"),
        Body::from(text),
    )
}

/// An error as a `Status`.
pub(super) fn error_answer(error: &ApiError) -> Response {
    let mut response = json_answer(error.code, &error.to_status());
    if let Some(seconds) = error.retry_after {
        response
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// Parses a body by its content type.
pub(super) fn parse_body(content_type: &str, body: &[u8]) -> Result<Value, ApiError> {
    let refuse = |why: String| ApiError::bad_request(format!("the body is not valid: {why}"));
    match content_type {
        "application/yaml" | "application/apply-patch+yaml" if body.first() != Some(&b'{') => {
            serde_yaml_ng::from_slice(body).map_err(|e| refuse(e.to_string()))
        }
        "application/vnd.kubernetes.protobuf" | "application/cbor" | "application/apply-patch+cbor" => {
            Err(ApiError::new(
                415,
                "the body of the request was in an unknown format - accepted media types include: \
                 application/json, application/yaml",
            ))
        }
        _ => serde_json::from_slice(body).map_err(|e| refuse(e.to_string())),
    }
}
