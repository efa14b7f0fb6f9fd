//! Starts a container: `PreStartContainer` of its plugins, then its final environment and devices.
//!
//! Later sources override earlier values of a variable: image, device plugins, pod, CDI specs, NRI plugins, NVIDIA's runtime.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::jiff::Timestamp;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use super::cdi::{RecordedEdits, resolve_now};
use super::config::{CdiSupport, ContainerStart, RuntimeConfig};
use super::device_manager::{DeviceManager, PreStartError, Reusable};
use super::devices::AllocationError;
use super::devices::DeviceHolder;
use super::environment::{self, EnvironmentError};
use super::gpu_probe;
use super::injector::InjectError;
use super::machine::KubeletMachine;
use super::nri::CreateError;
use super::nvidia_runtime::{Created, Modification, VISIBLE_DEVICES, find_gpus};
use super::pod::{ContainerSpec, ContainerType, KubeletPod};
use super::runtime::{DEVICE_NODES, RunState, RuntimeContainer, StartAttempts, StartTimes};

/// The path of the library that every CUDA program loads.
const DRIVER_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libcuda.so.1";

/// Returns true for CUDA images, whose environment requests all GPUs from NVIDIA's runtime.
fn is_cuda_image(image: &str) -> bool {
    let path = image.split([':', '@']).next().unwrap_or_default();
    path.rsplit('/').next() == Some("cuda")
}

/// The error of a failed start, which is tried again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    PreStart(#[from] PreStartError),
    #[error(transparent)]
    Allocation(AllocationError),
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    #[error("failed to create containerd container: {0}")]
    Cdi(InjectError),
    #[error("failed to create containerd container: CDI devices are requested, and CDI is not enabled")]
    CdiDisabled,
    #[error("failed to create containerd container: {0}")]
    Nri(CreateError),
    #[error("failed to create containerd task: failed to create shim task: OCI runtime create failed: {0}")]
    Nvidia(String),
}

impl StartError {
    /// The reason in container status.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            // kuberuntime names the step that failed: generating the configuration, CreateContainer or StartContainer of CRI.
            Self::Cdi(_) | Self::CdiDisabled | Self::Nri(_) => "CreateContainerError",
            Self::Nvidia(_) => "RunContainerError",
            _ => "CreateContainerConfigError",
        }
    }
}

/// Starts containers: prepares their devices and makes them in the container runtime.
#[derive(Debug)]
pub(crate) struct ContainerStarter {
    pub(crate) machine: Arc<KubeletMachine>,
    pub(crate) devices: Arc<DeviceManager>,
}

impl ContainerStarter {
    /// Tries to start a container, and records the attempt with the times that it took.
    pub(crate) async fn start(&self, pod: &KubeletPod, container: &ContainerSpec) -> Result<(), StartError> {
        let began = Instant::now();
        let mut spent = StartTimes::default();
        let prepared = self.prepare(pod, container, &mut spent).await;
        spent.total = began.elapsed();
        let failure = prepared.as_ref().err().map(ToString::to_string);
        let attempts = self
            .machine
            .runtime
            .record_attempt(&pod.uid, &container.name, spent, failure);
        self.record(pod, container, prepared?, attempts);
        Ok(())
    }

    /// Runs all steps of a start; adds the time of the plugins' and the CDI step to `spent`, also if they fail.
    async fn prepare(
        &self,
        pod: &KubeletPod,
        container: &ContainerSpec,
        spent: &mut StartTimes,
    ) -> Result<RuntimeContainer, StartError> {
        let holder = DeviceHolder::new(pod, container);
        let n_start = self.next_start(pod, container);
        let limits = self.devices.in_random_order(pod, container, n_start);
        let mut lacks_devices = false;
        // GetDeviceRunContainerOptions runs before each creation of the container, so a crashed one gets
        // another PreStartContainer call but no other devices.
        for (resource, amount) in &limits {
            if *amount == 0 || !self.devices.lock().serves(resource) {
                continue;
            }
            let began = Instant::now();
            let done = self.devices.pre_start(&holder, resource).await;
            spent.pre_start += began.elapsed();
            done?;
            lacks_devices |= self.devices.lock().held().grant(&holder, resource).is_none();
        }
        // needsReAllocate: without the checkpoint kubelet does not know the devices of a pod that it admitted before.
        if lacks_devices {
            let reusable = Reusable::new();
            let allocated = self.devices.allocate_container(pod, container, &reusable);
            allocated.await.map_err(StartError::Allocation)?;
        }
        let (responses, held) = self.devices.granted(&holder, &limits);
        let cdi_devices = named_devices(&responses);
        let env = environment::read(&self.machine.config.client, pod, container).await?;
        let began = Instant::now();
        let edits = self.inject(&cdi_devices).await;
        spent.injection += began.elapsed();
        let inputs = ContainerInputs {
            responses: &responses,
            env,
            cdi_devices,
        };
        let composed = compose(pod, container, inputs, held, edits?);
        let made = match &self.machine.nri {
            Some(nri) => nri.make(pod, composed).await.map_err(StartError::Nri)?,
            None => composed,
        };
        let mut made = self.apply_nvidia_runtime(pod, container, &responses, made)?;
        let gpus = &self.machine.config.gpus;
        let nodes = made.device_nodes.iter();
        let gpus: BTreeSet<String> = nodes.filter_map(|path| gpus.of_device_node(path)).collect();
        made.gpus = gpus.into_iter().collect();
        Ok(made)
    }

    /// Applies the changes of NVIDIA's runtime to a container, if that runtime handles the pod.
    fn apply_nvidia_runtime(
        &self,
        pod: &KubeletPod,
        container: &ContainerSpec,
        responses: &[Arc<ContainerAllocateResponse>],
        mut made: RuntimeContainer,
    ) -> Result<RuntimeContainer, StartError> {
        let RuntimeConfig {
            nvidia, nvidia_class, ..
        } = &self.machine.config.runtime;
        let Some(nvidia) = nvidia else { return Ok(made) };
        if nvidia_class.is_some() && pod.runtime_class.as_deref() != *nvidia_class {
            return Ok(made);
        }
        let annotations = responses.iter().flat_map(|response| response.annotations.clone());
        let created = Created {
            env: &made.env,
            annotations: &annotations.collect(),
            is_privileged: container.is_privileged,
        };
        let driver = vec![DRIVER_LIBRARY.to_owned()];
        let (nodes, mounts, env) = match nvidia.modify(created).map_err(nvidia_error)? {
            Modification::None => return Ok(made),
            Modification::Cli(names) => {
                let failed =
                    |name: String| format!("nvidia-container-cli: device error: {name}: unknown device");
                let nodes = self.driver_nodes(&names).map_err(failed);
                (nodes.map_err(nvidia_error)?, driver, Vec::new())
            }
            Modification::InMemory(names) => {
                let failed = |name: String| format!("failed to get device handle from UUID: {name}");
                let nodes = self.driver_nodes(&names).map_err(failed);
                let env = vec![format!("{VISIBLE_DEVICES}=void")];
                (nodes.map_err(nvidia_error)?, driver, env)
            }
            Modification::Specs(names) => {
                let edits = resolve_now(&self.machine.config.cdi_dirs, &names).map_err(nvidia_error)?;
                let nodes = edits.device_nodes.into_iter().map(|node| node.path).collect();
                let mounts = edits
                    .mounts
                    .into_iter()
                    .map(|mount| mount.container_path)
                    .collect();
                (nodes, mounts, edits.env)
            }
        };
        set_pairs(&mut made.env, &env);
        for node in nodes {
            if !made.device_nodes.contains(&node) {
                made.device_nodes.push(node);
            }
        }
        made.mounts.extend(mounts);
        Ok(made)
    }

    /// The device nodes of GPUs, by their UUIDs or indices or `all`, and those of the driver itself.
    ///
    /// # Errors
    /// The first of `names` that is no UUID or index of a GPU.
    fn driver_nodes(&self, names: &[String]) -> Result<Vec<String>, String> {
        let gpus = self.machine.config.gpus.all();
        let uuids: Vec<String> = gpus.iter().map(|(uuid, _)| uuid.clone()).collect();
        let mut nodes = Vec::new();
        for index in find_gpus(names, &uuids)? {
            nodes.extend(gpus.get(index).map(|(_, minor)| format!("/dev/nvidia{minor}")));
        }
        nodes.extend(["/dev/nvidiactl".to_owned(), "/dev/nvidia-uvm".to_owned()]);
        Ok(nodes)
    }

    /// Records a container as started, and an init container as ended at once.
    fn record(
        &self,
        pod: &KubeletPod,
        container: &ContainerSpec,
        started: RuntimeContainer,
        attempts: StartAttempts,
    ) {
        let mut lines = String::new();
        if !self.machine.config.gpus.all().is_empty() {
            lines = format!("{DEVICE_NODES}={}\n", started.device_nodes.join(","));
        }
        for (name, value) in &started.env {
            lines.extend([name, "=", value, "\n"]);
        }
        (self.machine.config.log)(&pod.namespace, &pod.name, &container.name, lines);
        let now = Timestamp::now();
        let state = if container.kind == ContainerType::Init {
            RunState::Exited {
                code: 0,
                started: now,
                finished: now,
            }
        } else {
            RunState::Running { since: now }
        };
        let starts = self.next_start(pod, container);
        let commands = &container.probe_commands;
        let container = RuntimeContainer {
            state,
            starts,
            ..started
        };
        self.machine.config.started.call(&ContainerStart {
            container: container.clone(),
            refusals: attempts.refusals,
            spent: attempts.spent.total,
            pre_start: attempts.spent.pre_start,
            injection: attempts.spent.injection,
        });
        let probing = (!commands.is_empty()).then(|| container.clone());
        self.machine.runtime.put(container);
        if let Some(container) = probing {
            gpu_probe::start(&self.machine, container, commands);
        }
    }

    /// The number that the next start of this container will have, from 1 on.
    fn next_start(&self, pod: &KubeletPod, container: &ContainerSpec) -> u32 {
        let containers = self.machine.runtime.of_pod(&pod.uid);
        let before = containers.get(&container.name);
        before.map_or(1, |container| container.starts + 1)
    }

    /// The edits that the runtime makes for these CDI devices, and the devices whose spec on disk has other edits by now (the
    /// modelled runtime alone finds them). Empty if the runtime ignores CDI.
    async fn inject(&self, devices: &[String]) -> Result<(RecordedEdits, Vec<String>), StartError> {
        match &self.machine.injector {
            Some(injector) => injector.inject(devices).await.map_err(StartError::Cdi),
            None if self.machine.config.runtime.cdi == CdiSupport::Refused && !devices.is_empty() => {
                Err(StartError::CdiDisabled)
            }
            None => Ok((RecordedEdits::default(), Vec::new())),
        }
    }
}

fn nvidia_error(error: impl Into<Box<dyn std::error::Error>>) -> StartError {
    StartError::Nvidia(error.into().to_string())
}

/// Sets variables that are written as `name=value`.
fn set_pairs(env: &mut BTreeMap<String, String>, pairs: &[String]) {
    for (name, value) in pairs.iter().filter_map(|pair| pair.split_once('=')) {
        env.insert(name.to_owned(), value.to_owned());
    }
}

/// The CDI devices that Allocate answers name, each once.
fn named_devices(responses: &[Arc<ContainerAllocateResponse>]) -> Vec<String> {
    let mut devices: Vec<String> = Vec::new();
    for device in responses.iter().flat_map(|response| &response.cdi_devices) {
        if !devices.contains(&device.name) {
            devices.push(device.name.clone());
        }
    }
    devices
}

/// The devices and variables of a container, from device plugins and from the author of the pod.
struct ContainerInputs<'a> {
    /// The plugins' answers to Allocate.
    responses: &'a [Arc<ContainerAllocateResponse>],
    /// The environment that the pod's author gives.
    env: BTreeMap<String, String>,
    cdi_devices: Vec<String>,
}

/// Puts together the container that runs: environment, device nodes and mounts from the plugins' answers, the pod, its image and
/// the CDI edits.
fn compose(
    pod: &KubeletPod,
    container: &ContainerSpec,
    inputs: ContainerInputs<'_>,
    devices: BTreeMap<String, Vec<String>>,
    (edits, stale_devices): (RecordedEdits, Vec<String>),
) -> RuntimeContainer {
    let ContainerInputs {
        responses,
        env: pod_env,
        cdi_devices,
    } = inputs;
    let mut env: BTreeMap<String, String> = BTreeMap::new();
    for (name, value) in responses.iter().flat_map(|response| &response.envs) {
        let first = env.entry(name.clone()).or_insert_with(|| value.clone());
        if first != value {
            tracing::error!(
                pod = pod.full_name(),
                name,
                first,
                value,
                "two resources set one variable, the first wins"
            );
        }
    }
    env.extend(pod_env);
    if is_cuda_image(&container.image) {
        env.entry(VISIBLE_DEVICES.to_owned())
            .or_insert_with(|| "all".to_owned());
    }
    set_pairs(&mut env, &edits.env);
    let (mut device_nodes, mut mounts) = (Vec::new(), Vec::new());
    for response in responses {
        device_nodes.extend(
            response
                .devices
                .iter()
                .map(|device| device.container_path.clone()),
        );
        mounts.extend(response.mounts.iter().map(|mount| mount.container_path.clone()));
    }
    device_nodes.extend(edits.device_nodes.into_iter().map(|node| node.path));
    mounts.extend(edits.mounts.into_iter().map(|mount| mount.container_path));
    let waiting = RunState::Waiting {
        reason: "ContainerCreating".to_owned(),
        message: String::new(),
    };
    RuntimeContainer {
        env,
        devices,
        cdi_devices,
        stale_devices,
        hooks: edits.hooks.into_iter().map(|hook| hook.args.join(" ")).collect(),
        device_nodes,
        mounts,
        ..RuntimeContainer::never_started(pod, container, waiting)
    }
}
