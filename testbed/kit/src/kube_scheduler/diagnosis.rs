//! The reasons for which nodes were refused for a pod, and the message that kube-scheduler makes of them.

use std::collections::BTreeMap;

/// Why one node was refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilterRefusal {
    /// In the filters' or the extender's words.
    pub reasons: Vec<String>,
    /// True if evicting pods cannot help.
    pub unresolvable: bool,
    /// True if an extender has refused it.
    pub by_extender: bool,
}

/// The refusals of one scheduling cycle, by node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulingDiagnosis {
    /// Number of nodes in the cluster.
    pub n_nodes: usize,
    /// By node name.
    pub refusals: BTreeMap<String, FilterRefusal>,
    /// The reason for which no node was looked at, if there is one; the refusals of all nodes repeat it.
    pub prefilter: Option<String>,
}

impl SchedulingDiagnosis {
    /// Nodes on which kube-scheduler would try to preempt.
    pub fn preemption_candidates(&self) -> Vec<&str> {
        self.refusals
            .iter()
            .filter(|(_, refusal)| !refusal.unresolvable)
            .map(|(name, _)| name.as_str())
            .collect()
    }

    /// Returns true if an extender refused a node; kube-scheduler then retries the pod after any event, also of the pod itself.
    pub fn is_by_extender(&self) -> bool {
        self.refusals.values().any(|refusal| refusal.by_extender)
    }

    /// Adds the reason of an extender. A node that one extender has called unresolvable stays unresolvable.
    pub(super) fn refuse(&mut self, node: &str, reason: &str, unresolvable: bool) {
        let refusal = self.refusals.entry(node.to_owned()).or_default();
        refusal.reasons.push(reason.to_owned());
        refusal.unresolvable |= unresolvable;
        refusal.by_extender = true;
    }

    /// The message of the pod's condition and event, as it is where preemption finds no victim.
    pub fn message(&self) -> String {
        if let Some(reason) = &self.prefilter {
            // The plugin DynamicResources finds no state of the pod, and its error ends PostFilter before preemption.
            return format!("0/{} nodes are available: {reason}. not found", self.n_nodes);
        }
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for reason in self.refusals.values().flat_map(|refusal| &refusal.reasons) {
            *counts.entry(reason).or_default() += 1;
        }
        no_fit_message(self.n_nodes, counts, self.preemption_candidates().len())
    }

    /// Refuses a node on which evictions cannot help.
    pub(super) fn exclude(&mut self, node: &str, reason: &str) {
        let refusal = FilterRefusal {
            reasons: vec![reason.to_owned()],
            unresolvable: true,
            by_extender: false,
        };
        self.refusals.insert(node.to_owned(), refusal);
    }
}

/// The message that nothing fits, from the number of nodes, the number of nodes by reason, and the number of
/// nodes on which preemption looked for victims.
pub fn no_fit_message<'a>(
    n_nodes: usize,
    counts: impl IntoIterator<Item = (&'a str, usize)>,
    n_candidates: usize,
) -> String {
    if n_nodes == 0 {
        return "no nodes available to schedule pods".to_owned();
    }
    let preemption = histogram([
        ("No preemption victims found for incoming pod", n_candidates),
        (
            "Preemption is not helpful for scheduling",
            n_nodes.saturating_sub(n_candidates),
        ),
    ]);
    let head = format!("0/{n_nodes} nodes are available:");
    // The plugin DynamicResources, on by default from 1.34 on, comes before preemption, and has a text for pods without claims
    // too.
    format!(
        "{head} {}. no new claims to deallocate, preemption: {head} {preemption}.",
        histogram(counts)
    )
}

/// `1 this, 2 that`, sorted as text.
fn histogram<'a>(counts: impl IntoIterator<Item = (&'a str, usize)>) -> String {
    let counts = counts.into_iter().filter(|(_, count)| *count > 0);
    let mut parts: Vec<String> = counts
        .map(|(reason, count)| format!("{count} {reason}"))
        .collect();
    parts.sort();
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_is_that_of_kube_scheduler() {
        let mut diagnosis = SchedulingDiagnosis {
            n_nodes: 3,
            ..SchedulingDiagnosis::default()
        };
        diagnosis.refuse("n1", "Insufficient aliyun.com/gpu-mem", false);
        diagnosis.refuse("n2", "no GPU fits", true);
        diagnosis.refuse("n3", "no GPU fits", true);
        assert_eq!(
            diagnosis.message(),
            "0/3 nodes are available: 1 Insufficient aliyun.com/gpu-mem, 2 no GPU fits. \
             no new claims to deallocate, preemption: 0/3 nodes are available: 1 No preemption victims found for incoming pod, \
             2 Preemption is not helpful for scheduling."
        );
        assert_eq!(diagnosis.preemption_candidates(), ["n1"]);
    }

    #[test]
    fn a_reason_before_all_filters_stands_without_a_number() {
        let mut diagnosis = SchedulingDiagnosis {
            n_nodes: 1,
            prefilter: Some("pod affinity terms conflict".to_owned()),
            ..SchedulingDiagnosis::default()
        };
        diagnosis.exclude("n1", "pod affinity terms conflict");
        assert_eq!(
            diagnosis.message(),
            "0/1 nodes are available: pod affinity terms conflict. not found",
            "seen on 1.36.2"
        );
    }

    #[test]
    fn the_message_of_a_cluster_without_nodes() {
        assert_eq!(
            SchedulingDiagnosis::default().message(),
            "no nodes available to schedule pods"
        );
    }
}
