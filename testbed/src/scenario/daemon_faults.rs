//! Daemons that are killed: the scheduler with bindings in flight, the plugins, the scheduling loop itself.

use anyhow::Result;
use futures::FutureExt;
use futures::future::BoxFuture;
use proto::resource::GPU_MEM;

use super::{Body, DEADLINE, World};
use crate::observer::Snapshot;

/// Pods that are on their way while something is killed.
const N_PODS: usize = 24;
/// How often.
const N_KILLS: usize = 4;

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] = &[
    ("scheduler-killed", "killed with bindings in flight, the scheduler loses and doubles nothing", scheduler_killed),
    ("plugins-killed", "killed while pods start, the plugins lose nothing", plugins_killed),
    ("loop-restarted", "kube-scheduler restarted with bindings in flight changes nothing", loop_restarted),
];

/// Waits until a further part of the pods is bound, so that each kill meets a different moment.
async fn until_part_bound(world: &World, names: &[String], n_bound: usize) -> Result<()> {
    let keys: Vec<String> = names.iter().map(|name| world.key(name)).collect();
    let enough = |snapshot: &Snapshot| (World::n_bound(snapshot, &keys) >= n_bound).then_some(());
    Ok(world.observer.until(&format!("{n_bound} pods to be bound"), DEADLINE, enough).await?)
}

fn scheduler_killed(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let names = world.create_many("pod", N_PODS, &[(GPU_MEM, "1")]).await?;
        for kill in 0..N_KILLS {
            until_part_bound(world, &names, kill * N_PODS / N_KILLS).await?;
            world.cluster()?.scheduler.restart().await?;
        }
        world.until_all_run(&names).await
    }
    .boxed()
}

fn plugins_killed(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let nodes: Vec<String> = world.cluster()?.nodes().filter(|n| n.plugin().is_some()).map(|n| n.name().to_owned()).collect();
        // Kubelet fails a pod for good that it admits while its plugin is away, so each kill meets pods that are
        // admitted already and pods that come later.
        let mut names = Vec::new();
        for (round, node) in nodes.iter().cycle().take(N_KILLS).enumerate() {
            names.extend(world.create_many(&format!("pod-{round}"), 4, &[(GPU_MEM, "1")]).await?);
            world.until_all_run(&names).await?;
            world.cluster()?.node(node)?.restart_plugin().await?;
            world.cluster()?.until_ready(DEADLINE).await?;
            world.verify().await?;
        }
        names.extend(world.create_many("last", 4, &[(GPU_MEM, "1")]).await?);
        world.until_all_run(&names).await
    }
    .boxed()
}

fn loop_restarted(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let names = world.create_many("pod", N_PODS, &[(GPU_MEM, "1")]).await?;
        for restart in 0..N_KILLS {
            until_part_bound(world, &names, restart * N_PODS / N_KILLS).await?;
            world.cluster()?.start_kube_scheduler().await?;
        }
        world.until_all_run(&names).await
    }
    .boxed()
}
