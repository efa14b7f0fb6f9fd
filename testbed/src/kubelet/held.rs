//! The devices that containers hold, with the plugin's answer to Allocate; the checkpoint stores them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prost::Message;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use super::checkpoint::Entry;
use super::pod::{ContainerSpec, PodSpec};

/// A device's name, unique within its resource.
pub(crate) type DeviceId = Arc<str>;

/// NUMA node under which devices without topology are filed.
pub(crate) const NO_NUMA: i64 = -1;

/// One container of one pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Holder {
    pub(crate) pod: String,
    pub(crate) container: String,
}

impl Holder {
    pub(crate) fn new(pod: &PodSpec, container: &ContainerSpec) -> Self {
        Self {
            pod: pod.uid.clone(),
            container: container.name.clone(),
        }
    }
}

/// The devices of one resource that one container holds.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) by_numa: BTreeMap<i64, Vec<DeviceId>>,
    pub(crate) response: Arc<ContainerAllocateResponse>,
    /// This grant as it stands in the checkpoint.
    pub(crate) rendered: String,
}

impl Grant {
    pub(crate) fn devices(&self) -> BTreeSet<DeviceId> {
        self.by_numa.values().flatten().cloned().collect()
    }

    /// The device IDs, sorted.
    pub(crate) fn device_ids(&self) -> Vec<String> {
        self.devices().iter().map(ToString::to_string).collect()
    }
}

/// All grants of the node.
#[derive(Debug, Default)]
pub(crate) struct Held(BTreeMap<Holder, BTreeMap<String, Grant>>);

impl Held {
    pub(crate) fn insert(
        &mut self,
        holder: &Holder,
        resource: &str,
        by_numa: BTreeMap<i64, Vec<DeviceId>>,
        response: ContainerAllocateResponse,
    ) {
        let entry = Entry {
            pod_uid: holder.pod.clone(),
            container_name: holder.container.clone(),
            resource_name: resource.to_owned(),
            device_ids: by_numa
                .iter()
                .map(|(numa, ids)| (*numa, ids.iter().map(|id| id.as_ref().to_owned()).collect()))
                .collect(),
            alloc_resp: k8s_openapi::ByteString(response.encode_to_vec()),
        };
        let rendered = serde_json::to_string(&entry).unwrap_or_default();
        let grant = Grant {
            by_numa,
            response: Arc::new(response),
            rendered,
        };
        self.0
            .entry(holder.clone())
            .or_default()
            .insert(resource.to_owned(), grant);
    }

    /// Takes over the entries of a checkpoint; an answer that does not decode is skipped.
    pub(crate) fn restore(entries: Vec<Entry>) -> Self {
        let mut held = Self::default();
        for entry in entries {
            let holder = Holder {
                pod: entry.pod_uid,
                container: entry.container_name,
            };
            let by_numa = entry
                .device_ids
                .into_iter()
                .map(|(numa, ids)| (numa, ids.into_iter().map(Arc::from).collect()))
                .collect();
            match ContainerAllocateResponse::decode(entry.alloc_resp.0.as_slice()) {
                Ok(response) => held.insert(&holder, &entry.resource_name, by_numa, response),
                Err(error) => {
                    tracing::error!(pod = holder.pod, %error, "checkpoint holds an answer that does not decode");
                }
            }
        }
        held
    }

    pub(crate) fn grant(&self, holder: &Holder, resource: &str) -> Option<&Grant> {
        self.0.get(holder)?.get(resource)
    }

    pub(crate) fn of(&self, holder: &Holder) -> impl Iterator<Item = (&String, &Grant)> {
        self.0.get(holder).into_iter().flatten()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Holder, &String, &Grant)> {
        self.0.iter().flat_map(|(holder, grants)| {
            grants
                .iter()
                .map(move |(resource, grant)| (holder, resource, grant))
        })
    }

    /// Every grant as it stands in the checkpoint.
    pub(crate) fn rendered(&self) -> Vec<&str> {
        self.iter().map(|(_, _, grant)| grant.rendered.as_str()).collect()
    }

    /// Removes the pods that `keep` refuses; true if there was one.
    pub(crate) fn retain_pods(&mut self, keep: impl Fn(&str) -> bool) -> bool {
        let before = self.0.len();
        self.0.retain(|holder, _| keep(&holder.pod));
        self.0.len() != before
    }

    /// All devices held, by resource.
    pub(crate) fn devices(&self) -> BTreeMap<String, BTreeSet<DeviceId>> {
        let mut all: BTreeMap<String, BTreeSet<DeviceId>> = BTreeMap::new();
        for (_, resource, grant) in self.iter() {
            all.entry(resource.clone())
                .or_default()
                .extend(grant.by_numa.values().flatten().cloned());
        }
        all
    }
}
