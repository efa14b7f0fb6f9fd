//! The sentence on a pod whose record names GPUs that its node does not have any more.

use std::collections::BTreeMap;

use proto::read_api::{Holder, Node};

use crate::format::memory;

/// The sentence on `pod`: the GPUs that are gone, the bytes that the scheduler counts on others by their minors, and the remedy.
pub(crate) fn sentence(pod: &str, node: &str, gone: &[String], counted_on: &BTreeMap<u32, u64>) -> String {
    let mut parts = Vec::new();
    for (minor, bytes) in counted_on {
        parts.push(format!("{} on GPU {minor}", memory(*bytes)));
    }
    let counted = match parts.as_slice() {
        [] => "no GPU is left to count it on".to_owned(),
        parts => format!("the scheduler counts {} for it", parts.join(", ")),
    };
    let gone = gone.join(", ");
    format!(
        "{pod}: GPU {gone} of its record is gone from node {node}; {counted}. Delete the pod to reschedule it."
    )
}

/// The sentence on each pod whose record names a GPU that is gone, and that is counted on another GPU of its node; by UID.
pub(crate) fn sentences(nodes: &[Node]) -> BTreeMap<String, String> {
    let mut sentences = BTreeMap::new();
    for node in nodes {
        // A pod is among the holders of each GPU that it is counted on.
        let mut by_uid: BTreeMap<&str, (&Holder, BTreeMap<u32, u64>)> = BTreeMap::new();
        for gpu in &node.gpus {
            for holder in gpu.holders.iter().filter(|holder| !holder.gone.is_empty()) {
                let (_, counted_on) = by_uid.entry(&holder.uid).or_insert((holder, BTreeMap::new()));
                *counted_on.entry(gpu.minor).or_default() += holder.memory;
            }
        }
        for (uid, (holder, counted_on)) in by_uid {
            let text = sentence(&holder.display_name(), &node.name, &holder.gone, &counted_on);
            sentences.insert(uid.to_owned(), text);
        }
    }
    sentences
}

#[cfg(test)]
mod tests {
    use proto::read_api::{Gpu, Holder};
    use rstest::rstest;

    use super::*;

    const GIB: u64 = 1 << 30;

    #[rstest]
    #[case::on_one(
        &[(1, 8 * GIB)],
        "team/a: GPU GPU-old of its record is gone from node n1; the scheduler counts 8.0 GiB on GPU 1 for it. Delete the pod to \
         reschedule it."
    )]
    #[case::on_all(
        &[(0, 8 * GIB), (1, 8 * GIB)],
        "team/a: GPU GPU-old of its record is gone from node n1; the scheduler counts 8.0 GiB on GPU 0, 8.0 GiB on GPU 1 for it. \
         Delete the pod to reschedule it."
    )]
    fn one_sentence_for_each_pod(#[case] counted_on: &[(u32, u64)], #[case] expected: &str) {
        let gpu = |(minor, memory): &(u32, u64)| Gpu {
            minor: *minor,
            holders: vec![Holder {
                namespace: "team".to_owned(),
                name: "a".to_owned(),
                uid: "u".to_owned(),
                memory: *memory,
                gone: vec!["GPU-old".to_owned()],
                ..Holder::default()
            }],
            ..Gpu::default()
        };
        let mut node = Node {
            name: "n1".to_owned(),
            gpus: counted_on.iter().map(gpu).collect(),
            ..Node::default()
        };
        let found = sentences(std::slice::from_ref(&node));
        assert_eq!(found.into_values().collect::<Vec<_>>(), [expected]);
        for gpu in &mut node.gpus {
            gpu.holders[0].gone.clear();
        }
        assert_eq!(sentences(&[node]), BTreeMap::new());
    }

    #[test]
    fn a_node_without_gpus_counts_nothing() {
        assert_eq!(
            sentence("a", "n1", &["minor 3".to_owned()], &BTreeMap::new()),
            "a: GPU minor 3 of its record is gone from node n1; no GPU is left to count it on. Delete the pod to reschedule it."
        );
    }
}
