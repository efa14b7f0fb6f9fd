//! kubelet's device manager: plugins register with it, and containers get their devices from it.
//!
//! Plugins are found by resource name alone. As in kubelet 1.36, the late end of a plugin's old stream therefore disconnects the
//! plugin that has registered since. Topology hints are ignored, as under kubelet's default policy of the topology manager.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

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

use super::checkpoint;
use super::devices::{AllocationError, Capacity, DeviceChoice, DeviceManagerState, ResourceRequest};
use super::devices::{DeviceHolder, DeviceId, HeldDevices};
use super::endpoint::{ConnectError, Endpoint, EndpointError};
use super::fit::is_extended;
use super::machine::KubeletMachine;
use super::pod::{ContainerSpec, ContainerType, KubeletPod};
use super::pod_table::PodTable;
use super::runtime::RunState;
use super::tasks::KubeletTasks;
use crate::dice::dice;
use crate::files;

/// The time from the loss of a plugin to the removal of its resource (`endpointStopGracePeriod`).
pub(crate) const ENDPOINT_GRACE: Duration = Duration::from_secs(5 * 60);

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

/// The error of the step before a container's start in which plugins get `PreStartContainer` calls.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PreStartError {
    #[error("device plugin PreStartContainer rpc failed with err: {0}")]
    Rpc(EndpointError),
    #[error(
        "no devices found allocated in local cache for pod {pod}, container {container}, resource {resource}"
    )]
    NothingHeld {
        pod: String,
        container: String,
        resource: String,
    },
    #[error("endpoint not found in cache for a registered resource: {0}")]
    NoEndpoint(String),
}

/// The device manager of one run of kubelet.
#[derive(Debug)]
pub(crate) struct DeviceManager {
    machine: Arc<KubeletMachine>,
    pods: Arc<PodTable>,
    tasks: KubeletTasks,
    devices: Mutex<DeviceManagerState>,
    /// The plugins that are connected, by resource.
    plugins: Mutex<BTreeMap<String, Arc<RegisteredPlugin>>>,
    /// Wakes the task that writes node status.
    pub(crate) capacity_changed: Notify,
}

impl DeviceManager {
    /// Loads the checkpoint; as in kubelet, a broken file counts as none.
    pub(crate) fn start(machine: &Arc<KubeletMachine>, pods: &Arc<PodTable>, tasks: &KubeletTasks) -> Self {
        let data = checkpoint::read(&machine.config.checkpoint()).unwrap_or_else(|error| {
            tracing::error!(%error, "continues without the checkpoint");
            None
        });
        let (entries, registered) = data
            .map(|data| (data.pod_device_entries, data.registered_devices))
            .unwrap_or_default();
        Self {
            machine: Arc::clone(machine),
            pods: Arc::clone(pods),
            tasks: tasks.clone(),
            devices: Mutex::new(DeviceManagerState::restore(
                HeldDevices::restore(entries),
                registered.into_keys(),
            )),
            plugins: Mutex::default(),
            capacity_changed: Notify::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, DeviceManagerState> {
        self.devices.lock()
    }

    /// Removes the resources whose plugin has been disconnected for [`ENDPOINT_GRACE`], and counts the devices of the others.
    pub(crate) fn capacity(&self) -> Capacity {
        let counted = self.lock().capacity(ENDPOINT_GRACE);
        if !counted.removed.is_empty() {
            self.write_checkpoint();
        }
        counted
    }

    /// Frees the devices of pods that are not active any more, once all pods are known.
    pub(crate) fn free_ended(&self) {
        if self.pods.sources_ready() {
            let mut devices = self.lock();
            // The pods are read while the devices are locked: a pod admitted in between would lose its devices.
            let active = self.pods.lock().active_uids();
            devices.free_ended(&active);
        }
    }

    /// Writes the devices that containers hold, and the registered ones, to the checkpoint file.
    fn write_checkpoint(&self) {
        let devices = self.lock();
        let content = checkpoint::render(&devices.held().rendered(), &devices.registered_json());
        // Written under the lock, so that an older state cannot replace a newer one.
        if let Err(error) = files::replace(&self.machine.config.checkpoint(), &content) {
            tracing::error!(%error, "the checkpoint was not written");
        }
    }

    /// Has node status written again, and wakes every wait on this kubelet.
    fn devices_changed(&self) {
        self.capacity_changed.notify_one();
        self.machine.notify();
    }
}

/// Registration of plugins.
impl DeviceManager {
    /// Connects to a plugin that has registered, and starts the task that reads its devices.
    async fn connect(self: &Arc<Self>, resource: &str, socket: &str) -> Result<(), ConnectError> {
        // As in kubelet, Register returns only after the plugin's socket has been dialled.
        let config = &self.machine.config;
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
        self.machine.counts.lock().registrations += 1;
        self.machine.notify();
        let manager = Arc::clone(self);
        let resource = resource.to_owned();
        self.tasks
            .spawn(async move { manager.run_plugin(&resource, plugin).await });
        Ok(())
    }

    /// Breaks a plugin's `ListAndWatch` stream from kubelet's side; false if there is none.
    pub(crate) fn drop_stream(&self, resource: &str) -> bool {
        let plugins = self.plugins.lock();
        plugins
            .get(resource)
            .map(|plugin| plugin.closed.cancel())
            .is_some()
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

    /// Takes each list of devices that the plugin sends, until the stream ends.
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
                    self.machine.counts.lock().device_lists += 1;
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

/// Allocation and preparation of containers.
impl DeviceManager {
    /// Allocates the devices of all containers of a pod, in order.
    pub(crate) async fn allocate_pod(&self, pod: &KubeletPod) -> Result<(), AllocationError> {
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
    ) -> Result<(), AllocationError> {
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

    /// A container's limits in the random order in which a Go map is walked. `start` is [`AT_ADMISSION`], or counts the
    /// starts of the container.
    pub(crate) fn in_random_order<'a>(
        &self,
        pod: &KubeletPod,
        container: &'a ContainerSpec,
        start: u32,
    ) -> Vec<(&'a str, i64)> {
        let mut limits: Vec<_> = container
            .limits
            .iter()
            .map(|(name, amount)| (name.as_str(), *amount))
            .collect();
        let mut rng = dice(
            self.machine.config.seed,
            &["resources", &pod.full_name(), &container.name, &start.to_string()],
        );
        limits.shuffle(&mut rng);
        limits
    }

    /// Returns true if kubelet allocates nothing for the container, since it was started before kubelet's restart and not all
    /// pods are listed yet. A fault of kubelet: it forgets exited containers here, so that an init container which holds devices
    /// fails the pod while its plugin is away.
    fn skips_allocation(&self, pod: &KubeletPod, container: &ContainerSpec) -> bool {
        let state = self.machine.runtime.state(&pod.uid, &container.name);
        !self.pods.sources_ready() && matches!(state, Some(RunState::Running { .. }))
    }

    /// Allocates devices of one resource; returns false if the container has its devices already.
    async fn allocate_resource(
        &self,
        pod: &KubeletPod,
        request: &ResourceRequest<'_>,
        reusable: &BTreeSet<DeviceId>,
    ) -> Result<bool, AllocationError> {
        let mut rng = dice(
            self.machine.config.seed,
            &[
                "devices",
                &pod.full_name(),
                &request.holder.container,
                request.resource,
            ],
        );
        let Some(chosen) = self.choose(request, reusable, &mut rng).await? else {
            return Ok(false);
        };
        let mut ids: Vec<String> = chosen.iter().map(ToString::to_string).collect();
        // The IDs come from a Go set, so their order in the request means nothing to a plugin.
        ids.shuffle(&mut rng);
        let endpoint = self.lock().endpoint(request.resource).cloned();
        let Some(endpoint) = endpoint else {
            self.lock().roll_back();
            return Err(AllocationError::UnknownPlugin(request.resource.to_owned()));
        };
        self.machine.counts.lock().allocate_calls += 1;
        self.machine.notify();
        let began = Instant::now();
        match endpoint.allocate(ids).await {
            Ok(response) => {
                self.machine.counts.lock().allocate_took.push(began.elapsed());
                self.lock().grant(request, &chosen, response);
                Ok(true)
            }
            // kubelet rolls back after a failed call only, not after an answer without containers.
            Err(EndpointError::EmptyAnswer) => Err(EndpointError::EmptyAnswer.into()),
            Err(error) => {
                self.lock().roll_back();
                Err(error.into())
            }
        }
    }

    /// Chooses devices, by `GetPreferredAllocation` unless reused ones suffice; `None` if the container has its devices.
    async fn choose(
        &self,
        request: &ResourceRequest<'_>,
        reusable: &BTreeSet<DeviceId>,
        rng: &mut StdRng,
    ) -> Result<Option<BTreeSet<DeviceId>>, AllocationError> {
        let choice = self.lock().begin_choice(request, reusable, rng)?;
        let open = match choice {
            DeviceChoice::Nothing => return Ok(None),
            DeviceChoice::Done(chosen) => return Ok(Some(chosen)),
            DeviceChoice::Open(open) => open,
        };
        let mut available: Vec<String> = open
            .available
            .union(&open.taken)
            .map(ToString::to_string)
            .collect();
        available.shuffle(rng);
        let call = ContainerPreferredAllocationRequest {
            available_device_ids: available,
            must_include_device_ids: open.taken.iter().map(ToString::to_string).collect(),
            allocation_size: i32::try_from(open.required).unwrap_or(i32::MAX),
        };
        let endpoint = self.lock().endpoint(request.resource).cloned();
        let endpoint = endpoint.ok_or_else(|| AllocationError::UnknownPlugin(request.resource.to_owned()))?;
        let preferred = endpoint.preferred(call).await?;
        Ok(Some(self.lock().finish_choice(
            request.resource,
            open,
            &preferred,
            rng,
        )))
    }

    /// Calls `PreStartContainer` of the resource's plugin if the plugin has asked for that call.
    pub(crate) async fn pre_start(&self, holder: &DeviceHolder, resource: &str) -> Result<(), PreStartError> {
        let (endpoint, ids) = {
            let devices = self.lock();
            let endpoint = devices
                .endpoint(resource)
                .cloned()
                .ok_or_else(|| PreStartError::NoEndpoint(resource.to_owned()))?;
            if !endpoint.wants_pre_start() {
                return Ok(());
            }
            let Some(grant) = devices.held().grant(holder, resource) else {
                let DeviceHolder { pod, container } = holder.clone();
                return Err(PreStartError::NothingHeld {
                    pod,
                    container,
                    resource: resource.to_owned(),
                });
            };
            (endpoint, grant.device_ids())
        };
        endpoint.pre_start(ids).await.map_err(PreStartError::Rpc)
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

/// The Registration service of `device-plugins/kubelet.sock`.
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
            let supported = format!("[{DEVICE_PLUGIN_VERSION}]");
            return Err(Status::unknown(format!(
                "requested API version \"{version}\" is not supported by kubelet. Supported version is {supported}"
            )));
        }
        if !is_extended(&resource_name) {
            return Err(Status::unknown(format!(
                "the ResourceName \"{resource_name}\" is invalid"
            )));
        }
        let connected = self.0.connect(&resource_name, &endpoint).await;
        connected.map_err(|error| Status::unknown(error.to_string()))?;
        Ok(Response::new(Empty {}))
    }
}
