//! Groups of pods in the terms of the read API: their wish, and the places of their members.

use std::collections::BTreeSet;

use placement::{MAX_GROUP, NodeView, Placement};
use proto::pod_group::GroupDomain;
use proto::read_api::{ExplainedGroup, ExplainedRoom, MemberPlace};

use super::Index;
use super::cluster::Cluster;
use super::group_rooms::GroupDecision;
use super::node_filter::NodeFilter;
use super::pod_groups::GroupOfPod;
use super::view::counted_on;

/// The group of a pod that a watch has shown; `None` for a pod of no group.
pub(crate) fn show(index: &Index, uid: &str) -> Option<ExplainedGroup> {
    let (id, marks) = index.cluster.group_members.find(uid)?;
    let mut group = index.pod_groups.group(id.clone(), marks);
    // The member that was asked about first decides for the others.
    if let Some(wish) = index.hints.wish_in_cycle(&group, uid) {
        group.wish = wish;
    }
    let name = id.key.split_once('/').map_or(&*id.key, |(_, name)| name);
    let mut shown = ExplainedGroup {
        name: name.to_owned(),
        kind: id.kind,
        size: group.min_count,
        domain: group.wish.domain,
        policy: group.wish.policy,
        differing: differing_members(index, &group),
        ..ExplainedGroup::default()
    };
    if group.wish.domain == GroupDomain::Any {
        return Some(shown);
    }
    shown.bound = bound_members(index.filter(), &group);
    match index.hints.rooms.cycle(id).map(|cycle| &cycle.decision) {
        Some(GroupDecision::Kept(kept)) => {
            let node = index.cluster.fleet.view(kept.node).map_or("", NodeView::name);
            let mut room = ExplainedRoom {
                node: node.to_owned(),
                open: u32::try_from(kept.open.len()).unwrap_or(u32::MAX),
                open_gpus: minors(kept.open.iter().map(|(_, placement)| placement)),
                ..ExplainedRoom::default()
            };
            for (owner, placement) in &kept.members {
                room.members.push(MemberPlace {
                    name: name_of(&index.cluster, owner.as_str()),
                    node: node.to_owned(),
                    gpus: minors([placement].into_iter()),
                });
            }
            room.members.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            shown.room = Some(room);
        }
        Some(GroupDecision::Refused(text)) => shown.refused = Some(text.to_string()),
        Some(GroupDecision::AsAny) | None => {}
    }
    Some(shown)
}

/// The names of the members whose annotations wish something else than the wish that counts, unless that of the group's object
/// counts; [`MAX_GROUP`] at most.
fn differing_members(index: &Index, group: &GroupOfPod) -> Vec<String> {
    let object = index.pod_groups.get(&group.id);
    if object.is_some_and(|object| object.wish.is_some()) {
        return Vec::new();
    }
    let mut names = Vec::new();
    for (owner, member) in index.cluster.group_members.of(&group.id) {
        if member.marks.wish != group.wish {
            names.push(name_of(&index.cluster, owner.as_str()));
        }
    }
    names.sort_unstable();
    names.truncate(MAX_GROUP);
    names
}

/// The members of a group that are bound, or are being bound, with devices; [`MAX_GROUP`] at most.
fn bound_members(filter: NodeFilter<'_>, group: &GroupOfPod) -> Vec<MemberPlace> {
    let cluster = filter.cluster;
    let mut bound = Vec::new();
    for (owner, _) in cluster.group_members.of(&group.id) {
        if let Some(entry) = cluster.pods.get(owner)
            && let Some(at) = entry.bound()
        {
            bound.push((entry.facts.name.clone(), at.node.clone(), owner));
        }
    }
    bound.sort_unstable();
    bound.truncate(MAX_GROUP);
    let mut places = Vec::new();
    for (name, node, owner) in bound {
        let counted = counted_on(filter, &node, owner.as_str());
        places.push(MemberPlace {
            name: name.into(),
            node: node.into(),
            gpus: counted.into_keys().collect(),
        });
    }
    places
}

/// The name of a pod, or its UID if no watch has shown it.
fn name_of(cluster: &Cluster, uid: &str) -> String {
    let entry = cluster.pods.get(uid);
    entry.map_or(uid, |entry| &entry.facts.name).to_owned()
}

/// The minors of the GPUs of placements, each once.
fn minors<'a>(placements: impl Iterator<Item = &'a Placement>) -> Vec<u32> {
    let shares = placements.flat_map(Placement::gpus);
    let minors: BTreeSet<u32> = shares.map(|share| share.minor).collect();
    minors.into_iter().collect()
}
