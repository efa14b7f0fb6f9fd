//! Extended resource names, and which of them a node's plugin serves.

/// gpushare's memory units; the default of [`ResourceNames::memory`].
pub const GPU_MEM: &str = "aliyun.com/gpu-mem";
/// Number of GPUs of a node; in node status only, no pod asks for it.
pub const GPU_COUNT: &str = "aliyun.com/gpu-count";
/// Number of devices to share (Koordinator); served by the plugin.
pub const GPU_SHARED: &str = "koordinator.sh/gpu.shared";
/// GPU memory in bytes (Koordinator).
pub const GPU_MEMORY: &str = "koordinator.sh/gpu-memory";
/// GPU memory in percent of a device (Koordinator).
pub const GPU_MEMORY_RATIO: &str = "koordinator.sh/gpu-memory-ratio";
/// Computing power in percent of a device (Koordinator).
pub const GPU_CORE: &str = "koordinator.sh/gpu-core";
/// Percent of a device, core and memory alike (Koordinator, kept for old pods).
pub const GPU: &str = "koordinator.sh/gpu";
/// Percent of network adapters, 100 = one adapter (Koordinator).
pub const RDMA: &str = "koordinator.sh/rdma";
/// Percent of programmable cards, 100 = one card (Koordinator).
pub const FPGA: &str = "koordinator.sh/fpga";
/// Whole devices in the vendors' own names.
pub const VENDOR_GPUS: [&str; 3] = ["nvidia.com/gpu", "dcu.com/gpu", "amd.com/gpu"];

/// Names of the proposals' first version, and what each is called now. Only pods that pass the webhook may still use them:
/// Kubernetes does not take them for extended resources.
pub const OLD_NAMES: [(&str, &str); 6] = [
    ("kubernetes.io/gpu", GPU),
    ("kubernetes.io/gpu-core", GPU_CORE),
    ("kubernetes.io/gpu-memory", GPU_MEMORY),
    ("kubernetes.io/gpu-memory-ratio", GPU_MEMORY_RATIO),
    ("kubernetes.io/rdma", RDMA),
    ("kubernetes.io/fpga", FPGA),
];

/// Shares that one device offers unless a flag says otherwise (proposal "Enhance the GPU Share API").
pub const DEFAULT_SLOTS: u32 = 100;

/// The resource names that are a cluster's choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceNames {
    /// Memory units, [`GPU_MEM`] by default.
    pub memory: String,
}

impl Default for ResourceNames {
    fn default() -> Self {
        Self { memory: GPU_MEM.to_owned() }
    }
}

impl ResourceNames {
    /// The node annotation that says how much one memory unit is, e.g. `aliyun.com/gpu-mem-unit: 256Mi`.
    pub fn memory_unit_annotation(&self) -> String {
        format!("{}-unit", self.memory)
    }
}
