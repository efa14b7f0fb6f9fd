//! Whether a pod still fits on the devices of its record: the node's own sum, in case that nobody else's was right.
//!
//! Counts what pods hold whose containers have been let start, then the others in the order in which they were assumed:
//! of two pods that do not fit together the later one waits. A record that says less than its pod asks for is not believed,
//! unless the node counted in other units when it was written; a pod that runs without a record holds what it asks for of
//! the GPUs that it sees.

use std::collections::{BTreeMap, BTreeSet};

use proto::device::TYPE_GPU;
use proto::memory_unit::MemoryUnit;
use proto::resource::{GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};

use crate::fleet::{DeviceKey, Fleet, FleetDevice, type_name};
use crate::inventory::{Gpu, PhysicalId};
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
    pub device: PhysicalId,
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
    /// Places for sharers.
    slots: u64,
    /// Each holder's bytes may have been rounded up by one.
    n_holders: u64,
}

/// What a pod holds of one device, and what the device has.
#[derive(Clone, Debug)]
struct Share<'a> {
    device: &'a PhysicalId,
    device_type: &'static str,
    held: Sum,
    total: Sum,
}

/// Whether the pod fits beside all that came before it. `seen` tells which GPUs a pod sees, if that is known.
///
/// # Errors
/// The first device that it does not fit on.
pub fn check(
    pods: &Pods,
    fleet: &Fleet,
    unit: MemoryUnit,
    is_started: impl Fn(&PodUid) -> bool,
    seen: impl Fn(&PodUid) -> BTreeSet<PhysicalId>,
    uid: &PodUid,
) -> Result<(), NoRoom> {
    let mut held = BTreeMap::<&PhysicalId, Sum>::new();
    let has_started = |pod: &NodePod| pod.stage == Stage::Running || is_started(&pod.uid);
    let counts = |pod: &&NodePod| {
        pod.stage != Stage::Terminal && (pod.placement.is_ok() || pod.stage == Stage::Running)
    };
    let mut order: Vec<&NodePod> = pods.iter().filter(counts).collect();
    order.sort_by_cached_key(|pod| (!has_started(pod), pod.assumed_at(), &pod.uid));
    for pod in order {
        let shares = if pod.placement.is_ok() {
            shares(pod, fleet, unit)
        } else {
            unrecorded(pod, fleet, unit, &seen(&pod.uid))
        };
        let refusal = shares
            .iter()
            .find_map(|share| share.no_room(held.get(share.device).copied().unwrap_or_default()));
        if pod.uid == *uid {
            return refusal.map_or(Ok(()), Err);
        }
        if refusal.is_none() || has_started(pod) {
            for share in shares {
                let sum = held.entry(share.device).or_default();
                sum.bytes = sum.bytes.saturating_add(share.held.bytes);
                sum.core = sum.core.saturating_add(share.held.core);
                sum.percent = sum.percent.saturating_add(share.held.percent);
                sum.slots = sum.slots.saturating_add(share.held.slots);
                sum.n_holders += 1;
            }
        }
    }
    Ok(())
}

impl Share<'_> {
    /// Why there is no room for it beside what is held of the device before, if there is none.
    fn no_room(&self, before: Sum) -> Option<NoRoom> {
        let Self {
            device,
            device_type,
            held,
            total,
        } = self;
        let exceeds = |before: u64, asked: u64, total: u64| asked > 0 && before.saturating_add(asked) > total;
        let refuse = |what, before, total, asked| {
            Some(NoRoom {
                device_type,
                device: (*device).clone(),
                what,
                before,
                total,
                asked,
            })
        };
        if exceeds(
            before.bytes,
            held.bytes,
            total.bytes.saturating_add(before.n_holders + 1),
        ) {
            return refuse("bytes of memory", before.bytes, total.bytes, held.bytes);
        }
        if exceeds(before.core, held.core, total.core) {
            return refuse("percent of computing power", before.core, total.core, held.core);
        }
        if exceeds(before.percent, held.percent, total.percent) {
            return refuse("percent", before.percent, total.percent, held.percent);
        }
        if exceeds(before.slots, held.slots, total.slots) {
            return refuse("places for sharers", before.slots, total.slots, held.slots);
        }
        None
    }
}

/// What the pod holds of each device of this node that its record names.
fn shares<'a>(pod: &'a NodePod, fleet: &'a Fleet, unit: MemoryUnit) -> Vec<Share<'a>> {
    let Ok(placement) = &pod.placement else {
        return Vec::new();
    };
    let gpus = (0..)
        .zip(&placement.gpus)
        .zip(&placement.held)
        .filter_map(|((at, name), held)| {
            let gpu = &fleet.gpus.iter().find(|entry| name.names(&entry.gpu))?.gpu;
            let (asked, record) = (asked(pod, gpu, placement.gpus.len(), unit), placement.gpushare);
            let is_other_unit = record.is_some_and(|record| {
                record.device_units > 0 && record.device_units != unit.units_in(gpu.memory_bytes)
            });
            let of_units = record
                .filter(|_| is_other_unit)
                .map(|record| part(gpu.memory_bytes, record.pod_units, record.device_units));
            let of_record = held.bytes_of(gpu.memory_bytes).or(of_units);
            let bytes = match of_record {
                Some(recorded) if is_other_unit || pod.stage == Stage::Running => recorded,
                recorded => asked.bytes.max(recorded.unwrap_or(0)),
            };
            // A pod that sees all GPUs of its node is a sharer of as many as it asks for.
            let slots = u64::from(at < pod.shared());
            Some(of_gpu(
                gpu,
                fleet,
                Sum {
                    bytes,
                    core: held.core.max(asked.core),
                    slots,
                    ..asked
                },
            ))
        });
    let others = placement.others.iter().flat_map(|(device_type, others)| {
        others
            .names
            .iter()
            .zip(&others.held)
            .filter_map(|(name, portion)| {
                let find = |entry: &&FleetDevice| name.is(&DeviceKey::from(&entry.device));
                let device = &fleet.devices_of(device_type).find(find)?.device;
                let percent = |percent: u64| Sum {
                    percent,
                    ..Sum::default()
                };
                let (held, total) = (
                    percent(portion.percent),
                    percent(device.percent().unwrap_or(WHOLE_DEVICE_PERCENT)),
                );
                Some(Share {
                    device: &device.id,
                    device_type,
                    held,
                    total,
                })
            })
    });
    let functions = placement.others.iter().flat_map(|(device_type, others)| {
        // There is one of each.
        let one = Sum {
            slots: 1,
            ..Sum::default()
        };
        let functions = others.held.iter().flat_map(|portion| &portion.functions);
        functions.map(move |device| Share {
            device,
            device_type,
            held: one,
            total: one,
        })
    });
    gpus.chain(others).chain(functions).collect()
}

fn of_gpu<'a>(gpu: &'a Gpu, fleet: &Fleet, held: Sum) -> Share<'a> {
    let slots = u64::from(fleet.ids.slots());
    // Records from before the reserved memory was withheld stay valid; new ones name less, as the scheduler counts less.
    let total = Sum {
        bytes: gpu.memory_bytes.saturating_add(gpu.reserved_bytes),
        core: WHOLE_DEVICE_PERCENT,
        slots,
        ..Sum::default()
    };
    Share {
        device: &gpu.uuid,
        device_type: TYPE_GPU,
        held,
        total,
    }
}

/// What a pod without record that runs holds of the GPUs that it sees.
fn unrecorded<'a>(
    pod: &NodePod,
    fleet: &'a Fleet,
    unit: MemoryUnit,
    seen: &BTreeSet<PhysicalId>,
) -> Vec<Share<'a>> {
    let gpus = fleet
        .gpus
        .iter()
        .map(|entry| &entry.gpu)
        .filter(|gpu| seen.contains(&gpu.uuid));
    gpus.map(|gpu| of_gpu(gpu, fleet, asked(pod, gpu, seen.len(), unit)))
        .collect()
}

/// What the pod's spec asks for of one of so many GPUs.
fn asked(pod: &NodePod, gpu: &Gpu, n_gpus: usize, unit: MemoryUnit) -> Sum {
    let requested = |name: &str| {
        pod.requests
            .iter()
            .find(|(known, _)| *known == name)
            .map_or(0, |(_, amount)| amount)
    };
    let n_gpus = u64::try_from(n_gpus).unwrap_or(u64::MAX).max(1);
    let each = |name: &str| requested(name).div_ceil(n_gpus);
    let whole = if pod.whole() > 0 { WHOLE_DEVICE_PERCENT } else { 0 };
    // A percentage of several GPUs is not always a whole number of them: what is lost is no more than rounding is allowed.
    let percent = |name: &str| {
        part(
            gpu.memory_bytes,
            requested(name),
            n_gpus.saturating_mul(WHOLE_DEVICE_PERCENT),
        )
    };
    let ratio =
        percent(GPU)
            .max(percent(GPU_MEMORY_RATIO))
            .max(part(gpu.memory_bytes, whole, WHOLE_DEVICE_PERCENT));
    let bytes = pod
        .memory_units()
        .saturating_mul(unit.bytes())
        .max(each(GPU_MEMORY))
        .max(ratio);
    let core = each(GPU_CORE).max(each(GPU)).max(whole);
    Sum {
        bytes,
        core,
        slots: u64::from(pod.shared() > 0),
        ..Sum::default()
    }
}

/// `total * numerator / denominator`, rounded down.
fn part(total: u64, numerator: u64, denominator: u64) -> u64 {
    let product = u128::from(total) * u128::from(numerator);
    product
        .checked_div(u128::from(denominator))
        .and_then(|part| u64::try_from(part).ok())
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders::{fleet, gpu, pod, pods, shares as shared, units};
    use crate::pods::Unplaced;

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
    fn a_record_that_says_less_than_is_asked_for_is_not_believed() {
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
    fn the_old_extender_s_record_is_worth_what_it_was() {
        let mut old = pod("old", 2, [units(10)]);
        let record = old.placement.as_mut().unwrap().gpushare.as_mut().unwrap();
        (record.pod_units, record.device_units) = (10, 32);
        assert!(refused(vec![pod("a", 1, [units(11)]), old.clone()], &[]).is_empty());
        assert_eq!(refused(vec![pod("a", 1, [units(12)]), old], &[]), ["old"]);
    }

    /// Started before this plugin came, or while it did not ask for proof.
    #[test]
    fn a_running_pod_without_record_holds_what_it_sees() {
        let unplaced = || Err(Unplaced::Missing { key: "k" });
        let stray = || NodePod {
            placement: unplaced(),
            ..pod("stray", 0, [units(10)])
        };
        let running = NodePod {
            stage: Stage::Running,
            ..stray()
        };
        assert_eq!(refused(vec![running, pod("a", 1, [units(10)])], &[]), ["a"]);
        assert!(
            refused(vec![stray(), pod("a", 1, [units(10)])], &[]).is_empty(),
            "it has not started"
        );
    }

    #[test]
    fn places_for_sharers_are_counted() {
        let all: Vec<NodePod> = (0..101)
            .map(|at| pod(&format!("p{at:03}"), at, [shared(1)]))
            .collect();
        assert_eq!(refused(all, &[]), ["p100"]);
    }

    /// As many pods as an adapter has functions share it, one each; and who has one may have no other's.
    #[test]
    fn a_virtual_function_is_given_once() {
        let with = |name: &str, at: u64, function: &str| {
            let text = format!(
                r#"{{"rdma":[{{"minor":1,"id":"0000:01:00.0","resources":{{"koordinator.sh/rdma":"1"}},"extension":{{"vfs":[{{"minor":0,"busID":"{function}"}}]}}}}]}}"#
            );
            let record = proto::record::Record {
                allocations: serde_json::from_str(&text).unwrap(),
                assumed_at: Some(at),
                gpushare: None,
            };
            NodePod {
                placement: crate::pods::Placement::of_record(record, at),
                ..pod(name, at, [crate::builders::rdma(1)])
            }
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
    fn records_outlive_withheld_memory() {
        let mut withheld = fleet(1);
        withheld.gpus[0].gpu.reserved_bytes = 450 << 20;
        withheld.gpus[0].gpu.memory_bytes -= 450 << 20;
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
    fn the_words_name_what_is_missing() {
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
            "GPU GPU-00000000-aaaa-bbbb-cccc-000000000000 has no room for it: 10737418240 of 17179869184 bytes of memory are held by pods \
             that came before, and it asks for 7516192768"
        );
    }
}
