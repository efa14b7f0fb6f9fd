//! The text of the condition of a pod that found no node, which decides if kube-scheduler tries the pod again
//! by itself.
//!
//! kube-scheduler writes the condition only if the text differs from the one there. It takes its own write for
//! an event of the pod, and tries a pod again that an extender refused. A pod whose text stays the same waits
//! for an event in the cluster.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use proto::extender::Name;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::kube::SearchResult;
use super::occupancy::{FreeRoom, NodeUse};
use super::world::{ReplayInput, ReplayPod};
use kit::kube_scheduler::no_fit_message;

const NOT_ELIGIBLE: &str = "node(s) didn't match Pod's node affinity/selector";

/// The number of nodes that an extender refuses, by reason.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Misfits<'a>(BTreeMap<Cow<'a, str>, usize>);

/// The nodes that an extender refuses.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// The number of nodes, by reason.
    texts: BTreeMap<String, usize>,
    /// The number of nodes on which evicting pods may help.
    n_resolvable: usize,
}

impl Refused {
    /// From the two maps of a filter result: nodes that may fit once pods are evicted, and nodes on which that
    /// does not help.
    pub fn of(failed: Misfits<'_>, unresolvable: Misfits<'_>) -> Self {
        let n_resolvable = failed.0.values().sum();
        let mut texts = BTreeMap::new();
        for (text, n_nodes) in failed.0.into_iter().chain(unresolvable.0) {
            *texts.entry(text.into_owned()).or_default() += n_nodes;
        }
        Self { texts, n_resolvable }
    }
}

/// The text of the condition of a pod for which none of the nodes was left that kube-scheduler had found.
pub fn message(
    world: &ReplayInput,
    occupancy: &FreeRoom,
    pod: &ReplayPod,
    found: &SearchResult,
    refused: &Refused,
) -> String {
    let n_nodes = world.nodes.len();
    let (mut n_not_eligible, mut n_resolvable) = (0, refused.n_resolvable);
    let mut shortages = Shortages::of(world, pod);
    for node in (found.first..n_nodes).chain(0..found.first).take(found.n_seen) {
        if world.is_eligible(pod.eligible, node) {
            n_resolvable += usize::from(
                occupancy
                    .node(node)
                    .is_some_and(|free| shortages.count(free, pod)),
            );
        } else {
            n_not_eligible += 1;
        }
    }
    let own = shortages
        .0
        .iter()
        .map(|(text, n_nodes)| (text.as_str(), *n_nodes))
        .chain([(NOT_ELIGIBLE, n_not_eligible)]);
    let theirs = refused
        .texts
        .iter()
        .map(|(text, n_nodes)| (text.as_str(), *n_nodes));
    no_fit_message(n_nodes, own.chain(theirs), n_resolvable)
}

/// The number of nodes by the reasons of kube-scheduler's own filter `NodeResourcesFit`: CPU, memory, and the
/// other requested resources.
struct Shortages(Vec<(String, usize)>);

impl Shortages {
    /// A count, still zero, for each resource that the pod requests, under kube-scheduler's words for its shortage.
    fn of(world: &ReplayInput, pod: &ReplayPod) -> Self {
        let columns = pod
            .extended
            .iter()
            .filter_map(|(column, _)| world.columns.get(*column))
            .map(String::as_str);
        Self(
            ["cpu", "memory"]
                .into_iter()
                .chain(columns)
                .map(|resource| (format!("Insufficient {resource}"), 0))
                .collect(),
        )
    }

    /// Counts one node; returns true if it is short of anything.
    fn count(&mut self, free: &NodeUse, pod: &ReplayPod) -> bool {
        let extended = pod.extended.iter().map(|wanted| free.has_extended(*wanted));
        let has_room = [free.has_cpu(pod), free.has_memory(pod)]
            .into_iter()
            .chain(extended);
        let mut is_short = false;
        for ((_, n_nodes), _) in self.0.iter_mut().zip(has_room).filter(|(_, has_room)| !has_room) {
            *n_nodes += 1;
            is_short = true;
        }
        is_short
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Misfits<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MisfitsVisitor)
    }
}

struct MisfitsVisitor;

impl<'de> Visitor<'de> for MisfitsVisitor {
    type Value = Misfits<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text for each node name")
    }

    /// Counts the nodes of a refusal by its text.
    fn visit_map<A: MapAccess<'de>>(self, mut nodes: A) -> Result<Self::Value, A::Error> {
        let mut misfits = Misfits::default();
        while let Some((_, text)) = nodes.next_entry::<IgnoredAny, Name<'de>>()? {
            *misfits.0.entry(text.0).or_default() += 1;
        }
        Ok(misfits)
    }
}

#[cfg(test)]
mod tests {
    use super::super::objects;
    use super::super::trace::{nodes_of, pods_of};
    use super::*;

    #[test]
    fn nodes_are_counted_by_refusal_text() {
        let read = |json| serde_json::from_str::<Misfits<'_>>(json).unwrap();
        let refused = Refused::of(read(r#"{"a":"full","b":"a \"b\""}"#), read(r#"{"c":"full"}"#));
        assert_eq!(
            refused,
            Refused {
                texts: [("full".to_owned(), 2), (r#"a "b""#.to_owned(), 1)].into(),
                n_resolvable: 2
            }
        );
    }

    /// The nodes of the sample alone count, from the one on at which the search began.
    #[test]
    fn the_text_is_that_of_kube_scheduler() {
        let nodes = "sn,cpu_milli,memory_mib,gpu,model\na,1000,1024,1,T4\nb,1000,1024,1,P100\nc,500,1024,0,T4\nd,1000,1024,1,T4\n";
        let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np,1000,512,1,500,T4\n";
        let world = objects::world(&nodes_of(nodes).unwrap(), &pods_of(pods).unwrap());
        let found = SearchResult {
            nodes: vec![3],
            first: 1,
            n_seen: 3,
        };
        let refused = Refused {
            texts: [("no device".to_owned(), 1)].into(),
            n_resolvable: 0,
        };
        assert_eq!(
            message(&world, &FreeRoom::empty(&world), &world.pods[0], &found, &refused),
            "0/4 nodes are available: 1 Insufficient cpu, 1 Insufficient koordinator.sh/gpu-core, \
             1 Insufficient koordinator.sh/gpu-memory-ratio, 1 Insufficient koordinator.sh/gpu.shared, 1 no device, \
             1 node(s) didn't match Pod's node affinity/selector. no new claims to deallocate, preemption: 0/4 nodes are available: \
             1 No preemption victims found for incoming pod, 3 Preemption is not helpful for scheduling."
        );
    }
}
