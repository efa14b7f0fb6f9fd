//! Who uses which devices of a node, as far as exclusions, whole groups and virtual functions depend on it.

use crate::class::Class;
use crate::fit::Hints;
use crate::gpu::Inventory;
use crate::holding::{Holding, Holdings, Placement};
use crate::ident::FunctionId;
use crate::node::{Held, Node};
use crate::shape::Spot;
use crate::wishes::{Exclusion, Kind};

/// Who uses one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Use {
    /// Whether somebody may hold a part of it, or see it.
    pub(crate) is_held: bool,
    /// Whether somebody may hold memory or computing power of it, or any amount of a device of another type.
    pub(crate) is_taken: bool,
    /// Whether somebody keeps it from others.
    pub(crate) is_kept: bool,
}

/// Who uses the devices of a node, in the order of its inventory.
#[derive(Debug, Default)]
pub(crate) struct Uses<'a> {
    pub(crate) gpus: Vec<Use>,
    pub(crate) others: Vec<Vec<Use>>,
    /// Virtual functions that are held, by type.
    pub(crate) functions: Vec<Vec<&'a FunctionId>>,
}

/// What one owner says of one type.
struct Keeper<'a> {
    exclusions: &'a [(Kind, Exclusion)],
}

impl Keeper<'_> {
    fn keeps(&self, kind: &Kind) -> Option<Exclusion> {
        widest(self.exclusions, kind)
    }

    /// Enters that an owner may hold some devices of a type, and what it keeps others from.
    fn enter(&self, kind: &Kind, spots: &[Spot], held: &[usize], uses: &mut [Use]) {
        for at in held {
            if let Some(one) = uses.get_mut(*at) {
                one.is_held = true;
            }
        }
        let is_on = |spot: &Spot| {
            held.iter()
                .filter_map(|at| spots.get(*at))
                .any(|other| other.switch == spot.switch)
        };
        match self.keeps(kind) {
            None => {}
            Some(Exclusion::Device) => held
                .iter()
                .for_each(|at| uses.get_mut(*at).into_iter().for_each(|one| one.is_kept = true)),
            Some(Exclusion::Switch) => uses
                .iter_mut()
                .zip(spots)
                .for_each(|(one, spot)| one.is_kept |= is_on(spot)),
        }
    }
}

impl Node {
    /// Who uses the devices of this node, with the hints that count.
    pub(crate) fn uses<'a>(&'a self, hints: Hints<'_>) -> Uses<'a> {
        let (Some(inventory), Some(shape)) = (&self.inventory, &self.shape) else {
            return Uses::default();
        };
        let mut uses = Uses::empty(inventory);
        for (use_of, mark) in uses.gpus.iter_mut().zip(self.marks.iter()) {
            use_of.is_taken = mark.is_held;
        }
        for held in &self.held {
            let rows = self.rows_of(inventory, held);
            uses.enter_holdings(
                inventory,
                shape.spots.gpus.as_ref(),
                &shape.spots.others,
                &held.holdings,
                &rows,
            );
        }
        for hint in self.hints.iter().filter(|hint| hints.heeds(&hint.owner)) {
            let rows: Vec<usize> = hint.charges.iter().map(|(row, _)| *row).collect();
            for (row, amounts) in &hint.charges {
                if let Some(one) = uses.gpus.get_mut(*row) {
                    one.is_taken |= amounts.takes_part();
                }
            }
            uses.enter_hint(
                inventory,
                &shape.spots.gpus,
                &shape.spots.others,
                &rows,
                &hint.placement,
            );
        }
        uses
    }

    /// GPUs that an owner may hold a part of, for all that is known, or that are charged for one of which nothing is known yet.
    fn rows_of(&self, inventory: &Inventory, held: &Held) -> Vec<usize> {
        let mut rows = Vec::new();
        if let Holding::Somewhere(_) = held.holdings.gpus {
            inventory.charge_all(&self.held, &mut |other, charge| {
                if other.owner == held.owner {
                    rows.push(charge.row);
                }
            });
        } else {
            inventory.charge(&held.holdings.gpus, &mut |charge| rows.push(charge.row));
        }
        if held.holdings.unknown_whole > 0 {
            let for_vendor = inventory
                .gpus
                .iter()
                .enumerate()
                .filter(|(_, gpu)| inventory.is_for_vendor(gpu));
            rows.extend(for_vendor.map(|(row, _)| row));
        }
        rows
    }
}

impl<'a> Uses<'a> {
    fn empty(inventory: &Inventory) -> Self {
        let classes = inventory.classes.as_deref().unwrap_or_default();
        Self {
            gpus: vec![Use::default(); inventory.gpus.len()],
            others: classes
                .iter()
                .map(|class| vec![Use::default(); class.devices.len()])
                .collect(),
            functions: vec![Vec::new(); classes.len()],
        }
    }

    fn enter_holdings(
        &mut self,
        inventory: &Inventory,
        gpu_spots: &[Spot],
        spots: &[Box<[Spot]>],
        holdings: &'a Holdings,
        rows: &[usize],
    ) {
        let keeper = Keeper {
            exclusions: &holdings.exclusions,
        };
        if holdings.gpus != Holding::Shares(Vec::new()) || holdings.unknown_whole > 0 {
            keeper.enter(&Kind::Gpu, gpu_spots, rows, &mut self.gpus);
        }
        if holdings.others.is_empty() {
            return;
        }
        for (((class, spots), uses), functions) in classes(inventory)
            .zip(spots)
            .zip(&mut self.others)
            .zip(&mut self.functions)
        {
            let parts = || holdings.others.iter().filter(|part| part.kind == class.kind);
            let may_hold = |at: &usize| {
                class
                    .devices
                    .get(*at)
                    .is_some_and(|device| parts().any(|part| class.may_be(&part.device, device)))
            };
            let held: Vec<usize> = (0..class.devices.len()).filter(may_hold).collect();
            for at in &held {
                uses.get_mut(*at).into_iter().for_each(|one| one.is_taken = true);
            }
            keeper.enter(&Kind::Other(class.kind.clone()), spots, &held, uses);
            functions.extend(parts().flat_map(|part| &part.functions));
        }
    }

    fn enter_hint(
        &mut self,
        inventory: &Inventory,
        gpu_spots: &[Spot],
        spots: &[Box<[Spot]>],
        rows: &[usize],
        hint: &'a Placement,
    ) {
        let keeper = Keeper {
            exclusions: &hint.exclusions,
        };
        keeper.enter(&Kind::Gpu, gpu_spots, rows, &mut self.gpus);
        for (((class, spots), uses), functions) in classes(inventory)
            .zip(spots)
            .zip(&mut self.others)
            .zip(&mut self.functions)
        {
            let shares = || hint.others.iter().filter(|share| share.kind == class.kind);
            let held: Vec<usize> = shares()
                .filter_map(|share| class.devices.iter().position(|device| device.id == share.id))
                .collect();
            for at in &held {
                uses.get_mut(*at).into_iter().for_each(|one| one.is_taken = true);
            }
            keeper.enter(&Kind::Other(class.kind.clone()), spots, &held, uses);
            functions.extend(
                shares()
                    .flat_map(|share| &share.functions)
                    .map(|function| &function.id),
            );
        }
    }
}

fn classes(inventory: &Inventory) -> std::slice::Iter<'_, Class> {
    inventory.classes.as_deref().unwrap_or_default().iter()
}

/// Whether exclusions, those of others and one's own, leave a device.
pub(crate) fn permits(own: Option<Exclusion>, at: usize, spots: &[Spot], uses: &[Use]) -> bool {
    let Some(one) = uses.get(at) else { return false };
    let switch = spots.get(at).map(|spot| spot.switch);
    let is_shared = || {
        spots
            .iter()
            .zip(uses)
            .any(|(spot, one)| Some(spot.switch) == switch && one.is_held)
    };
    !one.is_kept
        && match own {
            None => true,
            Some(Exclusion::Device) => !one.is_held,
            Some(Exclusion::Switch) => !is_shared(),
        }
}

/// The widest of the exclusions that somebody says of a type.
pub(crate) fn widest(exclusions: &[(Kind, Exclusion)], kind: &Kind) -> Option<Exclusion> {
    exclusions
        .iter()
        .filter(|(of, _)| of == kind)
        .map(|(_, exclusion)| *exclusion)
        .max()
}
