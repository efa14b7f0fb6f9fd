//! What a decision on one node looks at, and the devices of each type that rules leave to choose from.

use crate::amounts::Amounts;
use crate::class::{Class, ClassRequest, Device, NamedAmounts, is_within};
use crate::fill::taken_part;
use crate::fit::Hints;
use crate::gpu::Inventory;
use crate::ident::FunctionId;
use crate::miss::{Miss, Tally};
use crate::node::Node;
use crate::policy::DevicePolicy;
use crate::rank::Order;
use crate::reason::Reason;
use crate::request::GpuAsk;
use crate::rows::Row;
use crate::shape::Shape;
use crate::topology::groups::{gpu_losses, losses};
use crate::topology::pool::Pool;
use crate::topology::uses::{Uses, permits};
use crate::traits::{Function, Traits};
use crate::wishes::{Exclusion, Kind, Strategy, Wish, Wishes};

/// What a decision looks at.
pub(crate) struct Scene<'a> {
    pub(crate) node: &'a Node,
    pub(crate) inventory: &'a Inventory,
    pub(crate) shape: &'a Shape,
    pub(crate) uses: Uses<'a>,
    pub(crate) wishes: Option<&'a Wishes>,
    pub(crate) order: Order<'a>,
    pub(crate) hints: Hints<'a>,
}

/// What is to be taken of devices of a type other than GPU.
pub(crate) struct Part<'a> {
    pub(crate) class: &'a Class,
    /// What is taken of each.
    pub(crate) amounts: NamedAmounts,
    /// Whether every device that is selected is taken.
    pub(crate) takes_all: bool,
    wish: Option<&'a Wish>,
    used_functions: &'a [&'a FunctionId],
}

/// How far one device passes the rules.
struct Sieve<'a> {
    wish: Option<&'a Wish>,
    tally: Tally,
}

impl<'a> Sieve<'a> {
    fn new(wish: Option<&'a Wish>) -> Self {
        let selector = wish.and_then(|wish| wish.selector.clone());
        let wants_functions = wish.is_some_and(|wish| wish.functions.is_some());
        Self {
            wish,
            tally: Tally {
                selector,
                wants_functions,
                ..Tally::default()
            },
        }
    }

    /// Whether a device passes all rules; counts how far it comes.
    fn passes(
        &mut self,
        traits: &Traits,
        has_function: bool,
        has_room: impl FnOnce() -> bool,
        is_permitted: bool,
    ) -> bool {
        let selector = self.wish.and_then(|wish| wish.selector.as_ref());
        let mut counts = [
            &mut self.tally.selected,
            &mut self.tally.with_function,
            &mut self.tally.with_room,
            &mut self.tally.permitted,
        ];
        self.tally.all += 1;
        let mut tests: [&mut dyn FnMut() -> bool; 4] = [
            &mut || selector.is_none_or(|selector| selector.selects(&traits.labels)),
            &mut || has_function,
            &mut {
                let mut has_room = Some(has_room);
                move || has_room.take().is_some_and(|has_room| has_room())
            },
            &mut || is_permitted,
        ];
        counts.iter_mut().zip(&mut tests).all(|(count, test)| {
            let passes = test();
            **count += usize::from(passes);
            passes
        })
    }
}

impl<'a> Scene<'a> {
    fn wish(&self, kind: &Kind) -> Option<&'a Wish> {
        self.wishes.and_then(|wishes| wishes.of(kind))
    }

    /// GPUs that may be taken; `None` if none are chosen here.
    pub(crate) fn gpus(&self, ask: GpuAsk) -> Result<Option<Pool>, Miss> {
        let (spots, uses, gpus) = (&self.shape.spots.gpus, &self.uses.gpus, &self.inventory.gpus);
        let losses = gpu_losses(self.inventory, spots, uses);
        let loss = |at: usize| losses.get(at).copied().unwrap_or_default();
        let mut sieve = Sieve::new(self.wish(&Kind::Gpu));
        let (wish, has_function) = (sieve.wish, !sieve.tally.wants_functions);
        let mut passes = |at: usize, has_room: bool| {
            let traits = gpus.get(at).map(|gpu| &gpu.traits);
            traits.is_some_and(|traits| {
                sieve.passes(
                    traits,
                    has_function,
                    || has_room,
                    permits(exclusion(wish), at, spots, uses),
                )
            })
        };
        let spot = |at: usize| spots.get(at).copied().unwrap_or_default();
        let (n, pool) = match ask {
            GpuAsk::Nothing | GpuAsk::All { .. } => return Ok(None),
            GpuAsk::Share(request) => {
                let need = self.node.need(&request).map_err(Miss::Plain)?;
                let rows = self.node.rows_under(self.hints).enumerate();
                let fitting = rows.filter(|(at, row)| passes(*at, need.on(row.total).within(row.free)));
                let looks_ahead = self
                    .order
                    .outlook
                    .filter(|_| self.order.policy == DevicePolicy::Fill && need.devices == 1);
                let costs = looks_ahead.map(|outlook| self.node.costs(outlook, self.hints));
                let cost = |at, row: &Row| {
                    costs
                        .as_ref()
                        .map(|costs| costs.of([(at, taken_part(need.on(row.total), row.total))]).cost)
                };
                let key = |(at, row)| {
                    (
                        at,
                        spot(at),
                        (cost(at, &row), self.order.preference(need, at, &row), loss(at)),
                    )
                };
                (
                    need.devices,
                    Pool::new(Kind::Gpu, need.devices, &fitting.map(key).collect::<Vec<_>>()),
                )
            }
            GpuAsk::Whole(_) if !self.inventory.serves_vendor => return Ok(None),
            GpuAsk::Whole(n) => {
                let n = usize::try_from(n).unwrap_or(usize::MAX);
                let free: Vec<usize> = self.node.whole_rows(self.hints).map(|(at, _)| at).collect();
                let fitting = gpus
                    .iter()
                    .enumerate()
                    .filter(|(at, _)| passes(*at, free.contains(at)));
                (
                    n,
                    Pool::new(
                        Kind::Gpu,
                        n,
                        &fitting
                            .map(|(at, gpu)| (at, spot(at), (gpu.sharing, loss(at))))
                            .collect::<Vec<_>>(),
                    ),
                )
            }
        };
        if pool.candidates.len() < n {
            return Err(Miss::TooFew {
                kind: Kind::Gpu,
                needed: n,
                tally: sieve.tally,
            });
        }
        Ok(Some(pool))
    }

    /// Whether whole GPUs are asked for, in whatever terms, which a partition table can give.
    pub(crate) fn is_whole(&self, ask: GpuAsk, pool: &Pool) -> bool {
        match ask {
            GpuAsk::Share(request) => self.node.need(&request).is_ok_and(|need| {
                let takes_all = |total: Amounts| need.on(total).memory >= total.memory;
                pool.candidates.iter().all(|one| {
                    self.inventory
                        .gpus
                        .get(one.at)
                        .is_some_and(|gpu| takes_all(gpu.total()))
                })
            }),
            GpuAsk::Whole(_) => true,
            GpuAsk::Nothing | GpuAsk::All { .. } => false,
        }
    }

    /// Devices of another type that may be taken, and what of each.
    pub(crate) fn others(&'a self, request: &'a ClassRequest) -> Result<(Part<'a>, Pool), Miss> {
        let kind = Kind::Other(request.kind.clone());
        let at = self
            .node
            .classes()
            .iter()
            .position(|class| class.kind == request.kind);
        let found =
            at.and_then(|at| Some((self.node.classes().get(at)?, self.node.free_others.get(at)?, at)));
        let (class, free, at) = found.ok_or(Miss::Plain(Reason::OtherDevices))?;
        let (spots, uses) = (self.shape.spots.others.get(at), self.uses.others.get(at));
        let (spots, uses) = (
            spots.map_or(&[][..], |spots| spots),
            uses.map_or(&[][..], |uses| uses),
        );
        let mut sieve = Sieve::new(self.wish(&kind));
        let wish = sieve.wish;
        let (n, amounts, takes_all) = count(request, class, wish).ok_or(Miss::Plain(Reason::OtherDevices))?;
        let used_functions = self.uses.functions.get(at).map_or(&[][..], |functions| functions);
        let part = Part {
            class,
            amounts,
            takes_all,
            wish,
            used_functions,
        };
        let losses = losses(spots, uses);
        let mut keyed = Vec::new();
        for (at, (device, free)) in class.devices.iter().zip(free).enumerate() {
            let free = self.node.less_hints_of(&request.kind, device, free, self.hints);
            let has_function =
                wish.is_none_or(|wish| wish.functions.is_none()) || part.function(device).is_some();
            let has_room = || device.healthy && is_within(&part.amounts, &free);
            if sieve.passes(
                &device.traits,
                has_function,
                has_room,
                permits(exclusion(wish), at, spots, uses),
            ) {
                let key = self.order.preference_of(device, &free, &part.amounts);
                keyed.push((
                    at,
                    spots.get(at).copied().unwrap_or_default(),
                    (key, losses.get(at).copied().unwrap_or_default()),
                ));
            }
        }
        let tally = sieve.tally;
        if takes_all && (tally.selected == 0 || keyed.len() < tally.selected) {
            return Err(Miss::NotAll { kind, tally });
        }
        let n = if takes_all { keyed.len() } else { n };
        if keyed.len() < n {
            return Err(Miss::TooFew {
                kind,
                needed: n,
                tally,
            });
        }
        Ok((part, Pool::new(kind, n, &keyed)))
    }
}

fn exclusion(wish: Option<&Wish>) -> Option<Exclusion> {
    wish.and_then(|wish| wish.exclusion)
}

impl Part<'_> {
    /// The virtual function of a device that is taken: the first by ID that is free and of the kind that is wanted.
    pub(crate) fn function<'d>(&self, device: &'d Device) -> Option<&'d Function> {
        let wanted = self.wish?.functions.as_ref()?;
        let groups = device
            .traits
            .functions
            .iter()
            .filter(|group| wanted.selects(&group.labels));
        let free = groups
            .flat_map(|group| &group.functions)
            .filter(|function| !self.used_functions.contains(&&function.id));
        free.min_by(|one, other| one.id.cmp(&other.id))
    }
}

/// How many devices are to be taken, what of each, and whether it is all that are selected; `None` if none can be.
///
/// More than one whole device is so many whole ones, whatever is wished.
fn count(request: &ClassRequest, class: &Class, wish: Option<&Wish>) -> Option<(usize, NamedAmounts, bool)> {
    let split = request.split(class);
    let strategy = wish
        .and_then(|wish| wish.strategy)
        .filter(|_| split.as_ref().is_none_or(|(n, _)| *n == 1));
    match strategy {
        None => split.map(|(n, amounts)| (n, amounts, false)),
        Some(Strategy::All) => Some((0, request.amounts.clone(), true)),
        Some(Strategy::Count) => {
            let is_whole = wish.is_some_and(|wish| wish.exclusion == Some(Exclusion::Device));
            let n = request.amounts.values().max().copied()?;
            let largest = |resource| {
                class
                    .devices
                    .iter()
                    .filter_map(|device| device.resources.get(resource))
                    .max()
                    .copied()
            };
            let each = |resource| {
                if is_whole {
                    request.whole.or_else(|| largest(resource)).unwrap_or(1)
                } else {
                    1
                }
            };
            let amounts = request
                .amounts
                .keys()
                .map(|resource| (resource.clone(), each(resource)))
                .collect();
            Some((usize::try_from(n).ok()?, amounts, false))
        }
    }
}
