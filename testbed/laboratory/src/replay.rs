//! `laboratory replay`: places the pods of a trace one by one by several policies, and compares the allocated GPUs.
//!
//! The scheduler's own policies run the code of its filter and bind verbs; kube-scheduler's part is played by the
//! testbed's model of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use clap::Args;
use proto::read_api::MAX_PLANNED_MOVES;
use scheduler::config::AnswerNodes;
use tokio::runtime::Handle;

use conditions::{NamedConditions, Overrides, RunConditions};
use fragment::{TypicalPod, typical_pods};
use kit::console::Console;
use parallel::in_parallel;
use plot::PlottedValue;
use policy::{Policy, Reference};
use queue::Evictions;
use run::{Job, RunResult};
use summary::Summary;
use world::ReplayInput;

pub mod arrivals;
pub mod conditions;
pub mod curve;
pub mod engine;
pub mod fragment;
pub mod join;
pub mod live;
pub mod objects;
pub mod occupancy;
pub mod parallel;
pub mod plot;
pub mod policy;
pub mod portion;
pub mod queue;
pub mod reference;
pub mod run;
pub mod seen;
pub mod summary;
pub mod trace;
pub mod world;

/// The end of `--help`.
const EXAMPLES: &str = "\
Examples:
  Compare the default policy with others on a trace, ten runs each, and draw plots:
    laboratory replay --nodes nodes.csv --pods pods.csv --policy fill,binpack,fgd,kube-default --plots plots
  What would another policy have made of my cluster?
    laboratory replay --kubeconfig ~/.kube/config --policy fill,spread --condition S
  How many of these pods would my cluster take besides those it has?
    laboratory replay --kubeconfig ~/.kube/config --arrivals pods.csv --tune 0

The table: OFFERED, ALLOC and FRAG are percents of all GPUs at the end: asked for, allocated, and idle where typical pods
cannot use them; ALLOC@100 and the like are on the way there. UNPLACED pods fitted nowhere. BY SAMPLE are refusals of a sample
while another node had room; MISSED pods stayed unplaced so. docs/replay.md explains it.";

/// `laboratory replay`.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ReplayArgs {
    /// Nodes of the trace, a CSV file with the columns `sn,cpu_milli,memory_mib,gpu,model`.
    #[arg(long, value_name = "CSV", required_unless_present = "kubeconfig")]
    nodes: Option<PathBuf>,
    /// Your own cluster in place of a trace's nodes: its nodes, Device objects and pods are listed, and nothing is written.
    /// With --pods these come on top of its own pods; without, the cluster's own pods are placed again, oldest first.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["nodes", "departures"])]
    kubeconfig: Option<PathBuf>,
    /// Pods of the trace, a CSV file with the columns `name,cpu_milli,memory_mib,num_gpu,gpu_milli`, and
    /// `gpu_spec,creation_time,deletion_time` if it has them; repeat it for several lists.
    #[arg(
        long,
        visible_alias = "arrivals",
        value_name = "CSV",
        required_unless_present = "kubeconfig"
    )]
    pods: Vec<PathBuf>,
    /// Policies to compare: the scheduler's own as NODE or NODE/DEVICE, such as fill or spread/binpack; or kube-default, fgd,
    /// best-fit, fullest, random.
    #[arg(long, value_delimiter = ',', default_values_t = [Policy::default(), Policy::Reference(Reference::KubeDefault)])]
    policy: Vec<Policy>,
    /// Conditions: P, A and S, explained in docs/replay.md.
    #[arg(
        long,
        value_delimiter = ',',
        value_enum,
        ignore_case = true,
        default_value = "A,S"
    )]
    condition: Vec<NamedConditions>,
    /// One run for each of these seeds, such as 42-51 or 1,2,3.
    #[arg(long, default_value = "42-51", value_parser = seeds)]
    seeds: Seeds,
    /// Copy random pods, or leave some out, until they ask for this part of all GPUs; 0 takes the list as it is.
    #[arg(long, default_value_t = 1.3, value_parser = factor)]
    tune: f64,
    #[command(flatten)]
    overrides: Overrides,
    /// The number of fitting nodes in the extender's answer, 1 to 11 or all, as for the scheduler's flag.
    #[arg(long, default_value = "1")]
    answer_nodes: AnswerNodes,
    /// Let pods come and go at their `creation_time` and `deletion_time`; offered is then the demand at the time.
    #[arg(long)]
    departures: bool,
    /// With --departures, multiply the life of pods by this factor, so that more of them are there together.
    #[arg(long, default_value_t = 1.0, value_parser = factor, requires = "departures")]
    stretch: f64,
    /// With --departures, let pods wait that fit nowhere, a tenth of all pods at a high priority, and by these evictions for them.
    #[arg(long, value_enum, requires = "departures")]
    evictions: Option<Evictions>,
    /// With --departures, plan to join free memory by at most so many moves, such as 1,5,20, once 95 % are allocated.
    #[arg(long, value_name = "MOVES", value_delimiter = ',', requires = "departures", value_parser = moves)]
    join: Vec<usize>,
    /// Check every invariant of the engine after this number of placements, and at the end.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    check_every: u32,
    /// Runs at one time; as many as there are processors by default.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
    /// Draw plots into this directory, three SVG files for each list of pods.
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Print the results as JSON, curves and single runs included.
    #[arg(long)]
    json: bool,
}

/// Seeds of runs; a type of its own, as clap takes a `Vec` for an option with one value for each element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seeds(Vec<u64>);

impl Seeds {
    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.0.iter().copied()
    }
}

/// Parses seeds such as 42-51 or 1,2,3.
///
/// # Errors
/// A part that is not a number.
pub fn seeds(text: &str) -> Result<Seeds, String> {
    let number = |text: &str| {
        text.trim()
            .parse::<u64>()
            .map_err(|_| format!("{text:?} is no seed: write numbers such as 1,2,3 or 42-51"))
    };
    let mut seeds = Vec::new();
    for part in text.split(',') {
        match part.split_once('-') {
            // Without a limit, a mistyped range would fill the memory.
            Some((first, last)) => seeds.extend((number(first)?..=number(last)?).take(10_000)),
            None => seeds.push(number(part)?),
        }
    }
    if seeds.is_empty() {
        Err("no seed is given".to_owned())
    } else {
        Ok(Seeds(seeds))
    }
}

/// Parses a factor, at most so large that demands and times still fit an integer.
fn factor(text: &str) -> Result<f64, String> {
    let factor = text.parse().ok().filter(|factor| (0.0..=1e4).contains(factor));
    factor.ok_or_else(|| "write a number from 0 to 10000, such as 1.3".to_owned())
}

/// Parses the most moves of a plan.
fn moves(text: &str) -> Result<usize, String> {
    let moves = text
        .parse()
        .ok()
        .filter(|moves| (1..=MAX_PLANNED_MOVES).contains(moves));
    moves.ok_or_else(|| format!("write a number from 1 to {MAX_PLANNED_MOVES}"))
}

/// A list of pods and the nodes that they are placed on (`world`), with the list's commonest kinds of pods (`typical`).
struct PodList {
    name: String,
    world: ReplayInput,
    typical: Vec<TypicalPod>,
}

/// Runs and prints the replay; always true, as a violated invariant is an error.
pub async fn run(args: ReplayArgs) -> Result<bool> {
    let console = Console::new(args.json);
    console.step("reading the trace");
    let lists = read(&args).await?;
    let conditions: Vec<RunConditions> = args
        .condition
        .iter()
        .map(|named| RunConditions::of(*named, args.overrides))
        .collect();
    let (plots, joins, waits) = (args.plots.clone(), args.join.clone(), args.evictions.is_some());
    let plan = ReplayPlan {
        lists,
        conditions,
        console: console.clone(),
        args,
    };
    let summaries = replay(plan).await;
    console.finish();
    let summaries = summaries?;
    console.result(&summary::render(&summaries));
    if waits {
        console.result(&queue::render(&summaries));
    }
    if !joins.is_empty() {
        console.result(&join::render(&summaries, &joins));
    }
    console.json(&summaries);
    if let Some(dir) = plots {
        draw(&dir, &summaries, &console)?;
    }
    Ok(true)
}

/// Draws three plots for each list of pods.
fn draw(dir: &Path, summaries: &[Summary], console: &Console) -> Result<()> {
    let mut lists: Vec<&str> = summaries.iter().map(|summary| summary.list.as_str()).collect();
    lists.dedup();
    for list in lists {
        let of_list: Vec<&Summary> = summaries.iter().filter(|summary| summary.list == list).collect();
        let ends = of_list.iter().filter_map(|summary| summary.curve.last());
        // Runs of some policies may end earlier; all are compared at a demand that all of them have reached.
        let offered = ends.map(|spread| spread.offered).min().unwrap_or(0);
        let curves = |title: &str, value| plot::curves(&format!("{title}: {list}"), value, &of_list);
        let allocated = curves("Allocated GPUs", PlottedValue::Allocated)?;
        let fragmentation = curves("Fragmentation", PlottedValue::Fragment)?;
        let policies = plot::bars(&format!("Policies compared: {list}"), offered, &of_list)?;
        let plots = [
            (format!("allocated-{list}"), allocated),
            (format!("fragmentation-{list}"), fragmentation),
            (format!("policies-{list}"), policies),
        ];
        crate::plot::write(dir, &plots, console)?;
    }
    Ok(())
}

/// Reads the nodes and pods to replay, from files or from a live cluster.
async fn read(args: &ReplayArgs) -> Result<Vec<PodList>> {
    let mut lists = Vec::new();
    if let Some(kubeconfig) = &args.kubeconfig {
        let cluster = live::read(kubeconfig).await?;
        for path in &args.pods {
            lists.push(PodList::of(
                path,
                seen::world(&cluster, Some(&trace::pods(path)?))?,
            ));
        }
        if lists.is_empty() {
            lists.push(PodList::of(Path::new("cluster"), seen::world(&cluster, None)?));
        }
        ensure!(
            lists.iter().all(|list| list.world.capacity() > 0),
            "the cluster has no healthy GPU that a Device object, or a node's capacity, speaks of"
        );
        return Ok(lists);
    }
    let path = args.nodes.as_deref().context("--nodes is missing")?;
    let nodes = trace::nodes(path)?;
    ensure!(
        nodes.iter().any(|node| node.gpus > 0),
        "{}: no node has a GPU",
        path.display()
    );
    for path in &args.pods {
        lists.push(PodList::of(
            path,
            objects::world(&nodes, &trace::pods(path)?, Vec::new())?,
        ));
    }
    Ok(lists)
}

impl PodList {
    /// The list with the name of its file.
    fn of(path: &Path, world: ReplayInput) -> Self {
        Self {
            name: path
                .file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            typical: typical_pods(&world),
            world,
        }
    }
}

/// All runs of a replay.
struct ReplayPlan {
    lists: Vec<PodList>,
    conditions: Vec<RunConditions>,
    console: Console,
    args: ReplayArgs,
}

/// The runs that differ by their seed only, which become one line of the results: a list of pods, a policy, and conditions.
#[derive(Clone, Copy)]
struct RunGroup<'p> {
    list: &'p PodList,
    policy: &'p Policy,
    conditions: &'p RunConditions,
}

impl ReplayPlan {
    /// True if the pods of a live cluster are placed again, and no trace's.
    fn replays_own_pods(&self) -> bool {
        self.args.kubeconfig.is_some() && self.args.pods.is_empty()
    }

    /// The groups of runs, one for each list of pods, policy and condition.
    fn groups(&self) -> Vec<RunGroup<'_>> {
        let mut groups = Vec::new();
        for list in &self.lists {
            for policy in &self.args.policy {
                for conditions in &self.conditions {
                    groups.push(RunGroup {
                        list,
                        policy,
                        conditions,
                    });
                }
            }
        }
        groups
    }

    /// Runs one replay; `None` if it was interrupted.
    async fn run(&self, group: RunGroup<'_>, seed: u64, stop: &AtomicBool) -> Result<Option<RunResult>> {
        let RunGroup {
            list,
            policy,
            conditions,
        } = group;
        let label = format!("{} {policy} {} seed {seed}", list.name, conditions.label);
        let job = Job {
            world: &list.world,
            typical: &list.typical,
            policy,
            conditions,
            seed,
            tune: Some(self.args.tune).filter(|tune| *tune > 0.0),
            answer_nodes: self.args.answer_nodes,
            departures: self.args.departures,
            stretch: self.args.stretch,
            in_order: self.replays_own_pods(),
            check_every: self.args.check_every,
            evictions: self.args.evictions,
            joins: &self.args.join,
        };
        let outcome = run::run(job, stop).await.with_context(|| label.clone())?;
        if let Some(point) = outcome.as_ref().and_then(|outcome| outcome.curve.last()) {
            let result = format!("{:.2} % allocated at {} %", point.allocated, point.offered);
            self.console.step(&format!("{label}: {result}"));
        }
        Ok(outcome)
    }
}

/// Stops the threads of the runs when the replay is dropped.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs all replays on threads of their own, and returns a summary of each group.
async fn replay(plan: ReplayPlan) -> Result<Vec<Summary>> {
    let stop = Arc::new(AtomicBool::new(false));
    let _guard = StopOnDrop(Arc::clone(&stop));
    let n_runs = plan.groups().len() * plan.args.seeds.0.len();
    plan.console.step(&format!("{n_runs} runs"));
    let handle = Handle::current();
    // Ctrl-C drops this future, and blocking threads go on: they look at `stop` after every pod.
    tokio::task::spawn_blocking(move || replay_all(&plan, &stop, &handle))
        .await
        .context("the replay broke off")?
}

/// Runs all replays of a plan in parallel, and sums them up by group.
fn replay_all(plan: &ReplayPlan, stop: &AtomicBool, handle: &Handle) -> Result<Vec<Summary>> {
    let groups = plan.groups();
    let mut runs = Vec::new();
    for group in &groups {
        runs.extend(plan.args.seeds.iter().map(|seed| (*group, seed)));
    }
    let done = in_parallel(&runs, plan.args.threads, stop, |(group, seed)| {
        handle.block_on(plan.run(*group, *seed, stop))
    })?;
    let mut summaries = Vec::new();
    if plan.replays_own_pods() {
        let today = |list: &PodList| Summary::today(&list.name, &list.world, &list.typical);
        summaries.extend(plan.lists.iter().map(today));
    }
    // `done` has the seeds of the first group, then those of the second, and so on.
    for (group, runs) in groups.iter().zip(done.chunks(plan.args.seeds.0.len())) {
        let (list, policy) = (&group.list.name, group.policy.to_string());
        summaries.push(Summary::of(list, policy, &group.conditions.label, runs.to_vec()));
    }
    Ok(summaries)
}

#[cfg(test)]
mod tests;
