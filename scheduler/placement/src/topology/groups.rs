//! Which groups of devices are whole, so that devices of broken ones are taken first.

use crate::gpu::Inventory;
use crate::shape::Spot;
use crate::topology::partitions::is_whole;
use crate::topology::uses::Use;

/// What is broken when a device is taken; smaller for what is preferred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Loss {
    /// GPUs of the largest partition, or group of linked GPUs, that is whole and has the device.
    largest: usize,
    /// How many such there are.
    n: usize,
    /// Whether the NUMA node's devices of its type are all free.
    numa: bool,
    /// Whether the switch's devices of its type are all free.
    switch: bool,
}

/// What is lost with each device of a type by where they sit; a device that has a place to itself breaks nothing.
pub(crate) fn losses(spots: &[Spot], uses: &[Use]) -> Vec<Loss> {
    let is_free = |at: usize| uses.get(at).is_some_and(|one| !one.is_taken);
    let breaks = |spot: &Spot, is_same: &dyn Fn(&Spot, &Spot) -> bool| {
        let group = || spots.iter().enumerate().filter(|(_, other)| is_same(spot, other));
        group().nth(1).is_some() && group().all(|(at, _)| is_free(at))
    };
    let loss = |spot: &Spot| Loss {
        numa: breaks(spot, &|one, other| one.numa == other.numa),
        switch: breaks(spot, &|one, other| one.switch == other.switch),
        ..Loss::default()
    };
    spots.iter().map(loss).collect()
}

/// What is lost with each GPU.
pub(crate) fn gpu_losses(inventory: &Inventory, spots: &[Spot], uses: &[Use]) -> Vec<Loss> {
    let mut losses = losses(spots, uses);
    let gpus = &inventory.gpus;
    let minors = |minors: &[u32]| -> Vec<usize> {
        let mut rows: Vec<usize> = minors
            .iter()
            .filter_map(|minor| gpus.iter().position(|gpu| gpu.minor == *minor))
            .collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    };
    let partitions = inventory
        .partitions
        .iter()
        .flat_map(|table| &table.partitions)
        .filter(|one| is_whole(one, gpus, uses));
    let linked = inventory.links.iter().map(|group| minors(&group.minors));
    let linked = linked.filter(|rows| {
        rows.iter()
            .all(|row| uses.get(*row).is_some_and(|one| !one.is_taken))
    });
    for rows in partitions
        .map(|one| minors(&one.minors))
        .chain(linked)
        .filter(|rows| rows.len() > 1)
    {
        for row in &rows {
            let Some(loss) = losses.get_mut(*row) else {
                continue;
            };
            loss.n = if rows.len() == loss.largest {
                loss.n + 1
            } else {
                loss.n
            };
            if rows.len() > loss.largest {
                (loss.largest, loss.n) = (rows.len(), 1);
            }
        }
    }
    losses
}
