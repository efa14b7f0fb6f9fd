//! RDMA adapters and FPGAs of this machine, found by links and small files in sysfs. Nothing here drives hardware.
//!
//! RDMA adapters are the PCI functions that have a device in `/sys/class/infiniband`; one works if one of its ports is active.
//! FPGAs are the PCI functions that the kernel's own FPGA drivers manage, and processing accelerators (class 12) of vendors that
//! make FPGAs: the class alone would include other accelerators. Virtual functions belong to their device.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::device::{VirtualFunction, VirtualFunctionGroup};
use proto::quantity::Quantity;
use proto::resource::WHOLE_PERCENT;

use crate::devices::extended_resource::ExtendedResource;

use super::feed::{Reporter, Stopped, Watcher};
use super::pci::{self, Bus};
use super::{NodeInventory, ObservationKind, OtherDevice, percent_resource};

/// The device file with which all RDMA adapters make connections.
const RDMA_CONNECTIONS: &str = "infiniband/rdma_cm";

const ACCELERATOR: u32 = 0x12;

/// PCI vendors whose processing accelerators are FPGAs: Xilinx and Altera.
const FPGA_VENDORS: [u32; 2] = [0x10ee, 0x1172];

/// Levels below an FPGA's function that are searched for device files.
const FPGA_DEPTH: usize = 4;

/// A device, and the reason that it cannot be used now; none if it can.
type Found = (OtherDevice, Option<String>);

/// The present devices below this mount point of sysfs, sorted by type and minor number.
pub(super) fn list(root: &Path) -> Vec<OtherDevice> {
    read(root).into_iter().map(|(device, _)| device).collect()
}

fn read(root: &Path) -> Vec<Found> {
    let bus = Bus::read(root);
    let mut found = fpgas(root, &bus);
    found.extend(adapters(root, &bus));
    found
}

fn fpgas(root: &Path, bus: &Bus) -> Vec<Found> {
    let mut managed = BTreeSet::new();
    for class in ["class/fpga_region", "class/fpga_manager"] {
        for link in entries(&root.join(class)) {
            managed.extend(function_of(&link));
        }
    }
    let mut found = Vec::new();
    let mut minors = 0..;
    for (address, function) in &bus.functions {
        let is_by_vendor = function.class >> 16 == ACCELERATOR && FPGA_VENDORS.contains(&function.vendor);
        if function.is_virtual || !(is_by_vendor || managed.contains(address)) {
            continue;
        }
        let minor = minors.next().unwrap_or_default();
        if let Some(device) = device(root, ExtendedResource::Fpga, bus, address, minor) {
            // sysfs shows nothing of an FPGA's health.
            found.push((device, None));
        }
    }
    found
}

/// The RDMA network adapters, each with the problem of its ports, if no port is active.
fn adapters(root: &Path, bus: &Bus) -> Vec<Found> {
    let mut by_address = BTreeMap::<String, Vec<PathBuf>>::new();
    for path in entries(&root.join("class/infiniband")) {
        // A device that is no PCI function, such as software RDMA over an ordinary network adapter, cannot be given to a pod.
        let Ok(target) = fs::canonicalize(path.join("device")) else {
            continue;
        };
        let name = target.file_name().and_then(OsStr::to_str);
        let Some(address) = name.and_then(pci::address) else {
            continue;
        };
        if let Some(function) = bus.functions.get(&address)
            && !function.is_virtual
        {
            by_address.entry(address).or_default().push(path);
        }
    }
    let mut found = Vec::new();
    for (minor, (address, paths)) in (0..).zip(&by_address) {
        if let Some(device) = device(root, ExtendedResource::Rdma, bus, address, minor) {
            found.push((device, port_problem(paths)));
        }
    }
    found
}

/// The device files below `/dev` that a container needs to use one PCI function of an adapter or FPGA.
fn device_nodes(root: &Path, resource: ExtendedResource, address: &str) -> Vec<PathBuf> {
    let function = pci::folder(root).join(address);
    let mut names = BTreeSet::new();
    if resource == ExtendedResource::Rdma {
        for class in ["infiniband_verbs", "infiniband_mad"] {
            for path in entries(&function.join(class)) {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                names.insert(format!("infiniband/{name}"));
            }
        }
        // A function without device files of its own has no driver in this machine, so `rdma_cm` is of no use.
        if !names.is_empty() {
            names.insert(RDMA_CONNECTIONS.to_owned());
        }
    } else if let Ok(function) = fs::canonicalize(function) {
        collect_device_names(&function, FPGA_DEPTH, &mut names);
    }
    let dev = Path::new("/dev");
    names.iter().map(|name| dev.join(name)).collect()
}

/// The adapter or FPGA that is the PCI function at this address; it offers 100 (percent) of the resource.
fn device(
    root: &Path,
    resource: ExtendedResource,
    bus: &Bus,
    address: &str,
    minor: u32,
) -> Option<OtherDevice> {
    let mut vfs = Vec::new();
    let mut function_nodes = BTreeMap::new();
    for (number, bus_id) in &bus.functions.get(address)?.virtual_functions {
        vfs.push(VirtualFunction {
            minor: i32::try_from(*number).unwrap_or(-1),
            bus_id: bus_id.clone(),
        });
        let nodes = device_nodes(root, resource, bus_id);
        // A function that a virtual machine or the network plugin has taken has no device files on this machine.
        if !nodes.is_empty() {
            function_nodes.insert(bus_id.clone(), nodes);
        }
    }
    let mut vf_groups = Vec::new();
    if !vfs.is_empty() {
        let labels = BTreeMap::new();
        vf_groups.push(VirtualFunctionGroup { labels, vfs });
    }
    let name = percent_resource(resource.device_type())?;
    Some(OtherDevice {
        device_type: resource.device_type().to_owned(),
        id: address.parse().ok()?,
        minor,
        resources: [(name.to_owned(), Quantity::from_unsigned(WHOLE_PERCENT))].into(),
        labels: BTreeMap::new(),
        bus_id: Some(address.to_owned()),
        location: bus.location(address),
        vf_groups,
        device_nodes: device_nodes(root, resource, address),
        function_nodes,
    })
}

pub(super) fn watcher(root: PathBuf, interval: Duration, inventory: &NodeInventory) -> Watcher {
    let known = inventory.others.clone();
    Box::new(move |reporter| {
        report(&root, &known, reporter)?;
        reporter.pause(interval)
    })
}

/// One round of the watch: reads sysfs, and reports new or changed devices and the state of each known device.
fn report(root: &Path, known: &[OtherDevice], reporter: &Reporter) -> Result<(), Stopped> {
    let found = read(root);
    if found.iter().any(|(device, _)| !known.contains(device)) {
        reporter.announce_change()?;
    }
    for device in known {
        let kind = match found.iter().find(|(other, _)| other.id == device.id) {
            None => ObservationKind::Lost,
            Some((_, None)) => ObservationKind::Answered,
            Some((_, Some(problem))) => ObservationKind::PortDown(problem.clone()),
        };
        // Every round reports every device: a recovery needs several answers in a row.
        reporter.add(Some(&device.id), kind);
    }
    reporter.send_added()
}

/// The PCI address of the function to whose folder in sysfs, or to a folder below it, a link leads.
fn function_of(link: &Path) -> Option<String> {
    let path = fs::canonicalize(link).ok()?;
    // The last PCI address in the path is that of the function; those before it are of the bridges above.
    let mut parts = path.iter().rev().filter_map(OsStr::to_str);
    let address = parts.find(|part| pci::address(part).as_deref() == Some(part))?;
    Some(address.to_owned())
}

/// The reason that no port of these devices can be used, if none can.
fn port_problem(devices: &[PathBuf]) -> Option<String> {
    let mut problems = Vec::new();
    for device in devices {
        for port in entries(&device.join("ports")) {
            let text = fs::read_to_string(port.join("state")).unwrap_or_default();
            // Such as `4: ACTIVE`.
            let (_, state) = text.split_once(':').unwrap_or(("", "unknown"));
            let state = state.trim();
            if state == "ACTIVE" {
                return None;
            }
            let port = port.file_name().unwrap_or_default().to_string_lossy();
            problems.push(format!("port {port} is {state}"));
        }
    }
    if problems.is_empty() {
        problems.push("it has no port".to_owned());
    }
    Some(problems.join(", "))
}

/// Adds the kernel's names for the device files of a folder of sysfs, and of the folders below it, to `names`.
fn collect_device_names(folder: &Path, depth: usize, names: &mut BTreeSet<String>) {
    let uevent = fs::read_to_string(folder.join("uevent")).unwrap_or_default();
    for line in uevent.lines() {
        let name = line.strip_prefix("DEVNAME=").unwrap_or_default();
        // The names become paths below /dev that containers get.
        if !name.is_empty() && !name.starts_with('/') && !name.split('/').any(|part| part == "..") {
            names.insert(name.to_owned());
        }
    }
    if depth == 0 {
        return;
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // Links lead out of the device.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect_device_names(&entry.path(), depth - 1, names);
        }
    }
}

/// The entries of a folder, by name; none if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    // The kernel lists entries in any order; minor numbers and messages must not depend on it.
    paths.sort_unstable();
    paths
}

#[cfg(test)]
mod tests;
