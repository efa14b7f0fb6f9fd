//! `laboratory load storm`: the scheduler's filter and memory while masses of objects change, and the time until filters are as
//! fast as before.
//!
//! Objects change in the testbed's API server as fast as that can write them; only the flaps come once a second. One client asks
//! the filter all the time, at the pace of a kube-scheduler that is busy.

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::{interval, sleep};

use super::filter::HINT;
use super::kept_connection::KeptConnection;
use super::requests::{PreparedRequests, ensure_placed};
use super::{Rig, empty_api_server, fleet, quantiles, times};
use kit::apiserver::ApiObjects;
use kit::console::Console;
use kit::pods::set;
use proto::closed_gpus::CLOSED_GPUS;

/// Names in one request, as kube-scheduler sends for 5,000 nodes.
const N_NAMES: usize = 500;
const POD_BYTES: usize = 4096;
/// The pause of the client between two requests.
const PAUSE: Duration = Duration::from_millis(4);
/// Time before the storm, and the length of the periods after it that are compared with it.
const QUIET: Duration = Duration::from_secs(10);
const PERIOD: Duration = Duration::from_secs(2);
/// The longest wait for filters that are as fast as before.
const DEADLINE: Duration = Duration::from_secs(300);
/// Filters are as fast as before if their p99 is at most this many times that before, or a millisecond more.
const AS_BEFORE: f64 = 1.5;
/// The percentiles that results show: median, 99th, and the longest.
const STORM_PERCENTS: [usize; 3] = [50, 99, 100];

/// The objects that change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum StormKind {
    /// 5,000 bound pods come at once, and go at once.
    Pods,
    /// 500 nodes change between ready and not ready once a second, for half a minute.
    Flaps,
    /// The Device objects of 200 nodes grow to 1 MiB, and shrink again.
    Devices,
    /// 100,000 pods wait to be scheduled, and go.
    Pending,
    /// The first GPU of every node is closed to new pods, and opened.
    Closed,
}

#[derive(Clone, Debug, Args)]
pub struct StormArgs {
    /// The storm; several, such as pods,flaps, are measured one after the other, each with a new scheduler.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "pods,flaps,devices,pending,closed"
    )]
    storms: Vec<StormKind>,
    /// Nodes of eight GPUs, each with eight pods.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    nodes: u32,
}

#[derive(Clone, Debug, Serialize)]
struct StormMeasurement {
    storm: StormKind,
    /// Latency of the filter at the client, in milliseconds, before the storm, in it, and from its end until it was as before.
    before_millis: [f64; 3],
    storm_millis: [f64; 3],
    after_millis: [f64; 3],
    storm_seconds: f64,
    /// Time from the end of the storm until filters were as fast as before.
    recovered_seconds: f64,
    /// Resident memory of the scheduler before the storm, at most, and when filters were as fast as before.
    rss_mib: [f64; 3],
}

pub(super) async fn run(console: &Console, args: &StormArgs) -> Result<bool> {
    let mut measured = Vec::new();
    for storm in &args.storms {
        measured.push(measure(console, args, *storm).await?);
    }
    let heads = "STORM;BEFORE P50, P99, MAX ms;DURING;AFTER;TOOK s;RECOVERED s;RSS MiB";
    let row = |one: &StormMeasurement| {
        [
            kit::command::value_name(&one.storm),
            times(one.before_millis, 2),
            times(one.storm_millis, 2),
            times(one.after_millis, 2),
            format!("{:.1}", one.storm_seconds),
            format!("{:.1}", one.recovered_seconds),
            one.rss_mib.map(|mib| format!("{mib:.0}")).join(" > "),
        ]
    };
    console.report(heads.split(';'), measured.iter().map(row), &measured);
    Ok(true)
}

/// Fills a cluster, and measures the scheduler before a storm, in it and after it.
async fn measure(console: &Console, args: &StormArgs, storm: StormKind) -> Result<StormMeasurement> {
    console.step(&format!("making {} nodes for {storm:?}", args.nodes));
    let (api, dir) = empty_api_server().await?;
    fleet::fill(
        api.objects(),
        args.nodes,
        args.nodes * fleet::MOST_PODS,
        POD_BYTES,
    )?;
    let rig = Rig::with_scheduler(api, dir, &["--hint-ttl", HINT]).await?;
    let client = SteadyClient::start(&rig, args.nodes)?;
    sleep(QUIET).await;
    let before_millis = quantiles(client.take()?, STORM_PERCENTS);
    let rss = rig.rss()?;
    console.step(&format!("{storm:?}"));
    let began = Instant::now();
    storm.run(rig.api.objects(), args.nodes).await?;
    let ended = Instant::now();
    let storm_millis = quantiles(client.take()?, STORM_PERCENTS);
    let [_, usual, _] = before_millis;
    let mut after = Vec::new();
    loop {
        sleep(PERIOD).await;
        let latencies = client.take()?;
        after.extend(latencies.iter().copied());
        let [_, p99, _] = quantiles(latencies, STORM_PERCENTS);
        if p99 <= (usual * AS_BEFORE).max(usual + 1.0) {
            break;
        }
        ensure!(
            ended.elapsed() < DEADLINE,
            "{DEADLINE:?} after the storm the p99 of the filter is {p99:.2} ms, and was {usual:.2} ms"
        );
    }
    let measured = StormMeasurement {
        storm,
        before_millis,
        storm_millis,
        after_millis: quantiles(after, STORM_PERCENTS),
        storm_seconds: (ended - began).as_secs_f64(),
        recovered_seconds: ended.elapsed().as_secs_f64(),
        rss_mib: [rss, rig.peak_rss()?, rig.rss()?],
    };
    client.end().await?;
    rig.stop().await;
    Ok(measured)
}

impl StormKind {
    /// Changes the objects; returns when all is as before.
    async fn run(self, objects: &ApiObjects, n_nodes: u32) -> Result<()> {
        match self {
            Self::Pods => {
                let first = n_nodes * fleet::MOST_PODS;
                let pod = |idx| fleet::bound_pod(first + idx, n_nodes, POD_BYTES);
                come_and_go(objects, 5000, pod)
            }
            Self::Pending => {
                let pod = |idx| fleet::pod(&format!("pending-{idx:06}"), "1");
                come_and_go(objects, 100_000, pod)
            }
            Self::Flaps => {
                let mut seconds = interval(Duration::from_secs(1));
                for second in 0..30 {
                    seconds.tick().await;
                    let status = if second % 2 == 0 { "False" } else { "True" };
                    for idx in 0..n_nodes.min(500) {
                        let conditions = json!({"conditions": [{"type": "Ready", "status": status}]});
                        objects.patch_status("nodes", "", &fleet::node_name(idx), &conditions)?;
                    }
                }
                Ok(())
            }
            Self::Closed => block_in_place(|| {
                for closed in [json!("0"), Value::Null] {
                    for idx in 0..n_nodes {
                        let patch = json!({"metadata": {"annotations": {CLOSED_GPUS: closed}}});
                        objects.patch("nodes", "", &fleet::node_name(idx), patch)?;
                    }
                }
                Ok(())
            }),
            Self::Devices => block_in_place(|| {
                for make in [large_device, fleet::device] {
                    for idx in 0..n_nodes.min(200) {
                        let name = fleet::node_name(idx);
                        objects.patch(fleet::DEVICES, "", &name, make(&name))?;
                    }
                }
                Ok(())
            }),
        }
    }
}

/// Creates pods as fast as the API server can, then deletes them.
fn come_and_go(objects: &ApiObjects, n_pods: u32, pod: impl Fn(u32) -> Value) -> Result<()> {
    block_in_place(|| {
        let mut made = Vec::new();
        for idx in 0..n_pods {
            made.push(objects.create("pods", pod(idx))?);
        }
        for pod in made {
            let name = pod.pointer("/metadata/name").and_then(Value::as_str);
            let name = name.context("a pod has no name")?;
            objects.delete("pods", fleet::NAMESPACE, name, Some(0))?;
        }
        Ok(())
    })
}

/// A Device object of 1 MiB: each device has labels in mass.
fn large_device(name: &str) -> Value {
    let mut object = fleet::device(name);
    let devices = object.pointer_mut("/spec/devices").and_then(Value::as_array_mut);
    for device in devices.into_iter().flatten() {
        let labels = (0..1800).map(|n| (format!("example.com/label-{n:04}"), json!("x".repeat(45))));
        set(device, "labels", Value::Object(labels.collect()));
    }
    object
}

struct SteadyClient {
    latencies: Receiver<Duration>,
    thread: JoinHandle<Result<()>>,
}

impl SteadyClient {
    fn start(rig: &Rig, n_nodes: u32) -> Result<Self> {
        let mut requests = PreparedRequests::new((0..n_nodes).map(fleet::node_name), POD_BYTES)?;
        let mut connection = KeptConnection::to(rig.address)?;
        let (sender, latencies) = mpsc::channel();
        let thread = tokio::task::spawn_blocking(move || {
            loop {
                let request = requests.next(N_NAMES)?;
                let began = Instant::now();
                let answer = connection.ask(&request)?;
                // The receiver is gone once the client is to end.
                if sender.send(began.elapsed()).is_err() {
                    return Ok(());
                }
                ensure_placed(answer)?;
                std::thread::sleep(PAUSE);
            }
        });
        Ok(Self { latencies, thread })
    }

    /// The latencies since the last call.
    fn take(&self) -> Result<Vec<Duration>> {
        let taken: Vec<Duration> = self.latencies.try_iter().collect();
        ensure!(!taken.is_empty(), "the filter does not answer");
        Ok(taken)
    }

    async fn end(self) -> Result<()> {
        drop(self.latencies);
        self.thread.await?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_device_object_has_one_mebibyte() {
        let bytes = large_device("node").to_string().len();
        assert!((1 << 20..(1 << 20) + (1 << 18)).contains(&bytes), "{bytes}");
    }
}
