//! kube-scheduler's attempts on a cluster that is given as objects: no API server, no queue, no preemption.
//!
//! Many clusters can be tried in a short time this way. Nothing is bound: the caller shows the bound pod.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Router;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;

use super::amounts::ResourceAmounts;
use super::binding::VolumeClaims;
use super::cache::Cache;
use super::configuration::SchedulerConfiguration;
use super::cycle::{Cycle, Sampling};
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
    pub fitting: BTreeSet<String>,
    /// The node to which kube-scheduler would bind the pod; `None` if no node fits.
    pub chosen: Option<String>,
    /// The refused nodes, as far as a reason is known.
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
        let feasible = self.cycle.find(pod, &request, &nodes, &mut diagnosis).await?;
        let chosen = self.cycle.choose(pod, &request, &feasible).await;
        Ok(OfflineAttempt {
            fitting: feasible.keys().map(|name| (*name).to_owned()).collect(),
            chosen,
            diagnosis,
        })
    }
}
