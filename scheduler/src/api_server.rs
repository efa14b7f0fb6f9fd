//! One request to the API server, and its answer: HTTP status, the pause of `Retry-After`, and body.
//!
//! For writes of which the status matters more than the object, such as bindings. Retries nothing. An error is the reason for
//! which there is no whole answer, for people; the request may have been carried out all the same.

use std::time::Duration;

use http::{HeaderMap, Method, Request, StatusCode, header};
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::timeout;

/// Most characters of another program's message that are passed on.
const MAX_MESSAGE: usize = 500;
/// The longest wait for an answer of the API server.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);
/// The name under which the API server keeps the fields that this daemon applies.
const FIELD_MANAGER: &str = "gpushare-scheduler";

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    /// The pause that the API server asks for before the next attempt.
    pub(crate) retry_after: Option<Duration>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn message(&self) -> String {
        let text = self.text();
        if text.is_empty() {
            self.status.to_string()
        } else {
            format!("{}: {text}", self.status)
        }
    }

    /// The message of the `Status` object in the body, or else the body as text.
    pub(crate) fn text(&self) -> String {
        #[derive(Deserialize)]
        struct Status {
            message: String,
        }
        // kube-apiserver sends a `Status`; a proxy in front of it, plain text or a page.
        match serde_json::from_slice::<Status>(&self.body) {
            Ok(status) => shorten(status.message.trim()),
            Err(_) => shorten(String::from_utf8_lossy(&self.body).trim()),
        }
    }
}

/// Sends a request with a JSON body, if there is one, and waits for its answer for [`ANSWER_TIMEOUT`].
pub(crate) async fn send(
    client: &Client,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> Result<Answer, String> {
    in_time(send_as(client, method, path, "application/json", body)).await
}

/// Writes an object by server-side apply: creates it if there is none, and takes over fields that others have set.
pub(crate) async fn apply(client: &Client, path: &str, object: &Value) -> Result<Answer, String> {
    // Without `force`, a field that a person has edited would make every later write a conflict.
    let path = format!("{path}?fieldManager={FIELD_MANAGER}&force=true");
    let apply = "application/apply-patch+yaml";
    in_time(send_as(client, Method::PATCH, &path, apply, Some(object))).await
}

/// Changes an object by a JSON merge patch.
pub(crate) async fn merge(client: &Client, path: &str, changes: &Value) -> Result<Answer, String> {
    let merge = "application/merge-patch+json";
    in_time(send_as(client, Method::PATCH, path, merge, Some(changes))).await
}

async fn in_time(answer: impl Future<Output = Result<Answer, String>>) -> Result<Answer, String> {
    let answered = timeout(ANSWER_TIMEOUT, answer).await;
    answered.unwrap_or_else(|_| Err(format!("no answer from the API server within {ANSWER_TIMEOUT:?}")))
}

/// Sends a request with this content type, and waits for its answer without a time limit.
pub(crate) async fn send_as(
    client: &Client,
    method: Method,
    path: &str,
    content_type: &str,
    body: Option<&Value>,
) -> Result<Answer, String> {
    let body = body.map(ToString::to_string).unwrap_or_default();
    let request = Request::builder().method(method).uri(path);
    let request = request
        .header(header::CONTENT_TYPE, content_type)
        .body(Body::from(body.into_bytes()));
    let request = request.map_err(|error| format!("cannot make the request: {error}"))?;
    // Not `Client::request`, which turns an error status into an error without headers: `Retry-After` is needed.
    let response = client.send(request).await;
    let (head, body) = response
        .map_err(|error| format!("{:#}", anyhow::Error::from(error)))?
        .into_parts();
    let body = body.collect().await;
    let body = body.map_err(|error| format!("the API server's answer broke off: {error}"))?;
    Ok(Answer {
        status: head.status,
        retry_after: retry_after(&head.headers),
        body: body.to_bytes().to_vec(),
    })
}

/// The pause that the API server asks for in the header `Retry-After`.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    // kube-apiserver sends seconds; a date, which other servers send, counts as none.
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    Some(Duration::from_secs(seconds.trim().parse().ok()?))
}

/// The first [`MAX_MESSAGE`] characters of another program's text.
pub(crate) fn shorten(text: &str) -> String {
    text.chars().take(MAX_MESSAGE).collect()
}
