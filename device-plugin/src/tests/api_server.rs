//! An API server whose answers a test chooses.

use http::{Request, Response};
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock::{Handle, SendResponse, pair};

/// The other side of a client.
pub(crate) struct ApiServer(Handle<Request<Body>, Response<Body>>);

/// The answer that a request waits for.
pub(crate) struct DueAnswer(SendResponse<Response<Body>>);

impl ApiServer {
    pub(crate) fn new() -> (Client, Self) {
        let (service, requests) = pair();
        (Client::new(service, "default"), Self(requests))
    }

    /// The next request: its method and path with query, its body, if it has one, and its answer.
    pub(crate) async fn next(&mut self) -> (String, Value, DueAnswer) {
        let (request, answer) = self.0.next_request().await.expect("the client has ended");
        let uri = request.uri().to_string();
        let line = format!("{} {}", request.method(), uri.trim_end_matches('?'));
        let body = request.into_body().collect().await.unwrap().to_bytes();
        (
            line,
            serde_json::from_slice(&body).unwrap_or_default(),
            DueAnswer(answer),
        )
    }

    /// Answers the next request; its line and body.
    pub(crate) async fn answer(&mut self, code: u16, object: &Value) -> (String, Value) {
        let (line, body, answer) = self.next().await;
        answer.send(code, object);
        (line, body)
    }
}

impl DueAnswer {
    pub(crate) fn send(self, code: u16, object: &Value) {
        let body = Body::from(object.to_string().into_bytes());
        self.0
            .send_response(Response::builder().status(code).body(body).unwrap());
    }
}

/// The body of a refusal.
pub(crate) fn failure(code: u16, reason: &str, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason, "code": code})
}
