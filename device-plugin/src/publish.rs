//! Publishes this node's devices: the Device object, and in the Node the size of a memory unit, labels, amounts and a condition;
//! each is written only if the stored object differs, and again with backoff after a failure. kubelet never waits for this.
//!
//! This folder also has the gauges, the memory in use, events about health, and the devices that [other plugins](vendor) have
//! allocated. [`uninstall`] removes all that the plugin has written.

pub mod application_faults;
pub mod corrections;
pub mod device_object;
pub mod health_reaction;
pub mod memory_use;
pub mod node_gauges;
pub mod node_overrides;
pub mod node_patches;
pub mod own_objects;
pub mod partitions;
pub mod plugin_state;
pub mod pods_without_devices;
pub mod report_problem;
pub mod uninstall;
pub mod vendor;

use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use daemon::api_server::{Backoff, Connection, one_line};
use daemon::events::{EventType, Recorder};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use proto::device::{Device, DeviceSpec, RawDevice};
use proto::kubelet_allocations::{DEVICES_CHECKPOINTS, KubeletAllocations};
use proto::memory_unit::MemoryUnit;
use proto::node::Node;
use proto::plugin_reports::PODS_WITHOUT_DEVICES;
use proto::resource::ResourceNames;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::devices::fleet::NodeFleet;
use crate::devices::fleet::watch::sleep_until_some;
use crate::inject::enforcement::Enforcements;
use crate::inject::mode::Injection;
use crate::node::api_request::{ApiRequestError, within};
use crate::node::pods::NodePods;

use device_object::DeviceObjectInputs;
use node_overrides::NodeOverrides;
use node_patches::{Absence, NodeWriter};
use own_objects::StoredDevice;
use report_problem::ReportProblem;

/// The field manager of the plugin's writes.
pub(crate) const FIELD_MANAGER: &str = "gpushare-device-plugin";

/// Longest wait for the answer to one request to the API server.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Changes within this time are published together.
const SETTLE: Duration = Duration::from_millis(100);

/// Delay before another writer's change of the Device object is undone: writers that disagree must not keep the API server busy.
const UNDO_DELAY: Duration = Duration::from_secs(10);

/// The shortest and the longest pause after a failure.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

#[derive(Clone, Debug)]
pub(crate) struct PublisherSettings {
    pub(crate) node_name: String,
    pub(crate) names: ResourceNames,
    pub(crate) memory_unit: MemoryUnit,
    /// The inputs of the Device object that do not change.
    pub(crate) device: DeviceObjectInputs,
}

#[derive(Clone, Debug)]
pub(crate) struct PublisherInputs {
    pub(crate) fleet: watch::Receiver<Arc<NodeFleet>>,
    pub(crate) pods: watch::Receiver<NodePods>,
    pub(crate) node: watch::Receiver<Option<Node>>,
    pub(crate) device: watch::Receiver<StoredDevice>,
    /// The devices of pods that gpushare's scheduler did not place; `None` until they are known.
    pub(crate) kubelet_allocations: watch::Receiver<Option<KubeletAllocations>>,
    pub(crate) overrides: watch::Receiver<Arc<NodeOverrides>>,
    /// The injection mode (`cdi` or `envvar`); `None` until it is decided.
    pub(crate) injection: watch::Receiver<Option<Injection>>,
    /// The enforcement level of memory limits on each GPU; empty until the levels are decided.
    pub(crate) enforcements: watch::Receiver<Arc<Enforcements>>,
    /// The report on pods whose requests or allocation records name devices and that have none; `None` until it is known.
    pub(crate) pods_without_devices: watch::Receiver<Option<String>>,
    /// The reason for which this node has no devices; `None` if it has some.
    pub(crate) absence: watch::Receiver<Option<Absence>>,
}

impl PublisherInputs {
    /// Waits until an input has changed, or until `undo_at`, when another writer's change of the Device object may be undone.
    async fn changed(&mut self, undo_at: Option<Instant>) {
        tokio::select! {
            _ = self.fleet.changed() => {}
            _ = self.pods.changed() => {}
            _ = self.node.changed() => {}
            _ = self.device.changed() => {}
            _ = self.kubelet_allocations.changed() => {}
            _ = self.overrides.changed() => {}
            // A node without devices has no task that decides or reports these: their channels are closed from the start.
            Ok(()) = self.pods_without_devices.changed() => {}
            Ok(()) = self.injection.changed() => {}
            Ok(()) = self.enforcements.changed() => {}
            // Once devices are found, the reason of their absence never changes again.
            Ok(()) = self.absence.changed() => {}
            () = sleep_until_some(undo_at) => {}
        }
    }
}

/// The task that publishes the Device object and the plugin's part of the Node.
#[derive(Debug)]
pub(crate) struct NodePublisher {
    node_writer: NodeWriter,
    devices: Api<Device>,
    recorder: Recorder,
    backoff: Backoff,
    settings: PublisherSettings,
    inputs: PublisherInputs,
    /// The Device object as last written, and the time of that write.
    applied: Option<(Device, Instant)>,
    /// The time at which the plugin may undo another writer's change of the Device object.
    undo_at: Option<Instant>,
}

impl NodePublisher {
    pub(crate) fn new(
        connection: &Connection,
        recorder: Recorder,
        settings: PublisherSettings,
        inputs: PublisherInputs,
    ) -> Self {
        let Connection { client, contact } = connection;
        Self {
            node_writer: NodeWriter::new(client.clone(), settings.node_name.clone()),
            devices: Api::all(client.clone()),
            recorder,
            backoff: contact.backoff(PAUSES),
            settings,
            inputs,
            applied: None,
            undo_at: None,
        }
    }

    /// Publishes now, at each change of the inputs, and again after a failure, until the task is dropped.
    pub(crate) async fn run(mut self) {
        loop {
            match self.publish().await {
                Ok(()) => {
                    self.backoff.reset();
                    self.inputs.changed(self.undo_at).await;
                    // Changes come in groups, such as the failure of all GPUs, and one write has them all.
                    sleep(SETTLE).await;
                }
                Err(error) => {
                    warn!(error = one_line(&error), "publishing is tried again");
                    // A change may be the cure, but many changes must not become as many requests.
                    sleep(SETTLE).await;
                    tokio::select! {
                        () = self.backoff.pause() => {}
                        () = self.inputs.changed(self.undo_at) => {}
                    }
                }
            }
        }
    }

    /// Writes the parts of the Node and its Device object that differ; nothing until the watch shows the Node.
    async fn publish(&mut self) -> Result<(), ApiRequestError> {
        let fleet = Arc::clone(&self.inputs.fleet.borrow_and_update());
        let requested = {
            let pods = self.inputs.pods.borrow_and_update();
            // Until all pods are known the sum would be too small, and a kubelet that restarts would refuse running pods.
            pods.is_synced().then(|| node_patches::requested(&pods))
        };
        let stored = self.inputs.device.borrow_and_update().clone();
        // The Device object has the Node's UID as its owner, so there is nothing to write before the Node is known.
        let Some(node) = self.inputs.node.borrow_and_update().clone() else {
            return Ok(());
        };
        let wanted = self.wanted_device(&fleet, &node, &stored);
        // The unit comes first, because no reader should have to guess it. The other parts are written even if this write fails.
        let unit = node_patches::memory_unit(&node, &self.settings.names, self.settings.memory_unit);
        let mut outcome = self.node_writer.write("the memory unit", unit).await;
        let absence = self.inputs.absence.borrow_and_update().clone();
        let condition = node_patches::condition(&node, absence.as_ref(), Utc::now());
        outcome = outcome.and(self.node_writer.write("the node's condition", condition).await);
        if !fleet.is_health_loaded {
            // The Device object may name errors of an earlier process that are not loaded yet.
            return outcome;
        }
        let labels = node_patches::labels(&node, wanted.labels());
        outcome = outcome.and(self.node_writer.write("node labels", labels).await);
        let offered = node_patches::offered(&wanted.spec.devices);
        // The revision makes kube-scheduler try refused pods again, so it waits until the stored object is the wanted one.
        if let Some(object) = stored.object()
            && device_object::matches(object, &wanted)
        {
            let revision = node_patches::revision(&node, object);
            let part = "the revision of the Device object";
            outcome = outcome.and(self.node_writer.write(part, revision).await);
        }
        outcome = outcome.and(self.publish_device(wanted, &stored).await);
        // kubelet admits running pods again when it restarts, and must not refuse them because a device is unhealthy.
        let amounts = requested.and_then(|pods| node_patches::status_amounts(&node, offered.max(pods)));
        outcome.and(self.node_writer.write("node status", amounts).await)
    }

    fn wanted_device(&mut self, fleet: &NodeFleet, node: &Node, stored: &StoredDevice) -> Device {
        let stored = stored.object();
        // Until an annotation is known, that of an earlier process stands: without it the scheduler would count devices as free.
        let stored_annotation = |key| stored?.annotations().get(key).cloned();
        let overrides = Arc::clone(&self.inputs.overrides.borrow_and_update());
        let allocations = self.inputs.kubelet_allocations.borrow_and_update().clone();
        let kubelet_allocations = match &allocations {
            Some(known) => known.annotation(),
            None => stored_annotation(DEVICES_CHECKPOINTS),
        };
        // The scheduler reads another program's annotation only where this plugin's is absent.
        let by_other_program = stored
            .filter(|_| kubelet_allocations.is_none())
            .and_then(|stored| KubeletAllocations::read_gpu_checkpoints(stored.annotations()));
        let report_problem =
            ReportProblem::find(fleet, &overrides, allocations.as_ref(), by_other_program.as_ref());
        let report = self.inputs.pods_without_devices.borrow_and_update().clone();
        let before = self.spec_before(stored);
        let inputs = DeviceObjectInputs {
            kubelet_allocations,
            overrides,
            injection: self.inputs.injection.borrow_and_update().clone(),
            enforcements: Arc::clone(&self.inputs.enforcements.borrow_and_update()),
            pods_without_devices: report.or_else(|| stored_annotation(PODS_WITHOUT_DEVICES)),
            report_problem,
            ..self.settings.device.clone()
        };
        inputs.device(fleet, node, before.as_ref(), Utc::now())
    }

    /// The devices in the last write of this process, else in the stored object.
    fn spec_before(&self, stored: Option<&RawDevice>) -> Option<DeviceSpec> {
        // The watch may not show the last write yet, whose conditions have the right transition times.
        match &self.applied {
            Some((device, _)) => Some(device.spec.clone()),
            None => stored?.read().ok(),
        }
    }

    /// Writes the Device object if it must change, and undoes changes of other writers after a delay.
    async fn publish_device(&mut self, wanted: Device, stored: &StoredDevice) -> Result<(), ApiRequestError> {
        self.undo_at = None;
        let is_right = match stored {
            // Without the stored object the transition times of its conditions would be lost.
            StoredDevice::Unknown => return Ok(()),
            StoredDevice::Absent => false,
            StoredDevice::Present(object) => device_object::matches(object, &wanted),
        };
        if let Some((device, at)) = &self.applied
            && *device == wanted
        {
            if is_right {
                return Ok(());
            }
            // The watch may show the object of before this plugin's own write.
            if at.elapsed() < UNDO_DELAY {
                self.undo_at = Some(*at + UNDO_DELAY);
                return Ok(());
            }
        }
        // The plugin owns these fields, whichever manager wrote them last.
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(&wanted);
        let request = self.devices.patch(&self.settings.node_name, &params, &patch);
        within(REQUEST_LIMIT, "write the Device object", request).await?;
        let n_devices = wanted.spec.devices.len();
        info!(n_devices, "published the Device object");
        let before = self.spec_before(stored.object());
        if let Some(problem) = report_problem::event(before.as_ref(), &wanted.spec) {
            warn!(problem, "a part of this node's report is not valid");
            self.recorder
                .node(EventType::Warning, report_problem::EVENT, problem);
        }
        self.applied = Some((wanted, Instant::now()));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
