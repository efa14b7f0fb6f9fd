//! `laboratory replay`: places the pods of a trace one by one by several policies, and compares the allocated GPUs.
//!
//! The scheduler's own policies run the code of its filter and bind verbs; kube-scheduler's part is played by the
//! testbed's model of it.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use clap::Args;

use conditions::{NamedConditions, Overrides, RunConditions};
use fragment::{TypicalPod, typical_pods};
use kit::console::Console;
use parallel::{RunThreads, on_threads};
use plot::PlottedValue;
use policy::{Policy, Reference};
use run::{Job, RunOptions, RunResult, factor};
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
    #[command(flatten)]
    options: RunOptions,
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

/// Seeds of runs. A name of its own, as clap takes a `Vec` for an option with one value for each element.
pub type Seeds = Vec<u64>;

/// Parses seeds such as 42-51 or 1,2,3.
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
        Ok(seeds)
    }
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
    let conditions = args
        .condition
        .iter()
        .map(|named| RunConditions::of(*named, args.overrides));
    let conditions = conditions.collect();
    let options = args.options.clone();
    let plots = args.plots.clone();
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
    if options.evictions.is_some() {
        console.result(&summary::render_waits(&summaries));
    }
    if !options.join.is_empty() {
        console.result(&summary::render_joins(&summaries, &options.join));
    }
    console.json(&summaries);
    if let Some(dir) = plots {
        draw(&dir, &summaries, &console)?;
    }
    Ok(true)
}

fn draw(dir: &Path, summaries: &[Summary], console: &Console) -> Result<()> {
    let mut lists: Vec<&str> = summaries.iter().map(|summary| summary.list.as_str()).collect();
    lists.dedup();
    for list in lists {
        let of_list: Vec<&Summary> = summaries.iter().filter(|summary| summary.list == list).collect();
        let ends = of_list.iter().filter_map(|summary| summary.curve.last());
        // Runs of some policies may end earlier; all are compared at a demand that all of them have reached.
        let offered = ends.map(|spread| spread.offered).min().unwrap_or(0);
        let curves = |title: &str, value| plot::curves(&format!("{title}: {list}"), value, &of_list);
        let bars = plot::bars(&format!("Policies compared: {list}"), offered, &of_list)?;
        let plots = [
            (
                format!("allocated-{list}"),
                curves("Allocated GPUs", PlottedValue::Allocated)?,
            ),
            (
                format!("fragmentation-{list}"),
                curves("Fragmentation", PlottedValue::Fragment)?,
            ),
            (format!("policies-{list}"), bars),
        ];
        crate::plot::write(dir, &plots, console)?;
    }
    Ok(())
}

async fn read(args: &ReplayArgs) -> Result<Vec<PodList>> {
    let mut lists = Vec::new();
    if let Some(kubeconfig) = &args.kubeconfig {
        let cluster = live::read(kubeconfig).await?;
        for path in &args.pods {
            let pods = trace::pods(path)?;
            lists.push(PodList::of(path, seen::world(&cluster, Some(&pods))?));
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
        let pods = trace::pods(path)?;
        lists.push(PodList::of(path, objects::world(&nodes, &pods, Vec::new())?));
    }
    Ok(lists)
}

impl PodList {
    fn of(path: &Path, world: ReplayInput) -> Self {
        let name = path.file_stem().unwrap_or_default();
        Self {
            name: name.to_string_lossy().into_owned(),
            typical: typical_pods(&world),
            world,
        }
    }
}

struct ReplayPlan {
    lists: Vec<PodList>,
    conditions: Vec<RunConditions>,
    console: Console,
    args: ReplayArgs,
}

impl ReplayPlan {
    /// True if the pods of a live cluster are placed again, and no trace's.
    fn replays_own_pods(&self) -> bool {
        self.args.kubeconfig.is_some() && self.args.pods.is_empty()
    }

    /// The jobs that differ by more than their seed, each with the name of its list of pods; they become a line of the results.
    fn groups(&self) -> Vec<(&str, Job<'_>)> {
        let mut groups = Vec::new();
        for list in &self.lists {
            for policy in &self.args.policy {
                for conditions in &self.conditions {
                    let job = Job {
                        world: &list.world,
                        typical: &list.typical,
                        policy,
                        conditions,
                        seed: 0,
                        tune: Some(self.args.tune).filter(|tune| *tune > 0.0),
                        in_order: self.replays_own_pods(),
                        options: &self.args.options,
                    };
                    groups.push((list.name.as_str(), job));
                }
            }
        }
        groups
    }

    /// Runs one replay; `None` if it was interrupted.
    async fn run(&self, list: &str, job: Job<'_>, stop: &AtomicBool) -> Result<Option<RunResult>> {
        let label = format!("{list} {} {} seed {}", job.policy, job.conditions.label, job.seed);
        let outcome = run::run(job, stop).await.with_context(|| label.clone())?;
        if let Some(point) = outcome.as_ref().and_then(|outcome| outcome.curve.last()) {
            let result = format!("{:.2} % allocated at {} %", point.allocated, point.offered);
            self.console.step(&format!("{label}: {result}"));
        }
        Ok(outcome)
    }

    /// Runs all replays in parallel, and sums them up by group.
    fn run_all(&self, threads: &RunThreads) -> Result<Vec<Summary>> {
        let groups = self.groups();
        let mut jobs = Vec::new();
        for (list, job) in &groups {
            jobs.extend(
                self.args
                    .seeds
                    .iter()
                    .map(|seed| (*list, Job { seed: *seed, ..*job })),
            );
        }
        self.console.step(&format!("{} runs", jobs.len()));
        let done = threads.run_all(&jobs, self.args.threads, async |(list, job)| {
            self.run(list, *job, &threads.stop).await
        })?;
        let mut summaries = Vec::new();
        if self.replays_own_pods() {
            for list in &self.lists {
                summaries.push(Summary::today(&list.name, &list.world, &list.typical));
            }
        }
        // `done` has the seeds of the first group, then those of the second, and so on.
        for ((list, job), runs) in groups.iter().zip(done.chunks(self.args.seeds.len())) {
            let (policy, conditions) = (job.policy.to_string(), &job.conditions.label);
            summaries.push(Summary::of(list, policy, conditions, runs.to_vec()));
        }
        Ok(summaries)
    }
}

/// Runs all replays on threads of their own, and returns a summary of each group.
async fn replay(plan: ReplayPlan) -> Result<Vec<Summary>> {
    on_threads(move |threads| plan.run_all(threads)).await
}

#[cfg(test)]
mod tests;
