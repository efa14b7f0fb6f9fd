//! A cluster as objects, and the programs that look at it: the index with its extender, and kube-scheduler's model.

use std::fmt;
use std::sync::Arc;

use kit::kube_scheduler::{OfflineAttempt, OfflineScheduler, SchedulerConfiguration, Ties};
use rand::SeedableRng;
use rand::rngs::StdRng;
use scheduler::bind::PodId;
use scheduler::config::AnswerNodes;
use scheduler::extender::Extender;
use scheduler::index::{Index, Shared};
use scheduler::offline;
use scheduler::watch::ObjectStore;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::generator;

/// The configuration that the documentation recommends.
const CONFIGURATION: &str =
    include_str!("../../../deploy/components/second-scheduler/kube-scheduler-config.yaml");

/// The `schedulerName` of the pods that are tried.
pub(crate) const OURS: &str = "gpushare-scheduler";

/// A cluster as JSON: lists of objects, so that objects and fields can be taken out one by one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    /// `nodes`, `devices` and `pods`; pods without a node whose scheduler is [`OURS`] are tried.
    pub(crate) objects: Value,
    /// The number of copies of each tried pod that `fits` is asked about.
    pub(crate) replicas: u32,
}

impl Case {
    /// The cluster of this seed. `is_real`: the API server accepts all of its objects.
    pub(crate) fn random(seed: u64, is_real: bool) -> Self {
        generator::case(&mut StdRng::seed_from_u64(seed), is_real)
    }

    /// The objects of one kind.
    pub(crate) fn list(&self, kind: &str) -> &[Value] {
        self.objects[kind]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default()
    }

    /// The pods that are tried.
    pub(crate) fn tried(&self) -> Vec<Value> {
        let is_tried = |pod: &&Value| {
            pod["spec"]["nodeName"].is_null()
                && pod["spec"]["schedulerName"] == OURS
                && !["Succeeded", "Failed"].contains(&pod["status"]["phase"].as_str().unwrap_or_default())
        };
        self.list("pods").iter().filter(is_tried).cloned().collect()
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} replicas", self.replicas)?;
        for kind in ["nodes", "devices", "pods"] {
            for object in self.list(kind) {
                writeln!(f, "{kind} {object}")?;
            }
        }
        Ok(())
    }
}

/// Name and namespace of an object.
pub(crate) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

pub(crate) fn namespace(object: &Value) -> &str {
    object["metadata"]["namespace"].as_str().unwrap_or("default")
}

/// The object in one of the programs' types; they skip objects that they cannot read, as a watch does.
pub(crate) fn typed<T: DeserializeOwned>(object: &Value) -> Option<T> {
    serde_json::from_value(object.clone()).ok()
}

/// The programs that look at one cluster.
pub(crate) struct World {
    pub(crate) extender: Arc<Extender>,
    model: OfflineScheduler,
    /// Assume times, which grow with each bind.
    nanos: u64,
}

impl World {
    /// The programs after they have seen all objects.
    pub(crate) fn of(case: &Case) -> Self {
        let [nodes, devices, pods] = ["nodes", "devices", "pods"].map(|kind| case.list(kind));
        let [node_objects, device_objects, pod_objects] =
            [nodes, devices, pods].map(|list| list.iter().cloned());
        let mut extender = offline::extender(offline::index(node_objects, device_objects, pod_objects));
        // kube-scheduler's choice among several nodes is not the matter: all that fit have to be seen.
        extender.answer_nodes = AnswerNodes::All;
        let extender = Arc::new(extender);
        let configuration = CONFIGURATION.parse::<SchedulerConfiguration>().unwrap();
        let mut model = OfflineScheduler::new(&configuration, &offline::routes(&extender), Ties::default());
        for node in nodes {
            model.put_node(typed(node).unwrap());
        }
        for pod in pods {
            model.put_pod(&typed(pod).unwrap());
        }
        Self {
            extender,
            model,
            nanos: 1_700_000_000_000_000_000,
        }
    }

    pub(crate) fn index(&self) -> &Shared<Index> {
        self.extender.index()
    }

    /// kube-scheduler's attempt to place a pod.
    pub(crate) async fn attempt(&mut self, pod: &Value) -> Result<OfflineAttempt, String> {
        let pod = typed(pod).ok_or("kube-scheduler cannot read the pod")?;
        self.model.attempt(&pod).await
    }

    /// Shows a pod to both programs.
    pub(crate) fn show(&mut self, pod: &Value) {
        if let Some(pod) = typed::<proto::pod::Pod>(pod) {
            self.index().write().apply(pod);
        }
        if let Some(pod) = typed(pod) {
            self.model.put_pod(&pod);
        }
    }

    /// Binds a pod by the extender, and shows it to both programs as bound.
    pub(crate) fn bind(&mut self, pod: &Value, node: &str) -> Result<Value, String> {
        let id = PodId {
            namespace: namespace(pod).to_owned(),
            name: name(pod).to_owned(),
            uid: pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned(),
        };
        self.nanos += 1;
        let now = tokio::time::Instant::now().into_std();
        let binding = offline::bind(&self.extender, &id, node, self.nanos, now);
        let binding = binding.map_err(|error| error.to_string())?;
        let mut bound = pod.clone();
        bound["spec"]["nodeName"] = node.into();
        for (field, added) in [("annotations", &binding.annotations), ("labels", &binding.labels)] {
            for (key, value) in added {
                bound["metadata"][field][key] = json!(value);
            }
        }
        self.show(&bound);
        Ok(bound)
    }
}
