//! Partitions (the sets of GPUs of a node that may be allocated together) and the links between GPUs, by annotations of the
//! Device object; where it has no partitions, they follow from the model of the node's GPUs.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use placement::{Device, LinkGroup, Partition, PartitionTable};
use proto::device::{
    CONDITION_REPORT_VALID, DeviceCondition, GPU_MODEL_LABEL, GPU_VENDOR_LABEL, PARTITIONS_OF_OTHER_NODE,
    PARTITIONS_UNREADABLE,
};
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
    /// The partitions of the annotation whose GPUs the object lists all; `None` without a table for this node, empty if the table
    /// cannot be read.
    partitions: Option<Vec<Partition>>,
    /// True if there is a table and it cannot be read.
    pub(super) is_unreadable: bool,
    /// The problem of the table, for people: it cannot be read, names GPUs that the object does not list, or is not used.
    pub(super) problem: Option<String>,
    /// The object's labels by which [`Self::table`] decides.
    labels: BTreeMap<&'static str, String>,
}

impl ReportedTable {
    /// Reads the annotations and labels of a Device object with these GPUs. `condition` is that of [`report_condition`].
    pub(super) fn read(metadata: &ObjectMeta, gpus: &[Device], condition: Option<&DeviceCondition>) -> Self {
        let mut table = Self::default();
        let labels = &mut table.labels;
        for key in [GPU_PARTITION_POLICY, GPU_MODEL_LABEL, GPU_VENDOR_LABEL] {
            if let Some(value) = value_of(metadata.labels.as_ref(), key) {
                labels.insert(key, value.to_owned());
            }
        }
        match value_of(metadata.annotations.as_ref(), GPU_PARTITIONS).map(read_partitions) {
            Some(Ok(read)) => {
                let (partitions, problem) = with_listed_gpus(partitions_of(read), gpus);
                (table.partitions, table.problem) = (Some(partitions), problem);
            }
            Some(Err(error)) => {
                table.problem = Some(error.to_string());
                (table.partitions, table.is_unreadable) = (Some(Vec::new()), true);
            }
            None => {
                // The plugin publishes no table that it cannot read itself, and reports that in this condition.
                if let Some(condition) = condition
                    && is_about_table(condition)
                {
                    table.problem = Some(condition.message.clone());
                    table.is_unreadable = condition.reason == PARTITIONS_UNREADABLE;
                    table.partitions = table.is_unreadable.then(Vec::new);
                }
            }
        }
        table
    }

    /// The problem of a table for this node. `None` for that of a table which is made for nodes with other GPUs: the plugin does
    /// not publish it.
    pub(super) fn mistake(&self) -> Option<String> {
        self.problem.clone().filter(|_| self.partitions.is_some())
    }

    /// The table of a node: the object's own, else that of a known model.
    ///
    /// A table binds if only its sets may be allocated together, as the label [`GPU_PARTITION_POLICY`] says: the object's for its
    /// own table, the object's or the node's for that of the model.
    pub(super) fn table(&self, node: &Node, gpus: &[Device]) -> Option<PartitionTable> {
        let own = |key: &str| self.labels.get(key).map(String::as_str);
        let either = |key: &str| own(key).or_else(|| value_of(node.metadata.labels.as_ref(), key));
        if let Some(partitions) = &self.partitions {
            let is_binding = is_honored(own(GPU_PARTITION_POLICY));
            // A table that binds and cannot be read leaves no set to allocate, which is safer than any set.
            let partitions = partitions.clone();
            return (is_binding || !partitions.is_empty()).then_some(PartitionTable {
                is_binding,
                partitions,
            });
        }
        let is_known = KNOWN_MODELS.contains(&either(GPU_MODEL_LABEL).unwrap_or_default())
            && KNOWN_VENDORS.contains(&either(GPU_VENDOR_LABEL).unwrap_or_default())
            && is_whole_board(gpus);
        is_known.then(|| PartitionTable {
            is_binding: is_honored(either(GPU_PARTITION_POLICY)),
            partitions: partitions_of(partitions_of_board()),
        })
    }
}

/// Returns true if this value of the label [`GPU_PARTITION_POLICY`] allows no set of GPUs outside of the table.
fn is_honored(policy: Option<&str>) -> bool {
    GpuPartitionPolicy::read(policy) == GpuPartitionPolicy::Honor
}

/// Returns true if these are all GPUs of a board, so that their minors show their places on it.
fn is_whole_board(gpus: &[Device]) -> bool {
    u32::try_from(gpus.len()) == Ok(BOARD_GPUS)
        && (0..BOARD_GPUS).all(|minor| gpus.iter().any(|gpu| gpu.minor == minor))
}

/// Returns true if the condition has the reason for which the plugin has published no partition table.
fn is_about_table(condition: &DeviceCondition) -> bool {
    let reasons = [PARTITIONS_UNREADABLE, PARTITIONS_OF_OTHER_NODE];
    reasons.contains(&condition.reason.as_str()) && condition.status != "True"
}

/// The first of these minors that none of the GPUs has.
fn missing_gpu<'a>(minors: impl IntoIterator<Item = &'a u32>, gpus: &[Device]) -> Option<u32> {
    let mut minors = minors.into_iter().copied();
    minors.find(|minor| gpus.iter().all(|gpu| gpu.minor != *minor))
}

/// The partitions all of whose GPUs are listed, and the problem of the others.
fn with_listed_gpus(partitions: Vec<Partition>, gpus: &[Device]) -> (Vec<Partition>, Option<String>) {
    let (mut listed, mut others) = (Vec::new(), Vec::new());
    for partition in partitions {
        match missing_gpu(&partition.minors, gpus) {
            None => listed.push(partition),
            // It could never be allocated, and with the highest score it would keep pods that demand this score waiting.
            Some(minor) => others.push((partition.minors, minor)),
        }
    }
    let Some((minors, minor)) = others.first() else {
        return (listed, None);
    };
    let sets = match others.len() {
        1 => "the set does not count".to_owned(),
        n_sets => format!("{n_sets} such sets do not count"),
    };
    let problem = format!(
        "annotation {GPU_PARTITIONS}: the set {minors:?} names minor {minor}, which no GPU of the object has; {sets}"
    );
    (listed, Some(problem))
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

/// The groups of linked GPUs in a Device object's annotation, and the problem of the annotation, for people. There are no groups
/// if it cannot be read.
pub(super) fn links(metadata: &ObjectMeta, gpus: &[Device]) -> (Vec<LinkGroup>, Option<String>) {
    let mut links = Vec::new();
    match value_of(metadata.annotations.as_ref(), GPU_LINKS).map(read_links) {
        None => (links, None),
        Some(Ok(groups)) => {
            for group in groups {
                links.push(LinkGroup {
                    minors: group.minors,
                    n_links: group.links,
                });
            }
            let missing = missing_gpu(links.iter().flat_map(|group| &group.minors), gpus);
            let problem = missing.map(|minor| {
                format!("annotation {GPU_LINKS} names minor {minor}, which no GPU of the object has")
            });
            (links, problem)
        }
        Some(Err(error)) => (links, Some(error.to_string())),
    }
}

/// The condition of a GPU in which the plugin reports a problem of its node's report; `None` if it reports none.
pub(super) fn report_condition(info: &[DeviceCondition]) -> Option<&DeviceCondition> {
    info.iter()
        .find(|condition| condition.condition_type == CONDITION_REPORT_VALID && condition.status != "True")
}

pub(super) fn value_of<'a>(map: Option<&'a BTreeMap<String, String>>, key: &str) -> Option<&'a str> {
    map?.get(key).map(String::as_str)
}

#[cfg(test)]
mod tests;
