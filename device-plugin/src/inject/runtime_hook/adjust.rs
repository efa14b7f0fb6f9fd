//! Decides how a new container must be adjusted so that it sees the devices of its pod's record and no others.
//!
//! Pure except that it reads device nodes. A container that requests GPUs is adjusted only if its pod is known and has a record.
//! In one that requests none, `void` replaces a value of the vendor's variable by which its image or its author would show it
//! GPUs, except in namespaces that the operator names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use proto::nri::api::{
    Container, ContainerAdjustment, KeyValue, LinuxContainerAdjustment, LinuxDevice, PodSandbox,
};
use proto::record::{DEVICE_ALLOCATED, GPU_DEVICES, MEM_IDX, VISIBLE_DEVICES};
use proto::request::ContainerRequest;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::NodeFleet;
use crate::devices::inventory::{Gpu, PhysicalId};
use crate::inject::content::{AssignedDevices, variable_answer};
use crate::inject::enforcement::Enforcements;
use crate::inject::enforcement::limits::{Recipient, is_of_driver};
use crate::inject::mode::{Mode, VOID};
use crate::inject::settings::NodeSettings;
use crate::node::pods::{NodePods, PodUid};

use super::seen;

const GPU_RESOURCES: [ExtendedResource; 3] = [
    ExtendedResource::Memory,
    ExtendedResource::Shared,
    ExtendedResource::Whole,
];

#[derive(Clone, Copy, Debug)]
pub(super) struct HookInputs<'a> {
    pub(super) pods: &'a NodePods,
    pub(super) fleet: &'a NodeFleet,
    pub(super) settings: &'a NodeSettings,
    pub(super) mode: Mode,
    pub(super) enforcements: &'a Enforcements,
    /// Namespaces whose containers keep the vendor's variable although they request no GPU.
    pub(super) unrestricted: &'a [String],
}

/// The decision about a container that the runtime is about to create.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum HookDecision {
    /// The container is created as it is, because this plugin does not serve it.
    Ignore,
    /// The container is created with this adjustment, which may be empty.
    Adjust(Box<DeviceAdjustment>),
    Refuse(String),
    /// The decision has to wait for a change of the pods, for this reason.
    Unknown(String),
}

/// The changes that give a container the right devices.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct DeviceAdjustment {
    /// The GPUs that the container sees with the adjustment; empty for one that requests none.
    pub(super) gpus: BTreeSet<PhysicalId>,
    /// The value of the vendor's variable without the adjustment.
    pub(super) before: Option<String>,
    env: BTreeMap<String, String>,
    /// Device nodes to add; one whose path begins with a minus is removed.
    nodes: Vec<LinuxDevice>,
}

impl DeviceAdjustment {
    pub(super) fn is_empty(&self) -> bool {
        self.env.is_empty() && self.nodes.is_empty()
    }

    pub(super) fn into_adjustment(self) -> ContainerAdjustment {
        let devices = self.nodes;
        let env = self.env.into_iter();
        ContainerAdjustment {
            env: env.map(|(key, value)| KeyValue { key, value }).collect(),
            linux: (!devices.is_empty()).then_some(LinuxContainerAdjustment { devices }),
        }
    }
}

impl HookInputs<'_> {
    pub(super) fn decide(&self, sandbox: &PodSandbox, container: &Container) -> HookDecision {
        let uid = PodUid::from(sandbox.uid.as_str());
        let Some(pod) = self.pods.get(&uid) else {
            // kubelet and this plugin learn of a pod by a watch each, and that of this plugin may be late.
            let asks_for_nothing = self.pods.asks_for_nothing(&uid);
            let keys = [DEVICE_ALLOCATED, MEM_IDX];
            let has_record = keys.iter().any(|key| sandbox.annotations.contains_key(*key));
            if has_record && !asks_for_nothing && seen::has_devices(container, self.fleet) {
                let why = "it has a record, and this node's plugin has not received the pod from the API server yet";
                return HookDecision::Unknown(why.to_owned());
            }
            return self.hide(sandbox, container, asks_for_nothing);
        };
        let request = pod.container(&container.name);
        let Some(request) = request.filter(|request| requests_gpus(request)) else {
            return self.hide(sandbox, container, true);
        };
        // The pre-start check lets a pod without a record start only if it may run with the devices that kubelet chose; a pod of
        // the vendor's plugin has no record either. The plugin publishes the GPUs that such a pod sees.
        let Ok(placement) = &pod.placement else {
            return HookDecision::Ignore;
        };
        // Whole GPUs may be served by the vendor's plugin; then neither swaps nor CDI devices of this plugin matter.
        let is_served = request.memory_units + request.shared > 0 || self.settings.names.whole.is_some();
        if is_served && self.pods.swapped().is_none() {
            let why = "it is not known yet which pods have swapped their records";
            return HookDecision::Unknown(why.to_owned());
        }
        if is_served && self.mode == Mode::Cdi && is_without_cdi(container) {
            let why = "the container runtime has dropped its CDI devices: set enable_cdi = true in containerd's configuration and restart it";
            return HookDecision::Refuse(why.to_owned());
        }
        let mut gpus = Vec::with_capacity(placement.gpus.len());
        for name in &placement.gpus {
            // The pre-start check has refused unhealthy GPUs already.
            let Some(gpu) = self.fleet.gpu_named(name) else {
                return HookDecision::Refuse(format!(
                    "its record names {placement}, which this node does not have; delete the pod to reschedule it"
                ));
            };
            gpus.push(gpu);
        }
        let recipient = Recipient {
            pod,
            container: request,
            placement: Some(placement),
            enforcements: self.enforcements,
        };
        self.adjust(&recipient, container, &gpus)
    }

    /// Hides the GPUs from a container that would see some and requests none. A pod that is not known may request some.
    fn hide(&self, sandbox: &PodSandbox, container: &Container, is_known: bool) -> HookDecision {
        if self.unrestricted.contains(&sandbox.namespace) {
            return HookDecision::Ignore;
        }
        let value = seen::value_of(container, VISIBLE_DEVICES);
        let shows_some = match value {
            Some(value) => value.split(',').any(|name| self.shows_gpu(name.trim(), is_known)),
            // NVIDIA's runtime shows all GPUs to an image of an old CUDA, which does not set the vendor's variable.
            None => has_value(container, "CUDA_VERSION") && !has_value(container, "NVIDIA_REQUIRE_CUDA"),
        };
        if !shows_some {
            return HookDecision::Ignore;
        }
        let env = [(VISIBLE_DEVICES.to_owned(), VOID.to_owned())].into();
        HookDecision::Adjust(Box::new(DeviceAdjustment {
            before: value.map(str::to_owned),
            env,
            ..DeviceAdjustment::default()
        }))
    }

    /// True if a name in the vendor's variable shows a GPU of this node to a container that requests none.
    fn shows_gpu(&self, name: &str, is_known: bool) -> bool {
        if name == "all" || name.contains('=') {
            // NVIDIA's runtime resolves fully qualified CDI names (`nvidia.com/gpu=0`) too.
            return true;
        }
        // In a pod that is not known, single GPUs may come from the vendor's plugin, which never sets `all`.
        is_known && seen::named_gpus(name, self.fleet).is_some()
    }

    /// Decides the change of variables and device nodes for a container whose record names these GPUs.
    fn adjust(&self, recipient: &Recipient<'_>, container: &Container, gpus: &[&Gpu]) -> HookDecision {
        let before = seen::value_of(container, VISIBLE_DEVICES);
        let own_before = seen::value_of(container, GPU_DEVICES);
        let wanted: BTreeSet<PhysicalId> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let present = seen::gpus_by_nodes(container, self.fleet);
        let names_wanted = |value: Option<&str>| {
            seen::named_gpus(value.unwrap_or_default(), self.fleet).as_ref() == Some(&wanted)
        };
        let mut env = self.variables(recipient, gpus);
        // With a CDI spec of this plugin the device nodes count, which `adjust_nodes` corrects.
        let is_by_cdi = before == Some(VOID) && own_before.is_some();
        // Another plugin gave it the GPUs as device nodes; if the variable named them too, NVIDIA's runtime would add them again.
        let is_by_nodes_alone = !present.is_empty() && matches!(before, None | Some(VOID));
        if is_by_cdi || is_by_nodes_alone || names_wanted(before) {
            env.remove(VISIBLE_DEVICES);
        }
        // Only programs for this plugin read this project's variable, so a container of the vendor's plugin need not have it.
        if own_before.is_none() || names_wanted(own_before) {
            env.remove(GPU_DEVICES);
        }
        env.retain(|name, value| {
            // The container's process sees the last of several values, and NVIDIA's hook for limits reads the first.
            let has_others = seen::values_of(container, name).any(|other| other != value);
            seen::value_of(container, name) != Some(value) || (is_of_driver(name) && has_others)
        });
        for (name, value) in &env {
            // The runtime changes the first value of a variable and leaves the last in its place, which the container's process
            // sees.
            let is_last = seen::value_of(container, name) == Some(value);
            if seen::values_of(container, name).count() > 1 && !is_last {
                return HookDecision::Refuse(format!(
                    "its container {} sets {name} itself, from which it reads its devices; leave that out of the pod",
                    container.name
                ));
            }
        }
        let mut change = DeviceAdjustment {
            gpus: wanted,
            before: before.map(str::to_owned),
            env,
            ..DeviceAdjustment::default()
        };
        if !present.is_empty() && present != change.gpus {
            self.adjust_nodes(&mut change, gpus, &present);
        }
        HookDecision::Adjust(Box::new(change))
    }

    /// Replaces the device nodes of other GPUs by those of `gpus`; the libraries of the driver came with the present nodes.
    fn adjust_nodes(&self, change: &mut DeviceAdjustment, gpus: &[&Gpu], present: &BTreeSet<PhysicalId>) {
        for gpu in gpus {
            if !present.contains(&gpu.uuid) {
                let node = device_node(&self.settings.device_root, &gpu.device_node);
                change.nodes.extend(node);
            }
        }
        for uuid in present.difference(&change.gpus) {
            if let Some(gpu) = self.fleet.gpu(uuid) {
                change.nodes.push(LinuxDevice {
                    // In NRI a minus before the path of a device removes the device from the container.
                    path: format!("-{}", gpu.device_node.display()),
                    ..LinuxDevice::default()
                });
            }
        }
    }

    /// The variables that the container must have: those that name its GPUs, and those that carry its limits.
    fn variables(&self, recipient: &Recipient<'_>, gpus: &[&Gpu]) -> BTreeMap<String, String> {
        let assigned = AssignedDevices::Gpus(gpus.to_vec());
        let mut variables = BTreeMap::new();
        for resource in GPU_RESOURCES {
            if resource.count(recipient.container) > 0 {
                variables.extend(variable_answer(self.settings, Some(recipient), resource, &assigned).envs);
            }
        }
        variables
    }
}

fn requests_gpus(request: &ContainerRequest) -> bool {
    let mut resources = GPU_RESOURCES.iter();
    resources.any(|resource| resource.count(request) > 0)
}

fn has_value(container: &Container, variable: &str) -> bool {
    !seen::value_of(container, variable).unwrap_or_default().is_empty()
}

/// Returns true if the container lacks the CDI devices of its answer to Allocate, whose spec sets this project's variable.
fn is_without_cdi(container: &Container) -> bool {
    seen::value_of(container, VISIBLE_DEVICES) == Some(VOID)
        && seen::value_of(container, GPU_DEVICES).is_none()
}

/// The host's character device at this path (this process sees it below `root`), for the same path in a container.
fn device_node(root: &Path, path: &Path) -> Option<LinuxDevice> {
    let found = fs::metadata(root.join(path.strip_prefix("/").unwrap_or(path))).ok()?;
    if !found.file_type().is_char_device() {
        return None;
    }
    let number = found.rdev();
    // The C library packs 12 bits of the major and 8 of the minor number first, and their other bits above.
    let major = ((number >> 8) & 0xfff) | ((number >> 32) & !0xfff);
    let minor = (number & 0xff) | ((number >> 12) & !0xff);
    Some(LinuxDevice {
        path: path.to_str()?.to_owned(),
        r#type: "c".to_owned(),
        major: i64::try_from(major).ok()?,
        minor: i64::try_from(minor).ok()?,
    })
}

#[cfg(test)]
mod tests;
