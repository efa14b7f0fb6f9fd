//! Processes that are killed: the scheduler with bindings in flight, the plugins, kube-scheduler, and on real clusters the
//! container runtime and the API server.

use anyhow::Result;
use proto::resource::GPU_MEM;

use super::{ScenarioEntry, World, breaking};
use kit::observer::ClusterSnapshot;
use kit::parts::ClusterPart;

/// Pods that are being scheduled or started while a part is killed.
const N_PODS: usize = 24;
/// The number of times that a scenario kills its part.
const N_KILLS: usize = 4;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
    "scheduler-killed" => scheduler_killed,
        "killed with bindings in flight, the scheduler loses and doubles nothing";
    "plugins-killed" => plugins_killed,
        "killed while pods start, the plugins lose nothing";
    "loop-restarted" => loop_restarted,
        "kube-scheduler restarted with bindings in flight changes nothing";
};

/// The scenarios of this file that run on real clusters alone.
pub(super) const OF_REAL_CLUSTERS: &[ScenarioEntry] = scenarios! {
    "runtime-killed" => runtime_killed,
        "killed while pods start, the container runtime loses no pod and no GPU";
    "apiserver-killed" => apiserver_killed,
        "killed while pods are scheduled and started, the API server loses no pod and no GPU";
};

/// Waits until this number of the pods is bound, so that each kill meets a different moment.
async fn until_part_bound(world: &World, names: &[String], n_bound: usize) -> Result<()> {
    let keys: Vec<String> = names.iter().map(|name| world.key(name)).collect();
    let enough = |snapshot: &ClusterSnapshot| (World::n_bound(snapshot, &keys) >= n_bound).then_some(());
    world.until(&format!("{n_bound} pods to be bound"), enough).await
}

/// Kills the scheduler while pods are being bound, each time at another moment; all pods run in the end.
async fn scheduler_killed(world: &mut World) -> Result<()> {
    let names = world.create_many("pod", N_PODS, &[(GPU_MEM, "1")]).await?;
    for kill in 0..N_KILLS {
        until_part_bound(world, &names, kill * N_PODS / N_KILLS).await?;
        breaking::restart(world, ClusterPart::Scheduler, "").await?;
    }
    world.until_all_run(&names).await
}

/// Kills the plugins in turn; pods that run go on, and later pods run.
async fn plugins_killed(world: &mut World) -> Result<()> {
    let nodes = breaking::plugin_nodes(world);
    // Kubelet fails a pod for good that it admits while its plugin is away, so each kill meets pods that are
    // admitted already and pods that come later.
    let mut names = Vec::new();
    for (round, node) in nodes.iter().cycle().take(N_KILLS).enumerate() {
        names.extend(
            world
                .create_many(&format!("pod-{round}"), 4, &[(GPU_MEM, "1")])
                .await?,
        );
        world.until_all_run(&names).await?;
        breaking::restart(world, ClusterPart::Plugin, node).await?;
        breaking::until_ready(world).await?;
        world.verify().await?;
    }
    names.extend(world.create_many("last", 4, &[(GPU_MEM, "1")]).await?);
    world.until_all_run(&names).await
}

/// Restarts kube-scheduler while pods are being bound; all pods run in the end.
async fn loop_restarted(world: &mut World) -> Result<()> {
    let names = world.create_many("pod", N_PODS, &[(GPU_MEM, "1")]).await?;
    for restart in 0..N_KILLS {
        until_part_bound(world, &names, restart * N_PODS / N_KILLS).await?;
        breaking::restart(world, ClusterPart::KubeScheduler, "").await?;
    }
    world.until_all_run(&names).await
}

/// Restarts the container runtime of a node while pods are being bound; all pods run in the end.
async fn runtime_killed(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    let names = world.create_many("pod", N_PODS, &[(GPU_MEM, "1")]).await?;
    until_part_bound(world, &names, N_PODS / 2).await?;
    breaking::restart(world, ClusterPart::Containerd, &node).await?;
    world.until_all_run(&names).await
}

/// Restarts the API server while pods are being bound; all pods run in the end.
async fn apiserver_killed(world: &mut World) -> Result<()> {
    let names = world.create_many("pod", N_PODS, &[(GPU_MEM, "1")]).await?;
    until_part_bound(world, &names, N_PODS / 2).await?;
    breaking::restart(world, ClusterPart::Apiserver, "").await?;
    world.until_all_run(&names).await
}
