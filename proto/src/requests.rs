//! The requests of a pod as kube-scheduler sums them up per node: every resource except CPU and memory, by name.
//!
//! Kubernetes' rule, as [`crate::host`] has it for CPU and memory. A quantity that does not parse counts as nothing.

use std::collections::BTreeMap;
use std::convert::Infallible;

use crate::host::{CPU, MEMORY};
use crate::pod::{Pod, QuantityText};
use crate::totals::{Summed, Totals};

/// Amounts by resource; fractions of a unit are rounded up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedRequests(pub BTreeMap<String, u64>);

impl NamedRequests {
    /// The requests of a pod.
    pub fn of_pod(pod: &Pod) -> Self {
        let Ok(totals) = Totals::of(&pod.spec, |container| {
            let resources = &container.resources;
            let limits = resources
                .limits
                .iter()
                .filter(|(name, _)| !resources.requests.contains_key(*name));
            Ok::<_, Infallible>(Self::of_amounts(resources.requests.iter().chain(limits)))
        });
        totals.peak().plus(&Self::of_amounts(&pod.spec.overhead))
    }

    fn of_amounts<'a>(amounts: impl IntoIterator<Item = (&'a String, &'a QuantityText)>) -> Self {
        let amounts = amounts
            .into_iter()
            .filter(|(name, _)| *name != CPU && *name != MEMORY);
        Self(amounts.map(|(name, text)| (name.clone(), text.units())).collect())
    }

    fn join(&self, other: &Self, join: fn(u64, u64) -> u64) -> Self {
        let mut joined = self.0.clone();
        for (name, amount) in &other.0 {
            let entry = joined.entry(name.clone()).or_default();
            *entry = join(*entry, *amount);
        }
        Self(joined)
    }
}

impl Summed for NamedRequests {
    fn plus(&self, other: &Self) -> Self {
        self.join(other, u64::saturating_add)
    }

    fn most(&self, other: &Self) -> Self {
        self.join(other, u64::max)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn containers_add_up_and_the_largest_init_container_counts() {
        let asks = |limits: serde_json::Value| json!({"name": "c", "resources": {"limits": limits}});
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {
            "initContainers": [asks(json!({"a/b": "5", "cpu": "9"}))],
            "containers": [
                asks(json!({"a/b": "2", "ephemeral-storage": "1Ki"})),
                {"name": "d", "resources": {"limits": {"a/b": "9"}, "requests": {"a/b": 1, "ephemeral-storage": "100m"}}},
            ],
            "overhead": {"memory": "1Gi", "ephemeral-storage": "1"},
        }}))
        .unwrap();
        let expected = [("a/b".to_owned(), 5), ("ephemeral-storage".to_owned(), 1026)];
        assert_eq!(NamedRequests::of_pod(&pod).0, expected.into());
    }
}
