//! The operator's settings for answers to kubelet and for starts of containers. They are fixed for the life of the process.

use std::time::Duration;

use clap::ValueEnum;
use proto::memory_unit::MemoryUnit;

use crate::enforcement::HamiCore;
use crate::extended_resource::ExtendedResourceNames;
use crate::injection::InjectionSettings;

/// The settings of Allocate answers and CDI specs.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// The resources' names.
    pub names: ExtendedResourceNames,
    /// The size of a memory unit.
    pub memory_unit: MemoryUnit,
    /// Longest wait of a kubelet call until the plugin's watch shows its pod.
    pub allocate_wait: Duration,
    /// The injection of devices into containers.
    pub injection: InjectionSettings,
    /// True if the annotation that asks to see all GPUs of the node is allowed.
    pub allows_all_devices: bool,
    /// True if the driver limits the memory of containers on GPUs on which it can.
    pub driver_limits: bool,
    /// The operator's HAMi-core library, if there is one.
    pub hami_core: Option<HamiCore>,
}

#[cfg(test)]
impl NodeSettings {
    /// A node whose containers get their devices by the usual variable.
    pub(crate) fn plain(
        names: proto::resource::ResourceNames,
        memory_unit: MemoryUnit,
        allocate_wait: Duration,
    ) -> Self {
        Self {
            names: names.into(),
            memory_unit,
            allocate_wait,
            injection: InjectionSettings::envvar(),
            allows_all_devices: false,
            driver_limits: false,
            hami_core: None,
        }
    }
}

/// The reaction to a pod whose containers see other devices than its record names, for as long as it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnMismatch {
    /// Block the start of its containers.
    Refuse,
    /// Evict it, so that its controller creates another pod.
    Evict,
}

/// The reaction to a pod that the scheduler did not place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnUnplaced {
    /// Block the start of its containers.
    Refuse,
    /// Write a record for it where it fits.
    Adopt,
}

/// The settings of the pre-start check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartPolicy {
    /// The reaction to pods that see other devices than their records name.
    pub on_mismatch: OnMismatch,
    /// The reaction to pods without record.
    pub unplaced: OnUnplaced,
}
