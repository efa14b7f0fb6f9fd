//! CPU and memory: what every pod uses of its node, whether or not it asks for devices.

use std::cmp::max;

use placement::{HostAmounts, HostLoad, NodePolicy, OwnerId, PodProfile};
use proto::node::Node;
use proto::pod::Pod;
use proto::totals::HostResources;
use rustc_hash::FxHashMap;

use super::eviction::Rank;
use super::{Index, NodeAsk};
use crate::accounting;

/// What is learnt anew is worth it only if so many parts of all pods have come or gone.
const NEWS: u64 = 32;
/// Or so many pods, if they are few.
const FEW: u64 = 16;

/// Pods that use CPU and memory and ask for nothing of ours, by UID.
pub(super) type PlainPods = FxHashMap<OwnerId, PlainPod>;

/// The record of such a pod.
#[derive(Debug)]
pub(super) struct PlainPod {
    pub(super) rank: Rank,
    /// Number of the list that named it last.
    list: u32,
}

impl Index {
    /// Takes in what a node has.
    pub(super) fn see_host(&mut self, name: &str, node: &Node) {
        self.fleet
            .set_host(name, HostResources::of_node(node).map(accounting::host_amounts));
    }

    /// Takes in what a pod uses where it runs; `asked` is known of pods that ask for something of ours.
    pub(super) fn see_use(&mut self, pod: &Pod, asked: Option<HostAmounts>) {
        let uid = pod.uid();
        let Some(node) = pod
            .spec
            .node_name
            .as_deref()
            .filter(|node| !node.is_empty() && !pod.is_terminal())
        else {
            // What a decision takes stands until the decision does.
            if self.assumed_node(uid).is_none() {
                self.see_no_use(uid);
            }
            return;
        };
        let owner = self.owner(uid);
        let amounts = asked.unwrap_or_else(|| accounting::host_amounts(HostResources::of_pod(pod)));
        self.fleet.set_host_use(
            &owner,
            node,
            HostLoad {
                amounts,
                is_daemon: pod.is_tied_to_node(),
            },
        );
        if asked.is_none() {
            self.plain.insert(
                owner,
                PlainPod {
                    rank: Rank::of(pod),
                    list: self.pod_list.number,
                },
            );
        } else {
            self.plain.remove(uid);
        }
    }

    /// A pod uses nothing any more.
    pub(super) fn see_no_use(&mut self, uid: &str) {
        self.fleet.clear_host_use(uid);
        self.plain.remove(uid);
    }

    /// Forgets pods that the list which has ended did not name.
    pub(super) fn end_plain_list(&mut self) {
        let number = self.pod_list.number;
        let gone: Vec<OwnerId> = self
            .plain
            .extract_if(|_, plain| plain.list != number)
            .map(|(uid, _)| uid)
            .collect();
        for uid in gone {
            self.fleet.clear_host_use(uid.as_str());
        }
    }

    /// Counts a pod for what pods usually ask for, in place of what it asked for before.
    pub(super) fn count_ask(&mut self, uid: &str) {
        let Some(entry) = self.pods.get_mut(uid) else {
            return;
        };
        let gpus = entry
            .facts
            .ask
            .gpus()
            .map(accounting::gpu_ask)
            .unwrap_or_default();
        let spec = PodProfile {
            gpus,
            host: entry.facts.host,
        };
        if entry.counted == Some(spec) {
            return;
        }
        let before = entry.counted.replace(spec);
        let workload = self.fleet.workload_mut();
        workload.add(spec);
        if let Some(before) = before {
            workload.remove(&before);
        }
    }

    /// Has the policies that look ahead expect pods as they are now, or soon, if enough have come or gone.
    pub(super) fn learn_if_news(&mut self) {
        let workload = self.fleet.workload();
        let news = workload.n_changes().abs_diff(self.n_learnt);
        if !self.pod_list.synced
            || self.fleet.is_refreshing_workload()
            || news < max(FEW, workload.n_pods() / NEWS)
        {
            return;
        }
        if self.rehearses {
            self.n_learnt = workload.n_changes();
            self.fleet.begin_workload_refresh();
        } else {
            self.learn();
        }
    }

    /// Takes on what has been rehearsed.
    pub fn end_learning(&mut self) {
        self.fleet.finish_workload_refresh();
    }

    /// Has the policies that look ahead expect pods as they are now; whether that is news.
    pub fn learn(&mut self) -> bool {
        self.n_learnt = self.fleet.workload().n_changes();
        self.fleet.refresh_workload_model()
    }

    /// What a pod asks of nodes that asks for no devices: where policy looks ahead, that it leave room for those that do.
    pub fn host_ask<'a>(&self, pod: &'a Pod) -> Option<NodeAsk<'a>> {
        let host = accounting::host_amounts(HostResources::of_pod(pod));
        let ask = NodeAsk {
            uid: pod.uid(),
            host,
            policies: self.policies,
            in_units: true,
            ..NodeAsk::default()
        };
        (self.policies.node == NodePolicy::Fill).then_some(ask)
    }
}
