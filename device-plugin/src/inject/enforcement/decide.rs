//! Decides the enforcement level of a GPU from the facts of its node. Pure.

use crate::inject::mode::{Injection, Mode};
use crate::inject::own_container::OwnContainer;

use super::{Enforcement, HOOK_MISSING, Level};

/// The first major version of the driver that limits memory per cgroup (CUDA 13.4).
const FIRST_DRIVER: u32 = 615;

/// The first containerd whose CDI specs replace a variable; earlier ones append a value, and NVIDIA's hook reads the first.
const FIRST_CONTAINERD: (u32, u32) = (2, 4);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cgroup {
    /// cgroup v1, with which the driver knows no limits.
    V1,
    V2,
    /// No hierarchy is visible to this process.
    Unknown,
}

/// The way in which NVIDIA's hook and its variables get into a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HookRoute {
    /// This plugin's CDI spec brings the hook, and the spec's variables win over those of the image and of the pod.
    Spec,
    /// NVIDIA's runtime brings the hook, as it resolves the vendor's variable by the vendor's CDI specs.
    Runtime,
    /// The hook gets into containers, but may read a limit that the image or the pod sets in place of this plugin's.
    ReadsOthers,
    /// NVIDIA's runtime injects GPUs by its legacy mode, which runs no such hook.
    Legacy,
    /// The way of the runtime is not known, or containers get no devices at all.
    Unknown,
}

/// The facts that hold for all GPUs of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EnforcementFacts {
    /// True if the operator has turned the driver's limits on (`--driver-limits`).
    pub(super) is_enabled: bool,
    pub(super) driver: Option<String>,
    pub(super) cgroup: Cgroup,
    pub(super) route: HookRoute,
    pub(super) has_hami_core: bool,
    /// The directory of an MPS control daemon that runs on the node, if there is one.
    pub(super) mps: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GpuFacts {
    /// True if a CDI spec of the vendor has NVIDIA's hook for memory limits on this GPU.
    pub(super) has_hook: bool,
    pub(super) is_mig: bool,
}

/// The best enforcement level of memory limits that the facts about node and GPU allow: driver, else HAMi-core, else none.
pub(super) fn decide(node: &EnforcementFacts, gpu: GpuFacts) -> Enforcement {
    let mps = match &node.mps {
        Some(dir) => format!("; an MPS control daemon runs on the node ({dir}), with limits of its own"),
        None => String::new(),
    };
    let Some((reason, why)) = obstacle(node, gpu) else {
        return Enforcement {
            level: Level::Driver,
            reason: "DriverLimits",
            message: format!("the driver refuses allocations beyond a container's limit{mps}"),
        };
    };
    let (level, by) = if node.has_hami_core {
        let by = "HAMi-core's library limits containers that load it";
        (Level::HamiCore, by)
    } else {
        (Level::None, "nothing limits the memory that a container uses")
    };
    Enforcement {
        level,
        reason,
        message: format!("{by}; the driver does not: {why}{mps}"),
    }
}

/// The first reason that the driver cannot limit containers on the GPU, as one word and in a sentence.
fn obstacle(node: &EnforcementFacts, gpu: GpuFacts) -> Option<(&'static str, String)> {
    let (reason, why) = if gpu.is_mig {
        ("MigMode", "the GPU is in MIG mode")
    } else if let Some(obstacle) = driver_obstacle(node.driver.as_deref()) {
        return Some(obstacle);
    } else if node.cgroup == Cgroup::V1 {
        let why = "the node uses cgroup v1, and the driver needs cgroup v2";
        ("CgroupV1", why)
    } else if node.cgroup == Cgroup::Unknown {
        ("CgroupUnknown", "the node's cgroup version is not known")
    } else if let Some(obstacle) = route_obstacle(node.route) {
        obstacle
    } else if !gpu.has_hook {
        let why = "no CDI spec of the vendor has the hook apply-cuda-memory-limits for this GPU: install NVIDIA's container toolkit \
                   1.20.1 or newer, and generate the spec again";
        (HOOK_MISSING, why)
    } else if !node.is_enabled {
        // Last, so that an operator who turns the flag on knows that nothing else is missing.
        ("NotEnabled", "--driver-limits of the device plugin is off")
    } else {
        return None;
    };
    Some((reason, why.to_owned()))
}

/// The reason, as a word and a sentence, that this version of the driver cannot enforce memory limits; none if it can.
fn driver_obstacle(version: Option<&str>) -> Option<(&'static str, String)> {
    let Some(version) = version else {
        let why = "the version of the driver is not known".to_owned();
        return Some(("DriverUnknown", why));
    };
    let major = version.split('.').next()?.parse::<u32>();
    if matches!(major, Ok(FIRST_DRIVER..)) {
        return None;
    }
    let why = format!("driver {version} cannot do it, {FIRST_DRIVER} (CUDA 13.4) is the first that can");
    Some(("DriverTooOld", why))
}

/// The reason, as a word and a sentence, that NVIDIA's hook for memory limits does not run; none if it runs.
fn route_obstacle(route: HookRoute) -> Option<(&'static str, &'static str)> {
    match route {
        HookRoute::Spec | HookRoute::Runtime => None,
        HookRoute::ReadsOthers => {
            let why = "NVIDIA's hook may read a limit that an image or a pod sets instead of this plugin's: turn the runtime hook on \
                       (--nri-socket), or inject by CDI with containerd 2.4 or newer";
            Some(("VariableOrder", why))
        }
        HookRoute::Legacy => {
            let why = "NVIDIA's runtime injects GPUs by its legacy mode, which has no such hook; set its mode to cdi or jit-cdi";
            Some(("LegacyRuntime", why))
        }
        HookRoute::Unknown => {
            let why = "it is not known if the container runtime runs NVIDIA's hook";
            Some(("RuntimeUnknown", why))
        }
    }
}

/// The way in which NVIDIA's hook gets into containers. `runtime` is the container runtime's name and version; `has_nri` is true
/// if the runtime hook of this plugin is on, which sets a container's variables whatever its image and its pod say.
pub(super) fn hook_route(
    injection: &Injection,
    own: &OwnContainer,
    runtime: &str,
    has_nri: bool,
) -> HookRoute {
    match injection.mode {
        _ if !injection.is_possible() => HookRoute::Unknown,
        Mode::Cdi if has_nri || replaces_variables(runtime) => HookRoute::Spec,
        Mode::Cdi => HookRoute::ReadsOthers,
        Mode::Envvar if own.why_inconclusive().is_some() => HookRoute::Unknown,
        // This plugin's own container shows the mode of NVIDIA's runtime: cdi and jit-cdi replace the value `all` by `void`.
        Mode::Envvar => match own.visible_devices.as_deref() {
            Some("void") if has_nri => HookRoute::Runtime,
            // kubelet puts the plugin's value before the pod's. If the image sets a limit's variable too, the runtime replaces
            // that by each value in turn, and the last may come from a ConfigMap or a Secret, whose values the plugin cannot see.
            Some("void") => HookRoute::ReadsOthers,
            Some("all") => HookRoute::Legacy,
            _ => HookRoute::Unknown,
        },
    }
}

/// Returns true if this container runtime lets a CDI spec's variables replace those of the container.
fn replaces_variables(runtime: &str) -> bool {
    let Some(version) = runtime.strip_prefix("containerd://") else {
        return false;
    };
    let mut numbers = version.trim_start_matches('v').split('.').map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= FIRST_CONTAINERD,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
