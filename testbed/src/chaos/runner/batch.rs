//! A batch of equal pods: bound together, held back by kubelet while a disruption happens, then admitted
//! together.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::try_join_all;
use proto::resource::{GPU_CORE, GPU_MEM, GPU_MEMORY_RATIO, GPU_SHARED};

use super::{DEADLINE, Runner, node_name, pod_name};
use crate::chaos::PluginMode;
use crate::chaos::schedule::{Batch, Disruption, Shape};
use kit::apiserver::{Fault, HeldWatches, Injected, Matching};
use kit::cluster::{PLUGIN_USER, SCHEDULER_USER};
use kit::daemons::Daemon;
use kit::kubelet::Kubelet;
use kit::observer::ClusterSnapshot;
use kit::pods::PodBuilder;

/// Longest wait for a first attempt to start every pod of a batch. Pods that kubelet has refused get none, so
/// the wait may be in vain.
const TRIED: Duration = Duration::from_secs(5);
/// The wait for the pods of a batch, in words.
const REACHED: &str = "the pods to reach kubelet";
/// The number of requests that an injected fault of the API server meets.
const N_FAULTS: u64 = 3;

/// Faults that last until the pods of a batch have been admitted.
#[derive(Debug, Default)]
struct Disturbance {
    watches: Option<HeldWatches>,
    faults: Vec<Injected>,
}

impl Disturbance {
    /// Ends the faults: held watches send what they held back.
    fn end(self) {
        drop(self.watches);
        self.faults.into_iter().for_each(Injected::remove);
    }
}

/// Runs a batch from the creation of its pods until they run or have failed.
pub(super) async fn batch(runner: &mut Runner, batch: &Batch) -> Result<()> {
    runner.node(batch.node)?.kubelet().hold();
    let mut disturbance = disturb(runner, batch);
    create(runner, batch).await?;
    for number in &batch.pods {
        if !batch.deleted.contains(number) {
            runner.wanted.insert(pod_name(*number));
        }
    }
    match batch.meanwhile {
        Disruption::SchedulerRestartsEarly => runner.cluster.scheduler.restart().await?,
        Disruption::KubeSchedulerRestarts => {
            runner.cluster.stop_kube_scheduler();
            runner.cluster.start_kube_scheduler().await?;
        }
        _ => {}
    }
    runner.until_bound(&batch.pods).await?;
    let pods = ClusterSnapshot::of(runner.cluster.api().objects()).pods;
    runner.recorder.note_pods(pods);
    let n_expected = delete_early(runner, batch, &mut disturbance).await?;
    disrupt_before_admission(runner, batch).await?;
    let kubelet = runner.node(batch.node)?.kubelet();
    let n_calls = kubelet.counts().allocate_calls;
    kubelet.release(batch.order, batch.order_seed);
    disrupt_during_admission(runner, batch, n_calls, n_expected).await?;
    disturbance.end();
    runner.until_gone(&batch.deleted).await?;
    runner.until_settled().await
}

/// Creates the pods of a batch on its node.
async fn create(runner: &Runner, batch: &Batch) -> Result<()> {
    let creations = batch.pods.iter().map(|number| {
        let spec = pod_spec(&pod_name(*number), batch.shape).on(&node_name(batch.node));
        // A container that requests no GPU, from an image whose environment asks for all of them: it must see none.
        let spec = if runner.mode == PluginMode::NodeKinds {
            spec.idle("idle", "nvidia/cuda:12.4.1-base")
        } else {
            spec
        };
        let pods = runner.pods.clone();
        async move { pods.create(&spec).await }
    });
    try_join_all(creations).await?;
    Ok(())
}

/// Starts the disruptions that last from the creation of the pods.
fn disturb(runner: &Runner, batch: &Batch) -> Disturbance {
    let faults = runner.cluster.api().faults();
    let patches = |resource: &str| Matching::requests("patch", resource).times(N_FAULTS);
    let mut disturbance = Disturbance::default();
    match batch.meanwhile {
        Disruption::PluginWatchLags => {
            disturbance.watches = Some(faults.hold_watches_of(PLUGIN_USER, "pods"));
        }
        Disruption::SchedulerWatchLags => {
            disturbance.watches = Some(faults.hold_watches_of(SCHEDULER_USER, "pods"));
        }
        Disruption::ApiRefuses => {
            let refused = [patches("devices"), patches("pods")].into_iter();
            disturbance.faults = refused
                .map(|one| faults.inject(one, Fault::Refuse(503)))
                .collect();
        }
        Disruption::RepliesLost => {
            let bindings = Matching::requests("create", "pods/binding").times(N_FAULTS);
            let unanswered = [patches("devices"), patches("pods"), bindings].into_iter();
            disturbance.faults = unanswered
                .map(|one| faults.inject(one, Fault::DropReply))
                .collect();
        }
        _ => {}
    }
    disturbance
}

/// Deletes the pods that the schedule deletes before Allocate. Returns the number of pods that kubelet then admits: the others,
/// which it holds by now, or all if it does not see the deletions.
async fn delete_early(runner: &mut Runner, batch: &Batch, disturbance: &mut Disturbance) -> Result<usize> {
    let (n_pods, n_left) = (batch.pods.len(), batch.pods.len() - batch.deleted.len());
    let faults = runner.cluster.api().faults().clone();
    let is_late = batch.meanwhile == Disruption::KubeletMissesDeletions;
    if is_late {
        let has_all = |kubelet: &Kubelet| kubelet.counts().held >= n_pods;
        runner.until_kubelet(batch.node, REACHED, has_all).await?;
        let kubelet = format!("system:node:{}", node_name(batch.node));
        disturbance.watches = Some(faults.hold_watches_of(&kubelet, "pods"));
    } else if batch.meanwhile == Disruption::PluginMissesDeletions {
        disturbance.watches = Some(faults.hold_watches_of(PLUGIN_USER, "pods"));
    }
    for number in &batch.deleted {
        let name = pod_name(*number);
        if batch.by_force {
            runner.pods.delete_now(&name).await?;
        } else {
            runner.pods.delete(&name).await?;
        }
    }
    if is_late {
        return Ok(n_pods);
    }
    runner.until_gone(&batch.deleted).await?;
    let has_the_rest = |kubelet: &Kubelet| kubelet.counts().held == n_left;
    runner.until_kubelet(batch.node, REACHED, has_the_rest).await?;
    Ok(n_left)
}

/// Performs the disruptions that happen once the pods are bound and kubelet knows of them, before it admits any.
async fn disrupt_before_admission(runner: &mut Runner, batch: &Batch) -> Result<()> {
    let faults = runner.cluster.api().faults().clone();
    match batch.meanwhile {
        Disruption::PluginRestarts => runner.restart_plugin(batch.node).await?,
        Disruption::KubeletRestarts => {
            runner.node(batch.node)?.restart_kubelet().await?;
            // The restarted kubelet admits no pod yet either, and lists every pod of the node.
            runner.until_offered(batch.node).await?;
        }
        Disruption::SchedulerRestarts => {
            runner.cluster.scheduler.restart().await?;
            runner.cluster.until_scheduler_ready(DEADLINE).await?;
        }
        Disruption::PluginWatchBreaks => faults.drop_watches_of(PLUGIN_USER, "pods"),
        Disruption::AllWatchesBreak => {
            runner.cluster.api().objects().compact();
            faults.drop_watches_of("", "");
        }
        Disruption::CdiBlocked => runner.cdi(batch.node)?.block()?,
        Disruption::DiskFull => fill_disk(runner, batch.node, true).await?,
        Disruption::CdiWiped => runner.wipe_cdi(batch.node)?,
        _ => {}
    }
    Ok(())
}

/// Performs the disruptions that happen while kubelet admits the pods, `n_expected` in number; `n_calls` is the number of
/// Allocate calls before.
async fn disrupt_during_admission(
    runner: &mut Runner,
    batch: &Batch,
    n_calls: usize,
    n_expected: usize,
) -> Result<()> {
    let begun = |kubelet: &Kubelet| kubelet.counts().allocate_calls > n_calls || n_expected == 0;
    match batch.meanwhile {
        Disruption::PluginWatchLags | Disruption::PluginMissesDeletions | Disruption::PluginDies => {
            runner
                .until_kubelet(batch.node, "Allocate to be called", begun)
                .await?;
            if batch.meanwhile == Disruption::PluginDies {
                runner.restart_plugin(batch.node).await?;
            }
        }
        Disruption::KubeletMissesDeletions => until_admitted(runner, batch, n_expected).await?,
        Disruption::CdiBlocked | Disruption::DiskFull => {
            until_admitted(runner, batch, n_expected).await?;
            until_tried(runner, batch, n_expected).await?;
            match batch.meanwhile {
                Disruption::DiskFull => fill_disk(runner, batch.node, false).await?,
                _ => runner.cdi(batch.node)?.unblock()?,
            }
        }
        Disruption::SchedulerWatchLags => runner.until_settled().await?,
        _ => {}
    }
    Ok(())
}

/// Waits until kubelet has admitted `n_expected` pods more than when the batch began.
async fn until_admitted(runner: &mut Runner, batch: &Batch, n_expected: usize) -> Result<()> {
    let n_before = runner.n_admissions_seen.get(batch.node).copied().unwrap_or(0);
    let all = |kubelet: &Kubelet| kubelet.counts().admissions.len() >= n_before + n_expected;
    let what = "all pods to be admitted";
    runner.until_kubelet(batch.node, what, all).await
}

/// Waits a little until a start of every pod of the batch has been tried.
async fn until_tried(runner: &mut Runner, batch: &Batch, n_expected: usize) -> Result<()> {
    let names: BTreeSet<String> = batch.pods.iter().map(|number| pod_name(*number)).collect();
    let tried = |kubelet: &Kubelet| {
        let mut tried: BTreeSet<String> = kubelet.containers().into_iter().map(|one| one.pod).collect();
        tried.retain(|pod| names.contains(pod));
        tried.len() >= n_expected
    };
    // A timeout is no error: the wait only makes sure that the disruption met some starts.
    let _ = runner.node(batch.node)?.kubelet().until(TRIED, tried).await;
    Ok(())
}

/// Keeps a node's plugin from writing to any file, as a full disk does (`is_full`), or allows it again. Needs `prlimit`,
/// which comes with every Linux.
async fn fill_disk(runner: &mut Runner, node: usize, is_full: bool) -> Result<()> {
    let pid = runner.node(node)?.plugin().and_then(Daemon::pid);
    let pid = pid.context("no plugin runs on the node")?.to_string();
    let limit = if is_full {
        "--fsize=0:"
    } else {
        "--fsize=unlimited:"
    };
    let mut command = tokio::process::Command::new("prlimit");
    let status = command.args(["--pid", &pid, limit]).status().await;
    let status = status.context("cannot run prlimit")?;
    anyhow::ensure!(status.success(), "prlimit ended with {status}");
    Ok(())
}

/// The pod of a shape: the resources that its containers and init containers request.
fn pod_spec(name: &str, shape: Shape) -> PodBuilder {
    match shape {
        Shape::Units(units) => PodBuilder::units(name, units),
        Shape::UnitsAndInit(units) => {
            PodBuilder::units(name, units).init("init", &[(GPU_MEM, &units.to_string())])
        }
        Shape::TwoContainers(units) => {
            PodBuilder::units(name, units).container("second", &[(GPU_MEM, &units.to_string())])
        }
        Shape::InitOnly(units) => PodBuilder::new(name, &[]).init("init", &[(GPU_MEM, &units.to_string())]),
        Shape::Ratio => tenth_of_each(name, "1", "10"),
        Shape::TwoDevices => tenth_of_each(name, "2", "20"),
    }
}

/// A pod of 10 % of each of its GPUs, `sum` together.
fn tenth_of_each(name: &str, n_gpus: &str, sum: &str) -> PodBuilder {
    PodBuilder::new(
        name,
        &[(GPU_SHARED, n_gpus), (GPU_MEMORY_RATIO, sum), (GPU_CORE, sum)],
    )
}
