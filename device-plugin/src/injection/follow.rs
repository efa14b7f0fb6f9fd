//! Finds out what works on this node, again and again, and keeps the driver's CDI device in step with the vendor's specs.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::cdi::dir::DRIVER_FILE;
use crate::cdi::vendor::VendorKind;
use crate::cdi::{Edits, SpecDir, name_of};
use crate::events::{Recorder, Weight};
use crate::identity::checkpoint::Checkpoint;
use crate::inject;
use crate::metrics::Metrics;
use crate::plugin::NodeState;
use crate::pods::Stage;

use super::decide::{Cdi, Driver, Facts, OwnContainer, VariableFacts, decide, exposure, variable};
use super::{Certainty, Injection};

/// How often the vendor's specs and the runtime's reads are looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// How long the first decision waits for the runtime to read a spec.
const FIRST_READ: Duration = Duration::from_secs(1);

/// How often a spec is written for the runtime to read while it has not been seen reading.
const PROBE_INTERVAL: Duration = Duration::from_secs(30);

/// What does not change while the process runs.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    /// How this plugin's own container got NVML.
    pub own: OwnContainer,
    /// Whether the runtime hook is on.
    pub has_hook: bool,
}

/// Who learns what holds.
#[derive(Debug)]
pub struct Listeners {
    /// Everything in this process that depends on the mode; none until the first decision.
    pub injection: watch::Sender<Option<Injection>>,
    /// The node's events.
    pub recorder: Recorder,
    /// The process's metrics.
    pub metrics: Metrics,
}

/// Decides until the task is dropped.
pub async fn follow(node: Arc<NodeState>, facts: NodeFacts, listeners: Listeners) {
    let readers = node.readers.clone();
    let mut follower = Follower { node, facts, driver: None, probed: None };
    // The runtime reads the specs that this writes.
    follower.look();
    let _ = timeout(FIRST_READ, readers.changed()).await;
    loop {
        let facts = follower.look();
        listeners.tell(decide(follower.node.settings.injection.mode, &facts));
        tokio::select! {
            () = sleep(INTERVAL) => {}
            () = readers.changed() => {}
        }
    }
}

impl Listeners {
    fn tell(&self, decided: Injection) {
        let before = self.injection.borrow().clone();
        if before.as_ref() == Some(&decided) {
            return;
        }
        self.metrics.set_injection(&decided);
        let is_news = before.as_ref().is_none_or(|before| before.reason != decided.reason);
        if is_news && decided.certainty == Certainty::Impossible {
            warn!(mode = decided.mode.as_str(), reason = decided.reason, "no container can get a device: {}", decided.message);
            self.recorder.node(Weight::Warning, "GPUInjectionImpossible", decided.message.clone());
        } else if is_news {
            info!(
                mode = decided.mode.as_str(),
                certainty = decided.certainty.as_str(),
                "containers get their devices: {}",
                decided.message
            );
            if before.is_some_and(|before| !before.is_possible()) {
                self.recorder.node(Weight::Normal, "GPUInjectionPossible", decided.message.clone());
            }
        }
        self.injection.send_replace(Some(decided));
    }
}

struct Follower {
    node: Arc<NodeState>,
    facts: NodeFacts,
    /// The edits of the driver's device as they were last written.
    driver: Option<Edits>,
    /// When a spec was last written for the runtime to read.
    probed: Option<Instant>,
}

impl Follower {
    /// What is on the node now. Writes the driver's spec where it has to change.
    fn look(&mut self) -> Facts {
        let (driver, edits) = self.driver();
        let written = self.write_driver(edits).and_then(|()| self.probe());
        let readers = &self.node.readers;
        let cdi = match written {
            Err(error) => Cdi::Unwritable(format!("cannot write {}: {error}", self.specs().path().display())),
            Ok(()) if readers.has_reader() => Cdi::Read,
            Ok(()) if self.has_unread_start() => Cdi::Off,
            Ok(()) => Cdi::Unknown,
        };
        let vendor_specs = &self.node.settings.injection.vendor_specs;
        let fleet = self.node.fleet.borrow();
        let of_variable = VariableFacts {
            is_simulated: !fleet.needs_driver,
            toolkit_names_uuid: fleet.gpus.iter().any(|entry| vendor_specs.names(VendorKind::Toolkit, entry.gpu.uuid.as_str())),
            has_management_spec: vendor_specs.has(VendorKind::Management),
            own: self.facts.own.clone(),
        };
        let (variable, exposure) = (variable(&of_variable), exposure(&of_variable));
        Facts { cdi, driver, variable, exposure, has_hook: self.facts.has_hook }
    }

    fn specs(&self) -> &SpecDir {
        &self.node.settings.injection.specs
    }

    /// Where the driver comes from, and the edits of its device, if a container can have any.
    fn driver(&self) -> (Driver, Option<Edits>) {
        let settings = &self.node.settings;
        let (version, needs_driver) = {
            let fleet = self.node.fleet.borrow();
            (fleet.driver_version.clone(), fleet.needs_driver)
        };
        // The version of simulated devices is that of no library.
        let running = version.as_deref().filter(|_| needs_driver);
        match settings.injection.vendor_specs.driver(running, &settings.visible_devices_env) {
            Ok(found) => (Driver::Spec(found.kind.as_str()), Some(inject::driver_edits(settings, found.edits))),
            Err(_) if !needs_driver => (Driver::NotNeeded, Some(inject::driver_edits(settings, Edits::default()))),
            Err(why) => (Driver::Missing(why.to_string()), None),
        }
    }

    /// The spec of a driver that is gone stays: no container starts meanwhile, and it is replaced with the next driver's.
    fn write_driver(&mut self, edits: Option<Edits>) -> io::Result<()> {
        let Some(edits) = edits else { return Ok(()) };
        let is_there = self.specs().path().join(DRIVER_FILE).exists();
        if is_there && self.driver.as_ref() == Some(&edits) {
            return Ok(());
        }
        if self.specs().write_driver(&edits)? {
            info!(dir = %self.specs().path().display(), "wrote the CDI device that brings the driver into containers");
        }
        self.driver = Some(edits);
        Ok(())
    }

    /// Writes a spec for the runtime to read, as long as it has not been seen reading.
    fn probe(&mut self) -> io::Result<()> {
        if self.node.readers.has_reader() || self.probed.is_some_and(|at| at.elapsed() < PROBE_INTERVAL) {
            self.specs().remove_probe();
            return Ok(());
        }
        self.probed = Some(Instant::now());
        self.specs().write_probe()
    }

    /// Whether a pod has come to run whose first container this process let start, with a spec that the runtime has not read.
    fn has_unread_start(&self) -> bool {
        let Some(written) = self.node.checkpoint().and_then(Checkpoint::read) else { return false };
        let pods = self.node.pods.borrow();
        let is_unread = |name: &str| self.node.readers.is_unread_by_start(&SpecDir::file(name));
        written.iter().any(|entry| {
            let runs = pods.get(&entry.pod).is_some_and(|pod| pod.stage == Stage::Running);
            runs && entry.answer.cdi_devices.iter().filter_map(|device| name_of(&device.name)).any(is_unread)
        })
    }
}
