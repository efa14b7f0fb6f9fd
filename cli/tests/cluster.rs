//! The real program on a live cluster of the testbed: through port-forwards to real replicas of the scheduler, beside real device
//! plugins.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testbed::cluster::{ClusterSpec, LocalCluster, NodeSetup, WebhookSpec};
use testbed::http_client::HttpClient;
use testbed::installation;
use testbed::observer::ClusterSnapshot;
use testbed::pod_fields::is_running;
use testbed::pods::{NamespacePods, PodBuilder};
use testbed::replicas::Replicas;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::{sleep, timeout};

const DEADLINE: Duration = Duration::from_secs(60);

/// A cluster with two replicas of the scheduler and everything else that an installation has.
struct Installed {
    cluster: LocalCluster,
    replicas: Replicas,
    pods: NamespacePods,
}

/// The end of one command.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    out: String,
    error: String,
}

impl Installed {
    async fn start() -> Result<Self> {
        let mut nodes = Vec::new();
        for name in ["n1", "n2"] {
            let mut node = NodeSetup::new(name, &[16_384, 16_384]);
            node.labels.insert("gpushare".to_owned(), "true".to_owned());
            node.plugin_args.push("--measure-memory".to_owned());
            nodes.push(node);
        }
        let mut spec = ClusterSpec::of(nodes);
        spec.webhooks = Some(WebhookSpec { lifetime: "90d" });
        let cluster = LocalCluster::start(spec).await?;
        cluster.scheduler.kill().await;
        let replicas = Replicas::start(&cluster).await?;
        installation::complete(&cluster, 2).await?;
        let pods = NamespacePods::of(cluster.client(), "default");
        Ok(Self {
            cluster,
            replicas,
            pods,
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

async fn top_shows_the_memory_in_use(installed: &mut Installed) -> Result<()> {
    use_memory(installed, "small", "n1", 0, 3072).await?;
    // The plugin measures every 15 s, and the scheduler keeps its answer for 10 s.
    let of_gpu = async {
        loop {
            let state = installed.json(&["top", "-o", "json"]).await?;
            ensure!(state.get("useUnknown").is_none(), "{state}");
            if used(&state, "/nodes/0/gpus/0/used") == Some(3584 << 20) {
                return Ok(state);
            }
            sleep(Duration::from_millis(500)).await;
        }
    };
    let state = timeout(DEADLINE, of_gpu)
        .await
        .context("top never shows the memory in use")??;
    assert_eq!(used(&state, "/nodes/0/gpus/0/holders/0/used"), Some(3072 << 20));
    assert_eq!(used(&state, "/nodes/1/gpus/1/used"), Some(0));
    let pods = installed.json(&["top", "pods", "-o", "json"]).await?;
    assert_eq!(used(&pods, "/0/used"), Some(3072 << 20));
    let table = installed.run(&["top"]).await?.out;
    ensure!(table.contains("USED") && table.contains("3.5 GiB"), "{table}");
    Ok(())
}

/// A plugin that does not measure, and one without a pod.
async fn use_that_is_unknown_has_a_reason(installed: &mut Installed) -> Result<()> {
    let node = installed.cluster.node("n1")?;
    node.restart_plugin_flagged("--measure-memory", false).await?;
    let api = installed.cluster.api().objects();
    api.delete("pods", "gpushare-system", "gpushare-device-plugin-n2", Some(0))?;
    let unknown = async {
        loop {
            let state = installed.json(&["top", "-o", "json"]).await?;
            let n_reasons = state["useUnknown"].as_object().map_or(0, |reasons| reasons.len());
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

/// The page through the port-forward of `ui`, before and after the leader's pod is deleted.
async fn ui_serves_the_page_of_the_leader(installed: &mut Installed) -> Result<()> {
    let mut command = installed.command(&["ui", "--no-browser"]);
    let mut ui = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let out = ui.stdout.take().context("ui has an output")?;
    let url = timeout(DEADLINE, BufReader::new(out).lines().next_line()).await??;
    let url = url.context("ui prints an address")?;
    let client = HttpClient::new();
    let (status, page) = client.get(&url).await?;
    ensure!(
        status == 200 && String::from_utf8_lossy(&page).contains("<title>GPUs</title>"),
        "{status}"
    );
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

#[tokio::test(flavor = "multi_thread")]
async fn commands_on_a_live_cluster() -> Result<()> {
    let mut installed = Installed::start().await?;
    let small = PodBuilder::new("small", &[("aliyun.com/gpu-mem", "4")]);
    installed.pods.create(&small).await?;
    installed.until_runs("small").await?;
    assert_eq!(installed.replicas.leaders().len(), 1);
    top_shows_the_memory_in_use(&mut installed).await?;
    use_that_is_unknown_has_a_reason(&mut installed).await?;
    ui_serves_the_page_of_the_leader(&mut installed).await
}
