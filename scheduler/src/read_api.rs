//! The read API: versioned JSON about nodes, GPUs and pods for `kubectl gpushare` and live pages. Every replica serves it, and no
//! request changes anything.
//!
//! The routes under the extender's prefix have the same access as the views of `inspect`. The listener of the page
//! (`--read-listen`) lets in every client of the loopback address, which is every client that may forward a port to the pod.

mod changes;
mod computing_slot;
mod doctor;
mod explain;
mod fit;
mod history;
mod memory_use;
mod names;
mod node_findings;
mod plan;
mod snapshot;
mod state;

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::{Extension, Path, RawQuery, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, middleware};
use http::header::AsHeaderName;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use parking_lot::Mutex;
use proto::read_api::{
    Diagnosis, FitRequest, Node, PlanRequest, Replica, State as ClusterState, Totals, VERSION,
};
use rustc_hash::FxHasher;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Mutex as AsyncMutex, Semaphore, oneshot};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::certificates::metrics::CertificateMetrics;
use crate::extender::{Denied, Extender, json};
use crate::index::{Index, Shared};
use crate::make_room::answer_about;
use computing_slot::ComputingSlot;
use daemon::http_server::{ClientCertificate, ClientName};
pub use explain::explain;
use explain::explain_to;
pub use fit::fit;
use history::HistoryRecorder;
use memory_use::PluginMeasurements;
use names::{SeenNames, Viewer};
pub use node_findings::node_findings;
use plan::give_way;
pub use plan::{PlanRequestError, plan};
use snapshot::{StatePublisher, StateSnapshot};

/// Most clients that follow changes (`GET changes`) at one time.
const MAX_FOLLOWERS: usize = 64;
/// Most plans that are computed at one time.
const MAX_PLANS: usize = 2;
const JSON: &str = "application/json";
/// Largest body of a request, in bytes. A fit request has one pod.
const MAX_BODY: usize = 1 << 20;
const HISTORY_STEP: Duration = Duration::from_secs(60);
/// Minutes after which the history asks device plugins for the memory in use again, if none of them measured it last time.
const PROBE_MINUTES: u64 = 10;

/// The state behind all routes of the read API, and their limits.
#[expect(missing_debug_implementations, reason = "the extender has none")]
pub struct ReadApi {
    extender: Arc<Extender>,
    publisher: Arc<AsyncMutex<StatePublisher>>,
    history: Mutex<HistoryRecorder>,
    memory_use: Arc<PluginMeasurements>,
    followers: Arc<Semaphore>,
    computing: ComputingSlot,
    plans: Arc<Semaphore>,
    certificates: Option<CertificateMetrics>,
    /// Ends the streams of changes, which would hold up the end of the process.
    stop: CancellationToken,
}

/// The access rule of one listener.
#[derive(Clone)]
struct Gate {
    api: Arc<ReadApi>,
    /// True if clients need a certificate or a bearer token.
    demands_credentials: bool,
}

impl ReadApi {
    /// The read API over the state of an extender, until `stop`. Its `doctor` also checks the ends of `certificates`.
    pub fn new(
        extender: Arc<Extender>,
        certificates: Option<CertificateMetrics>,
        stop: CancellationToken,
    ) -> Self {
        let started = unix_time();
        // Revisions of two replicas, or of two processes in turn, must never be taken for each other.
        let epoch = format!("{:x}.{:x}", started.as_micros(), std::process::id());
        let publisher = StatePublisher::new(extender.index().clone(), &epoch);
        Self {
            publisher: Arc::new(AsyncMutex::new(publisher)),
            extender,
            history: Mutex::default(),
            memory_use: Arc::default(),
            followers: Arc::new(Semaphore::new(MAX_FOLLOWERS)),
            computing: ComputingSlot::default(),
            plans: Arc::new(Semaphore::new(MAX_PLANS)),
            certificates,
            stop,
        }
    }

    fn index(&self) -> &Shared<Index> {
        self.extender.index()
    }

    /// The newest snapshot of the state, renewed first if it is older than [`snapshot::MAX_AGE`].
    async fn snapshot(&self) -> Arc<StateSnapshot> {
        // In a task of its own: a client that takes nothing of its answer for long must not hold the lock as long.
        let publisher = Arc::clone(&self.publisher);
        let renewal = tokio::spawn(async move { publisher.lock_owned().await.current().await });
        match renewal.await {
            Ok(snapshot) => snapshot,
            // The runtime is being shut down.
            Err(_) => std::future::pending().await,
        }
    }

    pub(crate) async fn record_history(self: Arc<Self>) {
        let mut is_measured = true;
        for minute in 0_u64.. {
            sleep(HISTORY_STEP).await;
            // Before the first lists are complete, a point would look like an outage.
            if self.index().read().ready().is_err() {
                continue;
            }
            let snapshot = self.snapshot().await;
            let mut models = snapshot.models.clone();
            // If no plugin measures memory, requests to thousands of plugins every minute would be in vain; a plugin may have
            // been restarted with the flag since.
            if is_measured || minute % PROBE_MINUTES == 0 {
                is_measured = self.add_memory_in_use(&snapshot, &mut models).await;
            }
            let mut history = self.history.lock();
            history.record(unix_time().as_secs(), snapshot.pending.total, &models);
        }
    }

    /// Adds the memory in use to the totals of each model; returns false if no device plugin measures it.
    async fn add_memory_in_use(
        &self,
        snapshot: &StateSnapshot,
        models: &mut BTreeMap<String, Totals>,
    ) -> bool {
        let nodes = snapshot.nodes.keys().cloned().collect();
        let measured = self.memory_use.measure(self.index(), nodes).await;
        let mut is_measured = false;
        for (name, node) in &snapshot.nodes {
            if let Some(Ok(in_use)) = measured.get(name)
                && let Some(total) = in_use.total()
                && let Some(totals) = models.get_mut(&node.model)
            {
                totals.add_used(total);
                is_measured = true;
            }
        }
        is_measured
    }

    /// The client of a request with a bearer token. It sees the names of pods that its user may list.
    async fn viewer_with_token(&self, headers: &HeaderMap) -> Result<Viewer, Denied> {
        let access = &self.extender.access;
        access.authorize(headers).await?;
        let names = if access.may_list_pods(headers, None).await {
            SeenNames::All
        } else {
            let namespaces = self.snapshot().await.largest_namespaces();
            SeenNames::OfNamespaces(access.listable(headers, namespaces).await)
        };
        let token = headers.get(header::AUTHORIZATION).cloned();
        let mut hasher = FxHasher::default();
        token.hash(&mut hasher);
        Ok(Viewer {
            caller: format!("token {:x}", hasher.finish()).into(),
            names,
            credentials: token.map(|token| HeaderMap::from_iter([(header::AUTHORIZATION, token)])),
        })
    }

    fn replica(&self) -> Replica {
        let (filter_requests, filter_clients) = self.extender.filter_clients();
        let last_filter = filter_clients.iter().map(|client| client.last).max();
        Replica {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            leading: self.extender.is_leading(),
            not_ready: self.index().read().ready().err(),
            filter_requests,
            last_filter_seconds: last_filter.map(|at| unix_time().as_secs().saturating_sub(at)),
            filter_clients,
        }
    }
}

/// The routes under a prefix. With `demands_credentials` only clients with a certificate or a bearer token are answered.
pub fn router(api: &Arc<ReadApi>, prefix: &str, demands_credentials: bool) -> Router {
    let gate = Gate {
        api: Arc::clone(api),
        demands_credentials,
    };
    let path = |path: &str| format!("{prefix}/{VERSION}/{path}");
    Router::new()
        .route(&path("state"), get(state::state))
        .route(&path("changes"), get(follow_changes))
        .route(&path("history"), get(history))
        .route(&path("doctor"), get(doctor))
        .route(&path("pods/{namespace}/{name}/explain"), get(explain_pod))
        .route(&path("fit"), post(fit_pods))
        .route(&path("plan"), post(plan_moves))
        .route_layer(middleware::from_fn(demand_sync))
        .route_layer(from_fn_with_state(gate, admit))
        .with_state(Arc::clone(api))
}

/// Middleware that passes requests of clients with access, and notes the names that each client may see.
async fn admit(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    let has_certificate = request.extensions().get::<ClientCertificate>().is_some();
    let viewer = if gate.demands_credentials && !has_certificate {
        match gate.api.viewer_with_token(request.headers()).await {
            Ok(viewer) => viewer,
            Err(denied) => return denied.into_response(),
        }
    } else {
        // A page of another site has no client certificate of the cluster, but it reaches an address without credentials.
        if !gate.demands_credentials
            && let Some(refusal) = refuse_foreign_site(&request)
        {
            return refusal;
        }
        let name = request.extensions().get::<ClientName>();
        Viewer {
            caller: name.map_or_else(Arc::default, |name| Arc::clone(&name.0)),
            names: SeenNames::All,
            credentials: None,
        }
    };
    request.extensions_mut().insert(viewer);
    request.extensions_mut().insert(Arc::clone(&gate.api));
    next.run(request).await
}

/// Middleware that refuses requests until every watch has listed its objects: answers would show only a part of the cluster.
async fn demand_sync(Extension(api): Extension<Arc<ReadApi>>, request: Request, next: Next) -> Response {
    // `doctor` itself reports which watch the replica waits for.
    let is_exempt = request.uri().path().ends_with("/doctor");
    let ready = api.index().read().ready();
    match ready {
        Err(reason) if !is_exempt => refusal(StatusCode::SERVICE_UNAVAILABLE, &reason),
        _ => next.run(request).await,
    }
}

/// Refuses a request that another site's page has caused, at an address without credentials: a page whose name resolves to the
/// loopback address sends its own name here, every other page its origin with requests that could act.
pub(crate) fn refuse_foreign_site(request: &Request) -> Option<Response> {
    let headers = request.headers();
    if headers.get_all(header::HOST).iter().count() > 1 {
        let text = "the request has more than one header Host\n";
        return Some((StatusCode::BAD_REQUEST, text).into_response());
    }
    // Every browser sends the header `Host`; a client without it is no browser.
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes);
    let authority = request.uri().authority();
    let authority = authority.map(|authority| authority.as_str().as_bytes());
    let mut hosts = host.into_iter().chain(authority);
    if hosts.any(|host| !is_this_machine(host)) {
        let text = "this address answers only requests to localhost\n";
        return Some((StatusCode::MISDIRECTED_REQUEST, text).into_response());
    }
    let origin = headers.get(header::ORIGIN).map(HeaderValue::as_bytes);
    if let Some(origin) = origin
        && !origin.strip_prefix(b"http://").is_some_and(is_this_machine)
    {
        let text = "this address answers no requests of other sites (header Origin)\n";
        return Some((StatusCode::FORBIDDEN, text).into_response());
    }
    // A browser sends other types for a page of another site, whose origin it may leave out, without asking first.
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    if request.method() == Method::POST && content_type != Some(JSON.as_bytes()) {
        let text = "send the header Content-Type: application/json\n";
        return Some((StatusCode::UNSUPPORTED_MEDIA_TYPE, text).into_response());
    }
    None
}

/// Returns true if a host, with or without a port, is `localhost` or a loopback address, against DNS rebinding.
fn is_this_machine(host: &[u8]) -> bool {
    let Ok(host) = str::from_utf8(host) else {
        return false;
    };
    if let Ok(address) = host.parse::<SocketAddr>() {
        return address.ip().is_loopback();
    }
    // An IPv6 address has brackets, and colons of its own.
    if let Some(address) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return address.parse::<Ipv6Addr>().is_ok_and(|ip| ip.is_loopback());
    }
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name == "localhost" || name.parse::<Ipv4Addr>().is_ok_and(|ip| ip.is_loopback())
}

async fn follow_changes(
    State(api): State<Arc<ReadApi>>,
    Extension(viewer): Extension<Viewer>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    // Refused at once: a client in a queue would not know that the state that it shows is old.
    let Ok(permit) = Arc::clone(&api.followers).try_acquire_owned() else {
        let text =
            format!("{MAX_FOLLOWERS} clients follow changes, as many as may at one time; try again later\n");
        return (StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "10")], text).into_response();
    };
    // Browsers send the header `Last-Event-ID` by themselves when they connect again.
    let last = header_text(&headers, "last-event-id");
    let since = last.or(parameter(query.as_deref(), "since"));
    changes::stream(api, viewer, since.unwrap_or_default().to_owned(), permit)
}

async fn history(State(api): State<Arc<ReadApi>>) -> Response {
    // In a statement of its own, so that the lock ends before up to 10 MB are written as JSON.
    let history = api.history.lock().history();
    respond(&history)
}

async fn doctor(State(api): State<Arc<ReadApi>>, Extension(viewer): Extension<Viewer>) -> Response {
    let snapshot = api.snapshot().await;
    let replica = api.replica();
    let mut findings = doctor::findings(&replica, &snapshot, &viewer);
    if let Some(certificates) = &api.certificates {
        findings.push(doctor::check_certificates(&certificates.all_ends(), unix_time()));
    }
    respond(&Diagnosis {
        api_version: VERSION.to_owned(),
        findings,
        replica,
    })
}

async fn explain_pod(
    State(api): State<Arc<ReadApi>>,
    Extension(viewer): Extension<Viewer>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
) -> Result<Response, Response> {
    // Before the pod is looked up, so that the answer does not show whether it exists.
    if !viewer.names.include(&namespace) {
        let text = format!("explain takes the right to list the pods of namespace {namespace}");
        return Err(refusal(StatusCode::FORBIDDEN, &text));
    }
    let all = parameter(query.as_deref(), "all") == Some("true");
    let index = api.index().clone();
    let pod = format!("{namespace}/{name}");
    let names = viewer.names;
    let evaluate = move || {
        explain_to(&index, &namespace, &name, all, |namespace| {
            names.include(namespace)
        })
    };
    let Some(mut explanation) = api.computing.compute(&viewer.caller, evaluate).await? else {
        let text = format!("there is no pod {pod:?} that asks for devices");
        return Err(refusal(StatusCode::NOT_FOUND, &text));
    };
    // Only the leader looks for pods to evict for this one (`make_room`), so that other replicas have no answer.
    if explanation.node.is_none() {
        let answer = answer_about(&api.extender, &explanation.uid);
        explanation.summary.extend(answer);
    }
    Ok(respond(&explanation))
}

async fn fit_pods(
    State(api): State<Arc<ReadApi>>,
    Extension(viewer): Extension<Viewer>,
    request: Request,
) -> Result<Response, Response> {
    let request: FitRequest = read_json("fit", request).await?;
    let index = api.index().clone();
    let fitting = move || fit(&index, &request);
    match api.computing.compute(&viewer.caller, fitting).await? {
        Ok(answer) => Ok(respond(&answer)),
        Err(error) => Err(refusal(StatusCode::BAD_REQUEST, &error)),
    }
}

async fn plan_moves(
    State(api): State<Arc<ReadApi>>,
    Extension(viewer): Extension<Viewer>,
    request: Request,
) -> Result<Response, Response> {
    let request: PlanRequest = read_json("plan", request).await?;
    // Refused at once: a plan that waits would be of a state that its reader did not ask about.
    let Ok(permit) = Arc::clone(&api.plans).try_acquire_owned() else {
        let text = format!("{MAX_PLANS} plans are being made, as many as may at one time; try again later");
        let refused = refusal(StatusCode::SERVICE_UNAVAILABLE, &text);
        return Err(([(header::RETRY_AFTER, "2")], refused).into_response());
    };
    let index = api.index().clone();
    // This future is dropped if the caller disconnects, and the plan ends then, unless it has read the index already.
    let left = CancellationToken::new();
    let _guard = left.clone().drop_guard();
    let (sender, computed) = oneshot::channel();
    // A thread of its own, as it lowers its priority for good.
    let computing = thread::Builder::new().name("plan".to_owned()).spawn(move || {
        let now = unix_time().as_secs();
        let answer = plan(&index, &request, now, &|| left.is_cancelled(), give_way);
        // Before the answer, after which the caller may ask for the next plan at once.
        drop(permit);
        // An error means that the caller has left.
        let _ = sender.send(answer);
    });
    computing.map_err(|error| refusal(StatusCode::INTERNAL_SERVER_ERROR, &error))?;
    match computed.await {
        Ok(Ok(mut answer)) => {
            answer.hide_names(|namespace| viewer.names.include(namespace));
            Ok(respond(&answer))
        }
        Ok(Err(error)) => Err(refusal(StatusCode::BAD_REQUEST, &error)),
        Err(error) => Err(refusal(StatusCode::INTERNAL_SERVER_ERROR, &error)),
    }
}

/// Reads the JSON of a request; `what` is the request's name in a refusal.
async fn read_json<T: DeserializeOwned>(what: &str, request: Request) -> Result<T, Response> {
    let refuse = |text: String| refusal(StatusCode::BAD_REQUEST, &text);
    let body = Limited::new(request.into_body(), MAX_BODY).collect().await;
    let body = body.map_err(|error| refuse(format!("the request's body: {error}")))?;
    serde_json::from_slice(&body.to_bytes()).map_err(|error| refuse(format!("{what} request: {error}")))
}

fn refusal(status: StatusCode, text: &impl fmt::Display) -> Response {
    (status, format!("{text}\n")).into_response()
}

/// The state that an index shows, for programs that fill an index themselves, such as `kubectl gpushare` without a scheduler.
pub async fn state_of(index: Shared<Index>) -> ClusterState {
    let snapshot = StatePublisher::new(index, "offline").current().await;
    let mut nodes = Vec::with_capacity(snapshot.nodes.len());
    for node in snapshot.nodes.values() {
        nodes.extend(serde_json::from_slice::<Node>(&node.json));
    }
    ClusterState {
        api_version: VERSION.to_owned(),
        revision: snapshot.id(),
        totals: snapshot.totals,
        models: snapshot.models.clone(),
        nodes,
        pending: snapshot.pending.pods.clone(),
        pending_total: snapshot.pending.total,
        ..ClusterState::default()
    }
}

/// The value of a header; `None` also if the value is not plain text.
pub(crate) fn header_text(headers: &HeaderMap, name: impl AsHeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// The value of a query parameter. Escapes are not decoded: no parameter of the API needs one.
fn parameter<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    let mut pairs = query?.split('&');
    pairs.find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
}

fn respond(answer: &impl Serialize) -> Response {
    ([(header::CONTENT_TYPE, JSON)], json(answer)).into_response()
}

pub(crate) fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
