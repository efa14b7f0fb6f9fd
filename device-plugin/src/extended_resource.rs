//! The resources that this plugin serves to kubelet, each over a socket of its own.
//!
//! Says nothing about resources that are only written into node status.

use proto::device::{TYPE_FPGA, TYPE_GPU, TYPE_RDMA};
use proto::request::ContainerRequest;
use proto::resource::{FPGA, GPU_SHARED, RDMA, ResourceNames};

/// A resource that kubelet may ask this plugin for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExtendedResource {
    /// Shares of a GPU, `koordinator.sh/gpu.shared`.
    Shared,
    /// Memory units, `aliyun.com/gpu-mem` unless the cluster calls them otherwise.
    Memory,
    /// Whole GPUs in the vendor's name, such as `nvidia.com/gpu`, where the operator wishes so.
    Whole,
    /// Percent of network adapters, where there are any.
    Rdma,
    /// Percent of programmable cards, where there are any.
    Fpga,
}

impl ExtendedResource {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Shared, Self::Memory, Self::Whole, Self::Rdma, Self::Fpga];

    /// Those that are served on every node.
    pub const ALWAYS: [Self; 2] = [Self::Shared, Self::Memory];

    /// File name of the socket in kubelet's device plugin directory.
    pub fn socket(self) -> &'static str {
        match self {
            Self::Shared => "gpushare-shared.sock",
            Self::Memory => "gpushare-memory.sock",
            Self::Whole => "gpushare-whole.sock",
            Self::Rdma => "gpushare-rdma.sock",
            Self::Fpga => "gpushare-fpga.sock",
        }
    }

    /// How many device IDs kubelet will ask for on behalf of a container; 0 means no call.
    pub fn count(self, container: &ContainerRequest) -> u64 {
        match self {
            Self::Shared => container.shared,
            Self::Memory => container.memory_units,
            Self::Whole => container.whole,
            Self::Rdma => container.rdma,
            Self::Fpga => container.fpga,
        }
    }

    /// The type of the devices that it is about, as records and Device objects call it.
    pub fn device_type(self) -> &'static str {
        match self {
            Self::Shared | Self::Memory | Self::Whole => TYPE_GPU,
            Self::Rdma => TYPE_RDMA,
            Self::Fpga => TYPE_FPGA,
        }
    }

    /// The resource of devices of a type other than GPU.
    pub fn of_type(device_type: &str) -> Option<Self> {
        [Self::Rdma, Self::Fpga]
            .into_iter()
            .find(|resource| resource.device_type() == device_type)
    }
}

/// What the resources are called in pods and nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtendedResourceNames {
    /// The cluster's names.
    pub cluster: ResourceNames,
    /// Whole GPUs, if this plugin serves them on this node.
    pub whole: Option<String>,
}

impl ExtendedResourceNames {
    /// The resource's name; none of one that this node's plugin never serves.
    pub fn of(&self, resource: ExtendedResource) -> Option<&str> {
        match resource {
            ExtendedResource::Shared => Some(GPU_SHARED),
            ExtendedResource::Memory => Some(&self.cluster.memory),
            ExtendedResource::Whole => self.whole.as_deref(),
            ExtendedResource::Rdma => Some(RDMA),
            ExtendedResource::Fpga => Some(FPGA),
        }
    }

    /// The resource of this name.
    pub fn find(&self, name: &str) -> Option<ExtendedResource> {
        ExtendedResource::ALL
            .into_iter()
            .find(|resource| self.of(*resource) == Some(name))
    }
}

impl From<ResourceNames> for ExtendedResourceNames {
    fn from(cluster: ResourceNames) -> Self {
        Self { cluster, whole: None }
    }
}
