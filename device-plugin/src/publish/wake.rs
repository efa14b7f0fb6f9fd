//! The node annotation that changes with the Device object.
//!
//! kube-scheduler does not watch Device objects: a pod that our scheduler refused for what the object said is looked at again only
//! when a node or a pod changes.

use std::hash::{DefaultHasher, Hash, Hasher};

use kube::ResourceExt;
use proto::device::{DEVICES_REVISION, RawDevice};
use proto::kubelet_allocations::DEVICES_CHECKPOINTS;
use proto::node::Node;
use proto::plugin_reports::PODS_WITHOUT_DEVICES;
use serde_json::{Value, json};

/// The merge patch of the node, if it speaks of another state of the object, which everybody can see now.
pub fn patch(node: &Node, shown: &RawDevice) -> Option<Value> {
    let revision = revision(shown);
    (node.annotations().get(DEVICES_REVISION) != Some(&revision))
        .then(|| json!({"metadata": {"annotations": {DEVICES_REVISION: revision}}}))
}

/// Changes with every change of the devices, undone ones included, and with the reports on the pods that hold some or none.
fn revision(device: &RawDevice) -> String {
    let mut hasher = DefaultHasher::new();
    let annotations = [DEVICES_CHECKPOINTS, PODS_WITHOUT_DEVICES].map(|key| device.annotations().get(key));
    (&device.metadata.uid, device.metadata.generation, annotations).hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn device(uid: &str, generation: i64, checkpoints: Option<&str>) -> RawDevice {
        let object = json!({"metadata": {"uid": uid, "generation": generation, "annotations": {DEVICES_CHECKPOINTS: checkpoints}}});
        serde_json::from_value(object).unwrap_or_default()
    }

    #[rstest]
    #[case::the_same(("u", 1, Some("[1]")), false)]
    #[case::other_devices(("u", 2, Some("[1]")), true)]
    #[case::another_object(("v", 1, Some("[1]")), true)]
    #[case::other_checkpoints(("u", 1, Some("[2]")), true)]
    #[case::no_checkpoints(("u", 1, None), true)]
    fn touches_the_node_when_the_object_has_changed(
        #[case] (uid, generation, checkpoints): (&str, i64, Option<&str>),
        #[case] touches: bool,
    ) {
        let mut node = Node::default();
        let first = patch(&node, &device("u", 1, Some("[1]"))).unwrap();
        let value = first["metadata"]["annotations"][DEVICES_REVISION]
            .as_str()
            .unwrap();
        node.annotations_mut()
            .insert(DEVICES_REVISION.to_owned(), value.to_owned());
        assert_eq!(
            patch(&node, &device(uid, generation, checkpoints)).is_some(),
            touches
        );
    }
}
