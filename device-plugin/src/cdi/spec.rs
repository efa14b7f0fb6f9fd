//! The text of a CDI spec.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::DRIVER_DEVICE;

/// The version of specs that say no more than device nodes and variables.
const VERSION: &str = "0.5.0";

/// The changes that a CDI spec makes to a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Edits {
    /// Version of the vendor's spec that the edits come from, if they come from one.
    pub version: Option<String>,
    /// Variables.
    pub env: BTreeMap<String, String>,
    /// Device nodes, as CDI writes them.
    pub device_nodes: Vec<Value>,
    /// Everything else, as CDI writes it: mounts, hooks and the like, by field.
    pub others: Map<String, Value>,
}

impl Edits {
    /// Adds a device node by its path on the host, which is its path in the container too.
    pub fn add_node(&mut self, path: &Path) {
        let node = json!({"path": path, "hostPath": path, "permissions": "rw"});
        // Several devices of a container may need the same node.
        if !self.device_nodes.contains(&node) {
            self.device_nodes.push(node);
        }
    }

    /// The edits as `containerEdits` of a CDI spec.
    fn to_json(&self) -> Map<String, Value> {
        let mut fields = self.others.clone();
        if !self.env.is_empty() {
            let env: Vec<String> = self
                .env
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            fields.insert("env".to_owned(), json!(env));
        }
        if !self.device_nodes.is_empty() {
            fields.insert("deviceNodes".to_owned(), json!(self.device_nodes));
        }
        fields
    }
}

/// The text of the driver's spec.
pub fn driver_text(edits: &Edits) -> String {
    let (kind, name) = DRIVER_DEVICE.split_once('=').unwrap_or((DRIVER_DEVICE, ""));
    text(kind, name, edits)
}

/// The variables of a list of CDI, whose items are `NAME=value`.
pub(super) fn variables(list: &[Value]) -> impl Iterator<Item = (String, String)> {
    let pairs = list.iter().filter_map(|pair| pair.as_str()?.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned()))
}

/// The text of a spec with one device. Compact, because the runtime parses all of them at every change.
pub(super) fn text(kind: &str, name: &str, edits: &Edits) -> String {
    let version = edits.version.as_deref().unwrap_or(VERSION);
    let device = json!({"name": name, "containerEdits": edits.to_json()});
    format!(
        "{}\n",
        json!({"cdiVersion": version, "kind": kind, "devices": [device]})
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_content_of_a_spec() {
        let mut edits = Edits {
            env: [("NVIDIA_VISIBLE_DEVICES".to_owned(), "void".to_owned())].into(),
            ..Edits::default()
        };
        edits.add_node(Path::new("/dev/nvidia0"));
        edits.add_node(Path::new("/dev/nvidia0"));
        let text = text(crate::cdi::CONTAINER_KIND, "0123-1", &edits);
        let text: Value = serde_json::from_str(&text).unwrap();
        insta::assert_snapshot!(format!("{text:#}"), @r#"
        {
          "cdiVersion": "0.5.0",
          "devices": [
            {
              "containerEdits": {
                "deviceNodes": [
                  {
                    "hostPath": "/dev/nvidia0",
                    "path": "/dev/nvidia0",
                    "permissions": "rw"
                  }
                ],
                "env": [
                  "NVIDIA_VISIBLE_DEVICES=void"
                ]
              },
              "name": "0123-1"
            }
          ],
          "kind": "gpushare.dev/gpu"
        }
        "#);
    }
}
