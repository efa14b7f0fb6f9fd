//! Views for users and metrics: the devices with their holders, the reason that a device does not fit, and doubtful records.
//!
//! They allocate memory freely, and so are not for filters.

use crate::choice::gpu_room::{fit_gpu, free_whole, share_need};
use crate::data::amounts::{Amounts, HostAmounts, NamedAmounts};
use crate::data::device::Device;
use crate::data::holding::{Held, Hints};
use crate::data::ident::{DeviceType, NodeId, OwnerId};
use crate::data::inventory::{GPUS, Inventory};
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

/// One device of a node.
#[derive(Clone, Debug)]
pub struct DeviceView<'a> {
    /// Its type.
    pub kind: &'a DeviceType,
    /// The device.
    pub device: &'a Device,
    /// Amounts of a GPU that are certainly held; may exceed the total.
    pub used: Amounts,
    /// Amounts of a GPU that may be held besides, by parts whose device, amount or record is in doubt.
    pub suspect: Amounts,
    /// Amounts that hints take of a GPU; `free` still includes them.
    pub hinted: Amounts,
    /// The total of a GPU less used and suspect amounts, at least zero; of an unhealthy or closed GPU too.
    pub free: Amounts,
    /// Named resources that no owner holds, at least zero; of an unhealthy device too.
    pub free_resources: NamedAmounts,
    /// Its holders, sorted by owner; those of pending shares last.
    pub holders: Vec<HolderView<'a>>,
}

/// The part of one device that one owner holds.
#[derive(Clone, Copy, Debug)]
pub struct HolderView<'a> {
    /// The owner.
    pub owner: &'a OwnerId,
    /// Amounts of a GPU that the owner holds.
    pub amounts: Amounts,
    /// True if the part may be on another device, or of another amount.
    pub suspect: bool,
}

/// The result of comparing a request with one GPU.
#[derive(Clone, Debug)]
pub struct DeviceFit<'a> {
    /// The GPU.
    pub gpu: &'a Device,
    /// Amounts that are free for new shares: nothing if the GPU is unhealthy or closed.
    pub free: Amounts,
    /// Everything that the GPU has.
    pub total: Amounts,
    /// The amounts that the request takes of the GPU.
    pub need: Amounts,
    /// The reason for which the GPU has no room for the request, if it has none.
    pub fit: Result<(), Reason>,
}

/// Compares a request with every GPU of a node, by minor; empty if it asks for neither shares nor whole GPUs.
///
/// # Errors
/// The reason for which the request compares with no GPU at all.
pub(crate) fn explain<'a>(
    node: &'a Node,
    request: RequestedGpus,
    hints: Hints<'_>,
) -> Result<Vec<DeviceFit<'a>>, Reason> {
    let need = match request {
        RequestedGpus::Share(request) => Some(share_need(node, &request)?),
        RequestedGpus::Whole(_) => None,
        RequestedGpus::All { .. } | RequestedGpus::Nothing => return Ok(Vec::new()),
    };
    let free: Vec<usize> = free_whole(node, hints).collect();
    let mut fits = Vec::with_capacity(node.gpus().len());
    // A row has the amounts of one GPU, with room kept for other pods (hints) taken off.
    let rows = node.rows_with(hints).zip(node.gpus()).zip(&node.flags);
    for (at, ((row, gpu), flags)) in rows.enumerate() {
        let (need, fit) = if let Some(need) = need {
            let need = need.amounts_on(row.total);
            (need, fit_gpu(gpu, *flags, row.free, need))
        } else {
            (gpu.whole(), fit_whole_gpu(gpu, row.free, free.contains(&at)))
        };
        fits.push(DeviceFit {
            gpu,
            free: row.free,
            total: row.total,
            need,
            fit,
        });
    }
    Ok(fits)
}

/// Checks one GPU for a request for whole GPUs.
fn fit_whole_gpu(gpu: &Device, free: Amounts, is_free: bool) -> Result<(), Reason> {
    if is_free {
        Ok(())
    } else if !gpu.healthy {
        Err(Reason::Unhealthy)
    } else if gpu.closed {
        Err(Reason::Closed)
    } else if gpu.whole().within(free) {
        // Free, but not served to requests by the vendor's resource name.
        Err(Reason::Vendor)
    } else {
        Err(Reason::Memory)
    }
}

impl<'a> NodeView<'a> {
    pub(crate) fn new(id: NodeId, node: &'a Node) -> Self {
        Self { id, node }
    }

    /// The identifier of the node in the fleet.
    pub fn id(self) -> NodeId {
        self.id
    }

    /// Its name.
    pub fn name(self) -> &'a str {
        &self.node.name
    }

    /// Its usable devices; `None` while the node, or its report, is missing.
    pub fn inventory(self) -> Option<&'a Inventory> {
        self.node.hardware.is_some().then_some(&self.node.inventory)
    }

    /// The holdings on the node, by owner.
    pub fn held(self) -> impl Iterator<Item = &'a Held> {
        self.node.held.iter()
    }

    /// CPU and memory that no pod uses; `None` as long as the node's total is not known.
    pub fn host_free(self) -> Option<HostAmounts> {
        self.node.host.total.is_some().then(|| self.node.host.free())
    }

    /// The owners of the hints on the node.
    pub fn hinted(self) -> impl Iterator<Item = &'a OwnerId> {
        self.node.hints.iter().map(|hint| &hint.owner)
    }

    /// The GPUs of the node with their holders, by minor.
    pub fn gpus(self) -> Vec<DeviceView<'a>> {
        // GPUs are the first type of every inventory.
        let mut types = self.devices().into_iter();
        types.next().unwrap_or_default()
    }

    /// The devices of other types on the node with their holders, by type and minor.
    pub fn other_devices(self) -> Vec<DeviceView<'a>> {
        self.devices().into_iter().skip(1).flatten().collect()
    }

    /// All devices, by type index and minor.
    fn devices(self) -> Vec<Vec<DeviceView<'a>>> {
        let inventory = &self.node.inventory;
        let mut views = Vec::with_capacity(inventory.n_types());
        for (type_at, (kind, devices)) in inventory.types().enumerate() {
            let mut of_type = Vec::with_capacity(devices.len());
            for (at, device) in devices.iter().enumerate() {
                // None for GPUs: a GPU has no named resources.
                let free = self.node.free_of_type(type_at).get(at);
                of_type.push(DeviceView::new(kind, device, free.cloned().unwrap_or_default()));
            }
            views.push(of_type);
        }
        // All holdings at once, because pending shares are charged where the other holdings leave room.
        for (held, charge) in charges_of_all(inventory, &self.node.held) {
            if let Some(of_type) = views.get_mut(charge.type_at)
                && let Some(view) = of_type.get_mut(charge.device)
            {
                view.add(HolderView {
                    owner: &held.owner,
                    amounts: charge.amounts,
                    suspect: charge.suspect,
                });
            }
        }
        for hint in &self.node.hints {
            for (gpu, amounts) in &hint.gpu_charges {
                if let Some(view) = views.get_mut(GPUS).and_then(|gpus| gpus.get_mut(*gpu)) {
                    view.hinted = view.hinted.plus(*amounts);
                }
            }
        }
        views
    }
}

impl<'a> DeviceView<'a> {
    /// The view of a device that no owner holds yet.
    fn new(kind: &'a DeviceType, device: &'a Device, free_resources: NamedAmounts) -> Self {
        Self {
            kind,
            device,
            used: Amounts::ZERO,
            suspect: Amounts::ZERO,
            hinted: Amounts::ZERO,
            free: device.total(),
            free_resources,
            holders: Vec::new(),
        }
    }

    /// Adds the part of one holder, and takes its amounts off those that are free.
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
