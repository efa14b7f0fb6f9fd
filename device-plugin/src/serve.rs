//! Puts the parts together: finds the devices, starts every watch and server, and ends them on a signal.
//!
//! The only place that knows all parts; each `serve_*` and `watch_*` starts one.

mod ending;

mod offer;
mod readiness;
mod uninstall;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use daemon::api_server::Connection;
use daemon::events::{self, EventType, Recorder};
use daemon::health;
use daemon::panics::{log_panics, named};
use daemon::signals::cancel_on_signal;
use daemon::supervise::Tasks;
use daemon::watchdog::{self, Probe};
use kube::Api;
use prometheus_client::registry::Registry;
use proto::kubelet_allocations::KubeletAllocations;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::assigned::mark_assigned;
use crate::cdi::readers::Readers;
use crate::config::{Config, VendorServer};
use crate::device_ids::IdScheme;
use crate::envvar::swap::{RecordSwaps, follow_swaps};
use crate::extended_resource::ExtendedResource;
use crate::fleet::Fleet;
use crate::fleet::clear::watch_clearance;
use crate::fleet::recall::{self, recall};
use crate::fleet::watch::{Channels, Correction, DriverReplaced, Number, discover, watch_devices};
use crate::health::{ApplicationFault, Health};
use crate::health_reaction::{self, look_after};
use crate::injection::follow::{Listeners, NodeFacts, follow};
use crate::injection::{Injection, Mode, OwnContainer};
use crate::inventory::{Inventory, InventoryError};
use crate::kubelet::boot;
use crate::kubelet::ended_pods::free_ended_pods;
use crate::kubelet::registration::{KubeletDir, Registration};
use crate::metrics::Metrics;
use crate::node_gauges::NodeGauges;
use crate::node_state::NodeState;
use crate::pods::Pods;
use crate::pods::watch::watch_pods;
use crate::publish::additions::{Additions, watch_additions};
use crate::publish::device_watch::{Held, watch_device};
use crate::publish::node_watch::watch_node;
use crate::publish::state::StateWriter;
use crate::publish::without_devices::watch_without_devices;
use crate::publish::{Facts, Publisher, Sources};
use crate::runtime_hook::seen::Seen;
use crate::runtime_hook::{Hook, serve_runtime};
use crate::start::StartContext;
use crate::start::blocked::BlockedStarts;
use crate::start::check::StartChecker;
use crate::start::reconcile::Reconciler;
use crate::vendor::{self, AdminAccess, watch_vendor};
use crate::verify::pod_resources::PodResources;

use ending::Ending;
use offer::{Published, keeps_memory_units};
use readiness::Readiness;

/// How often a node without devices is looked at again.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// How many faults of applications may wait to be told; more are dropped.
const MOST_FAULTS: usize = 64;

/// How long the end may take.
const ENDING: Duration = Duration::from_secs(5);

/// Runs the daemon until SIGTERM or SIGINT, on one thread: there is little to do, and memory is for pods.
///
/// # Errors
/// What keeps it from starting.
pub fn start(config: Config) -> anyhow::Result<()> {
    log_panics();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    watch_for_hangs(config.hang_timeout, runtime.handle().clone())?;
    let ended = match config.uninstall {
        Some(when) => runtime.block_on(uninstall::run(config, when)),
        None if config.at_boot => runtime.block_on(list_after_boot(config)),
        None => runtime.block_on(run(config)),
    };
    // A driver that hangs must not keep the process from ending.
    runtime.shutdown_background();
    ended
}

/// Ends the process if it hangs for so long; never for zero.
///
/// Calls of the driver run on threads of their own, which may hang. The one thread of the runtime reads and writes small files
/// of kubelet and of the CDI directory, and waits for nothing else.
fn watch_for_hangs(limit: Duration, runtime: Handle) -> anyhow::Result<()> {
    watchdog::watch(limit, vec![Probe::of_runtime(runtime)])
        .context("cannot start the thread that watches for hangs")
}

/// Lists to kubelet the devices that it remembers, until the plugin's pod serves.
async fn list_after_boot(config: Config) -> anyhow::Result<()> {
    let stop = cancel_on_signal().context("cannot wait for signals")?;
    boot::run(&config.device_plugin_dir, &config.settings.names, stop)
        .await
        .context("--at-boot: pods that hold devices may fail")
}

/// Refuses flags that contradict each other.
fn check(config: &Config) -> anyhow::Result<()> {
    let several = "--vendor-resource: this plugin serves the whole GPUs of one vendor, so only one resource can be ours";
    ensure!(config.served_by(VendorServer::Ours).count() <= 1, several);
    let unproven = "--numa-hints needs --inject=cdi: kubelet then offers only IDs of the NUMA node that it has chosen, which \
                    need not be those of the GPU that the scheduler has chosen, and only a CDI spec names the GPU whatever the IDs";
    ensure!(
        !config.numa_hints || config.settings.injection.mode == Some(Mode::Cdi),
        unproven
    );
    Ok(())
}

async fn run(config: Config) -> anyhow::Result<()> {
    check(&config)?;
    let additions =
        Arc::new(Additions::read(&config.additions).context("--device-labels, --gpu-partitions")?);
    let signal = cancel_on_signal().context("cannot wait for signals")?;
    let stop = CancellationToken::new();
    let (pods, pods_seen) = watch::channel(Pods::default());
    let served = ExtendedResource::ALL
        .into_iter()
        .filter(|resource| config.settings.names.of(*resource).is_some());
    let registered: Vec<_> = served
        .map(|resource| (resource, watch::Sender::new(false)))
        .collect();
    let all_registered: Vec<_> = registered.iter().map(|(_, sender)| sender.subscribe()).collect();
    let readiness = Readiness {
        pods: pods_seen,
        registered: all_registered.clone(),
    };
    let mut parts = Parts::default();
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let gauges = NodeGauges::register(&mut registry);
    parts
        .serve_health(&config, move || readiness.check(), Arc::new(registry))
        .await?;
    let inventory = tokio::select! {
        () = signal.cancelled() => return Ok(()),
        ended = parts.watches.ended() => return Err(ended.into()),
        found = find_devices(&config) => found?,
    };
    // From here to the end of this function nothing waits for the API server, and no task waits for another: kubelet has the
    // resources first, then come the pods, and containers start once the Device object and the pods are known.
    let connection = Connection::new(config.kubeconfig.as_deref()).await?;
    let excluded = inventory.excluded.clone();
    let Devices {
        fleet,
        faults,
        corrections,
    } = parts.watch_devices(&config, inventory)?;
    // kubelet's checkpoint is read before registration, after which kubelet writes down what this process answers.
    let keeps_units = keeps_memory_units(&config.device_plugin_dir, &config.settings, &fleet.borrow());
    let (tell_injection, injection) = watch::channel(None);
    let readers = parts.watch_readers(&config);
    let node = NodeState::new(
        config.settings.clone(),
        fleet,
        pods.subscribe(),
        &config.device_plugin_dir,
    );
    let node = Arc::new(node.with_injection(injection.clone(), readers));
    let blocked = BlockedStarts::default();
    gauges.show(
        Arc::clone(&node),
        registered
            .iter()
            .map(|(resource, sender)| (*resource, sender.subscribe()))
            .collect(),
        blocked.clone(),
    );
    let recorder = parts.write_events(&config, &connection);
    for gpu in &excluded {
        recorder.node(EventType::Warning, "GPUNotShared", gpu.to_string());
    }
    let listeners = Listeners {
        injection: tell_injection,
        recorder: recorder.clone(),
        metrics: metrics.clone(),
    };
    parts.watches.spawn(
        "way of injection",
        follow(Arc::clone(&node), node_facts(&config), listeners),
    );
    let context = start_context(&config, &connection, &node, &pods, (&recorder, &metrics));
    let starts = parts.check_starts(&connection, context, blocked);
    parts.watch_pods(&config, &connection, pods);
    let seen = parts.serve_runtime(&config, &node, metrics);
    let sources = (node.fleet.clone(), node.pods.clone(), injection);
    let published = parts.publish(&config, &connection, sources, seen, additions, recorder.clone());
    let published = Published {
        keeps_units,
        ..published
    };
    let device = published.device.clone();
    parts.watches.spawn(
        "corrections of health",
        correct_health(
            connection.clone(),
            config.node_name.to_string(),
            device,
            node.fleet.clone(),
            corrections,
        ),
    );
    let sources = health_reaction::Sources {
        fleet: node.fleet.clone(),
        pods: node.pods.clone(),
        faults,
        recorder,
    };
    parts.watches.spawn(
        "pods on unhealthy devices",
        look_after(
            connection.client.clone(),
            sources,
            config.evicts_from_sick_devices,
        ),
    );
    parts.follow_checkpoint(&config, &node);
    parts.watches.spawn(
        "marks of assigned pods",
        mark_assigned(connection.clone(), Arc::clone(&node)),
    );
    parts.publish_state(
        &config,
        &connection,
        all_registered,
        node.pods.clone(),
        (signal, stop.clone()),
    );
    parts.serve_kubelet(&config, &starts, &node, &published, &stop, registered);
    parts.run(stop).await?;
    info!("ended");
    Ok(())
}

/// Everything that runs.
#[derive(Default)]
struct Parts {
    /// The task that follows the devices, and ends when only another process can.
    devices: JoinSet<DriverReplaced>,
    /// Tasks that are simply dropped at the end.
    watches: Tasks,
    /// Tasks that have something to close.
    servers: Tasks,
}

/// This side of what follows the devices.
struct Devices {
    fleet: watch::Receiver<Arc<Fleet>>,
    faults: mpsc::Receiver<ApplicationFault>,
    /// Takes what others know of the devices' health.
    corrections: mpsc::Sender<Correction>,
}

impl Parts {
    fn watch_devices(&mut self, config: &Config, inventory: Inventory) -> anyhow::Result<Devices> {
        let number = number(config);
        let fleet = Fleet {
            is_health_loaded: false,
            ..Fleet::new(inventory.clone(), number(&inventory)?)
        };
        describe(config, &fleet);
        let health = Health::new(config.health.clone(), inventory.ids().cloned());
        let (tell_fleet, fleet) = watch::channel(Arc::new(fleet));
        let (tell_fault, faults) = mpsc::channel(MOST_FAULTS);
        let (correct, corrections) = mpsc::channel(MOST_FAULTS);
        let channels = Channels {
            fleet: tell_fleet,
            faults: tell_fault,
            corrections,
        };
        self.devices.spawn(named(
            "watch of devices",
            watch_devices(config.source.clone(), inventory, health, number, channels),
        ));
        Ok(Devices {
            fleet,
            faults,
            corrections: correct,
        })
    }

    fn watch_pods(&mut self, config: &Config, connection: &Connection, pods: watch::Sender<Pods>) {
        let (node, names) = (
            config.node_name.to_string(),
            config.settings.names.cluster.clone(),
        );
        self.watches
            .spawn("watch of pods", watch_pods(connection.clone(), node, names, pods));
    }

    /// Tells the cluster of a node whose devices are away, so that what was published of them before goes away too.
    fn without_devices(config: &Config, connection: &Connection) -> anyhow::Result<Self> {
        let mut parts = Self::default();
        let nothing = Inventory::default();
        let (fleet, none) = watch::channel(Arc::new(Fleet::new(nothing.clone(), number(config)(&nothing)?)));
        let (pods, pods_seen) = watch::channel(Pods::default());
        parts.watch_pods(config, connection, pods);
        let recorder = parts.write_events(config, connection);
        let seen = watch::channel(Seen::default()).1;
        parts.publish(
            config,
            connection,
            (none, pods_seen, watch::channel(None).1),
            seen,
            Arc::default(),
            recorder,
        );
        parts
            .watches
            .spawn("absent devices", async move { fleet.closed().await });
        Ok(parts)
    }

    fn publish(
        &mut self,
        config: &Config,
        connection: &Connection,
        (fleet, pods, injection): (
            watch::Receiver<Arc<Fleet>>,
            watch::Receiver<Pods>,
            watch::Receiver<Option<Injection>>,
        ),
        seen: watch::Receiver<Seen>,
        additions: Arc<Additions>,
        recorder: Recorder,
    ) -> Published {
        let (sender, node) = watch::channel(None);
        self.watches.spawn(
            "watch of the node",
            watch_node(connection.clone(), config.node_name.to_string(), sender),
        );
        let (sender, device) = watch::channel(Held::default());
        self.watches.spawn(
            "watch of the Device object",
            watch_device(connection.clone(), config.node_name.to_string(), sender),
        );
        let without_devices = self.watch_without_devices(config, pods.clone(), seen.clone());
        let sources = vendor::Sources {
            fleet: fleet.clone(),
            pods: pods.clone(),
            seen,
        };
        let checkpoints = self.watch_vendor(config, connection, sources, recorder);
        let published = Published {
            node: node.clone(),
            device: device.clone(),
            checkpoints: checkpoints.clone(),
            keeps_units: false,
        };
        let additions = self.watch_additions(config, additions);
        let sources = Sources {
            fleet,
            pods,
            node,
            device,
            checkpoints,
            additions,
            injection,
            without_devices,
        };
        let facts = Facts {
            node_name: config.node_name.to_string(),
            names: config.settings.names.cluster.clone(),
            memory_unit: config.settings.memory_unit,
            serves_vendor: config.serves_vendor(),
            partition_policy: config.partition_policy,
            boot_id: boot_id(),
        };
        self.watches
            .spawn("publication", Publisher::new(connection, facts, sources).run());
        published
    }

    /// Shows the scheduler whether this plugin serves kubelet, and cancels `stop` some time after the signal.
    fn publish_state(
        &mut self,
        config: &Config,
        connection: &Connection,
        registered: Vec<watch::Receiver<bool>>,
        pods: watch::Receiver<Pods>,
        (signal, stop): (CancellationToken, CancellationToken),
    ) {
        let (sender, is_written) = watch::channel(false);
        let writer = StateWriter::new(connection, config.node_name.to_string(), config.pod_uid.clone());
        self.watches.spawn(
            "state of the plugin",
            writer.run(registered.clone(), signal.clone(), sender),
        );
        self.watches.spawn(
            "end",
            Ending {
                registered,
                is_written,
                pods,
            }
            .run(signal, stop),
        );
    }

    fn watch_without_devices(
        &mut self,
        config: &Config,
        pods: watch::Receiver<Pods>,
        seen: watch::Receiver<Seen>,
    ) -> watch::Receiver<Option<String>> {
        let (sender, receiver) = watch::channel(None);
        self.watches.spawn(
            "pods without devices",
            watch_without_devices(config.device_plugin_dir.clone(), pods, seen, sender),
        );
        receiver
    }

    fn watch_additions(&mut self, config: &Config, first: Arc<Additions>) -> watch::Receiver<Arc<Additions>> {
        let (sender, receiver) = watch::channel(first);
        self.watches.spawn(
            "device labels",
            watch_additions(config.additions.clone(), config.source.probe_interval(), sender),
        );
        receiver
    }

    fn watch_vendor(
        &mut self,
        config: &Config,
        connection: &Connection,
        sources: vendor::Sources,
        recorder: Recorder,
    ) -> watch::Receiver<Option<KubeletAllocations>> {
        let settings = vendor::Settings {
            resources: config
                .served_by(VendorServer::Vendor)
                .map(str::to_owned)
                .collect(),
            ours: config.settings.names.whole.clone(),
            dra_drivers: config.dra_drivers.names().clone(),
            visible_devices_env: config.settings.visible_devices_env.clone(),
            socket: config.pod_resources_socket.clone(),
            device_plugin_dir: config.device_plugin_dir.clone(),
            has_hook: config.nri_socket.is_some(),
        };
        let (sender, checkpoints) = watch::channel(None);
        let sinks = vendor::Sinks {
            checkpoints: sender,
            recorder,
        };
        self.watches.spawn(
            "other plugins' devices",
            watch_vendor(
                settings,
                sources,
                AdminAccess::new(connection.client.clone()),
                sinks,
            ),
        );
        checkpoints
    }

    /// Registers each resource with kubelet, and serves it.
    fn serve_kubelet(
        &mut self,
        config: &Config,
        starts: &Arc<StartChecker>,
        node: &Arc<NodeState>,
        published: &Published,
        stop: &CancellationToken,
        registered: Vec<(ExtendedResource, watch::Sender<bool>)>,
    ) {
        for (resource, is_registered) in registered {
            let registration = Registration {
                dir: KubeletDir::new(config.device_plugin_dir.clone()),
                resource,
                node: Arc::clone(node),
                starts: Arc::clone(starts),
                is_registered,
            };
            let serving = offer::serve(registration, published.clone(), stop.clone());
            self.servers.spawn(resource.socket(), serving);
        }
    }

    /// Answers the container runtime, if its hook is wanted; which GPUs containers see, as it tells.
    fn serve_runtime(
        &mut self,
        config: &Config,
        node: &Arc<NodeState>,
        metrics: Metrics,
    ) -> watch::Receiver<Seen> {
        let (sender, seen) = watch::channel(Seen::default());
        if let Some(socket) = config.nri_socket.clone() {
            self.watches.spawn(
                "runtime hook",
                serve_runtime(
                    Hook::new(
                        Arc::clone(node),
                        metrics,
                        sender,
                        config.unrestricted_namespaces.clone(),
                    ),
                    socket,
                ),
            );
        }
        seen
    }

    /// Sees when the container runtime reads CDI specs.
    fn watch_readers(&mut self, config: &Config) -> Readers {
        let readers = Readers::default();
        self.watches.spawn(
            "readers of CDI specs",
            readers
                .clone()
                .watch(config.settings.injection.specs.path().to_owned()),
        );
        readers
    }

    fn write_events(&mut self, config: &Config, connection: &Connection) -> Recorder {
        let (recorder, writer) = events::recorder(
            connection,
            "gpushare-device-plugin",
            Some(config.node_name.to_string()),
        );
        self.watches.spawn("events", writer.run());
        recorder
    }

    /// Starts what keeps running pods and their records in step, and returns the check before each start.
    fn check_starts(
        &mut self,
        connection: &Connection,
        context: StartContext,
        blocked: BlockedStarts,
    ) -> Arc<StartChecker> {
        self.watches.spawn(
            "swapped records",
            follow_swaps(
                connection.clone(),
                Arc::clone(&context.node),
                Arc::clone(&context.swaps),
            ),
        );
        self.watches.spawn(
            "comparison of running pods",
            Reconciler::new(context.clone()).run(),
        );
        Arc::new(StartChecker::new(context, blocked))
    }

    /// Keeps this process and kubelet's checkpoint in step.
    fn follow_checkpoint(&mut self, config: &Config, node: &Arc<NodeState>) {
        self.watches
            .spawn("pods of an earlier process", note_existing_pods(Arc::clone(node)));
        let pod_resources = PodResources::new(config.pod_resources_socket.clone());
        self.watches.spawn(
            "pods that have ended",
            free_ended_pods(Arc::clone(node), pod_resources),
        );
    }

    async fn serve_health(
        &mut self,
        config: &Config,
        readiness: impl Fn() -> Result<(), String> + Clone + Send + Sync + 'static,
        registry: Arc<Registry>,
    ) -> anyhow::Result<()> {
        let Some(address) = config.health_listen else {
            return Ok(());
        };
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("--health-listen: cannot listen on {address}"))?;
        self.watches.spawn(
            "probes and metrics",
            serve_health(listener, health::router(readiness, registry)),
        );
        Ok(())
    }

    /// Until the end is asked for; then closes what has to be closed.
    ///
    /// # Errors
    /// Something ended that goes on as long as the process; the rest is closed all the same.
    async fn run(mut self, stop: CancellationToken) -> anyhow::Result<()> {
        let ended = tokio::select! {
            biased;
            () = stop.cancelled() => {
                info!("asked to end");
                Ok(())
            }
            Some(ended) = self.devices.join_next() => Err(ended.map_or_else(devices_failed, |replaced| anyhow!(replaced))),
            ended = self.watches.ended() => Err(ended.into()),
            ended = self.servers.ended() => Err(ended.into()),
        };
        if ended.is_err() {
            self.servers.abort_all();
        }
        let closed = timeout(ENDING, self.servers.all_ended()).await;
        if closed.is_err() {
            warn!("not everything could be closed in time");
        }
        ended
    }
}

/// Answers until the task is dropped.
async fn serve_health(listener: TcpListener, routes: axum::Router) {
    if let Err(error) = axum::serve(listener, routes).await {
        warn!(%error, "health requests are no longer answered");
    }
}

/// Hands on what the Device object says of the devices' health: first the errors that an earlier process saw, then what an
/// operator clears.
async fn correct_health(
    connection: Connection,
    node_name: String,
    device: watch::Receiver<Held>,
    fleet: watch::Receiver<Arc<Fleet>>,
    corrections: mpsc::Sender<Correction>,
) {
    let devices = Api::all(connection.client.clone());
    let mut backoff = connection.contact.backoff(recall::PAUSES);
    let recalled = recall(&devices, &node_name, boot_id().as_deref(), &mut backoff).await;
    // The task that follows the devices has this channel's other end as long as the process lives.
    let _ = corrections.send(Correction::Recalled(recalled)).await;
    watch_clearance(devices, device, fleet, corrections).await;
}

fn devices_failed(error: JoinError) -> anyhow::Error {
    anyhow!(error).context("task \"watch of devices\" has failed, and the process with it")
}

/// The devices of this node; waits for some if the operator wishes so.
async fn find_devices(config: &Config) -> anyhow::Result<Inventory> {
    let mut meanwhile = None;
    loop {
        let mut found = std::pin::pin!(discover(&config.source));
        let found = loop {
            if let Ok(found) = timeout(LOOK_AGAIN, &mut found).await {
                break found;
            }
            warn!(
                "the driver does not answer: a call of it hangs, which a reset of the GPU or a reboot of this node ends"
            );
        };
        let error = match found {
            Ok(inventory) => return Ok(inventory),
            Err(error) => error,
        };
        let cause = error.downcast_ref::<InventoryError>();
        if !cause.is_some_and(|cause| config.no_gpu.waits_after(cause)) {
            return Err(error);
        }
        let is_by_choice = cause.is_some_and(InventoryError::is_by_choice);
        warn!(error = %format!("{error:#}"), "no devices to share, looking again in {} s", LOOK_AGAIN.as_secs());
        let parts = if let Some(parts) = &mut meanwhile {
            parts
        } else {
            let connection = Connection::new(config.kubeconfig.as_deref()).await?;
            let mut parts = Parts::without_devices(config, &connection)?;
            if is_by_choice {
                parts.write_events(config, &connection).node(
                    EventType::Warning,
                    "GPUNotShared",
                    format!("{error:#}"),
                );
            }
            meanwhile.insert(parts)
        };
        tokio::select! {
            () = sleep(LOOK_AGAIN) => {}
            ended = parts.watches.ended() => return Err(ended.into()),
        }
    }
}

/// The facts that show how this process got NVML, and so if the container runtime acts on the vendor's variable.
fn node_facts(config: &Config) -> NodeFacts {
    let own = OwnContainer {
        has_driver_root: !config.driver_roots.is_empty(),
        is_privileged: is_privileged(),
        runtime_class: config.runtime_class.clone(),
        value: config.visible_devices.clone(),
    };
    NodeFacts {
        own,
        has_hook: config.nri_socket.is_some(),
    }
}

/// The boot of this node.
fn boot_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}

/// Returns true if this process has the rights of a privileged container (`CAP_SYS_ADMIN`).
fn is_privileged() -> bool {
    const CAP_SYS_ADMIN: u32 = 21;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .map(|mask| u64::from_str_radix(mask.trim(), 16));
    effective.is_some_and(|mask| mask.is_ok_and(|mask| mask >> CAP_SYS_ADMIN & 1 == 1))
}

fn number(config: &Config) -> Number {
    let (slots, unit) = (config.slots.get(), config.settings.memory_unit);
    let (shared, has_hints) = (config.shared_devices.clone(), config.numa_hints);
    Box::new(move |inventory| {
        let shared: Vec<_> = inventory
            .gpus
            .iter()
            .filter(|gpu| shared.includes(gpu))
            .cloned()
            .collect();
        IdScheme::with_numa_nodes(has_hints, &shared, slots, unit).map_err(|error| anyhow!(error))
    })
}

fn describe(config: &Config, fleet: &Fleet) {
    let (unit, node) = (config.settings.memory_unit, config.node_name.as_str());
    for entry in &fleet.gpus {
        let gpu = &entry.gpu;
        if !entry.is_shared {
            info!(node, gpu = %gpu.uuid, minor = gpu.minor, model = gpu.model, "not sharing a GPU: --shared-devices leaves it out");
            continue;
        }
        let units = unit.units_in(gpu.memory_bytes);
        info!(node, gpu = %gpu.uuid, minor = gpu.minor, model = gpu.model, memory_units = units, %unit, slots = config.slots, "sharing a GPU");
        if units == 0 {
            warn!(gpu = %gpu.uuid, memory = gpu.memory_bytes, %unit, "this GPU has less memory than one unit; choose a smaller --memory-unit");
        }
    }
    for entry in &fleet.others {
        let device = &entry.device;
        info!(node, device = %device.id, kind = device.device_type, minor = device.minor, "publishing a device");
    }
}

fn start_context(
    config: &Config,
    connection: &Connection,
    node: &Arc<NodeState>,
    pods: &watch::Sender<Pods>,
    (recorder, metrics): (&Recorder, &Metrics),
) -> StartContext {
    let swaps = RecordSwaps::new(connection, config.node_name.to_string(), pods.clone());
    StartContext {
        node: Arc::clone(node),
        client: connection.client.clone(),
        policy: config.starts.clone(),
        swaps: Arc::new(Mutex::new(swaps)),
        recorder: recorder.clone(),
        metrics: metrics.clone(),
    }
}

/// Notes the pods that an earlier process may have answered for.
async fn note_existing_pods(node: Arc<NodeState>) {
    let mut pods = node.pods.clone();
    if let Ok(pods) = pods.wait_for(Pods::is_synced).await {
        node.note_existing_pods(&pods);
    }
    std::future::pending::<()>().await;
}

#[cfg(test)]
mod tests;
