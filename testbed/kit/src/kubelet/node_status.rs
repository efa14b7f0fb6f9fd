//! The Node object: kubelet creates it or takes over an existing one, and then keeps its resources in step with
//! the device manager.
//!
//! Values that others patched into node status stay, with one exception: a kubelet without a checkpoint sets every
//! extended resource to zero. Leases and heartbeats are left out: the node is Ready as long as it exists.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use parking_lot::Mutex;
use proto::quantity::Quantity;
use serde_json::{Map, Value, json};

use super::config::{ADDRESS, KubeletConfig};
use super::device_manager::DeviceManager;
use super::fit::is_extended;
use super::machine::KubeletMachine;
use crate::kube_scheduler::ResourceAmounts;

/// Quantities by resource name, as in node status.
type ResourceList = BTreeMap<String, String>;

#[derive(Debug)]
pub(crate) struct NodeStatusSync {
    machine: Arc<KubeletMachine>,
    devices: Arc<DeviceManager>,
    /// The node's allocatable as the API server shows it.
    allocatable: Mutex<ResourceAmounts>,
}

impl NodeStatusSync {
    pub(crate) fn new(machine: &Arc<KubeletMachine>, devices: &Arc<DeviceManager>) -> Self {
        Self {
            machine: Arc::clone(machine),
            devices: Arc::clone(devices),
            allocatable: Mutex::new(amounts_of(&machine.config.capacity)),
        }
    }

    pub(crate) fn allocatable(&self) -> ResourceAmounts {
        self.allocatable.lock().clone()
    }

    fn api(&self) -> Api<Node> {
        Api::all(self.machine.config.client.clone())
    }

    /// Creates the Node or takes over an existing one; tries again until the API server accepts.
    pub(crate) async fn register(&self, is_new_node: bool) {
        let config = &self.machine.config;
        while let Err(error) = self.try_register(is_new_node).await {
            tracing::warn!(%error, "the node is not registered yet");
            tokio::time::sleep(config.delays.api_retry).await;
        }
        tracing::info!(node = config.node, "node registered");
    }

    async fn try_register(&self, is_new_node: bool) -> kube::Result<()> {
        let (config, api) = (&self.machine.config, self.api());
        let name = config.node.as_str();
        let existing = if let Some(node) = api.get_opt(name).await? {
            node
        } else {
            let node = json!({"metadata": {"name": name, "labels": own_labels(config)}, "status": status_with(config, &config.capacity)});
            let node = serde_json::from_value(node).map_err(kube::Error::SerdeError)?;
            api.create(&PostParams::default(), &node).await?
        };
        let params = PatchParams::default();
        // updateDefaultLabels: kubelet sets its own labels and leaves the others of an existing Node alone.
        let labelled = Patch::Merge(json!({"metadata": {"labels": own_labels(config)}}));
        api.patch(name, &params, &labelled).await?;
        let mut wanted = config.capacity.clone();
        // initialNode without a checkpoint (ShouldResetExtendedResourceCapacity): the amounts of extended resources may be those
        // of an earlier machine of this name.
        if is_new_node {
            let (capacity, allocatable) = resources(&existing);
            for name in capacity.into_keys().chain(allocatable.into_keys()) {
                if is_extended(&name) {
                    wanted.insert(name, "0".to_owned());
                }
            }
        }
        let reported = Patch::Merge(json!({"status": status_with(config, &wanted)}));
        api.patch_status(name, &params, &reported).await.map(drop)
    }

    /// Watches the Node and the device manager, and corrects node status whenever they differ.
    pub(crate) async fn keep(&self) {
        let (config, api) = (&self.machine.config, self.api());
        let only = watcher::Config::default().fields(&format!("metadata.name={}", config.node));
        let nodes = watcher(api.clone(), only).default_backoff();
        let mut nodes = nodes.applied_objects().boxed();
        let mut current: Option<(ResourceList, ResourceList)> = None;
        // Resources that the device manager has removed since node status was last right.
        let mut removed: Vec<String> = Vec::new();
        loop {
            let expiry = self.devices.lock().next_expiry();
            tokio::select! {
                node = nodes.try_next() => match node {
                    Ok(Some(node)) => {
                        let (capacity, allocatable) = resources(&node);
                        *self.allocatable.lock() = amounts_of(&allocatable);
                        current = Some((capacity, allocatable));
                        self.machine.notify();
                    }
                    Ok(None) => return,
                    Err(error) => tracing::warn!(%error, "the watch of this node failed"),
                },
                () = self.devices.capacity_changed.notified() => {}
                () = sleep_until(expiry) => {}
            }
            removed.append(&mut self.devices.remove_expired());
            let Some((capacity, allocatable)) = &current else {
                continue;
            };
            let counts = self.devices.lock().counts();
            let Some(patch) = status_patch([capacity, allocatable, &config.capacity], &counts, &removed)
            else {
                removed.clear();
                continue;
            };
            let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
            if let Err(error) = api.patch_status(&config.node, &params, &patch).await {
                tracing::warn!(%error, "node status is written again later");
                tokio::time::sleep(config.delays.api_retry).await;
                self.devices.capacity_changed.notify_one();
            }
        }
    }
}

/// Sleeps until a time, or for ever if there is none.
async fn sleep_until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The merge patch that corrects node status, or `None` if it is correct.
fn status_patch(
    [capacity, allocatable, own]: [&ResourceList; 3],
    counts: &BTreeMap<String, (usize, usize)>,
    removed: &[String],
) -> Option<Value> {
    let mut wanted: ResourceList = capacity.clone();
    wanted.extend(own.clone());
    // A resource that the device manager has removed stays in node status with the amount zero.
    for name in removed {
        wanted.insert(name.clone(), "0".to_owned());
    }
    // Capacity counts all devices of a resource, allocatable the healthy ones.
    let mut wanted_allocatable = wanted.clone();
    for (name, (all, healthy)) in counts {
        wanted.insert(name.clone(), all.to_string());
        wanted_allocatable.insert(name.clone(), healthy.to_string());
    }
    let mut changed_allocatable = changed_amounts(allocatable, &wanted_allocatable);
    for name in allocatable.keys() {
        // A merge patch adds and changes only, so a resource that is gone from capacity has to be removed by name.
        if is_extended(name) && !wanted.contains_key(name) {
            changed_allocatable.insert(name.clone(), Value::Null);
        }
    }
    let changed = changed_amounts(capacity, &wanted);
    if changed.is_empty() && changed_allocatable.is_empty() {
        return None;
    }
    Some(json!({"status": {"capacity": changed, "allocatable": changed_allocatable}}))
}

/// The amounts that differ between two lists, or are new, with their new values.
fn changed_amounts(from: &ResourceList, to: &ResourceList) -> Map<String, Value> {
    let mut changes = Map::new();
    for (name, amount) in to {
        if !from.get(name).is_some_and(|before| is_equal(before, amount)) {
            changes.insert(name.clone(), Value::from(amount.as_str()));
        }
    }
    changes
}

/// Compares two amounts as quantities: `2` equals `2000m`.
fn is_equal(one: &str, other: &str) -> bool {
    one == other
        || matches!((one.parse::<Quantity>(), other.parse::<Quantity>()), (Ok(one), Ok(other)) if one == other)
}

fn amounts_of(amounts: &ResourceList) -> ResourceAmounts {
    ResourceAmounts::of_texts(amounts.iter().map(|(name, text)| (name, text.as_str())))
}

fn resources(node: &Node) -> (ResourceList, ResourceList) {
    let status = node.status.clone().unwrap_or_default();
    (as_texts(status.capacity), as_texts(status.allocatable))
}

fn as_texts(amounts: Option<BTreeMap<String, Text>>) -> ResourceList {
    let amounts = amounts.into_iter().flatten();
    amounts.map(|(name, amount)| (name, amount.0)).collect()
}

/// The labels that kubelet sets on its Node, with those of the configuration.
fn own_labels(config: &KubeletConfig) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::from([
        ("kubernetes.io/hostname".to_owned(), config.node.clone()),
        ("kubernetes.io/os".to_owned(), "linux".to_owned()),
        ("kubernetes.io/arch".to_owned(), "amd64".to_owned()),
    ]);
    labels.extend(config.labels.clone());
    labels
}

fn status_with(config: &KubeletConfig, resources: &ResourceList) -> Value {
    let now = Time(Timestamp::now());
    json!({
        "addresses": [{"type": "InternalIP", "address": ADDRESS}, {"type": "Hostname", "address": config.node}],
        "capacity": resources,
        "allocatable": resources,
        "conditions": [{
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "the simulated kubelet is ready",
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        }],
        "nodeInfo": {
            "machineID": config.node, "systemUUID": config.node, "bootID": config.node, "kernelVersion": "testbed",
            "osImage": "testbed", "containerRuntimeVersion": "containerd://2.4.0", "kubeletVersion": "v1.36.2", "kubeProxyVersion": "",
            "operatingSystem": "linux", "architecture": "amd64",
        },
    })
}

#[cfg(test)]
mod tests;
