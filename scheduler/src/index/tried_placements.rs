//! Room of groups in the placements that kube-scheduler has tried before the last one.
//!
//! For a `PodGroup` with a topology constraint (`TopologyAwareWorkloadScheduling`) kube-scheduler 1.36 tries one placement after
//! the other in one cycle: a placement is the nodes with one value of a label, and all members are filtered among these. It binds
//! the members in the best placement, which need not be the last, and filters none of them again. So the room in each is kept,
//! under names of the group's own, until the first bind of a member shows the placement; devices are then chosen again.

use std::time::Instant;

use placement::{NodeId, OwnerId, Placement};
use rustc_hash::FxHashMap;

use super::cluster::Cluster;
use super::pod_groups::GroupId;

/// Most placements of a group with room, beside the last one.
const MAX_ROOMS: usize = 64;

#[derive(Debug, Default)]
pub(super) struct TriedPlacements(FxHashMap<GroupId, Vec<TriedRoom>>);

/// Room for a group on one node of a placement.
#[derive(Debug)]
struct TriedRoom {
    node: NodeId,
    /// The owners of the hints that keep the devices.
    places: Vec<OwnerId>,
    /// The end, unless a bind or another question comes before.
    end: Instant,
}

impl TriedRoom {
    fn free(self, cluster: &mut Cluster) {
        for owner in self.places {
            cluster.fleet.unhint(owner.as_str());
        }
    }
}

impl TriedPlacements {
    /// Keeps the devices of a group on a node until `end`.
    pub(super) fn keep(
        &mut self,
        cluster: &mut Cluster,
        group: &GroupId,
        (node, placements): (NodeId, impl Iterator<Item = Placement>),
        end: Instant,
    ) {
        let mut places = Vec::new();
        for (at, placement) in placements.enumerate() {
            // No UID of a pod has a slash, so that this owner is no pod.
            let owner = OwnerId::from(format!("{:?}/{}/{node:?}/{at}", group.kind, group.key));
            cluster.fleet.hint(&owner, node, &placement);
            places.push(owner);
        }
        let rooms = self.0.entry(group.clone()).or_default();
        rooms.push(TriedRoom { node, places, end });
        // The oldest room gives way, so that memory stays bounded.
        if rooms.len() > MAX_ROOMS {
            rooms.remove(0).free(cluster);
        }
    }

    /// Frees the rooms whose time is up; returns true if there were any.
    pub(super) fn end_expired(&mut self, cluster: &mut Cluster, now: Instant) -> bool {
        let mut ended = Vec::new();
        for rooms in self.0.values_mut() {
            ended.extend(rooms.extract_if(.., |room| room.end <= now));
        }
        self.0.retain(|_, rooms| !rooms.is_empty());
        let is_any = !ended.is_empty();
        for room in ended {
            room.free(cluster);
        }
        is_any
    }

    /// Returns true if [`Self::end_expired`] has something to do.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.0.values().flatten().any(|room| room.end <= now)
    }

    /// Frees the rooms of a group on the nodes for which `is_over` returns true. Returns the time at which the first of them
    /// would have ended; `None` if there were none.
    pub(super) fn end_on(
        &mut self,
        cluster: &mut Cluster,
        group: &GroupId,
        is_over: impl Fn(&Cluster, NodeId) -> bool,
    ) -> Option<Instant> {
        let rooms = self.0.remove(group)?;
        let (over, left): (Vec<_>, Vec<_>) = rooms.into_iter().partition(|room| is_over(cluster, room.node));
        if !left.is_empty() {
            self.0.insert(group.clone(), left);
        }
        let end = over.iter().map(|room| room.end).min();
        for room in over {
            room.free(cluster);
        }
        end
    }

    pub(super) fn n_rooms(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }
}
