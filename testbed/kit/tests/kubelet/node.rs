//! A node under test: an API server, a kubelet, and pods made of a few words.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kit::apiserver::ApiServer;
use kit::kubelet::{Kubelet, KubeletConfig};
use kube::api::PostParams;
use kube::runtime::wait::await_condition;
use kube::{Api, Client};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::plugin::{Plugin, SLOTS, Script};

const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) struct Node {
    pub(crate) kubelet: Kubelet,
    pods: Api<Pod>,
    /// Both end when they are dropped.
    _ends: (TempDir, ApiServer),
}

impl Node {
    pub(crate) async fn start() -> Self {
        let api = ApiServer::start().await.unwrap();
        let client = Client::try_from(kube::Config::new(api.url().parse().unwrap())).unwrap();
        let dir = TempDir::new().unwrap();
        let mut config = KubeletConfig::new("n1", dir.path(), client.clone());
        config.delays.start_retry = Duration::from_millis(20);
        config.delays.api_retry = Duration::from_millis(50);
        let node = Self {
            kubelet: Kubelet::start(config).unwrap(),
            pods: Api::namespaced(client, "default"),
            _ends: (dir, api),
        };
        node.until(Kubelet::has_synced).await;
        node
    }

    /// Starts a plugin and waits until kubelet has its devices.
    pub(crate) async fn plugin(&self, script: Script) -> Plugin {
        let n_devices = script.n_devices;
        let plugin = Plugin::serve(self.kubelet.config(), "first.sock", script);
        plugin.register(self.kubelet.config()).await;
        self.until_slots((n_devices, n_devices)).await;
        plugin
    }

    pub(crate) async fn until(&self, condition: impl FnMut(&Kubelet) -> bool) {
        assert!(
            self.kubelet.until(DEADLINE, condition).await,
            "the condition did not come true"
        );
    }

    /// Waits until kubelet counts so many devices of [`SLOTS`], and so many healthy ones.
    pub(crate) async fn until_slots(&self, counts: (usize, usize)) {
        self.until(|kubelet| kubelet.capacity().get(SLOTS) == Some(&counts))
            .await;
    }

    pub(crate) async fn create(&self, pod: Value) -> Pod {
        let pod = serde_json::from_value(pod).unwrap();
        self.pods.create(&PostParams::default(), &pod).await.unwrap()
    }

    /// Creates a pod and waits until all its app containers have started.
    pub(crate) async fn run(&self, pod: Value) -> Pod {
        let created = self.create(pod).await;
        self.in_phase(&created.metadata.name.unwrap(), "Running").await
    }

    pub(crate) async fn in_phase(&self, name: &str, phase: &str) -> Pod {
        let is = |pod: Option<&Pod>| pod.and_then(|pod| pod.status.as_ref()?.phase.as_deref()) == Some(phase);
        let reached = await_condition(self.pods.clone(), name, is);
        let reached = tokio::time::timeout(DEADLINE, reached).await;
        let pod = reached.unwrap_or_else(|_| panic!("pod {name} is not {phase}"));
        pod.unwrap().unwrap()
    }

    /// Waits until kubelet fails a pod at its admission, and returns kubelet's message.
    pub(crate) async fn refusal(&self, name: &str) -> String {
        let status = self.in_phase(name, "Failed").await.status.unwrap();
        assert_eq!(status.reason.as_deref(), Some("UnexpectedAdmissionError"));
        status.message.unwrap()
    }
}

/// A pod whose containers ask for some slots each.
pub(crate) fn pod(name: &str, init: &[(&str, usize)], app: &[(&str, usize)]) -> Value {
    let containers = |containers: &[(&str, usize)]| -> Vec<Value> {
        let container = |(name, n_slots): &(&str, usize)| {
            let amounts = json!({SLOTS: n_slots.to_string()});
            json!({"name": name, "image": "work", "resources": {"limits": amounts, "requests": amounts}})
        };
        containers.iter().map(container).collect()
    };
    let spec = json!({"nodeName": "n1", "initContainers": containers(init), "containers": containers(app)});
    json!({"metadata": {"name": name, "namespace": "default"}, "spec": spec})
}
