//! Decides how a new container must be adjusted so that it sees the devices of its pod's record and no others.
//!
//! Pure except that it reads device nodes. A container that requests GPUs is adjusted only if its pod is known and has a record. One
//! that requests none loses the variable by which its image or its author would show it GPUs that are shared, except in namespaces
//! that the operator names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use proto::nri::api::{
    Container, ContainerAdjustment, KeyValue, LinuxContainerAdjustment, LinuxDevice, PodSandbox,
};
use proto::record::{DEVICE_ALLOCATED, GPU_DEVICES, MEM_IDX, VISIBLE_DEVICES};
use proto::request::ContainerRequest;

use crate::enforcement::Enforcements;
use crate::enforcement::limits::is_of_driver;
use crate::extended_resource::ExtendedResource;
use crate::fleet::NodeFleet;
use crate::injection::Mode;
use crate::injection::content::{AssignedDevices, VOID, variable_answer};
use crate::injection::recipient::Recipient;
use crate::inventory::{Gpu, PhysicalId};
use crate::pods::{NodePods, PodUid};
use crate::settings::NodeSettings;
use crate::verify::named_devices;

use super::seen;

/// The resources of GPUs.
const GPU_RESOURCES: [ExtendedResource; 3] = [
    ExtendedResource::Memory,
    ExtendedResource::Shared,
    ExtendedResource::Whole,
];

/// The inputs of a decision.
#[derive(Clone, Copy, Debug)]
pub(super) struct HookInputs<'a> {
    pub(super) pods: &'a NodePods,
    pub(super) fleet: &'a NodeFleet,
    pub(super) settings: &'a NodeSettings,
    pub(super) mode: Mode,
    /// The enforcement levels of the GPUs.
    pub(super) enforcements: &'a Enforcements,
    /// Namespaces whose containers keep the variable although they request no GPU.
    pub(super) unrestricted: &'a [String],
}

/// The decision about a container.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum HookDecision {
    /// The container stays as it is, because this plugin does not serve it.
    Ignore,
    /// The container is created with this adjustment, which may be empty.
    Adjust(Box<DeviceAdjustment>),
    /// The container must not be created, for this reason.
    Refuse(String),
    /// The decision is not possible yet, for this reason.
    Unknown(String),
}

/// The changes that give a container the right devices.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct DeviceAdjustment {
    /// The GPUs that it must see.
    pub(super) gpus: BTreeSet<PhysicalId>,
    /// The value of the vendor's variable without the adjustment.
    pub(super) before: Option<String>,
    env: BTreeMap<String, String>,
    removed_nodes: Vec<String>,
    added_nodes: Vec<LinuxDevice>,
}

impl DeviceAdjustment {
    /// Returns true if the container needs no change.
    pub(super) fn is_empty(&self) -> bool {
        self.env.is_empty() && self.removed_nodes.is_empty() && self.added_nodes.is_empty()
    }

    /// The adjustment in the runtime's form.
    pub(super) fn into_adjustment(self) -> ContainerAdjustment {
        let mut devices = self.added_nodes;
        for path in self.removed_nodes {
            // NRI removes what has a minus before its name.
            let path = format!("-{path}");
            devices.push(LinuxDevice {
                path,
                ..LinuxDevice::default()
            });
        }
        let env = self
            .env
            .into_iter()
            .map(|(key, value)| KeyValue { key, value })
            .collect();
        ContainerAdjustment {
            env,
            linux: (!devices.is_empty()).then_some(LinuxContainerAdjustment { devices }),
        }
    }
}

impl HookInputs<'_> {
    /// Decides about a container that the runtime is about to create.
    pub(super) fn decide(&self, sandbox: &PodSandbox, container: &Container) -> HookDecision {
        let uid = PodUid::from(sandbox.uid.as_str());
        let Some(pod) = self.pods.get(&uid) else {
            let has_record = [DEVICE_ALLOCATED, MEM_IDX]
                .iter()
                .any(|key| sandbox.annotations.contains_key(*key));
            if has_record && !self.pods.asks_for_nothing(&uid) && seen::has_devices(container, self.fleet) {
                return HookDecision::Unknown(
                    "it has a record, and this node's plugin has not received the pod from the API server yet"
                        .to_owned(),
                );
            }
            return self.hide(sandbox, container, self.pods.asks_for_nothing(&uid));
        };
        let asks = |request: &&ContainerRequest| {
            request.name == container.name && GPU_RESOURCES.iter().any(|resource| resource.count(request) > 0)
        };
        let Some(request) = pod.containers.iter().find(asks) else {
            return self.hide(sandbox, container, true);
        };
        // The check before the start lets a pod without a record through only if kubelet's choice may stand; a pod of the vendor's plugin
        // has no record either. What it sees is published.
        let Ok(placement) = &pod.placement else {
            return HookDecision::Ignore;
        };
        // Whole GPUs may be served by the vendor's plugin, which goes by no record.
        let is_served = request.memory_units + request.shared > 0 || self.settings.names.whole.is_some();
        if is_served && self.pods.swapped().is_none() {
            return HookDecision::Unknown(
                "it is not known yet which pods have swapped their records".to_owned(),
            );
        }
        if is_served && self.mode == Mode::Cdi && is_without_cdi(container) {
            return HookDecision::Refuse(
                "the container runtime has dropped its CDI devices: set enable_cdi = true in containerd's configuration and restart it"
                    .to_owned(),
            );
        }
        let mut gpus = Vec::with_capacity(placement.gpus.len());
        for name in &placement.gpus {
            // Also an unhealthy one: the check before the start decides about those.
            let Some(gpu) = self.fleet.gpu_named(name) else {
                return HookDecision::Refuse(format!(
                    "its record names {placement}, which this node does not have"
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

    /// Removes the variable from a container that requests no GPU, if it would show any GPU of this node. `is_known` says that the
    /// pod is known to request none.
    fn hide(&self, sandbox: &PodSandbox, container: &Container, is_known: bool) -> HookDecision {
        if self.unrestricted.contains(&sandbox.namespace) {
            return HookDecision::Ignore;
        }
        let value = seen::value_of(container, VISIBLE_DEVICES);
        let has = |name: &str| seen::value_of(container, name).is_some_and(|value| !value.is_empty());
        let names_one = |name: &str| named_devices(ExtendedResource::Shared, name, self.fleet).is_some();
        let shows_some = match value {
            // NVIDIA's runtime resolves fully qualified CDI names too.
            // For a pod that is not known kubelet may have set single GPUs of the vendor's plugin, but never `all`.
            Some(value) => value
                .split(',')
                .map(str::trim)
                .any(|name| name == "all" || name.contains('=') || (is_known && names_one(name))),
            // It shows all GPUs to an image of old CUDA, which knows nothing of the variable.
            None => has("CUDA_VERSION") && !has("NVIDIA_REQUIRE_CUDA"),
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

    fn adjust(&self, known: &Recipient<'_>, container: &Container, gpus: &[&Gpu]) -> HookDecision {
        let before = seen::value_of(container, VISIBLE_DEVICES);
        let wanted: BTreeSet<PhysicalId> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let present = seen::gpus_by_nodes(container, self.fleet);
        let names_wanted = |value: Option<&str>| {
            named_devices(ExtendedResource::Shared, value.unwrap_or_default(), self.fleet)
                .is_some_and(|named| BTreeSet::from_iter(named) == wanted)
        };
        let mut env = self.variables(known, gpus);
        let is_by_cdi = before == Some(VOID) && seen::value_of(container, GPU_DEVICES).is_some();
        // Given by device nodes alone; naming devices would make NVIDIA's runtime add them a second time.
        let is_by_nodes_alone = !present.is_empty() && before.is_none_or(|value| value == VOID);
        if is_by_cdi || is_by_nodes_alone || names_wanted(before) {
            env.remove(VISIBLE_DEVICES);
        }
        if seen::value_of(container, GPU_DEVICES).is_none()
            || names_wanted(seen::value_of(container, GPU_DEVICES))
        {
            env.remove(GPU_DEVICES);
        }
        // The container sees the last of several values, and NVIDIA's hook reads the first.
        let is_last = |name: &str, value: &str| seen::value_of(container, name) == Some(value);
        env.retain(|name, value| {
            let has_others = seen::values_of(container, name).any(|other| other != value);
            !is_last(name, value) || (is_of_driver(name) && has_others)
        });
        // The runtime changes the first value, and leaves the last in its place.
        if let Some((name, _)) = env
            .iter()
            .find(|(name, value)| seen::values_of(container, name).count() > 1 && !is_last(name, value))
        {
            return HookDecision::Refuse(format!(
                "its container {} sets {name} itself, from which it reads its devices; leave that out of the pod",
                container.name
            ));
        }
        let is_by_nodes =
            !present.is_empty() || (self.settings.injection.pass_device_specs && self.mode == Mode::Envvar);
        let mut change = DeviceAdjustment {
            gpus: wanted,
            before: before.map(str::to_owned),
            env,
            ..DeviceAdjustment::default()
        };
        if is_by_nodes && present != change.gpus {
            self.adjust_nodes(&mut change, gpus, &present);
        }
        HookDecision::Adjust(Box::new(change))
    }

    /// Removes device nodes of other GPUs and adds those of the record. The driver's libraries came with the former.
    fn adjust_nodes(&self, change: &mut DeviceAdjustment, gpus: &[&Gpu], present: &BTreeSet<PhysicalId>) {
        for gpu in present
            .difference(&change.gpus)
            .filter_map(|uuid| self.fleet.gpu(uuid))
        {
            change
                .removed_nodes
                .push(gpu.device_node.to_string_lossy().into_owned());
        }
        let root = &self.settings.injection.host_root;
        let missing = gpus.iter().filter(|gpu| !present.contains(&gpu.uuid));
        change.added_nodes = missing.filter_map(|gpu| device(root, &gpu.device_node)).collect();
    }

    /// The variables that the container must have.
    fn variables(&self, known: &Recipient<'_>, gpus: &[&Gpu]) -> BTreeMap<String, String> {
        let assigned = AssignedDevices::Gpus(gpus.to_vec());
        let mut variables = BTreeMap::new();
        for resource in GPU_RESOURCES {
            if resource.count(known.container) > 0 {
                variables.extend(variable_answer(self.settings, Some(known), resource, &assigned).envs);
            }
        }
        variables
    }
}

/// Returns true if the container lacks the CDI devices of its answer to Allocate, whose spec sets this project's variable.
fn is_without_cdi(container: &Container) -> bool {
    seen::value_of(container, VISIBLE_DEVICES) == Some(VOID)
        && seen::value_of(container, GPU_DEVICES).is_none()
}

/// The device at this path of the host, for the same path in a container; none if there is no device.
fn device(root: &Path, path: &Path) -> Option<LinuxDevice> {
    let found = fs::metadata(root.join(path.strip_prefix("/").unwrap_or(path))).ok()?;
    let number = found.rdev();
    // The C library packs 12 bits of the major and 8 of the minor number first, and their other bits above.
    let major = ((number >> 8) & 0xfff) | ((number >> 32) & !0xfff);
    let minor = (number & 0xff) | ((number >> 12) & !0xff);
    Some(LinuxDevice {
        path: path
            .to_str()
            .filter(|_| found.file_type().is_char_device())?
            .to_owned(),
        r#type: "c".to_owned(),
        major: i64::try_from(major).ok()?,
        minor: i64::try_from(minor).ok()?,
    })
}

#[cfg(test)]
mod tests;
