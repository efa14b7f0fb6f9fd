//! The client of an extender: kube-scheduler's requests as JSON over HTTP, and its treatment of the answers.
//!
//! It has its own types for all verbs but preempt, so that a mistake in the types of gpushare's scheduler shows.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::core::v1::Pod;
use proto::extender::{ExtenderPreemptionResult, MetaPod, MetaVictims};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tower::ServiceExt;

use super::configuration::ExtenderConfiguration;
use crate::connector::Connector;
use crate::pod_fields::containers;

/// Factor from an extender's 0..10 to the 0..100 of plugins.
const SCORE_FACTOR: i64 = 10;

/// An extender that can be called.
#[derive(Clone, Debug)]
pub(super) struct ExtenderClient {
    pub(super) configuration: ExtenderConfiguration,
    transport: Transport,
}

/// The connection to an extender.
#[derive(Clone, Debug)]
enum Transport {
    Connections(Box<Client<Connector, Full<Bytes>>>),
    /// The extender's own routes, in this process.
    Routes(Router),
}

/// The answer of `filter`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct FilterResult {
    /// The nodes that fit.
    pub(super) node_names: Option<Vec<String>>,
    /// The reasons why other nodes do not fit.
    pub(super) failed_nodes: Option<BTreeMap<String, String>>,
    /// The same for nodes where preemption cannot help.
    pub(super) failed_and_unresolvable_nodes: Option<BTreeMap<String, String>>,
    #[serde(default)]
    error: String,
}

/// The arguments of a filter or prioritize call. An extender with `nodeCacheCapable` watches nodes itself, so names suffice.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Args<'a> {
    pod: &'a Pod,
    /// Null, as kube-scheduler sends it.
    nodes: (),
    node_names: &'a [&'a str],
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HostPriority {
    host: String,
    score: i64,
}

/// The pods to evict on one node.
#[derive(Clone, Debug, Default)]
pub(super) struct PreemptionVictims {
    /// The victims, the most important first.
    pub(super) pods: Vec<Arc<Pod>>,
    pub(super) n_pdb_violations: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct BindingResult {
    #[serde(default)]
    error: String,
}

impl ExtenderClient {
    /// A client of the extender that the configuration names; nothing is sent yet.
    pub(super) fn new(configuration: ExtenderConfiguration) -> anyhow::Result<Self> {
        let client = Client::builder(TokioExecutor::new()).build(configuration.connector()?);
        Ok(Self {
            configuration,
            transport: Transport::Connections(Box::new(client)),
        })
    }

    /// A client of an extender in this process, which answers without a connection.
    pub(super) fn in_process(configuration: ExtenderConfiguration, routes: Router) -> Self {
        Self {
            configuration,
            transport: Transport::Routes(routes),
        }
    }

    /// True if the extender is asked about the pod: it manages a resource of the pod, or names none that it manages.
    pub(super) fn is_interested(&self, pod: &Pod) -> bool {
        let managed = &self.configuration.managed_resources;
        for resources in containers(pod).filter_map(|container| container.resources.as_ref()) {
            for name in resources
                .requests
                .iter()
                .chain(&resources.limits)
                .flat_map(BTreeMap::keys)
            {
                if managed.iter().any(|resource| resource.name == *name) {
                    return true;
                }
            }
        }
        managed.is_empty()
    }

    /// Asks which of the nodes fit.
    pub(super) async fn filter(&self, pod: &Pod, node_names: &[&str]) -> Result<FilterResult, String> {
        let args = Args {
            pod,
            nodes: (),
            node_names,
        };
        let result: FilterResult = self.post(&self.configuration.filter_verb, &args).await?;
        if !result.error.is_empty() {
            return Err(result.error);
        }
        // kube-scheduler fails the attempt: an extender that names unknown nodes may be wrong about the known ones too.
        let known: HashSet<&str> = node_names.iter().copied().collect();
        let mut names = result.node_names.iter().flatten();
        if let Some(unknown) = names.find(|name| !known.contains(name.as_str())) {
            let url = &self.configuration.url_prefix;
            return Err(format!(
                "extender {url:?} claims a filtered node {unknown:?} which is not found in the input node list"
            ));
        }
        Ok(result)
    }

    /// Asks for scores; returns them weighted, on the scale of kube-scheduler's own scores.
    pub(super) async fn prioritize(
        &self,
        pod: &Pod,
        node_names: &[&str],
    ) -> Result<BTreeMap<String, i64>, String> {
        let args = Args {
            pod,
            nodes: (),
            node_names,
        };
        let scores: Vec<HostPriority> = self.post(&self.configuration.prioritize_verb, &args).await?;
        let weight = self.configuration.weight * SCORE_FACTOR;
        let weighted = |scored: HostPriority| (scored.host, scored.score.saturating_mul(weight));
        Ok(scores.into_iter().map(weighted).collect())
    }

    /// Asks the extender for victims on each of these nodes, with the victims that kube-scheduler proposes.
    pub(super) async fn preempt(
        &self,
        pod: &Pod,
        candidates: &BTreeMap<String, PreemptionVictims>,
    ) -> Result<BTreeMap<String, MetaVictims>, String> {
        let mut by_uid = BTreeMap::new();
        for (node, victims) in candidates {
            let mut meta_victims = MetaVictims {
                pods: Vec::new(),
                n_pdb_violations: victims.n_pdb_violations,
            };
            for pod in &victims.pods {
                let uid = pod.metadata.uid.clone().unwrap_or_default();
                meta_victims.pods.push(MetaPod { uid });
            }
            by_uid.insert(node, meta_victims);
        }
        let args = json!({"Pod": pod, "NodeNameToVictims": null, "NodeNameToMetaVictims": by_uid});
        let result: ExtenderPreemptionResult = self.post(&self.configuration.preempt_verb, &args).await?;
        Ok(result.node_name_to_meta_victims)
    }

    /// Asks the extender to bind a pod.
    pub(super) async fn bind(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        node: &str,
    ) -> Result<(), String> {
        let args = json!({"PodName": name, "PodNamespace": namespace, "PodUID": uid, "Node": node});
        let result: BindingResult = self.post(&self.configuration.bind_verb, &args).await?;
        if result.error.is_empty() {
            Ok(())
        } else {
            Err(result.error)
        }
    }

    /// Calls a verb of the extender and decodes its answer; the timeout of the configuration is for the whole call.
    async fn post<A: DeserializeOwned>(&self, verb: &str, args: &impl Serialize) -> Result<A, String> {
        let url = format!("{}/{verb}", self.configuration.url_prefix.trim_end_matches('/'));
        let timeout = self.configuration.http_timeout;
        match tokio::time::timeout(timeout, self.exchange(&url, args)).await {
            Err(_) => Err(format!("post {url}: no answer within {timeout:?}")),
            Ok(Err(error)) => Err(format!("post {url}: {error:#}")),
            Ok(Ok((StatusCode::OK, body))) => {
                serde_json::from_slice(&body).map_err(|error| format!("answer of {url}: {error}"))
            }
            // kube-scheduler drops the body of an answer with another status than 200: an extender's text in it is lost.
            Ok(Ok((status, _))) => {
                let code = status.as_u16();
                Err(format!("failed {verb} with extender at URL {url}, code {code}"))
            }
        }
    }

    /// Sends one POST, and returns the status and body of the answer.
    async fn exchange(&self, url: &str, args: &impl Serialize) -> anyhow::Result<(StatusCode, Bytes)> {
        let request = Request::post(url).header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Full::from(serde_json::to_vec(args)?))?;
        let response = match &self.transport {
            Transport::Connections(client) => client.request(request).await?.map(Body::new),
            Transport::Routes(routes) => routes.clone().oneshot(request).await?,
        };
        let status = response.status();
        Ok((status, response.into_body().collect().await?.to_bytes()))
    }
}
