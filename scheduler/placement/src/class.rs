//! Devices of other types than GPU: named amounts of whatever resources they say they have.
//!
//! Knows no type and no resource by name. Not as dense as GPUs are: few requests ask for such devices.

use std::collections::{BTreeMap, BTreeSet};

use crate::fit::Hints;
use crate::gpu::InventoryProblem;
use crate::holding::Holdings;
use crate::ident::{DeviceId, DeviceType, FunctionId, ResourceName};
use crate::node::Node;
use crate::rank::Order;
use crate::reason::Reason;
use crate::traits::{Function, Traits};

/// Amounts by resource.
pub type NamedAmounts = BTreeMap<ResourceName, u64>;

/// One device as its node reports it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    /// What identifies it.
    pub id: DeviceId,
    /// Its minor number, unique among those of its type on its node.
    pub minor: u32,
    /// Everything that it has.
    pub resources: NamedAmounts,
    /// Whether it takes new owners; those that it has stay counted.
    pub healthy: bool,
    /// What tells it apart from others.
    pub traits: Traits,
}

/// The devices of one type of one node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Class {
    /// The type.
    pub kind: DeviceType,
    /// The devices, in any order.
    pub devices: Vec<Device>,
}

/// What is asked of the devices of one type: the amounts on one of them, or whole devices if that is more than one has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassRequest {
    /// The type.
    pub kind: DeviceType,
    /// Amounts in all.
    pub amounts: NamedAmounts,
    /// What a whole device has of any of these; `None` if the node's largest device says so.
    pub whole: Option<u64>,
}

/// How a record names a device of a type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceRef {
    /// By its ID, which is exact.
    Id(DeviceId),
    /// By the minor number that it has, or had.
    Minor(u32),
    /// Not at all: each device of the type is charged as if it were the one.
    Any,
}

/// A part of a device that an owner is known to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldDevice {
    /// The device's type.
    pub kind: DeviceType,
    /// The device.
    pub device: DeviceRef,
    /// What is held of it.
    pub amounts: NamedAmounts,
    /// Its virtual functions that are held, if it is not held itself.
    pub functions: Vec<FunctionId>,
    /// Whether the record is beyond doubt; a doubtful one is charged, but does not count as oversubscription.
    pub trusted: bool,
}

/// A part of a device that was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceShare {
    /// The device's type.
    pub kind: DeviceType,
    /// The device.
    pub id: DeviceId,
    /// Its minor number when it was chosen.
    pub minor: u32,
    /// What is taken of it.
    pub amounts: NamedAmounts,
    /// Its virtual functions that are taken, if it is not taken itself.
    pub functions: Vec<Function>,
}

/// One device of another type than GPU, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceView<'a> {
    /// Its type.
    pub kind: &'a DeviceType,
    /// The device.
    pub device: &'a Device,
    /// What nobody holds, at least zero; of a sick device too.
    pub free: NamedAmounts,
}

/// What a request comes to on a node.
struct Fitting<'a> {
    /// How many devices it takes.
    n_devices: usize,
    /// What it takes of each.
    amounts: NamedAmounts,
    /// All healthy devices with room, and what is free of them.
    devices: Vec<(&'a Device, NamedAmounts)>,
}

impl From<&DeviceShare> for HeldDevice {
    fn from(share: &DeviceShare) -> Self {
        let DeviceShare {
            kind,
            id,
            amounts,
            functions,
            ..
        } = share;
        let functions = functions.iter().map(|function| function.id.clone()).collect();
        Self {
            kind: kind.clone(),
            device: DeviceRef::Id(id.clone()),
            amounts: amounts.clone(),
            functions,
            trusted: true,
        }
    }
}

impl Class {
    /// Orders the devices by minor and takes out those that cannot be told from others.
    pub(crate) fn sift(&mut self) -> Vec<InventoryProblem> {
        self.devices
            .sort_by(|a, b| (a.minor, &a.id).cmp(&(b.minor, &b.id)));
        let (mut ids, mut minors, mut problems) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
        let kind = &self.kind;
        self.devices.retain(|device| {
            let is_new = !ids.contains(&device.id) && !minors.contains(&device.minor);
            if is_new {
                ids.insert(device.id.clone());
                minors.insert(device.minor);
            } else {
                problems.push(InventoryProblem::DuplicateDevice {
                    kind: kind.clone(),
                    id: device.id.clone(),
                    minor: device.minor,
                });
            }
            is_new
        });
        problems
    }

    /// The device that a record names, if it is there.
    pub fn find(&self, device: &DeviceRef) -> Option<&Device> {
        self.devices.iter().find(|candidate| match device {
            DeviceRef::Id(id) => candidate.id == *id,
            DeviceRef::Minor(minor) => candidate.minor == *minor,
            DeviceRef::Any => false,
        })
    }

    /// Whether a record's device may be this one; certainly, if it names this one.
    pub(crate) fn may_be(&self, held: &DeviceRef, device: &Device) -> bool {
        match held {
            DeviceRef::Id(id) => device.id == *id,
            DeviceRef::Minor(minor) => device.minor == *minor || self.find(held).is_none(),
            DeviceRef::Any => true,
        }
    }
}

impl ClassRequest {
    /// How many devices that is on a node, and what of each.
    pub(crate) fn split(&self, class: &Class) -> Option<(usize, NamedAmounts)> {
        let mut n_devices = 1;
        for (resource, amount) in &self.amounts {
            let largest = || {
                class
                    .devices
                    .iter()
                    .filter_map(|device| device.resources.get(resource))
                    .max()
                    .copied()
            };
            let whole = self.whole.or_else(largest).filter(|whole| *whole > 0)?;
            if *amount > whole {
                let n = amount.is_multiple_of(whole).then_some(amount / whole)?;
                n_devices = n_devices.max(n);
            }
        }
        let each = self
            .amounts
            .iter()
            .map(|(resource, amount)| (resource.clone(), amount.div_ceil(n_devices)))
            .collect();
        Some((usize::try_from(n_devices).ok()?, each))
    }
}

impl Node {
    /// What is free of every device of other types, by the places of classes and devices in the inventory.
    pub(crate) fn free_of_others(&self) -> Vec<Vec<NamedAmounts>> {
        let holdings = self.held.iter().map(|held| &held.holdings);
        self.classes()
            .iter()
            .map(|class| {
                class
                    .devices
                    .iter()
                    .map(|device| class.free(device, holdings.clone()))
                    .collect()
            })
            .collect()
    }

    pub(crate) fn classes(&self) -> &[Class] {
        self.inventory
            .as_ref()
            .and_then(|inventory| inventory.classes.as_deref())
            .unwrap_or_default()
    }

    /// Whether there is room for parts of devices of other types.
    pub(crate) fn fit_others(&self, requests: &[ClassRequest], hints: Hints<'_>) -> Result<(), Reason> {
        // Nobody has said what there is: kube-scheduler knows what kubelet offers.
        if self
            .inventory
            .as_ref()
            .is_none_or(|inventory| inventory.classes.is_none())
        {
            return Ok(());
        }
        let fits = |request| self.fitting(request, hints).is_some();
        if requests.iter().all(fits) {
            Ok(())
        } else {
            Err(Reason::OtherDevices)
        }
    }

    /// The devices to take, after it has been found that there is room.
    pub(crate) fn choose_others(
        &self,
        requests: &[ClassRequest],
        order: Order<'_>,
        hints: Hints<'_>,
    ) -> Vec<DeviceShare> {
        let mut shares = Vec::new();
        for request in requests {
            let Some(Fitting {
                n_devices,
                amounts,
                devices: mut fitting,
            }) = self.fitting(request, hints)
            else {
                continue;
            };
            fitting.sort_by_cached_key(|(device, free)| {
                (order.preference_of(device, free, &amounts), device.minor)
            });
            fitting.truncate(n_devices);
            fitting.sort_by_key(|(device, _)| device.minor);
            shares.extend(fitting.into_iter().map(|(device, _)| DeviceShare {
                kind: request.kind.clone(),
                id: device.id.clone(),
                minor: device.minor,
                amounts: amounts.clone(),
                functions: Vec::new(),
            }));
        }
        shares
    }

    /// The devices that a request may take; `None` if they are too few.
    fn fitting(&self, request: &ClassRequest, hints: Hints<'_>) -> Option<Fitting<'_>> {
        let at = self
            .classes()
            .iter()
            .position(|class| class.kind == request.kind)?;
        let (class, free) = (self.classes().get(at)?, self.free_others.get(at)?);
        let (n_devices, amounts) = request.split(class)?;
        let healthy = class
            .devices
            .iter()
            .zip(free)
            .filter(|(device, _)| device.healthy);
        let fitting: Vec<_> = healthy
            .map(|(device, free)| (device, self.less_hints_of(&request.kind, device, free, hints)))
            .filter(|(_, free)| is_within(&amounts, free))
            .collect();
        (fitting.len() >= n_devices).then_some(Fitting {
            n_devices,
            amounts,
            devices: fitting,
        })
    }

    pub(crate) fn less_hints_of(
        &self,
        kind: &DeviceType,
        device: &Device,
        free: &NamedAmounts,
        hints: Hints<'_>,
    ) -> NamedAmounts {
        let mut free = free.clone();
        let heeded = self.hints.iter().filter(|hint| hints.heeds(&hint.owner));
        let shares = heeded.flat_map(|hint| &hint.placement.others);
        for share in shares.filter(|share| share.kind == *kind && share.id == device.id) {
            take(&mut free, &share.amounts);
        }
        free
    }

    /// Whether a device of another type is there, well, and has room for a share.
    pub(crate) fn admits_device(&self, share: &DeviceShare) -> bool {
        let classes = self.classes().iter().zip(&self.free_others);
        let mut devices = classes
            .filter(|(class, _)| class.kind == share.kind)
            .flat_map(|(class, free)| class.devices.iter().zip(free));
        devices
            .any(|(device, free)| device.id == share.id && device.healthy && is_within(&share.amounts, free))
    }
}

impl Class {
    /// What nobody holds of a device, at least zero.
    fn free<'a>(&self, device: &Device, holdings: impl Iterator<Item = &'a Holdings>) -> NamedAmounts {
        let mut free = device.resources.clone();
        for held in holdings
            .flat_map(|holdings| &holdings.others)
            .filter(|held| held.kind == self.kind)
        {
            if self.may_be(&held.device, device) {
                take(&mut free, &held.amounts);
            }
        }
        free
    }
}

pub(crate) fn is_within(amounts: &NamedAmounts, free: &NamedAmounts) -> bool {
    amounts
        .iter()
        .all(|(resource, amount)| free.get(resource).is_some_and(|free| amount <= free))
}

fn take(free: &mut NamedAmounts, amounts: &NamedAmounts) {
    for (resource, amount) in amounts {
        if let Some(free) = free.get_mut(resource) {
            *free = free.saturating_sub(*amount);
        }
    }
}
