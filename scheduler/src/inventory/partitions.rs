//! Which GPUs of a node may be given away together, and how they are linked: by the Device object, or by what is known of the
//! model.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use placement::{Gpu, LinkGroup, Partition, PartitionTable};
use proto::device::{GPU_MODEL_LABEL, GPU_VENDOR_LABEL};
use proto::node::Node;
use proto::quantity::Quantity;
use proto::topology::{
    BOARD_GPUS, GPU_LINKS, GPU_PARTITION_POLICY, GPU_PARTITIONS, GpuPartition, GpuPartitionPolicy,
    GpuPartitionTable, partitions_of_board, read_links, read_partitions,
};

/// Boards of eight GPUs behind switches of their own, by the label of their model: as Koordinator calls them, and as their driver does.
const KNOWN_MODELS: [&str; 4] = ["H100", "H800", "H20", "H100-80GB-HBM3"];
/// The vendors under which they are known; a node need not name one.
const KNOWN_VENDORS: [&str; 2] = ["", "nvidia"];

/// What a Device object says about partitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ReportedTable {
    /// `None` if the object is silent about them; none that can be read are none.
    partitions: Option<Vec<Partition>>,
    /// The object's labels that matter here.
    labels: BTreeMap<&'static str, String>,
}

impl ReportedTable {
    /// Reads the object. A table that cannot be read is none.
    pub(super) fn of(metadata: &ObjectMeta, problems: &mut Vec<String>) -> Self {
        let label = |key: &'static str| Some((key, metadata.labels.as_ref()?.get(key)?.clone()));
        let labels = [GPU_PARTITION_POLICY, GPU_MODEL_LABEL, GPU_VENDOR_LABEL]
            .into_iter()
            .filter_map(label)
            .collect();
        let partitions = match annotation(metadata, GPU_PARTITIONS).map(read_partitions) {
            None => None,
            Some(Err(error)) => {
                problems.push(format!("Device object: {error}"));
                Some(Vec::new())
            }
            Some(Ok(table)) => Some(sets(table)),
        };
        Self { partitions, labels }
    }

    /// The table of a node: the object's own, else that of its model if it is a known one.
    ///
    /// Whether an own table binds, the object says; of a table that comes with the model, the node may say it too. One that
    /// binds and cannot be read leaves no set to give away.
    pub(super) fn on(&self, node: &Node, gpus: &[Gpu]) -> Option<PartitionTable> {
        let of_node = |key: &str| {
            node.metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get(key))
                .map(String::as_str)
        };
        let own = |key: &str| self.labels.get(key).map(String::as_str);
        let either = |key: &str| own(key).or_else(|| of_node(key));
        let binds = |policy| GpuPartitionPolicy::read(policy) == GpuPartitionPolicy::Honor;
        if let Some(partitions) = &self.partitions {
            let is_binding = binds(own(GPU_PARTITION_POLICY));
            return (is_binding || !partitions.is_empty()).then(|| PartitionTable {
                is_binding,
                partitions: partitions.clone(),
            });
        }
        let is_known = either(GPU_MODEL_LABEL).is_some_and(|model| KNOWN_MODELS.contains(&model))
            && KNOWN_VENDORS.contains(&either(GPU_VENDOR_LABEL).unwrap_or_default())
            && has_all(gpus);
        is_known.then(|| PartitionTable {
            is_binding: binds(either(GPU_PARTITION_POLICY)),
            partitions: sets(partitions_of_board()),
        })
    }
}

/// Whether these are all GPUs of a board, so that their minors say where they sit.
fn has_all(gpus: &[Gpu]) -> bool {
    u32::try_from(gpus.len()) == Ok(BOARD_GPUS)
        && (0..BOARD_GPUS).all(|minor| gpus.iter().any(|gpu| gpu.minor == minor))
}

/// A table in the engine's terms.
fn sets(table: GpuPartitionTable) -> Vec<Partition> {
    let set = |set: GpuPartition| Partition {
        bandwidth: set.ring_bus_bandwidth.and_then(Quantity::unsigned),
        minors: set.minors,
        score: set.allocation_score,
    };
    table.into_values().flatten().map(set).collect()
}

/// Groups of linked GPUs; none if they cannot be read.
pub(super) fn links(metadata: &ObjectMeta, problems: &mut Vec<String>) -> Vec<LinkGroup> {
    match annotation(metadata, GPU_LINKS).map(read_links) {
        None => Vec::new(),
        Some(Ok(groups)) => groups
            .into_iter()
            .map(|group| LinkGroup {
                minors: group.minors,
                n_links: group.links,
            })
            .collect(),
        Some(Err(error)) => {
            problems.push(format!("Device object: {error}"));
            Vec::new()
        }
    }
}

fn annotation<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

#[cfg(test)]
mod tests;
