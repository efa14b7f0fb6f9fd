//! The extender's HTTP routes: reads requests, answers them from memory, hands binds to [`binding`].
//!
//! Decides nothing itself.

mod access;
mod announcing;
mod attempts;
pub mod binding;
mod evaluation;
pub mod filter;
pub mod inspect;
mod patience;
mod preempt;
pub mod prioritize;
mod rank;
mod remembered;
mod request;
mod retries;
mod sending;
mod turns;
mod views;
mod waiting;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use daemon::health;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use kube::Client;
use prometheus_client::registry::Registry;
use rustc_hash::FxHashSet;
use tokio::sync::Semaphore;

use crate::accounting::PodFacts;
use crate::admission::Rules;
use crate::api_server::shorten;
use crate::bind::Binder;
use crate::config::{AnswerNodes, MisfitNodes, Serving};
use crate::index::{Index, Leader, Shared};
use crate::leader::{LABEL, Leadership, NotLeading};
use crate::metrics::{Ending, Metrics, Timer, Verb};
use crate::serve::ClientCertificate;
use access::Access;
use attempts::Attempts;
use patience::Patience;
use preempt::Offered;
use remembered::Remembered;
use retries::Retries;
use sending::Sending;
use turns::Turns;
use views::Views;
use waiting::Waiting;

/// Everything that requests are answered with.
#[derive(Debug)]
pub struct Extender {
    index: Shared<Index>,
    metrics: Metrics,
    binder: Binder,
    /// Pods that filters were asked about and no watch has shown yet.
    remembered: Mutex<Remembered<PodFacts>>,
    attempts: Mutex<Attempts>,
    /// The nodes that stood best for pods when these were bound.
    leaders: Mutex<Remembered<Vec<Leader>>>,
    /// The victims that were named for pods.
    offered: Mutex<Remembered<Offered>>,
    /// Refused pods that kube-scheduler is to try again soon.
    retries: Mutex<Retries>,
    /// Refused pods that wait for room.
    waiting: Mutex<Waiting>,
    /// Which refusals are thought over.
    patience: Mutex<Patience>,
    /// By pod UID.
    turns: Turns,
    /// Bindings on their way to the API server.
    sending: Sending,
    /// Decisions whose outcome is being found out, by pod UID and stamp.
    resolving: Mutex<FxHashSet<(Box<str>, u64)>>,
    /// Filters and prioritizes in work.
    answering: Semaphore,
    /// Binds in work: they wait for the API server, and must not hold up the others.
    binding: Semaphore,
    limits: Limits,
    /// Rules by which the filter refuses pods that decide for themselves which devices they see.
    rules: Rules,
    answer_nodes: AnswerNodes,
    misfit_nodes: MisfitNodes,
    /// Admits clients to the views.
    access: Access,
    views: Views,
}

/// What a request must keep to.
#[derive(Clone, Copy, Debug)]
struct Limits {
    max_body: usize,
    read_timeout: Duration,
    client_certificate: bool,
}

/// A request that is not answered with what it asks for.
#[derive(Debug, thiserror::Error)]
pub enum RequestFailure {
    /// Not what the verb expects.
    #[error("{verb} request: {reason}")]
    Malformed {
        /// The verb.
        verb: &'static str,
        /// What is wrong, and where.
        reason: String,
    },
    /// Larger than configured.
    #[error(
        "the request's body is larger than {limit} bytes; raise --max-body or send node names only (nodeCacheCapable)"
    )]
    TooLarge {
        /// The limit.
        limit: usize,
    },
    /// The body did not come in time, or broke off.
    #[error("the request's body did not arrive: {reason}")]
    Broken {
        /// How.
        reason: String,
    },
    /// The client showed no certificate.
    #[error("this verb demands a client certificate that the configured authorities signed")]
    NoCertificate,
    /// The state is not complete yet.
    #[error("{reason}")]
    NotReady {
        /// What is missing.
        reason: String,
    },
    /// Another replica decides.
    #[error(transparent)]
    NotLeading(#[from] NotLeading),
}

impl RequestFailure {
    fn malformed(verb: &'static str, reason: &str) -> Self {
        Self::Malformed {
            verb,
            reason: shorten(reason),
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::Malformed { .. } => StatusCode::BAD_REQUEST,
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Broken { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::NoCertificate => StatusCode::FORBIDDEN,
            Self::NotReady { .. } | Self::NotLeading(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn ending(&self) -> Ending {
        match self {
            Self::NotReady { .. } => Ending::NotReady,
            Self::NotLeading(_) => Ending::NotLeading,
            Self::Malformed { .. } | Self::TooLarge { .. } | Self::Broken { .. } | Self::NoCertificate => {
                Ending::Malformed
            }
        }
    }
}

impl IntoResponse for RequestFailure {
    fn into_response(self) -> Response {
        tracing::warn!(status = self.status().as_u16(), error = %self, "request refused");
        (self.status(), format!("{self}\n")).into_response()
    }
}

impl Extender {
    /// Answers from `index`, binds through `binder`.
    pub fn new(index: Shared<Index>, metrics: Metrics, binder: Binder, serving: &Serving) -> Self {
        let limits = Limits {
            max_body: serving.max_body,
            read_timeout: serving.read_timeout,
            client_certificate: serving.demands_certificates(),
        };
        Self {
            index,
            metrics,
            binder,
            remembered: Mutex::default(),
            attempts: Mutex::default(),
            leaders: Mutex::default(),
            offered: Mutex::default(),
            retries: Mutex::default(),
            waiting: Mutex::default(),
            patience: Mutex::default(),
            turns: Turns::default(),
            sending: Sending::new(serving.bind_concurrency),
            resolving: Mutex::default(),
            answering: Semaphore::new(serving.concurrency),
            binding: Semaphore::new(serving.concurrency),
            limits,
            rules: Rules::default(),
            answer_nodes: AnswerNodes::default(),
            misfit_nodes: MisfitNodes::default(),
            access: Access::new(serving.guards_views(), &serving.prefix),
            views: Views::default(),
        }
    }

    /// The same extender, which asks this API server who may read the views.
    #[must_use]
    pub fn asking_about_readers(self, client: Client) -> Self {
        Self {
            access: self.access.asking(client),
            ..self
        }
    }

    /// The same extender with the webhook's rules about pods that decide for themselves which devices they see.
    #[must_use]
    pub fn judging_by(self, rules: Rules) -> Self {
        Self { rules, ..self }
    }

    /// The same extender, telling of so many nodes that fit.
    #[must_use]
    pub fn answering(self, answer_nodes: AnswerNodes) -> Self {
        Self { answer_nodes, ..self }
    }

    /// The same extender, which reports nodes like this whose devices have no room.
    #[must_use]
    pub fn reporting(self, misfit_nodes: MisfitNodes) -> Self {
        Self { misfit_nodes, ..self }
    }

    /// What requests are answered from.
    pub fn index(&self) -> &Shared<Index> {
        &self.index
    }

    fn leadership(&self) -> &Leadership {
        self.binder.leadership()
    }

    /// Whether clients may be sent here.
    fn ready(&self) -> Result<(), String> {
        self.index.read().ready()?;
        if self.leadership().is_stray(now()) {
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

    /// Reads a request's body, if the client may ask at all.
    async fn receive(&self, request: Request<Body>) -> Result<Bytes, RequestFailure> {
        let Limits {
            max_body: limit,
            read_timeout,
            client_certificate,
        } = self.limits;
        if client_certificate && request.extensions().get::<ClientCertificate>().is_none() {
            return Err(RequestFailure::NoCertificate);
        }
        let length = request
            .headers()
            .get(header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        if length.is_some_and(|length| length > limit) {
            return Err(RequestFailure::TooLarge { limit });
        }
        match tokio::time::timeout(read_timeout, Limited::new(request.into_body(), limit).collect()).await {
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => Err(RequestFailure::TooLarge { limit }),
            Ok(Err(error)) => Err(RequestFailure::Broken {
                reason: error.to_string(),
            }),
            Err(_) => Err(RequestFailure::Broken {
                reason: format!("it took longer than {read_timeout:?}"),
            }),
        }
    }

    /// Keeps what a filter was told about a pod that no watch has shown.
    fn remember(&self, uid: &str, facts: &PodFacts) {
        self.remembered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .put(uid, facts.clone());
    }

    fn attempts(&self) -> MutexGuard<'_, Attempts> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The nodes that stood best for pods when these were bound, as far as that is remembered.
    fn leaders(&self) -> MutexGuard<'_, Remembered<Vec<Leader>>> {
        self.leaders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn offered(&self) -> MutexGuard<'_, Remembered<Offered>> {
        self.offered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn retries(&self) -> MutexGuard<'_, Retries> {
        self.retries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recall(&self, uid: &str) -> Option<PodFacts> {
        self.remembered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(uid)
            .cloned()
    }
}

/// All routes; the verbs and the views are under the configured prefix.
pub fn router(extender: Arc<Extender>, registry: Arc<Registry>, serving: &Serving) -> Router {
    let prefix = &serving.prefix;
    let verbs = Router::new()
        .route(&format!("{prefix}/filter"), post(filter))
        .route(&format!("{prefix}/prioritize"), post(prioritize))
        .route(&format!("{prefix}/preempt"), post(preempt))
        .route(&format!("{prefix}/bind"), post(bind));
    let mut views = views::routes(&extender, prefix);
    if !prefix.is_empty() {
        views = views.route(&format!("{prefix}/version"), get(health::version));
    }
    let health = health_router(Arc::clone(&extender), registry);
    verbs.merge(views).with_state(extender).merge(health)
}

/// The routes for probes and metrics alone.
pub fn health_router(extender: Arc<Extender>, registry: Arc<Registry>) -> Router {
    let readiness = move || extender.ready();
    health::router(readiness, registry)
}

async fn filter(State(extender): State<Arc<Extender>>, request: Request<Body>) -> Response {
    let body = extender.receive(request).await;
    let mut timer = extender.metrics.time(Verb::Filter);
    let _permit = extender.answering.acquire().await;
    let answer = match body {
        Ok(body) => extender.consider(&body).await,
        Err(failure) => Err(failure),
    };
    let answer = match answer {
        Err(RequestFailure::NotLeading(reason)) => {
            timer.ending = Ending::NotLeading;
            filter::refusal(reason)
        }
        answer => answer,
    };
    respond(&mut timer, answer)
}

async fn prioritize(State(extender): State<Arc<Extender>>, request: Request<Body>) -> Response {
    let body = extender.receive(request).await;
    let mut timer = extender.metrics.time(Verb::Prioritize);
    let _permit = extender.answering.acquire().await;
    let leads = |body| extender.leads().map(|()| body).map_err(RequestFailure::from);
    let answer = body
        .and_then(leads)
        .and_then(|body| prioritize::answer(&extender, &body));
    respond(&mut timer, answer)
}

async fn preempt(State(extender): State<Arc<Extender>>, request: Request<Body>) -> Response {
    let body = extender.receive(request).await;
    let mut timer = extender.metrics.time(Verb::Preempt);
    let _permit = extender.answering.acquire().await;
    let leads = |body| extender.leads().map(|()| body).map_err(RequestFailure::from);
    let answer = body
        .and_then(leads)
        .and_then(|body| preempt::answer(&extender, &body, now()));
    respond(&mut timer, answer)
}

impl Extender {
    /// Answers a filter from memory; a refusal that may come too early is thought over, once.
    async fn consider(&self, body: &[u8]) -> Result<Vec<u8>, RequestFailure> {
        self.leads()?;
        let mut answer = filter::answer(self, body, now())?;
        let refused = answer.refused.take().filter(|_| !answer.is_retried);
        if let Some(refused) = refused.filter(|refused| self.patience().is_early(refused, now())) {
            let has_news = patience::news(&self.index, &refused).await;
            self.leads()?;
            answer = filter::answer(self, body, now())?;
            self.patience()
                .thought_over(answer.refused.as_ref(), has_news, now());
            self.metrics.thought_over(answer.refused.is_none());
        }
        answer.count(&self.metrics);
        Ok(answer.json)
    }

    fn patience(&self) -> MutexGuard<'_, Patience> {
        self.patience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this replica decides; a client that comes to the wrong one has to connect anew.
    fn leads(&self) -> Result<(), NotLeading> {
        self.leadership()
            .check(now())
            .inspect_err(|_| self.leadership().hang_up())
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

fn respond(timer: &mut Timer<'_>, answer: Result<Vec<u8>, RequestFailure>) -> Response {
    match answer {
        Ok(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Err(failure) => {
            timer.ending = failure.ending();
            failure.into_response()
        }
    }
}

async fn bind(State(extender): State<Arc<Extender>>, request: Request<Body>) -> Response {
    let deadline = tokio::time::Instant::now() + extender.binder.timeout();
    let body = extender.receive(request).await;
    let mut timer = extender.metrics.time(Verb::Bind);
    let answer = match body {
        Ok(body) => binding::answer(&extender, &body, deadline, &mut timer).await,
        Err(failure) => Err(failure),
    };
    respond(&mut timer, answer)
}
