//! One HTTP exchange without a Kubernetes client, for what such clients hide.

use bytes::Bytes;
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use kit::apiserver::ApiServer;
use serde_json::Value;

pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap()
    }
}

pub(crate) async fn send(
    server: &ApiServer,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Result<Answer, hyper_util::client::legacy::Error> {
    let mut request = Request::builder()
        .method(method)
        .uri(format!("{}{path}", server.url()));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(body.into())).unwrap();
    let client = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(0)
        .build_http();
    let (head, body) = client.request(request).await?.into_parts();
    let bytes = body
        .collect()
        .await
        .map(http_body_util::Collected::to_bytes)
        .unwrap_or_default();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    Ok(Answer {
        code: head.status.as_u16(),
        headers: head.headers,
        text,
    })
}

pub(crate) async fn get(server: &ApiServer, path: &str, accept: &str) -> Answer {
    send(server, Method::GET, path, &[("accept", accept)], "")
        .await
        .unwrap()
}

pub(crate) async fn post(server: &ApiServer, path: &str, body: &Value) -> Answer {
    send(
        server,
        Method::POST,
        path,
        &[("content-type", "application/json")],
        body.to_string(),
    )
    .await
    .unwrap()
}
