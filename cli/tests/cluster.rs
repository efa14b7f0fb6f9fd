//! The real program on a live cluster of the testbed: through port-forwards to real replicas of the scheduler, beside real device
//! plugins.

#![expect(clippy::indexing_slicing, reason = "JSON that lacks a field is null")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use kit::apiserver::{ApiObjects, ApiServer, Fault, Injected, Matching};
use kit::cluster::{ClusterSpec, GpuFault, LocalCluster, NodeSetup, WebhookSpec, user_kubeconfig};
use kit::http_client::HttpClient;
use kit::observer::ClusterSnapshot;
use kit::pod_fields::is_running;
use kit::pods::{NamespacePods, PodBuilder};
use kube::api::ListParams;
use serde_json::{Map, Value, json};
use testbed::installation;
use testbed::replicas::Replicas;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};
use tokio::time::{sleep, timeout};

const DEADLINE: Duration = Duration::from_secs(60);
/// The pods of the scheduler.
const REPLICAS: [&str; 2] = ["gpushare-scheduler-0", "gpushare-scheduler-1"];
/// The namespace of the installation.
const NAMESPACE: &str = "gpushare-system";

/// A cluster with two replicas of the scheduler and everything else that an installation has.
struct Installed {
    cluster: LocalCluster,
    replicas: Replicas,
    pods: NamespacePods,
    /// kubectl's kubeconfig.
    kubectl: PathBuf,
    /// The remedies that were run.
    remedies: Mutex<BTreeSet<String>>,
}

/// The end of one command.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    out: String,
    error: String,
}

impl Installed {
    /// Starts it; the server's certificates are valid for `lifetime`.
    async fn start(lifetime: &'static str) -> Result<Self> {
        let mut nodes = Vec::new();
        for name in ["n1", "n2"] {
            let mut node = NodeSetup::new(name, &[16_384, 16_384]);
            node.labels.insert("gpushare".to_owned(), "true".to_owned());
            node.labels.insert("pool".to_owned(), format!("of-{name}"));
            node.plugin_args.push("--measure-memory".to_owned());
            nodes.push(node);
        }
        let mut spec = ClusterSpec::of(nodes);
        spec.webhooks = Some(WebhookSpec { lifetime });
        let mut cluster = LocalCluster::start(spec).await?;
        let kubectl = cluster.kubeconfig().await?;
        cluster.scheduler.kill().await;
        let replicas = Replicas::start(&cluster).await?;
        installation::complete(&cluster, 2).await?;
        let pods = NamespacePods::of(cluster.client(), "default");
        Ok(Self {
            cluster,
            replicas,
            pods,
            kubectl,
            remedies: Mutex::default(),
        })
    }

    fn kubeconfig(&self) -> PathBuf {
        self.cluster.dir().join("admin.kubeconfig")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-gpushare"));
        command
            .env_clear()
            .env("LANG", "C.UTF-8")
            .env("KUBECONFIG", self.kubeconfig());
        command.args(args).kill_on_drop(true);
        command
    }

    async fn run(&self, args: &[&str]) -> Result<Ended> {
        let output = timeout(DEADLINE, self.command(args).output()).await??;
        Ok(Ended {
            code: output.status.code(),
            out: String::from_utf8(output.stdout)?,
            error: String::from_utf8(output.stderr)?,
        })
    }

    async fn json(&self, args: &[&str]) -> Result<Value> {
        let ended = self.run(args).await?;
        ensure!(
            ended.code == Some(0) && ended.error.is_empty(),
            "{args:?}: {ended:?}"
        );
        serde_json::from_str(&ended.out).with_context(|| format!("{args:?}: {ended:?}"))
    }

    /// Runs the commands of kubectl in backticks in a text, each once; a command that changes something only tries to.
    async fn run_remedies(&self, text: &str) -> Result<()> {
        for command in text.split('`').skip(1).step_by(2) {
            let is_new = || {
                let mut run = self.remedies.lock().unwrap_or_else(PoisonError::into_inner);
                run.insert(command.to_owned())
            };
            // kubectl forwards ports by SPDY, which the testbed's API server does not speak.
            let is_left_out = !command.starts_with("kubectl ") || command.contains(" port-forward ");
            if is_left_out || !is_new() {
                continue;
            }
            let changes = ["annotate", "delete", "label", "scale", "taint", "uncordon"];
            let is_change = command.split(' ').any(|word| changes.contains(&word));
            let dry = if is_change { " --dry-run=server" } else { "" };
            let binary = Path::new(env!("CARGO_BIN_EXE_kubectl-gpushare"));
            let programs = binary.parent().context("the program is in a folder")?;
            let path = std::env::var("PATH")?;
            let output = Command::new("timeout")
                .args(["20", "sh", "-c"])
                .arg(format!("exec 2>&1; {}{dry}", command.replace(" NODE ", " n1 ")))
                .env("PATH", format!("{path}:{}", programs.display()))
                .env("KUBECONFIG", &self.kubectl)
                .env("KUBECACHEDIR", self.cluster.dir().join("kubectl"))
                .env("KUBE_EDITOR", "true")
                .output()
                .await?;
            let code = output.status.code();
            // A command of gpushare that answers "no" exits with 2.
            let is_no = command.contains(" gpushare ") && code == Some(2);
            // A machine without kubectl runs the rest of the test; CI has it.
            let is_missing = code == Some(127) && std::env::var_os("CI").is_none();
            let said = String::from_utf8_lossy(&output.stdout);
            ensure!(
                code == Some(0) || is_no || is_missing,
                "remedy `{command}` exits with {code:?}: {said}"
            );
        }
        Ok(())
    }

    async fn until_runs(&self, name: &str) -> Result<()> {
        let runs = |snapshot: &ClusterSnapshot| snapshot.pod(name).filter(|pod| is_running(pod)).map(|_| ());
        self.cluster
            .until(&format!("pod {name} to run"), DEADLINE, runs)
            .await
    }
}

/// Has the containers of a pod use GPU memory, as the driver would list it.
async fn use_memory(installed: &mut Installed, pod: &str, node: &str, minor: u32, mib: u64) -> Result<()> {
    let found = installed.pods.api().get(pod).await?;
    let statuses = found.status.and_then(|status| status.container_statuses);
    let statuses = statuses.context("the pod's containers have a status")?;
    let id = statuses.iter().find_map(|status| status.container_id.clone());
    let id = id.context("the pod's container has an ID")?;
    let container = id.split_once("://").map_or("", |(_, id)| id);
    let node = installed.cluster.node(node)?;
    let mut gpus = node.gpus().to_vec();
    for gpu in &mut gpus {
        if gpu.minor == minor {
            let ours = json!({"memory": format!("{mib}Mi"), "container": container});
            let others = json!({"memory": "512Mi"});
            gpu.details.insert("processes".to_owned(), json!([ours, others]));
        }
    }
    node.set_gpus(gpus)
}

/// The column of a GPU or a pod in the JSON of `top` or `top pods`.
fn used(state: &Value, pointer: &str) -> Option<u64> {
    state.pointer(pointer)?.as_u64()
}

/// Waits for an event of this reason on a pod, and returns its message.
async fn until_event(installed: &Installed, pod: &str, reason: &str) -> Result<String> {
    let events = || installed.cluster.api().objects().list("events", None);
    let is_it = |event: &Value| event["reason"] == reason && event["involvedObject"]["name"] == pod;
    let message = async {
        loop {
            if let Some(event) = events()?.iter().find(|event| is_it(event)) {
                return anyhow::Ok(event["message"].as_str().unwrap_or_default().to_owned());
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    let message = timeout(DEADLINE, message).await;
    message.with_context(|| format!("no event {reason} on {pod}"))?
}

/// The pod uses more than the 4 GiB that it requests.
async fn top_shows_the_memory_in_use(installed: &mut Installed) -> Result<()> {
    use_memory(installed, "small", "n1", 0, 5120).await?;
    // The plugin measures every 15 s, and the scheduler keeps its answer for 10 s.
    let of_gpu = async {
        loop {
            let state = installed.json(&["top", "-o", "json"]).await?;
            ensure!(state.get("useUnknown").is_none(), "{state}");
            if used(&state, "/nodes/0/gpus/0/used") == Some(5632 << 20) {
                return Ok(state);
            }
            sleep(Duration::from_millis(500)).await;
        }
    };
    let state = timeout(DEADLINE, of_gpu)
        .await
        .context("top never shows the memory in use")??;
    assert_eq!(used(&state, "/nodes/0/gpus/0/holders/0/used"), Some(5120 << 20));
    assert_eq!(used(&state, "/nodes/1/gpus/1/used"), Some(0));
    let pods = installed.json(&["top", "pods", "-o", "json"]).await?;
    assert_eq!(used(&pods, "/0/used"), Some(5120 << 20));
    assert_eq!(pods[0]["overShare"], true);
    let table = installed.run(&["top", "pods"]).await?.out;
    ensure!(table.contains("5.0 GiB (over 4.0 GiB)"), "{table}");
    let message = until_event(installed, "small", "GPUMemoryOverShare").await?;
    ensure!(
        message.contains("uses 5 GiB of GPU 0") && message.contains("its share is 4 GiB"),
        "{message}"
    );
    let table = installed.run(&["top"]).await?.out;
    ensure!(table.contains("USED") && table.contains("5.5 GiB"), "{table}");
    Ok(())
}

/// An application causes an error, with which the pod's process ends; another process on the GPU goes on.
async fn an_error_of_an_application_is_reported_on_its_pod(installed: &mut Installed) -> Result<()> {
    let node = installed.cluster.node("n1")?;
    node.set_health(0, GpuFault::Xid(31))?;
    let log = node.plugin().context("n1 has a plugin")?.log().to_owned();
    let is_reported = async {
        while !std::fs::read_to_string(&log)?.contains("an application has caused an error") {
            sleep(Duration::from_millis(50)).await;
        }
        anyhow::Ok(())
    };
    timeout(DEADLINE, is_reported)
        .await
        .context("the plugin does not see the XID")??;
    let mut gpus = node.gpus().to_vec();
    if let Some(Value::Array(processes)) = gpus[0].details.get_mut("processes") {
        processes.remove(0);
    }
    node.set_gpus(gpus)?;
    let message = until_event(installed, "small", "GPUApplicationFault").await?;
    ensure!(
        message.contains("XID 31 on GPU") && message.contains(" of container "),
        "{message}"
    );
    installed.cluster.node("n1")?.set_health(0, GpuFault::Healthy)
}

/// A plugin that does not measure, and one without a pod.
#[tokio::test(flavor = "multi_thread")]
async fn memory_whose_use_is_unknown_on_a_live_cluster() -> Result<()> {
    let mut installed = Installed::start("90d").await?;
    let node = installed.cluster.node("n1")?;
    node.restart_plugin_as(|mut plugin| {
        plugin.args.retain(|arg| arg != "--measure-memory");
        plugin
    })
    .await?;
    let api = installed.cluster.api().objects();
    api.delete("pods", NAMESPACE, "gpushare-device-plugin-n2", Some(0))?;
    let unknown = async {
        loop {
            let state = installed.json(&["top", "-o", "json"]).await?;
            let n_reasons = state["useUnknown"].as_object().map_or(0, Map::len);
            if n_reasons == 2 {
                return anyhow::Ok(state["useUnknown"].clone());
            }
            sleep(Duration::from_millis(500)).await;
        }
    };
    let unknown = timeout(DEADLINE, unknown)
        .await
        .context("top never says that the use is unknown")??;
    let reasons = json!({
        "no running pod of the device plugin serves metrics there": ["n2"],
        "the device plugin does not measure memory (--measure-memory)": ["n1"],
    });
    assert_eq!(unknown, reasons);
    let table = installed.run(&["top"]).await?.out;
    ensure!(
        table.contains("memory in use is unknown on 1 node: the device plugin does not measure"),
        "{table}"
    );
    Ok(())
}

/// A fault of an object.
enum Plant {
    Patch(Value),
    Status(Value),
    Delete,
    /// An object that should not be there, and its status.
    Create(Value, Value),
}

/// A fault, the object that has it, and the check that finds it.
struct PlantedFault {
    check: &'static str,
    resource: &'static str,
    namespace: &'static str,
    name: &'static str,
    plant: Plant,
}

const fn fault(
    check: &'static str,
    resource: &'static str,
    [namespace, name]: [&'static str; 2],
    plant: Plant,
) -> PlantedFault {
    PlantedFault {
        check,
        resource,
        namespace,
        name,
        plant,
    }
}

/// An object as it is created again.
fn without_versions(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in [
            "resourceVersion",
            "uid",
            "creationTimestamp",
            "generation",
            "managedFields",
        ] {
            metadata.remove(field);
        }
    }
    object
}

impl PlantedFault {
    fn plant(&self, api: &ApiObjects) -> Result<()> {
        let (resource, namespace, name) = (self.resource, self.namespace, self.name);
        match &self.plant {
            Plant::Patch(patch) => drop(api.patch(resource, namespace, name, patch.clone())?),
            Plant::Status(status) => drop(api.patch_status(resource, namespace, name, status)?),
            Plant::Delete => drop(api.delete(resource, namespace, name, Some(0))?),
            Plant::Create(object, status) => {
                api.create(resource, object.clone())?;
                if !status.is_null() {
                    api.patch_status(resource, namespace, name, status)?;
                }
            }
        }
        Ok(())
    }

    /// Makes the object what it was.
    fn mend(&self, api: &ApiObjects, before: Option<&Value>) -> Result<()> {
        let (resource, namespace, name) = (self.resource, self.namespace, self.name);
        match (&self.plant, before) {
            (Plant::Create(..), _) => drop(api.delete(resource, namespace, name, Some(0))?),
            (Plant::Delete, Some(before)) => drop(api.create(resource, without_versions(before))?),
            (Plant::Patch(_), Some(before)) => {
                let mut object = without_versions(before);
                let now = api.get(resource, namespace, name)?;
                let version = now.pointer("/metadata/resourceVersion").cloned();
                if let Some(metadata) = object.get_mut("metadata") {
                    metadata["resourceVersion"] = version.unwrap_or_default();
                }
                drop(api.update(resource, object)?);
            }
            (Plant::Status(_), Some(before)) => {
                let status = before.get("status").cloned().unwrap_or_default();
                drop(api.patch_status(resource, namespace, name, &status)?);
            }
            (_, None) => {}
        }
        Ok(())
    }
}

/// A list of one item: another value at a pointer of the first item of a list of an object.
fn changed(
    api: &ApiObjects,
    resource: &str,
    place: [&str; 2],
    list: &str,
    pointer: &str,
    value: Value,
) -> Result<Value> {
    let object = api.get(resource, place[0], place[1])?;
    let mut items = object.pointer(list).cloned().context("the list exists")?;
    let item = items.get_mut(0).context("the list has an item")?;
    if let Some(old) = item.pointer_mut(pointer) {
        *old = value;
    } else {
        let field = pointer.trim_start_matches('/').to_owned();
        item.as_object_mut()
            .context("an item is an object")?
            .insert(field, value);
    }
    Ok(items)
}

const SCHEDULER: [&str; 2] = [NAMESPACE, "gpushare-scheduler"];
const PLUGIN: [&str; 2] = [NAMESPACE, "gpushare-device-plugin"];
const CONTAINERS: &str = "/spec/template/spec/containers";
const DEVICES: &str = "devices.scheduling.koordinator.sh";

fn containers(items: &Value) -> Plant {
    Plant::Patch(json!({"spec": {"template": {"spec": {"containers": items}}}}))
}

/// Faults of the installation that `doctor` has to find.
fn faults_of_the_installation(api: &ApiObjects) -> Result<Vec<PlantedFault>> {
    let webhook = |pointer, value: &str| -> Result<Plant> {
        let place = ["", "gpushare-scheduler"];
        let resource = "mutatingwebhookconfigurations";
        let items = changed(api, resource, place, "/webhooks", pointer, json!(value))?;
        Ok(Plant::Patch(json!({"webhooks": items})))
    };
    let container = |field, value: Value| changed(api, "daemonsets", PLUGIN, CONTAINERS, field, value);
    let not_established = json!({"conditions": [{"type": "Established", "status": "False"}]});
    let definition = ["", "schedulerleaders.gpushare.io"];
    let old_image = container("/image", json!("registry/gpushare-device-plugin:v0"))?;
    let limits = container("/args", json!(["--driver-limits"]))?;
    let old_plugin = json!({
        "metadata": {"name": "old", "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "c", "image": "acs/k8s-gpushare-plugin:v2"}]}}},
    });
    let old_plugin = Plant::Create(old_plugin, json!({"desiredNumberScheduled": 1}));
    let own = ["", "gpushare-scheduler"];
    Ok(vec![
        fault(
            "definitions",
            "customresourcedefinitions",
            definition,
            Plant::Status(not_established),
        ),
        fault(
            "scheduler-pods",
            "deployments",
            SCHEDULER,
            Plant::Status(json!({"readyReplicas": 0})),
        ),
        fault("versions", "daemonsets", PLUGIN, containers(&old_image)),
        fault(
            "rights",
            "clusterrolebindings",
            ["", "gpushare-system-device-plugin"],
            Plant::Delete,
        ),
        fault(
            "policies",
            "validatingadmissionpolicies",
            ["", "gpushare-records"],
            Plant::Delete,
        ),
        fault(
            "policies",
            "validatingadmissionpolicybindings",
            ["", "gpushare-device-plugin-pods"],
            Plant::Delete,
        ),
        fault("webhooks", "validatingwebhookconfigurations", own, Plant::Delete),
        fault(
            "webhooks",
            "mutatingwebhookconfigurations",
            own,
            webhook("/clientConfig/caBundle", "")?,
        ),
        fault(
            "webhooks",
            "mutatingwebhookconfigurations",
            own,
            webhook("/clientConfig/service/name", "gone")?,
        ),
        fault(
            "webhooks",
            "services",
            [NAMESPACE, "gpushare-webhook"],
            Plant::Delete,
        ),
        fault("enforcement", "daemonsets", PLUGIN, containers(&limits)),
        fault("other-plugins", "daemonsets", ["kube-system", "old"], old_plugin),
        fault(
            "plugins",
            "pods",
            [NAMESPACE, "gpushare-device-plugin-n2"],
            Plant::Delete,
        ),
    ])
}

/// Faults of nodes and pods that `doctor` has to find.
fn faults_of_nodes_and_pods(api: &ApiObjects) -> Result<Vec<PlantedFault>> {
    let conditions = json!([{"type": "Injectable", "status": "False", "message": "CDI is off"}]);
    let no_cdi = changed(
        api,
        DEVICES,
        ["", "n1"],
        "/spec/devices",
        "/conditions",
        conditions,
    )?;
    let pod = |name: &str, annotation: &str, value: &str, node: Value| {
        json!({
            "metadata": {"name": name, "namespace": "default", "annotations": {annotation: value}},
            "spec": {"nodeName": node, "schedulerName": "none", "containers": [{"name": "c", "image": "x"}]},
        })
    };
    let refused = pod(
        "refused",
        "scheduling.koordinator.sh/device-allocated",
        "{}",
        json!("away"),
    );
    let refusal = json!({"phase": "Failed", "reason": "UnexpectedAdmissionError"});
    let demanding = pod("demanding", "gpushare/enforcement", "driver", Value::Null);
    let no_driver = json!({"metadata": {"labels": {
        "node.koordinator.sh/gpu-vendor": "nvidia", "node.koordinator.sh/gpu-driver-version": null}}});
    let unit = json!({"metadata": {"annotations": {"aliyun.com/gpu-mem-unit": "MiB"}}});
    let stray = json!({"metadata": {"name": "gone"}, "spec": {"devices": []}});
    Ok(vec![
        fault(
            "device-objects",
            DEVICES,
            ["", "gone"],
            Plant::Create(stray, Value::Null),
        ),
        fault(
            "injection",
            DEVICES,
            ["", "n1"],
            Plant::Patch(json!({"spec": {"devices": no_cdi}})),
        ),
        fault("drivers", DEVICES, ["", "n1"], Plant::Patch(no_driver)),
        fault("memory-units", "nodes", ["", "n2"], Plant::Patch(unit)),
        fault(
            "failed-pods",
            "pods",
            ["default", "refused"],
            Plant::Create(refused, refusal),
        ),
        fault(
            "enforcement",
            "pods",
            ["default", "demanding"],
            Plant::Create(demanding, Value::Null),
        ),
    ])
}

/// The warnings and errors of `doctor`.
async fn bad_findings(installed: &Installed) -> Result<Vec<Value>> {
    let ended = installed.run(&["doctor", "-o", "json"]).await?;
    let mut findings: Vec<Value> = serde_json::from_str(&ended.out)?;
    findings.retain(|finding| finding["severity"] == "warning" || finding["severity"] == "error");
    assert_eq!(
        ended.code,
        Some(if findings.is_empty() { 0 } else { 2 }),
        "{ended:?}"
    );
    Ok(findings)
}

/// True if `doctor` finds a fault by this check; runs the remedies of what it finds then.
async fn doctor_finds(installed: &Installed, check: &str) -> Result<bool> {
    let bad = bad_findings(installed).await?;
    if bad.iter().all(|finding| finding["check"] != check) {
        return Ok(false);
    }
    for finding in bad {
        let remedy = finding["remedy"].as_str().unwrap_or_default();
        let run = installed.run_remedies(remedy).await;
        run.with_context(|| finding.to_string())?;
    }
    Ok(true)
}

async fn until_doctor_finds(installed: &Installed, check: &str) -> Result<()> {
    let found = async {
        while !doctor_finds(installed, check).await? {
            sleep(Duration::from_millis(300)).await;
        }
        anyhow::Ok(())
    };
    if let Ok(found) = timeout(DEADLINE, found).await {
        return found;
    }
    let said = installed.run(&["doctor"]).await?;
    bail!("doctor never finds {check}: {}{}", said.out, said.error)
}

async fn until_doctor_finds_nothing(installed: &Installed, after: &str) -> Result<()> {
    let mut last = Vec::new();
    let sound = async {
        loop {
            last = bad_findings(installed).await?;
            if last.is_empty() {
                return anyhow::Ok(());
            }
            sleep(Duration::from_millis(300)).await;
        }
    };
    let ended = timeout(DEADLINE, sound).await;
    ended.with_context(|| format!("after {after} doctor still finds {last:?}"))?
}

async fn doctor_finds_planted_faults(installed: &mut Installed) -> Result<()> {
    until_doctor_finds_nothing(installed, "the start").await?;
    let api = installed.cluster.api().objects().clone();
    // The image of a release, as an overlay sets it.
    for (kind, name) in [
        ("deployments", "gpushare-scheduler"),
        ("daemonsets", "gpushare-device-plugin"),
    ] {
        let place = [NAMESPACE, name];
        let image = json!(format!("registry/{name}:v1"));
        let items = changed(
            &api,
            kind,
            place,
            "/spec/template/spec/containers",
            "/image",
            image,
        )?;
        let patch = json!({"spec": {"template": {"spec": {"containers": items}}}});
        api.patch(kind, NAMESPACE, name, patch)?;
    }
    let mut missed = Vec::new();
    let mut faults = faults_of_the_installation(&api)?;
    faults.extend(faults_of_nodes_and_pods(&api)?);
    for fault in faults {
        let what = format!("{} ({} {})", fault.check, fault.resource, fault.name);
        let before = api.get(fault.resource, fault.namespace, fault.name).ok();
        fault.plant(&api).with_context(|| format!("plant {what}"))?;
        // The daemons repair some of these within a second, so that the fault is planted again before each look.
        let found = async {
            while !doctor_finds(installed, fault.check).await? {
                let _ = fault.plant(&api);
            }
            anyhow::Ok(())
        };
        match timeout(DEADLINE, found).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => missed.push(format!("{error:#}")),
            Err(_) => missed.push(what.clone()),
        }
        fault
            .mend(&api, before.as_deref())
            .with_context(|| format!("mend {what}"))?;
        if let Err(error) = until_doctor_finds_nothing(installed, &what).await {
            missed.push(format!("{error:#}"));
        }
    }
    ensure!(missed.is_empty(), "{missed:#?}");
    Ok(())
}

/// Faults of running programs.
async fn doctor_finds_faults_of_programs(installed: &mut Installed) -> Result<()> {
    installed.cluster.node("n1")?.set_health(0, GpuFault::Xid(79))?;
    until_doctor_finds(installed, "gpu-health").await?;
    installed.cluster.node("n1")?.set_health(0, GpuFault::Healthy)?;
    until_doctor_finds_nothing(installed, "an XID").await?;
    // The leader of two replicas is deposed, and the other may not take over.
    let writes = |verb| Matching::requests(verb, "leases");
    let faults = installed.cluster.api().faults();
    let refused = ["update", "patch"].map(|verb| faults.inject(writes(verb), Fault::Refuse(503)));
    until_doctor_finds(installed, "leader").await?;
    refused.into_iter().for_each(Injected::remove);
    until_doctor_finds_nothing(installed, "refused leases").await?;
    // A pod waits, and a new leader is not asked about it.
    installed.cluster.stop_kube_scheduler();
    let pod = PodBuilder::new("waits", &[("aliyun.com/gpu-mem", "1")]);
    installed.pods.create(&pod).await?;
    for replica in REPLICAS {
        installed.replicas.process(replica)?.kill().await;
        installed.replicas.process(replica)?.restart().await?;
    }
    installed.replicas.until_led_by_another_than("").await?;
    until_doctor_finds(installed, "extender-asked").await?;
    installed.cluster.start_kube_scheduler().await?;
    until_doctor_finds_nothing(installed, "kube-scheduler's absence").await?;
    let doctor = installed.run(&["doctor"]).await?.out;
    ensure!(doctor.contains(", from kube-scheduler ("), "{doctor}");
    Ok(())
}

/// Starts a cluster with a running pod that requests 4 GiB.
async fn with_a_small_pod() -> Result<Installed> {
    let installed = Installed::start("90d").await?;
    let small = PodBuilder::new("small", &[("aliyun.com/gpu-mem", "4")]);
    installed.pods.create(&small).await?;
    installed.until_runs("small").await?;
    Ok(installed)
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_in_use_and_errors_on_a_live_cluster() -> Result<()> {
    let mut installed = with_a_small_pod().await?;
    top_shows_the_memory_in_use(&mut installed).await?;
    an_error_of_an_application_is_reported_on_its_pod(&mut installed).await
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_on_a_live_cluster() -> Result<()> {
    let mut installed = with_a_small_pod().await?;
    assert_eq!(installed.replicas.leaders().len(), 1);
    doctor_finds_planted_faults(&mut installed).await?;
    doctor_finds_faults_of_programs(&mut installed).await?;
    // No address leads to the read API of a replica.
    let nowhere = ([127, 0, 0, 1], 1).into();
    let api = installed.cluster.api().objects();
    api.route_pod_port(NAMESPACE, REPLICAS[0], proto::read_api::PORT, nowhere);
    until_doctor_finds(&installed, "read-api").await
}

/// Running `kubectl gpushare` with `-w`.
struct Watching {
    _program: Child,
    out: Lines<BufReader<ChildStdout>>,
    error: Lines<BufReader<ChildStderr>>,
}

impl Watching {
    fn start(mut command: Command) -> Result<Self> {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut program = command.spawn()?;
        let out = program.stdout.take().context("it has a standard output")?;
        let error = program.stderr.take().context("it has a standard error")?;
        Ok(Self {
            _program: program,
            out: BufReader::new(out).lines(),
            error: BufReader::new(error).lines(),
        })
    }

    /// Reads until a line contains this.
    async fn until_shows(&mut self, text: &str) -> Result<()> {
        until_line(&mut self.out, text).await
    }

    async fn until_complains(&mut self, text: &str) -> Result<()> {
        until_line(&mut self.error, text).await
    }
}

async fn until_line(lines: &mut Lines<impl AsyncBufRead + Unpin>, text: &str) -> Result<()> {
    let found = async {
        while let Some(line) = lines.next_line().await? {
            if line.contains(text) {
                return Ok(());
            }
        }
        bail!("the program has ended")
    };
    let found = timeout(DEADLINE, found).await;
    found.with_context(|| format!("it never says {text:?}"))?
}

/// The API server goes away in the middle of `-w`, and comes back at the same address.
async fn watching_goes_on_when_the_api_server_comes_back(installed: &Installed) -> Result<()> {
    let objects = installed.cluster.api().objects();
    let server = ApiServer::start_with(objects.clone(), 0).await?;
    let port = server.address().port();
    let kubeconfig = installed.cluster.dir().join("away.kubeconfig");
    server.kubeconfig(&kubeconfig, "admin")?;
    let start = |args: &[&str]| {
        let mut command = installed.command(args);
        command.env("KUBECONFIG", &kubeconfig);
        Watching::start(command)
    };
    let mut gpus = start(&["top", "-w"])?;
    let mut pods = start(&["top", "pods", "-w"])?;
    gpus.until_shows("4 GPUs on 2 nodes").await?;
    pods.until_shows("first").await?;
    let second = PodBuilder::new("second", &[("aliyun.com/gpu-mem", "2")]);
    installed.pods.create(&second).await?;
    gpus.until_shows("6.0 GiB").await?;
    pods.until_shows("second").await?;
    server.shutdown().await;
    gpus.until_complains("connecting again").await?;
    pods.until_complains("connecting again").await?;
    let third = PodBuilder::new("third", &[("aliyun.com/gpu-mem", "3")]);
    installed.pods.create(&third).await?;
    installed.until_runs("third").await?;
    let server = ApiServer::start_with(objects.clone(), port).await?;
    gpus.until_shows("9.0 GiB").await?;
    pods.until_shows("third").await?;
    server.shutdown().await;
    Ok(())
}

async fn explain_and_fits(installed: &Installed) -> Result<()> {
    let large = PodBuilder::new("large", &[("aliyun.com/gpu-mem", "20")]);
    installed.pods.create(&large).await?;
    let waits = async {
        loop {
            let explained = installed.run(&["explain", "pod", "large"]).await?;
            if explained.code == Some(2) {
                return anyhow::Ok(explained);
            }
            sleep(Duration::from_millis(200)).await;
        }
    };
    let explained = timeout(DEADLINE, waits).await??;
    ensure!(explained.out.contains("0 of 2 nodes"), "{explained:?}");
    let running = installed.run(&["explain", "first"]).await?;
    assert_eq!(running.code, Some(0), "{running:?}");
    let manifest = installed.cluster.dir().join("pod.yaml");
    let pod = "{kind: Pod, metadata: {name: p}, spec: {containers: [{name: c, image: x, resources: {limits: {aliyun.com/gpu-mem: '10'}}}]}}";
    std::fs::write(&manifest, pod)?;
    let manifest = manifest.display().to_string();
    for (replicas, code) in [("2", 0), ("5", 2)] {
        let fits = installed
            .run(&["fits", "-f", &manifest, "--replicas", replicas])
            .await?;
        assert_eq!(fits.code, Some(code), "{fits:?}");
    }
    installed.pods.delete_now("large").await?;
    Ok(())
}

/// The commands that `explain` proposes for nodes that do not take a pod.
async fn steps_of_explain_succeed(installed: &Installed) -> Result<()> {
    let api = installed.cluster.api().objects();
    let keep = |spec: [Value; 2]| -> Result<()> {
        for (node, spec) in ["n1", "n2"].into_iter().zip(spec) {
            drop(api.patch("nodes", "", node, json!({"spec": spec}))?);
        }
        Ok(())
    };
    let taint = json!([{"key": "team", "value": "vision", "effect": "NoSchedule"}]);
    keep([json!({"unschedulable": true}), json!({"taints": taint})])?;
    let unit = [("aliyun.com/gpu-mem", "1")];
    for (name, pod, commands) in [
        (
            "kept",
            PodBuilder::new("kept", &unit),
            [
                "`kubectl uncordon n1`",
                "`kubectl taint node n2 team:NoSchedule-`",
            ],
        ),
        (
            "isolated",
            PodBuilder::new("isolated", &unit).labelled("koordinator.sh/gpu-isolation-provider", "HAMi-core"),
            [
                "`kubectl label node ",
                " koordinator.sh/gpu-isolation-provider=HAMi-core ",
            ],
        ),
        (
            "adapter",
            PodBuilder::new("adapter", &[("koordinator.sh/rdma", "100")]),
            ["has found no such device there", "`kubectl get devices`"],
        ),
    ] {
        if name == "isolated" {
            keep([json!({"unschedulable": null}), json!({"taints": null})])?;
        }
        installed.pods.create(&pod).await?;
        let explained = async {
            loop {
                let out = installed.run(&["explain", name]).await?.out;
                if commands.iter().all(|command| out.contains(command)) {
                    return anyhow::Ok(out);
                }
                sleep(Duration::from_millis(200)).await;
            }
        };
        let explained = timeout(DEADLINE, explained).await;
        let explained = explained.with_context(|| format!("explain never proposes {commands:?}"))??;
        installed.run_remedies(&explained).await?;
        installed.pods.delete_now(name).await?;
    }
    Ok(())
}

/// Waits until the scheduler shows which GPUs of a node are closed.
async fn until_closed(installed: &Installed, node: &str, expected: &[bool]) -> Result<()> {
    let shown = async {
        loop {
            let state = installed.json(&["top", "-o", "json"]).await?;
            let nodes = state["nodes"].as_array().context("nodes")?;
            let found = nodes
                .iter()
                .find(|found| found["name"] == node)
                .context("the node")?;
            let gpus = found["gpus"].as_array().context("GPUs")?.iter();
            if gpus.map(|gpu| gpu["closed"] == true).eq(expected.iter().copied()) {
                return anyhow::Ok(());
            }
            sleep(Duration::from_millis(200)).await;
        }
    };
    timeout(DEADLINE, shown)
        .await
        .with_context(|| format!("{node} never has {expected:?}"))?
}

/// Goals that name something which does not exist, or that no moves reach.
async fn wrong_goals_are_refused(installed: &Installed) -> Result<()> {
    for (args, code, expected) in [
        (
            &["plan", "empty-node", "n9"][..],
            2,
            "there is no node \"n9\" with GPUs; those with GPUs are n1, n2",
        ),
        (&["plan", "empty-gpus", "n1", "0,7"], 2, "the node has no GPU 7"),
        (
            &["plan", "free", "100Gi"],
            2,
            "100 GiB is more than any GPU has: the largest has 16 GiB",
        ),
        (
            &["plan", "free", "0"],
            2,
            "0 bytes or 0 GPUs are asked for: the largest GPU has 16 GiB",
        ),
        (
            &["plan", "free", "1Gi", "--on", "a=b=c"],
            2,
            "\"a=b=c\" is no label selector",
        ),
        (
            &["plan", "free", "1Gi", "--on", "pool=none"],
            2,
            "no node has the labels \"pool=none\"",
        ),
        (
            &["plan", "free", "16Gi", "--gpus", "2", "--on", "pool=of-n1"],
            3,
            "it has run for less than --min-runtime",
        ),
        (&["plan", "free", "1Gi"], 0, "nothing has to move"),
        (&["plan", "free", "much"], 1, "write bytes as Kubernetes does"),
        (
            &["plan", "join", "--min-runtime", "soon"],
            1,
            "write a number and s, m or h",
        ),
        (
            &["plan", "join", "--max-moves", "1001"],
            1,
            "1001 is not in 0..=1000",
        ),
        (&["open", "n1", "--gpus", "99"], 2, "node n1 has no GPU 99"),
        (&["close", "n9"], 2, "there is no node \"n9\""),
    ] {
        let ended = installed.run(args).await?;
        assert_eq!(ended.code, Some(code), "{args:?}: {ended:?}");
        ensure!(
            format!("{}{}", ended.out, ended.error).contains(expected),
            "{args:?}: {ended:?}"
        );
    }
    Ok(())
}

/// `close` keeps pods from GPUs and `open` ends that; `plan` shows the moves that the scheduler would make of the pods.
async fn plans_and_closed_gpus(installed: &Installed) -> Result<()> {
    let all = installed.run(&["close", "n2"]).await?;
    ensure!(
        all.code == Some(0) && all.out.starts_with("all GPUs of node n2"),
        "{all:?}"
    );
    until_closed(installed, "n2", &[true, true]).await?;
    let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "0", "controller": true}]);
    let web = PodBuilder::new("web", &[("aliyun.com/gpu-mem", "2")]).at("/metadata/ownerReferences", owner);
    installed.pods.create(&web).await?;
    installed.until_runs("web").await?;
    let table = installed.run(&["top"]).await?;
    ensure!(table.out.contains("closed"), "{table:?}");
    let stuck = ["plan", "empty-node", "n1", "--min-runtime", "0s", "-o", "json"];
    let ended = installed.run(&stuck).await?;
    let plan: Value = serde_json::from_str(&ended.out)?;
    assert_eq!(
        (ended.code, plan["reached"].as_bool()),
        (Some(3), Some(false)),
        "{ended:?}"
    );
    ensure!(
        plan["left"]
            .to_string()
            .contains("no other place has room for it"),
        "{ended:?}"
    );
    let open = installed.run(&["open", "n2"]).await?;
    assert_eq!(
        (open.code, open.out.as_str()),
        (Some(0), "all GPUs of node n2 are open\n")
    );
    until_closed(installed, "n2", &[false, false]).await?;
    let plan = installed.json(&stuck).await?;
    assert_eq!(plan["moves"].as_array().map(Vec::len), Some(1), "{plan}");
    assert_eq!(
        (&plan["moves"][0]["name"], &plan["moves"][0]["to"]),
        (&json!("web"), &json!("n2"))
    );
    assert_eq!(installed.json(&stuck).await?["planId"], plan["planId"]);
    wrong_goals_are_refused(installed).await?;
    // Closed GPUs add up, and a minor that does not exist is an event of the node.
    let annotation = json!({"metadata": {"annotations": {"gpushare/closed-gpus": "9"}}});
    (installed.cluster.api().objects()).patch("nodes", "", "n1", annotation)?;
    let absent = installed.run(&["close", "n1", "--gpus", "9"]).await?;
    ensure!(
        absent.code == Some(2) && absent.error.contains("node n1 has no GPU 9"),
        "{absent:?}"
    );
    let ended = installed.run(&["close", "n1", "--gpus", "0"]).await?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    until_closed(installed, "n1", &[true, false]).await?;
    let message = until_event(installed, "n1", "ClosedGPUsInvalid").await?;
    ensure!(
        message.contains("9\"") && message.contains("minors 0,1"),
        "{message}"
    );
    installed.run(&["open", "n1"]).await?;
    until_closed(installed, "n1", &[false, false]).await?;
    installed.pods.delete_now("web").await?;
    let is_gone = async {
        while names(&installed.json(&["top", "-o", "json"]).await?).contains(&"web".to_owned()) {
            sleep(Duration::from_millis(200)).await;
        }
        anyhow::Ok(())
    };
    timeout(DEADLINE, is_gone).await.context("web never goes")?
}

/// The disruption budget of the pods of [`replace_pods`].
const BUDGET: &str = "moved";

/// Creates a pod in the place of each that goes, as the controller of a `ReplicaSet` does, until it is dropped; and counts the
/// evictions that their budget allows, one pod down at most.
async fn replace_pods(api: ApiObjects, pods: NamespacePods, n: usize) -> Result<()> {
    let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "moved", "uid": "1", "controller": true}]);
    let budget = json!({
        "metadata": {"name": BUDGET, "namespace": "default"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "moved"}}},
    });
    api.create("poddisruptionbudgets", budget)?;
    for number in 0.. {
        loop {
            let listed = pods
                .api()
                .list(&ListParams::default().labels("app=moved"))
                .await?;
            let live = listed
                .items
                .iter()
                .filter(|pod| pod.metadata.deletion_timestamp.is_none());
            let n_healthy = live.clone().filter(|pod| is_running(pod)).count();
            let status = json!({
                "disruptionsAllowed": i64::from(n_healthy == n), "currentHealthy": n_healthy, "desiredHealthy": n - 1, "expectedPods": n,
            });
            api.patch_status("poddisruptionbudgets", "default", BUDGET, &status)?;
            if live.count() < n {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
        let pod = PodBuilder::new(&format!("moved-{number}"), &[("aliyun.com/gpu-mem", "4")]);
        pods.create(
            &pod.labelled("app", "moved")
                .at("/metadata/ownerReferences", owner.clone()),
        )
        .await?;
    }
    Ok(())
}

/// Waits until the plan that empties a node is of this kind: the scheduler sees opened GPUs and budgets a little later.
async fn until_planned(installed: &Installed, node: &str, is_so: impl Fn(&Value) -> bool) -> Result<()> {
    let args = ["plan", "empty-node", node, "--min-runtime", "0s", "-o", "json"];
    let planned = async {
        while !is_so(&serde_json::from_str(&installed.run(&args).await?.out)?) {
            sleep(Duration::from_millis(200)).await;
        }
        anyhow::Ok(())
    };
    let planned = timeout(DEADLINE, planned).await;
    planned.with_context(|| format!("the plan for {node} stays another"))?
}

/// The number of pods that move.
const N_MOVED: usize = 3;

/// The nodes of the pods that move; empty for one that has none.
fn places(api: &ApiObjects) -> Result<Vec<String>> {
    let pods = api.list("pods", None)?;
    let moved = pods
        .iter()
        .filter(|pod| pod["metadata"]["labels"]["app"] == "moved");
    let live = moved.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(live
        .map(|pod| pod["spec"]["nodeName"].as_str().unwrap_or_default().to_owned())
        .collect())
}

fn moves_all(plan: &Value) -> bool {
    plan["moves"]
        .as_array()
        .is_some_and(|moves| moves.len() == N_MOVED)
}

/// `plan --evict` moves pods one after the other, once a controller has replaced each of them.
async fn plans_move_pods(installed: &mut Installed) -> Result<()> {
    let api = installed.cluster.api().objects().clone();
    let all_on_n1 = async {
        while places(&api)? != vec!["n1"; N_MOVED] {
            sleep(Duration::from_millis(100)).await;
        }
        anyhow::Ok(())
    };
    installed.run(&["close", "n2"]).await?;
    let controller = tokio::spawn(replace_pods(api.clone(), installed.pods.clone(), N_MOVED));
    timeout(DEADLINE, all_on_n1)
        .await
        .context("the pods never run")??;
    let has_no_place = |plan: &Value| plan["reached"] == false;
    until_planned(installed, "n1", has_no_place).await?;
    let empty = ["plan", "empty-node", "n1", "--min-runtime", "0s", "--evict"];
    let stuck = installed.run(&[&empty[..], &["--yes"]].concat()).await?;
    ensure!(
        stuck.code == Some(3) && stuck.error.contains("nothing was evicted, since no move helps"),
        "{stuck:?}"
    );
    installed.run(&["open", "n2"]).await?;
    let unasked = installed.run(&empty).await?;
    ensure!(
        unasked.code == Some(1) && unasked.error.contains("add --yes"),
        "{unasked:?}"
    );
    let unused = installed.run(&["plan", "join", "--yes"]).await?;
    ensure!(
        unused.code == Some(1) && unused.error.contains("go with --evict"),
        "{unused:?}"
    );
    assert_eq!(places(&api)?, vec!["n1"; N_MOVED], "nothing has moved");
    until_planned(installed, "n1", moves_all).await?;
    // The dry run of one eviction is refused, as by a disruption budget.
    let refused = Fault::Refuse(429);
    let evictions = Matching::requests("create", "pods/eviction").times(1);
    let fault = installed.cluster.api().faults().inject(evictions, refused);
    let ended = installed.run(&[&empty[..], &["--yes"]].concat()).await?;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(
        ended.error.matches(" left n1; moved-").count(),
        N_MOVED,
        "{ended:?}"
    );
    ensure!(
        ended.error.contains("all GPUs of node n1 take no new pods"),
        "{ended:?}"
    );
    ensure!(
        ended.error.contains("the goal is reached: 3 pods moved"),
        "{ended:?}"
    );
    ensure!(
        ended.error.contains("all GPUs of node n1 stay closed"),
        "{ended:?}"
    );
    assert_eq!(fault.hits(), 1);
    assert_eq!(places(&api)?, vec!["n2"; N_MOVED]);
    let again = installed.run(&[&empty[..], &["--yes"]].concat()).await?;
    ensure!(
        again.code == Some(0) && !again.error.contains("left n1"),
        "{again:?}"
    );
    installed.run(&["open", "n1"]).await?;
    a_new_leader_goes_on(installed).await?;
    assert_eq!(places(&api)?, vec!["n1"; N_MOVED]);
    controller.abort();
    installed.run(&["open", "n2"]).await?;
    api.delete("poddisruptionbudgets", "default", BUDGET, Some(0))?;
    for pod in api.list("pods", None)? {
        if pod["metadata"]["labels"]["app"] == "moved" {
            installed
                .pods
                .delete_now(pod["metadata"]["name"].as_str().context("a name")?)
                .await?;
        }
    }
    Ok(())
}

/// The leader ends in the middle of `plan --evict`, and the other replica makes the rest of the plans.
async fn a_new_leader_goes_on(installed: &mut Installed) -> Result<()> {
    until_planned(installed, "n2", moves_all).await?;
    let command = installed.command(&[
        "plan",
        "empty-node",
        "n2",
        "--min-runtime",
        "0s",
        "--evict",
        "--yes",
    ]);
    let mut evicting = Watching::start(command)?;
    evicting.until_complains(" left n2; moved-").await?;
    let leader = installed.replicas.leaders().pop().context("a replica leads")?;
    installed.replicas.process(&leader)?.kill().await;
    evicting
        .until_complains("the goal is reached: 3 pods moved")
        .await?;
    installed.replicas.process(&leader)?.restart().await?;
    installed.replicas.until_led_by_another_than("").await.map(drop)
}

/// `-l` selects nodes for `top`, and pods for `top pods`.
async fn selectors_select_rows(installed: &Installed) -> Result<()> {
    let one = installed.run(&["top", "-l", "pool=of-n1"]).await?;
    ensure!(
        one.code == Some(0) && one.out.contains("2 GPUs on 1 node:") && !one.out.contains("n2"),
        "{one:?}"
    );
    for (selector, expected) in [
        ("pool!=of-n1", "node/n2\n"),
        ("pool in (of-n1, of-n2)", "node/n1\nnode/n2\n"),
        ("pool=none", ""),
    ] {
        let nodes = installed.run(&["top", "-l", selector, "-o", "name"]).await?;
        assert_eq!(
            (nodes.code, nodes.out.as_str()),
            (Some(0), expected),
            "{selector}"
        );
    }
    for (selector, expected) in [
        ("app=first", "pod/first\n"),
        ("app!=first", "pod/second\npod/third\n"),
        ("app=none", ""),
    ] {
        let pods = installed
            .run(&["top", "pods", "-l", selector, "-o", "name"])
            .await?;
        assert_eq!((pods.code, pods.out.as_str()), (Some(0), expected), "{selector}");
    }
    let no_node = installed.run(&["top", "-l", "pool=none"]).await?;
    assert_eq!(
        (no_node.out.as_str(), no_node.error.as_str()),
        ("", "No node with pool=none shares GPUs.\n")
    );
    let no_pod = installed.run(&["top", "pods", "-l", "app=none"]).await?;
    ensure!(
        no_pod
            .error
            .starts_with("No pod with app=none asks for a share of a GPU in namespace default;"),
        "{no_pod:?}"
    );
    Ok(())
}

/// The state that the user of a token sees at the extender's address.
async fn state_for(installed: &Installed, user: &str) -> Result<Value> {
    let path = user_kubeconfig(installed.cluster.api(), installed.cluster.dir(), user, &[])?;
    ensure!(path.exists());
    let token = installed
        .cluster
        .api()
        .token_of(user)
        .context("the user has a token")?;
    let reader = installed.cluster.scheduler_reader()?.bearing(token);
    let url = format!(
        "{}/gpushare-scheduler/v1/state",
        installed.cluster.scheduler_url()
    );
    let (status, body) = reader.get(&url).await?;
    ensure!(status == 200, "{status}: {}", String::from_utf8_lossy(&body));
    Ok(serde_json::from_slice(&body)?)
}

/// The names of pods in a state; empty for pods whose names are hidden.
fn names(state: &Value) -> Vec<String> {
    let mut names = Vec::new();
    for node in state["nodes"].as_array().into_iter().flatten() {
        for gpu in node["gpus"].as_array().into_iter().flatten() {
            for holder in gpu["holders"].as_array().into_iter().flatten() {
                names.push(holder["name"].as_str().unwrap_or_default().to_owned());
            }
        }
    }
    names.sort_unstable();
    names
}

async fn names_are_shown_by_namespace(installed: &Installed) -> Result<()> {
    let api = installed.cluster.api().objects();
    api.create("namespaces", json!({"metadata": {"name": "team"}}))?;
    let team = NamespacePods::of(installed.cluster.client(), "team");
    team.create(&PodBuilder::new("theirs", &[("aliyun.com/gpu-mem", "1")]))
        .await?;
    let rbac = |name: &str| format!("{name}.rbac.authorization.k8s.io");
    let role =
        |kind: &str, name: &str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name});
    let subjects = |users: &[&str]| {
        let subject =
            |user: &&str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user});
        users.iter().map(subject).collect::<Vec<_>>()
    };
    let viewers = json!({"metadata": {"name": "viewers"}, "roleRef": role("ClusterRole", "gpushare-viewer"),
        "subjects": subjects(&["nobody", "member"])});
    api.create(&rbac("clusterrolebindings"), viewers)?;
    let lists = json!({"metadata": {"name": "lists", "namespace": "team"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]});
    api.create(&rbac("roles"), lists)?;
    let members = json!({"metadata": {"name": "members", "namespace": "team"}, "roleRef": role("Role", "lists"),
        "subjects": subjects(&["member"])});
    api.create(&rbac("rolebindings"), members)?;
    let holds = async {
        while names(&installed.json(&["top", "-o", "json"]).await?).len() < 4 {
            sleep(Duration::from_millis(200)).await;
        }
        anyhow::Ok(())
    };
    timeout(DEADLINE, holds)
        .await
        .context("the pods never hold GPUs")??;
    let hidden = state_for(installed, "nobody").await?;
    assert_eq!(names(&hidden), ["", "", "", ""]);
    let member = state_for(installed, "member").await?;
    assert_eq!(names(&member), ["", "", "", "theirs"]);
    assert_eq!(
        [&hidden["namesHidden"], &member["namesHidden"]],
        [&json!(true), &json!(true)]
    );
    let stranger = state_for(installed, "stranger").await;
    ensure!(stranger.is_err_and(|error| {
        error
            .to_string()
            .contains("may not get /gpushare-scheduler/inspect")
    }));
    Ok(())
}

/// Starts `ui` with more flags, and returns it with the address that it prints, where the page is.
async fn start_ui(installed: &Installed, flags: &[&str]) -> Result<(Child, String)> {
    let mut command = installed.command(&[&["ui", "--no-browser"], flags].concat());
    let mut ui = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let out = ui.stdout.take().context("ui has an output")?;
    let url = timeout(DEADLINE, BufReader::new(out).lines().next_line()).await??;
    let url = url.context("ui prints an address")?;
    let (status, page) = HttpClient::new().get(&url).await?;
    ensure!(
        status == 200 && String::from_utf8_lossy(&page).contains("<title>GPUs</title>"),
        "{status}"
    );
    Ok((ui, url))
}

/// The page through `ui`: at an address, and through its port-forward before and after the leader's pod is deleted.
async fn ui_serves_the_page_of_the_leader(installed: &mut Installed) -> Result<()> {
    let address = installed.cluster.read_address().to_string();
    let (mut at_address, _) = start_ui(installed, &["--read-api", &address]).await?;
    at_address.kill().await?;
    let (mut ui, url) = start_ui(installed, &[]).await?;
    let client = HttpClient::new();
    let leader = installed.replicas.leaders();
    installed
        .replicas
        .delete(leader.first().context("a replica leads")?)
        .await?;
    let leads = async {
        loop {
            if let Ok((_, answer)) = client.get(&format!("{url}v1/doctor")).await
                && serde_json::from_slice::<Value>(&answer)?["replica"]["leading"] == true
            {
                return anyhow::Ok(());
            }
            sleep(Duration::from_millis(200)).await;
        }
    };
    timeout(DEADLINE, leads)
        .await
        .context("ui does not find the new leader")??;
    ui.kill().await?;
    Ok(())
}

/// Starts a cluster with a running pod that requests 4 GiB and has the label `app: first`.
async fn with_a_first_pod(lifetime: &'static str) -> Result<Installed> {
    let installed = Installed::start(lifetime).await?;
    let first = PodBuilder::new("first", &[("aliyun.com/gpu-mem", "4")]).labelled("app", "first");
    installed.pods.create(&first).await?;
    installed.until_runs("first").await?;
    Ok(installed)
}

#[tokio::test(flavor = "multi_thread")]
async fn watches_selectors_and_rights_on_a_live_cluster() -> Result<()> {
    let mut installed = with_a_first_pod("10d").await?;
    until_doctor_finds(&installed, "certificates").await?;
    watching_goes_on_when_the_api_server_comes_back(&installed).await?;
    explain_and_fits(&installed).await?;
    steps_of_explain_succeed(&installed).await?;
    selectors_select_rows(&installed).await?;
    names_are_shown_by_namespace(&installed).await?;
    ui_serves_the_page_of_the_leader(&mut installed).await
}

#[tokio::test(flavor = "multi_thread")]
async fn plans_on_a_live_cluster() -> Result<()> {
    let mut installed = with_a_first_pod("90d").await?;
    plans_move_pods(&mut installed).await?;
    plans_and_closed_gpus(&installed).await
}
