//! Groups of pods as watches show their `PodGroup`s: how many members each has at least, and its wish for one domain.
//!
//! A group without an object, or with one that no watch shows, has what its pods themselves have.

use proto::pod::{GroupKind, Pod};
use proto::pod_group::{GroupWish, POD_GROUPS, PodGroup, PodGroupApi};
use rustc_hash::FxHashMap;
use tracing::warn;

use super::List;
use crate::watch::ObjectStore;

/// The `PodGroup`s of each API. The APIs are apart: both may have an object of the same namespace and name.
#[derive(Debug, Default)]
pub(super) struct PodGroups {
    native: GroupStore,
    coscheduling: GroupStore,
}

/// The `PodGroup`s of one API.
#[derive(Debug, Default)]
pub struct GroupStore {
    /// By namespace and name, as [`proto::pod::GroupRef::key`] has them.
    by_key: FxHashMap<Box<str>, GroupFacts>,
    list: List,
}

/// The fields of a `PodGroup` by which the places of its members are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupFacts {
    /// The least number of members that are placed together; `None` for a group without a size.
    pub(super) min_count: Option<u32>,
    /// `None` if the object has none, so that those of the members count. A wish that cannot be read counts as `any`.
    pub(super) wish: Option<GroupWish>,
    /// The serial number of the newest list when a list or a watch event last showed the object.
    list: u32,
}

/// The fields of a member that count where the object of its group has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemberMarks {
    /// The least number of members that are placed together.
    min_available: Option<u32>,
    pub(super) wish: GroupWish,
}

/// A group among those of all kinds, of which two may have the same name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GroupId {
    /// The mark of the pod, which says by whom the group is placed together.
    pub(crate) kind: GroupKind,
    /// Namespace and name.
    pub(crate) key: Box<str>,
}

/// The group of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupOfPod {
    pub(crate) id: GroupId,
    /// The least number of members that are placed together, 1 or more; 1 if it is not known.
    pub(crate) min_count: u32,
    /// The wish for one domain: that of the group's object or, if it has none, of the pod.
    pub(crate) wish: GroupWish,
}

impl GroupId {
    /// `None` for a pod that is a member of no group.
    pub(super) fn of(pod: &Pod) -> Option<Self> {
        let group = pod.group()?;
        let (kind, key) = (group.kind, group.key());
        Some(Self { kind, key })
    }
}

impl PodGroups {
    /// The store of the objects of an API; the versions of Kubernetes' own API share one.
    pub(super) fn store(&mut self, api: PodGroupApi) -> &mut GroupStore {
        match api {
            PodGroupApi::V1Beta1 | PodGroupApi::V1Alpha3 | PodGroupApi::V1Alpha2 => &mut self.native,
            PodGroupApi::Coscheduling => &mut self.coscheduling,
        }
    }

    /// The facts of a group; `None` if no watch shows its object.
    pub(super) fn get(&self, GroupId { kind, key }: &GroupId) -> Option<&GroupFacts> {
        match kind {
            GroupKind::Native => self.native.by_key.get(key),
            GroupKind::Coscheduling => self.coscheduling.by_key.get(key),
            // Koordinator's own objects are not watched.
            GroupKind::Koordinator => None,
        }
    }

    pub(super) fn group_of(&self, pod: &Pod) -> Option<GroupOfPod> {
        Some(self.group(GroupId::of(pod)?, MemberMarks::of(pod)))
    }

    pub(super) fn group(&self, id: GroupId, marks: MemberMarks) -> GroupOfPod {
        let facts = self.get(&id).copied().unwrap_or_default();
        // kube-scheduler itself reads no annotation.
        let of_member = marks.min_available.filter(|_| id.kind != GroupKind::Native);
        GroupOfPod {
            id,
            min_count: facts.min_count.or(of_member).unwrap_or(1).max(1),
            wish: facts.wish.unwrap_or(marks.wish),
        }
    }
}

impl MemberMarks {
    pub(super) fn of(pod: &Pod) -> Self {
        // The webhook refuses values that cannot be read; where it does not run, they count as `any`.
        let wish = GroupWish::read(pod.metadata.annotations.as_ref());
        Self {
            min_available: pod.gang_min_available(),
            wish: wish.ok().flatten().unwrap_or_default(),
        }
    }
}

impl ObjectStore<PodGroup> for GroupStore {
    const KIND: &'static str = POD_GROUPS;
    const MAY_BE_ABSENT: bool = true;

    fn apply(&mut self, group: PodGroup) {
        let key = group.key();
        let annotations = group.metadata.annotations.as_ref();
        let wish = GroupWish::read(annotations).unwrap_or_else(|error| {
            warn!(group = &*key, %error, "the domain of a group of pods is taken to be any");
            Some(GroupWish::default())
        });
        let facts = GroupFacts {
            min_count: group.min_count(),
            wish,
            list: self.list.number,
        };
        self.by_key.insert(key, facts);
    }

    fn delete(&mut self, group: &PodGroup) {
        self.by_key.remove(&group.key());
    }

    fn begin_list(&mut self) {
        // A list of groups opens no room.
        self.list.begin(0);
    }

    fn end_list(&mut self) {
        let number = self.list.number;
        self.by_key.retain(|_, facts| facts.list == number);
    }
}

#[cfg(test)]
mod tests {
    use proto::pod_group::{DomainPolicy, GroupDomain};
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    /// A `PodGroup` of that name with a minimum in each of the two forms, and an annotation for its domain unless it is empty.
    fn group(name: &str, count: i64, domain: &str) -> PodGroup {
        let mut group = json!({"metadata": {"name": name, "namespace": "d"},
            "spec": {"schedulingPolicy": {"gang": {"minCount": count}}, "minMember": count}});
        if !domain.is_empty() {
            group["metadata"]["annotations"] = json!({"gpushare/group-domain": domain});
        }
        serde_json::from_value(group).unwrap()
    }

    fn min_count(groups: &PodGroups, kind: GroupKind, name: &str) -> Option<u32> {
        let key = format!("d/{name}").into();
        groups.get(&GroupId { kind, key })?.min_count
    }

    #[test]
    fn a_complete_list_replaces_the_groups_of_its_api_alone() {
        let mut groups = PodGroups::default();
        groups.store(PodGroupApi::Coscheduling).apply(group("a", 9, ""));
        let native = groups.store(PodGroupApi::V1Alpha2);
        native.begin_list();
        native.apply(group("a", 2, ""));
        native.apply(group("b", 3, ""));
        native.end_list();
        native.apply(group("c", 4, ""));
        native.delete(&group("b", 3, ""));
        let shown = |groups: &PodGroups, kind| ["a", "b", "c"].map(|name| min_count(groups, kind, name));
        assert_eq!(shown(&groups, GroupKind::Native), [Some(2), None, Some(4)]);
        // Another version of the same API shows the same objects.
        let native = groups.store(PodGroupApi::V1Beta1);
        native.begin_list();
        native.apply(group("c", 5, ""));
        assert_eq!(
            min_count(&groups, GroupKind::Native, "a"),
            Some(2),
            "until the list is complete"
        );
        groups.store(PodGroupApi::V1Beta1).end_list();
        assert_eq!(shown(&groups, GroupKind::Native), [None, None, Some(5)]);
        assert_eq!(shown(&groups, GroupKind::Coscheduling), [Some(9), None, None]);
        assert_eq!(shown(&groups, GroupKind::Koordinator), [None, None, None]);
    }

    /// A pod of the namespace `d` with these labels, annotations and group of its spec.
    fn pod(labels: &Value, annotations: &Value, group: &Value) -> Pod {
        let metadata = json!({"name": "p", "namespace": "d", "labels": labels, "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"schedulingGroup": group}})).unwrap()
    }

    fn native(annotations: &Value) -> Pod {
        pod(&json!({}), annotations, &json!({"podGroupName": "g"}))
    }

    fn coscheduling(annotations: &Value) -> Pod {
        pod(
            &json!({"scheduling.x-k8s.io/pod-group": "g"}),
            annotations,
            &Value::Null,
        )
    }

    /// A member of a gang of Koordinator that is to have this size at least.
    fn koordinator(min_available: &str) -> Pod {
        let annotations = json!({"gang.scheduling.koordinator.sh/name": "g",
            "gang.scheduling.koordinator.sh/min-available": min_available});
        pod(&json!({}), &annotations, &Value::Null)
    }

    #[rstest]
    #[case::native(native(&json!({})), GroupKind::Native, 4)]
    #[case::native_by_its_object_alone(native(&json!({"gang.scheduling.koordinator.sh/min-available": "7"})), GroupKind::Native, 4)]
    #[case::coscheduling(coscheduling(&json!({})), GroupKind::Coscheduling, 5)]
    #[case::koordinator(koordinator("6"), GroupKind::Koordinator, 6)]
    #[case::koordinator_of_none(koordinator("0"), GroupKind::Koordinator, 1)]
    #[case::koordinator_of_nonsense(koordinator("many"), GroupKind::Koordinator, 1)]
    fn the_size_comes_from_the_object_or_the_pod(
        #[case] pod: Pod,
        #[case] kind: GroupKind,
        #[case] min_count: u32,
    ) {
        let mut groups = PodGroups::default();
        groups.store(PodGroupApi::V1Beta1).apply(group("g", 4, ""));
        groups.store(PodGroupApi::Coscheduling).apply(group("g", 5, ""));
        let key = "d/g".into();
        let expected = GroupOfPod {
            id: GroupId { kind, key },
            min_count,
            wish: GroupWish::default(),
        };
        assert_eq!(groups.group_of(&pod), Some(expected));
    }

    #[rstest]
    #[case::native(native(&json!({})), 1)]
    #[case::native_with_koordinator_s_annotation(native(&json!({"gang.scheduling.koordinator.sh/min-available": "7"})), 1)]
    #[case::coscheduling(coscheduling(&json!({})), 1)]
    #[case::coscheduling_with_koordinator_s_annotation(
        coscheduling(&json!({"gang.scheduling.koordinator.sh/min-available": "7"})), 7
    )]
    #[case::koordinator(koordinator("6"), 6)]
    fn a_group_without_an_object_has_the_size_of_its_pod(#[case] pod: Pod, #[case] min_count: u32) {
        let group = PodGroups::default().group_of(&pod).unwrap();
        assert_eq!(group.min_count, min_count);
    }

    #[test]
    fn a_pod_of_no_group_has_none() {
        let annotations =
            json!({"gpushare/group-domain": "link", "gang.scheduling.koordinator.sh/min-available": "2"});
        assert_eq!(
            PodGroups::default().group_of(&pod(&json!({}), &annotations, &Value::Null)),
            None
        );
    }

    #[rstest]
    #[case::of_neither("", "", GroupDomain::Any)]
    #[case::of_the_pod("", "node", GroupDomain::Node)]
    #[case::of_the_group("link", "", GroupDomain::Link)]
    #[case::the_group_s_wins("link", "node", GroupDomain::Link)]
    #[case::the_group_s_any_wins("any", "node", GroupDomain::Any)]
    #[case::unknown_of_the_pod("", "rack", GroupDomain::Any)]
    #[case::unknown_of_the_group("rack", "node", GroupDomain::Any)]
    fn the_wish_of_the_group_wins(#[case] of_group: &str, #[case] of_pod: &str, #[case] domain: GroupDomain) {
        let mut groups = PodGroups::default();
        groups.store(PodGroupApi::V1Beta1).apply(group("g", 4, of_group));
        let mut annotations = json!({});
        if !of_pod.is_empty() {
            annotations["gpushare/group-domain"] = of_pod.into();
        }
        let expected = GroupWish {
            domain,
            policy: DomainPolicy::Preferred,
        };
        assert_eq!(groups.group_of(&native(&annotations)).unwrap().wish, expected);
    }
}
