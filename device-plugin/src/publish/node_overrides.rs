//! The cluster administrator's files about this node's devices: labels by which pods select them, and the partitions of its GPUs.
//! docs/topology.md has an example of each.
//!
//! The plugin reads the files again and again, so the `ConfigMap` behind them may change. A missing file overrides nothing. With
//! an invalid file of labels the plugin does not start; an invalid file of partitions is published as a problem. A plugin that
//! runs keeps the last valid content.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use daemon::api_server::one_line;
use proto::device::VirtualFunctionGroup;
use proto::topology::{GpuPartitionTable, read_partitions};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::info;

use crate::devices::inventory::pci;
use crate::logged_error::LoggedError;

/// The prefix of labels that only this plugin writes.
const OWN_PREFIX: &str = "gpushare/";

/// Most characters of a label's name, without prefix, and of its value.
pub(crate) const MAX_LABEL: usize = 63;

/// Most characters of the prefix of a label's name.
const MAX_LABEL_PREFIX: usize = 253;

/// The paths of both files; none if the operator's flag is not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OverrideFiles {
    pub(crate) labels: Option<PathBuf>,
    /// A partition table, in the JSON of its annotation or in YAML.
    pub(crate) partitions: Option<PathBuf>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeOverrides {
    pub(crate) labels: DeviceLabels,
    pub(crate) partitions: Option<GpuPartitionTable>,
    /// The mistake in a file of partitions that cannot be read; `partitions` then has its last valid content, if it had any.
    pub(crate) partitions_problem: Option<String>,
}

impl NodeOverrides {
    /// Reads both files and checks their content.
    pub(crate) fn read(files: &OverrideFiles) -> anyhow::Result<Self> {
        let mut overrides = Self::default();
        if let Some(path) = &files.labels {
            overrides.labels = DeviceLabels::read(path)?;
        }
        if let Some(path) = &files.partitions {
            match read_partition_table(path) {
                Ok(table) => overrides.partitions = table,
                // Most pods need no partition, and a plugin that does not start serves none.
                Err(error) => overrides.partitions_problem = Some(one_line(error.as_ref())),
            }
        }
        Ok(overrides)
    }
}

type Labels = BTreeMap<String, String>;

/// Labels of devices and of their virtual functions, by the names that the file uses for them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
// With a misspelled field the file would label nothing, and pods would wait without a reason.
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct DeviceLabels {
    #[serde(default)]
    devices: BTreeMap<String, Labels>,
    #[serde(default)]
    virtual_functions: BTreeMap<String, Labels>,
}

impl DeviceLabels {
    /// Reads the file of device labels, and checks each label.
    fn read(path: &Path) -> anyhow::Result<Self> {
        let read = read_file::<Self>(path)?.unwrap_or_default();
        let labels = Self {
            devices: with_sysfs_addresses(read.devices),
            virtual_functions: with_sysfs_addresses(read.virtual_functions),
        };
        // A pod's hint selects devices by a label selector of Kubernetes, which cannot name an invalid label.
        for (device, of_device) in labels.devices.iter().chain(&labels.virtual_functions) {
            for (name, value) in of_device {
                if let Some(rule) = broken_rule(name, value) {
                    let (path, label) = (path.display(), format!("{name}={value}"));
                    bail!("{path}: the label {label:?} of {device:?} {rule}");
                }
            }
        }
        Ok(labels)
    }

    /// The file's labels of a device: of its type, then of its PCI address, then of its ID; the later ones win.
    pub(crate) fn of_device(&self, device_type: &str, id: &str, bus_id: Option<&str>) -> Labels {
        merge(&self.devices, [Some(device_type), bus_id, Some(id)])
    }

    /// The virtual functions of the device at this address in groups of equal labels, in the order of the first of each group.
    pub(crate) fn regroup(
        &self,
        device_type: &str,
        address: &str,
        groups: &[VirtualFunctionGroup],
    ) -> Vec<VirtualFunctionGroup> {
        let mut regrouped = Vec::<VirtualFunctionGroup>::new();
        for group in groups {
            for function in &group.vfs {
                let names = [Some(device_type), Some(address), Some(function.bus_id.as_str())];
                let mut labels = group.labels.clone();
                labels.extend(merge(&self.virtual_functions, names));
                // The Device object has a group for each set of labels, as Koordinator's `vfSelector` reads them.
                match regrouped.iter_mut().find(|group| group.labels == labels) {
                    Some(group) => group.vfs.push(function.clone()),
                    None => regrouped.push(VirtualFunctionGroup {
                        labels,
                        vfs: vec![function.clone()],
                    }),
                }
            }
        }
        regrouped
    }
}

/// The same labels, with each PCI address among the names in the form of sysfs, whatever its form in the file.
fn with_sysfs_addresses(labels: BTreeMap<String, Labels>) -> BTreeMap<String, Labels> {
    let mut converted = BTreeMap::new();
    for (name, of_device) in labels {
        converted.insert(pci::address(&name).unwrap_or(name), of_device);
    }
    converted
}

/// The labels that the file has under any of these names; those of a later name win.
fn merge(all: &BTreeMap<String, Labels>, names: [Option<&str>; 3]) -> Labels {
    let mut merged = Labels::new();
    for name in names.into_iter().flatten() {
        merged.extend(all.get(name).cloned().unwrap_or_default());
    }
    merged
}

/// The rule of Kubernetes or of this plugin that a label breaks, if it breaks one.
fn broken_rule(name: &str, value: &str) -> Option<&'static str> {
    let is_prefix = |prefix: &str| prefix.len() <= MAX_LABEL_PREFIX && prefix.split('.').all(is_label_text);
    let (is_prefix_valid, short) = match name.split_once('/') {
        Some((prefix, short)) => (is_prefix(prefix), short),
        None => (true, name),
    };
    if name.starts_with(OWN_PREFIX) {
        Some("is written by this plugin alone")
    } else if !is_label_text(short) || !is_prefix_valid {
        Some("has a name that no label may have")
    } else if !value.is_empty() && !is_label_text(value) {
        Some("has a value that no label may have")
    } else {
        None
    }
}

/// Returns true if the text may be a label's value, or a part of its name.
pub(crate) fn is_label_text(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let (Some(first), Some(last)) = (text.bytes().next(), text.bytes().last()) else {
        return false;
    };
    text.len() <= MAX_LABEL
        && text.bytes().all(is_inner)
        && first.is_ascii_alphanumeric()
        && last.is_ascii_alphanumeric()
}

fn read_partition_table(path: &Path) -> anyhow::Result<Option<GpuPartitionTable>> {
    let Some(value) = read_file::<serde_json::Value>(path)? else {
        return Ok(None);
    };
    let table = read_partitions(&value.to_string());
    table.map(Some).with_context(|| path.display().to_string())
}

/// Reads a file of YAML or JSON; `None` if it is empty or does not exist.
fn read_file<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Option<T>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        // An optional ConfigMap that does not exist is mounted as an empty directory.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.with_context(|| format!("cannot read {}", path.display()))?,
    };
    serde_yaml_ng::from_str(&text).with_context(|| format!("{} is not of the expected form", path.display()))
}

/// Reads the files at this interval until the task is dropped, and passes on content that has changed and is valid.
pub(crate) async fn watch_node_overrides(
    files: OverrideFiles,
    interval: Duration,
    overrides: watch::Sender<Arc<NodeOverrides>>,
) {
    if files == OverrideFiles::default() {
        // A task that ends would end the process.
        std::future::pending::<()>().await;
    }
    let mut logged = LoggedError::default();
    loop {
        sleep(interval).await;
        match NodeOverrides::read(&files) {
            Ok(mut now) => {
                logged.clear();
                if now.partitions_problem.is_some() {
                    now.partitions.clone_from(&overrides.borrow().partitions);
                }
                if **overrides.borrow() != now {
                    overrides.send_replace(Arc::new(now));
                    info!("the files of labels and partitions have changed");
                }
            }
            Err(error) => logged.warn(error.as_ref(), "keeping the last valid labels and partitions"),
        }
    }
}

#[cfg(test)]
mod tests;
