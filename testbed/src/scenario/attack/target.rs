//! The scheduler under attack: its listeners, its memory, and the requests that it must answer meanwhile.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use http::StatusCode;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use tokio::time::timeout;

use kit::cluster::LocalCluster;
use kit::http_client::HttpClient;
use kit::process_usage::ProcessUsage;

/// The time within which each request must be answered. kubelet's probes have 1 s and kube-scheduler's requests 3 s, but this
/// machine also runs the attackers, and often other tests.
const IN_TIME: Duration = Duration::from_secs(5);

/// A running scheduler.
pub(super) struct Target<'a> {
    cluster: &'a LocalCluster,
    pid: u32,
    pub(super) extender: SocketAddr,
    pub(super) webhooks: SocketAddr,
    pub(super) health: SocketAddr,
    pub(super) read_api: SocketAddr,
}

impl<'a> Target<'a> {
    /// The scheduler of a cluster with webhooks.
    pub(super) fn of(cluster: &'a LocalCluster) -> Result<Self> {
        let invocation = cluster.scheduler.invocation();
        let address = |flag: &str| {
            let address = invocation.value(flag).with_context(|| format!("no {flag}"))?;
            address.parse().with_context(|| format!("{flag}={address}"))
        };
        Ok(Self {
            cluster,
            pid: cluster.scheduler.pid().context("the scheduler does not run")?,
            extender: address("--listen")?,
            webhooks: address("--webhook-listen")?,
            health: address("--health-listen")?,
            read_api: address("--read-listen")?,
        })
    }

    pub(super) fn listeners(&self) -> [SocketAddr; 4] {
        [self.extender, self.webhooks, self.health, self.read_api]
    }

    /// Sets the soft and the hard limit of files that the scheduler's process may have open.
    pub(super) fn limit_files(&self, most: u64) -> Result<()> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        prlimit(pid, Resource::Nofile, limit).context("cannot limit the scheduler's open files")?;
        Ok(())
    }

    /// The resident memory of the scheduler's process, in bytes.
    pub(super) fn memory(&self) -> Result<u64> {
        Ok(ProcessUsage::of(self.pid)?.resident)
    }

    /// The number of lines that the scheduler has logged.
    pub(super) fn log_lines(&self) -> Result<usize> {
        let log = std::fs::read_to_string(self.cluster.scheduler.log())?;
        Ok(log.lines().count())
    }

    /// Runs [`Self::check_answers`] during an attack and once after it, and returns the result of the attack.
    pub(super) async fn while_attacked<T>(&self, attack: impl Future<Output = T>) -> Result<T> {
        let mut attack = std::pin::pin!(attack);
        let ended = loop {
            tokio::select! {
                ended = &mut attack => break ended,
                answered = self.check_answers() => answered.context("during the attack")?,
            }
        };
        self.check_answers().await.context("after the attack")?;
        Ok(ended)
    }

    /// Sends a request as kubelet, kube-scheduler, the API server and a page do, each on a new connection; all must be answered.
    pub(super) async fn check_answers(&self) -> Result<()> {
        let client = HttpClient::new();
        expect_ok("probe", client.get(&format!("http://{}/healthz", self.health))).await?;
        expect_ok("state", client.get(&format!("http://{}/v1/state", self.read_api))).await?;
        let pod = json!({
            "metadata": {"name": "asked", "namespace": "default", "uid": "asked"},
            "spec": {"containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "1"}}}]},
        });
        let filter = json!({"Pod": pod, "NodeNames": ["n1"]}).to_string();
        let url = format!("{}/gpushare-scheduler/filter", self.cluster.scheduler_url());
        let extender = self.cluster.scheduler_client()?;
        expect_ok("filter", extender.post(&url, filter)).await?;
        let (connector, url) = self.cluster.webhook_connector()?;
        let url = format!("{url}/gpushare-scheduler/webhook/validate");
        expect_ok(
            "review",
            HttpClient::by(connector).post(&url, review(&pod).to_string()),
        )
        .await
    }
}

/// Fails unless the answer to a request is in time and has status 200.
async fn expect_ok<B, E>(what: &str, answer: impl Future<Output = Result<(StatusCode, B), E>>) -> Result<()>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let answer = timeout(IN_TIME, answer).await;
    let (status, _) = answer
        .with_context(|| format!("{what}: no answer"))?
        .with_context(|| what.to_owned())?;
    ensure!(status == StatusCode::OK, "{what}: {status}");
    Ok(())
}

/// The admission review that the API server sends when this pod is created.
fn review(pod: &Value) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "asked",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "default",
            "operation": "CREATE",
            "userInfo": {"username": "somebody"},
            "object": pod,
        },
    })
}
