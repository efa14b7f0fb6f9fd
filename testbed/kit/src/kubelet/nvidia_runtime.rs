//! A model of nvidia-container-runtime 1.20: how it changes a container, given its configuration and the
//! container's variables and annotations.
//!
//! It is compared case by case with recordings of the real program (`testbed/tests/nvidia_runtime.rs`, recorded by
//! `testbed/tests/recorded/nvidia_container_runtime.py`). Left out: the mode `csv` (Jetson), device lists as volume mounts, MIG
//! instances, IMEX channels, and everything that libraries and hooks do in a container beyond being there.

use std::collections::BTreeMap;

/// The variable by which containers request GPUs from the runtime.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// The prefix of the annotations of a container that name CDI devices.
const ANNOTATION_PREFIX: &str = "cdi.k8s.io/";

/// The CDI kind of the specs that the runtime makes in memory.
const OWN_KIND: &str = "runtime.nvidia.com/gpu";

/// `nvidia-container-runtime.mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuntimeMode {
    /// A hook asks nvidia-container-cli for the devices when the container starts.
    Legacy,
    /// A spec is made in memory from the devices that NVML lists.
    JitCdi,
    /// The devices come from the node's specs.
    Cdi,
    /// The node's specs if the requested devices have fully qualified CDI names, all of them, else a spec in memory.
    Auto,
}

/// The configuration of NVIDIA's runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvidiaRuntime {
    /// `nvidia-container-runtime.mode`.
    pub mode: RuntimeMode,
    /// `nvidia-container-runtime.modes.cdi.default-kind`.
    pub default_kind: &'static str,
    /// `accept-nvidia-visible-devices-envvar-when-unprivileged`.
    pub accepts_unprivileged: bool,
}

impl NvidiaRuntime {
    /// The configuration of an installation by hand, with this mode.
    pub(crate) fn of_mode(mode: RuntimeMode) -> Self {
        Self {
            mode,
            default_kind: "nvidia.com/gpu",
            accepts_unprivileged: true,
        }
    }

    /// The configuration that GPU Operator installs since 25.10.
    pub(crate) fn of_operator() -> Self {
        Self {
            default_kind: "management.nvidia.com/gpu",
            ..Self::of_mode(RuntimeMode::Cdi)
        }
    }
}

/// The parts of a container that the runtime reads.
#[derive(Clone, Copy, Debug)]
pub struct Created<'a> {
    /// Its environment.
    pub env: &'a BTreeMap<String, String>,
    /// Its annotations, which come from kubelet and device plugins.
    pub annotations: &'a BTreeMap<String, String>,
    /// True if it is privileged.
    pub is_privileged: bool,
}

/// The runtime's change to a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Modification {
    /// Nothing.
    None,
    /// nvidia-container-cli injects these devices: `all`, UUIDs or indices; with an empty list the driver alone.
    Cli(Vec<String>),
    /// A CDI spec in memory injects these devices, named as for `Cli`, and sets the variable to `void`.
    InMemory(Vec<String>),
    /// The node's CDI specs inject these devices.
    Specs(Vec<String>),
}

/// The error for a container that names devices of the runtime's own kind and of others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "requesting a CDI device with vendor 'runtime.nvidia.com' is not supported when requesting other CDI devices"
)]
pub struct MixedDevices;

impl NvidiaRuntime {
    /// Returns the runtime's change to a container.
    ///
    /// # Errors
    /// The container asks for some devices by fully qualified names and for others by plain ones.
    pub fn modify(&self, created: Created<'_>) -> Result<Modification, MixedDevices> {
        let with_annotations = self.devices(created, true);
        let is_cdi = match self.mode {
            RuntimeMode::Cdi => true,
            // resolveAutoMode: CDI only if every device has a fully qualified name, as such names mean
            // nothing to the legacy hook.
            RuntimeMode::Auto => {
                !with_annotations.is_empty() && with_annotations.iter().all(|device| is_qualified(device))
            }
            RuntimeMode::Legacy | RuntimeMode::JitCdi => false,
        };
        // Annotations count only if the runtime uses CDI specs, by its mode or by the names.
        let devices = if is_cdi {
            with_annotations
        } else {
            self.devices(created, false)
        };
        if devices.is_empty() {
            return Ok(Modification::None);
        }
        if self.mode == RuntimeMode::Legacy {
            return Ok(Modification::Cli(without_none(devices)));
        }
        let kind = if is_cdi { self.default_kind } else { OWN_KIND };
        let (mut own, mut others) = (Vec::new(), Vec::new());
        for device in devices {
            match device.split_once('=') {
                Some((OWN_KIND, name)) => own.push(name.to_owned()),
                Some((kind, _)) if kind.contains('/') => others.push(device),
                _ if kind == OWN_KIND => own.push(device),
                _ => others.push(format!("{kind}={device}")),
            }
        }
        match (own.is_empty(), others.is_empty()) {
            (true, _) => Ok(Modification::Specs(others)),
            (false, true) => Ok(Modification::InMemory(without_none(own))),
            (false, false) => Err(MixedDevices),
        }
    }

    /// The devices that a container requests by annotations or, without any, by its variables.
    fn devices(&self, created: Created<'_>, reads_annotations: bool) -> Vec<String> {
        let mut annotated = Vec::new();
        for (key, value) in created.annotations {
            if reads_annotations && key.starts_with(ANNOTATION_PREFIX) {
                annotated.extend(value.split(',').map(str::to_owned));
            }
        }
        // Annotations come before variables: a device plugin sets the annotations, an image the variables.
        if !annotated.is_empty() {
            return annotated;
        }
        if created.is_privileged || self.accepts_unprivileged {
            by_variable(created.env)
        } else {
            Vec::new()
        }
    }
}

/// The devices without the word `none`, which stands for no device.
fn without_none(mut devices: Vec<String>) -> Vec<String> {
    devices.retain(|device| device != "none");
    devices
}

/// Returns true if a device name is a full CDI name, such as `nvidia.com/gpu=0`.
fn is_qualified(device: &str) -> bool {
    device.split_once('=').is_some_and(|(kind, _)| kind.contains('/'))
}

/// The devices that a container's variables request; none for `void`.
fn by_variable(env: &BTreeMap<String, String>) -> Vec<String> {
    let Some(value) = env.get(VISIBLE_DEVICES) else {
        let has = |name: &str| env.get(name).is_some_and(|value| !value.is_empty());
        // IsLegacy: images from before NVIDIA_REQUIRE_* expect all GPUs without asking for them.
        let is_legacy_image = has("CUDA_VERSION") && !has("NVIDIA_REQUIRE_CUDA");
        return if is_legacy_image {
            vec!["all".to_owned()]
        } else {
            Vec::new()
        };
    };
    let devices: Vec<&str> = value.split(',').map(str::trim).collect();
    if devices.contains(&"void") {
        return Vec::new();
    }
    if devices.contains(&"all") {
        return vec!["all".to_owned()];
    }
    let named = devices.into_iter().filter(|device| !device.is_empty());
    named.map(str::to_owned).collect()
}

/// The indices of the GPUs that nvidia-container-cli or NVML finds by these names, in the driver's order.
///
/// # Errors
/// The first name that is no GPU's.
pub fn find_gpus(names: &[String], uuids: &[String]) -> Result<Vec<usize>, String> {
    if names.iter().any(|name| name == "all") {
        return Ok((0..uuids.len()).collect());
    }
    let mut indices = Vec::new();
    for name in names {
        // nvidia-container-cli takes UUIDs and indices alike.
        match (uuids.iter().position(|uuid| uuid == name), name.parse()) {
            (Some(index), _) => indices.push(index),
            (None, Ok(index)) if index < uuids.len() => indices.push(index),
            (None, _) => return Err(name.clone()),
        }
    }
    indices.sort_unstable();
    indices.dedup();
    Ok(indices)
}
