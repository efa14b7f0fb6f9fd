//! Identifiers of devices, device types, resources, owners of shares, and nodes; the engine only compares them.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

macro_rules! ident {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    /// A GPU's UUID; cheap to clone.
    GpuUuid
}

ident! {
    /// The owner of a share, such as a pod by its UID; cheap to clone.
    OwnerId
}

ident! {
    /// A type of devices other than GPUs, such as `rdma`; cheap to clone.
    DeviceType
}

ident! {
    /// Identifies a device among those of its type on its node, such as its PCI address; cheap to clone.
    DeviceId
}

ident! {
    /// A PCIe switch of a node; cheap to clone.
    SwitchId
}

ident! {
    /// Identifies a virtual function on its node, such as its PCI address; cheap to clone.
    FunctionId
}

ident! {
    /// A resource that devices have amounts of; cheap to clone.
    ResourceName
}

/// A node of a fleet. It refers to nothing once the node is gone, even after another node has taken its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}
