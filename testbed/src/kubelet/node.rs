//! The Node object: created or taken over at the start, then its resources are kept as the plugins say.
//!
//! What others patched into node status stays, with one exception: a kubelet without a checkpoint sets every
//! extended resource to zero.

use std::collections::BTreeMap;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use proto::quantity::Quantity;
use serde_json::{Map, Value, json};

use super::config::KubeletConfig;
use super::devices::Capacity;
use super::fit::{Amounts, is_extended};
use super::process::Process;
use super::status::text;

type List = BTreeMap<String, String>;

/// Creates the Node, or takes over the one that is there, until the API server agrees.
pub(crate) async fn register(process: &Process) {
    let api: Api<Node> = Api::all(process.config.client.clone());
    while let Err(error) = try_register(process, &api).await {
        tracing::warn!(%error, "the node is not registered yet");
        tokio::time::sleep(process.config.delays.api_retry).await;
    }
    tracing::info!(node = process.config.node, "node registered");
}

async fn try_register(process: &Process, api: &Api<Node>) -> kube::Result<()> {
    let config = &process.config;
    let name = config.node.as_str();
    let existing = if let Some(node) = api.get_opt(name).await? {
        node
    } else {
        let node = json!({"metadata": {"name": name, "labels": labels(config)}, "status": status(config, &config.capacity)});
        api.create(
            &PostParams::default(),
            &serde_json::from_value(node).map_err(kube::Error::SerdeError)?,
        )
        .await?
    };
    let params = PatchParams::default();
    api.patch(
        name,
        &params,
        &Patch::Merge(json!({"metadata": {"labels": labels(config)}})),
    )
    .await?;
    let (capacity, allocatable) = resources(&existing);
    let zeros = if process.fresh {
        zero_extended(&capacity, &allocatable)
    } else {
        List::new()
    };
    let wanted: List = config.capacity.clone().into_iter().chain(zeros).collect();
    api.patch_status(
        name,
        &params,
        &Patch::Merge(json!({"status": status(config, &wanted)})),
    )
    .await?;
    Ok(())
}

/// Every extended resource that a node lists, as zero.
fn zero_extended(capacity: &List, allocatable: &List) -> List {
    let names = capacity
        .keys()
        .chain(allocatable.keys())
        .filter(|name| is_extended(name));
    names.map(|name| (name.clone(), "0".to_owned())).collect()
}

/// Follows the Node and the plugins, and writes what differs.
pub(crate) async fn keep(process: &Process) {
    let api: Api<Node> = Api::all(process.config.client.clone());
    let only = watcher::Config::default().fields(&format!("metadata.name={}", process.config.node));
    let mut nodes = watcher(api.clone(), only)
        .default_backoff()
        .applied_objects()
        .boxed();
    let mut current: Option<(List, List)> = None;
    let mut removed: Vec<String> = Vec::new();
    loop {
        let expiry = process
            .devices()
            .next_expiry(process.config.delays.endpoint_grace);
        tokio::select! {
            node = nodes.try_next() => match node {
                Ok(Some(node)) => {
                    let (capacity, allocatable) = resources(&node);
                    process.set_allocatable(Amounts::read(&allocatable));
                    current = Some((capacity, allocatable));
                    process.changed();
                }
                Ok(None) => return,
                Err(error) => tracing::warn!(%error, "the watch of this node failed"),
            },
            () = process.node_stale.notified() => {}
            () = sleep_until(expiry) => {}
        }
        let counted = process.devices().capacity(process.config.delays.endpoint_grace);
        if !counted.removed.is_empty() {
            process.write_checkpoint();
            removed.extend(counted.removed.iter().cloned());
        }
        let Some((capacity, allocatable)) = &current else {
            continue;
        };
        let Some(patch) = difference(
            capacity,
            allocatable,
            &process.config.capacity,
            &Capacity {
                removed: removed.clone(),
                ..counted
            },
        ) else {
            removed.clear();
            continue;
        };
        if let Err(error) = api
            .patch_status(
                &process.config.node,
                &PatchParams::default(),
                &Patch::Merge(patch),
            )
            .await
        {
            tracing::warn!(%error, "node status is written again later");
            tokio::time::sleep(process.config.delays.api_retry).await;
            process.node_stale.notify_one();
        }
    }
}

async fn sleep_until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The merge patch that makes node status what it should be, or nothing if it is.
fn difference(capacity: &List, allocatable: &List, own: &List, plugins: &Capacity) -> Option<Value> {
    let mut wanted: List = capacity.clone();
    wanted.extend(own.iter().map(|(name, amount)| (name.clone(), amount.clone())));
    wanted.extend(
        plugins
            .counts
            .iter()
            .map(|(name, (all, _))| (name.clone(), all.to_string())),
    );
    // A resource whose plugin left for good is still known to be a plugin's: zero, not absent.
    let left = plugins
        .removed
        .iter()
        .filter(|name| !plugins.counts.contains_key(*name));
    wanted.extend(left.map(|name| (name.clone(), "0".to_owned())));
    let mut free = wanted.clone();
    free.extend(
        plugins
            .counts
            .iter()
            .map(|(name, (_, healthy))| (name.clone(), healthy.to_string())),
    );
    let mut changed_free = changes(allocatable, &free);
    let stale = allocatable
        .keys()
        .filter(|name| is_extended(name) && !wanted.contains_key(*name));
    changed_free.extend(stale.map(|name| (name.clone(), Value::Null)));
    let changed = changes(capacity, &wanted);
    if changed.is_empty() && changed_free.is_empty() {
        return None;
    }
    Some(json!({"status": {"capacity": changed, "allocatable": changed_free}}))
}

fn changes(from: &List, to: &List) -> Map<String, Value> {
    let equal = |a: &str, b: &str| {
        a == b || matches!((a.parse::<Quantity>(), b.parse::<Quantity>()), (Ok(a), Ok(b)) if a == b)
    };
    let differs =
        |(name, amount): &(&String, &String)| from.get(*name).is_none_or(|before| !equal(before, amount));
    to.iter()
        .filter(differs)
        .map(|(name, amount)| (name.clone(), amount.as_str().into()))
        .collect()
}

fn resources(node: &Node) -> (List, List) {
    let texts = |list: Option<&BTreeMap<String, Text>>| {
        list.into_iter()
            .flatten()
            .map(|(name, q)| (name.clone(), q.0.clone()))
            .collect()
    };
    let status = node.status.as_ref();
    (
        texts(status.and_then(|status| status.capacity.as_ref())),
        texts(status.and_then(|status| status.allocatable.as_ref())),
    )
}

fn labels(config: &KubeletConfig) -> List {
    let usual = [
        ("kubernetes.io/hostname", config.node.as_str()),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", "amd64"),
    ];
    let usual = usual
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
    usual.chain(config.labels.clone()).collect()
}

fn status(config: &KubeletConfig, resources: &List) -> Value {
    let now = text(Timestamp::now());
    json!({
        "addresses": [{"type": "InternalIP", "address": config.address.to_string()}, {"type": "Hostname", "address": config.node}],
        "capacity": resources,
        "allocatable": resources,
        "conditions": [{
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "the simulated kubelet is ready",
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        }],
        "nodeInfo": {
            "machineID": config.node, "systemUUID": config.node, "bootID": config.node, "kernelVersion": "testbed",
            "osImage": "testbed", "containerRuntimeVersion": "testbed://1", "kubeletVersion": "v1.36.2", "kubeProxyVersion": "",
            "operatingSystem": "linux", "architecture": "amd64",
        },
    })
}

#[cfg(test)]
mod tests;
