//! Groups that have started in part: some members are bound, but fewer than the group needs. They hold devices and cannot work,
//! so room is kept for the missing members as soon as the watch shows it.
//!
//! A binding that fails leaves such a group, and so does a leader that dies between two bindings: its successor knows only what
//! the watch shows. The room is a hint for each missing member, which lasts as long as that of any pod (`--hint-ttl`); another
//! is given only after a further change of the group.

use std::time::Instant;

use placement::{GroupRequest, GroupSearch, Hints, NodeId, OwnerId, Placement, Reason, Score, SharedDomain};
use proto::pod::GroupKind;
use proto::pod_group as wish;

use super::cluster::Cluster;
use super::group_members::MembersToPlace;
use super::hints::HintQueue;
use super::node_filter::NodeFilter;
use super::pod_groups::{GroupOfPod, PodGroups};
use super::resource_demand::ResourceDemand;
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
    /// The group with this key, if it has started in part.
    fn of(cluster: &Cluster, groups: &PodGroups, kind: GroupKind, key: &str) -> Option<Self> {
        // A launcher without devices may have no annotation.
        let mut members = cluster.group_members.of(kind, key);
        let (_, with_devices) = members.find(|(_, member)| member.has_devices)?;
        let group = groups.group(kind, key.into(), with_devices.marks);
        let (mut n_bound, mut missing) = (0, Vec::new());
        for (owner, member) in cluster.group_members.of(kind, key) {
            let entry = cluster.pods.get(owner).filter(|_| member.has_devices);
            match entry.map(|entry| entry.bound()) {
                Some(Some(_)) => n_bound += 1,
                Some(None) => missing.push(owner.clone()),
                None => {}
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
    fn place_for(&self, cluster: &Cluster, demand: &ResourceDemand<'_>) -> Option<(NodeId, Placement)> {
        let domain = engine_domain(self.group.wish.domain);
        let in_domain = domain.and_then(|domain| self.place_in_domain(cluster, demand, domain));
        if in_domain.is_some() || (domain.is_some() && self.group.wish.policy == wish::DomainPolicy::Required)
        {
            return in_domain;
        }
        let node = best_node(cluster, demand)?;
        let (policy, hints) = (demand.policies.device, Hints::RespectOthers(demand.uid));
        let placement = cluster
            .fleet
            .choose_devices(node, demand.devices(), policy, hints);
        Some((node, placement.ok()?))
    }

    /// Devices for a missing member where the bound members are.
    fn place_in_domain(
        &self,
        cluster: &Cluster,
        demand: &ResourceDemand<'_>,
        domain: SharedDomain,
    ) -> Option<(NodeId, Placement)> {
        let members = MembersToPlace::of(cluster, &self.group, demand);
        let node = cluster.fleet.node_id(members.node.as_deref()?)?;
        let (n_members, hints) = (1, Hints::RespectOthers(demand.uid));
        let place = first_place(cluster, &members, demand, (node, domain), n_members, hints)?;
        Some((node, place))
    }
}

/// The devices for the first of `n_members` members like this one, chosen for all of them in one domain of a node, in which
/// bound members are as well; `None` if no domain has room, or a bound member is on another node.
fn first_place(
    cluster: &Cluster,
    members: &MembersToPlace,
    demand: &ResourceDemand<'_>,
    (node, domain): (NodeId, SharedDomain),
    n_members: usize,
    hints: Hints<'_>,
) -> Option<Placement> {
    let is_there = |bound: &str| cluster.fleet.node_id(bound) == Some(node);
    if members.is_apart || !members.node.as_deref().is_none_or(is_there) {
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
    let room = cluster.fleet.room_for_group(node, &request, hints, &mut search);
    room.ok()?.placements.into_iter().next()
}

/// The node that a filter would rank first for a demand.
fn best_node(cluster: &Cluster, demand: &ResourceDemand<'_>) -> Option<NodeId> {
    let filter = NodeFilter::of(cluster);
    let mut batch = filter.batch(demand);
    let mut best: Option<(Score, &str, NodeId)> = None;
    for node in cluster.fleet.nodes() {
        let Ok(score) = batch.evaluate(node.id()) else {
            continue;
        };
        let is_better =
            best.is_none_or(|(of_best, name, _)| score > of_best || (score == of_best && node.name() < name));
        if is_better
            && takes(cluster, node.name(), demand.uid)
            && filter.check_served(node.name(), demand).is_ok()
        {
            best = Some((score, node.name(), node.id()));
        }
    }
    best.map(|(.., node)| node)
}

/// Returns true if a node exists and kube-scheduler's own checks do not refuse a pod there.
fn takes(cluster: &Cluster, name: &str, uid: &str) -> bool {
    let Some(state) = cluster.node(name).filter(|state| state.exists()) else {
        return false;
    };
    let no_requests = RequestSums::default();
    let requested = cluster.requests.on(name).unwrap_or(&no_requests);
    let rules = cluster.pods.get(uid).and_then(|entry| entry.rules.as_deref());
    rules.is_none_or(|rules| kube_scheduler::check(rules, &state.facts, requested).is_ok())
}

/// Keeps room for the missing members of the groups that have changed and have started in part.
pub(super) fn keep_for_started_groups(
    cluster: &mut Cluster,
    hints: &mut HintQueue,
    groups: &PodGroups,
    now: Instant,
) {
    for (kind, key) in cluster.group_members.take_changed() {
        let Some(started) = StartedGroup::of(cluster, groups, kind, &key) else {
            continue;
        };
        for owner in &started.missing {
            if hints.is_hinted(owner.as_str()) || hints.is_resting(owner.as_str(), now) {
                continue;
            }
            let Some(entry) = cluster.pods.get(owner) else {
                continue;
            };
            let Ok(Some(demand)) = ResourceDemand::of_pod(cluster, owner.as_str(), &entry.facts) else {
                continue;
            };
            // Where one member finds no room, the next ones hardly do.
            let Some((node, placement)) = started.place_for(cluster, &demand) else {
                break;
            };
            hints.keep_place(cluster, (node, &placement), &demand, now);
        }
    }
}

/// The devices for a bind of a member that has no place kept for it: the leader has changed, or kube-scheduler has chosen
/// a placement that it did not try last, see `tried_placements`. They are in a domain with room for all members that are not
/// bound, as far as that is possible beside the bound ones. `None` for a pod without a wish, or whose group prefers a domain
/// that has no room on the node; an error if it requires one.
pub(super) fn place_without_kept_room(
    cluster: &Cluster,
    groups: &PodGroups,
    node: NodeId,
    demand: &ResourceDemand<'_>,
) -> Option<Result<Placement, Reason>> {
    let (kind, key, member) = cluster.group_members.find(demand.uid)?;
    let group = groups.group(kind, key.into(), member.marks);
    let domain = engine_domain(group.wish.domain)?;
    let members = MembersToPlace::of(cluster, &group, demand);
    // Alone the first member would fix a domain without room for the others.
    let sizes: &[usize] = if members.bound.is_empty() {
        &[members.n_alike]
    } else {
        &[members.n_alike, 1]
    };
    // Room that is kept for other pods comes last.
    for hints in [Hints::RespectOthers(demand.uid), Hints::Ignore] {
        for n in sizes {
            if let Some(place) = first_place(cluster, &members, demand, (node, domain), *n, hints) {
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
