//! FPGAs: the PCI functions, other than virtual ones, that the kernel's own FPGA drivers manage, and processing accelerators
//! (class 12) of vendors that make FPGAs.
//!
//! The class alone would not do: it is that of other accelerators too. A container needs the device files of everything that
//! drivers have made below the function.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use proto::device::TYPE_FPGA;
use proto::resource::FPGA;

use super::{Bus, Kind, OtherDevice, function_of};

/// The base class of processing accelerators.
const ACCELERATOR: u32 = 0x12;

/// How deep below a function device files are looked for.
const DEEPEST: usize = 4;

/// A vendor's number in the PCI registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciVendor(pub u16);

/// A number that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write the four hexadecimal digits of a PCI vendor, such as 10ee")]
pub struct InvalidVendor;

impl FromStr for PciVendor {
    type Err = InvalidVendor;

    fn from_str(text: &str) -> Result<Self, InvalidVendor> {
        let is_hex = text.len() == 4 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        u16::from_str_radix(text, 16)
            .ok()
            .filter(|_| is_hex)
            .map(Self)
            .ok_or(InvalidVendor)
    }
}

impl fmt::Display for PciVendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}", self.0)
    }
}

/// Every FPGA; that one is there is all that is known of its health.
pub(super) fn list(sysfs: &Path, bus: &Bus, vendors: &[PciVendor]) -> Vec<(OtherDevice, Option<String>)> {
    let classes = ["class/fpga_region", "class/fpga_manager"].map(|class| fs::read_dir(sysfs.join(class)));
    let managed: BTreeSet<String> = classes
        .into_iter()
        .flatten()
        .flatten()
        .flatten()
        .filter_map(|entry| function_of(&entry.path()))
        .collect();
    let is_fpga = |address: &str, class: u32, vendor: u32| {
        managed.contains(address)
            || class >> 16 == ACCELERATOR && vendors.iter().any(|known| u32::from(known.0) == vendor)
    };
    let found = bus.iter().filter(|(address, function)| {
        !function.is_virtual && is_fpga(address, function.class, function.vendor)
    });
    let kind = Kind {
        device_type: TYPE_FPGA,
        resource: FPGA,
        bus,
    };
    let cards = (0..).zip(found.map(|(address, _)| address));
    cards
        .filter_map(|(minor, address)| {
            Some((
                kind.device(address, minor, |function| nodes(sysfs, function))?,
                None,
            ))
        })
        .collect()
}

/// The device files of one function.
fn nodes(sysfs: &Path, address: &str) -> Vec<PathBuf> {
    let mut names = BTreeSet::new();
    let function = fs::canonicalize(sysfs.join("bus/pci/devices").join(address));
    if let Ok(function) = function {
        gather(&function, DEEPEST, &mut names);
    }
    names
        .into_iter()
        .map(|name| Path::new("/dev").join(name))
        .collect()
}

/// What the kernel calls the device files of a folder of sysfs and of those below it.
fn gather(folder: &Path, depth: usize, names: &mut BTreeSet<String>) {
    let told = fs::read_to_string(folder.join("uevent")).unwrap_or_default();
    let is_plain =
        |name: &&str| !name.is_empty() && !name.starts_with('/') && !name.split('/').any(|part| part == "..");
    names.extend(
        told.lines()
            .filter_map(|line| line.strip_prefix("DEVNAME="))
            .filter(is_plain)
            .map(str::to_owned),
    );
    if depth == 0 {
        return;
    }
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    // Links lead out of the device.
    for below in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        gather(&below.path(), depth - 1, names);
    }
}
