//! A pod's requests, totalled over its containers as kube-scheduler does (`PodRequests` in
//! `k8s.io/component-helpers/resource`).
//!
//! App containers and sidecars are summed. An ordinary init container runs before them, beside the sidecars that were started
//! before it; the larger of the two sums counts. A quantity that does not parse counts as nothing: the API server refuses it.

use std::collections::BTreeMap;
use std::convert::Infallible;

use crate::node::Node;
use crate::pod::{Container, Pod, PodSpec, QuantityText, ResourceRequirements};

/// The resource of CPU time.
pub const CPU: &str = "cpu";
/// The resource of main memory.
pub const MEMORY: &str = "memory";

/// Amounts of several resources, which can be added and compared resource by resource.
pub(crate) trait Amounts: Default {
    /// The sum of each resource.
    fn plus(&self, other: &Self) -> Self;
    /// The larger amount of each resource.
    fn max(&self, other: &Self) -> Self;
}

/// The most that a pod uses at any one time, from the amounts of each container.
///
/// # Errors
/// The first error of `amounts_of`.
pub(crate) fn peak<'a, T: Amounts, E>(
    spec: &'a PodSpec,
    amounts_of: impl Fn(&'a Container) -> Result<T, E>,
) -> Result<T, E> {
    let (mut running, mut sidecars, mut init_peak) = (T::default(), T::default(), T::default());
    for container in &spec.init_containers {
        let amounts = amounts_of(container)?;
        // A sidecar goes on running, so it counts beside later init containers and beside the app containers.
        if container.is_sidecar() {
            sidecars = sidecars.plus(&amounts);
            running = running.plus(&amounts);
        } else {
            init_peak = init_peak.max(&sidecars.plus(&amounts));
        }
    }
    for container in &spec.containers {
        running = running.plus(&amounts_of(container)?);
    }
    Ok(running.max(&init_peak))
}

/// CPU and main memory, of a node or of a pod's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HostResources {
    /// Thousandths of a CPU.
    pub cpu_milli: u64,
    /// Bytes of memory.
    pub memory: u64,
}

impl HostResources {
    /// The requests of a pod.
    pub fn of_pod(pod: &Pod) -> Self {
        let Ok(mut requests) = peak(&pod.spec, |container| {
            Ok::<_, Infallible>(Self::of_container(&container.resources))
        });
        // Pod-level resources replace the sum over the containers.
        if let Some(resources) = &pod.spec.resources {
            if let Some(cpu) = effective_request(resources, CPU) {
                requests.cpu_milli = cpu.thousandths();
            }
            if let Some(memory) = effective_request(resources, MEMORY) {
                requests.memory = memory.units();
            }
        }
        // kube-scheduler adds the overhead to either.
        requests.plus(&Self::of_amounts(&pod.spec.overhead))
    }

    /// The allocatable resources of a node; `None` if its status lacks them.
    pub fn of_node(node: &Node) -> Option<Self> {
        let amounts = &node.status.allocatable;
        (amounts.contains_key(CPU) && amounts.contains_key(MEMORY)).then(|| Self::of_amounts(amounts))
    }

    /// The CPU and memory among amounts by resource name.
    fn of_amounts(amounts: &BTreeMap<String, QuantityText>) -> Self {
        Self {
            cpu_milli: amounts.get(CPU).map_or(0, QuantityText::thousandths),
            memory: amounts.get(MEMORY).map_or(0, QuantityText::units),
        }
    }

    /// The CPU and memory that a container requests.
    fn of_container(resources: &ResourceRequirements) -> Self {
        Self {
            cpu_milli: effective_request(resources, CPU).map_or(0, QuantityText::thousandths),
            memory: effective_request(resources, MEMORY).map_or(0, QuantityText::units),
        }
    }
}

impl Amounts for HostResources {
    fn plus(&self, other: &Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.saturating_add(other.cpu_milli),
            memory: self.memory.saturating_add(other.memory),
        }
    }

    fn max(&self, other: &Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.max(other.cpu_milli),
            memory: self.memory.max(other.memory),
        }
    }
}

/// The request, or the limit where there is no request: the API server makes the limit a request then.
fn effective_request<'a>(resources: &'a ResourceRequirements, resource: &str) -> Option<&'a QuantityText> {
    let ResourceRequirements { limits, requests } = resources;
    requests.get(resource).or_else(|| limits.get(resource))
}

/// Amounts by resource name; a resource that one side lacks counts as 0 there.
impl<K: Clone + Ord> Amounts for BTreeMap<K, u64> {
    fn plus(&self, other: &Self) -> Self {
        combine(self, other, u64::saturating_add)
    }

    fn max(&self, other: &Self) -> Self {
        combine(self, other, u64::max)
    }
}

/// The amounts of both, combined resource by resource.
fn combine<K: Clone + Ord>(
    one: &BTreeMap<K, u64>,
    other: &BTreeMap<K, u64>,
    combine: fn(u64, u64) -> u64,
) -> BTreeMap<K, u64> {
    let mut combined = one.clone();
    for (name, amount) in other {
        let entry = combined.entry(name.clone()).or_default();
        *entry = combine(*entry, *amount);
    }
    combined
}

/// The requests of a pod for every resource except CPU and memory, by name; fractions of a unit are rounded up.
pub fn named_requests(pod: &Pod) -> BTreeMap<String, u64> {
    let Ok(requests) = peak(&pod.spec, |container| {
        let ResourceRequirements { limits, requests } = &container.resources;
        // The API server makes a limit the request of a resource that has none.
        let mut named = named_amounts(limits);
        named.extend(named_amounts(requests));
        Ok::<_, Infallible>(named)
    });
    requests.plus(&named_amounts(&pod.spec.overhead))
}

/// The whole units of every amount except CPU and memory.
fn named_amounts(amounts: &BTreeMap<String, QuantityText>) -> BTreeMap<String, u64> {
    let named = amounts.iter().filter(|(name, _)| *name != CPU && *name != MEMORY);
    named.map(|(name, text)| (name.clone(), text.units())).collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::{HostResources, named_requests};
    use crate::pod::Pod;

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
    #[case::pod_level_resources(json!({"resources": {"requests": {"cpu": "7"}}, "containers": [asks("1", "9")]}), 7000, 9)]
    #[case::overhead(json!({"overhead": {"cpu": "250m", "memory": "1"}, "containers": [asks("1", "9")]}), 1250, 10)]
    #[case::nonsense(json!({"containers": [asks("much", "-1"), asks("1", "0.5")]}), 1000, 1)]
    fn pods_ask_as_kube_scheduler_counts(#[case] spec: Value, #[case] cpu_milli: u64, #[case] memory: u64) {
        let pod = serde_json::from_value(json!({"spec": spec})).unwrap();
        assert_eq!(HostResources::of_pod(&pod), HostResources { cpu_milli, memory });
    }

    #[rstest]
    #[case::usual(json!({"cpu": "95500m", "memory": "1Gi", "pods": "110"}), Some((95_500, 1 << 30)))]
    #[case::without_cpu(json!({"pods": "110"}), None)]
    fn the_totals_of_a_node_are_its_allocatable_resources(
        #[case] allocatable: Value,
        #[case] expected: Option<(u64, u64)>,
    ) {
        let node = serde_json::from_value(json!({"status": {"allocatable": allocatable}})).unwrap();
        let expected = expected.map(|(cpu_milli, memory)| HostResources { cpu_milli, memory });
        assert_eq!(HostResources::of_node(&node), expected);
    }

    #[test]
    fn requests_are_the_sum_of_containers_or_the_largest_init_container() {
        let asks = |limits: Value| json!({"name": "c", "resources": {"limits": limits}});
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
        assert_eq!(named_requests(&pod), expected.into());
    }
}
