//! `testbed demo`: three simulated nodes, the real daemons, the proposal's two figures and the sample pods.
//!
//! Everything goes through the API as on a real cluster, and the checks read their values from there.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use proto::resource::GPU_MEM;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::installation;
use crate::replicas::Replicas;
use crate::second_scheduler;
use kit::cluster::{ClusterSpec, LocalCluster, NodeSetup, WebhookSpec, default_deploy};
use kit::console::{Check, Console, table};
use kit::daemons::{Binaries, Program};
use kit::files;
use kit::invariants::{self, ContainerView, GpuUse};
use kit::kube_scheduler::{SchedulingAttempt, SchedulingOutcome};
use kit::manifests;
use kit::observer::ClusterSnapshot;
use kit::pod_fields::{is_running, node_of, unscheduled_because};
use kit::pods::{NamespacePods, PodBuilder};

/// Longest wait for one condition.
const DEADLINE: Duration = Duration::from_secs(60);
/// GiB of the small GPUs, which are as large as those of the proposal's figures, and of the large GPU.
const GPU_GIB: u64 = 16;
const LARGE_GPU_GIB: u64 = 24;
/// The namespace of the demo's own pods.
const NAMESPACE: &str = "default";

/// Pods with their GiB that `--keep` adds to the samples for people to look at. The second pod stays pending:
/// only one GPU is large enough, and the first pod holds it.
const SHOWN: [(&str, u64); 10] = [
    ("large-model-1", 18),
    ("large-model-2", 18),
    ("training-1", 12),
    ("training-2", 12),
    ("training-3", 12),
    ("notebook-1", 6),
    ("notebook-2", 6),
    ("inference-1", 4),
    ("inference-2", 4),
    ("inference-3", 4),
];

/// `testbed demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Leave everything running until Ctrl-C, with a kubeconfig for kubectl.
    #[arg(long)]
    keep: bool,
    /// Install the admission webhooks, and TLS between kube-scheduler and the extender.
    #[arg(long)]
    webhooks: bool,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    /// The directory deploy/ of the repository.
    #[arg(long, env = "TESTBED_DEPLOY", value_name = "DIR", default_value_os_t = default_deploy())]
    deploy: PathBuf,
}

/// The result of the demo as JSON.
#[derive(Debug, Serialize)]
struct Outcomes {
    seconds: f64,
    checks: Vec<Check>,
    gpus: Vec<Value>,
    containers: Vec<Value>,
}

/// Runs the demo; true if every check held.
pub async fn run(args: DemoArgs) -> Result<bool> {
    // The binaries are built before the live line is shown: cargo's progress would garble it.
    Binaries::locate().await?;
    let console = Console::new(args.json);
    console.step("starting the API server, three nodes with their device plugins, and the scheduler");
    let nodes = vec![
        node("n1", &[GPU_GIB; 4]),
        node("n2", &[GPU_GIB; 2]),
        node("n3", &[GPU_GIB, LARGE_GPU_GIB]),
    ];
    let cluster = LocalCluster::start(ClusterSpec {
        deploy: args.deploy.clone(),
        webhooks: args.webhooks.then_some(WebhookSpec { lifetime: "90d" }),
        // The quick start names the second kube-scheduler that it installs.
        schedulers: vec![second_scheduler::PROFILE],
        ..ClusterSpec::of(nodes)
    })
    .await?;
    // As the Deployment runs it: two replicas, of which one leads.
    cluster.scheduler.kill().await;
    let replicas = Replicas::start_after_release(&cluster).await?;
    installation::complete(&cluster, 2).await?;
    let mut demo = Demo {
        pods: NamespacePods::of(cluster.client(), NAMESPACE),
        cluster,
        console,
        checks: Vec::new(),
    };
    let played = demo.play().await;
    let Demo {
        mut cluster,
        console,
        checks,
        pods,
    } = demo;
    console.finish();
    if let Err(error) = played {
        // After an error the logs of the daemons are the only way to find its cause.
        cluster.keep_files(true);
        return Err(error.context(format!("logs are in {}", cluster.dir().display())));
    }
    let is_ok = show(&cluster, &console, checks).await?;
    if args.keep {
        show_pods(&cluster, &pods).await?;
        let kubeconfig = cluster.kubeconfig().await?;
        let targets = cluster.write_metrics_targets(&replicas.health_addresses())?;
        console.say(&commands_to_try(&cluster, &kubeconfig, &targets)?);
        std::future::pending::<()>().await;
    }
    replicas.end().await?;
    cluster.stop().await?;
    Ok(is_ok)
}

/// A node with GPUs of these sizes in GiB, set up as docs/install.md says, whose plugin measures the memory in use.
fn node(name: &str, gib_of_gpus: &[u64]) -> NodeSetup {
    let mib_of_gpus: Vec<u64> = gib_of_gpus.iter().map(|gib| gib << 10).collect();
    NodeSetup {
        labels: [("gpushare".to_owned(), "true".to_owned())].into(),
        plugin_args: vec!["--measure-memory".to_owned()],
        uses_memory: true,
        ..NodeSetup::new(name, &mib_of_gpus)
    }
}

/// The pause after which a workload model (the mix of pods that the scheduler expects) that the last pod has made due is in
/// effect, also on a busy machine.
const MODEL_REFRESH: Duration = Duration::from_secs(1);

/// Waits until kube-scheduler has tried to schedule a pod, and the workload model includes the pod. The next pod is created
/// only then, so that every run shows the same.
async fn until_tried(cluster: &LocalCluster, name: &str) -> Result<()> {
    let is_tried = |pod: &Pod| node_of(pod).is_some() || unscheduled_because(pod).is_some();
    let tried = |snapshot: &ClusterSnapshot| snapshot.pod(name).is_some_and(is_tried).then_some(());
    let what = format!("pod {name} to be scheduled or refused");
    cluster.until(&what, DEADLINE, tried).await?;
    // No client can see if the model includes the pod already.
    tokio::time::sleep(MODEL_REFRESH).await;
    Ok(())
}

/// Creates the pods of [`SHOWN`], and waits until all that have a node run.
async fn show_pods(cluster: &LocalCluster, pods: &NamespacePods) -> Result<()> {
    for (name, gib) in SHOWN {
        pods.create(&PodBuilder::units(name, gib)).await?;
        until_tried(cluster, name).await?;
    }
    let names = SHOWN.map(|(name, _)| name.to_owned());
    let all_run = |snapshot: &ClusterSnapshot| {
        let runs_or_waits = |pod: &Pod| is_running(pod) || node_of(pod).is_none();
        snapshot.has_all(&names, runs_or_waits).then_some(())
    };
    cluster.until("the pods to run", DEADLINE, all_run).await
}

/// The text of `--keep`: commands to try on the running cluster.
fn commands_to_try(cluster: &LocalCluster, kubeconfig: &Path, targets: &Path) -> Result<String> {
    let program = cluster.binaries().path(Program::Cli)?;
    let folder = program.parent().unwrap_or(Path::new("."));
    Ok(format!(
        "\nThe cluster goes on. In another terminal:\n\n\
         export KUBECONFIG={}\n\
         export PATH=$PATH:{}\n\
         kubectl get pods,nodes -o wide\n\
         kubectl gpushare top                           # without kubectl: kubectl-gpushare top\n\
         kubectl gpushare explain large-model-2         # the reason that it waits\n\
         kubectl exec training-1 -- nvidia-smi -L       # the GPU that a container sees\n\
         kubectl apply -f deploy/samples/01-gpushare-memory.yaml\n\n\
         The page: http://{}/\n\
         Metrics, as targets of Prometheus: {}\n\
         Ctrl-C ends it.",
        kubeconfig.display(),
        folder.display(),
        cluster.read_address(),
        targets.display(),
    ))
}

/// The part of a filter's answer that the demo shows.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct FilterReply {
    node_names: Option<Vec<String>>,
    failed_nodes: Option<BTreeMap<String, String>>,
    failed_and_unresolvable_nodes: Option<BTreeMap<String, String>>,
}

/// A demo under way.
struct Demo {
    cluster: LocalCluster,
    pods: NamespacePods,
    console: Console,
    checks: Vec<Check>,
}

impl Demo {
    /// Plays the demo: the figure of the filter, the figure of the bind, then the sample pods. Each is followed by
    /// checks.
    async fn play(&mut self) -> Result<()> {
        self.filter_figure().await?;
        self.check_everything("after the filter").await?;
        self.bind_figure().await?;
        self.check_everything("after the bind").await?;
        self.samples().await?;
        self.check_everything("with the sample pods").await
    }

    /// 4 GiB left on n1, 4 on each GPU of n2, 8 on one GPU of n3: a pod of 8 fits n3 only.
    async fn filter_figure(&mut self) -> Result<()> {
        self.console.step("filter: filling n1, n2 and n3");
        for (node, sizes) in [
            ("n1", &[GPU_GIB, GPU_GIB, GPU_GIB, 12][..]),
            ("n2", &[12, 12]),
            ("n3", &[LARGE_GPU_GIB, 8]),
        ] {
            for (idx, size) in sizes.iter().enumerate() {
                let name = format!("fill-{node}-{idx}");
                self.run_pod(&name, *size, Some(node)).await?;
            }
        }
        let free = [("n1", vec![0, 0, 0, 4]), ("n2", vec![4, 4]), ("n3", vec![8, 0])];
        for (node, wanted) in free {
            self.check_free(&format!("filter: what is left on {node}"), node, &wanted);
        }
        self.console.step("filter: where does a pod of 8 GiB fit?");
        let (passed, _) = self.ask_extender(8, &["n1", "n2", "n3"]).await?;
        let wanted = vec!["n3".to_owned()];
        self.check("filter: the extender passes n3 only", &passed, &wanted);
        let (passed, reasons) = self.ask_extender(8, &["n2"]).await?;
        let name = format!("filter: the extender refuses n2: {}", reasons.join(", "));
        self.check(name, &(passed.len(), reasons.len()), &(0, 1));
        // This drops the attempts to schedule earlier pods from the queue that `next_attempt_of` reads.
        self.cluster.past_attempts();
        self.run_pod("figure-filter", 8, None).await?;
        let attempt = self.next_attempt_of("figure-filter").await?;
        let wanted = SchedulingOutcome::Bound("n3".to_owned());
        self.check("filter: the pod is bound to n3", &attempt.outcome, &wanted);
        let in_tree = |node: &str| {
            let refusal = attempt.diagnosis.refusals.get(node);
            refusal.is_some_and(|refusal| refusal.reasons == [format!("Insufficient {GPU_MEM}")])
        };
        let name = "filter: the aggregate fit refuses n1, but neither n2 nor n3";
        self.check(name, &["n1", "n2", "n3"].map(in_tree), &[true, false, false]);
        Ok(())
    }

    /// 12, 8, 4 and 16 GiB left on the GPUs of n1: a pod of 8 goes to GPU 1.
    async fn bind_figure(&mut self) -> Result<()> {
        self.console.step("bind: clearing n1 and filling it again");
        self.clear().await?;
        for (name, size) in [("bind-0", 4), ("bind-aside", 12), ("bind-1", 8), ("bind-2", 12)] {
            self.run_pod(name, size, Some("n1")).await?;
        }
        self.delete(&["bind-aside".to_owned()]).await?;
        self.check_free("bind: what is left on n1", "n1", &[12, 8, 4, GPU_GIB]);
        self.run_pod("figure-bind", 8, Some("n1")).await?;
        let snapshot = self.cluster.observer().now();
        let record = snapshot.pod("figure-bind").map(invariants::record).transpose();
        let wanted = Ok(Some(vec![(1, "GPU-n1-1".to_owned())]));
        self.check("bind: the pod is on GPU 1", &record, &wanted);
        Ok(())
    }

    /// The pods of `deploy/samples`, unchanged.
    async fn samples(&mut self) -> Result<()> {
        self.clear().await?;
        self.console.step("applying deploy/samples");
        let mut names = Vec::new();
        for file in files::with_extension(&self.cluster.deploy().join("samples"), "yaml")? {
            for object in manifests::apply_file(self.cluster.client(), &file).await? {
                let name = object.name_any();
                until_tried(&self.cluster, &name).await?;
                names.push(name);
            }
        }
        // An empty directory must not pass for samples that run.
        if names.is_empty() {
            bail!("there are no samples in {}", self.cluster.deploy().display());
        }
        self.until_running(&names).await
    }

    /// Creates a pod that asks for `units` of memory (GiB), on the node if one is given, and waits until it runs.
    async fn run_pod(&self, name: &str, units: u64, node: Option<&str>) -> Result<()> {
        let (mut spec, mut place) = (PodBuilder::units(name, units), String::new());
        if let Some(node) = node {
            spec = spec.on(node);
            place = format!(" on {node}");
        }
        self.console.step(&format!("{name}: {units} GiB{place}"));
        self.pods.create(&spec).await?;
        self.until_running(&[name.to_owned()]).await
    }

    /// Waits until all pods of these names run.
    async fn until_running(&self, names: &[String]) -> Result<()> {
        let all = |snapshot: &ClusterSnapshot| snapshot.has_all(names, is_running).then_some(());
        let what = format!("{} to run", names.join(", "));
        self.cluster.until(&what, DEADLINE, all).await
    }

    /// Deletes all pods of the demo's namespace.
    async fn clear(&self) -> Result<()> {
        let mut own = self.cluster.observer().now().pods;
        own.retain(|_, pod| pod.namespace().as_deref() == Some(NAMESPACE));
        let names: Vec<String> = own.values().map(ResourceExt::name_any).collect();
        self.delete(&names).await
    }

    /// Deletes pods, each once the one before is gone: a workload model that is due meanwhile has the same pods in every run.
    async fn delete(&self, names: &[String]) -> Result<()> {
        for name in names {
            self.pods.delete(name).await?;
            let gone = |snapshot: &ClusterSnapshot| snapshot.pod(name).is_none().then_some(());
            let what = format!("{name} to be gone");
            self.cluster.until(&what, DEADLINE, gone).await?;
        }
        Ok(())
    }

    /// Sends the extender a filter request, as kube-scheduler would; returns the nodes that fit and the reasons
    /// of the refusals.
    async fn ask_extender(&self, units: u64, nodes: &[&str]) -> Result<(Vec<String>, Vec<String>)> {
        let pod = PodBuilder::units("asked-only", units).pod()?;
        let question = json!({"Pod": pod, "Nodes": null, "NodeNames": nodes});
        let url = format!("{}/gpushare-scheduler/filter", self.cluster.scheduler_url());
        let client = self.cluster.scheduler_client()?;
        let (status, body) = client.post(&url, question.to_string()).await?;
        let answer: FilterReply =
            serde_json::from_slice(&body).with_context(|| format!("filter answers {status}"))?;
        let mut reasons = answer.failed_nodes.unwrap_or_default();
        reasons.extend(answer.failed_and_unresolvable_nodes.unwrap_or_default());
        let passed = answer.node_names.unwrap_or_default();
        Ok((passed, reasons.into_values().collect()))
    }

    /// Waits for the scheduling loop's next attempt to schedule this pod.
    async fn next_attempt_of(&mut self, pod: &str) -> Result<SchedulingAttempt> {
        let key = format!("{NAMESPACE}/{pod}");
        let found = async {
            while let Some(attempt) = self.cluster.next_attempt().await {
                // Other pods are tried in between.
                if attempt.pod == key {
                    return Ok(attempt);
                }
            }
            bail!("the scheduling loop has ended")
        };
        tokio::time::timeout(DEADLINE, found).await?
    }

    /// Checks the free GiB of each GPU of a node.
    fn check_free(&mut self, name: &str, node: &str, wanted: &[u64]) {
        let accounts = invariants::held_amounts(&self.cluster.observer().now(), &invariants::NONE_EXCUSED);
        let gpus = accounts.gpus.values().filter(|gpu| gpu.node == node);
        let free: Vec<u64> = gpus
            .map(|gpu| gpu.total.saturating_sub(gpu.used()) >> 30)
            .collect();
        self.check(format!("{name}: {wanted:?} GiB"), &free.as_slice(), &wanted);
    }

    /// Adds the check that two values are equal.
    fn check<T: PartialEq + Debug>(&mut self, name: impl Into<String>, found: &T, wanted: &T) {
        self.checks.push(Check::equal(name, found, wanted));
    }

    /// Checks that no GPU is oversubscribed and that each container sees the GPUs of its pod's record.
    async fn check_everything(&mut self, when: &str) -> Result<()> {
        let snapshot = self.cluster.observer().now();
        let accounts = invariants::held_amounts(&snapshot, &invariants::NONE_EXCUSED);
        self.checks.push(Check::new(
            format!("{when}: nothing is oversubscribed, every record is right"),
            accounts.violations,
        ));
        let views = invariants::container_views(self.cluster.client(), &snapshot).await?;
        let mut problems = invariants::misfits(&views);
        // Without any container every check of containers would hold.
        if views.is_empty() {
            problems.push("no container runs".to_owned());
        }
        let name = format!(
            "{when}: each of {} containers sees exactly the GPUs of its pod's annotation",
            views.len()
        );
        self.checks.push(Check::new(name, problems));
        Ok(())
    }
}

/// Prints the GPUs, the devices that each container sees, and the checks; returns true if all checks hold.
async fn show(cluster: &LocalCluster, console: &Console, checks: Vec<Check>) -> Result<bool> {
    let snapshot = cluster.observer().now();
    let accounts = invariants::held_amounts(&snapshot, &invariants::NONE_EXCUSED);
    let views = invariants::container_views(cluster.client(), &snapshot).await?;
    let mut gpus = table(["NODE", "GPU", "UUID", "MEMORY GiB", "CORE %", "PODS"]);
    for gpu in accounts.gpus.values() {
        let pods: Vec<&str> = gpu.pods.iter().filter_map(|pod| pod.rsplit('/').next()).collect();
        let memory = format!("{}/{}", gpu.used().div_ceil(1 << 30), gpu.total >> 30);
        gpus.add_row([
            gpu.node.clone(),
            gpu.minor.to_string(),
            gpu.uuid.clone(),
            memory,
            format!("{}/100", gpu.core),
            pods.join(", "),
        ]);
    }
    console.result(&gpus.to_string());
    for view in &views {
        console.result(&describe_view(view, &snapshot));
    }
    console.result("");
    console.checks(&checks);
    let is_ok = checks.iter().all(Check::is_ok);
    let seconds = console.elapsed().as_secs_f64();
    let n_checks = checks.len();
    let gpu = |gpu: &GpuUse| json!({"node": gpu.node, "minor": gpu.minor, "uuid": gpu.uuid, "total": gpu.total, "used": gpu.used(), "core": gpu.core, "pods": gpu.pods});
    let container = |s: &ContainerView| json!({"pod": s.pod, "container": s.container, "sees": s.sees, "shouldSee": s.should_see});
    console.json(&Outcomes {
        seconds,
        gpus: accounts.gpus.values().map(gpu).collect(),
        containers: views.iter().map(container).collect(),
        checks,
    });
    console.result(&format!(
        "\n{n_checks} checks, {} in {seconds:.1} s",
        if is_ok { "all well" } else { "NOT all well" }
    ));
    Ok(is_ok)
}

/// A line about a container: its node, and the GPUs that it sees.
fn describe_view(view: &ContainerView, snapshot: &ClusterSnapshot) -> String {
    let node = snapshot.pod(&view.pod).and_then(node_of).unwrap_or("no node");
    let sees = if view.sees.is_empty() {
        "no GPU".to_owned()
    } else {
        view.sees.join(", ")
    };
    format!("{} / {} on {node} sees {sees}", view.pod, view.container)
}
