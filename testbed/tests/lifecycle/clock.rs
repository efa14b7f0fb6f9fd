//! Clocks of the daemons that jump an hour forward and an hour back, by `libfaketime`: it shows a process another time of day,
//! and leaves the monotonic clock alone. Where it is not installed the test says that it has not run. Both replicas of the
//! scheduler have the same clock, and the API server that of the machine.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kit::cluster::{ClusterSpec, LocalCluster, NodeSetup, WebhookSpec};
use kit::daemons::Invocation;
use kit::pods::{NamespacePods, PodBuilder};
use kube::ResourceExt;
use proto::record::MEM_ASSUME_TIME;
use serde_json::{Value, json};
use testbed::replicas::Replicas;

use super::{DEADLINE, not_run, starts_again, until_run, verify};

const HOUR: Duration = Duration::from_secs(3600);

/// The directory of the library in the packages of Debian and of Fedora.
const DIRS: [&str; 3] = [
    "/usr/lib/x86_64-linux-gnu/faketime",
    "/usr/lib/aarch64-linux-gnu/faketime",
    "/usr/lib64/faketime",
];

/// The library for programs with several threads.
fn library() -> Option<PathBuf> {
    let mut files = DIRS.iter().map(|dir| Path::new(dir).join("libfaketimeMT.so.1"));
    files.find(|file| file.exists())
}

/// The same program with a clock that differs from the machine's by the offset in the file.
fn with_clock(mut invocation: Invocation, library: &Path, offset: &Path) -> Invocation {
    let program = std::mem::replace(&mut invocation.program, "env".into());
    let own = [
        format!("LD_PRELOAD={}", library.display()),
        format!("FAKETIME_TIMESTAMP_FILE={}", offset.display()),
        "FAKETIME_NO_CACHE=1".to_owned(),
        "DONT_FAKE_MONOTONIC=1".to_owned(),
        program.display().to_string(),
    ];
    invocation.args.splice(..0, own);
    invocation
}

/// The assume time of a pod, in nanoseconds.
fn assume_time(pod: &Pod) -> Result<i64> {
    let time = pod.annotations().get(MEM_ASSUME_TIME).context("no assume time")?;
    Ok(time.parse()?)
}

/// The webhooks answer by certificates that the API server, with the machine's clock, accepts: a pod that breaks a rule is
/// refused.
async fn are_refused(pods: &NamespacePods, when: &str) -> Result<()> {
    let all = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    match pods
        .create(&PodBuilder::new("refused", &[]).with("env", all))
        .await
    {
        Ok(_) => bail!("{when}: no webhook has answered"),
        Err(error) => {
            let text = format!("{error:#}");
            ensure!(text.contains("denied the request"), "{when}: {text}");
            Ok(())
        }
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The leader by its Lease, with the number of changes.
fn leader(cluster: &LocalCluster) -> Result<[Value; 2]> {
    let lease = cluster
        .api()
        .objects()
        .get("leases", "gpushare-system", "gpushare-scheduler")?;
    Ok(["/spec/holderIdentity", "/spec/leaseTransitions"]
        .map(|field| lease.pointer(field).cloned().unwrap_or_default()))
}

/// Both daemons, whose clocks differ from the machine's by the offsets in two files.
struct Clocks {
    scheduler: PathBuf,
    plugin: PathBuf,
}

impl Clocks {
    /// Sets the clock of each daemon, in hours beside the machine's.
    fn set(&self, scheduler: i32, plugin: i32) -> Result<()> {
        for (file, hours) in [(&self.scheduler, scheduler), (&self.plugin, plugin)] {
            let new = file.with_extension("new");
            std::fs::write(&new, format!("{hours:+}h\n"))?;
            std::fs::rename(new, file)?;
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clocks_that_jump_change_no_device_and_no_leader() -> Result<()> {
    let Some(library) = library() else {
        return not_run(
            "clock",
            "libfaketime is not installed (Debian: apt-get install libfaketime)",
        );
    };
    let dir = tempfile::tempdir()?;
    let clocks = Clocks {
        scheduler: dir.path().join("scheduler"),
        plugin: dir.path().join("plugin"),
    };
    clocks.set(0, 0)?;
    let mut cluster = LocalCluster::start(ClusterSpec {
        webhooks: Some(WebhookSpec { lifetime: "2h" }),
        ..ClusterSpec::of(vec![NodeSetup::new("n1", &[16384, 16384])])
    })
    .await?;
    let faked = with_clock(
        cluster.scheduler.invocation().clone(),
        &library,
        &clocks.scheduler,
    );
    cluster.scheduler.restart_as(faked).await?;
    cluster
        .node("n1")?
        .restart_plugin_as(|plugin| with_clock(plugin, &library, &clocks.plugin))
        .await?;
    cluster.until_ready(DEADLINE).await?;
    // The replicas take over the scheduler's command line.
    cluster.scheduler.kill().await;
    let replicas = Replicas::start(&cluster).await?;
    let pods = NamespacePods::of(cluster.client(), "default");
    pods.create(&PodBuilder::units("first", 2)).await?;
    until_run(&cluster, &["first"]).await?;
    let (before, mut last) = (leader(&cluster)?, 0);
    for (name, scheduler, plugin) in [
        ("both-ahead", 1, 1),
        ("both-behind", -1, -1),
        ("scheduler-ahead", 1, 0),
        ("scheduler-behind", -1, 0),
        ("plugin-ahead", 0, 1),
        ("plugin-behind", 0, -1),
    ] {
        clocks.set(scheduler, plugin)?;
        pods.create(&PodBuilder::units(name, 2)).await?;
        until_run(&cluster, &["first", name])
            .await
            .with_context(|| name)?;
        let seen = cluster.observer().now();
        let time = assume_time(seen.pod(name).context("the pod is gone")?)?;
        ensure!(time > last, "{name}: the assume time {time} follows {last}");
        let ahead = Duration::from_nanos(u64::try_from(time)?).saturating_sub(since_1970());
        ensure!(
            name != "both-ahead" || ahead > HOUR / 2,
            "the library shows the scheduler the machine's time"
        );
        last = time;
        are_refused(&pods, name).await?;
        starts_again(cluster.node("n1")?.kubelet(), "first").await?;
        verify(&cluster).await.with_context(|| name)?;
    }
    let after = leader(&cluster)?;
    ensure!(before == after, "the leader was {before:?} and is {after:?}");
    replicas.end().await?;
    cluster.stop().await
}
