//! `laboratory load admission`: pods per second that one node's kubelet admits, with the real plugin checking every start.
//!
//! Pods are bound first and held back, so that the scheduler is not part of the measurement.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use futures::stream::{StreamExt, TryStreamExt};
use proto::resource::GPU_MEM;
use serde::Serialize;

use testbed::chaos::PluginMode;
use testbed::cluster::{ClusterSpec, LocalCluster, NodeSetup};
use testbed::console::{Console, table};
use testbed::invariants;
use testbed::kubelet::{Kubelet, OrderRule, StartHook};
use testbed::observer::ClusterSnapshot;
use testbed::pod_fields::{is_running, node_of, phase};
use testbed::pods::{NamespacePods, PodBuilder};

/// Longest wait for one thing.
const DEADLINE: Duration = Duration::from_secs(120);
/// GPUs of the node, and GiB of each.
const GPUS: [u64; 2] = [8, 80];
/// Requests to the API server at one time.
const CONCURRENCY: usize = 32;

/// `laboratory load admission`.
#[derive(Clone, Debug, Args)]
pub struct AdmissionArgs {
    /// Pods of one round, each of one memory unit.
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u32).range(1..=640))]
    pub pods: u32,
    /// The number of times that the node is filled and emptied.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// The plugin's mode.
    #[arg(long, value_enum, default_value = "cdi")]
    pub mode: PluginMode,
    /// True if an init container alone asks for devices, which kubelet's pod-resources list leaves out.
    #[arg(long)]
    pub init_only: bool,
}

/// The measurements.
#[derive(Clone, Debug, Serialize)]
pub struct Admitted {
    /// The plugin's mode.
    pub mode: PluginMode,
    /// Pods in all.
    pub pods: usize,
    /// Pods that pass admission in a second.
    pub per_second: f64,
    /// One Allocate as kubelet sees it, in milliseconds: median, 99th percentile, longest.
    pub allocate_ms: [f64; 3],
    /// The plugin's part of a start, in milliseconds: median, 99th percentile, longest.
    pub start_ms: [f64; 3],
    /// Starts that were refused for now.
    pub refused: usize,
    /// Starts for each time that kubelet was asked to list.
    pub starts_per_list: f64,
    /// Containers that see other devices than recorded, pods that kubelet refused.
    pub wrong: Vec<String>,
}

/// Measures and prints the results; true if nothing was wrong.
pub(super) async fn run(console: &Console, args: &AdmissionArgs) -> Result<bool> {
    let admitted = admission(console, args).await;
    console.finish();
    let admitted = admitted?;
    let mut results = table([
        "MODE",
        "PODS",
        "PER SECOND",
        "ALLOCATE P50, P99, MAX ms",
        "START P50, P99, MAX ms",
        "STARTS PER LIST",
        "WRONG",
    ]);
    let words = |values: [f64; 3]| values.map(|value| format!("{value:.2}")).join(" ");
    let Admitted {
        mode,
        pods,
        per_second,
        allocate_ms,
        start_ms,
        starts_per_list,
        wrong,
        ..
    } = &admitted;
    let rate = format!("{per_second:.0}");
    let (allocate, start, share) = (
        words(*allocate_ms),
        words(*start_ms),
        format!("{starts_per_list:.1}"),
    );
    results.add_row([
        mode.to_string(),
        pods.to_string(),
        rate,
        allocate,
        start,
        share,
        wrong.len().to_string(),
    ]);
    console.result(&results.to_string());
    wrong.iter().take(10).for_each(|one| console.result(one));
    console.json(&admitted);
    Ok(wrong.is_empty())
}

/// Starts of containers: the delay of each, and the number of its refusals before.
type Starts = Arc<Mutex<Vec<(Duration, usize)>>>;

/// Measures.
pub async fn admission(console: &Console, args: &AdmissionArgs) -> Result<Admitted> {
    console.step("starting the testbed");
    let starts = Starts::default();
    let entered = Arc::clone(&starts);
    let gpus: Vec<u64> = (0..GPUS[0]).map(|_| GPUS[1] * 1024).collect();
    let node = NodeSetup {
        started: StartHook::new(move |start| {
            entered
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push((start.spent, start.refusals.len()));
        }),
        inject: args.mode.inject(),
        plugin_args: args.mode.plugin_args(),
        max_pods: args.pods + 10,
        ..NodeSetup::new("n1", &gpus)
    };
    let mut cluster = LocalCluster::start(ClusterSpec {
        max_backoff: Some(Duration::from_millis(500)),
        ..ClusterSpec::of(vec![node])
    })
    .await?;
    let mut per_second = Vec::new();
    let mut wrong = Vec::new();
    for round in 0..args.rounds {
        console.step(&format!("round {} of {}", round + 1, args.rounds));
        per_second.push(fill(&mut cluster, args, round).await?);
        wrong.extend(look(&mut cluster)?);
        empty(&cluster).await?;
    }
    let kubelet = cluster.node("n1")?.kubelet();
    let starts = starts.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let admitted = Admitted {
        mode: args.mode,
        pods: usize::try_from(args.pods * args.rounds)?,
        per_second: per_second.iter().sum::<f64>() / f64::from(args.rounds),
        allocate_ms: quantiles(kubelet.allocate_took()),
        start_ms: quantiles(starts.iter().map(|(spent, _)| *spent).collect()),
        refused: starts.iter().map(|(_, refused)| refused).sum(),
        starts_per_list: f64::from(u32::try_from(starts.len())?)
            / f64::from(u32::try_from(kubelet.n_lists().max(1))?),
        wrong,
    };
    cluster.stop().await?;
    Ok(admitted)
}

/// Binds the pods of a round and lets kubelet admit them together; how many it admits in a second.
async fn fill(cluster: &mut LocalCluster, args: &AdmissionArgs, round: u32) -> Result<f64> {
    let n_pods = usize::try_from(args.pods)?;
    let n_before = cluster.node("n1")?.kubelet().n_admissions();
    cluster.node("n1")?.kubelet().hold();
    let pods = NamespacePods::of(cluster.client(), "default");
    let created = futures::stream::iter(0..args.pods).map(|number| {
        let name = format!("r{round}-p{number}");
        let unit = [(GPU_MEM, "1")];
        let spec = if args.init_only {
            PodBuilder::new(&name, &[]).init("init", &unit)
        } else {
            PodBuilder::new(&name, &unit)
        };
        let pods = pods.clone();
        async move { pods.create(&spec).await }
    });
    created
        .buffer_unordered(CONCURRENCY)
        .try_collect::<Vec<_>>()
        .await?;
    let bound = |snapshot: &ClusterSnapshot| {
        snapshot
            .pods
            .values()
            .all(|pod| node_of(pod).is_some())
            .then_some(())
    };
    cluster.until("all pods to be bound", DEADLINE, bound).await?;
    let kubelet = cluster.node("n1")?.kubelet();
    ensure!(
        kubelet
            .until(DEADLINE, |kubelet| kubelet.n_held() == n_pods)
            .await,
        "pods do not reach kubelet"
    );
    kubelet.release(OrderRule::Shuffled, u64::from(round));
    ensure!(
        kubelet
            .until(DEADLINE, |kubelet| kubelet.n_admissions() == n_before + n_pods)
            .await,
        "pods are not admitted"
    );
    let admissions = kubelet.admissions_since(n_before);
    let began = admissions.first().context("no pod was admitted")?.began;
    let took = admissions
        .iter()
        .map(|one| one.began + one.took)
        .max()
        .context("no pod was admitted")?
        - began;
    let settled = |snapshot: &ClusterSnapshot| {
        snapshot
            .pods
            .values()
            .all(|pod| is_running(pod) || phase(pod) == "Failed")
            .then_some(())
    };
    cluster.until("all pods to run", DEADLINE, settled).await?;
    Ok(f64::from(args.pods) / took.as_secs_f64())
}

/// The problems now: refused pods, wrong devices, sums.
fn look(cluster: &mut LocalCluster) -> Result<Vec<String>> {
    let snapshot = ClusterSnapshot::of(cluster.api().objects());
    let mut wrong = invariants::accounts(&snapshot, &BTreeSet::new()).violations;
    let device = snapshot.devices.get("n1");
    let kubelet: &Kubelet = cluster.node("n1")?.kubelet();
    for container in kubelet.containers() {
        let Some(pod) = snapshot
            .pods
            .get(&format!("{}/{}", container.namespace, container.pod))
        else {
            continue;
        };
        let sees = container.gpus.clone();
        let should_see = invariants::should_see(pod, device, &container.name);
        if sees != should_see {
            wrong.push(format!(
                "{}/{} sees {sees:?} and should see {should_see:?}",
                container.pod, container.name
            ));
        }
    }
    let failed = snapshot.pods.iter().filter(|(_, pod)| phase(pod) == "Failed");
    wrong.extend(failed.map(|(name, pod)| {
        format!(
            "{name} failed: {:?}",
            pod.status.as_ref().and_then(|status| status.message.clone())
        )
    }));
    Ok(wrong)
}

async fn empty(cluster: &LocalCluster) -> Result<()> {
    let pods = NamespacePods::of(cluster.client(), "default");
    let names = ClusterSnapshot::of(cluster.api().objects()).pods.into_keys();
    let deleted = futures::stream::iter(names).map(|key| {
        let pods = pods.clone();
        async move { pods.delete(key.rsplit('/').next().unwrap_or(&key)).await }
    });
    deleted
        .buffer_unordered(CONCURRENCY)
        .try_collect::<Vec<_>>()
        .await?;
    cluster
        .until("all pods to be gone", DEADLINE, |snapshot| {
            snapshot.pods.is_empty().then_some(())
        })
        .await
}

fn quantiles(mut durations: Vec<Duration>) -> [f64; 3] {
    durations.sort_unstable();
    let n_durations = durations.len();
    [50, 99, 100].map(|percent| {
        let idx = (n_durations * percent / 100).min(n_durations.saturating_sub(1));
        durations
            .get(idx)
            .map_or(0.0, |duration| duration.as_secs_f64() * 1000.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn admitted(mode: PluginMode, init_only: bool) -> Admitted {
        let args = AdmissionArgs {
            pods: 24,
            rounds: 2,
            mode,
            init_only,
        };
        admission(&Console::new(true), &args).await.unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn every_start_is_confirmed_by_kubelet() {
        let admitted = admitted(PluginMode::Cdi, false).await;
        assert_eq!(
            (admitted.wrong.as_slice(), admitted.refused, admitted.pods),
            (&[][..], 0, 48)
        );
        assert!(
            admitted.per_second > 0.0 && admitted.starts_per_list > 0.0,
            "{admitted:?}"
        );
    }

    /// Such pods are not in the list of pod-resources: kubelet's checkpoint names the holders of their devices.
    #[tokio::test(flavor = "multi_thread")]
    async fn pods_with_devices_in_init_containers_only_are_measured() {
        for mode in [PluginMode::Cdi, PluginMode::Envvar] {
            let admitted = admitted(mode, true).await;
            assert_eq!(admitted.wrong, Vec::<String>::new(), "{admitted:?}");
        }
    }
}
