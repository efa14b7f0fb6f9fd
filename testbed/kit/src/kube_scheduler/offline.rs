//! kube-scheduler's attempts on a cluster that is given as objects: no API server, no queue, no preemption.
//!
//! Many clusters can be tried in a short time this way. Nothing is bound: the caller shows the bound pod.

use std::sync::Arc;

use axum::Router;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;

use super::amounts::ResourceAmounts;
use super::binding::VolumeClaims;
use super::cache::Cache;
use super::configuration::SchedulerConfiguration;
use super::cycle::{Cycle, Sampling, Ties};
use super::diagnosis::SchedulingDiagnosis;
use super::extender::ExtenderClient;
use crate::pod_fields::{has_ended, node_of};

/// A scheduler of a cluster that changes by calls alone.
#[derive(Debug)]
pub struct OfflineScheduler {
    cache: Cache,
    cycle: Cycle,
}

/// The result of an attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfflineAttempt {
    /// The nodes that fit, if the extender answers with all of them. An extender need not say why it refuses the others.
    pub fitting: Vec<String>,
    /// The node to which kube-scheduler would bind the pod; `None` if no node fits.
    pub chosen: Option<String>,
    /// The number of nodes that were filtered.
    pub n_seen: usize,
    /// The refused nodes, as far as a reason is known.
    pub diagnosis: SchedulingDiagnosis,
}

impl OfflineScheduler {
    /// A scheduler of an empty cluster, with these routes in the place of every extender of the configuration.
    pub fn new(configuration: &SchedulerConfiguration, routes: &Router, ties: Ties) -> Self {
        let mut extenders = Vec::new();
        for extender in &configuration.extenders {
            extenders.push(ExtenderClient::in_process(extender.clone(), routes.clone()));
        }
        let cycle = Cycle {
            extenders,
            ties,
            sampling: Sampling::of(configuration.percentage_of_nodes_to_score),
            claims: VolumeClaims::default(),
        };
        Self {
            cache: Cache::default(),
            cycle,
        }
    }

    /// Adds a node, or replaces it.
    pub fn put_node(&mut self, node: Node) {
        self.cache.put_node(&node.name_any(), node);
    }

    /// Counts a pod on its node, if it is bound and has not ended.
    pub fn put_pod(&mut self, pod: &Pod) {
        let uid = pod.uid().unwrap_or_default();
        match node_of(pod) {
            Some(node) if !has_ended(pod) => drop(self.cache.bind(&uid, node, &Arc::new(pod.clone()))),
            _ => self.remove_pod(&uid),
        }
    }

    /// Removes a pod from its node, if it was counted.
    pub fn remove_pod(&mut self, uid: &str) {
        self.cache.release(uid);
    }

    /// One scheduling cycle for a pod, up to the choice of its node. It fails if the request does not parse or an extender fails.
    pub async fn attempt(&mut self, pod: &Pod) -> Result<OfflineAttempt, String> {
        self.search(pod, true).await
    }

    /// The nodes that an attempt would choose from.
    pub async fn find(&mut self, pod: &Pod) -> Result<OfflineAttempt, String> {
        self.search(pod, false).await
    }

    /// Finds the nodes that fit a pod, and chooses one of them if `is_chosen`.
    async fn search(&mut self, pod: &Pod, is_chosen: bool) -> Result<OfflineAttempt, String> {
        let request = request_of(pod)?;
        let nodes = self.cache.nodes();
        let mut diagnosis = SchedulingDiagnosis::default();
        let (feasible, n_seen) = self.cycle.find(pod, &request, nodes, &mut diagnosis).await?;
        let chosen = if is_chosen {
            self.cycle.choose(pod, &request, &feasible).await
        } else {
            None
        };
        Ok(OfflineAttempt {
            fitting: feasible.iter().map(|(name, _)| (*name).to_owned()).collect(),
            chosen,
            n_seen,
            diagnosis,
        })
    }

    /// True if any node of the cluster fits a pod, also one that the next attempt does not look at.
    pub async fn fits_any(&self, pod: &Pod) -> Result<bool, String> {
        let (request, nodes) = (request_of(pod)?, self.cache.nodes());
        let mut diagnosis = SchedulingDiagnosis::default();
        let fitting = self
            .cycle
            .filter_nodes(pod, &request, nodes, nodes.len(), &mut diagnosis);
        let (feasible, _) = fitting.await?;
        Ok(!feasible.is_empty())
    }

    /// True if an extender is asked about a pod.
    pub fn is_extended(&self, pod: &Pod) -> bool {
        self.cycle
            .extenders
            .iter()
            .any(|extender| extender.is_interested(pod))
    }

    /// The score of a node for a pod by kube-scheduler's own plugins.
    pub fn score(&self, pod: &Pod, node: &str) -> Result<i64, String> {
        let request = request_of(pod)?;
        let view = self.cache.nodes().get(node);
        Ok(view.map_or(0, |view| request.score(&view.allocatable, &view.used)))
    }

    /// The node with the best of these scores.
    pub fn select(&mut self, scores: &[(&str, i64)]) -> Option<String> {
        self.cycle.select_host(scores)
    }
}

fn request_of(pod: &Pod) -> Result<ResourceAmounts, String> {
    ResourceAmounts::of_pod(pod).map_err(|error| error.to_string())
}
