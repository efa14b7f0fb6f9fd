//! The device plugin without its partners: no API server, no kubelet socket, a disk that does not answer; and its metrics
//! and log lines meanwhile.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use proto::device::{CONDITION_INJECTABLE, Device};
use proto::record::DEVICE_ALLOCATED;
use proto::resource::{GPU_MEM, GPU_SHARED};
use serde_json::json;
use tokio::time::sleep;

use super::breaking::until_registered;
use super::world::n_healthy;
use super::{DEADLINE, Scenario, World};
use kit::apiserver::{Fault, Matching};
use kit::cluster::{CdiDir, GpuFault, SimulatedNode};
use kit::files;
use kit::kubelet::Kubelet;
use kit::observer::ClusterSnapshot;
use kit::pod_fields::phase;
use kit::pods::PodBuilder;
use kit::polling;

pub(super) const SCENARIOS: &[Scenario] = scenarios! {
    needs "an API server that fails on command", on [PluginAlone]:
    "plugin-without-api-server" => without_api_server,
        "a plugin that starts without the API server registers; all follows once it is back";
    "mode-without-api-server" => mode_without_api_server,
        "without the API server the plugin finds the mode again when CDI works, and a metric says it";
    "kubelet-socket-removed" => kubelet_socket_removed,
        "without the file of kubelet's socket the node keeps its devices";
    "plugin-hangs" => plugin_hangs,
        "a plugin that hangs ends itself within seconds, and pods are admitted again";
    "plugin-metrics" => plugin_metrics,
        "metrics and log lines name devices, registration, mode, held containers and pods";
};

/// Time without the API server: a pause of 16 s between tries has begun by its end.
const AWAY: Duration = Duration::from_secs(20);

/// Time without CDI after the start of the plugin: an earlier version kept the mode that it had by then.
const UNDECIDED: Duration = Duration::from_secs(16);

/// Longest time until kubelet has all resources from a plugin that has just been started.
const REGISTERED: Duration = Duration::from_secs(5);

/// Longest time until everything that waits for the API server is done after its return.
const FOLLOWED: Duration = Duration::from_secs(8);

/// Time for which nothing must change.
const QUIET: Duration = Duration::from_secs(5);

/// Longest time until a plugin that hangs has ended: its limit, and a margin for slow machines.
const HUNG: Duration = Duration::from_secs(20);

/// Returns true if kubelet has healthy devices of both resources.
fn offers_all(kubelet: &Kubelet) -> bool {
    n_healthy(kubelet, GPU_SHARED) > 0 && n_healthy(kubelet, GPU_MEM) > 0
}

/// The GPU that a pod's record names.
fn gpu_of(world: &World, pod: &str) -> Result<String> {
    let annotations = world.pod(pod)?.metadata.annotations.unwrap_or_default();
    let record = annotations.get(DEVICE_ALLOCATED);
    let record = record.with_context(|| format!("pod {pod} has no record"))?;
    match record.split('"').find(|word| word.starts_with("GPU-")) {
        Some(gpu) => Ok(gpu.to_owned()),
        None => bail!("the record of pod {pod} names no GPU: {record}"),
    }
}

/// The number of starts of a pod's container `main`.
fn n_starts_of(kubelet: &Kubelet, namespace: &str, pod: &str) -> u32 {
    let container = kubelet.container(namespace, pod, "main");
    container.map_or(0, |container| container.starts)
}

async fn without_api_server(world: &mut World) -> Result<()> {
    let (node, namespace) = (world.gpu_node(2)?.name, world.namespace.clone());
    world.start_units("before", "1", &node).await?;
    let idle = u32::from(gpu_of(world, "before")?.ends_with("-0"));
    let faults = world.cluster()?.api().faults().clone();
    let away = faults.inject(Matching::anything(), Fault::DropConnection);
    faults.drop_watches_of("", "");
    let began = Instant::now();
    let found = world.node(&node)?;
    found.restart_plugin().await?;
    let kubelet = found.kubelet();
    let failure = format!("{REGISTERED:?} without the API server");
    kubelet.expect_until(REGISTERED, failure, offers_all).await?;
    let n_starts = n_starts_of(kubelet, &namespace, "before");
    kubelet.restart_container(&namespace, "before", "main")?;
    found.set_health(idle, GpuFault::Xid(79))?;
    sleep(AWAY.saturating_sub(began.elapsed())).await;
    let kubelet = world.node(&node)?.kubelet();
    let is_held = n_starts_of(kubelet, &namespace, "before") == n_starts;
    ensure!(is_held, "a container starts without proof");
    away.remove();
    let back = Instant::now();
    let has_started = |kubelet: &Kubelet| n_starts_of(kubelet, &namespace, "before") > n_starts;
    let failure = format!("{FOLLOWED:?} after the return of the API server the container has not started");
    kubelet.expect_until(FOLLOWED, failure, has_started).await?;
    let is_sick = |snapshot: &ClusterSnapshot| {
        let device = snapshot.devices.get(&node).into_iter();
        let mut devices = device.flat_map(|device| &device.spec.devices);
        devices.any(|device| device.minor == i32::try_from(idle).ok() && !device.health)
    };
    // The observer's watches broke as well and wait before they reconnect, so the API server's objects are read directly.
    let objects = world.cluster()?.api().objects().clone();
    let failure = "after the return of the API server the sick GPU is not published";
    let is_published = || std::future::ready(is_sick(&ClusterSnapshot::of(&objects)));
    polling::until(FOLLOWED.saturating_sub(back.elapsed()), failure, is_published).await?;
    world.node(&node)?.set_health(idle, GpuFault::Healthy)?;
    world.cluster()?.until_ready(DEADLINE).await?;
    world.until_running(&["before"]).await
}

async fn mode_without_api_server(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    // The runtime started before the directory of CDI specs existed, and watches it only from its first container on.
    world.start_units("before", "1", &node).await?;
    let faults = world.cluster()?.api().faults().clone();
    let away = faults.inject(Matching::anything(), Fault::DropConnection);
    faults.drop_watches_of("", "");
    let began = Instant::now();
    let found = world.node(&node)?;
    let specs = CdiDir::of(found.kubelet().config())?;
    specs.block()?;
    found.restart_plugin().await?;
    let mode = r#"gpushare_device_plugin_injection{mode="envvar",certainty="proven","#;
    until_metrics(found, mode, true).await?;
    sleep(UNDECIDED.saturating_sub(began.elapsed())).await;
    specs.unblock()?;
    let mode = r#"gpushare_device_plugin_injection{mode="cdi",certainty="proven",reason="Cdi"} 1"#;
    until_metrics(found, mode, true).await?;
    away.remove();
    let is_published = |device: &Device| {
        let mut conditions = device.spec.devices.first()?.conditions.iter();
        let condition = conditions.find(|condition| condition.condition_type == CONDITION_INJECTABLE)?;
        (condition.status == "True" && condition.reason == "Cdi").then_some(())
    };
    let what = "the mode in the Device object";
    world.until_device(&node, what, is_published).await?;
    world.cluster()?.until_ready(DEADLINE).await
}

async fn kubelet_socket_removed(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    let found = world.node(&node)?;
    let socket = found.kubelet().config().plugin_socket();
    let before = found.kubelet().capacity();
    let n_registrations = found.kubelet().counts().registrations;
    files::remove(&socket)?;
    let has_lost = |kubelet: &Kubelet| kubelet.capacity() != before;
    let is_changed = found.kubelet().until(QUIET, has_lost).await;
    let now = found.kubelet().capacity();
    ensure!(!is_changed, "the node has {now:?} of its devices {before:?}");
    world.start_units("meanwhile", "1", &node).await?;
    let found = world.node(&node)?;
    let is_same = found.kubelet().counts().registrations == n_registrations;
    ensure!(is_same, "the plugin has registered again");
    found.restart_kubelet().await?;
    until_registered(world, &node).await?;
    world.start_units("after", "1", &node).await?;
    world.until_running(&["meanwhile", "after"]).await
}

/// Puts a pipe without a writer in the place of a file: a reader waits for ever, as on a disk that does not answer.
async fn replace_by_pipe(file: &Path) -> Result<()> {
    let aside = file.with_extension("aside");
    std::fs::rename(file, &aside).with_context(|| format!("cannot rename {}", file.display()))?;
    let made = tokio::process::Command::new("mkfifo").arg(file).status().await?;
    ensure!(made.success(), "mkfifo {}: {made}", file.display());
    Ok(())
}

async fn plugin_hangs(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    world.start_units("before", "1", &node).await?;
    let found = world.node(&node)?;
    let checkpoint = found.kubelet().config().checkpoint();
    replace_by_pipe(&checkpoint).await?;
    let began = Instant::now();
    world.create(PodBuilder::units("caught", 1).on(&node)).await?;
    let found = world.node(&node)?;
    // The plugin's own watchdog has to end it: kubelet cannot distinguish a plugin that hangs from a slow one.
    let has_ended = match found.plugin() {
        Some(plugin) => plugin.until_ended(HUNG).await,
        None => false,
    };
    std::fs::rename(checkpoint.with_extension("aside"), &checkpoint)?;
    let waited = began.elapsed();
    ensure!(
        has_ended,
        "{waited:?} after the disk has stopped to answer the plugin hangs"
    );
    found.restart_plugin().await?;
    until_registered(world, &node).await?;
    // The plugin ended during this pod's Allocate call. kubelet fails the pod if the call failed; it runs if kubelet had not
    // asked yet.
    let is_settled = |pod: &Pod| ["Failed", "Running"].contains(&phase(pod)).then_some(());
    world.until_pod("caught", "to run or to fail", is_settled).await?;
    world.delete("caught").await?;
    world.start_units("after", "1", &node).await?;
    world.until_running(&["before", "after"]).await
}

/// Waits until a line of the plugin's metrics begins with `prefix`, or, without `is_there`, until none does.
async fn until_metrics(node: &SimulatedNode, prefix: &str, is_there: bool) -> Result<()> {
    let state = if is_there { "missing" } else { "there" };
    let is_so = async || {
        let text = node.plugin_metrics().await.unwrap_or_default();
        let is_met = text.lines().any(|line| line.starts_with(prefix)) == is_there;
        Ok(is_met
            .then_some(())
            .ok_or_else(|| format!("{prefix} is {state} in the plugin's metrics: {text}")))
    };
    polling::until_found(DEADLINE, is_so).await
}

/// The line of a log that holds all of these.
fn line_with(log: &Path, words: &[&str]) -> Result<String> {
    for line in files::read(log)?.lines() {
        if words.iter().all(|word| line.contains(word)) {
            return Ok(line.to_owned());
        }
    }
    bail!("no line of {} says {words:?}", log.display())
}

async fn plugin_metrics(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?.name;
    world.start_units("placed", "2", &node).await?;
    let found = world.node(&node)?;
    for line in [
        format!(r#"gpushare_device_plugin_device_healthy{{type="gpu",device="GPU-{node}-0",minor="0","#),
        format!(r#"gpushare_device_plugin_registered{{resource="{GPU_MEM}"}} 1"#),
        format!(r#"gpushare_device_plugin_registered{{resource="{GPU_SHARED}"}} 1"#),
        r#"gpushare_device_plugin_injection{mode="cdi","#.to_owned(),
        r#"gpushare_device_plugin_held_containers{reason="unplaced"} 0"#.to_owned(),
    ] {
        until_metrics(found, &line, true).await?;
    }
    let sick = format!(
        r#"gpushare_device_plugin_device_healthy{{type="gpu",device="GPU-{node}-1",minor="1",reason="Xid79"}} 0"#
    );
    found.set_health(1, GpuFault::Xid(79))?;
    until_metrics(found, &sick, true).await?;
    found.set_health(1, GpuFault::Healthy)?;
    until_metrics(found, &sick, false).await?;

    let device = gpu_of(world, "placed")?;
    let key = world.key("placed");
    let cluster = world.cluster()?;
    let bound = ["bound", &key, &node, &device, "gpu-memory"];
    line_with(cluster.scheduler.log(), &bound)?;
    let plugin = cluster.node(&node)?.plugin().context("no plugin runs there")?;
    let starts = ["a container starts", &key, "main", &node, &device, "gpu-memory"];
    line_with(plugin.log(), &starts)?;
    let allocated = line_with(plugin.log(), &["allocated"])?;
    // In mode `cdi` Allocate does not know its pod, and a log line that names one would be a guess.
    let has_pod = allocated.contains("pod=");
    ensure!(!has_pod, "the answer to Allocate names a pod: {allocated}");

    let stray = PodBuilder::units("stray", 1).at("/spec/nodeName", json!(node));
    world.create(stray).await?;
    let held = r#"gpushare_device_plugin_held_containers{reason="unplaced"} 1"#;
    until_metrics(world.node(&node)?, held, true).await?;
    world.delete("stray").await
}
