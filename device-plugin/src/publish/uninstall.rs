//! Removes everything that the plugin has written on a node: CDI specs, sockets, and annotations, labels, amounts and the
//! condition of the Node object. A process with the command `uninstall` does this instead of serving devices.
//!
//! The Device object and the label by which the operator selected the node stay: the plugin has the right to remove neither.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use proto::device::NODE_LABELS;
use proto::node::{CONDITION_SHARING_READY, Node};
use proto::resource::ResourceNames;
use serde_json::{Map, Value, json};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::devices::extended_resource::{ExtendedResource, ExtendedResourceNames};
use crate::inject::cdi::SpecDir;
use crate::logged_error::LoggedError;
use crate::node::api_request::within;
use crate::node::kubelet_checkpoint;
use crate::node::kubelet_checkpoint::CheckpointError;
use crate::node::pods::{IN_NODE_STATUS, NodePod, NodePods};

/// Pause between attempts.
const PAUSE: Duration = Duration::from_secs(2);

/// Longest wait for one write of the Node.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// The prefix of gpushare's annotations.
const OWN_PREFIX: &str = "gpushare/";

/// The resources whose amounts are removed; not whole GPUs, as the vendor's own plugin may serve them next.
const OWN_RESOURCES: [ExtendedResource; 4] = [
    ExtendedResource::Shared,
    ExtendedResource::Memory,
    ExtendedResource::Rdma,
    ExtendedResource::Fpga,
];

/// The context of the error if a file cannot be removed.
const CANNOT_REMOVE: &str = "cannot remove files of the plugin";

/// The pods that hold devices of this node, or may get some.
pub fn holders(pods: &NodePods) -> Vec<String> {
    let mut holders: Vec<String> = pods.live().map(NodePod::display_name).collect();
    holders.sort();
    holders
}

/// The merge patch that removes annotations and labels from the node, if it has any.
pub fn metadata_patch(node: &Node, names: &ResourceNames) -> Option<Value> {
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
pub fn status_patch(node: &Node, resources: &[&str]) -> Option<Value> {
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
pub fn condition_patch(node: &Node) -> Option<Value> {
    node.sharing_condition()?;
    let removal = json!({"type": CONDITION_SHARING_READY, "$patch": "delete"});
    Some(json!({"status": {"conditions": [removal]}}))
}

/// Adds the removal of these keys of a field to a merge patch.
fn add_removals(patch: &mut Map<String, Value>, field: &str, keys: &[&str]) {
    // null removes a key in a merge patch.
    let removals: Map<_, _> = keys.iter().map(|key| ((*key).to_owned(), Value::Null)).collect();
    if !removals.is_empty() {
        patch.insert(field.to_owned(), Value::Object(removals));
    }
}

/// Removes everything that a plugin has written on its node.
#[derive(Debug)]
pub struct Removal {
    /// True to remove everything even while pods hold devices.
    pub now: bool,
    /// The API server's nodes.
    pub nodes: Api<Node>,
    /// This node.
    pub node_name: String,
    /// The names of the resources that the plugin served.
    pub names: ExtendedResourceNames,
    /// kubelet's device plugin directory.
    pub device_plugin_dir: PathBuf,
    /// The directory of CDI specs.
    pub specs: SpecDir,
    /// The pods of this node.
    pub pods: watch::Receiver<NodePods>,
    /// This node as the API server holds it.
    pub node: watch::Receiver<Option<Node>>,
}

impl Removal {
    /// Removes everything, sets `removed`, and then waits until the task is dropped.
    pub async fn run(self, removed: watch::Sender<bool>) {
        let mut logged = LoggedError::default();
        while let Err(obstacle) = self.attempt().await {
            if let Some(reason) = logged.changed(obstacle.as_ref()) {
                warn!(
                    node = self.node_name,
                    reason, "something of the plugin is left on this node"
                );
            }
            sleep(PAUSE).await;
        }
        info!(
            node = self.node_name,
            "nothing of the plugin is left on this node"
        );
        removed.send_replace(true);
        std::future::pending::<()>().await;
    }

    /// Removes everything that can be removed now.
    ///
    /// # Errors
    /// Something is left.
    pub async fn attempt(&self) -> anyhow::Result<()> {
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
        let (metadata, amounts) = (
            metadata_patch(&node, &self.names.cluster),
            status_patch(&node, &IN_NODE_STATUS),
        );
        self.patch_node(metadata.as_ref()).await?;
        self.patch_status(amounts.as_ref()).await?;
        let condition = condition_patch(&node);
        if let Some(patch) = &condition {
            let (params, strategic) = (PatchParams::default(), Patch::Strategic(patch));
            let request = self.nodes.patch_status(&self.node_name, &params, &strategic);
            within(REQUEST_LIMIT, "remove the node's condition", request).await?;
        }
        let mut own = Vec::new();
        for resource in OWN_RESOURCES {
            own.extend(self.names.of(resource));
        }
        // kubelet writes the amounts of a plugin's resources into node status again for as long as it remembers the plugin.
        let registered = self.registered()?;
        let mut remembered = own.clone();
        remembered.retain(|name| registered.contains_key(*name));
        ensure!(
            remembered.is_empty(),
            "kubelet remembers the plugin until five minutes after its end: {}",
            remembered.join(", ")
        );
        let served = status_patch(&node, &own);
        self.patch_status(served.as_ref()).await?;
        // The watch does not show these patches yet. The next attempt sees whether the node stays as they leave it.
        ensure!(
            metadata.or(amounts).or(condition).or(served).is_none(),
            "the API server does not show the node's changes yet"
        );
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

    /// The resources that a plugin has registered with kubelet, with their device IDs.
    fn registered(&self) -> Result<BTreeMap<String, Vec<String>>, CheckpointError> {
        match kubelet_checkpoint::registered(&self.device_plugin_dir) {
            // kubelet never removes its checkpoint, so a kubelet without one has never registered a plugin.
            Err(CheckpointError::Read(error)) if error.kind() == io::ErrorKind::NotFound => {
                Ok(BTreeMap::new())
            }
            found => found,
        }
    }

    /// Sends a merge patch of the Node, if it needs one.
    async fn patch_node(&self, patch: Option<&Value>) -> anyhow::Result<()> {
        let Some(patch) = patch else { return Ok(()) };
        let (params, merge) = (PatchParams::default(), Patch::Merge(patch));
        let request = self.nodes.patch(&self.node_name, &params, &merge);
        within(REQUEST_LIMIT, "change the node", request).await?;
        info!(%patch, "changed the node");
        Ok(())
    }

    /// Sends a merge patch of the Node's status, if it needs one.
    async fn patch_status(&self, patch: Option<&Value>) -> anyhow::Result<()> {
        let Some(patch) = patch else { return Ok(()) };
        let (params, merge) = (PatchParams::default(), Patch::Merge(patch));
        let request = self.nodes.patch_status(&self.node_name, &params, &merge);
        within(REQUEST_LIMIT, "change the node", request).await?;
        info!(%patch, "changed the node");
        Ok(())
    }
}

#[cfg(test)]
mod tests;
