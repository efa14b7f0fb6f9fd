//! Memory beyond a pod's share, and the memory that is free again when all pods are gone.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kube::ResourceExt;
use proto::device::{ENFORCED_BY_DRIVER, ENFORCEMENT};
use proto::resource::{GPU_MEMORY, GPU_SHARED, HAMI_CORE, ISOLATION_PROVIDER};

use super::GpuScenario;
use super::answers::Answers;
use super::containers::{free_bytes, n_specs, start_listing};
use super::plugin;
use super::target::{MIB, usable};
use super::trial::{Finding, Trial, mib};
use super::usage::beyond_share;
use kit::polling;

pub(super) const OVERRUN: &[GpuScenario] = scenarios! { on a GPU:
    "gpu-overrun" => overrun,
        "a pod that allocates twice its share";
    "gpu-hami-core" => hami_core,
        "HAMi-core's library: a pod that allocates twice its share, and one that allocates seven eighths";
};
pub(super) const LEFT: &[GpuScenario] = scenarios! { on a GPU:
    "gpu-nothing-left" => nothing_left,
        "everything deleted";
};

/// The code of `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i64 = 2;

/// The enforcement level of the GPU.
fn level(trial: &Trial) -> Result<String> {
    let level = trial.device()?.labels.remove(ENFORCEMENT);
    Ok(level.unwrap_or_else(|| "none".to_owned()))
}

/// Runs a pod with this share that allocates and fills `bytes`. For HAMi-core (`is_hami`) it has the label and asks for bytes, not
/// for memory units.
async fn allocate(trial: &Trial, name: &str, share: u64, bytes: u64, is_hami: bool) -> Result<Answers> {
    let commands = ["see", &format!("allocate={bytes}"), "fill", "nvml", "hold=3600"];
    let pod = if is_hami {
        let limits = [(GPU_SHARED, "1"), (GPU_MEMORY, &*share.to_string())];
        trial
            .pod(name, &commands, &limits)
            .labelled(ISOLATION_PROVIDER, HAMI_CORE)
    } else {
        trial.sharing(name, &commands, share)
    };
    trial.create(pod).await?;
    let answers = trial.answers_of(name, "fill").await?;
    trial.compare(name, &answers)?;
    Ok(answers)
}

/// A pod allocates twice its share: the text says if anything stops it, and which level the node has.
async fn overrun(trial: &mut Trial) -> Result<Finding> {
    let share = trial.gpu.part(16);
    let level = level(trial)?;
    if trial.gpu.free < 2 * share {
        return Ok(Finding::not_run(format!(
            "{} of the GPU are free",
            mib(trial.gpu.free)
        )));
    }
    let answers = allocate(trial, "overrun", share, 2 * share, false).await?;
    let asked = format!("{} in a pod of {}", mib(2 * share), mib(share));
    let mut finding = match answers.failed() {
        Some((_, error)) => Finding::new(format!("{asked}: stopped by {error}; enforcement level {level}"))
            .figure("stoppedBy", &error.name),
        None if level == ENFORCED_BY_DRIVER => {
            bail!("{asked}: allocated and filled, though the driver should enforce the limit")
        }
        None => Finding::new(format!(
            "{asked}: allocated and filled, nothing stops it; enforcement level {level}"
        )),
    };
    // A program that was stopped uses nothing.
    if answers.failed().is_none() {
        let answers = trial.answers_of("overrun", "nvml").await?;
        let by_nvml = answers.last("nvml").and_then(|answer| answer.own_bytes);
        let by_plugin = beyond_share(trial, "overrun", share).await?;
        for (source, used) in [("the plugin", by_plugin), ("NVML in the container", by_nvml)] {
            if let Some(used) = used {
                finding.text = format!("{}; {} by {source}", finding.text, mib(used));
            }
        }
        finding = finding
            .figure("pluginBytes", by_plugin)
            .figure("nvmlBytes", by_nvml);
    }
    Ok(finding
        .figure("shareBytes", share)
        .figure("askedBytes", 2 * share)
        .figure("level", level))
}

/// On a node with HAMi-core, a pod that is labelled for it gets its share and no more.
async fn hami_core(trial: &mut Trial) -> Result<Finding> {
    let snapshot = trial.world.observer.now();
    let node = snapshot.nodes.get(&trial.gpu.node).context("the node is gone")?;
    if node
        .labels()
        .get(ISOLATION_PROVIDER)
        .is_none_or(|provider| provider != HAMI_CORE)
    {
        let reason = format!("the node has no label {ISOLATION_PROVIDER}={HAMI_CORE}");
        return Ok(Finding::not_run(reason));
    }
    let share = trial.gpu.part(16);
    // The context is inside the limit.
    let (too_much, enough) = (2 * share, usable(share).min(share / 8 * 7));
    let refused = allocate(trial, "hami-too-much", share, too_much, true).await?;
    let allowed = allocate(trial, "hami-enough", share, enough, true).await?;
    let failed = refused.failed();
    let (_, error) =
        failed.with_context(|| format!("{} were allocated in a pod of {}", mib(too_much), mib(share)))?;
    let is_right = error.code == OUT_OF_MEMORY;
    ensure!(is_right, "{} were refused by {error}", mib(too_much));
    if let Some((_, error)) = allowed.failed() {
        bail!("{} of {}: {error}", mib(enough), mib(share));
    }
    // NVML comes through HAMi-core's library too; the limit does not depend on it.
    let by_nvml = trial.answers_of("hami-enough", "nvml").await.ok();
    let by_nvml = by_nvml.and_then(|answers| answers.last("nvml")?.total_bytes);
    let shown = by_nvml.map_or("NVML does not answer in the container".to_owned(), |total| {
        format!("NVML shows {} in the container", mib(total))
    });
    let text = format!(
        "in a pod of {} {} are refused with CUDA_ERROR_OUT_OF_MEMORY, {} work; {shown}",
        mib(share),
        mib(too_much),
        mib(enough)
    );
    Ok(Finding::new(text)
        .figure("shareBytes", share)
        .figure("nvmlTotalBytes", by_nvml)
        .figure("refusedBytes", too_much)
        .figure("allocatedBytes", enough))
}

/// The longest time until the plugin has removed the CDI specs of deleted pods, which it keeps for a minute at least.
pub(super) const LEFT_LIMIT: Duration = Duration::from_secs(180);
/// The difference of free memory that other programs on the GPU may make.
const LEFT_TOLERANCE: u64 = 64 * MIB;

/// All pods of the earlier scenarios are gone: the GPU's memory is free as before the first one, and the node has no further
/// specs.
async fn nothing_left(trial: &mut Trial) -> Result<Finding> {
    let Some(before) = trial.at_start else {
        let reason = "it compares with the figures of gpu-offered, which has to run before it";
        return Ok(Finding::not_run(reason));
    };
    let free = free_bytes(trial, "left").await?;
    let is_free = free + LEFT_TOLERANCE >= before.free;
    ensure!(
        is_free,
        "{} of the GPU are free, {} were before",
        mib(free),
        mib(before.free)
    );
    trial.clear().await?;
    let began = Instant::now();
    start_listing(trial, "left-specs").await?;
    let are_gone = async || {
        let (n_left, n_before) = (n_specs(trial, "left-specs").await?, before.n_specs);
        let missing = || format!("{n_left} CDI specs are left, {n_before} were there before");
        Ok((n_left <= n_before).then_some(()).ok_or_else(missing))
    };
    polling::until_found(LEFT_LIMIT, are_gone).await?;
    let seconds = began.elapsed().as_secs();
    let of_metrics = metrics_left(trial, before.unattributed).await?;
    let text =
        format!("the GPU's memory is free, the CDI specs are gone within {seconds} s, and {of_metrics}");
    Ok(Finding::new(text)
        .figure("seconds", seconds)
        .figure("metrics", of_metrics))
}

/// The longest wait until the plugin has measured again.
const MEASURED_AGAIN: Duration = Duration::from_secs(45);

/// Waits until the plugin's metrics have no container of the run, and no more memory of other programs than before it; returns
/// them in words, or the reason that they are not known.
async fn metrics_left(trial: &Trial, unattributed_before: Option<u64>) -> Result<String> {
    let is_clean = async || {
        let metrics = match plugin::metrics(trial).await {
            Ok(metrics) => metrics,
            Err(error) => return Ok(Ok(format!("the plugin's metrics are not known: {error:#}"))),
        };
        let left = metrics.of_namespace(&trial.world.namespace);
        let unattributed = metrics.unattributed(&trial.gpu.uuid);
        let limit = unattributed_before.unwrap_or_default() + LEFT_TOLERANCE;
        if !left.is_empty() || unattributed.is_some_and(|bytes| bytes > limit) {
            return Ok(Err(format!(
                "the plugin's metrics have {} lines about containers of the run, and {unattributed:?} bytes of other programs, \
                 {unattributed_before:?} before: {}",
                left.len(),
                left.join("; ")
            )));
        }
        let of_others = match unattributed {
            Some(bytes) => format!("that of other programs is {bytes} bytes"),
            None => "the plugin does not measure memory".to_owned(),
        };
        Ok(Ok(format!(
            "the plugin's metrics have none of the containers: {of_others}"
        )))
    };
    polling::until_found(MEASURED_AGAIN, is_clean).await
}
