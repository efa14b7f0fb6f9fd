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

/// Amounts by resource name; a resource that is absent counts as 0.
pub(crate) type Amounts<'a> = BTreeMap<&'a str, u64>;

/// The most that a pod uses at any one time, from the amounts of each container.
pub(crate) fn peak<'a, E>(
    spec: &'a PodSpec,
    amounts_of: impl Fn(&'a Container) -> Result<Amounts<'a>, E>,
) -> Result<Amounts<'a>, E> {
    let (mut running, mut sidecars, mut init_peak) = (Amounts::new(), Amounts::new(), Amounts::new());
    for container in &spec.init_containers {
        let mut amounts = amounts_of(container)?;
        // A sidecar goes on running, so it counts beside later init containers and beside the app containers.
        if container.is_sidecar() {
            combine(&mut sidecars, &amounts, u64::saturating_add);
            combine(&mut running, &amounts, u64::saturating_add);
        } else {
            // Of the other containers only the sidecars that were started before it run beside it.
            combine(&mut amounts, &sidecars, u64::saturating_add);
            combine(&mut init_peak, &amounts, u64::max);
        }
    }
    for container in &spec.containers {
        combine(&mut running, &amounts_of(container)?, u64::saturating_add);
    }
    // Init containers end before app containers start, so the larger of the two counts.
    combine(&mut running, &init_peak, u64::max);
    Ok(running)
}

/// Combines amounts with others, resource by resource.
fn combine<'a>(amounts: &mut Amounts<'a>, others: &Amounts<'a>, operation: fn(u64, u64) -> u64) {
    for (name, other) in others {
        let amount = amounts.entry(*name).or_default();
        *amount = operation(*amount, *other);
    }
}

/// The requests of a pod: thousandths of a CPU, and whole units, rounded up, of every other resource.
fn requests(pod: &Pod) -> Amounts<'_> {
    let Ok(mut requests) = peak(&pod.spec, |container| {
        Ok::<_, Infallible>(requirements(&container.resources))
    });
    // Pod-level resources replace the sum over the containers.
    for (name, amount) in pod.spec.resources.iter().flat_map(requirements) {
        if name == CPU || name == MEMORY {
            requests.insert(name, amount);
        }
    }
    // kube-scheduler adds the overhead to either.
    combine(&mut requests, &amounts(&pod.spec.overhead), u64::saturating_add);
    requests
}

/// The requests, and the limits of resources without a request: the API server makes the limit a request then.
fn requirements(resources: &ResourceRequirements) -> Amounts<'_> {
    let mut requirements = amounts(&resources.limits);
    requirements.extend(amounts(&resources.requests));
    requirements
}

fn amounts(quantities: &BTreeMap<String, QuantityText>) -> Amounts<'_> {
    let mut amounts = Amounts::new();
    for (name, quantity) in quantities {
        let is_cpu = name == CPU;
        let amount = if is_cpu {
            quantity.thousandths()
        } else {
            quantity.units()
        };
        amounts.insert(name.as_str(), amount);
    }
    amounts
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
        let requests = requests(pod);
        Self {
            cpu_milli: requests.get(CPU).copied().unwrap_or(0),
            memory: requests.get(MEMORY).copied().unwrap_or(0),
        }
    }

    /// The allocatable resources of a node; `None` if its status lacks them.
    pub fn of_node(node: &Node) -> Option<Self> {
        let amounts = &node.status.allocatable;
        Some(Self {
            cpu_milli: amounts.get(CPU)?.thousandths(),
            memory: amounts.get(MEMORY)?.units(),
        })
    }
}

/// The requests of a pod for every resource except CPU and memory, by name; fractions of a unit are rounded up.
pub fn named_requests(pod: &Pod) -> BTreeMap<String, u64> {
    let mut named = BTreeMap::new();
    for (name, amount) in requests(pod) {
        if name != CPU && name != MEMORY {
            named.insert(name.to_owned(), amount);
        }
    }
    named
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
