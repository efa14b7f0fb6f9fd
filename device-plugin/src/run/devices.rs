//! Finds the devices of this node at the start of the plugin.
//!
//! A plugin without devices waits for some: kubelet would restart a process that ends, and the next one would find no more.
//! Meanwhile the readiness probe, an event on the node and a condition of the node have the reason.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::Connection;
use daemon::events::{EventType, Recorder};
use daemon::supervise::Tasks;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::warn;

use crate::config::Config;
use crate::devices::fleet::NodeFleet;
use crate::devices::fleet::watch::discover;
use crate::devices::inventory::{InventoryError, NodeInventory};
use crate::inject::runtime_hook::seen::SeenGpus;
use crate::node::pods::NodePods;
use crate::publish::node_patches::Absence;
use crate::publish::own_objects::send_if_changed;
use crate::start::node_state::NodeState;

use super::tasks;

/// Delay before another search on a node without devices, and between two warnings while the driver does not answer.
const DISCOVERY_RETRY: Duration = Duration::from_secs(30);

/// Time after which a plugin that lacks the library of the loaded driver ends: a new container may get the library by then.
const CONTAINER_AGE: Duration = Duration::from_secs(3600);

/// Finds the devices of this node. While there are none, sends the reason to `absence` and publishes it.
pub(super) async fn find_devices(
    config: &Config,
    absence: &watch::Sender<Option<Absence>>,
) -> anyhow::Result<NodeInventory> {
    let (began, driver) = (Instant::now(), config.source().loaded_driver());
    // Started by the first search that finds nothing, and aborted when this function returns.
    let mut publishing = None;
    loop {
        let error = match discover_with_warnings(config).await {
            Ok(inventory) => {
                absence.send_replace(None);
                return Ok(inventory);
            }
            Err(error) => error,
        };
        let Some(cause) = error.downcast_ref::<InventoryError>() else {
            return Err(error);
        };
        let is_driver_of_start = config.source().loaded_driver() == driver;
        if !waits(cause, is_driver_of_start, began.elapsed()) {
            return Err(error);
        }
        let found = Absence {
            reason: cause.reason(),
            message: format!("{error:#}"),
        };
        warn!(error = %found.message, "no devices to share, looking again in {} s", DISCOVERY_RETRY.as_secs());
        let (tasks, recorder) = if let Some(publishing) = &mut publishing {
            publishing
        } else {
            let connection = Connection::new().await?;
            publishing.insert(publish_no_devices(config, &connection, absence.subscribe())?)
        };
        if send_if_changed(absence, Some(found.clone())) {
            recorder.node(EventType::Warning, found.reason, found.message);
        }
        tokio::select! {
            () = sleep(DISCOVERY_RETRY) => {}
            ended = tasks.ended() => return Err(ended.into()),
        }
    }
}

/// Returns true if the plugin goes on waiting after this error. `is_driver_of_start`: the kernel driver has not been replaced.
fn waits(error: &InventoryError, is_driver_of_start: bool, waited: Duration) -> bool {
    // A new container gets the library of a driver that has been installed since. If none has, it is no better off than this one,
    // and kubelet would create one after the other.
    let needs_container = matches!(error, InventoryError::DriverReplaced { .. });
    !needs_container || is_driver_of_start && waited < CONTAINER_AGE
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

/// Starts the tasks that publish a node without devices, with the reason in `absence`, in place of the devices published before.
pub(super) fn publish_no_devices(
    config: &Config,
    connection: &Connection,
    absence: watch::Receiver<Option<Absence>>,
) -> anyhow::Result<(Tasks, Recorder)> {
    let mut tasks = Tasks::default();
    let nothing = NodeInventory::default();
    let ids = config.sharing(BTreeSet::new()).id_scheme(&nothing)?;
    let (fleet_sender, fleet) = watch::channel(Arc::new(NodeFleet::new(nothing, ids)));
    let (pods_sender, pods) = watch::channel(NodePods::default());
    tasks::watch_pods(&mut tasks, config, connection, pods_sender);
    let recorder = tasks::write_events(&mut tasks, config, connection);
    // No task decides on the injection mode or the enforcement levels here, so their channels are closed from the start.
    let node = NodeState::new(config.settings(), fleet, pods, &config.device_plugin_dir);
    // No runtime hook runs, as there is no device that it could add.
    let seen = watch::channel(SeenGpus::default()).1;
    tasks::publish(
        &mut tasks,
        config,
        connection,
        &node,
        (seen, Arc::default(), absence),
        recorder.clone(),
    );
    // The publisher needs the sender of the fleet as long as it runs.
    let keep_sender = async move { fleet_sender.closed().await };
    tasks.spawn("absent devices", keep_sender);
    Ok((tasks, recorder))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn replaced() -> InventoryError {
        InventoryError::DriverReplaced { how: String::new() }
    }

    fn absent() -> InventoryError {
        InventoryError::Absent {
            problem: String::new(),
            source: None,
        }
    }

    /// A process ends for the sake of a new container only if that container can have what this one lacks.
    #[rstest]
    #[case::no_driver(absent(), true, 0, true)]
    #[case::all_in_mig_mode(InventoryError::NothingToShare { path: "lib".into(), reasons: "MIG".to_owned() }, true, 7200, true)]
    #[case::driver_fails(InventoryError::Failed { problem: "NVML".to_owned(), source: None }, true, 7200, true)]
    #[case::no_driver_for_long(absent(), true, 7200, true)]
    #[case::driver_came(absent(), false, 0, true)]
    #[case::library_missing_from_the_start(replaced(), true, 0, true)]
    #[case::runtime_may_have_changed(replaced(), true, 3600, false)]
    #[case::another_driver_since(replaced(), false, 30, false)]
    fn a_plugin_without_a_driver_waits(
        #[case] error: InventoryError,
        #[case] is_driver_of_start: bool,
        #[case] waited: u64,
        #[case] expected: bool,
    ) {
        let waited = Duration::from_secs(waited);
        assert_eq!(waits(&error, is_driver_of_start, waited), expected);
    }
}
