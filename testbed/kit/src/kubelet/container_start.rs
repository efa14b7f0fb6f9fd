//! Starts a container: `PreStartContainer` of its plugins, then its final environment and devices.
//!
//! Later sources override earlier values of a variable: image, device plugins, pod, CDI specs, NRI plugins, NVIDIA's runtime.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use k8s_openapi::jiff::Timestamp;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use super::cdi::{RecordedEdits, resolve_now};
use super::config::{CdiSupport, ContainerStart, MachineGpus, RuntimeConfig};
use super::device_manager::{DeviceManager, Reusable};
use super::devices::DeviceHolder;
use super::environment;
use super::gpu_probe;
use super::nvidia_runtime::{Created, Modification, VISIBLE_DEVICES, find_gpus};
use super::pod::{ContainerSpec, ContainerType, KubeletPod};
use super::run::KubeletRun;
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
#[error("{cause:#}")]
pub(crate) struct StartError {
    /// The reason in container status: the step of kuberuntime that failed.
    pub(crate) reason: &'static str,
    cause: anyhow::Error,
}

impl StartError {
    /// The failure of CRI's `CreateContainer`.
    fn creating(cause: anyhow::Error) -> Self {
        Self {
            reason: "CreateContainerError",
            cause: cause.context("failed to create containerd container"),
        }
    }

    /// The failure of CRI's `StartContainer`.
    fn running(cause: anyhow::Error) -> Self {
        let context =
            "failed to create containerd task: failed to create shim task: OCI runtime create failed";
        Self {
            reason: "RunContainerError",
            cause: cause.context(context),
        }
    }
}

/// The failure to generate the container's configuration.
impl From<anyhow::Error> for StartError {
    fn from(cause: anyhow::Error) -> Self {
        Self {
            reason: "CreateContainerConfigError",
            cause,
        }
    }
}

#[derive(Debug)]
pub(crate) struct ContainerStarter {
    pub(crate) run: Arc<KubeletRun>,
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
        let runtime = &self.run.machine.runtime;
        let attempts = runtime.record_attempt(&pod.uid, &container.name, spent, failure);
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
        let limits = self
            .devices
            .in_random_order(pod, container, self.next_start(pod, container));
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
            self.devices
                .allocate_container(pod, container, &Reusable::new())
                .await?;
        }
        let (responses, devices) = self.devices.granted(&holder, &limits);
        let cdi_devices = named_devices(&responses);
        let machine = &self.run.machine;
        let pod_env = environment::read(&machine.config.client, pod, container).await?;
        let began = Instant::now();
        let edits = self.inject(&cdi_devices).await;
        spent.injection += began.elapsed();
        let (edits, stale_devices) = edits.map_err(StartError::creating)?;
        let composed = RuntimeContainer {
            devices,
            cdi_devices,
            stale_devices,
            ..compose(pod, container, &responses, pod_env, edits)
        };
        let made = match &machine.nri {
            Some(nri) => nri.make(pod, composed).await.map_err(StartError::creating)?,
            None => composed,
        };
        let made = self.apply_nvidia_runtime(pod, container, &responses, made);
        let mut made = made.map_err(StartError::running)?;
        let nodes = made.device_nodes.iter();
        let gpus: BTreeSet<String> = nodes
            .filter_map(|path| machine.config.gpus.of_device_node(path))
            .collect();
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
    ) -> Result<RuntimeContainer> {
        let config = &self.run.machine.config;
        let RuntimeConfig {
            nvidia, nvidia_class, ..
        } = &config.runtime;
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
        let (nodes, mounts, env) = match nvidia.modify(created)? {
            Modification::None => return Ok(made),
            Modification::Cli(names) => {
                let nodes = driver_nodes(&config.gpus, &names)
                    .map_err(|name| anyhow!("nvidia-container-cli: device error: {name}: unknown device"))?;
                (nodes, driver, Vec::new())
            }
            Modification::InMemory(names) => {
                let nodes = driver_nodes(&config.gpus, &names)
                    .map_err(|name| anyhow!("failed to get device handle from UUID: {name}"))?;
                (nodes, driver, vec![format!("{VISIBLE_DEVICES}=void")])
            }
            Modification::Specs(names) => {
                let edits = resolve_now(&config.cdi_dirs, &names)?;
                (edits.node_paths(), edits.mount_paths(), edits.env)
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

    /// Records a container as started, and an init container as ended at once.
    fn record(
        &self,
        pod: &KubeletPod,
        container: &ContainerSpec,
        started: RuntimeContainer,
        attempts: StartAttempts,
    ) {
        let machine = &self.run.machine;
        let mut lines = String::new();
        if !machine.config.gpus.all().is_empty() {
            lines = format!("{DEVICE_NODES}={}\n", started.device_nodes.join(","));
        }
        for (name, value) in &started.env {
            lines.extend([name, "=", value, "\n"]);
        }
        (machine.config.log)(&pod.namespace, &pod.name, &container.name, lines);
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
        let made = RuntimeContainer {
            state,
            starts: self.next_start(pod, container),
            ..started
        };
        machine.config.started.call(&ContainerStart {
            container: made.clone(),
            refusals: attempts.refusals,
            spent: attempts.spent.total,
            pre_start: attempts.spent.pre_start,
            injection: attempts.spent.injection,
        });
        machine.runtime.put(made.clone());
        if !container.probe_commands.is_empty() {
            gpu_probe::start(machine, made, &container.probe_commands);
        }
    }

    /// The number that the next start of this container will have, from 1 on.
    fn next_start(&self, pod: &KubeletPod, container: &ContainerSpec) -> u32 {
        let containers = self.run.machine.runtime.of_pod(&pod.uid);
        let before = containers.get(&container.name);
        before.map_or(1, |container| container.starts + 1)
    }

    /// The edits for these CDI devices as [`Injector::inject`](super::injector::Injector::inject); empty if CDI is ignored.
    async fn inject(&self, devices: &[String]) -> Result<(RecordedEdits, Vec<String>)> {
        let machine = &self.run.machine;
        if let Some(injector) = &machine.injector {
            return injector.inject(devices).await;
        }
        ensure!(
            machine.config.runtime.cdi != CdiSupport::Refused || devices.is_empty(),
            "CDI devices are requested, and CDI is not enabled"
        );
        Ok((RecordedEdits::default(), Vec::new()))
    }
}

/// The device nodes of GPUs, by their UUIDs or indices or `all`, and those of the driver itself.
///
/// # Errors
/// The first of `names` that is no UUID or index of a GPU.
fn driver_nodes(gpus: &MachineGpus, names: &[String]) -> Result<Vec<String>, String> {
    let gpus = gpus.all();
    let uuids: Vec<String> = gpus.iter().map(|(uuid, _)| uuid.clone()).collect();
    let mut nodes = Vec::new();
    for index in find_gpus(names, &uuids)? {
        nodes.extend(gpus.get(index).map(|(_, minor)| format!("/dev/nvidia{minor}")));
    }
    nodes.extend(["/dev/nvidiactl".to_owned(), "/dev/nvidia-uvm".to_owned()]);
    Ok(nodes)
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

/// Puts together the container that runs, from the plugins' answers, the pod, its image and the CDI edits.
fn compose(
    pod: &KubeletPod,
    container: &ContainerSpec,
    responses: &[Arc<ContainerAllocateResponse>],
    pod_env: BTreeMap<String, String>,
    edits: RecordedEdits,
) -> RuntimeContainer {
    let waiting = RunState::Waiting {
        reason: "ContainerCreating".to_owned(),
        message: String::new(),
    };
    let mut made = RuntimeContainer::never_started(pod, container, waiting);
    for (name, value) in responses.iter().flat_map(|response| &response.envs) {
        let first = made.env.entry(name.clone()).or_insert_with(|| value.clone());
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
    made.env.extend(pod_env);
    if is_cuda_image(&container.image) {
        made.env
            .entry(VISIBLE_DEVICES.to_owned())
            .or_insert_with(|| "all".to_owned());
    }
    set_pairs(&mut made.env, &edits.env);
    for response in responses {
        for device in &response.devices {
            made.device_nodes.push(device.container_path.clone());
        }
        for mount in &response.mounts {
            made.mounts.push(mount.container_path.clone());
        }
    }
    made.device_nodes.extend(edits.node_paths());
    made.mounts.extend(edits.mount_paths());
    made.hooks = edits.hooks.into_iter().map(|hook| hook.args.join(" ")).collect();
    made
}
