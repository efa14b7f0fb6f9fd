//! Tells the API server what this node has: memory unit, node status and Device object.
//!
//! Each of the three is a pure function of devices, pods and what the API server holds already, and
//! is written only when that differs. Failures are tried again with backoff; kubelet never waits
//! for any of this.

pub mod device_object;
pub mod node_status;
pub mod node_watch;
pub mod unit;

use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use proto::device::Device;
use proto::memory_unit::MemoryUnit;
use proto::node::Node;
use proto::resource::ResourceNames;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use crate::fleet::Fleet;
use crate::pods::{Pods, Requests};
use crate::watching::one_line;

/// Who writes, as the API server records it.
pub const FIELD_MANAGER: &str = "gpushare-device-plugin";

/// How long one request may take.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Changes that come together are published together.
const SETTLE: Duration = Duration::from_millis(100);

/// How often the Device object is applied again although nothing changed here: somebody may have deleted it.
const REPEAT: Duration = Duration::from_secs(300);

/// Pauses after failures, doubled each time.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// A request to the API server that failed.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// It was answered with an error, or not at all.
    #[error("cannot write {what}")]
    Request {
        /// What was to be written.
        what: &'static str,
        /// What went wrong.
        #[source]
        source: Box<kube::Error>,
    },
    /// No answer in time.
    #[error("cannot write {what}: no answer within {REQUEST_LIMIT:?}")]
    Slow {
        /// What was to be written.
        what: &'static str,
    },
}

/// Publishes what it is told by watches.
#[derive(Debug)]
pub struct Publisher {
    nodes: Api<Node>,
    devices: Api<Device>,
    node_name: String,
    names: ResourceNames,
    memory_unit: MemoryUnit,
    fleet: watch::Receiver<Arc<Fleet>>,
    pods: watch::Receiver<Pods>,
    node: watch::Receiver<Option<Node>>,
    /// The Device object as it was last written; none makes the publisher look first.
    published: Option<Device>,
    /// When the Device object was last written.
    applied_at: Option<Instant>,
}

/// Where a [`Publisher`] learns what to publish.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The devices and their health.
    pub fleet: watch::Receiver<Arc<Fleet>>,
    /// The pods of this node.
    pub pods: watch::Receiver<Pods>,
    /// This node as the API server holds it.
    pub node: watch::Receiver<Option<Node>>,
}

impl Publisher {
    /// Publishes for the node of this name.
    pub fn new(client: &Client, node_name: String, names: ResourceNames, memory_unit: MemoryUnit, sources: Sources) -> Self {
        let Sources { fleet, pods, node } = sources;
        Self {
            nodes: Api::all(client.clone()),
            devices: Api::all(client.clone()),
            node_name,
            names,
            memory_unit,
            fleet,
            pods,
            node,
            published: None,
            applied_at: None,
        }
    }

    /// Publishes until the task is dropped.
    pub async fn run(mut self) {
        let mut pause = PAUSES.0;
        loop {
            match self.publish().await {
                Ok(()) => {
                    pause = PAUSES.0;
                    self.changed().await;
                    sleep(SETTLE).await;
                }
                Err(error) => {
                    warn!(error = one_line(&error), "publishing is tried again");
                    // What has changed since may be what kept it from succeeding, but is not worth a storm.
                    sleep(SETTLE).await;
                    let _ = timeout(pause, self.changed()).await;
                    pause = (pause * 2).min(PAUSES.1);
                }
            }
        }
    }

    /// Returns when there may be something new to publish.
    async fn changed(&mut self) {
        let repeat = self.applied_at.unwrap_or_else(Instant::now) + REPEAT;
        tokio::select! {
            _ = self.fleet.changed() => {}
            _ = self.pods.changed() => {}
            _ = self.node.changed() => {}
            () = sleep_until(repeat) => {}
        }
    }

    /// Writes whatever differs. Does nothing as long as this node or its pods are not known.
    async fn publish(&mut self) -> Result<(), PublishError> {
        let fleet = Arc::clone(&self.fleet.borrow_and_update());
        let requests = {
            let pods = self.pods.borrow_and_update();
            pods.is_synced().then(|| node_status::requests(&pods))
        };
        let Some(node) = self.node.borrow_and_update().clone() else { return Ok(()) };
        // The unit comes first: nobody may have to guess it. What fails keeps nothing else from being written.
        let unit = self.publish_unit(&node).await;
        let device = self.publish_device(&fleet, &node).await;
        let status = match requests {
            Some(requests) => self.publish_status(&fleet, requests, &node).await,
            None => Ok(()),
        };
        unit.and(device).and(status)
    }

    async fn publish_unit(&self, node: &Node) -> Result<(), PublishError> {
        let Some(patch) = unit::patch(node, &self.names, self.memory_unit) else { return Ok(()) };
        self.patch_node("the memory unit", &patch, false).await?;
        info!(unit = %self.memory_unit, "published the memory unit");
        Ok(())
    }

    async fn publish_status(&self, fleet: &Fleet, requests: Requests, node: &Node) -> Result<(), PublishError> {
        let values = fleet.offers().max(requests);
        let Some(patch) = node_status::patch(node, values) else { return Ok(()) };
        self.patch_node("node status", &patch, true).await?;
        info!(%values, "published node status");
        Ok(())
    }

    async fn patch_node(&self, what: &'static str, patch: &Value, is_status: bool) -> Result<(), PublishError> {
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        if is_status {
            within(what, self.nodes.patch_status(&self.node_name, &params, &patch)).await?;
        } else {
            within(what, self.nodes.patch(&self.node_name, &params, &patch)).await?;
        }
        Ok(())
    }

    async fn publish_device(&mut self, fleet: &Fleet, node: &Node) -> Result<(), PublishError> {
        const WHAT: &str = "the Device object";
        let before = match self.published.take() {
            Some(before) => Some(before),
            None => within(WHAT, self.devices.get_opt(&self.node_name)).await?,
        };
        let wanted = device_object::device(fleet, node, before.as_ref(), Utc::now());
        let is_fresh = self.applied_at.is_some_and(|applied| applied.elapsed() < REPEAT);
        let is_same = before.as_ref().is_some_and(|before| device_object::is_same(before, &wanted));
        if is_fresh && is_same {
            self.published = before;
            return Ok(());
        }
        let params = PatchParams::apply(FIELD_MANAGER).force();
        within(WHAT, self.devices.patch(&self.node_name, &params, &Patch::Apply(&wanted))).await?;
        info!(n_devices = wanted.spec.devices.len(), "published the Device object");
        self.published = Some(wanted);
        self.applied_at = Some(Instant::now());
        Ok(())
    }
}

async fn within<T>(what: &'static str, request: impl Future<Output = kube::Result<T>>) -> Result<T, PublishError> {
    let answer = timeout(REQUEST_LIMIT, request).await.map_err(|_| PublishError::Slow { what })?;
    answer.map_err(|source| PublishError::Request { what, source: Box::new(source) })
}

#[cfg(test)]
mod tests;
