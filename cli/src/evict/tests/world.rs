//! A cluster in memory: an API server with pods of controllers and their disruption budgets, and a scheduler that plans their
//! moves from n1 to n2. Of the API server it has what the command asks for; a budget always allows one pod to be down.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use kube::Client;
use kube::client::Body;
use proto::record::GPU_MINORS;
use tokio::io::duplex;

use super::*;
use crate::args::{Args, Command, PlanArgs};

/// The time from an eviction until the pod is gone and its successor is there, and from then until the successor has a node.
const PAUSE: Duration = Duration::from_secs(3);

/// Acts at an eviction, of which the flag is true for a dry run.
type Hook = Box<dyn FnMut(&mut State, &str, bool) + Send>;

#[derive(Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fault of its own, and tests combine them"
)]
pub(super) struct State {
    /// The live pods by their names.
    pub(super) pods: BTreeMap<String, Value>,
    /// Names of the evicted pods in their order.
    pub(super) evicted: Vec<String>,
    /// The most pods without a node, or on their way to the end, at one time: of all controllers, and of each.
    pub(super) most_down: usize,
    pub(super) most_down_of: BTreeMap<String, usize>,
    /// The value of the annotation by which GPUs of n1 are closed.
    pub(super) closed: Value,
    /// The controllers of each budget, by their letters.
    pub(super) budgets: Vec<&'static str>,
    /// The scheduler knows nothing of budgets.
    pub(super) hides_budgets: bool,
    /// A pod that does not go, and one whose successor gets no node.
    pub(super) stuck: &'static str,
    pub(super) without_successor: &'static str,
    /// The node and the GPUs of successors; n2 and none if empty.
    pub(super) astray: [&'static str; 2],
    /// A pod that has not run for long, and the time of its start.
    pub(super) young: Option<(&'static str, Instant)>,
    /// A pod whose name is hidden from the user.
    pub(super) hidden: &'static str,
    /// The time that a pod takes to end, beyond that of all.
    pub(super) grace: Duration,
    /// The Jobs by the letters of the controllers that they are; null for one that cannot be read.
    pub(super) jobs: BTreeMap<&'static str, Value>,
    /// The API server cannot read Jobs at the moment.
    pub(super) has_no_jobs: bool,
    /// The `PersistentVolume`s by their names, which are those of their claims too.
    pub(super) volumes: BTreeMap<&'static str, Value>,
    /// The status of the answers to plans, by their numbers from 1.
    pub(super) plan_faults: BTreeMap<usize, u16>,
    pub(super) n_plans: usize,
    /// The API server cannot be reached.
    pub(super) is_away: bool,
    /// The answer of the API server to the next requests is lost.
    pub(super) loses_answers: bool,
    pub(super) on_eviction: Option<Hook>,
}

/// The cluster, shared with its servers.
#[derive(Clone, Default)]
pub(super) struct World(Arc<Mutex<State>>);

/// The end of a run.
pub(super) struct Ended {
    pub(super) result: Result<Option<String>, CommandFailure>,
    pub(super) n_moved: usize,
}

/// A pod of a controller, which the first letters of its name are.
pub(super) fn pod(name: &str, node: &str) -> Value {
    let controller = name.split('-').next().unwrap_or_default();
    let owner = json!({"kind": "ReplicaSet", "name": controller, "uid": controller, "controller": true});
    json!({
        "metadata": {"name": name, "namespace": "team", "uid": format!("uid-{name}"), "ownerReferences": [owner]},
        "spec": {"nodeName": node},
    })
}

fn controller_of(pod: &Value) -> &str {
    field(pod, "/metadata/ownerReferences/0/uid")
}

impl State {
    fn is_down(pod: &Value) -> bool {
        field(pod, "/spec/nodeName").is_empty() || pod["metadata"]["deletionTimestamp"].is_string()
    }

    fn n_down(&self, controller: &str) -> usize {
        let own = |pod: &&Value| controller_of(pod) == controller;
        let down = self.pods.values().filter(|pod| Self::is_down(pod));
        down.filter(own).count()
    }

    fn has_room(&self, controller: &str) -> bool {
        let mut budgets = self
            .budgets
            .iter()
            .filter(|controllers| controllers.contains(controller));
        budgets.all(|controllers| controllers.chars().all(|one| self.n_down(&one.to_string()) == 0))
    }

    /// The plan by which n1 becomes empty.
    fn plan(&self, request: &Value) -> Value {
        let (mut moves, mut left) = (Vec::new(), Vec::new());
        for (name, pod) in &self.pods {
            if pod["spec"]["nodeName"] != "n1" {
                continue;
            }
            let uid = &pod["metadata"]["uid"];
            let volumes = &request["limits"]["volumes"][uid.as_str().unwrap_or_default()];
            if pod["spec"]["volumes"].is_array() && volumes.is_null() {
                left.push(json!({"namespace": "team", "name": name, "uid": uid, "reason": "claims", "volumes": true}));
                continue;
            }
            let started = self
                .young
                .filter(|(young, _)| young == name)
                .map(|(_, started)| started);
            let least = request["limits"]["minRunSeconds"].as_u64().unwrap_or(0);
            if started.is_some_and(|started| started.elapsed() < Duration::from_secs(least)) {
                left.push(json!({"namespace": "team", "name": name, "uid": uid, "reason": "young"}));
                continue;
            }
            let has_room = self.hides_budgets || self.has_room(controller_of(pod));
            if pod["metadata"]["deletionTimestamp"].is_string() || !has_room {
                let name = if self.hidden == name { "" } else { name };
                left.push(json!({"namespace": "team", "name": name, "uid": uid, "reason": "later", "temporary": true}));
            } else {
                moves.push(json!({"namespace": "team", "name": name, "uid": uid, "from": "n1", "to": "n2"}));
            }
        }
        let most = request["limits"]["maxMoves"].as_u64();
        let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(0);
        let reached = moves.len() <= most;
        moves.truncate(most);
        json!({"reached": reached, "moves": moves, "left": left})
    }
}

impl World {
    pub(super) fn of(pods: &[&str]) -> Self {
        let world = Self::default();
        world.state().pods = pods
            .iter()
            .map(|name| ((*name).to_owned(), pod(name, "n1")))
            .collect();
        world
    }

    /// Makes the controller with this letter a Job.
    pub(super) fn set_job(&self, letter: &'static str, job: Value) {
        let mut state = self.state();
        state.jobs.insert(letter, job);
        for pod in state.pods.values_mut().filter(|pod| controller_of(pod) == letter) {
            pod["metadata"]["ownerReferences"][0]["kind"] = json!("Job");
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer of the API server.
    fn answer(&self, method: &Method, path: &str, body: &Value) -> (u16, Value) {
        let mut state = self.state();
        let parts: Vec<&str> = path.trim_start_matches("/api/v1/").split('/').collect();
        match (method.as_str(), parts.as_slice()) {
            ("GET", ["nodes"]) => status(400),
            ("GET", ["nodes", "n1"]) => {
                let annotations = json!({"gpushare/closed-gpus": state.closed});
                let annotations = if state.closed.is_null() {
                    json!({})
                } else {
                    annotations
                };
                (
                    200,
                    json!({"metadata": {"name": "n1", "resourceVersion": "1", "annotations": annotations}}),
                )
            }
            ("PATCH", ["nodes", "n1"]) => {
                state.closed = body["metadata"]["annotations"]["gpushare/closed-gpus"].clone();
                (200, json!({}))
            }
            ("GET", ["namespaces", "team", "pods"]) => {
                let items: Vec<&Value> = state.pods.values().collect();
                (
                    200,
                    json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}),
                )
            }
            ("GET", ["namespaces", "team", "pods", name]) => match state.pods.get(*name) {
                Some(pod) => (200, pod.clone()),
                None => status(404),
            },
            ("GET", ["namespaces", "team", "persistentvolumeclaims", name]) => {
                (200, json!({"spec": {"volumeName": name}}))
            }
            ("GET", ["persistentvolumes", name]) => match state.volumes.get(*name) {
                Some(volume) => (200, volume.clone()),
                None => status(403),
            },
            ("GET", ["", "apis", "batch", "v1", "namespaces", "team", "jobs", name]) => {
                match state.jobs.get(*name) {
                    _ if state.has_no_jobs => status(503),
                    Some(Value::Null) => status(403),
                    Some(job) => (200, job.clone()),
                    None => status(404),
                }
            }
            ("POST", ["namespaces", "team", "pods", name, "eviction"]) => {
                let is_dry = body["deleteOptions"]["dryRun"].is_array();
                if let Some(mut hook) = state.on_eviction.take() {
                    hook(&mut state, name, is_dry);
                    state.on_eviction.get_or_insert(hook);
                }
                let Some(pod) = state.pods.get(*name).cloned() else {
                    return status(404);
                };
                let controller = controller_of(&pod).to_owned();
                if body["deleteOptions"]["preconditions"]["uid"] != pod["metadata"]["uid"] {
                    return status(409);
                }
                if !state.has_room(&controller) {
                    return status(429);
                }
                if !is_dry {
                    self.evict(&mut state, name, &controller);
                }
                (201, json!({}))
            }
            _ => status(404),
        }
    }

    /// The pod goes and its successor comes up on n2, unless the faults of the cluster keep them from that.
    fn evict(&self, state: &mut State, name: &str, controller: &str) {
        state.evicted.push(name.to_owned());
        if let Some(pod) = state.pods.get_mut(name) {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        let down = state.n_down(controller);
        let most = state.most_down_of.entry(controller.to_owned()).or_default();
        *most = down.max(*most);
        let down = state.pods.values().filter(|pod| State::is_down(pod)).count();
        state.most_down = down.max(state.most_down);
        let (world, name, grace) = (self.clone(), name.to_owned(), state.grace);
        tokio::spawn(async move {
            sleep(PAUSE + grace).await;
            let successor = format!("{name}-next");
            {
                let mut state = world.state();
                if state.stuck == name {
                    return;
                }
                state.pods.remove(&name);
                state.pods.insert(successor.clone(), pod(&successor, ""));
                if state.without_successor == name {
                    return;
                }
            }
            sleep(PAUSE).await;
            let mut state = world.state();
            let [node, gpus] = state.astray;
            let mut object = pod(&successor, if node.is_empty() { "n2" } else { node });
            if !gpus.is_empty() {
                object["metadata"]["annotations"] = json!({GPU_MINORS: gpus});
            }
            state.pods.insert(successor, object);
        });
    }

    /// A client of the API server.
    fn client(&self) -> Client {
        let world = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let world = world.clone();
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect().await?.to_bytes();
                if world.state().is_away {
                    return Err(kube::Error::Service(Box::new(io::Error::other(
                        "no route to host",
                    ))));
                }
                let body = serde_json::from_slice(&body).unwrap_or_default();
                let (code, answer) = world.answer(&parts.method, parts.uri.path(), &body);
                if world.state().loses_answers {
                    return Err(kube::Error::Service(Box::new(io::Error::other(
                        "connection reset",
                    ))));
                }
                let answer = Response::builder()
                    .status(code)
                    .body(Body::from(answer.to_string().into_bytes()));
                Ok(answer.unwrap())
            }
        });
        Client::new(service, "default")
    }

    /// A connection to the scheduler.
    async fn scheduler(&self) -> ReadApiClient {
        let (near, far) = duplex(1 << 16);
        let world = self.clone();
        let service = hyper::service::service_fn(move |request: Request<Incoming>| {
            let world = world.clone();
            async move {
                let body = request.into_body().collect().await?.to_bytes();
                let mut state = world.state();
                state.n_plans += 1;
                let code = state.plan_faults.get(&state.n_plans).copied().unwrap_or(200);
                let answer = state.plan(&serde_json::from_slice(&body).unwrap()).to_string();
                let answer = Response::builder()
                    .status(code)
                    .body(Full::new(Bytes::from(answer)));
                Ok::<_, hyper::Error>(answer.unwrap())
            }
        });
        let server = hyper::server::conn::http1::Builder::new();
        tokio::spawn(server.serve_connection(TokioIo::new(far), service));
        ReadApiClient::handshake(near, "the scheduler in memory".to_owned())
            .await
            .unwrap()
    }

    /// Makes the moves of a plan with these arguments, or until the receiver says that the user interrupts.
    pub(super) async fn evict_by(&self, args: &[&str], interrupted: watch::Receiver<bool>) -> Ended {
        let (connection, args, source) = self.prepare(args).await;
        let mut eviction = eviction(&connection, &args, source);
        let plan = eviction.source.plan(&eviction.request).await.unwrap();
        let mut progress = eviction.progress_of(&plan);
        eviction.interrupted = interrupted;
        let result = eviction.make_moves(&mut progress).await;
        Ended {
            result,
            n_moved: progress.n_moved,
        }
    }

    /// Runs the whole command after its plan; returns the exit code.
    pub(super) async fn run(&self, args: &[&str]) -> Result<ExitCode, CommandFailure> {
        let (connection, args, mut source) = self.prepare(args).await;
        let asked = crate::plan::ask(&connection, &mut source, &args).await?;
        let mut eviction = eviction(&connection, &args, source);
        (eviction.request, eviction.of_jobs) = (asked.request, asked.of_jobs);
        eviction.run(asked.answer).await
    }

    pub(super) async fn prepare(&self, args: &[&str]) -> (ClusterConnection, PlanArgs, AnswerSource) {
        use clap::Parser;
        let line = ["kubectl-gpushare", "plan"]
            .iter()
            .chain(args)
            .chain(&["--evict", "--yes"]);
        let args = Args::try_parse_from(line).unwrap();
        let Command::Plan(plan) = args.command else {
            unreachable!("the command is plan")
        };
        let connection = ClusterConnection::of(args.connection, self.client());
        (connection, plan, AnswerSource::Scheduler(self.scheduler().await))
    }
}

fn eviction<'a>(connection: &'a ClusterConnection, args: &'a PlanArgs, source: AnswerSource) -> Eviction<'a> {
    let request = json!({"goal": {"kind": "join"}, "limits": {"maxMoves": args.max_moves}});
    Eviction {
        connection,
        screen: &Screen::PLAIN,
        source,
        args,
        request: serde_json::from_value(request).unwrap(),
        planned_at: Instant::now(),
        of_jobs: BTreeSet::new(),
        interrupted: watch::channel(false).1,
    }
}

fn status(code: u16) -> (u16, Value) {
    let answer = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "No", "message": "no", "code": code});
    (code, answer)
}
