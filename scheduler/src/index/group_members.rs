//! The members of groups, as the watch of pods shows them: how many of a group still need a place.

use placement::OwnerId;
use proto::pod::Pod;
use rustc_hash::{FxHashMap, FxHashSet};

use super::Index;
use super::pod_groups::{GroupId, GroupOfPod, MemberMarks};
use super::resource_demand::ResourceDemand;

#[derive(Debug, Default)]
pub(super) struct GroupMembers {
    members: FxHashMap<GroupId, FxHashMap<OwnerId, Member>>,
    groups: FxHashMap<OwnerId, GroupId>,
    /// The groups that have got or lost a member, or of which one was assumed or bound, or failed to be bound.
    pub(super) changed: FxHashSet<GroupId>,
}

/// A member that has not ended.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) has_devices: bool,
    /// True if a watch has shown it bound.
    pub(super) is_bound: bool,
    pub(super) marks: MemberMarks,
    /// The serial number of the newest list when a list or a watch event last showed it.
    list: u32,
}

impl GroupMembers {
    /// Takes over a pod that the list of this number, or a later event, shows.
    pub(super) fn put(&mut self, pod: &Pod, has_devices: bool, list: u32) {
        let id = GroupId::of(pod);
        // The marks of a pod can be edited.
        let before = self.groups.get(pod.uid());
        if before.is_some() && before != id.as_ref() {
            self.remove(pod.uid());
        }
        let Some(id) = id else { return };
        let member = Member {
            has_devices,
            is_bound: pod.spec.node_name.is_some(),
            marks: MemberMarks::of(pod),
            list,
        };
        let owner = OwnerId::from(pod.uid());
        self.groups.insert(owner.clone(), id.clone());
        let is_bound = member.is_bound;
        let before = self.members.entry(id.clone()).or_default().insert(owner, member);
        // Most events of a pod change neither its group nor its node.
        if before.is_none_or(|before| before.is_bound != is_bound) {
            self.changed.insert(id);
        }
    }

    /// Removes a pod that is gone or has ended.
    pub(super) fn remove(&mut self, uid: &str) {
        let Some(id) = self.groups.remove(uid) else { return };
        let members = self.members.entry(id.clone()).or_default();
        members.remove(uid);
        if members.is_empty() {
            self.members.remove(&id);
            self.changed.remove(&id);
        } else {
            self.changed.insert(id);
        }
    }

    /// Removes the pods that the list of this number did not show.
    pub(super) fn remove_unlisted(&mut self, list: u32) {
        let mut unlisted = Vec::new();
        for (owner, member) in self.members.values().flatten() {
            if member.list != list {
                unlisted.push(owner.clone());
            }
        }
        for owner in unlisted {
            self.remove(owner.as_str());
        }
    }

    /// Notes that a pod is assumed on a node, or that its binding has failed.
    pub(super) fn note_assumption(&mut self, uid: &str) {
        if let Some(id) = self.groups.get(uid) {
            self.changed.insert(id.clone());
        }
    }

    /// The group of a pod; `None` for a pod of no group.
    pub(super) fn group_of(&self, uid: &str) -> Option<GroupId> {
        self.groups.get(uid).cloned()
    }

    /// The group of a pod, and the pod's marks; `None` for a pod of no group.
    pub(super) fn find(&self, uid: &str) -> Option<(&GroupId, MemberMarks)> {
        let group = self.groups.get(uid)?;
        Some((group, self.members.get(group)?.get(uid)?.marks))
    }

    /// The members of a group.
    pub(super) fn of(&self, group: &GroupId) -> impl Iterator<Item = (&OwnerId, &Member)> {
        self.members.get(group).into_iter().flatten()
    }
}

/// The members of a group, by whether they have a place.
#[derive(Debug, Default)]
pub(crate) struct MembersToPlace {
    /// The number of members for which the group needs room like that of the filtered one, at least 1.
    pub(crate) n_alike: usize,
    /// The number of members with this request, bound ones included, for which one link group (linked GPUs of a node) needs room.
    pub(crate) n_in_link_group: usize,
    /// True if all members are known, so that those with other requests are not among these.
    pub(crate) are_known: bool,
    /// The members that are bound, or are being bound, with devices.
    pub(crate) bound: Vec<OwnerId>,
    /// The node of these members.
    pub(crate) node: Option<Box<str>>,
    /// True if these members are on several nodes.
    pub(crate) is_apart: bool,
}

/// The members of a group, of which the one with this demand is filtered now.
pub(crate) fn to_place(index: &Index, group: &GroupOfPod, demand: &ResourceDemand<'_>) -> MembersToPlace {
    let mut counted = MembersToPlace::default();
    let (mut n_members, mut n_alike, mut n_alike_bound) = (0, 0, 0_usize);
    for (owner, member) in index.cluster.group_members.of(&group.id) {
        n_members += 1;
        let Some(entry) = index.cluster.pods.get(owner).filter(|_| member.has_devices) else {
            continue;
        };
        let other = index.demand(owner.as_str(), &entry.facts);
        let is_alike = matches!(other, Ok(Some(other)) if other.is_alike(demand));
        if let Some(bound) = entry.bound() {
            n_alike_bound += usize::from(is_alike);
            counted.bound.push(owner.clone());
            let node = counted.node.get_or_insert_with(|| bound.node.clone());
            counted.is_apart |= **node != *bound.node;
            continue;
        }
        n_alike += usize::from(is_alike);
    }
    let min_count = usize::try_from(group.min_count).unwrap_or(usize::MAX);
    let n_missing = min_count.saturating_sub(counted.bound.len());
    counted.are_known = n_members >= min_count;
    // Before all members exist, every one that is missing may need the same room.
    let n = if counted.are_known {
        n_missing.min(n_alike)
    } else {
        n_missing
    };
    counted.n_alike = n.max(1);
    // More members than the group needs must not make a slower kind of link count.
    let n_in_all = counted.n_alike.saturating_add(n_alike_bound);
    counted.n_in_link_group = n_in_all.min(min_count).max(1);
    counted
}

#[cfg(test)]
mod tests {
    use proto::pod::GroupKind;
    use serde_json::json;

    use super::*;

    fn pod(group: Option<&str>) -> Pod {
        let annotations = json!({"gang.scheduling.koordinator.sh/name": group});
        let annotations = group.map_or(json!({}), |_| annotations);
        let metadata = json!({"name": "p", "namespace": "d", "uid": "u", "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": []}})).unwrap()
    }

    /// Marks are labels and annotations, which can be edited.
    #[test]
    fn a_pod_is_a_member_of_the_group_that_it_names_last() {
        let mut members = GroupMembers::default();
        let id = |key: &str| GroupId {
            kind: GroupKind::Koordinator,
            key: key.into(),
        };
        let n = |members: &GroupMembers, key| members.of(&id(key)).count();
        members.put(&pod(Some("a")), true, 1);
        members.put(&pod(Some("b")), true, 1);
        assert_eq!((n(&members, "d/a"), n(&members, "d/b")), (0, 1));
        members.put(&pod(None), true, 1);
        assert_eq!(n(&members, "d/b"), 0);
        members.put(&pod(Some("a")), true, 1);
        members.remove("u");
        assert_eq!(n(&members, "d/a"), 0);
        assert!(members.find("u").is_none() && members.changed.is_empty());
    }
}
