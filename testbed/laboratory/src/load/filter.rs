//! `laboratory load filter`: latency of the scheduler's filter by size of cluster and of request, beside a server that does
//! nothing.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use tokio::task::block_in_place;

use super::background::Background;
use super::baseline::{Baseline, STEPS};
use super::kept_connection::{KeptConnection, wire};
use super::requests::{PreparedRequests, ensure_placed};
use super::throughput::Throughput;
use super::{Binder, PERCENTS, Rig, churn, empty_api_server, fleet, growth, preemptors, quantiles, viewers};
use crate::replay::portion::float;
use kit::console::Console;

/// Requests before the first that is measured.
const WARM_UP: u32 = 50;

/// Different requests that each caller sends in turn: all pairs of ten samples of nodes and four kinds of pods.
const N_DIFFERENT: usize = 40;

/// `--hint-ttl`: how long the scheduler keeps room for a pod after filter; about the time until kube-scheduler
/// binds. Pods of this load are never bound.
pub(super) const HINT: &str = "20ms";

#[derive(Clone, Debug, Args)]
pub struct FilterArgs {
    /// Nodes of eight GPUs; several numbers, such as 500,5000, are measured one after the other.
    #[arg(long, value_delimiter = ',', default_value = "5000", value_parser = clap::value_parser!(u32).range(1..=20_000))]
    nodes: Vec<u32>,
    /// Pods that are bound already, each with half of a GPU; no more than eight for each node.
    #[arg(long, default_value_t = 160_000, value_parser = clap::value_parser!(u32).range(0..=200_000))]
    pods: u32,
    /// Bytes of each Pod object, bound or asked about.
    #[arg(long, default_value_t = 4096)]
    pod_bytes: usize,
    /// Names in one request; no more than there are nodes.
    #[arg(long, value_delimiter = ',', default_value = "500,5000,15000", value_parser = clap::value_parser!(u32).range(1..=20_000))]
    names: Vec<u32>,
    /// Binds that go on meanwhile.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=20_000))]
    binds_per_second: u32,
    /// Clients that view all nodes meanwhile (`inspect`), one answer after the other.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=64))]
    views: u32,
    /// Refused pods of high priority that ask meanwhile, each about all nodes every 10 s. Needs eight pods for each node.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1000))]
    preemptors: u32,
    /// The scheduler's --make-room, 1 s after a refusal.
    #[arg(long, default_value = "off")]
    make_room: String,
    /// The number of requests for each number of names.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    requests: u32,
    /// Callers that ask at the same time, after the latencies are measured; several numbers, such as 1,2,4, one after the other.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=9))]
    callers: Vec<u32>,
    /// Draw into this directory how latency, memory and start grow, an SVG file each: over the names in a request to the
    /// largest cluster, and over the nodes. Needs several of `--names` or `--nodes`.
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct FilterMeasurement {
    pub(super) nodes: u32,
    pub(super) pods: u32,
    pub(super) names: u32,
    pub(super) request_bytes: usize,
    pub(super) answer_bytes: usize,
    pub(super) ready_seconds: f64,
    /// Resident memory of the scheduler when it was ready, at the end, and the most in between.
    pub(super) rss_mib: [f64; 3],
    /// Latency at the client, in milliseconds: median, 90th and 99th percentile, longest.
    pub(super) millis: [f64; 4],
    /// The same latencies of a server that reads the request and answers at once.
    pub(super) floor_millis: [f64; 4],
    /// The medians of servers that also parse the request, and also look each name up.
    pub(super) step_millis: [f64; 2],
    /// Latency in the daemon's own histogram, from the whole request to its answer: median and 99th percentile.
    pub(super) daemon_millis: [f64; 2],
    pub(super) binds_per_second: f64,
    pub(super) failed_binds: u64,
    pub(super) views_per_second: f64,
    pub(super) view_mib: f64,
    pub(super) throughput: Vec<Throughput>,
}

/// Measures each cluster, prints a table, and draws the plots if they are asked for.
pub(super) async fn run(console: &Console, args: &FilterArgs) -> Result<bool> {
    ensure!(
        args.plots.is_none() || args.nodes.len() + args.names.len() > 2,
        "--plots needs several of --names or --nodes"
    );
    let mut measured = Vec::new();
    for n_nodes in &args.nodes {
        measured.extend(cluster(console, args, *n_nodes).await?);
    }
    let heads = "NODES,PODS,NAMES,KiB,P50 ms,P90 ms,P99 ms,MAX ms,FLOOR P50,RATIO,PARSE; LOOK UP,DAEMON P50,DAEMON P99,BINDS/s,VIEWS/s,READY s,RSS MiB,CALLERS: FILTERS/s (OF FLOOR)";
    console.report(
        heads.split(','),
        measured.iter().map(FilterMeasurement::row),
        &measured,
    );
    if let Some(dir) = &args.plots {
        crate::plot::write(dir, &growth::plots(&measured)?, console)?;
    }
    Ok(true)
}

impl FilterMeasurement {
    fn row(&self) -> [String; 18] {
        let millis = |millis: f64| format!("{millis:.3}");
        let [p50, p90, p99, max] = self.millis;
        let [floor, ..] = self.floor_millis;
        let [daemon_p50, daemon_p99] = self.daemon_millis;
        let binds = format!(
            "{:.0}{}",
            self.binds_per_second,
            if self.failed_binds > 0 { " (some fail)" } else { "" }
        );
        [
            self.nodes.to_string(),
            self.pods.to_string(),
            self.names.to_string(),
            format!("{:.0}", float(self.request_bytes) / 1024.0),
            millis(p50),
            millis(p90),
            millis(p99),
            millis(max),
            millis(floor),
            format!("{:.2}", p50 / floor),
            self.step_millis.map(millis).join("; "),
            millis(daemon_p50),
            millis(daemon_p99),
            binds,
            format!("{:.1}", self.views_per_second),
            format!("{:.2}", self.ready_seconds),
            self.rss_mib.map(|mib| format!("{mib:.0}")).join(" > "),
            self.throughput
                .iter()
                .map(Throughput::cell)
                .collect::<Vec<_>>()
                .join(", "),
        ]
    }
}

async fn cluster(console: &Console, args: &FilterArgs, n_nodes: u32) -> Result<Vec<FilterMeasurement>> {
    let n_pods = args.pods.min(n_nodes * fleet::MOST_PODS);
    console.step(&format!("making {n_nodes} nodes and {n_pods} pods"));
    let (api, dir) = empty_api_server().await?;
    fleet::fill(api.objects(), n_nodes, n_pods, args.pod_bytes)?;
    let preemptors = if args.preemptors > 0 {
        preemptors::create(api.objects(), n_nodes, args.preemptors)?
    } else {
        Vec::new()
    };
    console.step("starting the scheduler");
    let make_room = ["--make-room", &args.make_room, "--make-room-after", "1s"];
    let flags = [&["--hint-ttl", HINT], &make_room[..]].concat();
    let rig = Rig::with_scheduler(api, dir, &flags).await?;
    let rss = rig.rss()?;
    let floor = Baseline::start(n_nodes).await?;
    let mut binds = None;
    if args.binds_per_second > 0 {
        let binder = Binder::until_ready(&rig.url).await?;
        binds = Some(churn::start(
            rig.api.objects(),
            &binder,
            n_nodes,
            args.binds_per_second,
        ));
    }
    let preemptors = (!preemptors.is_empty()).then(|| preemptors::start(preemptors, &rig.url, n_nodes));
    let views = (args.views > 0).then(|| viewers::start(rig.address, args.views));
    let mut sizes: Vec<u32> = args.names.iter().map(|n_names| *n_names.min(&n_nodes)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let mut measured = Vec::new();
    // One client for all sizes: a pod that asks again is answered with all nodes.
    let mut client = Client {
        requests: PreparedRequests::new((0..n_nodes).map(fleet::node_name), args.pod_bytes)?,
        scheduler: KeptConnection::to(rig.address)?,
        floor: KeptConnection::to(floor.address)?,
        addresses: [rig.address, floor.address],
    };
    // The scheduler computes a verdict once for each node and kind of pod; in a running cluster it has seen the kinds.
    client.ask(n_nodes, WARM_UP)?;
    for n_names in sizes {
        console.step(&format!("{} requests of {n_names} names", args.requests));
        client.ask(n_names, WARM_UP)?;
        // The histogram counts from the start of the scheduler; the difference leaves out the warm-up.
        let before = rig.histogram("filter").await?;
        let asked = client.ask(n_names, args.requests)?;
        let daemon = rig.histogram("filter").await?.since(&before);
        let [read, parse, look_up] = asked.floor;
        let ([parse], [look_up]) = (quantiles(parse, [50]), quantiles(look_up, [50]));
        let binds_per_second = binds.as_ref().map_or(0.0, Background::per_second);
        let failed_binds = binds.as_ref().map_or(0, Background::n_failed);
        let views_per_second = views.as_ref().map_or(0.0, Background::per_second);
        let view_mib = views.as_ref().map_or(0.0, Background::mib_of_answer);
        let mut throughput = Vec::new();
        for callers in &args.callers {
            throughput.push(client.measure(n_names, *callers, args.requests)?);
        }
        measured.push(FilterMeasurement {
            nodes: n_nodes,
            pods: n_pods,
            names: n_names,
            request_bytes: asked.request_bytes,
            answer_bytes: asked.answer_bytes,
            ready_seconds: rig.ready.as_secs_f64(),
            rss_mib: [rss, rig.rss()?, rig.peak_rss()?],
            millis: quantiles(asked.latencies, PERCENTS),
            floor_millis: quantiles(read, PERCENTS),
            step_millis: [parse, look_up],
            daemon_millis: [daemon.millis(50.0), daemon.millis(99.0)],
            binds_per_second,
            failed_binds,
            views_per_second,
            view_mib,
            throughput,
        });
    }
    drop((binds, views, preemptors));
    rig.stop().await;
    Ok(measured)
}

/// The latencies of requests to the scheduler and to the baseline, and the sizes of the last request and answer.
#[derive(Default)]
struct FilterAnswers {
    latencies: Vec<Duration>,
    /// By step of the baseline server.
    floor: [Vec<Duration>; STEPS.len()],
    request_bytes: usize,
    answer_bytes: usize,
}

/// The requests, and the connections on which they go to the scheduler and to the baseline.
struct Client {
    requests: PreparedRequests,
    scheduler: KeptConnection,
    floor: KeptConnection,
    /// Of the scheduler and of the floor.
    addresses: [SocketAddr; 2],
}

impl Client {
    /// Measures requests of `n_names` names each.
    fn ask(&mut self, n_names: u32, n_requests: u32) -> Result<FilterAnswers> {
        // A blocking client: an async one would add its own scheduling to every latency.
        block_in_place(|| self.ask_blocking(n_names, n_requests))
    }

    fn measure(&mut self, n_names: u32, callers: u32, n_requests: u32) -> Result<Throughput> {
        let (mut wires, mut idle) = (Vec::new(), Vec::new());
        for _ in 0..N_DIFFERENT {
            let request = self.requests.next(n_names as usize)?;
            idle.push(wire("/", body_of(&request)?));
            wires.push(request);
        }
        let [scheduler, floor] = self.addresses;
        block_in_place(|| Throughput::measure((scheduler, &wires), (floor, &idle), callers, n_requests))
    }

    /// Calls the scheduler and the server that does nothing in turn, so that other load on the machine slows both alike.
    fn ask_blocking(&mut self, n_names: u32, n_requests: u32) -> Result<FilterAnswers> {
        let mut asked = FilterAnswers::default();
        for _ in 0..n_requests {
            let request = self.requests.next(n_names as usize)?;
            let body = body_of(&request)?;
            // Scheduler and baseline server get the same bytes, so that reading the request costs both alike.
            for (path, times) in STEPS.iter().zip(&mut asked.floor) {
                let idle = wire(path, body);
                let began = Instant::now();
                self.floor.ask(&idle)?;
                times.push(began.elapsed());
            }
            let began = Instant::now();
            let answer = self.scheduler.ask(&request)?;
            asked.latencies.push(began.elapsed());
            ensure_placed(answer)?;
            let n_returned = answer.windows(5).filter(|name| name == b"node-").count();
            ensure!(
                n_returned == 1,
                "a pod that asks for the first time is answered with {n_returned} nodes"
            );
            (asked.request_bytes, asked.answer_bytes) = (body.len(), answer.len());
        }
        Ok(asked)
    }
}

fn body_of(request: &[u8]) -> Result<&[u8]> {
    let end_of_head = request.windows(4).position(|end| end == b"\r\n\r\n");
    end_of_head
        .and_then(|at| request.get(at + 4..))
        .context("no body")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Parsed {
        #[command(flatten)]
        args: FilterArgs,
    }

    /// The measuring itself, small: every answer is checked by the load.
    #[tokio::test(flavor = "multi_thread")]
    async fn filter_latency_is_measured_beside_binds_and_a_floor() {
        let text = "filter --nodes 20 --pods 80 --pod-bytes 1024 --names 5,500 --binds-per-second 50 --views 2 --requests 50 --callers 1,3";
        let args = Parsed::try_parse_from(text.split(' ')).unwrap().args;
        let measured = cluster(&Console::new(true), &args, 20).await.unwrap();
        assert_eq!(measured.iter().map(|one| one.names).collect::<Vec<_>>(), [5, 20]);
        for one in measured {
            assert!(
                one.millis[0] > 0.0 && one.floor_millis[0] > 0.0 && one.daemon_millis[0] > 0.0,
                "{one:?}"
            );
            assert!(
                one.daemon_millis[0] < one.millis[3] && one.rss_mib[0] > 1.0,
                "{one:?}"
            );
            // On a busy machine some binds come too late for the scheduler.
            assert!(one.binds_per_second > 0.0, "{one:?}");
            assert!(one.views_per_second > 0.0 && one.view_mib > 0.01, "{one:?}");
            let callers: Vec<u32> = one.throughput.iter().map(|of| of.callers).collect();
            assert_eq!(callers, [1, 3]);
            let is_measured = |of: &Throughput| of.per_second > 0.0 && of.floor_per_second > 0.0;
            assert!(one.throughput.iter().all(is_measured), "{one:?}");
        }
    }
}
