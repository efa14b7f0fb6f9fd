//! Devices that kubelet gave to pods which somebody else placed: counted with the pod, or alone while no such pod is known
//! on that node.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use placement::{NodeView, OwnerId};
use proto::kubelet_allocations::KubeletAllocations;
use proto::plugin_reports::{self, PodUids};
use tracing::warn;

use super::Index;
use super::nodes::NodeState;
use crate::accounting::Report;
use crate::given::{self, Given, GivenByPod};

impl NodeState {
    /// What kubelet has given to a pod.
    pub(super) fn given_to(&self, uid: &str) -> &[Given] {
        self.given.get(uid).map(Vec::as_slice).unwrap_or_default()
    }

    /// The report of the node's plugin on a pod.
    pub(super) fn report_on(&self, uid: &str) -> Report {
        match &self.without_devices {
            None => Report::Silent,
            Some(uids) if uids.contains(uid) => Report::GivenNothing,
            Some(_) => Report::Pending,
        }
    }
}

impl Index {
    /// Takes in what a Device object says kubelet has given; what cannot be read leaves in force what was read before.
    pub(super) fn read_given(&mut self, node: &str, device: &ObjectMeta) {
        let read = device
            .annotations
            .as_ref()
            .map(KubeletAllocations::read)
            .transpose();
        match read {
            Ok(checkpoints) => {
                let given = checkpoints
                    .flatten()
                    .map(|checkpoints| given::of_checkpoints(&checkpoints, &self.names));
                self.replace_given(node, given.unwrap_or_default());
            }
            Err(error) => {
                warn!(node, %error, "what kubelet has given to pods is taken to be as it was before");
            }
        }
    }

    /// Takes in the pods that were given nothing according to a Device object; an unreadable annotation changes nothing.
    pub(super) fn read_without_devices(&mut self, node: &str, device: &ObjectMeta) {
        match plugin_reports::read_pods_without_devices(device.annotations.as_ref()) {
            Ok(now) => self.replace_without_devices(node, now),
            Err(error) => {
                warn!(node, %error, "which pods were given nothing is taken to be as it was before");
            }
        }
    }

    /// Counts pods again of which a node's plugin says something else than before.
    pub(super) fn replace_without_devices(&mut self, node: &str, now: Option<PodUids>) {
        let Some(state) = self.nodes.get_mut(node) else {
            return;
        };
        if state.without_devices == now {
            return;
        }
        let before = std::mem::replace(&mut state.without_devices, now.clone());
        if before.is_some() != now.is_some() {
            self.account_again(node);
        }
        let (before, now) = (before.unwrap_or_default(), now.unwrap_or_default());
        for uid in before.symmetric_difference(&now) {
            let owner = self.owner(uid);
            self.account(&owner);
        }
    }

    /// Counts what a node says its kubelet has given, in place of what it said before.
    pub(super) fn replace_given(&mut self, node: &str, now: GivenByPod) {
        let Some(state) = self.nodes.get_mut(node) else {
            return;
        };
        if state.given == now {
            return;
        }
        let before = std::mem::replace(&mut state.given, now);
        let uids: BTreeSet<Box<str>> = before.into_keys().chain(state.given.keys().cloned()).collect();
        for uid in &uids {
            let is_given = self
                .nodes
                .get(node)
                .is_some_and(|state| state.given.contains_key(uid));
            let nodes = self.given_on.entry(uid.clone()).or_default();
            nodes.retain(|other| **other != *node);
            if is_given {
                nodes.push(node.into());
            } else if nodes.is_empty() {
                self.given_on.remove(uid);
            }
            let owner = self.owner(uid);
            self.account(&owner);
            self.account_alone(uid, node);
        }
    }

    /// Counts again what was given to a pod, after the pod has come, moved, ended or gone.
    pub(super) fn account_given(&mut self, uid: &str) {
        for node in self.given_on.get(uid).cloned().unwrap_or_default() {
            self.account_alone(uid, &node);
        }
    }

    /// Counts what was given to every pod on a node, after its devices have changed.
    pub(super) fn account_given_on(&mut self, node: &str) {
        let uids: Vec<Box<str>> = self
            .nodes
            .get(node)
            .map(|state| state.given.keys().cloned().collect())
            .unwrap_or_default();
        for uid in uids {
            self.account_alone(&uid, node);
        }
    }

    /// Counts what was given to a pod that is not known on that node, under a name of its own.
    fn account_alone(&mut self, uid: &str, node: &str) {
        let owner = OwnerId::from(format!("{uid}@{node}"));
        let given = self
            .nodes
            .get(node)
            .map(|state| state.given_to(uid))
            .unwrap_or_default();
        let is_known = self
            .pods
            .get(uid)
            .is_some_and(|entry| entry.bound().is_some_and(|bound| *bound.node == *node));
        if given.is_empty() || is_known || self.ended.contains_key(uid) {
            self.fleet.release(owner.as_str());
            return;
        }
        let view = self.fleet.node_id(node).and_then(|id| self.fleet.view(id));
        let (holdings, problem) = given::alone(given, view.and_then(NodeView::inventory));
        if let Some(problem) = problem {
            warn!(
                node,
                pod = uid,
                problem,
                "devices that kubelet has given to a pod cannot be counted"
            );
        }
        if holdings.is_empty() {
            self.fleet.release(owner.as_str());
        } else {
            self.fleet.hold(&owner, node, holdings);
        }
    }
}
