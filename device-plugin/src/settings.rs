//! The operator's settings for answers to kubelet and for starts of containers. They are fixed for the life of the process.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use proto::memory_unit::MemoryUnit;

use crate::cdi::SpecDir;
use crate::cdi::vendor::VendorSpecs;
use crate::enforcement::HamiCore;
use crate::extended_resource::ExtendedResourceNames;
use crate::injection::{Mode, OwnContainer};

/// The settings of Allocate answers and CDI specs.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// The resources' names.
    pub names: ExtendedResourceNames,
    /// The size of a memory unit.
    pub memory_unit: MemoryUnit,
    /// Longest wait of a kubelet call until the plugin's watch shows its pod.
    pub allocate_wait: Duration,
    /// The injection mode that the operator asks for; `None` for the one that works on this node.
    pub injection_mode: Option<Mode>,
    /// The directory of this plugin's CDI specs.
    pub specs: SpecDir,
    /// The CDI specs of the GPU vendor's tools.
    pub vendor_specs: VendorSpecs,
    /// The node's root directory as this process sees it.
    pub host_root: PathBuf,
    /// The mount point of sysfs.
    pub sysfs_root: PathBuf,
    /// This plugin's own container, which shows the effect of the vendor's variable.
    pub own_container: OwnContainer,
    /// True if the runtime hook is on.
    pub has_runtime_hook: bool,
    /// True if the annotation that asks to see all GPUs of the node is allowed.
    pub allows_all_devices: bool,
    /// True if the driver limits the memory of containers on GPUs on which it can.
    pub driver_limits: bool,
    /// The operator's HAMi-core library, if there is one.
    pub hami_core: Option<HamiCore>,
}

#[cfg(test)]
impl NodeSettings {
    /// A node whose containers get their devices by the vendor's variable.
    pub(crate) fn plain(
        names: proto::resource::ResourceNames,
        memory_unit: MemoryUnit,
        allocate_wait: Duration,
    ) -> Self {
        Self {
            names: names.into(),
            memory_unit,
            allocate_wait,
            injection_mode: Some(Mode::Envvar),
            specs: SpecDir::new("/var/run/cdi".into()),
            vendor_specs: VendorSpecs::default(),
            host_root: "/".into(),
            sysfs_root: "/nonexistent".into(),
            own_container: OwnContainer::default(),
            has_runtime_hook: false,
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
