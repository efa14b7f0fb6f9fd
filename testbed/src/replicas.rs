//! Several replicas of the scheduler, as a Deployment runs them: processes that elect a leader, behind
//! Services.
//!
//! Each replica has a Pod object. The leading process labels its own Pod, and the condition `Ready` follows
//! `/readyz`. A connection to a Service goes to one of the ready pods that its selector in `deploy/` selects.

use std::collections::BTreeMap;
use std::future::ready;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kube::ResourceExt;
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;

use kit::apiserver::{self, User, object};
use kit::cluster::{LocalCluster, SCHEDULER_USER};
use kit::daemons::{Crashes, Daemon, Invocation};
use kit::http_client;
use kit::manifests;
use kit::polling;
use kit::ports::free_address;

use front::{Ports, ReplicaAddresses, Selector};

mod front;

/// Namespace of the Deployment.
pub const NAMESPACE: &str = "gpushare-system";
/// Name of the Deployment, of its containers, of the extender's Service and of the Lease.
const NAME: &str = "gpushare-scheduler";
/// The kind that names the leader to the API server's policy.
const LEADERS: &str = "schedulerleaders.gpushare.io";
/// Flags of the scheduler's addresses.
const EXTENDER: &str = "--listen";
const WEBHOOKS: &str = "--webhook-listen";
const HEALTH: &str = "--health-listen";
const READ_API: &str = "--read-listen";

/// A Service of `deploy/`, and the flags that say where it leads to.
struct Service {
    flags: &'static [&'static str],
    /// Its file below `deploy/`.
    manifest: &'static str,
    name: &'static str,
}

const SERVICES: [Service; 2] = [
    Service {
        // On a cluster a port-forward leads to the page, which no Service has.
        flags: &[EXTENDER, READ_API],
        manifest: "base/scheduler.yaml",
        name: NAME,
    },
    Service {
        flags: &[WEBHOOKS],
        manifest: "components/webhook-configurations/service.yaml",
        name: "gpushare-webhook",
    },
];
/// The flags of the election, with shorter times than the defaults, so that a new leader comes soon.
const FLAGS: [&str; 4] = ["--leader-elect", "--fence-bindings", "--lease-duration", "4s"];
/// The manifests of `deploy/` by which the API server takes bindings from the leader alone.
pub(crate) const FENCE: [&str; 2] = ["base/scheduler-leader-crd.yaml", "base/scheduler-admission.yaml"];
/// The names of the policies about the leader, and of their bindings, which [`clean`] removes: they would refuse the bindings
/// of the cluster's own scheduler, which elects no leader.
const POLICIES: [&str; 4] = [
    "gpushare-scheduler-bindings",
    "gpushare-scheduler-leaders",
    "gpushare-scheduler-pods",
    "gpushare-scheduler-secrets",
];
/// The most replicas that one cluster starts in its life. A token is prepared for each, as a pod's
/// service-account token names the pod.
const MOST: usize = 16;
/// The extra attribute of a user in which the API server puts the pod of the service-account token.
const POD_CLAIM: &str = "authentication.kubernetes.io/pod-name";
/// The pause between two probes of `/readyz`.
const PROBE_PERIOD: Duration = Duration::from_millis(50);
/// Longest wait for the answer to a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The time in which a replica must end after SIGTERM.
const GRACE: Duration = Duration::from_secs(40);
/// Longest wait for a replica to be ready, or to lead.
const DEADLINE: Duration = Duration::from_secs(60);

/// Replicas of one cluster's scheduler; dropped, their processes end.
#[derive(Debug)]
pub struct Replicas {
    api: apiserver::ApiObjects,
    /// The command line of the cluster's own scheduler, which the replicas stand in for.
    model: Invocation,
    dir: PathBuf,
    crashes: Crashes,
    addresses: ReplicaAddresses,
    running: BTreeMap<String, ReplicaProcess>,
    n_made: usize,
    fronts: Vec<AbortOnDropHandle<()>>,
}

/// A replica's process, and the task that follows its readiness.
#[derive(Debug)]
struct ReplicaProcess {
    daemon: Daemon,
    _probe: AbortOnDropHandle<()>,
}

impl Replicas {
    /// Starts two in place of the cluster's own scheduler, which must have ended, and waits until one of them leads.
    pub async fn start(cluster: &LocalCluster) -> Result<Self> {
        clean(cluster.api().objects())?;
        let mut replicas = Self::start_first(cluster).await?;
        replicas.add()?;
        replicas.until_led_by_another_than("").await?;
        Ok(replicas)
    }

    /// Starts two, of which the first leads, where an earlier leader has released the Lease: without a Lease the first leader
    /// waits for the Lease's duration, and for binds that a leader before it may still be sending.
    pub(crate) async fn start_after_release(cluster: &LocalCluster) -> Result<Self> {
        let api = cluster.api().objects();
        clean(api)?;
        let spec = json!({"holderIdentity": "", "leaseDurationSeconds": 1, "leaseTransitions": 1});
        let lease = json!({"metadata": {"name": NAME, "namespace": NAMESPACE}, "spec": spec});
        api.create("leases", lease)?;
        let mut replicas = Self::start_first(cluster).await?;
        replicas.until_led_by_another_than("").await?;
        let second = replicas.add()?;
        replicas.until_ready(&second).await?;
        Ok(replicas)
    }

    /// Starts one, and the Services.
    async fn start_first(cluster: &LocalCluster) -> Result<Self> {
        let api = cluster.api().objects().clone();
        for file in FENCE {
            manifests::apply_file(cluster.client(), &cluster.deploy().join(file)).await?;
        }
        for n in 0..MOST {
            write_kubeconfig(cluster, &format!("{NAME}-{n}"))?;
        }
        let addresses = ReplicaAddresses::default();
        let model = cluster.scheduler.invocation().clone();
        let mut fronts = Vec::new();
        for service in SERVICES {
            let selector = selector(&cluster.deploy().join(service.manifest), service.name)?;
            for flag in service.flags {
                // A scheduler without webhooks has no such flag.
                if let Some(address) = model.value(flag).and_then(|address| address.parse().ok()) {
                    fronts.push(front::serve(address, selector.clone(), &api, &addresses, flag).await?);
                }
            }
        }
        let dir = cluster.dir().to_owned();
        let crashes = cluster.crashes().clone();
        let mut replicas = Self {
            api,
            model,
            dir,
            crashes,
            addresses,
            running: BTreeMap::new(),
            n_made: 0,
            fronts,
        };
        replicas.add()?;
        Ok(replicas)
    }

    /// Starts one more replica; returns its name.
    pub fn add(&mut self) -> Result<String> {
        let name = format!("{NAME}-{}", self.n_made);
        self.n_made += 1;
        self.api.create("pods", pod(&name))?;
        let (invocation, ports) = self.invocation(&name)?;
        let health = ports.get(HEALTH).context("the scheduler answers no probes")?;
        let url = format!("http://{health}/readyz");
        if let Some(address) = ports.get(READ_API) {
            let port = proto::read_api::PORT;
            self.api.route_pod_port(NAMESPACE, &name, port, *address);
        }
        self.addresses.insert(&name, ports);
        let process = ReplicaProcess {
            daemon: Daemon::start(invocation, &self.crashes)?,
            _probe: AbortOnDropHandle::new(tokio::spawn(probe(self.api.clone(), name.clone(), url))),
        };
        self.running.insert(name.clone(), process);
        Ok(name)
    }

    /// The command line of the cluster's own scheduler, with ports of its own and the flags of the election.
    fn invocation(&self, name: &str) -> Result<(Invocation, Ports)> {
        let mut ports = Ports::new();
        let mut invocation = Invocation::new(name, self.model.program.clone(), &self.dir, name);
        invocation.args.clone_from(&self.model.args);
        for flag in [EXTENDER, WEBHOOKS, HEALTH, READ_API] {
            let address = free_address()?;
            // The extender of a scheduler with webhooks listens on all addresses; one without has no such flag.
            let model = invocation
                .value(flag)
                .and_then(|value| value.parse::<SocketAddr>().ok());
            let ip = model.map_or(address.ip(), |model| model.ip());
            if invocation.set(flag, &SocketAddr::new(ip, address.port())) {
                ports.insert(flag, address);
            }
        }
        let invocation = invocation.kubeconfig(kubeconfig(&self.dir, name));
        Ok((invocation.args(FLAGS).flag("--pod-name", name), ports))
    }

    /// The process of a replica; its pod stays when the process is killed.
    pub fn process(&mut self, name: &str) -> Result<&mut Daemon> {
        let found = self.running.get_mut(name).map(|process| &mut process.daemon);
        found.with_context(|| format!("there is no replica {name}"))
    }

    /// The address at which a replica itself serves the extender.
    pub fn address(&self, name: &str) -> Result<SocketAddr> {
        self.addresses
            .of(name, EXTENDER)
            .with_context(|| format!("there is no replica {name}"))
    }

    /// The addresses at which the replicas serve probes and metrics.
    pub(crate) fn health_addresses(&self) -> Vec<SocketAddr> {
        let names = self.running.keys();
        names.filter_map(|name| self.addresses.of(name, HEALTH)).collect()
    }

    /// The replicas behind the extender's Service: those that are ready and carry the leader's label.
    pub fn leaders(&self) -> Vec<String> {
        let mut leaders = Vec::new();
        for pod in self.api.list("pods", Some(NAMESPACE)).unwrap_or_default() {
            if object::is_set(&pod, "/metadata/labels/gpushare~1leader") && front::is_ready(&pod) {
                leaders.push(name_of(&pod).to_owned());
            }
        }
        leaders
    }

    /// Waits for a leader other than the one named; returns its name.
    pub async fn until_led_by_another_than(&self, name: &str) -> Result<String> {
        let missing = || format!("no replica but {name:?} leads");
        let found = async || {
            Ok(self
                .leaders()
                .into_iter()
                .find(|leader| leader != name)
                .ok_or_else(missing))
        };
        polling::until_found(DEADLINE, found).await
    }

    /// Returns true if a replica says that it is ready.
    pub(crate) fn is_ready(&self, name: &str) -> bool {
        let pod = self.api.get("pods", NAMESPACE, name);
        pod.is_ok_and(|pod| front::is_ready(&pod))
    }

    /// Waits until a replica is ready.
    pub async fn until_ready(&self, name: &str) -> Result<()> {
        let failure = format!("{name} is not ready in time");
        polling::until(DEADLINE, failure, || ready(self.is_ready(name))).await
    }

    /// Deletes a replica's pod: no new connections go there, and its process gets SIGTERM.
    pub async fn delete(&mut self, name: &str) -> Result<()> {
        // As kubelet does it: the pod is marked, the process ends, and only then the pod disappears.
        self.api.delete("pods", NAMESPACE, name, Some(30))?;
        let ReplicaProcess { daemon, _probe } = self
            .running
            .remove(name)
            .with_context(|| format!("there is no replica {name}"))?;
        let log = daemon.log().to_owned();
        let is_clean = daemon.stop(GRACE).await;
        self.api.delete("pods", NAMESPACE, name, Some(0))?;
        self.addresses.remove(name);
        anyhow::ensure!(is_clean, "{name} did not end cleanly, see {}", log.display());
        Ok(())
    }

    /// Replaces every replica by a new one, as a Deployment with `maxSurge: 1` and `maxUnavailable: 0` does.
    pub(crate) async fn roll(&mut self) -> Result<()> {
        let old: Vec<String> = self.running.keys().cloned().collect();
        for name in old {
            let new = self.add()?;
            self.until_ready(&new).await?;
            self.delete(&name).await?;
        }
        Ok(())
    }

    /// Ends all processes and removes their pods, the Lease and the policies.
    pub async fn end(mut self) -> Result<()> {
        for front in self.fronts.drain(..) {
            front.abort();
            // Until the front ends it listens at the address that the cluster's own scheduler will use again.
            let _ = front.await;
        }
        let api = self.api.clone();
        // The processes end here, so that none writes a Lease after `clean`.
        drop(self);
        clean(&api)
    }
}

/// The path of a replica's kubeconfig.
pub(crate) fn kubeconfig(dir: &Path, replica: &str) -> PathBuf {
    dir.join(format!("{replica}.kubeconfig"))
}

/// The Pod object of a replica.
pub(crate) fn pod(name: &str) -> Value {
    let labels = json!({"app.kubernetes.io/name": NAME, "app.kubernetes.io/part-of": "gpushare"});
    let spec = json!({"nodeName": "control-plane", "containers": [{"name": NAME, "image": NAME}]});
    json!({"metadata": {"name": name, "namespace": NAMESPACE, "labels": labels}, "spec": spec})
}

/// The kubeconfig of a replica, with a token that names its pod.
pub(crate) fn write_kubeconfig(cluster: &LocalCluster, replica: &str) -> Result<()> {
    let token = format!("token-of-pod-{replica}");
    let extra = [(POD_CLAIM.to_owned(), vec![replica.to_owned()])].into();
    let user = User {
        name: SCHEDULER_USER.to_owned(),
        groups: Vec::new(),
        extra,
    };
    cluster.api().add_token(&token, user);
    let path = kubeconfig(cluster.dir(), replica);
    cluster
        .api()
        .kubeconfig_with(&path, SCHEDULER_USER, Some(&token))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn name_of(object: &Value) -> &str {
    object::text(object, "/metadata/name")
}

/// Removes the Pods, Lease and leader object of the replicas, and the policies of [`POLICIES`].
pub(crate) fn clean(api: &apiserver::ApiObjects) -> Result<()> {
    for plural in ["validatingadmissionpolicybindings", "validatingadmissionpolicies"] {
        for object in api.list(plural, None)? {
            let name = name_of(&object);
            if POLICIES.contains(&name) {
                api.delete(plural, "", name, None)?;
            }
        }
    }
    if api.get(LEADERS, NAMESPACE, NAME).is_ok() {
        api.delete(LEADERS, NAMESPACE, NAME, None)?;
    }
    for pod in api.list("pods", Some(NAMESPACE))? {
        api.delete("pods", NAMESPACE, name_of(&pod), Some(0))?;
    }
    if api.get("leases", NAMESPACE, NAME).is_ok() {
        api.delete("leases", NAMESPACE, NAME, None)?;
    }
    Ok(())
}

/// The selector of a Service.
fn selector(manifest: &Path, name: &str) -> Result<Selector> {
    for object in manifests::read(manifest)? {
        let is_service = object.types.as_ref().is_some_and(|types| types.kind == "Service");
        if is_service && object.name_any() == name {
            let selector = object.data.pointer("/spec/selector").cloned().unwrap_or_default();
            return serde_json::from_value(selector)
                .with_context(|| format!("the selector of Service {name}"));
        }
    }
    bail!("no Service {name} in {}", manifest.display())
}

/// Keeps a pod's condition `Ready` up to date, as kubelet does.
async fn probe(api: apiserver::ApiObjects, name: String, url: String) {
    let mut reported = None;
    loop {
        let is_ready = tokio::time::timeout(PROBE_TIMEOUT, http_client::is_ok(&url))
            .await
            .unwrap_or(false);
        if reported != Some(is_ready) {
            let status = if is_ready { "True" } else { "False" };
            let container = json!({
                "name": NAME, "image": NAME, "ready": is_ready, "started": true, "restartCount": 0, "state": {"running": {}},
            });
            let patch = json!({
                "phase": "Running", "conditions": [{"type": "Ready", "status": status}], "containerStatuses": [container],
            });
            // A pod that is gone needs no condition.
            let _ = api.patch_status("pods", NAMESPACE, &name, &patch);
            reported = Some(is_ready);
        }
        tokio::time::sleep(PROBE_PERIOD).await;
    }
}
