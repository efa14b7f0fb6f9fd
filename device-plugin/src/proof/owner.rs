//! Whose device IDs are these? From kubelet's list and its checkpoint. Never a guess.
//!
//! The list names app containers and sidecars, and no UIDs; the checkpoint names every container with the pod's UID, but
//! its form is not promised, and kubelet clears away late what it has written down of pods that have ended. So each is
//! held against the other where both can be read. An ordinary init container is recognised in the list by the IDs that
//! it shares with the containers after it, or in the checkpoint.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::extended_resource::ExtendedResource;
use crate::identity::checkpoint::Allocated;
use crate::pods::{NodePod, PodUid, Pods, Stage};

use super::podresources::{Listed, PodResourcesError};

/// What kubelet knows at one moment.
#[derive(Clone, Debug)]
pub struct Look {
    /// What it lists.
    pub listed: Result<Arc<Vec<Listed>>, PodResourcesError>,
    /// What it has written down; none if that cannot be read.
    pub written: Option<Arc<Vec<Allocated>>>,
}

/// Why it is not known whose container this is. kubelet asks again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unproven {
    /// kubelet cannot be asked.
    #[error(transparent)]
    Silent(#[from] PodResourcesError),
    /// The watch may be behind kubelet.
    #[error("the API server has not yet told of the pod that kubelet starts a container of")]
    NotTold,
    /// Nobody has them.
    #[error("kubelet names no pod that holds these device IDs")]
    Nobody,
    /// Several have them.
    #[error("kubelet names several pods that hold these device IDs: {0}")]
    Several(String),
    /// The two sources contradict each other.
    #[error("kubelet's list and its checkpoint name different pods for these device IDs: {0}")]
    Contradiction(String),
}

/// The pod that the container belongs to which holds exactly these IDs, sorted, of a resource.
///
/// # Errors
/// Why that cannot be said.
pub fn find(
    look: &Look,
    pods: &Pods,
    resource: ExtendedResource,
    ids: &[String],
) -> Result<PodUid, Unproven> {
    if !pods.is_synced() {
        return Err(Unproven::NotTold);
    }
    let is_theirs = |listed: &&Listed| {
        listed.resource == resource && listed.ids.iter().any(|id| ids.binary_search(id).is_ok())
    };
    let listed = look.listed.as_ref().map(|listed| {
        listed
            .iter()
            .filter(is_theirs)
            .map(full_name)
            .collect::<BTreeSet<_>>()
    });
    let holds = |entry: &&Allocated| entry.resource == resource && entry.ids == ids;
    let written: Option<BTreeSet<&PodUid>> = look
        .written
        .as_ref()
        .map(|written| written.iter().filter(holds).map(|entry| &entry.pod).collect());
    match (listed, written) {
        (Ok(listed), Some(written)) => by_both(pods, &listed, &written),
        (Ok(listed), None) => by_name(pods, &listed),
        // kubelet answers its own call, so it is there; without its list only the checkpoint can tell.
        (Err(silent), Some(written)) => match only(pods, &written) {
            Ok(Some(pod)) => Ok(pod),
            Ok(None) | Err(_) => Err(silent.clone().into()),
        },
        (Err(silent), None) => Err(silent.clone().into()),
    }
}

fn full_name(listed: &Listed) -> (&str, &str) {
    (&listed.namespace, &listed.pod)
}

fn is_live(pod: &NodePod) -> bool {
    pod.stage != Stage::Terminal
}

fn by_both(
    pods: &Pods,
    listed: &BTreeSet<(&str, &str)>,
    written: &BTreeSet<&PodUid>,
) -> Result<PodUid, Unproven> {
    if listed.is_empty() {
        // All GPU containers of the pod are init containers, or kubelet no longer counts it as active.
        return only(pods, written)?.ok_or(Unproven::NotTold);
    }
    let is_listed = |pod: &&NodePod| listed.contains(&(&*pod.namespace, &*pod.name));
    let known: Vec<&NodePod> = written
        .iter()
        .filter_map(|uid| pods.get(uid))
        .filter(|pod| is_live(pod))
        .collect();
    let both: Vec<&NodePod> = known.iter().copied().filter(is_listed).collect();
    let is_unknown = |uid: &&PodUid| pods.get(uid).is_none();
    match both.as_slice() {
        // kubelet has given them to two pods, one of which the watch has not told yet: either may be starting.
        [_, ..] if listed.len() > 1 && written.iter().any(is_unknown) => Err(Unproven::NotTold),
        [only] => Ok(only.uid.clone()),
        // An UID that is not known may be that of a pod of the same name which came since.
        [] if known.is_empty() || written.iter().any(is_unknown) => Err(Unproven::NotTold),
        [] => Err(Unproven::Contradiction(names(known.into_iter()))),
        several => Err(Unproven::Several(names(several.iter().copied()))),
    }
}

fn by_name(pods: &Pods, listed: &BTreeSet<(&str, &str)>) -> Result<PodUid, Unproven> {
    let mut names_listed = listed.iter();
    let (Some((namespace, name)), None) = (names_listed.next(), names_listed.next()) else {
        let text: Vec<String> = listed
            .iter()
            .map(|(namespace, name)| format!("{namespace}/{name}"))
            .collect();
        return Err(if text.is_empty() {
            Unproven::Nobody
        } else {
            Unproven::Several(text.join(", "))
        });
    };
    let mut found = pods
        .iter()
        .filter(|pod| is_live(pod))
        .filter(|pod| pod.namespace == *namespace && pod.name == *name);
    match (found.next(), found.next()) {
        (Some(pod), None) => Ok(pod.uid.clone()),
        (None, _) => Err(Unproven::NotTold),
        (Some(one), Some(other)) => Err(Unproven::Several(names([one, other].into_iter()))),
    }
}

/// The only live pod among these; none if one of them is not known.
fn only(pods: &Pods, written: &BTreeSet<&PodUid>) -> Result<Option<PodUid>, Unproven> {
    if written.is_empty() {
        return Err(Unproven::Nobody);
    }
    if written.iter().any(|uid| pods.get(uid).is_none()) {
        return Ok(None);
    }
    let known: Vec<&NodePod> = written
        .iter()
        .filter_map(|uid| pods.get(uid))
        .filter(|pod| is_live(pod))
        .collect();
    match known.as_slice() {
        [only] => Ok(Some(only.uid.clone())),
        [] => Ok(None),
        several => Err(Unproven::Several(names(several.iter().copied()))),
    }
}

fn names<'a>(pods: impl Iterator<Item = &'a NodePod>) -> String {
    pods.map(|pod| format!("{} ({})", pod.display_name(), pod.uid.as_str()))
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use proto::kubelet::deviceplugin::ContainerAllocateResponse;
    use rstest::rstest;

    use super::*;
    use crate::builders::{pod, pods, units};

    /// Pods and their IDs, written `pod=ids` with blanks between them; each letter is an ID.
    fn entries(text: &str) -> impl Iterator<Item = (&str, Vec<String>)> {
        let pairs = text.split_whitespace().filter_map(|entry| entry.split_once('='));
        pairs.map(|(pod, ids)| (pod, ids.chars().map(String::from).collect()))
    }

    fn listed((pod, ids): (&str, Vec<String>)) -> Listed {
        Listed {
            namespace: "default".to_owned(),
            pod: pod.to_owned(),
            resource: ExtendedResource::Memory,
            ids,
        }
    }

    fn written((pod, ids): (&str, Vec<String>)) -> Allocated {
        let answer = ContainerAllocateResponse::default();
        Allocated {
            pod: PodUid::from(pod),
            container: "c".to_owned(),
            resource: ExtendedResource::Memory,
            ids,
            answer,
        }
    }

    /// The container has the IDs x and y. The node has pod a with UID `a`, and b whose UID is `b2`: it was made anew.
    #[rstest]
    #[case::alone("a=xy", Some("a=xy"), "a")]
    #[case::without_checkpoint("a=xy", None, "a")]
    #[case::an_init_container_shares_an_id("a=x b=z", None, "a")]
    #[case::an_init_container_in_both("a=x b=z", Some("a=xy a=x b2=z"), "a")]
    #[case::only_an_init_container("b=z", Some("a=xy b2=z"), "a")]
    #[case::nobody("", Some(""), "kubelet names no pod")]
    #[case::nobody_without_checkpoint("b=z", None, "kubelet names no pod")]
    #[case::several_settled_by_the_checkpoint("a=x b=x", Some("b2=xy"), "b2")]
    #[case::several(
        "a=x b=y",
        None,
        "kubelet names several pods that hold these device IDs: default/a, default/b"
    )]
    #[case::several_everywhere("a=x b=x", Some("a=xy b2=xy"), "kubelet names several")]
    #[case::made_anew_and_not_told("b=x", Some("b3=xy"), "the API server has not yet told")]
    #[case::made_anew_and_the_old_one_written_too("b=x", Some("b1=xy b2=xy"), "b2")]
    #[case::an_ended_pod_is_written_still("a=x", Some("a=xy ended=xy"), "a")]
    #[case::given_twice_and_one_not_told("a=x new=x", Some("a=xy new=xy"), "the API server has not yet told")]
    #[case::only_init_containers_and_one_not_told("", Some("a=xy new=xy"), "the API server has not yet told")]
    #[case::contradiction("a=x", Some("b2=xy"), "kubelet's list and its checkpoint name different pods")]
    fn finds(#[case] list: &str, #[case] checkpoint: Option<&str>, #[case] expected: &str) {
        let recreated = NodePod {
            uid: PodUid::from("b2"),
            ..pod("b", 2, [units(2)])
        };
        let ended = NodePod {
            stage: Stage::Terminal,
            ..pod("ended", 2, [units(2)])
        };
        let pods = pods([pod("a", 1, [units(2)]), recreated, ended]);
        let look = Look {
            listed: Ok(Arc::new(entries(list).map(listed).collect())),
            written: checkpoint.map(|text| Arc::new(entries(text).map(written).collect())),
        };
        let found = find(
            &look,
            &pods,
            ExtendedResource::Memory,
            &["x".to_owned(), "y".to_owned()],
        );
        let found = found.map_or_else(|error| error.to_string(), |uid| uid.as_str().to_owned());
        assert!(found.starts_with(expected), "{found}");
    }
}
