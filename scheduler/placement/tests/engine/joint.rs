//! Joint allocation case by case: the table of docs/topology-scheduling.md.

use std::fmt::Write as _;

use placement::{
    Constraints, Device, DeviceType, Inventory, JointAllocation, LinkGroup, Partition, PartitionTable,
    Reason, RequestedGpus, RequestedMemory,
};

use crate::build::{hold, on_minor};
use crate::topology::{chosen, class, fleet_of, gpu_at, nic, nic_at, rdma, try_choose};

/// A machine of two NUMA nodes with eight GPUs, in the words of the document, and what it has beside GPU and switch.
struct Machine {
    words: &'static str,
    gpus_per_switch: u32,
    /// Minors of linked GPUs.
    links: &'static [&'static [u32]],
    /// Partitions and their scores.
    partitions: &'static [(&'static [u32], i64)],
    is_binding: bool,
    /// Minors of GPUs that another pod uses.
    used: &'static [u32],
}

const LOW: &[u32] = &[0, 1, 2, 3];
const HIGH: &[u32] = &[4, 5, 6, 7];
const PLAIN: Machine = Machine {
    words: "8 switches",
    gpus_per_switch: 1,
    links: &[],
    partitions: &[],
    is_binding: false,
    used: &[],
};
const LINKED: Machine = Machine {
    words: "8 switches, NVLinks within GPUs 0 to 3 and 4 to 7",
    links: &[LOW, HIGH],
    ..PLAIN
};
const CROSS_LINKED: Machine = Machine {
    words: "8 switches, NVLinks between GPUs 0 and 4, 1 and 5",
    links: &[&[0, 4], &[1, 5]],
    ..PLAIN
};
const HALVES: Machine = Machine {
    words: "8 switches, partitions 0 to 3 and 4 to 7 of equal score",
    partitions: &[(LOW, 1), (HIGH, 1)],
    ..PLAIN
};
const PARTLY_USED_HALVES: Machine = Machine {
    words: "8 switches, partitions 0-1, 2-3, 4-5, 6-7 and 4-7 of equal score, GPU 0 in use",
    partitions: &[(&[0, 1], 1), (&[2, 3], 1), (&[4, 5], 1), (&[6, 7], 1), (HIGH, 1)],
    used: &[0],
    ..PLAIN
};
const SCORED: Machine = Machine {
    words: "8 switches, partitions 0 to 3 (score 10) and 4 to 7 (score 1)",
    partitions: &[(LOW, 10), (HIGH, 1)],
    ..PLAIN
};
const HONORED: Machine = Machine {
    words: "the same with policy `Honor`",
    is_binding: true,
    ..SCORED
};
const USED: Machine = Machine {
    words: "8 switches, GPU 6 in use",
    used: &[6],
    ..PLAIN
};
const PAIRS: Machine = Machine {
    words: "4 switches with 2 GPUs each",
    gpus_per_switch: 2,
    ..PLAIN
};

/// GPUs and the switches of adapters that a pod gets.
type Chosen = (&'static [u32], &'static [u32]);

/// Machine, switches of its adapters, requested GPUs and rdma, and what the pod gets; `None` if it is refused.
type Case = (Machine, &'static [u32], (u32, u64), Option<Chosen>);

const CASES: [Case; 23] = [
    (
        PLAIN,
        &[0, 1, 2, 3, 4, 5, 6, 7],
        (4, 1),
        Some((LOW, &[0, 1, 2, 3])),
    ),
    (PLAIN, &[1, 5], (4, 1), Some((LOW, &[1]))),
    (LINKED, &[1, 5], (4, 1), Some((LOW, &[1]))),
    (HALVES, &[1, 5], (4, 1), Some((LOW, &[1]))),
    (PLAIN, &[5], (4, 1), Some((HIGH, &[5]))),
    (LINKED, &[5], (4, 1), Some((HIGH, &[5]))),
    (HALVES, &[5], (4, 1), Some((HIGH, &[5]))),
    (PARTLY_USED_HALVES, &[5], (2, 1), Some((&[4, 5], &[5]))),
    (SCORED, &[5], (4, 1), Some((LOW, &[5]))),
    (HONORED, &[5], (4, 1), Some((LOW, &[5]))),
    (USED, &[5], (4, 1), Some((LOW, &[5]))),
    (USED, &[5], (3, 1), Some((&[4, 5, 7], &[5]))),
    (CROSS_LINKED, &[2], (2, 1), Some((&[0, 4], &[2]))),
    (CROSS_LINKED, &[5], (2, 1), Some((&[1, 5], &[5]))),
    (PLAIN, &[5, 5], (4, 1), Some((HIGH, &[5]))),
    (PLAIN, &[5, 5], (4, 200), Some((HIGH, &[5, 5]))),
    (PLAIN, &[0, 4, 5], (2, 1), Some((&[4, 5], &[4, 5]))),
    (PLAIN, &[1, 5], (1, 1), Some((&[1], &[1]))),
    (PLAIN, &[1, 5], (5, 1), Some((&[0, 1, 2, 3, 5], &[1, 5]))),
    (PLAIN, &[1, 5], (4, 200), Some((LOW, &[1, 5]))),
    (PLAIN, &[8, 9], (4, 200), Some((HIGH, &[8, 9]))),
    (PAIRS, &[1, 2], (2, 1), Some((&[2, 3], &[1]))),
    (PLAIN, &[], (4, 1), None),
];

/// NUMA nodes 0 and 1 have GPUs; switches 8 and 9 have none, and are on NUMA nodes 1 and 2.
fn numa_of(switch: u32, machine: &Machine) -> u32 {
    match switch {
        8 => 1,
        9 => 2,
        _ => switch * machine.gpus_per_switch / 4,
    }
}

fn inventory(machine: &Machine, adapters: &[u32]) -> Inventory {
    let gpu = |minor: u32| gpu_at(minor, minor / 4, minor / machine.gpus_per_switch);
    let adapter =
        |(minor, switch): (u32, &u32)| -> Device { nic_at(minor, numa_of(*switch, machine), *switch) };
    let link = |minors: &&[u32]| LinkGroup {
        minors: minors.to_vec(),
        n_links: 4,
    };
    let partition = |(minors, score): &(&[u32], i64)| Partition {
        minors: minors.to_vec(),
        bandwidth: None,
        score: *score,
    };
    let table = PartitionTable {
        is_binding: machine.is_binding,
        partitions: machine.partitions.iter().map(partition).collect(),
    };
    Inventory {
        gpus: (0..8).map(gpu).collect(),
        other_devices: Some(vec![class("rdma", (0..).zip(adapters).map(adapter).collect())]),
        links: machine.links.iter().map(link).collect(),
        partitions: Some(table).filter(|table| !table.partitions.is_empty()),
        serves_vendor: true,
        ..Inventory::default()
    }
}

fn list(numbers: &[u32]) -> String {
    let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
    if numbers.is_empty() {
        "none".to_owned()
    } else {
        numbers.join(", ")
    }
}

/// The first table after the heading of joint allocation, without its head.
fn documented() -> Vec<&'static str> {
    let document = include_str!("../../../../docs/topology-scheduling.md");
    let section = document
        .split("## Devices that are allocated together")
        .nth(1)
        .unwrap();
    let lines = section.lines().skip_while(|line| !line.starts_with("| machine"));
    lines.skip(2).take_while(|line| line.starts_with('|')).collect()
}

#[test]
fn the_table_of_joint_allocations_is_as_documented() {
    let kinds = vec![DeviceType::Gpu, nic()];
    let joint = JointAllocation {
        kinds,
        same_switch: false,
    };
    let constraints = Constraints {
        joint: Some(joint),
        ..Constraints::default()
    };
    let (mut rows, mut wrong) = (Vec::new(), String::new());
    for (machine, adapters, (n, amount), expected) in &CASES {
        let mut fleet = fleet_of(inventory(machine, adapters));
        for minor in machine.used {
            hold(
                &mut fleet,
                &format!("user{minor}"),
                "n",
                on_minor(*minor, RequestedMemory::Ratio(100)),
            );
        }
        let choice = chosen(try_choose(
            &fleet,
            RequestedGpus::Whole(*n),
            &[rdma(*amount)],
            Some(&constraints),
        ));
        let switch = |minor: &u32| adapters[*minor as usize];
        let found = choice.map(|(gpus, nics)| (gpus, nics.iter().map(switch).collect::<Vec<u32>>()));
        let wanted = expected.map(|(gpus, nics)| (gpus.to_vec(), nics.to_vec()));
        if found != wanted.ok_or(Reason::OtherDevices) {
            let _ = writeln!(
                wrong,
                "{}, adapters on {adapters:?}, {n} GPUs, rdma {amount}: {found:?}",
                machine.words
            );
        }
        let outcome = expected.map_or("refused | ".to_owned(), |(gpus, nics)| {
            format!("{} | {}", list(gpus), list(nics))
        });
        rows.push(format!(
            "| {} | {} | {n} | {amount} | {outcome} |",
            machine.words,
            list(adapters)
        ));
    }
    assert_eq!(wrong, "");
    assert_eq!(documented().join("\n"), rows.join("\n"));
}
