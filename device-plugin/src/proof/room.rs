//! Whether a pod still fits on the GPUs of its record: the node's own sum, in case that nobody else's was right.
//!
//! Counts what pods hold whose containers have been let start, then the others in the order in which they were assumed:
//! of two pods that do not fit together the later one waits.

use std::collections::BTreeMap;

use proto::memory_unit::MemoryUnit;

use crate::fleet::Fleet;
use crate::inventory::{Gpu, GpuUuid};
use crate::pods::{NodePod, PodUid, Pods, Stage, WHOLE_DEVICE_PERCENT};

/// A GPU has no room for the pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("GPU {gpu} has no room for it: {before} of {total} {what} are held by pods that came before, and it asks for {asked}")]
pub struct NoRoom {
    /// The GPU.
    pub gpu: GpuUuid,
    what: &'static str,
    before: u64,
    total: u64,
    asked: u64,
}

/// What is held of one GPU.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    bytes: u64,
    core: u64,
    /// Each holder's bytes may have been rounded up by one.
    n_holders: u64,
}

/// Whether the pod fits beside all that came before it.
///
/// # Errors
/// The first GPU that it does not fit on.
pub fn check(pods: &Pods, fleet: &Fleet, unit: MemoryUnit, is_started: impl Fn(&PodUid) -> bool, uid: &PodUid) -> Result<(), NoRoom> {
    let mut held = BTreeMap::<&GpuUuid, Sum>::new();
    let has_started = |pod: &NodePod| pod.stage == Stage::Running || is_started(&pod.uid);
    let mut order: Vec<&NodePod> = pods.iter().filter(|pod| pod.stage != Stage::Terminal && pod.placement.is_ok()).collect();
    order.sort_by_key(|pod| (!has_started(pod), pod.assumed_at(), pod.uid.clone()));
    for pod in order {
        let shares = shares(pod, fleet, unit);
        let refusal = shares.iter().find_map(|(gpu, share)| no_room(gpu, *share, held.get(&gpu.uuid).copied().unwrap_or_default()));
        if pod.uid == *uid {
            return refusal.map_or(Ok(()), Err);
        }
        if refusal.is_none() || has_started(pod) {
            for (gpu, share) in shares {
                let sum = held.entry(&gpu.uuid).or_default();
                *sum = Sum { bytes: sum.bytes.saturating_add(share.bytes), core: sum.core + share.core, n_holders: sum.n_holders + 1 };
            }
        }
    }
    Ok(())
}

fn no_room(gpu: &Gpu, share: Sum, before: Sum) -> Option<NoRoom> {
    let refuse = |what, before, total, asked| Some(NoRoom { gpu: gpu.uuid.clone(), what, before, total, asked });
    if share.bytes > 0 && before.bytes.saturating_add(share.bytes) > gpu.memory_bytes.saturating_add(before.n_holders + 1) {
        return refuse("bytes of memory", before.bytes, gpu.memory_bytes, share.bytes);
    }
    if share.core > 0 && before.core + share.core > WHOLE_DEVICE_PERCENT {
        return refuse("percent of computing power", before.core, WHOLE_DEVICE_PERCENT, share.core);
    }
    None
}

/// What the pod holds of each GPU of this node that its record names.
fn shares<'a>(pod: &NodePod, fleet: &'a Fleet, unit: MemoryUnit) -> Vec<(&'a Gpu, Sum)> {
    let Ok(placement) = &pod.placement else { return Vec::new() };
    let named = placement.gpus.iter().zip(&placement.held).filter_map(|(name, held)| {
        let gpu = &fleet.gpus.iter().find(|entry| name.names(&entry.gpu))?.gpu;
        let units = placement.gpushare.map_or(0, |record| record.pod_units).max(pod.memory_units());
        let bytes = held.bytes_of(gpu.memory_bytes).unwrap_or_else(|| units.saturating_mul(unit.bytes()));
        Some((gpu, Sum { bytes, core: held.core, n_holders: 0 }))
    });
    named.collect()
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
