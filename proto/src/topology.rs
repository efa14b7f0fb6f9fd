//! Connections between the GPUs of a node, in annotations and labels of its Device object: partitions (Koordinator's GPU
//! partitioning proposal) and links.
//!
//! Reads and writes these annotations and labels; the scheduler chooses GPUs by them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::annotation::{self, AnnotationError};
use crate::excerpt::excerpt;
use crate::pod::is_default;
use crate::quantity::Quantity;

/// Annotation of the Device object: JSON of a [`GpuPartitionTable`] (proposal "GPU Partitioning APIs").
pub const GPU_PARTITIONS: &str = "scheduling.koordinator.sh/gpu-partitions";
/// Label of the Device object: a [`GpuPartitionPolicy`] (proposal "GPU Partitioning APIs").
pub const GPU_PARTITION_POLICY: &str = "node.koordinator.sh/gpu-partition-policy";
/// Annotation of the Device object: JSON list of [`GpuLinks`].
pub const GPU_LINKS: &str = "gpushare/gpu-links";
/// Label of a device: the PCIe root complex above it, such as `pci0000-3a`; the device's topology names the switch, if any.
pub const PCIE_ROOT: &str = "gpushare/pcie-root";
/// Label of a device: [`NUMA_UNKNOWN`] if the kernel reports no NUMA node, so that the 0 of its topology is an assumption.
pub const NUMA_NODE: &str = "gpushare/numa-node";
/// The only value of [`NUMA_NODE`].
pub const NUMA_UNKNOWN: &str = "unknown";

/// Longest annotation that is read, in bytes; the API server allows 256 KiB for all annotations of an object.
const MAX_BYTES: usize = 256 * 1024;
/// Most partitions, and most groups of linked GPUs: each filter compares each with all others. Eight GPUs have 255 subsets.
const MAX_SETS: usize = 512;
/// Largest bandwidth, in bytes per second; more is taken for a mistake.
const MAX_BANDWIDTH: u64 = 1 << 50;

/// Number of GPUs on a board whose partitions are built in; see [`partitions_of_board`].
pub const BOARD_GPUS: u32 = 8;

/// The partitions of a node, by the number of GPUs in them.
pub type GpuPartitionTable = BTreeMap<u32, Vec<GpuPartition>>;

/// A set of GPUs that `FabricManager` lets one virtual machine or pod use together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPartition {
    /// Minor numbers of the GPUs.
    #[serde(deserialize_with = "whole_numbers")]
    pub minors: Vec<u32>,
    /// Type of the links between these GPUs, such as `NVLink`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub gpu_link_type: String,
    /// Bandwidth of a ring through the GPUs, in bytes per second; a whole number up to 2^50. The proposal has two names for it.
    #[serde(
        default,
        alias = "ringAllReduceBandwidth",
        skip_serializing_if = "Option::is_none"
    )]
    pub ring_bus_bandwidth: Option<Quantity>,
    /// Rank among partitions of one size; the highest first, as the proposal says (Koordinator's code the lowest).
    #[serde(
        default,
        deserialize_with = "whole_number",
        skip_serializing_if = "is_default"
    )]
    pub allocation_score: i64,
}

/// A whole number that may be in quotes, as in an example of the proposal.
struct WholeNumber<T>(T);

struct WholeNumberVisitor<T>(PhantomData<T>);

/// The effect of the partition table on pods that request whole GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum GpuPartitionPolicy {
    /// Pods that request whole GPUs get a partition of the table or nothing.
    Honor,
    /// Pods that request whole GPUs get a partition if one is free, else other GPUs; also the meaning of any unknown value.
    #[default]
    Prefer,
}

/// A group of GPUs, any two of which have this number of links, directly or through switches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuLinks {
    /// Minor numbers of the GPUs.
    pub minors: Vec<u32>,
    /// The number of links between any two of these GPUs.
    pub links: u32,
}

impl GpuPartition {
    /// The rule that the partition breaks, in words that complete "the set …"; `None` if it breaks none.
    fn broken_rule(&self, size: u32) -> Option<&'static str> {
        let has_bad_bandwidth = self
            .ring_bus_bandwidth
            .is_some_and(|value| bandwidth(value).is_none());
        // A GPU that is listed twice would let a pod have fewer GPUs than it requests.
        if !are_distinct(&self.minors) {
            Some("names a GPU twice")
        } else if u32::try_from(self.minors.len()) != Ok(size) {
            Some("is of another size")
        } else if has_bad_bandwidth {
            Some("has a ringBusBandwidth that is not a whole number up to 2^50")
        } else {
            None
        }
    }
}

impl GpuPartitionPolicy {
    /// Reads the value of [`GPU_PARTITION_POLICY`]; [`Self::Prefer`] without the label.
    pub fn read(label: Option<&str>) -> Self {
        // An unknown value must not make a node refuse pods.
        if label == Some("Honor") {
            Self::Honor
        } else {
            Self::Prefer
        }
    }

    /// The value of [`GPU_PARTITION_POLICY`].
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Honor => "Honor",
            Self::Prefer => "Prefer",
        }
    }
}

/// The built-in partition table of a board of [`BOARD_GPUS`] GPUs on NVLink switches (H100, H800, H20), as Koordinator has it.
pub fn partitions_of_board() -> GpuPartitionTable {
    let mut table = GpuPartitionTable::new();
    // Aligned groups alone: FabricManager offers no others on such a board.
    for size in [1, 2, 4, BOARD_GPUS] {
        for nth in 0..BOARD_GPUS / size {
            let first = nth * size;
            table.entry(size).or_default().push(GpuPartition {
                minors: (first..first + size).collect(),
                gpu_link_type: "NVLink".to_owned(),
                ring_bus_bandwidth: None,
                // Equal scores leave the choice to the scheduler, which keeps large groups free.
                allocation_score: 1,
            });
        }
    }
    table
}

/// A quantity as bandwidth in bytes per second; `None` if it is not a whole number up to 2^50.
pub(crate) fn bandwidth(quantity: Quantity) -> Option<u64> {
    quantity.unsigned().filter(|bytes| *bytes <= MAX_BANDWIDTH)
}

/// Reads [`GPU_PARTITIONS`].
pub fn read_partitions(text: &str) -> Result<GpuPartitionTable, AnnotationError> {
    let by_size: BTreeMap<String, Vec<GpuPartition>> = annotation::parse(GPU_PARTITIONS, text, MAX_BYTES)?;
    let mut table = GpuPartitionTable::new();
    for (size, partitions) in by_size {
        let Ok(size) = size.parse() else {
            let rule = format!("does not parse: {:?} is no number of GPUs", excerpt(&size));
            return Err(AnnotationError::new(GPU_PARTITIONS, rule));
        };
        table.insert(size, partitions);
    }
    if table.values().map(Vec::len).sum::<usize>() > MAX_SETS {
        let rule = format!("more than {MAX_SETS} sets");
        return Err(AnnotationError::new(GPU_PARTITIONS, rule));
    }
    for (&size, partitions) in &table {
        for partition in partitions {
            if let Some(rule) = partition.broken_rule(size) {
                let rule = format!("the set {:?} under {size:?} {rule}", partition.minors);
                return Err(AnnotationError::new(GPU_PARTITIONS, rule));
            }
        }
    }
    Ok(table)
}

/// Reads [`GPU_LINKS`].
pub fn read_links(text: &str) -> Result<Vec<GpuLinks>, AnnotationError> {
    let groups: Vec<GpuLinks> = annotation::parse(GPU_LINKS, text, MAX_BYTES)?;
    if groups.len() > MAX_SETS {
        let rule = format!("more than {MAX_SETS} groups");
        return Err(AnnotationError::new(GPU_LINKS, rule));
    }
    if let Some(group) = groups.iter().find(|group| !are_distinct(&group.minors)) {
        let rule = format!("the group {:?} names a GPU twice", group.minors);
        return Err(AnnotationError::new(GPU_LINKS, rule));
    }
    Ok(groups)
}

fn whole_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    Ok(WholeNumber::deserialize(deserializer)?.0)
}

fn whole_numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    let numbers = Vec::<WholeNumber<u32>>::deserialize(deserializer)?;
    Ok(numbers.into_iter().map(|number| number.0).collect())
}

impl<'de, T: FromStr + TryFrom<i64>> Deserialize<'de> for WholeNumber<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WholeNumberVisitor(PhantomData))
    }
}

impl<T: FromStr + TryFrom<i64>> Visitor<'_> for WholeNumberVisitor<T> {
    type Value = WholeNumber<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
        let read = T::try_from(number).map(WholeNumber);
        read.map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
        match i64::try_from(number) {
            Ok(number) => self.visit_i64(number),
            Err(_) => Err(E::invalid_value(Unexpected::Unsigned(number), &self)),
        }
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        let read = text.parse().map(WholeNumber);
        read.map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
    }
}

fn are_distinct(minors: &[u32]) -> bool {
    minors.iter().collect::<BTreeSet<_>>().len() == minors.len()
}

#[cfg(test)]
mod tests;
