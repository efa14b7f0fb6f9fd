//! The partition table of this node's GPUs (the sets that may be allocated together): that of the operator's file, else that of
//! the source of the devices, else that of a known model.
//!
//! The known models are boards of eight GPUs on switches of NVLink (H100, H800, H20); their table is [`partitions_of_board`].

use std::collections::BTreeSet;

use proto::topology::{BOARD_GPUS, GpuPartitionTable, partitions_of_board};

use crate::devices::fleet::NodeFleet;

use super::node_overrides::NodeOverrides;

/// Words in the names of known models.
const BOARDS: [&str; 3] = ["H100", "H800", "H20"];

/// Words in the names of PCIe cards with the GPU of a known model, which sit on no board.
const CARDS: [&str; 2] = ["PCIe", "NVL"];

/// The partition table for these devices. The operator's counts if this node has all GPUs of a partition, or if it is empty.
pub(crate) fn table(fleet: &NodeFleet, overrides: &NodeOverrides) -> Option<GpuPartitionTable> {
    // One file may serve nodes of several kinds, so a table of another node is no error.
    if let Some(table) = &overrides.partitions
        && is_for(fleet, table)
    {
        return Some(table.clone());
    }
    // An operator whose file cannot be read has meant to replace the other tables, so none of them may be right.
    if overrides.partitions.is_none() && overrides.partitions_problem.is_some() {
        return None;
    }
    if let Some(table) = &fleet.partitions {
        return Some(table.clone());
    }
    is_known_board(fleet).then(partitions_of_board)
}

/// The minor number of the first GPU that a table names and this node does not have.
pub(crate) fn missing_gpu(fleet: &NodeFleet, table: &GpuPartitionTable) -> Option<u32> {
    let present = minors_of(fleet);
    let mut minors = table.values().flatten().flat_map(|partition| &partition.minors);
    minors.find(|minor| !present.contains(minor)).copied()
}

/// Returns true if this node has all GPUs of one of a table's partitions, or the table has none.
fn is_for(fleet: &NodeFleet, table: &GpuPartitionTable) -> bool {
    let present = minors_of(fleet);
    let mut partitions = table.values().flatten().peekable();
    let is_present = |minor| present.contains(minor);
    partitions.peek().is_none() || partitions.any(|partition| partition.minors.iter().all(is_present))
}

fn minors_of(fleet: &NodeFleet) -> BTreeSet<u32> {
    fleet.gpus.iter().map(|entry| entry.device.minor).collect()
}

/// True if the GPUs of this node are the eight of one board in [`BOARDS`], on which `NVSwitches` link them.
fn is_known_board(fleet: &NodeFleet) -> bool {
    for entry in &fleet.gpus {
        let mut is_board = false;
        for word in entry.device.model.split([' ', '-']) {
            if CARDS.contains(&word) {
                return false;
            }
            is_board |= BOARDS.contains(&word);
        }
        if !is_board {
            return false;
        }
    }
    let minors: Vec<u32> = minors_of(fleet).into_iter().collect();
    // If NVML reports links, one group of linked GPUs must have all eight.
    let are_linked = fleet.links.is_empty() || fleet.links.iter().any(|group| group.minors == minors);
    are_linked && minors == (0..BOARD_GPUS).collect::<Vec<_>>()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::tests::builders;
    use proto::topology::{GpuLinks, GpuPartition};

    fn fleet(n_gpus: u32, model: &str, linked: &[u32]) -> NodeFleet {
        let mut fleet = builders::fleet(n_gpus);
        for entry in &mut fleet.gpus {
            model.clone_into(&mut entry.device.model);
        }
        fleet.links = (!linked.is_empty())
            .then(|| GpuLinks {
                minors: linked.to_vec(),
                links: 18,
            })
            .into_iter()
            .collect();
        fleet
    }

    #[rstest]
    #[case::h100(8, "NVIDIA H100 80GB HBM3", &[0, 1, 2, 3, 4, 5, 6, 7], true)]
    #[case::links_are_unknown(8, "NVIDIA H800", &[], true)]
    #[case::h20(8, "NVIDIA H20-3e", &[], true)]
    #[case::too_few(4, "NVIDIA H100 80GB HBM3", &[], false)]
    #[case::one_has_no_link(8, "NVIDIA H100 80GB HBM3", &[0, 1, 2, 3, 4, 5, 6], false)]
    #[case::cards(8, "NVIDIA H100 PCIe", &[], false)]
    #[case::pairs_of_cards(8, "NVIDIA H100 NVL", &[], false)]
    #[case::h200(8, "NVIDIA H200", &[], false)]
    #[case::another(8, "NVIDIA A100-SXM4-80GB", &[], false)]
    fn known_boards(
        #[case] n_gpus: u32,
        #[case] model: &str,
        #[case] linked: &[u32],
        #[case] expected: bool,
    ) {
        let fleet = fleet(n_gpus, model, linked);
        assert_eq!(table(&fleet, &NodeOverrides::default()).is_some(), expected);
    }

    #[test]
    fn partitions_follow_from_the_links_of_a_board() {
        let fleet = fleet(8, "NVIDIA H100 80GB HBM3", &[]);
        let table = table(&fleet, &NodeOverrides::default()).unwrap();
        let sets = |size: u32| {
            table[&size]
                .iter()
                .map(|set| set.minors.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (sets(8), sets(4)),
            (vec![(0..8).collect()], vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]])
        );
        assert_eq!(
            (sets(2).len(), sets(2)[3].clone(), sets(1).len()),
            (4, vec![6, 7], 8)
        );
        assert_eq!(
            serde_json::to_string(&table[&8]).unwrap(),
            r#"[{"minors":[0,1,2,3,4,5,6,7],"gpuLinkType":"NVLink","allocationScore":1}]"#
        );
    }

    #[test]
    fn partitions_of_the_operator_come_before_those_of_the_inventory() {
        let of = |minor: u32| {
            GpuPartitionTable::from([(
                1,
                vec![GpuPartition {
                    minors: vec![minor],
                    ..GpuPartition::default()
                }],
            )])
        };
        let mut fleet = fleet(8, "NVIDIA H100 80GB HBM3", &[]);
        fleet.partitions = Some(of(2));
        let of_operator = |partitions: Option<u32>, problem: Option<&str>| {
            let overrides = NodeOverrides {
                partitions: partitions.map(of),
                partitions_problem: problem.map(str::to_owned),
                ..NodeOverrides::default()
            };
            table(&fleet, &overrides)
        };
        assert_eq!(of_operator(Some(3), None), Some(of(3)));
        assert_eq!(
            of_operator(Some(3), Some("now")),
            Some(of(3)),
            "the last valid one"
        );
        assert_eq!(of_operator(Some(9), None), Some(of(2)), "it is of another node");
        let (mut partly, other) = (of(3), of(9));
        partly.entry(1).or_default().extend(other[&1].clone());
        let overrides = NodeOverrides {
            partitions: Some(partly.clone()),
            ..NodeOverrides::default()
        };
        assert_eq!(table(&fleet, &overrides), Some(partly), "a GPU of it is missing");
        assert_eq!(of_operator(None, None), Some(of(2)));
        assert_eq!(of_operator(None, Some("at the start")), None);
    }
}
