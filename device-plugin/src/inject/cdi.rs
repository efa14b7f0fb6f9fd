//! CDI specs of this plugin: one for the driver, and one per answer to Allocate.
//!
//! The spec of an answer holds the device nodes and variables of its container, and the hooks and files that enforce limits. All
//! else of the driver is one static device, made from the vendor's specs ([`vendor`]), which the runtime parses once.
//!
//! Container runtimes read the spec directory into a cache, some time after it changes ([`readers`]). So a device name never
//! changes its content at once: each answer has a name of its own, and [`SpecDir::write`] retires a name before it changes.
//!
//! The structures are JSON values, so that NVIDIA's edits are passed on with fields that this plugin does not know; the crate
//! `container-device-interface` would bring two hundred others with it.

pub(crate) mod dir;
pub(crate) mod readers;
pub(crate) mod vendor;

use std::collections::BTreeMap;
use std::path::Path;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use serde_json::{Map, Value, json};

use crate::devices::extended_resource::ExtendedResource;
use crate::fnv::fnv1a;

pub(crate) use dir::{SpecDir, SpecError};

/// Vendor and class of the devices that stand for answers to Allocate.
pub(crate) const CONTAINER_KIND: &str = "gpushare.dev/gpu";

/// The kind of the device that stands for the driver, and its fully qualified name.
const DRIVER_KIND: &str = "gpushare.dev/driver";
pub(crate) const DRIVER_DEVICE: &str = "gpushare.dev/driver=all";

/// The least CDI version that allows all that this plugin writes: names that begin with a digit, and `hostPath` of a node.
const VERSION: &str = "0.5.0";

/// The fully qualified name of the CDI device of an answer; `fresh` is a number that no other answer has.
pub(crate) fn container_device(resource: ExtendedResource, ids: &[String], fresh: u64) -> String {
    let mut ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    // kubelet sends the same IDs in any order.
    ids.sort_unstable();
    let set = fnv1a(&format!("{resource:?}\n{}", ids.join("\n")));
    format!("{CONTAINER_KIND}={set:016x}-{fresh:x}")
}

/// The short name in a fully qualified CDI device name, if the device stands for an answer of this plugin.
fn name_of(qualified: &str) -> Option<&str> {
    qualified.strip_prefix(CONTAINER_KIND)?.strip_prefix('=')
}

/// The short name of this plugin's CDI device in an answer to Allocate; none if the answer names devices without CDI.
pub(crate) fn device_of(answer: &ContainerAllocateResponse) -> Option<&str> {
    answer.cdi_devices.iter().find_map(|device| name_of(&device.name))
}

/// The changes that a CDI spec makes to a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Edits {
    /// CDI version of the vendor's spec that edits come from, if any do.
    pub(crate) version: Option<String>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) device_nodes: Vec<Value>,
    /// All other edits, such as mounts and hooks, as CDI writes them, by field.
    pub(crate) others: Map<String, Value>,
}

impl Edits {
    /// Adds a device node by its path on the host, which is its path in the container too.
    pub(crate) fn add_node(&mut self, path: &Path) {
        let node = json!({"path": path, "hostPath": path, "permissions": "rw"});
        // Several devices of a container may need the same node.
        if !self.device_nodes.contains(&node) {
            self.device_nodes.push(node);
        }
    }

    fn to_json(&self) -> Map<String, Value> {
        let mut fields = self.others.clone();
        if !self.env.is_empty() {
            let pairs = self.env.iter();
            let env: Vec<String> = pairs.map(|(name, value)| format!("{name}={value}")).collect();
            fields.insert("env".to_owned(), json!(env));
        }
        if !self.device_nodes.is_empty() {
            fields.insert("deviceNodes".to_owned(), json!(self.device_nodes));
        }
        fields
    }
}

/// The environment variables in a CDI list `env`, whose items are `NAME=value`.
fn variables(list: &[Value]) -> impl Iterator<Item = (String, String)> {
    let pairs = list.iter().filter_map(|pair| pair.as_str()?.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned()))
}

/// The text of a spec with one device. Compact, because the runtime parses all specs at every change of their directory.
fn spec_text(kind: &str, name: &str, edits: &Edits) -> String {
    // A runtime refuses a spec with fields that are newer than its version, and NVIDIA's tools write the least that theirs needs.
    let version = edits.version.as_deref().unwrap_or(VERSION).max(VERSION);
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
    fn each_answer_to_allocate_names_another_cdi_device() {
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
        let device = container_device(ExtendedResource::Memory, &ids(&["a-1", "a-2"]), 17);
        assert_eq!(
            device,
            container_device(ExtendedResource::Memory, &ids(&["a-2", "a-1"]), 17),
            "the order of IDs does not matter"
        );
        for other in [
            container_device(ExtendedResource::Memory, &ids(&["a-1", "a-2"]), 18),
            container_device(ExtendedResource::Shared, &ids(&["a-1", "a-2"]), 17),
            container_device(ExtendedResource::Memory, &ids(&["a-1"]), 17),
        ] {
            assert_ne!(device, other);
        }
        assert_eq!(name_of(&device).map(str::len), Some(19));
        assert_eq!(name_of("nvidia.com/gpu=all"), None);
    }

    #[test]
    fn a_spec_has_a_version_with_all_fields_of_this_plugin() {
        for (of_vendor, expected) in [("0.3.0", "0.5.0"), ("1.0.0", "1.0.0")] {
            let edits = Edits {
                version: Some(of_vendor.to_owned()),
                ..Edits::default()
            };
            let text = spec_text(CONTAINER_KIND, "0123-1", &edits);
            assert!(text.contains(&format!("\"cdiVersion\":\"{expected}\"")), "{text}");
        }
    }

    #[test]
    fn the_content_of_a_spec() {
        let mut edits = Edits {
            env: [("NVIDIA_VISIBLE_DEVICES".to_owned(), "void".to_owned())].into(),
            ..Edits::default()
        };
        edits.add_node(Path::new("/dev/nvidia0"));
        edits.add_node(Path::new("/dev/nvidia0"));
        let text = spec_text(CONTAINER_KIND, "0123-1", &edits);
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
