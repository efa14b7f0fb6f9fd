//! Plans in words, for events and explanations. They name no pod, as the reader may have no right to see it.

use std::collections::BTreeMap;

use proto::memory_text::memory_text;

/// Pods that have been evicted on one node.
#[derive(Debug, Default)]
pub(super) struct EvictedPods {
    n_pods: usize,
    /// The memory that they held of each GPU, by minor number.
    gpus: BTreeMap<u32, u64>,
}

impl EvictedPods {
    /// Adds a pod by the memory that it held of each GPU.
    pub(super) fn add(&mut self, held: BTreeMap<u32, u64>) {
        self.n_pods += 1;
        for (minor, bytes) in held {
            *self.gpus.entry(minor).or_default() += bytes;
        }
    }

    /// Returns true if no pod has been evicted.
    pub(super) const fn is_empty(&self) -> bool {
        self.n_pods == 0
    }

    /// The pods in words, as [`pods_on`].
    pub(super) fn on(&self, node: &str) -> String {
        pods_on(self.n_pods, &self.gpus, node)
    }
}

/// A number of pods with the memory that they hold of GPUs of a node, such as `2 pods with 14 GiB on GPU 3 of n17`.
pub(super) fn pods_on(n_pods: usize, gpus: &BTreeMap<u32, u64>, node: &str) -> String {
    let memory = memory_text(gpus.values().sum());
    let minors: Vec<String> = gpus.keys().map(u32::to_string).collect();
    let pods = if n_pods == 1 { "pod" } else { "pods" };
    let on = if minors.len() == 1 { "GPU" } else { "GPUs" };
    format!(
        "{n_pods} {pods} with {memory} on {on} {} of {node}",
        minors.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_name_pods_by_number_memory_and_place() {
        let gib = 1 << 30;
        let two = pods_on(2, &[(3, 14 * gib)].into(), "n17");
        assert_eq!(two, "2 pods with 14 GiB on GPU 3 of n17");
        let one = pods_on(1, &[(0, gib), (4, gib / 2)].into(), "n1");
        assert_eq!(one, "1 pod with 1.5 GiB on GPUs 0, 4 of n1");
    }
}
