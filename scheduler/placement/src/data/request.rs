//! Requests: the devices that a pod asks of one node.

use crate::data::amounts::{Amounts, HostAmounts, Memory, NamedAmounts};
use crate::data::constraints::Constraints;
use crate::data::device::Device;
use crate::data::ident::{DeviceType, ResourceName};
use crate::data::reason::Reason;

/// Memory on one GPU, in the terms of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestedMemory {
    /// Bytes.
    Bytes(u64),
    /// Memory units, of which the node defines the size.
    Units(u64),
    /// Percent of the GPU's memory.
    Ratio(u32),
}

/// Equal shares on `devices` distinct GPUs of one node; amounts are those of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShareRequest {
    /// Number of distinct GPUs, at least 1.
    pub devices: u32,
    /// Memory of each GPU, more than zero.
    pub memory: RequestedMemory,
    /// Percent of computing power of each GPU; 0 if the request does not limit it.
    pub core: u32,
    /// Slots on each GPU; usually 1.
    pub slots: u32,
}

/// The GPUs that a pod asks of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestedGpus {
    /// None.
    #[default]
    Nothing,
    /// Shares of GPUs, which other pods may share too.
    Share(ShareRequest),
    /// A number of whole GPUs by the vendor's resource name (`nvidia.com/gpu`), which no other pod may use.
    Whole(u32),
    /// Access to all GPUs, of which the pod takes nothing but slots on one.
    All {
        /// The slots.
        slots: u32,
    },
}

/// The devices of one type that a pod asks for: amounts on one device, or whole devices if one has less.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRequest {
    /// The type.
    pub kind: DeviceType,
    /// Amounts of all devices together.
    pub amounts: NamedAmounts,
    /// The amount of each resource that stands for a whole device; `None` if that is the amount of the node's largest device.
    pub whole: Option<u64>,
}

/// Everything that a pod asks of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeRequest<'a> {
    /// GPUs.
    pub gpus: RequestedGpus,
    /// Other devices, one entry per type.
    pub others: &'a [DeviceRequest],
    /// Rules for the choice of devices, if the pod has any.
    pub constraints: Option<&'a Constraints>,
    /// CPU and memory of the node itself. The engine refuses no node for them, as kube-scheduler checks them.
    pub host: HostAmounts,
}

impl RequestedGpus {
    /// The number of GPUs that the pod gets; `None` if it takes none.
    pub const fn n_gpus(self) -> Option<u32> {
        match self {
            Self::Share(share) => Some(share.devices),
            Self::Whole(n) => Some(n),
            Self::All { .. } | Self::Nothing => None,
        }
    }
}

impl From<&ShareRequest> for RequestedGpus {
    fn from(request: &ShareRequest) -> Self {
        Self::Share(*request)
    }
}

impl From<&ShareRequest> for NodeRequest<'_> {
    fn from(request: &ShareRequest) -> Self {
        RequestedGpus::Share(*request).into()
    }
}

impl From<RequestedGpus> for NodeRequest<'_> {
    fn from(gpus: RequestedGpus) -> Self {
        Self {
            gpus,
            ..Self::default()
        }
    }
}

impl NodeRequest<'_> {
    /// Returns true if the request takes devices of this type; access to all GPUs takes none of them.
    pub(crate) fn takes(&self, kind: &DeviceType) -> bool {
        match kind {
            DeviceType::Gpu => matches!(self.gpus, RequestedGpus::Share(_) | RequestedGpus::Whole(_)),
            DeviceType::Other(_) => self.others.iter().any(|request| request.kind == *kind),
        }
    }
}

impl RequestedMemory {
    /// The amount on a GPU with `total` memory; `None` if it is in units and their size is unknown.
    pub fn on(self, total: Memory, unit_bytes: Option<u64>) -> Option<Memory> {
        match self {
            Self::Bytes(bytes) => Some(Memory::from_bytes(bytes)),
            Self::Units(units) => Some(Memory::from_bytes(units.saturating_mul(unit_bytes?))),
            Self::Ratio(percent) => Some(total.percent(percent)),
        }
    }

    const fn is_zero(self) -> bool {
        matches!(self, Self::Bytes(0) | Self::Units(0) | Self::Ratio(0))
    }
}

impl DeviceRequest {
    /// The number of devices that the request comes to on a node with these devices, and the amounts on each; `None` if it is
    /// neither a part of one device nor a number of whole devices.
    pub(crate) fn split_over(&self, devices: &[Device]) -> Option<(usize, NamedAmounts)> {
        let mut n_devices = 1;
        for (resource, amount) in &self.amounts {
            let whole = self.whole_amount(devices, resource)?;
            if whole == 0 {
                return None;
            }
            // More than a device has must be whole devices: a share cannot span two of them.
            if *amount > whole {
                if !amount.is_multiple_of(whole) {
                    return None;
                }
                // The resource that needs most devices decides, and the others are divided over as many.
                n_devices = n_devices.max(amount / whole);
            }
        }
        let mut each = self.amounts.clone();
        // Rounded up, so that the devices together have no less than the request.
        for amount in each.values_mut() {
            *amount = amount.div_ceil(n_devices);
        }
        Some((usize::try_from(n_devices).ok()?, each))
    }

    /// The amount of a resource that is a whole device on a node with these devices.
    pub(crate) fn whole_amount(&self, devices: &[Device], resource: &ResourceName) -> Option<u64> {
        let amounts = devices.iter().filter_map(|device| device.resources.get(resource));
        self.whole.or_else(|| amounts.max().copied())
    }
}

/// A share request in the terms of one node, with memory units converted to bytes, so that it compares with many GPUs quickly.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShareNeed {
    /// Memory of each GPU, and percent of whichever GPU it is compared with: one of both is zero.
    memory: Memory,
    percent: u32,
    core: u32,
    slots: u32,
    pub(crate) devices: usize,
}

impl ShareNeed {
    /// The need of a request on a node with this memory unit; else the reason of the refusal.
    #[inline]
    pub(crate) fn new(request: &ShareRequest, unit_bytes: Option<u64>) -> Result<Self, Reason> {
        // A share without memory would hold a GPU that others count as free.
        if request.devices == 0 || request.memory.is_zero() {
            return Err(Reason::InvalidRequest);
        }
        let (memory, percent) = match request.memory {
            RequestedMemory::Ratio(percent) => (Memory::ZERO, percent),
            // Units of unknown size compare with nothing.
            memory => (memory.on(Memory::ZERO, unit_bytes).ok_or(Reason::UnitUnknown)?, 0),
        };
        Ok(Self {
            memory,
            percent,
            core: request.core,
            slots: request.slots,
            // More than any node has, so that the request is refused as too large.
            devices: usize::try_from(request.devices).unwrap_or(usize::MAX),
        })
    }

    /// Memory in percent and in bytes, one of which is zero, and computing power in percent, for
    /// [scores](crate::data::policy::ResourceWeights).
    pub(crate) fn stated(self) -> [u64; 3] {
        [self.percent.into(), self.memory.bytes_ceil(), self.core.into()]
    }

    /// The amounts on a GPU with `total`.
    #[inline]
    pub(crate) fn amounts_on(self, total: Amounts) -> Amounts {
        let memory = if self.percent == 0 {
            self.memory
        } else {
            total.memory.percent(self.percent)
        };
        Amounts {
            memory,
            core: self.core,
            slots: self.slots,
        }
    }
}
