//! Addresses, NUMA nodes, roots and switches.

use rstest::rstest;

use super::*;

#[rstest]
#[case::nvml("00000000:3B:00.0", Some("0000:3b:00.0"))]
#[case::sysfs("0000:3b:00.0", Some("0000:3b:00.0"))]
#[case::large_domain("00010000:81:1F.7", Some("10000:81:1f.7"))]
#[case::path("../../etc:00:00.0", None)]
#[case::short("3b:00.0", None)]
#[case::empty("", None)]
fn pci_addresses_are_normalised(#[case] bus_id: &str, #[case] expected: Option<&str>) {
    assert_eq!(address(bus_id).as_deref(), expected);
}

#[rstest]
#[case::node("1\n", Some(1))]
#[case::no_numa("-1\n", None)]
#[case::nonsense("x", None)]
fn the_numa_node_is_read_from_sysfs(#[case] content: &str, #[case] expected: Option<i32>) {
    let sysfs = tempfile::tempdir().unwrap();
    let device = sysfs.path().join("bus/pci/devices/0000:3b:00.0");
    fs::create_dir_all(&device).unwrap();
    fs::write(device.join("numa_node"), content).unwrap();
    assert_eq!(
        location(sysfs.path(), "0000:3b:00.0"),
        PciLocation {
            numa_node: expected,
            ..PciLocation::default()
        }
    );
    assert_eq!(location(sysfs.path(), "0000:3c:00.0"), PciLocation::default());
}

#[rstest]
#[case::at_the_root("pci0000:00/0000:3b:00.0", Some("pci0000:00"), None)]
#[case::on_a_root_port("pci0000:3a/0000:3a:00.0/0000:3b:00.0", Some("pci0000:3a"), None)]
#[case::beside_the_ports_of_a_switch(
    "pci0000:3a/0000:3a:00.0/0000:37:00.0/0000:3b:00.0",
    Some("pci0000:3a"),
    Some("0000:37:00.0")
)]
#[case::on_a_switch(
    "pci0000:3a/0000:3a:00.0/0000:37:00.0/0000:38:00.0/0000:3b:00.0",
    Some("pci0000:3a"),
    Some("0000:37:00.0")
)]
#[case::on_the_lower_of_two(
    "pci0000:3a/0000:3a:00.0/0000:35:00.0/0000:36:00.0/0000:37:00.0/0000:38:00.0/0000:3b:00.0",
    Some("pci0000:3a"),
    Some("0000:37:00.0")
)]
#[case::wide_domain("pci10000:81/0000:3b:00.0", Some("pci10000:81"), None)]
#[case::behind_a_controller(
    "pci0000:e0/0000:e0:00.5/pci10000:00/10000:00:02.0/0000:3b:00.0",
    Some("pci0000:e0"),
    None
)]
#[case::virtual_device("virtual/pci/0000:3b:00.0", None, None)]
fn the_root_and_the_switch_are_read_from_the_path(
    #[case] at: &str,
    #[case] root: Option<&str>,
    #[case] switch: Option<&str>,
) {
    let sysfs = tempfile::tempdir().unwrap();
    let device = sysfs.path().join("devices").join(at);
    fs::create_dir_all(&device).unwrap();
    fs::create_dir_all(folder(sysfs.path())).unwrap();
    std::os::unix::fs::symlink(device, folder(sysfs.path()).join("0000:3b:00.0")).unwrap();
    let found = location(sysfs.path(), "0000:3b:00.0");
    assert_eq!((found.root.as_deref(), found.switch.as_deref()), (root, switch));
    assert_eq!(found.pcie_id(), switch.or(root));
}
