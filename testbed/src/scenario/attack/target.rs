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

/// The most that the scheduler's memory may grow, in bytes.
const MOST_GROWTH: u64 = 64 << 20;
/// The most lines that one attack may add to the log. Certificates are renewed all the time on this cluster, which is logged,
/// too.
const MOST_LINES: usize = 200;

/// A running scheduler.
pub(super) struct Target<'a> {
    cluster: &'a LocalCluster,
    pid: u32,
    /// The resident memory of its process in bytes, and the lines of its log, before the attack.
    before: (u64, usize),
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
        let pid = cluster.scheduler.pid().context("the scheduler does not run")?;
        Ok(Self {
            cluster,
            pid,
            before: usage(cluster, pid)?,
            extender: address("--listen")?,
            webhooks: address("--webhook-listen")?,
            health: address("--health-listen")?,
            read_api: address("--read-listen")?,
        })
    }

    /// Sets the soft and the hard limit of files that the scheduler's process may have open.
    pub(super) fn limit_files(&self, most: u64) -> Result<()> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        let limited = prlimit(pid, Resource::Nofile, limit);
        limited
            .map(drop)
            .context("cannot limit the scheduler's open files")
    }

    /// Fails if the scheduler's memory or log has grown by more than an attack may cost.
    pub(super) fn check_cost(&self) -> Result<()> {
        let (memory, n_lines) = usage(self.cluster, self.pid)?;
        let growth = memory.saturating_sub(self.before.0);
        ensure!(
            growth <= MOST_GROWTH,
            "the scheduler's memory has grown by {} MiB",
            growth >> 20
        );
        let n_lines = n_lines.saturating_sub(self.before.1);
        ensure!(n_lines <= MOST_LINES, "the scheduler has logged {n_lines} lines");
        Ok(())
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
        let (client, review) = (HttpClient::by(connector), review(&pod).to_string());
        expect_ok("review", client.post(&url, review)).await
    }
}

/// The resident memory of the scheduler's process in bytes, and the number of lines that it has logged.
fn usage(cluster: &LocalCluster, pid: u32) -> Result<(u64, usize)> {
    let log = std::fs::read_to_string(cluster.scheduler.log())?;
    Ok((ProcessUsage::of(pid)?.resident, log.lines().count()))
}

/// Fails unless the answer to a request is in time and has status 200.
async fn expect_ok<B>(what: &str, answer: impl Future<Output = Result<(StatusCode, B)>>) -> Result<()> {
    let answer = timeout(IN_TIME, answer).await;
    let answer = answer.with_context(|| format!("{what}: no answer"))?;
    let (status, _) = answer.with_context(|| what.to_owned())?;
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
