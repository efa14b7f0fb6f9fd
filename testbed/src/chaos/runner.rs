//! Runs the steps of a schedule on a cluster with the real daemons, and checks all invariants after each step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::try_join_all;
use proto::resource::{GPU_MEM, GPU_SHARED};
use tokio::time::Instant;

use super::PluginMode;
use super::accounting;
use super::recorder::RunRecorder;
use super::schedule::{ChaosStep, N_GPUS, UNITS_PER_GPU};
use kit::cluster::{CdiDir, ClusterSpec, LocalCluster, NodeSetup, SimulatedNode};
use kit::daemons::Crashes;
use kit::http_client::HttpClient;
use kit::invariants::{self, ContainerView};
use kit::kubelet::{ContainerType, Delays, Kubelet, RunState, RuntimeContainer, StartHook};
use kit::observer::ClusterSnapshot;
use kit::pod_fields::{has_ended, is_running, node_of, phase};
use kit::pods::NamespacePods;

mod batch;

/// Longest wait for one condition. In mode `envvar` each `Allocate` for a pod that is gone waits two seconds,
/// one after the other; a batch may have two such calls for each of forty pods.
const DEADLINE: Duration = Duration::from_secs(300);
/// Longest wait, after a step, until the annotations and the scheduler's amounts agree with what pods hold.
const SETTLING: Duration = Duration::from_secs(10);

/// A run: the cluster, and what the checks have to remember between two steps.
#[derive(Debug)]
pub(super) struct Runner {
    cluster: LocalCluster,
    pods: NamespacePods,
    recorder: Arc<RunRecorder>,
    /// The plugins' reactions to differences, by outcome, as counted before they were killed.
    heals: BTreeMap<String, u64>,
    /// The directory of CDI specs of each node.
    cdi: Vec<CdiDir>,
    /// The number of admissions of each node's kubelet that are recorded.
    n_admissions_seen: Vec<usize>,
    /// Pods that should exist: no step has deleted them.
    wanted: BTreeSet<String>,
    mode: PluginMode,
}

fn node_name(node: usize) -> String {
    format!("n{}", node + 1)
}

fn pod_name(number: usize) -> String {
    format!("p{number}")
}

fn pod_names(numbers: &[usize]) -> Vec<String> {
    numbers.iter().copied().map(pod_name).collect()
}

impl Runner {
    /// Starts the cluster.
    pub(super) async fn start(
        mode: PluginMode,
        seed: u64,
        deploy: std::path::PathBuf,
        recorder: &Arc<RunRecorder>,
    ) -> Result<Self> {
        let gpus: Vec<u64> = (0..N_GPUS).map(|_| UNITS_PER_GPU * 1024).collect();
        let mut nodes = Vec::new();
        for idx in 0..mode.n_nodes() {
            let (name, recorder) = (node_name(idx), Arc::clone(recorder));
            let node = mode.node(idx, &name, &gpus);
            nodes.push(NodeSetup {
                started: StartHook::new(move |start| {
                    recorder.note_start(&name, start);
                    if mode == PluginMode::Cdi {
                        recorder.note_limit(&start.container, UNITS_PER_GPU * 1024);
                    }
                }),
                disk_may_be_full: true,
                // A real kubelet waits ten seconds between two starts; the recorder adds them to the delays.
                delays: Delays {
                    start_retry: Duration::from_millis(100),
                    ..node.delays
                },
                ..node
            });
        }
        let spec = ClusterSpec {
            seed,
            deploy,
            max_backoff: Some(Duration::from_millis(500)),
            ..ClusterSpec::of(nodes)
        };
        let mut cluster = LocalCluster::start(spec).await?;
        // Until the run has ended well: the files of a failed one are evidence.
        cluster.keep_files(true);
        recorder.connect(cluster.api().objects().clone());
        let mut cdi = Vec::new();
        for node in cluster.nodes() {
            cdi.push(CdiDir::of(node.kubelet().config())?);
        }
        let pods = NamespacePods::of(cluster.client(), "default");
        Ok(Self {
            cluster,
            pods,
            recorder: Arc::clone(recorder),
            heals: BTreeMap::new(),
            cdi,
            n_admissions_seen: vec![0; mode.n_nodes()],
            wanted: BTreeSet::new(),
            mode,
        })
    }

    /// The directory of the cluster's files.
    pub(super) fn dir(&self) -> &std::path::Path {
        self.cluster.dir()
    }

    /// The daemons that have ended by themselves.
    pub(super) fn crashes(&self) -> &Crashes {
        self.cluster.crashes()
    }

    /// Runs one step, then checks every invariant.
    pub(super) async fn run_step(&mut self, step: &ChaosStep) -> Result<()> {
        self.recorder.tally().step += 1;
        match step {
            ChaosStep::Batch(batch) => batch::batch(self, batch).await?,
            ChaosStep::Delete(numbers) => self.delete(numbers).await?,
            ChaosStep::Crash(numbers) => self.crash(numbers).await?,
            ChaosStep::RestartPlugin(node) => self.restart_plugin(*node).await?,
            ChaosStep::RestartKubelet(node) => self.restart_kubelet(*node).await?,
            ChaosStep::BreakStream(node) => {
                let kubelet = self.node(*node)?.kubelet();
                let n_before = kubelet.counts().registrations;
                kubelet.drop_stream(GPU_MEM);
                // A plugin whose stream breaks registers again: a new registration shows that the plugin has noticed the break.
                let has_noticed = |kubelet: &Kubelet| kubelet.counts().registrations > n_before;
                let what = "the plugin to notice";
                self.until_kubelet(*node, what, has_noticed).await?;
                self.until_offered(*node).await?;
            }
            ChaosStep::WipeCdi(node, numbers) => {
                self.wipe_cdi(*node)?;
                self.crash(numbers).await?;
            }
        }
        self.check().await
    }

    fn node(&mut self, node: usize) -> Result<&mut SimulatedNode> {
        self.cluster.node(&node_name(node))
    }

    /// Removes all CDI specs of a node; the vendor's services write theirs again.
    fn wipe_cdi(&mut self, node: usize) -> Result<()> {
        self.cdi(node)?.wipe()?;
        self.node(node)?.write_vendor_specs()
    }

    fn cdi(&self, node: usize) -> Result<&CdiDir> {
        self.cdi.get(node).context("there is no such node")
    }

    /// Deletes pods and waits until the API server no longer shows them.
    async fn delete(&mut self, numbers: &[usize]) -> Result<()> {
        let names = pod_names(numbers);
        self.wanted.retain(|name| !names.contains(name));
        try_join_all(names.iter().map(|name| self.pods.delete(name))).await?;
        self.until_gone(numbers).await
    }

    /// Crashes every running app container of these pods, and waits until all of them have started again.
    async fn crash(&mut self, numbers: &[usize]) -> Result<()> {
        let names = pod_names(numbers);
        for node in self.cluster.nodes() {
            let kubelet = node.kubelet();
            let mut crashed = kubelet.containers();
            crashed.retain(|one| {
                let is_running = matches!(one.state, RunState::Running { .. });
                // Init containers have ended, and a container that never ran cannot crash.
                one.kind == ContainerType::App && names.contains(&one.pod) && is_running
            });
            for container in &crashed {
                kubelet.restart_container("default", &container.pod, &container.name)?;
            }
            let have_started_again = |kubelet: &Kubelet| {
                let now = kubelet.containers();
                let is_again = |old| now.iter().any(|one| is_later_start(one, old));
                crashed.iter().all(is_again)
            };
            let failure = "crashed containers do not start again";
            kubelet
                .expect_until(DEADLINE, failure, have_started_again)
                .await?;
        }
        Ok(())
    }

    /// Kills the plugin of a node, and waits until its devices are there again.
    async fn restart_plugin(&mut self, node: usize) -> Result<()> {
        self.count_heals(node).await;
        self.node(node)?.restart_plugin().await?;
        self.until_offered(node).await
    }

    /// Restarts kubelet on a node, and waits until it has synced its pods and the node offers its GPUs again.
    async fn restart_kubelet(&mut self, node: usize) -> Result<()> {
        self.node(node)?.restart_kubelet().await?;
        let what = "the restarted kubelet to have seen its pods";
        self.until_kubelet(node, what, Kubelet::has_synced).await?;
        self.until_offered(node).await
    }

    /// Waits until kubelet has devices of both resources again, and all of them are healthy.
    async fn until_offered(&mut self, node: usize) -> Result<()> {
        let what = "the plugin to register again";
        self.until_kubelet(node, what, offers_all).await
    }

    /// Waits until the kubelet of a node meets a condition; `what` names the condition in the error.
    async fn until_kubelet(
        &mut self,
        node: usize,
        what: &str,
        condition: impl FnMut(&Kubelet) -> bool,
    ) -> Result<()> {
        let failure = format!("waited in vain for {what}");
        let kubelet = self.node(node)?.kubelet();
        kubelet.expect_until(DEADLINE, failure, condition).await
    }

    /// Waits until the pods of these numbers are bound.
    async fn until_bound(&self, numbers: &[usize]) -> Result<()> {
        let names = pod_names(numbers);
        let bound = |snapshot: &ClusterSnapshot| {
            snapshot
                .has_all(&names, |pod| node_of(pod).is_some())
                .then_some(())
        };
        self.cluster.until("all pods to be bound", DEADLINE, bound).await
    }

    /// Waits until the API server shows none of these pods.
    async fn until_gone(&self, numbers: &[usize]) -> Result<()> {
        let names = pod_names(numbers);
        let gone = |snapshot: &ClusterSnapshot| snapshot.has_none_of(&names).then_some(());
        let what = "deleted pods to be gone";
        self.cluster.until(what, DEADLINE, gone).await
    }

    /// Waits until every pod runs or has ended.
    async fn until_settled(&self) -> Result<()> {
        let settled = |snapshot: &ClusterSnapshot| {
            let mut pods = snapshot.pods.values();
            pods.all(|pod| is_running(pod) || has_ended(pod)).then_some(())
        };
        let what = "every pod to run or to have ended";
        self.cluster.until(what, DEADLINE, settled).await
    }

    /// Records the admissions of kubelets, and checks the invariants.
    async fn check(&mut self) -> Result<()> {
        for (node, seen) in self.cluster.nodes().zip(&mut self.n_admissions_seen) {
            let admissions = node.kubelet().counts().admissions_since(*seen);
            *seen += admissions.len();
            for admission in admissions {
                self.recorder.note_admission(&admission);
            }
        }
        let mut snapshot = ClusterSnapshot::of(self.cluster.api().objects());
        self.recorder.replace_pods(snapshot.pods.clone());
        let (there, gone) = std::mem::take(&mut self.wanted)
            .into_iter()
            .partition(|name| snapshot.pod(name).is_some());
        self.wanted = there;
        self.recorder.note_evicted(gone);
        // A pod that kubelet refused keeps its record and holds nothing.
        snapshot.pods.retain(|_, pod| phase(pod) != "Failed");
        let accounts = invariants::held_amounts(&snapshot, &invariants::NONE_EXCUSED);
        self.recorder.note_violations(accounts.violations);
        self.check_scheduler_amounts().await;
        self.check_started_containers().await;
        Ok(())
    }

    /// The scheduler's own sums must be those of the records, as soon as its watches have delivered them.
    async fn check_scheduler_amounts(&self) {
        let (client, url) = (HttpClient::new(), self.cluster.scheduler_url());
        let until = Instant::now() + SETTLING;
        loop {
            let snapshot = ClusterSnapshot::of(self.cluster.api().objects());
            let accounts = invariants::held_amounts(&snapshot, &invariants::NONE_EXCUSED);
            let differences = accounting::differences(&client, &url, &accounts).await;
            if differences.is_empty() {
                return;
            }
            if Instant::now() > until {
                return self.recorder.note_violations(differences);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Checks that records still agree with containers that have started: a record that has been changed since
    /// counts as a wrong device.
    async fn check_started_containers(&self) {
        let api = self.cluster.api().objects().clone();
        let none = |_: &ClusterSnapshot| {
            let misplaced = misplaced(&self.cluster, &ClusterSnapshot::of(&api));
            misplaced.is_empty().then_some(())
        };
        let what = "records to agree with containers";
        let observer = self.cluster.observer();
        if observer.until(what, self.settling_time(), none).await.is_err() {
            let mut tally = self.recorder.tally();
            for (uid, n_starts, view) in misplaced(&self.cluster, &ClusterSnapshot::of(&api)) {
                tally.note_wrong(&uid, n_starts, &view);
            }
        }
    }

    /// The wait for agreement: none once a start was wrong, since records then cannot agree any more and each
    /// step would wait in vain.
    fn settling_time(&self) -> Duration {
        if self.recorder.tally().wrong.is_empty() {
            SETTLING
        } else {
            Duration::ZERO
        }
    }

    /// Adds what a plugin has counted to the sums, before it is killed and forgets it.
    async fn count_heals(&mut self, node: usize) {
        let Ok(node) = self.node(node) else { return };
        // A plugin that is down has nothing more to count.
        let text = node.plugin_metrics().await.unwrap_or_default();
        for (outcome, count) in outcomes(&text) {
            *self.heals.entry(outcome).or_default() += count;
        }
    }

    /// Ends the run; returns the plugins' reactions to differences, by outcome.
    pub(super) async fn end(mut self, keep_files: bool) -> Result<BTreeMap<String, u64>> {
        for node in 0..self.mode.n_nodes() {
            self.count_heals(node).await;
        }
        self.cluster.keep_files(keep_files);
        self.cluster.stop().await?;
        Ok(self.heals)
    }
}

/// Containers that have started and see other devices than their pods' records name now: pod UID, number of starts, and the
/// devices.
fn misplaced(cluster: &LocalCluster, snapshot: &ClusterSnapshot) -> Vec<(String, u32, ContainerView)> {
    let mut found = Vec::new();
    for node in cluster.nodes() {
        let device = snapshot.devices.get(node.name());
        for container in node.kubelet().containers() {
            let key = format!("{}/{}", container.namespace, container.pod);
            let Some(pod) = snapshot.pods.get(&key) else {
                continue;
            };
            // The container may belong to an earlier pod of the same name.
            if container.starts == 0 || pod.metadata.uid.as_ref() != Some(&container.pod_uid) {
                continue;
            }
            let should_see = invariants::should_see(pod, device, &container.name);
            if container.gpus != should_see {
                let view = ContainerView {
                    pod: key,
                    container: container.name,
                    sees: container.gpus,
                    should_see,
                };
                found.push((container.pod_uid, container.starts, view));
            }
        }
    }
    found
}

/// Returns true if kubelet has devices of both resources, and all of them are healthy.
fn offers_all(kubelet: &Kubelet) -> bool {
    let capacity = kubelet.capacity();
    for name in [GPU_MEM, GPU_SHARED] {
        let (all, healthy) = capacity.get(name).copied().unwrap_or_default();
        if all == 0 || all != healthy {
            return false;
        }
    }
    true
}

/// Returns true if `container` is a later start of the container `earlier`.
fn is_later_start(container: &RuntimeContainer, earlier: &RuntimeContainer) -> bool {
    let is_same = container.pod_uid == earlier.pod_uid && container.name == earlier.name;
    is_same && container.starts > earlier.starts
}

/// Reads the plugin's metric of its reactions to differences (repairs, refusals, reports), by outcome.
fn outcomes(text: &str) -> BTreeMap<String, u64> {
    text.lines().filter_map(outcome).collect()
}

fn outcome(line: &str) -> Option<(String, u64)> {
    let labels = line.strip_prefix("gpushare_device_plugin_identity_mismatch_total{")?;
    let outcome = labels.split_once("outcome=\"")?.1.split_once('"')?.0;
    Some((outcome.to_owned(), labels.rsplit_once(' ')?.1.parse().ok()?))
}
