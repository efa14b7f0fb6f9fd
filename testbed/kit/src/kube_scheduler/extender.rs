//! The client of an extender: kube-scheduler's requests as JSON over HTTP, and its treatment of the answers.
//!
//! It has its own types for all verbs but preempt, so that a mistake in the types of gpushare's scheduler shows.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

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

use super::configuration::{ConfigurationError, ExtenderConfiguration};
use crate::connector::Connector;
use crate::pod_fields::containers;

/// Factor from an extender's 0..10 to the 0..100 of plugins.
const SCORE_FACTOR: i64 = 10;

/// An extender that can be called.
#[derive(Clone, Debug)]
pub struct ExtenderClient {
    configuration: ExtenderConfiguration,
    transport: Transport,
}

/// The connection to an extender.
#[derive(Clone, Debug)]
enum Transport {
    Connections(Box<Client<Connector, Full<Bytes>>>),
    /// The extender's own routes, in this process.
    Routes(Router),
}

/// The error of a call to an extender.
#[derive(Debug, thiserror::Error)]
pub enum ExtenderError {
    /// The call took longer than `httpTimeout`.
    #[error("post {url}: no answer within {timeout:?}")]
    Timeout {
        /// The URL of the call.
        url: String,
        /// The limit, `httpTimeout`.
        timeout: Duration,
    },
    /// There is no connection, or it broke.
    #[error("post {url}: {cause}")]
    Transport {
        /// The URL of the call.
        url: String,
        /// The cause.
        cause: String,
    },
    /// The HTTP status is not 200; the body is not looked at.
    #[error("failed {verb} with extender at URL {url}, code {code}")]
    Status {
        /// The verb.
        verb: String,
        /// The URL of the call.
        url: String,
        /// HTTP status.
        code: u16,
    },
    /// The answer is not the JSON that the verb calls for.
    #[error("answer of {url}: {cause}")]
    Answer {
        /// The URL of the call.
        url: String,
        /// The cause.
        cause: String,
    },
    /// The extender answered with an error text.
    #[error("{0}")]
    Refused(String),
    /// The answer names a node that the request did not name.
    #[error("extender {url:?} claims a filtered node {node:?} which is not found in the input node list")]
    UnknownNode {
        /// The extender.
        url: String,
        /// The node.
        node: String,
    },
}

/// The answer of `filter`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FittingNodes {
    /// Nodes that fit, in the order of the answer.
    pub passed: Vec<String>,
    /// Nodes that do not fit, with the reason.
    pub failed: BTreeMap<String, String>,
    /// Nodes that do not fit and where preemption cannot help, with the reason.
    pub unresolvable: BTreeMap<String, String>,
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

impl<'a> Args<'a> {
    fn of(pod: &'a Pod, node_names: &'a [&'a str]) -> Self {
        Self {
            pod,
            nodes: (),
            node_names,
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct FilterResult {
    node_names: Option<Vec<String>>,
    failed_nodes: Option<BTreeMap<String, String>>,
    failed_and_unresolvable_nodes: Option<BTreeMap<String, String>>,
    #[serde(default)]
    error: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HostPriority {
    host: String,
    score: i64,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct BindingArgs<'a> {
    pod_name: &'a str,
    pod_namespace: &'a str,
    #[serde(rename = "PodUID")]
    pod_uid: &'a str,
    node: &'a str,
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
    ///
    /// # Errors
    /// Its certificates cannot be read.
    pub fn new(configuration: ExtenderConfiguration) -> Result<Self, ConfigurationError> {
        let connector = configuration.connector()?;
        Ok(Self {
            configuration,
            transport: Transport::Connections(Box::new(
                Client::builder(TokioExecutor::new()).build(connector),
            )),
        })
    }

    /// A client of an extender in this process, which answers without a connection.
    pub(super) fn in_process(configuration: ExtenderConfiguration, routes: Router) -> Self {
        Self {
            configuration,
            transport: Transport::Routes(routes),
        }
    }

    pub(super) fn is_filter(&self) -> bool {
        !self.configuration.filter_verb.is_empty()
    }

    pub(super) fn is_prioritizer(&self) -> bool {
        !self.configuration.prioritize_verb.is_empty()
    }

    pub(super) fn is_preemptor(&self) -> bool {
        !self.configuration.preempt_verb.is_empty()
    }

    pub(super) fn is_binder(&self) -> bool {
        !self.configuration.bind_verb.is_empty()
    }

    /// True if the extender is asked about the pod: it manages a resource of the pod, or names none that it manages.
    pub(crate) fn is_interested(&self, pod: &Pod) -> bool {
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
    pub async fn filter(&self, pod: &Pod, node_names: &[&str]) -> Result<FittingNodes, ExtenderError> {
        let verb = &self.configuration.filter_verb;
        let result: FilterResult = self.post(verb, &Args::of(pod, node_names)).await?;
        if !result.error.is_empty() {
            return Err(ExtenderError::Refused(result.error));
        }
        let names = result.node_names.unwrap_or_default();
        // kube-scheduler fails the attempt: an extender that names unknown nodes may be wrong about the known ones too.
        let known: HashSet<&str> = node_names.iter().copied().collect();
        if let Some(unknown) = names.iter().find(|name| !known.contains(name.as_str())) {
            return Err(ExtenderError::UnknownNode {
                url: self.configuration.url_prefix.clone(),
                node: unknown.clone(),
            });
        }
        Ok(FittingNodes {
            passed: names,
            failed: result.failed_nodes.unwrap_or_default(),
            unresolvable: result.failed_and_unresolvable_nodes.unwrap_or_default(),
        })
    }

    /// Asks for scores; returns them weighted, on the scale of kube-scheduler's own scores.
    pub async fn prioritize(
        &self,
        pod: &Pod,
        node_names: &[&str],
    ) -> Result<BTreeMap<String, i64>, ExtenderError> {
        let verb = &self.configuration.prioritize_verb;
        let scores: Vec<HostPriority> = self.post(verb, &Args::of(pod, node_names)).await?;
        let weight = self.configuration.weight * SCORE_FACTOR;
        let weighted = |scored: HostPriority| (scored.host, scored.score.saturating_mul(weight));
        Ok(scores.into_iter().map(weighted).collect())
    }

    /// Asks the extender for victims on each of these nodes, with the victims that kube-scheduler proposes.
    pub(super) async fn preempt(
        &self,
        pod: &Pod,
        candidates: &BTreeMap<String, PreemptionVictims>,
    ) -> Result<BTreeMap<String, MetaVictims>, ExtenderError> {
        let mut by_uid = BTreeMap::new();
        for (node, victims) in candidates {
            let uids = victims
                .pods
                .iter()
                .map(|pod| pod.metadata.uid.clone().unwrap_or_default());
            let meta_victims = MetaVictims {
                pods: uids.map(|uid| MetaPod { uid }).collect(),
                n_pdb_violations: victims.n_pdb_violations,
            };
            by_uid.insert(node, meta_victims);
        }
        let args = json!({"Pod": pod, "NodeNameToVictims": null, "NodeNameToMetaVictims": by_uid});
        let result: ExtenderPreemptionResult = self.post(&self.configuration.preempt_verb, &args).await?;
        Ok(result.node_name_to_meta_victims)
    }

    /// Asks the extender to bind a pod.
    pub async fn bind(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        node: &str,
    ) -> Result<(), ExtenderError> {
        let args = BindingArgs {
            pod_name: name,
            pod_namespace: namespace,
            pod_uid: uid,
            node,
        };
        let result: BindingResult = self.post(&self.configuration.bind_verb, &args).await?;
        if result.error.is_empty() {
            Ok(())
        } else {
            Err(ExtenderError::Refused(result.error))
        }
    }

    /// Calls a verb of the extender and decodes its answer; the timeout of the configuration is for the whole call.
    async fn post<A: DeserializeOwned>(&self, verb: &str, args: &impl Serialize) -> Result<A, ExtenderError> {
        let url = format!("{}/{verb}", self.configuration.url_prefix.trim_end_matches('/'));
        let timeout = self.configuration.http_timeout;
        match tokio::time::timeout(timeout, self.exchange(&url, args)).await {
            Err(_) => Err(ExtenderError::Timeout { url, timeout }),
            Ok(Err(cause)) => Err(ExtenderError::Transport { url, cause }),
            Ok(Ok((StatusCode::OK, body))) => {
                let cause = |error: serde_json::Error| error.to_string();
                let answer = serde_json::from_slice(&body).map_err(cause);
                answer.map_err(|cause| ExtenderError::Answer { url, cause })
            }
            // kube-scheduler drops the body of an answer with another status than 200: an extender's text in it is lost.
            Ok(Ok((status, _))) => Err(ExtenderError::Status {
                verb: verb.to_owned(),
                url,
                code: status.as_u16(),
            }),
        }
    }

    /// Sends one POST, and returns the status and body of the answer.
    async fn exchange(&self, url: &str, args: &impl Serialize) -> Result<(StatusCode, Bytes), String> {
        let body = serde_json::to_vec(args).map_err(chain)?;
        let request = Request::post(url).header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Full::from(body)).map_err(chain)?;
        let response = match &self.transport {
            Transport::Connections(client) => client.request(request).await.map_err(chain)?.map(Body::new),
            Transport::Routes(routes) => routes.clone().oneshot(request).await.map_err(chain)?,
        };
        let status = response.status();
        let body = response.into_body().collect().await.map_err(chain)?;
        Ok((status, body.to_bytes()))
    }
}

/// An error with its causes, innermost last.
fn chain(error: impl std::error::Error + Send + Sync + 'static) -> String {
    format!("{:#}", anyhow::Error::new(error))
}
