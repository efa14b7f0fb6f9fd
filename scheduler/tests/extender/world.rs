//! An extender with its routes, and an index that the tests fill as watches would.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use daemon::metrics_text::MetricsText;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use placement::Policies;
use prometheus_client::registry::Registry;
use proto::node::Node;
use proto::pod::Pod;
use proto::pod_group::{PodGroup, PodGroupApi};
use proto::request::hints::DemandedEnforcement;
use proto::resource::ResourceNames;
use scheduler::bind::Binder;
use scheduler::config::{MisfitNodes, Serving};
use scheduler::extender::{Extender, health_router, router};
use scheduler::index::{HintTimes, Index, RawDevice, Shared};
use scheduler::leader::Leadership;
use scheduler::metrics::Metrics;
use scheduler::watch::ObjectStore;
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::api::Api;
use crate::objects::{device, node};

/// The lifetime of a hint.
pub(crate) const HINT: Duration = Duration::from_secs(30);

/// The extender under test and its surroundings.
pub(crate) struct World {
    pub(crate) api: Api,
    pub(crate) index: Shared<Index>,
    pub(crate) router: Router,
    pub(crate) health: Router,
    pub(crate) extender: Arc<Extender>,
}

impl World {
    /// Nothing has been listed yet.
    pub(crate) fn unsynced(serving: &Serving) -> Self {
        Self::with_leadership(serving, Leadership::alone())
    }

    /// Nothing has been listed yet, and other replicas may lead.
    pub(crate) fn with_leadership(serving: &Serving, leadership: Leadership) -> Self {
        Self::configured(serving, leadership, |_| ())
    }

    /// An empty cluster, all listed, and this number of nodes in the results of `filter`.
    pub(crate) fn with_answer_nodes(answers: &str) -> Self {
        Self::configured(&Serving::default(), Leadership::alone(), |extender| {
            extender.answer_nodes = answers.parse().unwrap();
        })
        .listed()
    }

    /// An empty cluster, all listed, and this form of nodes without room in the results of `filter`.
    pub(crate) fn with_misfit_nodes(misfits: MisfitNodes) -> Self {
        Self::configured(&Serving::default(), Leadership::alone(), |extender| {
            extender.misfit_nodes = misfits;
        })
        .listed()
    }

    /// An empty cluster, all listed, whose filters note the pods for which room may be made.
    pub(crate) fn making_room() -> Self {
        Self::making_room_by(true)
    }

    /// As [`Self::making_room`]; `evicts` is false if the leader only reports which pods could be evicted.
    pub(crate) fn making_room_by(evicts: bool) -> Self {
        let world = Self::making_room_before_budgets_by(evicts);
        world.list::<PodDisruptionBudget>(&[]);
        world
    }

    /// As [`Self::making_room`], before the first list of budgets.
    pub(crate) fn making_room_before_budgets() -> Self {
        Self::making_room_before_budgets_by(true)
    }

    fn making_room_before_budgets_by(evicts: bool) -> Self {
        let making_room = |extender: &mut Extender| extender.evicts_for_room = Some(evicts);
        Self::configured(&Serving::default(), Leadership::alone(), making_room).listed()
    }

    fn configured(serving: &Serving, leadership: Leadership, configure: impl FnOnce(&mut Extender)) -> Self {
        let api = Api::default();
        let index = Shared::new(Index::new(ResourceNames::default(), Policies::default(), HINT));
        let mut registry = Registry::with_prefix("gpushare_scheduler");
        let metrics = Metrics::register(&mut registry, index.clone(), &leadership);
        let binder = Binder::new(api.client(), Duration::from_secs(4), leadership);
        let mut extender =
            Extender::new(index.clone(), metrics, binder, serving).with_token_reviews(api.client());
        configure(&mut extender);
        let extender = Arc::new(extender);
        let text = MetricsText::new(registry);
        let router = router(Arc::clone(&extender), text.clone());
        let health = health_router(Arc::clone(&extender), text);
        Self {
            api,
            index,
            router,
            health,
            extender,
        }
    }

    /// An empty cluster, all listed.
    pub(crate) fn new() -> Self {
        Self::unsynced(&Serving::default()).listed()
    }

    /// An empty cluster, all listed, in which pods may see all devices of their node.
    pub(crate) fn allowing_all_devices() -> Self {
        let world = Self::unsynced(&Serving::default());
        let empty = Index::new(ResourceNames::default(), Policies::default(), HINT);
        *world.index.write() = empty.allowing_all_devices(true);
        world.listed()
    }

    /// An empty cluster, all listed, in which pods demand limits that the driver enforces.
    pub(crate) fn demanding_limits() -> Self {
        let world = Self::unsynced(&Serving::default());
        let empty = Index::new(ResourceNames::default(), Policies::default(), HINT);
        *world.index.write() = empty.demanding(DemandedEnforcement::Driver);
        world.listed()
    }

    /// An empty cluster, all listed, with these lifetimes of hints.
    pub(crate) fn with_hint_times(times: HintTimes) -> Self {
        let world = Self::unsynced(&Serving::default());
        let empty = Index::new(ResourceNames::default(), Policies::default(), HINT);
        *world.index.write() = empty.with_hint_times(times);
        world.listed()
    }

    /// An empty cluster, all listed, with this limit of bindings under way.
    pub(crate) fn with_bind_concurrency(most: usize) -> Self {
        let serving = Serving {
            bind_concurrency: most,
            ..Serving::default()
        };
        Self::unsynced(&serving).listed()
    }

    fn listed(self) -> Self {
        self.list::<Node>(&[]);
        self.list::<RawDevice>(&[]);
        self.list::<Pod>(&[]);
        self
    }

    /// A node whose memory unit is MiB, with GPUs of these sizes.
    pub(crate) fn with_node(self, name: &str, mibs: &[u64]) -> Self {
        self.apply_node(&node(name, "MiB"));
        self.apply_device(&device(name, mibs));
        self
    }

    /// A pod, in the API server and in the watch.
    pub(crate) fn with_pod(self, pod: &Value) -> Self {
        self.api.put(pod);
        self.apply_pod(pod);
        self
    }

    pub(crate) fn apply_node(&self, node: &Value) {
        self.index
            .write()
            .apply(serde_json::from_value::<Node>(node.clone()).unwrap());
        self.check();
    }

    pub(crate) fn apply_device(&self, device: &Value) {
        self.index
            .write()
            .apply(serde_json::from_value::<RawDevice>(device.clone()).unwrap());
        self.check();
    }

    pub(crate) fn apply_pod(&self, pod: &Value) {
        self.index
            .write()
            .apply(serde_json::from_value::<Pod>(pod.clone()).unwrap());
        self.check();
    }

    /// Shows a `PodGroup` of Kubernetes.
    pub(crate) fn apply_pod_group(&self, group: &Value) {
        let group: PodGroup = serde_json::from_value(group.clone()).unwrap();
        let mut index = self.index.write();
        index.pod_groups_mut(PodGroupApi::V1Beta1).apply(group);
    }

    pub(crate) fn delete_pod(&self, pod: &Value) {
        self.index
            .write()
            .delete(&serde_json::from_value::<Pod>(pod.clone()).unwrap());
        self.check();
    }

    pub(crate) fn delete_node(&self, node: &Value) {
        self.index
            .write()
            .delete(&serde_json::from_value::<Node>(node.clone()).unwrap());
        self.check();
    }

    /// A complete list of one kind.
    pub(crate) fn list<K: serde::de::DeserializeOwned>(&self, objects: &[Value])
    where
        Index: ObjectStore<K>,
    {
        let mut index = self.index.write();
        ObjectStore::<K>::begin_list(&mut *index);
        for object in objects {
            index.apply(serde_json::from_value::<K>(object.clone()).unwrap());
        }
        ObjectStore::<K>::end_list(&mut *index);
        drop(index);
        self.check();
    }

    /// The watch shows the pod as the API server has it now.
    pub(crate) fn see(&self, pod: &Value) {
        self.apply_pod(&self.api.pod(pod));
    }

    /// Asserts that every invariant of the engine holds.
    pub(crate) fn check(&self) {
        let violations = self.index.read().fleet().check();
        assert!(violations.is_empty(), "{violations:?}");
    }

    /// One request over the routes.
    pub(crate) async fn send(&self, method: &str, path: &str, body: impl Into<Body>) -> (StatusCode, String) {
        self.send_to(&self.router, method, path, body).await
    }

    /// One request over these routes.
    pub(crate) async fn send_to(
        &self,
        router: &Router,
        method: &str,
        path: &str,
        body: impl Into<Body>,
    ) -> (StatusCode, String) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("Content-Type", "application/json")
            .body(body.into())
            .unwrap();
        let reply = router.clone().oneshot(request).await.unwrap();
        let status = reply.status();
        let body = reply.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn verb(&self, verb: &str, body: impl ToString) -> Value {
        let (status, text) = self
            .send("POST", &format!("/gpushare-scheduler/{verb}"), body.to_string())
            .await;
        self.check();
        assert_eq!(status, StatusCode::OK, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// `filter` by names.
    pub(crate) async fn filter(&self, pod: &Value, names: &[&str]) -> Value {
        // In the order in which kube-scheduler writes the fields.
        self.verb(
            "filter",
            format!(
                r#"{{"Pod":{pod},"Nodes":null,"NodeNames":{}}}"#,
                Value::from(names)
            ),
        )
        .await
    }

    /// The names that `filter` returns.
    pub(crate) async fn fitting(&self, pod: &Value, names: &[&str]) -> Vec<String> {
        serde_json::from_value(self.filter(pod, names).await["NodeNames"].clone()).unwrap()
    }

    /// `filter` by whole nodes.
    pub(crate) async fn filter_whole(&self, pod: &Value, nodes: &[Value]) -> Value {
        self.verb(
            "filter",
            json!({"Pod": pod, "Nodes": {"metadata": {}, "items": nodes}, "NodeNames": null}),
        )
        .await
    }

    /// `prioritize` by names.
    pub(crate) async fn prioritize(&self, pod: &Value, names: &[&str]) -> Value {
        self.verb(
            "prioritize",
            format!(
                r#"{{"Pod":{pod},"Nodes":null,"NodeNames":{}}}"#,
                Value::from(names)
            ),
        )
        .await
    }

    /// `bind`, and its error text.
    pub(crate) async fn bind(&self, pod: &Value, node: &str) -> String {
        let meta = &pod["metadata"];
        let args = json!({"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": node});
        self.verb("bind", args).await["Error"]
            .as_str()
            .unwrap()
            .to_owned()
    }

    /// Binds a pod, and has the watch show the binding.
    pub(crate) async fn place(&self, pod: &Value, node: &str) {
        self.api.put(pod);
        self.apply_pod(pod);
        assert_eq!(self.bind(pod, node).await, "");
        self.see(pod);
    }

    /// `inspect` of one node, or of all.
    pub(crate) async fn inspect(&self, node: Option<&str>) -> Value {
        let path = node.map(|node| format!("/{node}")).unwrap_or_default();
        let (status, text) = self
            .send(
                "GET",
                &format!("/gpushare-scheduler/inspect{path}"),
                Body::empty(),
            )
            .await;
        assert_eq!(status, StatusCode::OK, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// The used units of each GPU of a node.
    pub(crate) async fn used(&self, node: &str) -> Vec<u64> {
        let devs = self.inspect(Some(node)).await["nodes"][0]["devs"].clone();
        devs.as_array()
            .unwrap()
            .iter()
            .map(|dev| dev["usedGPU"].as_u64().unwrap())
            .collect()
    }
}
