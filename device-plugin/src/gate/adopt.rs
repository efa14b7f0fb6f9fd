//! Writes a record for a pod that the scheduler did not place, where it fits.
//!
//! The scheduler charges such a pod on every device that it may be on, so a record that names some of them takes room
//! from nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use chrono::Utc;
use proto::device::TYPE_GPU;
use proto::quantity::Quantity;
use proto::record::{DeviceAllocation, GpushareRecord, Record};
use proto::resource::{GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};
use tokio::time::timeout;

use crate::exchange::annotate;
use crate::extended_resource::ExtendedResource;
use crate::identity::checkpoint::Allocated;
use crate::inventory::{Gpu, PhysicalId};
use crate::plugin::NodeState;
use crate::pods::{NodePod, Placement, PodUid, Pods, WHOLE_DEVICE_PERCENT};
use crate::proof::room;
use crate::proof::sight::{self, Sight};

use super::{Gate, Held, Start};

/// How long the record is waited for in the watch.
const SEEN_LIMIT: Duration = Duration::from_secs(5);

impl Gate {
    /// Writes a record that names the GPUs which the pod sees, or those of its device IDs; returns when it shows.
    pub(super) async fn adopt(
        &self,
        node: &NodeState,
        pod: &NodePod,
        written: &[Allocated],
        start: &Start<'_>,
    ) -> Result<(), Held> {
        let fail = |problem: String| Held::NotAdopted {
            pod: pod.display_name(),
            problem,
        };
        let record = plan(node, pod, written, start).map_err(fail)?;
        annotate(&self.client, pod, &record.annotations())
            .await
            .map_err(|error| fail(format!("{error:#}")))?;
        let mut pods = node.pods.clone();
        let is_said = |pod: &NodePod| {
            pod.placement
                .as_ref()
                .is_ok_and(|placement| placement.allocations == record.allocations)
        };
        let is_placed = |pods: &Pods| pods.get(&pod.uid).is_none_or(is_said);
        match timeout(SEEN_LIMIT, pods.wait_for(is_placed)).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(fail("its record is written and has not been seen yet".to_owned())),
        }
    }
}

fn plan(node: &NodeState, pod: &NodePod, written: &[Allocated], start: &Start<'_>) -> Result<Record, String> {
    if start.resource.device_type() != TYPE_GPU
        || pod.asks_for(ExtendedResource::Rdma)
        || pod.asks_for(ExtendedResource::Fpga)
    {
        return Err("it asks for devices other than GPUs, which only the scheduler hands out".to_owned());
    }
    let of_ids = node.devices_of(start.resource, start.ids);
    let fleet = node.fleet.borrow();
    let units = pod.memory_units();
    let n_devices = n_devices(pod);
    let gpu = |id: &PhysicalId| {
        fleet
            .gpus
            .iter()
            .map(|entry| &entry.gpu)
            .find(|gpu| gpu.uuid == *id)
            .cloned()
    };
    let mut gpus: Vec<Gpu> =
        match sight::of_pod(written, &pod.uid, &node.settings.visible_devices_env, &fleet).remove(TYPE_GPU) {
            Some(Sight::Devices(seen)) => seen.iter().filter_map(gpu).collect(),
            Some(Sight::Unclear(problem)) => return Err(problem),
            Some(Sight::Spec) | None => of_ids
                .iter()
                .take(n_devices)
                .filter_map(|key| gpu(&key.id))
                .collect(),
        };
    gpus.sort_by_key(|gpu| gpu.minor);
    if gpus.len() != n_devices {
        return Err(format!(
            "it asks for {n_devices} devices, and kubelet has given it {}",
            gpus.len()
        ));
    }
    let record = record(node, pod, &gpus, units)?;
    // As the last to come it must fit beside everybody else.
    let mut with = node.pods.borrow().clone();
    let placement = Placement::of_record(record.clone(), u64::MAX).map_err(|error| error.to_string())?;
    with.apply(NodePod {
        placement: Ok(placement),
        ..pod.clone()
    });
    let confirmed: BTreeSet<_> = {
        let ledger = node.ledger();
        with.iter()
            .map(|pod| pod.uid.clone())
            .filter(|uid| ledger.is_confirmed(uid))
            .collect()
    };
    let seen = |uid: &PodUid| match sight::of_pod(written, uid, &node.settings.visible_devices_env, &fleet)
        .remove(TYPE_GPU)
    {
        Some(Sight::Devices(gpus)) => gpus,
        _ => BTreeSet::new(),
    };
    let room = room::check(
        &with,
        &fleet,
        node.settings.memory_unit,
        |uid| confirmed.contains(uid),
        seen,
        &pod.uid,
    );
    room.map_err(|error| error.to_string())?;
    Ok(record)
}

/// The number of GPUs that a pod asks for.
pub(super) fn n_devices(pod: &NodePod) -> usize {
    if pod.memory_units() > 0 {
        1
    } else {
        usize::try_from(pod.shared().max(pod.whole())).unwrap_or(usize::MAX)
    }
}

/// The record of the pod on these GPUs, in the words of its dialect.
pub(super) fn record(node: &NodeState, pod: &NodePod, gpus: &[Gpu], units: u64) -> Result<Record, String> {
    let asked: BTreeMap<&str, u64> = pod.requests.iter().filter(|(_, amount)| *amount > 0).collect();
    let asked = |name: &str| asked.get(name).copied();
    let n_devices = gpus.len() as u64;
    let each = |amount: u64| amount.div_ceil(n_devices.max(1));
    let whole = Some(pod.whole() * WHOLE_DEVICE_PERCENT).filter(|percent| *percent > 0);
    let ratio = asked(GPU).or_else(|| asked(GPU_MEMORY_RATIO)).or(whole);
    let bytes = if units > 0 {
        node.settings.memory_unit.bytes_of(units)
    } else {
        asked(GPU_MEMORY).map(each)
    };
    if bytes.is_none() && ratio.is_none() {
        return Err("it does not say how much memory it needs".to_owned());
    }
    let device = |gpu: &Gpu| {
        let bytes = bytes.or_else(|| {
            ratio.map(|ratio| {
                u64::try_from(u128::from(gpu.memory_bytes) * u128::from(each(ratio)) / 100)
                    .unwrap_or(u64::MAX)
            })
        });
        let amounts = [
            (GPU_MEMORY, bytes),
            (GPU_MEMORY_RATIO, ratio.map(each)),
            (
                GPU_CORE,
                asked(GPU).or_else(|| asked(GPU_CORE)).or(whole).map(each),
            ),
        ];
        let resources = amounts
            .into_iter()
            .filter_map(|(name, amount)| Some((name.to_owned(), Quantity::from_unsigned(amount?))));
        DeviceAllocation {
            minor: i32::try_from(gpu.minor).unwrap_or(i32::MAX),
            resources: resources.collect(),
            id: PhysicalId::as_str(&gpu.uuid).to_owned(),
            extension: None,
        }
    };
    let gpushare = gpus.first().filter(|_| units > 0).map(|gpu| GpushareRecord {
        idx: gpu.minor,
        pod_units: units,
        device_units: node.settings.memory_unit.units_in(gpu.memory_bytes),
        assigned: false,
    });
    let now = Utc::now()
        .timestamp_nanos_opt()
        .and_then(|nanos| u64::try_from(nanos).ok());
    Ok(Record {
        allocations: [(TYPE_GPU.to_owned(), gpus.iter().map(device).collect())].into(),
        assumed_at: now,
        gpushare,
    })
}
