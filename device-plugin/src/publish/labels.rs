//! The labels of this node that say what its GPUs are: those of its Device object.

use std::collections::BTreeMap;

use proto::device::NODE_LABELS;
use proto::node::Node;
use serde_json::{Map, Value, json};

/// The merge patch of the node, if it says anything else than the labels of its Device object do.
pub fn patch(node: &Node, of_device: &BTreeMap<String, String>) -> Option<Value> {
    let differing = |key: &str| {
        let held = node.metadata.labels.as_ref().and_then(|labels| labels.get(key));
        let wanted = of_device.get(key);
        (held != wanted).then(|| {
            (
                key.to_owned(),
                wanted.map_or(Value::Null, |value| Value::String(value.clone())),
            )
        })
    };
    let labels: Map<String, Value> = NODE_LABELS.into_iter().filter_map(differing).collect();
    (!labels.is_empty()).then(|| json!({"metadata": {"labels": labels}}))
}
