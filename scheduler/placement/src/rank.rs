//! Which devices of a node to take, and how good a node is once they are taken.

use crate::class::{Device, NamedAmounts};
use crate::fill::{Cost, Outlook};
use crate::fit::Hints;
use crate::fleet::{Fleet, NodeId};
use crate::gpu::Gpu;
use crate::holding::{Placement, Share};
use crate::node::Node;
use crate::points::{device_usages, gpu_usages};
use crate::policy::{DevicePolicy, NodePolicy, Policies};
use crate::reason::Reason;
use crate::request::{Ask, GpuAsk, Need, Request};
use crate::rows::Row;
use crate::topology::Decision;
use crate::weigh::{BEST, Leaning, Weights};
use crate::wishes::Kind;

/// How good a node is; higher is better, and scores of one policy only compare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Score(u32);

/// The best score there is.
const SCALE: u32 = 134_000_000;
/// Points to a millionth.
const POINTS: u32 = SCALE / 1_000_000;

/// How devices are ordered: a policy, and the weights that some policies count with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order<'a> {
    pub(crate) policy: DevicePolicy,
    pub(crate) weights: &'a Weights,
    /// What is expected of nodes; without it nothing looks ahead.
    pub(crate) outlook: Option<Outlook<'a>>,
}

impl Score {
    /// Parts per million of the best.
    pub const fn parts_per_million(self) -> u32 {
        self.0 / POINTS
    }

    /// All that the score tells, in 27 bits.
    pub(crate) const fn points(self) -> u32 {
        self.0
    }

    /// The score of so many points, of which the best has 134 million.
    pub const fn of_points(points: u32) -> Self {
        Self(points)
    }

    /// Steps from 0 to 10, rounded to the nearest.
    pub fn tenths(self) -> u8 {
        let tenth = SCALE / 10;
        u8::try_from((self.0 + tenth / 2) / tenth).unwrap_or(10).min(10)
    }
}

impl From<Cost> for Score {
    fn from(cost: Cost) -> Self {
        Self(SCALE.saturating_sub(cost.get()))
    }
}

impl Fleet {
    /// The devices that should be taken on a node for what is asked.
    ///
    /// # Errors
    /// The reason that [`Fleet::fit`] gives.
    pub fn choose<'r>(
        &self,
        node: NodeId,
        ask: impl Into<Ask<'r>>,
        policy: DevicePolicy,
        hints: Hints<'_>,
    ) -> Result<Placement, Reason> {
        let ask = ask.into();
        let node = self.node(node).ok_or(Reason::NoDevice)?;
        let outlook = node.looks_ahead(ask).then(|| self.outlook(ask));
        let order = Order {
            policy,
            weights: &self.weights,
            outlook,
        };
        if node.chooses_by_rules(ask) {
            let decision = node.decide(ask, order, hints).map_err(|miss| miss.reason())?;
            return node.placement(ask, decision, hints);
        }
        node.fit_all(ask, hints)?;
        let mut placement = Placement {
            others: node.choose_others(ask.others, order, hints),
            ..Placement::default()
        };
        match ask.gpus {
            GpuAsk::Nothing => {}
            GpuAsk::Share(request) => placement.shares = node.choose_shares(&request, order, hints)?,
            GpuAsk::All { slots } => placement.shares = node.choose_all(slots, hints)?,
            GpuAsk::Whole(n) => {
                placement.is_vendor = true;
                placement.shares = node.choose_whole(n, hints);
                placement.unknown_whole = if placement.shares.is_empty() { n } else { 0 };
            }
        }
        if !matches!(ask.gpus, GpuAsk::All { .. }) {
            placement.shares.sort_by_key(|share| share.minor);
        }
        Ok(placement)
    }

    /// How good a node would be for what is asked after the best choice of its devices; 0 if there is no room.
    ///
    /// GPU memory alone counts, unless the policy is one that weighs resources.
    pub fn score<'r>(
        &self,
        node: NodeId,
        ask: impl Into<Ask<'r>>,
        policies: Policies,
        hints: Hints<'_>,
    ) -> Score {
        let ask = ask.into();
        self.node(node).map_or(Score::default(), |node| {
            node.score(ask, policies, &self.weights, self.outlook(ask), hints)
        })
    }

    /// What choices for a request are judged by.
    pub(crate) fn outlook(&self, ask: Ask<'_>) -> Outlook<'_> {
        Outlook {
            forecasts: &self.forecasts,
            host: ask.host,
        }
    }
}

impl Node {
    /// Whether more than what is free of each device decides which are taken.
    pub(crate) fn chooses_by_rules(&self, ask: Ask<'_>) -> bool {
        self.has_rules || ask.wishes.is_some() || self.shape.as_ref().is_some_and(|shape| shape.has_topology)
    }

    /// How good this node would be after the best choice of its devices; 0 if there is no room.
    pub(crate) fn score(
        &self,
        ask: Ask<'_>,
        policies: Policies,
        weights: &Weights,
        outlook: Outlook<'_>,
        hints: Hints<'_>,
    ) -> Score {
        self.verdict(ask, policies, weights, outlook, hints)
            .unwrap_or_default()
    }

    /// Whether there is room, and how good this node would be after the best choice of its devices.
    pub(crate) fn verdict(
        &self,
        ask: Ask<'_>,
        policies: Policies,
        weights: &Weights,
        outlook: Outlook<'_>,
        hints: Hints<'_>,
    ) -> Result<Score, Reason> {
        let order = Order {
            policy: policies.device,
            weights,
            outlook: self.looks_ahead(ask).then_some(outlook),
        };
        if policies.node == NodePolicy::Fill {
            return self
                .price(ask, order, outlook, hints)
                .map(|price| Score::from(price.cost));
        }
        self.fit_all(ask, hints)?;
        let (part, total) = match policies.node {
            NodePolicy::Fill => (0, 1),
            NodePolicy::Binpack => {
                let (left, total) = self.memory_left(ask, order, hints);
                (total.saturating_sub(left), total)
            }
            NodePolicy::Spread => self.memory_left(ask, order, hints),
            NodePolicy::LeastAllocated => self.part_of_points(ask, weights, Leaning::Least, hints),
            NodePolicy::MostAllocated => self.part_of_points(ask, weights, Leaning::Most, hints),
        };
        let millionths = (part * 1_000_000).checked_div(total).unwrap_or(0);
        Ok(Score(
            u32::try_from(millionths).unwrap_or(1_000_000).min(1_000_000) * POINTS,
        ))
    }

    /// A decision as a placement.
    fn placement(&self, ask: Ask<'_>, decision: Decision, hints: Hints<'_>) -> Result<Placement, Reason> {
        let mut placement = Placement {
            others: decision.others,
            ..Placement::default()
        };
        let chosen = || {
            decision
                .gpus
                .iter()
                .filter_map(|at| Some((self.gpus().get(*at)?, self.rows.get(*at)?)))
        };
        let share = |gpu: &Gpu, amounts| Share {
            gpu: gpu.uuid.clone(),
            minor: gpu.minor,
            amounts,
        };
        match ask.gpus {
            GpuAsk::Nothing => {}
            GpuAsk::Share(request) => {
                let need = self.need(&request)?;
                placement.shares = chosen()
                    .map(|(gpu, row)| share(gpu, need.on(row.total)))
                    .collect();
            }
            GpuAsk::All { slots } => placement.shares = self.choose_all(slots, hints)?,
            GpuAsk::Whole(n) => {
                placement.is_vendor = true;
                placement.shares = chosen().map(|(gpu, _)| share(gpu, gpu.whole())).collect();
                placement.unknown_whole = if placement.shares.is_empty() { n } else { 0 };
            }
        }
        let wishes = ask.wishes.map_or(&[][..], |wishes| &wishes.by_kind);
        let is_asked = |kind: &Kind| match kind {
            Kind::Gpu => matches!(ask.gpus, GpuAsk::Share(_) | GpuAsk::Whole(_)),
            Kind::Other(kind) => ask.others.iter().any(|request| request.kind == *kind),
        };
        let exclusions = wishes.iter().filter(|(kind, _)| is_asked(kind));
        placement.exclusions = exclusions
            .filter_map(|(kind, wish)| Some((kind.clone(), wish.exclusion?)))
            .collect();
        Ok(placement)
    }

    fn choose_shares(
        &self,
        request: &Request,
        order: Order<'_>,
        hints: Hints<'_>,
    ) -> Result<Vec<Share>, Reason> {
        let need = self.need(request)?;
        let share = |(at, row): (usize, Row)| {
            let gpu = self.gpus().get(at)?;
            Some(Share {
                gpu: gpu.uuid.clone(),
                minor: gpu.minor,
                amounts: need.on(row.total),
            })
        };
        let chosen = self.chosen_rows(need, order, hints);
        Ok(chosen.filter_map(share).collect())
    }

    /// The devices that shares are taken of.
    pub(crate) fn chosen_rows<'a>(
        &'a self,
        need: Need,
        order: Order<'a>,
        hints: Hints<'a>,
    ) -> impl Iterator<Item = (usize, Row)> + 'a {
        let looks_ahead = order
            .outlook
            .filter(|_| order.policy == DevicePolicy::Fill && need.devices == 1);
        let cheapest =
            looks_ahead.and_then(|outlook| self.cheapest(need, &self.costs(outlook, hints), hints));
        let n_ranked = if looks_ahead.is_some() { 0 } else { need.devices };
        let cheapest = cheapest.map(|(at, row, _)| (at, row));
        cheapest
            .into_iter()
            .chain(Ranked::new(self, need, order, hints).take(n_ranked))
    }

    /// Memory of healthy devices that would be free after the best choice, and all of it, in hundredths of a byte.
    fn memory_left(&self, ask: Ask<'_>, order: Order<'_>, hints: Hints<'_>) -> (u128, u128) {
        let (free, total) = self.memory_of_healthy(hints);
        let taken = match ask.gpus {
            GpuAsk::Share(request) => self.taken_by(&request, order, hints),
            GpuAsk::Whole(n) => {
                total * u128::from(n) / u128::try_from(self.gpus().len()).unwrap_or(u128::MAX).max(1)
            }
            GpuAsk::All { .. } | GpuAsk::Nothing => 0,
        };
        (free.saturating_sub(taken), total)
    }

    /// Memory that the best choice takes, in hundredths of a byte.
    fn taken_by(&self, request: &Request, order: Order<'_>, hints: Hints<'_>) -> u128 {
        let Ok(need) = self.need(request) else { return 0 };
        let chosen = self.chosen_rows(need, order, hints);
        chosen
            .map(|(_, row)| u128::from(need.on(row.total).memory.hundredths()))
            .sum()
    }

    /// Free and total memory of all healthy devices together, in hundredths of a byte.
    fn memory_of_healthy(&self, hints: Hints<'_>) -> (u128, u128) {
        let healthy = self
            .rows_under(hints)
            .zip(self.gpus())
            .filter(|(_, gpu)| gpu.healthy);
        healthy.fold((0, 0), |(free, total), (row, _)| {
            (
                free + u128::from(row.free.memory.hundredths()),
                total + u128::from(row.total.memory.hundredths()),
            )
        })
    }
}

/// Room that a device would have left: memory, core, slots; then the device's place.
type Key = (u64, u32, u32, usize);

impl Order<'_> {
    /// A key that is smaller for a device that is preferred by policy.
    pub(crate) fn preference(self, need: Need, at: usize, row: &Row) -> (u64, u32, u32, usize) {
        let (memory, core, slots, _) = self.key(need, at, row);
        (
            memory,
            core,
            slots,
            if self.policy == DevicePolicy::InOrder {
                at
            } else {
                0
            },
        )
    }

    /// A key that is smaller for a device of another type that is preferred by policy.
    pub(crate) fn preference_of(
        self,
        device: &Device,
        free: &NamedAmounts,
        amounts: &NamedAmounts,
    ) -> (Vec<u64>, u32) {
        let left = || {
            amounts
                .iter()
                .map(|(resource, taken)| free.get(resource).unwrap_or(&0).saturating_sub(*taken))
        };
        let by_score = |leaning: Leaning| {
            let score = leaning.score(device_usages(self.weights, [(device, free)], amounts));
            vec![u64::from(BEST.saturating_sub(score))]
        };
        match self.policy {
            DevicePolicy::Fill | DevicePolicy::Binpack => (left().collect(), 0),
            DevicePolicy::Spread => (left().map(|left| !left).collect(), 0),
            DevicePolicy::InOrder => (Vec::new(), device.minor),
            DevicePolicy::LeastAllocated => (by_score(Leaning::Least), 0),
            DevicePolicy::MostAllocated => (by_score(Leaning::Most), 0),
        }
    }

    /// A key that is smaller for a device that is preferred; no two devices of a node have the same.
    fn key(self, need: Need, at: usize, row: &Row) -> Key {
        let left = row.free.less(need.on(row.total));
        let (memory, core, slots) = (left.memory.hundredths(), left.core, left.slots);
        let by_score = |leaning: Leaning| {
            let score = leaning.score(gpu_usages(self.weights, [*row], need.stated()));
            (u64::from(BEST.saturating_sub(score)), 0, 0, at)
        };
        match self.policy {
            DevicePolicy::Fill | DevicePolicy::Binpack => (memory, core, slots, at),
            DevicePolicy::Spread => (!memory, !core, !slots, at),
            DevicePolicy::InOrder => (0, 0, 0, at),
            DevicePolicy::LeastAllocated => by_score(Leaning::Least),
            DevicePolicy::MostAllocated => by_score(Leaning::Most),
        }
    }
}

/// The fitting devices of a node, best first.
///
/// Looks for the next best each time: a node has few devices, and so nothing is allocated.
struct Ranked<'w, R> {
    rows: R,
    need: Need,
    order: Order<'w>,
    last: Option<Key>,
}

impl Ranked<'_, ()> {
    fn new<'a>(
        node: &'a Node,
        need: Need,
        order: Order<'a>,
        hints: Hints<'a>,
    ) -> Ranked<'a, impl Iterator<Item = Row> + Clone + 'a> {
        Ranked {
            rows: node.rows_under(hints),
            need,
            order,
            last: None,
        }
    }
}

impl<R: Iterator<Item = Row> + Clone> Iterator for Ranked<'_, R> {
    type Item = (usize, Row);

    fn next(&mut self) -> Option<(usize, Row)> {
        let fitting = self
            .rows
            .clone()
            .enumerate()
            .filter(|(_, row)| self.need.on(row.total).within(row.free));
        let keyed = fitting.map(|(at, row)| (self.order.key(self.need, at, &row), at, row));
        let remaining = keyed.filter(|(key, ..)| self.last.is_none_or(|last| *key > last));
        let (key, at, row) = remaining.min_by_key(|(key, ..)| *key)?;
        self.last = Some(key);
        Some((at, row))
    }
}
