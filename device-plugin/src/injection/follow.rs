//! Repeats the decision on the injection mode of this node, and keeps the driver's CDI device in step with the vendor's specs.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use daemon::events::{EventType, Recorder};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::cdi::dir::DRIVER_FILE;
use crate::cdi::vendor::VendorKind;
use crate::cdi::{Edits, SpecDir, name_of};
use crate::metrics::Metrics;
use crate::node_state::NodeState;
use crate::pods::PodStage;

use super::content::driver_edits;
use super::decide::{Cdi, Driver, InjectionFacts, OwnContainer, VariableFacts, decide, exposure, variable};
use super::{CDI_OFF, Certainty, Injection, Mode};

/// Interval at which the vendor's specs and the runtime's reads are checked.
const INTERVAL: Duration = Duration::from_secs(1);

/// Longest wait of the first decision for the runtime to read a spec.
const FIRST_READ: Duration = Duration::from_secs(1);

/// Interval at which the runtime is prompted to read the specs while it has not been seen reading.
const CALL_INTERVAL: Duration = Duration::from_secs(30);

/// Time for which a node goes on with CDI when specs cannot be written or the driver's is gone. The vendor's services replace
/// their specs while pods come, and kubelet turns a pod away for good whose devices are unhealthy at that moment; a start
/// that needs a missing spec is refused, and tried again.
const GRACE: Duration = Duration::from_secs(10);

/// Facts that do not change while the process runs.
#[derive(Clone, Debug)]
pub struct PluginFacts {
    /// The facts about this plugin's own container.
    pub own: OwnContainer,
    /// True if the runtime hook is on.
    pub has_hook: bool,
}

/// The receivers of each new decision.
#[derive(Debug)]
pub struct Listeners {
    /// For everything in this process that depends on the mode; none until the first decision.
    pub injection: watch::Sender<Option<Injection>>,
    /// The node's events.
    pub recorder: Recorder,
    /// The process's metrics.
    pub metrics: Metrics,
}

/// Decides until the task is dropped.
pub async fn follow(node: Arc<NodeState>, facts: PluginFacts, listeners: Listeners) {
    let readers = node.readers.clone();
    let mut follower = InjectionFollower {
        node,
        facts,
        driver: None,
        prompted: None,
        has_management_spec: false,
    };
    let mut without_cdi: Option<Instant> = None;
    // This writes specs, which prompts the runtime to read.
    follower.facts_now();
    // A runtime that takes CDI devices reads at once, and the first decision is then no guess.
    let _ = timeout(FIRST_READ, readers.changed()).await;
    loop {
        let facts = follower.facts_now();
        let decided = decide(follower.node.settings.injection.mode, &facts);
        without_cdi = if is_by_cdi(&decided) {
            None
        } else {
            Some(without_cdi.unwrap_or_else(Instant::now))
        };
        let lasted = without_cdi.map_or(Duration::ZERO, |since| since.elapsed());
        let takes_effect = is_due(listeners.injection.borrow().as_ref(), &decided, lasted);
        if takes_effect {
            listeners.publish(decided);
        }
        tokio::select! {
            () = sleep(INTERVAL) => {}
            () = readers.changed() => {}
        }
    }
}

fn is_by_cdi(injection: &Injection) -> bool {
    injection.mode == Mode::Cdi && injection.is_possible()
}

/// True if a decision takes effect now; `lasted` is the time since CDI was last possible.
fn is_due(before: Option<&Injection>, decided: &Injection, lasted: Duration) -> bool {
    // A runtime that ignores CDI devices starts containers without any, so `CDI_OFF` takes effect at once.
    !before.is_some_and(is_by_cdi) || is_by_cdi(decided) || decided.reason == CDI_OFF || lasted >= GRACE
}

impl Listeners {
    fn publish(&self, decided: Injection) {
        let before = self.injection.borrow().clone();
        if before.as_ref() == Some(&decided) {
            return;
        }
        self.metrics.set_injection(&decided);
        let is_new_reason = before
            .as_ref()
            .is_none_or(|before| before.reason != decided.reason);
        if is_new_reason && decided.certainty == Certainty::Impossible {
            warn!(
                mode = decided.mode.as_str(),
                reason = decided.reason,
                "no container can get a device: {}",
                decided.message
            );
            self.recorder.node(
                EventType::Warning,
                "GPUInjectionImpossible",
                decided.message.clone(),
            );
        } else if is_new_reason {
            info!(
                mode = decided.mode.as_str(),
                certainty = decided.certainty.as_str(),
                "containers get their devices: {}",
                decided.message
            );
            if before.is_some_and(|before| !before.is_possible()) {
                self.recorder
                    .node(EventType::Normal, "GPUInjectionPossible", decided.message.clone());
            }
        }
        self.injection.send_replace(Some(decided));
    }
}

struct InjectionFollower {
    node: Arc<NodeState>,
    facts: PluginFacts,
    /// The edits of the driver's device as they were last written.
    driver: Option<Edits>,
    /// The time at which the runtime was last prompted to read the specs.
    prompted: Option<Instant>,
    /// True once GPU Operator's spec has been seen.
    has_management_spec: bool,
}

impl InjectionFollower {
    /// Collects the facts of this moment, and writes the driver's spec where it has to change.
    fn facts_now(&mut self) -> InjectionFacts {
        let (driver, edits) = self.driver();
        let written = self.write_driver(edits).and_then(|()| self.prompt());
        let readers = &self.node.readers;
        let cdi = match written {
            Err(error) => Cdi::Unwritable(format!("cannot write {}: {error}", self.specs().path().display())),
            Ok(()) if readers.has_reader() => Cdi::Read,
            Ok(()) if self.has_unread_start() => Cdi::Off,
            Ok(()) => Cdi::Unknown,
        };
        let vendor_specs = &self.node.settings.injection.vendor_specs;
        self.has_management_spec |= vendor_specs.has(VendorKind::Management);
        let fleet = self.node.fleet.borrow();
        let uuids = fleet.gpus.iter().map(|entry| entry.gpu.uuid.as_str());
        let of_variable = VariableFacts {
            is_simulated: !fleet.needs_driver,
            toolkit_names_uuid: vendor_specs.names_any(VendorKind::Toolkit, uuids),
            has_management_spec: self.has_management_spec,
            own: self.facts.own.clone(),
        };
        let (variable, exposure) = (variable(&of_variable), exposure(&of_variable));
        InjectionFacts {
            cdi,
            driver,
            variable,
            exposure,
            has_hook: self.facts.has_hook,
        }
    }

    fn specs(&self) -> &SpecDir {
        &self.node.settings.injection.specs
    }

    /// The source of the driver, and the edits of its device, if a container can have any.
    fn driver(&self) -> (Driver, Option<Edits>) {
        let settings = &self.node.settings;
        let (version, needs_driver) = {
            let fleet = self.node.fleet.borrow();
            (fleet.driver_version.clone(), fleet.needs_driver)
        };
        // The version of simulated devices is that of no library.
        let running = version.as_deref().filter(|_| needs_driver);
        match settings.injection.vendor_specs.driver(running) {
            Ok(found) => (
                Driver::Spec(found.kind.as_str()),
                Some(driver_edits(settings, found.edits)),
            ),
            Err(_) if !needs_driver => (Driver::NotNeeded, Some(driver_edits(settings, Edits::default()))),
            Err(why) => (Driver::Missing(why.to_string()), None),
        }
    }

    /// Writes the driver's spec.
    fn write_driver(&mut self, edits: Option<Edits>) -> io::Result<()> {
        // The spec of a driver that is gone stays: no container starts meanwhile, and the next driver's replaces it.
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

    /// Prompts the runtime to read the specs, as long as it has not been seen reading.
    fn prompt(&mut self) -> io::Result<()> {
        if self.node.readers.has_reader() || self.prompted.is_some_and(|at| at.elapsed() < CALL_INTERVAL) {
            return Ok(());
        }
        self.prompted = Some(Instant::now());
        self.specs().prompt_read()
    }

    /// True if a pod runs whose first container this process let start with a spec that the runtime has not read.
    fn has_unread_start(&self) -> bool {
        let Some(written) = self.node.checkpoint.read() else {
            return false;
        };
        let pods = self.node.pods.borrow();
        let is_unread = |name: &str| self.node.readers.is_unread_by_start(&SpecDir::file(name));
        written.iter().any(|entry| {
            let runs = pods
                .get(&entry.pod)
                .is_some_and(|pod| pod.stage == PodStage::Running);
            runs && entry
                .answer
                .cdi_devices
                .iter()
                .filter_map(|device| name_of(&device.name))
                .any(is_unread)
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn injection(mode: Mode, certainty: Certainty, reason: &'static str) -> Injection {
        Injection {
            mode,
            certainty,
            reason,
            message: String::new(),
            exposure: None,
        }
    }

    /// After CDI was proven, a state that does not pass by itself takes effect at once, any other when it has lasted.
    #[rstest]
    #[case::spec_replaced(injection(Mode::Cdi, Certainty::Impossible, "NoDriverSpec"), 0, false)]
    #[case::spec_gone(injection(Mode::Cdi, Certainty::Impossible, "NoDriverSpec"), 10, true)]
    #[case::directory_gone_for_a_moment(
        injection(Mode::Cdi, Certainty::Impossible, "CdiDirNotWritable"),
        9,
        false
    )]
    #[case::variable_would_work_meanwhile(injection(Mode::Envvar, Certainty::Proven, "Variable"), 0, false)]
    #[case::variable_from_now_on(injection(Mode::Envvar, Certainty::Proven, "Variable"), 10, true)]
    #[case::cdi_is_off(injection(Mode::Cdi, Certainty::Impossible, "CdiOff"), 0, true)]
    #[case::unsure(injection(Mode::Cdi, Certainty::Assumed, "CdiAssumed"), 0, true)]
    fn a_change_takes_effect_once_it_has_lasted(
        #[case] decided: Injection,
        #[case] seconds: u64,
        #[case] expected: bool,
    ) {
        let lasted = Duration::from_secs(seconds);
        let proven = injection(Mode::Cdi, Certainty::Proven, "Cdi");
        assert_eq!(is_due(Some(&proven), &decided, lasted), expected);
        assert!(is_due(None, &decided, lasted), "nothing was offered before");
        let impossible = injection(Mode::Cdi, Certainty::Impossible, "NoDriverSpec");
        assert!(is_due(Some(&impossible), &decided, lasted));
    }
}
