//! Enforcement of memory limits of containers on this node: the level of each GPU, and the variables that carry the limits.
//!
//! `decide` is a pure function of facts of the node, `detect` finds the facts, and `limits` makes the variables. This plugin
//! enforces nothing itself: the driver does, or HAMi-core's library in a container.

mod decide;
pub(crate) mod detect;
pub(crate) mod limits;

use std::collections::BTreeMap;

use crate::devices::inventory::{Gpu, PhysicalId};

/// The reason if the vendor's CDI specs lack NVIDIA's hook for memory limits on a GPU.
const HOOK_MISSING: &str = "HookMissing";

/// The strongest enforcement of memory limits on a GPU; a later level is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// A container can use more than its limit.
    None,
    /// HAMi-core's library keeps those containers that load it within their limits.
    HamiCore,
    /// The driver refuses allocations beyond a container's limit.
    Driver,
}

impl Level {
    /// The word for the level in labels and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::HamiCore => "hami-core",
            Self::Driver => "driver",
        }
    }
}

/// The level of one GPU, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enforcement {
    /// The level.
    pub level: Level,
    /// The reason that the level is no better, or `DriverLimits` for the best level: one word for a condition.
    pub reason: &'static str,
    /// The reason in a sentence, with the remedy where there is one.
    pub message: String,
}

/// The level of each GPU of this node; empty until the first decision.
pub type Enforcements = BTreeMap<PhysicalId, Enforcement>;

pub(crate) fn is_by_driver(levels: &Enforcements, gpu: &PhysicalId) -> bool {
    levels.get(gpu).is_some_and(|found| found.level == Level::Driver)
}

pub(crate) fn are_by_driver(levels: &Enforcements, gpus: &[&Gpu]) -> bool {
    // The variables of a container hold for all of its GPUs, and NVIDIA's hook fails on a GPU that the driver cannot limit.
    !gpus.is_empty() && gpus.iter().all(|gpu| is_by_driver(levels, &gpu.uuid))
}

/// The lowest level among the GPUs; none without GPUs, or before the first decision.
pub(crate) fn lowest_level(levels: &Enforcements) -> Option<Level> {
    levels.values().map(|found| found.level).min()
}

/// True if the driver enforced limits on a GPU in `before`, and does not in `now` because the vendor's CDI specs lack the hook.
fn lost_spec_hook(before: &Enforcements, now: &Enforcements) -> bool {
    let mut levels = now.iter();
    levels.any(|(gpu, found)| found.reason == HOOK_MISSING && is_by_driver(before, gpu))
}

/// The same level for each of these GPUs.
#[cfg(test)]
pub(crate) fn same_level(level: Level, gpus: impl IntoIterator<Item = Gpu>) -> Enforcements {
    let enforcement = Enforcement {
        level,
        reason: "DriverLimits",
        message: "for a test".to_owned(),
    };
    let gpus = gpus.into_iter();
    gpus.map(|gpu| (gpu.uuid, enforcement.clone())).collect()
}
