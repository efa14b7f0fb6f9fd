//! One HTTP exchange without a Kubernetes client, for what such clients hide.

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use kit::apiserver::ApiServer;

pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) text: String,
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
    let client = Client::builder(TokioExecutor::new()).build_http();
    let (head, body) = client.request(request).await?.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    Ok(Answer {
        code: head.status.as_u16(),
        text: String::from_utf8(bytes.to_vec()).unwrap(),
    })
}
