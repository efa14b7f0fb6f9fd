//! A second kube-scheduler with two pods, of which the extender beside the one that holds the Lease decides: killed, stopped,
//! parted.

use anyhow::{Result, ensure};
use futures::future::BoxFuture;

use super::breaking;
use super::world::NO_SCHEDULER;
use super::{Scenario, World};
use crate::second_scheduler::SchedulerContainer::{Extender, KubeScheduler};
use crate::second_scheduler::{LEADER, LEASE, PROFILE, SecondScheduler};
use kit::http_client::HttpClient;
use kit::pods::PodBuilder;

/// Pods that are created in each step of a scenario.
const N_PODS: usize = 4;

pub(super) const SCENARIOS: &[Scenario] = scenarios! {
    needs "replicas that it starts itself", on [Second], within with_second(world, second):
    "second-killed" => containers_killed,
        "a second kube-scheduler with two pods, each container killed: binds resume, and nothing is doubled";
    "second-paused" => containers_paused,
        "either container of the leading pod stopped until the other pod leads: it binds nothing when it goes on";
    "second-parted" => lease_parted,
        "Lease and leader's object changed by hand: at no time do two extenders decide, and binds resume";
};

/// The function of a scenario, which gets the second scheduler.
type SchedulerAction = for<'a> fn(&'a mut World, &'a mut SecondScheduler) -> BoxFuture<'a, Result<()>>;

/// Runs a scenario with a second kube-scheduler, and its extenders, in the place of the cluster's own extender.
async fn with_second(world: &mut World, scenario: SchedulerAction) -> Result<()> {
    let cluster = world.cluster()?;
    cluster.scheduler.kill().await;
    let mut second = SecondScheduler::start(cluster).await?;
    scenario(world, &mut second).await?;
    second.end()?;
    world.restart_scheduler().await
}

/// Waits until pods run that this kube-scheduler places, with GPUs and without, while at most one extender decides.
async fn pods_run(world: &mut World, second: &SecondScheduler, prefix: &str) -> Result<()> {
    let mut specs = vec![PodBuilder::new(&format!("{prefix}-plain"), &[("cpu", "1m")])];
    for idx in 0..N_PODS {
        specs.push(PodBuilder::units(&format!("{prefix}-{idx}"), 1));
    }
    let specs = specs.into_iter().map(|spec| spec.scheduler(PROFILE));
    let names = world.create_all(specs).await?;
    let watching = async {
        loop {
            second.ensure_one_decides().await?;
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        ran = world.until_running(&names) => ran,
        two = watching => two,
    }
}

async fn containers_killed(world: &mut World, second: &mut SecondScheduler) -> Result<()> {
    pods_run(world, second, "first").await?;
    for (container, pods) in [
        (Extender, "extender-killed"),
        (KubeScheduler, "kube-scheduler-killed"),
    ] {
        let leader = second.holder();
        let daemon = second.container(&leader, container)?;
        daemon.kill().await;
        daemon.restart().await?;
        pods_run(world, second, pods).await?;
    }
    world.verify().await
}

async fn containers_paused(world: &mut World, second: &mut SecondScheduler) -> Result<()> {
    let stopped = second.holder();
    second.container(&stopped, KubeScheduler)?.pause().await?;
    second.until_held_by_another_than(&stopped).await?;
    pods_run(world, second, "kube-scheduler-stopped").await?;
    second.container(&stopped, KubeScheduler)?.resume()?;
    pods_run(world, second, "kube-scheduler-goes-on").await?;
    late_bind(world, second).await?;
    world.verify().await
}

/// A bind that lies before a stopped extender until the other pod leads and has given the room away.
async fn late_bind(world: &mut World, second: &mut SecondScheduler) -> Result<()> {
    let node = world.gpu_node(2)?;
    let units = node.units.iter().max().copied().unwrap_or_default();
    let spec =
        |name: &str, scheduler: &str| PodBuilder::units(name, units).on(&node.name).scheduler(scheduler);
    let late = world.pods.create(&spec("late", NO_SCHEDULER)).await?;
    let stopped = second.holder();
    let (url, client) = (second.extender(&stopped)?, HttpClient::new());
    // The client opens a connection and keeps it.
    client.get(&format!("{url}/inspect")).await?;
    second.container(&stopped, Extender)?.pause().await?;
    let bind = breaking::bind_late(client, url, &late, &node.name);
    second.container(&stopped, KubeScheduler)?.kill().await;
    second.until_held_by_another_than(&stopped).await?;
    world.start(spec("prompt", PROFILE)).await?;
    second.container(&stopped, Extender)?.resume()?;
    breaking::ensure_not_bound(world, &late, bind).await?;
    second.container(&stopped, KubeScheduler)?.restart().await
}

async fn lease_parted(world: &mut World, second: &mut SecondScheduler) -> Result<()> {
    pods_run(world, second, "first").await?;
    let (leader, another) = (second.holder(), "gpushare-scheduler-9_1");
    second.set_holder(LEADER, another)?;
    pods_run(world, second, "another-is-named").await?;
    second.set_holder(LEASE, another)?;
    pods_run(world, second, "another-holds").await?;
    let is_held = !second.holder().is_empty();
    ensure!(is_held, "no kube-scheduler holds the Lease after {leader}");
    world.verify().await
}
