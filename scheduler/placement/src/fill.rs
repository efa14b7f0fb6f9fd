//! What a choice of GPUs costs: how much less of its node the pods to come would fill, beyond what the choice itself takes,
//! and how much of what stays idle it makes useless to them; the mean of both. To that comes, in part, what it takes of whole
//! GPUs that lie idle together, as what was seen so far need not be what comes.
//!
//! The first sees what CPU, memory and devices come to together. The second sees to it that large pods find whole nodes,
//! which small ones could fill as well if there were enough of them. Of two choices the one that costs less is better; of
//! equals, the one that leaves less on its node.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustc_hash::FxHashMap;

use crate::amounts::Amounts;
use crate::fit::Hints;
use crate::forecast::{Forecast, Lanes, Model, N_SEQUENCES, Part, WHOLE, thousandths_down, thousandths_up};
use crate::gpu::Inventory;
use crate::host::HostAmounts;
use crate::node::Node;
use crate::policy::DevicePolicy;
use crate::rank::Order;
use crate::reason::Reason;
use crate::request::{Ask, GpuAsk, Need, Request};
use crate::rows::Row;
use crate::workload::Sample;

/// Thousandths of a GPU that do not count as a difference.
const STEP: i64 = 10;

/// The cost that is counted from, as a choice may even cost less than nothing.
const NOTHING: i64 = 1024;

/// Bits of what is left.
const LEFT_BITS: u32 = 15;

/// What a choice costs; less is better. 27 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cost(u32);

impl Cost {
    /// Costs are less than this.
    pub(crate) const END: u32 = 1 << 27;

    fn new(terms: Terms, left: u32) -> Self {
        // Rounded up: a loss of less than a step is a loss.
        let steps = -(-terms.sum()).div_euclid(STEP * Terms::SCALE);
        let steps =
            u32::try_from((steps + NOTHING).clamp(0, i64::from(Self::END >> LEFT_BITS) - 1)).unwrap_or(0);
        let left = (left / 2).min((1 << LEFT_BITS) - 1);
        Self(steps << LEFT_BITS | left)
    }

    pub(crate) const fn get(self) -> u32 {
        self.0
    }
}

/// The terms of what a choice costs, in parts of a GPU; each may be less than nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// How much less pods to come would fill, beyond what the choice takes; half of it counts.
    unfilled: i64,
    /// How much of what is idle becomes useless to them; half of it counts.
    useless: i64,
    /// What whole GPUs that lie idle together lose, as far as that counts.
    broken: i64,
}

impl Terms {
    /// Parts of a thousandth of a GPU.
    const SCALE: i64 = N_SEQUENCES as i64;

    fn sum(self) -> i64 {
        (self.unfilled + self.useless).div_euclid(2) + self.broken
    }

    /// Thousandths of a GPU, as they count: less that pods to come would fill, more that is useless to them, and less that
    /// whole idle GPUs are worth.
    pub const fn thousandths(self) -> [i64; 3] {
        let Self {
            unfilled,
            useless,
            broken,
        } = self;
        [
            unfilled / (2 * Self::SCALE),
            useless / (2 * Self::SCALE),
            broken / Self::SCALE,
        ]
    }
}

/// What a choice costs, and why.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Price {
    pub(crate) cost: Cost,
    pub(crate) terms: Terms,
}

/// What is expected of all nodes, by what their GPUs are like.
#[derive(Debug, Default)]
pub(crate) struct Forecasts {
    sample: Sample,
    /// Tells these forecasts from all others; 0 as long as nothing has been learnt.
    number: u32,
    by_model: FxHashMap<Model, Forecast>,
}

impl Forecasts {
    /// What is expected after another sample, under a number that is above all that have been used; `None` if the sample is
    /// the same.
    pub(crate) fn after(&self, sample: Sample, used: u32) -> Option<Self> {
        if sample == self.sample {
            return None;
        }
        // Of those that count and those that will next, one is even and one odd: what is measured of nodes lies side by side.
        let number = used + 1 + (used + 1 + self.number + 1) % 2;
        let by_model = self
            .by_model
            .keys()
            .map(|model| (*model, Forecast::of(&sample, *model)))
            .collect();
        Some(Self {
            sample,
            number,
            by_model,
        })
    }

    /// Prepares for nodes with such GPUs.
    pub(crate) fn know(&mut self, model: Model) {
        self.by_model
            .entry(model)
            .or_insert_with(|| Forecast::of(&self.sample, model));
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn sample(&self) -> &Sample {
        &self.sample
    }
}

/// What a choice is judged by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outlook<'a> {
    pub(crate) forecasts: &'a Forecasts,
    /// CPU and memory that are asked for.
    pub(crate) host: HostAmounts,
}

/// One node, ready to tell what choices cost.
pub(crate) struct Costs<'a> {
    forecast: Option<&'a Forecast>,
    lanes: Lanes,
    /// CPU and memory that will be left.
    host: HostAmounts,
    worth: u32,
    fragment: u32,
    /// Thousandths that whole idle GPUs count for.
    caution: u64,
}

impl Costs<'_> {
    /// What it costs to take parts of some GPUs.
    pub(crate) fn of(&self, taken: impl IntoIterator<Item = (usize, Part)>) -> Price {
        let (mut lanes, mut size) = (self.lanes, 0);
        for (at, part) in taken {
            lanes.take(at, part);
            size += i64::from(part.size());
        }
        let (worth, fragment) = self
            .forecast
            .map_or((0, 0), |forecast| measure(forecast, &lanes, self.host));
        let broken = self.lanes.idle().saturating_sub(lanes.idle()) * self.caution / 1000;
        let terms = Terms {
            unfilled: i64::from(self.worth) - i64::from(worth) - size * Terms::SCALE,
            useless: i64::from(fragment) - i64::from(self.fragment),
            broken: i64::try_from(broken).unwrap_or(0) * Terms::SCALE,
        };
        Price {
            cost: Cost::new(terms, lanes.free()),
            terms,
        }
    }
}

/// What the pods to come would fill of a node, and what of it is useless to them.
fn measure(forecast: &Forecast, lanes: &Lanes, host: HostAmounts) -> (u32, u32) {
    (forecast.worth(lanes, host), forecast.fragment(lanes, host))
}

/// What has been measured of a node with every hint counted, since it changed last: by the forecasts that count, and by
/// those that will next.
#[derive(Debug, Default)]
pub(crate) struct Worth([Measured; 2]);

#[derive(Debug, Default)]
struct Measured {
    /// By which forecasts; 0 as long as nothing has been measured.
    forecasts: AtomicU32,
    /// Worth and fragment, half a word each.
    both: AtomicU64,
}

impl Worth {
    fn get(&self, forecasts: u32, measure: impl FnOnce() -> (u32, u32)) -> (u32, u32) {
        let [even, odd] = &self.0;
        let known = if forecasts.is_multiple_of(2) { even } else { odd };
        if known.forecasts.load(Ordering::Acquire) == forecasts {
            let both = known.both.load(Ordering::Relaxed);
            let half = |word: u64| u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0);
            return (half(both >> 32), half(both));
        }
        let (worth, fragment) = measure();
        // Requests that measure at one time measure the same: nothing else changes while they read.
        known
            .both
            .store(u64::from(worth) << 32 | u64::from(fragment), Ordering::Relaxed);
        known.forecasts.store(forecasts, Ordering::Release);
        (worth, fragment)
    }
}

impl Inventory {
    /// What its GPUs are like: as the largest.
    pub(crate) fn model(&self) -> Option<Model> {
        let memory = self.gpus.iter().map(|gpu| gpu.total().memory).max()?;
        Some(Model {
            memory,
            unit_bytes: self.unit_bytes,
        })
    }
}

impl Node {
    /// Gets ready to tell what choices cost.
    pub(crate) fn costs<'a>(&self, outlook: Outlook<'a>, hints: Hints<'_>) -> Costs<'a> {
        let forecast = self
            .model
            .and_then(|model| outlook.forecasts.by_model.get(&model));
        let lanes = Lanes::of(self.rows_under(hints).map(|row| part_of(row.free, row.total)));
        let free = self.host.free();
        let host = free.less(outlook.host);
        let measured = || forecast.map_or((0, 0), |forecast| measure(forecast, &lanes, free));
        let (worth, fragment) = if self.heeds_all(hints) {
            self.worth.get(outlook.forecasts.number, measured)
        } else {
            measured()
        };
        let caution = forecast.map_or(0, |forecast| forecast.caution(self.gpus().len(), self.host.total));
        Costs {
            forecast,
            lanes,
            host,
            worth,
            fragment,
            caution,
        }
    }

    /// Whether what a choice of one GPU costs decides which one is taken; else what it costs tells nodes apart only.
    pub(crate) fn looks_ahead(&self, ask: Ask<'_>) -> bool {
        let is_one = matches!(ask.gpus, GpuAsk::Share(Request { devices: 1, .. }));
        is_one && ask.wishes.is_none() && ask.others.is_empty() && !self.has_rules
    }

    /// Whether there is room, and what the best choice of GPUs costs.
    pub(crate) fn price(
        &self,
        ask: Ask<'_>,
        order: Order<'_>,
        outlook: Outlook<'_>,
        hints: Hints<'_>,
    ) -> Result<Price, Reason> {
        let looks_ahead = self.looks_ahead(ask);
        if self.chooses_by_rules(ask) && !looks_ahead {
            let rows = self.rows_by_rules(ask, order, hints)?;
            return Ok(self.price_of(ask, &rows, outlook, hints));
        }
        self.fit_all(ask, hints)?;
        let costs = self.costs(outlook, hints);
        let GpuAsk::Share(request) = ask.gpus else {
            let n_whole = if let GpuAsk::Whole(n) = ask.gpus {
                usize::try_from(n).unwrap_or(usize::MAX)
            } else {
                0
            };
            let rows = self.whole_rows(hints).map(|(at, _)| at).take(n_whole);
            return Ok(costs.of(self.taken_of(ask, rows)));
        };
        let need = self.need(&request)?;
        if order.policy == DevicePolicy::Fill && looks_ahead {
            return self
                .cheapest(need, &costs, hints)
                .map(|(.., price)| price)
                .ok_or(Reason::TooFew);
        }
        let chosen = self.chosen_rows(need, order, hints);
        Ok(costs.of(chosen.map(|(at, row)| (at, taken_part(need.on(row.total), row.total)))))
    }

    /// The GPUs that are taken where rules, or places, decide.
    pub(crate) fn rows_by_rules(
        &self,
        ask: Ask<'_>,
        order: Order<'_>,
        hints: Hints<'_>,
    ) -> Result<Vec<usize>, Reason> {
        let decision = self.decide(
            ask,
            Order {
                outlook: None,
                ..order
            },
            hints,
        );
        decision
            .map(|decision| decision.gpus)
            .map_err(|miss| miss.reason())
    }

    /// What it costs to take these GPUs.
    pub(crate) fn price_of(
        &self,
        ask: Ask<'_>,
        rows: &[usize],
        outlook: Outlook<'_>,
        hints: Hints<'_>,
    ) -> Price {
        self.costs(outlook, hints)
            .of(self.taken_of(ask, rows.iter().copied()))
    }

    /// What a request takes of GPUs that were chosen for it.
    fn taken_of<'a>(
        &'a self,
        ask: Ask<'a>,
        rows: impl Iterator<Item = usize> + 'a,
    ) -> impl Iterator<Item = (usize, Part)> + 'a {
        let need = match ask.gpus {
            GpuAsk::Share(request) => self.need(&request).ok(),
            GpuAsk::Whole(_) | GpuAsk::All { .. } | GpuAsk::Nothing => None,
        };
        rows.filter_map(move |at| {
            let total = self.rows.get(at)?.total;
            Some((
                at,
                need.map_or(
                    Part {
                        memory: WHOLE,
                        core: WHOLE,
                    },
                    |need| taken_part(need.on(total), total),
                ),
            ))
        })
    }

    /// Whether every hint on this node counts.
    fn heeds_all(&self, hints: Hints<'_>) -> bool {
        self.hints.iter().all(|hint| hints.heeds(&hint.owner))
    }

    /// The device that a share is best taken of, and what that costs.
    pub(crate) fn cheapest(
        &self,
        need: Need,
        costs: &Costs<'_>,
        hints: Hints<'_>,
    ) -> Option<(usize, Row, Price)> {
        let mut best: Option<(Price, Amounts, usize, Row)> = None;
        for (at, row) in self.rows_under(hints).enumerate() {
            let amounts = need.on(row.total);
            // Of devices that are alike the first is as good as any.
            if !amounts.within(row.free) || self.rows_under(hints).take(at).any(|known| known == row) {
                continue;
            }
            let price = costs.of([(at, taken_part(amounts, row.total))]);
            let left = row.free.less(amounts);
            let key =
                |price: Price, left: Amounts, at: usize| (price.cost, left.memory, left.core, left.slots, at);
            if best.is_none_or(|(known, known_left, known_at, _)| {
                key(price, left, at) < key(known, known_left, known_at)
            }) {
                best = Some((price, left, at, row));
            }
        }
        best.map(|(price, _, at, row)| (at, row, price))
    }
}

/// What is free, in thousandths of a device.
fn part_of(free: Amounts, total: Amounts) -> Part {
    let core = if total.core == 0 {
        WHOLE
    } else {
        thousandths_down(free.core.into(), total.core.into())
    };
    Part {
        memory: thousandths_down(free.memory.hundredths(), total.memory.hundredths()),
        core,
    }
}

/// What is taken, in thousandths of a device.
pub(crate) fn taken_part(taken: Amounts, total: Amounts) -> Part {
    let core = taken
        .core
        .saturating_mul(1000)
        .checked_div(total.core)
        .unwrap_or(0);
    let core = i16::try_from(core).unwrap_or(WHOLE).min(WHOLE);
    Part {
        memory: thousandths_up(taken.memory, total.memory).unwrap_or(WHOLE),
        core,
    }
}
