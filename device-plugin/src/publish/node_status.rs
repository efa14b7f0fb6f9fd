//! The resources in node status that no plugin serves.
//!
//! Each is what the healthy devices offer, or what the pods there ask for if that is more: kubelet
//! admits running pods anew when it restarts, and must not turn them away because a device is sick.
//! Capacity and allocatable are the same. A resource is removed rather than set to zero, which
//! would make every pod that asks for it fail instead of wait.

use proto::device::{DeviceInfo, SHARING_DISABLED, SHARING_LABEL, TYPE_GPU};
use proto::node::Node;
use proto::pod::QuantityText;
use proto::quantity::Quantity;
use proto::resource::{GPU, GPU_CORE, GPU_COUNT};
use serde_json::{Map, Value, json};

use crate::pods::{NodePod, Pods, Requests, Stage};

/// What the healthy GPUs among these devices offer to pods that share them.
pub fn offers(devices: &[DeviceInfo]) -> Requests {
    let is_shared = |device: &DeviceInfo| {
        device
            .labels
            .get(SHARING_LABEL)
            .is_none_or(|value| value != SHARING_DISABLED)
    };
    let usable = devices
        .iter()
        .filter(|device| device.device_type == TYPE_GPU && device.health && is_shared(device));
    usable.fold(Requests::default(), |sum, device| sum.plus(of_device(device)))
}

fn of_device(device: &DeviceInfo) -> Requests {
    Requests::from_fn(|name| match name {
        GPU_COUNT => 1,
        GPU => amount(device, GPU_CORE),
        _ => amount(device, name),
    })
}

fn amount(device: &DeviceInfo, resource: &str) -> u64 {
    device
        .resources
        .get(resource)
        .and_then(|quantity| quantity.unsigned())
        .unwrap_or(0)
}

/// What the pods ask for that kubelet has admitted, or may admit because they have a usable record.
pub fn requests(pods: &Pods) -> Requests {
    let counts = |pod: &&NodePod| match pod.stage {
        Stage::Admitted | Stage::Running => true,
        Stage::Bound => pod.placement.is_ok(),
        Stage::Terminal => false,
    };
    pods.iter()
        .filter(counts)
        .fold(Requests::default(), |sum, pod| sum.plus(pod.requests))
}

/// The merge patch of the node's status, if it holds anything else.
pub fn patch(node: &Node, values: Requests) -> Option<Value> {
    let status = &node.status;
    let patches = [
        ("capacity", &status.capacity),
        ("allocatable", &status.allocatable),
    ]
    .map(|(field, held)| {
        let differing = values
            .iter()
            .filter_map(|(name, value)| Some((name.to_owned(), differing(held.get(name), value)?)));
        (field, differing.collect::<Map<String, Value>>())
    });
    let fields: Map<String, Value> = patches
        .into_iter()
        .filter(|(_, patch)| !patch.is_empty())
        .map(|(field, patch)| (field.to_owned(), Value::Object(patch)))
        .collect();
    (!fields.is_empty()).then(|| json!({"status": fields}))
}

/// What to write in place of `held`, none if it is right.
fn differing(held: Option<&QuantityText>, value: u64) -> Option<Value> {
    if value == 0 {
        return held.map(|_| Value::Null);
    }
    let wanted = Quantity::from_unsigned(value);
    let is_right = held.is_some_and(|held| held.quantity().is_ok_and(|held| held == wanted));
    (!is_right).then(|| Value::String(wanted.to_string()))
}
