//! One HTTPS call of a webhook: a connection of its own, verified against the configuration's `caBundle` and nothing else.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use super::Services;
use super::hook::Hook;

/// The largest answer that is read.
const MAX_ANSWER: usize = 3 * 1024 * 1024;

/// Why a webhook has not answered; words as the real server has them.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error("failed to call webhook: {0}")]
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

/// The address of a webhook.
struct Place {
    url: String,
    server_name: String,
    address: Address,
}

enum Address {
    Known(SocketAddr),
    Named(String, u16),
}

/// Posts a review; the answer's JSON.
pub(super) async fn post(services: &Services, hook: &Hook, review: &Value) -> Result<Value, CallError> {
    let place = locate(services, hook)?;
    let failed = |why: String| CallError::Post {
        url: place.url.clone(),
        why,
    };
    let exchanged = tokio::time::timeout(hook.timeout, exchange(hook, &place, review)).await;
    let (status, body) = exchanged
        .map_err(|_| failed("context deadline exceeded".to_owned()))?
        .map_err(|error| failed(with_sources(&*error)))?;
    if status != StatusCode::OK {
        return Err(CallError::Status(
            String::from_utf8_lossy(&body).trim().to_owned(),
        ));
    }
    serde_json::from_slice(&body).map_err(|error| CallError::Response(error.to_string()))
}

/// An error with its causes.
fn with_sources(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

fn locate(services: &Services, hook: &Hook) -> Result<Place, CallError> {
    let query = format!("timeout={}s", hook.timeout.as_secs());
    if let Some(service) = &hook.client.service {
        let port = service
            .port
            .and_then(|port| u16::try_from(port).ok())
            .unwrap_or(443);
        let address = services.get(&service.namespace, &service.name, port);
        let address =
            address.ok_or_else(|| CallError::Address(format!("service \"{}\" not found", service.name)))?;
        let server_name = format!("{}.{}.svc", service.name, service.namespace);
        let path = service
            .path
            .as_deref()
            .unwrap_or_default()
            .trim_start_matches('/');
        let url = format!("https://{server_name}:{port}/{path}?{query}");
        return Ok(Place {
            url,
            server_name,
            address: Address::Known(address),
        });
    }
    let text = hook.client.url.as_deref().unwrap_or_default();
    let url: http::Uri = text
        .parse()
        .map_err(|error| CallError::Address(format!("url {text:?}: {error}")))?;
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    let address = Address::Named(host.clone(), url.port_u16().unwrap_or(443));
    let url = format!("{text}{}{query}", if url.query().is_some() { '&' } else { '?' });
    Ok(Place {
        url,
        server_name: host,
        address,
    })
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

async fn exchange(hook: &Hook, place: &Place, review: &Value) -> Result<(StatusCode, Bytes), AnyError> {
    let connected = match &place.address {
        Address::Known(address) => TcpStream::connect(address).await,
        Address::Named(host, port) => TcpStream::connect((host.as_str(), *port)).await,
    };
    let stream = connected.map_err(|error| io::Error::new(error.kind(), format!("dial tcp: {error}")))?;
    stream.set_nodelay(true)?;
    let connector = TlsConnector::from(Arc::new(client_config(hook)?));
    let stream = connector
        .connect(ServerName::try_from(place.server_name.clone())?, stream)
        .await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let url: http::Uri = place.url.parse()?;
    let request = Request::post(url.path_and_query().map_or("/", http::uri::PathAndQuery::as_str))
        .header(header::HOST, &place.server_name)
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::ACCEPT, "application/json, */*")
        .body(Full::<Bytes>::from(review.to_string()))?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body = Limited::new(body, MAX_ANSWER).collect().await?;
    Ok((head.status, body.to_bytes()))
}

fn client_config(hook: &Hook) -> Result<ClientConfig, AnyError> {
    let mut roots = RootCertStore::empty();
    let bundle = hook
        .client
        .ca_bundle
        .as_ref()
        .map(|bundle| bundle.0.as_slice())
        .unwrap_or_default();
    for certificate in CertificateDer::pem_slice_iter(bundle) {
        roots.add(certificate?)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}
