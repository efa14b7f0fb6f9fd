//! The CDI specs of this node's containers: written when one starts, again when the directory was emptied, and removed
//! when their IDs are nobody's.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::SystemTime;

use proto::request::ContainerRequest;
use tracing::{info, warn};

use crate::cdi;
use crate::fleet::DeviceKey;
use crate::identity::checkpoint::Allocated;
use crate::inject::{self, Given, Known};
use crate::metrics::Outcome;
use crate::plugin::NodeState;
use crate::pods::{NodePod, PodUid, Pods, Stage};
use crate::served::Served;

use super::{Gate, Held, Start};

impl Gate {
    /// Writes the spec that the container's answer names: the runtime reads it after this.
    /// It may be any of these containers.
    pub(super) fn prepare(&self, node: &NodeState, pod: &NodePod, start: &Start<'_>, containers: &[&str]) -> Result<(), Held> {
        let is_other = write(node, pod, start.resource, start.ids, containers);
        let dir = || node.settings.injection.cdi_dir.clone();
        if is_other.map_err(|source| Held::Spec { pod: pod.display_name(), dir: dir(), source })? {
            self.metrics.count(Outcome::Rewritten);
        }
        Ok(())
    }
}

/// Writes the spec for these IDs of the pod, which one of these containers has; whether there was another one.
fn write(node: &NodeState, pod: &NodePod, resource: Served, ids: &[String], containers: &[&str]) -> io::Result<bool> {
    let Ok(placement) = &pod.placement else { return Ok(false) };
    // Without a spec of its own it would see what an earlier holder of these IDs saw.
    let container = holder(pod, resource, ids.len() as u64, containers)
        .ok_or_else(|| io::Error::other("none of its containers asks for so many devices"))?;
    let fleet = node.fleet.borrow();
    let keys: Vec<DeviceKey> = placement.names(resource).iter().filter_map(|name| fleet.find(resource, name)).collect();
    if keys.is_empty() {
        return Ok(false);
    }
    let known = Known { pod, container, placement: Some(placement) };
    let edits = inject::cdi_edits(&node.settings, &known, resource, &Given::of(&fleet, resource, &keys));
    cdi::write(&node.settings.injection.cdi_dir, &cdi::device_name(resource, ids), &edits)
}

/// Who of these has so many IDs: best one whose spec says all that there is to say, as an init container hands its IDs on.
fn holder<'a>(pod: &'a NodePod, resource: Served, n_ids: u64, containers: &[&str]) -> Option<&'a ContainerRequest> {
    let asks = |container: &&ContainerRequest| resource.count(container) == n_ids && containers.contains(&&*container.name);
    pod.containers.iter().filter(asks).min_by_key(|container| !inject::speaks(resource, container))
}

/// Whether the container sees what its CDI spec says.
pub(super) fn is_by_spec(entry: &Allocated) -> bool {
    entry.answer.cdi_devices.iter().any(|device| device.name.starts_with(cdi::PREFIX))
}

/// The entries of IDs that belong to one live pod and to nobody who is not known: of others nobody can say whose the spec is.
fn sole_holders<'a>(pods: &'a Pods, entries: impl Iterator<Item = &'a Allocated>) -> Vec<(&'a NodePod, &'a Allocated)> {
    let mut holders = BTreeMap::<(Served, &[String]), (BTreeSet<&PodUid>, &Allocated)>::new();
    for entry in entries.filter(|entry| pods.get(&entry.pod).is_none_or(|pod| pod.stage != Stage::Terminal)) {
        let (uids, _) = holders.entry((entry.resource, &entry.ids)).or_insert_with(|| (BTreeSet::new(), entry));
        uids.insert(&entry.pod);
    }
    let sole = holders.into_values().filter(|(uids, _)| uids.len() == 1);
    sole.filter_map(|(_, entry)| Some((pods.get(&entry.pod)?, entry))).collect()
}

/// Brings the specs in step with kubelet's checkpoint. One that is there is left alone: a container that runs saw what it
/// says, and it is written anew before the next start.
pub(super) fn rebuild(node: &NodeState, pods: &Pods, written: &[Allocated]) {
    let dir = &node.settings.injection.cdi_dir;
    let by_spec = || written.iter().filter(|entry| is_by_spec(entry));
    let kept: BTreeSet<String> = by_spec().map(|entry| cdi::device_name(entry.resource, &entry.ids)).collect();
    let is_missing = |entry: &Allocated| !cdi::exists(dir, &cdi::device_name(entry.resource, &entry.ids));
    for (pod, entry) in sole_holders(pods, by_spec()).into_iter().filter(|(_, entry)| is_missing(entry)) {
        if let Err(error) = write(node, pod, entry.resource, &entry.ids, &[&entry.container]) {
            warn!(pod = pod.display_name(), dir = %dir.display(), %error, "cannot write a CDI spec");
        }
    }
    match cdi::clean(dir, &kept, SystemTime::now()) {
        Ok(0) => {}
        Ok(n_removed) => info!(n_removed, "removed CDI specs of containers that are gone"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => warn!(dir = %dir.display(), %error, "cannot look for CDI specs of containers that are gone"),
    }
}

#[cfg(test)]
mod tests {
    use proto::kubelet::deviceplugin::ContainerAllocateResponse;
    use rstest::rstest;

    use super::*;
    use crate::builders::{pod, pods, shares, units};

    /// Two containers of one pod have two shares each, and one has memory units too, whose spec is the one that speaks.
    #[rstest]
    #[case::the_one_that_has_them("both", &["both"])]
    #[case::the_other("s2", &["s2"])]
    #[case::whichever_needs_more("s2", &["both", "s2"])]
    fn a_spec_is_that_of_the_container_which_has_the_ids(#[case] expected: &str, #[case] containers: &[&str]) {
        let both = ContainerRequest { name: "both".to_owned(), memory_units: 3, ..shares(2) };
        let pod = pod("a", 1, [both, shares(2)]);
        assert_eq!(holder(&pod, Served::Shared, 2, containers).unwrap().name, expected);
        assert_eq!(holder(&pod, Served::Shared, 1, containers), None);
    }

    /// IDs by letters; the node has pods a and b, and one that has ended.
    #[rstest]
    #[case::one_each("a=x b=y", "a=x b=y")]
    #[case::an_ended_pod_had_them_before("ended=x a=x", "a=x")]
    #[case::two_have_them("a=x b=x", "")]
    #[case::one_is_not_known_yet("a=x new=x b=y", "b=y")]
    #[case::two_containers_of_one_pod("a=x a=x", "a=x")]
    fn a_spec_is_written_anew_for_whom_it_surely_belongs_to(#[case] written: &str, #[case] expected: &str) {
        let ended = NodePod { stage: Stage::Terminal, ..pod("ended", 0, [units(1)]) };
        let pods = pods([pod("a", 1, [units(1)]), pod("b", 2, [units(1)]), ended]);
        let entry = |text: &str| {
            let (pod, id) = text.split_once('=').unwrap();
            let answer = ContainerAllocateResponse::default();
            Allocated { pod: PodUid::from(pod), container: "c".to_owned(), resource: Served::Memory, ids: vec![id.to_owned()], answer }
        };
        let written: Vec<_> = written.split_whitespace().map(entry).collect();
        let found = sole_holders(&pods, written.iter());
        let found: Vec<_> = found.iter().map(|(pod, entry)| format!("{}={}", pod.name, entry.ids[0])).collect();
        assert_eq!(found.join(" "), expected);
    }
}
