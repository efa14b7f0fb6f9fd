//! Reasons for refusing a request.
//!
//! Each distinct text reaches the pod's condition, so there are few: sixteen for all reasons, and the text of the broken rule
//! for an invalid request. The scheduler adds the amounts of the request, which are the same on every node.

use std::fmt;

/// Why a node, or a device, cannot take a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The node is unknown, or has no GPU to share.
    NoDevice,
    /// There would be room if unhealthy GPUs were healthy.
    Unhealthy,
    /// There would be room if GPUs that are closed for maintenance were open.
    Closed,
    /// No single GPU has the memory free.
    Memory,
    /// No single GPU has the computing power free.
    Core,
    /// No single GPU has a slot free.
    Slots,
    /// Some GPUs have room, but fewer than the number that the request needs.
    TooFew,
    /// The node could not take the request even if it were empty.
    TooLarge,
    /// The node's memory unit is not known, and amounts have to be converted to or from it.
    UnitUnknown,
    /// The node lacks the isolation provider that the pod demands.
    NoIsolationProvider,
    /// A pod that asks for whole GPUs by the vendor's resource name, and one that shares, would meet on a GPU.
    Vendor,
    /// Devices of another type than GPU are too few or too full.
    OtherDevices,
    /// No partition of GPUs that the node, or the request, demands is free.
    Partition,
    /// The node's partition table cannot be read, and the node or the request demands a partition.
    PartitionsUnreadable,
    /// Too few GPUs can be taken within one part of the machine that the request may use (device, PCIe switch, NUMA node), or
    /// devices of several types cannot be taken on the same PCIe switches.
    Together,
    /// Exclusive use, or labels, leave too few GPUs.
    Selected,
    /// The pod demands memory limits that the driver enforces; too few GPUs of the node have them, and the others have none.
    Unlimited,
    /// As [`Self::Unlimited`], but a library enforces the limits of some of the others.
    LimitedByLibrary,
    /// The device plugin of the node does not serve kubelet, or has returned so recently that few pods are tried there.
    PluginAway,
    /// The request breaks a rule on every node; the pod's condition names the rule instead of a text of this list.
    InvalidRequest,
}

impl Reason {
    /// Every reason, in order.
    pub const ALL: [Self; 20] = [
        Self::NoDevice,
        Self::Unhealthy,
        Self::Closed,
        Self::Memory,
        Self::Core,
        Self::Slots,
        Self::TooFew,
        Self::TooLarge,
        Self::UnitUnknown,
        Self::NoIsolationProvider,
        Self::Vendor,
        Self::OtherDevices,
        Self::Partition,
        Self::PartitionsUnreadable,
        Self::Together,
        Self::Selected,
        Self::Unlimited,
        Self::LimitedByLibrary,
        Self::PluginAway,
        Self::InvalidRequest,
    ];

    /// The text for users. It names no node, device or amount, so that kube-scheduler can count equal refusals.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoDevice => "node is not known to gpushare or offers no shareable GPU",
            Self::Unhealthy => "too few healthy GPUs on the node",
            Self::Closed => "GPUs of the node are closed for maintenance",
            Self::Memory => "not enough free GPU memory on any one GPU of the node",
            Self::Core => "not enough free GPU core on any one GPU of the node",
            Self::Slots | Self::TooFew | Self::Selected => {
                "too few GPUs of the node have room at the same time"
            }
            Self::TooLarge => "request is larger than the node's GPUs even when they are empty",
            Self::UnitUnknown => {
                "size of the node's memory unit is not known, so that units cannot be compared with bytes"
            }
            Self::NoIsolationProvider => {
                "node lacks the label koordinator.sh/gpu-isolation-provider with the value that the pod demands"
            }
            Self::Vendor => {
                "GPUs of the node are kept apart for pods that share them and for pods of the vendor's plugin"
            }
            Self::OtherDevices => {
                "too few devices of another type than GPU on the node, or too little room on them"
            }
            Self::Partition | Self::Together => {
                "devices that belong together are not free as a partition, or as close to one another, as the pod or the node demands"
            }
            Self::PartitionsUnreadable => "the node's partition table cannot be read",
            Self::Unlimited => {
                "pod demands memory limits that the driver enforces (gpushare/enforcement: driver), and GPUs of the node have level none"
            }
            Self::LimitedByLibrary => {
                "pod demands memory limits that the driver enforces (gpushare/enforcement: driver), and GPUs of the node have level hami-core"
            }
            Self::PluginAway => {
                "node's device plugin does not serve kubelet now, or is tried again with few pods at a time"
            }
            Self::InvalidRequest => "pod's GPU request breaks a rule and fits nowhere",
        }
    }

    /// Returns true if evicting pods of the node might make room.
    pub const fn is_lack_of_room(self) -> bool {
        matches!(
            self,
            Self::Memory
                | Self::Core
                | Self::Slots
                | Self::TooFew
                | Self::Vendor
                | Self::OtherDevices
                | Self::Partition
                | Self::Together
                | Self::Selected
        )
    }

    /// The label value in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NoDevice => "no_device",
            Self::Unhealthy => "unhealthy",
            Self::Closed => "closed",
            Self::Memory => "memory",
            Self::Core => "core",
            Self::Slots => "slots",
            Self::TooFew => "too_few",
            Self::TooLarge => "too_large",
            Self::UnitUnknown => "unit_unknown",
            Self::NoIsolationProvider => "no_isolation_provider",
            Self::Vendor => "vendor",
            Self::OtherDevices => "other_devices",
            Self::Partition => "partition",
            Self::PartitionsUnreadable => "partitions_unreadable",
            Self::Together => "together",
            Self::Selected => "selected",
            Self::Unlimited => "unlimited",
            Self::LimitedByLibrary => "limited_by_library",
            Self::PluginAway => "plugin_away",
            Self::InvalidRequest => "invalid_request",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
