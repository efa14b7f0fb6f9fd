//! The sets of GPUs of a node that may be allocated together, and the links between GPUs: by annotations of the Device object,
//! or by the model of the node's boards.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use placement::{Device, LinkGroup, Partition, PartitionTable};
use proto::device::{GPU_MODEL_LABEL, GPU_VENDOR_LABEL};
use proto::node::Node;
use proto::quantity::Quantity;
use proto::topology::{
    BOARD_GPUS, GPU_LINKS, GPU_PARTITION_POLICY, GPU_PARTITIONS, GpuPartitionPolicy, GpuPartitionTable,
    partitions_of_board, read_links, read_partitions,
};

/// Models of GPUs on boards of eight behind `NVSwitch` chips, as the model label has them: Koordinator's names and the driver's.
const KNOWN_MODELS: [&str; 4] = ["H100", "H800", "H20", "H100-80GB-HBM3"];
/// Values of the vendor label with which these models are known; a node need not have the label.
const KNOWN_VENDORS: [&str; 2] = ["", "nvidia"];

/// The annotations and labels of a Device object about partitions of GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ReportedTable {
    /// The partitions in the annotation; `None` without the annotation, empty if it cannot be read.
    partitions: Option<Vec<Partition>>,
    /// The object's labels that matter here.
    labels: BTreeMap<&'static str, String>,
}

impl ReportedTable {
    /// Reads the object, and reports a table that cannot be read.
    pub(super) fn read(metadata: &ObjectMeta, problems: &mut Vec<String>) -> Self {
        let mut labels = BTreeMap::new();
        for key in [GPU_PARTITION_POLICY, GPU_MODEL_LABEL, GPU_VENDOR_LABEL] {
            if let Some(value) = value_of(metadata.labels.as_ref(), key) {
                labels.insert(key, value.to_owned());
            }
        }
        let partitions = match value_of(metadata.annotations.as_ref(), GPU_PARTITIONS).map(read_partitions) {
            None => None,
            Some(Err(error)) => {
                problems.push(format!("Device object: {error}"));
                Some(Vec::new())
            }
            Some(Ok(table)) => Some(partitions_of(table)),
        };
        Self { partitions, labels }
    }

    /// The table of a node: the object's own, else that of a known model.
    ///
    /// A label decides if the table binds: of the object for its own table, of the object or the node for that of the model.
    pub(super) fn table(&self, node: &Node, gpus: &[Device]) -> Option<PartitionTable> {
        let own = |key: &str| self.labels.get(key).map(String::as_str);
        let either = |key: &str| own(key).or_else(|| value_of(node.metadata.labels.as_ref(), key));
        if let Some(partitions) = &self.partitions {
            let is_binding = is_honored(own(GPU_PARTITION_POLICY));
            // A table that binds and cannot be read leaves no set to allocate, which is safer than any set.
            return (is_binding || !partitions.is_empty()).then(|| PartitionTable {
                is_binding,
                partitions: partitions.clone(),
            });
        }
        let is_known = either(GPU_MODEL_LABEL).is_some_and(|model| KNOWN_MODELS.contains(&model))
            && KNOWN_VENDORS.contains(&either(GPU_VENDOR_LABEL).unwrap_or_default())
            && is_whole_board(gpus);
        is_known.then(|| PartitionTable {
            is_binding: is_honored(either(GPU_PARTITION_POLICY)),
            partitions: partitions_of(partitions_of_board()),
        })
    }
}

/// Returns true if the value of the label `GPU_PARTITION_POLICY` allows no set of GPUs outside of the table.
fn is_honored(policy: Option<&str>) -> bool {
    GpuPartitionPolicy::read(policy) == GpuPartitionPolicy::Honor
}

/// Returns true if these are all GPUs of a board, so that their minors show their slots.
fn is_whole_board(gpus: &[Device]) -> bool {
    u32::try_from(gpus.len()) == Ok(BOARD_GPUS)
        && (0..BOARD_GPUS).all(|minor| gpus.iter().any(|gpu| gpu.minor == minor))
}

/// The partitions of a table in the engine's terms.
fn partitions_of(table: GpuPartitionTable) -> Vec<Partition> {
    let mut partitions = Vec::new();
    for partition in table.into_values().flatten() {
        partitions.push(Partition {
            bandwidth: partition.ring_bus_bandwidth.and_then(Quantity::unsigned),
            minors: partition.minors,
            score: partition.allocation_score,
        });
    }
    partitions
}

/// Groups of linked GPUs; none if they cannot be read.
pub(super) fn links(metadata: &ObjectMeta, problems: &mut Vec<String>) -> Vec<LinkGroup> {
    let mut links = Vec::new();
    match value_of(metadata.annotations.as_ref(), GPU_LINKS).map(read_links) {
        None => {}
        Some(Ok(groups)) => {
            for group in groups {
                links.push(LinkGroup {
                    minors: group.minors,
                    n_links: group.links,
                });
            }
        }
        Some(Err(error)) => problems.push(format!("Device object: {error}")),
    }
    links
}

/// The value of a label or annotation.
fn value_of<'a>(map: Option<&'a BTreeMap<String, String>>, key: &str) -> Option<&'a str> {
    map?.get(key).map(String::as_str)
}

#[cfg(test)]
mod tests;
