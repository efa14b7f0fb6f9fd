//! `laboratory load bind`: pods per second that the scheduler binds, over time, and their cost, beside the bindings that
//! the testbed's API server takes without any other load.

use std::fmt::Display;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use futures::stream::{self, StreamExt, TryStreamExt};
use proto::extender::ExtenderBindingArgs;
use serde::Serialize;
use serde_json::json;

use super::{Binder, CONCURRENCY, PERCENTS, Rig, empty_api_server, fleet, quantiles};
use crate::replay::portion::float;
use kit::console::Console;
use kit::http_client::HttpClient;

/// Clock ticks per second in `/proc/PID/stat` (`USER_HZ`): 100 on all common platforms.
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Clone, Debug, Args)]
pub struct BindArgs {
    /// Nodes of eight GPUs.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    nodes: u32,
    /// Pods to bind.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pods: u32,
}

#[derive(Clone, Debug, Serialize)]
struct BindMeasurement {
    nodes: u32,
    pods: u32,
    ready_seconds: f64,
    /// Of the scheduler once it knew all pods, and at the end.
    rss_mib: [f64; 2],
    /// Latency in milliseconds: median, 90th and 99th percentile, longest.
    millis: [f64; 4],
    per_second: f64,
    each_second: Vec<u32>,
    /// Processor time for each bind: of the scheduler, and of the testbed (API server and client).
    cpu_micros: [f64; 2],
    /// Bindings per second that the API server accepts from a client that posts them itself, without any watch:
    /// no scheduler can be faster.
    floor_per_second: f64,
}

pub(super) async fn run(console: &Console, args: &BindArgs) -> Result<bool> {
    let bound = bind(console, args).await?;
    let heads = "NODES,PODS,READY s,RSS MiB,P50 ms,P90 ms,P99 ms,MAX ms,BINDS/s,SLOWEST/s,CPU us/bind,TESTBED us/bind,FLOOR/s";
    console.report(heads.split(','), [bound.row()], &bound);
    Ok(true)
}

impl BindMeasurement {
    fn row(&self) -> [String; 13] {
        let slowest = self.each_second.iter().min().map(u32::to_string);
        let [p50, p90, p99, longest] = self.millis.map(|millis| format!("{millis:.2}"));
        let [scheduler, testbed] = self.cpu_micros.map(|micros| format!("{micros:.0}"));
        [
            self.nodes.to_string(),
            self.pods.to_string(),
            format!("{:.2}", self.ready_seconds),
            self.rss_mib.map(|mib| format!("{mib:.0}")).join(" > "),
            p50,
            p90,
            p99,
            longest,
            format!("{:.0}", self.per_second),
            slowest.unwrap_or("-".to_owned()),
            scheduler,
            testbed,
            format!("{:.0}", self.floor_per_second),
        ]
    }
}

/// Measures the bindings without a scheduler, then starts one and sends it all binds.
async fn bind(console: &Console, args: &BindArgs) -> Result<BindMeasurement> {
    console.step(&format!("{} bindings without a scheduler", args.pods));
    let floor_per_second = floor(args).await?;
    console.step(&format!("making {} nodes and {} pods", args.nodes, args.pods));
    let (api, dir) = empty_api_server().await?;
    fleet::fill(api.objects(), args.nodes, 0, 0)?;
    let pending = fleet::pending(api.objects(), args.nodes, args.pods)?;
    console.step("starting the scheduler");
    let rig = Rig::with_scheduler(api, dir, &[]).await?;
    let binder = Binder::until_ready(&rig.url).await?;
    let rss = rig.rss()?;
    let scheduler = rig.pid()?;
    // Processor time is read after the start of the scheduler, which must not count as a cost of the binds.
    let before = [cpu_seconds(&scheduler)?, cpu_seconds(&"self")?];
    console.step(&format!("{} bindings, {CONCURRENCY} at a time", args.pods));
    let done = Done::of(pending.iter().map(|bind| binder.bind(bind))).await?;
    let after = [cpu_seconds(&scheduler)?, cpu_seconds(&"self")?];
    let bound = BindMeasurement {
        nodes: args.nodes,
        pods: args.pods,
        ready_seconds: rig.ready.as_secs_f64(),
        rss_mib: [rss, rig.rss()?],
        per_second: done.per_second(),
        each_second: done.each_second(),
        millis: quantiles(done.latencies, PERCENTS),
        cpu_micros: [after[0] - before[0], after[1] - before[1]].map(|cpu| cpu * 1e6 / f64::from(args.pods)),
        floor_per_second,
    };
    rig.stop().await;
    Ok(bound)
}

/// Measures the bindings per second of an API server that has nothing else to do.
async fn floor(args: &BindArgs) -> Result<f64> {
    let (api, _dir) = empty_api_server().await?;
    fleet::fill(api.objects(), args.nodes, 0, 0)?;
    let client = HttpClient::new();
    let pods = format!("{}/api/v1/namespaces/{}/pods", api.url(), fleet::NAMESPACE);
    let pending = fleet::pending(api.objects(), args.nodes, args.pods)?;
    let done = Done::of(pending.iter().map(|bind| post_binding(&client, &pods, bind))).await?;
    api.shutdown().await;
    Ok(done.per_second())
}

/// Writes the Binding that the scheduler would write for a request.
async fn post_binding(client: &HttpClient, pods: &str, bind: &ExtenderBindingArgs) -> Result<()> {
    // Every pod gets GPU 0, as the API server does not count amounts.
    let annotations = fleet::record(&bind.node, 0, 1, 0);
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding",
        "metadata": {"name": bind.pod_name, "namespace": bind.pod_namespace, "uid": bind.pod_uid, "annotations": annotations},
        "target": {"apiVersion": "v1", "kind": "Node", "name": bind.node},
    });
    let url = format!("{pods}/{}/binding", bind.pod_name);
    let (status, answer) = client.post(&url, binding.to_string()).await?;
    let answer = String::from_utf8_lossy(&answer);
    ensure!(status.is_success(), "the API server answers {status}: {answer}");
    Ok(())
}

/// The times of requests, all of them answered.
#[derive(Debug)]
struct Done {
    latencies: Vec<Duration>,
    /// The time of each answer since the first request.
    at: Vec<Duration>,
    took: Duration,
}

impl Done {
    /// Sends the requests, [`CONCURRENCY`] at a time; the first failure ends it.
    async fn of<F: Future<Output = Result<()>>>(requests: impl Iterator<Item = F>) -> Result<Self> {
        let began = Instant::now();
        let timed = requests.map(|request| async move {
            let asked = Instant::now();
            request.await?;
            anyhow::Ok((asked.elapsed(), began.elapsed()))
        });
        let answers = stream::iter(timed).buffer_unordered(CONCURRENCY);
        let (latencies, at) = answers.try_collect().await?;
        Ok(Self {
            latencies,
            at,
            took: began.elapsed(),
        })
    }

    fn per_second(&self) -> f64 {
        float(self.at.len()) / self.took.as_secs_f64()
    }

    /// The number of answers in each full second: the last one, which is none, would look slow.
    fn each_second(&self) -> Vec<u32> {
        let mut counts = vec![0; usize::try_from(self.took.as_secs()).unwrap_or(0)];
        for at in &self.at {
            let second = usize::try_from(at.as_secs()).ok();
            if let Some(count) = second.and_then(|second| counts.get_mut(second)) {
                *count += 1;
            }
        }
        counts
    }
}

fn cpu_seconds(process: &impl Display) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).context("cannot read /proc")?;
    cpu_seconds_of(&stat)
}

/// The seconds in user and kernel mode from the line in `/proc/PID/stat`.
fn cpu_seconds_of(stat: &str) -> Result<f64> {
    // The name of the program is in parentheses, and may contain parentheses itself.
    let (_, fields) = stat.rsplit_once(')').context("/proc shows no processor time")?;
    let mut ticks = 0.0;
    for field in fields.split_whitespace().skip(11).take(2) {
        ticks += field.parse::<f64>()?;
    }
    Ok(ticks / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The measuring itself, small: every answer is checked by the load.
    #[tokio::test(flavor = "multi_thread")]
    async fn bind_throughput_is_measured() {
        let bound = bind(&Console::new(true), &BindArgs { nodes: 4, pods: 64 })
            .await
            .unwrap();
        assert!(
            bound.per_second > 0.0 && bound.floor_per_second > 0.0,
            "{bound:?}"
        );
        assert!(bound.millis[0] > 0.0 && bound.cpu_micros[1] > 0.0, "{bound:?}");
    }

    #[test]
    fn the_slowest_second_is_a_whole_one() {
        let at = [100, 900, 1100, 2000, 2100, 2200, 3000].map(Duration::from_millis);
        let done = Done {
            latencies: Vec::new(),
            at: at.to_vec(),
            took: Duration::from_millis(3010),
        };
        assert_eq!(done.each_second(), [2, 1, 3]);
        assert!(
            Done {
                latencies: Vec::new(),
                at: at[..2].to_vec(),
                took: Duration::from_millis(900)
            }
            .each_second()
            .is_empty()
        );
    }

    #[test]
    fn processor_time_is_read_from_proc_stat() {
        let stat = "42 (a (b) c) S 1 42 42 0 -1 4194304 100 0 0 0 250 50 7 7 20 0 5 0 100 1000 10\n";
        assert!((cpu_seconds_of(stat).unwrap() - 3.0).abs() < 1e-9);
        assert!(cpu_seconds_of("nothing").is_err());
    }
}
