//! One wave: equal pods are created, one part of the cluster is killed meanwhile, and the results of the pods
//! are counted.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use serde::Serialize;

use super::{DEADLINE, World, breaking};
use kit::invariants;
use kit::observer::ClusterSnapshot;
use kit::parts::ClusterPart;
use kit::pod_fields::{has_ended, is_running, phase};

/// The longest wait for the pods of a wave, and for a part that was killed.
const LIMIT: Duration = Duration::from_secs(240);

/// The plan of one wave.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The prefix of the names of its pods.
    pub prefix: String,
    /// Number of its pods; each asks for one memory unit.
    pub n_pods: usize,
    /// The part that is killed; `None` in a wave without a fault.
    pub kill: Option<ClusterPart>,
    /// The number of pods that are bound when the part is killed.
    pub n_bound: usize,
}

/// The result of a wave.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Wave {
    /// The part that was killed.
    pub killed: Option<ClusterPart>,
    /// Number of pods.
    pub n_pods: usize,
    /// Number of pods that ran.
    pub n_ran: usize,
    /// Pods that failed, by their reason.
    pub lost: BTreeMap<String, usize>,
    /// Pods that neither ran nor failed.
    pub stuck: Vec<String>,
    /// Containers that see other devices than are recorded for their pods.
    pub wrong: Vec<String>,
    /// Oversubscribed devices, a sentence each.
    pub over: Vec<String>,
    /// Seconds from the killing until the part served again.
    pub seconds_away: f64,
    /// Seconds from the first pod's creation until the last pod ran or had failed.
    pub seconds: f64,
}

impl Wave {
    /// Number of pods that failed.
    pub(crate) fn n_lost(&self) -> usize {
        self.lost.values().sum()
    }

    /// True if no container was wrong, no GPU overfull and no pod stuck.
    pub fn is_ok(&self) -> bool {
        self.wrong.is_empty() && self.over.is_empty() && self.stuck.is_empty()
    }
}

/// Runs a wave, and removes its pods.
///
/// # Errors
/// The part cannot be killed, does not serve again, or the API server cannot be asked.
pub async fn run(world: &mut World, plan: &Plan) -> Result<Wave> {
    let began = Instant::now();
    let names = world.create_many(&plan.prefix, plan.n_pods, 1).await?;
    world.until_part_bound(LIMIT, &names, plan.n_bound).await?;
    let keys: Vec<String> = names.iter().map(|name| world.key(name)).collect();
    let killed_at = Instant::now();
    if let Some(part) = plan.kill {
        let node = world.gpu_node(1)?.name;
        breaking::restart(world, part, &node).await?;
    }
    let killed = std::mem::take(&mut world.killed);
    let settled = async {
        let settled = |snapshot: &ClusterSnapshot| snapshot.has_all(&keys, is_settled).then_some(());
        let what = "the pods to run or to fail";
        // Pods that have not settled by then are counted below.
        let _ = world.until_within(LIMIT, what, settled).await;
        began.elapsed()
    };
    let back = async {
        breaking::until_serving(world, &killed, LIMIT).await?;
        anyhow::Ok(killed_at.elapsed())
    };
    let (settled, back) = futures::join!(settled, back);
    let mut wave = count_results(world, &keys).await?;
    (wave.killed, wave.seconds_away, wave.seconds) = (plan.kill, back?.as_secs_f64(), settled.as_secs_f64());
    world.clear_within(LIMIT).await?;
    breaking::until_ready(world).await?;
    Ok(wave)
}

fn is_settled(pod: &Pod) -> bool {
    is_running(pod) || has_ended(pod)
}

/// Counts the pods of a wave that ran, failed or are stuck, and the violations that remain.
async fn count_results(world: &World, keys: &[String]) -> Result<Wave> {
    // The watches of pods and Devices are not in step: a violation counts only if it lasts.
    let violations =
        |snapshot: &ClusterSnapshot| invariants::held_amounts(snapshot, &invariants::NONE_EXCUSED).violations;
    let agree = |snapshot: &ClusterSnapshot| violations(snapshot).is_empty().then_some(());
    let what = "the accounts to agree";
    let _ = world.until_within(DEADLINE / 4, what, agree).await;
    let mut snapshot = world.observer.now();
    let mut wave = Wave {
        n_pods: keys.len(),
        over: violations(&snapshot),
        ..Wave::default()
    };
    for key in keys {
        match snapshot.pods.get(key) {
            Some(pod) if is_running(pod) => wave.n_ran += 1,
            Some(pod) if is_settled(pod) => {
                let reason = pod.status.as_ref().and_then(|status| status.reason.as_deref());
                let reason = reason.unwrap_or(phase(pod)).to_owned();
                *wave.lost.entry(reason).or_default() += 1;
            }
            _ => wave.stuck.push(key.clone()),
        }
    }
    snapshot.pods.retain(|key, _| keys.contains(key));
    let views = invariants::container_views(&world.client(), &snapshot).await?;
    wave.wrong = invariants::misfits(&views);
    wave.wrong.extend(invariants::clashes(&snapshot, &views));
    Ok(wave)
}
