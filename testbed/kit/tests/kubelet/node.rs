//! A node under test: an API server, a kubelet, and pods made of a few words.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Node as NodeObject, Pod};
use kit::apiserver::{ApiServer, ApiServerConfig};
use kit::kubelet::{Kubelet, KubeletConfig};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::plugin::{Plugin, Script};

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) struct Node {
    pub(crate) kubelet: Kubelet,
    pub(crate) client: Client,
    pub(crate) logs: Arc<Mutex<Vec<(String, String)>>>,
    pub(crate) dir: TempDir,
    /// Ends when it is dropped.
    pub(crate) api: ApiServer,
}

impl Node {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut KubeletConfig)) -> Self {
        let api = ApiServer::start(ApiServerConfig::loopback()).await.unwrap();
        let client = Client::try_from(kube::Config::new(api.url().parse().unwrap())).unwrap();
        let dir = TempDir::new().unwrap();
        let logs: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
        let sink = Arc::clone(&logs);
        let mut config = KubeletConfig::new("n1", dir.path(), client.clone());
        config.log = Arc::new(move |_, pod, container, text| {
            sink.lock().unwrap().push((format!("{pod}/{container}"), text));
        });
        config.delays.start_retry = Duration::from_millis(20);
        config.delays.api_retry = Duration::from_millis(50);
        change(&mut config);
        let kubelet = Kubelet::start(config).unwrap();
        let node = Self {
            kubelet,
            client,
            logs,
            dir,
            api,
        };
        node.until(Kubelet::has_synced).await;
        node
    }

    /// Starts a plugin and waits until kubelet has its devices.
    pub(crate) async fn plugin(&self, script: Script) -> Plugin {
        let resource = script.resource;
        let n_devices = script.devices.len();
        let plugin = Plugin::start(self.kubelet.config(), script).await;
        self.until(|kubelet| {
            kubelet
                .capacity()
                .get(resource)
                .is_some_and(|(all, _)| *all == n_devices)
        })
        .await;
        plugin
    }

    pub(crate) async fn until(&self, condition: impl FnMut(&Kubelet) -> bool) {
        assert!(
            self.kubelet.until(DEADLINE, condition).await,
            "the condition did not come true: {:#?}",
            self.kubelet.admissions()
        );
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    pub(crate) fn nodes(&self) -> Api<NodeObject> {
        Api::all(self.client.clone())
    }

    pub(crate) async fn create(&self, pod: Value) -> Pod {
        self.pods()
            .create(&PostParams::default(), &serde_json::from_value(pod).unwrap())
            .await
            .unwrap()
    }

    /// Creates a pod and waits until all its app containers have started.
    pub(crate) async fn run(&self, pod: Value) -> Pod {
        let created = self.create(pod).await;
        self.in_phase(&created.metadata.name.unwrap(), "Running").await
    }

    pub(crate) async fn in_phase(&self, name: &str, phase: &'static str) -> Pod {
        self.when(name, move |pod| {
            pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some(phase)
        })
        .await
    }

    pub(crate) async fn when(&self, name: &str, condition: impl Fn(&Pod) -> bool + Send + Sync) -> Pod {
        let reached = await_condition(self.pods(), name, |pod: Option<&Pod>| pod.is_some_and(&condition));
        let reached = tokio::time::timeout(DEADLINE, reached).await;
        let Ok(pod) = reached else {
            panic!(
                "pod {name} is not as expected: {:#?}",
                self.pods().get(name).await.map(|pod| pod.status)
            );
        };
        pod.unwrap().unwrap()
    }

    pub(crate) async fn when_gone(&self, name: &str) {
        let gone = await_condition(self.pods(), name, |pod: Option<&Pod>| pod.is_none());
        tokio::time::timeout(DEADLINE, gone)
            .await
            .expect("the pod is gone in time")
            .unwrap();
    }

    pub(crate) async fn delete(&self, name: &str) {
        self.pods().delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// Waits until node status lists this capacity and allocatable of a resource.
    pub(crate) async fn node_lists(&self, resource: &str, capacity: &str, allocatable: &str) {
        let amount = |list: Option<&std::collections::BTreeMap<String, _>>| -> Option<String> {
            let quantity: &k8s_openapi::apimachinery::pkg::api::resource::Quantity = list?.get(resource)?;
            Some(quantity.0.clone())
        };
        let listed = await_condition(self.nodes(), "n1", |node: Option<&NodeObject>| {
            let status = node.and_then(|node| node.status.as_ref());
            amount(status.and_then(|status| status.capacity.as_ref())).as_deref() == Some(capacity)
                && amount(status.and_then(|status| status.allocatable.as_ref())).as_deref()
                    == Some(allocatable)
        });
        let in_time = tokio::time::timeout(DEADLINE, listed).await.is_ok();
        assert!(
            in_time,
            "{resource} is not {capacity}/{allocatable}: {:#?}",
            self.nodes().get("n1").await.unwrap().status
        );
    }

    pub(crate) async fn patch_node_status(&self, status: Value) {
        let patch = Patch::Merge(json!({"status": status}));
        self.nodes()
            .patch_status("n1", &PatchParams::default(), &patch)
            .await
            .unwrap();
    }

    pub(crate) async fn events(&self) -> Vec<Event> {
        Api::<Event>::namespaced(self.client.clone(), "default")
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
    }

    /// The environment of a running container.
    pub(crate) fn env(&self, pod: &str, container: &str) -> std::collections::BTreeMap<String, String> {
        self.kubelet.container("default", pod, container).unwrap().env
    }

    /// The devices of [`SLOTS`](crate::plugin::SLOTS) that a container holds.
    pub(crate) fn slots(&self, pod: &Pod, container: &str) -> Vec<String> {
        let uid = pod.metadata.uid.as_deref().unwrap();
        let held = self
            .kubelet
            .allocations()
            .into_iter()
            .find(|held| held.pod_uid == uid && held.container == container);
        held.map(|held| held.device_ids).unwrap_or_default()
    }
}

pub(crate) fn pod(name: &str, spec: Value) -> Value {
    let mut spec = spec;
    spec["nodeName"] = "n1".into();
    json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec})
}

/// A container that asks for these amounts.
pub(crate) fn container(name: &str, limits: &[(&str, &str)]) -> Value {
    let limits: serde_json::Map<String, Value> = limits
        .iter()
        .map(|(name, amount)| ((*name).to_owned(), (*amount).into()))
        .collect();
    json!({"name": name, "image": "work", "resources": {"limits": limits, "requests": limits}})
}

/// A pod of one container `main` that asks for some slots.
pub(crate) fn slot_pod(name: &str, n_slots: usize) -> Value {
    pod(
        name,
        json!({"containers": [container("main", &[(crate::plugin::SLOTS, &n_slots.to_string())])]}),
    )
}

/// Why a pod is Failed.
pub(crate) fn refusal(pod: &Pod) -> (String, String) {
    let status = pod.status.clone().unwrap();
    (
        status.reason.unwrap_or_default(),
        status.message.unwrap_or_default(),
    )
}
