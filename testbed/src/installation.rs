//! The objects of a complete installation besides the daemons themselves: Deployment, `DaemonSet`, pods of the
//! plugins, definitions and policies.
//!
//! The testbed runs the daemons as processes and has no controllers, so the status that these would write is
//! set here, once.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::replicas::NAMESPACE;
use kit::apiserver::ApiObjects;
use kit::cluster::LocalCluster;
use kit::manifests;

/// The manifests of `deploy/base` besides those that every cluster of the testbed applies at its start.
const MANIFESTS: [&str; 5] = [
    "scheduler-leader-crd.yaml",
    "scheduler-admission.yaml",
    "record-admission.yaml",
    "scheduler.yaml",
    "device-plugin.yaml",
];
/// The name of the plugin's `DaemonSet`, of its container and of the label of its pods.
const PLUGIN: &str = "gpushare-device-plugin";

/// Creates the objects of an installation; their status shows `n_replicas` of the scheduler and all plugins as ready.
///
/// # Errors
/// A manifest cannot be applied.
pub async fn complete(cluster: &LocalCluster, n_replicas: u32) -> Result<()> {
    for file in MANIFESTS {
        manifests::apply_file(cluster.client(), &cluster.deploy().join("base").join(file)).await?;
    }
    if cluster.has_webhooks() {
        let service = "components/webhook-configurations/service.yaml";
        manifests::apply_file(cluster.client(), &cluster.deploy().join(service)).await?;
    }
    let api = cluster.api().objects();
    let status = json!({"replicas": n_replicas, "readyReplicas": n_replicas});
    api.patch_status("deployments", NAMESPACE, "gpushare-scheduler", &status)?;
    let n_nodes = cluster.nodes().count();
    let status = json!({"desiredNumberScheduled": n_nodes, "numberReady": n_nodes});
    api.patch_status("daemonsets", NAMESPACE, PLUGIN, &status)?;
    for node in cluster.nodes() {
        api.create(
            "pods",
            plugin_pod(api, node.name(), node.metrics_address().port())?,
        )?;
    }
    Ok(())
}

/// The pod of the plugin on a node, whose kubelet runs an idle container in it: the plugin itself is a process of the testbed.
fn plugin_pod(api: &ApiObjects, node: &str, metrics_port: u16) -> Result<Value> {
    let daemon_set = api.get("daemonsets", NAMESPACE, PLUGIN)?;
    let template = daemon_set
        .pointer("/spec/template")
        .context("a DaemonSet has a template")?;
    let field = |pointer: &str| template.pointer(pointer).cloned().unwrap_or_default();
    let uid = daemon_set.pointer("/metadata/uid").cloned().unwrap_or_default();
    let owner =
        json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": PLUGIN, "uid": uid, "controller": true});
    let port = json!({"name": "health", "containerPort": metrics_port, "protocol": "TCP"});
    let container = json!({"name": PLUGIN, "image": field("/spec/containers/0/image"), "ports": [port]});
    Ok(json!({
        "metadata": {
            "name": format!("{PLUGIN}-{node}"), "namespace": NAMESPACE,
            "labels": field("/metadata/labels"), "ownerReferences": [owner],
        },
        "spec": {"nodeName": node, "containers": [container]},
    }))
}
