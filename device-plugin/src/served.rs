//! The two resources that this plugin serves to kubelet, each over a socket of its own.
//!
//! Says nothing about resources that are only written into node status.

use proto::request::ContainerRequest;
use proto::resource::{GPU_SHARED, ResourceNames};

/// A resource that kubelet asks this plugin for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Served {
    /// Shares of a device, `koordinator.sh/gpu.shared`.
    Shared,
    /// Memory units, `aliyun.com/gpu-mem` unless the cluster calls them otherwise.
    Memory,
}

impl Served {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Shared, Self::Memory];

    /// The resource's name in pods and nodes.
    pub fn name(self, names: &ResourceNames) -> &str {
        match self {
            Self::Shared => GPU_SHARED,
            Self::Memory => &names.memory,
        }
    }

    /// File name of the socket in kubelet's device plugin directory.
    pub fn socket(self) -> &'static str {
        match self {
            Self::Shared => "gpushare-shared.sock",
            Self::Memory => "gpushare-memory.sock",
        }
    }

    /// How many device IDs kubelet will ask for on behalf of a container; 0 means no call.
    pub fn count(self, container: &ContainerRequest) -> u64 {
        match self {
            Self::Shared => container.shared,
            Self::Memory => container.memory_units,
        }
    }
}
