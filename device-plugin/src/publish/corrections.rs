//! Changes of health that come from the node's Device object and not from a watch of the devices: at the start of the process the
//! XIDs that the object names, which no probe finds again, unless they are of an earlier boot, which resets devices; later the
//! devices that an operator declares healthy by the annotation `gpushare/clear-unhealthy` (IDs separated by commas, or `all`).

use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::{Backoff, Connection, one_line};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use proto::device::{BOOT_ID, CLEAR_UNHEALTHY, CONDITION_HEALTHY, DeviceSpec, RawDevice, TYPE_GPU};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use crate::devices::fleet::NodeFleet;
use crate::devices::fleet::watch::{Correction, EarlierXid};
use crate::devices::health::HealthReason;
use crate::devices::inventory::PhysicalId;
use crate::node::api_request::within;
use crate::publish::own_objects::StoredDevice;

const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// The shortest and the longest pause after a failure.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));

/// Sends corrections until the task is dropped. `boot_id` is the ID of the present boot, if the kernel names it.
pub(crate) async fn correct_health(
    connection: Connection,
    node_name: String,
    boot_id: Option<String>,
    device: watch::Receiver<StoredDevice>,
    fleet: watch::Receiver<Arc<NodeFleet>>,
    corrections: mpsc::Sender<Correction>,
) {
    let devices = Api::all(connection.client.clone());
    let mut backoff = connection.contact.backoff(PAUSES);
    let errors = load_xids(&devices, &node_name, boot_id.as_deref(), &mut backoff).await;
    // The task that watches the devices keeps this channel's other end as long as the process lives.
    let _ = corrections.send(Correction::Loaded(errors)).await;
    clear_devices(devices, device, fleet, corrections).await;
}

/// The XIDs in the node's Device object; none if there is none, or it cannot be read, is not valid, or is of an earlier boot.
/// Until they are loaded, the plugin writes no Device object and lets no container start.
async fn load_xids(
    devices: &Api<RawDevice>,
    node: &str,
    boot_id: Option<&str>,
    backoff: &mut Backoff,
) -> Vec<EarlierXid> {
    let Some(device) = read_device(devices, node, backoff).await else {
        return Vec::new();
    };
    // If one of the two boot IDs is not known, the XIDs count: a GPU that is wrongly unhealthy is the smaller harm.
    let before = device.annotations().get(BOOT_ID);
    if before.zip(boot_id).is_some_and(|(before, now)| before != now) {
        info!("this node has booted since its Device object was written, so its devices have been reset");
        return Vec::new();
    }
    let spec = device.read().unwrap_or_else(|error| {
        warn!(%error, "the present Device object is not valid, so all devices start as healthy");
        DeviceSpec::default()
    });
    earlier_xids(&spec)
}

fn earlier_xids(spec: &DeviceSpec) -> Vec<EarlierXid> {
    let mut errors = Vec::new();
    for info in &spec.devices {
        for condition in &info.conditions {
            let is_unhealthy = condition.condition_type == CONDITION_HEALTHY && condition.status == "False";
            // Only GPUs have XIDs.
            if !is_unhealthy || info.device_type != TYPE_GPU {
                continue;
            }
            // Another reason is trouble that probes find again.
            if let (Ok(device), Some(xid)) = (info.id.parse(), HealthReason::xid(&condition.reason)) {
                let since = condition.last_transition_time.clone();
                errors.push(EarlierXid { device, xid, since });
            }
        }
    }
    errors
}

/// Reads the Device object of this node, again and again while the API server does not answer; none if it has none or refuses.
async fn read_device(devices: &Api<RawDevice>, node: &str, backoff: &mut Backoff) -> Option<RawDevice> {
    let mut is_logged = false;
    loop {
        let error = match within(REQUEST_LIMIT, "read the Device object", devices.get_opt(node)).await {
            Ok(found) => return found,
            Err(error) => error,
        };
        // A refusal, which another attempt would get too, and containers must start in the end.
        if error.status().is_some_and(|code| code < 500 && code != 429) {
            warn!(
                error = one_line(&error),
                "the present Device object cannot be read, so all devices start as healthy"
            );
            return None;
        }
        if !is_logged {
            warn!(
                error = one_line(&error),
                "the present Device object cannot be read yet; containers start once it is"
            );
            is_logged = true;
        }
        backoff.pause().await;
    }
}

/// Declares those devices healthy that an operator names in an annotation of the Device object, and removes the annotation.
async fn clear_devices(
    devices: Api<RawDevice>,
    mut device: watch::Receiver<StoredDevice>,
    fleet: watch::Receiver<Arc<NodeFleet>>,
    corrections: mpsc::Sender<Correction>,
) {
    while device.changed().await.is_ok() {
        let stored = device.borrow_and_update().clone();
        let Some(object) = stored.object() else { continue };
        let Some(value) = object.annotations().get(CLEAR_UNHEALTHY) else {
            continue;
        };
        let node = object.name_any();
        let (to_clear, unknown) = named_devices(value, &fleet.borrow());
        if !unknown.is_empty() {
            warn!(
                node,
                ?unknown,
                "the annotation {CLEAR_UNHEALTHY} names devices that this node does not have"
            );
        }
        for device in to_clear {
            info!(%device, "an operator clears a device");
            if corrections.send(Correction::Cleared(device)).await.is_err() {
                return;
            }
        }
        // Unknown names go too: an annotation that stayed would clear later trouble, and a device of that name that comes later.
        let removal = Patch::Merge(json!({"metadata": {"annotations": {CLEAR_UNHEALTHY: null}}}));
        let params = PatchParams::default();
        let patched = devices.patch(&node, &params, &removal);
        if let Err(error) = within(REQUEST_LIMIT, "remove an annotation", patched).await {
            warn!(
                node,
                error = one_line(&error),
                "cannot remove the annotation {CLEAR_UNHEALTHY}: until then it clears devices again"
            );
        }
    }
}

/// The devices of this node that the annotation's value names, and the names in it that are of no device here.
fn named_devices<'a>(value: &'a str, fleet: &NodeFleet) -> (Vec<PhysicalId>, Vec<&'a str>) {
    let names: Vec<&str> = value.split(',').map(str::trim).collect();
    let (mut devices, mut unknown) = (Vec::new(), names.clone());
    for entry in fleet.all_entries() {
        let id = entry.key.id.as_str();
        unknown.retain(|name| !["all", id].contains(name));
        if names.contains(&"all") || names.contains(&id) {
            devices.push(entry.key.id);
        }
    }
    (devices, unknown)
}

#[cfg(test)]
mod tests;
