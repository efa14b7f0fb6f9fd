//! RDMA adapters and FPGAs of this machine, as sysfs tells of them.
//!
//! Looks at links and small files below one root and drives no hardware. What a function has to be to count as an adapter or
//! an FPGA is in `sysfs/rdma.rs` and `sysfs/fpga.rs`.

mod fpga;
mod rdma;
#[cfg(test)]
pub(crate) mod recorded;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use proto::device::{VirtualFunction, VirtualFunctionGroup};
use proto::quantity::Quantity;
use proto::resource::WHOLE_PERCENT;
use tracing::info;

use super::feed::{Outbox, Over, Watcher};
use super::pci::{self, Bus};
use super::{Inventory, OtherDevice, PhysicalId};
use crate::health::ObservationKind;

pub use fpga::{InvalidVendor, PciVendor};

/// The devices of this machine that sysfs tells of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SysfsSource {
    /// Where sysfs is mounted.
    pub root: PathBuf,
    /// How often a watch looks at it.
    pub interval: Duration,
    /// Whether RDMA adapters are looked for.
    pub has_rdma: bool,
    /// Whether FPGAs are looked for.
    pub has_fpga: bool,
    /// Whose processing accelerators are FPGAs.
    pub fpga_vendors: Vec<PciVendor>,
}

impl SysfsSource {
    /// Looks for nothing.
    pub fn nothing(root: PathBuf) -> Self {
        Self {
            root,
            interval: Duration::from_secs(10),
            has_rdma: false,
            has_fpga: false,
            fpga_vendors: Vec::new(),
        }
    }

    /// Whether it looks for anything at all.
    pub(super) fn is_wanted(&self) -> bool {
        self.has_rdma || self.has_fpga
    }

    /// The devices that are there, sorted by type and minor number.
    pub(super) fn list(&self) -> Vec<OtherDevice> {
        self.look().into_iter().map(|(device, _)| device).collect()
    }

    /// Every device that is there, and what is wrong with it now.
    fn look(&self) -> Vec<(OtherDevice, Option<String>)> {
        let bus = if self.is_wanted() {
            Bus::read(&self.root)
        } else {
            Bus::default()
        };
        let fpgas = self
            .has_fpga
            .then(|| fpga::list(&self.root, &bus, &self.fpga_vendors));
        let adapters = self.has_rdma.then(|| rdma::list(&self.root, &bus));
        fpgas.into_iter().chain(adapters).flatten().collect()
    }

    /// What watches the devices of `inventory`; it announces others once.
    pub(super) fn watcher(&self, inventory: &Inventory) -> Watcher {
        let (source, known) = (self.clone(), inventory.clone());
        let mut announced = false;
        Box::new(move |outbox| {
            loop {
                if let Err(over) = source.report(&known, &mut announced, outbox) {
                    return over;
                }
            }
        })
    }

    fn report(&self, known: &Inventory, announced: &mut bool, outbox: &Outbox) -> Result<(), Over> {
        let found = self.look();
        let is_news = |(device, _): &(OtherDevice, Option<String>)| !known.others.contains(device);
        if !*announced && found.iter().any(is_news) {
            *announced = true;
            outbox.send(None, ObservationKind::InventoryChanged)?;
        }
        for device in &known.others {
            let seen = found.iter().find(|(other, _)| other.id == device.id);
            let kind = match seen {
                None => ObservationKind::Lost,
                Some((_, None)) => ObservationKind::Answered,
                Some((_, Some(problem))) => ObservationKind::PortDown(problem.clone()),
            };
            outbox.send(Some(&device.id), kind)?;
        }
        outbox.pause(self.interval)
    }
}

/// What devices of a type have in common.
struct Kind<'a> {
    device_type: &'a str,
    /// What it has 100 of.
    resource: &'a str,
    bus: &'a Bus,
}

impl Kind<'_> {
    /// The device that is the function at this address; `nodes` tells the device files of a function.
    fn device(&self, address: &str, minor: u32, nodes: impl Fn(&str) -> Vec<PathBuf>) -> Option<OtherDevice> {
        let id: PhysicalId = address
            .parse()
            .inspect_err(|error| info!(address, %error, "passing over a PCI function"))
            .ok()?;
        let functions = &self.bus.get(address)?.virtual_functions;
        let vf = |(number, bus_id): &(u32, String)| VirtualFunction {
            minor: i32::try_from(*number).unwrap_or(-1),
            bus_id: bus_id.clone(),
        };
        let vfs: Vec<_> = functions.iter().map(vf).collect();
        let group = (!vfs.is_empty()).then(|| VirtualFunctionGroup {
            labels: BTreeMap::new(),
            vfs,
        });
        let function_nodes = functions
            .iter()
            .map(|(_, address)| (address.clone(), nodes(address)));
        Some(OtherDevice {
            device_type: self.device_type.to_owned(),
            id,
            minor,
            resources: [(self.resource.to_owned(), Quantity::from_unsigned(WHOLE_PERCENT))].into(),
            labels: BTreeMap::new(),
            bus_id: Some(address.to_owned()),
            location: self.bus.location(address),
            vf_groups: group.into_iter().collect(),
            device_nodes: nodes(address),
            function_nodes: function_nodes.filter(|(_, nodes)| !nodes.is_empty()).collect(),
        })
    }
}

/// The PCI address of the function that a link leads to, or to something below it.
fn function_of(link: &std::path::Path) -> Option<String> {
    let path = std::fs::canonicalize(link).ok()?;
    let mut parts = path.iter().rev().filter_map(|part| part.to_str());
    parts
        .find(|part| pci::address(part).as_deref() == Some(part))
        .map(str::to_owned)
}
