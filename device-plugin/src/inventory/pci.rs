//! What sysfs tells about a PCI device; knows nothing of GPUs.

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

/// Where a PCI device sits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The NUMA node, if the machine has NUMA nodes and tells.
    pub numa_node: Option<i32>,
    /// The root complex, such as `pci0000:3a`.
    pub root: Option<String>,
}

/// Where sysfs says that the device at `address` sits.
pub fn place(sysfs: &Path, address: &str) -> Place {
    let device = sysfs.join("bus/pci/devices").join(address);
    let node = fs::read_to_string(device.join("numa_node")).ok().and_then(|text| text.trim().parse::<i32>().ok());
    // The entry is a link into the tree of devices, in which the root complex is the first that names a domain and a bus.
    let resolved = fs::canonicalize(&device).ok();
    let root = resolved.and_then(|path| path.iter().filter_map(|part| part.to_str()).find(|part| is_root(part)).map(str::to_owned));
    Place { numa_node: node.filter(|node| *node >= 0), root }
}

fn is_root(part: &str) -> bool {
    let numbers = part.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
    let is_hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    numbers.is_some_and(|(domain, bus)| is_hex(domain) && is_hex(bus))
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
        assert_eq!(place(sysfs.path(), "0000:3b:00.0"), Place { numa_node: expected, root: None });
        assert_eq!(place(sysfs.path(), "0000:3c:00.0"), Place::default());
    }

    #[rstest]
    #[case::at_the_root("devices/pci0000:00/0000:3b:00.0", Some("pci0000:00"))]
    #[case::behind_switches("devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0", Some("pci0000:3a"))]
    #[case::wide_domain("devices/pci10000:81/0000:3b:00.0", Some("pci10000:81"))]
    #[case::virtual_device("devices/virtual/pci/0000:3b:00.0", None)]
    fn roots(#[case] at: &str, #[case] expected: Option<&str>) {
        let sysfs = tempfile::tempdir().unwrap();
        fs::create_dir_all(sysfs.path().join(at)).unwrap();
        fs::create_dir_all(sysfs.path().join("bus/pci/devices")).unwrap();
        std::os::unix::fs::symlink(sysfs.path().join(at), sysfs.path().join("bus/pci/devices/0000:3b:00.0")).unwrap();
        assert_eq!(place(sysfs.path(), "0000:3b:00.0").root.as_deref(), expected);
    }
}
