//! Kills, stops and starts the parts of a scenario's cluster: processes of the testbed, or those of a real cluster by commands.
//!
//! On a real cluster the API server shows when a part serves again, and the plugin's log when kubelet has accepted it.

use std::collections::BTreeSet;
use std::future::ready;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http::StatusCode;
use k8s_openapi::api::core::v1::{ContainerStatus, Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, LogParams};
use proto::resource::{GPU_MEM, GPU_SHARED};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{DEADLINE, World};
use kit::files;
use kit::http_client::HttpClient;
use kit::kubelet::{Kubelet, KubeletConfig};
use kit::observer::ClusterSnapshot;
use kit::parts::{ClusterPart, Commands, NodeFile};
use kit::pod_fields::{container_statuses, node_of};
use kit::polling;

/// The label of the pods of both daemons in `deploy/`.
pub(super) const NAME_LABEL: &str = "app.kubernetes.io/name";
/// The value of [`NAME_LABEL`] on pods of the device plugin.
pub(super) const PLUGIN: &str = "gpushare-device-plugin";
const SCHEDULER: &str = "gpushare-scheduler";

/// The line that the plugin logs when kubelet has accepted its registration.
const REGISTERED: &str = "registered with kubelet";

/// A part of the cluster that was killed.
#[derive(Debug)]
pub(super) struct Killed {
    part: ClusterPart,
    node: String,
    at: Instant,
    /// IDs of its containers, as the API server showed them before; empty if it runs in no pod.
    containers: BTreeSet<String>,
}

impl Killed {
    /// Returns true if every container that the part had when it was killed has been replaced by a started one.
    fn has_begun(&self, snapshot: &ClusterSnapshot) -> bool {
        let mut now = containers(snapshot, self.part, &self.node);
        self.containers.is_empty() || now.all(|status| self.is_replaced_by(status))
    }

    /// Returns true if the container runs and is none of those that the part had.
    fn is_replaced_by(&self, status: &ContainerStatus) -> bool {
        let is_started = status.state.as_ref().is_some_and(|state| state.running.is_some());
        is_started && !self.containers.contains(&id(status))
    }

    /// A sentence if the part does not serve again yet: a container of it has not been replaced or is not ready.
    fn not_serving_again(&self, snapshot: &ClusterSnapshot) -> Option<String> {
        let is_ready = self.has_begun(snapshot)
            && containers(snapshot, self.part, &self.node).all(|status| status.ready);
        (!is_ready).then(|| format!("{} does not serve again", self.part))
    }
}

/// The ID of a container; empty before its first start.
fn id(status: &ContainerStatus) -> String {
    status.container_id.clone().unwrap_or_default()
}

/// The containers of a part, by the labels and names of `deploy/`.
fn containers<'a>(
    snapshot: &'a ClusterSnapshot,
    part: ClusterPart,
    node: &'a str,
) -> impl Iterator<Item = &'a ContainerStatus> {
    let (pod, container) = match part {
        ClusterPart::Plugin => (PLUGIN, PLUGIN),
        ClusterPart::Scheduler => (SCHEDULER, SCHEDULER),
        ClusterPart::KubeScheduler => (SCHEDULER, "kube-scheduler"),
        // They run in no pod of gpushare.
        ClusterPart::Kubelet | ClusterPart::Containerd | ClusterPart::Apiserver => ("", ""),
    };
    let on_node = move |of: &Pod| part != ClusterPart::Plugin || node_of(of) == Some(node);
    let pods = snapshot.pods.values();
    let pods = pods.filter(move |of| is_named(of, pod) && on_node(of));
    let statuses = pods.flat_map(container_statuses);
    statuses.filter(move |status| status.name == container)
}

/// Returns true if a pod's label [`NAME_LABEL`] has this value.
pub(super) fn is_named(pod: &Pod, name: &str) -> bool {
    pod.labels().get(NAME_LABEL).is_some_and(|label| label == name)
}

/// Returns true if the node's condition `Ready` is true.
fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// A sentence about the nodes with a Device object that are not ready or offer no devices yet; `None` if there are none.
fn unready_nodes(snapshot: &ClusterSnapshot) -> Option<String> {
    let mut unready = Vec::new();
    for name in snapshot.devices.keys() {
        let is_ready = snapshot.nodes.get(name).is_some_and(is_ready);
        if !is_ready || !snapshot.offers(name, GPU_SHARED) || !snapshot.offers(name, GPU_MEM) {
            unready.push(name.as_str());
        }
    }
    (!unready.is_empty()).then(|| format!("not ready, or without devices: {}", unready.join(", ")))
}

/// The commands of a real cluster.
fn commands(world: &World) -> Result<&Commands> {
    let commands = world.commands.as_ref();
    commands.context("this needs the file of --break-with")
}

/// Kills a part and starts it again, unless something else starts it; does not wait until the part serves.
pub(super) async fn restart(world: &mut World, part: ClusterPart, node: &str) -> Result<()> {
    restart_without(world, part, node, None).await
}

/// Kills a part and starts it again, without the node's `file` if one is named: it is removed while the part is down.
pub(super) async fn restart_without(
    world: &mut World,
    part: ClusterPart,
    node: &str,
    file: Option<NodeFile>,
) -> Result<()> {
    if world.cluster.is_some() {
        return restart_in_testbed(world, part, node, file).await;
    }
    // A part that was killed before may not have been started again yet, and then there is nothing to kill.
    let begun = |snapshot: &ClusterSnapshot| {
        let mut killed = world.killed.iter().filter(|killed| killed.part == part);
        killed.all(|killed| killed.has_begun(snapshot)).then_some(())
    };
    world.until(&format!("{part} to be started again"), begun).await?;
    world.killed.retain(|killed| killed.part != part);
    // The IDs are noted before the kill: later only other IDs prove that kubelet has started the part again, as
    // the old status stays for a while.
    let containers = containers(&world.observer.now(), part, node).map(id).collect();
    world.killed.push(Killed {
        part,
        node: node.to_owned(),
        at: Instant::now(),
        containers,
    });
    let commands = commands(world)?;
    commands.kill(part, node).await?;
    if let Some(file) = file {
        commands.remove(file, node).await?;
    }
    commands.start(part, node).await
}

/// Kills a part of the testbed and starts it again, without the named file if there is one.
async fn restart_in_testbed(
    world: &mut World,
    part: ClusterPart,
    node: &str,
    file: Option<NodeFile>,
) -> Result<()> {
    let cluster = world.cluster()?;
    match (part, file) {
        (ClusterPart::Plugin, None) => cluster.node(node)?.restart_plugin().await,
        (ClusterPart::Scheduler, None) => Ok(cluster.scheduler.restart().await?),
        (ClusterPart::KubeScheduler, None) => cluster.start_kube_scheduler().await,
        (ClusterPart::Kubelet, None) => cluster.node(node)?.restart_kubelet().await,
        (ClusterPart::Kubelet, Some(NodeFile::KubeletCheckpoint)) => {
            let node = cluster.node(node)?;
            // kubelet may have no checkpoint yet.
            let remove = |config: &KubeletConfig| drop(std::fs::remove_file(config.checkpoint()));
            node.restart_kubelet_with(remove).await
        }
        (part, _) => bail!("the testbed has no {part} that can be killed so"),
    }
}

/// Stops the scheduler's process.
pub(super) async fn pause_scheduler(world: &mut World) -> Result<()> {
    match &world.cluster {
        Some(cluster) => Ok(cluster.scheduler.pause().await?),
        None => commands(world)?.pause(ClusterPart::Scheduler, "").await,
    }
}

/// Lets the scheduler's process go on.
pub(super) async fn resume_scheduler(world: &mut World) -> Result<()> {
    match &world.cluster {
        Some(cluster) => Ok(cluster.scheduler.resume()?),
        None => commands(world)?.resume(ClusterPart::Scheduler, "").await,
    }
}

/// Removes the plugin's sockets of a node, and returns when the plugin has made new ones. On a real cluster the command that
/// removes them has to wait for the new ones.
pub(super) async fn replace_plugin_sockets(world: &mut World, node: &str) -> Result<()> {
    if world.cluster.is_none() {
        return commands(world)?.remove(NodeFile::PluginSockets, node).await;
    }
    let sockets = world.node(node)?.plugin_sockets()?;
    ensure!(!sockets.is_empty(), "the plugin has no socket");
    for socket in &sockets {
        files::remove(socket)?;
    }
    let are_back = || ready(sockets.iter().all(|socket| socket.exists()));
    polling::until(DEADLINE, "the sockets do not come back", are_back).await
}

/// Removes the socket at which kubelet of a node takes registrations.
pub(super) async fn remove_kubelet_socket(world: &mut World, node: &str) -> Result<()> {
    if world.cluster.is_none() {
        return commands(world)?.remove(NodeFile::KubeletSocket, node).await;
    }
    let socket = world.node(node)?.kubelet().config().plugin_socket();
    files::remove(&socket)
}

/// Waits until the plugin of a node, which was killed, runs and waits for kubelet.
pub(super) async fn until_plugin_waits_for_kubelet(world: &mut World, node: &str) -> Result<()> {
    if world.cluster.is_none() {
        let killed = world.killed.last().context("the plugin was not killed")?;
        let runs = |snapshot: &ClusterSnapshot| {
            let mut statuses = containers(snapshot, ClusterPart::Plugin, node);
            statuses.any(|status| killed.is_replaced_by(status)).then_some(())
        };
        let what = "the plugin to run without kubelet's socket";
        return world.until(what, runs).await;
    }
    let found = world.node(node)?;
    let plugin = found.plugin().context("the node has no plugin")?;
    let says_so = || ready(plugin.log_tail().contains("kubelet"));
    let failure = "the plugin does not say that kubelet is missing";
    polling::until(DEADLINE, failure, says_so).await?;
    ensure!(!plugin.is_down(), "the plugin has given up");
    Ok(())
}

/// Waits until every part that was killed serves again, and every node offers its devices.
pub(super) async fn until_ready(world: &mut World) -> Result<()> {
    let killed = std::mem::take(&mut world.killed);
    until_serving(world, &killed, DEADLINE).await
}

/// Waits until the killed parts in `killed` serve again, and every node offers its devices.
pub(super) async fn until_serving(world: &World, killed: &[Killed], deadline: Duration) -> Result<()> {
    if let Some(cluster) = &world.cluster {
        return cluster.until_ready(deadline).await;
    }
    let is_ready = |snapshot: &ClusterSnapshot| {
        let mut missing: Vec<String> = unready_nodes(snapshot).into_iter().collect();
        for killed in killed {
            missing.extend(killed.not_serving_again(snapshot));
        }
        if missing.is_empty() {
            Ok(())
        } else {
            Err(missing.join("; "))
        }
    };
    let what = "everything that was killed to serve again";
    world.until_within(deadline, what, is_ready).await?;
    for killed in killed.iter().filter(|killed| killed.part == ClusterPart::Kubelet) {
        until_plugin_logs(world, killed, deadline).await?;
    }
    Ok(())
}

/// Waits until the plugin of a node whose kubelet was killed has registered with the next one. kubelet may write the node's
/// status a minute later, so only the plugin's log is sure; a plugin that runs in no pod is not waited for.
async fn until_plugin_logs(world: &World, killed: &Killed, deadline: Duration) -> Result<()> {
    let snapshot = world.observer.now();
    let mut pods = snapshot.pods.values().filter(|pod| is_named(pod, PLUGIN));
    let plugin = pods.find(|pod| node_of(pod) == Some(&killed.node));
    let Some(plugin) = plugin else { return Ok(()) };
    let pods: Api<Pod> = Api::namespaced(world.client(), &plugin.namespace().unwrap_or_default());
    let name = plugin.name_any();
    let has_logged = || async {
        let since = i64::try_from(killed.at.elapsed().as_secs()).unwrap_or(i64::MAX);
        let params = LogParams {
            since_seconds: Some(since.max(1)),
            ..LogParams::default()
        };
        // kubelet hands out the log, and may not serve yet.
        let log = pods.logs(&name, &params).await.unwrap_or_default();
        log.contains(REGISTERED)
    };
    let failure = format!("the plugin of {} has not registered again", killed.node);
    polling::until(deadline, failure, has_logged).await
}

/// Waits until a node's plugin serves all its resources again, to a kubelet that knew nothing of it.
pub(super) async fn until_registered(world: &mut World, node: &str) -> Result<()> {
    if world.cluster.is_some() {
        let kubelet = world.node(node)?.kubelet();
        let serves = |kubelet: &Kubelet| {
            let counts = kubelet.capacity();
            counts.len() >= 2 && counts.values().all(|(_, healthy)| *healthy > 0)
        };
        let failure = format!("the plugin of {node} has not registered again");
        kubelet.expect_until(DEADLINE, failure, serves).await?;
    }
    until_ready(world).await
}

/// Names of the nodes whose device plugins scenarios kill.
pub(super) fn plugin_nodes(world: &World) -> Vec<String> {
    match &world.cluster {
        Some(cluster) => {
            let nodes = cluster.nodes().filter(|node| node.plugin().is_some());
            nodes.map(|node| node.name().to_owned()).collect()
        }
        None => world.observer.now().devices.into_keys().collect(),
    }
}

/// The answer to a bind request that was sent to a stopped extender.
type LateAnswer = JoinHandle<Result<(StatusCode, Bytes)>>;

/// Sends a stopped extender the request to bind a pod, on a connection that it has taken before: it reads the request when it
/// goes on.
pub(super) fn bind_late(client: HttpClient, url: String, pod: &Pod, node: &str) -> LateAnswer {
    let bind = json!({
        "PodName": pod.name_any(), "PodNamespace": pod.namespace(), "PodUID": pod.uid(), "Node": node,
    });
    tokio::spawn(async move { client.post(&format!("{url}/bind"), bind.to_string()).await })
}

/// Waits for the answer of an extender that goes on after another leads; fails if it has bound the pod.
pub(super) async fn ensure_not_bound(world: &World, pod: &Pod, answer: LateAnswer) -> Result<()> {
    let answer = timeout(DEADLINE, answer).await;
    // The resumed process may also close the connection at once, which is as good as a refusal.
    if let Ok((_, body)) = answer.context("the late bind is not answered")?? {
        let answer: Value = serde_json::from_slice(&body).context("the late bind's answer")?;
        let error = answer.get("Error").and_then(Value::as_str).unwrap_or_default();
        ensure!(!error.is_empty(), "the late bind was answered with {answer}");
    }
    let now = world.pods.api().get(&pod.name_any()).await?;
    ensure!(node_of(&now).is_none(), "the late bind was written");
    Ok(())
}
