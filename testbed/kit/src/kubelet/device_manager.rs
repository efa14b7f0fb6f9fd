//! kubelet's device manager: plugins register with it, and containers get their devices from it.
//!
//! Plugins are found by resource name alone. As in kubelet 1.36, the late end of a plugin's old stream therefore disconnects the
//! plugin that has registered since. Topology hints are ignored, as under kubelet's default policy of the topology manager.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use parking_lot::{Mutex, MutexGuard};
use proto::kubelet::DEVICE_PLUGIN_VERSION;
use proto::kubelet::deviceplugin::registration_server::Registration;
use proto::kubelet::deviceplugin::{
    ContainerAllocateResponse, ContainerPreferredAllocationRequest, Empty, RegisterRequest,
};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::checkpoint::{self, CheckpointData};
use super::devices::{DeviceHolder, DeviceId, DeviceManagerState, Grant, HeldDevices, ResourceRequest};
use super::endpoint::Endpoint;
use super::fit::is_extended;
use super::pod::{ContainerSpec, ContainerType, KubeletPod};
use super::run::KubeletRun;
use super::runtime::RunState;
use crate::dice::dice;
use crate::files;

/// Stands for admission where a container's starts are counted, the first of which is 1.
const AT_ADMISSION: u32 = 0;

/// Devices of ordinary init containers by resource. Later containers of the pod get them first.
pub(crate) type Reusable = BTreeMap<String, BTreeSet<DeviceId>>;

/// The answers of plugins to Allocate for one container, and its device IDs by resource.
pub(crate) type Granted = (Vec<Arc<ContainerAllocateResponse>>, BTreeMap<String, Vec<String>>);

/// A plugin whose `ListAndWatch` stream is read.
#[derive(Debug)]
struct RegisteredPlugin {
    endpoint: Arc<Endpoint>,
    /// Ends the stream from kubelet's side.
    closed: CancellationToken,
}

#[derive(Debug)]
pub(crate) struct DeviceManager {
    run: Arc<KubeletRun>,
    devices: Mutex<DeviceManagerState>,
    plugins: Mutex<BTreeMap<String, Arc<RegisteredPlugin>>>,
    pub(crate) capacity_changed: Notify,
}

impl DeviceManager {
    /// Loads the checkpoint; as in kubelet, a broken file counts as none.
    pub(crate) fn start(run: &Arc<KubeletRun>) -> Self {
        let data = checkpoint::read(&run.machine.config.checkpoint()).unwrap_or_else(|error| {
            tracing::error!(%error, "continues without the checkpoint");
            CheckpointData::default()
        });
        let held = HeldDevices::restore(data.pod_device_entries);
        Self {
            run: Arc::clone(run),
            devices: Mutex::new(DeviceManagerState::restore(
                held,
                data.registered_devices.into_keys(),
            )),
            plugins: Mutex::default(),
            capacity_changed: Notify::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, DeviceManagerState> {
        self.devices.lock()
    }

    /// Removes the resources whose plugin has been gone for its grace, and returns their names.
    pub(crate) fn remove_expired(&self) -> Vec<String> {
        let removed = self.lock().remove_expired();
        if !removed.is_empty() {
            self.write_checkpoint();
        }
        removed
    }

    /// Frees the devices of pods that are not active any more, once all pods are known.
    pub(crate) fn free_ended(&self) {
        if self.run.pods.lock().sources_ready {
            let mut devices = self.lock();
            // The pods are read while the devices are locked: a pod admitted in between would lose its devices.
            let active = self.run.pods.lock().active_uids();
            devices.free_ended(&active);
        }
    }

    /// Writes the devices that containers hold, and the registered ones, to the checkpoint file.
    fn write_checkpoint(&self) {
        let devices = self.lock();
        let content = checkpoint::render(&devices.held().rendered(), &devices.registered_json());
        // Written under the lock, so that an older state cannot replace a newer one.
        if let Err(error) = files::replace(&self.run.machine.config.checkpoint(), &content) {
            tracing::error!(%error, "the checkpoint was not written");
        }
    }

    /// Has node status written again, and wakes every wait on this kubelet.
    fn devices_changed(&self) {
        self.capacity_changed.notify_one();
        self.run.machine.notify();
    }
}

impl DeviceManager {
    /// Connects to a plugin that has registered, and starts the task that reads its devices.
    async fn connect(self: &Arc<Self>, resource: &str, socket: &str) -> Result<()> {
        // As in kubelet, Register returns only after the plugin's socket has been dialled.
        let config = &self.run.machine.config;
        let path = config.plugin_dir().join(socket);
        let endpoint = Arc::new(Endpoint::connect(resource, &path).await?);
        let plugin = Arc::new(RegisteredPlugin {
            endpoint: Arc::clone(&endpoint),
            closed: CancellationToken::new(),
        });
        self.plugins
            .lock()
            .insert(resource.to_owned(), Arc::clone(&plugin));
        self.lock().connect(resource, endpoint);
        tracing::info!(resource, socket, "device plugin connected");
        self.run.machine.counts.lock().registrations += 1;
        self.run.machine.notify();
        let manager = Arc::clone(self);
        let resource = resource.to_owned();
        self.run
            .spawn(async move { manager.run_plugin(&resource, plugin).await });
        Ok(())
    }

    /// Breaks a plugin's `ListAndWatch` stream from kubelet's side; false if there is none.
    pub(crate) fn drop_stream(&self, resource: &str) -> bool {
        let plugins = self.plugins.lock();
        let plugin = plugins.get(resource);
        plugin.map(|plugin| plugin.closed.cancel()).is_some()
    }

    /// Reads a plugin's list of devices until the stream ends or another plugin replaces it, then disconnects the resource.
    async fn run_plugin(&self, resource: &str, plugin: Arc<RegisteredPlugin>) {
        let reading = self.read_stream(resource, &plugin.endpoint);
        plugin.closed.run_until_cancelled(reading).await;
        // A fault of kubelet: the plugin that serves the resource now is removed, even if it is a later one.
        let Some(current) = self.plugins.lock().remove(resource) else {
            return;
        };
        current.closed.cancel();
        self.lock().disconnect(resource);
        tracing::info!(resource, "device plugin disconnected");
        self.devices_changed();
    }

    async fn read_stream(&self, resource: &str, endpoint: &Endpoint) {
        let mut stream = match endpoint.list_and_watch().await {
            Ok(stream) => stream,
            Err(error) => return tracing::warn!(resource, %error, "ListAndWatch ended unexpectedly"),
        };
        loop {
            match stream.message().await {
                Ok(Some(response)) => {
                    // genericDeviceUpdateCallback: a list replaces the one before as a whole, and each one is
                    // written to the checkpoint.
                    self.run.machine.counts.lock().device_lists += 1;
                    self.lock().update(resource, response.devices);
                    self.write_checkpoint();
                    self.devices_changed();
                }
                Ok(None) => return tracing::warn!(resource, "ListAndWatch ended: EOF"),
                Err(error) => return tracing::warn!(resource, %error, "ListAndWatch ended unexpectedly"),
            }
        }
    }
}

impl DeviceManager {
    pub(crate) async fn allocate_pod(&self, pod: &KubeletPod) -> Result<()> {
        let mut reusable = Reusable::new();
        for container in &pod.containers {
            self.allocate_container(pod, container, &reusable).await?;
            let devices = self.lock();
            for (resource, grant) in devices.held().of(&DeviceHolder::new(pod, container)) {
                let ids = grant.devices();
                let offered = reusable.entry(resource.clone()).or_default();
                // devicesToReuse: a sidecar goes on beside the app containers, so only ordinary init containers hand devices on;
                // an app container keeps those that it takes from the containers after it.
                if container.kind == ContainerType::Init {
                    offered.extend(ids);
                } else {
                    offered.retain(|id| !ids.contains(id));
                }
            }
        }
        Ok(())
    }

    /// Allocates devices of every plugin resource that a container requests.
    pub(crate) async fn allocate_container(
        &self,
        pod: &KubeletPod,
        container: &ContainerSpec,
        reusable: &Reusable,
    ) -> Result<()> {
        let holder = DeviceHolder::new(pod, container);
        let nothing = BTreeSet::new();
        let mut has_freed_ended = false;
        let mut has_granted = false;
        for (resource, amount) in self.in_random_order(pod, container, AT_ADMISSION) {
            // isDevicePluginResource: a resource whose plugin is gone counts too, as long as a pod holds its devices.
            if !self.lock().serves(resource) {
                continue;
            }
            // UpdateAllocatedDevices runs when a container needs devices, not when a pod ends.
            if !std::mem::replace(&mut has_freed_ended, true) {
                self.free_ended();
            }
            let request = ResourceRequest {
                holder: &holder,
                resource,
                required: usize::try_from(amount).unwrap_or_default(),
                skips_allocation: self.skips_allocation(pod, container),
            };
            let offered = reusable.get(resource).unwrap_or(&nothing);
            has_granted |= self.allocate_resource(pod, &request, offered).await?;
        }
        if has_granted {
            self.write_checkpoint();
        }
        Ok(())
    }

    /// A container's limits in the random order in which a Go map is walked. `start` is [`AT_ADMISSION`], or counts the starts.
    pub(crate) fn in_random_order<'a>(
        &self,
        pod: &KubeletPod,
        container: &'a ContainerSpec,
        start: u32,
    ) -> Vec<(&'a str, i64)> {
        let limits = container.limits.iter();
        let mut limits: Vec<_> = limits.map(|(name, amount)| (name.as_str(), *amount)).collect();
        let decision = ["resources", &pod.full_name(), &container.name, &start.to_string()];
        limits.shuffle(&mut dice(self.run.machine.config.seed, &decision));
        limits
    }

    /// Returns true if kubelet allocates nothing for the container, since it was started before kubelet's restart and not all
    /// pods are listed yet.
    fn skips_allocation(&self, pod: &KubeletPod, container: &ContainerSpec) -> bool {
        let state = self.run.machine.runtime.state(&pod.uid, &container.name);
        // A fault of kubelet: an init container that has exited and holds devices fails the pod while its plugin is away.
        !self.run.pods.lock().sources_ready && matches!(state, Some(RunState::Running { .. }))
    }

    /// Allocates devices of one resource; returns false if the container has its devices already.
    async fn allocate_resource(
        &self,
        pod: &KubeletPod,
        request: &ResourceRequest<'_>,
        reusable: &BTreeSet<DeviceId>,
    ) -> Result<bool> {
        let decision = [
            "devices",
            &pod.full_name(),
            &request.holder.container,
            request.resource,
        ];
        let mut rng = dice(self.run.machine.config.seed, &decision);
        let Some(chosen) = self.choose(request, reusable, &mut rng).await? else {
            return Ok(false);
        };
        let mut ids: Vec<String> = chosen.iter().map(ToString::to_string).collect();
        // The IDs come from a Go set, so their order in the request means nothing to a plugin.
        ids.shuffle(&mut rng);
        let answer = self.call_allocate(request.resource, ids).await;
        if answer.is_err() {
            self.lock().roll_back();
        }
        // kubelet rolls back after a failed call only, not after an answer without containers.
        let response = answer?.context("no containers return in allocation response")?;
        self.lock().grant(request, &chosen, response);
        Ok(true)
    }

    /// Calls Allocate of a resource's plugin, and counts the call.
    async fn call_allocate(
        &self,
        resource: &str,
        ids: Vec<String>,
    ) -> Result<Option<ContainerAllocateResponse>> {
        let endpoint = self.endpoint(resource)?;
        self.run.machine.counts.lock().allocate_calls += 1;
        self.run.machine.notify();
        let began = Instant::now();
        let response = endpoint.allocate(ids).await?;
        self.run.machine.counts.lock().allocate_took.push(began.elapsed());
        Ok(response)
    }

    fn endpoint(&self, resource: &str) -> Result<Arc<Endpoint>> {
        let endpoint = self.lock().endpoint(resource).cloned();
        endpoint.with_context(|| format!("unknown Device Plugin {resource}"))
    }

    /// Chooses devices, by `GetPreferredAllocation` unless reused ones suffice; `None` if the container has its devices.
    async fn choose(
        &self,
        request: &ResourceRequest<'_>,
        reusable: &BTreeSet<DeviceId>,
        rng: &mut StdRng,
    ) -> Result<Option<BTreeSet<DeviceId>>> {
        let choice = self.lock().begin_choice(request, reusable, rng)?;
        let Some(choice) = choice else { return Ok(None) };
        let mut preferred = Vec::new();
        if choice.taken.len() < choice.required {
            let available = choice.available.union(&choice.taken);
            let mut available: Vec<String> = available.map(ToString::to_string).collect();
            available.shuffle(rng);
            let call = ContainerPreferredAllocationRequest {
                available_device_ids: available,
                must_include_device_ids: choice.taken.iter().map(ToString::to_string).collect(),
                allocation_size: i32::try_from(choice.required).unwrap_or(i32::MAX),
            };
            preferred = self.endpoint(request.resource)?.preferred(call).await?;
        }
        let mut devices = self.lock();
        Ok(Some(devices.finish_choice(
            request.resource,
            choice,
            &preferred,
            rng,
        )))
    }

    /// Calls `PreStartContainer` of the resource's plugin if the plugin has asked for that call.
    pub(crate) async fn pre_start(&self, holder: &DeviceHolder, resource: &str) -> Result<()> {
        let (endpoint, ids) = {
            let devices = self.lock();
            let grant = devices.held().grant(holder, resource);
            (devices.endpoint(resource).cloned(), grant.map(Grant::device_ids))
        };
        let endpoint = endpoint
            .with_context(|| format!("endpoint not found in cache for a registered resource: {resource}"))?;
        if !endpoint.wants_pre_start() {
            return Ok(());
        }
        let DeviceHolder { pod, container } = holder;
        let ids = ids.with_context(|| {
            format!("no devices found allocated in local cache for pod {pod}, container {container}, resource {resource}")
        })?;
        let started = endpoint.pre_start(ids).await;
        started.context("device plugin PreStartContainer rpc failed with err")
    }

    /// The Allocate answers of a container, in the order of `limits`, and its device IDs.
    pub(crate) fn granted(&self, holder: &DeviceHolder, limits: &[(&str, i64)]) -> Granted {
        let devices = self.lock();
        let (mut responses, mut ids) = (Vec::new(), BTreeMap::new());
        for (resource, _) in limits {
            if let Some(grant) = devices.held().grant(holder, resource) {
                responses.push(Arc::clone(&grant.response));
            }
        }
        for (resource, grant) in devices.held().of(holder) {
            ids.insert(resource.clone(), grant.device_ids());
        }
        (responses, ids)
    }
}

#[derive(Debug)]
pub(crate) struct RegistrationService(pub(crate) Arc<DeviceManager>);

#[tonic::async_trait]
impl Registration for RegistrationService {
    /// Answers the Register call of a plugin: checks the version and the resource, and connects to the plugin's socket.
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let RegisterRequest {
            version,
            endpoint,
            resource_name,
            ..
        } = request.into_inner();
        if version != DEVICE_PLUGIN_VERSION {
            return Err(Status::unknown(format!(
                "requested API version \"{version}\" is not supported by kubelet. Supported version is [{DEVICE_PLUGIN_VERSION}]"
            )));
        }
        if !is_extended(&resource_name) {
            return Err(Status::unknown(format!(
                "the ResourceName \"{resource_name}\" is invalid"
            )));
        }
        let connected = self.0.connect(&resource_name, &endpoint).await;
        connected.map_err(|error| Status::unknown(format!("{error:#}")))?;
        Ok(Response::new(Empty {}))
    }
}
