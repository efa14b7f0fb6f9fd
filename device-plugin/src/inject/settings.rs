//! The settings for answers to kubelet and for starts of containers. They are fixed for the life of the process.

use std::path::PathBuf;
use std::time::Duration;

use proto::memory_unit::MemoryUnit;

use crate::devices::extended_resource::ExtendedResourceNames;
use crate::inject::cdi::SpecDir;
use crate::inject::cdi::vendor::VendorSpecs;
use crate::inject::hami_core::HamiCore;
use crate::inject::mode::{Injection, Mode};
use crate::inject::own_container::OwnContainer;

/// The settings of Allocate answers and CDI specs.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// The names of the extended resources that the plugin advertises.
    pub names: ExtendedResourceNames,
    /// The size of a memory unit.
    pub memory_unit: MemoryUnit,
    /// Longest time for which a call of kubelet waits until the plugin's watch shows the pod of the call.
    pub allocate_wait: Duration,
    /// The injection mode that the operator has set (`--inject`); `None` if the plugin chooses the one that works on this node.
    pub injection_mode: Option<Mode>,
    /// The directory of this plugin's CDI specs.
    pub specs: SpecDir,
    /// The CDI specs of the GPU vendor's tools.
    pub vendor_specs: VendorSpecs,
    /// The node's root directory as this process sees it.
    pub host_root: PathBuf,
    /// The mount point of sysfs.
    pub sysfs_root: PathBuf,
    /// The root directory below which this process sees the node's device nodes.
    pub device_root: PathBuf,
    /// This plugin's own container, which shows the effect of the vendor's variable.
    pub own_container: OwnContainer,
    /// True if the runtime hook is on (`--nri-socket`).
    pub has_runtime_hook: bool,
    /// True if the operator allows the annotation by which a pod asks to see all GPUs of its node.
    pub allows_all_devices: bool,
    /// True if the operator has turned the driver's memory limits on (`--driver-limits`).
    pub driver_limits: bool,
    /// The operator's HAMi-core library, if there is one.
    pub hami_core: Option<HamiCore>,
}

impl NodeSettings {
    /// The injection mode that the plugin has decided on, else the one that the operator has set (`--inject`), else `cdi`.
    pub(crate) fn mode(&self, decided: Option<&Injection>) -> Mode {
        let decided = decided.map(|injection| injection.mode);
        decided.or(self.injection_mode).unwrap_or(Mode::Cdi)
    }
}
