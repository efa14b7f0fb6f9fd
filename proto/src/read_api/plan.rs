//! `POST plan`: the moves by which a node or some of its GPUs become empty, or free memory comes together.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::pod::{NodeSelector, is_default};

/// Largest number of moves of one plan; a request for more is refused with HTTP 400.
pub const MAX_PLANNED_MOVES: usize = 1_000;
/// Most pods whose volumes a request names: each may have nodes of its own.
pub const MAX_PODS_WITH_VOLUMES: usize = 1_000;
/// Most parts of the node affinity of a pod's volumes, by [`NodeSelector::n_parts`].
pub const MAX_AFFINITY_PARTS: usize = 256;

/// The body of `POST plan`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PlanRequest {
    /// The goal of the moves.
    pub goal: PlanGoal,
    /// The limits of the moves.
    #[serde(default)]
    pub limits: PlanLimits,
}

/// The goal of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "kind",
    rename_all = "kebab-case",
    rename_all_fields = "camelCase",
    deny_unknown_fields
)]
pub enum PlanGoal {
    /// Every pod that may move leaves the GPUs of a node.
    EmptyNode {
        /// The node's name.
        node: String,
    },
    /// Every pod that may move leaves some GPUs of a node.
    EmptyGpus {
        /// The node's name.
        node: String,
        /// The minor numbers of the GPUs.
        gpus: Vec<u32>,
    },
    /// Several GPUs of one node have memory free at the same time.
    Free {
        /// Bytes on each GPU.
        bytes: u64,
        /// The number of GPUs; 1 if absent.
        #[serde(default = "one")]
        gpus: usize,
        /// The names of the nodes of which any may be chosen; all if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        nodes: Option<Vec<String>>,
    },
    /// The largest free block of each node, memory on one of its GPUs, grows; the sum over all nodes counts.
    Join {},
}

fn one() -> usize {
    1
}

/// The node affinity of the volumes of pods, by UID, all of which has to match; without any they may be used on every node.
pub type PodVolumes = BTreeMap<String, Vec<NodeSelector>>;

/// The limits of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct PlanLimits {
    /// Most moves, at most [`MAX_PLANNED_MOVES`]; 10 if absent.
    pub max_moves: usize,
    /// Pods that have run for fewer seconds stay; 300 if absent.
    pub min_run_seconds: u64,
    /// The volumes of pods that the client has read. Other pods with claims stay, as the scheduler reads no volumes.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub volumes: PodVolumes,
}

impl Default for PlanLimits {
    fn default() -> Self {
        Self {
            max_moves: 10,
            min_run_seconds: 300,
            volumes: PodVolumes::new(),
        }
    }
}

/// The answer of `POST plan`. Nothing has been moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PlanAnswer {
    /// Always [`VERSION`](super::VERSION).
    pub api_version: String,
    /// Equal for equal goals, moves and pods left.
    pub plan_id: String,
    /// True if the moves reach the goal, apart from pods that must not move; otherwise they come nearest to it.
    pub reached: bool,
    /// The moves, in the order in which they have to be made.
    pub moves: Vec<PlannedMove>,
    /// The pods that stay on GPUs of the goal, each with the reason.
    pub left: Vec<LeftPod>,
    /// Bytes of memory that become free on the GPUs of the goal; for `join` the growth of the largest free blocks.
    pub gain: u64,
    /// The price of the moves.
    pub price: PlanPrice,
    /// The number of changes of the scheduler's state before it was read for the plan.
    pub generation: u64,
    /// The same number afterwards. If it differs, parts of the plan are from before a change, and parts from after it.
    pub generation_after: u64,
}

/// The move of one pod: it is evicted, and its successor is expected to get this place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PlannedMove {
    /// The pod's namespace; absent if the client may not see it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The pod's name; absent if the client may not see it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The pod's UID.
    pub uid: String,
    /// The node that it leaves.
    pub from: String,
    /// The minor numbers of the GPUs that it leaves.
    pub from_gpus: Vec<u32>,
    /// The node of its successor.
    pub to: String,
    /// The minor numbers of its successor's GPUs.
    pub to_gpus: Vec<u32>,
}

/// A pod that stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LeftPod {
    /// The pod's namespace; absent if the client may not see it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The pod's name; absent if the client may not see it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The pod's UID.
    pub uid: String,
    /// The reason for which it stays, in a sentence.
    pub reason: String,
    /// True if the reason may pass within minutes: a disruption budget without room, or a pod that is being deleted.
    #[serde(skip_serializing_if = "is_default")]
    pub temporary: bool,
    /// True if the pod stays because of its volumes, which [`PlanLimits::volumes`] may name.
    #[serde(skip_serializing_if = "is_default")]
    pub volumes: bool,
}

/// The price of moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PlanPrice {
    /// The number of pods that restart.
    pub restarts: u32,
    /// GiB of GPU memory that these pods hold, times the hours that they have run.
    pub gib_hours: f64,
}

/// The reason that is shown for a pod whose names are hidden, and that may be evicted within minutes ([`LeftPod::temporary`]).
const HIDDEN_REASON: &str = "it may not be evicted now";

pub(super) fn display_name(namespace: &str, name: &str, uid: &str) -> String {
    if name.is_empty() {
        uid.to_owned()
    } else {
        format!("{namespace}/{name}")
    }
}

impl PlannedMove {
    /// Namespace and name, or the UID if names are hidden.
    pub fn display_name(&self) -> String {
        display_name(&self.namespace, &self.name, &self.uid)
    }
}

impl LeftPod {
    /// Namespace and name, or the UID if names are hidden.
    pub fn display_name(&self) -> String {
        display_name(&self.namespace, &self.name, &self.uid)
    }
}

impl PlanAnswer {
    /// Removes names and namespaces of pods, except in namespaces for which `sees` returns true.
    pub fn hide_names(&mut self, sees: impl Fn(&str) -> bool) {
        for one in &mut self.moves {
            if !sees(&one.namespace) {
                one.namespace.clear();
                one.name.clear();
            }
        }
        for one in &mut self.left {
            if !sees(&one.namespace) {
                one.namespace.clear();
                one.name.clear();
                // A temporary reason may name a disruption budget, an object of the hidden namespace.
                if one.temporary {
                    HIDDEN_REASON.clone_into(&mut one.reason);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names, and budgets in reasons, are those of a namespace.
    #[test]
    fn names_of_other_namespaces_are_hidden() {
        let to_move = |namespace: &str| PlannedMove {
            namespace: namespace.to_owned(),
            name: "a".to_owned(),
            uid: "u".to_owned(),
            ..PlannedMove::default()
        };
        let to_stay = |namespace: &str, temporary: bool| LeftPod {
            namespace: namespace.to_owned(),
            name: "b".to_owned(),
            uid: "v".to_owned(),
            reason: "a reason".to_owned(),
            temporary,
            ..LeftPod::default()
        };
        let mut answer = PlanAnswer {
            moves: vec![to_move("own"), to_move("other")],
            left: vec![
                to_stay("own", true),
                to_stay("other", true),
                to_stay("other", false),
            ],
            ..PlanAnswer::default()
        };
        answer.hide_names(|namespace| namespace == "own");
        let moves: Vec<String> = answer.moves.iter().map(PlannedMove::display_name).collect();
        assert_eq!(moves, ["own/a", "u"]);
        let left: Vec<(String, &str)> = answer
            .left
            .iter()
            .map(|one| (one.display_name(), one.reason.as_str()))
            .collect();
        let expected = [("own/b", "a reason"), ("v", HIDDEN_REASON), ("v", "a reason")];
        assert_eq!(left, expected.map(|(name, reason)| (name.to_owned(), reason)));
    }
}
