//! The life of nodes, on a cluster of the real daemons.

mod api_server;
mod clock;
mod groups;
mod node;
mod right_device;
mod small_disks;
mod specs;

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::cluster::{ClusterSpec, LocalCluster, NodeSetup};
use kit::daemons::Daemon;
use kit::invariants;
use kit::kubelet::Kubelet;
use kit::observer::ClusterSnapshot;
use kit::pod_fields::{is_running, unscheduled_because};
use kit::pods::{NamespacePods, PodBuilder};
use kit::polling;
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);
/// The time for which a container that must not start is watched.
const LOOK: Duration = Duration::from_secs(3);

/// A cluster of one node, and the pods of its default namespace.
async fn cluster_of(node: NodeSetup) -> Result<(LocalCluster, NamespacePods)> {
    cluster_of_all(vec![node]).await
}

async fn cluster_of_all(nodes: Vec<NodeSetup>) -> Result<(LocalCluster, NamespacePods)> {
    let cluster = LocalCluster::start(ClusterSpec::of(nodes)).await?;
    let pods = NamespacePods::of(cluster.client(), "default");
    Ok((cluster, pods))
}

/// A node whose GPUs have 16 GiB each.
fn node_of(n_gpus: usize) -> NodeSetup {
    NodeSetup::new("n1", &vec![16384; n_gpus])
}

/// Creates a pod that asks for memory units, and waits until it runs.
async fn run(cluster: &LocalCluster, pods: &NamespacePods, name: &str, units: u64) -> Result<()> {
    pods.create(&PodBuilder::units(name, units)).await?;
    until_run(cluster, &[name]).await
}

/// Creates a pod that finds no room, and waits until its condition says so.
async fn waits(cluster: &LocalCluster, pods: &NamespacePods, name: &str, units: u64) -> Result<()> {
    pods.create(&PodBuilder::units(name, units)).await?;
    let is_refused = |snapshot: &ClusterSnapshot| snapshot.pod(name).and_then(unscheduled_because).map(drop);
    cluster
        .until(&format!("{name} to be refused"), DEADLINE, is_refused)
        .await
}

async fn until_run(cluster: &LocalCluster, names: &[&str]) -> Result<()> {
    let is_up = |snapshot: &ClusterSnapshot, name: &str| snapshot.pod(name).is_some_and(is_running);
    let all_up = |snapshot: &ClusterSnapshot| names.iter().all(|name| is_up(snapshot, name)).then_some(());
    cluster
        .until(&format!("{} to run", names.join(", ")), DEADLINE, all_up)
        .await
}

/// Says that a test has not run: written past the test harness, which keeps the output of a test that passes to itself.
fn not_run(test: &str, reason: &str) -> Result<()> {
    Ok(writeln!(std::io::stderr(), "{test} NOT RUN: {reason}")?)
}

fn starts(kubelet: &Kubelet, name: &str) -> u32 {
    kubelet
        .container("default", name, "main")
        .map_or(0, |container| container.starts)
}

/// Ends a container, and waits until kubelet has started it again; what it sees.
async fn starts_again(kubelet: &Kubelet, name: &str) -> Result<String> {
    let before = starts(kubelet, name);
    kubelet.restart_container("default", name, "main")?;
    kubelet
        .expect_until(
            DEADLINE,
            format!("the container of {name} does not start again"),
            |kubelet| starts(kubelet, name) > before,
        )
        .await?;
    seen(kubelet, name)
}

fn seen(kubelet: &Kubelet, name: &str) -> Result<String> {
    let container = kubelet
        .container("default", name, "main")
        .with_context(|| format!("{name} has no container"))?;
    ensure!(!container.gpus.is_empty(), "{name} sees nothing");
    Ok(container.gpus.join(","))
}

/// Nothing that has started sees what is not counted for it, and nothing is counted twice.
async fn verify(cluster: &LocalCluster) -> Result<()> {
    let snapshot = ClusterSnapshot::of(cluster.api().objects());
    let accounts = invariants::held_amounts(&snapshot, &invariants::NONE_EXCUSED);
    ensure!(accounts.violations.is_empty(), "{:?}", accounts.violations);
    let misfits = invariants::misfits(&invariants::container_views(cluster.client(), &snapshot).await?);
    ensure!(misfits.is_empty(), "{misfits:?}");
    Ok(())
}

/// The messages of the events of this reason on an object.
fn events(cluster: &LocalCluster, object: &str, reason: &str) -> Vec<String> {
    let mut messages = Vec::new();
    for event in cluster.api().objects().list("events", None).unwrap_or_default() {
        let text = |pointer: &str| event.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        if text("/reason") == reason && text("/involvedObject/name") == object {
            messages.push(text("/message").to_owned());
        }
    }
    messages
}

/// Waits for an event of this reason on an object whose message has these words.
async fn until_event(cluster: &LocalCluster, object: &str, reason: &str, words: &str) -> Result<()> {
    let is_it = |message: &String| message.contains(words);
    let found = async || {
        let said = events(cluster, object, reason);
        let missing = || {
            let logs = cluster
                .nodes()
                .filter_map(|node| node.plugin())
                .map(Daemon::log_tail);
            let logs = logs.collect::<String>();
            format!("no event {reason} on {object} says {words:?}, but {said:?}; {logs}")
        };
        Ok(said.iter().any(is_it).then_some(()).ok_or_else(missing))
    };
    polling::until_found(DEADLINE, found).await
}
