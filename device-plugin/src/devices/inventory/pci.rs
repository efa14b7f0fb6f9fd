//! The PCI functions of a machine according to sysfs: their class and their location. A property that cannot be read is absent.
//!
//! The path of a function in the tree of devices is its root complex, then a root port, then for each switch on the way its
//! upstream port, by which the switch is named, and one of its downstream ports. A function's switch is the nearest one above it
//! that is not part of a card, since an adapter with a switch of its own (`BlueField`) would never share one with a GPU. A switch
//! is part of a card if all network, display and accelerator functions below it have its vendor.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};

/// Base classes of functions that do work for a pod: network, display, processing accelerators.
const WORKING: [u32; 3] = [0x02, 0x03, 0x12];

pub(super) const BRIDGE: u32 = 0x06;

/// Base classes of functions that pods never get: bridges, and the components of processors and boards.
const BACKGROUND: [u32; 4] = [BRIDGE, 0x08, 0x0c, 0x11];

/// Converts a PCI address of NVML (`00000000:3B:00.0`) to the form of sysfs (`0000:3b:00.0`); `None` if the text is no address.
pub(crate) fn address(bus_id: &str) -> Option<String> {
    // Parsed and written again, so that nothing else than an address gets into a path.
    let (domain, rest) = bus_id.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (slot, function) = rest.split_once('.')?;
    let (domain, bus) = (hex_number(domain)?, hex_number(bus)?);
    let (slot, function) = (hex_number(slot)?, hex_number(function)?);
    Some(format!("{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"))
}

fn hex_number(text: &str) -> Option<u32> {
    u32::from_str_radix(text, 16).ok()
}

/// The location of a PCI device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciLocation {
    /// The NUMA node, if the machine has NUMA nodes and reports it.
    pub numa_node: Option<i32>,
    /// The root complex, such as `pci0000:3a`.
    pub root: Option<String>,
    /// The PCIe switch: the address of its upstream port, such as `0000:3b:00.0`.
    pub switch: Option<String>,
}

impl PciLocation {
    /// The ID that devices on the same part of the PCIe tree share: the switch, or the root complex where there is none.
    pub fn pcie_id(&self) -> Option<&str> {
        self.switch.as_deref().or(self.root.as_deref())
    }

    pub(crate) fn is_unknown(&self) -> bool {
        *self == Self::default()
    }
}

/// The location of the function at this PCI address, with sysfs mounted at `sysfs`.
pub fn location(sysfs: &Path, address: &str) -> PciLocation {
    Bus::read(sysfs).location(address)
}

#[derive(Clone, Debug, Default)]
pub(super) struct Bus {
    pub(super) functions: BTreeMap<String, PciFunction>,
}

impl Bus {
    pub(super) fn read(sysfs: &Path) -> Self {
        let mut functions = BTreeMap::new();
        for entry in fs::read_dir(folder(sysfs)).into_iter().flatten().flatten() {
            if let Some(address) = entry.file_name().to_str().and_then(address) {
                let function = PciFunction::read(sysfs, &address);
                functions.insert(address, function);
            }
        }
        Self { functions }
    }

    /// The NUMA node, root complex and nearest switch of the function at this PCI address. Switches on cards do not count.
    pub(super) fn location(&self, address: &str) -> PciLocation {
        let Some(function) = self.functions.get(address) else {
            return PciLocation::default();
        };
        // After the root port come an upstream and a downstream port of each switch.
        let upstream_ports = function.bridges.iter().skip(1).step_by(2);
        let nearest = upstream_ports.rev().find(|port| !self.is_on_card(port));
        PciLocation {
            numa_node: function.numa_node,
            root: function.root.clone(),
            switch: nearest.cloned(),
        }
    }

    /// Returns true if the switch with this upstream port is part of a card, by the rule in the head of this file.
    fn is_on_card(&self, upstream_port: &str) -> bool {
        let Some(port) = self.functions.get(upstream_port) else {
            return false;
        };
        // 0 is an unknown vendor: two unknown ones need not be the same.
        if port.vendor == 0 {
            return false;
        }
        let mut has_working = false;
        for function in self.functions.values() {
            let is_below = function.bridges.iter().any(|bridge| bridge == upstream_port);
            if !is_below || function.is_virtual || !WORKING.contains(&(function.class >> 16)) {
                continue;
            }
            if function.vendor != port.vendor {
                return false;
            }
            has_working = true;
        }
        has_working
    }
}

/// A PCI function; of bridges and board components only class and vendor are read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PciFunction {
    /// The six hexadecimal digits of class, subclass and interface.
    pub(super) class: u32,
    /// The number of its vendor in the PCI registry; 0 if unknown.
    pub(super) vendor: u32,
    pub(super) is_virtual: bool,
    /// Number and PCI address of each of its virtual functions (SR-IOV).
    pub(super) virtual_functions: Vec<(u32, String)>,
    numa_node: Option<i32>,
    root: Option<String>,
    /// The bridges above it, the topmost first.
    bridges: Vec<String>,
}

impl PciFunction {
    fn read(sysfs: &Path, own: &str) -> Self {
        let entry = folder(sysfs).join(own);
        let (class, vendor) = (hex_file(&entry.join("class")), hex_file(&entry.join("vendor")));
        if BACKGROUND.contains(&(class >> 16)) {
            // A machine may have thousands of them, and their locations are not used.
            return Self {
                class,
                vendor,
                ..Self::default()
            };
        }
        let numa_node = fs::read_to_string(entry.join("numa_node")).unwrap_or_default();
        let numa_node = numa_node.trim().parse::<i32>().ok();
        let mut function = Self {
            class,
            vendor,
            is_virtual: entry.join("physfn").exists(),
            virtual_functions: virtual_functions(&entry),
            // -1 is the kernel's word for unknown.
            numa_node: numa_node.filter(|node| *node >= 0),
            ..Self::default()
        };
        // The entry is a link into the tree of devices. A controller may have a root complex of its own below it, whose ports
        // are all that counts for the functions there.
        let path = fs::canonicalize(&entry).unwrap_or_default();
        for part in path.iter().filter_map(OsStr::to_str) {
            if is_root_complex(part) {
                function.root.get_or_insert_with(|| part.to_owned());
                function.bridges.clear();
            } else if function.root.is_some() && part != own && address(part).as_deref() == Some(part) {
                function.bridges.push(part.to_owned());
            }
        }
        function
    }
}

/// The folder of sysfs with an entry for each PCI function.
pub(super) fn folder(sysfs: &Path) -> PathBuf {
    sysfs.join("bus/pci/devices")
}

/// The number in a file that holds one in hexadecimal digits; 0 if there is none.
fn hex_file(path: &Path) -> u32 {
    let text = fs::read_to_string(path).unwrap_or_default();
    hex_number(text.trim().trim_start_matches("0x")).unwrap_or(0)
}

/// The number and PCI address of each virtual function of a PCI function, from its links `virtfn<n>` in sysfs.
fn virtual_functions(entry: &Path) -> Vec<(u32, String)> {
    let mut found = Vec::new();
    for link in fs::read_dir(entry).into_iter().flatten().flatten() {
        found.extend(virtual_function(&link));
    }
    found.sort_unstable();
    found
}

fn virtual_function(link: &DirEntry) -> Option<(u32, String)> {
    let number = link.file_name().to_str()?.strip_prefix("virtfn")?.parse().ok()?;
    let target = fs::read_link(link.path()).ok()?;
    Some((number, address(target.file_name()?.to_str()?)?))
}

/// Returns true if this is the name of a root complex in sysfs, such as `pci0000:3a`.
pub(super) fn is_root_complex(part: &str) -> bool {
    let is_hex = |text: &str| !text.is_empty() && text.as_bytes().iter().all(u8::is_ascii_hexdigit);
    match part.strip_prefix("pci").unwrap_or_default().split_once(':') {
        Some((domain, bus)) => is_hex(domain) && is_hex(bus),
        None => false,
    }
}

#[cfg(test)]
mod tests;
