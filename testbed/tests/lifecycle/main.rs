//! The life of nodes, on a cluster of the real daemons.

mod api_server;
mod clock;
mod node;
mod small_disks;
mod specs;

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::cluster::LocalCluster;
use kit::invariants;
use kit::kubelet::Kubelet;
use kit::observer::ClusterSnapshot;
use kit::pod_fields::is_running;

const DEADLINE: Duration = Duration::from_secs(60);
/// The time for which a container that must not start is watched.
const LOOK: Duration = Duration::from_secs(3);

async fn until_run(cluster: &LocalCluster, names: &[&str]) -> Result<()> {
    let is_up = |snapshot: &ClusterSnapshot, name: &str| {
        snapshot.pod(&format!("default/{name}")).is_some_and(is_running)
    };
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
    ensure!(
        kubelet
            .until(DEADLINE, |kubelet| starts(kubelet, name) > before)
            .await,
        "the container of {name} does not start again"
    );
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

/// Waits for an event of this reason on an object.
async fn until_event(cluster: &LocalCluster, object: &str, reason: &str) -> Result<()> {
    let is_shown = || {
        let events = cluster.api().objects().list("events", None).unwrap_or_default();
        events.iter().any(|event| {
            event.pointer("/reason").is_some_and(|text| text == reason)
                && event
                    .pointer("/involvedObject/name")
                    .is_some_and(|name| name == object)
        })
    };
    let shown = async {
        while !is_shown() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let log = || {
        cluster
            .nodes()
            .filter_map(|node| node.plugin())
            .map(kit::daemons::Daemon::log_tail)
            .collect::<String>()
    };
    tokio::time::timeout(DEADLINE, shown)
        .await
        .with_context(|| format!("no event {reason} on {object}: {}", log()))
}
