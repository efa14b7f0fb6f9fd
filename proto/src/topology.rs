//! Connections between the GPUs of a node, in annotations and labels of its Device object: partitions (Koordinator's GPU
//! partitioning proposal) and links.
//!
//! Reads and writes the texts; the scheduler chooses GPUs by them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;

/// JSON of a [`GpuPartitionTable`]; an annotation of the Device object.
pub const GPU_PARTITIONS: &str = "scheduling.koordinator.sh/gpu-partitions";
/// A [`GpuPartitionPolicy`]; a label of the Device object.
pub const GPU_PARTITION_POLICY: &str = "node.koordinator.sh/gpu-partition-policy";
/// JSON list of [`GpuLinks`]; an annotation of the Device object.
pub const GPU_LINKS: &str = "gpushare/gpu-links";
/// The PCIe root complex above a device, such as `pci0000-3a` for `pci0000:3a` in sysfs; a label of the device. Its topology
/// names the switch, if there is one.
pub const PCIE_ROOT: &str = "gpushare/pcie-root";
/// [`NUMA_UNKNOWN`] if the NUMA node 0 of a device's topology is an assumption; a label of the device.
pub const NUMA_NODE: &str = "gpushare/numa-node";
/// The value of [`NUMA_NODE`].
pub const NUMA_UNKNOWN: &str = "unknown";

/// Longest annotation that is read, in bytes; the API server allows 256 KiB of annotations in all.
const MAX_BYTES: usize = 256 * 1024;
/// Most partitions, and most groups of linked GPUs, that are read: the scheduler compares each partition with all others.
/// Eight GPUs have 255 subsets.
const MAX_SETS: usize = 512;
/// Largest bandwidth, in bytes per second; more is taken for a mistake.
const MAX_BANDWIDTH: u64 = 1 << 50;

/// Number of GPUs on a board with built-in partitions.
pub const BOARD_GPUS: u32 = 8;

/// The partitions of a node, by the number of GPUs in them.
pub type GpuPartitionTable = BTreeMap<u32, Vec<GpuPartition>>;

/// A set of GPUs that may be allocated together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPartition {
    /// Minors of the GPUs.
    pub minors: Vec<u32>,
    /// Type of the links, such as `NVLink`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub gpu_link_type: String,
    /// Bandwidth of a ring through them, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring_bus_bandwidth: Option<Quantity>,
    /// Rank among partitions of its size; higher is better.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub allocation_score: i64,
}

/// The use of the partition table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum GpuPartitionPolicy {
    /// Pods of whole GPUs get partitions of the table or nothing.
    Honor,
    /// Partitions of the table are preferred; also the meaning of any unknown value.
    #[default]
    Prefer,
}

/// A group of GPUs, any two of which have this number of links, directly or through switches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuLinks {
    /// Minors of the GPUs.
    pub minors: Vec<u32>,
    /// Number of links between any two of them.
    pub links: u32,
}

/// An annotation of a Device object that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key}: {rule}")]
pub struct TopologyError {
    key: &'static str,
    rule: String,
}

impl GpuPartition {
    fn broken_rule(&self, size: u32) -> Option<&'static str> {
        let bandwidth_is_valid = self
            .ring_bus_bandwidth
            .is_none_or(|value| bandwidth(value).is_some());
        if !are_distinct(&self.minors) {
            Some("names a GPU twice")
        } else if u32::try_from(self.minors.len()) != Ok(size) {
            Some("is of another size")
        } else if !bandwidth_is_valid {
            Some("has a ringBusBandwidth that is not a whole number up to 2^50")
        } else {
            None
        }
    }
}

impl GpuPartitionPolicy {
    /// Reads a label's value; without a label [`Self::Prefer`].
    pub fn read(label: Option<&str>) -> Self {
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

/// The table of a board of [`BOARD_GPUS`] GPUs on NVLink switches (H100, H800, H20), as Koordinator has it built in: each GPU,
/// and aligned groups of two, four and eight, with equal scores and without bandwidth.
pub fn partitions_of_board() -> GpuPartitionTable {
    let mut table = GpuPartitionTable::new();
    for size in [1, 2, 4, BOARD_GPUS] {
        for nth in 0..BOARD_GPUS / size {
            let first = nth * size;
            table.entry(size).or_default().push(GpuPartition {
                minors: (first..first + size).collect(),
                gpu_link_type: "NVLink".to_owned(),
                ring_bus_bandwidth: None,
                allocation_score: 1,
            });
        }
    }
    table
}

/// A quantity as bandwidth in bytes per second; `None` if it is not a whole number up to 2^50.
pub(crate) fn bandwidth(quantity: Quantity) -> Option<u64> {
    quantity
        .unsigned()
        .filter(|bandwidth| *bandwidth <= MAX_BANDWIDTH)
}

/// Reads a partition table.
///
/// # Errors
/// It does not parse, has more than 512 partitions, or a partition has another size than its key, names a GPU twice, or has a
/// bandwidth that is not a whole number up to 2^50.
pub fn read_partitions(text: &str) -> Result<GpuPartitionTable, TopologyError> {
    let table: GpuPartitionTable = read(GPU_PARTITIONS, text)?;
    // The scheduler compares each partition with all others for each filter.
    if table.values().map(Vec::len).sum::<usize>() > MAX_SETS {
        return Err(error(GPU_PARTITIONS, format!("more than {MAX_SETS} sets")));
    }
    for (&size, partitions) in &table {
        for partition in partitions {
            if let Some(rule) = partition.broken_rule(size) {
                let minors = &partition.minors;
                return Err(error(
                    GPU_PARTITIONS,
                    format!("the set {minors:?} under {size:?} {rule}"),
                ));
            }
        }
    }
    Ok(table)
}

/// Reads the groups of linked GPUs.
///
/// # Errors
/// It does not parse, has more than 512 groups, or a group names a GPU twice.
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
    // Before parsing, so that a long text costs nothing.
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
