//! Names of extended resources, and the labels that go with them.
//!
//! "Koordinator" marks names of the proposals "Enhance the GPU Share API" and "Fine-grained device scheduling", and "gpushare"
//! those of "GPU Sharing in Kubernetes".

/// GPU memory in units of a size that each node chooses (gpushare); the default of [`ResourceNames::memory`].
pub const GPU_MEM: &str = "aliyun.com/gpu-mem";
/// Number of GPUs of a node (gpushare); only in node status, no pod requests it.
pub const GPU_COUNT: &str = "aliyun.com/gpu-count";
/// Number of GPUs over which a pod's amounts are divided; in node status, [`DEFAULT_SLOTS`] for each GPU (Koordinator).
pub const GPU_SHARED: &str = "koordinator.sh/gpu.shared";
/// GPU memory in bytes, on all GPUs of the pod together (Koordinator).
pub const GPU_MEMORY: &str = "koordinator.sh/gpu-memory";
/// GPU memory in percent, 100 for each GPU (Koordinator).
pub const GPU_MEMORY_RATIO: &str = "koordinator.sh/gpu-memory-ratio";
/// Computing power in percent, 100 for each GPU (Koordinator).
pub const GPU_CORE: &str = "koordinator.sh/gpu-core";
/// Short for equal percentages of [`GPU_CORE`] and [`GPU_MEMORY_RATIO`] (Koordinator, deprecated there).
pub const GPU: &str = "koordinator.sh/gpu";
/// All of Koordinator's names for amounts of GPUs.
pub const GPU_SHARES: [&str; 5] = [GPU_SHARED, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE, GPU];
/// RDMA network adapters in percent, 100 for each adapter (Koordinator).
pub const RDMA: &str = "koordinator.sh/rdma";
/// FPGA cards in percent, 100 for each card (Koordinator).
pub const FPGA: &str = "koordinator.sh/fpga";
/// Numbers of whole GPUs, by the resource names of the vendors' own device plugins: NVIDIA, Hygon, AMD.
pub const VENDOR_GPUS: [&str; 3] = ["nvidia.com/gpu", "dcu.com/gpu", "amd.com/gpu"];

/// Names of "Fine-grained device scheduling", each with its current name. Kubernetes reserves their domain.
pub const OLD_NAMES: [(&str, &str); 6] = [
    ("kubernetes.io/gpu", GPU),
    ("kubernetes.io/gpu-core", GPU_CORE),
    ("kubernetes.io/gpu-memory", GPU_MEMORY),
    ("kubernetes.io/gpu-memory-ratio", GPU_MEMORY_RATIO),
    ("kubernetes.io/rdma", RDMA),
    ("kubernetes.io/fpga", FPGA),
];

/// Label of pods and nodes: the software that enforces containers' shares of GPUs, such as `HAMi-core` (Koordinator).
pub const ISOLATION_PROVIDER: &str = "koordinator.sh/gpu-isolation-provider";
/// The value of [`ISOLATION_PROVIDER`] whose tools look for pods by [`HAMI_NODE`].
pub const HAMI_CORE: &str = "HAMi-core";
/// Label of pods with the name of their node, by which the monitor of `HAMi-core` on a node selects its pods (Koordinator).
pub const HAMI_NODE: &str = "hami.io/vgpu-node";

/// The percentage that is one whole device.
pub const WHOLE_PERCENT: u64 = 100;

/// Default number of slots for sharers on one device (proposal "Enhance the GPU Share API").
pub const DEFAULT_SLOTS: u32 = 100;

/// Two more old names, which "Fine-grained device scheduling" uses in its example of an allocation record.
const SHORT_NAMES: [(&str, &str); 2] = [
    ("kubernetes.io/gpu-mem", GPU_MEMORY),
    ("kubernetes.io/gpu-mem-ratio", GPU_MEMORY_RATIO),
];

/// The current name of a resource, for names in Device objects and allocation records, which may be deprecated ones.
pub fn canonical(name: &str) -> &str {
    // Few enough that a map would not pay.
    for (old, current) in OLD_NAMES.iter().chain(&SHORT_NAMES) {
        if *old == name {
            return current;
        }
    }
    name
}

/// Returns true if the resource is one of GPUs in every cluster, whatever its Device objects list.
pub fn is_gpu_resource(name: &str, names: &ResourceNames) -> bool {
    let is_fixed = [GPU_MEM, GPU_COUNT].contains(&name) || GPU_SHARES.contains(&name);
    // The default name counts also where the operator chose another: an old manifest is still about GPUs.
    is_fixed || VENDOR_GPUS.contains(&name) || name == names.memory
}

/// Returns true if the name is that of an extended resource: one with a domain that is not Kubernetes' own.
pub fn is_extended(name: &str) -> bool {
    // A name without a domain belongs to Kubernetes, as `cpu` and `hugepages-2Mi` do.
    let Some((domain, _)) = name.split_once('/') else {
        return false;
    };
    domain != "kubernetes.io" && !domain.ends_with(".kubernetes.io")
}

/// The resource names that the operator of a cluster chooses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceNames {
    /// The resource of GPU memory in units, [`GPU_MEM`] by default.
    pub memory: String,
}

impl Default for ResourceNames {
    fn default() -> Self {
        Self {
            memory: GPU_MEM.to_owned(),
        }
    }
}

impl ResourceNames {
    /// The annotation of nodes with the size of a memory unit, as in `aliyun.com/gpu-mem-unit: 256Mi`.
    pub fn memory_unit_annotation(&self) -> String {
        format!("{}-unit", self.memory)
    }
}
