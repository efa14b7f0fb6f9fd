//! The GPU in the node's objects, and its view from inside containers.

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use proto::device::{CONDITION_INJECTABLE, RESERVED_MEMORY};
use proto::resource::{GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::json;

use super::GpuScenario;
use super::plugin;
use super::target::{self, GIB, allocate_most, usable};
use super::trial::{Finding, START, StateBefore, Trial, isolated_in_words, mib, no_variable};
use kit::kubelet::probe_program::SPECS_MOUNT;
use kit::pod_fields::container_statuses;
use kit::pods::Limits;

pub(super) const SCENARIOS: &[GpuScenario] = scenarios! { on a GPU:
    "gpu-offered" => offered,
        "discovery, Device object, resources of the node, conditions";
    "gpu-dialects" => dialects,
        "three pods: memory units; bytes; 25 % of memory with 30 % core";
    "gpu-unprivileged" => unprivileged,
        "a container that is not root, without capabilities, with seccomp and a read-only root";
    "gpu-restarts" => restarts,
        "an init container, restarts of a container";
    "gpu-without-request" => without_request,
        "a pod without a request, whose image sets NVIDIA_VISIBLE_DEVICES=all";
};

/// The directory of CDI specs on a node, as `deploy/base` has it.
const CDI_DIR: &str = "/var/run/cdi";
/// The prefix of the names of the CDI specs that the plugin writes for containers.
const SPEC_PREFIX: &str = "gpushare.dev-gpu_";
/// The number of times that a pod repeats a command every three seconds, in five minutes.
pub(super) const N_REPEATS: usize = 100;

/// The Device object, the node's resources and the conditions, compared with CUDA in a small pod.
async fn offered(trial: &mut Trial) -> Result<Finding> {
    let device = trial.device()?;
    let snapshot = trial.world.observer.now();
    let node = snapshot.nodes.get(&trial.gpu.node).context("the node is gone")?;
    let amounts = target::offered(node);
    for resource in [GPU_MEM, GPU_SHARED, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE] {
        let amount = amounts.get(resource);
        let has_some = amount.is_some_and(|amount| amount != "0");
        ensure!(has_some, "the node offers no {resource}");
    }
    let mut conditions = Vec::new();
    for condition in &device.conditions {
        let (kind, status) = (&condition.condition_type, &condition.status);
        conditions.push(format!("{kind}={status} {}", condition.reason));
        let is_impossible = kind == CONDITION_INJECTABLE && status == "False";
        ensure!(!is_impossible, "containers get no GPU: {}", condition.message);
    }
    start_listing(trial, "specs").await?;
    let n_specs = n_specs(trial, "specs").await?;
    // Measured before the first pod that uses the GPU.
    let metrics = plugin::metrics(trial).await.unwrap_or_default();
    trial.at_start = Some(StateBefore {
        free: free_bytes(trial, "offered").await?,
        n_specs,
        unattributed: metrics.unattributed(&trial.gpu.uuid),
    });
    let answers = trial.answers("offered", "see").await?;
    let view = answers.last("see").context("nothing is seen")?;
    let mut devices = view.devices.iter();
    let by_cuda = devices
        .find(|device| device.uuid == trial.gpu.uuid)
        .map(|device| device.bytes);
    let whole_units = trial.gpu.total / trial.gpu.unit * trial.gpu.unit;
    let mut text = format!(
        "{} with minor {} and UUID {}",
        mib(trial.gpu.total),
        trial.gpu.minor,
        trial.gpu.uuid
    );
    if let Some(bytes) = by_cuda {
        let (offered, by_cuda) = (mib(whole_units), mib(bytes));
        ensure!(
            whole_units <= bytes,
            "{offered} are offered, and CUDA has {by_cuda}"
        );
        text = format!("{text}, {by_cuda} by CUDA");
    }
    let reserved = device.labels.get(RESERVED_MEMORY);
    let reserved = reserved.and_then(|text| text.parse::<u64>().ok());
    Ok(Finding::new(format!("{text}; {}", conditions.join(", ")))
        .figure("bytes", trial.gpu.total)
        .figure("cudaBytes", by_cuda)
        .figure("cudaVersion", view.cuda_version.clone())
        .figure("reservedBytes", reserved)
        .figure("resources", amounts)
        .figure("conditions", conditions))
}

/// Starts a pod `name` that asks for one GiB; returns the bytes of the GPU that CUDA reports as free in it.
pub(super) async fn free_bytes(trial: &Trial, name: &str) -> Result<u64> {
    trial.start(name, &["see", "memory", "hold=3600"], GIB).await?;
    let answers = trial.compared(name, "memory").await?;
    let free = answers.last("memory").and_then(|answer| answer.free_bytes);
    free.context("CUDA reports no free memory")
}

/// Starts a pod that lists the node's CDI specs every few seconds; it has no GPU, and so no spec of its own.
pub(super) async fn start_listing(trial: &Trial, name: &str) -> Result<()> {
    let files = format!("files={SPECS_MOUNT}");
    let commands = [files.as_str(), "hold=3"].repeat(N_REPEATS);
    let mut pod = trial.pod(name, &commands, &[]);
    let volume = json!({"name": "specs", "hostPath": {"path": CDI_DIR}});
    pod.set_spec("volumes", json!([volume]));
    let mount = json!({"name": "specs", "mountPath": SPECS_MOUNT, "readOnly": true});
    trial.create(pod.with("volumeMounts", json!([mount]))).await
}

/// The number of the plugin's CDI specs for containers, as the pod `name` of [`start_listing`] has listed them last.
pub(super) async fn n_specs(trial: &Trial, name: &str) -> Result<usize> {
    let answers = trial.answers(name, "files").await?;
    let files = answers.last("files").map(|answer| answer.names.as_slice());
    let is_spec = |file: &&String| file.starts_with(SPEC_PREFIX);
    Ok(files.unwrap_or_default().iter().filter(is_spec).count())
}

async fn dialects(trial: &mut Trial) -> Result<Finding> {
    let (by_units, by_bytes) = (trial.gpu.part(16), trial.gpu.part(7));
    let quarter = trial.gpu.total / 4;
    if trial.gpu.free < by_units + by_bytes + quarter {
        let free = mib(trial.gpu.free);
        let reason = format!("{free} of the GPU are free, fewer than the three pods ask for");
        return Ok(Finding::not_run(reason));
    }
    let (units, bytes) = (&*trial.gpu.units(by_units).to_string(), &*by_bytes.to_string());
    let percent = [(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "25"), (GPU_CORE, "30")];
    let pods: [(&str, u64, &Limits<'_>); 3] = [
        ("units", by_units, &[(GPU_MEM, units)]),
        ("bytes", by_bytes, &[(GPU_SHARED, "1"), (GPU_MEMORY, bytes)]),
        ("percent", quarter, &percent),
    ];
    for (name, share, limits) in pods {
        let commands = ["see", &allocate_most(share), "fill", "sum", "hold=3600"];
        trial.create(trial.pod(name, &commands, limits)).await?;
    }
    let (mut figures, mut files, mut amounts) = (Vec::new(), Vec::new(), Vec::new());
    for (name, share, _) in pods {
        let answers = trial.compared(name, "sum").await?;
        let view = answers.last("see").cloned();
        files = view.unwrap_or_default().device_files;
        let allocated = usable(share);
        amounts.push(format!("{} of {}", mib(allocated), mib(share)));
        figures.push(
            json!({"pod": name, "shareBytes": share, "allocatedBytes": allocated, "deviceFiles": files}),
        );
    }
    let text = format!(
        "each container sees the GPU of its pod's record, and the device files {}; {} allocated, filled and summed without an error",
        files.join(", "),
        amounts.join(", ")
    );
    Ok(Finding::new(text).figure("pods", figures))
}

async fn unprivileged(trial: &mut Trial) -> Result<Finding> {
    let share = trial.gpu.part(16);
    let commands = ["see", &allocate_most(share), "fill", "sum", "hold=3600"];
    let pod = trial.sharing("unprivileged", &commands, share);
    let rights = json!({
        "runAsUser": 1000, "runAsGroup": 1000, "runAsNonRoot": true, "readOnlyRootFilesystem": true,
        "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
    });
    trial.create(pod.with("securityContext", rights)).await?;
    trial.compared("unprivileged", "sum").await?;
    let text = format!("works: {} allocated, filled and summed", mib(usable(share)));
    Ok(Finding::new(text).figure("allocatedBytes", usable(share)))
}

/// The number of restarts that the scenario waits for; kubelet waits ten seconds before the second.
const RESTARTS: i32 = 2;

/// An init container uses the GPU before the pod's container, which ends again and again.
async fn restarts(trial: &mut Trial) -> Result<Finding> {
    let share = trial.gpu.part(16);
    let commands = ["see", &allocate_most(share), "fill", "sum"];
    let pod = trial.sharing("restarts", &[&commands[..], &["hold=2"]].concat(), share);
    let mut pod = trial.with_init(pod, &commands, share);
    pod.set_spec("restartPolicy", json!("Always"));
    trial.create(pod).await?;
    let of_init = trial.answers_within(START, "restarts", "init", "sum").await?;
    trial.compare("restarts", &of_init).context("init container")?;
    if let Some((_, error)) = of_init.failed() {
        bail!("init container: {error}");
    }
    trial.compared("restarts", "sum").await?;
    for _ in 0..RESTARTS {
        until_restarted(trial, "restarts").await?;
        trial.compared("restarts", "sum").await?;
    }
    let n_starts = RESTARTS + 1;
    let text = format!("work, each time: the init container, and {n_starts} starts of the container");
    Ok(Finding::new(text).figure("restarts", RESTARTS))
}

/// Waits for the next start of a pod's container, whose program ends by itself; in the testbed it is ended.
async fn until_restarted(trial: &mut Trial, pod: &str) -> Result<()> {
    let node = trial.gpu.node.clone();
    if trial.world.cluster.is_some() {
        return trial.world.restart_container(&node, pod).await;
    }
    let before = container_statuses(&trial.world.pod(pod)?)
        .map(|status| status.restart_count)
        .next();
    let before = before.context("the pod has no status")?;
    let again = |pod: &Pod| {
        let status = container_statuses(pod).next()?;
        let ended = status
            .last_state
            .as_ref()
            .and_then(|state| state.terminated.as_ref());
        (status.restart_count > before).then_some(ended.map_or(0, |ended| ended.exit_code))
    };
    let code = trial.world.until_pod(pod, "to start again", again).await?;
    ensure!(code == 0, "the program ended with status {code} before a restart");
    Ok(())
}

async fn without_request(trial: &mut Trial) -> Result<Finding> {
    let pod = trial.pod("without-request", &["see", "hold=3600"], &[]);
    trial.create(pod).await?;
    let answers = trial.answers("without-request", "see").await?;
    let view = answers.last("see").context("nothing is seen")?;
    let condition = isolated_in_words(trial.isolated()?.as_ref());
    if view.sees_gpu() {
        bail!(
            "sees the GPU without being counted ({}); {condition}: the component deploy/components/nri prevents that",
            view.device_files.join(", ")
        );
    }
    if view.variable.is_none() {
        return Ok(no_variable(&trial.image));
    }
    let text = format!("sees no GPU; {condition}");
    Ok(Finding::new(text).figure("condition", condition))
}
