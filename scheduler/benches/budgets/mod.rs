//! Disruption budgets of the pods that hold a part of a GPU: one for each four pods, by a label.

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use scheduler::index::Index;
use scheduler::watch::ObjectStore;
use serde_json::{Value, json};

use crate::cluster::N_GPUS;

/// Pods of one application, which have a budget.
const PODS_OF_APP: usize = 4;

/// The labels of a pod on a GPU of a node.
pub(crate) fn labels(at: usize, minor: usize) -> Value {
    let app = (at * N_GPUS + minor) / PODS_OF_APP;
    json!({"app": format!("app-{app}"), "pod-template-hash": "5d8f7c9b6"})
}

/// Shows an index the budgets of the pods on this number of nodes.
pub(crate) fn apply(index: &mut Index, n_nodes: usize) {
    for app in 0..n_nodes * N_GPUS / PODS_OF_APP {
        if let Ok(budget) = serde_json::from_value::<PodDisruptionBudget>(budget(app)) {
            index.apply(budget);
        }
    }
}

fn budget(app: usize) -> Value {
    json!({
        "metadata": {"name": format!("budget-{app}"), "namespace": "default"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": format!("app-{app}")}}},
        "status": {"disruptionsAllowed": 1, "currentHealthy": 4, "desiredHealthy": 3, "expectedPods": 4},
    })
}
