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

/// Pod and node label: what limits a container that shares a GPU at run time, e.g. `HAMi-core` (Koordinator).
pub const ISOLATION_PROVIDER: &str = "koordinator.sh/gpu-isolation-provider";
/// The isolation provider whose tools look for pods by [`HAMI_NODE`].
pub const HAMI_CORE: &str = "HAMi-core";
/// Pod label, the node's name: by it the provider's monitor of a node finds the pods whose GPU use it watches (Koordinator).
pub const HAMI_NODE: &str = "hami.io/vgpu-node";
/// Label of the Device object: `true` where this project's plugin serves the vendor's resource too.
pub const SERVES_VENDOR: &str = "gpushare/serves-vendor";
/// Label of one device in the Device object: `disabled` leaves the device to the vendor's plugin.
pub const SHARING: &str = "gpushare/sharing";

/// What [`RDMA`] and [`FPGA`] say of one device.
pub const WHOLE_PERCENT: u64 = 100;

/// Shares that one device offers unless a flag says otherwise (proposal "Enhance the GPU Share API").
pub const DEFAULT_SLOTS: u32 = 100;

/// Two more spellings in the first proposal's example of an allocation record.
const SHORT_NAMES: [(&str, &str); 2] = [
    ("kubernetes.io/gpu-mem", GPU_MEMORY),
    ("kubernetes.io/gpu-mem-ratio", GPU_MEMORY_RATIO),
];

/// Today's name of a resource in a Device object or an allocation record, where deprecated names are understood.
pub fn canonical(name: &str) -> &str {
    OLD_NAMES
        .iter()
        .chain(&SHORT_NAMES)
        .find(|(old, _)| *old == name)
        .map_or(name, |(_, now)| now)
}

/// Whether a name speaks of GPUs in one of the ways that are known without looking at any device.
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

/// Whether a name may be that of a device's resource: Kubernetes' own names, and names without a domain, are not.
pub fn is_extended(name: &str) -> bool {
    let domain = name.split_once('/').map(|(domain, _)| domain);
    domain.is_some_and(|domain| domain != "kubernetes.io" && !domain.ends_with(".kubernetes.io"))
}

/// The resource names that are a cluster's choice.
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
    /// The node annotation that says how much one memory unit is, e.g. `aliyun.com/gpu-mem-unit: 256Mi`.
    pub fn memory_unit_annotation(&self) -> String {
        format!("{}-unit", self.memory)
    }
}
