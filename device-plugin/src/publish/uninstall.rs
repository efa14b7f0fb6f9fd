//! Removes everything that the plugin has written on a node: CDI specs, sockets, and annotations, labels, amounts and the
//! condition of the Node. The Device object and the label by which the operator selected the node stay: the plugin has the right
//! to remove neither.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use kube::ResourceExt;
use proto::device::NODE_LABELS;
use proto::node::{CONDITION_SHARING_READY, Node};
use proto::resource::ResourceNames;
use serde_json::{Map, Value, json};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::info;

use crate::devices::extended_resource::{ExtendedResource, ExtendedResourceNames};
use crate::inject::cdi::SpecDir;
use crate::logged_error::LoggedError;
use crate::node::kubelet_checkpoint::{self, CheckpointError};
use crate::node::pods::{IN_NODE_STATUS, NodePod, NodePods};

use super::node_patches::NodeWriter;

const PAUSE: Duration = Duration::from_secs(2);

/// The prefix of gpushare's annotations.
const OWN_PREFIX: &str = "gpushare/";

/// The part of the Node that the process writes, in its log.
const REMOVAL: &str = "the removal of the plugin's fields";

/// The context of the error if a file cannot be removed.
const CANNOT_REMOVE: &str = "cannot remove files of the plugin";

/// The pods that hold devices of this node, or may get some.
pub(crate) fn holders(pods: &NodePods) -> Vec<String> {
    let mut holders: Vec<String> = pods.live().map(NodePod::display_name).collect();
    holders.sort();
    holders
}

/// The merge patch that removes annotations and labels from the node, if it has any.
pub(crate) fn metadata_patch(node: &Node, names: &ResourceNames) -> Option<Value> {
    let unit = names.memory_unit_annotation();
    let mut annotations: Vec<&str> = node.annotations().keys().map(String::as_str).collect();
    annotations.retain(|key| key.starts_with(OWN_PREFIX) || *key == unit);
    // These labels have names of Koordinator's, so only the keys that the plugin writes are removed.
    let mut labels = NODE_LABELS.to_vec();
    labels.retain(|key| node.labels().contains_key(*key));
    let mut parts = Map::new();
    add_removals(&mut parts, "annotations", &annotations);
    add_removals(&mut parts, "labels", &labels);
    (!parts.is_empty()).then(|| json!({"metadata": parts}))
}

/// The merge patch that removes these resources from the node's status, if it has any.
pub(crate) fn status_patch(node: &Node, resources: &[&str]) -> Option<Value> {
    let mut parts = Map::new();
    for (field, amounts) in [
        ("capacity", &node.status.capacity),
        ("allocatable", &node.status.allocatable),
    ] {
        let mut present = resources.to_vec();
        present.retain(|name| amounts.contains_key(*name));
        add_removals(&mut parts, field, &present);
    }
    (!parts.is_empty()).then(|| json!({"status": parts}))
}

/// The strategic merge patch that removes the plugin's condition from the node's status, if the node has it.
pub(crate) fn condition_patch(node: &Node) -> Option<Value> {
    node.sharing_condition()?;
    let removal = json!({"type": CONDITION_SHARING_READY, "$patch": "delete"});
    Some(json!({"status": {"conditions": [removal]}}))
}

fn add_removals(patch: &mut Map<String, Value>, field: &str, keys: &[&str]) {
    // null removes a key in a merge patch.
    let removals: Map<_, _> = keys.iter().map(|key| ((*key).to_owned(), Value::Null)).collect();
    if !removals.is_empty() {
        patch.insert(field.to_owned(), Value::Object(removals));
    }
}

#[derive(Debug)]
pub(crate) struct Removal {
    /// True to remove everything even while pods hold devices.
    pub(crate) now: bool,
    pub(crate) node_writer: NodeWriter,
    pub(crate) names: ExtendedResourceNames,
    pub(crate) device_plugin_dir: PathBuf,
    pub(crate) specs: SpecDir,
    pub(crate) pods: watch::Receiver<NodePods>,
    pub(crate) node: watch::Receiver<Option<Node>>,
}

impl Removal {
    /// Removes everything, sets `removed`, and then waits until the task is dropped.
    pub(crate) async fn run(self, removed: watch::Sender<bool>) {
        let mut logged = LoggedError::default();
        while let Err(obstacle) = self.attempt().await {
            logged.warn(obstacle.as_ref(), "something of the plugin is left on this node");
            sleep(PAUSE).await;
        }
        info!("nothing of the plugin is left on this node");
        removed.send_replace(true);
        std::future::pending::<()>().await;
    }

    pub(crate) async fn attempt(&self) -> anyhow::Result<()> {
        // Before anything is removed: a pod that restarts needs its CDI spec.
        if !self.now {
            let pods = self.pods.borrow();
            ensure!(pods.is_synced(), "the pods of this node are not known yet");
            let holders = holders(&pods);
            ensure!(holders.is_empty(), "pods hold devices: {}", holders.join(", "));
        }
        // A socket that answers belongs to a plugin that would write everything again.
        self.remove_sockets().await?;
        let n_removed = self.specs.remove_all().context(CANNOT_REMOVE)?;
        if n_removed > 0 {
            info!(n_removed, "removed the plugin's CDI specs");
        }
        let node = self.node.borrow().clone();
        let node = node.context("the API server has no such node")?;
        let patches = [
            metadata_patch(&node, &self.names.cluster),
            status_patch(&node, &IN_NODE_STATUS),
            condition_patch(&node),
        ];
        let mut is_clean = patches.iter().all(Option::is_none);
        for patch in patches {
            self.node_writer.write(REMOVAL, patch).await?;
        }
        let mut own = Vec::new();
        for resource in ExtendedResource::ALL {
            // The vendor's own plugin may serve whole GPUs next.
            if resource != ExtendedResource::Whole {
                own.extend(self.names.of(resource));
            }
        }
        // kubelet writes the amounts of a plugin's resources into node status again for as long as it remembers the plugin.
        let registered = match kubelet_checkpoint::registered(&self.device_plugin_dir) {
            // kubelet never removes its checkpoint, so a kubelet without one has never registered a plugin.
            Err(CheckpointError::Read(error)) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            found => found?,
        };
        let mut remembered = own.clone();
        remembered.retain(|name| registered.contains_key(*name));
        ensure!(
            remembered.is_empty(),
            "kubelet remembers the plugin until five minutes after its end: {}",
            remembered.join(", ")
        );
        let served = status_patch(&node, &own);
        is_clean &= served.is_none();
        self.node_writer.write(REMOVAL, served).await?;
        // The watch does not show these patches yet. The next attempt sees whether the node stays as they leave it.
        ensure!(is_clean, "the API server does not show the node's changes yet");
        Ok(())
    }

    /// Removes the socket files of plugin processes that have ended; an error if a process still listens on one.
    async fn remove_sockets(&self) -> anyhow::Result<()> {
        for resource in ExtendedResource::ALL {
            let socket = self.device_plugin_dir.join(resource.socket());
            match UnixStream::connect(&socket).await {
                Ok(_) => bail!("another process of the plugin serves {}", socket.display()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // The file of a socket outlives its process.
                Err(_) => std::fs::remove_file(&socket).context(CANNOT_REMOVE)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
