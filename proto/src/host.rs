//! What pods ask of a node's CPU and memory, and what a node has of them: as kube-scheduler counts.
//!
//! Kubernetes' rule (`resourcehelper.PodRequests`): containers and sidecars are summed, or the largest init container
//! counts with the sidecars that were started before it, if that is more; what the pod as a whole asks for counts in place
//! of that, and its overhead besides. A quantity that does not parse counts as nothing: kube-scheduler is the judge.

use std::collections::BTreeMap;
use std::convert::Infallible;

use crate::node::Node;
use crate::pod::{Pod, QuantityText, ResourceRequirements};
use crate::totals::{Summed, Totals};

pub(crate) const CPU: &str = "cpu";
pub(crate) const MEMORY: &str = "memory";

/// CPU and memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HostResources {
    /// Thousandths of a CPU.
    pub cpu_milli: u64,
    /// Bytes.
    pub memory: u64,
}

impl HostResources {
    /// What a pod asks for.
    pub fn of_pod(pod: &Pod) -> Self {
        let Ok(totals) = Totals::of(&pod.spec, |container| {
            Ok::<_, Infallible>(Self::of_container(&container.resources))
        });
        let mut asked = totals.peak();
        if let Some(whole) = &pod.spec.resources {
            let whole = (
                amount(whole, CPU).map(QuantityText::thousandths),
                amount(whole, MEMORY).map(QuantityText::units),
            );
            asked = Self {
                cpu_milli: whole.0.unwrap_or(asked.cpu_milli),
                memory: whole.1.unwrap_or(asked.memory),
            };
        }
        asked.plus(&Self::of_amounts(&pod.spec.overhead))
    }

    /// What a node has for pods; `None` if it does not say.
    pub fn of_node(node: &Node) -> Option<Self> {
        let amounts = &node.status.allocatable;
        (amounts.contains_key(CPU) && amounts.contains_key(MEMORY)).then(|| Self::of_amounts(amounts))
    }

    fn of_amounts(amounts: &BTreeMap<String, QuantityText>) -> Self {
        Self {
            cpu_milli: amounts.get(CPU).map_or(0, QuantityText::thousandths),
            memory: amounts.get(MEMORY).map_or(0, QuantityText::units),
        }
    }

    fn of_container(resources: &ResourceRequirements) -> Self {
        Self {
            cpu_milli: amount(resources, CPU).map_or(0, QuantityText::thousandths),
            memory: amount(resources, MEMORY).map_or(0, QuantityText::units),
        }
    }
}

impl Summed for HostResources {
    fn plus(&self, other: &Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.saturating_add(other.cpu_milli),
            memory: self.memory.saturating_add(other.memory),
        }
    }

    fn most(&self, other: &Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.max(other.cpu_milli),
            memory: self.memory.max(other.memory),
        }
    }
}

/// What is requested; the API server requests what is limited and not requested.
fn amount<'a>(resources: &'a ResourceRequirements, resource: &str) -> Option<&'a QuantityText> {
    resources
        .requests
        .get(resource)
        .or_else(|| resources.limits.get(resource))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::HostResources;

    fn asks(cpu: &str, memory: &str) -> Value {
        json!({"resources": {"requests": {"cpu": cpu, "memory": memory}}})
    }

    #[rstest]
    #[case::nothing(json!({"containers": [{}]}), 0, 0)]
    #[case::sum(json!({"containers": [asks("1", "1Ki"), asks("500m", "1Ki")]}), 1500, 2048)]
    #[case::limits_only(json!({"containers": [{"resources": {"limits": {"cpu": 2, "memory": "1k"}}}]}), 2000, 1000)]
    #[case::larger_init(json!({"initContainers": [asks("3", "1")], "containers": [asks("1", "9")]}), 3000, 9)]
    #[case::sidecar_beside_both(
        json!({
            "initContainers": [{"restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}}, asks("3", "1")],
            "containers": [asks("2", "9")],
        }),
        4000,
        9
    )]
    #[case::sidecar_after_an_init(
        json!({
            "initContainers": [asks("3", "1"), {"restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}}],
            "containers": [asks("1", "9")],
        }),
        3000,
        9
    )]
    #[case::of_the_pod(json!({"resources": {"requests": {"cpu": "7"}}, "containers": [asks("1", "9")]}), 7000, 9)]
    #[case::overhead(json!({"overhead": {"cpu": "250m", "memory": "1"}, "containers": [asks("1", "9")]}), 1250, 10)]
    #[case::nonsense(json!({"containers": [asks("much", "-1"), asks("1", "0.5")]}), 1000, 1)]
    fn pods_ask_as_kube_scheduler_counts(#[case] spec: Value, #[case] cpu_milli: u64, #[case] memory: u64) {
        let pod = serde_json::from_value(json!({"spec": spec})).unwrap();
        assert_eq!(HostResources::of_pod(&pod), HostResources { cpu_milli, memory });
    }

    #[rstest]
    #[case::usual(json!({"cpu": "95500m", "memory": "1Gi", "pods": "110"}), Some((95_500, 1 << 30)))]
    #[case::silent(json!({"pods": "110"}), None)]
    fn nodes_have_what_is_allocatable(#[case] allocatable: Value, #[case] expected: Option<(u64, u64)>) {
        let node = serde_json::from_value(json!({"status": {"allocatable": allocatable}})).unwrap();
        let expected = expected.map(|(cpu_milli, memory)| HostResources { cpu_milli, memory });
        assert_eq!(HostResources::of_node(&node), expected);
    }
}
