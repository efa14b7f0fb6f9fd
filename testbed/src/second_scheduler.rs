//! A second kube-scheduler as `deploy/components/second-scheduler` runs it: two pods, each with an extender and
//! a kube-scheduler that calls it over loopback.
//!
//! Each container is a process. The kube-schedulers elect a leader by a Lease. Both containers of a pod use one
//! account, with a token that names the pod.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::replicas::{self, NAMESPACE};
use kit::apiserver::{self, object};
use kit::cluster::LocalCluster;
use kit::daemons::{Daemon, Invocation, Program};
use kit::files;
use kit::http_client::{HttpClient, is_ok};
use kit::manifests;
use kit::polling;
use kit::ports::free_address;

/// Profile of the second kube-scheduler.
pub(crate) const PROFILE: &str = "gpushare-scheduler";
/// The configuration of the second kube-scheduler below `deploy/`.
const CONFIGURATION: &str = "components/second-scheduler/kube-scheduler-config.yaml";
/// The kind and name of the Lease by which the two kube-schedulers elect their leader.
pub(crate) const LEASE: (&str, &str) = ("leases", "gpushare-kube-scheduler");
/// The kind and name of the object that names the leader to the API server's policy.
pub(crate) const LEADER: (&str, &str) = ("schedulerleaders.gpushare.io", "gpushare-scheduler");
/// The names of the pods.
const PODS: [&str; 2] = ["gpushare-scheduler-0", "gpushare-scheduler-1"];
/// Longest wait for the answer of a container that may be stopped.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(50);
/// Longest wait for one condition.
const DEADLINE: Duration = Duration::from_secs(60);
/// The metric of an extender that may bind.
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
    /// Starts both pods on a cluster whose own scheduler has ended.
    pub async fn start(cluster: &LocalCluster) -> Result<Self> {
        let api = cluster.api().objects().clone();
        // A Lease that a failed scenario has left, or a late request has written, names a holder that has ended.
        clean(&api)?;
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

    /// Starts one pod of the second scheduler: the extender and kube-scheduler as two processes, with the account of the pod.
    fn start_pod(&mut self, cluster: &LocalCluster, pod: &'static str) -> Result<()> {
        replicas::write_kubeconfig(cluster, pod)?;
        self.api.create("pods", replicas::pod(pod))?;
        let kubeconfig = replicas::kubeconfig(cluster.dir(), pod);
        let addresses = Addresses {
            extender: free_address()?,
            health: free_address()?,
        };
        self.extenders.insert(pod, addresses);
        let command = |container: SchedulerContainer, program| -> Result<Invocation> {
            let name = format!("{pod}-{container:?}");
            let program = cluster.binaries().path(program)?;
            Ok(Invocation::new(&name, program, cluster.dir(), &name))
        };
        let extender = command(SchedulerContainer::Extender, Program::Scheduler)?
            .args(["--fence-bindings", "--lease-duration", "4s"])
            .kubeconfig(kubeconfig.clone())
            .flag("--listen", &addresses.extender)
            .flag("--health-listen", &addresses.health)
            .flag("--kube-scheduler-lease", LEASE.1)
            .flag("--pod-name", pod);
        let config = write_configuration(cluster, pod, addresses.extender)?;
        let kube_scheduler = command(SchedulerContainer::KubeScheduler, Program::Testbed)?
            .args(["kube-scheduler"])
            .flag("--kubeconfig", &kubeconfig.display())
            .flag("--config", &config.display())
            .flag("--host-name", pod);
        for (container, invocation) in [
            (SchedulerContainer::Extender, extender),
            (SchedulerContainer::KubeScheduler, kube_scheduler),
        ] {
            let daemon = Daemon::start(invocation, cluster.crashes())?;
            self.containers.insert((pod, container), daemon);
        }
        Ok(())
    }

    /// The process of a container of a pod.
    pub fn container(&mut self, pod: &str, container: SchedulerContainer) -> Result<&mut Daemon> {
        let mut containers = self.containers.iter_mut();
        let found = containers.find(|(key, _)| **key == (pod, container));
        let (_, daemon) = found.with_context(|| format!("there is no pod {pod}"))?;
        Ok(daemon)
    }

    /// URL of a pod's extender.
    pub fn extender(&self, pod: &str) -> Result<String> {
        let addresses = self.extenders.get(pod);
        let addresses = addresses.with_context(|| format!("there is no pod {pod}"))?;
        Ok(format!("http://{}/gpushare-scheduler", addresses.extender))
    }

    /// The pod whose kube-scheduler holds the Lease; empty if none does.
    pub fn holder(&self) -> String {
        let lease = self.api.get(LEASE.0, NAMESPACE, LEASE.1).unwrap_or_default();
        let holder = object::text(&lease, "/spec/holderIdentity").rsplit_once('_');
        holder.map_or(String::new(), |(pod, _)| pod.to_owned())
    }

    /// Waits until the kube-scheduler of another pod than this holds the Lease; the name of that pod.
    pub(crate) async fn until_held_by_another_than(&self, pod: &str) -> Result<String> {
        let missing = || format!("no kube-scheduler but that of {pod:?} holds the Lease");
        let found = async || {
            let holder = Some(self.holder()).filter(|holder| !holder.is_empty() && holder != pod);
            Ok(holder.ok_or_else(missing))
        };
        polling::until_found(DEADLINE, found).await
    }

    /// Writes another holder into the object [`LEASE`] or [`LEADER`], as a person may.
    pub(crate) fn set_holder(&self, (resource, name): (&str, &str), holder: &str) -> Result<()> {
        let patch = json!({"spec": {"holderIdentity": holder}});
        self.api.patch(resource, NAMESPACE, name, patch)?;
        Ok(())
    }

    /// Fails if the extenders of more than one pod say, in a metric, that they may bind.
    pub(crate) async fn ensure_one_decides(&self) -> Result<()> {
        let client = HttpClient::new();
        let mut deciders = Vec::new();
        for (pod, addresses) in &self.extenders {
            let url = format!("http://{}/metrics", addresses.health);
            let asked = tokio::time::timeout(ANSWER_TIMEOUT, client.get(&url)).await;
            // A container that is stopped or dead decides nothing.
            let body = asked.ok().and_then(Result::ok).unwrap_or_default().1;
            if String::from_utf8_lossy(&body)
                .lines()
                .any(|line| line == IS_LEADER)
            {
                deciders.push(*pod);
            }
        }
        ensure!(deciders.len() <= 1, "{deciders:?} decide at one time");
        Ok(())
    }

    /// Ends all processes and removes their objects.
    pub fn end(self) -> Result<()> {
        let api = self.api.clone();
        drop(self);
        clean(&api)
    }
}

/// Removes the objects of the pods, and the Lease of their kube-schedulers.
fn clean(api: &apiserver::ApiObjects) -> Result<()> {
    if api.get(LEASE.0, NAMESPACE, LEASE.1).is_ok() {
        api.delete(LEASE.0, NAMESPACE, LEASE.1, None)?;
    }
    replicas::clean(api)
}

/// The configuration of a pod's kube-scheduler: the shipped one, with short times and the address of the pod's extender.
fn write_configuration(cluster: &LocalCluster, pod: &str, extender: SocketAddr) -> Result<PathBuf> {
    let shipped = cluster.deploy().join(CONFIGURATION);
    let mut configuration: Value = serde_yaml_ng::from_str(&files::read(&shipped)?)
        .with_context(|| format!("cannot read {}", shipped.display()))?;
    let url = format!("http://{extender}/gpushare-scheduler");
    for (pointer, field, value) in [
        ("/leaderElection", "leaseDuration", json!("4s")),
        ("/leaderElection", "renewDeadline", json!("2s")),
        ("/leaderElection", "retryPeriod", json!("400ms")),
        ("/extenders/0", "urlPrefix", json!(url)),
        ("", "podMaxBackoffSeconds", json!(2)),
    ] {
        let object = configuration.pointer_mut(pointer).and_then(Value::as_object_mut);
        object
            .with_context(|| format!("{}: no object {pointer}", shipped.display()))?
            .insert(field.to_owned(), value);
    }
    let path = cluster.dir().join(format!("{pod}.kube-scheduler.yaml"));
    files::write(&path, &configuration.to_string())?;
    Ok(path)
}

/// Waits until `/readyz` at this address answers with success.
async fn until_ready(health: SocketAddr) -> Result<()> {
    let url = format!("http://{health}/readyz");
    let failure = format!("{url} is not ready in time");
    polling::until(DEADLINE, failure, || is_ok(&url)).await
}
