//! Pods that keep coming while the device plugin of their node is replaced, or dies again and again.
//!
//! kubelet fails a pod for good that it admits without the plugin. The plugins of the testbed run in no pods, so the
//! scheduler learns of them only from the Node and from the pods that fail.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::world::all_run;
use super::{DEADLINE, Scenario, World};
use kit::apiserver::{Fault, Matching};
use kit::observer::ClusterSnapshot;
use kit::pod_fields::phase;
use kit::pods::PodBuilder;

/// The node, and its label, by which all pods are sent there.
const NODE: &str = "n1";

/// The pods that come while the plugin is replaced, one after the other.
const N_PODS: usize = 36;

/// The time between the creations of two pods while the plugin is replaced.
const PACE: Duration = Duration::from_millis(160);

/// The time that a plugin has to end.
const GRACE: Duration = Duration::from_secs(15);

/// The number of times that a plugin dies.
const N_DEATHS: usize = 4;

/// The pods that a controller keeps.
const N_KEPT: usize = 12;

/// The time for which a plugin is away after it has died.
const AWAY: Duration = Duration::from_secs(2);

/// The most pods that may fail by each death but the first.
const MOST_FAILED_LATER: usize = 3;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "plugins that it starts itself", on [Faults]:
    "plugin-replaced" => plugin_replaced,
        "a plugin that is replaced while pods come and go loses none of them";
    "plugin-dies" => plugin_dies,
        "a plugin that dies again and again costs few of the pods that a controller makes";
};

async fn plugin_replaced(world: &mut World) -> Result<()> {
    let names: Vec<String> = (0..N_PODS).map(|nth| format!("pod-{nth}")).collect();
    let pods = world.pods.clone();
    let coming = async {
        let mut ticks = interval(PACE);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for name in &names {
            ticks.tick().await;
            pods.create(&spec(name)).await?;
        }
        anyhow::Ok(())
    };
    let node = world.node(NODE)?;
    let (came, is_clean) = tokio::join!(coming, node.replace_plugin(GRACE));
    came?;
    ensure!(is_clean?, "the old plugin did not end cleanly");
    world.until_running(&names).await
}

async fn plugin_dies(world: &mut World) -> Result<()> {
    let mut controlled = ControlledPods::default();
    controlled.until_running(world, N_KEPT / 3).await?;
    for death in 0..N_DEATHS {
        // A real kubelet writes node status every ten seconds, and until then kube-scheduler counts the devices as they were.
        let status = Matching::requests("patch", "nodes/status").name(NODE);
        let late = world.cluster()?.api().faults().inject(status, Fault::Refuse(503));
        world.node(NODE)?.remove_plugin().await;
        let before = controlled.n_failed;
        // No pod can start without the plugin, so this wait always lasts for AWAY, the time of its absence.
        let _ = timeout(AWAY, controlled.until_running(world, N_KEPT)).await;
        world.node(NODE)?.start_plugin(&[])?;
        let _ = timeout(AWAY, controlled.until_running(world, N_KEPT)).await;
        late.remove();
        controlled.drop_failed(world);
        let n_failed = controlled.n_failed - before;
        // The scheduler finds out about the plugin by the first death.
        let most = if death == 0 { N_KEPT } else { MOST_FAILED_LATER };
        ensure!(
            n_failed <= most,
            "death {death} of the plugin has cost {n_failed} pods, more than {most}"
        );
        controlled.delete_some(world, N_KEPT / 2).await?;
    }
    controlled.until_running(world, N_KEPT).await
}

/// Pods whose number this keeps as a controller does: another pod for each that fails.
#[derive(Debug, Default)]
struct ControlledPods {
    /// The pods that are not known to have failed.
    names: Vec<String>,
    /// The pods that were created so far.
    n_made: usize,
    n_failed: usize,
}

impl ControlledPods {
    /// Creates pods until `n_wanted` run, another for each that fails.
    async fn until_running(&mut self, world: &World, n_wanted: usize) -> Result<()> {
        loop {
            self.drop_failed(world);
            while self.names.len() < n_wanted {
                let name = format!("kept-{}", self.n_made);
                world.create(spec(&name)).await?;
                self.n_made += 1;
                self.names.push(name);
            }
            let keys: Vec<String> = self.names.iter().map(|name| world.key(name)).collect();
            let run = |snapshot: &ClusterSnapshot| all_run(snapshot, &keys);
            let what = format!("{n_wanted} pods to run");
            if world.observer.until(&what, DEADLINE, run).await?.is_ok() {
                return Ok(());
            }
        }
    }

    /// Takes the pods that have failed out of `names`, and adds their number to `n_failed`.
    fn drop_failed(&mut self, world: &World) {
        let snapshot = world.observer.now();
        let n_before = self.names.len();
        self.names.retain(|name| {
            let pod = snapshot.pods.get(&world.key(name));
            pod.is_none_or(|pod| phase(pod) != "Failed")
        });
        self.n_failed += n_before - self.names.len();
    }

    /// Deletes this number of pods, as a controller that is scaled down.
    async fn delete_some(&mut self, world: &World, n_pods: usize) -> Result<()> {
        for _ in 0..n_pods.min(self.names.len()) {
            let name = self.names.pop().context("no pod is kept")?;
            world.delete(&name).await?;
        }
        Ok(())
    }
}

fn spec(name: &str) -> PodBuilder {
    PodBuilder::units(name, 1).on(NODE)
}
