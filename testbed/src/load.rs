//! `testbed load`: drives the real scheduler over HTTP, or the real plugin through a kubelet, and measures it.
//!
//! The cluster is made of objects alone, and no kubelet runs, except where kubelet's admission is measured.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use futures::StreamExt;
use serde::Serialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::apiserver::{ApiServer, Config};
use crate::cluster::{SCHEDULER_USER, free_address, user_kubeconfig};
use crate::console::{Console, table};
use crate::daemons::{Binaries, Daemon, Invocation};
use crate::http_client::{HttpClient, is_ok};

mod admission;
mod churn;
mod filter;
mod fleet;
mod floor;
mod histogram;
mod line;
mod questions;

pub use admission::{AdmissionArgs, admission};
pub use filter::FilterArgs;
use histogram::Histogram;

/// `testbed load`.
#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    #[command(subcommand)]
    load: Load,
    /// Print the result as JSON.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Clone, Debug, Subcommand)]
enum Load {
    /// Ask where a pod fits in a large cluster that is half full.
    Filter(FilterArgs),
    /// Bind pods as fast as it goes.
    Bind(BindArgs),
    /// Let one node's kubelet admit and start pods as fast as it goes.
    Admission(AdmissionArgs),
}

/// `testbed load bind`.
#[derive(Clone, Debug, Args)]
pub struct BindArgs {
    /// Nodes of eight GPUs.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    nodes: u32,
    /// Pods to bind.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pods: u32,
    /// Requests at one time.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    concurrency: u16,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// What was done.
    pub what: String,
    /// From the start of the process to `/readyz`.
    pub ready_seconds: f64,
    /// Resident memory of the scheduler when it was ready, and at the end.
    pub rss_mib: [f64; 2],
    /// Latency in milliseconds: median, 90th and 99th percentile, longest.
    pub millis: [f64; 4],
    /// Requests per second.
    pub per_second: f64,
}

/// Runs the load; true if all answers were as they should be.
pub async fn run(args: LoadArgs) -> Result<bool> {
    let console = Console::new(args.json);
    let measured = match args.load {
        Load::Filter(args) => return filter::run(&console, &args).await.map(|()| true),
        Load::Bind(args) => bind(&console, &args).await,
        Load::Admission(args) => return admission::run(&console, &args).await,
    };
    console.finish();
    let measured = measured?;
    let mut results = table(["LOAD", "READY s", "RSS MiB", "P50 ms", "P90 ms", "P99 ms", "MAX ms", "PER SECOND"]);
    let rss = measured.rss_mib.map(|mib| format!("{mib:.0}")).join(" > ");
    let [p50, p90, p99, max] = measured.millis.map(|millis| format!("{millis:.2}"));
    let (ready, rate) = (format!("{:.2}", measured.ready_seconds), format!("{:.0}", measured.per_second));
    results.add_row([measured.what.clone(), ready, rss, p50, p90, p99, max, rate]);
    console.result(&results.to_string());
    console.json(&measured);
    Ok(true)
}

/// A scheduler and the API server that it watches.
struct Rig {
    scheduler: Daemon,
    api: ApiServer,
    url: String,
    address: SocketAddr,
    ready: Duration,
    dir: TempDir,
}

impl Rig {
    async fn start() -> Result<(ApiServer, TempDir)> {
        let api = ApiServer::start(Config::loopback()).await.context("cannot start the API server")?;
        Ok((api, TempDir::with_prefix("gpushare-load-")?))
    }

    /// Starts the scheduler on a filled API server and waits until it is ready.
    async fn with_scheduler(api: ApiServer, dir: TempDir, flags: &[&str]) -> Result<Self> {
        let binaries = Binaries::locate().await?;
        let address = free_address()?;
        let kubeconfig = user_kubeconfig(&api, dir.path(), SCHEDULER_USER, &[])?;
        let args = ["--listen", &address.to_string(), "--kubeconfig", &kubeconfig.display().to_string(), "--log-level", "warn"];
        let args = args.iter().chain(flags).map(|arg| (*arg).to_owned()).collect();
        let began = Instant::now();
        let log = dir.path().join("scheduler.log");
        let scheduler = Daemon::start(Invocation { name: "gpushare-scheduler".to_owned(), program: binaries.scheduler, args, log })?;
        let url = format!("http://{address}");
        let ready = async {
            while !is_ok(&format!("{url}/readyz")).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            ready = tokio::time::timeout(Duration::from_secs(120), ready) => ready.context("the scheduler is not ready in time")?,
            crash = scheduler.crash() => return Err(crash.into()),
        }
        Ok(Self { scheduler, api, url, address, ready: began.elapsed(), dir })
    }

    /// Resident memory of the scheduler in MiB.
    fn rss(&self) -> Result<f64> {
        let pid = self.scheduler.pid().context("the scheduler has no process id")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).context("cannot read /proc")?;
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.trim().parse::<f64>().ok());
        Ok(kib.context("/proc does not tell the resident memory")? / 1024.0)
    }

    /// Times of requests of one verb, as the scheduler has counted them.
    async fn histogram(&self, verb: &str) -> Result<Histogram> {
        let (_, metrics) = HttpClient::new().get(&format!("{}/metrics", self.url)).await?;
        Ok(Histogram::of(&String::from_utf8_lossy(&metrics), verb))
    }

    async fn stop(self) {
        self.scheduler.stop(Duration::from_secs(10)).await;
        self.api.shutdown().await;
        drop(self.dir);
    }
}

/// Measures `bind`.
pub async fn bind(console: &Console, args: &BindArgs) -> Result<Measured> {
    console.step(&format!("making {} nodes and {} pods", args.nodes, args.pods));
    let (api, dir) = Rig::start().await?;
    fleet::fill(api.cluster(), args.nodes, 0, 0)?;
    console.step("starting the scheduler");
    let rig = Rig::with_scheduler(api, dir, &[]).await?;
    let client = HttpClient::new();
    let url = format!("{}/gpushare-scheduler/bind", rig.url);
    until_it_binds(&client, &url).await?;
    let bindings = fleet::pending(rig.api.cluster(), args.nodes, args.pods)?;
    let rss_before = rig.rss()?;
    console.step(&format!("{} bindings, {} at a time", args.pods, args.concurrency));
    let began = Instant::now();
    let requests = bindings.into_iter().map(|binding| {
        let (client, url) = (client.clone(), url.clone());
        async move {
            let asked = Instant::now();
            let (status, answer) = client.post(&url, binding.to_string()).await?;
            let answer: Value = serde_json::from_slice(&answer).with_context(|| format!("bind answers {status}"))?;
            let error = answer.get("Error").and_then(Value::as_str).unwrap_or_default();
            ensure!(error.is_empty(), "bind answers {error}");
            Ok(asked.elapsed())
        }
    });
    let answers: Vec<Result<Duration>> = futures::stream::iter(requests).buffer_unordered(usize::from(args.concurrency)).collect().await;
    let elapsed = began.elapsed();
    let latencies = answers.into_iter().collect::<Result<Vec<_>>>()?;
    let what = format!("bind, {} pods, {} at a time", args.pods, args.concurrency);
    let measured = measured(what, &rig, rss_before, latencies, elapsed)?;
    rig.stop().await;
    Ok(measured)
}

/// A scheduler that has started first waits out what its predecessor may be writing. A pod that does not exist asks when that is over.
async fn until_it_binds(client: &HttpClient, url: &str) -> Result<()> {
    let question = json!({"PodName": "nobody", "PodNamespace": "default", "PodUID": "nobody", "Node": "nowhere"}).to_string();
    let asking = async {
        loop {
            let (_, answer) = client.post(url, question.clone()).await?;
            if !String::from_utf8_lossy(&answer).contains("starting:") {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), asking).await.context("the scheduler does not begin to bind in time")?
}

fn measured(what: String, rig: &Rig, rss_before: f64, latencies: Vec<Duration>, elapsed: Duration) -> Result<Measured> {
    let per_second = float(latencies.len()) / elapsed.as_secs_f64();
    let ready_seconds = rig.ready.as_secs_f64();
    Ok(Measured { what, ready_seconds, rss_mib: [rss_before, rig.rss()?], millis: quantiles(latencies), per_second })
}

fn float(n: usize) -> f64 {
    f64::from(u32::try_from(n).unwrap_or(u32::MAX))
}

/// In milliseconds: median, 90th and 99th percentile, longest.
fn quantiles(mut latencies: Vec<Duration>) -> [f64; 4] {
    latencies.sort_unstable();
    let n_requests = latencies.len();
    [50, 90, 99, 100].map(|percent| {
        let idx = (n_requests * percent / 100).min(n_requests.saturating_sub(1));
        latencies.get(idx).map_or(0.0, |latency| latency.as_secs_f64() * 1000.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The measuring itself, small: every answer is checked by the load.
    #[tokio::test(flavor = "multi_thread")]
    async fn binds_are_measured() {
        let console = Console::new(true);
        let bound = bind(&console, &BindArgs { nodes: 4, pods: 64, concurrency: 8 }).await.unwrap();
        assert!(bound.per_second > 0.0, "{bound:?}");
    }
}
