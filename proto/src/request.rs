//! A pod's request for devices, read from its containers in every dialect.
//!
//! Applies the rules of the proposals. Reads no node, so memory units and ratios stay as they are, and so do amounts of
//! resources that are a device's only if some Device object lists them.

use std::fmt;

use crate::memory_unit::MemoryUnit;
use crate::pod::{ALL_DEVICES, Container, Pod, PodSpec};
use crate::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, RDMA, ResourceNames, VENDOR_GPUS,
    WHOLE_PERCENT,
};

mod amounts;
pub mod hints;

pub use amounts::refuse_old_names;

/// Most devices that one pod may share.
const MAX_DEVICES: u64 = 1024;
/// Largest amount of any kind; more is taken for a mistake. 1 PiB of memory, in bytes.
const MAX_AMOUNT: u64 = 1 << 50;
/// Most characters of a value that an error repeats.
const EXCERPT: usize = 64;

/// The family of resource names with which a pod requests GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `aliyun.com/gpu-mem`: memory units on one device.
    Gpushare,
    /// `koordinator.sh/*`: amounts divided over `gpu.shared` devices.
    Koordinator,
    /// `nvidia.com/gpu` and the like: whole devices.
    Vendor,
    /// The annotation [`ALL_DEVICES`]: all devices of the node, and no amounts of any.
    AllDevices,
}

/// Memory in the terms that the pod used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// Units of the node that the pod will run on.
    Units(u64),
    /// Bytes.
    Bytes(u64),
    /// Percent of the device that is chosen.
    Ratio(u64),
}

/// A request for GPUs: `devices` distinct devices with an equal share of each amount.
///
/// Amounts are those of the pod: app containers and sidecars summed, or the largest init container if that is more. Whole
/// devices of a vendor's resource are 100 percent of memory and core each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GpuRequest {
    /// The names that the pod uses.
    pub dialect: Dialect,
    /// Number of distinct devices, at least 1; for [`Dialect::AllDevices`] the number of `gpu.shared` that kubelet allocates.
    pub devices: u32,
    /// Memory of all devices together; zero bytes for [`Dialect::AllDevices`].
    pub memory: Memory,
    /// Percent of computing power of all devices together; 0 if none was requested.
    pub core: u64,
}

/// A pod's request for devices of every type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PodRequest {
    /// GPUs, if any.
    pub gpus: Option<GpuRequest>,
    /// Amounts of every other extended resource, by name. Only Device objects show which of them are devices'.
    pub others: Vec<(String, u64)>,
}

/// The part that a container plays in the pod's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerKind {
    /// Ends before the next container starts; kubelet then reuses its device IDs.
    Init,
    /// An init container that keeps running and keeps its device IDs.
    Sidecar,
    /// An app container.
    App,
}

/// One container's request: the number of device IDs that kubelet will allocate for it, by resource, and its amounts of GPUs.
///
/// 0 device IDs mean no Allocate call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContainerRequest {
    /// The container's name.
    pub name: String,
    /// Its kind.
    pub kind: ContainerKind,
    /// Memory units.
    pub memory_units: u64,
    /// `gpu.shared`.
    pub shared: u64,
    /// Whole GPUs of a vendor's resource ([`VENDOR_GPUS`]).
    pub whole: u64,
    /// `rdma`, percent.
    pub rdma: u64,
    /// `fpga`, percent.
    pub fpga: u64,
    /// Bytes of GPU memory, on all of the pod's devices together.
    pub memory_bytes: u64,
    /// Percent of GPU memory, on all of the pod's devices together; whole GPUs not included.
    pub memory_ratio: u64,
    /// Percent of computing power, on all of the pod's devices together; whole GPUs not included.
    pub core: u64,
}

/// A request that can never be placed, with the rule that it breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A container requests amounts, but no resource for which kubelet calls the plugin.
    #[error(
        "container {container:?} asks for {resource} ({value}) but not for {GPU_SHARED}; without it kubelet does not ask for a device"
    )]
    NotServed {
        /// The container.
        container: String,
        /// One of the amounts that it requests.
        resource: String,
        /// Its amount.
        value: String,
    },
    /// A pod uses the names of two dialects.
    #[error("the pod asks for both {one} and {other}; use the resources of one dialect only")]
    MixedDialects {
        /// A resource of one dialect, with its amount.
        one: String,
        /// A resource of the other, with its amount.
        other: String,
    },
    /// A quantity that does not parse, or is out of range.
    #[error(
        "container {container:?}: {resource} is {value:?}, which is not a whole number up to {MAX_AMOUNT}"
    )]
    Quantity {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
        /// The value in the manifest.
        value: String,
    },
    /// A combination that the proposals forbid.
    #[error("{place}: {rule}")]
    Rule {
        /// The container, or the pod.
        place: String,
        /// The rule, with names and values.
        rule: String,
    },
    /// A deprecated resource name, which Kubernetes reserves for itself.
    #[error("container {container:?} asks for {old}, an old name of {new}; write {new} alone")]
    OldName {
        /// The container.
        container: String,
        /// The name that it uses.
        old: &'static str,
        /// The current name.
        new: &'static str,
    },
    /// The annotation [`ALL_DEVICES`] is not a boolean.
    #[error("annotation {ALL_DEVICES} is {value:?}, neither true nor false")]
    AllDevicesValue {
        /// The annotation's value.
        value: String,
    },
    /// An annotation about the choice of nodes or devices cannot be read.
    #[error("annotation {key} is {value:?}: {rule}")]
    Annotation {
        /// The annotation.
        key: &'static str,
        /// The beginning of its value.
        value: String,
        /// The rule that it breaks.
        rule: String,
    },
    /// The annotation [`ALL_DEVICES`] where the operator does not allow it.
    #[error(
        "annotation {ALL_DEVICES} is not allowed in this cluster: a pod sees all devices of its node and is charged for none only where \
         gpushare-scheduler and its device plugins run with --allow-all-devices; take the annotation out and ask for amounts"
    )]
    AllDevicesForbidden,
}

impl PodRequest {
    /// Reads a pod that may be running; `None` if it requests nothing that a device might have.
    ///
    /// Amounts without `gpu.shared` mean what they mean to Koordinator: 100 percent are one device. [`Self::read_new`] applies
    /// more rules.
    ///
    /// # Errors
    /// The first rule that a container, or the pod as a whole, breaks.
    pub fn read(pod: &Pod, names: &ResourceNames) -> Result<Option<Self>, RequestError> {
        let sees_all = sees_all_devices(pod)?;
        amounts::refuse_mixed_dialects(&pod.spec, names)?;
        let request = amounts::GpuAmounts::of_pod(&pod.spec, names, sees_all)?.request(names, sees_all)?;
        Ok(Some(request).filter(|request| *request != Self::default()))
    }

    /// Reads a pod that is to be placed; `None` if it requests nothing that a device might have.
    ///
    /// # Errors
    /// The first rule that the pod breaks: those of [`Self::read`], and those that only a new pod can still obey.
    pub fn read_new(pod: &Pod, names: &ResourceNames) -> Result<Option<Self>, RequestError> {
        if amounts::asks_for_known_devices(&pod.spec, names) {
            refuse_old_names(&pod.spec)?;
        }
        sees_all_devices(pod)?;
        amounts::refuse_mixed_dialects(&pod.spec, names)?;
        amounts::refuse_unserved(pod, names)?;
        let request = Self::read(pod, names)?;
        // Other resources may belong to any project, so the annotations of their pods are not checked.
        if let Some(request) = request.as_ref().filter(|request| request.is_for_known_devices()) {
            hints::Hints::read(pod)?.refuse_impossible(pod, request)?;
            hints::refuse_unknown_policies(pod)?;
        }
        Ok(request)
    }

    /// Returns true if it names a resource that belongs to a device in every cluster.
    fn is_for_known_devices(&self) -> bool {
        let mut names = self.others.iter().map(|(resource, _)| resource);
        self.gpus.is_some() || names.any(|resource| resource == RDMA || resource == FPGA)
    }
}

/// Checks a new pod by the rules of the filter and of the validating webhook.
///
/// # Errors
/// The first rule that the pod breaks, with the container, the resource, the value and the rule.
pub fn validate(pod: &Pod, names: &ResourceNames) -> Result<(), RequestError> {
    PodRequest::read_new(pod, names).map(drop)
}

/// Returns true if the pod has the annotation [`ALL_DEVICES`] with the value `true`.
///
/// # Errors
/// The value is neither `true` nor `false`.
pub fn sees_all_devices(pod: &Pod) -> Result<bool, RequestError> {
    match hints::annotation(pod, ALL_DEVICES) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => Err(RequestError::AllDevicesValue {
            value: excerpt(other),
        }),
    }
}

/// The device IDs that kubelet will allocate for each container, in kubelet's order; empty if none.
///
/// Quantities that do not parse count as nothing: kubelet never admits such a container.
pub fn containers(spec: &PodSpec, names: &ResourceNames) -> Vec<ContainerRequest> {
    let mut requests = Vec::new();
    for container in &spec.init_containers {
        let kind = if container.is_sidecar() {
            ContainerKind::Sidecar
        } else {
            ContainerKind::Init
        };
        requests.extend(ContainerRequest::read(container, kind, names));
    }
    for container in &spec.containers {
        requests.extend(ContainerRequest::read(container, ContainerKind::App, names));
    }
    requests
}

impl ContainerRequest {
    /// `None` if kubelet allocates no device ID for the container.
    fn read(container: &Container, kind: ContainerKind, names: &ResourceNames) -> Option<Self> {
        let count = |resource: &str| amounts::amount(container, resource).ok().flatten().unwrap_or(0);
        let request = Self {
            name: container.name.clone(),
            kind,
            memory_units: count(&names.memory),
            shared: count(GPU_SHARED),
            whole: VENDOR_GPUS.iter().map(|name| count(name)).sum(),
            rdma: count(RDMA),
            fpga: count(FPGA),
            memory_bytes: count(GPU_MEMORY),
            memory_ratio: count(GPU_MEMORY_RATIO).saturating_add(count(GPU)),
            core: count(GPU_CORE).saturating_add(count(GPU)),
        };
        let counts = [
            request.memory_units,
            request.shared,
            request.whole,
            request.rdma,
            request.fpga,
        ];
        (counts != [0; 5]).then_some(request)
    }

    /// True if the container requests GPU memory, in whatever terms.
    pub fn requests_memory(&self) -> bool {
        [
            self.memory_units,
            self.memory_bytes,
            self.memory_ratio,
            self.whole,
        ] != [0; 4]
    }

    /// The container's own part of the memory of one device, of which the pod has `n_devices`, in bytes, rounded down; `None` if the
    /// container requests no memory.
    ///
    /// The parts of containers that run together never sum up to more than the pod's part, since the pod's request is their sum.
    pub fn memory_share(&self, n_devices: u64, device_bytes: u64, unit: MemoryUnit) -> Option<u64> {
        let ratio = u128::from(self.memory_ratio) + u128::from(WHOLE_PERCENT) * u128::from(self.whole);
        let bytes = if self.memory_units > 0 {
            u128::from(self.memory_units) * u128::from(unit.bytes())
        } else if self.memory_bytes > 0 {
            u128::from(self.memory_bytes)
        } else {
            ratio * u128::from(device_bytes) / u128::from(WHOLE_PERCENT)
        };
        let share = bytes / u128::from(n_devices.max(1));
        self.requests_memory()
            .then(|| u64::try_from(share).unwrap_or(u64::MAX))
    }

    /// The container's own part of the computing power of one device, of which the pod has `n_devices`, in percent, rounded down; 0
    /// if the container requests none.
    pub fn core_share(&self, n_devices: u64) -> u64 {
        let whole = WHOLE_PERCENT.saturating_mul(self.whole);
        self.core.saturating_add(whole) / n_devices.max(1)
    }
}

impl GpuRequest {
    /// Returns true if the pod may share its devices with others: it requests bytes, units, or less than whole devices.
    pub fn is_shared(&self) -> bool {
        match self.memory {
            Memory::Units(_) | Memory::Bytes(_) => true,
            Memory::Ratio(ratio) => ratio < 100 * u64::from(self.devices),
        }
    }
}

impl fmt::Display for GpuRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.devices == 1 { "" } else { "s" };
        match (self.dialect, self.memory) {
            (Dialect::AllDevices, _) => return f.write_str("all GPUs of the node and no amounts of them"),
            (Dialect::Vendor, _) => return write!(f, "{} whole GPU{plural}", self.devices),
            (_, Memory::Units(units)) => write!(f, "{units} memory units")?,
            (_, Memory::Bytes(bytes)) => write!(f, "{bytes} bytes of memory")?,
            (_, Memory::Ratio(ratio)) => write!(f, "{ratio} % of memory")?,
        }
        if self.core > 0 {
            write!(f, " and {} % of core", self.core)?;
        }
        write!(f, " on {} device{plural}", self.devices)
    }
}

impl fmt::Display for PodRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> = self.gpus.iter().map(ToString::to_string).collect();
        for (resource, amount) in &self.others {
            parts.push(format!("{resource} {amount}"));
        }
        f.write_str(&parts.join(", "))
    }
}

fn excerpt(text: &str) -> String {
    text.chars().take(EXCERPT).collect()
}

#[cfg(test)]
mod tests;
