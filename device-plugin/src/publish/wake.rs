//! The node annotation that changes with what the Device object says of devices that kubelet gave to pods of others.
//!
//! kube-scheduler does not watch Device objects: a pod that our scheduler refused because of those devices is looked at again
//! only when a node or a pod changes.

use std::hash::{DefaultHasher, Hash, Hasher};

use kube::ResourceExt;
use proto::checkpoints::{CHECKPOINTS_HASH, DEVICES_CHECKPOINTS};
use proto::device::Device;
use proto::node::Node;
use serde_json::{Value, json};

/// The merge patch of the node, if it speaks of another state of the Device object.
pub fn patch(node: &Node, device: &Device) -> Option<Value> {
    let wanted = device.annotations().get(DEVICES_CHECKPOINTS).map(|text| hash(text));
    (node.annotations().get(CHECKPOINTS_HASH) != wanted.as_ref()).then(|| json!({"metadata": {"annotations": {CHECKPOINTS_HASH: wanted}}}))
}

fn hash(text: &str) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use proto::device::DeviceSpec;

    use super::*;

    fn device(checkpoints: Option<&str>) -> Device {
        let mut device = Device::new("n1", DeviceSpec::default());
        device.annotations_mut().extend(checkpoints.map(|text| (DEVICES_CHECKPOINTS.to_owned(), text.to_owned())));
        device
    }

    /// What the node says once the patch is applied.
    fn after(node: &Node, device: &Device) -> Node {
        let mut node = node.clone();
        let Some(patch) = patch(&node, device) else { return node };
        match patch["metadata"]["annotations"][CHECKPOINTS_HASH].as_str() {
            Some(value) => node.annotations_mut().insert(CHECKPOINTS_HASH.to_owned(), value.to_owned()),
            None => node.annotations_mut().remove(CHECKPOINTS_HASH),
        };
        node
    }

    #[test]
    fn changes_with_the_checkpoints_and_goes_with_them() {
        let nothing = Node::default();
        assert_eq!(patch(&nothing, &device(None)), None);
        let one = after(&nothing, &device(Some("[1]")));
        assert!(one.annotations().contains_key(CHECKPOINTS_HASH));
        assert_eq!(patch(&one, &device(Some("[1]"))), None);
        let other = after(&one, &device(Some("[2]")));
        assert_ne!(one.annotations(), other.annotations());
        assert!(after(&other, &device(None)).annotations().is_empty());
    }
}
