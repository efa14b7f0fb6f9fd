//! Views for users and metrics: which owner holds what, why a device does not fit, and which records are doubtful.
//!
//! They allocate freely and are not for the hot path.

use crate::choice::fit::{fit_gpu, fit_whole, free_whole, need};
use crate::data::amounts::{Amounts, HostAmounts, NamedAmounts};
use crate::data::device::{Device, Gpu};
use crate::data::holding::{Held, Hints, Holdings, Origin};
use crate::data::ident::{DeviceType, NodeId, OwnerId};
use crate::data::inventory::Inventory;
use crate::data::reason::Reason;
use crate::data::request::RequestedGpus;
use crate::state::charges::charges_of_all;
use crate::state::node::Node;

/// One node.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    id: NodeId,
    node: &'a Node,
}

/// One GPU of a node.
#[derive(Clone, Debug)]
pub struct GpuView<'a> {
    /// The GPU.
    pub gpu: &'a Gpu,
    /// Amounts that are certainly held; may exceed the total.
    pub used: Amounts,
    /// Amounts that may be held besides.
    pub suspect: Amounts,
    /// Amounts of hints; `free` still includes them.
    pub hinted: Amounts,
    /// The total less used and suspect amounts, at least zero; of an unhealthy GPU too.
    pub free: Amounts,
    /// Its holders, by owner.
    pub holders: Vec<HolderView<'a>>,
}

/// The part of one owner in one GPU.
#[derive(Clone, Copy, Debug)]
pub struct HolderView<'a> {
    /// The owner.
    pub owner: &'a OwnerId,
    /// The source of the holding.
    pub origin: Origin,
    /// Amounts of this GPU.
    pub amounts: Amounts,
    /// True if the share may be on another GPU, or of another amount.
    pub suspect: bool,
}

/// The holding of one owner.
#[derive(Clone, Copy, Debug)]
pub struct HeldView<'a> {
    /// The owner.
    pub owner: &'a OwnerId,
    /// The node's name.
    pub node: &'a str,
    /// The source of the holding.
    pub origin: Origin,
    /// The devices.
    pub holdings: &'a Holdings,
}

/// One device of another type than GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherDeviceView<'a> {
    /// Its type.
    pub kind: &'a DeviceType,
    /// The device.
    pub device: &'a Device,
    /// The amounts that no owner holds, at least zero; of an unhealthy device too.
    pub free: NamedAmounts,
}

/// The result of comparing a request with one GPU.
#[derive(Clone, Debug)]
pub struct DeviceFit<'a> {
    /// The GPU.
    pub gpu: &'a Gpu,
    /// Amounts that are free for new shares: nothing if the GPU is unhealthy.
    pub free: Amounts,
    /// Everything that it has.
    pub total: Amounts,
    /// The amounts that the request takes of it.
    pub need: Amounts,
    /// The reason for which there is no room, if so.
    pub fit: Result<(), Reason>,
}

/// Compares a request with every GPU of a node, by minor; empty if it takes no amounts of GPUs.
///
/// # Errors
/// The reason for which the request compares with no GPU at all.
pub(crate) fn explain<'a>(
    node: &'a Node,
    request: RequestedGpus,
    hints: Hints<'_>,
) -> Result<Vec<DeviceFit<'a>>, Reason> {
    let need = match request {
        RequestedGpus::Share(request) => need(node, &request)?,
        RequestedGpus::Whole(n) => return Ok(explain_whole(node, n, hints)),
        RequestedGpus::All { .. } | RequestedGpus::Nothing => return Ok(Vec::new()),
    };
    let mut fits = Vec::with_capacity(node.gpus().len());
    for ((row, gpu), flags) in node.rows_with(hints).zip(node.gpus()).zip(&node.flags) {
        let need = need.on(row.total);
        fits.push(DeviceFit {
            gpu,
            free: row.free,
            total: row.total,
            need,
            fit: fit_gpu(gpu, *flags, row.free, need),
        });
    }
    Ok(fits)
}

fn explain_whole<'a>(node: &'a Node, n: u32, hints: Hints<'_>) -> Vec<DeviceFit<'a>> {
    let reason = fit_whole(node, n, hints).err();
    let free: Vec<usize> = free_whole(node, hints).map(|(at, _)| at).collect();
    let mut fits = Vec::with_capacity(node.gpus().len());
    for (at, (gpu, row)) in node.gpus().iter().zip(node.rows.iter()).enumerate() {
        let fit = match reason {
            None | Some(Reason::TooFew) if free.contains(&at) => Ok(()),
            // Too few free GPUs is a reason of the node; this one is in use, or takes no whole requests.
            None | Some(Reason::TooFew) => Err(Reason::Vendor),
            Some(reason) => Err(reason),
        };
        fits.push(DeviceFit {
            gpu,
            free: row.free,
            total: row.total,
            need: gpu.whole(),
            fit,
        });
    }
    fits
}

impl<'a> NodeView<'a> {
    pub(crate) fn new(id: NodeId, node: &'a Node) -> Self {
        Self { id, node }
    }

    /// Its identifier in the fleet.
    pub fn id(self) -> NodeId {
        self.id
    }

    /// Its name.
    pub fn name(self) -> &'a str {
        &self.node.name
    }

    /// Its usable devices; `None` while the node, or its report, is missing.
    pub fn inventory(self) -> Option<&'a Inventory> {
        self.node.inventory.as_ref()
    }

    /// The holdings on it, by owner.
    pub fn held(self) -> impl Iterator<Item = HeldView<'a>> {
        let Node { name, held, .. } = self.node;
        held.iter().map(|held| HeldView::new(held, name))
    }

    /// CPU and memory that no pod uses; `None` as long as the node's total is not known.
    pub fn host_free(self) -> Option<HostAmounts> {
        self.node.host.total.is_some().then(|| self.node.host.free())
    }

    /// The owners of the hints on it.
    pub fn hinted(self) -> impl Iterator<Item = &'a OwnerId> {
        self.node.hints.iter().map(|hint| &hint.owner)
    }

    /// Its GPUs with their holders, by minor.
    pub fn gpus(self) -> Vec<GpuView<'a>> {
        let mut gpus: Vec<GpuView<'a>> = self.node.gpus().iter().map(GpuView::new).collect();
        if let Some(inventory) = self.inventory() {
            for (held, charge) in charges_of_all(inventory, &self.node.held) {
                if let Some(gpu) = gpus.get_mut(charge.gpu) {
                    gpu.add(HolderView {
                        owner: &held.owner,
                        origin: held.origin,
                        amounts: charge.amounts,
                        suspect: charge.suspect,
                    });
                }
            }
        }
        for (gpu, amounts) in self.node.hints.iter().flat_map(|hint| &hint.charges) {
            if let Some(gpu) = gpus.get_mut(*gpu) {
                gpu.hinted = gpu.hinted.plus(*amounts);
            }
        }
        gpus
    }

    /// Its devices of other types, by type and minor.
    pub fn other_devices(self) -> Vec<OtherDeviceView<'a>> {
        let mut views = Vec::new();
        for (of_type, free) in self.node.types().iter().zip(&self.node.free_devices) {
            for (device, free) in of_type.devices.iter().zip(free) {
                views.push(OtherDeviceView {
                    kind: &of_type.kind,
                    device,
                    free: free.clone(),
                });
            }
        }
        views
    }
}

impl<'a> HeldView<'a> {
    pub(crate) fn new(held: &'a Held, node: &'a str) -> Self {
        Self {
            owner: &held.owner,
            node,
            origin: held.origin,
            holdings: &held.holdings,
        }
    }
}

impl<'a> GpuView<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        Self {
            gpu,
            used: Amounts::ZERO,
            suspect: Amounts::ZERO,
            hinted: Amounts::ZERO,
            free: gpu.total(),
            holders: Vec::new(),
        }
    }

    fn add(&mut self, holder: HolderView<'a>) {
        self.free = self.free.less(holder.amounts);
        let sum = if holder.suspect {
            &mut self.suspect
        } else {
            &mut self.used
        };
        *sum = sum.plus(holder.amounts);
        self.holders.push(holder);
    }
}
