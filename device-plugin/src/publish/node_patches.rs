//! Patches of this node's Node: memory unit, labels, amounts in the status, condition, and the revision of the Device object.
//! `None` means that the Node is right.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use chrono::{DateTime, SecondsFormat, Utc};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use proto::device::{
    DEVICES_REVISION, DeviceInfo, NODE_LABELS, RawDevice, SHARING_DISABLED, SHARING_LABEL, TYPE_GPU,
};
use proto::kubelet_allocations::DEVICES_CHECKPOINTS;
use proto::memory_unit::MemoryUnit;
use proto::node::{CONDITION_SHARING_READY, Node};
use proto::plugin_reports::PODS_WITHOUT_DEVICES;
use proto::pod::QuantityText;
use proto::quantity::Quantity;
use proto::resource::{GPU, GPU_CORE, GPU_COUNT, ResourceNames};
use serde_json::{Map, Value, json};
use tracing::info;

use crate::node::api_request::{ApiRequestError, within};
use crate::node::pods::{NodePods, PodStage, Requests};

use super::REQUEST_LIMIT;

/// The reason for which this node has no devices to share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Absence {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// Writes this node's Node.
#[derive(Debug)]
pub(crate) struct NodeWriter {
    nodes: Api<Node>,
    node_name: String,
}

impl NodeWriter {
    /// A writer of the Node of this name.
    pub(crate) fn new(client: Client, node_name: String) -> Self {
        Self {
            nodes: Api::all(client),
            node_name,
        }
    }

    /// Sends a patch of the Node or of its status, if there is one; `part` is what the patch changes.
    pub(crate) async fn write(&self, part: &str, patch: Option<Value>) -> Result<(), ApiRequestError> {
        let Some(patch) = patch else { return Ok(()) };
        // A strategic merge patch changes the condition of one type; a merge patch would replace kubelet's conditions.
        let typed = match patch.pointer("/status/conditions") {
            Some(_) => Patch::Strategic(&patch),
            None => Patch::Merge(&patch),
        };
        let (params, what) = (PatchParams::default(), format!("write {part}"));
        if patch.get("status").is_some() {
            let request = self.nodes.patch_status(&self.node_name, &params, &typed);
            within(REQUEST_LIMIT, what, request).await?;
        } else {
            let request = self.nodes.patch(&self.node_name, &params, &typed);
            within(REQUEST_LIMIT, what, request).await?;
        }
        info!(%patch, "wrote {part}");
        Ok(())
    }
}

/// The patch of the annotation with the size of a memory unit.
pub fn memory_unit(node: &Node, names: &ResourceNames, unit: MemoryUnit) -> Option<Value> {
    let (key, unit) = (names.memory_unit_annotation(), unit.to_string());
    if node.annotations().get(&key) == Some(&unit) {
        return None;
    }
    Some(json!({"metadata": {"annotations": {key: unit}}}))
}

/// The patch of the labels that describe the node's GPUs: `of_device`, those of its Device object.
pub fn labels(node: &Node, of_device: &BTreeMap<String, String>) -> Option<Value> {
    let mut labels = Map::new();
    for key in NODE_LABELS {
        let wanted = of_device.get(key);
        if node.labels().get(key) != wanted {
            // A label that the object no longer has becomes null, by which a merge patch removes it.
            labels.insert(key.to_owned(), json!(wanted));
        }
    }
    (!labels.is_empty()).then(|| json!({"metadata": {"labels": labels}}))
}

/// The patch of the annotation whose value changes with the Device object, so that kube-scheduler tries refused pods again.
pub(crate) fn revision(node: &Node, device: &RawDevice) -> Option<Value> {
    // kube-scheduler watches no Device objects: it tries a refused pod again only when a node or a pod changes.
    // Another version of Rust may hash otherwise, after which kube-scheduler tries refused pods once more than it needs to.
    let mut hasher = DefaultHasher::new();
    // The generation changes with every change of the devices, undone ones included. It does not change with annotations.
    device.metadata.uid.hash(&mut hasher);
    device.metadata.generation.hash(&mut hasher);
    for key in [DEVICES_CHECKPOINTS, PODS_WITHOUT_DEVICES] {
        device.annotations().get(key).hash(&mut hasher);
    }
    let revision = format!("{:016x}", hasher.finish());
    if node.annotations().get(DEVICES_REVISION) == Some(&revision) {
        return None;
    }
    Some(json!({"metadata": {"annotations": {DEVICES_REVISION: revision}}}))
}

/// The patch of the condition of a node without devices, or with devices again. A node that never lacked them has no condition.
pub(crate) fn condition(node: &Node, absence: Option<&Absence>, now: DateTime<Utc>) -> Option<Value> {
    let before = node.sharing_condition();
    let (status, reason, message) = if let Some(absence) = absence {
        ("False", absence.reason, absence.message.as_str())
    } else {
        before?;
        ("True", "GPUsFound", "the plugin has devices to share")
    };
    if let Some(before) = before
        && (&*before.reason, &*before.message) == (reason, message)
        && before.status == status
    {
        return None;
    }
    let now = now.to_rfc3339_opts(SecondsFormat::Secs, true);
    let mut condition = json!({
        "type": CONDITION_SHARING_READY, "status": status, "reason": reason, "message": message, "lastHeartbeatTime": now
    });
    if before.is_none_or(|before| before.status != status)
        && let Some(fields) = condition.as_object_mut()
    {
        fields.insert("lastTransitionTime".to_owned(), json!(now));
    }
    Some(json!({"status": {"conditions": [condition]}}))
}

/// The patch of capacity and allocatable for the resources of [`Requests`], which no device plugin advertises.
///
/// An amount is that of the healthy devices ([`offered`]), or the sum of the pods' requests (`requested`) if that is more.
/// Capacity and allocatable are the same.
pub fn status_amounts(node: &Node, amounts: Requests) -> Option<Value> {
    let mut fields = Map::new();
    for (field, present) in [
        ("capacity", &node.status.capacity),
        ("allocatable", &node.status.allocatable),
    ] {
        let mut changes = Map::new();
        for (name, amount) in amounts.iter() {
            if let Some(change) = amount_change(present.get(name), amount) {
                changes.insert(name.to_owned(), change);
            }
        }
        if !changes.is_empty() {
            fields.insert(field.to_owned(), Value::Object(changes));
        }
    }
    (!fields.is_empty()).then(|| json!({"status": fields}))
}

/// The value that replaces the amount `present` in node status; none if `present` is `amount` already.
fn amount_change(present: Option<&QuantityText>, amount: u64) -> Option<Value> {
    if amount == 0 {
        // null removes the amount: kubelet fails a bound pod for good if the node has 0 of a resource, and does not check one
        // that the node does not list, so that the pod waits for its device.
        return present.map(|_| Value::Null);
    }
    let wanted = Quantity::from_unsigned(amount);
    if present.map(QuantityText::quantity) == Some(Ok(wanted)) {
        return None;
    }
    Some(Value::String(wanted.to_string()))
}

/// The amounts that the healthy GPUs among these devices offer to pods that share them.
pub fn offered(devices: &[DeviceInfo]) -> Requests {
    let mut sum = Requests::default();
    for device in devices {
        let sharing = device.labels.get(SHARING_LABEL).map(String::as_str);
        if device.device_type == TYPE_GPU && device.health && sharing != Some(SHARING_DISABLED) {
            sum = sum.plus(Requests::from_fn(|name| match name {
                GPU_COUNT => 1,
                // An amount of `koordinator.sh/gpu` is this percentage of computing power, and of memory.
                GPU => amount(device, GPU_CORE),
                _ => amount(device, name),
            }));
        }
    }
    sum
}

/// The amount of a resource in a device's entry in the Device object; 0 if it offers none.
fn amount(device: &DeviceInfo, resource: &str) -> u64 {
    let quantity = device.resources.get(resource).copied().unwrap_or_default();
    quantity.unsigned().unwrap_or(0)
}

/// The sum of the requests of the pods that kubelet has admitted, or may admit because they have a usable allocation record.
pub(crate) fn requested(pods: &NodePods) -> Requests {
    let mut sum = Requests::default();
    for pod in pods.iter() {
        let is_counted = match pod.stage {
            PodStage::Admitted | PodStage::Running => true,
            PodStage::Bound => pod.placement.is_ok(),
            PodStage::Terminal => false,
        };
        if is_counted {
            sum = sum.plus(pod.requests);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn device(uid: &str, generation: i64, checkpoints: Option<&str>) -> RawDevice {
        let object = json!({"metadata": {"uid": uid, "generation": generation, "annotations": {DEVICES_CHECKPOINTS: checkpoints}}});
        serde_json::from_value(object).unwrap_or_default()
    }

    /// The status, the reason and the time of the condition in a patch.
    fn written(before: Option<(&str, &str)>, absence: Option<&str>) -> Option<String> {
        let condition = before.map(|(status, message)| {
            let reason = if status == "True" {
                "GPUsFound"
            } else {
                "GPUsNotFound"
            };
            json!({"type": CONDITION_SHARING_READY, "status": status, "reason": reason, "message": message})
        });
        let conditions: Vec<_> = std::iter::once(json!({"type": "Ready", "status": "True"}))
            .chain(condition)
            .collect();
        let node =
            serde_json::from_value(json!({"metadata": {}, "status": {"conditions": conditions}})).unwrap();
        let absence = absence.map(|message| Absence {
            reason: "GPUsNotFound",
            message: message.to_owned(),
        });
        let patch = super::condition(&node, absence.as_ref(), DateTime::UNIX_EPOCH)?;
        let [condition] = patch["status"]["conditions"].as_array()?.as_slice() else {
            panic!("{patch}")
        };
        let text = |key: &str| condition[key].as_str().unwrap_or("-").to_owned();
        assert_eq!(condition["type"], CONDITION_SHARING_READY);
        Some(
            ["status", "reason", "message", "lastTransitionTime"]
                .map(text)
                .join(" "),
        )
    }

    const FOUND: &str = "the plugin has devices to share";

    #[rstest]
    #[case::never_lacked_devices(None, None, None)]
    #[case::none(
        None,
        Some("no driver"),
        Some("False GPUsNotFound no driver 1970-01-01T00:00:00Z")
    )]
    #[case::still_none(Some(("False", "no driver")), Some("no driver"), None)]
    #[case::none_for_another_reason(Some(("False", "no driver")), Some("not loaded"), Some("False GPUsNotFound not loaded -"))]
    #[case::found(Some(("False", "no driver")), None, Some("True GPUsFound the plugin has devices to share 1970-01-01T00:00:00Z"))]
    #[case::still_there(Some(("True", FOUND)), None, None)]
    #[case::gone_again(Some(("True", FOUND)), Some("no driver"), Some("False GPUsNotFound no driver 1970-01-01T00:00:00Z"))]
    fn the_condition_of_a_node_says_why_it_has_no_devices(
        #[case] before: Option<(&str, &str)>,
        #[case] absence: Option<&str>,
        #[case] expected: Option<&str>,
    ) {
        assert_eq!(written(before, absence).as_deref(), expected);
    }

    #[rstest]
    #[case::the_same(("u", 1, Some("[1]")), false)]
    #[case::other_devices(("u", 2, Some("[1]")), true)]
    #[case::another_object(("v", 1, Some("[1]")), true)]
    #[case::other_checkpoints(("u", 1, Some("[2]")), true)]
    #[case::no_checkpoints(("u", 1, None), true)]
    fn the_node_changes_with_the_device_object(
        #[case] (uid, generation, checkpoints): (&str, i64, Option<&str>),
        #[case] changes: bool,
    ) {
        let mut node = Node::default();
        let first = revision(&node, &device("u", 1, Some("[1]"))).unwrap();
        let value = first["metadata"]["annotations"][DEVICES_REVISION]
            .as_str()
            .unwrap();
        node.annotations_mut()
            .insert(DEVICES_REVISION.to_owned(), value.to_owned());
        assert_eq!(
            revision(&node, &device(uid, generation, checkpoints)).is_some(),
            changes
        );
    }
}
