//! Starts the watches of the devices and of the API server, publishing, and the writer of events. All but the first also run
//! while the node has no devices; `uninstall` has the watches of the Node and of the pods.

use std::collections::BTreeSet;
use std::sync::Arc;

use daemon::api_server::Connection;
use daemon::events::{self, Recorder};
use daemon::supervise::Tasks;
use proto::kubelet_allocations::KubeletAllocations;
use proto::node::Node;
use tokio::sync::{mpsc, watch};
use tracing::{error, info, warn};

use crate::config::{Config, InventoryKind, VendorServer};
use crate::devices::fleet::NodeFleet;
use crate::devices::fleet::watch::{Correction, FleetChannels, FleetWatch};
use crate::devices::health::{ApplicationFault, Health};
use crate::devices::inventory::NodeInventory;
use crate::inject::runtime_hook::seen::SeenGpus;
use crate::node::kubelet_pod_resources::PodResources;
use crate::node::pods::NodePods;
use crate::node::pods::watch::watch_pods as watch_node_pods;
use crate::node::{kubelet_checkpoint, kubelet_pod_resources};
use crate::publish::device_object::DeviceObjectInputs;
use crate::publish::node_overrides::{NodeOverrides, watch_node_overrides};
use crate::publish::node_patches::Absence;
use crate::publish::own_objects::{StoredDevice, watch_device, watch_node};
use crate::publish::pods_without_devices::watch_pods_without_devices;
use crate::publish::vendor::{AdminAccess, VendorSettings, VendorWatch};
use crate::publish::{NodePublisher, PublisherInputs, PublisherSettings};
use crate::start::node_state::NodeState;

/// Most faults of applications, and most corrections of health, that wait to be read. Faults beyond are dropped.
const CHANNEL_CAPACITY: usize = 64;

/// The channels of the task that watches the devices.
pub(super) struct WatchedDevices {
    pub(super) fleet: watch::Receiver<Arc<NodeFleet>>,
    pub(super) faults: mpsc::Receiver<ApplicationFault>,
    /// Takes the changes of health that come from the Device object.
    pub(super) corrections: mpsc::Sender<Correction>,
}

pub(super) fn watch_devices(
    tasks: &mut Tasks,
    config: &Config,
    inventory: NodeInventory,
) -> anyhow::Result<WatchedDevices> {
    let sharing = config.sharing(allocated_units(config));
    let fleet = NodeFleet {
        // No container starts before the XIDs that an earlier process saw are loaded.
        is_health_loaded: false,
        ..NodeFleet::new(inventory.clone(), sharing.id_scheme(&inventory)?)
    };
    log_devices(config, &fleet);
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
    tasks.spawn("watch of devices", async move {
        // The end of this task ends the process, and kubelet creates the container again, with the library of the present driver.
        error!("{}", watch.run().await);
    });
    Ok(WatchedDevices {
        fleet,
        faults,
        corrections: correction_sender,
    })
}

/// The IDs of memory units that kubelet has allocated to containers, by its checkpoint.
fn allocated_units(config: &Config) -> BTreeSet<String> {
    let mut ids = BTreeSet::new();
    // Without a checkpoint kubelet has allocated none.
    for entry in kubelet_checkpoint::read(&config.device_plugin_dir).unwrap_or_default() {
        if entry.resource_name == config.memory_resource {
            ids.extend(entry.device_ids);
        }
    }
    ids
}

pub(super) fn watch_own_node(
    tasks: &mut Tasks,
    config: &Config,
    connection: &Connection,
) -> watch::Receiver<Option<Node>> {
    let (connection, node_name) = (connection.clone(), config.node_name.clone());
    tasks.spawn_updating("watch of the node", None, |sender| {
        watch_node(connection, node_name, sender)
    })
}

pub(super) fn watch_pods(
    tasks: &mut Tasks,
    config: &Config,
    connection: &Connection,
    pods: watch::Sender<NodePods>,
) {
    let (node, names) = (config.node_name.clone(), config.resource_names().cluster);
    tasks.spawn(
        "watch of pods",
        watch_node_pods(connection.clone(), node, names, pods),
    );
}

/// Starts the task that publishes this node's state, and the watches that it depends on.
pub(super) fn publish(
    tasks: &mut Tasks,
    config: &Config,
    connection: &Connection,
    node: &NodeState,
    (seen, overrides, absence): (
        watch::Receiver<SeenGpus>,
        Arc<NodeOverrides>,
        watch::Receiver<Option<Absence>>,
    ),
    recorder: Recorder,
) -> PublisherInputs {
    let device = tasks.spawn_updating("watch of the Device object", StoredDevice::default(), |sender| {
        watch_device(connection.clone(), config.node_name.clone(), sender)
    });
    let (dir, pods, seen_by_hook) = (config.device_plugin_dir.clone(), node.pods.clone(), seen.clone());
    let pods_without_devices = tasks.spawn_updating("pods without devices", None, |sender| {
        watch_pods_without_devices(dir, pods, seen_by_hook, sender)
    });
    let overrides = tasks.spawn_updating("node overrides", overrides, |sender| {
        watch_node_overrides(config.override_files(), config.source().probe_interval(), sender)
    });
    let inputs = PublisherInputs {
        fleet: node.fleet.clone(),
        pods: node.pods.clone(),
        node: watch_own_node(tasks, config, connection),
        device,
        kubelet_allocations: watch_vendor(tasks, config, connection, node, seen, recorder.clone()),
        overrides,
        injection: node.injection.clone(),
        enforcements: node.enforcements.clone(),
        pods_without_devices,
        absence,
    };
    let settings = PublisherSettings {
        node_name: config.node_name.clone(),
        names: config.resource_names().cluster,
        memory_unit: config.memory_unit,
        device: DeviceObjectInputs {
            serves_vendor: config.resource_names().whole.is_some(),
            is_simulated: matches!(config.inventory, InventoryKind::File(_)),
            partition_policy: config.gpu_partition_policy,
            boot_id: boot_id(),
            ..DeviceObjectInputs::default()
        },
    };
    let publisher = NodePublisher::new(connection, recorder, settings, inputs.clone());
    tasks.spawn("publication", publisher.run());
    inputs
}

fn watch_vendor(
    tasks: &mut Tasks,
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
    let (sender, kubelet_allocations) = watch::channel(None);
    let watch = VendorWatch {
        settings,
        fleet: node.fleet.clone(),
        pods: node.pods.clone(),
        seen,
        admin_access: AdminAccess::new(connection.client.clone()),
        kubelet_allocations: sender,
        recorder,
    };
    tasks.spawn("other plugins' devices", watch.run());
    kubelet_allocations
}

/// Starts the task that writes the events which the returned recorder takes.
pub(super) fn write_events(tasks: &mut Tasks, config: &Config, connection: &Connection) -> Recorder {
    let (recorder, writer) = events::recorder(
        connection,
        "gpushare-device-plugin",
        Some(config.node_name.clone()),
    );
    tasks.spawn("events", writer.run());
    recorder
}

/// The ID of the node's present boot, if the kernel names it.
pub(super) fn boot_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}

fn log_devices(config: &Config, fleet: &NodeFleet) {
    let (unit, node) = (config.memory_unit, config.node_name.as_str());
    for entry in &fleet.gpus {
        let gpu = &entry.device;
        if !entry.is_shared {
            info!(node, gpu = %gpu.uuid, minor = gpu.minor, model = gpu.model, "not sharing a GPU: --shared-devices leaves it out");
            continue;
        }
        let units = unit.units_in(gpu.memory_bytes);
        info!(node, gpu = %gpu.uuid, minor = gpu.minor, model = gpu.model, memory_units = units, %unit, slots = config.slots, "sharing a GPU");
        // kubelet gets no memory unit of such a GPU, so no pod that requests units can use it.
        if units == 0 {
            warn!(gpu = %gpu.uuid, memory = gpu.memory_bytes, %unit, "this GPU has less memory than one unit; choose a smaller --memory-unit");
        }
    }
    for entry in &fleet.others {
        let device = &entry.device;
        info!(node, device = %device.id, kind = device.device_type, minor = device.minor, "publishing a device");
    }
}
