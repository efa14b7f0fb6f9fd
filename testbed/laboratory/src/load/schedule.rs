//! `laboratory load schedule`: pods per second from creation to binding, by the kube-schedulers of a real control plane.
//!
//! It fills the cluster with nodes that are nothing but objects, then lets one scheduler after the other place the same
//! pods, round after round. It starts no process: the control plane's configuration decides which scheduler calls an
//! extender. It halts the processes named on the command line while it creates their pods.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use kube::Client;
use serde::Serialize;
use serde_json::{Value, json};

use super::fleet;
use super::requests::SHAPES;
use bindings::BindingWatch;
use fill::{LABEL, WAITING, path};
use halt::HaltedProcess;
use kit::cluster::client_of;
use kit::console::Console;
use kit::pods::{PodBuilder, set_in};
use objects::{Objects, each};

mod bindings;
mod fill;
mod halt;
mod objects;

/// Pods that each scheduler places before the measurement begins.
const WARM_UP: u32 = 100;

#[derive(Clone, Debug, Args)]
pub struct ScheduleArgs {
    /// The kubeconfig of a control plane without nodes, with leave to do anything there. Nothing may taint
    /// nodes that send no heartbeat: its kube-controller-manager, if it has one, runs with
    /// --controllers=*,-node-lifecycle-controller.
    #[arg(long, value_name = "FILE")]
    kubeconfig: PathBuf,
    /// Delete the objects of earlier runs, and do nothing else.
    #[arg(long)]
    clean: bool,
    /// Nodes of eight GPUs.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    nodes: u32,
    /// Pods that are bound already, each with half of a GPU; at most eight for each node.
    #[arg(long, default_value_t = 40_000, value_parser = clap::value_parser!(u32).range(0..=160_000))]
    pods: u32,
    /// Bytes of each Pod as it is sent to the API server, which adds its own.
    #[arg(long, default_value_t = 4096)]
    pod_bytes: usize,
    /// `schedulerName` of pods; the others are compared with the first.
    #[arg(long = "scheduler", value_name = "NAME", default_value = "default-scheduler")]
    schedulers: Vec<String>,
    /// Halt this scheduler's process while its pods are created, and measure from when it goes on: else the load measures how
    /// fast pods are created. The process is one of this machine.
    #[arg(long = "halt", value_name = "NAME=PID", value_parser = HaltedProcess::parse)]
    halts: Vec<HaltedProcess>,
    /// Pods that each scheduler places in a round.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    waiting: u32,
    /// The number of turns of each scheduler; every other round is in reverse order.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Seconds to wait before a turn, so that controllers and schedulers have nothing left to do.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(0..=600))]
    rest: u64,
}

/// The measurement of one scheduler in one round (pods created, bound and deleted), or the median over the rounds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Turn {
    scheduler: String,
    /// Counted from 1; `None` for a median over rounds.
    round: Option<u32>,
    pods: u32,
    /// The time until the last pod was created.
    created_seconds: f64,
    /// From the creation of the first pod, or from when the scheduler went on, to the last binding.
    seconds: f64,
    per_second: f64,
    /// `per_second` relative to the first scheduler's in the same round.
    ratio: f64,
}

/// Measures all turns and prints a table, or empties the cluster for `--clean`.
pub(super) async fn run(console: &Console, args: &ScheduleArgs) -> Result<bool> {
    for HaltedProcess { scheduler, .. } in &args.halts {
        ensure!(
            args.schedulers.contains(scheduler),
            "--halt names {scheduler:?}, which no --scheduler does"
        );
    }
    let client = client_of(&args.kubeconfig).await?;
    if args.clean {
        fill::clean(console, &Objects::of(&client)).await?;
        console.finish();
        return Ok(true);
    }
    let turns = schedule(console, &client, args).await?;
    let medians = args.schedulers.iter().filter_map(|name| median(&turns, name));
    let medians: Vec<Turn> = medians.collect();
    let heads = "SCHEDULER,ROUND,PODS,CREATED s,BOUND s,PODS/s,TO FIRST";
    let n_pods = args.n_pods();
    let values = json!({"nodes": args.nodes, "assigned": n_pods, "pod_bytes": args.pod_bytes, "turns": turns, "medians": medians});
    console.report(
        heads.split(','),
        turns.iter().chain(&medians).map(Turn::row),
        &values,
    );
    Ok(true)
}

impl Turn {
    fn row(&self) -> [String; 7] {
        [
            self.scheduler.clone(),
            self.round.map_or("median".to_owned(), |round| round.to_string()),
            self.pods.to_string(),
            format!("{:.2}", self.created_seconds),
            format!("{:.2}", self.seconds),
            format!("{:.0}", self.per_second),
            format!("{:.2}", self.ratio),
        ]
    }
}

impl ScheduleArgs {
    fn n_pods(&self) -> u32 {
        self.pods.min(self.nodes * fleet::MOST_PODS)
    }
}

/// Fills the cluster if need be, then measures all turns.
async fn schedule(console: &Console, client: &Client, args: &ScheduleArgs) -> Result<Vec<Turn>> {
    console.step(&format!("making {} nodes and {} pods", args.nodes, args.n_pods()));
    let objects = Objects::of(client);
    fill::fill(console, &objects, args).await?;
    let mut stage = TurnContext {
        console,
        args,
        bindings: BindingWatch::watch(client).await?,
        objects,
    };
    stage.empty().await?;
    for scheduler in &args.schedulers {
        // The first pods pay for connections and caches.
        stage.turn(scheduler, 0, WARM_UP.min(args.waiting)).await?;
    }
    let mut turns = Vec::new();
    for round in 1..=args.rounds {
        let mut schedulers: Vec<&String> = args.schedulers.iter().collect();
        // The machine may get slower or the cluster fuller over time: each scheduler is as often first as last.
        if round % 2 == 0 {
            schedulers.reverse();
        }
        for scheduler in schedulers {
            turns.push(stage.turn(scheduler, round, args.waiting).await?);
        }
    }
    compare(&mut turns, args.schedulers.first().map_or("", String::as_str));
    Ok(turns)
}

/// The arguments, clients and watch that all turns of the compared schedulers share.
struct TurnContext<'a> {
    console: &'a Console,
    args: &'a ScheduleArgs,
    objects: Objects,
    bindings: BindingWatch,
}

impl TurnContext<'_> {
    /// Creates pods as fast as possible, waits until all are bound, and deletes them.
    async fn turn(&mut self, scheduler: &str, round: u32, n_pods: u32) -> Result<Turn> {
        tokio::time::sleep(Duration::from_secs(self.args.rest)).await;
        self.console
            .step(&format!("round {round}: {n_pods} pods for {scheduler}"));
        self.bindings.forget();
        let mut waiting = Vec::new();
        for idx in 0..n_pods {
            waiting.push(waiting_pod(scheduler, round, idx, self.args)?);
        }
        let (objects, pods) = (&self.objects, &path("pods"));
        let mut halts = self.args.halts.iter();
        let process = halts.find(|process| process.scheduler == scheduler);
        let halted = process.map(HaltedProcess::halt).transpose()?;
        // A scheduler that is not halted places pods while others are created: its time includes the creation.
        let mut began = Instant::now();
        let create = |pod| async move { objects.create(pods, &pod).await };
        each(self.console, "creating pods", waiting, create).await?;
        let created_seconds = began.elapsed().as_secs_f64();
        if let Some(halted) = halted {
            began = Instant::now();
            drop(halted);
        }
        let bound = self.bindings.until_bound(n_pods as usize).await;
        bound.with_context(|| format!("pods of scheduler {scheduler}"))?;
        let last = self.bindings.last_bound();
        let seconds = last.map_or(0.0, |last| last.saturating_duration_since(began).as_secs_f64());
        self.empty().await?;
        Ok(Turn {
            scheduler: scheduler.to_owned(),
            round: Some(round),
            pods: n_pods,
            created_seconds,
            seconds,
            per_second: f64::from(n_pods) / seconds,
            ratio: 1.0,
        })
    }

    async fn empty(&mut self) -> Result<()> {
        let pods = path("pods");
        let names = self.objects.names(&pods, &format!("{LABEL}={WAITING}")).await?;
        self.objects.delete_all(self.console, &pods, names).await?;
        self.bindings.until_gone().await
    }
}

fn waiting_pod(scheduler: &str, round: u32, idx: u32, args: &ScheduleArgs) -> Result<Value> {
    let shape = SHAPES
        .get(idx as usize % SHAPES.len())
        .context("there is no shape")?;
    let name = format!("{scheduler}-{round}-{idx:06}");
    let pod = PodBuilder::new(&name, shape).scheduler(scheduler).pod()?;
    let mut pod = fill::of_load(serde_json::to_value(pod)?, WAITING);
    let padding = "x".repeat(args.pod_bytes.saturating_sub(pod.to_string().len() + 50));
    set_in(
        &mut pod,
        "metadata",
        "annotations",
        json!({"example.com/padding": padding}),
    );
    Ok(pod)
}

/// Sets the ratio of each turn to the turn of the first scheduler in the same round.
fn compare(turns: &mut [Turn], first: &str) {
    let firsts: Vec<Turn> = turns
        .iter()
        .filter(|turn| turn.scheduler == first)
        .cloned()
        .collect();
    for turn in turns {
        if let Some(first) = firsts.iter().find(|first| first.round == turn.round) {
            turn.ratio = turn.per_second / first.per_second;
        }
    }
}

/// The medians of a scheduler's turns, each column by itself.
fn median(turns: &[Turn], scheduler: &str) -> Option<Turn> {
    let turns: Vec<&Turn> = turns.iter().filter(|turn| turn.scheduler == scheduler).collect();
    let middle = |column: fn(&Turn) -> f64| {
        let mut values: Vec<f64> = turns.iter().map(|turn| column(turn)).collect();
        values.sort_by(f64::total_cmp);
        let at = |idx: usize| values.get(idx).copied().unwrap_or(0.0);
        f64::midpoint(at(values.len().saturating_sub(1) / 2), at(values.len() / 2))
    };
    turns.first().map(|first| Turn {
        scheduler: scheduler.to_owned(),
        round: None,
        pods: first.pods,
        created_seconds: middle(|turn| turn.created_seconds),
        seconds: middle(|turn| turn.seconds),
        per_second: middle(|turn| turn.per_second),
        ratio: middle(|turn| turn.ratio),
    })
}

#[cfg(test)]
mod tests;
