//! The GPU in the node's objects, and its view from inside containers.

use anyhow::{Context, Result, bail, ensure};
use proto::device::{CONDITION_INJECTABLE, CONDITION_ISOLATED, RESERVED_MEMORY};
use proto::resource::{GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::json;

use super::GpuEntry;
use super::target::{self, GIB, usable};
use super::trial::{Finding, StateBefore, Trial, mib};
use kit::kubelet::probe_program::SPECS_MOUNT;
use kit::observer::ClusterSnapshot;
use kit::pod_fields::container_statuses;

pub(super) const SCENARIOS: &[GpuEntry] = scenarios! {
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
        ensure!(
            amount.is_some_and(|amount| amount != "0"),
            "the node offers no {resource}"
        );
    }
    let mut conditions = Vec::new();
    for condition in &device.conditions {
        conditions.push(format!(
            "{}={} {}",
            condition.condition_type, condition.status, condition.reason
        ));
        let is_impossible = condition.condition_type == CONDITION_INJECTABLE && condition.status == "False";
        ensure!(!is_impossible, "containers get no GPU: {}", condition.message);
    }
    start_listing(trial, "specs").await?;
    let n_specs = n_specs(trial, "specs").await?;
    // Measured before the first pod that uses the GPU.
    let metrics = trial.plugin().metrics().await.unwrap_or_default();
    trial.at_start = Some(StateBefore {
        free: free_bytes(trial, "offered").await?,
        n_specs,
        unattributed: metrics.unattributed(&trial.gpu.uuid),
    });
    let answers = trial.answers("offered", "see").await?;
    let view = answers.last("see").context("nothing is seen")?;
    let by_cuda = view
        .devices
        .iter()
        .find(|device| device.uuid == trial.gpu.uuid)
        .map(|device| device.bytes);
    let whole_units = trial.gpu.total / trial.gpu.unit * trial.gpu.unit;
    if let Some(bytes) = by_cuda {
        ensure!(
            whole_units <= bytes,
            "{} are offered, and CUDA has {}",
            mib(whole_units),
            mib(bytes)
        );
    }
    let reserved = device.labels.get(RESERVED_MEMORY).cloned();
    let text = format!(
        "{} with minor {} and UUID {}{}; {}",
        mib(trial.gpu.total),
        trial.gpu.minor,
        trial.gpu.uuid,
        by_cuda
            .map(|bytes| format!(", {} by CUDA", mib(bytes)))
            .unwrap_or_default(),
        conditions.join(", ")
    );
    Ok(Finding::new(text)
        .figure("bytes", trial.gpu.total)
        .figure("cudaBytes", by_cuda)
        .figure("cudaVersion", view.cuda_version.clone())
        .figure(
            "reservedBytes",
            reserved.and_then(|text| text.parse::<u64>().ok()),
        )
        .figure("resources", amounts)
        .figure("conditions", conditions))
}

/// Starts a pod `name` that asks for one GiB; returns the bytes of the GPU that CUDA reports as free in it.
pub(super) async fn free_bytes(trial: &Trial, name: &str) -> Result<u64> {
    let units = trial.gpu.units(GIB).to_string();
    let commands = ["see", "memory", "hold=3600"];
    trial.start(name, &commands, &[(GPU_MEM, &units)]).await?;
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

/// Three pods in three forms of request, side by side: each sees its GPU, and uses most of its share.
async fn dialects(trial: &mut Trial) -> Result<Finding> {
    let (by_units, by_bytes) = (trial.gpu.part(16), trial.gpu.part(7));
    let quarter = trial.gpu.total / 4;
    if trial.gpu.free < by_units + by_bytes + quarter {
        return Ok(Finding::not_run(format!(
            "{} of the GPU are free, fewer than the three pods ask for",
            mib(trial.gpu.free)
        )));
    }
    let (units, bytes) = (trial.gpu.units(by_units).to_string(), by_bytes.to_string());
    let pods = [
        ("units", by_units, vec![(GPU_MEM, units.as_str())]),
        (
            "bytes",
            by_bytes,
            vec![(GPU_SHARED, "1"), (GPU_MEMORY, bytes.as_str())],
        ),
        (
            "percent",
            quarter,
            vec![(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "25"), (GPU_CORE, "30")],
        ),
    ];
    for (name, share, limits) in &pods {
        let allocate = format!("allocate={}", usable(*share));
        trial
            .start(name, &["see", &allocate, "fill", "sum", "hold=3600"], limits)
            .await?;
    }
    let (mut figures, mut files) = (Vec::new(), Vec::new());
    for (name, share, _) in &pods {
        let answers = trial.compared(name, "sum").await?;
        files = answers
            .last("see")
            .map(|view| view.device_files.clone())
            .unwrap_or_default();
        figures.push(
            json!({"pod": name, "shareBytes": share, "allocatedBytes": usable(*share), "deviceFiles": files}),
        );
    }
    let amounts: Vec<String> = pods
        .iter()
        .map(|(_, share, _)| format!("{} of {}", mib(usable(*share)), mib(*share)))
        .collect();
    let text = format!(
        "each container sees the GPU of its pod's record, and the device files {}; {} allocated, filled and summed without an error",
        files.join(", "),
        amounts.join(", ")
    );
    Ok(Finding::new(text).figure("pods", figures))
}

/// A container with as few rights as Kubernetes gives.
async fn unprivileged(trial: &mut Trial) -> Result<Finding> {
    let share = trial.gpu.part(16);
    let units = trial.gpu.units(share).to_string();
    let allocate = format!("allocate={}", usable(share));
    let pod = trial.pod(
        "unprivileged",
        &["see", &allocate, "fill", "sum", "hold=3600"],
        &[(GPU_MEM, &units)],
    );
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
    let units = trial.gpu.units(share).to_string();
    let limits = [(GPU_MEM, units.as_str())];
    let allocate = format!("allocate={}", usable(share));
    let commands = ["see", allocate.as_str(), "fill", "sum"];
    let pod = trial.pod("restarts", &[&commands[..], &["hold=2"]].concat(), &limits);
    let mut pod = trial.with_init(pod, &commands, &limits);
    pod.set_spec("restartPolicy", json!("Always"));
    trial.create(pod).await?;
    let of_init = trial.answers_of("restarts", "init", "sum").await?;
    trial.compare("restarts", &of_init).context("init container")?;
    if let Some((_, error)) = of_init.failed() {
        bail!("init container: {error}");
    }
    trial.compared("restarts", "sum").await?;
    for _ in 0..RESTARTS {
        until_restarted(trial, "restarts").await?;
        trial.compared("restarts", "sum").await?;
    }
    let text = format!(
        "work, each time: the init container, and {} starts of the container",
        RESTARTS + 1
    );
    Ok(Finding::new(text).figure("restarts", RESTARTS))
}

/// Waits for the next start of a pod's container, whose program ends by itself; in the testbed it is ended.
async fn until_restarted(trial: &mut Trial, pod: &str) -> Result<()> {
    let node = trial.gpu.node.clone();
    if trial.world.cluster.is_some() {
        return trial.world.restart_container(&node, pod).await;
    }
    let key = trial.world.key(pod);
    let status_of = |snapshot: &ClusterSnapshot| {
        let mut statuses = container_statuses(snapshot.pods.get(&key)?);
        statuses.next().cloned()
    };
    let before = status_of(&trial.world.observer.now())
        .context("the pod has no status")?
        .restart_count;
    let again = |snapshot: &ClusterSnapshot| {
        let status = status_of(snapshot)?;
        let ended = status.last_state.and_then(|state| state.terminated);
        (status.restart_count > before).then_some(ended.map_or(0, |ended| ended.exit_code))
    };
    let code = trial.world.until(&format!("{pod} to start again"), again).await?;
    ensure!(code == 0, "the program ended with status {code} before a restart");
    Ok(())
}

/// A pod that asks for nothing, of an image that asks for all GPUs.
async fn without_request(trial: &mut Trial) -> Result<Finding> {
    trial.start("without-request", &["see", "hold=3600"], &[]).await?;
    let answers = trial.answers("without-request", "see").await?;
    let view = answers.last("see").context("nothing is seen")?;
    let isolated = trial.condition(CONDITION_ISOLATED)?;
    let condition = isolated.map_or("Isolated is not published".to_owned(), |condition| {
        format!("Isolated={} {}", condition.status, condition.reason)
    });
    if view.sees_gpu() {
        bail!(
            "sees the GPU without being counted ({}); {condition}: the component deploy/components/nri prevents that",
            view.device_files.join(", ")
        );
    }
    if view.variable.is_none() {
        let reason = format!(
            "the image {} does not set NVIDIA_VISIBLE_DEVICES, so it shows nothing",
            trial.image
        );
        return Ok(Finding::not_run(reason));
    }
    let text = format!("sees no GPU; {condition}");
    Ok(Finding::new(text).figure("condition", condition))
}
