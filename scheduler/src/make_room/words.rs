//! Plans in words, for events and explanations. They name no pod, as the reader may have no right to see it.

use std::collections::BTreeMap;

use proto::memory_text::memory_text;

/// Pods on a node with the memory that each holds of each GPU, such as `2 pods with 14 GiB on GPU 3 of n17`.
pub(super) fn pods_on(held: &[BTreeMap<u32, u64>], node: &str) -> String {
    let mut gpus: BTreeMap<u32, u64> = BTreeMap::new();
    for (minor, bytes) in held.iter().flatten() {
        *gpus.entry(*minor).or_default() += bytes;
    }
    let memory = memory_text(gpus.values().sum());
    let minors: Vec<String> = gpus.keys().map(u32::to_string).collect();
    let (n_pods, minors, n_gpus) = (held.len(), minors.join(", "), gpus.len());
    let pods = if n_pods == 1 { "pod" } else { "pods" };
    let on = if n_gpus == 1 { "GPU" } else { "GPUs" };
    format!("{n_pods} {pods} with {memory} on {on} {minors} of {node}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_name_pods_by_number_memory_and_place() {
        let gib = 1 << 30;
        let two = pods_on(&[[(3, 6 * gib)].into(), [(3, 8 * gib)].into()], "n17");
        assert_eq!(two, "2 pods with 14 GiB on GPU 3 of n17");
        let one = pods_on(&[[(0, gib), (4, gib / 2)].into()], "n1");
        assert_eq!(one, "1 pod with 1.5 GiB on GPUs 0, 4 of n1");
    }
}
