//! One node: its inventory, the holdings and hints on it, and the free amounts of its devices that requests are compared with.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::data::amounts::{Amounts, HostAmounts, NamedAmounts, subtract};
use crate::data::device::{Device, DeviceRef};
use crate::data::holding::{Held, HeldPart, Hints, Holdings, Origin, Placement, n_unknown_whole};
use crate::data::ident::OwnerId;
use crate::data::inventory::{GPUS, GpuModel, Inventory};
use crate::state::charges::{charges, charges_of_all};
use crate::state::hardware::HardwareClass;
use crate::state::value_cache::ValueCache;

/// Most rows (one for each GPU) that are kept inside the node; nodes rarely have more GPUs.
const N_IN_PLACE: usize = 8;

/// One node of a fleet.
#[derive(Debug, Default)]
pub(crate) struct Node {
    pub(crate) name: Box<str>,
    /// Devices sorted by minor; none while the node, or its report of devices, is missing.
    pub(crate) inventory: Inventory,
    /// The inventory without identifiers, shared with nodes of the same hardware; `None` while the report is missing.
    pub(crate) hardware: Option<Arc<HardwareClass>>,
    /// CPU and memory of the node itself.
    pub(crate) host: Host,
    /// The model of its GPUs; `None` if the node has no GPUs.
    pub(crate) model: Option<GpuModel>,
    /// The node's value and its unusable idle capacity with every hint counted. A change of the node has to clear it, as
    /// `Nodes::change` does.
    pub(crate) value_cache: ValueCache,
    /// True if a request without constraints may break a rule although there is room: the partition table binds, or a pod
    /// has exclusive use of devices.
    pub(crate) has_rules: bool,
    /// Free amounts of the GPUs, one row per GPU of the inventory in its order.
    pub(crate) rows: Rows,
    /// The flags of each GPU of the inventory, in its order.
    // Apart from the rows, so that a filter reads amounts alone.
    pub(crate) flags: Box<[GpuFlags]>,
    /// True if some GPU is unhealthy, closed or takes no shares.
    pub(crate) any_unavailable: bool,
    /// Free named resources of each device, by the index of its type and its own; none for GPUs, whose free amounts are rows.
    pub(crate) free_resources: Vec<Vec<NamedAmounts>>,
    /// The holdings of each owner (a pod, by its UID), sorted by owner.
    pub(crate) held: Vec<Held>,
    /// The hints on the node, sorted by owner.
    pub(crate) hints: Vec<Hint>,
    /// The number of CPU-only pods, apart from those of a `DaemonSet`, by the amounts that they use.
    pub(crate) cpu_only: BTreeMap<HostAmounts, u32>,
}

/// A hint: a placement that is chosen for an owner, and that the caller expects to reserve soon.
#[derive(Clone, Debug)]
pub(crate) struct Hint {
    pub(crate) owner: OwnerId,
    /// The holdings that the reservation would give the owner.
    pub(crate) holdings: Holdings,
    /// The amounts that these holdings take of GPUs, by the index of the GPU in the current inventory.
    pub(crate) gpu_charges: Box<[(usize, Amounts)]>,
}

impl Hint {
    /// Returns true if the hint keeps the GPU at this index from being allocated whole. False for whole GPUs of unknown UUID, of
    /// which only the number counts.
    pub(crate) fn occupies(&self, gpu: usize) -> bool {
        let is_occupied = |(at, amounts): &(usize, Amounts)| *at == gpu && amounts.occupies();
        self.holdings.n_unknown_gpus == 0 && self.gpu_charges.iter().any(is_occupied)
    }
}

/// The state of a GPU besides its row of amounts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GpuFlags {
    /// True if an owner may hold memory or computing power of the GPU.
    pub(crate) is_occupied: bool,
    /// True if such an owner holds a share of it, and not the whole GPU by the vendor's resource name.
    pub(crate) is_shared: bool,
    /// True if the GPU takes no shares, whatever is free.
    pub(crate) is_withheld: bool,
}

/// CPU and memory of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Host {
    /// All that pods can use; `None` if unknown, and then taken to be enough.
    pub(crate) total: Option<HostAmounts>,
    /// The amounts that all owners together use.
    pub(crate) used: HostAmounts,
    /// Number of owners that use some CPU or memory of the node.
    pub(crate) n_owners: u32,
}

impl Host {
    pub(crate) fn free(&self) -> HostAmounts {
        self.total
            .map_or(HostAmounts::PLENTY, |total| total.less(self.used))
    }
}

/// CPU and memory that one owner (a pod, by its UID) uses of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostUse {
    pub(crate) node_index: u32,
    pub(crate) amounts: HostAmounts,
    /// True if the pod is tied to the node, as that of a `DaemonSet` is: the workload model does not count it.
    pub(crate) is_daemon: bool,
}

impl Node {
    /// A node of which nothing but its name is known.
    pub(crate) fn new(name: Box<str>) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    /// A copy outside the fleet, for simulations, with all hints.
    pub(crate) fn copy(&self) -> Self {
        self.copy_with_hints(|_| true)
    }

    /// A copy outside the fleet, for simulations, with the hints of the owners for which `counts` returns true.
    pub(crate) fn copy_with_hints(&self, counts: impl Fn(&OwnerId) -> bool) -> Self {
        let hints = self.hints.iter().filter(|hint| counts(&hint.owner));
        let mut copy = Self {
            inventory: self.inventory.clone(),
            hardware: self.hardware.clone(),
            host: self.host,
            model: self.model,
            held: self.held.clone(),
            hints: hints.cloned().collect(),
            ..Self::new(self.name.clone())
        };
        copy.update_free();
        copy
    }

    /// A copy outside the fleet without any holding, hint or use of its CPU and memory.
    pub(crate) fn emptied(&self) -> Self {
        let mut copy = self.copy_with_hints(|_| false);
        copy.held.clear();
        copy.host = Host {
            total: self.host.total,
            ..Host::default()
        };
        copy.update_free();
        copy
    }

    /// Calls `change` for each GPU of a copy outside the fleet, with its index.
    pub(crate) fn change_gpus(&mut self, change: impl Fn(usize, &mut Device)) {
        for (at, gpu) in self.inventory.gpus.iter_mut().enumerate() {
            change(at, gpu);
        }
        self.update_free();
    }

    /// Offers only the GPUs at these indices of a copy outside the fleet.
    pub(crate) fn offer_only(&mut self, gpus: &[usize]) {
        self.change_gpus(|at, gpu| gpu.healthy &= gpus.contains(&at));
    }

    /// Returns true if nothing is known or counted of the node, so that its entry can be removed.
    pub(crate) fn is_idle(&self) -> bool {
        let is_host_unknown = self.host.total.is_none() && self.host.n_owners == 0;
        self.hardware.is_none() && self.held.is_empty() && self.hints.is_empty() && is_host_unknown
    }

    /// The GPUs by minor; empty without an inventory.
    pub(crate) fn gpus(&self) -> &[Device] {
        &self.inventory.gpus
    }

    pub(crate) fn has_gpus(&self) -> bool {
        !self.gpus().is_empty()
    }

    /// Free named resources of the devices of the type at an index; empty for GPUs.
    pub(crate) fn free_of_type(&self, type_at: usize) -> &[NamedAmounts] {
        self.free_resources.get(type_at).map_or(&[], Vec::as_slice)
    }

    /// Returns true if the node's devices have attributes, links or partitions that matter for the choice of devices.
    pub(crate) fn has_topology(&self) -> bool {
        let hardware = self.hardware.as_ref();
        hardware.is_some_and(|hardware| hardware.has_topology)
    }

    pub(crate) fn held_by(&self, owner: &str) -> Option<&Held> {
        // Nodes have tens of owners, and a bind looks one up.
        let at = self.held.binary_search_by(|held| held.owner.as_str().cmp(owner));
        self.held.get(at.ok()?)
    }

    pub(crate) fn counted_hints<'a>(&'a self, hints: Hints<'a>) -> impl Iterator<Item = &'a Hint> + Clone {
        self.hints.iter().filter(move |hint| hints.counts(&hint.owner))
    }

    /// Returns true if a hint on the node may count; if not, free amounts are those in the rows.
    #[inline]
    pub(crate) fn any_hint_counts(&self, hints: Hints<'_>) -> bool {
        // May be true although no hint counts, which costs a pass over the hints and changes no row.
        !self.hints.is_empty() && !matches!(hints, Hints::Ignore)
    }

    /// Rows of all GPUs, less the hints that count.
    #[inline]
    pub(crate) fn rows_with<'a>(&'a self, hints: Hints<'a>) -> impl Iterator<Item = Row> + Clone + 'a {
        let any_counts = self.any_hint_counts(hints);
        self.rows.iter().enumerate().map(move |(at, row)| {
            if any_counts {
                self.row_with(at, *row, hints)
            } else {
                *row
            }
        })
    }

    /// A row less what the hints that count take of the GPU at this index.
    pub(crate) fn row_with(&self, at: usize, mut row: Row, hints: Hints<'_>) -> Row {
        for hint in self.counted_hints(hints) {
            for (gpu, amounts) in &hint.gpu_charges {
                if *gpu == at {
                    // Hints reserve nothing, so that together they may exceed what is free.
                    row.free = row.free.less(*amounts);
                }
            }
        }
        row
    }

    /// Rows of the healthy GPUs that are not closed, less the hints that count; those that take no shares included.
    pub(crate) fn open_rows<'a>(
        &'a self,
        hints: Hints<'a>,
    ) -> impl Iterator<Item = (Row, &'a Device, GpuFlags)> + Clone {
        let rows = self.rows_with(hints).zip(self.gpus()).zip(&self.flags);
        rows.filter(|((_, gpu), _)| gpu.is_open())
            .map(|((row, gpu), flags)| (row, gpu, *flags))
    }

    /// Free named resources of a device by the index of its type and its own, less the hints that count.
    pub(crate) fn free_resources_with(
        &self,
        type_at: usize,
        device: usize,
        hints: Hints<'_>,
    ) -> Cow<'_, NamedAmounts> {
        let free = self.free_of_type(type_at).get(device);
        // Borrowed unless a hint takes some of it, since most devices have no hint.
        let mut free = free.map_or(Cow::Owned(NamedAmounts::new()), Cow::Borrowed);
        for hint in self.counted_hints(hints) {
            for charge in charges(&self.inventory, &hint.holdings) {
                if (charge.type_at, charge.device) == (type_at, device) {
                    subtract(free.to_mut(), charge.resources);
                }
            }
        }
        free
    }

    /// Counts a placement, with the CPU and memory of its pod, as in use on this copy of a node.
    pub(crate) fn put_on_copy(&mut self, placement: &Placement, host: HostAmounts) {
        self.insert_held(Held {
            // No UID of a pod has a slash, so that this owner is none of the fleet's.
            owner: OwnerId::from(format!("trial/{}", self.held.len())),
            origin: Origin::Decision,
            holdings: Holdings::from(placement),
        });
        // The next request must see the CPU and memory that this request takes, as kube-scheduler would.
        self.host.used = self.host.used.plus(host);
        // The choice of devices may have cached the value of the node without this placement.
        self.value_cache.clear();
    }

    /// Inserts a holding in place of the one that the owner has here.
    pub(crate) fn insert_held(&mut self, mut held: Held) {
        self.share_ids(&mut held.holdings);
        // Sorted by owner, so that equal holdings give equal rows whatever the order of events.
        match self.held.binary_search_by(|other| other.owner.cmp(&held.owner)) {
            Ok(at) => self.held.splice(at..=at, [held]).for_each(drop),
            Err(at) => self.held.insert(at, held),
        }
        self.update_free();
    }

    pub(crate) fn remove_held(&mut self, owner: &str) {
        self.held.retain(|held| held.owner.as_str() != owner);
        self.update_free();
    }

    pub(crate) fn remove_all_held(&mut self, owners: &BTreeSet<&str>) {
        self.held.retain(|held| !owners.contains(held.owner.as_str()));
        self.update_free();
    }

    /// Inserts a hint in place of the one that the owner has here.
    pub(crate) fn insert_hint(&mut self, owner: OwnerId, holdings: Holdings) {
        self.hints.retain(|hint| hint.owner != owner);
        // Sorted as holdings are, so that nothing depends on the order of events.
        let at = self.hints.partition_point(|hint| hint.owner < owner);
        let hint = Hint {
            owner,
            holdings,
            gpu_charges: Box::default(),
        };
        self.hints.insert(at, hint);
        self.update_hints();
    }

    pub(crate) fn remove_hint(&mut self, owner: &str) {
        self.hints.retain(|hint| hint.owner.as_str() != owner);
        // Rows are free amounts without any hint taken off, so they stay.
        self.update_rules();
    }

    /// Replaces the inventory and its hardware class; returns the class that the node had.
    pub(crate) fn set_inventory(
        &mut self,
        inventory: Option<(Inventory, Arc<HardwareClass>)>,
    ) -> Option<Arc<HardwareClass>> {
        let (inventory, hardware) = inventory.unzip();
        self.inventory = inventory.unwrap_or_default();
        self.model = self.inventory.model();
        let replaced = std::mem::replace(&mut self.hardware, hardware);
        // Records by minor may mean other GPUs now, and shares in percent other amounts.
        self.update_free();
        self.update_hints();
        replaced
    }

    /// Computes free amounts, flags of GPUs and [`Self::has_rules`] from the inventory and the holdings.
    pub(crate) fn update_free(&mut self) {
        self.update_rules();
        self.any_unavailable = false;
        self.free_resources.clear();
        let inventory = &self.inventory;
        self.rows.resize(inventory.gpus.len());
        // Most changes are of holdings, and need no new allocation.
        if self.flags.len() != inventory.gpus.len() {
            self.flags = vec![GpuFlags::default(); inventory.gpus.len()].into();
        }
        let n_unknown = n_unknown_whole(&self.held);
        for ((row, flags), gpu) in self.rows.iter_mut().zip(&mut self.flags).zip(&inventory.gpus) {
            *flags = GpuFlags {
                is_withheld: inventory.is_withheld(gpu, n_unknown),
                ..GpuFlags::default()
            };
            // An unavailable GPU has no free amounts, so that a filter does not have to read flags.
            let is_available = gpu.is_open() && !flags.is_withheld;
            row.total = gpu.total();
            row.free = if is_available { row.total } else { Amounts::ZERO };
            self.any_unavailable |= !is_available;
        }
        // Most nodes have GPUs alone, and need no list of named resources.
        if inventory.n_types() > 1 {
            self.free_resources.push(Vec::new());
            for (_, devices) in inventory.types().skip(1) {
                let resources = devices.iter().map(|device| device.resources.clone());
                self.free_resources.push(resources.collect());
            }
        }
        // From scratch at every change: sums that are added to and subtracted from would drift with saturation.
        for (held, charge) in charges_of_all(inventory, &self.held) {
            if charge.type_at != GPUS {
                if let Some(of_type) = self.free_resources.get_mut(charge.type_at)
                    && let Some(free) = of_type.get_mut(charge.device)
                {
                    subtract(free, charge.resources);
                }
            } else if let (Some(row), Some(flags)) = (
                self.rows.get_mut(charge.device),
                self.flags.get_mut(charge.device),
            ) {
                row.free = row.free.less(charge.amounts);
                flags.is_occupied |= charge.occupies();
                // The vendor's plugin must not choose a GPU that is shared.
                flags.is_shared |= charge.occupies() && !held.holdings.is_vendor;
            }
        }
    }

    /// Updates [`Self::has_rules`] from the inventory, the holdings and the hints.
    fn update_rules(&mut self) {
        let is_binding = self.inventory.has_binding_partitions();
        let any_held = self.held.iter().any(|held| !held.holdings.exclusions.is_empty());
        let any_hinted = self.hints.iter().any(|hint| !hint.holdings.exclusions.is_empty());
        self.has_rules = is_binding || any_held || any_hinted;
    }

    /// Finds the GPUs of all hints in the current inventory, and updates [`Self::has_rules`], which depends on hints too.
    fn update_hints(&mut self) {
        self.update_rules();
        for hint in &mut self.hints {
            let mut taken = Vec::new();
            for charge in charges(&self.inventory, &hint.holdings) {
                if charge.type_at == GPUS {
                    taken.push((charge.device, charge.amounts));
                }
            }
            if hint.holdings.n_unknown_gpus > 0 {
                // The vendor's plugin may take any of its GPUs.
                taken.extend(self.inventory.for_vendor().map(|(at, gpu)| (at, gpu.total())));
            }
            hint.gpu_charges = taken.into();
        }
    }

    /// Replaces device IDs of a holding by clones of the inventory's, so that their texts are in memory once.
    fn share_ids(&self, holdings: &mut Holdings) {
        // A cluster has very many holdings whose parts stay as they are, so spare capacity of their vectors only takes memory.
        holdings.parts.shrink_to_fit();
        for HeldPart { kind, device, .. } in &mut holdings.parts {
            if let DeviceRef::Id(id) = device
                && let Some((type_at, _, known)) = self.inventory.device(kind, id)
            {
                *id = known.id.clone();
                if let Some((known, _)) = self.inventory.types().nth(type_at) {
                    *kind = known.clone();
                }
            }
        }
    }
}

/// A copy of a node with the CPU and memory that each holder of devices uses: for another fleet, which a caller fills a few nodes
/// at a time, so that it never locks the original for long; and for placements that show how many more pods would fit.
#[derive(Debug)]
pub struct NodeCopy {
    pub(crate) node: Node,
    pub(crate) host_uses: Vec<(OwnerId, HostUse)>,
}

impl NodeCopy {
    /// Opens all GPUs of the copy, as those of a node that is added are.
    pub fn open_gpus(&mut self) {
        self.node.change_gpus(|_, gpu| gpu.closed = false);
    }

    /// Closes all GPUs of the copy: it takes no new pod.
    pub fn close_gpus(&mut self) {
        self.node.change_gpus(|_, gpu| gpu.closed = true);
    }
}

/// The amounts of one GPU that requests are compared with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Row {
    /// Free for new shares: nothing if the GPU is unhealthy, closed or withheld.
    pub(crate) free: Amounts,
    /// Everything that the GPU has, healthy or not.
    pub(crate) total: Amounts,
}

/// The rows of one node, inside the node where there are few, so that a filter over many nodes reads memory in order.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    len: usize,
    in_place: [Row; N_IN_PLACE],
    /// All rows, if there are more than fit in `in_place`.
    elsewhere: Box<[Row]>,
}

impl Rows {
    /// Sets the number of rows, whose contents are then unspecified.
    pub(crate) fn resize(&mut self, n: usize) {
        if n != self.len {
            let n_elsewhere = if n > N_IN_PLACE { n } else { 0 };
            self.elsewhere = vec![Row::default(); n_elsewhere].into();
            self.len = n;
        }
    }
}

impl Deref for Rows {
    type Target = [Row];

    #[inline]
    fn deref(&self) -> &[Row] {
        // The range is out of bounds exactly where the rows lie elsewhere.
        self.in_place.get(..self.len).unwrap_or(&self.elsewhere)
    }
}

impl DerefMut for Rows {
    fn deref_mut(&mut self) -> &mut [Row] {
        self.in_place.get_mut(..self.len).unwrap_or(&mut self.elsewhere)
    }
}
