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
use super::cycle::{Cycle, CycleFailure, Sampling};
use super::diagnosis::SchedulingDiagnosis;
use super::extender::ExtenderClient;
use crate::pod_fields::{has_ended, node_of};

/// A scheduler of a cluster that changes by calls alone.
#[derive(Debug)]
pub struct OfflineScheduler {
    cache: Cache,
    cycle: Cycle,
}

/// The result of an attempt: the chosen node, and the nodes that were refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfflineAttempt {
    /// The node to which kube-scheduler would bind the pod; `None` if no node fits.
    pub node: Option<String>,
    /// The refused nodes. The others fit, if the extender answers with all nodes that fit.
    pub diagnosis: SchedulingDiagnosis,
}

impl OfflineScheduler {
    /// A scheduler of an empty cluster, with these routes in the place of every extender of the configuration.
    pub fn new(configuration: &SchedulerConfiguration, routes: &Router) -> Self {
        let mut extenders = Vec::new();
        for extender in &configuration.extenders {
            extenders.push(ExtenderClient::in_process(extender.clone(), routes.clone()));
        }
        let cycle = Cycle {
            extenders,
            ignored: configuration.ignored_resources(),
            ties: None,
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
            _ => drop(self.cache.release(&uid)),
        }
    }

    /// One scheduling cycle for a pod, up to the choice of its node.
    ///
    /// # Errors
    /// The request does not parse, or an extender fails.
    pub async fn attempt(&mut self, pod: &Pod) -> Result<OfflineAttempt, String> {
        let request = ResourceAmounts::of_pod(pod).map_err(|error| error.to_string())?;
        let nodes = self.cache.snapshot();
        let mut diagnosis = SchedulingDiagnosis::default();
        let node = match self.cycle.place(pod, &request, &nodes, &mut diagnosis).await {
            Ok(node) => Some(node),
            Err(CycleFailure::NoFit) => None,
            Err(CycleFailure::Error(message)) => return Err(message),
        };
        Ok(OfflineAttempt { node, diagnosis })
    }
}
