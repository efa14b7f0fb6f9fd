//! The API server away, for a moment or for ten minutes; and its watches a minute late.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use kit::apiserver::{Fault, Faults, Matching};
use kit::cluster::{GpuFault, LocalCluster, NodeSetup, PLUGIN_USER, SCHEDULER_USER};
use kit::invariants;
use kit::kubelet::Kubelet;
use kit::observer::ClusterSnapshot;
use kit::pod_fields::is_running;
use kit::pods::{NamespacePods, PodBuilder};
use proto::resource::GPU_MEM;
use rstest::rstest;

use super::{DEADLINE, LOOK, cluster_of_all, seen, starts, starts_again, until_event, until_run, verify};

/// A short time without the API server: longer than a request of the plugin may take.
const A_WHILE: Duration = Duration::from_secs(12);
/// Pause between restarts of a container.
const BEAT: Duration = Duration::from_secs(2);

/// Two nodes of two GPUs of 16 GiB, whose plugins give containers their devices in this manner.
async fn cluster(inject: &'static str) -> Result<(LocalCluster, NamespacePods)> {
    let node = |name: &str| NodeSetup {
        inject,
        ..NodeSetup::new(name, &[16384, 16384])
    };
    cluster_of_all(vec![node("n1"), node("n2")]).await
}

/// The API server cannot be reached for `period`. Containers start again and see the same devices; a GPU that falls sick is taken
/// from kubelet at once, and its event follows when that is possible; a plugin that starts meanwhile knows no pods, and its work
/// waits, as does everything that is to be written.
async fn away(inject: &'static str, period: Duration) -> Result<()> {
    let (mut cluster, pods) = cluster(inject).await?;
    for (name, node) in [("a", "n1"), ("b", "n2")] {
        pods.create(&PodBuilder::units(name, 12).on(node)).await?;
    }
    until_run(&cluster, &["a", "b"]).await?;
    let before = [("n1", "a"), ("n2", "b")]
        .map(|(node, name)| cluster.node(node).and_then(|node| seen(node.kubelet(), name)));
    let [of_a, of_b] = before;
    let (of_a, of_b) = (of_a?, of_b?);
    let idle = u32::from(of_a == "GPU-n1-0");

    let began = Instant::now();
    let gone = cluster
        .api()
        .faults()
        .inject(Matching::anything(), Fault::DropConnection);
    cluster.api().faults().drop_watches_of("", "");
    cluster.node("n1")?.set_health(idle, GpuFault::Xid(79))?;
    let healthy = |kubelet: &Kubelet| kubelet.capacity().get(GPU_MEM).map_or(0, |(_, healthy)| *healthy);
    cluster
        .node("n1")?
        .kubelet()
        .expect_until(DEADLINE, "kubelet does not see the sick GPU", |kubelet| {
            healthy(kubelet) == 16
        })
        .await?;
    let mut n_restarts = 0;
    while began.elapsed() < period * 2 / 3 {
        ensure!(
            starts_again(cluster.node("n1")?.kubelet(), "a").await? == of_a,
            "a sees another GPU than before"
        );
        n_restarts += 1;
        tokio::time::sleep(BEAT.max(period / 60)).await;
    }
    // From here on only the containers of n2 show its pods.
    let node = cluster.node("n2")?;
    node.restart_plugin().await?;
    let before = starts(node.kubelet(), "b");
    node.kubelet().restart_container("default", "b", "main")?;
    cluster.node("n1")?.restart_kubelet().await?;
    tokio::time::sleep(period.saturating_sub(began.elapsed()).max(LOOK)).await;
    ensure!(
        starts(cluster.node("n2")?.kubelet(), "b") == before,
        "b starts although its devices are unknown"
    );
    ensure!(gone.hits() > 0 && n_restarts > 0, "nothing was tried meanwhile");
    gone.remove();
    cluster.api().objects().compact();

    let kubelet = cluster.node("n2")?.kubelet();
    kubelet
        .expect_until(DEADLINE, "b does not start again", |kubelet| {
            starts(kubelet, "b") > before
        })
        .await?;
    ensure!(seen(kubelet, "b")? == of_b, "b sees another GPU than before");
    let is_sick = |snapshot: &ClusterSnapshot| {
        let device = snapshot
            .devices
            .get("n1")?
            .spec
            .devices
            .iter()
            .find(|info| info.minor == i32::try_from(idle).ok())?;
        (!device.health).then_some(())
    };
    cluster
        .until("the sick GPU to be published", DEADLINE, is_sick)
        .await?;
    until_event(&cluster, "n1", "GPUUnhealthy", "").await?;
    pods.create(&PodBuilder::units("new", 12).on("n2")).await?;
    until_run(&cluster, &["a", "b", "new"]).await?;
    ensure!(
        starts_again(cluster.node("n1")?.kubelet(), "a").await? == of_a,
        "a sees another GPU than before"
    );
    verify(&cluster).await
}

#[rstest]
#[case::by_cdi("cdi")]
#[case::by_variable("envvar")]
#[tokio::test(flavor = "multi_thread")]
async fn nodes_work_through_a_short_outage_of_the_api_server(#[case] inject: &'static str) -> Result<()> {
    away(inject, A_WHILE).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes ten minutes"]
async fn nodes_work_through_ten_minutes_without_the_api_server() -> Result<()> {
    away("cdi", Duration::from_secs(600)).await
}

/// The longest delay of an event.
const LATE: Duration = Duration::from_secs(60);

/// Holds back the watches of both daemons, again and again.
async fn late_watches(faults: &Faults) {
    loop {
        let held = [SCHEDULER_USER, PLUGIN_USER].map(|user| faults.hold_watches_of(user, ""));
        tokio::time::sleep(LATE).await;
        drop(held);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Fills all GPUs, deletes half of the pods, and creates as many.
async fn replace_half(cluster: &LocalCluster, pods: &NamespacePods) -> Result<()> {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let (gone, kept) = names.split_at(4);
    let new = ["i", "j", "k", "l"];
    for name in names {
        pods.create(&PodBuilder::units(name, 8)).await?;
    }
    until_run_and_fit(cluster, &names).await?;
    for (old, name) in gone.iter().zip(new) {
        pods.delete(old).await?;
        pods.create(&PodBuilder::units(name, 8)).await?;
    }
    until_run_and_fit(cluster, &[kept, new.as_slice()].concat()).await
}

/// Waits until pods run, while no record at any change oversubscribes a GPU.
async fn until_run_and_fit(cluster: &LocalCluster, names: &[&str]) -> Result<()> {
    let api = cluster.api().objects().clone();
    let run = |_: &ClusterSnapshot| {
        let now = ClusterSnapshot::of(&api);
        let violations = invariants::held_amounts(&now, &invariants::NONE_EXCUSED).violations;
        if !violations.is_empty() {
            return Some(Err(anyhow!("{violations:?}")));
        }
        let mut pods = names.iter().map(|name| now.pod(name));
        pods.all(|pod| pod.is_some_and(is_running)).then_some(Ok(()))
    };
    cluster.until("all pods to run", LATE * 5, run).await?
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes three to five minutes"]
async fn watches_that_are_a_minute_late_oversubscribe_no_gpu() -> Result<()> {
    let (cluster, pods) = cluster("cdi").await?;
    let faults = cluster.api().faults().clone();
    tokio::select! {
        replaced = replace_half(&cluster, &pods) => replaced?,
        () = late_watches(&faults) => {}
    }
    verify(&cluster).await
}
