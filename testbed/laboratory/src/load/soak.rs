//! `laboratory load soak`: memory, files, threads and log of both daemons under a load that stays the same for long.
//!
//! The load is mixed: pods come and go, pages follow the changes, readers ask for the state, for explanations and for fits, and
//! Prometheus scrapes. Everything that the daemons keep for a pod, a client or a request must go with it.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use kit::cluster::{ClusterSpec, LocalCluster, NodeSetup};
use kit::console::Console;
use kit::daemons::Daemon;
use kit::http_client::HttpClient;
use kit::pods::{NamespacePods, PodBuilder};
use kit::process_usage::ProcessUsage;
use serde::Serialize;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::mib;
use crate::plot::{self, Axis, Curve, CurvePanel};
use crate::replay::portion::float;

const SAMPLE: Duration = Duration::from_secs(10);
/// Pods that exist at one time; more than fit, so that some wait.
const N_PODS: usize = 40;
/// Time between two new pods; as many go.
const ARRIVAL: Duration = Duration::from_millis(500);
const N_PAGES: usize = 4;
/// Time between two scrapes, and between two questions of a reader.
const PAUSE: Duration = Duration::from_secs(5);
/// The first of this many equal parts of the time does not count: caches fill, and allocators take what they keep.
const WARMING: usize = 6;
/// The most MiB that the memory may rise in an hour.
const MOST_RISE: f64 = 1.0;

#[derive(Clone, Debug, Args)]
pub struct SoakArgs {
    /// Minutes of load.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub minutes: u32,
    /// Write a plot of the memory, as SVG.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Sample {
    minutes: f64,
    memory_mib: f64,
    files: usize,
    threads: usize,
    log_kib: f64,
}

#[derive(Clone, Debug, Serialize)]
struct Course {
    daemon: &'static str,
    samples: Vec<Sample>,
}

/// A straight line's rise in an hour, by least squares; 0 for fewer than two points.
fn rise_per_hour(points: &[(f64, f64)]) -> f64 {
    let n = float(points.len());
    let mean_x = points.iter().map(|(x, _)| x).sum::<f64>() / n;
    let (mut covariance, mut variance) = (0.0, 0.0);
    for (x, y) in points {
        covariance += (x - mean_x) * y;
        variance += (x - mean_x) * (x - mean_x);
    }
    if variance > 0.0 {
        covariance / variance * 60.0
    } else {
        0.0
    }
}

impl Course {
    fn sample(&mut self, daemon: &Daemon, since: Instant) -> Result<()> {
        let usage = ProcessUsage::of(daemon.pid().context("a daemon has ended")?)?;
        self.samples.push(Sample {
            minutes: since.elapsed().as_secs_f64() / 60.0,
            memory_mib: mib(usage.resident),
            files: usage.files,
            threads: usage.threads,
            log_kib: mib(std::fs::metadata(daemon.log())?.len()) * 1024.0,
        });
        Ok(())
    }

    fn warm(&self) -> &[Sample] {
        let n_warming = self.samples.len() / WARMING;
        self.samples.get(n_warming..).unwrap_or_default()
    }

    /// The rise of a figure in an hour, in its own unit.
    fn rise(&self, figure: fn(&Sample) -> f64) -> f64 {
        let points = self.warm().iter().map(|sample| (sample.minutes, figure(sample)));
        rise_per_hour(&points.collect::<Vec<_>>())
    }
}

/// Runs the load, and prints the figures; true if the memory of no daemon rises.
pub(super) async fn run(console: &Console, args: &SoakArgs) -> Result<bool> {
    let courses = soak(console, args).await?;
    let heads =
        "DAEMON;MEMORY AT FIRST, WARM, LAST MiB;RISE MiB/h;FILES WARM, LAST;THREADS WARM, LAST;LOG KiB/min";
    let (mut rows, mut is_flat) = (Vec::new(), true);
    for course in &courses {
        let ([first, .., last], [warm, ..]) = (course.samples.as_slice(), course.warm()) else {
            continue;
        };
        let rise = course.rise(|sample| sample.memory_mib);
        is_flat &= rise < MOST_RISE;
        rows.push([
            course.daemon.to_owned(),
            format!(
                "{:.1} {:.1} {:.1}",
                first.memory_mib, warm.memory_mib, last.memory_mib
            ),
            format!("{rise:.2}"),
            format!("{} {}", warm.files, last.files),
            format!("{} {}", warm.threads, last.threads),
            format!("{:.1}", course.rise(|sample| sample.log_kib) / 60.0),
        ]);
    }
    console.report(heads.split(';'), rows, &courses);
    if let Some(file) = &args.plot {
        std::fs::write(file, plot(&courses)?).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(is_flat)
}

async fn soak(console: &Console, args: &SoakArgs) -> Result<Vec<Course>> {
    console.step("starting the testbed");
    let node = NodeSetup::new("n1", &[16384; 4]);
    let cluster = LocalCluster::start(ClusterSpec::of(vec![node])).await?;
    let mut load = JoinSet::new();
    load.spawn(come_and_go(NamespacePods::of(cluster.client(), "default")));
    let page = format!("http://{}/v1", cluster.read_address());
    for _ in 0..N_PAGES {
        load.spawn(follow(format!("{page}/changes")));
    }
    let fit = json!({
        "pod": {"spec": {"containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "4"}}}]}},
        "replicas": 100,
    });
    load.spawn(ask(format!("{page}/state"), None));
    load.spawn(ask(format!("{page}/doctor"), None));
    load.spawn(ask(format!("{page}/fit"), Some(fit.to_string())));
    for daemon in daemons(&cluster)? {
        let health = daemon
            .invocation()
            .value("--health-listen")
            .context("no address of metrics")?;
        load.spawn(ask(format!("http://{health}/metrics"), None));
    }
    let since = Instant::now();
    let mut courses = ["gpushare-scheduler", "gpushare-device-plugin"].map(|daemon| Course {
        daemon,
        samples: Vec::new(),
    });
    let mut ticks = interval(SAMPLE);
    for n in 0..=args.minutes * 6 {
        ticks.tick().await;
        if n % 6 == 0 {
            console.step(&format!("minute {} of {}", n / 6, args.minutes));
        }
        for (course, daemon) in courses.iter_mut().zip(daemons(&cluster)?) {
            course.sample(daemon, since)?;
        }
        if let Some(ended) = load.try_join_next() {
            ended??;
        }
    }
    load.shutdown().await;
    cluster.stop().await?;
    Ok(courses.into())
}

fn daemons(cluster: &LocalCluster) -> Result<[&Daemon; 2]> {
    let plugin = cluster.nodes().find_map(|node| node.plugin());
    Ok([&cluster.scheduler, plugin.context("no node has a plugin")?])
}

async fn come_and_go(pods: NamespacePods) -> Result<()> {
    let mut existing = VecDeque::new();
    let mut ticks = interval(ARRIVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for n in 0_u64.. {
        ticks.tick().await;
        let name = format!("soak-{n}");
        let pod = match n % 4 {
            0 => PodBuilder::share(&name, 30),
            1 => PodBuilder::units(&name, 2),
            2 => PodBuilder::units(&name, 8),
            // Larger than any GPU: it waits, and is refused with its reason.
            _ => PodBuilder::units(&name, 17),
        };
        pods.create(&pod).await?;
        existing.push_back(name);
        if existing.len() > N_PODS
            && let Some(oldest) = existing.pop_front()
        {
            pods.delete(&oldest).await?;
        }
    }
    Ok(())
}

async fn follow(url: String) -> Result<()> {
    loop {
        HttpClient::new().get(&url).await?;
    }
}

async fn ask(url: String, body: Option<String>) -> Result<()> {
    let mut ticks = interval(PAUSE);
    loop {
        ticks.tick().await;
        let client = HttpClient::new();
        match &body {
            Some(body) => client.post(&url, body.clone()).await?,
            None => client.get(&url).await?,
        };
    }
}

fn plot(courses: &[Course]) -> Result<String> {
    let mut panels = Vec::new();
    for course in courses {
        let (mut curve, mut longest, mut highest) = (Curve::default(), 1.0_f64, 1.0_f64);
        for sample in &course.samples {
            (longest, highest) = (longest.max(sample.minutes), highest.max(sample.memory_mib));
            curve.points.push((sample.minutes, sample.memory_mib));
        }
        panels.push(CurvePanel {
            heading: course.daemon.to_owned(),
            x: Axis::Linear(0.0..longest),
            y: Axis::Linear(0.0..highest),
            curves: vec![curve],
        });
    }
    let labels = ("minutes", "resident memory, MiB");
    plot::curves("Memory under a load that stays the same", labels, &[], &panels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rise_of_a_line_is_its_slope() {
        let line: Vec<(f64, f64)> = (0..30)
            .map(|minute| (f64::from(minute), 5.0 + f64::from(minute) / 30.0))
            .collect();
        assert!((rise_per_hour(&line) - 2.0).abs() < 1e-9);
        assert!(rise_per_hour(&[(1.0, 5.0)]).abs() < 1e-9 && rise_per_hour(&[]).abs() < 1e-9);
    }
}
