//! What sysfs tells about a PCI device.

use std::{fs, path::Path};

/// A PCI address in the form of sysfs (`0000:3b:00.0`) from the one NVML gives
/// (`00000000:3B:00.0`).
///
/// `None` if it has not the form of an address, so that it can safely become part of a path.
pub(super) fn address(bus_id: &str) -> Option<String> {
    let (domain, rest) = bus_id.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (slot, function) = rest.split_once('.')?;
    let hex = |text: &str| u32::from_str_radix(text, 16).ok();
    Some(format!("{:04x}:{:02x}:{:02x}.{:x}", hex(domain)?, hex(bus)?, hex(slot)?, hex(function)?))
}

/// The NUMA node of the device at `address`, if the machine has NUMA nodes and tells.
pub(super) fn numa_node(sysfs: &Path, address: &str) -> Option<i32> {
    let path = sysfs.join("bus/pci/devices").join(address).join("numa_node");
    let node = fs::read_to_string(path).ok()?.trim().parse::<i32>().ok()?;
    (node >= 0).then_some(node)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::nvml("00000000:3B:00.0", Some("0000:3b:00.0"))]
    #[case::sysfs("0000:3b:00.0", Some("0000:3b:00.0"))]
    #[case::large_domain("00010000:81:1F.7", Some("10000:81:1f.7"))]
    #[case::path("../../etc:00:00.0", None)]
    #[case::short("3b:00.0", None)]
    #[case::empty("", None)]
    fn addresses(#[case] bus_id: &str, #[case] expected: Option<&str>) {
        assert_eq!(address(bus_id).as_deref(), expected);
    }

    #[rstest]
    #[case::node("1\n", Some(1))]
    #[case::no_numa("-1\n", None)]
    #[case::nonsense("x", None)]
    fn numa_nodes(#[case] content: &str, #[case] expected: Option<i32>) {
        let sysfs = tempfile::tempdir().unwrap();
        let device = sysfs.path().join("bus/pci/devices/0000:3b:00.0");
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("numa_node"), content).unwrap();
        assert_eq!(numa_node(sysfs.path(), "0000:3b:00.0"), expected);
        assert_eq!(numa_node(sysfs.path(), "0000:3c:00.0"), None);
    }
}
