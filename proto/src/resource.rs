//! Names of extended resources, and the labels that go with them.

/// gpushare's memory units; the default of [`ResourceNames::memory`].
pub const GPU_MEM: &str = "aliyun.com/gpu-mem";
/// Number of GPUs of a node; in node status only, not for pods.
pub const GPU_COUNT: &str = "aliyun.com/gpu-count";
/// Number of devices to share (Koordinator); served by the plugin.
pub const GPU_SHARED: &str = "koordinator.sh/gpu.shared";
/// GPU memory in bytes (Koordinator).
pub const GPU_MEMORY: &str = "koordinator.sh/gpu-memory";
/// GPU memory in percent of a device (Koordinator).
pub const GPU_MEMORY_RATIO: &str = "koordinator.sh/gpu-memory-ratio";
/// Computing power in percent of a device (Koordinator).
pub const GPU_CORE: &str = "koordinator.sh/gpu-core";
/// Percent of a device, core and memory alike (Koordinator; deprecated).
pub const GPU: &str = "koordinator.sh/gpu";
/// Percent of network adapters, 100 = one adapter (Koordinator).
pub const RDMA: &str = "koordinator.sh/rdma";
/// Percent of programmable cards, 100 = one card (Koordinator).
pub const FPGA: &str = "koordinator.sh/fpga";
/// Whole devices under the vendors' own names.
pub const VENDOR_GPUS: [&str; 3] = ["nvidia.com/gpu", "dcu.com/gpu", "amd.com/gpu"];

/// Names of the proposals' first version with their current names. Only pods that pass the webhook may use them: Kubernetes
/// does not accept them as extended resources.
pub const OLD_NAMES: [(&str, &str); 6] = [
    ("kubernetes.io/gpu", GPU),
    ("kubernetes.io/gpu-core", GPU_CORE),
    ("kubernetes.io/gpu-memory", GPU_MEMORY),
    ("kubernetes.io/gpu-memory-ratio", GPU_MEMORY_RATIO),
    ("kubernetes.io/rdma", RDMA),
    ("kubernetes.io/fpga", FPGA),
];

/// Pod and node label: the software that enforces a container's share of a GPU, such as `HAMi-core` (Koordinator).
pub const ISOLATION_PROVIDER: &str = "koordinator.sh/gpu-isolation-provider";
/// The isolation provider whose tools look for pods by [`HAMI_NODE`].
pub const HAMI_CORE: &str = "HAMi-core";
/// Pod label with the node's name: the provider's monitor of a node selects its pods by it (Koordinator).
pub const HAMI_NODE: &str = "hami.io/vgpu-node";

/// The amount of [`RDMA`] or [`FPGA`] that is one device.
pub const WHOLE_PERCENT: u64 = 100;

/// Default number of slots for sharers on one device (proposal "Enhance the GPU Share API").
pub const DEFAULT_SLOTS: u32 = 100;

/// Two more spellings, from the first proposal's example of an allocation record.
const SHORT_NAMES: [(&str, &str); 2] = [
    ("kubernetes.io/gpu-mem", GPU_MEMORY),
    ("kubernetes.io/gpu-mem-ratio", GPU_MEMORY_RATIO),
];

/// The current name of a resource of a Device object or an allocation record, which may use a deprecated name.
pub fn canonical(name: &str) -> &str {
    OLD_NAMES
        .iter()
        .chain(&SHORT_NAMES)
        .find(|(old, _)| *old == name)
        .map_or(name, |(_, now)| now)
}

/// Returns true if the resource belongs to GPUs in every cluster.
pub fn is_gpu_resource(name: &str, names: &ResourceNames) -> bool {
    let fixed = [
        GPU,
        GPU_CORE,
        GPU_MEMORY,
        GPU_MEMORY_RATIO,
        GPU_SHARED,
        GPU_MEM,
        GPU_COUNT,
    ];
    fixed.contains(&name) || VENDOR_GPUS.contains(&name) || name == names.memory
}

/// Returns true if the name may be a device's resource; names of Kubernetes itself, and names without a domain, are not.
pub fn is_extended(name: &str) -> bool {
    let domain = name.split_once('/').map(|(domain, _)| domain);
    // A name without a domain belongs to Kubernetes, as `cpu` and `hugepages-2Mi` do.
    domain.is_some_and(|domain| domain != "kubernetes.io" && !domain.ends_with(".kubernetes.io"))
}

/// The resource names that the operator of a cluster chooses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceNames {
    /// Memory units, [`GPU_MEM`] by default.
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
    /// The node annotation with the size of a memory unit, such as `aliyun.com/gpu-mem-unit: 256Mi`.
    pub fn memory_unit_annotation(&self) -> String {
        format!("{}-unit", self.memory)
    }
}
