//! What nodes and devices score by weighted resources.

use crate::amounts::Amounts;
use crate::class::{ClassRequest, Device, NamedAmounts};
use crate::fit::Hints;
use crate::fleet::{Fleet, NodeId};
use crate::node::Node;
use crate::request::{Ask, GpuAsk, Need, Stated};
use crate::rows::Row;
use crate::weigh::{BEST, Leaning, Usage, Weights};

/// Percent of a whole GPU.
const WHOLE: u64 = 100;

impl Fleet {
    /// The points of a node: for each type of device that is asked for 0 to 100, and 0 in all if there is no room.
    ///
    /// Counts all healthy devices of a type together, and of the request what one device must have.
    pub fn points<'r>(
        &self,
        node: NodeId,
        ask: impl Into<Ask<'r>>,
        leaning: Leaning,
        hints: Hints<'_>,
    ) -> u32 {
        let ask = ask.into();
        let Some(node) = self.node(node).filter(|node| node.fit_all(ask, hints).is_ok()) else {
            return 0;
        };
        node.points(ask, &self.weights, leaning, hints)
            .fold(0, u32::saturating_add)
    }
}

impl Node {
    /// The sum of a node's points, and the most that it could be.
    pub(crate) fn part_of_points(
        &self,
        ask: Ask<'_>,
        weights: &Weights,
        leaning: Leaning,
        hints: Hints<'_>,
    ) -> (u128, u128) {
        let points = self.points(ask, weights, leaning, hints);
        points.fold((0, 0), |(sum, most), points| {
            (sum + u128::from(points), most + u128::from(BEST))
        })
    }

    /// Points for each type of device that is asked for.
    fn points<'a>(
        &'a self,
        ask: Ask<'a>,
        weights: &'a Weights,
        leaning: Leaning,
        hints: Hints<'a>,
    ) -> impl Iterator<Item = u32> + 'a {
        let gpus = self.stated(ask.gpus).map(|stated| {
            let healthy = self
                .rows_under(hints)
                .zip(self.gpus())
                .filter(|(_, gpu)| gpu.healthy);
            leaning.score(gpu_usages(weights, healthy.map(|(row, _)| row), stated))
        });
        let others = ask
            .others
            .iter()
            .map(move |request| self.points_of(request, weights, leaning, hints));
        gpus.into_iter().chain(others)
    }

    /// What is asked of one GPU; nothing if none is asked for.
    fn stated(&self, ask: GpuAsk) -> Option<Stated> {
        match ask {
            GpuAsk::Nothing => None,
            GpuAsk::Share(request) => self.need(&request).ok().map(Need::stated),
            GpuAsk::Whole(_) => Some(Stated {
                ratio: WHOLE,
                bytes: 0,
                core: WHOLE,
            }),
            GpuAsk::All { .. } => Some(Stated::default()),
        }
    }

    fn points_of(
        &self,
        request: &ClassRequest,
        weights: &Weights,
        leaning: Leaning,
        hints: Hints<'_>,
    ) -> u32 {
        let classes = self.classes().iter().zip(&self.free_others);
        let Some((class, free)) = classes.into_iter().find(|(class, _)| class.kind == request.kind) else {
            return 0;
        };
        let Some((_, amounts)) = request.split(class) else {
            return 0;
        };
        let healthy = class
            .devices
            .iter()
            .zip(free)
            .filter(|(device, _)| device.healthy);
        let free: Vec<_> = healthy
            .map(|(device, free)| (device, self.less_hints_of(&request.kind, device, free, hints)))
            .collect();
        leaning.score(device_usages(
            weights,
            free.iter().map(|(device, free)| (*device, free)),
            &amounts,
        ))
    }
}

/// Weighted resources of GPUs, summed: memory in percent, memory in bytes, computing power.
pub(crate) fn gpu_usages(
    weights: &Weights,
    rows: impl IntoIterator<Item = Row>,
    asked: Stated,
) -> [Usage; 3] {
    let usage = |weight, requested| Usage {
        weight,
        total: 0,
        free: 0,
        requested,
    };
    let mut usages = [
        usage(weights.memory_ratio, asked.ratio),
        usage(weights.memory, asked.bytes),
        usage(weights.core, asked.core),
    ];
    for Row { free, total } in rows {
        let Amounts { memory: used, .. } = total.less(free);
        let free_ratio = WHOLE.saturating_sub(u64::from(used.percent_of(total.memory)));
        let row = [
            (WHOLE, free_ratio),
            (total.memory.bytes_floor(), free.memory.bytes_floor()),
            (u64::from(total.core), u64::from(free.core)),
        ];
        for (usage, (total, free)) in usages.iter_mut().zip(row) {
            usage.total = usage.total.saturating_add(total);
            usage.free = usage.free.saturating_add(free);
        }
    }
    usages
}

/// Weighted resources of devices of another type, summed; resources without a weight are left out.
pub(crate) fn device_usages<'a>(
    weights: &'a Weights,
    devices: impl IntoIterator<Item = (&'a Device, &'a NamedAmounts)>,
    asked: &'a NamedAmounts,
) -> impl Iterator<Item = Usage> {
    let devices: Vec<_> = devices.into_iter().collect();
    weights.others.iter().map(move |(resource, weight)| {
        let of = |amounts: &NamedAmounts| amounts.get(resource).copied().unwrap_or(0);
        let sum = |sum: (u64, u64), (device, free): &(&Device, &NamedAmounts)| {
            (
                sum.0.saturating_add(of(&device.resources)),
                sum.1.saturating_add(of(free)),
            )
        };
        let (total, free) = devices.iter().fold((0, 0), sum);
        Usage {
            weight: *weight,
            total,
            free,
            requested: of(asked),
        }
    })
}
