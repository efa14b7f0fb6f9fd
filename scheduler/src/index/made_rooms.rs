//! The rooms that the leader makes by evictions, by the pods that they are made for.
//!
//! The hint of such a pod keeps its room from the nomination on: what is free of it at once, and the rest as soon as the evicted
//! pods have ended. Otherwise a pod that a controller creates in place of an evicted one would take it.

use placement::OwnerId;
use rustc_hash::FxHashMap;

/// The rooms that are being made.
#[derive(Debug, Default)]
pub(super) struct MadeRooms {
    /// The node of each room, by the pod that it is made for.
    nodes: FxHashMap<OwnerId, Box<str>>,
    /// The pods that rooms are made for, by the pods that free them.
    freeing: FxHashMap<OwnerId, OwnerId>,
}

impl MadeRooms {
    /// Begins a room on a node, which these pods will free.
    pub(super) fn begin(&mut self, preemptor: OwnerId, node: &str, freeing: &[OwnerId]) {
        for pod in freeing {
            self.freeing.insert(pod.clone(), preemptor.clone());
        }
        self.nodes.insert(preemptor, node.into());
    }

    /// The node on which room is made for a pod.
    pub(super) fn node_of(&self, preemptor: &str) -> Option<&str> {
        self.nodes.get(preemptor).map(|node| &**node)
    }

    /// The pods that have not ended yet of those that free the room of a pod.
    pub(super) fn freeing(&self, preemptor: &str) -> Vec<OwnerId> {
        let freeing = self.freeing.iter();
        let freeing = freeing.filter(|(_, other)| other.as_str() == preemptor);
        freeing.map(|(pod, _)| pod.clone()).collect()
    }

    /// Notes that a pod has ended; returns true if it has freed a part of a room.
    pub(super) fn note_ended(&mut self, uid: &str) -> bool {
        self.freeing.remove(uid).is_some()
    }

    /// Ends the room of a pod; returns its node.
    pub(super) fn end(&mut self, preemptor: &str) -> Option<Box<str>> {
        let node = self.nodes.remove(preemptor)?;
        self.freeing.retain(|_, other| other.as_str() != preemptor);
        Some(node)
    }
}
