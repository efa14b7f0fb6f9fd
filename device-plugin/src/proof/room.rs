//! Whether a pod still fits on the devices of its record: the node's own sum, in case that nobody else's was right.
//!
//! Counts what pods hold whose containers have been let start, then the others in the order in which they were assumed:
//! of two pods that do not fit together the later one waits.

use std::collections::BTreeMap;

use proto::device::TYPE_GPU;
use proto::memory_unit::MemoryUnit;

use crate::fleet::{DeviceKey, Fleet, FleetDevice, type_name};
use crate::inventory::GpuUuid;
use crate::pods::{NodePod, PodUid, Pods, Stage, WHOLE_DEVICE_PERCENT};

/// A device has no room for the pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} {device} has no room for it: {before} of {total} {what} are held by pods that came before, and it asks for {asked}",
    type_name(device_type)
)]
pub struct NoRoom {
    device_type: &'static str,
    /// The device.
    pub device: GpuUuid,
    what: &'static str,
    before: u64,
    total: u64,
    asked: u64,
}

/// What is held of one device.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    bytes: u64,
    core: u64,
    /// Percent of a device that is no GPU.
    percent: u64,
    /// Each holder's bytes may have been rounded up by one.
    n_holders: u64,
}

/// What a pod holds of one device, and what the device has.
#[derive(Clone, Debug)]
struct Share<'a> {
    device: &'a GpuUuid,
    device_type: &'static str,
    held: Sum,
    total: Sum,
}

/// Whether the pod fits beside all that came before it.
///
/// # Errors
/// The first device that it does not fit on.
pub fn check(pods: &Pods, fleet: &Fleet, unit: MemoryUnit, is_started: impl Fn(&PodUid) -> bool, uid: &PodUid) -> Result<(), NoRoom> {
    let mut held = BTreeMap::<&GpuUuid, Sum>::new();
    let has_started = |pod: &NodePod| pod.stage == Stage::Running || is_started(&pod.uid);
    let mut order: Vec<&NodePod> = pods.iter().filter(|pod| pod.stage != Stage::Terminal && pod.placement.is_ok()).collect();
    order.sort_by_key(|pod| (!has_started(pod), pod.assumed_at(), pod.uid.clone()));
    for pod in order {
        let shares = shares(pod, fleet, unit);
        let refusal = shares.iter().find_map(|share| share.no_room(held.get(share.device).copied().unwrap_or_default()));
        if pod.uid == *uid {
            return refusal.map_or(Ok(()), Err);
        }
        if refusal.is_none() || has_started(pod) {
            for share in shares {
                let sum = held.entry(share.device).or_default();
                sum.bytes = sum.bytes.saturating_add(share.held.bytes);
                sum.core = sum.core.saturating_add(share.held.core);
                sum.percent = sum.percent.saturating_add(share.held.percent);
                sum.n_holders += 1;
            }
        }
    }
    Ok(())
}

impl Share<'_> {
    /// Why there is no room for it beside what is held of the device before, if there is none.
    fn no_room(&self, before: Sum) -> Option<NoRoom> {
        let Self { device, device_type, held, total } = self;
        let exceeds = |before: u64, asked: u64, total: u64| asked > 0 && before.saturating_add(asked) > total;
        let refuse = |what, before, total, asked| Some(NoRoom { device_type, device: (*device).clone(), what, before, total, asked });
        if exceeds(before.bytes, held.bytes, total.bytes.saturating_add(before.n_holders + 1)) {
            return refuse("bytes of memory", before.bytes, total.bytes, held.bytes);
        }
        if exceeds(before.core, held.core, total.core) {
            return refuse("percent of computing power", before.core, total.core, held.core);
        }
        if exceeds(before.percent, held.percent, total.percent) {
            return refuse("percent", before.percent, total.percent, held.percent);
        }
        None
    }
}

/// What the pod holds of each device of this node that its record names.
fn shares<'a>(pod: &NodePod, fleet: &'a Fleet, unit: MemoryUnit) -> Vec<Share<'a>> {
    let Ok(placement) = &pod.placement else { return Vec::new() };
    let gpus = placement.gpus.iter().zip(&placement.held).filter_map(|(name, held)| {
        let gpu = &fleet.gpus.iter().find(|entry| name.names(&entry.gpu))?.gpu;
        let units = placement.gpushare.map_or(0, |record| record.pod_units).max(pod.memory_units());
        let bytes = held.bytes_of(gpu.memory_bytes).unwrap_or_else(|| units.saturating_mul(unit.bytes()));
        let held = Sum { bytes, core: held.core, ..Sum::default() };
        let total = Sum { bytes: gpu.memory_bytes, core: WHOLE_DEVICE_PERCENT, ..Sum::default() };
        Some(Share { device: &gpu.uuid, device_type: TYPE_GPU, held, total })
    });
    let others = placement.others.iter().flat_map(|(device_type, others)| {
        others.names.iter().zip(&others.held).filter_map(|(name, portion)| {
            let find = |entry: &&FleetDevice| name.is(&DeviceKey::from(&entry.device));
            let device = &fleet.devices_of(device_type).find(find)?.device;
            let percent = |percent: u64| Sum { percent, ..Sum::default() };
            let (held, total) = (percent(portion.percent), percent(device.percent().unwrap_or(WHOLE_DEVICE_PERCENT)));
            Some(Share { device: &device.id, device_type, held, total })
        })
    });
    gpus.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders::{fleet, pod, pods, units};

    fn refused(all: Vec<NodePod>, started: &[&str]) -> Vec<String> {
        let pods = pods(all);
        let is_started = |uid: &PodUid| started.contains(&uid.as_str());
        let refused = pods.iter().filter(|pod| check(&pods, &fleet(2), MemoryUnit::GIB, is_started, &pod.uid).is_err());
        refused.map(|pod| pod.name.clone()).collect()
    }

    #[test]
    fn the_later_pod_waits_unless_it_has_started() {
        let all = || vec![pod("a", 1, [units(10)]), pod("b", 2, [units(10)]), pod("c", 3, [units(6)]), pod("d", 4, [units(16)]).on([1])];
        assert_eq!(refused(all(), &[]), ["b"]);
        assert_eq!(refused(all(), &["b"]), ["a"]);
        assert_eq!(refused(all(), &["a", "b"]), ["b", "c"], "what runs counts, fit or not");
    }

    #[test]
    fn the_words_name_what_is_missing() {
        let pods = pods([pod("a", 1, [units(10)]), pod("b", 2, [units(7)])]);
        let error = check(&pods, &fleet(1), MemoryUnit::GIB, |_| false, &PodUid::from("b")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "GPU GPU-00000000-aaaa-bbbb-cccc-000000000000 has no room for it: 10737418240 of 17179869184 bytes of memory are held by pods \
             that came before, and it asks for 7516192768"
        );
    }
}
