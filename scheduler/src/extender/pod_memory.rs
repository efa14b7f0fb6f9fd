//! State of pods from one request to the next, and the sweep that forgets pods that are gone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval};

use super::Extender;
use super::avoided_nodes::AvoidedNodes;
use super::preempt::NamedVictims;
use super::recent_pods::RecentPods;
use super::requeue::{SampleRetries, WaitingPods};
use crate::accounting::PodFacts;
use crate::make_room::Rooms;
use crate::make_room::refused_pods::RefusedPods;

/// Time between two sweeps. A pod that no watch shows, or that requests no devices, is forgotten after one or two sweeps without
/// a request about it.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// State of pods from one request to the next. All of it is lost with the process.
#[derive(Debug, Default)]
pub(crate) struct PodMemory {
    /// The fields of pods that filter requests carried, until a watch shows the pods.
    pub(super) facts: RecentPods<PodFacts>,
    pub(super) avoided_nodes: AvoidedNodes,
    /// The victims in the last `preempt` answer for each pod.
    pub(super) victims: RecentPods<NamedVictims>,
    pub(super) retries: SampleRetries,
    pub(super) waiting: WaitingPods,
    /// No refusal is rechecked before this time.
    pub(super) rechecks_paused_until: Option<Instant>,
    /// The pods for which the leader may make room, with the nodes that refused them.
    pub(crate) refused: RefusedPods,
    pub(crate) rooms: Rooms,
}

impl PodMemory {
    /// Forgets the pods that the last sweep has seen and that are not shown now.
    fn sweep(&mut self, is_shown: impl Fn(&str) -> bool) {
        self.facts.sweep(&is_shown);
        self.avoided_nodes.0.sweep(&is_shown);
        self.victims.sweep(&is_shown);
        self.retries.samples.sweep(&is_shown);
        self.waiting.sweep(&is_shown);
    }
}

/// Sweeps the memory of pods until the process ends.
pub async fn sweep_memory(extender: Arc<Extender>) {
    let mut sweeps = interval(SWEEP_INTERVAL);
    sweeps.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        sweeps.tick().await;
        let index = extender.index.read();
        extender.memory().sweep(|uid| index.is_shown(uid));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::extender::{filter, now};
    use crate::offline;

    /// Everything that filters keep for a pod goes with it.
    #[tokio::test]
    async fn a_pod_that_is_gone_is_forgotten() {
        let amounts = json!({"aliyun.com/gpu-mem": "8", "aliyun.com/gpu-count": "1"});
        let node =
            json!({"metadata": {"name": "n1"}, "status": {"capacity": amounts, "allocatable": amounts}});
        let pod = |name: &str, units: &str| {
            let limits = json!({"aliyun.com/gpu-mem": units});
            let metadata = json!({"name": name, "namespace": "d", "uid": name});
            json!({"metadata": metadata, "spec": {"containers": [{"name": "c", "resources": {"limits": limits}}]}})
        };
        let shown = [pod("shown-fits", "1"), pod("shown-waits", "9")];
        let index = offline::index([node].into_iter(), std::iter::empty(), shown.iter().cloned());
        let extender = offline::extender(index);
        for pod in shown
            .iter()
            .chain(&[pod("gone-fits", "1"), pod("gone-waits", "9")])
        {
            let request = json!({"Pod": pod, "NodeNames": ["n1"]}).to_string();
            filter::answer(&extender, request.as_bytes(), now()).unwrap();
        }
        let mut memory = extender.memory();
        let kept = |memory: &PodMemory, name: &str| format!("{memory:?}").matches(name).count();
        let before = ["shown-", "gone-"].map(|name| kept(&memory, name));
        assert!(before[0] >= 1 && before[1] > before[0], "{memory:?}");
        let is_shown = |uid: &str| extender.index.read().is_shown(uid);
        memory.sweep(is_shown);
        assert_eq!(
            ["shown-", "gone-"].map(|name| kept(&memory, name)),
            before,
            "a watch may be behind"
        );
        memory.sweep(is_shown);
        assert_eq!(
            ["shown-", "gone-"].map(|name| kept(&memory, name)),
            [before[0], 0],
            "{memory:?}"
        );
    }

    /// Any number of pods may wait that preempt no others.
    #[tokio::test]
    async fn a_pod_that_preempts_no_others_is_not_remembered_for_room() {
        let amounts = json!({"aliyun.com/gpu-mem": "8", "aliyun.com/gpu-count": "1"});
        let node =
            json!({"metadata": {"name": "n1"}, "status": {"capacity": amounts, "allocatable": amounts}});
        let limits = json!({"aliyun.com/gpu-mem": "9"});
        let spec = json!({"priority": -1, "containers": [{"name": "c", "resources": {"limits": limits}}]});
        let pod = json!({"metadata": {"name": "waits", "namespace": "d", "uid": "waits"}, "spec": spec});
        let pods = std::iter::once(pod.clone());
        let index = offline::index(std::iter::once(node), std::iter::empty(), pods);
        let mut extender = offline::extender(index);
        extender.evicts_for_room = Some(true);
        let request = json!({"Pod": pod, "NodeNames": ["n1"]}).to_string();
        filter::answer(&extender, request.as_bytes(), now()).unwrap();
        let memory = extender.memory();
        let remembered = format!("{:?} {:?}", memory.refused, memory.rooms);
        assert!(!remembered.contains("waits"), "{remembered}");
    }
}
