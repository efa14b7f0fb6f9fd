//! The device manager's state: the devices of plugins, their holders, and the choice of devices for a container.
//!
//! Pure but for the clock inside an endpoint; calls to plugins happen between [`DeviceManagerState::begin_choice`] and
//! [`DeviceManagerState::finish_choice`], without the lock that guards this state.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use prost::Message;
use proto::kubelet::deviceplugin::{ContainerAllocateResponse, Device, TopologyInfo};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use tokio::time::Instant;

use super::checkpoint::CheckpointEntry;
use super::endpoint::Endpoint;
use super::pod::{ContainerSpec, KubeletPod};

#[derive(Clone, Debug)]
pub(crate) struct ResourceRequest<'a> {
    pub(crate) holder: &'a DeviceHolder,
    pub(crate) resource: &'a str,
    pub(crate) required: usize,
    pub(crate) skips_allocation: bool,
}

/// A choice of devices before the plugin's preference is known.
#[derive(Debug)]
pub(crate) struct OpenChoice {
    /// Reused devices that the container gets in any case.
    pub(crate) taken: BTreeSet<DeviceId>,
    /// The devices for the rest; empty if the reused ones suffice.
    pub(crate) available: BTreeSet<DeviceId>,
    /// The number of devices in the end, those in `taken` included.
    pub(crate) required: usize,
}

/// The devices of a resource, as its plugin listed them last.
#[derive(Debug, Default)]
struct PluginDevices {
    healthy: BTreeSet<DeviceId>,
    unhealthy: BTreeSet<DeviceId>,
    topology: BTreeMap<DeviceId, TopologyInfo>,
    /// The healthy devices as they stand in the checkpoint, which is written at every allocation.
    rendered: String,
}

impl PluginDevices {
    fn render(mut self) -> Self {
        let healthy: Vec<&str> = self.healthy.iter().map(AsRef::as_ref).collect();
        self.rendered = serde_json::to_string(&healthy).unwrap_or_default();
        self
    }
}

#[derive(Debug, Default)]
pub(crate) struct DeviceManagerState {
    plugin_devices: BTreeMap<String, PluginDevices>,
    endpoints: BTreeMap<String, Arc<Endpoint>>,
    /// Devices in use, kept beside `held` and rebuilt from it when a pod has ended.
    allocated: BTreeMap<String, BTreeSet<DeviceId>>,
    held: HeldDevices,
}

impl DeviceManagerState {
    /// The state after a start: the grants of the checkpoint, and for each of its resources a stopped endpoint without devices.
    pub(crate) fn restore(held: HeldDevices, registered: impl IntoIterator<Item = String>) -> Self {
        let mut devices = Self {
            allocated: held.devices(),
            held,
            ..Self::default()
        };
        // readCheckpoint: a stopped endpoint keeps the capacity of a resource at zero until its plugin registers again.
        for resource in registered {
            let stopped = Arc::new(Endpoint::stopped(&resource));
            devices.endpoints.insert(resource.clone(), stopped);
            devices
                .plugin_devices
                .insert(resource, PluginDevices::default().render());
        }
        devices
    }

    pub(crate) fn held(&self) -> &HeldDevices {
        &self.held
    }

    pub(crate) fn endpoint(&self, resource: &str) -> Option<&Arc<Endpoint>> {
        self.endpoints.get(resource)
    }

    pub(crate) fn registered_json(&self) -> String {
        let mut pairs = Vec::new();
        for (resource, listed) in &self.plugin_devices {
            let name = serde_json::Value::from(resource.as_str());
            pairs.push(format!("{name}:{}", listed.rendered));
        }
        format!("{{{}}}", pairs.join(","))
    }

    pub(crate) fn connect(&mut self, resource: &str, endpoint: Arc<Endpoint>) {
        self.endpoints.insert(resource.to_owned(), endpoint);
    }

    pub(crate) fn update(&mut self, resource: &str, list: Vec<Device>) {
        let mut listed = PluginDevices::default();
        for device in list {
            let id: DeviceId = Arc::from(device.id);
            let side = if device.health == proto::kubelet::HEALTHY {
                &mut listed.healthy
            } else {
                &mut listed.unhealthy
            };
            side.insert(Arc::clone(&id));
            if let Some(topology) = device.topology.filter(|topology| !topology.nodes.is_empty()) {
                listed.topology.insert(id, topology);
            }
        }
        self.plugin_devices.insert(resource.to_owned(), listed.render());
    }

    /// Marks the devices of a plugin that was disconnected as unhealthy, and stops its endpoint.
    pub(crate) fn disconnect(&mut self, resource: &str) {
        let Some(endpoint) = self.endpoints.get(resource) else {
            return;
        };
        // PluginDisconnected: the stop time starts the grace of GetCapacity, and markResourceUnhealthy keeps
        // the devices in the capacity but not in the allocatable.
        endpoint.stop();
        if let Some(listed) = self.plugin_devices.get_mut(resource) {
            let mut lost = std::mem::take(listed);
            lost.unhealthy.append(&mut lost.healthy);
            *listed = lost.render();
        }
    }

    /// The number of all devices and of healthy devices, by resource.
    pub(crate) fn counts(&self) -> BTreeMap<String, (usize, usize)> {
        let mut counts = BTreeMap::new();
        for (resource, listed) in &self.plugin_devices {
            let n_healthy = listed.healthy.len();
            counts.insert(resource.clone(), (n_healthy + listed.unhealthy.len(), n_healthy));
        }
        counts
    }

    /// `GetCapacity`: removes the resources whose plugin has been gone for its grace, and returns their names.
    pub(crate) fn remove_expired(&mut self) -> Vec<String> {
        let now = Instant::now();
        let mut removed = Vec::new();
        self.endpoints.retain(|resource, endpoint| {
            let is_expired = endpoint.expires_at().is_some_and(|at| at <= now);
            if is_expired && self.plugin_devices.remove(resource).is_some() {
                removed.push(resource.clone());
            }
            !is_expired
        });
        removed
    }

    /// The time at which the next endpoint's grace ends.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.endpoints
            .values()
            .filter_map(|endpoint| endpoint.expires_at())
            .min()
    }

    /// Returns true if a plugin serves this resource, or served it when devices that are still held were allocated.
    pub(crate) fn serves(&self, resource: &str) -> bool {
        self.plugin_devices.contains_key(resource) || self.allocated.contains_key(resource)
    }

    /// Frees the devices of pods that are not active any more.
    pub(crate) fn free_ended(&mut self, active: &BTreeSet<String>) {
        if self.held.retain_pods(|pod| active.contains(pod)) {
            // As in kubelet, devices that are chosen for a container and not granted yet are forgotten too.
            self.allocated = self.held.devices();
        }
    }

    /// Rebuilds the devices in use from the held ones, after an allocation failed.
    pub(crate) fn roll_back(&mut self) {
        self.allocated = self.held.devices();
    }

    /// Checks the request and takes reusable devices first; `None` if the container has its devices, or needs none. Further
    /// devices are chosen in [`Self::finish_choice`], with the plugin's preference.
    pub(crate) fn begin_choice(
        &mut self,
        request: &ResourceRequest<'_>,
        reusable: &BTreeSet<DeviceId>,
        rng: &mut StdRng,
    ) -> Result<Option<OpenChoice>> {
        let ResourceRequest {
            holder,
            resource,
            required,
            ..
        } = *request;
        let held = self
            .held
            .grant(holder, resource)
            .map(Grant::devices)
            .unwrap_or_default();
        // devicesToAllocate: devices are chosen once, so a changed limit of an admitted pod is an error.
        ensure!(
            held.is_empty() || held.len() == required,
            "pod \"{}\" container \"{}\" changed request for resource \"{resource}\" from {} to {required}",
            holder.pod,
            holder.container,
            held.len()
        );
        // After a restart kubelet leaves running containers alone, even if their devices are unhealthy.
        if request.skips_allocation {
            return Ok(None);
        }
        // After a reboot kubelet may admit a pod before its plugin has registered. It fails the pod and does not wait.
        let Some(listed) = self.plugin_devices.get(resource) else {
            bail!("cannot allocate unregistered device {resource}");
        };
        ensure!(
            !listed.healthy.is_empty(),
            "no healthy devices present; cannot allocate unhealthy devices {resource}"
        );
        // A container that starts again must not get a device that has become unhealthy.
        ensure!(
            held.is_subset(&listed.healthy),
            "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
        );
        if !held.is_empty() || required == 0 {
            return Ok(None);
        }
        // Devices of earlier init containers come first: the container runs after them, and nothing else may have them.
        let mut taken = BTreeSet::new();
        self.take(resource, reusable, required, &mut taken, rng);
        let mut available = BTreeSet::new();
        if taken.len() < required {
            available = self.available(resource);
            let missing = required - taken.len();
            ensure!(
                available.len() >= missing,
                "requested number of devices unavailable for {resource}. Requested: {missing}, Available: {}",
                available.len()
            );
        }
        Ok(Some(OpenChoice {
            taken,
            available,
            required,
        }))
    }

    /// Completes a choice: takes preferred devices that are available, and the rest at random.
    pub(crate) fn finish_choice(
        &mut self,
        resource: &str,
        choice: OpenChoice,
        preferred: &[String],
        rng: &mut StdRng,
    ) -> BTreeSet<DeviceId> {
        let OpenChoice {
            mut taken,
            available,
            required,
        } = choice;
        // callGetPreferredAllocationIfAvailable: the answer may name any devices, and kubelet uses those that are available.
        let preferred = preferred
            .iter()
            .filter_map(|id| available.get(id.as_str()).cloned())
            .collect();
        self.take(resource, &preferred, required, &mut taken, rng);
        self.take(resource, &available, required, &mut taken, rng);
        taken
    }

    /// Records the plugin's Allocate answer for the chosen devices.
    pub(crate) fn grant(
        &mut self,
        request: &ResourceRequest<'_>,
        chosen: &BTreeSet<DeviceId>,
        response: ContainerAllocateResponse,
    ) {
        let mut by_numa: BTreeMap<i64, Vec<DeviceId>> = BTreeMap::new();
        for id in chosen {
            // A device with two NUMA nodes is in both lists of the checkpoint; a device without any is in the list of
            // nodeWithoutTopology.
            let nodes = match self.topology(request.resource, id) {
                Some(topology) => topology.nodes.iter().map(|node| node.id).collect(),
                None => vec![NO_NUMA],
            };
            for numa in nodes {
                by_numa.entry(numa).or_default().push(Arc::clone(id));
            }
        }
        self.held
            .insert(request.holder, request.resource, by_numa, response);
    }

    /// The NUMA nodes of a device, if its plugin named them.
    pub(crate) fn topology(&self, resource: &str, id: &str) -> Option<&TopologyInfo> {
        self.plugin_devices.get(resource)?.topology.get(id)
    }

    pub(crate) fn is_healthy(&self, resource: &str, id: &str) -> bool {
        let listed = self.plugin_devices.get(resource);
        listed.is_some_and(|listed| listed.healthy.contains(id))
    }

    /// Healthy devices of a resource that no container holds.
    fn available(&self, resource: &str) -> BTreeSet<DeviceId> {
        match (self.plugin_devices.get(resource), self.allocated.get(resource)) {
            (Some(listed), Some(used)) => listed.healthy.difference(used).cloned().collect(),
            (Some(listed), None) => listed.healthy.clone(),
            (None, _) => BTreeSet::new(),
        }
    }

    /// Takes devices at random until `required` are taken, and marks them as allocated.
    fn take(
        &mut self,
        resource: &str,
        from: &BTreeSet<DeviceId>,
        required: usize,
        taken: &mut BTreeSet<DeviceId>,
        rng: &mut StdRng,
    ) {
        let missing = required.saturating_sub(taken.len());
        let mut candidates: Vec<DeviceId> = from.difference(taken).cloned().collect();
        // kubelet walks a Go set here, so each of these devices may be taken, whatever its name.
        let (picked, _) = candidates.partial_shuffle(rng, missing);
        let in_use = self.allocated.entry(resource.to_owned()).or_default();
        for id in picked {
            in_use.insert(Arc::clone(id));
            taken.insert(Arc::clone(id));
        }
    }
}

/// A device's name, unique within its resource.
pub(crate) type DeviceId = Arc<str>;

/// The NUMA node of devices without topology in the checkpoint.
pub(crate) const NO_NUMA: i64 = -1;

/// A container that holds devices: the UID of its pod, and its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DeviceHolder {
    pub(crate) pod: String,
    pub(crate) container: String,
}

impl DeviceHolder {
    pub(crate) fn new(pod: &KubeletPod, container: &ContainerSpec) -> Self {
        Self {
            pod: pod.uid.clone(),
            container: container.name.clone(),
        }
    }
}

/// Devices of one resource that one container holds, with the plugin's answer.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) by_numa: BTreeMap<i64, Vec<DeviceId>>,
    pub(crate) response: Arc<ContainerAllocateResponse>,
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

fn map_device_ids<A, B>(by_numa: &BTreeMap<i64, Vec<A>>, id: fn(&A) -> B) -> BTreeMap<i64, Vec<B>> {
    by_numa
        .iter()
        .map(|(numa, ids)| (*numa, ids.iter().map(id).collect()))
        .collect()
}

#[derive(Debug, Default)]
pub(crate) struct HeldDevices(BTreeMap<DeviceHolder, BTreeMap<String, Grant>>);

impl HeldDevices {
    pub(crate) fn insert(
        &mut self,
        holder: &DeviceHolder,
        resource: &str,
        by_numa: BTreeMap<i64, Vec<DeviceId>>,
        response: ContainerAllocateResponse,
    ) {
        let entry = CheckpointEntry {
            pod_uid: holder.pod.clone(),
            container_name: holder.container.clone(),
            resource_name: resource.to_owned(),
            device_ids: map_device_ids(&by_numa, ToString::to_string),
            alloc_resp: k8s_openapi::ByteString(response.encode_to_vec()),
        };
        let rendered = serde_json::to_string(&entry).unwrap_or_default();
        let grant = Grant {
            by_numa,
            response: Arc::new(response),
            rendered,
        };
        let grants = self.0.entry(holder.clone()).or_default();
        grants.insert(resource.to_owned(), grant);
    }

    /// Restores the entries of a checkpoint; an entry whose answer does not decode is skipped.
    pub(crate) fn restore(entries: Vec<CheckpointEntry>) -> Self {
        let mut held = Self::default();
        for entry in entries {
            let holder = DeviceHolder {
                pod: entry.pod_uid,
                container: entry.container_name,
            };
            let by_numa = map_device_ids(&entry.device_ids, |id| Arc::from(id.as_str()));
            match ContainerAllocateResponse::decode(entry.alloc_resp.0.as_slice()) {
                Ok(response) => held.insert(&holder, &entry.resource_name, by_numa, response),
                Err(error) => {
                    tracing::error!(pod = holder.pod, %error, "checkpoint holds an answer that does not decode");
                }
            }
        }
        held
    }

    pub(crate) fn grant(&self, holder: &DeviceHolder, resource: &str) -> Option<&Grant> {
        self.0.get(holder)?.get(resource)
    }

    pub(crate) fn of(&self, holder: &DeviceHolder) -> impl Iterator<Item = (&String, &Grant)> {
        self.0.get(holder).into_iter().flatten()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&DeviceHolder, &String, &Grant)> {
        self.0.iter().flat_map(|(holder, grants)| {
            grants
                .iter()
                .map(move |(resource, grant)| (holder, resource, grant))
        })
    }

    pub(crate) fn rendered(&self) -> Vec<&str> {
        self.iter().map(|(_, _, grant)| grant.rendered.as_str()).collect()
    }

    /// Removes the grants of pods that `keep` refuses; true if there were any.
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
                .append(&mut grant.devices());
        }
        all
    }
}

#[cfg(test)]
mod tests;
