//! The CDI specs of this node's containers: written when one starts, again when the directory was emptied, and removed
//! when their IDs are nobody's.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::sleep;
use tracing::{info, warn};

use crate::cdi;
use crate::identity::checkpoint::{Allocated, Checkpoint};
use crate::inject::{self, Known};
use crate::inventory::Gpu;
use crate::metrics::Outcome;
use crate::plugin::NodeState;
use crate::pods::NodePod;
use crate::served::Served;

use super::{Gate, Held, Start};

/// How often specs are compared with kubelet's checkpoint.
const INTERVAL: Duration = Duration::from_secs(60);

impl Gate {
    /// Writes the spec that the container's answer names: the runtime reads it after this.
    pub(super) fn prepare(&self, node: &NodeState, pod: &NodePod, start: &Start<'_>) -> Result<(), Held> {
        let is_other = write(node, pod, start.resource, start.ids);
        let dir = || node.settings.injection.cdi_dir.clone();
        if is_other.map_err(|source| Held::Spec { pod: pod.display_name(), dir: dir(), source })? {
            self.metrics.count(Outcome::Rewritten);
        }
        Ok(())
    }
}

/// Writes the spec for these IDs of the pod; whether there was another one.
fn write(node: &NodeState, pod: &NodePod, resource: Served, ids: &[String]) -> std::io::Result<bool> {
    let Ok(placement) = &pod.placement else { return Ok(false) };
    let Some(container) = pod.containers.iter().find(|container| resource.count(container) == ids.len() as u64) else { return Ok(false) };
    let fleet = node.fleet.borrow();
    let named = placement.gpus.iter().filter_map(|name| fleet.gpus.iter().find(|entry| name.names(&entry.gpu)));
    let gpus: Vec<&Gpu> = named.map(|entry| &entry.gpu).collect();
    let edits = inject::cdi_edits(&node.settings, &Known { pod, container, placement: Some(placement) }, resource, &gpus);
    cdi::write(&node.settings.injection.cdi_dir, &cdi::device_name(resource, ids), &edits)
}

/// Keeps the specs in step with kubelet's checkpoint until the task is dropped.
pub async fn keep_specs(node: Arc<NodeState>) {
    loop {
        {
            let pods = node.pods.borrow();
            if let Some(written) = node.checkpoint().and_then(Checkpoint::read)
                && pods.is_synced()
                && pods.exchanged().is_some()
            {
                rebuild(&node, &pods, &written);
            }
        }
        sleep(INTERVAL).await;
    }
}

fn rebuild(node: &NodeState, pods: &crate::pods::Pods, written: &[Allocated]) {
    let by_spec = |entry: &&Allocated| entry.answer.cdi_devices.iter().any(|device| device.name.starts_with(cdi::PREFIX));
    let dir = &node.settings.injection.cdi_dir;
    let mut kept = BTreeSet::new();
    for entry in written.iter().filter(by_spec) {
        kept.insert(cdi::device_name(entry.resource, &entry.ids));
        let Some(pod) = pods.get(&entry.pod) else { continue };
        if let Err(error) = write(node, pod, entry.resource, &entry.ids) {
            warn!(pod = pod.display_name(), dir = %dir.display(), %error, "cannot write a CDI spec");
        }
    }
    match cdi::clean(dir, &kept, SystemTime::now()) {
        Ok(0) => {}
        Ok(n_removed) => info!(n_removed, "removed CDI specs of containers that are gone"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => warn!(dir = %dir.display(), %error, "cannot look for CDI specs of containers that are gone"),
    }
}
