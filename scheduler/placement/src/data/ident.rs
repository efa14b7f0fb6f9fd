//! Identifiers of devices, device types, resources, owners of devices, and nodes; the engine only compares them.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

macro_rules! ident {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        // Shared, because holdings, indices and views all keep copies of the same texts.
        pub struct $name(Arc<str>);

        impl $name {
            /// The identifier as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text.into())
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

ident! {
    /// The owner of holdings and hints: a pod, by its UID; cheap to clone.
    OwnerId
}

ident! {
    /// Identifies a device among those of its type on its node, such as a GPU by its UUID and an adapter by its PCI address;
    /// cheap to clone.
    DeviceId
}

ident! {
    /// A PCIe switch of a node; cheap to clone.
    SwitchId
}

ident! {
    /// Identifies a virtual function (SR-IOV) on its node by its PCI address; cheap to clone.
    FunctionId
}

ident! {
    /// A resource that devices have amounts of; cheap to clone.
    ResourceName
}

/// A type of devices; cheap to clone.
///
/// GPUs sort before all other types, which the engine distinguishes by their names alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceType {
    /// GPUs.
    Gpu,
    /// Another type, such as `rdma`.
    Other(Arc<str>),
}

impl DeviceType {
    /// The name of the type, as Device objects and allocation records have it.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Gpu => "gpu",
            Self::Other(name) => name,
        }
    }
}

impl From<&str> for DeviceType {
    fn from(name: &str) -> Self {
        if name == Self::Gpu.as_str() {
            Self::Gpu
        } else {
            Self::Other(name.into())
        }
    }
}

/// The type in messages, where GPUs are written as usual.
impl fmt::Display for DeviceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu => f.write_str("GPU"),
            Self::Other(name) => f.write_str(name),
        }
    }
}

/// Refers to a node of a fleet; to nothing once the node is gone, even after another node has taken its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl NodeId {
    /// The number of the node: below the most nodes that the fleet has had at one time, and free for another node once the node
    /// is gone.
    pub const fn number(self) -> u32 {
        self.index
    }
}
