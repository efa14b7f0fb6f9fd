//! Tells the API server what this node has: memory unit, labels, node status and Device object.
//!
//! Each of them is a pure function of devices, pods and what the API server holds already, and
//! is written only when that differs. Failures are tried again with backoff; kubelet never waits
//! for any of this.

pub mod additions;
pub mod device_object;
pub mod device_watch;
pub mod labels;
pub mod node_status;
pub mod node_watch;
pub mod partitions;
pub mod state;
pub mod unit;
pub mod wake;
pub mod without_devices;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use daemon::api_server::{Backoff, Connection, one_line};
use kube::Api;
use kube::api::{Patch, PatchParams};
use proto::device::Device;
use proto::kubelet_allocations::{DEVICES_CHECKPOINTS, KubeletAllocations};
use proto::memory_unit::MemoryUnit;
use proto::node::Node;
use proto::plugin_reports::PODS_WITHOUT_DEVICES;
use proto::resource::ResourceNames;
use proto::topology::GpuPartitionPolicy;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use crate::fleet::Fleet;
use crate::injection::Injection;
use crate::pods::{Pods, Requests};

use additions::Additions;
use device_object::Remarks;
use device_watch::Held;

/// Who writes, as the API server records it.
pub const FIELD_MANAGER: &str = "gpushare-device-plugin";

/// How long one request may take.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Changes that come together are published together.
const SETTLE: Duration = Duration::from_millis(100);

/// How long what somebody else wrote into the Device object, or its deletion, stands after we wrote it: two that write
/// different things must not keep the API server busy, and our own write is seen a moment later only.
const UNDO: Duration = Duration::from_secs(10);

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

/// What is the same for the life of the process.
#[derive(Clone, Debug)]
pub struct Facts {
    /// This node.
    pub node_name: String,
    /// The cluster's resource names.
    pub names: ResourceNames,
    /// Bytes of a memory unit.
    pub memory_unit: MemoryUnit,
    /// Whether this plugin serves a vendor's resource too.
    pub serves_vendor: bool,
    /// What partitions of GPUs are for, if the operator says it.
    pub partition_policy: Option<GpuPartitionPolicy>,
    /// The boot of this node, if the kernel names it.
    pub boot_id: Option<String>,
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
    /// The Device object as the API server holds it.
    pub device: watch::Receiver<Held>,
    /// The devices of pods that somebody else placed; none as long as that is not known.
    pub checkpoints: watch::Receiver<Option<KubeletAllocations>>,
    /// What the operator says of the devices.
    pub additions: watch::Receiver<Arc<Additions>>,
    /// The way in which containers get their devices; none until that is decided.
    pub injection: watch::Receiver<Option<Injection>>,
    /// The pods that have no device; `None` as long as that is not known, or if containers start unguarded.
    pub without_devices: watch::Receiver<Option<String>>,
}

/// Publishes what it is told by watches.
#[derive(Debug)]
pub struct Publisher {
    nodes: Api<Node>,
    devices: Api<Device>,
    backoff: Backoff,
    facts: Facts,
    sources: Sources,
    /// The Device object as it was last written.
    applied: Option<(Device, Instant)>,
    /// When somebody else's change of the Device object may be undone.
    undo_at: Option<Instant>,
}

impl Publisher {
    /// Publishes what `sources` tell.
    pub fn new(connection: &Connection, facts: Facts, sources: Sources) -> Self {
        let Connection { client, contact } = connection;
        let (nodes, devices) = (Api::all(client.clone()), Api::all(client.clone()));
        Self {
            nodes,
            devices,
            backoff: contact.backoff(PAUSES),
            facts,
            sources,
            applied: None,
            undo_at: None,
        }
    }

    /// Publishes until the task is dropped.
    pub async fn run(mut self) {
        loop {
            match self.publish().await {
                Ok(()) => {
                    self.backoff.reset();
                    changed(&mut self.sources, self.undo_at).await;
                    sleep(SETTLE).await;
                }
                Err(error) => {
                    warn!(error = one_line(&error), "publishing is tried again");
                    // What has changed since may be what kept it from succeeding, but is not worth a storm.
                    sleep(SETTLE).await;
                    tokio::select! {
                        () = self.backoff.pause() => {}
                        () = changed(&mut self.sources, self.undo_at) => {}
                    }
                }
            }
        }
    }

    /// Writes whatever differs. Does nothing as long as this node or its pods are not known.
    async fn publish(&mut self) -> Result<(), PublishError> {
        let fleet = Arc::clone(&self.sources.fleet.borrow_and_update());
        let requests = {
            let pods = self.sources.pods.borrow_and_update();
            pods.is_synced().then(|| node_status::requests(&pods))
        };
        let held = self.sources.device.borrow_and_update().clone();
        let Some(node) = self.sources.node.borrow_and_update().clone() else {
            return Ok(());
        };
        let wanted = self.wanted(&fleet, &node, &held);
        // The unit comes first: nobody may have to guess it. What fails keeps nothing else from being written.
        let unit = self.publish_unit(&node).await;
        if !fleet.is_health_loaded {
            // The Device object may hold what an earlier process saw, and this one does not know yet.
            return unit;
        }
        let labels = self.publish_labels(&wanted, &node).await;
        let offers = node_status::offers(&wanted.spec.devices);
        let wake = self.wake_scheduler(&wanted, &held, &node).await;
        let device = self.publish_device(wanted, &held).await;
        let status = match requests {
            Some(requests) => self.publish_status(offers.max(requests), &node).await,
            None => Ok(()),
        };
        unit.and(labels).and(wake).and(device).and(status)
    }

    async fn publish_unit(&self, node: &Node) -> Result<(), PublishError> {
        let unit = self.facts.memory_unit;
        let Some(patch) = unit::patch(node, &self.facts.names, unit) else {
            return Ok(());
        };
        self.patch_node("the memory unit", &patch, false).await?;
        info!(%unit, "published the memory unit");
        Ok(())
    }

    async fn publish_labels(&self, wanted: &Device, node: &Node) -> Result<(), PublishError> {
        let Some(patch) = labels::patch(node, wanted.metadata.labels.as_ref().unwrap_or(&BTreeMap::new()))
        else {
            return Ok(());
        };
        self.patch_node("node labels", &patch, false).await?;
        info!(%patch, "published node labels");
        Ok(())
    }

    async fn publish_status(&self, values: Requests, node: &Node) -> Result<(), PublishError> {
        let Some(patch) = node_status::patch(node, values) else {
            return Ok(());
        };
        self.patch_node("node status", &patch, true).await?;
        info!(%values, "published node status");
        Ok(())
    }

    /// Touches the node once the API server has shown everybody the Device object as it is to be.
    async fn wake_scheduler(&self, wanted: &Device, held: &Held, node: &Node) -> Result<(), PublishError> {
        let Held::Object(shown) = held else { return Ok(()) };
        if !device_object::says(shown, wanted) {
            return Ok(());
        }
        let Some(patch) = wake::patch(node, shown) else {
            return Ok(());
        };
        self.patch_node("what wakes kube-scheduler", &patch, false).await
    }

    async fn patch_node(
        &self,
        what: &'static str,
        patch: &Value,
        is_status: bool,
    ) -> Result<(), PublishError> {
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        if is_status {
            within(
                what,
                self.nodes.patch_status(&self.facts.node_name, &params, &patch),
            )
            .await?;
        } else {
            within(what, self.nodes.patch(&self.facts.node_name, &params, &patch)).await?;
        }
        Ok(())
    }

    /// The Device object as it should be.
    fn wanted(&mut self, fleet: &Fleet, node: &Node, held: &Held) -> Device {
        let held = match held {
            Held::Object(held) => Some(held),
            Held::Unknown | Held::Nothing => None,
        };
        let checkpoints = match &*self.sources.checkpoints.borrow_and_update() {
            Some(known) => known.annotation(),
            // What was written before this process began is better than nothing, which would free those devices.
            None => held.and_then(|held| {
                held.metadata
                    .annotations
                    .as_ref()?
                    .get(DEVICES_CHECKPOINTS)
                    .cloned()
            }),
        };
        let before = match &self.applied {
            Some((device, _)) => Some(device.spec.clone()),
            None => held.and_then(|held| held.read().ok()),
        };
        let additions = Arc::clone(&self.sources.additions.borrow_and_update());
        let Facts {
            serves_vendor,
            partition_policy,
            ..
        } = self.facts;
        let injection = self.sources.injection.borrow_and_update().clone();
        let boot_id = self.facts.boot_id.clone();
        // An annotation that an earlier process wrote stays true.
        let written = held.and_then(|held| {
            held.metadata
                .annotations
                .as_ref()?
                .get(PODS_WITHOUT_DEVICES)
                .cloned()
        });
        let without_devices = self
            .sources
            .without_devices
            .borrow_and_update()
            .clone()
            .or(written);
        let remarks = Remarks {
            checkpoints,
            serves_vendor,
            additions,
            partition_policy,
            injection,
            boot_id,
            without_devices,
        };
        device_object::device(fleet, node, &remarks, before.as_ref(), Utc::now())
    }

    /// Writes the Device object if it is to say something new, and puts right what somebody else wrote, but not all the time.
    async fn publish_device(&mut self, wanted: Device, held: &Held) -> Result<(), PublishError> {
        self.undo_at = None;
        let is_right = match held {
            Held::Unknown => return Ok(()),
            Held::Nothing => false,
            Held::Object(held) => device_object::says(held, &wanted),
        };
        if let Some((device, at)) = &self.applied
            && *device == wanted
        {
            if is_right {
                return Ok(());
            }
            if at.elapsed() < UNDO {
                self.undo_at = Some(*at + UNDO);
                return Ok(());
            }
        }
        let params = PatchParams::apply(FIELD_MANAGER).force();
        within(
            "the Device object",
            self.devices
                .patch(&self.facts.node_name, &params, &Patch::Apply(&wanted)),
        )
        .await?;
        info!(
            n_devices = wanted.spec.devices.len(),
            "published the Device object"
        );
        let additions = self.sources.additions.borrow().clone();
        if let Some(minor) = additions
            .partitions
            .as_ref()
            .and_then(|table| partitions::stranger(&self.sources.fleet.borrow(), table))
        {
            warn!(
                minor,
                "--gpu-partitions is of no use here: it names a GPU that this node does not have"
            );
        }
        self.applied = Some((wanted, Instant::now()));
        Ok(())
    }
}

/// Returns when there may be something new to publish, or at `undo_at`.
async fn changed(sources: &mut Sources, undo_at: Option<Instant>) {
    let undo = async move {
        match undo_at {
            Some(moment) => sleep_until(moment).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = sources.fleet.changed() => {}
        _ = sources.pods.changed() => {}
        _ = sources.node.changed() => {}
        _ = sources.device.changed() => {}
        _ = sources.checkpoints.changed() => {}
        _ = sources.additions.changed() => {}
        Ok(()) = sources.without_devices.changed() => {}
        // Where nothing decides, as on a node without devices, there is nothing to wait for.
        Ok(()) = sources.injection.changed() => {}
        () = undo => {}
    }
}

async fn within<T>(
    what: &'static str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, PublishError> {
    let answer = timeout(REQUEST_LIMIT, request)
        .await
        .map_err(|_| PublishError::Slow { what })?;
    answer.map_err(|source| PublishError::Request {
        what,
        source: Box::new(source),
    })
}

#[cfg(test)]
mod tests;
