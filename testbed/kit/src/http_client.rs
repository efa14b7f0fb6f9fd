//! A client for HTTP requests to the daemons, such as a user makes with curl.

use anyhow::{Context, Result};
use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use crate::connector::Connector;

/// The largest answer that is read, in bytes: no daemon sends as much.
const MAX_ANSWER: usize = 256 << 20;

/// A client that keeps its connections.
#[derive(Clone, Debug)]
pub struct HttpClient {
    client: Client<Connector, Full<Bytes>>,
    /// Sent with every request, if there is one.
    token: Option<String>,
}

impl HttpClient {
    /// A client without connections yet.
    pub fn new() -> Self {
        Self::by(Connector::plain())
    }

    /// A client that opens its connections with `connector`.
    pub fn by(connector: Connector) -> Self {
        Self {
            client: Client::builder(TokioExecutor::new()).build(connector),
            token: None,
        }
    }

    /// The same client, but with this bearer token in every request.
    #[must_use]
    pub fn bearing(self, token: String) -> Self {
        Self {
            token: Some(token),
            ..self
        }
    }

    /// Sends a GET request; returns status and body.
    pub async fn get(&self, url: &str) -> Result<(StatusCode, Bytes)> {
        self.request(Method::GET, url, Bytes::new()).await
    }

    /// Posts JSON; returns status and body.
    pub async fn post(&self, url: &str, body: impl Into<Bytes>) -> Result<(StatusCode, Bytes)> {
        self.request(Method::POST, url, body.into()).await
    }

    async fn request(&self, method: Method, url: &str, body: Bytes) -> Result<(StatusCode, Bytes)> {
        let request_line = format!("{method} {url}");
        let sent = self.send(method, url, body).await;
        sent.context(request_line)
    }

    /// Sends a request, and reads the whole body of its answer.
    async fn send(&self, method: Method, url: &str, body: Bytes) -> Result<(StatusCode, Bytes)> {
        let mut request = Request::builder()
            .method(method)
            .uri(url)
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let response = self.client.request(request.body(Full::from(body))?).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
        Ok((status, body.map_err(anyhow::Error::from_boxed)?.to_bytes()))
    }
}

impl Default for HttpClient {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns true if a GET request is answered with 200.
pub async fn is_ok(url: &str) -> bool {
    let answer = HttpClient::new().get(url).await;
    answer.is_ok_and(|(status, _)| status == StatusCode::OK)
}
