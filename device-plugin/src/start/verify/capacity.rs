//! Checks that a pod fits on the devices that its annotations record, by a sum of the plugin's, whatever the scheduler counted.
//!
//! The sum begins with the pods whose containers have started, then adds the other pods in the order in which the scheduler
//! assumed them: of two pods that do not fit together the later one waits. If a record gives a pod less of a GPU than the pod
//! requests, the request counts; but the memory in the record of a pod that runs counts as it is, and so does that of a record in
//! other memory units than the node's. Of other devices the record alone counts. A pod that runs without a record holds the
//! amounts that it requests, on each GPU that it sees.

use std::collections::{BTreeMap, BTreeSet};

use proto::device::TYPE_GPU;
use proto::memory_text::memory_text;
use proto::memory_unit::MemoryUnit;
use proto::resource::{GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{DeviceKey, NodeFleet, type_name};
use crate::devices::inventory::{Gpu, PhysicalId};
use crate::node::pods::{
    NodePod, NodePods, Placement, PodStage, PodUid, RecordedAmounts, WHOLE_DEVICE_PERCENT,
};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} {device} has no room for it: {} of {} {what} are held by pods that came before, and it requests {}, {} too much; delete the pod to \
     reschedule it",
    type_name(device_type),
    shown(what, *before),
    shown(what, *total),
    shown(what, *requested),
    shown(what, before.saturating_add(*requested).saturating_sub(*total))
)]
pub(crate) struct NoCapacity {
    device_type: &'static str,
    pub(crate) device: PhysicalId,
    what: &'static str,
    before: u64,
    total: u64,
    requested: u64,
}

/// Names of the amounts that a device can lack, for the text of [`NoCapacity`].
const AMOUNTS: [&str; 4] = [
    MEMORY,
    "percent of computing power",
    "percent",
    "places for sharers",
];
/// The first of [`AMOUNTS`].
const MEMORY: &str = "of memory";

/// An amount for people: memory in GiB or MiB.
fn shown(what: &str, amount: u64) -> String {
    if what == MEMORY {
        memory_text(amount)
    } else {
        amount.to_string()
    }
}

/// Amounts of one device: those of a pod, of several pods together, or of the whole device.
#[derive(Clone, Copy, Debug, Default)]
struct DeviceAmounts {
    bytes: u64,
    core: u64,
    /// Percent of a device that is no GPU.
    percent: u64,
    /// Pods that share the device.
    slots: u64,
    /// The number of pods that these amounts are the sum of, each perhaps rounded up by one byte.
    n_holders: u64,
}

/// The amounts that a pod holds of one device, and those that the device has.
#[derive(Clone, Debug)]
struct PodShare<'a> {
    device: &'a PhysicalId,
    device_type: &'static str,
    held: DeviceAmounts,
    total: DeviceAmounts,
}

/// Checks that the pod `uid` fits beside all pods that come before it. `may_have_started` is true for a pod whose containers may
/// run although the API server does not show that, and `visible_gpus` returns the GPUs that a pod sees, as far as they are known.
pub(crate) fn check(
    pods: &NodePods,
    fleet: &NodeFleet,
    unit: MemoryUnit,
    may_have_started: impl Fn(&PodUid) -> bool,
    visible_gpus: impl Fn(&PodUid) -> BTreeSet<PhysicalId>,
    uid: &PodUid,
) -> Result<(), NoCapacity> {
    let mut held = BTreeMap::<&PhysicalId, DeviceAmounts>::new();
    let may_run = |pod: &NodePod| pod.stage == PodStage::Running || may_have_started(&pod.uid);
    let is_counted = |pod: &&NodePod| pod.placement.is_ok() || pod.stage == PodStage::Running;
    let mut order: Vec<&NodePod> = pods.live().filter(is_counted).collect();
    // A container that runs cannot be refused any more, so started pods come first; the others in the scheduler's order.
    order.sort_by_cached_key(|pod| (!may_run(pod), pod.assumed_at(), &pod.uid));
    for pod in order {
        let mut shares = recorded_shares(pod, fleet, unit);
        if pod.placement.is_err() {
            let seen = visible_gpus(&pod.uid);
            for gpu in seen.iter().filter_map(|uuid| fleet.gpu(uuid)) {
                let requested = requested_amounts(pod, gpu, seen.len(), unit);
                shares.push(gpu_share(gpu, fleet, requested));
            }
        }
        let refusal = shares
            .iter()
            .find_map(|share| share.shortage(held.get(share.device).copied().unwrap_or_default()));
        if pod.uid == *uid {
            return refusal.map_or(Ok(()), Err);
        }
        // A pod that does not fit waits and holds nothing; one that has started holds its devices, fit or not.
        if refusal.is_none() || may_run(pod) {
            for share in shares {
                held.entry(share.device).or_default().add(share.held);
            }
        }
    }
    Ok(())
}

impl DeviceAmounts {
    fn add(&mut self, held: Self) {
        self.bytes = self.bytes.saturating_add(held.bytes);
        self.core = self.core.saturating_add(held.core);
        self.percent = self.percent.saturating_add(held.percent);
        self.slots = self.slots.saturating_add(held.slots);
        self.n_holders += 1;
    }

    /// The amounts in the order of [`AMOUNTS`].
    fn each(self) -> [u64; AMOUNTS.len()] {
        [self.bytes, self.core, self.percent, self.slots]
    }
}

impl PodShare<'_> {
    /// The first amount that the device lacks for the pod, beside the amounts that earlier pods hold of the device (`before`).
    fn shortage(&self, before: DeviceAmounts) -> Option<NoCapacity> {
        let limit = DeviceAmounts {
            // The bytes of each pod may have been rounded up by one.
            bytes: self.total.bytes.saturating_add(before.n_holders + 1),
            ..self.total
        };
        let amounts = self.held.each().into_iter().zip(before.each()).zip(limit.each());
        for ((what, total), ((requested, before), limit)) in
            AMOUNTS.into_iter().zip(self.total.each()).zip(amounts)
        {
            // A request for nothing fits a device that is full.
            if requested > 0 && before.saturating_add(requested) > limit {
                return Some(NoCapacity {
                    device_type: self.device_type,
                    device: self.device.clone(),
                    what,
                    before,
                    total,
                    requested,
                });
            }
        }
        None
    }
}

/// A pod's share of each device that its allocation record names. Devices that this node does not have are left out.
fn recorded_shares<'a>(pod: &'a NodePod, fleet: &'a NodeFleet, unit: MemoryUnit) -> Vec<PodShare<'a>> {
    let Ok(placement) = &pod.placement else {
        return Vec::new();
    };
    let mut shares = Vec::new();
    for (idx, (name, held)) in (0..).zip(placement.gpus.iter().zip(&placement.held)) {
        // The verification refuses the start of a pod whose record names a device that is not here.
        let Some(gpu) = fleet.gpu_named(name) else {
            continue;
        };
        let requested = requested_amounts(pod, gpu, placement.gpus.len(), unit);
        let amounts = DeviceAmounts {
            bytes: recorded_bytes(pod, placement, held, gpu, requested.bytes, unit),
            core: held.core.max(requested.core),
            // A pod that sees all GPUs of its node takes as many slots as it requests shares.
            slots: u64::from(idx < pod.peak(ExtendedResource::Shared)),
            ..requested
        };
        shares.push(gpu_share(gpu, fleet, amounts));
    }
    for (device_type, others) in &placement.others {
        for (name, held) in others.names.iter().zip(&others.held) {
            let mut devices = fleet.devices_of(device_type);
            if let Some(entry) = devices.find(|entry| name.is(&DeviceKey::from(&entry.device))) {
                shares.push(PodShare {
                    device: &entry.device.id,
                    device_type,
                    held: percent_alone(held.percent),
                    total: percent_alone(entry.device.percent().unwrap_or(WHOLE_DEVICE_PERCENT)),
                });
            }
        }
        for device in others.held.iter().flat_map(|held| &held.virtual_functions) {
            // One pod holds a virtual function.
            let one = DeviceAmounts {
                slots: 1,
                ..DeviceAmounts::default()
            };
            shares.push(PodShare {
                device,
                device_type,
                held: one,
                total: one,
            });
        }
    }
    shares
}

/// Amounts of a device that is no GPU, of which pods hold a percentage and nothing else.
fn percent_alone(percent: u64) -> DeviceAmounts {
    DeviceAmounts {
        percent,
        ..DeviceAmounts::default()
    }
}

/// The memory that a pod holds: the larger of record (`held`) and request, or the record's if that may be in other units.
fn recorded_bytes(
    pod: &NodePod,
    placement: &Placement,
    held: &RecordedAmounts,
    gpu: &Gpu,
    requested: u64,
    unit: MemoryUnit,
) -> u64 {
    let recorded = held.bytes_of(gpu.memory_bytes);
    // A record in units of another size than the node's holds the same part of the GPU as when it was written. It counts the
    // units of the whole GPU, an older one with the memory that the driver reserves.
    let known = [gpu.memory_bytes, gpu.memory_with_reserved()].map(|bytes| unit.units_in(bytes));
    let in_other_unit = match placement.gpushare {
        Some(record) if record.device_units > 0 && !known.contains(&record.device_units) => {
            Some(scaled(gpu.memory_bytes, record.pod_units, record.device_units))
        }
        _ => None,
    };
    match recorded.or(in_other_unit) {
        // The request is computed with the node's present unit, which may be another one than when the pod was placed.
        Some(recorded) if in_other_unit.is_some() || pod.stage == PodStage::Running => recorded,
        recorded => requested.max(recorded.unwrap_or(0)),
    }
}

/// A pod's share of a GPU: the amounts in `held`, beside what the GPU has in all.
fn gpu_share<'a>(gpu: &'a Gpu, fleet: &NodeFleet, held: DeviceAmounts) -> PodShare<'a> {
    // Reserved memory counts as capacity here, so that a record which was written before the operator reserved it stays valid.
    let total = DeviceAmounts {
        bytes: gpu.memory_with_reserved(),
        core: WHOLE_DEVICE_PERCENT,
        slots: u64::from(fleet.ids.slots()),
        ..DeviceAmounts::default()
    };
    PodShare {
        device: &gpu.uuid,
        device_type: TYPE_GPU,
        held,
        total,
    }
}

/// The amounts that the pod's spec requests of one of its `n_gpus` GPUs.
fn requested_amounts(pod: &NodePod, gpu: &Gpu, n_gpus: usize, unit: MemoryUnit) -> DeviceAmounts {
    let n_gpus = u64::try_from(n_gpus).unwrap_or(u64::MAX).max(1);
    let (mut bytes, mut core) = (pod.peak(ExtendedResource::Memory).saturating_mul(unit.bytes()), 0);
    for (name, amount) in pod.requests.iter() {
        // In one division, as the percentage of each of several GPUs need not be a whole number. It rounds down by less than the
        // byte that `PodShare::shortage` allows for.
        let ratio = scaled(
            gpu.memory_bytes,
            amount,
            n_gpus.saturating_mul(WHOLE_DEVICE_PERCENT),
        );
        let each = amount.div_ceil(n_gpus);
        match name {
            GPU => (bytes, core) = (bytes.max(ratio), core.max(each)),
            GPU_MEMORY_RATIO => bytes = bytes.max(ratio),
            GPU_MEMORY => bytes = bytes.max(each),
            GPU_CORE => core = core.max(each),
            _ => {}
        }
    }
    // A whole GPU is all of its memory and computing power, whatever else the pod requests.
    if pod.peak(ExtendedResource::Whole) > 0 {
        (bytes, core) = (bytes.max(gpu.memory_bytes), core.max(WHOLE_DEVICE_PERCENT));
    }
    DeviceAmounts {
        bytes,
        core,
        slots: u64::from(pod.peak(ExtendedResource::Shared) > 0),
        ..DeviceAmounts::default()
    }
}

/// `total * numerator / denominator`, rounded down; the largest number if that overflows or the denominator is 0.
fn scaled(total: u64, numerator: u64, denominator: u64) -> u64 {
    let product = u128::from(total) * u128::from(numerator);
    product
        .checked_div(u128::from(denominator))
        .and_then(|part| u64::try_from(part).ok())
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::builders::{adapter, fleet, gpu, pod, pods, rdma, shares as shared, units};

    fn refused(all: Vec<NodePod>, started: &[&str]) -> Vec<String> {
        let pods = pods(all);
        let is_started = |uid: &PodUid| started.contains(&uid.as_str());
        let seen = |_: &PodUid| BTreeSet::from([gpu(0).uuid]);
        let refused = pods
            .iter()
            .filter(|pod| check(&pods, &fleet(2), MemoryUnit::GIB, is_started, seen, &pod.uid).is_err());
        refused.map(|pod| pod.name.clone()).collect()
    }

    #[test]
    fn the_later_pod_waits_unless_it_has_started() {
        let all = || {
            vec![
                pod("a", 1, [units(10)]),
                pod("b", 2, [units(10)]),
                pod("c", 3, [units(6)]),
                pod("d", 4, [units(16)]).on([1]),
            ]
        };
        assert_eq!(refused(all(), &[]), ["b"]);
        assert_eq!(refused(all(), &["b"]), ["a"]);
        assert_eq!(
            refused(all(), &["a", "b"]),
            ["b", "c"],
            "what runs counts, fit or not"
        );
    }

    /// By hand, or by a scheduler that knows other requests.
    #[test]
    fn a_record_below_the_request_is_charged_as_the_request() {
        let mut small = pod("small", 2, [units(10)]);
        small.placement.as_mut().unwrap().held[0].bytes = Some(1);
        assert_eq!(
            refused(vec![pod("a", 1, [units(10)]), small.clone()], &[]),
            ["small"]
        );
        // The GPU had 32 units when it was written and has 16 now: one was half of what it is.
        let record = small.placement.as_mut().unwrap();
        (
            record.held[0].bytes,
            record.gpushare.as_mut().unwrap().device_units,
        ) = (Some(5 << 30), 32);
        assert!(refused(vec![pod("a", 1, [units(10)]), small], &[]).is_empty());
    }

    #[test]
    fn a_record_of_the_old_extender_keeps_its_share() {
        let mut old = pod("old", 2, [units(10)]);
        let record = old.placement.as_mut().unwrap().gpushare.as_mut().unwrap();
        (record.pod_units, record.device_units) = (10, 32);
        assert!(refused(vec![pod("a", 1, [units(11)]), old.clone()], &[]).is_empty());
        assert_eq!(refused(vec![pod("a", 1, [units(12)]), old], &[]), ["old"]);
    }

    /// It started before this plugin was installed.
    #[test]
    fn a_running_pod_without_a_record_holds_its_visible_devices() {
        let unrecorded_pod = || pod("unrecorded_pod", 0, [units(10)]).unplaced();
        let running = unrecorded_pod().at(PodStage::Running);
        assert_eq!(refused(vec![running, pod("a", 1, [units(10)])], &[]), ["a"]);
        assert!(
            refused(vec![unrecorded_pod(), pod("a", 1, [units(10)])], &[]).is_empty(),
            "it has not started"
        );
    }

    #[test]
    fn slots_of_a_gpu_are_limited() {
        let all: Vec<NodePod> = (0..101)
            .map(|at| pod(&format!("p{at:03}"), at, [shared(1)]))
            .collect();
        assert_eq!(refused(all, &[]), ["p100"]);
    }

    /// As many pods as an adapter has functions share it, one each; and who has one may have no other's.
    #[test]
    fn a_virtual_function_has_one_pod() {
        let with = |name: &str, at: u64, function: &str| {
            pod(name, at, [rdma(1)]).on_function(at, &adapter(1), function)
        };
        let all = || {
            vec![
                with("a", 1, "0000:01:00.2"),
                with("b", 2, "0000:01:00.3"),
                with("c", 3, "0000:01:00.2"),
            ]
        };
        assert_eq!(refused(all(), &[]), ["c"]);
        assert_eq!(refused(all(), &["c"]), ["a"]);
    }

    /// `--reserved-memory=withhold` is added on a node whose GPU is full: the containers of its pods may start again.
    #[test]
    fn records_stay_valid_when_memory_is_withheld_later() {
        let mut withheld = fleet(1);
        withheld.gpus[0].device.reserved_bytes = 450 << 20;
        withheld.gpus[0].device.memory_bytes -= 450 << 20;
        let mut full = pod("full", 1, [units(16)]);
        full.placement.as_mut().unwrap().held[0].bytes = Some(16 << 30);
        let all = pods([full, pod("late", 2, [units(1)])]);
        let room = |name: &str| {
            check(
                &all,
                &withheld,
                MemoryUnit::GIB,
                |_| false,
                |_| BTreeSet::new(),
                &PodUid::from(name),
            )
        };
        assert!(room("full").is_ok() && room("late").is_err());
    }

    #[test]
    fn the_error_names_the_amounts() {
        let pods = pods([pod("a", 1, [units(10)]), pod("b", 2, [units(7)])]);
        let error = check(
            &pods,
            &fleet(1),
            MemoryUnit::GIB,
            |_| false,
            |_| BTreeSet::new(),
            &PodUid::from("b"),
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "GPU GPU-00000000-aaaa-bbbb-cccc-000000000000 has no room for it: 10 GiB of 16 GiB of memory are held by pods that came \
             before, and it requests 7 GiB, 1 GiB too much; delete the pod to reschedule it"
        );
    }
}
