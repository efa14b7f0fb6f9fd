//! The same question to a real kube-scheduler, by hand: docs/real-cluster.md says how its programs are started.
//!
//! Each pod is created with a scheduling gate, `explain` is asked, and the gate is taken away. kube-scheduler then binds the pod
//! to a node that fits by `explain`, or its condition counts the same nodes under the same reasons. The testbed's model of
//! kube-scheduler is asked about the same objects, so that its mistakes show too.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kit::cluster::client_of;
use kit::http_client::HttpClient;
use kit::kube_scheduler::no_fit_message;
use kit::pod_fields::{condition, node_of};
use kit::polling::until;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, Error, ResourceExt};
use proto::read_api::{Explanation, VERSION};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::cluster::{Case, World, name, namespace};
use super::setting;

/// The number of clusters without `VERDICT_CASES`.
const CASES: u64 = 200;
/// The namespaces of the generated pods.
const NAMESPACES: [&str; 2] = ["default", "team-a"];
/// The time that a program has to see or do something.
const PATIENCE: Duration = Duration::from_secs(20);
/// kube-scheduler's watches of nodes and pods are apart, so that it may see a pod before the nodes of the same cluster.
const SETTLING: Duration = Duration::from_millis(300);

/// The programs of a real cluster.
struct RealCluster {
    client: Client,
    nodes: Api<Node>,
    devices: Api<DynamicObject>,
    http: HttpClient,
    /// The URL of the scheduler's read API.
    read_api: String,
}

/// The end of kube-scheduler's attempt to place a pod.
enum Outcome {
    Bound(String),
    /// The message of the condition `PodScheduled`.
    Refused(String),
}

/// The numbers of answers that were compared, and the differences.
#[derive(Debug, Default)]
struct Findings {
    pods: u64,
    bound: u64,
    refused: u64,
    differences: Vec<String>,
}

impl RealCluster {
    async fn open() -> Self {
        let kubeconfig = std::env::var_os("KUBECONFIG").expect("KUBECONFIG names the cluster");
        let client = client_of(kubeconfig.as_ref()).await.unwrap();
        let device = GroupVersionKind::gvk("scheduling.koordinator.sh", "v1alpha1", "Device");
        let cluster = Self {
            nodes: Api::all(client.clone()),
            devices: Api::all_with(
                client.clone(),
                &ApiResource::from_gvk_with_plural(&device, "devices"),
            ),
            http: HttpClient::new(),
            read_api: std::env::var("READ_API").unwrap_or_else(|_| "http://127.0.0.1:12346".to_owned()),
            client,
        };
        for namespace in NAMESPACES {
            let object = json!({"metadata": {"name": namespace}});
            create_if_absent(&Api::<Namespace>::all(cluster.client.clone()), &object).await;
        }
        cluster
    }

    fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Deletes all nodes, Device objects and pods.
    async fn clear(&self) {
        for namespace in NAMESPACES {
            delete_all(&self.pods(namespace)).await;
        }
        delete_all(&self.nodes).await;
        delete_all(&self.devices).await;
    }

    /// Creates the objects of a case, except the pods that are tried.
    async fn create(&self, case: &Case) {
        for node in case.list("nodes") {
            create(&self.nodes, node).await;
        }
        for device in case.list("devices") {
            create(&self.devices, device).await;
        }
        let tried = case.tried();
        for pod in case.list("pods").iter().filter(|pod| !tried.contains(pod)) {
            let pods = self.pods(namespace(pod));
            create(&pods, pod).await;
            if pod["status"]["phase"] != "Pending" {
                let status = Patch::Merge(json!({"status": pod["status"]}));
                let patched = pods
                    .patch_status(name(pod), &PatchParams::default(), &status)
                    .await;
                patched.unwrap();
            }
        }
    }

    /// The explanation of a pod; `None` if the pod asks for no device.
    async fn explain(&self, pod: &Value) -> Option<Explanation> {
        let (namespace, name) = (namespace(pod), name(pod));
        let url = format!(
            "{}/{VERSION}/pods/{namespace}/{name}/explain?all=true",
            self.read_api
        );
        let (status, body) = self.http.get(&url).await.unwrap();
        status
            .is_success()
            .then(|| serde_json::from_slice(&body).unwrap())
    }

    /// The explanation of a pod once the scheduler has seen the whole cluster.
    async fn settled_explanation(&self, case: &Case, pod: &Value) -> Option<Explanation> {
        let n_nodes = u32::try_from(case.list("nodes").len()).unwrap();
        let is_settled = || async {
            let explanation = self.explain(pod).await;
            explanation.is_some_and(|explanation| explanation.nodes == n_nodes)
        };
        // A pod that asks for no device never gets one.
        until(PATIENCE, "no explanation", is_settled).await.ok()?;
        tokio::time::sleep(SETTLING).await;
        self.explain(pod).await
    }

    /// Takes the gate of a pod away, and waits for kube-scheduler's attempt.
    async fn attempt(&self, pod: &Value) -> Outcome {
        let pods = self.pods(namespace(pod));
        let gates = Patch::Merge(json!({"spec": {"schedulingGates": null}}));
        let patched = pods.patch(name(pod), &PatchParams::default(), &gates).await;
        patched.unwrap();
        let mut outcome = None;
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while outcome.is_none() && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
            outcome = outcome_of(&pods.get(name(pod)).await.unwrap());
        }
        outcome.unwrap_or_else(|| panic!("kube-scheduler did not try {} in {PATIENCE:?}", name(pod)))
    }
}

/// The outcome that a pod shows; `None` before the attempt.
fn outcome_of(pod: &Pod) -> Option<Outcome> {
    if let Some(node) = node_of(pod) {
        return Some(Outcome::Bound(node.to_owned()));
    }
    let scheduled = condition(pod, "PodScheduled")?;
    let is_refused = matches!(
        scheduled.reason.as_deref(),
        Some("Unschedulable" | "SchedulerError")
    );
    is_refused.then(|| Outcome::Refused(scheduled.message.clone().unwrap_or_default()))
}

async fn create<K>(api: &Api<K>, object: &Value)
where
    K: kube::Resource + Clone + std::fmt::Debug + DeserializeOwned + Serialize,
{
    let typed = serde_json::from_value(object.clone()).unwrap();
    let created = api.create(&PostParams::default(), &typed).await;
    created.unwrap_or_else(|error| panic!("{object}: {error}"));
}

async fn create_if_absent<K>(api: &Api<K>, object: &Value)
where
    K: kube::Resource + Clone + std::fmt::Debug + DeserializeOwned + Serialize,
{
    let typed = serde_json::from_value(object.clone()).unwrap();
    match api.create(&PostParams::default(), &typed).await {
        Err(Error::Api(status)) if status.code == 409 => {}
        created => drop(created.unwrap()),
    }
}

/// Deletes all objects of a kind, at once, and waits until they are gone.
async fn delete_all<K>(api: &Api<K>)
where
    K: kube::Resource + Clone + std::fmt::Debug + DeserializeOwned,
{
    let all = ListParams::default();
    for object in api.list(&all).await.unwrap() {
        // A pod on a node without kubelet would wait for it until its grace period ends.
        let deleted = api
            .delete(&object.name_any(), &DeleteParams::default().grace_period(0))
            .await;
        drop(deleted);
    }
    let is_empty = || async { api.list(&all).await.unwrap().items.is_empty() };
    until(PATIENCE, "objects are not deleted", is_empty)
        .await
        .unwrap();
}

/// The first part of kube-scheduler's message, which counts nodes by reason.
fn histogram(message: &str) -> &str {
    message
        .split_once(". no new claims")
        .map_or(message, |(counts, _)| counts)
}

impl Findings {
    /// Compares what `explain` and the model say of a pod with what kube-scheduler has done.
    async fn compare(&mut self, case: &Case, pod: &Value, explanation: &Explanation, outcome: Outcome) {
        self.pods += 1;
        let predicted = World::of(case).attempt(pod).await.unwrap();
        let fitting: Vec<&str> = explanation
            .verdicts
            .iter()
            .filter(|verdict| verdict.fits)
            .map(|verdict| verdict.node.as_str())
            .collect();
        let (says, model, done) = match outcome {
            Outcome::Bound(node) => {
                self.bound += 1;
                let says = fitting.contains(&node.as_str());
                let model = predicted.fitting.contains(&node);
                (says, model, format!("bound to {node}"))
            }
            Outcome::Refused(message) => {
                self.refused += 1;
                let reasons = &explanation.reasons;
                let counts: BTreeMap<&str, usize> = reasons
                    .iter()
                    .map(|(reason, n)| (reason.as_str(), *n as usize))
                    .collect();
                let expected = no_fit_message(case.list("nodes").len(), counts, 0);
                // A conflict of the pod's own terms stands without a number of nodes.
                let conflict = reasons
                    .keys()
                    .find(|reason| message.contains(&format!(": {reason}. ")));
                let says = fitting.is_empty()
                    && (histogram(&expected) == histogram(&message)
                        || (conflict.is_some() && reasons.len() == 1));
                let model = predicted.fitting.is_empty() && predicted.diagnosis.message() == message;
                (says, model, message)
            }
        };
        if !says || !model {
            self.differences.push(format!(
                "{}: kube-scheduler: {done}\n  explain ({says}): {fitting:?} {:?}\n  model ({model}): {:?} {}\n{case}",
                name(pod),
                explanation.reasons,
                predicted.fitting,
                predicted.diagnosis.message()
            ));
        }
    }
}

#[tokio::test]
#[ignore = "needs a kube-apiserver, a kube-scheduler and gpushare-scheduler: docs/real-cluster.md"]
async fn explain_says_what_a_real_kube_scheduler_does() {
    let (first, n_cases) = (setting("VERDICT_SEED", 0), setting("VERDICT_CASES", CASES));
    let cluster = RealCluster::open().await;
    let mut findings = Findings::default();
    for seed in first..first + n_cases {
        let case = Case::random(seed, true);
        cluster.clear().await;
        cluster.create(&case).await;
        for pod in case.tried() {
            // A pod that asks for no device is none of gpushare's.
            if scheduler::read_api::explain(World::of(&case).index(), namespace(&pod), name(&pod), false)
                .is_none()
            {
                continue;
            }
            let mut gated = pod.clone();
            gated["spec"]["schedulingGates"] = json!([{"name": "verdict/wait"}]);
            let pods = cluster.pods(namespace(&pod));
            create(&pods, &gated).await;
            let Some(explanation) = cluster.settled_explanation(&case, &pod).await else {
                findings
                    .differences
                    .push(format!("seed {seed}: no explanation of {}\n{case}", name(&pod)));
                continue;
            };
            let outcome = cluster.attempt(&pod).await;
            findings.compare(&case, &pod, &explanation, outcome).await;
            let now = DeleteParams::default().grace_period(0);
            pods.delete(name(&pod), &now).await.unwrap();
        }
        if seed % 20 == 0 {
            println!("seed {seed}: {} differences so far", findings.differences.len());
        }
    }
    let Findings {
        pods,
        bound,
        refused,
        differences,
    } = findings;
    println!("{n_cases} clusters, {pods} pods: {bound} bound, {refused} refused");
    assert!(differences.is_empty(), "{}", differences.join("\n\n"));
}
