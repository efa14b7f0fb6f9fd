//! The extender: kube-scheduler's verbs over HTTP, answered from memory, and read-only views of the same state.
//!
//! This file has the routes and reads requests. Each verb is a module with a function `answer`, from the body of the request
//! to the body of the answer.

mod access;
mod avoided_nodes;
pub mod bind;
mod bind_limiter;
mod evaluation;
pub mod filter;
mod filter_clients;
mod group;
mod inspect;
mod name_lists;
pub mod pod_memory;
mod preempt;
pub mod prioritize;
mod recent_pods;
mod recheck;
pub mod requeue;

use std::fmt;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use daemon::health;
use daemon::metrics_text::MetricsText;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use kube::Client;
use parking_lot::{Mutex, MutexGuard};
use proto::extender::ExtenderFilterResult;
use proto::read_api::FilterClient;
use rustc_hash::FxHashSet;
use serde::Serialize;
use tokio::sync::Semaphore;

use crate::admission::Rules;
use crate::api_server::shorten;
use crate::bind::Binder;
use crate::config::{AnswerNodes, MisfitNodes, PREFIX, Serving};
use crate::index::{Index, Shared};
use crate::keyed_lock::KeyedLock;
use crate::leader::{LABEL, Leadership, NotLeading, now};
use crate::metrics::{Ending, Metrics, Timer, Verb};
use crate::read_api::header_text;
pub(crate) use access::{Access, Denied};
use bind_limiter::BindLimiter;
use daemon::http_server::ClientCertificate;
use daemon::log_limit::LogLimit;
use filter_clients::FilterClients;
use inspect::MAX_VIEWS;
use name_lists::NameLists;
use pod_memory::PodMemory;
pub(crate) use preempt::{begin_hold, end_hold, is_outranked, promised_to_others};

static REFUSED_REQUESTS: LogLimit = LogLimit::new();

/// The state and configuration of all verbs and views.
#[expect(missing_debug_implementations, reason = "a client of the API server has none")]
pub struct Extender {
    index: Shared<Index>,
    /// State of pods from one request to the next. A function that locks both this and the index locks the index first.
    memory: Mutex<PodMemory>,
    name_lists: NameLists,
    metrics: Metrics,
    binder: Binder,
    /// By pod UID: one bind of a pod at a time.
    pod_locks: KeyedLock,
    bind_limiter: BindLimiter,
    /// Bindings without a known outcome, which tasks look up: the pod's UID, and the time at which devices were assumed for it.
    resolving: Mutex<FxHashSet<(Box<str>, u64)>>,
    /// Permits of `filter`, `prioritize` and `preempt` requests, which are answered from memory.
    answering: Semaphore,
    /// Permits of binds, which wait for the API server and must not hold up other requests.
    binding: Semaphore,
    /// The settings of the server, such as the limits of one request.
    serving: Serving,
    /// The webhooks' rules, which filters apply too: a cluster may have no webhooks.
    pub rules: Rules,
    /// The number of nodes in the results of `filter`.
    pub answer_nodes: AnswerNodes,
    /// The form in which `filter` reports nodes without room.
    pub misfit_nodes: MisfitNodes,
    /// True if the leader evicts pods to make room, and so takes over the rooms of an earlier leader; false if it only reports
    /// them. `None` if filters do not note the pods for which room may be made.
    pub evicts_for_room: Option<bool>,
    pub(crate) access: Access,
    /// One permit for each answer of `inspect`, until the client has taken its last byte.
    views: Arc<Semaphore>,
    /// One permit, for the view that is made into JSON: views take at most one core from filters.
    rendering: Semaphore,
    filter_clients: FilterClients,
}

/// A request that gets an HTTP error.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The body is not a request of this verb, for this reason.
    #[error("{0} request: {1}")]
    Malformed(&'static str, String),
    /// The body is larger than this number of bytes.
    #[error("the request's body is larger than {0} bytes; send node names only (nodeCacheCapable)")]
    TooLarge(usize),
    /// The body broke off, or took too long.
    #[error("the request's body did not arrive: {0}")]
    Broken(String),
    /// The client showed no certificate.
    #[error("this verb demands a client certificate that the configured authorities signed")]
    NoCertificate,
    /// The watches have not synced.
    #[error("{0}")]
    NotReady(String),
    /// Another replica leads.
    #[error(transparent)]
    NotLeading(#[from] NotLeading),
}

impl RequestError {
    /// The error for a request of this verb whose body cannot be used.
    fn malformed(verb: &'static str, reason: &impl fmt::Display) -> Self {
        Self::Malformed(verb, shorten(&reason.to_string()))
    }

    /// The HTTP status of the answer, and the outcome that metrics count.
    fn outcome(&self) -> (StatusCode, Ending) {
        match self {
            Self::Malformed(..) => (StatusCode::BAD_REQUEST, Ending::Malformed),
            Self::TooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, Ending::Malformed),
            Self::Broken(_) => (StatusCode::REQUEST_TIMEOUT, Ending::Malformed),
            Self::NoCertificate => (StatusCode::FORBIDDEN, Ending::Malformed),
            Self::NotReady(_) => (StatusCode::SERVICE_UNAVAILABLE, Ending::NotReady),
            Self::NotLeading(_) => (StatusCode::SERVICE_UNAVAILABLE, Ending::NotLeading),
        }
    }
}

impl IntoResponse for RequestError {
    fn into_response(self) -> Response {
        let (status, _) = self.outcome();
        if let Some(left_out) = REFUSED_REQUESTS.next_line() {
            tracing::warn!(status = status.as_u16(), error = %self, left_out, "request refused");
        }
        (status, format!("{self}\n")).into_response()
    }
}

impl Extender {
    /// An extender that answers from `index` and binds through `binder`.
    pub fn new(index: Shared<Index>, metrics: Metrics, binder: Binder, serving: &Serving) -> Self {
        Self {
            index,
            memory: Mutex::default(),
            name_lists: NameLists::default(),
            metrics,
            binder,
            pod_locks: KeyedLock::default(),
            bind_limiter: BindLimiter::new(serving.bind_concurrency),
            resolving: Mutex::default(),
            answering: Semaphore::new(serving.concurrency),
            binding: Semaphore::new(serving.concurrency),
            serving: serving.clone(),
            rules: Rules::default(),
            answer_nodes: AnswerNodes::default(),
            misfit_nodes: MisfitNodes::default(),
            evicts_for_room: None,
            access: Access::new(serving.demands_certificates()),
            views: Arc::new(Semaphore::new(MAX_VIEWS)),
            rendering: Semaphore::new(1),
            filter_clients: FilterClients::default(),
        }
    }

    /// Lets bearer tokens that this API server accepts read the views, besides client certificates.
    #[must_use]
    pub fn with_token_reviews(mut self, client: Client) -> Self {
        self.access.client = Some(client);
        self
    }

    /// The state that requests are answered from.
    pub fn index(&self) -> &Shared<Index> {
        &self.index
    }

    /// The number of filter requests so far, and the latest clients that have sent them.
    pub(crate) fn filter_clients(&self) -> (u64, Vec<FilterClient>) {
        self.filter_clients.read()
    }

    /// Returns true if this replica may bind pods.
    pub fn is_leading(&self) -> bool {
        self.leadership().is_leading()
    }

    /// State of pods from one request to the next. A function that needs the index too locks that first.
    pub(crate) fn memory(&self) -> MutexGuard<'_, PodMemory> {
        self.memory.lock()
    }

    pub(crate) fn leadership(&self) -> &Leadership {
        &self.binder.leadership
    }

    /// Returns an error unless this replica leads, and closes all connections then: their clients connect again, to the leader.
    fn check_leading(&self) -> Result<(), NotLeading> {
        let leading = self.leadership().check(now());
        // kube-scheduler keeps its connection to a Service's old backend until that connection ends.
        leading.inspect_err(|_| self.leadership().reset_connections())
    }

    /// Checks that a Service may send clients to this replica; the error is the answer to the readiness probe.
    fn check_ready(&self) -> Result<(), String> {
        self.index.read().ready()?;
        // A Service sends clients to the pod with this label as long as the pod is ready.
        if self.leadership().has_stale_label(now()) {
            return Err(format!(
                "not ready: this pod may bear the label {LABEL} and does not lead; it is being taken off"
            ));
        }
        match self.leadership().refused() {
            Some(problem) => Err(format!(
                "not ready: this replica holds the Lease, and the API server refuses its bindings: {problem}"
            )),
            None => Ok(()),
        }
    }

    /// Reads the body of a request, if the client has the certificate that the verbs demand and the body is not too large.
    async fn read_body(&self, request: Request<Body>) -> Result<Bytes, RequestError> {
        let (limit, read_timeout) = (self.serving.max_body, self.serving.read_timeout);
        if self.serving.demands_certificates() && request.extensions().get::<ClientCertificate>().is_none() {
            return Err(RequestError::NoCertificate);
        }
        // Refused before the body arrives, so that the client need not send all of it.
        let length = header_text(request.headers(), header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.parse::<usize>().ok());
        if length.is_some_and(|length| length > limit) {
            return Err(RequestError::TooLarge(limit));
        }
        match tokio::time::timeout(read_timeout, Limited::new(request.into_body(), limit).collect()).await {
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => Err(RequestError::TooLarge(limit)),
            Ok(Err(error)) => Err(RequestError::Broken(error.to_string())),
            Err(_) => Err(RequestError::Broken(format!(
                "it took longer than {read_timeout:?}"
            ))),
        }
    }
}

pub(crate) fn json(answer: &impl Serialize) -> Vec<u8> {
    // Structs of texts and numbers always serialize.
    serde_json::to_vec(answer).unwrap_or_default()
}

/// All routes; the verbs and the views are under [`PREFIX`].
pub fn router(extender: Arc<Extender>, metrics: MetricsText) -> Router {
    let verbs = Router::new()
        .route(&format!("{PREFIX}/filter"), post(receive_filter))
        .route(&format!("{PREFIX}/prioritize"), post(receive_prioritize))
        .route(&format!("{PREFIX}/preempt"), post(receive_preempt))
        .route(&format!("{PREFIX}/bind"), post(receive_bind));
    let views = inspect::routes(&extender).route(&format!("{PREFIX}/version"), get(health::version));
    // Probes and metrics have no prefix: kubelet and Prometheus look for them at the usual paths.
    let health = health_router(Arc::clone(&extender), metrics);
    verbs.merge(views).with_state(extender).merge(health)
}

/// The routes for probes and metrics alone.
pub fn health_router(extender: Arc<Extender>, metrics: MetricsText) -> Router {
    health::router(move || extender.check_ready(), metrics)
}

/// Receives a filter request, and answers it when a permit is free. A replica that does not lead answers with an error in the
/// result.
async fn receive_filter(State(extender): State<Arc<Extender>>, request: Request<Body>) -> Response {
    // Before the body is read, so that clients whose requests fail are counted too.
    extender.filter_clients.count(&request);
    let body = extender.read_body(request).await;
    // Metrics show the time from the whole request to the answer, not the network.
    let mut timer = extender.metrics.time(Verb::Filter);
    // After the body: a client that sends slowly must not hold a permit.
    let _permit = extender.answering.acquire().await;
    let answer = match body {
        Ok(body) => filter::answer_rechecked(&extender, &body).await,
        Err(error) => Err(error),
    };
    let answer = match answer {
        // An error within the result has kube-scheduler try the pod again.
        Err(RequestError::NotLeading(reason)) => {
            timer.ending = Ending::NotLeading;
            let error = reason.to_string();
            Ok(json(&ExtenderFilterResult {
                error,
                ..ExtenderFilterResult::default()
            }))
        }
        answer => answer,
    };
    respond(&mut timer, answer)
}

async fn receive_prioritize(State(extender): State<Arc<Extender>>, request: Request<Body>) -> Response {
    answer_if_leading(&extender, Verb::Prioritize, request, prioritize::answer).await
}

async fn receive_preempt(State(extender): State<Arc<Extender>>, request: Request<Body>) -> Response {
    answer_if_leading(&extender, Verb::Preempt, request, preempt::answer).await
}

/// Receives a request of `prioritize` or `preempt`, and has `answer` answer it when a permit is free, if this replica leads.
async fn answer_if_leading(
    extender: &Extender,
    verb: Verb,
    request: Request<Body>,
    answer: fn(&Extender, &[u8]) -> Result<Vec<u8>, RequestError>,
) -> Response {
    let body = extender.read_body(request).await;
    let mut timer = extender.metrics.time(verb);
    // After the body: a client that sends slowly must not hold a permit.
    let _permit = extender.answering.acquire().await;
    let answer = body.and_then(|body| {
        extender.check_leading()?;
        answer(extender, &body)
    });
    respond(&mut timer, answer)
}

/// Receives a bind request, and binds nothing after the deadline, which counts from the arrival of the request.
async fn receive_bind(State(extender): State<Arc<Extender>>, request: Request<Body>) -> Response {
    // The time that the body takes counts too: kube-scheduler's own timeout runs already.
    let deadline = tokio::time::Instant::now() + extender.binder.timeout;
    let body = extender.read_body(request).await;
    let mut timer = extender.metrics.time(Verb::Bind);
    let answer = match body {
        Ok(body) => bind::answer(&extender, &body, deadline, &mut timer).await,
        Err(error) => Err(error),
    };
    respond(&mut timer, answer)
}

/// The HTTP answer of a verb; an error also becomes the ending that metrics count.
fn respond(timer: &mut Timer<'_>, answer: Result<Vec<u8>, RequestError>) -> Response {
    match answer {
        Ok(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Err(error) => {
            (_, timer.ending) = error.outcome();
            error.into_response()
        }
    }
}
