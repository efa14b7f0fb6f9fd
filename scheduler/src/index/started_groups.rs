//! Groups that have started in part: some members are bound, but fewer than the group needs. They hold devices and cannot work,
//! so room is kept for the missing members as soon as the watch shows it.
//!
//! A binding that fails leaves such a group, and so does a leader that dies between two bindings: its successor knows only what
//! the watch shows. The room is a hint for each missing member, which lasts as long as that of any pod (`--hint-ttl`); another
//! is given only after a further change of the group.

use std::time::Instant;

use placement::{
    Fleet, GroupRequest, GroupSearch, Hints, NodeId, OwnerId, Placement, Reason, Score, SharedDomain,
};
use proto::pod_group as wish;

use super::group_members::{self, Member, MembersToPlace};
use super::pod_groups::{GroupId, GroupOfPod};
use super::resource_demand::ResourceDemand;
use super::{Index, hints};
use crate::kube_scheduler::{self, RequestSums};

/// A group that has started in part.
struct StartedGroup {
    group: GroupOfPod,
    /// The members that are neither bound nor assumed, in the order of their UIDs; no more than the group needs.
    missing: Vec<OwnerId>,
}

/// Most missing members of one group for which room is kept: each may take an evaluation of all nodes.
const MAX_MISSING: usize = 64;

impl StartedGroup {
    /// The group with this ID, if it has started in part.
    fn of(index: &Index, id: GroupId) -> Option<Self> {
        // A launcher without devices may have no annotation.
        let with_devices = |(_, member): &(&OwnerId, &Member)| member.has_devices;
        let (_, member) = index.cluster.group_members.of(&id).find(with_devices)?;
        let group = index.pod_groups.group(id, member.marks);
        let (mut n_bound, mut missing) = (0, Vec::new());
        for (owner, member) in index.cluster.group_members.of(&group.id) {
            match index.cluster.pods.get(owner) {
                Some(entry) if member.has_devices && entry.bound().is_some() => n_bound += 1,
                Some(_) if member.has_devices => missing.push(owner.clone()),
                _ => {}
            }
        }
        let min_count = usize::try_from(group.min_count).unwrap_or(usize::MAX);
        let n_missing = min_count.saturating_sub(n_bound);
        if n_bound == 0 || n_missing == 0 || missing.is_empty() {
            return None;
        }
        missing.sort_unstable();
        missing.truncate(n_missing.min(MAX_MISSING));
        Some(Self { group, missing })
    }

    /// A node, and devices there, for a missing member.
    fn place_for(&self, index: &Index, demand: &ResourceDemand<'_>) -> Option<(NodeId, Placement)> {
        let (fleet, hints) = (index.fleet(), Hints::RespectOthers(demand.uid));
        if let Some(domain) = engine_domain(self.group.wish.domain) {
            // The domain in which the bound members are.
            let members = group_members::to_place(index, &self.group, demand);
            let node = members.node.as_deref().and_then(|node| fleet.node_id(node));
            let place = node.and_then(|node| first_place(fleet, &members, demand, (node, domain), 1, hints));
            if place.is_some() || self.group.wish.policy == wish::DomainPolicy::Required {
                return node.zip(place);
            }
        }
        let node = best_node(index, demand)?;
        let placement = fleet.choose_devices(node, demand.devices(), demand.policies.device, hints);
        Some((node, placement.ok()?))
    }
}

/// The devices for the first of `n_members` members like this one, chosen for all of them in one domain of a node, in which
/// bound members are as well; `None` if no domain has room, or a bound member is on another node.
fn first_place(
    fleet: &Fleet,
    members: &MembersToPlace,
    demand: &ResourceDemand<'_>,
    (node, domain): (NodeId, SharedDomain),
    n_members: usize,
    hints: Hints<'_>,
) -> Option<Placement> {
    let is_elsewhere = |bound: &str| fleet.node_id(bound) != Some(node);
    if members.is_apart || members.node.as_deref().is_some_and(is_elsewhere) {
        return None;
    }
    let request = GroupRequest {
        member: demand.devices(),
        n_members,
        n_in_link_group: members.n_in_link_group,
        domain,
        bound: &members.bound,
        policies: demand.policies,
    };
    let mut search = GroupSearch::default();
    let room = fleet.room_for_group(node, &request, hints, &mut search);
    room.ok()?.placements.into_iter().next()
}

/// The node that a filter would rank first for a demand.
fn best_node(index: &Index, demand: &ResourceDemand<'_>) -> Option<NodeId> {
    let filter = index.filter();
    let mut batch = filter.batch(demand);
    let mut best: Option<(Score, &str, NodeId)> = None;
    for node in index.fleet().nodes() {
        let Ok(score) = batch.evaluate(node.id()) else {
            continue;
        };
        let is_better =
            best.is_none_or(|(of_best, name, _)| score > of_best || (score == of_best && node.name() < name));
        if is_better
            && takes(index, node.name(), demand.uid)
            && filter.check_served(node.name(), demand).is_ok()
        {
            best = Some((score, node.name(), node.id()));
        }
    }
    best.map(|(.., node)| node)
}

/// Returns true if a node exists and kube-scheduler's own checks do not refuse a pod there.
fn takes(index: &Index, name: &str, uid: &str) -> bool {
    let Some(facts) = index.node_facts(name) else {
        return false;
    };
    let no_requests = RequestSums::default();
    let requested = index.requests().on(name).unwrap_or(&no_requests);
    let rules = index.rules_of(uid);
    rules.is_none_or(|rules| kube_scheduler::check(rules, facts, requested).is_ok())
}

/// Keeps room for the missing members of the groups that have changed and have started in part: some members are bound, and
/// fewer than the group needs.
pub(crate) fn keep_room(index: &mut Index, now: Instant) {
    for id in std::mem::take(&mut index.cluster.group_members.changed) {
        let Some(started) = StartedGroup::of(index, id) else {
            continue;
        };
        for owner in &started.missing {
            let uid = owner.as_str();
            let Some(entry) = index.cluster.pods.get(owner) else {
                continue;
            };
            if index.hints.is_hinted(uid) || index.hints.is_resting(uid, now) {
                continue;
            }
            let Ok(Some(demand)) = index.demand(uid, &entry.facts) else {
                continue;
            };
            // Where one member finds no room, the next ones hardly do.
            let Some((node, placement)) = started.place_for(index, &demand) else {
                break;
            };
            hints::keep_place(index, (node, &placement), &demand, now);
        }
    }
}

/// The devices for a bind of a member that has no place kept for it: the leader has changed, or kube-scheduler has chosen
/// a placement that it did not try last, see `tried_placements`. They are in a domain with room for all members that are not
/// bound, as far as that is possible beside the bound ones. `None` for a pod without a wish, or whose group prefers a domain
/// that has no room on the node; an error if it requires one.
pub(super) fn place_without_kept_room(
    index: &Index,
    node: NodeId,
    demand: &ResourceDemand<'_>,
) -> Option<Result<Placement, Reason>> {
    let (id, marks) = index.cluster.group_members.find(demand.uid)?;
    let group = index.pod_groups.group(id.clone(), marks);
    let domain = engine_domain(group.wish.domain)?;
    let members = group_members::to_place(index, &group, demand);
    // Alone the first member would fix a domain without room for the others.
    let sizes: &[usize] = if members.bound.is_empty() {
        &[members.n_alike]
    } else {
        &[members.n_alike, 1]
    };
    // Room that is kept for other pods comes last.
    for hints in [Hints::RespectOthers(demand.uid), Hints::Ignore] {
        for n in sizes {
            let place = first_place(index.fleet(), &members, demand, (node, domain), *n, hints);
            if let Some(place) = place {
                return Some(Ok(place));
            }
        }
    }
    (group.wish.policy == wish::DomainPolicy::Required).then_some(Err(Reason::Together))
}

/// The domain in the terms of the engine; `None` for any nodes.
const fn engine_domain(domain: wish::GroupDomain) -> Option<SharedDomain> {
    match domain {
        wish::GroupDomain::Any => None,
        wish::GroupDomain::Node => Some(SharedDomain::Node),
        wish::GroupDomain::Link => Some(SharedDomain::Link),
    }
}
