//! The extended resources that this plugin advertises to kubelet, each over a socket of its own.
//!
//! Resources that the plugin only writes into node status are none of these.

use std::collections::BTreeMap;

use proto::device::{TYPE_FPGA, TYPE_GPU, TYPE_RDMA};
use proto::request::ContainerRequest;
use proto::resource::{FPGA, GPU_SHARED, RDMA, ResourceNames};

/// An extended resource of this plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExtendedResource {
    /// Shares of a GPU, `koordinator.sh/gpu.shared`.
    Shared,
    /// Memory units, `aliyun.com/gpu-mem` unless the cluster has another name for them.
    Memory,
    /// Whole GPUs under the vendor's name, such as `nvidia.com/gpu`, if the operator wants this plugin to serve them.
    Whole,
    /// Percent of RDMA adapters, on nodes that have any.
    Rdma,
    /// Percent of FPGAs, on nodes that have any.
    Fpga,
}

impl ExtendedResource {
    /// All resources.
    pub const ALL: [Self; 5] = [Self::Shared, Self::Memory, Self::Whole, Self::Rdma, Self::Fpga];

    /// The resources that every node advertises, even one without GPUs.
    pub(crate) const ALWAYS: [Self; 2] = [Self::Shared, Self::Memory];

    /// File name of the resource's socket in kubelet's device plugin directory.
    pub fn socket(self) -> &'static str {
        match self {
            Self::Shared => "gpushare-shared.sock",
            Self::Memory => "gpushare-memory.sock",
            Self::Whole => "gpushare-whole.sock",
            Self::Rdma => "gpushare-rdma.sock",
            Self::Fpga => "gpushare-fpga.sock",
        }
    }

    /// The number of device IDs that kubelet allocates for a container; 0 means no call of Allocate.
    pub fn count(self, container: &ContainerRequest) -> u64 {
        match self {
            Self::Shared => container.shared,
            Self::Memory => container.memory_units,
            Self::Whole => container.whole,
            Self::Rdma => container.rdma,
            Self::Fpga => container.fpga,
        }
    }

    /// The type of the resource's devices in records and Device objects.
    pub fn device_type(self) -> &'static str {
        match self {
            Self::Shared | Self::Memory | Self::Whole => TYPE_GPU,
            Self::Rdma => TYPE_RDMA,
            Self::Fpga => TYPE_FPGA,
        }
    }

    /// The resource that counts percent of devices of this type; none for GPUs, and for types without a resource here.
    pub(crate) fn of_type(device_type: &str) -> Option<Self> {
        match device_type {
            TYPE_RDMA => Some(Self::Rdma),
            TYPE_FPGA => Some(Self::Fpga),
            _ => None,
        }
    }
}

/// The state of each resource's registration: true while it is registered with kubelet, or while the node has no device of it.
pub type Registrations = BTreeMap<ExtendedResource, bool>;

/// The names of the resources in pods and nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtendedResourceNames {
    /// The cluster's names.
    pub cluster: ResourceNames,
    /// The resource name of whole GPUs, if this plugin serves them on this node.
    pub whole: Option<String>,
}

impl ExtendedResourceNames {
    /// The name of a resource in pods and nodes; none if this node's plugin never serves the resource.
    pub fn of(&self, resource: ExtendedResource) -> Option<&str> {
        match resource {
            ExtendedResource::Shared => Some(GPU_SHARED),
            ExtendedResource::Memory => Some(&self.cluster.memory),
            ExtendedResource::Whole => self.whole.as_deref(),
            ExtendedResource::Rdma => Some(RDMA),
            ExtendedResource::Fpga => Some(FPGA),
        }
    }

    /// The resource with this name.
    pub fn find(&self, name: &str) -> Option<ExtendedResource> {
        let mut all = ExtendedResource::ALL.into_iter();
        all.find(|resource| self.of(*resource) == Some(name))
    }
}

impl From<ResourceNames> for ExtendedResourceNames {
    fn from(cluster: ResourceNames) -> Self {
        Self { cluster, whole: None }
    }
}
