//! The HTTP layer: connections, authentication, faults, and the dispatch of requests to the rules.
//!
//! It decides nothing about objects. Every error is answered as a `Status`.

mod admitted;
mod answer;
mod collection;
mod connection;
mod object_verbs;
mod route;
mod watch_stream;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, USER_AGENT};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio_util::sync::CancellationToken;

use self::answer::{Hangup, json_answer};
use self::route::{Query, Route};
use super::access::{Access, Audit, Tokens, User};
use super::cluster::Cluster;
use super::discovery;
use super::faults::{Call, Fault, Faults, refusal};
use super::object;
use super::status::ApiError;

pub(crate) use self::connection::serve;

/// The largest body that is read, as in etcd-backed servers.
const MAX_BODY: usize = 3 * 1024 * 1024;

/// The state that all requests share.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) cluster: Cluster,
    pub(crate) tokens: Tokens,
    pub(crate) audit: Audit,
    pub(crate) faults: Faults,
    pub(crate) bookmark_interval: Duration,
    pub(crate) stopping: CancellationToken,
}

/// A request for a resource, with its body read.
#[derive(Debug)]
struct ApiRequest {
    route: Route,
    query: Query,
    content_type: String,
    accept: String,
    body: Bytes,
    user_agent: String,
    user: User,
}

/// The service that answers every path.
pub(crate) fn router(server: Arc<Server>) -> Router {
    Router::new().fallback(handle).with_state(server)
}

async fn handle(State(server): State<Arc<Server>>, request: Request) -> Response {
    respond(server, request)
        .await
        .unwrap_or_else(|error| answer::error_answer(&error))
}

async fn respond(server: Arc<Server>, request: Request) -> Result<Response, ApiError> {
    let path = request.uri().path().trim_matches('/').to_owned();
    match path.as_str() {
        "healthz" | "livez" | "readyz" => return Ok(answer::text_answer("ok".into())),
        "version" => return Ok(json_answer(200, &discovery::version())),
        _ => {}
    }
    let user = server
        .tokens
        .authenticate(request.headers().get(AUTHORIZATION).and_then(|h| h.to_str().ok()))?;
    if request.method() == http::Method::GET
        && let Some(found) = discovery::answer(&server.cluster.state().registry, &path)
    {
        return Ok(json_answer(200, &found));
    }
    let query = Query::parse(request.uri().query().unwrap_or_default());
    let route = Route::parse(&server.cluster, request.method(), &path, &query)?;
    server.audit.record(Access {
        user: user.name.clone(),
        verb: route.verb.to_owned(),
        api_group: route.resource.group.clone(),
        resource: route.resource.plural.clone(),
        subresource: route.subresource.clone(),
    });
    let request = read_request(request, route, query, user).await?;
    with_faults(server, request).await
}

async fn read_request(
    request: Request,
    route: Route,
    query: Query,
    user: User,
) -> Result<ApiRequest, ApiError> {
    let (head, body) = request.into_parts();
    let header = |name| {
        head.headers
            .get(name)
            .and_then(|h| h.to_str().ok())
            .unwrap_or_default()
            .to_owned()
    };
    let content_type = header(CONTENT_TYPE)
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_owned();
    let (accept, user_agent) = (header(ACCEPT), header(USER_AGENT));
    let body = Limited::new(body, MAX_BODY).collect().await.map_err(|error| {
        if error.downcast_ref::<LengthLimitError>().is_some() {
            ApiError::new(413, format!("Request entity too large: limit is {MAX_BODY}"))
        } else {
            ApiError::bad_request(format!("cannot read the request body: {error}"))
        }
    })?;
    Ok(ApiRequest {
        route,
        query,
        content_type,
        accept,
        body: body.to_bytes(),
        user_agent,
        user,
    })
}

async fn with_faults(server: Arc<Server>, request: ApiRequest) -> Result<Response, ApiError> {
    let named = request.fault_name();
    let call = Call {
        verb: request.route.verb,
        resource: &request.route.resource.plural,
        subresource: &request.route.subresource,
        name: &named,
    };
    match server.faults.meet(&call) {
        Some(Fault::DropConnection) => return Ok(hang_up()),
        Some(Fault::Refuse(code)) => return Err(refusal(code, None)),
        Some(Fault::RefuseUntil(code, seconds)) => return Err(refusal(code, Some(seconds))),
        Some(Fault::Delay(delay)) => tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = server.stopping.cancelled() => return Err(refusal(503, None)),
        },
        Some(Fault::DropReply) => {
            // The reply is lost, success or error.
            let _ = dispatch(&server, &request).await;
            return Ok(hang_up());
        }
        None => {}
    }
    dispatch(&server, &request).await
}

fn hang_up() -> Response {
    let mut response = Response::new(Body::empty());
    response.extensions_mut().insert(Hangup);
    response
}

async fn dispatch(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    match (request.route.verb, request.route.subresource.as_str()) {
        ("list", _) => collection::list(server, request),
        ("watch", _) => collection::watch(server, request),
        ("deletecollection", _) => collection::delete(server, request).await,
        ("get", "log") => object_verbs::log(server, request),
        ("get", "" | "status") => object_verbs::get(server, request),
        ("create", "binding") => object_verbs::bind(server, request).await,
        ("create", "eviction") => object_verbs::evict(server, request).await,
        ("create", "") => object_verbs::create(server, request).await,
        ("update", "" | "status" | "finalize") => object_verbs::update(server, request).await,
        ("patch", "" | "status") => object_verbs::patch(server, request).await,
        ("delete", "") => object_verbs::delete(server, request).await,
        (verb, _) => Err(ApiError::method_not_allowed(
            &request.route.resource.qualified(),
            verb,
        )),
    }
}

impl ApiRequest {
    /// The name that faults match: that of the path or, for a creation, of the body.
    fn fault_name(&self) -> String {
        if !self.route.name.is_empty() || self.route.verb != "create" {
            return self.route.name.clone();
        }
        self.read_body()
            .map(|body| object::text(&body, "/metadata/name").to_owned())
            .unwrap_or_default()
    }

    fn read_body(&self) -> Result<serde_json::Value, ApiError> {
        answer::parse_body(&self.content_type, &self.body)
    }
}
