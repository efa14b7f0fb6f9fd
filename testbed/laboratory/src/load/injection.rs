//! `laboratory load injection`: checks that containerd injects what the plugin wrote for a start, and measures the delay.
//!
//! Pods come in bursts to nodes full of other pods, which are then deleted, the oldest first. The plugins are
//! the real ones; containerd's own code (`cdi-injector`) injects the CDI devices, one process per node, without
//! the pause that kubelet and containerd make between `PreStartContainer` and the injection.

use std::collections::VecDeque;
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

const N_GPUS: usize = 8;
/// Memory of each GPU in GiB: a node has little more units than pods, so that device IDs soon belong to other
/// pods.
const GIB_OF_GPU: u64 = 20;
/// Containers on each node between two bursts.
const STANDING: u32 = 100;
const BURST: u32 = 30;
/// The beginning of the file names of the CDI specs that a plugin writes for single starts.
const SPEC_PREFIX: &str = "gpushare.dev-gpu_";

#[derive(Clone, Debug, Args)]
pub struct InjectionArgs {
    /// The program of `testbed/cdi-injector`, built in a checkout of containerd.
    #[arg(long, value_name = "PROGRAM")]
    injector: PathBuf,
    /// Nodes. Bursts go from node to node; the specs of a burst are removed after a minute
    /// or two, so that fewer nodes have more specs at a time.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=50))]
    nodes: u32,
    /// Starts in all.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    starts: u32,
}

/// The measurements; times have the median, the 95th percentile and the longest.
#[derive(Clone, Debug, Serialize)]
struct InjectionResult {
    starts: usize,
    /// Starts whose container got something else than the spec that was written for it.
    stale: usize,
    /// Starts that were refused for now because containerd did not know their device.
    unresolvable: usize,
    /// Starts that were refused for now for other reasons.
    refused: usize,
    pre_start_ms: [f64; 3],
    /// From the return of `PreStartContainer` to the end of the injection.
    injection_ms: [f64; 3],
    /// `PreStartContainer` and the injection together.
    wait_ms: [f64; 3],
    /// The number of specs on a node at the end of a burst, and their size in bytes; both are medians.
    specs: [u64; 2],
    /// Containers that see other devices than recorded, and pods that kubelet refused.
    wrong: Vec<String>,
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

#[derive(Default)]
struct WatchedNode {
    node: String,
    starts: Arc<Mutex<Vec<ContainerStart>>>,
    /// The pods on the node between two bursts, the oldest first.
    standing: VecDeque<String>,
}

/// Counts and times of the container starts in all bursts.
#[derive(Default)]
struct InjectionCounts {
    starts: Vec<ContainerStart>,
    n_stale: usize,
    n_specs: Vec<u64>,
    n_bytes: Vec<u64>,
    wrong: Vec<String>,
}

impl WatchedNode {
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

    fn take_starts(&self) -> Vec<ContainerStart> {
        std::mem::take(&mut *self.starts.lock())
    }
}

/// Starts the testbed, fills its nodes, and starts pods in bursts until there were enough.
async fn injection(console: &Console, args: &InjectionArgs) -> Result<InjectionResult> {
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
    let mut counts = InjectionCounts::default();
    let mut n_starts = 0;
    for round in 0.. {
        if n_starts >= args.starts {
            break;
        }
        for watched in &mut nodes {
            console.step(&format!("{n_starts} of {} starts, {}", args.starts, watched.node));
            counts.add_burst(&mut cluster, watched, round).await?;
            n_starts += BURST;
        }
    }
    cluster.stop().await?;
    Ok(counts.result())
}

fn numbered(prefix: &str, n: u32) -> Vec<String> {
    (0..n).map(|number| format!("{prefix}{number}")).collect()
}

impl InjectionCounts {
    /// Starts a burst of pods, compares the devices of their containers with their CDI specs and with the records of the pods, and
    /// removes as many of the oldest pods.
    async fn add_burst(
        &mut self,
        cluster: &mut LocalCluster,
        watched: &mut WatchedNode,
        round: u64,
    ) -> Result<()> {
        // Names of pods are never used twice, so that a leftover of a former pod is not taken for something of a new pod.
        let names = numbered(&format!("{}-r{round}-", watched.node), BURST);
        let spec = |name: &String| PodBuilder::units(name, 1).on(&watched.node);
        start_together(cluster, &watched.node, &names, spec, round).await?;
        let snapshot = ClusterSnapshot::of(cluster.api().objects());
        let dirs = &cluster.node(&watched.node)?.kubelet().config().cdi_dirs;
        let dir = dirs.last().context("the node has no directory of CDI specs")?;
        for start in watched.take_starts() {
            let container = &start.container;
            self.n_stale += usize::from(!is_as_written(dir, container)?);
            self.wrong
                .extend(wrong_devices(&snapshot, &watched.node, container));
            self.starts.push(start);
        }
        self.wrong.extend(failed_pods(&snapshot, &watched.node));
        let sizes = own_specs(dir)?;
        self.n_specs.push(u64::try_from(sizes.len())?);
        self.n_bytes.push(median(sizes));
        watched.standing.extend(names);
        let leaving: Vec<String> = watched.standing.drain(..usize::try_from(BURST)?).collect();
        delete_all(cluster, &leaving).await
    }

    fn result(self) -> InjectionResult {
        let (mut pre_starts, mut injections, mut waits) = (Vec::new(), Vec::new(), Vec::new());
        let (mut unresolvable, mut refused) = (0, 0);
        for start in &self.starts {
            pre_starts.push(start.pre_start);
            injections.push(start.injection);
            waits.push(start.pre_start + start.injection);
            for refusal in &start.refusals {
                if refusal.contains("unresolvable CDI devices") {
                    unresolvable += 1;
                } else {
                    refused += 1;
                }
            }
        }
        InjectionResult {
            starts: self.starts.len(),
            stale: self.n_stale,
            unresolvable,
            refused,
            pre_start_ms: quantiles(pre_starts, [50, 95, 100]),
            injection_ms: quantiles(injections, [50, 95, 100]),
            wait_ms: quantiles(waits, [50, 95, 100]),
            specs: [median(self.n_specs), median(self.n_bytes)],
            wrong: self.wrong,
        }
    }
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
        let no_spec = || format!("{} is no CDI spec", path.display());
        let spec: WrittenSpec = serde_json::from_str(&files::read(&path)?).with_context(no_spec)?;
        let [WrittenDevice { container_edits }] = spec.devices;
        for (name, value) in container_edits.env.iter().filter_map(|pair| pair.split_once('=')) {
            if container.env.get(name).map(String::as_str) != Some(value) {
                return Ok(false);
            }
        }
        for node in container_edits.device_nodes {
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
    devices: [WrittenDevice; 1],
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

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

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
