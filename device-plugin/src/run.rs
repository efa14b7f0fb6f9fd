//! Starts the parts of the plugin in its process.
//!
//! Both daemons start in the same phases: *state* (values that the parts share, and the metrics), *health* (probes and metrics
//! are served), *watches*, *tasks*, *servers*, *farewell* (the part that has to end in order after SIGTERM).
//!
//! A process with a [`Command`] does something else instead of serving devices. No other module knows all parts.

mod advertise;
mod devices;
mod farewell;
mod readiness;
mod tasks;
mod uninstall;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, ensure};
use daemon::api_server::Connection;
use daemon::events::{EventType, Recorder};
use daemon::health;
use daemon::metrics_text::MetricsText;
use daemon::process::Process;
use prometheus_client::registry::Registry;
use tokio::sync::{Mutex, mpsc, watch};

use crate::config::{Command, Config, EvictionReason, VendorServer};
use crate::devices::extended_resource::{ExtendedResource, Registrations};
use crate::devices::fleet::watch::Correction;
use crate::inject::cdi::readers::Readers;
use crate::inject::enforcement::Enforcements;
use crate::inject::enforcement::detect::detect_enforcement;
use crate::inject::injection::detect::detect_injection;
use crate::inject::mode::{Injection, Mode};
use crate::inject::runtime_hook::seen::SeenGpus;
use crate::inject::runtime_hook::{RuntimeHook, serve_runtime};
use crate::kubelet::boot;
use crate::kubelet::ended_pods::free_ended_pods;
use crate::kubelet::registration::{KubeletDir, Registration};
use crate::kubelet::socket_changes::watch_sockets;
use crate::metrics::Metrics;
use crate::node::pods::NodePods;
use crate::publish::PublisherInputs;
use crate::publish::application_faults::report_application_faults;
use crate::publish::corrections::correct_health;
use crate::publish::health_reaction::react_to_health;
use crate::publish::memory_use::measure_memory_use;
use crate::publish::memory_use::overrun::report_overruns;
use crate::publish::node_gauges::{GaugeSources, NodeGauges};
use crate::publish::node_overrides::NodeOverrides;
use crate::publish::plugin_state::write_plugin_state;
use crate::start::assigned::mark_assigned;
use crate::start::blocked::BlockedStarts;
use crate::start::node_state::NodeState;
use crate::start::reconcile::Reconciler;
use crate::start::swap::{RecordSwaps, follow_swaps};
use crate::start::{StartChecker, StartContext};

use advertise::keeps_memory_units;
use devices::find_devices;
use farewell::Farewell;
use tasks::boot_id;

/// Runs the daemon in its process, until SIGTERM or SIGINT.
pub async fn run(config: Config, process: Process) -> anyhow::Result<()> {
    match config.command {
        Some(Command::Uninstall { now }) => uninstall::run(config, now, process).await,
        Some(Command::AtBoot) => {
            let names = config.resource_names();
            let listed = boot::run(&config.device_plugin_dir, &names, process.signal).await;
            listed.context("at-boot: pods that hold devices may fail")
        }
        None => serve_devices(config, process).await,
    }
}

/// Refuses flags that contradict each other, before anything is started.
fn check_flags(config: &Config) -> anyhow::Result<()> {
    let is_cdi = config.inject.mode() == Some(Mode::Cdi);
    let several_ours = "--vendor-resource: this plugin serves the whole GPUs of one vendor, so only one resource can be ours";
    ensure!(config.served_by(VendorServer::Ours).count() <= 1, several_ours);
    let without_cdi = "--numa-hints needs --inject=cdi: kubelet then offers only IDs of the NUMA node that it has chosen, which \
                    need not be those of the GPU that the scheduler has chosen, and only a CDI spec names the GPU whatever the IDs";
    ensure!(!config.numa_hints || is_cdi, without_cdi);
    Ok(())
}

/// Starts all parts of the plugin in the phases that the head of this file names, and serves until the process ends.
async fn serve_devices(config: Config, mut process: Process) -> anyhow::Result<()> {
    check_flags(&config)?;

    // State.
    let overrides =
        Arc::new(NodeOverrides::read(&config.override_files()).context("--device-labels, --gpu-partitions")?);
    let settings = config.settings();
    // Each resource that this node has a name for is registered with kubelet sooner or later; the plugin is ready once all are.
    let mut unregistered = Registrations::from(ExtendedResource::ALL.map(|resource| (resource, false)));
    unregistered.retain(|resource, _| settings.names.of(*resource).is_some());
    let registrations = watch::Sender::new(unregistered);
    let pods = watch::Sender::new(NodePods::default());
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let gauges = NodeGauges::register(&mut registry);

    // Health. Probes are answered before the devices are found, since a driver may need minutes.
    let (absence_sender, absence) = watch::channel(None);
    let (known_pods, registered, no_devices) = (pods.subscribe(), registrations.subscribe(), absence.clone());
    let readiness = move || readiness::check(&known_pods, &registered, &no_devices);
    let probes = health::router(readiness, MetricsText::new(registry));
    process.serve_health(probes).await?;
    let Some(inventory) = process.complete(find_devices(&config, &absence_sender)).await? else {
        // SIGTERM came first.
        return Ok(());
    };

    // Watches. From here to the end of this function nothing waits for the API server, and no task waits for another: kubelet
    // gets the resources first, then the pods arrive, and containers start once the Device object and the pods are known.
    let connection = Connection::new().await?;
    let excluded = inventory.excluded.clone();
    let devices = tasks::watch_devices(&mut process.tasks, &config, inventory)?;
    tasks::watch_pods(&mut process.tasks, &config, &connection, pods.clone());
    let fleet = devices.fleet.clone();
    // kubelet's checkpoint is read before registration, after which it has the answers of this process.
    let keeps_units = keeps_memory_units(&config.device_plugin_dir, &settings, &fleet.borrow());
    let readers = Readers::default();
    let spec_dir = settings.specs.path().to_owned();
    let watching = readers.clone().watch(spec_dir);
    process.tasks.spawn("readers of CDI specs", watching);

    // Tasks. The tasks that decide on injection mode and enforcement levels read `NodeState`, which has the receivers of their
    // decisions, so the channels come first.
    let (injection_sender, injection) = watch::channel(None);
    let (levels, enforcements) = watch::channel(Arc::default());
    let mut node = NodeState::new(settings, fleet, pods.subscribe(), &config.device_plugin_dir);
    (node.injection, node.readers, node.enforcements) = (injection, readers, enforcements);
    let node = Arc::new(node);
    let blocked = BlockedStarts::default();
    let (measured_sender, measured) = watch::channel(None);
    gauges.show(GaugeSources {
        node: Arc::clone(&node),
        registered: registrations.subscribe(),
        blocked: blocked.clone(),
        memory_use: measured.clone(),
        metrics: metrics.clone(),
    });
    let recorder = tasks::write_events(&mut process.tasks, &config, &connection);
    for gpu in &excluded {
        recorder.node(EventType::Warning, "GPUNotShared", gpu.to_string());
    }
    let mut plugin = Plugin {
        config,
        connection,
        node,
        recorder,
        metrics,
        process,
    };
    let (seen_by_hook, seen) = watch::channel(SeenGpus::default());
    plugin.decide_injection(injection_sender);
    let starts = plugin.check_starts(pods, blocked);
    let published = tasks::publish(
        &mut plugin.process.tasks,
        &plugin.config,
        &plugin.connection,
        &plugin.node,
        (seen, overrides, absence),
        plugin.recorder.clone(),
    );
    plugin.decide_enforcement(&published, levels);
    if plugin.config.measure_memory || plugin.config.driver_limits {
        let (node, source) = (Arc::clone(&plugin.node), plugin.config.source());
        let procfs = plugin.config.measure_memory.then_some(PathBuf::from("/proc"));
        let measuring = measure_memory_use(node, source, procfs, measured_sender);
        plugin.spawn("memory in use", measuring);
        let (node, recorder) = (Arc::clone(&plugin.node), plugin.recorder.clone());
        let reporting = report_overruns(node, measured.clone(), recorder);
        plugin.spawn("overruns of memory", reporting);
    }
    let (node, recorder) = (Arc::clone(&plugin.node), plugin.recorder.clone());
    let reporting = report_application_faults(node, devices.faults, measured, recorder);
    plugin.spawn("faults of applications", reporting);
    plugin.react_to_health(&published, devices.corrections);
    plugin.follow_kubelet();

    // Servers.
    plugin.serve_runtime(seen_by_hook);
    plugin.serve_kubelet(&starts, (&published, keeps_units), &registrations);

    // Farewell.
    let farewell = plugin.publish_state(&registrations);
    plugin.process.serve_until_signal(farewell.run()).await
}

/// The values that several tasks of [`serve_devices`] share. Each method starts tasks or servers.
struct Plugin {
    config: Config,
    connection: Connection,
    node: Arc<NodeState>,
    recorder: Recorder,
    metrics: Metrics,
    process: Process,
}

impl Plugin {
    fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.process.tasks.spawn(name, task);
    }

    /// Starts the task that decides on the injection mode, now and whenever the runtime or the driver changes.
    fn decide_injection(&mut self, injection: watch::Sender<Option<Injection>>) {
        let detecting = detect_injection(
            self.node.settings.clone(),
            self.node.fleet.clone(),
            self.node.pods.clone(),
            self.node.readers.clone(),
            Arc::clone(&self.node.checkpoint),
            injection,
            self.recorder.clone(),
        );
        self.spawn("injection mode", detecting);
    }

    /// Starts the tasks that compare running pods with their allocation records. Returns the pre-start check.
    fn check_starts(&mut self, pods: watch::Sender<NodePods>, blocked: BlockedStarts) -> Arc<StartChecker> {
        let node_name = self.config.node_name.clone();
        let swaps = RecordSwaps::new(&self.connection, node_name, pods, self.metrics.clone());
        let context = StartContext {
            node: Arc::clone(&self.node),
            client: self.connection.client.clone(),
            evicts_mismatched: self.config.evict.contains(&EvictionReason::Mismatch),
            unplaced: self.config.unplaced,
            swaps: Arc::new(Mutex::new(swaps)),
            recorder: self.recorder.clone(),
            metrics: self.metrics.clone(),
        };
        let (connection, node) = (self.connection.clone(), Arc::clone(&self.node));
        let following = follow_swaps(connection, node, Arc::clone(&context.swaps));
        self.spawn("swapped records", following);
        let comparing = Reconciler::new(context.clone()).run();
        self.spawn("comparison of running pods", comparing);
        Arc::new(StartChecker::new(context, blocked))
    }

    /// Starts the task that decides on the enforcement level of memory limits on each GPU.
    fn decide_enforcement(&mut self, published: &PublisherInputs, levels: watch::Sender<Arc<Enforcements>>) {
        let detecting = detect_enforcement(
            self.node.settings.clone(),
            self.node.fleet.clone(),
            self.node.injection.clone(),
            published.node.clone(),
            levels,
        );
        self.spawn("enforcement of limits", detecting);
    }

    /// Starts the tasks that correct the health of devices by the Device object, and react to changes of health.
    fn react_to_health(&mut self, published: &PublisherInputs, corrections: mpsc::Sender<Correction>) {
        let correct = correct_health(
            self.connection.clone(),
            self.config.node_name.clone(),
            boot_id(),
            published.device.clone(),
            self.node.fleet.clone(),
            corrections,
        );
        self.spawn("corrections of health", correct);
        let evicts = self.config.evict.contains(&EvictionReason::Unhealthy);
        let (node, client) = (Arc::clone(&self.node), self.connection.client.clone());
        let reaction = react_to_health(node, client, self.recorder.clone(), evicts);
        self.spawn("pods on unhealthy devices", reaction);
    }

    /// Starts the tasks about pods that kubelet has admitted.
    fn follow_kubelet(&mut self) {
        let noting = note_existing_pods(Arc::clone(&self.node));
        self.spawn("pods of an earlier process", noting);
        self.spawn("pods that have ended", free_ended_pods(Arc::clone(&self.node)));
        let marking = mark_assigned(self.connection.clone(), Arc::clone(&self.node));
        self.spawn("marks of assigned pods", marking);
    }

    /// Starts the NRI hook of the container runtime, if `--nri-socket` names a socket; `seen` gets the GPUs that containers see.
    fn serve_runtime(&mut self, seen: watch::Sender<SeenGpus>) {
        if let Some(socket) = self.config.nri_socket.clone() {
            let hook = RuntimeHook {
                settings: self.node.settings.clone(),
                fleet: self.node.fleet.clone(),
                pods: self.node.pods.clone(),
                injection: self.node.injection.clone(),
                enforcements: self.node.enforcements.clone(),
                metrics: self.metrics.clone(),
                seen,
                unrestricted: self.config.unrestricted_namespaces.clone(),
            };
            self.spawn("runtime hook", serve_runtime(hook, socket));
        }
    }

    /// Starts a server for each resource, which registers the resource with kubelet and answers kubelet's calls.
    fn serve_kubelet(
        &mut self,
        starts: &Arc<StartChecker>,
        (published, keeps_units): (&PublisherInputs, bool),
        registrations: &watch::Sender<Registrations>,
    ) {
        let resources: Vec<ExtendedResource> = registrations.borrow().keys().copied().collect();
        let dir = KubeletDir::new(self.config.device_plugin_dir.clone());
        let (changes, socket_changes) = watch::channel(());
        let watching = watch_sockets(dir.path.clone(), dir.interval, changes);
        self.spawn("sockets of kubelet", watching);
        for resource in resources {
            let registration = Registration {
                dir: dir.clone(),
                resource,
                node: Arc::clone(&self.node),
                starts: Arc::clone(starts),
                registrations: registrations.clone(),
                socket_changes: socket_changes.clone(),
            };
            let stop = self.process.stop.clone();
            let serving = advertise::serve(registration, published.clone(), keeps_units, stop);
            self.process.servers.spawn(resource.socket(), serving);
        }
    }

    /// Starts the task that writes into the Node whether this plugin serves; the returned farewell waits for its last write.
    fn publish_state(&mut self, registrations: &watch::Sender<Registrations>) -> Farewell {
        let (sender, is_written) = watch::channel(false);
        let writing = write_plugin_state(
            self.connection.clone(),
            self.config.node_name.clone(),
            self.config.pod_uid.clone().filter(|uid| !uid.is_empty()),
            registrations.subscribe(),
            self.process.signal.clone(),
            sender,
        );
        self.spawn("state of the plugin", writing);
        Farewell {
            registered: registrations.subscribe(),
            is_written,
            pods: self.node.pods.clone(),
        }
    }
}

/// Notes the pods for which an earlier process of the plugin may have answered Allocate: those of the first complete list.
async fn note_existing_pods(node: Arc<NodeState>) {
    let mut pods = node.pods.clone();
    if let Ok(pods) = pods.wait_for(NodePods::is_synced).await {
        node.note_existing_pods(&pods);
    }
    // A task that returns would end the process.
    std::future::pending::<()>().await;
}

#[cfg(test)]
mod tests;
