//! RDMA adapters and FPGAs of this machine, found by links and small files in sysfs. Nothing here drives hardware.
//!
//! RDMA adapters are the PCI functions, other than virtual ones, that have a device in `/sys/class/infiniband`. An adapter works
//! if one of its ports is active. Its minor number is its position in the order of PCI addresses. A container needs `rdma_cm`,
//! which makes connections, and for each function that it gets the files of the function's `uverbs` device, and `umad` and
//! `issm` where the kernel has created them.
//!
//! FPGAs are the PCI functions, other than virtual ones, that the kernel's own FPGA drivers manage, and processing accelerators
//! (class 12) of vendors that make FPGAs: the class alone would include other accelerators. A container needs the device files of
//! everything that drivers have created below the function.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::device::{VirtualFunction, VirtualFunctionGroup};
use proto::quantity::Quantity;
use proto::resource::WHOLE_PERCENT;
use tracing::info;

use crate::devices::extended_resource::ExtendedResource;

use super::feed::{Reporter, Stopped, Watcher};
use super::pci::{self, Bus};
use super::{NodeInventory, ObservationKind, OtherDevice, PhysicalId, percent_resource};

/// The device file with which all RDMA adapters make connections.
const RDMA_CONNECTIONS: &str = "infiniband/rdma_cm";

/// The base class of processing accelerators.
const ACCELERATOR: u32 = 0x12;

/// PCI vendors whose processing accelerators are FPGAs: Xilinx and Altera.
const FPGA_VENDORS: [u32; 2] = [0x10ee, 0x1172];

/// Levels below an FPGA's function that are searched for device files.
const FPGA_DEPTH: usize = 4;

/// The RDMA adapters and FPGAs below one mount point of sysfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SysfsSource {
    pub(super) root: PathBuf,
    /// The interval at which a watch reads sysfs.
    pub(super) interval: Duration,
}

/// A device, and the reason that it cannot be used now; none if it can.
type Found = (OtherDevice, Option<String>);

impl SysfsSource {
    /// The present devices, sorted by type and minor number.
    pub(super) fn list(&self) -> Vec<OtherDevice> {
        self.read().into_iter().map(|(device, _)| device).collect()
    }

    fn read(&self) -> Vec<Found> {
        let bus = Bus::read(&self.root);
        let mut found = self.fpgas(&bus);
        found.extend(self.adapters(&bus));
        found
    }

    /// The FPGAs: PCI functions of the known vendors' accelerators, and those that the kernel manages as FPGAs.
    fn fpgas(&self, bus: &Bus) -> Vec<Found> {
        let mut managed = BTreeSet::new();
        for class in ["class/fpga_region", "class/fpga_manager"] {
            for link in entries(&self.root.join(class)) {
                managed.extend(function_of(&link));
            }
        }
        let mut found = Vec::new();
        let mut minors = 0..;
        for (address, function) in bus.iter() {
            let is_by_vendor = function.class >> 16 == ACCELERATOR && FPGA_VENDORS.contains(&function.vendor);
            if function.is_virtual || !(is_by_vendor || managed.contains(address)) {
                continue;
            }
            let minor = minors.next().unwrap_or_default();
            if let Some(device) = self.device(ExtendedResource::Fpga, bus, address, minor) {
                // sysfs shows nothing of an FPGA's health.
                found.push((device, None));
            }
        }
        found
    }

    /// The RDMA network adapters, each with the problem of its ports, if no port is active.
    fn adapters(&self, bus: &Bus) -> Vec<Found> {
        let mut by_address = BTreeMap::<String, Vec<PathBuf>>::new();
        for path in entries(&self.root.join("class/infiniband")) {
            // A device that is no PCI function, such as software RDMA over an ordinary network adapter, cannot be given to a pod.
            let Ok(target) = fs::canonicalize(path.join("device")) else {
                continue;
            };
            let name = target.file_name().and_then(|name| name.to_str());
            let Some(address) = name.and_then(pci::address) else {
                continue;
            };
            if bus.get(&address).is_some_and(|function| !function.is_virtual) {
                by_address.entry(address).or_default().push(path);
            }
        }
        let mut found = Vec::new();
        for (minor, (address, paths)) in (0..).zip(&by_address) {
            if let Some(device) = self.device(ExtendedResource::Rdma, bus, address, minor) {
                found.push((device, port_problem(paths)));
            }
        }
        found
    }

    /// The device files below `/dev` that a container needs to use one PCI function of an adapter or FPGA.
    fn device_nodes(&self, resource: ExtendedResource, address: &str) -> Vec<PathBuf> {
        let function = pci::folder(&self.root).join(address);
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
        &self,
        resource: ExtendedResource,
        bus: &Bus,
        address: &str,
        minor: u32,
    ) -> Option<OtherDevice> {
        let id: PhysicalId = match address.parse() {
            Ok(id) => id,
            Err(error) => {
                info!(address, %error, "ignoring a PCI function");
                return None;
            }
        };
        let mut vfs = Vec::new();
        let mut function_nodes = BTreeMap::new();
        for (number, bus_id) in &bus.get(address)?.virtual_functions {
            vfs.push(VirtualFunction {
                minor: i32::try_from(*number).unwrap_or(-1),
                bus_id: bus_id.clone(),
            });
            let nodes = self.device_nodes(resource, bus_id);
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
            id,
            minor,
            resources: [(name.to_owned(), Quantity::from_unsigned(WHOLE_PERCENT))].into(),
            labels: BTreeMap::new(),
            bus_id: Some(address.to_owned()),
            location: bus.location(address),
            vf_groups,
            device_nodes: self.device_nodes(resource, address),
            function_nodes,
        })
    }

    /// A watch of the RDMA adapters and FPGAs of this inventory, before its first round.
    pub(super) fn watcher(&self, inventory: &NodeInventory) -> Watcher {
        let (source, known) = (self.clone(), inventory.clone());
        Box::new(move |reporter| source.report(&known, reporter))
    }

    /// One round of the watch: reads sysfs, and reports new or changed devices and the state of each known device.
    fn report(&self, known: &NodeInventory, reporter: &Reporter) -> Result<(), Stopped> {
        let found = self.read();
        if found.iter().any(|(device, _)| !known.others.contains(device)) {
            reporter.announce_change()?;
        }
        for device in &known.others {
            let kind = match found.iter().find(|(other, _)| other.id == device.id) {
                None => ObservationKind::Lost,
                Some((_, None)) => ObservationKind::Answered,
                Some((_, Some(problem))) => ObservationKind::PortDown(problem.clone()),
            };
            // Every round reports every device: a recovery needs several answers in a row.
            reporter.add(Some(&device.id), kind);
        }
        reporter.send_added()?;
        reporter.pause(self.interval)
    }
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
