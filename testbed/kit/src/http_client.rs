//! A client for HTTP requests to the daemons, such as a user makes with curl.

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use crate::connector::Connector;

/// A client that keeps its connections.
#[derive(Clone, Debug)]
pub struct HttpClient {
    client: Client<Connector, Full<Bytes>>,
    /// Sent with every request, if there is one.
    token: Option<String>,
}

/// The error of a request without an answer.
#[derive(Debug, thiserror::Error)]
#[error("{method} {url}")]
pub struct HttpError {
    method: Method,
    url: String,
    #[source]
    source: Box<dyn std::error::Error + Send + Sync>,
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
    pub async fn get(&self, url: &str) -> Result<(StatusCode, Bytes), HttpError> {
        self.request(Method::GET, url, Bytes::new()).await
    }

    /// Posts JSON; returns status and body.
    pub async fn post(&self, url: &str, body: impl Into<Bytes>) -> Result<(StatusCode, Bytes), HttpError> {
        self.request(Method::POST, url, body.into()).await
    }

    /// Sends a request, and reads the whole body of its answer.
    async fn request(
        &self,
        method: Method,
        url: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), HttpError> {
        let fail = |source| HttpError {
            method: method.clone(),
            url: url.to_owned(),
            source,
        };
        let request = Request::builder()
            .method(method.clone())
            .uri(url)
            .header(header::CONTENT_TYPE, "application/json");
        let request = match &self.token {
            Some(token) => request.header(header::AUTHORIZATION, format!("Bearer {token}")),
            None => request,
        };
        let request = request
            .body(Full::from(body))
            .map_err(|error| fail(error.into()))?;
        let response = self
            .client
            .request(request)
            .await
            .map_err(|error| fail(error.into()))?;
        let status = response.status();
        let body = response
            .into_body()
            .collect()
            .await
            .map_err(|error| fail(error.into()))?;
        Ok((status, body.to_bytes()))
    }
}

impl Default for HttpClient {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns true if a GET request is answered with 200.
pub async fn is_ok(url: &str) -> bool {
    HttpClient::new()
        .get(url)
        .await
        .is_ok_and(|(status, _)| status == StatusCode::OK)
}
