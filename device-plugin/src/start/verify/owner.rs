//! Finds the pod that owns device IDs, from the list of kubelet's pod-resources API and from its checkpoint. Never a guess.
//!
//! The list names app containers and sidecars, and no UIDs; an ordinary init container shows only by the device IDs that later
//! ones take over. The checkpoint names every container with the pod's UID, but kubelet does not promise its form, and removes
//! the entries of ended pods late. So the two must agree where both can be read.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::devices::extended_resource::ExtendedResource;
use crate::node::kubelet_checkpoint::Allocated;
use crate::node::kubelet_pod_resources::PodResourcesError;
use crate::node::pods::{NodePod, NodePods, PodUid};

/// The devices that kubelet has allocated, at one moment.
#[derive(Clone, Debug)]
pub(crate) struct KubeletSnapshot {
    pub(crate) listed: Result<Arc<Vec<ListedDevices>>, PodResourcesError>,
    /// The entries of kubelet's checkpoint; none if the file cannot be read.
    pub(crate) allocated: Option<Arc<Vec<Allocated>>>,
}

impl KubeletSnapshot {
    /// The entries of kubelet's checkpoint; an empty list if the file cannot be read.
    pub(crate) fn entries(&self) -> &[Allocated] {
        self.allocated.as_ref().map_or(&[], |entries| entries.as_slice())
    }
}

/// The devices of one resource of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListedDevices {
    pub(crate) namespace: String,
    /// Name of the pod, as the API has no UIDs.
    pub(crate) pod: String,
    pub(crate) resource: ExtendedResource,
    /// The device IDs, sorted.
    pub(crate) ids: Vec<String>,
}

/// The pod that owns the device IDs of a container is not known for certain. kubelet tries the start again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OwnerUnknown {
    #[error(transparent)]
    NoList(#[from] PodResourcesError),
    #[error("the watch of pods does not show the pod yet that kubelet starts a container of")]
    NotSeen,
    #[error("kubelet names no pod that holds these device IDs")]
    NoPod,
    #[error(
        "kubelet has allocated these device IDs to several pods, {0}; delete all but one of them to reschedule them"
    )]
    Several(String),
    #[error("kubelet's list and its checkpoint name different pods for these device IDs: {0}")]
    Contradiction(String),
}

/// Finds the pod of the container that holds exactly these device IDs (sorted) of a resource.
pub(crate) fn find_owner(
    snapshot: &KubeletSnapshot,
    pods: &NodePods,
    resource: ExtendedResource,
    ids: &[String],
) -> Result<PodUid, OwnerUnknown> {
    // Until the first list of pods is complete, a pod that is not known may exist all the same.
    if !pods.is_synced() {
        return Err(OwnerUnknown::NotSeen);
    }
    // All IDs must be equal: kubelet names exactly those of the container.
    let is_holder = |entry: &&Allocated| entry.resource == resource && entry.ids == ids;
    let entries = snapshot.allocated.as_ref();
    let allocated: Option<BTreeSet<&PodUid>> =
        entries.map(|entries| entries.iter().filter(is_holder).map(|entry| &entry.pod).collect());
    let listed = match &snapshot.listed {
        Ok(listed) => listed,
        // kubelet runs, since it has asked for the start; without its list only the checkpoint can name the pod.
        Err(no_list) => {
            let only = allocated.and_then(|allocated| only_live(pods, &allocated).ok().flatten());
            return only.ok_or_else(|| no_list.clone().into());
        }
    };
    let mut names = BTreeSet::new();
    for devices in listed.iter() {
        // One common ID is enough: an app container has those of the init containers before it, and others beside them.
        if devices.resource == resource && devices.ids.iter().any(|id| ids.binary_search(id).is_ok()) {
            names.insert((devices.namespace.as_str(), devices.pod.as_str()));
        }
    }
    match allocated {
        Some(allocated) => by_both(pods, &names, &allocated),
        None => by_name(pods, &names),
    }
}

/// The owner by both sources: the pods that the list names, and those that the checkpoint names.
fn by_both(
    pods: &NodePods,
    listed: &BTreeSet<(&str, &str)>,
    allocated: &BTreeSet<&PodUid>,
) -> Result<PodUid, OwnerUnknown> {
    if listed.is_empty() {
        // The list lacks pods whose GPU containers are all init containers, and pods that kubelet no longer counts as active.
        return only_live(pods, allocated)?.ok_or(OwnerUnknown::NotSeen);
    }
    let is_listed = |pod: &&NodePod| listed.contains(&(&*pod.namespace, &*pod.name));
    let known = live_pods(pods, allocated);
    let in_both: Vec<&NodePod> = known.iter().copied().filter(is_listed).collect();
    let is_any_unknown = allocated.iter().any(|uid| pods.get(uid).is_none());
    match in_both.as_slice() {
        // kubelet has allocated the IDs to two pods, and the watch does not show one of them yet: either may be starting.
        [_, ..] if listed.len() > 1 && is_any_unknown => Err(OwnerUnknown::NotSeen),
        [only] => Ok(only.uid.clone()),
        // An unknown UID may be that of a new pod of the same name.
        [] if known.is_empty() || is_any_unknown => Err(OwnerUnknown::NotSeen),
        [] => Err(OwnerUnknown::Contradiction(names_and_uids(known.into_iter()))),
        several => Err(OwnerUnknown::Several(names_and_uids(several.iter().copied()))),
    }
}

/// The owner by kubelet's list alone, if its checkpoint cannot be read. The list has names of pods and no UIDs.
fn by_name(pods: &NodePods, listed: &BTreeSet<(&str, &str)>) -> Result<PodUid, OwnerUnknown> {
    let (namespace, name) = match listed.first() {
        Some(first) if listed.len() == 1 => first,
        Some(_) => {
            let names: Vec<_> = listed
                .iter()
                .map(|(namespace, name)| format!("{namespace}/{name}"))
                .collect();
            return Err(OwnerUnknown::Several(names.join(", ")));
        }
        None => return Err(OwnerUnknown::NoPod),
    };
    let mut found = pods
        .live()
        .filter(|pod| pod.namespace == *namespace && pod.name == *name);
    match (found.next(), found.next()) {
        (Some(pod), None) => Ok(pod.uid.clone()),
        (None, _) => Err(OwnerUnknown::NotSeen),
        (Some(one), Some(other)) => Err(OwnerUnknown::Several(names_and_uids([one, other].into_iter()))),
    }
}

fn live_pods<'a>(pods: &'a NodePods, uids: &BTreeSet<&PodUid>) -> Vec<&'a NodePod> {
    // The checkpoint names pods that have ended until kubelet allocates again.
    uids.iter().filter_map(|uid| pods.get_live(uid)).collect()
}

/// The only pod among these that has not ended; none if there is no such pod, or if the watch does not show one of them.
fn only_live(pods: &NodePods, uids: &BTreeSet<&PodUid>) -> Result<Option<PodUid>, OwnerUnknown> {
    if uids.is_empty() {
        return Err(OwnerUnknown::NoPod);
    }
    if uids.iter().any(|uid| pods.get(uid).is_none()) {
        return Ok(None);
    }
    match live_pods(pods, uids).as_slice() {
        [only] => Ok(Some(only.uid.clone())),
        [] => Ok(None),
        several => Err(OwnerUnknown::Several(names_and_uids(several.iter().copied()))),
    }
}

fn names_and_uids<'a>(pods: impl Iterator<Item = &'a NodePod>) -> String {
    let names = pods.map(|pod| format!("{} ({})", pod.display_name(), pod.uid.as_str()));
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::node::pods::PodStage;
    use crate::tests::builders::{self, pod, pods, units};

    /// Pods and their IDs, written `pod=ids` with blanks between them; each letter is an ID.
    fn entries(text: &str) -> impl Iterator<Item = (&str, Vec<String>)> {
        let pairs = text.split_whitespace().filter_map(|entry| entry.split_once('='));
        pairs.map(|(pod, ids)| (pod, ids.chars().map(String::from).collect()))
    }

    fn listed((pod, ids): (&str, Vec<String>)) -> ListedDevices {
        ListedDevices {
            namespace: "default".to_owned(),
            pod: pod.to_owned(),
            resource: ExtendedResource::Memory,
            ids,
        }
    }

    fn allocated((pod, ids): (&str, Vec<String>)) -> Allocated {
        Allocated {
            ids,
            ..builders::allocated(pod, "c", ExtendedResource::Memory, &[])
        }
    }

    /// The container has the IDs x and y. The node has pod a with UID `a`, and b whose UID is `b2`: it was recreated.
    #[rstest]
    #[case::alone("a=xy", Some("a=xy"), "a")]
    #[case::without_checkpoint("a=xy", None, "a")]
    #[case::an_init_container_shares_an_id("a=x b=z", None, "a")]
    #[case::an_init_container_in_both("a=x b=z", Some("a=xy a=x b2=z"), "a")]
    #[case::only_an_init_container("b=z", Some("a=xy b2=z"), "a")]
    #[case::no_pod("", Some(""), "kubelet names no pod")]
    #[case::no_pod_without_checkpoint("b=z", None, "kubelet names no pod")]
    #[case::several_settled_by_the_checkpoint("a=x b=x", Some("b2=xy"), "b2")]
    #[case::several(
        "a=x b=y",
        None,
        "kubelet has allocated these device IDs to several pods, default/a, default/b; delete all but one"
    )]
    #[case::several_everywhere(
        "a=x b=x",
        Some("a=xy b2=xy"),
        "kubelet has allocated these device IDs to several pods"
    )]
    #[case::recreated_and_not_seen("b=x", Some("b3=xy"), "the watch of pods does not show the pod yet")]
    #[case::recreated_and_the_old_one_in_the_checkpoint("b=x", Some("b1=xy b2=xy"), "b2")]
    #[case::an_ended_pod_in_the_checkpoint("a=x", Some("a=xy ended=xy"), "a")]
    #[case::allocated_twice_and_one_not_seen(
        "a=x new=x",
        Some("a=xy new=xy"),
        "the watch of pods does not show the pod yet"
    )]
    #[case::only_init_containers_and_one_not_seen(
        "",
        Some("a=xy new=xy"),
        "the watch of pods does not show the pod yet"
    )]
    #[case::contradiction("a=x", Some("b2=xy"), "kubelet's list and its checkpoint name different pods")]
    fn the_owner_of_device_ids_is_found(
        #[case] list: &str,
        #[case] checkpoint: Option<&str>,
        #[case] expected: &str,
    ) {
        let recreated = NodePod {
            uid: PodUid::from("b2"),
            ..pod("b", 2, [units(2)])
        };
        let ended = pod("ended", 2, [units(2)]).at(PodStage::Terminal);
        let pods = pods([pod("a", 1, [units(2)]), recreated, ended]);
        let snapshot = KubeletSnapshot {
            listed: Ok(Arc::new(entries(list).map(listed).collect())),
            allocated: checkpoint.map(|text| Arc::new(entries(text).map(allocated).collect())),
        };
        let found = find_owner(
            &snapshot,
            &pods,
            ExtendedResource::Memory,
            &["x".to_owned(), "y".to_owned()],
        );
        let found = found.map_or_else(|error| error.to_string(), |uid| uid.as_str().to_owned());
        assert!(found.starts_with(expected), "{found}");
    }
}
