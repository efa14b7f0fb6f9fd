//! The HTTP layer: connections, authentication, faults, and the dispatch of requests to the rules.
//!
//! The rules about objects are elsewhere. Every error is answered as a `Status` object.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::access::{Tokens, UsedAccess};
use super::api_objects::ApiObjects;
use super::discovery;
use super::faults::{Fault, Faults, refusal};
use super::status::ApiError;
use request::ApiRequest;
use route::{Query, parse_path};

mod admitted;
mod collection;
mod exec;
mod object_verbs;
mod port_forward;
mod request;
mod route;
mod watch_stream;
mod websocket;

/// The state that all requests share.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) objects: ApiObjects,
    pub(crate) tokens: Tokens,
    /// The access that requests have used so far.
    pub(crate) accesses: Mutex<BTreeSet<UsedAccess>>,
    pub(crate) faults: Faults,
    pub(crate) stopping: CancellationToken,
}

/// Answers a request: a probe, discovery, an upgrade of the connection, or a verb on a resource.
async fn respond(server: &Server, request: Request) -> Result<Response, ApiError> {
    let path = request.uri().path().trim_matches('/').to_owned();
    match path.as_str() {
        // Probes and the version are public, also with tokens.
        "healthz" | "livez" | "readyz" => return Ok(text_answer("ok".into())),
        "version" => return Ok(json_answer(200, &discovery::version())),
        _ => {}
    }
    let user = server
        .tokens
        .authenticate(header_text(request.headers(), AUTHORIZATION))?;
    if request.method() == http::Method::GET
        && let Some(found) = discovery::answer_discovery(&server.objects.state().registry, &path)
    {
        return Ok(json_answer(200, &found));
    }
    let query = Query::parse(request.uri().query().unwrap_or_default());
    let (verb, target) = parse_path(&server.objects, request.method(), &path, &query)?;
    let access = UsedAccess {
        user: user.name.clone(),
        verb: verb.to_owned(),
        api_group: target.resource.group.clone(),
        resource: target.resource.plural.clone(),
        subresource: target.subresource.clone(),
    };
    server.accesses.lock().insert(access.clone());
    // An upgrade takes over the connection, so its body must not be read here.
    match target.subresource.as_str() {
        "portforward" => return port_forward::upgrade(server, request, &target, &query),
        "exec" => return exec::upgrade(server, request, &target, &query),
        _ => {}
    }
    // The body is read before faults apply: a connection that breaks while the client still sends would show as
    // another error there.
    let request = ApiRequest::read(request, (verb, target), query, user).await?;
    with_faults(server, request, &access).await
}

/// Answers a request as the injected fault that matches it demands, or without a fault by its verb alone.
async fn with_faults(
    server: &Server,
    request: ApiRequest,
    access: &UsedAccess,
) -> Result<Response, ApiError> {
    match server.faults.take_fault(access, &request.fault_name()) {
        Some(Fault::DropConnection) => return Ok(hang_up()),
        Some(Fault::Refuse(code)) => return Err(refusal(code, None)),
        Some(Fault::RefuseUntil(code, seconds)) => return Err(refusal(code, Some(seconds))),
        Some(Fault::Delay(delay)) => tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = server.stopping.cancelled() => return Err(refusal(503, None)),
        },
        Some(Fault::DropReply) => {
            // The request is handled, and its reply is dropped, success or error.
            let _ = dispatch(server, &request).await;
            return Ok(hang_up());
        }
        None => {}
    }
    dispatch(server, &request).await
}

/// The answer in place of which the connection closes.
fn hang_up() -> Response {
    let mut response = Response::new(Body::empty());
    response.extensions_mut().insert(Hangup);
    response
}

/// Calls the handler of the request's verb and subresource.
async fn dispatch(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    match (request.verb, request.target.subresource.as_str()) {
        ("list", _) => collection::list(server, request),
        ("watch", _) => collection::watch(server, request),
        ("deletecollection", _) => collection::delete(server, request).await,
        ("get", "log") => object_verbs::log(server, request),
        ("get", "" | "status") => object_verbs::get(server, request),
        ("create", "binding") => object_verbs::bind(server, request).await,
        ("create", "eviction") => object_verbs::evict(server, request).await,
        ("create", "") => object_verbs::create(server, request).await,
        ("update", "" | "status" | "finalize" | "resize" | "ephemeralcontainers") => {
            object_verbs::update(server, request).await
        }
        ("patch", "" | "status" | "resize" | "ephemeralcontainers") => {
            object_verbs::patch(server, request).await
        }
        ("delete", "") => object_verbs::delete(server, request).await,
        (verb, _) => Err(ApiError::method_not_allowed(
            &request.target.resource.qualified(),
            verb,
        )),
    }
}

/// Serves connections until the server stops, and then until the running requests have ended.
pub(crate) async fn serve(listener: TcpListener, server: Arc<Server>) {
    let stopping = server.stopping.clone();
    let connections = TaskTracker::new();
    loop {
        tokio::select! {
            () = stopping.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok(connection) => {
                    connections.spawn(serve_connection(connection, Arc::clone(&server)));
                }
                Err(error) => tracing::warn!(%error, "cannot accept a connection"),
            },
        }
    }
    connections.close();
    connections.wait().await;
}

/// Serves one client connection until the client closes it or the server stops.
async fn serve_connection((stream, peer): (TcpStream, SocketAddr), server: Arc<Server>) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, %peer, "cannot set TCP_NODELAY");
    }
    let stopping = server.stopping.clone();
    let service = service_fn(move |request| answer_or_hang_up(Arc::clone(&server), request));
    let connection = http1::Builder::new()
        // A kept connection may be idle for longer than hyper's default timeout, and clients would see it reset.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopping.cancelled() => {
            // The running request still gets its answer; watches end by themselves, as they also wait for `stopping`.
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, %peer, "connection ended");
    }
}

/// Answers one request; an error closes the connection without a reply.
async fn answer_or_hang_up(server: Arc<Server>, request: http::Request<Incoming>) -> io::Result<Response> {
    let answer = respond(&server, request.map(Body::new)).await;
    let response = answer.unwrap_or_else(|error| error_answer(&error));
    if response.extensions().get::<Hangup>().is_some() {
        return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "injected fault"));
    }
    Ok(response)
}

/// Marks a response that must not be sent: the connection closes instead, as an injected fault.
#[derive(Debug, Clone, Copy)]
struct Hangup;

/// The text of a header; empty without it.
pub(super) fn header_text(headers: &HeaderMap, name: HeaderName) -> &str {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.unwrap_or_default()
}

const JSON: HeaderValue = HeaderValue::from_static("application/json");

pub(super) fn json_bytes_answer(code: u16, body: Bytes) -> Response {
    body_answer(code, JSON, Body::from(body))
}

/// An answer with this body, which may be a stream.
pub(super) fn body_answer(code: u16, content_type: HeaderValue, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

pub(super) fn json_answer(code: u16, value: &Value) -> Response {
    json_bytes_answer(code, Bytes::from(value.to_string()))
}

pub(super) fn text_answer(text: String) -> Response {
    body_answer(
        200,
        HeaderValue::from_static("text/plain; charset=utf-8"),
        Body::from(text),
    )
}

/// The answer to a failed request: the error as a `Status` object.
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
        // JSON is YAML too, but the JSON parser is much faster, and clients send JSON as apply patches.
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
