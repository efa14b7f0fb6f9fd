//! Recorded machines, and their devices in the Device object.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use chrono::DateTime;
use proto::device::{Device, DeviceInfo};
use proto::memory_unit::MemoryUnit;
use proto::node::Node;
use rstest::rstest;

use super::*;
use crate::devices::device_ids::IdScheme;
use crate::devices::fleet::NodeFleet;
use crate::devices::inventory::{Feed, Gpu, pci};
use crate::publish::device_object::DeviceObjectInputs;
use crate::tests::recorded::{MACHINES, Machine};

/// The devices of a machine, with GPUs as NVML would list them.
fn inventory(machine: &Machine) -> NodeInventory {
    let gpu = |(minor, address): (u32, String)| Gpu {
        uuid: format!("GPU-{minor}").parse().unwrap(),
        location: pci::location(machine.root(), &address),
        bus_id: Some(address),
        ..crate::tests::builders::gpu(minor)
    };
    NodeInventory {
        gpus: (0..).zip(machine.gpus()).map(gpu).collect(),
        others: list(machine.root()),
        ..NodeInventory::default()
    }
}

fn published(inventory: &NodeInventory) -> Device {
    let ids = IdScheme::new(&inventory.gpus, 100, MemoryUnit::GIB).unwrap();
    let now = DateTime::from_timestamp(0, 0).unwrap();
    DeviceObjectInputs::default().device(
        &NodeFleet::new(inventory.clone(), ids),
        &Node::default(),
        None,
        now,
    )
}

/// A device in one line.
fn line(device: &DeviceInfo) -> String {
    let topology = device.topology.clone().unwrap_or_default();
    let labels: Vec<String> = device
        .labels
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let functions: Vec<&str> = device
        .vf_groups
        .iter()
        .flat_map(|group| &group.vfs)
        .map(|vf| vf.bus_id.as_str())
        .collect();
    let functions = if functions.is_empty() {
        String::new()
    } else {
        format!(" vfs {}", functions.join(" "))
    };
    let (kind, minor, topology) = (
        &device.device_type,
        device.minor.unwrap(),
        (topology.bus_id, topology.node_id, topology.pcie_id),
    );
    format!(
        "{kind} {minor}: {} numa {} pcie {} {}{functions}",
        topology.0,
        topology.1,
        topology.2,
        labels.join(" ")
    )
}

#[test]
fn the_devices_published_for_recorded_machines() {
    let mut text = String::new();
    for (name, _) in MACHINES {
        writeln!(text, "{name}").unwrap();
        for device in &published(&inventory(&Machine::recorded(name))).spec.devices {
            writeln!(text, "  {}", line(device)).unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn the_whole_device_object_of_a_recorded_machine() {
    insta::assert_json_snapshot!(published(&inventory(&Machine::recorded("sr-iov"))));
}

/// The functions that a pod may be given, and the files that each needs.
#[test]
fn each_virtual_function_has_its_device_nodes() {
    let mut text = String::new();
    for name in ["sr-iov", "fpgas"] {
        for device in list(Machine::recorded(name).root()) {
            writeln!(text, "{}: {:?}", device.id, device.device_nodes).unwrap();
            for (function, nodes) in &device.function_nodes {
                writeln!(text, "  {function}: {nodes:?}").unwrap();
            }
        }
    }
    insta::assert_snapshot!(text);
}

#[rstest]
#[case::no_ports(&[], Some("it has no port"))]
#[case::down(&["1: DOWN"], Some("port 1 is DOWN"))]
#[case::one_of_two(&["1: DOWN", "4: ACTIVE"], None)]
#[case::starting(&["2: INIT", "3: ARMED"], Some("port 1 is INIT, port 2 is ARMED"))]
#[case::nonsense(&[""], Some("port 1 is unknown"))]
fn a_port_must_be_active(#[case] states: &[&str], #[case] expected: Option<&str>) {
    let machine = Machine::of("pci0000:00\n 0000:00:00.0 nic=mlx5_0:ACTIVE");
    fs::remove_dir_all(
        machine
            .root()
            .join("devices/pci0000:00/0000:00:00.0/infiniband/mlx5_0/ports"),
    )
    .unwrap();
    machine.set_ports("mlx5_0", states);
    assert_eq!(read(machine.root())[0].1.as_deref(), expected);
}

#[test]
fn a_machine_without_adapters_and_fpgas_lists_none() {
    let types = |name: &str| {
        let others = list(Machine::recorded(name).root());
        others
            .iter()
            .map(|device| device.device_type.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (types("fpgas"), types("cpu-only")),
        (vec!["fpga".to_owned(); 2], vec![])
    );
}

/// The last observation of each adapter among the next `n`.
async fn observed(
    seen: &mut tokio::sync::mpsc::Receiver<crate::devices::inventory::Observations>,
    n: usize,
) -> BTreeMap<String, ObservationKind> {
    let (mut last, mut n_seen) = (BTreeMap::new(), 0);
    while n_seen < n {
        let next = tokio::time::timeout(Duration::from_secs(30), seen.recv());
        for observation in next.await.unwrap().unwrap() {
            let id = observation.device.map_or_else(String::new, |id| id.to_string());
            last.insert(id, observation.kind);
            n_seen += 1;
        }
    }
    last
}

/// Ports and whole adapters come and go, and the watch reports it; it announces a new adapter once.
#[tokio::test]
async fn a_watch_follows_ports_and_adapters() {
    let machine = Machine::recorded("sr-iov");
    let found = inventory(&machine);
    let interval = Duration::from_millis(5);
    let start = |found: &NodeInventory| {
        Feed::start(vec![watcher(machine.root().to_owned(), interval, found)]).unwrap()
    };
    let (feed, mut seen) = start(&found);
    let down = |states: &str| ObservationKind::PortDown(states.to_owned());
    let first = observed(&mut seen, 3).await;
    let expected = [
        ("0000:3b:00.0", ObservationKind::Answered),
        ("0000:3c:00.0", ObservationKind::Answered),
        ("0000:5e:00.0", down("port 1 is DOWN")),
    ];
    assert_eq!(first, expected.map(|(id, kind)| (id.to_owned(), kind)).into());
    machine.set_ports("mlx5_1", &["1: DOWN"]);
    machine.pull("0000:5e:00.0");
    while observed(&mut seen, 3)
        .await
        .values()
        .filter(|kind| [ObservationKind::Lost, down("port 1 is DOWN")].contains(kind))
        .count()
        < 2
    {}
    tokio::task::spawn_blocking(|| feed.stop())
        .await
        .unwrap()
        .unwrap();

    let others = found.others[1..].to_vec();
    let (_feed, mut seen) = start(&NodeInventory { others, ..found });
    let all = observed(&mut seen, 30).await;
    assert_eq!(all.get(""), Some(&ObservationKind::InventoryChanged));
    assert_eq!(observed(&mut seen, 30).await.get(""), None, "announced once");
}
