//! Memory beyond a pod's share, and the memory that is free again when all pods are gone.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use proto::device::{ENFORCED_BY_DRIVER, ENFORCEMENT};
use proto::resource::{GPU_MEM, GPU_MEMORY, GPU_SHARED, HAMI_CORE, ISOLATION_PROVIDER};

use super::GpuEntry;
use super::answers::Answers;
use super::containers::{free_bytes, n_specs, start_listing};
use super::target::MIB;
use super::trial::{Finding, Trial, mib};

pub(super) const OVERRUN: &[GpuEntry] = scenarios! {
    "gpu-overrun" => overrun,
        "a pod that allocates twice its share";
    "gpu-hami-core" => hami_core,
        "HAMi-core's library: a pod that allocates twice its share, and one that allocates seven eighths";
};
pub(super) const LEFT: &[GpuEntry] = scenarios! {
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

/// Runs a pod that allocates and fills so many bytes.
async fn allocate(trial: &Trial, name: &str, share: u64, bytes: u64, is_hami: bool) -> Result<Answers> {
    let (units, share) = (trial.gpu.units(share).to_string(), share.to_string());
    let limits = if is_hami {
        vec![(GPU_SHARED, "1"), (GPU_MEMORY, share.as_str())]
    } else {
        vec![(GPU_MEM, units.as_str())]
    };
    let allocate = format!("allocate={bytes}");
    let pod = trial.pod(name, &["see", &allocate, "fill", "hold=3600"], &limits);
    let pod = if is_hami {
        pod.labelled(ISOLATION_PROVIDER, HAMI_CORE)
    } else {
        pod
    };
    trial.create(pod).await?;
    let answers = trial.answers_of(name, "main", "fill").await?;
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
    if let Some(used) = until_measured(trial, "overrun", share).await {
        finding.text = format!(
            "{}; {:.0} MiB measured by the plugin",
            finding.text,
            used / as_float(MIB)
        );
        finding = finding.figure("measuredBytes", used);
    }
    Ok(finding
        .figure("shareBytes", share)
        .figure("askedBytes", 2 * share)
        .figure("level", level))
}

/// The longest wait for the plugin's measurement, which it repeats every ten seconds.
const MEASURED_WITHIN: Duration = Duration::from_secs(15);

/// The bytes that the plugin has measured for a pod, once they are more than its share; none on a node that does not measure.
async fn until_measured(trial: &Trial, pod: &str, share: u64) -> Option<f64> {
    let began = Instant::now();
    loop {
        let used = trial.measured(pod).await?;
        if used > as_float(share) || began.elapsed() > MEASURED_WITHIN {
            return Some(used);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Whole MiB as a float.
fn as_float(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes / MIB).unwrap_or(u32::MAX)) * 1_048_576.0
}

/// On a node with HAMi-core, a pod that is labelled for it gets its share and no more.
async fn hami_core(trial: &mut Trial) -> Result<Finding> {
    let snapshot = trial.world.observer.now();
    let node = snapshot.nodes.get(&trial.gpu.node).context("the node is gone")?;
    let labels = node.metadata.labels.as_ref();
    let provider = labels.and_then(|labels| labels.get(ISOLATION_PROVIDER));
    if provider.is_none_or(|provider| provider != HAMI_CORE) {
        return Ok(Finding::not_run(format!(
            "the node has no label {ISOLATION_PROVIDER}={HAMI_CORE}"
        )));
    }
    let share = trial.gpu.part(16);
    let (too_much, enough) = (2 * share, share / 8 * 7);
    let refused = allocate(trial, "hami-too-much", share, too_much, true).await?;
    let allowed = allocate(trial, "hami-enough", share, enough, true).await?;
    let (_, error) = refused
        .failed()
        .with_context(|| format!("{} were allocated in a pod of {}", mib(too_much), mib(share)))?;
    ensure!(
        error.code == OUT_OF_MEMORY,
        "{} were refused by {error}",
        mib(too_much)
    );
    if let Some((_, error)) = allowed.failed() {
        bail!("{} of {}: {error}", mib(enough), mib(share));
    }
    let text = format!(
        "in a pod of {} {} are refused with CUDA_ERROR_OUT_OF_MEMORY, {} work",
        mib(share),
        mib(too_much),
        mib(enough)
    );
    Ok(Finding::new(text)
        .figure("shareBytes", share)
        .figure("refusedBytes", too_much)
        .figure("allocatedBytes", enough))
}

/// The longest time until the plugin has removed the CDI specs of deleted pods, which it keeps for a minute at least.
pub(super) const LEFT_LIMIT: Duration = Duration::from_secs(180);
/// The difference of free memory that other programs on the GPU may make.
const LEFT_TOLERANCE: u64 = 64 * MIB;

/// All pods of the earlier scenarios are gone: the GPU's memory is free as before the first one, and the node has no further specs.
async fn nothing_left(trial: &mut Trial) -> Result<Finding> {
    let Some((free_before, n_before)) = trial.at_start else {
        return Ok(Finding::not_run(
            "it compares with the figures of gpu-offered, which has to run before it",
        ));
    };
    let free = free_bytes(trial, "left").await?;
    ensure!(
        free + LEFT_TOLERANCE >= free_before,
        "{} of the GPU are free, {} were before",
        mib(free),
        mib(free_before)
    );
    trial.clear().await?;
    let began = Instant::now();
    start_listing(trial, "left-specs").await?;
    loop {
        let n_left = n_specs(trial, "left-specs").await?;
        if n_left <= n_before {
            break;
        }
        let waited = began.elapsed();
        ensure!(
            waited < LEFT_LIMIT,
            "{n_left} CDI specs are left after {} s, {n_before} were there before",
            waited.as_secs()
        );
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let seconds = began.elapsed().as_secs();
    let text = format!("the GPU's memory is free, and the CDI specs are gone within {seconds} s");
    Ok(Finding::new(text).figure("seconds", seconds))
}
