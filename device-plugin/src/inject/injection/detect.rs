//! Detects the injection mode of this node again and again, and keeps the driver's CDI device in step with the vendor's specs.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use daemon::events::{EventType, Recorder};
use daemon::tick::next_tick;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use crate::devices::fleet::NodeFleet;
use crate::inject::cdi::dir::DRIVER_FILE;
use crate::inject::cdi::readers::Readers;
use crate::inject::cdi::vendor::VendorKind;
use crate::inject::cdi::{Edits, SpecDir, device_of};
use crate::inject::content::driver_edits;
use crate::inject::mode::{CDI_OFF, Certainty, Injection, Mode};
use crate::inject::own_container::OwnContainer;
use crate::inject::settings::NodeSettings;
use crate::node::kubelet_checkpoint::Checkpoint;
use crate::node::pods::{NodePods, PodStage};
use crate::root_dir::RootDir;

use super::decide::{Cdi, Driver, InjectionFacts, VariableFacts, decide, exposure, variable};
use super::runtime_files::ConfiguredRuntime;

/// Interval at which the plugin checks the vendor's specs and the runtime's reads.
const INTERVAL: Duration = Duration::from_secs(3);

/// Longest time for which the first decision waits until the runtime has read a spec.
const FIRST_READ: Duration = Duration::from_secs(1);

/// Interval at which the plugin prompts the runtime to read the specs as long as no read has been seen.
const PROMPT_INTERVAL: Duration = Duration::from_secs(30);

/// Interval at which the plugin reads the configuration of the container runtime.
const CONFIGURATION_INTERVAL: Duration = Duration::from_secs(10);

/// Time for which a node stays with CDI although specs cannot be written or are missing: the vendor's tools rewrite theirs at any
/// time. kubelet tries a refused start again, and fails for good a pod that it admits while injection is impossible.
const GRACE: Duration = Duration::from_secs(10);

/// Decides on the injection mode at once and whenever the facts change, until the task is dropped.
pub(crate) async fn detect_injection(
    settings: NodeSettings,
    fleet: watch::Receiver<Arc<NodeFleet>>,
    pods: watch::Receiver<NodePods>,
    readers: Readers,
    checkpoint: Arc<Checkpoint>,
    injection: watch::Sender<Option<Injection>>,
    recorder: Recorder,
) {
    let mut detector = InjectionDetector {
        settings,
        fleet,
        pods,
        readers: readers.clone(),
        checkpoint,
        driver: None,
        prompted: None,
        has_management_spec: false,
        configured: None,
    };
    let mut without_cdi_since: Option<Instant> = None;
    // Collecting the facts writes the spec of the driver, which prompts the runtime to read.
    detector.collect_facts();
    // A runtime that takes CDI devices reads at once, and the first decision is then no guess.
    let _ = timeout(FIRST_READ, readers.until_next_read()).await;
    loop {
        let is_pod_awaited = detector.own_container().is_pod_awaited;
        let facts = detector.collect_facts();
        let decided = decide(detector.settings.injection_mode, &facts);
        without_cdi_since = if is_by_cdi(&decided) {
            None
        } else {
            Some(without_cdi_since.unwrap_or_else(Instant::now))
        };
        let lasted = without_cdi_since.map_or(Duration::ZERO, |since| since.elapsed());
        // Only proven CDI works whatever the `RuntimeClass` of the plugin's own pod; all other decisions wait until it is known.
        let is_settled = decided.certainty == Certainty::Proven || !is_pod_awaited;
        if is_settled && takes_effect(injection.borrow().as_ref(), &decided, lasted) {
            publish(&injection, &recorder, decided);
        }
        tokio::select! {
            () = next_tick(INTERVAL) => {}
            () = readers.until_next_read() => {}
        }
    }
}

fn is_by_cdi(injection: &Injection) -> bool {
    injection.mode == Mode::Cdi && injection.is_possible()
}

/// True if a decision takes effect now; `lasted` is the time for which the decisions have been against CDI.
fn takes_effect(before: Option<&Injection>, decided: &Injection, lasted: Duration) -> bool {
    // A runtime that ignores CDI devices starts containers without any device, so `CDI_OFF` takes effect at once.
    !before.is_some_and(is_by_cdi) || is_by_cdi(decided) || decided.reason == CDI_OFF || lasted >= GRACE
}

/// Sends a decision that has changed to its readers; a change of the reason also to the log, and to an event on the node.
fn publish(injection: &watch::Sender<Option<Injection>>, recorder: &Recorder, decided: Injection) {
    let before = injection.borrow().clone();
    if before.as_ref() == Some(&decided) {
        return;
    }
    // The message may name another version or file each time, so only a change of the reason is worth a log line and an event.
    if before.as_ref().map(|before| before.reason) != Some(decided.reason) {
        let (mode, reason, message) = (decided.mode.as_str(), decided.reason, decided.message.clone());
        if decided.is_possible() {
            let certainty = decided.certainty.as_str();
            info!(mode, certainty, "containers get their devices: {message}");
            if before.is_some_and(|before| !before.is_possible()) {
                let event = "GPUInjectionPossible";
                recorder.node(EventType::Normal, event, message);
            }
        } else {
            warn!(mode, reason, "no container can get a device: {message}");
            let event = "GPUInjectionImpossible";
            recorder.node(EventType::Warning, event, message);
        }
    }
    injection.send_replace(Some(decided));
}

/// Collects the facts that decide the injection mode, and keeps the CDI device of the driver.
struct InjectionDetector {
    settings: NodeSettings,
    fleet: watch::Receiver<Arc<NodeFleet>>,
    pods: watch::Receiver<NodePods>,
    readers: Readers,
    checkpoint: Arc<Checkpoint>,
    /// The edits of the driver's device as the plugin last wrote them.
    driver: Option<Edits>,
    /// The time at which the plugin last prompted the runtime to read the specs.
    prompted: Option<Instant>,
    /// True once GPU Operator's spec for its own pods has been seen.
    has_management_spec: bool,
    /// The configuration of the container runtime, and the time at which it was read.
    configured: Option<(Instant, ConfiguredRuntime)>,
}

impl InjectionDetector {
    /// This plugin's own container, with the `RuntimeClass` of its pod once the pods of this node are known.
    fn own_container(&self) -> OwnContainer {
        let mut own = self.settings.own_container.clone();
        if let Some(uid) = &own.pod {
            let pods = self.pods.borrow();
            own.is_pod_awaited = !pods.is_synced();
            own.runtime_class = pods.runtime_class(uid).map(str::to_owned);
        }
        own
    }

    /// Collects the facts of this moment, and writes the driver's spec if it has to change.
    fn collect_facts(&mut self) -> InjectionFacts {
        let configured = self.configured();
        let (driver, edits) = self.driver();
        let written = self.write_driver(edits).and_then(|()| self.prompt());
        let (settings, readers) = (&self.settings, &self.readers);
        let cdi = match written {
            Err(error) => Cdi::Unwritable(format!(
                "cannot write {}: {error}",
                settings.specs.path().display()
            )),
            Ok(()) if readers.has_reader() => Cdi::Read,
            Ok(()) if self.has_unread_start() => Cdi::Off,
            Ok(()) => Cdi::Unknown,
        };
        let vendor_specs = &settings.vendor_specs;
        self.has_management_spec |= vendor_specs.has(VendorKind::Management);
        let fleet = self.fleet.borrow();
        let uuids = fleet.gpus.iter().map(|entry| entry.device.uuid.as_str());
        let of_variable = VariableFacts {
            is_simulated: !fleet.needs_driver,
            toolkit_names_uuid: vendor_specs.names_any(VendorKind::Toolkit, uuids),
            has_management_spec: self.has_management_spec,
            own: self.own_container(),
            configured,
        };
        InjectionFacts {
            cdi,
            driver,
            variable: variable(&of_variable),
            exposure: exposure(&of_variable),
            has_hook: settings.has_runtime_hook,
        }
    }

    /// The configuration of the container runtime; `None` if the node's root is not mounted.
    fn configured(&mut self) -> Option<ConfiguredRuntime> {
        let host_root = &self.settings.host_root;
        // Without `--host-root` that is this container's own root; with it, `etc` need not be among the mounted directories.
        if host_root == Path::new("/") || !host_root.join("etc").is_dir() {
            return None;
        }
        if let Some((at, configured)) = self.configured
            && at.elapsed() < CONFIGURATION_INTERVAL
        {
            return Some(configured);
        }
        let configured = ConfiguredRuntime::read(&RootDir::new(host_root));
        self.configured = Some((Instant::now(), configured));
        Some(configured)
    }

    /// The source of the driver's libraries, and the edits of the driver's CDI device; none if no spec can be used.
    fn driver(&self) -> (Driver, Option<Edits>) {
        let settings = &self.settings;
        let fleet = self.fleet.borrow();
        // Simulated devices name a driver version that no library has.
        let running = fleet.driver_version.as_deref().filter(|_| fleet.needs_driver);
        match settings.vendor_specs.driver(running) {
            Ok((kind, edits)) => (Driver::Spec(kind.as_str()), Some(driver_edits(settings, edits))),
            Err(_) if !fleet.needs_driver => {
                (Driver::NotNeeded, Some(driver_edits(settings, Edits::default())))
            }
            Err(why) => (Driver::Missing(why), None),
        }
    }

    /// Writes the CDI device that brings the driver, unless the directory has it with the same edits.
    fn write_driver(&mut self, edits: Option<Edits>) -> io::Result<()> {
        // The spec of a driver that is gone stays: no container starts meanwhile, and the spec of the next driver replaces it.
        let Some(edits) = edits else { return Ok(()) };
        let specs = &self.settings.specs;
        // Another program may have emptied the directory, so the comparison with the last edits is not enough.
        let exists = specs.path().join(DRIVER_FILE).exists();
        if exists && self.driver.as_ref() == Some(&edits) {
            return Ok(());
        }
        if specs.write_driver(&edits)? {
            info!(dir = %specs.path().display(), "wrote the CDI device that brings the driver into containers");
        }
        self.driver = Some(edits);
        Ok(())
    }

    /// Prompts the runtime to read the specs, as long as no read has been seen.
    fn prompt(&mut self) -> io::Result<()> {
        if self.readers.has_reader() || self.prompted.is_some_and(|at| at.elapsed() < PROMPT_INTERVAL) {
            return Ok(());
        }
        self.prompted = Some(Instant::now());
        self.settings.specs.prompt_read()
    }

    /// True if the runtime has not read the spec with which this process let the first container of a running pod start.
    fn has_unread_start(&self) -> bool {
        // A checkpoint that cannot be read proves nothing.
        let Some(allocated) = self.checkpoint.read() else {
            return false;
        };
        let pods = self.pods.borrow();
        for entry in allocated.iter() {
            if let Some(pod) = pods.get(&entry.pod)
                && pod.stage == PodStage::Running
                && let Some(name) = device_of(&entry.answer)
                && self.readers.is_unread_by_start(&SpecDir::file(name))
            {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use daemon::api_server::Connection;
    use rstest::rstest;

    use super::*;
    use crate::inject::mode::Exposure;
    use crate::node::pods::PodUid;
    use crate::tests::api_server::ApiServer;
    use crate::tests::builders;
    use crate::tests::node_trees::NodeTree;

    fn injection(mode: Mode, certainty: Certainty, reason: &'static str) -> Injection {
        Injection {
            mode,
            certainty,
            reason,
            message: String::new(),
            exposure: None,
        }
    }

    /// The detector of a plugin with this container on a node with one GPU.
    fn detector(tree: &NodeTree, own: OwnContainer, pods: watch::Receiver<NodePods>) -> InjectionDetector {
        let mut settings = builders::settings();
        tree.path().clone_into(&mut settings.host_root);
        settings.specs = SpecDir::new(tree.path().join("cdi"));
        settings.own_container = own;
        let mut fleet = builders::fleet(1);
        fleet.needs_driver = true;
        let fleet = watch::channel(Arc::new(fleet)).1;
        let checkpoint = Arc::new(Checkpoint::new(tree.path(), settings.names.clone()));
        InjectionDetector {
            settings,
            fleet,
            pods,
            readers: Readers::default(),
            checkpoint,
            driver: None,
            prompted: None,
            has_management_spec: false,
            configured: None,
        }
    }

    /// In pods of others the variable has no effect if the plugin's own pod has a `RuntimeClass`.
    #[tokio::test(start_paused = true)]
    async fn a_decision_that_is_not_proven_waits_for_the_class_of_the_plugins_own_pod() {
        let tree = NodeTree::new(&[], &[]);
        let own = OwnContainer {
            pod: Some(PodUid::from("own")),
            visible_devices: Some("all".to_owned()),
            ..OwnContainer::default()
        };
        let (known, pods) = watch::channel(NodePods::default());
        let mut detector = detector(&tree, own, pods);
        detector.settings.injection_mode = None;
        let (sender, mut injection) = watch::channel(None);
        let connection = Connection::from(ApiServer::new().0);
        tokio::spawn(detect_injection(
            detector.settings,
            detector.fleet,
            detector.pods,
            detector.readers,
            detector.checkpoint,
            sender,
            daemon::events::recorder(&connection, "gpushare-device-plugin", None).0,
        ));
        tokio::time::sleep(INTERVAL * 5).await;
        assert_eq!(*injection.borrow(), None);
        known.send_modify(|pods| {
            pods.reset([]);
            pods.note_runtime_class(PodUid::from("own"), "nvidia".to_owned());
        });
        let decided = injection
            .wait_for(Option::is_some)
            .await
            .unwrap()
            .clone()
            .unwrap();
        assert_eq!(decided.mode, Mode::Cdi);
        assert_eq!(
            decided.exposure,
            Some(Exposure::RuntimeClass("nvidia".to_owned()))
        );
    }

    /// A privileged plugin on a node where NVIDIA's runtime becomes the default, and takes no part any more.
    #[tokio::test(start_paused = true)]
    async fn a_change_of_the_runtimes_configuration_is_noticed() {
        let tree = NodeTree::new(&[], &[]);
        let own = OwnContainer {
            is_privileged: true,
            ..OwnContainer::default()
        };
        let mut detector = detector(&tree, own, watch::channel(builders::pods([])).1);
        let mut now = || detector.collect_facts().exposure;
        assert!(matches!(now(), Some(Exposure::Unknown(_))));
        for (name, expected) in [
            ("runc", None),
            ("nvidia", Some(Exposure::EveryPod)),
            ("runc", None),
        ] {
            let text = format!("default_runtime_name = '{name}'\n");
            tree.write("etc/containerd/config.toml", text.as_bytes());
            tokio::time::advance(CONFIGURATION_INTERVAL).await;
            assert_eq!(now(), expected, "{name}");
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
        assert_eq!(takes_effect(Some(&proven), &decided, lasted), expected);
        assert!(takes_effect(None, &decided, lasted), "nothing was offered before");
        let impossible = injection(Mode::Cdi, Certainty::Impossible, "NoDriverSpec");
        assert!(takes_effect(Some(&impossible), &decided, lasted));
    }
}
