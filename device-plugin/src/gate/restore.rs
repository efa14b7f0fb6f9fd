//! Writes the record of a running pod again after somebody has removed its annotations or made them unreadable.
//!
//! Without record the scheduler counts a pod on every device that it may be on. A pod that no scheduler placed has no record
//! either, and gets none here: no plugin lets its containers start, so it does not run with an answer of this plugin.

use proto::device::TYPE_GPU;
use proto::record::{GPU_DEVICES, Record};
use tracing::{debug, warn};

use crate::exchange::annotate;
use crate::extended_resource::ExtendedResource;
use crate::identity::checkpoint::Allocated;
use crate::inventory::Gpu;
use crate::metrics::Outcome;
use crate::plugin::NodeState;
use crate::pods::{NodePod, Placement, Stage};
use crate::proof::sight::{Sight, Sights};
use crate::proof::verdict::{Evidence, Refusal, Verdict};

use super::specs::device_of;
use super::{Gate, adopt};

impl Gate {
    /// Writes the record into the pod's annotations.
    pub(super) async fn restore(&self, pod: &NodePod, record: &Record) {
        let name = pod.display_name();
        match annotate(&self.client, pod, &record.annotations()).await {
            Ok(()) => {
                self.metrics.count(Outcome::Recorded);
                let text = "annotations of its record were removed or cannot be read; they say again what its containers have";
                self.recorder.warn(pod, "GPUMismatch", text.to_owned());
                warn!(
                    pod = name,
                    "the annotations of a running pod's record were removed or cannot be read; they are there again"
                );
            }
            Err(error) => {
                debug!(pod = name, error = %format!("{error:#}"), "a record is written again later");
            }
        }
    }
}

/// Whether a container with this answer has run while its pod had a record: the pod runs, and the answer is of a plugin that
/// lets no other container start.
pub(super) fn has_run_placed(pod: &NodePod, entry: &Allocated) -> bool {
    let is_ours = device_of(&entry.answer).is_some() || entry.answer.envs.contains_key(GPU_DEVICES);
    pod.stage == Stage::Running && pod.placement.is_err() && is_ours
}

/// The record of a pod whose annotations do not have all of it any more: what they said before, if that fits what its
/// containers see, else a record of what they see. `was_placed` says that all of them started with a record.
pub(super) fn removed_record(
    node: &NodeState,
    evidence: &Evidence<'_>,
    pod: &NodePod,
    seen: &Sights,
    was_placed: bool,
) -> Option<Record> {
    let lost = evidence
        .pods
        .lost(&pod.uid)
        .filter(|lost| is_as_seen(evidence, pod, lost, seen));
    if let Some(lost) = lost {
        return Some(lost.to_record());
    }
    if pod.placement.is_ok() || pod.sees_all || !was_placed {
        return None;
    }
    let Some(Sight::Devices(uuids)) = seen.get(TYPE_GPU) else {
        return None;
    };
    // Amounts of other devices cannot be told from what a container sees.
    if pod.asks_for(ExtendedResource::Rdma) || pod.asks_for(ExtendedResource::Fpga) {
        return None;
    }
    let gpus: Vec<Gpu> = evidence
        .fleet
        .gpus
        .iter()
        .map(|entry| &entry.gpu)
        .filter(|gpu| uuids.contains(&gpu.uuid))
        .cloned()
        .collect();
    let is_whole = gpus.len() == adopt::n_devices(pod);
    is_whole
        .then(|| adopt::record(node, pod, &gpus, pod.memory_units()).ok())
        .flatten()
}

/// Whether the pod's containers see what this record says. Whether there is room for it is no question: they run.
fn is_as_seen(evidence: &Evidence<'_>, pod: &NodePod, record: &Placement, seen: &Sights) -> bool {
    let recorded = NodePod {
        placement: Ok(record.clone()),
        ..pod.clone()
    };
    let verdict = evidence.judge(&recorded, seen);
    matches!(
        verdict,
        Verdict::Confirm | Verdict::Refuse(Refusal::NoRoom(_) | Refusal::Unavailable(_))
    )
}
