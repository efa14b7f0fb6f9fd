//! The PCI functions of a machine as sysfs tells of them: what they are and where they sit.
//!
//! Knows nothing of GPUs or adapters. What cannot be read is absent.
//!
//! A function's path in the tree of devices is its root complex, then a root port, then for each switch on the way its
//! upstream port and one of its downstream ports. A switch is called by the address of its upstream port, and a function's
//! switch is the nearest one above it: of two switches, one below the other, the lower. A switch that is part of a card is
//! not counted, or an adapter that brings its own (`BlueField` does) would never share one with a GPU: it is part of a card if
//! all network, display and accelerator functions below it are of the vendor that made it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Base classes of functions that work for somebody: network, display, processing accelerators.
const WORKING: [u32; 3] = [0x02, 0x03, 0x12];

/// The base class of bridges.
pub(super) const BRIDGE: u32 = 0x06;

/// Base classes of functions that are never given to pods: bridges, and what processors and boards are made of.
const BACKGROUND: [u32; 4] = [BRIDGE, 0x08, 0x0c, 0x11];

/// A PCI address in the form of sysfs (`0000:3b:00.0`) from the one NVML gives
/// (`00000000:3B:00.0`).
///
/// `None` if it has not the form of an address, so that it can safely become part of a path.
pub(crate) fn address(bus_id: &str) -> Option<String> {
    let (domain, rest) = bus_id.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (slot, function) = rest.split_once('.')?;
    let hex = |text: &str| u32::from_str_radix(text, 16).ok();
    Some(format!(
        "{:04x}:{:02x}:{:02x}.{:x}",
        hex(domain)?,
        hex(bus)?,
        hex(slot)?,
        hex(function)?
    ))
}

/// Where a PCI device sits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PciLocation {
    /// The NUMA node, if the machine has NUMA nodes and tells.
    pub numa_node: Option<i32>,
    /// The root complex, such as `pci0000:3a`.
    pub root: Option<String>,
    /// The PCIe switch: the address of its upstream port, such as `0000:3b:00.0`.
    pub switch: Option<String>,
}

impl PciLocation {
    /// What devices on the same PCIe have in common: the switch, or the root complex where there is none.
    pub fn pcie_id(&self) -> Option<&str> {
        self.switch.as_deref().or(self.root.as_deref())
    }

    /// Whether nothing is known.
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }
}

/// Where sysfs says that the function at this address sits.
pub fn location(sysfs: &Path, address: &str) -> PciLocation {
    Bus::read(sysfs).location(address)
}

/// All PCI functions of a machine.
#[derive(Clone, Debug, Default)]
pub(super) struct Bus {
    functions: BTreeMap<String, Function>,
}

/// One PCI function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Function {
    /// The six digits of its class, subclass and interface.
    pub(super) class: u32,
    /// Who made it.
    pub(super) vendor: u32,
    /// Whether it is a virtual function.
    pub(super) is_virtual: bool,
    /// Its virtual functions: their number and address.
    pub(super) virtual_functions: Vec<(u32, String)>,
    numa_node: Option<i32>,
    root: Option<String>,
    /// The bridges above it, the topmost first.
    bridges: Vec<String>,
}

impl Bus {
    /// Looks at every function.
    pub(super) fn read(sysfs: &Path) -> Self {
        let entries = fs::read_dir(folder(sysfs)).into_iter().flatten().flatten();
        let addresses = entries.filter_map(|entry| address(entry.file_name().to_str()?));
        let functions = addresses.map(|address| (address.clone(), Function::read(sysfs, &address)));
        Self {
            functions: functions.collect(),
        }
    }

    /// Every function with its address, in the order of addresses.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Function)> {
        self.functions
            .iter()
            .map(|(address, function)| (address.as_str(), function))
    }

    /// The function at this address.
    pub(super) fn get(&self, address: &str) -> Option<&Function> {
        self.functions.get(address)
    }

    /// Where the function at this address sits.
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

    /// Whether a switch is part of the only card below it.
    fn is_on_card(&self, upstream_port: &str) -> bool {
        let Some(vendor) = self
            .get(upstream_port)
            .map(|port| port.vendor)
            .filter(|vendor| *vendor != 0)
        else {
            return false;
        };
        let is_below = |function: &&Function| function.bridges.iter().any(|bridge| bridge == upstream_port);
        let is_working =
            |function: &&Function| WORKING.contains(&(function.class >> 16)) && !function.is_virtual;
        let mut below = self
            .functions
            .values()
            .filter(is_below)
            .filter(is_working)
            .peekable();
        below.peek().is_some() && below.all(|function| function.vendor == vendor)
    }
}

impl Function {
    fn read(sysfs: &Path, own: &str) -> Self {
        let entry = folder(sysfs).join(own);
        let hex = |name: &str| {
            let text = fs::read_to_string(entry.join(name)).ok();
            text.and_then(|text| u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok())
                .unwrap_or(0)
        };
        let class = hex("class");
        if BACKGROUND.contains(&(class >> 16)) {
            // There may be thousands, and nobody asks where they are.
            return Self {
                class,
                vendor: hex("vendor"),
                ..Self::default()
            };
        }
        let numa_node = fs::read_to_string(entry.join("numa_node"))
            .ok()
            .and_then(|text| text.trim().parse::<i32>().ok());
        let mut function = Self {
            class,
            vendor: hex("vendor"),
            is_virtual: entry.join("physfn").exists(),
            virtual_functions: virtual_functions(&entry),
            numa_node: numa_node.filter(|node| *node >= 0),
            ..Self::default()
        };
        // The entry is a link into the tree of devices. A controller may have a root complex of its own below it, whose ports
        // are all that counts for what is there.
        let path = fs::canonicalize(&entry).unwrap_or_default();
        for part in path.iter().filter_map(|part| part.to_str()) {
            if is_root(part) {
                function.root.get_or_insert_with(|| part.to_owned());
                function.bridges.clear();
            } else if function.root.is_some() && part != own && address(part).as_deref() == Some(part) {
                function.bridges.push(part.to_owned());
            }
        }
        function
    }
}

fn folder(sysfs: &Path) -> PathBuf {
    sysfs.join("bus/pci/devices")
}

/// The links `virtfn<n>` of a function, by number.
fn virtual_functions(entry: &Path) -> Vec<(u32, String)> {
    let names = fs::read_dir(entry).into_iter().flatten().flatten();
    let mut found: Vec<(u32, String)> = names
        .filter_map(|link| {
            let number = link.file_name().to_str()?.strip_prefix("virtfn")?.parse().ok()?;
            let target = fs::read_link(link.path()).ok()?;
            Some((number, address(target.file_name()?.to_str()?)?))
        })
        .collect();
    found.sort_unstable();
    found
}

/// Whether this is what sysfs calls a root complex.
pub(super) fn is_root(part: &str) -> bool {
    let numbers = part.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
    let is_hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    numbers.is_some_and(|(domain, bus)| is_hex(domain) && is_hex(bus))
}

#[cfg(test)]
mod tests;
