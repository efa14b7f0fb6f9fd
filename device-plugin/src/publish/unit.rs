//! The node annotation that says what one memory unit is, so that nobody guesses.

use proto::memory_unit::MemoryUnit;
use proto::node::Node;
use proto::resource::ResourceNames;
use serde_json::{Value, json};

/// The merge patch of the node, if it says anything else.
pub fn patch(node: &Node, names: &ResourceNames, unit: MemoryUnit) -> Option<Value> {
    let (key, unit) = (names.memory_unit_annotation(), unit.to_string());
    let annotations = node.metadata.annotations.as_ref();
    let is_there = annotations.and_then(|annotations| annotations.get(&key)) == Some(&unit);
    (!is_there).then(|| json!({"metadata": {"annotations": {key: unit}}}))
}
