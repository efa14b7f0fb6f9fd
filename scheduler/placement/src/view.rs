//! What is where, for people and metrics; allocates freely and is not for the hot path.

use crate::amounts::Amounts;
use crate::class::{DeviceView, HeldDevice};
use crate::fit::Hints;
use crate::fleet::{Fleet, NodeId};
use crate::gpu::{Gpu, Inventory};
use crate::holding::{GpuRef, HeldMemory, HeldShare, Holding, Holdings, Origin};
use crate::host::HostAmounts;
use crate::ident::{DeviceType, GpuUuid, OwnerId};
use crate::node::{Held, Node};
use crate::reason::Reason;
use crate::request::{GpuAsk, MemoryAsk};
use crate::rows::Row;
use crate::whole::Mark;

/// One node.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    id: NodeId,
    node: &'a Node,
}

/// One device of a node.
#[derive(Clone, Debug)]
pub struct GpuView<'a> {
    /// The device.
    pub gpu: &'a Gpu,
    /// What is certainly held of it; may exceed the total.
    pub used: Amounts,
    /// What may be held of it besides.
    pub suspect: Amounts,
    /// What hints are out for; not taken from `free`.
    pub hinted: Amounts,
    /// What neither holds, at least zero; of a sick device too.
    pub free: Amounts,
    /// Who holds it, by owner.
    pub holders: Vec<HolderView<'a>>,
}

/// An owner's part of one device.
#[derive(Clone, Copy, Debug)]
pub struct HolderView<'a> {
    /// The owner.
    pub owner: &'a OwnerId,
    /// Where this is known from.
    pub origin: Origin,
    /// What it takes of this device.
    pub amounts: Amounts,
    /// Whether it may be elsewhere, or another amount.
    pub suspect: bool,
}

/// What one owner holds.
#[derive(Clone, Copy, Debug)]
pub struct HeldView<'a> {
    /// The owner.
    pub owner: &'a OwnerId,
    /// The node's name.
    pub node: &'a str,
    /// Where this is known from.
    pub origin: Origin,
    /// What it holds.
    pub holdings: &'a Holdings,
}

/// Something about a holding that the inventory does not bear out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Doubt {
    /// The record names a device that the node does not have; nothing is charged for it.
    #[error("GPU {gpu} is not on the node")]
    Ghost {
        /// The device.
        gpu: GpuUuid,
    },
    /// The record names a minor that the node does not have; every device is charged.
    #[error("no GPU of the node has minor {minor}")]
    UnknownMinor {
        /// The minor.
        minor: u32,
    },
    /// No record says which devices it is; every device is charged.
    #[error("it is not known which GPUs are used")]
    UnknownGpu,
    /// The vendor's plugin chooses the GPU, and has not said which; none of its GPUs takes shares meanwhile.
    #[error("it is not known which GPUs the vendor's plugin has given it")]
    UnknownWhole,
    /// It is not known, or not there, which device of another type is used; every device of the type may be charged.
    #[error("it is not known which {kind} devices are used")]
    UnknownDevice {
        /// The type.
        kind: DeviceType,
    },
    /// The record is in memory units and the node's unit is unknown; whole devices are charged.
    #[error("the node's memory unit is not known")]
    UnknownUnit,
    /// The record contradicts itself.
    #[error("the record contradicts itself")]
    Untrusted,
}

/// What one device has to say to a request.
#[derive(Clone, Debug)]
pub struct DeviceVerdict<'a> {
    /// The device.
    pub gpu: &'a Gpu,
    /// What is free for new shares: nothing if it is sick.
    pub free: Amounts,
    /// What it has in all.
    pub total: Amounts,
    /// What the request takes of it.
    pub need: Amounts,
    /// Whether there is room.
    pub fit: Result<(), Reason>,
}

impl Fleet {
    /// Every node, in no particular but a fixed order.
    pub fn nodes(&self) -> impl Iterator<Item = NodeView<'_>> {
        let slots = (0..).zip(&self.slots);
        slots.filter_map(|(index, slot)| {
            Some(NodeView {
                id: NodeId::new(index, slot.generation),
                node: slot.node.as_ref()?,
            })
        })
    }

    /// One node; `None` if it is gone.
    pub fn view(&self, id: NodeId) -> Option<NodeView<'_>> {
        Some(NodeView {
            id,
            node: self.node(id)?,
        })
    }

    /// What an owner holds.
    pub fn held_by(&self, owner: &str) -> Option<HeldView<'_>> {
        let node = self.at(*self.owners.get(owner)?)?;
        Some(node.held_by(owner)?.view(&node.name))
    }

    /// Number of owners that hold something.
    pub fn n_owners(&self) -> usize {
        self.owners.len()
    }

    /// Number of hints that are out.
    pub fn n_hints(&self) -> usize {
        self.hinted.len()
    }

    /// What every GPU of a node has to say to what is asked of GPUs, by minor; nothing, if that is no amount.
    ///
    /// # Errors
    /// The reason why the request cannot be compared with devices at all.
    pub fn explain(
        &self,
        node: NodeId,
        ask: impl Into<GpuAsk>,
        hints: Hints<'_>,
    ) -> Result<Vec<DeviceVerdict<'_>>, Reason> {
        let node = self.node(node).ok_or(Reason::NoDevice)?;
        let need = match ask.into() {
            GpuAsk::Share(request) => node.need(&request)?,
            GpuAsk::Whole(n) => return Ok(node.explain_whole(n, hints)),
            GpuAsk::All { .. } | GpuAsk::Nothing => return Ok(Vec::new()),
        };
        let verdict = |((row, gpu), mark): ((Row, _), &Mark)| {
            let need = need.on(row.total);
            DeviceVerdict {
                gpu,
                free: row.free,
                total: row.total,
                need,
                fit: judge(gpu, *mark, row.free, need),
            }
        };
        Ok(node
            .rows_under(hints)
            .zip(node.gpus())
            .zip(node.marks.iter())
            .map(verdict)
            .collect())
    }
}

impl Node {
    fn explain_whole(&self, n: u32, hints: Hints<'_>) -> Vec<DeviceVerdict<'_>> {
        let reason = self.fit_whole(n, hints).err();
        let may_be_had: Vec<usize> = self.whole_rows(hints).map(|(row, _)| row).collect();
        let verdict = |(at, (gpu, row)): (usize, (_, &Row))| {
            let need: Amounts = Gpu::whole(gpu);
            let fit = match reason {
                None | Some(Reason::TooFew) if may_be_had.contains(&at) => Ok(()),
                reason => Err(reason
                    .filter(|reason| *reason != Reason::TooFew)
                    .unwrap_or(Reason::Vendor)),
            };
            DeviceVerdict {
                gpu,
                free: row.free,
                total: row.total,
                need,
                fit,
            }
        };
        self.gpus()
            .iter()
            .zip(self.rows.iter())
            .enumerate()
            .map(verdict)
            .collect()
    }
}

fn judge(gpu: &Gpu, mark: Mark, free: Amounts, need: Amounts) -> Result<(), Reason> {
    if !need.within(gpu.total()) {
        return Err(Reason::TooLarge);
    }
    if !gpu.healthy {
        return Err(Reason::Unhealthy);
    }
    if mark.is_withheld {
        return Err(Reason::Vendor);
    }
    need.lacking(free)
        .next()
        .map_or(Ok(()), |dimension| Err(dimension.into()))
}

impl<'a> NodeView<'a> {
    /// Its place in the fleet.
    pub fn id(self) -> NodeId {
        self.id
    }

    /// Its name.
    pub fn name(self) -> &'a str {
        &self.node.name
    }

    /// Its devices, as far as they can be used; `None` while it, or its report, is missing.
    pub fn inventory(self) -> Option<&'a Inventory> {
        self.node.inventory.as_ref()
    }

    /// What is held of it, by owner.
    pub fn held(self) -> impl Iterator<Item = HeldView<'a>> {
        let Node { name, held, .. } = self.node;
        held.iter().map(|held| held.view(name))
    }

    /// CPU and memory that no pod uses; `None` as long as the node's total is not known.
    pub fn host_free(self) -> Option<HostAmounts> {
        self.node.host.total.is_some().then(|| self.node.host.free())
    }

    /// The owners that are expected to take something of it soon.
    pub fn hinted(self) -> impl Iterator<Item = &'a OwnerId> {
        self.node.hints.iter().map(|hint| &hint.owner)
    }

    /// Its devices by minor, with who holds what of them.
    pub fn gpus(self) -> Vec<GpuView<'a>> {
        let view = |gpu: &'a Gpu| {
            let (used, suspect, hinted, free) = (Amounts::ZERO, Amounts::ZERO, Amounts::ZERO, gpu.total());
            GpuView {
                gpu,
                used,
                suspect,
                hinted,
                free,
                holders: Vec::new(),
            }
        };
        let mut gpus: Vec<GpuView<'a>> = self.node.gpus().iter().map(view).collect();
        if let Some(inventory) = self.inventory() {
            inventory.charge_all(&self.node.held, &mut |held, charge| {
                if let Some(gpu) = gpus.get_mut(charge.row) {
                    gpu.add(HolderView {
                        owner: &held.owner,
                        origin: held.origin,
                        amounts: charge.amounts,
                        suspect: charge.suspect,
                    });
                }
            });
        }
        for (row, amounts) in self.node.hints.iter().flat_map(|hint| &hint.charges) {
            if let Some(gpu) = gpus.get_mut(*row) {
                gpu.hinted = gpu.hinted.plus(*amounts);
            }
        }
        gpus
    }

    /// Its devices of other types, by type and minor.
    pub fn other_devices(self) -> Vec<DeviceView<'a>> {
        let classes = self.node.classes().iter().zip(&self.node.free_others);
        let devices = classes.flat_map(|(class, free)| {
            class
                .devices
                .iter()
                .zip(free)
                .map(|(device, free)| (&class.kind, device, free))
        });
        devices
            .map(|(kind, device, free)| DeviceView {
                kind,
                device,
                free: free.clone(),
            })
            .collect()
    }

    /// What the inventory does not bear out, by owner; empty while there is no inventory to compare with.
    pub fn doubts(self) -> Vec<(&'a OwnerId, Doubt)> {
        let Some(inventory) = self.inventory() else {
            return Vec::new();
        };
        let doubts = |held: &'a Held| {
            held.holdings
                .doubts(inventory)
                .into_iter()
                .map(|doubt| (&held.owner, doubt))
        };
        self.node.held.iter().flat_map(doubts).collect()
    }
}

impl<'a> GpuView<'a> {
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

impl Held {
    fn view<'a>(&'a self, node: &'a str) -> HeldView<'a> {
        HeldView {
            owner: &self.owner,
            node,
            origin: self.origin,
            holdings: &self.holdings,
        }
    }
}

impl Holdings {
    fn doubts(&self, inventory: &Inventory) -> Vec<Doubt> {
        let mut doubts = self.gpus.doubts(inventory);
        doubts.extend((self.unknown_whole > 0).then_some(Doubt::UnknownWhole));
        let classes = inventory.classes.as_deref().unwrap_or_default();
        let is_known = |held: &&HeldDevice| {
            classes
                .iter()
                .any(|class| class.kind == held.kind && class.find(&held.device).is_some())
        };
        let unknown = self.others.iter().filter(|held| !is_known(held));
        doubts.extend(unknown.map(|held| Doubt::UnknownDevice {
            kind: held.kind.clone(),
        }));
        doubts
    }
}

impl Holding {
    fn doubts(&self, inventory: &Inventory) -> Vec<Doubt> {
        match self {
            Self::Shares(shares) => shares.iter().flat_map(|share| share.doubts(inventory)).collect(),
            Self::Anywhere(_) | Self::Somewhere(_) => vec![Doubt::UnknownGpu],
        }
    }
}

impl HeldShare {
    fn doubts(&self, inventory: &Inventory) -> impl Iterator<Item = Doubt> {
        let missing = inventory.position(&self.gpu).is_none().then(|| match &self.gpu {
            GpuRef::Uuid(gpu) => Doubt::Ghost { gpu: gpu.clone() },
            GpuRef::Minor(minor) => Doubt::UnknownMinor { minor: *minor },
        });
        let in_units = matches!(self.memory, HeldMemory::Ask(MemoryAsk::Units(_)));
        let unit = (in_units && inventory.unit_bytes.is_none()).then_some(Doubt::UnknownUnit);
        let trust = (!self.trusted).then_some(Doubt::Untrusted);
        [missing, unit, trust].into_iter().flatten()
    }
}
