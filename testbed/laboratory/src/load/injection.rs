//! `laboratory load injection`: checks that containerd injects what the plugin wrote for a start, and measures the delay.
//!
//! Pods come in bursts to nodes that are full of others, and take their places. The plugins are the real ones, also one of
//! an earlier version beside them; containerd's own code (`cdi-injector`) injects the CDI devices, one process per node,
//! without the pause that kubelet and containerd make between `PreStartContainer` and the injection.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use futures::stream::{StreamExt, TryStreamExt};
use proto::resource::GPU_MEM;
use serde::Serialize;
use serde_json::Value;

use testbed::cluster::{ClusterSpec, DriverSpecs, LocalCluster, NodeSetup};
use testbed::console::{Console, table};
use testbed::invariants;
use testbed::kubelet::{ContainerStart, OrderRule, RuntimeConfig, RuntimeContainer, StartHook};
use testbed::observer::ClusterSnapshot;
use testbed::pod_fields::{is_running, node_of, phase};
use testbed::pods::{NamespacePods, PodBuilder};

/// Longest wait for one thing.
const DEADLINE: Duration = Duration::from_secs(180);
/// GPUs of a node, and GiB of each: little more than there are pods, so that device IDs are soon another pod's.
const GPUS: [u64; 2] = [8, 20];
/// Requests to the API server at one time.
const CONCURRENCY: usize = 16;
/// The kind of the devices whose specs a plugin writes for a start.
const KIND: &str = "gpushare.dev/gpu";

/// `laboratory load injection`.
#[derive(Clone, Debug, Args)]
pub struct InjectionArgs {
    /// The program of `testbed/cdi-injector`, built in a checkout of containerd.
    #[arg(long, value_name = "PROGRAM")]
    pub injector: PathBuf,
    /// A device plugin of an earlier version, which gets a node of its own.
    #[arg(long, value_name = "PROGRAM")]
    pub former: Option<PathBuf>,
    /// Nodes with the plugin beside this program. Bursts go from node to node; the specs of a burst are removed after a minute
    /// or two, so that fewer nodes have more specs at a time.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=50))]
    pub nodes: u32,
    /// Containers that stay on each node.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=120))]
    pub standing: u32,
    /// Containers that start together.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=40))]
    pub burst: u32,
    /// Starts with the plugin beside this program.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub starts: u32,
}

/// Measurements of one plugin.
#[derive(Clone, Debug, Serialize)]
pub struct InjectionResult {
    /// `current` for the plugin beside this program, else `former`.
    pub plugin: &'static str,
    /// Starts in bursts.
    pub starts: usize,
    /// Starts that got something else than the spec says that was written for them.
    pub stale: usize,
    /// Starts that were refused for now because containerd did not know their device.
    pub unresolvable: usize,
    /// Starts that were refused for now for other reasons.
    pub refused: usize,
    /// `PreStartContainer`, in milliseconds: median, 95th percentile, longest.
    pub pre_start_ms: [f64; 3],
    /// From its return to the end of the injection.
    pub injection_ms: [f64; 3],
    /// Both together.
    pub wait_ms: [f64; 3],
    /// Specs of starts on the node at the end of a burst, in the median, and their size in bytes.
    pub specs: [u64; 2],
    /// Load average of the machine over a minute, when the bursts began and ended.
    pub load_average: [f64; 2],
    /// Containers that see other devices than recorded, and pods that kubelet refused.
    pub wrong: Vec<String>,
}

/// Runs it and prints the measurements. Returns true if nothing was stale or wrong with the plugin beside this program.
pub(super) async fn run(console: &Console, args: &InjectionArgs) -> Result<bool> {
    let measured = injection(console, args).await;
    console.finish();
    let measured = measured?;
    let heads = [
        "PLUGIN",
        "STARTS",
        "STALE",
        "UNRESOLVABLE",
        "REFUSED",
        "PRESTART ms",
        "INJECTION ms",
        "BOTH ms",
        "SPECS",
        "BYTES",
        "WRONG",
    ];
    let mut results = table(heads);
    let words = |values: [f64; 3]| values.map(|value| format!("{value:.1}")).join(" ");
    for one in &measured {
        let counts = [one.starts, one.stale, one.unresolvable, one.refused].map(|count| count.to_string());
        let times = [one.pre_start_ms, one.injection_ms, one.wait_ms].map(words);
        let rest = [
            one.specs[0].to_string(),
            one.specs[1].to_string(),
            one.wrong.len().to_string(),
        ];
        results.add_row(
            [one.plugin.to_owned()]
                .into_iter()
                .chain(counts)
                .chain(times)
                .chain(rest),
        );
    }
    console.result(&results.to_string());
    measured
        .iter()
        .flat_map(|one| one.wrong.iter().take(10))
        .for_each(|wrong| console.result(wrong));
    console.json(&measured);
    Ok(measured
        .iter()
        .filter(|one| one.plugin == CURRENT)
        .all(|one| one.stale == 0 && one.wrong.is_empty()))
}

const CURRENT: &str = "current";
const FORMER: &str = "former";

/// A node, and its observed starts.
struct WatchedNode {
    node: String,
    plugin: &'static str,
    starts: Arc<Mutex<Vec<ContainerStart>>>,
    /// The pods that stay, the oldest first.
    standing: VecDeque<String>,
    seen: InjectionCounts,
}

/// Observations in bursts.
#[derive(Clone, Debug, Default)]
struct InjectionCounts {
    starts: Vec<ContainerStart>,
    n_stale: usize,
    n_specs: Vec<u64>,
    n_bytes: Vec<u64>,
    wrong: Vec<String>,
}

impl WatchedNode {
    fn new(node: String, plugin: &'static str) -> Self {
        Self {
            node,
            plugin,
            starts: Arc::default(),
            standing: VecDeque::new(),
            seen: InjectionCounts::default(),
        }
    }

    fn spec(&self, args: &InjectionArgs) -> NodeSetup {
        let starts = Arc::clone(&self.starts);
        let gpus: Vec<u64> = (0..GPUS[0]).map(|_| GPUS[1] * 1024).collect();
        NodeSetup {
            started: StartHook::new(move |start| {
                starts
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(start.clone());
            }),
            inject: "cdi",
            // NVIDIA's runtime would add to the devices that CDI injects.
            container_runtime: RuntimeConfig::default(),
            driver: DriverSpecs::LongToolkit,
            plugin: args.former.clone().filter(|_| self.plugin == FORMER),
            cdi_injector: Some(args.injector.clone()),
            ..NodeSetup::new(&self.node, &gpus)
        }
    }

    fn take_starts(&self) -> Vec<ContainerStart> {
        std::mem::take(&mut *self.starts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Measures.
///
/// # Errors
/// A program is not there, ends, or pods do not run in time.
pub async fn injection(console: &Console, args: &InjectionArgs) -> Result<Vec<InjectionResult>> {
    console.step("starting the testbed");
    let mut nodes: Vec<WatchedNode> = (1..=args.nodes)
        .map(|number| WatchedNode::new(format!("n{number}"), CURRENT))
        .collect();
    nodes.extend(
        args.former
            .iter()
            .map(|_| WatchedNode::new("former".to_owned(), FORMER)),
    );
    let specs = nodes.iter().map(|watched| watched.spec(args)).collect();
    let mut cluster = LocalCluster::start(ClusterSpec {
        max_backoff: Some(Duration::from_millis(500)),
        ..ClusterSpec::of(specs)
    })
    .await?;
    for watched in &mut nodes {
        console.step(&format!(
            "{}: {} containers that stay",
            watched.node, args.standing
        ));
        let names: Vec<String> = (0..args.standing)
            .map(|number| format!("{}-s{number}", watched.node))
            .collect();
        start_together(&mut cluster, &watched.node, &names, 0).await?;
        watched.standing = names.into();
        watched.take_starts();
    }
    let began = load_average();
    let mut n_starts = 0;
    for round in 0.. {
        if n_starts >= args.starts {
            break;
        }
        for watched in &mut nodes {
            console.step(&format!("{n_starts} of {} starts, {}", args.starts, watched.node));
            burst(&mut cluster, watched, args.burst, round).await?;
            n_starts += if watched.plugin == CURRENT { args.burst } else { 0 };
        }
    }
    let load_average = [began, load_average()];
    cluster.stop().await?;
    let of = |plugin| {
        let own: Vec<&InjectionCounts> = nodes
            .iter()
            .filter(|watched| watched.plugin == plugin)
            .map(|watched| &watched.seen)
            .collect();
        (!own.is_empty()).then(|| sum(plugin, &own, load_average))
    };
    Ok([FORMER, CURRENT].into_iter().filter_map(of).collect())
}

/// Starts a burst of pods, checks their devices, and removes as many of the oldest.
async fn burst(cluster: &mut LocalCluster, watched: &mut WatchedNode, n_pods: u32, round: u64) -> Result<()> {
    let names: Vec<String> = (0..n_pods)
        .map(|number| format!("{}-r{round}-{number}", watched.node))
        .collect();
    start_together(cluster, &watched.node, &names, round).await?;
    look(cluster, watched)?;
    watched.standing.extend(names);
    let leaving: Vec<String> = watched.standing.drain(..usize::try_from(n_pods)?).collect();
    let pods = NamespacePods::of(cluster.client(), "default");
    let deleted = futures::stream::iter(leaving.clone()).map(|name| {
        let pods = pods.clone();
        async move { pods.delete(&name).await }
    });
    deleted
        .buffer_unordered(CONCURRENCY)
        .try_collect::<Vec<_>>()
        .await?;
    let are_gone = |snapshot: &ClusterSnapshot| {
        leaving
            .iter()
            .all(|name| !snapshot.pods.contains_key(&key(name)))
            .then_some(())
    };
    cluster.until("pods to be gone", DEADLINE, are_gone).await
}

/// Binds pods to a node and lets its kubelet have them together.
async fn start_together(cluster: &mut LocalCluster, node: &str, names: &[String], seed: u64) -> Result<()> {
    cluster.node(node)?.kubelet().hold();
    let pods = NamespacePods::of(cluster.client(), "default");
    let created = futures::stream::iter(names).map(|name| {
        let (pods, pod) = (pods.clone(), PodBuilder::new(name, &[(GPU_MEM, "1")]).on(node));
        async move { pods.create(&pod).await }
    });
    created
        .buffer_unordered(CONCURRENCY)
        .try_collect::<Vec<_>>()
        .await?;
    let all = |snapshot: &ClusterSnapshot, is_so: &dyn Fn(&k8s_openapi::api::core::v1::Pod) -> bool| {
        names
            .iter()
            .all(|name| snapshot.pods.get(&key(name)).is_some_and(is_so))
            .then_some(())
    };
    cluster
        .until("all pods to be bound", DEADLINE, |snapshot: &ClusterSnapshot| {
            all(snapshot, &|pod| node_of(pod).is_some())
        })
        .await?;
    let kubelet = cluster.node(node)?.kubelet();
    ensure!(
        kubelet
            .until(DEADLINE, |kubelet| kubelet.n_held() == names.len())
            .await,
        "pods do not reach the kubelet of {node}"
    );
    kubelet.release(OrderRule::Shuffled, seed);
    let is_settled = |pod: &k8s_openapi::api::core::v1::Pod| is_running(pod) || phase(pod) == "Failed";
    cluster
        .until("all pods to run", DEADLINE, |snapshot: &ClusterSnapshot| {
            all(snapshot, &is_settled)
        })
        .await
}

fn key(pod: &str) -> String {
    format!("default/{pod}")
}

/// Compares the devices in the containers of a burst with their specs and with the records of their pods.
fn look(cluster: &mut LocalCluster, watched: &mut WatchedNode) -> Result<()> {
    let snapshot = ClusterSnapshot::of(cluster.api().objects());
    let device = snapshot.devices.get(&watched.node);
    let dirs = cluster.node(&watched.node)?.kubelet().config().cdi_dirs.clone();
    let dir = dirs.last().context("the node has no directory of CDI specs")?;
    for start in watched.take_starts() {
        let container = &start.container;
        watched.seen.n_stale += usize::from(!is_as_written(dir, container)?);
        if let Some(pod) = snapshot.pods.get(&key(&container.pod)) {
            let should_see = invariants::should_see(pod, device, &container.name);
            if container.gpus != should_see {
                watched.seen.wrong.push(format!(
                    "{} sees {:?} and should see {should_see:?}",
                    container.pod, container.gpus
                ));
            }
        }
        watched.seen.starts.push(start);
    }
    let of_node = |pod: &&k8s_openapi::api::core::v1::Pod| {
        node_of(pod) == Some(watched.node.as_str()) && phase(pod) == "Failed"
    };
    let failed = snapshot.pods.values().filter(of_node);
    let messages = failed.map(|pod| {
        format!(
            "a pod failed: {:?}",
            pod.status.as_ref().and_then(|status| status.message.clone())
        )
    });
    watched.seen.wrong.extend(messages);
    let sizes = own_specs(dir)?;
    watched.seen.n_specs.push(u64::try_from(sizes.len())?);
    watched.seen.n_bytes.push(median(sizes));
    Ok(())
}

/// Returns true if a container got the edits of its spec: all of it, and no GPU besides.
fn is_as_written(dir: &Path, container: &RuntimeContainer) -> Result<bool> {
    let names = container
        .cdi_devices
        .iter()
        .filter_map(|name| name.strip_prefix(KIND)?.strip_prefix('='));
    let mut is_written = false;
    let mut gpus: Vec<String> = Vec::new();
    for name in names {
        let path = dir.join(format!("gpushare.dev-gpu_{name}.json"));
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let spec: Value =
            serde_json::from_str(&text).with_context(|| format!("{} is no JSON", path.display()))?;
        let edits = spec
            .pointer("/devices/0/containerEdits")
            .with_context(|| format!("{} has no edits", path.display()))?;
        let list = |field: &str| {
            edits
                .get(field)
                .and_then(Value::as_array)
                .cloned()
                .unwrap_or_default()
        };
        let pairs = list("env");
        let has_env = pairs
            .iter()
            .filter_map(|pair| pair.as_str()?.split_once('='))
            .all(|(name, value)| container.env.get(name).is_some_and(|found| found == value));
        let nodes: Vec<String> = list("deviceNodes")
            .iter()
            .filter_map(|node| Some(node.get("path")?.as_str()?.to_owned()))
            .collect();
        gpus.extend(nodes.iter().filter(|node| is_gpu(node)).cloned());
        if !has_env || !nodes.iter().all(|node| container.device_nodes.contains(node)) {
            return Ok(false);
        }
        is_written = true;
    }
    if !is_written {
        bail!("the answer for {} names no CDI device of {KIND}", container.pod);
    }
    Ok(container
        .device_nodes
        .iter()
        .filter(|node| is_gpu(node))
        .all(|node| gpus.contains(node)))
}

fn is_gpu(node: &str) -> bool {
    node.strip_prefix("/dev/nvidia")
        .is_some_and(|rest| rest.parse::<u32>().is_ok())
}

/// The sizes of the specs of starts.
fn own_specs(dir: &Path) -> Result<Vec<u64>> {
    let mut sizes = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name
            .strip_prefix("gpushare.dev-gpu_")
            .is_some_and(|rest| rest.strip_suffix(".json").is_some())
        {
            // The plugin may remove it meanwhile.
            sizes.extend(entry.metadata().ok().map(|found| found.len()));
        }
    }
    Ok(sizes)
}

fn sum(plugin: &'static str, nodes: &[&InjectionCounts], load_average: [f64; 2]) -> InjectionResult {
    let starts: Vec<&ContainerStart> = nodes.iter().flat_map(|seen| &seen.starts).collect();
    let refusals: Vec<&String> = starts.iter().flat_map(|start| &start.refusals).collect();
    let unresolvable = refusals
        .iter()
        .filter(|refusal| refusal.contains("unresolvable CDI devices"))
        .count();
    let kinds = refusals
        .iter()
        .fold(BTreeMap::<&str, usize>::new(), |mut kinds, refusal| {
            *kinds
                .entry(refusal.split([':', ';']).next().unwrap_or_default())
                .or_default() += 1;
            kinds
        });
    tracing::info!(plugin, ?kinds, "refusals");
    InjectionResult {
        plugin,
        starts: starts.len(),
        stale: nodes.iter().map(|seen| seen.n_stale).sum(),
        unresolvable,
        refused: refusals.len() - unresolvable,
        pre_start_ms: quantiles(starts.iter().map(|start| start.pre_start)),
        injection_ms: quantiles(starts.iter().map(|start| start.injection)),
        wait_ms: quantiles(starts.iter().map(|start| start.pre_start + start.injection)),
        specs: [
            median(nodes.iter().flat_map(|seen| seen.n_specs.clone()).collect()),
            median(nodes.iter().flat_map(|seen| seen.n_bytes.clone()).collect()),
        ],
        load_average,
        wrong: nodes.iter().flat_map(|seen| seen.wrong.clone()).collect(),
    }
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn quantiles(durations: impl Iterator<Item = Duration>) -> [f64; 3] {
    let mut durations: Vec<Duration> = durations.collect();
    durations.sort_unstable();
    let n_durations = durations.len();
    [50, 95, 100].map(|percent| {
        let idx = (n_durations * percent / 100).min(n_durations.saturating_sub(1));
        durations
            .get(idx)
            .map_or(0.0, |duration| duration.as_secs_f64() * 1000.0)
    })
}

/// Returns the load average of the last minute; zero if `/proc/loadavg` cannot be read.
fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace()
        .next()
        .and_then(|first| first.parse().ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use testbed::kubelet::{ContainerType, RunState};

    fn container(env: &[(&str, &str)], nodes: &[&str]) -> RuntimeContainer {
        RuntimeContainer {
            namespace: "default".to_owned(),
            pod: "a".to_owned(),
            pod_uid: "a".to_owned(),
            name: "main".to_owned(),
            kind: ContainerType::App,
            state: RunState::Exited {
                code: 0,
                started: k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
                finished: k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
            },
            starts: 1,
            env: env
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            devices: BTreeMap::new(),
            cdi_devices: vec![
                "gpushare.dev/driver=all".to_owned(),
                "gpushare.dev/gpu=x".to_owned(),
            ],
            stale_devices: Vec::new(),
            device_nodes: nodes.iter().map(|node| (*node).to_owned()).collect(),
            mounts: Vec::new(),
            hooks: Vec::new(),
            gpus: Vec::new(),
        }
    }

    /// The spec gives GPU 1 and one variable.
    #[rstest]
    #[case::as_written(&[("V", "1"), ("PATH", "/bin")], &["/dev/nvidiactl", "/dev/nvidia1"], true)]
    #[case::another_variable(&[("V", "2")], &["/dev/nvidia1"], false)]
    #[case::no_variable(&[], &["/dev/nvidia1"], false)]
    #[case::another_gpu(&[("V", "1")], &["/dev/nvidia0"], false)]
    #[case::one_gpu_more(&[("V", "1")], &["/dev/nvidia0", "/dev/nvidia1"], false)]
    fn a_stale_spec_is_seen(#[case] env: &[(&str, &str)], #[case] nodes: &[&str], #[case] expected: bool) {
        let dir = tempfile::tempdir().unwrap();
        let edits = json!({"env": ["V=1"], "deviceNodes": [{"path": "/dev/nvidia1"}]});
        let spec = json!({"devices": [{"name": "x", "containerEdits": edits}]});
        std::fs::write(dir.path().join("gpushare.dev-gpu_x.json"), spec.to_string()).unwrap();
        assert_eq!(
            is_as_written(dir.path(), &container(env, nodes)).unwrap(),
            expected
        );
        assert_eq!(own_specs(dir.path()).unwrap().len(), 1);
    }
}
