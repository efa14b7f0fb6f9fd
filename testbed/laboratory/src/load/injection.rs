//! `laboratory load injection`: checks that containerd injects what the plugin wrote for a start, and measures the delay.
//!
//! Pods come in bursts to nodes full of other pods, which are then deleted, the oldest first. The plugins are
//! the real ones; containerd's own code (`cdi-injector`) injects the CDI devices, one process per node, without
//! the pause that kubelet and containerd make between `PreStartContainer` and the injection.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use kit::cluster::{ClusterSpec, DriverSpecs, LocalCluster, NodeSetup};
use kit::console::Console;
use kit::files;
use kit::kubelet::{ContainerStart, RuntimeConfig, RuntimeContainer, StartHook};
use kit::observer::ClusterSnapshot;
use kit::pods::PodBuilder;

use super::{delete_all, failed_pods, quantiles, start_together, times, wrong_devices};

/// GPUs of a node.
const N_GPUS: usize = 8;
/// Memory of each GPU in GiB: a node has little more units than pods, so that device IDs soon belong to other
/// pods.
const GIB_OF_GPU: u64 = 20;
/// Containers on each node between two bursts.
const STANDING: u32 = 100;
/// Containers that start together.
const BURST: u32 = 30;
/// The beginning of the file names of the CDI specs that a plugin writes for single starts.
const SPEC_PREFIX: &str = "gpushare.dev-gpu_";

/// `laboratory load injection`.
#[derive(Clone, Debug, Args)]
pub struct InjectionArgs {
    /// The program of `testbed/cdi-injector`, built in a checkout of containerd.
    #[arg(long, value_name = "PROGRAM")]
    pub injector: PathBuf,
    /// Nodes. Bursts go from node to node; the specs of a burst are removed after a minute
    /// or two, so that fewer nodes have more specs at a time.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=50))]
    pub nodes: u32,
    /// Starts in all.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub starts: u32,
}

/// The measurements.
#[derive(Clone, Debug, Serialize)]
pub struct InjectionResult {
    /// Starts in bursts.
    pub starts: usize,
    /// Starts whose container got something else than the spec that was written for it.
    pub stale: usize,
    /// Starts that were refused for now because containerd did not know their device.
    pub unresolvable: usize,
    /// Starts that were refused for now for other reasons.
    pub refused: usize,
    /// `PreStartContainer`, in milliseconds: median, 95th percentile, longest.
    pub pre_start_ms: [f64; 3],
    /// From the return of `PreStartContainer` to the end of the injection, in milliseconds: median, 95th percentile, longest.
    pub injection_ms: [f64; 3],
    /// `PreStartContainer` and the injection together, in milliseconds: median, 95th percentile, longest.
    pub wait_ms: [f64; 3],
    /// The number of specs on a node at the end of a burst, and their size in bytes; both are medians.
    pub specs: [u64; 2],
    /// Load average of the machine over a minute, when the bursts began and ended.
    pub load_average: [f64; 2],
    /// Containers that see other devices than recorded, and pods that kubelet refused.
    pub wrong: Vec<String>,
}

/// Measures and prints a table. Returns true if nothing was stale or wrong.
pub(super) async fn run(console: &Console, args: &InjectionArgs) -> Result<bool> {
    let measured = injection(console, args).await?;
    let heads = "STARTS STALE UNRESOLVABLE REFUSED PRESTART_ms INJECTION_ms BOTH_ms SPECS BYTES WRONG";
    let heads = heads.split(' ').map(|head| head.replace('_', " "));
    console.report(heads, [measured.row()], &measured);
    for wrong in measured.wrong.iter().take(10) {
        console.result(wrong);
    }
    Ok(measured.stale == 0 && measured.wrong.is_empty())
}

impl InjectionResult {
    /// The cells of the table's row.
    fn row(&self) -> [String; 10] {
        [
            self.starts.to_string(),
            self.stale.to_string(),
            self.unresolvable.to_string(),
            self.refused.to_string(),
            times(self.pre_start_ms, 1),
            times(self.injection_ms, 1),
            times(self.wait_ms, 1),
            self.specs[0].to_string(),
            self.specs[1].to_string(),
            self.wrong.len().to_string(),
        ]
    }
}

/// A node, and what was observed there.
#[derive(Default)]
struct WatchedNode {
    node: String,
    starts: Arc<Mutex<Vec<ContainerStart>>>,
    /// The pods on the node between two bursts, the oldest first.
    standing: VecDeque<String>,
    seen: InjectionCounts,
}

/// Counts and times of the container starts in the bursts of one node.
#[derive(Clone, Debug, Default)]
struct InjectionCounts {
    starts: Vec<ContainerStart>,
    n_stale: usize,
    n_specs: Vec<u64>,
    n_bytes: Vec<u64>,
    wrong: Vec<String>,
}

impl WatchedNode {
    /// The node's setup: its plugin, and a hook that records every start of a container.
    fn setup(&self, args: &InjectionArgs) -> NodeSetup {
        let starts = Arc::clone(&self.starts);
        NodeSetup {
            started: StartHook::new(move |start| starts.lock().push(start.clone())),
            inject: "cdi",
            // NVIDIA's runtime would add to the devices that CDI injects.
            container_runtime: RuntimeConfig::default(),
            driver: DriverSpecs::LongToolkit,
            cdi_injector: Some(args.injector.clone()),
            ..NodeSetup::new(&self.node, &[GIB_OF_GPU * 1024; N_GPUS])
        }
    }

    /// The starts of containers since the last call.
    fn take_starts(&self) -> Vec<ContainerStart> {
        std::mem::take(&mut *self.starts.lock())
    }
}

/// Starts the testbed, fills its nodes, and starts pods in bursts until there were enough.
///
/// # Errors
/// A program is not there, ends, or pods do not run in time.
pub async fn injection(console: &Console, args: &InjectionArgs) -> Result<InjectionResult> {
    console.step("starting the testbed");
    let mut nodes = Vec::new();
    for number in 1..=args.nodes {
        nodes.push(WatchedNode {
            node: format!("n{number}"),
            ..WatchedNode::default()
        });
    }
    let setups = nodes.iter().map(|watched| watched.setup(args)).collect();
    let mut cluster = LocalCluster::start(ClusterSpec {
        max_backoff: Some(Duration::from_millis(500)),
        ..ClusterSpec::of(setups)
    })
    .await?;
    for watched in &mut nodes {
        console.step(&format!("{}: {STANDING} containers that stay", watched.node));
        let names = numbered(&format!("{}-s", watched.node), STANDING);
        let spec = |name: &String| PodBuilder::units(name, 1).on(&watched.node);
        start_together(&mut cluster, &watched.node, &names, spec, 0).await?;
        watched.standing = names.into();
        // The starts of the first filling are not measured.
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
            burst(&mut cluster, watched, round).await?;
            n_starts += BURST;
        }
    }
    let load_average = [began, load_average()];
    cluster.stop().await?;
    Ok(sum(nodes.iter().map(|watched| &watched.seen), load_average))
}

/// The names `<prefix>0`, `<prefix>1`, …
fn numbered(prefix: &str, n: u32) -> Vec<String> {
    (0..n).map(|number| format!("{prefix}{number}")).collect()
}

/// Starts a burst of pods, checks their devices, and removes as many of the oldest.
async fn burst(cluster: &mut LocalCluster, watched: &mut WatchedNode, round: u64) -> Result<()> {
    // Names of pods are never used twice, so that a leftover of a former pod is not taken for something of a new pod.
    let names = numbered(&format!("{}-r{round}-", watched.node), BURST);
    let spec = |name: &String| PodBuilder::units(name, 1).on(&watched.node);
    start_together(cluster, &watched.node, &names, spec, round).await?;
    count_burst(cluster, watched)?;
    watched.standing.extend(names);
    let leaving: Vec<String> = watched.standing.drain(..usize::try_from(BURST)?).collect();
    delete_all(cluster, &leaving).await
}

/// Compares the devices of a burst's containers with their CDI specs and with the records of their pods, and counts the results.
fn count_burst(cluster: &mut LocalCluster, watched: &mut WatchedNode) -> Result<()> {
    let snapshot = ClusterSnapshot::of(cluster.api().objects());
    let dirs = cluster.node(&watched.node)?.kubelet().config().cdi_dirs.clone();
    let dir = dirs.last().context("the node has no directory of CDI specs")?;
    for start in watched.take_starts() {
        let container = &start.container;
        watched.seen.n_stale += usize::from(!is_as_written(dir, container)?);
        watched
            .seen
            .wrong
            .extend(wrong_devices(&snapshot, &watched.node, container));
        watched.seen.starts.push(start);
    }
    watched.seen.wrong.extend(failed_pods(&snapshot, &watched.node));
    let sizes = own_specs(dir)?;
    watched.seen.n_specs.push(u64::try_from(sizes.len())?);
    watched.seen.n_bytes.push(median(sizes));
    Ok(())
}

/// Returns true if a container got the variables and device nodes of its spec, and no other GPU.
fn is_as_written(dir: &Path, container: &RuntimeContainer) -> Result<bool> {
    let mut is_written = false;
    let mut gpus: Vec<String> = Vec::new();
    for name in &container.cdi_devices {
        // The driver's libraries are a CDI device of another kind, the same for all pods.
        let Some(("gpushare.dev/gpu", name)) = name.split_once('=') else {
            continue;
        };
        let path = dir.join(format!("{SPEC_PREFIX}{name}.json"));
        let spec: WrittenSpec = serde_json::from_str(&files::read(&path)?)
            .with_context(|| format!("{} is no CDI spec", path.display()))?;
        let device = spec.devices.into_iter().next();
        let edits = device
            .with_context(|| format!("{} has no device", path.display()))?
            .container_edits;
        for (name, value) in edits.env.iter().filter_map(|pair| pair.split_once('=')) {
            if container.env.get(name).map(String::as_str) != Some(value) {
                return Ok(false);
            }
        }
        for node in edits.device_nodes {
            if !container.device_nodes.contains(&node.path) {
                return Ok(false);
            }
            gpus.push(node.path);
        }
        is_written = true;
    }
    if !is_written {
        bail!(
            "the answer for {} names no CDI device of the plugin",
            container.pod
        );
    }
    // Control devices (nvidiactl, nvidia-uvm) are in every container; only GPUs tell one pod from another.
    for node in &container.device_nodes {
        if is_gpu(node) && !gpus.contains(node) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The parts of a CDI spec that are compared with a container.
#[derive(Deserialize)]
struct WrittenSpec {
    devices: Vec<WrittenDevice>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenDevice {
    container_edits: WrittenEdits,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct WrittenEdits {
    env: Vec<String>,
    device_nodes: Vec<WrittenNode>,
}

#[derive(Deserialize)]
struct WrittenNode {
    path: String,
}

/// Returns true for the device file of a GPU, such as `/dev/nvidia0`.
fn is_gpu(node: &str) -> bool {
    node.strip_prefix("/dev/nvidia")
        .is_some_and(|rest| rest.parse::<u32>().is_ok())
}

/// The sizes in bytes of the specs for single starts in a directory.
fn own_specs(dir: &Path) -> Result<Vec<u64>> {
    let mut sizes = Vec::new();
    for path in files::with_extension(dir, "json")? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // The plugin may remove the file meanwhile.
        if name.starts_with(SPEC_PREFIX)
            && let Ok(found) = path.metadata()
        {
            sizes.push(found.len());
        }
    }
    Ok(sizes)
}

/// Adds up what was counted on all nodes.
fn sum<'a>(nodes: impl Iterator<Item = &'a InjectionCounts>, load_average: [f64; 2]) -> InjectionResult {
    let (mut pre_starts, mut injections, mut waits) = (Vec::new(), Vec::new(), Vec::new());
    let (mut n_specs, mut n_bytes) = (Vec::new(), Vec::new());
    let (mut refusals, mut stale, mut wrong) = (Vec::new(), 0, Vec::new());
    for seen in nodes {
        for start in &seen.starts {
            pre_starts.push(start.pre_start);
            injections.push(start.injection);
            waits.push(start.pre_start + start.injection);
            refusals.extend(&start.refusals);
        }
        n_specs.extend(&seen.n_specs);
        n_bytes.extend(&seen.n_bytes);
        stale += seen.n_stale;
        wrong.extend_from_slice(&seen.wrong);
    }
    let (mut unresolvable, mut refused) = (0, 0);
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for refusal in refusals {
        if refusal.contains("unresolvable CDI devices") {
            unresolvable += 1;
        } else {
            refused += 1;
        }
        let kind = refusal.split([':', ';']).next().unwrap_or_default();
        *kinds.entry(kind).or_default() += 1;
    }
    // The table has room for the sums only.
    tracing::info!(?kinds, "refusals");
    InjectionResult {
        starts: pre_starts.len(),
        stale,
        unresolvable,
        refused,
        pre_start_ms: quantiles(pre_starts, [50, 95, 100]),
        injection_ms: quantiles(injections, [50, 95, 100]),
        wait_ms: quantiles(waits, [50, 95, 100]),
        specs: [median(n_specs), median(n_bytes)],
        load_average,
        wrong,
    }
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Returns the load average of the last minute; zero if `/proc/loadavg` cannot be read.
fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let (first, _) = text.split_once(' ').unwrap_or_default();
    first.parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use kit::kubelet::{ContainerType, RunState};

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
            gpu_bytes: 0,
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
