//! What nodes go through in their lives, on a cluster of the real daemons: the API server away, for a moment or for ten minutes,
//! for everybody or for the plugin alone.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use proto::resource::GPU_MEM;
use rstest::rstest;
use testbed::apiserver::{Fault, Matching};
use testbed::cluster::{Cluster, Health, NodeSpec, Spec};
use testbed::invariants;
use testbed::kubelet::Kubelet;
use testbed::observer::{Snapshot, is_running};
use testbed::pods::{PodSpec, Pods};

const DEADLINE: Duration = Duration::from_secs(60);
/// A short time without the API server: longer than a request of the plugin may take.
const A_WHILE: Duration = Duration::from_secs(12);
/// Pause between restarts of a container.
const BEAT: Duration = Duration::from_secs(2);
/// How long a container that must not start is watched.
const LOOK: Duration = Duration::from_secs(3);

/// Two nodes of two GPUs of 16 GiB, whose plugins give containers their devices in this manner.
async fn cluster(inject: &'static str) -> Result<(Cluster, Pods)> {
    let node = |name: &str| NodeSpec { inject, ..NodeSpec::new(name, &[16384, 16384]) };
    let cluster = Cluster::start(Spec::of(vec![node("n1"), node("n2")])).await?;
    let pods = Pods::of(cluster.client(), "default");
    Ok((cluster, pods))
}

async fn until_run(cluster: &Cluster, names: &[&str]) -> Result<()> {
    let is_up = |snapshot: &Snapshot, name: &str| snapshot.pod(&format!("default/{name}")).is_some_and(is_running);
    let all_up = |snapshot: &Snapshot| names.iter().all(|name| is_up(snapshot, name)).then_some(());
    cluster.until(&format!("{} to run", names.join(", ")), DEADLINE, all_up).await
}

fn starts(kubelet: &Kubelet, name: &str) -> u32 {
    kubelet.container("default", name, "main").map_or(0, |container| container.starts)
}

/// Ends a container, and waits until kubelet has started it again; what it sees.
async fn starts_again(kubelet: &Kubelet, name: &str) -> Result<String> {
    let before = starts(kubelet, name);
    kubelet.restart_container("default", name, "main")?;
    ensure!(kubelet.until(DEADLINE, |kubelet| starts(kubelet, name) > before).await, "the container of {name} does not start again");
    seen(kubelet, name)
}

fn seen(kubelet: &Kubelet, name: &str) -> Result<String> {
    let container = kubelet.container("default", name, "main").with_context(|| format!("{name} has no container"))?;
    container.env.get(invariants::VISIBLE_DEVICES).cloned().with_context(|| format!("{name} sees nothing"))
}

/// Nothing that has started sees what is not counted for it, and nothing is counted twice.
async fn verify(cluster: &Cluster) -> Result<()> {
    let snapshot = Snapshot::of(cluster.api().cluster());
    let accounts = invariants::accounts(&snapshot, &std::collections::BTreeSet::new());
    ensure!(accounts.violations.is_empty(), "{:?}", accounts.violations);
    let misfits = invariants::misfits(&invariants::sights(cluster.client(), &snapshot).await?);
    ensure!(misfits.is_empty(), "{misfits:?}");
    Ok(())
}

/// Waits for an event of this reason on an object.
async fn until_told(cluster: &Cluster, object: &str, reason: &str) -> Result<()> {
    let is_told = || {
        let events = cluster.api().cluster().list("events", None).unwrap_or_default();
        events.iter().any(|event| event["reason"] == reason && event["involvedObject"]["name"] == object)
    };
    let told = async {
        while !is_told() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(DEADLINE, told).await.with_context(|| format!("no event {reason} on {object}"))
}

/// Nobody reaches the API server for so long. Containers start again and see what they saw; a GPU that falls sick is taken from
/// kubelet at once, and told of when that is possible; a plugin that starts meanwhile knows no pods, and what it is asked for
/// waits, as does everything that is to be written.
async fn away(inject: &'static str, period: Duration) -> Result<()> {
    let (mut cluster, pods) = cluster(inject).await?;
    for (name, node) in [("a", "n1"), ("b", "n2")] {
        pods.create(&PodSpec::new(name, &[(GPU_MEM, "12")]).on(node)).await?;
    }
    until_run(&cluster, &["a", "b"]).await?;
    let before = [("n1", "a"), ("n2", "b")].map(|(node, name)| cluster.node(node).and_then(|node| seen(node.kubelet(), name)));
    let [of_a, of_b] = before;
    let (of_a, of_b) = (of_a?, of_b?);
    let idle = u32::from(of_a == "GPU-n1-0");

    let began = Instant::now();
    let gone = cluster.api().faults().inject(Matching::anything(), Fault::DropConnection);
    cluster.api().faults().drop_watches("");
    cluster.node("n1")?.set_health(idle, Health::Xid(79))?;
    let healthy = |kubelet: &Kubelet| kubelet.capacity().get(GPU_MEM).map_or(0, |(_, healthy)| *healthy);
    ensure!(cluster.node("n1")?.kubelet().until(DEADLINE, |kubelet| healthy(kubelet) == 16).await, "kubelet is not told of a sick GPU");
    let mut n_restarts = 0;
    while began.elapsed() < period * 2 / 3 {
        ensure!(starts_again(cluster.node("n1")?.kubelet(), "a").await? == of_a, "a sees another GPU than before");
        n_restarts += 1;
        tokio::time::sleep(BEAT.max(period / 60)).await;
    }
    // From here on nobody knows the pods of n2 but their containers.
    let node = cluster.node("n2")?;
    node.restart_plugin().await?;
    let before = starts(node.kubelet(), "b");
    node.kubelet().restart_container("default", "b", "main")?;
    cluster.node("n1")?.restart_kubelet().await?;
    tokio::time::sleep(period.saturating_sub(began.elapsed()).max(LOOK)).await;
    ensure!(starts(cluster.node("n2")?.kubelet(), "b") == before, "b starts though nobody can know what it may see");
    eprintln!("{} requests failed in {:?}; a started {n_restarts} times again", gone.hits(), began.elapsed());
    gone.remove();
    cluster.api().cluster().compact();

    let back = Instant::now();
    let kubelet = cluster.node("n2")?.kubelet();
    ensure!(
        kubelet.until(DEADLINE, |kubelet| starts(kubelet, "b") > before).await,
        "b does not start again: {:?}\n{}",
        kubelet.container("default", "b", "main").map(|container| container.state),
        cluster.node("n2")?.plugin().map(testbed::daemons::Daemon::log_tail).unwrap_or_default()
    );
    ensure!(seen(kubelet, "b")? == of_b, "b sees another GPU than before");
    eprintln!("b started after {:?}", back.elapsed());
    let is_sick = |snapshot: &Snapshot| {
        let device = snapshot.devices.get("n1")?.spec.devices.iter().find(|info| info.minor == i32::try_from(idle).ok())?;
        (!device.health).then_some(())
    };
    cluster.until("the sick GPU to be published", DEADLINE, is_sick).await?;
    until_told(&cluster, "n1", "GPUUnhealthy").await?;
    eprintln!("everything was told after {:?}", back.elapsed());
    pods.create(&PodSpec::new("new", &[(GPU_MEM, "12")]).on("n2")).await?;
    until_run(&cluster, &["a", "b", "new"]).await?;
    eprintln!("a new pod ran after {:?}", back.elapsed());
    ensure!(starts_again(cluster.node("n1")?.kubelet(), "a").await? == of_a, "a sees another GPU than before");
    verify(&cluster).await
}

#[rstest]
#[case::by_cdi("cdi")]
#[case::by_variable("envvar")]
#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_is_away_for_a_while(#[case] inject: &'static str) -> Result<()> {
    away(inject, A_WHILE).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes ten minutes"]
async fn the_api_server_is_away_for_ten_minutes() -> Result<()> {
    away("cdi", Duration::from_secs(600)).await
}
