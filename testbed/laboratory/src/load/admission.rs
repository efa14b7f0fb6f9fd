//! `laboratory load admission`: pods per second that one node's kubelet admits, with the real plugin checking every start.
//!
//! Pods are bound first and held back, so that the scheduler is not part of the measurement.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use parking_lot::Mutex;
use serde::Serialize;

use kit::cluster::{ClusterSpec, LocalCluster, NodeSetup};
use kit::command::value_name;
use kit::console::Console;
use kit::daemons::Daemon;
use kit::invariants;
use kit::kubelet::StartHook;
use kit::observer::ClusterSnapshot;
use kit::pods::PodBuilder;
use kit::process_usage::ProcessUsage;

use super::{delete_all, failed_pods, mib, quantiles, start_together, times, wrong_devices};
use crate::replay::portion::float;

/// The percentiles that results show: median, 99th, and the longest.
const ADMISSION_PERCENTS: [usize; 3] = [50, 99, 100];
const GIB_OF_GPU: u64 = 80;
/// The time after the last start that does not count as rest.
const SETTLE: Duration = Duration::from_secs(10);

/// The way in which containers get their devices, as `--inject` of the plugin names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum InjectionMode {
    Cdi,
    Envvar,
}

#[derive(Clone, Debug, Args)]
pub struct AdmissionArgs {
    /// Pods of one round, each of one memory unit.
    #[arg(long, default_value_t = 400, value_parser = clap::value_parser!(u32).range(1..=640))]
    pods: u32,
    /// The number of times that the node is filled and emptied.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// GPUs of the node.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(8..=16))]
    gpus: u8,
    /// The plugin's mode.
    #[arg(long, value_enum, default_value = "cdi")]
    mode: InjectionMode,
    /// Seconds for which the full node is left alone at the end, to see what the plugin takes at rest.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=3600))]
    rest: u32,
}

/// The measurements; times have the median, the 99th percentile and the longest.
#[derive(Clone, Debug, Serialize)]
struct Admitted {
    mode: InjectionMode,
    pods: usize,
    per_second: f64,
    allocate_ms: [f64; 3],
    /// The plugin's part of a start.
    start_ms: [f64; 3],
    /// Starts that were refused for now.
    refused: usize,
    /// Starts for each time that kubelet was asked to list.
    starts_per_list: f64,
    peak_mib: f64,
    rest: Option<Rest>,
    /// A sentence for each container that sees other devices than recorded, and for each pod that kubelet refused.
    wrong: Vec<String>,
}

/// The plugin of a full node on which nothing changes.
#[derive(Clone, Copy, Debug, Serialize)]
struct Rest {
    resident_mib: f64,
    /// The number of times in a second that one of its threads wakes up.
    wake_ups_per_second: f64,
    device_lists: usize,
}

/// Measures and prints the results; true if every pod ran with the devices of its record.
pub(super) async fn run(console: &Console, args: &AdmissionArgs) -> Result<bool> {
    let admitted = admission(console, args).await?;
    let heads = "MODE;PODS;PER SECOND;ALLOCATE P50, P99, MAX ms;START P50, P99, MAX ms;STARTS PER LIST;PLUGIN AT MOST MiB;AT REST: MiB, WAKE-UPS/s, LISTS SENT;WRONG";
    let row = [
        value_name(&admitted.mode),
        admitted.pods.to_string(),
        format!("{:.0}", admitted.per_second),
        times(admitted.allocate_ms, 2),
        times(admitted.start_ms, 2),
        format!("{:.1}", admitted.starts_per_list),
        format!("{:.0}", admitted.peak_mib),
        admitted.rest.map_or_else(String::new, |rest| {
            format!(
                "{:.0} / {:.1} / {}",
                rest.resident_mib, rest.wake_ups_per_second, rest.device_lists
            )
        }),
        admitted.wrong.len().to_string(),
    ];
    console.report(heads.split(';'), [row], &admitted);
    for wrong in admitted.wrong.iter().take(10) {
        console.result(wrong);
    }
    Ok(admitted.wrong.is_empty())
}

/// Starts of containers: the time that each spent in the plugin, and how often it was refused before.
type Starts = Arc<Mutex<Vec<(Duration, usize)>>>;

/// Starts the testbed, fills and empties the node round after round, and returns the measurements.
async fn admission(console: &Console, args: &AdmissionArgs) -> Result<Admitted> {
    console.step("starting the testbed");
    let starts = Starts::default();
    let entered = Arc::clone(&starts);
    let (inject, plugin_args) = match args.mode {
        InjectionMode::Cdi => ("cdi", Vec::new()),
        // Without eviction a wrong pod would wait for ever in this mode.
        InjectionMode::Envvar => ("envvar", vec!["--evict=mismatch".to_owned()]),
    };
    let node = NodeSetup {
        started: StartHook::new(move |start| entered.lock().push((start.spent, start.refusals.len()))),
        inject,
        plugin_args,
        // Pods of the last round may still be terminating when the next ones arrive.
        max_pods: args.pods + 10,
        ..NodeSetup::new("n1", &vec![GIB_OF_GPU * 1024; usize::from(args.gpus)])
    };
    let mut cluster = LocalCluster::start(ClusterSpec {
        // A start that is refused for now would otherwise wait out kubelet's back-off, which is longer than all the rest.
        max_backoff: Some(Duration::from_millis(500)),
        ..ClusterSpec::of(vec![node])
    })
    .await?;
    let mut per_second = Vec::new();
    let mut wrong = Vec::new();
    for round in 0..args.rounds {
        console.step(&format!("round {} of {}", round + 1, args.rounds));
        per_second.push(fill(&mut cluster, args, round).await?);
        wrong.extend(problems(&mut cluster)?);
        if args.rest == 0 || round + 1 < args.rounds {
            delete_all(&cluster, &names(args, round)).await?;
        }
    }
    let mut rest = None;
    if args.rest > 0 {
        console.step(&format!("leaving the node alone for {} s", args.rest));
        rest = Some(leave_alone(&mut cluster, Duration::from_secs(args.rest.into())).await?);
    }
    let node = cluster.node("n1")?;
    let plugin = node.plugin().and_then(Daemon::pid).context("no plugin runs")?;
    let peak = ProcessUsage::of(plugin)?.peak;
    let kubelet = node.kubelet();
    let (mut spent, mut refused) = (Vec::new(), 0);
    for (took, n_refusals) in starts.lock().iter() {
        spent.push(*took);
        refused += n_refusals;
    }
    let starts_per_list = float(spent.len()) / float(kubelet.counts().lists.max(1));
    let admitted = Admitted {
        mode: args.mode,
        pods: usize::try_from(args.pods * args.rounds)?,
        per_second: per_second.iter().sum::<f64>() / f64::from(args.rounds),
        allocate_ms: quantiles(kubelet.counts().allocate_took, ADMISSION_PERCENTS),
        start_ms: quantiles(spent, ADMISSION_PERCENTS),
        refused,
        peak_mib: mib(peak),
        rest,
        starts_per_list,
        wrong,
    };
    cluster.stop().await?;
    Ok(admitted)
}

async fn leave_alone(cluster: &mut LocalCluster, duration: Duration) -> Result<Rest> {
    let node = cluster.node("n1")?;
    let plugin = node.plugin().and_then(Daemon::pid).context("no plugin runs")?;
    // Corrections and reports on the last pods are written within seconds of their start.
    tokio::time::sleep(SETTLE).await;
    let (before, n_lists) = (ProcessUsage::of(plugin)?, node.kubelet().counts().device_lists);
    tokio::time::sleep(duration).await;
    let after = ProcessUsage::of(plugin)?;
    Ok(Rest {
        resident_mib: mib(after.resident),
        wake_ups_per_second: float(after.wake_ups - before.wake_ups) / duration.as_secs_f64(),
        device_lists: node.kubelet().counts().device_lists - n_lists,
    })
}

fn names(args: &AdmissionArgs, round: u32) -> Vec<String> {
    (0..args.pods)
        .map(|number| format!("r{round}-p{number}"))
        .collect()
}

/// Binds the pods of a round and lets kubelet admit them together; returns the admissions per second.
async fn fill(cluster: &mut LocalCluster, args: &AdmissionArgs, round: u32) -> Result<f64> {
    let n_before = cluster.node("n1")?.kubelet().counts().admissions.len();
    let names = names(args, round);
    let spec = |name: &String| PodBuilder::units(name, 1);
    start_together(cluster, "n1", &names, spec, u64::from(round)).await?;
    let kubelet = cluster.node("n1")?.kubelet();
    let admissions = kubelet.counts().admissions_since(n_before);
    // From the first admission to the end of the last: creation, binding and the start of containers are not counted.
    let began = admissions.first().context("no pod was admitted")?.began;
    let ended = admissions.iter().map(|one| one.began + one.took).max();
    let took = ended.context("no pod was admitted")? - began;
    Ok(f64::from(args.pods) / took.as_secs_f64())
}

/// The problems at this moment: refused pods, containers with wrong devices, GPUs whose sums do not add up.
fn problems(cluster: &mut LocalCluster) -> Result<Vec<String>> {
    let snapshot = ClusterSnapshot::of(cluster.api().objects());
    let mut wrong = invariants::held_amounts(&snapshot, &invariants::NONE_EXCUSED).violations;
    for container in cluster.node("n1")?.kubelet().containers() {
        wrong.extend(wrong_devices(&snapshot, "n1", &container));
    }
    wrong.extend(failed_pods(&snapshot, "n1"));
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(InjectionMode::Cdi)]
    #[case(InjectionMode::Envvar)]
    #[tokio::test(flavor = "multi_thread")]
    async fn every_start_is_confirmed_by_kubelet(#[case] mode: InjectionMode) {
        let args = AdmissionArgs {
            pods: 24,
            rounds: 2,
            mode,
            gpus: 8,
            rest: 0,
        };
        let admitted = admission(&Console::new(true), &args).await.unwrap();
        assert_eq!((admitted.wrong.as_slice(), admitted.pods), (&[][..], 48));
        assert!(
            mode == InjectionMode::Envvar || admitted.refused == 0,
            "{admitted:?}"
        );
        assert!(admitted.peak_mib > 1.0, "{admitted:?}");
        assert!(
            admitted.per_second > 0.0 && admitted.starts_per_list > 0.0,
            "{admitted:?}"
        );
    }
}
