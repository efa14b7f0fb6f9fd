//! Processes that are killed: the scheduler with bindings in flight, the plugins, kube-scheduler, and on real clusters the
//! container runtime and the API server.

use anyhow::Result;

use super::{DEADLINE, Scenario, World, breaking};
use kit::parts::{ClusterPart, Need};

/// Pods that are being scheduled or started while a part is killed.
const N_PODS: usize = 24;
/// The numbers of bound pods at which a scenario kills its part.
const MOMENTS: [usize; 4] = [0, N_PODS / 4, N_PODS / 2, 3 * N_PODS / 4];

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "its processes", on [Faults]:
    "scheduler-killed" needs [Need::Kill(ClusterPart::Scheduler)] => scheduler_killed,
        "killed with bindings in flight, the scheduler loses and doubles nothing";
    "plugins-killed" needs [Need::Kill(ClusterPart::Plugin)] => plugins_killed,
        "killed while pods start, the plugins lose nothing";
    "loop-restarted" needs [Need::Kill(ClusterPart::KubeScheduler)] => loop_restarted,
        "kube-scheduler restarted with bindings in flight changes nothing";
};

/// The scenarios of this file that run on real clusters alone.
pub(super) const OF_REAL_CLUSTERS: &[Scenario] = scenarios! { needs "its processes", on []:
    "runtime-killed" needs [Need::Kill(ClusterPart::Containerd)] => runtime_killed,
        "killed while pods start, the container runtime loses no pod and no GPU";
    "apiserver-killed" needs [Need::Kill(ClusterPart::Apiserver)] => apiserver_killed,
        "killed while pods are scheduled and started, the API server loses no pod and no GPU";
};

/// Kills a part when these numbers of pods are bound; all pods run in the end.
async fn kill_while_binding(
    world: &mut World,
    part: ClusterPart,
    node: &str,
    moments: &[usize],
) -> Result<()> {
    let names = world.create_many("pod", N_PODS, 1).await?;
    for n_bound in moments {
        world.until_part_bound(DEADLINE, &names, *n_bound).await?;
        breaking::restart(world, part, node).await?;
    }
    world.until_running(&names).await
}

async fn scheduler_killed(world: &mut World) -> Result<()> {
    kill_while_binding(world, ClusterPart::Scheduler, "", &MOMENTS).await
}

async fn loop_restarted(world: &mut World) -> Result<()> {
    kill_while_binding(world, ClusterPart::KubeScheduler, "", &MOMENTS).await
}

async fn runtime_killed(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    kill_while_binding(world, ClusterPart::Containerd, &node, &[N_PODS / 2]).await
}

async fn apiserver_killed(world: &mut World) -> Result<()> {
    kill_while_binding(world, ClusterPart::Apiserver, "", &[N_PODS / 2]).await
}

async fn plugins_killed(world: &mut World) -> Result<()> {
    let nodes = breaking::plugin_nodes(world);
    // Kubelet fails a pod for good that it admits while its plugin is away, so each kill meets pods that are
    // admitted already and pods that come later.
    let mut names = Vec::new();
    for (round, node) in nodes.iter().cycle().take(MOMENTS.len()).enumerate() {
        names.extend(world.create_many(&format!("pod-{round}"), 4, 1).await?);
        world.until_running(&names).await?;
        breaking::restart(world, ClusterPart::Plugin, node).await?;
        breaking::until_ready(world).await?;
        world.verify().await?;
    }
    names.extend(world.create_many("last", 4, 1).await?);
    world.until_running(&names).await
}
