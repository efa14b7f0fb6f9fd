//! A pod's request for devices, read from its containers in every dialect (family of resource names).
//!
//! Applies the rules of the proposals "Enhance the GPU Share API" and "GPU Sharing in Kubernetes", per container, and sums up the
//! pod's containers as kube-scheduler does. Reads no node, so memory units and ratios stay as they are, and so do amounts of
//! resources that are a device's only if some Device object lists them.

use std::fmt;

use crate::annotation::AnnotationError;
use crate::memory_text::{memory_text, units_text};
use crate::memory_unit::{MIB, MemoryUnit};
use crate::pod::{ALL_DEVICES, Container, Pod, PodSpec};
use crate::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, RDMA, ResourceNames, VENDOR_GPUS,
    WHOLE_PERCENT,
};

mod amounts;
pub mod hints;

/// Most devices that one pod may request; more is taken for a mistake.
const MAX_DEVICES: u64 = 1024;
/// Largest amount of any resource, 2^50 (1 PiB of memory), so that sums stay within 64 bits; more is taken for a mistake.
const MAX_AMOUNT: u64 = 1 << 50;
/// A request for this many times the memory of the largest GPU, or more, is taken for one in bytes or with a suffix.
const MAX_TIMES_LARGEST: u64 = 1000;

/// The family of resource names with which a pod requests GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `aliyun.com/gpu-mem`: memory units on one GPU (proposal "GPU Sharing in Kubernetes").
    Gpushare,
    /// `koordinator.sh/*`: amounts divided over `gpu.shared` GPUs (proposal "Enhance the GPU Share API").
    Koordinator,
    /// `nvidia.com/gpu`, `dcu.com/gpu` or `amd.com/gpu`: whole GPUs.
    Vendor,
    /// The annotation [`ALL_DEVICES`]: the pod sees all GPUs of the node, and has no amounts of any.
    AllDevices,
}

/// GPU memory, in the terms of the pod's dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// Memory units, whose size the node decides.
    Units(u64),
    /// Bytes, on all GPUs of the pod together.
    Bytes(u64),
    /// Percent of the memory of the GPUs that are chosen, 100 for each.
    Ratio(u64),
}

/// A request for GPUs: `devices` distinct GPUs, each with an equal share of every amount. The amounts are those of the pod: the
/// sum over app containers and sidecars, or the largest init container if that is more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GpuRequest {
    /// The dialect of the pod's resource names.
    pub dialect: Dialect,
    /// Number of distinct GPUs, from 1 to 1,024; for [`Dialect::AllDevices`] the number of `gpu.shared` that kubelet allocates.
    pub devices: u32,
    /// Memory on all GPUs together; zero bytes for [`Dialect::AllDevices`].
    pub memory: Memory,
    /// Percent of computing power on all GPUs together, 100 for each whole GPU; 0 if the pod requests none.
    pub core: u64,
}

/// A pod's request for devices of every type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PodRequest {
    /// The request for GPUs; `None` if the pod requests none.
    pub gpus: Option<GpuRequest>,
    /// Names and amounts of every other extended resource, in the order of names. Device objects alone show which are of devices.
    pub others: Vec<(String, u64)>,
}

/// The kind of a container, by the part of the pod's life in which it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerKind {
    /// An ordinary init container: it ends before the next container starts, and kubelet reuses its device IDs.
    Init,
    /// An init container with `restartPolicy: Always`: it keeps running, and keeps its device IDs.
    Sidecar,
    /// An ordinary container, which runs after all init containers.
    App,
}

/// One container's request: the number of device IDs that kubelet allocates for it, by resource, and its amounts of GPUs. For a
/// resource with 0 device IDs kubelet calls no Allocate.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContainerRequest {
    /// The container's name.
    pub name: String,
    /// The container's kind.
    pub kind: ContainerKind,
    /// Number of device IDs for memory units.
    pub memory_units: u64,
    /// Number of device IDs for `gpu.shared`.
    pub shared: u64,
    /// Number of device IDs for whole GPUs of a vendor's resource ([`VENDOR_GPUS`]).
    pub whole: u64,
    /// Number of device IDs for `rdma`, one for each percent of an adapter.
    pub rdma: u64,
    /// Number of device IDs for `fpga`, one for each percent of a card.
    pub fpga: u64,
    /// Bytes of GPU memory, on all GPUs of the pod together.
    pub memory_bytes: u64,
    /// Percent of GPU memory, on all GPUs of the pod together; `whole` is not included.
    pub memory_ratio: u64,
    /// Percent of computing power, on all GPUs of the pod together; `whole` is not included.
    pub core: u64,
}

/// A request that no node can satisfy, with the rule that it breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The resources of a container or of the pod break a rule, which the text has with names and values.
    #[error("{0}")]
    Resources(String),
    /// An annotation about the choice of nodes or devices cannot be read.
    #[error(transparent)]
    Annotation(#[from] AnnotationError),
    /// The annotation [`ALL_DEVICES`], which the operator does not allow.
    #[error(
        "annotation {ALL_DEVICES} is not allowed in this cluster: a pod sees all devices of its node and is charged for none only where \
         gpushare-scheduler and its device plugins run with --allow-all-devices; take the annotation out and ask for amounts"
    )]
    AllDevicesForbidden,
}

impl PodRequest {
    /// Reads a pod that may run already; `None` if it requests nothing that a device might have. Amounts without `gpu.shared`
    /// mean what they mean to Koordinator: 100 percent are one GPU.
    pub fn read(pod: &Pod, names: &ResourceNames) -> Result<Option<Self>, RequestError> {
        let sees_all = sees_all_devices(pod)?;
        amounts::refuse_mixed_dialects(&pod.spec, names)?;
        let request = amounts::request(&pod.spec, names, sees_all)?;
        // The scheduler ignores a pod that requests nothing, and keeps no memory for it.
        Ok((request != Self::default()).then_some(request))
    }

    /// Reads a pod that waits for a node, by the rules of [`Self::read`] and those that only a new pod can still obey.
    pub fn read_new(pod: &Pod, names: &ResourceNames) -> Result<Option<Self>, RequestError> {
        // The order decides which of several faults the author is shown, so checks stand here that `read` makes again.
        amounts::refuse_old_names(&pod.spec)?;
        sees_all_devices(pod)?;
        amounts::refuse_mixed_dialects(&pod.spec, names)?;
        amounts::refuse_unserved(pod, names)?;
        let request = Self::read(pod, names)?;
        // Other extended resources may belong to any project, so the annotations of pods that request them alone are not checked.
        if let Some(request) = request.as_ref().filter(|request| request.is_for_known_devices()) {
            hints::Hints::read(pod)?.refuse_impossible(pod, request)?;
            hints::refuse_unknown_policies(pod)?;
        }
        Ok(request)
    }

    /// Returns true if the pod requests GPUs, RDMA adapters or FPGAs, whose resources need no Device object to be known.
    fn is_for_known_devices(&self) -> bool {
        let mut others = self.others.iter();
        self.gpus.is_some() || others.any(|(resource, _)| resource == RDMA || resource == FPGA)
    }
}

/// Refuses a thousand times the memory units of the largest GPU of the cluster (`largest`), or more: kube-scheduler would find no
/// node, and say nothing of the mistake. `unit` is the size of one unit in bytes; `None` if it is not the same on all nodes.
pub fn refuse_other_unit(
    units: u64,
    largest: u64,
    unit: Option<u64>,
    names: &ResourceNames,
) -> Result<(), RequestError> {
    if largest == 0 || units / MAX_TIMES_LARGEST < largest {
        return Ok(());
    }
    let meant = match unit {
        Some(unit) => format!("did you mean {}?", meant_units(units, unit)),
        None => "write it without a suffix".to_owned(),
    };
    Err(RequestError::Resources(format!(
        "the pod: {} is {}, and the largest GPU of the cluster has {}; the amount is a number of units: {meant}",
        names.memory,
        units_text(units, unit),
        units_text(largest, unit)
    )))
}

/// The number of units that the author of an absurd number probably meant: `8192M` and `8G` are MiB and GiB, others bytes.
fn meant_units(units: u64, unit_bytes: u64) -> u64 {
    // The suffixes G and M, each with the binary suffix that was probably meant.
    const DECIMAL: [(u64, u64); 2] = [(1_000_000_000, 1 << 30), (1_000_000, MIB)];
    let suffix = DECIMAL.iter().find(|(decimal, _)| units.is_multiple_of(*decimal));
    let (decimal, binary) = suffix.unwrap_or(&(1, 1));
    (units / decimal * binary).div_ceil(unit_bytes.max(1))
}

/// Returns true if the pod has the annotation [`ALL_DEVICES`] with the value `true`; only that or `false` may be its value.
pub fn sees_all_devices(pod: &Pod) -> Result<bool, RequestError> {
    match pod.annotation(ALL_DEVICES) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => Err(AnnotationError::of_value(ALL_DEVICES, other, "neither true nor false").into()),
    }
}

/// The requests of the containers for which kubelet allocates device IDs, in the order of its Allocate calls.
pub fn containers(spec: &PodSpec, names: &ResourceNames) -> Vec<ContainerRequest> {
    let mut requests = Vec::new();
    // Init containers first: kubelet allocates in this order, and reuses their device IDs for later containers.
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
    /// Reads one container; `None` if kubelet allocates no device ID for it.
    fn read(container: &Container, kind: ContainerKind, names: &ResourceNames) -> Option<Self> {
        let count = |resource: &str| amounts::amount(container, resource).ok().flatten().unwrap_or(0);
        let request = Self {
            name: container.name.clone(),
            kind,
            memory_units: count(&names.memory),
            shared: count(GPU_SHARED),
            // A container has GPUs of one vendor: `refuse_mixed_dialects` refuses a pod with those of two.
            whole: VENDOR_GPUS.into_iter().map(count).sum(),
            rdma: count(RDMA),
            fpga: count(FPGA),
            memory_bytes: count(GPU_MEMORY),
            // `koordinator.sh/gpu` stands for equal percentages of memory and of computing power.
            memory_ratio: count(GPU_MEMORY_RATIO).saturating_add(count(GPU)),
            core: count(GPU_CORE).saturating_add(count(GPU)),
        };
        let n_ids = [
            request.memory_units,
            request.shared,
            request.whole,
            request.rdma,
            request.fpga,
        ];
        (n_ids != [0; 5]).then_some(request)
    }

    /// Returns true if the container requests GPU memory in any dialect.
    pub fn requests_memory(&self) -> bool {
        let amounts = [
            self.memory_units,
            self.memory_bytes,
            self.memory_ratio,
            self.whole,
        ];
        amounts != [0; 4]
    }

    /// The container's own part of the memory of one of the pod's `n_devices` GPUs with `device_bytes`, in bytes, rounded down,
    /// so that parts never sum up to more than the pod's; `None` if it requests no memory.
    pub fn memory_share(&self, n_devices: u64, device_bytes: u64, unit: MemoryUnit) -> Option<u64> {
        // 128 bits, because percent times the bytes of a GPU may pass 64.
        let ratio = u128::from(self.memory_ratio) + u128::from(WHOLE_PERCENT) * u128::from(self.whole);
        let bytes = if self.memory_units > 0 {
            u128::from(self.memory_units) * u128::from(unit.bytes())
        } else if self.memory_bytes > 0 {
            u128::from(self.memory_bytes)
        } else {
            ratio * u128::from(device_bytes) / u128::from(WHOLE_PERCENT)
        };
        // At least 1, against a division by 0: a record may have no devices.
        let share = u64::try_from(bytes / u128::from(n_devices.max(1))).unwrap_or(u64::MAX);
        self.requests_memory().then_some(share)
    }

    /// The container's own part of the computing power of one of the pod's `n_devices` GPUs, in percent, rounded down.
    pub fn core_share(&self, n_devices: u64) -> u64 {
        let whole = WHOLE_PERCENT.saturating_mul(self.whole);
        self.core.saturating_add(whole) / n_devices.max(1)
    }
}

impl GpuRequest {
    /// Returns true if other pods may share the pod's GPUs: the pod requests bytes, units, or less than whole GPUs.
    pub fn is_shared(&self) -> bool {
        match self.memory {
            Memory::Units(_) | Memory::Bytes(_) => true,
            // 100 percent of each GPU leave nothing to share.
            Memory::Ratio(ratio) => ratio < 100 * u64::from(self.devices),
        }
    }

    /// The doubt about a valid request for less memory than any program uses, with the amount that was probably meant: `HAMi`
    /// counts MiB where Koordinator counts bytes, so that its users write 8192 for 8 GiB.
    pub fn warning(&self) -> Option<String> {
        let Memory::Bytes(bytes) = self.memory else {
            return None;
        };
        let suffix = match bytes {
            // Below 256 the author means GiB, as hardly a program needs less than 256 MiB; else MiB, as few GPUs have 256 GiB.
            1..256 => "Gi",
            256..MIB => "Mi",
            // 0 is the amount of a pod that sees all GPUs.
            _ => return None,
        };
        let shown = memory_text(bytes);
        Some(format!("{GPU_MEMORY} is {shown}; did you mean {bytes}{suffix}?"))
    }
}

impl fmt::Display for GpuRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.devices == 1 { "" } else { "s" };
        match (self.dialect, self.memory) {
            (Dialect::AllDevices, _) => return f.write_str("all GPUs of the node and no amounts of them"),
            (Dialect::Vendor, _) => return write!(f, "{} whole GPU{plural}", self.devices),
            (_, Memory::Units(units)) => write!(f, "{units} memory units")?,
            (_, Memory::Bytes(bytes)) => write!(f, "{} of memory", memory_text(bytes))?,
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

#[cfg(test)]
mod tests;
