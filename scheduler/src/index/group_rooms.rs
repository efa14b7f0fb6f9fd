//! Room that is kept for whole groups: the devices of all members in one domain, chosen when the first member is filtered. The
//! domain is a node, or a link group (linked GPUs of a node), as the group wishes by `gpushare/group-domain`.
//!
//! Each place of a group is a hint: under the UID of the member that took it, or, while it is open, under a name of the group's
//! own. Open places are free as soon as the first member is bound. A member that is filtered again begins another cycle, for
//! which the room is chosen again, unless the members come one by one (coscheduling, Koordinator) or are being bound.

use std::sync::Arc;
use std::time::Instant;

use placement::{DeviceId, NodeId, OwnerId, Placement};
use proto::pod::GroupKind;
use proto::pod_group::{DomainPolicy, GroupWish};
use rustc_hash::{FxHashMap, FxHashSet};

use super::cluster::Cluster;
use super::pod_groups::{GroupId, GroupOfPod};
use super::resource_demand::ResourceDemand;

/// Most groups at one time.
const MAX_GROUPS: usize = 1024;

/// The refusal of a further group that requires a domain.
const TOO_MANY_GROUPS: &str =
    "room is kept for 1024 groups in one domain, and for no further one until some of them are bound";

/// The groups for whose current cycle a decision was made.
#[derive(Debug, Default)]
pub(super) struct GroupRooms(FxHashMap<GroupId, GroupCycle>);

/// The scheduling cycle of a group.
#[derive(Debug)]
pub(super) struct GroupCycle {
    /// The wish of the member that was filtered first: members may differ in theirs.
    pub(super) wish: GroupWish,
    /// The members that were filtered in it.
    filtered: FxHashSet<OwnerId>,
    pub(super) decision: GroupDecision,
    /// The end of a decision without room, of which no hint shows the end.
    end: Instant,
}

/// The decision for a group, made when its first member was filtered.
#[derive(Debug)]
pub(super) enum GroupDecision {
    /// Room is kept for all members.
    // Boxed, since most groups have no room kept.
    Kept(Box<KeptRoom>),
    /// Members are placed like those of a group without a wish.
    AsAny,
    /// Members are refused, with this text.
    Refused(Arc<str>),
}

/// Room for a group in one domain.
#[derive(Debug)]
pub(super) struct KeptRoom {
    pub(super) node: NodeId,
    /// The GPUs of the link group; `None` if the domain is the node.
    gpus: Option<Vec<DeviceId>>,
    /// The request that the places were chosen for.
    demand: ResourceDemand<'static>,
    /// True if members with other requests were not counted when the places were chosen, so that they take none of these.
    is_for_alike: bool,
    /// The places that no member has taken, with the owners of their hints.
    pub(super) open: Vec<(OwnerId, Placement)>,
    /// The members with a place that are not bound.
    pub(super) members: FxHashMap<OwnerId, Placement>,
    /// True if a member was bound: the cycle in which all members found room is over, and the others are about to be bound.
    has_bound: bool,
}

/// The way in which a filter request for a member of a group is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MemberStep {
    /// Room for the whole group has to be chosen.
    Choose,
    /// Room is kept on this node.
    Join(NodeId),
    /// As a member of a group without a wish.
    AsAny,
    /// The group was refused, with this text.
    Refuse(Arc<str>),
}

/// Room for a whole group, as the filter has chosen it.
#[derive(Clone, Debug)]
pub(crate) struct ChosenRoom {
    pub(crate) node: NodeId,
    /// The devices of all members.
    pub(crate) room: placement::GroupRoom,
    /// True if members with other requests are not counted among these.
    pub(crate) is_for_alike: bool,
}

/// The outcome of a filter request for a member of a group with a wish for one domain.
#[derive(Clone, Debug)]
pub(crate) enum MemberOutcome {
    /// Room for the whole group is chosen; the member takes the first place.
    Chosen(ChosenRoom),
    /// The member takes this place on the node of its group.
    Joined(NodeId, Placement),
    /// No room is kept for the member. With this text, if there is one, its whole group is refused.
    Unplaced(Option<Arc<str>>),
}

impl GroupCycle {
    /// Returns true if the time of a decision without room is up.
    fn is_over(&self, now: Instant) -> bool {
        self.end <= now && self.kept().is_none()
    }

    /// The room that is kept for the group.
    pub(super) fn kept(&self) -> Option<&KeptRoom> {
        match &self.decision {
            GroupDecision::Kept(room) => Some(room),
            GroupDecision::AsAny | GroupDecision::Refused(_) => None,
        }
    }
}

impl KeptRoom {
    /// The place for a member: its own if it has one; an open one if it has the request that the places were chosen for; else
    /// other devices of the domain. `None` if the domain has no room.
    pub(super) fn place_for(&self, cluster: &Cluster, demand: &ResourceDemand<'_>) -> Option<Placement> {
        let (fleet, own) = (&cluster.fleet, OwnerId::from(demand.uid));
        let is_alike = self.demand.is_alike(demand);
        let taken = self.members.get(&own);
        let open = self.open.last().filter(|_| is_alike);
        let place = taken.or(open.map(|(_, placement)| placement));
        // The GPU of a place may have become unhealthy meanwhile.
        if let Some(place) = place.filter(|place| fleet.admits(self.node, place)) {
            return Some(place.clone());
        }
        let mut uncounted = vec![own];
        if is_alike || !self.is_for_alike {
            uncounted.extend(self.open.iter().map(|(owner, _)| owner.clone()));
        }
        let (policy, gpus) = (demand.policies.device, self.gpus.as_deref());
        let devices = demand.devices();
        let chosen = fleet.choose_devices_among(self.node, devices, policy, gpus, (&[], &uncounted));
        chosen.ok()
    }

    /// Notes that a member has a place. It takes the last open place, whose devices it has if its request is alike.
    fn put_member(&mut self, cluster: &mut Cluster, demand: &ResourceDemand<'_>, placement: &Placement) {
        let is_alike = self.demand.is_alike(demand);
        let member = cluster.owner(demand.uid);
        let is_again = self.members.insert(member, placement.clone()).is_some();
        if is_again || (self.is_for_alike && !is_alike) {
            return;
        }
        if let Some((owner, open)) = self.open.pop() {
            cluster.fleet.unhint(owner.as_str());
            if open == *placement {
                return;
            }
        }
        // The devices of this member may be those of open places, so these are chosen once more beside it.
        for (owner, _) in self.take_open(cluster) {
            let (devices, policy) = (self.demand.devices(), self.demand.policies.device);
            let (gpus, fleet) = (self.gpus.as_deref(), &mut cluster.fleet);
            let chosen = fleet.choose_devices_among(self.node, devices, policy, gpus, (&[], &[]));
            if let Ok(chosen) = chosen {
                fleet.hint(&owner, self.node, &chosen);
                self.open.push((owner, chosen));
            }
        }
    }

    /// Takes the open places, whose room is free then.
    fn take_open(&mut self, cluster: &mut Cluster) -> Vec<(OwnerId, Placement)> {
        for (owner, _) in &self.open {
            cluster.fleet.unhint(owner.as_str());
        }
        std::mem::take(&mut self.open)
    }
}

impl GroupRooms {
    /// The way in which a filter request for a member is answered.
    pub(super) fn step(&self, group: &GroupOfPod, uid: &str) -> MemberStep {
        let Some(cycle) = self.0.get(&group.id) else {
            // Beyond the limit no room is kept, so that memory stays bounded.
            return match (self.0.len() < MAX_GROUPS, group.wish.policy) {
                (true, _) => MemberStep::Choose,
                (false, DomainPolicy::Preferred) => MemberStep::AsAny,
                (false, DomainPolicy::Required) => MemberStep::Refuse(TOO_MANY_GROUPS.into()),
            };
        };
        let is_again = cycle.filtered.contains(uid);
        match &cycle.decision {
            // kube-scheduler filters all members of a `PodGroup` in one cycle, and begins another with the first of them.
            GroupDecision::Kept(room)
                if group.id.kind == GroupKind::Native && is_again && !room.has_bound =>
            {
                MemberStep::Choose
            }
            GroupDecision::Kept(room) => MemberStep::Join(room.node),
            GroupDecision::AsAny | GroupDecision::Refused(_) if is_again => MemberStep::Choose,
            GroupDecision::AsAny => MemberStep::AsAny,
            GroupDecision::Refused(text) => MemberStep::Refuse(Arc::clone(text)),
        }
    }

    /// The current cycle of a group.
    pub(super) fn cycle(&self, group: &GroupId) -> Option<&GroupCycle> {
        self.0.get(group)
    }

    /// Ends the cycle of a group; its open places are free. Returns the room that was kept, whose members' hints have to end.
    pub(super) fn end_cycle(&mut self, cluster: &mut Cluster, group: &GroupId) -> Option<Box<KeptRoom>> {
        let GroupDecision::Kept(mut room) = self.0.remove(group)?.decision else {
            return None;
        };
        room.open = room.take_open(cluster);
        Some(room)
    }

    /// Keeps room for the members of a group: one place is the member's own, for which the caller keeps a hint, the others stay
    /// open.
    pub(super) fn keep(
        &mut self,
        cluster: &mut Cluster,
        group: &GroupOfPod,
        demand: &ResourceDemand<'_>,
        chosen: ChosenRoom,
        end: Instant,
    ) {
        let node = chosen.node;
        let mut places = chosen.room.placements.into_iter();
        let Some(own) = places.next() else { return };
        // Another request for a member may have been answered since this one was evaluated.
        self.end_cycle(cluster, &group.id);
        let mut kept = KeptRoom {
            node,
            gpus: chosen.room.gpus,
            demand: demand.for_no_pod(),
            is_for_alike: chosen.is_for_alike,
            open: Vec::new(),
            members: FxHashMap::default(),
            has_bound: false,
        };
        kept.members.insert(cluster.owner(demand.uid), own);
        for (at, placement) in places.enumerate() {
            // No UID of a pod has a slash, so that this owner is no pod.
            let owner = OwnerId::from(format!("{:?}/{}/{at}", group.id.kind, group.id.key));
            cluster.fleet.hint(&owner, node, &placement);
            kept.open.push((owner, placement));
        }
        self.put(group, demand.uid, GroupDecision::Kept(Box::new(kept)), end);
    }

    /// Notes a place of a member in the room of its group.
    pub(super) fn join(
        &mut self,
        cluster: &mut Cluster,
        group: &GroupId,
        demand: &ResourceDemand<'_>,
        placement: &Placement,
    ) {
        if let Some(cycle) = self.0.get_mut(group) {
            cycle.filtered.insert(cluster.owner(demand.uid));
            if let GroupDecision::Kept(room) = &mut cycle.decision {
                room.put_member(cluster, demand, placement);
            }
        }
    }

    /// Notes that a member was filtered without a place in a kept room; `refusal` is the text with which its group was refused.
    pub(super) fn note_filtered(
        &mut self,
        group: &GroupOfPod,
        uid: &str,
        refusal: Option<Arc<str>>,
        end: Instant,
    ) {
        if let Some(cycle) = self.0.get_mut(&group.id) {
            cycle.filtered.insert(uid.into());
            cycle.end = end;
        } else if self.0.len() < MAX_GROUPS {
            // Beyond the limit no decision is kept, so that memory stays bounded.
            let decision = refusal.map_or(GroupDecision::AsAny, GroupDecision::Refused);
            self.put(group, uid, decision, end);
        }
    }

    fn put(&mut self, group: &GroupOfPod, uid: &str, decision: GroupDecision, end: Instant) {
        let cycle = GroupCycle {
            wish: group.wish,
            filtered: FxHashSet::from_iter([uid.into()]),
            decision,
            end,
        };
        self.0.insert(group.id.clone(), cycle);
    }

    /// Returns true if [`Self::end_expired`] has something to do.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.0.values().any(|cycle| cycle.is_over(now))
    }

    /// Forgets the decisions without room whose time is up.
    pub(super) fn end_expired(&mut self, now: Instant) {
        self.0.retain(|_, cycle| !cycle.is_over(now));
    }

    /// The devices for a bind of a member to the node of its group: those of its place, or others of the domain; `None` for
    /// pods without a place there. The error is the policy of the group if the domain has no room.
    pub(super) fn place_at_bind(
        &self,
        cluster: &Cluster,
        node: NodeId,
        demand: &ResourceDemand<'_>,
    ) -> Option<Result<Placement, DomainPolicy>> {
        for cycle in self.0.values() {
            if let Some(room) = cycle.kept()
                && room.node == node
                && room.members.contains_key(demand.uid)
            {
                return Some(room.place_for(cluster, demand).ok_or(cycle.wish.policy));
            }
        }
        None
    }

    /// Removes the place of a member whose hint has ended; with `is_bound` the open places of its group are free as well.
    pub(super) fn remove_member(&mut self, cluster: &mut Cluster, uid: &str, is_bound: bool) {
        self.0.retain(|_, cycle| {
            let GroupDecision::Kept(room) = &mut cycle.decision else {
                return true;
            };
            if room.members.remove(uid).is_none() {
                return true;
            }
            room.has_bound |= is_bound;
            let is_over = room.members.is_empty();
            if (is_bound || is_over) && !room.take_open(cluster).is_empty() {
                cluster.note_silent_opening();
            }
            !is_over
        });
    }

    /// Number of groups for which room is kept.
    pub(super) fn n_kept(&self) -> usize {
        self.0.values().filter_map(GroupCycle::kept).count()
    }
}
