//! What a node says about how its GPUs belong together, in annotations and labels of its Device object: partitions (Koordinator's
//! GPU partitioning proposal) and links.
//!
//! Reads and writes the texts; which GPUs to take is the scheduler's business.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;

/// JSON of a [`GpuPartitionTable`]; an annotation of the Device object.
pub const GPU_PARTITIONS: &str = "scheduling.koordinator.sh/gpu-partitions";
/// A [`GpuPartitionPolicy`]; a label of the Device object.
pub const GPU_PARTITION_POLICY: &str = "node.koordinator.sh/gpu-partition-policy";
/// JSON list of [`GpuLinks`]; an annotation of the Device object.
pub const GPU_LINKS: &str = "gpushare/gpu-links";
/// The PCIe root complex that a device is below, such as `pci0000-3a` for what sysfs calls `pci0000:3a`; a label of the device.
/// Its topology names the switch, if there is one.
pub const PCIE_ROOT: &str = "gpushare/pcie-root";
/// Whether a device's topology says NUMA node 0 only because nobody knows it: [`NUMA_UNKNOWN`]; a label of the device.
pub const NUMA_NODE: &str = "gpushare/numa-node";
/// The value of [`NUMA_NODE`].
pub const NUMA_UNKNOWN: &str = "unknown";

/// Longest annotation that is read, in bytes; the API server allows 256 KiB of annotations in all.
const MAX_BYTES: usize = 256 * 1024;
/// Most sets, and most groups, that are read: the scheduler compares all sets with each other. All sets of eight GPUs are 255.
const MAX_SETS: usize = 512;
/// Largest bandwidth that is not taken for a mistake, in bytes per second.
const MAX_BANDWIDTH: u64 = 1 << 50;

/// GPUs of a board whose partitions are known without being told.
pub const BOARD_GPUS: u32 = 8;

/// Sets of GPUs that may be given away together, by the number of GPUs in them.
pub type GpuPartitionTable = BTreeMap<u32, Vec<GpuPartition>>;

/// A set of GPUs that may be given away together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPartition {
    /// Minors of the GPUs.
    pub minors: Vec<u32>,
    /// How they are linked: `NVLink`, or anything else.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub gpu_link_type: String,
    /// Bandwidth of a ring through them, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring_bus_bandwidth: Option<Quantity>,
    /// How well the node is left when the set has been given away; higher is better.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub allocation_score: i64,
}

/// Whether GPUs are given away in the sets of the table only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuPartitionPolicy {
    /// They are.
    Honor,
    /// The sets are preferred. Also what any other text means.
    #[default]
    Prefer,
}

/// GPUs every two of which are linked by so many links, directly or through switches of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuLinks {
    /// Minors of the GPUs.
    pub minors: Vec<u32>,
    /// How many links there are between any two of them.
    pub links: u32,
}

/// An annotation of a Device object that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key}: {rule}")]
pub struct TopologyError {
    key: &'static str,
    rule: String,
}

impl GpuPartitionPolicy {
    /// What a label's value means; no label means [`Self::Prefer`].
    pub fn of(label: Option<&str>) -> Self {
        if label == Some("Honor") {
            Self::Honor
        } else {
            Self::Prefer
        }
    }

    /// The label's value.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Honor => "Honor",
            Self::Prefer => "Prefer",
        }
    }
}

/// The table of a board of [`BOARD_GPUS`] GPUs on switches of NVLink (H100, H800, H20), as Koordinator has it built in: each
/// GPU, and aligned groups of two, four and eight, none better than another of its size, and nothing said of bandwidth.
pub fn partitions_of_board() -> GpuPartitionTable {
    let set = |first: u32, size: u32| GpuPartition {
        minors: (first..first + size).collect(),
        gpu_link_type: "NVLink".to_owned(),
        ring_bus_bandwidth: None,
        allocation_score: 1,
    };
    [1, 2, 4, BOARD_GPUS]
        .map(|size| {
            (
                size,
                (0..BOARD_GPUS / size).map(|nth| set(nth * size, size)).collect(),
            )
        })
        .into()
}

/// The bandwidth that a quantity is, in bytes per second; `None` if it is not a whole number up to 2^50.
pub(crate) fn bandwidth(quantity: Quantity) -> Option<u64> {
    quantity
        .unsigned()
        .filter(|bandwidth| *bandwidth <= MAX_BANDWIDTH)
}

/// Reads a partition table.
///
/// # Errors
/// It is no such JSON, has more than 512 sets, a set is of another size than the key that it stands under, names a GPU twice,
/// or claims a bandwidth that is not a whole number up to 2^50.
pub fn read_partitions(text: &str) -> Result<GpuPartitionTable, TopologyError> {
    let table: GpuPartitionTable = read(GPU_PARTITIONS, text)?;
    if table.values().map(Vec::len).sum::<usize>() > MAX_SETS {
        return Err(error(GPU_PARTITIONS, format!("more than {MAX_SETS} sets")));
    }
    let sets = table
        .iter()
        .flat_map(|(size, sets)| sets.iter().map(move |set| (*size, set)));
    for (
        size,
        GpuPartition {
            minors,
            ring_bus_bandwidth,
            ..
        },
    ) in sets
    {
        let rule = if !are_distinct(minors) {
            "names a GPU twice"
        } else if u32::try_from(minors.len()) != Ok(size) {
            "is of another size"
        } else if ring_bus_bandwidth.is_some_and(|quantity| bandwidth(quantity).is_none()) {
            "has a ringBusBandwidth that is not a whole number up to 2^50"
        } else {
            continue;
        };
        return Err(error(
            GPU_PARTITIONS,
            format!("the set {minors:?} under {size:?} {rule}"),
        ));
    }
    Ok(table)
}

/// Reads how GPUs are linked.
///
/// # Errors
/// It is no such JSON, has more than 512 groups, or a group names a GPU twice.
pub fn read_links(text: &str) -> Result<Vec<GpuLinks>, TopologyError> {
    let groups: Vec<GpuLinks> = read(GPU_LINKS, text)?;
    if groups.len() > MAX_SETS {
        return Err(error(GPU_LINKS, format!("more than {MAX_SETS} groups")));
    }
    match groups.iter().find(|group| !are_distinct(&group.minors)) {
        Some(group) => Err(error(
            GPU_LINKS,
            format!("the group {:?} names a GPU twice", group.minors),
        )),
        None => Ok(groups),
    }
}

fn read<T: for<'de> Deserialize<'de>>(key: &'static str, text: &str) -> Result<T, TopologyError> {
    if text.len() > MAX_BYTES {
        return Err(error(key, format!("longer than {MAX_BYTES} bytes")));
    }
    serde_json::from_str(text).map_err(|cause| error(key, cause.to_string()))
}

fn are_distinct(minors: &[u32]) -> bool {
    minors.iter().collect::<BTreeSet<_>>().len() == minors.len()
}

fn error(key: &'static str, rule: String) -> TopologyError {
    TopologyError { key, rule }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(score: &i64) -> bool {
    *score == 0
}

#[cfg(test)]
mod tests;
