//! The cluster of a scenario: its pods, its view of the API, and the parts that it may break.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use futures::TryStreamExt;
use futures::future::try_join_all;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod};
use kube::api::{Api, DeleteParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use proto::device::Device;
use proto::record::MEM_ASSIGNED;
use serde_json::json;
use tracing::warn;

use super::{DEADLINE, NO_NODE, Scenario, breaking, old_nodes, sampling};
use kit::cluster::webhooks::CONFIGURATION as WEBHOOKS;
use kit::cluster::{LocalCluster, SimulatedNode};
use kit::daemons::Invocation;
use kit::invariants::{self, HeldAmounts};
use kit::kubelet::Kubelet;
use kit::observer::{ClusterSnapshot, Condition, Observer};
use kit::parts::{ClusterPart, Commands, Need};
use kit::pod_fields::{
    container_statuses, containers, device_record, is_running, node_of, phase, unscheduled_because,
};
use kit::pods;
use kit::pods::{NamespacePods, PodBuilder};

/// The `schedulerName` of pods that no scheduler places.
pub(super) const NO_SCHEDULER: &str = "no-scheduler";

/// A cluster as scenarios see it.
#[derive(Debug)]
pub struct World {
    pub(super) pods: NamespacePods,
    pub(super) observer: Observer,
    pub(super) namespace: String,
    pub(super) scheduler_name: Option<String>,
    /// The testbed's cluster; none on a real cluster.
    pub(super) cluster: Option<LocalCluster>,
    /// The commands that break parts of a real cluster, if that is allowed.
    pub(super) commands: Option<Commands>,
    /// Parts of a real cluster that were killed and may not serve again yet.
    pub(super) killed: Vec<breaking::Killed>,
    /// The usual command line of the testbed's scheduler, if the scenario has given it further flags.
    usual_scheduler: Option<Invocation>,
    /// True if pods pass gpushare's webhooks.
    pub(super) has_webhooks: bool,
    /// Pods (`namespace/name`) that the checks skip: their records are broken on purpose, or their containers see no device.
    pub(super) excused: BTreeSet<String>,
}

impl World {
    /// Creates the namespace and waits until the watches have shown the cluster.
    pub async fn new(
        client: Client,
        namespace: &str,
        scheduler_name: Option<String>,
        cluster: Option<LocalCluster>,
    ) -> Result<Self> {
        let object: Namespace = serde_json::from_value(json!({"metadata": {"name": namespace}}))?;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let created = namespaces.create(&PostParams::default(), &object).await;
        created.with_context(|| format!("cannot create namespace {namespace}"))?;
        // World and cluster share one observer: a later reader sees everything that a wait has seen.
        let observer = match &cluster {
            Some(cluster) => cluster.observer().clone(),
            None => Observer::start(&client),
        };
        observer.synced(DEADLINE).await?;
        let configurations: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
        let webhooks = configurations.get_opt(WEBHOOKS).await;
        let has_webhooks = webhooks.context("cannot read webhook configurations")?.is_some();
        Ok(Self {
            pods: NamespacePods::of(&client, namespace),
            observer,
            namespace: namespace.to_owned(),
            scheduler_name,
            cluster,
            commands: None,
            killed: Vec::new(),
            usual_scheduler: None,
            has_webhooks,
            excused: BTreeSet::new(),
        })
    }

    /// Lets scenarios break parts of a real cluster by these commands.
    #[must_use]
    pub fn broken_by(self, commands: Option<Commands>) -> Self {
        Self { commands, ..self }
    }

    /// Runs a scenario, checks every invariant at its end, and deletes its pods; a daemon that ends by itself is an error.
    pub async fn run(&mut self, scenario: &Scenario) -> Result<()> {
        let Some(cluster) = &self.cluster else {
            return self.run_and_verify(scenario).await;
        };
        let crashes = cluster.crashes().clone();
        tokio::select! {
            // A crash explains a failed scenario better than the timeout that it leads to.
            biased;
            crash = crashes.first() => Err(crash.into()),
            result = self.run_and_verify(scenario) => result,
        }
    }

    /// Runs a scenario, takes its flags from the scheduler, waits for the parts that it killed, checks the invariants, and deletes
    /// its pods.
    pub(super) async fn run_and_verify(&mut self, scenario: &Scenario) -> Result<()> {
        // The body is followed by the invariants and by an empty namespace, so that a scenario cannot hide
        // damage from the next one.
        let tried = (scenario.body)(self).await;
        if let Some(usual) = self.usual_scheduler.take() {
            self.restart_scheduler_as(usual).await?;
        }
        tried?;
        if !self.killed.is_empty() {
            breaking::until_ready(self).await?;
        }
        self.verify().await.context("at the end")?;
        self.clear().await
    }

    /// Makes the cluster usable again after a scenario that failed half-way, as far as possible.
    pub(crate) async fn recover(&mut self) {
        self.excused.clear();
        if let Some(commands) = &self.commands
            && commands.allow(Need::Pause(ClusterPart::Scheduler))
            && let Err(error) = breaking::resume_scheduler(self).await
        {
            warn!(%error, "the scheduler cannot go on");
        }
        // Everything that a scenario of the testbed may have left behind is undone in turn: injected faults, a
        // stopped scheduler, dead daemons, another kube-scheduler, extra nodes.
        let cleared = if let Some(cluster) = &mut self.cluster {
            cluster.api().faults().clear();
            if let Err(error) = cluster.scheduler.resume() {
                warn!(%error, "the scheduler cannot go on");
            }
            if let Err(error) = cluster.restart_ended_daemons().await {
                warn!(%error, "a daemon cannot be started again");
            }
            if let Err(error) = cluster.start_kube_scheduler().await {
                warn!(%error, "the scheduling loop does not come back");
            }
            sampling::remove_full_nodes(cluster.api().objects());
            old_nodes::remove_old_node(self).await
        } else {
            self.clear().await
        };
        if let Err(error) = cleared {
            warn!(%error, "pods of a failed scenario are left");
        }
    }

    /// Removes the namespace and the pods of the scenarios, and returns the testbed's cluster, if it is one.
    pub async fn end(self) -> Result<Option<LocalCluster>> {
        self.clear().await?;
        let namespaces: Api<Namespace> = Api::all(self.client());
        let deleted = namespaces.delete(&self.namespace, &DeleteParams::default()).await;
        deleted.context("cannot delete the namespace")?;
        Ok(self.cluster)
    }

    /// A client of the API server.
    pub(super) fn client(&self) -> Client {
        self.pods.api().clone().into_client()
    }

    /// The testbed's cluster; an error on a real cluster.
    pub(super) fn cluster(&mut self) -> Result<&mut LocalCluster> {
        let cluster = self.cluster.as_mut();
        cluster.context("this needs the testbed's own cluster")
    }

    /// A node of the testbed's cluster; an error on a real cluster.
    pub(super) fn node(&mut self, name: &str) -> Result<&mut SimulatedNode> {
        self.cluster()?.node(name)
    }

    /// Restarts the scheduler with further flags, which it has until the end of the scenario, and waits until it is ready.
    pub(super) async fn add_scheduler_flags(&mut self, flags: &[&str]) -> Result<()> {
        let usual = self.cluster()?.scheduler.invocation().clone();
        let extended = usual.clone().args(flags.iter().copied());
        // Flags that come on top of others end with them.
        self.usual_scheduler.get_or_insert(usual);
        self.restart_scheduler_as(extended).await
    }

    /// Restarts the scheduler with this command line and waits until it is ready.
    pub(super) async fn restart_scheduler_as(&mut self, invocation: Invocation) -> Result<()> {
        self.cluster()?.scheduler.restart_as(invocation).await?;
        self.cluster()?.until_scheduler_ready(DEADLINE).await
    }

    /// Starts the testbed's scheduler again and waits until it is ready.
    pub(super) async fn restart_scheduler(&mut self) -> Result<()> {
        let usual = self.cluster()?.scheduler.invocation().clone();
        self.restart_scheduler_as(usual).await
    }

    /// The key of a pod of the scenario's namespace in a [`ClusterSnapshot`].
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.namespace)
    }

    /// Creates a pod for the scheduler that the scenarios use.
    pub(super) async fn create(&self, spec: PodBuilder) -> Result<Pod> {
        let spec = match &self.scheduler_name {
            Some(name) => spec.scheduler(name),
            None => spec,
        };
        self.pods.create(&spec).await
    }

    /// Creates pods concurrently; returns their names.
    pub(super) async fn create_all(&self, specs: impl Iterator<Item = PodBuilder>) -> Result<Vec<String>> {
        let pods = try_join_all(specs.map(|spec| self.create(spec))).await?;
        Ok(pods.iter().map(Pod::name_any).collect())
    }

    /// Creates pods concurrently, and waits until they run; returns their names.
    pub(super) async fn start_all(&self, specs: impl Iterator<Item = PodBuilder>) -> Result<Vec<String>> {
        let names = self.create_all(specs).await?;
        self.until_running(&names).await?;
        Ok(names)
    }

    /// [`Self::create_all`] for pods `<prefix>-0`, `<prefix>-1`, … of as many memory units each.
    pub(super) async fn create_many(&self, prefix: &str, n_pods: usize, units: u64) -> Result<Vec<String>> {
        self.create_all(numbered(prefix, n_pods, units)).await
    }

    /// [`Self::start_all`] for such pods.
    pub(super) async fn start_many(&self, prefix: &str, n_pods: usize, units: u64) -> Result<Vec<String>> {
        self.start_all(numbered(prefix, n_pods, units)).await
    }

    /// Creates a pod, and waits until its condition has `fragment` as the reason that it is not scheduled.
    pub(super) async fn create_refused(&self, spec: PodBuilder, fragment: &str) -> Result<()> {
        let name = self.create(spec).await?.name_any();
        self.until_refused(&name, fragment).await
    }

    /// Creates a pod, and waits until kube-scheduler finds no node for it.
    pub(super) async fn create_waiting(&self, spec: PodBuilder) -> Result<()> {
        self.create_refused(spec, NO_NODE).await
    }

    /// Deletes a pod and waits until it is gone.
    pub(super) async fn delete(&self, name: &str) -> Result<()> {
        self.pods.delete(name).await?;
        let key = self.key(name);
        let is_gone = |snapshot: &ClusterSnapshot| (!snapshot.pods.contains_key(&key)).then_some(());
        self.until(&format!("{name} to be gone"), is_gone).await
    }

    /// Deletes a pod, and waits until a pod runs that has waited for its room.
    pub(super) async fn delete_for(&self, gone: &str, waiting: &str) -> Result<()> {
        self.delete(gone).await?;
        self.until_running(&[waiting]).await
    }

    /// Waits until a condition on the cluster's objects holds, at most for the usual deadline.
    pub(super) async fn until<C: Condition>(
        &self,
        what: &str,
        condition: impl FnMut(&ClusterSnapshot) -> C,
    ) -> Result<C::Found> {
        self.until_within(DEADLINE, what, condition).await
    }

    /// Waits until a condition on the cluster's objects holds; fails early if a daemon has crashed.
    pub(super) async fn until_within<C: Condition>(
        &self,
        deadline: Duration,
        what: &str,
        condition: impl FnMut(&ClusterSnapshot) -> C,
    ) -> Result<C::Found> {
        match &self.cluster {
            Some(cluster) => cluster.until(what, deadline, condition).await,
            None => Ok(self.observer.until(what, deadline, condition).await?),
        }
    }

    /// Waits until a condition on a pod holds, which `what` describes behind the pod's name.
    pub(super) async fn until_pod<T>(
        &self,
        name: &str,
        what: &str,
        condition: impl Fn(&Pod) -> Option<T>,
    ) -> Result<T> {
        let key = self.key(name);
        let met = |snapshot: &ClusterSnapshot| condition(snapshot.pods.get(&key)?);
        self.until(&format!("{name} {what}"), met).await
    }

    /// Waits until a condition on the Device object of a node holds.
    pub(super) async fn until_device(
        &self,
        node: &str,
        what: &str,
        condition: impl Fn(&Device) -> Option<()>,
    ) -> Result<()> {
        let met = |snapshot: &ClusterSnapshot| condition(snapshot.devices.get(node)?);
        self.until(what, met).await
    }

    /// Waits until pods run; one that fails for good is an error.
    pub(super) async fn until_running(&self, names: &[impl AsRef<str> + Sync]) -> Result<()> {
        let keys: Vec<String> = names.iter().map(|name| self.key(name.as_ref())).collect();
        let run = |snapshot: &ClusterSnapshot| all_run(snapshot, &keys);
        self.until(&format!("{} to run", keys.join(", ")), run).await?
    }

    /// Waits until this number of pods is bound.
    pub(super) async fn until_part_bound(
        &self,
        deadline: Duration,
        names: &[String],
        n_bound: usize,
    ) -> Result<()> {
        let keys: Vec<String> = names.iter().map(|name| self.key(name)).collect();
        let enough = |snapshot: &ClusterSnapshot| {
            let pods = keys.iter().filter_map(|key| snapshot.pods.get(key));
            (pods.filter_map(node_of).count() >= n_bound).then_some(())
        };
        let what = format!("{n_bound} pods to be bound");
        self.until_within(deadline, &what, enough).await
    }

    /// Creates a pod and waits until it runs.
    pub(super) async fn start(&self, spec: PodBuilder) -> Result<Pod> {
        let name = self.create(spec).await?.name_any();
        self.until_running(&[&name]).await?;
        self.pod(&name)
    }

    /// Creates a pod that requests memory units on one node, and waits until it runs.
    pub(super) async fn start_units(&self, name: &str, units: impl Display, node: &str) -> Result<Pod> {
        self.start(PodBuilder::units(name, units).on(node)).await
    }

    /// Starts pods `<prefix>-<idx>` on a node, each of all units of one of its GPUs; the first `n_left` GPUs get none.
    pub(super) async fn fill_gpus(&self, prefix: &str, node: &GpuNode, n_left: usize) -> Result<()> {
        for (idx, units) in node.units.iter().enumerate().skip(n_left) {
            let name = format!("{prefix}-{idx}");
            self.start_units(&name, units, &node.name).await?;
        }
        Ok(())
    }

    /// Creates a pod that requests memory units on one node, and waits until kube-scheduler finds no room for it there.
    pub(super) async fn create_waiting_units(
        &self,
        name: &str,
        units: impl Display,
        node: &str,
    ) -> Result<()> {
        self.create_waiting(PodBuilder::units(name, units).on(node)).await
    }

    /// Ends the container `main` of a running pod, and waits until kubelet has started it again.
    pub(super) async fn restart_container(&mut self, node: &str, name: &str) -> Result<()> {
        let starts = |pod: &Pod| {
            let mut statuses = container_statuses(pod);
            Some(statuses.find(|container| container.name == "main")?.restart_count)
        };
        let before = starts(&self.pod(name)?).with_context(|| format!("{name} does not run"))?;
        let namespace = self.namespace.clone();
        let kubelet = self.node(node)?.kubelet();
        kubelet.restart_container(&namespace, name, "main")?;
        let again = |pod: &Pod| (starts(pod)? > before && is_running(pod)).then_some(());
        self.until_pod(name, "to start again", again).await
    }

    /// Waits until a pod is bound.
    pub(super) async fn until_bound(&self, name: &str) -> Result<()> {
        self.until_pod(name, "to be bound", |pod| node_of(pod).map(drop))
            .await
    }

    /// Waits until the message of a pod's condition `PodScheduled` contains `fragment`, as the reason that it is not scheduled.
    pub(super) async fn until_refused(&self, name: &str, fragment: &str) -> Result<()> {
        let says_so = |pod: &Pod| unscheduled_because(pod)?.contains(fragment).then_some(());
        let what = format!("to be refused with {fragment:?}");
        self.until_pod(name, &what, says_so).await
    }

    /// Creates a pod that breaks a rule, and checks that a webhook, or else the filter, refuses it in these words.
    pub(super) async fn ensure_is_refused(&self, spec: PodBuilder, words: &str) -> Result<()> {
        match self.create(spec).await {
            Ok(pod) if self.has_webhooks => bail!("{} was made although it breaks a rule", pod.name_any()),
            Ok(pod) => self.until_refused(&pod.name_any(), words).await,
            Err(error) if self.has_webhooks => {
                let text = format!("{error:#}");
                ensure!(
                    text.contains("denied the request") && text.contains(words),
                    "not refused with {words:?}: {text}"
                );
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Waits until the plugin has marked a pod as assigned, which it does after its containers have started.
    pub(super) async fn until_assigned(&self, name: &str) -> Result<()> {
        let is_assigned = |pod: &Pod| (pod.annotations().get(MEM_ASSIGNED)? == "true").then_some(());
        self.until_pod(name, "to be marked as assigned by the plugin", is_assigned)
            .await
    }

    /// Waits until there is an event about an object, with this reason and these words in its message.
    pub(super) async fn until_event(
        &self,
        namespace: &str,
        object: &str,
        reason: &str,
        words: &str,
    ) -> Result<()> {
        let events: Api<Event> = Api::namespaced(self.client(), namespace);
        let mut events = std::pin::pin!(watcher(events, watcher::Config::default()).applied_objects());
        let found = async {
            while let Some(event) = events.try_next().await.context("cannot watch events")? {
                if event.involved_object.name.as_deref() == Some(object)
                    && event.reason.as_deref() == Some(reason)
                    && event.message.is_some_and(|message| message.contains(words))
                {
                    return Ok(());
                }
            }
            bail!("the watch of events has ended")
        };
        tokio::time::timeout(DEADLINE, found)
            .await
            .with_context(|| format!("no event {reason} with {words:?} about {object}"))?
    }

    /// The same for a pod of the scenario's namespace.
    pub(super) async fn until_pod_event(&self, pod: &str, reason: &str, words: &str) -> Result<()> {
        self.until_event(&self.namespace, pod, reason, words).await
    }

    /// A pod of the scenario's namespace, as the watches have shown it last.
    pub(super) fn pod(&self, name: &str) -> Result<Pod> {
        let pod = self.observer.now().pods.remove(&self.key(name));
        pod.with_context(|| format!("there is no pod {name}"))
    }

    /// The Device object of a node, as the watches have shown it last.
    pub(super) fn device(&self, node: &str) -> Result<Device> {
        let device = self.observer.now().devices.remove(node);
        device.context("the node has no Device object")
    }

    /// The amounts that pods hold of each GPU.
    pub(super) fn held_amounts(&self) -> HeldAmounts {
        invariants::held_amounts(&self.observer.now(), &self.excused)
    }

    /// The minor numbers of the GPUs in a pod's record.
    pub(super) fn minors(&self, name: &str) -> Result<Vec<i32>> {
        let record = invariants::record(&self.pod(name)?);
        let record = record.map_err(|problem| anyhow!("{name}: {problem}"))?;
        Ok(record.into_iter().map(|(minor, _)| minor).collect())
    }

    /// Checks that `variable`, as container `main` printed it last, lists the devices of type `kind` in the pod's record.
    pub(super) async fn ensure_shown(&self, name: &str, kind: &str, variable: &str) -> Result<()> {
        let record = device_record(&self.pod(name)?).unwrap_or_default();
        let devices = record.get(kind).into_iter().flatten();
        let recorded: Vec<&str> = devices.map(|device| device.id.as_str()).collect();
        let log = self.log(name, "main").await?;
        let shown = invariants::last_value(&log, variable);
        ensure!(
            shown == Some(&*recorded.join(",")) && !recorded.is_empty(),
            "{name} sees {shown:?}, its record names {recorded:?}"
        );
        Ok(())
    }

    /// Creates a pod and binds it to a node past the scheduler, as its author or another scheduler can.
    pub(super) async fn bind_by_hand(&mut self, spec: PodBuilder, node: &str) -> Result<Pod> {
        let pod = self.pods.create(&spec.scheduler(NO_SCHEDULER)).await?;
        let (name, namespace) = (pod.name_any(), self.namespace.clone());
        let binding =
            json!({"metadata": {"name": name, "uid": pod.uid()}, "target": {"kind": "Node", "name": node}});
        let objects = self.cluster()?.api().objects();
        objects.bind(&namespace, &name, &binding)?;
        Ok(pod)
    }

    /// The output of a container.
    pub(super) async fn log(&self, pod: &str, container: &str) -> Result<String> {
        let object = self.pod(pod)?;
        let described = containers(&object).find(|described| described.name == container);
        let described = described.with_context(|| format!("{pod} has no container {container}"))?;
        let log = pods::read_log(self.pods.api(), pod, described).await;
        log.with_context(|| format!("cannot read the log of {pod}/{container}"))
    }

    /// Checks every invariant on the API server's current objects.
    pub(super) async fn verify(&self) -> Result<()> {
        // The observer's three watches are not in step. The testbed's API server is read at one moment instead, so a difference
        // between pods and Devices is a real one.
        let mut snapshot = match &self.cluster {
            Some(cluster) => ClusterSnapshot::of(cluster.api().objects()),
            None => self.observer.now(),
        };
        let mut problems = invariants::held_amounts(&snapshot, &self.excused).violations;
        let own = self.key("");
        snapshot
            .pods
            .retain(|key, _| key.starts_with(&own) && !self.excused.contains(key));
        let views = invariants::container_views(&self.client(), &snapshot).await?;
        problems.extend(invariants::misfits(&views));
        problems.extend(invariants::clashes(&snapshot, &views));
        if problems.is_empty() {
            Ok(())
        } else {
            bail!("{}", problems.join("; "))
        }
    }

    /// Deletes all pods of the namespace and waits until they are gone, at most for the usual deadline.
    pub(super) async fn clear(&self) -> Result<()> {
        self.clear_within(DEADLINE).await
    }

    /// The same with another deadline.
    pub(super) async fn clear_within(&self, deadline: Duration) -> Result<()> {
        self.pods.delete_all().await?;
        let prefix = self.key("");
        let gone = |snapshot: &ClusterSnapshot| {
            let is_shown = snapshot.pods.keys().any(|key| key.starts_with(&prefix));
            // A pod that no watch has shown yet may still be there.
            let is_left = self.cluster.as_ref().is_some_and(|cluster| {
                let pods = cluster.api().objects().list("pods", Some(&self.namespace));
                pods.is_ok_and(|pods| !pods.is_empty())
            });
            (!is_shown && !is_left).then_some(())
        };
        self.until_within(deadline, "all pods to be gone", gone).await
    }

    /// Finds a node with at least `n_gpus` healthy GPUs.
    pub(super) fn gpu_node(&self, n_gpus: usize) -> Result<GpuNode> {
        let snapshot = self.observer.now();
        let mut units_of = BTreeMap::<String, Vec<u64>>::new();
        for gpu in invariants::held_amounts(&snapshot, &self.excused)
            .gpus
            .into_values()
        {
            if gpu.healthy {
                let unit = invariants::memory_unit(&snapshot, &gpu.node);
                units_of.entry(gpu.node).or_default().push(gpu.total / unit);
            }
        }
        let found = units_of.into_iter().find(|(_, units)| units.len() >= n_gpus);
        let (name, units) = found.with_context(|| format!("no node has {n_gpus} healthy GPUs"))?;
        Ok(GpuNode { name, units })
    }
}

/// `Some` once all these pods (`namespace/name`) run, or one has failed for good, which is an error.
pub(super) fn all_run(snapshot: &ClusterSnapshot, keys: &[String]) -> Option<Result<()>> {
    let mut pods: Vec<&Pod> = keys.iter().filter_map(|key| snapshot.pods.get(key)).collect();
    if let Some(pod) = pods.iter().find(|pod| phase(pod) == "Failed") {
        let status = pod.status.clone().unwrap_or_default();
        let why = [status.reason, status.message].map(Option::unwrap_or_default);
        return Some(Err(anyhow!("{} failed: {}", pod.name_any(), why.join(" "))));
    }
    pods.retain(|pod| is_running(pod));
    (pods.len() == keys.len()).then_some(Ok(()))
}

/// The number of healthy devices of a resource that kubelet has from plugins.
pub(super) fn n_healthy(kubelet: &Kubelet, resource: &str) -> usize {
    kubelet
        .capacity()
        .get(resource)
        .map_or(0, |(_, healthy)| *healthy)
}

/// The amount of a resource that a node has for pods.
pub(super) fn allocatable<'a>(snapshot: &'a ClusterSnapshot, node: &str, resource: &str) -> Option<&'a str> {
    let status = snapshot.nodes.get(node)?.status.as_ref()?;
    Some(&status.allocatable.as_ref()?.get(resource)?.0)
}

/// Pods `<prefix>-0`, `<prefix>-1`, … of as many memory units each.
fn numbered(prefix: &str, n_pods: usize, units: u64) -> impl Iterator<Item = PodBuilder> {
    (0..n_pods).map(move |idx| PodBuilder::units(&format!("{prefix}-{idx}"), units))
}

/// A node and its healthy GPUs.
#[derive(Clone, Debug)]
pub(super) struct GpuNode {
    pub(super) name: String,
    /// Whole memory units of each GPU.
    pub(super) units: Vec<u64>,
}

impl GpuNode {
    /// The units of each GPU, in the order in which pods fill the GPUs: a smaller pod that comes first could take the only GPU that
    /// is large enough for a larger one.
    pub(super) fn largest_first(&self) -> Vec<u64> {
        let mut units = self.units.clone();
        units.sort_unstable_by_key(|units| Reverse(*units));
        units
    }
}
