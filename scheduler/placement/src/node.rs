//! One node: its inventory, who holds what of it, and the dense rows that requests are compared with.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::amounts::Amounts;
use crate::class::NamedAmounts;
use crate::fill::Worth;
use crate::fit::Hints;
use crate::forecast::Model;
use crate::gpu::{Gpu, Inventory};
use crate::holding::{GpuRef, Holding, Holdings, Origin, Placement};
use crate::host::Host;
use crate::ident::OwnerId;
use crate::rows::{Row, Rows};
use crate::shape::Shape;
use crate::whole::Mark;

/// What one owner holds of a node.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) owner: OwnerId,
    pub(crate) origin: Origin,
    pub(crate) holdings: Holdings,
}

/// What one owner is expected to take soon.
#[derive(Clone, Debug)]
pub(crate) struct Hint {
    pub(crate) owner: OwnerId,
    pub(crate) placement: Placement,
    /// The placement's shares on the rows as they are now.
    pub(crate) charges: Box<[(usize, Amounts)]>,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: Box<str>,
    /// Sorted by minor; `None` while the node, or its report, is missing.
    pub(crate) inventory: Option<Inventory>,
    /// What the inventory is apart from names; `None` without one.
    pub(crate) shape: Option<Arc<Shape>>,
    /// CPU and memory of the node itself.
    pub(crate) host: Host,
    /// What its GPUs are like; `None` without any.
    pub(crate) model: Option<Model>,
    pub(crate) worth: Worth,
    /// Whether some request without wishes may break a rule although there is room: a table binds, or somebody keeps devices.
    pub(crate) has_rules: bool,
    /// One per device of the inventory, in its order.
    pub(crate) rows: Rows,
    /// One per device of the inventory, in its order.
    pub(crate) marks: Box<[Mark]>,
    /// Whether some device is sick or takes no shares.
    pub(crate) any_aside: bool,
    /// What is free of devices of other types, in the order of the inventory.
    pub(crate) free_others: Vec<Vec<NamedAmounts>>,
    /// Sorted by owner.
    pub(crate) held: Vec<Held>,
    /// Sorted by owner.
    pub(crate) hints: Vec<Hint>,
}

impl Node {
    pub(crate) fn new(name: Box<str>) -> Self {
        Self {
            name,
            inventory: None,
            shape: None,
            host: Host::default(),
            model: None,
            worth: Worth::default(),
            has_rules: false,
            rows: Rows::default(),
            marks: Box::default(),
            any_aside: false,
            free_others: Vec::new(),
            held: Vec::new(),
            hints: Vec::new(),
        }
    }

    /// The same node apart from the fleet, to be changed, with those hints that count.
    pub(crate) fn copy_heeding(&self, heeds: impl Fn(&OwnerId) -> bool) -> Self {
        let mut copy = Self {
            inventory: self.inventory.clone(),
            shape: self.shape.clone(),
            host: self.host,
            model: self.model,
            held: self.held.clone(),
            hints: self
                .hints
                .iter()
                .filter(|hint| heeds(&hint.owner))
                .cloned()
                .collect(),
            ..Self::new(self.name.clone())
        };
        copy.recount();
        copy.locate_hints();
        copy
    }

    /// Whether nothing refers to this node any more.
    pub(crate) fn is_idle(&self) -> bool {
        self.inventory.is_none() && self.held.is_empty() && self.hints.is_empty() && self.host.is_unknown()
    }

    pub(crate) fn gpus(&self) -> &[Gpu] {
        self.inventory.as_ref().map_or(&[], |inventory| &inventory.gpus)
    }

    pub(crate) fn unit_bytes(&self) -> Option<u64> {
        self.inventory.as_ref()?.unit_bytes
    }

    pub(crate) fn held_by(&self, owner: &str) -> Option<&Held> {
        let at = self
            .held
            .binary_search_by(|held| held.owner.as_str().cmp(owner))
            .ok()?;
        self.held.get(at)
    }

    /// Puts a holding in, in place of one that the owner has here.
    pub(crate) fn put(&mut self, mut held: Held) {
        self.share_uuids(&mut held.holdings.gpus);
        match self.held.binary_search_by(|other| other.owner.cmp(&held.owner)) {
            Ok(at) => self.held.splice(at..=at, [held]).for_each(drop),
            Err(at) => self.held.insert(at, held),
        }
        self.recount();
    }

    /// Takes an owner's holding out.
    pub(crate) fn take(&mut self, owner: &str) {
        self.held.retain(|held| held.owner.as_str() != owner);
        self.recount();
    }

    /// Takes the holdings of several owners out.
    pub(crate) fn take_all(&mut self, owners: &BTreeSet<&str>) {
        self.held.retain(|held| !owners.contains(held.owner.as_str()));
        self.recount();
    }

    pub(crate) fn put_hint(&mut self, owner: OwnerId, placement: Placement) {
        self.take_hint(owner.as_str());
        let at = self.hints.partition_point(|hint| hint.owner < owner);
        self.hints.insert(
            at,
            Hint {
                owner,
                placement,
                charges: Box::default(),
            },
        );
        self.locate_hints();
    }

    pub(crate) fn take_hint(&mut self, owner: &str) {
        self.hints.retain(|hint| hint.owner.as_str() != owner);
        self.note_rules();
    }

    fn note_rules(&mut self) {
        let is_binding = |inventory: &Inventory| {
            inventory
                .partitions
                .as_ref()
                .is_some_and(|table| table.is_binding)
        };
        let held = self.held.iter().map(|held| &held.holdings.exclusions);
        let mut exclusions = held.chain(self.hints.iter().map(|hint| &hint.placement.exclusions));
        self.has_rules = self.inventory.as_ref().is_some_and(is_binding)
            || exclusions.any(|exclusions| !exclusions.is_empty());
    }

    /// Takes an inventory with its shape in; gives the shape back that the node had.
    pub(crate) fn set_inventory(&mut self, inventory: Option<(Inventory, Arc<Shape>)>) -> Option<Arc<Shape>> {
        let (inventory, shape) = inventory.unzip();
        self.inventory = inventory;
        self.model = self.inventory.as_ref().and_then(Inventory::model);
        let before = std::mem::replace(&mut self.shape, shape);
        self.recount();
        self.locate_hints();
        before
    }

    /// Whether rows may differ from what is free under such hints.
    #[inline]
    pub(crate) fn any_hint_counts(&self, hints: Hints<'_>) -> bool {
        !self.hints.is_empty() && !matches!(hints, Hints::Ignore)
    }

    /// Rows with what is free under such hints.
    #[inline]
    pub(crate) fn rows_under<'a>(&'a self, hints: Hints<'a>) -> impl Iterator<Item = Row> + Clone + 'a {
        let hinted = self.any_hint_counts(hints);
        self.rows.iter().enumerate().map(move |(at, row)| {
            if hinted {
                self.less_hints(at, *row, hints)
            } else {
                *row
            }
        })
    }

    fn less_hints(&self, at: usize, row: Row, hints: Hints<'_>) -> Row {
        let heeded = self.hints.iter().filter(|hint| hints.heeds(&hint.owner));
        let charges = heeded
            .flat_map(|hint| &hint.charges)
            .filter(|(row, _)| *row == at);
        Row {
            free: charges.fold(row.free, |free, (_, amounts)| free.less(*amounts)),
            ..row
        }
    }

    /// Works everything that is free out anew from the inventory and the holdings.
    fn recount(&mut self) {
        self.recount_free();
        self.note_rules();
    }

    /// Whether devices are told apart by more than what is free of GPUs.
    pub(crate) fn is_varied(&self) -> bool {
        !self.classes().is_empty()
            || self.has_rules
            || self.shape.as_ref().is_some_and(|shape| shape.has_topology)
    }

    fn recount_free(&mut self) {
        self.free_others = self.free_of_others();
        let n_unknown = self.n_unknown_whole();
        let Some(inventory) = &self.inventory else {
            self.rows.resize(0);
            self.marks = Box::default();
            self.any_aside = false;
            return;
        };
        self.rows.resize(inventory.gpus.len());
        if self.marks.len() != inventory.gpus.len() {
            self.marks = vec![Mark::default(); inventory.gpus.len()].into();
        }
        self.any_aside = false;
        for ((row, mark), gpu) in self.rows.iter_mut().zip(&mut self.marks).zip(&inventory.gpus) {
            *mark = Mark {
                is_withheld: inventory.is_withheld(gpu, n_unknown),
                ..Mark::default()
            };
            let is_aside = !gpu.healthy || mark.is_withheld;
            let total = gpu.total();
            *row = Row {
                free: if is_aside { Amounts::ZERO } else { total },
                total,
            };
            self.any_aside |= is_aside;
        }
        inventory.charge_all(&self.held, &mut |held, charge| {
            let is_shared = !held.holdings.is_vendor;
            if let (Some(row), Some(mark)) = (self.rows.get_mut(charge.row), self.marks.get_mut(charge.row)) {
                row.free = row.free.less(charge.amounts);
                mark.is_held |= charge.amounts.takes_part();
                mark.is_shared |= is_shared && charge.amounts.takes_part();
            }
        });
    }

    fn locate_hints(&mut self) {
        self.note_rules();
        let Some(inventory) = &self.inventory else {
            self.hints
                .iter_mut()
                .for_each(|hint| hint.charges = Box::default());
            return;
        };
        for hint in &mut self.hints {
            let locate = |gpu| inventory.gpus.iter().position(|candidate| candidate.uuid == gpu);
            let shares = hint.placement.shares.iter();
            let shares = shares.filter_map(|share| Some((locate(share.gpu.clone())?, share.amounts)));
            // Any of them may be the one that the vendor's plugin takes.
            let for_vendor = inventory
                .gpus
                .iter()
                .enumerate()
                .filter(|(_, gpu)| inventory.is_for_vendor(gpu));
            let any = for_vendor
                .filter(|_| hint.placement.unknown_whole > 0)
                .map(|(row, gpu)| (row, gpu.total()));
            hint.charges = shares.chain(any).collect();
        }
    }

    /// Lets a holding share the text of UUIDs that the inventory has anyway.
    fn share_uuids(&self, holding: &mut Holding) {
        let Holding::Shares(shares) = holding else { return };
        shares.shrink_to_fit();
        for share in shares {
            let known = self
                .gpus()
                .iter()
                .find(|gpu| matches!(&share.gpu, GpuRef::Uuid(uuid) if *uuid == gpu.uuid));
            if let Some(gpu) = known {
                share.gpu = GpuRef::Uuid(gpu.uuid.clone());
            }
        }
    }
}
