//! The changes of NVIDIA's container runtime to a container, by its configuration, the container's variables and
//! annotations, and the CDI specs of the node.
//!
//! A model of nvidia-container-runtime 1.20, compared case by case with recordings of the real program
//! (`tests/recorded/nvidia_container_runtime.py`). Left out: the mode `csv` (Jetson), device lists as volume mounts, MIG
//! instances, IMEX channels, and everything that libraries and hooks do in a container beyond being there.

use std::collections::BTreeMap;

/// The variable that it acts on.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// Annotations of a container that name CDI devices begin so.
const ANNOTATION_PREFIX: &str = "cdi.k8s.io/";

/// The kind of the specs that it makes in memory.
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
    /// The node's specs if all names are fully qualified, else a spec in memory.
    Auto,
}

/// Its configuration.
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
    /// As it is installed by hand, in an old version or a new one.
    pub fn of_mode(mode: RuntimeMode) -> Self {
        Self {
            mode,
            default_kind: "nvidia.com/gpu",
            accepts_unprivileged: true,
        }
    }

    /// As GPU Operator installs it since 25.10.
    pub fn of_operator() -> Self {
        Self {
            default_kind: "management.nvidia.com/gpu",
            ..Self::of_mode(RuntimeMode::Cdi)
        }
    }
}

/// A container as the runtime gets it.
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
    /// nvidia-container-cli is asked for these devices: `all`, UUIDs, indices, or none, which brings the driver alone.
    Cli(Vec<String>),
    /// A spec in memory for these devices, the same way; the variable then says `void`.
    InMemory(Vec<String>),
    /// These devices of the node's specs.
    Specs(Vec<String>),
}

/// The runtime refuses a container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "requesting a CDI device with vendor 'runtime.nvidia.com' is not supported when requesting other CDI devices"
)]
pub struct MixedDevices;

impl NvidiaRuntime {
    /// Returns the runtime's change to a container.
    ///
    /// # Errors
    /// It asks for devices by their fully qualified names and by others at once.
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
        // Annotations count in this mode alone.
        let devices = if is_cdi {
            with_annotations
        } else {
            self.devices(created, false)
        };
        if devices.is_empty() {
            return Ok(Modification::None);
        }
        if self.mode == RuntimeMode::Legacy {
            return Ok(Modification::Cli(
                devices.into_iter().filter(|device| device != "none").collect(),
            ));
        }
        let kind = if is_cdi { self.default_kind } else { OWN_KIND };
        let named: Vec<String> = devices
            .into_iter()
            .map(|device| {
                if is_qualified(&device) {
                    device
                } else {
                    format!("{kind}={device}")
                }
            })
            .collect();
        let own: Vec<String> = named
            .iter()
            .filter_map(|name| name.strip_prefix(OWN_KIND)?.strip_prefix('='))
            .map(str::to_owned)
            .collect();
        match own.len() {
            0 => Ok(Modification::Specs(named)),
            n_own if n_own == named.len() => Ok(Modification::InMemory(
                own.into_iter().filter(|device| device != "none").collect(),
            )),
            _ => Err(MixedDevices),
        }
    }

    /// The devices that a container asks for.
    fn devices(&self, created: Created<'_>, has_annotations: bool) -> Vec<String> {
        let annotations = created
            .annotations
            .iter()
            .filter(|(key, _)| has_annotations && key.starts_with(ANNOTATION_PREFIX));
        let annotated: Vec<String> = annotations
            .flat_map(|(_, value)| value.split(','))
            .map(str::to_owned)
            .collect();
        // Annotations come before variables: a plugin sets the former, an image the latter.
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

fn is_qualified(device: &str) -> bool {
    device.split_once('=').is_some_and(|(kind, _)| kind.contains('/'))
}

/// The devices that a container's variables ask for; of `void` none.
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
    let devices: Vec<String> = value
        .split(',')
        .map(str::trim)
        .filter(|device| !device.is_empty())
        .map(str::to_owned)
        .collect();
    if devices.iter().any(|device| device == "void") {
        return Vec::new();
    }
    if devices.iter().any(|device| device == "all") {
        return vec!["all".to_owned()];
    }
    devices
}

/// The places of the GPUs that nvidia-container-cli or NVML finds by these names, in the order of the driver.
///
/// # Errors
/// The first name that is no GPU's.
pub fn find_gpus(names: &[String], uuids: &[String]) -> Result<Vec<usize>, String> {
    if names.iter().any(|name| name == "all") {
        return Ok((0..uuids.len()).collect());
    }
    // nvidia-container-cli takes UUIDs and indices alike.
    let place = |name: &String| {
        let by_index = || name.parse().ok().filter(|index| *index < uuids.len());
        uuids
            .iter()
            .position(|uuid| uuid == name)
            .or_else(by_index)
            .ok_or_else(|| name.clone())
    };
    let mut places = names.iter().map(place).collect::<Result<Vec<_>, _>>()?;
    places.sort_unstable();
    places.dedup();
    Ok(places)
}
