//! `laboratory load`: drives the real scheduler over HTTP, or the real plugin through a kubelet, and measures it.
//!
//! The cluster consists of objects in the testbed's API server; kubelets run only in `admission` and
//! `injection`. `schedule` measures the kube-schedulers of a control plane that is already running.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use futures::stream::{self, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use proto::extender::{ExtenderBindingArgs, ExtenderBindingResult};
use tempfile::TempDir;

use kit::apiserver::ApiServer;
use kit::cluster::{LocalCluster, SCHEDULER_USER, user_kubeconfig};
use kit::console::Console;
use kit::daemons::{Binaries, Crashes, Daemon, Invocation, Program};
use kit::http_client::{HttpClient, is_ok};
use kit::invariants;
use kit::kubelet::{Kubelet, OrderRule, RuntimeContainer};
use kit::observer::ClusterSnapshot;
use kit::pod_fields::{is_running, node_of, phase};
use kit::pods::{NamespacePods, PodBuilder};
use kit::polling;
use kit::ports::free_address;
use kit::process_usage::ProcessUsage;

mod admission;
mod background;
mod baseline;
mod bind;
mod churn;
mod filter;
mod fleet;
mod growth;
mod histogram;
mod injection;
mod kept_connection;
mod preemptors;
mod requests;
mod schedule;
mod soak;
mod storm;
mod throughput;
mod viewers;

pub use admission::AdmissionArgs;
pub use bind::BindArgs;
pub use filter::FilterArgs;
use histogram::Histogram;
pub use injection::InjectionArgs;
pub use schedule::ScheduleArgs;
pub use soak::SoakArgs;
pub use storm::StormArgs;

/// The percentiles of latency that results show: median, 90th, 99th, and the longest.
const PERCENTS: [usize; 4] = [50, 90, 99, 100];
/// Requests to the API server, or binds, under way at one time.
const CONCURRENCY: usize = 32;

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
    /// Bind pods as fast as the scheduler allows.
    Bind(BindArgs),
    /// Let the kube-schedulers of a real cluster place pods as fast as they can, on nodes that are nothing but objects.
    Schedule(ScheduleArgs),
    /// Let one node's kubelet admit and start pods as fast as it can.
    Admission(AdmissionArgs),
    /// Let containerd's own code inject the plugin's specs, in bursts of starts on nodes that are full.
    Injection(InjectionArgs),
    /// Let both daemons work for an hour, and see if their memory, files, threads or logs grow.
    Soak(SoakArgs),
    /// Ask where a pod fits while masses of pods, nodes or Device objects change.
    Storm(StormArgs),
}

/// Runs the load; false if a container saw wrong devices or kubelet refused a pod.
pub async fn run(args: LoadArgs) -> Result<bool> {
    let console = Console::new(args.json);
    match args.load {
        Load::Filter(args) => filter::run(&console, &args).await,
        Load::Bind(args) => bind::run(&console, &args).await,
        Load::Schedule(args) => schedule::run(&console, &args).await,
        Load::Admission(args) => admission::run(&console, &args).await,
        Load::Injection(args) => injection::run(&console, &args).await,
        Load::Soak(args) => soak::run(&console, &args).await,
        Load::Storm(args) => storm::run(&console, &args).await,
    }
}

/// A scheduler and the API server that it watches.
struct Rig {
    scheduler: Daemon,
    api: ApiServer,
    url: String,
    address: SocketAddr,
    ready: Duration,
    _dir: TempDir,
}

/// Starts an empty API server, and makes the directory for a scheduler's files. The caller fills the API server before the
/// scheduler starts, whose first list then has everything.
async fn empty_api_server() -> Result<(ApiServer, TempDir)> {
    let api = ApiServer::start().await.context("cannot start the API server")?;
    Ok((api, TempDir::with_prefix("gpushare-load-")?))
}

impl Rig {
    /// Starts the scheduler on a filled API server and waits until it is ready.
    async fn with_scheduler(api: ApiServer, dir: TempDir, flags: &[&str]) -> Result<Self> {
        let program = Binaries::locate().await?.path(Program::Scheduler)?;
        let address = free_address()?;
        let kubeconfig = user_kubeconfig(&api, dir.path(), SCHEDULER_USER, &[])?;
        let invocation = Invocation::new("gpushare-scheduler", program, dir.path(), "scheduler")
            .flag("--listen", &address)
            .kubeconfig(kubeconfig)
            // At the default level a log line for each request would be measured too.
            .flag("--log-level", "warn")
            .args(flags.iter().copied());
        let began = Instant::now();
        let crashes = Crashes::default();
        let scheduler = Daemon::start(invocation, &crashes)?;
        let url = format!("http://{address}");
        let ready = async {
            while !is_ok(&format!("{url}/readyz")).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            // A scheduler that ends at once (a wrong flag) is reported by its crash, not by two minutes of silence.
            ready = tokio::time::timeout(Duration::from_secs(120), ready) => ready.context("the scheduler is not ready in time")?,
            crash = crashes.first() => return Err(crash.into()),
        }
        Ok(Self {
            scheduler,
            api,
            url,
            address,
            ready: began.elapsed(),
            _dir: dir,
        })
    }

    fn pid(&self) -> Result<u32> {
        self.scheduler.pid().context("the scheduler has no process id")
    }

    fn rss(&self) -> Result<f64> {
        Ok(mib(ProcessUsage::of(self.pid()?)?.resident))
    }

    fn peak_rss(&self) -> Result<f64> {
        Ok(mib(ProcessUsage::of(self.pid()?)?.peak))
    }

    async fn histogram(&self, verb: &str) -> Result<Histogram> {
        let (_, metrics) = HttpClient::new().get(&format!("{}/metrics", self.url)).await?;
        Ok(Histogram::of(&String::from_utf8_lossy(&metrics), verb))
    }

    async fn stop(self) {
        self.scheduler.stop(Duration::from_secs(10)).await;
        self.api.shutdown().await;
    }
}

/// A client of the scheduler's bind verb.
#[derive(Clone)]
struct Binder {
    client: HttpClient,
    url: String,
}

impl Binder {
    /// Waits until the scheduler binds: after its start it waits for binds that a predecessor may have in flight.
    async fn until_ready(scheduler: &str) -> Result<Self> {
        let binder = Self {
            client: HttpClient::new(),
            url: format!("{scheduler}/gpushare-scheduler/bind"),
        };
        let question = ExtenderBindingArgs {
            pod_name: "missing".to_owned(),
            pod_namespace: fleet::NAMESPACE.to_owned(),
            pod_uid: "missing".to_owned(),
            node: "missing".to_owned(),
        };
        let binds = async || {
            // The pod does not exist, so that the answer is an error in any case; the wait is over once it is another one.
            let answer = binder.bind(&question).await;
            answer.is_err_and(|error| !error.to_string().contains("starting:"))
        };
        polling::until(
            Duration::from_secs(60),
            "the scheduler does not begin to bind",
            binds,
        )
        .await?;
        Ok(binder)
    }

    async fn bind(&self, bind: &ExtenderBindingArgs) -> Result<()> {
        let (status, answer) = self.client.post(&self.url, serde_json::to_vec(bind)?).await?;
        let answer: ExtenderBindingResult =
            serde_json::from_slice(&answer).with_context(|| format!("bind answers {status}"))?;
        // An extender reports failure with the status 200 and a text.
        ensure!(answer.error.is_empty(), "bind answers {}", answer.error);
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "amounts of memory are far below 2^52")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The given percentiles of durations, in milliseconds; the hundredth is the longest.
fn quantiles<const N: usize>(mut durations: Vec<Duration>, percents: [usize; N]) -> [f64; N] {
    durations.sort_unstable();
    let last = durations.len().saturating_sub(1);
    percents.map(|percent| {
        // Nearest rank without interpolation: a result is a latency that was really measured.
        let idx = (durations.len() * percent / 100).min(last);
        durations.get(idx).map_or(0.0, Duration::as_secs_f64) * 1000.0
    })
}

/// A cell of a table with three times, rounded to `decimals`.
fn times(values: [f64; 3], decimals: usize) -> String {
    values.map(|value| format!("{value:.decimals$}")).join(" ")
}

const DEADLINE: Duration = Duration::from_secs(180);

/// Asks for the deletion of pods of the namespace `default`, many at a time, and waits until they are gone.
async fn delete_all(cluster: &LocalCluster, names: &[String]) -> Result<()> {
    let pods = &NamespacePods::of(cluster.client(), "default");
    let deleted = stream::iter(names).map(|name| pods.delete(name));
    deleted.buffer_unordered(CONCURRENCY).try_collect::<()>().await?;
    let are_gone = |snapshot: &ClusterSnapshot| snapshot.has_none_of(names).then_some(());
    cluster.until("pods to be gone", DEADLINE, are_gone).await
}

/// Waits until each of these pods of the namespace `default` exists and meets the condition.
async fn until_all(
    cluster: &LocalCluster,
    names: &[String],
    what: &str,
    is_so: impl Fn(&Pod) -> bool,
) -> Result<()> {
    let all = |snapshot: &ClusterSnapshot| snapshot.has_all(names, &is_so).then_some(());
    cluster.until(&format!("all pods {what}"), DEADLINE, all).await
}

/// Creates the pods of these names on a node, whose kubelet holds them back until all are bound, so that the scheduler's pace
/// does not limit kubelet's, and then admits them in another order than they were bound in, as after a restart. Waits until all
/// have settled.
async fn start_together(
    cluster: &mut LocalCluster,
    node: &str,
    names: &[String],
    spec: impl Fn(&String) -> PodBuilder,
    seed: u64,
) -> Result<()> {
    cluster.node(node)?.kubelet().hold();
    let pods = &NamespacePods::of(cluster.client(), "default");
    let created =
        stream::iter(names.iter().map(spec)).map(|spec| async move { pods.create(&spec).await.map(drop) });
    created.buffer_unordered(CONCURRENCY).try_collect::<()>().await?;
    until_all(cluster, names, "to be bound", |pod| node_of(pod).is_some()).await?;
    let kubelet = cluster.node(node)?.kubelet();
    let has_all = |kubelet: &Kubelet| kubelet.counts().held == names.len();
    let failure = format!("pods do not reach the kubelet of {node}");
    kubelet.expect_until(DEADLINE, failure, has_all).await?;
    kubelet.release(OrderRule::Shuffled, seed);
    until_all(cluster, names, "to run", is_settled).await
}

fn is_settled(pod: &Pod) -> bool {
    is_running(pod) || phase(pod) == "Failed"
}

/// A sentence for each failed pod of a node.
fn failed_pods(snapshot: &ClusterSnapshot, node: &str) -> Vec<String> {
    let mut sentences = Vec::new();
    for (name, pod) in &snapshot.pods {
        if node_of(pod) == Some(node) && phase(pod) == "Failed" {
            let message = pod.status.as_ref().and_then(|status| status.message.as_ref());
            sentences.push(format!("{name} failed: {message:?}"));
        }
    }
    sentences
}

/// A sentence if a container sees other devices than its pod's record says.
fn wrong_devices(snapshot: &ClusterSnapshot, node: &str, container: &RuntimeContainer) -> Option<String> {
    let pod = snapshot.pod(&format!("{}/{}", container.namespace, container.pod))?;
    let should_see = invariants::should_see(pod, snapshot.devices.get(node), &container.name);
    let (pod, name, sees) = (&container.pod, &container.name, &container.gpus);
    (*sees != should_see).then(|| format!("{pod}/{name} sees {sees:?} and should see {should_see:?}"))
}
