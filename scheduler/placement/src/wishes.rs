//! How whoever asks wants the devices to be chosen.

use crate::ident::DeviceType;
use crate::selector::Selector;

/// A type of devices, GPUs included.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// GPUs.
    Gpu,
    /// Devices of another type.
    Other(DeviceType),
}

/// Devices of several types that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joint {
    /// The types, the leading one first.
    pub kinds: Vec<Kind>,
    /// Whether they must share their PCIe switches: every switch has devices of all types, or of none.
    pub same_switch: bool,
}

/// How GPUs are to be taken from a partition table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartitionWish {
    /// Whether only partitions of the best score will do.
    pub restricted: bool,
    /// Least bandwidth of a ring through the GPUs, in bytes per second.
    pub bandwidth: Option<u64>,
}

/// How an amount of a type becomes devices, where it is not one device or so many whole ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// The amount is taken of every device that is selected.
    All,
    /// The amount is a number of devices.
    Count,
}

/// What an owner keeps others from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exclusion {
    /// The devices that it holds, of the type that it says this of.
    Device,
    /// All devices of that type on the PCIe switches of those that it holds.
    Switch,
}

/// How wide devices may be spread over a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// One device.
    Device,
    /// One PCIe switch.
    Switch,
    /// One NUMA node.
    Numa,
    /// The machine.
    Machine,
}

/// How devices of one type are to be chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// Only devices with such labels.
    pub selector: Option<Selector>,
    /// One virtual function of each device, out of groups with such labels, instead of the device itself.
    pub functions: Option<Selector>,
    /// How the amount becomes devices.
    pub strategy: Option<Strategy>,
    /// What others are kept from.
    pub exclusion: Option<Exclusion>,
    /// How wide the devices may be spread at most.
    pub scope: Option<Scope>,
}

/// Everything that is wished for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// Devices that belong together.
    pub joint: Option<Joint>,
    /// How GPUs are to be taken from a partition table; if given, only partitions will do.
    pub partition: Option<PartitionWish>,
    /// Wishes by type, each type once.
    pub by_kind: Vec<(Kind, Wish)>,
}

impl Wishes {
    /// What is wished for devices of a type.
    pub fn of(&self, kind: &Kind) -> Option<&Wish> {
        self.by_kind
            .iter()
            .find(|(of, _)| of == kind)
            .map(|(_, wish)| wish)
    }
}
