//! Writes records (the annotations that name a pod's devices) for pods that have none: for a pod that the scheduler did not
//! place, if it fits on the devices that it has, and for a running pod whose annotations were removed or made unreadable.
//!
//! The scheduler charges a pod without record on every device that it may be on, so a record that names some of these devices
//! takes capacity from no other pod.

use std::time::Duration;

use chrono::Utc;
use daemon::api_server::one_line;
use kube::Client;
use proto::device::TYPE_GPU;
use proto::quantity::Quantity;
use proto::record::{DeviceAllocation, GPU_DEVICES, GpushareRecord, Record};
use proto::resource::{GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};
use tokio::time::timeout;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::NodeFleet;
use crate::devices::inventory::{Gpu, PhysicalId};
use crate::inject::cdi::device_of;
use crate::node::kubelet_checkpoint::Allocated;
use crate::node::pods::annotate::annotate;
use crate::node::pods::{NodePod, NodePods, Placement, PodStage, RecordedAmounts, WHOLE_DEVICE_PERCENT};
use crate::start::node_state::NodeState;
use crate::start::verify::container::StartingContainer;
use crate::start::verify::{StartEvidence, StartRefusal, Visible, VisibleByType, visible_to_pod};

/// Longest wait for the written allocation record to appear in the watch.
const SEEN_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
#[error(
    "pod {pod} was not placed by gpushare-scheduler and cannot be adopted: {problem}; delete the pod to reschedule it"
)]
pub(crate) struct NotAdopted {
    pod: String,
    problem: String,
}

/// Writes an allocation record of the GPUs that the pod sees, else of those of its device IDs; returns when the watch shows it.
pub(super) async fn adopt(
    node: &NodeState,
    client: &Client,
    starting: &StartingContainer<'_>,
    allocated: &[Allocated],
) -> Result<(), NotAdopted> {
    let pod = &starting.pod;
    let not_adopted = |problem: String| NotAdopted {
        pod: pod.display_name(),
        problem,
    };
    let record = adopted_record(node, starting, allocated).map_err(not_adopted)?;
    let written = annotate(client, pod, &record.annotations()).await;
    written.map_err(|error| not_adopted(one_line(&error)))?;
    // The verification after this goes by the record that the watch shows.
    let mut pods = node.pods.clone();
    let is_shown = |pods: &NodePods| match pods.get(&pod.uid).map(|pod| &pod.placement) {
        Some(Ok(placement)) => placement.allocations == record.allocations,
        Some(Err(_)) => false,
        // The pod is gone, and there is nothing to wait for.
        None => true,
    };
    match timeout(SEEN_LIMIT, pods.wait_for(is_shown)).await {
        Ok(Ok(_)) => Ok(()),
        _ => Err(not_adopted(
            "its record is written, and the watch does not show it yet".to_owned(),
        )),
    }
}

/// The record for a pod that the scheduler did not place, if the pod fits on the devices that it has.
fn adopted_record(
    node: &NodeState,
    starting: &StartingContainer<'_>,
    allocated: &[Allocated],
) -> Result<Record, String> {
    let StartingContainer { pod, resource, .. } = starting;
    if resource.device_type() != TYPE_GPU || asks_for_other_types(pod) {
        return Err("it requests devices other than GPUs, which only the scheduler assigns".to_owned());
    }
    let of_ids = node.devices_of(*resource, starting.ids);
    let n_gpus = n_requested_gpus(pod);
    let fleet = node.fleet.borrow();
    let gpus = match visible_to_pod(allocated, &pod.uid, &fleet).remove(TYPE_GPU) {
        Some(Visible::Devices(seen)) => known_gpus(&fleet, seen.iter()),
        Some(Visible::Unclear(problem)) => return Err(problem),
        // The spec is not written yet, so the device IDs that kubelet happened to take may decide.
        Some(Visible::BySpec) | None => known_gpus(&fleet, of_ids.iter().take(n_gpus).map(|key| &key.id)),
    };
    if gpus.len() != n_gpus {
        return Err(format!(
            "it requests {n_gpus} devices, and kubelet has allocated {}",
            gpus.len()
        ));
    }
    let record = new_record(node, pod, &gpus)?;
    // With the latest assume time (that of the scheduler's choice) the pod comes after all others in the capacity check.
    let placement = Placement::of_record(record.clone(), u64::MAX).map_err(|error| error.to_string())?;
    // In a copy: other starts must not count on a record that is not written yet.
    let mut pods = node.pods.borrow().clone();
    pods.apply(NodePod {
        placement: Ok(placement),
        ..pod.clone()
    });
    let log = node.log();
    let evidence = StartEvidence::new(&pods, &fleet, &log, allocated, node.settings.memory_unit);
    match evidence.check_capacity(&pod.uid) {
        Ok(()) => Ok(record),
        Err(error) => Err(error.to_string()),
    }
}

fn asks_for_other_types(pod: &NodePod) -> bool {
    pod.asks_for(ExtendedResource::Rdma) || pod.asks_for(ExtendedResource::Fpga)
}

/// The GPUs with these UUIDs that this node has, sorted by minor number.
fn known_gpus<'a>(fleet: &NodeFleet, uuids: impl Iterator<Item = &'a PhysicalId>) -> Vec<Gpu> {
    let mut gpus: Vec<Gpu> = uuids.filter_map(|uuid| fleet.gpu(uuid)).cloned().collect();
    gpus.sort_by_key(|gpu| gpu.minor);
    gpus
}

/// The number of GPUs that a pod requests at once: one for memory units, else as many as shares or whole GPUs.
fn n_requested_gpus(pod: &NodePod) -> usize {
    let others = pod
        .peak(ExtendedResource::Shared)
        .max(pod.peak(ExtendedResource::Whole));
    // Memory units of a pod are of one GPU.
    let has_units = pod.peak(ExtendedResource::Memory) > 0;
    if has_units {
        1
    } else {
        usize::try_from(others).unwrap_or(usize::MAX)
    }
}

/// The allocation record of the pod on these GPUs. With memory units it has the annotations of the old gpushare extender too.
fn new_record(node: &NodeState, pod: &NodePod, gpus: &[Gpu]) -> Result<Record, String> {
    let n_gpus = gpus.len() as u64;
    // The pod's request is for all its GPUs together, and no GPU may hold less than its part.
    let each = |amount: u64| amount.div_ceil(n_gpus.max(1));
    let units = pod.peak(ExtendedResource::Memory);
    let n_whole = pod.peak(ExtendedResource::Whole);
    let whole = (n_whole > 0).then_some(n_whole.saturating_mul(WHOLE_DEVICE_PERCENT));
    // `koordinator.sh/gpu` stands for the same percentage of memory and of computing power.
    let of_both = pod.requests.get(GPU);
    let ratio = of_both.or(pod.requests.get(GPU_MEMORY_RATIO)).or(whole).map(each);
    let core = of_both.or(pod.requests.get(GPU_CORE)).or(whole).map(each);
    let bytes = if units > 0 {
        node.settings.memory_unit.bytes_of(units)
    } else {
        pod.requests.get(GPU_MEMORY).map(each)
    };
    if bytes.is_none() && ratio.is_none() {
        return Err("it does not say how much memory it needs".to_owned());
    }
    let mut devices = Vec::new();
    for gpu in gpus {
        let held = RecordedAmounts {
            bytes,
            ratio,
            ..RecordedAmounts::default()
        };
        let amounts = [
            (GPU_MEMORY, held.bytes_of(gpu.memory_bytes)),
            (GPU_MEMORY_RATIO, ratio),
            (GPU_CORE, core),
        ];
        let mut device = DeviceAllocation {
            minor: i32::try_from(gpu.minor).unwrap_or(i32::MAX),
            id: gpu.uuid.to_string(),
            ..DeviceAllocation::default()
        };
        for (name, amount) in amounts {
            if let Some(amount) = amount {
                let quantity = Quantity::from_unsigned(amount);
                device.resources.insert(name.to_owned(), quantity);
            }
        }
        devices.push(device);
    }
    let gpushare = match gpus {
        [gpu, ..] if units > 0 => Some(GpushareRecord {
            idx: gpu.minor,
            pod_units: units,
            device_units: node.settings.memory_unit.units_in(gpu.memory_bytes),
            // The task in `assigned` marks the pod once kubelet has given it all of its devices.
            assigned: false,
        }),
        _ => None,
    };
    let now = Utc::now().timestamp_nanos_opt();
    Ok(Record {
        allocations: [(TYPE_GPU.to_owned(), devices)].into(),
        assumed_at: now.and_then(|nanos| u64::try_from(nanos).ok()),
        gpushare,
    })
}

/// True if this container started with a record that its running pod has lost since: this plugin requires one for a start.
pub(super) fn started_with_record(pod: &NodePod, entry: &Allocated) -> bool {
    let is_ours = device_of(&entry.answer).is_some() || entry.answer.envs.contains_key(GPU_DEVICES);
    pod.stage == PodStage::Running && pod.placement.is_err() && is_ours
}

/// The record to restore for a pod whose annotations have lost all or a part of it: the lost one if the pod's containers see its
/// devices, else one of the devices that they see. `was_placed` is true if all of them started with a record: a running pod that
/// no scheduler placed gets none here.
pub(super) fn removed_record(
    node: &NodeState,
    evidence: &StartEvidence<'_>,
    pod: &NodePod,
    seen: &VisibleByType,
    was_placed: bool,
) -> Option<Record> {
    if let Some(lost) = evidence.pods.lost_record(&pod.uid)
        && sees_devices_of(evidence, pod, lost, seen)
    {
        return Some(lost.to_record());
    }
    // The amounts of other devices do not follow from the devices that a container sees.
    if pod.placement.is_ok() || pod.sees_all || !was_placed || asks_for_other_types(pod) {
        return None;
    }
    let Some(Visible::Devices(uuids)) = seen.get(TYPE_GPU) else {
        return None;
    };
    let gpus = known_gpus(evidence.fleet, uuids.iter());
    if gpus.len() == n_requested_gpus(pod) {
        new_record(node, pod, &gpus).ok()
    } else {
        None
    }
}

/// True if the pod's containers see the devices of this allocation record. As they run, capacity and health do not matter.
fn sees_devices_of(
    evidence: &StartEvidence<'_>,
    pod: &NodePod,
    record: &Placement,
    seen: &VisibleByType,
) -> bool {
    let recorded = NodePod {
        placement: Ok(record.clone()),
        ..pod.clone()
    };
    matches!(
        evidence.verify(&recorded, seen),
        Ok(()) | Err(StartRefusal::NoCapacity(_) | StartRefusal::Unavailable(_))
    )
}
