//! This plugin's own container: it shows the effect that the vendor's variable has in this container runtime.

use proto::record::VISIBLE_DEVICES;

use crate::node::pods::PodUid;

use super::mode::VOID;

const CAP_SYS_ADMIN: u32 = 21;

/// The facts that show from where this plugin's own container got NVML.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnContainer {
    /// True if this process loads NVML from a directory of the host (`--driver-root`), so the runtime need not have mounted NVML.
    pub(crate) has_driver_root: bool,
    pub(crate) is_privileged: bool,
    /// The UID of this plugin's pod, if it runs in one.
    pub(crate) pod: Option<PodUid>,
    /// True until the API server has shown that pod, so that its `RuntimeClass` is not known yet.
    pub(crate) is_pod_awaited: bool,
    /// The `RuntimeClass` of this plugin's pod, if it has one.
    pub(crate) runtime_class: Option<String>,
    pub(crate) visible_devices: Option<String>,
}

impl OwnContainer {
    /// The facts about the container in which this process runs, in the pod with this UID.
    pub(crate) fn observe(has_driver_root: bool, pod: Option<&str>) -> Self {
        Self {
            has_driver_root,
            is_privileged: is_privileged(),
            pod: pod.map(PodUid::from),
            is_pod_awaited: false,
            runtime_class: None,
            visible_devices: own_visible_devices(),
        }
    }

    /// The reason that the runtime's treatment of this container says nothing about others, if there is one.
    pub(crate) fn why_inconclusive(&self) -> Option<&'static str> {
        if self.is_pod_awaited {
            Some("the pods of this node are not known yet")
        } else if self.is_privileged {
            // NVIDIA's runtime can be configured to accept the variable of privileged containers alone.
            Some("the plugin's own container is privileged, so it sees all GPUs in any case")
        } else if self.has_driver_root {
            Some(
                "the plugin's own container has the driver from --driver-root, not from the container runtime",
            )
        } else {
            None
        }
    }
}

/// The value of `NVIDIA_VISIBLE_DEVICES` that the plugin's own container was given; `void` if any of several values is that.
fn own_visible_devices() -> Option<String> {
    let mut values = Vec::new();
    for (name, value) in std::env::vars_os() {
        if name == VISIBLE_DEVICES {
            values.extend(value.into_string());
        }
    }
    // NVIDIA's runtime appends its own value `void` and leaves the first one in its place.
    let void = values.iter().position(|value| value == VOID);
    values.into_iter().nth(void.unwrap_or(0))
}

/// True if this process has `CAP_SYS_ADMIN`, by which privileged containers are recognised.
fn is_privileged() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let Some(mask) = status.lines().find_map(|line| line.strip_prefix("CapEff:")) else {
        return false;
    };
    // Kubernetes gives containers that are not privileged no CAP_SYS_ADMIN unless their author adds it.
    u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask >> CAP_SYS_ADMIN & 1 == 1)
}
