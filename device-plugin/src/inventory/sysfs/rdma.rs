//! RDMA adapters: the PCI functions, other than virtual ones, that have a device in `/sys/class/infiniband`.
//!
//! An adapter works if one of its ports is active. Its minor is its place in the order of PCI addresses.
//!
//! A container needs `rdma_cm`, by which connections are made, and of each function that it was given the files of its
//! `uverbs` device, and `umad` and `issm` where the kernel has made them for it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proto::device::TYPE_RDMA;
use proto::resource::RDMA;

use super::{Bus, Kind, OtherDevice};
use crate::inventory::pci;

/// Where the device files of adapters are.
const FOLDER: &str = "/dev/infiniband";

/// By this all adapters make connections.
const CONNECTIONS: &str = "rdma_cm";

/// Every adapter, and what is wrong with it.
pub(super) fn list(sysfs: &Path, bus: &Bus) -> Vec<(OtherDevice, Option<String>)> {
    let mut devices = BTreeMap::<String, Vec<PathBuf>>::new();
    for path in entries(&sysfs.join("class/infiniband")) {
        // A device that is not a PCI function, such as one over an ordinary network adapter, is nothing to be given.
        let address = fs::canonicalize(path.join("device"))
            .ok()
            .and_then(|target| pci::address(target.file_name()?.to_str()?));
        if let Some(address) =
            address.filter(|address| bus.get(address).is_some_and(|function| !function.is_virtual))
        {
            devices.entry(address).or_default().push(path);
        }
    }
    let kind = Kind {
        device_type: TYPE_RDMA,
        resource: RDMA,
        bus,
    };
    let adapters = (0..).zip(&devices);
    adapters
        .filter_map(|(minor, (address, paths))| {
            Some((
                kind.device(address, minor, |function| nodes(sysfs, function))?,
                problem(paths),
            ))
        })
        .collect()
}

/// The device files of one function; none if no driver has made any.
fn nodes(sysfs: &Path, address: &str) -> Vec<PathBuf> {
    let function = sysfs.join("bus/pci/devices").join(address);
    let names = |class: &str| {
        entries(&function.join(class))
            .into_iter()
            .filter_map(|path| path.file_name().map(PathBuf::from))
    };
    let own: BTreeSet<PathBuf> = names("infiniband_verbs").chain(names("infiniband_mad")).collect();
    if own.is_empty() {
        return Vec::new();
    }
    std::iter::once(PathBuf::from(CONNECTIONS))
        .chain(own)
        .map(|name| Path::new(FOLDER).join(name))
        .collect()
}

/// Why no port of these devices can be used, if none can.
fn problem(devices: &[PathBuf]) -> Option<String> {
    let ports = devices.iter().flat_map(|device| entries(&device.join("ports")));
    let states: Vec<(String, String)> = ports
        .map(|port| {
            let text = fs::read_to_string(port.join("state")).unwrap_or_default();
            // Such as `4: ACTIVE`.
            let state = text.split_once(':').map_or("unknown", |(_, state)| state.trim());
            (
                port.file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned(),
                state.to_owned(),
            )
        })
        .collect();
    if states.iter().any(|(_, state)| state == "ACTIVE") {
        return None;
    }
    let told: Vec<String> = states
        .iter()
        .map(|(port, state)| format!("port {port} is {state}"))
        .collect();
    Some(if told.is_empty() {
        "it has no port".to_owned()
    } else {
        told.join(", ")
    })
}

/// What a folder holds, by name; nothing if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    paths.sort_unstable();
    paths
}
