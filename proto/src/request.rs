//! What a pod asks for, read from its containers in the terms of every dialect.
//!
//! Applies the proposals' rules; knows no node, so memory units and ratios stay what they are, and so do amounts of
//! resources that no device has been seen to have.

use std::fmt;

use crate::pod::{ALL_DEVICES, Pod, PodSpec};
use crate::resource::{
    FPGA, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, RDMA, ResourceNames, VENDOR_GPUS,
};

mod amounts;
pub mod hints;
pub mod policy;
mod rules;

/// Most devices that one pod may share.
const MAX_DEVICES: u64 = 1024;
/// Largest amount of any kind that is not taken for a mistake: 1 PiB of memory, in bytes.
const MAX_AMOUNT: u64 = 1 << 50;

/// Whose words a pod uses for GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `aliyun.com/gpu-mem`: memory units on one device.
    Gpushare,
    /// `koordinator.sh/*`: amounts shared out over `gpu.shared` devices.
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

/// The GPUs that a pod asks for: `devices` distinct devices with an equal share of each amount.
///
/// Amounts are those of the pod: app containers and sidecars summed, or the largest init container if that is more. Whole
/// devices in a vendor's name are 100 percent of memory and core each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GpuRequest {
    /// Whose words the pod uses.
    pub dialect: Dialect,
    /// Number of distinct devices, at least 1; for [`Dialect::AllDevices`] the shares that kubelet hands out.
    pub devices: u32,
    /// Memory of all devices together; zero bytes for [`Dialect::AllDevices`].
    pub memory: Memory,
    /// Percent of computing power of all devices together; 0 if none was asked for.
    pub core: u64,
}

/// What a pod asks for in all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PodRequest {
    /// GPUs, if any.
    pub gpus: Option<GpuRequest>,
    /// Amounts of every other extended resource, by name: whether devices have it, only Device objects say.
    pub others: Vec<(String, u64)>,
}

/// How a container relates to the pod's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerKind {
    /// Ends before the next container starts; kubelet hands its device IDs on.
    Init,
    /// An init container that keeps running and keeps its device IDs.
    Sidecar,
    /// An app container.
    App,
}

/// What kubelet will ask the plugin to allocate for one container.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContainerRequest {
    /// The container's name.
    pub name: String,
    /// Its kind.
    pub kind: ContainerKind,
    /// Memory units: an Allocate call with so many IDs, none if 0.
    pub memory_units: u64,
    /// `gpu.shared`: an Allocate call with so many IDs, none if 0.
    pub shared: u64,
    /// Whole GPUs in a vendor's name ([`VENDOR_GPUS`]): an Allocate call with so many IDs, none if 0.
    pub whole: u64,
    /// `rdma`, percent: an Allocate call with so many IDs, none if 0.
    pub rdma: u64,
    /// `fpga`, percent: an Allocate call with so many IDs, none if 0.
    pub fpga: u64,
}

/// A request that can never be placed, with the rule that it breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A container asks for amounts but for nothing that makes kubelet call the plugin.
    #[error(
        "container {container:?} asks for {resource} ({value}) but not for {GPU_SHARED}; without it kubelet does not ask for a device"
    )]
    NotServed {
        /// The container.
        container: String,
        /// One of the amounts that it asks for.
        resource: String,
        /// How much of it.
        value: String,
    },
    /// A pod speaks two dialects.
    #[error("the pod asks for both {one} and {other}; use the resources of one dialect only")]
    MixedDialects {
        /// A resource of one dialect, and how much of it.
        one: String,
        /// The same of the other.
        other: String,
    },
    /// A quantity that makes no sense.
    #[error(
        "container {container:?}: {resource} is {value:?}, which is not a whole number up to {MAX_AMOUNT}"
    )]
    Quantity {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
        /// What the pod's author wrote.
        value: String,
    },
    /// A combination that the proposal forbids.
    #[error("{place}: {rule}")]
    Rule {
        /// The container, or the pod.
        place: String,
        /// The rule, with names and values.
        rule: String,
    },
    /// A resource by a name that Kubernetes takes for its own.
    #[error("container {container:?} asks for {old}, an old name of {new}; write {new} alone")]
    OldName {
        /// The container.
        container: String,
        /// The name that it uses.
        old: &'static str,
        /// What the resource is called now.
        new: &'static str,
    },
    /// The mark for all GPUs of a node cannot be read.
    #[error("annotation {ALL_DEVICES} is {value:?}, neither true nor false")]
    Mark {
        /// What the pod's author wrote.
        value: String,
    },
    /// An annotation that says how devices are to be chosen cannot be read.
    #[error("annotation {key} is {value:?}: {rule}")]
    Hint {
        /// The annotation.
        key: &'static str,
        /// The beginning of what the pod's author wrote.
        value: String,
        /// What is wrong with it.
        rule: String,
    },
    /// All GPUs of a node, where the cluster does not allow that.
    #[error(
        "annotation {ALL_DEVICES} is not allowed in this cluster: a pod sees all devices of its node and is charged for none only where \
         gpushare-scheduler and its device plugins run with --allow-all-devices; take the annotation out and ask for amounts"
    )]
    AllDevicesForbidden,
}

impl PodRequest {
    /// Reads a pod that may be running already; `None` if it asks for nothing that a device might have.
    ///
    /// Amounts without `gpu.shared` are understood as Koordinator does: 100 percent are a device. New pods that nobody would
    /// serve are what [`validate`] refuses besides.
    ///
    /// # Errors
    /// The first rule that a container, or the pod as a whole, breaks.
    pub fn of(pod: &Pod, names: &ResourceNames) -> Result<Option<Self>, RequestError> {
        let sees_all = sees_all_devices(pod)?;
        rules::refuse_mixed_dialects(&pod.spec, names)?;
        let request = amounts::Amounts::of_pod(&pod.spec, names, sees_all)?.request(names, sees_all)?;
        Ok(Some(request).filter(|request| *request != Self::default()))
    }

    /// Reads a pod that is to be placed; `None` if it asks for nothing that a device might have.
    ///
    /// # Errors
    /// As [`validate`].
    pub fn of_new(pod: &Pod, names: &ResourceNames) -> Result<Option<Self>, RequestError> {
        if rules::asks_for_ours(&pod.spec, names) {
            refuse_old_names(&pod.spec)?;
        }
        sees_all_devices(pod)?;
        rules::refuse_mixed_dialects(&pod.spec, names)?;
        rules::refuse_unserved(pod, names)?;
        let request = Self::of(pod, names)?;
        // Of other resources nobody knows here whether they are devices' at all.
        if let Some(request) = request.as_ref().filter(|request| request.is_for_known_devices()) {
            hints::Hints::of(pod)?.refuse_impossible(pod, request)?;
            policy::refuse_unknown(pod)?;
        }
        Ok(request)
    }

    /// Whether it names a resource that is a device's without looking at any.
    fn is_for_known_devices(&self) -> bool {
        self.gpus.is_some()
            || self
                .others
                .iter()
                .any(|(resource, _)| resource == RDMA || resource == FPGA)
    }
}

/// Refuses names of the proposals' first version, which the mutating webhook replaces where it is asked and can.
///
/// # Errors
/// The first container that uses one.
pub fn refuse_old_names(spec: &PodSpec) -> Result<(), RequestError> {
    rules::refuse_old_names(spec)
}

/// Whether a pod's request can be placed on some node or other: the rules of the filter and of the validating webhook.
///
/// # Errors
/// The first rule that the pod breaks, in words that name the container, the resource, the value and the rule.
pub fn validate(pod: &Pod, names: &ResourceNames) -> Result<(), RequestError> {
    PodRequest::of_new(pod, names).map(drop)
}

/// Whether a pod is marked to see all GPUs of its node.
///
/// # Errors
/// The mark is neither `true` nor `false`.
pub fn sees_all_devices(pod: &Pod) -> Result<bool, RequestError> {
    match pod
        .metadata
        .annotations
        .as_ref()
        .and_then(|annotations| annotations.get(ALL_DEVICES))
        .map(String::as_str)
    {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => Err(RequestError::Mark {
            value: other.chars().take(64).collect(),
        }),
    }
}

/// What kubelet will ask the plugin for, container by container in kubelet's order; empty if nothing.
///
/// Unreadable quantities count as nothing: kubelet never admits such a container.
pub fn containers(spec: &PodSpec, names: &ResourceNames) -> Vec<ContainerRequest> {
    let inits = spec.init_containers.iter().map(|c| {
        (
            c,
            if c.is_sidecar() {
                ContainerKind::Sidecar
            } else {
                ContainerKind::Init
            },
        )
    });
    let apps = spec.containers.iter().map(|c| (c, ContainerKind::App));
    inits
        .chain(apps)
        .map(|(container, kind)| {
            let count = |resource: &str| amounts::amount(container, resource).ok().flatten().unwrap_or(0);
            ContainerRequest {
                name: container.name.clone(),
                kind,
                memory_units: count(&names.memory),
                shared: count(GPU_SHARED),
                whole: VENDOR_GPUS.iter().map(|name| count(name)).sum(),
                rdma: count(RDMA),
                fpga: count(FPGA),
            }
        })
        .filter(|request| !request.is_empty())
        .collect()
}

impl ContainerRequest {
    /// Whether kubelet asks the plugin for nothing.
    fn is_empty(&self) -> bool {
        [self.memory_units, self.shared, self.whole, self.rdma, self.fpga] == [0; 5]
    }
}

impl GpuRequest {
    /// Whether others may be on the pod's devices beside it: it asks for bytes or units, or for less than whole devices.
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
        let gpus = self.gpus.map(|gpus| gpus.to_string());
        let others = self
            .others
            .iter()
            .map(|(resource, amount)| format!("{resource} {amount}"));
        f.write_str(&gpus.into_iter().chain(others).collect::<Vec<_>>().join(", "))
    }
}

/// The names in which a pod may ask for amounts of GPUs besides units.
const AMOUNTS: [&str; 4] = [crate::resource::GPU, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE];

#[cfg(test)]
mod tests;
