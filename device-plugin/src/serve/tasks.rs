//! The tasks of the process, and those that every kind of process starts: watches, publishing, probes.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use daemon::api_server::Connection;
use daemon::events::{self, Recorder};
use daemon::health::{self, MetricsText};
use daemon::panics::named;
use daemon::supervise::Tasks;
use proto::kubelet_allocations::KubeletAllocations;
use proto::node::Node;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::{Config, VendorServer};
use crate::fleet::NodeFleet;
use crate::fleet::corrections::Correction;
use crate::fleet::watch::{DriverReplaced, FleetChannels, FleetWatch};
use crate::health::{ApplicationFault, Health};
use crate::inventory::NodeInventory;
use crate::kubelet_pod_resources::{self, PodResources};
use crate::node_state::NodeState;
use crate::pods::NodePods;
use crate::pods::watch::watch_pods;
use crate::publish::node_overrides::{NodeOverrides, watch_node_overrides};
use crate::publish::own_objects::{StoredDevice, watch_device, watch_node};
use crate::publish::pods_without_devices::watch_pods_without_devices;
use crate::publish::{NodePublisher, PublisherInputs, PublisherSettings};
use crate::runtime_hook::seen::SeenGpus;
use crate::vendor::{AdminAccess, VendorSettings, VendorWatch};

use super::advertise::Published;

/// Most faults of applications and corrections of health that wait to be read; more faults are dropped.
const CHANNEL_CAPACITY: usize = 64;

/// Longest time for the servers to close.
pub(super) const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// The tasks of the process.
#[derive(Default)]
pub(super) struct PluginTasks {
    /// The task that watches the devices. It ends when the container must be created again.
    devices: JoinSet<DriverReplaced>,
    /// Tasks that are dropped at the end.
    pub(super) watches: Tasks,
    /// Tasks that have something to close.
    pub(super) servers: Tasks,
}

/// The channels of the task that watches the devices.
pub(super) struct WatchedDevices {
    pub(super) fleet: watch::Receiver<Arc<NodeFleet>>,
    pub(super) faults: mpsc::Receiver<ApplicationFault>,
    /// Takes changes of health that do not come from the devices.
    pub(super) corrections: mpsc::Sender<Correction>,
}

impl PluginTasks {
    /// Starts a task that is dropped at the end of the process.
    pub(super) fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.watches.spawn(name, task);
    }

    /// Watches the devices of an inventory.
    pub(super) fn watch_devices(
        &mut self,
        config: &Config,
        inventory: NodeInventory,
    ) -> anyhow::Result<WatchedDevices> {
        let sharing = config.sharing();
        let fleet = NodeFleet {
            // No container starts before the XIDs that an earlier process saw are known.
            is_health_loaded: false,
            ..NodeFleet::new(inventory.clone(), sharing.id_scheme(&inventory)?)
        };
        describe(config, &fleet);
        let health = Health::new(config.health_policy(), inventory.ids().cloned());
        let (fleet_sender, fleet) = watch::channel(Arc::new(fleet));
        let (fault_sender, faults) = mpsc::channel(CHANNEL_CAPACITY);
        let (correction_sender, corrections) = mpsc::channel(CHANNEL_CAPACITY);
        let channels = FleetChannels {
            fleet: fleet_sender,
            faults: fault_sender,
            corrections,
        };
        let watch = FleetWatch::new(config.source(), inventory, health, sharing, channels);
        self.devices.spawn(named("watch of devices", watch.run()));
        Ok(WatchedDevices {
            fleet,
            faults,
            corrections: correction_sender,
        })
    }

    /// Starts a task that keeps a value up to date, and returns the value's receiver.
    pub(super) fn keep<T, F>(
        &mut self,
        name: &'static str,
        first: T,
        task: impl FnOnce(watch::Sender<T>) -> F,
    ) -> watch::Receiver<T>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, receiver) = watch::channel(first);
        self.spawn(name, task(sender));
        receiver
    }

    /// Watches this node's Node object.
    pub(super) fn watch_node(
        &mut self,
        config: &Config,
        connection: &Connection,
    ) -> watch::Receiver<Option<Node>> {
        let (connection, node_name) = (connection.clone(), config.node_name.clone());
        self.keep("watch of the node", None, |sender| {
            watch_node(connection, node_name, sender)
        })
    }

    /// Watches the pods of this node.
    pub(super) fn watch_pods(
        &mut self,
        config: &Config,
        connection: &Connection,
        pods: watch::Sender<NodePods>,
    ) {
        let (node, names) = (config.node_name.clone(), config.resource_names().cluster);
        self.spawn("watch of pods", watch_pods(connection.clone(), node, names, pods));
    }

    /// Publishes this node's state, and watches the objects that hold it.
    pub(super) fn publish(
        &mut self,
        config: &Config,
        connection: &Connection,
        node: &NodeState,
        seen: watch::Receiver<SeenGpus>,
        overrides: Arc<NodeOverrides>,
        recorder: Recorder,
    ) -> Published {
        let own_node = self.watch_node(config, connection);
        let device = self.keep("watch of the Device object", StoredDevice::default(), |sender| {
            watch_device(connection.clone(), config.node_name.clone(), sender)
        });
        let (dir, pods, seen_by_hook) = (config.device_plugin_dir.clone(), node.pods.clone(), seen.clone());
        let pods_without_devices = self.keep("pods without devices", None, |sender| {
            watch_pods_without_devices(dir, pods, seen_by_hook, sender)
        });
        let overrides = self.keep("node overrides", overrides, |sender| {
            watch_node_overrides(config.override_files(), config.probe_interval, sender)
        });
        let checkpoints = self.watch_vendor(config, connection, node, seen, recorder);
        let published = Published {
            node: own_node.clone(),
            device: device.clone(),
            checkpoints: checkpoints.clone(),
        };
        let inputs = PublisherInputs {
            fleet: node.fleet.clone(),
            pods: node.pods.clone(),
            node: own_node,
            device,
            checkpoints,
            overrides,
            injection: node.injection.clone(),
            enforcements: node.enforcements.clone(),
            pods_without_devices,
        };
        let settings = PublisherSettings {
            node_name: config.node_name.clone(),
            serves_vendor: config.resource_names().whole.is_some(),
            names: config.resource_names().cluster,
            memory_unit: config.memory_unit,
            partition_policy: config.gpu_partition_policy,
            boot_id: boot_id(),
        };
        self.spawn(
            "publication",
            NodePublisher::new(connection, settings, inputs).run(),
        );
        published
    }

    fn watch_vendor(
        &mut self,
        config: &Config,
        connection: &Connection,
        node: &NodeState,
        seen: watch::Receiver<SeenGpus>,
        recorder: Recorder,
    ) -> watch::Receiver<Option<KubeletAllocations>> {
        let vendor_resources = config.served_by(VendorServer::Vendor);
        let settings = VendorSettings {
            resources: vendor_resources.map(str::to_owned).collect(),
            ours: config.resource_names().whole,
            dra_drivers: config.dra_drivers.clone(),
            pod_resources: PodResources::new(kubelet_pod_resources::socket(&config.device_plugin_dir)),
            device_plugin_dir: config.device_plugin_dir.clone(),
            has_hook: config.nri_socket.is_some(),
        };
        let (sender, checkpoints) = watch::channel(None);
        let watch = VendorWatch {
            settings,
            fleet: node.fleet.clone(),
            pods: node.pods.clone(),
            seen,
            admin_access: AdminAccess::new(connection.client.clone()),
            checkpoints: sender,
            recorder,
        };
        self.spawn("other plugins' devices", watch.run());
        checkpoints
    }

    /// Starts the task that writes events.
    pub(super) fn write_events(&mut self, config: &Config, connection: &Connection) -> Recorder {
        let (recorder, writer) = events::recorder(
            connection,
            "gpushare-device-plugin",
            Some(config.node_name.clone()),
        );
        self.spawn("events", writer.run());
        recorder
    }

    /// Answers probes and serves metrics, if the operator wants it.
    pub(super) async fn serve_health(
        &mut self,
        config: &Config,
        readiness: impl Fn() -> Result<(), String> + Clone + Send + Sync + 'static,
        metrics: MetricsText,
    ) -> anyhow::Result<()> {
        let Some(address) = config.health_listen else {
            return Ok(());
        };
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("--health-listen: cannot listen on {address}"))?;
        self.spawn(
            "probes and metrics",
            answer_probes(listener, health::router(readiness, metrics)),
        );
        Ok(())
    }

    /// Runs until `stop` is cancelled or a task ends, and then closes the servers.
    ///
    /// # Errors
    /// A task ended that should run as long as the process.
    pub(super) async fn run(mut self, stop: CancellationToken) -> anyhow::Result<()> {
        let ended = tokio::select! {
            // A task that ends because the process ends is no error.
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
            // A task has ended that kept the answers up to date, so no further call is answered.
            self.servers.abort_all();
        }
        let closed = timeout(CLOSE_LIMIT, self.servers.all_ended()).await;
        if closed.is_err() {
            warn!("not all servers could be closed in time");
        }
        ended
    }
}

/// Answers until the task is dropped.
async fn answer_probes(listener: TcpListener, routes: axum::Router) {
    if let Err(error) = axum::serve(listener, routes).await {
        warn!(%error, "probes are no longer answered");
    }
}

fn devices_failed(error: JoinError) -> anyhow::Error {
    anyhow!(error).context("task \"watch of devices\" has failed, and the process with it")
}

/// The present boot of this node, if the kernel names it.
pub(super) fn boot_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}

/// Logs the devices.
fn describe(config: &Config, fleet: &NodeFleet) {
    let (unit, node) = (config.memory_unit, config.node_name.as_str());
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
