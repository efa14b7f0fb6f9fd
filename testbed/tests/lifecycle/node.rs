//! A node's plugin replaced or reconfigured, its GPUs changed, its disk unusable, the machine rebooted.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::cluster::{CdiDir, GpuSpec, LocalCluster, NodeSetup};
use kit::daemons::Invocation;
use kit::http_client::HttpClient;
use kit::invariants;
use kit::kubelet::{Kubelet, RunState};
use kit::observer::ClusterSnapshot;
use kit::pod_fields::{phase, unscheduled_because};
use kit::pods::PodBuilder;
use kit::polling;
use proto::read_api::{Diagnosis, Explanation, State};
use proto::resource::{GPU_MEM, GPU_MEMORY};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    DEADLINE, LOOK, cluster_of, events, node_of, run, seen, starts, starts_again, until_event, until_run,
    verify, waits,
};

/// The time in which a plugin has to end.
const GRACE: Duration = Duration::from_secs(10);

/// Waits until the scheduler counts the given number of GPUs of the node as healthy: an event may be there before.
async fn until_healthy(cluster: &LocalCluster, n_healthy: usize) -> Result<()> {
    let shows = |node: &Value| {
        let gpus = node.get("devs").and_then(Value::as_array);
        gpus.is_some_and(|gpus| gpus.iter().filter(|gpu| gpu["healthy"] == true).count() == n_healthy)
    };
    cluster
        .until_scheduler_shows("n1", &format!("{n_healthy} healthy GPUs"), DEADLINE, shows)
        .await
}

/// Watches a container for a while that must not start.
async fn stays(kubelet: &Kubelet, name: &str, n_starts: u32) -> Result<()> {
    let is_up = |kubelet: &Kubelet| {
        let container = kubelet.container("default", name, "main");
        container.is_some_and(|container| {
            container.starts > n_starts && matches!(container.state, RunState::Running { .. })
        })
    };
    ensure!(!kubelet.until(LOOK, is_up).await, "{name} has started");
    Ok(())
}

/// Waits until the plugin has sent kubelet both its resources, after `n_before` earlier registrations; node status follows.
async fn until_registered(cluster: &mut LocalCluster, n_before: usize) -> Result<()> {
    let is_known = |kubelet: &Kubelet| {
        kubelet.counts().registrations >= n_before + 2
            && kubelet.capacity().values().all(|(_, healthy)| *healthy > 0)
    };
    cluster
        .node("n1")?
        .kubelet()
        .expect_until(DEADLINE, "the plugin does not register", is_known)
        .await?;
    cluster.until_ready(DEADLINE).await
}

async fn until_up(kubelet: &Kubelet, name: &str, n_starts: u32) -> Result<String> {
    kubelet
        .expect_until(DEADLINE, format!("{name} does not start"), |kubelet| {
            starts(kubelet, name) > n_starts
        })
        .await?;
    seen(kubelet, name)
}

/// The plugin's command line with another value of a flag.
fn with_value(mut plugin: Invocation, flag: &str, value: &str) -> Invocation {
    plugin.set(flag, value);
    plugin
}

/// Amounts recorded in bytes stay, kubelet's earlier IDs keep their meaning, and new pods ask in the new unit.
#[tokio::test(flavor = "multi_thread")]
async fn running_pods_survive_a_change_of_the_memory_unit() -> Result<()> {
    let (mut cluster, pods) = cluster_of(node_of(2)).await?;
    run(&cluster, &pods, "old", 4).await?;
    let node = cluster.node("n1")?;
    let of_old = seen(node.kubelet(), "old")?;
    node.restart_plugin_as(|plugin| with_value(plugin, "--memory-unit", "MiB"))
        .await?;
    let units = |kubelet: &Kubelet| kubelet.capacity().get(GPU_MEM).copied();
    node.kubelet()
        .expect_until(DEADLINE, "kubelet knows no MiB", |kubelet| {
            units(kubelet) == Some((32768, 32768))
        })
        .await?;
    ensure!(
        starts_again(node.kubelet(), "old").await? == of_old,
        "it sees another GPU"
    );
    let is_published =
        |snapshot: &ClusterSnapshot| (invariants::memory_unit(snapshot, "n1") == 1 << 20).then_some(());
    cluster
        .until("the unit to be published", DEADLINE, is_published)
        .await?;
    cluster.until_ready(DEADLINE).await?;
    run(&cluster, &pods, "whole", 16384).await?;
    run(&cluster, &pods, "rest", 12288).await?;
    waits(&cluster, &pods, "more", 1).await?;
    let node = cluster.node("n1")?;
    ensure!(
        seen(node.kubelet(), "whole")? != of_old && seen(node.kubelet(), "rest")? == of_old,
        "12 GiB are left beside the 4"
    );
    node.restart_kubelet().await?;
    node.kubelet()
        .expect_until(DEADLINE, "the plugin does not register", |kubelet| {
            units(kubelet) == Some((32768, 32768))
        })
        .await?;
    node.kubelet()
        .expect_until(DEADLINE, "kubelet does not go on", Kubelet::has_synced)
        .await?;
    ensure!(
        starts_again(node.kubelet(), "old").await? == of_old,
        "it sees another GPU"
    );
    until_run(&cluster, &["old", "whole", "rest"]).await
}

/// A GPU comes; one is taken out, and is sick; then the driver's list says that another is there in its place, or that it is
/// in MIG mode, which is the same to a plugin that does not share instances: it is gone. When it is back all is well.
#[tokio::test(flavor = "multi_thread")]
async fn the_plugin_follows_added_lost_and_replaced_gpus() -> Result<()> {
    let (mut cluster, pods) = cluster_of(node_of(1)).await?;
    let these = |minors: &[usize]| -> Vec<GpuSpec> {
        let all = node_of(3).gpus;
        minors
            .iter()
            .filter_map(|minor| all.get(*minor).cloned())
            .collect()
    };
    run(&cluster, &pods, "first", 12).await?;
    cluster.node("n1")?.set_gpus(these(&[0, 1]))?;
    until_event(&cluster, "n1", "GPUAdded", "").await?;
    run(&cluster, &pods, "second", 12).await?;
    let node = cluster.node("n1")?;
    ensure!(
        seen(node.kubelet(), "first")? == "GPU-n1-0" && seen(node.kubelet(), "second")? == "GPU-n1-1",
        "the new GPU is not used"
    );

    node.set_gpus(these(&[1]))?;
    until_event(&cluster, "n1", "GPUUnhealthy", "").await?;
    until_event(&cluster, "first", "GPUUnhealthy", "").await?;
    until_healthy(&cluster, 1).await?;
    // kube-scheduler counts what the first pod asks for as taken from the units that are left.
    waits(&cluster, &pods, "third", 4).await?;
    let node = cluster.node("n1")?;
    let before = starts(node.kubelet(), "first");
    node.kubelet().restart_container("default", "first", "main")?;
    stays(node.kubelet(), "first", before).await?;

    node.set_gpus(these(&[1, 2]))?;
    until_event(&cluster, "n1", "GPUGone", "").await?;
    until_run(&cluster, &["third"]).await?;
    let node = cluster.node("n1")?;
    ensure!(
        ["GPU-n1-1", "GPU-n1-2"].contains(&&*seen(node.kubelet(), "third")?),
        "it is on a GPU that is not there"
    );
    stays(node.kubelet(), "first", before).await?;

    node.set_gpus(these(&[0, 1, 2]))?;
    ensure!(
        until_up(node.kubelet(), "first", before).await? == "GPU-n1-0",
        "it sees another GPU"
    );
    until_run(&cluster, &["first", "second", "third"]).await?;
    until_healthy(&cluster, 3).await?;
    verify(&cluster).await
}

/// An answer of the scheduler's read API.
async fn read<T: DeserializeOwned>(cluster: &LocalCluster, path: &str) -> Result<T> {
    let url = format!("http://{}/v1/{path}", cluster.read_address());
    let (_, body) = HttpClient::new().get(&url).await?;
    Ok(serde_json::from_slice(&body)?)
}

/// A GPU leaves the machine while its pod runs, and the plugin starts again without it: the pod's amount stays counted, and
/// people learn which GPU is gone, where the amount counts, and what to do.
#[tokio::test(flavor = "multi_thread")]
async fn the_amount_of_a_gpu_that_is_gone_stays_counted() -> Result<()> {
    let (mut cluster, pods) = cluster_of(node_of(2)).await?;
    run(&cluster, &pods, "first", 12).await?;
    let node = cluster.node("n1")?;
    let gone = seen(node.kubelet(), "first")?;
    let left: Vec<GpuSpec> = node
        .gpus()
        .iter()
        .filter(|gpu| gpu.uuid != gone)
        .cloned()
        .collect();
    let minor = left.first().context("no GPU is left")?.minor;
    node.set_gpus(left)?;
    // Within one process of the plugin a GPU that is missing may come back, and stays listed.
    until_event(&cluster, "n1", "GPUUnhealthy", "").await?;
    let n_before = cluster.node("n1")?.kubelet().counts().registrations;
    cluster.node("n1")?.restart_plugin().await?;
    until_registered(&mut cluster, n_before).await?;
    until_healthy(&cluster, 1).await?;
    let remedy = format!(
        "GPU {gone}, which this pod holds, is no longer on this node. Delete the pod to reschedule it."
    );
    until_event(&cluster, "first", "GPUUnhealthy", &remedy).await?;
    let state: State = read(&cluster, "state").await?;
    let gpus = &state.nodes.first().context("no node is shown")?.gpus;
    let [gpu] = gpus.as_slice() else {
        anyhow::bail!("more than the GPU that is left: {gpus:?}")
    };
    let [holder] = gpu.holders.as_slice() else {
        anyhow::bail!("the pod is not counted: {gpu:?}")
    };
    ensure!(
        (gpu.minor, holder.memory, holder.gone.as_slice()) == (minor, 12 << 30, std::slice::from_ref(&gone)),
        "{gpu:?}"
    );
    let explained: Explanation = read(&cluster, "pods/default/first/explain").await?;
    ensure!(
        (explained.gone, explained.counted_on) == (vec![gone], [(minor, 12 << 30)].into()),
        "explain says something else"
    );
    waits(&cluster, &pods, "second", 8).await?;
    pods.delete("first").await?;
    until_run(&cluster, &["second"]).await?;
    verify(&cluster).await
}

/// A file of partitions with a mistake is one condition, one event for all processes of the plugin, one finding of `doctor`, and
/// the reason of the refusal; the node serves pods that need no partition.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_table_with_a_mistake_is_named_everywhere() -> Result<()> {
    const MISTAKE: &str = "the set [0, 0] under 2 names a GPU twice";
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("partitions.json");
    std::fs::write(&file, r#"{"2": [{"minors": [0, 0]}]}"#)?;
    let (mut cluster, pods) = cluster_of(NodeSetup {
        plugin_args: vec![format!("--gpu-partitions={}", file.display())],
        ..node_of(2)
    })
    .await?;
    run(&cluster, &pods, "any", 1).await?;
    pods.delete("any").await?;
    until_event(&cluster, "n1", "GPUReportInvalid", "").await?;
    let whole = [
        ("koordinator.sh/gpu.shared", "2"),
        ("koordinator.sh/gpu-memory-ratio", "200"),
    ];
    let spec = (
        "scheduling.koordinator.sh/gpu-partition-spec".to_owned(),
        r#"{"allocatePolicy": "BestEffort"}"#.to_owned(),
    );
    pods.create(&PodBuilder::new("whole", &whole).annotated(&[spec].into()))
        .await?;
    let refused = |snapshot: &ClusterSnapshot| {
        let message = unscheduled_because(snapshot.pod("whole")?)?;
        let names = message.contains("the node's partition table cannot be read: --gpu-partitions: ");
        (names && message.contains(MISTAKE)).then_some(())
    };
    cluster
        .until("the refusal to name the mistake", DEADLINE, refused)
        .await?;
    let condition = |snapshot: &ClusterSnapshot| {
        let devices = snapshot
            .devices
            .get("n1")
            .map(|object| object.spec.devices.clone());
        let mut conditions = devices
            .unwrap_or_default()
            .into_iter()
            .flat_map(|device| device.conditions);
        conditions.find(|condition| condition.condition_type == "ReportValid")
    };
    let found = cluster.until("the condition", DEADLINE, condition).await?;
    ensure!(
        found.status == "False" && found.message.contains(MISTAKE),
        "{found:?}"
    );
    let diagnosis: Diagnosis = read(&cluster, "doctor").await?;
    let of_table = diagnosis
        .findings
        .iter()
        .filter(|finding| finding.message.contains(MISTAKE));
    ensure!(of_table.count() == 1, "{:?}", diagnosis.findings);

    let n_before = cluster.node("n1")?.kubelet().counts().registrations;
    cluster.node("n1")?.restart_plugin().await?;
    until_registered(&mut cluster, n_before).await?;
    std::fs::write(&file, r#"{"2": [{"minors": [0, 1]}]}"#)?;
    until_run(&cluster, &["whole"]).await?;
    let is_valid = |snapshot: &ClusterSnapshot| condition(snapshot).filter(|found| found.status == "True");
    cluster
        .until("the condition to be true", DEADLINE, is_valid)
        .await?;
    let n_events = events(&cluster, "n1", "GPUReportInvalid").len();
    ensure!(n_events == 1, "{n_events} events");

    // A set with a GPU that the node does not have is left out, whatever its score, and named; the other set is used.
    pods.delete("whole").await?;
    std::fs::write(
        &file,
        r#"{"2": [{"minors": [0, 1]}, {"minors": [1, 7], "allocationScore": "9"}]}"#,
    )?;
    let names_minor =
        |snapshot: &ClusterSnapshot| condition(snapshot).filter(|found| found.message.contains("minor 7"));
    let found = cluster
        .until("the condition of the set", DEADLINE, names_minor)
        .await?;
    ensure!(
        found.status == "False" && found.reason == "PartitionsOfMissingGPU",
        "{found:?}"
    );
    let spec = (
        "scheduling.koordinator.sh/gpu-partition-spec".to_owned(),
        r#"{"allocatePolicy": "Restricted"}"#.to_owned(),
    );
    pods.create(&PodBuilder::new("restricted", &whole).annotated(&[spec].into()))
        .await?;
    until_run(&cluster, &["restricted"]).await?;
    // The read API renews its state within a second.
    let names_set = async || {
        let diagnosis: Result<Diagnosis> = read(&cluster, "doctor").await;
        let findings = diagnosis.map(|diagnosis| diagnosis.findings).unwrap_or_default();
        let of_set = findings
            .iter()
            .filter(|finding| finding.message.contains("the set [1, 7] names minor 7"));
        of_set.count() == 1
    };
    polling::until(DEADLINE, "doctor does not name the set", names_set).await?;
    let n_events = events(&cluster, "n1", "GPUReportInvalid").len();
    ensure!(n_events == 2, "{n_events} events");
    verify(&cluster).await
}

/// Makes the directory of CDI specs of a node unusable.
fn block(kubelet: &Kubelet) -> Result<CdiDir> {
    let dir = CdiDir::of(kubelet.config())?;
    dir.block()?;
    Ok(dir)
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_wait_while_cdi_specs_cannot_be_written() -> Result<()> {
    let (mut cluster, pods) = cluster_of(NodeSetup {
        inject: "cdi",
        ..node_of(1)
    })
    .await?;
    run(&cluster, &pods, "before", 4).await?;
    let blocked = block(cluster.node("n1")?.kubelet())?;
    until_event(&cluster, "n1", "GPUInjectionImpossible", "").await?;
    until_healthy(&cluster, 0).await?;
    waits(&cluster, &pods, "meanwhile", 4).await?;
    blocked.unblock()?;
    until_run(&cluster, &["before", "meanwhile"]).await?;
    verify(&cluster).await?;

    // A plugin that does without; what was given by CDI before still needs it.
    let node = cluster.node("n1")?;
    let blocked = block(node.kubelet())?;
    let n_before = node.kubelet().counts().registrations;
    node.restart_plugin_as(|plugin| with_value(plugin, "--inject", "envvar"))
        .await?;
    until_registered(&mut cluster, n_before).await?;
    run(&cluster, &pods, "by-variable", 4).await?;
    let node = cluster.node("n1")?;
    let by_cdi = |name: &str| {
        node.kubelet()
            .container("default", name, "main")
            .map(|container| container.cdi_devices.len())
    };
    ensure!(
        (by_cdi("before"), by_cdi("by-variable")) == (Some(2), Some(0)),
        "not in the manner that is possible"
    );
    let before = starts(node.kubelet(), "before");
    node.kubelet().restart_container("default", "before", "main")?;
    stays(node.kubelet(), "before", before).await?;
    blocked.unblock()?;
    until_up(node.kubelet(), "before", before).await?;
    until_run(&cluster, &["before", "meanwhile", "by-variable"]).await?;
    verify(&cluster).await
}

/// Lets the plugin write no byte to any file, or lets it again.
async fn fill_disk(cluster: &mut LocalCluster, is_full: bool) -> Result<()> {
    let pid = cluster
        .node("n1")?
        .plugin()
        .and_then(kit::daemons::Daemon::pid)
        .context("no plugin runs")?;
    let limit = if is_full {
        "--fsize=0:"
    } else {
        "--fsize=unlimited:"
    };
    let status = tokio::process::Command::new("prlimit")
        .args(["--pid", &pid.to_string(), limit])
        .status()
        .await?;
    ensure!(status.success(), "prlimit ended with {status}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_wait_while_the_disk_is_full() -> Result<()> {
    let (mut cluster, pods) = cluster_of(NodeSetup {
        disk_may_be_full: true,
        inject: "cdi",
        ..node_of(1)
    })
    .await?;
    run(&cluster, &pods, "before", 4).await?;
    fill_disk(&mut cluster, true).await?;
    pods.create(&PodBuilder::units("meanwhile", 4)).await?;
    until_event(&cluster, "meanwhile", "GPUNotReady", "").await?;
    let kubelet = cluster.node("n1")?.kubelet();
    stays(kubelet, "meanwhile", 0).await?;
    ensure!(
        starts_again(kubelet, "before").await? == "GPU-n1-0",
        "a spec that is there needs no write"
    );
    fill_disk(&mut cluster, false).await?;
    until_run(&cluster, &["before", "meanwhile"]).await?;
    verify(&cluster).await
}

/// kubelet and node status know the resources all the time, and no pod is turned away.
#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_of_the_plugin_keeps_the_resources() -> Result<()> {
    let (mut cluster, pods) = cluster_of(node_of(2)).await?;
    run(&cluster, &pods, "before", 4).await?;
    let api = cluster.api().objects().clone();
    let node = cluster.node("n1")?;
    let is_listed = |kubelet: &Kubelet| {
        let status = api
            .get("nodes", "", "n1")
            .map(|node| node.pointer("/status/capacity").cloned().unwrap_or_default())
            .unwrap_or_default();
        kubelet.capacity().contains_key(GPU_MEM)
            && [GPU_MEM, GPU_MEMORY]
                .iter()
                .all(|name| status.get(*name).is_some_and(|amount| amount != "0"))
    };
    for _ in 0..3 {
        let before = node.kubelet().counts().registrations;
        ensure!(
            node.replace_plugin(GRACE).await?,
            "the old plugin did not end cleanly"
        );
        let mut lost = false;
        let is_back = |kubelet: &Kubelet| {
            lost |= !is_listed(kubelet);
            kubelet.counts().registrations > before
                && kubelet.capacity().values().all(|(_, healthy)| *healthy > 0)
        };
        node.kubelet()
            .expect_until(DEADLINE, "the new plugin does not register", is_back)
            .await?;
        ensure!(!lost, "a resource was lost");
    }
    run(&cluster, &pods, "after", 4).await?;
    until_run(&cluster, &["before", "after"]).await?;
    verify(&cluster).await
}

/// kubelet refuses the earlier pods, as no plugin serves their devices; those are free at once.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_reboot_with_a_late_plugin_kubelet_fails_the_old_pods() -> Result<()> {
    let (mut cluster, pods) = cluster_of(node_of(1)).await?;
    run(&cluster, &pods, "before", 16).await?;
    cluster.node("n1")?.reboot().await?;
    let is_failed = |snapshot: &ClusterSnapshot| {
        snapshot
            .pod("before")
            .is_some_and(|pod| phase(pod) == "Failed")
            .then_some(())
    };
    cluster
        .until("the pod to be turned away", DEADLINE, is_failed)
        .await?;
    let n_before = cluster.node("n1")?.kubelet().counts().registrations;
    cluster.node("n1")?.start_plugin(&[])?;
    until_registered(&mut cluster, n_before).await?;
    run(&cluster, &pods, "after", 16).await?;
    verify(&cluster).await
}
