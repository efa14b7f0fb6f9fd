//! What is to be changed of a container that is being made, so that it sees the devices of its pod's record and no others.
//!
//! Pure but for a look at device nodes. A container is changed only if its pod is known, has a record, and the container asks
//! for GPUs; so containers of others stay what they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use proto::nri::api::{CdiDevice, Container, ContainerAdjustment, KeyValue, LinuxContainerAdjustment, LinuxDevice, PodSandbox};
use proto::record::{DEVICE_ALLOCATED, MEM_IDX};
use proto::request::ContainerRequest;

use crate::cdi::{self, Edits};
use crate::fleet::Fleet;
use crate::inject::{self, Given, Known, Manner};
use crate::inventory::{Gpu, GpuUuid};
use crate::plugin::Settings;
use crate::pods::{DeviceName, PodUid, Pods};
use crate::served::Served;

use super::seen;

/// The resources that are about GPUs.
const OF_GPUS: [Served; 3] = [Served::Memory, Served::Shared, Served::Whole];

/// Everything that a decision is reached by.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) pods: &'a Pods,
    pub(super) fleet: &'a Fleet,
    pub(super) settings: &'a Settings,
    pub(super) manner: Manner,
    /// Whether containers of ours start with proof only, and pods may have exchanged their records.
    pub(super) has_gate: bool,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decision {
    /// The container is none of ours.
    Leave,
    /// It is to be made like this, which may be no change at all.
    Change(Box<Change>),
    /// It must not be made.
    Refuse(String),
    /// It is not known yet.
    Unknown(String),
}

/// How a container differs from what it is to be.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Change {
    /// The GPUs that it is to see.
    pub(super) gpus: BTreeSet<GpuUuid>,
    /// What it would have seen by the variable.
    pub(super) before: Option<String>,
    env: BTreeMap<String, String>,
    nodes_away: Vec<String>,
    nodes: Vec<LinuxDevice>,
    /// A CDI device to be written and added.
    pub(super) spec: Option<(String, Edits)>,
}

impl Change {
    /// Whether the container is as it should be.
    pub(super) fn is_empty(&self) -> bool {
        self.env.is_empty() && self.nodes_away.is_empty() && self.nodes.is_empty() && self.spec.is_none()
    }

    /// The same in the runtime's words.
    pub(super) fn into_adjustment(self) -> ContainerAdjustment {
        let away = self.nodes_away.into_iter().map(|path| LinuxDevice { path: format!("-{path}"), ..LinuxDevice::default() });
        let devices: Vec<LinuxDevice> = away.chain(self.nodes).collect();
        ContainerAdjustment {
            env: self.env.into_iter().map(|(key, value)| KeyValue { key, value }).collect(),
            linux: (!devices.is_empty()).then_some(LinuxContainerAdjustment { devices }),
            cdi_devices: self.spec.into_iter().map(|(name, _)| CdiDevice { name: format!("{}{name}", cdi::PREFIX) }).collect(),
        }
    }
}

impl View<'_> {
    /// What is to be done with a container that the runtime is making.
    pub(super) fn decide(&self, sandbox: &PodSandbox, container: &Container) -> Decision {
        let variable = self.settings.visible_devices_env.as_str();
        let Some(pod) = self.pods.get(&PodUid::from(sandbox.uid.as_str())) else {
            let has_record = [DEVICE_ALLOCATED, MEM_IDX].iter().any(|key| sandbox.annotations.contains_key(*key));
            // A pod that asks for nothing is never known, whatever its annotations say.
            return if has_record && seen::is_given(container, variable, self.fleet) {
                Decision::Unknown("it has a record, and the API server has not told this node's plugin of the pod yet".to_owned())
            } else {
                Decision::Leave
            };
        };
        let asks =
            |request: &&ContainerRequest| request.name == container.name && OF_GPUS.iter().any(|resource| resource.count(request) > 0);
        let Some(request) = pod.containers.iter().find(asks) else { return Decision::Leave };
        // Whoever has no record was let through by proof before, or is a vendor's: kubelet's choice stands, and is published.
        let Ok(placement) = &pod.placement else { return Decision::Leave };
        let is_served = request.memory_units + request.shared > 0 || self.settings.names.whole.is_some();
        if self.has_gate && is_served && self.pods.exchanged().is_none() {
            return Decision::Unknown("it is not known which pods have exchanged their records".to_owned());
        }
        match placement.gpus.iter().map(|name| self.gpu(name)).collect() {
            Some(gpus) => self.change(&Known { pod, container: request, placement: Some(placement) }, container, &gpus),
            None => Decision::Refuse(format!("its record names {placement}, which this node does not have")),
        }
    }

    /// Sick ones too: what they do to a pod is not decided here.
    fn gpu(&self, name: &DeviceName) -> Option<&Gpu> {
        self.fleet.gpus.iter().map(|entry| &entry.gpu).find(|gpu| name.names(gpu))
    }

    fn change(&self, known: &Known<'_>, container: &Container, gpus: &Vec<&Gpu>) -> Decision {
        let variable = self.settings.visible_devices_env.as_str();
        let before = seen::value_of(container, variable);
        let wanted: BTreeSet<GpuUuid> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let present = seen::by_nodes(container, self.fleet);
        let mut env = self.variables(known, gpus);
        if !present.is_empty() && before.is_none_or(|value| value == "void") {
            // Given by device nodes alone; naming devices would make NVIDIA's runtime add them a second time.
            env.remove(variable);
        }
        if crate::proof::sight::named(Served::Shared, before.unwrap_or_default(), self.fleet).as_ref() == Some(&wanted) {
            // By index, or in another order.
            env.remove(variable);
        }
        env.retain(|name, value| seen::value_of(container, name) != Some(value));
        // The runtime changes the first of two values, and the container sees the last.
        if let Some(name) = env.keys().find(|name| seen::values_of(container, name).count() > 1) {
            return Decision::Refuse(format!(
                "its container {} sets {name} itself, which is what tells it its devices; leave that out of the pod",
                container.name
            ));
        }
        let is_by_nodes = !present.is_empty() || (self.settings.injection.pass_device_specs && self.manner == Manner::Envvar);
        let is_wrong = present != wanted && is_by_nodes;
        let mut change = Change { gpus: wanted, before: before.map(str::to_owned), env, ..Change::default() };
        if is_wrong {
            self.change_nodes(&mut change, known, gpus, &present);
        }
        Decision::Change(Box::new(change))
    }

    /// Takes device nodes of other GPUs away, and gives those of the record: by CDI where the node does so, with all that goes
    /// with a device there.
    fn change_nodes(&self, change: &mut Change, known: &Known<'_>, gpus: &[&Gpu], present: &BTreeSet<GpuUuid>) {
        let others =
            self.fleet.gpus.iter().map(|entry| &entry.gpu).filter(|gpu| present.contains(&gpu.uuid) && !change.gpus.contains(&gpu.uuid));
        change.nodes_away = others.map(|gpu| gpu.device_node.to_string_lossy().into_owned()).collect();
        if self.manner == Manner::Cdi {
            let resource = spoken(known.container);
            let holder = ["made".to_owned(), known.pod.uid.as_str().to_owned(), known.container.name.clone()];
            let edits = inject::cdi_edits(self.settings, known, resource, &Given::Gpus(gpus.to_vec()));
            change.spec = Some((cdi::device_name(resource, &holder), edits));
            return;
        }
        let root = &self.settings.injection.device_root;
        let missing = gpus.iter().filter(|gpu| !present.contains(&gpu.uuid));
        change.nodes = missing.filter_map(|gpu| device(root, &gpu.device_node)).collect();
    }

    /// The variables that the container is to have.
    fn variables(&self, known: &Known<'_>, gpus: &[&Gpu]) -> BTreeMap<String, String> {
        let asked = OF_GPUS.into_iter().filter(|resource| resource.count(known.container) > 0);
        let given = Given::Gpus(gpus.to_vec());
        asked.flat_map(|resource| inject::envvar_answer(self.settings, Some(known), resource, &given).envs).collect()
    }
}

/// The resource whose answer says which GPUs the container sees.
fn spoken(request: &ContainerRequest) -> Served {
    let speaks = |resource: &Served| resource.count(request) > 0 && inject::speaks(*resource, request);
    OF_GPUS.into_iter().find(speaks).unwrap_or(Served::Shared)
}

/// The device at this path of the host, for the same path in a container; none if there is no device.
fn device(root: &Path, path: &Path) -> Option<LinuxDevice> {
    let found = fs::metadata(root.join(path.strip_prefix("/").unwrap_or(path))).ok()?;
    let number = found.rdev();
    // As the C library packs them: 12 and 20 bits, and the rest above.
    let major = ((number >> 8) & 0xfff) | ((number >> 32) & !0xfff);
    let minor = (number & 0xff) | ((number >> 12) & !0xff);
    Some(LinuxDevice {
        path: path.to_str().filter(|_| found.file_type().is_char_device())?.to_owned(),
        r#type: "c".to_owned(),
        major: i64::try_from(major).ok()?,
        minor: i64::try_from(minor).ok()?,
    })
}

#[cfg(test)]
mod tests;
