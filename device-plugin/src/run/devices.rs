//! Finds the devices of this node at the start of the plugin.

use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::Connection;
use daemon::events::EventType;
use daemon::supervise::Tasks;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::config::Config;
use crate::fleet::NodeFleet;
use crate::fleet::watch::discover;
use crate::inventory::{InventoryError, NodeInventory};
use crate::node_state::NodeState;
use crate::pods::NodePods;
use crate::runtime_hook::seen::SeenGpus;

use super::tasks;

/// Delay before another search on a node without devices, and between two warnings while the driver does not answer.
const DISCOVERY_RETRY: Duration = Duration::from_secs(30);

/// Finds the devices of this node. While the plugin waits for some (`--no-gpu=wait`, or an operator has left out every GPU), it
/// publishes that the node has none.
pub(super) async fn find_devices(config: &Config) -> anyhow::Result<NodeInventory> {
    // Started by the first search that finds nothing, and aborted when this function returns.
    let mut absence = None;
    loop {
        let error = match discover_with_warnings(config).await {
            Ok(inventory) => return Ok(inventory),
            Err(error) => error,
        };
        let cause = error.downcast_ref::<InventoryError>();
        // If waiting cannot help, the process ends with the error, and kubelet's restarts make the failure visible.
        if !cause.is_some_and(|cause| config.no_gpu.waits_after(cause)) {
            return Err(error);
        }
        let is_by_choice = cause.is_some_and(InventoryError::is_by_choice);
        warn!(error = %format!("{error:#}"), "no devices to share, looking again in {} s", DISCOVERY_RETRY.as_secs());
        let tasks = if let Some(tasks) = &mut absence {
            tasks
        } else {
            let connection = Connection::new(config.process.kubeconfig.as_deref()).await?;
            let mut tasks = publish_no_devices(config, &connection)?;
            if is_by_choice {
                let recorder = tasks::write_events(&mut tasks, config, &connection);
                recorder.node(EventType::Warning, "GPUNotShared", format!("{error:#}"));
            }
            absence.insert(tasks)
        };
        tokio::select! {
            () = sleep(DISCOVERY_RETRY) => {}
            ended = tasks.ended() => return Err(ended.into()),
        }
    }
}

/// Searches for devices, and logs a warning every 30 s while the driver does not answer.
async fn discover_with_warnings(config: &Config) -> anyhow::Result<NodeInventory> {
    let source = config.source();
    let mut found = std::pin::pin!(discover(&source));
    loop {
        if let Ok(found) = timeout(DISCOVERY_RETRY, &mut found).await {
            return found;
        }
        warn!(
            "the driver does not answer: one of its calls hangs until the GPU is reset or this node reboots"
        );
    }
}

/// Starts the tasks that publish that this node has no devices, so that what was published about earlier devices is removed.
pub(super) fn publish_no_devices(config: &Config, connection: &Connection) -> anyhow::Result<Tasks> {
    let mut tasks = Tasks::default();
    let nothing = NodeInventory::default();
    let ids = config.sharing().id_scheme(&nothing)?;
    let (fleet_sender, fleet) = watch::channel(Arc::new(NodeFleet::new(nothing, ids)));
    let (pods_sender, pods) = watch::channel(NodePods::default());
    tasks::watch_pods(&mut tasks, config, connection, pods_sender);
    let recorder = tasks::write_events(&mut tasks, config, connection);
    // Nothing decides the injection mode or the enforcement levels here, so their channels are closed from the start.
    let node = NodeState::new(config.settings(), fleet, pods, &config.device_plugin_dir);
    // No runtime hook runs, as there is no device that it could add.
    let seen = watch::channel(SeenGpus::default()).1;
    tasks::publish(
        &mut tasks,
        config,
        connection,
        &node,
        (seen, Arc::default()),
        recorder,
    );
    // The publisher needs the sender of the fleet as long as it runs.
    let keep_sender = async move { fleet_sender.closed().await };
    tasks.spawn("absent devices", keep_sender);
    Ok(tasks)
}
