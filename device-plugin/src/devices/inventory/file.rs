//! Simulated devices, described by a JSON file that the watch reads at short intervals; an invalid one changes nothing.
//!
//! docs/topology.md lists the fields. Beside those a GPU may have `deviceNode`, and `processes`, each with the memory that it
//! uses and the ID of its container, such as `[{"memory": "1Gi", "container": "0123"}]`. Types other than `rdma` and `fpga` need
//! `resources`. `health` is `Healthy` (the default), `Lost`, or, for a GPU, `Xid` and a number, which the watch reports again and
//! again until the file changes. `{node}` in an ID is replaced by the node's name, so that one file can serve many nodes.

mod parse;

use std::{fs, io, path::PathBuf, time::Duration};

use tokio::sync::mpsc;

use crate::logged_error::LoggedError;

use super::feed::{Reporter, Stopped};
use super::{Feed, InventoryError, NodeInventory, ObservationKind, Observations, PhysicalId, ProcessMemory};
use parse::{SimulatedDevices, SimulatedHealth, parse};

/// A file of simulated devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSource {
    pub(crate) path: PathBuf,
    /// The node's name, which replaces `{node}` in an ID, or whose hash does if the ID would be too long.
    pub(crate) node: String,
    pub(crate) interval: Duration,
}

impl FileSource {
    /// The interval at which the plugin reads the file: short, so that a simulated device falls sick soon after the file says so.
    pub(crate) const INTERVAL: Duration = Duration::from_millis(200);

    pub(super) fn discover(&self) -> Result<NodeInventory, InventoryError> {
        Ok(parse(&self.path, &self.node, &self.read()?)?.inventory)
    }

    pub(super) fn memory_use(&self) -> Result<Vec<ProcessMemory>, InventoryError> {
        Ok(parse(&self.path, &self.node, &self.read()?)?.processes)
    }

    pub(super) fn watch(
        &self,
        inventory: &NodeInventory,
    ) -> Result<(Feed, mpsc::Receiver<Observations>), InventoryError> {
        let mut watch = FileWatch {
            latest: parse(&self.path, &self.node, &self.read()?)?,
            source: self.clone(),
            known: inventory.clone(),
            // Empty, so that the first round notices a change since the devices were listed.
            text: Vec::new(),
            logged: LoggedError::default(),
        };
        Feed::start(vec![Box::new(move |reporter| watch.report(reporter))])
    }

    fn read(&self) -> Result<Vec<u8>, InventoryError> {
        fs::read(&self.path).map_err(|error| {
            let problem = format!("cannot read the device file {}", self.path.display());
            if error.kind() == io::ErrorKind::NotFound {
                let source = Some(error.into());
                InventoryError::Absent { problem, source }
            } else {
                InventoryError::failed(problem, error)
            }
        })
    }
}

struct FileWatch {
    source: FileSource,
    known: NodeInventory,
    /// The devices of the last valid text.
    latest: SimulatedDevices,
    /// The last text of the file, valid or not.
    text: Vec<u8>,
    logged: LoggedError,
}

impl FileWatch {
    /// One round of the watch: reads the file, and reports whether the list has changed and the health of every known device.
    fn report(&mut self, reporter: &Reporter) -> Result<(), Stopped> {
        self.refresh();
        let (known, now) = (&self.known, &self.latest.inventory);
        // A machine's links and partitions do not change while its GPUs stay, so only this source compares them.
        let has_changed = known.is_outdated_by(now)
            || known.links != now.links
            || known.partitions != now.partitions
            || known.partition_policy != now.partition_policy;
        if has_changed {
            reporter.announce_change()?;
        }
        for id in self.known.ids() {
            self.report_device(id, reporter);
        }
        reporter.send_added()?;
        reporter.pause(self.source.interval)
    }

    /// Reads the file again, and parses it if its text has changed: the file is small.
    fn refresh(&mut self) {
        let parsed = match self.source.read() {
            Ok(text) if text == self.text => return,
            Ok(text) => {
                self.text = text;
                parse(&self.source.path, &self.source.node, &self.text)
            }
            Err(error) => Err(error),
        };
        match parsed {
            Ok(devices) => {
                self.latest = devices;
                self.logged.clear();
            }
            Err(error) => {
                let what = "keeping the last valid state of the simulated devices";
                self.logged.warn(&error, what);
            }
        }
    }

    /// Reports the health that the file gives a device; a device that the file no longer lists is lost.
    fn report_device(&self, id: &PhysicalId, reporter: &Reporter) {
        match self.latest.health.get(id).unwrap_or(&SimulatedHealth::Lost) {
            SimulatedHealth::Healthy => reporter.add(Some(id), ObservationKind::AnsweredWithoutFault),
            SimulatedHealth::Lost => reporter.add(Some(id), ObservationKind::Lost),
            // A GPU answers probes after an XID too. Each round reports the XID again, before the answer, so that the GPU stays
            // unhealthy, unless its class is that of application faults.
            SimulatedHealth::Xid(xid) => {
                reporter.add(Some(id), ObservationKind::Xid(*xid));
                reporter.add(Some(id), ObservationKind::AnsweredWithoutFault);
            }
        }
    }
}

#[cfg(test)]
mod tests;
