//! A second kube-scheduler as `deploy/components/second-scheduler` runs it: pods of two containers, an extender and a
//! kube-scheduler that asks it over loopback.
//!
//! Each container is a process. The kube-schedulers elect one of them by a Lease; both containers of a pod act by one
//! account, with a token that names the pod.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::apiserver;
use crate::cluster::LocalCluster;
use crate::daemons::{Crashes, Daemon, Invocation, Program};
use crate::http_client::{HttpClient, is_ok};
use crate::manifests;
use crate::ports::free_address;
use crate::replicas::{self, NAMESPACE};

/// Profile of the second kube-scheduler.
pub const PROFILE: &str = "gpushare-scheduler";
/// Its configuration below `deploy/`.
const CONFIGURATION: &str = "components/second-scheduler/kube-scheduler-config.yaml";
/// The Lease by which the kube-schedulers elect one.
const LEASE: &str = "gpushare-kube-scheduler";
/// The kind and name of the object that names the leader to the API server's policy.
const LEADER: (&str, &str) = ("schedulerleaders.gpushare.io", "gpushare-scheduler");
/// The names of the pods.
const PODS: [&str; 2] = ["gpushare-scheduler-0", "gpushare-scheduler-1"];
/// Times of the election, for the extender; shorter than by default, in the same proportions.
const FLAGS: [&str; 8] = [
    "--lease-duration",
    "4s",
    "--renew-deadline",
    "2s",
    "--retry-period",
    "400ms",
    "--bind-timeout",
    "2s",
];
/// Pause between two looks, and longest wait.
const LOOK: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(60));
/// The metric by which an extender says that it decides.
const IS_LEADER: &str = "gpushare_scheduler_is_leader 1";

/// A container of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SchedulerContainer {
    /// `gpushare-scheduler`.
    Extender,
    /// kube-scheduler, the testbed's model.
    KubeScheduler,
}

/// Two pods; dropped, their processes end.
#[derive(Debug)]
pub struct SecondScheduler {
    api: apiserver::ApiObjects,
    containers: BTreeMap<(&'static str, SchedulerContainer), Daemon>,
    extenders: BTreeMap<&'static str, Addresses>,
}

/// Addresses of an extender.
#[derive(Clone, Copy, Debug)]
struct Addresses {
    extender: SocketAddr,
    health: SocketAddr,
}

impl SecondScheduler {
    /// Starts both pods on a cluster whose only scheduler has ended.
    pub async fn start(cluster: &LocalCluster) -> Result<Self> {
        let api = cluster.api().objects().clone();
        replicas::clean(&api)?;
        for file in replicas::FENCE {
            manifests::apply_file(cluster.client(), &cluster.deploy().join(file)).await?;
        }
        let mut second = Self {
            api,
            containers: BTreeMap::new(),
            extenders: BTreeMap::new(),
        };
        for pod in PODS {
            second.start_pod(cluster, pod)?;
        }
        for addresses in second.extenders.values() {
            until_ready(addresses.health).await?;
        }
        second.until_held_by_another_than("").await?;
        Ok(second)
    }

    fn start_pod(&mut self, cluster: &LocalCluster, pod: &'static str) -> Result<()> {
        replicas::write_kubeconfig(cluster, pod)?;
        let kubeconfig = replicas::kubeconfig(cluster.dir(), pod).display().to_string();
        self.api.create("pods", replicas::pod(pod))?;
        let addresses = Addresses {
            extender: free_address()?,
            health: free_address()?,
        };
        self.extenders.insert(pod, addresses);
        let (extender, health) = (addresses.extender.to_string(), addresses.health.to_string());
        let mut args = vec![
            "--listen",
            &extender,
            "--health-listen",
            &health,
            "--kubeconfig",
            &kubeconfig,
        ];
        args.extend([
            "--kube-scheduler-lease",
            LEASE,
            "--fence-bindings",
            "--pod-name",
            pod,
            "--pod-namespace",
            NAMESPACE,
        ]);
        args.extend(FLAGS);
        self.run(
            cluster,
            (pod, SchedulerContainer::Extender),
            cluster.binaries().path(Program::Scheduler)?,
            args,
        )?;
        let config = write_configuration(cluster, pod, addresses.extender)?;
        let config = config.display().to_string();
        let args = vec![
            "kube-scheduler",
            "--kubeconfig",
            &kubeconfig,
            "--config",
            &config,
            "--host-name",
            pod,
        ];
        self.run(
            cluster,
            (pod, SchedulerContainer::KubeScheduler),
            cluster.binaries().path(Program::Testbed)?,
            args,
        )
    }

    fn run(
        &mut self,
        cluster: &LocalCluster,
        key: (&'static str, SchedulerContainer),
        program: PathBuf,
        args: Vec<&str>,
    ) -> Result<()> {
        let name = format!("{}-{:?}", key.0, key.1);
        let log = cluster.dir().join(format!("{name}.log"));
        let args = args.into_iter().map(str::to_owned).collect();
        let crashes: &Crashes = cluster.crashes();
        self.containers.insert(
            key,
            Daemon::start(
                Invocation {
                    name,
                    program,
                    args,
                    log,
                },
                crashes,
            )?,
        );
        Ok(())
    }

    fn container(&mut self, pod: &str, container: SchedulerContainer) -> Result<&mut Daemon> {
        let found = self
            .containers
            .iter_mut()
            .find(|((name, kind), _)| *name == pod && *kind == container);
        found
            .map(|(_, daemon)| daemon)
            .with_context(|| format!("there is no pod {pod}"))
    }

    /// Kills a container.
    pub async fn kill(&mut self, pod: &str, container: SchedulerContainer) -> Result<()> {
        self.container(pod, container)?.kill().await;
        Ok(())
    }

    /// Starts a container again, as kubelet does.
    pub async fn restart(&mut self, pod: &str, container: SchedulerContainer) -> Result<()> {
        Ok(self.container(pod, container)?.restart().await?)
    }

    /// Stops a container (SIGSTOP).
    pub async fn pause(&mut self, pod: &str, container: SchedulerContainer) -> Result<()> {
        Ok(self.container(pod, container)?.pause().await?)
    }

    /// Lets a container go on.
    pub async fn resume(&mut self, pod: &str, container: SchedulerContainer) -> Result<()> {
        Ok(self.container(pod, container)?.resume().await?)
    }

    /// URL of a pod's extender.
    pub fn extender(&self, pod: &str) -> Result<String> {
        let addresses = self
            .extenders
            .get(pod)
            .with_context(|| format!("there is no pod {pod}"))?;
        Ok(format!("http://{}/gpushare-scheduler", addresses.extender))
    }

    /// The pod whose kube-scheduler holds the Lease; empty if none does.
    pub fn holder(&self) -> String {
        let lease = self.api.get("leases", NAMESPACE, LEASE).unwrap_or_default();
        let holder = lease
            .pointer("/spec/holderIdentity")
            .and_then(Value::as_str)
            .unwrap_or_default();
        holder
            .rsplit_once('_')
            .map(|(pod, _)| pod.to_owned())
            .unwrap_or_default()
    }

    /// Waits until the kube-scheduler of another pod than this holds the Lease; the name of that pod.
    pub async fn until_held_by_another_than(&self, pod: &str) -> Result<String> {
        let found = async {
            loop {
                let holder = self.holder();
                if !holder.is_empty() && holder != pod {
                    return holder;
                }
                tokio::time::sleep(LOOK.0).await;
            }
        };
        tokio::time::timeout(LOOK.1, found)
            .await
            .with_context(|| format!("no kube-scheduler but that of {pod:?} holds the Lease in time"))
    }

    /// Writes another holder into the Lease, as a person may.
    pub fn give_lease_to(&self, holder: &str) -> Result<()> {
        self.api
            .patch(
                "leases",
                NAMESPACE,
                LEASE,
                json!({"spec": {"holderIdentity": holder}}),
            )
            .map(drop)
            .map_err(Into::into)
    }

    /// Names another leader to the API server's policy, as a person may.
    pub fn name_as_leader(&self, holder: &str) -> Result<()> {
        self.api
            .patch(
                LEADER.0,
                NAMESPACE,
                LEADER.1,
                json!({"spec": {"holderIdentity": holder}}),
            )
            .map(drop)
            .map_err(Into::into)
    }

    /// The pods whose extenders say that they decide.
    ///
    /// # Errors
    /// More than one says so.
    pub async fn deciders(&self) -> Result<Vec<&'static str>> {
        let client = HttpClient::new();
        let mut deciders = Vec::new();
        for (pod, addresses) in &self.extenders {
            let asked = async { client.get(&format!("http://{}/metrics", addresses.health)).await };
            // A container that is stopped or dead decides nothing.
            if let Ok(Ok((_, body))) = tokio::time::timeout(LOOK.0, asked).await
                && String::from_utf8_lossy(&body)
                    .lines()
                    .any(|line| line == IS_LEADER)
            {
                deciders.push(*pod);
            }
        }
        ensure!(deciders.len() <= 1, "{deciders:?} decide at one time");
        Ok(deciders)
    }

    /// Ends all processes and removes their objects.
    pub fn end(self) -> Result<()> {
        let api = self.api.clone();
        drop(self);
        if api.get("leases", NAMESPACE, LEASE).is_ok() {
            api.delete("leases", NAMESPACE, LEASE, None)?;
        }
        replicas::clean(&api)
    }
}

/// The configuration of a pod's kube-scheduler: the shipped one, with short times and the address of the pod's extender.
fn write_configuration(cluster: &LocalCluster, pod: &str, extender: SocketAddr) -> Result<PathBuf> {
    let shipped = cluster.deploy().join(CONFIGURATION);
    let text =
        std::fs::read_to_string(&shipped).with_context(|| format!("cannot read {}", shipped.display()))?;
    let mut configuration: Value =
        serde_yaml_ng::from_str(&text).with_context(|| format!("cannot read {}", shipped.display()))?;
    for (pointer, field, value) in [
        ("/leaderElection", "leaseDuration", "4s".to_owned()),
        ("/leaderElection", "renewDeadline", "2s".to_owned()),
        ("/leaderElection", "retryPeriod", "400ms".to_owned()),
        (
            "/extenders/0",
            "urlPrefix",
            format!("http://{extender}/gpushare-scheduler"),
        ),
    ] {
        let object = configuration.pointer_mut(pointer).and_then(Value::as_object_mut);
        object
            .with_context(|| format!("{}: no {pointer}", shipped.display()))?
            .insert(field.to_owned(), value.into());
    }
    let object = configuration
        .as_object_mut()
        .context("the configuration is no object")?;
    object.insert("podMaxBackoffSeconds".to_owned(), 2.into());
    let path = cluster.dir().join(format!("{pod}.kube-scheduler.yaml"));
    std::fs::write(&path, configuration.to_string())
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

async fn until_ready(health: SocketAddr) -> Result<()> {
    let url = format!("http://{health}/readyz");
    let ready = async {
        while !is_ok(&url).await {
            tokio::time::sleep(LOOK.0).await;
        }
    };
    tokio::time::timeout(LOOK.1, ready)
        .await
        .with_context(|| format!("{url} is not ready in time"))
}
