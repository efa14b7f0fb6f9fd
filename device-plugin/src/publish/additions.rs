//! What the operator says of this node's devices in files: labels that pods select by, and the partitions of its GPUs.
//!
//! The files are read again all the time, so a `ConfigMap` that is mounted may change. A file that is not there says nothing; one
//! that cannot be understood keeps the plugin from starting, and changes nothing while it runs.
//!
//! ```yaml
//! # --device-labels: by type, by PCI address, or by the UUID of a GPU; the narrower wins, label by label
//! devices:
//!   rdma: {fabric: storage}
//!   "0000:1f:00.0": {fabric: compute}
//! # of virtual functions: by the type of their device, its address, or their own
//! virtualFunctions:
//!   rdma: {type: general}
//!   "0000:1f:00.2": {type: fast}
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::one_line;
use proto::device::VirtualFunctionGroup;
use proto::topology::{GpuPartitionTable, TopologyError, read_partitions};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::inventory::pci;

/// The prefix of labels that only this plugin writes.
const OWN: &str = "gpushare/";

/// Longest name and value of a label.
const MAX_LABEL: usize = 63;

/// Where the files are, as far as there are any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// Labels, in YAML or JSON.
    pub labels: Option<PathBuf>,
    /// A partition table, in the JSON of its annotation or in YAML.
    pub partitions: Option<PathBuf>,
}

/// What the files say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Additions {
    /// Labels of devices.
    pub labels: DeviceLabels,
    /// The partitions of the node's GPUs, if the file tells.
    pub partitions: Option<GpuPartitionTable>,
}

/// A file that cannot be understood.
#[derive(Debug, thiserror::Error)]
pub enum AdditionsError {
    /// It is there and cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It is not of the form that it must have.
    #[error("{} is not of the form that is asked for", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What the parser said, with the place.
        #[source]
        source: serde_yaml_ng::Error,
    },
    /// A label is none.
    #[error("{}: the label {label:?} of {device:?} {rule}", path.display())]
    Label {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        device: String,
        /// The label.
        label: String,
        /// What is wrong with it.
        rule: &'static str,
    },
    /// The table says something that cannot be.
    #[error("{}", path.display())]
    Partitions {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: TopologyError,
    },
}

type Labels = BTreeMap<String, String>;

/// Labels of devices and of their virtual functions, by what the file calls them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceLabels {
    #[serde(default)]
    devices: BTreeMap<String, Labels>,
    #[serde(default)]
    virtual_functions: BTreeMap<String, Labels>,
}

impl DeviceLabels {
    /// The labels of a device.
    pub fn of(&self, device_type: &str, id: &str, bus_id: Option<&str>) -> Labels {
        merged(&self.devices, [Some(device_type), bus_id, Some(id)])
    }

    /// The virtual functions of a device in groups of equal labels, in the order of their first ones.
    pub fn regroup(
        &self,
        device_type: &str,
        device: &str,
        groups: &[VirtualFunctionGroup],
    ) -> Vec<VirtualFunctionGroup> {
        let mut regrouped = Vec::<VirtualFunctionGroup>::new();
        for (labels, function) in groups
            .iter()
            .flat_map(|group| group.vfs.iter().map(|function| (&group.labels, function)))
        {
            let mut labels = labels.clone();
            labels.extend(merged(
                &self.virtual_functions,
                [Some(device_type), Some(device), Some(&function.bus_id)],
            ));
            match regrouped.iter_mut().find(|group| group.labels == labels) {
                Some(group) => group.vfs.push(function.clone()),
                None => regrouped.push(VirtualFunctionGroup {
                    labels,
                    vfs: vec![function.clone()],
                }),
            }
        }
        regrouped
    }

    /// With PCI addresses in the form of sysfs.
    fn normalised(self) -> Self {
        let address = |(name, labels): (String, Labels)| (pci::address(&name).unwrap_or(name), labels);
        let [devices, virtual_functions] =
            [self.devices, self.virtual_functions].map(|all| all.into_iter().map(address).collect());
        Self {
            devices,
            virtual_functions,
        }
    }

    /// The first label that is none: whose it is, and what is wrong with it.
    fn fault(&self) -> Option<(String, String, &'static str)> {
        let all = self.devices.iter().chain(&self.virtual_functions);
        let labels =
            all.flat_map(|(device, labels)| labels.iter().map(move |(name, value)| (device, name, value)));
        let faults = labels.filter_map(|(device, name, value)| {
            Some((device.clone(), format!("{name}={value}"), fault(name, value)?))
        });
        faults.into_iter().next()
    }
}

/// The labels under all of these names; those of a later name win.
fn merged<const N: usize>(all: &BTreeMap<String, Labels>, names: [Option<&str>; N]) -> Labels {
    names
        .into_iter()
        .flatten()
        .filter_map(|name| all.get(name))
        .flatten()
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// What is wrong with a label.
fn fault(name: &str, value: &str) -> Option<&'static str> {
    let is_text = |text: &str| {
        let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
        text.len() <= MAX_LABEL
            && text.bytes().all(is_inner)
            && is_end(text.bytes().next())
            && is_end(text.bytes().last())
    };
    let (prefix, short) = name
        .split_once('/')
        .map_or((None, name), |(prefix, short)| (Some(prefix), short));
    if name.starts_with(OWN) {
        Some("is written by this plugin alone")
    } else if !is_text(short)
        || prefix.is_some_and(|prefix| prefix.len() > 253 || !prefix.split('.').all(is_text))
    {
        Some("has a name that no label may have")
    } else if !value.is_empty() && !is_text(value) {
        Some("has a value that no label may have")
    } else {
        None
    }
}

impl Additions {
    /// Reads the files.
    ///
    /// # Errors
    /// One is there and cannot be understood.
    pub fn read(files: &Files) -> Result<Self, AdditionsError> {
        let labels = files
            .labels
            .as_deref()
            .map(read_labels)
            .transpose()?
            .unwrap_or_default();
        let partitions = files.partitions.as_deref().map(read_table).transpose()?.flatten();
        Ok(Self { labels, partitions })
    }
}

fn read_labels(path: &Path) -> Result<DeviceLabels, AdditionsError> {
    let labels = read::<DeviceLabels>(path)?.unwrap_or_default().normalised();
    match labels.fault() {
        Some((device, label, rule)) => Err(AdditionsError::Label {
            path: path.to_owned(),
            device,
            label,
            rule,
        }),
        None => Ok(labels),
    }
}

fn read_table(path: &Path) -> Result<Option<GpuPartitionTable>, AdditionsError> {
    let Some(value) = read::<serde_json::Value>(path)? else {
        return Ok(None);
    };
    let table = read_partitions(&value.to_string());
    table.map(Some).map_err(|source| AdditionsError::Partitions {
        path: path.to_owned(),
        source,
    })
}

/// What a file holds; nothing if it is empty or not there.
fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, AdditionsError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(AdditionsError::Read {
                path: path.to_owned(),
                source,
            });
        }
    };
    serde_yaml_ng::from_str(&text).map_err(|source| AdditionsError::Form {
        path: path.to_owned(),
        source,
    })
}

/// Reads the files again and again until the task is dropped.
pub async fn watch_additions(files: Files, interval: Duration, told: watch::Sender<Arc<Additions>>) {
    if files == Files::default() {
        std::future::pending::<()>().await;
    }
    let mut complaint = None;
    loop {
        sleep(interval).await;
        match Additions::read(&files) {
            Ok(now) => {
                complaint = None;
                let is_other = told.send_if_modified(|before| {
                    let is_other = **before != now;
                    *before = Arc::new(now);
                    is_other
                });
                if is_other {
                    info!("the files of labels and partitions say something else now");
                }
            }
            Err(error) => {
                let problem = one_line(&error);
                if complaint.as_ref() != Some(&problem) {
                    warn!(error = problem, "keeping the last readable labels and partitions");
                    complaint = Some(problem);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
