//! What a container gets when it starts: `PreStartContainer` of its plugins, then its final environment.
//!
//! Later wins: the plugins' variables, the pod's own, then those of CDI specs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use super::allocation::Reusable;
use super::cdi::Unresolvable;
use super::devices::AllocationError;
use super::held::Holder;
use super::nri::Unmade;
use super::pod::{ContainerSpec, PodSpec};
use super::process::Process;
use super::runtime::{Container, RunState};

/// Why a container does not start this time.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("device plugin PreStartContainer rpc failed with err: {0}")]
    PreStart(AllocationError),
    #[error("no devices found allocated in local cache for pod {pod}, container {container}, resource {resource}")]
    NothingHeld { pod: String, container: String, resource: String },
    #[error("endpoint not found in cache for a registered resource: {0}")]
    NoEndpoint(String),
    #[error(transparent)]
    Allocation(AllocationError),
    #[error("failed to create containerd container: CDI device injection failed: {0}")]
    Cdi(Unresolvable),
    #[error("failed to create containerd container: {0}")]
    Nri(Unmade),
}

impl StartError {
    /// The reason in container status.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Cdi(_) | Self::Nri(_) => "CreateContainerError",
            _ => "CreateContainerConfigError",
        }
    }
}

impl Process {
    /// Starts a container, or says why not.
    pub(crate) async fn start_container(&self, pod: &PodSpec, container: &ContainerSpec) -> Result<(), StartError> {
        let began = Instant::now();
        match self.prepare_container(pod, container).await {
            Ok(started) => {
                let attempts = self.runtime.attempt(&pod.uid, &container.name, began.elapsed(), None);
                self.record_start(pod, container, started, attempts);
                Ok(())
            }
            Err(error) => {
                self.runtime.attempt(&pod.uid, &container.name, began.elapsed(), Some(error.to_string()));
                Err(error)
            }
        }
    }

    async fn prepare_container(&self, pod: &PodSpec, container: &ContainerSpec) -> Result<Container, StartError> {
        let holder = Holder { pod: pod.uid.clone(), container: container.name.clone() };
        let order = self.in_random_order(pod, container, self.turn(pod, container));
        let mut unallocated = false;
        for (resource, amount) in &order {
            if *amount == 0 || !self.devices().serves(resource) {
                continue;
            }
            self.pre_start(&holder, resource).await?;
            unallocated |= self.devices().held().grant(&holder, resource).is_none();
        }
        if unallocated {
            self.allocate_container(pod, container, &Reusable::new()).await.map_err(StartError::Allocation)?;
        }
        let (responses, held) = self.granted(&holder, &order);
        let composed = self.compose(pod, container, &responses, held)?;
        match &self.nri {
            Some(nri) => nri.make(pod, composed, &self.specs).await.map_err(StartError::Nri),
            None => Ok(composed),
        }
    }

    /// What plugins have answered for a container, and which devices it holds.
    fn granted(&self, holder: &Holder, order: &[(&str, i64)]) -> (Vec<Arc<ContainerAllocateResponse>>, BTreeMap<String, Vec<String>>) {
        let devices = self.devices();
        let grants: BTreeMap<&str, _> = devices.held().of(holder).map(|(resource, grant)| (resource.as_str(), grant)).collect();
        let responses = order.iter().filter_map(|(resource, _)| grants.get(resource)).map(|grant| Arc::clone(&grant.response));
        let responses = responses.collect();
        let ids = |grant: &super::held::Grant| grant.devices().iter().map(|id| id.as_ref().to_owned()).collect();
        let held = grants.iter().map(|(resource, grant)| ((*resource).to_owned(), ids(grant))).collect();
        (responses, held)
    }

    async fn pre_start(&self, holder: &Holder, resource: &str) -> Result<(), StartError> {
        let (endpoint, ids) = {
            let devices = self.devices();
            let endpoint = devices.endpoint(resource).cloned().ok_or_else(|| StartError::NoEndpoint(resource.to_owned()))?;
            if !endpoint.wants_pre_start() {
                return Ok(());
            }
            let Some(grant) = devices.held().grant(holder, resource) else {
                let Holder { pod, container } = holder.clone();
                return Err(StartError::NothingHeld { pod, container, resource: resource.to_owned() });
            };
            (endpoint, grant.devices().iter().map(|id| id.as_ref().to_owned()).collect())
        };
        endpoint.pre_start(ids, self.config.delays.pre_start).await.map_err(StartError::PreStart)
    }

    fn compose(
        &self,
        pod: &PodSpec,
        container: &ContainerSpec,
        responses: &[Arc<ContainerAllocateResponse>],
        devices: BTreeMap<String, Vec<String>>,
    ) -> Result<Container, StartError> {
        let mut env = BTreeMap::new();
        let mut cdi_devices: Vec<String> = Vec::new();
        for (name, value) in responses.iter().flat_map(|response| &response.envs) {
            let first = env.entry(name.clone()).or_insert_with(|| value.clone());
            if first != value {
                tracing::error!(pod = pod.full_name(), name, first, value, "two resources set one variable, the first wins");
            }
        }
        for device in responses.iter().flat_map(|response| &response.cdi_devices) {
            if !cdi_devices.contains(&device.name) {
                cdi_devices.push(device.name.clone());
            }
        }
        env.extend(container.env.iter().cloned());
        let edits = self.specs.resolve(&cdi_devices).map_err(StartError::Cdi)?;
        let assigned = edits.env.iter().filter_map(|pair| pair.split_once('='));
        env.extend(assigned.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let nodes = responses.iter().flat_map(|response| &response.devices).map(|device| device.container_path.clone());
        let mounts = responses.iter().flat_map(|response| &response.mounts).map(|mount| mount.container_path.clone());
        Ok(Container {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            pod_uid: pod.uid.clone(),
            name: container.name.clone(),
            kind: container.kind,
            state: RunState::Waiting { reason: "ContainerCreating".to_owned(), message: String::new() },
            starts: 0,
            env,
            devices,
            cdi_devices,
            device_nodes: nodes.chain(edits.device_nodes.into_iter().map(|node| node.path)).collect(),
            mounts: mounts.chain(edits.mounts.into_iter().map(|mount| mount.container_path)).collect(),
        })
    }
}
