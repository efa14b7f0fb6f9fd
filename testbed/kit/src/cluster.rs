//! A whole cluster on one machine: the models of API server, kubelets and kube-scheduler in this process, and
//! gpushare's real daemons as processes.
//!
//! All files are in one temporary directory. Dropping the cluster ends its processes.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::apiserver::{ApiServer, User};
use crate::connector::Connector;
use crate::daemons::{Binaries, Crashes, Daemon, Invocation, Program};
use crate::files;
use crate::http_client::{HttpClient, is_ok};
use crate::kube_scheduler::{KubeScheduler, Options, SchedulerConfiguration, SchedulingAttempt};
use crate::manifests;
use crate::observer::{ClusterSnapshot, Condition, Observer};
use crate::polling;
use crate::ports::free_address;

pub use cdi_dir::CdiDir;
pub use node::SimulatedNode;
pub use node_kind::{NodeKind, RUNTIME_CLASS};
pub use node_spec::{DriverSpecs, GpuFault, GpuSpec, NodeSetup, RuntimeSpec};
pub use webhooks::WebhookSpec;

use webhooks::InstalledWebhooks;

mod cdi_dir;
mod gpu_programs;
mod node;
mod node_kind;
mod node_spec;
pub mod webhooks;

/// The user for clients of the testbed itself and of people.
const ADMIN: &str = "admin";
/// The service account of the scheduler's Deployment.
pub const SCHEDULER_USER: &str = "system:serviceaccount:gpushare-system:gpushare-scheduler";
/// The service account of the plugin's `DaemonSet`.
pub const PLUGIN_USER: &str = "system:serviceaccount:gpushare-system:gpushare-device-plugin";
/// The user of kube-scheduler.
const KUBE_SCHEDULER_USER: &str = "system:kube-scheduler";
/// Manifests of `deploy/base` that the daemons need. The Deployment and `DaemonSet` of the daemons are left out: the testbed
/// starts the daemons as processes.
const BASE: [&str; 5] = [
    "namespace.yaml",
    "crd.yaml",
    "scheduler-rbac.yaml",
    "device-plugin-rbac.yaml",
    "device-plugin-admission.yaml",
];
/// kube-scheduler's configuration as it is shipped.
const CONFIGURATION: &str = "attach/kube-scheduler/kube-scheduler-config.yaml";

/// The specification of a cluster.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// The nodes.
    pub nodes: Vec<NodeSetup>,
    /// The directory `deploy/` of the repository.
    pub deploy: PathBuf,
    /// Settings of the webhooks, if they are installed.
    pub webhooks: Option<WebhookSpec>,
    /// Resources, besides those of the shipped configuration, that the scheduling loop asks the extender about.
    pub managed: Vec<&'static str>,
    /// Names of kube-schedulers, besides those of the shipped configuration, whose pods the scheduling loop takes.
    pub schedulers: Vec<&'static str>,
    /// Longest back-off of kube-scheduler; as in the shipped configuration, if none.
    pub max_backoff: Option<Duration>,
    /// Seed of everything random in kubelets.
    pub seed: u64,
}

impl ClusterSpec {
    /// A cluster of these nodes with the repository's own `deploy/`.
    pub fn of(nodes: Vec<NodeSetup>) -> Self {
        Self {
            nodes,
            deploy: default_deploy(),
            webhooks: None,
            managed: Vec::new(),
            schedulers: Vec::new(),
            max_backoff: None,
            seed: 0,
        }
    }
}

/// `deploy/` of the checkout that this program was built from.
pub fn default_deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy")
}

/// A running cluster.
pub struct LocalCluster {
    // Fields are dropped in this order: first the clients of the API server, then the server, then the files.
    kube_scheduler: Option<KubeScheduler>,
    /// `gpushare-scheduler`.
    pub scheduler: Daemon,
    crashes: Crashes,
    nodes: BTreeMap<String, SimulatedNode>,
    attempts: mpsc::UnboundedReceiver<SchedulingAttempt>,
    journal: mpsc::UnboundedSender<SchedulingAttempt>,
    configuration: SchedulerConfiguration,
    observer: Observer,
    client: Client,
    api: ApiServer,
    /// A second server of the same objects without tokens, for kubectl.
    open_door: Option<ApiServer>,
    binaries: Binaries,
    scheduler_address: SocketAddr,
    /// The address of the scheduler's probes and metrics.
    health_address: SocketAddr,
    /// The address of the scheduler's page and read API.
    read_address: SocketAddr,
    webhooks: Option<InstalledWebhooks>,
    deploy: PathBuf,
    dir: TempDir,
}

impl fmt::Debug for LocalCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("dir", &self.dir.path())
            .finish_non_exhaustive()
    }
}

impl LocalCluster {
    /// Starts a cluster and waits until every node offers its GPUs and the scheduler is ready.
    pub async fn start(spec: ClusterSpec) -> Result<Self> {
        let cluster = Self::launch(spec).await?;
        cluster.until_ready(Duration::from_secs(60)).await?;
        Ok(cluster)
    }

    /// Starts a cluster without waiting until it is ready.
    pub async fn launch(spec: ClusterSpec) -> Result<Self> {
        let binaries = Binaries::locate().await?;
        let scheduler_path = binaries.path(Program::Scheduler)?;
        let dir = TempDir::with_prefix("gpushare-testbed-").context("cannot make a directory")?;
        let api = ApiServer::start().await.context("cannot start the API server")?;
        let client = user_client(&api, dir.path(), ADMIN, &["system:masters"]).await?;
        for file in BASE {
            // In this order: the CustomResourceDefinition before anything that watches Device objects.
            manifests::apply_file(&client, &spec.deploy.join("base").join(file)).await?;
        }
        // The observer starts after the CustomResourceDefinition of Device objects: without it the first list would fail.
        let observer = Observer::start(&client);
        let crashes = Crashes::default();
        let mut nodes = BTreeMap::new();
        for node in spec.nodes {
            let node = SimulatedNode::start(node, dir.path(), &api, (&binaries, &crashes), spec.seed).await?;
            nodes.insert(node.name().to_owned(), node);
        }
        let webhooks = match &spec.webhooks {
            Some(webhooks) => {
                Some(InstalledWebhooks::install(webhooks, &client, &api, &spec.deploy, dir.path()).await?)
            }
            None => None,
        };
        let (scheduler_address, health_address) = (free_address()?, free_address()?);
        let read_address = free_address()?;
        let kubeconfig = user_kubeconfig(&api, dir.path(), SCHEDULER_USER, &[])?;
        // With webhooks the extender serves TLS, as it does on addresses that other machines reach.
        let listen = match &webhooks {
            Some(_) => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), scheduler_address.port()),
            None => scheduler_address,
        };
        let mut invocation = Invocation::new(
            "gpushare-scheduler",
            scheduler_path.clone(),
            dir.path(),
            "scheduler",
        )
        .flag("--listen", &listen)
        .flag("--health-listen", &health_address)
        .flag("--read-listen", &read_address)
        .kubeconfig(&kubeconfig);
        if let Some(webhooks) = &webhooks {
            invocation = invocation.args(webhooks.args());
        }
        // With webhooks the scheduler makes the authority that issues the client certificate below.
        let scheduler = Daemon::start(invocation, &crashes)?;
        let configuration = SchedulerConfiguration::read(&spec.deploy.join(CONFIGURATION))?;
        let mut configuration = match &webhooks {
            Some(webhooks) => {
                let folder = webhooks.issue(&scheduler_path, &kubeconfig).await?;
                configuration.with_tls_extenders_at(scheduler_address, folder)
            }
            None => configuration.with_extenders_at(&format!("http://{scheduler_address}")),
        };
        for resource in &spec.managed {
            configuration.manage(resource);
        }
        let more = spec.schedulers.iter().map(|name| (*name).to_owned());
        configuration.schedulers.extend(more);
        configuration.max_backoff = spec.max_backoff.unwrap_or(configuration.max_backoff);
        let (journal, attempts) = mpsc::unbounded_channel();
        let mut cluster = Self {
            kube_scheduler: None,
            scheduler,
            crashes,
            nodes,
            attempts,
            journal,
            configuration,
            observer,
            client,
            api,
            open_door: None,
            binaries,
            scheduler_address,
            health_address,
            read_address,
            webhooks,
            deploy: spec.deploy,
            dir,
        };
        cluster.start_kube_scheduler().await?;
        Ok(cluster)
    }

    /// Waits until every node's plugin has registered and the scheduler is ready.
    pub async fn until_ready(&self, deadline: Duration) -> Result<()> {
        let all_offer = |snapshot: &ClusterSnapshot| {
            let plugins = self.nodes.values().filter(|node| node.plugin().is_some());
            let missing: Vec<String> = plugins.filter_map(|node| node.missing(snapshot)).collect();
            if missing.is_empty() {
                Ok(())
            } else {
                Err(missing.join("; "))
            }
        };
        self.until("every node to offer its GPUs", deadline, all_offer)
            .await?;
        self.until_scheduler_ready(deadline).await
    }

    /// The address of the scheduler's page and read API.
    pub fn read_address(&self) -> SocketAddr {
        self.read_address
    }

    /// Waits until `GET /readyz` of the scheduler is 200.
    pub async fn until_scheduler_ready(&self, deadline: Duration) -> Result<()> {
        let url = format!("http://{}/readyz", self.health_address);
        let failure = format!("the scheduler is not ready after {deadline:?}");
        tokio::select! {
            ready = polling::until(deadline, failure, || is_ok(&url)) => ready.with_context(|| {
                format!("the last lines of the scheduler's log:\n{}", self.scheduler.log_tail())
            }),
            crash = self.crashes.first() => Err(crash.into()),
        }
    }

    /// Waits until the scheduler's `inspect` shows a node for which `condition` is true; `what` is that condition in words. The
    /// scheduler's watches may be behind the API server, and behind one another.
    pub async fn until_scheduler_shows(
        &self,
        node: &str,
        what: &str,
        deadline: Duration,
        condition: impl Fn(&Value) -> bool,
    ) -> Result<()> {
        let url = format!("{}/gpushare-scheduler/inspect/{node}", self.scheduler_url());
        let client = self.scheduler_client()?;
        let is_shown = async || {
            let (_, body) = client.get(&url).await?;
            let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
            let shown = answer.pointer("/nodes/0").filter(|node| condition(node));
            Ok(shown
                .map(drop)
                .ok_or_else(|| format!("the scheduler does not show {what} on node {node}")))
        };
        polling::until_found(deadline, is_shown).await
    }

    /// Waits until the API server's objects meet a condition; a daemon that ends by itself is an error.
    pub async fn until<C: Condition>(
        &self,
        what: &str,
        deadline: Duration,
        condition: impl FnMut(&ClusterSnapshot) -> C,
    ) -> Result<C::Found> {
        tokio::select! {
            biased;
            crash = self.crashes.first() => Err(crash.into()),
            found = self.observer.until(what, deadline, condition) => found,
        }
    }

    /// The daemons that have ended by themselves.
    pub fn crashes(&self) -> &Crashes {
        &self.crashes
    }

    /// Starts every daemon again that has ended, and forgets crashes.
    pub async fn restart_ended_daemons(&mut self) -> Result<()> {
        self.crashes.clear();
        if self.scheduler.is_down() {
            self.scheduler.restart().await?;
        }
        for node in self.nodes.values_mut() {
            if node.plugin().is_some_and(Daemon::is_down) {
                node.restart_plugin().await?;
            }
        }
        Ok(())
    }

    /// The API server.
    pub fn api(&self) -> &ApiServer {
        &self.api
    }

    /// A client of the API server with all rights.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The observer of the API server's objects.
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// A kubeconfig for kubectl, which sends no token over plain HTTP: it leads to a second server of the same objects, which
    /// asks for none, and which every user of this machine can reach.
    pub async fn kubeconfig(&mut self) -> Result<PathBuf> {
        let door = ApiServer::start_with(self.api.objects().clone(), 0).await?;
        let path = kubeconfig_path(self.dir.path(), "kubectl");
        door.kubeconfig(&path, ADMIN)?;
        self.open_door = Some(door);
        Ok(path)
    }

    /// Writes a file of Prometheus' `file_sd_configs`: the schedulers' metrics at these addresses, and those of every plugin.
    pub fn write_metrics_targets(&self, schedulers: &[SocketAddr]) -> Result<PathBuf> {
        let target = |address: SocketAddr, job: &str, node: &str| {
            let labels = json!({"job": job, "node": node, "namespace": "gpushare-system"});
            json!({"targets": [address.to_string()], "labels": labels})
        };
        let mut targets = Vec::new();
        for scheduler in schedulers {
            targets.push(target(*scheduler, "gpushare-scheduler", ""));
        }
        for (name, node) in &self.nodes {
            targets.push(target(node.metrics_address(), "gpushare-device-plugin", name));
        }
        let path = self.dir.path().join("metrics-targets.json");
        files::write(&path, &Value::from(targets).to_string())?;
        Ok(path)
    }

    /// The directory `deploy/` that it was started from.
    pub fn deploy(&self) -> &Path {
        &self.deploy
    }

    /// With `keep`, the directory of all files is left behind when the cluster ends.
    pub fn keep_files(&mut self, keep: bool) {
        self.dir.disable_cleanup(keep);
    }

    /// The directory of all files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A node.
    pub fn node(&mut self, name: &str) -> Result<&mut SimulatedNode> {
        self.nodes
            .get_mut(name)
            .with_context(|| format!("there is no node {name}"))
    }

    /// Every node.
    pub fn nodes(&self) -> impl Iterator<Item = &SimulatedNode> {
        self.nodes.values()
    }

    /// The next attempt to schedule a pod.
    pub async fn next_attempt(&mut self) -> Option<SchedulingAttempt> {
        self.attempts.recv().await
    }

    /// The attempts since the last call.
    pub fn past_attempts(&mut self) -> Vec<SchedulingAttempt> {
        std::iter::from_fn(|| self.attempts.try_recv().ok()).collect()
    }

    /// The scheduler's URL; over TLS by the name that its certificate is for.
    pub fn scheduler_url(&self) -> String {
        match &self.webhooks {
            Some(_) => InstalledWebhooks::scheduler_url(self.scheduler_address.port()),
            None => format!("http://{}", self.scheduler_address),
        }
    }

    /// A client with kube-scheduler's rights on the scheduler.
    pub fn scheduler_client(&self) -> Result<HttpClient> {
        self.scheduler_client_at(self.scheduler_address)
    }

    /// A client with kube-scheduler's rights on a scheduler at this address. Over TLS it expects the certificate of the
    /// cluster's scheduler there.
    pub fn scheduler_client_at(&self, address: SocketAddr) -> Result<HttpClient> {
        let connector = match &self.webhooks {
            Some(webhooks) => webhooks.connector(address)?,
            None => Connector::plain(),
        };
        Ok(HttpClient::by(connector))
    }

    /// A client of the scheduler that shows no certificate; the scheduler must serve over TLS.
    pub fn scheduler_reader(&self) -> Result<HttpClient> {
        let webhooks = self
            .webhooks
            .as_ref()
            .context("the scheduler serves in the clear")?;
        Ok(HttpClient::by(webhooks.anonymous(self.scheduler_address)?))
    }

    /// A connector to the webhooks that shows no client certificate, and the URL to use with it.
    pub fn webhook_connector(&self) -> Result<(Connector, String)> {
        let webhooks = self.webhooks.as_ref().context("the cluster has no webhooks")?;
        webhooks.anonymous_to_webhooks()
    }

    /// True if webhooks are installed.
    pub fn has_webhooks(&self) -> bool {
        self.webhooks.is_some()
    }

    /// The programs that the cluster starts.
    pub fn binaries(&self) -> &Binaries {
        &self.binaries
    }

    /// Ends the scheduling loop, with everything it has in flight.
    pub fn stop_kube_scheduler(&mut self) {
        self.kube_scheduler = None;
    }

    /// Starts the scheduling loop, in place of one that runs.
    pub async fn start_kube_scheduler(&mut self) -> Result<()> {
        let client = user_client(&self.api, self.dir.path(), KUBE_SCHEDULER_USER, &[]).await?;
        let options = Options {
            seed: None,
            journal: Some(self.journal.clone()),
        };
        self.kube_scheduler = Some(KubeScheduler::start(&client, &self.configuration, options)?);
        Ok(())
    }

    /// Starts the scheduling loop of a cluster without gpushare, in place of the one that runs.
    pub async fn start_bare_kube_scheduler(&mut self) -> Result<()> {
        // The next start of the scheduling loop uses the extenders again.
        let extenders = std::mem::take(&mut self.configuration.extenders);
        let started = self.start_kube_scheduler().await;
        self.configuration.extenders = extenders;
        started
    }

    /// Starts the scheduling loop with kube-scheduler's default sampling of nodes in place of the configured
    /// one.
    pub async fn start_sampling_kube_scheduler(&mut self) -> Result<()> {
        let configured = std::mem::replace(&mut self.configuration.percentage_of_nodes_to_score, 0);
        let started = self.start_kube_scheduler().await;
        self.configuration.percentage_of_nodes_to_score = configured;
        started
    }

    /// Ends the cluster, its daemons by SIGTERM; an error names the daemons that did not end cleanly.
    pub async fn stop(mut self) -> Result<()> {
        self.kube_scheduler = None;
        let grace = Duration::from_secs(10);
        let stopped = self.nodes.into_iter().map(|(name, node)| async move {
            let is_clean = node.stop(grace).await;
            (!is_clean).then(|| format!("the device plugin of {name}"))
        });
        // At the same time: each plugin waits for pods that may still arrive.
        let stopped = futures::future::join_all(stopped).await;
        let mut unclean: Vec<String> = stopped.into_iter().flatten().collect();
        if !self.scheduler.is_down() && !self.scheduler.stop(grace).await {
            unclean.push("the scheduler".to_owned());
        }
        // The observer's watches would keep connections open while the server shuts down.
        drop(self.observer);
        self.api.shutdown().await;
        if !unclean.is_empty() {
            bail!("{} did not end cleanly on SIGTERM", unclean.join(", "));
        }
        Ok(())
    }
}

fn kubeconfig_path(dir: &Path, user: &str) -> PathBuf {
    dir.join(format!("{}.kubeconfig", user.rsplit(':').next().unwrap_or(user)))
}

/// Adds a user with a token and writes a kubeconfig file for it.
pub fn user_kubeconfig(api: &ApiServer, dir: &Path, user: &str, groups: &[&str]) -> Result<PathBuf> {
    let groups = groups.iter().map(|group| (*group).to_owned()).collect();
    api.add_token(
        &format!("token-of-{}", user.replace(':', "-")),
        User {
            name: user.to_owned(),
            groups,
            ..User::default()
        },
    );
    let path = kubeconfig_path(dir, user);
    api.kubeconfig(&path, user)?;
    Ok(path)
}

/// A client with the account of a user.
pub async fn user_client(api: &ApiServer, dir: &Path, user: &str, groups: &[&str]) -> Result<Client> {
    client_of(&user_kubeconfig(api, dir, user, groups)?).await
}

/// A client of the API server that a kubeconfig file names.
pub async fn client_of(kubeconfig: &Path) -> Result<Client> {
    let file =
        Kubeconfig::read_from(kubeconfig).with_context(|| format!("cannot read {}", kubeconfig.display()))?;
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}
