//! A small API server behind kube's client: pods by name, bindings as the real one takes them, and faults on demand.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use http::{Method, Request, Response};
use http_body_util::BodyExt;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::client::Body;
use proto::pod::Pod;
use scheduler::index::{Index, Shared};
use scheduler::watch::ObjectStore;
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::making_room::HOLD;

/// The label `tier` of the pods that a second budget selects, which allows evictions.
pub(crate) const SECOND_TIER: &str = "second";

/// The fault of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// Answered with this status; nothing is done.
    Status(u16),
    /// Done, but answered with this status.
    StatusAfterwards(u16),
    /// Answered 429 with a `Retry-After` of these seconds.
    Busy(u64),
    /// Never answered; nothing is done.
    Hang,
    /// Done, but never answered.
    HangAfterwards,
    /// The connection breaks; nothing is done.
    Break,
    /// Done, but the connection breaks.
    BreakAfterwards,
    /// Done with this delay.
    Slow(Duration),
}

#[derive(Debug, Default)]
struct State {
    pods: BTreeMap<String, Value>,
    posts: VecDeque<Fault>,
    gets: VecDeque<Fault>,
    bindings: Vec<Value>,
    queries: Vec<String>,
    n_gets: usize,
    n_posting: usize,
    most_posting: usize,
    /// The path, query and object of every apply.
    applied: Vec<(String, Value)>,
    applies: VecDeque<Fault>,
    /// Users by token, and the paths that users may get.
    users: BTreeMap<String, String>,
    rights: Vec<(String, String)>,
    reviews: Vec<Value>,
    /// Faults of the next evictions, dry runs among them; `None` for one without.
    evictions: VecDeque<Option<Fault>>,
    /// Faults of the next nominations; `None` for one without.
    nominations: VecDeque<Option<Fault>>,
    /// UIDs of evicted pods, in order, once for each eviction that was carried out.
    evicted: Vec<String>,
    /// The number of further evictions that budgets allow of pods with each label `app`.
    budgets: BTreeMap<String, i64>,
    /// The same, as the index that watches was last shown it.
    shown_budgets: BTreeMap<String, i64>,
    /// True if the index that watches is shown budgets.
    shows_budgets: bool,
    /// The number of writes by the leader after which its process ends, and true if the last of these is carried out.
    ends_after: Option<(usize, bool)>,
    /// The reason, the pod and the message of every event.
    events: Vec<(String, String, String)>,
    n_nominations: usize,
    /// The number of evictions, dry runs among them, and nominations that were asked for.
    n_writes: usize,
    /// UIDs of the pods whose eviction was tried for the plan of this decision.
    tried: Vec<String>,
    /// The pods that were tried before each nomination, by the UID of the nominated pod.
    plans: BTreeMap<String, Vec<String>>,
    /// The times of nominations by the leader that hold, by UID.
    nominated_at: BTreeMap<String, tokio::time::Instant>,
    /// The times at which the leader evicted the first pod for each pod, by UID, unless kube-scheduler has nominated it since.
    evicted_for: BTreeMap<String, tokio::time::Instant>,
    /// The nodes that the leader sends no pods to, as their device plugin is away.
    away: BTreeSet<String>,
    /// Plans and evictions that must not be.
    wrongs: Vec<String>,
    last_version: u64,
    /// The index that sees changes by evictions and nominations at once, as a watch shows them.
    watcher: Option<Shared<Index>>,
}

/// The server; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Api {
    state: Arc<Mutex<State>>,
    /// The process of the leader has ended.
    ended: Arc<Notify>,
}

/// A POST that is under way, until dropped: answered, or given up by the client.
struct Posting(Api);

/// An answer, or a broken connection.
type Reply = Result<Response<Body>, std::io::Error>;

impl State {
    /// The UIDs of the pods in the plans of other pods that the leader has nominated.
    fn planned_for_others(&self, uid: &str) -> Vec<String> {
        let mut planned = Vec::new();
        for pod in self.pods.values() {
            let other = pod["metadata"]["uid"].as_str().unwrap();
            let is_nominated = self.nominated_at.contains_key(other) && pod["spec"]["nodeName"].is_null();
            if other != uid && is_nominated {
                planned.extend(self.plans.get(other).into_iter().flatten().cloned());
            }
        }
        planned
    }

    /// Notes a plan on a node whose plugin is away, one for a pod that another has made room for a short time ago, and one that
    /// takes victims of another one, or more pods of an application than its budget allowed when the index was last shown it.
    fn check_plan(&mut self, pod: &Value, plan: &[String]) {
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        if self
            .away
            .contains(pod["status"]["nominatedNodeName"].as_str().unwrap())
        {
            self.wrongs
                .push(format!("{plan:?} go for {uid} though the plugin is away"));
        }
        if self.evicted_for.get(uid).is_some_and(|at| at.elapsed() < HOLD) {
            self.wrongs
                .push(format!("{plan:?} are in a second plan for {uid}"));
        }
        let planned = self.planned_for_others(uid);
        let shared: Vec<&String> = plan.iter().filter(|uid| planned.contains(uid)).collect();
        if !shared.is_empty() {
            self.wrongs
                .push(format!("{shared:?} are in the plan of another pod"));
        }
        for (app, allowed) in self.shown_budgets.clone() {
            let is_of_app = |victim: &&Value| {
                let is_planned = plan.iter().any(|uid| victim["metadata"]["uid"] == **uid);
                is_planned && victim["metadata"]["labels"]["app"] == *app
            };
            let n_planned = self.pods.values().filter(is_of_app).count();
            if i64::try_from(n_planned).unwrap() > allowed {
                self.wrongs.push(format!(
                    "{plan:?} violate the budget {app}, which allows {allowed}"
                ));
            }
        }
    }
}

impl Api {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// A client of this server.
    pub(crate) fn client(&self) -> kube::Client {
        let api = self.clone();
        kube::Client::new(
            tower::service_fn(move |request| api.clone().answer(request)),
            "default",
        )
    }

    /// Stores a pod.
    pub(crate) fn put(&self, pod: &Value) {
        self.state().pods.insert(path(pod), pod.clone());
    }

    /// Deletes a pod.
    pub(crate) fn remove(&self, pod: &Value) {
        self.state().pods.remove(&path(pod));
    }

    /// The pod as it is stored.
    pub(crate) fn pod(&self, pod: &Value) -> Value {
        self.state().pods[&path(pod)].clone()
    }

    /// The pod as it is stored; `None` if it is gone.
    pub(crate) fn find(&self, pod: &Value) -> Option<Value> {
        self.state().pods.get(&path(pod)).cloned()
    }

    /// All pods. Nominations have their age by the clock of the runtime.
    pub(crate) fn all(&self) -> Vec<Value> {
        let state = self.state();
        let mut pods: Vec<Value> = state.pods.values().cloned().collect();
        for pod in &mut pods {
            let at = state.nominated_at.get(pod["metadata"]["uid"].as_str().unwrap());
            if let Some(at) = at {
                let time = jiff::Timestamp::now() - at.elapsed();
                pod["metadata"]["managedFields"][0]["time"] = time.to_string().into();
            }
        }
        pods
    }

    /// Faults of the next POSTs, in order.
    pub(crate) fn fail_posts(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state().posts.extend(faults);
    }

    /// Faults of the next GETs, in order.
    pub(crate) fn fail_gets(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state().gets.extend(faults);
    }

    /// Every binding that arrived, whatever its outcome.
    pub(crate) fn bindings(&self) -> Vec<Value> {
        self.state().bindings.clone()
    }

    /// Faults of the next applies, in order.
    pub(crate) fn fail_applies(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state().applies.extend(faults);
    }

    /// The path, query and object of every apply, whatever its outcome.
    pub(crate) fn applied(&self) -> Vec<(String, Value)> {
        self.state().applied.clone()
    }

    /// The queries of requests.
    pub(crate) fn queries(&self) -> Vec<String> {
        self.state().queries.clone()
    }

    /// The number of reads of pods.
    pub(crate) fn n_gets(&self) -> usize {
        self.state().n_gets
    }

    /// The most POSTs that were under way at one time.
    pub(crate) fn most_posting(&self) -> usize {
        self.state().most_posting
    }

    /// Adds a user with a token, and the right to get this path, if any.
    pub(crate) fn add_user(&self, token: &str, name: &str, path: Option<&str>) {
        let mut state = self.state();
        state.users.insert(token.to_owned(), name.to_owned());
        state
            .rights
            .extend(path.map(|path| (name.to_owned(), path.to_owned())));
    }

    /// Forgets a token, as when it has ended.
    pub(crate) fn remove_token(&self, token: &str) {
        self.state().users.remove(token);
    }

    /// Faults of the next evictions, in order; dry runs count.
    pub(crate) fn fail_evictions(&self, faults: impl IntoIterator<Item = Option<Fault>>) {
        self.state().evictions.extend(faults);
    }

    /// Faults of the next nominations, in order.
    pub(crate) fn fail_nominations(&self, faults: impl IntoIterator<Item = Option<Fault>>) {
        self.state().nominations.extend(faults);
    }

    /// The names of evicted pods, once for each eviction that was carried out.
    pub(crate) fn evicted(&self) -> Vec<String> {
        let state = self.state();
        let evicted = state.evicted.iter();
        evicted
            .map(|uid| uid.trim_start_matches("uid-").to_owned())
            .collect()
    }

    /// The number of nominations that were asked for, to a node or to none.
    pub(crate) fn n_nominations(&self) -> usize {
        self.state().n_nominations
    }

    /// The number of evictions, dry runs among them, and nominations that were asked for.
    pub(crate) fn n_writes(&self) -> usize {
        self.state().n_writes
    }

    /// Sets the number of further evictions of pods with this label `app`.
    pub(crate) fn set_budget(&self, app: &str, allowed: i64) {
        self.state().budgets.insert(app.to_owned(), allowed);
        self.show_budgets();
    }

    /// Has the index that watches see budgets too.
    pub(crate) fn with_shown_budgets(&self) {
        self.state().shows_budgets = true;
        self.show_budgets();
    }

    /// Shows the budgets to the index that watches, if it sees them.
    pub(crate) fn show_budgets(&self) {
        let mut state = self.state();
        let Some(index) = state.watcher.clone().filter(|_| state.shows_budgets) else {
            return;
        };
        state.shown_budgets = state.budgets.clone();
        let budgets = state.budgets.clone();
        drop(state);
        for (app, allowed) in budgets {
            show_budget(&index, ("app", &app), allowed);
        }
        show_budget(&index, ("tier", SECOND_TIER), 100);
    }

    /// Ends the process of the leader at its write of this number: the write is never answered.
    pub(crate) fn end_after(&self, n_writes: usize, is_carried_out: bool) {
        self.state().ends_after = Some((n_writes, is_carried_out));
    }

    /// Waits until the process of the leader has ended.
    pub(crate) async fn ended(&self) {
        self.ended.notified().await;
    }

    /// Begins a decision: no eviction has been tried for its plan by a dry run.
    pub(crate) fn begin_decision(&self) {
        self.state().tried.clear();
    }

    /// Forgets the plans, as the next leader does.
    pub(crate) fn forget_plans(&self) {
        let mut state = self.state();
        state.plans.clear();
        state.evicted_for.clear();
        state.ends_after = None;
    }

    /// The fault of a write by the leader, whose process may end at it.
    fn fault_of_write(&self, fault: Option<Fault>) -> Option<Fault> {
        let mut state = self.state();
        state.n_writes += 1;
        let Some((n_left, is_carried_out)) = state.ends_after.take() else {
            return fault;
        };
        if n_left > 0 {
            state.ends_after = Some((n_left - 1, is_carried_out));
            return fault;
        }
        self.ended.notify_one();
        Some(if is_carried_out {
            Fault::HangAfterwards
        } else {
            Fault::Hang
        })
    }

    /// The reason, the pod and the message of every event.
    pub(crate) fn events(&self) -> Vec<(String, String, String)> {
        self.state().events.clone()
    }

    /// Evictions that no plan of a more important pod named, or of pods that were leaving already, and plans that violate a
    /// budget or take the victims of another one.
    pub(crate) fn wrongs(&self) -> Vec<String> {
        self.state().wrongs.clone()
    }

    /// The longest time for which a nomination by the leader has held, of pods without a node.
    pub(crate) fn longest_nomination(&self) -> Duration {
        let state = self.state();
        let mut longest = Duration::ZERO;
        for pod in state.pods.values() {
            let at = state.nominated_at.get(pod["metadata"]["uid"].as_str().unwrap());
            if pod["spec"]["nodeName"].is_null()
                && let Some(at) = at
            {
                longest = longest.max(at.elapsed());
            }
        }
        longest
    }

    /// Forgets the faults of requests to come.
    pub(crate) fn heal(&self) {
        let mut state = self.state();
        state.evictions.clear();
        state.nominations.clear();
        state.gets.clear();
        state.ends_after = None;
    }

    /// The names of the pods in the plans of other pods that the leader has nominated.
    pub(crate) fn planned_for_others(&self, pod: &Value) -> Vec<String> {
        let uids = self
            .state()
            .planned_for_others(pod["metadata"]["uid"].as_str().unwrap());
        let names = uids.iter().map(|uid| uid.trim_start_matches("uid-").to_owned());
        names.collect()
    }

    /// The UIDs of the pods in the plans of this leader for pods without a node.
    pub(crate) fn planned(&self) -> BTreeSet<String> {
        let state = self.state();
        let waiting = state
            .pods
            .values()
            .filter(|pod| pod["spec"]["nodeName"].is_null());
        let plans = waiting.filter_map(|pod| state.plans.get(pod["metadata"]["uid"].as_str().unwrap()));
        plans.flatten().cloned().collect()
    }

    /// Notes the nodes that the leader sends no pods to, as their device plugin is away.
    pub(crate) fn set_away(&self, nodes: BTreeSet<String>) {
        self.state().away = nodes;
    }

    /// Returns true if the leader has nominated a pod.
    pub(crate) fn is_nominated_for_room(&self, pod: &Value) -> bool {
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        self.state().nominated_at.contains_key(uid)
    }

    /// Deletes a pod as kube-scheduler does for a more important one: budgets count it.
    pub(crate) fn preempt(&self, name: &str) {
        let mut guard = self.state();
        let state = &mut *guard;
        let uid = format!("uid-{name}");
        let mut pods = state.pods.values_mut();
        let Some(pod) = pods.find(|pod| pod["metadata"]["uid"] == *uid) else {
            return;
        };
        if pod["metadata"].get("deletionTimestamp").is_some() {
            return;
        }
        state.last_version += 1;
        pod["metadata"]["resourceVersion"] = state.last_version.to_string().into();
        pod["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z".into();
        let app = pod["metadata"]["labels"]["app"].as_str().unwrap_or_default();
        if let Some(allowed) = state.budgets.get_mut(app) {
            *allowed = (*allowed - 1).max(0);
        }
        let pod = pod.clone();
        drop(guard);
        self.show(&pod);
        self.show_budgets();
    }

    /// Shows an index the changes that evictions and nominations make, at once; or no longer.
    pub(crate) fn show_to(&self, index: Option<Shared<Index>>) {
        self.state().watcher = index;
    }

    /// Every review of a token or of a right that was asked for.
    pub(crate) fn reviews(&self) -> Vec<Value> {
        self.state().reviews.clone()
    }

    fn posting(&self) -> Posting {
        let mut state = self.state();
        state.n_posting += 1;
        state.most_posting = state.most_posting.max(state.n_posting);
        Posting(self.clone())
    }

    async fn answer(self, request: Request<Body>) -> Reply {
        let (parts, body) = request.into_parts();
        let _posting = (parts.method == Method::POST).then(|| self.posting());
        let body = body.collect().await.unwrap().to_bytes();
        let path = parts.uri.path().to_owned();
        if path.ends_with("reviews") {
            return self.review(&path, serde_json::from_slice(&body).unwrap()).await;
        }
        if path.ends_with("/eviction") {
            let fault = self.state().evictions.pop_front().flatten();
            let fault = self.fault_of_write(fault);
            let is_dry = parts
                .uri
                .query()
                .is_some_and(|query| query.contains("dryRun=All"));
            // The plan is dropped, also if the server has done its part, unless the answer is only slow.
            let is_dropped = is_dry && !matches!(fault, None | Some(Fault::Slow(_)));
            let forget = || {
                if is_dropped {
                    self.state().tried.clear();
                }
            };
            forget();
            let eviction = serde_json::from_slice(&body).unwrap();
            let evict = || {
                let reply = self.evict(&path, &eviction, is_dry);
                forget();
                reply
            };
            return carry_out(fault, evict).await;
        }
        if path.ends_with("/events") {
            let event: Value = serde_json::from_slice(&body).unwrap();
            let text = |pointer: &str| event.pointer(pointer).unwrap().as_str().unwrap().to_owned();
            let words = (text("/reason"), text("/involvedObject/name"), text("/message"));
            self.state().events.push(words);
            return Ok(reply(201, &event));
        }
        if parts.method == Method::PATCH {
            if path.ends_with("/status") {
                let fault = self.state().nominations.pop_front().flatten();
                let fault = self.fault_of_write(fault);
                self.state().n_nominations += 1;
                let plan = std::mem::take(&mut self.state().tried);
                let object = serde_json::from_slice(&body).unwrap();
                return carry_out(fault, || self.apply_nomination(&parts, &object, plan)).await;
            }
            return self.apply(&parts, &body);
        }
        let fault = self.note(&parts.method, &body);
        self.state().queries.extend(parts.uri.query().map(str::to_owned));
        let done = || match parts.method {
            Method::POST => self.bind(&path, &serde_json::from_slice(&body).unwrap()),
            _ => self.get(&path),
        };
        carry_out(fault, done).await
    }

    /// Records a request, and returns its fault.
    fn note(&self, method: &Method, body: &[u8]) -> Option<Fault> {
        let mut state = self.state();
        if method == Method::POST {
            state.bindings.push(serde_json::from_slice(body).unwrap());
            return state.posts.pop_front();
        }
        state.n_gets += 1;
        state.gets.pop_front()
    }

    fn apply(&self, parts: &http::request::Parts, body: &[u8]) -> Reply {
        assert_eq!(
            parts.headers[http::header::CONTENT_TYPE],
            "application/apply-patch+yaml"
        );
        let mut state = self.state();
        let object: Value = serde_json::from_slice(body).unwrap();
        state.applied.push((parts.uri.to_string(), object.clone()));
        match state.applies.pop_front() {
            Some(Fault::Status(status)) => Ok(failure(status, "made to fail")),
            Some(Fault::Break) => Err(std::io::ErrorKind::ConnectionReset.into()),
            _ => Ok(reply(200, &object)),
        }
    }

    async fn review(&self, path: &str, mut review: Value) -> Reply {
        let fault = self.state().posts.pop_front();
        match fault {
            Some(Fault::Status(status)) => return Ok(failure(status, "made to fail")),
            Some(Fault::Hang) => return std::future::pending().await,
            _ => {}
        }
        let mut state = self.state();
        state.reviews.push(review.clone());
        review["status"] = match path {
            "/apis/authentication.k8s.io/v1/tokenreviews" => {
                match state.users.get(review["spec"]["token"].as_str().unwrap()) {
                    Some(name) => {
                        json!({"authenticated": true, "user": {"username": name, "groups": ["g"], "extra": {"e": ["1"]}}})
                    }
                    None => json!({"error": "no such token"}),
                }
            }
            "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
                let wanted = &review["spec"]["nonResourceAttributes"];
                let may = |(name, path): &(String, String)| {
                    review["spec"]["user"] == **name && wanted["path"] == **path
                };
                json!({"allowed": wanted["verb"] == "get" && state.rights.iter().any(may)})
            }
            _ => return Ok(failure(404, "no such review")),
        };
        Ok(reply(201, &review))
    }

    /// Evicts a pod as the Eviction API does: the pod is leaving from then on.
    fn evict(&self, path: &str, eviction: &Value, is_dry: bool) -> Response<Body> {
        let path = path.strip_suffix("/eviction").unwrap();
        let mut guard = self.state();
        let state = &mut *guard;
        let Some(pod) = state.pods.get_mut(path) else {
            return failure(404, "pods not found");
        };
        if pod["metadata"]["uid"] != eviction["deleteOptions"]["preconditions"]["uid"] {
            return failure(409, "Precondition failed: UID in precondition");
        }
        let is_leaving = pod["metadata"].get("deletionTimestamp").is_some();
        let app = pod["metadata"]["labels"]["app"].as_str().unwrap_or_default();
        let is_of_tier = pod["metadata"]["labels"]["tier"] == SECOND_TIER;
        if is_of_tier && state.budgets.contains_key(app) && !is_leaving {
            state.tried.clear();
            if state.shows_budgets {
                state
                    .wrongs
                    .push(format!("{path} is in a plan, and two budgets select it"));
            }
            return failure(
                500,
                "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
            );
        }
        if let Some(allowed) = state.budgets.get_mut(app).filter(|_| !is_leaving) {
            if *allowed <= 0 {
                if is_dry {
                    state.tried.clear();
                }
                return failure(
                    429,
                    "Cannot evict pod as it would violate the pod's disruption budget.",
                );
            }
            *allowed -= i64::from(!is_dry);
        }
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        if is_dry {
            state.tried.push(uid);
        } else {
            state.evicted.push(uid.clone());
            if is_leaving {
                state.wrongs.push(format!("{uid} was leaving"));
            }
            state.last_version += 1;
            pod["metadata"]["resourceVersion"] = state.last_version.to_string().into();
            pod["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z".into();
            let pod = pod.clone();
            let preemptor = state.pods.values().find(|other| {
                let plan = state.plans.get(other["metadata"]["uid"].as_str().unwrap());
                other["status"]["nominatedNodeName"] == pod["spec"]["nodeName"]
                    && other["spec"]["priority"].as_i64() > pod["spec"]["priority"].as_i64()
                    && plan.is_some_and(|plan| plan.contains(&uid))
            });
            if let Some(preemptor) = preemptor {
                let preemptor = preemptor["metadata"]["uid"].as_str().unwrap().to_owned();
                let now = tokio::time::Instant::now();
                state.evicted_for.entry(preemptor).or_insert(now);
            } else {
                state.wrongs.push(format!(
                    "{uid} is in no plan of a nominated pod of higher priority"
                ));
            }
            drop(guard);
            self.show(&pod);
            self.show_budgets();
        }
        reply(201, &json!({"kind": "Status", "status": "Success", "code": 201}))
    }

    /// Applies the nomination in the status of a pod, if the preconditions hold.
    fn apply_nomination(
        &self,
        parts: &http::request::Parts,
        changes: &Value,
        plan: Vec<String>,
    ) -> Response<Body> {
        let path = parts.uri.path().strip_suffix("/status").unwrap();
        let query = parts.uri.query().unwrap_or_default();
        let manager = query
            .split('&')
            .find_map(|part| part.strip_prefix("fieldManager="));
        let mut guard = self.state();
        let state = &mut *guard;
        let Some(pod) = state.pods.get_mut(path) else {
            return failure(404, "pods not found");
        };
        if pod["metadata"]["uid"] != changes["metadata"]["uid"] {
            return failure(422, "metadata.uid: field is immutable");
        }
        if pod["metadata"]["resourceVersion"] != changes["metadata"]["resourceVersion"] {
            return failure(409, "the object has been modified");
        }
        let node = &changes["status"]["nominatedNodeName"];
        nominate(pod, node, manager.unwrap());
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        if node.is_null() {
            state.nominated_at.remove(&uid);
        } else {
            // A plan whose nomination was lost is nominated again.
            if !plan.is_empty() {
                let pod = pod.clone();
                state.check_plan(&pod, &plan);
                state.plans.insert(uid.clone(), plan);
            }
            state.nominated_at.insert(uid, tokio::time::Instant::now());
        }
        state.last_version += 1;
        let version = state.last_version.to_string();
        let pod = state.pods.get_mut(path).unwrap();
        pod["metadata"]["resourceVersion"] = version.into();
        let pod = pod.clone();
        drop(guard);
        self.show(&pod);
        reply(200, &pod)
    }

    /// Nominates a pod as kube-scheduler does, whatever its version is.
    pub(crate) fn nominate(&self, pod: &Value, node: &Value) {
        let mut guard = self.state();
        let state = &mut *guard;
        state.last_version += 1;
        let pod = state.pods.get_mut(&path(pod)).unwrap();
        nominate(pod, node, "kube-scheduler");
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        state.nominated_at.remove(&uid);
        state.evicted_for.remove(&uid);
        pod["metadata"]["resourceVersion"] = state.last_version.to_string().into();
        let pod = pod.clone();
        drop(guard);
        self.show(&pod);
    }

    /// Shows a pod to the index that watches.
    fn show(&self, pod: &Value) {
        let watcher = self.state().watcher.clone();
        if let Some(index) = watcher {
            let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
            index.write().apply(pod);
        }
    }

    fn bind(&self, path: &str, binding: &Value) -> Response<Body> {
        let path = path.strip_suffix("/binding").unwrap();
        let mut state = self.state();
        let Some(pod) = state.pods.get_mut(path) else {
            return failure(404, "pods not found");
        };
        if pod["metadata"]["uid"] != binding["metadata"]["uid"] {
            return failure(409, "Precondition failed: UID in precondition");
        }
        if let Some(node) = pod["spec"]["nodeName"].as_str() {
            let message = format!("pod is already assigned to node {node:?}");
            return failure(409, &message);
        }
        for (key, value) in binding["metadata"]["annotations"].as_object().unwrap() {
            pod["metadata"]["annotations"][key] = value.clone();
        }
        pod["spec"]["nodeName"] = binding["target"]["name"].clone();
        reply(201, &json!({"kind": "Status", "status": "Success", "code": 201}))
    }

    fn get(&self, path: &str) -> Response<Body> {
        match self.state().pods.get(path) {
            Some(pod) => reply(200, pod),
            None => failure(404, "pods not found"),
        }
    }
}

impl Drop for Posting {
    fn drop(&mut self) {
        self.0.state().n_posting -= 1;
    }
}

/// Answers a request with its fault.
async fn carry_out(fault: Option<Fault>, done: impl FnOnce() -> Response<Body>) -> Reply {
    match fault {
        None => Ok(done()),
        Some(Fault::Status(status)) => Ok(failure(status, "made to fail")),
        Some(Fault::StatusAfterwards(status)) => {
            done();
            Ok(failure(status, "made to fail afterwards"))
        }
        Some(Fault::Busy(seconds)) => {
            let mut reply = failure(429, "too many requests");
            reply.headers_mut().insert("retry-after", seconds.into());
            Ok(reply)
        }
        Some(Fault::Hang) => std::future::pending().await,
        Some(Fault::HangAfterwards) => {
            done();
            std::future::pending().await
        }
        Some(Fault::Break) => Err(std::io::ErrorKind::ConnectionReset.into()),
        Some(Fault::BreakAfterwards) => {
            done();
            Err(std::io::ErrorKind::ConnectionReset.into())
        }
        Some(Fault::Slow(time)) => {
            tokio::time::sleep(time).await;
            Ok(done())
        }
    }
}

/// Sets the node that a pod is nominated to, with the manager of the field.
fn nominate(pod: &mut Value, node: &Value, manager: &str) {
    pod["status"]["nominatedNodeName"] = node.clone();
    let fields = json!({"f:status": {"f:nominatedNodeName": {}}});
    let entry = json!({"manager": manager, "operation": "Update", "subresource": "status", "fieldsType": "FieldsV1", "fieldsV1": fields});
    pod["metadata"]["managedFields"] = if node.is_null() { json!([]) } else { json!([entry]) };
}

fn path(pod: &Value) -> String {
    let (namespace, name) = (&pod["metadata"]["namespace"], &pod["metadata"]["name"]);
    format!(
        "/api/v1/namespaces/{}/pods/{}",
        namespace.as_str().unwrap(),
        name.as_str().unwrap()
    )
}

fn failure(status: u16, message: &str) -> Response<Body> {
    reply(
        status,
        &json!({"kind": "Status", "status": "Failure", "message": message, "code": status}),
    )
}

fn reply(status: u16, body: &Value) -> Response<Body> {
    Response::builder()
        .status(status)
        .body(Body::from(body.to_string().into_bytes()))
        .unwrap()
}

/// Shows an index the number of further evictions of pods with this label.
pub(crate) fn show_budget(index: &Shared<Index>, (label, value): (&str, &str), allowed: i64) {
    let spec = json!({"selector": {"matchLabels": {label: value}}});
    let status =
        json!({"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1});
    let budget = json!({"metadata": {"name": value, "namespace": "default"}, "spec": spec, "status": status});
    let budget: PodDisruptionBudget = serde_json::from_value(budget).unwrap();
    index.write().apply(budget);
}
